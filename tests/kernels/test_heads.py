"""Losses of heads over sets of networks against plain sums, and central differences."""

import numpy as np
import pytest
from statsmodels.tools.numdiff import approx_fprime

from fedstat.kernels import split_networks
from fedstat.kernels.split_networks import BLOCK, draw_parameters, forward, heads_loss
from fedstat.models.laser.networks import flip_matrix

NETWORKS, D, ROWS = 3, 4, 9
MEMBERS = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 1], [0, 1, 0]], dtype=bool)
HEAD = np.array([0, 1, 0, 1])


def read_only(array):
    """Return a copy that has the type of received parameters, for which a site has compiled the loops."""
    array = array.copy()
    array.setflags(write=False)
    return array


def batch(classes, hidden, rows=ROWS, seed=2):
    """All that a loss takes; the third pattern has no part in it."""
    rng = np.random.default_rng(seed)
    widths = np.array([D, *hidden, max(classes, 1)])
    theta = read_only(np.array([draw_parameters(widths, rng) for _ in range(2)]))
    weights = np.vstack([rng.random((2, len(HEAD))), np.zeros(len(HEAD))])
    y = rng.integers(classes, size=rows) * 1.0 if classes else rng.normal(size=rows)
    return {
        "theta": theta,
        "widths": widths,
        "R": rng.normal(size=(NETWORKS, D, rows)),
        "members": MEMBERS,
        "sizes": MEMBERS.sum(axis=1),
        "head": HEAD,
        "weights": weights,
        "code": rng.integers(3, size=rows),
        "own": rng.random(rows),
        "y": y,
        "flip": np.empty((0, 0)),
    }


def plain(given):
    """The same loss, row by row."""
    total, theta = 0.0, read_only(given["theta"])
    for i, y in enumerate(given["y"]):
        for t, h in enumerate(HEAD):
            mean = given["R"][MEMBERS[t], :, i].sum(axis=0) / given["sizes"][t]
            C = given["widths"][-1]
            F = forward(theta[h], given["widths"], np.ascontiguousarray(mean[:, None]))[-C:, 0]
            if C == 1:
                loss = 0.5 * (F[0] - y) ** 2
            else:
                P = np.exp(F) / np.exp(F).sum()
                loss = -np.log((P @ given["flip"] if len(given["flip"]) else P)[int(y)])
            total += given["weights"][given["code"][i], t] * given["own"][i] * loss
    return total


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize(("classes", "epsilon"), [(0, 0.0), (2, 0.0), (3, 0.0), (3, 1.0)])
def test_losses_and_gradients(classes, epsilon, hidden):
    """A normal response, two classes, more, and randomized ones; heads without hidden layers and with."""
    given = batch(classes, hidden)
    if epsilon:
        given["flip"] = flip_matrix(classes, epsilon)
    total, of_heads, back = heads_loss(*given.values())
    assert total == pytest.approx(plain(given), rel=1e-12)
    for name, found in (("theta", of_heads), ("R", back)):
        numeric = approx_fprime(
            given[name].ravel(),
            lambda x, name=name: plain({**given, name: x.reshape(given[name].shape)}),
            centered=True,
        )
        np.testing.assert_allclose(found.ravel(), numeric.ravel(), atol=1e-8)


@pytest.mark.parametrize(("classes", "hidden"), [(2, (5,)), (2, ()), (0, ())])
def test_many_rows_are_the_sum_of_few(classes, hidden, monkeypatch):
    monkeypatch.setattr(split_networks, "MANY_ROWS", BLOCK + 50)
    given = batch(classes, hidden, rows=2 * BLOCK + 7)
    complete = heads_loss(*given.values())
    total, of_heads, back = 0.0, np.zeros_like(complete[1]), []
    for part in np.array_split(np.arange(2 * BLOCK + 7), 13):
        some = {name: given[name][part] for name in ("code", "own", "y")}
        few = heads_loss(*(given | some | {"R": np.ascontiguousarray(given["R"][:, :, part])}).values())
        total, of_heads, back = total + few[0], of_heads + few[1], [*back, few[2]]
    assert complete[0] == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(complete[1], of_heads, atol=1e-11)
    np.testing.assert_allclose(complete[2], np.concatenate(back, axis=2), atol=1e-14)


def test_what_is_no_number_stays_none():
    given = batch(2, ())
    given["theta"] = read_only(np.full_like(given["theta"], np.inf))
    assert np.isnan(heads_loss(*given.values())[0])
