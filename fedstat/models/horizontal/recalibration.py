"""Calibration slope and intercept over rows: a model with the linear predictor as its one column, by sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.row_steps import OpenRows
from fedstat.federation.door.facts import Evaluated
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Ask, Declared, Step, check_lengths
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.evaluation.recalibration import Recalibrating, Recalibration
from fedstat.kernels.glm.rows import Rows, linear_predictor
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.kernels.glm.sums import evaluate
from fedstat.models.horizontal.rows import INSIDE, SCORES, SUMS, answered_at, describe_sums, glm_rows, summed
from fedstat.models.horizontal.session import add
from fedstat.typing import Array, Floats

FAMILY = "evaluation"
JUDGED = "evaluated"


@dataclass(frozen=True, slots=True, eq=False)
class JudgedModel:
    """The model of an evaluation: coefficients (p,) of the columns as a site standardised them."""

    opened: OpenRows
    distribution: DistributionSpec
    beta: Floats
    n: int

    def predictors(self) -> Iterator[Rows]:
        """Rows whose design is a constant and the linear predictor, chunk by chunk."""
        for whole, X in self.opened.chunks():
            rows = glm_rows(whole, X)
            eta = linear_predictor(rows, self.beta)
            yield replace(rows, X=np.column_stack([np.ones(len(eta)), eta]), offset=None)

    def columns(self) -> Iterator[Rows]:
        """Rows with all that the predictor is made of as columns: a constant, the design and the offset."""
        for whole, X in self.opened.chunks():
            rows = glm_rows(whole, X)
            parts = [np.ones((len(X), 1)), X, *([] if rows.offset is None else [rows.offset[:, None]])]
            yield replace(rows, X=np.ascontiguousarray(np.hstack(parts)), offset=None)

    def coefficients(self, gamma: Floats) -> Floats:
        """Coefficients of these columns at intercept and slope (2,)."""
        offset = [1.0] if self.has_offset else []
        return np.concatenate([gamma[:1], gamma[1] * self.beta, gamma[1] * np.array(offset)])

    @property
    def has_offset(self) -> bool:
        """Whether part of the predictor is known."""
        question = self.opened.question
        return bool(question.offsets) or "exposure" in question.weights


def recalibrate(data: SiteData, state: State, gamma: Floats) -> dict[str, Array]:
    """Sum score and information of the response's regression on the linear predictor that was evaluated.

    `gamma` (2,) is intercept and slope. What is summed are combinations of what a fit sums at the same
    coefficients, and is held against the same rules. Released as by a fit: ``inside``, ``spread``, ``score``
    (2,), ``information`` (2, 2), ``totals``: sums of the weights, deviance, Pearson's statistic; and
    ``squares``, the sum of squared differences between event and predicted probability, 0 of other responses.
    """
    model = state.use(JUDGED, JudgedModel, "no model was evaluated here; ask 'bin_counts' first")
    check_lengths(data.name, gamma=(gamma, 2))
    if not np.isfinite(gamma).all():
        raise MessageError(f"{data.name}: array 'gamma' must be finite")
    sums = evaluate(model.predictors(), gamma, model.distribution)
    nothing = {"inside": np.array(True), "spread": np.array(False), "squares": np.array(0.0)}
    nothing |= {"score": np.zeros(2), "information": np.zeros((2, 2)), "totals": np.zeros(3)}
    point = model.coefficients(gamma)
    # The columns that the predictor is made of, and not it alone: sums of these left in fits before.
    state.tell(*answered_at(model.opened, model.columns, model.n, point, model.distribution, sums, nothing))
    return describe_sums(sums) | {"squares": np.array(_squares(model, gamma))}


def _squares(model: JudgedModel, gamma: Floats) -> float:
    """Sum of squared errors of probabilities, trial by trial."""
    if model.distribution.name != "Binomial":
        return 0.0
    link, total = model.distribution.make().link, 0.0
    for rows in model.predictors():
        p = link.inverse(rows.X @ gamma)
        # Of y events in one trial on average: y (1 - p)^2 + (1 - y) p^2.
        total += float(trials_weight(rows) @ (rows.y - 2.0 * rows.y * p + p**2))
    return total


def trials_weight(rows: Rows) -> Floats:
    """How many rows or trials each row stands for, (m,)."""
    weight = np.ones(len(rows.y))
    for factor in (rows.freq, rows.trials):
        weight = weight if factor is None else weight * factor
    return weight


BEHIND = (*SUMS, Evaluated)
STEPS: Mapping[str, Step] = {
    "recalibrate": Step(
        recalibrate,
        {"gamma": Declared("aggregate", "intercept and slope of the linear predictor", common=True)},
        {
            "inside": INSIDE,
            "spread": SCORES["spread"],
            "score": summed("calibration: score", behind=BEHIND),
            "information": summed("calibration: expected information", 2, behind=BEHIND),
            "totals": summed("calibration: weights, deviance, Pearson residuals", behind=BEHIND),
            "squares": summed("calibration: squared errors of probabilities", 0, behind=BEHIND),
        },
    ),
}
ADDED = ("inside", "spread", "score", "information", "totals")


def recalibrated(
    sites: Sequence[str], session: str, distribution: DistributionSpec, hidden: bool
) -> Rounds[tuple[Recalibration | None, Floats | None]]:
    """Regress the response on the evaluated linear predictor over all sites, whose parts may be `hidden`.

    It returns the regression, and sums of squared errors by site and of all (K + 1,), nan of sites that are
    hidden. Both are None where they cannot be told: where nearly all weight is in a few rows, or events and
    others are separated.
    """
    search = Recalibrating(distribution.estimates_scale)
    squares: Floats | None = None
    while asked := search.asked():
        replies = yield [
            Ask(site, FAMILY, "recalibrate", {"gamma": gamma}, session) for gamma in asked for site in sites
        ]
        sums = []
        for k in range(0, len(replies), len(sites)):
            point = replies[k : k + len(sites)]
            one = {name: add(point, name) for name in ADDED}
            one["inside"] = (one["inside"] == len(sites)) & (one["spread"] == len(sites))
            sums.append(one)
            if squares is None and one["inside"]:  # the first point is that of the model
                own = np.array([float(reply.arrays["squares"]) for reply in point])
                squares = np.append(np.full(len(own), np.nan) if hidden else own, own.sum())
        search.take(sums)
    return search.found(), squares
