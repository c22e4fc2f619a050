"""Regressions of categories over sites are those of the pooled table: R's ordinal, statsmodels' MNLogit."""

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose
from scipy import optimize, stats
from sklearn.metrics import roc_auc_score
from statsmodels.miscmodels.ordinal_model import OrderedModel

import fedstat as fs
from fedstat.errors import (
    ConsentError,
    DesignError,
    EstimationError,
    FormulaError,
    MessageError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.federation.message import Request, pack_request
from fedstat.kernels.categories import BASELINE, LINKS, CategoryRows, log_terms, probabilities

REFERENCE = Path(__file__).parents[2] / "reference" / "categories"
MADE = runpy.run_path(str(REFERENCE / "grades.py"))
GRADES, LEVELS = MADE["grades"](), MADE["LEVELS"]
R = json.loads((REFERENCE / "ordinal.json").read_text())
FORMULA = "grade ~ hours + tutor + track"
X = pd.DataFrame(
    {
        "Intercept": 1.0,
        "hours": GRADES["hours"],
        "tutor[T.yes]": (GRADES["tutor"] == "yes") * 1.0,
        "track[T.b]": (GRADES["track"] == "b") * 1.0,
        "track[T.c]": (GRADES["track"] == "c") * 1.0,
    }
)
CODES = pd.Categorical(GRADES["grade"], LEVELS).codes


def rows(table=GRADES, **settings):
    return fs.ClientPartition.from_frame(table, by="school", **settings)


def model(kind, formula=FORMULA, table=GRADES, policy=None, **settings):
    partition = rows(table, policy=policy)
    settings = {"levels": LEVELS} | settings
    return getattr(fs, f"Federated{kind}").from_formula(formula, partition, **settings)


@pytest.fixture(scope="module")
def ordinal():
    return model("Ordinal").fit()


@pytest.fixture(scope="module")
def multinomial():
    return model("Multinomial").fit()


@pytest.fixture(scope="module")
def mnlogit():
    return sm.MNLogit(CODES, X).fit(method="newton", tol=1e-14, disp=0)


# -- estimates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("link", LINKS)
def test_ordinal_estimates_are_those_of_clm(link, masked):
    fit, expected = model("Ordinal", distr=link).fit(masked=masked), R[link]
    assert_allclose(fit.thresholds["estimate"], expected["coef"][:3], atol=1e-8)
    assert_allclose(fit.thresholds["std_error"], expected["se"][:3], rtol=1e-8)
    # R has the thresholds first.
    for found, name, close in ((fit.params, "coef", {"atol": 1e-8}), (fit.bse, "se", {"rtol": 1e-8})):
        assert_allclose(found, np.r_[expected[name][3:], expected[name][:3]], **close)
    assert_allclose(np.sqrt(np.diag(fit.cov_params())), fit.bse, rtol=1e-12)
    table = fit.tidy().set_index("term")
    for name in ("estimate", "std_error", "conf_low", "conf_high"):
        assert_allclose(table.loc[fit.thresholds.index, name], fit.thresholds[name], rtol=1e-12)
    assert_allclose(fit.conf_int().loc[fit.thresholds.index], fit.thresholds.iloc[:, 2:], rtol=1e-12)
    assert_allclose(fit.pvalues, 2.0 * stats.norm.sf(np.abs(fit.params / fit.bse)), rtol=1e-9)
    ratios = fit.tidy(exponentiate=True)
    assert ratios["term"].tolist() == fit.params.index[:4].tolist()
    assert_allclose(ratios["estimate"], np.exp(fit.params.iloc[:4]), rtol=1e-12)
    compared = fs.compare({"fit": fit}).coefficients["fit"].droplevel("site")
    for name, (estimate, error, _, _) in fit.thresholds.iterrows():
        assert compared[name].startswith(f"{estimate:.4f} ({error:.4f})")
    assert_allclose(fit.llf, expected["loglik"], rtol=1e-10)


def test_thresholds_stay_thresholds_in_files_pools_and_pictures(ordinal, tmp_path):
    ordinal.save(tmp_path / "fit.fed")
    again, slopes = fs.load(tmp_path / "fit.fed"), ordinal.params.index[:4].tolist()
    assert again.tidy(exponentiate=True)["term"].tolist() == slopes == again.odds_ratios().index.tolist()
    assert_allclose(again.params, ordinal.params)
    assert_allclose(
        fs.pool([ordinal, again]).params[ordinal.thresholds.index], ordinal.thresholds["estimate"]
    )
    assert len(ordinal.plot_coefficients(exponentiate=True).get_yticklabels()) == len(slopes)
    own = ordinal.site_estimates.dropna()
    assert (own[ordinal.thresholds.index].diff(axis=1).iloc[:, 1:] > 0.0).all(axis=None)


def test_ordinal_parameters_are_those_of_ordered_model(ordinal):
    grade = pd.Series(pd.Categorical(GRADES["grade"], LEVELS, ordered=True))
    pooled = OrderedModel(grade, X.iloc[:, 1:], distr="logit")
    # Its own stopping rule leaves 1e-6; its score is at zero at these parameters.
    cuts = ordinal.thresholds["estimate"].to_numpy()
    theirs = np.r_[ordinal.params.iloc[:4], cuts[0], np.log(np.diff(cuts))]
    assert_allclose(pooled.loglike(theirs), ordinal.llf, rtol=1e-12)
    pooled = pooled.fit(method="newton", tol=1e-12, maxiter=100, disp=0)
    assert_allclose(theirs, pooled.params, atol=1e-8)
    assert ordinal.params.index.tolist()[-3:] == pooled.params.index.tolist()[-3:]
    # Its covariance is that of a numerical second derivative.
    assert_allclose(ordinal.bse.iloc[:5], pooled.bse.iloc[:5], rtol=1e-4)
    assert_allclose([ordinal.aic, ordinal.bic], [pooled.aic, pooled.bic], rtol=1e-9)
    assert_allclose(ordinal.predict(GRADES), pooled.predict(X.iloc[:, 1:]), atol=1e-9)
    assert_allclose(ordinal.llnull, pooled.llnull, rtol=1e-6)


def test_weights_and_offsets_are_those_of_clm():
    fit = model("Ordinal", "grade ~ hours + tutor", offset="shift", freq_weights="weight").fit()
    # clm adds its offset to the threshold; ours is added to x'b.
    again = model("Ordinal", "grade ~ hours + tutor + offset(0 - shift)", freq_weights="weight").fit()
    expected = R["weighted"]
    found = {sign: abs(one.llf - expected["loglik"]) for sign, one in {1: fit, -1: again}.items()}
    best = fit if found[1] < found[-1] else again
    assert_allclose(best.thresholds["estimate"], expected["coef"][:3], atol=1e-8)
    assert_allclose(best.bse.iloc[:2], expected["se"][3:], rtol=1e-8)
    repeated = GRADES.loc[GRADES.index.repeat(GRADES["weight"].astype(int))].reset_index(drop=True)
    same = model("Ordinal", "grade ~ hours + tutor", repeated, offset="shift").fit()
    assert_allclose(fit.params, same.params, atol=1e-8)
    assert_allclose([fit.llf, fit.llnull], [same.llf, same.llnull], rtol=1e-10)


def test_multinomial_estimates_are_those_of_mnlogit(multinomial, mnlogit):
    assert_allclose(multinomial.params_by_category, mnlogit.params, atol=1e-8)
    assert multinomial.params_by_category.columns.tolist() == LEVELS[1:]
    assert_allclose(multinomial.cov_params(), mnlogit.cov_params(), rtol=1e-8, atol=1e-12)
    assert_allclose([multinomial.llf, multinomial.llnull], [mnlogit.llf, mnlogit.llnull], rtol=1e-10)
    assert_allclose([multinomial.aic, multinomial.bic], [mnlogit.aic, mnlogit.bic], rtol=1e-10)
    assert_allclose(multinomial.pseudo_rsquared(), mnlogit.prsquared, rtol=1e-8)
    assert (multinomial.df_model, multinomial.df_resid) == (mnlogit.df_model, mnlogit.df_resid)
    assert_allclose(multinomial.predict(GRADES), mnlogit.predict(X), atol=1e-9)


def test_multinomial_weights_and_offsets():
    repeated = GRADES.loc[GRADES.index.repeat(GRADES["weight"].astype(int))].reset_index(drop=True)
    weighted = model("Multinomial", "grade ~ hours", freq_weights="weight").fit()
    assert_allclose(weighted.params, model("Multinomial", "grade ~ hours", repeated).fit().params, atol=1e-8)
    shifted = model("Multinomial", "grade ~ hours + tutor", offset="shift").fit()

    def loss(beta):
        eta = X.iloc[:, :3].to_numpy() @ beta.reshape(3, 3).T + GRADES["shift"].to_numpy()[:, None]
        return -log_terms(eta, CODES.astype(np.int64), BASELINE)[0].sum()

    assert_allclose(loss(shifted.params.to_numpy()), -shifted.llf, rtol=1e-12)
    slope = optimize.approx_fprime(shifted.params.to_numpy(), loss, 1e-6)
    assert np.abs(slope).max() < 0.05  # of a quadratic with a curvature of thousands


@pytest.mark.parametrize("link", [*LINKS, BASELINE])
def test_derivatives_are_those_of_the_log_likelihood(link):
    rng = np.random.default_rng(3)
    eta = np.sort(rng.normal(size=(40, 3)), axis=1) + np.array([-0.3, 0.0, 0.3])
    y, h = rng.integers(0, 4, 40), 1e-5
    logp, g, H = log_terms(eta, y, link)
    assert_allclose(np.exp(logp), probabilities(eta, link)[np.arange(40), y], rtol=1e-12)
    assert_allclose(probabilities(eta, link).sum(axis=1), 1.0)
    for j, step in enumerate(np.eye(3) * h):
        above, below = (log_terms(eta + sign * step, y, link) for sign in (1, -1))
        assert_allclose(g[:, j], (above[0] - below[0]) / (2 * h), rtol=1e-6, atol=1e-7)
        assert_allclose(H[:, j], (above[1] - below[1]) / (2 * h), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("link", [*LINKS, BASELINE])
def test_probabilities_keep_their_digits_in_the_tails(link):
    eta = np.array([[-30.0, -29.0], [29.0, 30.0]])
    P = probabilities(eta, link)
    assert (P >= 0.0).all() and np.isfinite(P).all()
    if link == "logit":
        assert_allclose(P[1, 1], P[0, 1], rtol=1e-12)  # by symmetry


# -- covariance, tests, effects ------------------------------------------------------------------


def test_robust_errors_are_those_of_sandwich():
    n, q = len(GRADES), 7
    plain = model("Ordinal").fit(cov_type="HC0")
    assert_allclose(np.r_[plain.thresholds["std_error"], plain.bse.iloc[:4]], R["HC0"]["se"], rtol=1e-8)
    robust = model("Ordinal").fit(cov_type="robust")
    assert_allclose(robust.bse / plain.bse, np.sqrt(n / (n - q)), rtol=1e-10)
    kwds = {"groups": "class", "correction": "CR1"}
    clustered = model("Ordinal", labels=["class"]).fit(cov_type="cluster", cov_kwds=kwds)
    G = R["cluster"]["n"]
    factor = np.sqrt(G / (G - 1) * (n - 1) / (n - q))
    found = np.r_[clustered.thresholds["std_error"], clustered.bse.iloc[:4]]
    assert_allclose(found, np.array(R["cluster"]["se"]) * factor, rtol=1e-8)


@pytest.mark.parametrize("groups", ["class", "school"])
def test_multinomial_clusters_are_those_of_statsmodels(groups):
    code = pd.factorize(GRADES[groups])[0]
    pooled = sm.MNLogit(CODES, X).fit(
        method="newton", tol=1e-14, disp=0, cov_type="cluster", cov_kwds={"groups": code}
    )
    labels = [groups] if groups == "class" else []
    kwds = {"groups": groups, "correction": "CR1"}
    fit = model("Multinomial", labels=labels).fit(cov_type="cluster", cov_kwds=kwds)
    plain = sm.MNLogit(CODES, X).fit(method="newton", tol=1e-14, disp=0, cov_type="HC0")
    assert_allclose(model("Multinomial").fit(cov_type="HC0").bse, plain.bse.to_numpy().ravel("F"), rtol=1e-8)
    # statsmodels counts the columns of one category in its correction.
    n, q = len(GRADES), fit.params.size
    ratio = fit.bse.to_numpy() / pooled.bse.to_numpy().ravel("F")
    assert_allclose(ratio, ratio[0], rtol=1e-8)
    assert 1.0 - 1e-9 <= ratio[0] ** 2 <= (n - 5) / (n - q) + 1e-9


def unrestricted(phi, y=CODES):
    """Log-likelihood of the cumulative logit with coefficients of each threshold."""
    eta = X.to_numpy() @ phi.reshape(3, 5).T
    return log_terms(eta, y.astype(np.int64), "logit")[0].sum()


def test_proportional_odds_by_the_score_of_the_larger_model(ordinal):
    found = ordinal.test_proportional_odds().tidy().set_index("term")
    beta = ordinal.params.iloc[:4].to_numpy()
    at = np.column_stack([ordinal.thresholds["estimate"], -np.tile(beta, (3, 1))]).ravel()
    h, q = 1e-4, len(at)
    steps = np.eye(q) * h
    U = np.array([(unrestricted(at + e) - unrestricted(at - e)) / (2 * h) for e in steps])
    V = -np.array(
        [
            [
                (
                    unrestricted(at + a + b)
                    - unrestricted(at + a - b)
                    - unrestricted(at - a + b)
                    + unrestricted(at - a - b)
                )
                / (4 * h * h)
                for b in steps
            ]
            for a in steps
        ]
    )
    assert_allclose(found.loc["GLOBAL", "statistic"], U @ np.linalg.solve(V, U), rtol=1e-3)
    assert found["df"].tolist() == [2, 2, 4, 8]
    # The likelihood ratio test of R's nominal_test is another statistic for the same hypothesis.
    assert_allclose(found["statistic"].iloc[:3], R["nominal"]["lr"], rtol=0.15)
    assert R["nominal"]["df"] == [2, 2, 4]


def test_terms_are_tested_over_all_categories(multinomial, ordinal):
    for kind, fit in (("Multinomial", multinomial), ("Ordinal", ordinal)):
        without = model(kind, "grade ~ hours + tutor").fit()
        found = fit.lr_test_terms()
        assert_allclose(found.loc["track", "statistic"], 2 * (fit.llf - without.llf), rtol=1e-7)
        assert found.loc["track", "df"] == fit.compare_lr_test(without).df_diff
        wald = fit.wald_test_terms().table.loc["track"]
        assert wald["df_constraint"] == found.loc["track", "df"]
        R_matrix = np.array([[name.split(": ")[-1].startswith("track")] for name in fit.params.index])[:, 0]
        part = fit.params[R_matrix].to_numpy()
        cov = fit.cov_params().loc[R_matrix, R_matrix].to_numpy()
        assert_allclose(float(np.squeeze(wald["statistic"])), part @ np.linalg.solve(cov, part), rtol=1e-8)


@pytest.mark.parametrize("at", ["overall", "mean"])
def test_marginal_effects_are_those_of_mnlogit(multinomial, mnlogit, at):
    found, expected = multinomial.get_margeff(at, columns=True), mnlogit.get_margeff(at=at)
    assert_allclose(found.margeff.to_numpy().reshape(4, 4).T, expected.margeff, atol=1e-9)
    assert_allclose(found.margeff_se.to_numpy().reshape(4, 4).T, expected.margeff_se, rtol=1e-7)
    assert found.margeff.index[0] == "poor: hours"


def test_ordinal_effects_are_differences_of_predictions(ordinal):
    found, h = ordinal.get_margeff(), 1e-4
    above, below = (ordinal.predict(GRADES.assign(hours=GRADES["hours"] + s * h)) for s in (1, -1))
    expected = ((above - below) / (2 * h)).mean()
    assert_allclose(found.margeff[[f"{level}: hours" for level in LEVELS]], expected, atol=1e-8)
    assert_allclose(found.margeff.to_numpy().reshape(4, 4).sum(axis=0), 0.0, atol=1e-12)

    def effect(params):
        eta = params[4:] - (X.iloc[:, 1:].to_numpy() @ params[:4])[:, None]
        P = [probabilities(eta - s * h * params[0], "logit").mean(axis=0) for s in (1, -1)]
        return (P[0] - P[1])[3] / (2 * h)

    slope = optimize.approx_fprime(ordinal.params.to_numpy(), effect, 1e-6)
    se = np.sqrt(slope @ ordinal.cov_params().to_numpy() @ slope)
    assert_allclose(found.margeff_se["excellent: hours"], se, rtol=1e-4)


def test_probabilities_have_intervals(ordinal, multinomial):
    new = pd.DataFrame({"hours": [4.0, np.nan, 9.0], "tutor": "yes", "track": "a"})
    for fit in (ordinal, multinomial):
        frame = fit.get_prediction(new).summary_frame()
        P = fit.predict(new)
        assert_allclose(frame["mean"].to_numpy().reshape(3, 4), P)
        assert P.iloc[1].isna().all() and frame.loc[1].isna().all().all()
        assert (frame["mean_ci_lower"].dropna() < frame["mean"].dropna()).all()
        assert fit.predict(new, which="category").isna().tolist() == [False, True, False]
    theta = ordinal.thresholds.loc["poor/fair"]
    row = pd.DataFrame({"hours": [0.0], "tutor": "no", "track": "a"})
    first = ordinal.get_prediction(row).summary_frame().loc[(0, "poor")]
    assert_allclose(first["mean_se"], theta["std_error"] * first["mean"] * (1 - first["mean"]), rtol=1e-9)


# -- sites ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Ordinal", "Multinomial"])
def test_one_site_is_many_in_any_order(kind):
    many = model(kind).fit()
    one = model(kind, table=GRADES.assign(school="all")).fit()
    turned = model(kind, table=GRADES.iloc[::-1]).fit(masked=False)
    for other in (one, turned):
        assert_allclose(other.params, many.params, rtol=1e-8)
        assert_allclose(other.bse, many.bse, rtol=1e-8)
        assert_allclose(other.evaluate().log_loss, many.evaluate().log_loss, rtol=1e-9)
    assert "not defined" in one.summary().as_text()


@pytest.mark.parametrize("kind", ["Ordinal", "Multinomial"])
def test_own_fits_are_those_of_each_site_alone(kind):
    fit = model(kind).fit()
    for site in ("Aalen", "Bern"):
        alone = model(kind, table=GRADES[GRADES["school"] == site]).fit()
        assert_allclose(fit.site_estimates.loc[site], alone.params, rtol=1e-6)
    unmasked = model(kind).fit(masked=False).heterogeneity
    assert_allclose(fit.heterogeneity.joint.statistic, unmasked.joint.statistic, rtol=1e-7)
    assert unmasked.left_out.shape == (4, len(fit.params))


def test_a_column_that_is_constant_at_a_site_is_unknown_there():
    table = GRADES.copy()
    table.loc[table["school"] == "Bern", "tutor"] = "no"
    found = model("Ordinal", table=table).fit().site_estimates
    assert found.loc["Bern"].isna().tolist() == [False, True, *[False] * 5]
    assert found.drop(index="Bern").notna().all().all()
    table.loc[table["school"] == "Bern", "tutor"] = "yes"
    found = model("Ordinal", table=table).fit().site_estimates
    # The thresholds contain the effect of the constant; their differences do not.
    assert found.loc["Bern"].isna().tolist()[:5] == [False, True, False, False, True]


def test_a_site_without_a_category_has_no_own_fit():
    table = GRADES[(GRADES["school"] != "Bern") | (GRADES["grade"] != "poor")]
    fit = model("Multinomial", table=table).fit()
    own = fit.heterogeneity.sites["problem"]
    assert own["Bern"] == "a category has no rows" and own["Aalen"] == ""
    assert "No fit of their own: Bern" in fit.summary().as_text()


# -- levels --------------------------------------------------------------------------------------


def test_levels_come_from_numbers_declarations_or_the_formula():
    numbers = GRADES.assign(grade=CODES * 10)
    by_number = model("Ordinal", table=numbers, levels=None).fit()
    by_formula = model("Ordinal", f"C(grade, levels={LEVELS}) ~ hours + tutor + track", levels=None).fit()
    declared = GRADES.assign(grade=pd.Categorical(GRADES["grade"], LEVELS))
    by_type = model("Ordinal", table=declared, levels=None).fit()
    assert by_number.categories == (0, 10, 20, 30) and by_type.categories == tuple(LEVELS)
    for fit in (by_formula, by_type, by_number):
        assert_allclose(fit.params.to_numpy(), model("Ordinal").fit().params.to_numpy(), rtol=1e-9)
    with pytest.raises(DesignError, match="holds text, whose order is not known"):
        model("Ordinal", levels=None)
    in_order = GRADES.assign(grade=pd.Categorical(GRADES["grade"], sorted(LEVELS)))
    with pytest.raises(DesignError, match="whose order is not known"):
        model("Ordinal", table=in_order, levels=None)
    ordered = in_order.assign(grade=in_order["grade"].cat.as_ordered())
    assert model("Ordinal", table=ordered, levels=None).fit().categories == tuple(sorted(LEVELS))
    assert model("Multinomial", levels=None).fit().categories == tuple(sorted(LEVELS))
    mixed = numbers.assign(grade=np.where(GRADES["school"] == "Dax", CODES * 10.0, CODES * 10))
    frames = {site: part.drop(columns="school") for site, part in mixed.groupby("school")}
    frames["Aalen"] = frames["Aalen"].astype({"grade": int})
    partition = fs.ClientPartition.from_frames(frames, layout="horizontal")
    assert fs.FederatedOrdinal.from_formula(FORMULA, partition).agreement.question.categories == (
        0,
        10,
        20,
        30,
    )


@pytest.mark.parametrize(
    ("error", "match", "formula", "settings"),
    [
        (DesignError, "a category with no declared level", FORMULA, {"levels": LEVELS[:3]}),
        (FormulaError, "are always part of this model", "grade ~ 0 + hours", {}),
        (FormulaError, "needs a column of categories", "log(hours) ~ tutor", {"levels": None}),
        (FormulaError, "a coding of the response", "C(grade, Sum) ~ hours", {"levels": None}),
        (ModelError, "two different categories", FORMULA, {"levels": ["poor"]}),
        (ModelError, "two different categories", FORMULA, {"levels": "poor"}),
        (ModelError, "give them once", f"C(grade, levels={LEVELS}) ~ hours", {}),
        (ModelError, "has no argument 'family'", FORMULA, {"family": None}),
        (PolicyError, "257 of the 259 levels of column 'hours'", "hours ~ tutor", {"levels": None}),
        (ModelError, "distr", FORMULA, {"distr": "cauchit"}),
    ],
)
def test_wrong_responses_say_what_is_wrong(error, match, formula, settings):
    with pytest.raises(error, match=match):
        model("Ordinal", formula, **settings)


def test_a_measurement_is_no_response_of_categories():
    table = GRADES.assign(school=GRADES["tutor"], many=np.arange(len(GRADES)) % 40)
    with pytest.raises(DesignError, match="'many' has 40 categories, and a model can have 30"):
        model("Ordinal", "many ~ hours", table, levels=None)


def test_other_models_point_to_these():
    with pytest.raises(FormulaError, match="FederatedOrdinal and FederatedMultinomial"):
        fs.GLORE.from_formula("C(grade) ~ hours", rows())
    with pytest.raises(DesignError, match="use FederatedOrdinal or FederatedMultinomial"):
        fs.FederatedOLS.from_formula("grade ~ hours", rows()).fit()


def test_an_empty_category_is_named():
    with pytest.raises(
        DesignError, match="no complete row of any site has level 'superb' of response 'grade'"
    ):
        model("Ordinal", levels=[*LEVELS, "superb"]).fit()


def test_separated_categories_are_named():
    table = GRADES.assign(seen=np.where(GRADES["grade"].isin(LEVELS[:2]), "no", "yes"))
    for kind in ("Ordinal", "Multinomial"):
        with pytest.raises(EstimationError, match=r"categories are separated.*seen\[T.yes\]"):
            model(kind, "grade ~ hours + seen", table, policy=fs.Policy(max_share=1.0, min_count=1)).fit()
    with pytest.raises(EstimationError, match="collinear"):
        model("Ordinal", "grade ~ hours + I(hours * 2)").fit()


# -- what leaves ---------------------------------------------------------------------------------


def test_a_request_out_of_turn_is_refused():
    site = model("Ordinal").partition.sites["Bern"]
    arrays = {"shift": np.zeros(5), "scale": np.ones(5), "beta": np.zeros(7)}
    for step in ("sum_scores", "sum_separate_scores", "sum_effects"):
        with pytest.raises(MessageError, match=r"was not started here|no rows are open"):
            site.answer(pack_request(Request("Bern", "categories", step, arrays, "another session")))


def test_a_rare_category_is_refused_with_a_remedy():
    table = GRADES.copy()
    table.loc[table.index[(table["school"] == "Dax") & (table["grade"] == "poor")][2:], "grade"] = "fair"
    for kind in ("Ordinal", "Multinomial"):
        with pytest.raises(PolicyError, match=r"column 'grade' have fewer\. Merge them with others"):
            model(kind, table=table)
    merged = table.assign(grade=table["grade"].replace({"poor": "fair"}))
    assert model("Ordinal", table=merged, levels=LEVELS[1:]).fit().converged


def test_a_rare_cell_of_category_and_column_is_refused():
    table = GRADES.copy()
    cell = table.index[(table["school"] == "Aalen") & (table["grade"] == "poor") & (table["track"] == "c")]
    table.loc[cell[2:], "track"] = "a"
    with pytest.raises(PolicyError, match=r"'track\[T.c\]' and 'grade\[poor\]' are nonzero"):
        model("Multinomial", table=table, policy=fs.Policy(products="counted")).fit()
    allowed = fs.Policy(products="counted", min_level_count=2)
    assert model("Multinomial", table=table, policy=allowed).fit().converged


# -- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Ordinal", "Multinomial"])
def test_results_are_saved_and_read(kind, tmp_path):
    fit = model(kind).fit()
    fit.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    assert again.params.equals(fit.params) and again.categories == fit.categories
    assert again.predict(GRADES.head()).equals(fit.predict(GRADES.head()))
    assert again.summary().as_text() == fit.summary().as_text()
    with pytest.raises(NotAvailableError, match="read from a file"):
        again.get_margeff()
    with pytest.raises(NotAvailableError, match="read from a file"):
        again.evaluate()
    assert again.evaluate(rows()).log_loss == fit.evaluate().log_loss


def test_evaluation_counts_every_category(ordinal):
    found = ordinal.evaluate()
    P = ordinal.predict(GRADES).to_numpy()
    assert_allclose(found.log_loss, -np.log(P[np.arange(len(P)), CODES]).mean(), rtol=1e-10)
    assert_allclose(found.log_loss, -ordinal.llf / len(GRADES), rtol=1e-10)
    counts = found.confusion()
    assert_allclose(counts.sum(axis=1), np.bincount(CODES))
    guess = P.argmax(axis=1)
    assert abs(found.accuracy - (guess == CODES).mean()) < 0.01
    for j, level in enumerate(LEVELS):
        one = found.by_category[level]
        events, others = P[j == CODES, j], P[j != CODES, j]
        area = (events[:, None] > others).mean() + (events[:, None] == others).mean() / 2
        assert (
            one.discrimination["all sites"].at_least - 1e-9
            <= area
            <= one.discrimination["all sites"].at_most + 1e-9
        )
        assert_allclose(one.expected.sum(), P[:, j].sum(), rtol=1e-9)
    low, high = found.hand_till_bounds
    pairs = roc_auc_score(CODES, P, multi_class="ovo")
    assert low - 1e-9 <= pairs <= high + 1e-9 and abs(found.hand_till - pairs) < 0.005
    assert found.glance()["hand_till"].item() == found.hand_till
    assert found.own_rows and "flatter" not in found.summary().as_text()
    assert len(ordinal.evaluation_ledger.releases()) > 0


def test_small_cells_of_the_confusion_are_not_released(ordinal):
    counts = ordinal.evaluate().counts
    assert not ((counts > 0) & (counts < 3)).any()
    free = model("Ordinal", policy=fs.Policy(min_level_count=1)).fit().evaluate().counts
    assert ((free > 0) & (free < 3)).any()


def test_fits_are_compared_and_pooled(ordinal):
    small = model("Ordinal", "grade ~ hours").fit()
    table = fs.compare({"small": small, "large": ordinal})
    assert "hours" in str(table)
    pooled = fs.pool([ordinal, ordinal])
    assert_allclose(pooled.params, ordinal.params)


def test_tables_and_plots(ordinal, multinomial):
    assert ordinal.tidy()["term"].tolist() == ordinal.params.index.tolist()
    assert ordinal.odds_ratios().index.tolist() == X.columns[1:].tolist()
    with pytest.raises(NotAvailableError, match="distr='logit'"):
        model("Ordinal", distr="probit").fit().odds_ratios()
    for fit in (ordinal, multinomial):
        ax = fit.plot_probabilities("hours", np.linspace(1, 20, 30), at={"tutor": "yes", "track": "a"})
        assert len(ax.lines) == 4
        assert fit.evaluate().plot_calibration().has_data()
        with pytest.raises(ModelError, match="at lacks a value of tutor, track"):
            fit.plot_probabilities("hours", [1, 2])
    assert multinomial.plot_forest("excellent: hours").has_data()
    assert ordinal.plot_effect("hours", [1, 5, 9]).has_data()
    with pytest.raises(NotAvailableError, match="differs by category"):
        multinomial.effect("hours")
    assert multinomial.plot_coefficients(exponentiate=True).has_data()


def test_two_categories_are_a_logistic_regression():
    table = GRADES.assign(grade=np.where(CODES > 1, "high", "low"))
    logistic = fs.GLORE.from_formula("grade == 'high' ~ hours + tutor + track", rows(table)).fit()
    binary = model("Multinomial", table=table, levels=["low", "high"]).fit()
    assert_allclose(binary.params, logistic.params, atol=1e-7)
    ordered = model("Ordinal", table=table, levels=["low", "high"]).fit()
    assert_allclose(ordered.params.iloc[:4], logistic.params.iloc[1:], atol=1e-7)
    with pytest.raises(NotAvailableError, match="three categories"):
        ordered.test_proportional_odds()


def test_blocks_of_rows_are_parts_of_all_rows():
    data = CategoryRows(X.to_numpy(), CODES.astype(np.int64), "logit", weight=GRADES["weight"].to_numpy())
    B = np.column_stack([[-1.0, 0.5, 2.0], np.tile([-0.1, -0.3, 0.0, 0.1], (3, 1))])
    whole, parts = data.sums(B), [data.part(slice(0, 300)).sums(B), data.part(slice(300, None)).sums(B)]
    assert_allclose(whole.score, sum(one.score for one in parts), rtol=1e-10)


@pytest.mark.parametrize("kind", ["Ordinal", "Multinomial"])
def test_owners_approve_the_fit_and_what_follows(kind):
    waiting = model(kind, policy=fs.Policy(approval="owner"))
    expected = model(kind).fit()

    def approved(call):
        with pytest.raises(ConsentError, match="pending"):
            call()
        for site in waiting.partition.sites.values():
            for digest in list(site.pending):
                site.approve(digest)
        return call()

    fit = approved(waiting.fit)
    assert_allclose(fit.params, expected.params, atol=1e-12)
    assert_allclose(approved(fit.get_margeff).margeff, expected.get_margeff().margeff, atol=1e-12)
    assert approved(fit.evaluate).log_loss == expected.evaluate().log_loss


def test_strict_sites_answer():
    table, policy = MADE["grades"](2400), fs.Policy.strict()
    for kind in ("Ordinal", "Multinomial"):
        strict, loose = (model(kind, table=table, policy=one) for one in (policy, None))
        fit, expected = strict.fit(), loose.fit()
        assert_allclose(fit.params, expected.params, atol=1e-9)
        assert_allclose(fit.get_margeff().margeff, expected.get_margeff().margeff, atol=1e-9)
        assert fit.lr_test_terms().shape == (3, 3) and fit.evaluate().log_loss > 0.0
        kinds = fit.ledger.to_frame()
        assert kinds.loc[kinds["step"] == "sum_scores", "masked"].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Ordinal", "Multinomial"])
def test_intervals_cover(kind):
    found = runpy.run_path(str(Path(__file__).with_name("categories_coverage.py")))
    hits, rejected = found["coverage"](kind, 4, 100, 300)
    assert ((hits > 0.91) & (hits < 0.985)).all()
    assert kind == "Multinomial" or 0.02 < rejected < 0.09
