"""Every vignette runs, and the assertions in its hidden cells hold.

Tests that execute vignettes are marked ``vignette`` and run on their own. Other tests read the code without
running it and check that the public names in it exist.
"""

import ast
import importlib
import importlib.util
import os
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "vignettes"

NAMES = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
ON_EITHER_DATA = {
    "a-budget-for-hospitals",
    "a-first-table",
    "averages-over-people",
    "clusters-over-institutions",
    "curves-across-hospitals",
    "diabetes-in-a-survey",
    "four-hospitals",
    "getting-started",
    "networks-over-missing-blocks",
}
"""Vignettes on recorded data if these are at hand, and on simulated data otherwise."""
TESTED_BELOW = ON_EITHER_DATA | {
    "effects-of-a-treatment",
    "engineering-and-statistical",
    "four-hospitals-methods",
    "sme-profit",
    "three-institutions-over-flare",
}
"""Vignettes that need more than one run, a package, or a check of what they print."""

SEEDED = """
import sys
sys.path.append({tests!r})
from seeded_secrets import SECRETS, draw_from_seeds
draw_from_seeds()
SECRETS.seed({name!r})
"""
"""First cell of a test run: it fixes the noise of a release, so that claims about it hold in every run."""


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("vignettes_render", FOLDER / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(render, name):
    """Execute a vignette with its hidden cells, and keep what a page shows."""
    notebook = render.read(name, hidden=True)
    assert sum(cell.cell_type == "code" for cell in notebook.cells) > 5
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SEEDED.format(tests=str(ROOT / "tests"), name=name)))
    executed = render.without_hidden(render.execute(notebook))
    executed.cells = executed.cells[1:]
    if "FEDSTAT_NOTEBOOKS" in os.environ:
        render.keep(name, executed)
    return executed


def streams(notebook, name):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [o.text for o in outputs if o.output_type == "stream" and o.name == name]


def complaints(notebook):
    """What the code of a notebook wrote to standard error: warnings, mostly."""
    return streams(notebook, "stderr")


def drawing(notebook):
    """Cells that draw a picture."""
    shows = re.compile(r"^(?:ax = .*\.plot[_(.]|plt\.show)", re.MULTILINE)
    return [cell for cell in notebook.cells if cell.cell_type == "code" and shows.search(cell.source)]


def check_page(name, notebook):
    """Return what the notebook shows, which has every figure and no warning."""
    assert complaints(notebook) == []
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert figures == len(drawing(notebook))
    page = nbformat.writes(notebook)
    assert "Traceback" not in page
    assert str(ROOT) not in page
    return str(outputs)


@pytest.fixture(params=["RECORDED", "SIMULATED"])
def data(request, monkeypatch, tmp_path):
    """Which data a vignette finds: real ones, which its page shows, or none, so that it simulates."""
    try:
        folder = request.getfixturevalue("shared_data")
    except pytest.skip.Exception:
        if request.param == "RECORDED":
            raise
        folder = tmp_path
    else:
        if request.param == "SIMULATED":
            folder = tmp_path
            monkeypatch.delenv("FEDSTAT_NOTEBOOKS", raising=False)
    monkeypatch.setenv("FEDSTAT_TEST_DATA", str(folder))
    return request.param


@pytest.mark.vignette
@pytest.mark.parametrize("name", sorted(NAMES - TESTED_BELOW))
def test_runs_and_keeps_its_word(render, name):
    check_page(name, run(render, name))


@pytest.mark.vignette
def test_effects_of_a_treatment(render):
    pytest.importorskip("causaldata", reason="needs causaldata, which has the recorded tables")
    name = "effects-of-a-treatment"
    check_page(name, run(render, name))


@pytest.mark.vignette
def test_three_sites_over_flare(render):
    pytest.importorskip("nvflare", reason="needs fedstat[flare]")
    name = "three-institutions-over-flare"
    check_page(name, run(render, name))


