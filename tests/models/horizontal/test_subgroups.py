"""Effects within subgroups, against fits of the filtered pooled table."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

pytestmark = pytest.mark.filterwarnings("ignore")
RNG = np.random.default_rng(4)
PATIENTS = fs.datasets.make_survival().assign(sex=lambda t: RNG.integers(0, 2, len(t)))
PATIENTS["pair"] = PATIENTS["hospital"] + (PATIENTS.index // 2).astype(str)


def patients(**given):
    return fs.ClientPartition.from_frame(PATIENTS, by="hospital", **given)


def logistic(formula="died ~ arm + age", partition=None, **given):
    return fs.GLORE.from_formula(formula, partition or patients()).fit(**given)


def pooled(formula, table):
    return smf.glm(formula, table, family=sm.families.Binomial()).fit(tol=1e-13)


def test_levels_and_interactions_are_those_of_the_pooled_table():
    found = logistic().subgroups("arm", by=["stage", "sex", "hospital"])
    frame = found.tidy().set_index(["by", "level"])
    for column in ("stage", "sex", "hospital"):
        for level, table in PATIENTS.groupby(column):
            reference, row = pooled("died ~ arm + age", table), frame.loc[(column, str(level))]
            assert row["n"] == len(table) and row["sites"] == table["hospital"].nunique()
            assert row["estimate"] == pytest.approx(reference.params["arm[T.surgery]"], rel=1e-7)
            assert row["std_error"] == pytest.approx(reference.bse["arm[T.surgery]"], rel=1e-6)
            low, high = reference.conf_int().loc["arm[T.surgery]"]
            assert row[["conf_low", "conf_high"]].tolist() == pytest.approx([low, high], rel=1e-6)
        together = pooled(f"died ~ arm * C({column}) + age", PATIENTS)
        names = [name for name in together.params.index if "arm" in name and ":" in name]
        test = together.wald_test(
            np.eye(len(together.params))[together.params.index.isin(names)], scalar=True
        )
        assert found.tests.loc[column, "p_value"] == pytest.approx(float(test.pvalue), rel=1e-5)
        assert found.tests.loc[column, "df"] == len(names)


def test_a_column_of_the_model_is_left_out_within_its_levels():
    for written in ("stage", "C(stage)", "C(stage, Treatment('II'))"):
        found = logistic(f"died ~ arm + age + {written}").subgroups("arm", "stage").tidy()
        for (_, row), (_, table) in zip(found.iloc[1:].iterrows(), PATIENTS.groupby("stage"), strict=True):
            expected = pooled("died ~ arm + age", table).params["arm[T.surgery]"]
            assert row["estimate"] == pytest.approx(expected, rel=1e-7)
    found = logistic("died ~ arm + age + sex").subgroups("arm", "sex")
    test = pooled("died ~ arm * C(sex) + age", PATIENTS).pvalues.filter(like=":").iloc[0]
    assert found.tests.loc["sex", "p_value"] == pytest.approx(test, rel=1e-5)


def test_arguments_of_the_fit_and_a_subset_are_kept():
    partition = patients()
    model = fs.FederatedOLS.from_formula("months ~ age + sex", partition, subset="arm == 'drugs'")
    found = model.fit(cov_type="HC1").subgroups("age", "stage").tidy()
    table = PATIENTS[(PATIENTS["arm"] == "drugs") & (PATIENTS["stage"] == "II")]
    reference = smf.ols("months ~ age + sex", table).fit(cov_type="HC1")
    row = found[found["level"] == "II"].iloc[0]
    assert row["n"] == len(table)
    assert row["std_error"] == pytest.approx(reference.bse["age"], rel=1e-7)


def test_a_term_of_several_levels_has_a_row_for_each():
    found = logistic("died ~ C(stage) + age").subgroups("stage", "arm")
    assert found.tidy().groupby("level")["term"].nunique().tolist() == [2, 2, 2]
    assert found.tests.loc["arm", "df"] == 2 and "C(stage)[T.III]" in str(found)


def test_a_level_of_few_rows_has_a_note_and_no_estimate():
    table = PATIENTS.assign(ward=np.where(PATIENTS.groupby("hospital").cumcount() < 7, "a", "b"))
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    found = logistic(partition=partition, local=False).subgroups("arm", "ward")
    frame = found.tidy()
    assert frame["estimate"].isna().tolist() == [False, True, False]
    assert "ward = a: no estimate" in found.notes[0] and found.plot().has_data()
    assert "No test of interaction with ward" in found.notes[1] and found.tests["p_value"].isna().all()
    assert "a" in str(found.summary())


FITS = {
    "FederatedCox": ("Surv(months, died) ~ arm + age", {}, {}),
    "FederatedCox common": (
        "Surv(months, died) ~ arm + age",
        {},
        {"baseline": "common", "grid": 3, "until": 60},
    ),
    "FederatedCox strata": ("Surv(months, died) ~ arm + age + strata(stage)", {}, {}),
    "FederatedGEE": ("months ~ arm + age", {"groups": "pair"}, {}),
    "FederatedMixed": ("months ~ arm + age + (1 | hospital)", {}, {}),
    "FederatedOrdinal": ("C(stage, levels=['I', 'II', 'III']) ~ arm + age", {}, {}),
    "FederatedGLM": ("months ~ arm + age", {"family": sm.families.Poisson()}, {"scale": "X2"}),
}


@pytest.mark.parametrize("name", FITS)
def test_families_of_coefficients_have_subgroups(name):
    formula, settings, given = FITS[name]
    kind = getattr(fs, name.split()[0])
    by = ["sex"] if "stage" in formula and "strata" not in formula else ["sex", "stage"]
    found = kind.from_formula(formula, patients(), **settings).fit(**given).subgroups("arm", by)
    inside = fs.ClientPartition.from_frame(PATIENTS[PATIENTS["sex"] == 1], by="hospital")
    here = kind.from_formula(formula, inside, **settings).fit(**given)
    row = found.tidy().set_index(["by", "level"]).loc[("sex", "1")]
    assert row["estimate"] == pytest.approx(here.params["arm[T.surgery]"], rel=1e-8)
    assert row["std_error"] == pytest.approx(here.bse["arm[T.surgery]"], rel=1e-6)
    assert found.tests["p_value"].between(0.0, 1.0).all()


@pytest.mark.parametrize(
    ("formula", "effect", "by", "match"),
    [
        ("died ~ arm + age", "sex", "stage", "effect: the model has no term 'sex'"),
        ("died ~ arm * age", "arm", "stage", "effect: 'arm' is in the term 'arm:age'"),
        ("died ~ arm + poly(age, 2)", "age", "stage", r"in the term 'poly\(age, 2\)'"),
        ("died ~ arm + age * sex", "arm", "sex", "by: 'sex' is in the term"),
        ("died ~ arm + age", "arm", "arm", "by: 'arm' is the column of the effect"),
        ("died ~ arm + age", "arm", [], "by: expected a column"),
        ("died ~ arm + age", "arm", ["stagee"], "Did you mean 'stage'"),
    ],
)
def test_what_has_no_subgroups_is_named(formula, effect, by, match):
    with pytest.raises(ModelError, match=match):
        logistic(formula).subgroups(effect, by)


def test_results_of_a_file_have_no_sites(tmp_path):
    logistic().save(tmp_path / "fit")
    with pytest.raises(NotAvailableError, match="fit the model again"):
        fs.load(tmp_path / "fit").subgroups("arm", "stage")


def test_exponentials_and_pictures():
    found = logistic().subgroups("arm", ["stage", "sex"])
    frame, ratios = found.tidy(0.1), found.tidy(0.1, exponentiate=True)
    np.testing.assert_allclose(np.exp(frame["conf_low"]), ratios["conf_low"])
    pd.testing.assert_series_equal(frame["std_error"], ratios["std_error"])
    ax = found.plot(exponentiate=True)
    assert [one.get_text() for one in ax.get_yticklabels()] == [
        f"{name} ({n})" for name, n in zip(["all rows", "I", "II", "III", "0", "1"], frame["n"], strict=True)
    ]
    assert "odds ratio" in found.summary(exponentiate=True).as_text() and "odds ratio" in ax.get_xlabel()
    assert any("interaction P" in text.get_text() for text in ax.texts)


def test_a_summary_of_a_subset_counts_rows_that_are_not_used():
    for subset, title in (("sex == 1", "not used"), (None, "left out")):
        partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        fit = fs.GLORE.from_formula("num > 0 ~ age", partition, subset=subset).fit()
        assert fit.summary().sheets[-1].headers == ("site", "rows", title, "own fit")
