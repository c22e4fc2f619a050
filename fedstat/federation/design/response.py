"""Response and offset at the institution that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, FormulaError
from fedstat.federation.design.coding import evaluate
from fedstat.federation.design.formula.expression import parse_expression, parse_numeric
from fedstat.federation.design.formula.tree import Column, Counts, Expression, Level, Relation, Tree
from fedstat.federation.tables.columns import (
    as_numbers,
    at_column,
    column_kind,
    missing_cells,
    pick_columns,
)
from fedstat.typing import Bools, Floats


def build_response(frame: pd.DataFrame, text: str, columns: Sequence[str], client: str) -> Floats:
    """Compute the left side of a formula, for instance ``"log(y)"``, ``"visits > 0"`` or ``"cbind(a, b)"``.

    (n_rows,), or (n_rows, 2) for ``cbind``: successes, failures. NaN, in the whole row, where a column is
    missing; 0 and 1 for a comparison or a logical column.

    A FormulaError tells of a text outside the formula language, or that reads other columns than those given;
    a DesignError of a column that is absent or holds categories, of infinite values, and of a negative count.
    """
    expression = parse_expression(text, response=True)
    series = _declared(frame, expression.columns, columns, "response", client)
    whole = _whole(frame, series)
    shape = (len(frame), 2) if isinstance(expression.tree, Counts) else (len(frame),)
    # Transforms see whole rows only, so that what is not finite afterwards comes from the formula and is an
    # error.
    response = np.full(shape, np.nan)
    response[whole] = _values({name: one[whole] for name, one in series.items()}, expression, client)
    return response


def build_offset(frame: pd.DataFrame, texts: Sequence[str], columns: Sequence[str], client: str) -> Floats:
    """Compute the sum of a formula's offsets from what stands inside each, for instance ``("log(days)",)``.

    (n_rows,), on the scale of the linear predictor; NaN where a column is missing. Errors are those of
    :func:`build_response`.
    """
    expressions = [parse_numeric(text) for text in texts]
    read = dict.fromkeys(name for expression in expressions for name in expression.columns)
    series = _declared(frame, read, columns, "offset", client)
    whole = _whole(frame, series)
    numbers = {name: _numbers(one[whole], client, name, "an offset") for name, one in series.items()}
    offset = np.full(len(frame), np.nan)
    offset[whole] = 0.0
    for expression in expressions:
        offset[whole] += evaluate(expression.tree, numbers, {}, _where("offset", expression, client))
    return offset


def _declared(
    frame: pd.DataFrame, read: Iterable[str], columns: Sequence[str], what: str, client: str
) -> dict[str, pd.Series]:
    if set(read) != set(columns):
        raise FormulaError(f"formula: the {what} reads other columns than those declared for it.")
    return pick_columns(frame, read, client)


def _whole(frame: pd.DataFrame, series: dict[str, pd.Series]) -> Bools:
    whole: Bools = np.logical_not(missing_cells(series.values(), len(frame)).any(axis=1))
    return whole


def _where(what: str, expression: Expression, client: str) -> str:
    names = ", ".join(map(repr, expression.columns))
    return f"the {what} {expression.text!r} (of {names}) at institution {client!r}"


def _values(series: dict[str, pd.Series], expression: Expression, client: str) -> Floats | Bools:
    match expression.tree:
        case Relation(symbol=symbol, left=Column(name=name), right=Level(value=level)):
            # Before anything is turned into numbers: the column holds texts.
            equal = _equals(series[name], level, client, name)
            return equal if symbol == "==" else ~equal
    numbers = {name: _numbers(one, client, name, "a response") for name, one in series.items()}
    where = _where("response", expression, client)
    match expression.tree:
        case Counts(successes=successes, failures=failures):
            return _counts((successes, failures), numbers, where)
    values: Floats = np.asarray(evaluate(expression.tree, numbers, {}, where), dtype=np.float64)
    return values


def _counts(trees: tuple[Tree, Tree], numbers: dict[str, Floats], where: str) -> Floats:
    n = len(next(iter(numbers.values())))
    counts = np.empty((n, 2))
    for j, tree in enumerate(trees):
        counts[:, j] = evaluate(tree, numbers, {}, where)
    negative = int((counts < 0.0).any(axis=1).sum())
    if negative:
        raise DesignError(
            f"{where}: a count is negative for {negative:,} of {n:,} entities; expected successes and "
            "failures, as in cbind(events, n - events). Correct these rows or set them to missing."
        )
    return counts


def _equals(series: pd.Series, level: str, client: str, name: str) -> Bools:
    if column_kind(series, client, name) == "number":
        raise DesignError(
            f"{at_column(client, name)} holds numbers and the response compares it with the text {level!r}; "
            "compare it with a number."
        )
    return np.asarray(series.to_numpy(dtype=object) == level, dtype=bool)


def _numbers(series: pd.Series, client: str, name: str, what: str) -> Floats:
    if pd.api.types.is_bool_dtype(series.dtype) or pd.api.types.infer_dtype(series) == "boolean":
        return np.asarray(series.to_numpy(dtype=object), dtype=np.float64)
    if column_kind(series, client, name) == "category":
        remedy = f"For one level against the others write {name} == 'level' on the left side."
        raise DesignError(
            f"{at_column(client, name)} holds categories, and {what} must be numbers or true/false. "
            + (remedy if what == "a response" else "Use a column of numbers.")
        )
    return as_numbers(series, client, name)
