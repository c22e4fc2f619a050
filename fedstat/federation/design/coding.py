"""Coding: from columns to design matrix, response and offset, and the specification of a coding."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
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

from fedstat import codec
from fedstat.errors import DesignError, FormulaError
from fedstat.federation.design.formula.expression import (
    MOST_PARSED,
    parse_expression,
    parse_numeric,
    parse_subset,
)
from fedstat.federation.design.formula.syntax_tree import (
    SPLINES,
    TREATMENT,
    Arithmetic,
    Category,
    Column,
    Counts,
    Expression,
    Level,
    Negative,
    Number,
    Relation,
    Survival,
    Transform,
    Tree,
    contrast_matrix,
    has_knots,
    iter_columns,
    iter_transforms,
)
from fedstat.federation.design.formula.terms import Term, parse_terms, term_columns, term_text
from fedstat.federation.message import FEW_NUMBERS, MOST_NUMBERS, NUMBERS_A_VALUE
from fedstat.federation.tables.columns import (
    ColumnKind,
    Columns,
    LevelValue,
    as_numbers,
    at_column,
    column_kind,
    level_places,
    missing_cells,
    pick_columns,
)
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# From columns to a design matrix: checked trees are computed here, formulaic codes and names them.

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
_SLOPES: Mapping[str, Callable[[Any], Any]] = {
    "log": np.reciprocal,
    "exp": np.exp,
    "sqrt": lambda u: 0.5 / np.sqrt(u),
}
_BINARY_SLOPES: Mapping[str, Callable[[Any, Any, Any, Any], Any]] = {
    "+": lambda u, v, du, dv: du + dv,
    "-": lambda u, v, du, dv: du - dv,
    "*": lambda u, v, du, dv: u * dv + du * v,
    "/": lambda u, v, du, dv: (du - u / v * dv) / v,
    "**": lambda u, v, du, dv: v * u ** (v - 1.0) * du,  # an exponent is a number
}
SPLINE_STEP = 1e-5
"""Step of the differences of a spline, relative to its range."""
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
class CodedColumns:
    """A coded design without the intercept, (n_seen, p): its columns, and the term that each belongs to.

    `cells` (n_seen,) number the cells of terms of categories whose columns are no indicators of them.
    `effects` are the columns of each random effect; those that no fixed term has follow the first `fixed`
    ones.
    """

    X: Floats
    names: tuple[str, ...]
    term_names: tuple[str, ...]
    cells: Mapping[str, Ints] = field(default_factory=dict)
    effects: tuple[tuple[str, ...], ...] = ()
    fixed: int = -1


def evaluate(tree: Tree, numbers: Mapping[str, Floats], state: TransformStates, where: str) -> Any:
    """Compute a checked tree, categories excepted, from columns of numbers (n,): (n,), or formulaic's basis.

    State of a transform that `state` lacks is fixed from these data, and added. `where` names factor and
    site in errors: a DesignError counts values that are not finite, or says that a transform's options
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


def differentiate(
    tree: Tree, by: str, numbers: Mapping[str, Floats], state: TransformStates, where: str
) -> Any:
    """Compute the derivative of a checked tree by a column of numbers, of the type of :func:`evaluate`.

    At a kink of a spline it is the mean of the slopes on both sides. Comparisons have no derivative.
    """
    match tree:
        case Column(name=name):
            return np.full(len(numbers[by]), float(name == by))
        case Number():
            return np.float64(0.0)
        case Negative(operand=operand):
            return -differentiate(operand, by, numbers, state, where)
        case Arithmetic(symbol=symbol, left=left, right=right):
            u, v = (evaluate(side, numbers, state, where) for side in (left, right))
            du, dv = (differentiate(side, by, numbers, state, where) for side in (left, right))
            with np.errstate(all="ignore"):
                return _require_finite(_BINARY_SLOPES[symbol](u, v, du, dv), "the derivative", where)
        case Transform(function=function, operand=operand):
            values = np.asarray(evaluate(operand, numbers, state, where), dtype=np.float64)
            inner = differentiate(operand, by, numbers, state, where)
            with np.errstate(all="ignore"):
                found = _slope(tree, values, inner, state, where)
                return _require_finite(found, f"the derivative of {function}()", where)
    raise DesignError(f"{where}: expected numbers.")


