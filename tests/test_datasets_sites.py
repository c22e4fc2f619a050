"""Simulated sites: what was promised about them, and the published figures they follow."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

from fedstat.datasets import make_hospitals, make_logistic_sites
from fedstat.errors import ModelError

BETA = np.array([-2, 1, 0.8, 0.4, 0.2, 0.1, 0, 0])
X = [f"X{j}" for j in range(1, 9)]
SETTINGS = [("homogeneous", None), ("I", 0.4), ("II", 0.3), ("III", 0.2)]
COLUMNS = [
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
]
UCI = {"Cleveland": "cleveland", "Hungary": "hungarian", "Switzerland": "switzerland", "Long Beach": "va"}


def both(data):
    return pd.concat([data.train, data.test])


def logit(table):
    return sm.GLM(table["y"], sm.add_constant(table[X]), family=sm.families.Binomial()).fit()


# ---------------------------------------------------------------- three logistic sites


@pytest.mark.parametrize(
    "size, train, test",
    [("small", (700, 1400, 2800), (300, 600, 1200)), ("large", (2100, 4200, 8400), (900, 1800, 3600))],
)
def test_sites_have_the_published_sizes(size, train, test):
    data = make_logistic_sites(size=size)
    names = ["Site 1", "Site 2", "Site 3"]
    for table, sizes in ((data.train, train), (data.test, test)):
        assert list(table) == ["site", "y", *X] == [data.site, data.response, *data.truth.index]
        assert table["site"].value_counts(sort=False).to_dict() == dict(zip(names, sizes, strict=True))
        assert table["y"].dtype == np.int64
        assert set(table["y"]) == {0, 1}
        assert table.index.equals(pd.RangeIndex(len(table)))
    assert not both(data).duplicated().any()


@pytest.mark.parametrize(
    "setting, shift, means, variances",
    [
        ("homogeneous", None, (1, 1, 1), (1, 1, 1)),
        ("I", 0.1, (-0.1, 0, 0.1), (1, 1, 1)),
        ("I", 0.4, (-0.4, 0, 0.4), (1, 1, 1)),
        ("II", 0.3, (-0.1, 0, 0.1), (0.7, 1, 1.3)),
        ("III", 0.2, (1, 1, 1), (1, 1, 1)),
    ],
)
def test_covariates_have_the_law_of_the_setting(setting, shift, means, variances):
    table = both(make_logistic_sites(setting, shift, size="large", seed=4))
    for (_, rows), mean, variance in zip(table.groupby("site"), means, variances, strict=True):
        n, x = len(rows), rows[X].to_numpy()
        assert abs(x.mean(axis=0) - mean).max() < 4 * np.sqrt(variance / n)
        assert abs(np.cov(x.T) - variance * np.eye(8)).max() < 4.5 * variance * np.sqrt(2 / n)


@pytest.mark.parametrize("setting, shift", SETTINGS)
def test_fit_of_each_site_is_its_truth(setting, shift):
    data = make_logistic_sites(setting, shift, size="large", seed=2)
    for site, rows in both(data).groupby("site"):
        fit = logit(rows)
        z = (fit.params - [data.intercept, *data.truth[site]]) / fit.bse
        assert abs(z).max() < 4
        assert (z**2).mean() < 2.2


def test_truth_shifts_with_the_effects_only():
    np.testing.assert_allclose(
        make_logistic_sites("III", 0.2).truth.T, np.outer([0.8, 1.0, 1.2], BETA), rtol=1e-14
    )
    for setting, shift in SETTINGS[:3]:
        assert (make_logistic_sites(setting, shift).truth.T == BETA).all(axis=None)


def test_equal_seeds_give_equal_standardized_covariates():
    plain = make_logistic_sites(seed=5).train
    shifted = make_logistic_sites("II", 0.2, seed=5).train
    for site, mean, variance in (("Site 1", -0.1, 0.8), ("Site 3", 0.1, 1.2)):
        z = plain.loc[plain["site"] == site, X] - 1
        np.testing.assert_allclose(
            shifted.loc[shifted["site"] == site, X], mean + z * np.sqrt(variance), atol=1e-12
        )
    pd.testing.assert_frame_equal(make_logistic_sites("III", 0.0, seed=5).train, plain)
    assert not make_logistic_sites(seed=6).train[X].equals(plain[X])


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ({"setting": "IV"}, "setting to be one of"),
        ({"setting": "I"}, r"a shift in \[0, inf\) in setting I, received None"),
        ({"setting": "I", "shift": -0.1}, "a shift in"),
        ({"setting": "II", "shift": 1.0}, r"a shift in \[0, 1\)"),
        ({"shift": 0.1}, "no shift in the homogeneous setting"),
        ({"size": "huge"}, "size to be one of"),
    ],
)
def test_bad_arguments_are_refused(arguments, complaint):
    with pytest.raises(ModelError, match=complaint):
        make_logistic_sites(**arguments)


def test_published_sites_have_the_same_law(shared_data):
    """Seed 1 of the homogeneous setting as published: means, variances and event rates."""
    folder = shared_data / "fl_benchmark_sim" / "homogenous" / "seed1"
    ours = both(make_logistic_sites(size="large", seed=1))
    for k, n in enumerate((1000, 2000, 4000), start=1):
        theirs = pd.concat([pd.read_csv(file) for file in folder.glob(f"Site{k}.t*.csv")])
        assert len(theirs) == n
        own = ours[ours["site"] == f"Site {k}"]
        se = np.sqrt(1 / n + 1 / len(own))
        assert abs(theirs[X].mean() - own[X].mean()).max() < 4 * se
        assert abs(theirs[X].std() - own[X].std()).max() < 4 * se / np.sqrt(2)
        assert abs(theirs["y"].mean() - own["y"].mean()) < 4 * se / 2


def test_pooled_fits_scatter_as_published(shared_data):
    """GLORE's 50 published estimates, and 50 pooled fits of ours: equal means and spreads."""
    table = pd.read_csv(shared_data / "fl_benchmark_sim" / "homogenous_coef_50seeds.csv")
    theirs = table.loc[table["method"] == "GLORE"].filter(like="Beta").to_numpy()
    ours = np.array([logit(make_logistic_sites(seed=s).train).params.to_numpy()[1:] for s in range(1, 51)])
    assert theirs.shape == ours.shape == (50, 8)
    se = np.sqrt((theirs.var(axis=0, ddof=1) + ours.var(axis=0, ddof=1)) / 50)
    assert abs((theirs.mean(axis=0) - ours.mean(axis=0)) / se).max() < 3.5
    ratio = ours.std(axis=0) / theirs.std(axis=0)
    assert abs(np.log(ratio)).max() < 3.5 / np.sqrt(50)
    assert abs(np.log(ratio).mean()) < 3 / np.sqrt(50 * 8)


