"""Forecast of federated averaging before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.forecast.forecast import Forecast
from fedstat.models.explain import ForecastPlan
from fedstat.models.horizontal.session import UNTOLD

SHORT = 1e-3
"""Learning rate of the rehearsal: invented rows must not send the descent out of the finite numbers."""


class FedAvgPlan(ForecastPlan):
    """All shapes are known of a fit of the FedAvg family, and the number of rounds."""

    def arguments(self) -> Mapping[str, Any]:
        """Let sites take one short step a round, from which nothing runs away."""
        return {"local_epochs": 1, "batch_size": None, "learning_rate": SHORT}

    def learned(self, forecast: Forecast) -> Iterator[tuple[str, str]]:
        """Say what the coefficients that a site returns tell."""
        returned = [e for e in forecast.course.entries if e.step == "run_epochs" and e.sender != COORDINATOR]
        if any(entry.array == "beta" and not entry.masked for entry in returned):
            yield (
                "Coordinator",
                "learns from each site's coefficients and losses, round by round, how its rows pull: the "
                "change over one epoch of full batches is the gradient over its rows alone.",
            )

    def notes(self, forecast: Forecast) -> Iterator[str]:
        """Say what is left to chance."""
        yield f"The number of rounds is fixed: {self.given['rounds']:,} of averaging, and some around them."
        if self.given["fraction"] < 1.0:
            more = "; without seed= other ones will be drawn in the fit" if self.given["seed"] is None else ""
            yield f"A share of the sites is drawn in every round{more}."
        yield UNTOLD
