"""Separated outcomes are refused in every family, with the names of the columns; others are fitted."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import EstimationError

F, L = sm.families, sm.families.links
N = 360


def people(seed: int) -> pd.DataFrame:
    """Rows of three sites; `g` has the levels a, b and c, and is independent of all outcomes."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"site": np.repeat(list("ABC"), N // 3), "x": rng.normal(size=N)})
    frame["id"] = [f"p{k}" for k in range(N)]
    frame["pair"] = np.arange(N) // 5
    frame["g"] = rng.permutation(np.repeat(list("aaaaaabbbbcc"), N // 12))
    eta = 0.5 * frame["x"]
    frame["y"] = (rng.logistic(size=N) < eta).astype(int)
    frame["count"] = rng.poisson(np.exp(0.3 + eta))
    frame["grade"] = np.digitize(eta + rng.logistic(size=N), [-1.0, 0.8])
    frame["kind"] = rng.choice(["p", "q", "s"], N)
    frame["time"] = np.ceil(20.0 * rng.exponential(np.exp(-eta))) + 1.0
    frame["event"] = (rng.uniform(size=N) < 0.7).astype(int)
    return frame


LOWEST = {"y": 0, "count": 0, "grade": 0, "kind": "p", "event": 0}
OTHERS = {"y": [1], "count": [1], "grade": [1, 2], "kind": ["q", "s"], "event": [1]}


def separated(response: str, seed: int, *, spared: int = 0) -> pd.DataFrame:
    """Rows of which those of level c have the lowest outcome, but for some that are `spared`."""
    frame = people(seed)
    rows = frame.index[frame["g"] == "c"]
    frame.loc[rows, response] = LOWEST[response]
    for k, row in enumerate(rows[:spared]):
        frame.loc[row, response] = OTHERS[response][k % len(OTHERS[response])]
    for level in "bc":
        frame[f"is_{level}"] = (frame["g"] == level).astype(float)
    return frame


def over_rows(model, left: str, more: str = "", **options):
    def fit(frame: pd.DataFrame):
        partition = fs.ClientPartition.from_frame(frame, by="site")
        return model.from_formula(f"{left} ~ x + g{more}", partition, **options).fit()

    return fit


def over_columns(model, left: str, arguments=None, **options):
    def fit(frame: pd.DataFrame):
        tables = {"Y": ["id", left], "X": ["id", "x"], "G": ["id", "is_b", "is_c"]}
        partition = fs.ClientPartition.from_frames({k: frame[c] for k, c in tables.items()}, on="id")
        return model.from_formula(f"{left} ~ x + is_b + is_c", partition, **options).fit(**(arguments or {}))

    return fit


FAMILIES = {
    "logit": ("y", over_rows(fs.FederatedGLM, "y", family=F.Binomial())),
    "GLORE": ("y", over_rows(fs.GLORE, "y")),
    "probit": ("y", over_rows(fs.FederatedGLM, "y", family=F.Binomial(L.Probit()))),
    "cloglog": ("y", over_rows(fs.FederatedGLM, "y", family=F.Binomial(L.CLogLog()))),
    "Poisson": ("count", over_rows(fs.FederatedGLM, "count", family=F.Poisson())),
    "negative binomial": ("count", over_rows(fs.FederatedGLM, "count", family=F.NegativeBinomial(alpha=0.5))),
    "GEE logit": ("y", over_rows(fs.FederatedGEE, "y", groups="pair", family=F.Binomial())),
    "GEE Poisson": ("count", over_rows(fs.FederatedGEE, "count", groups="pair", family=F.Poisson())),
    "mixed logit": ("y", over_rows(fs.FederatedMixed, "y", " + (1 | pair)", family=F.Binomial())),
    "mixed Poisson": ("count", over_rows(fs.FederatedMixed, "count", " + (1 | pair)", family=F.Poisson())),
    "ordinal": ("grade", over_rows(fs.FederatedOrdinal, "grade")),
    "multinomial": ("kind", over_rows(fs.FederatedMultinomial, "kind")),
    "AFT": ("event", over_rows(fs.FederatedAFT, "Surv(time, event)")),
    "AFT log-normal": ("event", over_rows(fs.FederatedAFT, "Surv(time, event)", distribution="lognormal")),
    "Cox": ("event", over_rows(fs.FederatedCox, "Surv(time, event)")),
    "VFEMGLM logit": ("y", over_columns(fs.VFEMGLM, "y", family=F.Binomial(), between="independent")),
    "VFEMGLM Poisson": (
        "count",
        over_columns(fs.VFEMGLM, "count", family=F.Poisson(), between="independent"),
    ),
    "VFEMGLM joint": ("count", over_columns(fs.VFEMGLM, "count", family=F.Poisson())),
    "VerticalGLM": ("y", over_columns(fs.VerticalGLM, "y", {"lam": 0.0}, family=F.Binomial())),
}
NAMES = r"('g\[T.c\]'|'[qs]: g\[T.c\]'|'is_c( \(\w\))?')"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_level_with_one_outcome_is_named(name):
    response, fit = FAMILIES[name]
    with pytest.raises(EstimationError, match=f"(separat|monotone).*{NAMES}|{NAMES}.*separate") as raised:
        fit(separated(response, 1))
    # Columns that do not separate are not named.
    assert "'x'" not in str(raised.value) and "'g[T.b]'" not in str(raised.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_level_with_few_other_outcomes_is_fitted(name):
    response, fit = FAMILIES[name]
    result = fit(separated(response, 1, spared=4))
    assert result.converged
    assert result.bse.to_numpy().max() < 3.0


DESCENTS = {
    "FedAvg": (fs.FedAvg, "y", {"masked": True}),
    "FedAvg, counts": (fs.FedAvg, "count", {"masked": False}),
    "FedAvgM": (fs.FedAvgM, "y", {"masked": False, "momentum": 0.3}),
    "FedProx": (fs.FedProx, "y", {"masked": False, "mu": 0.01}),
    "QFedAvg": (fs.QFedAvg, "y", {"masked": False, "q": 0.0}),
}


@pytest.mark.filterwarnings("ignore:.*did not converge")
@pytest.mark.parametrize("name", DESCENTS)
def test_a_descent_towards_infinity_has_not_converged(name):
    """The score vanishes as fast as the information, and the step is short in standard errors."""
    kind, response, options = DESCENTS[name]
    family = F.Binomial() if response == "y" else F.Poisson()

    def fit(spared):
        partition = fs.ClientPartition.from_frame(separated(response, 1, spared=spared), by="site")
        model = kind.from_formula(f"{response} ~ x + g", partition, family=family)
        learning = {"rounds": 50, "batch_size": None, "learning_rate": 0.5, "standardize": True, "seed": 1}
        return model.fit(**learning | options)

    apart = fit(spared=0)
    assert apart.distance.abs().max() < 1.0 and not apart.converged
    text = " ".join(str(apart.summary()).partition(" results ")[0].split())
    assert text.startswith("*** ") and "coefficient of 'g[T.c]' still grows" in text
    assert "separate the outcomes" in text
    assert fit(spared=4).converged


# -- rounding does not decide ------------------------------------------------------------------------------

ROUNDINGS = {
    "rows in another order": lambda frame: frame.sample(frac=1.0, random_state=3),
    "scaled by 1 + 1e-15": lambda frame: frame.assign(x=frame["x"] * (1.0 + 1e-15)),
    "other units": lambda frame: frame.assign(x=1e5 * frame["x"] + 1e7),
}


@pytest.mark.parametrize(
    ("name", "seed"), [("logit", 2), ("Poisson", 3), ("mixed logit", 3), ("VFEMGLM Poisson", 2)]
)
def test_rounding_does_not_decide_separation(name, seed):
    response, fit = FAMILIES[name]
    for change in ROUNDINGS.values():
        with pytest.raises(EstimationError, match=NAMES):
            fit(change(separated(response, seed)))


def zero_counts(seed: int, missing: float) -> pd.DataFrame:
    """Entities of which all without `a` have a count of zero, and b is missing for some."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"id": range(60), "y": (rng.normal(size=60) > 0).astype(float)})
    frame["a"], frame["b"] = frame["y"], rng.normal(size=60)
    frame.loc[rng.random(60) < missing, "b"] = np.nan
    return frame


def refusal_of_zero_counts(seed: int, missing: float) -> str:
    """Return the text of the error of a Poisson model of these entities, or the estimates."""
    frame = zero_counts(seed, missing)
    tables = {"Holder": frame[["id", "y"]], "A": frame[["id", "a"]], "B": frame[["id", "b"]].dropna()}
    partition = fs.ClientPartition.from_frames(tables, on="id")
    model = fs.VFEMGLM.from_formula("y ~ .", partition, family=F.Poisson(), between="independent")
    try:
        return repr(model.fit().params.to_dict())
    except EstimationError as error:
        return str(error)


@pytest.mark.parametrize(("seed", "missing"), [(0, 0.0), (1, 0.3), (2, 0.3), (3, 0.0)])
def test_counts_of_zero_are_named_whatever_the_seed(seed, missing):
    assert "coefficients of 'a' grow without bound" in refusal_of_zero_counts(seed, missing)


@pytest.mark.parametrize("processor", ["Sandybridge"])
def test_kernels_of_other_processors_do_not_decide(processor):
    code = "from test_separation import *; print(refusal_of_zero_counts(1, 0.3))"
    environment = os.environ | {"OPENBLAS_CORETYPE": processor, "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "coefficients of 'a' grow without bound" in ran.stdout, ran.stderr


# -- nearly separated --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0.3, 0.03, 1e-3])
@pytest.mark.parametrize("family", [F.Binomial(), F.Binomial(L.Probit())])
def test_two_rows_that_overlap_give_a_finite_estimate(overlap, family):
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"site": np.repeat(list("ABC"), 200), "x": rng.normal(size=600)})
    frame["y"] = (frame["x"] > 0).astype(int)
    frame.loc[frame.index[frame["x"] > 0][0], ["x", "y"]] = [overlap, 0]
    frame.loc[frame.index[frame["x"] < 0][0], ["x", "y"]] = [-overlap, 1]
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=fs.Policy(min_count=1))
    ours = fs.FederatedGLM.from_formula("y ~ x", partition, family=family).fit()
    pooled = sm.GLM(frame["y"], sm.add_constant(frame["x"]), family=family).fit(maxiter=200, tol=1e-12)
    assert ours.converged
    np.testing.assert_allclose(ours.params, pooled.params, rtol=1e-5)
