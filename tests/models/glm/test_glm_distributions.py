"""Laws of tests and intervals: Student's t, as statsmodels' OLS and R have it; nested fits."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from pooled import fit_pooled, partition, table
from scipy import stats

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

F, L = sm.families, sm.families.links
FRAME = table(seed=2)
CLUSTERS = {"cov_type": "cluster", "cov_kwds": {"groups": "site", "correction": "CR1"}}


def fit(formula="gauss ~ x + z + C(g)", family=None, frame=FRAME, roles=None, **how):
    model = fs.FederatedGLM.from_formula(
        formula, partition(frame), family=family or F.Gaussian(), labels=["ward", "region"], **(roles or {})
    )
    return model.fit(**how)


def ols(**how):
    glm = fit_pooled("gauss ~ x + z + C(g)", FRAME, F.Gaussian())
    return sm.OLS(glm.model.endog, glm.model.exog).fit(**how)


# -- laws ----------------------------------------------------------------------------------------


def test_the_linear_model_has_the_tests_of_least_squares():
    ours, theirs = fit(), ols()
    assert (ours.use_t, ours.df_inference) == (True, theirs.df_resid)
    assert_allclose(ours.pvalues, theirs.pvalues, rtol=1e-7)
    assert_allclose(ours.conf_int(0.1), theirs.conf_int(0.1), rtol=1e-7)
    R = np.eye(5)[1:3]
    assert_allclose(ours.t_test(R).pvalue, theirs.t_test(R).pvalue, rtol=1e-7)
    assert_allclose(ours.t_test(R).conf_int(), theirs.t_test(R).conf_int(), rtol=1e-7)
    wald = ours.wald_test(R)
    assert wald.distribution == "F"
    assert_allclose(wald.pvalue, theirs.wald_test(R, scalar=True).pvalue, rtol=1e-7)
    terms = ours.wald_test_terms().table
    assert_allclose(terms.loc["x", "pvalue"], ours.pvalues["x"], rtol=1e-7)
    assert list(terms["df_constraint"]) == [1, *[2 if "C(" in t else 1 for t in terms.index[1:]]]
    text = str(ours.summary())
    assert "P>|t|" in text and f"t on {len(FRAME) - 5} df" in text


def test_clusters_have_degrees_of_freedom_of_their_own():
    ours = fit(**CLUSTERS)
    codes = pd.factorize(FRAME["site"])[0]
    theirs = ols(cov_type="cluster", cov_kwds={"groups": codes}, use_t=True)
    assert ours.df_inference == 3 == theirs.df_resid_inference
    assert_allclose(ours.pvalues, theirs.pvalues, rtol=1e-6)
    assert_allclose(ours.conf_int(), theirs.conf_int(), rtol=1e-6)
    predicted = ours.get_prediction(FRAME.head(7))
    half = stats.t.ppf(0.975, 3) * predicted.se_linear
    assert_allclose(predicted.conf_int()[1], predicted.linear + half)


def test_a_survey_has_clusters_less_strata():
    frame = FRAME.assign(area=FRAME["ward"] // 100)
    model = fs.FederatedGLM.from_formula(
        "binary ~ x", partition(frame), family=F.Binomial(), var_weights="v", labels=["ward", "area"]
    )
    result = model.fit(cov_type="survey", cov_kwds={"clusters": "ward", "strata": "area"})
    assert result.df_inference == frame["ward"].nunique() - frame["area"].nunique()
    for compare in (result.compare_lr_test, result.compare_f_test):
        with pytest.raises(NotAvailableError, match=r"pseudo-likelihood.*use wald_test"):
            compare(result)


@pytest.mark.parametrize(
    ("formula", "family", "how", "df"),
    [
        ("binary ~ x", F.Binomial(), {}, None),
        ("count ~ x", F.Poisson(), {}, None),
        ("count ~ x", F.Poisson(), {"scale": "X2"}, 598),
        ("count ~ x", F.Poisson(), {"use_t": True}, 598),
        ("gamma ~ x", F.Gamma(L.Log()), {}, 598),
        ("gauss ~ x", F.Gaussian(), {"scale": 1.0}, None),
        ("gauss ~ x", F.Gaussian(), {"use_t": False}, None),
        ("gauss ~ x", F.Gaussian(), {"use_t": False, **CLUSTERS}, None),
    ],
)
def test_normal_where_the_dispersion_is_known_or_it_is_requested(formula, family, how, df):
    result = fit(formula, family, **how)
    assert result.df_inference == df
    z = result.tvalues.abs()
    assert_allclose(result.pvalues, 2 * (stats.norm.sf(z) if df is None else stats.t.sf(z, df)), rtol=1e-12)
    assert ("P>|z|" in str(result.summary())) == (df is None)


def test_few_clusters_are_reported_wherever_they_lie():
    """Eight clusters over two sites: normal intervals cover .86 (1.96 standard errors)."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"group": np.repeat(np.arange(8), 50), "x": rng.normal(size=400)})
    frame["y"] = frame["x"] + rng.normal(size=8)[frame["group"]] + rng.normal(size=400)
    two = fs.ClientPartition.from_frame(frame.assign(site=frame["group"] % 2), by="site")
    model = fs.FederatedGLM.from_formula("y ~ x", two, family=F.Gaussian(), labels=["group"])
    kwds = {"groups": "group", "correction": "CR1"}
    text = " ".join(str(model.fit(cov_type="cluster", cov_kwds=kwds).summary()).split())
    assert text.startswith("*** FEW CLUSTERS: 'x' rests on ") and "of 8 by 'group'" in text
    assert (
        'These standard errors are too small: use cov_kwds={"groups": "group", "correction": "CR2"}.' in text
    )
    assert "t on 7 df" in text
    result = model.fit(cov_type="cluster", cov_kwds=kwds | {"correction": "CR2"})
    assert "FEW CLUSTERS" not in str(result.summary()) and 5.0 < result.df_inference < 7.0


