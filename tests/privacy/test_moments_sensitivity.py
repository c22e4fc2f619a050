"""The sensitivity of products with squares and sums: never exceeded, and reached up to little."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from fedstat.errors import ModelError
from fedstat.privacy.sensitivity import moments_sensitivity

SIZES = [3, 3, 2]


def change(u, v, owner):
    """Squared change of the upper triangle of (1, u)(1, u)', each number over the variance of its noise."""
    a, b = np.append(1.0, u), np.append(1.0, v)
    moved = np.triu(np.outer(a, a) - np.outer(b, b))
    of = np.append(-1, owner)
    alone = (of[:, None] == of) | (of < 0)[:, None] | (of < 0)
    return (moved**2 / np.where(alone, 1.0, 2.0)).sum()


def cut(values, radii, owner):
    out = values.copy()
    for k, radius in enumerate(radii):
        own = owner == k
        out[own] *= min(1.0, np.sqrt(radius) / max(np.linalg.norm(out[own]), 1e-12))
    return out


@pytest.mark.parametrize("radii", [(2.0, 2.0, 2.0), (1.2, 6.0, 3.0), (48.0, 48.0, 88.0)])
def test_the_bound_holds_for_any_pair_of_records_and_some_come_close(radii):
    owner = np.repeat(np.arange(3), SIZES)
    bound = float(moments_sensitivity([round(r * 10) / 10 for r in radii]).coordinator)
    random, best = np.random.default_rng(1), 0.0

    def loss(x):
        u, v = np.split(x, 2)
        return -change(cut(u, radii, owner), cut(v, radii, owner), owner)

    for _ in range(6):
        start = random.normal(size=2 * len(owner)) * 2.0 * np.sqrt(max(radii))
        best = max(best, -minimize(loss, start, method="Nelder-Mead", options={"maxiter": 600}).fun)
        assert best <= bound * (1 + 1e-9)
    # Records that are axes of their blocks, at right angles.
    u, v = np.zeros(len(owner)), np.zeros(len(owner))
    for k, radius in enumerate(radii):
        place = np.flatnonzero(owner == k)
        u[place[0]] = v[place[1]] = np.sqrt(radius)
    best = max(best, change(u, v, owner))
    assert 0.97 * bound < best <= bound * (1 + 1e-9)


@pytest.mark.parametrize("radius", [1.2, 3.0, 48.0])
def test_the_bound_for_the_products_of_one_site_holds_and_is_reached(radius):
    bound = float(moments_sensitivity([radius]).sites[0])
    owner, best = np.zeros(2), 0.0
    for a in np.linspace(0, 2 * np.pi, 73):
        for b in np.linspace(0, 2 * np.pi, 73):
            u, v = (np.sqrt(radius) * np.array([np.cos(x), np.sin(x)]) for x in (a, b))
            best = max(best, change(u, v, owner))
    assert 0.99 * bound < best <= bound * (1 + 1e-9)


def test_the_products_with_others_move_by_twice_a_row_times_theirs():
    alone, both = moments_sensitivity([3]).sites[0], moments_sensitivity([3, 5]).sites[0]
    assert both - alone == 4 * 3 * 5


def test_rows_without_a_length_have_no_sensitivity():
    with pytest.raises(ModelError, match="one half or more"):
        moments_sensitivity([3, 0])
