"""What the exchange of a split network gives away: labels from gradients, columns from outputs.

Both succeed where nothing is protected, with masks as well; what a strict policy refuses is the exchange. The
labels are protected by randomising them first, and by nothing else.
"""

import numpy as np
import pandas as pd
import pytest
from wiretap import tapped

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.door.owner.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ("bank", "shop", "telecom")


def study(n=1500, seed=1):
    """Three columns of each of three institutions, and labels at the first."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 9)) @ np.linalg.cholesky(0.8 * np.eye(9) + 0.2).T
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(0.5 - X[:, 0] - X[:, 4] + X[:, 8]))).astype(float)
    frames = {}
    for k, site in enumerate(SITES):
        frames[site] = pd.DataFrame(X[:, 3 * k : 3 * k + 3], columns=[f"{site}{j}" for j in range(3)])
        frames[site]["id"] = np.arange(n)
    frames["bank"]["y"] = y
    return frames


def listened(frames, policy="open", **fit):
    part = fs.ClientPartition.from_frames(frames, on="id", policy=policy)
    model = fs.LASER.from_formula("y ~ .", part, hidden=(8,), width=8)
    with tapped(model) as wire:
        model.fit(epochs=3, batch_size=250, rate=0.02, **fit)
    return wire


def area(score, y):
    ranks = pd.Series(score).rank().to_numpy()
    n1 = y.sum()
    found = (ranks[y == 1].sum() - n1 * (n1 + 1) / 2) / (n1 * (len(y) - n1))
    return max(found, 1.0 - found)


def labels_of_a_batch(wire, frames, site="shop", batch=3):
    """Area under the curve of labels told from the gradients of one batch: their first direction."""
    asks = [(a, r) for a, r in wire.passed if (a.site, a.step) == (site, "train")]
    rows, gradient = asks[batch][0].arrays["rows"], asks[batch + 1][0].arrays["gradient"]
    # Gradients of different sets differ in length and not in sign.
    direction = np.linalg.svd(gradient, full_matrices=False)[2][0]
    return area(gradient @ direction, frames["bank"]["y"].to_numpy()[rows])


@pytest.mark.parametrize("exchange", ["clear", "masked"])
def test_a_client_learns_labels_from_the_gradients_of_one_batch(exchange):
    frames = study()
    assert labels_of_a_batch(listened(frames, exchange=exchange), frames) > 0.99


def test_randomised_labels_are_what_it_learns_then():
    frames = study()
    found = labels_of_a_batch(listened(frames, exchange="clear", label_epsilon=1.0), frames)
    keep = np.exp(1.0) / (1.0 + np.exp(1.0))
    assert found < keep + 0.08  # the area of a label that was kept with this probability


def columns_told(view, known, of):
    """R-squared of columns predicted from numbers per entity, by a regression learned on some rows."""
    Z = np.column_stack([view, view**2, np.ones(len(view))])
    b = np.linalg.lstsq(Z[known], of[known], rcond=1e-8)[0]
    rest = ~known
    error = ((of[rest] - Z[rest] @ b) ** 2).sum(axis=0) / ((of[rest] - of[rest].mean(axis=0)) ** 2).sum(
        axis=0
    )
    return float(np.mean(1.0 - error).clip(0.0))


def test_the_holder_learns_columns_from_outputs_and_masks_only_slow_it_down():
    """From two hundred known entities it predicts those of a client's columns in the same look."""
    frames, told = study(), {}
    X = frames["shop"][["shop0", "shop1", "shop2"]].to_numpy()
    for exchange in ("clear", "masked"):
        wire = listened(frames, exchange=exchange, validation=0.5, calibration=0.0)
        looks = [(a, r) for a, r in wire.passed if a.step == "judge"]
        ask = looks[-1][0].arrays
        outputs = ask["outputs"]
        view = outputs[1] if exchange == "clear" else outputs[0]
        known = np.arange(len(view)) < 200
        told[exchange] = columns_told(view, known, X[ask["rows"]])
        assert outputs.shape[0] == (3 if exchange == "clear" else 1)
    assert told["clear"] > 0.85
    assert 0.3 < told["masked"] < told["clear"]


def test_a_strict_policy_refuses_numbers_for_each_entity():
    strict = Policy.strict()
    frames = study()
    part = fs.ClientPartition.from_frames(frames, on="id", policy=strict)
    with pytest.raises(PolicyError, match="does not let numbers for each entity leave"):
        fs.LASER.from_formula("y ~ .", part).fit(epochs=1)


def test_numbers_for_each_entity_are_counted_by_their_width():
    """Eight outputs for each entity are eight numbers, however many arrays they come in."""
    frames = study(600)
    part = fs.ClientPartition.from_frames(frames, on="id", policy=Policy(per_entity=20))
    model = fs.LASER.from_formula("y ~ .", part, hidden=(8,), width=8)
    with pytest.raises(DescriptionError, match="lets 20 numbers for each entity leave"):
        model.fit(epochs=3, batch_size=600, validation=0.0, calibration=0.0)
