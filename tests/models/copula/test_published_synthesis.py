"""The published synthesis: its law against comparisons flipped one by one, and what it says of itself."""

import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

import fedstat as fs
from fedstat.errors import DisclosureWarning, ModelError, NotAvailableError
from fedstat.models.copula.published import (
    correlation_of,
    draw_in_order,
    draw_truncated,
    margin,
    perturbed_ranks,
    uniform_ranks,
)


def synthesizer(data, epsilon=1.0, **given):
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    return fs.CopulaSynthesizer(partition, epsilon, **{"mechanism": "published", **given})


def simulate(data, method, rounds=10, seed=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DisclosureWarning)
        return synthesizer(data).fit(method, rounds=rounds, seed=seed)


def ranks_by_single_flips(x, a, rng):
    """Answer every comparison of two entities once, a tie by a coin, and undo flips on average."""
    kept = expit(a)
    above = x[:, None] > x
    coin = np.triu(rng.uniform(size=above.shape) < 0.5, 1)
    above = np.where(x[:, None] == x, coin | ~(coin | coin.T) & np.tri(len(x), k=-1, dtype=bool), above)
    flip = np.triu(rng.uniform(size=above.shape) > kept, 1)
    said = np.where(flip | flip.T, ~above, above).astype(float)
    np.fill_diagonal(said, 0.0)
    return (said.sum(axis=1) - (len(x) - 1) * (1.0 - kept)) / (2.0 * kept - 1.0)


@pytest.mark.parametrize("levels", [None, 4])
def test_perturbed_ranks_have_the_law_of_single_flips(levels):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(30) if levels is None else rng.integers(levels, size=30).astype(float)
    a = 0.5
    single = np.array([ranks_by_single_flips(x, a, rng) for _ in range(1_500)])
    ours = np.array([perturbed_ranks(x, a, rng) for _ in range(1_500)])
    error = single.std(axis=0) / np.sqrt(1_500)
    assert (abs(single.mean(axis=0) - ours.mean(axis=0)) < 5.5 * error).all()
    np.testing.assert_allclose(ours.std(axis=0), single.std(axis=0), rtol=0.07)


def test_correlations_are_not_attenuated_by_the_noise():
    rng = np.random.default_rng(5)
    Z = rng.multivariate_normal([0.0, 0.0], [[1.0, 0.6], [0.6, 1.0]], size=400)
    R = [correlation_of(uniform_ranks(Z, 0.3, rng))[0, 1] for _ in range(300)]
    noise_free = correlation_of(uniform_ranks(Z, 50.0, rng))[0, 1]
    assert np.mean(R) == pytest.approx(noise_free, abs=4 * np.std(R) / np.sqrt(300))
    assert noise_free == pytest.approx(0.6, abs=0.1)


def test_margins_with_little_noise_are_those_of_the_column():
    rng = np.random.default_rng(6)
    u = rng.uniform(size=50_000)
    binary = (rng.uniform(size=5_000) < 0.3).astype(float)
    assert margin(binary, 100.0, rng)(u).mean() == pytest.approx(binary.mean(), abs=0.01)
    even = rng.uniform(2.0, 5.0, size=20_000)  # a straight line is its own polynomial
    made = margin(even, 1e4, rng)(u)
    np.testing.assert_allclose(np.quantile(made, [0.1, 0.5, 0.9]), [2.3, 3.5, 4.7], atol=0.04)


def test_blocks_missing_at_random_bias_the_first_method_only():
    data = fs.datasets.make_blocks(5_000, seed=1, mechanism="mar", between=0.1)
    truth = data.complete["C1"].mean()
    bias = {
        method: simulate(data, method).table["C1"].mean() - truth for method in ("vcds", "evcds", "ievcds")
    }
    assert abs(bias["vcds"]) > 0.1 > max(abs(bias["evcds"]), abs(bias["ievcds"]))


def missing_at_random(n=2_000, seed=0, correlation=0.7):
    """Skewed columns of two sites, of which the second lacks entities with a large value at the first."""
    rng = np.random.default_rng(seed)
    R = np.full((3, 3), correlation) + (1 - correlation) * np.eye(3)
    Z = rng.multivariate_normal(np.zeros(3), R, n)
    X, gone = np.exp(Z / 2), rng.random(n) < expit(2 * Z[:, 0])
    frames = {"A": pd.DataFrame({"id": range(n), "x0": X[:, 0]})}
    frames["B"] = pd.DataFrame(X[~gone, 1:], columns=["x1", "x2"]).assign(id=np.flatnonzero(~gone))
    return X, SimpleNamespace(frames=frames, key="id")


