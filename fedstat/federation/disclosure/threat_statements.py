"""Threat statements: what each party can learn under a given policy.

README, summaries, explanations and the pages of owners print these sentences and no others, so that a claim
that no longer holds is corrected in one place. The rules of the policy say what is learned without each of
them. The page ``docs/disclosure.md`` names a test for every sentence about the strict policy.
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

ONE_PROCESS_NOTE = "All sites run in this process; no privacy protection applies."
STRICT_TRIAL_NOTE = (
    "All sites run in this process; it rehearses the strict policy, and no privacy protection applies."
)
ALL_ROWS_THREAT = "All rows: whoever runs the process can read its tables, whatever a policy says."

ACTIVE_PARTIES = (ANALYST, DEPARTING, INTRUDER)
"""Parties that do more than keep the messages of one fit."""

STRICT_LEARNS: Mapping[str, tuple[str, ...]] = {
    ANALYST: (
        "Estimates, their standard errors, and sums over the rows of at least three sites.",
        "The fit of a site's own rows, where the site has at least {min_own_rows} rows and five rows for "
        "each released number.",
        "The published description of each column, the number of rows, and the number of rows of each level.",
        "One bit about the rows for each refusal that depends on rows, and at most {max_refusals} such "
        "refusals.",
        "For one evaluated model, from each site: counts, sums of responses and of predicted means by bin, "
        "squared errors, the deviance, and the regression of the response on the predictions.",
        "The part of one site in a sum, from the same sum without that site.",
        "For sites with different columns: the sums of products that the coordinator learns.",
        "No sum over fewer than {min_count} rows.",
        "No sum over fewer than {min_few} rows of a level or of an outcome.",
        "No sum of a product of two columns that is nonzero in 1 to {below_level} rows. Columns of earlier "
        "analyses count.",
        "At most {max_column_sums:g} different sums of functions of one column for each row of a site.",
        "Sums are exact, so that very many analyses of the same rows together reveal more than each of them.",
    ),
    COORDINATOR: (
        "Everything that an analyst learns, all messages, and which site has which entity.",
        "For sites with different columns: sums of products of columns for each pattern of missing records."
        " Each value is first moved by a small random amount.",
        "These sums do not determine any column in a pattern, whether it has many or few values. All fits "
        "count for the columns of other sites, and one fit for functions of a site's own columns.",
    ),
    OTHER_SITE: (
        "The coefficients, and means and standard deviations over all sites.",
        "Which of its own entities the other sites have.",
        "Random numbers, and no values, from a secure product with another site.",
        "If it colludes with the coordinator: a sum less its own part. If all other sites collude, this is "
        "the part of the last one.",
        "If a third of at least 14 sites collude with the coordinator: sums over some of the other sites, "
        "in one of 100 million key agreements.",
        "If it colludes with the coordinator: sums of products of its own columns with the column of "
        "another site, which are as many equations as it has columns.",
    ),
    DEPARTING: (
        "Everything that a coordinator learns.",
        "The part of one site in a sum, by leaving that site out or by reporting it as lost. A site whose "
        "policy has apart = 2 prevents this.",
        "It can make the estimate wrong for everybody.",
        "Sites refuse steps in another order, rows that differ by a few from earlier rows, weights on few "
        "rows, weights of estimates that differ from earlier ones in few rows, products of rows of "
        "different entities, and the coordinator as dealer of random numbers.",
        "Sites refuse coefficients that single out few rows, alone or with the other coefficients of a "
        "session.",
        "Sites do not detect coefficients that nearly single out few rows, or that do so only over several "
        "sessions or epochs of gradient descent. If one row alone has a combination of levels, these "
        "coefficients reveal its other columns and its outcome.",
    ),
    INTRUDER: (
        "Who sends messages to whom, when, and how large they are, and every message that is neither masked"
        " nor sealed.",
        "A message that was altered or repeated gets no answer, and a site whose ledger was altered answers"
        " nothing.",
        "It can stop an analysis by removing files.",
        "Anybody who can read the files of a site has its keys and its records.",
    ),
}
"""By party, at a site that is served under :meth:`Policy.strict`: sentences, one or two to a statement."""

BUDGET_SECTION = "[privacy]"
BUDGET_STATEMENTS = (
    "The published description of columns, which entities have a record, which of them lack a value in some"
    " columns, and how much of the budget is spent.",
    "Sums with noise. Over all releases, and whoever colludes, the values of one record can be told from "
    "other values only as far as epsilon and delta of the budget allow.",
    "One exception: the party that deals the random numbers of a secure product, together with one of its "
    "two sites.",
    "That a table was changed, where a repeated request is charged again.",
    "Every other request that depends on rows is refused.",
)
"""What all parties but an intruder learn where a policy has a privacy budget."""

SMALL_COUNT_RULES = ("min_level_count", "min_events")
"""Rules on the rows of a level and of an outcome, of which there may be fewer than behind other sums."""

COORDINATOR_LEARNS: Mapping[str, str] = {
    "raw columns": "It then has these columns",
    "per entity": "Every number is an equation in the columns of its entity: about as many rounds as a site "
    "has columns reveal the rows of the site",
    "sketch": "Without the common seed of the sites a sketch shows products of columns. With the seed it "
    "shows the columns, more precisely the more rows it has",
    "aggregate": "Each describes one site, and together they may reveal more than each alone",
    "noisy aggregate": "The noise is charged to the privacy budget of the site, and limits what they "
    "reveal of one record",
    "masked share": "A share alone is random. Two shares add up to products of columns of two sites, which "
    "it learns",
}
"""What the coordinator learns from unmasked values of a kind, most disclosing first."""
SITE_LEARNS: Mapping[str, str] = {
    "raw columns": "It then has the columns of another site",
    "per entity": "A number for each entity limits the possible values of the other sites' columns there",
    "sketch": "It has the seed, so that the sketch shows the columns",
    "aggregate": "They are sums or estimates over sites. With two sites, a sum less the own part is the "
    "part of the other",
}
"""What a site learns from values of a kind that it receives."""


@dataclass(frozen=True, slots=True)
class Threat:
    """What a party can learn; `line` of ``policy.toml`` allows it, and is empty for the strict policy."""

    party: str
    line: str
    learns: str


def one_process_note(policies: Iterable[Policy]) -> str:
    """Return the note on a process that can read the tables of all sites."""
    rules = list(policies)
    return STRICT_TRIAL_NOTE if rules and all(policy.is_strict for policy in rules) else ONE_PROCESS_NOTE


def threats_under(policy: Policy) -> Iterator[Threat]:
    """List what each party can learn at a site that is served with this policy, by party and sentence."""
    strict = Policy.strict()
    refusals = min(policy.max_refusals or strict.max_refusals, strict.max_refusals)
    named = {
        "min_count": max(policy.min_count, strict.min_count),
        "min_few": min(max(getattr(p, rule) for p in (policy, strict)) for rule in SMALL_COUNT_RULES),
        "max_refusals": refusals,
        "min_own_rows": max(policy.min_own_rows, strict.min_own_rows),
        "below_level": max(policy.min_level_count, strict.min_level_count) - 1,
        "max_column_sums": min(
            float(limit) for limit in (policy.max_column_sums, strict.max_column_sums) if limit != "any"
        ),
    }
    rules = rules_of(type(policy))
    loosened = [
        (toml_line(name, getattr(policy, name)), rules[name].without) for name in policy.looser_than_strict()
    ]
    for party, learns in STRICT_LEARNS.items():
        if policy.privacy is not None and party != INTRUDER:
            yield from (Threat(party, BUDGET_SECTION, sentence) for sentence in BUDGET_STATEMENTS)
            continue
        yield from (Threat(party, "", sentence.format(**named)) for sentence in learns)
        yield from (Threat(party, line, adds[party]) for line, adds in loosened if party in adds)


def threats_beyond_one_fit(policies: Iterable[Policy], here: bool) -> Iterator[tuple[str, str]]:
    """List who learns what by other means than the messages of one fit; `here`: in one process."""
    rules = list(policies)
    if here:
        yield "Everybody here", ALL_ROWS_THREAT
    if not here or one_process_note(rules) == STRICT_TRIAL_NOTE:
        reported = (one for policy in rules for one in threats_under(policy) if one.party in ACTIVE_PARTIES)
        yield from dict.fromkeys((one.party, one.learns) for one in reported)
