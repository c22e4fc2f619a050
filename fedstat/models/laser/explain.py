"""What the exchange of a split network discloses, before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.federation.forecast.forecast import Forecast
from fedstat.models.explain import ForecastPlan


class LASERPlan(ForecastPlan):
    """Rounds follow from the numbers of entities and epochs alone."""

    def learned(self, forecast: Forecast) -> Iterator[tuple[str, str]]:
        """Say what outputs and gradients tell."""
        if self.given["method"] == "vfedtrans":
            yield (
                "coordinator",
                "sums of products of all columns, and the leading singular vectors of every entity that all "
                "institutions have: together these are the columns, up to what the other vectors have of "
                "them",
            )
            yield (
                "each institution",
                "the same singular vectors, without the weights of others' columns: who knows these for "
                "a few entities predicts them for the rest",
            )
        epsilon = self.given["label_epsilon"]
        yield (
            "each institution",
            "the labels of the entities that it learns from: the gradients of one batch tell them apart, "
            "without a label known"
            if not epsilon
            else f"labels that were randomised at epsilon {epsilon:g}: the odds of two labels of one entity "
            f"change by exp({epsilon:g}) at most; other responses or epsilons of the same entities add to it",
        )
        yield (
            "holder of the response",
            "much of each institution's columns from its networks' outputs, given a few hundred entities "
            "whose columns it knows; masked sums slow that down, and do not prevent it",
        )
