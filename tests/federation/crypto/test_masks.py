"""Masked sums: exact, uniform without the keys, and refused where they would disclose values."""

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2

from fedstat.errors import EstimationError, MessageError, SecurityError
from fedstat.federation.crypto import masks
from fedstat.federation.crypto.keys import Identity, KeyAgreement, PairKeys, keystream
from fedstat.federation.crypto.masks import (
    COUNTS,
    FLOATS,
    GUARD_BITS,
    Encoding,
    Masker,
    decode_all,
    encode_all,
    encoding_of,
    hides,
    unmask_sums,
)
from fedstat.federation.message import pack, unpack

HALF = Encoding(1, 32)


def encode_values(name, values, terms, encoding):
    return encode_all({name: values}, terms, encoding)


def decode_sum(name, words, encoding):
    return decode_all({name: slice(None)}, words, encoding)


def mask_one(masker, name, values, round_number, encoding=None):
    return masker.mask_all({name: values}, round_number, {name: encoding or encoding_of(values)})[name]


def unmask_sum(name, parts, encoding=None):
    return unmask_sums({name: parts}, encoding)[name]


def maskers(n_sites, session="fit 1"):
    """Maskers of sites with secrets that are the same in every run."""
    names = [f"site {k}" for k in range(n_sites)]

    def secret(a, b):
        return hashlib.sha256(repr((session, sorted((a, b)))).encode()).digest()

    return [
        Masker(PairKeys(a, session, bytes(32), {b: secret(a, b) for b in names if b != a})) for a in names
    ]


def masked_sum(parts, name="score", round_number=0, encoding=None):
    sites = maskers(len(parts))
    sent = [mask_one(s, name, x, round_number, encoding) for s, x in zip(sites, parts, strict=True)]
    return unmask_sum(name, sent, encoding)


def exact_sums(parts):
    """The sums in rational numbers, rounded once: the oracle."""
    columns = zip(*(part.ravel() for part in parts), strict=True)
    return np.array([float(sum(map(Fraction, column))) for column in columns]).reshape(parts[0].shape)


def wide(rng, shape, low=-6, high=12):
    """Either sign, magnitudes from 10^low to 10^high."""
    return rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(low, high, shape)


# Cancellation


@pytest.mark.parametrize("encoding", [FLOATS, HALF, Encoding(2, 90)], ids=str)
@pytest.mark.parametrize("n_sites", [2, 3, 4, 5, 6])
def test_masks_cancel_to_the_bit(n_sites, encoding):
    rng = np.random.default_rng(n_sites)
    parts = [wide(rng, (7, 5), -6, 3) for _ in range(n_sites)]
    sites = maskers(n_sites)
    sent = [mask_one(s, "x", x, 3, encoding) for s, x in zip(sites, parts, strict=True)]
    modulus = 1 << 64 * encoding.limbs
    for i, j in itertools.product(range(7), range(5)):
        total = sum(integer(words[:, i, j]) for words in sent) % modulus
        clear = sum(round(Fraction(x[i, j]) * 2**encoding.scale_bits) for x in parts) % modulus
        assert total == clear


def integer(limbs):
    """The integer encoded in words of 64 bits."""
    return sum(int(np.uint64(word)) << 64 * place for place, word in enumerate(limbs.view(np.uint64)))


@pytest.mark.parametrize("n_sites", [2, 3, 4, 5, 6])
def test_a_sum_is_the_exact_sum_to_the_last_place(n_sites):
    rng = np.random.default_rng(10 + n_sites)
    parts = [wide(rng, (40, 25), -3, 12) for _ in range(n_sites)]
    exact = exact_sums(parts)
    assert (np.abs(masked_sum(parts) - exact) <= np.spacing(np.abs(exact))).all()


@pytest.mark.parametrize("n_sites", [2, 5])
def test_the_precision_that_is_stated_holds(n_sites):
    """Exact from 2^-12 up, within 2^-65 below: 10^-6 keeps twelve digits."""
    rng = np.random.default_rng(20)
    parts = [wide(rng, 4000, -6, 12) for _ in range(n_sites)]
    exact = exact_sums(parts)
    error = np.abs(masked_sum(parts) - exact)
    assert (error <= n_sites * 2.0**-65 + np.spacing(np.abs(exact))).all()
    small = [10.0 ** rng.uniform(-6, -5, 4000) for _ in range(n_sites)]
    assert np.max(np.abs(masked_sum(small) / exact_sums(small) - 1.0)) < 1e-13


