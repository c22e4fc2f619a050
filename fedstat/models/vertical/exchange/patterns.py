"""Missing patterns of an exchange: which are released, and notes on what they reveal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.terms import parse_terms, term_columns
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.federation.tables.cardinality import EXACT
from fedstat.inference.notes import Note
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vertical.exchange.protocol import exchange_grams, standardize_columns
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.notes import NOTES
from fedstat.models.vertical.pattern_merging import LARGEST_SHARE, MergePlan, PatternRule, plan_merges
from fedstat.typing import Bools, Ints

# ----------------------------------------------------------------------------------------------------
# The exchange by missing pattern. All later computations happen at the coordinator.
#
# Patterns with few entities are never released. Their entities count as missing at a site that has them, or
# are left out (:mod:`fedstat.models.vertical.pattern_merging`).

GROUP_SEED, MIN_GROUP = 0, 20
"""Seed of random groups, and their smallest size: many sums over few entities would describe these."""
NORMAL = DistributionSpec("Gaussian", "Identity")


@dataclass(frozen=True, slots=True)
class PatternExchange:
    """Result of the exchange: the moments, which patterns were released, and the dealers.

    `dealers` has a site for each pair of sites, '' for the coordinator. `released` states which of the
    entities of a site count as observed, (m,), and `columns`, for sites where entities have a part of the
    columns, which of these, (m, p_k). `lost` are the values that count as missing because small patterns were
    merged, by site or term. `numbers` is the number of different releases that contain columns of a site,
    each a sum over the entities of a pattern; `smallest` is the smallest number of entities in one of these
    sums. `by_group` are the sums by random group of the entities of each pattern, if requested. `by_bits` is
    the cost of policies that count the bits that sums reveal about columns of few values.
    """

    moments: PatternMoments
    plan: MergePlan
    dealers: Mapping[tuple[str, str], str]
    released: Mapping[str, Bools]
    numbers: Mapping[str, int]
    smallest: int
    by_bits: CardinalityCost | None = None
    by_group: PatternMoments | None = None
    columns: Mapping[str, Bools] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CardinalityCost:
    """Cost of merging because policies count the bits that sums reveal about columns of few values.

    `lost` are entities that count as missing for this reason, by site that has them; `short` is the number of
    further entities that the merged patterns would need; `sites` are those whose policies require it, and
    `exact` those among them whose sums are not dithered.
    """

    lost: Mapping[str, int]
    short: int
    sites: tuple[str, ...]
    exact: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SmallPatterns:
    """Which missing patterns are too small to be released, and how they are treated.

    A pattern needs `min_count` entities, and :func:`~fedstat.models.vertical.pattern_merging.min_entities`.
    At most a share `max_moved` of all entities may count as missing, or be left out, because their patterns
    have fewer: by default 5 %, or any share if policies count the bits of sums. `remedy` is that
    of the error, if the call has an argument for the share.
    """

    min_count: int
    max_moved: float | None = None
    remedy: Remedy | None = None
    each: float = MIN_ENTITIES_PER_EQUATION


MORE_MOVED = Remedy(
    "fit(..., max_moved={share})",
    ", or allow more by {arguments} (no bias if records are missing completely at random){otherwise}",
    {"otherwise": ""},
)


def random_groups(rule: PatternRule, patterns: Bools, code: Ints, most: int) -> tuple[Ints, Ints]:
    """Split the entities of each released pattern at random into groups that may be released themselves.

    A pattern has at most `most` groups, each with 20 entities, and as many as a pattern of its columns needs.
    Returns the group of every entity, (n,), and the pattern of every group. The groups are the same in every
    fit of the same entities, so that a repeated fit releases nothing new.
    """
    random, group = np.random.default_rng(GROUP_SEED), np.zeros(len(code), dtype=np.int64)
    pattern: list[int] = []
    for h, row in enumerate(patterns.tolist()):
        members = np.flatnonzero(code == h)
        count = max(1, min(most, len(members) // max(MIN_GROUP, rule.least(tuple(row)))))
        group[members] = len(pattern) + random.permutation(len(members)) % count
        pattern += [h] * count
    return group, np.array(pattern, dtype=np.int64)


def exchange_patterns(
    layout: Layout, small: SmallPatterns, product_session: SecureProductSession, *, groups: int = 1
) -> FitProtocol[PatternExchange]:
    """Obtain the moments of a fit by missing pattern and, with more than one of them, by random group.

    Raises EstimationError if too many entities, or all entities of a site, are in patterns that are too
    small, and ModelError if no third party can deal for two sites.
    """
    parts, unit = layout.units, layout.unit
    details = (layout.details, layout.response_detail)
    rule = PatternRule(small.min_count, layout.sizes, *details, parts, small.each)
    share = small.max_moved
    if share is None:
        share = 1.0 if rule.in_bits else LARGEST_SHARE
    plan = plan_merges(~layout.missing, layout.counts, rule, largest_share=share, remedy=small.remedy)
    seen = plan.patterns[:, unit]
    never = dict.fromkeys(what for c, what in enumerate(value_names(layout)) if not seen[:, c].any())
    if never:
        raise EstimationError(
            f"the entities of {', '.join(never)} are all in missing patterns with too few entities to be "
            f"released: leave out columns{', or this site' if parts.complete else ''}"
        )
    # Sites sum over the coarser patterns from the start. Finer sums never exist, so no difference of two
    # releases reveals the few entities.
    cost = cardinality_cost(layout, rule, plan)
    code, lost = plan.target[layout.code], values_lost(layout, plan)
    released, columns = released_values(layout, plan, code)
    # Means over entities that count as missing would reveal them, together with the sums over all others.
    layout, code = layout.narrowed(code >= 0, released, columns or None), code[code >= 0]
    units = yield from standardize_columns(layout, NORMAL, product_session)
    code, pattern = random_groups(rule, plan.patterns, code, groups)
    shown = parts.any_of(plan.patterns)[pattern]
    grams = yield from exchange_grams(layout, units, code, shown, product_session)
    by_group = PatternMoments(
        sites=layout.sites,
        sizes=layout.sizes,
        names=layout.names,
        seen=seen[pattern],
        n=grams.products[:, 0, 0].copy(),
        grams=grams.products,
        center=np.append(units.shift, units.mean),
        scale=np.append(units.scale, units.sd),
        shape=units.shape,
        response_shape=units.response_shape,
    )
    numbers = count_numbers(layout, by_group.seen)
    smallest = int(np.bincount(code, minlength=len(pattern)).min())
    moments = by_group if groups == 1 else by_group.together(pattern, seen)
    if units.shape is not None:
        for site, size in zip(layout.sites, layout.sizes, strict=True):
            numbers[site] += size
    if units.response_shape is not None:
        numbers[layout.active] += len(units.response_shape)
    return PatternExchange(
        moments,
        plan,
        grams.dealers,
        released,
        numbers,
        smallest,
        cost,
        by_group=None if groups == 1 else by_group,
        columns=columns,
        lost=lost,
    )


def value_names(layout: Layout) -> list[str]:
    """Name what is missing together with each column: the site, or a term of partial blocks."""
    parts = np.bincount(layout.units.owner)
    owner = np.repeat(np.arange(len(layout.sizes)), layout.sizes)
    return [
        layout.sites[k] if parts[k] == 1 else f"'{term}' ({layout.sites[k]})"
        for k, term in zip(owner.tolist(), layout.terms, strict=True)
    ]


def values_lost(layout: Layout, plan: MergePlan) -> dict[str, int]:
    """Count the values that entities have, but that count as missing because small patterns were merged."""
    gone = layout.counts @ (~layout.missing & ~plan.shows(plan.target))
    each = zip(value_names(layout), gone[layout.unit].tolist(), strict=True)
    return {what: int(m) for what, m in dict(each).items() if m > 0}


def released_values(layout: Layout, plan: MergePlan, code: Ints) -> tuple[dict[str, Bools], dict[str, Bools]]:
    """Return by site which of its entities count as observed, (m,), and partial ones with which columns."""
    released, columns = {}, {}
    for site, place in layout.places().items():
        shown = plan.shows(code[layout.rows[site]])
        released[site] = np.asarray(shown[:, layout.unit[place]].any(axis=1))
        if site in layout.has:
            columns[site] = shown[:, layout.unit[place]]
    return released, columns


def cardinality_cost(layout: Layout, rule: PatternRule, plan: MergePlan) -> CardinalityCost | None:
    """Compare a plan with the plan without the rule on columns of few values."""
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
    details = {**dict(zip(layout.sites, layout.details, strict=True))}
    sites = {k: d for k, d in details.items() if d is not None and d.leveled}
    if layout.response_detail is not None and layout.response_detail.leveled:
        sites[layout.active] = layout.response_detail
    return CardinalityCost(
        {k: m for k, m in zip(layout.sites, lost, strict=True) if m > 0},
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
    for own, site in zip(widths, [*layout.sites, layout.active], strict=True):
        each = own + own * (own + 1) // 2 + own * (total - own)
        counts[site] = counts.get(site, 0) + int(each.sum())
        if site == layout.active and site in layout.sites and own is not widths[-1]:
            counts[site] -= int(own.sum())  # products of block and response were counted twice
    return counts


# ----------------------------------------------------------------------------------------------------
# One set of patterns for all fits of a partition, if its sites remember every release.


def reuse_patterns(
    layout: Layout, partition: ClientPartition, *, complete: bool = False, partly: bool = False
) -> Layout:
    """Leave out of a fit what earlier fits of the partition left out; `complete`: only complete entities.

    If single values of an entity were left out, the entity counts as missing at that site, unless entities
    take part `partly`.
    """
    entities, division = _entities(layout, partition), partition.division
    shown = {k: division.seen(k, entities[layout.kept[k]]) for k in layout.sites}
    has = {}
    for k in layout.sites:
        own: Bools = ~division.without_values(k, _read(layout, k), entities[layout.kept[k]])
        if k in layout.has or (partly and not own.all()):
            has[k] = layout.has[k] & own if k in layout.has else own
            own = np.asarray(has[k].any(axis=1, keepdims=True))
        shown[k] = shown[k] & own.all(axis=1)
    used = ~np.isin(entities, division.left_out)
    if complete:
        for k in layout.sites:
            used[layout.kept[k][~shown[k]]] = False
        shown = {k: used[layout.kept[k]] for k in layout.sites}
    aside = sum(int(np.count_nonzero(~own)) for own in shown.values())
    return replace(layout.narrowed(used, shown, has or None), aside=aside)


def remember_patterns(
    layout: Layout,
    partition: ClientPartition,
    plan: MergePlan,
    released: Mapping[str, Bools],
    columns: Mapping[str, Bools],
) -> None:
    """Record for later fits which entities were merged, if a site compares releases with earlier ones.

    `released` states which of the entities of a site count as observed, and `columns` with which columns
    partial entities do.
    """
    if all(site.policy.remember != "all" for site in partition.sites.values()) or layout.filled:
        return
    entities = _entities(layout, partition)
    without = {k: entities[layout.kept[k][~released[k]]] for k in layout.sites}
    gone = plan.target[layout.code] < 0
    partition.division.set_aside(without, entities[gone])
    for k, seen in columns.items():
        aside = layout.has[k] & ~seen & released[k][:, None]
        for read, lost in zip(_read(layout, k), aside.T, strict=True):
            partition.division.set_values_aside(k, read, entities[layout.kept[k][lost]])


def reused_pattern_notes(layout: Layout) -> Iterator[Note]:
    """Report how many records a fit left out because an earlier one had left them out."""
    if layout.aside:
        yield NOTES.note("reused_patterns", records=layout.aside)


def _read(layout: Layout, site: str) -> list[tuple[str, ...]]:
    """Return the columns of the site's table that each of its design columns uses."""
    terms = layout.terms[layout.places()[site]]
    return [term_columns(parse_terms(term).terms[0]) for term in terms]


