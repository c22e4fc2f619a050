"""The recipes of CONTRIBUTING.md, carried out on a copy of the package, and the pages for contributors."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
CHANGE = re.compile(
    r"In `([\w/.]+)`, (above|into|at the end of) (?:`(\w+)` of )?`(\w+)`(?: before `(\w+)`)?:\n\n"
    r"```python\n(.*?)```",
    re.DOTALL,
)


def recipe(title):
    """Changes of a recipe: file, above or into, group of a catalogue, name, entry after the new one, code."""
    text = PAGE.read_text(encoding="utf-8")
    (section,) = [part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(title)]
    return CHANGE.findall(section)


def assignment(source, name):
    """The statement of a module, or of a class in it, that gives a name its value."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and [getattr(one, "id", "") for one in targets] == [
            name
        ]:
            return node
    raise AssertionError(f"no assignment to {name}")


def changed(source, how, group, name, entry, code):
    """Put code above an assignment, into the collection that it assigns, or at the end of a function."""
    lines = source.splitlines(keepends=True)
    if how == "at the end of":
        (node,) = [one for one in ast.parse(source).body if getattr(one, "name", "") == name]
        block = textwrap.indent(code, " " * node.body[0].col_offset)
        return "".join([*lines[: node.end_lineno], block, *lines[node.end_lineno :]])
    node = assignment(source, name)
    if how == "above":
        place = node.lineno - 1
        block = textwrap.indent(code, " " * node.col_offset)
        return "".join([*lines[:place], block, "\n", *lines[place:]])
    if entry:
        place = next(i for i in range(node.lineno, node.end_lineno) if lines[i].strip() == f"{entry},")
        while lines[place - 1].strip().startswith("#"):
            place -= 1
        block = textwrap.indent(f"{code.rstrip()},\n", " " * 4)
        return "".join([*lines[:place], block, *lines[place:]])
    value = node.value
    if group:
        (value,) = [one.value for one in node.value.keywords if one.arg == group]
    elif isinstance(value, ast.Call):
        value = value.args[0]
    at = sum(map(len, lines[: value.end_lineno - 1])) + value.end_col_offset - 1
    before = source[:at].rstrip()
    comma = "" if before.endswith((",", "{", "(", "[")) else ", "
    return f"{before}{comma}{code.strip().rstrip(',')}{source[at:]}"


