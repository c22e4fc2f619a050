"""Site steps of the exchange of sums of products, by missing pattern or by fold.

Columns and response are standardized at their site, over its entities of the fit. Released are means and
standard deviations, sums of columns, and sums of products of the site's own columns by group.
:mod:`fedstat.federation.protocols.product_steps` handles products with another site's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from fedstat.errors import MessageError
from fedstat.federation.design.formula.terms import parse_term
from fedstat.federation.design.vertical_design import block_of, offset_of, response_of
from fedstat.federation.disclosure.facts import (
    EntityCount,
    ExcludedEntities,
    GroupSums,
    RowGroups,
    SummedColumns,
    SummedProducts,
)
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import (
    ArrayDeclaration,
    Step,
    aggregate,
    check_lengths,
    control,
    per_entity,
    presence,
)
from fedstat.federation.protocols.product_steps import (
    COMPARISON_ORDER,
    ProductPart,
    check_positions,
    product_steps,
)
from fedstat.federation.tables.supports import Supports, supports_of_columns
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.row_products import column_sums, gram
from fedstat.models.checks import check_response
from fedstat.models.vertical.exchange.standardized_columns import (
    StandardizedBlock,
    StandardizedResponse,
    by_case,
    detail_of,
    dithered,
    require_groups,
    response_shape,
    signed_squares,
    spread,
    staged_block,
    staged_response,
    standardize_block,
)
from fedstat.models.vertical.moments import number_patterns
from fedstat.typing import Array, Bools, Floats, Ints

BLOCK, RESPONSE = "block", "response"
SUMMED, RESPONSES = "rows summed", "responses summed"
"""Keys under which the checks record what was summed."""
SCALED = "scaled columns"
"""Key of the latest columns that are not standardized, the same at a mean square of one, and units."""
ColumnSource: TypeAlias = Callable[[SiteData, State, str], Floats]
WeightSource: TypeAlias = Callable[[SiteData, State], tuple[Floats | None, int]]


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeRules:
    """Differences between the exchanges of two families.

    With `remembers`, sums are refused that differ from earlier ones of the session by few entities. (The
    methods of VFEM, which users compare, differ by the entities of merged patterns.) With `fills`, missing
    blocks may be mean-imputed. `columns` are those, in addition to block and response, that are multiplied,
    (rows, q), and are not standardized; the text after their name and a colon states for whom they are.
    `weights` of some of these give the weights of the rows, and the number of different weights with which
    products were released. Some repeat the rows several `times`, and some are `of_response`. `terms` are
    those of the columns of a block that does not come from a formula. `constant` is the part of the
    log-likelihood that does not depend on parameters. With `shapes`, the asymmetry of every column is also
    released. With `flat`, a column may be constant, such as a spline basis without a value, and is then zero.
    With `weighted`, the entities may have weights in the data.
    """

    remembers: bool
    fills: bool = False
    columns: Mapping[str, ColumnSource] = field(default_factory=dict)
    weights: Mapping[str, WeightSource] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    of_response: frozenset[str] = frozenset()
    constant: Callable[[DistributionSpec, Floats], Floats] = lambda distribution, y: np.zeros(len(y))
    shapes: bool = False
    flat: bool = False
    weighted: bool = False
    terms: Callable[[State], Sequence[str]] | None = None

    def division(self, place: str, code: Ints, rows: Ints) -> RowGroups:
        """Return groups of rows of the table.

        Whether they count within a session depends on the family's rules.
        """
        return RowGroups(place if self.remembers else "", code, rows)

    def times_there(self, which: str) -> int:
        """Return how often the entities are repeated in columns of this name."""
        return self.times.get(which.partition(":")[0], 1)

    def are_of_response(self, which: str) -> bool:
        """Return whether columns of this name have the rows of the response."""
        return which == RESPONSE or which.partition(":")[0] in self.of_response


def stage_block(
    rules: ExchangeRules,
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints | None = None,
    n: Array | None = None,
    seen: Bools | None = None,
    weights: Floats | None = None,
) -> dict[str, Array]:
    """Standardize the columns of the entities of a fit; release their means and standard deviations.

    The arrays are those of :func:`~fedstat.models.vertical.exchange.standardized_columns.standardize_block`,
    and `weights` that the entities have in the data, with which their products are summed.
    """
    block = block_of(state)
    check_lengths(data.name, keep=(keep, len(block.X)))
    # Before any message about these entities, including errors, because an error names a column that is
    # constant among few of them.
    code, count = np.where(keep, 0, -1), int(np.count_nonzero(keep))
    if seen is not None:
        check_lengths(data.name, seen=(seen, count))
        # The means of a column are over groups of rows that have the same columns.
        code[keep] = number_patterns(seen)[1]
        count = int(seen.sum(axis=0).min())
    state.report(EntityCount(count), rules.division(SUMMED, code, np.flatnonzero(block.seen)))
    staged = standardize_block(data, state, keep, rows, 0 if n is None else int(n), seen, rules.flat)
    if weights is not None:
        check_lengths(data.name, weights=(weights, len(staged.X)))
        if not (weights > 0.0).all():
            raise MessageError(f"{data.name}: array 'weights' has values that are not positive")
        staged.case = weights
    state.report(SummedColumns(staged.X[staged.held]))
    shapes = [signed_squares(staged)] if rules.shapes else []
    return {"units": np.array([staged.shift, staged.scale, *shapes])}


def stage_response(
    rules: ExchangeRules, data: SiteData, state: State, text: str, keep: Bools
) -> tuple[dict[str, Array], str]:
    """Select the rows of a fit (rows,); release mean and standard deviation of the response, and a constant.

    `text` is its distribution in JSON; the constant is the part of the log-likelihood per entity that does
    not depend on coefficients: ``moments`` (3,); with `shapes` also the shape of a normal response, (5,).
    """
    opened = response_of(state)
    check_lengths(data.name, keep=(keep, len(opened)))
    y, distribution = np.ascontiguousarray(opened[keep], dtype=np.float64), DistributionSpec.from_json(text)
    state.report(EntityCount(len(y)), rules.division(RESPONSES, np.where(keep, 0, -1), np.arange(len(keep))))
    check_response(data.name, distribution.name, y)
    if distribution.name == "Gaussian":  # others use linear predictors of every entity instead of sums
        y = (moved_response(data, opened) - offset_of(state))[keep]
    mean, sd, rows = float(y.mean()), float(y.std()), np.flatnonzero(keep)
    staged = StandardizedResponse(y, distribution, mean, sd, rows, detail_of(state, "response"))
    weights = state.look_at("response weights") if "response weights" in state else None
    if weights is not None:
        staged.case = weights[keep] / weights[keep].mean()
    state.report(SummedColumns(y[:, None]))
    state.keep("staged response", staged, len(y))
    shape = response_shape(staged) if rules.shapes and distribution.name == "Gaussian" else []
    constant = float(np.mean(by_case(staged.case, len(y)) * rules.constant(distribution, y)))
    return {"moments": np.array([y.mean(), y.std(), constant, *shape])}, ""


def moved_response(data: SiteData, opened: Floats) -> Floats:
    """Dither a response, (rows,), if there is one."""
    y, has = np.array(opened, dtype=np.float64), np.isfinite(opened)
    y[has] = dithered(data, y[has, None])[:, 0]
    return y


def sum_products(
    rules: ExchangeRules, data: SiteData, state: State, code: Ints, groups: Array
) -> dict[str, Array]:
    """Sum the columns and their products by fold or missing pattern: ``sums`` (G, p), ``grams`` (G, p, p).

    `code` (n_k,) is the group of each entity of the block; -1 for those that are left out, or count as
    missing here.
    """
    staged, G = staged_block(state), int(groups)
    X = staged.X
    check_lengths(data.name, code=(code, len(X)))
    require_groups(data.name, code, G, X.shape[1] * (X.shape[1] + 1), X.shape[1])
    state.report(staged.groups(code, X.shape[1]), *summed_products(rules, state, code))
    # Fits of one session may use different entities: what was summed is recorded by row of the block.
    rows = np.flatnonzero(block_of(state).seen)
    state.report(rules.division(SUMMED, staged.among_all(code), rows), left_out(code))
    members = [np.ascontiguousarray(X[code == g]) for g in range(G)]
    case = by_case(staged.case, len(X))
    ones = [case[code == g] for g in range(G)]
    return {
        "sums": np.array([column_sums(rows, one) for rows, one in zip(members, ones, strict=True)]),
        "grams": np.array([gram(rows, one) for rows, one in zip(members, ones, strict=True)]),
    }


def summed_products(rules: ExchangeRules, state: State, code: Ints) -> Iterator[SummedProducts]:
    """Tell of the columns of the block, in the units of the data, whose products are summed by group, (n,).

    The history has the columns over the rows of all groups together: it judges what two designs differ by.
    """
    staged, block = staged_block(state), block_of(state)
    own = code[staged.held]
    X = block.X[staged.keep][own >= 0]
    there = ~np.isnan(X) if staged.seen is None else staged.seen[own >= 0]
    X, own = np.where(there, X, 0.0), own[own >= 0]
    names = block.spec.names if rules.terms is None else rules.terms(state)
    if own.min(initial=0) < own.max(initial=0):
        yield SummedProducts(lambda: [X], names, code=own)
    rows = np.flatnonzero(block.seen)[staged.keep][code[staged.held] >= 0]
    yield SummedProducts(lambda: [X], names, rows)


def sum_with_response(
    data: SiteData, state: State, code: Ints, groups: Array, rows: Ints | None = None
) -> dict[str, Array]:
    """Sum products of the columns with the response of the same site by group: (G, p).

    `rows` (n_k,) are positions of the block's entities among those of the response; by default they are
    equal.
    """
    staged, response, G = staged_block(state), staged_response(state), int(groups)
    X, y = staged.X, response.standardized
    if rows is not None:
        check_lengths(data.name, rows=(rows, len(X)))
        check_positions(data.name, rows, len(y))
        y = y[rows]
    check_lengths(data.name, code=(code, len(X)), response=(y, len(X)))
    require_groups(data.name, code, G, X.shape[1], X.shape[1])
    staged.other_columns.add("own response", 1, code)
    response.other_columns.add("own columns", X.shape[1], code)
    place = np.arange(len(X)) if rows is None else rows
    y = y * by_case(staged.case, len(y))
    held = response.summed(code[staged.held], place[staged.held])  # imputed rows add nothing
    state.report(staged.groups(code, X.shape[1]), response.groups(code, rows), held)
    return {"products": np.array([column_sums(X, np.where(code == g, y, 0.0)) for g in range(G)])}


def sum_response(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum the standardized response and its square by fold or missing pattern: ``sums`` (2, G)."""
    staged, G = staged_response(state), int(groups)
    y = staged.standardized
    check_lengths(data.name, code=(code, len(y)))
    require_groups(data.name, code, G, 2)
    state.report(staged.groups(code), left_out(code), RowGroups("", code, staged.rows))
    here, case = code >= 0, by_case(staged.case, len(y))
    sums = [np.bincount(code[here], (case * v)[here], minlength=G) for v in (y, y * y)]
    return {"sums": np.array(sums)}


