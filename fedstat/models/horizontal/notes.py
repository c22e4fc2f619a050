"""Notes that all families have whose sites hold different rows."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.errors import Remedy
from fedstat.inference.notes import Catalogue, Note

MASKED = (
    "the coordinator saw only the total, and no single site's contribution{}. This holds if coordinator and "
    "sites follow the protocol; the coordinator and some sites together learn the sum over the others."
)
TOO_SMALL = "errors are too small."
TWICE = "multiply them by 1.41, a bound for people at two sites each, or let one site hold all their rows."
TWICE_TOO_SMALL = f"{TOO_SMALL} {TWICE.capitalize()}"
"""Bound of the root of a variance of sums a + b of two sites: (a + b)(a + b)' is at most 2 (aa' + bb')."""
BY_KEY = Remedy(
    "FederatedGLM.from_formula(..., labels=['{key}']).fit(cov_type='cluster', "
    "cov_kwds={{'groups': '{key}'}})",
    ", or make the partition without on=, so that '{key}' is a column, and use {call}",
)
OTHER_MODEL = Remedy(
    "{model}.from_formula(..., labels=['{groups}']).fit(cov_type='cluster', "
    "cov_kwds={{'groups': '{groups}'}})",
    " Use {call}, which adds up the scores of equal labels, if each has min_count rows at a site; or "
    "{or_else}",
)
"""A fit that adds the scores of equal labels over sites."""
SUBSET = (
    "Rows used: {used:,} of {rows:,}. The others are outside of the subset '{subset}' or lack one of the "
    "columns."
)
FEW_EVENTS = 10
"""Events per coefficient below which Wald intervals are unreliable (Peduzzi et al. 1995)."""
LABELS = "{What} by '{groups}' are local: equal labels at two sites are two {what}. "

NOTES = Catalogue(
    critical={
        "shared_keys": "ONE PERSON AT TWO SITES: the keys of {rows:,} rows are at another site as well. Rows "
        "of one person are not independent, and standard errors are too small: keep each person at one "
        "site{remedy}.",
        "shared_keys/counted": "ONE PERSON AT TWO SITES: about {rows:,} rows have a key that is at another "
        f"site as well. Rows of one person are not independent, and standard {TWICE_TOO_SMALL}",
        "few_clusters": "FEW CLUSTERS: '{term}' rests on {effective} effective clusters of {clusters:,} by "
        "'{groups}'{others}. {problem}{remedy}.",
        "shared_labels": "ONE PERSON AT TWO SITES: about {labels:,} labels of '{groups}' are at several "
        "sites, and each is several {what}: {effect}{remedy} If they are different people, make labels "
        "unique.",
    },
    warning={
        "aliased_columns": "Left out, as R does (NA): {columns}. No rows distinguish them from other "
        "columns, as where a combination of levels has no rows; predictions for such rows leave the "
        "interaction out.",
        "heterogeneity": "The sites differ: {test} {joint}, p {p}. Each coefficient is an average over "
        "sites: .heterogeneity.",
        "not_proportional": "{meaning}",
        "few_events": "There are {ratio:.1f} events for each coefficient. With fewer than {least}, "
        "estimates are biased away from zero and intervals are unreliable.",
    },
    info={
        "censoring": "Censoring is assumed to be independent of the time of the event, given the columns.",
        "weights": "Standard errors account for the estimated weights. Effects of the treatment are causal "
        "if no unmeasured column affects both treatment and outcome, and the propensity model is right.",
        "weights/known": "Standard errors take the weights as known, as R's survey and sandwich do; those of "
        "cov_type='stacked' account for their estimation.",
        "left_out": "Rows left out because they lack one of the model's columns: {rows:,}.{more}",
        "left_out/complete": "Rows left out: {rows:,}.{more} Some are complete: at {sites}, the rows would "
        "differ in few from those of other analyses. Estimates and errors are of the rows used.",
        "subset": SUBSET + "{more}",
        "knots": "Knots: {splines}. They are rounded quantiles over all sites, for which the sites counted "
        "rows by interval.",
        "knots/published": "Knots: {splines}. They are among those that the sites publish.",
        "own_fits": "No fit of their own: {sites}. Their rows count in the estimate all the same{but}.",
        "heterogeneity/not_compared": "The sites are not compared: {reason}",
        "local_groups": LABELS + "Keyed hashes show none that is at several sites.",
        "local_groups/not_compared": LABELS
        + "Labels were not compared: a site has few of them, or no secret in common with the others "
        "('fedstat site seed').",
        "local_groups/serial": LABELS
        + "They are numbers from one on at all sites, which were taken as those of different people; "
        "if equal numbers are one person, {effect}{remedy}",
    },
    protocol={
        "masking": "{what} were masked over {sites} sites: " + MASKED.format("{apart}"),
        "masking/two_sites": "Sums were not masked: masks over two sites hide neither from the other.",
        "masking/none": "Sums were not masked: the coordinator saw each site's part.",
    },
)


def few_events(events: int, parameters: int) -> Iterator[Note]:
    """Warn of a model of times with few events for each of its parameters."""
    if events < FEW_EVENTS * parameters:
        yield NOTES.note("few_events", ratio=events / parameters, least=FEW_EVENTS)
