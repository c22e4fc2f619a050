"""The check of speed fails above 1.5 times the stored ratio, and only there."""

import bench_user
import pytest


@pytest.mark.parametrize(("seconds", "slow"), [(2.9, 0), (3.1, 1)])
def test_a_ratio_above_the_limit_fails(monkeypatch, tmp_path, seconds, slow):
    row = bench_user.CHECKS["vfem"]
    stored = tmp_path / "ratios.csv"
    stored.write_text("row,ratio\nvfem,2.0\n")
    monkeypatch.setattr(bench_user, "RATIOS", stored)
    found = {row.ours: {"cpu": seconds}, row.peers[0]: {"cpu": 1.0}}
    monkeypatch.setattr(bench_user, "take_turns", lambda *arguments: found)
    assert bench_user.check(["vfem"], store=False) == slow
    assert bench_user.check(["vfem"], store=True) == 0
    assert stored.read_text() == f"row,ratio\nvfem,{seconds}\n"


def test_stored_ratios_are_those_of_the_check():
    assert [line["row"] for line in bench_user.read_csv(bench_user.RATIOS)] == list(bench_user.CHECKS)
