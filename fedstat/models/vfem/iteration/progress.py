"""A line that tells how far an iteration has come."""

from __future__ import annotations

from typing import TextIO

import numpy as np

from fedstat.models.vertical.newton import TraceRow
from fedstat.models.vfem.iteration.options import IterationOptions

WINDOW = 10


class Progress:
    """Write one line per iteration: log-likelihood, relative score, and the time that is left.

    The time left is read off the rate at which the score fell over the last iterations.
    """

    def __init__(self, options: IterationOptions, stream: TextIO) -> None:
        self._target = options.tol_score
        self._stream = stream
        self._rows: list[TraceRow] = []

    def __call__(self, row: TraceRow) -> None:
        """Write the line of one evaluation."""
        self._rows.append(row)
        left = self.seconds_left()
        tail = "" if left is None else f"  about {left:.0f} s left"
        line = (
            f"round {row.iteration:>4}  log-likelihood {row.log_likelihood:.6f}  "
            f"relative score {row.score:.1e}  {row.seconds:.1f} s{tail}"
        )
        if self._stream.isatty():
            print(f"\r{line:<100}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)

    def seconds_left(self) -> float | None:
        """Seconds until the score reaches its tolerance at the present rate; None while unknown."""
        rows = self._rows[-WINDOW:]
        if len(rows) < 3:
            return None
        fall = np.log(rows[0].score / rows[-1].score)
        if fall <= 0.0 or rows[-1].score <= self._target:
            return None if fall <= 0.0 else 0.0
        return float(np.log(rows[-1].score / self._target) * (rows[-1].seconds - rows[0].seconds) / fall)

    def close(self) -> None:
        """End the line."""
        if self._rows and self._stream.isatty():
            print(file=self._stream)
