"""Weights that leave a sum to a few rows: what the owner wants of them, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.door.state import SiteData
from fedstat.typing import Floats

REST_OF_WEIGHT = 1e-3
"""Share of the weight in sums at given coefficients that the rows besides the few heaviest must have.

It is small because fits of heavy-tailed links and of nearly separated outcomes are honest with 0.005.
"""


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
        Names the rule, the site and a remedy.
    """
    least = data.policy.min_count
    if total**2 < least * squares * (1.0 - 1e-9) or not total > 0.0:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {least} rows that count; the weights of "
            f"{', '.join(map(repr, columns))} leave nearly all weight to fewer. Use other weights, or leave "
            "the site out"
        )


def count_heavy(weights: Floats) -> int:
    """Fewest rows that have all weight but a negligible share, :data:`REST_OF_WEIGHT`."""
    shares = np.sort(np.abs(weights))[::-1].cumsum()
    if not len(shares) or shares[-1] == 0.0:
        return len(weights)
    return 1 + int(np.searchsorted(shares, (1.0 - REST_OF_WEIGHT) * shares[-1]))


def is_spread(data: SiteData, weights: Floats) -> bool:
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
    return bool(rest >= REST_OF_WEIGHT * scaled.sum())


def check_given_weights(data: SiteData, weights: Floats, what: str) -> None:
    """Refuse weights, of any sign, that came from outside and leave nearly all weight to a few entities.

    Parameters
    ----------
    weights : (n,) or (n, q) array
        One vector of weights or several, each of which is to spread.
    what : str
        What they are, in words.

    Raises
    ------
    PolicyError
        Names the rule, the site and a remedy.
    """
    if not all(is_spread(data, np.abs(one)) for one in np.atleast_2d(weights.T)):
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities behind a sum; "
            f"nearly all of these {what} belong to fewer{_or_one(data)}, as where columns separate the "
            "response. Use fewer columns or, where there is a penalty, a larger lambda"
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
    most = min((1.0 - REST_OF_WEIGHT) / max(few, 1) ** 0.5, data.policy.max_share)
    if all(squares <= (most * total) ** 2 for total, squares in pairs):
        return True
    return all(is_spread(data, weights) for weights in each() if np.isfinite(weights).all())


def refuse_working_weights(data: SiteData) -> None:
    """Refuse coefficients that single rows out.

    Raises
    ------
    PolicyError
        Always.
    """
    raise PolicyError(
        f"{data.name}: its policy (minimum count) wants at least {data.min_count} rows behind sums at any "
        f"coefficients; at these nearly all weight is on fewer{_or_one(data)}. In a fit that means outcomes "
        "that are nearly separated, or very long tails: leave out the term that separates them, or "
        "transform it"
    )


def _or_one(data: SiteData) -> str:
    share = data.policy.max_share
    return "" if share == 1.0 else f", or one row has more of it than its share (max_share = {share:g})"
