"""PrivateCopulaGLM on two real tables, which are no Gaussian copulas: bias and coverage.

    OMP_NUM_THREADS=1 python tests/models/copula_glm/real_tables.py credit|nhanes
    OMP_NUM_THREADS=1 python tests/models/copula_glm/real_tables.py cover FILE.csv 20

The table is the population, and maximum likelihood on all of it the truth; `target` is the root of its score
with the bounded scores, which differs where the model is not that of the table. Without noise, the estimate
on the table shows the misfit of the copula, in standard errors of maximum likelihood. For coverage, samples
of 10,000 rows are drawn from it, and both estimators are applied to them (``polish`` 0 and 1). Columns are
codes of public grids of at most 32 levels, standardized for comparison. Sources and terms of the tables are
in their folder.
"""

import os
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from private_coverage_simulation import noise_of, step_on_rows
from scipy import stats
from scipy.special import expit

from fedstat.models.copula.bounds import Bounds
from fedstat.models.copula.margins import Margin
from fedstat.models.copula_glm.design import ScoredColumn
from fedstat.models.copula_glm.estimation import bootstrap, estimate
from fedstat.models.copula_glm.protocol import MomentReleasePlan, complete_design
from fedstat.models.copula_glm.released_distribution import normal_points, release_rows
from fedstat.models.copula_glm.score import OF_STEP
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

    def __init__(self, name, epsilon, n, polish=0):
        self.rows, levels, held = {"credit": credit, "nhanes": nhanes}[name]()
        self.names = [column for own in held.values() for column in own]
        described = Bounds({column: range(levels[column]) for column in self.names} | {"y": [0, 1]})
        bounds = {site: {column: described[column] for column in own} for site, own in held.items()}
        design = {
            site: tuple(ScoredColumn(c, c, site, j) for j, c in enumerate(own)) for site, own in held.items()
        }
        rho = rho_of_budget(epsilon if np.isfinite(epsilon) else 1e4, 1e-6)
        plan = MomentReleasePlan(
            {**bounds, "Outcome": {"y": described["y"]}},
            design,
            "Outcome",
            "Binomial",
            rho - rho * OF_STEP * polish,
        )
        self.polish = polish
        self.plan = plan.plan(dict.fromkeys([*bounds, "Outcome"], n))
        self.noise = noise_of(self.plan, n) if np.isfinite(epsilon) else None
        self.design, self.points = complete_design(self.plan), normal_points(len(self.names), 1)
        X = self.rows[self.names].to_numpy(dtype=float)
        self.spread = X.std(axis=0)
        self.known = sm.GLM(self.rows["y"], sm.add_constant(X), family=sm.families.Binomial()).fit()

    def target(self):
        """Root of sum v (y - mu(x'b)) over the table: the estimand of bounded scores v under any law."""
        codes = self.rows[self.names].to_numpy(dtype=np.int64)
        X = sm.add_constant(codes.astype(float))
        margins = [
            Margin.of_counts(bins, bins.tally(code).astype(float), len(codes))
            for bins, code in zip(self.design.bins, codes.T, strict=True)
        ]
        V = np.column_stack([np.ones(len(X)), self.design.score(codes, self.design.tables(margins))])
        b, y = self.known.params.to_numpy(), self.rows["y"].to_numpy()
        for _ in range(25):
            mu = expit(X @ b)
            b = b + np.linalg.solve((V * (mu * (1.0 - mu))[:, None]).T @ X, V.T @ (y - mu))
        return b

    def fit(self, rows, rng):
        """Estimate from the moments of rows: the fit, and bins of columns and response."""
        codes = rows[self.names].to_numpy(dtype=np.int64)
        y, noise = rows["y"].to_numpy(dtype=np.int64), self.noise
        bins = self.plan.columns["Outcome"][0]
        known = None if noise is None else rng
        released = release_rows(self.design, "Binomial", bins, codes, y, noise, known)
        return estimate(self.design, released, self.points), codes, y

    def estimates(self, rows, rng):
        """Coefficients, standard errors, their parts of sampling and of noise: (p + 1,) each."""
        fit, codes, y = self.fit(rows, rng)
        if self.polish:
            values = rows[self.names].to_numpy(dtype=float)
            return step_on_rows(self.plan, fit, values, codes, y, self.noise is not None, rng)
        errors = bootstrap(fit, len(rows), self.noise, DRAWS, rng)
        parts = (part.std(axis=0, ddof=1) for part in (errors.sampling, errors.noise))
        return fit.root.params, np.sqrt(np.diag(errors.covariance)), *parts


