"""Signed messages: who wrote them is known, and nothing in them can be altered."""

from __future__ import annotations

import pytest

from fedstat.errors import SecurityError
from fedstat.federation.crypto.envelopes import Envelope, open_envelope, sign_envelope
from fedstat.federation.crypto.keys import Identity

IDENTITY = Identity.generate()
FINGERPRINT = IDENTITY.public.fingerprint
SIGNED = sign_envelope(
    IDENTITY, Envelope("coordinator", "A", "17", b"a question", "2026-01-01T00:00:00+00:00")
)


def test_what_was_written_is_read():
    envelope = open_envelope(SIGNED, FINGERPRINT, "here")
    assert envelope == Envelope("coordinator", "A", "17", b"a question", "2026-01-01T00:00:00+00:00")


@pytest.mark.parametrize("bit", [0, 7])
def test_no_byte_can_be_altered(bit):
    for at in range(len(SIGNED)):
        altered = bytearray(SIGNED)
        altered[at] ^= 1 << bit
        with pytest.raises(SecurityError):
            open_envelope(bytes(altered), FINGERPRINT, "here")


def test_nothing_can_be_cut_off_or_put_behind():
    for length in range(len(SIGNED)):
        with pytest.raises(SecurityError):
            open_envelope(SIGNED[:length], FINGERPRINT, "here")
    with pytest.raises(SecurityError, match="altered"):
        open_envelope(SIGNED + b"\0", FINGERPRINT, "here")


def test_another_key_is_refused():
    with pytest.raises(SecurityError, match="not the pinned key"):
        open_envelope(SIGNED, Identity.generate().public.fingerprint, "here")
