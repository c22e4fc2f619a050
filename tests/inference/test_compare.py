"""The table of several fits."""

import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import DataWarning, ModelError, NotAvailableError
from fedstat.inference.compare import compare


@pytest.fixture
def bare(make):
    return make(cov=None, converged=False, reasons={"cov_params": "averaging has none"})


def test_cells_hold_coefficient_error_and_star(result, reference):
    frame = compare({"VFEM": result}, stars=(0.05, 0.001), digits=3).to_frame()
    for (_, name), cell in frame["VFEM"].iloc[:7].items():
        p = reference.pvalues[name]
        stars = "*" * int((p < 0.05) * 1 + (p < 0.001) * 1)
        assert cell == f"{reference.params[name]:.3f} ({reference.bse[name]:.3f}){stars}"


def test_rows_are_grouped_by_site_and_blank_where_missing(result, restricted):
    frame = compare({"small": restricted, "VFEM": result}).to_frame()
    sites = list(frame.index.get_level_values("site")[:7])
    assert sites == ["", *["Register"] * 2, *["Credit Agency"] * 2, *["Judicial_Organ"] * 2]
    assert frame.loc[("Judicial_Organ", "C(race)[T.x-1]"), "small"] == ""
    assert frame.loc[("", "Rounds")].tolist() == ["", "65"]
    assert frame.loc[("", "No. Observations")].tolist() == ["400", "400"]
    assert frame.loc[("", "Traffic"), "VFEM"] == "1.2 MB"


def test_pooled_statsmodels_fit_is_shown_too(result, reference):
    frame = compare({"VFEM": result, "pooled": reference}).to_frame()
    rows = frame.iloc[:7]
    assert (rows["VFEM"] == rows["pooled"]).all()
    assert rows.index.get_level_values("site")[1] == "Judicial_Organ"


def test_without_standard_errors_there_is_a_footnote(result, bare, reference):
    table = compare({"VFEM": result, "Averaged": bare})
    assert table.to_frame().loc[("Credit Agency", "x1"), "Averaged"] == f"{reference.params['x1']:.4f}"
    assert any("Averaged: " in note and "averaging has none" in note for note in table.notes)
    assert table.notes[0] == "Averaged has NOT CONVERGED."


def test_fits_that_lack_errors_for_one_reason_share_a_footnote(result, bare, make):
    other = make(cov=None, reasons={"cov_params": "another reason"})
    table = compare({"A": bare, "B": result, "C": bare, "D": other})
    assert [note.split(":")[0] for note in table.notes[-2:]] == ["A, C", "D"]


def test_columns_and_their_figures_stand_in_the_order_given(result, bare, reference):
    for order in (("VFEM", "Averaged", "pooled"), ("pooled", "VFEM", "Averaged")):
        fits = {"VFEM": result, "Averaged": bare, "pooled": reference}
        table = compare({name: fits[name] for name in order})
        assert tuple(table.to_frame().columns) == order
        heads = next(line for line in str(table).splitlines() if "VFEM" in line).split()
        assert tuple(heads[-3:]) == order
        assert len(set(table.to_frame().loc[("", "Log-Likelihood")])) == 1


@pytest.mark.parametrize("heading", ["site", "name", 1])
def test_a_heading_may_be_the_name_of_an_index(result, bare, heading):
    table, plain = compare({heading: result, "other": bare}), compare({"VFEM": result, "other": bare})
    frame = table.to_frame()
    assert frame.columns.tolist() == [str(heading), "other"] and frame.index.names == ["site", "name"]
    assert (frame.to_numpy() == plain.to_frame().to_numpy()).all()
    heads = next(line for line in str(table).splitlines() if "other" in line).split()
    assert heads == ["site", "name", str(heading), "other"]
    assert all(str(heading) in text for text in (table.as_html(), table.as_latex(), table.as_csv()))


