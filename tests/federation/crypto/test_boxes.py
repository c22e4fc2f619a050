"""Sealed messages, and every way to tamper with them."""

import random

import pytest

from fedstat.errors import SecurityError
from fedstat.federation.crypto import envelopes
from fedstat.federation.crypto.envelopes import HEADER, OVERHEAD, SEAL_BYTES, SealedChannel
from fedstat.federation.crypto.keys import Identity, KeyAgreement

NAMES = ("Akershus", "Bergen", "Drammen")


def sessions(session="fit 1"):
    identities = {name: Identity.generate() for name in NAMES}
    public = {name: identity.public for name, identity in identities.items()}
    pinned = {name: key.fingerprint for name, key in public.items()}
    agreements = {n: KeyAgreement(identities[n], session, n, public, pinned) for n in NAMES}
    texts = {name: agreement.announce() for name, agreement in agreements.items()}
    return {name: agreement.finish(texts) for name, agreement in agreements.items()}


@pytest.fixture
def keys():
    return sessions()


@pytest.fixture
def pair(keys):
    return SealedChannel(keys["Akershus"], "Bergen", "shares"), SealedChannel(
        keys["Bergen"], "Akershus", "shares"
    )


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 64, 100_000])
def test_what_is_sealed_is_opened_either_way(pair, size):
    message = random.Random(size).randbytes(size)
    for sender, receiver in (pair, pair[::-1], pair):
        box = sender.seal(message)
        assert len(box) == size + OVERHEAD
        assert receiver.open(box) == message


def test_nothing_of_the_message_shows(pair):
    message = b"the same sixteen" * 8
    first, second = pair[0].seal(message), pair[0].seal(message)
    assert b"sixteen" not in first + second
    assert ciphertext(first) != ciphertext(second)


def ciphertext(box):
    """Without the seal, which differs with the header even where keys and nonces are the same."""
    return box[HEADER.size : -SEAL_BYTES]


def test_the_two_directions_and_the_pairs_have_different_keys(keys, pair):
    third = SealedChannel(keys["Akershus"], "Drammen", "shares")
    sealed = {ciphertext(channel.seal(bytes(32))) for channel in (*pair, third)}
    assert len(sealed) == 3


def test_a_replayed_message_is_reported(pair):
    a, b = pair
    boxes_ = [a.seal(bytes([i])) for i in range(3)]
    for box in boxes_:
        b.open(box)
    for number, box in enumerate(boxes_):
        with pytest.raises(SecurityError, match=f"Bergen.*'Akershus'.*replayed; message {number} "):
            b.open(box)


def test_a_reordered_message_is_reported_and_the_right_one_still_opens(pair):
    a, b = pair
    first, second = a.seal(b"1"), a.seal(b"2")
    with pytest.raises(SecurityError, match="out of order; message 1 came, expected 0"):
        b.open(second)
    assert [b.open(first), b.open(second)] == [b"1", b"2"]


def test_any_bit_that_is_turned_is_noticed(pair):
    a, b = pair
    box = a.seal(b"a message of some length")
    for place in range(len(box)):
        for bit in range(8):
            altered = bytearray(box)
            altered[place] ^= 1 << bit
            with pytest.raises(SecurityError):
                b.open(bytes(altered))
    assert b.open(box) == b"a message of some length"


def test_an_altered_message_is_reported(pair):
    a, b = pair
    box = a.seal(b"a message")
    for place in (HEADER.size, len(box) - 1):
        altered = bytearray(box)
        altered[place] ^= 1
        with pytest.raises(SecurityError, match="altered on its way"):
            b.open(bytes(altered))


def test_a_number_that_is_turned_back_is_altered_not_replayed(pair):
    a, b = pair
    b.open(a.seal(b"0"))
    box = bytearray(a.seal(b"1"))
    box[20] = 0
    with pytest.raises(SecurityError, match="altered"):
        b.open(bytes(box))


def test_a_truncated_message_is_reported(pair):
    a, b = pair
    box = a.seal(b"a message of some length")
    for length in range(len(box)):
        with pytest.raises(SecurityError, match="truncated"):
            b.open(box[:length])
    with pytest.raises(SecurityError, match="altered; 41 bytes after the header, expected 40"):
        b.open(box + b"x")
    assert b.open(box)


def test_a_foreign_message_is_reported(keys, pair):
    a, b = pair
    other = sessions("fit 2")
    strangers = [
        SealedChannel(keys["Drammen"], "Bergen", "shares").seal(b"x"),
        SealedChannel(keys["Akershus"], "Drammen", "shares").seal(b"x"),
        SealedChannel(keys["Akershus"], "Bergen", "products").seal(b"x"),
        SealedChannel(other["Akershus"], "Bergen", "shares").seal(b"x"),
    ]
    for box in strangers:
        with pytest.raises(
            SecurityError, match="foreign; it was sealed for another session, step, sender or"
        ):
            b.open(box)
    with pytest.raises(SecurityError, match="foreign; this site's own message"):
        b.open(b.seal(b"x"))
    assert b.open(a.seal(b"right")) == b"right"


def test_a_relabeled_message_does_not_open(keys, pair):
    """The header of the right channel before the seal of another."""
    a, b = pair
    right, wrong = a.seal(b"x"), SealedChannel(keys["Akershus"], "Bergen", "products").seal(b"x")
    with pytest.raises(SecurityError, match="altered"):
        b.open(right[: HEADER.size] + wrong[HEADER.size :])
    same_name = sessions("fit 1")
    with pytest.raises(SecurityError, match="sealed with other keys"):
        b.open(SealedChannel(same_name["Akershus"], "Bergen", "shares").seal(b"x"))


def test_a_channel_is_made_once(keys):
    SealedChannel(keys["Akershus"], "Bergen", "shares")
    with pytest.raises(SecurityError, match="handed out before"):
        SealedChannel(keys["Akershus"], "Bergen", "shares")


def test_numbers_run_out_before_they_repeat(pair):
    a, b = pair
    a._sealed = b._opened = envelopes.MOST_MESSAGES - 1
    assert b.open(a.seal(b"last")) == b"last"
    for _ in range(2):
        with pytest.raises(SecurityError, match="start a new session"):
            a.seal(b"one more")


def test_a_number_is_spent_even_where_sealing_fails(pair):
    a, b = pair
    with pytest.raises(TypeError):
        a.seal("a text")
    box = a.seal(b"x")
    with pytest.raises(SecurityError, match="message 1 came, expected 0"):
        b.open(box)


def test_a_message_that_is_too_long_is_refused(pair, monkeypatch):
    a, b = pair
    long = a.seal(bytes(101))
    monkeypatch.setattr(envelopes, "LONGEST_MESSAGE", 100)
    with pytest.raises(SecurityError, match="101 bytes, at most 100"):
        a.seal(bytes(101))
    with pytest.raises(SecurityError, match="longer than any message"):
        b.open(long)


def test_random_bytes_are_named_errors(pair):
    a, b = pair
    draw = random.Random(3)
    complete = a.seal(b"a message of some length")
    for i in range(10_000):
        if i % 2:
            box = draw.randbytes(draw.randrange(200))
        else:
            box = bytearray(complete)
            for _ in range(draw.randrange(1, 4)):
                box[draw.randrange(len(box))] = draw.randrange(256)
            box = bytes(box[: draw.randrange(len(box) + 1)]) if draw.random() < 0.5 else bytes(box)
        if box == complete:
            continue
        with pytest.raises(SecurityError, match="sealed message of step 'shares' with 'Akershus'"):
            b.open(box)
    assert b.open(complete) == b"a message of some length"
