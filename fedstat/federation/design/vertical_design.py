"""The design of sites that hold different columns: its steps, and the protocol that agrees on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.errors import DesignError, MessageError, Remedy
from fedstat.federation.design.block import CodedBlock, Partial, apply_block, build_block
from fedstat.federation.design.coding import BlockSpec, build_offset, build_response, read_terms
from fedstat.federation.design.formula.expression import name_expression
from fedstat.federation.design.formula.facts import column_facts, response_facts, term_facts
from fedstat.federation.design.formula.parse import Formula, SiteTerms
from fedstat.federation.design.formula.terms import term_text
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Reply, Request, aggregate, per_entity, presence, schema
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.cardinality import DITHERED, EXACT, ColumnCardinality, DiscreteColumn
from fedstat.federation.tables.columns import LevelValue, number_units, reads_as_numbers
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Number of values that design columns can have, from what a site has published, and never from its rows.


def block_cardinality(data: SiteData, spec: BlockSpec) -> ColumnCardinality | None:
    """Detail of a coded block; None where the owner does not ask for it."""
    if data.policy.discrete == "any":
        return None
    factors = {term_text(term): term_facts([term]).factors for term in read_terms(spec.terms, spec.columns)}
    return columns_cardinality(data, [factors[term] for term in spec.term_names])


def response_cardinality(data: SiteData, response: str) -> ColumnCardinality | None:
    """Detail of a response; None where the owner does not ask for it."""
    if data.policy.discrete == "any":
        return None
    return columns_cardinality(data, [response_facts(response).factors])


def columns_cardinality(
    data: SiteData, columns: Sequence[Sequence[facts.FormulaFactor]]
) -> ColumnCardinality:
    """Put together what the factors of every design column read."""
    levels: dict[str, int] = {}
    read = []
    for factors in columns:
        found: dict[str, int] = {}
        for factor in factors:
            found |= _levels(data, factor)
        levels |= found
        read.append(set(found))
    few = {name: count for name, count in levels.items() if count}
    leveled = []
    for name, count in few.items():
        own = [names for names in read if name in names]
        leveled.append(DiscreteColumn(max(count, 2), len(own), all(names == {name} for names in own)))
    plain = sum(not names & few.keys() for names in read)
    return ColumnCardinality(plain, tuple(leveled), EXACT if data.policy.rounding == "none" else DITHERED)


def _levels(data: SiteData, factor: facts.FormulaFactor) -> dict[str, int]:
    """Levels of what a factor reads, 0 where a published number has any values."""
    if facts.COMPARISON in factor.functions:
        return {factor.text: 2}
    # Nothing is known of a column that is not published: it may be of zeros and ones.
    return {
        name: len(data.published[name].levels) if name in data.published else 2 for name in factor.columns
    }


# ----------------------------------------------------------------------------------------------------
# The design of sites that hold different columns, agreed before anything is estimated.
#
# The agreement is a protocol like any other: the response holder says which entities have a response, then
# every site codes its own columns and says which entities it has.

FAMILY = "design"
MissingRule: TypeAlias = Literal["raise", "drop"]


@dataclass(frozen=True, slots=True)
class BlockDesign:
    """One site's part of the design: its p columns, and the term of each.

    `rows` (n_k,) are the positions, ascending, of the entities that it has among the n of the design;
    `n_partial` counts entities with some but not all of the columns; `detail` has the columns of few values
    where the site's owner has sums judged by their bits. Where entities enter with some of the columns `has`
    (n_k, p) says with which.
    """

    site: str
    names: tuple[str, ...]
    term_names: tuple[str, ...]
    rows: Ints
    n_partial: int
    detail: ColumnCardinality | None = None
    has: Bools | None = None

    @property
    def complete(self) -> Bools:
        """Which of the entities have all columns, (n_k,)."""
        return np.ones(len(self.rows), dtype=bool) if self.has is None else np.asarray(self.has.all(axis=1))


@dataclass(frozen=True, slots=True)
class Design:
    """The agreed design; blocks are in partition order.

    `active` holds the response, in the rows `response_keep` of its table; `entities` (n,) are their positions
    among the entities of the partition, of which `n_dropped` have no response; `weights` (n,) are theirs,
    once a fit knows them. `least` are the fewest rows of a product at sites that have them counted.
    """

    formula: Formula
    active: str
    entities: Ints
    response_keep: Bools
    blocks: tuple[BlockDesign, ...]
    n_dropped: int
    response_detail: ColumnCardinality | None = None
    weights: Floats | None = None
    least: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        p = sum(len(block.names) for block in self.blocks)
        of = f"{p} columns of {len(self.blocks)} sites"
        return f"<Design: {self.formula.text}, {self.n:,} entities, {of}>"

    @property
    def n(self) -> int:
        """Entities in the design."""
        return len(self.entities)


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """The left side of a formula, the columns that it reads, and those of an offset and of weights."""

    response: str
    columns: tuple[str, ...]
    offset: str = ""
    weights: str = ""

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Columns that are opened together with the response."""
        return tuple(name for name in (self.offset, self.weights) if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """Terms of the right side, and how a site is to code them; see :func:`build_block`."""

    site: str = ""
    terms: tuple[str, ...]
    columns: tuple[str, ...]
    partial: Partial
    min_count: int
    intercept: bool


@dataclass(frozen=True, slots=True)
class CodingRequest:
    """A :class:`BlockSpec`, in JSON, by which new rows are to be coded."""

    spec: str
    partial: Partial


@dataclass(frozen=True, slots=True)
class OpenedBlock:
    """A site's description of its coded columns, with the number of rows that had only some of them."""

    names: tuple[str, ...]
    term_names: tuple[str, ...]
    levels: Mapping[str, tuple[LevelValue, ...]]
    n_partial: int


@dataclass(frozen=True, slots=True)
class BlockWithCardinality(OpenedBlock):
    """The same, and which of the columns have few values, where the site's owner has sums judged by these."""

    detail: ColumnCardinality | None = None


@dataclass(frozen=True, slots=True)
class BlockWithPatterns(BlockWithCardinality):
    """The same, and of each design column the number of the set of columns with which it is missing."""

    unit: tuple[int, ...] = ()


# Whether an entity is there hangs on its own record alone: replacing that changes one entry, by one.
PRESENT = presence("which entities the site has", sensitivity=1.0)
COLUMNS = presence("which of its columns the site has of each entity", 2, optional=True, dtype="bool")
SCHEMA = schema("column names, levels and counts", behind=(facts.EntityCount,))
CODING = "coding of the columns, with the state of transforms"


@step(
    FAMILY,
    releases={"has": presence("which entities have a response", sensitivity=1.0)},
    requests=schema("the response"),
    replies=schema("published levels of the response", behind=(facts.EntityCount,)),
)
def open_response(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Compute the response and say which rows have one."""
    where = f"{data.name}: the question about the response"
    request = from_json(ResponseRequest, text, where, defaults=True)
    # Before a row is read: what is computed of it may be what the owner refuses.
    state.report(response_facts(request.response), column_facts(request.extra_columns))
    response = build_response(data.frame, request.response, request.columns, data.name)
    if response.ndim != 1:
        raise DesignError(f"response at site {data.name!r}: expected one column; counts are for a GLM")
    has = np.isfinite(response)
    extra = {
        name: build_offset(data.frame, (name_expression(name).text,), (name,), data.name)
        for name in request.extra_columns
    }
    for values in extra.values():
        has &= np.isfinite(values)
    state.keep("response weights", None)
    if request.weights:
        weights = extra[request.weights]
        if (weights < 0.0).any():
            raise DesignError(f"weights '{request.weights}' at site {data.name!r}: some are negative")
        # An entity of weight zero counts for none, and not towards the least number of them either.
        has &= weights > 0.0
        state.keep("response weights", np.where(has, weights, 0.0), int(has.sum()))
    response = np.where(has, response, np.nan)
    state.use_columns((*request.columns, *request.extra_columns))
    state.keep("response", response, int(has.sum()))
    state.keep("response offset", extra.get(request.offset))
    detail = response_cardinality(data, request.response)
    state.keep("response detail", detail)
    return {"has": has}, "" if detail is None else to_json(detail)


@step(
    FAMILY,
    "open_response",
    releases={"weights": per_entity("weights of the entities", behind=(facts.EntityCount,))},
)
def open_weights(data: SiteData, state: State) -> dict[str, Array]:
    """Release the weights that were opened with the response, zero if there are none: (rows,)."""
    return {"weights": state.use("response weights", np.ndarray, "no weights are open in this session")}


@step(
    FAMILY,
    "open_response",
    releases={"offset": per_entity("offset of the entities", behind=(facts.EntityCount,))},
)
def open_offset(data: SiteData, state: State) -> dict[str, Array]:
    """Release the offset that was opened with the response, zero if it is missing: (rows,)."""
    found = state.use("response offset", np.ndarray, "no offset is open in this session")
    return {"offset": np.nan_to_num(found)}


def offset_of(state: State) -> Floats | float:
    """Return the offset that was opened with the response, (rows,), or zero."""
    found = state.look_at("response offset") if "response offset" in state else None
    return 0.0 if found is None else np.asarray(found, dtype=np.float64)


@step(
    FAMILY,
    takes={"use": presence("which entities have a response", dtype="bool")},
    releases={"seen": PRESENT, "columns": COLUMNS},
    requests=schema("terms of the formula"),
    replies=SCHEMA,
)
def open_block(data: SiteData, state: State, text: str, use: Bools) -> tuple[dict[str, Array], str]:
    """Code this site's columns on the rows in `use`, and say which rows it has."""
    request = from_json(BlockRequest, text, f"{data.name}: the question about its columns", defaults=True)
    terms = SiteTerms(data.name, request.terms, request.columns)
    state.report(term_facts(read_terms(terms.terms, terms.columns)))
    block = build_block(
        data.frame,
        terms,
        partial=request.partial,
        min_count=request.min_count,
        use=use,
        intercept=request.intercept,
        published=data.published,
    )
    # Levels are released with their names; a level of few entities may identify them.
    for name in block.spec.levels:
        found = data.frame[name][block.seen].value_counts()
        numbers = reads_as_numbers(found.index.tolist())
        state.report(facts.LevelRowCounts(name, found.tolist(), numbers=numbers))
    state.report(*(facts.LevelRowCounts(term, counts) for term, counts in block.cells.items()))
    # Means and deviations of columns, and states of transforms, leave of a block that is open.
    state.report(facts.SummedColumns(block.filled))
    return _opened(data, state, block)


@step(
    FAMILY,
    releases={"seen": PRESENT, "columns": COLUMNS},
    request=CodingRequest,
    requests=aggregate(CODING),
    replies=SCHEMA,
)
def open_new_block(data: SiteData, state: State, request: CodingRequest) -> tuple[dict[str, Array], str]:
    """Code new rows by an agreed specification, and say which rows there are."""
    coding = BlockSpec.from_json(request.spec)
    state.report(term_facts(read_terms(coding.terms, coding.columns)))
    block = apply_block(data.frame, coding, partial=request.partial, site=data.name)
    return _opened(data, state, block)


def _opened(data: SiteData, state: State, block: CodedBlock) -> tuple[dict[str, Array], str]:
    state.use_columns(block.spec.columns)
    # Means and levels of a column rest on the rows that have it.
    state.keep("block", block, block.fewest, columns=block.X.shape[1])
    spec = block.spec
    detail = block_cardinality(data, spec)
    state.keep("block detail", detail)
    reported = (spec.names, spec.term_names, spec.levels, block.n_partial)
    has = block.has
    if not has.all():
        unit = number_units(has, np.zeros(has.shape[1], dtype=np.int64))
        _, first = np.unique(unit, return_index=True)
        partly = BlockWithPatterns(*reported, detail, tuple(unit.tolist()))
        return {"seen": block.seen, "columns": has[:, first]}, to_json(partly)
    return {"seen": block.seen}, to_json(
        BlockWithCardinality(*reported, detail) if detail else OpenedBlock(*reported)
    )


@step(
    FAMILY,
    "open_block",
    replies=aggregate(
        CODING,
        behind=(facts.EntityCount,),
        without_terms="how columns are coded; repeats the levels and sums that the coding was made of",
    ),
)
def release_spec(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Release how the columns were coded, so that new rows can be coded alike elsewhere."""
    return {}, block_of(state).spec.to_json()


@dataclass(frozen=True, slots=True)
class FoldsRequest:
    """A column of groups, such as persons, the number of folds, and the seed by which groups are drawn."""

    column: str
    folds: int
    seed: int


@step(
    FAMILY,
    takes={"use": presence("which entities take part", dtype="bool")},
    releases={"fold": per_entity("fold of each entity", behind=(facts.EntityCount, facts.ClusterCounts))},
    request=FoldsRequest,
    requests=schema("column of groups, and number of folds"),
)
def draw_folds(data: SiteData, state: State, request: FoldsRequest, use: Bools) -> dict[str, Array]:
    """Draw folds of groups: ``fold`` (m,) of the entities in `use`, equal for equal values of the column.

    A fold is a union of groups, which the numbers reveal: every fold must have as many groups as the owner
    requires behind a sum. An entity without a value is a group of its own.
    """
    state.report(column_facts((), (request.column,)))
    if request.column not in data.frame or request.folds < 2 or len(use) != len(data.frame):
        raise MessageError(f"{data.name}: expected a column of this site, two folds or more, and all records")
    code = np.asarray(pd.factorize(data.frame[request.column][use])[0], dtype=np.int64)
    alone = code < 0
    code[alone] = code.max(initial=-1) + 1 + np.arange(int(alone.sum()))
    sizes = np.bincount(code)
    people = facts.ClusterCounts(request.column, len(sizes) // request.folds, remedy="use fewer folds")
    state.report(facts.EntityCount(len(code)), people)
    own = int.from_bytes(hashlib.sha256(data.name.encode()).digest()[:8], "big")
    fold_of, filled = np.zeros(len(sizes)), np.zeros((2, request.folds))
    # Equal numbers of groups, and among folds with the fewest groups the one with the fewest entities.
    for group in np.random.default_rng([request.seed, own]).permutation(len(sizes)):
        chosen = int(np.lexsort(filled[::-1])[0])
        fold_of[group] = chosen
        filled[:, chosen] += 1.0, sizes[group]
    state.use_columns((request.column,))
    return {"fold": fold_of[code]}


def block_of(state: State) -> CodedBlock:
    """Return the block that this session opened, unless the site has forgotten it."""
    absent = "no columns are open in this session (a site keeps the latest ones only); make the model again"
    return state.use("block", CodedBlock, absent)


def response_of(state: State) -> Floats:
    """Return the response that this session opened, unless the site has forgotten it: (rows,)."""
    absent = "no response is open in this session (a site keeps the latest one only); make the model again"
    return state.use("response", np.ndarray, absent)


def design_request(site: str, step: str, session: str, content: Any = None, **arrays: Array) -> Request:
    """Address one step of the design."""
    text = "" if content is None else to_json(content)
    return Request(site, FAMILY, step, arrays, session, text)


def agree_design(
    formula: Formula,
    rows: Mapping[str, Ints],
    n_entities: int,
    session: str,
    *,
    missing: MissingRule = "raise",
    partial: Partial = "drop",
    min_count: int = 5,
    offset: str = "",
    weights: str = "",
) -> FitProtocol[Design]:
    """Agree on a vertical design.

    `rows` are the positions of each site's records among the entities; `missing` decides about
    entities without a response; `partial` and `min_count` are those of :class:`~fedstat.ClientPartition`;
    `offset` and `weights` are columns of the response's holder, which releases them in fits that need them.

    Raises a DesignError as :func:`~fedstat.federation.design.block.build_block` does, for entities
    without a response, and for a site that shares none with the response holder.
    """
    active = formula.response_site
    if active is None:
        raise DesignError("the response is held by every site: this model needs it at one only")
    question = ResponseRequest(formula.response, formula.response_columns, offset, weights)
    (reply_of_response,) = yield [design_request(active, "open_response", session, question)]
    has = reply_of_response.arrays["has"]
    entities = rows[active][has]
    # Before what lacks a response is counted: with keys in two spellings nearly all entities do.
    shared = {
        terms.site: _shared(rows[terms.site], entities, active, terms.site)
        for terms in (formula.sites if len(entities) else ())
    }
    causes = [("has no value of the offset", offset), ("has a weight of zero or none", weights)]
    among = " or ".join(["has no value", *(text for text, column in causes if column)])
    _check_response(active, formula, n_entities, len(rows[active]), len(entities), missing, among)
    requests = []
    for terms in formula.sites:
        request = BlockRequest(
            **asdict(terms), partial=partial, min_count=min_count, intercept=formula.intercept
        )
        requests.append(design_request(terms.site, "open_block", session, request, use=shared[terms.site]))
    replies = yield requests
    blocks = tuple(released_block(reply, rows[reply.site], entities) for reply in replies)
    detail = None
    if reply_of_response.text:
        where = f"{active}: description of its response"
        detail = from_json(ColumnCardinality, reply_of_response.text, where)
    return Design(formula, active, entities, has, blocks, n_entities - len(entities), detail)


def _shared(rows: Ints, entities: Ints, active: str, site: str) -> Bools:
    """Rows of a site whose entities have a response; others, and their levels, are not used."""
    use: Bools = np.isin(rows, entities)
    if not use.any():
        raise DesignError(
            f"sites '{active}' (the response) and '{site}' have no entity in common; "
            "check that both write the key alike, or leave that site out"
        )
    return use


def released_block(reply: Reply, rows: Ints, entities: Ints) -> BlockDesign:
    """Read a site's description of its columns; `rows` and `entities` are those of :func:`agree_design`."""
    where = f"{reply.site}: description of its columns"
    reported = from_json(BlockWithPatterns, reply.text, where, defaults=True)
    # `seen` is by rows of the site's own table; the fit counts entities with a response, ascending.
    at = np.searchsorted(entities, rows[reply.arrays["seen"]]).astype(np.int64)
    has = observed_columns(reply, reported)
    return BlockDesign(
        reply.site, reported.names, reported.term_names, at, reported.n_partial, reported.detail, has
    )


def observed_columns(reply: Reply, reported: BlockWithPatterns | None = None) -> Bools | None:
    """Which columns each entity has of those that enter, (n_seen, p); None where all have all."""
    if "columns" not in reply.arrays:
        return None
    reported = reported or from_json(BlockWithPatterns, reply.text, reply.site, defaults=True)
    unit, columns = np.array(reported.unit, dtype=np.int64), reply.arrays["columns"]
    fits = len(unit) == len(reported.names) and set(reported.unit) == set(range(columns.shape[1]))
    if not fits or len(columns) != int(reply.arrays["seen"].sum()):
        raise MessageError(f"{reply.site}: the description of its columns does not fit their number")
    return np.asarray(columns[:, unit])


def _check_response(
    active: str, formula: Formula, n_entities: int, records: int, n: int, missing: MissingRule, among: str
) -> None:
    """Refuse entities without a response; `records` have a row at its site, which for some `among` these."""
    without = n_entities - n
    if without and missing == "raise":
        absent = n_entities - records
        causes = [
            *[f"{absent:,} have no record there, often because a key is written differently"] * bool(absent),
            *[f"the record of {without - absent:,} {among}"] * bool(without - absent),
        ]
        raise DesignError(
            f"the response '{formula.response}' at site '{active}' is missing for {without:,} of "
            f"{n_entities:,} entities: {'; '.join(causes)}",
            remedy=Remedy(
                'from_formula(..., missing="drop").fit()',
                "Correct the keys, or pass {arguments} to leave these entities out (they will be counted)",
            ),
        )
    if n < 2:
        raise DesignError(f"the response '{formula.response}' at site '{active}' is there for {n} entities")