def _slope(tree: Transform, u: Floats, du: Floats, state: TransformStates, where: str) -> Any:
    """Return the derivative of a transform at values u (n,) of its operand, which changes by du."""
    if tree.function in _ELEMENTWISE:
        return _SLOPES[tree.function.removeprefix("np.")](u) * du
    found, mine = _transform(tree, u, state, where), state[tree.text]
    if tree.function in ("center", "scale"):
        return np.full(len(u), 1.0 / float(mine.get("scale") or 1.0)) * du
    if tree.function == "poly":
        degree = np.shape(found)[1]
        if "alpha" not in mine:
            return np.column_stack([k * u ** (k - 1) for k in range(1, degree + 1)]) * du[:, None]
        alpha, norms = mine["alpha"], mine["norms2"]
        P, D = np.ones((len(u), degree + 1)), np.zeros((len(u), degree + 1))
        for k in range(degree):
            beta = norms[k] / norms[k - 1] if k else 0.0
            P[:, k + 1] = (u - alpha[k]) * P[:, k] - beta * P[:, k - 1]
            D[:, k + 1] = P[:, k] + (u - alpha[k]) * D[:, k] - beta * D[:, k - 1]
        D = D[:, 1:] / np.sqrt([norms[k] for k in range(1, degree + 1)]) * du[:, None]
        return FactorValues(D, found.__formulaic_metadata__)
    # A spline: differences that do not cross its bounds, and are of second order at these.
    low, high = (
        (mine[name] for name in ("lower_bound", "upper_bound"))
        if tree.function == "bs"
        else (
            mine["knots"][0],
            mine["knots"][-1],
        )
    )
    h = SPLINE_STEP * (high - low)
    beyond = np.where(u < low, np.minimum(u, low - h), np.maximum(u, high + h))
    middle = np.where((u >= low) & (u <= high), np.clip(u, low + h, high - h), beyond)
    below, at, above = (_transform(tree, middle + step, state, where) for step in (-h, 0.0, h))
    slopes = {
        key: (
            (above[key] - below[key]) / (2.0 * h)
            + (u - middle) * (above[key] - 2.0 * at[key] + below[key]) / h**2
        )
        * du
        for key in at
    }
    return FactorValues(slopes, found.__formulaic_metadata__)


def code_design(
    terms: Sequence[Term],
    columns: Columns,
    state: TransformStates,
    *,
    intercept: bool,
    n: int,
    site: str,
    by: str = "",
) -> CodedColumns:
    """Code checked terms from columns of n entities as formulaic does; errors are those of :func:`evaluate`.

    Beside an intercept every factor loses a level to it. State that is not there yet is added to `state`.
    With `by`, a column of numbers, the derivatives of all design columns by it are coded instead.
    """
    _check_width(terms, columns, n, site)
    if intercept and not by and all(_is_plain(term, columns) for term in terms):
        return _plain_design(terms, columns, n)
    factors = {factor.label: factor for term in terms for factor in term}
    values = {label: _factor_values(factor, columns, state, site) for label, factor in factors.items()}
    if not by:
        return _coded_values(terms, values, intercept, n)
    # A column is a product of factors, so its derivative is a sum over the factors that read the column.
    total, X = _coded_values(terms, values, intercept, n), list[Floats]()
    for label, factor in factors.items():
        if by in factor.columns and not isinstance(factor.tree, Relation | Category):
            where = f"{factor.text!r}" + (f" at site {site!r}" if site else "")
            slope = differentiate(factor.tree, by, columns.numbers, state, where)
            here = {term_text(term) for term in terms if label in [one.label for one in term]}
            moved = _coded_values(terms, values | {label: slope}, intercept, n).X
            X.append(moved * [text in here for text in total.term_names])
    return replace(total, X=np.sum(X, axis=0) if X else np.zeros_like(total.X))


