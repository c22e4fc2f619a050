"""Covariance algebra that does not depend on the model family, and variance inflation factors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.inference.estimate import INTERCEPT
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Covariance algebra that does not depend on the model family.

LOADING = 0.1
"""Share of the largest loading from which a coefficient counts as part of a flat direction."""


def delta_method(cov: Floats, jacobian: Floats) -> Floats:
    """Covariance of g(theta) to first order, ``J V J'``: from V (d, d) and J = dg/dtheta', (m, d) or (d,)."""
    J = np.atleast_2d(jacobian)
    return np.asarray(J @ cov @ J.T, dtype=np.float64)


def symmetrize(A: Floats) -> tuple[Floats, float]:
    """Symmetric part ``(A + A') / 2`` of a square matrix, with the lost share of its norm.

    The share ``||A - sym||_F / ||A||_F`` is between 0 (symmetric) and 1 (antisymmetric).
    """
    sym = (A + A.T) / 2.0
    return sym, _relative_distance(A, sym)


def nearest_psd(A: Floats) -> tuple[Floats, float]:
    """Positive semi-definite matrix nearest to a symmetric one in the Frobenius norm, and the distance.

    Negative eigenvalues become zero (Higham 1988, Computing a nearest symmetric positive semidefinite matrix,
    Linear Algebra and its Applications 103, theorem 2.1). The distance is relative to the norm of A.
    """
    sym, _ = symmetrize(A)
    values, vectors = np.linalg.eigh(sym)
    if values.min(initial=0.0) >= 0.0:
        return sym, 0.0
    A_psd, _ = symmetrize((vectors * values.clip(min=0.0)) @ vectors.T)
    return A_psd, _relative_distance(sym, A_psd)


def invert_information(info: Floats, names: Sequence[str]) -> Floats:
    """Covariance of an estimate as the inverse of its information matrix (d, d), with a name for each row.

    The matrix is first scaled to a unit diagonal, so that the test for flat directions does not depend on the
    units of the columns. Raises EstimationError, which names the parameters, if the matrix is not finite or
    not positive definite.
    """
    if info.shape != (len(names), len(names)):
        raise EstimationError(
            f"expected an information matrix of {len(names)} x {len(names)} (one row per name), "
            f"received shape {info.shape}"
        )
    finite = np.asarray(np.isfinite(info).all(axis=1))
    _refuse(~finite, names, "is not finite at", "look for an overflow or a scale")
    diagonal = np.diag(info)
    _refuse(diagonal <= 0.0, names, "is not positive at", "drop what the data do not determine")
    # Eigenvalues of a correlation-like matrix can be compared with one, in any units.
    root = np.sqrt(diagonal)
    values, vectors = np.linalg.eigh(symmetrize(info / np.outer(root, root))[0])
    flat = values <= len(names) * np.finfo(np.float64).eps * values.max(initial=1.0)
    if flat.any():
        raise EstimationError(_flat_message(vectors[:, flat], values, names))
    # A product with its own transpose is exactly symmetric, but an inverse is not.
    half = vectors / np.sqrt(values) / root[:, None]
    return np.asarray(half @ half.T, dtype=np.float64)


def _relative_distance(A: Floats, B: Floats) -> float:
    norm = float(np.linalg.norm(A))
    return float(np.linalg.norm(A - B)) / norm if norm > 0.0 else 0.0


def _refuse(bad: Bools, names: Sequence[str], what: str, remedy: str) -> None:
    if bad.any():
        listed = ", ".join(repr(name) for name, is_bad in zip(names, bad, strict=True) if is_bad)
        raise EstimationError(f"the information matrix {what} {listed}; {remedy}")


def _flat_message(vectors: Floats, values: Floats, names: Sequence[str]) -> str:
    lines = []
    for direction in vectors.T:
        loading = np.abs(direction)
        members = np.flatnonzero(loading >= LOADING * loading.max()).tolist()
        lines.append(" with ".join(repr(names[j]) for j in members))
    return (
        f"expected a positive definite information matrix, received one with {len(lines)} direction(s) "
        f"without information (smallest relative eigenvalue {values.min():.1e}): {'; '.join(lines)}. The "
        "data cannot separate these coefficients: drop or combine one of each direction."
    )


# ----------------------------------------------------------------------------------------------------
# Collinearity from the covariance of the coefficients alone: no rows, no design matrix.

SINGULAR = 1e-12
"""Smallest eigenvalue of a correlation matrix that counts as positive."""


def gvif(cov: Floats, names: Sequence[str], terms: Sequence[str]) -> pd.DataFrame:
    """Generalized variance inflation factor of each term of the formula.

    With R the correlation matrix of the coefficients without the intercept, R11 the block of a term and
    R22 that of all others, GVIF = det R11 det R22 / det R: how much larger the (squared) joint confidence
    region of the term is than if its columns were orthogonal to all others. For a term of one column in a
    linear model it is the variance inflation factor. ``GVIF^(1/(2 df))`` compares terms of different df; its
    square reads like a variance inflation factor. A robust covariance gives the inflation of its own regions;
    without an intercept the factors measure from zero, and are large for columns far from zero.

    Fox, J. and Monette, G. (1992). Generalized collinearity diagnostics. Journal of the American Statistical
    Association 87, 178-183; for generalized linear models as in R's ``car::vif``.
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
            "redundant terms"
        )
    return R


def _log_det(R: Floats, of: np.ndarray) -> float:
    return float(np.linalg.slogdet(R[np.ix_(of, of)])[1])
