"""Rosters: the sites of a federation, signed by the coordinator and by every site.

A roster has a number, the fingerprints of coordinator and sites, of removed keys, and the digests of all
earlier rosters. One fingerprint, the digest of all this, is compared by telephone; every owner's service has
checked that its own key is in it. So two owners who read out the same fingerprint have pinned each other's
correct keys, for any transport of the roster. A coordinator can still make two rosters, with keys of its own,
and read a different fingerprint to every owner; owners therefore compare it among themselves. In a session,
each site signs the roster that it has accepted together with its fresh key, so that two different rosters
with one number are found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fedstat.codec import Minimum, from_json, from_plain, to_json, to_plain
from fedstat.errors import Remedy, SecurityError
from fedstat.federation.crypto.keys import Identity, PublicIdentity, encode_parts, normalize_fingerprint
from fedstat.federation.state_formats import check_form

ROSTER, ACCEPTANCE, SHOWN = "fedstat roster 1", "fedstat acceptance 1", "fedstat roster shown 1"
LONGEST_ROSTER = 2**20
LONGEST_TEXT, DIGITS = 200, 64


@dataclass(frozen=True, slots=True)
class SignedText:
    """A signed record as its file has it, in hexadecimal digits what is bytes."""

    format: str
    content: Any
    keys: PublicIdentity
    signature: str


def _statement(form: str, content: Any) -> bytes:
    return encode_parts(form, json.dumps(content, sort_keys=True, ensure_ascii=False))


def sign_record(identity: Identity, form: str, record: Any) -> str:
    """Return the text of a record with the signature of an identity."""
    content = to_plain(record)
    signature = identity.signing.sign(_statement(form, content)).hex()
    return json.dumps(to_plain(SignedText(form, content, identity.public, signature)), indent=1) + "\n"


def open_record(text: str | bytes, form: str, where: str) -> tuple[Any, PublicIdentity]:
    """Return the content of a signed record, and the keys that signed it, whose owner is not checked here."""
    try:
        found = from_json(SignedText, text, where, SecurityError)
        signature = bytes.fromhex(found.signature)
    except ValueError as error:
        raise SecurityError(f"{where}: no {form}") from error
    if not found.keys.has_signed(_statement(found.format, found.content), signature):
        raise SecurityError(f"{where}: no {form}, or altered since it was signed")
    check_form(found.format, form, where)  # the version that a signature covers
    if found.format != form:
        raise SecurityError(f"{where}: no {form}")
    return found.content, found.keys


@dataclass(frozen=True, slots=True)
class Roster:
    """The participants: fingerprints by site, and those of revoked keys, with the name of each.

    `earlier` are the digests of the rosters before, from the first on; `layout` is that of the federation.
    """

    name: str
    number: Annotated[int, Minimum(1)]
    date: str
    layout: str
    coordinator: str
    sites: Mapping[str, str]
    revoked: Mapping[str, str] = field(default_factory=dict)
    earlier: tuple[str, ...] = ()

    def check(self) -> None:
        """Require texts that can be shown, fingerprints, and as many earlier rosters as there were."""
        fingerprints = [self.coordinator, *self.sites.values(), *self.revoked, *self.earlier]
        texts = [self.name, self.date, self.layout, *self.sites, *self.revoked.values(), *fingerprints]
        if not all(text.isprintable() and 0 < len(text) <= LONGEST_TEXT for text in texts):
            raise ValueError("a text that cannot be shown")
        if any(
            len(digits) != DIGITS or set(digits) - set("0123456789abcdef")
            for digits in map(normalize_fingerprint, fingerprints)
        ):
            raise ValueError("a fingerprint")
        if len(set(map(normalize_fingerprint, self.sites.values()))) < len(self.sites):
            raise ValueError("one key under two names")
        if len(self.earlier) != self.number - 1:
            raise ValueError("the number")

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal digits."""
        return hashlib.sha256(_statement(ROSTER, to_plain(self))).hexdigest()

    @property
    def fingerprint(self) -> str:
        """The digest in groups, to be read out."""
        return " ".join(self.digest[i : i + 4] for i in range(0, DIGITS, 4))

    def digest_of(self, number: int) -> str:
        """Digest of the roster of a number up to this one."""
        return [*self.earlier, self.digest][number - 1]

    def sign(self, identity: Identity) -> str:
        """Text of its file, signed by the coordinator."""
        return sign_record(identity, ROSTER, self)

    @classmethod
    def read(cls, text: str | bytes, where: str) -> Roster:
        """Read what :meth:`sign` wrote; SecurityError where the coordinator that it names did not sign it."""
        content, keys = open_record(text, ROSTER, where)
        roster = from_plain(cls, content, where, SecurityError)
        if normalize_fingerprint(roster.coordinator) != keys.digest.hex():
            raise SecurityError(f"{where}: not signed by the coordinator that it names")
        return roster


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A site's word that its owner has accepted a roster."""

    site: str
    number: Annotated[int, Minimum(1)]
    digest: str
    date: str

    def sign(self, identity: Identity) -> str:
        """Text of its file, signed by the site."""
        return sign_record(identity, ACCEPTANCE, self)

    @classmethod
    def read(cls, text: str | bytes, where: str, sites: Mapping[str, str], roster: Roster) -> Acceptance:
        """Read what :meth:`sign` wrote; SecurityError where it is of no site, or of another roster."""
        content, keys = open_record(text, ACCEPTANCE, where)
        found = from_plain(cls, content, where, SecurityError)
        if normalize_fingerprint(sites.get(found.site, "")) != keys.digest.hex():
            raise SecurityError(f"{where}: not signed by a site of this federation under its name")
        if found.number > roster.number or found.digest != roster.digest_of(found.number):
            raise SecurityError(f"{where}: '{found.site}' has accepted a roster that was not made here")
        return found


