"""Effects of a treatment are those of the pooled table: statsmodels, Stata, and numerical derivatives."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import expit, softmax
from statsmodels.treatment.tests import test_teffects as stata
from statsmodels.treatment.treatment_effects import TreatmentEffect

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, FormulaError, ModelError, NotAvailableError
from fedstat.kernels.treatment import ESTIMANDS, METHODS
from fedstat.models.horizontal.overlap import overlap_notes

RNG = np.random.default_rng(7)
N = 900
TABLE = pd.DataFrame({"a": RNG.normal(size=N), "b": RNG.normal(size=N), "site": RNG.choice(list("ABC"), N)})
TABLE["t"] = (RNG.random(N) < expit(0.4 * TABLE["a"] - 0.5 * TABLE["b"])).astype(int)
GUMBEL = RNG.gumbel(size=(N, 3))
TABLE["arm"] = np.array(["low", "mid", "top"])[
    (np.column_stack([np.zeros(N), 0.5 * TABLE["a"], 0.4 * TABLE["b"]]) + GUMBEL).argmax(axis=1)
]
TABLE["y"] = 1 + 0.8 * TABLE["t"] + TABLE["a"] + 0.5 * TABLE["b"] + 0.4 * TABLE["t"] * TABLE["a"]
TABLE["y"] += RNG.normal(size=N)
TABLE["e"] = (TABLE["y"] + RNG.logistic(size=N) > 1.0).astype(int)
TABLE["k"] = RNG.poisson(np.exp(0.3 * TABLE["y"]))
FAMILIES = {"y": "gaussian", "e": "binomial", "k": "poisson"}


def rows(table=TABLE, **given):
    return fs.ClientPartition.from_frame(table, by="site", **given)


def model(formula="y ~ a + b", treatment="t ~ a + b", table=TABLE, **given):
    return fs.TreatmentEffect.from_formula(formula, rows(table), treatment=treatment, **given)


# ---- an oracle of its own: the equations of the pooled table, with numerical derivatives --------------


def pooled(
    outcome="y",
    arm="t",
    x=("a", "b"),
    z=("a", "b"),
    method="aipw",
    estimand="ATE",
    trim=0.0,
    Z=None,
    target=None,
    weights=1.0,
    groups=None,
    offset=0.0,
    probit=False,
):
    """Solve the equations with derivatives by differences: potential means and their covariance.

    `target` marks rows whose population the means are of, `groups` are numbers of clusters.
    """
    levels, code = np.unique(TABLE[arm], return_inverse=True)
    X = np.column_stack([np.ones(N), TABLE[list(x)]])
    Z = np.column_stack([np.ones(N), TABLE[list(z)]]) if Z is None else Z
    y, J, T = TABLE[outcome].to_numpy(float), len(levels), np.eye(len(levels))[code]
    mean = {"y": lambda u: u, "e": expit, "k": np.exp}[outcome]
    k, p = Z.shape[1], X.shape[1]
    S = np.column_stack([np.ones(N), TABLE[list(z)]])
    weighs = method != "standardization" or estimand in ("ATO", "matching") or trim
    member = target is not None and weighs
    models = method != "ipw"

    def psi(theta):
        out, E = [], np.full((N, J), np.nan)
        at = 0
        if weighs:
            G = theta[: k * (J - 1)].reshape(J - 1, k)
            E = softmax(np.column_stack([np.zeros(N), Z @ G.T]), axis=1)
            factor = 1.0
            if probit:
                e = stats.norm.cdf(Z @ G[0])
                E, factor = np.column_stack([1.0 - e, e]), stats.norm.pdf(Z @ G[0]) / (e * (1.0 - e))
            out += [((T[:, j] - E[:, j]) * factor)[:, None] * Z for j in range(1, J)]
            at = k * (J - 1)
        if member:
            there = expit(S @ theta[at : at + S.shape[1]])
            out.append((target - there)[:, None] * S)
            at += S.shape[1]
        h = {
            "ATE": lambda: np.ones(N),
            "ATT": lambda: E[:, 1],
            "ATC": lambda: E[:, 0],
            "ATO": lambda: 1.0 / (1.0 / E).sum(axis=1),
            "matching": lambda: E.min(axis=1),
        }[estimand]()
        keep = (E.min(axis=1) >= trim) if trim else np.ones(N)
        s = {"ATT": T[:, 1], "ATC": T[:, 0]}.get(estimand, h) * keep
        if target is not None:
            s, h = target, there if member else h
        W = T * (h * keep)[:, None] / E if weighs else T
        mu = theta[-J:]
        for j in range(J):
            if models:
                m = mean(X @ theta[at : at + p] + offset)
                at += p
                w = W[:, j] if method == "ipw_ra" else T[:, j]
                out.append((w * (y - m))[:, None] * X)
                out_j = s * (m - mu[j]) + (W[:, j] * (y - m) if method == "aipw" else 0.0)
            else:
                out_j = W[:, j] * (y - mu[j])
            means[j] = out_j
        return np.column_stack([*out, *means]) * np.reshape(weights, (-1, 1))

    means = [None] * J
    theta = np.zeros(k * (J - 1) * bool(weighs) + S.shape[1] * bool(member) + p * J * models + J)
    for _ in range(60):
        g = psi(theta).sum(axis=0)
        step = np.linalg.solve(derivative(psi, theta), g)
        theta = theta - step
        if np.abs(step).max() < 1e-11:
            break
    A, rows = derivative(psi, theta), psi(theta)
    if groups is not None:
        G = groups.max() + 1
        rows = np.array([np.bincount(groups, column) for column in rows.T]).T * (G / (G - 1.0)) ** 0.5
    V = np.linalg.inv(A) @ (rows.T @ rows) @ np.linalg.inv(A).T
    return theta[-J:], V[-J:, -J:]


def derivative(psi, theta, size=1e-5):
    moves = size * np.eye(len(theta))
    return np.array([(psi(theta + m) - psi(theta - m)).sum(axis=0) / (2.0 * size) for m in moves]).T


def assert_is(fit, expected, rtol=2e-7):
    means, V = expected
    J = len(means)
    R = np.vstack([np.eye(J)[1:] - np.eye(J)[:1], np.eye(J)[:1]])
    assert_allclose(fit.params, R @ means, rtol=rtol, atol=1e-9)
    assert_allclose(fit.cov_params(), R @ V @ R.T, rtol=1e-5, atol=1e-8)


# ---- statsmodels and Stata --------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("method", "theirs"), [("ipw", "ipw"), ("aipw", "aipw"), ("standardization", "ra")])
def test_estimates_and_errors_are_those_of_statsmodels(method, theirs, masked):
    X = sm.add_constant(TABLE[["a", "b"]])
    selection = sm.Logit(TABLE["t"], X).fit(disp=0, tol=1e-14)
    pooled = TreatmentEffect(sm.OLS(TABLE["y"], X), TABLE["t"], results_select=selection)
    found = getattr(pooled, theirs)(disp=False)
    fit = model().fit(method, masked=masked)
    assert fit.converged
    assert_allclose(fit.params, [found.effect[0], found.effect[1]], rtol=1e-8)
    assert_allclose(fit.bse, found.results_gmm.bse[:2], rtol=1e-5)


CATTANEO = stata.dta_cat.assign(site=np.arange(len(stata.dta_cat)) % 9)
BIRTHS = "bweight ~ prenatal1_ + mmarried_ + mage + fbaby_"


@pytest.mark.parametrize("sites", [1, 3, 9])
def test_standardization_is_that_of_stata(sites):
    """Published numbers of ``teffects ra`` on the data of Cattaneo (2010), which statsmodels' tests carry."""
    partition = rows(CATTANEO.assign(site=CATTANEO["site"] % sites))
    for estimand, table in (("ATE", stata.res_st.results_ra.table), ("ATT", stata.res_st.results_ra.table_t)):
        given = {"treatment": "mbsmoke_ ~ mmarried_", "estimand": estimand}
        fit = fs.TreatmentEffect.from_formula(BIRTHS, partition, **given).fit(
            "standardization", local=sites < 9
        )
        assert_allclose(fit.params, table[:2, 0], rtol=1e-9)
        # Stata's errors of the effect in the treated divide by n, as these.
        assert_allclose(fit.bse, table[:2, 1], rtol=1e-6)


