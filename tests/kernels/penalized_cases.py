"""The stored solutions of skglm, and the cases as this package takes them."""

import importlib.util
import json
from pathlib import Path

import numpy as np

from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

FOLDER = Path(__file__).parents[1] / "reference" / "penalized"


def load_cases():
    spec = importlib.util.spec_from_file_location("penalized_reference_cases", FOLDER / "cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = load_cases()
STORED = json.loads((FOLDER / "skglm.json").read_text())


def penalty_of(name):
    if name == "elastic_net":
        return Penalty(name, l1_ratio=cases.ALPHA)
    kind = {"adaptive": "lasso", "group": "lasso", "weighted_mcp": "mcp"}.get(name, name)
    return Penalty(kind, a=cases.SHAPE.get(name))


def groups_of(name, p):
    if name == "group":
        return CoefficientGroups.of(cases.labels(p))
    return CoefficientGroups.single(p, cases.weights(p) if name in ("adaptive", "weighted_mcp") else None)


def with_intercept(groups):
    """The same groups after an intercept, which is not penalized."""
    return CoefficientGroups(
        np.concatenate([[0], groups.starts + 1]),
        np.concatenate([[0.0], groups.weights]),
        np.concatenate([[1.0], groups.multipliers]),
    )


def stored(case):
    """Lambdas (L,) and coefficients (L, 1 + p), the intercept first."""
    found = STORED[" ".join(case)]
    lambdas = np.array([one["lambda"] for one in found])
    return lambdas, np.array([[one["intercept"], *one["b"]] for one in found])
