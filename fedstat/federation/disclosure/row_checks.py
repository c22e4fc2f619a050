"""Checks of the rows behind a release: minimum counts, concentration, weights, and key alignment."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from fedstat.errors import ConsentError, DescriptionError, PolicyError
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.tables.cardinality import ColumnCardinality, min_group_size
from fedstat.federation.tables.columns import MAX_SHOWN
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Weights that leave a sum to a few rows: what the owner wants of them, wherever they come from.

MIN_REMAINING_WEIGHT = 1e-3
"""Share of the weight in sums at given coefficients that the rows besides the few heaviest must have.

It is small because fits of heavy-tailed links and of nearly separated outcomes are honest with 0.005.
"""


def check_case_weights(data: SiteData, state: State, fact: facts.CaseWeights) -> None:
    """Require that weights spread over enough rows: (sum w)^2 / sum w^2 is the number that they amount to.

    Raises
    ------
    PolicyError
        Names the rule, the site and a remedy.
    """
    least = data.policy.min_count
    if fact.total**2 < least * fact.squares * (1.0 - 1e-9) or not fact.total > 0.0:
        raise PolicyError.of_rule(
            "minimum count",
            data.name,
            f"wants at least {least} rows that count; the weights of {', '.join(map(repr, fact.columns))} "
            "leave nearly all weight to fewer. Use other weights, or leave the site out",
        )


def count_dominant_rows(weights: Floats) -> int:
    """Fewest rows that have all weight but a negligible share, :data:`REST_OF_WEIGHT`."""
    shares = np.sort(np.abs(weights))[::-1].cumsum()
    if not len(shares) or shares[-1] == 0.0:
        return len(weights)
    return 1 + int(np.searchsorted(shares, (1.0 - MIN_REMAINING_WEIGHT) * shares[-1]))


def is_weight_spread(data: SiteData, weights: Floats) -> bool:
    """Whether more than a few rows make up a weighted sum, and none has more of it than its owner allows.

    Few are fewer than the owner wants behind a sum.

    Parameters
    ----------
    weights : (n,) array
        Not negative; all zero where nothing is to be told.
    """
    few, share = data.policy.min_count - 1, data.policy.max_share
    if few < 1 or not weights.any() or len(weights) <= few:
        return True
    scaled = weights / weights.max()
    if share * scaled.sum() < 1.0 - 1e-9:
        return False
    rest = np.partition(scaled, len(scaled) - few)[: len(scaled) - few].sum()
    return bool(rest >= MIN_REMAINING_WEIGHT * scaled.sum())


def check_external_weights(data: SiteData, state: State, fact: facts.ExternalWeights) -> None:
    """Refuse weights, of any sign, that came from outside and leave nearly all weight to a few entities.

    Raises
    ------
    PolicyError
        Names the rule, the site and a remedy.
    """
    if not all(is_weight_spread(data, np.abs(one)) for one in np.atleast_2d(fact.values.T)):
        raise PolicyError.of_rule(
            "minimum count",
            data.name,
            f"wants at least {data.min_count} entities behind a sum; nearly all of these {fact.what} belong "
            f"to fewer{_max_share_text(data)}, as where columns separate the response. Use fewer columns or, "
            "where there is a penalty, a larger lambda",
        )


def working_weights_spread(
    data: SiteData,
    each: Callable[[], Floats],
    totals: Floats | None,
    flat: Callable[[], bool] | None = None,
) -> bool:
    """Whether more than a few rows weigh in score and information, by every vector of weights.

    Where means are flat at nearly all rows, weights tell nothing of who makes up a score.

    Coefficients can single rows out: where nearly all weight is on a few, the sums are those of a few rows,
    however many are added up. Sum and sum of squares mostly settle it: by Cauchy and Schwarz the k heaviest
    have a share of at most sqrt(k / n), n = total^2 / squares being the number of rows that the weights
    amount to.
    """
    few = data.policy.min_count - 1
    if few > 0 and flat is not None and flat():
        return False
    pairs = [(0.0, np.inf)] if totals is None else totals.tolist()
    # One row has a share of at most 1 / sqrt(n), likewise.
    most = min((1.0 - MIN_REMAINING_WEIGHT) / max(few, 1) ** 0.5, data.policy.max_share)
    if all(squares <= (most * total) ** 2 for total, squares in pairs):
        return True
    return all(is_weight_spread(data, weights) for weights in each() if np.isfinite(weights).all())


def refuse_working_weights(data: SiteData) -> None:
    """Refuse coefficients that single rows out.

    Raises
    ------
    PolicyError
        Always.
    """
    raise PolicyError.of_rule(
        "minimum count",
        data.name,
        f"wants at least {data.min_count} rows behind sums at any coefficients; at these nearly all weight "
        f"is on fewer{_max_share_text(data)}. In a fit that means outcomes that are nearly separated, or "
        "very long tails: leave out the term that separates them, or transform it",
    )


def _max_share_text(data: SiteData) -> str:
    share = data.policy.max_share
    return "" if share == 1.0 else f", or one row has more of it than its share (max_share = {share:g})"


# ----------------------------------------------------------------------------------------------------
# Rules of a site's owner about the rows behind an answer: one rule, one function, which the door calls.
#
# Steps tell facts (:mod:`fedstat.federation.disclosure.facts`), and call none of these. The rules of minimum
# rows, rows per level and parameters per row are those of DataSHIELD (``nfilter.tab``, ``nfilter.glm``),
# with their defaults. The others are ours: one aggregate to which a few rows contribute all discloses those
# rows, and so do two over rows that differ by a few (:mod:`fedstat.federation.disclosure.differencing`).

MIN_ENTITIES_PER_EQUATION = 2
"""Fewest entities behind sums of products, for each equation that they make about a column's values."""

