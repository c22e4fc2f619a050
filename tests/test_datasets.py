"""Simulated data: what was promised about them, checked on the draws."""

from functools import reduce
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

from fedstat import datasets
from fedstat.errors import ModelError

PUBLISHED_RECORDS = {
    "Credit Agency": (12, 89_170),
    "Market Supervision": (3, 20_593),
    "Judicial Organ": (6, 11_551),
    "Industry and Commerce Bureau": (9, 164_695),
    "Law-enforcement Agency": (5, 11_169),
}


@pytest.fixture(scope="module")
def sme():
    return datasets.make_sme()


@pytest.fixture(scope="module")
def sme_mar():
    return datasets.make_sme(60_000, seed=3, missing="mar")


def covariates(data):
    return data.complete[list(data.truth.index)]


def seen(data, site):
    return data.complete[data.key].isin(data.frames[site][data.key]).to_numpy()


def logit(outcome, **columns):
    X = sm.add_constant(pd.DataFrame(columns).reset_index(drop=True))
    return sm.Logit(outcome.astype(float), X).fit(disp=0)


def assert_estimates_are_the_truth(data):
    fit = sm.OLS(data.complete[data.response], sm.add_constant(covariates(data))).fit()
    z = (fit.params - pd.concat([pd.Series({"const": data.intercept}), data.truth["coef"]])) / fit.bse
    assert abs(z).max() < 4
    assert (z**2).mean() < 2
    np.testing.assert_allclose(fit.mse_resid, data.sigma2, rtol=4 * np.sqrt(2 / fit.df_resid))
    return fit


# ---------------------------------------------------------------- the enterprise study


def test_sme_has_the_published_layout(sme):
    assert list(sme.frames) == ["Platform", *PUBLISHED_RECORDS]
    assert list(sme.frames["Platform"]) == ["enterprise_id", "NPGR"]
    assert len(sme.frames["Platform"]) == 166_207
    for site, (p, n_records) in PUBLISHED_RECORDS.items():
        assert sme.frames[site].shape == (n_records, p + 1)
        assert list(sme.truth.index[sme.truth["client"] == site]) == list(sme.frames[site])[1:]


def test_sme_frames_are_cut_from_the_complete_table(sme):
    complete = sme.complete.set_index(sme.key)
    for frame in sme.frames.values():
        assert frame[sme.key].is_unique
        rows = frame.set_index(sme.key)
        pd.testing.assert_frame_equal(rows, complete.loc[rows.index, list(rows)])


@pytest.mark.parametrize("n, n_complete", [(166_207, 96), (60_000, 35), (200, 0)])
@pytest.mark.parametrize("missing", ["mcar", "mar"])
def test_sme_has_the_published_number_of_complete_enterprises(n, n_complete, missing):
    data = datasets.make_sme(n, seed=1, missing=missing)
    ids = (set(frame[data.key]) for frame in data.frames.values())
    assert len(reduce(set.intersection, ids)) == n_complete


def test_sme_truth_is_the_cc_vfem_column(sme):
    coef = sme.truth["coef"]
    assert coef[["EMP", "INVE", "ABNOPE", "Fines"]].tolist() == [-0.0108, 2.6519, -2.4193, 0.1402]
    pd.testing.assert_series_equal(coef, datasets.load_sme_published()["cc_vfem_coef"], check_names=False)


def test_sme_regression_on_complete_data_recovers_the_truth(sme):
    fit = assert_estimates_are_the_truth(sme)
    np.testing.assert_allclose(fit.rsquared, 0.757, atol=0.003)


def mean_absolute_correlations(data, correlation):
    same = data.truth["client"].to_numpy()[:, None] == data.truth["client"].to_numpy()
    off_diagonal = ~np.eye(len(same), dtype=bool)
    values = abs(np.asarray(correlation))
    return values[same & off_diagonal].mean(), values[~same].mean()


