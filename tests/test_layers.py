"""The order of the rooms: who may import whom, and what may lie about."""

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from fedstat.models import INSTALLED

PACKAGE = Path(__file__).parents[1] / "fedstat"
FOUNDATION = ("errors", "typing", "codec", "docstrings", "spline_names", "plotting", "progress_line")
FEDERATION = (
    "message",
    "files",
    "state_formats",
    "crypto",
    "tables",
    "audit",
    "disclosure",
    "protocols",
    "design.formula",
    "design",
    "transport",
    "transport.flare",
    "dry_run",
    "partition",
)
"""The files and rooms of federation/: each imports from those before it."""
MODELS = ("", "vertical", "horizontal", "rows")
"""Shared parts of the families, in order: files of models/, then its folders; families come after them."""
MAY_IMPORT = {
    "errors": set(),
    "typing": {"errors"},
    "codec": {"errors", "typing"},
    "docstrings": set(),
    "spline_names": set(),
    "plotting": {"typing"},
    "progress_line": set(),
    "data": set(),
    "datasets": {*FOUNDATION, "data"},
    "kernels": {*FOUNDATION},
    "privacy": {*FOUNDATION, "kernels"},
    "federation": {*FOUNDATION, "kernels", "privacy"},
    "inference": {*FOUNDATION, "kernels", "privacy"},
    "models": {*FOUNDATION, "kernels", "privacy", "federation", "inference"},
    "results": {"federation", "inference", "models"},
    "operator": {*FOUNDATION, "kernels", "privacy", "federation"},
    "warm_up": {"kernels", "federation", "models", "datasets"},
    "flare_analysis": {"errors", "codec", "federation"},
    "template": set(),
}
BUILDS_ON = {
    "copula_glm": {"copula"},
    "boost": {"copula"},
    "impute": {"vfem", "glm", "categories"},
    "vfem": {"vglm"},
    "gee": {"glm"},
    "survival_effect": {"treatment", "descriptive"},
    "glm": {"copula"},
    "descriptive": {"copula"},
}
"""A family that makes something else of others' releases: this one may import those, and no other."""
FAMILY_FILES = {"steps.py", "protocol.py", "model.py", "results.py"}
ONLY_IN = {"numba": "kernels"}
DEFERRED = "scipy.optimize."
"""Imported where it is called: it would be a tenth of the time in which a site or a partition is imported."""
OPTIONAL = {
    "matplotlib",
    "pyarrow",
    "polars",
    "torch",
    "nvflare",
    "IPython",
    "sqlalchemy",
    "duckdb",
    "pymysql",
    "boto3",
    "jinja2",
    "botocore",
    "adbc_driver_postgresql",
    "skfda",
    "docx",
}
BANNED_NAMES = {"utils.py", "helpers.py", "misc.py", "common.py"}


def files():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts]


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_in(path):
    """Import statements of a file."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def families():
    return {family for family, classes in INSTALLED.items() if classes}


def address(path):
    """The file as (room, part of the room, ...): ("models", "vfem", "steps")."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {".".join(("fedstat", *address(path))): path for path in files()}


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
    """Faults in the imports of one file at address ``where``."""
    tree = ast.parse(source)
    package = ("fedstat", *where) if is_package else ("fedstat", *where[:-1])
    inner = inside_functions(tree)
    found = []
    for node in ast.walk(tree):
        for name in imported(node, package):
            found += complaint_about(name, where, known_families)
            if id(node) in inner and name.split(".")[0] not in OPTIONAL and not name.startswith(DEFERRED):
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
    if target == "federation" == room:
        return later(FEDERATION, place(FEDERATION, where[1:]), place(FEDERATION, rest[1:]), name)
    if target == "models" == room:
        return among_models(where[1:], rest[1:], name, known_families)
    return []


def place(order, parts):
    """The longest entry of ``order`` that an address begins with, or None."""
    starts = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((start for start in starts if start in order), None)


def later(order, own, other, name):
    if own is None or other is None or order.index(other) <= order.index(own):
        return []
    return [f"{own}/ comes before {other}/ and may not import {name}"]


def among_models(where, target, name, known_families):
    own, other = (parts[0] if parts else "" for parts in (where, target))
    if other in known_families and own != other and other not in BUILDS_ON.get(own, ()):
        return [f"models/{own} may not import family {other}"]
    if own in known_families:
        return []
    own, other = (part if part in MODELS else "" for part in (own, other))
    return later(MODELS, own, other, name)


@cache
def imports_of(module):
    """Modules of the package that a module imports, those for type checking included."""
    path = MODULES[module]
    where = address(path)
    package = ("fedstat", *where) if path.name == "__init__.py" else ("fedstat", *where[:-1])
    names = {name for node in imports_in(path) for name in imported(node, package)}
    found = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return {name for name in found if name in MODULES and name != module}