def _is_plain(term: Term, columns: Columns) -> bool:
    """Whether a term is one column of numbers, or indicators of all levels of a column but one."""
    match [factor.tree for factor in term]:
        case [Column()]:
            return True
        case [Category(column=name, coding=coding, reference=reference)]:
            return coding == TREATMENT and (
                reference is None or reference in columns.categories[name].categories
            )
    return False


def _plain_design(terms: Sequence[Term], columns: Columns, n: int) -> CodedColumns:
    """Code plain terms next to an intercept: the columns and names of formulaic, in a tenth of its time."""
    X, names, term_names = list[Array](), list[str](), list[str]()
    for term in terms:
        (factor,) = term
        name = factor.columns[0]
        if isinstance(factor.tree, Column) and name in columns.numbers:
            added = {factor.label: columns.numbers[name]}
        else:
            held, reference = columns.categories[name], getattr(factor.tree, "reference", None)
            levels = held.categories.tolist()
            base = 0 if reference is None else levels.index(reference)
            added = {
                f"{factor.label}[T.{level}]": held.codes == code
                for code, level in enumerate(levels)
                if code != base
            }
        X += added.values()
        names += added
        term_names += [term_text(term)] * len(added)
    coded = np.column_stack(X).astype(np.float64) if X else np.zeros((n, 0))
    return CodedColumns(np.ascontiguousarray(coded), tuple(names), tuple(term_names))


def _coded_values(terms: Sequence[Term], values: dict[str, Any], intercept: bool, n: int) -> CodedColumns:
    """Code terms from the values of their factors."""
    values = dict(values)
    # formulaic is handed labels and values only: it looks factors up, and evaluates no text.
    own = {_formulaic_term(term): term_text(term) for term in terms}
    # With the constant among the terms, formulaic spans every other factor; its column is dropped after.
    constant = [FormulaicTerm([Factor("1", eval_method="literal")])] if intercept else []
    spec = ModelSpec(SimpleFormula([*constant, *own]), na_action="ignore", output="numpy")
    materializer = PandasMaterializer(pd.DataFrame(index=range(n)), context=values)
    matrix = materializer.get_model_matrix(spec)
    X, names, term_names = _without_intercept(matrix, own, intercept)
    cells = [(term_text(term), _cells(term, values)) for term in terms]
    # formulaic leaves cycles that refer to both, which would keep the columns in memory.
    vars(materializer).clear()
    values.clear()
    return CodedColumns(X, names, term_names, {text: codes for text, codes in cells if codes is not None})


def _cells(term: Term, values: Mapping[str, Any]) -> Ints | None:
    """Return the number of each row's cell in a categorical term; None if indicators alone code the term."""
    plain = [isinstance(f.tree, Column) or getattr(f.tree, "coding", "") == TREATMENT for f in term]
    found = [getattr(values[factor.label], "__wrapped__", values[factor.label]) for factor in term]
    if all(plain) or not all(isinstance(one, pd.Series) for one in found):
        return None
    codes = [one.cat.codes.to_numpy(dtype=np.int64) for one in found]
    shape = [len(one.cat.categories) for one in found]
    return np.asarray(np.ravel_multi_index(codes, shape), dtype=np.int64)


def fix_states(
    terms: Sequence[Term], columns: Columns, there: Mapping[str, Bools], state: TransformStates, site: str
) -> None:
    """Fix the state of every transform from the rows that have its columns, (n,) of each column."""
    for factor in {factor.label: factor for term in terms for factor in term}.values():
        if any(True for _ in iter_transforms(factor.tree)):
            rows = np.logical_and.reduce([there[name] for name in factor.columns])
            numbers = {name: values[rows] for name, values in columns.numbers.items()}
            _factor_values(factor, Columns(numbers, columns.categories), state, site)


