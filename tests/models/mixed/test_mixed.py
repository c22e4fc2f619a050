"""Mixed models over sites are those of the pooled table: lme4, lmerTest, pbkrtest and statsmodels."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose
from scipy import optimize, stats

import fedstat as fs
from fedstat.errors import (
    ConsentError,
    DesignError,
    EstimationError,
    FormulaError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.kernels.mixed_effects import NEGATIVE_BINOMIAL
from fedstat.models.mixed.steps import shape_constant

FOLDER = Path(__file__).parents[2] / "reference" / "mixed"
R, DISPERSED = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("mixed", "dispersed"))
SLEEP, HERDS, PASTES = (pd.read_csv(FOLDER / f"{name}.csv") for name in ("sleepstudy", "cbpp", "pastes"))
HERDS["period"] = HERDS["period"].astype(str)
MEASURED = pd.read_csv(FOLDER / "visits.csv")
NB, GAMMA = sm.families.NegativeBinomial(alpha=1.0), sm.families.Gamma(sm.families.links.Log())
VISITS = fs.datasets.make_repeated(4, 12)
PERSONS = VISITS.assign(
    person=VISITS["hospital"] + VISITS["patient"].astype(str),
    days=np.random.default_rng(4).negative_binomial(2, VISITS["hospital"].map(len) / 14.0),
)
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")
SMALL = fs.Policy(min_count=2, min_events=0)
SINGLE = fs.Policy(min_count=2, min_events=0, min_level_count=1)
"""Sums that are not masked may single out groups."""

LINEAR = {
    "slopes": ("Reaction ~ Days + (1 + Days | Subject)", SLEEP),
    "unbalanced": ("Reaction ~ Days + (1 + Days | Subject)", SLEEP.iloc[25:]),
    "intercepts": ("Reaction ~ Days + (1 | Subject)", SLEEP),
    "independent": ("Reaction ~ Days + (1 + Days || Subject)", SLEEP),
    "weighted": ("Reaction ~ Days + (1 | Subject)", SLEEP),
    "nested": ("strength ~ x + (1 | cask) + (1 | batch)", PASTES),
    "sites": ("strength ~ x + (1 | cask) + (1 | plant)", PASTES),
}


def model_of(formula, table, by="site", policy=SMALL, **settings):
    partition = fs.ClientPartition.from_frame(table, by=by, policy=policy)
    return fs.FederatedMixed.from_formula(formula, partition, **settings)


def linear_model(case, reml, **settings):
    formula, table = LINEAR[case]
    weights = {"var_weights": "weight"} if case == "weighted" else {}
    by = "plant" if "plant" in table else "site"
    return model_of(formula, table, by, reml=reml, **weights, **settings)


@pytest.mark.parametrize("reml", [True, False])
@pytest.mark.parametrize("case", LINEAR)
def test_linear_mixed_models_are_those_of_lme4(case, reml):
    """lme4 minimizes without derivatives: its variances have about six digits, ours more."""
    expected = R["reml" if reml else "ml"][case]
    fit = linear_model(case, reml).fit()
    assert fit.converged and not fit.singular and fit.reml == reml
    assert_allclose(fit.llf, expected["llf"], rtol=1e-9)
    assert_allclose(fit.aic, expected["aic"], rtol=1e-9)
    assert_allclose(fit.params, expected["coef"], rtol=1e-6)
    assert_allclose(fit.bse, expected["se"], rtol=2e-6)
    found = [T[a, b] for T in fit._record.fit.matrices() for b in range(len(T)) for a in range(b, len(T))]
    assert_allclose([*found, fit.scale], expected["variances"], rtol=5e-5)
    assert_allclose(fit.df, expected["df"], rtol=2e-4)
    if reml and case != "weighted":  # pbkrtest takes all weights for one
        tests = fit.coefficient_tests("kenward-roger")
        assert_allclose(tests["df"], expected["kr_df"], rtol=1e-5)
        assert_allclose(tests["std_error"], expected["kr_se"], rtol=1e-5)
    rows = LINEAR[case][1]
    predicted = fit.predict(rows, effects=fit.group_effects(rows))
    assert_allclose(predicted.iloc[:5], expected["conditional"], rtol=1e-5)
    assert_allclose(fit.predict(rows).iloc[:5], expected["fixed"], rtol=1e-6)


@pytest.mark.parametrize("nodes", [1, 9, 25])
@pytest.mark.parametrize("family", ["binomial", "poisson"])
def test_generalized_linear_mixed_models_are_those_of_lme4(family, nodes):
    expected = R[family][f"n{nodes}"]
    if family == "binomial":
        formula, distribution = "cbind(incidence, healthy) ~ period + (1 | herd)", sm.families.Binomial()
    else:
        formula = "incidence ~ period + offset(log(size)) + (1 | herd)"
        distribution = sm.families.Poisson()
    fit = model_of(formula, HERDS, family=distribution, nagq=nodes).fit()
    assert fit.converged
    assert_allclose(fit.params, expected["coef"], rtol=1e-5)
    assert_allclose(fit.bse, expected["se"], rtol=1e-4)
    assert_allclose(fit.variances["std_dev"], [expected["theta"]], rtol=1e-5)
    if nodes == 1:  # with more, lme4 leaves out constants
        assert_allclose(fit.llf, expected["llf"], rtol=1e-8)
        predicted = fit.predict(HERDS, effects=fit.group_effects(HERDS)).iloc[:5]
        assert_allclose(predicted, expected["conditional"], rtol=1e-4)
        assert_allclose(fit.predict(HERDS).iloc[:5], expected["fixed"], rtol=1e-5)


COUNTS, COSTS = "count ~ x + offset(log(time)) + ({} | patient)", "cost ~ x + ({} | patient)"


@pytest.mark.parametrize("effects", ["1", "1 + x"])
@pytest.mark.parametrize(("name", "formula", "family"), [("counts", COUNTS, NB), ("costs", COSTS, GAMMA)])
def test_models_with_a_dispersion_are_those_of_glmmtmb(name, formula, family, effects):
    """Its optimizer stops before ours: estimates have about four to six digits, the likelihood has all."""
    expected = DISPERSED[name if effects == "1" else f"{name}_slopes"]
    fit = model_of(formula.format(effects), MEASURED, family=family).fit()
    assert fit.converged and fit.iterations < 15
    assert_allclose(fit.llf, expected["llf"], rtol=1e-10)
    assert_allclose(fit.aic, 2.0 * (3 + fit._record.fit.effects.K) - 2.0 * expected["llf"], rtol=1e-10)
    assert_allclose(fit.params, expected["coef"], rtol=1e-4)
    assert_allclose(fit.bse, expected["se"], rtol=1e-5)
    assert_allclose(fit._record.fit.covariance, np.atleast_1d(expected["variances"]), rtol=5e-5)
    estimate, error = fit.dispersion
    assert_allclose([estimate, error / estimate], [expected["dispersion"], expected["log_error"]], rtol=1e-5)
    predicted = fit.predict(MEASURED, effects=fit.group_effects(MEASURED)).iloc[:5]
    assert_allclose(predicted, expected["conditional"], rtol=3e-5)
    assert f"{'Alpha' if family is NB else 'Scale'}: " in str(fit.summary())


def test_many_nodes_of_a_negative_binomial_model_are_those_of_lme4():
    fit = model_of(COUNTS.format("1"), MEASURED, family=NB, nagq=25).fit()
    expected = DISPERSED["known_alpha"]
    assert_allclose(fit.dispersion["estimate"], expected["alpha"], rtol=1e-6)
    assert_allclose(fit.params, expected["coef"], rtol=1e-6)
    assert_allclose(fit.variances["std_dev"], [expected["theta"]], rtol=1e-6)


@pytest.mark.parametrize(("formula", "family"), [(COUNTS, NB), (COSTS, GAMMA)])
def test_the_errors_account_for_the_dispersion(formula, family):
    """The information of all parameters, by numerical second derivatives of the pooled likelihood."""
    fit = model_of(formula.format("1"), MEASURED, family=family, nagq=9).fit()
    record = fit._record.fit
    x, w = np.polynomial.hermite_e.hermegauss(80)
    X = np.column_stack([np.ones(len(MEASURED)), MEASURED["x"]])
    offset = np.log(MEASURED["time"].to_numpy()) if family is NB else 0.0
    y = MEASURED["count" if family is NB else "cost"].to_numpy(float)[:, None]

    def llf(parameters):
        mean = np.exp((X @ parameters[:2] + offset)[:, None] + parameters[2] * x)
        k = np.exp(-parameters[3])
        if family is NB:
            log = stats.nbinom.logpmf(y, k, k / (k + mean))
        else:
            log = stats.gamma.logpdf(y, k, scale=mean / k)
        groups = pd.DataFrame(log).groupby(MEASURED["patient"].to_numpy()).sum().to_numpy()
        return np.log(np.exp(groups) @ w / w.sum()).sum()

    at = np.array([*record.params, record.theta[0], np.log(record.dispersion[0])])
    assert_allclose(llf(at), fit.llf, rtol=1e-6)
    assert_allclose(optimize.approx_fprime(at, llf, 1e-6), 0.0, atol=2e-3)
    h, steps = 1e-3, np.eye(4) * 1e-3
    hessian = [
        [
            (llf(at + a + b) - llf(at + a - b) - llf(at - a + b) + llf(at - a - b)) / (4.0 * h**2)
            for a in steps
        ]
        for b in steps
    ]
    cov = np.linalg.inv(-np.array(hessian))
    assert_allclose(fit.cov_params(), cov[:2, :2], rtol=1e-3)
    assert_allclose(record.dispersion[1] / record.dispersion[0], np.sqrt(cov[3, 3]), rtol=1e-3)
    # Taken as known, the dispersion would leave smaller errors.
    known = np.linalg.inv(-np.array(hessian)[:3, :3])
    assert (np.sqrt(np.diag(known)[:2]) < fit.bse).all()


@pytest.mark.parametrize(("formula", "family"), [(COUNTS, NB), (COSTS, GAMMA)])
def test_what_follows_a_fit_with_a_dispersion(formula, family, tmp_path):
    fit = model_of(formula.format("1"), MEASURED, family=family).fit()
    log = np.log1p(fit.dispersion["estimate"] + (1.0 / MEASURED["count"].mean() if family is NB else 0.0))
    variance = fit.variances["variance"].iloc[0]
    assert_allclose(fit.icc, [variance / (variance + log)], rtol=1e-8)
    # Means of a random intercept are exp(eta + variance / 2), so derivatives of their mean are those of it.
    record, X = fit._record.fit, np.column_stack([np.ones(len(MEASURED)), MEASURED["x"]])
    offset = np.log(MEASURED["time"]).to_numpy() if family is NB else 0.0

    def slope(at):
        return at[1] * np.exp(X @ at[:2] + offset + at[2] ** 2 / 2.0).mean()

    at, effect = np.array([*record.params, *record.theta, 0.0]), fit.get_margeff()
    gradient = optimize.approx_fprime(at, slope, 1e-7)
    assert_allclose(effect.margeff, [slope(at)], rtol=1e-6)
    assert_allclose(effect.margeff_se, [np.sqrt(gradient @ record.joint @ gradient)], rtol=1e-4)
    interval = fit.conf_int_variances()
    assert (interval["conf_low"] < interval["std_dev"]).all() and (
        interval["std_dev"] < interval["conf_high"]
    ).all()
    fit.save(tmp_path / "fit.fed")
    pd.testing.assert_series_equal(fs.load(tmp_path / "fit.fed").dispersion, fit.dispersion)


@pytest.mark.parametrize("shape", [0.3, 900.0, 1001.0, 1e6])
def test_the_constant_of_counts_is_a_sum_over_smaller_counts(shape):
    """log G(y + k) / G(k) k^y is the sum of log(1 + j / k), j < y."""
    y = np.array([0.0, 1.0, 7.0, 400.0])
    found, slope = shape_constant(NEGATIVE_BINOMIAL, shape, y)
    j = np.concatenate([np.arange(one) for one in y])
    assert found == pytest.approx(np.log1p(j / shape).sum(), rel=1e-9)
    assert slope.sum() == pytest.approx(-(j / (shape * (shape + j))).sum(), rel=1e-7)


def test_counts_without_overdispersion_are_refused():
    table = MEASURED.assign(count=np.random.default_rng(2).poisson(np.exp(0.5 + 0.3 * MEASURED["x"])))
    with pytest.raises(EstimationError, match=r"alpha goes to zero.*family Poisson"):
        model_of("count ~ x + (1 | patient)", table, family=NB).fit()


def test_binary_rows_give_the_estimate_of_their_counts():
    rows = HERDS.loc[HERDS.index.repeat(HERDS["size"])]
    ill = rows.groupby(level=0).cumcount() < rows["incidence"]
    table = rows.assign(ill=ill.astype(int)).reset_index(drop=True)
    fit = model_of("ill ~ period + (1 | herd)", table, family=sm.families.Binomial(), nagq=9).fit()
    assert_allclose(fit.params, R["binary"]["coef"], rtol=1e-5)
    assert_allclose(fit.params, R["binomial"]["n9"]["coef"], rtol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_one_site_equals_many(masked):
    formula = "score ~ month * arm + (1 + month | person)"
    many = model_of(formula, PERSONS, "hospital", SINGLE).fit(masked=masked)
    one = model_of(formula, PERSONS.assign(site="all"), "site", SINGLE).fit()
    assert_allclose(many.params, one.params, rtol=1e-7)
    assert_allclose(many.cov_params(), one.cov_params(), rtol=1e-6)
    assert_allclose(many.variances["variance"], one.variances["variance"], rtol=1e-6)
    assert_allclose([many.llf, *many.df], [one.llf, *one.df], rtol=1e-6)
    many = model_of(COSTS.format("1"), MEASURED, policy=SINGLE, family=GAMMA, nagq=5).fit(masked=masked)
    one = model_of(COSTS.format("1"), MEASURED.assign(site="all"), policy=SINGLE, family=GAMMA, nagq=5).fit()
    assert_allclose([*many.params, *many.dispersion], [*one.params, *one.dispersion], rtol=1e-7)


def test_the_estimate_is_that_of_statsmodels():
    fit = model_of("score ~ month + (1 + month | person)", PERSONS, "hospital", reml=False).fit()
    pooled = smf.mixedlm("score ~ month", PERSONS, groups="person", re_formula="~month").fit(reml=False)
    assert_allclose(fit.params, pooled.fe_params, rtol=1e-4)
    assert fit.llf >= pooled.llf - 1e-6
    assert_allclose(fit.llf, pooled.llf, rtol=1e-7)


def test_a_variance_of_zero_is_reported_at_the_top():
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"x": rng.normal(size=240), "g": np.arange(240) // 4, "site": np.arange(240) // 80})
    within = rng.normal(size=(60, 4))
    table["y"] = table["x"] + (within - within.mean(axis=1, keepdims=True)).ravel()
    table["site"] = "S" + table["site"].astype(str)
    fit = model_of("y ~ x + (1 | g)", table).fit()
    assert fit.converged and fit.singular == ("(1 | g)",)
    assert fit.variances.loc[("g", "Intercept"), "variance"] == 0.0
    pooled = sm.OLS(table["y"], sm.add_constant(table["x"])).fit()
    assert_allclose(fit.params, pooled.params, rtol=1e-8)
    assert_allclose(fit.scale, pooled.scale, rtol=1e-8)
    assert "Singular fit" in str(fit.summary())
    assert_allclose(fit.test_variances()["p_value"], [1.0], atol=0.51)
    assert "take the variances as known" not in str(fit.get_margeff().summary())
    table["z"] = np.tile([0, 1, 1, 0], 60)
    fit = model_of("z ~ x + (1 | g)", table, family=sm.families.Binomial()).fit()
    assert fit.singular and fit.variances["variance"].tolist() == [0.0]
    assert "errors take the variances as known" in str(fit.get_margeff().summary())


@pytest.mark.parametrize("seed", range(4))
def test_a_step_over_a_variance_of_zero_does_not_go_on_forever(seed):
    """From a ratio of one, the longest step ends at minus one, which is the same variance."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"x": rng.normal(size=720), "g": np.arange(720) // 3})
    table = table.assign(y=0.5 * table["x"] + rng.normal(size=720), site=np.where(table["g"] < 100, "A", "B"))
    fit = model_of("y ~ x + (1 | g)", table).fit()
    assert fit.converged and fit.iterations < 12
    pooled = smf.mixedlm("y ~ x", table, groups="g").fit()
    assert fit.llf >= pooled.llf - 1e-7
    assert fit.variances["variance"].iloc[0] < 0.2


