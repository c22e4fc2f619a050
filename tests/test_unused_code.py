"""What the package defines is used by the package, or public: nothing is kept for tests alone."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import fedstat as fs
from fedstat.federation.disclosure.site import FAMILIES, load_families

PACKAGE = Path(fs.__file__).parent
BY_NAME = {
    "serve_folder": "a site in a process of its own without a folder of files: the loop of a transport",
    "mu_of": "the inverse of `epsilon_of`, which a vignette uses",
    "published_boosting": "the published algorithm, which a vignette compares with ours",
}
"""Functions that only others call, with the reason."""
REGISTERED = {"step", "njit", "guvectorize", "overload"}
"""Decorators that enter a function somewhere."""


@cache
def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def names(tree):
    """Return each name that code uses: variables, attributes, keywords, and words of short strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from re.findall(r"\w+", node.value)


def definitions(tree):
    """Return functions, classes and constants of a module, but those that a decorator enters somewhere."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            by = {word for one in node.decorator_list for word in names(one)}
            if not by & REGISTERED:
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))


def unused(modules):
    used = Counter(name for tree in modules for name in names(tree))
    return {name for tree in modules for name in definitions(tree) if not used[name] and name[:2] != "__"}


def test_the_package_uses_what_it_defines():
    templates = " ".join(path.read_text() for path in PACKAGE.rglob("*.html"))
    stub = (PACKAGE / "results.pyi").read_text()
    elsewhere = set(re.findall(r"\w+", templates + stub)) | set(fs.__all__)
    assert unused(trees().values()) - elsewhere == set(BY_NAME)


def test_a_function_that_nothing_names_is_noticed():
    modules = [
        ast.parse(
            "LEAST = 1\n@step(FAMILY)\ndef sums(): ...\ndef asked(): return LEAST\ndef idle(): asked()"
        ),
        ast.parse("A, B = 1, 2\nprint(A)"),
    ]
    assert unused(modules) == {"idle", "B"}


def test_a_module_of_the_package_requests_the_steps_of_each_family():
    """A family is named where it is declared, and once more where it is requested."""
    load_families()
    words = Counter(name for tree in trees().values() for name in names(tree))
    words.update(node.value for tree in trees().values() for node in ast.walk(tree) if text(node))
    served = {name: steps for name, steps in FAMILIES.items() if of_package(steps)}
    # An offset is opened as what it is of: the name of its step is composed.
    never = {(family, name) for family, steps in served.items() for name in steps if not words[name]}
    assert never == {("design", "open_offset")}


def text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def of_package(steps):
    return all(step.run.__module__.startswith("fedstat.") for step in steps.values())
