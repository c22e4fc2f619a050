"""A simulated trial with repeated measurements in sixteen hospitals."""

from __future__ import annotations

import numpy as np
import pandas as pd

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
