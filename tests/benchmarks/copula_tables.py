"""Tables for private synthesis: a mixed one by simulation, and two real ones as codes of public grids.

All methods see the same codes, of at most 32 levels; grids are chosen without a look at the data. The real
tables are read where they are at hand (``FEDSTAT_TEST_DATA``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

DATA = Path(os.environ.get("FEDSTAT_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
MONTHS = range(1, 7)
SCHOOLS = ["8th Grade", "9 - 11th Grade", "High School", "Some College", "College Grad"]
RACES = ["White", "Black", "Hispanic", "Mexican", "Other"]
MARITAL = ["Married", "LivePartner", "NeverMarried", "Divorced", "Separated", "Widowed"]
GRADES = ["Excellent", "Vgood", "Good", "Fair", "Poor"]


@dataclass(frozen=True)
class Coded:
    """Codes from 0, complete rows; numbers of levels; columns by institution, the response first of all."""

    table: pd.DataFrame
    levels: dict[str, int]
    sites: dict[str, list[str]]


def mixed(n=70_000, p=55, sites=5):
    """Five factors behind 20 continuous columns and others of 10, 2 and 5 levels; bounds, and the holders."""
    rng = np.random.default_rng(5)
    loadings = rng.normal(0, 0.6, (p, 5))
    S = loadings @ loadings.T + np.diag(rng.uniform(0.3, 1, p))
    root = np.linalg.cholesky(S / np.sqrt(np.outer(np.diag(S), np.diag(S))))
    Z = rng.standard_normal((n, p)) @ root.T
    columns, bounds = {}, {}
    for j in range(p):
        name, cuts = f"x{j}", [9, 1, 4][j % 3]
        columns[name], bounds[name] = Z[:, j], (-4.5, 4.5)
        if j >= 20:
            columns[name] = np.searchsorted(np.sort(rng.normal(size=cuts)), Z[:, j])
            bounds[name] = range(cuts + 1)
    parts = np.array_split(np.array(list(columns)), sites)
    return pd.DataFrame(columns), bounds, {f"C{k}": part.tolist() for k, part in enumerate(parts)}


def credit():
    """30,000 borrowers (Yeh and Lien 2009), 24 columns at four institutions."""
    raw = pd.read_csv(DATA / "credit_default" / "UCI_Credit_Card.csv").rename(columns={"PAY_0": "PAY_1"})
    school = raw["EDUCATION"].clip(1, 4).where(raw["EDUCATION"] > 0, 4)
    marriage = raw["MARRIAGE"].where(raw["MARRIAGE"].isin([1, 2]), 3)
    paid = np.concatenate([[-0.01, 1e-9], np.linspace(0.2, 7, 31)])
    coded = {
        "default": (raw["default.payment.next.month"], 2),
        "limit": on_grid(raw["LIMIT_BAL"] / 1e3, np.linspace(0, 800, 33)),
        "sex": (raw["SEX"] - 1, 2),
        "education": (school - 1, 4),
        "marriage": (marriage - 1, 3),
        "age": on_grid(raw["AGE"], np.linspace(20, 76, 29)),
    }
    sites = {"Bank": list(coded)}
    coded |= {f"status{m}": ((raw[f"PAY_{m}"] + 2).clip(0, 10), 11) for m in MONTHS}
    bill = np.linspace(-2, 6, 33)
    coded |= {f"bill{m}": on_grid(np.arcsinh(raw[f"BILL_AMT{m}"] / 5e3), bill) for m in MONTHS}
    coded |= {f"paid{m}": on_grid(np.arcsinh(raw[f"PAY_AMT{m}"] / 1e3), paid) for m in MONTHS}
    for site, name in {"Repayment": "status", "Billing": "bill", "Payments": "paid"}.items():
        sites[site] = [f"{name}{m}" for m in MONTHS]
    return of_codes(coded, sites)


def nhanes():
    """8,338 adults of NHANES 2009-2012 without missing values, 20 columns at five institutions."""
    raw = pd.read_csv(DATA / "nhanes" / "NHANESraw.csv.gz", low_memory=False)
    raw = raw[raw["Age"] >= 20]

    def yes(name):
        return (raw[name] == "Yes").astype(float).where(raw[name].notna()), 2

    def ordered(name, levels):
        return raw[name].map({level: i for i, level in enumerate(levels)}), len(levels)

    def grid(name, low, high, edges, unit=1.0):
        return on_grid(raw[name] / unit, np.linspace(low, high, edges))

    sites = {
        "Interview": {
            "diabetes": yes("Diabetes"),
            "age": grid("Age", 20, 80.01, 31),
            "female": ((raw["Gender"] == "female").astype(float), 2),
            "education": ordered("Education", SCHOOLS),
            "race": ordered("Race1", RACES),
            "marital": ordered("MaritalStatus", MARITAL),
            "income": grid("HHIncomeMid", 0, 110, 23, 1e3),
        },
        "Body": {
            "weight": grid("Weight", 30, 180, 33),
            "height": grid("Height", 135, 205, 33),
            "bmi": grid("BMI", 12, 62, 33),
        },
        "Pressure": {
            "pulse": grid("Pulse", 40, 120, 33),
            "systolic": grid("BPSysAve", 80, 210, 33),
            "diastolic": grid("BPDiaAve", 30, 110, 33),
        },
        "Blood": {"hdl": grid("DirectChol", 0.4, 3.4, 31), "chol": grid("TotChol", 2, 9, 31)},
        "Questionnaire": {
            "health": ordered("HealthGen", GRADES),
            "smoke": yes("Smoke100"),
            "active": yes("PhysActive"),
            "sleep": grid("SleepHrsNight", 1.5, 12.5, 12),
            "bad days": on_grid(raw["DaysPhysHlthBad"], np.r_[-0.5, 0.5, np.linspace(3, 30.5, 12)]),
        },
    }
    coded = {name: one for own in sites.values() for name, one in own.items()}
    return of_codes(coded, {site: list(own) for site, own in sites.items()})


REAL = {"credit default": credit, "NHANES": nhanes}


def on_grid(values, edges):
    """Codes of values on a grid, those beyond it at its ends, and how many there are."""
    found = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return pd.Series(np.where(np.isnan(values), np.nan, found), index=values.index), len(edges) - 1


def of_codes(coded, sites):
    """Put columns of codes together."""
    table = pd.DataFrame({name: codes for name, (codes, _) in coded.items()}).dropna().astype(int)
    return Coded(table.reset_index(drop=True), {name: k for name, (_, k) in coded.items()}, sites)
