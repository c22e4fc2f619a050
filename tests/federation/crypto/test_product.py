"""The secure product against the product in the clear, and what each party sees of it."""

import itertools
import time

import numpy as np
import pytest
from scipy import stats

from fedstat.errors import EstimationError, MessageError, ModelError, SecurityError
from fedstat.federation.crypto import secure_product as secure
from fedstat.federation.crypto.secure_product import MatrixProduct
from fedstat.kernels import ring

SEED_A, SEED_B, MASK = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
ALPHA = 1e-4


def columns(n, p, seed=0):
    X = np.random.default_rng(seed).normal(size=(n, p))
    return (X - X.mean(0)) / X.std(0) if n > 1 else np.sign(X)


def agreed(n, p, q, groups=1):
    return MatrixProduct("Tax Office", "Court", n, p, q, groups)


def run(product, X_a, X_b, group, seeds=(SEED_A, SEED_B, MASK)):
    """All messages of one product of encoded columns, by their names."""
    seed_a, seed_b, mask = seeds
    Z_b = secure.deal_triple(product, seed_a, seed_b, group)
    E, F = secure.open_a(product, seed_a, X_a), secure.open_b(product, seed_b, X_b)
    a = secure.share_a(product, seed_a, X_a, F, group, mask)
    return {"Z_b": Z_b, "E": E, "F": F, "a": a, "b": secure.share_b(product, seed_b, E, Z_b, group, mask)}


def by_group(A, B, group, groups):
    return np.stack([A[group == g].T @ B[group == g] for g in range(groups)])


