"""VFEM with negative binomial counts: pooled maximum likelihood, alpha known or estimated."""

from functools import partial

import numpy as np
import pytest
import statsmodels.api as sm
from glm_oracle import PooledGLM, glm_study, glm_theta
from joint_oracle import PooledJoint, correlated
from scipy.special import loggamma
from statsmodels.tools.numdiff import approx_fprime_cs, approx_hess_cs
from test_free_glm import all_parameters, as_counted

import fedstat as fs
from fedstat.errors import EstimationError, ModelError
from fedstat.models.vfem import protocol

ALPHA = 0.6
ALPHA_PLACE = 1
"""The place of the residual variance is that of alpha here."""


class PooledCounts(PooledGLM):
    """As :class:`PooledGLM`; log alpha is a parameter, or known."""

    def __init__(self, y, blocks, known=None):
        super().__init__(y, blocks, "NB")
        self.known = known

    def loglike_obs(self, theta):
        self.alpha = np.exp(np.asarray(theta)[ALPHA_PLACE]) if self.known is None else self.known
        return super().loglike_obs(theta)

    def log_mass(self, y, eta):
        theta = 1.0 / self.alpha
        log_p = y * (eta + np.log(self.alpha)) - (y + theta) * np.log1p(self.alpha * np.exp(eta))
        return log_p + loggamma(y + theta) - loggamma(theta + 0j * y) - loggamma(y + 1.0)

    def information(self, theta):
        if self.known is not None:
            self.alpha = self.known
            return super().information(theta)
        return -approx_hess_cs(theta, self.loglike)

    @property
    def free(self):
        return super().free if self.known is not None else np.arange(len(self.start()))


ML = {False: {}, True: {"dispersion": "ml"}}


def counts(seed=0, n=300, alpha=ALPHA, **options):
    study = glm_study(seed, n, family="Poisson", **options)
    rng = np.random.default_rng(seed)
    study.table["y"] = rng.poisson(study.table["y"] * rng.gamma(1.0 / alpha, alpha, n)).astype(float)
    return study


def family(alpha=ALPHA):
    return sm.families.NegativeBinomial(alpha=alpha)


def make(study, alpha=ALPHA):
    return fs.VFEMGLM.from_formula("y ~ .", study.partition(), family=family(alpha), between="independent")


@pytest.mark.parametrize(("estimated", "how"), [(False, "secure"), (True, "exact"), (True, "secure")])
def test_it_is_the_maximum_of_the_pooled_likelihood_and_its_information(estimated, how):
    study = counts(holder="Registry")
    model = make(study, 1.0 if estimated else ALPHA)
    result = model.fit(cross_products=how, **ML[estimated])
    found = result._fit.distribution.alpha
    blocks = [study.table[c] for c in study.columns.values()]
    pooled = PooledCounts(study.table["y"], blocks, None if estimated else ALPHA)
    theta = glm_theta(model, result, study)
    theta[ALPHA_PLACE] = np.log(found)
    cov = pooled.covariance(theta)
    root = np.sqrt(np.diag(cov))
    assert np.abs((pooled.score(theta) * root)[pooled.free]).max() < 1e-5
    assert result.llf == pytest.approx(pooled.loglike(theta) - pooled.saturated(), abs=1e-6)
    np.testing.assert_allclose(result.bse, root[pooled.reported], rtol=1e-5)
    psi = result.covariance.psi[1, 1]
    assert np.sqrt(psi) == pytest.approx(root[ALPHA_PLACE] if estimated else 0.0, rel=1e-5)
    robust = model.fit(cross_products=how, cov_type="robust", **ML[estimated])
    scores = approx_fprime_cs(theta, pooled.loglike_obs)
    every = cov @ (scores.T @ scores) @ cov
    np.testing.assert_allclose(
        robust.bse, np.sqrt(np.diag(every))[pooled.reported], rtol=1e-5 if how == "exact" else 1e-3
    )


