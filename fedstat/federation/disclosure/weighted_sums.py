"""Sums with weights that depend on coefficients, such as score and information at each point of a fit.

Where the linear predictor has few values, rows with the same one are a cell, and the weights of a row follow
from its cell. The sums at several coefficients then add up to sums over some of the cells: at four points of
a logistic model with a column of ten values and its square, the count of each value follows. Such sums enter
the release history as sums with known weights.

Where the predictor has many values, nobody can combine the sums at two coefficients. But the sum of the
weights over one row is a function of its predictor, and reveals it. So counts of few rows that follow by
subtraction, which are tolerated in the history, are not tolerated under such weights where a site releases
its own sums. In a masked sum they are: a site's part is known to nobody if it is always added to the same
others, and these have rows of the cell. If they have none, the sum is the part of one site, and reveals the
predictor of its rows; no site can see this, and the threat statements say so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.disclosure.differencing import Expressed, check_sums, require_rows
from fedstat.federation.disclosure.facts import RowTerms, ScoreAndInformation
from fedstat.federation.disclosure.leverage import masked_among_the_same
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.disclosure.weight_spaces import (
    FEW_VALUES,
    MOST_PRODUCTS,
    ONE,
    Expressions,
    Polynomial,
    WeightSpaces,
    has_few_values,
)
from fedstat.typing import Floats, Ints

CELLS_KEY, UNKNOWN_KEY = "cells of linear predictors", "products with other weights"
REMEDY = "Merge levels, or leave a term out"
NAME = "the weighted sums at these coefficients"
NEW_WEIGHTS = 1e-9
"""Length of what earlier weights leave of new ones, relative to them, below which they add nothing."""
MOST_CELLS = 1000
"""Cells above which a predictor counts as one of many values."""
SAME = 1e-9
"""Relative difference of equal weights in a cell."""


@dataclass(frozen=True, slots=True, eq=False)
class PredictorCells:
    """Cells of rows with the same linear predictors, and the weights of cells in the sums of a session.

    Parameters
    ----------
    rows : object
        The rows that the session opened.
    code : (n,) array of int
        Cell of each row.
    first : (C,) array of int
        A row of each cell; none if the predictors have many values.
    spans : mapping of bool to (C, r) array
        Orthonormal weights of cells: in sums over rows, and in sums of the response.
    points : frozenset
        Points that were examined.
    unknown : bool
        Whether sums with weights of many values were examined.
    """

    rows: object
    code: Ints
    first: Ints
    spans: Mapping[bool, Floats]
    points: frozenset[Hashable] = frozenset()
    unknown: bool = False

    @classmethod
    def of(cls, fact: ScoreAndInformation) -> PredictorCells:
        """Return the cells before the first point."""
        code = np.zeros(fact.n, dtype=np.int64)
        none = cls(fact.rows, code, np.zeros(0, dtype=np.int64), {})
        for x in columns_of(fact, levels=True):
            if not has_few_values(x):
                return none
            code = code * (FEW_VALUES + 1) + np.unique(x, return_inverse=True)[1].ravel()
            code = np.unique(code, return_inverse=True)[1].ravel()
        first = np.unique(code, return_index=True)[1]
        nothing = np.zeros((len(first), 0))
        return (
            none
            if len(first) > MOST_CELLS
            else replace(none, code=code, first=first, spans={False: nothing, True: nothing})
        )

    def weights_of(self, one: RowTerms) -> Floats | None:
        """Return the weights of cells in sums, (C, d); None if rows of a cell have different ones."""
        for part in (one.left, one.weights, one.right):
            if not np.allclose(part, part[self.first][self.code], rtol=SAME, atol=0.0, equal_nan=True):
                return None
        left, weights, right = (part[self.first] for part in (one.left, one.weights, one.right))
        if one.left is one.right:
            i, j = np.triu_indices(left.shape[1])
            both = left[:, i] * left[:, j]
        else:
            both = (left[:, :, None] * right[:, None]).reshape(len(left), -1)
        return np.nan_to_num((both[:, :, None] * weights[:, None]).reshape(len(left), -1))

    def added(self, weights: Floats, of_response: bool) -> Floats:
        """Return orthonormal weights of cells, (C, r), that those of earlier sums do not span."""
        length = np.linalg.norm(weights, axis=0)
        rest, span = weights[:, length > 0.0] / length[length > 0.0], self.spans[of_response]
        for _ in range(2):
            rest = rest - span @ (span.T @ rest)
        U, s, _ = np.linalg.svd(rest, full_matrices=False)
        return np.asarray(U[:, s > NEW_WEIGHTS])


def columns_of(fact: ScoreAndInformation, levels: bool = False) -> Iterator[Floats]:
    """Yield the columns of a design, (n,) each, and those on which weights depend in addition."""
    parts = [*fact.parts()]
    for name in ("columns", "levels")[: 1 + levels]:
        blocks = [getattr(part, name) for part in parts]
        for j in range(blocks[0].shape[1]):
            yield np.concatenate([block[:, j] for block in blocks])


def columns_of_few_values(fact: ScoreAndInformation) -> Iterator[Floats]:
    """Yield the columns of a design that may have few values, as far as the first rows show."""
    blocks = [part.columns for part in fact.parts()]
    for j in range(blocks[0].shape[1]):
        if len(np.unique(blocks[0][: 4 * FEW_VALUES, j])) <= FEW_VALUES:
            yield np.concatenate([block[:, j] for block in blocks])


def terms_at(fact: ScoreAndInformation) -> Iterator[RowTerms]:
    """Yield the terms of the sums at the point, over all rows."""
    for parts in zip(*(part.terms(fact.point) for part in fact.parts()), strict=True):
        left, weights = (
            np.concatenate([getattr(one, name) for one in parts]) for name in ("left", "weights")
        )
        right = left if parts[0].right is parts[0].left else np.concatenate([one.right for one in parts])
        times = [one.times for one in parts if one.times is not None]
        yield RowTerms(left, weights, right, np.concatenate(times) if times else None)


def check_weighted_sums(data: SiteData, state: State, fact: ScoreAndInformation) -> bool:
    """Require that sums at coefficients, with all earlier ones, single out no few rows.

    It returns whether all weights follow from the cells of rows.

    Raises
    ------
    PolicyError
        Names the rule and a remedy.
    """
    if data.policy.products == "any" or data.policy.min_level_count < 2 or fact.among is None:
        return False
    if len(fact.among) != fact.n:  # in a dry run the rows are no rows of a table
        return False
    kept: PredictorCells | None = state.look_at(CELLS_KEY) if CELLS_KEY in state else None
    if kept is None or kept.rows is not fact.rows:
        kept = PredictorCells.of(fact)
    if fact.point in kept.points or (kept.unknown and not len(kept.first)):
        return not kept.unknown
    found: dict[bool, list[Floats]] = {False: [], True: []}
    is_known, response = len(kept.first) > 0, np.zeros(0)
    for one in terms_at(fact) if is_known else ():
        weights = kept.weights_of(one)
        if weights is None:
            is_known = False
        else:
            found[one.times is not None].append(weights)
        response = response if one.times is None else one.times
    if not is_known and not kept.unknown:
        problem = unknown_weights_problem(data, state, fact)
        if problem is not None and not masked_among_the_same(data, state.masked_among):
            raise problem
        kept = replace(kept, unknown=True)
    new = {key: kept.added(np.hstack(several), key) for key, several in found.items() if several}
    if any(one.shape[1] for one in new.values()):
        check_cells(data, fact, kept, new, response)
    spans = {key: np.hstack([span, new[key]]) if key in new else span for key, span in kept.spans.items()}
    state.keep(CELLS_KEY, replace(kept, spans=spans, points=kept.points | {fact.point}))
    return not kept.unknown


def check_cells(
    data: SiteData,
    fact: ScoreAndInformation,
    kept: PredictorCells,
    new: Mapping[bool, Floats],
    response: Floats,
) -> None:
    """Enter sums with weights of cells, (C, r), into the release history."""

    def express(made: Expressions) -> Expressed:
        factors = {False: ONE}
        if len(response):
            factors[True] = made.of(_in_table(made, fact, response))

        def sums(by_factor: Mapping[bool, Floats]) -> list[tuple[Polynomial, str]]:
            return [
                (made.product(factors[key], made.pattern(_in_table(made, fact, column[kept.code]))), NAME)
                for key, weights in by_factor.items()
                for column in weights.T
            ]

        # Products of columns were released, and examined, when the rows were opened.
        X = np.column_stack([x[kept.first] for x in columns_of(fact)])
        i, j = np.triu_indices(X.shape[1])
        products = kept.added(X[:, i] * X[:, j], False)
        return Expressed(sums(new), known=[*sums({False: products}), *sums(kept.spans)])

    check_sums(data, express, REMEDY)


def unknown_weights_problem(data: SiteData, state: State, fact: ScoreAndInformation) -> PolicyError | None:
    """Return why products of columns of few values, with weights of many values, single out few rows."""
    if UNKNOWN_KEY in state and state.look_at(UNKNOWN_KEY)[0] is fact.rows:
        found: PolicyError | None = state.look_at(UNKNOWN_KEY)[1]
        return found
    found = None
    try:
        _check_unknown_weights(data, fact)
    except PolicyError as problem:
        found = problem
    state.keep(UNKNOWN_KEY, (fact.rows, found))
    return found


def _check_unknown_weights(data: SiteData, fact: ScoreAndInformation) -> None:
    if data.policy.products == "any" or data.policy.min_level_count < 2 or fact.among is None:
        return
    if len(fact.among) != fact.n or all(
        one.right.shape[1] == 1 for part in fact.parts() for one in part.terms(fact.point)
    ):
        return
    released = data.memory.released
    n_rows = data.table.n_rows if released is None else released.spaces.n_rows
    if released is not None and _are_cleared(released.spaces, fact, data.policy.min_level_count - 1):
        return
    made = Expressions(WeightSpaces(n_rows))
    columns = [_in_table(made, fact, x) for x in columns_of_few_values(fact) if has_few_values(x)]
    if len(columns) < 2:
        return
    if any((x[fact.among] == 1.0).all() for x in columns):  # levels have other codes, and the same span
        columns = [_indicator_of(x, fact.among) for x in columns]
    # Levels of one factor have no row in common: their products are zero.
    there = np.array([x != 0.0 for x in columns], dtype=np.float32)
    pairs = np.argwhere(np.triu(there @ there.T > 0.0)).tolist()
    if len(pairs) > MOST_PRODUCTS:
        raise PolicyError.of_rule(
            "rows behind a product",
            data.name,
            f"examines at most {MOST_PRODUCTS:,} products of columns of few values under weights of many "
            f"values; there are {len(pairs):,}. {REMEDY}",
        )
    few = [made.pattern(x) for x in columns]
    sums = [(made.product(few[i], few[j]), NAME) for i, j in pairs]
    persons = None if released is None else released.persons
    require_rows(data, made.result().with_sums(one for one, _ in sums), 0, sums, REMEDY, persons)


def _are_cleared(spaces: WeightSpaces, fact: ScoreAndInformation, few: int) -> bool:
    """Return whether products of columns of few values were cleared as counts, when the rows were opened."""
    if spaces.cleared[0] < few:
        return False
    made, found = Expressions(spaces), list[Polynomial]()
    inside = np.zeros(made.n, dtype=np.bool_)
    inside[fact.among] = True
    for x in columns_of_few_values(fact):
        one = made.linear(_in_table(made, fact, x), inside)
        if one is not None:
            found.append(one)
        elif has_few_values(x):
            return False
    rows = made.rows(inside)
    pairs = combinations_with_replacement(found, 2)
    return spaces.are_cleared((made.product(one, other, rows) for one, other in pairs), few)


def _in_table(made: Expressions, fact: ScoreAndInformation, values: Floats) -> Floats:
    """Return values of the rows of a design as a column of the table, zero in other rows."""
    out = np.zeros(made.n)
    out[fact.among] = values
    return out


def _indicator_of(x: Floats, among: Ints) -> Floats:
    """Return the indicator of the rarer value of a column of two values; other columns as they are."""
    values, counts = np.unique(x[among], return_counts=True)
    if len(values) != 2:
        return x
    out = np.zeros(len(x))
    out[among] = x[among] == values[counts.argmin()]
    return out
