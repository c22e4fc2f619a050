"""Refusals of a site: the analyst's text, the owner's log, and the number of them.

A refusal that depends on rows reveals one bit about them, whatever its text. If the owner keeps reasons in
the log (``reasons = "logged"``), all these refusals have one rule, :data:`ROWS`, and one text. The text names
terms of the model, keys of the policy and remedies. It follows from the request, the policy and the published
columns alone, so it is the same whichever check refused. After ``max_refusals`` of them the analyst receives
no more replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fedstat.errors import (
    ConsentError,
    DescriptionError,
    FedstatError,
    FormulaError,
    PolicyError,
    SecurityError,
)
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure.facts import COMPARISON, TABLE_OF_COUNTS, FactorsRequested, FormulaFactor
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.row_checks import SETTINGS
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.published import Published

MAX_CAUSES, MAX_REASONS_KEPT = 2, 100
"""Likely causes that a refusal names, and reasons that a process keeps in memory for its owner."""
DATA_INDEPENDENT_ERRORS = (ConsentError, DescriptionError, FormulaError, SecurityError)
"""Errors that follow from request, policy, public description and keys alone; they are shown in full."""
ROWS = "rows"
"""The rule of every refusal that depends on rows, as the analyst reads it."""
MAX_TERMS_NAMED = 8
COUNTING_RULES = (*SETTINGS, "simple formulas")
"""Rules that refuse a table of counts: they count rows, or need columns that have rare levels."""


@dataclass(slots=True)
class RefusalLog:
    """The refusals of a site: their texts, the owner's log, and the number for each client.

    Parameters
    ----------
    site : str
    site_ledger : SiteLedger
        Counts refusals also when the process ends.
    log : callable, optional
        Receives one line for the owner; by default the latest are stored in :attr:`reasons`.
    """

    site: str
    site_ledger: SiteLedger
    log: Callable[[str], None] | None = None
    reasons: list[str] = field(default_factory=list)

    def outward(
        self, data: SiteData, requested: Sequence[FactorsRequested], error: FedstatError, client: str
    ) -> FedstatError:
        """Turn an error of a step, which may depend on rows, into the text for the analyst."""
        policy = data.policy
        counted = any(fact.counted for fact in requested)
        if counted and isinstance(error, PolicyError) and error.rule in COUNTING_RULES:
            error = error.with_message(f"{error}. {TABLE_OF_COUNTS}")
        if isinstance(error, DATA_INDEPENDENT_ERRORS):
            return error
        # Under a budget no charge would pay for a reason.
        if policy.reasons == "sent" and policy.privacy is None:
            if policy.max_refusals:
                self.site_ledger.count_refusal(client)
            return error
        self.count(policy, str(error), client)
        return PolicyError(
            refusal_text(self.site, policy, requested, data.published), rule=ROWS, site=self.site
        )

    def count(self, policy: Policy, reason: str, client: str) -> None:
        """Count a bit about rows that a client learns, and log its reason."""
        if policy.max_refusals:
            self.site_ledger.count_refusal(client)
        self.note(reason)

    def note(self, reason: str) -> None:
        """Write a line that only the owner can read."""
        if self.log is not None:
            self.log(reason)
        self.reasons = [*self.reasons[1 - MAX_REASONS_KEPT :], reason]


def refusal_text(
    site: str, policy: Policy, requested: Iterable[FactorsRequested], published: Published
) -> str:
    """Write the text of every refusal that depends on rows: terms, policy keys and remedies."""
    facts = list(requested)
    levels, numbers = _terms(facts, published)
    causes = []
    if (counts := _keys(policy, {"min_level_count": 0, "products": "any"})) and levels:
        remedy = "merge levels that are rare, alone or together with a level of another term, or drop a term"
        causes.append(f"Terms {_listed(levels)} ({counts}): {remedy}")
    if rows := _keys(policy, {"min_count": 0, "remember": "nothing"}):
        causes.append(f"Rows ({rows}): use the rows of an earlier model (complete=[...]), or fewer columns")
    if (shares := _keys(policy, {"max_share": 1.0, "products": "any"})) and numbers:
        causes.append(f"Columns {_listed(numbers)} ({shares}): transform a skewed one, or drop it")
    if (outcomes := _keys(policy, {"min_events": 0})) and facts:
        causes.append(f"A response of two values ({outcomes}): leave a site with a rare outcome out")
    likeliest = f" (the {MAX_CAUSES} likeliest follow)" if len(causes) > MAX_CAUSES else ""
    head = f"{site}: refused for a reason that depends on {ROWS}; the owner's log has the reason{likeliest}"
    parts = [head, *causes[:MAX_CAUSES]]
    labels = dict.fromkeys(factor.text for fact in facts for factor in fact.factors if factor.label)
    if labels and (counts := _keys(policy, {"min_level_count": 0})):
        remedy = "use cov_struct='independence' in a GEE, or leave out groups of a rare size"
        parts.append(f"Groups {_listed([*labels])} ({counts}): {remedy}")
    times = dict.fromkeys(factor.text for fact in facts for factor in fact.factors if _is_time(factor))
    if times and (counts := _keys(policy, {"min_level_count": 0})):
        parts.append(f"Times {_listed([*times])} ({counts}): in curves, use fewer times (a wider grid=)")
    if any(fact.counted for fact in facts):
        parts.append(TABLE_OF_COUNTS)
    return ". ".join(parts)


def _is_time(factor: FormulaFactor) -> bool:
    """Return whether a factor is the time and the event of a response."""
    return factor.text.startswith("Surv(")


def _keys(policy: Policy, off: dict[str, object]) -> str:
    """Name the keys of a policy that are not switched off by these values."""
    return ", ".join(name for name, value in off.items() if getattr(policy, name) != value)


def _terms(requested: Iterable[FactorsRequested], published: Published) -> tuple[list[str], list[str]]:
    """Texts of factors and products with levels, and of numbers, in the order of the formula."""
    levels: dict[str, None] = {}
    numbers: dict[str, None] = {}
    for fact in requested:
        for factor in (one for one in fact.factors if not (one.label or _is_time(one))):
            # Without a long list of levels.
            text = f"C({factor.columns[0]})" if factor.text.startswith("C(") else factor.text
            (levels if _has_levels(factor, published) else numbers)[text] = None
        levels |= dict.fromkeys(fact.products)
    return list(levels), [name for name in numbers if name not in levels]


def _has_levels(factor: FormulaFactor, published: Published) -> bool:
    columns = [published[name] for name in factor.columns if name in published]
    coded = {"C", COMPARISON} & set(factor.functions)
    return bool(coded) or any(one.kind == "category" or len(one.levels) == 2 for one in columns)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_TERMS_NAMED])
    more = len(names) - MAX_TERMS_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
