"""Checks of the rows behind a release: minimum counts, concentration, weights, and key alignment.

Each check raises a PolicyError, or the error that its docstring names, with the rule, the site and a remedy.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import pandas as pd

from fedstat.errors import ConsentError, DescriptionError, PolicyError, Remedy
from fedstat.federation.audit.event_log import AnswerRecord
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.tables.cardinality import ColumnCardinality, min_group_size
from fedstat.federation.tables.columns import MAX_SHOWN, TEXT_OF_NUMBERS
from fedstat.typing import Floats

SETTINGS = {
    "minimum count": "min_count",
    "minimum events": "min_events",
    "minimum rows per level": "min_level_count",
    "maximum parameters per row": "max_parameters",
}
"""Keys of the policy by which its owner can change the rules that count rows."""


def refusal(data: SiteData, rule: str, why: str) -> PolicyError:
    """Return the error of a rule that counts rows; its text ends with the setting of the owner."""
    return PolicyError.of_rule(rule, data.name, f"{why}; the owner's setting is {SETTINGS[rule]}")


# ----------------------------------------------------------------------------------------------------
# Weights that concentrate a sum on a few rows: the owner's requirements, whatever the source of the weights.

MIN_REMAINING_WEIGHT = 1e-3
"""Share of the weight in sums at given coefficients that rows other than the few heaviest must have.

It is small because fits of heavy-tailed links and of nearly separated outcomes are honest with 0.005.
"""


def check_case_weights(data: SiteData, state: State, fact: facts.CaseWeights) -> None:
    """Require that weights spread over enough rows: their effective number is (sum w)^2 / sum w^2."""
    least = data.policy.min_count
    if fact.total**2 < least * fact.squares * (1.0 - 1e-9) or not fact.total > 0.0:
        raise refusal(
            data,
            "minimum count",
            f"requires at least {least} effective rows; the weights of {', '.join(map(repr, fact.columns))} "
            "concentrate on fewer. Use other weights, or leave the site out",
        )


def count_dominant_rows(weights: Floats) -> int:
    """Return the fewest rows that have all weight but a negligible share, :data:`REST_OF_WEIGHT`."""
    shares = np.sort(np.abs(weights))[::-1].cumsum()
    if not len(shares) or shares[-1] == 0.0:
        return len(weights)
    return 1 + int(np.searchsorted(shares, (1.0 - MIN_REMAINING_WEIGHT) * shares[-1]))


def is_weight_spread(data: SiteData, weights: Floats) -> bool:
    """Return whether enough rows make up a weighted sum, and no row has more than the allowed share.

    Enough is what the owner requires behind a sum.

    Parameters
    ----------
    weights : (n,) array
        Not negative; all zero if nothing is released.
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
    """Refuse weights from outside, of any sign, that concentrate on a few entities."""
    if not all(is_weight_spread(data, np.abs(one)) for one in np.atleast_2d(fact.values.T)):
        raise refusal(
            data,
            "minimum count",
            f"requires at least {data.min_count} entities behind a sum; these {fact.what} concentrate on "
            f"fewer{max_share_text(data)}. Some columns may separate the response. Use fewer columns or, "
            "with a penalty, a larger lambda",
        )


def working_weights_spread(
    data: SiteData, each: Callable[[], Floats], totals: Floats | None, flat: Callable[[], bool] | None = None
) -> bool:
    """Return whether enough rows have weight in score and information, for every vector of weights.

    If means are flat at nearly all rows, weights reveal nothing about the rows behind a score.

    Coefficients can single out rows: if nearly all weight is on a few, the sums are those of a few rows,
    however many are added up. Sum and sum of squares mostly decide it: by Cauchy and Schwarz the k heaviest
    have a share of at most sqrt(k / n), where n = total^2 / squares is the effective number of rows.
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


def max_share_text(data: SiteData) -> str:
    """Return the owner's limit on the share of one row, for a text; empty if there is none."""
    share = data.policy.max_share
    return "" if share == 1.0 else f", or one row has more than its share (max_share = {share:g})"