def _check_width(terms: Sequence[Term], columns: Columns, n: int, site: str) -> None:
    """Require a design that is not far larger than the columns that it is made of, before it is coded.

    A DesignError: an interaction of splines or of many levels names any number of columns.
    """
    width = sum(math.prod(_width(factor, columns) for factor in term) for term in terms)
    read = {name for term in terms for factor in term for name in factor.columns}
    rows = n + ROWS_A_NAME  # a column has a name as well
    square = min(2 * n * rows, MOST_NUMBERS)  # as many columns as entities, and some to spare
    if rows * width > max(FEW_NUMBERS, NUMBERS_A_VALUE * n * len(read), square):
        where = f" at site {site!r}" if site else ""
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
    """Return the state of a spline as the formula defines it, None if not all knots and bounds are written.

    Means that are to be constrained are assumed. Raises a FormulaError for knots that do not ascend.
    """
    if not has_knots(transform):
        return None
    options = dict(transform.options)
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
            "fitted on. Leave these entities out; the formula can have extrapolation='clip' or 'extend' as "
            "well"
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


def _factor_values(factor: Expression, columns: Columns, state: TransformStates, site: str) -> Any:
    where = f"{factor.text!r}" + (f" at site {site!r}" if site else "")
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
            "without the transform, or convert it to numbers first."
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
        matrix, names = contrast_matrix(coding, levels, reference, complete=not reduced_rank)
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


# ----------------------------------------------------------------------------------------------------
# Response and offset at the site that holds them.


def build_response(frame: pd.DataFrame, text: str, columns: Sequence[str], site: str) -> Floats:
    """Compute the left side of a formula, for instance ``"log(y)"``, ``"visits > 0"`` or ``"cbind(a, b)"``.

    Returns (n_rows,), or (n_rows, 2) for ``cbind``: successes, failures. A row is NaN if a column is
    missing; a comparison or a logical column is 0 or 1, and ``C(y, levels=[...])`` the place of the level.

    Raises a FormulaError for a text outside the formula language, or one that reads other columns than those
    given; a DesignError for a column that is absent or holds categories, infinite values, and negative
    counts.
    """
    expression = parse_expression(text, response=True)
    series = _declared(frame, expression.columns, columns, "response", site)
    complete = _complete(frame, series)
    shape = (len(frame), 2) if isinstance(expression.tree, Counts) else (len(frame),)
    # Transforms see complete rows only, so a value that is not finite afterwards comes from the formula and
    # is an error.
    response = np.full(shape, np.nan)
    response[complete] = _values({name: one[complete] for name, one in series.items()}, expression, site)
    return response


def rows_within(frame: pd.DataFrame, subset: Sequence[str], site: str) -> Bools:
    """Return which complete rows satisfy all comparisons of a subset, (n_rows,).

    A DesignError names a column of categories that is compared with a number, and the reverse.
    """
    within = np.ones(len(frame), dtype=bool)
    for expression in (one for text in subset for one in parse_subset(text)):
        series = pick_columns(frame, expression.columns, site)
        match expression.tree:
            case Relation(symbol=symbol, left=Column(name=name), right=Level(value=level)):
                equal = _equals(series[name], level, site, name, "the subset")
                within &= equal if symbol == "==" else ~equal
            case Relation(
                symbol="==" | "!=" as symbol, left=Column(name=name), right=Number(value=value)
            ) if isinstance(
                dtype := series[name].dtype, pd.CategoricalDtype
            ) and pd.api.types.is_numeric_dtype(dtype.categories.dtype):
                equal = series[name].to_numpy(dtype=object) == value
                within &= equal if symbol == "==" else ~equal
            case tree:
                numbers = {name: _numbers(one, site, name, "a subset") for name, one in series.items()}
                where = _where("subset", expression, site)
                within &= np.asarray(evaluate(tree, numbers, {}, where), dtype=np.float64) != 0.0
    return within