SMOKES = "mbsmoke_ ~ mmarried_ + mage + mage2 + fbaby_ + medu"


@pytest.mark.parametrize("sites", [1, 3, 9])
@pytest.mark.parametrize(
    ("method", "estimand", "table"),
    [
        ("ipw", "ATE", stata.res_st.results_ipw.table),
        ("ipw", "ATT", stata.res_st.results_ipw.table_t),
        ("aipw", "ATE", stata.res_st.results_aipw.table),
        ("ipw_ra", "ATE", stata.res_st.results_ipwra.table),
        ("ipw_ra", "ATT", stata.res_st.results_ipwra.table_t),
    ],
)
def test_weighted_effects_with_a_probit_propensity_are_those_of_stata(method, estimand, table, sites):
    """Published numbers of ``teffects`` with ``probit``: effect, mean of the controls, all coefficients."""
    partition = rows(CATTANEO.assign(site=CATTANEO["site"] % sites))
    given = {"treatment": SMOKES, "link": "probit", "estimand": estimand}
    fit = fs.TreatmentEffect.from_formula(BIRTHS, partition, **given).fit(method, local=False)
    assert_allclose(fit.params, table[:2, 0], rtol=1e-6)
    assert_allclose(fit.bse, table[:2, 1], rtol=1e-5)
    names = [*SMOKES.partition(" ~ ")[2].split(" + "), "Intercept"]
    found = fit.equations.loc[[f"propensity 1: {name}" for name in names]]
    assert_allclose(found["estimate"], table[-6:, 0], rtol=1e-6)
    assert_allclose(found["std_error"], table[-6:, 1], rtol=1e-5)