# ----------------------------------------------------------------------------------------------------
# Rules of a site's owner about the rows behind a reply: one function for each rule.
#
# Steps report facts (:mod:`fedstat.federation.disclosure.facts`) and do not call these functions. The rules
# of minimum rows, rows per level and parameters per row are those of DataSHIELD (``nfilter.tab``,
# ``nfilter.glm``), with their defaults. The others are ours: one aggregate that a few rows make up discloses
# these rows, and so do two over rows that differ by a few
# (:mod:`fedstat.federation.disclosure.differencing`).

MIN_ENTITIES_PER_EQUATION = 2
"""Fewest entities behind sums of products, for each equation that they make about a column's values.

An owner who allows as many coefficients as rows, or more, decides by it: :func:`entities_per_equation`.
"""

MIN_REMAINING_VARIATION = 0.01
"""Share of a column's variation that rows other than the few largest must have."""


def entities_per_equation(policy: Policy) -> float:
    """Return the fewest entities for each equation that a site's owner allows."""
    loose = policy.max_parameters >= 1.0
    return 1.0 / policy.max_parameters if loose else float(MIN_ENTITIES_PER_EQUATION)


def _min_entities(data: SiteData, equations: int) -> int:
    return max(data.min_count, int(np.ceil(entities_per_equation(data.policy) * equations)))


def check_entities(data: SiteData, state: State, fact: facts.EntityCount) -> None:
    """Require enough entities."""
    if fact.n < data.policy.min_count:
        raise refusal(
            data,
            "minimum count",
            f"requires at least {data.policy.min_count} entities behind a sum; here there are {fact.n}. Use "
            "more entities, or leave the site out",
        )


def check_rows(data: SiteData, state: State, fact: facts.RowCount) -> None:
    """Require enough rows, also for the number of parameters."""
    policy = data.policy
    if fact.n < policy.min_count:
        raise refusal(
            data,
            "minimum count",
            f"requires at least {policy.min_count} complete rows; there are {fact.n}. Leave the site out, or "
            "use fewer columns with missing values",
        )
    _check_parameters(data, fact.parameters, fact.n, "per row", " rows")


def _check_parameters(data: SiteData, parameters: int, n: int, each: str, what: str) -> None:
    """Require enough rows, or what counts instead of them, for the number of parameters of a model."""
    most = data.policy.max_parameters
    if parameters > most * n:
        raise refusal(
            data,
            "maximum parameters per row",
            f"allows {most:g} coefficients {each}; the model has {parameters:,} for {n:,}{what}. Use fewer "
            "terms, or leave the site out",
        )


def check_unequal_weights(data: SiteData, state: State, fact: facts.UnequalWeights) -> None:
    """Require enough rows with different weights in several sums of products over the same rows.

    A party that knows the weights has `times` equations for each product, so columns count as often. An owner
    who lets one row be nearly all of a column allows it for few rows.
    """
    policy = data.policy
    least = policy.min_count
    if policy.max_share < 1.0:
        least = max(least, int(np.ceil(fact.columns * fact.times / policy.max_parameters)))
    if 0 < fact.n < least:
        raise PolicyError.of_rule(
            "maximum parameters per row",
            data.name,
            f"requires that no curve of the response has missing or individual points, or {least:,} curves "
            f"do in every fold, for {fact.times} weighted sums of products of {fact.columns} columns; there "
            f"are {fact.n:,}. Use fewer knots, or put the response on one grid; the owner can allow it with  "
            "max_share = 1.0  in policy.toml. Curves with a max_gap leave out longer gaps and fill others",
        )


def check_events(data: SiteData, state: State, fact: facts.OutcomeCounts) -> None:
    """Require enough rows of either outcome of a binary response."""
    least = data.policy.min_events
    outcomes = ("rows without the event", "events")
    few = [what for what, count in zip(outcomes, fact.counts, strict=True) if 0 < count < least]
    if few:
        raise refusal(
            data,
            "minimum events",
            f"requires no rows or at least {least} rows of either outcome of '{fact.response}'; it has fewer "
            f"{few[-1]}. Leave the site out",
        )


