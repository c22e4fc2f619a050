"""Pinned keys of single cards: a key that stands is replaced by whoever names it, and by nobody else."""

from __future__ import annotations

from pathlib import Path

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.carry.site_folder import DESCRIPTION, load_identity, read_description
from fedstat.federation.crypto.keys import plain_fingerprint
from fedstat.operator.enrolling.cards import COMPARE, SITE, read_card
from fedstat.operator.writing.entries import set_entry


def same(one: str, other: str) -> bool:
    """Whether two fingerprints are the same, however they are written."""
    return plain_fingerprint(one) == plain_fingerprint(other)


def check_replaced(who: str, known: str, told: str, replace: str) -> None:
    """Require the fingerprint that stands, where another takes its place: SecurityError with both.

    A card that was exchanged on its way would otherwise put its own key in the place of one that people have
    compared.
    """
    if known and not same(known, told) and not same(known, replace):
        both = f"  known     {known}\n  received  {told}"
        raise SecurityError(
            f"there is {who} with another key here; nothing was changed:\n\n{both}\n\nAsk them by telephone "
            f'whether they have a new key, and compare it. Only then repeat this with    --replace "{known}"'
        )


def pin(folder: Path, card: Path, replace: str = "") -> int:
    """Trust the coordinator or the site of a card."""
    description, told = read_description(folder), read_card(card)
    if told.role == SITE and told.name == description.name:
        own = load_identity(folder).public.fingerprint
        if not same(told.fingerprint, own):
            raise PartitionError(f"the card has the name of this site, '{told.name}', and another key")
        replace = replace or description.pinned.get(told.name, "")  # its own: nobody has to be asked
    is_site = told.role == SITE
    who = f"site {told.name}" if is_site else f"the coordinator of {told.name}"
    known = description.pinned.get(told.name, "") if is_site else description.coordinator
    check_replaced(who, known, told.fingerprint, replace)
    table, entry = ("pinned", told.name) if is_site else ("", COORDINATOR)
    set_entry(folder / DESCRIPTION, table, entry, told.fingerprint)
    print(f"{description.name} now trusts {who}:\n\n  {told.fingerprint}\n")
    print(COMPARE)
    return 0
