"""Identities of sites, their text form, pairwise secrets and key streams."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedstat.errors import PinError, SecurityError
from fedstat.federation.files import read_private, write_private
from fedstat.federation.state_formats import check_form
from fedstat.typing import Ints

# ----------------------------------------------------------------------------------------------------
# Keys and signatures as text: a JSON object of hexadecimal digits under the name of its form.


def format_key_text(form: str, **parts: bytes) -> str:
    """Text that :func:`parse_key_text` reads."""
    return json.dumps({"format": form, **{name: part.hex() for name, part in parts.items()}})


def parse_key_text(
    text: str | bytes, what: str, form: str, lengths: Mapping[str, int], stored: bool = False
) -> dict[str, bytes]:
    """Read a JSON object of exactly these bytes; the error never quotes it, it may be a private key.

    EngineError if it is `stored` in one's own files and a later version wrote it. Texts of others are not
    trusted to name their version: all that is wrong with them is a SecurityError.
    """
    try:
        fields = json.loads(text.decode() if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        fields = None
    if stored and isinstance(fields, dict):
        check_form(fields.get("format"), form, what)
    if not isinstance(fields, dict) or fields.keys() != {"format", *lengths} or fields["format"] != form:
        raise SecurityError(f"{what} is malformed: expected '{form}' with {', '.join(lengths)}")
    return {name: _unhex(fields[name], length, what) for name, length in lengths.items()}


def _unhex(text: Any, length: int, what: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except (TypeError, ValueError):
        value = b""
    if len(value) != length or len(text) != 2 * length:
        raise SecurityError(f"{what} is malformed: expected {length} bytes in hexadecimal digits")
    return value


# ----------------------------------------------------------------------------------------------------
# Uniform words from a key: the ChaCha20 key stream (RFC 8439, section 2.4), read from any place.

WORD_BYTES = 8
CIPHER_BLOCK = 64
LARGEST_STREAM = 2**38
"""Bytes of one stream: the cipher counts its blocks of 64 bytes with 32 bits."""


def keystream(key: bytes, nonce: bytes, count: int, start: int = 0) -> Ints:
    """Return words of 64 bits of the stream under a key of 32 bytes and a nonce of 12 bytes: (count,).

    Word number i, from `start`, is the little-endian word of bytes 8i to 8i + 7; the block counter is 0 at
    the first. One nonce serves one purpose: two values under the same words reveal their difference.
    """
    return KeyStream(key).words(nonce, count, start)


class KeyStream:
    """The key stream under one key, which is read at one place at a time; see :func:`keystream`."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, nonce: bytes, count: int, start: int = 0) -> Ints:
        """Return words of 64 bits of the stream under a nonce of 12 bytes: (count,)."""
        block, skip = divmod(start * WORD_BYTES, CIPHER_BLOCK)
        self._cipher.reset_nonce(block.to_bytes(4, "little") + nonce)
        stream = np.empty(skip // WORD_BYTES + count, "<i8")
        self._cipher.update_into(bytes(stream.nbytes), stream.view(np.uint8).data)
        return stream[skip // WORD_BYTES :].astype(np.int64, copy=False)


def random_bytes(key: bytes) -> Callable[[int], bytes]:
    """Return a source of random bytes that are the same for a key of 32 bytes, which serves nothing else."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda count: cipher.update(bytes(count))


# ----------------------------------------------------------------------------------------------------
# Identities of sites, and secrets that two of them share and the coordinator does not have.
#
# A site has a lasting :class:`Identity`; the others hold its fingerprint, which they compared by telephone or
# on paper. For every session each site offers a fresh X25519 key (RFC 7748), signed with Ed25519 (RFC 8032)
# over the session, its own name, the names and fingerprints of all sites, and that key (the signed
# Diffie-Hellman exchange of Krawczyk 2003, SIGMA, doi:10.1007/978-3-540-45146-4_24). Sites a and b then have
# ::
#
#     HKDF-SHA256(X25519(fresh_a, fresh_b) || X25519(lasting_a, lasting_b),
#                 salt = SHA-256(session, every name, fingerprint and fresh key), info = (purpose, a, b))
#
# (RFC 5869). The first part makes old traffic safe from a later theft of identities, the second keeps the
# secret even where one site's source of fresh randomness or the check of a signature fails. Two sites that
# saw different keys of anyone in the session have different salts, hence no common secret.
#
# The coordinator relays all public keys, and may replace, withhold or repeat them, in collusion with any
# sites but the two. A replaced key gives a :class:`~fedstat.errors.SecurityError` about the signature,
# provided that the fingerprints did not come through the coordinator; a repeated old key reveals the secret
# to no one. Not protected: who communicates with whom, and a site whose folder was stolen, from then on, and
# in the sessions that it keeps there. See :mod:`fedstat.federation.crypto`.

KEY_BYTES = 32
SIGNATURE_BYTES = 64
LONGEST_FILE = 4096
MOST_SECRETS = 32
"""Secrets of an identity that are derived once."""
TWO_KEYS: Mapping[str, int] = {"signing": KEY_BYTES, "agreement": KEY_BYTES}
ANNOUNCED: Mapping[str, int] = {"sites": KEY_BYTES, "key": KEY_BYTES, "signature": SIGNATURE_BYTES}


def encode_parts(*parts: str | bytes) -> bytes:
    """Join parts so that no two lists of parts give the same bytes: each is preceded by its length."""
    pieces = []
    for part in parts:
        piece = part.encode() if isinstance(part, str) else part
        pieces += [len(piece).to_bytes(8, "little"), piece]
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class PublicIdentity:
    """Public identity of a site: its Ed25519 and X25519 public keys, 32 bytes each."""

    signing: bytes
    agreement: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of both public keys."""
        return hashlib.sha256(encode_parts("fedstat identity 1", self.signing, self.agreement)).digest()

    @property
    def fingerprint(self) -> str:
        """The digest in 16 groups of four hexadecimal digits, to be read out or printed."""
        text = self.digest.hex()
        return " ".join(text[i : i + 4] for i in range(0, len(text), 4))

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether a signature over a message is that of these keys."""
        try:
            Ed25519PublicKey.from_public_bytes(self.signing).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads."""
        return format_key_text("fedstat public identity 1", signing=self.signing, agreement=self.agreement)

    @classmethod
    def from_json(cls, text: str | bytes) -> PublicIdentity:
        """Read a public identity; SecurityError if the text is invalid."""
        return cls(**parse_key_text(text, "a public identity", "fedstat public identity 1", TWO_KEYS))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Identity:
    """The long-term private keys of one site; they never leave it."""

    signing: Ed25519PrivateKey
    agreement: X25519PrivateKey
    public: PublicIdentity = field(init=False)
    _secrets: dict[str, bytes] = field(init=False, default_factory=dict)

    def __repr__(self) -> str:
        return f"Identity({self.public.fingerprint})"

    @classmethod
    def generate(cls) -> Identity:
        """Draw new keys from the operating system."""
        return cls(Ed25519PrivateKey.generate(), X25519PrivateKey.generate())

    def __post_init__(self) -> None:
        keys = self.signing.public_key(), self.agreement.public_key()
        object.__setattr__(self, "public", PublicIdentity(*[key.public_bytes_raw() for key in keys]))

    def secret(self, purpose: str) -> bytes:
        """Derive 32 secret bytes, the same for a purpose as long as the keys last."""
        secret = self._secrets.get(purpose)
        if secret is None:
            message = encode_parts("fedstat secret 1", purpose)
            secret = hmac.digest(self.signing.private_bytes_raw(), message, "sha256")
            if len(self._secrets) < MOST_SECRETS:
                self._secrets[purpose] = secret
        return secret

    def save(self, path: str | Path) -> None:
        """Write the keys to a new file that its owner alone may read (mode 0600).

        A file that exists is a SecurityError: an identity that is overwritten is lost, and with it what
        others pinned.
        """
        keys = (self.signing.private_bytes_raw(), self.agreement.private_bytes_raw())
        text = format_key_text("fedstat identity 1", signing=keys[0], agreement=keys[1])
        try:
            write_private(path, text.encode())
        except FileExistsError as error:
            raise SecurityError(f"'{path}' exists; choose another file, or move that one away") from error

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read what :meth:`save` wrote; SecurityError where others may read it, or it is no identity."""
        remedy = ", and generate a new identity if somebody may have read it"
        text = read_private(path, LONGEST_FILE, remedy=remedy)
        what = f"'{path}', expected to be an identity,"
        keys = parse_key_text(text, what, "fedstat identity 1", TWO_KEYS, stored=True)
        return cls(
            Ed25519PrivateKey.from_private_bytes(keys["signing"]),
            X25519PrivateKey.from_private_bytes(keys["agreement"]),
        )


def check_fingerprints(expected: Mapping[str, str], public: Mapping[str, PublicIdentity]) -> None:
    """Compare received keys with the agreed fingerprints, both by site.

    Spaces, colons and case of a fingerprint do not matter. The SecurityError says whose key differs, is
    missing, has no fingerprint to be compared with, or is that of two sites.
    """
    for names, problem in (
        (expected.keys() - public.keys(), "no key arrived from"),
        (public.keys() - expected.keys(), "no fingerprint is pinned for"),
    ):
        if names:
            raise PinError(f"{problem} {', '.join(sorted(names))}; every site of a session needs both")
    wrong = [
        f"'{name}' (pinned {expected[name]}, received {public[name].fingerprint})"
        for name in sorted(public)
        if normalize_fingerprint(expected[name]) != public[name].digest.hex()
    ]
    if wrong:
        raise PinError(
            f"not the pinned key: {'; '.join(wrong)}. Ask the site itself, not the coordinator, for its "
            "fingerprint"
        )
    digests = [key.digest for key in public.values()]
    twice = sorted(name for name, key in public.items() if digests.count(key.digest) > 1)
    if twice:
        raise SecurityError(f"{', '.join(twice)} have the same key; they count as one site")


class KeyAgreement:
    """One site's part in agreeing on the keys of one session.

    `pinned` are the fingerprints that were agreed of all sites of the session, its own among them, and
    `public` their identities, where they are known before :meth:`finish`. A key that is not the pinned one
    (:func:`pin`) is a SecurityError, and so is a list of which the site is no part, or all of it.
    """

    def __init__(
        self,
        identity: Identity,
        session: str,
        site: str,
        public: Mapping[str, PublicIdentity] | None,
        pinned: Mapping[str, str],
    ) -> None:
        if public is not None:
            check_fingerprints(pinned, public)
        digests = {name: normalize_fingerprint(fingerprint) for name, fingerprint in pinned.items()}
        if digests.get(site) != identity.public.digest.hex():
            raise SecurityError(f"{site}: the list of sites does not hold this site with its own key")
        if len(pinned) < 2 or not session:
            raise SecurityError(f"{site}: expected a named session of at least two sites")
        self.site, self.session, self.sites = site, session, tuple(sorted(pinned))
        self._identity = identity
        self._pinned = dict(pinned)
        self._public = dict(public or {})
        self._begin(X25519PrivateKey.generate())
        # From the pinned keys, which are known before any key has arrived: sites that pinned others differ.
        names = [part for name in self.sites for part in (name, digests[name])]
        self._roster = hashlib.sha256(encode_parts("fedstat sites 2", session, *names)).digest()

    def announce(self) -> str:
        """Sign the fresh key, for all other sites; SecurityError once the agreement is finished."""
        offered = self._open().public_key().public_bytes_raw()
        signature = self._identity.signing.sign(self._statement(self.site, offered))
        return format_key_text("fedstat agreement 1", sites=self._roster, key=offered, signature=signature)

    def finish(
        self, announcements: Mapping[str, str | bytes], public: Mapping[str, PublicIdentity] | None = None
    ) -> PairKeys:
        """Check what :meth:`announce` gave at each site, and derive the keys that are shared with each.

        The site's own may be among them. `public` are the identities of all sites, where they were not known
        before. SecurityError where one is not the pinned one, or an announcement is missing, of an unknown
        site, malformed, or not signed by the site's pinned key over this session, this list of sites and this
        key: nothing is derived then, and the right announcements may still be handed in.
        """
        fresh = self._open()
        if public is not None:
            try:
                check_fingerprints(self._pinned, public)
            except PinError as error:
                raise PinError(f"{self.site}: {error}") from None
            self._public = dict(public)
        others = set(self.sites) - {self.site}
        if others - announcements.keys() or announcements.keys() - set(self.sites):
            raise SecurityError(
                f"{self.site}: expected announcements of {', '.join(sorted(others))}; received those of "
                f"{', '.join(sorted(announcements)) or 'none'}"
            )
        offered = {name: self._verified(name, text) for name, text in announcements.items()}
        own = fresh.public_key().public_bytes_raw()
        if offered.setdefault(self.site, own) != own:
            raise SecurityError(f"{self.site}: its own announcement came back with another key")
        parts = [part for name in self.sites for part in (name, self._public[name].digest, offered[name])]
        transcript = hashlib.sha256(encode_parts("fedstat transcript 1", self.session, *parts)).digest()
        shared = {name: self._exchange(fresh, name, offered[name]) for name in sorted(others)}
        self._close()
        return PairKeys(self.site, self.session, transcript, shared)

    def _begin(self, fresh: X25519PrivateKey) -> None:
        self._fresh: X25519PrivateKey | None = fresh
        self._lock = Lock()

    def _close(self) -> None:
        with self._lock:
            self._open()
            self._fresh = None

    def _open(self) -> X25519PrivateKey:
        # A second object with the same keys would restart its counters and records of nonces.
        if self._fresh is None:
            raise SecurityError(f"{self.site}: this session's keys were derived already; start a new one")
        return self._fresh

    def _statement(self, site: str, offered: bytes) -> bytes:
        return encode_parts("fedstat agreement 1", self.session, site, self._roster, offered)

    def _verified(self, name: str, text: str | bytes) -> bytes:
        what = f"{self.site}: the announcement of '{name}'"
        found = parse_key_text(text, what, "fedstat agreement 1", ANNOUNCED)
        if found["sites"] != self._roster:
            raise SecurityError(f"{what} is for another session, or for another list of sites or keys")
        offered = found["key"]
        if not self._public[name].has_signed(self._statement(name, offered), found["signature"]):
            raise SecurityError(
                f"{what} has a wrong signature: it is that of another site, or the key was replaced on its "
                "way. Do not go on through this coordinator before it is known how"
            )
        return offered

    def _exchange(self, fresh: X25519PrivateKey, name: str, offered: bytes) -> bytes:
        # The order of the two secrets is the same at both sites: fresh keys first, then lasting ones.
        try:
            lasting = X25519PublicKey.from_public_bytes(self._public[name].agreement)
            first = fresh.exchange(X25519PublicKey.from_public_bytes(offered))
            return first + self._identity.agreement.exchange(lasting)
        except ValueError:
            raise SecurityError(f"{self.site}: a key of '{name}' is of low order: no secret") from None


class PairKeys:
    """The secrets that one site shares with each other site in one session.

    Each purpose is handed out once per peer, so that no two counters or records of nonces ever run over the
    same key. `transcript` is the SHA-256 of all that was agreed, `shared` the result of the Diffie-Hellman
    exchanges by peer. `sites` are all of the session, by default this one and its peers.
    """

    def __init__(
        self,
        site: str,
        session: str,
        transcript: bytes,
        shared: Mapping[str, bytes],
        sites: Sequence[str] = (),
    ) -> None:
        self.site, self.session = site, session
        self.peers = tuple(sorted(shared))
        self.sites = tuple(sorted(sites or (site, *shared)))
        self._transcript = transcript
        self._shared = dict(shared)
        self._taken: set[tuple[str, str]] = set()
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"PairKeys({self.site!r} with {', '.join(map(repr, self.peers))}, session {self.session!r})"

    def secret(self, peer: str, purpose: str, length: int = KEY_BYTES) -> bytes:
        """Key of `length` bytes, at most 8,160, for one purpose, the same at both sites.

        Different purposes give independent keys. SecurityError where there is no such peer, or the key was
        handed out before.
        """
        if peer not in self._shared:
            raise SecurityError(f"{self.site}: shares no key with '{peer}'; its peers are {list(self.peers)}")
        with self._lock:
            if (peer, purpose) in self._taken:
                raise SecurityError(
                    f"{self.site}: the key for '{purpose}' with '{peer}' was handed out before; keep what "
                    "uses it, or name another purpose"
                )
            self._taken.add((peer, purpose))
        info = encode_parts("fedstat pair 1", purpose, *sorted((self.site, peer)))
        return HKDF(SHA256(), length, self._transcript, info).derive(self._shared[peer])


@lru_cache(4096)
def normalize_fingerprint(fingerprint: str) -> str:
    """Digits of a fingerprint alone, without the spaces, colons and capitals that people write."""
    return "".join(fingerprint.replace(":", "").split()).lower()
