"""One person at several served sites of different rows: counted once by keyed hashes, and warned of."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation, served_sites

import fedstat as fs
from fedstat.errors import DataWarning
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.connect import SHARED_KEYS
from fedstat.federation.protocols import shared_keys
from fedstat.federation.transport.site_folder import load_identity

N, COMMON = 300, 60
SEED = "0123456789abcdef" * 2


def frames(names, common=COMMON):
    """Each site has the first `common` persons of the one before as well, with measurements of its own."""
    rng = np.random.default_rng(5)
    found = {}
    for place, name in enumerate(names):
        first = place * (N - common)
        found[name] = pd.DataFrame(
            {
                "patient": [f"P{i:05d}" for i in range(first, first + N)],
                "x": rng.normal(size=N),
                "y": rng.normal(size=N),
            }
        )
    return found


def federation(home, names, common=COMMON, seed=SEED, policy=None):
    made = make_federation(home, frames(names, common), policy=policy or Policy.open())
    for name in names:
        path = home / name / "site.toml"
        text = path.read_text().replace('path = "', 'key = "patient"\npath = "', 1)
        path.write_text(text.replace('seed = ""', f'seed = "{seed}"'))
    return made


def connected(study):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        partition = fs.ClientPartition.connect(study)
    said = [str(one.message) for one in raised if issubclass(one.category, DataWarning)]
    return partition, [text for text in said if "keys" in text]


@pytest.mark.parametrize("names", ["AB", "ABC"])
def test_people_at_two_sites_are_counted_once_and_are_in_every_summary(tmp_path, names):
    study = federation(tmp_path, names, policy=Policy.strict(masked_only=len(names) > 2, two_sites="warn"))
    for name in names:
        assert main(["site", "describe", str(tmp_path / name)]) == 0
    with served_sites(tmp_path, names):
        partition, said = connected(study)
        exact = COMMON * (len(names) - 1)
        found = json.loads((study / SHARED_KEYS).read_text())["keys"]
        # four standard deviations of the pairs that share a bucket by chance
        chance = 4 * len(names) * N / np.sqrt(2.0 * shared_keys.FEWEST)
        assert abs(found - exact) <= chance < 11 and partition._shared_keys == found
        assert len(said) == 1 and f"about {found:,} keys are at several sites" in said[0]
        # not once more, and still said
        times = [len(sessions(tmp_path, name)) for name in names]
        again, said = connected(study)
        assert again._shared_keys == found and len(said) == 1
        assert [len(sessions(tmp_path, name)) for name in names] == times
        fit = fs.FederatedOLS.from_formula("y ~ x", partition).fit(masked=len(names) > 2, local=False)
        assert f"ONE PERSON AT TWO SITES: about {2 * found:,} rows" in " ".join(str(fit.summary()).split())
    for name in names:
        (entry,) = sessions(tmp_path, name)
        # of three sites, the coordinator has only the sum
        assert entry.masked is (len(names) > 2)


def sessions(home, name):
    """Entries of the counts of a site."""
    ledger = read_ledger(home / name, name, load_identity(home / name).public)
    return [
        one for c in ledger.chains for one in c.entries if (one.step, one.array) == ("count_keys", "keys")
    ]


@pytest.mark.parametrize(
    ("common", "seed", "policy"),
    [(0, SEED, None), (COMMON, "", None), (COMMON, SEED, Policy(approval="owner"))],
    ids=["no one is at two", "no secret in common", "the owner approves each analysis"],
)
def test_nothing_is_said_where_no_one_is_at_two_sites_or_sites_do_not_count(tmp_path, common, seed, policy):
    study = federation(tmp_path, "AB", common, seed, policy)
    with served_sites(tmp_path, "AB"):
        partition, said = connected(study)
    assert (partition._shared_keys, said) == (0, [])
    assert (len(sessions(tmp_path, "A")) == 1) is (common == 0)


def test_the_number_is_that_of_keys_at_several_sites_whatever_the_load():
    rng = np.random.default_rng(1)
    for buckets, keys, common in ((2**14, 400, 100), (2**14, 5000, 1500), (2**16, 200_000, 20_000)):
        own = [rng.integers(0, buckets, keys) for _ in range(2)]
        own[1][:common] = own[0][:common]
        counts = sum(np.bincount(one, minlength=buckets) for one in own).astype(float)
        deviation = np.sqrt((2 * keys) ** 2 / (2 * buckets))
        assert abs(shared_keys.shared_keys(counts) - common) < 4 * deviation
    apart = [
        shared_keys.shared_keys(np.bincount(rng.integers(0, 2**14, 800), minlength=2**14).astype(float))
        for _ in range(300)
    ]
    assert np.count_nonzero(apart) <= 3


def test_buckets_of_keys_depend_on_the_secret_and_on_nothing_else():
    keys = np.arange(50, dtype=np.uint64)
    one, other = (shared_keys._buckets(keys, seed, 2**14) for seed in (7, 8))
    assert (one == shared_keys._buckets(keys, 7, 2**14)).all() and (one != other).mean() > 0.9
