"""Marginal effects with columns at several sites: at the means, or averages over entities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.effects import all_inside, effect_sums, mean_derivatives
from fedstat.models.checks import check_choice
from fedstat.models.margins import HEADINGS, MarginalEffects, effects_of
from fedstat.typing import Bools, Floats

WHERE = ("overall", "mean", "zero")
AVAILABLE_OVER_ROWS = "FederatedGLM, over rows, has them"
UNAVAILABLE_EFFECTS = dict.fromkeys(
    ("all", "median"), "effects at every entity, or their medians, are row-level values"
)


@dataclass(frozen=True, slots=True, eq=False)
class FittedMean:
    """Coefficients (p + 1,) with their covariance, nan where one has none, and the means of columns (p,).

    `means` is None if they are no longer known; `roles` has offset and weights of the fit by role; `words`
    are the names of model and response, `test_distribution` and `student` the distribution of tests.
    """

    names: tuple[str, ...]
    params: Floats
    cov: Floats
    distribution: DistributionSpec
    means: Floats | None
    roles: Mapping[str, str]
    words: tuple[str, str]
    test_distribution: Any
    student: bool


@dataclass(frozen=True, slots=True, eq=False)
class ProjectedEntities:
    """Linear predictors (n,), projections of rows on a covariance factor (n, r), and complete rows."""

    linear: Floats
    projection: Floats
    complete: Bools


def effects_over_columns(
    of: FittedMean,
    at: str,
    method: str,
    project: Callable[[Floats], ProjectedEntities],
    *,
    others: Mapping[str, Any],
) -> MarginalEffects:
    """Effects of all columns; `project` requests projections on a factor (p + 1, r) of the covariance.

    `others` are further arguments of statsmodels' method.
    """
    if at in tuple(UNAVAILABLE_EFFECTS):
        raise NotAvailableError(
            f"get_margeff: at={at!r}: {UNAVAILABLE_EFFECTS[at]}. Use at='overall' or at='mean'"
        )
    check_choice("at", at, WHERE)
    check_choice("method", method, tuple(HEADINGS))
    for name, value in others.items():
        if value:
            raise NotAvailableError(
                f"get_margeff: {name}: the discrete change of a column needs all other columns of the same "
                f"entity, which are at other sites; {AVAILABLE_OVER_ROWS}"
            )
    known = np.isfinite(np.diag(of.cov))
    values, vectors = np.linalg.eigh(of.cov[np.ix_(known, known)])
    factor = np.zeros((len(known), int(known.sum())))
    factor[known] = vectors * np.sqrt(values.clip(min=0.0))
    log, products = method.startswith("ey"), method.endswith("ex")
    if of.distribution.link == "Identity" and method == "dydx":
        effects, moved, where = of.params[1:], factor[1:], "The link is the identity: the coefficients"
    elif at == "overall":
        effects, moved, n = _averages(of, factor, log, products, project)
        where = f"Averages over the {n:,} entities that every site has"
    else:
        effects, moved = _at_row(of, at, factor, log, products)
        where = {"mean": "At the mean of every column, treated as known", "zero": "At zero"}[at]
    shown = known[1:]
    return MarginalEffects(
        [name for name, here in zip(of.names[1:], shown, strict=True) if here],
        effects[shown],
        moved[shown],
        np.eye(factor.shape[1]),
        test_distribution=of.test_distribution,
        student=of.student,
        options={"method": method, "at": at},
        title=of.words,
        note=f"{where}. Standard errors by the delta method.",
    )


def _at_row(of: FittedMean, at: str, factor: Floats, log: bool, products: bool) -> tuple[Floats, Floats]:
    """Effects at one row (p,), and their derivatives times the factor (p, r)."""
    if "offset" in of.roles:
        raise NotAvailableError(
            f"get_margeff: at={at!r} needs a value of the offset, whose mean is not known"
        )
    if of.means is None:
        raise NotAvailableError(
            "get_margeff: at='mean': this result was read from a file, which does not contain the means of "
            "the columns; fit the model again"
        )
    row = np.append(1.0, of.means if at == "mean" else np.zeros_like(of.means))
    sums = effect_sums(row[None, :], row[None, :] @ of.params, np.ones(1), of.distribution, log, products)
    if not sums.inside:
        raise _outside(of)
    # The sums have a constant before the columns; here the first column is also one.
    effects, jacobian = effects_of(of.params, sums, {})
    return effects[1:], (jacobian @ factor)[1:]


def _averages(
    of: FittedMean,
    factor: Floats,
    log: bool,
    products: bool,
    project: Callable[[Floats], ProjectedEntities],
) -> tuple[Floats, Floats, int]:
    """Average effects (p,), their derivatives times the factor (p, r), and the number of entities."""
    if of.roles:
        raise NotAvailableError(
            f"get_margeff: at='overall': predictions of this fit leave out its {' and '.join(of.roles)}; "
            + ("use at='mean'" if "offset" not in of.roles else AVAILABLE_OVER_ROWS)
        )
    if products:
        raise NotAvailableError(
            "get_margeff: at='overall': elasticities by a column (eyex, dyex) average its values times a "
            "function of all other columns; use at='mean', or method='dydx' or 'eydx'; "
            f"{AVAILABLE_OVER_ROWS}"
        )
    found = project(factor)
    if not found.complete.any():
        raise EstimationError("get_margeff: at='overall': no entity is at every site; use at='mean'")
    eta, rows = found.linear[found.complete], found.projection[found.complete]
    with np.errstate(all="ignore"):
        _, first, second = mean_derivatives(eta, of.distribution, log)
    if not (np.isfinite(first).all() and np.isfinite(second).all() and all_inside(eta, of.distribution)):
        raise _outside(of)
    # An effect beta_j E g'(x'b) changes by E g' with beta_j, and by beta_j E g'' x with b.
    moved = float(first.mean()) * factor[1:] + np.outer(of.params[1:], second @ rows / len(eta))
    return of.params[1:] * float(first.mean()), moved, len(eta)


def _outside(of: FittedMean) -> EstimationError:
    return EstimationError(
        f"get_margeff: a mean is outside the domain of family {of.distribution}, or its logarithm is not "
        "finite"
    )