def test_weighted_outcome_models_are_those_of_statsmodels():
    """Its propensity model must have six coefficients, and the rows be in the order of the arms."""
    table = CATTANEO.sort_values("mbsmoke_", kind="stable").reset_index(drop=True)
    selection = sm.Logit.from_formula(SMOKES, table).fit(disp=0, maxiter=100)
    outcome = sm.OLS.from_formula(BIRTHS, table)
    pooled = TreatmentEffect(outcome, table["mbsmoke_"].to_numpy(), results_select=selection)
    partition = rows(table.assign(site=table.index % 3))
    for estimand, group in (("ATE", "all"), ("ATT", 1), ("ATC", 0)):
        found = pooled.ipw_ra(effect_group=group)
        given = {"treatment": SMOKES, "estimand": estimand}
        fit = fs.TreatmentEffect.from_formula(BIRTHS, partition, **given).fit("ipw_ra", local=False)
        assert_allclose(fit.params, found.effect[:2], rtol=1e-7)


# ---- all estimands, outcomes and arms ---------------------------------------------------------------------


@pytest.mark.parametrize("estimand", ESTIMANDS)
@pytest.mark.parametrize("method", METHODS)
def test_all_estimands_are_those_of_the_pooled_equations(method, estimand):
    fit = model(estimand=estimand).fit(method, local=False)
    assert_is(fit, pooled(method=method, estimand=estimand))


@pytest.mark.parametrize("outcome", ["e", "k"])
@pytest.mark.parametrize("method", ["aipw", "standardization", "ipw_ra"])
def test_binary_outcomes_and_counts(method, outcome):
    fit = model(f"{outcome} ~ a", family=FAMILIES[outcome]).fit(method, local=False)
    assert_is(fit, pooled(outcome, x=("a",), method=method))


@pytest.mark.parametrize("estimand", ["ATE", "ATC", "ATO", "matching"])
@pytest.mark.parametrize("method", ["ipw", "aipw", "standardization"])
def test_treatments_of_several_levels(method, estimand):
    fit = model("y ~ a", "arm ~ a + b", estimand=estimand).fit(method, local=False)
    assert_is(fit, pooled(arm="arm", x=("a",), method=method, estimand=estimand))


@pytest.mark.parametrize("trim", [0.1, 0.3])
def test_rows_with_rare_arms_are_left_out(trim):
    for method in ("ipw", "aipw", "standardization"):
        assert_is(model(trim=trim).fit(method, local=False), pooled(method=method, trim=trim))


