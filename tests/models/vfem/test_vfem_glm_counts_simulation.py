"""Coverage of 95 % intervals of counts, by simulation: columns of long tails, and counts that vary too much.

The designs are those of ``test_vfem_glm_simulation``, "counts": columns normal or lognormal (sd of the log
.8, skewness 3.7), counts of Poisson or with a gamma factor of variance .5; Poisson and negative binomial fits
(alpha estimated), with the inverse information and with the robust covariance.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import stats
from scipy.optimize import brentq
from scipy.special import expit
from test_vfem_glm_simulation import (
    DESIGNS,
    OPTIONS,
    SHARES,
    WITHIN,
    OpenIteration,
    drive,
    open_sites,
    truth,
)

from fedstat.errors import EstimationError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vfem.covariance.cross_products import CrossProductOptions
from fedstat.models.vfem.covariance.protocol import CovarianceOptions, glm_covariance
from fedstat.models.vfem.outcome import reported_covariance

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "vfem_glm_counts_coverage.csv"
RUNS, N = 200, 2_000
SD_OF_LOG = 0.8
CELLS = [("lognormal", 0.0), ("normal", 0.5), ("lognormal", 0.5)]
FAMILIES = {"Poisson": sm.families.Poisson(), "NegativeBinomial": sm.families.NegativeBinomial(alpha=0.5)}
COV_TYPES = ("observed", "robust")
TRUTH = truth("counts")
KEYS = ["columns", "excess", "mechanism", "family", "cov_type"]


def draw(columns, excess, mechanism, run):
    """Tables of the clients, "H" with the response."""
    _, intercept, slopes = DESIGNS["counts"]
    rng = np.random.default_rng([N, run, 7])
    blocks = {k: rng.standard_normal((N, 2)) @ WITHIN.T for k in slopes}
    if columns == "lognormal":
        s = SD_OF_LOG
        mean, sd = np.exp(s**2 / 2.0), np.sqrt(np.expm1(s**2)) * np.exp(s**2 / 2.0)
        blocks = {k: (np.exp(s * Z) - mean) / sd for k, Z in blocks.items()}
    mu = np.exp(intercept + sum(blocks[k] @ slopes[k] for k in slopes))
    y = rng.poisson(mu * rng.gamma(1.0 / excess, excess, N) if excess else mu)
    pull = 1.2 * (y > 0) + 0.8 * blocks["H"][:, 0] if mechanism == "mar" else np.zeros(N)
    out = {}
    for k in slopes:
        frame = pd.DataFrame(blocks[k], columns=[f"{k}1", f"{k}2"]).assign(id=np.arange(N))
        if k == "H":
            out[k] = frame.assign(y=y.astype(float))
        else:
            shift = brentq(lambda c, k=k: expit(c + pull).mean() - SHARES[k], -20.0, 20.0)
            out[k] = frame[rng.random(N) >= expit(shift + pull)]
    return out


def fit(frames, family):
    """Estimates, and covariances of each kind."""
    data, states, layout = open_sites(frames)
    estimated = family == "NegativeBinomial"
    spec = DistributionSpec.of(FAMILIES[family])
    ascent = OpenIteration(layout, OPTIONS, "", distribution=spec, estimates_alpha=estimated)
    names = {k: (f"{k}1", f"{k}2") for k in layout.sites}

    def rounds():
        found, covariances = (yield from ascent.maximize()), []
        for cov_type in COV_TYPES:
            options = CovarianceOptions(cov_type, names, CrossProductOptions("exact"))
            covariances.append((yield from glm_covariance(ascent, options)))
        return found, covariances

    found, covariances = drive(rounds(), data, states)
    estimates = np.concatenate([[found.beta0], *found.beta.values()])
    return estimates, [reported_covariance(one, found) for one in covariances]


def summarize(columns, excess, mechanism, family, runs):
    """Compare the fits of many data sets with the truth; alpha has no maximum in some."""
    fits = []
    for run in range(runs):
        try:
            fits.append(fit(draw(columns, excess, mechanism, run), family))
        except EstimationError:
            assert family == "NegativeBinomial" and not excess
    estimates = np.array([one for one, _ in fits])
    misses = estimates - TRUTH.to_numpy()
    out = []
    for place, cov_type in enumerate(COV_TYPES):
        covs = np.array([several[place] for _, several in fits])
        errors = np.sqrt(np.diagonal(covs, axis1=1, axis2=2))
        # The Wald test that all coefficients but the intercept are what they are.
        wald = [
            miss @ np.linalg.solve(V, miss) for miss, V in zip(misses[:, 1:], covs[:, 1:, 1:], strict=True)
        ]
        out.append(
            pd.DataFrame(
                {
                    "columns": columns,
                    "excess": excess,
                    "mechanism": mechanism,
                    "family": family,
                    "cov_type": cov_type,
                    "coefficient": TRUTH.index,
                    "bias_in_sd": misses.mean(axis=0) / estimates.std(axis=0, ddof=1),
                    "se_over_sd": errors.mean(axis=0) / estimates.std(axis=0, ddof=1),
                    "coverage": (np.abs(misses) <= 1.959963984540054 * errors).mean(axis=0),
                    "wald_rejects": np.mean(np.array(wald) > stats.chi2.ppf(0.95, len(TRUTH) - 1)),
                    "runs": len(fits),
                }
            )
        )
    return pd.concat(out)


@pytest.fixture(scope="module")
def table():
    tables = [
        summarize(columns, excess, mechanism, family, RUNS)
        for columns, excess in CELLS
        for mechanism in ("mcar", "mar")
        for family in FAMILIES
    ]
    complete = pd.concat(tables, ignore_index=True).round(4)
    complete.to_csv(TABLE, index=False, lineterminator="\n")
    print()
    print(brief(complete).to_string())
    return complete


def brief(table):
    """Mean and worst coverage of each design."""
    grouped = table.groupby(KEYS, sort=False)
    return pd.DataFrame(
        {
            "mean": grouped["coverage"].mean(),
            "worst": grouped["coverage"].min(),
            "wald": grouped["wald_rejects"].first(),
        }
    ).round(3)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["mcar", "mar"])
@pytest.mark.parametrize("columns", ["normal", "lognormal"])
def test_negative_binomial_intervals_cover_where_counts_vary_more(table, columns, mechanism):
    rows = brief(table)
    covered = rows.loc[(columns, 0.5, mechanism, "NegativeBinomial", "robust")]
    assert covered["mean"] > 0.92
    assert covered["worst"] > 0.87
    for cov_type in COV_TYPES:
        poisson = rows.loc[(columns, 0.5, mechanism, "Poisson", cov_type)]
        assert poisson["mean"] < 0.75
        assert poisson["worst"] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["mcar", "mar"])
def test_robust_errors_help_where_columns_have_long_tails_but_do_not_mend_the_bias(table, mechanism):
    rows = brief(table)
    plain, robust = (rows.loc[("lognormal", 0.0, mechanism, "Poisson", kind)] for kind in COV_TYPES)
    assert robust["mean"] > plain["mean"] + 0.02
    assert robust["worst"] > plain["worst"]
    assert 0.88 < robust["mean"] < 0.95
    assert robust["wald"] < plain["wald"]


def test_the_short_way_covers_one_data_set():
    estimates, (observed, robust) = fit(draw("normal", 0.5, "mcar", 0), "NegativeBinomial")
    assert (np.abs(estimates - TRUTH) < 4.0 * np.sqrt(np.diag(observed))).all()
    np.testing.assert_allclose(np.sqrt(np.diag(robust)), np.sqrt(np.diag(observed)), rtol=0.4)
