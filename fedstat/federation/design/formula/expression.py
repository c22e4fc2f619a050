"""One factor of a formula: from text to a syntax tree of the allowed language."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fedstat.errors import FormulaError
from fedstat.federation.design.formula import syntax_tree

# ----------------------------------------------------------------------------------------------------
# From the syntax tree of one factor to the allowed language, node by node, with no way for anything else.

MAX_DEPTH = 50
MOST_PARSED = 512
"""Texts whose expressions are kept: the same formula is read at several places."""

_ARITHMETIC: Mapping[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_NODE_NAMES: Mapping[type[ast.AST], str] = {
    ast.Attribute: "attribute access (quote a column whose name has a dot in backticks)",
    ast.Subscript: "a subscript [...]",
    ast.Lambda: "a lambda",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a comprehension",
    ast.NamedExpr: "an assignment :=",
    ast.IfExp: "an if ... else",
    ast.BoolOp: "and/or",
    ast.Compare: "a comparison (one is allowed, on the left side or in I(), such as I(x > 0))",
    ast.JoinedStr: "an f-string",
    ast.Dict: "a dict",
    ast.Set: "a set",
    ast.List: "a list [...]",
    ast.Tuple: "a tuple",
    ast.Starred: "an unpacking *",
    ast.Await: "an await",
    ast.Yield: "a yield",
}


def refuse_formula(found: str, text: str, remedy: str = syntax_tree.ALLOWED) -> FormulaError:
    """Error for something `found` in a formula that is outside its language; `remedy` is allowed."""
    shown = text if len(text) <= 80 else text[:77] + "..."
    return FormulaError(f"formula: {found} in {shown!r} is not allowed; {remedy}.")


@dataclass(slots=True)
class SyntaxConverter:
    """Converts a syntax tree; every method refuses what it does not know."""

    text: str
    transforms: Mapping[str, syntax_tree.TransformSignature]
    allowed: str
    depth: int = 0

    def response(self, node: ast.expr) -> syntax_tree.Tree:
        """Convert the left side of a formula: numbers, one comparison, counts, or times with an event."""
        match node:
            case ast.Call(func=ast.Name(id="cbind")):
                return self._counts(node)
            case ast.Call(func=ast.Name(id="Surv")):
                return self._survival(node)
            case ast.Call(func=ast.Name(id="C")):
                return self._categories(node)
            case ast.Call(func=ast.Name(id="I"), args=[inside], keywords=[]):
                return self._inside(inside)
            case _:
                return self._inside(node)

    def _inside(self, node: ast.expr) -> syntax_tree.Tree:
        """Convert numbers, or one comparison."""
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if (
                type(operator) in _COMPARISONS
            ):
                return self._comparison(_COMPARISONS[type(operator)], self.numeric(left), right)
            case _:
                return self.numeric(node)

    def factor(self, node: ast.expr) -> syntax_tree.Tree:
        """Convert a factor of the right side: a column, a category, a transform, or what I() holds."""
        match node:
            case ast.Name():
                return self._column(node)
            case ast.Call(func=ast.Name(id="I"), args=[inside], keywords=[]):
                return self._inside(inside)
            case ast.Call(func=ast.Name(id="C")):
                return self._category(node)
            case ast.Call():
                return self._call(node, nested=False)
            case _:
                raise self._refusal(node)

    def numeric(self, node: ast.expr) -> syntax_tree.Tree:
        """Convert an expression with one number per row."""
        # A deep tree would exhaust the stack of its reader, here or at a site.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise refuse_formula(f"nesting deeper than {MAX_DEPTH}", self.text, self.allowed)
        try:
            return self._numeric(node)
        finally:
            self.depth -= 1

    def _numeric(self, node: ast.expr) -> syntax_tree.Tree:
        match node:
            # Before the numbers, since a bool is an int to Python's patterns.
            case ast.Constant(value=bool() | complex()):
                raise self._refusal(node)
            case ast.Constant(value=int() | float() as value) if abs(value) <= syntax_tree.MAX_NUMBER:
                return syntax_tree.Number(float(value))
            case ast.Name():
                return self._column(node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return syntax_tree.Negative(self.numeric(operand))
            # An exponent is a small number of the formula: a power of two columns overflows, or has no value.
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return syntax_tree.Arithmetic("**", self.numeric(left), self._exponent(right))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                return syntax_tree.Arithmetic(
                    _ARITHMETIC[type(operator)], self.numeric(left), self.numeric(right)
                )
            case ast.Call(func=ast.Name(id="I"), args=[inside], keywords=[]):
                return self.numeric(inside)
            case ast.Call():
                return self._call(node, nested=True)
            case _:
                raise self._refusal(node)

    def _column(self, node: ast.Name) -> syntax_tree.Column:
        return syntax_tree.Column(node.id[1:-1] if node.id.startswith("`") else node.id)

    def _exponent(self, node: ast.expr) -> syntax_tree.Number:
        value = self._literal(node)
        if not syntax_tree.is_number(value) or abs(value) > syntax_tree.MAX_EXPONENT:  # type: ignore[arg-type]
            raise refuse_formula(
                "this exponent", self.text, f"an exponent is a number up to {syntax_tree.MAX_EXPONENT}"
            )
        return syntax_tree.Number(float(value))  # type: ignore[arg-type]

    def _counts(self, node: ast.Call) -> syntax_tree.Counts:
        match node:
            case ast.Call(args=[successes, failures], keywords=[]):
                # Each count is of its row alone: scaled or centered it would be none.
                rows = row_by_row(self.text)
                return syntax_tree.Counts(rows.numeric(successes), rows.numeric(failures))
        raise refuse_formula(
            "this use of cbind(...)", self.text, "write two expressions: cbind(successes, failures)"
        )

    def _survival(self, node: ast.Call) -> syntax_tree.Survival:
        match node:
            case ast.Call(args=[_, _] | [_, _, _], keywords=[]):
                rows = row_by_row(self.text)
                times = tuple(map(rows.numeric, node.args[:-1]))
                match node.args[-1]:
                    case ast.Call(func=ast.Name(id="C")) as causes:
                        category = self._category(causes)
                        if category.levels:
                            return syntax_tree.Survival(times, category)
                    case event:
                        return syntax_tree.Survival(times, rows._inside(event))
        raise refuse_formula(
            "this use of Surv(...)",
            self.text,
            "write Surv(time, event), or Surv(start, stop, event), where event is 0 or 1, a comparison "
            "such as status == 2, or for competing events a category whose first level is censoring, such as "
            "C(cause, levels=['none', 'relapse', 'death'])",
        )

    def _categories(self, node: ast.Call) -> syntax_tree.Category:
        if len(node.args) > 1:
            raise refuse_formula(
                "a coding of the response",
                self.text,
                "write C(y), or C(y, levels=['one', 'two', 'three']) with the levels in order, the reference "
                "first",
            )
        return self._category(node)

    def _comparison(self, symbol: str, left: syntax_tree.Tree, right: ast.expr) -> syntax_tree.Relation:
        match left, right:
            case syntax_tree.Column(), ast.Constant(value=str() as level) if symbol in ("==", "!="):
                return syntax_tree.Relation(symbol, left, syntax_tree.Level(level))
            case _:
                return syntax_tree.Relation(symbol, left, self.numeric(right))

    def _call(self, node: ast.Call, *, nested: bool) -> syntax_tree.Tree:
        function = self._function(node.func)
        if function == "Q":
            return self._quoted(node)
        if function == "ns" and "cr" in self.transforms:
            # R's natural spline: the same functions of x.
            function, node.func = "cr", ast.Name("cr")
            node.keywords.append(ast.keyword("constraints", ast.Constant("center")))
        signature = self.transforms.get(function)
        if signature is None or (nested and not signature.nests):
            raise refuse_formula(
                f"the call {function}(...)", self.text, syntax_tree.PLACES.get(function, self.allowed)
            )
        if not node.args:
            raise refuse_formula(f"{function}() without a column", self.text, self.allowed)
        operand = self.numeric(node.args[0])
        # Knots in brackets are those in parentheses, so that one term has one text.
        node.args[1:] = map(_as_tuple, node.args[1:])
        for option in node.keywords:
            option.value = _as_tuple(option.value)
        return syntax_tree.Transform(
            function, operand, self._options(node, function, signature), ast.unparse(node)
        )

    def _function(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=ast.Name(id="np" | "contr" as module), attr=name):
                return f"{module}.{name}"
            case _:
                raise self._refusal(node)

    def _options(
        self, node: ast.Call, function: str, signature: syntax_tree.TransformSignature
    ) -> tuple[tuple[str, syntax_tree.Option], ...]:
        names = list(signature.options)
        # The first argument is what the transform is applied to, the others are options in the order of the
        # signature.
        if len(node.args) - 1 > len(names):
            raise refuse_formula(f"{function}() with {len(node.args)} arguments", self.text)
        given = [*zip(names, node.args[1:], strict=False)]
        given += [(option.arg or "**", option.value) for option in node.keywords]
        options: dict[str, syntax_tree.Option] = {}
        for name, argument in given:
            allowed = signature.options.get(name)
            if allowed is None or name in options:
                known = ", ".join(names) or "none"
                raise refuse_formula(
                    f"the option {name}= of {function}()", self.text, f"its options are: {known}"
                )
            options[name] = self._literal(argument)
            if not allowed(options[name]):
                raise refuse_formula(f"this value of {function}({name}=...)", self.text)
        return tuple(options.items())

    def _category(self, node: ast.Call) -> syntax_tree.Category:
        levels = self._levels(node.keywords)
        coding, reference = syntax_tree.TREATMENT, None
        match node.args:
            case [ast.Name() as name, *contrasts] if len(contrasts) < 2:
                column: syntax_tree.Tree = self._column(name)
            case [ast.Call() as quoted, *contrasts] if len(contrasts) < 2:
                column = self._call(quoted, nested=True)
            case _:
                raise self._refuse_category()
        if contrasts:
            coding, reference = self._contrast(contrasts[0])
        if not isinstance(column, syntax_tree.Column):
            raise self._refuse_category()
        if levels and reference is not None and reference not in levels:
            raise refuse_formula(
                "a reference that is no declared level", self.text, "name one of levels=[...]"
            )
        return syntax_tree.Category(column.name, reference, levels, coding)

    def _levels(self, keywords: list[ast.keyword]) -> tuple[bool | int | float | str, ...]:
        match keywords:
            case []:
                return ()
            case [ast.keyword(arg="levels", value=ast.List(elts=elements) | ast.Tuple(elts=elements))]:
                levels = tuple(self._literal(element) for element in elements)
                plain = tuple(level for level in levels if not isinstance(level, tuple))
                if len(set(plain)) == len(levels) >= 2:
                    return plain
                raise refuse_formula("these levels", self.text, "write two different levels or more")
        raise self._refuse_category()

    def _refuse_category(self) -> FormulaError:
        remedy = "write C(x), C(x, Treatment('level')), C(x, Sum) or C(x, levels=['one', 'two'])"
        return refuse_formula("this use of C(...)", self.text, remedy)

    def _contrast(self, node: ast.expr) -> tuple[str, syntax_tree.Option | None]:
        """Read a coding, such as ``Sum`` or ``Treatment('level')``, and the level that it names."""
        call = node if isinstance(node, ast.Call) else None
        if call is None and not isinstance(node, ast.Name | ast.Attribute):
            raise self._refuse_category()
        written = self._function(call.func if call else node)
        coding, argument = syntax_tree.WRITTEN.get(written, ("", ""))
        match (call.args, call.keywords) if call else ([], []):
            case [], [] if coding:
                return coding, None
            case ([level], []) if argument:
                return coding, self._literal(level)
            case ([], [ast.keyword(arg=name, value=level)]) if argument and name == argument:
                return coding, self._literal(level)
        remedy = (
            "write Treatment('level'), Treatment(reference='level'), Sum, Sum('level'), Helmert, Diff or Poly"
        )
        raise refuse_formula("this contrast", self.text, remedy)

    def _quoted(self, node: ast.Call) -> syntax_tree.Column:
        match node:
            case ast.Call(args=[ast.Constant(value=str() as name)], keywords=[]):
                return syntax_tree.Column(name)
            case _:
                raise refuse_formula(
                    "this use of Q(...)", self.text, "write Q('odd name'): one text, nothing else"
                )

    def _literal(self, node: ast.expr) -> syntax_tree.Option:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Tuple(elts=elements):
                values = [self._literal(element) for element in elements]
                if all(map(syntax_tree.is_number, values)):
                    return tuple(float(value) for value in values)  # type: ignore[arg-type]
        raise self._refusal(node)

    def _refusal(self, node: ast.expr) -> FormulaError:
        kind = type(node)
        found = _NODE_NAMES.get(kind, "something")
        match node:
            case ast.Call():
                found = "a call"
            case ast.Constant(value=value):
                found = f"the {'text' if isinstance(value, str) else type(value).__name__} constant"
            case ast.BinOp() | ast.UnaryOp():
                found = "this operator"
        return refuse_formula(found, self.text, self.allowed)


def _as_tuple(node: ast.expr) -> ast.expr:
    return ast.Tuple(node.elts, ast.Load()) if isinstance(node, ast.List) else node


def row_by_row(text: str) -> SyntaxConverter:
    """Make a converter that knows no transform with a state: rows are read in chunks and at many sites."""
    return SyntaxConverter(text, syntax_tree.ELEMENTWISE, syntax_tree.ALLOWED_NUMERIC)


# ----------------------------------------------------------------------------------------------------
# One factor of a formula: text -> a tree that holds nothing but the allowed language.
#
# Python's own parser reads the text into a syntax tree; nothing is ever evaluated from it. The tree is
# *converted*, node by node, into the small frozen classes of `tree`, and a node without a conversion is
# refused. A site computes from these classes alone, so text that is not in the language cannot run, whatever
# its source.

MAX_EXPRESSION = 2_000
MOST_COMPARISONS = 10
"""Comparisons of a subset."""

_BARE = re.compile(r"[^\W\d][\w.]*")
_STRING = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
_QUOTED_OR_AND = re.compile(rf"{_STRING}|`[^`]+`|&")
# Python would fold look-alikes (full-width letters, the micro sign) into other names: words outside
# ASCII are therefore taken out of the text before it is parsed, as quoted names are.
_OUTSIDE_PYTHON = re.compile(rf"(?P<string>{_STRING})|`(?P<quoted>[^`]+)`|(?P<word>[^\W\d]\w*)")


def name_expression(name: str) -> syntax_tree.Expression:
    """Factor that is a column as it stands; its name may be any text."""
    if "`" in name:
        text = f"Q({name!r})"
        return syntax_tree.Expression(text, text, syntax_tree.Column(name), (name,))
    text = name if _BARE.fullmatch(name) else f"`{name}`"
    return syntax_tree.Expression(text, name, syntax_tree.Column(name), (name,))


@lru_cache(maxsize=MOST_PARSED)
def parse_expression(text: str, *, response: bool = False) -> syntax_tree.Expression:
    """Read a factor of the right side, such as ``log(x + 1)``, or the left side of a formula.

    A response may have arithmetic at the top, and one comparison, ``cbind(successes, failures)``
    (`Counts`), ``Surv(time, event)`` (`Survival`) or ``C(y)`` (`Category`), and no splines or polynomials.
    Anything else is a FormulaError.
    """
    if _BARE.fullmatch(text):
        return name_expression(text)
    node = _parse_python(text)
    converter = SyntaxConverter(text, syntax_tree.TRANSFORMS, syntax_tree.ALLOWED)
    return _expression(node, converter.response(node) if response else converter.factor(node), text)


def parse_numeric(text: str) -> syntax_tree.Expression:
    """Read an expression that gives one number per row by itself, for instance ``n - events``.

    Categories, and transforms that need a state, are refused: FormulaError.
    """
    if _BARE.fullmatch(text):
        return name_expression(text)
    node = _parse_python(text)
    return _expression(node, row_by_row(text).numeric(node), text)


def parse_offset(text: str) -> syntax_tree.Expression:
    """Read the expression inside a whole call such as ``offset(log(days))``; else FormulaError."""
    match _parse_python(text):
        case ast.Call(func=ast.Name(id="offset"), args=[argument], keywords=[]):
            return _expression(argument, row_by_row(text).numeric(argument), text)
    raise refuse_formula("this use of offset(...)", text, "write one expression, as in offset(log(days))")


def parse_subset(text: str) -> tuple[syntax_tree.Expression, ...]:
    """Read comparisons joined by ``&``, as in ``age >= 65 & sex == 'f'``: each a column with a value.

    Anything else is a FormulaError, also functions of columns, ``|`` and a comparison of two columns.
    """
    cuts = [match.start() for match in _QUOTED_OR_AND.finditer(text) if match[0] == "&"]
    parts = [text[start + 1 : end] for start, end in zip([-1, *cuts], [*cuts, len(text)], strict=True)]
    found = {one.text: one for one in map(_parse_comparison, parts)}
    if len(parts) > MOST_COMPARISONS:
        raise FormulaError(f"subset: {len(parts)} comparisons; at most {MOST_COMPARISONS} are allowed")
    return tuple(found.values())


@lru_cache(maxsize=MOST_PARSED)
def _parse_comparison(text: str) -> syntax_tree.Expression:
    try:
        node = _parse_python(text)
        match node:
            case ast.Compare(comparators=[ast.Constant(value=bool() as value)]):
                node.comparators = [ast.Constant(int(value))]
        tree = row_by_row(text)._inside(node)
    except FormulaError:
        tree = None
    match tree:
        case syntax_tree.Relation(
            left=syntax_tree.Column(),
            right=syntax_tree.Number()
            | syntax_tree.Level()
            | syntax_tree.Negative(operand=syntax_tree.Number()),
        ):
            return _expression(node, tree, text)
    shown = text.strip() if len(text) <= 80 else text[:77] + "..."
    raise FormulaError(
        f"subset: {shown!r} is not allowed. Compare a column with a number or a level by < <= > >= == or !=, "
        "and join comparisons by &, as in \"age >= 65 & sex == 'f'\""
    )


def parse_labels(text: str) -> tuple[str, tuple[str, ...]]:
    """Read ``strata(a, b)`` or ``cluster(id)``: the function, and the columns whose values are groups."""
    match _parse_python(text):
        case ast.Call(func=ast.Name(id=function), args=[_, *_] as names, keywords=[]) if all(
            isinstance(name, ast.Name) for name in names
        ):
            columns = (name.id.strip("`") for name in names if isinstance(name, ast.Name))
            return function, tuple(dict.fromkeys(columns))
    raise refuse_formula("something other than columns", text, "write columns, as in strata(sex, ward)")


def _expression(node: ast.expr, tree: syntax_tree.Tree, text: str) -> syntax_tree.Expression:
    columns = tuple(dict.fromkeys(syntax_tree.iter_columns(tree)))
    if not columns:
        raise refuse_formula("an expression without a column", text)
    # Names are as written again by now, backticks included, so that the text reads back as the same tree.
    canonical = ast.unparse(node)
    return syntax_tree.Expression(
        canonical,
        tree.name if isinstance(tree, syntax_tree.Column) and isinstance(node, ast.Name) else canonical,
        tree,
        columns,
    )


def _parse_python(text: str) -> ast.expr:
    """Syntax tree whose ``Name.id`` are the names as written, backticks included."""
    if len(text) > MAX_EXPRESSION:
        raise refuse_formula(f"an expression of {len(text):,} characters (limit {MAX_EXPRESSION:,})", text)
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
        raise refuse_formula("something that is not an expression", text) from None
    written = {stand.strip(): original for original, stand in names.items()}
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            child.id = _unquoted(written.get(child.id, child.id))
    return node


def quoted_name(name: str) -> str:
    """Return the name of a column as a formula has it: in backticks unless it is a name of Python.

    Keywords such as ``class`` and ``lambda`` are columns in many files, and no expressions.
    """
    if "`" in name:
        return f"Q({name!r})"
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"`{name}`"


def _unquoted(name: str) -> str:
    """Drop backticks that are not needed, so that one column is written in one way."""
    return quoted_name(name.strip("`")) if name.startswith("`") else name
