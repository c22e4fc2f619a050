"""What the exchange of a split network gives away: labels from gradients, columns from outputs.

Both succeed where nothing is protected, and with masks as well; the strict policy refuses the exchange. Only
randomized labels protect the responses.

Masks change one thing: a sum over several sites predicts less of each site's columns than its own outputs do,
and the more sites there are, the less. Two things stay: gradients are returned unmasked, and two sums
over two sets of sites that differ in one site have its outputs as their difference.
"""

import numpy as np
import pandas as pd
import pytest
from wiretap import tapped

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.crypto.masks import unmask_sums
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.protocols.engine import LocalEngine

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
        model.fit(epochs=3, batch_size=250, learning_rate=0.02, **fit)
    return wire


def area(score, y):
    ranks = pd.Series(score).rank().to_numpy()
    n1 = y.sum()
    found = (ranks[y == 1].sum() - n1 * (n1 + 1) / 2) / (n1 * (len(y) - n1))
    return max(found, 1.0 - found)


def labels_of_a_batch(wire, frames, site="shop", batch=3):
    """Area under the curve of labels predicted from the gradients of one batch, by their first direction."""
    requests = [(a, r) for a, r in wire.passed if (a.site, a.step) == (site, "train")]
    rows, gradient = requests[batch][0].arrays["rows"], requests[batch + 1][0].arrays["gradient"]
    # Gradients of different sets differ in length and not in sign.
    direction = np.linalg.svd(gradient, full_matrices=False)[2][0]
    return area(gradient @ direction, frames["bank"]["y"].to_numpy()[rows])


@pytest.mark.parametrize("masked", [False, True])
def test_a_site_learns_labels_from_the_gradients_of_one_batch(masked):
    frames = study()
    assert labels_of_a_batch(listened(frames, masked=masked), frames) > 0.9995


def test_randomized_labels_are_what_it_learns_then():
    frames = study()
    found = labels_of_a_batch(listened(frames, masked=False, label_epsilon=1.0), frames)
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
    frames, reported = study(), {}
    X = frames["shop"][["shop0", "shop1", "shop2"]].to_numpy()
    for masked in (False, True):
        wire = listened(frames, masked=masked, validation=0.5, calibration=0.0)
        looks = [(a, r) for a, r in wire.passed if a.step == "judge"]
        request = looks[-1][0].arrays
        outputs = request["outputs"]
        view = outputs[0] if masked else outputs[1]
        known = np.arange(len(view)) < 200
        reported[masked] = columns_told(view, known, X[request["rows"]])
        assert outputs.shape[0] == (1 if masked else 3)
    assert reported[False] > 0.85
    assert 0.3 < reported[True] < reported[False]


def sums_of_outputs(fitted, frames, monkeypatch):
    """Masked sum of the clients' outputs for every entity, as the coordinator adds it up."""
    passed, plain = [], LocalEngine._send

    def kept(self, request, ledger):
        reply = plain(self, request, ledger)
        passed.append((request, reply))
        return reply

    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "_send", kept)
        fitted.predict_proba(fs.ClientPartition.from_frames(frames, on="id"))
    words = [r.arrays["outputs"] for a, r in passed if a.step == "represent" and a.masked is not None]
    assert len(words) == len(frames)
    return unmask_sums({"outputs": words})["outputs"]


def test_what_masks_change_of_columns_and_what_a_difference_of_two_sums_undoes(monkeypatch):
    """R-squared of a client's columns: of its outputs, of masked sums, and of two of these together."""
    frames = study(2500)
    power = frames["telecom"].rename(columns=lambda c: c.replace("telecom", "power"))
    rng = np.random.default_rng(2)
    frames["power"] = power.assign(
        **{c: 0.3 * power[c] + rng.normal(size=len(power)) for c in power if c != "id"}
    )
    part = fs.ClientPartition.from_frames(frames, on="id")
    fitted = fs.LASER.from_formula("y ~ .", part, hidden=(8,), width=8).fit(
        epochs=3, batch_size=250, learning_rate=0.02, masked=True
    )
    X = frames["shop"][["shop0", "shop1", "shop2"]].to_numpy()
    every = sums_of_outputs(fitted, frames, monkeypatch)
    others = sums_of_outputs(fitted, {k: f for k, f in frames.items() if k != "shop"}, monkeypatch)
    three = sums_of_outputs(fitted, {k: f for k, f in frames.items() if k != "power"}, monkeypatch)
    trained, own = fitted._record.fitted.trained, (X - X.mean(axis=0)) / X.std(axis=0)
    theta = trained.networks["shop"][0]
    hidden = np.maximum(own @ theta[:24].reshape(8, 3).T + theta[24:32], 0.0)
    outputs = hidden @ theta[32:96].reshape(8, 8).T + theta[96:]
    known = np.arange(len(X)) < 200
    reported = {
        name: columns_told(view, known, X)
        for name, view in (("own", outputs), ("of three", three), ("of four", every), ("others", others))
    }
    # R2 0.95 from its own outputs, 0.63 and 0.56 from sums of three and four, 0.03 from the others' outputs.
    assert reported["own"] > 0.9 and reported["of four"] > 0.4 and reported["others"] < 0.1
    assert reported["others"] < reported["of four"] < reported["of three"] < 0.8 * reported["own"]
    # The difference of the sums with and without a site is its output, to the resolution of masked numbers.
    np.testing.assert_allclose(every - others, outputs, atol=1e-9)
    assert columns_told(every - others, known, X) == pytest.approx(reported["own"], abs=1e-6)


def test_a_strict_policy_refuses_numbers_for_each_entity():
    strict = Policy.strict()
    frames = study()
    part = fs.ClientPartition.from_frames(frames, on="id", policy=strict)
    with pytest.raises(PolicyError, match="does not release numbers for each entity"):
        fs.LASER.from_formula("y ~ .", part).fit(epochs=1)


def test_numbers_for_each_entity_are_counted_by_their_width():
    """Eight outputs for each entity are eight numbers, however many arrays they come in."""
    frames = study(600)
    part = fs.ClientPartition.from_frames(frames, on="id", policy=Policy(per_entity=20))
    model = fs.LASER.from_formula("y ~ .", part, hidden=(8,), width=8)
    with pytest.raises(DescriptionError, match="releases 20 numbers for each entity"):
        model.fit(epochs=3, batch_size=600, validation=0.0, calibration=0.0)
