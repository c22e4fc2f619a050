"""Recorded data that are not part of the package, or simulated data of the same form where they are absent.

The environment variable ``FEDSTAT_TEST_DATA`` names the folder of recorded tables. Without it, the functions
draw simulated rows with the same columns from a fixed seed. ``attrs["source"]`` of a table names its source.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import expit

from fedstat.datasets.horizontal import HOSPITALS, make_hospitals
from fedstat.typing import Array, Floats

SIMULATED = "SIMULATED DATA: no record belongs to a real person."
SEED = 1


def _find(*names: str) -> list[Path]:
    """Return the paths of recorded files, or none if one is absent."""
    folder = os.environ.get("FEDSTAT_TEST_DATA")
    paths = [Path(folder) / name for name in names] if folder else []
    return paths if all(path.is_file() for path in paths) else []


def _from(source: str, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with numbered rows that names its source."""
    table = table.reset_index(drop=True)
    table.attrs["source"] = source
    return table


def _without(table: pd.DataFrame, share: float, columns: list[str], rng: np.random.Generator) -> None:
    """Delete the values of columns in a random share of the rows."""
    table.loc[rng.random(len(table)) < share, columns] = np.nan


HEALTH = ["Excellent", "Vgood", "Good", "Fair", "Poor"]
DAYS = ["None", "Several", "Most"]
SCHOOLS = ["8th Grade", "9 - 11th Grade", "High School", "Some College", "College Grad"]
NHANES = {
    "id": "ID",
    "age": "Age",
    "sex": "Gender",
    "education": "Education",
    "diabetes": "Diabetes",
    "health": "HealthGen",
    "little_interest": "LittleInterest",
    "depressed": "Depressed",
    "height": "Height",
    "weight": "Weight",
    "bmi": "BMI",
    "systolic": "BPSysAve",
    "diastolic": "BPDiaAve",
    "pulse": "Pulse",
    "hdl": "DirectChol",
    "cholesterol": "TotChol",
    "testosterone": "Testosterone",
}
"""Columns and their names in the R package NHANES."""


def load_adults() -> pd.DataFrame:
    """Read adults of NHANES 2009-2012, or simulate 11,000 adults with the same columns.

    The recorded table is ``NHANESraw`` of the R package NHANES, written as ``nhanes/NHANESraw.csv.gz``.
    Adults are people of 20 years or more. The National Health and Nutrition Examination Survey
    interviewed people, examined them, took their blood and, in 2011-2012, measured a hormone. A person who
    skipped a part has no values of it. The simulated adults skip parts at random, in about the same shares.

    Returns
    -------
    DataFrame
        One row for each adult: ``id``, ``age`` (years), ``sex``, ``education``, ``diabetes`` ("Yes" or
        "No"), ``health``, ``little_interest`` and ``depressed`` (ordered categories), ``height`` (cm),
        ``weight`` (kg), ``bmi`` (kg/m2), ``systolic`` and ``diastolic`` (mm Hg), ``pulse`` (per minute),
        ``hdl`` and ``cholesterol`` (mmol/l) and ``testosterone`` (ng/dl). ``attrs["source"]`` names the
        source.

    References
    ----------
    Centers for Disease Control and Prevention, National Health and Nutrition Examination Survey.

    Examples
    --------
    >>> import fedstat as fs
    >>> adults = fs.datasets.load_adults()
    >>> sorted(adults["diabetes"].dropna().unique()), adults.shape[1]
    (['No', 'Yes'], 17)
    """
    paths = _find("nhanes/NHANESraw.csv.gz")
    if not paths:
        return _from(SIMULATED, _ordered(_draw_adults(np.random.default_rng(SEED))))
    raw = pd.read_csv(paths[0], na_values=["", "NA"], keep_default_na=False, low_memory=False)
    raw = raw[raw["Age"] >= 20].drop_duplicates("ID")
    adults = raw[list(NHANES.values())].set_axis(list(NHANES), axis=1)
    adults["diastolic"] = adults["diastolic"].where(adults["diastolic"] > 0)
    return _from("RECORDED DATA: adults of NHANES 2009-2012.", _ordered(adults))


def _ordered(adults: pd.DataFrame) -> pd.DataFrame:
    scales = {"health": HEALTH, "little_interest": DAYS, "depressed": DAYS}
    return adults.astype({name: pd.CategoricalDtype(levels, ordered=True) for name, levels in scales.items()})


