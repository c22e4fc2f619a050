"""Make skglm.json: ``python make.py`` with numpy and skglm (0.5) installed.

Bertrand, Q. et al. (2022). Beyond L1: faster and better sparse models with skglm. NeurIPS 35.
"""

import json
from pathlib import Path

import cases
import numpy as np
from skglm import datafits, penalties, solvers
from skglm.utils.jit_compilation import compiled_clone

TOL = {"tol": 1e-11, "max_iter": 20_000}


WEIGHTED = ("adaptive", "weighted_mcp")
"""Penalties with an intercept by a column of ones without a weight: skglm counts them without its own."""


def penalty_of(name, weights, lam, groups):
    if name == "lasso":
        return penalties.L1(lam)
    if name == "elastic_net":
        return penalties.L1_plus_L2(lam, cases.ALPHA)
    if name == "adaptive":
        return penalties.WeightedL1(lam, weights)
    if name == "scad":
        return penalties.SCAD(lam, cases.SHAPE[name])
    if name == "mcp":
        return penalties.MCPenalty(lam, cases.SHAPE[name])
    if name == "weighted_mcp":
        return penalties.WeightedMCPenalty(lam, cases.SHAPE[name], weights)
    return penalties.WeightedGroupL2(lam, np.sqrt(np.diff(groups[0])), *groups)


def datafit_of(name, family, groups):
    if name == "group":
        kind = {"Gaussian": "QuadraticGroup", "Binomial": "LogisticGroup", "Poisson": "PoissonGroup"}[family]
        return getattr(datafits, kind)(*groups)
    return {"Gaussian": datafits.Quadratic, "Binomial": datafits.Logistic, "Poisson": datafits.Poisson}[
        family
    ]()


def solver_of(name, family):
    intercept = family != "Gaussian" and name not in WEIGHTED
    if name == "group":
        if family == "Gaussian":
            return solvers.GroupBCD(fit_intercept=intercept, **TOL)
        return solvers.GroupProxNewton(fit_intercept=intercept, **TOL)
    if family == "Gaussian":
        return solvers.AndersonCD(fit_intercept=intercept, **TOL)
    return solvers.ProxNewton(fit_intercept=intercept, **TOL)


def solve(name, family, design):
    X, y = cases.data(family, design)
    X = np.asfortranarray(X)
    n, p = X.shape
    starts = np.flatnonzero(np.diff(cases.labels(p), prepend=-1, append=-1)).astype(np.int32)
    groups = (starts, np.arange(p, dtype=np.int32))
    target = np.where(y > 0.0, 1.0, -1.0) if family == "Binomial" else y
    null = X.T @ (y - y.mean()) / n
    lam_max = np.max(np.abs(null)) / (cases.ALPHA if name == "elastic_net" else 1.0)
    weights, found = cases.weights(p), []
    if family != "Gaussian" and name in WEIGHTED:
        X, weights = np.asfortranarray(np.column_stack([X, np.ones(n)])), np.append(weights, 0.0)
    for share in cases.SHARES:
        lam = float(share * lam_max)
        fit = compiled_clone(datafit_of(name, family, groups))
        penalty = compiled_clone(penalty_of(name, weights, lam, groups))
        fit.initialize(X, target)
        b, _, stop = solver_of(name, family)._solve(X, target, fit, penalty)
        b = b if len(b) > p else np.append(b, 0.0)
        print(name, family, design, share, float(stop), int((b != 0).sum()), flush=True)
        found.append({"lambda": lam, "b": b[:p].tolist(), "intercept": float(b[p]), "stop": float(stop)})
    return found


if __name__ == "__main__":
    table = {" ".join(case): solve(*case) for case in cases.cases()}
    Path(__file__).with_name("skglm.json").write_text(json.dumps(table, indent=0) + "\n")
