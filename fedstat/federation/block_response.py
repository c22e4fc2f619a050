"""The response at the institution that holds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, FormulaError
from fedstat.federation.block_coding import evaluate
from fedstat.federation.block_columns import (
    as_numbers,
    at_column,
    column_kind,
    missing_cells,
    pick_columns,
)
from fedstat.federation.formula_expression import parse_expression
from fedstat.federation.formula_tree import Column, Comparison, Expression, Level
from fedstat.typing import Bools, Floats


def build_response(frame: pd.DataFrame, text: str, columns: Sequence[str], client: str) -> Floats:
    """Compute the left side of a formula.

    Parameters
    ----------
    frame : DataFrame, n_rows rows
        The institution's table.
    text : str
        The left side, for instance ``"log(y)"`` or ``"visits > 0"`` (`Formula.response`).
    columns : sequence of str
        The columns that it reads (`Formula.response_columns`).
    client : str
        The institution, for messages.

    Returns
    -------
    ndarray, shape (n_rows,)
        NaN where a column is missing; 0 and 1 for a comparison or a logical column.

    Raises
    ------
    FormulaError
        If the text holds anything outside the formula language, or reads other columns.
    DesignError
        If a column is absent, holds categories, or infinite values arise.
    """
    expression = parse_expression(text, response=True)
    if set(expression.columns) != set(columns):
        raise FormulaError("formula: the response reads other columns than those declared for it.")
    series = pick_columns(frame, expression.columns, client)
    whole: Bools = np.logical_not(missing_cells(series.values(), len(frame)).any(axis=1))
    response = np.full(len(frame), np.nan)
    response[whole] = _values({name: one[whole] for name, one in series.items()}, expression, client)
    return response


def _values(series: dict[str, pd.Series], expression: Expression, client: str) -> Floats | Bools:
    match expression.tree:
        case Comparison(symbol=symbol, left=Column(name=name), right=Level(value=level)):
            equal = _equals(series[name], level, client, name)
            return equal if symbol == "==" else ~equal
    numbers = {name: _numbers(one, client, name) for name, one in series.items()}
    where = f"the response {expression.text!r} at client {client!r}"
    values: Floats = np.asarray(evaluate(expression.tree, numbers, {}, where), dtype=np.float64)
    return values


def _equals(series: pd.Series, level: str, client: str, name: str) -> Bools:
    if column_kind(series, client, name) == "number":
        raise DesignError(
            f"{at_column(client, name)} holds numbers and the response compares it with the text {level!r}; "
            "compare it with a number."
        )
    return np.asarray(series.to_numpy(dtype=object) == level, dtype=bool)


def _numbers(series: pd.Series, client: str, name: str) -> Floats:
    if pd.api.types.is_bool_dtype(series.dtype) or pd.api.types.infer_dtype(series) == "boolean":
        return np.asarray(series.to_numpy(dtype=object), dtype=np.float64)
    if column_kind(series, client, name) == "category":
        raise DesignError(
            f"{at_column(client, name)} holds categories, and a response must be numbers or true/false. "
            f"For one level against the others write {name} == 'level' on the left side."
        )
    return as_numbers(series, client, name)
