"""Information in the robust standard errors of a binary response for the other sites."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import DescriptionError, SecurityError
from fedstat.federation.disclosure.policy import Policy
from fedstat.models.vfem.covariance import score_steps
from fedstat.models.vfem.covariance.score_steps import SPREAD

N = 400
RNG = np.random.default_rng(5)
X = RNG.normal(size=(N, 3))
Y = (RNG.random(N) < 1.0 / (1.0 + np.exp(-X @ [0.8, -0.6, 0.4]))).astype(float)
KEYS = np.arange(N)
FRAMES = {
    "Registry": pd.DataFrame({"k": KEYS, "y": Y}),
    "Bank": pd.DataFrame({"k": KEYS, "b": X[:, 0]}),
    "Court": pd.DataFrame({"k": KEYS, "c": X[:, 1]}).iloc[::-1],
    "Tax": pd.DataFrame({"k": KEYS, "t": X[:, 2]}),
}


def fit(monkeypatch, heard, partition=None, **options):
    """Fit, and hear which numbers institutions open."""
    opened = score_steps.open_shares

    def hear(data, state, site, holder, shown):
        unit, numbers = opened(data, state, site, holder, shown)
        heard.setdefault(data.name, []).append(unit * numbers)
        return unit, numbers

    monkeypatch.setattr(score_steps, "open_shares", hear)
    partition = partition or fs.ClientPartition.from_frames(FRAMES, on="k", shared_seed=1)
    model = fs.VFEMGLM.from_formula("y ~ .", partition, family=sm.families.Binomial(), between="independent")
    result = model.fit(cov_type="robust", **options)
    monkeypatch.setattr(score_steps, "open_shares", opened)
    return result


def told_right(guess):
    """Share of the responses that the sign of a number predicts."""
    return np.mean((guess > 0.0) == (Y > 0.5))


def residuals(result):
    return Y - result.predict().to_numpy()


def test_derivatives_unmasked_are_the_responses_and_what_one_site_opens_is_noise(monkeypatch):
    heard = {}
    openly = fit(monkeypatch, heard, cross_products="exact")
    assert not heard  # they came as arrays, "derivatives"
    assert "derivatives" in set(openly.ledger.to_frame()["array"])
    result = fit(monkeypatch, heard)
    assert "derivatives" not in set(result.ledger.to_frame()["array"])
    assert {name: len(opened[0]) for name, opened in heard.items()} == {"Bank": 1, "Court": 2, "Tax": 2}
    z = residuals(result)
    assert told_right(z) == 1.0
    error = 4.5 * 0.5 / np.sqrt(N)
    for opened in heard.values():
        for numbers in opened[0]:  # a mask, or z and z^2 less one
            assert abs(told_right(numbers[0]) - 0.5) < error
            assert numbers.std() > 0.9 * SPREAD * np.abs(z).max()


def test_asking_again_averages_nothing_out(monkeypatch):
    heard = {}
    partition = fs.ClientPartition.from_frames(FRAMES, on="k", shared_seed=1)
    for _ in range(3):
        fit(monkeypatch, heard, partition)
    for opened in heard.values():
        np.testing.assert_array_equal(opened[0], opened[1])
        np.testing.assert_array_equal(opened[0], opened[2])


def test_two_sites_that_collude_have_the_residuals(monkeypatch):
    """A limit, which the summary names."""
    heard = {}
    result = fit(monkeypatch, heard)
    z = heard["Bank"][0][0, 0] + heard["Tax"][0][0, 0]
    np.testing.assert_allclose(z, residuals(result), atol=1e-9)
    assert "both together can recover the residuals" in " ".join(result.notes)


def test_numbers_of_other_entities_are_not_used(monkeypatch):
    """A coordinator that has the response holder seal in another order gets sums of other rows."""
    seal = score_steps.ResponseScores.rows
    monkeypatch.setattr(score_steps.ResponseScores, "rows", lambda self, site: np.roll(seal(self, site), 1))
    with pytest.raises(SecurityError, match="not the same, in the same order"):
        fit(monkeypatch, {})


def test_strict_sites_count_what_the_sums_reveal_a_binary_response():
    """Few entities, and many sums of products with their residuals: who holds the columns solves for them."""
    strict = replace(Policy.strict(), per_entity=60)
    for policy, refused in ((strict, True), (replace(strict, discrete="any"), False)):
        partition = fs.ClientPartition.from_frames(FRAMES, on="k", shared_seed=1, policy=policy)
        model = fs.VFEMGLM.from_formula(
            "y ~ .", partition, family=sm.families.Binomial(), between="independent"
        )
        assert model.fit().converged
        if refused:
            with pytest.raises(DescriptionError, match=r"Registry: .*bits.*discrete = \"any\""):
                model.fit(cov_type="robust")
        else:
            assert model.fit(cov_type="robust").converged
