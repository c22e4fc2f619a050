"""Results of a selection: report, summary, stability, plots, prediction, file."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pictures import WIDTHS, faults, page
from vglm_study import COLUMNS, make_model, make_partition, make_table, pooled_columns

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.models.vglm.notes import APART_CALLED, APART_MISSED, MISSED, WEAK_MISSED
from fedstat.models.vglm.plots import FAINT

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TABLE = make_table()


@pytest.fixture(scope="module")
def lasso():
    return make_model(TABLE, penalty="lasso").fit(
        folds=8, draws=15, seed=1, n_lambdas=25, inference="conditional"
    )


@pytest.fixture(scope="module")
def scad():
    return make_model(TABLE, penalty="scad").fit(n_lambdas=25, inference="conditional")


def test_the_report_reveals_what_was_selected_when_and_what_it_is_worth(lasso):
    report = lasso.selection_report().set_index("term")
    names = list(report.index[report["selected"]])
    ols = sm.OLS(TABLE["y"], sm.add_constant(pooled_columns(TABLE, names))).fit()
    np.testing.assert_allclose(report.loc[names, "refit"], ols.params[1:], rtol=1e-6)
    np.testing.assert_allclose(report.loc[names, "std_err"], ols.bse[1:], rtol=1e-7)
    np.testing.assert_allclose(report.loc[names, "z"], ols.tvalues[1:], rtol=1e-6)
    assert report.loc[~report["selected"], ["refit", "std_err", "z", "p"]].isna().all(axis=None)
    assert (report["coef"] == lasso.params[1:].to_numpy()).all()
    assert report["site"].to_dict()["x3"] == "Clinic"
    first = lasso.path_params.iloc[:, 1:].ne(0.0).idxmax()
    assert (report["lambda_entry"] == first[report.index]).all()
    assert report.loc[report["order"] == 1.0, "lambda_entry"].item() == first.max()
    assert report["frequency"].between(0.0, 1.0).all()
    assert report.loc["x0", "frequency"] == 1.0


def test_the_lasso_claims_no_standard_errors_for_shrunken_estimates(lasso, scad):
    with pytest.raises(NotAvailableError, match="shrinks"):
        _ = lasso.bse
    assert lasso.refit.bse.notna().all()
    np.testing.assert_allclose(scad.bse[scad.refit.params.index], scad.refit.bse)


@pytest.mark.parametrize("name", ["lasso", "scad"])
def test_the_summary_says_that_it_is_conditional(name, request):
    result = request.getfixturevalue(name)
    text = str(result.summary())
    assert any("naive intervals, conditional on selection" in line for line in text.splitlines())
    for naive in (result, result.refit):
        banner = " ".join(naive.summary().headlines)
        assert "Naive intervals (conditional on the selected model)" in banner
        assert f"{MISSED:.2f} to {WEAK_MISSED:.2f} of the 95 % intervals missed" in banner
    assert ("(refit on the selected columns)" in text) == (name == "lasso")
    assert "They ignore the search among columns" in text.replace("\n    ", " ")
    # Where intervals after a selection are printed, how far they can be trusted is as well.
    for printed in (text, str(result.refit.summary())):
        assert f"{MISSED:.2f} of the 95 % intervals after BIC missed" in " ".join(printed.split())
        assert f"{APART_MISSED:.2f} and {APART_CALLED:.2f}" in " ".join(printed.split())
    assert "Selected:" in text and "KKT violation:" in text
    assert result.summary().as_html()
    full = make_model(TABLE).fit(lam=0.0)
    assert "onditional on selection" not in str(full.summary())
    assert not full.summary().headlines


def test_stability_keeps_its_bound(lasso):
    s = lasso.selection
    stable, bound = lasso.stable(0.9, lam=s.lambdas[5])
    largest = s.frequencies[:6].max(axis=0)
    assert set(stable["term"]) == set(lasso.params.index[1:][largest >= 0.9])
    assert bound == pytest.approx(s.numbers[5] ** 2 / (0.8 * 12))
    # A half that selects a column at one lambda or another counts it once.
    assert largest.sum() <= s.numbers[5] <= 12
    assert (np.diff(s.numbers) >= 0.0).all()
    assert s.numbers[0] >= s.frequencies[0].sum()
    assert len(lasso.stable()[0]) >= len(stable)
    with pytest.raises(ModelError, match="threshold"):
        lasso.stable(0.5)
    with pytest.raises(NotAvailableError, match="draws"):
        make_model(TABLE).fit(lam=0.1).stable()
    with pytest.raises(ModelError, match="6 folds or more"):
        make_model(TABLE).fit(draws=5)


def drawn_columns(ax, L):
    """Lines of columns: those of a legend and of the choice have other lengths."""
    return [line for line in ax.lines if len(line.get_xdata()) == L]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_path_is_drawn_with_names_counts_and_the_choice(lasso, width):
    ax = lasso.plot_path(page(width, 3.6))
    lines, sd = drawn_columns(ax, 25), pooled_columns(TABLE).std(axis=0)
    for line, (name, values), one in zip(lines, lasso.path_params.iloc[:, 1:].items(), sd, strict=True):
        np.testing.assert_allclose(line.get_ydata(), values * one, rtol=1e-8, err_msg=name)
    assert ax.get_ylabel().replace("\n", " ") == "coefficient per standard deviation"
    selected = lasso.params.index[1:][lasso.params.iloc[1:] != 0.0]
    assert {line.get_alpha() for line in lines} == {1.0, FAINT}
    assert [line.get_alpha() == 1.0 for line in lines] == [n in selected for n in lasso.params.index[1:]]
    texts = [text.get_text() for text in ax.texts]
    assert set(selected) <= set(texts)
    assert f"chosen: {lasso.lam:.3g}\n{len(selected)} selected" in texts
    (top,) = ax.child_axes
    at, counts = top.get_xticks(), [int(label.get_text()) for label in top.get_xticklabels()]
    nonzero = (lasso.path_params.iloc[:, 1:] != 0.0).sum(axis=1)
    assert counts == nonzero[at].tolist() and counts[0] == 0 and len(counts) >= 3
    assert ax.get_xlim()[0] > ax.get_xlim()[1]
    assert not faults(ax.figure)


def test_a_path_from_a_file_has_shares_of_the_largest_size(lasso, tmp_path):
    lasso.save(tmp_path / "path.fedstat")
    ax = fs.load(tmp_path / "path.fedstat").plot_path()
    sizes = [np.abs(line.get_ydata()).max() for line in drawn_columns(ax, 25)]
    np.testing.assert_allclose([size for size in sizes if size], 1.0)
    assert ax.get_ylabel() == "share of its largest size"


def test_standardized_coefficients_of_a_selection(lasso):
    ax = lasso.refit.plot_coefficients(standardized=True, selected=True)
    sd = pd.Series(pooled_columns(TABLE).std(axis=0), lasso.params.index[1:])
    drawn = sorted(x for line in ax.lines for x in line.get_xdata() if line.get_marker() == "o")
    refit = lasso.refit.params.iloc[1:]
    np.testing.assert_allclose(drawn, sorted(refit * sd[refit.index]), rtol=1e-8)
    assert ax.get_xlabel().replace("\n", " ") == "effect on the mean of y, per standard deviation"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_criterion_and_stability_are_labeled(lasso, width):
    ax = lasso.plot_criterion(ax=page(width, 3.2))
    assert ax.get_ylabel() == "BIC" and ax.get_xscale() == "log"
    assert f"chosen: {lasso.lam:.3g}" in ax.texts[0].get_text() and not faults(ax.figure)
    assert lasso.plot_criterion("aic").get_ylabel() == "AIC"
    ax = lasso.plot_stability(0.8, page(width, 3.6))
    stable = lasso.stable(0.8)[0]["term"]
    named = {text.get_text() for text in ax.texts} & set(lasso.params.index)
    assert named == set(stable) and 3 <= len(stable) < 12
    assert "threshold 0.8" in [text.get_text() for text in ax.texts] and not faults(ax.figure)
    drawn = [line.get_ydata() for line in drawn_columns(ax, 25)]
    np.testing.assert_allclose(drawn, lasso.selection.frequencies.T)
    with pytest.raises(ModelError, match="expected one of bic"):
        lasso.plot_criterion("cv")


def test_predictions_are_those_of_the_coefficients(scad):
    X = np.column_stack([np.ones(300), pooled_columns(TABLE, scad.params.index[1:])])
    np.testing.assert_allclose(scad.predict(), X @ scad.params, rtol=1e-10)
    new = make_table(30, seed=5)
    new.loc[3, ["x3", "x4", "f"]] = np.nan
    partition = make_partition(new, new_data=True)
    predicted = scad.predict(partition)
    assert predicted.isna().to_numpy().nonzero()[0].tolist() == [3]
    fitted = scad.params["Intercept"] + (pooled_columns(new, scad.params.index[1:]) @ scad.params[1:])
    np.testing.assert_allclose(predicted.drop(3), np.delete(fitted, 3), rtol=1e-10)
    with pytest.raises(ModelError, match="lacks the site Registry"):
        scad.predict(
            make_partition(new, {k: v for k, v in COLUMNS.items() if k != "Registry"}, new_data=True)
        )


@pytest.mark.parametrize("name", ["lasso", "scad"])
def test_a_file_holds_it_all(name, request, tmp_path):
    result = request.getfixturevalue(name)
    result.save(tmp_path / "fit")
    again = fs.load(tmp_path / "fit")
    pd.testing.assert_series_equal(again.params, result.params)
    pd.testing.assert_frame_equal(again.selection_report(), result.selection_report())
    pd.testing.assert_frame_equal(again.path, result.path)
    assert str(again.summary()) == str(result.summary())
    new = make_partition(make_table(20, seed=6), new_data=True)
    pd.testing.assert_series_equal(again.predict(new), result.predict(new))
    with pytest.raises(NotAvailableError, match="give a partition"):
        again.predict()
