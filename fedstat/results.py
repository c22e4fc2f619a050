"""The classes that fits and their methods return, for annotations and ``isinstance``.

A class is imported with its family when it is first named; ``results.pyi`` lists the modules. Only a fit or
:func:`fedstat.load` creates results.

Examples
--------
>>> import fedstat as fs
>>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
>>> fit = fs.FederatedGLM.from_formula("num ~ age", partition).fit()
>>> isinstance(fit, fs.results.GLMResults), isinstance(fit, fs.results.CoefficientResults)
(True, True)
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(
            f"module 'fedstat.results' has no attribute '{name}'; it has {', '.join(__all__)}"
        )
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
