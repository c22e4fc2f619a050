"""Notes that a site leaves where it does not answer, so that whoever waits knows why at once.

A note is in fixed words, and signed by the site about one question, as it was signed by whoever asked: a note
that an intruder wrote is not believed, and an old one does not hold for a question that is asked again. Its
number is not that of an answer, so that neither can be put in the place of the other. Whoever is not answered
learns that the site takes no question that is signed with this key, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Literal

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.account.entry import COORDINATOR
from fedstat.federation.crypto.envelopes import Envelope, open_signed, sign, signer_of
from fedstat.federation.crypto.keys import Identity, plain_fingerprint
from fedstat.records import from_json, to_json

UNTRUSTED: Literal["untrusted"] = "untrusted"
CLOSED: Literal["closed"] = "closed"


@dataclass(frozen=True, slots=True)
class SiteNote:
    """Why a question is not answered: its key is not that of the coordinator; or nothing is, for now.

    `question` is the digest of what was signed, `key` the fingerprint of who signed it.
    """

    why: Literal["untrusted", "closed"]
    question: str
    key: str

    @classmethod
    def on(cls, question: bytes | IO[bytes], coordinator: str, where: str) -> SiteNote:
        """Make out the note on a question; SecurityError where nobody signed it."""
        keys, digest = signer_of(question, where)
        known = bool(coordinator) and plain_fingerprint(coordinator) == keys.digest.hex()
        return cls(CLOSED if known else UNTRUSTED, digest, keys.fingerprint)

    def sign(self, identity: Identity, site: str, number: str) -> bytes:
        """Bytes of the note, under the site's signature."""
        return sign(identity, Envelope(site, COORDINATOR, _numbered(number), to_json(self).encode()))


def open_note(
    data: bytes | IO[bytes], fingerprint: str, site: str, number: str, question: bytes, where: str
) -> SiteNote | None:
    """Read the note of a site on a question; None where it is on an earlier one of the same number.

    SecurityError where the site did not sign it.
    """
    envelope = open_signed(data, fingerprint, where)
    if (envelope.sender, envelope.number) != (site, _numbered(number)):
        raise SecurityError(f"{where}: no note on this question")
    note = from_json(SiteNote, envelope.payload, where, SecurityError)
    # the key as well: what this coordinator signed can be signed with another one, and put in its place
    keys, digest = signer_of(question, where)
    return note if (note.question, note.key) == (digest, keys.fingerprint) else None


def untrusted(site: str, fingerprint: str, coordinator: Identity) -> EngineError:
    """Say that a site, with this key, takes no questions of a coordinator."""
    return EngineError(
        f"'{site}', whose key is {fingerprint}, takes no questions that are signed with the key of this "
        f"coordinator, {coordinator.public.fingerprint}: its owner has pinned another one. Compare that "
        "fingerprint by telephone; then, at the institution: fedstat site pin FOLDER CARD, with the card of "
        "this coordinator"
    )


def _numbered(number: str) -> str:
    return f"note on {number}"
