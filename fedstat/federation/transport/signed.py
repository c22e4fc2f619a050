"""Signed requests and replies: authentication is independent of the transport."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import IO

from fedstat.errors import PartitionError, Remedy, SecurityError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.envelopes import Envelope, open_envelope, sign_envelope, signer_of
from fedstat.federation.crypto.keys import Identity, normalize_fingerprint
from fedstat.federation.disclosure.site import Site
from fedstat.federation.transport.live_config import LiveConfig
from fedstat.federation.transport.mailbox import BUSY, CLOSED, ErrorNote
from fedstat.federation.transport.remote import SiteServer, request_number
from fedstat.federation.transport.site_folder import DESCRIPTION, SiteDescription


def sign_request(identity: Identity, site: str, request: bytes) -> tuple[str, bytes]:
    """Give a request its number, and put it into the coordinator's envelope."""
    number = request_number(request)
    return number, sign_envelope(identity, Envelope(COORDINATOR, site, number, request))


def open_reply(data: bytes | IO[bytes], fingerprint: str, site: str, number: str, where: str) -> bytes:
    """Open a reply's envelope, which the site signed for the request of this number."""
    envelope = open_envelope(data, fingerprint, where)
    # the signature alone is not enough: an older reply of the same site has it as well
    if (envelope.sender, envelope.number) != (site, number):
        raise SecurityError(f"{where}: belongs to another request, or to another site")
    return envelope.payload


def answer_signed(
    server: SiteServer, question: bytes | IO[bytes], coordinator: str, where: str, number: str = ""
) -> bytes:
    """Answer a request that the coordinator signed for this site under the number of its envelope."""
    site = server.site
    envelope = open_envelope(question, coordinator, where)
    address = (envelope.sender, envelope.receiver, envelope.number)
    if address != (COORDINATOR, site.name, number or envelope.number):
        raise SecurityError(f"{where}: meant for another site, or sent under another number")
    payload = server.answer(envelope.payload, coordinator, envelope.written)
    return sign_envelope(site.trust.identity, Envelope(site.name, COORDINATOR, envelope.number, payload))


def note_signed(
    site: Site, question: bytes | IO[bytes], coordinator: str, where: str, number: str, why: str
) -> bytes | None:
    """Sign a note on a request; None if its key is not the reason for the missing reply."""
    note = ErrorNote.on(question, coordinator, where)
    if (note.why, why) == (CLOSED, BUSY):
        note = replace(note, why=BUSY)
    return note.sign(site.trust.identity, site.name, number) if note.why == why else None


@dataclass(frozen=True, slots=True)
class PinnedSite:
    """A site that answers the coordinator with one fingerprint and signs its replies."""

    server: SiteServer
    coordinator: str

    def answer(self, question: bytes | IO[bytes], where: str, number: str) -> bytes:
        """Answer a request that the coordinator signed for this site; SecurityError for any other."""
        return answer_signed(self.server, question, self.coordinator, where, number)

    def note(self, question: bytes | IO[bytes], where: str, number: str, why: str) -> bytes | None:
        """Sign a note; see :func:`note_signed`."""
        return note_signed(self.server.site, question, self.coordinator, where, number, why)


class SignedSite:
    """A site that answers its pinned coordinator and signs its replies.

    `name` is the one under which the site is reached, by default its own; `report` receives lines for its
    log.
    """

    def __init__(self, folder: Path, name: str = "", report: Callable[[str], None] = lambda _: None) -> None:
        self._word = LiveConfig(folder, report)
        if not self.description.coordinators:
            raise PartitionError(
                f"'{folder / DESCRIPTION}' pins no coordinator, so that the site answers no requests",
                remedy=Remedy(
                    "fedstat site pin {folder} CARD",
                    "Write the fingerprint of its key under 'coordinator', or use '{call}'",
                ).filled(folder=shlex.quote(str(folder))),
            )
        if name not in ("", self.site.name):
            raise PartitionError(
                f"'{folder / DESCRIPTION}' belongs to '{self.site.name}', but FLARE's name is '{name}'"
            )
        self._server, self._lock = SiteServer(self.site), Lock()

    @property
    def site(self) -> Site:
        """The current site."""
        return self._word.site

    @property
    def description(self) -> SiteDescription:
        """The owner's current description of it."""
        return self._word.description

    def reload_if_changed(self) -> bool:
        """Apply the owner's changes; see :meth:`LiveConfig.reload_if_changed`."""
        with self._lock:
            return self._reload_if_changed()

    def _reload_if_changed(self) -> bool:
        if self._word.has_failed:
            self._word.open_again()
            self._server = SiteServer(self.site)
        return self._word.reload_if_changed()

    def answer(self, question: bytes | IO[bytes], where: str = "a question", number: str = "") -> bytes:
        """Answer a request that the coordinator signed for this site; SecurityError for any other.

        ClosedError while the site answers no requests, BusyError if the request has to wait for its turn.
        """
        with self._lock:
            self._reload_if_changed()
            answer = answer_signed(self._server, question, self._signer(question, where), where, number)
            self._word.check_written()
            return answer

    def note(self, question: bytes | IO[bytes], where: str, number: str, why: str) -> bytes | None:
        """Sign a note; see :func:`note_signed`."""
        return note_signed(self.site, question, self._signer(question, where), where, number, why)

    def _signer(self, question: bytes | IO[bytes], where: str) -> str:
        """Return the fingerprint of the coordinator that signed a request; that of the first if none did."""
        known = self.description.coordinators
        if len(known) > 1:
            keys, _ = signer_of(question, where)
            if not isinstance(question, bytes):
                question.seek(0)
            known = tuple(one for one in known if normalize_fingerprint(one) == keys.digest.hex()) or known
        return known[0] if known else ""