@pytest.mark.parametrize("between", [0.0, 0.03])
def test_sme_correlations_within_and_between_sites(between):
    data = datasets.make_sme(50_000, seed=2, between=between)
    np.testing.assert_allclose(mean_absolute_correlations(data, data.covariance), [0.28, between], atol=1e-12)
    np.testing.assert_allclose(covariates(data).cov(), data.covariance, atol=0.03)
    assert np.linalg.eigvalsh(data.covariance).min() > 0.1
    assert covariates(data).mean().abs().max() < 0.03


def test_sme_skew_is_winsorized_and_standardized():
    data = datasets.make_sme(50_000, seed=4, skew=True, between=0.03)
    X = covariates(data)
    assert X.skew().min() > 1.5
    assert X.mean().abs().max() < 0.03
    np.testing.assert_allclose(X.cov(), data.covariance, atol=0.04)
    for bound in (X.to_numpy().min(), X.to_numpy().max()):
        np.testing.assert_allclose(X.eq(bound).mean(), 0.01, atol=0.003)
    assert_estimates_are_the_truth(data)


def test_sme_mcar_records_reveal_nothing(sme):
    for site in PUBLISHED_RECORDS:
        fit = logit(seen(sme, site), y=sme.complete["NPGR"], capital=sme.complete["CAPITAL"])
        assert abs(fit.tvalues.drop("const")).max() < 4


def test_sme_mar_small_enterprises_lack_records(sme_mar):
    bureau = seen(sme_mar, "Industry and Commerce Bureau")
    table = sme_mar.complete[bureau]
    for site in set(PUBLISHED_RECORDS) - {"Industry and Commerce Bureau"}:
        fit = logit(seen(sme_mar, site)[bureau], y=table["NPGR"], capital=table["CAPITAL"])
        assert fit.tvalues[["y", "capital"]].min() > 10
    assert logit(bureau, y=sme_mar.complete["NPGR"]).tvalues["y"] > 10


def test_sme_mar_depends_on_observed_values_only(sme_mar):
    table = sme_mar.complete
    bureau = seen(sme_mar, "Industry and Commerce Bureau")
    unseen = logit(bureau, y=table["NPGR"], capital=table["CAPITAL"], inve=table["INVE"])
    assert abs(unseen.tvalues[["capital", "inve"]]).max() < 4
    agency = seen(sme_mar, "Credit Agency")
    without = logit(agency[~bureau], y=table["NPGR"][~bureau], capital=table["CAPITAL"][~bureau])
    assert abs(without.tvalues["capital"]) < 4
    own = logit(agency[bureau], **table.loc[bureau, ["NPGR", "CAPITAL", "Scale", "OPM", "FOI"]])
    assert abs(own.tvalues[["Scale", "OPM", "FOI"]]).max() < 4


def test_sme_mar_biases_complete_data_estimates():
    """The MAR variant is worth having: ignoring who lacks a record goes wrong."""
    data = datasets.make_sme(60_000, seed=5, missing="mar")
    rows = reduce(
        lambda a, b: a.merge(b, on=data.key),
        (data.frames[c] for c in ("Platform", "Credit Agency", "Industry and Commerce Bureau")),
    )
    fit = sm.OLS(rows["NPGR"], sm.add_constant(rows.drop(columns=["NPGR", data.key]))).fit()
    assert fit.params["const"] - data.intercept > 20 * fit.bse["const"]


def test_sme_is_reproducible_and_the_truth_is_not_random():
    first, again, other = (datasets.make_sme(500, seed=s, missing="mar") for s in (7, 7, 8))
    for site, frame in first.frames.items():
        pd.testing.assert_frame_equal(frame, again.frames[site])
        assert not frame.equals(other.frames[site])
    pd.testing.assert_frame_equal(first.truth, other.truth)
    assert first.sigma2 == other.sigma2


# ---------------------------------------------------------------- the packaged sample


