"""Sites that are taken out of a federation: their keys are listed, and join no more unasked."""

from __future__ import annotations

from pathlib import Path

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.crypto.keys import plain_fingerprint
from fedstat.federation.partition.federation_file import FEDERATION, FederationDescription, read_federation
from fedstat.operator.enrolling.cards import Card
from fedstat.operator.enrolling.pins import same
from fedstat.operator.enrolling.rosters import FILE, last_roster, sign_roster
from fedstat.operator.writing.entries import make_table, set_entry, withdraw_entry
from fedstat.operator.writing.screen import typed

REVOKED = "revoked"


def remove(folder: Path, name: str) -> int:
    """Take a site out, list its key among those that were taken out, and make the roster without it."""
    federation = read_federation(folder)
    if name not in federation.sites:
        there = ", ".join(federation.sites) or "none"
        raise PartitionError(f"there is no site '{name}' in {federation.name}; there are {there}")
    if name == federation.coordinator:
        raise PartitionError(
            f"this coordinator is at '{name}'; change 'coordinator' in '{folder / FEDERATION}'"
        )
    path = folder / FEDERATION
    make_table(path, REVOKED)
    # first the list: a cut in between leaves a site that is named twice, and none that could come back
    set_entry(path, REVOKED, federation.sites[name], name)
    withdraw_entry(path, "sites", name)
    print(f"{name} is no longer a site of {federation.name}, and is asked nothing from now on.")
    print(f"Its key is listed under [{REVOKED}] and joins only with --again.\n")
    federation = read_federation(folder)
    if last_roster(federation) is None or not federation.sites:
        print(f"The other owners take it out by    fedstat site revoke FOLDER {name}")
        return 0
    roster = sign_roster(federation)
    print(f"Roster {roster.number}, without it, is in '{folder / FILE}':\n\n  {roster.fingerprint}\n")
    print("The others trust it until they have accepted that one:    fedstat site accept FOLDER")
    print(f"Who has is told by    fedstat federation test {typed(folder)}")
    return 0


def check_again(folder: Path, federation: FederationDescription, card: Card, again: bool) -> None:
    """Refuse the card of a site that was taken out, unless it is asked back: SecurityError."""
    listed = [key for key in federation.revoked if same(key, card.fingerprint)]
    if listed and not again:
        raise SecurityError(
            f"the key on this card was taken out of {federation.name}, as that of "
            f"'{federation.revoked[listed[0]]}'. Where it shall take part again, repeat this with --again"
        )
    for key in listed:
        withdraw_entry(folder / FEDERATION, REVOKED, key)


def revoked_problems(federation: FederationDescription) -> list[str]:
    """One line where a site is listed as taking part under a key that was taken out."""
    out = set(map(plain_fingerprint, federation.revoked))
    return [
        f"{name} takes part with a key that is listed under [{REVOKED}]: take one of the two lines out"
        for name, key in federation.sites.items()
        if plain_fingerprint(key) in out
    ]
