"""Diabetes among the adults of NHANES 2009-2012: six sites with blocks missing as in the field."""

import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from test_nhanes import COLUMNS

import fedstat as fs
from fedstat.errors import DataWarning


@pytest.fixture(scope="module")
def adults(shared_data):
    frame = pd.read_csv(
        shared_data / "nhanes" / "NHANESraw.csv.gz",
        na_values=["", "NA"],
        keep_default_na=False,
        low_memory=False,
    )
    return frame[frame["Age"] >= 20]


@pytest.fixture(scope="module")
def fits(adults):
    frames = {site: adults[["ID", *columns]] for site, columns in COLUMNS.items()}
    partition = fs.ClientPartition.from_frames(frames, on="ID", shared_seed=1)
    model = fs.VFEMGLM.from_formula(
        "Diabetes == 'Yes' ~ .",
        partition,
        family=sm.families.Binomial(),
        between="independent",
        missing="drop",
    )
    with pytest.warns(DataWarning, match="1,128 at 'Interview'"):
        return {method: model.fit(method=method) for method in ("vfem", "cc")}


def test_complete_records_give_the_pooled_logistic_regression(fits, adults):
    columns = [name for names in COLUMNS.values() for name in names]
    complete = adults[columns].dropna()
    terms = " + ".join(name for name in columns if name != "Diabetes")
    data = complete.assign(diabetes=(complete["Diabetes"] == "Yes").astype(float))
    pooled = smf.glm(f"diabetes ~ {terms}", data, family=sm.families.Binomial()).fit()
    result = fits["cc"]
    assert result.nobs == len(complete) == 7_937
    assert ((result.params - pooled.params[result.params.index]) / pooled.bse).abs().max() < 1e-5
    assert (result.bse / pooled.bse[result.params.index] - 1.0).abs().max() < 1e-5
    assert result.llf == pytest.approx(pooled.llf, abs=1e-6)


def test_every_record_counts(fits):
    complete, every = fits["cc"], fits["vfem"]
    assert every.converged
    assert every.nobs == 11_769
    assert every._fit.trace[-1].iteration <= 25
    ratio = (every.bse / complete.bse).drop("Intercept")
    assert ratio.between(0.75, 0.95).all()
    assert ((every.params - complete.params).abs() < 2.0 * complete.bse).all()


def test_risks_have_the_signs_that_epidemiology_expects(fits):
    z = fits["vfem"].zvalues
    for rises_with in ("Age", "BMI", "BPSysAve", "HealthGen[T.Fair]", "HealthGen[T.Poor]"):
        assert z[rises_with] > 3, rises_with
    for falls_with in ("DirectChol", "Race1[T.White]"):
        assert z[falls_with] < -3, falls_with
    odds = fits["vfem"].tidy(exponentiate=True).set_index("term")["estimate"]
    assert 1.05 < odds["BMI"] < 1.08


def test_predicted_shares_are_those_of_the_field(fits, adults):
    predicted = fits["vfem"].predict()
    observed = (adults.set_index("ID")["Diabetes"] == "Yes").reindex(predicted.index)
    assert predicted.mean() == pytest.approx(observed.mean(), abs=2e-3)
    tenths = pd.qcut(predicted, 10, labels=False)
    by_tenth = (
        pd.DataFrame({"predicted": predicted, "observed": observed}).astype(float).groupby(tenths).mean()
    )
    assert (by_tenth["predicted"] - by_tenth["observed"]).abs().max() < 0.04