def test_the_order_of_sites_does_not_matter():
    rng = np.random.default_rng(1)
    parts = [wide(rng, 200) for _ in range(4)]
    sent = [mask_one(s, "x", x, 0) for s, x in zip(maskers(4), parts, strict=True)]
    sums = {unmask_sum("x", order).tobytes() for order in itertools.permutations(sent)}
    assert len(sums) == 1


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (2, 3), (2, 0, 3), (2, 3, 4)])
def test_shapes_are_kept(shape):
    rng = np.random.default_rng(2)
    parts = [rng.standard_normal(shape) for _ in range(3)]
    total = masked_sum(parts)
    assert total.shape == shape and total.dtype == np.float64
    np.testing.assert_allclose(total, np.sum(parts, axis=0), rtol=1e-13, atol=1e-18)


def test_slices_and_transposes_are_read_by_element():
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal((6, 8)) for _ in range(3)]
    views = [parts[0][::2, ::2].T, np.asfortranarray(parts[1][::2, ::2].T), parts[2][::2, ::2].T.copy()]
    np.testing.assert_allclose(masked_sum(views), exact_sums(views), rtol=1e-15, atol=1e-19)


@pytest.mark.parametrize("n_sites", [2, 3, 6])
def test_integers_and_booleans_are_exact(n_sites):
    rng = np.random.default_rng(4)
    bound = 2**47 // n_sites
    integer = [rng.integers(-bound, bound, (5, 4)) for _ in range(n_sites)]
    integer[0][0, 0], integer[1][0, 0] = bound, -bound
    total = masked_sum(integer)
    assert total.dtype == np.int64
    np.testing.assert_array_equal(total, np.sum(integer, axis=0))
    flags = [rng.random(30) < 0.5 for _ in range(n_sites)]
    np.testing.assert_array_equal(masked_sum(flags), np.sum(flags, axis=0))


def test_special_numbers_come_back():
    tiny = 5e-324
    values = np.array([0.0, -0.0, tiny, -tiny, 2.0**-64, -(2.0**-64), 2.0**-66, 1 - 2.0**-53, -1 + 2.0**-53])
    clear = decode_sum("x", encode_values("x", values, 2, FLOATS), FLOATS)
    expected = np.array([0, 0, 0, 0, 2.0**-64, -(2.0**-64), 0, 1 - 2.0**-53, -1 + 2.0**-53])
    np.testing.assert_array_equal(clear, expected)


