"""Missing patterns of an exchange: which are released, and notes on what they disclose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.terms import parse_terms, term_columns
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.federation.tables.cardinality import EXACT
from fedstat.inference.summary import Note
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vertical.exchange.protocol import exchange_grams, standardize_columns
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.pattern_merging import LARGEST_SHARE, MergePlan, PatternRule, plan_merges
from fedstat.typing import Bools, Ints

# ----------------------------------------------------------------------------------------------------
# The exchange by missing pattern, and the patterns that later fits of a partition reuse.

# ----------------------------------------------------------------------------------------------------
# The exchange by missing pattern: everything after it happens at the coordinator.
#
# Patterns with few entities are never released: their entities count as missing at a site that has
# them, or are left out (:mod:`fedstat.models.vertical.pattern_merging`).

NORMAL = DistributionSpec("Gaussian", "Identity")


@dataclass(frozen=True, slots=True)
class PatternExchange:
    """What the exchange handed over: the moments, which patterns were released, and who dealt.

    `dealers` has a site for each pair of sites, '' for the coordinator; `released` which of the
    entities that a site brought count as seen, (m,), and `columns` of sites of whose columns
    entities have a part with which, (m, p_k); `lost` are the values that count as missing since small
    patterns were merged, by what they are; `numbers` how many different numbers, each a sum over
    the entities of a pattern, hold columns of a site; `smallest` the entities behind the smallest of
    these sums. `by_bits` says what it cost that columns of few values are judged by their bits.
    """

    moments: PatternMoments
    plan: MergePlan
    dealers: Mapping[tuple[str, str], str]
    released: Mapping[str, Bools]
    numbers: Mapping[str, int]
    smallest: int
    by_bits: CardinalityCost | None = None
    columns: Mapping[str, Bools] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CardinalityCost:
    """What merging cost because sums were judged by the bits of columns of few values.

    `lost` are entities that count as missing for it, by site that has them; `short` how many more
    entities the patterns that were merged for it would need, in all; `sites` whose policies ask for it, and
    of these `exact` whose sums are not dithered.
    """

    lost: Mapping[str, int]
    short: int
    sites: tuple[str, ...]
    exact: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SmallPatterns:
    """Which missing patterns are too small to be released, and what is done about them.

    A pattern needs `min_count` entities, and :func:`~fedstat.models.vertical.pattern_merging.min_entities`;
    at most
    a share `max_moved` of all may count as missing, or be left out, because theirs has fewer: by default 5 %,
    or any share where owners have sums judged by bits. `otherwise` ends the error with what else the family
    offers.
    """

    min_count: int
    max_moved: float | None = None
    otherwise: str = ""


def exchange_patterns(
    layout: Layout, small: SmallPatterns, conversation: SecureProductSession
) -> FitProtocol[PatternExchange]:
    """Obtain the moments of a fit by missing pattern.

    An EstimationError where too many entities have a pattern with too few, or those of a site all
    have; a ModelError where there is nobody to deal for two sites.
    """
    parts, unit = layout.units, layout.unit
    rule = PatternRule(small.min_count, layout.sizes, layout.details, layout.response_detail, parts)
    share = small.max_moved
    if share is None:
        share = 1.0 if rule.in_bits else LARGEST_SHARE
    plan = plan_merges(~layout.missing, layout.counts, rule, largest_share=share, otherwise=small.otherwise)
    seen = plan.patterns[:, unit]
    never = dict.fromkeys(what for c, what in enumerate(value_names(layout)) if not seen[:, c].any())
    if never:
        raise EstimationError(
            f"the entities of {', '.join(never)} all have missing patterns with too few to be released: "
            f"leave out columns{', or this institution' if parts.whole else ''}"
        )
    # Sites sum over the coarser patterns in the first place: finer sums never exist, and no difference of
    # two releases shows the few.
    cost = cardinality_cost(layout, rule, plan)
    code, lost = plan.target[layout.code], values_lost(layout, plan)
    released, columns = released_values(layout, plan, code)
    # Means over entities that count as missing would tell of these, beside the sums over all others.
    layout, code = layout.narrowed(code >= 0, released, columns or None), code[code >= 0]
    units = yield from standardize_columns(layout, NORMAL, conversation)
    grams = yield from exchange_grams(layout, units, code, parts.any_of(plan.patterns), conversation)
    moments = PatternMoments(
        clients=layout.clients,
        sizes=layout.sizes,
        names=layout.names,
        seen=seen,
        n=grams.products[:, 0, 0].copy(),
        grams=grams.products,
        centre=np.append(units.shift, units.mean),
        scale=np.append(units.scale, units.sd),
        shape=units.shape,
    )
    numbers, smallest = count_numbers(layout, seen), int(np.bincount(code, minlength=len(seen)).min())
    if units.shape is not None:
        for client, size in zip(layout.clients, layout.sizes, strict=True):
            numbers[client] += size
    return PatternExchange(
        moments, plan, grams.dealers, released, numbers, smallest, cost, columns=columns, lost=lost
    )


def value_names(layout: Layout) -> list[str]:
    """Name what is missing together with each column: the site, or a term where its columns are apart."""
    parts = np.bincount(layout.units.owner)
    owner = np.repeat(np.arange(len(layout.sizes)), layout.sizes)
    return [
        layout.clients[k] if parts[k] == 1 else f"'{term}' ({layout.clients[k]})"
        for k, term in zip(owner.tolist(), layout.terms, strict=True)
    ]


def values_lost(layout: Layout, plan: MergePlan) -> dict[str, int]:
    """Count the values that entities have, and that count as missing since small patterns are merged."""
    gone = layout.counts @ (~layout.missing & ~plan.shows(plan.target))
    each = zip(value_names(layout), gone[layout.unit].tolist(), strict=True)
    return {what: int(m) for what, m in dict(each).items() if m > 0}


def released_values(layout: Layout, plan: MergePlan, code: Ints) -> tuple[dict[str, Bools], dict[str, Bools]]:
    """Tell by site which of its entities count as seen, (m,), and of those in part with which columns."""
    released, columns = {}, {}
    for client, place in layout.places().items():
        shown = plan.shows(code[layout.rows[client]])
        released[client] = np.asarray(shown[:, layout.unit[place]].any(axis=1))
        if client in layout.has:
            columns[client] = shown[:, layout.unit[place]]
    return released, columns


def cardinality_cost(layout: Layout, rule: PatternRule, plan: MergePlan) -> CardinalityCost | None:
    """Compare a plan with the one that would hold if columns of few values were as others."""
    if not rule.in_bits:
        return None
    patterns, n = ~layout.missing, layout.counts
    before = plan_merges(patterns, n, rule.by_equations, largest_share=1.0)

    def shown(of: MergePlan) -> Ints:
        return np.asarray(n @ rule.parts.any_of(of.shows(of.target)), dtype=np.int64)

    lost = (shown(before) - shown(plan)).tolist()
    sizes = dict(
        zip(
            map(tuple, before.patterns.tolist()),
            np.bincount(before.target[before.target >= 0], n[before.target >= 0], len(before.patterns)),
            strict=True,
        )
    )
    short = sum(max(rule.least(pattern) - int(m), 0) for pattern, m in sizes.items())
    details = {**dict(zip(layout.clients, layout.details, strict=True))}
    sites = {k: d for k, d in details.items() if d is not None and d.levelled}
    if layout.response_detail is not None and layout.response_detail.levelled:
        sites[layout.active] = layout.response_detail
    return CardinalityCost(
        {k: m for k, m in zip(layout.clients, lost, strict=True) if m > 0},
        short,
        tuple(sites),
        tuple(k for k, d in sites.items() if d.carried == EXACT),
    )


def count_numbers(layout: Layout, seen: Bools) -> dict[str, int]:
    """Count, by site, the released sums of its columns and of their products with any column.

    `seen` (H, p) are the columns of each released pattern.
    """
    widths = [seen[:, place].sum(axis=1) for place in layout.places().values()]
    widths.append(np.ones(len(seen), dtype=np.int64))
    total, counts = np.sum(widths, axis=0), dict[str, int]()
    for own, site in zip(widths, [*layout.clients, layout.active], strict=True):
        each = own + own * (own + 1) // 2 + own * (total - own)
        counts[site] = counts.get(site, 0) + int(each.sum())
        if site == layout.active and site in layout.clients and own is not widths[-1]:
            counts[site] -= int(own.sum())  # products of block and response are counted twice
    return counts


# ----------------------------------------------------------------------------------------------------
# One division of the entities for all fits of a partition whose sites remember every answer.


def reuse_patterns(
    layout: Layout, partition: ClientPartition, *, complete: bool = False, partly: bool = False
) -> Layout:
    """Leave out of a fit what earlier fits of the partition set aside; `complete`: whole entities only.

    Where single values of an entity were set aside it counts as missing at that site, unless entities
    take part `partly`.
    """
    entities, division = _entities(layout, partition), partition.division
    shown = {k: division.seen(k, entities[layout.kept[k]]) for k in layout.clients}
    has = {}
    for k in layout.clients:
        own: Bools = ~division.without_values(k, _read(layout, k), entities[layout.kept[k]])
        if k in layout.has or (partly and not own.all()):
            has[k] = layout.has[k] & own if k in layout.has else own
            own = np.asarray(has[k].any(axis=1, keepdims=True))
        shown[k] = shown[k] & own.all(axis=1)
    used = ~np.isin(entities, division.left_out)
    if complete:
        for k in layout.clients:
            used[layout.kept[k][~shown[k]]] = False
        shown = {k: used[layout.kept[k]] for k in layout.clients}
    aside = sum(int(np.count_nonzero(~own)) for own in shown.values())
    return replace(layout.narrowed(used, shown, has or None), aside=aside)


def remember_patterns(
    layout: Layout,
    partition: ClientPartition,
    plan: MergePlan,
    released: Mapping[str, Bools],
    columns: Mapping[str, Bools],
) -> None:
    """Let later fits set aside what a plan of merges did, where a site holds them against it.

    `released` tells which of the entities that a site brought count as seen, and `columns` with which
    columns those of which it has some.
    """
    if all(site.policy.remember != "all" for site in partition.sites.values()) or layout.filled:
        return
    entities = _entities(layout, partition)
    without = {k: entities[layout.kept[k][~released[k]]] for k in layout.clients}
    gone = plan.target[layout.code] < 0
    partition.division.set_aside(without, entities[gone])
    for k, seen in columns.items():
        aside = layout.has[k] & ~seen & released[k][:, None]
        for read, lost in zip(_read(layout, k), aside.T, strict=True):
            partition.division.set_values_aside(k, read, entities[layout.kept[k][lost]])


def reused_pattern_notes(layout: Layout) -> Iterator[Note]:
    """Say of a fit how many records it left out because an earlier one had."""
    if layout.aside:
        yield Note(
            "reused_patterns",
            f"{layout.aside:,} records count as missing, as in an earlier fit of this partition that merged "
            "small missing patterns: sums that brought them back would differ from the earlier ones by few.",
        )


def _read(layout: Layout, client: str) -> list[tuple[str, ...]]:
    """Columns of the site's table that each of its design columns reads."""
    terms = layout.terms[layout.places()[client]]
    return [term_columns(parse_terms(term).terms[0]) for term in terms]


