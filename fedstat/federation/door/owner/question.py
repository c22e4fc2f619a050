"""Rules that follow from a question and its declarations: refusals before a row is read, counts after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.account.released import BITS, numbers_each
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.owner.toml_text import toml_line
from fedstat.federation.message import COUNTED, Ask, Declared, Kind, Step
from fedstat.typing import Array

HIDDEN: Mapping[str, str] = {
    "sealed": "It is hidden on its way, and the product of columns that it serves is released. ",
    "masked share": "It is random by itself, and the sum with the other share is released. ",
}
MASKED = "It is hidden in a masked sum, and the sum is released. "
DISCLOSED: Mapping[Kind, str] = {
    "per entity": "A number for each entity is an equation about its row: from linear predictors of as many "
    "rounds as there are columns the rows of all institutions follow, masked or not, and from residuals the "
    "responses. ",
    "raw columns": "They are the values themselves. ",
    "sketch": "Whoever has the seed of a sketch solves it for the columns. ",
}
"""What follows from a kind of values, for who asks why it is refused."""
PER_ENTITY: Kind = "per entity"
ALLOWED = toml_line("per_entity", 40)
"""What an owner might write; a usual fit takes fewer."""
UNHIDDEN: tuple[Kind, ...] = (PER_ENTITY,)
"""Kinds that a masked sum does not hide: entity by entity, sums of many rounds give each part away."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a site's policy does not let an answer leave.

    Parameters
    ----------
    rule : str
        Name of the rule.
    array : str
        The array, empty where the rule concerns the whole answer; ``"text"`` for a text.
    message : str
        Names site, rule, array and remedy.
    """

    rule: str
    array: str
    message: str


Question: TypeAlias = tuple[Policy, Ask, Step, Declared, str]
"""A policy, what is asked, and one declared array of the answer with its place in words."""
NO_ACCOUNT = (
    "Ask for what leaves with noise, leave the site out, or have the owner take [privacy] out of the policy"
)


def _hidden(ask: Ask, declared: Declared) -> bool:
    return declared.maskable and ask.masked is not None


def _refused_kind(question: Question) -> str:
    policy, ask, _, declared, where = question
    kind = declared.kind
    unhidden = kind in UNHIDDEN
    if kind not in policy.refused_kinds or (_hidden(ask, declared) and not unhidden):
        return ""
    remedy = "Fit with masked=True, or ask" if declared.maskable and not unhidden else "Ask"
    line = toml_line("refused_kinds", policy.refused_kinds - {kind})
    return (
        f"does not let '{kind}' leave: {where}. {DISCLOSED.get(kind, '')}{remedy} for less, leave the site "
        f"out, or have the owner allow the kind by the line  {line}  in policy.toml"
    )


def _per_entity(question: Question) -> str:
    policy, _, _, declared, where = question
    if declared.kind != PER_ENTITY or policy.per_entity != 0 or PER_ENTITY in policy.refused_kinds:
        return ""
    return (
        f"does not let numbers for each entity leave: {where}. {DISCLOSED[PER_ENTITY]}Ask for less, leave "
        "the site out, or have the owner allow so many of them, over all analyses, by the line  "
        f"{ALLOWED}  in policy.toml"
    )


def _not_masked(question: Question) -> str:
    policy, ask, _, declared, where = question
    # Noise protects each site's part by itself.
    if not policy.masked_only or not declared.maskable or declared.noisy or _hidden(ask, declared):
        return ""
    return (
        f"lets {where} leave in a masked sum only; fit with masked=True, which hides a site's part where "
        "there are three sites or more, or have the owner allow it in clear by the line  "
        f"{toml_line('masked_only', False)}  in policy.toml"
    )


def _unaccounted(question: Question) -> str:
    policy, ask, step, declared, where = question
    if policy.privacy is None or step.public or declared.noisy or declared.unpaid:
        return ""
    why = MASKED if _hidden(ask, declared) else HIDDEN.get(declared.kind, "")
    return (
        f"lets nothing that depends on rows leave but with noise, charged to the budget: not {where}. "
        f"{why}{NO_ACCOUNT}"
    )


RULES: Mapping[str, Callable[[Question], str]] = {
    "refused kinds": _refused_kind,
    "per entity": _per_entity,
    "masked only": _not_masked,
    "privacy budget": _unaccounted,
}
"""Rules that hold for one array of an answer, before it is computed."""


def refusals(site: str, policy: Policy, ask: Ask, step: Step) -> Iterator[Refusal]:
    """List what in an answer the policy does not let leave, before anything is computed."""
    if policy.families is not None and ask.family not in policy.families:
        yield Refusal(
            "families",
            "",
            f"{site}: its policy (families) allows {sorted(policy.families)}, not '{ask.family}', which asks "
            f"for step '{ask.step}'. The owner may add it to the list",
        )
    for name, declared in step.takes.items():
        # With weights of its own making, whoever asks singles out rows in any sum.
        if declared.weighs and name in ask.arrays and declared.kind in policy.refused_kinds:
            line = toml_line("refused_kinds", policy.refused_kinds - {declared.kind})
            yield Refusal(
                "refused kinds",
                "",
                f"{site}: its policy (refused kinds) takes no '{declared.kind}' either: step '{ask.step}' "
                f"comes with {declared.weighs} of each row. The owner may allow the kind by the line  {line}"
                "  in policy.toml",
            )
        elif declared.weighs and name in ask.arrays and declared.kind == PER_ENTITY and not policy.per_entity:
            yield Refusal(
                "per entity",
                "",
                f"{site}: its policy (per entity) takes no numbers for each entity either: step '{ask.step}' "
                f"comes with {declared.weighs} of each row. The owner may allow them by the line  {ALLOWED}  "
                "in policy.toml",
            )
    for name, declared in step.given.items():
        where = f"array '{name}' of step '{ask.step}' ({declared.what})"
        for rule, check in RULES.items():
            problem = check((policy, ask, step, declared, where))
            if problem:
                yield Refusal(rule, name, f"{site}: its policy ({rule}) {problem}")
    if policy.privacy is not None and not step.public and not step.given:
        # Whether it is answered at all may depend on rows.
        yield Refusal(
            "privacy budget",
            "",
            f"{site}: its policy (privacy budget) lets no step read rows whose answer is not charged to the "
            f"budget, as that of step '{ask.step}' is not. {NO_ACCOUNT}",
        )


def rules_in_force(policy: Policy, declared: Declared, n_masked: int = 0) -> Iterator[str]:
    """List the rules that an array meets at a site, with their limits.

    Parameters
    ----------
    n_masked : int
        Sites of the masked sum that the array enters; 0 where it comes in clear.
    """
    if policy.families is not None:
        yield "families"
    if policy.refused_kinds and (not n_masked or declared.kind in UNHIDDEN):
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


def check_ask(site: str, policy: Policy, ask: Ask, step: Step) -> None:
    """Hold a question against the policy, before anything is computed.

    Raises
    ------
    PolicyError
        Names site, rule, array and remedy.
    """
    for refusal in refusals(site, policy, ask, step):
        raise PolicyError(refusal.message)


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
        raise DescriptionError(
            f"{site}: its policy (quorum) wants masked sums over at least {least} institutions{of}, and this "
            f"one is over {n_sites}. Wait for the others, or have the owner lower  quorum = {policy.quorum}  "
            "in policy.toml"
        )
    if policy.two_sites == "refuse" and not hides(n_sites):
        raise DescriptionError(
            f"{site}: its policy (two sites) refuses. {TWO_SITES} The owner may allow it by the line  "
            'two_sites = "warn"  in policy.toml'
        )


def check_columns(site: str, policy: Policy, ask: Ask, columns: int) -> None:
    """Require that no more of the site's columns are in one model than its owner allows.

    Raises
    ------
    PolicyError
        Names site, rule, step and remedy.
    """
    if policy.max_columns is not None and columns > policy.max_columns:
        raise PolicyError(
            f"{site}: its policy (maximum columns) allows {policy.max_columns} design columns of it in one "
            f"model; step '{ask.step}' opens {columns}. Use fewer of its terms, or have the owner raise "
            "max_columns"
        )


def check_counts(
    site: str, policy: Policy, ask: Ask, step: Step, names: Iterable[str], entities: int
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
            raise PolicyError(
                f"{site}: its policy (minimum count) wants at least {policy.min_count} entities behind "
                f"array '{name}' of step '{ask.step}'; there are {entities}. Leave the site out, or use "
                "columns that more of its entities have"
            )


def check_vectors(site: str, policy: Policy, step: Step, arrays: Mapping[str, Array], before: int) -> None:
    """Hold the numbers for each entity that leave now, with those that have left, against the policy.

    Raises
    ------
    DescriptionError
        They are too many; names the line of the policy that would allow more.
    """
    now = sum(
        numbers_each(array.shape) for name, array in arrays.items() if step.given[name].kind == PER_ENTITY
    )
    if policy.per_entity == "any" or not now or before + now <= policy.per_entity:
        return
    line = toml_line("per_entity", max(2 * policy.per_entity, before + 40))
    raise DescriptionError(
        f"{site}: its policy (per entity) lets {policy.per_entity} numbers for each entity leave over all "
        f"analyses, and {before} have left: {before * BITS:,} bits about each. More would narrow the rows "
        f"down further, and as many as there are columns give them away. The owner may allow it by the line  "
        f"{line}  in policy.toml"
    )
