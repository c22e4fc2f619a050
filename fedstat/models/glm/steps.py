"""What a site computes for a GLM: sums over its rows, and the fit of its rows alone.

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
from fedstat.federation.design_rows import OpenRows, rows_of, translation
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.site import SiteData, State
from fedstat.kernels.glm import Rows, evaluate, log_likelihood, null_sums
from fedstat.kernels.glm_family import FamilySpec
from fedstat.kernels.glm_local import fit_local
from fedstat.models.kernel_rows import glm_rows, require_response
from fedstat.typing import Array, Bools, Floats

FAMILY = "glm"
LARGEST = 300.0
"""Offset above which its exponential is cut off; it serves as a first guess only."""


@dataclass(frozen=True, slots=True, eq=False)
class SiteModel:
    """One fit's family over the rows that its session opened."""

    opened: OpenRows
    family: FamilySpec
    n: int
    p: int

    def chunks(self, columns: Bools | None = None) -> Iterator[Rows]:
        """Rows of the design, or of some of its columns, chunk by chunk."""
        for rows, X in self.opened.chunks():
            yield glm_rows(rows, X if columns is None else np.ascontiguousarray(X[:, columns]))

    def translation(self, name: str, beta: Floats | None, shift: Floats, scale: Floats) -> Floats:
        """Matrix that takes coefficients of all sites' standardised columns to those of this site's."""
        lengths = {"shift": (shift, self.p), "scale": (scale, self.p)}
        check_lengths(name, **lengths, **({} if beta is None else {"beta": (beta, self.p)}))
        if not (scale > 0.0).all():
            raise MessageError(f"{name}: array 'scale' must be positive")
        return translation(self.opened.shift, self.opened.scale, shift, scale)


def model_of(data: SiteData, state: State) -> SiteModel:
    """Return this fit's model, or say that the fit was not started here."""
    rows_of(data, state)
    if "glm" not in state:
        raise MessageError(f"{data.name}: this fit was not started here; ask 'start' first")
    model: SiteModel = state.use("glm")
    return model