MIN_REMAINING_VARIATION = 0.01
"""Share of a column's variation that the rows besides the few largest must have."""


def check_entities(data: SiteData, state: State, fact: facts.EntityCount) -> None:
    """Require enough entities.

    Raises
    ------
    PolicyError
        Names the rule, the site and what its owner may change.
    """
    if fact.n < data.policy.min_count:
        raise PolicyError.of_rule(
            "minimum count",
            data.name,
            f"wants at least {data.policy.min_count} entities behind a sum, and {fact.n} take part here. Use "
            "more entities, or leave the site out",
        )


def check_rows(data: SiteData, state: State, fact: facts.RowCount) -> None:
    """Require enough rows, also for the number of parameters.

    Raises
    ------
    PolicyError
        Names the rule, the site and what its owner may change.
    """
    policy = data.policy
    if fact.n < policy.min_count:
        raise PolicyError.of_rule(
            "minimum count",
            data.name,
            f"wants at least {policy.min_count} whole rows; there are {fact.n}. Leave the site out, or use "
            "fewer columns with missing values",
        )
    if fact.parameters > policy.max_parameters * fact.n:
        raise PolicyError.of_rule(
            "maximum parameters per row",
            data.name,
            f"allows {policy.max_parameters:g} coefficients per row; the model has {fact.parameters:,} for "
            f"{fact.n:,} rows. Use fewer terms, or leave the site out",
        )


def check_unequal_weights(data: SiteData, state: State, fact: facts.UnequalWeights) -> None:
    """Require enough rows that weigh differently in several sums of products over the same rows.

    Who knows the weights has `times` equations for each product, and so counts columns as often. An owner who
    lets one row be nearly all of a column allows it of few rows.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    policy = data.policy
    least = policy.min_count
    if policy.max_share < 1.0:
        least = max(least, int(np.ceil(fact.columns * fact.times / policy.max_parameters)))
    if 0 < fact.n < least:
        raise PolicyError.of_rule(
            "maximum parameters per row",
            data.name,
            f"wants no curves of the response with missing points or points of their own, or {least:,} of "
            f"them in every fold, for {fact.times} weighted sums of products of {fact.columns} columns; "
            f"there are {fact.n:,}. Leave them out by Curve(..., max_gap=0), use fewer knots, or put the "
            "response on one grid; the owner may allow it by the line  max_share = 1.0  in policy.toml",
        )


def check_events(data: SiteData, state: State, fact: facts.OutcomeCounts) -> None:
    """Require enough rows of either outcome of a binary response.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_events
    outcomes = ("rows without the event", "events")
    few = [what for what, count in zip(outcomes, fact.counts, strict=True) if 0 < count < least]
    if few:
        raise PolicyError.of_rule(
            "minimum events",
            data.name,
            f"wants none or at least {least} rows of either outcome of '{fact.response}'; it has fewer "
            f"{few[-1]}. Leave the site out",
        )


