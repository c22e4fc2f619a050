"""Effects of many levels within sites, ``y ~ x | ward``: the pooled fit with a constant for each level."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import (
    DesignError,
    EstimationError,
    FormulaError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.federation.tables.table import ParquetTable

pytestmark = pytest.mark.filterwarnings("ignore")
LOOSE = fs.Policy(min_level_count=1, min_count=1)
OLS = fs.FederatedOLS.from_formula


def patients(n: int = 360, seed: int = 3) -> pd.DataFrame:
    """Patients of wards of 1 to 12 rows at three sites, with ward effects that the first column follows."""
    rng = np.random.default_rng(seed)
    t = pd.DataFrame({"site": rng.choice(list("ABC"), n)})
    t["ward"] = t["site"] + rng.integers(0, 25, n).astype(str)
    t.loc[: n // 40, "ward"] = [f"{site} alone {i}" for i, site in enumerate(t["site"][: n // 40 + 1])]
    t["shift"] = t["site"] + rng.integers(0, 4, n).astype(str)
    t["year"] = rng.integers(2015, 2019, n)
    t["person"] = t["site"] + rng.integers(0, 40, n).astype(str)
    effect = pd.Series(rng.normal(0.0, 2.0, t["ward"].nunique()), t["ward"].unique())
    own = t["ward"].map(effect)
    t["x1"], t["x2"] = rng.normal(50.0, 10.0, n) + 3.0 * own, rng.normal(size=n)
    t["g"] = rng.choice(["a", "b", "c"], n)
    t["y"] = 0.2 * t["x1"] - 0.5 * t["x2"] + own + 0.3 * (t["g"] == "b")
    t["y"] += rng.normal(size=n) * (1.0 + 0.02 * (t["x1"] - 50.0).abs())
    t["w"], t["k"], t["off"] = rng.uniform(0.5, 2.0, n), rng.integers(1, 4, n), rng.normal(size=n)
    return t


TABLE = patients()


def rows(table: pd.DataFrame = TABLE, policy: fs.Policy = LOOSE, **given) -> fs.ClientPartition:
    return fs.ClientPartition.from_frame(table, by="site", policy=policy, **given)


def without_lonely(table: pd.DataFrame, effects: list[str]) -> pd.DataFrame:
    """Leave out rows that are alone in a level, again and again, as fixest does."""
    while True:
        lonely = np.any([table.groupby(name)[name].transform("size") == 1 for name in effects], axis=0)
        if not lonely.any():
            return table
        table = table[~lonely]


CASES = {
    "one effect": ("y ~ x1 + x2 + C(g)", ["ward"], {}),
    "all rows of a site are a level": ("y ~ x1 + x2", ["site"], {}),
    "two effects": ("y ~ x1 + x2", ["ward", "shift"], {}),
    "combinations": ("y ~ x1 + x2", ["ward^shift"], {}),
    "without intercept": ("y ~ 0 + x1 + C(g)", ["ward"], {}),
    "interaction": ("y ~ x1 * C(g)", ["ward"], {}),
    "transforms": ("y ~ poly(x1, 2) + center(x2)", ["ward"], {}),
    "constant within levels at one site": ("y ~ x2 + at_two", ["ward"], {}),
    "variance weights": ("y ~ x1 + x2", ["ward"], {"var_weights": "w"}),
    "frequency weights": ("y ~ x1 + x2", ["ward"], {"freq_weights": "k"}),
}


@pytest.mark.parametrize(
    ("case", "masked"), [*((case, True) for case in CASES), *((case, False) for case in [*CASES][::4])]
)
def test_the_fit_is_least_squares_with_a_constant_for_each_level(case, masked):
    formula, effects, weights = CASES[case]
    table = TABLE.assign(at_two=np.where(TABLE["site"] == "A", TABLE["ward"].str[1:2] == "1", TABLE["x1"]))
    table["ward^shift"] = table["ward"] + table["shift"]
    # The pooled fit codes factors next to the constant, which the levels span.
    pooled = formula.replace("0 +", "") + "".join(f" + C(Q('{name}'))" for name in effects)
    kept = table if "freq_weights" in weights else without_lonely(table, effects)
    if "freq_weights" in weights:
        kept = kept.loc[kept.index.repeat(kept["k"])]
        kept = without_lonely(kept, effects)
    plain = smf.wls if "var_weights" in weights else smf.ols
    expected = plain(
        pooled.replace("poly(x1, 2)", "x1 + I(x1**2)"),
        kept,
        **({"weights": kept["w"]} if "var_weights" in weights else {}),
    ).fit()
    fit = OLS(f"{formula} | {' + '.join(effects)}", rows(table), **weights).fit(masked=masked)
    assert fit.df_resid == expected.df_resid
    np.testing.assert_allclose(fit.ssr, expected.ssr, rtol=1e-9)
    np.testing.assert_allclose(fit.llf, expected.llf, rtol=1e-9)
    np.testing.assert_allclose(fit.aic, expected.aic, rtol=1e-9)
    if case != "transforms":
        names = [name.replace("center(x2)", "x2") for name in fit.params.index]
        np.testing.assert_allclose(fit.params, expected.params[names], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(fit.bse, expected.bse[names], rtol=1e-9)
        np.testing.assert_allclose(fit.pvalues, expected.pvalues[names], rtol=1e-7, atol=1e-12)


PYFIXEST = {
    "iid": (0.007671526683114776, 0.08033474538064428, 274),
    "HC1": (0.008561223887565325, 0.08436660004262059, 274),
    "site": (0.009955215712018834, 0.029293587273652687, 2),
    "ward": (0.007907104740537263, 0.09078381768712514, 72),
    "person": (0.008839113486137952, 0.07849840649088798, 114),
    "weighted": (0.008006845798205924, 0.08515185564193477, 274),
    "two, site": (0.010126675928180517, 0.03580013969407749, 2),
    "two, ward": (0.008503066744610552, 0.09886073330419573, 72),
    "combined": (0.012113044131662275, 0.15001453536413686, 135),
}
"""Errors, and degrees of freedom of t, of pyfixest 0.60.0, ``feols("y ~ x1 + x2 | ward", patients(), vcov)``.