def _entities(layout: Layout, partition: ClientPartition) -> Ints:
    """Return positions of the entities of a fit among those of the partition: (n,)."""
    return partition.rows[layout.active][layout.response_keep]


# ----------------------------------------------------------------------------------------------------
# Notes on sums by missing pattern: what was merged, its cost, and how to avoid it.


def merge_notes(exchange: PatternExchange) -> Iterator[Note]:
    """State which entities count as missing although they are observed."""
    plan = exchange.plan
    if exchange.columns and exchange.lost:
        values, entities = values_left_out(exchange.lost), plan.moved + plan.trimmed
        yield NOTES.note("merged_patterns/values", values=values, entities=entities, left_out=plan.left_out)
    elif plan.changes:
        by_site = merged_by_site(exchange)
        yield NOTES.note("merged_patterns", entities=plan.moved, left_out=plan.left_out, by_site=by_site)
    if (cost := exchange.by_bits) is not None and cost.lost:
        yield NOTES.note(
            "merging_cost",
            lost=[f"{m:,} at {site}" for site, m in cost.lost.items()],
            exact=f' rounding = "dither" at {", ".join(cost.exact)} (a part of them);' if cost.exact else "",
            entities=cost.short,
            sites=cost.sites,
        )


def merged_by_site(exchange: PatternExchange) -> str:
    """State for each site how many of its entities count as missing, and the least cost.

    The information on the coefficients of a site is proportional to the entities that count as observed
    there, if these are as informative as the others. On the packaged data, 26 of 348 entities of the
    Judicial Organ count as missing: 4 %, where standard errors are 5 to 12 % larger than by iteration.
    """
    parts = []
    for site, seen in exchange.released.items():
        lost, left = int(np.count_nonzero(~seen)), int(np.count_nonzero(seen))
        if lost and left:
            larger = 100.0 * (np.sqrt(len(seen) / left) - 1.0)
            parts.append(f"{lost:,} of {len(seen):,} at '{site}' ({larger:.0f} %)")
    if not parts:
        return ""
    return (
        f" By site: {', '.join(parts)}; in brackets, the increase of the standard errors of its "
        "coefficients from the number of entities alone. It is larger if these entities have columns of more "
        "sites than others. Nothing is merged if all owners allow small patterns (max_parameters of 1 or "
        "more) and the partition has min_count=1."
    )


