"""Signed questions and answers: carriers authenticate nobody, the keys of coordinator and sites do."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.carry.remote import SiteServer, number_of
from fedstat.federation.carry.site_folder import DESCRIPTION, changed_at, heed, open_site, read_description
from fedstat.federation.crypto.envelopes import Envelope, open_signed, sign
from fedstat.federation.crypto.keys import Identity


def sign_question(identity: Identity, site: str, request: bytes) -> tuple[str, bytes]:
    """Give a question its number, and put it into the coordinator's envelope."""
    number = number_of(request)
    return number, sign(identity, Envelope(COORDINATOR, site, number, request))


def open_answer(data: bytes | IO[bytes], fingerprint: str, site: str, number: str, where: str) -> bytes:
    """Take an answer out of its envelope, which the site signed for the question of this number."""
    envelope = open_signed(data, fingerprint, where)
    # the signature alone is not enough: an older answer of the same site bears it as well
    if (envelope.sender, envelope.number) != (site, number):
        raise SecurityError(f"{where}: answers another question, or in another's name")
    return envelope.payload


def answer_signed(
    server: SiteServer, question: bytes | IO[bytes], coordinator: str, where: str, number: str = ""
) -> bytes:
    """Answer a question that the coordinator signed for this site, under the number that it came by."""
    site = server.site
    envelope = open_signed(question, coordinator, where)
    address = (envelope.sender, envelope.receiver, envelope.number)
    if address != (COORDINATOR, site.name, number or envelope.number):
        raise SecurityError(f"{where}: meant for another site, or under another number")
    payload = server.answer(envelope.payload, coordinator)
    return sign(site.trust.identity, Envelope(site.name, COORDINATOR, envelope.number, payload))


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
        return answer_signed(self._server, question, self._coordinator, "a question")

    def _heed(self) -> None:
        """Read again whom the owner trusts, where the description has changed."""
        changed = changed_at(self._folder)
        if changed != self._described:
            description = read_description(self._folder)
            self._coordinator, self._described = description.coordinator, changed
            heed(self._site, description)
