"""Rules about formulas: what may be computed is judged from a site's public description, never from rows.

A column of the asker's making can single out one person: ``log(exp(z + exp(-1e4 * (age - 41)**2)))`` is z but
for those who are 41, and two fits with and without it tell their responses. A refusal that depends on rows,
such as that of ``log(income - t)``, tells one value by bisection. So a factor is one column, or one function
of one column from a short list, on what the owner has published; then the columns that can ever be made are
few and are known beforehand. High powers are columns of which one row is nearly all, and so are products of
many numbers: a term multiplies functions of different columns, few of which are numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from fedstat.errors import DescriptionError
from fedstat.federation.door import facts
from fedstat.federation.door.state import SiteData
from fedstat.federation.tables.published import PublishedColumn

MOST_DEGREE = 3
"""Of a polynomial, a spline or a product: sums of many powers determine a small group, or are of one row."""
MOST_KNOTS = 20
"""Equidistant ones over a published range."""
LINEAR = frozenset({"center", "scale"})
"""Functions that may stand outside another: the column that they make tells what the inner one does."""
LARGEST_EXPONENT = 700.0
"""exp() of more is no number."""
EVALUATION = "evaluation "
"""Begins the name under which a site notes that it has answered one."""
ALLOW = 'The owner may allow it by the line  formulas = "any"  in policy.toml'


def check_factors(data: SiteData, fact: facts.FactorsAsked) -> None:
    """Require that every factor and term is simple, and defined on all that the site has published.

    Raises
    ------
    DescriptionError
        Names the rule, the site, the factor or term, and the line of the policy that would allow it.
    """
    if data.policy.formulas == "any":
        return
    found = ((factor.text, _problem(data, factor)) for factor in fact.factors)
    of_products = ((text, _problem_of_product(data, factors)) for text, factors in fact.products.items())
    for text, problem in chain(found, of_products):
        if problem:
            raise DescriptionError(
                f"{data.name}: its policy (simple formulas) does not compute '{text}': {problem}. {ALLOW}"
            )


def check_evaluation(data: SiteData, fact: facts.Evaluated) -> None:
    """Let one model be evaluated at a site: between the cuts of two evaluations single rows lie.

    Of another response as well, since coefficients, and with them the cuts, are the asker's. What has left
    before may leave again.

    Raises
    ------
    DescriptionError
        Another one was evaluated before; names the line of the policy that would allow more.
    """
    if data.policy.evaluation == "any":
        return
    this = EVALUATION + hashlib.sha256(np.ascontiguousarray(fact.sums).tobytes()).hexdigest()
    if this in data.account.spent:
        return
    if any(once.startswith(EVALUATION) for once in data.account.spent):
        raise DescriptionError(
            f"{data.name}: its policy (evaluation once) has answered the evaluation of one model, and "
            "answers no other: cuts at other places leave single rows between. The owner may allow more by "
            'the line  evaluation = "any"  in policy.toml'
        )
    data.account.spend(this)


def _problem(data: SiteData, factor: facts.FactorAsked) -> str:
    """Say what is against a factor; nothing where it is allowed."""
    columns = data.published
    absent = [name for name in factor.columns if name not in columns]
    if absent:
        return f"the site publishes no column '{absent[0]}'"
    if factor.written:
        return "a factor is one column or one function of one column, without arithmetic or written numbers"
    if not factor.functions:
        return ""
    (*outer, function), (name,) = factor.functions, factor.columns
    if not set(outer) <= LINEAR:
        return "a function of a function is not on its list, but for center and scale"
    column = columns[name]
    if outer:
        return _standard(column, factor.options) or FUNCTIONS[function.removeprefix("np.")](column, {})
    if function == "C":
        return _coding(column, factor.options)
    if function == facts.COMPARED:
        # Rows that have exactly a number may be one; those on one side of a published knot are not.
        knots = () if factor.options.get("equal") else column.knots
        inside = factor.options["against"] in (*column.levels, *knots)
        return "" if inside else "it is compared with what is no published level or knot"
    if column.kind != "number":
        return f"column '{name}' is published as a category"
    return FUNCTIONS[function.removeprefix("np.")](column, factor.options)


def _problem_of_product(data: SiteData, factors: Sequence[facts.FactorAsked]) -> str:
    """Say what is against a product of allowed factors; nothing where it is allowed."""
    names = [name for factor in factors for name in factor.columns]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        return f"a term holds a column once, and '{twice[0]}' stands in several of its factors"
    many = [factor for factor in factors if _is_number(data, factor)]
    return "" if len(many) <= MOST_DEGREE else f"a term multiplies {MOST_DEGREE} numbers at most"


def _is_number(data: SiteData, factor: facts.FactorAsked) -> bool:
    """Whether a factor may have more than two values: categories are coded by zeros and ones."""
    if facts.COMPARED in factor.functions or "C" in factor.functions:
        return False
    columns = (data.published[name] for name in factor.columns)
    return any(one.kind == "number" and len(one.levels) != 2 for one in columns)


def _coding(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if not column.levels:
        return "its description lists no levels"
    levels = options.get("levels")
    if levels and set(levels) != set(column.levels):  # else a refusal would tell of rows with another level
        return "its levels are not the published ones"
    reference = options.get("reference")
    return "" if reference is None or reference in column.levels else "the reference is no published level"


def _positive(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    inside = column.range is not None and column.range[0] > 0.0
    return "" if inside else "its published range is not above 0"


def _not_negative(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    inside = column.range is not None and column.range[0] >= 0.0
    return "" if inside else "its published range goes below 0"


def _exponent(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    inside = column.range is not None and max(map(abs, column.range)) <= LARGEST_EXPONENT
    return "" if inside else f"its published range goes beyond {LARGEST_EXPONENT:g}"


def _standard(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    return "" if options.get("ddof", 1) in (0, 1) else "ddof is 0 or 1"


def _polynomial(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    degree = options.get("degree", 1)
    return "" if degree <= MOST_DEGREE else f"polynomials have degree {MOST_DEGREE} at most"


def _spline(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if column.range is None or not column.knots:
        return "its description lists no range and knots for splines"
    bounds = (options.get("lower_bound"), options.get("upper_bound"))
    if bounds != column.range or "df" in options or not set(options.get("knots", ())) <= set(column.knots):
        return "lower_bound, upper_bound and knots have to be published ones, and there is no df"
    return _polynomial(column, options)


def _equidistant(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if column.range is None:
        return "its description lists no range for splines"
    if options.get("ends") != column.range:
        return "lower_bound and upper_bound have to be those of the published range"
    return (
        "" if options.get("knots", MOST_KNOTS) <= MOST_KNOTS else f"splines have {MOST_KNOTS} knots at most"
    )


FUNCTIONS: Mapping[str, Callable[[PublishedColumn, Mapping[str, Any]], str]] = {
    "log": _positive,
    "sqrt": _not_negative,
    "exp": _exponent,
    "center": _standard,
    "scale": _standard,
    "poly": _polynomial,
    "bs": _spline,
    "cr": _spline,
    "cc": _spline,
    "bbs": _equidistant,
}
"""What a function of a column asks of the column's description; what is not here is not computed."""
