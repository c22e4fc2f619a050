"""Transport by signed files in a shared folder: the coordinator's end.

For sites without open ports. Every question and every answer is one file, signed by who wrote it; people or a
synchronised folder move them. Nothing is deleted, so that the folder is the record of what passed; where
everything lies, says :mod:`fedstat.federation.transport.mailbox`.

A question that is asked again, by whoever goes on after a fault, has the same number, and finds its answer.

Who can write to the folder can stop messages, and nothing else: whatever is no plain file with the signature
of the pinned key is passed over before it is parsed, and no link is followed. What lies in the place of an
answer is put aside, so that the site writes it once more; what another key has signed ends the wait at once,
because the site may have that key.
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
    """Writes the coordinator's questions into a folder and waits for the answers.

    A site, of those whose `fingerprints` are known, counts as silent after `timeout` seconds; `poll` seconds
    pass between two looks, and more when an answer takes long.
    """

    folder: Path
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float = 3600.0
    poll: float = 0.05
    bundles: ClassVar[bool] = True
    _seen: set[str] = field(default_factory=set)

    def carry(self, site: str, request: bytes) -> bytes:
        """Write one question, and read its answer.

        EngineError where the site was silent for too long or does not take this coordinator's questions, or
        the folder cannot be used; SecurityError where another key has signed the answer.
        """
        number, question = sign_request(self.identity, site, request)
        wait = _FolderWait(self, site, SiteMailbox(Path(self.folder, site)), number, question)
        # the answer may be there: an analysis that was interrupted asks the same question again
        answer = wait.look()
        if answer is None:
            self._write(wait)
            answer = wait.wait()
        wait.part.settle(number)
        return answer

    def _write(self, wait: _FolderWait) -> None:
        part, path = wait.part, wait.part.ask(wait.number)
        try:
            if wait.site not in self._seen:
                # Not again: where a share is gone, its empty place is not the folder.
                part.make()
                self._seen.add(wait.site)
            # before every question: somebody may have put a link in the place of a folder since
            part.check()
            write_shared(path, wait.question)
        except OSError as error:
            remedy = shared_folder_hint(path, error)
            raise EngineError(
                f"'{path.parent}' cannot be written ({error.strerror}); make room, mend its permissions, or "
                f"connect the share again{remedy}"
            ) from error


@dataclass(slots=True)
class _FolderWait:
    """One question of a carrier, and what was found instead of its answer."""

    carrier: FolderTransport
    site: str
    part: SiteMailbox
    number: str
    question: bytes
    _said: dict[str, str] = field(default_factory=dict)

    def wait(self) -> bytes:
        """Look until the answer is there."""
        pace, until = Backoff(self.carrier.poll), time.monotonic() + self.carrier.timeout
        while (answer := self.look()) is None:
            self._read_note()
            if time.monotonic() > until:
                ask = self.part.ask(self.number)
                raise EngineError(
                    f"'{self.site}' did not answer within {self.carrier.timeout:g} s; '{ask.name}' waits for "
                    f"it in '{ask.parent}'. Is 'fedstat site serve' running there?"
                    + "".join(f" {said}" for said in self._said.values())
                )
            pace.rest()
        return answer

    def look(self) -> bytes | None:
        """Read the answer; None where it is absent, or out of reach for now."""
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
        return self.carrier.fingerprints[self.site]

    def _pass_over(self, path: Path, error: SecurityError) -> None:
        """Put aside what is no answer of the site; SecurityError where another key has signed it."""
        foreign = self._is_foreign(path)
        moved = self.part.put_aside(path)
        if foreign:
            raise error
        where = "it was put aside, and the site writes its answer again" if moved else "remove it"
        self._say(path.name, f"What lay in the place of its answer was none ({error}); {where}.")

    def _is_foreign(self, path: Path) -> bool:
        """Whether keys other than the pinned ones signed a file."""
        try:
            with open_regular(path) as file:
                keys, _ = signer_of(file, f"'{path}'")
        except (OSError, SecurityError):
            return False
        return keys.digest.hex() != normalize_fingerprint(self._pinned)

    def _read_note(self) -> None:
        """Heed what the site says of this question; EngineError where it does not take it."""
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
            raise untrusted_note(self.site, self._pinned, self.carrier.identity)
        self._say("note", "It says that it answers nothing for now: its owner finds why in the site's log.")

    def _say(self, what: str, said: str) -> None:
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
    """Answer the questions in the site's part of a :class:`FolderTransport`'s folder until told to stop.

    Questions that the `coordinator` with this fingerprint did not sign are passed over; `refused` is told
    once of every file that was passed over or cannot be written, and why. `stop` is asked before every look,
    with `poll` seconds between two looks, and more when nothing comes for long.
    """
    served, inbox = (
        PinnedSite(SiteServer(site), coordinator),
        Inbox(SiteMailbox(Path(folder, site.name)), refused),
    )
    pace = Backoff(poll)
    while not stop():
        pace.rest(inbox.look(served))