def check_levels(data: SiteData, column: str, counts: Sequence[int]) -> None:
    """Require enough rows of every level of a column.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_level_count
    rare = sum(0 < count < least for count in counts)
    if not rare:
        return
    remedy = (
        "Merge them with others, or leave their rows out"
        if rare <= MAX_SHOWN
        else "It looks like an identifier or a measurement: leave it out, or group it first"
    )
    raise PolicyError.of_rule(
        "minimum rows per level",
        data.name,
        f"wants at least {least} rows of every level; {rare:,} of the {len(counts):,} levels of column "
        f"'{column}' have fewer. {remedy}",
    )


def check_unknown_levels(data: SiteData, column: str, counts: Sequence[int]) -> None:
    """Refuse levels that the fit does not know and that too few rows have to be named.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_level_count
    if any(0 < count < least for count in counts):
        raise PolicyError(
            f"{data.name}: column '{column}' has levels that the fit does not know in {sum(counts):,} rows; "
            f"its policy (minimum rows per level) does not let a level with fewer than {least} rows be "
            "named. Merge them with known levels, or leave their rows out",
            rule="minimum rows per level",
            site=data.name,
        )


def check_indicators(data: SiteData, state: State, fact: facts.IndicatorCounts) -> None:
    """Require enough rows on either side of every design column of zeros and ones.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_level_count
    for name, count in zip(fact.names, fact.ones.tolist(), strict=True):
        if 0 < count < least or (count >= 0 and 0 < fact.n - count < least):
            raise PolicyError.of_rule(
                "minimum rows per level",
                data.name,
                f"wants none or at least {least} rows on either side of design column '{name}'; it has "
                "fewer. Merge levels, or leave the term out",
            )


def check_counted_product(data: SiteData, state: State, fact: facts.CountedProduct) -> None:
    """Require none or enough rows behind every product with a column of another site.

    Raises
    ------
    DescriptionError
        The rows were not counted, or compared with a smaller number than the owner's.
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_level_count
    if data.policy.products == "any" or least < 2:
        return
    if fact.least is None or fact.least < least:
        raise DescriptionError.of_rule(
            "rows behind a product",
            data.name,
            f"wants the rows behind products with columns of '{fact.peer}' counted first, and compared with "
            f"{least} at least. Use a family that counts them; the owner may allow it by the line  "
            'products = "any"  in policy.toml',
        )
    if fact.names:
        names = ", ".join(map(repr, fact.names[:MAX_SHOWN])) + ", ..." * (len(fact.names) > MAX_SHOWN)
        raise PolicyError.of_rule(
            "rows behind a product",
            data.name,
            f"wants none or at least {fact.least} rows (min_level_count) behind the product of every column "
            f"here with a column of '{fact.peer}'; {names} has fewer with one of them. Merge levels, or "
            "leave one of the two terms out",
        )


def check_cardinality(data: SiteData, fact: facts.GroupSums) -> None:
    """Require so many entities of every group that columns of few values are not determined by its sums.

    Raises
    ------
    DescriptionError
        From the sizes of the groups asked for and the published levels; names the line of the policy.
    """
    if data.policy.discrete == "any" or not fact.detail.leveled:
        return
    for group, n in zip(*np.unique(fact.code[fact.code >= 0], return_counts=True), strict=True):
        beside = ColumnCardinality(fact.beside.get(int(group), 0))
        least = min_group_size((fact.detail, beside), fact.times)
        if n >= least:
            continue
        more = "" if data.policy.rounding == "dither" else ' (fewer with  rounding = "dither")'
        raise DescriptionError.of_rule(
            "bits of columns of few values",
            data.name,
            f"wants at least {least:,} entities behind sums of products of these columns{more}, earlier fits "
            f"with other columns included; a group asked for has {n:,}. Merge groups, leave columns out, or "
            'use those of an earlier fit; the owner may allow it by the line  discrete = "any"  in '
            "policy.toml",
        )


