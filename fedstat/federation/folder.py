"""Signed files in a folder: the slowest carrier, and the one that everybody can inspect.

For sites without open ports. Every question and every answer is one file, signed by who wrote it; people or a
synchronised folder move them. Nothing is deleted, so that the folder is the record of what passed::

    <folder>/<site>/asks/<number>.ask       signed by the coordinator
    <folder>/<site>/replies/<number>.reply  signed by the site
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.ledger import COORDINATOR
from fedstat.federation.remote import SiteServer, write_whole
from fedstat.federation.secure.envelopes import Envelope, open_signed, sign
from fedstat.federation.secure.keys import Identity
from fedstat.federation.site import Site


@dataclass(slots=True)
class FolderCarrier:
    """Writes questions into a folder and waits for the answers.

    Parameters
    ----------
    folder : path
    identity : Identity
        The coordinator's.
    fingerprints : mapping of str to str
        Of the sites' keys.
    timeout : float
        Seconds until a site counts as silent.
    poll : float
        Seconds between two looks.
    """

    folder: Path
    identity: Identity
    fingerprints: Mapping[str, str]
    timeout: float = 3600.0
    poll: float = 0.05
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def carry(self, site: str, request: bytes) -> bytes:
        """Write one question, and read its answer.

        Raises
        ------
        EngineError
            The site was silent for too long, or the folder cannot be written.
        SecurityError
            The answer is not signed by the site, or belongs to another question.
        """
        number = f"{time.time_ns():020d}-{next(self._numbers):06d}-{secrets.token_hex(4)}"
        asks, replies = (Path(self.folder, site, name) for name in ("asks", "replies"))
        path = replies / f"{number}.reply"
        try:
            for place in (asks, replies):
                place.mkdir(parents=True, exist_ok=True)
            write_whole(
                asks / f"{number}.ask", sign(self.identity, Envelope(COORDINATOR, site, number, request))
            )
        except OSError as error:
            raise EngineError(
                f"'{asks}' cannot be written ({error.strerror}); make room or mend its permissions"
            ) from error
        until = time.monotonic() + self.timeout
        while not path.exists():
            if time.monotonic() > until:
                raise EngineError(
                    f"'{site}' did not answer within {self.timeout:g} s; '{number}.ask' waits for it in "
                    f"'{asks}'. Is 'fedstat site serve' running there?"
                )
            time.sleep(self.poll)
        envelope = open_signed(path.read_bytes(), self.fingerprints[site], f"'{path}'")
        if (envelope.sender, envelope.number) != (site, number):
            raise SecurityError(f"'{path}': answers another question, or in another's name")
        return envelope.payload


def serve_folder(
    site: Site,
    folder: str | Path,
    coordinator: str,
    *,
    poll: float = 0.05,
    stop: Callable[[], bool] = lambda: False,
    refused: Callable[[str], None] = lambda _: None,
) -> None:
    """Answer the questions in a folder until told to stop.

    Parameters
    ----------
    site : Site
    folder : path
        That of :class:`FolderCarrier`; of it the subfolder with the site's name.
    coordinator : str
        Fingerprint of the coordinator's key; questions that it did not sign are passed over.
    poll : float
        Seconds between two looks.
    stop : callable
        Asked before every look.
    refused : callable
        Told of every file that was passed over, and why.
    """
    server, passed = SiteServer(site), set[str]()
    asks, replies = (Path(folder, site.name, name) for name in ("asks", "replies"))
    for place in (asks, replies):
        place.mkdir(parents=True, exist_ok=True)
    while not stop():
        answered = {path.stem for path in replies.glob("*.reply")}
        waiting = sorted(path for path in asks.glob("*.ask") if path.stem not in answered | passed)
        for path in waiting:
            try:
                envelope = open_signed(path.read_bytes(), coordinator, f"'{path.name}'")
                if (envelope.receiver, envelope.number) != (site.name, path.stem):
                    raise SecurityError(f"'{path.name}': meant for another site, or under another number")
            except SecurityError as error:
                passed.add(path.stem)
                refused(str(error))
                continue
            payload = server.answer(envelope.number, envelope.payload)
            answer = Envelope(site.name, COORDINATOR, envelope.number, payload)
            write_whole(replies / f"{path.stem}.reply", sign(site.trust.identity, answer))
        if not waiting:
            time.sleep(poll)
