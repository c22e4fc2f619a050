"""The template of a family passes every check of the project as it is generated."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedstat.template.__main__ import (
    class_name,
    family_files,
    insert_line,
    make_pages,
    sort_imports,
    write_family,
)

ROOT = Path(__file__).parents[1]
NAME = "poisson_newton"
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
TREE = ("fedstat", "docs", "data", "vignettes", "pyproject.toml", "setup.cfg", *DOCUMENTS)
TESTS = (
    "conftest.py",
    "public_api.py",
    "seeded_secrets.py",
    "test_documentation.py",
    "test_examples.py",
    "test_layers.py",
    "test_public_names.py",
)
WRITTEN = shutil.ignore_patterns("*.pyc.*", "*.tmp.*", "_build", "generated", "vignettes")
"""What tests and the documentation may be writing: such files can disappear while they are copied."""
NAMES = ["ab", NAME, "a23456789012345678"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree with families from the template, of short and long names."""
    root = tmp_path_factory.mktemp("tree")
    for name in (*TREE, *(f"tests/{name}" for name in TESTS)):
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=WRITTEN)
        else:
            shutil.copy2(source, target)
    for name in NAMES:
        write_family(name, root)
    return root


def run(tree, *command):
    """Run a command in the copy, with its package."""
    found = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]


@pytest.mark.example
def test_tests_of_the_family_pass(tree):
    run(tree, "-m", "pytest", f"tests/models/{NAME}", "tests/test_layers.py", "-q", "-n", "0")


def test_the_files_are_formatted_and_without_lint(tree):
    pytest.importorskip("ruff")
    public = ("fedstat/models/__init__.py", "fedstat/__init__.py", "fedstat/results.pyi")
    files = [*public, *(file for name in NAMES for file in family_files(name))]
    run(tree, "-m", "ruff", "check", *files)
    run(tree, "-m", "ruff", "format", "--check", *files)


@pytest.mark.parametrize(
    "page, line", [("models", "fedstat.{}\n"), ("results", "fedstat.results.{}Results\n")]
)
def test_the_reference_lists_a_family_among_those_for_different_rows(tree, page, line):
    text = (tree / "docs" / "api" / f"{page}.rst").read_text(encoding="utf-8")
    rows, columns = (
        text.index("Sites with different rows"),
        text.index("Sites with different columns"),
    )
    for name in NAMES:
        assert rows < text.index(line.format(class_name(name))) < columns


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("mypy", "--cache-dir", str(ROOT / ".mypy_cache")),
        ("pytest", "tests/test_public_names.py", "tests/test_documentation.py", "-q", "-n", "0"),
        ("pytest", "tests/test_examples.py", "-q", "-n", "0", "-m", "", "-k", f"{class_name(NAME)} or every"),
    ],
    ids=["types", "names and reference", "examples"],
)
def test_the_checks_of_the_project_pass(tree, command):
    pytest.importorskip(command[0])
    run(tree, "-m", *command)


def test_a_vignette_shows_the_files_as_they_are_generated():
    text = (ROOT / "vignettes" / "adding-a-family.md").read_text(encoding="utf-8")
    for path, content in family_files(NAME).items():
        assert f"```py\n{content}```" in text, path


@pytest.mark.example
def test_the_picture_of_the_architecture_has_the_family(tmp_path):
    shutil.copytree(ROOT / "fedstat", tmp_path / "fedstat", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("building", "_static", "api"):
        shutil.copytree(ROOT / "docs" / folder, tmp_path / "docs" / folder, ignore=WRITTEN)
    write_family("another", tmp_path)
    make_pages(tmp_path)
    assert ">another<" in (tmp_path / "docs" / "_static" / "rooms.svg").read_text(encoding="utf-8")


def test_lines_are_inserted_in_order():
    text = "from fedstat.a import A\nfrom fedstat.c import (\n    C,\n)\nimport os\n"
    assert sort_imports(text) == text
    assert sort_imports("from fedstat.b import B\n" + text) == (
        "from fedstat.a import A\nfrom fedstat.b import B\nfrom fedstat.c import (\n    C,\n)\nimport os\n"
    )
    assert insert_line("# a\nb\nd\n# e\n", "c", "[a-z]") == "# a\nb\nc\nd\n# e\n"
    assert insert_line("# a\nb\nd\n# e\n", "f", "[a-z]") == "# a\nb\nd\nf\n# e\n"


@pytest.mark.parametrize("name", ["Poisson", "1st", "a" * 19, "two words", "glm", "../x"])
def test_a_name_that_cannot_be_used_is_refused(name, tmp_path):
    (tmp_path / "fedstat" / "models" / "glm").mkdir(parents=True)
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        write_family(name, tmp_path)
    assert not (tmp_path / "docs").exists()
