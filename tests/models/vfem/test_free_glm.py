"""A binary or count response where columns depend between sites: joint maximum likelihood."""

import numpy as np
import pytest
import statsmodels.api as sm
from joint_oracle import PooledJoint, correlated
from statsmodels.tools.numdiff import approx_fprime_cs, approx_hess_cs

import fedstat as fs
from fedstat.errors import ConvergenceWarning, DataWarning, EstimationError, ModelError, NotAvailableError
from fedstat.kernels.glm.quadrature import BY_M, BY_MM, BY_MV, BY_V, BY_VV, LOG, LOGIT, marginal_likelihood
from fedstat.models.vertical.joint_normal.fit import without_effects
from fedstat.models.vertical.joint_normal.likelihood import JointNormalPoint
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem import joint_protocol
from fedstat.models.vfem.joint_likelihood import (
    ResponseSums,
    columns_alone,
    columns_derivatives,
    missing_model,
    response_information,
    response_score,
    without_scale,
)

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

FAMILIES = {"Logit": sm.families.Binomial(), "Log": sm.families.Poisson()}
KERNELS = {"Logit": LOGIT, "Log": LOG}
DESIGNS = {
    "three sites": ("Logit", {"sizes": (2, 1, 2), "shares": (0.0, 0.4, 0.5)}),
    "two of them": ("Logit", {"sizes": (2, 2), "shares": (0.3, 0.5), "holder": "B", "mar": False}),
    "counts": ("Log", {"sizes": (1, 2, 2), "shares": (0.2, 0.3, 0.4), "holder": "Registry"}),
}


def pooled(study, link, result=None):
    """Return the oracle of all data, or with columns and small patterns as a fit has them."""
    if result is None:
        return PooledJoint(study.table["y"], study.table[study.covariates], link)
    table = as_counted(study, result)
    return PooledJoint(table["y"], table[[c for k in result.names for c in study.columns[k]]], link)


def as_counted(study, result):
    """Return the table in which entities of small patterns are missing, as in the fit."""
    table = study.table.copy()
    for k, released in result._held.exchange.released.items():
        here = np.flatnonzero(table[study.columns[k][0]].notna())
        table.loc[here[~released], study.columns[k]] = np.nan
    return table


def all_parameters(found, oracle):
    fit = found._fit
    beta, mu = (np.concatenate([by[k] for k in found.names]) for by in (fit.beta, fit.mu))
    return oracle.pack(fit.beta0, beta, mu, fit.joint.cov[:-1, :-1])


def make(study, link, **options):
    partition = study.partition(**options.pop("partition", {}))
    return fs.VFEMGLM.from_formula("y ~ .", partition, family=FAMILIES[link], **options)


@pytest.fixture(scope="module", params=list(DESIGNS))
def fitted(request):
    link, options = DESIGNS[request.param]
    study = correlated(3, 600, count=link == "Log", **options)
    result = make(study, link).fit()
    oracle = pooled(study, link, result)
    theta = all_parameters(result, oracle)
    return study, link, result, oracle, theta, oracle.information(theta)


# -- pooled maximum likelihood -------------------------------------------------------------------


@pytest.mark.parametrize("link", FAMILIES)
def test_score_and_information_are_derivatives_of_the_pooled_likelihood(link):
    rng = np.random.default_rng(0)
    study = correlated(1, 250, count=link == "Log", shares=(0.2, 0.4, 0.5))
    oracle, table = pooled(study, link), study.table
    G, P, code = len(oracle.groups), oracle.P, np.zeros(len(table), dtype=int)
    for g, (_, rows) in enumerate(oracle.groups):
        code[rows] = g
    Z = np.column_stack([np.ones(len(table)), table[study.covariates].fillna(0.0), table["y"]])
    seen = np.array([own for own, _ in oracle.groups])
    sizes = tuple(len(names) for names in study.columns.values())
    moments = PatternMoments(
        sites=tuple(study.columns),
        sizes=sizes,
        names=tuple(study.covariates),
        seen=seen,
        n=np.bincount(code).astype(float),
        grams=np.array([Z[code == g].T @ Z[code == g] for g in range(G)]),
        center=np.zeros(P + 1),
        scale=np.ones(P + 1),
    )
    S = np.cov(rng.normal(size=(20, P)).T)
    edges = np.ones((P, P), dtype=bool)
    edges[0, P - 1] = edges[P - 1, 0] = False  # and one that is fixed
    i, j = np.nonzero(np.triu(edges))
    point = JointNormalPoint(
        0.3 * rng.normal(size=P), 0.2, 0.3 * rng.normal(size=P), 1.0, np.linalg.inv(S) * edges
    )

    def loglike(vector):
        Q = np.zeros((P, P), dtype=vector.dtype)
        Q[i, j] = Q[j, i] = vector[1 + 2 * P :]
        beta, mu = vector[1 : 1 + P], vector[1 + P : 1 + 2 * P]
        return oracle.loglike(oracle.pack(vector[0] - beta @ mu, beta, mu, np.linalg.inv(Q)))

    joint, X = missing_model(point, seen), Z[:, 1:-1]
    m = point.a + np.sum(joint.slopes[code] * (X - point.mu), axis=1)
    terms = marginal_likelihood(KERNELS[link], oracle.y, m, joint.variance[code])
    ones, sums, H = Z[:, :-1], [], np.zeros((G, P + 2, P + 2))
    for g in range(G):
        own, at = ones[code == g], terms[:, code == g]
        sums.append(own.T @ at[BY_M])
        H[g, :-1, :-1] = -(own.T * at[BY_MM]) @ own
        H[g, -1, :-1] = H[g, :-1, -1] = -own.T @ at[BY_MV]
        H[g, -1, -1] = -at[BY_VV].sum()
    by_v = np.bincount(code, terms[BY_V])
    of_response = ResponseSums(np.array(sums), by_v, H[:, 0, 0])
    own = columns_derivatives(columns_alone(moments), point, edges)
    score = response_score(point, joint, of_response, seen, edges) + own.score
    information = response_information(point, joint, H, seen, edges, of_response) + own.information
    vector = np.concatenate([[point.a], point.beta, point.mu, point.Q[i, j]])
    np.testing.assert_allclose(without_scale(score), approx_fprime_cs(vector, loglike), atol=1e-6)
    np.testing.assert_allclose(without_scale(information), -approx_hess_cs(vector, loglike), atol=1e-5)


