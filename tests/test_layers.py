"""The order of the rooms: who may import whom, and what may lie about."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedstat"
BASE = {"errors", "typing"}
MAY_IMPORT = {
    "errors": set(),
    "typing": {"errors"},
    "datasets": BASE,
    "kernels": BASE,
    "privacy": BASE | {"kernels"},
    "federation": BASE | {"kernels", "privacy"},
    "inference": BASE | {"kernels", "privacy"},
    "models": BASE | {"kernels", "privacy", "federation", "inference"},
    "operator": BASE | {"privacy", "federation"},
}
FAMILY_FILES = {"steps.py", "protocol.py", "model.py", "results.py"}
ONLY_IN = {"numba": "kernels"}
OPTIONAL = {"matplotlib", "pyarrow", "polars", "torch", "nvflare", "IPython", "sqlalchemy", "duckdb"}
BANNED_NAMES = {"utils.py", "helpers.py", "misc.py", "common.py"}


def files():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts]


def families():
    return {
        path.name for path in (PACKAGE / "models").iterdir() if path.is_dir() and path.name[0] not in "_."
    }


def address(path):
    """The file as (room, part of the room, ...): ("models", "vfem", "steps")."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(node, package):
    """Dotted names that an import statement may bring in; ``from a import b`` counts as a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else ()
        source = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{source}.{alias.name}" for alias in node.names]
    return []


def inside_functions(tree):
    return {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }


def complaints(source, where, is_package=False, known_families=frozenset()):
    """What is wrong with the imports of one file at address ``where``."""
    tree = ast.parse(source)
    package = ("fedstat", *where) if is_package else ("fedstat", *where[:-1])
    inner = inside_functions(tree)
    found = []
    for node in ast.walk(tree):
        for name in imported(node, package):
            found += complaint_about(name, where, known_families)
            if id(node) in inner and name.split(".")[0] not in OPTIONAL:
                found.append(f"line {node.lineno}: imports {name} inside a function")
    return found


def complaint_about(name, where, known_families):
    top, *rest = name.split(".")
    room = where[0]
    if top in ONLY_IN and room != ONLY_IN[top]:
        return [f"{top} belongs to {ONLY_IN[top]}/"]
    if top != "fedstat":
        return []
    target = rest[0] if rest else None
    if target != room and target not in MAY_IMPORT[room]:
        return [f"{room} may not import {name}"]
    own = where[1] if room == "models" and len(where) > 1 else None
    if own and target == "models" and len(rest) > 1 and rest[1] in known_families - {own}:
        return [f"models/{own} may not import family {rest[1]}"]
    return []


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_respect_the_rooms(path):
    if not address(path):
        pytest.skip("the front door may import everything")
    found = complaints(path.read_text(), address(path), path.name == "__init__.py", families())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "where, source",
    [
        (("kernels", "vfem"), "from fedstat.models.vfem import steps"),
        (("kernels", "vfem"), "import fedstat.federation.site"),
        (("kernels", "vfem"), "from fedstat import federation"),
        (("kernels", "vfem"), "from ..federation import site"),
        (("inference", "results"), "from fedstat.federation.ledger import Ledger"),
        (("federation", "site"), "import fedstat"),
        (("federation", "site"), "from fedstat import VFEMRegression"),
        (("datasets", "sme"), "from fedstat.kernels import sums"),
        (("models", "vfem", "steps"), "from fedstat.datasets import make_sme"),
        (("models", "vfem", "steps"), "from fedstat.models.glm import steps"),
        (("models", "vfem", "steps"), "from fedstat.models import glm"),
        (("models", "vfem", "steps"), "from ..glm.steps import score"),
        (("models", "base"), "from fedstat.models.glm import steps"),
        (("models", "vfem", "steps"), "from numba import njit"),
        (("federation", "site"), "import numba as nb"),
        (("federation", "site"), "def f():\n    from fedstat.errors import PolicyError"),
        (("federation", "site"), "class A:\n    def f(self):\n        import json"),
    ],
)
def test_a_wrong_import_is_noticed(where, source):
    assert complaints(source, where, known_families={"vfem", "glm"})


@pytest.mark.parametrize(
    "where, source",
    [
        (("kernels", "vfem"), "from numba import njit\nfrom fedstat.typing import Floats"),
        (("models", "vfem", "model"), "from fedstat.models.base import Model\nfrom . import steps"),
        (("models", "vfem", "model"), "from fedstat.models.vfem.steps import STEPS"),
        (("models", "vfem", "model"), "from fedstat.federation import site\nimport numpy as np"),
        (("inference", "plots"), "def plot():\n    import matplotlib.pyplot as plt"),
    ],
)
def test_a_right_import_passes(where, source):
    assert not complaints(source, where, known_families={"vfem", "glm"})


def test_every_room_is_known():
    rooms = {address(path)[0] for path in files() if address(path)}
    assert rooms <= set(MAY_IMPORT)


def test_every_family_has_the_same_files():
    for family in families():
        assert {path.name for path in (PACKAGE / "models" / family).glob("*.py")} >= FAMILY_FILES, family


def test_no_drawer_for_odds_and_ends():
    assert not [path for path in files() if path.name in BANNED_NAMES]


def test_no_empty_module():
    empty = [
        path for path in files() if path.name != "__init__.py" and not ast.parse(path.read_text()).body[1:]
    ]
    assert not empty


def test_every_package_is_installed():
    """A folder that setup.cfg does not name is missing from the wheel."""
    declared = (PACKAGE.parent / "setup.cfg").read_text().split()
    folders = {".".join(("fedstat", *address(path))) for path in files() if path.name == "__init__.py"}
    assert folders <= set(declared)
