"""What a site's owner wants of the rows behind an answer; a site applies it before it answers.

The rules of minimum rows, rows per level and parameters per row are those of DataSHIELD (``nfilter.tab``,
``nfilter.glm``), with their defaults. The others are ours: two aggregates over rows that differ by a few rows
disclose those rows, and so does one aggregate to which a few rows contribute all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.door.policy import Policy
from fedstat.federation.door.state import SiteData
from fedstat.federation.tables.columns import MAX_SHOWN
from fedstat.typing import Array, Bools, Floats, Ints

SAME_ROWS = "Fit both models on the same rows: name the columns of the one in complete=[...] of the other"
SAME_OUTCOMES = "Keep the comparison of the earlier model, or choose one that is farther away"
ENTITIES_PER_EQUATION = 2
"""Fewest entities behind sums of products, for each equation that they make about a column's values."""

REST = 0.01
"""Share of a column's variation that the rows besides the few largest must have."""

REST_OF_WEIGHT = 1e-3
"""Share of the weight in sums at given coefficients that the rows besides the few heaviest must have.

It is small because fits of heavy-tailed links and of nearly separated outcomes are honest with 0.005.
"""


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


def check_weights(data: SiteData, total: float, squares: float, columns: Sequence[str]) -> None:
    """Require that weights spread over enough rows: (sum w)^2 / sum w^2 is the number that they amount to.

    Parameters
    ----------
    total, squares : float
        Sum of the weights of the rows, and of their squares.
    columns : sequence of str
        What the weights are made of.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    least = data.policy.min_count
    if total**2 < least * squares * (1.0 - 1e-9) or not total > 0.0:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {least} rows that count; the weights of "
            f"{', '.join(map(repr, columns))} leave nearly all weight to fewer. Use other weights, or leave "
            "the site out"
        )


def surely_spread(data: SiteData, total: float, squares: float) -> bool:
    """Whether weights of this sum and sum of squares cannot have nearly all in a few rows.

    By Cauchy and Schwarz the k heaviest have a share of at most sqrt(k / n), n = total^2 / squares being the
    number of rows that the weights amount to.
    """
    return (data.policy.min_count - 1) * squares <= ((1.0 - REST_OF_WEIGHT) * total) ** 2


def is_spread(data: SiteData, weights: Floats) -> bool:
    """Whether more than a few rows make up a weighted sum; few are fewer than the owner wants behind one.

    Parameters
    ----------
    weights : (n,) array
        Not negative; all zero where nothing is to be told.
    """
    few = data.policy.min_count - 1
    if few < 1 or not weights.any() or len(weights) <= few:
        return True
    scaled = weights / weights.max()
    rest = np.partition(scaled, len(scaled) - few)[: len(scaled) - few].sum()
    return bool(rest >= REST_OF_WEIGHT * scaled.sum())


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


def check_difference(data: SiteData, used: Bools, events: Bools | None = None) -> None:
    """Refuse rows that differ by a few from those of an earlier answer; otherwise remember them.

    Parameters
    ----------
    used : (n_rows,) array of bool
        Rows of the table behind the answer.
    events : (n_rows,) array of bool, optional
        Those of them for which a comparison holds that the formula makes; they may not differ by a few
        either.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    policy: Policy = data.policy
    if not policy.answers_kept:
        return
    packed: Array = np.packbits(np.stack([used] if events is None else [used, events]), axis=1)
    known = False
    for earlier in data.answered:
        apart = int(np.bitwise_count(packed[0] ^ earlier[0]).sum())
        what, remedy = "rows", SAME_ROWS
        if apart == 0 and len(packed) == len(earlier) == 2:
            apart = int(np.bitwise_count(packed[1] ^ earlier[1]).sum())
            what, remedy = "outcomes of a comparison", SAME_OUTCOMES
        if 0 < apart < policy.min_count:
            raise PolicyError(
                f"{data.name}: its policy (differencing) refuses {what} that differ in fewer than "
                f"{policy.min_count} rows from those of an earlier answer; the difference would disclose "
                f"them. {remedy}"
            )
        known |= apart == 0 and len(earlier) >= len(packed)
    if not known:
        data.answered.append(packed)
        del data.answered[: -policy.answers_kept]