def test_estimate_is_a_maximum_of_the_pooled_likelihood(fitted):
    _, _, result, oracle, theta, information = fitted
    assert result.converged and result.between == "free"
    assert np.linalg.eigvalsh(information)[0] > 0.0
    assert np.abs(oracle.score(theta) / np.sqrt(np.diag(information))).max() < 1e-6


def test_standard_errors_are_those_of_the_numerical_hessian(fitted):
    _, _, result, oracle, _, information = fitted
    np.testing.assert_allclose(result.bse, oracle.bse(information), rtol=1e-5)


def test_an_optimizer_of_the_pooled_data_finds_the_same():
    study = correlated(5, 400, sizes=(1, 1), shares=(0.3, 0.4), mar=False)
    oracle = pooled(study, "Logit")
    result = make(study, "Logit").fit()
    theta = oracle.maximize(oracle.start())
    np.testing.assert_allclose(result.params, theta[oracle.reported], atol=1e-5)
    np.testing.assert_allclose(result.bse, oracle.bse(oracle.information(theta)), rtol=1e-4)


def test_log_likelihood_is_that_of_the_response_given_what_is_seen(fitted):
    _, _, result, oracle, theta, _ = fitted
    alone = without_effects(result._moments(), np.zeros(oracle.P, dtype=bool), tol=1e-8)
    Sigma = alone.cov[:-1, :-1]
    largest = oracle.columns(oracle.pack(0.0, 0.0 * alone.mu, alone.mu, Sigma)).sum()
    assert result.llf == pytest.approx(oracle.loglike(theta) - largest, abs=1e-6)
    assert result.llf > result.llnull


# -- identities ----------------------------------------------------------------------------------


def test_with_nothing_missing_it_is_the_generalized_linear_model():
    study = correlated(2, 400, shares=(0.0, 0.0, 0.0))
    result = make(study, "Logit").fit()
    X = sm.add_constant(study.table[study.covariates])
    expected = sm.GLM(study.table["y"], X, family=FAMILIES["Logit"]).fit(tol=1e-12)
    np.testing.assert_allclose(result.params, expected.params, atol=1e-6)
    np.testing.assert_allclose(result.bse, expected.bse, rtol=1e-5)
    assert result.llf == pytest.approx(expected.llf, abs=1e-6)


def test_one_site_has_nothing_between():
    study = correlated(4, 300, sizes=(2,), shares=(0.3,), holder="Registry")
    free, apart = (make(study, "Logit", between=b).fit() for b in ("free", "independent"))
    np.testing.assert_array_equal(free.params, apart.params)


def test_other_methods_have_nothing_missing():
    study = correlated(4, 500)
    free, apart = (make(study, "Logit", between=b).fit(method="cc") for b in ("free", "independent"))
    np.testing.assert_array_equal(free.params, apart.params)