def values_left_out(lost: Mapping[str, int]) -> str:
    """List values that count as missing."""
    return "values of " + ", ".join(f"{what}: {m:,}" for what, m in lost.items())


def dithering_sites(layout: Layout) -> list[str]:
    """Return the sites that reported that they dither their columns before summing them."""
    details = [*zip(layout.sites, layout.details, strict=False), (layout.active, layout.response_detail)]
    return list(dict.fromkeys(site for site, detail in details if detail and detail.carried < EXACT))


def noise_added(layout: Layout | None) -> str:
    """State in a word the privacy budget that was spent: dither is not noise of differential privacy."""
    dithers = layout is not None and dithering_sites(layout)
    return "none (columns are dithered)" if dithers else "none (no noise is added)"


def dither_notes(layout: Layout) -> Iterator[Note]:
    """State whose columns were dithered."""
    if sites := dithering_sites(layout):
        yield NOTES.note("dither", sites=sites)


def sums_note(how: str, smallest: int, more: str = "") -> Note:
    """State that only sums were released, `how` divided (", by fold"), and of how many entities."""
    return NOTES.note("sums", how=how, smallest=smallest, more=more)


def dealer_notes(
    dealers: Mapping[tuple[str, str], str], see: str = "", bystanders: Sequence[str] = ()
) -> Iterator[Note]:
    """State who dealt random numbers for products of two sites, and what collusion would reveal.

    `bystanders` are sites without columns in the model.
    """
    pairs = Counter(dealer or "the coordinator" for dealer in dealers.values())
    if not pairs:
        return
    listed = [f"{dealer} for {count} pair{'s' * (count > 1)}" for dealer, count in pairs.items()]
    yield NOTES.note("dealers", pairs=listed, see=see)
    for site in bystanders:
        if site in dealers.values():
            yield NOTES.note("bystander", site=site)


