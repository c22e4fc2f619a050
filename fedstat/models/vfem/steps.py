"""Steps of a VFEM prediction at a site, and steps that VFEM shares with other families."""

from __future__ import annotations

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.vertical_design import block_of, response_of
from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights, ModelEvaluation
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import (
    ArrayDeclaration,
    aggregate,
    check_lengths,
    control,
    per_entity,
    presence,
)
from fedstat.inference.conformal import count_residuals
from fedstat.kernels.row_products import row_dots
from fedstat.models.vertical.exchange.steps import EXCHANGE_ORDER, ExchangeRules, exchange_steps
from fedstat.models.vertical.prediction.evaluation import average_in_groups, squared_errors
from fedstat.models.vertical.prediction.steps import LINEAR_PREDICTOR_STEPS, PREDICTOR
from fedstat.models.vfem.covariance.cross_products import PRODUCT_COLUMNS, STAGES, staged_weights
from fedstat.models.vfem.covariance.score_steps import (
    RESPONSE_OF_SCORES,
    RESPONSE_OF_SQUARES,
    SCORE_COLUMNS,
    TIMES,
)
from fedstat.models.vfem.iteration.state import CROSS_STEPS, FAMILY
from fedstat.models.vfem.weighted_steps import OF_HOLDER, TIMES_OF_WEIGHTED, WEIGHTED_COLUMNS
from fedstat.typing import Array, Bools, Floats, Ints

PATTERN_CODE = presence("missing pattern of each entity", dtype="int64")


@step(
    FAMILY,
    takes={
        "slopes": aggregate("coefficients by missing pattern", 2),
        "code": PATTERN_CODE,
    },
    releases={"linear_predictor": PREDICTOR},
)
def predict_by_pattern(data: SiteData, state: State, slopes: Floats, code: Ints) -> dict[str, Array]:
    """Linear predictor of the opened rows, (n,), with the slopes (G, p) of each row's pattern."""
    X = np.ascontiguousarray(block_of(state).X)
    _check_code(data, code, len(X), len(slopes), slopes.shape[1], X.shape[1])
    X = _where_known(data, X, slopes[code] != 0.0)
    out = np.empty(len(X))
    for g in np.unique(code):
        out[code == g] = row_dots(np.ascontiguousarray(X[code == g]), np.ascontiguousarray(slopes[g]))
    return {"linear_predictor": out}


@step(
    FAMILY,
    "predict_by_pattern",
    takes={
        "mu": aggregate("means"),
        "factors": aggregate("factors of the covariance of the estimates by pattern", 3),
        "code": PATTERN_CODE,
    },
    releases={
        "projection": ArrayDeclaration(
            "raw columns", "columns projected on the covariance of the estimates", 2, maskable=True
        )
    },
)
def project_by_pattern(
    data: SiteData, state: State, mu: Floats, factors: Floats, code: Ints
) -> dict[str, Array]:
    """Project the centered rows on the factor (p, r) of each row's pattern, of (G, p, r)."""
    X = block_of(state).X
    _check_code(data, code, len(X), len(factors), factors.shape[1], X.shape[1])
    check_lengths(data.name, mu=(mu, X.shape[1]))
    out = np.empty((len(X), factors.shape[2]))
    X = _where_known(data, X - mu, (factors != 0.0).max(axis=2)[code])
    for g in np.unique(code):
        out[code == g] = X[code == g] @ factors[g]
    return {"projection": out}


def _where_known(data: SiteData, X: Floats, request: Bools) -> Floats:
    """Set columns that rows lack to zero; a request must not use them."""
    missing = np.isnan(X)
    if (missing & request).any():
        raise MessageError(f"{data.name}: a pattern has columns that its entities lack")
    return np.where(missing, 0.0, X)


def _check_code(data: SiteData, code: Ints, n: int, patterns: int, given: int, columns: int) -> None:
    check_lengths(data.name, code=(code, n))
    if len(code) and not 0 <= code.min() <= code.max() < patterns:
        raise MessageError(f"{data.name}: array 'code' names a pattern that does not exist")
    if given != columns:
        raise MessageError(f"{data.name}: {given} slopes for {columns} columns")


