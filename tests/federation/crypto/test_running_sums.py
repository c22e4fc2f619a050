"""Sums of one client's columns with what another makes later: exact, checked, and each shown once."""

import numpy as np
import pytest

from fedstat.errors import MessageError, SecurityError
from fedstat.federation.crypto import secure_product as running
from fedstat.federation.crypto import secure_product as secure

N, P, ROUNDS = 500, 3, 4


@pytest.fixture
def dealt():
    """Everything that A and B hold after the columns were opened."""
    rng = np.random.default_rng(2)
    X = rng.integers(-(2**30), 2**30, size=(N, P))
    product = running.describe_rounds("A", "B", N, P, ROUNDS)
    seeds = secure.new_seed(), secure.new_seed()
    checked, weights = running.append_check_column(X)
    E = secure.open_a(product, seeds[0], checked)
    return product, seeds, X, checked, weights, E, running.deal_round_triples(product, *seeds)


def numbers(t):
    return np.random.default_rng(10 + t).integers(-(2**20), 2**20, size=N)


def test_sums_of_every_round_are_exact(dealt):
    product, (seed_a, seed_b), X, checked, weights, E, Z = dealt
    for t in (0, 2, 3):  # a round may be passed over
        shown = running.mask_round_values(product, seed_b, E, Z, numbers(t), t)
        found = running.unmask_round_sums(product, seed_a, checked, weights, shown, t)
        np.testing.assert_array_equal(found, X.T @ numbers(t))


@pytest.mark.parametrize("wrong", ["deal", "share", "round"])
def test_what_is_wrong_is_found(dealt, wrong):
    product, (seed_a, seed_b), _, checked, weights, E, Z = dealt
    if wrong == "deal":
        Z = Z + np.array([[1], [0], [0], [0]])
    f, s = running.mask_round_values(product, seed_b, E, Z, numbers(1), 1)
    if wrong == "share":
        s = s + np.array([0, 2**20, 0, 0])
    with pytest.raises(SecurityError, match="do not fit their check"):
        running.unmask_round_sums(product, seed_a, checked, weights, (f, s), 2 if wrong == "round" else 1)


def test_what_is_shown_is_noise_to_who_lacks_the_seed(dealt):
    product, (_, seed_b), X, _, _, E, Z = dealt
    shown = [
        running.mask_round_values(product, seed_b, E, Z, numbers(0), t)[0].astype(float)
        for t in range(ROUNDS)
    ]
    reported = np.column_stack([*shown, E.astype(float)])
    truth = np.column_stack([numbers(0), X]).astype(float)
    assert np.abs(np.corrcoef(reported.T, truth.T)[: reported.shape[1], reported.shape[1] :]).max() < 0.2
    assert np.abs(np.corrcoef(np.array(shown)) - np.eye(ROUNDS)).max() < 0.2


def test_other_shapes_are_refused(dealt):
    product, (_, seed_b), _, _, _, E, Z = dealt
    with pytest.raises(MessageError, match="opened columns"):
        running.mask_round_values(product, seed_b, E[:, :2], Z, numbers(0), 0)
    with pytest.raises(MessageError, match="share of the triples"):
        running.mask_round_values(product, seed_b, E, Z[:, :1], numbers(0), 0)