def check_levels(data: SiteData, column: str, counts: Sequence[int], numbers: bool = False) -> None:
    """Require enough rows of every level of a column."""
    least = data.policy.min_level_count
    rare = sum(0 < count < least for count in counts)
    if not rare:
        return
    remedy = (
        "Merge them with others, or leave their rows out"
        if rare <= MAX_SHOWN
        else "It looks like an identifier or a measurement: leave it out, or group it first"
    )
    if numbers:
        remedy = TEXT_OF_NUMBERS
    raise refusal(
        data,
        "minimum rows per level",
        f"requires at least {least} rows of every level; {rare:,} of the {len(counts):,} levels of column "
        f"'{column}' have fewer. {remedy}",
    )


def check_absorbed_levels(data: SiteData, state: State, fact: facts.AbsorbedLevels) -> None:
    """Require enough differences within levels and, where all releases are compared, no few small levels.

    Sums of products over all rows less those within levels are sums over the levels of products of their
    totals. If the totals of all large levels but one are known, these are solved for the totals of one or two
    small ones. So a policy that compares all releases requires no small level, or several.
    """
    policy, free = data.policy, fact.n - fact.rank
    within = f"within the levels of '{fact.effect}'"
    if free < policy.min_count:
        raise refusal(
            data,
            "minimum count",
            f"requires at least {policy.min_count} rows more than absorbed levels; {within} there are "
            f"{max(free, 0)}. Absorb an effect with fewer levels, or leave the site out",
        )
    _check_parameters(data, fact.parameters, free, "per row", f" rows more than levels {within}")
    least = policy.min_level_count
    rare = sum(0 < count < least for count in fact.counts)
    if policy.remember == "all" and 0 < rare < least:
        raise PolicyError.of_rule(
            "differencing",
            data.name,
            f"requires no or at least {least} absorbed levels of fewer than {least} rows; '{fact.effect}' "
            "has fewer. With sums over all rows, those within levels would reveal the totals of these "
            "levels. Merge them with others, or leave their rows out",
        )


def check_unknown_levels(data: SiteData, column: str, counts: Sequence[int]) -> None:
    """Refuse levels that the fit does not know if too few rows have them."""
    least = data.policy.min_level_count
    if any(0 < count < least for count in counts):
        raise PolicyError(
            f"{data.name}: column '{column}' has levels that the fit does not know in {sum(counts):,} rows; "
            "the policy (minimum rows per level) does not release the name of a level with fewer than "
            f"{least} rows. Merge them with known levels, or leave their rows out",
            rule="minimum rows per level",
            site=data.name,
        )


def check_indicators(data: SiteData, state: State, fact: facts.IndicatorCounts) -> None:
    """Require enough rows on either side of every design column of zeros and ones."""
    least = data.policy.min_level_count
    for name, count in zip(fact.names, fact.ones.tolist(), strict=True):
        if 0 < count < least or (count >= 0 and 0 < fact.n - count < least):
            raise refusal(
                data,
                "minimum rows per level",
                f"requires no rows or at least {least} rows on either side of design column '{name}'; it has "
                "fewer. Merge levels, or leave the term out",
            )


@dataclass(frozen=True, slots=True)
class ComparedColumn(AnswerRecord):
    """A number or a level of the analyst with which a column was compared.

    `above`: whether equal values are on the side of the lower ones; None for a comparison of equality.
    """

    column: str
    against: bool | int | float | str
    above: bool | None


_cut = attrgetter("against", "above")


