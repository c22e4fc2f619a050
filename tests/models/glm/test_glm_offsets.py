"""Offsets far from zero: the model without covariates has to be found from a start that saturates."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from scipy.optimize import minimize_scalar

import fedstat as fs

FAMILIES = {
    "binomial": (sm.families.Binomial(), lambda rng, eta: rng.random(len(eta)) < 1.0 / (1.0 + np.exp(-eta))),
    "poisson": (sm.families.Poisson(), lambda rng, eta: rng.poisson(np.exp(eta))),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("middle", [-400.0, -170.0, -30.0, -3.0, 3.0, 10.0, 30.0, 100.0, 170.0, 400.0])
def test_a_fit_with_any_offset_is_the_pooled_one(name, middle):
    family, draw = FAMILIES[name]
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"x": rng.normal(size=900), "site": rng.choice(list("ABC"), 900)})
    table["o"] = middle + 0.5 * rng.normal(size=900)
    table["y"] = draw(rng, table["o"] - middle + 0.3 * table["x"]).astype(int)
    partition = fs.ClientPartition.from_frame(table, by="site")
    result = fs.FederatedGLM.from_formula("y ~ x", partition, family=family, offset="o").fit()
    # The same model with a moderate offset: its intercept is larger by what was taken from the offset.
    pooled = smf.glm("y ~ x", table, family=family, offset=table["o"] - middle).fit(tol=1e-12)
    assert result.converged
    np.testing.assert_allclose(result.params["x"], pooled.params["x"], rtol=1e-7)
    np.testing.assert_allclose(result.params["Intercept"] + middle, pooled.params["Intercept"], atol=1e-8)
    np.testing.assert_allclose(result.bse, pooled.bse, rtol=1e-6)
    np.testing.assert_allclose(result.deviance, pooled.deviance, rtol=1e-9)
    np.testing.assert_allclose(result.null_deviance, pooled.null_deviance, rtol=1e-7)


@pytest.mark.parametrize("middle", [3.0, -3.0, 20.0, 100.0, 170.0, 400.0, -400.0])
@pytest.mark.parametrize("intercepts", ["", " - 1"], ids=["intercept", "levels"])
def test_a_response_that_does_not_follow_its_offset_is_fitted_too(middle, intercepts):
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"x": rng.normal(size=2000), "site": rng.choice(list("ABC"), 2000)})
    table["y"], table["o"] = rng.integers(0, 2, 2000), middle + 0.5 * rng.normal(size=2000)
    table["g"] = rng.choice(list("uv"), 2000)
    right, partition = "x + C(g)" + intercepts, fs.ClientPartition.from_frame(table, by="site")
    result = fs.GLORE.from_formula(f"y ~ {right}", partition, offset="o").fit()
    pooled = smf.glm(f"y ~ {right}", table, family=sm.families.Binomial(), offset=table["o"]).fit(tol=1e-12)
    assert result.converged and pooled.converged
    # statsmodels lists the levels first.
    np.testing.assert_allclose(result.params, pooled.params[list(result.params.index)], rtol=1e-7)
    np.testing.assert_allclose(result.bse, pooled.bse[list(result.params.index)], rtol=1e-6)

    # statsmodels' own null model does not converge here.
    def minus_log_likelihood(intercept):
        eta = table["o"] + intercept
        return float(np.logaddexp(0.0, eta).sum() - table["y"] @ eta)

    best = minimize_scalar(
        minus_log_likelihood, bounds=(-middle - 10.0, -middle + 10.0), options={"xatol": 1e-10}
    )
    np.testing.assert_allclose(result.llnull, -best.fun, rtol=1e-10)
