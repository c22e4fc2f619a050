"""Threat statements: what each party can learn under a given policy.

README, summaries, explanations and pages print these and no others, so that a claim that no longer holds is
corrected once. What a rule of the strict policy keeps in is told by what is learned without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.rules import (
    ANALYST,
    COORDINATOR,
    DEPARTING,
    INTRUDER,
    OTHER_SITE,
    rules_of,
    toml_line,
)

ONE_PROCESS_NOTE = "one process: nothing is protected"
STRICT_TRIAL_NOTE = "one process: a rehearsal of the strict policy, nothing is protected"
ALL_ROWS_THREAT = "All rows: whoever runs the process can read its tables, whatever a policy says."

ACTIVE_PARTIES = (ANALYST, DEPARTING, INTRUDER)
"""Parties that do more than keep what passes in one fit."""

STRICT_LEARNS: Mapping[str, str] = {
    ANALYST: "Estimates with their errors, each institution's own fit, sums over the rows of three or more, "
    "what is published of columns, counts of rows and of levels, and one bit for each of {max_refusals} "
    "refusals; of one evaluated model each institution's counts and sums of responses and predicted means by "
    "bin, squared errors and deviance, and the response regressed on predictions; an institution's part of a "
    "sum by leaving it out; of institutions with different columns what a coordinator has of them. Of fewer "
    "than {min_count} entities no sum, of a level or an outcome of fewer than {min_few} none. Sums over rows "
    "are exact: very many analyses of the same rows tell more than each alone.",
    COORDINATOR: "What an analyst learns, all messages, and which institution has which entity. Of "
    "institutions with different columns the sums of their products by pattern of records, of values moved a "
    "little, by which no column is determined in a pattern, whether its values are many or few: other "
    "institutions' columns count over all fits, functions of its own in one.",
    OTHER_SITE: "Coefficients, means and deviations over all, which of its entities others have, and of a "
    "product random numbers. Joined by the coordinator: a sum less its own part, which is that of the last "
    "when all others join; of 14 institutions or more, of which a third join, in one of 100 million "
    "agreements on keys sums over parts of the others; products of its own columns with another's, as many "
    "equations as it has columns.",
    DEPARTING: "What a coordinator learns, each institution's part of a sum by leaving that one out or "
    "calling it lost (not where another's policy says apart = 2), and an estimate that is wrong for all. "
    "Steps in another order, rows that differ by a few from earlier ones, weights on few rows, estimates "
    "under weights that differ from earlier ones in a few, products of rows of different entities, and "
    "itself as dealer are refused. So are coefficients of its choosing by which the sums that one session "
    "was told single out few rows, but not those that nearly do so, nor sums of several sessions or epochs "
    "of gradient descent together: of a row that alone has a combination of levels these tell the other "
    "columns, and the outcome.",
    INTRUDER: "Who asks whom, when and how much, and what passes neither masked nor sealed. What it alters "
    "or puts back is not answered, and an account that it alters is not served; what it removes stops an "
    "analysis. Who reads a site's own files has its keys and records.",
}
"""By party, at a site that is served under :meth:`Policy.strict`."""

BUDGET_SECTION = "[privacy]"
BUDGET_STATEMENTS = (
    "What is published of columns, which entities have a record, which of them lack a value in columns, how "
    "much of the budget is spent; sums with noise, by which, over all that ever leaves and whoever joins "
    "forces, but for who deals random numbers for a product and one of its two institutions, values of one "
    "record cannot be told from others but for epsilon and delta of the budget; and that a table was "
    "changed, where a question is charged again. All else that depends on what rows hold is refused."
)
"""What all but an intruder learn where a policy has a privacy budget."""

SMALL_COUNT_RULES = ("min_level_count", "min_events")
"""Rules on the rows of a level and of an outcome, of which there may be fewer than behind other sums."""

COORDINATOR_LEARNS: Mapping[str, str] = {
    "raw columns": "It then has these columns",
    "per entity": "Every number is an equation in the columns of its entity: about as many rounds as an "
    "institution has columns give its rows away",
    "sketch": "Without the seed that the institutions share it shows products of columns; with the seed it "
    "shows the columns, the better the more rows it has",
    "aggregate": "They describe each institution by itself, and together they may tell more than each alone",
    "noisy aggregate": "Noise in them is charged to each institution's privacy budget, and bounds what they "
    "tell of one entity's record",
    "masked share": "A share is random by itself; two of them add up to products of two institutions' "
    "columns, which it learns",
}
"""What the coordinator makes of a kind of values in clear, most disclosing first."""
SITE_LEARNS: Mapping[str, str] = {
    "raw columns": "It then has another institution's columns",
    "per entity": "Numbers per entity narrow down what the others hold of these entities",
    "sketch": "It shares the seed, so that the sketch shows the columns",
    "aggregate": "They are sums or estimates over institutions; where there are two, one's own part "
    "subtracted leaves the other's",
}
"""What an institution makes of a kind of values that it is told."""


@dataclass(frozen=True, slots=True)
class Threat:
    """What a party can learn; `line` is the one of ``policy.toml`` that lets it, empty for the strict one."""

    party: str
    line: str
    learns: str


def one_process_note(policies: Iterable[Policy]) -> str:
    """Say what a policy is worth where whoever asks can read the tables."""
    rules = list(policies)
    return STRICT_TRIAL_NOTE if rules and all(policy.is_strict for policy in rules) else ONE_PROCESS_NOTE


def threats_under(policy: Policy) -> Iterator[Threat]:
    """Say what each party can learn at a site that is served with this policy, party by party."""
    strict = Policy.strict()
    refusals = min(policy.max_refusals or strict.max_refusals, strict.max_refusals)
    named = {
        "min_count": max(policy.min_count, strict.min_count),
        "min_few": min(max(getattr(p, rule) for p in (policy, strict)) for rule in SMALL_COUNT_RULES),
        "max_refusals": refusals,
    }
    rules = rules_of(type(policy))
    loosened = [
        (toml_line(name, getattr(policy, name)), rules[name].without) for name in policy.looser_than_strict()
    ]
    for party, learns in STRICT_LEARNS.items():
        if policy.privacy is not None and party != INTRUDER:
            yield Threat(party, BUDGET_SECTION, BUDGET_STATEMENTS)
            continue
        yield Threat(party, "", learns.format(**named))
        yield from (Threat(party, line, adds[party]) for line, adds in loosened if party in adds)


def threats_beyond_one_fit(policies: Iterable[Policy], here: bool) -> Iterator[tuple[str, str]]:
    """Say who learns what by other means than keeping what passes in one fit; `here`: in one process."""
    rules = list(policies)
    if here:
        yield "Everybody here", ALL_ROWS_THREAT
    if not here or one_process_note(rules) == STRICT_TRIAL_NOTE:
        reported = (one for policy in rules for one in threats_under(policy) if one.party in ACTIVE_PARTIES)
        yield from dict.fromkeys((one.party, one.learns) for one in reported)
