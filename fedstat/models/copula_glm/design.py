"""From a formula and public bounds to scored columns: terms of one column each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from fedstat.errors import ModelError
from fedstat.federation.design.formula.expression import parse_expression
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.design.formula.tree import Category, Column, Transform
from fedstat.federation.design.spec import read_terms
from fedstat.federation.tables.columns import LevelValue
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula_glm.moments.columns import ScoredColumn

Described: TypeAlias = Mapping[str, PublishedColumn]
MOST_COUNTS = 2_000
"""Largest count of a Poisson response: means are sums over all."""
TAKEN = "a column, C(x), log(x), sqrt(x) or exp(x)"


def columns_by_client(formula: Formula, clients: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Columns of the data of each institution that takes part; the response is the last of its holder."""
    held = {terms.client: terms.columns for terms in formula.clients}
    held[str(formula.response_client)] = (
        *held.get(str(formula.response_client), ()),
        *formula.response_columns,
    )
    return {client: held[client] for client in clients if client in held}


def score_columns(formula: Formula, described: Described) -> dict[str, tuple[ScoredColumn, ...]]:
    """Describe the columns of the design of each institution, in the order of its columns of the data.

    A ModelError names a term that is more than a function of one column, or has no values within the bounds.
    """
    if not formula.intercept:
        raise ModelError(f"'{formula.text}' leaves out the intercept; drop '- 1' or '0 +'")
    found: dict[str, tuple[ScoredColumn, ...]] = {}
    for terms in formula.clients:
        place = {name: j for j, name in enumerate(terms.columns)}
        own = [
            column
            for term in read_terms(terms.terms, terms.columns)
            for column in _columns_of(term, terms.client, place, described)
        ]
        found[terms.client] = tuple(sorted(own, key=lambda column: column.source))
    return found


def _columns_of(
    term: Term, client: str, place: Mapping[str, int], described: Described
) -> Iterator[ScoredColumn]:
    """Describe the columns of one term."""
    text = ":".join(factor.text for factor in term)
    match [factor.tree for factor in term]:
        case [Column(name=name)] if _numeric(described[name]):
            yield ScoredColumn(term[0].label, text, client, place[name])
        case [Column(name=name)]:
            yield from _levels(term[0].label, text, client, place[name], described[name].levels, None)
        case [Category(column=name, reference=reference, levels=(), coding="Treatment")] if described[
            name
        ].levels:
            levels = described[name].levels
            yield from _levels(term[0].label, text, client, place[name], levels, reference)
        case [Transform(function=function, operand=Column(name=name), options=())] if function.removeprefix(
            "np."
        ) in ("log", "sqrt", "exp"):
            function = function.removeprefix("np.")
            _check_range(text, function, name, described[name])
            yield ScoredColumn(term[0].label, text, client, place[name], function)
        case _:
            raise ModelError(
                f"the term {text!r} has no score that could be released under a budget: a term is {TAKEN}, "
                "C(x) of a column whose bounds list levels. Products, splines, polynomials and standardised "
                "columns take moments of the rows that are not released; make the column where it is held"
            )


def _levels(
    label: str,
    text: str,
    client: str,
    source: int,
    levels: Sequence[LevelValue],
    reference: object,
) -> Iterator[ScoredColumn]:
    first = levels[0] if reference is None else reference
    if first not in levels:
        raise ModelError(f"the term {text!r}: its reference is none of the levels that the bounds list")
    others = [j for j, level in enumerate(levels) if level != first]
    for above, j in enumerate(others, 1):
        yield ScoredColumn(f"{label}[T.{levels[j]}]", text, client, source, level=j, above=above)


def _numeric(column: PublishedColumn) -> bool:
    """Whether a column enters as a number."""
    return column.range is not None or not any(isinstance(level, str | bool) for level in column.levels)


def _check_range(text: str, function: str, name: str, column: PublishedColumn) -> None:
    lowest = column.range[0] if column.range is not None else min(map(float, column.levels))
    if not _numeric(column) or (function == "log" and lowest <= 0.0) or (function == "sqrt" and lowest < 0.0):
        raise ModelError(
            f"the term {text!r} has no value at the lower end of the bounds of '{name}'; narrow the bounds, "
            "or make the column where it is held"
        )


def check_response(formula: Formula, family: str, described: Described) -> None:
    """Require a response that is a column, with bounds that suit the family."""
    if not isinstance(parse_expression(formula.response, response=True).tree, Column):
        raise ModelError(f"response '{formula.response}': expected a column; make it where it is held")
    column = described[formula.response_columns[0]]
    if family == "Binomial" and len(column.levels) != 2:
        raise ModelError(
            f"response '{formula.response}': the binomial family takes two levels, the second the event; "
            f"write {{{formula.response!r}: [0, 1]}} in its bounds"
        )
    if family == "Gaussian" and (column.range is None or len(column.levels) > 0):
        raise ModelError(f"response '{formula.response}': the normal family takes a range (low, high)")
    if family == "Poisson" and (
        not _numeric(column) or min([*(column.range or ())[:1], *map(float, column.levels)]) != 0.0
    ):
        raise ModelError(f"response '{formula.response}': counts begin at 0, as in range(0, 40) or (0, 1000)")
    if family == "Poisson" and column.range is not None and column.range[1] > MOST_COUNTS:
        raise ModelError(
            f"response '{formula.response}': counts of at most {MOST_COUNTS:,}; larger ones count at the end "
            f"of the range (0, {MOST_COUNTS}), or take the normal family for them"
        )