def build_offset(frame: pd.DataFrame, texts: Sequence[str], columns: Sequence[str], site: str) -> Floats:
    """Compute the sum of a formula's offsets from what stands inside each, for instance ``("log(days)",)``.

    (n_rows,), on the scale of the linear predictor; NaN where a column is missing. Errors are those of
    :func:`build_response`.
    """
    expressions = [parse_numeric(text) for text in texts]
    read = dict.fromkeys(name for expression in expressions for name in expression.columns)
    series = _declared(frame, read, columns, "offset", site)
    complete = _complete(frame, series)
    numbers = {name: _numbers(one[complete], site, name, "an offset") for name, one in series.items()}
    offset = np.full(len(frame), np.nan)
    offset[complete] = 0.0
    for expression in expressions:
        offset[complete] += evaluate(expression.tree, numbers, {}, _where("offset", expression, site))
    return offset


def _declared(
    frame: pd.DataFrame, read: Iterable[str], columns: Sequence[str], what: str, site: str
) -> dict[str, pd.Series]:
    if set(read) != set(columns):
        raise FormulaError(f"formula: the {what} reads other columns than those declared for it.")
    return pick_columns(frame, read, site)


def _complete(frame: pd.DataFrame, series: dict[str, pd.Series]) -> Bools:
    complete: Bools = np.logical_not(missing_cells(series.values(), len(frame)).any(axis=1))
    return complete


def _where(what: str, expression: Expression, site: str) -> str:
    names = ", ".join(map(repr, expression.columns))
    return f"the {what} {expression.text!r} (of {names}) at site {site!r}"


def _values(series: dict[str, pd.Series], expression: Expression, site: str) -> Floats | Bools:
    tree, where = expression.tree, _where("response", expression, site)
    event = tree.event if isinstance(tree, Survival) else tree
    match event:
        case Relation(symbol=symbol, left=Column(name=name), right=Level(value=level)):
            # Before anything is turned into numbers: the column holds texts.
            equal = _equals(series[name], level, site, name, "the response")
            return equal if symbol == "==" else ~equal
        case Category(column=name, levels=levels):
            return _codes(series[name], levels, where)
    read = set(iter_columns(event))
    what = "an event" if isinstance(tree, Survival) else "a response"
    numbers = {name: _numbers(one, site, name, what) for name, one in series.items() if name in read}
    match tree:
        case Counts(successes=successes, failures=failures):
            return _counts((successes, failures), numbers, where)
        case Survival():
            return _events(np.asarray(evaluate(event, numbers, {}, where), dtype=np.float64), where)
    values: Floats = np.asarray(evaluate(expression.tree, numbers, {}, where), dtype=np.float64)
    return values


def _codes(series: pd.Series, levels: Sequence[LevelValue], where: str) -> Floats:
    """Return the place of each value among levels, (n,); zeros where these are not known yet."""
    if not levels:
        return np.zeros(len(series))
    codes = level_places(series, levels)
    if wrong := int((codes < 0).sum()):
        raise DesignError(
            f"{where}: {wrong:,} of {len(codes):,} rows have a category with no declared level in the model. "
            "Declare all levels, of competing events the censored one first, or set these values to missing."
        )
    return codes.astype(np.float64)


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


def _events(values: Floats, where: str) -> Floats:
    wrong = int(((values != 0.0) & (values != 1.0)).sum())
    if wrong:
        raise DesignError(
            f"{where}: the event is neither 0 nor 1 in {wrong:,} of {len(values):,} rows. Compare the column "
            "with the value that is the event, as in Surv(time, status == 2). Or are time and event "
            "exchanged? The time comes first."
        )
    return values


