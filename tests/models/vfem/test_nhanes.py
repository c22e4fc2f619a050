"""Adults of NHANES 2009-2012: six sites whose blocks are missing as they were in the field."""

import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DataWarning, DesignError

COLUMNS = {
    "Interview": ["Age", "Gender", "Race1", "Education", "Poverty", "Diabetes"],
    "Body": ["Height", "BMI"],
    "Blood pressure": ["BPSysAve", "Pulse"],
    "Blood laboratory": ["DirectChol", "TotChol"],
    "Urine": ["UrineVol1", "UrineFlow1"],
    "Questionnaire": ["HealthGen", "DaysPhysHlthBad", "DaysMentHlthBad"],
}


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
def partition(adults):
    frames = {site: adults[["ID", *columns]] for site, columns in COLUMNS.items()}
    return fs.ClientPartition.from_frames(frames, on="ID", shared_seed=1)


@pytest.fixture(scope="module")
def pressure(partition):
    return fs.VFEMRegression.from_formula("BPSysAve ~ .", partition, missing="drop")


@pytest.fixture(scope="module")
def every(pressure):
    with pytest.warns(DataWarning, match=r"'Poverty' \(Interview\): \d+.*count as missing"):
        return pressure.fit()


def test_blocks_are_missing_as_described(partition):
    share = partition.describe().sites["missing share"]
    assert partition.n_entities == 11_778
    assert share["Blood pressure"] == pytest.approx(0.077, abs=5e-4)
    assert share["Blood laboratory"] == pytest.approx(0.099, abs=5e-4)
    assert share["Questionnaire"] == pytest.approx(0.146, abs=5e-4)


def test_missing_responses_are_counted_and_refused(partition):
    with pytest.raises(
        DesignError, match=r"'BPSysAve' at site 'Blood pressure' is missing for 926 of 11,778"
    ):
        fs.VFEMRegression.from_formula("BPSysAve ~ .", partition)


def test_systolic_pressure_has_the_signs_that_epidemiology_expects(every):
    result = every
    z = result.zvalues
    assert result.converged
    assert result.nobs == 10_852
    for rises_with in ("Age", "Gender[T.male]", "BMI", "TotChol"):
        assert z[rises_with] > 5, rises_with
    for falls_with in ("Race1[T.White]", "Education[T.College Grad]", "Poverty"):
        assert z[falls_with] < -3, falls_with
    assert result.conf_int().loc["Age"].between(0.35, 0.50).all()
    text = str(result.summary(notes="all"))
    assert "926 entities without a response were left out" in text
    assert "969 at Interview" in text


def test_more_records_are_worth_more_than_complete_ones(pressure, every):
    complete = pressure.fit(method="cc")
    assert complete.nobs == 7_937
    ratio = (every.bse / complete.bse).drop("Intercept")
    assert ratio.median() < 0.93
    assert (abs(every.params - complete.params) < 2 * complete.bse).all()


def test_income_from_the_interview(partition):
    model = fs.VFEMRegression.from_formula("Poverty ~ . - Education", partition, missing="drop")
    with pytest.warns(DataWarning, match="'UrineFlow1' .Urine.: "):
        z = model.fit().zvalues
    assert z["Age"] > 5
    assert z["HealthGen[T.Poor]"] < -5
    assert z["DaysMentHlthBad"] < -3


def test_single_cells_are_worth_something_and_are_not_filled_in(adults, every):
    """Beside taking a site as lacking whom it knows in part (what warned of 969 at 'Interview')."""
    frames = {site: adults[["ID", *columns]] for site, columns in COLUMNS.items()}
    complete = fs.ClientPartition.from_frames(frames, on="ID", shared_seed=1, partial="drop")
    with pytest.warns(DataWarning, match="969 at 'Interview'"):
        dropped = fs.VFEMRegression.from_formula("BPSysAve ~ .", complete, missing="drop").fit()
    ratio = (every.bse / dropped.bse)[list(every.names["Interview"])]
    assert ratio.median() < 0.96 and ratio.max() < 1.02
    assert (abs(every.params - dropped.params) < dropped.bse).all()
