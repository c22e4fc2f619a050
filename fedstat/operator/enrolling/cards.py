"""Public cards: the name, the role and the fingerprint of an institution or of a coordinator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstat.errors import PartitionError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.carry.site_folder import IDENTITY, read_entries
from fedstat.federation.crypto.keys import Identity, plain_fingerprint
from fedstat.operator.writing.entries import quoted
from fedstat.operator.writing.screen import columns
from fedstat.operator.writing.templates import CARD

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
                quoted=quoted(self.name),
                role=quoted(self.role),
                fingerprint=quoted(self.fingerprint),
            ),
            encoding="utf-8",
        )
        who = f"site {self.name}" if self.role == SITE else f"the coordinator of {self.name}"
        print(f"'{folder}' is the folder of {who}.\n")
        print(columns([*files, (FILE, "name and fingerprint, for the others")]))
        print(f"\nFingerprint  {self.fingerprint}")
        return path


def read_card(path: Path) -> Card:
    """Read a card; of a folder, the one in it."""
    path = path / FILE if path.is_dir() else path
    card = read_entries(Card, path, "a card is the card.toml of a site's or a coordinator's folder")
    if card.role not in (SITE, COORDINATOR):
        raise PartitionError(f'\'{path}\': role: expected "{SITE}" or "{COORDINATOR}"')
    if not FINGERPRINT.fullmatch(plain_fingerprint(card.fingerprint)):
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
