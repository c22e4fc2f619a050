"""Evaluation and recalibration of a fit from binned counts and sums over sites."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.horizontal_design import (
    RowsDesign,
    RowsSchema,
    SiteRowCounts,
    open_requests,
)
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of, translation
from fedstat.federation.disclosure.facts import ModelEvaluation, RowTerms
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.expected_releases import IterationLoop
from fedstat.federation.dry_run.synthetic import SyntheticRows
from fedstat.federation.message import Request, aggregate, check_lengths, control
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.inference.evaluation import Evaluation, bin_edges, merge_small_bins, probabilities
from fedstat.inference.recalibration import MAX_STEPS, Recalibration, RecalibrationState
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows, evaluate, linear_predictor
from fedstat.models.checks import check_layout
from fedstat.models.horizontal.rows import (
    INSIDE,
    SCORES,
    SUMS,
    RowsAtPoints,
    answered_at,
    blocks_of,
    describe_sums,
    glm_rows,
    summed,
)
from fedstat.models.horizontal.session import add
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.typing import Array, Floats

# ----------------------------------------------------------------------------------------------------
# Calibration slope and intercept over rows: a model with the linear predictor as its one column, by sums.

FAMILY = "evaluation"
JUDGED = "evaluated"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PredictorBlock(RowsAtPoints):
    """A part of the rows whose linear predictor is multiplied, and not the columns of which it is made."""

    predictor: Floats

    def terms(self, point: Any) -> list[RowTerms]:
        """Terms of the sums at a point."""
        X = np.column_stack([np.ones(len(self.rows)), self.rows.X @ self.predictor])
        one = np.ones((len(X), 1))
        found = super(PredictorBlock, self).terms(point)
        return [replace(term, left=X, right=X if term.right.shape[1] > 1 else one) for term in found]


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedModel:
    """The model of an evaluation: coefficients (p,) of the columns as a site standardized them."""

    opened: OpenRows
    distribution: DistributionSpec
    beta: Floats
    n: int

    def predictors(self) -> Iterator[Rows]:
        """Rows whose design is a constant and the linear predictor, chunk by chunk."""
        for complete, X in self.opened.chunks():
            rows = glm_rows(complete, X)
            eta = linear_predictor(rows, self.beta)
            yield replace(rows, X=np.column_stack([np.ones(len(eta)), eta]), offset=None)

    def columns(self) -> Iterator[Rows]:
        """Rows with all that the predictor is made of as columns: a constant, the design and the offset."""
        for complete, X in self.opened.chunks():
            rows = glm_rows(complete, X)
            parts = [np.ones((len(X), 1)), X, *([] if rows.offset is None else [rows.offset[:, None]])]
            yield replace(rows, X=np.ascontiguousarray(np.hstack(parts)), offset=None)

    def blocks(self, opened: OpenRows, chunks: Callable[[], Iterable[Rows]]) -> Iterator[PredictorBlock]:
        """Rows of these columns in blocks; only the linear predictor is multiplied."""
        predictor = self.coefficients(np.array([0.0, 1.0]))
        for one in blocks_of(opened, chunks):
            yield PredictorBlock(one.rows, one.intercept, predictor=predictor)

    def coefficients(self, gamma: Floats) -> Floats:
        """Coefficients of these columns at intercept and slope (2,)."""
        offset = [1.0] if self.has_offset else []
        return np.concatenate([gamma[:1], gamma[1] * self.beta, gamma[1] * np.array(offset)])

    @property
    def has_offset(self) -> bool:
        """Whether part of the predictor is known."""
        question = self.opened.question
        return bool(question.offsets) or "exposure" in question.weights


RECALIBRATION_FACTS = (*SUMS, ModelEvaluation)


@step(
    FAMILY,
    "bin_counts recalibrate",
    takes={"gamma": aggregate("intercept and slope of the linear predictor", common=True)},
    releases={
        "inside": INSIDE,
        "spread": SCORES["spread"],
        "score": summed("calibration: score", behind=RECALIBRATION_FACTS),
        "information": summed("calibration: expected information", 2, behind=RECALIBRATION_FACTS),
        "totals": summed("calibration: weights, deviance, Pearson residuals", behind=RECALIBRATION_FACTS),
        "squares": summed("calibration: squared errors of probabilities", 0, behind=RECALIBRATION_FACTS),
    },
)
def recalibrate(data: SiteData, state: State, gamma: Floats) -> dict[str, Array]:
    """Sum score and information of the response's regression on the linear predictor that was evaluated.

    `gamma` (2,) is intercept and slope. The sums are combinations of a fit's sums at the same coefficients,
    and are checked by the same rules. It releases, as a fit does, ``inside``, ``spread``, ``score`` (2,),
    ``information`` (2, 2), ``totals``: sums of the weights, deviance, Pearson's statistic; and ``squares``,
    the sum of squared differences between event and predicted probability, 0 for other responses.
    """
    model = state.use(JUDGED, EvaluatedModel, "no model was evaluated here; ask 'bin_counts' first")
    check_lengths(data.name, gamma=(gamma, 2))
    if not np.isfinite(gamma).all():
        raise MessageError(f"{data.name}: array 'gamma' must be finite")
    sums = evaluate(model.predictors(), gamma, model.distribution)
    nothing = {"inside": np.array(True), "spread": np.array(False), "squares": np.array(0.0)}
    nothing |= {"score": np.zeros(2), "information": np.zeros((2, 2)), "totals": np.zeros(3)}
    point = model.coefficients(gamma)
    # The columns that the predictor is made of, and not it alone: sums of these left in fits before.
    state.report(
        *answered_at(
            model.opened, model.columns, model.n, point, model.distribution, sums, nothing, model.blocks
        )
    )
    return describe_sums(sums) | {"squares": np.array(_squares(model, gamma))}


def _squares(model: EvaluatedModel, gamma: Floats) -> float:
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
    """Return the number of rows or trials of each row, (m,)."""
    weight = np.ones(len(rows.y))
    for factor in (rows.freq, rows.trials):
        weight = weight if factor is None else weight * factor
    return weight


ADDED = ("inside", "spread", "score", "information", "totals")


def recalibrated(
    sites: Sequence[str], session: str, distribution: DistributionSpec, masked: bool
) -> FitProtocol[tuple[Recalibration | None, Floats | None]]:
    """Regress the response on the evaluated linear predictor over all sites, whose parts may be `masked`.

    It returns the regression, and sums of squared errors by site and in total (K + 1,), nan for masked sites.
    Both are None if they are not available: if nearly all weight is in a few rows, or the outcomes are
    separated.
    """
    search = RecalibrationState(distribution.estimates_scale)
    squares: Floats | None = None
    while request := search.requested():
        replies = yield [
            Request(site, FAMILY, "recalibrate", {"gamma": gamma}, session)
            for gamma in request
            for site in sites
        ]
        sums = []
        for k in range(0, len(replies), len(sites)):
            point = replies[k : k + len(sites)]
            one = {name: add(point, name) for name in ADDED}
            one["inside"] = (one["inside"] == len(sites)) & (one["spread"] == len(sites))
            sums.append(one)
            if squares is None and one["inside"]:  # the first point is that of the model
                own = np.array([float(reply.arrays["squares"]) for reply in point])
                squares = np.append(np.full(len(own), np.nan) if masked else own, own.sum())
        search.take(sums)
    return search.found(), squares


# ----------------------------------------------------------------------------------------------------
# Evaluation of a fit over rows, from counts in bins at its sites or at new ones.

FEWEST = 3
"""Sites among which sums are hidden from each other."""
LOOP = IterationLoop(("recalibrate",), MAX_STEPS)


def place_of_bins(design: RowsDesign, beta: Floats) -> tuple[float, float]:
    """Return mean of a fit's linear predictor without offset, and its deviation were columns independent."""
    return float(design.mean @ beta), float(np.linalg.norm(design.spread * beta)) or 1.0


