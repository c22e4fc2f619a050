"""The summary of a fit: every figure compared with statsmodels on the stacked table or plain numpy."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import fit_pooled, partition, table
from scipy import stats

import fedstat as fs
from fedstat.errors import DesignError, ModelError, NotAvailableError
from fedstat.federation.disclosure.threat_statements import ONE_PROCESS_NOTE
from fedstat.inference.summary import WIDTH
from fedstat.inference.tables import SheetSummary, number
from fedstat.models.glm.notes import show_count

F, L = sm.families, sm.families.links
FRAME = table(seed=7)
FRAME["area"] = "of " + FRAME["site"]
APART = FRAME.assign(binary=np.where(FRAME["site"] == "S2", (FRAME["x"] > 0.3).astype(int), FRAME["binary"]))
HOLES = FRAME.assign(x=FRAME["x"].where(np.arange(len(FRAME)) % 50 > 0))
ONE_SITE = FRAME.assign(site="alone")
SITES = {"cov_type": "cluster", "cov_kwds": {"groups": "site"}}
WARD = {"cov_type": "cluster", "cov_kwds": {"groups": "ward"}}


def fit(formula="binary ~ x + z", family=None, frame=FRAME, *, roles=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fs.FederatedGLM.from_formula(
            formula,
            partition(frame),
            family=family or F.Binomial(),
            labels=["ward", "area"],
            **(roles or {}),
        )
        return model.fit(**options)


def lines(result):
    """Labels and values of the head, both sides."""
    rows = result.summary().sheets[0].rows
    return {row[at].rstrip(":"): row[at + 1] for at in (0, 2) for row in rows if row[at]}


def notes(result):
    return " ".join(result.notes)


# -- figures -------------------------------------------------------------------------------------

POOLED = {
    "logit": ("binary ~ x + z + C(g)", F.Binomial(), {}),
    "counts": ("cbind(events, n - events) ~ x", F.Binomial(), {}),
    "exposure": ("count ~ x + C(g)", F.Poisson(), {"exposure": "days"}),
    "both weights": ("gauss ~ x", F.Gaussian(), {"freq_weights": "w", "var_weights": "v"}),
    "tweedie": ("tweedie ~ x", F.Tweedie(L.Log(), var_power=1.5), {}),
    "no intercept": ("gauss ~ 0 + C(g)", F.Gaussian(), {}),
}


@pytest.mark.parametrize("case", POOLED)
def test_figures_of_the_head_are_those_of_the_stacked_table(case):
    formula, family, roles = POOLED[case]
    shown = lines(fit(formula, family, roles=roles))
    short = {"exposure": "exposure", "freq_weights": "freq", "var_weights": "var"}
    theirs = fit_pooled(formula, FRAME, family, **{short[role]: name for role, name in roles.items()})
    k = len(theirs.params)
    expected = {
        "No. Observations": f"{len(FRAME):,}",
        "Df Residuals": f"{theirs.df_resid:,.0f}",
        "Df Model": str(k - ("0 +" not in formula)),
        "Scale": number(theirs.scale),
        "Deviance": number(theirs.deviance),
        "Pearson chi2": number(theirs.pearson_chi2),
        "Pseudo R2 (CS)": number(theirs.pseudo_rsquared("cs")),
        "Log-Likelihood": number(theirs.llf, 2),
        "AIC": number(-2 * theirs.llf + 2 * k, 2),
        "BIC": number(theirs.bic_llf, 2),
        "Rows by site": f"{FRAME['site'].value_counts().min()} to {FRAME['site'].value_counts().max()}",
        "Sites": "4",
    }
    assert {label: shown[label] for label in expected} == expected


def test_family_link_roles_and_parameters_are_named():
    shown = lines(fit("over ~ z", F.NegativeBinomial(alpha=0.5)))
    assert (shown["Model Family"], shown["Alpha"]) == ("NegativeBinomial", "0.5000 (given)")
    roles = {"exposure": "n", "freq_weights": "w", "offset": "x"}
    shown = lines(fit("count ~ z", F.Poisson(), roles=roles))
    assert (shown["Exposure"], shown["Offset"], shown["Freq. Weights"]) == ("n", "x", "w")
    assert shown["Sum of Weights"] == f"{FRAME['w'].sum():,.0f}"
    shown = lines(fit("tweedie ~ x", F.Tweedie(L.Power(0.3), var_power=1.6), roles={"var_weights": "v"}))
    assert (shown["Variance Power"], shown["Link Function"]) == ("1.6", "Power (0.3)")
    assert shown["Var. Weights"] == "v"
    estimated = fit("over ~ x", F.NegativeBinomial(alpha=1.0), dispersion="ml")
    assert lines(estimated)["Alpha"] == f"{estimated.overdispersion.alpha:.4f} (estimated)"


def test_events_are_counted_where_the_response_is_binary():
    share = f"({100 * FRAME['binary'].mean():.1f} %)"
    assert lines(fit())["Events"] == f"{FRAME['binary'].sum()} {share}"
    weighted = int(FRAME["binary"] @ FRAME["w"])
    assert lines(fit(roles={"freq_weights": "w"}))["Events"].startswith(f"{weighted} (")


def test_events_of_counts_are_a_share_of_the_trials():
    expected = f"{100 * FRAME['events'].sum() / FRAME['n'].sum():.1f} %"
    assert lines(fit("cbind(events, n - events) ~ x"))["Events"] == expected
    proportions = FRAME.assign(part=FRAME["events"] / FRAME["n"])
    assert lines(fit("part ~ x", frame=proportions, roles={"var_weights": "n"}))["Events"] == expected
    pairs = FRAME.assign(part=np.resize([0.0, 0.5, 1.0, 0.5], len(FRAME)))  # 300 of 600 rows, by chance
    pairs["trials"] = np.resize([2.0, 4.0], len(FRAME))
    assert lines(fit("part ~ x", frame=pairs, roles={"var_weights": "trials"}))["Events"] == "50.0 %"


@pytest.mark.parametrize("formula", ["binary ~ x + offset(z)", "count ~ x"])
def test_no_events_where_an_offset_hides_them_or_there_are_none(formula):
    assert "Events" not in lines(fit(formula, F.Poisson() if "count" in formula else None))


@pytest.mark.parametrize(
    ("value", "shown"), [(1_234_567.0, "1,234,567"), (20_000_000.0, "20,000,000"), (12.25, "12.2500")]
)
def test_large_counts_keep_their_digits(value, shown):
    assert show_count(value) == shown


def test_an_intercept_explains_nothing_and_not_less():
    assert lines(fit("binary ~ 1"))["Pseudo R2 (CS)"] == "0.0000"


def test_degrees_of_freedom_of_the_null_model():
    assert fit().df_null == len(FRAME) - 1
    assert fit(roles={"freq_weights": "w"}).df_null == FRAME["w"].sum() - 1


@pytest.mark.parametrize("crit", ["aic", "bic", "qaic"])
@pytest.mark.parametrize("scale", [None, "X2"])
def test_information_criteria_are_those_of_statsmodels(crit, scale):
    ours = fit("count ~ x", F.Poisson(), roles={"exposure": "days"}, scale=scale)
    theirs = fit_pooled("count ~ x", FRAME, F.Poisson(), exposure="days").model.fit(scale=scale, tol=1e-12)
    for extra in (0, 1):
        expected = theirs.info_criteria(crit, scale=1.7, dk_params=extra)
        assert ours.info_criteria(crit, scale=1.7, dk_params=extra) == pytest.approx(expected, rel=1e-8)


def test_information_criteria_that_mean_nothing_are_refused():
    with pytest.raises(ModelError, match="needs a scale"):
        fit().info_criteria("qaic")
    with pytest.raises(ModelError, match="counts and proportions"):
        fit("gauss ~ x", F.Gaussian()).info_criteria("qaic", scale=1.0)
    with pytest.raises(ModelError, match="expected one of"):
        fit().info_criteria("hqic")


def test_the_trace_ends_at_the_fit():
    result = fit()
    assert result.trace["deviance"].iloc[-1] == result.deviance
    assert result.trace["step"].iloc[-1] < 1e-8
    assert list(result.trace.index) == list(range(1, len(result.trace) + 1))


# -- layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rounds": 2},
        {"local": False},
        {"frame": ONE_SITE},
        {"frame": FRAME.assign(site="Hospital of the " + FRAME["site"] * 9)},
        WARD,
        {"formula": "cbind(events, n - events) ~ x"},
        {"formula": "binary ~ bs(z, knots=(0.5, 1.5), lower_bound=-2, upper_bound=4) + C(g, Treatment('b'))"},
    ],
    ids=str,
)
def test_all_tables_are_as_wide_as_a_page(options):
    text = SheetSummary(fit(**options).summary().sheets).as_text()
    assert {len(line) for line in text.splitlines()} == {WIDTH}


def test_rows_are_called_rows():
    result = fit(frame=HOLES)
    assert "entities" not in result.summary().as_text().lower()
    assert repr(result) == (
        "<Federated GLM results: binary, 3 coefficients, 588 rows at 4 sites; see .summary()>"
    )
    assert "1 coefficient, 600 rows at 1 site;" in repr(fit("binary ~ 1", frame=ONE_SITE))
    assert "Rows left out because they lack one of the model's columns: 12." in notes(result)


def test_the_table_of_sites_counts_rows_and_own_fits():
    result = fit("binary ~ x + z + C(g)", frame=HOLES)
    sheet = result.summary().sheets[-1]
    assert sheet.headers == ("site", "rows", "left out", "own fit")
    complete, known = HOLES.dropna(), result.site_estimates.notna().sum(axis=1)
    for name, rows, missing, own in sheet.rows:
        at_site = HOLES["site"] == name
        count = int((complete["site"] == name).sum())
        assert rows == f"{count}"
        assert missing == f"{100 * (1 - count / at_site.sum()):.2f} %"
        assert own == ("yes" if known[name] == 5 else f"{known[name]} of 5")
    assert [row[3] for row in sheet.rows].count("4 of 5") == 1  # S1 has no level c


def test_html_is_well_formed():
    root = ET.fromstring(fit("count > 1 ~ x").summary().as_html())
    cells = [cell.text for cell in root.iter("td")]
    assert "count > 1" in cells and "Rows by site:" in cells
    assert len(root.findall(".//table")) == 3


def test_coefficients_are_drawn_on_the_scale_of_the_link():
    assert fit().plot_coefficients().get_xlabel() == "effect on the log odds of binary"
    poisson = fit("count ~ x", F.Poisson()).plot_coefficients(intercept=True)
    assert poisson.get_xlabel() == "effect on the log mean of count"
    assert len(poisson.get_yticks()) == 2
    probit = fit("binary ~ x", F.Binomial(L.Probit())).plot_coefficients()
    assert probit.get_xlabel() == "effect on the linear predictor of binary"


def test_pooled_and_federated_stand_side_by_side():
    pooled = fit_pooled("binary ~ x + z", FRAME, F.Binomial())
    cells = fs.compare({"sites": fit(), "pooled": pooled}).to_frame()
    assert (cells["sites"] == cells["pooled"])[:-2].all()  # all but rounds and traffic
    assert "R-squared" not in cells.index.get_level_values("name")


# -- notes ---------------------------------------------------------------------------------------


def test_a_plain_fit_of_like_sites_needs_no_note_but_that_on_masks():
    result = fit()
    setting, note = result.notes
    assert setting == ONE_PROCESS_NOTE
    assert note.startswith("Sums over rows were masked over 4 sites") and "except the own fits" in note
    assert lines(result)["Sums"] == "masked over 4 sites"
    _, without = fit(local=False).notes
    assert "no single site's contribution. This holds" in without
    assert "except the own fits and the sums that transforms" in notes(fit("binary ~ center(x)"))


def test_sums_unmasked_are_reported():
    result = fit(masked=False)
    clear = "Sums were not masked: the coordinator saw each site's part."
    assert result.notes == [ONE_PROCESS_NOTE, clear]
    assert lines(result)["Sums"] == "unmasked"
    two = fit(frame=FRAME.assign(site=np.where(FRAME["site"] == "S3", "S3", "other")))
    assert "masks over two sites hide neither from the other" in notes(two)


def test_one_round_reveals_the_step_that_remains():
    """Newton's step at the estimate, in standard errors, from the rows."""
    result = fit(rounds=1)
    X = np.asarray(model_matrix("x + z", FRAME))
    mean = 1.0 / (1.0 + np.exp(-X @ result.params.to_numpy()))
    score, information = X.T @ (FRAME["binary"] - mean), (X.T * (mean * (1 - mean))) @ X
    length = np.sqrt(score @ np.linalg.solve(information, score))
    assert f"the next step would be {number(length)} standard errors long" in notes(result)
    assert "stops after one Newton step" in notes(result)
    assert lines(result)["Converged"] == "not sought"
    assert lines(result)["Method"] == "1 Newton step on site sums"
    assert "after 2 Newton steps" in notes(fit(rounds=2))


