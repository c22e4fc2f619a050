"""Notes on merged patterns and dither, and a check whether linear predictors can be solved for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.tables.cardinality import EXACT
from fedstat.inference.summary import Note
from fedstat.models.vertical.exchange.patterns import CardinalityCost, PatternExchange
from fedstat.models.vertical.layout import Layout

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
            f"institution that has them, and {plan.left_out:,} that would lack everything are left out.",
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
        "institution. At least {smallest:,} entities stand behind every sum.{more}",
        values={"how": how, "smallest": int(smallest), "more": more},
    )


def dealer_notes(
    dealers: Mapping[tuple[str, str], str], see: str = "", bystanders: Sequence[str] = ()
) -> Iterator[Note]:
    """Say who dealt random numbers for products of two institutions, and what collusion would tell.

    `bystanders` have no part in the model.
    """
    pairs = Counter(dealer or "the coordinator" for dealer in dealers.values())
    if not pairs:
        return
    listed = ", ".join(f"{dealer} for {count} pair{'s' * (count > 1)}" for dealer, count in pairs.items())
    yield Note(
        "dealers",
        "Products between institutions come from secure multiplication among parties that follow the "
        "protocol and may keep what they see (semi-honest). Random numbers for two institutions are dealt by "
        f"a third ({listed}{see}), which must not collude with either of the two. The coordinator and an "
        "institution together know the sums of the others' products with columns that they can read.",
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
    """Most linear predictors of the same entities that one of the institutions released, masked or not."""
    given = [one.sender for one in ledger.entries if one.array == PREDICTOR_STEP and one.kind == "per entity"]
    return max((given.count(client) for client in clients), default=0)


def solvable_note(numbers: int, columns: int, ledger: Ledger, sites: Sequence[str]) -> Iterator[Note]:
    """Say what so many numbers for each entity tell of so many columns of all institutions together.

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
        "hide an institution's part of one round and not of many.",
        values={"numbers": int(numbers), "columns": columns},
    )


def _verdict(numbers: int, columns: int) -> str:
    if numbers >= columns:
        return (
            "That is enough for the rows of ALL institutions, masked or not: take them as disclosed. Fits of "
            "the normal family from sums that are exchanged once have no value per entity."
        )
    return (
        f"That is too few for {columns} columns of many values, and enough for "
        f"{'all' if numbers * MANTISSA_BITS >= columns else numbers * MANTISSA_BITS} of them if they have "
        "two."
    )
