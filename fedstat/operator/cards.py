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
# A public card has the name, the role and the fingerprint of a site or of a coordinator.

FILE = "card.toml"
COMPARE = "Compare the fingerprint by telephone: a card can be replaced on its way to you."
SITE = "site"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def make_folder(folder: Path, first: str) -> Identity:
    """Make a private folder and draw its keys, unless it has files that would be overwritten."""
    if (folder / first).exists() or (folder / IDENTITY).exists():
        raise PartitionError(f"'{folder}' is in use; choose another folder. Nothing was changed")
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
        """Write the card into a new folder, and print the list of `files` in it."""
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
        print(format_columns([*files, (FILE, "name and fingerprint; give it to the others")]))
        print(f"\nFingerprint  {self.fingerprint}")
        return path


def read_card(path: Path) -> Card:
    """Read a card from a file, or from the folder that has it."""
    path = path / FILE if path.is_dir() else path
    card = read_entries(Card, path, "a card is the file card.toml in the folder of a site or a coordinator")
    if card.role not in (SITE, COORDINATOR):
        raise PartitionError(f'\'{path}\': role: expected "{SITE}" or "{COORDINATOR}"')
    if not FINGERPRINT.fullmatch(normalize_fingerprint(card.fingerprint)):
        raise PartitionError(f"'{path}': fingerprint: expected 64 hexadecimal digits, with or without blanks")
    check_name(card.name)
    return card


def check_name(name: str) -> str:
    """Require a name that can be the name of a folder and fits in one line of a file."""
    if (
        not name.isprintable()
        or not name.strip()
        or name != name.strip()
        or set(name) & set('/\\:"')
        or (name.startswith(".") or name == COORDINATOR or len(name.encode()) > 80)
    ):
        raise PartitionError(
            f"{name!r} cannot be the name of a site: expected printable text of at most 80 bytes, "
            f"without slash, colon or quotes, without a dot at the beginning, and not '{COORDINATOR}'"
        )
    return name


# ----------------------------------------------------------------------------------------------------
# Pinned keys of single cards. A pinned key is replaced only if the user gives its fingerprint.


def same_fingerprint(one: str, other: str) -> bool:
    """Return whether two fingerprints are the same, in any notation."""
    return normalize_fingerprint(one) == normalize_fingerprint(other)


def check_replaced_pin(who: str, known: str, reported: str, replace: str) -> None:
    """Require the current fingerprint where a card would replace it, or raise a SecurityError with both.

    Otherwise a forged card could replace a key that its owners have compared.
    """
    if known and not same_fingerprint(known, reported) and not same_fingerprint(known, replace):
        both = f"  known     {known}\n  received  {reported}"
        raise SecurityError(
            f"{who} is known with another key; nothing was changed:\n\n{both}\n\nAsk them by telephone "
            f'whether they have a new key, and compare it. Only then repeat this with    --replace "{known}"'
        )


def pin_card(folder: Path, card: Path, replace: str = "") -> int:
    """Trust the coordinator or the site that a card describes."""
    description, reported = read_description(folder), read_card(card)
    if reported.role == SITE and reported.name == description.name:
        own = load_identity(folder).public.fingerprint
        if not same_fingerprint(reported.fingerprint, own):
            raise PartitionError(f"the card has the name of this site, '{reported.name}', but another key")
        replace = replace or description.pinned.get(reported.name, "")  # its own key needs no telephone call
    is_site = reported.role == SITE
    who = f"site {reported.name}" if is_site else f"the coordinator of {reported.name}"
    known = description.pinned.get(reported.name, "") if is_site else description.coordinator
    check_replaced_pin(who, known, reported.fingerprint, replace)
    table, entry = ("pinned", reported.name) if is_site else ("", COORDINATOR)
    set_entry(folder / DESCRIPTION, table, entry, reported.fingerprint)
    print(f"{description.name} now trusts {who}:\n\n  {reported.fingerprint}\n")
    print(COMPARE)
    return 0
