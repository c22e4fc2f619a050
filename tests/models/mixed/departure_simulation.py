"""Few groups and departures: ``python tests/models/mixed/departure_simulation.py [RUNS [ROW ...]]``.

Rows are names of designs, by default all. All rows of a table are at one holder, as in ``mixed_coverage.py``.
Group sizes differ; x is constant in groups, z and the time t vary within.
"""

import sys
import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs
from fedstat.models.mixed.departures import compare_errors, overdispersion, smallest

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
FAMILIES = {"linear": None, "binomial": sm.families.Binomial(), "poisson": sm.families.Poisson()}
FAMILIES["counts"] = FAMILIES["binomial"]
TRUE = {"t": 0.5, "x": 0.0, "t:x": 0.0}
FEW = {f"{kind} {K}": (kind, K) for kind in ("linear", "binomial", "poisson") for K in (8, 12, 20, 40)}
DEPARTURES = {
    "linear, right": ("linear", 40, {}),
    "linear, slope left out": ("linear", 40, {"slope": 1.0}),
    "poisson, right": ("poisson", 30, {}),
    "poisson, gamma of shape 1.5": ("poisson", 30, {"over": 1 / 1.5}),
    "counts, right": ("counts", 30, {}),
    "counts, beta": ("counts", 30, {"over": 0.2}),
}


def draw(rng, groups, kind, slope=0.0, over=0.0):
    size = rng.integers(4, 17, groups)
    g, t = np.repeat(np.arange(groups), size), np.concatenate([np.linspace(-1.0, 1.0, m) for m in size])
    x = (rng.permutation(groups) % 2).astype(float)[g]
    eta = 0.3 + TRUE["t"] * t + 0.8 * rng.normal(size=groups)[g] + slope * rng.normal(size=groups)[g] * t
    share = 1.0 / (1.0 + np.exp(-eta))
    match kind:
        case "linear":
            y = eta + rng.normal(size=len(g))
        case "binomial":
            y = (rng.random(len(g)) < share).astype(float)
        case "poisson":
            y = rng.poisson(np.exp(eta) * (rng.gamma(1.0 / over, over, len(g)) if over else 1.0)).astype(
                float
            )
        case "counts":
            y = rng.binomial(8, rng.beta(share / over, (1.0 - share) / over) if over else share)
    return pd.DataFrame({"y": y, "n": 8 - y, "x": x, "t": t, "g": g, "all": "one"})


def fitted(table, kind, terms, **settings):
    formula = f"{'cbind(y, n)' if kind == 'counts' else 'y'} ~ {terms} + (1 | g)"
    partition = fs.ClientPartition.from_frame(table, by="all", policy=ALLOW)
    model = fs.FederatedMixed.from_formula(formula, partition, family=FAMILIES[kind])
    return model.fit(masked=False, **settings)


def covers(fit):
    """Whether intervals of the slopes cover."""
    limits = fit.conf_int().drop(index="Intercept").to_numpy()
    true = np.array([TRUE[name] for name in fit.params.index if name != "Intercept"])
    return (limits[:, 0] < true) & (true < limits[:, 1])


def few(rng, kind, groups):
    """Coverage of x and t with errors of the model."""
    return covers(fitted(draw(rng, groups, kind), kind, "x + t"))


def departure(rng, kind, groups, settings):
    """Alarms at 5 and 1 % (slope, overdispersion), and coverage of t, x, t:x by the model and robust."""
    fit = fitted(draw(rng, groups, kind, **settings), kind, "t * x", cov_type="robust")
    record = fit._record.fit
    p = np.array([smallest(compare_errors(record)), overdispersion(record)])
    plain = type(fit)._of(fit.model, record, fit.ledger)
    return np.concatenate([p < 0.05, p < 0.01, covers(plain), covers(fit)])


def main(runs=300, *names):
    warnings.simplefilter("ignore")
    for name in names or (*FEW, *DEPARTURES):
        rng, found, failed = np.random.default_rng([7, *name.encode()]), [], 0
        for _ in range(runs):
            try:
                found.append(few(rng, *FEW[name]) if name in FEW else departure(rng, *DEPARTURES[name]))
            except fs.errors.EstimationError:
                failed += 1
        figures = " ".join(f"{value:.3f}" for value in np.mean(found, axis=0))
        print(f"{name} | {len(found)} runs, {failed} failed | {figures}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
