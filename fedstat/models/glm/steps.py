"""Steps of a site for a GLM: sums over its rows, and the fit of its rows alone.

A site works on columns that it standardised by its own means and deviations. Coefficients that arrive and
sums that leave belong to columns standardised over all sites, so that the coordinator needs no more than
the sum over sites.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.row_steps import OPEN_ROWS, OpenRows, rows_of, translation
from fedstat.federation.door.facts import MeansSummed, WorkingWeights
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.inference.heterogeneity.influence import quadratic_form
from fedstat.kernels.glm.local import fit_local
from fedstat.kernels.glm.rows import Rows
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.kernels.glm.sums import Sums, evaluate, log_likelihood, null_sums
from fedstat.models.horizontal.rows import (
    AT_THE_START,
    SCORES,
    answered_at,
    describe_sums,
    glm_rows,
    require_response,
    summed,
)
from fedstat.typing import Array, Bools, Floats

FAMILY = "glm"
LARGEST = 300.0
"""Offset above which its exponential is cut off; it serves as a first guess only."""


@dataclass(frozen=True, slots=True, eq=False)
class SiteModel:
    """One fit's family over the rows that its session opened."""

    opened: OpenRows
    distribution: DistributionSpec
    n: int
    p: int

    def chunks(self, columns: Bools | None = None) -> Iterator[Rows]:
        """Rows of the design, or of some of its columns, chunk by chunk."""
        for rows, X in self.opened.chunks():
            yield glm_rows(rows, X if columns is None else np.ascontiguousarray(X[:, columns]))

    def answered_at(
        self,
        beta: Floats,
        sums: Sums | None = None,
        instead: Mapping[str, Array] | None = None,
        distribution: DistributionSpec | None = None,
    ) -> tuple[MeansSummed | WorkingWeights, ...]:
        """Tell what sums at coefficients of the site's own columns rest on."""
        kind = distribution or self.distribution
        return answered_at(self.opened, self.chunks, self.n, beta, kind, sums, instead)

    def translation(self, name: str, beta: Floats | None, shift: Floats, scale: Floats) -> Floats:
        """Matrix that takes coefficients of all sites' standardised columns to those of this site's."""
        lengths = {"shift": (shift, self.p), "scale": (scale, self.p)}
        check_lengths(name, **lengths, **({} if beta is None else {"beta": (beta, self.p)}))
        if not (scale > 0.0).all():
            raise MessageError(f"{name}: array 'scale' must be positive")
        return translation(self.opened.shift, self.opened.scale, shift, scale)


def model_of(state: State) -> SiteModel:
    """Return this fit's model, or say that the fit was not started here."""
    rows_of(state)
    return state.use("glm", SiteModel, "this fit was not started here; ask 'start' first")


