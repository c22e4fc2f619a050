"""Robust standard errors of VFEM with a binary or count response: the sandwich of the pooled scores."""

import numpy as np
import pytest
import statsmodels.api as sm
from glm_oracle import PooledGLM, glm_study, glm_theta
from oracle import Study
from statsmodels.tools.numdiff import approx_fprime_cs

import fedstat as fs
from fedstat.errors import ModelError

FAMILIES = {
    "Logit": sm.families.Binomial(),
    "Probit": sm.families.Binomial(sm.families.links.Probit()),
    "Log": sm.families.Poisson(),
}


def make(link, **options):
    study = glm_study(family=type(FAMILIES[link]).__name__, **options)
    # Coefficients come in the order of the sites, the response holder first.
    first = dict(sorted(study.columns.items(), key=lambda item: item[0] != study.holder))
    study = Study(study.table, first, study.holder)
    model = fs.VFEMGLM.from_formula("y ~ .", study.partition(), family=FAMILIES[link], between="independent")
    pooled = PooledGLM(study.table["y"], [study.table[c] for c in study.columns.values()], link)
    return study, model, pooled


def sandwich(pooled, theta):
    """Inverse information, sum of products of the numerical scores of all entities, inverse information."""
    bread, scores = pooled.covariance(theta), pooled.scores(theta)
    return bread @ (scores.T @ scores) @ bread


@pytest.mark.parametrize(("link", "holder"), [*((link, "Registry") for link in FAMILIES), ("Logit", "Tax")])
def test_robust_covariance_is_the_sandwich_of_numerical_scores(link, holder):
    study, model, pooled = make(link, holder=holder, n=400)
    result = model.fit(cov_type="robust", cross_products="exact")
    theta = glm_theta(model, result, study)
    every = sandwich(pooled, theta)
    cov = every[np.ix_(pooled.reported, pooled.reported)]
    root = np.sqrt(np.diag(cov))
    np.testing.assert_allclose(result.bse, root, rtol=1e-5)
    np.testing.assert_allclose(
        result.cov_params() / np.outer(root, root), cov / np.outer(root, root), atol=1e-5
    )

    J = approx_fprime_cs(theta, pooled.joint)
    expected = J @ every @ J.T
    found = np.delete(np.delete(result.covariance.psi, 1, axis=0), 1, axis=1)
    root = np.sqrt(np.diag(expected))
    np.testing.assert_allclose(found / np.outer(root, root), expected / np.outer(root, root), atol=1e-5)


@pytest.mark.parametrize(("link", "holder"), [("Logit", "Registry"), ("Log", "Tax")])
def test_products_in_secret_give_what_derivatives_unmasked_give(link, holder):
    _, model, _ = make(link, holder=holder, n=400)
    openly = model.fit(cov_type="robust", cross_products="exact")
    secretly = model.fit(cov_type="robust")
    # Digits go to what hides the derivatives: a residual of r root mean squares costs r^2 2^12 units.
    np.testing.assert_allclose(secretly.bse, openly.bse, rtol=1e-3)
    root = np.sqrt(np.diag(openly.cov_params()))
    np.testing.assert_allclose(
        secretly.cov_params() / np.outer(root, root), openly.cov_params() / np.outer(root, root), atol=1e-3
    )


def test_nothing_missing_is_the_robust_covariance_of_the_generalized_linear_model():
    study, model, _ = make("Log", missing="none", n=400)
    result = model.fit(cov_type="robust", cross_products="exact")
    glm = sm.GLM(study.table["y"], sm.add_constant(study.table[study.covariates]), FAMILIES["Log"])
    np.testing.assert_allclose(result.bse, glm.fit(cov_type="HC0", tol=1e-12).bse, rtol=1e-5)


def test_wald_tests_use_it_and_likelihood_ratios_are_refused():
    study, model, _ = make("Log", n=400)
    result, plain = model.fit(cov_type="robust", cross_products="exact"), model.fit()
    names = study.columns["Tax"]
    b, V = result.params[names].to_numpy(), result.cov_params().loc[names, names].to_numpy()
    test = result.wald_test(" = 0, ".join(names) + " = 0")
    assert float(test.statistic) == pytest.approx(b @ np.linalg.solve(V, b), rel=1e-8)
    formula = "y ~ " + " + ".join(n for c in study.columns if c != "Tax" for n in study.columns[c])
    small = fs.VFEMGLM.from_formula(
        formula, study.partition(), family=FAMILIES["Log"], between="independent"
    ).fit()
    assert plain.compare_lr_test(small).df_diff == 2
    with pytest.raises(ModelError, match=r"cov_type='robust'.*wald_test"):
        result.compare_lr_test(small)
    assert "robust" in str(result.summary())


def test_a_file_keeps_it(tmp_path):
    _, model, _ = make("Logit")
    result = model.fit(cov_type="robust", cross_products="exact")
    result.save(tmp_path / "fit")
    assert fs.load(tmp_path / "fit").cov_type == result.cov_type


def test_mean_imputation_has_no_robust_covariance():
    _, model, _ = make("Logit")
    with pytest.raises(ModelError, match="not with method='impute'"):
        model.fit(method="impute", cov_type="robust")