def test_one_round_of_the_linear_model_is_exact_and_says_no_less():
    result = fit("gauss ~ x + z", F.Gaussian(), rounds=1)
    theirs = fit_pooled("gauss ~ x + z", FRAME, F.Gaussian())
    np.testing.assert_allclose(result.params, theirs.params, rtol=1e-9)
    assert lines(result)["Converged"] == "yes"
    assert "stops after" not in notes(result)


def test_sites_that_differ_are_noted_with_the_test_of_the_head():
    shifted = FRAME.assign(gauss=FRAME["gauss"] + 2.0 * (FRAME["site"] == "S3") * FRAME["x"])
    result = fit("gauss ~ x", F.Gaussian(), shifted)
    joint = result.heterogeneity.joint
    shown = f"F({joint.df}, {joint.df_denom:.0f}) = {joint.statistic:.2f}, p < 0.001"
    assert lines(result)["Heterogeneity"] == shown
    assert f"The sites differ: test of equal coefficients (own dispersions) {shown}" in notes(result)
    assert "I2 is large for" in notes(result)


def test_one_coefficient_that_differs_is_noted_where_all_together_do_not():
    result = fit("gauss ~ x", F.Gaussian())
    assert result.heterogeneity.flagged == ("x",) and result.heterogeneity.joint.pvalue > 0.05
    assert "by Cochran's Q, though not by the test of all coefficients. I2 is large for x (" in notes(result)


