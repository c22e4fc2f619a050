"""Checks of a request before any row is read: kinds of release, masks, limits, formulas, order of the steps.

A protocol sends its steps in an order. Another order gives values that no fit requests: scores at residuals
of the client's choice, one after the other, or sums by a second division without the fit between. A family
declares for each step which of its steps may come directly before it. Steps that begin something, and those
that read nothing, may come at any time, since a fit may be interrupted and another one begun.

The values that a site opens for a secure product, together with its random table, are its columns. The other
site receives the opened values, and the dealer knows the table. Therefore the dealer is a third party, and
not the coordinator, which transfers the messages, unless the owner trusts the coordinator with this.

Values that all sites must receive alike, such as means and deviations for standardizing, are bound into the
masks of their sums. Otherwise a coordinator could send all sites but one a scale at which their parts vanish,
and learn the part of that one. With bound masks, such a sum does not cancel.

A check raises a PolicyError, or a DescriptionError where only the request and the public description decide.
It names the rule, the site, and the line of the policy or what else would allow the request.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from fedstat.errors import DescriptionError, PolicyError, Remedy, SecurityError
from fedstat.federation.audit.event_log import AnswerRecord
from fedstat.federation.crypto.keys import encode_parts
from fedstat.federation.crypto.masks import TWO_SITES, WIDE, Masker, encoding_of, hides
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.rules import toml_line
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import COUNTED, ArrayDeclaration, ArrayKind, Request, Step
from fedstat.federation.tables.published import PublishedColumn
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Rules that follow from a request and its declarations: refusals before a row is read, counts after.

PROTECTION_BY_KIND: Mapping[str, str] = {
    "sealed": "It is encrypted for another site, and the product of columns is released. ",
    "masked share": "It is random alone, and the sum with the other share is released. ",
}
MASKED_NOTE = "It is part of a masked sum, and the sum is released. "
DISCLOSURE_BY_KIND: Mapping[ArrayKind, str] = {
    "per entity": "Each number is an equation about the row of its entity. Linear predictors from as many "
    "rounds as there are columns determine the rows of all sites, masked or not; residuals determine the "
    "responses. ",
    "raw columns": "They are the values themselves. ",
    "sketch": "A party with the seed of a sketch can solve it for the columns. ",
}
"""Consequence of releasing a kind of values, for the analyst whose request is refused."""
PER_ENTITY: ArrayKind = "per entity"
PER_ENTITY_EXAMPLE = toml_line("per_entity", 40)
"""Value that an owner might write; a usual fit needs less."""
UNMASKABLE_KINDS: tuple[ArrayKind, ...] = (PER_ENTITY,)
"""Kinds that a masked sum does not hide: entity by entity, sums of many rounds reveal each part."""


ArrayRequest: TypeAlias = tuple[Policy, Request, Step, ArrayDeclaration, str]
"""A policy, the request, and one declared array of the reply with its place in words."""
NO_BUDGET_MESSAGE = (
    "Request values that are released with noise, leave the site out, or have the owner remove [privacy] "
    "from the policy"
)


def _is_masked(request: Request, declared: ArrayDeclaration) -> bool:
    return declared.maskable and request.masked is not None


Problem: TypeAlias = tuple[str, Remedy | None] | None
"""What a policy does not allow, and what helps; None if it allows all."""
ALLOW_KIND = "leave the site out, or have the owner allow the kind with  {line}  in policy.toml"


def _check_kind(question: ArrayRequest) -> Problem:
    policy, request, _, declared, where = question
    kind = declared.kind
    unhidden = kind in UNMASKABLE_KINDS
    if kind not in policy.refused_kinds or (_is_masked(request, declared) and not unhidden):
        return None
    if declared.optional and kind == "sealed":  # the site leaves it out
        return None
    allowed = policy.refused_kinds - {kind}
    if declared.maskable and not unhidden:
        remedy = Remedy(
            "fit(..., masked=True)", f"Fit with {{arguments}}, or reduce the request, {ALLOW_KIND}"
        )
    elif request.step == "fit_alone":  # which a fit over rows can leave out
        remedy = Remedy("fit(..., local=False)", f"Fit with {{arguments}}, {ALLOW_KIND}")
    else:
        remedy = Remedy("Policy(refused_kinds=frozenset({kinds}))", f"Reduce the request, {ALLOW_KIND}")
    remedy = remedy.filled(kinds=sorted(allowed), line=toml_line("refused_kinds", allowed))
    why = f"does not release '{kind}': {where}. {DISCLOSURE_BY_KIND.get(kind, '')}"
    return why.rstrip(". "), remedy


def _check_per_entity(question: ArrayRequest) -> Problem:
    policy, _, _, declared, where = question
    if declared.kind != PER_ENTITY or policy.per_entity != 0 or PER_ENTITY in policy.refused_kinds:
        return None
    remedy = Remedy(
        "Policy(per_entity='any')",
        "Reduce the request, leave the site out, or have the owner allow a number of them, over all "
        f"analyses, with  {PER_ENTITY_EXAMPLE}  in policy.toml",
    )
    why = f"does not release numbers for each entity: {where}. {DISCLOSURE_BY_KIND[PER_ENTITY]}"
    return why.rstrip(". "), remedy


def _check_masked(question: ArrayRequest) -> Problem:
    policy, request, _, declared, where = question
    # Noise alone protects each site's part.
    if not policy.masked_only or not declared.maskable or declared.noisy or _is_masked(request, declared):
        return None
    remedy = Remedy(
        "fit(..., masked=True)",
        "Fit with {arguments}, which hides a site's part among three sites or more, or have the owner allow "
        f"it unmasked with  {toml_line('masked_only', False)}  in policy.toml",
    )
    return f"releases {where} only in a masked sum", remedy


def _check_accounted(question: ArrayRequest) -> Problem:
    policy, request, step, declared, where = question
    unpaid = declared.unpaid and (policy.exact != "none" or declared.kind == "sealed")
    if policy.privacy is None or step.public or declared.noisy or unpaid:
        return None
    if declared.unpaid:
        return (
            f"releases nothing without noise: not {where}. Private analyses of sites with different rows "
            f"need no such release. The owner can allow it with  {toml_line('exact', 'presence')}  in "
            "policy.toml"
        ), None
    why = MASKED_NOTE if _is_masked(request, declared) else PROTECTION_BY_KIND.get(declared.kind, "")
    return (
        f"releases values that depend on rows only with noise, charged to the budget: not {where}. "
        f"{why}{NO_BUDGET_MESSAGE}"
    ), None


REQUEST_RULES: Mapping[str, Callable[[ArrayRequest], Problem]] = {
    "refused kinds": _check_kind,
    "per entity": _check_per_entity,
    "masked only": _check_masked,
    "privacy budget": _check_accounted,
}
"""Rules for one array of a reply, before it is computed."""


CHOICES: Mapping[str, tuple[str, Callable[[Policy], bool], str, Remedy]] = {
    "batches": (
        "largest share",
        lambda policy: policy.max_share < 1.0,
        "releases no steps over batches of rows: each is a sum over a few rows, which the seed selects",
        Remedy(
            "fit(..., batch_size=None)",
            f"Fit with {{arguments}}; the owner can allow batches with  {toml_line('max_share', 1.0)}  in "
            "policy.toml",
        ),
    ),
    "start values": (
        "differencing",
        lambda policy: policy.remember == "all",
        "starts an iteration at zeros only: sums at start values of the analyst's choice differ by single "
        "rows",
        Remedy(
            "fit(..., init=None)",
            f"Fit without init; the owner can allow them with  {toml_line('remember', 'rows')}  in "
            "policy.toml",
        ),
    ),
}
"""For what a request chooses: the rule, whether a policy accepts zeros only, the refusal, and what helps."""


def refusals(site: str, policy: Policy, request: Request, step: Step) -> Iterator[PolicyError]:
    """List what in a reply the policy does not allow, before anything is computed."""
    if policy.families is not None and request.family not in policy.families:
        yield PolicyError.of_rule(
            "families",
            site,
            f"allows {sorted(policy.families)}, not '{request.family}' (step '{request.step}'). "
            "The owner can add it to the list",
        )
    for name, declared in step.takes.items():
        if not declared.weighs or name not in request.arrays:
            continue
        # With weights of its choice, a client can single out rows in any sum.
        comes = f"step '{request.step}' comes with {declared.weighs} of each row. The owner can allow"
        if declared.kind in policy.refused_kinds:
            line = toml_line("refused_kinds", policy.refused_kinds - {declared.kind})
            why = f"accepts no '{declared.kind}' either: {comes} the kind with  {line}  in policy.toml"
            yield PolicyError.of_rule("refused kinds", site, why)
        elif declared.kind == PER_ENTITY and not policy.per_entity:
            why = f"{comes} them with  {PER_ENTITY_EXAMPLE}  in policy.toml"
            yield PolicyError.of_rule("per entity", site, f"accepts no numbers for each entity either: {why}")
    for name, declared in step.takes.items():
        if declared.chooses and name in request.arrays and request.arrays[name].any():
            rule, zeros_only, why, helps = CHOICES[declared.chooses]
            if zeros_only(policy):
                yield PolicyError.of_rule(rule, site, why, remedy=helps)
    for name, declared in step.given.items():
        where = f"array '{name}' of step '{request.step}' ({declared.what})"
        for rule, check in REQUEST_RULES.items():
            if problem := check((policy, request, step, declared, where)):
                why, remedy = problem
                yield PolicyError.of_rule(rule, site, why, name, remedy)
    if policy.privacy is not None and not step.public and not step.given:
        # Whether there is a reply at all may depend on rows.
        yield PolicyError.of_rule(
            "privacy budget",
            site,
            "allows a step to read rows only if its reply is charged to the budget; that of step "
            f"'{request.step}' is not. {NO_BUDGET_MESSAGE}",
        )


def rules_in_force(policy: Policy, declared: ArrayDeclaration, n_masked: int = 0) -> Iterator[str]:
    """List the rules for an array at a site, with their limits.

    Parameters
    ----------
    n_masked : int
        Number of sites in the masked sum of the array; 0 if it is not masked.
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


