"""Tables of two columns at different sites: rows by level, sums by level, and sums of products.

Each site stages its column over the entities that both have: a category as indicators of its levels, a number
standardized, with its square where variances by level are wanted. One secure product gives the sums. Rows of
every product are counted first, whatever the policy: a table has no cell of few entities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedstat.codec import from_json, to_json
from fedstat.errors import EstimationError, MessageError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.parse import parse_formula
from fedstat.federation.design.formula.syntax_tree import iter_columns
from fedstat.federation.design.formula.terms import parse_term
from fedstat.federation.design.vertical_design import (
    BlockRequest,
    BlockWithPatterns,
    Design,
    block_of,
    design_request,
    released_block,
)
from fedstat.federation.disclosure.facts import (
    EntityCount,
    GroupSums,
    LevelRowCounts,
    RowGroups,
    SummedColumns,
    SummedProducts,
)
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.synthetic import synthetic_block
from fedstat.federation.message import aggregate, check_lengths, presence
from fedstat.federation.message import control as controls
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.product_steps import COMPARISON_ORDER, ProductPart, product_steps
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.federation.tables.supports import PER_COLUMN, Supports, supports_of_columns
from fedstat.models.explain import DryRunPlan
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.vertical.exchange.standardized_columns import ProductHistory, detail_of, dithered
from fedstat.models.vertical.model import VerticalModel
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "column tables"
STAGED = "column of a table"


@dataclass(frozen=True, slots=True)
class ColumnRequest:
    """Whether the squares of a number are multiplied as well."""

    squares: bool


@dataclass(frozen=True, slots=True, eq=False)
class StagedColumn:
    """What a site multiplies: columns (n, q) of mean square one with their units, and rows of its table (n,).

    `plain` (n, r) are indicators, or the number in its own units, by which rows of products are counted;
    `level` (n,) is the level of each entity, 0 for a number.
    """

    columns: Floats
    units: Floats
    rows: Ints
    plain: Floats
    names: tuple[str, ...]
    level: Ints


MOMENTS = aggregate("entities of each level, or mean and standard deviation", behind=(EntityCount, RowGroups))
REQUEST = controls("which sums of columns")


@step(
    FAMILY,
    takes={"keep": presence("which of the site's entities the other site has", dtype="bool")},
    request=ColumnRequest,
    requests=REQUEST,
    releases={"moments": MOMENTS},
)
def stage_column(data: SiteData, state: State, request: ColumnRequest, keep: Bools) -> dict[str, Array]:
    """Stage the column over entities of both: ``moments`` are counts (L,), or mean and deviation (2,)."""
    check_lengths(data.name, keep=(keep, len(block_of(state).X)))
    ((staged, moments),) = stage_terms(data, state, keep, request.squares)
    state.keep(STAGED, staged, len(staged.rows))
    return {"moments": moments}


@step(
    FAMILY,
    request=ColumnRequest,
    requests=REQUEST,
    releases={
        "first": MOMENTS,
        "second": replace(MOMENTS, optional=True),
        "products": aggregate(
            "sums of products of the two columns",
            2,
            optional=True,
            behind=(EntityCount, RowGroups, GroupSums),
        ),
    },
)
def sum_columns(data: SiteData, state: State, request: ColumnRequest) -> dict[str, Array]:
    """Sum a column of the site, or two and their ``products`` (p, q); moments as :func:`stage_column`."""
    every = np.asarray(np.isfinite(block_of(state).X).all(axis=1), dtype=bool)
    (a, first), *rest = stage_terms(data, state, every, request.squares)
    if not rest:
        return {"first": first}
    ((b, second),) = rest
    cell = a.level * (1 + b.level.max()) + b.level
    state.report(LevelRowCounts("cells of the table", np.bincount(cell).tolist()))
    state.report(RowGroups("", cell, a.rows), GroupSums(np.zeros(len(cell), dtype=np.int64)))
    return {"first": first, "second": second, "products": (a.columns * a.units).T @ (b.columns * b.units)}


def stage_terms(
    data: SiteData, state: State, keep: Bools, squares: bool
) -> list[tuple[StagedColumn, Floats]]:
    """Stage the column of each term of the block over some of its rows, and return it with its moments."""
    block = block_of(state)
    rows, spec, out = np.flatnonzero(block.seen)[keep], block.spec, []
    X, moved = block.X[keep], dithered(data, block.X)[keep]
    state.report(EntityCount(len(rows)))
    for term in dict.fromkeys(spec.term_names):
        own = [j for j, name in enumerate(spec.term_names) if name == term]
        plain, columns, names = X[:, own], moved[:, own], tuple(spec.names[j] for j in own)
        level = np.zeros(len(rows), dtype=np.int64)
        if is_category(names):
            levels = spec.levels.get(next(iter_columns(parse_term(term)[0].tree)), ())
            if len(own) < len(levels):
                # The second category of a site has a reference level, which is the first one.
                plain = np.column_stack([1.0 - plain.sum(axis=1), plain])
                columns, names = plain, (f"{term}[{levels[0]}]", *names)
            level, moments = plain.argmax(axis=1), plain.sum(axis=0)
            state.report(LevelRowCounts(term, moments.astype(np.int64).tolist()))
        else:
            moments = np.array([columns.mean(), columns.std()])
            if len(rows) < 2 or not moments[1] > 0.0:
                raise EstimationError(
                    f"{data.name}: column {term!r} is constant among the {len(rows):,} entities of the "
                    "table. Leave it out"
                )
            z = (columns - moments[0]) / moments[1]
            columns = np.hstack([z, z**2][: 1 + squares])
            state.report(SummedColumns(z))
        # Divisions of the same entities, in this table and in others, must not differ by few of them.
        state.report(RowGroups("", level, rows))
        units = np.sqrt(np.mean(columns**2, axis=0))
        units[units == 0.0] = 1.0
        out.append((StagedColumn(columns / units, units, rows, plain, names, level), moments))
    state.report(SummedProducts(lambda: [X], spec.names, rows))
    return out


def staged_column(state: State) -> StagedColumn:
    """Return the column of this table."""
    return state.use(STAGED, StagedColumn, "no column is staged here; request 'stage_column' first")


def columns_of(data: SiteData, state: State, which: str) -> tuple[Floats, Floats]:
    """Columns that are multiplied, and their units."""
    held = staged_column(state)
    return held.columns, held.units


def supports_of(data: SiteData, state: State, which: str) -> Supports:
    """Supports of the column, by which rows of products are counted."""
    held = staged_column(state)
    return supports_of_columns(held.plain, held.names, [held.names[0]] * len(held.names))


def behind(
    data: SiteData, state: State, part: ProductPart, rows: Ints, group: Ints, both: Bools, marks: Array
) -> tuple[tuple[Any, ...], Callable[[], None]]:
    """Report the entities behind the sums, and the columns of the other site with which they are taken."""
    held, history = staged_column(state), ProductHistory()
    # A table has no cell of few entities, also where the owner lets other products have them.
    if part.least < data.policy.min_level_count > 1:
        raise MessageError(
            f"{data.name}: rows of a table's products are counted, and compared with at least "
            f"{data.policy.min_level_count}"
        )
    enter: Callable[[], None] = lambda: None  # noqa: E731
    if data.policy.discrete == "bits":
        enter = history.add_marked(data, group, held.rows[rows], marks)
    columns = part.product.columns_a + part.product.columns_b - 1
    sums = GroupSums(group, columns=columns, detail=detail_of(state, "block"), other_columns=history.counts)
    return (sums, RowGroups("", group, held.rows[rows])), enter


include(
    FAMILY,
    product_steps(
        columns_of,
        lambda state, which: staged_column(state).rows,
        behind,
        fills=False,
        supports_of=supports_of,
    ),
    {"open_product": "stage_column deal_product open_product", **COMPARISON_ORDER},
)


# ----------------------------------------------------------------------------------------------------
# The protocol and its model.


@dataclass(frozen=True, slots=True, eq=False)
class PairTable:
    """Sums over the `n` entities that have both of two columns.

    `moments` are those of each column: entities by level (L,), or mean and standard deviation (2,).
    `products` (p, q) are sums of products: a category has a column for each level, a number is standardized,
    and has its square as a second column where that was requested.
    """

    n: int
    moments: tuple[Floats, Floats]
    products: Floats


def pair_table(
    session: SecureProductSession, design: Design, squares: bool, dealers: tuple[str, ...]
) -> FitProtocol[PairTable]:
    """Sum columns of one site, or stage two columns over the entities of both sites, and multiply them."""
    text = to_json(ColumnRequest(squares))
    if len(design.blocks) == 1:
        (block,) = design.blocks
        (reply,) = yield [session.request(block.site, "sum_columns", text)]
        none = np.zeros(0)
        moments = reply.arrays["first"], reply.arrays.get("second", none)
        return PairTable(int(block.complete.sum()), moments, reply.arrays.get("products", none))
    both = np.intersect1d(design.blocks[0].rows, design.blocks[1].rows)
    replies = yield [
        session.request(block.site, "stage_column", text, keep=np.isin(block.rows, both))
        for block in design.blocks
    ]
    code, first, operands = np.zeros(len(both), dtype=np.int64), 0, []
    for block in design.blocks:
        width = len(block.names) if is_category(block.names) else 1 + squares
        operands.append(
            ProductOperand(
                block.site,
                STAGED,
                slice(first, first + width),
                np.arange(len(both)),
                code,
                supports=PER_COLUMN * len(block.names),
            )
        )
        first += width
    (found,) = yield from session.multiply([(operands[0], operands[1])], dealers, 1, len(both))
    a, b = (np.asarray(reply.arrays["moments"]) for reply in replies)
    return PairTable(len(both), (a, b), np.asarray(found.products[0]))


def is_category(names: Sequence[str]) -> bool:
    """Whether a column has indicators of levels, by their names."""
    return names[0].endswith("]")


class ColumnPair(VerticalModel):
    """Two columns of the same entities, or one."""

    family: ClassVar[str] = FAMILY
    _plan = DryRunPlan

    def __init__(self, partition: ClientPartition, terms: Sequence[str]) -> None:
        formula = parse_formula(f"~ {' + '.join(terms)}", partition.columns, response=False)
        first = parse_formula(f"~ {terms[0]}", partition.columns, response=False).sites[0].site
        self.swapped = first != formula.sites[0].site
        coordinator = partition.coordinator or "apart"
        super().__init__(replace(formula, intercept=False), partition, coordinator=coordinator)

    def _agree(self, missing: object) -> FitProtocol[Design]:
        partition, requests = self.partition, []
        for terms in self.formula.sites:
            request = BlockRequest(
                site=terms.site,
                terms=terms.terms,
                columns=terms.columns,
                partial=partition.partial,
                min_count=partition.min_count,
                intercept=False,
            )
            use = np.ones(len(partition.rows[terms.site]), dtype=bool)
            requests.append(design_request(terms.site, "open_block", self._session, request, use=use))
        replies = yield requests
        every = np.arange(partition.n_entities)
        blocks = tuple(released_block(reply, partition.rows[reply.site], every) for reply in replies)
        if not np.isin(blocks[0].rows, blocks[-1].rows).any():
            raise EstimationError(
                f"sites {blocks[0].site!r} and {blocks[-1].site!r} have no entity with both columns; check "
                "that both write the key alike"
            )
        found = [
            from_json(BlockWithPatterns, reply.text, reply.site, defaults=True).levels for reply in replies
        ]
        self.levels = {name: levels for own in found for name, levels in own.items()}
        return Design(self.formula, blocks[0].site, every, np.ones(len(every), dtype=bool), blocks, 0)

    @property
    def n_both(self) -> int:
        """Number of entities that have all columns."""
        first, *rest = (block.rows[block.complete] for block in self.design.blocks)
        return len(np.intersect1d(first, rest[0]) if rest else first)

    def _warn_of_partial_blocks(self, which: str) -> None:
        """Leave missing values to the table, which counts them."""

    def fit(self, squares: bool = False) -> tuple[PairTable, Ledger]:
        """Sum products over the entities of both sites, with `squares` also those of squared numbers."""
        found: tuple[PairTable, Ledger] = run_fit(
            self, Call.of(self.fit, locals()), ColumnPair._multiply, squares
        )
        return found

    def _multiply(self, attempt: FitAttempt, squares: bool) -> tuple[PairTable, Ledger]:
        pair = [block.site for block in self.design.blocks]
        others = [name for name in self.partition.sites if name not in pair]
        policies = {name: self.partition.sites[name].policy for name in pair}
        least = {name: one.min_level_count for name, one in policies.items() if one.min_level_count > 1}
        session = SecureProductSession(FAMILY, self._session, self._agreement.at, least=least)
        # A third site deals if there is one; the coordinator otherwise.
        table = attempt.run(pair_table(session, self.design, squares, (*pair, *others[:1])))
        if self.swapped:
            table = PairTable(table.n, table.moments[::-1], table.products.T)
        return table, attempt.ledger

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        sites = {}
        for name, policy in policies.items():
            rows = self.partition.rows[name]
            sites[name] = DrySite(name, policy, len(rows), entities=rows)
            state = State(name)
            for block in self.design.blocks:
                if block.site == name:
                    n = len(block.rows)
                    X = np.random.default_rng(0).normal(size=(n, len(block.names)))
                    for term in dict.fromkeys(block.term_names):
                        own = [j for j, one in enumerate(block.term_names) if one == term]
                        if is_category([block.names[j] for j in own]):
                            X[:, own] = np.eye(len(own))[np.arange(n) % len(own)]
                    state.keep("block", synthetic_block(block, X, np.isin(rows, block.rows)), n)
            sites[name].open(self._session, state)
        return sites
