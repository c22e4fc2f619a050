"""Every public name has an example, and every example runs as a reader would type it.

``python -m pytest -m example`` runs them, as the documentation does.
"""

import doctest
import inspect
import re
import subprocess
import sys

import pytest
from public_api import entries, examples, function_of, is_called, members, statements, text_of, undocumented

import fedstat

ENTRIES = entries()
CLASSES = {name: value for name, value in ENTRIES.items() if inspect.isclass(value)}
RESULTS = {cls for name, cls in CLASSES.items() if name.startswith("results.")} | {fedstat.ClientPartition}
MODELS = [cls for name, cls in CLASSES.items() if "." not in name and hasattr(cls, "fit")]
NOT_RESULTS = {
    "CurveArray",
    "Engine",
    "Entry",
    "Estimate",
    "Exposure",
    "FittedPropensity",
    "GLMBasis",
    "HypothesisTest",
    "LedgerLike",
    "Overdispersion",
    "PatternExchange",
    "ReceiptLike",
    "RowsBasis",
    "Selection",
    "Sheet",
    "TermTests",
}
"""Attributes of public classes other than results: columns, transports, protocols, parts of records."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def written():
    """Every docstring with examples once, by where it stands."""
    found = {"results": fedstat.results}
    for value in ENTRIES.values():
        own = [raw for _, _, raw in members(value)] if inspect.isclass(value) else []
        bases = value.__mro__[:-1] if inspect.isclass(value) else ()
        for one in (value, *bases, *own):
            if examples(one):
                function = function_of(one)
                found[f"{function.__module__.removeprefix('fedstat.')}.{function.__qualname__}"] = one
    return found


WRITTEN = written()


@pytest.mark.example
@pytest.mark.parametrize("name", WRITTEN)
def test_example_runs(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    text = text_of(WRITTEN[name]) if name != "results" else fedstat.results.__doc__
    assert "+SKIP" not in text
    made = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, None)
    out = []
    doctest.DocTestRunner(optionflags=FLAGS).run(made, out=out.append, clear_globs=False)
    assert not out, "".join(out)
    # Of the results and models that it made, everything without an underscore is documented.
    for value in made.globs.values():
        if type(value) in RESULTS.union(MODELS):
            assert not undocumented(value), type(value).__name__


def gives_a_name(cls):
    return re.search(r"^model = ", statements(cls), re.M)


def test_every_model_is_walked():
    """Its example, or that of what it inherits from, gives one a name, so that its attributes are seen."""
    assert not [cls.__name__ for cls in MODELS if not any(map(gives_a_name, cls.__mro__[:-1]))]


def test_every_class_and_function_has_an_example():
    assert not [name for name, value in ENTRIES.items() if not examples(value)]


def test_every_method_and_property_is_shown():
    """... by an example of its own, or of its class or one that this inherits from."""
    assert not [
        f"{name}.{member}"
        for name, cls in CLASSES.items()
        for member, _, raw in members(cls)
        if not examples(raw) and not is_called(member, cls)
    ]


def test_what_methods_return_can_be_imported():
    """Classes of the package that public methods return are public themselves."""
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "fedstat"]
    made = [value for module in loaded for value in vars(module).values() if inspect.isclass(value)]
    ours = {value.__name__ for value in made if value.__module__.partition(".")[0] == "fedstat"}
    known = {cls.__name__ for cls in CLASSES.values()} | NOT_RESULTS
    found = {}
    for cls in CLASSES.values():
        for name, _, raw in members(cls):
            reported = str(inspect.get_annotations(function_of(raw)).get("return", ""))
            if strange := set(re.findall(r"\w+", reported)) & ours - known:
                found[f"{cls.__name__}.{name}"] = strange
    assert not found


def test_results_are_imported_when_they_are_named():
    """To import the module loads no family."""
    code = (
        "import sys, fedstat.results; assert 'fedstat.models.glm.results' not in sys.modules; "
        "fedstat.results.GLMResults"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
