"""Dry run of boosting: what the sums disclose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy.stats import norm

from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.models.boost.arguments import bands
from fedstat.models.boost.learning.varying import coefficients_along
from fedstat.models.boost.protocol import plan_scores
from fedstat.models.explain import ForecastPlan
from fedstat.models.horizontal.results import MASKED
from fedstat.models.horizontal.session import UNTOLD

# ----------------------------------------------------------------------------------------------------
# Forecast of boosting before the round: what its sums tell.


def tracing_auc(columns: int, rows: float) -> float:
    """AUC of who knows a record, and the population, and asks whether it is among the rows.

    That of the likelihood ratio on a Gram of so many normal columns, Phi(columns / (2 sqrt(rows))).
    """
    return float(norm.cdf(columns / (2.0 * np.sqrt(rows))))


def traced_columns(columns: int, along: int, weighted: int = 0, scores: int = 0, varying: int = 0) -> int:
    """Columns of one Gram with as many products as the sums of a fit.

    Of columns of all learners, and `along` of the response in its basis; with so many `weighted` sums beside
    the first there are products of the learners' columns in each, and none of the response's. Of a loss that
    is no square there are so many `scores` in the response's place. Columns that vary along the response, so
    many with their splines, are multiplied with all others times its basis.
    """
    if scores:
        return int(np.ceil(np.sqrt(columns**2 + 2.0 * columns * along * scores)))
    if not weighted and not varying:
        return columns + along
    own = 0 if weighted else along**2
    more = varying**2 + 2.0 * varying * (columns * along + 1)
    return int(np.ceil(np.sqrt((1 + weighted) * columns**2 + 2.0 * columns * along + own + more)))


def masking_sentence(sites: int, weighted: int) -> str:
    """Say what masks hid."""
    if not weighted:
        return f"Sums were masked over {sites} sites: {MASKED.format('')}"
    return (
        f"Sums were masked over {sites} sites. Where these measured the response at points that differ, "
        "every site's own can be solved for from the weighted sums, as if in clear; each was held to its "
        "own rows."
    )


def tracing_sentence(columns: int, rows: float, weighted: int = 0) -> str:
    """Say what the sums tell about who is behind them; `columns` by :func:`traced_columns`."""
    sums = f"{weighted + 1} weighted sums of products, as many as" if weighted else "sums of products"
    return (
        f"{sums} of {columns} columns over {rows:,.0f} rows tell who knows all values of a person "
        f"whether these are among the rows: AUC about {tracing_auc(columns, rows):.2f} (.5 is chance; .6 "
        f"needs {4 * columns**2:,} rows)"
    )


class BoostPlan(ForecastPlan):
    """All shapes are known: one round, whatever the number of steps."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self._weighted = bands(model.time) if model._uneven else 0
        self._n = {row.site: float(row.n) for row in model.agreement.sites}
        self._own = given["aggregation"] != "exact"
        asked = {name: given[name] for name in ("steps", "every", "folds", "select")}
        plan, along = plan_scores(model.loss, len(self._n), **asked), model._n_along
        self._exchanges = plan.n_exchanges if model.loss else 0
        scores = plan.n_scores if model.loss else 0
        self._columns = traced_columns(
            model._n_columns - along, along, self._weighted, scores, coefficients_along(model.learners)
        )

    def arguments(self) -> Mapping[str, Any]:
        """Rehearse without lines on the way."""
        return {"progress": False}

    def learned(self, forecast: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Say what a tracing attack would find."""
        if not self._own:
            rows = sum(self._n.values())
            yield "Coordinator", f"could trace: {tracing_sentence(self._columns, rows, self._weighted)}."
            return
        yield (
            "Coordinator",
            "learns every site's own sums: a baseline is made of them, and none can be masked.",
        )
        for site, n in self._n.items():
            yield "Coordinator", f"could trace at {site}: {tracing_sentence(self._columns, n)}."

    def notes(self, forecast: ExpectedReleases) -> Iterator[str]:
        """Say that steps cost no round."""
        if self._exchanges:
            yield (
                f"Sums of products in one round, and {self._exchanges:,} exchanges of scores; coefficients "
                "go to the sites at each of them."
            )
        else:
            yield "One round, whatever the number of steps; its sums do not depend on steps and nu."
        if self._own:
            yield (
                "In the publication sites send their fits of all learners in every step, in as many rounds. "
                "These tell about as much: how a fit changes by a step that is known gives the products of "
                "its columns with those of the learner that was taken."
            )
        if self._weighted:
            yield (
                "Curves of the response were measured at different points: where these differ by site, masks "
                "hide no site's own sums, so that each is held to its own rows."
            )
        yield UNTOLD


# ----------------------------------------------------------------------------------------------------
# Forecast of boosting over institutions with different columns: who could learn what.


class VerticalBoostPlan(ForecastPlan):
    """All shapes are known: one exchange, whatever the number of steps."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self._layout, self._columns = model.layout, model._n_columns

    def learned(self, forecast: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Say what a tracing attack would find."""
        yield "Coordinator", f"could trace: {tracing_sentence(self._columns, self._layout.n)}."

    def notes(self, forecast: ExpectedReleases) -> Iterator[str]:
        """Say that steps cost no round, and who is left out."""
        yield "One exchange, whatever the number of steps; its sums do not depend on steps and nu."
        if self._layout.left_out:
            yield (
                f"{self._layout.left_out:,} of {self._layout.n_design:,} entities with a response lack what "
                "an institution brings, and are left out."
            )
