"""Models of rows with estimated weights are those of the pooled table: weighted fits, stacked equations."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from scipy.special import expit, softmax

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.kernels.treatment import ESTIMANDS

RNG = np.random.default_rng(11)
ALLOW = fs.Policy(min_count=1, min_level_count=1, remember="nothing")
N = 900
PERSON = np.repeat(np.arange(N // 3), 3)
TABLE = pd.DataFrame(
    {
        "site": np.array(list("ABC"))[PERSON % 3],
        "person": PERSON,
        "a": RNG.normal(size=N),
        "b": RNG.normal(size=N // 3)[PERSON],
    }
)
TABLE["t"] = (RNG.random(N // 3)[PERSON] < expit(0.8 * TABLE["b"])).astype(int)
TABLE["u"] = (RNG.random(N) < expit(0.5 * TABLE["a"] - 0.4 * TABLE["t"])).astype(int)
UTILITY = np.column_stack([np.zeros(N), 0.5 * TABLE["a"], 0.4 * TABLE["b"]]) + RNG.gumbel(size=(N, 3))
TABLE["arm"] = np.array(["low", "mid", "top"])[UTILITY.argmax(axis=1)]
TABLE["y"] = 1 + 0.8 * TABLE["t"] + TABLE["a"] + 0.5 * TABLE["b"] + RNG.normal(size=N)
TABLE["e"] = (TABLE["y"] + RNG.logistic(size=N) > 1.0).astype(int)
TABLE["k"] = RNG.poisson(np.exp(0.3 * TABLE["y"]))
TABLE["time"] = np.ceil(10.0 * RNG.exponential(np.exp(-0.4 * TABLE["y"]))) / 10.0
TABLE["died"] = (RNG.random(N) < 0.7).astype(int)


def rows(table=TABLE, **given):
    return fs.ClientPartition.from_frame(table, by="site", **given)


def weights(treatment="t ~ a + b", estimand="ATE", table=TABLE, at=None, **given):
    at = rows(table) if at is None else at
    one = fs.TreatmentEffect.from_formula("y ~ 1", at, treatment=treatment, estimand=estimand, **given)
    return one.balance(overlap=False)


# ---- oracles: weighted fits of the pooled table, and stacked equations with numerical derivatives ------


def propensity(theta, arm, z, estimand):
    """Weights and scores of the rows at coefficients of a propensity model."""
    _, code = np.unique(TABLE[arm], return_inverse=True)
    Z, J = np.column_stack([np.ones(N), TABLE[z]]), code.max() + 1
    E = softmax(np.column_stack([np.zeros(N), Z @ theta.reshape(J - 1, -1).T]), axis=1)
    h = {
        "ATE": np.ones(N),
        "ATT": E[:, 1],
        "ATC": E[:, 0],
        "ATO": 1.0 / (1.0 / E).sum(axis=1),
        "matching": E.min(axis=1),
    }[estimand]
    own = np.eye(J)[code]
    scores = ((own - E)[:, 1:, None] * Z[:, None]).reshape(N, -1)
    return h / E[np.arange(N), code], scores


def fit_propensity(arm, z):
    design = sm.add_constant(TABLE[z])
    if TABLE[arm].nunique() == 2:
        return sm.Logit(TABLE[arm], design).fit(disp=0, tol=1e-12).params.to_numpy()
    return (
        sm.MNLogit(pd.factorize(TABLE[arm], sort=True)[0], design)
        .fit(disp=0, tol=1e-12)
        .params.to_numpy()
        .T.ravel()
    )


def stacked(models, beta, score, code=None):
    """Covariance of beta by numerical derivatives; `score` takes beta and weights to scores of rows."""
    gammas = [fit_propensity(arm, list(z)) for arm, z, _ in models]
    ends = np.cumsum([0, *map(len, gammas)])

    def psi(theta):
        found = [
            propensity(theta[i:j], arm, list(z), estimand)
            for (arm, z, estimand), i, j in zip(models, ends[:-1], ends[1:], strict=True)
        ]
        w = np.prod([one for one, _ in found], axis=0)
        return np.column_stack([*(scores for _, scores in found), score(theta[ends[-1] :], w)])

    theta = np.concatenate([*gammas, beta])
    step = 1e-6 * np.maximum(1.0, np.abs(theta))
    A = np.column_stack(
        [(psi(theta + d).sum(axis=0) - psi(theta - d).sum(axis=0)) / (2 * d.sum()) for d in np.diag(step)]
    )
    by_unit = (
        psi(theta) if code is None else pd.DataFrame(psi(theta)).groupby(np.asarray(code)).sum().to_numpy()
    )
    half = np.linalg.inv(A)
    return (half @ by_unit.T @ by_unit @ half.T)[ends[-1] :, ends[-1] :]


def weights_of(models):
    return np.prod([propensity(fit_propensity(a, list(z)), a, list(z), e)[0] for a, z, e in models], axis=0)


MODELS = {
    "y": (sm.families.Gaussian(), lambda eta: eta, lambda mu: np.ones_like(mu)),
    "e": (sm.families.Binomial(), expit, lambda mu: mu * (1.0 - mu)),
    "k": (sm.families.Poisson(), np.exp, lambda mu: mu),
}


def check_glm(outcome, formula, X, given, models, **fitted):
    family, mean, _ = MODELS[outcome]
    made = fs.FederatedGLM.from_formula(f"{outcome} ~ {formula}", rows(), family=family, weights=given)
    fit = made.fit(**fitted)
    w, y = weights_of(models), TABLE[outcome].to_numpy(float)
    pooled = sm.GLM(y, X, family=family, freq_weights=w).fit(tol=1e-13)
    assert_allclose(fit.params, pooled.params, rtol=1e-8, atol=1e-9)

    def score(beta, w):
        return X * (w * (y - mean(X @ beta)))[:, None]

    expected = stacked(models, pooled.params, score)
    assert_allclose(fit.cov_params(), expected, rtol=1e-6, atol=1e-9)
    return fit


@pytest.mark.parametrize("outcome", MODELS)
@pytest.mark.parametrize("estimand", ESTIMANDS)
def test_generalized_linear_models(outcome, estimand):
    if estimand == "matching":
        pytest.skip("numerical derivatives do not exist at a kink") if outcome != "y" else None
    X = np.column_stack([np.ones(N), TABLE[["t", "a"]]])
    check_glm(outcome, "t + a", X, weights(estimand=estimand), [("t", ("a", "b"), estimand)])


def test_several_arms():
    X = np.column_stack([np.ones(N), TABLE["arm"] == "mid", TABLE["arm"] == "top"]).astype(float)
    given = weights("arm ~ a + b", "ATO")
    check_glm("e", "C(arm)", X, given, [("arm", ("a", "b"), "ATO")])


def test_a_sequence_of_treatments():
    """The weights of two treatments, the second of which depends on the first, are multiplied."""
    X = np.column_stack([np.ones(N), TABLE[["t", "u"]]])
    given = [weights("t ~ b"), weights("u ~ a + t")]
    check_glm("y", "t + u", X, given, [("t", ("b",), "ATE"), ("u", ("a", "t"), "ATE")])


def test_a_link_that_is_not_canonical():
    """The bread is the observed information, whose derivative by numbers it is."""
    probit = sm.families.Binomial(sm.families.links.Probit())
    made = fs.FederatedGLM.from_formula("e ~ t + a", rows(), family=probit, weights=weights())
    fit, models = made.fit(), [("t", ("a", "b"), "ATE")]
    X, y = np.column_stack([np.ones(N), TABLE[["t", "a"]]]), TABLE["e"].to_numpy(float)

    def score(beta, w):
        eta = X @ beta
        mu, link = probit.link.inverse(eta), probit.link
        return X * (w * (y - mu) / link.deriv(mu) / (mu * (1.0 - mu)))[:, None]

    assert_allclose(fit.cov_params(), stacked(models, fit.params.to_numpy(), score), rtol=1e-6)


@pytest.mark.parametrize(
    ("outcome", "structure"), [*((name, "independence") for name in MODELS), ("y", "exchangeable")]
)
def test_estimating_equations(outcome, structure):
    """Weights of persons, whose visits are clusters; the working correlation counts as known.

    The bread is the expected derivative, which is not that of numbers where both link and correlation are
    others than the simplest ones.
    """
    family, mean, variance = MODELS[outcome]
    models = [("t", ("b",), "ATE")]
    given = weights("t ~ b")
    made = fs.FederatedGEE.from_formula(
        f"{outcome} ~ t + a", rows(), groups="person", cov_struct=structure, family=family, weights=given
    )
    fit = made.fit(tol=1e-10)
    assert fit.cov_type == "stacked"
    y = TABLE[outcome].to_numpy(float)
    X, rho = np.column_stack([np.ones(N), TABLE[["t", "a"]]]), fit.dep_params
    inverse = np.linalg.inv((1.0 - rho) * np.eye(3) + rho)

    def score(beta, w):
        mu = mean(X @ beta)
        root = np.sqrt(variance(mu))
        r = ((y - mu) / root).reshape(-1, 3)
        return X * (root * w * (r @ inverse).ravel())[:, None]

    size = np.linalg.norm(score(fit.params.to_numpy(), weights_of(models)), axis=0)
    assert (np.abs(score(fit.params.to_numpy(), weights_of(models)).sum(axis=0)) < 1e-6 * size).all()
    expected = stacked(models, fit.params.to_numpy(), score, PERSON)
    assert_allclose(fit.cov_params(), expected, rtol=1e-6, atol=1e-9)


def cox_scores(x, w, beta, by_site=True):
    """Scores of Lin and Wei with Breslow's ties, by site."""
    out = np.zeros((N, x.shape[1]))
    for site in np.unique(TABLE["site"]):
        here = (TABLE["site"] == site).to_numpy()
        t, d, X, v = TABLE["time"].to_numpy()[here], TABLE["died"].to_numpy()[here], x[here], w[here]
        risk = v * np.exp(X @ beta)
        at_risk = t[:, None] >= t[None, :]  # row i is at risk at the time of event j
        s0 = (risk[:, None] * at_risk).sum(axis=0)
        means = (risk[:, None, None] * at_risk[:, :, None] * X[:, None]).sum(axis=0) / s0[:, None]
        hazard = d * v / s0
        own = d[:, None] * v[:, None] * (X - means)
        expected = (risk[:, None] * at_risk * hazard)[:, :, None] * (X[:, None] - means)
        out[here] = own - expected.sum(axis=1)
    return out


