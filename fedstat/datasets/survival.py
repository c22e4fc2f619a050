"""Simulated times until death in several hospitals."""

from __future__ import annotations

import numpy as np
import pandas as pd

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