def check_cuts(data: SiteData, fact: facts.FactorsRequested) -> None:
    """Require enough rows between all numbers of the analyst with which a column was ever compared.

    No rows are too few as well. Without an own reply for them, a search by further numbers finds a value: a
    subset without rows, or with the rows of an earlier subset, would cost no refusal. Published levels and
    knots are few, and known in advance.
    """
    least, ledger = data.policy.min_level_count, data.site_ledger
    if data.policy.remember != "all" or least < 2:
        return
    for factor in fact.factors:
        if factor.functions != (facts.COMPARISON,) or factor.columns[0] not in data.table.columns:
            continue
        (name,), against, equal = factor.columns, factor.options["against"], factor.options["equal"]
        known = data.published.get(name)
        if known is not None and against in (*known.levels, *(() if equal else known.knots)):
            continue
        this = ComparedColumn(name, against, None if equal else factor.options["above"])
        if this in ledger.records(ComparedColumn):
            continue
        values = pd.concat([chunk[name] for chunk in data.table.chunks([name])]).dropna()
        if equal:
            inside = int((values == against).sum())
            apart = [inside, len(values) - inside]
        else:
            x = np.sort(pd.to_numeric(values, errors="coerce").dropna().to_numpy(dtype=float))
            earlier = (one for one in ledger.records(ComparedColumn) if one.column == name)
            cuts = sorted((this, *(one for one in earlier if one.above is not None)), key=_cut)
            below = [np.searchsorted(x, one.against, "right" if one.above else "left") for one in cuts]
            place = cuts.index(this)
            apart = np.diff([0, *below, len(x)])[place : place + 2].tolist()
        if min(apart) < least:
            raise refusal(
                data,
                "minimum rows per level",
                f"requires at least {least} rows on both sides of '{factor.text}', and between it and other "
                f"numbers with which '{name}' was compared. Use a number of an earlier request, have the "
                "owner publish a knot or level, or leave the site out",
            )
        ledger.remember(this)


def check_counted_product(data: SiteData, state: State, fact: facts.CountedProduct) -> None:
    """Require no rows or enough rows behind every product with a column of another site.

    A DescriptionError if rows were not counted, or the count was compared with less than the owner's minimum.
    """
    least = data.policy.min_level_count
    if least < 2:
        return
    if data.policy.products != "any" and (fact.least is None or fact.least < least):
        raise DescriptionError.of_rule(
            "rows behind a product",
            data.name,
            f"requires a count of the rows behind products with columns of '{fact.peer}', compared with at "
            f'least {least}. Use a family that counts them; the owner can allow it with  products = "any"  '
            "in policy.toml",
        )
    # A count that was made counts, also where the owner does not require it: tables always make it.
    if fact.names and fact.least is not None:
        names = ", ".join(map(repr, fact.names[:MAX_SHOWN])) + ", ..." * (len(fact.names) > MAX_SHOWN)
        raise PolicyError.of_rule(
            "rows behind a product",
            data.name,
            f"requires no rows or at least {fact.least} rows (min_level_count) behind the product of every "
            f"column here with a column of '{fact.peer}'; {names} has fewer with one of them. Merge levels, "
            "or leave one of the two terms out",
        )


def check_cardinality(data: SiteData, fact: facts.GroupSums) -> None:
    """Require enough entities of every group that its sums do not determine columns of few values.

    It is a DescriptionError, since the sizes of the requested groups and the published levels decide.
    """
    if data.policy.discrete == "any" or not fact.detail.leveled:
        return
    for group, n in zip(*np.unique(fact.code[fact.code >= 0], return_counts=True), strict=True):
        other_columns = ColumnCardinality(fact.other_columns.get(int(group), 0))
        least = min_group_size((fact.detail, other_columns), fact.times)
        if n >= least:
            continue
        more = "" if data.policy.rounding == "dither" else ' (fewer with  rounding = "dither")'
        raise DescriptionError.of_rule(
            "bits of columns of few values",
            data.name,
            f"requires at least {least:,} entities behind sums of products of these columns{more}, including "
            f"earlier fits with other columns; a requested group has {n:,}. Merge groups, leave columns out, "
            'or use those of an earlier fit; the owner can allow it with  discrete = "any"  in policy.toml',
        )


def check_groups(data: SiteData, state: State, fact: facts.GroupSums) -> None:
    """Require enough entities of every group that has any, and weights that spread over them.

    From sums of products of p columns, a party that knows all columns but one has p + 1 equations in the
    values of that column for every matrix; see :mod:`fedstat.models.vertical.pattern_merging`.
    """
    counts = np.unique(fact.code[fact.code >= 0], return_counts=True)[1]
    equations = fact.equations if fact.columns is None else fact.times * (fact.columns + 1)
    least = _min_entities(data, equations)
    if len(counts) and counts.min() < least:
        matrices = f"{fact.times} Gram matri{'x' if fact.times == 1 else 'ces'} of {fact.columns} columns"
        what = f"{equations} equations about a column" if fact.columns is None else matrices
        grams = f", and {what} at least {least}"
        raise refusal(
            data,
            "minimum count",
            f"requires at least {data.min_count} entities behind the sums of every fold, missing "
            f"pattern or interval of time{grams if equations else ''}; there are {counts.min()}. Use fewer "
            "columns, folds, intervals or Newton steps, or leave the site out",
        )
    if fact.weights is not None:
        for group in np.unique(fact.code[fact.code >= 0]):
            check_external_weights(data, state, facts.ExternalWeights(fact.weights[fact.code == group]))