def test_variances_are_tested_by_likelihood_ratio():
    model = model_of("score ~ month + (1 + month | person)", PERSONS, "hospital", reml=False)
    fit, without = (
        model.fit(),
        model_of("score ~ month + (1 | person)", PERSONS, "hospital", reml=False).fit(),
    )
    tests = fit.test_variances()
    assert_allclose(tests.loc[("person", "month"), "statistic"], 2.0 * (fit.llf - without.llf), rtol=1e-5)
    ols = smf.ols("score ~ month", PERSONS).fit()
    alone = without.test_variances()
    assert_allclose(alone["statistic"], [2.0 * (without.llf - ols.llf)], rtol=1e-7)
    with pytest.raises(ModelError, match="random effects differ"):
        fit.compare_lr_test(without)
    smaller = model_of("score ~ 1 + (1 | person)", PERSONS, "hospital", reml=False).fit()
    statistic, p, df = without.compare_lr_test(smaller)
    assert df == 1 and p < 1e-6 and statistic == pytest.approx(2.0 * (without.llf - smaller.llf))
    reml = model_of("score ~ month + (1 | person)", PERSONS, "hospital").fit()
    with pytest.raises(ModelError, match="reml=False"):
        reml.compare_lr_test(smaller)


def test_shares_of_variance_are_those_of_the_variances():
    fit = model_of("score ~ month + (1 | person)", PERSONS, "hospital").fit()
    between, within = fit.variances["variance"]
    assert_allclose(fit.icc["person"], between / (between + within))
    fixed = np.var(fit.predict(PERSONS), ddof=1)
    total = fixed + between + within
    assert_allclose(fit.r_squared(), [fixed / total, (fixed + between) / total], rtol=1e-8)


