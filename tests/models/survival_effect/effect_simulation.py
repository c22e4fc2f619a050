"""Simulations of effects of a treatment, with the pooled arithmetic that tests compare with federated fits.

``python tests/models/survival_effect/effect_simulation.py coverage 500`` prints the table of coverage,
`robustness` augmented weighting with wrong models, `trials` a comparison of weighted Cox models, `published`
the same for settings whose estimates are published, `overlap` the coverage by the rule of poor overlap, and
`transport` that in the rows of one site.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import expit

import fedstat as fs
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable
from fedstat.models.descriptive.protocol import with_ends_apart
from fedstat.models.horizontal.overlap import overlap_notes, spread_of
from fedstat.models.survival_effect.estimates import WeightedCells, cell_influences, curve_functionals

ENDS = np.arange(0.25, 3.01, 0.25)
LOG_RATIO, SHARED = -0.5, (0.5, 0.3)
"""Log hazard ratio of the treatment, and correlations of the times with two covariates."""
AREA = curve_functionals(np.zeros(0, dtype=int), ENDS[-1] - ENDS)
Z95 = float(stats.norm.isf(0.025))


# ----------------------------------------------------------------------------------------------------
# Tables whose marginal effects are known.


def draw(
    n: int, K: int, rng: np.random.Generator, overlap: float = 0.6, effect: float = LOG_RATIO
) -> pd.DataFrame:
    """Draw rows of K sites: covariates a, b; arm t; outcomes y (normal), z (0 or 1); time and event.

    The times have proportional hazards between the arms within each site: their exponential parts depend on
    the covariates by a normal copula. Sites differ in their baseline hazard.
    """
    X = rng.normal(size=(n, 2))
    site = np.arange(n) % K
    t = (rng.random(n) < expit(overlap * X[:, 0] - overlap * X[:, 1])) * 1.0
    y = 1.0 + 0.5 * t + X[:, 0] + 0.5 * X[:, 1] + 0.3 * t * X[:, 0] + rng.normal(size=n)
    r = np.array(SHARED)
    latent = X @ r + np.sqrt(1.0 - r @ r) * rng.normal(size=n)
    z = (latent + 0.3 * t > 0.4) * 1.0
    exponential = -np.log(stats.norm.cdf(latent))
    rate = 0.4 * (1.0 + 0.5 * (site % 2)) * np.exp(effect * t)
    event_time, end = exponential / rate, rng.uniform(1.0, 5.0, n)
    time = np.ceil(np.minimum(event_time, end) / 0.25) * 0.25
    columns = {"site": site, "a": X[:, 0], "b": X[:, 1], "t": t, "y": y, "z": z}
    return pd.DataFrame(columns | {"time": time, "event": (event_time <= end) * 1.0})


def truths(K: int) -> dict[str, float]:
    """Return the estimands: difference of means, log ratio of risks, log hazard ratio, restricted means."""
    risk = stats.norm.sf([0.4, 0.1])
    shares = np.bincount(np.arange(K) % 2, minlength=2) / K
    rates = 0.4 * np.array([1.0, 1.5])
    (area,) = AREA
    lost = [shares @ -np.expm1(-np.outer(rates * np.exp(LOG_RATIO * arm), ENDS)) @ area for arm in (0, 1)]
    return {
        "difference": 0.5,
        "log ratio": float(np.log(risk[1] / risk[0])),
        "log hazard ratio": LOG_RATIO,
        "restricted mean": float(lost[0] - lost[1]),
    }


# ----------------------------------------------------------------------------------------------------
# Estimates of the pooled table.


@dataclass
class Propensity:
    """Weights of the rows, derivatives of their logarithms, and the rows' influences on the coefficients."""

    w: np.ndarray
    slopes: np.ndarray
    influence: np.ndarray

    @classmethod
    def fit(cls, t: np.ndarray, Z: np.ndarray) -> Propensity:
        """Estimate inverse probability weights by a logistic model."""
        gamma = logistic(Z, t)
        e = expit(Z @ gamma)
        information = (Z * (e * (1 - e))[:, None]).T @ Z
        slopes = Z * ((1 - t) * e - t * (1 - e))[:, None]
        influence = np.linalg.solve(information, (Z * (t - e)[:, None]).T).T
        return cls(t / e + (1 - t) / (1 - e), slopes, influence)

    def stacked(self, rows: np.ndarray) -> np.ndarray:
        """Add the estimated weights to influences of rows with known weights, (n, k)."""
        return rows + self.influence @ (rows.T @ self.slopes).T


