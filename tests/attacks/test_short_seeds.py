"""An attacker with one label and its keyed hash tries seeds until one fits: seeds are long and random."""

import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PartitionError
from fedstat.federation.design.horizontal_steps import hash_labels
from fedstat.federation.transport.site_folder import open_site, read_description
from fedstat.models.vfem.covariance.cross_products import seed_of_stage
from fedstat.operator.command_line import main

LABELS = [f"NHS{number:07d}" for number in range(40)]


@pytest.fixture
def folder(tmp_path):
    pd.DataFrame({"x": [1.0, 2.0, 3.0]}).to_csv(tmp_path / "records.csv", index=False)
    data = ["--data", str(tmp_path / "records.csv")]
    assert main(["site", "init", str(tmp_path / "North"), "--name", "North", *data]) == 0
    return tmp_path / "North"


def test_a_short_seed_is_found_from_one_label():
    hashed = set(hash_labels(pd.Index(LABELS, dtype=object), 4711).tolist())
    one = pd.Index(LABELS[:1], dtype=object)
    found = next(seed for seed in range(10**4) if hash_labels(one, seed)[0] in hashed)
    assert set(hash_labels(pd.Index(LABELS, dtype=object), found).tolist()) == hashed


@pytest.mark.parametrize(
    "seed",
    [
        "4711",
        '"4711"',
        f'"{4711:032x}"',
        '"' + "a" * 32 + '"',
        '"' + "correct horse battery staple 32!" + '"',
    ],
)
def test_a_site_is_not_served_with_a_short_one(folder, seed):
    path = folder / "site.toml"
    path.write_text(path.read_text().replace('seed = ""', f"seed = {seed}"))
    with pytest.raises(
        PartitionError, match=r"North: seed: expected 32 hexadecimal digits .*site seed FOLDER"
    ):
        open_site(folder)
    assert main(["site", "serve", str(folder), "--once"]) == 1


def test_the_command_draws_one_and_the_site_holds_all_of_it(folder, capsys):
    assert main(["site", "seed", str(folder)]) == 0
    printed = capsys.readouterr().out
    seed = read_description(folder).seed
    assert f'seed = "{seed}"' in printed and (folder / "site.toml").stat().st_mode & 0o777 == 0o600
    site = open_site(folder)
    assert site._data.common_seed == int(seed, 16)
    site.site_ledger.store.close()
    assert main(["site", "seed", str(folder)]) == 1
    assert "has a seed, which" in capsys.readouterr().err
    assert read_description(folder).seed == seed


def test_all_bits_of_a_long_one_count():
    """In hashes of labels and, of the sketches, in the seeds of all stages."""
    index = pd.Index(LABELS, dtype=object)
    seed = 0x6B1F0C52A94E7D3386E0D1B7F2A5C948
    others = [seed ^ (1 << bit) for bit in (0, 63, 64, 127)]
    assert not any((hash_labels(index, seed) == hash_labels(index, other)).any() for other in others)
    stages = {seed_of_stage(one, stage) for one in [seed, *others] for stage in range(3)}
    assert len(stages) == 15 and max(stages).bit_length() > 120


def test_one_process_draws_a_long_one():
    frames = {c: pd.DataFrame({"id": range(30), c: [float(i) for i in range(30)]}) for c in "ab"}
    sites = fs.ClientPartition.from_frames(frames, on="id").sites
    (seed,) = {site._data.common_seed for site in sites.values()}
    assert seed.bit_length() > 96
