"""A waiting plan as its owner reads it: what it reveals in three lines, and who requests it, when and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedstat.errors import PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import PlanDecision, SiteLedger
from fedstat.federation.disclosure.approval import AnalysisPlan, describe_plan, plain_lines
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.transport.site_folder import PlanFolder

NOT_STATED = "not stated"

# ----------------------------------------------------------------------------------------------------
# A formula in words.

FUNCTION_WORDS: Mapping[str, str] = {
    "C": "{} (as categories)",
    "I": "{}",
    "log": "the logarithm of {}",
    "sqrt": "the square root of {}",
    "exp": "the exponential of {}",
    "scale": "{} (standardized)",
    "center": "{} (centered)",
    "poly": "a polynomial in {}",
    "bols": "{}",
    **dict.fromkeys(("bs", "cr", "cc", "bbs"), "a smooth curve in {}"),
    "bsignal": "a curve of effects of {}",
}
"""Functions of a formula, with the words for their first argument."""
CALL = re.compile(r"(\w+)\((.*)\)")


def formula_in_words(formula: str) -> str:
    """Describe what a formula relates; a part without a known form is quoted.

    Examples
    --------
    >>> formula_in_words("num > 0 ~ age + C(sex) + age:bmi")
    'How num > 0 depends on age, sex (as categories), age together with bmi'
    """
    left, tilde, right = formula.partition("~")
    terms = [_term(one) for one in _split(right if tilde else left, "+") if one not in ("", "1", "0")]
    listed = ", ".join(terms) or "nothing else (a mean)"
    if not tilde or not left.strip():
        return f"Uses {listed}"
    return f"How {_response(left.strip())} depends on {listed}"


def _response(text: str) -> str:
    found = CALL.fullmatch(text)
    if found is None or found[1] != "Surv":
        return _factor(text)
    time, *event = _split(found[2], ",")
    return f"the time {time} until {' and '.join(event)}" if event else f"the time {time}"


def _term(text: str) -> str:
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else ""
    if len(parts := _split(inner, "|")) == 2:
        return f"differences between values of {parts[1]}"
    return " together with ".join(map(_factor, _split(text, ":*")))


def _factor(text: str) -> str:
    if (power := re.fullmatch(r"(\w+) ?\*\* ?2", text)) is not None:
        return f"{power[1]} squared"
    found = CALL.fullmatch(text)
    if found is None or found[1] not in FUNCTION_WORDS or not found[2]:
        return text
    if found[1] == "I":
        return _factor(found[2])
    return FUNCTION_WORDS[found[1]].format(_split(found[2], ",")[0])


def _split(text: str, signs: str) -> list[str]:
    """Split a text at signs that are outside of parentheses."""
    parts, depth, begin = list[str](), 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter in signs and not depth:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]


# ----------------------------------------------------------------------------------------------------
# The summary of a plan.


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan for its owner: three `plain` lines, named `facts` about the request, and technical `details`."""

    digest: str
    plain: tuple[str, str, str]
    facts: tuple[tuple[str, str], ...]
    details: tuple[str, ...]


def summarize_plan(
    digest: str, plan: AnalysisPlan, policy: Policy, site_ledger: SiteLedger, plans: PlanFolder
) -> PlanSummary:
    """Summarize a plan, with what the owner decided before."""
    facts = (
        ("Requested by", plan.person or NOT_STATED),
        ("Study", plan.study or NOT_STATED),
        ("Purpose", plan.purpose or NOT_STATED),
        ("Date", _date(digest, site_ledger)),
        ("Question", formula_in_words(plan.formula)),
        ("Columns", ", ".join(plan.columns) or "none"),
        ("Earlier decisions", "; ".join(_earlier(digest, plan, site_ledger, plans))),
    )
    printable = tuple((name, _printable(text)) for name, text in facts)
    return PlanSummary(digest, plain_lines(plan, policy), printable, tuple(describe_plan(plan)))


def _date(digest: str, site_ledger: SiteLedger) -> str:
    found = site_ledger.proposals.get(digest)
    if found is None:
        return "not known"
    signed = f", signed by the coordinator at {plain_time(found.written)}" if found.written else ""
    return f"received {plain_time(utc_text(found.proposed))}{signed}"


def plain_time(text: str) -> str:
    """Write a time in UTC to the minute, without the letters of ISO 8601."""
    return f"{text[:16].replace('T', ' ')} UTC"


def _earlier(digest: str, plan: AnalysisPlan, site_ledger: SiteLedger, plans: PlanFolder) -> Iterator[str]:
    """Describe the decisions about this plan, and about others of the same study."""
    own = site_ledger.decisions.get(digest)
    if own is not None:
        used = ", and was used for one run" if site_ledger.is_used(own) else ""
        yield f"this same plan was {own.verdict} by {own.who} on {plain_time(utc_text(own.when))}{used}"
    found = sorted(_of_study(digest, plan, site_ledger, plans), key=lambda one: -one[0].when)
    for verdict in ("approved", "denied"):
        same = [(decision, other) for decision, other in found if decision.verdict == verdict]
        if same:
            last, other = same[0]
            yield (
                f"{len(same)} other {'analysis' if len(same) == 1 else 'analyses'} of this study {verdict}, "
                f"the last on {plain_time(utc_text(last.when))} ({other.formula})"
            )
    if own is None and not found:
        yield "nothing in this study"


def _of_study(
    digest: str, plan: AnalysisPlan, site_ledger: SiteLedger, plans: PlanFolder
) -> Iterator[tuple[PlanDecision, AnalysisPlan]]:
    for decision in site_ledger.decisions.values():
        try:
            other = plans.find(decision.plan)
        except PartitionError:  # its file is no longer here
            continue
        if decision.plan != digest and other.study == plan.study:
            yield decision, other


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