@dataclass(frozen=True, slots=True)
class AnnouncedRoster:
    """A site's announcement of its new key, with the accepted roster, signed for the session."""

    announced: str
    number: int
    digest: str
    signature: str

    def statement(self, session: str, site: str) -> bytes:
        """Return what the signature is over."""
        return encode_parts(SHOWN, session, site, str(self.number), self.digest)


def announce_roster(
    identity: Identity, session: str, site: str, rosters: Mapping[str, str], announced: str
) -> str:
    """Add the last roster that a site has accepted, as digests by number, to its announcement."""
    if not rosters:
        return announced
    number = max(map(int, rosters))
    shown = AnnouncedRoster(announced, number, rosters[str(number)], "")
    signature = identity.signing.sign(shown.statement(session, site)).hex()
    return to_json(AnnouncedRoster(announced, number, shown.digest, signature))


def _announced(text: str, where: str) -> AnnouncedRoster | None:
    return from_json(AnnouncedRoster, text, where, SecurityError) if '"announced"' in text else None


def strip_roster(text: str) -> str:
    """Take what a site announced of its key alone."""
    shown = _announced(text, "what a site announced")
    return text if shown is None else shown.announced


def check_rosters(
    site: str,
    session: str,
    rosters: Mapping[str, str],
    public: Mapping[str, PublicIdentity],
    announced: Mapping[str, str],
) -> dict[str, str]:
    """Compare the rosters of others with those of this site; return the announcements without them.

    Owners accept a new roster one after another. A different number therefore has the same history only if
    this site knows it; the site with the later roster checks the other. SecurityError if a number has another
    roster, or if there is none, since the transport may have removed it.
    """
    bare = {name: strip_roster(text) for name, text in announced.items()}
    for name, text in announced.items() if rosters else ():
        shown = _announced(text, f"{site}: the roster of '{name}'")
        if shown is None:
            raise SecurityError(
                f"{site}: '{name}' shows no roster, and this site has accepted one",
                remedy=Remedy("fedstat site accept FOLDER", "its owner enters it by '{call}'"),
            )
        try:
            signature = bytes.fromhex(shown.signature)
        except ValueError:
            signature = b""
        if name not in public or not public[name].has_signed(shown.statement(session, name), signature):
            raise SecurityError(f"{site}: the roster that '{name}' shows was replaced on its way")
        known = rosters.get(str(shown.number), shown.digest)
        if known != shown.digest:
            raise SecurityError(
                f"{site}: '{name}' has accepted another roster {shown.number} than this site: two were made "
                "under one number. Compare its fingerprint with each other by telephone, and do not go on "
                "through this coordinator before it is known how"
            )
    return bare
