"""What a site's owner wants of the rows behind an answer; a site applies it before it answers.

The rules of minimum rows, rows per level and parameters per row are those of DataSHIELD (``nfilter.tab``,
``nfilter.glm``), with their defaults. The differencing check is ours: two aggregates over rows that differ
by a few rows disclose those rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.site import Policy, SiteData
from fedstat.typing import Bools, Ints


def check_rows(data: SiteData, n: int, n_parameters: int) -> None:
    """Require enough rows for the number of parameters.

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
            f"coefficients per row; the model has {n_parameters} for {n:,} rows. Use fewer terms, or leave "
            "the site out"
        )


def check_events(data: SiteData, events: int, n: int, response: str) -> None:
    """Require enough rows of either outcome of a response that is 0 or 1.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    few = min(events, n - events)
    if 0 < few < data.policy.min_events:
        which = "events" if events == few else "rows without the event"
        raise PolicyError(
            f"{data.name}: its policy (minimum events) wants none or at least {data.policy.min_events} rows "
            f"of either outcome of '{response}'; it has fewer {which}. Leave the site out"
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
    if rare:
        raise PolicyError(
            f"{data.name}: its policy (minimum rows per level) wants at least {least} rows of every level; "
            f"{rare} of the {len(counts)} levels of column '{column}' have fewer. Merge them with others, or "
            "leave their rows out"
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


def check_difference(data: SiteData, used: Bools) -> None:
    """Refuse rows that differ by a few from those of an earlier answer; otherwise remember them.

    Raises
    ------
    PolicyError
        As :func:`check_rows`.
    """
    policy: Policy = data.policy
    if not policy.answers_kept:
        return
    packed = np.packbits(used)
    for earlier in data.answered:
        apart = int(np.bitwise_count(packed ^ earlier).sum())
        if 0 < apart < policy.min_count:
            raise PolicyError(
                f"{data.name}: its policy (differencing) refuses rows that differ by fewer than "
                f"{policy.min_count} from those of an earlier answer; the difference would disclose them. "
                "Fit both models on the same rows: leave out the rows that lack a column of either"
            )
        if apart == 0:
            return
    data.answered.append(packed)
    del data.answered[: -policy.answers_kept]
