"""Rules of a site's owner about the rows behind an answer: one rule, one function, which the door calls.

Steps tell facts (:mod:`fedstat.federation.door.facts`), and call none of these. The rules of minimum rows,
rows per level and parameters per row are those of DataSHIELD (``nfilter.tab``, ``nfilter.glm``), with their
defaults. The others are ours: one aggregate to which a few rows contribute all discloses those rows, and so
do two over rows that differ by a few (:mod:`fedstat.federation.door.differencing`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.door.facts import GroupSums
from fedstat.federation.door.state import SiteData
from fedstat.federation.door.weights import check_given_weights
from fedstat.federation.tables.bits import ColumnsDetail, least_for_bits
from fedstat.federation.tables.columns import MAX_SHOWN
from fedstat.typing import Floats, Ints

ENTITIES_PER_EQUATION = 2
"""Fewest entities behind sums of products, for each equation that they make about a column's values."""

REST = 0.01
"""Share of a column's variation that the rows besides the few largest must have."""


def check_entities(data: SiteData, n: int) -> None:
    """Require enough entities.

    Raises
    ------
    PolicyError
        Names the rule, the site and what its owner may change.
    """
    if n < data.policy.min_count:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.policy.min_count} entities behind "
            f"a sum, and {n} take part here. Use more entities, or leave the site out"
        )


def check_rows(data: SiteData, n: int, n_parameters: int = 0) -> None:
    """Require enough rows, also for the number of parameters.

    Raises
    ------
    PolicyError
        Names the rule, the site and what its owner may change.
    """
    policy = data.policy
    if n < policy.min_count:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {policy.min_count} whole rows; there "
            f"are {n}. Leave the site out, or use fewer columns with missing values"
        )
    if n_parameters > policy.max_parameters * n:
        raise PolicyError(
            f"{data.name}: its policy (maximum parameters per row) allows {policy.max_parameters:g} "
            f"coefficients per row; the model has {n_parameters:,} for {n:,} rows. Use fewer terms, or leave "
            "the site out"
        )


def check_uneven(data: SiteData, n: int, columns: int, times: int) -> None:
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
        least = max(least, int(np.ceil(columns * times / policy.max_parameters)))
    if 0 < n < least:
        raise PolicyError(
            f"{data.name}: its policy (maximum parameters per row) wants no curves of the response with "
            f"missing points or points of their own, or {least:,} of them in every fold, for {times} "
            f"weighted sums of products of {columns} columns; there are {n:,}. Leave them out by "
            "Curve(..., max_gap=0), use fewer knots, or put the response on one grid; the owner may allow "
            "it by the line  max_share = 1.0  in policy.toml"
        )


def check_events(data: SiteData, counts: tuple[int, int], response: str) -> None:
    """Require enough rows of either outcome of a binary response.

    Parameters
    ----------
    counts : (int, int)
        Rows without and with the event; rows of binomial counts may be either.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_events
    outcomes = ("rows without the event", "events")
    few = [what for what, count in zip(outcomes, counts, strict=True) if 0 < count < least]
    if few:
        raise PolicyError(
            f"{data.name}: its policy (minimum events) wants none or at least {least} rows of either outcome "
            f"of '{response}'; it has fewer {few[-1]}. Leave the site out"
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
    raise PolicyError(
        f"{data.name}: its policy (minimum rows per level) wants at least {least} rows of every level; "
        f"{rare:,} of the {len(counts):,} levels of column '{column}' have fewer. {remedy}"
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
            "named. Merge them with known levels, or leave their rows out"
        )


def check_indicators(data: SiteData, ones: Ints, n: int, names: Sequence[str]) -> None:
    """Require enough rows on either side of every design column of zeros and ones.

    Parameters
    ----------
    ones : (p,) int
        Rows that are one; -1 for a column that holds other values.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_level_count
    for name, count in zip(names, ones.tolist(), strict=True):
        if 0 < count < least or (count >= 0 and 0 < n - count < least):
            raise PolicyError(
                f"{data.name}: its policy (minimum rows per level) wants none or at least {least} rows on "
                f"either side of design column '{name}'; it has fewer. Merge levels, or leave the term out"
            )