@step(
    FAMILY,
    takes={
        "beta": aggregate("coefficients in the units of the data"),
        "center": aggregate("mean of the linear predictor of the fit", 0),
        "width": aggregate("its deviation were columns independent", 0),
    },
    releases={
        # No sensitivity: one row more or less in a bin decides with which neighbor it is counted.
        "bins": aggregate(
            "rows, sums of response and of predicted mean by bin", 2, behind=(*OPEN_ROWS, ModelEvaluation)
        ),
        "least": control("fewest rows of a bin", 0),
    },
    request=DistributionSpec,
    requests=control("family and link"),
)
def bin_counts(
    data: SiteData, state: State, distribution: DistributionSpec, beta: Floats, center: Floats, width: Floats
) -> dict[str, Array]:
    """Count rows, and sum response and predicted mean, by bins of the linear predictor.

    `beta` (p,) is in the units of the data; for `center` and `width` see :func:`bin_edges`. It releases
    ``bins`` (3, B): rows (or trials), sum of the response, sum of the predicted means; bins with fewer rows
    than the owner's policy allows are merged with a neighbor. ``least`` is that number of rows.
    """
    if not float(width) > 0.0:
        raise MessageError(f"{data.name}: array 'width' must be positive")
    edges, link = bin_edges(distribution, float(center), float(width)), distribution.make().link
    model = _evaluated_model(data, state, distribution, beta)
    parts = list(_predictions(model))
    y, eta, weight = (np.concatenate(part) for part in zip(*parts, strict=True))
    at, B = np.searchsorted(edges, eta), len(edges) + 1
    # Merged where the rows are: the coordinator never sees a small count.
    cell = merge_small_bins(np.bincount(at, minlength=B), data.min_count)[at]
    by_row = (weight, weight * y, weight * link.inverse(eta))
    sums = np.array([np.bincount(cell, weights=values, minlength=B) for values in by_row])
    state.report(ModelEvaluation(sums))
    state.keep(JUDGED, model, model.n)
    return {"bins": sums, "least": np.array(data.min_count)}