def logistic(Z: np.ndarray, t: np.ndarray, w: np.ndarray | float = 1.0) -> np.ndarray:
    """Maximize the likelihood of a logistic model."""
    gamma = np.zeros(Z.shape[1])
    for _ in range(40):
        e = expit(Z @ gamma)
        step = np.linalg.solve((Z * (w * e * (1 - e))[:, None]).T @ Z, Z.T @ (w * (t - e)))
        gamma = gamma + step
        if np.abs(step).max() < 1e-10:
            return gamma
    raise RuntimeError("no convergence")


def mean_influences(p: Propensity, t: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weighted means of the arms (2,), and the influences of the rows with known weights (n, 2)."""
    inside = np.column_stack([1 - t, t]) * p.w[:, None]
    mean = inside.T @ y / inside.sum(axis=0)
    return mean, inside * (y[:, None] - mean) / inside.sum(axis=0)


def augmented(
    p: Propensity, t: np.ndarray, y: np.ndarray, Z: np.ndarray, X: np.ndarray
) -> tuple[float, float]:
    """Return the augmented weighted difference of means with linear outcome models, and its error."""
    n, total, phi = len(y), 0.0, np.zeros(len(y))
    m = {}
    for arm in (0, 1):
        inside = t == arm
        XX = np.linalg.inv(X[inside].T @ X[inside])
        beta = XX @ X[inside].T @ y[inside]
        m[arm] = X @ beta, XX, inside
    sign = {0: -1.0, 1: 1.0}
    for arm, (fit, XX, inside) in m.items():
        part = inside * p.w * (y - fit) + fit
        total += sign[arm] * part.mean()
        # Outcome coefficients: derivative of the mean, times their influence.
        slope = ((1.0 - inside * p.w) @ X) / n
        own = p.stacked((inside * p.w * (y - fit))[:, None] / n)[:, 0]
        phi += sign[arm] * (own + (fit - part.mean()) / n + (X * (inside * (y - fit))[:, None]) @ XX @ slope)
    return total, float(np.sqrt(phi @ phi))


def hazard_influences(p: Propensity, d: pd.DataFrame, ties: str = "efron") -> tuple[float, np.ndarray]:
    """Return the weighted log hazard ratio with a baseline for each site, and the rows' influences (n, 1)."""
    table = RiskTable.of(
        np.zeros(len(d)), d["time"].to_numpy(), d["event"].to_numpy() == 1, p.w, d["site"].to_numpy()
    )
    X, beta = d[["t"]].to_numpy(), np.zeros(1)
    for _ in range(30):
        now = PartialLikelihood.at(table, X, X @ beta, ties)
        step = np.linalg.solve(now.information(), now.score())
        beta = beta + step
        if np.abs(step).max() < 1e-10:
            break
    return float(beta[0]), now.row_scores() @ np.linalg.inv(now.information())


def cells_of(p: Propensity, d: pd.DataFrame) -> tuple[WeightedCells, np.ndarray]:
    """Return the sums by arm, interval and outcome, and the cell of each row."""
    edges = with_ends_apart(ENDS, np.ones(len(ENDS), dtype=bool))
    shape = 2, len(edges) + 1, 2
    interval = np.searchsorted(edges, d["time"])
    code = np.ravel_multi_index((d["t"].astype(int), interval, d["event"].astype(int)), shape)
    sums = (np.bincount(code, one, int(np.prod(shape))).reshape(shape) for one in (p.w, np.ones(len(d))))
    return WeightedCells(edges, *sums), code


def restricted_influences(p: Propensity, d: pd.DataFrame) -> tuple[float, np.ndarray]:
    """Return the difference of the restricted means, and the rows' influences (n, 1)."""
    cells, code = cells_of(p, d)
    lost = cells.incidence[:, 0] @ AREA[0]
    g = cell_influences(cells, AREA, None) @ np.array([1.0, -1.0])
    return float(lost[0] - lost[1]), p.w[:, None] * g.ravel()[code, None]


def estimates(d: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return estimates and stacked errors of one table."""
    t, Z = d["t"].to_numpy(), np.column_stack([np.ones(len(d)), d[["a", "b"]]])
    p = Propensity.fit(t, Z)
    risk, rows = mean_influences(p, t, d["z"].to_numpy())
    log_ratio = p.stacked((rows[:, 1] / risk[1] - rows[:, 0] / risk[0])[:, None])
    hazard, h = hazard_influences(p, d)
    restricted, r = restricted_influences(p, d)
    return {
        "difference": augmented(p, t, d["y"].to_numpy(), Z, Z),
        "log ratio": (float(np.log(risk[1] / risk[0])), float(np.linalg.norm(log_ratio))),
        "log hazard ratio": (hazard, float(np.linalg.norm(p.stacked(h)))),
        "restricted mean": (restricted, float(np.linalg.norm(p.stacked(r)))),
    }


def coverage(n: int, K: int, replications: int, seed: int = 1) -> pd.DataFrame:
    """Return bias, mean error, standard deviation and coverage of 95 % intervals by estimand."""
    rng = np.random.default_rng([seed, n, K])
    found = [estimates(draw(n, K, rng)) for _ in range(replications)]
    rows = {}
    for name, truth in truths(K).items():
        value, error = np.array([one[name] for one in found]).T
        inside = np.abs(value - truth) <= Z95 * error
        rows[name] = value.mean() - truth, error.mean(), value.std(ddof=1), inside.mean()
    return pd.DataFrame.from_dict(
        rows, orient="index", columns=["bias", "mean error", "deviation", "coverage"]
    )


def coverage_table(replications: int) -> pd.DataFrame:
    """Return the coverage by number of rows and sites."""
    return pd.concat(
        {(n, K): coverage(n, K, replications) for n in (300, 1000, 5000) for K in (1, 3, 10)},
        names=["rows", "sites", "estimand"],
    )


def double_robustness(replications: int, n: int = 2000) -> pd.DataFrame:
    """Return bias and error of augmented weighting with wrong models: a column is left out of each."""
    rng = np.random.default_rng(11)
    rows: dict[str, list[tuple[float, float]]] = {}
    for _ in range(replications):
        d = draw(n, 3, rng)
        t, y, whole = d["t"].to_numpy(), d["y"].to_numpy(), np.column_stack([np.ones(n), d[["a", "b"]]])
        wrong = whole[:, [0, 2]]
        for name, Z, X in (
            ("both right", whole, whole),
            ("propensity wrong", wrong, whole),
            ("outcome wrong", whole, wrong),
            ("both wrong", wrong, wrong),
        ):
            rows.setdefault(name, []).append(augmented(Propensity.fit(t, Z), t, y, Z, X))
    found = {name: np.array(several).T for name, several in rows.items()}
    table = {
        name: (value.mean() - 0.5, error.mean(), (np.abs(value - 0.5) <= Z95 * error).mean())
        for name, (value, error) in found.items()
    }
    return pd.DataFrame.from_dict(table, orient="index", columns=["bias", "mean error", "coverage"])


def draw_trial(
    n: int, shift: float, ratio: float, rng: np.random.Generator, late: bool = False
) -> pd.DataFrame:
    """Draw a trial with an external control arm by the design of Ogier du Terrail et al. (2025, FedECA).

    Ten correlated normal covariates have drawn coefficients in the hazard, and in the arm by the `shift`;
    `ratio` is the hazard ratio given the covariates, the baseline that of Weibull times. About two thirds of
    the rows are censored; with `late` at the time of their event, as in the published program.
    """
    p = 10
    root = np.linalg.cholesky(0.5 ** np.abs(np.subtract.outer(np.arange(p), np.arange(p))))
    X = rng.normal(size=(n, p)) @ root.T
    t = (rng.random(n) < expit(X @ (2.0 * shift * rng.uniform(-0.5, 0.5, p) / np.sqrt(p)))) * 1.0
    hazard = np.exp(X @ rng.normal(size=p) + t * np.log(ratio))
    time = 10.0 * (rng.exponential(size=n) / hazard) ** (1.0 / 3.0)
    end = rng.exponential(0.5 * time.mean(), n)
    columns = {
        "site": 0,
        "t": t,
        "time": time if late else np.minimum(time, end),
        "event": (time <= end) * 1.0,
    }
    return pd.DataFrame(X, columns=[f"x{j}" for j in range(p)]).assign(**columns)


def federated_trials(replications: int) -> pd.DataFrame:
    """Return rejected tests of weighted Cox models of trials with an external control arm.

    The settings are those of the article: 700 rows by shift, and the strongest shift by rows.
    """
    settings = (*((700, 0.5 * k) for k in range(5)), *((n, 2.0) for n in (300, 500, 900, 1100)))
    return weighted_trials(((n, shift, ratio) for n, shift in settings for ratio in (1.0, 0.4)), replications)


def published_trials(replications: int) -> pd.DataFrame:
    """Return the same for the settings of the published estimates: 1,000 rows, a hazard ratio of 0.4."""
    return weighted_trials(((1000, 0.5 * k, 0.4) for k in range(5)), replications, late=True)


def weighted_trials(
    settings: Iterable[tuple[int, float, float]], replications: int, late: bool = False
) -> pd.DataFrame:
    """Return estimates, errors and rejected tests by rows, shift and hazard ratio."""
    rows = {}
    for n, shift, ratio in settings:
        rng, found = np.random.default_rng([7, n, int(2 * shift), int(10 * ratio)]), []
        for _ in range(replications):
            d = draw_trial(n, shift, ratio, rng, late)
            t, X = d["t"].to_numpy(), d.filter(regex="^x").to_numpy()
            p = Propensity.fit(t, np.column_stack([np.ones(n), X]))
            value, influences = hazard_influences(p, d)
            found.append([value, np.linalg.norm(p.stacked(influences)), np.linalg.norm(influences)])
        value, *errors = np.array(found).T
        rejected = [(np.abs(value) > Z95 * error).mean() for error in errors]
        means = (value.mean(), value.std(ddof=1), *(error.mean() for error in errors))
        rows[n, shift, ratio] = (*means, *rejected)
    names = ["mean", "deviation", "stacked error", "robust error", "rejected", "rejected, robust"]
    index = pd.MultiIndex.from_tuples(rows, names=["rows", "shift", "hazard ratio"])
    return pd.DataFrame(rows.values(), index, names)


def overlap_rule(replications: int) -> pd.DataFrame:
    """Return the coverage of weighted and augmented differences by the rows that carry the variance.

    Three covariates, one binary and one skewed in half of the settings, shift arm and outcome, whose effect
    varies; the outcome has a square that linear models lack in half of the settings.
    """
    rng, rows = np.random.default_rng(21), []
    for n, strength, skewed, square in product(
        (300, 1000, 5000), (0.25, 0.5, 1.0, 1.5, 2.0), (False, True), (False, True)
    ):
        for _ in range(replications):
            x = rng.normal(size=(n, 3))
            x[:, 1] = x[:, 1] > 0.25
            x[:, 2] = rng.exponential(size=n) - 1.0 if skewed else x[:, 2]
            t = (rng.random(n) < expit(0.7 * strength * x.sum(axis=1) - strength)) * 1.0
            y = x @ [1.0, 0.5, 1.0] + square * 0.5 * (x[:, 0] ** 2 - 1.0) + t * (1.0 + 0.5 * x[:, 0])
            y, Z = y + rng.normal(size=n), np.column_stack([np.ones(n), x])
            try:
                p = Propensity.fit(t, Z)
            except (RuntimeError, np.linalg.LinAlgError):  # separated arms have no estimate
                continue
            mean, phi = mean_influences(p, t, y)
            found = (float(mean[1] - mean[0]), float(np.linalg.norm(p.stacked(phi) @ [-1.0, 1.0])))
            inside = [abs(value - 1.0) <= Z95 * error for value, error in (found, augmented(p, t, y, Z, Z))]
            sums = spread_of(np.column_stack([1.0 - t, t]) * p.w[:, None])
            few = any(overlap_notes("01", sums[:, 0], sums[:, 1:], False))
            rows.append((float((sums[:, 2] ** 2 / sums[:, 3]).min()), few, *inside))
    frame = pd.DataFrame(rows, columns=["carrying", "announced", "weighted", "augmented"])
    classes = pd.cut(frame["carrying"], [0, 10, 25, 50, 100, np.inf]).astype(str)
    both = pd.concat([classes, frame["announced"].map({True: "announced", False: "not announced"})])
    return pd.concat([frame, frame]).groupby(both.to_numpy())[["weighted", "augmented"]].agg(["size", "mean"])


def transport(replications: int) -> pd.DataFrame:
    """Return the coverage of the effect in the rows of one of three sites, whose columns differ."""
    rows = {}
    for n in (300, 1000, 5000):
        rng, inside = np.random.default_rng([31, n]), []
        for _ in range(replications):
            site = np.arange(n) % 3
            X = rng.normal(size=(n, 2)) + 0.5 * (site[:, None] - 1.0)
            t = (rng.random(n) < expit(0.4 * X[:, 0] - 0.4 * X[:, 1])) * 1.0
            y = X.sum(axis=1) + t * (0.5 + 0.5 * X[:, 0]) + rng.normal(size=n)
            d = pd.DataFrame({"site": site.astype(str), "a": X[:, 0], "b": X[:, 1], "t": t, "y": y})
            partition = fs.ClientPartition.from_frame(d, by="site")
            model = fs.TreatmentEffect.from_formula("y ~ a + b", partition, treatment="t ~ a + b", target="2")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fs.errors.DisclosureWarning)  # sums are not masked, for time
                fits = [model.fit(method, local=False, masked=False) for method in ("ipw", "aipw")]
            inside.append([abs(fit.params.iloc[0] - 0.75) <= Z95 * fit.bse.iloc[0] for fit in fits])
        rows[n] = np.mean(inside, axis=0)
    return pd.DataFrame.from_dict(rows, orient="index", columns=["weighted", "augmented"])


if __name__ == "__main__":
    what, replications = sys.argv[1], int(sys.argv[2])
    tables = {
        "coverage": coverage_table,
        "robustness": double_robustness,
        "trials": federated_trials,
        "published": published_trials,
        "overlap": overlap_rule,
        "transport": transport,
    }
    print(tables[what](replications).round(4).to_string())
