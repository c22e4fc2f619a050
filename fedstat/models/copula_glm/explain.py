"""Dry run of a private GLM: how much the noise widens standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy.special import expit, ndtri

from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.models.copula.explain import CopulaPlan
from fedstat.models.copula_glm.design import LARGEST, WEIGHTS
from fedstat.models.copula_glm.notes import DEPARTING
from fedstat.models.copula_glm.request import MomentPlan, ScoreNoise, ScoreTerms
from fedstat.models.copula_glm.score import MOST_BITS, WIDE, share_cubic, share_line

TIMES = 3.0
"""Noise over sampling error beyond which a budget is too small for a model."""


USUAL = 1.75
"""Factor by which simulated columns had more noise than uncorrelated even columns, at any budget."""

USUAL_OF_STEP = 1.5
"""The same after a step."""


def noise_ratio(plan: MomentPlan, n: int) -> float:
    """Predict noise over sampling error of a slope, for typically skewed and correlated columns.

    The mean product of a score of the response and one of a column varies by about n^-1/2. It is compared
    with the noise on this product, and with the noise on the products of the column with all others times
    their effects: together half of the spread of the response.
    """
    share = USUAL * math.sqrt(WEIGHTS[plan.response] ** -2.0 + 0.5)
    return share * plan.product_deviation(2) / math.sqrt(max(n, 1))


def step_ratio(plan: MomentPlan, n: int) -> float:
    """Predict the same after a step, for linear predictors with a typical spread, in parts of equal size."""
    spread, sampling = (1.0, 0.45) if plan.response == "Binomial" else (0.7, 0.7)
    half = WIDE[plan.response] * spread / math.sqrt(len(plan.design))
    halves = {site: half if own else 0.0 for site, own in plan.design.items()}
    if plan.response == "Binomial":
        mean = share_cubic(MOST_BITS, halves, expit, ndtri((np.arange(200) + 0.5) / 200))
    else:
        mean = share_line(MOST_BITS, halves, 1.0, 0.0, LARGEST[plan.response])
    widths = tuple(len(own) for own in plan.design.values())
    noise = ScoreNoise(ScoreTerms(tuple(plan.design), widths, plan.holder, mean), plan.of_step)
    return USUAL_OF_STEP * noise.deviation / (sampling * math.sqrt(max(n, 1)))


class PrivateGLMPlan(CopulaPlan):
    """Facts about a fit before it runs."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model._with_steps(given.get("polish")), given)

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State the further assumptions of a step."""
        yield from super().learned(expected)
        if self.model._planned.of_step:
            yield "Coordinator and sites", DEPARTING

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State the expected size of errors."""
        n = min(len(rows) for rows in self.model._rows.values())
        planned = self.model._planned
        ratio = (step_ratio if planned.of_step else noise_ratio)(planned, n)
        wider = math.hypot(1.0, ratio)
        yield (
            f"Noise adds about {ratio:.2g} times the sampling error to a slope, so that standard errors are "
            f"{wider:.2f} times as large. This comes from simulated columns of mixed kinds with moderate "
            "correlations; strong correlations add to it."
        )
        if ratio > TIMES:
            yield f"This budget is too small for this model: more than {TIMES:g} times the sampling error."
        yield from super().notes(expected)