def _entities(layout: Layout, partition: ClientPartition) -> Ints:
    """Positions of the entities of a fit among those of the partition: (n,)."""
    return partition.rows[layout.active][layout.response_keep]


# ----------------------------------------------------------------------------------------------------
# Notes on merged patterns and dither, and a check whether linear predictors can be solved for.

# ----------------------------------------------------------------------------------------------------
# The sentences on sums by missing pattern: what was merged, what it cost, what gives it back.

DITHERED = (
    "Every value moved by up to half a hundredth of its column's standard deviation before it was summed, by "
    "secrets of {sites}: standard errors contain it, and estimates move by a small part of these from one "
    "set of keys to another."
)


def merge_notes(exchange: PatternExchange) -> Iterator[Note]:
    """Say which entities count otherwise than they are."""
    plan = exchange.plan
    if exchange.columns and exchange.lost:
        yield Note(
            "merged_patterns",
            f"Patterns with few entities are not released: {values_left_out(exchange.lost)} count as "
            "missing in "
            f"{plan.moved + plan.trimmed:,} entities that have them, and {plan.left_out:,} that would lack "
            "everything are left out.",
        )
    elif plan.changes:
        yield Note(
            "merged_patterns",
            f"Patterns with few entities are not released: {plan.moved:,} entities count as missing at an "
            f"site that has them, and {plan.left_out:,} that would lack everything are left out.",
        )
    if exchange.by_bits is not None and exchange.by_bits.lost:
        yield Note("merging_cost", merging_cost_note(exchange.by_bits))