def check_groups(data: SiteData, state: State, fact: facts.GroupSums) -> None:
    """Require enough entities of every group that has any, and weights that spread over them.

    Of products of p columns, those who know all columns but one hold p + 1 equations in that column's values
    for every matrix; see :mod:`fedstat.models.vertical.pattern_merging`.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    counts = np.unique(fact.code[fact.code >= 0], return_counts=True)[1]
    equations = 0 if fact.columns is None else fact.times * (fact.columns + 1)
    least = max(data.min_count, MIN_ENTITIES_PER_EQUATION * equations)
    if len(counts) and counts.min() < least:
        matrices = f"{fact.times} Gram matri{'x' if fact.times == 1 else 'ces'} of {fact.columns} columns"
        grams = f", and {matrices} at least {least}"
        raise PolicyError.of_rule(
            "minimum count",
            data.name,
            f"wants at least {data.min_count} entities behind the sums of every fold or missing "
            f"pattern{grams if equations else ''}; there are {counts.min()}. Use fewer columns, folds or "
            "Newton steps, or raise min_count",
        )
    if fact.weights is not None:
        for group in np.unique(fact.code[fact.code >= 0]):
            check_external_weights(data, state, facts.ExternalWeights(fact.weights[fact.code == group]))


def check_excluded_entities(data: SiteData, state: State, fact: facts.ExcludedEntities) -> None:
    """Refuse sums without a few entities: the means are over all that take part, and would tell of these.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    if 0 < fact.n < data.min_count:
        raise PolicyError.of_rule(
            "minimum count",
            data.name,
            f"wants at least {data.min_count} entities behind a sum, and {fact.n} of those that take part "
            "are in no pattern: leave them out from the start",
        )


def check_clusters(data: SiteData, state: State, fact: facts.ClusterRowCounts) -> None:
    """Require enough rows of every cluster and stratum whose score leaves by itself.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    if any(0 < count < data.min_count for count in fact.rows):
        raise PolicyError.of_rule(
            "minimum count",
            data.name,
            f"wants at least {data.min_count} rows behind the score of a cluster or stratum that several "
            "sites have; some have fewer. Clusters and strata with labels of their own at every site need no "
            "such scores; if they do span sites, the owner must lower the count, or merge small ones",
        )


CLUSTERS_KEY = "scores by clusters of "
"""Begins the name under which a site notes by which clusters it has summed scores."""


def check_cluster_products(data: SiteData, state: State, fact: facts.ClusterProducts) -> None:
    """Require enough clusters behind sums of products of rows' scores, and the same clusters in all sessions.

    Less the sum over rows, the sum over clusters has the products of different rows of a cluster only: of one
    cluster of two rows, all values of both follow. So they do from two divisions into clusters that differ by
    one row.

    Raises
    ------
    DescriptionError
        Scores were summed by the clusters of another column before.
    PolicyError
        As :func:`check_rows`.
    """
    policy = data.policy
    if policy.products == "any":
        return
    this = CLUSTERS_KEY + json.dumps(fact.columns)
    others = {once for once in data.site_ledger.spent if once.startswith(CLUSTERS_KEY)} - {this}
    if others and policy.remember == "all":
        raise DescriptionError.of_rule(
            "differencing",
            data.name,
            "has released scores by other clusters or strata, and releases none by these: the difference may "
            "belong to few rows. Use the clusters and strata of the earlier fit",
        )
    if ((fact.counts > 0) & (fact.counts < policy.min_level_count)).any():
        raise PolicyError.of_rule(
            "rows behind a product",
            data.name,
            f"wants none or at least {policy.min_level_count} clusters of two rows or more in which a column "
            "is not zero; there are fewer. Use other clusters, or cov_type='HC1'",
        )
    if this not in data.site_ledger.spent:
        data.site_ledger.spend(this)


def remaining_variation(extremes: Floats, n: float, squares: float, few: int) -> float:
    """Least share of a column's squared deviations that is left without `few` rows.

    Parameters
    ----------
    extremes : (m,) array
        Deviations from the mean of all rows; at least the `few` smallest and the `few` largest.
    n, squares : float
        Number of rows, and their sum of squared deviations.
    """
    if not np.isfinite(squares):
        return 0.0
    d = np.sort(extremes)
    if n <= few or not squares > 0.0:
        return 1.0
    chosen = [np.concatenate([d[:j], d[max(len(d) - few + j, j) :]]) for j in range(few + 1)]
    left = (squares - part @ part - part.sum() ** 2 / (n - len(part)) for part in chosen)
    return float(min(left) / squares)


def check_concentration(data: SiteData, rest: float, what: str) -> None:
    """Require that more than a few rows make up a column's variation.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    if rest < MIN_REMAINING_VARIATION:
        raise PolicyError.of_rule(
            "minimum rows per level",
            data.name,
            f"wants at least {data.policy.min_level_count} rows behind every column; fewer make up nearly "
            f"all variation of {what}. Transform it, for instance by a logarithm, or leave it out",
        )


