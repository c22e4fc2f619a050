"""Calls that notes name as remedies are executed on data for which the note is printed."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs

pytestmark = pytest.mark.filterwarnings("ignore")
OPEN = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)
POISSON, BINOMIAL = sm.families.Poisson(), sm.families.Binomial()


def rows():
    rng, n = np.random.default_rng(4), 240
    t = pd.DataFrame({"x": rng.normal(size=n), "g": np.arange(n) // 20, "time": rng.integers(1, 30, n)})
    t["y"] = t.x + rng.standard_t(3, size=n) + np.repeat(rng.normal(size=12), 20)
    t["k"], t["e"] = rng.negative_binomial(1, 0.3, n), rng.integers(0, 2, n)
    t["m"], t["w"] = rng.integers(5, 9, n), rng.integers(1, 4, n)
    t["site"] = (t.g % 3).map(dict(enumerate("abc")))
    return t.assign(some=np.minimum(t.m, t.k))


def skewed():
    rng, n = np.random.default_rng(3), 1200
    x, z = rng.normal(size=(2, n))
    y, key = x + z + 2.0 * rng.exponential(size=n), np.arange(n)
    there = rng.random(n) < 1.0 / (1.0 + np.exp(1.5 * (y - 2.0)))
    first = pd.DataFrame({"id": key, "y": y, "x": x})
    return {"A": first, "B": pd.DataFrame({"id": key[there], "z": z[there]})}


def counts(overlap=True):
    rng, n = np.random.default_rng(3), 900
    x, z, v = rng.normal(size=(3, n))
    k = rng.negative_binomial(1, 1.0 / (1.0 + np.exp(0.3 * x + 0.3 * z)))
    y, key = x + z + v + rng.normal(size=n), np.arange(n)
    half, other = (rng.random(n) < 0.7, key >= 0) if overlap else (key < 450, key >= 450)
    first = pd.DataFrame({"id": key, "k": k, "e": (k > 1) * 1, "y": y, "x": x})
    return {
        "A": first,
        "B": pd.DataFrame({"id": key[half], "z": z[half]}),
        "C": pd.DataFrame({"id": key[other], "v": v[other]}),
    }


def columns(frames):
    return fs.ClientPartition.from_frames(frames, on="id")


def by_site():
    return fs.ClientPartition.from_frame(rows(), by="site", policy=OPEN)


@dataclass
class Situation:
    """A fit that prints a note, by its model and arguments; the note may be of a `part` of the result."""

    kind: str
    model: str
    formula: str
    partition: Any = by_site
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    part: str = ""

    def __str__(self):
        return f"{self.model}-{self.kind}-{self.part}"


def cluster(**more):
    return {"cov_type": "cluster", "cov_kwds": {"groups": "g", **more}}


SITUATIONS = [
    Situation(
        "few_clusters",
        "FederatedOLS",
        "y ~ x",
        settings={"labels": ["g"]},
        arguments=cluster(correction="CR1"),
    ),
    Situation(
        "few_clusters",
        "FederatedOLS",
        "y ~ x",
        settings={"labels": ["site"]},
        arguments={"cov_type": "cluster", "cov_kwds": {"groups": "site", "correction": "CR2"}},
    ),
    Situation(
        "few_clusters",
        "FederatedOrdinal",
        "w ~ x",
        settings={"labels": ["g"]},
        arguments=cluster(correction="CR1"),
    ),
    Situation(
        "few_clusters", "FederatedGEE", "y ~ x", settings={"groups": "g"}, arguments={"cov_type": "robust"}
    ),
    Situation("small_sample", "FederatedGLM", "y ~ x", arguments={"cov_type": "HC1"}),
    Situation("overdispersion", "FederatedGLM", "k ~ x", settings={"family": POISSON}),
    Situation(
        "overdispersion",
        "FederatedGLM",
        "k ~ x",
        settings={"family": sm.families.NegativeBinomial(alpha=0.1)},
    ),
    Situation("overdispersion", "FederatedGLM", "cbind(some, m - some) ~ x", settings={"family": BINOMIAL}),
    Situation("overdispersion", "FederatedMixed", "k ~ x + (1 | g)", settings={"family": POISSON}),
    Situation("methods", "GLORE", "e ~ x", arguments={"masked": True}, part="heterogeneity"),
    Situation("response_not_normal", "VFEMRegression", "y ~ x + z", lambda: columns(skewed())),
    Situation("between_chosen", "VFEMRegression", "y ~ x + z + v", lambda: columns(counts(overlap=False))),
    Situation(
        "between_chosen",
        "VFEMGLM",
        "e ~ x + z + v",
        lambda: columns(counts(overlap=False)),
        {"family": BINOMIAL},
    ),
    Situation(
        "masked",
        "VFEMRegression",
        "y ~ x + z + v",
        lambda: columns(counts()),
        {"between": "independent"},
        {"exchange": "iterative"},
    ),
    Situation("curvature", "VFEMGLM", "e ~ x + z + v", lambda: columns(counts()), {"family": BINOMIAL}),
    Situation("overdispersion", "VFEMGLM", "k ~ x + v", lambda: columns(counts()), {"family": POISSON}),
    Situation(
        "naive_intervals",
        "VerticalGLM",
        "e ~ x + v",
        lambda: columns(counts()),
        {"family": BINOMIAL},
        {"n_lambdas": 6},
    ),
]


def fitted(situation, partition, **changed):
    settings, arguments = situation.settings | changed, situation.arguments
    return (
        getattr(fs, situation.model).from_formula(situation.formula, partition, **settings).fit(**arguments)
    )


def execute(call, situation, partition, result):
    """Execute the call of a remedy: three dots are the arguments of the model."""
    tree = ast.parse(call, mode="eval").body
    names = {"fs": fs, "sm": sm}
    chain = ast.unparse(tree.func)
    made = tree.func.value if isinstance(tree.func, ast.Attribute) else None
    if chain != "fit" and made is None:
        return eval(call, {chain: getattr(result, chain)})
    given = {} if made is None else {k.arg: eval(ast.unparse(k.value), names) for k in made.keywords if k.arg}
    model = situation.model if made is None else ast.unparse(made.func).rpartition(".from_formula")[0]
    settings = situation.settings if model in ("", situation.model) else {}
    kind = getattr(fs, model or situation.model)
    arguments = {k.arg: eval(ast.unparse(k.value), names) for k in tree.keywords}
    return kind.from_formula(situation.formula, partition, **{**settings, **given}).fit(**arguments)


@pytest.mark.parametrize("situation", SITUATIONS, ids=str)
def test_the_remedy_of_a_printed_note_runs(situation):
    partition = situation.partition()
    result = fitted(situation, partition)
    noted = getattr(result, situation.part) if situation.part else result
    values = noted.diagnostics().set_index("kind")["values"][situation.kind]
    call = (values if isinstance(values, dict) else values.iloc[0])["call"]
    assert execute(call, situation, partition, result) is not None


def test_the_remedy_of_imputations_runs():
    partition = columns(skewed())
    notes = fs.impute(partition, "y ~ x + z", m=2, seed=1).diagnostics().set_index("kind")["values"]
    situation = Situation("response_not_normal", "VFEMRegression", "y ~ x + z")
    assert execute(notes["response_not_normal"]["call"], situation, partition, None).converged
