"""Arguments of all models: the page that lists them, and one name and one default for each meaning."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

import fedstat as fs

DOCS = Path(__file__).parents[1] / "docs"
CALLS = ("from_formula", "fit")
REPLACED = {
    "random_state",
    "max_iter",
    "n_iter",
    "max_rounds",
    "lr",
    "nu",
    "rate",
    "eps",
    "tol_score",
    "tol_change",
}
"""Names that other packages have for arguments of this one."""


@pytest.fixture(scope="module")
def arguments():
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("building.arguments")
    finally:
        sys.path.remove(str(DOCS))


def test_the_page_is_that_of_the_signatures(arguments):
    assert arguments.PAGE.read_text(encoding="utf-8") == arguments.page(), (
        "run: python docs/building/arguments.py"
    )


def test_every_model_has_a_column(arguments):
    models = {name for name in fs.__all__ if hasattr(getattr(fs, name), "fit")}
    assert {name for names in arguments.COLUMNS.values() for name in names} == models


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_has_a_meaning_and_every_difference_a_reason(arguments, call):
    assert set(arguments.MEANINGS[call]) == set(arguments.table(call))
    assert set(arguments.REASONS[call]) == set(arguments.differing(call))
    assert not REPLACED & set(arguments.MEANINGS[call])


def test_masks_and_levels_have_one_default_everywhere(arguments):
    row = set(arguments.table("fit")["masked"]) - {arguments.NONE}
    assert row == {"`None`"}
    assert "alpha" not in {*arguments.MEANINGS["fit"], *arguments.MEANINGS["from_formula"]}


@pytest.mark.parametrize(
    ("model", "call", "given", "remedy"),
    [
        ("VerticalGLM", "fit", "random_state", "; use 'seed'"),
        ("GLORE", "fit", "max_iter", "; use 'maxiter'"),
        ("FedAvg", "fit", "n_iter", "; use 'rounds'"),
        ("FedAvg", "fit", "lr", "; use 'learning_rate'"),
        ("GLORE", "from_formula", "data", "; use 'partition'"),
        ("VerticalGLM", "from_formula", "unpenalised", "; use 'unpenalized'"),
        ("VFEMGLM", "fit", "tol_score", "; use 'tol'"),
        ("GLORE", "from_formula", "maxiter", "; 'maxiter' is an argument of GLORE.fit"),
        ("LASER", "from_formula", "lr", "; 'learning_rate' is an argument of LASER.fit"),
        ("VFEMRegression", "fit", "missing", "; 'missing' is an argument of VFEMRegression.from_formula"),
        ("FedFunctionBoost", "from_formula", "nonsense", r"\. Its arguments are formula, .*, public$"),
        ("GLORE", "fit", "seed", r"\. Its arguments are cov_type, .*, progress$"),
    ],
)
def test_a_wrong_name_suggests_the_right_one(model, call, given, remedy):
    cls = getattr(fs, model)
    call_it = getattr(cls.__new__(cls) if call == "fit" else cls, call)
    with pytest.raises(fs.errors.ModelError, match=rf"has no argument '{given}'{remedy}"):
        call_it(**{given: 1})


@pytest.mark.parametrize("name", [name for name in fs.__all__ if hasattr(getattr(fs, name), "fit")])
def test_signatures_show_every_argument(name):
    model = getattr(fs, name)
    for call in (model.fit, getattr(model, "from_formula", model)):
        kinds = {one.kind for one in inspect.signature(call).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
