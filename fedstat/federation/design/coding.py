"""From columns to a design matrix: checked trees are computed here, formulaic codes and names them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from formulaic import ModelSpec, SimpleFormula
from formulaic.materializers import PandasMaterializer
from formulaic.materializers.types import FactorValues
from formulaic.parser.types import Factor
from formulaic.parser.types import Term as FormulaicTerm
from formulaic.transforms import TRANSFORMS, C
from formulaic.transforms.contrasts import TreatmentContrasts

from fedstat.errors import DesignError, FormulaError
from fedstat.federation.design.formula.contrasts import TREATMENT, contrast_matrix
from fedstat.federation.design.formula.terms import Term, term_text
from fedstat.federation.design.formula.tree import (
    SPLINES,
    Arithmetic,
    Category,
    Column,
    Expression,
    Level,
    Negative,
    Number,
    Relation,
    Transform,
    Tree,
    iter_transforms,
)
from fedstat.federation.message import FEW_NUMBERS, MOST_NUMBERS, NUMBERS_A_VALUE
from fedstat.federation.tables.columns import Columns
from fedstat.typing import Array, Bools, Floats, Ints

ROWS_A_NAME = 100
TransformStates: TypeAlias = dict[str, dict[Any, Any]]

STATE_KEYS: Mapping[str, frozenset[str]] = {
    "scale": frozenset({"center", "scale", "ddof"}),
    "center": frozenset({"center", "scale", "ddof"}),
    "poly": frozenset({"alpha", "norms2"}),
    "bs": frozenset({"lower_bound", "upper_bound", "knots"}),
    "cr": frozenset({"knots", "means"}),
    "cc": frozenset({"knots", "means"}),
}
"""As formulaic keeps it; of natural and cyclic splines all knots, and the means that are constrained."""
_ELEMENTWISE: Mapping[str, Callable[[Any], Any]] = {
    "log": np.log,
    "exp": np.exp,
    "sqrt": np.sqrt,
    "np.log": np.log,
    "np.exp": np.exp,
    "np.sqrt": np.sqrt,
}
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Coded:
    """A coded design without the intercept, (n_seen, p): its columns, and the term that each belongs to.

    `cells` (n_seen,) number the cells of terms of categories whose columns are no indicators of them.
    """

    X: Floats
    names: tuple[str, ...]
    term_names: tuple[str, ...]
    cells: Mapping[str, Ints] = field(default_factory=dict)


def evaluate(tree: Tree, numbers: Mapping[str, Floats], state: TransformStates, where: str) -> Any:
    """Compute a checked tree, categories excepted, from columns of numbers (n,): (n,), or formulaic's basis.

    State of a transform that `state` lacks is fixed from these data, and added. `where` names factor and
    institution in errors: a DesignError counts values that are not finite, or says that a transform's options
    do not fit the data.
    """
    match tree:
        case Column(name=name):
            return numbers[name]
        case Number(value=value):
            # A numpy number divides by zero to infinity, which is counted below, where a Python one would
            # raise.
            return np.float64(value)
        case Negative(operand=operand):
            return -evaluate(operand, numbers, state, where)
        case (
            Arithmetic(symbol=symbol, left=left, right=right)
            | Relation(symbol=symbol, left=left, right=right)
        ):
            pair = [evaluate(side, numbers, state, where) for side in (left, right)]
            with np.errstate(all="ignore"):
                return _require_finite(_BINARY[symbol](*pair), "arithmetic", where)
        case Transform(function=function, operand=operand):
            values = evaluate(operand, numbers, state, where)
            with np.errstate(all="ignore"):
                return _require_finite(_transform(tree, values, state, where), f"{function}()", where)
    raise DesignError(f"{where}: expected numbers.")


def code_design(
    terms: Sequence[Term], columns: Columns, state: TransformStates, *, intercept: bool, n: int, client: str
) -> Coded:
    """Code checked terms from columns of n entities as formulaic does; errors are those of :func:`evaluate`.

    Beside an intercept every factor loses a level to it. State that is not there yet is added to `state`.
    """
    _check_width(terms, columns, n, client)
    factors = {factor.label: factor for term in terms for factor in term}
    values = {label: _factor_values(factor, columns, state, client) for label, factor in factors.items()}
    # formulaic is handed labels and values only: it looks factors up, and evaluates no text.
    own = {_formulaic_term(term): term_text(term) for term in terms}
    # With the constant among the terms, formulaic spans every factor beside it; its column is dropped after.
    constant = [FormulaicTerm([Factor("1", eval_method="literal")])] if intercept else []
    spec = ModelSpec(SimpleFormula([*constant, *own]), na_action="ignore", output="numpy")
    matrix = PandasMaterializer(pd.DataFrame(index=range(n)), context=values).get_model_matrix(spec)
    X, names, term_names = _without_intercept(matrix, own, intercept)
    cells = ((term_text(term), _cells(term, values)) for term in terms)
    return Coded(X, names, term_names, {text: codes for text, codes in cells if codes is not None})


def _cells(term: Term, values: Mapping[str, Any]) -> Ints | None:
    """Give cells of a term of categories a number, unless all are columns that are coded by dummies."""
    plain = [isinstance(f.tree, Column) or getattr(f.tree, "coding", "") == TREATMENT for f in term]
    found = [getattr(values[factor.label], "__wrapped__", values[factor.label]) for factor in term]
    if all(plain) or not all(isinstance(one, pd.Series) for one in found):
        return None
    codes = [one.cat.codes.to_numpy(dtype=np.int64) for one in found]
    shape = [len(one.cat.categories) for one in found]
    return np.asarray(np.ravel_multi_index(codes, shape), dtype=np.int64)


def fix_states(
    terms: Sequence[Term], columns: Columns, there: Mapping[str, Bools], state: TransformStates, client: str
) -> None:
    """Fix the state of every transform from the rows that have its columns, (n,) of each column."""
    for factor in {factor.label: factor for term in terms for factor in term}.values():
        if any(True for _ in iter_transforms(factor.tree)):
            rows = np.logical_and.reduce([there[name] for name in factor.columns])
            numbers = {name: values[rows] for name, values in columns.numbers.items()}
            _factor_values(factor, Columns(numbers, columns.categories), state, client)


def _check_width(terms: Sequence[Term], columns: Columns, n: int, client: str) -> None:
    """Require a design that is not far larger than the columns that it is made of, before it is coded.

    A DesignError: an interaction of splines or of many levels names any number of columns.
    """
    width = sum(math.prod(_width(factor, columns) for factor in term) for term in terms)
    read = {name for term in terms for factor in term for name in factor.columns}
    rows = n + ROWS_A_NAME  # a column has a name as well
    square = min(2 * n * rows, MOST_NUMBERS)  # as many columns as entities, and some to spare
    if rows * width > max(FEW_NUMBERS, NUMBERS_A_VALUE * n * len(read), square):
        where = f" at institution {client!r}" if client else ""
        raise DesignError(
            f"{width:,} design columns{where}, made of {len(read)} for {n:,} entities; expected more "
            "entities than columns. Use fewer terms, levels or degrees of freedom."
        )


def _width(factor: Expression, columns: Columns) -> int:
    """Columns that a factor makes, at most."""
    match factor.tree:
        case Column(name=name) | Category(column=name) if name in columns.categories:
            return len(columns.categories[name].categories)
        case Transform(function="poly", options=options):
            return int(str(dict(options).get("degree", 1)))
        case Relation():
            return 2
        case Transform(function=function, options=options) if function in SPLINES:
            given: dict[str, Any] = dict(options)
            knots = len(given.get("knots", ())) + int(given.get("degree", 3))
            return max(int(given.get("df", 0)), knots) + 1
    return 1


def written_state(transform: Transform) -> dict[Any, Any] | None:
    """State of a spline as far as the formula has it, None where knots and bounds are not all written.

    Means that are to be constrained are assumed. A FormulaError tells of knots that do not ascend.
    """
    options = dict(transform.options)
    if not {"knots", "lower_bound", "upper_bound"} <= options.keys() or "df" in options:
        return None
    # Nothing is computed of data: knots and bounds as written are the whole state of the spline.
    places = np.array([options["lower_bound"], *options["knots"], options["upper_bound"]], dtype=np.float64)  # type: ignore[misc]
    if not (np.diff(places) > 0.0).all():
        raise FormulaError(
            f"formula: {transform.text!r}: expected knots that ascend between lower_bound and upper_bound"
        )
    state: TransformStates = {}
    evaluate(replace(transform, operand=Column("x")), {"x": places}, state, repr(transform.text))
    return state[transform.text]


def plain_state(state: object) -> Any:
    """State as JSON holds it; formulaic keeps numbers, arrays, lists and dicts."""
    match state:
        case dict():
            return {str(key): plain_state(value) for key, value in state.items()}
        case np.ndarray() | np.generic():
            return state.tolist()
        case list() | tuple():
            return [plain_state(value) for value in state]
        case _:
            return state


def restore_state(state: object) -> Any:
    """Undo :func:`plain_state`: formulaic counts the degrees of a polynomial in whole numbers."""
    match state:
        case dict():
            return {int(k) if k.isdigit() else k: restore_state(value) for k, value in state.items()}
        case list():
            return [restore_state(value) for value in state]
        case _:
            return state


def _transform(tree: Transform, values: Any, state: TransformStates, where: str) -> Any:
    if tree.function in _ELEMENTWISE:
        return _ELEMENTWISE[tree.function](values)
    mine = state.setdefault(tree.text, {})
    options: dict[str, Any] = dict(tree.options)
    # Asked here, since the general error below cannot count the values.
    if tree.function == "bs" and mine and options.get("extrapolation", "raise") == "raise":
        _require_inside(values, mine["lower_bound"], mine["upper_bound"], where)
    try:
        if tree.function in ("cr", "cc"):
            return _cubic_spline(tree.function, values, options, mine)
        found = TRANSFORMS[tree.function](values, **options, _state=mine)
    except (ValueError, ArithmeticError, IndexError, KeyError):
        # formulaic's own text may quote a bound, which is a value of the data
        raise DesignError(
            f"{where}: {tree.function}() cannot be computed with these options and data; a spline needs df "
            "of at least its degree and knots inside the range of the data."
        ) from None
    return _from_zero(found) if tree.function == "bs" else found


def _from_zero(spline: Any) -> Any:
    """Count columns from zero, as by patsy; formulaic keeps a place for the column that it leaves out."""
    columns = {place - 1: column for place, column in spline.items()}
    return FactorValues(columns, spline.__formulaic_metadata__, drop_field=None)


def _cubic_spline(function: str, values: Any, options: dict[str, Any], mine: dict[str, Any]) -> Any:
    """Natural ("cr") or cyclic ("cc") cubic spline, whose column means vanish where it is constrained."""
    theirs: dict[str, Any] = {}
    if mine:
        means = np.array(mine["means"], dtype=np.float64).reshape(1, -1) if mine["means"] else None
        places = mine["knots"]
        theirs = {"lower_bound": places[0], "upper_bound": places[-1], "knots": places, "constraints": means}
    found = TRANSFORMS[function](values, **options, _state=theirs)
    if not mine:
        means = theirs["constraints"]
        mine |= {"knots": theirs["knots"], "means": [] if means is None else np.ravel(means).tolist()}
    return _from_zero(found)


def _require_inside(values: Floats, lower: float, upper: float, where: str) -> None:
    outside = int(((values < lower) | (values > upper)).sum())
    if outside:
        raise DesignError(
            f"{where}: {outside:,} of {len(values):,} values lie outside the range that the spline was "
            "fitted on. Leave these entities out, or write extrapolation='clip' or 'extend' in the formula."
        )


def _require_finite(value: Any, what: str, where: str) -> Any:
    arrays: Array = np.column_stack(list(value.values())) if isinstance(value, dict) else np.atleast_1d(value)
    bad = ~np.isfinite(arrays)
    if bad.any():
        count = int(bad.reshape(len(bad), -1).any(axis=1).sum())
        raise DesignError(
            f"{where}: {what} gives values that are not finite for {count:,} of {len(arrays):,} entities "
            "(the logarithm of zero or less, a division by zero, too few distinct values). Change the "
            "transform, for instance log(x + 1), or set these values to missing."
        )
    return value


def _factor_values(factor: Expression, columns: Columns, state: TransformStates, client: str) -> Any:
    where = f"{factor.text!r}" + (f" at institution {client!r}" if client else "")
    match factor.tree:
        case Column(name=name) if name in columns.numbers:
            return columns.numbers[name]
        case Column(name=name):
            return pd.Series(columns.categories[name])
        case Category(column=name, reference=reference, coding=coding) if coding != TREATMENT:
            return _contrasts(columns.categories[name], coding, reference)
        case Category(column=name, reference=reference):
            contrast = None if reference is None else TreatmentContrasts(base=reference)
            return C(pd.Series(columns.categories[name]), contrast)
        case Relation(symbol=symbol, left=Column(name=name), right=Level(value=level)):
            if name in columns.numbers:
                raise DesignError(
                    f"{where}: column {name!r} holds numbers and is compared with the text {level!r}; "
                    "compare it with a number."
                )
            return _sides(_BINARY[symbol](columns.categories[name], level))
    text = [name for name in factor.columns if name not in columns.numbers]
    if text:
        raise DesignError(
            f"{where}: column {text[0]!r} holds categories and this transform needs numbers; use the column "
            "as it is, or convert it to numbers first."
        )
    values = evaluate(factor.tree, columns.numbers, state, where)
    return _sides(values) if isinstance(factor.tree, Relation) else values


def _sides(holds: Bools) -> Any:
    """Categories False and True of a comparison, as patsy codes it."""
    return C(pd.Series(pd.Categorical(holds, categories=[False, True])))


def _contrasts(category: pd.Categorical, coding: str, reference: object) -> Any:
    """Values that formulaic codes by a matrix with one row for each level, and names as patsy does."""
    levels = category.categories.tolist()

    def encode(values: Any, *, reduced_rank: bool, **others: Any) -> Any:
        matrix, names = contrast_matrix(coding, levels, reference, whole=not reduced_rank)
        return FactorValues(
            matrix[category.codes],
            kind="categorical",
            column_names=tuple(names),
            spans_intercept=not reduced_rank,
            format="{name}{field}",
            format_reduced="{name}{field}",
            encoded=True,
        )

    return FactorValues(pd.Series(category), kind="categorical", spans_intercept=True, encoder=encode)


def _formulaic_term(term: Term) -> FormulaicTerm:
    return FormulaicTerm([Factor(factor.label, eval_method="lookup") for factor in term])


def _without_intercept(
    matrix: Any, own: Mapping[FormulaicTerm, str], intercept: bool
) -> tuple[Floats, tuple[str, ...], tuple[str, ...]]:
    layout = [(name, row.term) for row in matrix.model_spec.structure for name in row.columns]
    kept = layout[1:] if intercept else layout
    X = np.ascontiguousarray(np.asarray(matrix)[:, int(intercept) :], dtype=np.float64)
    return X, tuple(name for name, _ in kept), tuple(own[term] for _, term in kept)