def test_the_joint_test_is_that_of_rows_from_all_sites():
    """Rao's statistic of one vector of coefficients per site, at the pooled estimate, by numpy."""
    result = fit()
    X, y = np.asarray(model_matrix("x + z", FRAME)), FRAME["binary"].to_numpy()
    mean = np.asarray(fit_pooled("binary ~ x + z", FRAME, F.Binomial()).fittedvalues)
    statistic = 0.0
    for site in FRAME["site"].unique():
        own = (FRAME["site"] == site).to_numpy()
        score = X[own].T @ (y - mean)[own]
        information = (X[own].T * (mean * (1 - mean))[own]) @ X[own]
        statistic += score @ np.linalg.solve(information, score)
    p = stats.chi2.sf(statistic, 9)
    assert lines(result)["Heterogeneity"] == f"chi2(9) = {statistic:.2f}, p = {p:.3f}"


def test_sites_without_a_fit_of_their_own_are_named():
    result = fit("binary ~ x", frame=APART)
    assert "No fit of their own: S2 (outcomes separated)." in notes(result)
    assert lines(result)["Own fits"] == "3 of 4 sites"


def test_without_own_fits_the_score_test_remains():
    plain, without = fit(masked=False), fit(local=False, masked=False)
    assert lines(without)["Own fits"] == "not requested (local=False)"
    assert lines(without)["Heterogeneity"] == lines(plain)["Heterogeneity"]
    assert without.heterogeneity.joint.statistic == pytest.approx(plain.heterogeneity.joint.statistic)
    np.testing.assert_allclose(
        without.heterogeneity.left_out, plain.heterogeneity.left_out, rtol=1e-6, atol=1e-9
    )
    assert without.heterogeneity.to_frame()["Q"].isna().all()
    assert without.site_estimates.isna().all(axis=None)
    assert "not requested" in without.heterogeneity.summary().as_text()


