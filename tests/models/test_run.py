"""One function runs every fit: consent, masks, receipt, ledger, in this order; nothing goes past it."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from threadpoolctl import ThreadpoolController

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.models import run
from fedstat.models.run import Call, run_fit

MODELS = Path(run.__file__).parent
CLASSES = [one for name in fs.__all__ if inspect.isclass(one := getattr(fs, name)) and hasattr(one, "fit")]
BEFORE_A_FIT = {
    "horizontal/model.py": "_settle",
    "vertical/model.py": "__init__",
    "m2sem/model.py": "__init__",
    "impute/protocol.py": ("_run", "finish", "explain_rows"),
}
"""Functions that agree on columns when a model is made, or on cells that are imputed, and plan that."""
AFTER_A_FIT = {"vertical/prediction/protocol.py": "released_specs", "m2sem/prediction.py": "predict_clusters"}
"""Functions that ask for what the plan of the fit, or of the prediction, has announced."""


def partition(**given):
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"x": rng.normal(size=150), "site": ["A", "B", "C"] * 50})
    table["y"] = (table["x"] + rng.logistic(size=150) > 0).astype(float)
    return fs.ClientPartition.from_frame(table, by="site", **given)


def runs_of_an_engine(path):
    """Names of the functions of a file that hand a protocol to an engine."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("engine.run"):
                    yield function.name


def test_protocols_reach_the_engine_in_one_file():
    found = {
        path.relative_to(MODELS).as_posix(): set(runs_of_an_engine(path)) for path in MODELS.rglob("*.py")
    }
    assert found.pop("run.py") == {"run", "run_analysis"}
    assert found.pop("explain.py") == {"propose"}
    assert {name: {*names} for name, names in found.items() if names} == {
        name: {*([own] if isinstance(own, str) else own)}
        for name, own in (BEFORE_A_FIT | AFTER_A_FIT).items()
    }


def named_or_not(call):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [one for one in inspect.signature(call).parameters.values() if one.kind is kind]


@pytest.mark.parametrize("model", CLASSES, ids=lambda one: one.__name__)
def test_fits_show_their_own_parameters(model):
    kinds = {one.kind for one in inspect.signature(model.fit).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    with pytest.raises(fs.errors.ModelError, match=rf"{model.__name__}.fit has no argument 'nonsense'"):
        model.fit(model.__new__(model), nonsense=1)
    without_name = [None] * (9 + len(named_or_not(model.fit)) - 1)
    with pytest.raises(fs.errors.ModelError, match=rf"{model.__name__}.fit: 9 values without a name"):
        model.fit(model.__new__(model), *without_name)


def test_the_order_of_a_run(monkeypatch):
    order = []

    class Engine(LocalEngine):
        def run(self, protocol, ledger):
            order.append("engine")
            return super().run(protocol, ledger)

    def noted(name):
        function = getattr(run, name)
        monkeypatch.setattr(
            run, name, lambda *given, **named: (order.append(name), function(*given, **named))[1]
        )

    sites = partition(policy=fs.Policy(approval="owner"))
    model = fs.GLORE.from_formula("y ~ x", sites)
    model.engine = Engine(sites.sites)
    for name in ("propose", "masked_protocol", "with_receipt"):
        noted(name)
    with pytest.raises(fs.errors.ConsentError, match="pending"):
        model.fit()
    # The plan comes from a dry run of the fit; only the proposal reaches the sites.
    proposal = ["propose", "masked_protocol", "with_receipt", "engine"]
    assert order == proposal
    for site in sites.sites.values():
        for digest in list(site.pending):
            site.approve(digest)
    order.clear()
    assert model.fit().converged
    assert order == [*proposal, "masked_protocol", "with_receipt", "engine"]


def test_a_call_has_the_arguments_that_are_not_defaults():
    def fit(self, *, a=1, b="x", c=None, d=True, e=0.5):
        return Call.of(fit, locals())

    given = np.array([1.0])
    assert fit(None, a=1, b="x", d=True).arguments == {"self": None}
    assert set(fit(None, a=True, c=given, d=1, e=0.25).arguments) == {"self", "a", "c", "d", "e"}


def test_attempts_at_one_model_do_not_enter_each_others_ledger():
    model = fs.GLORE.from_formula("y ~ x", partition())
    first, second = model.fit().ledger, model.fit().ledger
    assert len(first.entries) == len(second.entries) > len(model._agreement.entries)


def test_linear_algebra_has_one_thread_during_a_fit_and_its_own_number_after():
    """Two threads make fits slower: see tests/benchmarks/results/user_profiles.md."""
    libraries = ThreadpoolController().select(user_api="blas")
    seen = []

    def estimate(model, attempt):
        seen.extend(library["num_threads"] for library in libraries.info())
        raise EstimationError("no fit is needed")

    partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    model = fs.GLORE.from_formula("num > 0 ~ age", partition)
    with libraries.limit(limits=2):
        before = [library["num_threads"] for library in libraries.info()]
        with pytest.raises(EstimationError):
            run_fit(model, Call("fit", {}), estimate)
        assert [library["num_threads"] for library in libraries.info()] == before
    assert seen and set(seen) == {1} and 2 in before