def test_auc_is_a_row_where_a_fit_has_one(make):
    plain, evaluated, none, refusing = (make() for _ in range(4))
    evaluated.auc, none.auc = 0.91234567, None
    refusing.__class__ = type("Refusing", (type(refusing),), {"auc": property(refuse)})
    assert ("", "AUC") not in compare({"plain": plain, "none": none, "refusing": refusing}).to_frame().index
    frame = compare({"plain": plain, "evaluated": evaluated, "none": none, "refusing": refusing}).to_frame()
    assert frame.loc[("", "AUC")].tolist() == ["", "0.9123", "", ""]
    names = frame.index.get_level_values("name").tolist()
    assert names.index("BIC") + 1 == names.index("AUC") == names.index("Rounds") - 1


def refuse(self):
    raise NotAvailableError("no AUC: call evaluate() first")


def test_brackets_stand_in_line(result):
    lines = [line for line in str(compare({"VFEM": result})).splitlines() if "(0." in line]
    assert len({line.rindex(")") for line in lines}) == 1
    assert len(lines) == 7


def test_no_stars_on_request(result):
    table = compare({"VFEM": result}, stars=())
    assert "*" not in str(table)
    assert table.notes == ("Standard errors in brackets.",)


def test_renderings(result):
    table = compare({"V_1": result})
    ET.fromstring(table._repr_html_())
    assert r"V\_1" in table.as_latex()
    assert "No. Observations" in table.as_csv()
    assert repr(table) == str(table) == table.as_text()


def test_nothing_and_no_level_are_refused(result):
    with pytest.raises(ModelError, match="at least one result"):
        compare({})
    with pytest.raises(ModelError, match=r"expected a mapping of headings to fits.*received list"):
        compare([result])
    with pytest.raises(ModelError, match=r"named params under 'tidy'.*received DataFrame$"):
        compare({"VFEM": result, "tidy": result.tidy()})
    with pytest.raises(ModelError, match="between 0 and 1, received \\(5,\\)"):
        compare({"VFEM": result}, stars=(5,))


CRITERIA = {
    "FederatedOLS": ("y ~ x", smf.ols, {}),
    "GLORE": ("e ~ x", smf.logit, {}),
    "FederatedGLM": ("k ~ x", smf.poisson, {"family": sm.families.Poisson()}),
    "FederatedMultinomial": ("k ~ x", smf.mnlogit, {}),
    "FederatedOrdinal": ("k ~ x", None, {}),
    "FederatedCox": ("Surv(t, e) ~ x", None, {}),
}


@pytest.mark.parametrize("family", CRITERIA)
def test_information_criteria_are_below_the_likelihood_and_need_the_same_rows(family):
    rng, (formula, pooled, settings) = np.random.default_rng(8), CRITERIA[family]
    frame = pd.DataFrame({"site": np.resize(list("abc"), 240), "x": rng.normal(size=240)})
    frame["y"], frame["e"] = rng.normal(size=240), rng.integers(0, 2, 240)
    frame["k"], frame["t"] = rng.integers(0, 3, 240), rng.integers(1, 20, 240)
    partition = fs.ClientPartition.from_frame(frame, by="site")
    fit = getattr(fs, family).from_formula(formula, partition, **settings).fit()
    parameters, n = len(fit.params), fit.events if family == "FederatedCox" else 240
    aic = 2.0 * parameters - 2.0 * fit.llf
    right = [f"{aic:.2f}", f"{aic + (np.log(n) - 2.0) * parameters:.2f}"]
    if pooled is not None:
        found = pooled(formula, frame).fit(**({} if family == "FederatedOLS" else {"disp": 0}))
        right = [f"{found.aic:.2f}", f"{found.bic:.2f}"]
    shown = fs.compare({"fit": fit}).bottom.droplevel("site")["fit"]
    assert shown[["AIC", "BIC"]].str.replace(",", "").tolist() == right
    fewer = fs.ClientPartition.from_frame(frame.assign(x=frame["x"].where(frame.index % 5 > 0)), by="site")
    with pytest.warns(fs.errors.DataWarning):
        other = getattr(fs, family).from_formula(formula, fewer, **settings).fit()
    with pytest.warns(DataWarning, match="fits have different rows"):
        different = fs.compare({"a": fit, "b": other})
    assert "fits have different rows" in " ".join(different.as_text().split())
    assert "fits have different rows" not in fs.compare({"a": fit, "b": fit}).as_text()


