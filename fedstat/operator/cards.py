"""Public cards of sites and coordinators, and the pinned keys of single cards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.keys import Identity, normalize_fingerprint
from fedstat.federation.transport.site_folder import (
    DESCRIPTION,
    IDENTITY,
    load_identity,
    read_description,
    read_entries,
)
from fedstat.operator.config_files import CARD, set_entry, toml_quoted
from fedstat.operator.terminal import format_columns

# ----------------------------------------------------------------------------------------------------
# Public cards: the name, the role and the fingerprint of an institution or of a coordinator.

FILE = "card.toml"
COMPARE = "Compare it by telephone with what they read out: a card can be exchanged on its way."
SITE = "site"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def make_folder(folder: Path, first: str) -> Identity:
    """Make a private folder and draw its keys, unless it holds what would be overwritten."""
    if (folder / first).exists() or (folder / IDENTITY).exists():
        raise PartitionError(f"'{folder}' is in use already; choose another folder, nothing was changed")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = Identity.generate()
    identity.save(folder / IDENTITY)
    return identity


@dataclass(frozen=True, slots=True)
class Card:
    """The public name, role ("site" or "coordinator") and fingerprint."""

    name: str
    role: str
    fingerprint: str

    def hand_out(self, folder: Path, files: Sequence[tuple[str, str]]) -> Path:
        """Write it into a folder that was just made, whose `files` are told with it."""
        path = folder / FILE
        path.write_text(
            CARD.format(
                name=self.name,
                quoted=toml_quoted(self.name),
                role=toml_quoted(self.role),
                fingerprint=toml_quoted(self.fingerprint),
            ),
            encoding="utf-8",
        )
        who = f"site {self.name}" if self.role == SITE else f"the coordinator of {self.name}"
        print(f"'{folder}' is the folder of {who}.\n")
        print(format_columns([*files, (FILE, "name and fingerprint, for the others")]))
        print(f"\nFingerprint  {self.fingerprint}")
        return path


def read_card(path: Path) -> Card:
    """Read a card; of a folder, the one in it."""
    path = path / FILE if path.is_dir() else path
    card = read_entries(Card, path, "a card is the card.toml of a site's or a coordinator's folder")
    if card.role not in (SITE, COORDINATOR):
        raise PartitionError(f'\'{path}\': role: expected "{SITE}" or "{COORDINATOR}"')
    if not FINGERPRINT.fullmatch(normalize_fingerprint(card.fingerprint)):
        raise PartitionError(f"'{path}': fingerprint: expected 64 hexadecimal digits, maybe in groups")
    check_name(card.name)
    return card


def check_name(name: str) -> str:
    """Require a name that can be a folder and a line in a file."""
    if (
        not name.isprintable()
        or not name.strip()
        or name != name.strip()
        or set(name) & set('/\\:"')
        or (name.startswith(".") or name == COORDINATOR or len(name.encode()) > 80)
    ):
        raise PartitionError(
            f"the name {name!r} cannot be one of a site: expected printable text of at most 80 bytes, "
            f"without slash, colon or quotes, no dot at its beginning, and not '{COORDINATOR}'"
        )
    return name


# ----------------------------------------------------------------------------------------------------
# Pinned keys of single cards: a key that stands is replaced by whoever names it, and by nobody else.


def same_fingerprint(one: str, other: str) -> bool:
    """Whether two fingerprints are the same, however they are written."""
    return normalize_fingerprint(one) == normalize_fingerprint(other)


def check_replaced_pin(who: str, known: str, reported: str, replace: str) -> None:
    """Require the fingerprint that stands, where another takes its place: SecurityError with both.

    A card that was exchanged on its way would otherwise put its own key in the place of one that people have
    compared.
    """
    if known and not same_fingerprint(known, reported) and not same_fingerprint(known, replace):
        both = f"  known     {known}\n  received  {reported}"
        raise SecurityError(
            f"there is {who} with another key here; nothing was changed:\n\n{both}\n\nAsk them by telephone "
            f'whether they have a new key, and compare it. Only then repeat this with    --replace "{known}"'
        )


def pin_card(folder: Path, card: Path, replace: str = "") -> int:
    """Trust the coordinator or the site of a card."""
    description, reported = read_description(folder), read_card(card)
    if reported.role == SITE and reported.name == description.name:
        own = load_identity(folder).public.fingerprint
        if not same_fingerprint(reported.fingerprint, own):
            raise PartitionError(f"the card has the name of this site, '{reported.name}', and another key")
        replace = replace or description.pinned.get(reported.name, "")  # its own: nobody has to be asked
    is_site = reported.role == SITE
    who = f"site {reported.name}" if is_site else f"the coordinator of {reported.name}"
    known = description.pinned.get(reported.name, "") if is_site else description.coordinator
    check_replaced_pin(who, known, reported.fingerprint, replace)
    table, entry = ("pinned", reported.name) if is_site else ("", COORDINATOR)
    set_entry(folder / DESCRIPTION, table, entry, reported.fingerprint)
    print(f"{description.name} now trusts {who}:\n\n  {reported.fingerprint}\n")
    print(COMPARE)
    return 0