def columns_of(
    rules: ExchangeRules, data: SiteData, state: State, which: str
) -> tuple[Floats, Floats | None]:
    """Columns (rows, q) that this site multiplies with another's, at a mean square of one.

    They come with their units (q,) if the family has columns other than "block" and "response": the product
    is that of ``columns * units``. The units are None for these two, which are standardized.
    """
    if which in (BLOCK, RESPONSE):
        own: StandardizedBlock | StandardizedResponse = (
            staged_block(state) if which == BLOCK else staged_response(state)
        )
        X, case = own.X if isinstance(own, StandardizedBlock) else own.standardized[:, None], own.case
        # In a product of two sites' columns, each has the square root of the weight.
        return X if case is None else X * np.sqrt(case)[:, None], None
    name, _, whom = which.partition(":")
    if name not in rules.columns:
        raise MessageError(f"{data.name}: there are no columns '{which}' in this session")
    columns = rules.columns[name](data, state, whom)
    latest = state.look_at(SCALED) if SCALED in state else None
    if latest is None or latest[0] is not columns:  # products with several sites have the same columns
        # Columns with a mean square of one fit fixed-point numbers without a declared largest value.
        units = np.sqrt(np.einsum("ij,ij->j", columns, columns) / len(columns))
        units[units == 0.0] = 1.0
        latest = columns, columns / units, units
        state.keep(SCALED, latest)
    return latest[1], latest[2]