@pytest.mark.parametrize("clusters", ["", " + cluster(person)"])
def test_partial_likelihood(clusters):
    models, x = [("t", ("a", "b"), "ATE")], TABLE[["t"]].to_numpy(float)
    made = fs.FederatedCox.from_formula(f"Surv(time, died) ~ t{clusters}", rows(), weights=weights())
    fit = made.fit(ties="breslow", tol=1e-11)
    code = PERSON if clusters else None
    w = weights_of(models)
    assert abs(cox_scores(x, w, fit.params.to_numpy()).sum()) < 1e-6
    expected = stacked(models, fit.params.to_numpy(), lambda beta, w: cox_scores(x, w, beta), code)
    assert_allclose(fit.cov_params(), expected, rtol=1e-5)


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_effects_of_treatment_are_coefficients(link):
    """Weighted means of the arms are potential means, and a weighted Cox model is that of SurvivalEffect."""
    at, given = rows(), {"treatment": "t ~ a + b", "link": link}
    effect = fs.TreatmentEffect.from_formula("e ~ 1", at, **given).fit("ipw")
    same = fs.FederatedGLM.from_formula("e ~ t", at, weights=effect).fit()
    assert_allclose(same.params["t"], effect.params.iloc[0], rtol=1e-9)
    assert_allclose(same.bse["t"], effect.bse.iloc[0], rtol=1e-8)
    times = fs.SurvivalEffect.from_formula("Surv(time, died) ~ 1", at, **given).fit()
    cox = fs.FederatedCox.from_formula("Surv(time, died) ~ t", at, weights=effect).fit()
    ratio = times.tidy().iloc[0]
    assert_allclose([cox.params["t"], cox.bse["t"]], [ratio["estimate"], ratio["std_error"]], rtol=1e-7)


