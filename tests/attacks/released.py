"""Sums of products that an analyst reads from the public result of a linear fit, in the units of the data."""

from __future__ import annotations

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.typing import Array


def total_sums(result: fs.results.OLSResults) -> tuple[pd.DataFrame, pd.Series]:
    """Return X'X and X'y over all sites, from the coefficients and their covariance."""
    names = result.params.index
    gram = result.scale * np.linalg.inv(np.asarray(result.cov_params()))
    return pd.DataFrame(gram, names, names), pd.Series(gram @ result.params.to_numpy(), names)


def own_sums(result: fs.results.OLSResults) -> dict[str, tuple[pd.DataFrame, pd.Series]]:
    """Return the same of each site whose own fit was released; the intercept has the rows."""
    found, h, names = {}, result.heterogeneity, result.params.index
    for k, site in enumerate(h.estimates.index):
        V = np.asarray(h.covariances[k])
        if not np.isfinite(V).all():
            continue
        gram = scaled_inverse(V)
        gram *= h.sites.nobs[site] / gram[0, 0]
        score = gram @ h.estimates.loc[site].to_numpy()
        found[site] = pd.DataFrame(gram, names, names), pd.Series(score, names)
    return found


def scaled_inverse(V: Array) -> Array:
    """Invert a covariance of coefficients in different units."""
    d = 1.0 / np.sqrt(np.diag(V))
    return np.linalg.inv(V * d[:, None] * d) * d[:, None] * d


def miss(found: float, truth: float, column: pd.Series) -> float:
    """Error of a value that was read, relative to the spread of its column."""
    return float(abs(found - truth) / column.std())
