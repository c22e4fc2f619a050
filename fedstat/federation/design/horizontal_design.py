"""The design of sites that hold different rows: the protocol that agrees on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from fedstat import codec
from fedstat.errors import AliasedColumnsError, DesignError, SpellingWarning, warn
from fedstat.federation.design.checks import check_references, name_all
from fedstat.federation.design.coding import BlockSpec, TransformStates, plain_state
from fedstat.federation.design.horizontal_steps import NamedColumns, RowsCoding, varying
from fedstat.federation.design.levels import (
    SiteColumns,
    agree_kinds,
    agree_levels,
    agreed_categories,
    spelling_doubts,
)
from fedstat.federation.design.site_rows import INTERCEPT, RowsRequest
from fedstat.federation.design.spline_knots import agree_knots
from fedstat.federation.design.transform_states import agree_states, assumed_states
from fedstat.federation.design.vertical_design import FAMILY
from fedstat.federation.disclosure.facts import TABLE_OF_COUNTS
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.tables.columns import ColumnKind
from fedstat.typing import Floats, Ints, Vector

GAPS = (
    "Unknown stretches of a curve can be at most as long as its declaration allows: Curve(..., max_gap=0.2), "
    "a share of its domain."
)
CANCELED = 1e-13
"""Spread between sites, relative to the sum of squares that it is the rest of, that rounding explains."""


@dataclass(frozen=True, slots=True)
class SiteRowCounts:
    """How many rows one site has, how many it uses, and whether it leaves complete ones out."""

    site: str
    n_rows: int
    n: int
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class RowsSchema:
    """The agreement before rows are coded: levels and states, without names; sites in partition order.

    Until :func:`agree_transforms` the states are assumed.
    """

    question: RowsRequest
    spec: BlockSpec
    sites: Annotated[tuple[SiteRowCounts, ...], "K"]

    @property
    def leaving_out(self) -> tuple[str, ...]:
        """Sites that leave complete rows out, which count as missing."""
        return tuple(row.site for row in self.sites if row.left_out)


@dataclass(frozen=True, slots=True)
class AbsorbedCounts:
    """Rank of the levels of absorbed effects over all sites, and rows left out that are alone in one."""

    levels: int = 0
    alone: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RowsDesign:
    """The coded design: p columns, the intercept first where there is one, and the term of each.

    By site the number of rows; over all sites the mean and standard deviation of every column. `effects` are
    the columns of each random effect, of which the last `further` columns are those that no fixed term has.
    """

    names: Annotated[tuple[str, ...], "p"]
    term_names: Annotated[tuple[str, ...], "p"]
    intercept: bool
    n: Annotated[Ints, "K"]
    mean: Vector
    spread: Vector
    effects: tuple[tuple[str, ...], ...] = ()
    further: int = 0
    absorbed: AbsorbedCounts = AbsorbedCounts()

    @property
    def rank(self) -> int:
        """Coefficients, those of absorbed levels included."""
        return len(self.names) + self.absorbed.levels

    @property
    def nobs(self) -> int:
        """Rows at all sites that are used."""
        return int(self.n.sum()) - self.absorbed.alone

    @property
    def fixed(self) -> RowsDesign:
        """The columns of the fixed terms."""
        p = len(self.names) - self.further
        parts = {name: getattr(self, name)[:p] for name in ("names", "term_names", "mean", "spread")}
        return replace(self, **parts, effects=(), further=0)


def rows_request(session: str) -> Callable[[str, str, Any], Request]:
    """Address the steps of this design in one session."""

    def request(site: str, step: str, content: Any) -> Request:
        text = content if isinstance(content, str) else json.dumps(content)
        return Request(site, FAMILY, step, {}, session, text)

    return request


def agree_rows(
    question: RowsRequest,
    sites: Sequence[str],
    session: str,
    *,
    masked: bool = False,
    mask_counts: bool = False,
    **settings: Any,
) -> FitProtocol[RowsSchema]:
    """Agree on levels, see :func:`agree_coding` and its `settings`, and on the state of transforms."""
    found = yield from agree_coding(question, sites, session, **settings)
    # After kinds and levels, so that a problem with a column is reported before its rows are read again.
    return (yield from agree_transforms(found, session, masked=masked, mask_counts=mask_counts))


def agree_transforms(
    agreement: RowsSchema, session: str, *, masked: bool = False, mask_counts: bool = False
) -> FitProtocol[RowsSchema]:
    """Agree on knots and the state of transforms; `masked`: from masked sums, `mask_counts`: knots alone."""
    sites = [row.site for row in agreement.sites]
    parts = _knots_and_states(agreement.question, sites, session, masked, mask_counts)
    question, state = yield from masked_protocol(parts, sites, session, sums_only=True) if masked else parts
    spec = replace(agreement.spec, terms=question.every_term, state=plain_state(state))
    return replace(agreement, question=question, spec=spec)


def _knots_and_states(
    question: RowsRequest, sites: Sequence[str], session: str, masked: bool, mask_counts: bool
) -> FitProtocol[tuple[RowsRequest, TransformStates]]:
    request = rows_request(session)
    knots = agree_knots(question, sites, request)
    apart = mask_counts and not masked
    question = yield from masked_protocol(knots, sites, session, sums_only=True) if apart else knots
    return question, (yield from agree_states(question, sites, request, added=masked))


def agree_coding(
    question: RowsRequest,
    sites: Sequence[str],
    session: str,
    *,
    site_column: str = "",
    min_count: int = 5,
    ordered: bool = False,
) -> FitProtocol[RowsSchema]:
    """Agree on levels, without sums for transforms.

    The levels of `site_column` are the sites, in their order; every other level must have `min_count` rows in
    total. The categories of a response must have an order if `ordered`: they are numbers, or all sites
    declare the same one. Raises a DesignError for a column that holds numbers at one site and categories at
    another, for a rare level, for a site without a complete row, and for a reference that is not a level.
    """
    request = rows_request(session)
    replies = yield [request(site, "survey_rows", question.to_json()) for site in sites]
    columns = {
        site: codec.from_json(SiteColumns, reply.text, f"{site}: description of its rows", defaults=True)
        for site, reply in zip(sites, replies, strict=True)
    }
    counted = tuple(
        SiteRowCounts(site, found.n_rows, found.n, found.left_out) for site, found in columns.items()
    )
    gaps = f" {GAPS}" if question.read_curves else ""
    for row in counted:
        if not row.n:
            within = f" in the subset {question.subset_text!r}" if question.subset else ""
            error = DesignError(
                f"site {row.site!r} has no row{within} with all of "
                f"{', '.join(map(repr, question.needed))} (of {row.n_rows:,} rows): one of these columns may "
                f"hold no value there. Use fewer of them, or leave the site out.{gaps}"
            )
            error.empty_site = row.site
            raise error
    kinds: dict[str, ColumnKind] = agree_kinds(columns)
    remedy = f" {TABLE_OF_COUNTS}." if question.counted else ""
    levels = agree_levels(columns, site_column=site_column, min_count=min_count, remedy=remedy)
    for doubt in spelling_doubts(columns, site_column):
        warn(doubt, SpellingWarning)
    if question.has_categories:
        (name,) = question.response_columns
        kinds.pop(name)
        listed = question.categories
        categories = agreed_categories(columns, name, levels.pop(name), listed=listed, ordered=ordered)
        question = question.with_categories(categories)
    terms = question.read_every_term()
    check_references(terms, levels, "")
    spec = BlockSpec(
        terms=question.every_term,
        columns=question.columns,
        intercept=question.intercept or bool(question.absorbed),
        kinds=kinds,
        levels=levels,
        state=plain_state(assumed_states(question)),
    )
    return RowsSchema(question, spec, counted)


def open_requests(agreement: RowsSchema, session: str) -> list[Request]:
    """Ask every site to code its rows."""
    text = codec.to_json(RowsCoding(agreement.question.to_json(), agreement.spec.to_json()))
    return [rows_request(session)(row.site, "open_rows", text) for row in agreement.sites]


def moment_requests(agreement: RowsSchema, session: str) -> list[Request]:
    """Ask every site for the moments of the columns that it opened."""
    return [Request(row.site, FAMILY, "sum_columns", {}, session) for row in agreement.sites]


def assemble_design(agreement: RowsSchema, replies: Sequence[Reply], summed: Sequence[Reply]) -> RowsDesign:
    """Combine the replies to :func:`open_requests` and :func:`moment_requests`.

    Raises a DesignError for sites that code columns differently, and for a column that is constant over all.
    """
    reported = [
        codec.from_json(NamedColumns, reply.text, f"{reply.site}: description of its columns")
        for reply in replies
    ]
    for row, columns in zip(agreement.sites, reported, strict=True):
        # Levels were agreed, so that this is a site that codes by another version, or against the agreement.
        if columns != reported[0]:
            raise DesignError(
                f"sites {agreement.sites[0].site!r} and {row.site!r} code the formula to different columns"
            )
    mean, spread = pool_moments(np.sum([reply.arrays["moments"] for reply in summed], axis=0))
    intercept = agreement.question.intercept
    head = (INTERCEPT,) if intercept else ()
    names = (*head, *reported[0].names)
    effects, fixed = reported[0].effects, reported[0].fixed
    further = len(reported[0].names) - fixed if fixed >= 0 else 0
    varies = varying(mean, spread, intercept)
    if further:  # effects may have a constant
        varies[-further:] |= mean[-further:] != 0.0
    terms = (*head, *reported[0].term_names)
    zero = (mean == 0.0) & (spread == 0.0)
    own = len(names) - further
    if empty := [names[j] for j in np.flatnonzero(zero[:own]).tolist() if is_interaction(terms[j])]:
        raise AliasedColumnsError(empty)
    absorbed = AbsorbedCounts()
    if agreement.question.absorbed:
        counts = np.sum([reply.arrays["absorbed"] for reply in summed], axis=0)
        absorbed = AbsorbedCounts(round(float(counts[0])), round(float(counts[1])))
        if constant := [names[j] for j in np.flatnonzero(~varies)]:
            levels = " and ".join(map(repr, agreement.question.absorbed_texts))
            raise DesignError(
                f"design column{'s' * (len(constant) > 1)} {name_all(constant)} "
                f"{'are' if len(constant) > 1 else 'is'} constant within the levels of {levels} at all "
                "sites: the absorbed effects contain the term. Leave it out"
            )
    if constant := [names[j] for j in np.flatnonzero(~varies)]:
        raise DesignError(
            f"design column{'s' * (len(constant) > 1)} {name_all(constant)} "
            f"{'are' if len(constant) > 1 else 'is'} constant over the complete rows of all sites. Leave the "
            "term out, or merge the levels that it separates."
        )
    n = np.array([row.n for row in agreement.sites], dtype=np.int64)
    return RowsDesign(names, terms, intercept, n, mean, spread, effects, further, absorbed)


def is_interaction(term: str) -> bool:
    """Return whether a term has several factors; colons inside quotes or brackets are part of names."""
    depth, quote = 0, ""
    for sign in term:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"`":
            quote = sign
        elif sign in "([":
            depth += 1
        elif sign in ")]":
            depth -= 1
        elif sign == ":" and depth == 0:
            return True
    return False


def pool_moments(sums: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of every column over all sites, from the sums of ``open_rows``: (4, p).

    Variation within sites keeps its digits. A column that varies only between sites counts as constant below
    3e-7 of its mean. The deviation is only a choice of units for the iteration.
    """
    n, total, within, squares = sums
    mean = total / n
    between = squares - n * mean**2
    # Two large sums nearly cancel where sites have the same mean; what is left is their rounding, and may be
    # below zero.
    between = np.where(between > CANCELED * squares, between, 0.0)
    return mean, np.sqrt((within + between) / n)
