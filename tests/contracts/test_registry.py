"""The registry of families is complete, and the page of contracts is current."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from contracts.families import FAMILIES, FITS, MADE, result
from contracts.over_families import CONTRACTS, over_families

import fedstat as fs

ROOT = Path(__file__).parents[2]
OTHER = {
    "Bounds": "public ranges of columns",
    "Budget": "a privacy budget",
    "ClientPartition": "the sites and their data",
    "Curve": "a column of curves",
    "Iteration": "options of VFEMRegression",
    "LongCurve": "a column of curves",
    "Policy": "rules of a site",
    "PublicCurve": "a basis for FedFunctionBoost",
    "asinh": "a public range",
    "audit": "attacks on a release; its golden file is in FITS",
    "curves": "a module",
    "datasets": "a module",
    "errors": "a module",
    "explain_impute": "a dry run",
    "explain_table": "a dry run",
    "levels": "a public range",
    "load": "reads saved results",
    "log": "a public range",
    "progress": "a progress line",
    "rehearse": "makes a partition of invented rows",
    "results": "a module",
    "threats": "a table of a policy",
    "verify_receipt": "checks signatures",
    "__version__": "a text",
}
"""Public names that are no model or analysis, with what they are."""
UNPRINTED = {"Results", "CoefficientResults"}


def test_every_public_name_is_in_the_registry_or_is_no_family():
    assert set(fs.__all__) == set(FAMILIES) | set(OTHER)


def test_every_family_has_its_fits():
    for family in FAMILIES.values():
        assert FITS[family.fit].family == family.name


def test_every_gap_is_of_a_contract_and_has_a_reason():
    for family in FAMILIES.values():
        assert set(family.gaps) <= set(CONTRACTS), family
        assert all(len(reason) > 10 for reason in family.gaps.values()), family


def test_every_contract_has_a_test():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = re.findall(r'@over_families\("([^"]+)"\)', text)
    assert sorted(set(tested)) == sorted(CONTRACTS)


def test_every_results_class_has_a_golden_file():
    kinds = {name for name in fs.results.__all__ if hasattr(getattr(fs.results, name), "summary")}
    made = {type(result(name)).__name__ for name in [*FITS, *MADE]}
    assert kinds - made == UNPRINTED
    assert inspect.isclass(fs.results.Results)


def test_the_page_of_contracts_is_current():
    sys.path.insert(0, str(ROOT / "docs"))
    from building.contracts_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/building/contracts_page.py"


@over_families("documented")
def test_a_page_has_the_family(family):
    pages = [ROOT / "README.md", ROOT / "docs" / "choosing.md", *sorted((ROOT / "vignettes").glob("*.md"))]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    assert any(re.search(rf"`(fs\.)?{family.name}\b", text) for text in texts[:2]), (
        "README.md, docs/choosing.md"
    )
    examples = [getattr(fs, family.name).__doc__, *texts[2:]]
    assert any(f"fs.{family.name}" in text for text in examples), "no example in a docstring or vignette"