IN_B = (TABLE["site"] == "B").to_numpy(float)


@pytest.mark.parametrize("method", METHODS)
def test_the_rows_of_one_site_are_the_population(method):
    masked = False if method in ("standardization", "ipw_ra") else None
    fit = model(target="B").fit(method, masked=masked)
    assert_is(fit, pooled(method=method, target=IN_B))
    assert fit.population == "rows of B" and "rows of B" in fit.summary().as_text()
    own = model().fit(method).site_estimates
    assert_allclose(fit.site_estimates, own, rtol=1e-9)


def test_transport_weights_of_several_arms_and_sites_propensities():
    fit = model("y ~ a", "arm ~ a + b", target="C").fit()
    assert_is(fit, pooled(arm="arm", x=("a",), target=(TABLE["site"] == "C").to_numpy(float)))
    Z = np.column_stack([np.ones(N), TABLE[["a", "b"]], pd.get_dummies(TABLE["site"]).to_numpy(float)[:, 1:]])
    assert_is(model(target="B", propensity="intercepts").fit("ipw"), pooled(method="ipw", target=IN_B, Z=Z))


def test_weights_to_a_site_balance_its_columns():
    """Weighted arms have about the means of the target, which those of all sites have not."""
    table = TABLE.assign(site=np.where(RNG.random(N) < expit(TABLE["a"]), "B", TABLE["site"]))
    balance = model("y ~ 1", table=table, target="B").balance()
    means = balance.tidy().set_index("term")[["mean", "mean_first"]].loc["a"]
    assert_allclose(means, table.loc[table["site"] == "B", "a"].mean(), atol=0.1)
    assert abs(table["a"].mean() - means.mean()) > 0.15


@pytest.mark.parametrize(
    ("carrying", "rows", "found"), [(49.9, 200, 1), (50.1, 200, 0), (24.9, 50, 1), (25.1, 50, 0)]
)
def test_the_rule_of_overlap_at_its_boundaries(carrying, rows, found):
    sums = np.array([[9.0, carrying**0.5, 1.0]])
    assert len(list(overlap_notes(["new"], np.array([rows]), sums, False))) == found


def test_what_a_target_does_not_go_with_is_refused():
    for method in ("standardization", "ipw_ra"):
        with pytest.raises(ModelError, match=r"which no mask hides\. Use method='aipw'"):
            model(target="B").fit(method)
    with pytest.raises(ModelError, match="target: expected one of"):
        model(target="D")
    with pytest.raises(ModelError, match="a population by themselves"):
        model(target="B", estimand="ATO")
    apart = TABLE.assign(a=TABLE["a"] + 20.0 * IN_B)
    with pytest.raises(EstimationError, match=r"rows of 'B' are separated.*'target: a'"):
        model("y ~ 1", "t ~ a", table=apart, target="B").fit("ipw")


# ---- sampling weights, offsets, clusters, probit -------------------------------------------------------

TABLE["w"] = RNG.uniform(0.5, 2.0, N)
TABLE["days"] = RNG.uniform(1.0, 3.0, N)
TABLE["ward"] = RNG.integers(0, 40, N)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("ipw", {}),
        ("aipw", {"estimand": "ATT"}),
        ("ipw_ra", {}),
        ("standardization", {}),
        ("aipw", {"target": "B"}),
    ],
)
def test_sampling_weights_are_those_of_the_pooled_equations(method, given):
    fit = model(weights="w", **given).fit(method)
    expected = given | ({"target": IN_B} if "target" in given else {})
    assert_is(fit, pooled(method=method, weights=TABLE["w"].to_numpy(), **expected))
    by_arm = TABLE.assign(wy=TABLE["w"] * TABLE["y"]).groupby("t")[["w", "wy"]].sum()
    assert_allclose(fit.arms["mean"], by_arm["wy"] / by_arm["w"])
    assert fit.arms["rows"].tolist() == TABLE["t"].value_counts().sort_index().tolist()
    assert "w" in fit.summary().as_text()


