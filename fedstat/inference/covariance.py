"""Covariance algebra that does not depend on the model family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.errors import EstimationError
from fedstat.typing import Bools, Floats

LOADING = 0.1
"""Share of the largest loading from which a coefficient counts as part of a flat direction."""


def delta_method(cov: Floats, jacobian: Floats) -> Floats:
    """Covariance of g(theta) to first order, ``J V J'``: from V (d, d) and J = dg/dtheta', (m, d) or (d,)."""
    J = np.atleast_2d(jacobian)
    return np.asarray(J @ cov @ J.T, dtype=np.float64)


def symmetrise(A: Floats) -> tuple[Floats, float]:
    """Symmetric part ``(A + A') / 2`` of a square matrix, with the share of its norm that is lost.

    The share ``||A - sym||_F / ||A||_F`` lies between 0 (symmetric) and 1 (antisymmetric).
    """
    sym = (A + A.T) / 2.0
    return sym, _relative_distance(A, sym)


def nearest_psd(A: Floats) -> tuple[Floats, float]:
    """Positive semi-definite matrix nearest to a symmetric one in the Frobenius norm, and how far it moved.

    Negative eigenvalues become zero (Higham 1988, Computing a nearest symmetric positive semidefinite matrix,
    Linear Algebra and its Applications 103, theorem 2.1). The distance is relative to the norm of A.
    """
    sym, _ = symmetrise(A)
    values, vectors = np.linalg.eigh(sym)
    if values.min(initial=0.0) >= 0.0:
        return sym, 0.0
    A_psd, _ = symmetrise((vectors * values.clip(min=0.0)) @ vectors.T)
    return A_psd, _relative_distance(sym, A_psd)


def invert_information(info: Floats, names: Sequence[str]) -> Floats:
    """Covariance of an estimate as the inverse of its information matrix (d, d), with a name for each row.

    The matrix is brought to unit diagonal first, so that the test for flat directions does not depend on the
    units of the columns. An EstimationError names the parameters where it is not finite or not positive
    definite.
    """
    if info.shape != (len(names), len(names)):
        raise EstimationError(
            f"expected an information matrix of {len(names)} x {len(names)} (one row per name), "
            f"received shape {info.shape}"
        )
    finite = np.asarray(np.isfinite(info).all(axis=1))
    _refuse(~finite, names, "is not finite at", "look for an overflow or a scale")
    diagonal = np.diag(info)
    _refuse(diagonal <= 0.0, names, "is not positive at", "drop what the data say nothing about")
    # Eigenvalues of a correlation-like matrix compare with one, whatever the units.
    root = np.sqrt(diagonal)
    values, vectors = np.linalg.eigh(symmetrise(info / np.outer(root, root))[0])
    flat = values <= len(names) * np.finfo(np.float64).eps * values.max(initial=1.0)
    if flat.any():
        raise EstimationError(_flat_message(vectors[:, flat], values, names))
    # A product with its own transpose is symmetric to the bit, which an inverse is not.
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
        f"expected a positive definite information matrix, received one with {len(lines)} direction(s) of "
        f"no information (smallest relative eigenvalue {values.min():.1e}): {'; '.join(lines)}. These "
        "coefficients cannot be told apart: drop or combine one of each direction."
    )