def _draw_adults(rng: np.random.Generator, n: int = 11_000) -> pd.DataFrame:
    """Draw adults; coefficients are near those of the survey."""
    age, male = rng.integers(20, 81, n), rng.integers(0, 2, n)
    height = 162.0 + 13.5 * male + 7.0 * rng.normal(size=n)
    weight = 80.0 + 0.9 * (height - 168.0) + 19.0 * rng.normal(size=n)
    bmi = weight / (height / 100.0) ** 2
    systolic = 95.0 + 0.3 * age + 0.4 * bmi + 15.0 * rng.normal(size=n)
    testosterone = np.exp(3.1 + 2.8 * male + 0.55 * rng.normal(size=n))
    noise = 0.24 * rng.normal(size=n)
    log_hdl = -0.31 + 0.002 * age - 0.4 * male - 0.0045 * weight + 0.005 * height + noise
    log_hdl += 0.05 * np.log(testosterone)
    ill = rng.random(n) < expit(-6.4 + 0.05 * age + 0.07 * bmi - 1.2 * log_hdl)
    mood = rng.normal(size=n)
    health = 0.5 * mood + 0.05 * (bmi - 28.0) + 0.8 * ill + rng.normal(size=n)
    adults = pd.DataFrame(
        {
            "id": np.arange(n),
            "age": age,
            "sex": np.array(["female", "male"])[male],
            "education": rng.choice(SCHOOLS, n, p=[0.12, 0.15, 0.22, 0.28, 0.23]),
            "diabetes": np.where(ill, "Yes", "No"),
            "health": np.array(HEALTH)[np.searchsorted([-1.7, -0.5, 0.8, 2.1], health)],
            "little_interest": np.array(DAYS)[np.searchsorted([1.0, 2.1], mood + rng.normal(size=n))],
            "depressed": np.array(DAYS)[np.searchsorted([1.0, 2.1], mood + rng.normal(size=n))],
            "height": height,
            "weight": weight,
            "bmi": bmi,
            "systolic": systolic,
            "diastolic": 33.0 + 0.3 * systolic + 9.0 * rng.normal(size=n),
            "pulse": 72.0 + 11.0 * rng.normal(size=n),
            "hdl": np.exp(log_hdl),
            "cholesterol": np.exp(1.6 + 0.2 * rng.normal(size=n)),
            "testosterone": testosterone,
        }
    ).round({"height": 1, "weight": 1, "bmi": 1, "hdl": 2, "cholesterol": 2, "testosterone": 1})
    _without(adults, 0.15, ["health", "little_interest", "depressed"], rng)
    _without(adults, 0.05, ["height", "weight", "bmi"], rng)
    _without(adults, 0.08, ["systolic", "diastolic", "pulse"], rng)
    _without(adults, 0.10, ["hdl", "cholesterol"], rng)
    _without(adults, 0.55, ["testosterone"], rng)
    return adults


HEART_FILES = ("cleveland", "hungarian", "switzerland", "va")


def load_hospitals() -> pd.DataFrame:
    """Read the patients of the UCI Heart Disease data, or simulate them by :func:`make_hospitals`.

    The recorded tables are ``processed.cleveland.data``, ``processed.hungarian.data``,
    ``processed.switzerland.data`` and ``processed.va.data`` of the repository, in a folder
    ``heart_disease_4sites``. A cholesterol of 0 in them means that it was not measured, and is NaN here.

    Returns
    -------
    DataFrame
        The columns of :func:`make_hospitals`. ``attrs["source"]`` names the source.

    References
    ----------
    Janosi, Steinbrunn, Pfisterer and Detrano (1988), Heart Disease, UCI Machine Learning Repository.

    Examples
    --------
    >>> import fedstat as fs
    >>> patients = fs.datasets.load_hospitals()
    >>> patients.groupby("hospital", sort=False).size().to_dict()
    {'Cleveland': 303, 'Hungary': 294, 'Switzerland': 123, 'Long Beach': 200}
    """
    simulated = make_hospitals()
    paths = _find(*(f"heart_disease_4sites/processed.{name}.data" for name in HEART_FILES))
    if not paths:
        return _from("SIMULATED DATA: no patient exists; see fedstat.datasets.make_hospitals.", simulated)
    tables = [pd.read_csv(path, names=list(simulated)[1:], na_values="?") for path in paths]
    patients = pd.concat(dict(zip(HOSPITALS, tables, strict=True)), names=["hospital"])
    patients = patients.reset_index("hospital")
    patients["chol"] = patients["chol"].mask(patients["chol"] == 0)
    return _from("RECORDED DATA: the patients of the UCI Heart Disease data.", patients)


