"""PrivateCopulaGLM on two real tables, which are no Gaussian copulas: how far it is off, and what it covers.

    OMP_NUM_THREADS=1 python tests/models/copula_glm/real_tables.py credit|nhanes [epsilon repetitions]

The table is the population, and maximum likelihood on all of it the truth. Without noise, the estimate on
the whole table shows the misfit of the copula, in standard errors of maximum likelihood; with epsilon, 10,000
rows are drawn from it again and again. Columns are codes of public grids of at most 32 levels, standardised
for comparison. Sources and terms of the tables stand beside them.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from private_coverage_simulation import noise_of
from scipy import stats

from fedstat.models.copula.bounds import Bounds
from fedstat.models.copula_glm.moments.bootstrap import bootstrap, estimate
from fedstat.models.copula_glm.moments.columns import ScoredColumn
from fedstat.models.copula_glm.moments.law import normal_points
from fedstat.models.copula_glm.moments.protocol import MomentQuestion, whole_design
from fedstat.models.copula_glm.moments.release import release_rows
from fedstat.privacy.zcdp import rho_of_budget

DATA = Path(os.environ.get("FEDSTAT_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))
N, DRAWS = 10_000, 20
CREDIT = {
    "Bank": ["limit", "sex", "education", "marriage", "age"],
    "Repayment": [f"status{m}" for m in range(1, 7)],
    "Bills": ["bill1"],
    "Payments": ["paid1", "paid2", "paid3"],
}
NHANES = {
    "Interview": ["age", "female", "education", "income"],
    "Body": ["height", "bmi"],
    "Pressure": ["pulse", "sys", "dia"],
    "Blood": ["hdl", "chol"],
    "Questionnaire": ["health", "smoke", "active", "sleep"],
}


def credit():
    """30,000 borrowers: default (first column) and 15 columns."""
    raw = pd.read_csv(DATA / "credit_default" / "UCI_Credit_Card.csv").rename(columns={"PAY_0": "PAY_1"})
    education = raw["EDUCATION"]
    codes = {
        "y": raw["default.payment.next.month"],
        "sex": raw["SEX"] - 1,
        "education": education.clip(1, 4).where(education > 0, 4) - 1,
        "marriage": raw["MARRIAGE"].where(raw["MARRIAGE"].isin([1, 2]), 3) - 1,
        "limit": grid(raw["LIMIT_BAL"] / 1e3, np.linspace(0, 800, 33)),
        "age": grid(raw["AGE"], np.linspace(20, 76, 29)),
        "bill1": grid(np.arcsinh(raw["BILL_AMT1"] / 5e3), np.linspace(-2, 6, 33)),
    }
    paid = np.concatenate([[-0.01, 1e-9], np.linspace(0.2, 7, 31)])
    for m in range(1, 7):
        codes[f"status{m}"] = (raw[f"PAY_{m}"] + 2).clip(0, 10)
        codes[f"paid{m}"] = grid(np.arcsinh(raw[f"PAY_AMT{m}"] / 1e3), paid)
    levels = {"sex": 2, "education": 4, "marriage": 3, "limit": 32, "age": 28, "bill1": 32}
    levels |= {f"status{m}": 11 for m in range(1, 7)} | {f"paid{m}": 32 for m in range(1, 7)}
    return pd.DataFrame(codes), levels, CREDIT


def nhanes():
    """Adults of two waves: diabetes (first column) and 15 columns, complete rows."""
    raw = pd.read_csv(DATA / "nhanes" / "NHANESraw.csv.gz", low_memory=False)
    raw = raw[raw["Age"] >= 20]
    schools = ["8th Grade", "9 - 11th Grade", "High School", "Some College", "College Grad"]
    graded = ["Excellent", "Vgood", "Good", "Fair", "Poor"]
    edges = {
        "age": ("Age", np.linspace(20, 80.01, 31)),
        "sleep": ("SleepHrsNight", np.arange(1.5, 13.5)),
        "height": ("Height", np.linspace(135, 205, 33)),
        "bmi": ("BMI", np.linspace(12, 62, 33)),
        "pulse": ("Pulse", np.linspace(40, 120, 33)),
        "sys": ("BPSysAve", np.linspace(80, 210, 33)),
        "dia": ("BPDiaAve", np.linspace(30, 110, 33)),
        "hdl": ("DirectChol", np.linspace(0.4, 3.4, 31)),
        "chol": ("TotChol", np.linspace(2, 9, 31)),
    }
    codes = {name: grid(raw[column], at) for name, (column, at) in edges.items()}
    codes["income"] = grid(raw["HHIncomeMid"] / 1e3, np.linspace(0, 110, 23))
    for name, column in {"y": "Diabetes", "smoke": "Smoke100", "active": "PhysActive"}.items():
        codes[name] = (raw[column] == "Yes").astype(float).where(raw[column].notna())
    codes["female"] = (raw["Gender"] == "female").astype(float)
    codes["education"] = raw["Education"].map({v: i for i, v in enumerate(schools)})
    codes["health"] = raw["HealthGen"].map({v: i for i, v in enumerate(graded)})
    levels = {name: len(at) - 1 for name, (_, at) in edges.items()}
    levels |= {"income": 22, "smoke": 2, "active": 2, "female": 2, "education": 5, "health": 5}
    wanted = [name for own in NHANES.values() for name in own]
    return pd.DataFrame(codes)[["y", *wanted]].dropna().reset_index(drop=True), levels, NHANES


def grid(values, edges):
    found = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return pd.Series(np.where(np.isnan(values), np.nan, found), index=values.index)


class Table:
    """A population, and what is planned of `n` rows of it at an epsilon."""

    def __init__(self, name, epsilon, n):
        self.rows, levels, held = {"credit": credit, "nhanes": nhanes}[name]()
        self.names = [column for own in held.values() for column in own]
        described = Bounds({column: range(levels[column]) for column in self.names} | {"y": [0, 1]})
        bounds = {client: {column: described[column] for column in own} for client, own in held.items()}
        design = {
            client: tuple(ScoredColumn(c, c, client, j) for j, c in enumerate(own))
            for client, own in held.items()
        }
        rho = rho_of_budget(epsilon if np.isfinite(epsilon) else 1e4, 1e-6)
        plan = MomentQuestion(
            {**bounds, "Outcome": {"y": described["y"]}}, design, "Outcome", "Binomial", rho
        )
        self.plan = plan.plan(dict.fromkeys([*bounds, "Outcome"], n))
        self.noise = noise_of(self.plan, n) if np.isfinite(epsilon) else None
        self.design, self.points = whole_design(self.plan), normal_points(len(self.names), 1)
        X = self.rows[self.names].to_numpy(dtype=float)
        self.spread = X.std(axis=0)
        self.known = sm.GLM(self.rows["y"], sm.add_constant(X), family=sm.families.Binomial()).fit()

    def fit(self, rows, rng):
        codes = rows[self.names].to_numpy(dtype=np.int64)
        y = rows["y"].to_numpy(dtype=np.int64)
        noise = self.noise
        released = release_rows(
            self.design,
            "Binomial",
            self.plan.columns["Outcome"][0],
            codes,
            y,
            noise,
            None if noise is None else rng,
        )
        return estimate(self.design, released, self.points)


def misfit(name):
    """Misfit on the whole table, in standard errors of maximum likelihood."""
    table = Table(name, np.inf, 30_000)
    fit = table.fit(table.rows, np.random.default_rng(0))
    away = ((fit.root.params - table.known.params.to_numpy()) / table.known.bse.to_numpy())[1:]
    by = dict(zip(table.names, away.round(1).tolist(), strict=True))
    print(
        f"{name}, {len(table.rows):,} rows, no noise: {np.sqrt(np.mean(away**2)):.1f} standard errors of "
        f"maximum likelihood off (root mean square), median {np.median(np.abs(away)):.1f}: {by}",
        flush=True,
    )


def cover(name, epsilon, repetitions):
    table, out = Table(name, epsilon, N), []
    truth = table.known.params.to_numpy()
    for seed in range(repetitions):
        rng = np.random.default_rng([seed, 23])
        drawn = table.rows.iloc[rng.integers(len(table.rows), size=N)]
        fit = table.fit(drawn, rng)
        errors = bootstrap(fit, N, table.noise, DRAWS, rng)
        se = np.sqrt(np.diag(errors.covariance))
        noise = errors.noise.std(axis=0, ddof=1) / errors.sampling.std(axis=0, ddof=1)
        scale = np.append(1.0, table.spread)
        out.append(np.array([(fit.root.params - truth) * scale, se * scale, noise])[:, 1:])
    e, se, noise = np.array(out).transpose(1, 0, 2)
    inside = np.abs(e) < stats.t.ppf(0.975, DRAWS - 1) * se
    worst = int(inside.mean(axis=0).argmin())
    print(
        f"{name} epsilon {epsilon:g}, {N:,} rows drawn, {repetitions} repetitions: cover "
        f"{inside.mean():.3f}, worst {inside.mean(axis=0)[worst]:.2f} ({table.names[worst]}); rmse "
        f"{np.sqrt(np.mean(e**2)):.3f}, standard error {np.sqrt(np.mean(se**2)):.3f}, noise over sampling "
        f"{np.sqrt(np.mean(noise**2)):.1f}",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        misfit(sys.argv[1])
    else:
        cover(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