def test_sampling_weights_are_those_of_the_own_fit_and_of_balance():
    fit = model(weights="w").fit("aipw")
    alone = model(table=TABLE[TABLE["site"] == "A"], weights="w").fit("aipw", local=False)
    assert_allclose(fit.site_estimates.loc["A"], alone.params, rtol=1e-7)
    found = model("y ~ 1", weights="w").balance().tidy().set_index("term").loc["a"]
    means = [np.average(one["a"], weights=one["w"]) for _, one in TABLE.groupby("t")]
    assert_allclose([found["mean_first_unweighted"], found["mean_unweighted"]], means)


@pytest.mark.parametrize("method", ["aipw", "standardization", "ipw_ra"])
def test_offsets_belong_to_the_outcome_models(method):
    logs = np.log(TABLE["days"].to_numpy())
    expected = pooled("k", x=("a",), method=method, offset=logs)
    for formula, given in (("k ~ a", {"exposure": "days"}), ("k ~ a + offset(log(days))", {})):
        assert_is(model(formula, family="poisson", **given).fit(method, local=False), expected)
    with pytest.raises(FormulaError, match="the outcome alone has an offset"):
        model(treatment="t ~ a + offset(b)")


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("method", "given"), [("aipw", {}), ("ipw", {"weights": "w"}), ("aipw", {"target": "B"})]
)
def test_errors_of_clusters_are_those_of_the_pooled_equations(method, given, masked):
    groups = TABLE.groupby(["site", "ward"]).ngroup().to_numpy()
    fit = model(**given).fit(method, cov_type="cluster", cov_kwds={"groups": "ward"}, masked=masked)
    expected = {"target": IN_B} if "target" in given else {}
    expected |= {"weights": TABLE["w"].to_numpy()} if "weights" in given else {}
    assert_is(fit, pooled(method=method, groups=groups, **expected))
    assert f"(ward, {groups.max() + 1}, CR1)" in fit.summary().as_text()
    assert fit.df_inference == groups.max() + 1 - 2


def test_few_clusters_are_announced_first():
    fit = model().fit().with_covariance("cluster", {"groups": "site"})
    assert fit.diagnostics()["kind"].iloc[0] == "few_clusters" and "(site, 3, CR1)" in fit.summary().as_text()
    assert_is(fit, pooled(groups=TABLE["site"].astype("category").cat.codes.to_numpy()))
    for kwds in (None, {"groups": "ward", "correction": "CR2"}, {"groups": 3}):
        with pytest.raises(ModelError, match="needs the column of the clusters"):
            model().fit(cov_type="cluster", cov_kwds=kwds)
    with pytest.raises(ModelError, match="no column of every site"):
        model().fit(cov_type="cluster", cov_kwds={"groups": "wards"})


@pytest.mark.parametrize("method", ["ipw", "aipw", "ipw_ra"])
@pytest.mark.parametrize("estimand", ["ATE", "ATT", "ATO"])
def test_probit_propensities_are_those_of_the_pooled_equations(method, estimand):
    fit = model(estimand=estimand, link="probit").fit(method)
    assert_is(fit, pooled(method=method, estimand=estimand, probit=True))
    with pytest.raises(ModelError, match=r"probit.*two arms.*link='logit'"):
        model(treatment="arm ~ a", link="probit")


@pytest.mark.parametrize("propensity", ["intercepts", "sites"])
def test_sites_have_propensity_models_of_their_own(propensity):
    sites = pd.get_dummies(TABLE["site"]).to_numpy(float)[:, 1:]
    more = [sites[:, [j]] * TABLE[["a", "b"]].to_numpy() for j in range(2)] if propensity == "sites" else []
    Z = np.column_stack([np.ones(N), TABLE[["a", "b"]], sites, *more])
    assert_is(model(propensity=propensity).fit("aipw", local=False), pooled(Z=Z))


# ---- balance before any outcome is read -------------------------------------------------------------------


def weighted_columns(estimand, arm="t"):
    """Weights of the pooled table, by arm, and the propensity scores."""
    levels, code = np.unique(TABLE[arm], return_inverse=True)
    Z = sm.add_constant(TABLE[["a", "b"]])
    E = np.asarray(sm.MNLogit(code, Z).fit(disp=0, tol=1e-14, maxiter=100).predict(Z))
    h = {"ATE": 1.0, "ATT": E[:, 1], "ATO": 1.0 / (1.0 / E).sum(axis=1), "matching": E.min(axis=1)}[estimand]
    return [np.where(code == j, h / E[:, j], 0.0) for j in range(len(levels))], E