@pytest.mark.parametrize("sites", [1, 25])
def test_the_number_of_sites_has_no_influence(sites):
    table = TABLE.assign(site=PERSON % sites)
    at = rows(table, policy=ALLOW)
    given = weights(at=at)
    few = fs.FederatedGLM.from_formula("y ~ t + a", rows(), weights=weights()).fit()
    many = fs.FederatedGLM.from_formula("y ~ t + a", at, weights=given).fit()
    assert_allclose(many.cov_params(), few.cov_params(), rtol=1e-7)
    gee = fs.FederatedGEE.from_formula("y ~ t + a", at, groups="person", weights=given).fit()
    assert_allclose(gee.params, few.params, rtol=1e-7)


def test_other_covariances_take_the_weights_as_known():
    models = [("t", ("a", "b"), "ATE")]
    fit = fs.FederatedGLM.from_formula("y ~ t", rows(), weights=weights()).fit(cov_type="HC0")
    X, w = np.column_stack([np.ones(N), TABLE["t"]]), weights_of(models)
    score = X * (w * (TABLE["y"] - X @ fit.params.to_numpy()).to_numpy())[:, None]
    bread = np.linalg.inv(X.T @ (w[:, None] * X))
    assert_allclose(fit.cov_params(), bread @ score.T @ score @ bread, rtol=1e-8)
    assert "take the weights as known" in " ".join(fit.summary().as_text().split())
    other = fit.with_covariance("stacked")
    assert other.cov_type == "stacked"
    assert other.bse["t"] < fit.bse["t"]


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_rows_that_the_propensity_model_does_not_have():
    gone = TABLE.copy()
    gone.loc[[3, 200, 500], "e"] = np.nan
    at = rows(gone, policy=ALLOW)
    with pytest.raises(ModelError, match=r"complete .* \['e', 't'\]"):
        fs.FederatedGLM.from_formula("e ~ t", at, weights=weights(at=at))
    at = rows(gone)
    given = weights(at=at, complete=["e", "t"])
    assert fs.FederatedGLM.from_formula("e ~ t", at, weights=given).fit().nobs == N - 3


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_as_many_other_rows():
    """The scores of the propensity model show that it was fitted on other rows."""
    one, other = TABLE.copy(), TABLE.copy()
    one.loc[3, "b"], other.loc[4, "b"] = np.nan, np.nan
    model = fs.FederatedGLM.from_formula("y ~ t", rows(other), weights=weights(table=one))
    with pytest.raises(EstimationError, match="of other rows"):
        model.fit()