def test_one_site_is_not_compared():
    result = fit(frame=ONE_SITE)
    theirs = fit_pooled("binary ~ x + z", FRAME, F.Binomial())
    np.testing.assert_allclose(result.params, theirs.params, rtol=1e-8)
    assert lines(result)["Heterogeneity"] == "not defined (one site)"
    assert lines(result)["Own fits"] == "1 of 1 site"
    assert result.notes == [ONE_PROCESS_NOTE]
    for statement in (lambda: result.heterogeneity, lambda: result.plot_forest("x")):
        with pytest.raises(NotAvailableError, match="compares sites, and this fit has one"):
            statement()


def test_sites_that_share_no_coefficient_are_not_compared():
    assert lines(fit("gauss ~ 0 + C(site)", F.Gaussian()))["Heterogeneity"] == "not defined"


def test_a_column_far_from_zero_does_not_hinder_the_summary():
    result = fit("binary ~ year", frame=FRAME.assign(year=1e9 + FRAME["z"]))
    assert "The sites are not compared: no heterogeneity: the means of these columns" in notes(result)
    assert lines(result)["Heterogeneity"] == "not defined"
    with pytest.raises(NotAvailableError, match=r"are too large for their spread: year\. Center them"):
        _ = result.heterogeneity


def test_clusters_are_named_and_few_of_them_noted():
    wards, sites = fit(**WARD), fit(**SITES)
    assert lines(wards)["Covariance Type"] == "cluster (ward, CR2)"
    assert "Standard errors are for clusters by 'ward'." in notes(wards)
    assert "FEW CLUSTERS" not in str(wards.summary())
    top = " ".join(str(sites.summary()).split("Federated")[0].split())
    assert top.startswith("*** FEW CLUSTERS: ") and "effective clusters of 4 by 'site'" in top


