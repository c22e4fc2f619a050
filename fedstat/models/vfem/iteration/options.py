"""Options of the iterative exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedstat.models.checks import check_choice, check_positive, check_whole

SMALLEST_MEMORY = 2
"""A mixed and a plain step may be rejected in turn, and the point before them is still wanted."""


@dataclass(frozen=True, slots=True)
class IterationOptions:
    """Options of the maximisation; see :meth:`fedstat.VFEMRegression.fit`.

    `step`, `acceleration` and `learning_rate` belong to a normal response.
    """

    step: Literal["gradient", "local-newton"] = "local-newton"
    acceleration: Literal["anderson"] | None = "anderson"
    memory: int = 8
    learning_rate: float | None = None
    maxiter: int = 5000
    tol_score: float = 1e-8
    tol_change: float = 1e-6
    masked: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        check_choice("masked", self.masked, (True, False))
        check_choice("step", self.step, ("gradient", "local-newton"))
        check_choice("acceleration", self.acceleration, ("anderson", None))
        check_whole("memory", self.memory, 1)
        check_whole("maxiter", self.maxiter, 1)
        check_positive("tol_score", self.tol_score)
        check_positive("tol_change", self.tol_change)
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate)
