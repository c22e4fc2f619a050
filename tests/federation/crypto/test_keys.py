"""Identities, pinned fingerprints, and the agreement on keys through a coordinator that may cheat."""

import hashlib
import json
import os
import random

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedstat.errors import DisclosureError, EngineError, SecurityError
from fedstat.federation.crypto.keys import (
    Identity,
    KeyAgreement,
    PairKeys,
    PublicIdentity,
    check_fingerprints,
    encode_parts,
)
from fedstat.federation.crypto.rosters import open_record, sign_record

NAMES = ("Akershus", "Bergen", "Drammen")
IDENTITIES = {name: Identity.generate() for name in NAMES}
PUBLIC = {name: identity.public for name, identity in IDENTITIES.items()}
PINNED = {name: key.fingerprint for name, key in PUBLIC.items()}


def begin(session="fit 1", names=NAMES):
    public = {name: PUBLIC[name] for name in names}
    pinned = {name: PINNED[name] for name in names}
    return {name: KeyAgreement(IDENTITIES[name], session, name, public, pinned) for name in names}


def announced(agreements):
    return {name: agreement.announce() for name, agreement in agreements.items()}


def changed(text, **fields):
    return json.dumps(json.loads(text) | fields)


# Identities


def test_an_identity_survives_its_file(tmp_path):
    identity = Identity.generate()
    identity.save(tmp_path / "site.key")
    again = Identity.load(tmp_path / "site.key")
    assert again.public == identity.public
    assert again.signing.sign(b"x") == identity.signing.sign(b"x")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_an_identity_file_is_its_owners_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        Identity.generate().save(tmp_path / "site.key")
    finally:
        os.umask(before)
    assert (tmp_path / "site.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path, mode):
    path = tmp_path / "site.key"
    Identity.generate().save(path)
    path.chmod(mode)
    with pytest.raises(SecurityError, match=f"{mode:04o}.*chmod 600"):
        Identity.load(path)


def test_an_identity_is_never_overwritten(tmp_path):
    path = tmp_path / "site.key"
    Identity.generate().save(path)
    before = path.read_bytes()
    with pytest.raises(SecurityError, match="exists"):
        Identity.generate().save(path)
    assert path.read_bytes() == before


def test_a_link_that_waits_is_not_followed(tmp_path):
    (tmp_path / "site.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecurityError, match="exists"):
        Identity.generate().save(tmp_path / "site.key")
    assert not (tmp_path / "elsewhere").exists()


def test_a_spoilt_file_is_named_and_not_quoted(tmp_path):
    path = tmp_path / "site.key"
    Identity.generate().save(path)
    secret = json.loads(path.read_text())["signing"]
    path.write_text(path.read_text().replace(secret, secret[:-2] + "zz"))
    with pytest.raises(SecurityError, match=r"site\.key.*malformed") as caught:
        Identity.load(path)
    assert secret[:8] not in str(caught.value) and caught.value.__cause__ is None


def test_nothing_private_is_printed():
    identity = Identity.generate()
    for secret in (identity.signing.private_bytes_raw(), identity.agreement.private_bytes_raw()):
        assert secret.hex() not in repr(identity) + identity.public.to_json()


def test_the_fingerprint_covers_both_keys():
    a, b = (Identity.generate().public for _ in range(2))
    mixed = PublicIdentity(a.signing, b.agreement)
    assert len({a.fingerprint, b.fingerprint, mixed.fingerprint}) == 3
    groups = a.fingerprint.split(" ")
    assert len(groups) == 16 and all(len(group) == 4 for group in groups)
    assert (
        bytes.fromhex(a.fingerprint)
        == hashlib.sha256(encode_parts("fedstat identity 1", a.signing, a.agreement)).digest()
    )


def test_a_public_identity_travels_as_text():
    key = Identity.generate().public
    assert PublicIdentity.from_json(key.to_json()) == key
    assert PublicIdentity.from_json(key.to_json().encode()) == key


def test_random_texts_are_no_public_identity():
    draw = random.Random(1)
    complete = Identity.generate().public.to_json().encode()
    for _ in range(10_000):
        with pytest.raises(SecurityError):
            PublicIdentity.from_json(draw.randbytes(draw.randrange(200)))
    for _ in range(2_000):
        text = bytearray(complete)
        text[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        try:
            assert PublicIdentity.from_json(bytes(text)).fingerprint
        except SecurityError:
            continue


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "[" * 100_000,
        "1" * 10_000,
        '"\ud800"',
        b"\xff\xfe{\x00}\x00",
        "{}",
        json.dumps({"format": "fedstat public identity 1", "signing": 1, "agreement": 2}),
        json.dumps({"format": "fedstat public identity 1", "signing": "00" * 32, "agreement": "00" * 31}),
        json.dumps({"format": "fedstat public identity 1", "signing": "00" * 32, "agreement": "0 " * 32}),
        json.dumps({"format": "fedstat public identity 1", "signing": "00" * 32, "agreement": "\ud800" * 64}),
        json.dumps({"format": "fedstat public identity 2", "signing": "00" * 32, "agreement": "00" * 32}),
        json.dumps(
            {"format": "fedstat public identity 1", "signing": "00" * 32, "agreement": "00" * 32, "more": ""}
        ),
    ],
    ids=str,
)
def test_what_is_no_public_identity_says_so(text):
    with pytest.raises(SecurityError, match="public identity"):
        PublicIdentity.from_json(text)


# Pins


def test_pins_forgive_spelling_only():
    spelled = {name: text.upper().replace(" ", ":") for name, text in PINNED.items()}
    assert all(spelled[name] != text for name, text in PINNED.items())
    check_fingerprints(spelled, PUBLIC)
    for name, text in spelled.items():
        other = text[:-1] + ("0" if text[-1] != "0" else "1")
        with pytest.raises(SecurityError, match=f"not the pinned key: '{name}'"):
            check_fingerprints(spelled | {name: other}, PUBLIC)


def test_a_wrong_key_is_reported_by_name():
    false = PUBLIC | {"Bergen": Identity.generate().public}
    with pytest.raises(SecurityError, match="not the pinned key: 'Bergen'") as caught:
        check_fingerprints(PINNED, false)
    assert "Akershus" not in str(caught.value) and "Drammen" not in str(caught.value)
    assert isinstance(caught.value, DisclosureError)


@pytest.mark.parametrize("field", ["signing", "agreement"])
def test_either_key_may_be_the_wrong_one(field):
    ours, theirs = PUBLIC["Bergen"], Identity.generate().public
    parts = {name: getattr(theirs if name == field else ours, name) for name in ("signing", "agreement")}
    with pytest.raises(SecurityError, match="Bergen"):
        check_fingerprints(PINNED, PUBLIC | {"Bergen": PublicIdentity(**parts)})


def test_missing_keys_and_missing_pins_are_reported_by_name():
    some = {name: PUBLIC[name] for name in NAMES[:2]}
    with pytest.raises(SecurityError, match="no key arrived from Drammen"):
        check_fingerprints(PINNED, some)
    with pytest.raises(SecurityError, match="no fingerprint is pinned for Drammen"):
        check_fingerprints({name: PINNED[name] for name in NAMES[:2]}, PUBLIC)


def test_one_site_cannot_stand_for_two():
    public = PUBLIC | {"Bergen": PUBLIC["Akershus"]}
    with pytest.raises(SecurityError, match="Akershus, Bergen have the same key"):
        check_fingerprints({name: key.fingerprint for name, key in public.items()}, public)


# Agreement


def test_both_ends_of_every_pair_have_the_same_secret_and_no_two_pairs():
    agreements = begin()
    texts = announced(agreements)
    keys = {name: agreement.finish(texts) for name, agreement in agreements.items()}
    secrets = {(a, b): keys[a].secret(b, "test") for a in NAMES for b in NAMES if a != b}
    assert all(secrets[a, b] == secrets[b, a] for a, b in secrets)
    assert len(set(secrets.values())) == 3


def test_the_secret_is_the_composition_that_is_written_down():
    agreements = begin(names=NAMES[:2])
    texts = announced(agreements)
    fresh = agreements["Akershus"]._fresh
    keys = agreements["Akershus"].finish(texts)
    offered = {name: bytes.fromhex(json.loads(text)["key"]) for name, text in texts.items()}
    salt = hashlib.sha256(
        encode_parts(
            "fedstat transcript 1",
            "fit 1",
            *[part for n in NAMES[:2] for part in (n, bytes.fromhex(PINNED[n]), offered[n])],
        )
    ).digest()
    shared = fresh.exchange(X25519PublicKey.from_public_bytes(offered["Bergen"]))
    shared += IDENTITIES["Bergen"].agreement.exchange(IDENTITIES["Akershus"].agreement.public_key())
    info = encode_parts("fedstat pair 1", "test", "Akershus", "Bergen")
    assert keys.secret("Bergen", "test", 48) == HKDF(SHA256(), 48, salt, info).derive(shared)


def test_sessions_and_purposes_have_keys_of_their_own():
    drawn = []
    for session in ("fit 1", "fit 1", "fit 2"):
        agreements = begin(session)
        texts = announced(agreements)
        keys = agreements["Bergen"].finish(texts)
        drawn += [keys.secret("Akershus", purpose) for purpose in ("masks", "box a", "box b")]
    assert len(set(drawn)) == 9


def test_a_purpose_is_handed_out_once():
    agreements = begin()
    keys = agreements["Bergen"].finish(announced(agreements))
    keys.secret("Akershus", "masks")
    keys.secret("Drammen", "masks")
    with pytest.raises(SecurityError, match="handed out before"):
        keys.secret("Akershus", "masks")
    with pytest.raises(SecurityError, match="shares no key with 'Oslo'"):
        keys.secret("Oslo", "masks")


def test_keys_are_derived_once():
    agreements = begin()
    texts = announced(agreements)
    agreements["Bergen"].finish(texts)
    with pytest.raises(SecurityError, match="derived already"):
        agreements["Bergen"].finish(texts)
    with pytest.raises(SecurityError, match="derived already"):
        agreements["Bergen"].announce()


def coordinators_key():
    return X25519PrivateKey.generate().public_key().public_bytes_raw()


def replaced(texts):
    """The coordinator replaces Bergen's key by its own."""
    return texts | {"Bergen": changed(texts["Bergen"], key=coordinators_key().hex())}


def replaced_and_signed(texts):
    """It signs it too, with an identity of its own."""
    roster, key = bytes.fromhex(json.loads(texts["Bergen"])["sites"]), coordinators_key()
    signature = Identity.generate().signing.sign(
        encode_parts("fedstat agreement 1", "fit 1", "Bergen", roster, key)
    )
    return texts | {"Bergen": changed(texts["Bergen"], key=key.hex(), signature=signature.hex())}


def signed_by_an_insider(texts):
    """Drammen lends it its signature."""
    roster, key = bytes.fromhex(json.loads(texts["Bergen"])["sites"]), coordinators_key()
    statement = encode_parts("fedstat agreement 1", "fit 1", "Bergen", roster, key)
    signature = IDENTITIES["Drammen"].signing.sign(statement)
    return texts | {"Bergen": changed(texts["Bergen"], key=key.hex(), signature=signature.hex())}


def swapped(texts):
    return texts | {"Bergen": texts["Drammen"], "Drammen": texts["Bergen"]}


def reflected(texts):
    return texts | {"Bergen": texts["Akershus"]}


@pytest.mark.parametrize(
    "attack",
    [replaced, replaced_and_signed, signed_by_an_insider, swapped, reflected],
    ids=lambda f: f.__name__,
)
def test_a_key_that_was_replaced_has_a_wrong_signature(attack):
    agreements = begin()
    texts = announced(agreements)
    with pytest.raises(SecurityError, match="Akershus: the announcement of 'Bergen' has a wrong signature"):
        agreements["Akershus"].finish(attack(texts))
    keys = {name: agreement.finish(texts) for name, agreement in agreements.items()}
    assert keys["Akershus"].secret("Bergen", "t") == keys["Bergen"].secret("Akershus", "t")


@pytest.mark.parametrize("other", [{"session": "fit 2"}, {"names": NAMES[:2]}], ids=str)
def test_an_announcement_holds_for_its_session_and_its_sites(other):
    agreements = begin()
    texts = announced(agreements) | {"Bergen": begin(**other)["Bergen"].announce()}
    with pytest.raises(SecurityError, match="'Bergen' is for another session, or for another list"):
        agreements["Akershus"].finish(texts)


def test_a_list_of_sites_that_is_relabeled_has_a_wrong_signature():
    agreements = begin()
    texts = announced(agreements)
    roster = json.loads(texts["Akershus"])["sites"]
    texts["Bergen"] = changed(begin(names=NAMES[:2])["Bergen"].announce(), sites=roster)
    with pytest.raises(SecurityError, match="wrong signature"):
        agreements["Akershus"].finish(texts)


def test_an_old_announcement_gives_no_common_secret():
    """A repeated announcement is well signed, but its private key is gone."""
    old = begin()["Bergen"].announce()
    agreements = begin()
    texts = announced(agreements)
    a = agreements["Akershus"].finish(texts | {"Bergen": old})
    b = agreements["Bergen"].finish(texts)
    assert a.secret("Bergen", "t") != b.secret("Akershus", "t")
    assert a.secret("Drammen", "t") != agreements["Drammen"].finish(texts).secret("Akershus", "t")


def test_a_site_whose_own_key_was_exchanged_notices():
    agreements = begin()
    texts = announced(agreements)
    with pytest.raises(SecurityError, match="Bergen: its own announcement came back"):
        agreements["Bergen"].finish(texts | {"Bergen": begin()["Bergen"].announce()})


def test_missing_and_unknown_announcements_are_refused():
    agreements = begin()
    texts = announced(agreements)
    with pytest.raises(
        SecurityError, match=r"expected announcements of Bergen, Drammen; .* Akershus, Bergen$"
    ):
        agreements["Akershus"].finish({name: texts[name] for name in NAMES[:2]})
    with pytest.raises(SecurityError, match="Oslo"):
        agreements["Akershus"].finish(texts | {"Oslo": texts["Bergen"]})
    assert agreements["Akershus"].finish({name: texts[name] for name in NAMES[1:]}).peers == NAMES[1:]


def test_a_key_without_a_secret_is_refused():
    """The point of order 1: every secret with it is zero (RFC 7748, section 6.1)."""
    agreements = begin()
    texts = announced(agreements)
    roster = bytes.fromhex(json.loads(texts["Bergen"])["sites"])
    statement = encode_parts("fedstat agreement 1", "fit 1", "Bergen", roster, bytes(32))
    signature = IDENTITIES["Bergen"].signing.sign(statement)
    texts["Bergen"] = changed(texts["Bergen"], key=bytes(32).hex(), signature=signature.hex())
    with pytest.raises(SecurityError, match="a key of 'Bergen' is of low order"):
        agreements["Akershus"].finish(texts)


def test_random_announcements_are_named_errors():
    draw = random.Random(2)
    agreements = begin()
    texts = announced(agreements)
    complete = texts["Bergen"].encode()
    for i in range(2_000):
        text = bytearray(complete)
        text[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        if json_or_none(text) == json.loads(complete):
            continue
        broken = bytes(text) if i % 2 else draw.randbytes(draw.randrange(300))
        with pytest.raises(SecurityError, match="the announcement of 'Bergen'"):
            agreements["Akershus"].finish(texts | {"Bergen": broken})
    agreements["Akershus"].finish(texts)


def json_or_none(text):
    """The fields, in lower case: a hexadecimal digit has two spellings."""
    try:
        return json.loads(bytes(text).decode().lower())
    except ValueError:
        return None


def test_a_session_has_a_name_and_at_least_two_sites_of_which_one_is_ours():
    with pytest.raises(SecurityError, match="named session"):
        begin("")
    with pytest.raises(SecurityError, match="at least two sites"):
        begin(names=NAMES[:1])
    with pytest.raises(SecurityError, match="Oslo: the list of sites does not hold this site"):
        KeyAgreement(IDENTITIES["Bergen"], "fit 1", "Oslo", PUBLIC, PINNED)
    with pytest.raises(SecurityError, match=r"Bergen: .* with its own key"):
        KeyAgreement(Identity.generate(), "fit 1", "Bergen", PUBLIC, PINNED)
    with pytest.raises(SecurityError, match="not the pinned key: 'Drammen'"):
        KeyAgreement(IDENTITIES["Bergen"], "fit 1", "Bergen", PUBLIC, PINNED | {"Drammen": PINNED["Bergen"]})


def test_secrets_are_not_printed():
    keys = PairKeys("a", "s", bytes(32), {"b": b"secret"})
    assert "secret" not in repr(keys)


def test_no_two_lists_of_parts_are_written_alike():
    lists = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("a", "b", "c"), ("ab", b"c")]
    assert len({encode_parts(*parts) for parts in lists}) == len(lists) - 1


# Signed records


def test_a_record_names_a_later_version_only_under_a_signature():
    text = sign_record(Identity.generate(), "fedstat record 2", {"a": 1})
    with pytest.raises(EngineError, match=r"written by a later version of fedstat \(format 2\)"):
        open_record(text, "fedstat record 1", "it")
    for other in ("fedstat record 1", "fedstat record 9", "another 1"):
        with pytest.raises(SecurityError, match="altered since it was signed"):
            open_record(text.replace("fedstat record 2", other), "fedstat record 1", "it")