def check_mask(site: str, policy: Policy, n_sites: int, n_pinned: int = 0) -> None:
    """Require that the policy allows a masked sum over this number of sites, among the pinned ones."""
    share = isinstance(policy.quorum, float)
    # 0.55 of 100 are 55, and 55.000000000000007 in binary
    least = math.ceil(round(policy.quorum * n_pinned, 9)) if share else policy.quorum
    if n_sites < least:
        of = f" of the {n_pinned} that are pinned" if share else ""
        raise DescriptionError.of_rule(
            "quorum",
            site,
            f"requires at least {least} sites{of} in a masked sum, and this one has {n_sites}. Wait "
            f"for the others, or have the owner lower  quorum = {policy.quorum}  in policy.toml",
        )
    if policy.two_sites == "refuse" and not hides(n_sites):
        raise DescriptionError.of_rule(
            "two sites",
            site,
            f"refuses the sum. {TWO_SITES.rstrip('.')}",
            remedy=Remedy(
                "Policy(two_sites='warn')", 'The owner can allow it with  two_sites = "warn"  in policy.toml'
            ),
        )


def check_columns(site: str, policy: Policy, request: Request, columns: int) -> None:
    """Require that one model has no more of the site's columns than its owner allows."""
    if policy.max_columns is not None and columns > policy.max_columns:
        raise PolicyError.of_rule(
            "maximum columns",
            site,
            f"allows {policy.max_columns} of its design columns in one model; step '{request.step}' opens "
            f"{columns}",
            remedy=Remedy(
                "Policy(max_columns={columns})", "Use fewer of its terms, or have the owner raise max_columns"
            ).filled(columns=columns),
        )


