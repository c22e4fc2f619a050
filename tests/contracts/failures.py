"""Analyses that end in an error with a remedy, and how its call is executed."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import shlex
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from contracts.remedies import (
    BINOMIAL,
    OPEN,
    POISSON,
    arguments_of,
    by_site,
    columns,
    counts,
    execute,
    groups,
    rows,
    two_sites,
)
from seeded_secrets import SECRETS

import fedstat as fs
from fedstat.errors import FedstatError, FedstatWarning
from fedstat.operator import command_line


@dataclass(frozen=True)
class Failure:
    """An analysis that ends in an error with a remedy; after the call of the remedy it succeeds.

    `then` is what is read of the result. The partition takes a policy, or arguments, that a remedy names.
    A model may be `constructed` without from_formula. `constants` of the package have other values until the
    analysis fails, or `warns`.
    """

    model: str
    formula: str
    partition: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    then: Callable[[Any], Any] | None = None
    constructed: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    warns: bool = False

    def __str__(self) -> str:
        given = [*self.settings, *self.arguments]
        return "-".join([self.model, self.formula.replace(" ", ""), *given])

    def run(self, partition: Any) -> Any:
        """Fit the model, and read what is read of the result."""
        kind = getattr(fs, self.model)
        make = kind if self.constructed else kind.from_formula
        model = make(self.formula, partition, **self.settings)
        return self.read(model.fit(**self.arguments))

    def read(self, result: Any) -> Any:
        """Return what is read of a result."""
        return result if self.then is None else self.then(result)


PUBLIC = {name: getattr(fs, name) for name in fs.__all__}


@dataclass(frozen=True)
class Wrong:
    """A call, as text, that ends in an error with a remedy; the call of the remedy succeeds.

    `names` makes what both calls read. A remedy that is a command reads its words in capitals there, and
    `home`, a new folder; if the call fails `again`, the command is only the first of what helps.
    """

    call: str
    names: Callable[..., Mapping[str, Any]] = dict
    constants: Mapping[str, Any] = field(default_factory=dict)
    again: bool = False
    warns: bool = False

    def __str__(self) -> str:
        return self.call

    def evaluate(self, call: str, names: Mapping[str, Any]) -> Any:
        """Evaluate a call, for which `fedstat(...)` is a command."""
        return eval(call, {**PUBLIC, "fs": fs, "sm": sm, "fedstat": fedstat, **names})

    def succeed(self, remedy: str, names: Mapping[str, Any]) -> Any:
        """Execute the call of a remedy, where three dots are the arguments as given."""
        if not remedy.startswith("fedstat "):
            return self.evaluate(merged(self.call, remedy, names), names)
        words = shlex.split(remedy)[1:]
        codes = (0, 1) if self.again else (0,)
        fedstat(*(names.get(word, word) if word.isupper() else word for word in words), codes=codes)
        return self.again or self.evaluate(self.call, names)


def fedstat(*words: object, codes: Collection[int] = (0,)) -> str:
    """Execute a command, whose errors are raised; it ends with one of some codes."""
    given = vars(command_line.parser().parse_args([str(word) for word in words]))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert given.pop("run")(**given) in codes, printed.getvalue()
    return printed.getvalue() or "done"


def merged(given: str, remedy: str, names: Mapping[str, Any]) -> str:
    """Return the call of a remedy with the receiver, and for three dots the arguments, of the given call."""
    old, new = (ast.parse(call, mode="eval").body for call in (given, remedy))
    asked = [call for call in ast.walk(new) if isinstance(call, ast.Call) and ... in _positional(call)]
    for call in asked:
        same = [one for one in ast.walk(old) if isinstance(one, ast.Call) and _last(one) == _last(call)]
        assert same, f"{remedy}: {given} has no such call"
        call.args = [*same[0].args, *(one for one in call.args if not _is_dots(one))]
        kept = {word.arg: word for word in same[0].keywords} | {word.arg: word for word in call.keywords}
        call.keywords = [word for word in kept.values() if ast.unparse(word.value) != "None"]
    first = new
    while isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute):
        first = first.func.value
    if not isinstance(first, ast.Call) or not isinstance(first.func, ast.Name):
        return ast.unparse(new)
    same = [one for one in ast.walk(old) if isinstance(one, ast.Call) and _last(one) == first.func.id]
    if first is new and first.func.id in PUBLIC and same and same[0] is not old:
        same[0].args, same[0].keywords = new.args, new.keywords
        return ast.unparse(old)
    members = [one.func if isinstance(one, ast.Call) else one for one in same or [old]]
    receivers = [one.value for one in members if isinstance(one, ast.Attribute)]
    if first.func.id not in {*PUBLIC, *names} and receivers:
        first.func = ast.Attribute(receivers[0], first.func.id)
    return ast.unparse(new)


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _is_dots(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _positional(call: ast.Call) -> list[Any]:
    return [... for one in call.args if _is_dots(one)]


def succeed(failure: Failure, call: str, partition: Any) -> Any:
    """Execute the call of a failure's remedy, and read what the failure could not read."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    name = ast.unparse(tree.func)
    if name == "Policy":
        return failure.run(failure.partition(policy=fs.Policy(**arguments_of(tree))))
    if name.startswith("ClientPartition."):
        return failure.run(failure.partition(**arguments_of(tree)))
    if failure.constructed:
        model = eval(call, {failure.model: getattr(fs, failure.model), "partition": partition})
        return failure.read(model.fit(**failure.arguments))
    if name.isidentifier() and name != "fit":
        model = getattr(fs, failure.model).from_formula(failure.formula, partition, **failure.settings)
        return execute(call, failure, partition, model.fit(**failure.arguments))
    return failure.read(execute(call, failure, partition))


@dataclass(frozen=True)
class Repaired:
    """The call of a remedy that was executed, and the lines of the package that made its error."""

    call: str
    lines: frozenset[tuple[str, int]]


