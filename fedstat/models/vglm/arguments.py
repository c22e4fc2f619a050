"""What the arguments of a fit have to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.errors import ModelError
from fedstat.kernels.penalised.penalties import Penalty
from fedstat.models.checks import check_whole
from fedstat.typing import Floats

FEWEST_FOLDS_OF_HALVES = 4


def check_steps(steps: int | None, penalty: Penalty, algorithm: str, exchange: str) -> None:
    """Require something to linearise, and an exchange that knows the estimate without a penalty."""
    if steps is None:
        return
    check_whole("steps", steps, 1)
    if penalty.convex or algorithm != "lla":
        raise ModelError(
            f"steps are local linear approximations of SCAD and MCP (algorithm='lla'); leave steps out with "
            f"penalty='{penalty.name}', algorithm='{algorithm}'"
        )
    if exchange != "products":
        raise ModelError("steps need exchange='products'; leave steps out with exchange='admm'")


def check_split(lambdas: Floats | None, select: str, folds: int, draws: int) -> None:
    """Require that a half selects something, with folds of its own."""
    if lambdas is not None and not lambdas.any():
        raise ModelError("inference='split': lam=0 selects no columns, and needs no other half; leave it out")
    if draws:
        raise ModelError("draws: expected 0 with inference='split', whose halves are those of one split")
    if select == "cv" and folds < FEWEST_FOLDS_OF_HALVES:
        raise ModelError(
            f"folds: expected {FEWEST_FOLDS_OF_HALVES} or more for select='cv' in a half of the entities; "
            f"received {folds}"
        )


def read_lambdas(lam: float | None, lambdas: Sequence[float] | Floats | None) -> Floats | None:
    """Return the lambdas that were given, largest first; None for none.

    Raises
    ------
    ModelError
        They are not numbers of zero or more, or both arguments were given.
    """
    if lam is None and lambdas is None:
        return None
    if lam is not None and lambdas is not None:
        raise ModelError("lam, lambdas: give one of them")
    try:
        values = np.atleast_1d(np.asarray(lambdas if lam is None else lam, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ModelError("lam, lambdas: expected numbers") from error
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values >= 0.0)).all():
        raise ModelError("lam, lambdas: expected finite numbers of zero or more")
    return np.unique(values)[::-1].copy()
