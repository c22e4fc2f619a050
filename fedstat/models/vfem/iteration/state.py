"""The state of an iteration at the coordinator, whatever the distribution of the response."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstat.federation.message import Ask
from fedstat.federation.rounds.engine import Fit, Rounds
from fedstat.federation.rounds.masked_sums import masked
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.newton import TraceRow
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.models.vfem.iteration.options import IterationOptions
from fedstat.typing import Array


@dataclass(slots=True)
class Iteration:
    """Where an iteration stands: evaluations so far, and whether it has ended.

    `report` is told every evaluation. An algorithm says how it starts, how it goes on, and how it collects
    the estimates.
    """

    layout: Layout
    options: IterationOptions
    session: str
    report: Callable[[TraceRow], None] | None = None
    trace: list[TraceRow] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    converged: bool = False
    reason: str = "the largest number of iterations was reached"

    def start(self) -> Rounds[None]:
        """Open the fit at every site, with its first point."""
        raise NotImplementedError

    def climb(self) -> Rounds[None]:
        """Go on to a stationary point of the observed-data likelihood."""
        raise NotImplementedError

    def estimate(self) -> Rounds[VFEMFit]:
        """Collect the estimates where the iteration ended."""
        raise NotImplementedError

    def maximise(self) -> Rounds[VFEMFit]:
        """Maximise the observed-data likelihood."""
        return self.hide(self._whole())

    def _whole(self) -> Rounds[VFEMFit]:
        yield from self.start()
        yield from self.climb()
        return (yield from self.estimate())

    @property
    def masked(self) -> bool:
        """Whether institutions hide their parts of sums; a single institution's part is the sum."""
        return self.options.masked and len(self.layout.clients) > 1

    def hide(self, protocol: Rounds[Fit]) -> Rounds[Fit]:
        """Run rounds in which all institutions are asked alike, under masks where they are wanted."""
        return masked(protocol, self.layout.clients, self.session) if self.masked else protocol

    def ask(self, site: str, step: str, text: str = "", **arrays: object) -> Ask:
        """Address one step of this fit."""
        return ask(site, step, self.session, text, **arrays)

    def opening(self, client: str) -> dict[str, Any]:
        """Tell an institution which rows of its block take part, and where they stand."""
        lay = self.layout
        return {"keep": lay.keep[client], "rows": lay.kept[client], "n": lay.n, "filled": lay.filled}

    def ask_estimates(self, step: str) -> Rounds[dict[str, Mapping[str, Array]]]:
        """Ask every institution for its estimates."""
        replies = yield [self.ask(k, step) for k in self.layout.clients]
        return {k: reply.arrays for k, reply in zip(self.layout.clients, replies, strict=True)}

    def make_fit(self, by_client: Mapping[str, Mapping[str, Array]], **own: Any) -> VFEMFit:
        """Put the institutions' estimates together with those that belong to no institution."""
        return VFEMFit(
            beta={k: a["beta"] for k, a in by_client.items()},
            mu={k: a["mu"] for k, a in by_client.items()},
            t={k: float(a["t"]) for k, a in by_client.items()},
            trace=tuple(self.trace),
            converged=self.converged,
            reason=self.reason,
            **own,
        )

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
