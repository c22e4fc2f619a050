"""Draws of a binary response with blocks that correlate, fitted on pooled data by the package's own protocol.

Sites A, B and C hold two columns each of variance one. The first columns have the correlation rho,
the second ones .4 with the first of their own block: every two blocks have the canonical correlation rho.
A has all entities; B lacks 40 % and C 60 %, by lot (mcar), the more often the smaller A's first column (mar
on A), or that and a response of zero (mar on y). Answers of the sites are computed from the rows, without
keys, so that hundreds of fits take minutes: `python tests/models/vfem/joint_simulation.py [runs [n]]`.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import statsmodels.api as sm

from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.quadrature import BY_M, BY_MM, BY_MV, BY_V, BY_VV, LOG_P, LOGIT, marginal_likelihood
from fedstat.models.vertical.joint_normal.edges import edges_between
from fedstat.models.vertical.joint_normal.fit import all_effects, fit_joint_normal, inverse_information
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.iteration.state import IterationOptions
from fedstat.models.vfem.joint_protocol import JointIteration, information_of
from fedstat.models.vfem.outcome import origin_jacobian

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "vfem_glm_blocks.csv"
CLIENTS, SIZES, SHARES = ("A", "B", "C"), (2, 2, 2), (0.0, 0.4, 0.6)
BETA, BETA0 = np.array([0.6, -0.4, 0.5, 0.3, -0.5, 0.4]), -0.3
OPTIONS = IterationOptions(memory=12, maxiter=60, tol_score=1e-6, tol_change=1e-3)
MECHANISMS, CORRELATIONS = ("mcar", "mar on A", "mar on y"), (0.0, 0.3, 0.7)
Z = 1.959963984540054


def correlations(rho):
    """Correlation matrix of the six columns."""
    C = np.eye(6)
    for j in range(3):
        for k in range(3):
            first = 1.0 if j == k else rho
            C[2 * j : 2 * j + 2, 2 * k : 2 * k + 2] = first * np.outer([1.0, 0.4], [1.0, 0.4])
        C[2 * j + 1, 2 * j + 1] = 1.0
    return C


def draw(mechanism, rho, run, n):
    """Response (n,), and columns (n, 6) with nan where a site lacks the entity."""
    rng = np.random.default_rng([MECHANISMS.index(mechanism), int(100 * rho), run])
    X = rng.multivariate_normal(np.zeros(6), correlations(rho), size=n)
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-BETA0 - X @ BETA))).astype(float)
    lead = {"mcar": np.zeros(n), "mar on A": 1.5 * X[:, 0], "mar on y": X[:, 0] + 1.5 * y - 0.7}[mechanism]
    seen = X.copy()
    for k, share in enumerate(SHARES):
        # The mean share is near enough to the one that is said.
        chance = 1.0 / (1.0 + np.exp(lead - np.log(share / (1.0 - share)))) if share else np.zeros(n)
        seen[rng.random(n) < chance, 2 * k : 2 * k + 2] = np.nan
    return y, seen


class PooledSites:
    """Answers of the sites, computed from pooled rows of standardized columns."""

    def __init__(self, y, X, layout):
        self.y, self.X, self.layout = y, np.nan_to_num(X), layout
        self.terms = np.empty((6, len(y)))

    def by_pattern(self, values):
        return np.bincount(self.layout.code, values, len(self.layout.counts))

    def answer(self, request):
        return SimpleNamespace(arrays=getattr(self, request.step)(request))

    def columns(self, site):
        return self.X[:, self.layout.places()[site]]

    def joint_predict(self, request):
        slopes = request.arrays["slopes"][self.layout.code]
        return {"linear_predictor": np.sum(self.columns(request.site) * slopes, axis=1)}

    def glm_evaluate(self, request):
        given, code = request.arrays, self.layout.code
        self.m, v = given["predictor"] + given["center"][code], given["spread"][code]
        self.terms = t = marginal_likelihood(LOGIT, self.y, self.m, v)
        sums = np.column_stack([self.by_pattern(w) for w in (t[BY_M], t[BY_V], -t[BY_MM], t[BY_V] ** 2)])
        return {"inside": np.array(1), "log_likelihood": np.array(t[LOG_P].sum()), "sums": sums}

    def joint_score(self, request):
        own = np.column_stack([np.ones(len(self.y)), self.columns(request.site)])
        return {"sums": np.column_stack([self.by_pattern(self.terms[BY_M] * x) for x in own.T])}

    def joint_weights(self, request):
        mean = self.by_pattern(self.m) / self.layout.counts
        s, h, c = self.m - mean[self.layout.code], -self.terms[BY_MM], -self.terms[BY_MV]
        rows = (h * s, h * s * s, c, c * s, -self.terms[BY_VV])
        return {"sums": np.column_stack([*[self.by_pattern(w) for w in rows], mean])}

    def curvatures(self):
        """Sums of second derivatives with (1, x, .)(1, x, .)', (G, P + 2, P + 2)."""
        ones = np.column_stack([np.ones(len(self.y)), self.X])
        out = []
        for g in range(len(self.layout.counts)):
            here = self.layout.code == g
            t, own = self.terms[:, here], ones[here]
            cross = -own.T @ t[BY_MV]
            H = np.block([[-(own.T * t[BY_MM]) @ own, cross[:, None]], [cross, -t[BY_VV].sum()]])
            out.append(H)
        return np.array(out)


