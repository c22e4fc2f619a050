"""The simulation of a published comparison of federated methods: cases, fits of one data set, and the table.

The settings are those of Li et al. (2024), "Federated learning in healthcare: a benchmark comparison of
engineering and statistical approaches": three sites that are alike, or differ in means (I), variances (II) or
effects (III) of their covariates. GLORE, the sites' own fits and two meta-analyses of these are run on every
data set of a case, the FedAvg family with its default options on the first fifty, as many as published.
"""

import gc
import time
import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import expit
from scipy.stats import rankdata

import fedstat as fs

SITES = ("Site 1", "Site 2", "Site 3")
NAMES = ("Intercept", *(f"X{j}" for j in range(1, 9)))
FAMILY = {"FedAvg": fs.FedAvg, "FedAvgM": fs.FedAvgM, "q-FedAvg": fs.QFedAvg, "FedProx": fs.FedProx}
COMPARED = 50
QUANTILE = 1.959963984540054


class Case(NamedTuple):
    """One law of the data, how often it is drawn, and whether the FedAvg family is run as well."""

    size: str
    setting: str
    shift: float | None
    runs: int
    family: bool


SHIFTS = (0.1, 0.2, 0.3, 0.4)
CASES = (
    Case("small", "homogeneous", None, 2_000, True),
    *(Case("small", setting, shift, 2_000, shift == 0.4) for setting in ("I", "II") for shift in SHIFTS),
    *(Case("small", "III", shift, 500, shift == 0.2) for shift in SHIFTS[:2]),
    Case("large", "homogeneous", None, 2_000, True),
    *(Case("large", setting, 0.4, 2_000, False) for setting in ("I", "II")),
    *(Case("large", "III", shift, 500, False) for shift in SHIFTS[:2]),
    # seeds are by place, so new cases are last
    *(Case("large", setting, shift, 500, False) for setting in ("I", "II") for shift in SHIFTS[:3]),
)


class One(NamedTuple):
    """Estimates of one method from one data set; standard errors are NaN if it has none."""

    params: np.ndarray
    bse: np.ndarray
    rounds: float = np.nan
    bytes: float = np.nan
    converged: float = np.nan


class Run(NamedTuple):
    """All methods of one data set, AUC by method and site, and what GLORE says of the sites."""

    methods: dict[str, One]
    auc: np.ndarray
    flags: dict[str, bool]


def start():
    """Prepare a process."""
    run((CASES[0], 0, True))
    # Holm's adjustment in statsmodels collects garbage, which takes long over all that is imported.
    gc.collect()
    gc.freeze()


def run(job):
    """Fit one data set by all methods; called in another process."""
    case, number, family = job
    # the cases are to be independent: no two share random numbers
    seed = [CASES.index(case), number]
    data = fs.datasets.make_logistic_sites(
        case.setting, case.shift, size=case.size, seed=np.random.default_rng(seed)
    )
    partition = fs.ClientPartition.from_frame(data.train, by=data.site)
    result = fs.GLORE.from_formula("y ~ .", partition).fit(masked=False)
    assert result.converged, f"{case}, run {number}"
    assert tuple(result.params.index) == NAMES
    compared = result.heterogeneity
    methods = {"GLORE": one(result)}
    own = compared.estimates.to_numpy(), compared.std_errors.to_numpy()
    methods |= {f"own fit, {site}": One(b, se) for site, b, se in zip(SITES, *own, strict=True)}
    methods["meta, fixed effects"] = One(*weigh_by_precision(*own))
    table = compared.random_effects("DL", "z")
    methods["meta, random effects"] = One(table["estimate"].to_numpy(), table["std_error"].to_numpy())
    if family:
        methods |= {name: one(descend(model, partition, number)) for name, model in FAMILY.items()}
    if family and case == CASES[0]:
        methods |= as_published(by_site(data.train), by_site(data.test))
    auc = auc_by_site(data.test, np.array([fit.params for fit in methods.values()]))
    flags = {
        "score test < .05": compared.joint.pvalue < 0.05,
        "I2 flags": bool(compared.flagged),
        "I2 above a half": bool((compared.to_frame()["I2"] > 0.5).any()),
    }
    return Run(methods, auc, flags)


def descend(model, partition, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fs.errors.ConvergenceWarning)  # counted in the table
        return model.from_formula("y ~ .", partition).fit(seed=seed, masked=False)


def one(result):
    known = result.bse.to_numpy() if isinstance(result.model, fs.GLORE) else np.full(9, np.nan)
    ledger = result.ledger
    return One(result.params.to_numpy(), known, ledger.rounds, ledger.bytes, result.converged)


def as_published(train, test):
    """Own fits to the sites' test rows, and ridge fits to six files, those of training and of test rows."""
    parts, unknown = [*train, *test], np.full(9, np.nan)
    own, fits = np.array([ridge(rows, 0.0) for rows in test]), np.array([ridge(rows) for rows in parts])
    estimates = {f"own fit, {site}": beta for site, beta in zip(SITES, own, strict=True)} | {
        "meta": np.average(own, axis=0, weights=[len(rows) for rows in test]),
        "FedAvg": np.average(fits, axis=0, weights=[len(rows) for rows in parts]),
        "q-FedAvg": fits.mean(axis=0),
    }
    return {f"as published: {name}": One(beta, unknown) for name, beta in estimates.items()}