@step(
    FAMILY,
    takes={
        "use": presence("which entities are compared", dtype="bool"),
        "predicted": per_entity("predictions", weighs="predictions"),
    },
    releases={
        "sums": aggregate(
            "number of predictions, their squared errors, squared deviations",
            behind=(EntityCount, ModelEvaluation, ExternalWeights),
        )
    },
)
def prediction_errors(data: SiteData, state: State, use: Bools, predicted: Floats) -> dict[str, Array]:
    """Compare predictions with the response of the rows in `use`.

    Released: ``sums`` of rows compared, squared errors, squared deviations of the response from its mean.

    Predictions are averaged as described in :func:`averaged`.
    """
    response = response_of(state)
    check_lengths(data.name, use=(use, len(response)), predicted=(predicted, int(np.count_nonzero(use))))
    y = response[use]
    there = np.isfinite(y)
    y, predicted = y[there], predicted[there]
    state.count_entities(len(y))
    deviation = y - y.mean() if len(y) else y
    all_rows = np.zeros(len(y), dtype=np.int64)
    used = average_in_groups(data, predicted, all_rows)
    (errors,) = squared_errors(y, predicted, used, all_rows, 1)
    sums = np.array([len(y), errors, deviation @ deviation])
    state.report(ModelEvaluation(sums))
    return {"sums": sums}


@step(
    FAMILY,
    takes={
        "use": presence("which entities are compared", dtype="bool"),
        "predicted": per_entity("predictions", weighs="predictions"),
        "code": presence("set of sites and range of predictions of each entity, by number", dtype="int64"),
        "groups": control("number of groups", 0, dtype="int64"),
        "unit": aggregate("standard deviation of the errors", 0),
    },
    releases={
        "counts": aggregate(
            "entities by group and size of their residual", 2, behind=(EntityCount, ModelEvaluation)
        )
    },
)
def residual_counts(
    data: SiteData, state: State, use: Bools, predicted: Floats, code: Ints, groups: Ints, unit: Floats
) -> dict[str, Array]:
    """Count the absolute residuals of predictions (n,) for the rows in `use`, by group (n,) and bin.

    No residual is released. Bins with fewer entities than the site's minimum are merged, and smaller groups
    are left out.
    """
    response, G = response_of(state), int(groups)
    check_lengths(data.name, use=(use, len(response)))
    y = response[use]
    check_lengths(data.name, predicted=(predicted, len(y)), code=(code, len(y)))
    if (
        not 1 <= G <= max(len(y), 1)
        or not float(unit) > 0.0
        or (len(y) and not 0 <= code.min() <= code.max() < G)
    ):
        raise MessageError(f"{data.name}: expected groups from 0 to {G - 1}, and a positive unit")
    there = np.isfinite(y)
    state.report(EntityCount(int(there.sum())))
    residuals = (y[there] - predicted[there]) / float(unit)
    counts = count_residuals(residuals, code[there], G, max(data.min_count, 1))
    state.report(ModelEvaluation(counts.ravel(), residuals=True))
    return {"counts": counts}


# ----------------------------------------------------------------------------------------------------
# Steps that VFEM shares with other families, and their order in its exchanges.


RULES = ExchangeRules(
    remembers=False,
    fills=True,
    shapes=True,
    weighted=True,
    columns={**PRODUCT_COLUMNS, **SCORE_COLUMNS, **WEIGHTED_COLUMNS},
    weights={STAGES[0]: staged_weights},
    times={**TIMES, **TIMES_OF_WEIGHTED},
    of_response=frozenset((RESPONSE_OF_SCORES, RESPONSE_OF_SQUARES)) | OF_HOLDER,
)
include(
    FAMILY,
    {**exchange_steps(RULES), **LINEAR_PREDICTOR_STEPS},
    {
        **EXCHANGE_ORDER,
        "open_product": f"{CROSS_STEPS} deal_product open_product response_products sem_constants "
        "sum_products sum_response weigh_columns weigh_response",
        "project_block": "predict_block",
    },
)