def check_counts(
    site: str, policy: Policy, request: Request, step: Step, names: Iterable[str], entities: int
) -> None:
    """Require enough entities behind a reply.

    Parameters
    ----------
    names : iterable of str
        Arrays of the reply, and ``"text"`` if it has one.
    """
    for name in names:
        if step.given[name].kind in COUNTED and entities < policy.min_count:
            raise PolicyError.of_rule(
                "minimum count",
                site,
                f"requires at least {policy.min_count} entities behind array '{name}' of step "
                f"'{request.step}'; there are {entities}. Leave the site out, or use columns with values for "
                "more of its entities",
            )


# ----------------------------------------------------------------------------------------------------
# Rules about formulas: the public description of a site decides what may be computed, and never its rows.
#
# A column of the analyst's choice can single out one person: ``log(exp(z + exp(-1e4 * (age - 41)**2)))`` is z
# except for persons of age 41, and two fits with and without it reveal their responses. A refusal that
# depends on rows, such as that of ``log(income - t)``, reveals one value by bisection. So a factor is one
# column, or one function of one column from a short list, defined on all published values. Then the possible
# columns are few and known in advance. In a high power of a column, one row is nearly all of it, and the same
# holds for products of many numbers: a term multiplies functions of different columns, few of which are
# numbers.