def test_packaged_sample_is_what_the_generator_writes(tmp_path):
    files = datasets.write_sme_sample(tmp_path / "sme")
    packaged = datasets.load_sme()
    for file, (site, frame) in zip(files, packaged.items(), strict=True):
        pd.testing.assert_frame_equal(frame, pd.read_csv(file), check_exact=False, atol=2e-5, rtol=0)
        assert file.stem == site.lower().replace(" ", "-")
    drawn = datasets.make_sme(5_000, seed=0)
    assert list(packaged) == list(drawn.frames)
    pd.testing.assert_frame_equal(
        packaged["Judicial Organ"], drawn.frames["Judicial Organ"], atol=2e-5, rtol=0, check_exact=False
    )


def test_every_data_folder_has_a_description_that_counts_right():
    folder = Path(datasets.__file__).parents[2] / "data"
    if not folder.is_dir():
        pytest.skip("not a source tree")
    assert "`sme/`" in (folder / "README.md").read_text()
    description = (folder / "sme" / "README.md").read_text()
    for site, frame in datasets.load_sme().items():
        assert f"| {site} | {len(frame):,} |" in description
        assert all(f"`{column}`" in description for column in frame)


def test_published_estimates():
    published = datasets.load_sme_published()
    assert published.shape == (35, 17)
    assert published.loc["ROA", "single_coef"] == -0.026
    assert published["single_coef"].notna().groupby(published["client"]).sum().to_dict() == {
        site: 12 if site == "Credit Agency" else 0 for site in PUBLISHED_RECORDS
    }


# ---------------------------------------------------------------- blocks


def test_blocks_layout():
    data = datasets.make_blocks(100, p=(2, 1), missing=(0.25, 0.6))
    assert {site: list(frame) for site, frame in data.frames.items()} == {
        "Response": ["id", "y"],
        "A": ["id", "A1", "A2"],
        "B": ["id", "B1"],
    }
    assert [len(frame) for frame in data.frames.values()] == [100, 75, 40]


def test_blocks_response_at_the_first_site():
    data = datasets.make_blocks(100, p=(2, 1), missing=(0, 0.6), response_with_block=True)
    assert list(data.frames["A"]) == ["id", "y", "A1", "A2"]
    assert list(data.frames) == ["A", "B"]
    pd.testing.assert_frame_equal(data.frames["A"], data.complete[["id", "y", "A1", "A2"]])


@pytest.mark.parametrize("between", [0.0, 0.1])
def test_blocks_follow_their_arguments(between):
    data = datasets.make_blocks(
        40_000,
        p=(3, 1, 4),
        missing=(0, 0, 0),
        seed=1,
        rho=0.4,
        between=between,
        r2=0.3,
        mean=2.0,
        intercept=-1.0,
    )
    fit = assert_estimates_are_the_truth(data)
    np.testing.assert_allclose(fit.rsquared, 0.3, atol=0.02)
    np.testing.assert_allclose(mean_absolute_correlations(data, data.covariance), [0.4, between], atol=1e-12)
    np.testing.assert_allclose(covariates(data).cov(), data.covariance, atol=0.03)
    np.testing.assert_allclose(covariates(data).mean(), 2.0, atol=0.03)


def test_blocks_mar_depends_on_observed_values_only():
    data = datasets.make_blocks(
        40_000, p=(2, 2, 1), missing=(0.3, 0.4, 0.5), seed=2, mechanism="mar", rho=0.5, mean=3.0
    )
    table, has_a, has_b = data.complete, seen(data, "A"), seen(data, "B")
    at_a = logit(has_a, y=table["y"], A1=table["A1"])
    assert at_a.tvalues["y"] > 10
    assert abs(at_a.tvalues["A1"]) < 4
    with_a = logit(has_b[has_a], **table.loc[has_a, ["y", "A1", "A2", "B1"]])
    assert with_a.tvalues[["y", "A1"]].min() > 10
    assert abs(with_a.tvalues[["A2", "B1"]]).max() < 4
    without_a = logit(has_b[~has_a], **table.loc[~has_a, ["y", "A1"]])
    assert without_a.tvalues["y"] > 10
    assert abs(without_a.tvalues["A1"]) < 4


