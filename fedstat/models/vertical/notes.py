"""Notes that families share whose sites hold different columns, such as on sums by missing pattern."""

from __future__ import annotations

from fedstat.errors import Remedy
from fedstat.federation.crypto.masks import TWO_SITES
from fedstat.inference.notes import Catalogue

MERGED = "Patterns with few entities are not released: "
SOLVABLE = (
    "The coordinator and the response holder can solve for unknown values: {numbers:,} numbers for every "
    "entity{earlier} are {held:,} bits, compared with at most {unknown:,} of the {columns} columns ({bits} "
    "per number, 1 for a column of two values). "
)
MANY_ROUNDS = " Masks hide a site's part of one round, but not of many."
CHOSEN = (
    "Estimates, standard errors, tests and intervals assume independent blocks, which the data chose "
    "(between=None).{ranges} A correlation that the test does not detect biases coefficients; {remedy} "
    "estimates those that it can."
)
RANGES = (
    " The columns '{lowest}' and '{highest}' have the smallest and the largest value of a coefficient if the "
    "sites that cannot be checked are correlated, without sampling error; they are blank where the data "
    "determine the coefficient."
)
FREE = Remedy("from_formula(..., between='free').fit()", "{arguments}")

NOTES = Catalogue(
    critical={
        "assumed_independent": "BLOCKS ASSUMED INDEPENDENT: {pairs} share too few entities to check this; "
        "the other sites do not contradict it ({p}){see}",
        "not_identified": "NOT IDENTIFIED: too few entities have records at both {pairs}{contradiction}. "
        "{numbers} assume that these sites are independent given all other columns",
    },
    warning={
        "two_sites": TWO_SITES,
    },
    info={
        "between_chosen": (
            CHOSEN.replace("{ranges}", ""),
            FREE,
        ),
        "between_chosen/ranges": (
            CHOSEN.replace("{ranges}", RANGES),
            FREE,
        ),
        "reused_patterns": "{records:,} records count as missing, as in an earlier fit of this partition "
        "that merged small missing patterns: sums with them would differ from earlier ones by few entities.",
        "merged_patterns": MERGED
        + "{entities:,} entities count as missing at a site that has them, and {left_out:,} that would "
        "lack everything are left out.{by_site}",
        "merged_patterns/values": MERGED
        + "{values} count as missing in {entities:,} entities that have them, and {left_out:,} that "
        "would lack everything are left out.",
        "merging_cost": "Some of these entities count as missing so that sums do not determine columns of "
        "few values (such as indicators): {lost}. Standard errors increase as if these records did not "
        "exist. To keep them:{exact} {entities:,} more entities in the patterns concerned; fewer columns; or "
        'the line  discrete = "any"  in policy.toml of {sites}.',
        "dither": "Before it was summed, every value was moved by up to .005 standard deviations of its "
        "column (dither), by secrets of {sites}. Standard errors account for it, and estimates change by a "
        "small part of these if keys change.",
        "solvable": SOLVABLE
        + "That is too few for {columns} columns of many values, and enough for {binary} of them if "
        "they have two." + MANY_ROUNDS,
        "solvable/rows": SOLVABLE
        + "That is enough for the rows of ALL sites, masked or not: treat them as disclosed. Fits of "
        "the normal family from sums that are exchanged once release no row-level values." + MANY_ROUNDS,
        "offset": "The offset '{name}' enters the linear predictor with coefficient one and is assumed to "
        "be independent of missing columns. Predictions are those at an offset of zero.",
        "weights": "The variance of the response is the error variance divided by '{name}'; every site "
        "received the weights of its entities.",
        "weights/frequency": "The value of '{name}' is the number of entities that a row represents; every "
        "site received the weights of its entities.",
        "most_correlated": "Most correlated blocks: '{first}' and '{second}', largest canonical correlation "
        "{canonical:.2f} over {entities:,} entities, {p} (times the number of pairs).{remedy}",
        "sparse_pairs": "{pairs}",
    },
    protocol={
        "sums": "Sums of the columns and of their products were exchanged once{how}; no row-level values "
        "left a site. Every sum is over at least {smallest:,} entities.{more}",
        "dealers": "Products between sites come from secure multiplication among sites that follow the "
        "protocol but may analyze what they receive (semi-honest). A third party deals the random numbers "
        "for two sites ({pairs}{see}), and must not collude with either of them. If the coordinator "
        "colludes with a site, both together learn the sums of the other sites' products with columns that "
        "they can read.",
        "bystander": "{site} has no part in this model, and deals for two other sites: it learns how many "
        "entities both have, by missing pattern.",
    },
)