def test_what_has_no_meaning_with_estimated_weights():
    at, given = rows(), weights()
    fit = fs.GLORE.from_formula("e ~ t", at, weights=given).fit()
    for call in (
        lambda: fit.llf,
        lambda: fit.heterogeneity,
        lambda: fit.score_test("a"),
        lambda: fit.compare_lr_test(fit),
        lambda: fit.subgroups("t", "arm"),
    ):
        with pytest.raises(NotAvailableError):
            call()
    for wrong in (
        lambda: fs.GLORE.from_formula("e ~ t", at, weights=given).fit(cov_type="nonrobust"),
        lambda: fs.GLORE.from_formula("e ~ t", at, weights=given).fit(method="firth"),
        lambda: fs.GLORE.from_formula("e ~ t", at).fit(cov_type="stacked"),
        lambda: fs.GLORE.from_formula("e ~ t", at, weights=given, var_weights="k"),
        lambda: fs.GLORE.from_formula("e ~ t", at, weights="k"),
        lambda: fs.GLORE.from_formula("e ~ t", at, weights=[]),
        lambda: fs.GLORE.from_formula("e ~ t", at, weights=weights(trim=0.05)),
        lambda: fs.FederatedOLS.from_formula("e ~ t | person", at, weights=given),
        lambda: fs.FederatedGEE.from_formula("e ~ t", at, groups="person", weights=given).fit(
            cov_type="naive"
        ),
        lambda: fs.FederatedCox.from_formula("Surv(time, died) ~ t", at, weights=given).fit(
            cov_type="nonrobust"
        ),
    ):
        with pytest.raises(ModelError):
            wrong()


def test_results_and_weights_are_saved(tmp_path):
    at, given = rows(), weights()
    given.save(tmp_path / "weights")
    again = fs.load(tmp_path / "weights")
    fit = fs.GLORE.from_formula("e ~ t", at, weights=given).fit()
    same = fs.GLORE.from_formula("e ~ t", at, weights=again).fit()
    assert same.cov_params().equals(fit.cov_params())
    fit.save(tmp_path / "fit")
    read = fs.load(tmp_path / "fit")
    assert read.summary().as_text().split("What left")[0] == fit.summary().as_text().split("What left")[0]


def test_few_rows_that_carry_an_arm_are_announced():
    rng = np.random.default_rng(5)
    table = TABLE.assign(x=rng.normal(size=N))
    table["t"] = (rng.random(N) < expit(2.5 * table["x"])).astype(int)
    given = weights("t ~ x", table=table)
    text = fs.FederatedGLM.from_formula("y ~ t", rows(table), weights=given).fit().summary().as_text()
    assert "POOR OVERLAP" in text