@pytest.mark.vignette
def test_engineering_and_statistical_on_either_data(render, data):
    name = "engineering-and-statistical"
    page = check_page(name, run(render, name))
    assert ("the tolerance of the solver" in page) == (data == "RECORDED")


@pytest.mark.vignette
@pytest.mark.parametrize("name", sorted(ON_EITHER_DATA))
def test_one_analysis_on_either_data(render, name, data):
    notebook = run(render, name)
    check_page(name, notebook)
    assert streams(notebook, "stdout")[0].startswith(f"{data} DATA")


REFUSALS = (
    r"PolicyError: Cleveland: .*\(minimum rows per level\)",
    r"PolicyError: Hungary: .*\(differencing\)",
    r"PolicyError: Switzerland: .*\(maximum parameters per row\)",
    r"PolicyError: Switzerland: .*\(minimum events\)",
    r"PolicyError: Cleveland: .*\(masked only\)",
    r"PolicyError: Long Beach: .*\(differencing\)",
    r"DesignError: .*Switzerland.* has no row",
    r"PolicyError: Hungary: .*\(minimum count\)",
)


@pytest.mark.vignette
def test_four_hospitals_on_either_data(render, data):
    notebook = run(render, "four-hospitals-methods")
    assert os.environ["FEDSTAT_TEST_DATA"] not in check_page("four-hospitals-methods", notebook)
    printed = streams(notebook, "stdout")
    assert printed[0].startswith(f"{data} DATA")
    refusals = re.findall(r"^\w+Error: .*", "".join(printed), re.MULTILINE)
    assert len(refusals) == len(REFUSALS)
    for expected, refusal in zip(REFUSALS, refusals, strict=True):
        assert re.match(expected, refusal)


@pytest.mark.vignette
def test_sme_profit_in_its_reduced_form(render, monkeypatch):
    monkeypatch.setenv("FEDSTAT_VIGNETTE_FAST", "1")
    assert complaints(run(render, "sme-profit")) == []


@pytest.mark.slow
def test_sme_profit_in_full(render, monkeypatch):
    monkeypatch.delenv("FEDSTAT_VIGNETTE_FAST", raising=False)
    notebook = run(render, "sme-profit")
    assert complaints(notebook) == []


MADE_ON_THE_PAGE = {"fedstat.models.poisson_newton", "PoissonNewton"}


def source(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def cells(text):
    """Code of the cells."""
    return re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def names_of_fedstat(tree):
    """Chains of names that begin with ``fs.``, and what is imported from the package."""
    for node in ast.walk(tree):
        chain = []
        while isinstance(node, ast.Attribute):
            chain.insert(0, node.attr)
            node = node.value
        if chain and isinstance(node, ast.Name) and node.id == "fs":
            yield "fedstat", chain
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "fedstat":
            yield from ((node.module, [alias.name]) for alias in node.names)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_pictures_have_alternative_texts(render, name):
    for cell in drawing(render.read(name)):
        assert len(cell.metadata.get("alt", "").split()) > 5, cell.source


@pytest.mark.parametrize("name", sorted(NAMES))
def test_code_can_be_read_and_its_names_exist(name):
    for code in cells(source(name)):
        for module, chain in names_of_fedstat(ast.parse(code)):
            if MADE_ON_THE_PAGE & {module.rpartition(".")[0], chain[0]}:
                continue
            value = importlib.import_module(module)
            for attribute in chain:
                value = getattr(value, attribute)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_hidden_cells_check_the_text(render, name):
    cells = [cell for cell in render.read(name, hidden=True).cells if render.is_hidden(cell)]
    statements = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    assert any(isinstance(node, ast.Assert) for node in statements)
    shown = render.read(name).cells
    assert not any(cell in shown for cell in cells)


def first_cell(text):
    return cells(text)[0]


def test_six_sites_begins_with_an_example_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert first_cell(source("six-institutions")) == cells(readme)[1]


def test_list_of_vignettes_is_complete():
    listed = re.findall(r"^\| `([\w-]+)\.md`", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)