def start(data: SiteData, state: State, text: str, local: Array) -> tuple[dict[str, Array], str]:
    """Check the response, and fit this site's rows alone.

    Parameters
    ----------
    text : str
        The family.
    local : bool
        Whether to fit.

    Returns
    -------
    dict
        ``beta`` and ``information`` of the local fit, zero for columns that are constant here;
        ``response``: sum of the weights, of the weighted response, Pearson's statistic of the fit,
        and the weighted sum of the exponentials of the offset.
    str
        JSON: ``problem``, empty or what hindered the fit.
    """
    opened = rows_of(data, state)
    p = len(opened.shift)
    model = SiteModel(opened, FamilySpec.from_json(text), state.entities, p)
    sums = np.zeros(4)
    for rows in model.chunks():
        require_response(data.name, rows, model.family, opened.question.response)
        weight = np.ones(len(rows.y)) if rows.weight is None else rows.weight
        sums[:2] += weight.sum(), weight @ rows.y
        sums[3] += weight.sum() if rows.offset is None else weight @ np.exp(np.minimum(rows.offset, LARGEST))
    state.keep("glm", model, state.entities)
    beta, information, problem = np.zeros(p), np.zeros((p, p)), "not asked for"
    if local:
        varies = opened.varies
        fit = fit_local(lambda: model.chunks(None if varies.all() else varies), model.family)
        problem = fit.problem
        if not problem:
            sums[2] = fit.pearson
            beta[varies], information[np.ix_(varies, varies)] = fit.beta, fit.information
    return {"beta": beta, "information": information, "response": sums}, json.dumps({"problem": problem})


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

    Parameters
    ----------
    observed : bool
        Whether to add the observed information.
    shift, scale : (p,) arrays
        Mean and standard deviation of the columns over all sites.
    beta : (p,) array, optional
        Coefficients of the columns so standardised; the start of IRLS where left out.
    null : float, optional
        Intercept of the model without covariates.

    Returns
    -------
    dict
        ``score`` (p,), ``information`` (p, p), ``observed`` (p, p); ``totals``: sum of the frequency
        weights, deviance, Pearson's statistic; ``null``: score, information and deviance.
    """
    model = model_of(data, state)
    T = model.translation(data.name, beta, shift, scale)
    own = None if beta is None else T @ beta
    sums = evaluate(model.chunks(), own, model.family, observed=bool(observed))
    finite = np.isfinite(sums.deviance)
    totals = np.array([sums.weight, sums.deviance, sums.pearson]) if finite else np.zeros(3)
    arrays = {
        "inside": np.array(finite),
        "score": T.T @ sums.score,
        "information": T.T @ sums.information @ T,
        "totals": totals,
    }
    if sums.observed is not None:
        arrays["observed"] = T.T @ sums.observed @ T
    if null is not None:
        arrays["null"] = np.array(null_sums(model.chunks(), float(null), model.family)[:3])
    return arrays


def judge(
    data: SiteData,
    state: State,
    beta: Floats,
    shift: Floats,
    scale: Floats,
    dispersion: Array,
    null: Array,
    meat: Array,
) -> dict[str, Array]:
    """Sum what is needed once the estimate is there.

    Parameters
    ----------
    beta, shift, scale : (p,) arrays
        As in :func:`sum_scores`.
    dispersion : (2,) array
        For the log-likelihood, and for the one without covariates.
    null : float
        Intercept of the model without covariates.
    meat : bool
        Whether to add the outer products of the rows' scores.

    Returns
    -------
    dict
        ``fit``: log-likelihood, log-likelihood and deviance without covariates; ``meat`` (p, p).
    """
    model = model_of(data, state)
    T = model.translation(data.name, beta, shift, scale)
    check_lengths(data.name, dispersion=(dispersion, 2))
    llf = log_likelihood(model.chunks(), T @ beta, model.family, float(dispersion[0]))
    without = null_sums(model.chunks(), float(null), model.family, float(dispersion[1]))
    fit = np.array([llf, without.log_likelihood, without.deviance])
    arrays = {"defined": np.isfinite(fit), "fit": np.where(np.isfinite(fit), fit, 0.0)}
    if meat:
        sums = evaluate(model.chunks(), T @ beta, model.family, meat=True)
        assert sums.meat is not None
        arrays["meat"] = T.T @ sums.meat @ T
    return arrays


COLUMNS = {
    "shift": Declared("aggregate", "means of the columns over all sites"),
    "scale": Declared("aggregate", "standard deviations of the columns over all sites"),
}
BETA = "coefficients of the standardised columns"
NULL = Declared("aggregate", "intercept of the model without covariates", 0, optional=True)
STEPS: Mapping[str, Step] = {
    "start": Step(
        start,
        {"local": Declared("control", "whether to fit the site's rows alone", 0)},
        {
            "beta": Declared("aggregate", "coefficients of the site's rows alone"),
            "information": Declared("aggregate", "information of the site's rows alone", 2),
            "response": Declared("aggregate", "sums of weights and response"),
        },
        Declared("control", "family and link"),
        Declared("control", "what hindered the fit of the site's rows alone"),
    ),
    "sum_scores": Step(
        sum_scores,
        {
            "observed": Declared("control", "whether to sum the observed information", 0),
            **COLUMNS,
            "beta": Declared("aggregate", BETA, optional=True),
            "null": NULL,
        },
        {
            "inside": Declared("control", "whether all means lie inside the family's domain", 0),
            "score": Declared("aggregate", "score", maskable=True),
            "information": Declared("aggregate", "expected information", 2, maskable=True),
            "totals": Declared("aggregate", "sums of weights, deviance, Pearson residuals", maskable=True),
            "observed": Declared("aggregate", "observed information", 2, maskable=True, optional=True),
            "null": Declared("aggregate", "the same without covariates", maskable=True, optional=True),
        },
    ),
    "judge": Step(
        judge,
        {
            **COLUMNS,
            "beta": Declared("aggregate", BETA),
            "dispersion": Declared(
                "aggregate", "dispersion, for the likelihoods with and without covariates"
            ),
            "null": Declared("aggregate", "intercept of the model without covariates", 0),
            "meat": Declared("control", "whether to sum products of scores", 0),
        },
        {
            "defined": Declared("control", "which of the sums are finite"),
            "fit": Declared("aggregate", "log-likelihoods with and without covariates", maskable=True),
            "meat": Declared("aggregate", "sum of outer products of scores", 2, maskable=True, optional=True),
        },
    ),
}