@functools.cache
def repaired(place: int) -> Repaired:
    """Let an analysis or a call fail, and execute the call of the error's remedy, once."""
    failure = FAILURES[place]
    SECRETS.seed(f"failure {failure} {place}")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as home:
        warnings.simplefilter("ignore")
        if isinstance(failure, Wrong):
            takes = inspect.signature(failure.names).parameters if failure.names is not dict else ()
            names = {"home": Path(home), **(failure.names(Path(home)) if takes else failure.names())}
            error = failing(failure, lambda: failure.evaluate(failure.call, names))
            assert error.remedy is not None, error
            assert failure.succeed(error.remedy.filled_call, names) is not None
        else:
            partition = None

            def run() -> Any:
                nonlocal partition
                partition = failure.partition()
                return failure.run(partition)

            error = failing(failure, run)
            assert error.remedy is not None, error
            assert succeed(failure, error.remedy.filled_call, partition) is not None
        assert error.remedy.sentence() in str(error)
    return Repaired(error.remedy.filled_call, frozenset(error.__dict__["lines"]))


def failing(failure: Failure | Wrong, run: Callable[[], Any]) -> FedstatError | FedstatWarning:
    """Return the error or the warning of a call, which keeps the lines of the package that made it."""
    plain = FedstatError.__init__

    def made(self: FedstatError, *args: Any, **given: Any) -> None:
        plain(self, *args, **given)
        self.__dict__["lines"] = lines_of(traceback.walk_stack(inspect.currentframe()))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        if failure.warns:
            warnings.simplefilter("error", FedstatWarning)
        patch.setattr(FedstatError, "__init__", made)
        for name, value in failure.constants.items():
            patch.setattr(name, value)
        with pytest.raises((FedstatError, FedstatWarning)) as caught:
            run()
    error = caught.value
    error.__dict__["lines"] = error.__dict__.get("lines", set()) | lines_of(traceback.walk_tb(caught.tb))
    return error


def lines_of(frames: Iterable[tuple[Any, int]]) -> set[tuple[str, int]]:
    """Return files and lines of frames."""
    return {(frame.f_code.co_filename, line) for frame, line in frames}


def one_cell_missing(**given: Any) -> fs.ClientPartition:
    """Return rows of which one at each site lacks a column."""
    t = rows()
    return by_site(t.assign(few=t["k"].where(t.groupby("site").cumcount() > 0)), **given)


def rare_arm(**given: Any) -> fs.ClientPartition:
    """Return rows with an arm whose probability is above one half in two rows of each site."""
    t, rng = rows(), np.random.default_rng(6)
    far = np.clip(t["x"], -1.5, 1.5)
    far[t.groupby("site").cumcount() < 2] = 6.0
    arm = rng.random(len(t)) < 1.0 / (1.0 + np.exp(2.0 - 0.8 * far))
    given = {"policy": fs.Policy()} | given
    return by_site(t.assign(far=far + 0.01 * t["y"], arm=np.where(arm, "new", "all")), **given)


def clean(**given: Any) -> fs.ClientPartition:
    """Return rows with columns for arguments that do not fit."""
    t = rows()
    apart = np.where(t["site"] == "a", t["x"] > 0.5, np.where(t["site"] == "b", t["x"] > -0.5, t["x"] < 0.0))
    more = {
        "once": 5.0,
        "week": np.arange(len(t)) % 9 + 2,
        "ward": t["g"],
        "apart": apart * 1,
        "wrong": (t["x"] > 0.0) * 1,
        "tiny": t["y"] * 1e-160,
    }
    return by_site(t.assign(**more, lacks=t["y"].where(t["x"] > -1.0)), **given)


def entities(missing: bool = False, response: bool = False, **given: Any) -> fs.ClientPartition:
    """Return columns of three sites with responses of three kinds; records or responses may be missing."""
    frames, rng = counts(), np.random.default_rng(8)
    t = frames["A"].assign(f=1.0 + np.arange(900) % 3, v=frames["C"]["v"].to_numpy(), z=rng.normal(size=900))
    t["o"] = 0.1 * t["f"]
    if response:
        t["y"] = t["y"].where(t["x"] > -1.0)
    there = rng.random(900) < (0.7 if missing else 1.0)
    return columns(
        {"A": t[["id", "y", "k", "e", "x", "f", "o"]], "B": t.loc[there, ["id", "z"]], "C": t[["id", "v"]]},
        **given,
    )


def cells(text: bool = False, **given: Any) -> fs.ClientPartition:
    """Return columns of two sites, with cells that are missing, of numbers or of levels."""
    frames = counts()
    table, rng = frames["C"].assign(q=np.arange(900) % 5 * 1.0), np.random.default_rng(9)
    table["q"] = table["q"].map(dict(enumerate("abcde"))) if text else table["q"]
    return columns({"A": frames["A"], "C": table.assign(q=table["q"].where(rng.random(900) < 0.8))}, **given)


def lacking(**given: Any) -> fs.ClientPartition:
    """Return columns of which the site of the response lacks some."""
    frames = counts()
    table = frames["A"]
    lost = table.assign(x=table["x"].where(table["id"] % 4 > 0))
    return columns({**frames, "A": lost}, partial="condition", **given)