def circles(graph):
    """Groups of nodes that reach each other (Tarjan 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            cut = stack.index(node)
            found.append(sorted(stack[cut:]))
            del stack[cut:]

    for node in graph:
        if node not in index:
            visit(node)
    return [group for group in found if len(group) > 1]


def folder_of(module):
    path = MODULES[module]
    return str(path.parent.relative_to(PACKAGE)) if path.parent != PACKAGE else path.stem


def test_no_circle_of_files():
    assert not circles({module: imports_of(module) for module in MODULES})


def test_no_circle_of_folders():
    graph = {}
    for module in MODULES:
        graph.setdefault(folder_of(module), set()).update(map(folder_of, imports_of(module)))
    assert not circles(graph)


def test_a_circle_is_noticed():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "c"}}
    assert circles(graph) == [["b", "c"]]


def test_imports_respect_the_rooms():
    """Only the file of the package itself, whose address is empty, may import everything."""
    known = families()
    found = [
        f"{path.relative_to(PACKAGE)}: {fault}"
        for path in files()
        if address(path)
        for fault in complaints(path.read_text(), address(path), path.name == "__init__.py", known)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "where, source",
    [
        (("kernels", "vfem"), "from fedstat.models.vfem import steps"),
        (("kernels", "vfem"), "import fedstat.federation.disclosure.site"),
        (("kernels", "vfem"), "from fedstat import federation"),
        (("kernels", "vfem"), "from ..federation import site"),
        (("inference", "results"), "from fedstat.federation.audit.ledger import Ledger"),
        (("federation", "disclosure", "site"), "import fedstat"),
        (("federation", "disclosure", "site"), "from fedstat import VFEMRegression"),
        (("datasets", "sme"), "from fedstat.kernels import sums"),
        (("models", "vfem", "steps"), "from fedstat.datasets import make_sme"),
        (("models", "vfem", "steps"), "from fedstat.models.glm import steps"),
        (("models", "vfem", "steps"), "from fedstat.models import glm"),
        (("models", "vfem", "steps"), "from ..glm.steps import score"),
        (("models", "base"), "from fedstat.models.glm import steps"),
        (("models", "copula", "steps"), "from fedstat.models.copula_glm import steps"),
        (("models", "vfem", "steps"), "from numba import njit"),
        (("federation", "disclosure", "site"), "import numba as nb"),
        (("federation", "disclosure", "site"), "def f():\n    from fedstat.errors import PolicyError"),
        (("federation", "disclosure", "site"), "class A:\n    def f(self):\n        import json"),
    ],
)
def test_a_wrong_import_is_noticed(where, source):
    assert complaints(source, where, known_families={"vfem", "glm", "copula", "copula_glm"})


@pytest.mark.parametrize(
    "where, source",
    [
        (("kernels", "vfem"), "from numba import njit\nfrom fedstat.typing import Floats"),
        (("models", "vfem", "model"), "from fedstat.models.vertical.model import Model\nfrom . import steps"),
        (("models", "vfem", "model"), "from fedstat.models.vfem.steps import STEPS"),
        (("models", "copula_glm", "steps"), "from fedstat.models.copula.steps import release_gram"),
        (("models", "vfem", "model"), "from fedstat.federation.disclosure import site\nimport numpy as np"),
        (("inference", "plots"), "def plot():\n    import matplotlib.pyplot as plt"),
    ],
)
def test_a_right_import_passes(where, source):
    assert not complaints(source, where, known_families={"vfem", "glm", "copula", "copula_glm"})


def test_every_room_is_known():
    rooms = {address(path)[0] for path in files() if address(path)}
    assert rooms <= set(MAY_IMPORT)


def test_every_family_has_the_same_files():
    for family in families():
        lacking = FAMILY_FILES - {path.name for path in (PACKAGE / "models" / family).glob("*.py")}
        assert not lacking, family


def test_no_drawer_for_odds_and_ends():
    assert not [path for path in files() if path.name in BANNED_NAMES]


def test_no_empty_module():
    empty = [path for path in files() if path.name != "__init__.py" and not parsed(path).body[1:]]
    assert not empty


def test_every_folder_of_models_is_a_family_or_shared():
    folders = {path.parent.name for path in (PACKAGE / "models").glob("*/__init__.py")}
    assert folders == set(INSTALLED) | set(MODELS) - {""}


def test_every_package_is_installed():
    """setup.cfg finds packages: a folder without ``__init__.py`` is missing from the wheel."""
    assert not [path for path in files() if not (path.parent / "__init__.py").exists()]


def test_a_class_has_a_name_of_its_own():
    """One name, one thing: no two classes of the package are called the same."""
    found = {}
    for path in files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert not {name: where for name, where in found.items() if len(where) > 1}


def named_files(room):
    """Files and folders of a room, and which of them its docstring names."""
    text = ast.get_docstring(parsed(room / "__init__.py")) or ""
    inside = {path.stem for path in room.glob("*.py")} | {
        path.parent.name for path in room.glob("*/__init__.py")
    }
    return inside - {"__init__"}, {name for name in inside if f"``{name}``" in text}


def test_a_room_that_describes_its_files_names_all_of_them():
    """The docstring of a large room says in which order to read its files."""
    rooms = [path.parent for path in files() if path.name == "__init__.py" and path.parent != PACKAGE]
    for room in rooms:
        inside, named = named_files(room)
        assert len(named) < 2 or named == inside, f"{room}: the docstring does not name {inside - named}"


def test_a_text_in_a_module_describes_the_name_before_it():
    """What stands after a class, a function or another text describes a name that is gone."""
    lost = []
    for path in PACKAGE.rglob("*.py"):
        body = ast.parse(path.read_text()).body
        for before, one in pairwise(body):
            is_text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if is_text and not isinstance(before, ast.Assign | ast.AnnAssign):
                lost.append(f"{path.relative_to(PACKAGE)}:{one.lineno}")
    assert not lost
