"""Transport by signed files in a shared folder: the coordinator's end.

For sites without open ports. Every request and every reply is one file, signed by its writer; people or a
synchronized folder move the files. Nothing is deleted, so that the folder is the record of all messages.
:mod:`fedstat.federation.transport.mailbox` describes its layout.

A request that is sent again after a fault has the same number, and finds its reply.

A person with write access to the folder can stop messages, but nothing else: a file that is not a plain file
with the signature of the pinned key is skipped before it is parsed, and no link is followed. An invalid file
in the place of a reply is put aside, so that the site writes the reply again. A file that another key has
signed ends the wait at once, because the site may have that key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedstat.errors import EngineError, FedstatWarning, SecurityError, warn
from fedstat.federation.crypto.envelopes import signer_of
from fedstat.federation.crypto.keys import Identity, normalize_fingerprint
from fedstat.federation.disclosure.site import Site
from fedstat.federation.files import open_regular, shared_folder_hint, write_shared
from fedstat.federation.transport.mailbox import (
    SERVED,
    STATUS_OF_NOTES,
    UNTRUSTED,
    Backoff,
    Inbox,
    SiteMailbox,
    open_note,
    untrusted_note,
)
from fedstat.federation.transport.remote import SiteServer
from fedstat.federation.transport.signed import PinnedSite, open_reply, sign_request


@dataclass(slots=True)
class FolderTransport:
    """Writes the coordinator's requests to a folder and waits for the replies.

    A site, one of those in `fingerprints`, counts as silent after `timeout` seconds. Two looks are `poll`
    seconds apart, and further apart when a reply takes long.
    """

    folder: Path
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float = 3600.0
    poll: float = 0.05
    bundles: ClassVar[bool] = True
    _seen: set[str] = field(default_factory=set)

    def send(self, site: str, request: bytes) -> bytes:
        """Write one request, and read its reply.

        EngineError if the site was silent for too long or refuses this coordinator's requests, or if the
        folder cannot be used; SecurityError if another key has signed the reply.
        """
        number, question = sign_request(self.identity, site, request)
        wait = _FolderWait(self, site, SiteMailbox(Path(self.folder, site)), number, question)
        # the reply may exist: an interrupted analysis sends the same request again
        answer = wait.poll()
        if answer is None:
            self._write(wait)
            answer = wait.wait()
        wait.part.settle(number)
        return answer

    def _write(self, wait: _FolderWait) -> None:
        part, path = wait.part, wait.part.request(wait.number)
        try:
            if wait.site not in self._seen:
                # Only once: after a share is unmounted, its empty mount point is not the folder.
                part.make()
                self._seen.add(wait.site)
            # before every request: a folder may have been replaced by a link in the meantime
            part.check()
            write_shared(path, wait.question)
        except OSError as error:
            remedy = shared_folder_hint(path, error)
            raise EngineError(
                f"'{path.parent}' cannot be written ({error.strerror}). Free disk space, correct its "
                f"permissions, or reconnect the share{remedy}"
            ) from error


@dataclass(slots=True)
class _FolderWait:
    """One request of a transport, and what was found instead of its reply."""

    transport: FolderTransport
    site: str
    part: SiteMailbox
    number: str
    question: bytes
    _said: dict[str, str] = field(default_factory=dict)

    def wait(self) -> bytes:
        """Look until the reply is there."""
        pace, until = Backoff(self.transport.poll), time.monotonic() + self.transport.timeout
        while (answer := self.poll()) is None:
            self._read_note()
            if time.monotonic() > until:
                request = self.part.request(self.number)
                notes = "".join(f". {said}" for said in self._said.values())
                raise EngineError(
                    f"'{self.site}' did not answer within {self.transport.timeout:g} s; '{request.name}' "
                    f"waits for it in '{request.parent}'{notes}",
                    remedy=SERVED,
                )
            pace.rest()
        return answer

    def poll(self) -> bytes | None:
        """Read the reply; None if it is absent or out of reach for now."""
        for path in (self.part.reply(self.number), self.part.done(self.number)):
            try:
                with open_regular(path) as file:
                    return open_reply(file, self._pinned, self.site, self.number, f"'{path}'")
            except PermissionError as error:
                raise EngineError(
                    f"'{path}' cannot be read ({error.strerror}){shared_folder_hint(path, error)}"
                ) from error
            except OSError:
                continue
            except SecurityError as error:
                self._pass_over(path, error)
        return None

    @property
    def _pinned(self) -> str:
        return self.transport.fingerprints[self.site]

    def _pass_over(self, path: Path, error: SecurityError) -> None:
        """Put aside a file that is not a reply of the site; SecurityError if another key has signed it."""
        foreign = self._is_foreign(path)
        moved = self.part.put_aside(path)
        if foreign:
            raise error
        where = "it was put aside, and the site will write its reply again" if moved else "remove it"
        self._write_status(path.name, f"The file with the name of its reply was invalid ({error}); {where}.")

    def _is_foreign(self, path: Path) -> bool:
        """Return whether keys other than the pinned ones signed a file."""
        try:
            with open_regular(path) as file:
                keys, _ = signer_of(file, f"'{path}'")
        except (OSError, SecurityError):
            return False
        return keys.digest.hex() != normalize_fingerprint(self._pinned)

    def _read_note(self) -> None:
        """Act on the site's note on this request; EngineError if the site refuses the request."""
        path = self.part.note(self.number)
        try:
            with open_regular(path) as file:
                note = open_note(file, self._pinned, self.site, self.number, self.question, f"'{path}'")
        except OSError:
            return
        except SecurityError as error:
            self._pass_over(path, error)
            return
        if note is None:
            return
        if note.why == UNTRUSTED:
            raise untrusted_note(self.site, self._pinned, self.transport.identity)
        self._write_status(note.why, STATUS_OF_NOTES[note.why])

    def _write_status(self, what: str, said: str) -> None:
        if what not in self._said:
            self._said[what] = said
            warn(f"'{self.site}': {said}", FedstatWarning)


def serve_folder(
    site: Site,
    folder: str | Path,
    coordinator: str,
    *,
    poll: float = 0.05,
    stop: Callable[[], bool] = lambda: False,
    refused: Callable[[str], None] = lambda _: None,
) -> None:
    """Answer requests in the site's part of a :class:`FolderTransport`'s folder until `stop` returns true.

    Requests that the `coordinator` with this fingerprint did not sign are skipped. `refused` is called once
    for every file that was skipped or cannot be written, with the reason. `stop` is called before every look.
    Two looks are `poll` seconds apart, and further apart when nothing comes for long.
    """
    served, inbox = (
        PinnedSite(SiteServer(site), coordinator),
        Inbox(SiteMailbox(Path(folder, site.name)), refused),
    )
    pace = Backoff(poll)
    while not stop():
        pace.rest(inbox.poll(served))
