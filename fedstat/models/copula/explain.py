"""Forecast of a synthesis: what it costs whom, how much noise there will be, before anything is asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from fedstat.federation.forecast.forecast import Forecast
from fedstat.kernels.hermite import expand_steps
from fedstat.models.copula.asked import NoisePlan
from fedstat.models.copula.margins import Bins
from fedstat.models.explain import ForecastPlan
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget

LARGE = 0.1
"""Noise of a correlation above which little can be said."""


@dataclass(frozen=True, slots=True)
class PredictedNoise:
    """Standard deviations of the noise on correlations near zero: of one institution, and of two."""

    own: float
    cross: float

    @classmethod
    def of(cls, plan: NoisePlan, n: int) -> PredictedNoise:
        """Predict them for n entities, with even margins."""
        slopes = [_slope(one) for bins in plan.columns.values() for one in bins]
        # Mean over pairs of different columns of 1 / (c_j c_l), as errors of pairs are squared.
        inverse = np.array([1.0 / slope**2 for slope in slopes])
        pairs = max(len(inverse) * (len(inverse) - 1), 1)
        spread = math.sqrt((inverse.sum() ** 2 - (inverse**2).sum()) / pairs)
        return cls(*(spread * plan.product_deviation(shares) / max(n, 1) for shares in (1, 2)))


def _slope(bins: Bins) -> float:
    """First Hermite coefficient of the scores of a column whose bins are equally probable."""
    F = np.arange(bins.count + 1) / bins.count
    return float(expand_steps(np.asarray(ndtri(F)), math.sqrt(3.0) * (F[:-1] + F[1:] - 1.0), 1)[0])


def noise_statement(plan: NoisePlan, n: int, epsilon: float, delta: float) -> Iterator[str]:
    """Say how large the noise on correlations is, and what would do where it is large."""
    noise = PredictedNoise.of(plan, n)
    sampling = 1.0 / math.sqrt(max(n, 1))
    yield (
        f"Noise on a correlation near 0: about {noise.own:.2g} within an institution and {noise.cross:.2g} "
        f"between two, with columns of even margins; sampling adds {sampling:.2g} at {n:,} entities."
    )
    if noise.cross > LARGE:
        factor = noise.cross / LARGE
        yield (
            f"That is more than {LARGE}, so that few correlations will be told from 0. About "
            f"{math.ceil(n * factor):,} entities would do at epsilon {epsilon:g}, or an epsilon of about "
            f"{_enough(plan, factor, delta):.2g} at {n:,}; fewer columns need less."
        )


def _enough(plan: NoisePlan, factor: float, delta: float) -> float:
    """Epsilon at which noise is smaller by a factor."""
    return epsilon_of_zcdp(plan.rho * round(factor**2 * 1000) / 1000, delta)


def cost_statements(plan: NoisePlan, delta: float) -> Iterator[str]:
    """Say what epsilon a record has against whom."""
    whole = epsilon_of_zcdp(plan.coordinator_cost(), delta)
    yield (
        f"The whole record of one entity, replaced by any other: epsilon {whole:.3g} at delta {delta:g} "
        "against the coordinator, who knows nobody's noise. Numbers of entities, and who has a record where, "
        "are public."
    )
    parts = ", ".join(
        f"{client} {epsilon_of_zcdp(plan.site_cost(client), delta):.3g}" for client in plan.columns
    )
    yield (
        "The part of a record at one institution against the coordinator and all other institutions "
        f"together, which is what its budget is charged: {parts}."
    )


class CopulaPlan(ForecastPlan):
    """What is known of a synthesis before it runs."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.model = model

    def learned(self, forecast: Forecast) -> Iterator[tuple[str, str]]:
        """Say what noise leaves to be learned."""
        for sentence in cost_statements(self.model._planned, self.model.delta):
            yield "Coordinator and institutions", sentence

    def notes(self, forecast: Forecast) -> Iterator[str]:
        """Say how large errors will be."""
        model = self.model
        n = min(len(rows) for rows in model.rows.values())
        yield from noise_statement(model._planned, n, model.epsilon, model.delta)
        for client in model._planned.columns:
            budget = model.partition.sites[client].policy.privacy
            if budget is not None:
                total = float(rho_of_budget(budget.epsilon, budget.delta))
                share = float(model._planned.site_cost(client)) / total if total else math.inf
                yield f"{client}: this costs {share:.0%} of its budget, epsilon {budget.epsilon:g}."
