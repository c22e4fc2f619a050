"""Steps of Newton's method over rows, and what a loop does where no step increases the likelihood."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.models.glm import overdispersion
from fedstat.models.rows.newton import OWN_HALVINGS, STUCK, maximize_own, newton_step

RNG = np.random.default_rng(8)
UNITS = np.array([1.0, 1e4, 1e-3])
SCORE = RNG.normal(size=3) * UNITS


def information(values):
    """A matrix of three parameters in units of their own, with these eigenvalues of its scaled form."""
    axes = np.linalg.qr(RNG.normal(size=(3, 3)))[0]
    scaled = axes @ np.diag(values) @ axes.T
    return scaled * np.outer(UNITS, UNITS)


def test_a_step_solves_the_equations_of_a_positive_information():
    H = information([3.0, 1.0, 0.2])
    assert_allclose(newton_step(SCORE, H), np.linalg.solve(H, SCORE), rtol=1e-12)


def test_a_step_of_a_singular_information_is_the_shortest_solution():
    """Of columns in units of the diagonal: the least squares solution of numpy."""
    H = information([3.0, 1.0, 0.0])
    size = np.sqrt(np.diag(H))
    scaled = H / np.outer(size, size)
    shortest = np.linalg.lstsq(scaled, SCORE / size, rcond=1e-12)[0]
    assert_allclose(newton_step(SCORE, H), shortest / size, rtol=1e-9)
    assert np.abs(newton_step(SCORE, H) * size).max() < 1e3


def test_a_step_of_an_indefinite_information_ascends():
    H = information([3.0, 1.0, -0.5])
    assert SCORE @ np.linalg.solve(H, SCORE) < SCORE @ newton_step(SCORE, H)
    assert SCORE @ newton_step(SCORE, H) > 0.0


def test_no_parameters_have_no_step():
    assert newton_step(np.zeros(0), np.zeros((0, 0))).shape == (0,)


@pytest.mark.parametrize("halvings", [0, OWN_HALVINGS - 1, OWN_HALVINGS])
def test_a_site_keeps_its_point_where_no_halved_step_increases_the_likelihood(halvings):
    """The likelihood is defined up to a part of the first step: at the last halving, and just beyond."""
    farthest = 1.5 * 0.5**halvings

    def at(beta):
        inside = abs(beta[0]) < farthest
        return (-0.5 * (beta[0] - 1.0) ** 2 if inside else -np.inf), 1.0 - beta, np.eye(1)

    beta, _, problem = maximize_own(at, np.zeros(1), "no maximum")
    assert abs(beta[0]) < farthest
    assert problem == ("" if halvings == 0 else STUCK)
    assert (beta[0] == 0.0) == (halvings == OWN_HALVINGS)


def test_alpha_is_not_estimated_where_no_step_increases_the_likelihood(monkeypatch):
    table = pd.DataFrame({"x": RNG.normal(size=300), "site": np.arange(300) % 2})
    table["k"] = RNG.poisson(RNG.gamma(1.0, np.exp(0.5 * table["x"])))
    partition = fs.ClientPartition.from_frame(table, by="site")
    model = fs.FederatedGLM.from_formula("k ~ x", partition, family=sm.families.NegativeBinomial(alpha=1.0))
    sums, seen = overdispersion._sums, []

    def falling(newton, point):
        llf, score, H = yield from sums(newton, point)
        seen.append(llf)
        return (llf if len(seen) == 1 else -np.inf), score, H

    monkeypatch.setattr(overdispersion, "_sums", falling)
    with pytest.raises(EstimationError, match="alpha: no step increases the log-likelihood"):
        model.fit(dispersion="ml")
    assert len(seen) == 1 + overdispersion.MOST_HALVINGS