def load_scans() -> pd.DataFrame:
    """Read visits with brain scans of people with multiple sclerosis and of controls, or simulate them.

    The recorded table is ``DTI`` of the R package refund, written as ``dti/DTI.csv.gz``: diffusion
    tensor imaging at Johns Hopkins University and the Kennedy-Krieger Institute, with 382 visits of 142
    people. A curve is the fractional anisotropy along a tract of the brain. Patients come up to eight
    times, controls once.

    Returns
    -------
    DataFrame
        One row for each visit: ``person``, ``visit`` (1 to 8), ``years`` since the first visit,
        ``group`` ("control" or "patient"), ``sex``, ``pasat`` (a test of attention, 0 to 60 points, of
        patients), and the curves ``cca_01`` to ``cca_93`` (corpus callosum) and ``rcst_01`` to
        ``rcst_55`` (right corticospinal tract). ``attrs["source"]`` names the source.

    References
    ----------
    Goldsmith, Bobb, Crainiceanu, Caffo and Reich (2011), "Penalized functional regression", JCGS 20.

    Examples
    --------
    >>> import fedstat as fs
    >>> scans = fs.datasets.load_scans()
    >>> scans["person"].nunique(), scans.filter(regex="^cca_").shape[1]
    (142, 93)
    """
    paths = _find("dti/DTI.csv.gz")
    if not paths:
        return _from(SIMULATED, _draw_scans(np.random.default_rng(SEED)))
    raw = pd.read_csv(paths[0])
    scans = pd.DataFrame(
        {
            "person": raw["ID"],
            "visit": raw["visit"],
            "years": raw["visit.time"] / 365.25,
            "group": np.where(raw["case"] == 1, "patient", "control"),
            **raw[["sex", "pasat"]],
        }
    )
    return _from(
        "RECORDED DATA: visits of the study of refund's DTI.",
        scans.join(raw.filter(regex="^(cca|rcst)_")),
    )


def _draw_scans(rng: np.random.Generator) -> pd.DataFrame:
    """Draw visits of 100 patients and 42 controls."""
    sizes = np.repeat([2, 3, 4, 5, 6, 7, 8, 1], [44, 13, 18, 13, 9, 2, 1, 42])
    person = np.repeat(np.arange(len(sizes)), sizes)
    visit = np.concatenate([np.arange(1, size + 1) for size in sizes])
    patient = sizes[person] > 1
    scores = rng.normal(size=(len(sizes), 4))[person]
    curves = {name: np.linspace(0.0, 3.0, points) for name, points in (("cca", 93), ("rcst", 55))}
    waves = {name: np.cos(np.outer(np.arange(4), s)) for name, s in curves.items()}
    drawn = {name: 0.5 + 0.04 * scores @ wave for name, wave in waves.items()}
    drawn["cca"] = drawn["cca"] - 0.04 * np.outer(patient, np.sin(curves["cca"]))
    drawn = {name: values + 0.02 * rng.normal(size=values.shape) for name, values in drawn.items()}
    years = (visit - 1) * (0.7 + 0.1 * rng.normal(size=len(visit)))
    level = 9.0 * rng.normal(size=len(sizes))[person] + 5.0 * rng.normal(size=len(visit))
    pasat = 46.0 + 30.0 * (drawn["cca"].mean(axis=1) - 0.48) + years + level
    columns = {
        "person": person,
        "visit": visit,
        "years": years,
        "group": np.where(patient, "patient", "control"),
        "sex": np.where(person % 4 == 0, "male", "female"),
        "pasat": np.where(patient, pasat.round().clip(0, 60), np.nan),
    }
    for name, values in drawn.items():
        columns |= {f"{name}_{j:02d}": points for j, points in enumerate(values.T, 1)}
    return pd.DataFrame(columns)