def supports_of(rules: ExchangeRules, data: SiteData, state: State, which: str) -> Supports:
    """Supports of the columns that are called so, (rows, s): of the response, or of the block's columns.

    All that a family multiplies is made of these columns, row by row, and of numbers that are zero nowhere.
    Columns that have the rows of the response may be made of both.
    """
    if rules.are_of_response(which):
        found = supports_of_response(state)
        if which != RESPONSE and "staged block" in state:
            block, rows = supports_of_block(rules, data, state), staged_response(state).rows
            at = np.searchsorted(rows, (every := staged_rows(state))[held := every >= 0])
            placed = Supports(block.columns[held], block.names).at(at, len(rows))
            found = Supports(np.hstack([found.columns, placed.columns]), [*found.names, *placed.names])
    else:
        found = supports_of_block(rules, data, state)
    # Where entities stand in the columns several times, each counts once.
    n = len(found.columns)
    return found.at(np.arange(n), n * rules.times_there(which))


def supports_of_response(state: State) -> Supports:
    """Supports of the response, of the rows of a fit, in the units of the data."""
    staged = staged_response(state)
    y = response_of(state)
    if staged.distribution.name == "Gaussian":
        y = y - offset_of(state)
    return supports_of_columns(y[staged.rows, None], ["response"], ["response"])


