"""Signed files in a folder: the slowest carrier, and the one that everybody can inspect.

For sites without open ports. Every question and every answer is one file, signed by who wrote it; people or a
synchronised folder move them. Nothing is deleted, so that the folder is the record of what passed::

    <folder>/<site>/asks/<number>.ask       signed by the coordinator
    <folder>/<site>/replies/<number>.reply  signed by the site

A question that is asked again, by whoever goes on after a fault, has the same number, and finds its answer.

Who can write to the folder can stop messages, and nothing else: whatever is no plain file with the signature
of the pinned key is passed over before it is parsed, and no link is followed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.carry.remote import NUMBER_LENGTH, SiteServer
from fedstat.federation.carry.signed import answer_signed, open_answer, sign_question
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.door.site import Site
from fedstat.federation.files import check_folder, open_regular, write_whole

NUMBER = re.compile(f"[0-9a-f]{{{NUMBER_LENGTH}}}")
"""Names that questions have; a file of another name is nobody's question."""


@dataclass(slots=True)
class FolderCarrier:
    """Writes the coordinator's questions into a folder and waits for the answers.

    A site, of those whose `fingerprints` are known, counts as silent after `timeout` seconds; `poll` seconds
    pass between two looks.
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

        EngineError where the site was silent for too long, or the folder cannot be written; SecurityError
        where the answer is not signed by the site, or belongs to another question.
        """
        number, question = sign_question(self.identity, site, request)
        asks, replies = (Path(self.folder, site, name) for name in ("asks", "replies"))
        ask, reply = asks / f"{number}.ask", replies / f"{number}.reply"
        # the answer may be there: an analysis that was interrupted asks the same question again
        answer = self._read(site, reply)
        if answer is None:
            self._write(site, ask, question)
            answer = self._wait(site, reply, ask)
        return answer

    def _write(self, site: str, path: Path, question: bytes) -> None:
        try:
            if site not in self._seen:
                # Not again: where a share is gone, its empty place is not the folder.
                for name in ("asks", "replies"):
                    Path(self.folder, site, name).mkdir(parents=True, exist_ok=True)
                self._seen.add(site)
            # before every question: somebody may have put a link in the place of a folder since
            for place in (path.parent.parent, path.parent):
                check_folder(place)
            write_whole(path, question)
        except OSError as error:
            raise EngineError(
                f"'{path.parent}' cannot be written ({error.strerror}); make room, mend its permissions, or "
                "connect the share again"
            ) from error

    def _wait(self, site: str, path: Path, ask: Path) -> bytes:
        until = time.monotonic() + self.timeout
        while (answer := self._read(site, path)) is None:
            if time.monotonic() > until:
                raise EngineError(
                    f"'{site}' did not answer within {self.timeout:g} s; '{ask.name}' waits for it in "
                    f"'{ask.parent}'. Is 'fedstat site serve' running there?"
                )
            time.sleep(self.poll)
        return answer

    def _read(self, site: str, path: Path) -> bytes | None:
        """Read an answer; None where it is absent, or out of reach for now."""
        try:
            with open_regular(path) as file:
                return open_answer(file, self.fingerprints[site], site, path.stem, f"'{path}'")
        except OSError:
            return None


def serve_folder(
    site: Site,
    folder: str | Path,
    coordinator: str,
    *,
    poll: float = 0.05,
    stop: Callable[[], bool] = lambda: False,
    refused: Callable[[str], None] = lambda _: None,
) -> None:
    """Answer the questions in the site's part of a :class:`FolderCarrier`'s folder until told to stop.

    Questions that the `coordinator` with this fingerprint did not sign are passed over; `refused` is told
    once of every file that was passed over or cannot be written, and why. `stop` is asked before every look,
    with `poll` seconds between two looks.
    """
    server, inbox = SiteServer(site), Inbox(Path(folder), site.name, refused)

    def answer(question: IO[bytes], where: str, number: str) -> bytes:
        return answer_signed(server, question, coordinator, where, number)

    while not stop():
        if not inbox.look(answer):
            time.sleep(poll)


@dataclass(slots=True)
class Inbox:
    """A site's part of a :class:`FolderCarrier`'s folder; `refused` is told once of every file, as above."""

    folder: Path
    site: str
    refused: Callable[[str], None]
    _passed: set[tuple[str, int]] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for place in (self.asks, self.replies):
            place.mkdir(parents=True, exist_ok=True)

    @property
    def asks(self) -> Path:
        """Where questions come."""
        return self.folder / self.site / "asks"

    @property
    def replies(self) -> Path:
        """Where answers go."""
        return self.folder / self.site / "replies"

    def look(self, answer: Callable[[IO[bytes], str, str], bytes]) -> bool:
        """Have what waits answered, given by file, place and number; whether there was anything."""
        busy = False
        for path in self._unanswered():
            try:
                # with its time, so that a file which was mended is looked at again
                look = (path.name, path.lstat().st_mtime_ns)
                if look not in self._passed:
                    self._answer(path, answer)
                    busy = True
            except SecurityError as error:
                self._passed.add(look)
                self._tell_once(path.name, str(error))
            except OSError as error:
                # The server holds the answer: it is written at a later look.
                self._tell_once(
                    path.name, f"'{path.name}': its answer cannot be written yet ({error.strerror})"
                )
        return busy

    def _tell_once(self, name: str, problem: str) -> None:
        # Strangers can change a file as often as they like; the log is not theirs to fill.
        if name not in self._told:
            self._told.add(name)
            self.refused(problem)

    def _unanswered(self) -> list[Path]:
        """Questions without an answer, in the order of their numbers; none while a folder is a link."""
        try:
            for place in (self.asks.parent, self.asks, self.replies):
                check_folder(place)
        except SecurityError as error:
            self._tell_once("", str(error))
            return []
        answered = {path.stem for path in self.replies.glob("*.reply")}
        return sorted(
            path
            for path in self.asks.glob("*.ask")
            if NUMBER.fullmatch(path.stem) and path.stem not in answered
        )

    def _answer(self, path: Path, answer: Callable[[IO[bytes], str, str], bytes]) -> None:
        """Have one question answered, unless it was answered before."""
        reply = self.replies / f"{path.stem}.reply"
        if reply.exists():
            return
        with open_regular(path) as file:
            content = answer(file, f"'{path.name}'", path.stem)
        write_whole(reply, content)
