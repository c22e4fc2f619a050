"""A formula as facts for the door: what each factor computes, and from which columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedstat.federation.design.formula.expression import parse_expression, parse_numeric
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.design.formula.tree import (
    Arithmetic,
    Category,
    Counts,
    Expression,
    Level,
    Negative,
    Number,
    Relation,
    Transform,
    Tree,
    iter_columns,
    iter_parts,
)
from fedstat.federation.door.facts import FactorAsked, FactorsAsked


def terms_asked(terms: Sequence[Term]) -> FactorsAsked:
    """Tell of the factors of the right side."""
    found = {factor.text: factor for term in terms for factor in term}
    return FactorsAsked([_factor(factor, factor.tree) for factor in found.values()])


def response_asked(text: str) -> FactorsAsked:
    """Tell of the left side; ``cbind(a, b)`` is two factors."""
    expression = parse_expression(text, response=True)
    tree = expression.tree
    sides = (tree.successes, tree.failures) if isinstance(tree, Counts) else (tree,)
    return FactorsAsked([_factor(expression, side) for side in sides])


def offsets_asked(texts: Sequence[str]) -> FactorsAsked:
    """Tell of what stands inside ``offset(...)``."""
    expressions = [parse_numeric(text) for text in texts]
    return FactorsAsked([_factor(one, one.tree) for one in expressions])


def columns_asked(names: Sequence[str]) -> FactorsAsked:
    """Tell of columns that are read as they stand: weights, exposures, labels of groups."""
    return FactorsAsked([FactorAsked(name, (name,)) for name in dict.fromkeys(names)])


def _factor(expression: Expression, tree: Tree) -> FactorAsked:
    functions = list(_functions(tree))
    options: dict[str, object] = {}
    if isinstance(tree, Transform):
        options = dict(tree.options)
    elif isinstance(tree, Category):
        options = {"reference": tree.reference}
    columns = tuple(dict.fromkeys(iter_columns(tree)))
    return FactorAsked(expression.text, columns, tuple(functions), any(_written(tree)), options)


def _functions(tree: Tree) -> Iterator[str]:
    for part in iter_parts(tree):
        if isinstance(part, Transform):
            yield part.function
        elif isinstance(part, Category):
            yield "C"


def _written(tree: Tree) -> Iterator[bool]:
    for part in iter_parts(tree):
        yield isinstance(part, Number | Level | Arithmetic | Relation | Negative | Counts)