def supports_of_block(rules: ExchangeRules, data: SiteData, state: State) -> Supports:
    """Supports of the columns of the block, of the rows of a fit, in the units of the data."""
    staged, block = staged_block(state), block_of(state)
    if staged.supports is not None:  # of every product of a fit they are the same
        return staged.supports
    X, spec = block.X[staged.keep], block.spec
    if staged.seen is not None:
        X = np.where(staged.seen, X, np.nan)
    if rules.terms is None:
        factors = factors_of_terms(data, spec.term_names, np.flatnonzero(block.seen)[staged.keep])
        found = supports_of_columns(X, spec.names, spec.term_names, factors)
    else:
        found = supports_of_columns(X, terms := rules.terms(state), terms)
    # Rows that are filled in with means count for no product.
    staged.supports = found.at(np.flatnonzero(staged.held), len(staged.X))
    return staged.supports


def factors_of_terms(
    data: SiteData, terms: Sequence[str], rows: Ints
) -> Mapping[str, Sequence[Array | None]]:
    """Return the values of the factors of every term of several, in some rows of the table, as numbers.

    They are None where the table is invented, and has no columns.
    """
    several = {text: term for text in dict.fromkeys(terms) if len(term := parse_term(text)) > 1}
    names = {name for term in several.values() for factor in term for name in factor.columns}
    if not names or not names <= set(data.table.columns):
        return {text: [None] * len(term) for text, term in several.items()}
    frame = data.frame[sorted(names)].iloc[rows]
    held = {name: one if is_numeric_dtype(one) else pd.factorize(one)[0] for name, one in frame.items()}
    return {
        text: [np.column_stack([held[name] for name in factor.columns]).astype(np.float64) for factor in term]
        for text, term in several.items()
    }


def staged_rows(state: State) -> Ints:
    """Rows of the site's table that the block of a fit is of, -1 for those that are filled in."""
    staged: StandardizedBlock = state.look_at("staged block")
    return staged.table_rows


def table_rows(rules: ExchangeRules, state: State, which: str) -> Ints:
    """Rows of the site's table, (rows,), of the columns with this name; -1 for imputed rows."""
    rows = staged_response(state).rows if rules.are_of_response(which) else staged_rows(state)
    return np.tile(rows, rules.times_there(which))


def left_out(code: Ints) -> ExcludedEntities:
    """Report entities without a group to the checks: means are over all entities, and would reveal a few."""
    return ExcludedEntities(int(np.count_nonzero(code < 0)))


