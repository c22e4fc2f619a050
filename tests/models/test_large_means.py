"""Responses and covariates whose means are large next to their spread, in all families over rows."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose

import fedstat as fs

OPEN = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)
LABELS, CLUSTER = {"labels": ["g"]}, {"cov_type": "cluster", "cov_kwds": {"groups": "g"}}
EXCHANGEABLE = {"groups": "g", "cov_struct": "exchangeable"}
COMMON = {"baseline": "common", "grid": 1, "until": 9}
CASES = {
    "OLS": (fs.FederatedOLS, "y ~ x + z", {}, {}),
    "OLS cluster": (fs.FederatedOLS, "y ~ x + z", LABELS, CLUSTER),
    "GLM HC3": (fs.FederatedGLM, "y ~ x + z", {}, {"cov_type": "HC3"}),
    "GEE": (fs.FederatedGEE, "y ~ x + z", {"groups": "g"}, {}),
    "GEE exchangeable": (fs.FederatedGEE, "y ~ x + z", EXCHANGEABLE, {}),
    "GEE naive": (fs.FederatedGEE, "y ~ x + z", EXCHANGEABLE, {"cov_type": "naive"}),
    "GEE ar1": (fs.FederatedGEE, "y ~ x + z", {"groups": "g", "time": "visit", "cov_struct": "ar1"}, {}),
    "mixed": (fs.FederatedMixed, "y ~ x + z + (1 | g)", {}, {}),
    "mixed robust": (fs.FederatedMixed, "y ~ x + z + (1 | g)", {}, {"cov_type": "robust"}),
    "logit": (fs.GLORE, "b ~ x + z", {}, {}),
    "ordinal": (fs.FederatedOrdinal, "o ~ x + z", {}, {}),
    "multinomial": (fs.FederatedMultinomial, "o ~ x + z", LABELS, CLUSTER),
    "AFT": (fs.FederatedAFT, "Surv(time, event) ~ x + z + cluster(g)", {"distribution": "lognormal"}, {}),
    "Cox": (fs.FederatedCox, "Surv(time, event) ~ x + z + cluster(g)", {}, {}),
    "Cox, common": (fs.FederatedCox, "Surv(time, event) ~ x + z", {}, COMMON),
}
"""Model, formula, arguments of model and fit. A family over rows has a line here."""
RESPONSES = [name for name, case in CASES.items() if case[1].startswith("y")]


def table(response=0.0, covariate=0.0):
    rng = np.random.default_rng(3)
    g = np.repeat(np.arange(60), 5)
    x, z = rng.normal(size=(2, 300))
    y = 1.0 + 0.5 * x - 0.2 * z + 0.7 * rng.normal(size=60)[g] + rng.normal(size=300)
    columns = {
        "site": np.array(list("abc"))[g % 3],
        "g": g,
        "visit": np.tile(np.arange(5), 60),
        "x": x + covariate,
        "z": z,
        "y": y + response,
        "b": (y > 1.0) * 1,
        "o": np.digitize(y, [0.0, 2.0]),
        "time": np.ceil(4.0 * rng.exponential(np.exp(-0.5 * y))),
        "event": (rng.random(300) < 0.7) * 1,
    }
    return pd.DataFrame(columns)


def fitted(name, data):
    made, formula, settings, arguments = CASES[name]
    partition = fs.ClientPartition.from_frame(data, by="site", policy=OPEN)
    return made.from_formula(formula, partition, **settings).fit(**arguments)


def slopes(fit):
    """Estimates, errors, and those of each site, of the coefficients of x and z."""
    kept = [place for place, name in enumerate(fit.params.index) if name.endswith(("x", "z"))]
    sites = getattr(fit._record.fit, "local", ())
    own = [site.cov[np.ix_(kept, kept)] for site in sites if site.cov is not None]
    return fit.params.to_numpy()[kept], fit.bse.to_numpy()[kept], np.array(own)


@pytest.mark.parametrize("name", RESPONSES)
def test_errors_do_not_depend_on_the_mean_of_the_response(name):
    plain, moved = fitted(name, table()), fitted(name, table(response=1e8))
    assert plain.estimate.converged and moved.estimate.converged
    for one, other, close in zip(slopes(plain), slopes(moved), (1e-7, 1e-8, 1e-6), strict=True):
        assert_allclose(other, one, rtol=close)


@pytest.mark.parametrize("name", CASES)
def test_errors_do_not_depend_on_the_mean_of_a_covariate(name):
    plain, moved = fitted(name, table()), fitted(name, table(covariate=1e6))
    assert moved.estimate.converged
    for one, other in zip(slopes(plain)[:2], slopes(moved)[:2], strict=True):
        assert_allclose(other, one, rtol=1e-7)


def test_the_errors_are_those_of_centered_pooled_rows():
    data = table(response=1e8)
    X = sm.add_constant(data[["x", "z"]])
    theirs = sm.GEE(table()["y"], X, data["g"], cov_struct=sm.cov_struct.Exchangeable()).fit(ctol=1e-10)
    partition = fs.ClientPartition.from_frame(data, by="site", policy=OPEN)
    made = fs.FederatedGEE.from_formula("y ~ x + z", partition, **EXCHANGEABLE)
    assert_allclose(made.fit(cov_type="robust").bse, theirs.bse, rtol=1e-6)