def copy_folder(name, place):
    """Copy a folder with what python and numba have compiled, but for files that are being written."""
    shutil.copytree(
        ROOT / name, place / name, ignore=shutil.ignore_patterns("*.pyc.*", "*.tmp.*", "generated")
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package, in which all recipes were carried out."""
    place = tmp_path_factory.mktemp("copy")
    for folder in ("fedstat", "tests/contracts"):
        copy_folder(folder, place)
    shutil.copy(ROOT / "tests" / "seeded_secrets.py", place / "tests")
    titles = re.findall(r"^## (Add a (?!family).*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(titles) == 5
    for title in titles:
        changes = recipe(title)
        assert changes, title
        for file, *change in changes:
            path = place / file
            text = changed(path.read_text(encoding="utf-8"), *change)
            path.write_text(text, encoding="utf-8")
    return place


def run(copy, script):
    """Run a script with the copy, which must find nothing to complain of."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    code = f"import fedstat\nassert fedstat.__file__.startswith({str(copy)!r})\n{textwrap.dedent(script)}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.example
def test_a_new_link_is_fitted_as_statsmodels_fits_it(copy):
    run(
        copy,
        """
        import numpy as np, statsmodels.api as sm, statsmodels.formula.api as smf
        import fedstat as fs
        from fedstat.kernels.glm.distributions import Robit
        table = fs.datasets.make_hospitals()[["hospital", "num", "age", "sex"]].dropna()
        table["ill"] = (table["num"] > 0).astype(float)
        family = sm.families.Binomial(link=Robit())
        partition = fs.ClientPartition.from_frame(table, by="hospital")
        fit = fs.FederatedGLM.from_formula("ill ~ age + sex", partition, family=family).fit()
        pooled = smf.glm("ill ~ age + sex", table, family=family).fit(tol=1e-12)
        np.testing.assert_allclose(fit.params, pooled.params, rtol=1e-6)
        """,
    )


@pytest.mark.example
def test_a_new_penalty_has_the_minimum_of_its_definition(copy):
    run(
        copy,
        """
        import numpy as np
        from fedstat.kernels.penalized.penalties import (
            FORMS, CappedLasso, CoefficientGroups, Penalty, slope_of, threshold_of, value_of
        )
        penalty, grid, kind = Penalty("capped"), np.linspace(0.0, 12.0, 120_001), FORMS.index(CappedLasso)
        terms = penalty.at(0.7, CoefficientGroups.single(3))
        assert terms.kind == kind and penalty.shape == 3.0
        for u in (0.0, 0.5, 1.9, 2.4, 3.0, 8.0):
            for w, v in ((1.0, 1.0), (2.0, 1.3), (0.0, 0.8)):
                found = threshold_of(kind, 3.0, 0.7, w, v, u)
                cost = v * grid**2 / 2 - u * grid + w * np.minimum(0.7 * grid, 3.0 * 0.49)
                at_found = v * found**2 / 2 - u * found + w * value_of(kind, 3.0, 0.7, found)
                assert at_found <= cost.min() + 1e-9
        assert slope_of(kind, 3.0, 0.7, 2.0) == 0.7 and slope_of(kind, 3.0, 0.7, 2.2) == 0.0
        level = penalty.level_of_slope(np.array([1.0, 3.0]), np.array([0.5, 0.5]))
        np.testing.assert_allclose(level, [0.5, 1.0])
        """,
    )


@pytest.mark.example
def test_a_new_rule_is_in_the_file_the_comparison_the_table_and_the_checks(copy):
    run(
        copy,
        """
        import numpy as np, pandas as pd
        import fedstat as fs
        from fedstat.federation.disclosure.checks import AFTER
        from fedstat.federation.disclosure.facts import EntityCount
        from fedstat.federation.disclosure.site import FAMILIES, Site
        from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
        policy = fs.Policy(max_arrays=1)
        assert "# Most arrays in one reply.\\nmax_arrays = 1" in policy.to_toml()
        assert fs.Policy.strict().max_arrays == 40
        assert "max_arrays" in fs.Policy().looser_than_strict()
        assert "max_arrays" not in fs.Policy(max_arrays=40).looser_than_strict()
        assert "More numbers with each request." in str(fs.threats(fs.Policy.strict(max_arrays=41)))
        try:
            fs.Policy(max_arrays=0)
        except fs.errors.PartitionError as error:
            assert "max_arrays" in str(error)
        else:
            raise AssertionError
        def three(data, state):
            state.report(EntityCount(20))
            return {name: np.array(1.0) for name in "abc"}
        gives = {name: ArrayDeclaration("aggregate", "sum", 0, behind=(EntityCount,)) for name in "abc"}
        FAMILIES["toy"] = {"three": Step(three, {}, gives)}
        request, table = pack_request(Request("A", "toy", "three", {}, "s")), pd.DataFrame({"x": range(20)})
        assert len(unpack_reply(Site("A", table, fs.Policy(max_arrays=3)).answer(request)).arrays) == 3
        try:
            Site("A", table, fs.Policy(max_arrays=2)).answer(request)
        except fs.errors.PolicyError as error:
            assert (error.rule, error.site) == ("maximum arrays", "A")
        else:
            raise AssertionError
        order = [check.__name__ for check in AFTER]
        assert order.index("check_array_count") == order.index("charge_noise") - 1
        """,
    )


@pytest.mark.example
def test_a_new_note_is_printed_and_its_remedy_executed(copy):
    run(
        copy,
        """
        import sys
        sys.path.insert(0, "tests")
        from contracts.remedies import SITUATIONS, executed
        from fedstat.models.glm.notes import NOTES
        found = executed(len(SITUATIONS) - 1)
        assert found.call == "fit(method='firth')" and found.forms[0] == (NOTES, "few_rows")
        assert NOTES["few_rows"].severity == "warning"
        assert "few_rows" not in set(found.after.diagnostics()["kind"])
        """,
    )


@pytest.mark.example
def test_a_new_source_is_read_by_sites_and_partitions(copy):
    run(
        copy,
        """
        import pandas as pd
        import fedstat as fs
        from fedstat.federation.tables.sources import Source, kind_of_file, open_source
        table = pd.DataFrame({"y": [1.5, 2.0, 3.5, 4.0] * 5, "x": [0, 1, 2, 4] * 5})
        for name in "AB":
            table.to_json(f"{name}.jsonl", orient="records", lines=True)
        assert kind_of_file("A.jsonl") == "json lines"
        described = {"kind": "json lines", "path": "A.jsonl"}
        opened = open_source(Source.from_mapping("A", {**described, "schema": {"y": "numbers"}}))
        pd.testing.assert_frame_equal(pd.concat(opened.chunks(["y", "x"])), table, check_dtype=False)
        try:
            open_source(Source.from_mapping("A", {**described, "schema": {"y": "whole numbers"}}))
        except fs.errors.PartitionError as error:
            assert "expected whole numbers, found numbers" in str(error)
        else:
            raise AssertionError
        partition = fs.ClientPartition.from_files({"A": "A.jsonl", "B": "B.jsonl"}, layout="horizontal")
        assert fs.FederatedOLS.from_formula("y ~ x", partition).fit().nobs == 40
        """,
    )


@pytest.mark.example
def test_a_new_family_fits_as_it_is_written(tmp_path):
    for part in ("fedstat", "docs/api"):
        copy_folder(part, tmp_path)
    ((command, name),) = re.findall(
        r"^python -m ([\w.]+) (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    subprocess.run([sys.executable, "-m", command, name, "--root", str(tmp_path)], check=True, timeout=300)
    run(
        tmp_path,
        """
        import numpy as np, statsmodels.api as sm, statsmodels.formula.api as smf
        import fedstat as fs
        table = fs.datasets.make_hospitals()[["hospital", "num", "age"]].dropna()
        partition = fs.ClientPartition.from_frame(table, by="hospital")
        fit = fs.PoissonNewton.from_formula("num ~ age", partition).fit()
        pooled = smf.glm("num ~ age", table, family=sm.families.Poisson()).fit()
        np.testing.assert_allclose(fit.params, pooled.params, rtol=1e-6)
        assert isinstance(fit, fs.results.PoissonNewtonResults) and "age" in str(fit.summary())
        """,
    )


def test_the_picture_is_that_of_the_imports(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    rooms = importlib.import_module("building.rooms")
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.picture(), "run: python docs/building/rooms.py"


def test_the_picture_leaves_out_what_follows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    rooms = importlib.import_module("building.rooms")
    links = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": {"c"}}
    assert rooms.reduced(links) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": {"c"}}
    assert rooms.rows(links) == [["a"], ["b", "d"], ["c"]]


def test_the_layout_names_what_there_is():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (layout,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    stack, found = [], []
    for line in layout.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 4, line.split()[0]
        stack = [*stack[:depth], name]
        found.append("".join(stack))
    assert not [path for path in found if not (ROOT / path).exists()]
    folders = {f"fedstat/{path.parent.name}/" for path in (ROOT / "fedstat").glob("*/__init__.py")}
    assert folders - set(found) <= {"fedstat/data/"}


def test_commands_and_paths_of_the_page_exist():
    text = PAGE.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:tests|docs|fedstat|\.ci|vignettes)/?[\w/.-]*)`", text)
    assert len(paths) > 15 and not [path for path in paths if not (ROOT / path).exists()]
