"""Sums with weights that depend on coefficients, such as score and information at each point of a fit.

Where the linear predictor has few values, rows with the same one are a cell, and the weights of a row follow
from its cell. The sums at several coefficients then add up to sums over some of the cells: at four points of
a logistic model with a column of ten values and its square, the count of each value follows. Such sums enter
the release history as sums with known weights.

Where the predictor has many values, nobody can combine the sums at two coefficients. But the sum of the
weights over one row is a function of its predictor, and reveals it. So counts of few rows that follow by
subtraction, which are tolerated in the history, are not tolerated under such weights where a site releases
its own sums. In a masked sum they are where no one knows a site's part: it is always added to the same
others, and two of these have reported that they have rows of the cell; see
:mod:`fedstat.federation.disclosure.level_products`. Otherwise the sum may be the part of one site, and reveal
the predictor of its rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.disclosure.differencing import Expressed, check_sums
from fedstat.federation.disclosure.facts import RowBlock, RowTerms, ScoreAndInformation
from fedstat.federation.disclosure.level_products import OwnLevels
from fedstat.federation.disclosure.leverage import masked_among_the_same
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.disclosure.weight_spaces import (
    FEW_VALUES,
    MOST_PRODUCTS,
    ONE,
    Expressions,
    Polynomial,
    has_few_values,
    may_have_few_values,
    new_directions,
)
from fedstat.typing import Floats, Ints

CELLS_KEY, UNKNOWN_KEY = "cells of linear predictors", "products with other weights"
LEVELS_KEY, SPACES_KEY = "own levels", "levels of others"
"""What the site has reported of its rows, and what others have, by the request that opened them."""
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
        if len(first) > MOST_CELLS:
            return none
        return replace(none, code=code, first=first, spans={False: nothing, True: nothing})

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
        return new_directions(weights, self.spans[of_response], NEW_WEIGHTS)


def columns_of(fact: ScoreAndInformation, levels: bool = False) -> Iterator[Floats]:
    """Yield the columns of a design, (n,) each, and those on which weights depend in addition."""
    parts = [*fact.parts()]
    for name in ("columns", "levels")[: 1 + levels]:
        blocks = [getattr(part, name) for part in parts]
        for j in range(blocks[0].shape[1]):
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
        if problem is not None and not _is_hidden(data, state, fact):
            raise problem
        kept = replace(kept, unknown=True)
    new = {key: kept.added(np.hstack(several), key) for key, several in found.items() if several}
    if any(one.shape[1] for one in new.values()):
        check_cells(data, fact, kept, new, response)
    spans = {key: np.hstack([span, new[key]]) if key in new else span for key, span in kept.spans.items()}
    state.keep(CELLS_KEY, replace(kept, spans=spans, points=kept.points | {fact.point}))
    return not kept.unknown


def examines_products(data: SiteData) -> bool:
    """Return whether the owner lets no product of columns belong to few rows."""
    return data.policy.products != "any" and data.policy.min_level_count >= 2 and data.policy.privacy is None


def opening_of(state: State) -> str:
    """Return the digest of the request that opened the rows, which masks need in common."""
    return state.begun.get("design open_rows", b"").hex()


def level_columns(data: SiteData, state: State) -> OwnLevels:
    """Return the columns that the site reports, of the rows that the session has opened.

    The opened rows have their `places` in the table, (n,), and return columns that may have few values, (n,)
    each, by ``leveled_columns()`` with their places in the design.
    """
    name = f"{LEVELS_KEY} {opening_of(state)}"
    if name not in state:
        opened = state.look_at("rows")
        rows = opened.places
        state.keep(name, OwnLevels.of(opened.leveled_columns(), len(rows), _persons_of(data, rows)))
    found: OwnLevels = state.look_at(name)
    return found


def _persons_of(data: SiteData, rows: Ints) -> Ints | None:
    released = data.memory.released
    return None if released is None or released.persons is None else released.persons[rows]


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
    """Return why products of columns of few values, with weights of many values, single out few rows.

    Sums that are masked among the same sites are hidden where others have rows behind the same products.
    """
    if not examines_products(data) or fact.among is None or len(fact.among) != fact.n:
        return None
    first = next(iter(fact.parts()))
    opened: Any = state.look_at("rows")
    multiplied, width = _multiplied(first, fact.point), first.columns.shape[1]
    if not multiplied:
        return None
    kept = state.look_at(UNKNOWN_KEY) if UNKNOWN_KEY in state else (None, 0, None)
    if kept[0] is not fact.rows or kept[1] != width:
        places, names = opened.places, opened.names
        is_design = fact.rows is opened and fact.n == len(places) and width == len(names) + 1
        if is_design and len(multiplied) == 1 and multiplied[0] is first.columns:
            own = level_columns(data, state)
        else:
            own = OwnLevels.of(_multiplied_columns(fact), fact.n, _persons_of(data, fact.among))
        kept = fact.rows, width, _problem_of(data, own.examined())
        state.keep(UNKNOWN_KEY, kept)
    problem: PolicyError | None = kept[2]
    return problem


def _multiplied(part: RowBlock, point: Any) -> list[Floats]:
    """Return the matrices of a part of the rows that are multiplied with each other, or with themselves."""
    products = [one for one in part.terms(point) if one.right.shape[1] > 1]
    return [*{id(X): X for one in products for X in (one.left, one.right)}.values()]


def _multiplied_columns(fact: ScoreAndInformation) -> Iterator[tuple[int, Floats]]:
    """Yield columns of few values whose products are summed, in any coding: a constant is among them."""
    blocks = [_multiplied(part, fact.point) for part in fact.parts()]
    for k, first in enumerate(blocks[0]):
        for j in range(first.shape[1]):
            if may_have_few_values(first[:, j]):
                x = np.concatenate([several[k][:, j] for several in blocks])
                if x.min() < x.max():
                    yield k * first.shape[1] + j + 1, _indicator_of(x)


def _indicator_of(x: Floats) -> Floats:
    """Return the indicator of the rarer value of a column of two values; other columns as they are."""
    larger = x == x.max()
    if not (larger | (x == x.min())).all():
        return x
    return np.asarray(larger if 2 * int(larger.sum()) <= len(x) else ~larger, dtype=np.float64)


def _problem_of(data: SiteData, own: OwnLevels) -> PolicyError | None:
    least, many = data.policy.min_level_count, len(own.pairs) > MOST_PRODUCTS
    if not many and not own.single_out(least):
        return None
    why = f"refuses sums that, combined with each other, single out fewer than {least} rows: {NAME}"
    if many:
        why = (
            f"examines at most {MOST_PRODUCTS:,} products of columns of few values under weights of many "
            f"values; there are {len(own.pairs):,}"
        )
    return PolicyError.of_rule("rows behind a product", data.name, why, remedy=REMEDY)


def _is_hidden(data: SiteData, state: State, fact: ScoreAndInformation) -> bool:
    """Return whether two other sites have rows where a combination of products belongs to few rows here."""
    spaces = f"{SPACES_KEY} {opening_of(state)}"
    if fact.among is None or spaces not in state:
        return False
    own, places = level_columns(data, state), state.look_at("rows").places
    own = own if fact.n == len(places) else own.only(np.searchsorted(places, fact.among))
    own = own.examined()
    return (
        len(own.pairs) <= MOST_PRODUCTS
        and own.are_covered(state.look_at(spaces), data.policy.min_level_count)
        and masked_among_the_same(data, state.masked_among)
    )


def _in_table(made: Expressions, fact: ScoreAndInformation, values: Floats) -> Floats:
    """Return values of the rows of a design as a column of the table, zero in other rows."""
    out = np.zeros(made.n)
    out[fact.among] = values
    return out