def test_small_patterns_count_as_missing_and_the_rest_is_as_it_is():
    study = correlated(1, 500, shares=(0.2, 0.4, 0.5))
    result = make(study, "Logit").fit()
    plan = result._held.exchange.plan
    assert 0 < plan.moved < 25 and not plan.left_out
    oracle = pooled(study, "Logit", result)
    theta = all_parameters(result, oracle)
    np.testing.assert_allclose(result.bse, oracle.bse(oracle.information(theta)), rtol=1e-5)
    with pytest.raises(EstimationError, match="between='independent'"):
        make(correlated(1, 200, shares=(0.2, 0.4, 0.5)), "Logit").fit()
    with pytest.warns(DataWarning, match="count as missing"):
        make(correlated(1, 200, shares=(0.2, 0.4, 0.5)), "Logit").fit(max_moved=1.0)


# -- what a user sees ----------------------------------------------------------------------------


def test_predictions_are_means_over_what_is_missing(fitted):
    study, link, result, merged, theta, information = fitted
    prediction, V = result.get_prediction(), np.linalg.inv(information)
    # All known columns of an entity in a small pattern are used as well.
    names = [c for k in result.names for c in study.columns[k]]
    oracle = PooledJoint(study.table["y"], study.table[names], link)
    order = result.model.partition.entities
    np.testing.assert_allclose(prediction.predicted_mean.loc[order], oracle.mean(theta)[order], rtol=1e-6)
    J = approx_fprime_cs(theta, oracle.mean)
    se = np.sqrt(np.einsum("ij,jk,ik->i", J, V, J))
    np.testing.assert_allclose(prediction.se_mean.loc[order], se[order], rtol=1e-4)
    if result.ledger.at == study.holder:
        np.testing.assert_allclose(result.fittedvalues.loc[order], merged.mean(theta)[order], rtol=1e-6)


def test_saved_results_predict_the_same(fitted, tmp_path):
    study, _, result, *_ = fitted
    result.save(tmp_path / "fit.json")
    again = fs.load(tmp_path / "fit.json")
    assert again.between == "free"
    new = study.partition()
    np.testing.assert_allclose(again.predict(new), result.predict(new), rtol=1e-12)
    np.testing.assert_array_equal(again.bse, result.bse)


def test_tests_of_what_is_assumed_need_nothing_more(fitted):
    _, _, result, *_ = fitted
    before = len(result.ledger.entries)
    assert result.independence_lr_test().pvalue < 1e-8
    assert (result.independence_tests()["pvalue"] < 1e-8).all()
    assert 0.0 <= result.mcar_test().pvalue <= 1.0
    assert len(result.ledger.entries) == before


def test_summary_says_what_is_assumed_and_what_passed(fitted):
    _, _, result, *_ = fitted
    notes = " ".join(result.notes)
    for text in ("Joint maximum likelihood", "The data contradict blocks", "stayed with the response holder"):
        assert text in notes
    assert "no row-level values left" not in notes and "are independent between sites (" not in notes


def test_rounds_are_those_of_the_others_where_the_coordinator_sits_at_the_holder():
    study = correlated(3, 300, sizes=(1, 1, 1), shares=(0.0, 0.3, 0.3))
    partition = study.partition()
    fit = fs.VFEMGLM.from_formula("y ~ .", partition, family=FAMILIES["Logit"], coordinator="A").fit()
    notes = " ".join(fit.notes)
    sums = [e.sender for e in fit.ledger.entries if (e.step, e.array) == ("joint_score", "sums")]
    assert f"In each of {sums.count('B')} rounds" in notes and "A" not in sums
    assert "coordinator: B " in notes


def test_a_likelihood_ratio_of_other_columns_is_refused():
    study = correlated(3, 900)
    smaller = fs.VFEMGLM.from_formula("y ~ a1 + b1 + c1", study.partition(), family=FAMILIES["Logit"]).fit()
    with pytest.raises(NotAvailableError, match="wald_test"):
        make(study, "Logit").fit().compare_lr_test(smaller)


def test_arguments_that_belong_to_the_publication():
    study = correlated(3, 900)
    with pytest.raises(ModelError, match="between='independent'"):
        make(study, "Logit").fit(cross_products="sketch")
    with pytest.raises(ModelError, match="between: expected"):
        make(study, "Logit", between="none")


def test_a_pattern_that_allows_too_few_iterations_is_named_with_its_remedy(monkeypatch):
    """The disclosure checks allow an iteration for every two entities of the smallest pattern."""
    monkeypatch.setattr(joint_protocol, "MIN_ENTITIES_PER_EQUATION", 30)
    study = correlated(3, 900)
    partition = study.partition()
    model = fs.VFEMGLM.from_formula("y ~ .", partition, family=FAMILIES["Logit"])
    with pytest.warns(ConvergenceWarning, match=r"without B, which allows \d iterations") as caught:
        result = model.fit(cov_type="none")
    smallest = int(result._held.exchange.moments.n.min())
    text = next(str(one.message) for one in caught if one.category is ConvergenceWarning)
    assert f"leave out B, or make the partition with min_count={2 * smallest}" in text
    assert "maxiter" not in text and len(result._fit.trace) == smallest // 30