def check_bits(data: SiteData, fact: GroupSums) -> None:
    """Require so many entities of every group that columns of few values are not determined by its sums.

    Raises
    ------
    DescriptionError
        From the sizes of the groups asked for and the published levels; names the line of the policy.
    """
    if data.policy.discrete == "any" or not fact.detail.levelled:
        return
    for group, n in zip(*np.unique(fact.code[fact.code >= 0], return_counts=True), strict=True):
        beside = ColumnsDetail(fact.beside.get(int(group), 0))
        least = least_for_bits((fact.detail, beside), fact.times)
        if n >= least:
            continue
        more = "" if data.policy.rounding == "dither" else ' (fewer with  rounding = "dither")'
        raise DescriptionError(
            f"{data.name}: its policy (bits of columns of few values) wants at least {least:,} entities "
            f"behind sums of products of these columns{more}, earlier fits with other columns included; a "
            f"group asked for has {n:,}. Merge groups, leave columns out, or use those of an earlier fit; "
            'the owner may allow it by the line  discrete = "any"  in policy.toml'
        )


def check_groups(
    data: SiteData, code: Ints, columns: int | None = None, times: int = 1, weights: Floats | None = None
) -> None:
    """Require enough entities of every group that has any, and weights that spread over them.

    Of products of p columns, those who know all columns but one hold p + 1 equations in that column's values
    for every matrix; see :mod:`fedstat.models.vertical.merges`. Arguments as for
    :class:`~fedstat.federation.door.facts.GroupSums`.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    counts = np.unique(code[code >= 0], return_counts=True)[1]
    equations = 0 if columns is None else times * (columns + 1)
    least = max(data.min_count, ENTITIES_PER_EQUATION * equations)
    if len(counts) and counts.min() < least:
        grams = (
            f", and {times} Gram matri{'x' if times == 1 else 'ces'} of {columns} columns at least {least}"
        )
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities behind the "
            f"sums of every fold or missing pattern{grams if equations else ''}; there are {counts.min()}. "
            "Use fewer columns, folds or Newton steps, or raise min_count"
        )
    if weights is not None:
        for group in np.unique(code[code >= 0]):
            check_given_weights(data, weights[code == group], "weights")


def check_left_out(data: SiteData, n: int) -> None:
    """Refuse sums without a few entities: the means are over all that take part, and would tell of these.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    if 0 < n < data.min_count:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities behind a sum, "
            f"and {n} of those that take part are in no pattern: leave them out from the start"
        )


def check_clusters(data: SiteData, rows: Sequence[int]) -> None:
    """Require enough rows of every cluster and stratum whose score leaves by itself.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    if any(0 < count < data.min_count for count in rows):
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} rows behind the score "
            "of a cluster or stratum that several sites have; some have fewer. Clusters and strata with "
            "labels of their own at every site need no such scores; if they do span sites, the owner must "
            "lower the count, or merge small ones"
        )


def rest_of_variation(extremes: Floats, n: float, squares: float, few: int) -> float:
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
    if rest < REST:
        raise PolicyError(
            f"{data.name}: its policy (minimum rows per level) wants at least {data.policy.min_level_count} "
            f"rows behind every column; fewer make up nearly all variation of {what}. Transform it, for "
            "instance by a logarithm, or leave it out"
        )


def check_variation(data: SiteData, extremes: Floats, n: float, squares: float, what: str) -> None:
    """As :func:`check_concentration`, from a column's extremes.

    An owner who allows as many coefficients as rows allows this as well.
    """
    few = data.policy.min_level_count - 1
    if few > 0 and data.policy.max_parameters < 1.0:
        check_concentration(data, rest_of_variation(extremes, n, squares, few), what)
