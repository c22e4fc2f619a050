"""Parties that could learn something from the releases of a fit, and what each could learn.

The sentences follow from the kinds of the messages, from masks, from the receivers, and from the number of
sites. They hold for parties that follow the protocol, and that keep and combine everything they see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.federation.disclosure.threat_statements import COORDINATOR_LEARNS, SITE_LEARNS
from fedstat.federation.dry_run.expected_releases import ExpectedArray

MAX_ARRAYS_NAMED = 4


def who_learns(
    planned: Sequence[ExpectedArray],
    at: str | None,
    n_masked: int,
    dealers: Mapping[tuple[str, str], str],
) -> Iterator[tuple[str, str]]:
    """Say who could learn what: pairs of a party and a sentence.

    `at` is the site of the coordinator; `n_masked` counts the sites of the masked sums, 0 without any;
    `dealers` name the dealer for the secure product of each two sites, empty for the coordinator.
    """
    coordinator = "Coordinator" if at is None else f"Coordinator, at {at}"
    yield from ((coordinator, sentence) for sentence in coordinator_learns(planned, at))
    yield from ((coordinator, sentence) for sentence in masked_sums_reveal(planned, n_masked))
    yield from (("Sites", sentence) for sentence in sites_learn(planned))
    noisy = any(row.kind == "noisy aggregate" for row in planned)
    yield from (("Collusion", sentence) for sentence in collusions(at, n_masked, dealers, noisy))


def coordinator_learns(planned: Sequence[ExpectedArray], at: str | None) -> Iterator[str]:
    """Say what the coordinator receives in clear, most disclosing first."""
    for kind, meaning in COORDINATOR_LEARNS.items():
        rows = [row for row in planned if row.kind == kind and not row.masked and row.sender != COORDINATOR]
        if not rows:
            continue
        senders = list(dict.fromkeys(row.sender for row in rows))
        entities = min((row.entities for row in rows if row.entities), default=0)
        # A share is random: how many entities are behind it says nothing about what it shows.
        behind = f", of {entities:,} entities or more" if entities and kind != "masked share" else ""
        yield (
            f"receives from {_join_or_count(senders, planned)}{behind} ({kind}): "
            f"{_array_meanings(rows)}. {meaning}."
        )
        if kind == "sketch" and at is not None:
            yield f"sits at {at}, which has the seed of the sketch."


def masked_sums_reveal(planned: Sequence[ExpectedArray], n_masked: int) -> Iterator[str]:
    """List what the coordinator learns in spite of masks."""
    each = [row for row in planned if row.masked and row.kind == "per entity"]
    rows = [row for row in planned if row.masked and row.kind != "per entity"]
    if rows:
        yield (
            f"receives under masks: {_array_meanings(rows)}. It learns the sums over {n_masked} sites, and "
            "no site's part."
        )
    if each:
        yield (
            f"receives sums over {n_masked} sites entity by entity, in every round: {_array_meanings(each)}. "
            "Masks hide a site's part of one round. About as many rounds as there are columns reveal the "
            "rows of all sites. If only one site has a record of an entity, the sum is that site's part."
        )


def sites_learn(planned: Sequence[ExpectedArray]) -> Iterator[str]:
    """State what the sites receive."""
    for kind, meaning in SITE_LEARNS.items():
        rows = [row for row in planned if row.kind == kind and row.sender == COORDINATOR]
        if rows:
            receivers = list(dict.fromkeys(row.receiver for row in rows))
            whom = _join_or_count(receivers, planned)
            yield f"{whom} receive ({kind}): {_array_meanings(rows)}. {meaning}."
    if any(row.kind == "sealed" for row in planned):
        yield (
            "of a product receive each other's columns less random numbers, sealed, and learn nothing from "
            "them."
        )


def collusions(
    at: str | None, n_masked: int, dealers: Mapping[tuple[str, str], str], noisy: bool = False
) -> Iterator[str]:
    """State which parties learn more together; `noisy` if every site adds noise to its own shares."""
    if n_masked and not hides(n_masked):
        yield f"Masks hide nothing from the other site here. {TWO_SITES}"
    elif n_masked:
        yield (
            f"The coordinator and c of the {n_masked} sites together learn the sum over the other "
            f"{n_masked} - c; if all sites but one collude, they learn the part of the last one."
        )
    where = "the coordinator" if at is None else f"the coordinator (at {at})"
    for dealer in dict.fromkeys(dealers.values()):
        pairs = [f"{one} and {other}" for (one, other), who in dealers.items() if who == dealer]
        yield (
            f"{dealer or where} deals the random numbers for the products of {'; '.join(pairs)}. Together "
            "with one of the two it learns the other's columns at the entities that both have."
        )
    if dealers and noisy:
        yield (
            f"{where[0].upper()}{where[1:]} and all sites but one together know the sums of products with "
            "only that site's noise, which its budget was charged for."
        )
    elif dealers:
        yield (
            f"{where[0].upper()}{where[1:]} and one site of a product together know the sums of products "
            "and that site's columns: these are equations in the other site's columns. They do not "
            "determine continuous columns if a pattern has twice as many entities as columns. They can "
            "determine columns of few values, unless a policy checks sums by bits (discrete)."
        )


def join_names(names: Sequence[str]) -> str:
    """Names in a sentence."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _join_or_count(names: Sequence[str], planned: Sequence[ExpectedArray]) -> str:
    """Names in a sentence; of many that are all to which anything passes, how many they are."""
    every = {name for row in planned for name in (row.sender, row.receiver)} - {COORDINATOR}
    if len(names) > MAX_ARRAYS_NAMED and every.issubset(names):
        return f"all {len(names)} sites"
    return join_names(names)


def _array_meanings(rows: Sequence[ExpectedArray]) -> str:
    """Say what arrays are, in the words of their declarations."""
    whats = list(dict.fromkeys(row.what for row in rows))
    more = len(whats) - MAX_ARRAYS_NAMED
    return "; ".join(whats[:MAX_ARRAYS_NAMED]) + (f"; and {more} more" if more > 0 else "")