# -- nested fits ---------------------------------------------------------------------------------


def profiled(family, formula, frame=FRAME, **roles):
    """Log-likelihood of statsmodels, at its maximum over the dispersion by a search."""
    found = fit_pooled(formula, frame, family, **roles)
    weights = {name: getattr(found.model, name) for name in ("var_weights", "freq_weights")}
    grid = np.exp(np.linspace(-6, 3, 1001))
    for _ in range(4):
        values = [family.loglike(found.model.endog, found.mu, scale=s, **weights) for s in grid]
        at = int(np.argmax(values))
        grid = np.linspace(grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)], 101)
    return max(values)


@pytest.mark.parametrize("roles", [{}, {"freq": "w"}, {"var": "v"}])
@pytest.mark.parametrize(
    ("response", "family"),
    [
        ("gamma", F.Gamma(L.Log())),
        ("inverse", F.InverseGaussian(L.Log())),
        ("gamma", F.Gaussian(L.Log())),
        ("gauss", F.Gaussian()),
    ],
)
def test_likelihood_ratio_is_at_the_maximum_over_the_dispersion(response, family, roles):
    names = {"freq": "freq_weights", "var": "var_weights"}
    ours = {names[role]: column for role, column in roles.items()}
    full, small = (fit(f"{response} ~ {right}", family, roles=ours) for right in ("x + z", "x"))
    if isinstance(family, F.Gamma) and "var" in roles:
        with pytest.raises(NotAvailableError, match="with var_weights; use compare_f_test"):
            full.compare_lr_test(small)
        return
    expected = 2 * (
        profiled(family, f"{response} ~ x + z", **roles) - profiled(family, f"{response} ~ x", **roles)
    )
    found = full.compare_lr_test(small)
    assert_allclose(found.statistic, expected, rtol=1e-5, atol=1e-6)
    assert_allclose(found.pvalue, stats.chi2.sf(found.statistic, 1))


def test_likelihood_ratio_of_null_data_is_not_negative():
    """At Pearson's dispersion the larger of two fits to gamma data has the lower likelihood in 3 to 10 %."""
    rng, statistics, at_pearson = np.random.default_rng(1), [], []
    for _ in range(20):
        frame = pd.DataFrame(
            {"y": rng.gamma(0.7, 1.0, 60), "x": rng.normal(size=60), "site": ["A", "B"] * 30}
        )
        full, small = (fit_small(f"y ~ {right}", frame) for right in ("x", "1"))
        statistics.append(full.compare_lr_test(small).statistic)
        at_pearson.append(2 * (full.llf - small.llf))
    assert min(at_pearson) < 0.0 <= min(statistics)


def fit_small(formula, frame):
    model = fs.FederatedGLM.from_formula(formula, partition(frame), family=F.Gamma(L.Log()))
    return model.fit(local=False)


def test_f_test_is_that_of_least_squares():
    full, small = fit(), fit("gauss ~ x")
    reduced = fit_pooled("gauss ~ x", FRAME, F.Gaussian())
    expected = ols().compare_f_test(sm.OLS(reduced.model.endog, reduced.model.exog).fit())
    assert_allclose(full.compare_f_test(small), expected, rtol=1e-7)


