"""From the syntax tree of one factor to the allowed language, node by node, with no way for anything else."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from fedstat.errors import FormulaError
from fedstat.federation.design.formula.contrasts import TREATMENT, WRITTEN
from fedstat.federation.design.formula.tree import (
    ALLOWED,
    ALLOWED_NUMERIC,
    ELEMENTWISE,
    MAX_EXPONENT,
    MAX_NUMBER,
    PLACES,
    Arithmetic,
    Category,
    Column,
    Counts,
    Level,
    Negative,
    Number,
    Option,
    Relation,
    Signature,
    Transform,
    Tree,
    is_number,
)

MAX_DEPTH = 50

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
_FOUND: Mapping[type[ast.AST], str] = {
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


def refuse(found: str, text: str, remedy: str = ALLOWED) -> FormulaError:
    """Error for something `found` in a formula that is outside its language; `remedy` is allowed."""
    shown = text if len(text) <= 80 else text[:77] + "..."
    return FormulaError(f"formula: {found} in {shown!r} is not allowed; {remedy}.")


@dataclass(slots=True)
class Converter:
    """Converts a syntax tree; every method refuses what it does not know."""

    text: str
    transforms: Mapping[str, Signature]
    allowed: str
    depth: int = 0

    def response(self, node: ast.expr) -> Tree:
        """Convert the left side of a formula: numbers, one comparison, or counts."""
        match node:
            case ast.Call(func=ast.Name(id="cbind")):
                return self._counts(node)
            case ast.Call(func=ast.Name(id="I"), args=[inside], keywords=[]):
                return self._inside(inside)
            case _:
                return self._inside(node)

    def _inside(self, node: ast.expr) -> Tree:
        """Convert numbers, or one comparison."""
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if (
                type(operator) in _COMPARISONS
            ):
                return self._comparison(_COMPARISONS[type(operator)], self.numeric(left), right)
            case _:
                return self.numeric(node)

    def factor(self, node: ast.expr) -> Tree:
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

    def numeric(self, node: ast.expr) -> Tree:
        """Convert an expression with one number per row."""
        # A deep tree would exhaust the stack of whoever reads it, here or at a site.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise refuse(f"nesting deeper than {MAX_DEPTH}", self.text, self.allowed)
        try:
            return self._numeric(node)
        finally:
            self.depth -= 1

    def _numeric(self, node: ast.expr) -> Tree:
        match node:
            # Before the numbers, since a bool is an int to Python's patterns.
            case ast.Constant(value=bool() | complex()):
                raise self._refusal(node)
            case ast.Constant(value=int() | float() as value) if abs(value) <= MAX_NUMBER:
                return Number(float(value))
            case ast.Name():
                return self._column(node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Negative(self.numeric(operand))
            # An exponent is a small number of the formula: a power of two columns overflows, or has no value.
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return Arithmetic("**", self.numeric(left), self._exponent(right))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                return Arithmetic(_ARITHMETIC[type(operator)], self.numeric(left), self.numeric(right))
            case ast.Call():
                return self._call(node, nested=True)
            case _:
                raise self._refusal(node)

    def _column(self, node: ast.Name) -> Column:
        return Column(node.id[1:-1] if node.id.startswith("`") else node.id)

    def _exponent(self, node: ast.expr) -> Number:
        value = self._literal(node)
        if not is_number(value) or abs(value) > MAX_EXPONENT:  # type: ignore[arg-type]
            raise refuse("this exponent", self.text, f"an exponent is a number up to {MAX_EXPONENT}")
        return Number(float(value))  # type: ignore[arg-type]

    def _counts(self, node: ast.Call) -> Counts:
        match node:
            case ast.Call(args=[successes, failures], keywords=[]):
                # Each count is of its row alone: scaled or centred it would be none.
                rows = row_by_row(self.text)
                return Counts(rows.numeric(successes), rows.numeric(failures))
        raise refuse("this use of cbind(...)", self.text, "write two expressions: cbind(successes, failures)")

    def _comparison(self, symbol: str, left: Tree, right: ast.expr) -> Relation:
        match left, right:
            case Column(), ast.Constant(value=str() as level) if symbol in ("==", "!="):
                return Relation(symbol, left, Level(level))
            case _:
                return Relation(symbol, left, self.numeric(right))

    def _call(self, node: ast.Call, *, nested: bool) -> Tree:
        function = self._function(node.func)
        if function == "Q":
            return self._quoted(node)
        signature = self.transforms.get(function)
        if signature is None or (nested and not signature.nests):
            raise refuse(f"the call {function}(...)", self.text, PLACES.get(function, self.allowed))
        if not node.args:
            raise refuse(f"{function}() without a column", self.text, self.allowed)
        operand = self.numeric(node.args[0])
        return Transform(function, operand, self._options(node, function, signature), ast.unparse(node))

    def _function(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=ast.Name(id="np" | "contr" as module), attr=name):
                return f"{module}.{name}"
            case _:
                raise self._refusal(node)

    def _options(self, node: ast.Call, function: str, signature: Signature) -> tuple[tuple[str, Option], ...]:
        names = list(signature.options)
        # The first argument is what the transform is applied to, the others are options in the order of the
        # signature.
        if len(node.args) - 1 > len(names):
            raise refuse(f"{function}() with {len(node.args)} arguments", self.text)
        given = [*zip(names, node.args[1:], strict=False)]
        given += [(option.arg or "**", option.value) for option in node.keywords]
        options: dict[str, Option] = {}
        for name, argument in given:
            allowed = signature.options.get(name)
            if allowed is None or name in options:
                known = ", ".join(names) or "none"
                raise refuse(f"the option {name}= of {function}()", self.text, f"its options are: {known}")
            options[name] = self._literal(argument)
            if not allowed(options[name]):
                raise refuse(f"this value of {function}({name}=...)", self.text)
        return tuple(options.items())

    def _category(self, node: ast.Call) -> Category:
        levels = self._levels(node.keywords)
        coding, reference = TREATMENT, None
        match node.args:
            case [ast.Name() as name, *contrasts] if len(contrasts) < 2:
                column: Tree = self._column(name)
            case [ast.Call() as quoted, *contrasts] if len(contrasts) < 2:
                column = self._call(quoted, nested=True)
            case _:
                raise self._refuse_category()
        if contrasts:
            coding, reference = self._contrast(contrasts[0])
        if not isinstance(column, Column):
            raise self._refuse_category()
        if levels and reference is not None and reference not in levels:
            raise refuse("a reference that is no declared level", self.text, "name one of levels=[...]")
        return Category(column.name, reference, levels, coding)

    def _levels(self, keywords: list[ast.keyword]) -> tuple[bool | int | float | str, ...]:
        match keywords:
            case []:
                return ()
            case [ast.keyword(arg="levels", value=ast.List(elts=elements) | ast.Tuple(elts=elements))]:
                levels = tuple(self._literal(element) for element in elements)
                plain = tuple(level for level in levels if not isinstance(level, tuple))
                if len(set(plain)) == len(levels) >= 2:
                    return plain
                raise refuse("these levels", self.text, "write two different levels or more")
        raise self._refuse_category()

    def _refuse_category(self) -> FormulaError:
        remedy = "write C(x), C(x, Treatment('level')), C(x, Sum) or C(x, levels=['one', 'two'])"
        return refuse("this use of C(...)", self.text, remedy)

    def _contrast(self, node: ast.expr) -> tuple[str, Option | None]:
        """Read a coding, such as ``Sum`` or ``Treatment('level')``, and the level that it names."""
        call = node if isinstance(node, ast.Call) else None
        if call is None and not isinstance(node, ast.Name | ast.Attribute):
            raise self._refuse_category()
        written = self._function(call.func if call else node)
        coding, argument = WRITTEN.get(written, ("", ""))
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
        raise refuse("this contrast", self.text, remedy)

    def _quoted(self, node: ast.Call) -> Column:
        match node:
            case ast.Call(args=[ast.Constant(value=str() as name)], keywords=[]):
                return Column(name)
            case _:
                raise refuse("this use of Q(...)", self.text, "write Q('odd name'): one text, nothing else")

    def _literal(self, node: ast.expr) -> Option:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Tuple(elts=elements):
                values = [self._literal(element) for element in elements]
                if all(map(is_number, values)):
                    return tuple(float(value) for value in values)  # type: ignore[arg-type]
        raise self._refusal(node)

    def _refusal(self, node: ast.expr) -> FormulaError:
        kind = type(node)
        found = _FOUND.get(kind, "something")
        match node:
            case ast.Call():
                found = "a call"
            case ast.Constant(value=value):
                found = f"the {'text' if isinstance(value, str) else type(value).__name__} constant"
            case ast.BinOp() | ast.UnaryOp():
                found = "this operator"
        return refuse(found, self.text, self.allowed)


def row_by_row(text: str) -> Converter:
    """Make a converter that knows no transform with a state: rows are read in chunks and at many sites."""
    return Converter(text, ELEMENTWISE, ALLOWED_NUMERIC)
