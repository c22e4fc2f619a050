"""Coverage of weighted models of repeated outcomes: ``python weighted_simulation.py 558``.

300 persons of three sites have three visits each. The arm of a person depends on a covariate that affects the
outcome; the true effect is 0.5.
"""

import sys
import warnings

import numpy as np
import pandas as pd
from scipy.special import expit

import fedstat as fs

EFFECT, PERSONS = 0.5, 300
ALLOW = fs.Policy(min_count=1, min_level_count=1, remember="nothing")


def draw(rng):
    """Return a table of persons and visits."""
    person = np.repeat(np.arange(PERSONS), 3)
    b, own = rng.normal(size=PERSONS)[person], rng.normal(size=PERSONS)[person]
    t = (rng.random(PERSONS)[person] < expit(0.9 * b)).astype(int)
    y = 1.0 + EFFECT * t + b + own + rng.normal(size=len(b))
    return pd.DataFrame({"site": np.array(list("ABC"))[person % 3], "person": person, "b": b, "t": t, "y": y})


def intervals(table):
    """Return whether intervals of 95 % contain the effect, and standard errors, by model."""
    at = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    treatment = fs.TreatmentEffect.from_formula("y ~ 1", at, treatment="t ~ b")
    given = {"weights": treatment.balance(overlap=False)}
    clusters = fs.FederatedGEE.from_formula("y ~ t", at, groups="person", **given)
    fits = {
        "clusters, stacked": clusters.fit(masked=False),
        "clusters, known weights": clusters.fit(cov_type="robust", masked=False),
        "rows, stacked": fs.FederatedOLS.from_formula("y ~ t", at, **given).fit(masked=False),
    }
    found = {name: (fit.params["t"], fit.bse["t"]) for name, fit in fits.items()}
    return {name: (abs(b - EFFECT) < 1.96 * se, se, b) for name, (b, se) in found.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(1)
    drawn = [intervals(draw(rng)) for _ in range(int(sys.argv[1]))]
    for name in drawn[0]:
        inside, error, estimate = np.array([one[name] for one in drawn]).T
        print(
            f"{name}: coverage {inside.mean():.3f}, error {error.mean():.3f}, deviation {estimate.std():.3f}"
        )
