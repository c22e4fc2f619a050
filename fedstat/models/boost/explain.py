"""Dry run of boosting: what the sums disclose."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from fedstat.models.horizontal.results import MASKED

# ----------------------------------------------------------------------------------------------------
# Forecast of boosting before the round: what its sums tell.


def tracing_auc(columns: int, rows: float) -> float:
    """AUC of who knows a record, and the population, and asks whether it is among the rows.

    That of the likelihood ratio on a Gram of so many normal columns, Phi(columns / (2 sqrt(rows))).
    """
    return float(norm.cdf(columns / (2.0 * np.sqrt(rows))))


def traced_columns(columns: int, along: int, weighted: int = 0, scores: int = 0, varying: int = 0) -> int:
    """Columns of one Gram with as many products as the sums of a fit.

    Of columns of all learners, and `along` of the response in its basis; with so many `weighted` sums beside
    the first there are products of the learners' columns in each, and none of the response's. Of a loss that
    is no square there are so many `scores` in the response's place. Columns that vary along the response, so
    many with their splines, are multiplied with all others times its basis.
    """
    if scores:
        return int(np.ceil(np.sqrt(columns**2 + 2.0 * columns * along * scores)))
    if not weighted and not varying:
        return columns + along
    own = 0 if weighted else along**2
    more = varying**2 + 2.0 * varying * (columns * along + 1)
    return int(np.ceil(np.sqrt((1 + weighted) * columns**2 + 2.0 * columns * along + own + more)))


def masking_sentence(sites: int, weighted: int) -> str:
    """Say what masks hid."""
    if not weighted:
        return f"Sums were masked over {sites} sites: {MASKED.format('')}"
    return (
        f"Sums were masked over {sites} sites. Where these measured the response at points that differ, "
        "every site's own can be solved for from the weighted sums, as if in clear; each was held to its "
        "own rows."
    )


def tracing_sentence(columns: int, rows: float, weighted: int = 0) -> str:
    """Say what the sums tell about who is behind them; `columns` by :func:`traced_columns`."""
    sums = f"{weighted + 1} weighted sums of products, as many as" if weighted else "sums of products"
    return (
        f"{sums} of {columns} columns over {rows:,.0f} rows tell who knows all values of a person "
        f"whether these are among the rows: AUC about {tracing_auc(columns, rows):.2f} (.5 is chance; .6 "
        f"needs {4 * columns**2:,} rows)"
    )


ONE_ROUND = "One round, whatever the number of steps"
OWN_SUMS = "learns every site's own sums: a baseline is made of them, and none can be masked."
BASELINE_ROUNDS = (
    "In the publication sites send their fits of all learners in every step, in as many rounds. These tell "
    "about as much: how a fit changes by a step that is known gives the products of its columns with those "
    "of the learner that was taken."
)
UNEVEN_MASKS = (
    "Curves of the response were measured at different points: where these differ by site, masks hide no "
    "site's own sums, so that each is held to its own rows."
)
