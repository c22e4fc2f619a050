"""Alpha by maximum likelihood against statsmodels' NegativeBinomial on the stacked table."""

import numpy as np
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import partition, table

import fedstat as fs
from fedstat.errors import EstimationError, ModelError

FRAME = table(n=800, seed=3)


def fit(frame=FRAME, response="over", **arguments):
    model = fs.FederatedGLM.from_formula(
        f"{response} ~ x + C(g)", partition(frame), family=sm.families.NegativeBinomial(alpha=1.0)
    )
    return model.fit(**({"alpha": "ml"} | arguments))


def test_alpha_and_standard_errors_are_those_of_the_stacked_table():
    ours = fit()
    X = model_matrix("x + C(g)", FRAME)
    theirs = sm.NegativeBinomial(FRAME["over"].to_numpy(), np.asarray(X)).fit(
        disp=0, method="newton", maxiter=200, tol=1e-14
    )
    np.testing.assert_allclose(np.append(ours.params, ours.overdispersion.alpha), theirs.params, rtol=1e-7)
    np.testing.assert_allclose(np.append(ours.bse, ours.overdispersion.std_error), theirs.bse, rtol=1e-6)
    np.testing.assert_allclose([ours.llf, ours.aic], [theirs.llf, theirs.aic], rtol=1e-9)
    assert "Alpha was estimated" in str(ours.summary())


def test_the_maximum_does_not_depend_on_the_first_alpha():
    model = fs.FederatedGLM.from_formula(
        "over ~ x + C(g)", partition(FRAME), family=sm.families.NegativeBinomial(alpha=20.0)
    )
    assert model.fit(alpha="ml").overdispersion.alpha == pytest.approx(fit().overdispersion.alpha, rel=1e-8)


def test_counts_that_are_not_overdispersed_are_named():
    frame = FRAME.assign(even=np.random.default_rng(1).binomial(9, 0.4, len(FRAME)))
    with pytest.raises(EstimationError, match="use family Poisson"):
        fit(frame, "even")


def test_alpha_is_refused_where_it_has_no_meaning():
    model = fs.FederatedGLM.from_formula("count ~ x", partition(FRAME), family=sm.families.Poisson())
    with pytest.raises(ModelError, match="NegativeBinomial"):
        model.fit(alpha="ml")
    with pytest.raises(ModelError, match="nonrobust"):
        fit(cov_type="HC0")