def fresh(k):
    return tuple(bytes([k % 256, k // 256, part]) + bytes(29) for part in range(3))


def seems_uniform(words):
    """Chi-square tests of the top and the bottom byte of 64-bit words."""
    words = np.ravel(words).view(np.uint64)
    bytes_of = (words >> np.uint64(56), words & np.uint64(255))
    return all(stats.chisquare(np.bincount(b.astype(int), minlength=256)).pvalue > ALPHA for b in bytes_of)


# --- the result ---


@pytest.mark.parametrize(
    "n, p, q, groups",
    [
        (1, 1, 1, 1),
        (1, 3, 2, 2),
        (50, 1, 4, 3),
        (50, 4, 1, 3),
        (300, 12, 9, 32),
        (2 * ring.BLOCK + 5, 3, 2, 4),
    ],
)
def test_the_result_is_the_product_of_the_encoded_columns(n, p, q, groups):
    f = ring.fractional_bits(n)
    X_a, X_b = (
        secure.encode_columns(columns(n, p, 1), f, "A"),
        secure.encode_columns(columns(n, q, 2), f, "B"),
    )
    group = np.random.default_rng(3).integers(0, groups, n)
    product = agreed(n, p, q, groups)
    sent = run(product, X_a, X_b, group)
    exact = by_group(X_a, X_b, group, groups)
    np.testing.assert_array_equal(sent["a"] + sent["b"], exact)
    np.testing.assert_array_equal(secure.combine(product, sent["a"], sent["b"], f), exact / 4.0**f)


def test_groups_may_be_empty():
    X = np.ones((3, 1), np.int64)
    product = agreed(3, 1, 1, 4)
    sent = run(product, X, X, np.array([1, 1, 3]))
    np.testing.assert_array_equal((sent["a"] + sent["b"]).ravel(), [0, 2, 0, 1])


def test_no_common_entities_give_zeros():
    product = agreed(0, 2, 3, 2)
    sent = run(product, np.empty((0, 2), np.int64), np.empty((0, 3), np.int64), np.empty(0, np.int64))
    np.testing.assert_array_equal(secure.combine(product, sent["a"], sent["b"], 20), np.zeros((2, 2, 3)))


def test_correlations_are_exact_to_the_rounding_of_the_columns():
    n = 20_000
    f = ring.fractional_bits(n)
    A, B = columns(n, 4, 1), columns(n, 3, 2)
    product = agreed(n, 4, 3)
    sent = run(product, secure.encode_columns(A, f, "A"), secure.encode_columns(B, f, "B"), np.zeros(n, int))
    error = secure.combine(product, sent["a"], sent["b"], f)[0] / n - A.T @ B / n
    assert np.abs(error).max() < 5 * 2.0**-f / np.sqrt(6 * n)


def test_heavy_tails_lose_no_bits():
    """All of a standardized column's weight in one row is within the bound."""
    n = 5000
    A = np.zeros((n, 1))
    A[7] = 1.0
    A = (A - A.mean()) / A.std()
    f = ring.fractional_bits(n)
    X = secure.encode_columns(A, f, "A")
    product = agreed(n, 1, 1)
    sent = run(product, X, X, np.zeros(n, int))
    np.testing.assert_allclose(secure.combine(product, sent["a"], sent["b"], f), n, rtol=2.0**-f)


def test_the_same_seeds_give_the_same_messages():
    X_a, X_b, group = np.arange(12).reshape(6, 2), np.arange(18).reshape(6, 3), np.zeros(6, int)
    first, second = (run(agreed(6, 2, 3), X_a, X_b, group) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert secure.new_seed() != secure.new_seed()


def quarter_round(x, a, b, c, d):
    for target, add, twisted, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[target] = (x[target] + x[add]) % 2**32
        mixed = x[twisted] ^ x[target]
        x[twisted] = (mixed << bits | mixed >> 32 - bits) % 2**32


def chacha20_words(seed, label, blocks):
    """Key stream of RFC 8439, section 2.3, written out, as words of 64 bits."""
    stream = b""
    for counter in range(blocks):
        start = b"expand 32-byte k" + seed + counter.to_bytes(4, "little") + label.ljust(12, b"\0")
        state = [int.from_bytes(start[k : k + 4], "little") for k in range(0, 64, 4)]
        x = list(state)
        for _ in range(10):
            for k in range(4):
                quarter_round(x, k, 4 + k, 8 + k, 12 + k)
            for k in range(4):
                quarter_round(x, k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4)
        stream += b"".join(((u + v) % 2**32).to_bytes(4, "little") for u, v in zip(x, state, strict=True))
    return np.frombuffer(stream, "<i8")


def test_seeds_are_expanded_as_the_rfc_says():
    """So that sites with other software expand the same U."""
    stream = secure.Stream(SEED_A, b"U", (23, 3))
    np.testing.assert_array_equal(stream[:23].ravel(), chacha20_words(SEED_A, b"U", 9)[:69])


@pytest.mark.parametrize("start, stop", [(0, 1), (1, 2), (3, 20), (22, 23), (5, 5), (20, 99)])
def test_any_rows_of_a_stream_can_be_had(start, stop):
    stream = secure.Stream(SEED_B, b"V", (23, 3))
    np.testing.assert_array_equal(stream[start:stop], stream[:23][start:stop])


# --- what the parties see ---


@pytest.mark.parametrize(
    "X", [np.zeros((4000, 5), np.int64), np.full((4000, 5), 2**40), np.arange(20_000).reshape(4000, 5)]
)
def test_what_the_sites_open_is_uniform(X):
    product = agreed(4000, 5, 5)
    assert seems_uniform(secure.open_a(product, SEED_A, X))
    assert seems_uniform(secure.open_b(product, SEED_B, X))


def test_what_is_opened_is_independent_of_the_columns():
    """The same law for two tables, and no correlation with the table."""
    product = agreed(20_000, 1, 1)
    one, two = columns(20_000, 1, 5), np.exp(columns(20_000, 1, 6))
    opened = [
        secure.open_a(product, seed, secure.encode_columns(X, 22, "A")).ravel()
        for X, seed in ((one, SEED_A), (two, SEED_B))
    ]
    assert stats.ks_2samp(*opened).pvalue > ALPHA
    assert stats.pearsonr(opened[0], one.ravel()).pvalue > ALPHA
    assert stats.pearsonr(opened[1], two.ravel()).pvalue > ALPHA


def test_streams_for_different_ends_do_not_meet():
    """One seed by mistake for all still gives U, V, Z_a and R without a word in common."""
    product, group = agreed(9, 3, 3), np.zeros(9, int)
    nothing, no_share = np.zeros((9, 3), np.int64), np.zeros((1, 3, 3), np.int64)
    U, V = -secure.open_a(product, SEED_A, nothing), -secure.open_b(product, SEED_A, nothing)
    R = -secure.share_b(product, SEED_A, nothing, no_share, group, SEED_A)
    Z_a = secure.share_a(product, SEED_A, nothing, nothing, group, SEED_A) - R
    assert len(np.unique(np.concatenate([part.ravel() for part in (U, V, R, Z_a)]))) == 27 + 27 + 9 + 9


def test_each_share_alone_is_uniform():
    product, X = agreed(2, 1, 1), np.array([[3], [-5]])
    sent = [run(product, X, X, np.zeros(2, int), fresh(k)) for k in range(1500)]
    for name in ("a", "b", "Z_b"):
        assert seems_uniform(np.array([messages[name] for messages in sent]))
    assert {int((messages["a"] + messages["b"]).item()) for messages in sent} == {34}


def test_a_coordinator_who_dealt_the_triple_does_not_see_products_with_v():
    """Without the clients' mask, A's share less Z_a is X_a'X_b - X_a'V: equations about A's columns."""
    product, group = agreed(2, 1, 1), np.zeros(2, int)
    X_a, X_b = np.array([[3], [-5]]), np.array([[7], [2]])
    left = []
    for k in range(1500):
        seeds = fresh(k)
        sent = run(product, X_a, X_b, group, seeds)
        V = X_b - sent["F"]
        Z_a = -secure.deal_triple(product, *seeds[:2], group) + (X_a - sent["E"]).T @ V
        left.append(sent["a"] - Z_a - (X_a.T @ X_b - X_a.T @ V))
    assert seems_uniform(np.array(left))


def test_other_columns_of_b_explain_what_a_sees():
    """For any X_b there are V and Z_b with which A's view is the same and the result is that of this X_b."""
    n, p, q, groups = 5, 2, 3, 2
    product, group = agreed(n, p, q, groups), np.array([0, 1, 0, 1, 1])
    generator = np.random.default_rng(1)
    X_a, X_b, other = (generator.integers(-1000, 1000, (n, k)) for k in (p, q, q))
    seen = run(product, X_a, X_b, group)
    U = X_a - seen["E"]
    Z_a = by_group(U, X_b - seen["F"], group, groups) - seen["Z_b"]

    V = other - seen["F"]
    Z_b = by_group(U, V, group, groups) - Z_a
    R = seen["a"] - by_group(X_a, seen["F"], group, groups) - Z_a
    b = by_group(seen["E"], V, group, groups) + Z_b - R
    np.testing.assert_array_equal(seen["a"] + b, by_group(X_a, other, group, groups))
    np.testing.assert_array_equal(seen["a"] + seen["b"], by_group(X_a, X_b, group, groups))


def test_other_columns_of_a_explain_what_b_sees():
    n, p, q, groups = 5, 2, 3, 2
    product, group = agreed(n, p, q, groups), np.array([0, 1, 0, 1, 1])
    generator = np.random.default_rng(2)
    X_a, X_b, other = (generator.integers(-1000, 1000, (n, k)) for k in (p, q, p))
    seen = run(product, X_a, X_b, group)
    V, U = X_b - seen["F"], other - seen["E"]
    R = by_group(seen["E"], V, group, groups) + seen["Z_b"] - seen["b"]
    a = by_group(other, seen["F"], group, groups) + by_group(U, V, group, groups) - seen["Z_b"] + R
    np.testing.assert_array_equal(a + seen["b"], by_group(other, X_b, group, groups))


def test_the_dealer_with_one_site_has_the_other():
    """Parties that must not collude, as the docstring states."""
    product, X = agreed(6, 1, 2), np.arange(12).reshape(6, 2)
    F = secure.open_b(product, SEED_B, X)
    np.testing.assert_array_equal(F + secure.Stream(SEED_B, b"V", (6, 2))[:6], X)


def test_a_seed_used_twice_reveals_the_difference():
    product, X, Y = agreed(4, 2, 1), np.arange(8).reshape(4, 2), np.full((4, 2), 9)
    one, two = (secure.open_a(product, SEED_A, table) for table in (X, Y))
    np.testing.assert_array_equal(one - two, X - Y)


# --- what is refused ---


def test_a_column_out_of_range_is_named_without_its_values():
    X = np.ones((10, 2))
    X[3, 1] = 123_456_789.0
    with pytest.raises(EstimationError, match=r"Court: column 'debt' .*standardize") as error:
        secure.encode_columns(X, 22, "Court", ["age", "debt"])
    assert "123" not in str(error.value) and "1.2" not in str(error.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_missing_values_are_named(bad):
    X = np.ones((10, 2))
    X[3, 0] = bad
    with pytest.raises(
        EstimationError, match=r"Court: column 1 of 2 has values that are missing or infinite"
    ):
        secure.encode_columns(X, 22, "Court")


def test_wrong_lengths_are_named():
    product, group = agreed(6, 2, 3, 2), np.zeros(6, int)
    X_a, X_b = np.zeros((6, 2), np.int64), np.zeros((6, 3), np.int64)
    share = np.zeros((2, 2, 3), np.int64)
    with pytest.raises(
        MessageError, match=r"Tax Office: expected columns .*\(6, 2\), received int64 .*\(5, 2\)"
    ):
        secure.open_a(product, SEED_A, X_a[:5])
    with pytest.raises(MessageError, match=r"Court: expected columns .*\(6, 3\), received .*\(6, 2\)"):
        secure.open_b(product, SEED_B, X_a)
    with pytest.raises(MessageError, match=r"Court: expected opened columns .*\(5, 3\)"):
        secure.share_a(product, SEED_A, X_a, X_b[:5], group, MASK)
    with pytest.raises(MessageError, match=r"Tax Office: expected opened columns .*\(6, 1\)"):
        secure.share_b(product, SEED_B, X_a[:, :1], share, group, MASK)
    with pytest.raises(MessageError, match=r"dealer: expected share of the triple .*\(1, 2, 3\)"):
        secure.share_b(product, SEED_B, X_a, share[:1], group, MASK)
    with pytest.raises(MessageError, match=r"Court: expected share of the product"):
        secure.combine(product, share, share[:, :1], 20)
    with pytest.raises(MessageError, match="received float64"):
        secure.open_a(product, SEED_A, X_a.astype(float))


@pytest.mark.parametrize(
    "group", [np.zeros(5, int), np.zeros(6), np.array([0, 0, 0, 0, 0, 2]), np.full(6, -1)]
)
def test_wrong_groups_are_refused(group):
    with pytest.raises(MessageError, match="dealer: expected"):
        secure.deal_triple(agreed(6, 2, 3, 2), SEED_A, SEED_B, group)


@pytest.mark.parametrize("seed", [b"", bytes(31), "a" * 32])
def test_a_short_seed_is_refused(seed):
    with pytest.raises(MessageError, match="Tax Office: expected a seed of 32 bytes"):
        secure.open_a(agreed(1, 1, 1), seed, np.ones((1, 1), np.int64))


def test_other_groups_at_one_site_are_noticed():
    product = agreed(200, 5, 5, 4)
    f, group = ring.fractional_bits(200), np.arange(200) % 4
    X = secure.encode_columns(columns(200, 5), f, "A")
    sent = run(product, X, X, group)
    b = secure.share_b(product, SEED_B, sent["E"], sent["Z_b"], np.roll(group, 1), MASK)
    with pytest.raises(SecurityError, match="Tax Office and Court do not match"):
        secure.combine(product, sent["a"], b, f)


@pytest.mark.parametrize("sizes", [(-1, 1, 1, 1), (5, 0, 1, 1), (5, 1, 0, 1), (5, 1, 1, 0), (2**33, 5, 1, 1)])
def test_sizes_without_meaning_are_refused(sizes):
    with pytest.raises(ModelError, match="Tax Office and Court"):
        agreed(*sizes)


@pytest.mark.benchmark
def test_ten_products_of_the_enterprise_study_take_under_three_seconds():
    n, widths = 166_207, (12, 3, 6, 9, 5)
    f, group = ring.fractional_bits(n), np.random.default_rng(0).integers(0, 32, n)
    tables = [columns(n, p, seed) for seed, p in enumerate(widths)]
    run(agreed(5, 1, 1), np.ones((5, 1), np.int64), np.ones((5, 1), np.int64), np.zeros(5, int))
    secure.encode_columns(np.ones((1, 1)), 20, "compiles")
    start = time.perf_counter()
    encoded = [secure.encode_columns(table, f, "A") for table in tables]
    for k, (X_a, X_b) in enumerate(itertools.combinations(encoded, 2)):
        product = agreed(n, X_a.shape[1], X_b.shape[1], 32)
        sent = run(product, X_a, X_b, group, fresh(k))
        secure.combine(product, sent["a"], sent["b"], f)
    assert time.perf_counter() - start < 3
