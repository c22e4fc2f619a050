"""Registry of all public families and analyses: a small partition and some fits of each, made once.

`FITS` has the fits, several per family where the printed summary takes another branch. `MADE` has results
that are made of a fit.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import statsmodels.api as sm
from seeded_secrets import SECRETS

import fedstat as fs

GAUSSIAN, BINOMIAL, POISSON = sm.families.Gaussian(), sm.families.Binomial(), sm.families.Poisson()
GAMMA = sm.families.Gamma(sm.families.links.Log())
NEGATIVE_BINOMIAL = sm.families.NegativeBinomial(alpha=1.0)
ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1, max_parameters=1e9)
SITES = ("Bonn", "Jena", "Kiel", "Ulm")

# ---- data ------------------------------------------------------------------------------------------------


@functools.cache
def rows_table(n: int = 480) -> pd.DataFrame:
    """Patients of four sites with five visits each, and a column for each role in a model."""
    rng = np.random.default_rng(11)
    person = np.arange(n) // 5
    t = pd.DataFrame({"site": np.array(SITES)[person % 4], "person": person, "visit": np.arange(n) % 5})
    t["ward"] = t["site"] + (person // 4 % 6).astype(str)
    t["x"], t["z"] = rng.normal(size=n), rng.normal(1.0, 2.0, n).round(3)
    t["g"] = rng.choice(["a", "b", "c"], n)
    own = 0.6 * rng.normal(size=person.max() + 1)[person] + 0.3 * (t["site"] == "Ulm")
    eta = 0.5 * t["x"] - 0.2 * t["z"] + 0.4 * (t["g"] == "b") + own
    t["y"] = 2.0 + eta + rng.normal(size=n)
    t["e"] = (eta + rng.logistic(size=n) > 0.0).astype(int)
    t["trials"] = rng.integers(2, 6, n)
    t["hits"] = rng.binomial(t["trials"], 1.0 / (1.0 + np.exp(-eta)))
    t["misses"] = t["trials"] - t["hits"]
    t["k"] = rng.poisson(np.exp(0.4 * eta))
    t["cost"] = (np.exp(0.4 * eta) * rng.gamma(3.0, 1.0 / 3.0, n)).round(4) + 0.01
    t["grade"] = np.digitize(eta + rng.logistic(size=n), [-1.0, 0.5, 1.5])
    t["kind"] = np.array(["p", "q", "r"])[np.digitize(0.7 * t["x"] + rng.logistic(size=n), [-0.5, 0.8])]
    t["time"] = np.ceil(rng.exponential(10.0 * np.exp(-0.5 * eta))).clip(1, 40)
    t["died"] = (rng.random(n) < 0.7).astype(int)
    t["cause"] = t["died"] * rng.integers(1, 3, n)
    t["entry"] = np.where(rng.random(n) < 0.3, np.minimum(t["time"] - 1.0, 2.0), 0.0)
    t["months"] = rng.integers(1, 13, n)
    t["shift"] = (rng.integers(0, 5, n) / 10.0).round(1)
    t["f"], t["v"] = rng.integers(1, 4, n), rng.uniform(0.5, 2.0, n).round(3)
    return t


@functools.cache
def columns_table(n: int = 420) -> pd.DataFrame:
    """Entities with correlated columns of three sites, and responses of four kinds."""
    rng = np.random.default_rng(5)
    common = rng.normal(size=n)
    t = pd.DataFrame(
        {name: 0.5 * common + rng.normal(size=n) for name in ("a1", "a2", "b1", "b2", "c1", "c2")}
    )
    eta = 0.6 * t["a1"] - 0.4 * t["b1"] + 0.5 * t["c1"]
    t["y"] = 1.0 + eta + rng.normal(size=n)
    t["e"] = (eta + rng.logistic(size=n) > 0.0).astype(float)
    t["k"] = rng.poisson(np.exp(0.2 + 0.3 * eta)).astype(float)
    t["cost"] = np.exp(0.3 * eta) * rng.gamma(3.0, 1.0 / 3.0, n)
    t["f"], t["shift"] = rng.integers(1, 4, n).astype(float), rng.integers(0, 7, n) / 10.0
    t["id"] = np.arange(n)
    return t


HELD = {"A": ["y", "e", "k", "cost", "f", "shift", "a1", "a2"], "B": ["b1", "b2"], "C": ["c1", "c2"]}


@functools.cache
def column_frames(missing: bool) -> dict[str, pd.DataFrame]:
    """One table for each of three sites; with missing blocks, sites B and C have records of a part."""
    t, rng = columns_table(), np.random.default_rng(6)
    shares = {"A": 1.0, "B": 0.75, "C": 0.6} if missing else dict.fromkeys("ABC", 1.0)
    kept = {name: rng.random(len(t)) < share for name, share in shares.items()}
    return {name: t.loc[kept[name], ["id", *held]] for name, held in HELD.items()}


def rows(table: pd.DataFrame | None = None, **given: Any) -> fs.ClientPartition:
    """Return the patients by site."""
    return fs.ClientPartition.from_frame(rows_table() if table is None else table, by="site", **given)


def columns(missing: bool = True, **given: Any) -> fs.ClientPartition:
    """Return the entities by column."""
    return fs.ClientPartition.from_frames(column_frames(missing), on="id", **given)


def clusters(**given: Any) -> fs.ClientPartition:
    """Return entities of two groups, with columns of two kinds and a variable outside."""
    data = fs.datasets.make_clusters(160, ["continuous", "ordinal"], p=3, seed=1)
    first = data.frames["Client 1"]
    first["outside"] = data.labels.to_numpy() + first["c1_1"] / 10
    return fs.ClientPartition.from_frames(data.frames, on=data.key, **given)


def budget(**given: Any) -> fs.ClientPartition:
    """Return two columns of two sites that allow noisy releases."""
    t = columns_table()
    frame = pd.DataFrame({"age": (50 + 12 * t["a1"]).clip(20, 80).round(), "sex": (t["b1"] > 0).astype(int)})
    policy = fs.Policy(privacy=fs.Budget(epsilon=500.0, delta=1e-5))
    return fs.ClientPartition.from_frame(frame, columns={"A": ["age"], "B": ["sex"]}, policy=policy, **given)


def budget_rows(**given: Any) -> fs.ClientPartition:
    """Return the patients of sites that allow noisy releases."""
    return rows(policy=fs.Policy(privacy=fs.Budget(epsilon=500.0, delta=1e-5)), **given)


BOUNDS = {"age": (20, 80), "sex": [0, 1]}
X_BOUNDS = {"x": (-4.0, 4.0), "z": (-8.0, 10.0), "y": (-6.0, 10.0)}
WITH_NOISE = {"epsilon": 50.0, "bounds": {**X_BOUNDS, "g": ["a", "b", "c"], "kind": ["p", "q", "r"]}}
PARTITIONS: dict[str, Callable[..., fs.ClientPartition]] = {
    "rows": rows,
    "two rows": lambda **given: rows(rows_table()[rows_table()["site"].isin(SITES[:2])], **given),
    "incomplete rows": lambda **given: rows(
        rows_table().assign(x=lambda t: t["x"].where(t["visit"] != 2)), **given
    ),
    "columns": columns,
    "complete columns": lambda **given: columns(False, **given),
    "clusters": clusters,
    "budget": budget,
    "budget of rows": budget_rows,
}

# ---- fits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """One fit of a family: `make` builds the model, or the result of a function, on a partition of `data`."""

    family: str
    data: str
    make: Callable[[Any], Any]
    arguments: Mapping[str, Any] | None = None  # of the method fit; None for a function
    tolerance: float = 1e-9  # relative, of the numbers in the golden file; infinite where these are noisy

    def run(self, partition: Any) -> Any:
        """Return the result on a partition."""
        made = self.make(partition)
        return made if self.arguments is None else made.fit(**self.arguments)


def of(
    name: str, data: str, formula: str, arguments: Mapping[str, Any] | None = None, **settings: Any
) -> Fit:
    """Return a fit of a model with a formula."""
    kind = getattr(fs, name)
    return Fit(
        name, data, lambda partition: kind.from_formula(formula, partition, **settings), arguments or {}
    )


def noisy(fit: Fit) -> Fit:
    """Compare no numbers: the noise of a request follows from its digits, which depend on the processor."""
    return replace(fit, tolerance=np.inf)


def by(family: str, data: str, call: Callable[[Any], Any]) -> Fit:
    """Return a call of a public function."""
    return Fit(family, data, call)


def estimates(count: int = 3) -> list[Any]:
    """Return separate least-squares fits by statsmodels."""
    tables = [part for _, part in rows_table().groupby("site")][:count]
    return [sm.OLS.from_formula("y ~ x", table).fit() for table in tables]


def weighted(name: str, formula: str, treatment: str, data: str = "rows", **settings: Any) -> Fit:
    """Return a fit of a model of rows that are weighted by a fitted propensity model."""

    def make(partition: fs.ClientPartition) -> Any:
        given = fs.TreatmentEffect.from_formula("y ~ 1", partition, treatment=treatment)
        weights = given.balance(overlap=False)
        return getattr(fs, name).from_formula(formula, partition, weights=weights, **settings)

    return Fit(name, data, make, {})


GROUPS = {"cov_type": "cluster", "cov_kwds": {"groups": "person"}}
SURVEY = {"cov_type": "survey", "cov_kwds": {"clusters": "ward", "strata": "site"}}
COMMON = {"baseline": "common", "grid": 2, "until": 30}
SURV, RISKS = "Surv(time, died) ~ x + z", "Surv(time, C(cause, levels=[0, 1, 2])) ~ g"
LINEAR, LOGISTIC, COUNTS = "y ~ x + z + C(g)", "e ~ x + z", "k ~ x + z"
PROFILES = pd.DataFrame({"x": [-1.0, 1.0], "z": [1.0, 1.0]}, index=["low", "high"])
STEPWISE = {"exchange": "iterative"}
ALL, SICK = "y ~ a1 + a2 + b1 + b2 + c1 + c2", "e ~ a1 + b1 + c1"
CLUSTERED = "~ c1_1 + c1_2 + c1_3 + c2_1 + c2_2 + c2_3"

PLAIN = {
    "FederatedOLS": "y ~ {x} + z",
}
"""Models over rows whose fit needs no argument, with a formula; the template of a family adds its own."""

FITS: dict[str, Fit] = {
    # rows: linear models
    "ols": of("FederatedOLS", "rows", LINEAR),
    "ols robust": of("FederatedOLS", "rows", LINEAR, {"cov_type": "HC3"}),
    "ols clusters": of("FederatedOLS", "rows", "y ~ x + z", GROUPS, labels=["person"]),
    "ols survey": of("FederatedOLS", "rows", "y ~ x", SURVEY, labels=["ward", "site"], var_weights="v"),
    "ols frequency weights": of("FederatedOLS", "rows", "y ~ x * z", freq_weights="f"),
    "ols without own fits": of("FederatedOLS", "rows", "y ~ x + z", {"local": False}),
    "ols absorbed": of("FederatedOLS", "rows", "y ~ x + z | ward"),
    "ols of two sites": of("FederatedOLS", "two rows", "y ~ x"),
    "ols transforms": of(
        "FederatedOLS",
        "rows",
        "y ~ scale(x) + poly(z, 2) + bs(shift, knots=(0.2,), lower_bound=0, upper_bound=0.5)",
    ),
    "glm gaussian": of("FederatedGLM", "rows", LINEAR, family=GAUSSIAN),
    "glm poisson": of("FederatedGLM", "rows", COUNTS, exposure="months", family=POISSON),
    "glm poisson overdispersed": of(
        "FederatedGLM", "rows", COUNTS, {"scale": "X2"}, offset="shift", family=POISSON
    ),
    "glm gamma": of("FederatedGLM", "rows", "cost ~ x + z", family=GAMMA),
    "glm negative binomial": of(
        "FederatedGLM", "rows", COUNTS, {"dispersion": "ml"}, family=NEGATIVE_BINOMIAL
    ),
    "glm two counts": of("FederatedGLM", "rows", "cbind(hits, misses) ~ x + z", family=BINOMIAL),
    "glm probit": of(
        "FederatedGLM", "rows", LOGISTIC, family=sm.families.Binomial(sm.families.links.Probit())
    ),
    "glm with noise": noisy(of("FederatedGLM", "budget of rows", "y ~ x + z", WITH_NOISE, family=GAUSSIAN)),
    "glm few rounds": of("FederatedGLM", "rows", LOGISTIC, {"rounds": 1}, family=BINOMIAL),
    "glm cut off": of("FederatedGLM", "rows", COUNTS, {"maxiter": 1}, family=POISSON),
    "logistic": of("GLORE", "rows", LOGISTIC),
    "logistic robust": of("GLORE", "rows", LOGISTIC, {"cov_type": "HC1"}),
    "logistic clusters": of("GLORE", "rows", LOGISTIC, GROUPS, labels=["person"]),
    "logistic by sites": of(
        "GLORE", "rows", LOGISTIC, {"cov_type": "cluster", "cov_kwds": {"groups": "site"}}
    ),
    "logistic effects of sites": of("GLORE", "rows", "e ~ x + C(site)", {"local": False}),
    "logistic unmasked": of("GLORE", "rows", LOGISTIC, {"masked": False}),
    # rows: federated averaging
    "fedavg": of("FedAvg", "rows", LOGISTIC, {"rounds": 4, "standardize": True}, family=BINOMIAL),
    "fedavg a share": of(
        "FedAvg", "rows", LOGISTIC, {"rounds": 4, "fraction": 0.5, "seed": 5}, family=BINOMIAL
    ),
    "fedavgm": of("FedAvgM", "rows", LOGISTIC, {"rounds": 3}, family=BINOMIAL),
    "fedprox": of("FedProx", "rows", LOGISTIC, {"rounds": 2}, family=BINOMIAL),
    "qfedavg": of("QFedAvg", "rows", LOGISTIC, {"rounds": 2, "masked": False}, family=BINOMIAL),
    # rows: repeated measurements
    "gee": of("FederatedGEE", "rows", "y ~ x + z", groups="person"),
    "gee exchangeable": of(
        "FederatedGEE", "rows", LOGISTIC, groups="person", family=BINOMIAL, cov_struct="exchangeable"
    ),
    "gee autoregressive": of(
        "FederatedGEE", "rows", COUNTS, groups="person", time="visit", family=POISSON, cov_struct="ar1"
    ),
    "gee robust": of("FederatedGEE", "rows", "y ~ x", {"cov_type": "robust"}, groups="person", weights="v"),
    "mixed": of("FederatedMixed", "rows", "y ~ x + z + (1 | person)"),
    "mixed slopes": of("FederatedMixed", "rows", "y ~ x + (1 + x | person)"),
    "mixed maximum likelihood": of(
        "FederatedMixed", "rows", "y ~ x + (1 | person)", {"cov_type": "robust"}, reml=False
    ),
    "mixed logistic": of("FederatedMixed", "rows", "e ~ x + (1 | person)", family=BINOMIAL),
    "mixed counts": of("FederatedMixed", "rows", "k ~ x + (1 | person)", family=POISSON, exposure="months"),
    "mixed sites": of("FederatedMixed", "rows", "y ~ x + (1 | site)"),
    # rows: times and categories
    "cox": of("FederatedCox", "rows", SURV),
    "cox robust": of(
        "FederatedCox", "rows", SURV, {"cov_type": "robust", "ties": "breslow"}, freq_weights="f"
    ),
    "cox clusters and strata": of(
        "FederatedCox", "rows", "Surv(time, died) ~ x + strata(g) + cluster(person)"
    ),
    "cox late entry": of("FederatedCox", "rows", "Surv(entry, time, died) ~ x + C(g)"),
    "cox common": of("FederatedCox", "rows", SURV, COMMON),
    "cox cut off": of("FederatedCox", "rows", SURV, {"maxiter": 1}),
    "aft": of("FederatedAFT", "rows", SURV),
    "aft robust": of(
        "FederatedAFT", "rows", SURV, {"cov_type": "robust"}, distribution="lognormal", var_weights="v"
    ),
    "aft clusters": of(
        "FederatedAFT", "rows", "Surv(time, died) ~ x + cluster(person)", distribution="loglogistic"
    ),
    "aft late entry": of(
        "FederatedAFT", "rows", "Surv(entry, time, died) ~ x + C(g)", distribution="exponential"
    ),
    "aft without covariates": of("FederatedAFT", "rows", "Surv(time, died) ~ 1", {"local": False}),
    "aft cut off": of("FederatedAFT", "rows", SURV, {"maxiter": 1}),
    # rows: effects of a treatment
    "treatment": of("TreatmentEffect", "rows", "y ~ x + z", treatment="e ~ x + z"),
    "treatment weights": of(
        "TreatmentEffect",
        "rows",
        "k ~ 1",
        {"method": "ipw", "local": False},
        treatment="C(g, levels=['b', 'a', 'c']) ~ x",
        estimand="ATO",
    ),
    "treatment standardization": of(
        "TreatmentEffect",
        "two rows",
        "died ~ x",
        {"method": "standardization"},
        treatment="e ~ x",
        family=BINOMIAL,
        estimand="ATT",
    ),
    "treatment weighted models": of(
        "TreatmentEffect",
        "rows",
        "y ~ x",
        {"method": "ipw_ra", "masked": False},
        treatment="e ~ x",
        propensity="intercepts",
        trim=0.1,
    ),
    "treatment of a site": of(
        "TreatmentEffect",
        "rows",
        "y ~ x",
        GROUPS,
        treatment="e ~ x",
        target="Jena",
        weights="v",
        link="probit",
        labels=["person"],
    ),
    "survival effect": of(
        "SurvivalEffect", "rows", "Surv(time, died) ~ 1", {"grid": 2, "until": 30}, treatment="e ~ x + z"
    ),
    "survival effect of causes": of(
        "SurvivalEffect",
        "rows",
        "Surv(time, C(cause, levels=[0, 1, 2])) ~ 1",
        {"grid": [6, 12, 24], "baseline": "common", "ties": "breslow", "times": [12]},
        treatment="C(g, levels=['b', 'a', 'c']) ~ x",
        estimand="ATO",
    ),
    "survival effect of strata": of(
        "SurvivalEffect", "two rows", "Surv(time, died) ~ strata(g)", treatment="e ~ x", estimand="ATT"
    ),
    "survival effect cut off": of(
        "SurvivalEffect", "rows", "Surv(time, died) ~ 1", {"maxiter": 1}, treatment="e ~ x + z"
    ),
    "survival effect of a site": of(
        "SurvivalEffect",
        "rows",
        "Surv(time, died) ~ 1",
        {"grid": 4, "until": 40, "times": [20], "baseline": "common", **GROUPS},
        treatment="e ~ x",
        target="Jena",
        weights="v",
        labels=["person"],
    ),
    "treatment balance": by(
        "TreatmentEffect",
        "rows",
        lambda partition: fs.TreatmentEffect.from_formula(
            "y ~ 1", partition, treatment="g ~ x + z", estimand="ATO"
        ).balance(),
    ),
    "treatment cut off": of("TreatmentEffect", "rows", "y ~ x", {"maxiter": 1}, treatment="e ~ x"),
    "glm of weighted rows": weighted("FederatedGLM", "k ~ C(g)", "g ~ x + z", family=POISSON),
    "ols of weighted rows": weighted("FederatedOLS", "y ~ e", "e ~ x + z", "two rows"),
    "gee of weighted rows": weighted(
        "FederatedGEE", "e ~ C(g) + visit", "g ~ x + z", groups="person", family=BINOMIAL
    ),
    "cox of weighted rows": weighted(
        "FederatedCox", "Surv(time, died) ~ C(g) + cluster(person)", "g ~ x + z"
    ),
    "ordinal": of("FederatedOrdinal", "rows", "grade ~ x + z"),
    "ordinal robust": of(
        "FederatedOrdinal", "rows", "grade ~ x + C(g)", {"cov_type": "HC1"}, distr="cloglog", freq_weights="f"
    ),
    "ordinal clusters": of("FederatedOrdinal", "rows", "grade ~ x", GROUPS, labels=["person"]),
    "multinomial": of("FederatedMultinomial", "rows", "C(kind) ~ x + z"),
    "multinomial clusters": of("FederatedMultinomial", "rows", "kind ~ x", GROUPS, labels=["person"]),
    "kaplan-meier": of("KaplanMeier", "rows", "Surv(time, died) ~ g", {"grid": 1, "until": 40}),
    "kaplan-meier with noise": noisy(
        of(
            "KaplanMeier",
            "budget of rows",
            "Surv(time, died) ~ g",
            {"grid": 1, "until": 40, "epsilon": 50.0, "bounds": {"g": ["a", "b", "c"]}},
        )
    ),
    "kaplan-meier of all": of("KaplanMeier", "rows", "Surv(time, died) ~ 1", {"grid": 4, "until": 40}),
    "cumulative incidence": of("CumulativeIncidence", "rows", RISKS, {"grid": 2, "until": 40}),
    # rows: tables
    "table one": by(
        "table_one", "rows", lambda p: fs.table_one(p, "x + z + C(kind)", by="g", smd=True, pvalues=True)
    ),
    "table one with quantiles": by(
        "table_one", "rows", lambda p: fs.table_one(p, "x + y", nonnormal=["x"], bounds=X_BOUNDS)
    ),
    "table one of columns": by("table_one", "complete columns", lambda p: fs.table_one(p, "a1 + b1")),
    "crosstab": by("crosstab", "rows", lambda p: fs.crosstab(p, "g", "kind")),
    "crosstab with noise": noisy(
        by("crosstab", "budget of rows", lambda p: fs.crosstab(p, "g", "kind", **WITH_NOISE))
    ),
    "table one with noise": noisy(
        by(
            "table_one",
            "budget of rows",
            lambda p: fs.table_one(p, "x + z + kind", by="g", nonnormal=["x"], **WITH_NOISE),
        )
    ),
    "histogram with noise": noisy(
        by("histogram", "budget of rows", lambda p: fs.histogram(p, "x", bins=6, by="g", **WITH_NOISE))
    ),
    "quantiles with noise": noisy(
        by("quantiles", "budget of rows", lambda p: fs.quantiles(p, "x", by="g", **WITH_NOISE))
    ),
    "corr with noise": noisy(by("corr", "budget of rows", lambda p: fs.corr(p, "x + z + y", **WITH_NOISE))),
    "quantiles": by("quantiles", "rows", lambda p: fs.quantiles(p, "x", bounds=X_BOUNDS)),
    "quantiles by group": by(
        "quantiles", "rows", lambda p: fs.quantiles(p, "x", by="g", q=[0.1, 0.5], bounds=X_BOUNDS)
    ),
    "histogram": by("histogram", "rows", lambda p: fs.histogram(p, "x", bins=6, bounds=X_BOUNDS)),
    "corr": by("corr", "rows", lambda p: fs.corr(p, "x + z + y")),
    "corr of columns": by("corr", "complete columns", lambda p: fs.corr(p, "a1 + b1 + c1")),
    # rows: boosting
    "boost": of("FedFunctionBoost", "rows", "y ~ x + z", {"steps": 20}),
    "boost logistic": of("FedFunctionBoost", "rows", LOGISTIC, {"steps": 10}, family=BINOMIAL),
    "boost at sites": of("FedFunctionBoost", "rows", "y ~ x + z", {"steps": 5, "aggregation": "local"}),
    "boost of columns": of("FedFunctionBoost", "complete columns", "y ~ a1 + b1 + c1", {"steps": 10}),
    # columns: regression
    "vfem": of("VFEMRegression", "columns", ALL),
    "vfem independent": of("VFEMRegression", "columns", ALL, between="independent"),
    "vfem imputed": of("VFEMRegression", "columns", "y ~ a1 + b1 + c1", {"method": "impute"}),
    "vfem complete records": of("VFEMRegression", "columns", "y ~ a1 + b1 + c1", {"method": "cc"}),
    "vfem weighted": of("VFEMRegression", "columns", "y ~ b1", {"method": "weighted"}),
    "vfem iterative": of("VFEMRegression", "columns", "y ~ a1 + b1 + c1", STEPWISE, between="independent"),
    "vfem robust": of(
        "VFEMRegression", "columns", "y ~ a1 + b1", STEPWISE | {"cov_type": "robust"}, between="independent"
    ),
    "vfem frequency weights": of(
        "VFEMRegression", "columns", "y ~ a1 + b1 + c1", freq_weights="f", offset="shift"
    ),
    "vfem whole": of("VFEMRegression", "complete columns", ALL),
    "vfem cut off": of(
        "VFEMRegression",
        "columns",
        "y ~ a1 + b1 + c1",
        STEPWISE | {"maxiter": 2, "cov_type": "none"},
        between="independent",
    ),
    "vfem glm": of("VFEMGLM", "columns", SICK, family=BINOMIAL),
    "vfem glm independent": of("VFEMGLM", "columns", SICK, family=BINOMIAL, between="independent"),
    "vfem glm counts": of("VFEMGLM", "columns", "k ~ a1 + b1 + c1", family=POISSON),
    "vglm": of("VerticalGLM", "complete columns", ALL, {"n_lambdas": 8}),
    "vglm debiased": of(
        "VerticalGLM", "complete columns", ALL, {"n_lambdas": 8, "inference": "debiased"}, penalty="lasso"
    ),
    "vglm folds": of(
        "VerticalGLM", "complete columns", ALL, {"n_lambdas": 6, "select": "cv", "folds": 3, "seed": 1}
    ),
    "vglm draws": of("VerticalGLM", "complete columns", ALL, {"draws": 3, "folds": 6, "seed": 1}),
    "vglm split": of(
        "VerticalGLM", "complete columns", ALL, {"inference": "split", "seed": 2, "n_lambdas": 8}
    ),
    "vglm missing": of("VerticalGLM", "columns", ALL, {"n_lambdas": 6}, missing="em"),
    "vglm logistic": of(
        "VerticalGLM", "complete columns", SICK, {"n_lambdas": 5}, family=BINOMIAL, freq_weights="f"
    ),
    "vglm admm": of(
        "VerticalGLM",
        "complete columns",
        SICK,
        {"exchange": "admm", "lam": 0.1, "tol": 1e-3},
        family=BINOMIAL,
    ),
    "impute": by("impute", "columns", lambda p: fs.impute(p, "y ~ a1 + b1 + c1", m=3, seed=1)),
    "impute rows": by(
        "impute", "incomplete rows", lambda p: fs.impute(p, "y ~ x + z", m=2, iterations=1, seed=1)
    ),
    # columns: prediction, clusters, budgets
    "laser": of("LASER", "columns", "e ~ a1 + a2 + b1 + b2 + c1", {"epochs": 2}),
    "laser numbers": of("LASER", "columns", "y ~ a1 + b1 + c1", {"epochs": 2}, outcome="normal"),
    "m2sem": of("M2SEM", "clusters", CLUSTERED, {"select": None, "n_init": 1}, n_clusters=2, n_factors=1),
    "m2sem selected": of(
        "M2SEM", "clusters", CLUSTERED, {"n_init": 1, "cov_type": None}, n_clusters=2, n_factors=0
    ),
    "m2sem search": by(
        "M2SEM", "clusters", lambda p: fs.M2SEM.search(p, n_clusters=[1, 2], n_factors=[0], n_init=1)
    ),
    "copula": Fit("CopulaSynthesizer", "budget", lambda p: fs.CopulaSynthesizer(p, 30.0, BOUNDS), {}),
    "copula over rows": Fit(
        "CopulaSynthesizer",
        "budget of rows",
        lambda p: fs.CopulaSynthesizer(p, 30.0, WITH_NOISE["bounds"], columns=["x", "z", "g", "y"]),
        {},
    ),
    "copula published": Fit(
        "CopulaSynthesizer",
        "complete columns",
        lambda p: fs.CopulaSynthesizer(p, 1.0, columns=["a1", "b1", "c1"], mechanism="published"),
        {"method": "vcds", "seed": 1},
    ),
    "private glm": noisy(
        of("PrivateCopulaGLM", "budget", "age ~ sex", {"draws": 20}, epsilon=50.0, bounds=BOUNDS)
    ),
    "private logistic": noisy(
        of(
            "PrivateCopulaGLM",
            "budget",
            "sex ~ age",
            {"draws": 20},
            epsilon=50.0,
            bounds=BOUNDS,
            family=BINOMIAL,
        )
    ),
    "private glm over rows": noisy(
        of(
            "PrivateCopulaGLM",
            "budget of rows",
            "y ~ x + z",
            {"draws": 20},
            epsilon=50.0,
            bounds=WITH_NOISE["bounds"],
        )
    ),
    "audit": by(
        "audit", "budget", lambda p: fs.audit(fs.CopulaSynthesizer(p, 3.0, BOUNDS), releases=100, seed=1)
    ),
    # estimates that are there already
    "pool": by("pool", "rows", lambda p: fs.pool(estimates())),
    "combine": by("combine", "rows", lambda p: fs.combine(estimates())),
    "meta": by("meta", "rows", lambda p: fs.meta([0.1, 0.4, 0.3, 0.9], [0.2, 0.1, 0.1, 0.3])),
    "meta fixed": by(
        "meta", "rows", lambda p: fs.meta([0.1, 0.4, 0.3], [0.2, 0.1, 0.1], method="DL", test="z")
    ),
    "compare": by(
        "compare",
        "rows",
        lambda p: fs.compare(
            {"federated": FITS["ols"].run(p), "pooled": sm.OLS.from_formula(LINEAR, rows_table()).fit()}
        ),
    ),
}
FITS |= {name: of(name, "rows", PLAIN[name].format(x="x")) for name in PLAIN if name != "FederatedOLS"}


def line_of(partition):
    return fs.FederatedOLS.from_formula(LINEAR, partition).fit()


MADE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "ols heterogeneity": ("ols", lambda fit: fit.heterogeneity),
    "ols random effects of sites": ("ols", lambda fit: fit.heterogeneity.random_effects_of(["x", "z"])),
    "ols evaluation": ("ols", lambda fit: fit.evaluate()),
    "glm poisson evaluation": ("glm poisson", lambda fit: fit.evaluate()),
    "glm poisson heterogeneity": ("glm poisson", lambda fit: fit.heterogeneity),
    "logistic evaluation": ("logistic", lambda fit: fit.evaluate()),
    "logistic effects": ("logistic", lambda fit: fit.get_margeff()),
    "logistic subgroups": ("logistic", lambda fit: fit.subgroups("x", ["g", "site"])),
    "logistic heterogeneity": ("logistic", lambda fit: fit.heterogeneity),
    "ols predictions": ("ols", lambda fit: fit.predictions(by="g")),
    "ols comparisons": ("ols", lambda fit: fit.comparisons("g", comparison="lnratio")),
    "ols slopes": ("ols", lambda fit: fit.slopes("x", at="mean")),
    "ols means": ("ols", lambda fit: fit.means("g")),
    "ols contrasts": ("ols", lambda fit: fit.contrasts("g")),
    "ordinal predictions": ("ordinal", lambda fit: fit.predictions()),
    "gee effects": ("gee exchangeable", lambda fit: fit.get_margeff()),
    "gee heterogeneity": ("gee", lambda fit: fit.heterogeneity),
    "cox test of proportional hazards": ("cox", lambda fit: fit.test_proportional_hazards()),
    "cox baseline": ("cox", lambda fit: fit.baseline_hazard(12, until=36)),
    "cox evaluation": ("cox", lambda fit: fit.evaluate(times=[6, 12])),
    "aft evaluation": ("aft", lambda fit: fit.evaluate(times=[6, 12])),
    "cox heterogeneity": ("cox", lambda fit: fit.heterogeneity),
    "cox common baseline": ("cox common", lambda fit: fit.baseline_hazard()),
    "cox survival": ("cox", lambda fit: fit.survival_function(PROFILES, [6, 12])),
    "aft survival": ("aft", lambda fit: fit.survival_function(PROFILES, [6, 12])),
    "aft heterogeneity": ("aft", lambda fit: fit.heterogeneity),
    "aft predictions": ("aft", lambda fit: fit.predictions(times=[6, 12])),
    "treatment ratios": ("treatment weights", lambda fit: fit.comparisons("g", comparison="lnratio")),
    "treatment placebo": ("treatment weights", lambda fit: fit.placebo("y ~ 1")),
    "treatment heterogeneity": ("treatment", lambda fit: fit.heterogeneity),
    "ordinal test of proportional odds": ("ordinal", lambda fit: fit.test_proportional_odds()),
    "ordinal evaluation": ("ordinal", lambda fit: fit.evaluate()),
    "ordinal effects": ("ordinal", lambda fit: fit.get_margeff()),
    "multinomial evaluation": ("multinomial", lambda fit: fit.evaluate()),
    "multinomial effects": ("multinomial", lambda fit: fit.get_margeff()),
    "mixed effects": ("mixed logistic", lambda fit: fit.get_margeff()),
    "boost refit": ("boost", lambda fit: fit.refit()),
    "boost earlier": ("boost", lambda fit: fit.steps(5)),
    "vfem refit": ("vfem", lambda fit: fit.refit("y ~ a1 + b1")),
    "vfem selection": ("vfem whole", lambda fit: fit.select()),
    "vglm refit": ("vglm debiased", lambda fit: fit.refit),
    "vglm debiased coefficients": ("vglm debiased", lambda fit: fit.debiased),
    "impute regression": ("impute", lambda fit: fit.regress()),
    "impute rows regression": ("impute rows", lambda fit: fit.fit(line_of)),
    "laser calibration": ("laser", lambda fit: fit.calibration),
    "m2sem bootstrap": ("m2sem", lambda fit: fit.bootstrap(4)),
    "m2sem outside": ("m2sem", lambda fit: fit.outside("outside")),
}
"""Results that are made of a fit, by name: the fit, and how they are made."""


@functools.cache
def result(name: str) -> Any:
    """Return a fit, or a result that is made of one; the secrets of a fit depend on its name alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in MADE:
            source, make = MADE[name]
            source = copy.copy(result(source))
            # Further releases join the ledger of a fit, and a golden file has those of the fit alone.
            source._ledger = copy.deepcopy(getattr(source, "_ledger", None))
            SECRETS.seed(f"contract {name}")
            return make(source)
        fit = FITS[name]
        SECRETS.seed(f"contract {name}")
        # A site keeps few sessions, and a result may need its own later: one partition for each fit.
        return fit.run(PARTITIONS[fit.data]())


