"""Effects of numeric columns along their range: contrasts of coded rows, without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, ModelError, Remedy
from fedstat.federation.design.derivatives import code_frame, known_limits
from fedstat.federation.design.formula.terms import term_columns
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.typing import Floats

POINTS = 101


@dataclass(frozen=True, slots=True, eq=False)
class EffectContrasts:
    """Rows X(x) - X(x0) of the design, (m, p), at values x (m,) of a column and its reference x0."""

    values: Floats
    reference: float
    X: Floats


def effect_contrasts(
    agreement: RowsSchema,
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
        remedy = Remedy("tidy()", "{call} lists the effects of its levels")
        raise ModelError(f"effect: {column!r} holds categories", remedy=remedy)
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


SPANNING_ROWS, REMAINS = 400, 1e-8
"""Rows at which designs are compared, and the share of a column that is no combination of others."""


def spans(full: tuple[RowsSchema, RowsDesign], restricted: tuple[RowsSchema, RowsDesign]) -> bool:
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