def check_excluded_entities(data: SiteData, state: State, fact: facts.ExcludedEntities) -> None:
    """Refuse sums without a few entities: the overall means include these, and would reveal them."""
    if 0 < fact.n < data.min_count:
        raise refusal(
            data,
            "minimum count",
            f"requires at least {data.min_count} entities behind a sum, and {fact.n} of the entities are in "
            "no pattern: leave them out from the start",
        )


def check_clusters(data: SiteData, state: State, fact: facts.ClusterRowCounts) -> None:
    """Require enough rows of every cluster and stratum whose score is released by itself."""
    least = _min_entities(data, fact.equations)
    if any(0 < count < least for count in fact.rows):
        if fact.equations:
            raise refusal(
                data,
                "minimum count",
                f"requires at least {least} rows of every cluster that several sites have, since "
                f"{fact.equations} equations about a column follow from its sums; some have fewer. Use "
                'cov_kwds={..., "correction": "CR1"}, which needs no products by cluster, fewer terms, or '
                "labels that differ between sites if clusters do not span sites",
            )
        raise refusal(
            data,
            "minimum count",
            f"requires at least {data.min_count} rows behind the score of a cluster or stratum that several "
            "sites have; some have fewer. If clusters and strata do not span sites, use labels that differ "
            "between sites; no such scores are then needed. Otherwise merge small ones",
        )


def check_cluster_counts(data: SiteData, state: State, fact: facts.ClusterCounts) -> None:
    """Require enough clusters, as of entities, also for the number of parameters and of every kind.

    Sums with one cluster for all rows follow from sums over these rows. Where the clusters are persons, they
    are the values of one person nevertheless, so only the column that names the site may have one cluster.
    """
    policy, groups = data.policy, f"clusters by '{fact.groups}'"
    if fact.n < data.min_count and not (fact.whole and fact.n == 1):
        raise refusal(
            data,
            "minimum count",
            f"requires at least {data.min_count} {groups} behind a sum; there are fewer. Leave the site out, "
            f"or {fact.remedy}",
        )
    _check_parameters(data, fact.parameters, fact.n, f"for each of the {groups}", "")
    for kind, counts in fact.kinds.items():
        if any(0 < count < policy.min_level_count for count in counts):
            raise refusal(
                data,
                "minimum rows per level",
                f"requires none or at least {policy.min_level_count} {groups} {kind}; there are fewer. "
                f"{fact.remedies.get(kind, 'Merge levels, or leave clusters out')}",
            )


@dataclass(frozen=True, slots=True)
class ScoresByCluster(AnswerRecord):
    """Columns of the clusters by which a site has summed scores."""

    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NeighborsInClusters(AnswerRecord):
    """Columns of clusters, and of the order in them, by which a site has summed products of neighbors."""

    columns: tuple[str, ...]
    order: str