def test_blocks_mcar_records_are_independent():
    data = datasets.make_blocks(40_000, p=(1, 1), missing=(0.3, 0.5), seed=3)
    fit = logit(seen(data, "B"), y=data.complete["y"], A1=data.complete["A1"], has_a=seen(data, "A"))
    assert abs(fit.tvalues.drop("const")).max() < 4


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: datasets.make_sme(100), "at least 200 enterprises, received 100"),
        (lambda: datasets.make_sme(500, missing="mnar"), "'mcar' or 'mar', received 'mnar'"),
        (lambda: datasets.make_sme(500, between=0.5), r"between: expected .* received 0.5"),
        (lambda: datasets.make_blocks(1), "n of at least 2"),
        (lambda: datasets.make_blocks(p=(2, 0), missing=(0, 0)), "at least one covariate each"),
        (lambda: datasets.make_blocks(p=(1,) * 27, missing=(0,) * 27), "1 to 26 sites"),
        (lambda: datasets.make_blocks(p=(2, 1), missing=(0.1,)), "one share in .* for 2 sites"),
        (lambda: datasets.make_blocks(missing=(0.1, 1.0, 0.1)), "one share in"),
        (lambda: datasets.make_blocks(mechanism="other"), "received 'other'"),
        (lambda: datasets.make_blocks(r2=1.0), "r2 in"),
        (lambda: datasets.make_blocks(rho=0.95), "rho: 0.95 is more than"),
        (lambda: datasets.make_blocks(10, missing=(0, 0, 0.99)), "no record among 10 entities"),
        (lambda: datasets.make_blocks(response_with_block=True), "set missing\\[0\\] = 0"),
    ],
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ModelError, match=message):
        call()


# ---------------------------------------------------------------- recorded tables, or simulated ones

LOADERS = ["load_adults", "load_card_holders", "load_hospitals", "load_scans", "load_weather"]


def kinds(table):
    return {
        name: "number" if pd.api.types.is_numeric_dtype(column) else "text" for name, column in table.items()
    }


@pytest.mark.parametrize("name", LOADERS)
def test_simulated_tables_have_the_columns_of_recorded_ones(name, shared_data, monkeypatch):
    load = getattr(datasets, name)
    monkeypatch.setenv("FEDSTAT_TEST_DATA", str(shared_data))
    recorded = load()
    monkeypatch.delenv("FEDSTAT_TEST_DATA")
    simulated = load()
    assert recorded.attrs["source"].startswith("RECORDED DATA: ")
    assert simulated.attrs["source"].startswith("SIMULATED DATA: ")
    assert list(kinds(recorded).items()) == list(kinds(simulated).items())
    pd.testing.assert_frame_equal(simulated, load())
    assert 0.9 < len(simulated) / len(recorded) < 1.1
    if name != "load_scans":  # points of recorded curves are missing here and there
        assert (simulated.isna().mean() - recorded.isna().mean()).abs().max() < 0.05


def test_simulated_adults_have_the_effects_of_their_law(monkeypatch):
    monkeypatch.delenv("FEDSTAT_TEST_DATA", raising=False)
    adults = datasets.load_adults().dropna(ignore_index=True)
    log_hdl, male = np.log(adults["hdl"]), (adults["sex"] == "male").astype(float)
    ill = logit(adults["diabetes"] == "Yes", age=adults["age"], bmi=adults["bmi"], log_hdl=log_hdl)
    X = adults[["age", "weight", "height"]].assign(male=male, hormone=np.log(adults["testosterone"]))
    hdl = sm.OLS(log_hdl, sm.add_constant(X)).fit()
    for fit, truth in ((ill, [-6.4, 0.05, 0.07, -1.2]), (hdl, [-0.31, 0.002, -0.0045, 0.005, -0.4, 0.05])):
        assert (np.abs(fit.params - truth) < 4 * fit.bse).all()