MAX_DEGREE = 3
"""Highest degree of a polynomial, a spline or a product: sums of many powers determine small groups."""
MAX_KNOTS = 20
"""Largest number of equidistant knots over a published range."""
LINEAR_TRANSFORMS = frozenset({"center", "scale"})
"""Functions allowed outside another one: their column reveals what the inner one does."""
MAX_EXP_ARGUMENT = 700.0
"""Largest argument of exp() with a finite result."""


@dataclass(frozen=True, slots=True)
class AnsweredEvaluation(AnswerRecord):
    """Digest of the sums of a model that was evaluated."""

    digest: str


ALLOW_ANY_HINT = 'The owner can allow it with  formulas = "any"  in policy.toml'


def check_factors(data: SiteData, state: State, fact: facts.FactorsRequested) -> None:
    """Require that every factor and term is simple, and defined on all that the site has published."""
    if data.policy.formulas == "any":
        return
    absent = [name for factor in fact.factors for name in factor.columns if name not in data.published]
    if absent:
        raise DescriptionError.of_rule(
            "simple formulas",
            data.name,
            f"computes published columns only, and column '{absent[0]}' is not published",
            remedy=Remedy(
                "fedstat site describe FOLDER",
                "Ask the owner to publish it in columns.toml, as section {section} ('{call}' proposes one), "
                "or leave it out",
            ).filled(section=section_of(absent[0])),
        )
    for factor in fact.factors:
        if lacking := _lacking_description(data, factor):
            raise DescriptionError.of_rule(
                "simple formulas",
                data.name,
                f"does not compute '{factor.text}': column '{factor.columns[0]}' is published without "
                f"{' and '.join(lacking)}. Ask the owner to publish its {' and '.join(lacking)} in "
                f"columns.toml, by  {', '.join(map(LINES.__getitem__, lacking))}  in section "
                f"{section_of(factor.columns[0])}, or leave it out",
            )
    found = ((factor.text, _factor_problem(data, factor)) for factor in fact.factors)
    of_products = ((text, _product_problem(data, factors)) for text, factors in fact.products.items())
    for text, problem in chain(found, of_products):
        if problem:
            raise DescriptionError.of_rule(
                "simple formulas", data.name, f"does not compute '{text}': {problem}. {ALLOW_ANY_HINT}"
            )