# ---- families --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A public model or analysis: a small analysis with a covariate that contracts change, and its facts.

    `make` builds the model, or the result of a function, on a partition, with the name of the covariate.
    `gaps` has the reason for each contract that does not apply.
    """

    name: str
    layout: str  # rows, columns, or estimates: results that are there already
    fit: str  # of FITS
    make: Callable[[Any, str], Any]
    x: str = ""
    arguments: Mapping[str, Any] | None = None
    cut: Mapping[str, Any] | str | None = None  # arguments that end the iteration too early, or such a fit
    pooled: Mapping[str, Any] = field(
        default_factory=dict
    )  # arguments of a fit without parameters of single sites
    roles: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # settings with a column, by its name
    response: str = ""
    written: bool = False  # the covariate is part of a formula
    noisy: bool = False  # releases have noise, charged to a budget
    shorter: tuple[str, ...] = ()  # arrays whose length depends on the data: explain() has the largest
    gaps: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    def run(self, partition: Any = None, x: str = "", **arguments: Any) -> Any:
        """Return the result of the small analysis on a partition."""
        made = self.make(self.partition() if partition is None else partition, x or self.x)
        return made if self.arguments is None else made.fit(**{**self.arguments, **arguments})

    def base(self) -> Any:
        """Return the result of the small analysis, made once."""
        return _base(self.name)

    def table(self) -> pd.DataFrame:
        """Return the rows, or the joined entities, of the small analysis."""
        return rows_table() if self.layout == "rows" else columns_table()

    def partition(self, table: pd.DataFrame | None = None, **given: Any) -> Any:
        """Return a partition of a table with the columns of :meth:`table`, or with more."""
        table = self.table() if table is None else table
        if self.noisy:
            given.setdefault("policy", fs.Policy(privacy=fs.Budget(epsilon=5000.0, delta=1e-5)))
        return rows(table, **given) if self.layout == "rows" else divided(table, **given)


def divided(table: Any, **given: Any) -> Any:
    """Return the joined entities by column, of pandas or polars; unknown columns are at site B."""
    site_of = {name: site for site, own in HELD.items() for name in own}
    held: dict[str, list[str]] = {site: [] for site in HELD}
    for name in table.columns:
        if name != "id":
            held[site_of.get(name, "B")].append(name)
    return fs.ClientPartition.from_frames(
        {site: table[["id", *own]] for site, own in held.items()}, on="id", **given
    )


def model(
    name: str,
    layout: str,
    fit: str,
    formula: str,
    x: str,
    arguments: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Family:
    """Return the record of a model with a formula, in which {x} is a covariate."""
    kind, settings = getattr(fs, name), settings or {}

    def make(partition: Any, x: str, **more: Any) -> Any:
        return kind.from_formula(formula.format(x=x), partition, **{**settings, **more})

    response = formula.partition("~")[0].strip()
    return Family(name, layout, fit, make, x, arguments or {}, response=response, written=True, **facts)


def function(
    name: str, layout: str, fit: str, call: Callable[[Any, str], Any], x: str, **facts: Any
) -> Family:
    """Return the record of a public function."""
    return Family(name, layout, fit, call, x, **facts)


ONE_FIT = {"n_lambdas": 4}
MIXTURE = {"select": None, "n_init": 1, "cov_type": None}
ROW_WEIGHTS = {"freq_weights": {"freq_weights": "f"}, "offset": {"offset": "shift"}}


def no(reason: str, *contracts: str) -> dict[str, str]:
    """Return the gaps of one reason."""
    return dict.fromkeys(contracts, reason)


NO_PREDICT = no("has no predictions of new rows", "predicted")
NO_LOOP = no("has no iteration with a limit", "cut off")
NO_WEIGHTS = no("has no frequency weights", "weights")
NO_CLUSTERS = no("has no errors by clusters", "few clusters")
NOT_ROWS = no(
    "its sites hold columns of the same entities: each column is at one site",
    "number of sites",
    "subset",
    "splines",
)
OWN_CLUSTERS = no("clusters are part of the model: its tests compare small-sample errors", "few clusters")
NOTHING_MADE = no("no member returns another result with estimates", "inherited")
NO_KEYS = no("its sites hold rows, and it has no groups of rows", "keys")
GROUP = no(
    "its covariate is a group, which has no unit", "scaled", "infinite values", "texts of numbers", "splines"
)
DESCENT = no(
    "some steps of descent: the result depends on units and on the sites", "scaled", "number of sites"
)
NOISE = no("the result has noise by design", "order of sites", "chunks", "scaled")
FUNCTION = {
    **no(
        "a function without a model; tests/models/test_plans_of_all_families.py compares plan and ledger",
        "explained",
    ),
    **no("a table without coefficients", "scaled", "model", "columns of broom", "effects", "splines"),
    **NO_PREDICT,
    **NO_LOOP,
    **NO_WEIGHTS,
    **NO_CLUSTERS,
    **NOTHING_MADE,
}
CELLS = {
    **no("a constant has a mean, a deviation of zero and quantiles", "constant columns"),
    **no("each variable has its own rows; the table has the number of missing cells", "missing"),
}
ESTIMATES = {
    **no(
        "uses estimates that are there already; no site takes part",
        "explained",
        "repeated",
        "order of sites",
        "chunks",
        "number of sites",
        "scaled",
        "names",
        "keys",
        "missing",
        "unknown columns",
        "infinite values",
        "constant columns",
        "texts of numbers",
        "wrong values",
        "few rows",
        "strict",
        "polars",
        "model",
        "subset",
        "splines",
    ),
    **NO_PREDICT,
    **NO_LOOP,
    **NO_WEIGHTS,
    **NO_CLUSTERS,
    **no(
        "test_results_contracts.py: pool, combine and compare carry the notes of what they are given",
        "inherited",
    ),
}
CURVES = {
    **no("curves without coefficients", "model", "columns of broom", "effects"),
    **GROUP,
    **NO_PREDICT,
    **NO_LOOP,
    **NO_CLUSTERS,
    **NOTHING_MADE,
    **no("refuses frequency weights", "weights"),
    **no("the times of the grid are those that all sites allow", "number of sites"),
}

WITH_KEYS = ("FederatedGEE", "FederatedMixed")
"""Families of rows with the people of the table as groups."""

FAMILIES = {
    family.name: replace(family, gaps={**NO_KEYS, **family.gaps})
    if family.layout == "rows" and family.name not in WITH_KEYS
    else family
    for family in (
        *(model(name, "rows", name, PLAIN[name], "x") for name in PLAIN if name != "FederatedOLS"),
        model(
            "FederatedOLS",
            "rows",
            "ols",
            PLAIN["FederatedOLS"],
            "x",
            roles={"freq_weights": {"freq_weights": "f"}},
            gaps=no("has a closed form", "cut off"),
        ),
        model(
            "FederatedGLM",
            "rows",
            "glm poisson",
            "k ~ {x} + z",
            "x",
            settings={"family": POISSON},
            cut={"maxiter": 1},
            roles=ROW_WEIGHTS | {"exposure": {"exposure": "months"}},
        ),
        model("GLORE", "rows", "logistic", "e ~ {x} + z", "x", cut={"maxiter": 1}, roles=ROW_WEIGHTS),
        *(
            model(
                name,
                "rows",
                fit,
                "e ~ {x} + z",
                "x",
                {"rounds": 2},
                {"family": BINOMIAL},
                gaps={
                    **DESCENT,
                    **NO_CLUSTERS,
                    **NOTHING_MADE,
                    **no("the number of rounds is the argument; notes report the distance", "cut off"),
                    **no("batches of rows have other weights", "weights"),
                },
            )
            for name, fit in {
                "FedAvg": "fedavg",
                "FedAvgM": "fedavgm",
                "FedProx": "fedprox",
                "QFedAvg": "qfedavg",
            }.items()
        ),
        model(
            "FederatedGEE",
            "rows",
            "gee",
            "y ~ {x} + z",
            "x",
            settings={"groups": "person", "cov_struct": "exchangeable"},
            cut={"maxiter": 1},
            roles={
                "weights": {"weights": "v", "cov_struct": "independence"},
                "offset": {"offset": "shift"},
                "groups": {"groups": "person"},
            },
            gaps=NO_WEIGHTS,
        ),
        model(
            "FederatedMixed",
            "rows",
            "mixed",
            "y ~ {x} + z + (1 | person)",
            "x",
            cut={"maxiter": 1},
            roles={"var_weights": {"var_weights": "v"}, "offset": {"offset": "shift"}},
            gaps={**NO_WEIGHTS, **OWN_CLUSTERS},
        ),
        model(
            "FederatedCox",
            "rows",
            "cox",
            "Surv(time, died) ~ {x} + z",
            "x",
            cut={"maxiter": 1},
            pooled=COMMON,
            roles=ROW_WEIGHTS,
        ),
        model(
            "FederatedAFT",
            "rows",
            "aft",
            "Surv(time, died) ~ {x} + z",
            "x",
            cut={"maxiter": 1},
            roles=ROW_WEIGHTS,
        ),
        model(
            "TreatmentEffect",
            "rows",
            "treatment",
            "y ~ {x} + z",
            "x",
            settings={"treatment": "e ~ z"},
            cut={"maxiter": 1},
            roles={"offset": {"offset": "shift"}},
            gaps={
                **NO_WEIGHTS,
                **NO_PREDICT,
                **no("its coefficients are means of arms, and none is of a covariate", "scaled"),
                **no("has no predictions of new rows with a spline", "splines"),
            },
        ),
        Family(
            "SurvivalEffect",
            "rows",
            "survival effect",
            lambda p, x, **more: fs.SurvivalEffect.from_formula(
                "Surv(time, died) ~ 1", p, **{"treatment": f"e ~ {x} + z", **more}
            ),
            "x",
            {"grid": 4, "until": 40},
            cut={"maxiter": 1},
            pooled={"baseline": "common"},
            response="Surv(time, died)",
            written=True,
            shorter=(
                "cells",
                "flags",
                "edges",
                "places",
                "weights",
                "counts",
                "remaining",
                "slopes",
                "products",
            ),
            gaps={
                **NO_WEIGHTS,
                **NO_CLUSTERS,
                **NO_PREDICT,
                **NOTHING_MADE,
                **no("estimates of arms, and none of a covariate", "scaled", "columns of broom", "effects"),
                **no("has no predictions of new rows with a spline", "splines"),
            },
        ),
        model(
            "FederatedOrdinal",
            "rows",
            "ordinal",
            "grade ~ {x} + z",
            "x",
            cut={"maxiter": 1},
            roles=ROW_WEIGHTS,
        ),
        model(
            "FederatedMultinomial",
            "rows",
            "multinomial",
            "kind ~ {x} + z",
            "x",
            cut={"maxiter": 1},
            roles=ROW_WEIGHTS,
        ),
        model(
            "KaplanMeier",
            "rows",
            "kaplan-meier",
            "Surv(time, died) ~ {x}",
            "g",
            {"grid": 2, "until": 40},
            shorter=("cells", "flags", "edges", "places"),
            gaps=CURVES,
        ),
        model(
            "CumulativeIncidence",
            "rows",
            "cumulative incidence",
            "Surv(time, C(cause, levels=[0, 1, 2])) ~ {x}",
            "g",
            {"grid": 2, "until": 40},
            shorter=("cells", "flags", "edges", "places"),
            gaps=CURVES,
        ),
        model(
            "FedFunctionBoost",
            "rows",
            "boost",
            "y ~ {x} + z",
            "x",
            {"steps": 5},
            gaps={
                **NO_WEIGHTS,
                **NO_CLUSTERS,
                **NO_LOOP,
                **no("select the rows where the partition is made", "subset"),
                **no("splines are its learners, bbs(x)", "splines"),
                **no(
                    "effects of learners without coefficients",
                    "columns of broom",
                    "effects",
                    "scaled",
                    "model",
                ),
            },
        ),
        function(
            "table_one",
            "rows",
            "table one",
            lambda p, x, **more: fs.table_one(p, [x, "z"], by="g", **more),
            "x",
            gaps={**FUNCTION, **CELLS},
        ),
        function(
            "crosstab",
            "rows",
            "crosstab",
            lambda p, x, **more: fs.crosstab(p, x, "kind", **more),
            "g",
            gaps={**FUNCTION, **GROUP},
        ),
        function(
            "quantiles",
            "rows",
            "quantiles",
            lambda p, x, **more: fs.quantiles(p, x, bounds={x: (-4.0, 4.0)}, **more),
            "x",
            gaps=FUNCTION,
        ),
        function(
            "histogram",
            "rows",
            "histogram",
            lambda p, x, **more: fs.histogram(p, x, bins=5, bounds={x: (-4.0, 4.0)}, **more),
            "x",
            gaps=FUNCTION,
        ),
        function(
            "corr", "rows", "corr", lambda p, x, **more: fs.corr(p, [x, "z"], **more), "x", gaps=FUNCTION
        ),
        model(
            "VFEMRegression",
            "columns",
            "vfem",
            "y ~ a1 + {x}",
            "b1",
            cut="vfem cut off",
            gaps={**NOT_ROWS, **NO_CLUSTERS},
        ),
        model(
            "VFEMGLM",
            "columns",
            "vfem glm",
            "e ~ a1 + {x}",
            "b1",
            {"cov_type": "none"},
            {"family": BINOMIAL, "between": "independent"},
            cut={"maxiter": 2},
            shorter=("sy", "yhy", "of_scores", "of_steps"),  # one for each round so far
            gaps={
                **NOT_ROWS,
                **NO_CLUSTERS,
                **no("only a normal response can have weights", "weights"),
                **NOTHING_MADE,
            },
        ),
        model(
            "VerticalGLM",
            "columns",
            "vglm",
            "y ~ a1 + {x} + c1",
            "b1",
            ONE_FIT,
            gaps={
                **NOT_ROWS,
                **NO_CLUSTERS,
                **no(
                    "a path ends by the conditions of the optimum; maxiter is that of one lambda", "cut off"
                ),
            },
        ),
        model(
            "LASER",
            "columns",
            "laser",
            "e ~ a1 + {x}",
            "b1",
            {"epochs": 1},
            gaps={
                **NOT_ROWS,
                **NO_CLUSTERS,
                **NO_WEIGHTS,
                **NOTHING_MADE,
                **no("a network without coefficients", "columns of broom", "effects", "scaled", "model"),
                **no("the number of epochs is the argument", "cut off"),
                **no("weights of the network are drawn site by site", "order of sites"),
            },
        ),
        model(
            "M2SEM",
            "columns",
            "m2sem",
            "~ a1 + a2 + {x} + b2",
            "b1",
            MIXTURE,
            {"n_clusters": 2, "n_factors": 0},
            cut={"maxiter": 1},
            gaps={
                **NOT_ROWS,
                **NO_CLUSTERS,
                **NO_WEIGHTS,
                **no(
                    "profiles of clusters without coefficients",
                    "columns of broom",
                    "effects",
                    "scaled",
                    "model",
                ),
            },
        ),
        Family(
            "CopulaSynthesizer",
            "columns",
            "copula",
            lambda p, x: fs.CopulaSynthesizer(
                p, 30.0, {"a1": (-6.0, 6.0), x: (-6.0, 6.0)}, columns=["a1", x]
            ),
            "b1",
            {},
            noisy=True,
            gaps={
                **NOT_ROWS,
                **NO_CLUSTERS,
                **NO_WEIGHTS,
                **NO_LOOP,
                **NO_PREDICT,
                **NOISE,
                **NOTHING_MADE,
                **no("margins and correlations without coefficients", "columns of broom", "effects", "model"),
            },
        ),
        Family(
            "PrivateCopulaGLM",
            "columns",
            "private glm",
            lambda p, x: fs.PrivateCopulaGLM.from_formula(
                f"a1 ~ {x}", p, epsilon=50.0, bounds={"a1": (-6.0, 6.0), x.strip("`"): (-6.0, 6.0)}
            ),
            "b1",
            {"draws": 10},
            response="a1",
            written=True,
            noisy=True,
            gaps={**NOT_ROWS, **NO_CLUSTERS, **NO_WEIGHTS, **NO_LOOP, **NOISE, **NOTHING_MADE},
        ),
        function(
            "impute",
            "columns",
            "impute",
            lambda p, x, **more: fs.impute(p, f"y ~ a1 + {x}", **{"m": 2, "seed": 1} | more),
            "b1",
            response="y",
            written=True,
            gaps={**{k: v for k, v in FUNCTION.items() if k != "inherited"}, **NOT_ROWS},
        ),
        function("pool", "estimates", "pool", lambda p, x: fs.pool(estimates()), "", gaps=ESTIMATES),
        function("combine", "estimates", "combine", lambda p, x: fs.combine(estimates()), "", gaps=ESTIMATES),
        function(
            "meta",
            "estimates",
            "meta",
            lambda p, x: fs.meta([0.1, 0.4, 0.3], [0.2, 0.1, 0.1]),
            "",
            gaps=ESTIMATES,
        ),
        function(
            "compare",
            "estimates",
            "compare",
            lambda p, x: fs.compare({"a": estimates()[0]}),
            "",
            gaps={**ESTIMATES, **no("a table of several results", "shown")},
        ),
    )
}


@functools.cache
def _base(name: str) -> Any:
    SECRETS.seed(name)
    return FAMILIES[name].run()
