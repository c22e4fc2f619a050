"""An attacker guesses from all noisy sums of an analysis whether a row has values or is missing."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.federation.disclosure.privacy_budget import NoiseMechanism, NoiseRequired
from fedstat.federation.message import pack_request
from fedstat.privacy.gaussian_dp import mu_interval
from fedstat.privacy.zcdp import epsilon_of_zcdp

EPSILON, TRIALS = 3.0, 150
BOUNDS = {"x1": (-5.0, 5.0), "x2": (-5.0, 5.0), "y": [0, 1]}
ANALYSES = {
    "regression": lambda partition: fs.GLORE.from_formula("y ~ x1 + x2", partition).fit(
        epsilon=EPSILON, bounds=BOUNDS
    ),
    "first table": lambda partition: fs.table_one(
        partition, "x1 + x2", by="y", nonnormal=["x2"], epsilon=EPSILON, bounds=BOUNDS
    ),
    "synthesis": lambda partition: fs.CopulaSynthesizer(partition, EPSILON, BOUNDS).fit(),
}


def tables(row):
    """The same rows, and one more: with missing values, or with those of the row."""
    rng = np.random.default_rng(21)
    rest = pd.DataFrame({"x1": rng.normal(size=500), "x2": rng.normal(size=500)})
    rest["y"] = (rest["x1"] + rng.logistic(size=500) > 0.0) * 1.0
    missing = dict.fromkeys(row)
    return [pd.concat([rest, pd.DataFrame([one], dtype=float)], ignore_index=True) for one in (missing, row)]


def site_of(table):
    policy = fs.Policy(privacy=fs.Budget(EPSILON, 1e-6))
    partition = fs.ClientPartition.from_frame(table.assign(site="A"), by="site", policy=policy)
    return partition, partition.sites["A"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_betrays_a_row_no_better_than_is_charged(name, monkeypatch):
    """Guesses by the likelihood ratio of all noisy sums, of sites with keys of their own."""
    held, answered, real = tables({"x1": 1.5, "x2": -1.5, "y": 0.0}), [], NoiseMechanism.add

    def keep(mechanism, request, step, owed, arrays):
        out = real(mechanism, request, step, owed, arrays)
        answered.append((request, dict(owed), dict(arrays), out[0]))
        return out

    monkeypatch.setattr(NoiseMechanism, "add", keep)
    coins, hits = np.random.default_rng(3).integers(0, 2, TRIALS), 0
    for truth in coins:
        partition, site = site_of(held[truth])
        answered.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ANALYSES[name](partition)
        seen = [one for one in answered if any(isinstance(n, NoiseRequired) for n in one[1].values())]
        answered.clear()
        other, ratio = site_of(held[1 - truth])[1], 0.0
        for request, *_ in seen:
            other.answer(pack_request(request))
        for (_, owed, exact, noisy), (_, _, without, _) in zip(seen, answered, strict=True):
            for array, noise in owed.items():
                a, b = (one[array].astype(float) for one in (exact, without))
                ratio += float(((a - b) * (noisy[array] - 0.5 * (a + b))).sum() / noise.variance)
        hits += ratio > 0.0
    charged = site.site_ledger.charges.spent
    low, high = mu_interval(max(hits, TRIALS - hits), TRIALS, 1e-4)
    claimed = math.sqrt(2.0 * charged)
    print(f"{name}: {hits} of {TRIALS} right, mu {low:.2f} to {high:.2f}, charged {claimed:.2f}")
    assert epsilon_of_zcdp(charged, 1e-6) <= EPSILON and low <= claimed <= 2.5 * high
