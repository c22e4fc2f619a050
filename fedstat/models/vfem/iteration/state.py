"""The state of an iteration at the coordinator, whatever the distribution of the response."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedstat.federation.rounds.engine import Fit, Rounds
from fedstat.federation.rounds.masked_sums import masked
from fedstat.models.vertical.fit import TraceRow
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.iteration.options import IterationOptions


@dataclass(slots=True)
class Iteration:
    """Where an iteration stands: evaluations so far, and whether it has ended.

    Parameters
    ----------
    layout : Layout
    options : IterationOptions
    session : str
    report : callable, optional
        Is told every evaluation.
    """

    layout: Layout
    options: IterationOptions
    session: str
    report: Callable[[TraceRow], None] | None = None
    trace: list[TraceRow] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    converged: bool = False
    reason: str = "the largest number of iterations was reached"

    @property
    def masked(self) -> bool:
        """Whether clients hide their parts of sums; a single client's part is the sum."""
        return self.options.masked and len(self.layout.clients) > 1

    def hide(self, protocol: Rounds[Fit]) -> Rounds[Fit]:
        """Run rounds in which all clients are asked alike, under masks where they are wanted."""
        return masked(protocol, self.layout.clients, self.session) if self.masked else protocol

    def enter(self, log_likelihood: float, score: float, change: float, move: str) -> None:
        """Enter an evaluation, and tell whether the iteration has converged."""
        seconds = time.perf_counter() - self.began
        row = TraceRow(len(self.trace) + 1, log_likelihood, score, change, move, seconds)
        self.trace.append(row)
        if self.report is not None:
            self.report(row)
        self.converged = row.score <= self.options.tol_score and row.change <= self.options.tol_change
        if self.converged:
            self.reason = "score and change are below their tolerances"