def check_evaluation(data: SiteData, state: State, fact: facts.ModelEvaluation) -> None:
    """Allow the evaluation of one model at a site: single rows can lie between the cuts of two evaluations.

    This includes another response, since the client chooses the coefficients, and with them the cuts. Values
    that were released before may be released again.
    """
    if data.policy.evaluation == "any":
        return
    if fact.residuals:
        raise DescriptionError.of_rule(
            "evaluation once",
            data.name,
            "does not count residuals: with chosen predictions, the largest of a few residuals reveals a "
            'response. The owner can allow it with  evaluation = "any"  in policy.toml',
        )
    this = AnsweredEvaluation(hashlib.sha256(np.ascontiguousarray(fact.sums).tobytes()).hexdigest())
    if data.site_ledger.records(AnsweredEvaluation) - {this}:
        raise DescriptionError.of_rule(
            "evaluation once",
            data.name,
            "has answered the evaluation of one model, and refuses others: single rows can lie between the "
            'cuts of two evaluations. The owner can allow more with  evaluation = "any"  in policy.toml',
        )
    data.site_ledger.remember(this)


def section_of(column: str) -> str:
    """Return the heading of a column in columns.toml."""
    return f"[{json.dumps(column, ensure_ascii=False)}]"


def _lacking_description(data: SiteData, factor: facts.FormulaFactor) -> list[str]:
    """Return what an allowed function of a column requires, but its description does not list."""
    if factor.written or not factor.functions:
        return []
    function, column = factor.functions[-1].removeprefix("np."), data.published[factor.columns[0]]
    if column.kind == "group" or (column.kind != "number" and function != "C"):
        return []
    needed = ("levels",) if function == "C" else FUNCTION_RULES.get(function, ((),))[0]
    return [part for part in needed if not getattr(column, part)]


def _factor_problem(data: SiteData, factor: facts.FormulaFactor) -> str:
    """Return why a factor is not allowed, or an empty text."""
    columns = data.published
    if not factor.label and (groups := [name for name in factor.columns if columns[name].kind == "group"]):
        return (
            f"column '{groups[0]}' is published as labels of groups, which a model uses in (1 | {groups[0]}) "
            f"or cluster({groups[0]})"
        )
    if factor.written:
        return "a factor is one column or one function of one column, without arithmetic or written numbers"
    if not factor.functions:
        return ""
    (*outer, function), (name,) = factor.functions, factor.columns
    if not set(outer) <= LINEAR_TRANSFORMS:
        return "only center and scale can be applied to a function"
    column = columns[name]
    if outer:
        problem = _check_standardization(column, factor.options)
        return problem or FUNCTION_RULES[function.removeprefix("np.")][1](column, {})
    if function == "C":
        return _check_coding(column, factor.options)
    if function == facts.COMPARISON:
        # Rows with exactly one number may be one row; those on one side of a published knot are not.
        knots = () if factor.options.get("equal") else column.knots
        inside = factor.options["against"] in (*column.levels, *knots)
        return "" if inside else "it is compared with a value that is not a published level or knot"
    if column.kind != "number":
        return f"column '{name}' is published as a category"
    return FUNCTION_RULES[function.removeprefix("np.")][1](column, factor.options)


def _product_problem(data: SiteData, factors: Sequence[facts.FormulaFactor]) -> str:
    """Return why a product of allowed factors is not allowed, or an empty text."""
    names = [name for factor in factors for name in factor.columns]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        return f"a term can have a column once, and '{twice[0]}' is in several of its factors"
    many = [factor for factor in factors if _is_number(data, factor)]
    return "" if len(many) <= MAX_DEGREE else f"a term multiplies at most {MAX_DEGREE} numbers"


def _is_number(data: SiteData, factor: facts.FormulaFactor) -> bool:
    """Return whether a factor may have more than two values: categories are coded by zeros and ones."""
    if facts.COMPARISON in factor.functions or "C" in factor.functions:
        return False
    columns = (data.published[name] for name in factor.columns)
    return any(one.kind == "number" and len(one.levels) != 2 for one in columns)