@pytest.mark.parametrize(
    ("formula", "family"),
    [
        ("score ~ month + (1 | person) + (1 | hospital)", None),
        ("score ~ month + (1 + month || hospital)", None),
        ("relapse ~ month + (1 | hospital)", sm.families.Poisson()),
        ("score ~ month + (1 | hospital)", GAMMA),
        ("days ~ month + (1 | hospital)", NB),
    ],
)
@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_effects_of_sites_are_those_of_the_pooled_rows(formula, family):
    """Each site releases its own, also where sums are masked, and where rows lack values."""
    table = PERSONS.assign(month=PERSONS["month"].mask(PERSONS.index == 5))
    fit = model_of(formula, table, "hospital", SINGLE, family=family).fit()
    effects = fit.site_effects().set_index(["site", "effect"])
    own = (
        fit.group_effects(table.dropna(subset="month"))
        .query("group == 'hospital'")
        .set_index(["label", "effect"])
    )
    assert_allclose(effects["estimate"], own["estimate"][effects.index], rtol=1e-6, atol=1e-8)
    # Effects whose variance is zero are known to be zero.
    varies = fit.variances.loc["hospital", "std_dev"][effects.index.get_level_values("effect")]
    assert ((effects["std_error"] > 0.0).to_numpy() == (varies > 0.0).to_numpy()).all() and varies.iloc[
        0
    ] > 0.0
    assert len(fit.plot_site_effects().get_yticks()) == len(fit.model.partition.sites)


