"""Effects of numeric columns along their range: contrasts of coded rows, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, ModelError
from fedstat.federation.design.derivatives import (
    Direction,
    derivative_rows,
    difference_rows,
    direction_of,
)
from fedstat.federation.design.formula.syntax_tree import SPLINES, Column, Transform
from fedstat.federation.design.formula.terms import term_columns, term_text
from fedstat.federation.design.horizontal_design import RowsAgreement, RowsDesign
from fedstat.models.horizontal.prediction import code_frame
from fedstat.typing import Floats

POINTS = 101
PROBES = 20
"""Coded rows for each column of a design, from which the direction of a variable is found."""
SPREADS = 2.0
"""Standard deviations on each side of the mean, where no spline bounds the column."""


@dataclass(frozen=True, slots=True, eq=False)
class EffectContrasts:
    """Rows X(x) - X(x0) of the design, (m, p), at values x (m,) of a column and its reference x0."""

    values: Floats
    reference: float
    X: Floats


def effect_contrasts(
    agreement: RowsAgreement,
    design: RowsDesign,
    column: str,
    values: Sequence[float] | Floats | None,
    reference: float | None,
    at: Mapping[str, Any],
) -> EffectContrasts:
    """Return the contrasts between values of a column and its reference, at fixed values of the others.

    Columns that do not interact with it cancel. A ModelError names a column that is not in the model or that
    holds categories, and columns with which it interacts and that `at` lacks.
    """
    # Columns that only random effects have cancel.
    spec = agreement.spec.part(agreement.question.terms)
    names, levels = spec.columns, spec.levels
    if column not in names:
        raise ModelError(f"effect: the model has no column {column!r}; its columns: {', '.join(names)}")
    if column in levels:
        raise ModelError(f"effect: {column!r} holds categories; tidy() lists the effects of its levels")
    if wrong := [name for name in at if name not in names or name == column]:
        raise ModelError(f"at: expected other columns of the model than {column!r}, received {wrong}")
    together = [term_columns(term) for term in agreement.question.read_terms()]
    partners = {name for inside in together if column in inside for name in inside} - {column, *at}
    if partners:
        example = ", ".join(f"{name!r}: ..." for name in sorted(partners))
        raise ModelError(
            f"effect: {column!r} interacts with other columns. Fix their values: at={{{example}}}"
        )
    limits = known_limits(agreement, design)
    if values is None:
        if column not in limits:
            raise ModelError(
                f"values: no spline bounds {column!r}, and its mean is not known. Give values of {column!r}"
            )
        values = np.linspace(*limits[column], POINTS)
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise ModelError("values: expected a list of finite numbers")
    center = float(x.min() / 2.0 + x.max() / 2.0) if reference is None else float(reference)
    # A column that does not interact cancels at any value for which its terms can be computed.
    rest = {name: levels[name][0] if name in levels else 1.0 for name in names}
    rest |= {name: (low + high) / 2.0 for name, (low, high) in limits.items()} | dict(at)
    frame = pd.DataFrame(
        {**{name: [value] * (len(x) + 1) for name, value in rest.items()}, column: [*x, center]}
    )
    X = code_frame(agreement, design, frame)[1]
    if len(X) <= len(x):
        raise ModelError("reference, at: expected values that are not missing")
    return EffectContrasts(x, center, X[:-1] - X[-1])


def variable_directions(
    agreement: RowsAgreement, design: RowsDesign, logarithmic: bool = False
) -> list[Direction]:
    """Return how design rows change with each variable, in the order of the formula.

    A number changes by its derivative, with `logarithmic` by that of its logarithm; a category that is in
    products with other columns by the difference of each level from the first or reference level, and another
    one by each of its columns. No row of a table is read: rows are coded at values within the known limits.
    """
    spec = agreement.spec.part(agreement.question.terms)
    terms, levels = agreement.question.read_terms(), spec.levels
    variables = list(dict.fromkeys(name for term in terms for name in term_columns(term)))
    limits, random = known_limits(agreement, design), np.random.default_rng(0)
    m = PROBES * (len(design.names) + 1)
    table = pd.DataFrame(
        {
            name: random.choice(np.array(levels[name], dtype=object), m)
            if name in levels
            else random.uniform(*_inside(*limits.get(name, (0.5, 1.5))), m)
            for name in spec.columns
        }
    )
    table = table[code_frame(agreement, design, table)[0]]

    def code(frame: pd.DataFrame) -> Floats:
        seen, X = code_frame(agreement, design, frame)
        out = np.full((len(frame), X.shape[1]), np.nan)
        out[seen] = X
        return out

    X, out = code(table), list[Direction]()
    for name in variables:
        if name not in levels:
            D, x = derivative_rows(code, table, name), table[name].to_numpy(dtype=np.float64)
            one = _known_direction(name, X, D)
            if logarithmic and (one.plain is None or not np.allclose(X[:, one.plain], x)):
                one = replace(_known_direction(name, X, D * x[:, None]), plain=None)
            if one.plain is not None and "(" not in design.names[one.plain]:
                one = replace(one, name=design.names[one.plain])  # as the table of coefficients has it
            out.append(one)
            continue
        differences = {
            level: difference_rows(code, table, name, levels[name][0], level) for level in levels[name]
        }
        alone = {
            j: column
            for j, column in enumerate(design.names)
            if j < len(design.term_names) and _is_of(terms, design.term_names[j], name)
        }
        if all(term_columns(term) == (name,) or name not in term_columns(term) for term in terms):
            for j, column in alone.items():
                A = np.zeros((X.shape[1] + 1, X.shape[1]))
                A[0, j] = 1.0
                out.append(Direction(column, A, j))
            continue
        zero = [
            level for level in levels[name] if not code(table.assign(**{name: level}))[:, list(alone)].any()
        ]
        base = zero[0] if zero else levels[name][0]
        for level in levels[name]:
            if level == base:
                continue
            D = differences[level] - differences[base]
            own = [j for j in alone if np.allclose(D[:, j], 1.0)]
            label = design.names[own[0]] if len(own) == 1 else f"{name}[{level}]"
            out.append(_known_direction(label, X, D))
    return out


def directions_note(directions: Sequence[Direction]) -> str:
    """Say which variables change several columns, and which have no effect; empty if neither."""
    text = ""
    if several := [one.name for one in directions if one.plain is None and one.A is not None]:
        text += f" {', '.join(several)}: through all terms."
    if absent := [one.name for one in directions if one.A is None]:
        text += (
            f" {', '.join(absent)}: not shown, since sums of the columns do not give the derivative; "
            "effect() and plot_effect() show it along its range."
        )
    return text


def _inside(low: float, high: float) -> tuple[float, float]:
    """Return limits a little further inside, so that steps to the sides stay between them."""
    margin = 1e-3 * (high - low)
    return low + margin, high - margin


def _is_of(terms: Sequence[Any], text: str, name: str) -> bool:
    return any(term_text(term) == text and term_columns(term) == (name,) for term in terms)


def _known_direction(name: str, X: Floats, D: Floats) -> Direction:
    known = np.isfinite(X).all(axis=1) & np.isfinite(D).all(axis=1)
    if known.sum() < 2 * X.shape[1]:
        return Direction(name, None)
    return direction_of(name, X[known], D[known])


def known_limits(agreement: RowsAgreement, design: RowsDesign) -> dict[str, tuple[float, float]]:
    """Return the limits of columns: bounds of their splines, else two deviations about the mean.

    They follow from the formula and from moments of the design that the fit has released. Columns of which
    neither is known are absent.
    """
    bounds: dict[str, tuple[float, float]] = {}
    moments: dict[str, tuple[float, float]] = {}
    for term in agreement.question.read_terms():
        if len(term) > 1:
            continue
        outer, text = term[0].tree, term_text(term)
        function, state = "", dict[str, Any]()
        tree = outer
        if isinstance(outer, Transform):
            function, tree = outer.function, outer.operand
            state = dict(agreement.spec.state.get(outer.text, {}))
        if not isinstance(tree, Column):
            continue
        if function in SPLINES:
            ends = state["knots"][0], state["knots"][-1]
            if state.get("lower_bound") is not None:
                ends = state["lower_bound"], state["upper_bound"]
            bounds.setdefault(tree.name, (float(ends[0]), float(ends[1])))
        elif state.get("norms2"):  # of a polynomial, whose first column is x less its mean
            n, squares = (float(state["norms2"][degree]) for degree in "01")
            moments[tree.name] = float(state["alpha"]["0"]), (squares / n) ** 0.5
        elif function in ("", "center", "scale") and text in design.names:
            j, unit = design.names.index(text), float(state.get("scale") or 1.0)
            mean = unit * float(design.mean[j]) + float(state.get("center") or 0.0)
            moments[tree.name] = mean, unit * float(design.spread[j])
    ranges = {name: (mean - SPREADS * sd, mean + SPREADS * sd) for name, (mean, sd) in moments.items()}
    return ranges | bounds


SPANNING_ROWS, REMAINS = 400, 1e-8
"""Rows at which designs are compared, and the share of a column that is no combination of others."""


def spans(full: tuple[RowsAgreement, RowsDesign], restricted: tuple[RowsAgreement, RowsDesign]) -> bool:
    """Return whether the columns of one design are combinations of those of another, for all rows.

    Both are coded for invented rows, between the limits of the columns and at all pairs of levels. No data
    are needed: a column that is a combination for all of these is one for every row.
    """
    rng = np.random.default_rng(0)
    ranges = known_limits(*full)
    for name, (low, high) in known_limits(*restricted).items():
        first, last = ranges.get(name, (low, high))
        # Where intervals do not meet, a spline refuses the values, and the fits are not compared.
        ranges[name] = max(low, first), min(high, last)
    levels = {**full[0].spec.levels, **restricted[0].spec.levels}
    table: dict[str, Any] = {}
    for name in dict.fromkeys((*full[0].question.columns, *restricted[0].question.columns)):
        if name in levels:
            table[name] = rng.choice(np.array(levels[name], dtype=object), SPANNING_ROWS)
        else:
            table[name] = rng.uniform(*ranges.get(name, (1.0, 2.0)), SPANNING_ROWS)
    try:
        (seen, X), (also, Z) = (code_frame(*one, pd.DataFrame(table)) for one in (full, restricted))
    except DesignError:
        return False
    if not (seen.all() and also.all()):
        return False
    # A baseline hazard contains the constant that its columns are coded next to.
    if full[0].question.intercept:
        X = np.column_stack([np.ones(len(X)), X])
    X = X / np.maximum(np.abs(X).max(axis=0), np.finfo(float).tiny)
    rest = Z - X @ np.linalg.lstsq(X, Z, rcond=1e-12)[0]
    return bool((np.abs(rest).max(axis=0) <= REMAINS * np.abs(Z).max(axis=0)).all())