def build_times(frame: pd.DataFrame, text: str, columns: Sequence[str], site: str) -> Floats:
    """Compute start and stop of ``Surv(...)``: (n_rows, 2); NaN where a column is missing.

    The start of ``Surv(time, event)`` is zero. A DesignError counts times that are not positive, or not after
    their start.
    """
    expression = parse_expression(text, response=True)
    assert isinstance(expression.tree, Survival)
    series = _declared(frame, expression.columns, columns, "response", site)
    complete, where = _complete(frame, series), _where("response", expression, site)
    read = {name for tree in expression.tree.times for name in iter_columns(tree)}
    numbers = {name: _numbers(series[name][complete], site, name, "a time") for name in read}
    found = [np.asarray(evaluate(tree, numbers, {}, where), dtype=float) for tree in expression.tree.times]
    *starts, stop = found
    start = starts[0] if starts else np.zeros(len(stop))
    negative, early = int((start < 0.0).sum()), int((stop <= start).sum())
    if negative or early:
        problem = f"{early:,} times are not after their start"
        remedy = "Correct these rows or set them to missing."
        if negative:
            problem = f"{negative:,} starts are negative"
        elif not starts:
            problem = f"{early:,} times are not positive"
            remedy = (
                "Correct these rows or set them to missing; if a time of zero means less than one unit, add "
                "half a unit, as in Surv(days + 0.5, died). Or are time and event exchanged? The time comes "
                "first."
            )
        raise DesignError(f"{where}: {problem}. {remedy}")
    times = np.full((len(frame), 2), np.nan)
    times[complete] = np.column_stack([start, stop])
    return times


def _equals(series: pd.Series, level: str, site: str, name: str, what: str) -> Bools:
    if column_kind(series, site, name) == "number":
        raise DesignError(
            f"{at_column(site, name)} holds numbers and {what} compares it with the text {level!r}; "
            "compare it with a number."
        )
    return np.asarray(series.to_numpy(dtype=object) == level, dtype=bool)


def _numbers(series: pd.Series, site: str, name: str, what: str) -> Floats:
    if pd.api.types.is_bool_dtype(series.dtype) or pd.api.types.infer_dtype(series) == "boolean":
        return np.asarray(series.to_numpy(dtype=object), dtype=np.float64)
    if column_kind(series, site, name) == "category":
        one = f"For one level against the others write {name} == 'level' on the left side. "
        remedies = {
            "a response": one + "For all levels use FederatedOrdinal or FederatedMultinomial, for sites with "
            "different rows.",
            "an event": one
            + f"For competing events use CumulativeIncidence and C({name}, levels=[...]), with the level of "
            "censoring first.",
        }
        raise DesignError(
            f"{at_column(site, name)} holds categories, and {what} must be numbers or true/false. "
            f"{remedies.get(what, 'Use a column of numbers.')}"
        )
    return as_numbers(series, site, name)


# ----------------------------------------------------------------------------------------------------
# The coding of one site's columns as plain values, checked wherever they arrive.

