"""What the sites of federated averaging would answer: shapes, entities and harmless numbers, by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.forecast.rehearsal import Answers, Course, StandIn
from fedstat.federation.message import Ask, Reply
from fedstat.models.explain import settled
from fedstat.models.fedavg.steps import FAMILY
from fedstat.models.horizontal.explain_rows import RowsStandIns, rows_notes
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.typing import Array


class FedAvgPlan:
    """What is known of a fit of the FedAvg family before it runs.

    Parameters
    ----------
    model : HorizontalModel
    fit : callable
        Its fit.
    arguments : mapping of str to object
        Of the fit.
    """

    def __init__(
        self, model: HorizontalModel, fit: Callable[..., object], arguments: Mapping[str, Any]
    ) -> None:
        self._given = settled(fit, arguments)
        self._rows = RowsStandIns(model.agreement)
        self.lengths = (int(self._given["rounds"]),) * 3

    @property
    def guessed(self) -> frozenset[str]:
        """All shapes are known."""
        return frozenset()

    def arguments(self, length: int) -> Mapping[str, Any]:
        """Nothing but what was given: the number of rounds is fixed."""
        return {}

    def dealers(self) -> Mapping[tuple[str, str], str]:
        """Nobody deals."""
        return {}

    def learned(self, course: Course) -> Iterator[tuple[str, str]]:
        """Say what the coefficients that a site returns tell."""
        returned = [e for e in course.entries if e.step == "run_epochs" and e.sender != COORDINATOR]
        if any(entry.array == "beta" and not entry.masked for entry in returned):
            yield (
                "Coordinator",
                "learns from each site's coefficients and losses, round by round, how its rows pull: the "
                "change over one epoch of full batches is the gradient over its rows alone.",
            )

    def notes(self) -> Iterator[str]:
        """Say what is left to chance."""
        yield f"The number of rounds is fixed: {self._given['rounds']:,} of averaging, and some around them."
        if self._given["fraction"] < 1.0:
            yield (
                "A share of the sites is drawn in every round"
                + (
                    "; without seed= other ones will be drawn in the fit."
                    if self._given["seed"] is None
                    else "."
                )
            )
        yield from rows_notes()

    def answers(self, length: int) -> Answers:
        """How the stand-ins answer, by step."""
        by_step = {
            "start": self._start,
            "run_epochs": self._run_epochs,
            "sum_scores": self._sum_scores,
            "sum_likelihood": self._sum_likelihood,
        }
        return {**self._rows.answers(), **{(FAMILY, step): answer for step, answer in by_step.items()}}

    def _reply(self, site: StandIn, arrays: Mapping[str, Array]) -> Reply:
        return site.reply(arrays, entities=self._rows.n[site.name])

    def _start(self, site: StandIn, ask: Ask) -> Reply:
        return self._reply(site, {"rows": np.array(float(self._rows.n[site.name]))})

    def _run_epochs(self, site: StandIn, ask: Ask) -> Reply:
        n = float(self._rows.n[site.name])
        arrays = {"beta": n * ask.arrays["beta"], "weight": np.array(n), "loss": np.array([n, n])}
        return self._reply(site, arrays)

    def _sum_scores(self, site: StandIn, ask: Ask) -> Reply:
        p, n = self._rows.p, float(self._rows.n[site.name])
        arrays = {
            "inside": np.array(True),
            "spread": np.array(True),
            "score": np.zeros(p),
            "information": np.eye(p),
            "totals": np.full(3, n),
        }
        if "fair" in ask.arrays:
            arrays |= {"slope": np.zeros(p), "curvature": np.eye(p)}
        return self._reply(site, arrays)

    def _sum_likelihood(self, site: StandIn, ask: Ask) -> Reply:
        return self._reply(site, {"defined": np.array(True), "llf": np.array(0.0)})
