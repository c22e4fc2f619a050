"""A site that believes signatures, and not the carrier."""

from __future__ import annotations

from pathlib import Path

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.carry.remote import SiteServer
from fedstat.federation.carry.site_folder import DESCRIPTION, changed_at, heed, open_site, read_description
from fedstat.federation.crypto.envelopes import Envelope, open_signed, sign


class SignedSite:
    """A site that answers the coordinator whom it has pinned, and signs what it answers.

    `name` is the one under which the site is reached.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._described = folder, changed_at(folder)
        self._coordinator = read_description(folder).coordinator
        if not self._coordinator:
            raise PartitionError(
                f"'{folder / DESCRIPTION}' pins no coordinator; write the fingerprint of its key "
                "under 'coordinator'"
            )
        site = open_site(folder)
        if site.name != name:
            raise PartitionError(f"'{folder / DESCRIPTION}' is of '{site.name}', and FLARE knows '{name}'")
        self._site, self._server = site, SiteServer(site)

    def answer(self, question: bytes) -> bytes:
        """Answer a question that the coordinator signed for this site; SecurityError for any other."""
        self._heed()
        envelope = open_signed(question, self._coordinator, "a question")
        if (envelope.sender, envelope.receiver) != (COORDINATOR, self._site.name):
            raise SecurityError(f"a question from '{envelope.sender}' that is meant for another site")
        payload = self._server.answer(envelope.payload)
        return sign(
            self._site.trust.identity, Envelope(self._site.name, COORDINATOR, envelope.number, payload)
        )

    def _heed(self) -> None:
        """Read again whom the owner trusts, where the description has changed."""
        changed = changed_at(self._folder)
        if changed != self._described:
            description = read_description(self._folder)
            self._coordinator, self._described = description.coordinator, changed
            heed(self._site, description)
