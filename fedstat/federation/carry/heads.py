"""Heads of the sites' accounts, as the coordinator keeps them beside its federation.

::

    heads.json    the newest head that each site has signed, with the key that it was signed with (mode 0600)

A site's files can be put back to an earlier state with all their signatures, which the site cannot see by
itself. What the coordinator keeps of it can, and no other than the site can make it: see
:mod:`fedstat.federation.account.head`. What a site signed since is not covered, up to its next statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.account.head import AccountHead
from fedstat.federation.account.receipt import Receipt
from fedstat.federation.crypto.keys import plain_fingerprint
from fedstat.federation.files import write_whole
from fedstat.records import from_json, to_json

HEADS = "heads.json"


@dataclass(frozen=True, slots=True)
class KeptHead:
    """A head, and the fingerprint of the key that it was signed with."""

    key: str
    head: AccountHead


@dataclass(frozen=True, slots=True)
class KeptHeads:
    """The file in the coordinator's folder; `fingerprints` are those of the sites' keys."""

    folder: Path
    fingerprints: Mapping[str, str]

    def known(self) -> dict[str, AccountHead]:
        """Heads of the sites whose key is still the one that is pinned."""
        kept = self._read()
        return {
            site: kept[site].head
            for site, key in self.fingerprints.items()
            if site in kept and kept[site].key == plain_fingerprint(key)
        }

    def take(self, receipt: Receipt) -> None:
        """Keep the heads that the statements of a run told of.

        SecurityError where one is not signed by its site.
        """
        heads = dict[str, AccountHead]()
        for site, statement in receipt.statements.items():
            if statement.account is None or site not in self.fingerprints:
                continue
            right = statement.keys.digest.hex() == plain_fingerprint(self.fingerprints[site])
            if not right or not statement.account.is_of(statement.keys):
                raise SecurityError(f"{site}: the head of its account is not signed with its key")
            heads[site] = statement.account
        self.keep(heads)

    def keep(self, heads: Mapping[str, AccountHead]) -> None:
        """Keep those that are newer than what is there."""
        kept = self._read()
        newer = {
            site: KeptHead(plain_fingerprint(self.fingerprints[site]), head)
            for site, head in heads.items()
            if site not in kept
            or kept[site].key != plain_fingerprint(self.fingerprints[site])
            or kept[site].head.time < head.time
        }
        if not newer:
            return
        try:
            write_whole(self.folder / HEADS, to_json(kept | newer).encode())
        except OSError as error:
            raise EngineError(f"'{self.folder / HEADS}' cannot be written ({error.strerror})") from error

    def _read(self) -> dict[str, KeptHead]:
        path = self.folder / HEADS
        if not path.exists():
            return {}
        where = f"'{path}' (take it from a backup; without it an account that was put back is not found)"
        return from_json(dict[str, KeptHead], path.read_bytes(), where, SecurityError)