def values_left_out(lost: Mapping[str, int]) -> str:
    """List values that count as missing."""
    return "values of " + ", ".join(f"{what}: {m:,}" for what, m in lost.items())


def dithering_sites(layout: Layout) -> list[str]:
    """Sites whose columns are dithered before they are summed, as far as they told it."""
    details = [*zip(layout.clients, layout.details, strict=False), (layout.active, layout.response_detail)]
    return list(dict.fromkeys(site for site, detail in details if detail and detail.carried < EXACT))


def noise_added(layout: Layout | None) -> str:
    """Say in a word what was spent on privacy: dither is no noise of differential privacy."""
    dithers = layout is not None and dithering_sites(layout)
    return "none (columns are dithered)" if dithers else "none (no noise is added)"


def dither_notes(layout: Layout) -> Iterator[Note]:
    """Say whose columns were dithered."""
    if sites := dithering_sites(layout):
        yield Note("dither", DITHERED.format(sites=", ".join(sites)))


def merging_cost_note(cost: CardinalityCost) -> str:
    """Say what it cost that columns of few values are not determined by the sums, and what gives it back."""
    lost = ", ".join(f"{m:,} at {client}" for client, m in cost.lost.items())
    exact = f' rounding = "dither" at {", ".join(cost.exact)} (a part of them);' if cost.exact else ""
    return (
        "Of these, so that sums do not determine columns of few values (indicators, say), entities count as "
        f"missing: {lost}. Standard errors grow as if these records were not there. What gives them back:"
        f"{exact} {cost.short:,} more entities in the patterns concerned; fewer columns; or the line  "
        f'discrete = "any"  in policy.toml of {", ".join(cost.sites)}.'
    )