def test_errors_of_site_effects_are_those_of_the_joint_normal_distribution():
    fit = model_of("score ~ month + (1 | person) + (1 | hospital)", PERSONS, "hospital", SINGLE).fit()
    site = PERSONS.query("hospital == 'Bonn'")
    people = (site["person"].to_numpy()[:, None] == site["person"].to_numpy()).astype(float)
    patient, hospital, residual = fit.variances["variance"]
    V = hospital + patient * people + residual * np.eye(len(site))
    variance = hospital - hospital**2 * np.linalg.solve(V, np.ones(len(site))).sum()
    found = fit.site_effects().set_index("site").loc["Bonn", "std_error"]
    assert found == pytest.approx(np.sqrt(variance), rel=1e-8)
    with pytest.raises(NotAvailableError, match=r"such as \(1 \| hospital\)"):
        model_of("score ~ month + (1 | person)", PERSONS, "hospital").fit().site_effects()


@pytest.mark.parametrize("case", ["slopes", "intercepts"])
def test_profile_intervals_are_those_of_lme4(case):
    found = linear_model(case, False).fit().conf_int_variances(method="profile")
    assert_allclose(found[["conf_low", "conf_high"]], R["profile"][case], rtol=5e-5)


def test_profile_intervals_of_a_binomial_model_are_those_of_lme4():
    """lme4 interpolates its profile, and minimizes without derivatives."""
    formula = "cbind(incidence, healthy) ~ period + (1 | herd)"
    found = model_of(formula, HERDS, family=sm.families.Binomial()).fit().conf_int_variances()
    assert_allclose(found[["conf_low", "conf_high"]], R["profile"]["binomial"], rtol=2e-4)


