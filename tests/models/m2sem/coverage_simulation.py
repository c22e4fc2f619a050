"""Coverage of intervals of clusters' profiles: from the information over sites, and from the bootstrap.

Three sites with four columns each, two clusters, 400 entities; clusters 2.2 and 1.4 standard deviations of
the factor apart; all columns continuous, or those of one site ordinal. Fits begin at the true clusters.

    python tests/models/m2sem/coverage_simulation.py [REPETITIONS [BOOTSTRAPPED]]

writes tests/benchmarks/results/m2sem_coverage.csv; 120 repetitions, and 10 with 40 bootstrap samples each,
take a quarter of an hour. With 0 repetitions only the rows of the bootstrap are computed again, and written
after each tenth: `coverage_simulation.py 0 100`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.models.m2sem.bootstrap import Drawable, ascend, draw_refits
from fedstat.models.m2sem.information import SiteInformation, assemble, invert, local_information
from fedstat.models.m2sem.modality.categorical import CategoricalModality
from fedstat.models.m2sem.modality.gaussian import GaussianModality

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "m2sem_coverage.csv"
KINDS = {"continuous": ["continuous"] * 3, "one ordinal": ["continuous", "continuous", "ordinal"]}
N, K, SAMPLES, FIRST_SEED = 400, 2, 40, 5_000
BOOTSTRAP = "profiles, bootstrap"
KEYS = ["columns", "separation", "interval"]


def continuous(values):
    return GaussianModality(values, [f"x{p}" for p in range(values.shape[1])], 1)


def ordinal(values):
    P = values.shape[1]
    return CategoricalModality(values, [f"x{p}" for p in range(P)], 1, ["ordinal"] * P, [4] * P, nodes=15)


def makers(data):
    return [continuous if kind == "continuous" else ordinal for kind in data.modalities["kind"]]


def fit(data):
    """Modalities by client, shares and posteriors at the maximum."""
    mods = {}
    for make, (site, frame) in zip(makers(data), data.frames.items(), strict=True):
        columns = [x if x.dtype == float else x.cat.codes for _, x in frame.iloc[:, 1:].items()]
        mods[site] = [make(np.column_stack(columns))]
        mods[site][0].begin(K)
    place = dict.fromkeys(mods, np.arange(N))
    r = ascend(mods, place, np.eye(K)[data.labels] * 0.8 + 0.2 / K)
    return mods, r.mean(axis=0), r


def information(mods, w, r):
    """Covariance of all statements by client, as over clients."""
    made = {site: local_information(some, r) for site, some in mods.items()}
    parts = {
        site: SiteInformation(one.own, one.with_shares, one.jacobian, one.communalities, one.columns.shape[2])
        for site, one in made.items()
    }
    names = list(made)
    crossed = {
        (a, b): np.einsum("ikp,ikq->pq", made[a].columns, made[b].columns)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    return invert(assemble(r, w, parts, crossed), K, parts)


def profiles_of(mods):
    """Profiles (K, all), side by side."""
    return np.hstack([m.profile().reshape(K, -1) for some in mods.values() for m in some])


def errors_of(observed, mods):
    """Standard errors of the profiles (K, all), and of their differences."""
    own, apart = [], []
    for site, some in mods.items():
        cov = observed.of_site(site)
        width = some[0].profile().size // K
        R = np.hstack([-np.eye(width), np.eye(width)])
        own.append(np.sqrt(np.diag(cov)[: K * width]).reshape(K, width))
        apart.append(np.sqrt(np.diag(R @ cov[: K * width, : K * width] @ R.T)))
    return np.hstack(own), np.concatenate(apart)


def one(kinds, separation, seed, bootstrapped, informed=True):
    data = fs.datasets.make_clusters(N, KINDS[kinds], separation=separation, seed=seed)
    mods, w, r = fit(data)
    truth, found, covered = data.profiles.to_numpy().T, profiles_of(mods), {}
    if informed:
        observed = information(mods, w, r)
        if not observed.available:
            return None
        se, of_differences = errors_of(observed, mods)
        covered = {
            "profiles": np.abs(found - truth) < 1.96 * se,
            "differences": np.abs(np.diff(found - truth, axis=0)[0]) < 1.96 * of_differences,
            "shares": np.abs(w - data.shares)[:1] < 1.96 * np.sqrt(np.diag(observed.of_shares()))[:1],
        }
    if bootstrapped:
        place = np.arange(N)
        sites = {
            site: Drawable(some, [lambda values, _, make=make: make(values)], place)
            for make, (site, some) in zip(makers(data), mods.items(), strict=True)
        }
        draws = draw_refits(sites, w, N, SAMPLES, np.random.default_rng(seed))
        sd = np.concatenate([draws.profiles[site] for site in sites], axis=2).std(axis=0, ddof=1)
        covered[BOOTSTRAP] = np.abs(found - truth) < 1.96 * sd
    return {name: (hit.sum(), hit.size) for name, hit in covered.items()}


def row_of(kinds, separation, name, found):
    """Coverage over repetitions, some of which may have failed; None if none has such intervals."""
    there = [each for each in found if each is not None]
    hits = np.array([each[name] for each in there if name in each])
    if not len(hits):
        return None
    rates = hits[:, 0] / hits[:, 1]
    return {
        "columns": kinds,
        "separation": separation,
        "interval": name,
        "coverage": hits[:, 0].sum() / hits[:, 1].sum(),
        "repetitions": len(hits),
        "std_error": rates.std(ddof=1) / len(hits) ** 0.5,
        "failed": len(found) - len(there),
    }


def write(rows):
    """Replace rows of the same design and interval."""
    new = pd.DataFrame(rows).round(4).set_index(KEYS)
    if RESULTS.exists():
        old = pd.read_csv(RESULTS).set_index(KEYS)
        new = pd.concat([old.drop(new.index, errors="ignore"), new]).sort_index(sort_remaining=True)
    new.to_csv(RESULTS)
    print(new.to_string(), flush=True)


def main(repetitions=120, bootstrapped=10):
    for kinds in KINDS:
        for separation in (2.2, 1.4):
            if repetitions:
                found = [one(kinds, separation, FIRST_SEED + s, False) for s in range(repetitions)]
                rows = [
                    row_of(kinds, separation, name, found) for name in ("profiles", "differences", "shares")
                ]
                write([row for row in rows if row])
            redrawn = []
            for s in range(bootstrapped if separation < 2 else 0):
                redrawn.append(one(kinds, separation, FIRST_SEED + s, True, informed=False))
                if len(redrawn) > 1 and (s % 10 == 9 or s + 1 == bootstrapped):
                    write([row_of(kinds, separation, BOOTSTRAP, redrawn)])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
