"""Folders of sites that earlier versions wrote: converted once, with everything in force that was before."""

from __future__ import annotations

import tarfile
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation, printed, served_sites

import fedstat as fs
from fedstat.errors import ConsentError, EngineError, PolicyError
from fedstat.federation import state_formats
from fedstat.federation.audit import ledger_file
from fedstat.federation.audit.ledger_file import ANSWERED_FILENAME, LEDGER_FILENAME, read_ledger
from fedstat.federation.disclosure import release_history
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.files import read_arrays
from fedstat.federation.transport.site_folder import UPGRADED, load_identity, open_site

STATES = Path(__file__).parent / "states"
COMMITS = ("9b108430", "1576e8f3")
SPENT = Fraction(74881391981543329, 2**63)
"""The charge of ``make_state.py``: a third of the rho of epsilon 1 at delta 1e-6, as the ledger has it."""


@pytest.fixture(params=COMMITS)
def home(request, tmp_path):
    """The folders of a site and its coordinator, as a commit left them."""
    with tarfile.open(STATES / f"{request.param}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="tar")
    tmp_path.joinpath("North").chmod(0o700)
    tmp_path.joinpath("North/policy.toml").write_text(Policy.strict(masked_only=False).to_toml())
    return tmp_path


def site_ledger(home):
    return read_ledger(home / "North", "North", load_identity(home / "North").public)


def copies(home):
    return sorted(home.joinpath("North").glob(f"{UPGRADED}-*"))


def test_a_site_of_an_earlier_version_starts_with_its_ledger_history_approvals_and_budget(home):
    before = home / "North" / ANSWERED_FILENAME
    earlier, content = before.read_bytes(), (home / "North" / LEDGER_FILENAME).read_bytes()
    groups = read_arrays(earlier)["c"]
    lines = list[str]()
    site = open_site(home / "North", lines.append)
    released = site.data.memory.released
    # the same groups of the same 120 rows, none of which counts as changed
    assert released.basis.shape == tuple(groups) and released.groups[0].sum() == 120
    assert (len(site.data.memory.gone), site.data.memory.changes) == (0, (0, 0, 0))
    assert site.site_ledger.charges.spent == SPENT
    assert [one.verdict for one in site.site_ledger.decisions.values()] == ["approved"]
    assert sum(one.kind == "refusal" for c in site.site_ledger.chains for one in c.entries) == 2
    site.site_ledger.store.close()
    # once, with copies of what was there
    (kept,) = copies(home)
    assert (kept / ANSWERED_FILENAME).read_bytes() == earlier
    assert (kept / LEDGER_FILENAME).read_bytes() == content
    assert state_formats.HISTORY.read_arrays(read_arrays(before.read_bytes()), "") == (
        state_formats.HISTORY.number
    )
    assert any("converted" in line and kept.name in line for line in lines)
    open_site(home / "North", lines.append).site_ledger.store.close()
    assert copies(home) == [kept]


def test_a_plan_of_another_form_is_named_and_can_be_proposed_again(home):
    waiting = list(home.joinpath("North/pending").glob("*.json"))
    assert len(waiting) == 1
    lines = list[str]()
    site = open_site(home / "North", lines.append)
    open_plans = site.approvals.store.waiting()
    site.site_ledger.store.close()
    said = any("Plans that waited" in line and "1 removed" in line for line in lines)
    # either it waits still, or the owner is told, and a copy is there
    assert (len(open_plans) == 1) is not said
    assert said is (copies(home)[0] / waiting[0].name).exists()


def test_an_upgraded_site_answers_and_compares_with_what_the_earlier_version_released(home):
    records = pd.read_csv(home / "north.csv")
    design = np.column_stack([np.ones(len(records)), records["age"]])
    expected = np.linalg.lstsq(design, records["x"], rcond=None)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with served_sites(home, ["North"]):
            partition = fs.ClientPartition.connect(home / "study")
            found = fs.FederatedOLS.from_formula("x ~ age", partition).fit(masked=False)
            np.testing.assert_allclose(found.params, expected, rtol=1e-9)
        # without one record, the difference to a sum of the earlier version would be this record
        records.drop(index=17).to_csv(home / "north.csv", index=False)
        with served_sites(home, ["North"]):
            partition = fs.ClientPartition.connect(home / "study")
            with pytest.raises(PolicyError, match="depends on rows"):
                fs.FederatedOLS.from_formula("x ~ age", partition).fit(masked=False)


@pytest.fixture
def current(tmp_path):
    frame = pd.DataFrame({"y": np.arange(40.0), "id": [f"p{i}" for i in range(40)]})
    make_federation(tmp_path, {"A": frame})
    return tmp_path / "A"


@pytest.mark.parametrize("what", ["LEDGER", "HISTORY"])
def test_the_state_of_a_later_version_is_named_and_left_alone(what, current, capsys, monkeypatch):
    later = replace(getattr(state_formats, what), number=99)
    with monkeypatch.context() as patched:
        patched.setattr(ledger_file if what == "LEDGER" else release_history, what, later)
        patched.setattr(state_formats, "VERSION", "9.9.0")
        site = open_site(current)
        site.site_ledger.is_earlier = True
        ledger_file.mark_upgrade(site.site_ledger)
        memory = release_history.ReleaseHistory(release_history.ReleasedGroups.none(40))
        site.site_ledger.keep_answered(memory.to_arrays(site.data.table, site.data.mark_key), 40)
        site.site_ledger.store.close()
    content = {path.name: path.read_bytes() for path in current.iterdir() if path.is_file()}
    with pytest.raises(EngineError, match=r"written by fedstat 9\.9\.0 \(format 99\)") as error:
        open_site(current)
    assert "Install fedstat 9.9.0" in str(error.value) and "declare-loss" not in str(error.value)
    for command, code in (("serve", 1), ("check", 1), ("health", 1)):
        assert "Install fedstat 9.9.0" in printed(capsys, "site", command, current, code=code), command
    # a loss is not declared by mistake
    capsys.readouterr()
    assert main(["site", "declare-loss", str(current), "--reason", "upgrade"]) != 0
    kept = {path.name: path.read_bytes() for path in current.iterdir() if path.is_file()}
    assert {name: kept[name] for name in content if name != "status.json"} == {
        name: one for name, one in content.items() if name != "status.json"
    }


def test_old_words_of_an_owners_files_name_the_new_ones(home, capsys):
    study, site = home / "study", home / "North"
    file, policy = study / "federation.toml", site / "policy.toml"
    file.write_text(file.read_text().replace("transport =", "carrier ="))
    found = printed(capsys, "federation", "status", study, code=1)
    assert "'carrier' is now called 'transport'" in found
    for line, expected in (
        ('answers_kept = "all"', "'answers_kept' is now called 'remember'"),
        ('reasons = "told"', "'told', which is now called 'sent'"),
    ):
        policy.write_text(line)
        assert expected in printed(capsys, "site", "check", site, code=1)


def test_every_file_of_the_state_carries_the_number_of_its_format(tmp_path):
    frame = pd.DataFrame({"y": np.arange(40.0), "x": np.arange(40.0) % 7})
    make_federation(tmp_path, {"A": frame}, policy=Policy(approval="owner"))
    with served_sites(tmp_path, ["A"]), pytest.raises(ConsentError):
        fs.FederatedOLS.from_formula("y ~ x", fs.ClientPartition.connect(tmp_path / "study")).fit(
            masked=False
        )
    numbered = f'"{state_formats.NUMBER}"'
    for path in ("ledger.jsonl", "in_force.json", "status.json", "pending"):
        (file,) = (tmp_path / "A" / path).glob("*.json") if path == "pending" else [tmp_path / "A" / path]
        assert numbered in file.read_text(), path
