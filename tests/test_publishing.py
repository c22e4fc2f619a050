"""Files for publication agree with setup.cfg, which alone decides names, addresses and requirements."""

import configparser
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONFIG = configparser.ConfigParser(interpolation=None)
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
METADATA = CONFIG["metadata"]
PUBLISHED = [
    ROOT / name
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "conda/meta.yaml", "paper/paper.md")
] + sorted((ROOT / ".github").rglob("*.*"))


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


def recipe():
    text = (ROOT / "conda" / "meta.yaml").read_text(encoding="utf-8")
    text = re.sub(r"^{%.*?%}$", "", text, flags=re.MULTILINE)
    return yaml.safe_load(text.replace("{{ version }}", "0").replace("{{ PYTHON }}", "python"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: str(path.relative_to(ROOT)))
def test_addresses_are_those_of_the_metadata(path):
    text = path.read_text(encoding="utf-8")
    for address in re.findall(r"https://example\.org[^\s)\"]*", text):
        assert address.startswith(METADATA["url"]), address
    assert set(re.findall(r"[\w.-]+@example\.org", text)) <= {METADATA["author_email"]}


def test_the_conda_recipe_requires_what_the_package_requires():
    made, options = recipe(), CONFIG["options"]
    python = f"python {options['python_requires']}"
    required = [re.sub(r"(?=>=)", " ", line) for line in lines(options["install_requires"])]
    assert made["requirements"]["run"] == [python, *required]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert made["requirements"]["host"] == [python, "pip", *(re.sub(r"(?=>=)", " ", line) for line in build)]
    assert made["build"]["entry_points"] == lines(CONFIG["options.entry_points"]["console_scripts"])
    about = made["about"]
    assert about["license"] == METADATA["license"] and about["summary"] == METADATA["description"]


def test_the_citation_has_the_required_fields():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert [one["name"] for one in citation["authors"]] == [METADATA["author"]]
    assert citation["license"] == METADATA["license"] and citation["repository-code"] == METADATA["url"]


def test_workflows_run_the_checks_on_every_version_of_python():
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))["jobs"][
        "checks"
    ]
    supported = re.findall(r"Python :: (3\.\d+)", METADATA["classifiers"])
    assert checks["strategy"]["matrix"]["python"] == supported
    assert checks["steps"][-1]["run"] == ".ci/run"


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_commands_of_workflows_exist(path):
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    for command in re.findall(r"(?<=run: )\.ci/\w+", text):
        assert (ROOT / command).stat().st_mode & 0o100


def test_the_paper_has_its_figures_and_references():
    paper = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^@\w+\{(\w+),", (ROOT / "paper" / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(set(re.findall(r"\[@(\w+)\]", paper))) == sorted(listed)
    figures = re.findall(r"^!\[[^]]*\]\((\w+\.png)\)", paper, re.MULTILINE)
    assert figures == ["forest.png", "estimates.png"]
    assert all((ROOT / "paper" / name).exists() for name in figures)
