"""Studies of which moments are taken, and the parameters of a fit as the pooled oracle packs them."""

from __future__ import annotations

import numpy as np
import pandas as pd
from oracle import Study
from pattern_moments import moments_of_arrays


def moments_of(study):
    """Pattern moments of a study, from its pooled table."""
    sizes = [len(names) for names in study.columns.values()]
    X, y = study.table[study.covariates].to_numpy(), study.table["y"].to_numpy()
    return moments_of_arrays(X, y, sizes, sites=list(study.columns), names=study.covariates)


def four_clients(seed=0, n=800, missing="mar", between=0.0):
    """Four clients with one to three columns, lognormal at one of them; all may lack an entity.

    With missing="mar" two of them lack records where the response is large, or small. `between` adds one
    factor to the columns of all clients.
    """
    rng = np.random.default_rng([seed, 4])
    columns = {"A": ["a0", "a1"], "B": ["b0"], "C": ["c0", "c1", "c2"], "D": ["d0", "d1"]}
    names = [name for own in columns.values() for name in own]
    Z = rng.normal(size=(n, len(names))) + between * rng.normal(size=(n, 1))
    Z[:, 1] += 0.6 * Z[:, 0]
    Z[:, 3:6] = np.exp(0.5 * Z[:, 3:6] @ np.array([[1.0, 0.3, 0.0], [0.0, 1.0, 0.4], [0.0, 0.0, 1.0]]))
    X = Z * [1.0, 20.0, 0.01, 1.0, 5.0, 1.0, 1.0, 3.0] + [0.0, 300.0, 1.0, 0.0, 0.0, 0.0, -4.0, 0.0]
    y = 50.0 + Z @ [0.8, -0.5, 0.7, 0.4, 0.0, -0.6, 1.0, 0.2] + rng.normal(size=n)
    table = pd.DataFrame(X, columns=names)
    table.insert(0, "y", y)
    standard = (y - y.mean()) / y.std()
    slopes = {"A": 1.0, "B": 0.0, "C": -0.7, "D": 0.0} if missing == "mar" else dict.fromkeys(columns, 0.0)
    for (site, own), share in zip(columns.items(), (0.3, 0.5, 0.2, 0.6), strict=True):
        odds = np.log(share / (1.0 - share)) + slopes[site] * standard
        table.loc[rng.random(n) < 1.0 / (1.0 + np.exp(-odds)), own] = np.nan
    return Study(table, columns, "Registry")


def theta_of(study, fit):
    """All parameters of a fit from moments, as :class:`oracle.Pooled` packs them."""
    places = [fit.moments.places(k) for k in range(len(study.columns))]
    blocks = [(fit.beta[here], fit.mu[here], fit.cov[here, here]) for here in places]
    return study.pooled().pack(fit.params[0], fit.s2, *zip(*blocks, strict=True))