def test_f_test_is_that_of_deviances():
    """R: ``anova(small, full, test = "F")`` divides by Pearson's dispersion of the larger model."""
    full, small = (fit_pooled(f"gamma ~ {right}", FRAME, F.Gamma(L.Log())) for right in ("x + C(g)", "x"))
    expected = (small.deviance - full.deviance) / 2 / (full.pearson_chi2 / full.df_resid)
    found = fit("gamma ~ x + C(g)", F.Gamma(L.Log())).compare_f_test(fit("gamma ~ x", F.Gamma(L.Log())))
    assert_allclose(found.statistic, expected, rtol=1e-7)
    assert_allclose(found.pvalue, stats.f.sf(expected, 2, full.df_resid), rtol=1e-6)


def test_what_cannot_be_compared_is_reported():
    quasi, smaller = (fit(f"count ~ {right}", F.Poisson(), scale="X2") for right in ("x + z", "x"))
    with pytest.raises(NotAvailableError, match="use compare_f_test"):
        quasi.compare_lr_test(smaller)
    assert quasi.compare_f_test(smaller).pvalue <= 1.0
    plain = fit("count ~ x + z", F.Poisson())
    with pytest.raises(NotAvailableError, match="was fixed at 1 and not estimated; use compare_lr_test"):
        plain.compare_f_test(smaller)
    with pytest.raises(ModelError, match="expected another fit with family Gaussian"):
        fit().compare_lr_test(smaller)
    with pytest.raises(ModelError, match="some of the coefficients"):
        smaller.compare_f_test(quasi)


# -- sites with dispersions of their own -----------------------------------------------------------


def noisy():
    """Sites that differ in residual variance only, the smallest the noisiest."""
    rng = np.random.default_rng(11)
    rows = {"A": (40, 2.5), "B": (100, 1.0), "C": (400, 0.6)}
    parts = [
        pd.DataFrame({"site": s, "x": rng.normal(size=n), "e": rng.normal(0, v**0.5, n)})
        for s, (n, v) in rows.items()
    ]
    frame = pd.concat(parts, ignore_index=True)
    return frame.assign(y=1.0 + frame["x"] + frame["e"], w=rng.integers(1, 4, len(frame)).astype(float))


def linear(frame, weights=None, **how):
    roles = {} if weights is None else {"freq_weights": weights}
    return fs.FederatedGLM.from_formula("y ~ x", partition(frame), family=F.Gaussian(), **roles).fit(**how)


def test_the_joint_test_gives_each_site_its_own_dispersion():
    """Oracle: generalized least squares, the stacked table weighted by the sites' residual variances."""
    frame = noisy()
    own = {site: sm.OLS(rows["y"], sm.add_constant(rows["x"])).fit() for site, rows in frame.groupby("site")}
    weights = 1.0 / frame["site"].map({site: found.mse_resid for site, found in own.items()})
    common = sm.WLS(frame["y"], sm.add_constant(frame["x"]), weights=weights).fit()
    T = (weights * common.resid**2).sum() - sum(found.df_resid for found in own.values())
    for masked in (True, False):
        joint = linear(frame, masked=masked).heterogeneity.joint
        assert joint.df == 4
        assert 1.0 < T / (4 * joint.statistic) < 1.05
    text = " ".join(linear(frame).heterogeneity.summary().as_text().split())
    assert "P > F (own dispersions):" in text
    assert "each site with its own dispersion" in text


def test_without_own_fits_one_dispersion_is_reported():
    result = linear(noisy(), local=False)
    assert not result.heterogeneity.joint.own_dispersions
    assert "assumes the same dispersion (residual variance)" in " ".join(result.heterogeneity.notes)
    assert fit("binary ~ x", F.Binomial(), local=False).heterogeneity.one_dispersion is False


def test_own_dispersions_count_frequency_weights():
    frame = noisy()
    written = linear(frame.loc[frame.index.repeat(frame["w"].astype(int))].reset_index(drop=True))
    weighted = linear(frame, "w")
    assert_allclose(weighted.heterogeneity.std_errors, written.heterogeneity.std_errors, rtol=1e-7)
    assert_allclose(weighted.heterogeneity.joint, written.heterogeneity.joint, rtol=1e-7)


def test_results_in_a_file_keep_the_test(tmp_path):
    result = linear(noisy())
    result.save(tmp_path / "result.fed")
    assert fs.load(tmp_path / "result.fed").heterogeneity.joint == result.heterogeneity.joint
