"""HC2 and HC3 over sites against statsmodels' OLS, and against leverages of the stacked table."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import fit_pooled, partition, table

import fedstat as fs
from fedstat.errors import EstimationError, FedstatError, ModelError
from fedstat.models.horizontal.session import add
from fedstat.models.run import FitAttempt

FRAME = table()
F, L = sm.families, sm.families.links
RIGHT = "x + z + C(g)"


@pytest.mark.parametrize("cov_type", ["HC2", "HC3"])
@pytest.mark.parametrize("weights", [None, "v"])
def test_least_squares_has_the_errors_of_statsmodels(cov_type, weights):
    X = np.asarray(model_matrix(RIGHT, FRAME), dtype=float)
    kind, known = (sm.OLS, {}) if weights is None else (sm.WLS, {"weights": FRAME[weights].to_numpy()})
    theirs = kind(FRAME["gauss"].to_numpy(), X, **known).fit(cov_type=cov_type, use_t=True)
    ours = fs.FederatedOLS.from_formula(f"gauss ~ {RIGHT}", partition(FRAME), var_weights=weights)
    ours = ours.fit(cov_type=cov_type)
    np.testing.assert_allclose(ours.cov_params(), theirs.cov_params(), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(ours.pvalues, theirs.pvalues, rtol=1e-8)
    np.testing.assert_allclose(ours.fvalue, theirs.fvalue, rtol=1e-8)


def by_hand(theirs, frame, right, power, freq=None):
    """Rows' scores over powers of one less their leverages, as R's sandwich has them for a GLM."""
    X = np.asarray(model_matrix(right, frame), dtype=float)
    f = np.ones(len(X)) if freq is None else frame[freq].to_numpy()
    family, mu, y = theirs.model.family, theirs.mu, theirs.model.endog
    slope, V = family.link.deriv(mu), family.variance(mu)
    w, r = 1.0 / (slope**2 * V), (y - mu) / slope / V
    inverse = np.linalg.inv(X.T @ ((f * w)[:, None] * X))
    h = w * np.einsum("ij,jk,ik->i", X, inverse, X)
    meat = X.T @ ((f * r**2 / (1.0 - h) ** power)[:, None] * X)
    bread = inverse if theirs.model.family.link.__class__ is L.Logit else observed_inverse(theirs)
    return bread @ meat @ bread


def observed_inverse(theirs):
    return np.linalg.inv(-theirs.model.hessian(theirs.params, scale=1.0, observed=True))


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("freq", [None, "w"])
def test_other_families_have_those_of_the_stacked_table(power, freq):
    for family in (F.Binomial(), F.Binomial(L.Probit())):
        theirs = fit_pooled(f"binary ~ {RIGHT}", FRAME, family, freq=freq)
        model = fs.FederatedGLM.from_formula(
            f"binary ~ {RIGHT}", partition(FRAME), family=family, freq_weights=freq
        )
        ours = model.fit(cov_type=f"HC{power + 1}")
        expected = by_hand(theirs, FRAME, RIGHT, power, freq)
        np.testing.assert_allclose(ours.cov_params(), expected, rtol=1e-7, atol=1e-12)
        if freq is None and isinstance(family.link, L.Logit):
            np.testing.assert_allclose(
                theirs.get_influence().hat_matrix_diag.sum(), len(theirs.params), rtol=1e-8
            )


def test_strict_sites_answer_and_the_dry_run_says_what_sites_learn():
    loose = fs.GLORE.from_formula(f"binary ~ {RIGHT}", partition(FRAME)).fit(cov_type="HC3")
    model = fs.GLORE.from_formula(f"binary ~ {RIGHT}", partition(FRAME, policy=fs.Policy.strict()))
    np.testing.assert_allclose(model.fit(cov_type="HC3").bse, loose.bse, rtol=1e-8)
    assert "inverse information of all sites" in str(model.explain(cov_type="HC3"))


def test_a_row_of_leverage_one_is_reported_as_such():
    frame = FRAME.assign(alone=(np.arange(len(FRAME)) == 5).astype(float))
    open_ = fs.Policy(min_count=1, min_level_count=1, max_parameters=1.0, max_share=1.0)
    model = fs.FederatedOLS.from_formula("gauss ~ x + alone", partition(frame, policy=open_))
    with pytest.raises(EstimationError, match="leverage one"):
        model.fit(cov_type="HC2")
    with pytest.raises(ModelError, match="cov_type"):
        model.fit(cov_type="HC4")


def answer(inverse):
    """Answers of the sites to an inverse information matrix chosen by the analyst."""
    model = fs.GLORE.from_formula("binary ~ x + z", partition(FRAME, policy=fs.Policy.strict()))
    session = model._open_session("glm", True)
    beta = np.array([0.1, 0.2, -0.3])
    units = {"shift": np.zeros(3), "scale": np.ones(3)}

    def protocol():
        yield session.opening() + session.request_all("start", {}, model.distribution.to_json())
        yield session.request_all("sum_scores", units | {"beta": beta, "observed": np.array(False)})
        known = {"dispersion": np.ones(2), "null": np.array(0.0), "apart": np.array(False)}
        known |= {"meat": np.array(False)}
        yield session.request_all("judge", units | known | {"beta": beta})
        request = {"inverse": inverse, "power": np.array(2), "beta": beta}
        replies = yield session.request_all("sum_leveraged", units | request)
        return add(replies, "meat")

    return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)


def test_an_inverse_that_singles_a_row_out_is_no_inverse_of_theirs():
    """Its leverage would be next to one, and the sum that row's alone."""
    X = np.column_stack([np.ones(len(FRAME)), FRAME[["x", "z"]]])
    mu = 1.0 / (1.0 + np.exp(-X @ np.array([0.1, 0.2, -0.3])))
    information = X.T @ ((mu * (1.0 - mu))[:, None] * X)
    assert answer(np.linalg.inv(information)).shape == (3, 3)
    far = X[np.argmax(FRAME["x"])]
    one = np.outer(far, far) / (far @ far) ** 2
    weight = (mu * (1.0 - mu))[np.argmax(FRAME["x"])]
    with pytest.raises(FedstatError, match="a reason that depends on rows"):
        answer(one / weight * (1.0 - 1e-9))
