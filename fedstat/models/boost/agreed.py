"""What a model with curves reads of a partition before it asks its sites."""

from __future__ import annotations

from dataclasses import replace

from fedstat.federation.design.formula.parse import ClientTerms, Formula, parse_pooled_formula
from fedstat.federation.design.formula.terms import parse_terms, term_columns, term_text
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.partition.row_tables import common_columns
from fedstat.federation.tables.curves.array import CurveArray
from fedstat.models.boost.learning.learners import BoostFormula


def plain_formula(parsed: BoostFormula, partition: ClientPartition) -> Formula:
    """Read those columns of a formula that are no curves as other models do."""
    columns, right = partition.pooled_columns, " + ".join(("1", *parsed.terms))
    if not parsed.functional:
        return replace(
            parse_pooled_formula(f"{parsed.response} ~ {right}", columns, (partition.site_column,)),
            text=parsed.text,
        )
    terms = parse_terms(right).terms
    names = tuple(dict.fromkeys(name for term in terms for name in term_columns(term)))
    own = ClientTerms("", tuple(map(term_text, terms)), names)
    return Formula(parsed.text, f"{parsed.response}(t)", None, (), True, (own,))


def published_range(partition: ClientPartition, term: str) -> tuple[float, float] | None:
    """Range of a column that all sites publish: the widest."""
    found = [site.published.get(term) for site in partition.sites.values()]
    ranges = [one.range for one in found if one is not None and one.range is not None]
    if len(ranges) < len(found):
        return None
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def common_curves(partition: ClientPartition) -> dict[str, CurveArray]:
    """Curves that all sites have, as the first has them."""
    names = common_columns(map(tuple, partition.curves.values()))
    first = next(iter(partition.curves.values()), {})
    return {name: first[name] for name in names}
