"""Every public name has an example, and every example runs as a reader would type it."""

import doctest
import inspect
import subprocess
import sys

import pytest
from public_api import entries, examples, function_of, members, text_of

import fedstat

ENTRIES = entries()
CLASSES = {name: value for name, value in ENTRIES.items() if inspect.isclass(value)}
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


def test_results_are_imported_when_they_are_named():
    """To import the module loads no family."""
    code = (
        "import sys, fedstat.results; assert 'fedstat.models.glm.results' not in sys.modules; "
        "fedstat.results.GLMResults"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
