"""One replaced record moves released integers by no more than is said, whatever it holds."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_counts import cell_counts

from fedstat.errors import ModelError
from fedstat.privacy.sensitivity import clip_rows, gram_sensitivity

ANY = st.floats(width=64) | st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 1e308, -1e308, 5e-324, 2.0, -1.0])
RNG = np.random.default_rng(3)


def squared_move(one, other):
    """Exact square of a Euclidean distance of integers."""
    return sum((int(a) - int(b)) ** 2 for a, b in zip(one.ravel(), other.ravel(), strict=True))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-3, 9), min_size=2, max_size=2), st.lists(st.integers(-3, 9), min_size=2, max_size=2)
)
def test_counts(before, after):
    rest = RNG.integers(-1, 6, size=(30, 2))
    one, other = (cell_counts(np.vstack([rest, row]), 6) for row in (before, after))
    assert squared_move(one.values, other.values) <= one.squared == 4


def test_counts_are_counts():
    counts = cell_counts(np.array([0, 2, 2, -1, 3]), 3)
    np.testing.assert_array_equal(counts.values, [1, 0, 2])
    assert (
        counts.squared == 2 == squared_move(counts.values, cell_counts(np.array([1, 2, 2, -1, 3]), 3).values)
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(ANY, min_size=4, max_size=4), st.fractions(Fraction(1, 50), 60), st.integers(0, 14))
def test_cut_rows_are_no_longer_than_their_radius(row, radius, places):
    complete = clip_rows(np.array([row, [3.0, -4.0, 0.0, 1.0]]), radius, places)
    for one in complete:
        assert sum(int(x) ** 2 for x in one) <= radius * 4**places


def test_short_rows_are_kept_but_for_their_last_places():
    X = RNG.normal(size=(50, 3))
    np.testing.assert_allclose(clip_rows(X, 100, 20) / 2.0**20, X, atol=2.0**-20)
    assert clip_rows(np.full((1, 2), np.inf), 2, 10).tolist() == [[1024, 1024]]


def put(w, blocks, radii):
    """Stretch the part of every institution to its radius: the worst rows are as long as they may be."""
    out = np.zeros_like(w)
    for block, radius in zip(blocks, radii, strict=True):
        out[block] = w[block] * np.sqrt(radius) / np.linalg.norm(w[block])
    return out


@pytest.mark.parametrize("sizes", [(3, 3), (1, 4, 4), (5, 2, 2, 6), (1, 1, 12)])
def test_no_pair_of_records_moves_a_gram_matrix_further(sizes):
    """Random pairs, hill climbing, and the pairs of the proof never pass the bound; some come near it."""
    rng = np.random.default_rng(sum(sizes))
    d = sum(sizes)
    blocks = np.split(np.arange(d), np.cumsum(sizes)[:-1])
    own = np.repeat(np.arange(len(sizes)), sizes)
    radii = 1.2 * np.array(sizes)
    bound = gram_sensitivity([Fraction(12 * size, 10) for size in sizes])
    weights = np.triu(np.where(own[:, None] == own, 1.0, 0.5), 1)

    def whole_record(u, v):
        return (weights * (np.outer(u, u) - np.outer(v, v)) ** 2).sum()

    best = 0.0
    for _ in range(12):
        u, v = (put(rng.standard_normal(d), blocks, radii) for _ in range(2))
        found, step = whole_record(u, v), 1.0
        for _ in range(200):
            a, b = (put(w + step * rng.standard_normal(d), blocks, radii) for w in (u, v))
            if (new := whole_record(a, b)) > found:
                u, v, found = a, b, new
            else:
                step *= 0.98
        best = max(best, found)
    assert 0.6 * float(bound.coordinator) < best <= float(bound.coordinator) * (1.0 + 1e-12)
    for k, block in enumerate(blocks):
        seen = np.zeros((d, d), dtype=bool)
        seen[block], seen[:, block] = True, True
        for trial in range(40):
            u = put(rng.standard_normal(d), blocks, radii)
            v = u.copy()
            v[block] = -u[block] if trial % 2 else put(rng.standard_normal(d), blocks, radii)[block]
            moved = (np.triu(seen, 1) * (np.outer(u, u) - np.outer(v, v)) ** 2).sum()
            assert moved <= float(bound.sites[k]) * (1.0 + 1e-12)


def test_five_equal_sites():
    """.8 T against one of them, which is more than the coordinator has: sqrt(.6) T."""
    bound = gram_sensitivity([2] * 5)
    assert bound.sites == (Fraction(64),) * 5 and bound.coordinator == 60
    assert gram_sensitivity([1, 9]).sites == (Fraction(36), Fraction(100))
    with pytest.raises(ModelError, match="radius"):
        gram_sensitivity([])