@pytest.mark.parametrize("estimand", ["ATE", "ATT", "ATO", "matching"])
@pytest.mark.parametrize("arm", ["t", "arm"])
def test_balance_is_that_of_the_pooled_table(arm, estimand):
    if (arm, estimand) == ("arm", "ATT"):
        pytest.skip("of two arms")
    balance = model("y ~ 1", f"{arm} ~ a + b", estimand=estimand).balance()
    weights, _ = weighted_columns(estimand, arm)
    assert_allclose(balance.arms["effective"], [w.sum() ** 2 / (w @ w) for w in weights], rtol=1e-7)
    groups = [TABLE.loc[w > 0.0, ["a", "b"]] for w in weights]
    rows_of = dict(list(balance.tidy().groupby("arm", sort=False)))
    for j, (_, found) in enumerate(rows_of.items(), 1):
        spread = np.sqrt((groups[0].var() + groups[j].var()) / 2.0)
        assert_allclose(found["smd_unweighted"], (groups[j].mean() - groups[0].mean()) / spread, rtol=1e-9)
        assert_allclose(found["variance_ratio_unweighted"], groups[j].var() / groups[0].var(), rtol=1e-9)
        means = [np.average(TABLE[["a", "b"]], axis=0, weights=weights[k]) for k in (0, j)]
        assert_allclose(found["smd"], (means[1] - means[0]) / spread, rtol=1e-6, atol=1e-9)
    if estimand == "ATO" and arm == "t":
        assert np.abs(balance.tidy()["smd"]).max() < 1e-8  # exact (Li et al. 2018, theorem 3)


def test_counts_of_probabilities_have_no_cell_of_few_rows():
    balance = model("y ~ 1").balance()
    _, E = weighted_columns("ATE")
    counts = balance.overlap
    assert counts.to_numpy().sum() == N and not ((counts > 0) & (counts < 3)).any(axis=None)
    for level in (0, 1):
        exact = np.histogram(E[TABLE["t"] == level, 1], np.linspace(0.0, 1.0, 21))[0]
        assert np.abs(np.cumsum(counts[1][level]) - np.cumsum(exact)).max() <= 3 * 3
    assert balance.plot_overlap().get_xlabel() == "probability of 1"
    assert balance.plot_balance().get_xlabel() == "absolute standardized difference"


@pytest.mark.filterwarnings("ignore:left out rows")
def test_balance_releases_no_sum_of_the_outcome():
    table = TABLE.assign(y=np.where(TABLE.index % 50 == 0, np.nan, TABLE["y"]))
    found = [model("y ~ 1", table=table.assign(y=table["y"] * scale)).balance() for scale in (1.0, -1e6)]
    assert found[0].tidy().equals(found[1].tidy()) and found[0].arms["rows"].sum() == table["y"].notna().sum()
    steps = {event.step for _, event in found[0].ledger.events}
    assert "sum_balance" in steps and not steps & {"sum_products", "fit_alone"}