def test_the_criterion_of_a_pooled_glm_is_that_of_the_likelihood():
    rng = np.random.default_rng(9)
    frame = pd.DataFrame({"site": np.resize(list("abc"), 90), "x": rng.normal(size=90)})
    frame["e"] = rng.integers(0, 2, 90)
    ours = fs.GLORE.from_formula("e ~ x", fs.ClientPartition.from_frame(frame, by="site")).fit()
    pooled = smf.glm("e ~ x", frame, family=sm.families.Binomial()).fit()
    shown = fs.compare({"ours": ours, "pooled": pooled}).bottom.droplevel("site")
    for name in ("Log-Likelihood", "AIC", "BIC"):
        assert shown.loc[name, "ours"] == shown.loc[name, "pooled"] != ""


def patients():
    return fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")


def test_exponentials_have_intervals_instead_of_errors():
    fit = fs.GLORE.from_formula("died ~ age + C(arm)", patients()).fit()
    table = smf.glm("died ~ age + C(arm)", fs.datasets.make_survival(), family=sm.families.Binomial()).fit(
        tol=1e-13
    )
    found = fs.compare({"ours": fit, "pooled": table}, exponentiate=True)
    cells = found.coefficients.loc[("", "age")]
    low, high = np.exp(table.conf_int().loc["age"])
    assert cells["ours"] == f"{np.exp(table.params['age']):.4f} ({low:.4f}, {high:.4f})*" == cells["pooled"]
    assert "Exponentials of coefficients, 95 % intervals in brackets" in found.as_text()
    rows = found.estimates.set_index(["model", "term"]).loc[("ours", "age")]
    np.testing.assert_allclose(rows, [np.exp(table.params["age"]), low, high], rtol=1e-6)


def test_coefficients_are_renamed_in_all_fits_and_drawn():
    small = fs.GLORE.from_formula("died ~ age + C(arm)", patients()).fit()
    large = fs.GLORE.from_formula("died ~ age + C(arm) + C(stage)", patients()).fit()
    table = fs.compare(
        {"small": small, "large": large}, rename={"C(arm)[T.surgery]": "surgery"}, exponentiate=True
    )
    assert table.coefficients.index.get_level_values("name")[:3].tolist() == ["Intercept", "age", "surgery"]
    ax = table.plot()
    labels = [one.get_text() for one in ax.get_yticklabels()]
    assert labels == ["age", "surgery", "C(stage)[T.II]", "C(stage)[T.III]"]
    assert [one.get_text() for one in ax.get_legend().get_texts()] == ["small", "large"]
    assert table.plot(intercept=True).get_yticklabels()[0].get_text() == "Intercept"
    with pytest.raises(ModelError, match="no fit has the coefficient 'sugery'"):
        fs.compare({"small": small}, rename={"sugery": "x"})
    with pytest.raises(ModelError, match="the same label"):
        fs.compare({"small": small}, rename={"age": "Intercept"})


def test_fits_of_different_rows_are_warned_about(bare):
    whole = fs.GLORE.from_formula("died ~ age", patients()).fit()
    part = fs.GLORE.from_formula("died ~ age", patients(), subset="arm == 'drugs'").fit()
    with pytest.warns(DataWarning, match="different rows, so that log-likelihoods"):
        fs.compare({"all": whole, "drugs": part})
    with pytest.raises(ModelError, match="no fit has coefficients with intervals"):
        compare({"A": bare}).plot()