@pytest.mark.parametrize(("correlation", "seed"), [(0.7, 0), (0.6, 1)])
def test_the_printed_steps_correct_what_they_say(correlation, seed):
    """EVCDS has the correlation of pairs, and half of the bias of its margins; IEVCDS removes both."""
    X, data = missing_at_random(seed=seed, correlation=correlation)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    model = fs.CopulaSynthesizer(partition, 1e4, mechanism="published")
    bias, found = {}, {}
    for method in ("vcds", "evcds", "ievcds"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DisclosureWarning)
            made = model.fit(method, seed=seed)
        bias[method] = (made.table["x1"].mean() - X[:, 1].mean()) / X[:, 1].std()
        found[method] = made.correlation.loc["x0", "x1"]
    assert bias["vcds"] < -0.25 and bias["vcds"] + 0.1 < bias["evcds"] < -0.02
    assert abs(bias["ievcds"]) < 0.1
    assert found["evcds"] == pytest.approx(found["vcds"], abs=0.01)
    assert found["vcds"] < correlation - 0.1 and found["ievcds"] == pytest.approx(correlation, abs=0.1)


def test_latents_have_the_order_of_ranks_and_the_correlation():
    rng = np.random.default_rng(4)
    R = np.array([[1.0, 0.8], [0.8, 1.0]])
    Z = rng.multivariate_normal([0, 0], R, size=1_500)
    ranks = Z.argsort(axis=0).argsort(axis=0).astype(float)
    ranks[:500, 1] = np.nan
    W = draw_in_order(ranks, R, rng)
    seen = ~np.isnan(ranks)
    for j in (0, 1):
        at = seen[:, j]
        assert (W[at, j].argsort() == ranks[at, j].argsort()).all()
    assert np.corrcoef(W.T)[0, 1] == pytest.approx(0.8, abs=0.05)
    low = np.array([-np.inf, 5.0, -9.0, 38.0])
    drawn = np.array([draw_truncated(low, low + 1.0, rng) for _ in range(50)])[:, 1:]
    assert ((drawn >= low[1:]) & (drawn <= low[1:] + 1.0)).all()


def test_tables_cost_thousands_and_say_so():
    data = fs.datasets.make_selection(1_000, seed=1)
    made = simulate(data, "vcds")
    # 2,771 of comparisons of 20 columns, and half a unit for each margin; the first client has 21.
    assert made.record_epsilon["Client 2"] == pytest.approx(2_771 + 10, abs=1)
    assert "spends epsilon 2," in made.notes[0] and "nothing is private" in made.notes[0]
    again = simulate(data, "evcds", rounds=10)
    assert "order of the real entities" in again.notes[0]
    pd.testing.assert_series_equal(made.record_epsilon, again.record_epsilon)


def test_what_has_no_meaning_for_the_mechanism():
    data = fs.datasets.make_blocks(50)
    for wrong in ({"method": "ievcds", "rounds": 0}, {"method": "published"}, {"method": None}):
        with pytest.raises(ModelError, match=r"rounds|method"):
            simulate(data, **wrong)
    for given in ({"epsilon": 0.0}, {"bounds": {"y": (0, 1)}}, {"missing": "em"}, {"mechanism": "vcds"}):
        with pytest.raises(ModelError, match=next(iter(given))):
            synthesizer(data, **given)
    model = synthesizer(data)
    with pytest.raises(NotAvailableError, match="sends no request"):
        model.explain()
    with pytest.raises(ModelError, match="without disclosure checks"):
        fs.audit(model)
    bounds = {name: (-9, 9) for names in model.columns.values() for name in names}
    with pytest.raises(ModelError, match="this release has none"):
        synthesizer(data, bounds=bounds, mechanism="private").fit("vcds")


def test_levels_in_words_are_named_and_can_be_left_out():
    frames = {"A": pd.DataFrame({"id": range(60), "a": np.arange(60.0), "b": ["x", "y"] * 30})}
    frames["B"] = pd.DataFrame({"id": range(60), "c": np.arange(60.0) ** 2})
    data = SimpleNamespace(frames=frames, key="id")
    with pytest.raises(ModelError, match="column 'b' at 'A'"):
        simulate(data, "evcds")
    with pytest.warns(DisclosureWarning, match="nothing is private"):
        made = synthesizer(data, columns=["a", "c"]).fit("evcds", seed=1)
    assert made.table.shape == (60, 2)


def test_a_seed_repeats_a_simulation():
    data = fs.datasets.make_blocks(200, seed=2)
    tables = [simulate(data, "evcds", seed=seed).table for seed in (1, 1, 2)]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert not tables[0].equals(tables[2])