def test_nothing_missing_is_the_negative_binomial_of_statsmodels():
    study = counts(missing="none")
    result = make(study, 1.0).fit()
    X = sm.add_constant(study.table[study.covariates])
    known = sm.GLM(study.table["y"], X, family(1.0)).fit(tol=1e-12)
    np.testing.assert_allclose(result.params, known.params, rtol=1e-5)
    assert result.llf == pytest.approx(known.llf, abs=1e-6)
    assert result.llnull == pytest.approx(known.llnull, abs=1e-6)


def test_estimated_alpha_is_that_of_statsmodels_where_nothing_is_missing():
    study = counts(missing="none")
    result = make(study, 1.0).fit(dispersion="ml")
    X = sm.add_constant(study.table[study.covariates])
    discrete = sm.NegativeBinomial(study.table["y"], X).fit(disp=0, maxiter=500, gtol=1e-8)
    assert result._fit.distribution.alpha == pytest.approx(discrete.params["alpha"], rel=1e-4)
    np.testing.assert_allclose(result.params, discrete.params[:-1], atol=1e-4)
    np.testing.assert_allclose(result.bse, discrete.bse[:-1], rtol=1e-3)
    assert result.llf == pytest.approx(discrete.llf, abs=1e-5)
    assert result.llnull == pytest.approx(discrete.llnull, abs=1e-3)
    assert result.aic == pytest.approx(discrete.aic, abs=1e-4)


def test_counts_of_poisson_have_no_alpha():
    study = glm_study(3, 400, family="Poisson", missing="none")
    rng = np.random.default_rng(0)
    study.table["y"] = rng.binomial(20, 0.2, 400).astype(float)  # they vary less
    with pytest.raises(EstimationError, match=r"alpha goes to zero.*family Poisson"):
        make(study).fit(dispersion="ml")


def test_alpha_belongs_to_the_negative_binomial():
    study = glm_study(family="Poisson")
    model = fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(), family=sm.families.Poisson(), between="independent"
    )
    with pytest.raises(ModelError, match="'ml' with the family NegativeBinomial"):
        model.fit(dispersion="ml")


def test_nested_fits_compare_where_both_estimate_alpha(tmp_path):
    study = counts(holder="Registry")
    full = make(study).fit(dispersion="ml")
    small = fs.VFEMGLM.from_formula(
        "y ~ bank0 + bank1", study.partition(), family=family(), between="independent"
    )
    restricted = small.fit(dispersion="ml")
    test = full.compare_lr_test(restricted)
    assert test.statistic == pytest.approx(2.0 * (full.llf - restricted.llf))
    with pytest.raises(ModelError, match="another fit of VFEM with NegativeBinomial"):
        full.compare_lr_test(small.fit())
    assert "(estimated)" in str(full.summary())
    full.save(tmp_path / "counts")
    again = fs.load(tmp_path / "counts")
    assert again._fit.distribution == full._fit.distribution
    assert again._fit.estimates_alpha
    assert len(again.predict(study.partition())) == len(study.table)


def test_a_plan_counts_what_robust_errors_and_alpha_ask_for():
    model = make(counts(holder="Registry"))
    plain, more = str(model.explain()), str(model.explain(cov_type="robust", dispersion="ml"))
    for step in ("glm_scale_informa", "glm_scores"):
        assert step in more
        assert step not in plain
    reported = model.explain(cov_type="robust").learned
    assert any("they learn the residuals" in sentence for _, sentence in reported)