# ----------------------------------------------------------------------------------------------------
# Bits of the rows that a receiver of linear predictors in many rounds could solve for.

MANTISSA_BITS = 53
"""Bits of a released number, and at most of a value in a column; a column of two values has one bit."""
PREDICTOR_STEP = "linear_predictor"


def rounds_of_predictors(ledger: Ledger, sites: Sequence[str]) -> int:
    """Largest number of linear predictors of the same entities that a site released, masked or not."""
    given = [one.sender for one in ledger.entries if one.array == PREDICTOR_STEP and one.kind == "per entity"]
    return max((given.count(site) for site in sites), default=0)


def solvable_note(numbers: int, columns: int, ledger: Ledger, sites: Sequence[str]) -> Iterator[Note]:
    """State what these released numbers per entity reveal about the columns of all sites.

    Those of earlier analyses count as well, if these sites report them.
    """
    stated = {} if ledger.receipt is None else ledger.receipt.statements
    so_far = max([numbers, *(stated[site].vectors for site in sites if site in stated)])
    held = so_far * MANTISSA_BITS
    values: dict[str, Any] = {}
    if so_far < columns:
        values = {"binary": "all" if held >= columns else held}
    yield NOTES.note(
        "solvable" if values else "solvable/rows",
        numbers=so_far,
        earlier=f", {so_far - numbers:,} of them in other analyses," if so_far > numbers else "",
        held=held,
        unknown=columns * MANTISSA_BITS,
        columns=columns,
        bits=MANTISSA_BITS,
        **values,
    )


def role_notes(roles: Mapping[str, str]) -> Iterator[Note]:
    """Describe the offset and the weights, and their meaning."""
    for role, name in roles.items():
        if role == "offset":
            yield NOTES.note("offset", name=name)
        else:
            yield NOTES.note("weights/frequency" if role == "freq_weights" else "weights", name=name)
