"""Number of values that design columns can have, from what a site has published, and never from its rows."""

from __future__ import annotations

from collections.abc import Sequence

from fedstat.federation.design.formula.asked import response_asked, terms_asked
from fedstat.federation.design.formula.terms import term_text
from fedstat.federation.design.spec import BlockSpec, read_terms
from fedstat.federation.door.facts import COMPARED, FactorAsked
from fedstat.federation.door.state import SiteData
from fedstat.federation.tables.bits import DITHERED, EXACT, ColumnsDetail, LevelledColumn


def block_detail(data: SiteData, spec: BlockSpec) -> ColumnsDetail | None:
    """Detail of a coded block; None where the owner does not ask for it."""
    if data.policy.discrete == "any":
        return None
    factors = {term_text(term): terms_asked([term]).factors for term in read_terms(spec.terms, spec.columns)}
    return columns_detail(data, [factors[term] for term in spec.term_names])


def response_detail(data: SiteData, response: str) -> ColumnsDetail | None:
    """Detail of a response; None where the owner does not ask for it."""
    if data.policy.discrete == "any":
        return None
    return columns_detail(data, [response_asked(response).factors])


def columns_detail(data: SiteData, columns: Sequence[Sequence[FactorAsked]]) -> ColumnsDetail:
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
    levelled = []
    for name, count in few.items():
        own = [names for names in read if name in names]
        levelled.append(LevelledColumn(max(count, 2), len(own), all(names == {name} for names in own)))
    plain = sum(not names & few.keys() for names in read)
    return ColumnsDetail(plain, tuple(levelled), EXACT if data.policy.rounding == "none" else DITHERED)


def _levels(data: SiteData, factor: FactorAsked) -> dict[str, int]:
    """Levels of what a factor reads, 0 where a published number has any values."""
    if COMPARED in factor.functions:
        return {factor.text: 2}
    # Nothing is known of a column that is not published: it may be of zeros and ones.
    return {
        name: len(data.published[name].levels) if name in data.published else 2 for name in factor.columns
    }
