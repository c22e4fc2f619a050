"""Forecast of boosting over institutions with different columns: who could learn what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedstat.federation.forecast.forecast import Forecast
from fedstat.models.boost.explain import tracing_sentence
from fedstat.models.explain import ForecastPlan


class VerticalBoostPlan(ForecastPlan):
    """All shapes are known: one exchange, whatever the number of steps."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self._layout, self._columns = model.layout, model._n_columns

    def learned(self, forecast: Forecast) -> Iterator[tuple[str, str]]:
        """Say what a tracing attack would find."""
        yield "Coordinator", f"could trace: {tracing_sentence(self._columns, self._layout.n)}."

    def notes(self, forecast: Forecast) -> Iterator[str]:
        """Say that steps cost no round, and who is left out."""
        yield "One exchange, whatever the number of steps; its sums do not depend on steps and nu."
        if self._layout.left_out:
            yield (
                f"{self._layout.left_out:,} of {self._layout.n_design:,} entities with a response lack what "
                "an institution brings, and are left out."
            )