def test_poor_overlap_is_announced_first_by_one_rule():
    """In balance, fit, survival, and what is made of them: (sum w^2)^2 / sum w^4 of an arm is below 50."""
    table = TABLE.assign(
        t=(RNG.random(N) < expit(2.0 * TABLE["a"])).astype(int), time=np.ceil(TABLE["days"] * 9)
    )
    balance = model("y ~ 1", "t ~ a", table).balance()
    fit, given = model("y ~ 1", "t ~ a", table).fit("ipw"), {"treatment": "t ~ a"}
    times = fs.SurvivalEffect.from_formula("Surv(time, e) ~ 1", rows(table), **given).fit()
    e = sm.Logit(table["t"], sm.add_constant(table["a"])).fit(disp=0, tol=1e-14).predict()
    weights = [1.0 / (1.0 - e[table["t"] == 0]), 1.0 / e[table["t"] == 1]]
    carrying = [(w**2).sum() ** 2 / (w**4).sum() for w in weights]
    assert min(carrying) < 50.0
    for result in (balance, fit, times):
        found = result.diagnostics()
        assert (found["kind"] == "poor_overlap").sum() == sum(one < 50.0 for one in carrying)
        assert found["kind"].iloc[0] == "poor_overlap" and "estimand='ATO'" in found["note"].iloc[0]
        assert result.summary().as_text().startswith("*** POOR OVERLAP")
    for made in (fit.predictions("t"), fit.comparisons("t"), fit.heterogeneity):
        assert "POOR OVERLAP" in made.summary().as_text().split("\n")[0]
    assert_allclose(fit.weights["effective_rows"], [w.sum() ** 2 / (w @ w) for w in weights], rtol=1e-7)
    assert_allclose(balance.arms["effective"], fit.weights["effective_rows"], rtol=1e-9)
    for given in ({"estimand": "ATO"}, {"estimand": "matching"}):
        bounded = model("y ~ 1", "t ~ a", table, **given)
        assert "POOR OVERLAP" not in bounded.fit("ipw").summary().as_text()
        assert "POOR OVERLAP" not in bounded.balance().summary().as_text()
    with pytest.raises(NotAvailableError, match="standardization over all rows uses none"):
        _ = model("y ~ a", "t ~ a", table).fit("standardization").weights


# ---- what follows from a fit ------------------------------------------------------------------------------


def test_the_own_effect_of_a_site_is_that_of_its_rows():
    fit = model().fit("aipw")
    for site, own in fit.site_estimates.iterrows():
        alone = model(table=TABLE[TABLE["site"] == site]).fit("aipw", local=False)
        assert_allclose(own, alone.params, rtol=1e-7)
    het = fit.heterogeneity
    assert_allclose(
        het.to_frame()[["estimate", "std_error"]].loc["1 - 0"], [fit.params["1 - 0"], fit.bse["1 - 0"]]
    )
    # Cochran's Q of the effect.
    b, s = het.estimates["1 - 0"], het.std_errors["1 - 0"]
    mean = np.average(b, weights=s**-2)
    Q = (((b - mean) / s) ** 2).sum()
    assert_allclose(het.to_frame().loc["1 - 0", "Q"], Q)
    assert het.joint.df == 2 and abs(het.joint.statistic - Q / 2.0) < 0.02 * Q  # Welch's correction is small


def test_ratios_have_errors_by_the_delta_method():
    fit = model("e ~ a + b", family="binomial").fit()
    means, V = pooled("e")
    ratio = fit.comparisons("t", comparison="lnratio", exponentiate=True).tidy().iloc[0]
    D = np.array([-1.0, 1.0]) / means
    assert_allclose(
        [ratio["estimate"], ratio["std_error"]], [means[1] / means[0], (D @ V @ D) ** 0.5], rtol=1e-6
    )
    odds = fit.comparisons("t", comparison="lnor", exponentiate=True).tidy().iloc[0]
    D = np.array([-1.0, 1.0]) / means / (1.0 - means)
    expected = means[1] / (1 - means[1]) * (1 - means[0]) / means[0]
    assert_allclose([odds["estimate"], odds["std_error"]], [expected, (D @ V @ D) ** 0.5], rtol=1e-6)
    assert_allclose(fit.predictions("t").tidy()["estimate"], means)
    found = fit.e_values().iloc[0]
    R = ratio["estimate"]
    assert_allclose(found["e_value"], R + (R * (R - 1)) ** 0.5)
    assert 1.0 <= found["e_value_limit"] < found["e_value"]


def test_a_placebo_outcome_is_estimated_as_the_outcome_and_judged():
    table = TABLE.assign(before=TABLE["a"] + TABLE["b"] + RNG.normal(size=N))
    fit = model("y ~ a", "t ~ a", table, estimand="ATT").fit("ipw_ra", masked=False)
    found = fit.placebo("before ~ a")
    same = model("before ~ a", "t ~ a", table, estimand="ATT").fit("ipw_ra", masked=False)
    assert_allclose(found.params, same.params) and assert_allclose(found.bse, same.bse)
    assert found.pvalues.iloc[0] < 0.05 and "placebo" in set(found.diagnostics()["kind"])
    right = fit.placebo("before ~ a", treatment="t ~ a + b")
    assert (
        right.pvalues.iloc[0] > 0.05 and "does not differ from zero" in right.summary(notes="all").as_text()
    )
    with pytest.raises(FormulaError, match="'a' is the outcome"):
        fit.placebo("a ~ 1")