def sums_note(how: str, smallest: int, more: str = "") -> Note:
    """Say that nothing but sums left, `how` divided (", by fold"), and over how many entities at least."""
    return Note(
        "sums",
        "Sums of the columns and of their products were exchanged once{how}; no value per entity left an "
        "site. At least {smallest:,} entities stand behind every sum.{more}",
        values={"how": how, "smallest": int(smallest), "more": more},
    )


def dealer_notes(
    dealers: Mapping[tuple[str, str], str], see: str = "", bystanders: Sequence[str] = ()
) -> Iterator[Note]:
    """Say who dealt random numbers for products of two sites, and what collusion would tell.

    `bystanders` have no part in the model.
    """
    pairs = Counter(dealer or "the coordinator" for dealer in dealers.values())
    if not pairs:
        return
    listed = ", ".join(f"{dealer} for {count} pair{'s' * (count > 1)}" for dealer, count in pairs.items())
    yield Note(
        "dealers",
        "Products between sites come from secure multiplication among parties that follow the "
        "protocol and may keep what they see (semi-honest). Random numbers for two sites are dealt by "
        f"a third ({listed}{see}), which must not collude with either of the two. The coordinator and an "
        "site together know the sums of the others' products with columns that they can read.",
    )
    for site in bystanders:
        if site in dealers.values():
            yield Note(
                "bystander",
                f"{site} has no part in this model, and deals as a third for two others: it is told how "
                "many entities both have, by missing pattern.",
            )


# ----------------------------------------------------------------------------------------------------
# Count in bits of what whoever holds linear predictors of many rounds could solve for.

MANTISSA_BITS = 53
"""Of a number that passes, and at most of a value in a column; a column of two values has one."""
PREDICTOR_STEP = "linear_predictor"


def rounds_of_predictors(ledger: Ledger, clients: Sequence[str]) -> int:
    """Most linear predictors of the same entities that one of the sites released, masked or not."""
    given = [one.sender for one in ledger.entries if one.array == PREDICTOR_STEP and one.kind == "per entity"]
    return max((given.count(client) for client in clients), default=0)


def solvable_note(numbers: int, columns: int, ledger: Ledger, sites: Sequence[str]) -> Iterator[Note]:
    """Say what so many numbers for each entity tell of so many columns of all sites together.

    Those of earlier analyses count as well, as far as these sites state them.
    """
    stated = {} if ledger.receipt is None else ledger.receipt.statements
    so_far = max([numbers, *(stated[site].vectors for site in sites if site in stated)])
    earlier = f", {so_far - numbers:,} of them in other analyses," if so_far > numbers else ""
    held, unknown, numbers = so_far * MANTISSA_BITS, columns * MANTISSA_BITS, so_far
    yield Note(
        "solvable",
        "What the coordinator and the response holder could solve for: {numbers:,} numbers for every "
        f"entity{earlier} are {held:,} bits, against at most {unknown:,} of the {{columns}} columns "
        f"({MANTISSA_BITS} a number, 1 where a column has two values). {_verdict(numbers, columns)} Masks "
        "hide a site's part of one round and not of many.",
        values={"numbers": int(numbers), "columns": columns},
    )


def _verdict(numbers: int, columns: int) -> str:
    if numbers >= columns:
        return (
            "That is enough for the rows of ALL sites, masked or not: take them as disclosed. Fits of "
            "the normal family from sums that are exchanged once have no value per entity."
        )
    return (
        f"That is too few for {columns} columns of many values, and enough for "
        f"{'all' if numbers * MANTISSA_BITS >= columns else numbers * MANTISSA_BITS} of them if they have "
        "two."
    )
