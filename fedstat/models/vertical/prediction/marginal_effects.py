"""Marginal effects with columns at several sites: at the means, or averages over entities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedstat.errors import EstimationError, NotAvailableError, Remedy
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.derivatives import Direction, variable_directions
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.effects import all_inside, effect_sums, mean_derivatives
from fedstat.models.checks import check_choice
from fedstat.models.margins import (
    AT_MEAN,
    AT_OVERALL_OR_MEAN,
    HEADINGS,
    MarginalEffects,
    change_at,
    directions_note,
    effects_of,
    mean_jet,
    plain_places,
    shown_effects,
)
from fedstat.typing import Bools, Floats, Ints

WHERE = ("overall", "mean", "zero")
AVAILABLE_OVER_ROWS = "FederatedGLM, over rows, has them"
UNAVAILABLE_EFFECTS = dict.fromkeys(
    ("all", "median"), "effects at every entity, or their medians, are row-level values"
)
STAYS = (
    "its derivative is no combination of the columns, and stays at its site. columns=True gives the effects "
    "of single columns"
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
    directions: Callable[[bool], Sequence[Direction]],
    others: Mapping[str, Any],
    sources: Iterable[object],
) -> MarginalEffects:
    """Effects of all variables; `project` requests projections on a factor (p + 1, r) of the covariance.

    `directions` returns how rows change with variables, or with their logarithms; none if each is one column.
    `others` are further arguments of statsmodels' method.
    """
    if at in tuple(UNAVAILABLE_EFFECTS):
        why = f"get_margeff: at={at!r}: {UNAVAILABLE_EFFECTS[at]}"
        raise NotAvailableError(why, remedy=AT_OVERALL_OR_MEAN)
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
    linear = of.distribution.link == "Identity" and method == "dydx"
    found = [
        one if one.at_a_row or one.problem else replace(one, problem=STAYS) for one in directions(products)
    ]
    several = [one for one in found if one.plain is None and not one.problem]
    if linear:
        effects, moved = of.params[1:], factor[1:]
        where = "The link is the identity: the coefficients" if not several else "At the mean of every column"
        more = [_linear_change(of, one) for one in several]
    elif at == "overall":
        known_rows = partial(_complete_rows, of, products, project)
        if several:  # the columns themselves, of which the effects of several are sums
            eta, rows = known_rows(np.eye(len(of.params)))
            more, rows = [_average_change(of, one, eta, rows, log) for one in several], rows @ factor
        else:
            (eta, rows), more = known_rows(factor), []
        effects, moved = _averages(of, factor, log, eta, rows)
        where = f"Averages over the {len(eta):,} entities that every site has"
    else:
        effects, moved = _at_row(of, at, factor, log, products)
        where = {"mean": "At the mean of every column, treated as known", "zero": "At zero"}[at]
        more = [_change_at_row(of, one, at, log) for one in several]
    columns = [(name, j) for j, name in enumerate(of.names[1:])]
    if found:
        columns = [(name, j - 1) for j, name in plain_places(found)]
    made = {name: (effects[j], moved[j]) for name, j in columns if known[1 + j]}
    for one, (effect, slope) in zip(several, more, strict=True):
        if known[slope != 0.0].all():  # else a coefficient has no error
            made[one.name] = effect, slope @ factor
    shown = shown_effects(made, found)
    return MarginalEffects(
        shown,
        np.array([made[name][0] for name in shown]),
        np.array([made[name][1] for name in shown]),
        np.eye(factor.shape[1]),
        test_distribution=of.test_distribution,
        student=of.student,
        options={"method": method, "at": at},
        title=of.words,
        note=f"{where}. Standard errors by the delta method.{directions_note(found)}",
        sources=sources,
    )


def _mean_row(of: FittedMean, at: str = "mean") -> Floats:
    if of.means is None:
        raise NotAvailableError(
            "get_margeff: at='mean': this result was read from a file, which does not contain the means of "
            "the columns; fit the model again"
        )
    return np.append(1.0, of.means if at == "mean" else np.zeros_like(of.means))


def _linear_change(of: FittedMean, one: Direction) -> tuple[float, Floats]:
    """Return the effect of a variable with an identity link, and its slopes in the coefficients."""
    D = one.derivative(_mean_row(of))
    return float(D @ of.params), D


def _change_at_row(of: FittedMean, one: Direction, at: str, log: bool) -> tuple[float, Floats]:
    """Return the effect of a variable at one row, and its slopes in the coefficients."""
    row, B = _mean_row(of, at), of.params[None, :]
    effect, slopes = change_at(
        one, row, np.eye(len(row) + 1), B, lambda X: mean_jet(X @ of.params, of.distribution, log)
    )
    return float(effect[0]), slopes[0, 0]


def _average_change(
    of: FittedMean, one: Direction, eta: Floats, X: Floats, log: bool
) -> tuple[float, Floats]:
    """Return the average effect of a variable over rows (n, p + 1), and its slopes in the coefficients."""
    Z = np.column_stack([np.ones(len(X)), X])
    with np.errstate(all="ignore"):
        if one.ends is not None:
            low, high = (X + Z @ A for A in one.ends)
            # Predictors from the sites may have more than the columns.
            a, b = (mean_derivatives(eta + (Y - X) @ of.params, of.distribution, log) for Y in (low, high))
            effect, slopes = b[0] - a[0], b[1][:, None] * high - a[1][:, None] * low
        else:
            assert one.A is not None
            D, (_, first, second) = Z @ one.A, mean_derivatives(eta, of.distribution, log)
            effect = first * (D @ of.params)
            slopes = first[:, None] * D + (second * (D @ of.params))[:, None] * X
    if not np.isfinite(slopes).all():
        raise _outside(of)
    return float(effect.mean()), slopes.mean(axis=0)


def _at_row(of: FittedMean, at: str, factor: Floats, log: bool, products: bool) -> tuple[Floats, Floats]:
    """Effects at one row (p,), and their derivatives times the factor (p, r)."""
    if "offset" in of.roles:
        raise NotAvailableError(
            f"get_margeff: at={at!r} needs a value of the offset, whose mean is not known"
        )
    row = _mean_row(of, at)
    sums = effect_sums(row[None, :], row[None, :] @ of.params, np.ones(1), of.distribution, log, products)
    if not sums.inside:
        raise _outside(of)
    # The sums have a constant before the columns; here the first column is also one.
    effects, jacobian = effects_of(of.params, sums, {})
    return effects[1:], (jacobian @ factor)[1:]


def _complete_rows(
    of: FittedMean, products: bool, project: Callable[[Floats], ProjectedEntities], factor: Floats
) -> tuple[Floats, Floats]:
    """Return linear predictors (n,) and projections (n, r) of the entities that every site has."""
    if of.roles:
        lacks = f"predictions of this fit leave out its {' and '.join(of.roles)}"
        if "offset" in of.roles:
            raise NotAvailableError(f"get_margeff: at='overall': {lacks}; {AVAILABLE_OVER_ROWS}")
        raise NotAvailableError(f"get_margeff: at='overall': {lacks}", remedy=AT_MEAN)
    if products:
        raise NotAvailableError(
            "get_margeff: at='overall': elasticities by a column (eyex, dyex) average its values times a "
            f"function of all other columns; {AVAILABLE_OVER_ROWS}",
            remedy=Remedy("get_margeff(at='mean')", "use {arguments}, or method='dydx' or 'eydx'"),
        )
    found = project(factor)
    if not found.complete.any():
        raise EstimationError("get_margeff: at='overall': no entity is at every site", remedy=AT_MEAN)
    return found.linear[found.complete], found.projection[found.complete]


def _averages(of: FittedMean, factor: Floats, log: bool, eta: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Average effects (p,), and their derivatives times the factor (p, r)."""
    with np.errstate(all="ignore"):
        _, first, second = mean_derivatives(eta, of.distribution, log)
    if not (np.isfinite(first).all() and np.isfinite(second).all() and all_inside(eta, of.distribution)):
        raise _outside(of)
    # An effect beta_j E g'(x'b) changes by E g' with beta_j, and by beta_j E g'' x with b.
    moved = float(first.mean()) * factor[1:] + np.outer(of.params[1:], second @ rows / len(eta))
    return of.params[1:] * float(first.mean()), moved


def site_directions(spec: BlockSpec, place: Ints, size: int, logarithmic: bool) -> list[Direction]:
    """Return how rows (1, x) of `size` columns change with the variables of a site, whose are at `place`."""
    question = RowsRequest("", (), spec.terms, spec.columns, intercept=False)
    zeros = np.zeros(len(spec.names))
    design = RowsDesign(spec.names, spec.term_names, False, np.zeros(0, dtype=np.int64), zeros, zeros + 1.0)
    into = np.append(0, 1 + place)

    def wide(A: Floats) -> Floats:
        out = np.zeros((size + 1, size))
        out[np.ix_(into, place)] = A
        return out

    return [
        replace(
            one,
            A=None if one.A is None else wide(one.A),
            plain=None if one.plain is None else int(place[one.plain]),
            ends=None if one.ends is None else (wide(one.ends[0]), wide(one.ends[1])),
        )
        for one in variable_directions(RowsSchema(question, spec, ()), design, logarithmic)
    ]


def _outside(of: FittedMean) -> EstimationError:
    return EstimationError(
        f"get_margeff: a mean is outside the domain of family {of.distribution}, or its logarithm is not "
        "finite"
    )