# ---------------------------------------------------------------- four hospitals


@pytest.fixture(scope="module")
def hospitals():
    return make_hospitals()


@pytest.fixture(scope="module")
def many():
    """Forty draws, for margins."""
    return pd.concat([make_hospitals(seed) for seed in range(40)])


def read_uci(folder, hospital):
    """Read a file as published: '?' is missing, and so are a cholesterol and a blood pressure of 0."""
    file = folder / "heart_disease_4sites" / f"processed.{UCI[hospital]}.data"
    table = pd.read_csv(file, header=None, names=COLUMNS, na_values="?")
    return table.replace({"chol": {0: np.nan}, "trestbps": {0: np.nan}})


def test_hospitals_have_the_published_rows_and_missing_values(hospitals):
    assert hospitals["hospital"].value_counts(sort=False).to_dict() == {
        "Cleveland": 303,
        "Hungary": 294,
        "Switzerland": 123,
        "Long Beach": 200,
    }
    missing = hospitals.isna().groupby(hospitals["hospital"], sort=False).sum()
    assert missing["ca"].tolist() == [4, 291, 118, 198]
    assert missing["thal"].tolist() == [2, 266, 52, 166]
    assert missing["chol"].tolist() == [0, 23, 123, 56]
    assert missing[["hospital", "age", "sex", "cp", "num"]].sum().sum() == 0


def test_hospital_columns_are_numbers(hospitals):
    assert list(hospitals) == ["hospital", *COLUMNS]
    complete = ["age", "sex", "cp", "num"]
    assert all(hospitals[column].dtype == np.int64 for column in complete)
    assert all(dtype == np.float64 for dtype in hospitals.drop(columns=["hospital", *complete]).dtypes)
    assert (hospitals["chol"].dropna() > 0).all()


def test_tests_that_were_not_done_lack_all_their_values(hospitals):
    lacking = hospitals[["thalach", "oldpeak", "slope"]].isna()[hospitals["hospital"] == "Long Beach"]
    assert (lacking["thalach"] <= lacking["oldpeak"]).all()
    assert (lacking["oldpeak"] <= lacking["slope"]).all()


def test_hospital_rates_of_disease_are_published(many):
    rates = (many["num"] > 0).groupby(many["hospital"]).agg(["mean", "size"])
    published = pd.Series(
        {"Cleveland": 139 / 303, "Hungary": 106 / 294, "Switzerland": 115 / 123, "Long Beach": 149 / 200}
    )
    z = (rates["mean"] - published) / np.sqrt(published * (1 - published) / rates["size"])
    assert abs(z).max() < 4
    assert set(many.loc[many["hospital"] == "Hungary", "num"]) == {0, 1}


@pytest.mark.parametrize("hospital", UCI)
def test_hospital_margins_are_those_of_the_real_data(many, shared_data, hospital):
    real = read_uci(shared_data, hospital)
    real["oldpeak"] = real["oldpeak"].clip(lower=0)
    ours = many[many["hospital"] == hospital].drop(columns="hospital")
    lacking = 40 * real.isna().sum()
    lacking["trestbps"] -= 40 * (hospital == "Long Beach")  # one pressure of 0 there is not coded missing
    pd.testing.assert_series_equal(ours.isna().sum(), lacking)
    for column in real:
        if real[column].count() <= 5:
            continue
        if real[column].nunique() <= 5:
            shares, drawn = (t[column].value_counts(normalize=True) for t in (real, ours))
            assert drawn.sub(shares, fill_value=0).abs().max() < 2 / np.sqrt(ours[column].count())
        else:
            scale = real[column].std()
            assert abs(ours[column].mean() - real[column].mean()) < 0.06 * scale
            np.testing.assert_allclose(ours[column].std(), scale, rtol=0.12)


def test_hospital_columns_go_with_the_disease_as_in_cleveland(many, shared_data):
    real = read_uci(shared_data, "Cleveland")
    ours = many[many["hospital"] == "Cleveland"].drop(columns="hospital")
    real, drawn = (t.corrwith(t["num"] > 0, method="spearman").drop("num") for t in (real, ours))
    assert abs(real - drawn).max() < 0.2
    assert np.corrcoef(real, drawn)[0, 1] > 0.95


def test_hospitals_follow_the_seed(hospitals):
    pd.testing.assert_frame_equal(hospitals, make_hospitals(5))
    assert not hospitals.equals(make_hospitals(1))