def rare(**given: Any) -> fs.ClientPartition:
    """Return rows with a column that is not zero in few clusters."""
    rng, n = np.random.default_rng(4), 480
    t = pd.DataFrame({"site": np.arange(n) // 12 % 3, "g": np.arange(n) // 12, "x": rng.normal(size=n)})
    t = t.assign(site=t["site"].map(dict(enumerate("abc"))), r=(t["g"] < 2) * 1, y=rng.normal(size=n))
    return by_site(t, fs.Policy(products="counted"), **given)


def budgeted(**given: Any) -> fs.ClientPartition:
    """Return columns of two sites with a budget for noise."""
    t = counts()["A"].assign(v=counts()["C"]["v"]).clip(-6.0, 6.0)
    held = {"A": ["y"], "B": ["v"]}
    return fs.ClientPartition.from_frame(t, columns=held, policy=fs.Policy(privacy=fs.Budget(500.0, 1e-5)))


def constant() -> Any:
    """Return a mixed model without a covariate."""
    return fs.FederatedMixed.from_formula("y ~ 1 + (1 | g)", clean(), reml=False).fit()


class OfTreatment:
    """The weights of a treatment, which is fitted when they are first used."""

    @functools.cached_property
    def propensity(self):
        made = fs.TreatmentEffect.from_formula("y ~ 1", clean(), treatment="m ~ x")
        return made.balance(overlap=False).propensity


WEIGHTS = OfTreatment()
missing = functools.partial(entities, True)
NEGATIVE_BINOMIAL = sm.families.NegativeBinomial(alpha=1.0)
EVERY, SHRUNKEN = "y ~ x + z + v", {"n_lambdas": 4}
PATIENTS = "Surv(time, e) ~ x"
FAILURES = [
    Failure("FederatedCox", "Surv(time, e) ~ 1", clean),
    Failure("FederatedCox", PATIENTS, clean, {}, {"baseline": "common"}),
    Failure("FederatedCox", PATIENTS, clean, {}, {"grid": 3, "until": 30}),
    Failure("FederatedCox", PATIENTS, clean, {}, {"baseline": "common", "grid": 3}),
    Failure("FederatedAFT", "Surv(time, e) ~ x + strata(m)", clean),
    Failure(
        "FederatedAFT",
        PATIENTS,
        clean,
        {"distribution": "lognormal"},
        then=lambda fit: fit.hazard_ratios(),
    ),
    Failure("GLORE", "e ~ m", clean, {"weights": WEIGHTS}, {"cov_type": "nonrobust"}),
    Failure("GLORE", "e ~ m", clean, {}, {"cov_type": "stacked"}),
    Failure("FederatedCox", PATIENTS, clean, {"weights": WEIGHTS}, {"baseline": "common", "grid": [9, 30]}),
    Failure("TreatmentEffect", PATIENTS, clean, {"treatment": "m ~ x"}),
    Failure("SurvivalEffect", PATIENTS, clean, {"treatment": "m ~ x"}),
    Failure("SurvivalEffect", "Surv(time, e) ~ 1", clean, {"treatment": "m ~ x"}, {"baseline": "common"}),
    Failure("SurvivalEffect", "Surv(time, e) ~ 1", clean, {"treatment": "m ~ x"}, {"times": [12]}),
    Failure(
        "SurvivalEffect",
        "Surv(time, e) ~ 1",
        clean,
        {"treatment": "m ~ x"},
        then=lambda fit: fit.restricted_means(),
    ),
    Failure("KaplanMeier", "Surv(2 * time, e) ~ 1", clean),
    Failure("KaplanMeier", "Surv(once, e) ~ 1", clean),
    Failure("TreatmentEffect", "k ~ x", clean, {"treatment": "e ~ x", "family": NEGATIVE_BINOMIAL}),
    Failure(
        "TreatmentEffect",
        "y ~ x",
        clean,
        {"treatment": "e ~ x", "target": "a"},
        {"method": "standardization"},
    ),
    Failure("TreatmentEffect", "y ~ x", clean, {"treatment": "m ~ x", "link": "probit"}),
    Failure("TreatmentEffect", "y ~ 1", rare_arm, {"treatment": "arm ~ far", "estimand": "matching"}),
    Failure(
        "TreatmentEffect", "y ~ x", clean, {"treatment": "e ~ x", "labels": ["ward"]}, {"cov_type": "cluster"}
    ),
    Failure("KaplanMeier", "Surv(time, e) ~ 1", clean, {}, {"grid": 100, "until": 30}),
    Failure("KaplanMeier", "Surv(time, e) ~ 1", clean, {}, {"grid": 0.01, "until": 30}),
    Failure("KaplanMeier", "Surv(time, e) ~ 1", clean, {}, {"grid": [10, 20], "until": 20}),
    *(
        Failure("FederatedOLS", "y ~ x", clean, {"labels": ["ward"]}, {"cov_type": kind})
        for kind in ("cluster", "survey")
    ),
    Failure("FederatedOLS", "y ~ x | ward", clean, {}, {"cov_type": "HC3"}),
    Failure(
        "FederatedOLS",
        "y ~ x | ward",
        clean,
        {},
        {"cov_type": "cluster", "cov_kwds": {"groups": "ward", "correction": "CR2"}},
    ),
    Failure("FederatedOLS", "y ~ x | ward + week", clean),
    Failure("GLORE", "k ~ x", clean, {"family": POISSON}),
    Failure("FederatedOLS", "e ~ x", clean, {"family": BINOMIAL}),
    Failure("FederatedOLS", "y ~ w", clean, {"offset": "x"}),
    Failure("FederatedGLM", "k ~ x", clean, {"family": POISSON}, {"dispersion": "ml"}),
    Failure("FederatedGLM", "tiny ~ x", clean),
    Failure("FederatedGLM", "apart ~ x", clean, {"family": BINOMIAL}, {"rounds": 1}),
    Failure("GLORE", "wrong ~ x", clean),
    Failure("FederatedGLM", "w ~ x", clean, {"family": NEGATIVE_BINOMIAL}, {"dispersion": "ml"}),
    Failure("FederatedMixed", "w ~ x + (1 | g)", clean, {"family": NEGATIVE_BINOMIAL}),
    Failure("GLORE", "e ~ x", clean, then=lambda fit: fit.get_margeff(at="median")),
    Failure("GLORE", "e ~ x", clean, {"offset": "y"}, then=lambda fit: fit.get_margeff(at="mean")),
    Failure("GLORE", "e ~ x", clean, {"freq_weights": "w"}, then=lambda fit: fit.get_margeff(at="mean")),
    Failure("FederatedGEE", "y ~ x", clean, {"groups": "g", "weights": "m", "cov_struct": "exchangeable"}),
    Failure("FederatedMixed", "y ~ x", clean),
    Failure("FederatedMixed", "y ~ x + (1 | g)", clean, {"nagq": 3}),
    Failure("FederatedMixed", "e ~ x + (1 | g)", clean, {"reml": True, "family": BINOMIAL}),
    Failure(
        "FederatedMixed",
        "y ~ x + (1 | g)",
        clean,
        {},
        {"cov_type": "robust"},
        then=lambda fit: fit.coefficient_tests(),
    ),
    Failure("FederatedMixed", "y ~ x + (1 | g)", clean, then=lambda fit: fit.compare_lr_test(constant())),
    Failure(
        "FederatedMixed",
        "e ~ x + (1 | g)",
        clean,
        {"family": BINOMIAL},
        then=lambda fit: fit.conf_int_variances(method="jackknife"),
    ),
    Failure("FederatedOLS", "lacks ~ x", clean, {"missing": "raise"}),
    Failure("FederatedOLS", "y ~ x", clean, {"missing": "raise", "subset": "w >= 1"}),
    Failure("FederatedGLM", "e ~ x", clean, {"family": BINOMIAL, "exposure": "m"}),
    Failure("FederatedOLS", "y ~ x", clean, {"labels": "g"}),
    Failure("FederatedGLM", "some + w ~ x", clean, {"family": BINOMIAL}),
    Failure("GLORE", "w ~ x", clean),
    Failure("GLORE", "e ~ x", clean, {}, {"masked": True}, then=lambda fit: fit.heterogeneity.left_out),
    Failure("FedAvg", "e ~ x", clean, {"family": BINOMIAL}, {"rounds": 1}, then=lambda fit: fit.site_loss),
    Failure(
        "GLORE",
        "e ~ x",
        functools.partial(clean, policy=fs.Policy(min_own_rows=1000, min_count=3)),
        {},
        {"masked": False},
    ),
    Failure("FederatedOLS", "y ~ x + w + e", functools.partial(clean, policy=fs.Policy(max_columns=2))),
    Failure("VFEMGLM", EVERY, entities, {"family": sm.families.Gaussian()}),
    Failure("VFEMRegression", "e ~ x + v", entities, {"family": BINOMIAL}),
    Failure("VFEMRegression", EVERY, missing, {}, {"iteration": fs.Iteration()}),
    Failure("VFEMRegression", EVERY, missing, {}, {"exchange": "iterative"}),
    Failure("VFEMGLM", "e ~ x + z", missing, {"family": BINOMIAL}, {"cov_type": "robust"}),
    Failure("VFEMGLM", "e ~ x + z", missing, {"family": BINOMIAL}, {"cross_products": "sketch"}),
    Failure("VFEMGLM", "k ~ x + v", entities, {"family": POISSON}, {"dispersion": "ml"}),
    Failure("VFEMRegression", EVERY, missing, {}, {"method": "weighted", "cov_type": "robust"}),
    Failure("VFEMRegression", EVERY, missing, {"between": "independent"}, {"method": "weighted"}),
    Failure("VFEMRegression", EVERY, missing, {}, {"method": "impute", "cov_type": "robust"}),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {"freq_weights": "f", "between": "independent"},
        {"exchange": "iterative"},
    ),
    Failure("VFEMRegression", EVERY, missing, {"freq_weights": "f"}, {"correction": "skewness"}),
    Failure("VFEMRegression", EVERY, missing, {"var_weights": "f"}),
    Failure("VFEMRegression", EVERY, missing, {"between": "independent"}, {"correction": "skewness"}),
    Failure("VFEMRegression", EVERY, missing, {}, {"correction": "skewness", "cov_type": "sem"}),
    Failure("VFEMRegression", EVERY, missing, {"between": "independent"}, {"cov_type": "robust"}),
    Failure("VFEMGLM", "k ~ x + z", missing, {"family": POISSON}),
    Failure("VFEMRegression", EVERY, lacking, {}, {"method": "weighted"}),
    Failure("VFEMRegression", "y ~ x + z", two_sites, {"coordinator": "A"}),
    Failure(
        "VFEMGLM",
        "e ~ x + z",
        two_sites,
        {"family": BINOMIAL, "between": "independent", "coordinator": "A"},
    ),
    Failure("VFEMRegression", EVERY, functools.partial(entities, response=True)),
    Failure("VFEMRegression", "y ~ x + v + q", functools.partial(cells, partial="error")),
    Failure("VFEMRegression", "y ~ x + v + q", functools.partial(cells, True, partial="mean")),
    Failure("VerticalGLM", EVERY, entities, {"unpenalized": "x"}, SHRUNKEN),
    Failure("VerticalGLM", "e ~ x + v", missing, {"missing": "em", "family": BINOMIAL}, SHRUNKEN),
    Failure("VerticalGLM", EVERY, entities, {"penalty": "ridge", "adaptive": 1.0}, SHRUNKEN),
    Failure("VerticalGLM", EVERY, entities, {}, {"lam": 0.1, "select": "cv"}),
    Failure("VerticalGLM", EVERY, missing, {"missing": "em"}, {"select": "cv", **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, entities, {"freq_weights": "f"}, {"exchange": "admm", "lam": 0.1}),
    Failure("VerticalGLM", EVERY, entities, {"var_weights": "f"}, {"inference": "split", **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, missing, {"var_weights": "f", "missing": "em"}, SHRUNKEN),
    Failure("VerticalGLM", EVERY, entities, {"penalty": "ridge"}, {"exchange": "admm", **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, entities, {"penalty": "ridge"}, {"inference": "debiased", **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, entities, {}, {"exchange": "admm", "select": "cv", **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, entities, {}, {"inference": "split", "lam": 0.0}),
    Failure("VerticalGLM", EVERY, entities, {"penalty": "lasso"}, {"steps": 1, **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, entities, {}, {"steps": 1, "exchange": "admm", **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, entities, {}, {"lam": 0.1, "lambdas": [0.1]}),
    Failure(
        "VerticalGLM",
        EVERY,
        entities,
        {},
        {"inference": "conditional", **SHRUNKEN},
        then=lambda fit: fit.debiased,
    ),
    Failure("FedFunctionBoost", "y ~ x", clean, {}, {"steps": 3}, then=lambda fit: fit.refit(doubled=True)),
    Failure(
        "FedFunctionBoost",
        "y ~ x",
        clean,
        {},
        {"steps": 3, "select": "aicc"},
        then=lambda fit: fit.stability(q=1),
    ),
    Failure("FedFunctionBoost", "y ~ x", clean, {}, {"steps": 3, "folds": "site", "masked": True}),
    Failure("LASER", "e ~ x", entities, {}, {"epochs": 1, "method": "vfedtrans"}),
    Failure("LASER", "e ~ x + v", entities, {}, {"epochs": 1, "method": "local", "masked": True}),
    Failure(
        "LASER",
        "e ~ x + v",
        entities,
        {},
        {"epochs": 1, "calibration": 0.0},
        then=lambda fit: fit.predict_set(entities()),
    ),
    Failure("FederatedOLS", "y ~ xx + w", clean),
    Failure("VFEMRegression", "y ~ x + V", entities),
    Failure("FederatedOLS", "y ~ cr(x, knots=(0, 1), lower_bound=-9, upper_bound=9)", clean),
    Failure("FederatedCox", "Surv(time, e) ~ x + C(site)", clean),
    Failure("FederatedOLS", "y ~ x", functools.partial(clean, counts="w", on="ward")),
    Failure("VFEMRegression", EVERY, functools.partial(entities, counts="f")),
    Failure(
        "GLORE", "e ~ x", functools.partial(clean, policy=fs.Policy(masked_only=True)), {}, {"masked": False}
    ),
    Failure(
        "GLORE",
        "e ~ x",
        functools.partial(clean, policy=fs.Policy(refused_kinds=frozenset({"aggregate"}))),
        {},
        {"masked": False, "local": False},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        functools.partial(missing, policy=fs.Policy(refused_kinds=frozenset({"per entity"}))),
        {"between": "independent"},
        {"exchange": "iterative"},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        functools.partial(missing, policy=fs.Policy(per_entity=0)),
        {"between": "independent"},
        {"exchange": "iterative"},
    ),
    Failure(
        "FederatedOLS",
        "y ~ x",
        functools.partial(one_cell_missing, policy=fs.Policy()),
        then=lambda fit: fs.FederatedOLS.from_formula("y ~ x + few", fit.model.partition).fit(),
    ),
    Failure(
        "FedAvg",
        "e ~ x",
        functools.partial(clean, policy=fs.Policy(max_share=0.5)),
        {"family": BINOMIAL},
        {"rounds": 1, "batch_size": 10},
    ),
    Failure(
        "FedAvg",
        "e ~ x",
        functools.partial(clean, policy=fs.Policy(remember="all")),
        {"family": BINOMIAL},
        {"rounds": 1, "init": [0.1, 0.1]},
    ),
    Failure(
        "VFEMRegression",
        "y ~ x + z",
        functools.partial(two_sites, policy=fs.Policy(two_sites="refuse")),
        {"between": "independent"},
        {"exchange": "iterative"},
    ),
    Failure("GLORE", "e ~ x", clean, constructed=True),
    Failure("VFEMRegression", "y ~ x", entities, constructed=True),
    Failure(
        "FederatedOLS",
        "y ~ x + r",
        rare,
        {"labels": ["g"]},
        {"cov_type": "cluster", "cov_kwds": {"groups": "g"}},
    ),
    Failure(
        "FedAvg",
        "k ~ x",
        lambda: by_site(rows().assign(x=lambda t: 100.0 * t["x"])),
        {"family": POISSON},
        {"rounds": 3, "learning_rate": 0.01},
    ),
    Failure(
        "VFEMGLM",
        "e ~ x + v",
        entities,
        {"family": BINOMIAL, "between": "independent"},
        {"method": "impute", "cov_type": "robust"},
    ),
    Failure(
        "PrivateCopulaGLM",
        "y ~ v",
        budgeted,
        {"epsilon": 50.0, "bounds": {"y": (-6.0, 6.0), "v": (-6.0, 6.0)}},
        {"draws": 10, "polish": 0},
        then=lambda fit: fit.copula_test,
    ),
    Failure(
        "M2SEM",
        "~ a + b + c",
        functools.partial(groups, 3.0),
        {"n_clusters": 2, "n_factors": 0},
        {"select": None, "n_init": 1, "cov_type": None},
        then=lambda fit: fit.tests(),
    ),
]


# ---- columns ---------------------------------------------------------------------------------------------


def read_again(
    model: str, formula: str, partition: Any, given: Mapping[str, Any] | None = None, **settings: Any
) -> Any:
    """Fit, save and load a result."""
    with tempfile.TemporaryDirectory() as folder:
        fit = getattr(fs, model).from_formula(formula, partition, **settings).fit(**given or {})
        fit.save(Path(folder) / "fit.fedstat")
        return fs.load(Path(folder) / "fit.fedstat")


def partly(**given: Any) -> fs.ClientPartition:
    """Return columns of a site that lacks some of them for some entities."""
    return cells(**{"partial": "drop", **given})


few = types.SimpleNamespace(n=2, p=3, sites=("A", "B"))
NORMAL = "fedstat.models.vertical.joint_normal."
VFEM = "fedstat.models.vfem."
VGLM = "fedstat.models.vglm."
HUGE = float("inf")
AGAIN = functools.partial(read_again, "VFEMGLM", "e ~ x + z", family=BINOMIAL)
FAILURES += [
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        constants={NORMAL + "model.SINGULAR": HUGE, NORMAL + "edges.COLLINEAR": HUGE},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        constants={NORMAL + "model.SUFFICIENT": HUGE, NORMAL + "model.NEARLY_VANISHING": HUGE},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {},
        {"cov_type": "robust"},
        constants={NORMAL + "fit.MIN_GROUP_FREEDOM": 10**9},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {},
        {"cov_type": "sem"},
        constants={VFEM + "covariance.from_moments.form_separate_sets": lambda edges: False},
    ),
    Failure(
        "VFEMGLM",
        "e ~ x + z + v",
        missing,
        {"family": BINOMIAL, "between": "independent"},
        {"cov_type": "robust"},
        constants={VFEM + "covariance.protocol.min_entities": lambda *given: HUGE},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {"between": "independent"},
        {"cov_type": "sem", "exchange": "iterative"},
        constants={"numpy.linalg.eigvals": lambda matrix: np.array([2.0])},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {},
        {"method": "cc"},
        constants={VFEM + "base_model.lay_out": lambda *a, **k: few},
    ),
    Failure("VFEMRegression", EVERY, missing, then=lambda fit: fit.fittedvalues),
    Failure(
        "VFEMRegression",
        "y ~ x + v + q",
        functools.partial(cells, partial="condition"),
        {},
        {"correction": "skewness"},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        then=lambda fit: fit.compare_lr_test(
            fs.VFEMRegression.from_formula("y ~ x", missing(), between="independent").fit()
        ),
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {},
        {"method": "weighted"},
        constants={VFEM + "weighted.FEWEST_GROUPS": 10**9},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {},
        {"method": "weighted"},
        constants={"numpy.linalg.eigvalsh": lambda matrix: np.array([-1.0])},
    ),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        {},
        {"method": "weighted"},
        then=lambda fit: fit.get_prediction(missing()),
    ),
    *(
        Wrong(
            f"fit.get_margeff({given})",
            lambda: {"fit": fs.VFEMGLM.from_formula("e ~ x + z", missing(), family=BINOMIAL).fit()},
        )
        for given in ("at='median'", "at='overall', method='eyex'")
    ),
    Wrong("fit.get_margeff(at='overall')", lambda: {"fit": AGAIN(missing())}),
    Wrong("fit.get_margeff()", lambda: {"fit": AGAIN(missing())}),
    Failure(
        "VFEMRegression",
        "y ~ x + z",
        missing,
        {"freq_weights": "f"},
        then=lambda fit: fit.get_margeff(at="overall", method="eyex"),
    ),
    Failure(
        "VFEMGLM", "e ~ x + z", missing, {"family": BINOMIAL, "offset": "o"}, then=lambda fit: fit.evaluate()
    ),
    Failure(
        "VerticalGLM",
        EVERY,
        missing,
        {"missing": "em", "between": "free"},
        SHRUNKEN,
        constants={VGLM + "model.MOST_FREE": 1},
    ),
    Failure("VerticalGLM", EVERY, entities, {}, {"select": "cv", "folds": 300, **SHRUNKEN}),
    Failure("VerticalGLM", EVERY, entities, {"penalty": "ridge", "unpenalized": ["x", "z", "v"]}, SHRUNKEN),
    Failure("VerticalGLM", EVERY, entities, {}, SHRUNKEN, then=lambda fit: fit.plot_stability()),
    Failure("VerticalGLM", EVERY, missing, warns=True),
]


# ---- rows ------------------------------------------------------------------------------------------------


def fitted(model: str, formula: str, arguments: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """Return a function that makes a fit of rows, as a name of a call."""
    return lambda: {
        "fit": getattr(fs, model).from_formula(formula, clean(), **settings).fit(**arguments or {})
    }


def two_fits() -> Mapping[str, Any]:
    """Return fits of different numbers of rows, and two that are nearly equal."""
    t = rows()
    whole, part, near = (
        fs.FederatedOLS.from_formula("y ~ x", by_site(table)).fit()
        for table in (t, t[t["x"] > -1.0], t.assign(y=t["y"] + 1e-9 * t["w"]))
    )
    estimates = {name: fit.params["x"] for name, fit in zip("ab", (whole, part), strict=True)}
    errors = {name: fit.bse["x"] for name, fit in zip("ab", (whole, part), strict=True)}
    return {"results": [whole, part], "same": [whole, near], "estimates": estimates, "errors": errors}


def saved() -> Mapping[str, Any]:
    """Return a result from a file."""
    return {"fit": read_again("GLORE", "e ~ x", clean())}


def held_apart() -> Mapping[str, Any]:
    """Return columns of two sites."""
    return {"partition": two_sites()}


DOWN = {"epochs": 1}
FAILURES += [
    Wrong("TreatmentEffect.from_formula('y ~ x', partition, treatment='e ~ z').fit()", held_apart),
    Wrong("fit.evaluate().auc", fitted("FederatedOLS", "y ~ x")),
    Wrong("fit.auc", fitted("GLORE", "e ~ x")),
    Wrong("fit.fittedvalues", fitted("GLORE", "e ~ x")),
    Wrong("fit.effect('m')", fitted("FederatedOLS", "y ~ C(m)")),
    Wrong("fit.effect('x')", fitted("FederatedMultinomial", "m ~ x")),
    Wrong("combine(results)", two_fits),
    Wrong("combine(same)", two_fits),
    Wrong("histogram(partition, 'z', by='e')", held_apart),
    Wrong("fit.get_margeff(atexog={'I(x ** 2)': 1.0})", fitted("GLORE", "e ~ x + I(x ** 2)")),
    Wrong("fit.get_margeff()", saved),
    Failure(
        "FederatedGLM",
        "k ~ x",
        clean,
        {"family": POISSON},
        then=lambda fit: fit.compare_f_test(
            fs.FederatedGLM.from_formula("k ~ 1", clean(), family=POISSON).fit(scale="X2")
        ),
    ),
    Failure(
        "FedAvg",
        "e ~ x",
        clean,
        {"family": BINOMIAL},
        {"rounds": 1},
        constants={"fedstat.models.fedavg.protocol.TINY_SHARE": -1.0},
    ),
    Failure(
        "FedAvg",
        "e ~ x",
        functools.partial(clean, policy=fs.Policy(order="declared")),
        {"family": BINOMIAL},
        {"rounds": 6, "fraction": 0.4, "seed": 1},
    ),
    Wrong(
        "fit.get_margeff(at='mean')",
        fitted("FederatedMixed", "k ~ x + offset(log(m)) + (1 | g)", family=POISSON),
    ),
    Wrong("fit.get_margeff(at='mean')", fitted("FederatedOrdinal", "w ~ x + offset(time)")),
    Failure(
        "FederatedMixed",
        "y ~ x + (1 | g)",
        clean,
        {"reml": False},
        then=lambda fit: fit.coefficient_tests("kenward-roger"),
    ),
    Wrong(
        "fit.compare_lr_test(other)",
        lambda: {
            name: fs.FederatedMixed.from_formula(f"y ~ x + ({left} | g)", clean(), reml=False).fit()
            for name, left in {"fit": "1 + x", "other": "1"}.items()
        },
    ),
    Failure("LASER", "e ~ x + v", entities, {}, DOWN, then=lambda fit: fit.params["x"]),
    Failure("LASER", "e ~ x + v", entities, {}, DOWN, then=lambda fit: fit.params.x),
    Failure("LASER", "e ~ x + v", entities, {}, DOWN, then=lambda fit: list(fit.params)),
    Failure("LASER", "f ~ x + v", entities, {}, DOWN),
    Failure(
        "LASER",
        "f ~ x + v",
        entities,
        {"outcome": "multiclass"},
        DOWN,
        constants={"fedstat.models.laser.response_steps.MOST_CLASSES": 2},
    ),
    Failure(
        "LASER",
        "e ~ x + v",
        entities,
        {},
        {"method": "combinatorial", **DOWN},
        constants={"fedstat.models.laser.training.MOST_COMBINED": 1},
    ),
    Failure("LASER", "e ~ x + v", entities, {}, {"learning_rate": 1e200, **DOWN}),
    Failure(
        "VFEMRegression",
        EVERY,
        missing,
        constants={"fedstat.models.vertical.exchange.patterns.LARGEST_SHARE": -1e-9},
    ),
    *(
        Failure(
            model,
            formula,
            functools.partial(clean, policy=replace(OPEN, refused_kinds=frozenset({"aggregate"}))),
            settings,
            {"masked": True},
        )
        for model, formula, settings in [
            ("GLORE", "e ~ x", {}),
            ("FederatedCox", PATIENTS, {}),
            ("FederatedOrdinal", "w ~ x", {}),
            ("FederatedGEE", "e ~ x", {"groups": "g", "family": BINOMIAL}),
        ]
    ),
]


def refused_twice() -> Failure:
    """Return a fit that one policy refuses for two reasons, of which each error names the next remedy."""
    return Failure(
        "GLORE",
        "e ~ x",
        functools.partial(clean, policy=replace(OPEN, refused_kinds=frozenset({"aggregate"}))),
        arguments={"masked": False},
    )


# ---- effects ---------------------------------------------------------------------------------------------


@functools.cache
def fitted_once(model: str, formula: str, partition: Callable[[], Any], offset: str | None = None) -> Any:
    """Fit a model once for all calls that only read its result."""
    return (
        getattr(fs, model).from_formula(formula, partition(), **({"offset": offset} if offset else {})).fit()
    )


def of_result(model: str, formula: str, partition: Callable[[], Any] = clean, **settings: Any) -> Any:
    """Return a function that names a shared fit."""
    return lambda: {"fit": fitted_once(model, formula, partition, **settings)}


def nowhere_complete() -> fs.ClientPartition:
    """Return columns of three sites without an entity that all of them have."""
    frames = counts(overlap=False)
    return columns(frames)


FAILURES += [
    Wrong("fit.comparisons('x', exponentiate=True)", of_result("GLORE", "e ~ x + C(m)")),
    Wrong("fit.contrasts('m', which='mean', exponentiate=True)", of_result("GLORE", "e ~ x + C(m)")),
    Wrong("fit.predictions(which='linear')", of_result("GLORE", "e ~ x + C(m)")),
    Wrong("fit.predictions(variables='x')", of_result("GLORE", "e ~ x + C(m)")),
    Wrong("fit.means('x')", of_result("GLORE", "e ~ x + C(m)")),
    Wrong("fit.contrasts('x', which='linear')", of_result("GLORE", "e ~ x + C(m)")),
    Wrong("fit.slopes('x', at='mean')", of_result("GLORE", "e ~ x", offset="y")),
    Wrong("fit.means('m')", of_result("GLORE", "e ~ x + C(m) + I(y ** 2)")),
    Wrong("fit.predictions(at='mean')", of_result("FederatedCox", PATIENTS)),
    Wrong("fit.comparisons('x', times=[12])", of_result("FederatedCox", PATIENTS)),
    Wrong(
        "fit.survival_function(rows)", lambda: of_result("FederatedCox", PATIENTS)() | {"rows": {"x": [0.5]}}
    ),
    Wrong("fit.predictions()", of_result("VFEMRegression", EVERY, nowhere_complete)),
    Wrong("fit.comparisons('x')", of_result("VFEMRegression", "y ~ I(x ** 2) + z", missing)),
    Wrong("fit.slopes('x')", of_result("VFEMRegression", "y ~ I(x ** 2) + z", missing)),
    Wrong("fit.predictions()", of_result("VFEMRegression", EVERY, missing, offset="o")),
]


# ---- curves, synthesis and clusters ----------------------------------------------------------------------


def curves(gaps: float = 0.0, start: int = 0, n: int = 120, **given: Any) -> Any:
    """Return rows of two sites with curves y and c; y lacks some points."""
    rng = np.random.default_rng(4)
    wide = {f"{name}_{j}": rng.normal(size=n) for name in "cy" for j in range(16)}
    t = pd.DataFrame({"x": rng.normal(size=n), "s": rng.normal(size=n), "g": np.arange(n) // 4, **wide})
    t["y_3"] = t["y_3"].where((rng.random(n) >= gaps) | (t.index < start))
    t["site"] = np.where(t.index % 2, "a", "b")
    return by_site(t.assign(k=4000 + rng.poisson(9.0, size=n)), **given)


def curves_apart() -> dict[str, pd.DataFrame]:
    """Return columns of two sites, with a response that is a curve with a gap."""
    rng, n = np.random.default_rng(4), 80
    t = pd.DataFrame(rng.normal(size=(n, 12)), columns=[f"y_{j:02d}" for j in range(12)]).assign(
        id=np.arange(n)
    )
    t.loc[:3, "y_05"] = np.nan
    return {"A": t, "B": pd.DataFrame({"id": np.arange(n), "z": rng.normal(size=n)})}


CURVES = {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in "cy"}
WITH_CURVES = functools.partial(curves, curves=CURVES)
STRICTER = functools.partial(curves, policy=fs.Policy())
STEPS = {"steps": 5}
ALONG = "y(t) ~ bconcurrent(c, knots=3)"
BOOSTED = "FedFunctionBoost.from_formula('y(t) ~ x', curves({}, curves={{'y': Curve('y_*')}}){}).fit({})"
WITH_GAPS = functools.partial(Wrong, names=lambda: {"curves": curves})


FAILURES += [
    Failure("FedFunctionBoost", "y(t) ~ x", curves, {}, STEPS),
    Failure("FedFunctionBoost", "s ~ bsignal(c, knots=3)", curves, {}, STEPS),
    Failure("FedFunctionBoost", ALONG, WITH_CURVES, {}, {"folds": 4, **STEPS}, then=lambda fit: fit.refit()),
    WITH_GAPS(BOOSTED.format("0.1", "", "steps=5, folds=4") + ".refit()"),
    WITH_GAPS(BOOSTED.format("0.1", ", loss='huber', delta=1.0", "steps=5")),
    WITH_GAPS(BOOSTED.format("0.9, 114, policy=Policy()", "", "steps=5"), warns=True),
    Failure(
        "FedFunctionBoost",
        "k ~ x",
        curves,
        {"family": POISSON},
        {"learning_rate": 1.0, "offset": 1.0, "steps": 20},
    ),
    Failure("FedFunctionBoost", "s ~ x", STRICTER, {"loss": "huber", "delta": 1.0}, {"offset": 1e6, **STEPS}),
    Failure("FedFunctionBoost", "s ~ x", curves, {}, {"folds": "g", **STEPS}),
    Wrong(
        "fit.stability()",
        lambda: {"fit": fs.FedFunctionBoost.from_formula("s ~ x", curves()).fit(steps=5, folds=4)},
    ),
    Wrong(
        "fit.plot('fitted')",
        lambda: {
            "fit": fitted_once("FedFunctionBoost", "s ~ x", curves),
            "rows": pd.DataFrame({"s": [0.0, 1.0], "x": [0.5, 1.0]}),
        },
    ),
]


def two_blocks(lost: float = 0.0, **given: Any) -> fs.ClientPartition:
    """Return columns y and a of one site and b, w and f of another, which lacks some entities."""
    rng, n = np.random.default_rng(6), 300
    t = pd.DataFrame(rng.normal(size=(n, 3)).clip(-4.0, 4.0), columns=list("yab"))
    t = t.assign(id=np.arange(n), k=rng.poisson(2.0, n), w=np.resize(list("uv"), n))
    there = rng.random(n) >= lost
    policy = fs.Policy(privacy=fs.Budget(500.0, 1e-5))
    return columns(
        {"A": t[["id", "y", "a", "k"]], "B": t.loc[there, ["id", "b", "w"]]}, **{"policy": policy, **given}
    )


def to_synthesize(**names: Any) -> Callable[[], Mapping[str, Any]]:
    """Return a function that names columns, their bounds and a budget."""
    bounds = dict.fromkeys("yab", (-4.0, 4.0)) | {"k": (0, 12), "w": ["u", "v"]}
    return lambda: {
        "partition": two_blocks(0.5, **names),
        "bounds": bounds,
        "epsilon": 60.0,
        "low": -9,
        "high": 9,
    }


CLEAR = {"policy": fs.Policy()}
SYNTHESIS = "CopulaSynthesizer(partition, epsilon=9.0, bounds=bounds, columns=['y', 'b'], missing='em')"
COPULA = "fedstat.models.copula."
TWO = {"n_clusters": 2, "n_factors": 0}
CLUSTERS = {"select": None, "n_init": 1, "cov_type": None}


def clustered(distance: float = 4.0, **given: Any) -> fs.ClientPartition:
    """Return columns of two groups at two sites, with a covariate."""
    rng, n = np.random.default_rng(1), 160
    t = pd.DataFrame({name: distance * (np.arange(n) % 2) + rng.normal(size=n) for name in ("a", "b", "c")})
    t = t.assign(
        id=np.arange(n),
        t=np.where(np.isin(np.arange(n), (1, 3, *range(40, 58, 2))), "v", "u"),
        age=rng.normal(size=n),
    )
    return columns({"A": t[["id", "a", "b", "t", "age"]], "B": t[["id", "c"]]}, **given)


@functools.cache
def clusters() -> Mapping[str, Any]:
    """Return a fit of clusters, and its partition."""
    partition = clustered()
    return {"partition": partition, "fit": fs.M2SEM.from_formula("~ a + c", partition, 2, 0).fit(**CLUSTERS)}


FAILURES += [
    Wrong(
        "CopulaSynthesizer(partition, epsilon=9.0, bounds=Bounds({}), columns=['y', 'b'])", to_synthesize()
    ),
    Wrong(
        "CopulaSynthesizer(partition, epsilon=9.0, columns=['y', 'b'], mechanism='published').explain()",
        to_synthesize(**CLEAR),
    ),
    Wrong(
        "CopulaSynthesizer(partition, epsilon=9.0, mechanism='published').fit(method='vcds')",
        to_synthesize(**CLEAR),
    ),
    Wrong(SYNTHESIS + ".fit()", to_synthesize(), constants={COPULA + "protocol.FEWEST": 200}),
    Wrong(
        "PrivateCopulaGLM.from_formula('y ~ a + b', partition, epsilon=9.0, bounds=bounds).fit()",
        to_synthesize(),
        constants={"fedstat.models.copula_glm.protocol.FEWEST": 1000},
    ),
    Failure(
        "PrivateCopulaGLM",
        "k ~ a",
        two_blocks,
        {"epsilon": 50.0, "family": POISSON, "bounds": {"k": (0, 12), "a": (-4, 4)}},
        {"polish": 1, "draws": 10},
    ),
    Wrong(
        "PrivateCopulaGLM.from_formula('y ~ a', partition, epsilon=9, "
        "bounds=b).fit(polish=0, draws=10).evaluate()",
        lambda: {**to_synthesize()(), "b": {"y": (-4, 4), "a": (-4, 4)}, "frame": pd.DataFrame({"a": [0.0]})},
    ),
    Wrong("fit.outside('a')", clusters),
    Failure("M2SEM", "~ a + c", clustered, TWO, CLUSTERS, then=lambda fit: fit.covariate_effects()),
    Failure("M2SEM", "~ a + c", clustered, {**TWO, "adjust": "~ age"}, CLUSTERS, warns=True),
    Wrong(
        "fit.plot_profiles()",
        lambda: {"fit": fs.M2SEM.from_formula("~ a + c", clustered(0.0), 1, 1).fit(n_init=1, cov_type=None)},
    ),
    Wrong(
        "fit.outside('b')",
        lambda: {
            "partition": clustered(),
            "fit": read_again(
                "M2SEM", "~ a + c", clustered(), {"cov_type": None, "select": None}, n_clusters=2
            ),
        },
    ),
    Failure("M2SEM", "~ a + t + c", clustered, TWO, CLUSTERS),
    Failure(
        "FedFunctionBoost",
        "y ~ x + z",
        functools.partial(entities, response=True),
        {"missing": "raise"},
        STEPS,
    ),
    Wrong(
        "FedFunctionBoost.from_formula('y(t) ~ z', columns(frames, curves={'y': Curve('y_*')})).fit(steps=5)",
        lambda: {"columns": columns, "frames": curves_apart()},
        warns=True,
    ),
]