def test_a_summary_of_overdispersed_counts_names_the_remedy_in_its_first_line(monkeypatch):
    study = counts(n=600, holder="Registry")
    model = fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(), family=sm.families.Poisson(), between="independent"
    )
    with pytest.raises(EstimationError, match=r"vary \d\.\d\d times.*fit\(dispersion='ml'\)"):
        model.fit(cov_type="none")
    monkeypatch.setattr(protocol, "MOST_EXCESS", np.inf)
    poisson, blocks = model.fit(cov_type="none"), [study.table[c] for c in study.columns.values()]
    theta = glm_theta(model, poisson, study)
    m, v = PooledGLM(study.table["y"], blocks, "Log").linear(theta)
    mean = np.exp(m + 0.5 * v)
    terms = (study.table["y"] - mean) ** 2 / (mean + mean**2 * np.expm1(v))
    ratio, error = poisson._fit.dispersion
    assert ratio == pytest.approx(terms.mean(), rel=1e-9)
    assert error == pytest.approx(terms.std(ddof=0) / np.sqrt(len(terms)), rel=1e-6)
    assert f"*** OVERDISPERSED: Pearson chi2 / n = {ratio:.2f}" in str(poisson.summary())
    assert "family=sm.families.NegativeBinomial() and fit(dispersion='ml')" in " ".join(poisson.notes)
    cured = make(study).fit(dispersion="ml", cov_type="none")
    assert cured._fit.dispersion[0] == pytest.approx(1.0, abs=0.2)
    assert "OVERDISPERSED" not in str(cured.summary())
    small = make(study, 0.01).fit(cov_type="none")
    assert "This alpha is too small" in " ".join(small.notes)


def test_counts_of_poisson_raise_no_alarm():
    study = glm_study(2, 600, family="Poisson")
    model = fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(), family=sm.families.Poisson(), between="independent"
    )
    assert "OVERDISPERSED" not in str(model.fit().summary())


def test_with_nothing_missing_robust_errors_allow_for_the_excess():
    study = counts(n=600, missing="none")
    model = fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(), family=sm.families.Poisson(), between="independent"
    )
    assert "Or use cov_type='robust'" in " ".join(model.fit().notes)
    assert "NegativeBinomial" not in " ".join(model.fit(cov_type="robust").notes)


class PooledJointCounts(PooledJoint):
    """The joint likelihood of columns and counts; the last parameter is log alpha."""

    def loglike(self, theta):
        self.glm.alpha = np.exp(np.asarray(theta)[-1])
        return super().loglike(np.asarray(theta)[:-1])

    def information(self, theta):
        return -approx_hess_cs(theta, self.loglike)


def test_alpha_is_estimated_where_columns_depend_between_sites():
    """Oracle: numerical derivatives of the likelihood of all entities, integrated in numpy."""
    study = correlated(3, 500, shares=(0.0, 0.4, 0.5), count=True)
    rng = np.random.default_rng(5)
    study.table["y"] = rng.poisson(study.table["y"] * rng.gamma(2.0, 0.5, 500)).astype(float)
    model = fs.VFEMGLM.from_formula("y ~ .", study.partition(), family=family(1.0))
    result = model.fit(dispersion="ml")
    alpha = result._fit.distribution.alpha
    table = as_counted(study, result)
    oracle = PooledJointCounts(table["y"], table[[c for k in result.names for c in study.columns[k]]], "NB")
    oracle.glm = PooledCounts(oracle.y, [oracle.X], known=alpha)
    oracle.glm.log_mass = partial(PooledCounts.log_mass, oracle.glm)
    theta = np.append(all_parameters(result, oracle), np.log(alpha))
    information = oracle.information(theta)
    assert result.converged and result._fit.estimates_alpha
    assert np.abs(oracle.score(theta) / np.sqrt(np.diag(information))).max() < 1e-5
    np.testing.assert_allclose(result.bse, oracle.bse(information), rtol=1e-4)
    apart = fs.VFEMGLM.from_formula("y ~ .", study.partition(), family=family(1.0), between="independent")
    assert result.llnull == pytest.approx(apart.fit(dispersion="ml", cov_type="none").llnull, rel=1e-6)
    known = fs.VFEMGLM.from_formula("y ~ .", study.partition(), family=family(alpha)).fit()
    np.testing.assert_allclose(known.params, result.params, atol=1e-3)
    assert (result.bse > known.bse).any()
