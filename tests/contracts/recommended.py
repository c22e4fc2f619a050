"""Errors and warnings of the package whose text recommends a call, found in its sources."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from contracts.remedies import PACKAGE

import fedstat as fs

RAISED = {name for name, kind in vars(fs.errors).items() if isinstance(kind, type) and name != "Remedy"}
DEEPEST, MOST = 6, 24
VERBS = (
    "add|ask|build|call|choose|code|combine|compare|confirm|connect|declare|describe|draw|end|evaluate|fit|"
    "give|go|have|keep|leave|load|make|name|omit|pass|plot|put|read|replace|request|run|say|see|set|start|"
    "stop|take|try|use|wait|write"
)
FORMULA = "bs|bsignal|C|cbind|center|cluster|const|cr|I|log|offset|spline|strata|Surv"
"""Functions of formulas, which are no calls."""
CALL = rf"(?<![=\w])(?:[\w.]+=(?!=)|(?!(?:{FORMULA})\()[\w.]*\w\()"
IMPERATIVE = re.compile(
    rf"(?:^|[,:(] ?|\b(?:or|and|then|otherwise|instead|either) )\"?(?:{VERBS})\b"
    rf"(?! is| has| of| was| were| are| have)[^;]*?{CALL}",
    re.IGNORECASE,
)
SUBJECT = re.compile(rf"^['\" ]*(?!(?:{FORMULA})\()[\w.]*\w\((?!s\))")
COMMAND = re.compile(r"fedstat (?:site|federation) [a-z{]")


def recommends(text: str) -> str:
    """Return the clause of a text that recommends a call, an argument or a command; empty if none does.

    A clause recommends what stands after an imperative, a later clause also what it begins with, as in
    ``"; predict(frame) predicts your own rows"``.
    """
    for place, clause in enumerate(re.split(r"(?<!\.)[.;:?](?:\s+|$)|\n", text)):
        later = place and SUBJECT.search(clause.strip())
        if IMPERATIVE.search(clause) or COMMAND.search(clause) or later:
            return clause
    return ""


@dataclass(frozen=True)
class Raised:
    """A place of the package that makes an error or a warning: file, lines, text, and if it has a remedy."""

    path: str
    first: int
    last: int
    texts: tuple[str, ...]
    remedy: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.first}"


def recommended_in_words(one: Raised) -> list[str]:
    """List clauses of a text that recommend a call, if the error has no remedy."""
    said = dict.fromkeys(filter(None, map(recommends, one.texts)))
    return [] if one.remedy else list(said)


def _named(tree: ast.Module) -> dict[str, ast.AST]:
    named: dict[str, ast.AST] = {}
    methods = [one for node in tree.body if isinstance(node, ast.ClassDef) for one in node.body]
    for node in [*methods, *tree.body]:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            named[node.target.id] = node.value
        elif isinstance(node, ast.FunctionDef):
            named[node.name] = node
    return named


@cache
def sources() -> dict[Path, ast.Module]:
    """Return the modules of the package, parsed once."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _everywhere() -> dict[str, ast.AST]:
    return {name: node for tree in sources().values() for name, node in _named(tree).items()}


@dataclass(frozen=True)
class _Texts:
    """Texts that an expression may have; a value that is not known here is ``{}``."""

    here: dict[str, ast.AST]
    local: dict[str, list[ast.AST]]

    def of(self, node: ast.AST, depth: int = 0) -> list[str]:
        """List at most `MOST` texts."""
        parts = self._parts(node) if depth < DEEPEST else None
        if parts is None:
            return [str(node.value) if isinstance(node, ast.Constant) else "{}"]
        joined, nodes = parts
        if not joined:
            return [text for part in nodes for text in self.of(part, depth + 1)][:MOST] or ["{}"]
        texts = [""]
        for part in nodes:
            texts = [text + more for text in texts for more in self.of(part, depth + 1)][:MOST]
        return texts

    def _parts(self, node: ast.AST) -> tuple[bool, list[ast.AST]] | None:
        """Return the parts of an expression, and whether they are joined or alternatives."""
        match node:
            case ast.JoinedStr():
                return True, list(node.values)
            case ast.BinOp(op=ast.Add()):
                return True, [node.left, node.right]
            case ast.FormattedValue() | ast.Subscript():
                return False, [node.value]
            case ast.IfExp():
                return False, [node.body, node.orelse]
            case ast.BoolOp() | ast.Dict():
                return False, list(node.values)
            case ast.Tuple() | ast.List():
                return False, list(node.elts)
            case ast.Name(id=name):
                known = self.here.get(name) or (_everywhere().get(name) if name.isupper() else None)
                other = [known] if known and not isinstance(known, ast.FunctionDef) else None
                found = self.local.get(name) or other
                return (False, found) if found else None
            case ast.Call(func=ast.Attribute(attr="format" | "format_map" | "rstrip" | "strip", value=value)):
                return False, [value]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)):
                function = self.here.get(name) or _everywhere().get(name)
                if isinstance(function, ast.FunctionDef):
                    return False, [
                        n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value
                    ]
        return None


def _assigned(function: ast.AST | None) -> dict[str, list[ast.AST]]:
    local: dict[str, list[ast.AST]] = defaultdict(list)
    for node in ast.walk(function) if function else ():
        if not isinstance(node, ast.Assign):
            continue
        (target, *_), value = node.targets, node.value
        if isinstance(target, ast.Name):
            local[target.id].append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for name, part in zip(target.elts, value.elts, strict=True):
                if isinstance(name, ast.Name):
                    local[name.id].append(part)
    return local


def _makes_error(call: ast.Call) -> bool:
    chain = ast.unparse(call.func).split(".")
    return chain[-1] in RAISED | {"warn"} or (chain[-1] == "of_rule" and chain[0] in RAISED)


@cache
def raised() -> tuple[Raised, ...]:
    """Return all places of the package that make an error or a warning."""
    return tuple(one for path, tree in sources().items() for one in _raised_in(path, tree))


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, ast.AST | None]]:
    """Yield each call with the innermost function around it."""
    nodes: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
    while nodes:
        node, owner = nodes.pop()
        if isinstance(node, ast.Call):
            yield node, owner
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            owner = node
        nodes += [(child, owner) for child in ast.iter_child_nodes(node)]


def _raised_in(path: Path, tree: ast.Module) -> Iterator[Raised]:
    for call, owner in _calls(tree):
        if not _makes_error(call):
            continue
        read = _Texts(_named(tree), _assigned(owner))
        given = [*call.args, *(one.value for one in call.keywords if one.arg != "remedy")]
        yield Raised(
            path.relative_to(PACKAGE).as_posix(),
            call.lineno,
            call.end_lineno or call.lineno,
            tuple(text for node in given for text in read.of(node)),
            any(one.arg == "remedy" for one in call.keywords),
        )
