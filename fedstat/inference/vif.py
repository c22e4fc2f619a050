"""Collinearity from the covariance of the coefficients alone: no rows, no design matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.inference.estimate import INTERCEPT
from fedstat.typing import Floats

SINGULAR = 1e-12
"""Smallest eigenvalue of a correlation matrix that is told from zero."""


def gvif(cov: Floats, names: Sequence[str], terms: Sequence[str]) -> pd.DataFrame:
    """Generalised variance inflation factor of each term of the formula.

    With R the correlation matrix of the coefficients without the intercept, R11 the block of a term and
    R22 that of all others, GVIF = det R11 det R22 / det R: how much larger the (squared) joint confidence
    region of the term is than if its columns were orthogonal to all others. For a term of one column in a
    linear model it is the variance inflation factor. ``GVIF^(1/(2 df))`` compares terms of different df; its
    square reads like a variance inflation factor. A robust covariance gives the inflation of its own regions;
    without an intercept the factors measure from zero, and are large for columns far from zero.

    Fox, J. and Monette, G. (1992). Generalized collinearity diagnostics. Journal of the American Statistical
    Association 87, 178-183; for generalised linear models as in R's ``car::vif``.
    """
    kept = [j for j, name in enumerate(names) if name != INTERCEPT]
    term_of = np.array([terms[j] for j in kept], dtype=object)
    order = list(dict.fromkeys(term_of))
    if len(order) < 2:
        raise NotAvailableError(f"no variance inflation: expected two terms or more, received {len(order)}")
    R = _correlation(cov[np.ix_(kept, kept)], [names[j] for j in kept])
    members = [term_of == term for term in order]
    # Determinants of many columns underflow; their logarithms do not.
    inflation = [_log_det(R, own) + _log_det(R, ~own) - _log_det(R, own | ~own) for own in members]
    df = np.array([int(own.sum()) for own in members])
    factors = np.exp(inflation)
    columns = {"GVIF": factors, "df": df, "GVIF^(1/(2 df))": factors ** (1.0 / (2.0 * df))}
    return pd.DataFrame(columns, index=pd.Index(order, name="term"))


def _correlation(cov: Floats, names: Sequence[str]) -> Floats:
    with np.errstate(invalid="ignore"):
        unknown = ~(np.isfinite(cov).all(axis=1) & (np.diag(cov) > 0.0))
    if unknown.any():
        listed = ", ".join(repr(name) for name, is_bad in zip(names, unknown, strict=True) if is_bad)
        raise NotAvailableError(f"no variance inflation: {listed} has no variance; leave it out")
    root = np.sqrt(np.diag(cov))
    R = np.asarray(cov / np.outer(root, root), dtype=np.float64)
    if np.linalg.eigvalsh(R)[0] < SINGULAR:
        raise NotAvailableError(
            f"no variance inflation: the covariance of {', '.join(names)} is singular; leave out one of the "
            "terms that say the same"
        )
    return R


def _log_det(R: Floats, of: np.ndarray) -> float:
    return float(np.linalg.slogdet(R[np.ix_(of, of)])[1])
