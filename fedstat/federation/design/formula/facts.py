"""Facts of a formula for the disclosure checks: what each factor computes, and from which columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedstat.federation.design.formula.expression import parse_expression, parse_numeric, parse_subset
from fedstat.federation.design.formula.syntax_tree import (
    Arithmetic,
    Category,
    Column,
    Counts,
    Expression,
    Level,
    Negative,
    Number,
    Relation,
    Survival,
    Transform,
    Tree,
    iter_columns,
    iter_parts,
)
from fedstat.federation.design.formula.terms import Term, term_text
from fedstat.federation.disclosure.facts import COMPARISON, FactorsRequested, FormulaFactor

WRITTEN = (Number, Level, Arithmetic, Relation, Negative, Counts, Survival)
"""Parts of a factor by which it is more than named functions of a column."""
POWERS = (2.0, 3.0)


def term_facts(terms: Sequence[Term]) -> FactorsRequested:
    """Tell of the factors of the right side, and of the products of several."""
    parts = {factor.text: _parts(factor) for term in terms for factor in term}
    found = {part.text: part for several in parts.values() for part in several}
    products = {
        term_text(term): tuple(part for factor in term for part in parts[factor.text]) for term in terms
    }
    return FactorsRequested(
        list(found.values()), {text: term for text, term in products.items() if len(term) > 1}
    )


def _parts(factor: Expression) -> tuple[FormulaFactor, ...]:
    """Tell of a factor; of ``I(a * b)`` as of the product ``a:b``, of ``I(a ** 2)`` as of a polynomial."""
    match factor.tree:
        case Arithmetic(symbol="*", left=Column(name=one), right=Column(name=other)):
            return tuple(FormulaFactor(name, (name,)) for name in (one, other))
        case Arithmetic(symbol="**", left=Column(name=name), right=Number(value=power)) if power in POWERS:
            return (FormulaFactor(factor.text, (name,), ("poly",), options={"degree": int(power)}),)
    return (_factor(factor, factor.tree),)


def response_facts(text: str) -> FactorsRequested:
    """Tell of the left side; ``cbind(a, b)``, ``cbind(a, n - a)``, times and event are several factors."""
    expression = parse_expression(text, response=True)
    sides: tuple[Tree, ...] = (expression.tree,)
    match expression.tree:
        case Counts(successes=events, failures=Arithmetic(symbol="-", left=trials, right=same)) if (
            events == same
        ):
            sides = (events, trials)
        case Counts(successes=events, failures=failures):
            sides = (events, failures)
        case Survival(times=times, event=event):
            sides = (*times, event)
    return FactorsRequested([_factor(expression, side) for side in sides])


def subset_facts(texts: Sequence[str]) -> FactorsRequested:
    """Report the comparisons by which rows are selected."""
    expressions = [one for text in texts for one in parse_subset(text)]
    return FactorsRequested([_factor(one, one.tree) for one in expressions])


def offset_facts(texts: Sequence[str]) -> FactorsRequested:
    """Return the columns and functions of the offset."""
    expressions = [parse_numeric(text) for text in texts]
    return FactorsRequested([_factor(one, one.tree) for one in expressions])


def column_facts(names: Sequence[str], labels: Sequence[str] = ()) -> FactorsRequested:
    """Tell of columns that are read as they stand: weights and exposures, and `labels` of groups."""
    factors = [FormulaFactor(name, (name,)) for name in dict.fromkeys(names)]
    return FactorsRequested(factors + [FormulaFactor(name, (name,), label=True) for name in labels])


def _factor(expression: Expression, tree: Tree) -> FormulaFactor:
    match tree:
        case Relation(right=Negative(operand=Number(value=size))):
            return _factor(expression, replace(tree, right=Number(-size)))
        case Relation(
            symbol=symbol, left=Column(name=name), right=Number(value=against) | Level(value=against)
        ):
            # A cut at a published level is one of few; a cut at any other number could be next to one row.
            compared = {"against": against, "equal": symbol in ("==", "!="), "above": symbol in (">", "<=")}
            return FormulaFactor(expression.text, (name,), (COMPARISON,), options=compared)
    options: dict[str, object] = {}
    if isinstance(tree, Transform):
        options = dict(tree.options)
    elif isinstance(tree, Category):
        options = {"reference": tree.reference, "levels": tree.levels}
    columns, parts = tuple(dict.fromkeys(iter_columns(tree))), list(iter_parts(tree))
    functions = [part.function if isinstance(part, Transform) else "C" for part in parts if _calls(part)]
    written = any(isinstance(part, WRITTEN) for part in parts)
    return FormulaFactor(expression.text, columns, tuple(functions), written, options)


def _calls(part: Tree) -> bool:
    return isinstance(part, Transform | Category)