def test_the_test_of_heterogeneity_is_no_verdict_on_dependent_rows():
    shifted = FRAME.assign(gauss=FRAME["gauss"] + 2.0 * (FRAME["site"] == "S3"))
    assert "The sites differ" in notes(fit("gauss ~ x", F.Gaussian(), shifted))
    clustered = notes(fit("gauss ~ x", F.Gaussian(), shifted, **WARD))
    assert "The sites differ" not in clustered
    assert "The test of heterogeneity does not allow for them." in clustered


def test_a_survey_has_a_pseudo_likelihood():
    survey = {"cov_type": "survey", "cov_kwds": {"clusters": "ward", "strata": "area"}}
    result = fit(roles={"freq_weights": "w"}, **survey)
    assert lines(result)["Covariance Type"] == "survey (ward in area)"
    assert "pseudo-likelihood" in notes(result)
    assert "clusters by 'ward' in strata by 'area'" in notes(result)
    assert "pseudo-likelihood" not in notes(fit(roles={"freq_weights": "w"}))


def test_rows_of_weight_zero_are_not_said_to_lack_a_column():
    frame = HOLES.assign(w=FRAME["w"].where(np.arange(len(FRAME)) % 20 > 0, 0.0))
    result = fit(frame=frame, roles={"freq_weights": "w"})
    lacking = int((frame["x"].isna() & (frame["w"] > 0)).sum())
    assert result.nobs == int((frame["x"].notna() & (frame["w"] > 0)).sum())
    assert (f"model's columns: {lacking}." in notes(result)) == (lacking > 0)


def test_a_quasi_likelihood_is_called_one():
    assert "extended quasi-likelihood" in notes(
        fit("gamma ~ x", F.Tweedie(L.Log(), var_power=1.6, eql=True), frame=FRAME)
    )


def test_not_converged_comes_first():
    result = fit("count ~ x + z", F.Poisson(), maxiter=1)
    assert result.summary().as_text().startswith("*** NOT CONVERGED")
    assert lines(result)["Converged"] == "NO"
    assert "NOT CONVERGED" in repr(result)


# -- what stays at the sites ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["fittedvalues", "mu", "resid", "resid_response", "resid_pearson", "resid_deviance"]
)
def test_one_value_per_row_is_not_available(name):
    result = fit()
    with pytest.raises(NotAvailableError, match=r"stay at the sites.*evaluate\(\).*predict\(frame\)"):
        getattr(result, name)
    assert not hasattr(result, name)


def test_prediction_needs_a_table_of_rows():
    result = fit("count ~ x", F.Poisson(), roles={"exposure": "days"})
    for predict in (result.predict, result.get_prediction):
        with pytest.raises(NotAvailableError, match="needs a frame"):
            predict()
        with pytest.raises(ModelError, match=r"expected a table of rows.*received fedstat Client"):
            predict(partition(FRAME))
    with pytest.raises(ModelError, match="which"):
        result.predict(FRAME, "median")


@pytest.mark.parametrize(
    ("days", "complaint"),
    [
        (None, "lack the column 'days' (the exposure of the model"),
        (0.0, "600 exposures are not positive"),
        ("many", "holds categories"),
    ],
)
def test_prediction_names_what_is_wrong_with_the_exposure(days, complaint):
    result = fit("count ~ x", F.Poisson(), roles={"exposure": "days"})
    new = FRAME.drop(columns="days") if days is None else FRAME.assign(days=days)
    with pytest.raises(DesignError, match=re.escape(complaint)):
        result.predict(new)


def test_a_missing_exposure_is_a_missing_prediction():
    result = fit("count ~ x", F.Poisson(), roles={"exposure": "days"})
    new = FRAME.assign(days=FRAME["days"].where(FRAME.index != 3)).head(6)
    assert result.predict(new).isna().tolist() == [False, False, False, True, False, False]
    assert result.get_prediction(new).summary_frame()["mean"].isna().sum() == 1