def misfit(name):
    """Misfit on the table without noise, in standard errors of maximum likelihood: by estimator."""
    for polish in (0, 1):
        table = Table(name, np.inf, 30_000, polish)
        params = table.fit(table.rows, np.random.default_rng(0))[0].root.params
        if polish:
            params = table.estimates(table.rows, np.random.default_rng(0))[0]
        away = ((params - table.known.params.to_numpy()) / table.known.bse.to_numpy())[1:]
        by = dict(zip(table.names, away.round(1).tolist(), strict=True))
        print(
            f"{name}, {len(table.rows):,} rows, no noise, polish={polish}: {np.sqrt(np.mean(away**2)):.1f} "
            f"standard errors of maximum likelihood off (root mean square), median "
            f"{np.median(np.abs(away)):.1f}: {by}",
            flush=True,
        )


def cover(name, epsilon, repetitions):
    """Cover, errors and noise of both estimators on rows drawn again and again: a line each."""
    lines = []
    for polish in (0, 1):
        table, out = Table(name, epsilon, N, polish), []
        truth, target = table.known.params.to_numpy(), table.target()
        quantile = 1.96 if polish else stats.t.ppf(0.975, DRAWS - 1)
        for seed in range(repetitions):
            rng = np.random.default_rng([seed, 23])
            drawn = table.rows.iloc[rng.integers(len(table.rows), size=N)]
            params, se, sampling, noise = table.estimates(drawn, rng)
            scale = np.append(1.0, table.spread)
            parts = [(params - truth) * scale, (params - target) * scale, se * scale, noise / sampling]
            out.append(np.array(parts)[:, 1:])
        e, of_target, se, noise = np.array(out).transpose(1, 0, 2)
        inside, near = np.abs(e) < quantile * se, np.abs(of_target) < quantile * se
        worst = int(inside.mean(axis=0).argmin())
        away = e.mean(axis=0) / (table.known.bse.to_numpy()[1:] * table.spread)
        lines.append(
            {
                "table": name,
                "epsilon": epsilon,
                "polish": polish,
                "repetitions": repetitions,
                "cover": inside.mean(),
                "worst cover": inside.mean(axis=0)[worst],
                "worst": table.names[worst],
                "cover of the target": near.mean(),
                "worst of the target": near.mean(axis=0).min(),
                "rmse": np.sqrt(np.mean(e**2)),
                "standard error": np.sqrt(np.mean(se**2)),
                "noise over sampling": np.sqrt(np.mean(noise**2)),
                "bias": np.sqrt(np.mean(e.mean(axis=0) ** 2)),
                "bias in errors of the table": np.sqrt(np.mean(away**2)),
            }
        )
        print(lines[-1], flush=True)
    return lines


def every(path, repetitions):
    """Write both tables at epsilon 1, 3 and 10; lines that the file already has are not computed again."""
    lines = pd.read_csv(path).to_dict("records") if Path(path).exists() else []
    done = {(line["table"], line["epsilon"]) for line in lines}
    for name, epsilon in product(["credit", "nhanes"], [3.0, 1.0, 10.0]):
        if (name, epsilon) not in done:
            lines += cover(name, epsilon, repetitions)
            pd.DataFrame(lines).to_csv(path, index=False, float_format="%.4g")


if __name__ == "__main__":
    what, *more = sys.argv[1:]
    if what == "cover":
        every(more[0], int(more[1]))
    else:
        misfit(what)