def by_site(table):
    return [table[table["site"] == site] for site in SITES]


def weigh_by_precision(estimates, errors):
    weights = 1.0 / errors**2
    return (weights * estimates).sum(axis=0) / weights.sum(axis=0), weights.sum(axis=0) ** -0.5


def ridge(rows, penalty=1.0):
    """Logistic regression with scikit-learn's default penalty, |slopes|^2 / 2."""
    X, y = with_constant(rows), rows["y"].to_numpy()
    beta, P = np.zeros(9), penalty * np.diag([0.0, *np.ones(8)])
    for _ in range(30):
        mu = expit(X @ beta)
        step = np.linalg.solve((X.T * (mu * (1 - mu))) @ X + P, X.T @ (y - mu) - P @ beta)
        beta = beta + step
        if np.abs(step).max() < 1e-10:
            return beta
    raise AssertionError("Newton's method did not converge")


def with_constant(rows):
    return np.column_stack([np.ones(len(rows)), rows[list(NAMES[1:])]])


def auc_by_site(test, params):
    """AUC on each site's test rows, from the predictions: (methods, 3)."""
    areas = [auc(rows["y"].to_numpy(), with_constant(rows) @ params.T) for rows in by_site(test)]
    return np.array(areas).T


def auc(y, scores):
    """Share of pairs of an event and another row that columns of scores, (n, methods), put in order."""
    ranks, events = rankdata(scores, axis=0), y.sum()
    return (ranks[y == 1].sum(axis=0) - events * (events + 1) / 2) / (events * (len(y) - events))


# ---- the table -----------------------------------------------------------------------------------


def truth_of(case):
    """True coefficients: a column per site."""
    truth = fs.datasets.make_logistic_sites(case.setting, case.shift, size=case.size).truth
    return pd.concat([pd.DataFrame(0.0, index=["Intercept"], columns=truth.columns), truth])


def summarize(case, sample, runs):
    """Rows of the table: coefficients, AUC by site, and facts of the fits, of the methods in all runs."""
    truth, rows = truth_of(case), []
    for m, method in enumerate(runs[-1].methods):
        fits = [each.methods[method] for each in runs]
        params, errors = np.array([fit.params for fit in fits]), np.array([fit.bse for fit in fits])
        for target in targets(case, method):
            of = truth[target if target != "all" else "Site 1"].to_numpy()
            rows += [{"method": method, "target": target, **row} for row in against(of, params, errors)]
        for k, site in enumerate(SITES):
            rows.append({"method": method, "subject": f"AUC, {site}", **moments([r.auc[m, k] for r in runs])})
        for fact in ("rounds", "bytes", "converged"):
            values = np.array([getattr(fit, fact) for fit in fits], dtype=float)
            if not np.isnan(values).any():
                rows.append({"method": method, "subject": fact, **moments(values)})
    for flag in runs[0].flags:
        rows.append({"method": "GLORE", "subject": flag, **moments([each.flags[flag] for each in runs])})
    known = {"size": case.size, "setting": case.setting, "shift": case.shift or 0.0, "sample": sample}
    return pd.DataFrame([{**known, "runs": len(runs), **row} for row in rows])


def targets(case, method):
    """Coefficients that an estimate is compared with."""
    own = [site for site in SITES if method.endswith(site)]
    return own or (SITES if case.setting == "III" else ("all",))


def against(truth, params, errors):
    miss = params - truth
    covered = np.where(np.isnan(errors), np.nan, np.abs(miss) <= QUANTILE * errors).mean(axis=0)
    return [
        {
            "subject": name,
            "truth": truth[j],
            "mean": params[:, j].mean(),
            "sd": params[:, j].std(ddof=1),
            "bias": miss[:, j].mean(),
            "rmse": np.sqrt((miss[:, j] ** 2).mean()),
            "mean_se": errors[:, j].mean(),
            "coverage": covered[j],
        }
        for j, name in enumerate(NAMES)
    ]


def moments(values):
    values = np.asarray(values, dtype=float)
    return {"mean": values.mean(), "sd": values.std(ddof=1), "most": values.max()}


def simulate(pool, case):
    """Both samples of one case: all runs, and those with the FedAvg family."""
    began, compared = time.perf_counter(), COMPARED * case.family
    jobs = [(case, number, number < compared) for number in range(case.runs)]
    runs = list(pool.map(run, jobs, chunksize=10))
    parts = [summarize(case, "all", runs)]
    if compared:
        parts.append(summarize(case, "compared", runs[:compared]))
    print(f"{case.size}, {case.setting} {case.shift or ''}: {time.perf_counter() - began:.0f} s", flush=True)
    return pd.concat(parts)


def show(table):
    """The first figure for a reader: GLORE's coverage in every case."""
    rows = table.query("sample == 'all' and method == 'GLORE' and subject in @NAMES")
    cells = ["size", "setting", "shift", "target"]
    return rows.pivot_table("coverage", cells, "subject", sort=False).to_string()
