"""Simulated rows of several sites that record the same variables: horizontally partitioned data.

All are synthetic. :func:`make_logistic_sites` follows the simulation of a published comparison of federated
methods, :func:`make_hospitals` imitates a public data set of four hospitals, :func:`make_repeated` is a trial
with repeated measurements, and :func:`make_survival` is follow-up until death.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
from scipy.special import expit, gammaincinv, ndtr, ndtri

from fedstat.datasets.simulation import require_argument
from fedstat.typing import Floats

Setting: TypeAlias = Literal["homogeneous", "I", "II", "III"]

BETA = (-2.0, 1.0, 0.8, 0.4, 0.2, 0.1, 0.0, 0.0)
SITE_ROWS = {"small": (1_000, 2_000, 4_000), "large": (3_000, 6_000, 12_000)}
TRAIN_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class SimulatedSites:
    """Rows of several sites, drawn from known logistic models.

    Attributes
    ----------
    train, test : DataFrame
        Columns ``site``, ``y`` (0 or 1) and the covariates; the rows of a site are consecutive.
    site : str
        Name of the column with the site.
    response : str
        Name of the response.
    truth : DataFrame
        True coefficients: index ``variable``, one column per site.
    intercept : float
        True intercept of every site.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_logistic_sites("I", shift=1.0, seed=1)
    >>> data.train.shape, data.test.shape, data.response, data.truth.columns.tolist()
    ((4900, 10), (2100, 10), 'y', ['Site 1', 'Site 2', 'Site 3'])
    """

    train: pd.DataFrame
    test: pd.DataFrame
    site: str
    response: str
    truth: pd.DataFrame
    intercept: float


def make_logistic_sites(
    setting: Setting = "homogeneous",
    shift: float | None = None,
    *,
    size: Literal["small", "large"] = "small",
    seed: int | np.random.Generator = 0,
) -> SimulatedSites:
    """Simulate the three sites of Li et al.'s comparison of federated methods.

    Synthetic data: ``y ~ Bernoulli(expit(x' b_k))`` at site k with
    b = (-2, 1, .8, .4, .2, .1, 0, 0), no intercept, and x normal with independent covariates, all with the
    mean m_k and the variance v_k. With s the ``shift``, sites 1, 2 and 3 have

    ============= ============ ============== =================
    setting       mean m_k     variance v_k   coefficients b_k
    ============= ============ ============== =================
    "homogeneous" 1, 1, 1      1, 1, 1        b, b, b
    "I"           -s, 0, s     1, 1, 1        b, b, b
    "II"          -.1, 0, .1   1-s, 1, 1+s    b, b, b
    "III"         1, 1, 1      1, 1, 1        (1-s) b, b, (1+s) b
    ============= ============ ============== =================

    The shifts of the publication are .1, .2, .3 and .4 (I and II) and .1 and .2 (III). Its ratios
    of covariances (called ratios of standard deviations in its program) are read as what that program
    does: they multiply the variance. Its program also gives all sites the mean .1 in setting II with
    s = .1; that is taken for a slip, as the other shifts have means of -.1, 0 and .1.

    Parameters
    ----------
    setting : {"homogeneous", "I", "II", "III"}
        What differs between sites: nothing, the mean, the variance or the effects.
    shift : float, optional
        How much; needed unless homogeneous. At least 0, below 1 in settings II and III.
    size : {"small", "large"}
        1,000, 2,000 and 4,000 rows, or 3,000, 6,000 and 12,000.
    seed : int or numpy.random.Generator
        Source of randomness. The truth does not depend on it, and equal seeds give equal standardized
        covariates in all settings of a size.

    Returns
    -------
    SimulatedSites
        A random 70 % of the rows of each site are for training, the others for testing.

    Raises
    ------
    ModelError
        If an argument is out of its range.

    References
    ----------
    Li, Miao, Wu et al. (2024), "Federated learning in healthcare: a benchmark comparison of engineering
    and statistical approaches for structured data analysis", Health Data Science 4:0196, supplement.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_logistic_sites(seed=1)
    >>> data.train.groupby(data.site).size().tolist(), data.intercept
    ([700, 1400, 2800], 0.0)
    """
    _check_setting(setting, shift, size)
    step = (shift or 0.0) * np.array([-1.0, 0.0, 1.0])
    means = {"I": step, "II": np.array([-0.1, 0.0, 0.1])}.get(setting, np.ones(3))
    variances = 1.0 + step if setting == "II" else np.ones(3)
    betas = np.outer(1.0 + step if setting == "III" else np.ones(3), BETA)
    rng = np.random.default_rng(seed)
    parts = [
        _draw_site(f"Site {k + 1}", n, means[k], variances[k], betas[k], rng)
        for k, n in enumerate(SITE_ROWS[size])
    ]
    names = [f"X{j}" for j in range(1, len(BETA) + 1)]
    return SimulatedSites(
        train=pd.concat([train for train, _ in parts], ignore_index=True),
        test=pd.concat([test for _, test in parts], ignore_index=True),
        site="site",
        response="y",
        truth=pd.DataFrame(
            betas.T, index=pd.Index(names, name="variable"), columns=["Site 1", "Site 2", "Site 3"]
        ),
        intercept=0.0,
    )


def _draw_site(
    name: str, n: int, mean: float, variance: float, beta: Floats, rng: np.random.Generator
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Draw n rows of one site, as a training and a test table."""
    X = mean + np.sqrt(variance) * rng.standard_normal((n, beta.size))
    y = (rng.uniform(size=n) < expit(X @ beta)).astype(np.int64)
    table = pd.DataFrame(X, columns=[f"X{j}" for j in range(1, beta.size + 1)])
    table.insert(0, "y", y)
    table.insert(0, "site", name)
    # Rows are independent, so that the first ones are as good as a random choice.
    n_train = round(TRAIN_SHARE * n)
    return table.iloc[:n_train], table.iloc[n_train:]


def _check_setting(setting: str, shift: float | None, size: str) -> None:
    where = "make_logistic_sites: expected"
    settings = ("homogeneous", "I", "II", "III")
    require_argument(setting in settings, f"{where} setting to be one of {settings}, received {setting!r}.")
    require_argument(size in SITE_ROWS, f"{where} size to be one of {tuple(SITE_ROWS)}, received {size!r}.")
    if setting == "homogeneous":
        require_argument(shift is None, f"{where} no shift in the homogeneous setting, received {shift}.")
        return
    largest = np.inf if setting == "I" else 1.0
    require_argument(
        shift is not None and 0 <= shift < largest,
        f"{where} a shift in [0, {largest:g}) in setting {setting}, received {shift}.",
    )


HOSPITALS = {"Cleveland": 303, "Hungary": 294, "Switzerland": 123, "Long Beach": 200}

SEVERITY = {
    "age": 0.25,
    "sex": 0.40,
    "cp": 0.57,
    "trestbps": 0.17,
    "chol": 0.20,
    "fbs": 0.15,
    "restecg": 0.10,
    "thalach": -0.40,
    "exang": 0.65,
    "oldpeak": 0.50,
    "slope": 0.45,
    "ca": 0.65,
    "thal": 0.70,
    "num": 1.00,
}
"""Latent correlation of each column with the severity of the disease, the same in every hospital."""

LEVELS = {
    "sex": (0, 1),
    "cp": (1, 2, 3, 4),
    "fbs": (0, 1),
    "restecg": (0, 1, 2),
    "exang": (0, 1),
    "slope": (1, 2, 3),
    "ca": (0, 1, 2, 3),
    "thal": (3, 6, 7),
    "num": (0, 1, 2, 3, 4),
}
_CA = (176, 65, 38, 20)
LEVEL_COUNTS = {
    "sex": ((97, 206), (81, 213), (10, 113), (6, 194)),
    "cp": ((23, 50, 86, 144), (11, 106, 54, 123), (4, 4, 17, 98), (8, 14, 47, 131)),
    "fbs": ((258, 45), (266, 20), (43, 5), (125, 68)),
    "restecg": ((151, 4, 148), (235, 52, 6), (85, 30, 7), (80, 93, 27)),
    "exang": ((204, 99), (204, 89), (68, 54), (52, 95)),
    "slope": ((142, 140, 21), (12, 91, 1), (33, 61, 12), (16, 53, 29)),
    "ca": (_CA, _CA, _CA, _CA),  # outside Cleveland recorded of ten patients, too few for shares
    "thal": ((166, 18, 117), (7, 10, 11), (19, 10, 42), (4, 8, 22)),
    "num": ((164, 55, 36, 35, 13), (188, 106, 0, 0, 0), (8, 48, 32, 30, 5), (51, 56, 41, 42, 10)),
}
"""Patients with each level, per hospital."""

MOMENTS = {
    "age": ((54.4, 9.0), (47.8, 7.8), (55.3, 9.0), (59.4, 7.8)),
    "trestbps": ((131.7, 17.6), (132.6, 17.6), (130.2, 22.6), (134.7, 18.4)),
    "chol": ((246.7, 51.8), (250.8, 67.7), (np.nan, np.nan), (239.6, 52.8)),
    "thalach": ((149.6, 22.9), (139.1, 23.6), (121.6, 26.0), (122.8, 22.0)),
}
"""Mean and standard deviation per hospital."""

RANGES = {"age": (28, 77), "trestbps": (80, 200), "chol": (85, 603), "thalach": (60, 202)}
OLDPEAK = ((0.327, 1.54, 1.11), (0.643, 1.64, 0.76), (0.453, 1.39, 0.78), (0.285, 1.85, 0.84))
"""Share of zeros, mean and standard deviation of the others, per hospital."""

MISSING = {
    "trestbps": (0, 1, 2, 56),
    "chol": (0, 23, 123, 56),
    "fbs": (0, 8, 75, 7),
    "restecg": (0, 1, 1, 0),
    "thalach": (0, 1, 1, 53),
    "exang": (0, 1, 1, 53),
    "oldpeak": (0, 0, 6, 56),
    "slope": (0, 190, 17, 102),
    "ca": (4, 291, 118, 198),
    "thal": (2, 266, 52, 166),
}
"""Patients without a value, per hospital."""

EXERCISE_TEST = ("trestbps", "thalach", "exang", "oldpeak", "slope")


def make_hospitals(seed: int | np.random.Generator = 5) -> pd.DataFrame:
    """Simulate patients of four hospitals who were examined for heart disease.

    Synthetic data, without any patient of the UCI Heart Disease data, which they imitate.
    They have its columns and codes, its numbers of patients (Cleveland 303, Hungary 294, Switzerland 123,
    Long Beach 200) and, exactly, its numbers of missing values, per hospital and column. In
    expectation they have its shares of each level (``num`` > 0, disease, in 46, 36, 93 and 74 %) and its
    means and standard deviations.

    The law is a plain one. A patient has a standard normal severity z; a column has the latent variable
    ``r z + sqrt(1 - r^2) e``, with r from ``SEVERITY``, rounded latent correlations of the
    columns with ``num`` > 0; and its value is the quantile of its distribution in the hospital. Given the
    severity, all columns are thus independent, and effects differ between hospitals only through
    the distributions. Values are missing completely at random, those of the exercise
    test together; serum cholesterol, which the original codes 0 where it was not measured, is NaN for
    every Swiss patient.

    Parameters
    ----------
    seed : int or numpy.random.Generator
        Source of randomness.

    Returns
    -------
    DataFrame
        920 rows: ``hospital``, then ``age`` (years), ``sex`` (1: male), ``cp`` (chest pain, 1 to 4; 4:
        none), ``trestbps`` (mm Hg), ``chol`` (mg/dl), ``fbs`` (1: fasting blood sugar above 120 mg/dl),
        ``restecg`` (0 to 2), ``thalach`` (highest heart rate), ``exang`` (1: angina on exercise),
        ``oldpeak`` (ST depression in mm, 0 for an elevation), ``slope`` (1 to 3), ``ca`` (vessels colored,
        0 to 3), ``thal`` (3: normal, 6: fixed, 7: reversible defect) and ``num`` (0: no disease, to 4; 0
        or 1 in Hungary). All are numbers; NaN is missing.

    References
    ----------
    Janosi, Steinbrunn, Pfisterer and Detrano (1988), Heart Disease, UCI Machine Learning Repository.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> table.shape, table["hospital"].nunique()
    ((920, 15), 4)
    """
    rng = np.random.default_rng(seed)
    tables = [_draw_hospital(h, name, n, rng) for h, (name, n) in enumerate(HOSPITALS.items())]
    return pd.concat(tables, ignore_index=True)


def _draw_hospital(h: int, name: str, n: int, rng: np.random.Generator) -> pd.DataFrame:
    severity = rng.standard_normal(n)
    table = pd.DataFrame({"hospital": [name] * n})
    for column, r in SEVERITY.items():
        latent = r * severity + np.sqrt(1.0 - r**2) * rng.standard_normal(n)
        table[column] = _quantile(column, h, ndtr(latent))
    # who had no exercise test lacks all that is measured in it
    without_test = rng.permutation(n)
    for column, counts in MISSING.items():
        order = without_test if column in EXERCISE_TEST else rng.permutation(n)
        table[column] = table[column].astype(np.float64)
        table.loc[order[: counts[h]], column] = np.nan
    return table


def _quantile(column: str, h: int, u: Floats) -> Floats:
    """Return the quantiles at u, (n,), of a column's distribution in hospital h."""
    if column in LEVELS:
        counts = np.array(LEVEL_COUNTS[column][h])
        bounds = np.cumsum(counts)[:-1] / counts.sum()
        return np.array(LEVELS[column])[np.searchsorted(bounds, u, side="right")]
    if column == "oldpeak":
        zeros, mean, sd = OLDPEAK[h]
        # the positive part is gamma distributed with this mean and standard deviation
        shape = (mean / sd) ** 2
        positive = mean / shape * gammaincinv(shape, np.clip((u - zeros) / (1.0 - zeros), 0.0, 1.0))
        return np.where(u < zeros, 0.0, np.clip(positive, 0.1, 6.2).round(1))
    mean, sd = MOMENTS[column][h]
    low, high = RANGES[column]
    z = ndtri(u)
    if column in ("trestbps", "chol"):
        # the lognormal law with this mean and standard deviation
        log_sd = np.sqrt(np.log1p((sd / mean) ** 2))
        values = mean * np.exp(log_sd * z - log_sd**2 / 2)
    else:
        values = mean + sd * z
    rounded: Floats = np.clip(values, low, high).round()
    return rounded if column != "age" else rounded.astype(np.int64)


# ----------------------------------------------------------------------------------------------------
# A simulated trial with repeated measurements in sixteen hospitals.


CITIES = (
    "Aachen", "Bonn", "Chemnitz", "Dresden", "Essen", "Freiburg", "Gera", "Halle",
    "Ingolstadt", "Jena", "Kiel", "Leipzig", "Mainz", "Nuremberg", "Oldenburg", "Passau",
)  # fmt: skip
MONTHS = np.array([0.0, 3.0, 6.0, 9.0, 12.0])


def make_repeated(
    n_sites: int = 16, patients: int = 25, *, dropout: float = 0.06, seed: int | np.random.Generator = 0
) -> pd.DataFrame:
    """Simulate a trial in which patients of several hospitals are measured again and again.

    Synthetic data. The mean score is 40 + 0.5 month, and 0.6 more each month under treatment. Patients vary
    around it in level (standard deviation 8) and slope (0.5, correlation -0.2), hospitals in level (3), and
    residuals have a standard deviation of 5. The log odds of a relapse are -1 - 0.05 month, 0.08 less each
    month under treatment, and vary between patients (1.2).

    Parameters
    ----------
    n_sites : int
        Hospitals, each with about as many patients.
    patients : int
        Patients of a hospital, half of them treated.
    dropout : float
        Probability that a patient does not come to a visit, and to no later one.
    seed : int or numpy Generator

    Returns
    -------
    DataFrame
        One row for each visit: ``hospital``, ``patient`` (numbered within hospitals), ``arm`` ("control",
        "treated"), ``month``, ``score`` and ``relapse`` (0 or 1).

    Examples
    --------
    >>> import fedstat as fs
    >>> visits = fs.datasets.make_repeated()
    >>> len(visits), visits["hospital"].nunique(), visits.groupby(["hospital", "patient"]).ngroups
    (1791, 16, 400)
    """
    rng = np.random.default_rng(seed)
    numbered = [f"Hospital {k + 1:02d}" for k in range(n_sites)]
    names = np.array(CITIES[:n_sites] if n_sites <= len(CITIES) else numbered)
    n, visits = n_sites * patients, len(MONTHS)
    site = np.repeat(np.arange(n_sites), patients)
    treated = np.tile(np.arange(patients) % 2, n_sites)
    level, slope = rng.multivariate_normal([0.0, 0.0], [[64.0, -0.8], [-0.8, 0.25]], n).T
    hospital = rng.normal(0.0, 3.0, n_sites)
    lasting = np.minimum(rng.geometric(max(dropout, 1e-12), n), visits)
    tendency = rng.normal(0.0, 1.2, n)
    row = np.repeat(np.arange(n), lasting)
    month = MONTHS[np.concatenate([np.arange(count) for count in lasting])]
    mean = 40.0 + hospital[site[row]] + level[row] + (0.5 + 0.6 * treated[row] + slope[row]) * month
    eta = -1.0 + tendency[row] - (0.05 + 0.08 * treated[row]) * month
    return pd.DataFrame(
        {
            "hospital": names[site[row]],
            "patient": np.tile(np.arange(1, patients + 1), n_sites)[row],
            "arm": np.where(treated[row] == 1, "treated", "control"),
            "month": month,
            "score": np.round(mean + rng.normal(0.0, 5.0, len(row)), 1),
            "relapse": (rng.random(len(row)) < 1.0 / (1.0 + np.exp(-eta))).astype(int),
        }
    )


# ----------------------------------------------------------------------------------------------------
# Simulated times until death in several hospitals.


ROWS = {"Bonn": 260, "Kiel": 180, "Trier": 220, "Ulm": 140}
BASELINE = {"Bonn": 0.010, "Kiel": 0.016, "Trier": 0.008, "Ulm": 0.013}
"""Hazard per month at age 60 in stage I, with the usual treatment."""
STAGES = {"I": 0.0, "II": 0.5, "III": 1.2}
"""Logarithms of hazard ratios."""
FOLLOW_UP = 60


def make_survival(*, seed: int | np.random.Generator = 0) -> pd.DataFrame:
    """Simulate follow-up of patients in four hospitals with different baseline hazards.

    Synthetic data. The hazard is that of the hospital, times a power of time, times
    exp(0.04 (age - 60) - 0.5 surgery + stage). Patients who live are followed for 12 to 60 months.

    Parameters
    ----------
    seed : int or numpy Generator

    Returns
    -------
    DataFrame
        800 rows: ``hospital``, ``age`` in years, ``stage`` (I, II, III), ``arm`` ("drugs", "surgery"),
        ``months`` (whole months, from 1) and ``died`` (0 or 1).

    Examples
    --------
    >>> import fedstat as fs
    >>> patients = fs.datasets.make_survival()
    >>> patients.groupby("hospital")["died"].sum().to_dict()
    {'Bonn': 137, 'Kiel': 101, 'Trier': 93, 'Ulm': 82}
    """
    rng = np.random.default_rng(seed)
    hospital = np.repeat(list(ROWS), list(ROWS.values()))
    n = len(hospital)
    age = np.round(rng.normal(62.0, 9.0, n), 1)
    stage = rng.choice(list(STAGES), n, p=[0.4, 0.35, 0.25])
    arm = rng.choice(["drugs", "surgery"], n)
    effect = 0.04 * (age - 60.0) - 0.5 * (arm == "surgery") + np.array([STAGES[one] for one in stage])
    hazard = np.array([BASELINE[one] for one in hospital]) * np.exp(effect)
    # Cumulative hazard of a Weibull distribution with shape 1.2, in units of ten months.
    time = 10.0 * (rng.exponential(size=n) / (10.0 * hazard)) ** (1.0 / 1.2)
    end = rng.uniform(12.0, FOLLOW_UP, n)
    return pd.DataFrame(
        {
            "hospital": hospital,
            "age": age,
            "stage": stage,
            "arm": arm,
            "months": np.ceil(np.minimum(time, end)),
            "died": (time <= end).astype(int),
        }
    )
