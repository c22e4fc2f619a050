"""Vertical boosting: agreement on columns, then one exchange of products of all columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstat import codec
from fedstat.errors import DesignError, Remedy
from fedstat.federation.design.block import Partial
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.expression import name_expression
from fedstat.federation.design.formula.terms import parse_term, term_columns
from fedstat.federation.design.vertical_design import (
    BlockDesign,
    BlockRequest,
    BlockWithPatterns,
    Design,
    MissingRule,
    ResponseRequest,
    design_request,
)
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.models.boost.learning.learners import INTERCEPT, Learner, check_coded
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.vertical.steps import FAMILY, CurvesRequest, VerticalLearners
from fedstat.models.vertical.exchange.protocol import multiply_between_sites, product_operands, symmetrized
from fedstat.models.vertical.exchange.steps import BLOCK
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class DesignSchema:
    """The design of the columns of learners and response.

    `widths` (P,) are the numbers of columns of each learner in the order of the formula.
    """

    design: Design
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class VerticalMoments:
    """Sums by fold, the dealers of random numbers, and the sites' codings of their columns."""

    moments: CurveMoments
    dealers: Mapping[tuple[str, str], str]
    specs: tuple[BlockSpec, ...]


def agree_columns(
    apart: VerticalLearners,
    learners: Sequence[Learner],
    time: Learner | None,
    rows: Mapping[str, Ints],
    n_entities: int,
    session: str,
    *,
    missing: MissingRule,
    partial: Partial,
    min_count: int,
) -> FitProtocol[DesignSchema]:
    """Agree on entities and columns, and let every site make its own columns.

    `learners` and `time` have the ends of their bases; the rest is as in
    :func:`fedstat.federation.design.vertical_design.agree_design`. A DesignError reports entities without a
    response, if they must not be left out, and a site without entities in common with the response's site.
    """
    holder, k2 = apart.holder, 1 if time is None else time.knots + time.degree + 1
    (reply,) = yield [_request_response(apart, session)]
    has: Bools = next(iter(reply.arrays.values()))
    entities = rows[holder][has]
    _check_entities(apart, n_entities, len(rows[holder]), len(entities), missing)
    use = {site: np.isin(rows[site], entities) for site in apart.sites}
    requests = [
        one
        for site in apart.sites
        for one in _request_blocks(apart, site, use[site], session, partial, min_count)
    ]
    replies = (yield requests) if requests else []
    coded: dict[str, BlockWithPatterns] = {}
    for reply in replies:
        use[reply.site] &= reply.arrays["seen"]
        if reply.text:
            where = f"{reply.site}: its description of columns"
            coded[reply.site] = codec.from_json(BlockWithPatterns, reply.text, where, defaults=True)
    for site, own in use.items():
        if not own.any():
            raise DesignError(
                f"sites '{holder}' (the response) and '{site}' have no complete entity of the formula in "
                "common. Check that both write the key alike, or leave out one site"
            )
    levels = {name for one in coded.values() for name in one.levels}
    counts = Counter(term for one in coded.values() for term in one.term_names)
    check_coded(
        learners,
        counts,
        lambda term: any(name in levels for name in term_columns(parse_term(term))),
    )
    widths = tuple(_width(one, coded.get(k)) for one, k in zip(learners, apart.owners, strict=True))
    columns = sum(widths) + 1
    yield [
        Request(
            site,
            FAMILY,
            "make_columns",
            {"use": use[site]},
            session,
            codec.to_json(apart.made(site, learners, time, columns)),
        )
        for site in apart.sites
    ]
    blocks = []
    for site in apart.sites:
        names, terms = _names(apart, site, learners, widths, k2)
        at = np.searchsorted(entities, rows[site][use[site]]).astype(np.int64)
        n_partial = coded[site].n_partial if site in coded else 0
        blocks.append(BlockDesign(site, names, terms, at, n_partial))
    design = Design(apart.formula, holder, entities, has, tuple(blocks), n_entities - len(entities))
    return DesignSchema(design, widths)


def _request_response(apart: VerticalLearners, session: str) -> Request:
    if apart.boost.functional:
        text = codec.to_json(CurvesRequest((), apart.boost.response))
        return Request(apart.holder, FAMILY, "open_curves", {}, session, text)
    question = ResponseRequest(apart.formula.response, apart.formula.response_columns)
    return design_request(apart.holder, "open_response", session, question)


def _request_blocks(
    apart: VerticalLearners, site: str, use: Bools, session: str, partial: Partial, min_count: int
) -> list[Request]:
    """Request a site's columns, and the rows that have its curves."""
    terms, curves, out = apart.terms(site), apart.curves(site), []
    if terms.terms:
        request = BlockRequest(
            site=site,
            terms=terms.terms,
            columns=terms.columns,
            partial="drop" if partial == "condition" else partial,
            min_count=min_count,
            intercept=True,
        )
        out.append(design_request(site, "open_block", session, request, use=use))
    if curves:
        out.append(Request(site, FAMILY, "open_curves", {}, session, codec.to_json(CurvesRequest(curves))))
    return out