def _evaluated_model(
    data: SiteData, state: State, distribution: DistributionSpec, beta: Floats
) -> EvaluatedModel:
    opened = rows_of(state)
    check_lengths(data.name, beta=(beta, len(opened.shift)))
    zeros, ones = np.zeros_like(opened.shift), np.ones_like(opened.scale)
    own = translation(opened.shift, opened.scale, zeros, ones) @ beta
    return EvaluatedModel(opened, distribution, own, state.entities)


def _predictions(model: EvaluatedModel) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield response (a proportion where there are trials), linear predictor and weight by chunk."""
    for complete, X in model.opened.chunks():
        rows = glm_rows(complete, X)
        yield rows.y, linear_predictor(rows, model.beta), trials_weight(rows)


def evaluate_rows(
    agreement: RowsSchema,
    design: RowsDesign,
    distribution: DistributionSpec,
    beta: Floats,
    partition: ClientPartition,
    *,
    recalibrate: bool | None = False,
) -> tuple[Evaluation, Ledger]:
    """Evaluate coefficients (p,), in the units of the data, on a partition's rows.

    `design` is that of the fit. Whether to `recalibrate` is, with None, for a binary response and where sums
    may leave: in clear, or hidden among those of three sites.
    """
    check_layout("evaluate()", partition, "horizontal")
    sites = tuple(SiteRowCounts(name, 0, 0) for name in partition.sites)
    ledger = Ledger()
    masks_wanted = any(site.policy.masked_only for site in partition.sites.values())
    if recalibrate is None:
        recalibrate = distribution.name == "Binomial" and not (masks_wanted and len(sites) < FEWEST)
    masked = recalibrate and masks_wanted and len(sites) > 1

    def protocol() -> FitProtocol[Evaluation]:
        place = place_of_bins(design, beta)
        agreed = replace(agreement, sites=sites)
        return _evaluation_protocol(agreed, distribution, beta, place, recalibrate, masked)

    analysis = _analysis(agreement, distribution, partition)
    return run_analysis(analysis, protocol, ledger), ledger


def _analysis(
    agreement: RowsSchema, distribution: DistributionSpec, partition: ClientPartition
) -> PostFitAnalysis:
    """Say what an evaluation is, for owners who are asked."""
    question = agreement.question
    formula = f"{question.response} ~ {' + '.join(question.terms) or 1}"
    rows = tuple(SiteRowCounts(name, len(at), len(at)) for name, at in partition.rows.items())
    return PostFitAnalysis(
        partition,
        "evaluate()",
        formula,
        str(distribution),
        SyntheticRows(replace(agreement, sites=rows), distribution).sites,
        dict.fromkeys(partition.sites, question.needed),
        (LOOP,),
    )


def _evaluation_protocol(
    agreement: RowsSchema,
    distribution: DistributionSpec,
    beta: Floats,
    place: tuple[float, float],
    recalibrate: bool,
    masked: bool,
) -> FitProtocol[Evaluation]:
    session, names = secrets.token_hex(8), tuple(row.site for row in agreement.sites)
    arrays = {"beta": beta, "center": np.array(place[0]), "width": np.array(place[1])}
    requests = [
        Request(site, FAMILY, "bin_counts", arrays, session, distribution.to_json()) for site in names
    ]
    # Both in one round: a site answers in the order in which it is asked.
    replies = yield [
        one for pair in zip(open_requests(agreement, session), requests, strict=True) for one in pair
    ]
    replies = replies[1::2]
    counted = np.array([reply.arrays["bins"] for reply in replies])
    edges = np.concatenate([[-np.inf], bin_edges(distribution, *place), [np.inf]])
    found, squares = None, None
    if recalibrate:
        requester = recalibrated(names, session, distribution, masked)
        found, squares = (
            yield from masked_protocol(requester, names, session, sums_only=True) if masked else requester
        )
    binary = distribution.name == "Binomial"
    return Evaluation(
        edges=edges,
        sites=names,
        n=counted[:, 0],
        observed=counted[:, 1],
        expected=counted[:, 2],
        binary=binary,
        least=max(int(reply.arrays["least"]) for reply in replies),
        means=probabilities(edges, distribution) if binary else None,
        squares=squares if binary else None,
        recalibration=found,
    )