def test_the_comparison_of_sites_does_not_send_to_unmasked_sums():
    for masked in (True, False):
        het = model().fit(masked=masked).heterogeneity
        assert "masked=False" not in het.summary(notes="all").as_text()
        with pytest.raises(NotAvailableError, match="fit again without the site") as raised:
            _ = het.left_out
        assert raised.value.remedy is None


def test_results_are_saved_and_read(tmp_path):
    fit = model().fit()
    fit.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    assert_allclose(again.params, fit.params, rtol=0.0)
    assert again.equations.equals(fit.equations) and again.population == "all rows"
    assert again.comparisons("t").tidy().equals(fit.comparisons("t").tidy())


# ---- refusals ---------------------------------------------------------------------------------------------


def test_arms_that_are_separated_are_an_error_that_names_the_column():
    table = TABLE.assign(a=TABLE["a"] + 20.0 * TABLE["t"])
    with pytest.raises(EstimationError, match=r"arms of 't' are separated.*'propensity 1: a'"):
        model(table=table).fit()


def test_an_outcome_that_is_constant_in_an_arm_is_an_error():
    table = TABLE.assign(e=np.where(TABLE["t"] == 1, 1, TABLE["e"]))
    given = {"table": table, "family": "binomial"}
    with pytest.raises(EstimationError, match=r"'e' is constant in an arm.*\(ipw\) needs none"):
        model("e ~ a", **given).fit()
    fit = model("e ~ 1", **given).fit("ipw")
    assert fit.arms["potential_mean"].iloc[1] == 1.0


def test_a_site_without_an_arm_has_no_effect_of_its_own():
    table = TABLE.assign(t=np.where(TABLE["site"] == "B", 0, TABLE["t"]))
    fit = model(table=table).fit()
    assert fit.site_estimates.isna().all(axis=1).tolist() == [False, True, False]
    assert fit.heterogeneity.joint.df == 1 and "B (an arm has no rows" in " ".join(fit.notes)


def test_wrong_formulas_and_arguments_are_refused():
    with pytest.raises(FormulaError, match="'t' is the treatment"):
        model("y ~ a + t")
    with pytest.raises(FormulaError, match="'y' is the outcome"):
        model(treatment="t ~ a + y")
    with pytest.raises(FormulaError, match="expected a column on the left side"):
        model(treatment="t > 0 ~ a")
    with pytest.raises(FormulaError, match=r"'a:b' stands without 'a'.*a \* b in both"):
        model("y ~ a:b", "t ~ a")
    with pytest.raises(FormulaError, match="have a constant"):
        model("y ~ 0 + a")
    with pytest.raises(ModelError, match="trim"):
        model(trim=0.5)
    with pytest.raises(ModelError, match="not available here"):
        model(family=sm.families.Gamma())
    with pytest.raises(ModelError, match='weights="column"'):
        model(freq_weights="k")
    with pytest.raises(DesignError, match="a treatment needs two levels"):
        model(treatment="one ~ a", table=TABLE.assign(one=1))
    fit = model().fit(local=False)
    with pytest.raises(NotAvailableError, match="predictions"):
        fit.effect("a")
    for call in (
        lambda: fit.subgroups("t", by="e"),
        lambda: fit.plot_coefficients(standardized=True),
        lambda: fit.predictions(),
        lambda: fit.get_prediction(TABLE.head(2)),
        lambda: fit.contrasts("t"),
    ):
        with pytest.raises(NotAvailableError):
            call()
    with pytest.raises(NotAvailableError, match="fewer than two sites"):
        _ = fit.heterogeneity


def test_a_dot_is_every_other_column():
    table = TABLE[["a", "b", "t", "y", "site"]]
    short = model("y ~ .", "t ~ .", table).fit(local=False)
    assert_allclose(short.params, model(table=table).fit(local=False).params)