def check_cluster_products(data: SiteData, state: State, fact: facts.ClusterProducts) -> None:
    """Require enough clusters behind sums of products of rows' scores, and the same clusters in all sessions.

    The sum over clusters minus the sum over rows has only products of different rows of a cluster. For one
    cluster of two rows, it determines all their values. So do two divisions into clusters that differ by one
    row. A DescriptionError if scores were summed by the clusters of another column before.
    """
    policy = data.policy
    if policy.products == "any":
        return
    now: list[AnswerRecord] = [ScoresByCluster(tuple(fact.columns))]
    if fact.order:
        now.append(NeighborsInClusters(tuple(fact.columns), fact.order))
    for one in now:
        if data.site_ledger.records(type(one)) - {one} and policy.remember == "all":
            raise DescriptionError.of_rule(
                "differencing",
                data.name,
                "has released scores by other clusters or strata, or products of neighbors in another "
                "order, and refuses these: the difference may belong to few rows. Use the clusters, strata "
                "and order of the earlier fit",
            )
    if ((fact.counts > 0) & (fact.counts < policy.min_level_count)).any():
        raise PolicyError.of_rule(
            "rows behind a product",
            data.name,
            f"requires none or at least {policy.min_level_count} clusters of two rows or more in which a "
            "column is not zero; there are fewer",
            remedy=Remedy("fit(cov_type='HC1')", "Use other clusters, or {arguments}"),
        )
    data.site_ledger.remember(*now)


def remaining_variation(extremes: Floats, n: float, squares: float, few: int) -> float:
    """Return the least share of a column's squared deviations that is left without `few` rows.

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
    """Require that more than a few rows make up a column's variation."""
    if rest < MIN_REMAINING_VARIATION:
        raise refusal(
            data,
            "minimum rows per level",
            f"requires at least {data.policy.min_level_count} rows behind every column; fewer make up nearly "
            f"all variation of {what}. Transform it, for example with a logarithm, or leave it out",
        )


def check_variation(data: SiteData, state: State, fact: facts.ColumnVariation) -> None:
    """Apply :func:`check_concentration` to a column's extremes.

    An owner who allows as many coefficients as rows allows this as well.
    """
    few = data.policy.min_level_count - 1
    if few > 0 and data.policy.max_parameters < 1.0:
        check_concentration(data, remaining_variation(fact.extremes, fact.n, fact.squares, few), fact.what)


# ----------------------------------------------------------------------------------------------------
# Rules of a site's owner for an alignment of keys: consent, and lists that are not longer than necessary.
#
# A site that enters invented keys learns which of them another site has: a list of all possible keys is
# checked as fast as it is encrypted. No protocol of this kind prevents that. So the owner consents to an
# alignment with known sites, each time, and no site accepts a list that is much longer than its own. Refusals
# are ConsentErrors.


@dataclass(frozen=True, slots=True)
class UsedConsent(AnswerRecord):
    """The owner's consent, of this time, to one alignment with a site."""

    site: str
    time: str


MAX_KEYS_PER_OWN_KEY = 2
"""Number of keys that another site may enter for each of one's own, if the owner sets no number."""


def check_alignment(data: SiteData, state: State, fact: facts.KeyAlignmentRequest) -> None:
    """Require that the owner has consented to an alignment with all others; a consent is valid once."""
    if data.policy.alignment == "allow":
        return
    consents, used = data.trust.consents, data.site_ledger.records(UsedConsent)
    lacking = [
        site for site in fact.others if site not in consents or UsedConsent(site, consents[site]) in used
    ]
    if lacking:
        raise ConsentError.of_rule(
            "alignment",
            data.name,
            f"requires the owner's consent to an alignment, and there is none for {', '.join(lacking)}",
            remedy=Remedy(
                "fedstat site consent FOLDER {sites}", "The owner consents to one alignment with '{call}'"
            ).filled(sites=" ".join(map(shlex.quote, lacking))),
        )
    # Before the keys leave: an attempt that fails has revealed at least lengths of lists, and needs another
    # one.
    data.site_ledger.remember(*(UsedConsent(site, consents[site]) for site in fact.others))


def check_key_list(data: SiteData, state: State, fact: facts.ExternalKeyList) -> None:
    """Require that a list of keys from another site is not longer than the owner allows."""
    most = data.policy.max_keys
    if most is None:
        if data.policy.alignment == "allow":
            return
        most = max(MAX_KEYS_PER_OWN_KEY * fact.own, data.policy.min_count)
    if fact.length > most:
        raise ConsentError.of_rule(
            "maximum keys",
            data.name,
            f"accepts lists of at most {most:,} keys, and this one has {fact.length:,}: a long list can "
            "contain guesses of its keys. Leave out keys that are not part of the study, or have the owner "
            "set max_keys",
        )