"site", "ward" and "person" are ``{"CRV1": ...}``; "weighted" is HC1 with ``weights="w"``; "two" is ``| ward +
shift`` with ``fixef_tol=1e-13``, and "combined" ``| ward^shift`` with HC1.
"""


@pytest.mark.parametrize("case", PYFIXEST)
def test_errors_are_those_of_pyfixest(case):
    *errors, df = PYFIXEST[case]
    effects = "ward + shift" if "two" in case else "ward^shift" if case == "combined" else "ward"
    model = OLS(f"y ~ x1 + x2 | {effects}", rows(), var_weights="w" if case == "weighted" else None)
    clusters = case.removeprefix("two, ")
    if clusters in TABLE:
        fit = model.fit(cov_type="cluster", cov_kwds={"groups": clusters})
    else:
        fit = model.fit(cov_type="nonrobust" if case == "iid" else "HC1")
    # Two effects are separated by an iteration, also there.
    np.testing.assert_allclose(fit.bse, errors, rtol=1e-7 if "two, ward" in case else 1e-11)
    assert fit.df_inference == df
    again = model.fit().with_covariance(fit.cov_type, {"groups": clusters} if clusters in TABLE else None)
    np.testing.assert_allclose(again.bse, fit.bse, rtol=1e-12)


def test_statistics_within_levels_are_those_of_columns_less_their_means():
    kept = without_lonely(TABLE, ["ward"])
    less = kept[["y", "x1", "x2"]] - kept.groupby("ward")[["y", "x1", "x2"]].transform("mean")
    within = sm.OLS(less["y"], less[["x1", "x2"]]).fit()
    fit = OLS("y ~ x1 + x2 | ward", rows()).fit()
    np.testing.assert_allclose(fit.rsquared, within.rsquared, rtol=1e-9)
    np.testing.assert_allclose(fit.fvalue * fit.scale, within.fvalue * within.scale, rtol=1e-9)
    assert (fit.nobs, fit.df_null) == (len(kept), len(kept) - kept["ward"].nunique())
    summary = fit.summary().as_text()
    assert f"ward ({kept['ward'].nunique()} levels)" in summary
    assert f"{len(TABLE) - len(kept)} rows that are alone in a level were left out" in summary


def test_an_offset_loses_its_means_as_well():
    fit = fs.FederatedGLM.from_formula("y ~ x1 | ward", rows(), offset="off").fit()
    kept = without_lonely(TABLE, ["ward"])
    expected = smf.ols("I(y - off) ~ x1 + C(ward)", kept).fit()
    np.testing.assert_allclose([fit.params["x1"], fit.bse["x1"]], [expected.params["x1"], expected.bse["x1"]])


def test_few_lonely_rows_are_levels_of_their_own_where_their_number_is_not_released():
    lonely = TABLE.groupby("ward")["site"].filter(lambda ward: len(ward) == 1).value_counts()
    many = lonely[lonely >= lonely.max()]
    fit = OLS("y ~ x1 + x2 | ward", rows(policy=fs.Policy(min_level_count=int(lonely.max())))).fit()
    assert 0 < many.sum() < lonely.sum()
    assert fit.nobs == len(TABLE) - many.sum()
    assert fit.df_resid == len(TABLE) - TABLE["ward"].nunique() - 2
    again = OLS("y ~ x1 + x2 | ward", rows()).fit()
    np.testing.assert_allclose(fit.bse, again.bse, rtol=1e-12)


def test_the_sites_own_fits_have_their_own_levels():
    fit = OLS("y ~ x1 + x2 | ward", rows()).fit()
    for site in "ABC":
        part = without_lonely(TABLE[TABLE["site"] == site], ["ward"])
        expected = smf.ols("y ~ x1 + x2 + C(ward)", part).fit()
        np.testing.assert_allclose(fit.site_estimates.loc[site], expected.params[["x1", "x2"]], rtol=1e-9)
    table = fit.heterogeneity.table
    assert table["Q"].notna().all() if "Q" in table else len(table)


def test_levels_are_of_their_site_and_the_summary_says_so():
    fit = OLS("y ~ x1 + x2 | year", rows()).fit()
    expected = smf.ols("y ~ x1 + x2 + C(site):C(year)", TABLE).fit()
    np.testing.assert_allclose(fit.bse, expected.bse[["x1", "x2"]], rtol=1e-9)
    assert "an equal label at two sites is two levels, as about 4 of 'year' are" in " ".join(
        fit.summary().as_text().split()
    )
    with pytest.raises(
        EstimationError, match=r"about 4 levels of 'year' are at several.*x1 \+ C\(year\) \| ward"
    ):
        OLS("y ~ x1 | ward + year", rows()).fit()
    # The remedy is the pooled fit.
    fit = OLS("y ~ x1 + C(year) | ward", rows()).fit()
    expected = smf.ols("y ~ x1 + C(year) + C(ward)", without_lonely(TABLE, ["ward"])).fit()
    np.testing.assert_allclose(fit.bse, expected.bse[list(fit.bse.index)], rtol=1e-9)


def test_rows_without_a_level_are_left_out():
    table = TABLE.assign(ward=TABLE["ward"].where(TABLE.index % 7 != 0))
    fit = OLS("y ~ x1 | ward", rows(table)).fit()
    kept = without_lonely(table.dropna(), ["ward"])
    expected = smf.ols("y ~ x1 + C(ward)", kept).fit()
    assert fit.nobs == len(kept)
    np.testing.assert_allclose(fit.bse["x1"], expected.bse["x1"], rtol=1e-9)


# ---- boundaries ------------------------------------------------------------------------------------------


def pairs(levels, n: int = 40) -> fs.ClientPartition:
    rng = np.random.default_rng(0)
    t = pd.DataFrame(
        {"site": np.repeat(["A", "B"], n // 2), "x": rng.normal(size=n), "y": rng.normal(size=n)}
    )
    return rows(t.assign(level=levels(np.arange(n)), fixed=np.arange(n) // 2 * 1.5), fs.Policy())


@pytest.mark.parametrize("rank", [15, 16])
def test_a_site_needs_some_rows_more_than_levels(rank):
    partition = pairs(lambda i: np.maximum(i % 20 - 20 + rank, 0) + 100 * (i // 20))
    if rank == 15:
        assert OLS("y ~ x | level", partition).fit().df_resid == 40 - 30 - 1
        return
    with pytest.raises(
        PolicyError, match=r"A: .*at least 5 rows more than absorbed levels.*'level' there are 4"
    ):
        OLS("y ~ x | level", partition).fit()


def test_every_row_a_level_is_refused():
    with pytest.raises(PolicyError, match="within the levels of 'level' there are 0"):
        OLS("y ~ x | level", pairs(lambda i: i)).fit()


def test_levels_of_two_rows_are_differences():
    fit = OLS("y ~ x | level", pairs(lambda i: i // 2)).fit()
    assert fit.df_resid == 19
    with pytest.raises(DesignError, match="'fixed' is constant within the levels of 'level' at all sites"):
        OLS("y ~ x + fixed | level", pairs(lambda i: i // 2)).fit()


# ---- what is not available -------------------------------------------------------------------------------


def test_what_needs_the_effects_of_levels_says_so():
    fit = OLS("y ~ x1 + x2 + C(g) | ward", rows()).fit()
    for call in (
        lambda: fit.predict(TABLE),
        lambda: fit.get_prediction(TABLE),
        lambda: fit.augment(TABLE),
        fit.evaluate,
        fit.get_margeff,
    ):
        with pytest.raises(NotAvailableError, match="needs the effects of the levels of 'ward'"):
            call()
    with pytest.raises(ModelError, match="Give values of 'x1'"):
        fit.effect("x1")
    found = fit.effect("x1", [40.0, 50.0], reference=40.0)
    np.testing.assert_allclose(found["estimate"], [0.0, 10.0 * fit.params["x1"]])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"cov_type": "HC2"}, "'HC2' is not available where effects are absorbed: the leverage"),
        ({"cov_type": "HC3"}, r"HC3.*cov_type='HC1'"),
        ({"cov_type": "survey", "cov_kwds": {"clusters": "person"}}, "'survey' is not available"),
        (
            {"cov_type": "cluster", "cov_kwds": {"groups": "ward", "correction": "CR2"}},
            "CR2 is not available.*'correction': 'CR1'",
        ),
    ],
)
def test_covariances_that_need_leverages_are_refused(arguments, match):
    model = OLS("y ~ x1 | ward", rows())
    with pytest.raises(ModelError, match=match):
        model.fit(**arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fs.FederatedGLM.from_formula("k ~ x1 | ward", rows(), family="poisson"),
        lambda: fs.GLORE.from_formula("g == 'a' ~ x1 | ward", rows()),
    ],
)
def test_other_families_are_refused(make):
    with pytest.raises(ModelError, match=r"Gaussian family with the identity link.*\(1 \| ward\)"):
        make()


def test_a_fit_with_noise_does_not_absorb():
    with pytest.raises(ModelError, match="does not take absorbed effects"):
        OLS("y ~ x1 | ward", rows()).fit(epsilon=1.0)


@pytest.mark.parametrize("model", [fs.FederatedMixed, fs.FederatedCox, fs.FederatedOrdinal, fs.FedAvg])
def test_other_models_name_those_that_absorb(model):
    with pytest.raises(FormulaError, match=r"for FederatedOLS.*FederatedMixed.*FederatedCox"):
        model.from_formula("y ~ x1 | ward", rows())


def test_fits_with_other_absorbed_effects_are_not_compared():
    fit, other = (OLS(f"y ~ {text}", rows()).fit() for text in ("x1 + x2 | ward", "x1"))
    for call in (fit.compare_lr_test, fit.compare_f_test):
        with pytest.raises(ModelError, match="same absorbed effects, ward, received none"):
            call(other)
    small = OLS("y ~ x1 | ward", rows()).fit()
    kept = without_lonely(TABLE, ["ward"])
    full, less = (smf.ols(f"y ~ {text} + C(ward)", kept).fit() for text in ("x1 + x2", "x1"))
    np.testing.assert_allclose(fit.compare_f_test(small)[:2], full.compare_f_test(less)[:2], rtol=1e-7)


# ---- after a fit -----------------------------------------------------------------------------------------


def test_further_terms_and_subgroups_keep_the_bar():
    fit = OLS("y ~ x1 + x2 | ward", rows()).fit()
    larger = OLS("y ~ x1 + x2 + C(g) | ward", rows()).fit()
    test = fit.score_test("C(g)")
    assert test.df == 2
    np.testing.assert_allclose(test.statistic, (fit.ssr - larger.ssr) / fit.scale, rtol=1e-9)
    found = fit.subgroups("x1", "g").tidy().set_index("level")
    inside = without_lonely(TABLE[TABLE["g"] == "b"], ["ward"])
    expected = smf.ols("y ~ x1 + x2 + C(ward)", inside).fit()
    np.testing.assert_allclose(found.loc["b", "estimate"], expected.params["x1"], rtol=1e-9)


def test_a_file_keeps_the_levels(tmp_path):
    fit = OLS("y ~ x1 + x2 | ward", rows()).fit()
    fit.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    assert again.summary().as_text() == fit.summary().as_text()
    assert again.df_resid == fit.df_resid


def test_a_table_that_is_read_in_chunks_gives_the_same_fit(tmp_path):
    fit = OLS("y ~ x1 + C(g) | ward", rows()).fit()
    tables = {site: part.drop(columns="site") for site, part in TABLE.groupby("site")}
    for site, part in tables.items():
        part.to_parquet(tmp_path / f"{site}.parquet")
    streams = {site: ParquetTable(tmp_path / f"{site}.parquet", rows_per_chunk=32) for site in tables}
    streamed = fs.ClientPartition.from_frames(streams, layout="horizontal", policy=LOOSE)
    again = OLS("y ~ x1 + C(g) | ward", streamed).fit()
    np.testing.assert_allclose(again.params, fit.params, rtol=1e-12)
    np.testing.assert_allclose(again.bse, fit.bse, rtol=1e-12)


def test_explain_counts_what_would_be_released():
    text = str(OLS("y ~ x1 | ward", rows()).explain())
    assert "rank of absorbed levels" in " ".join(text.split())
