"""Forecast of a federated GLM before it is fitted: how many evaluations it takes, and what they tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from fedstat.federation.forecast.forecast import Forecast, Lengths, Loop
from fedstat.federation.forecast.invented_rows import GROUPS
from fedstat.federation.forecast.rehearsal import DryRun
from fedstat.models.explain import ForecastPlan
from fedstat.models.horizontal.session import UNTOLD

EVALUATIONS = (2, 4, 8)
"""Of a fit that starts close to the maximum, usual, and hard; simulated and recorded data took 2 to 7."""
OF_LEAST_SQUARES = (1, 1, 3)
"""Sums at any point lead to the estimate; rounding may ask for one more."""


class GLMPlan(ForecastPlan):
    """What is known of a federated GLM before it is fitted."""

    guessed: ClassVar[frozenset[str]] = frozenset({"list_clusters", "sum_clusters"})

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self._least_squares = model.distribution.least_squares
        strata = (given["cov_kwds"] or {}).get("strata")
        self.nested = () if strata is None else (strata,)

    def loops(self, course: DryRun) -> Sequence[Loop]:
        """Count evaluations of Newton's method, also of that with alpha among its coefficients."""
        fits = sum("start" in steps for steps in course.rounds)  # two where alpha is estimated
        low, usual, most = (fits * length for length in self._lengths())
        found = [Loop("sum_scores", frozenset({"sum_scores"}), (low, usual, most))]
        if self.given["alpha"] is not None:
            found.append(Loop("sum_nb2", frozenset({"sum_nb2"}), self._capped(EVALUATIONS)))
        return [] if self.given["rounds"] is not None else found

    def _lengths(self) -> Lengths:
        low, usual, most = self._capped(OF_LEAST_SQUARES if self._least_squares else EVALUATIONS)
        start = int(not self.given["local"])  # one more, of a point that needs no coefficients
        return low + start, usual + start, most + start

    def _capped(self, lengths: Lengths) -> Lengths:
        low, usual, most = (min(length, int(self.given["maxiter"])) for length in lengths)
        return low, usual, most

    def learned(self, forecast: Forecast) -> Iterator[tuple[str, str]]:
        """Say what a site's own fit tells."""
        if any(entry.step == "fit_alone" for entry in forecast.course.entries):
            yield (
                "Coordinator",
                "learns every site's own fit, with the means and deviations of its columns. local=False "
                "leaves it out, and with it the comparison of the sites.",
            )

        if any(entry.step == "sum_leveraged" for entry in forecast.course.entries):
            yield (
                "Sites",
                "learn the inverse information of all sites' rows together; what is left of it without their "
                "own is the sum over the others.",
            )

    def notes(self, forecast: Forecast) -> Iterator[str]:
        """Say where the number of evaluations comes from, and what is not known."""
        low, usual, most = self._lengths()
        if self.given["rounds"] is not None:
            yield f"rounds={self.given['rounds']} fixes the number of evaluations."
        else:
            yield (
                f"The number of evaluations depends on the data: {usual} is a guess from fits of simulated "
                f"and recorded data, {low} to {most} its range. Steps that are halved add to it."
            )
        if self.given["cov_type"] in ("cluster", "survey"):
            yield (
                "How many clusters there are is not known in advance: sizes marked '?' are those of "
                f"{GROUPS} clusters a site."
            )
        if self.given["local"]:
            yield "A site whose own fit fails says why in a text, which takes some bytes more."
        yield UNTOLD