def facts_behind_product(
    rules: ExchangeRules,
    data: SiteData,
    state: State,
    part: ProductPart,
    rows: Ints,
    group: Ints,
    both: Bools,
    marks: Array,
) -> tuple[tuple[GroupSums, GroupSums, RowGroups], Callable[[], None]]:
    """Report to the checks the basis of products of some rows by group; one column may be the response.

    The products are sums over the rows of which `both` sites have records, also with mean imputation. `marks`
    (groups, q, bytes) are those of the other's columns; the second return value enters them into the history.
    """
    every, times_there = table_rows(rules, state, part.columns), rules.times_there(part.columns)
    # If entities are repeated in the columns, each counts once.
    once = rows < len(every) // times_there
    rows, group, both = rows[once], group[once], both[once]
    of_table = every[rows]
    of_response = rules.are_of_response(part.columns)
    own = staged_response(state) if of_response else state.look_at("staged block")
    columns_summed = own.summed(group[both], rows[both])
    summed = GroupSums(group[both], summed=columns_summed), RowGroups("", group[both], of_table[both])
    each = part.product.columns_a * part.product.columns_b
    columns = part.product.columns_a + part.product.columns_b - 1
    require_groups(data.name, group, part.product.groups, each, columns)
    if data.policy.discrete == "bits" and own.detail.leveled:
        enter = own.other_columns.add_marked(data, group[both], of_table[both], marks)
    else:
        others = part.product.columns_b if part.first else part.product.columns_a
        own.other_columns.add(part.number, others, group)
        enter = _nothing
    if times_there > 1:
        # All are functions of the same columns, and every sum carries information on each of these.
        own.other_columns.add(f"{part.columns} {part.number}", each, group[both])
    if of_response:
        return (staged_response(state).groups(group, rows, columns), *summed), enter
    staged: StandardizedBlock = state.look_at("staged block")  # the opened columns have its rows
    code = spread(group, rows, len(staged.X))
    weights, times = None, 1
    if part.columns in rules.weights:
        weights, times = rules.weights[part.columns](data, state)
    return (staged.groups(code, columns, times, weights), *summed), enter


def _nothing() -> None:
    """Enter nothing."""


SEEN = presence("which columns count as seen, of each entity that takes part", 2, optional=True, dtype="bool")
CODE = presence("fold or missing pattern of each entity", dtype="int64")
GROUPS = control("number of folds or missing patterns", 0)
ENTITY_FACTS = (EntityCount, RowGroups)
PRODUCT_FACTS = (*ENTITY_FACTS, GroupSums, ExcludedEntities, SummedProducts)
INCLUDED = presence("which of the site's entities take part", dtype="bool")
ROWS = presence("positions of the block's entities among those of the response", dtype="int64", optional=True)


def _summed(
    what: str, axes: int, behind: tuple[type, ...] = (*ENTITY_FACTS, GroupSums, ExcludedEntities)
) -> ArrayDeclaration:
    """Declare sums over the entities of each fold or pattern."""
    return aggregate(f"{what} by fold or pattern", axes, behind=behind)


EXCHANGE_ORDER: Mapping[str, str] = {
    "sum_products": "stage_block stage_response",
    "sum_with_response": "sum_products",
    "sum_response": "stage_response sum_with_response",
    **COMPARISON_ORDER,
}
"""Which steps directly precede which; the others may come at any time, or in the order of the family."""


def exchange_steps(rules: ExchangeRules) -> Mapping[str, Step]:
    """Make the steps by which sites of a family exchange sums of products."""
    n = control("number of entities, where means fill in", 0, optional=True)
    filled = {"rows": ROWS, "n": n} if rules.fills else {}
    what = "means, standard deviations" + (", signed squares" if rules.shapes else "")
    units = aggregate(f"{what} of the columns", 2, behind=ENTITY_FACTS)
    weights = per_entity("weights of the entities", optional=True, weighs="weights")
    taken = {"keep": INCLUDED, "seen": SEEN, **({"weights": weights} if rules.weighted else {}), **filled}
    moments = aggregate("mean, standard deviation and shape of the response, a constant", behind=ENTITY_FACTS)
    grouped = {"code": CODE, "groups": GROUPS}
    return {
        "stage_block": Step(partial(stage_block, rules), taken, {"units": units}),
        "stage_response": Step(
            partial(stage_response, rules),
            {"keep": INCLUDED},
            {"moments": moments},
            control("family of the response"),
        ),
        "sum_products": Step(
            partial(sum_products, rules),
            grouped,
            {
                "sums": _summed("sums of the columns", 2),
                "grams": _summed("sums of products of the columns", 3, PRODUCT_FACTS),
            },
        ),
        "sum_with_response": Step(
            sum_with_response,
            {**grouped, "rows": ROWS},
            {"products": _summed("sums of products with the response", 2, (EntityCount, GroupSums))},
        ),
        "sum_response": Step(
            sum_response, grouped, {"sums": _summed("sums of the response and its square", 2)}
        ),
        **product_steps(
            partial(columns_of, rules),
            partial(table_rows, rules),
            partial(facts_behind_product, rules),
            fills=rules.fills,
            supports_of=partial(supports_of, rules),
        ),
    }
