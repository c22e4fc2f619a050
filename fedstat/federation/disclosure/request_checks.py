"""Checks of a request before any row is read: kinds of release, masks, limits and formulas."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.audit.release_counts import BITS_PER_NUMBER, numbers_per_entity
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.rules import toml_line
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import COUNTED, ArrayDeclaration, ArrayKind, Request, Step
from fedstat.federation.tables.published import PublishedColumn
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Rules that follow from a question and its declarations: refusals before a row is read, counts after.

PROTECTION_BY_KIND: Mapping[str, str] = {
    "sealed": "It is hidden on its way, and the product of columns that it serves is released. ",
    "masked share": "It is random by itself, and the sum with the other share is released. ",
}
MASKED_NOTE = "It is hidden in a masked sum, and the sum is released. "
DISCLOSURE_BY_KIND: Mapping[ArrayKind, str] = {
    "per entity": "A number for each entity is an equation about its row: from linear predictors of as many "
    "rounds as there are columns the rows of all institutions follow, masked or not, and from residuals the "
    "responses. ",
    "raw columns": "They are the values themselves. ",
    "sketch": "Whoever has the seed of a sketch solves it for the columns. ",
}
"""What follows from a kind of values, for who asks why it is refused."""
PER_ENTITY: ArrayKind = "per entity"
PER_ENTITY_EXAMPLE = toml_line("per_entity", 40)
"""What an owner might write; a usual fit takes fewer."""
UNMASKABLE_KINDS: tuple[ArrayKind, ...] = (PER_ENTITY,)
"""Kinds that a masked sum does not hide: entity by entity, sums of many rounds give each part away."""


ArrayRequest: TypeAlias = tuple[Policy, Request, Step, ArrayDeclaration, str]
"""A policy, what is asked, and one declared array of the answer with its place in words."""
NO_BUDGET_MESSAGE = (
    "Ask for what leaves with noise, leave the site out, or have the owner take [privacy] out of the policy"
)


def _is_masked(request: Request, declared: ArrayDeclaration) -> bool:
    return declared.maskable and request.masked is not None


def _check_kind(question: ArrayRequest) -> str:
    policy, request, _, declared, where = question
    kind = declared.kind
    unhidden = kind in UNMASKABLE_KINDS
    if kind not in policy.refused_kinds or (_is_masked(request, declared) and not unhidden):
        return ""
    remedy = "Fit with masked=True, or ask" if declared.maskable and not unhidden else "Ask"
    line = toml_line("refused_kinds", policy.refused_kinds - {kind})
    return (
        f"does not let '{kind}' leave: {where}. {DISCLOSURE_BY_KIND.get(kind, '')}{remedy} for less, leave "
        f"the site out, or have the owner allow the kind by the line  {line}  in policy.toml"
    )


def _check_per_entity(question: ArrayRequest) -> str:
    policy, _, _, declared, where = question
    if declared.kind != PER_ENTITY or policy.per_entity != 0 or PER_ENTITY in policy.refused_kinds:
        return ""
    return (
        f"does not let numbers for each entity leave: {where}. {DISCLOSURE_BY_KIND[PER_ENTITY]}Ask for less, "
        "leave the site out, or have the owner allow so many of them, over all analyses, by the line  "
        f"{PER_ENTITY_EXAMPLE}  in policy.toml"
    )


def _check_masked(question: ArrayRequest) -> str:
    policy, request, _, declared, where = question
    # Noise protects each site's part by itself.
    if not policy.masked_only or not declared.maskable or declared.noisy or _is_masked(request, declared):
        return ""
    return (
        f"lets {where} leave in a masked sum only; fit with masked=True, which hides a site's part where "
        "there are three sites or more, or have the owner allow it in clear by the line  "
        f"{toml_line('masked_only', False)}  in policy.toml"
    )


def _check_accounted(question: ArrayRequest) -> str:
    policy, request, step, declared, where = question
    if policy.privacy is None or step.public or declared.noisy or declared.unpaid:
        return ""
    why = MASKED_NOTE if _is_masked(request, declared) else PROTECTION_BY_KIND.get(declared.kind, "")
    return (
        f"lets nothing that depends on rows leave but with noise, charged to the budget: not {where}. "
        f"{why}{NO_BUDGET_MESSAGE}"
    )


REQUEST_RULES: Mapping[str, Callable[[ArrayRequest], str]] = {
    "refused kinds": _check_kind,
    "per entity": _check_per_entity,
    "masked only": _check_masked,
    "privacy budget": _check_accounted,
}
"""Rules that hold for one array of an answer, before it is computed."""


def refusals(site: str, policy: Policy, request: Request, step: Step) -> Iterator[PolicyError]:
    """List what in an answer the policy does not let leave, before anything is computed."""
    if policy.families is not None and request.family not in policy.families:
        yield PolicyError.of_rule(
            "families",
            site,
            f"allows {sorted(policy.families)}, not '{request.family}', which asks for step "
            f"'{request.step}'. The "
            "owner may add it to the list",
        )
    for name, declared in step.takes.items():
        if not declared.weighs or name not in request.arrays:
            continue
        # With weights of its own making, whoever asks singles out rows in any sum.
        comes = f"step '{request.step}' comes with {declared.weighs} of each row. The owner may allow"
        if declared.kind in policy.refused_kinds:
            line = toml_line("refused_kinds", policy.refused_kinds - {declared.kind})
            why = f"takes no '{declared.kind}' either: {comes} the kind by the line  {line}  in policy.toml"
            yield PolicyError.of_rule("refused kinds", site, why)
        elif declared.kind == PER_ENTITY and not policy.per_entity:
            why = f"{comes} them by the line  {PER_ENTITY_EXAMPLE}  in policy.toml"
            yield PolicyError.of_rule("per entity", site, f"takes no numbers for each entity either: {why}")
    for name, declared in step.given.items():
        where = f"array '{name}' of step '{request.step}' ({declared.what})"
        for rule, check in REQUEST_RULES.items():
            if problem := check((policy, request, step, declared, where)):
                yield PolicyError.of_rule(rule, site, problem, name)
    if policy.privacy is not None and not step.public and not step.given:
        # Whether it is answered at all may depend on rows.
        yield PolicyError.of_rule(
            "privacy budget",
            site,
            f"lets no step read rows whose answer is not charged to the budget, as that of step "
            f"'{request.step}' "
            f"is not. {NO_BUDGET_MESSAGE}",
        )


def rules_in_force(policy: Policy, declared: ArrayDeclaration, n_masked: int = 0) -> Iterator[str]:
    """List the rules that an array meets at a site, with their limits.

    Parameters
    ----------
    n_masked : int
        Sites of the masked sum that the array enters; 0 where it comes in clear.
    """
    if policy.families is not None:
        yield "families"
    if policy.refused_kinds and (not n_masked or declared.kind in UNMASKABLE_KINDS):
        yield "refused kinds"
    if policy.per_entity != "any" and declared.kind == PER_ENTITY:
        yield f"per entity {policy.per_entity}"
    if policy.masked_only and declared.maskable and not declared.noisy:
        yield "masked only"
    if n_masked and not hides(n_masked):
        yield f"two sites: {policy.two_sites}"
    if n_masked and policy.quorum:
        yield f"quorum {policy.quorum}"
    if n_masked and policy.apart > 1:
        yield f"apart {policy.apart}"
    if declared.kind in COUNTED:
        yield f"minimum count {policy.min_count}"
    if policy.privacy is not None:
        yield "privacy budget"


def check_request(site: str, policy: Policy, request: Request, step: Step) -> None:
    """Hold a question against the policy, before anything is computed.

    Raises
    ------
    PolicyError
        Names site, rule, array and remedy.
    """
    for refusal in refusals(site, policy, request, step):
        raise refusal


def check_mask(site: str, policy: Policy, n_sites: int, n_pinned: int = 0) -> None:
    """Require that a masked sum over so many sites, of those that are pinned, is allowed.

    Raises
    ------
    DescriptionError
        They are fewer than the owner wants; names the line of the policy that would allow it.
    """
    share = isinstance(policy.quorum, float)
    # 0.55 of 100 are 55, and 55.000000000000007 in binary
    least = math.ceil(round(policy.quorum * n_pinned, 9)) if share else policy.quorum
    if n_sites < least:
        of = f" of the {n_pinned} that are pinned" if share else ""
        raise DescriptionError.of_rule(
            "quorum",
            site,
            f"wants masked sums over at least {least} institutions{of}, and this one is over {n_sites}. Wait "
            f"for the others, or have the owner lower  quorum = {policy.quorum}  in policy.toml",
        )
    if policy.two_sites == "refuse" and not hides(n_sites):
        raise DescriptionError.of_rule(
            "two sites",
            site,
            f'refuses. {TWO_SITES} The owner may allow it by the line  two_sites = "warn"  in policy.toml',
        )


def check_columns(site: str, policy: Policy, request: Request, columns: int) -> None:
    """Require that no more of the site's columns are in one model than its owner allows.

    Raises
    ------
    PolicyError
        Names site, rule, step and remedy.
    """
    if policy.max_columns is not None and columns > policy.max_columns:
        raise PolicyError.of_rule(
            "maximum columns",
            site,
            f"allows {policy.max_columns} design columns of it in one model; step '{request.step}' opens "
            f"{columns}. Use fewer of its terms, or have the owner raise max_columns",
        )


def check_counts(
    site: str, policy: Policy, request: Request, step: Step, names: Iterable[str], entities: int
) -> None:
    """Require enough entities behind an answer.

    Parameters
    ----------
    names : iterable of str
        Arrays of the answer, and ``"text"`` where it has one.

    Raises
    ------
    PolicyError
        Names site, rule, array and remedy.
    """
    given = step.given
    for name in names:
        if given[name].kind in COUNTED and entities < policy.min_count:
            raise PolicyError.of_rule(
                "minimum count",
                site,
                f"wants at least {policy.min_count} entities behind array '{name}' of step '{request.step}'; "
                f"there are {entities}. Leave the site out, or use columns that more of its entities have",
            )


def check_per_entity_numbers(
    site: str, policy: Policy, step: Step, arrays: Mapping[str, Array], before: int
) -> None:
    """Hold the numbers for each entity that leave now, with those that have left, against the policy.

    Raises
    ------
    DescriptionError
        They are too many; names the line of the policy that would allow more.
    """
    now = sum(
        numbers_per_entity(array.shape)
        for name, array in arrays.items()
        if step.given[name].kind == PER_ENTITY
    )
    if policy.per_entity == "any" or not now or before + now <= policy.per_entity:
        return
    line = toml_line("per_entity", max(2 * policy.per_entity, before + 40))
    raise DescriptionError.of_rule(
        "per entity",
        site,
        f"lets {policy.per_entity} numbers for each entity leave over all analyses, and {before} have left: "
        f"{before * BITS_PER_NUMBER:,} bits about each. More would narrow the rows down further, and as many "
        f"as there are columns give them away. The owner may allow it by the line  {line}  in policy.toml",
    )


# ----------------------------------------------------------------------------------------------------
# Rules about formulas: what may be computed is judged from a site's public description, never from rows.
#
# A column of the asker's making can single out one person: ``log(exp(z + exp(-1e4 * (age - 41)**2)))`` is z
# but for those who are 41, and two fits with and without it tell their responses. A refusal that depends on
# rows, such as that of ``log(income - t)``, tells one value by bisection. So a factor is one column, or one
# function of one column from a short list, on what the owner has published; then the columns that can ever
# be made are few and are known beforehand. High powers are columns of which one row is nearly all, and so
# are products of many numbers: a term multiplies functions of different columns, few of which are numbers.

MAX_DEGREE = 3
"""Of a polynomial, a spline or a product: sums of many powers determine a small group, or are of one row."""
MAX_KNOTS = 20
"""Equidistant ones over a published range."""
LINEAR_TRANSFORMS = frozenset({"center", "scale"})
"""Functions that may stand outside another: the column that they make tells what the inner one does."""
MAX_EXP_ARGUMENT = 700.0
"""exp() of more is no number."""
EVALUATION_KEY = "evaluation "
"""Begins the name under which a site notes that it has answered one."""
ALLOW_ANY_HINT = 'The owner may allow it by the line  formulas = "any"  in policy.toml'


def check_factors(data: SiteData, state: State, fact: facts.FactorsRequested) -> None:
    """Require that every factor and term is simple, and defined on all that the site has published.

    Raises
    ------
    DescriptionError
        Names the rule, the site, the factor or term, and the line of the policy that would allow it.
    """
    if data.policy.formulas == "any":
        return
    absent = [name for factor in fact.factors for name in factor.columns if name not in data.published]
    if absent:
        raise DescriptionError.of_rule(
            "simple formulas",
            data.name,
            f"computes published columns only, and the site publishes no column '{absent[0]}'. Ask the owner "
            "to publish it in columns.toml, or leave it out",
        )
    found = ((factor.text, _factor_problem(data, factor)) for factor in fact.factors)
    of_products = ((text, _product_problem(data, factors)) for text, factors in fact.products.items())
    for text, problem in chain(found, of_products):
        if problem:
            raise DescriptionError.of_rule(
                "simple formulas", data.name, f"does not compute '{text}': {problem}. {ALLOW_ANY_HINT}"
            )


def check_evaluation(data: SiteData, state: State, fact: facts.ModelEvaluation) -> None:
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
    this = EVALUATION_KEY + hashlib.sha256(np.ascontiguousarray(fact.sums).tobytes()).hexdigest()
    if this in data.site_ledger.spent:
        return
    if any(once.startswith(EVALUATION_KEY) for once in data.site_ledger.spent):
        raise DescriptionError.of_rule(
            "evaluation once",
            data.name,
            "has answered the evaluation of one model, and answers no other: cuts at other places leave "
            'single rows between. The owner may allow more by the line  evaluation = "any"  in policy.toml',
        )
    data.site_ledger.spend(this)


def _factor_problem(data: SiteData, factor: facts.FormulaFactor) -> str:
    """Say what is against a factor; nothing where it is allowed."""
    columns = data.published
    if factor.written:
        return "a factor is one column or one function of one column, without arithmetic or written numbers"
    if not factor.functions:
        return ""
    (*outer, function), (name,) = factor.functions, factor.columns
    if not set(outer) <= LINEAR_TRANSFORMS:
        return "a function of a function is not on its list, but for center and scale"
    column = columns[name]
    if outer:
        return _check_standardization(column, factor.options) or FUNCTION_CHECKS[
            function.removeprefix("np.")
        ](column, {})
    if function == "C":
        return _check_coding(column, factor.options)
    if function == facts.COMPARISON:
        # Rows that have exactly a number may be one; those on one side of a published knot are not.
        knots = () if factor.options.get("equal") else column.knots
        inside = factor.options["against"] in (*column.levels, *knots)
        return "" if inside else "it is compared with what is no published level or knot"
    if column.kind != "number":
        return f"column '{name}' is published as a category"
    return FUNCTION_CHECKS[function.removeprefix("np.")](column, factor.options)


def _product_problem(data: SiteData, factors: Sequence[facts.FormulaFactor]) -> str:
    """Say what is against a product of allowed factors; nothing where it is allowed."""
    names = [name for factor in factors for name in factor.columns]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        return f"a term holds a column once, and '{twice[0]}' stands in several of its factors"
    many = [factor for factor in factors if _is_number(data, factor)]
    return "" if len(many) <= MAX_DEGREE else f"a term multiplies {MAX_DEGREE} numbers at most"


def _is_number(data: SiteData, factor: facts.FormulaFactor) -> bool:
    """Whether a factor may have more than two values: categories are coded by zeros and ones."""
    if facts.COMPARISON in factor.functions or "C" in factor.functions:
        return False
    columns = (data.published[name] for name in factor.columns)
    return any(one.kind == "number" and len(one.levels) != 2 for one in columns)


def _check_coding(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if not column.levels:
        return "its description lists no levels"
    levels = options.get("levels")
    if levels and set(levels) != set(column.levels):  # else a refusal would tell of rows with another level
        return "its levels are not the published ones"
    reference = options.get("reference")
    return "" if reference is None or reference in column.levels else "the reference is no published level"


def _check_positive(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    inside = column.range is not None and column.range[0] > 0.0
    return "" if inside else "its published range is not above 0"


def _check_nonnegative(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    inside = column.range is not None and column.range[0] >= 0.0
    return "" if inside else "its published range goes below 0"


def _check_exponent(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    inside = column.range is not None and max(map(abs, column.range)) <= MAX_EXP_ARGUMENT
    return "" if inside else f"its published range goes beyond {MAX_EXP_ARGUMENT:g}"


def _check_standardization(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    return "" if options.get("ddof", 1) in (0, 1) else "ddof is 0 or 1"


def _check_polynomial(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    degree = options.get("degree", 1)
    return "" if degree <= MAX_DEGREE else f"polynomials have degree {MAX_DEGREE} at most"


def _check_spline(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if column.range is None or not column.knots:
        return "its description lists no range and knots for splines"
    bounds = (options.get("lower_bound"), options.get("upper_bound"))
    if bounds != column.range or "df" in options or not set(options.get("knots", ())) <= set(column.knots):
        return "lower_bound, upper_bound and knots have to be published ones, and there is no df"
    return _check_polynomial(column, options)


def _check_equidistant(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if column.range is None:
        return "its description lists no range for splines"
    if options.get("ends") != column.range:
        return "lower_bound and upper_bound have to be those of the published range"
    return "" if options.get("knots", MAX_KNOTS) <= MAX_KNOTS else f"splines have {MAX_KNOTS} knots at most"


FUNCTION_CHECKS: Mapping[str, Callable[[PublishedColumn, Mapping[str, Any]], str]] = {
    "log": _check_positive,
    "sqrt": _check_nonnegative,
    "exp": _check_exponent,
    "center": _check_standardization,
    "scale": _check_standardization,
    "poly": _check_polynomial,
    "bs": _check_spline,
    "cr": _check_spline,
    "cc": _check_spline,
    "bbs": _check_equidistant,
}
"""What a function of a column asks of the column's description; what is not here is not computed."""