Figure: TypeAlias = bool | int | float | None
Figures: TypeAlias = Figure | list[Figure] | dict[str, Figure]
"""Content of the state of a transform: numbers and no texts."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """How a site's columns are coded; plain values, enough to code new rows the same way.

    `names` are the p design columns without the intercept, `term_names` the term of each; `levels` the agreed
    levels, in order, of every column coded as categories. `state`, of transforms by their text, may hold
    figures of the data (a mean, the bounds and knots of a spline): it stays where the block is unless its
    release is declared. `means` replace single missing numbers; they are empty unless the block was built
    with ``partial="mean"``. `dropped` are columns of interactions that follow from other columns.
    """

    site: str = ""
    terms: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    term_names: tuple[str, ...] = ()
    intercept: bool = True
    kinds: dict[str, ColumnKind] = field(default_factory=dict)
    levels: dict[str, tuple[LevelValue, ...]] = field(default_factory=dict)
    state: dict[str, dict[str, Figures]] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write the specification as JSON text."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> BlockSpec:
        """Read what :meth:`to_json` wrote, and check it as if a stranger had written it."""
        return codec.from_json(cls, text, "block specification (BlockSpec)", DesignError)

    def part(self, terms: Sequence[str]) -> BlockSpec:
        """Return the specification of some of the terms; names of columns are left out."""
        parsed = tuple(map(_read_term, terms))
        columns = tuple(dict.fromkeys(name for term in parsed for name in term_columns(term)))
        kinds = {name: kind for name, kind in self.kinds.items() if name in columns}
        texts = {t.text for term in parsed for factor in term for t in iter_transforms(factor.tree)}
        return replace(
            self,
            terms=tuple(terms),
            columns=columns,
            names=(),
            term_names=(),
            kinds=kinds,
            levels={name: self.levels[name] for name in coded_columns(parsed, kinds)},
            state={text: state for text, state in self.state.items() if text in texts},
            means={name: mean for name, mean in self.means.items() if name in columns},
        )

    def check(self) -> None:
        """Require terms of the formula language and a state that belongs to them.

        Raises a FormulaError for the terms, and a DesignError for parts that do not belong together.
        """
        terms = read_terms(self.terms, self.columns) if self.terms or self.columns else ()
        transforms = {t.text: t for term in terms for f in term for t in iter_transforms(f.tree)}
        expected = {
            # Raw polynomials are powers, and keep nothing.
            text: frozenset() if dict(t.options).get("raw") else STATE_KEYS[t.function]
            for text, t in transforms.items()
            if t.function in STATE_KEYS
        }
        found = {text: frozenset(state) for text, state in self.state.items()}
        complete = set(self.kinds) == set(self.columns) and set(self.levels) == set(
            coded_columns(terms, self.kinds)
        )
        if found == expected:
            # With other knots than the formula's, a cut next to one row would escape the owner's check.
            complete &= all(_has_knots(transforms[text], state) for text, state in self.state.items())
        if found != expected or not complete or len(self.names) != len(self.term_names):
            raise DesignError(
                f"block specification of site {self.site!r}: terms, levels and transform state do "
                "not belong together; build it again."
            )


def _has_knots(transform: Transform, state: Mapping[str, Figures]) -> bool:
    """Whether knots and bounds of a spline are those that its formula writes, where it does."""
    written = written_state(transform) if transform.function in SPLINES else None
    return written is None or plain_state(written) | {"means": state.get("means")} == (
        dict(state) | {"means": state.get("means")}
    )


def read_terms(terms: Sequence[str], columns: Sequence[str]) -> tuple[Term, ...]:
    """Read terms again: terms from other sites are checked where they are used.

    Raises a FormulaError for a text outside the formula language, or that is not one term, and for terms that
    read other columns than those declared.
    """
    parsed = [_read_term(text) for text in terms]
    used = {name for term in parsed for name in term_columns(term)}
    if used != set(columns) or not used:
        raise FormulaError("formula: the terms read other columns than those declared for them.")
    return tuple(parsed)


@lru_cache(maxsize=MOST_PARSED)
def _read_term(text: str) -> Term:
    right = parse_terms(text)
    if len(right.terms) != 1:
        raise FormulaError(f"formula: expected one term, received {text[:80]!r}.")
    return right.terms[0]


def coded_columns(terms: Iterable[Term], kinds: Mapping[str, ColumnKind]) -> tuple[str, ...]:
    """List the columns that need levels: those that hold categories, and numbers inside C()."""
    trees = [factor.tree for term in terms for factor in term]
    coded = [tree.column for tree in trees if isinstance(tree, Category)]
    coded += [name for name, kind in kinds.items() if kind == "category"]
    return tuple(dict.fromkeys(coded))
