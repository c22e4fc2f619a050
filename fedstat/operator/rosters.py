"""Commands of the signed roster: make, accept and countersign it, and remove sites from it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedstat.errors import FedstatError, PartitionError, Remedy, SecurityError
from fedstat.federation.audit import checkpoints
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.keys import normalize_fingerprint
from fedstat.federation.crypto.rosters import LONGEST_ROSTER, Acceptance, Roster
from fedstat.federation.files import check_folder, make_folders, open_regular, write_atomic, write_shared
from fedstat.federation.partition.federation_file import (
    FEDERATION_FILENAME,
    FOLDER_TRANSPORT,
    FederationDescription,
    coordinator_identity,
    join_remedy,
    read_federation,
)
from fedstat.federation.transport.site_folder import (
    DESCRIPTION,
    SiteDescription,
    load_identity,
    read_description,
)
from fedstat.operator.cards import Card, check_name, check_replaced_pin, same_fingerprint
from fedstat.operator.config_files import make_table, set_entry, withdraw_entry
from fedstat.operator.terminal import format_columns, shell_path, underlined

# ----------------------------------------------------------------------------------------------------
# Commands of the roster: the coordinator makes it, owners accept it, and acceptances are collected.
#
# ::
#
#     study/roster.json               the last roster; a copy is in the exchange folder
#     study/accepted/North.json       the roster that the owner of North has accepted, signed by North
#     exchange/North/roster.accepted  the same file on its way; without this folder, North.accepted is sent

FILE, ACCEPTED, CARRIED = "roster.json", ".accepted", "roster.accepted"
COMPARE = (
    "Compare it by telephone with another site, not only with the coordinator, who could make two\n"
    "rosters. If both of you read the same fingerprint, each of you has the key of the other."
)


def make_roster(folder: Path) -> int:
    """Sign the list of all sites, under the next number."""
    federation = read_federation(folder)
    if not federation.sites:
        raise PartitionError("no site has been added yet", remedy=join_remedy(folder))
    last, roster = last_roster(federation), sign_roster(federation)
    reported = "has not changed" if roster == last else "was made"
    print(f"Roster {roster.number} of {federation.name} {reported}.\n")
    print(format_columns(list(roster.sites.items())))
    print(f"\nFingerprint of the roster  {roster.fingerprint}\n")
    where = f"    fedstat site accept FOLDER{'' if federation.transport == FOLDER_TRANSPORT else f' {FILE}'}"
    if federation.transport != FOLDER_TRANSPORT:
        print(f"Next: give '{folder / FILE}', which contains nothing secret, to every site.")
    print(f"Next: every owner enters it with{where}")
    print("and compares its fingerprint by telephone with the other sites.")
    return 0


def sign_roster(federation: FederationDescription) -> Roster:
    """Make the next roster if something has changed, and put it where sites look."""
    folder, last = federation.folder, last_roster(federation)
    identity = coordinator_identity(folder)
    roster = Roster(
        name=federation.name,
        number=1 if last is None else last.number + 1,
        date=_now(),
        layout=federation.layout,
        coordinator=identity.public.fingerprint,
        sites=dict(federation.sites),
        revoked=dict(federation.revoked),
        earlier=() if last is None else (*last.earlier, last.digest),
    )
    if last is not None and _content(last) == _content(roster):
        roster = last
    text = roster.sign(identity).encode()
    write_atomic(folder / FILE, text)
    if federation.transport == FOLDER_TRANSPORT:
        make_folders(Path(federation.exchange))
        write_shared(Path(federation.exchange, FILE), text)
    return roster


def _now() -> str:
    return checkpoints.utc_text(time.time_ns())


def _content(roster: Roster) -> tuple[object, ...]:
    """List what may change from one roster to the next."""
    return roster.name, roster.layout, roster.coordinator, dict(roster.sites), dict(roster.revoked)


def last_roster(federation: FederationDescription) -> Roster | None:
    """Read the last roster that was made here; None if there is none."""
    path = federation.folder / FILE
    if not path.exists():
        return None
    roster = Roster.read(path.read_bytes(), f"'{path}'")
    if not same_fingerprint(roster.coordinator, coordinator_identity(federation.folder).public.fingerprint):
        raise SecurityError(f"'{path}' is the roster of another coordinator; restore the one made here")
    return roster


def accept_roster(folder: Path, roster: Path | None, fingerprint: str, replace: Sequence[str]) -> int:
    """Show a roster; with its fingerprint, pin all keys in it."""
    description = read_description(folder)
    path = Path(description.exchange_folder, FILE) if roster is None else roster
    if roster is None and not description.exchange_folder:
        raise PartitionError(
            "the site has no folder for requests, where the roster would be",
            remedy=Remedy("fedstat site accept {folder} ROSTER", "name the file: {call}").filled(
                folder=shell_path(folder)
            ),
        )
    reported = Roster.read(_read(path), f"'{path}'")
    _check_of_site(folder, description, reported)
    known = _history(description, reported)
    _check_replaced(description, reported, replace)
    print(underlined(f"Roster {reported.number} of {reported.name}"))
    print(format_columns(_changes(description, reported)))
    print(f"\nFingerprint of the roster  {reported.fingerprint}\n")
    if not fingerprint:
        print(COMPARE + "\n")
        given = [word for one in replace for word in ("--replace", f'"{one}"')]
        words = ["fedstat site accept", shell_path(folder), *([] if roster is None else [shell_path(path)])]
        print(f'Then:    {" ".join([*words, *given])} --fingerprint "{reported.fingerprint}"')
        return 1
    if not same_fingerprint(fingerprint, reported.fingerprint):
        raise SecurityError(
            f"this is not the roster that was compared; nothing was changed:\n\n  compared  {fingerprint}\n  "
            f"this one  {reported.fingerprint}\n\nSomebody replaced '{path}', or there is a newer roster"
        )
    _enter(folder, description, reported, known)
    print(f"{description.name} now trusts the coordinator and the sites of roster {reported.number}.")
    _countersign(folder, description, reported)
    return 0


def _read(path: Path) -> bytes:
    """Read a file that others can write, up to the size of a roster."""
    try:
        with open_regular(path) as file:
            text = file.read(LONGEST_ROSTER + 1)
    except FileNotFoundError as error:
        raise PartitionError(
            f"'{path}' is absent",
            remedy=Remedy("fedstat federation roster STUDY", "the coordinator makes it with '{call}'"),
        ) from error
    if len(text) > LONGEST_ROSTER:
        raise SecurityError(f"'{path}' is too large for a roster")
    return text


def _check_of_site(folder: Path, description: SiteDescription, reported: Roster) -> None:
    """Require that the roster lists this site under its own key."""
    own, name = load_identity(folder).public.fingerprint, description.name
    if name not in reported.sites:
        if normalize_fingerprint(own) in map(normalize_fingerprint, reported.revoked):
            raise PartitionError(f"roster {reported.number} lists {name} as removed")
        raise PartitionError(
            f"roster {reported.number} does not list {name}; send its card to the coordinator again"
        )
    if not same_fingerprint(reported.sites[name], own):
        raise SecurityError(
            f"roster {reported.number} lists {name} with another key than its own: the card was replaced on "
            "its way to the coordinator. Telephone the coordinator, and accept nothing before"
        )
    for site in reported.sites:
        check_name(site)
    layout = "horizontal" if description.site_column else "vertical"
    if reported.layout != layout:
        raise PartitionError(
            f"the federation has the {reported.layout} layout, and {name} has the {layout} layout"
        )


def _history(description: SiteDescription, reported: Roster) -> dict[str, str]:
    """Compare a roster with those accepted before, and return the numbers to keep."""
    if not same_fingerprint(description.coordinator, reported.coordinator):
        return {}
    latest = max(map(int, description.roster), default=0)
    if reported.number < latest:
        raise SecurityError(
            f"roster {reported.number} is older than roster {latest}, which {description.name} has accepted; "
            "somebody restored an old file. Otherwise request the last roster from the coordinator"
        )
    for number, digest in description.roster.items():
        if reported.digest_of(int(number)) != digest:
            raise SecurityError(
                f"roster {number} differs from the roster {number} that {description.name} accepted: the "
                "coordinator made two with one number. Telephone the other sites, and compare fingerprints"
            )
    return dict(description.roster)


def _check_replaced(description: SiteDescription, reported: Roster, replace: Sequence[str]) -> None:
    pairs = [(f"the coordinator of {reported.name}", description.coordinator, reported.coordinator)]
    pairs += [(f"site {site}", description.pinned.get(site, ""), key) for site, key in reported.sites.items()]
    for who, known, key in pairs:
        check_replaced_pin(
            who, known, key, next((one for one in replace if same_fingerprint(one, known)), "")
        )


def _leaving(description: SiteDescription, reported: Roster) -> Iterator[str]:
    """Return pinned sites whose keys were revoked, and that do not take part under another key."""
    out = set(map(normalize_fingerprint, reported.revoked))
    for site, key in description.pinned.items():
        if site not in reported.sites and normalize_fingerprint(key) in out:
            yield site


def _changes(description: SiteDescription, reported: Roster) -> list[tuple[str, ...]]:
    """Return rows for all differences between the roster and the pinned keys."""
    parties = {COORDINATOR: (description.coordinator, reported.coordinator)}
    parties |= {site: (description.pinned.get(site, ""), key) for site, key in reported.sites.items()}
    rows: list[tuple[str, ...]] = [
        (who, "new" if not known else "has a new key", key)
        for who, (known, key) in parties.items()
        if not same_fingerprint(known, key)
    ]
    rows += [(site, "removed", description.pinned[site]) for site in _leaving(description, reported)]
    # the owner knows its own key
    same = parties.keys() - {row[0] for row in rows} - {description.name}
    others = f"{len(same)} other key{'' if len(same) == 1 else 's'}"
    return [*rows, (others if rows else "all", "as before", "")] if same else rows


def _enter(folder: Path, description: SiteDescription, reported: Roster, known: dict[str, str]) -> None:
    """Pin the keys of a roster, and write its number last: after an interruption, it is accepted again."""
    path = folder / DESCRIPTION
    make_table(path, "roster")
    for site, key in reported.sites.items():
        if not same_fingerprint(description.pinned.get(site, ""), key):
            set_entry(path, "pinned", site, key)
    for site in _leaving(description, reported):
        withdraw_entry(path, "pinned", site)
    set_entry(path, "", COORDINATOR, reported.coordinator)
    for old in set(description.roster) - set(known):  # of another coordinator
        withdraw_entry(path, "roster", old)
    for number in range(1, reported.number + 1):
        set_entry(path, "roster", str(number), reported.digest_of(number))


def _countersign(folder: Path, description: SiteDescription, reported: Roster) -> None:
    """Write for the coordinator that this site has accepted the roster."""
    acceptance = Acceptance(description.name, reported.number, reported.digest, _now())
    text = acceptance.sign(load_identity(folder)).encode()
    path = folder / f"{description.name}{ACCEPTED}"
    write_atomic(path, text)
    if description.exchange_folder:
        place = Path(description.exchange_folder, description.name)
        make_folders(place)
        check_folder(place)
        write_shared(place / CARRIED, text)
        print("The coordinator sees it in the exchange folder.")
    else:
        print(f"Send '{path}', which contains nothing secret, to the coordinator.")


def take_acceptance(folder: Path, path: Path) -> int:
    """Keep the signed statement of a site that it has accepted a roster."""
    federation = read_federation(folder)
    roster = last_roster(federation)
    if roster is None:
        raise PartitionError(
            "there is no roster yet",
            remedy=Remedy("fedstat federation roster {folder}", "make it with    {call}").filled(
                folder=shell_path(folder)
            ),
        )
    found = Acceptance.read(_read(path), f"'{path}'", federation.sites, roster)
    _keep(federation, roster, found, _read(path))
    print(f"{found.site} has accepted roster {found.number}. {_standing(federation, roster)}")
    return 0


def _keep(federation: FederationDescription, roster: Roster, found: Acceptance, text: bytes) -> None:
    """Keep the statement, unless there is a later one."""
    folder = federation.folder / "accepted"
    folder.mkdir(mode=0o700, exist_ok=True)
    if accepted_numbers(federation, roster).get(found.site, 0) < found.number:
        write_atomic(folder / f"{found.site}.json", text)


def accepted_numbers(federation: FederationDescription, roster: Roster) -> dict[str, int]:
    """Return the number of the last roster that each site has accepted, as far as it is known."""
    found = dict[str, int]()
    for site in federation.sites:
        path = federation.folder / "accepted" / f"{site}.json"
        try:
            found[site] = Acceptance.read(path.read_bytes(), f"'{path}'", federation.sites, roster).number
        except (OSError, FedstatError):
            continue
    return found


def collect_acceptances(federation: FederationDescription, roster: Roster) -> list[str]:
    """Collect the statements of sites from the exchange folder; report files that are not valid."""
    strange = []
    for site in federation.sites if federation.transport == FOLDER_TRANSPORT else ():
        path = Path(federation.exchange, site, CARRIED)
        try:
            check_folder(path.parent)
            text = _read(path)
            found = Acceptance.read(text, f"'{path}'", {site: federation.sites[site]}, roster)
            _keep(federation, roster, found, text)
        except (PartitionError, OSError):
            continue  # the site has written none yet
        except SecurityError as error:
            strange.append(str(error))
    return strange


def _standing(federation: FederationDescription, roster: Roster) -> str:
    """Return a sentence on the sites that have and have not accepted the last roster."""
    numbers = accepted_numbers(federation, roster)
    lacking = [
        f"{site} ({f'roster {numbers[site]}' if site in numbers else 'none'})"
        for site in federation.sites
        if numbers.get(site) != roster.number
    ]
    if not lacking:
        return f"All sites have accepted roster {roster.number}."
    return f"Roster {roster.number} is not yet accepted by {', '.join(lacking)}."


def roster_remarks(folder: Path) -> Iterator[str]:
    """Yield lines about the last roster, for the status of a federation; none if there is no roster."""
    federation = read_federation(folder)
    roster = last_roster(federation)
    if roster is None:
        return
    yield from collect_acceptances(federation, roster)
    yield _standing(federation, roster)
    if _content(roster)[3:] != (dict(federation.sites), dict(federation.revoked)):
        yield (
            "The sites have changed since the last roster. Make the next one with    fedstat federation "
            f"roster {shell_path(folder)}"
        )


# ----------------------------------------------------------------------------------------------------
# Sites that are removed from a federation: their keys are listed, and cannot join again by accident.

REVOKED = "revoked"


def revoke_member(folder: Path, name: str) -> int:
    """Remove a site, list its key as revoked, and make the roster without it."""
    federation = read_federation(folder)
    if name not in federation.sites:
        there = ", ".join(federation.sites) or "none"
        raise PartitionError(f"{federation.name} has no site '{name}'; its sites are {there}")
    if name == federation.coordinator:
        raise PartitionError(
            f"this coordinator runs at '{name}'; change 'coordinator' in '{folder / FEDERATION_FILENAME}'"
        )
    path = folder / FEDERATION_FILENAME
    make_table(path, REVOKED)
    # the list first: after an interruption a site is in both lists, and none can come back
    set_entry(path, REVOKED, federation.sites[name], name)
    withdraw_entry(path, "sites", name)
    print(f"{name} is no longer a site of {federation.name} and receives no more requests.")
    print(f"Its key is listed under [{REVOKED}] and can join only with --again.\n")
    federation = read_federation(folder)
    if last_roster(federation) is None or not federation.sites:
        print(f"The owners of the other sites remove it with    fedstat site revoke FOLDER {name}")
        return 0
    roster = sign_roster(federation)
    print(f"Roster {roster.number}, without it, is in '{folder / FILE}':\n\n  {roster.fingerprint}\n")
    print("The other sites trust it until they accept that roster:    fedstat site accept FOLDER")
    print(f"To see which sites have accepted it:    fedstat federation test {shell_path(folder)}")
    return 0


def check_not_revoked(folder: Path, federation: FederationDescription, card: Card, again: bool) -> None:
    """Refuse the card of a site that was removed, unless `again` is set: SecurityError."""
    listed = [key for key in federation.revoked if same_fingerprint(key, card.fingerprint)]
    if listed and not again:
        raise SecurityError(
            f"the key on this card was removed from {federation.name}, as the key of "
            f"'{federation.revoked[listed[0]]}'. To add it again, repeat this with --again"
        )
    for key in listed:
        withdraw_entry(folder / FEDERATION_FILENAME, REVOKED, key)


def revoked_problems(federation: FederationDescription) -> list[str]:
    """Yield one line if a listed site has a revoked key."""
    out = set(map(normalize_fingerprint, federation.revoked))
    return [
        f"{name} takes part with a key that is listed under [{REVOKED}]: remove one of the two lines"
        for name, key in federation.sites.items()
        if normalize_fingerprint(key) in out
    ]