def start(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Check the response, and sum it; `text` is distribution and link.

    Released is ``response``: sum of the weights, of the weighted response, and the weighted sum of the
    exponentials of the offset.
    """
    opened = rows_of(state)
    model = SiteModel(opened, DistributionSpec.from_json(text), state.entities, len(opened.shift))
    sums = np.zeros(3)
    for rows in model.chunks():
        require_response(data.name, rows, model.distribution, opened.question.response)
        weight = np.ones(len(rows.y)) if rows.weight is None else rows.weight
        sums[:2] += weight.sum(), weight @ rows.y
        sums[2] += weight.sum() if rows.offset is None else weight @ np.exp(np.minimum(rows.offset, LARGEST))
    state.keep("glm", model, state.entities)
    if "glm point" in state:  # of another fit
        state.forget("glm point")
    return {"response": sums}, ""


def fit_alone(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Fit this site's rows alone, and release that fit; the text says what ``problem`` hindered it.

    ``beta`` (p,) and ``information`` (p, p) are for the columns as the site standardised them, zero for those
    that are constant here and where there is no fit; ``columns`` (2, p) the means and deviations by which it
    did; ``pearson`` is Pearson's statistic of the fit, and ``count`` the sum of the frequency weights, where
    there are any.
    """
    model = model_of(state)
    p, varies = model.p, model.opened.varies
    # Zeros keep the shapes that were declared where there is no fit; they add nothing to a mean.
    beta, information, pearson = np.zeros(p), np.zeros((p, p)), 0.0
    fit = fit_local(lambda: model.chunks(None if varies.all() else varies), model.distribution)
    if not fit.problem:
        pearson = fit.pearson
        beta[varies], information[np.ix_(varies, varies)] = fit.beta, fit.information
    arrays = {"beta": beta, "information": information, "columns": model.opened.own}
    arrays["pearson"] = np.array(pearson)
    if "freq_weights" in model.opened.question.weights:
        arrays["count"] = np.array(sum(rows.count for rows in model.chunks()))
    return arrays, json.dumps({"problem": fit.problem})


@dataclass(frozen=True, slots=True, eq=False)
class KeptSums:
    """Coefficients of the site's own columns, and the sums at them."""

    beta: Floats
    sums: Sums


def sums_at(
    state: State,
    model: SiteModel,
    beta: Floats,
    observed: bool = False,
    instead: Mapping[str, Array] | None = None,
) -> Sums:
    """Return the sums at coefficients of the site's own columns, and keep them.

    What is to leave `instead` of sums to which a few rows contribute nearly all tells the coordinator to take
    a shorter step; without it that is refused.
    """
    if "glm point" in state:
        point = state.use("glm point", KeptSums)
        if np.array_equal(point.beta, beta) and (point.sums.observed is not None or not observed):
            return point.sums
    # Facts are told before anything is described: the door judges what the rows weigh at this point.
    sums = evaluate(model.chunks(), beta, model.distribution, observed=observed)
    state.tell(*model.answered_at(beta, sums, instead))
    state.keep("glm point", KeptSums(beta, sums), state.entities)
    return sums


def describe_nothing(p: int, observed: bool) -> dict[str, Array]:
    """Tell the coordinator to take a shorter step."""
    zeros = np.zeros((p, p))
    arrays = {"inside": np.array(True), "spread": np.array(False)}
    arrays |= {"score": np.zeros(p), "information": zeros, "totals": np.zeros(3)}
    return arrays | ({"observed": zeros} if observed else {})


def sum_scores(
    data: SiteData,
    state: State,
    observed: Array,
    shift: Floats,
    scale: Floats,
    beta: Floats | None = None,
    null: Array | None = None,
) -> dict[str, Array]:
    """Sum score and information over the rows.

    `shift` and `scale` (p,) are mean and standard deviation of the columns over all sites, `beta` (p,)
    coefficients of the columns so standardised, the start of IRLS where left out; `null` is the intercept of
    the model without covariates, `observed` whether to add the observed information. Released are ``inside``:
    whether all means lie inside the distribution's domain; ``spread``: whether more than a few rows weigh in
    the sums. These are zero where one of the two is not so, and tell nothing. ``score`` (p,), ``information``
    and ``observed`` (p, p); ``totals``: sum of the frequency weights, deviance, Pearson's statistic;
    ``null``: score, information, deviance.
    """
    model, more = model_of(state), bool(observed)
    T = model.translation(data.name, beta, shift, scale)
    without = {}
    if null is not None:
        without["null"] = np.array(null_sums(model.chunks(), float(null), model.distribution)[:3])
    if beta is None:
        # Nobody has chosen coefficients: the weights are those of the data, and single out no row.
        state.tell(*AT_THE_START)
        sums = evaluate(model.chunks(), None, model.distribution)
    else:
        sums = sums_at(state, model, T @ beta, more, describe_nothing(model.p, more) | without)
    if more:
        assert sums.observed is not None
        without["observed"] = T.T @ sums.observed @ T
    return describe_sums(sums, T) | without


def judge(
    data: SiteData,
    state: State,
    beta: Floats,
    shift: Floats,
    scale: Floats,
    dispersion: Array,
    null: Array,
    meat: Array,
    between: Array,
    apart: Array,
) -> dict[str, Array]:
    """Sum what is needed once the estimate is there; refused where it leaves nearly all weight to a few rows.

    `beta`, `shift`, `scale` and `null` are as in :func:`sum_scores`, `dispersion` (2,) is that for the
    log-likelihood and for the one without covariates. Released are ``fit``: log-likelihood, and
    log-likelihood and deviance without covariates; and as asked ``meat`` (p, p), the outer products of the
    rows' scores; ``between`` (p, p), that of the site's score, for a covariance with sites as clusters;
    ``apart`` (2,), the site's part of the score test of equal coefficients, see
    :func:`fedstat.inference.heterogeneity.influence.quadratic_form`.
    """
    model = model_of(state)
    T = model.translation(data.name, beta, shift, scale)
    check_lengths(data.name, dispersion=(dispersion, 2))
    own = T @ beta
    at = sums_at(state, model, own)
    # Both likelihoods need the final dispersion, which is known only after the last sum_scores.
    llf = log_likelihood(model.chunks(), own, model.distribution, float(dispersion[0]))
    without = null_sums(model.chunks(), float(null), model.distribution, float(dispersion[1]))
    fit = np.array([llf, without.log_likelihood, without.deviance])
    arrays = {"defined": np.isfinite(fit), "fit": np.where(np.isfinite(fit), fit, 0.0)}
    if meat:
        sums = evaluate(model.chunks(), own, model.distribution, meat=True)
        assert sums.meat is not None
        arrays["meat"] = T.T @ sums.meat @ T
    if between:
        arrays["between"] = np.outer(T.T @ at.score, T.T @ at.score)
    if apart:
        varies = model.opened.varies
        arrays["apart"] = np.array(quadratic_form(at.score[varies], at.information[np.ix_(varies, varies)]))
    return arrays


COLUMNS = {
    "shift": Declared("aggregate", "means of the columns over all sites", common=True),
    "scale": Declared("aggregate", "standard deviations of the columns over all sites", common=True),
}
BETA = "coefficients of the standardised columns"
NULL = Declared("aggregate", "intercept of the model without covariates", 0, optional=True, common=True)


def _own(what: str, ndim: int = 1, *, optional: bool = False) -> Declared:
    return Declared("aggregate", f"site's own fit: {what}", ndim, behind=OPEN_ROWS, optional=optional)


STEPS: Mapping[str, Step] = {
    "start": Step(
        start,
        gives={"response": summed("sums of weights and response", behind=OPEN_ROWS)},
        text_in=Declared("control", "family and link", common=True),
    ),
    "fit_alone": Step(
        fit_alone,
        gives={
            "beta": _own("coefficients"),
            "information": _own("information", 2),
            "columns": _own("means and deviations of the columns", 2),
            "pearson": _own("Pearson's statistic", 0),
            "count": _own("sum of the frequency weights", 0, optional=True),
        },
        text_out=Declared("control", "what hindered the fit of the site's rows alone"),
    ),
    "sum_scores": Step(
        sum_scores,
        {
            "observed": Declared("control", "whether to sum the observed information", 0),
            **COLUMNS,
            "beta": Declared("aggregate", BETA, optional=True, common=True),
            "null": NULL,
        },
        {
            **SCORES,
            "observed": summed("observed information", 2, optional=True),
            "null": summed("the same without covariates", optional=True),
        },
    ),
    "judge": Step(
        judge,
        {
            **COLUMNS,
            "beta": Declared("aggregate", BETA, common=True),
            "dispersion": Declared(
                "aggregate", "dispersion, for the likelihoods with and without covariates", common=True
            ),
            "null": Declared("aggregate", "intercept of the model without covariates", 0, common=True),
            "meat": Declared("control", "whether to sum products of rows' scores", 0),
            "between": Declared("control", "whether to sum products of sites' scores", 0),
            "apart": Declared("control", "whether to sum the score test of equal coefficients", 0),
        },
        {
            "defined": Declared("control", "which of the sums are finite", maskable=True),
            "fit": summed("log-likelihoods with and without covariates"),
            "meat": summed("sum of outer products of rows' scores", 2, optional=True),
            "between": summed("outer product of the site's score", 2, optional=True),
            "apart": summed("score test of equal coefficients: the site's part, and its rank", optional=True),
        },
    ),
}
ORDER: Mapping[str, str] = {
    "fit_alone": "start",
    "sum_scores": "fit_alone judge start sum_scores",
    "judge": "sum_scores",
    "sum_nb2": "judge sum_nb2",
    "list_clusters": "judge",
    "sum_clusters": "list_clusters",
}
"""Which steps stand directly before which; coefficients that a fit starts from are told at any time."""
