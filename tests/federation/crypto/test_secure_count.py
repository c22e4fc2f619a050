"""Secure counts: the comparison with a minimum, and what each site sees of it."""

import numpy as np
import pytest
import scipy.stats

from fedstat.errors import MessageError
from fedstat.federation.crypto import secure_count as counting
from fedstat.federation.crypto.secure_product import MatrixProduct, new_seed

SURE = 1e-9
"""Below this p value a distribution is another one; a test of uniform numbers fails so often by chance."""


def compare(A, B, group, groups, least):
    """Run the protocol; returns which counts are forbidden as A and as B sees it, and all messages."""
    product = MatrixProduct("A", "B", len(group), A.shape[1], B.shape[1], groups)
    seeds = new_seed(), new_seed()
    Z_b = counting.deal_counts(product, *seeds, group).reshape(-1)
    w_b = counting.deal_comparison(product, least, *seeds)
    shown = [counting.open_supports(own, seed) for own, seed in zip((A, B), seeds, strict=True)]
    E, F = (
        np.frombuffer(one, counting.WORD).reshape(own.shape) for one, own in zip(shown, (A, B), strict=True)
    )
    none = np.empty(0, np.int64)
    c_a = counting.share_of_counts(product, True, A, seeds[0], F, none, group)
    c_b = counting.share_of_counts(product, False, B, seeds[1], E, Z_b, group)
    a = counting.CountComparison.of(product, True, least, c_a, seeds[0], none)
    b = counting.CountComparison.of(product, False, least, c_b, seeds[1], w_b)
    operands = a.opened(), b.opened()
    outcomes = a.share(operands[1]), b.share(operands[0])
    seen = (
        counting.forbidden_counts(product, outcomes[0], outcomes[1]),
        counting.forbidden_counts(product, outcomes[1], outcomes[0]),
    )
    return seen, {"shown": shown, "operands": operands, "outcomes": outcomes, "shares": (c_a, c_b)}


def columns_with_counts(counts, n):
    """One column of A and one of B for each count, such that column i of both has that count."""
    A, B = np.zeros((n, len(counts)), np.uint8), np.zeros((n, len(counts)), np.uint8)
    for i, count in enumerate(counts):
        A[: count + 3, i] = 1
        B[:count, i] = 1
        B[count + 3 : count + 9, i] = 1
    return A, B


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 6])
def test_every_count_near_the_minimum(least):
    """Counts of 0 to k + 2 rows in one group, and what these are in another division of the rows."""
    A, B = columns_with_counts(range(least + 3), 40)
    for group in (np.zeros(40, np.int64), np.arange(40) % 3):
        groups = int(group.max()) + 1
        truth = np.array([A[group == g].T.astype(int) @ B[group == g] for g in range(groups)])
        (at_a, at_b), messages = compare(A, B, group, groups, least)
        assert np.array_equal(at_a, (truth > 0) & (truth < least))
        assert np.array_equal(at_a, at_b)
        assert np.array_equal(np.sum(messages["shares"], axis=0) % 2**32, truth)


def test_counts_of_random_columns_over_more_than_one_block():
    rng = np.random.default_rng(5)
    A, B = ((rng.random((9001, p)) < 0.02).astype(np.uint8) for p in (3, 5))
    group = rng.integers(0, 4, 9001)
    truth = np.array([A[group == g].T.astype(int) @ B[group == g] for g in range(4)])
    (seen, _), _ = compare(A, B, group, 4, 3)
    assert np.array_equal(seen, (truth > 0) & (truth < 3))
    assert seen.any()
    assert (truth == 0).any()


def uniform(words, below):
    """P value of numbers below a bound being uniform, by 64 bins of equal width."""
    counts = np.bincount((words.astype(np.float64) * (64 / below)).astype(int), minlength=64)
    return scipy.stats.chisquare(counts).pvalue


def numbers(message):
    return np.frombuffer(message, counting.WORD).astype(np.int64)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 500])
def test_messages_are_uniform_whatever_the_count(count):
    """All that either site receives, but for the one bit; the coordinator carries it sealed."""
    n, p = 600, 60
    A, B = np.zeros((n, p), np.uint8), np.zeros((n, p), np.uint8)
    A[:count] = B[:count] = 1
    seen, messages = compare(A, B, np.zeros(n, np.int64), 1, 3)
    assert (seen[0] == (0 < count < 3)).all()
    for one in messages["shown"]:
        assert uniform(numbers(one), 2**32) > SURE
    for one in messages["shares"]:
        assert uniform(one.reshape(-1), 2**32) > SURE
    for one in (*messages["operands"], *messages["outcomes"]):
        assert uniform(numbers(one), counting.PRIME) > SURE
    outcome = (numbers(messages["outcomes"][0]) + numbers(messages["outcomes"][1])) % counting.PRIME
    if 0 < count < 3:
        assert not outcome.any()
    else:
        assert outcome.all()
        assert uniform(outcome, counting.PRIME) > SURE


def test_the_outcome_does_not_depend_on_an_allowed_count(monkeypatch):
    """Modulo a small prime every number but zero is equally frequent, whatever the allowed count."""
    monkeypatch.setattr(counting, "PRIME", 31)
    n, p = 40, 150
    tables = []
    for count in (0, 3, 4, 11):
        A, B = np.zeros((n, p), np.uint8), np.zeros((n, p), np.uint8)
        A[:count] = B[:count] = 1
        _, messages = compare(A, B, np.zeros(n, np.int64), 1, 3)
        outcome = (numbers(messages["outcomes"][0]) + numbers(messages["outcomes"][1])) % 31
        tables.append(np.bincount(outcome, minlength=31)[1:])
        assert outcome.all()
        assert scipy.stats.chisquare(tables[-1]).pvalue > SURE
    assert scipy.stats.chi2_contingency(np.array(tables)).pvalue > SURE


def test_the_factors_of_a_comparison_are_not_zero_and_differ():
    """With one factor for two counts, the quotient of the outcomes would be that of their polynomials."""
    product = MatrixProduct("A", "B", 5, 100, 100)
    shares = np.zeros(product.shape, np.int64)
    one = counting.CountComparison.of(product, True, 3, shares, new_seed(), np.empty(0, np.int64))
    factors = one.operand[:, 0]  # the power zero
    assert factors.min() > 0
    assert len(np.unique(factors)) > 0.99 * len(factors)
    again = counting.CountComparison.of(product, True, 3, shares, new_seed(), np.empty(0, np.int64))
    assert (factors != again.operand[:, 0]).mean() > 0.99


def test_messages_of_another_form_are_refused():
    product = MatrixProduct("A", "B", 5, 2, 2)
    comparison = counting.CountComparison.of(
        product, True, 3, np.zeros(product.shape, np.int64), new_seed(), np.empty(0, np.int64)
    )
    too_large = np.full(12, counting.PRIME, counting.WORD).tobytes()
    for wrong in (b"", comparison.opened()[:-4], too_large):
        with pytest.raises(MessageError, match="12 numbers below the prime"):
            comparison.share(wrong)
    zeros, nothing = np.zeros(product.shape, np.int64), np.empty(0, np.int64)
    with pytest.raises(MessageError, match="share of a comparison for every count"):
        counting.CountComparison.of(product, False, 3, zeros, new_seed(), nothing)
