"""One factor of a formula: text -> a tree that holds nothing but the allowed language.

Python's own parser reads the text into a syntax tree; nothing is ever evaluated from it. The tree is
*converted*, node by node, into the small frozen classes of `tree`, and a node without a conversion is
refused. What is computed at an institution is computed from these classes alone, so text that is not
in the language has no way to run, wherever it came from.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings

from fedstat.federation.design.formula.conversion import Converter, refuse, row_by_row
from fedstat.federation.design.formula.tree import (
    ALLOWED,
    TRANSFORMS,
    Column,
    Expression,
    Tree,
    iter_columns,
)

MAX_EXPRESSION = 2_000

_BARE = re.compile(r"[^\W\d][\w.]*")
_STRING = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
# Python would fold look-alikes (full-width letters, the micro sign) into other names: words outside
# ASCII are therefore taken out of the text before it is parsed, as quoted names are.
_OUTSIDE_PYTHON = re.compile(rf"(?P<string>{_STRING})|`(?P<quoted>[^`]+)`|(?P<word>[^\W\d]\w*)")


def name_expression(name: str) -> Expression:
    """Factor that is a column as it stands; its name may be any text."""
    if "`" in name:
        text = f"Q({name!r})"
        return Expression(text, text, Column(name), (name,))
    text = name if _BARE.fullmatch(name) else f"`{name}`"
    return Expression(text, name, Column(name), (name,))


def parse_expression(text: str, *, response: bool = False) -> Expression:
    """Read a factor of the right side, such as ``log(x + 1)``, or the left side of a formula.

    A response may have arithmetic at the top, and one comparison or ``cbind(successes, failures)``
    (`Counts`), and no categories, splines or polynomials. Anything else is a FormulaError.
    """
    if _BARE.fullmatch(text):
        return name_expression(text)
    node = _parse_python(text)
    converter = Converter(text, TRANSFORMS, ALLOWED)
    return _expression(node, converter.response(node) if response else converter.factor(node), text)


def parse_numeric(text: str) -> Expression:
    """Read an expression that gives one number per row by itself, for instance ``n - events``.

    Categories, and transforms that need a state, are refused: FormulaError.
    """
    if _BARE.fullmatch(text):
        return name_expression(text)
    node = _parse_python(text)
    return _expression(node, row_by_row(text).numeric(node), text)


def parse_offset(text: str) -> Expression:
    """Read the expression inside a whole call such as ``offset(log(days))``; else FormulaError."""
    match _parse_python(text):
        case ast.Call(func=ast.Name(id="offset"), args=[argument], keywords=[]):
            return _expression(argument, row_by_row(text).numeric(argument), text)
    raise refuse("this use of offset(...)", text, "write one expression, as in offset(log(days))")


def _expression(node: ast.expr, tree: Tree, text: str) -> Expression:
    columns = tuple(dict.fromkeys(iter_columns(tree)))
    if not columns:
        raise refuse("an expression without a column", text)
    # Names are as written again by now, backticks included, so that the text reads back as the same tree.
    canonical = ast.unparse(node)
    return Expression(
        canonical,
        tree.name if isinstance(tree, Column) and isinstance(node, ast.Name) else canonical,
        tree,
        columns,
    )


def _parse_python(text: str) -> ast.expr:
    """Syntax tree whose ``Name.id`` are the names as written, backticks included."""
    if len(text) > MAX_EXPRESSION:
        raise refuse(f"an expression of {len(text):,} characters (limit {MAX_EXPRESSION:,})", text)
    # Stand-ins must not be words of the formula, or two columns would become one.
    prefix = "_"
    while prefix in text:
        prefix += "_"
    names: dict[str, str] = {}

    def stand_in(match: re.Match[str]) -> str:
        if match["string"] or (match["word"] and match["word"].isascii()):
            return match[0]
        return names.setdefault(match[0], f" {prefix}{len(names)} ")

    prepared = _OUTSIDE_PYTHON.sub(stand_in, text).strip()
    try:
        # Python warns about texts such as `1if x`, with the formula in the warning.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(prepared, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise refuse("something that is not an expression", text) from None
    written = {stand.strip(): original for original, stand in names.items()}
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            child.id = _unquoted(written.get(child.id, child.id))
    return node


def _unquoted(name: str) -> str:
    """Drop backticks that are not needed, so that one column is written in one way."""
    bare = name.strip("`")
    return bare if bare.isidentifier() and not keyword.iskeyword(bare) else name