def _check_coding(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if not column.levels:
        return "its description lists no levels"
    levels = options.get("levels") or column.levels
    # Without one of them, refusals would reveal its rows. Other sites may have more.
    if not set(column.levels) <= set(levels):
        return "its levels lack one of the published levels"
    reference = options.get("reference")
    return "" if reference is None or reference in levels else "the reference is not one of its levels"


FunctionCheck: TypeAlias = Callable[[PublishedColumn, Mapping[str, Any]], str]
"""Returns why a function of a column with some options is not allowed, or an empty text."""


def _requires_range(fits: Callable[[float, float], bool], problem: str) -> FunctionCheck:
    """Require that the column has a published range that fits."""
    return lambda column, options: "" if column.range is not None and fits(*column.range) else problem


def _check_standardization(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    return "" if options.get("ddof", 1) in (0, 1) else "ddof must be 0 or 1"


def _check_polynomial(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    degree = options.get("degree", 1)
    return "" if degree <= MAX_DEGREE else f"polynomials have at most degree {MAX_DEGREE}"


def _check_spline(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if column.range is None or not column.knots:
        return "its description lists no range and knots for splines"
    bounds = (options.get("lower_bound"), options.get("upper_bound"))
    if bounds != column.range or "df" in options or not set(options.get("knots", ())) <= set(column.knots):
        return "lower_bound, upper_bound and knots must be the published ones, without df"
    return _check_polynomial(column, options)


def _check_equidistant(column: PublishedColumn, options: Mapping[str, Any]) -> str:
    if column.range is None:
        return "its description lists no range for splines"
    if options.get("ends") != column.range:
        low, high = column.range
        return f"its ends must be those of the published range: lower_bound={low!r}, upper_bound={high!r}"
    return "" if options.get("knots", MAX_KNOTS) <= MAX_KNOTS else f"splines have at most {MAX_KNOTS} knots"


FUNCTION_RULES: Mapping[str, tuple[tuple[str, ...], FunctionCheck]] = {
    "log": (("range",), _requires_range(lambda low, high: low > 0.0, "its published range is not above 0")),
    "sqrt": (("range",), _requires_range(lambda low, high: low >= 0.0, "its published range goes below 0")),
    "exp": (
        ("range",),
        _requires_range(
            lambda low, high: max(abs(low), abs(high)) <= MAX_EXP_ARGUMENT,
            f"its published range goes beyond {MAX_EXP_ARGUMENT:g}",
        ),
    ),
    "center": ((), _check_standardization),
    "scale": ((), _check_standardization),
    "poly": ((), _check_polynomial),
    "bs": (("range", "knots"), _check_spline),
    "cr": (("range", "knots"), _check_spline),
    "cc": (("range", "knots"), _check_spline),
    "bbs": (("range",), _check_equidistant),
}
"""Parts of a column's description that a function needs, since its values depend on them, and its check.

Other functions are refused.
"""
LINES: Mapping[str, str] = {
    "levels": "levels = [...]",
    "range": "range = [low, high]",
    "knots": "knots = [...]",
}
"""Lines of columns.toml that describe them."""


# ----------------------------------------------------------------------------------------------------
# Order of the steps in a protocol, its dealers, and the masking of replies.


def check_order(site: str, policy: Policy, request: Request, step: Step, last: Mapping[str, str]) -> None:
    """Refuse a step that no protocol of its family sends at this point.

    Parameters
    ----------
    last : mapping of str to str
        The latest step of each family that was answered in the session.
    """
    if policy.order == "any" or step.after is None or last.get(request.family) in step.after:
        return
    raise DescriptionError.of_rule(
        "order",
        site,
        f"answers steps in the order of a fit: '{request.step}' of family '{request.family}' must follow "
        f"{', '.join(map(repr, sorted(step.after)))}; the last step of this session is "
        f'{last.get(request.family, "none")!r}. The owner can allow any order with  order = "any"  in '
        "policy.toml",
    )


def check_dealer(data: SiteData, state: State, fact: facts.ProductDealer) -> None:
    """Require a dealer that is not one of the two sites, and if the policy says so, not the coordinator.

    A SecurityError if one of the two sites deals.
    """
    first, second = fact.sites
    if fact.dealer in fact.sites:
        raise SecurityError(
            f"{data.name}: '{fact.dealer}' would deal the random numbers for a product of its own columns "
            f"('{first}' and '{second}'); with these numbers it could read the columns of the other site"
        )
    if not fact.dealer and data.policy.dealer == "third party":
        raise DescriptionError.of_rule(
            "dealer",
            data.name,
            f"requires a third site to deal the random numbers for the product of '{first}' and "
            f"'{second}'; here the coordinator would deal. Add a third site to the partition, or have "
            'the owner allow it with  dealer = "any"  in policy.toml',
        )


def check_sampled_sites(data: SiteData, state: State, fact: facts.SampledSites) -> None:
    """Require that all sites that mask a sum add to it, or enough of them to hide each part.

    There is nothing to hide if no site masks.
    """
    drawn, masked = fact.names, state.masked_among
    adding = set(drawn) & set(masked)
    few = adding != set(masked) and not hides(len(adding))
    if masked and (few or adding != set(drawn)):
        raise DescriptionError(
            f"{data.name}: of {len(masked)} sites in a masked sum, only {len(adding)} would add to it. Their "
            "parts are hidden if all sites add, or three or more. Draw more sites"
        )


def record_step(state: State, request: Request, step: Step) -> None:
    """Store which step came last, and the values that all sites received alike with a first step."""
    if step.begins:
        # Some sites received more than others in an interrupted fit. Its order is forgotten as well:
        # otherwise a sum could follow a scale that only one site received, when the scale is no longer bound.
        state.begun.clear()
        state.last.clear()
    state.last[request.family] = request.step
    if step.after is None:
        state.begun[f"{request.family} {request.step}"] = digest_common(request, step)


def bind_common(state: State, request: Request, step: Step) -> str:
    """Return the digest of the values that all sites must have received alike up to this request, or ''."""
    begun = {**state.begun, f"{request.family} {request.step}": digest_common(request, step)}
    reported = [part for name, digest in sorted(begun.items()) if digest for part in (name, digest)]
    return hashlib.sha256(encode_parts("fedstat common 1", *reported)).hexdigest() if reported else ""


def digest_common(request: Request, step: Step) -> bytes:
    """Return the SHA-256 of the parts of a request that are declared the same at every site, or empty."""
    parts: list[str | bytes] = []
    if step.text_in is not None and step.text_in.common:
        parts.append(request.text)
    for name in sorted(
        name for name, declared in step.takes.items() if declared.common and name in request.arrays
    ):
        array = request.arrays[name]
        parts += [name, str(array.dtype), str(array.shape), array.tobytes()]
    return hashlib.sha256(encode_parts(request.family, request.step, *parts)).digest() if parts else b""


def mask_reply(
    masker: Masker, request: Request, step: Step, arrays: Mapping[str, Array], bound: str
) -> dict[str, Array]:
    """Mask the arrays of which the coordinator needs only the sum over sites.

    Masks cancel if sites received the same values of `bound`.
    """
    assert request.masked is not None
    hidden = {f"{request.family} {request.step} {name}": name for name in arrays if step.gives[name].maskable}
    masked = masker.mask_all(
        {label: arrays[name] for label, name in hidden.items()},
        request.masked,
        {
            label: WIDE if step.gives[name].wide else encoding_of(arrays[name])
            for label, name in hidden.items()
        },
        bound,
    )
    return {**arrays, **{hidden[label]: words for label, words in masked.items()}}
