"""Dry run of a private GLM: how much the noise widens standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy.special import expit, ndtr, ndtri

from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.models.copula.explain import CopulaPlan
from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula_glm.design import LARGEST, WEIGHTS, ScoredResponse
from fedstat.models.copula_glm.estimation import estimate
from fedstat.models.copula_glm.notes import DEPARTING
from fedstat.models.copula_glm.protocol import SEED, complete_design
from fedstat.models.copula_glm.released_distribution import ReleaseNoise, normal_points, release_rows
from fedstat.models.copula_glm.request import MomentPlan, ScoreNoise, ScoreTerms
from fedstat.models.copula_glm.score import MOST_BITS, WIDE, share_cubic, share_line
from fedstat.typing import Floats, Ints

OFTEN = 0.25
"""Share of simulated releases without an estimate from which a fit warns before anything is charged."""
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


PREDICTIONS, PREDICTED_ROWS, PREDICTED_POINTS = 12, 5_000, 2**11
"""Number of simulated releases in a prediction, of their rows, and of integration points."""


def predict_failures(plan: MomentPlan, n: int) -> float:
    """Predict the share of releases that no coefficients solve, from public facts alone.

    Columns are independent, bell-shaped over their public ranges, with evenly distributed levels; the linear
    predictor has a standard deviation of one. Each simulated release of `n` entities has the planned noise.
    """
    design, rng = complete_design(plan), np.random.default_rng(SEED)
    rows = min(n, PREDICTED_ROWS)
    counts = [
        plan.count_deviation(site, j)
        for site in design.sites
        for j in range(len(plan.columns[site]) - (site == plan.holder))
    ]
    p, last = len(design.columns), plan.columns[plan.holder][-1]
    response = plan.count_deviation(plan.holder, len(plan.columns[plan.holder]) - 1)
    products = np.full((p + 1, p + 1), plan.product_deviation(2) / n)
    noise = ReleaseNoise(np.array(counts), response, products).scaled(rows / n)
    points, failed = normal_points(len(design.bins), SEED, PREDICTED_POINTS), 0
    for _ in range(PREDICTIONS):
        latents = rng.standard_normal((rows, len(design.bins)))
        codes = np.column_stack([_bell(one, z) for one, z in zip(design.bins, latents.T, strict=True)])
        eta = latents.sum(axis=1) / math.sqrt(len(design.bins))
        scored = ScoredResponse(plan.response, Margin(last, np.full(last.count, 1.0 / last.count)))
        y = scored.draw(eta, 1.0, rng) if plan.response != "Gaussian" else _bell(last, eta)
        release = release_rows(design, plan.response, last, codes, y, noise, rng)
        failed += not estimate(design, release, points).root.converged
    return failed / PREDICTIONS


def _bell(bins: Bins, z: Floats) -> Ints:
    """Return bins of standard normals: levels of equal probability, or a range of six deviations."""
    place, codes = (ndtr(z), np.arange(bins.count)) if bins.levels else (0.5 + z / 6.0, bins.leaf_codes)
    found: Ints = codes[np.clip((place * len(codes)).astype(np.int64), 0, len(codes) - 1)]
    return found


def failure_notes(plan: MomentPlan, n: int) -> Iterator[str]:
    """Warn if simulated releases often have no estimate."""
    share = predict_failures(plan, n)
    if share >= OFTEN:
        yield (
            f"In {share:.0%} of {PREDICTIONS} releases that were simulated from public facts, no "
            "coefficients solve the released moments, because of the noise. A release is charged, whether it "
            "has an estimate or not. Use a larger epsilon, or fewer columns"
        )


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
            yield from failure_notes(planned, n)
        yield from super().notes(expected)
