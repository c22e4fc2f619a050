"""A compiled function without a wrapper for Python is called only by compiled ones: a call would crash."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "fedstat" / "kernels").rglob("*.py"))


def decorated(tree, option):
    """Functions of a module with an option among their decorators."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(option in ast.unparse(one) for one in node.decorator_list)
    ]


def test_inner_loops_are_called_by_compiled_functions_of_their_file():
    inner = {}
    for path in KERNELS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {function.name for function in decorated(tree, "**INNER")}
        inside = {id(node) for function in decorated(tree, "njit") for node in ast.walk(function)}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in inside}
        assert not names & used, path.name
        inner[".".join(path.relative_to(ROOT).with_suffix("").parts)] = names
    assert sum(map(len, inner.values())) > 10
    for path in [*(ROOT / "fedstat").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if "fedstat.kernels" in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.ImportFrom):
                    assert not inner.get(node.module or "", set()) & {one.name for one in node.names}, path
