"""Agreement of sites: statsmodels on raw local estimates, pooled score tests, refits without a site."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects
from statsmodels.stats.multitest import multipletests

import fedstat as fs
from fedstat.errors import EstimationError, ModelError
from fedstat.inference.heterogeneity import heterogeneity as compare_sites
from fedstat.inference.meta_analysis import RandomEffectsOptions, combine_sites
from fedstat.inference.plots import plot_forest

heterogeneity = partial(compare_sites, sources=())

NAMES = ("Intercept", "age", "sex[T.male]", "$dose_")
SITES = {"Basel": (300, 0.0), "Bern": (260, 0.2), "Genève": (190, 1.1), "Zürich": (240, -0.7)}
FAMILIES = {"linear": sm.families.Gaussian(), "logistic": sm.families.Binomial()}


@dataclass
class Fit:
    site: str
    n: int
    beta: np.ndarray | None
    cov: np.ndarray | None
    problem: str
    score: np.ndarray
    information: np.ndarray
    own: object = None


def tables(family, seed=3):
    """Rows of each site; the last coefficient shifts from site to site."""
    rng = np.random.default_rng(seed)
    for site, (n, shift) in SITES.items():
        X = np.column_stack([np.ones(n), rng.normal(5, 1, n), rng.integers(0, 2, n), rng.normal(size=n)])
        eta = X @ [-2.0, 0.3, 0.4, 0.8 + shift]
        y = (
            rng.normal(eta)
            if family is FAMILIES["linear"]
            else rng.binomial(1, family.fitted(eta)).astype(float)
        )
        yield site, X, y


def at(beta, family, X, y):
    """Score and information of some rows, for dispersion one; canonical links."""
    mu = family.fitted(X @ beta)
    return X.T @ (y - mu), (X * family.variance(mu)[:, None]).T @ X


def local(site, X, y, family, beta):
    """Releases of a site: nan for a constant column, and for the intercept unless that is zero."""
    p = X.shape[1]
    varies = np.ptp(X, axis=0) > 0
    varies[0] = True
    own = sm.GLM(y, X[:, varies], family=family).fit(tol=1e-13)
    b, V = np.full(p, np.nan), np.full((p, p), np.nan)
    b[varies], V[np.ix_(varies, varies)] = own.params, own.cov_params()
    if (X[0, ~varies] != 0).any():
        b[0], V[0], V[:, 0] = np.nan, np.nan, np.nan
    return Fit(site, len(y), b, V, "", *at(beta, family, X, y))


def stacked(data):
    return np.vstack([X for _, X, _ in data]), np.concatenate([y for _, _, y in data])


def compared(data, family, names=NAMES, **changes):
    X, y = stacked(data)
    pooled = sm.GLM(y, X, family=family).fit(tol=1e-13)
    fits = [local(site, X_k, y_k, family, pooled.params) for site, X_k, y_k in data]
    return pooled, fits, heterogeneity(names, pooled.params, pooled.scale, fits, **changes)


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def case(request):
    family = FAMILIES[request.param]
    data = list(tables(family))
    return data, family, *compared(data, family)


@pytest.fixture(scope="module")
def logistic():
    family = FAMILIES["logistic"]
    data = list(tables(family))
    return data, family, *compared(data, family)


# -- one coefficient over sites ----------------------------------------------------------------------


def test_random_effects_equal_statsmodels(case):
    *_, fits, result = case
    random, table = result.random_effects("DL", "z"), result.to_frame()
    assert (table["Q"] > table["df"]).sum() >= 1
    for j, name in enumerate(NAMES):
        b, v = np.array([[fit.beta[j], fit.cov[j, j]] for fit in fits]).T
        with np.errstate(invalid="ignore"):
            theirs = combine_effects(b, v, method_re="dl")
        assert_allclose(table.loc[name, "Q"], theirs.q, rtol=1e-9)
        assert_allclose(table.loc[name, "I2"], max(theirs.i2, 0.0), rtol=1e-9)
        assert_allclose(random.loc[name, "tau2"], max(theirs.tau2, 0.0), rtol=1e-9)
        assert_allclose(table.loc[name, "p_value"], stats.chi2.sf(theirs.q, 3), rtol=1e-9)
        if theirs.tau2 > 0:  # statsmodels goes on with a negative variance
            assert_allclose(random.loc[name, "estimate"], theirs.mean_effect_re, rtol=1e-10)
            assert_allclose(random.loc[name, "std_error"], theirs.sd_eff_w_re, rtol=1e-10)
            interval = random.loc[name, ["conf_low", "conf_high"]].astype(float)
            assert_allclose(interval, theirs.conf_int(use_t=False)[1], rtol=1e-9)


def test_choices_are_checked(logistic):
    with pytest.raises(ModelError, match=r"expected test to be one of 'adhoc', 'knha', 'z', received 't'"):
        logistic[-1].random_effects(test="t")


# -- the joint test ----------------------------------------------------------------------------------


def test_joint_test_of_the_linear_model_is_chows():
    data = list(tables(FAMILIES["linear"]))
    pooled, _, result = compared(data, FAMILIES["linear"])
    apart = sum(sm.OLS(y, X).fit().ssr for _, X, y in data)
    expected = (sm.OLS(*stacked(data)[::-1]).fit().ssr - apart) / pooled.scale
    assert result.joint.df == 12
    assert_allclose(result.joint.statistic, expected, rtol=1e-9)
    assert_allclose(result.joint.pvalue, stats.chi2.sf(expected, 12), rtol=1e-7)


def test_joint_test_of_the_logistic_model_is_the_score_test_of_all_interactions(logistic):
    data, _, pooled, _, result = logistic
    site = np.repeat(np.arange(4), [len(y) for _, _, y in data])
    X, _ = stacked(data)
    interactions = np.hstack([X * (site == k)[:, None] for k in (1, 2, 3)])
    statistic, p, _ = pooled.model.score_test(pooled.params, exog_extra=interactions)
    assert_allclose(result.joint.statistic, np.squeeze(statistic), rtol=1e-7)
    assert_allclose(result.joint.pvalue, np.squeeze(p), rtol=1e-5)
    assert result.joint.df == 12


def blind(data):
    """Bern has women only, and each site but the first has a column of its own, which is constant there."""
    sizes = [len(y) for _, _, y in data]
    site = np.repeat(np.arange(4), sizes)
    for k, (name, X, y) in enumerate(data):
        X = X.copy()
        X[:, 2] *= name != "Bern"
        own = np.eye(4)[site[site == k]][:, 1:]
        yield name, np.hstack([X, own]), y


def test_degrees_of_freedom_count_what_each_site_sees(case):
    data, family, *_ = case
    data = list(blind(data))
    names = (*NAMES, *(f"C(site)[T.{site}]" for site in list(SITES)[1:]))
    pooled, fits, result = compared(data, family, names)
    ranks = sum(np.linalg.matrix_rank(X) for _, X, _ in data)
    assert result.joint.df == ranks - len(names) == 4 + 3 + 4 + 4 - 7
    projections = sum(fit.score @ np.linalg.pinv(fit.information) @ fit.score for fit in fits)
    assert_allclose(result.joint.statistic, projections / pooled.scale, rtol=1e-7)
    table = result.to_frame()
    assert dict(table["sites"]) == dict(zip(names, [1, 4, 3, 4, 0, 0, 0], strict=True))
    assert dict(table["df"]) == dict(zip(names, [0, 3, 2, 3, 0, 0, 0], strict=True))
    assert np.isnan(table.loc[["Intercept", *names[4:]], "Q"]).all()
    text = " ".join(result.summary().as_text().split())
    assert "over the sites that determine it: sex[T.male] (not at Bern)." in text
    assert f"fewer than two sites: Intercept, {', '.join(names[4:])}." in text


def test_units_do_not_matter(case):
    data, family, *_, result = case
    T = np.array([[1.0, 2015.0, 0, 0], [0, 3.0, 0, 0], [0, 0, 1e5, 0], [0, 0, 0, 1e-6]])
    _, _, other = compared([(site, X @ T, y) for site, X, y in data], family)
    assert other.joint.df == result.joint.df
    assert_allclose(other.joint.statistic, result.joint.statistic, rtol=1e-5)
    assert_allclose(other.change.iloc[:, 1:], result.change.iloc[:, 1:], atol=1e-5)


def test_a_fit_that_stopped_before_its_maximum_is_allowed_for():
    """In the linear model scores at any point are sufficient: test and refits do not depend on the point."""
    family, beta = FAMILIES["linear"], np.array([-1.5, 0.2, 0.5, 1.0])
    data = list(tables(family))
    pooled, _, result = compared(data, family)
    fits = [local(site, X, y, family, beta) for site, X, y in data]
    early = heterogeneity(NAMES, beta, pooled.scale, fits)
    assert_allclose(early.joint.statistic, result.joint.statistic, rtol=1e-8)
    assert_allclose(early.left_out, result.left_out, rtol=1e-8)


# -- without a site ----------------------------------------------------------------------------------


def test_leaving_a_site_out_is_a_refit_of_the_linear_model():
    data = list(tables(FAMILIES["linear"]))
    pooled, _, result = compared(data, FAMILIES["linear"])
    for k, (site, _, _) in enumerate(data):
        X, y = stacked(data[:k] + data[k + 1 :])
        refit = sm.OLS(y, X).fit().params
        assert_allclose(result.left_out.loc[site], refit, rtol=1e-8)
        change = result.influence().loc[site, "change"]
        assert_allclose(change, (refit - pooled.params) / pooled.bse, rtol=1e-6, atol=1e-9)


def test_leaving_a_site_out_is_one_newton_step(logistic):
    data, family, pooled, fits, result = logistic
    total = sum(fit.information for fit in fits)
    for k, fit in enumerate(fits):
        step = np.linalg.solve(total - fit.information, fit.score)
        assert_allclose(result.left_out.loc[fit.site], pooled.params - step, rtol=1e-8)
        X, y = stacked(data[:k] + data[k + 1 :])
        refit = sm.GLM(y, X, family=family).fit()
        error = np.abs((result.left_out.loc[fit.site] - refit.params) / pooled.bse)
        assert error.max() < 0.15 * np.abs(result.change.loc[fit.site]).max()


def test_what_the_other_sites_do_not_determine_is_nan(case):
    data, family, *_ = case
    names = (*NAMES, *(f"C(site)[T.{site}]" for site in list(SITES)[1:]))
    *_, result = compared(list(blind(data)), family, names)
    lost = result.left_out.isna()
    assert list(lost.columns[lost.loc["Bern"]]) == ["C(site)[T.Bern]"]
    assert list(lost.columns[lost.loc["Basel"]]) == ["Intercept", *names[4:]]
    X, y = stacked([row for row in blind(data) if row[0] != "Basel"])
    if family is FAMILIES["linear"]:
        refit = sm.OLS(y, np.delete(X, 0, axis=1)).fit().params[:3]
        assert_allclose(result.left_out.loc["Basel", list(NAMES[1:])], refit, rtol=1e-8)


# -- statements --------------------------------------------------------------------------------------


def test_flags_are_large_i2_that_survives_holm(case):
    *_, result = case
    table = result.to_frame()
    holm = multipletests(table["p_value"], method="holm")[1]
    assert_allclose(table["p_holm"], holm)
    assert result.flagged == tuple(table.index[(table["I2"] > 0.5) & (holm < 0.05)]) == ("$dose_",)
    words = " ".join(result.summary().as_text().split())
    assert "The sites differ in: $dose_ (I2" in words
    assert "t quantiles with 3 degrees of freedom" in words


def test_sites_that_agree_are_not_said_to_be_equal():
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(200), rng.normal(size=200)])
    data = [(site, X, X @ [1.0, 2.0] + rng.normal(size=200)) for site in SITES]
    *_, result = compared(data, FAMILIES["linear"], ("Intercept", "x"))
    assert result.flagged == ()
    assert "does not show that they agree" in " ".join(result.summary().as_text().split())


def test_a_site_without_its_own_fit_enters_the_score_test_only(logistic):
    _, _, pooled, fits, result = logistic
    without = replace(fits[2], beta=None, cov=None, problem="the outcomes are separated by 'age'")
    other = heterogeneity(NAMES, pooled.params, 1.0, [*fits[:2], without, fits[3]])
    assert other.joint == result.joint
    assert_allclose(other.left_out, result.left_out)
    assert set(other.to_frame()["df"]) == {2}
    text = " ".join(other.summary().as_text().split())
    assert "No own estimates: Genève." in text
    assert "separated" in text


def test_no_own_fits_leave_the_score_test(logistic):
    _, _, pooled, fits, result = logistic
    bare = [replace(fit, beta=None, cov=None, problem="not requested") for fit in fits]
    other = heterogeneity(NAMES, pooled.params, 1.0, bare)
    assert other.joint == result.joint
    assert other.to_frame()["Q"].isna().all()
    assert "The sites differ (score test)" in " ".join(other.summary().as_text().split())


def test_an_estimate_without_a_variance_is_none(logistic):
    _, _, pooled, fits, _ = logistic
    exact = replace(fits[0], cov=np.diag([0.1, 0.0, np.nan, 0.1]))
    other = heterogeneity(NAMES, pooled.params, 1.0, [exact, *fits[1:]])
    assert list(other.to_frame()["df"]) == [3, 2, 2, 3]
    assert np.isfinite(other.to_frame()["Q"]).all()


def test_one_site_has_nothing_to_compare(logistic):
    data, family, *_ = logistic
    *_, result = compared(data[:1], family)
    assert (result.joint.df, result.to_frame()["df"].max()) == (0, 0)
    assert np.isnan(result.joint.pvalue)
    assert result.left_out.isna().all(axis=None)
    assert "not determined" in result.summary().as_text()


def test_every_rendering_of_the_summary(logistic):
    summary = logistic[-1].summary()
    assert max(map(len, summary.as_text().splitlines())) <= 98
    assert "Zürich" in summary.as_html()
    assert r"\$dose\_" in summary.as_latex()
    assert summary.as_csv().count("Genève") == 1


def test_wrong_shapes_name_the_site(logistic):
    _, _, pooled, fits, _ = logistic
    wrong = replace(fits[1], information=np.eye(3))
    with pytest.raises(EstimationError, match=r"of site 'Bern', received information of shape"):
        heterogeneity(NAMES, pooled.params, 1.0, [fits[0], wrong])
    flat = [replace(fit, information=np.zeros((4, 4))) for fit in fits]
    with pytest.raises(EstimationError, match="sum to a positive definite matrix"):
        heterogeneity(NAMES, pooled.params, 1.0, flat)
    with pytest.raises(ModelError, match="one site or more"):
        heterogeneity(NAMES, pooled.params, 1.0, [])


# -- the forest plot ---------------------------------------------------------------------------------


@pytest.fixture
def plt():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")


def test_forest_shows_each_site_by_its_weight(logistic, plt):
    *_, fits, result = logistic
    ax = result.plot_forest("$dose_")
    ax.figure.canvas.draw()
    boxes = ax.collections[1]
    b, v = np.array([[fit.beta[3], fit.cov[3, 3]] for fit in fits]).T
    assert_allclose(boxes.get_offsets()[:, 0], b)
    assert_allclose(boxes.get_sizes() / boxes.get_sizes().max(), v.min() / v)
    ends = np.array([path.vertices[:, 0] for path in ax.collections[0].get_paths()])
    assert_allclose(ends, b[:, None] + 1.959964 * np.sqrt(v)[:, None] * [-1, 1], rtol=1e-6)
    common, random = (patch.get_xy()[:, 0] for patch in ax.patches)
    assert_allclose([common.min(), common.max()], logistic[2].conf_int()[3])
    assert_allclose([random.min(), random.max()], result.random_effects().iloc[3, 2:4].astype(float))
    assert f"I² = {100 * result.table.loc['$dose_', 'I2']:.0f} %" in ax.texts[-1].get_text()


def test_a_forest_of_ratios_stands_around_one(logistic, plt):
    *_, fits, result = logistic
    ax = result.plot_forest("$dose_", exponentiate=True, effect="odds ratio of y")
    ax.figure.canvas.draw()
    b, v = np.array([[fit.beta[3], fit.cov[3, 3]] for fit in fits]).T
    assert_allclose(ax.collections[1].get_offsets()[:, 0], np.exp(b))
    ends = np.array([path.vertices[:, 0] for path in ax.collections[0].get_paths()])
    assert_allclose(ends, np.exp(b[:, None] + 1.959964 * np.sqrt(v)[:, None] * [-1, 1]), rtol=1e-6)
    common = ax.patches[0].get_xy()[:, 0]
    assert_allclose([common.min(), common.max()], np.exp(logistic[2].conf_int()[3]))
    assert ax.get_xscale() == "log" and ax.get_xlabel() == "odds ratio of y, with 95 % interval"
    assert [label.get_text() for label in ax.get_xticklabels()] == [f"{tick:.3g}" for tick in ax.get_xticks()]
    low, high = ax.get_xlim()
    at_one = [line for line in ax.lines if list(line.get_xdata()) == [1.0, 1.0]]
    assert len(at_one) == (low <= 1.0 <= high)
    assert (1.0 in ax.get_xticks()) == (low <= 1.0 <= high)


def test_a_forest_in_units_that_the_user_names(logistic, plt):
    result = logistic[-1]
    one, ten = (result.plot_forest("$dose_", unit=unit) for unit in (1.0, 10.0))
    for which in (0, 1):  # the two diamonds
        assert_allclose(ten.patches[which].get_xy()[:, 0], 10.0 * one.patches[which].get_xy()[:, 0])
    assert_allclose(ten.collections[1].get_offsets()[:, 0], 10.0 * one.collections[1].get_offsets()[:, 0])
    assert ten.get_xlabel() == "coefficient per 10 units, with 95 % interval"
    assert result.table.equals(logistic[-1].table)
    with pytest.raises(ModelError, match="positive number"):
        result.plot_forest("$dose_", unit=0.0)


def test_narrow_ratios_have_digits_that_show_their_interval(logistic, plt):
    rows = pd.DataFrame({"estimate": [0.02, 0.021], "std_error": [0.0004, 0.0008], "problem": ["", ""]})
    ax = plot_forest(rows.set_axis(["a", "b"]), logistic[-1].table.loc["$dose_"], exponentiate=True)
    shown = [label.get_text() for label in ax.child_axes[0].get_yticklabels()]
    assert shown[0].replace("[ ", "[") == "1.0202 [1.0194, 1.0210]"


def test_ratios_near_zero_are_not_written_as_zero(logistic, plt):
    rows = pd.DataFrame({"estimate": [-4.0, 2.0], "std_error": [0.5, 2.0], "problem": ["", ""]}, ["a", "b"])
    ax = plot_forest(rows, logistic[-1].table.loc["$dose_"], exponentiate=True)
    shown = [label.get_text().split() for label in ax.child_axes[0].get_yticklabels()]
    assert shown[0][0] == "0.0183" and shown[1][0] == "7.39"


def test_forest_says_why_a_site_has_no_row(logistic, plt):
    _, _, pooled, fits, _ = logistic
    bare = replace(fits[0], beta=None, cov=None, problem="fewer rows than columns")
    _, ax = plt.subplots()
    result = heterogeneity(NAMES, pooled.params, 1.0, [bare, *fits[1:]])
    assert result.plot_forest("age", ax) is ax
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.texts[:-1]] == ["fewer rows than columns"]
    assert [label.get_text() for label in ax.get_yticklabels()][:4] == list(SITES)


def test_forest_of_a_coefficient_of_no_site_or_an_unknown_one(logistic, plt):
    _, _, pooled, fits, result = logistic
    bare = [replace(fit, beta=None, cov=None) for fit in fits]
    ax = heterogeneity(NAMES, pooled.params, 1.0, bare).plot_forest("age")
    ax.figure.canvas.draw()
    assert "fewer than two sites" in ax.texts[-1].get_text()
    with pytest.raises(
        ModelError, match=r"'sex\[T.female\]' is not a coefficient; did you mean sex\[T.male\]"
    ):
        result.plot_forest("sex[T.female]")


def test_where_joint_and_single_tests_disagree_the_one_to_report_is_reported(case, monkeypatch):
    *_, result = case
    names = tuple(result.table.index[:1])
    for p, flagged, expected in (
        (
            0.001,
            (),
            "report the joint test of all coefficients, because single ones are corrected for their number",
        ),
        (0.5, names, "does not show it (P 0.500): report the joint test if the question was whether"),
    ):
        monkeypatch.setattr(type(result), "flagged", flagged)
        other = replace(result, joint=result.joint._replace(pvalue=p), sources=())
        assert expected in " ".join(other.summary().as_text().split())
    agreeing = replace(result, joint=result.joint._replace(pvalue=0.001), sources=())
    assert "report the joint" not in " ".join(agreeing.summary().as_text().split())


def test_where_two_estimators_of_the_variance_part_both_are_reported():
    """By restricted likelihood sites do not vary here, by moments they do."""
    b, v = np.array([0.19, 0.37, -0.58, 1.52]), np.array([0.05, 0.05, 0.2, 1.0])
    found, moments = combine_sites(b, v), combine_sites(b, v, how=RandomEffectsOptions("DL"))
    assert found.tau2 == 0.0 and found.I2 > 0.4
    fits = [
        Fit(site, 50, np.array([x]), np.array([[s]]), "", np.zeros(1), np.array([[1 / s]]))
        for site, x, s in zip(SITES, b, v, strict=True)
    ]
    result = heterogeneity(("dose",), np.array([0.01]), 1.0, fits)
    text = " ".join(result.summary().as_text().split())
    assert "I2(Q)" in text
    assert f"dose (tau 0.0000, I2 {100 * found.I2:.0f} %; by moments tau {moments.tau2**0.5:.4f})" in text


def test_the_summary_of_a_fit_whose_sites_agree_needs_no_random_effects(monkeypatch):
    partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    monkeypatch.setattr("fedstat.inference.heterogeneity.combine_sites", None)
    assert "Heterogeneity" in str(fit.summary())
    with pytest.raises(TypeError):
        fit.heterogeneity.to_frame()
