"""Pages and their links: every public name has a place in the reference, every vignette one in the index."""

import dataclasses
import importlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import pandas as pd
import pytest

import fedstat as fs
from fedstat.operator.site_status import SiteStatus

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "vignettes").glob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page):
    """Text of a page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page):
    """Names of headings, as the site and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page, link):
    address = urlsplit(link)
    if address.scheme:
        return address.scheme == "https" and "." in address.netloc
    target = page if not address.path else page.parent / address.path
    return target.exists() and (not address.fragment or address.fragment in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert [link for link in LINK.findall(prose(page)) if not leads_somewhere(page, link)] == []


SHOWN = [page for page in PAGES if page.parent != DOCS and page != ROOT / "vignettes" / "README.md"]


@pytest.mark.parametrize("source", SHOWN, ids=lambda page: page.stem)
def test_links_of_sources_lead_to_pages_of_the_site(source, monkeypatch):
    for package in ("sphinx", "jupytext", "nbclient"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(DOCS)
    building = importlib.import_module("building.vignettes")
    text, page = prose(source), building.page_of(source)
    if source.name == "README.md":  # its table is a part of the first page
        text, page = building.section(text, "Which model for which data"), DOCS / "index.md"
    pages = {building.page_of(one) for one in [*DOCS.rglob("*.*"), *SHOWN]}
    links = [urlsplit(link) for link in LINK.findall(building.to_page(text, source, page))]
    paths = [link.path for link in links if link.path and not link.scheme]
    assert [path for path in paths if (page.parent / path).resolve() not in pages] == []


def entries():
    """Names in the lists of the reference."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.rst"))
    return set(re.findall(r"^   (fedstat\.[\w.]+)$", text, re.MULTILINE))


def test_reference_has_every_public_name():
    listed = entries()
    modules = {"curves": fs.curves, "datasets": fs.datasets, "results": fs.results}
    public = {f"fedstat.{name}" for name in fs.__all__} - {"fedstat.__version__", "fedstat.errors"}
    public -= {f"fedstat.{name}" for name in modules}
    public |= {f"fedstat.{name}.{one}" for name, module in modules.items() for one in module.__all__}
    assert public - listed == set()


def test_index_has_every_vignette():
    listed = re.findall(r"^vignettes/([\w-]+)\.ipynb: ", (DOCS / "questions.md").read_text(), re.MULTILINE)
    vignettes = [path.stem for path in (ROOT / "vignettes").glob("*.md") if path.stem != "README"]
    assert sorted(listed) == sorted(vignettes)


def test_first_page_shows_what_its_example_prints(capsys):
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    exec(compile(code, "first page", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_a_page_that_asks_another_host_or_hides_a_picture_is_found(tmp_path, monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(DOCS)
    offline = importlib.import_module("building.offline")
    pages = {
        "good.html": '<script src="_static/a.js"></script><img src="a.png" alt="A path"><a href="https://x.org">',
        "script.html": '<script defer src="https://cdn.example.org/a.js"></script>',
        "font.html": '<link rel="stylesheet" href="//fonts.example.org/a.css">',
        "picture.html": '<img src="a.png" alt="">',
        "style.css": "@import url(https://fonts.example.org/a.css);",
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = {name: offline.faults(tmp_path / name) for name in pages}
    assert found.pop("good.html") == [] and all(len(faults) == 1 for faults in found.values())


def test_the_page_on_running_a_site_names_every_key_of_its_status():
    named = re.findall(r"`(\w+)`", (DOCS / "running.md").read_text(encoding="utf-8"))
    assert {one.name for one in dataclasses.fields(SiteStatus)} <= set(named)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_public_names_on_pages_exist(page):
    named = set(re.findall(r"\bfs\.(\w+)", page.read_text(encoding="utf-8")))
    assert [name for name in named if not hasattr(fs, name)] == []


def test_evidence_names_tests_that_exist():
    for line in (DOCS / "evidence.md").read_text(encoding="utf-8").splitlines():
        first = re.search(r"`([\w/]+/)test_\w+\.py`", line)
        for name in re.findall(r"`((?:[\w/]+/)?test_\w+\.py)`", line):
            path = ROOT / "tests" / (name if "/" in name else f"{first[1]}{name}")
            assert path.exists(), path


def coverages():
    """Recorded coverage by the first words of its row on the page of evidence."""

    def read(name, query, column="coverage"):
        return pd.read_csv(ROOT / "tests" / "benchmarks" / "results" / f"{name}.csv").query(query)[column]

    conformal = pd.read_csv(ROOT / "tests" / "benchmarks" / "results" / "laser_conformal.csv")
    by_set = conformal.query("calibrate >= 200").groupby(["exchange", "clients"])["set: coverage"].mean()
    return {
        "`GLORE`": read(
            "flb", "method == 'GLORE' and target == 'all' and sample == 'all' and setting != 'III'"
        ),
        '`VFEMRegression`, `between="independent"`': read("coverage", "method == 'vfem'"),
        "`VFEMRegression`, default": read("vfem_blocks", "method == 'free'"),
        "`VFEMGLM`, binary, default": read("vfem_glm_blocks", "method == 'free'"),
        "`VerticalGLM`, debiased": read("vglm_coverage", "inference == 'debiased'"),
        "`FedFunctionBoost`, refit": read(
            "boost_coverage", "measure.str.startswith('refit') and measure.str.endswith('pointwise')", "mean"
        ),
        "`M2SEM`, profiles and differences": read(
            "m2sem_coverage", "interval in ['profiles', 'differences']"
        ),
        "`PrivateCopulaGLM`": read("private_glm_coverage_moments", "epsilon < 5", "cover"),
        "`LASER`, sets of classes at 90 %": by_set,
    }


@pytest.mark.parametrize("model", coverages())
def test_evidence_has_the_recorded_coverage(model):
    text = (DOCS / "evidence.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {model} | ") and line.count("|") == 7]
    shown = [float(cell) for cell in row.split("|")[4:7]]
    recorded = coverages()[model]
    assert shown == pytest.approx([recorded.min(), recorded.mean(), recorded.max()], abs=0.00051)


def test_the_dissertation_is_cited_by_its_title():
    """Each mention of the university is next to the title."""
    title = "Statistical machine learning and data fusion methodologies: applications in healthcare"
    for path in [*PAGES, *(ROOT / "fedstat").rglob("*.py"), *(ROOT / "tests").rglob("*_simulation.py")]:
        text = " ".join(path.read_text(encoding="utf-8").split())
        assert text.count("Binghamton") == len(re.findall(f"{re.escape(title)}.{{0,60}}Binghamton", text)), (
            path
        )