def without_response(holder: str, n_entities: int, n_records: int, n: int) -> str:
    """State how many entities have no record at the site of the response, or no complete response."""
    counts = {
        f"without a record at site '{holder}' (the response)": n_entities - n_records,
        f"whose response at site '{holder}' is missing or incomplete": n_records - n,
    }
    return " and ".join(f"{count:,} entities {reason}" for reason, count in counts.items() if count)


def _check_entities(
    apart: VerticalLearners, n_entities: int, n_records: int, n: int, missing: MissingRule
) -> None:
    if n < n_entities and missing == "raise":
        raise DesignError(
            f"{apart.formula.response}: {without_response(apart.holder, n_entities, n_records, n)}, of "
            f"{n_entities:,}. Check that all sites write the key alike",
            remedy=Remedy(
                "from_formula(..., missing='drop').fit(...)", ", or leave them out by missing='drop'"
            ),
        )
    if n < 2:
        raise DesignError(
            f"the response '{apart.formula.response}' at site '{apart.holder}' exists for {n} entities"
        )


def _width(learner: Learner, coded: BlockWithPatterns | None) -> int:
    """Return the columns of a learner."""
    return learner.width(coded.term_names.count(learner.of) if coded else 0)


def _names(
    apart: VerticalLearners, site: str, learners: Sequence[Learner], widths: Sequence[int], k2: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a site's columns, and the term behind each."""
    names, terms = [], []
    for one, width, owner in zip(learners, widths, apart.owners, strict=True):
        if owner == site and one.kind != INTERCEPT:
            names += [f"{one.label}[{j}]" for j in range(width)]
            terms += [name_expression(one.of).text if one.of_curve else one.of] * width
    if site == apart.holder:
        names += [f"{apart.formula.response}[{j}]" for j in range(k2)]
        terms += [name_expression(apart.formula.response_columns[0]).text] * k2
    return tuple(names), tuple(terms)


def exchange_moments(
    apart: VerticalLearners,
    learners: Sequence[Learner],
    widths: Sequence[int],
    layout: Layout,
    code: Ints,
    product_session: SecureProductSession,
) -> FitProtocol[VerticalMoments]:
    """Request the sums by fold; `code` (n,) is the fold of each entity."""
    F, p = int(code.max()) + 1, layout.p
    with_terms = [site for site in layout.sites if apart.terms(site).terms]
    replies = yield [
        product_session.request(site, "stage_block", keep=layout.keep[site]) for site in layout.sites
    ] + [design_request(site, "release_spec", product_session.session) for site in with_terms]
    staged, specs = replies[: len(layout.sites)], replies[len(layout.sites) :]
    shift, scale = np.concatenate([reply.arrays["units"] for reply in staged], axis=1)
    everywhere = np.ones((F, len(layout.sites)), dtype=np.bool_)
    sides = product_operands(layout, BLOCK, code, everywhere, coded=False)
    *summed, points = yield [
        product_session.request(side.site, "sum_products", code=side.code, groups=F) for side in sides
    ] + [product_session.request(apart.holder, "sum_points", code=_of_holder(sides, apart.holder), groups=F)]
    products = np.zeros((F, p + 2, p + 2))
    products[:, 0, 0] = np.bincount(code, minlength=F)
    for side, reply in zip(sides, summed, strict=True):
        products[:, 0, side.place] = reply.arrays["sums"]
        products[:, side.place, side.place] = reply.arrays["grams"]
    dealers = yield from multiply_between_sites(layout, sides, products, product_session)
    raw = in_units(symmetrized(products)[:, : p + 1, : p + 1], shift, scale)
    moments = unfold(raw, *places_of(apart, learners, widths, layout), points)
    coded = tuple(BlockSpec.from_json(reply.text) for reply in specs)
    return VerticalMoments(moments, dealers, coded)


def _of_holder(sides: Sequence[ProductOperand], holder: str) -> Ints:
    (code,) = (side.code for side in sides if side.site == holder)
    return code


def in_units(products: Floats, shift: Floats, scale: Floats) -> Floats:
    """Turn sums of products (F, p + 1, p + 1) of (1, (X - shift) / scale) into those of (1, X)."""
    move = np.diag(np.append(1.0, scale))
    move[1:, 0] = shift
    return np.asarray(move @ products @ move.T)


def places_of(
    apart: VerticalLearners, learners: Sequence[Learner], widths: Sequence[int], layout: Layout
) -> tuple[Ints, Ints]:
    """Positions of the columns of all learners, (K,), among (1, X), and of those of the response."""
    first = {site: place.start for site, place in layout.places(1).items()}
    out: list[int] = []
    for one, width, owner in zip(learners, widths, apart.owners, strict=True):
        own = 0 if one.kind == INTERCEPT else width
        out += list(range(first[owner], first[owner] + own)) or [0]
        first[owner] += own
    return np.array(out, dtype=np.int64), np.arange(first[apart.holder], layout.places(1)[apart.holder].stop)


def unfold(raw: Floats, columns: Ints, response: Ints, points: Reply) -> CurveMoments:
    """Order sums of products (F, p + 1, p + 1) of (1, X) into those of learners and response."""
    totals = points.arrays["totals"]
    S, T, Q = (
        raw[:, a[:, None], b] for a, b in ((columns, columns), (columns, response), (response, response))
    )
    return CurveMoments(S=S, T=T, Q=Q, y=totals[:, :-1], yy=totals[:, -1])