def test_arrays_that_are_masked_together_are_those_that_are_masked_alone():
    rng = np.random.default_rng(5)
    shapes = {"score": (3,), "count": (), "information": (3, 3), "none": (0,)}
    parts = [{name: rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(3)]
    parts = [part | {"count": np.array(k)} for k, part in enumerate(parts)]
    encodings = {name: masks.encoding_of(array) for name, array in parts[0].items()}
    alone = [
        {n: mask_one(s, n, x, 1) for n, x in part.items()} for s, part in zip(maskers(3), parts, strict=True)
    ]
    sites = maskers(3)
    sent = [s.mask_all(part, 1, encodings) for s, part in zip(sites, parts, strict=True)]
    by_name = {name: [one[name] for one in sent] for name in shapes}
    for name, words in by_name.items():
        assert [one.tobytes() for one in words] == [one[name].tobytes() for one in alone]
    for name, total in unmask_sums(by_name).items():
        np.testing.assert_allclose(total, np.sum([part[name] for part in parts], axis=0), rtol=1e-13)
    with pytest.raises(SecurityError, match="array 'information': its masks did not cancel"):
        unmask_sums(by_name | {"information": by_name["information"][::2]})
    wrong = parts[0] | {"information": np.full((3, 3), np.nan)}
    with pytest.raises(EstimationError, match="array 'information': a value is not finite"):
        sites[0].mask_all(wrong, 2, encodings)
    assert sites[0].mask_all(parts[0], 2, encodings).keys() == shapes.keys()  # no mask was used


def test_masked_arrays_pass_as_messages():
    parts = [np.array([1.5, -2.0]), np.array([0.25, 4.0])]
    sent = [mask_one(s, "x", x, 0) for s, x in zip(maskers(2), parts, strict=True)]
    arrived = [unpack(pack({}, {"x": words}))[1]["x"] for words in sent]
    np.testing.assert_array_equal(unmask_sum("x", arrived), [1.75, 2.0])


def test_keys_from_an_agreement_do():
    names = ("Akershus", "Bergen", "Drammen")
    identities = {name: Identity.generate() for name in names}
    public = {name: identity.public for name, identity in identities.items()}
    pinned = {name: key.fingerprint for name, key in public.items()}
    agreements = [KeyAgreement(identities[n], "fit 1", n, public, pinned) for n in names]
    texts = {agreement.site: agreement.announce() for agreement in agreements}
    keys = [agreement.finish(texts) for agreement in agreements]
    sent = [mask_one(Masker(k), "x", np.full(3, 0.5), 0) for k in keys]
    np.testing.assert_array_equal(unmask_sum("x", sent), np.full(3, 1.5))
    with pytest.raises(SecurityError, match="handed out before"):
        Masker(keys[0])


# The coordinator's view


def uniform_bytes(words):
    """Upper tail probability of a chi-square test that all byte values are equally frequent."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8).ravel(), minlength=256)
    return chi2.sf(np.sum((counts - counts.mean()) ** 2 / counts.mean()), 255)


@pytest.mark.parametrize("encoding", [FLOATS, HALF], ids=str)
@pytest.mark.parametrize("value", [0.0, -1.0, 1e3])
def test_a_masked_array_is_uniform_whatever_it_hides(encoding, value):
    for site in maskers(3):
        words = mask_one(site, "x", np.full(50_000, value), 0, encoding)
        for limb in words:
            assert 1e-4 < uniform_bytes(limb) < 1 - 1e-4
    assert uniform_bytes(encode_values("x", np.full(50_000, value), 3, encoding)) < 1e-12


def test_masked_counts_are_uniform():
    words = mask_one(maskers(3)[1], "x", np.ones(50_000, np.bool_), 0)
    assert 1e-4 < uniform_bytes(words) < 1 - 1e-4


@pytest.mark.parametrize("absent", range(4))
def test_sums_of_all_sites_but_one_are_uniform(absent):
    """With two colluding sites the coordinator learns nothing about the two others."""
    values = np.linspace(-5.0, 5.0, 50_000)
    sent = [mask_one(s, "x", values, 0, HALF) for s in maskers(4)]
    partial = sum(words for k, words in enumerate(sent) if k != absent)
    assert 1e-4 < uniform_bytes(partial) < 1 - 1e-4


def test_masks_differ_between_rounds_arrays_sessions_and_pairs():
    zero = np.zeros(500)
    first, other = maskers(3), maskers(3, "fit 2")
    sent = [mask_one(site, name, zero, r) for site in first for name in ("x", "y") for r in (0, 1)]
    sent += [mask_one(site, "x", zero, 0) for site in other]
    words = np.concatenate([array.ravel() for array in sent])
    assert len(np.unique(words)) == len(words)


def test_the_stream_is_that_of_rfc_8439():
    """Section 2.4.2: key 00..1f, nonce 00 00 00 00 00 00 00 4a 00 00 00 00, block 1."""
    stream = keystream(bytes(range(32)), bytes.fromhex("000000000000004a00000000"), 16)
    expected = "224f51f3401bd9e12fde276fb8631ded8c131f823d2c06e27e4fcaec9ef3cf78"
    assert stream.astype("<u8").tobytes()[64:96].hex() == expected


# Refusals


def test_no_mask_serves_twice():
    site = maskers(3)[0]
    mask_one(site, "score", np.zeros(3), 1)
    for values in (np.zeros(3), np.ones(3), np.zeros(3, np.int64)):
        with pytest.raises(SecurityError, match="array 'score' of round 1 was masked before"):
            mask_one(site, "score", values, 1)
    mask_one(site, "score", np.zeros(3), 2)
    mask_one(site, "information", np.zeros(3), 1)


def test_names_that_fall_together_share_no_mask(monkeypatch):
    class Same:
        def digest(self):
            return bytes(32)

    site = maskers(3)[0]
    monkeypatch.setattr(masks.hashlib, "sha256", lambda _: Same())
    mask_one(site, "score", np.zeros(3), 1)
    with pytest.raises(SecurityError, match="was masked before"):
        mask_one(site, "information", np.zeros(3), 1)


@pytest.mark.parametrize("round_number", [-1, 2**32])
def test_rounds_stay_within_the_nonce(round_number):
    with pytest.raises(SecurityError, match="start a new session"):
        mask_one(maskers(2)[0], "x", np.zeros(2), round_number)


@pytest.mark.parametrize("n_sites", [2, 5])
@pytest.mark.parametrize("encoding", [FLOATS, HALF, COUNTS], ids=str)
def test_values_out_of_range_are_refused_and_not_shown(n_sites, encoding):
    site = maskers(n_sites)[0]
    limit = encoding.limit(n_sites)
    kind = np.int64 if encoding.integer else np.float64
    too_large = np.array([0, -int(limit) - 123_457], dtype=kind)
    with pytest.raises(EstimationError, match=r"array 'information'.*largest magnitude") as caught:
        mask_one(site, "information", too_large, 0, encoding)
    assert f"{limit:.4g}" in str(caught.value) and "Rescale" in str(caught.value)
    assert str(abs(int(too_large[1]))) not in str(caught.value)
    mask_one(site, "information", np.array([0, -int(limit)], dtype=kind), 0, encoding)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_no_numbers_are_refused(value):
    with pytest.raises(EstimationError, match="array 'x'"):
        mask_one(maskers(2)[0], "x", np.array([1.0, value]), 0)


def test_the_least_integer_is_out_of_range():
    with pytest.raises(EstimationError, match="array 'x'"):
        mask_one(maskers(2)[0], "x", np.array([np.iinfo(np.int64).min]), 0)


def resolution(encoding):
    """Smallest difference between two numbers that an encoding represents."""
    return math.ldexp(1.0, -encoding.scale_bits)


def encoding_for(bound, n_sites):
    """Finest encoding in two limbs of numbers up to a bound in magnitude."""
    _, exponent = math.frexp(bound)
    return Encoding(2, 127 - GUARD_BITS - exponent - math.ceil(math.log2(n_sites)))


@pytest.mark.parametrize("n_sites", [2, 3, 5, 6])
def test_every_site_may_go_to_the_limit(n_sites):
    for encoding, sign in itertools.product((FLOATS, HALF), (1.0, -1.0)):
        limit = encoding.limit(n_sites)
        total = masked_sum([np.full(3, sign * limit)] * n_sites, encoding=encoding)
        rounding = n_sites * resolution(encoding) / 2
        np.testing.assert_allclose(total, sign * limit * n_sites, rtol=1e-15, atol=rounding)


@pytest.mark.parametrize("bound", [1e-8, 1.0, 1e12, 3e20])
@pytest.mark.parametrize("n_sites", [2, 5, 6])
def test_an_encoding_is_made_for_a_bound(bound, n_sites):
    encoding = encoding_for(bound, n_sites)
    assert bound <= encoding.limit(n_sites) < 8 * bound
    assert resolution(encoding) < bound * 2.0**-100
    rng = np.random.default_rng(5)
    parts = [bound * rng.uniform(-1, 1, 100) for _ in range(n_sites)]
    np.testing.assert_allclose(masked_sum(parts, encoding=encoding), exact_sums(parts), rtol=3e-16, atol=0)


def test_a_sum_without_one_site_is_noticed():
    sent = [mask_one(s, "x", np.ones(4), 0) for s in maskers(4)]
    for wrong in (sent[:3], [*sent, sent[0]], [*sent[:3], sent[0]], [sent[0]]):
        with pytest.raises(SecurityError, match="array 'x': its masks did not cancel"):
            unmask_sum("x", wrong)


@pytest.mark.parametrize("other", [{"round_number": 1}, {"name": "y"}], ids=str)
def test_a_site_in_another_round_or_array_is_noticed(other):
    sites = maskers(3)
    sent = [mask_one(s, "x", np.ones(4), 0) for s in sites[:2]]
    sent.append(mask_one(sites[2], **({"name": "x", "values": np.ones(4), "round_number": 0} | other)))
    with pytest.raises(SecurityError, match="did not cancel"):
        unmask_sum("x", sent)


def test_a_site_with_the_keys_of_another_session_is_noticed():
    sent = [mask_one(s, "x", np.ones(4), 0) for s in (*maskers(3)[:2], maskers(3, "fit 2")[2])]
    with pytest.raises(SecurityError, match="did not cancel"):
        unmask_sum("x", sent)


@pytest.mark.parametrize(
    "parts, encoding",
    [
        ([], None),
        ([np.zeros(2)] * 2, None),
        ([np.zeros((2, 3), np.int64), np.zeros((2, 4), np.int64)], None),
        ([np.zeros((3, 3), np.int64)] * 2, None),
        ([np.zeros((2, 3), np.int64)] * 2, COUNTS),
        ([np.zeros((1, 3), np.int64)] * 2, FLOATS),
        ([np.zeros((), np.int64)] * 2, None),
        ([np.zeros((2, 3), np.uint64)] * 2, None),
    ],
)
def test_what_is_no_masked_array_is_a_named_error(parts, encoding):
    with pytest.raises(MessageError, match="array 'x'"):
        unmask_sum("x", parts, encoding)


@pytest.mark.parametrize(
    "values, encoding",
    [
        (np.zeros(2), COUNTS),
        (np.zeros(2, np.int64), FLOATS),
        (np.zeros(2, np.bool_), HALF),
        (np.zeros(2, np.float32), None),
        (np.zeros(2, np.uint8), None),
        (np.array(["a"]), None),
    ],
)
def test_types_that_are_not_carried_are_a_named_error(values, encoding):
    with pytest.raises(MessageError, match="array 'x' is of type"):
        mask_one(maskers(2)[0], "x", values, 0, encoding)


def test_an_array_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(masks, "MOST_WORDS", 10)
    with pytest.raises(MessageError, match="at most 5 are masked"):
        mask_one(maskers(2)[0], "x", np.zeros(6), 0)


def test_two_sites_hide_nothing_from_each_other():
    assert [hides(n) for n in (1, 2, 3, 4)] == [False, False, True, True]
    parts = [np.array([1.25, -3.5]), np.array([7.0, 0.125])]
    np.testing.assert_array_equal(masked_sum(parts) - parts[0], parts[1])
    assert "Add a third site" in masks.TWO_SITES


# A regression from masked sums


def sums(X, y, beta):
    """Score and information of a logistic regression at one site."""
    mu = 1.0 / (1.0 + np.exp(-X @ beta))
    return X.T @ (y - mu), (X.T * (mu * (1.0 - mu))) @ X


def fit(total_of, p):
    """Newton's iterations from sums; the information is equilibrated before it is solved."""
    beta = np.zeros(p)
    for round_number in range(25):
        score, information = total_of(beta, round_number)
        d = 1.0 / np.sqrt(np.diag(information))
        beta = beta + d * np.linalg.solve(information * np.outer(d, d), score * d)
    return beta, information, np.sqrt(np.diag(np.linalg.inv(information * np.outer(d, d)))) * d


@pytest.mark.parametrize("columns", ["standardized", "raw units"])
def test_a_logistic_regression_from_masked_sums_is_the_pooled_one(columns):
    """Five sites; in raw units the entries of the information run from 1e-6 to 1e12."""
    rng = np.random.default_rng(6)
    n, p = 3000, 6
    units = np.ones(p) if columns == "standardized" else np.array([1.0, 5e-5, 1e-2, 1.0, 1e2, 5e4])
    Z = np.column_stack([np.ones(n), rng.standard_normal((n, p - 1))])
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-Z @ rng.normal(0, 0.6, p)))).astype(float)
    X = Z * units
    rows = np.array_split(rng.permutation(n), 5)
    sites = maskers(5)

    def masked(beta, round_number):
        sent = [[], []]
        for site, i in zip(sites, rows, strict=True):
            for kept, name, x in zip(sent, ("score", "information"), sums(X[i], y[i], beta), strict=True):
                kept.append(mask_one(site, name, x, round_number))
        return [unmask_sum(name, kept) for name, kept in zip(("score", "information"), sent, strict=True)]

    def unmasked(beta, round_number):
        each = [sums(X[i], y[i], beta) for i in rows]
        return sum(s for s, _ in each), sum(i for _, i in each)

    beta, information, bse = fit(masked, p)
    if columns == "raw units":
        size = np.abs(np.diag(information))
        assert size.min() < 2e-6 and size.max() > 5e11
    for other in (fit(unmasked, p), fit(lambda b, _: sums(X, y, b), p)):
        np.testing.assert_allclose(beta, other[0], rtol=1e-10)
        np.testing.assert_allclose(np.diag(information), np.diag(other[1]), rtol=1e-12)
        np.testing.assert_allclose(bse, other[2], rtol=1e-10)
    assert math.isfinite(beta.sum())
