"""Analyses of a subset of the rows, against the fit of the filtered pooled table."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import DataWarning, DesignError, ModelError

PATIENTS = fs.datasets.make_survival()


def patients(table=PATIENTS, **given):
    return fs.ClientPartition.from_frame(table, by="hospital", **given)


def test_a_model_of_a_subset_with_missing_cells():
    table = PATIENTS.assign(stage=PATIENTS["stage"].mask(PATIENTS.index % 9 == 0))
    fit = fs.GLORE.from_formula(
        "died ~ age + C(arm)", patients(table), subset="stage != 'I' & age > 50"
    ).fit()
    inside = table[(table["stage"] != "I") & table["stage"].notna() & (table["age"] > 50)]
    pooled = smf.glm("died ~ age + C(arm)", inside, family=sm.families.Binomial()).fit()
    np.testing.assert_allclose(fit.params, pooled.params[fit.params.index], rtol=1e-8)
    np.testing.assert_allclose(fit.bse, pooled.bse[fit.params.index], rtol=1e-6)
    text = fit.summary().as_text()
    assert "stage != 'I' & age > 50" in text and f"{len(inside)} of 800" in " ".join(text.split())


def test_a_site_without_a_row_of_the_subset_is_left_out():
    with pytest.warns(DataWarning, match="'Ulm' is left out: it has no row"):
        model = fs.FederatedOLS.from_formula("months ~ age", patients(), subset="hospital != 'Ulm'")
    assert "Ulm" not in model.sites and model.fit().nobs == (PATIENTS["hospital"] != "Ulm").sum()
    with pytest.raises(DesignError, match="in the subset 'age > 500'"), pytest.warns(DataWarning):
        fs.FederatedOLS.from_formula("months ~ age", patients(), subset="age > 500")


def test_a_plan_names_the_subset_to_owners():
    partition = patients(policy=fs.Policy(approval="owner"))
    model = fs.FederatedOLS.from_formula("months ~ age", partition, subset="arm == 'drugs'")
    assert model._description == "months ~ age, rows with arm == 'drugs'"
    assert model.explain().passes and set(model.question.needed) == {"months", "age", "arm"}


@pytest.mark.parametrize(
    ("subset", "error", "match"),
    [
        (5, ModelError, "subset: expected a text"),
        ("agee > 4", ModelError, "Did you mean 'age'"),
        ("age == 'f'", DesignError, "holds numbers and the subset compares it with the text"),
        ("arm == 3", DesignError, "holds categories, and a subset must be"),
    ],
)
def test_what_a_subset_cannot_compare_is_named(subset, error, match):
    with pytest.raises(error, match=match):
        fs.FederatedOLS.from_formula("months ~ age", patients(), subset=subset)


def test_predictions_are_of_all_rows_and_evaluations_of_the_subset():
    fit = fs.GLORE.from_formula("died ~ age", patients(), subset="arm == 'drugs'").fit()
    assert fit.predict(PATIENTS.drop(columns="arm")).notna().all()
    inside = PATIENTS[PATIENTS["arm"] == "drugs"]
    assert fit.evaluate().n.sum() == len(inside)


def test_tables_count_missing_rows_within_the_subset():
    table = PATIENTS.assign(stage=PATIENTS["stage"].mask(PATIENTS.index % 7 == 0))
    partition, inside = patients(table), table[(table["age"] >= 55) & (table["months"] > 10)]
    subset = "age >= 55 & months > 10"
    counts = fs.crosstab(partition, "arm", "stage", subset=subset)
    assert (counts == pd.crosstab(inside["arm"], inside["stage"])).all().all()
    assert counts.attrs["missing"] is None
    table_one = fs.table_one(partition, "age + C(stage)", by="arm", subset=subset)
    frame = table_one.to_frame()
    assert frame.loc[("n", ""), "all"] == f"{len(inside)}"
    assert frame.loc[("stage", "I"), "missing"] == f"{inside['stage'].isna().sum()}"
    assert subset in str(table_one)


def test_columns_of_other_sites_have_no_subset():
    partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    with pytest.raises(ModelError, match="subset: where sites hold different columns"):
        fs.table_one(partition, "ROA", subset="ROA > 0")