def lay_out(y, X):
    """Layout of pooled rows, and their moments by pattern."""
    n, every = len(y), np.arange(len(y))
    kept = {k: every[~np.isnan(X[:, 2 * j])] for j, k in enumerate(CLIENTS)}
    names = tuple(f"{k}{i}" for k in CLIENTS for i in (1, 2))
    layout = Layout(
        sites=CLIENTS,
        active="A",
        names=names,
        terms=names,
        sizes=SIZES,
        n=n,
        n_design=n,
        keep={k: np.ones(len(rows), dtype=bool) for k, rows in kept.items()},
        kept=kept,
        response_keep=np.ones(n, dtype=bool),
        absent={},
    )
    ones = np.column_stack([np.ones(n), np.nan_to_num(X), y])
    grams = [ones[layout.code == g].T @ ones[layout.code == g] for g in range(len(layout.counts))]
    at = np.zeros(7), np.ones(7)
    moments = PatternMoments(
        CLIENTS, SIZES, names, np.repeat(~layout.missing, 2, axis=1), layout.counts, np.array(grams), *at
    )
    return layout, moments.standardized()


def fit(y, X, between):
    """Estimates of (beta0, beta) and their standard errors."""
    layout, moments = lay_out(y, X)
    iteration = JointIteration(
        layout,
        OPTIONS,
        "",
        distribution=DistributionSpec.of(sm.families.Binomial()),
        exchange=SimpleNamespace(moments=moments),
    )
    if between == "independent":
        iteration.moves = all_effects(edges_between(moments, "independent"))
        iteration.linear = fit_joint_normal(moments, iteration.moves.edges)
    iteration.mean, iteration.dealers = y.mean(), {}
    sites = PooledSites(y, (X - moments.center[:-1]) / moments.scale[:-1], layout)
    protocol, requests = iteration._complete(), None
    try:
        requests = next(protocol)
        while True:
            requests = protocol.send([sites.answer(request) for request in requests])
    except StopIteration as stop:
        found = stop.value
    assert found.converged
    information, joint = information_of(iteration, sites.curvatures())
    J = origin_jacobian(found, CLIENTS)
    V = inverse_information(joint, information, scale=False)[: J.shape[1], : J.shape[1]]
    params = np.concatenate([[found.beta0], *[found.beta[k] for k in CLIENTS]])
    return params, np.sqrt(np.diag(J @ V @ J.T))


def complete_cases(y, X):
    """Estimates from entities that every site has."""
    here = ~np.isnan(X).any(axis=1)
    found = sm.GLM(y[here], sm.add_constant(X[here]), family=sm.families.Binomial()).fit()
    return found.params, found.bse


def estimate(method, y, X):
    """Estimates of a method by its name, and their standard errors."""
    return complete_cases(y, X) if method == "complete cases" else fit(y, X, method)


def simulate(mechanism, rho, method, runs, n):
    """Bias, spread, mean standard error and coverage of every coefficient."""
    truth = np.append(BETA0, BETA)
    found = [estimate(method, *draw(mechanism, rho, run, n)) for run in range(runs)]
    params, errors = (np.array(part) for part in zip(*found, strict=True))
    miss = params - truth
    return pd.DataFrame(
        {
            "mechanism": mechanism,
            "correlation": rho,
            "method": method,
            "coefficient": ["Intercept", *[f"{k}{i}" for k in CLIENTS for i in (1, 2)]],
            "truth": truth,
            "bias": miss.mean(axis=0),
            "sd": params.std(axis=0, ddof=1),
            "mean_se": errors.mean(axis=0),
            "coverage": (np.abs(miss) <= Z * errors).mean(axis=0),
            "n": n,
            "runs": runs,
        }
    )


def main(runs=500, n=5_000):
    """Write all cells as they come."""
    parts = []
    for method in ("free", "independent", "complete cases"):
        for mechanism in MECHANISMS:
            for rho in CORRELATIONS:
                parts.append(simulate(mechanism, rho, method, runs, n))
                table = pd.concat(parts, ignore_index=True)
                table.round(5).to_csv(TABLE, index=False, lineterminator="\n")
                print(method, mechanism, rho, parts[-1]["coverage"].round(3).tolist(), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
