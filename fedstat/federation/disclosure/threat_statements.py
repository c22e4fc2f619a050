"""Threat statements: what each party can learn under a given policy.

The documentation, summaries, explanations and the owner's page print these sentences and no others, so that
a claim that no longer holds is corrected in one place. The rules of the policy say what is learned without
each of them. The page ``docs/disclosure.md`` names a test for every sentence about the strict policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fedstat.federation.disclosure.level_products import reported_rows
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
ALL_ROWS_THREAT = "All rows. The person who runs the process can read its tables under any policy."

ACTIVE_PARTIES = (ANALYST, DEPARTING, INTRUDER)
"""Parties that do more than keep the messages of one fit."""

STRICT_LEARNS: Mapping[str, tuple[str, ...]] = {
    ANALYST: (
        "Estimates, their standard errors, and sums over the rows of at least three sites.",
        "The fit of a site's own rows, if the site has at least {min_own_rows} rows and five rows for each "
        "released number.",
        "The published description of each column, the number of rows, and the number of rows of each level.",
        "Each refusal that depends on rows reveals one bit about them. After {max_refusals} such refusals a "
        "site does not answer the analyst any more.",
        "For one evaluated model, from each site: counts, sums of responses and of predicted means by bin, "
        "squared errors, the deviance, and the regression of the response on the predictions.",
        "The part of one site in a sum, by subtracting the same sum without that site.",
        "For sites with different columns: the sums of products that the coordinator learns.",
        "No sum over fewer than {min_count} rows, except for the rows of one level or of one outcome.",
        "No sum over fewer than {min_few} rows of a level or of an outcome.",
        "Rules count rows, and not persons. If a person has {min_count} rows or more, such as visits: sums "
        "over these rows and their log-likelihood, by subtracting an analysis of all other rows. A larger "
        "min_count prevents this.",
        "Some counts of 1 to {below_level} rows, by subtraction: the rows of a level that have the outcome "
        "0, and the rows that have neither of two levels or are in neither of two subsets. Other values of "
        "these rows are not revealed.",
        "No sum of a column, or of a product of columns, over 1 to {below_level} rows, and no combination of "
        "such sums over groups, levels and columns of few values. This check includes all earlier analyses, "
        "tables and curves. It includes the weights of an iterated fit where few combinations of values "
        "decide them, and, with a column of many values, products of the others over all sites.",
        "Between two sites, one row can be nearly all of a product, because no site knows the values of the "
        "other. Only the number of rows is limited.",
        "Between two sites, the value of one row, if two similar columns of one site differ in this row and "
        "two similar columns of the other site also do. This needs four sums of products, and no site can "
        "detect it alone.",
        "Between three sites, the value of one row, if two sites have similar columns that differ in this "
        "row, from two sums of products with a column of the third site. No site can detect it alone.",
        "Between three sites, some counts of 1 to {below_level} rows that have levels of three columns, from "
        "all tables of two of these columns.",
        "For tables: means of a number over {min_few} or more successive rows of a group, to the width of an "
        "interval of the analyst's choice.",
        "For survival curves: counts of none or at least {min_few} rows of a group, with and without the "
        "event, between times of the analyst's choice. If at least three sites mask the counts, and always "
        "the same ones, the minimum holds for the sum over these sites.",
        "For survival curves: that an interval between two such times has few rows of a group and outcome. "
        "It is examined within a wider interval, whose counts are released.",
        "At most {max_column_sums:g} different sums of functions of one column for each row of a site, and "
        "for each row of a combination of levels that has fewer rows than an own fit needs.",
        "Which whole numbers a column has in a level of about ten rows, without their order, if somebody "
        "tries all of them: one sum of square roots or logarithms has enough digits.",
        "A close estimate of an outlier, if the analyst assumes the right distribution of all other values: "
        "several sums of functions of a column then have the outlier as their only unknown value. Sums of an "
        "iterated fit then estimate other values of its row, too; if they are those of one small site, to "
        "know the range of the values is enough.",
        "Sums are exact. Therefore very many analyses of the same rows reveal more than each one alone.",
    ),
    COORDINATOR: (
        "Everything that an analyst learns, all messages, and which site has which entity.",
        "For sites with different columns: sums of products of columns for each pattern of missing records."
        " Each value is first moved by a small random amount.",
        "These sums do not determine any column in a pattern, whether it has many or few values. This check "
        "includes the columns of other sites in all earlier fits. It includes functions of a site's own "
        "columns only within one fit.",
        "That two sites refused a product because it rests on few rows.",
    ),
    OTHER_SITE: (
        "The coefficients, the dispersion, the mean of the response, and means and standard deviations over "
        "all sites.",
        "Which of its own entities the other sites have. If it deals random numbers for two other sites: the "
        "patterns of missing records of their common entities, without the keys.",
        "Random numbers, and no values, from a secure product with another site.",
        "Where at least three sites mask their sums: which levels of two columns of a model occur together "
        "at another site, in {reported} or more rows. It does not learn in how many, and the coordinator "
        "learns nothing of it.",
        "If a product with another site is refused: which of its own columns have too few rows in common "
        "with a column of that site.",
        "If it colludes with the coordinator: a sum without its own part. If all sites but one collude, this "
        "is the part of the last site.",
        "For survival curves, if all other sites collude with the coordinator: in which interval of time "
        "each row of a site left. In these counts a part of a site may be a single row.",
        "In an iterated fit with a column of many values, if all other sites collude with the coordinator: "
        "the linear predictor of 1 to {below_level} rows that have neither of two levels, and from this "
        "their values of that column.",
        "If a third of at least 14 sites collude with the coordinator: sums over some of the other sites, "
        "in one of 100 million key agreements.",
        "If it colludes with the coordinator: sums of products of its own columns with a column of another "
        "site. Each of its own columns gives one equation for that column.",
        "If it colludes with the coordinator: whether a label of groups or clusters that it knows occurs at "
        "other sites.",
        "In a fit with method='weighted', if it colludes with a second site: the weights of the entities "
        "that both have, and from these the approximate response of each entity.",
    ),
    DEPARTING: (
        "Everything that a coordinator learns.",
        "The part of one site in a sum, by leaving that site out or by reporting it as lost. A site whose "
        "policy has apart = 2 prevents this.",
        "It can make the estimate wrong for everybody.",
        "Sites refuse steps in another order.",
        "Sites refuse rows that differ in a few rows from those of earlier analyses.",
        "Sites refuse weights that concentrate on few rows, and estimates whose weights differ from earlier "
        "weights in few rows.",
        "Sites refuse products of rows of different entities, and a coordinator that deals random numbers.",
        "Sites refuse coefficients that single out few rows, alone or with the other coefficients of a "
        "session.",
        "Sites do not detect coefficients that nearly single out few rows, or that do so only over several "
        "sessions or over epochs of gradient descent. If only one row has a combination of levels, these "
        "coefficients reveal its other columns and its outcome.",
        "Sites cannot compare counts of survival curves with a minimum for the sum over three or more sites. "
        "Chosen ends of intervals reveal counts of few rows over all sites, once for each end: a site "
        "refuses ends that were not examined together with its earlier ones.",
        "Sites do not examine sums of mixed models that are masked among the same three or more sites. "
        "Chosen variances and dispersions reveal, over all sites, sums of groups of a rare size, and how "
        "many rows have each count.",
        "Sites do not detect chosen inverses of the information, by which scores of groups and clusters are "
        "corrected. Over several sessions they reveal, from sums over all sites, the squared score of one "
        "group whose columns are far from those of all others.",
        "A site that deals wrong random numbers can switch off the check of rows behind a product between "
        "two other sites. It learns no value itself.",
    ),
    INTRUDER: (
        "Who sends messages to whom, when, and how large they are, and every message that is neither masked"
        " nor sealed.",
        "A site does not answer a message that was altered or repeated. A site whose ledger was altered "
        "does not answer at all.",
        "It can stop an analysis by removing files.",
        "Anybody who can read the files of a site has its keys and its data.",
    ),
}
"""By party, at a site that is served under :meth:`Policy.strict`: sentences, one or two to a statement."""

BUDGET_SECTION = "[privacy]"
BUDGET_STATEMENTS = (
    "The published description of columns, which entities have a record, which of them lack a value in some"
    " columns, and how much of the budget is spent.",
    "Sums with noise. All releases together distinguish the values of one record from other values only as "
    "far as epsilon and delta of the budget allow. This also holds if parties collude.",
    "One exception: if the party that deals the random numbers of a secure product colludes with one of its "
    "two sites, both learn the columns of the other site.",
    "That a table was changed: a repeated request is then charged again.",
    "Every other request that depends on rows is refused.",
)
"""What all parties but an intruder learn where a policy has a privacy budget."""

SMALL_COUNT_RULES = ("min_level_count", "min_events")
"""Rules on the rows of a level and of an outcome, which may be fewer than the rows of other sums."""

COORDINATOR_LEARNS: Mapping[str, str] = {
    "raw columns": "It then has these columns",
    "per entity": "Every number is an equation in the columns of its entity. The rows of a site follow from "
    "about as many rounds as the site has columns",
    "sketch": "Without the common seed of the sites a sketch reveals products of columns. With the seed it "
    "reveals the columns. Sketches with more rows are more precise",
    "aggregate": "Each one describes one site. Together they may reveal more than each one alone",
    "noisy aggregate": "The noise is charged to the privacy budget of the site, and limits what they "
    "reveal of one record",
    "masked share": "One share is random. Two shares add up to products of columns of two sites, and the "
    "coordinator learns these products",
}
"""What the coordinator learns from unmasked values of a kind, most disclosing first."""
SITE_LEARNS: Mapping[str, str] = {
    "raw columns": "It then has the columns of another site",
    "per entity": "A number for each entity limits the possible values of the other sites' columns there",
    "sketch": "It has the seed. The sketch therefore reveals the columns",
    "aggregate": "They are sums or estimates over sites. With two sites, the sum without its own part "
    "is the part of the other site",
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
        "reported": reported_rows(max(policy.min_level_count, strict.min_level_count)),
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
