"""VFEM with a binary or count response: pooled maximum likelihood, identities, predictions."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from glm_oracle import PooledGLM, glm_study, glm_theta
from oracle import Study, simulate
from statsmodels.tools.numdiff import approx_fprime_cs

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError, PolicyError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.quadrature import BY_M, BY_V, LOG, LOGIT, PROBIT, marginal_likelihood
from fedstat.models.checks import check_response
from fedstat.models.vertical.exchange.standardized_columns import StandardizedBlock
from fedstat.models.vfem.iteration.glm_steps import local_score
from fedstat.models.vfem.iteration.quasi_newton import QuasiNewtonMemory, quasi_newton
from fedstat.models.vfem.iteration.site_state import BlockParameters, summarize

FAMILIES = {
    "Logit": sm.families.Binomial(),
    "Probit": sm.families.Binomial(sm.families.links.Probit()),
    "Log": sm.families.Poisson(),
}
KERNELS = {"Logit": LOGIT, "Probit": PROBIT, "Log": LOG}


def make(link, **options):
    study = glm_study(family=type(FAMILIES[link]).__name__, **options)
    model = fs.VFEMGLM.from_formula("y ~ .", study.partition(), family=FAMILIES[link], between="independent")
    pooled = PooledGLM(study.table["y"], [study.table[c] for c in study.columns.values()], link)
    return study, model, pooled


@pytest.fixture(scope="module", params=list(FAMILIES))
def fitted(request):
    study, model, pooled = make(request.param)
    result = model.fit()
    theta = glm_theta(model, result, study)
    return study, model, pooled, result, theta, pooled.covariance(theta)


# -- pooled maximum likelihood -------------------------------------------------------------------


def test_local_scores_are_derivatives_of_the_pooled_likelihood():
    rng = np.random.default_rng(0)
    for link, family in FAMILIES.items():
        study = glm_study(n=120, family=type(family).__name__)
        blocks = []
        for names in study.columns.values():
            block = study.table[names]
            blocks.append(((block - block.mean()) / block.std(ddof=0)).to_numpy())
        pooled = PooledGLM(study.table["y"], blocks, link)
        beta = [0.4 * rng.normal(size=p) for p in pooled.sizes]
        mu = [0.3 * rng.normal(size=p) for p in pooled.sizes]
        Sigma = [np.eye(p) + 0.2 * np.ones((p, p)) for p in pooled.sizes]
        theta = pooled.pack(-0.3, 1.0, beta, mu, Sigma)
        m, v = pooled.linear(theta)
        terms = marginal_likelihood(KERNELS[link], pooled.y, m, v)
        d_beta0, _, d_beta, d_mu, d_Sigma = pooled.unpack(pooled.score(theta))
        assert terms[BY_M].sum() == pytest.approx(d_beta0, rel=1e-6)
        for k, p in enumerate(pooled.sizes):
            has = pooled.seen[:, k]
            own = np.ones(int(has.sum()), dtype=bool)
            staged = StandardizedBlock(pooled.blocks[k][has], np.zeros(p), np.ones(p), own, own)
            block = summarize(staged, np.flatnonzero(has), len(m), 0)
            missing = np.array([terms[BY_M, ~has].sum(), terms[BY_V, ~has].sum(), 0.0, 0.0])
            by_beta = staged.X.T @ terms[BY_M, has]
            found = local_score(block, BlockParameters(beta[k], mu[k], Sigma[k]), by_beta, missing)
            by_Sigma = found[2 * p :].reshape(p, p)
            twice = by_Sigma * (2.0 - np.eye(p))  # a parameter off the diagonal stands there twice
            np.testing.assert_allclose(found[:p], d_beta[k], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(found[p : 2 * p], d_mu[k], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(twice, d_Sigma[k], rtol=1e-6, atol=1e-6)


def test_estimate_is_a_maximum_of_the_pooled_likelihood(fitted):
    _, _, pooled, result, theta, cov = fitted
    assert result.converged
    root = np.sqrt(np.diag(cov))[pooled.free]
    assert np.abs(pooled.score(theta)[pooled.free] * root).max() < 1e-6
    assert np.linalg.eigvalsh(cov[np.ix_(pooled.free, pooled.free)] / np.outer(root, root))[0] > 0.0


def test_log_likelihood_is_the_pooled_one(fitted):
    _, _, pooled, result, theta, _ = fitted
    assert result.llf == pytest.approx(pooled.loglike(theta) - pooled.saturated(), abs=1e-6)


def test_standard_errors_are_those_of_the_numerical_hessian(fitted):
    _, _, pooled, result, _, every = fitted
    cov = every[np.ix_(pooled.reported, pooled.reported)]
    np.testing.assert_allclose(result.bse, np.sqrt(np.diag(cov)), rtol=1e-5)
    root = np.sqrt(np.diag(cov))
    np.testing.assert_allclose(
        result.cov_params() / np.outer(root, root), cov / np.outer(root, root), atol=1e-5
    )


def test_joint_covariance_with_the_variances_of_linear_predictors(fitted):
    _, _, pooled, result, theta, cov = fitted

    J = approx_fprime_cs(theta, pooled.joint)
    expected = J @ cov @ J.T
    found = np.delete(np.delete(result.covariance.psi, 1, axis=0), 1, axis=1)
    root = np.sqrt(np.diag(expected))
    np.testing.assert_allclose(found / np.outer(root, root), expected / np.outer(root, root), atol=1e-6)


@pytest.mark.parametrize("link", FAMILIES)
def test_an_optimizer_of_the_pooled_data_finds_the_same(link):
    rng = np.random.default_rng(3)
    n, columns = 150, {"A": ["a1", "a2"], "B": ["b1"]}
    table = pd.DataFrame(rng.normal(size=(n, 3)), columns=["a1", "a2", "b1"])
    eta = 0.3 + table @ [0.8, -0.5, 0.7]
    y = rng.poisson(np.exp(0.5 * eta)) if link == "Log" else rng.random(n) < 1.0 / (1.0 + np.exp(-eta))
    table.insert(0, "y", np.asarray(y, dtype=float))
    table.loc[rng.random(n) < 0.3, columns["A"]] = np.nan
    table.loc[rng.random(n) < 0.5, columns["B"]] = np.nan
    study = Study(table, columns, "Holder")
    pooled = PooledGLM(table["y"], [table[c] for c in columns.values()], link)
    theta = pooled.maximize()
    result = fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(), family=FAMILIES[link], between="independent"
    ).fit()
    np.testing.assert_allclose(result.params, theta[pooled.reported], atol=1e-5)
    bse = np.sqrt(np.diag(pooled.covariance(theta)))[pooled.reported]
    np.testing.assert_allclose(result.bse, bse, rtol=1e-4)


# -- identities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("link", FAMILIES)
def test_nothing_missing_is_the_generalized_linear_model(link):
    study, model, _ = make(link, missing="none")
    result = model.fit()
    glm = sm.GLM(study.table["y"], sm.add_constant(study.table[study.covariates]), FAMILIES[link]).fit(
        tol=1e-12
    )
    se = glm.bse.to_numpy()
    np.testing.assert_allclose((result.params - glm.params.to_numpy()) / se, 0.0, atol=1e-6)
    # statsmodels reports the expected information, which is not the observed one of the probit.
    observed = np.sqrt(np.diag(np.linalg.inv(-glm.model.hessian(glm.params, observed=True))))
    np.testing.assert_allclose(result.bse, observed, rtol=1e-6)
    assert result.llf == pytest.approx(glm.llf, abs=1e-8)
    assert result.llnull == pytest.approx(glm.llnull, abs=1e-8)
    for kind in ("cs", "mcf"):
        assert result.pseudo_rsquared(kind) == pytest.approx(glm.pseudo_rsquared(kind), abs=1e-9)
    np.testing.assert_allclose(result.predict(), glm.predict(), rtol=1e-6)
    ours = result.get_prediction().summary_frame()
    if link != "Probit":
        np.testing.assert_allclose(ours, glm.get_prediction().summary_frame(), rtol=1e-5)


def test_complete_entities_alone_are_the_generalized_linear_model():
    study, model, _ = make("Logit")
    complete = study.table.dropna()
    result = model.fit(method="cc")
    glm = sm.GLM(complete["y"], sm.add_constant(complete[study.covariates]), FAMILIES["Logit"]).fit(tol=1e-12)
    np.testing.assert_allclose(result.params, glm.params, rtol=1e-5)
    np.testing.assert_allclose(result.bse, glm.bse, rtol=1e-5)
    assert result.nobs == len(complete) == len(result.fittedvalues)


def test_mean_imputation_is_the_generalized_linear_model_of_filled_columns():
    study, model, _ = make("Logit")
    filled = study.table.fillna(study.table.mean())
    result = model.fit(method="impute")
    glm = sm.GLM(filled["y"], sm.add_constant(filled[study.covariates]), FAMILIES["Logit"]).fit(tol=1e-12)
    np.testing.assert_allclose(result.params, glm.params, rtol=1e-5)
    np.testing.assert_allclose(result.bse, glm.bse, rtol=1e-5)


def test_masks_and_secure_products_change_nothing():
    _, model, _ = make("Logit")
    masked, plain = model.fit(), model.fit(masked=False, cross_products="exact")
    np.testing.assert_allclose(masked.params, plain.params, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(masked.bse, plain.bse, rtol=1e-7)
    assert len(masked.trace) == len(plain.trace)


def test_one_site_with_columns():
    study = glm_study()
    alone = Study(study.table[["y", *study.columns["Court"]]], {"Court": study.columns["Court"]}, "Holder")
    model = fs.VFEMGLM.from_formula(
        "y ~ .", alone.partition(), family=FAMILIES["Logit"], between="independent"
    )
    result = model.fit()
    pooled = PooledGLM(study.table["y"], [study.table[study.columns["Court"]]], "Logit")
    theta = glm_theta(model, result, alone)
    cov = pooled.covariance(theta)[np.ix_(pooled.reported, pooled.reported)]
    assert np.abs(pooled.score(theta)[pooled.free] / np.sqrt(np.diag(pooled.information(theta)))).max() < 1e-6
    np.testing.assert_allclose(result.bse, np.sqrt(np.diag(cov)), rtol=1e-5)


def test_normal_family_is_the_linear_model():
    study = simulate(n=200)
    model = fs.VFEMRegression.from_formula("y ~ .", study.partition(), family=sm.families.Gaussian())
    assert isinstance(model, fs.VFEMRegression)


# -- tests and predictions -----------------------------------------------------------------------


def test_nested_fits_compare_by_likelihood():
    study, model, pooled = make("Logit")
    full = model.fit()
    smaller = fs.VFEMGLM.from_formula(
        "y ~ . - court1", study.partition(), family=FAMILIES["Logit"], between="independent"
    ).fit()
    lr = full.compare_lr_test(smaller)
    # Oracle: the pooled likelihood with the coefficient held at zero, maximized over all others.
    place, theta = list(full.params.index).index("court1"), glm_theta(model, full, study)
    at = pooled.reported[place]
    held = np.delete(pooled.free, list(pooled.free).index(at))
    theta[at] = 0.0
    for _ in range(4):
        information = pooled.information(theta)
        keep = [list(pooled.free).index(j) for j in held]
        theta[held] += np.linalg.solve(information[np.ix_(keep, keep)], pooled.score(theta)[held])
    restricted = pooled.loglike(theta) - pooled.saturated()
    assert lr.statistic == pytest.approx(2.0 * (full.llf - restricted), abs=1e-5)
    assert lr.df_diff == 1
    with pytest.raises(ModelError, match="method"):
        full.compare_lr_test(model.fit(method="impute"))
    assert full.wald_test_terms().table.shape[0] == 8


def test_predictions_for_any_missing_pattern(fitted):
    study, model, pooled, result, theta, cov = fitted
    order = model.partition.entities
    expected = pd.Series(pooled.mean(theta), index=study.table.index).loc[order]
    np.testing.assert_allclose(result.predict(), expected, rtol=1e-7)
    np.testing.assert_allclose(result.predict(study.partition()), expected, rtol=1e-7)
    np.testing.assert_allclose(result.resid_response, study.table["y"].loc[order] - expected, atol=1e-7)
    # Oracle of the standard errors: the delta method with complex steps in all parameters.
    J = approx_fprime_cs(theta, pooled.mean)
    se = np.sqrt(np.einsum("ij,jk,ik->i", J, cov, J))
    prediction = result.get_prediction()
    np.testing.assert_allclose(prediction.se_mean, pd.Series(se).loc[order], rtol=1e-4)
    limits = prediction.conf_int()
    assert ((limits[0] < expected) & (expected < limits[1])).all()
    assert (limits[0] > 0.0).all()
    assert prediction.blocks.nunique() > 2


def test_a_partition_without_a_site_is_predicted():
    study, _, _ = make("Logit")
    result = fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(), family=FAMILIES["Logit"], between="independent"
    ).fit()
    frames = {site: frame for site, frame in study.frames().items() if site != "Court"}
    fewer = fs.ClientPartition.from_frames(frames, on="id", new_data=True)
    predicted = result.predict(fewer)
    assert predicted.between(0.0, 1.0).all()
    assert predicted.std() < result.predict().std()


def test_results_come_back_from_a_file(tmp_path):
    _, model, _ = make("Logit")
    result = model.fit()
    result.save(tmp_path / "fit")
    loaded = fs.load(tmp_path / "fit")
    for what in ("params", "bse", "nobs_by_site"):
        pd.testing.assert_series_equal(getattr(loaded, what), getattr(result, what), check_exact=True)
    assert str(loaded.summary()) == str(result.summary())
    assert loaded.pseudo_rsquared("mcf") == result.pseudo_rsquared("mcf")
    new = glm_study(seed=5, n=60).partition()
    expected = result.get_prediction(new).summary_frame()
    pd.testing.assert_frame_equal(loaded.get_prediction(new).summary_frame(), expected)
    with pytest.raises(NotAvailableError, match="stay with the response holder"):
        loaded.fittedvalues  # noqa: B018
    with pytest.raises(NotAvailableError, match="read from a file"):
        loaded.get_prediction()


# -- what goes wrong -----------------------------------------------------------------------------


def model_of(y, family="Logit", formula="y ~ ."):
    study = glm_study(n=200)
    table = study.table.assign(y=y(study.table))
    other = Study(table, study.columns, study.holder)
    return fs.VFEMGLM.from_formula(formula, other.partition(), family=FAMILIES[family], between="independent")


def test_responses_that_the_family_does_not_have():
    with pytest.raises(EstimationError, match="Bank: expected a response of zeros and ones"):
        model_of(lambda t: t["y"] + 1.0).fit()
    with pytest.raises(EstimationError, match="whole numbers from zero"):
        model_of(lambda t: t["y"] + 0.5, "Log").fit()
    with pytest.raises(EstimationError, match="Bank: the response is constant among the 9"):
        check_response("Bank", DistributionSpec.of(FAMILIES["Logit"]).name, np.ones(9))


def test_families_and_arguments_that_there_are_not():
    study = glm_study(n=200)
    with pytest.raises(ModelError, match="Binomial"):
        fs.VFEMGLM.from_formula("y ~ .", study.partition(), family=sm.families.Gamma())
    with pytest.raises(ModelError, match=r"fs\.VFEMGLM"):
        fs.VFEMRegression.from_formula("y ~ .", study.partition(), family=FAMILIES["Logit"])
    for family in ({}, {"family": sm.families.Gaussian()}):
        with pytest.raises(ModelError, match=r"fs\.VFEMRegression"):
            fs.VFEMGLM.from_formula("y ~ .", study.partition(), **family)
    with pytest.raises(ModelError, match="intercept"):
        model_of(lambda t: t["y"], formula="y ~ 0 + court0")
    with pytest.raises(ModelError, match="cov_type"):
        model_of(lambda t: t["y"]).fit(cov_type="sem")


@pytest.mark.parametrize(("link", "missing"), [("Logit", 0.0), *((link, 0.3) for link in FAMILIES)])
def test_separated_responses_are_refused(link, missing):
    rng = np.random.default_rng(1)
    x = rng.normal(size=60)
    table = pd.DataFrame({"y": (x > 0).astype(float), "a": x, "b": rng.normal(size=60)})
    if link == "Log":
        table["a"] = table["y"]  # counts of zero wherever the column is
    table.loc[rng.random(60) < missing, "b"] = np.nan
    study = Study(table, {"A": ["a"], "B": ["b"]}, "Holder")
    with pytest.raises(EstimationError, match="separate the response"):
        fs.VFEMGLM.from_formula(
            "y ~ .", study.partition(), family=FAMILIES[link], between="independent"
        ).fit()


def few_have_a_block(**options):
    study = glm_study(holder="Registry")
    study.table.loc[study.table.index[13:], study.columns["Tax"]] = np.nan
    partition = study.partition(**options)
    return fs.VFEMGLM.from_formula("y ~ .", partition, family=FAMILIES["Logit"], between="independent")


def test_effects_that_too_few_entities_can_reveal_are_refused():
    model = few_have_a_block(policy=fs.Policy(min_count=1))
    with pytest.raises(EstimationError, match="too few entities have a block"):
        model.fit()


def test_a_site_with_few_entities_refuses_before_the_coordinator_can_tell():
    model = few_have_a_block()
    with pytest.raises(PolicyError, match=r"Registry: its policy \(minimum count\).*concentrate on fewer"):
        model.fit()


def test_without_covariance():
    result = model_of(lambda t: t["y"]).fit(cov_type="none")
    with pytest.raises(NotAvailableError, match="cov_type='none'"):
        result.bse  # noqa: B018
    with pytest.raises(NotAvailableError, match="standard error"):
        result.get_prediction().se_mean  # noqa: B018


def test_summary_names_family_and_limits():
    text = " ".join(str(model_of(lambda t: t["y"]).fit().summary()).split())
    for part in ("Binomial", "Logit", "Pseudo R2 (CS)", "LL-Null", "count as jointly normal", "Masks hide"):
        assert part in text, part


# -- the direction -------------------------------------------------------------------------------


def test_direction_is_that_of_the_textbook_recursion():
    # Oracle: BFGS updates of the whole inverse Hessian from H, written out.
    rng = np.random.default_rng(2)
    d, parts = 6, (slice(0, 2), slice(2, 6))
    A = rng.normal(size=(d, d))
    A = A @ A.T + np.eye(d)
    scale = np.concatenate([np.full(2, 0.7), np.full(4, 1.3)])
    points = rng.normal(size=(4, d))
    scores = -points @ A
    H = np.diag(scale)
    memories = [QuasiNewtonMemory(5) for _ in parts]
    for point, score in zip(points, scores, strict=True):
        for memory, part in zip(memories, parts, strict=True):
            memory.take(point[part], score[part])
    steps, changes = np.diff(points, axis=0), -np.diff(scores, axis=0)
    H = H * (changes[-1] @ steps[-1]) / (changes[-1] @ H @ changes[-1])
    for s, y in zip(steps, changes, strict=True):
        rho = 1.0 / (s @ y)
        left = np.eye(d) - rho * np.outer(s, y)
        H = left @ H @ left.T + rho * np.outer(s, s)
    products = [m.products(lambda g, p=p: scale[p] * g) for m, p in zip(memories, parts, strict=True)]
    weights, slope = quasi_newton(sum(p[0] for p in products), sum(p[1] for p in products))
    found = [m.direction(weights, lambda g, p=p: scale[p] * g) for m, p in zip(memories, parts, strict=True)]
    np.testing.assert_allclose(np.concatenate(found), H @ scores[-1], rtol=1e-9)
    assert slope == pytest.approx(scores[-1] @ H @ scores[-1])