def test_an_interval_may_begin_at_zero():
    """Its upper end is where the exact profile of a balanced layout is the quantile above the minimum."""
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"y": rng.normal(size=120), "g": np.arange(120) // 4, "site": np.arange(120) // 40})
    table["site"] = "S" + table["site"].astype(str)
    fit = model_of("y ~ 1 + (1 | g)", table, reml=False).fit()
    low, high = fit.conf_int_variances(method="profile").loc[("g", "Intercept"), ["conf_low", "conf_high"]]
    means = table.groupby("g")["y"].mean()
    within = ((table["y"] - table["g"].map(means)) ** 2).sum()
    between = 4.0 * ((means - means.mean()) ** 2).sum()

    def deviance(variance):
        def at(s):
            return 90 * np.log(s) + within / s + 30 * np.log(s + 4 * variance) + between / (s + 4 * variance)

        return optimize.minimize_scalar(at, bounds=(0.1, 5.0), method="bounded", options={"xatol": 1e-10}).fun

    least = optimize.minimize_scalar(deviance, bounds=(0.0, 1.0), method="bounded").fun
    assert low == 0.0
    assert deviance(high**2) - min(least, deviance(0.0)) == pytest.approx(stats.chi2.isf(0.05, 1), abs=1e-4)


@pytest.mark.parametrize("effects", ["1", "1 + month"])
def test_marginal_effects_are_averages_over_rows_and_random_effects(effects):
    """By simulation of the random effects, and by numerical derivatives in all parameters."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"month": rng.normal(1.0, 1.0, 600), "patient": np.arange(600) // 10})
    eta = np.repeat(rng.normal(size=(60, 2)), 10, axis=0)
    probability = 1.0 / (1.0 + np.exp(-eta[:, 0] - (0.5 + eta[:, 1]) * table["month"]))
    table = table.assign(relapse=(rng.random(600) < probability).astype(int), site=table["patient"] % 3)
    table["site"] = "S" + table["site"].astype(str)
    formula = f"relapse ~ month + ({effects} | patient)"
    fit = model_of(formula, table, family=sm.families.Binomial()).fit()
    record, X = fit._record.fit, np.column_stack([np.ones(len(table)), table["month"]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(90)

    def mean(parameters, X):
        beta, theta = parameters[:2], parameters[2:]
        L = record.effects.factors_in_units(theta)[0]
        eta = X @ beta + np.linalg.norm(X[:, : len(L)] @ L, axis=-1) * nodes[:, None]
        return (weights @ (1.0 / (1.0 + np.exp(-eta)))).mean() / weights.sum()

    def effect(parameters):
        step = np.array([0.0, 1e-4])
        return (mean(parameters, X + step) - mean(parameters, X - step)) / 2e-4

    at = np.append(record.params, record.theta)
    slope = optimize.approx_fprime(at, effect, 1e-5)
    found = fit.get_margeff()
    assert_allclose(found.margeff, [effect(at)], rtol=1e-4)
    assert_allclose(found.margeff_se, [np.sqrt(slope @ record.joint @ slope)], rtol=1e-3)
    if effects != "1":  # at one row of the design the variance of the predictor does not follow from it
        with pytest.raises(NotAvailableError, match="at='overall'"):
            fit.get_margeff(at="mean")
        return
    X = X.mean(axis=0, keepdims=True)
    found = fit.get_margeff(at="mean")
    slope = optimize.approx_fprime(at, effect, 1e-5)
    assert_allclose(found.margeff, [effect(at)], rtol=1e-4)
    assert_allclose(found.margeff_se, [np.sqrt(slope @ record.joint @ slope)], rtol=1e-3)


def test_marginal_effects_of_a_linear_model_are_its_coefficients():
    fit = model_of("score ~ month + (1 | person)", PERSONS, "hospital").fit()
    found = fit.get_margeff()
    assert_allclose(found.margeff, fit.params[1:])
    assert_allclose(found.conf_int(), fit.conf_int()[1:])


def test_results_are_saved_and_read(tmp_path):
    fit = model_of("score ~ month + (1 + month | patient)", VISITS, "hospital").fit()
    fit.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    pd.testing.assert_frame_equal(again.variances, fit.variances)
    assert_allclose(again.df, fit.df, rtol=0)
    assert_allclose(again.conf_int(), fit.conf_int(), rtol=0)
    pd.testing.assert_frame_equal(again.conf_int_variances(), fit.conf_int_variances())
    for method in (again.test_variances, partial(again.conf_int_variances, method="profile")):
        with pytest.raises(NotAvailableError, match="read from a file"):
            method()


@pytest.mark.parametrize(
    ("formula", "settings", "error", "match"),
    [
        ("score ~ month", {}, FormulaError, "needs a random effect"),
        ("score ~ month + (1 | patient)", {"nagq": 9}, ModelError, "no quadrature"),
        ("relapse ~ month + (1 | patient)", {"family": sm.families.Binomial(), "nagq": 26}, ModelError, "25"),
        (
            "relapse ~ month + (1 | patient)",
            {"family": sm.families.Binomial(), "nagq": 0},
            ModelError,
            "nagq",
        ),
        (
            "relapse ~ month + (1 + month | patient)",
            {"family": sm.families.Binomial(), "nagq": 2},
            ModelError,
            "single random intercept",
        ),
        (
            "relapse ~ month + (1 | patient) + (1 | hospital)",
            {"family": sm.families.Binomial()},
            ModelError,
            "closed form.* a dimension for each group",
        ),
        (
            "score ~ month + (1 | patient)",
            {"family": sm.families.Gamma()},
            ModelError,
            r"takes .*Gamma\(link=Log\).*received Gamma\(link=InversePower\)",
        ),
        (
            "relapse ~ month + (1 | patient)",
            {"family": sm.families.Poisson(), "reml": True},
            ModelError,
            "reml",
        ),
    ],
)
def test_models_that_do_not_exist_are_refused(formula, settings, error, match):
    with pytest.raises(error, match=match):
        model_of(formula, VISITS, "hospital", **settings)


def test_crossed_and_useless_groups_are_refused():
    table = VISITS.assign(doctor=np.arange(len(VISITS)) % 7, row=np.arange(len(VISITS)))
    with pytest.raises(DesignError, match=r"groups of 'patient' are in several groups of 'doctor'"):
        model_of("score ~ month + (1 | patient) + (1 | doctor)", table, "hospital").fit()
    with pytest.raises(EstimationError, match="one row in each group: its variance cannot be estimated"):
        model_of("score ~ month + (1 | row)", table, "hospital").fit()
    with pytest.raises(EstimationError, match="collinear"):
        model_of(
            "score ~ month + twice + (1 | patient)", table.assign(twice=2 * table["month"]), "hospital"
        ).fit()


@pytest.mark.parametrize(("patients", "refused"), [(4, True), (5, False)])
def test_a_site_needs_enough_groups(patients, refused):
    policy = fs.Policy(min_count=5)
    few = VISITS[(VISITS["hospital"] != "Bonn") | (VISITS["patient"] <= patients)]
    model = model_of("score ~ month + (1 | patient)", few, "hospital", policy)
    if refused:
        with pytest.raises(PolicyError, match=r"Bonn.*at least 5 clusters by 'patient'"):
            model.fit()
    else:
        assert model.fit().converged


def test_strict_sites_answer():
    table = fs.datasets.make_repeated(4, 40, dropout=0.0, seed=1)
    policy = fs.Policy.strict(approval="auto", formulas="any")
    formula = "score ~ month + (1 | patient) + (1 | hospital)"
    fit = model_of(formula, table, "hospital", policy).fit()
    open_fit = model_of(formula, table, "hospital").fit()
    assert_allclose(fit.params, open_fit.params, rtol=1e-10)
    assert len(fit.conf_int_variances()) == 3
    relapses = model_of(
        "relapse ~ month + (1 | patient)", table, "hospital", policy, family=sm.families.Binomial()
    )
    assert len(relapses.fit().get_margeff().margeff) == 1
    table["days"] = np.random.default_rng(4).negative_binomial(2, 0.3, len(table))
    for response, family in (("score", GAMMA), ("days", NB)):
        model = model_of(f"{response} ~ month + (1 | patient)", table, "hospital", policy, family=family)
        assert model.fit().dispersion["std_error"] > 0.0


def test_owners_approve_the_fit_and_what_follows():
    model = model_of(
        "score ~ month + (1 | person) + (1 | hospital)", PERSONS, "hospital", fs.Policy(approval="owner")
    )

    def approved(call):
        with pytest.raises(ConsentError, match="pending"):
            call()
        for site in model.partition.sites.values():
            for digest in list(site.pending):
                site.approve(digest)
        return call()

    fit = approved(model.fit)
    assert len(approved(fit.test_variances)) == 2


def test_fits_are_compared_and_pooled():
    small, large = (
        model_of(f"score ~ {terms} + (1 | person)", PERSONS, "hospital", reml=False).fit()
        for terms in ("month", "month + arm")
    )
    table = fs.compare({"small": small, "large": large})
    assert "arm[T.treated]" in str(table)
    pooled = fs.pool([large, large])
    assert_allclose(pooled.params, large.params)
    assert_allclose(pooled.bse, large.bse)


@pytest.mark.parametrize(("groups", "said"), [(4, True), (7, True), (8, False)])
def test_normal_intervals_with_few_groups_are_announced_at_the_top(groups, said):
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(groups), 24)
    x = rng.normal(size=len(group))
    y = (rng.random(len(group)) < 1.0 / (1.0 + np.exp(-x - rng.normal(size=groups)[group]))).astype(float)
    table = pd.DataFrame({"y": y, "x": x, "group": group, "site": group % 2})
    policy = fs.Policy(min_events=0, min_level_count=1, min_count=1)
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    model = fs.FederatedMixed.from_formula("y ~ x + (1 | group)", partition, family=sm.families.Binomial())
    text = model.fit().summary().as_text()
    assert text.startswith("*** INTERVALS MAY BE TOO NARROW") == said
