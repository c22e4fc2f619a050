"""A line that tells how far an iteration has come."""

from __future__ import annotations

import numpy as np

from fedstat.models.vertical.newton import TraceRow
from fedstat.models.vfem.iteration.options import IterationOptions
from fedstat.progress_line import ProgressLine

WINDOW = 10


class Progress(ProgressLine):
    """Write one line per iteration: log-likelihood, relative score, and the time that is left.

    The time left is read off the rate at which the score fell over the last iterations.
    """

    def __init__(self, options: IterationOptions) -> None:
        super().__init__("iteration")
        self._target = options.tol_score
        self._rows: list[TraceRow] = []

    def __call__(self, row: TraceRow) -> None:
        """Write the line of one evaluation."""
        self._rows.append(row)
        note = f"log-likelihood {row.log_likelihood:.6f}  relative score {row.score:.1e}"
        self.step(row.iteration, note, self.seconds_left())

    def seconds_left(self) -> float | None:
        """Seconds until the score reaches its tolerance at the present rate; None while unknown."""
        rows = self._rows[-WINDOW:]
        if len(rows) < 3:
            return None
        fall = np.log(rows[0].score / rows[-1].score)
        if fall <= 0.0 or rows[-1].score <= self._target:
            return None if fall <= 0.0 else 0.0
        return float(np.log(rows[-1].score / self._target) * (rows[-1].seconds - rows[0].seconds) / fall)