def check_variation(data: SiteData, state: State, fact: facts.ColumnVariation) -> None:
    """As :func:`check_concentration`, from a column's extremes.

    An owner who allows as many coefficients as rows allows this as well.
    """
    few = data.policy.min_level_count - 1
    if few > 0 and data.policy.max_parameters < 1.0:
        check_concentration(data, remaining_variation(fact.extremes, fact.n, fact.squares, few), fact.what)


# ----------------------------------------------------------------------------------------------------
# Rules of a site's owner for an alignment of keys: consent, and no longer lists than there is need for.
#
# Whoever enters keys that it has made up learns which of them another site has: a list of all possible keys
# is found out as fast as it is raised. No protocol of this kind prevents that. So the owner consents to an
# alignment with sites that it knows, each time, and no site raises a list that is much longer than its own.

MAX_KEYS_PER_OWN_KEY = 2
"""Keys that another site may enter for each of one's own, where the owner names no number."""


def check_alignment(data: SiteData, state: State, fact: facts.KeyAlignmentRequest) -> None:
    """Require that the owner has consented to an alignment with all others; a consent serves once.

    Raises
    ------
    ConsentError
        The owner has not; says how.
    """
    if data.policy.alignment == "allow":
        return
    given = {site: f"alignment with {site}, {data.trust.consents.get(site)}" for site in fact.others}
    lacking = [
        site for site in given if site not in data.trust.consents or given[site] in data.site_ledger.spent
    ]
    if lacking:
        raise ConsentError.of_rule(
            "alignment",
            data.name,
            f"asks its owner first, who has not consented to one with {', '.join(lacking)}. Its owner does, "
            f"for one alignment, by 'fedstat site consent FOLDER {' '.join(lacking)}'",
        )
    # Before the keys leave: an attempt that fails has shown lengths of lists at least, and asks again.
    for consent in given.values():
        data.site_ledger.spend(consent)


def check_key_list(data: SiteData, state: State, fact: facts.ExternalKeyList) -> None:
    """Require that a list of keys from elsewhere is not longer than the owner allows.

    Raises
    ------
    ConsentError
        It is; says what would allow it.
    """
    most = data.policy.max_keys
    if most is None:
        if data.policy.alignment == "allow":
            return
        most = max(MAX_KEYS_PER_OWN_KEY * fact.own, data.policy.min_count)
    if fact.length > most:
        raise ConsentError.of_rule(
            "maximum keys",
            data.name,
            f"raises lists of at most {most:,} keys, and one of {fact.length:,} came: from among so many, "
            "its own can be guessed. Leave out keys that are none of those of the study, or have its owner "
            "set max_keys",
        )