def load_weather() -> pd.DataFrame:
    """Read the daily temperature and precipitation of 35 Canadian stations, or simulate them.

    The recorded tables are the arrays of ``CanadianWeather`` of the R package fda, one row for each
    station with columns ``d001`` to ``d365``, written as ``canadian_weather/Temperature_C.csv.gz`` and
    ``log10precip.csv.gz``.

    Returns
    -------
    DataFrame
        One row for each station: ``region``, and arrays of 365 days: ``temp`` (degrees Celsius) and ``rain``
        (decimal logarithm of mm). ``attrs["source"]`` names the source.

    References
    ----------
    Ramsay and Silverman (2005), Functional Data Analysis, Springer.

    Examples
    --------
    >>> import fedstat as fs
    >>> stations = fs.datasets.load_weather()
    >>> len(stations), stations["temp"][0].shape, stations["region"].nunique()
    (35, (365,), 4)
    """
    paths = _find("canadian_weather/Temperature_C.csv.gz", "canadian_weather/log10precip.csv.gz")
    if not paths:
        return _from("SIMULATED DATA: no station exists.", _draw_weather(np.random.default_rng(2)))
    tables = [pd.read_csv(path) for path in paths]
    temp, rain = (list(table.filter(regex=r"^d\d+$").to_numpy()) for table in tables)
    stations = pd.DataFrame({"region": tables[0]["region"], "temp": temp, "rain": rain})
    return _from("RECORDED DATA: Canadian weather of R's fda.", stations)


def _draw_weather(rng: np.random.Generator) -> pd.DataFrame:
    season = np.cos(2.0 * np.pi * (np.arange(365) + 0.5 - 15.0) / 365.0)
    region = np.repeat(["Arctic", "Atlantic", "Continental", "Pacific"], [3, 15, 12, 5])
    number = np.unique(region, return_inverse=True)[1]
    level = np.array([-15.0, 5.0, 0.0, 8.0])[number] + rng.normal(size=35)
    swing = np.array([18.0, 11.0, 16.0, 7.0])[number] + rng.normal(size=35)
    temp = level[:, None] - np.outer(swing, season)
    coast = np.outer(number % 2, season)
    rain = 0.2 + 0.02 * level[:, None] + 0.15 * coast + 0.1 * rng.normal(size=(35, 365))
    return pd.DataFrame({"region": region, "temp": list(temp), "rain": list(rain)})


CARD_COLUMNS = (
    *("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"),
    *("PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6"),
    *(f"BILL_AMT{month}" for month in range(1, 7)),
    *(f"PAY_AMT{month}" for month in range(1, 4)),
)


def load_card_holders() -> pd.DataFrame:
    """Read credit card holders in Taiwan in 2005 and whether they paid, or simulate 30,000.

    The recorded table is ``credit_default/UCI_Credit_Card.csv``, "default of credit card clients" of the UCI
    repository. The simulated columns are normal scores with correlations of 0.2, under the same names.

    Returns
    -------
    DataFrame
        One row for each card holder: ``default`` (1: did not pay in the next month), and the first
        twenty columns of the repository. ``attrs["source"]`` names the source.

    References
    ----------
    Yeh and Lien (2009), "The comparisons of data mining techniques for the predictive accuracy of
    probability of default of credit card clients", Expert Systems with Applications 36.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.datasets.load_card_holders().shape
    (30000, 21)
    """
    paths = _find("credit_default/UCI_Credit_Card.csv")
    if not paths:
        return _from(SIMULATED, _draw_card_holders(np.random.default_rng(SEED)))
    raw = pd.read_csv(paths[0])
    table = raw[list(CARD_COLUMNS)]
    table.insert(0, "default", raw["default.payment.next.month"])
    return _from("RECORDED DATA: card holders in Taiwan, 2005 (Yeh and Lien 2009).", table)


def _draw_card_holders(rng: np.random.Generator, n: int = 30_000) -> pd.DataFrame:
    X: Floats = rng.normal(size=(n, 20)) @ np.linalg.cholesky(0.8 * np.eye(20) + 0.2).T
    eta = 1.8 * np.abs(X[:, 5]) + X[:, 8] - 0.6 * X[:, 0] + 0.5 * X[:, 13] - 0.7 * np.abs(X[:, 15])
    default: Array = (rng.random(n) < expit(eta - 2.8)).astype(np.int64)
    table = pd.DataFrame(X, columns=list(CARD_COLUMNS))
    table.insert(0, "default", default)
    return table
