"""How design rows change with a variable: the chain rule through all terms that contain it.

Rows of a design are functions of the columns of a table. The derivative of a row by one column is taken
through every term: of ``x + I(x ** 2) + x:z`` by x it is ``(1, 2 x, z)``. A category changes from one level
to another in all of its terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import DesignError
from fedstat.federation.design.block import apply_block
from fedstat.federation.design.formula.syntax_tree import SPLINES, Column, Relation, Transform
from fedstat.federation.design.formula.terms import term_columns, term_text
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.federation.design.site_rows import design_matrix
from fedstat.federation.tables.columns import LevelValue
from fedstat.typing import Bools, Floats

IN_SPAN = 1e-6
"""Size of a residual, relative to the derivative, below which it is rounding."""
PROBES = 20
"""Coded rows for each column of a design, from which the direction of a variable is found."""
SPREADS = 2.0
"""Standard deviations on each side of the mean, where no spline bounds the column."""


@dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """How design rows change with a variable.

    Parameters
    ----------
    name : str
        Of the row in a table of effects.
    A : (p + 1, p) array or None
        The derivative of a row x (p,) is ``(1, x) @ A``, so averages of derivatives follow from averages of
        rows. None where it is no such function: that of ``log(x)`` is ``1 / x``.
    plain : int, optional
        The only column of the design that changes, one for one.
    variable : str
        Column of the table.
    levels : (low, high), optional
        Values between which a category, or a number that is 0 or 1, changes.
    ends : pair of (p + 1, p) arrays, optional
        How a row changes when its category is set to these levels, as functions of the row.
    problem : str
        Why the variable has no effect; empty if it has one.
    """

    name: str
    A: Floats | None
    plain: int | None = None
    variable: str = ""
    levels: tuple[LevelValue, LevelValue] | None = None
    ends: tuple[Floats, Floats] | None = None
    problem: str = ""

    @property
    def single(self) -> bool:
        """Whether the effect is that of one column of the design."""
        return self.plain is not None

    @property
    def at_a_row(self) -> bool:
        """Whether the change follows from a row of the design."""
        return self.A is not None or self.ends is not None

    def derivative(self, row: Floats) -> Floats:
        """Return the change of a row (p,) of the design, whose average it is for an average row."""
        if self.ends is not None:
            low, high = self.rows(row)
            return high - low
        assert self.A is not None
        return np.asarray(np.append(1.0, row) @ self.A)

    def rows(self, row: Floats) -> tuple[Floats, Floats]:
        """Return a row (p,) at both levels."""
        assert self.ends is not None
        low, high = (row + np.append(1.0, row) @ one for one in self.ends)
        return low, high


def direction_of(name: str, X: Floats, D: Floats) -> Direction:
    """Find the direction of a variable from design rows X and their changes D, (m, p) each.

    The rows need to be many more than columns, and at values that no formula favors.
    """
    changed = np.flatnonzero(np.abs(D).max(axis=0) > IN_SPAN)
    if len(changed) == 1 and np.allclose(D[:, changed[0]], 1.0, rtol=0.0, atol=IN_SPAN):
        A = np.zeros((X.shape[1] + 1, X.shape[1]))
        A[0, changed[0]] = 1.0
        return Direction(name, A, int(changed[0]))
    Z = np.column_stack([np.ones(len(X)), X])
    size = np.maximum(np.abs(Z).max(axis=0), 1e-300)
    A = np.linalg.lstsq(Z / size, D, rcond=1e-12)[0] / size[:, None]
    rest = np.abs(D - Z @ A).max(axis=0)
    if (rest > IN_SPAN * np.maximum(np.abs(D).max(axis=0), 1.0)).any():
        return Direction(name, None)
    A[np.abs(A) * size[:, None] < IN_SPAN * np.maximum(np.abs(D).max(axis=0), IN_SPAN)] = 0.0
    return Direction(name, A)


def code_frame(agreement: RowsSchema, design: RowsDesign, frame: pd.DataFrame) -> tuple[Bools, Floats]:
    """Code rows as the sites coded theirs: which are complete (n,), and the design of these (m, p)."""
    seen, X = np.ones(len(frame), dtype=bool), np.empty((len(frame), 0))
    if agreement.question.terms:
        first = int(design.intercept)
        part = agreement.spec.part(agreement.question.terms)
        spec = replace(part, names=design.names[first:], term_names=design.term_names[first:])
        block = apply_block(frame, spec)
        seen, X = block.seen, block.X
    return seen, np.column_stack([np.ones(len(X)), X]) if design.intercept else X


def variable_directions(
    agreement: RowsSchema, design: RowsDesign, logarithmic: bool = False, binary: Sequence[str] = ()
) -> list[Direction]:
    """Return how design rows change with each variable, in the order of the formula.

    A number changes by its derivative, with `logarithmic` by that of its logarithm, and a category from its
    first or reference level to each other one. Numbers in `binary`, which are 0 or 1, change from 0 to 1
    where they are in several columns. No row of a table is read: rows are coded at values within the known
    limits.
    """
    spec = agreement.spec.part(agreement.question.terms)
    terms, levels = agreement.question.read_terms(), dict(spec.levels)
    levels |= {name: (0.0, 1.0) for name in binary if name in spec.columns and name not in levels}
    variables = list(dict.fromkeys(name for term in terms for name in term_columns(term)))
    limits, random = known_limits(agreement, design), np.random.default_rng(0)
    m = PROBES * (len(design.names) + 1)

    def draw(limits: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
        drawn = {
            name: random.choice(np.array(levels[name], dtype=object if name in spec.levels else float), m)
            if name in levels
            else random.uniform(*_inside(*limits.get(name, (0.5, 1.5))), m)
            for name in spec.columns
        }
        table = pd.DataFrame(drawn)
        return table[code_frame(agreement, design, table)[0]]

    try:
        table = draw(limits)
    except DesignError:  # a logarithm or a root, of a column whose limits about the mean are negative
        table = draw({name: (max(low, high / 100.0), high) for name, (low, high) in limits.items()})

    def code(frame: pd.DataFrame) -> Floats:
        seen, X = code_frame(agreement, design, frame)
        out = np.full((len(frame), X.shape[1]), np.nan)
        out[seen] = X
        return out

    X, out = code(table), list[Direction]()
    for name in variables:
        if name in spec.levels or (name in levels and not _alone(name, terms)):
            problem = "a category has no logarithm" * logarithmic
            out += (
                replace(one, problem=problem)
                for one in _level_directions(name, terms, code, table, design, levels[name])
            )
        elif _alone(name, terms) and name in design.names:  # coding many of them takes long
            j, p = design.names.index(name), len(design.names)
            out.append(Direction(name, np.outer(np.eye(p + 1)[0], np.eye(p)[j]), j, name))
        elif any(_is_compared(term, name) for term in terms):
            out += _compared_directions(name, terms, design)
        else:
            question = replace(agreement.question, effects=())
            D = design_matrix(table, question, agreement.spec, "", name).X
            x = table[name].to_numpy(dtype=np.float64)
            one = _known_direction(name, X, D)
            if logarithmic and (one.plain is None or not np.allclose(X[:, one.plain], x)):
                one = replace(_known_direction(name, X, D * x[:, None]), plain=None)
            if one.plain is not None and "(" not in design.names[one.plain]:
                one = replace(one, name=design.names[one.plain])  # as the table of coefficients has it
            out.append(replace(one, variable=name))
    return out


def _level_directions(
    name: str, terms: Sequence[Any], code: Any, table: pd.DataFrame, design: RowsDesign, levels: Sequence[Any]
) -> list[Direction]:
    """Return how rows change from the reference level of a category, or the first one, to each other one."""
    X, coded = code(table), {level: code(table.assign(**{name: level})) for level in levels}
    alone = [
        j
        for j, text in enumerate(design.term_names)
        if any(term_text(term) == text and term_columns(term) == (name,) for term in terms)
    ]
    base = next((level for level in levels if not coded[level][:, alone].any()), levels[0])
    maps, out = {level: _known_direction(name, X, coded[level] - X).A for level in levels}, list[Direction]()
    for level in levels:
        if level == base:
            continue
        D = coded[level] - coded[base]
        own = [j for j in alone if np.allclose(D[:, j], 1.0)]
        label = design.names[own[0]] if len(own) == 1 else f"{name}[{level}]"
        low, high = maps[base], maps[level]
        ends = None if low is None or high is None else (low, high)
        out.append(Direction(label, None, variable=name, levels=(base, level), ends=ends))
    return out


def _alone(name: str, terms: Sequence[Any]) -> bool:
    return all(term_text(term) == name or name not in term_columns(term) for term in terms)


def _is_compared(term: Any, name: str) -> bool:
    return any(isinstance(factor.tree, Relation) and name in factor.columns for factor in term)


def _compared_directions(name: str, terms: Sequence[Any], design: RowsDesign) -> list[Direction]:
    """Return the columns of comparisons of a number, if no other terms contain it; else it has no effect."""
    p, inside = len(design.names), [term for term in terms if name in term_columns(term)]
    if any(len(term) > 1 or not _is_compared(term, name) for term in inside):
        return [Direction(name, None, variable=name, problem="a comparison has no derivative")]
    texts = {term_text(term) for term in inside}
    places = [j for j, text in enumerate(design.term_names) if text in texts]
    return [Direction(design.names[j], np.outer(np.eye(p + 1)[0], np.eye(p)[j]), j) for j in places]


def _inside(low: float, high: float) -> tuple[float, float]:
    """Return limits a little further inside, so that steps to the sides stay between them."""
    margin = 1e-3 * (high - low)
    return low + margin, high - margin


def _known_direction(name: str, X: Floats, D: Floats) -> Direction:
    known = np.isfinite(X).all(axis=1) & np.isfinite(D).all(axis=1)
    if known.sum() < 2 * X.shape[1]:
        return Direction(name, None)
    return direction_of(name, X[known], D[known])


def known_limits(agreement: RowsSchema, design: RowsDesign) -> dict[str, tuple[float, float]]:
    """Return the limits of columns: bounds of their splines, else two deviations about the mean.

    They follow from the formula and from moments of the design that the fit has released. Columns of which
    neither is known are absent.
    """
    bounds, moments = _known_columns(agreement, design)
    ranges = {name: (mean - SPREADS * sd, mean + SPREADS * sd) for name, (mean, sd) in moments.items()}
    return ranges | bounds


def typical_values(agreement: RowsSchema, design: RowsDesign) -> dict[str, LevelValue]:
    """Return means of numbers and the most frequent level of categories, as far as moments say.

    A category of which no term has the indicators alone has its first level.
    """
    _, moments = _known_columns(agreement, design)
    found: dict[str, LevelValue] = {name: mean for name, (mean, _) in moments.items()}
    for name, levels in agreement.spec.part(agreement.question.terms).levels.items():
        shares = [sum(design.mean[_columns_of(design, name, level)].tolist()) for level in levels]
        if shares.count(0.0) == 1:
            shares[shares.index(0.0)] = 1.0 - sum(shares)
        found[name] = levels[int(np.argmax(shares))]
    return found


def _columns_of(design: RowsDesign, name: str, level: LevelValue) -> list[int]:
    """Return the places of the indicators of a level, in terms that are the category alone."""
    return [
        j
        for j, (column, term) in enumerate(zip(design.names, design.term_names, strict=True))
        if _names_only(term, name) and column in (f"{term}[T.{level}]", f"{term}[{level}]")
    ]


def _names_only(term: str, name: str) -> bool:
    """Whether a term is a category alone, ``g`` or ``C(g, ...)``."""
    return term == name or (term.startswith(f"C({name}") and term[len(f"C({name}")] in ",)")


def levels_by_reference(agreement: RowsSchema, design: RowsDesign) -> dict[str, tuple[LevelValue, ...]]:
    """Return the levels of each category, the reference level first.

    It has no column of its own; if this holds for several or none, it is the first one.
    """
    found = {}
    for name, levels in agreement.spec.part(agreement.question.terms).levels.items():
        absent = [level for level in levels if not _columns_of(design, name, level)]
        first = absent[0] if len(absent) == 1 else levels[0]
        found[name] = (first, *(level for level in levels if level != first))
    return found


def _known_columns(
    agreement: RowsSchema, design: RowsDesign
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """Return bounds of splines by column, and means and standard deviations of columns."""
    bounds: dict[str, tuple[float, float]] = {}
    moments: dict[str, tuple[float, float]] = {}
    absorbed = agreement.question.absorbed
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
        # Columns less absorbed effects have the mean zero, and no column of the data has these values.
        elif function in ("", "center", "scale") and text in design.names and not absorbed:
            j, unit = design.names.index(text), float(state.get("scale") or 1.0)
            mean = unit * float(design.mean[j]) + float(state.get("center") or 0.0)
            moments[tree.name] = mean, unit * float(design.spread[j])
    return bounds, moments
