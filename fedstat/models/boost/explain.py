"""Dry run of boosting: what the sums disclose."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from fedstat.models.horizontal.notes import MASKED

# ----------------------------------------------------------------------------------------------------
# Expected disclosure of boosting before the round, from its sums.


def tracing_auc(columns: int, rows: float) -> float:
    """AUC of an attacker who knows a record and the population, and asks whether the record is in the data.

    It is that of the likelihood ratio on a Gram matrix of normal columns, Phi(columns / (2 sqrt(rows))).
    """
    return float(norm.cdf(columns / (2.0 * np.sqrt(rows))))


def traced_columns(columns: int, along: int, weighted: int = 0, scores: int = 0, varying: int = 0) -> int:
    """Return the size of one Gram matrix with as many products as the sums of a fit.

    It has the columns of all learners, and `along` columns of the response in its basis. Each of the
    `weighted` further sums has products of the learners' columns, without the response. For a loss other than
    squares, `scores` replace the response. Columns that vary along the response, given with their numbers of
    splines, are multiplied with all others times its basis.
    """
    if scores:
        return int(np.ceil(np.sqrt(columns**2 + 2.0 * columns * along * scores)))
    if not weighted and not varying:
        return columns + along
    own = 0 if weighted else along**2
    more = varying**2 + 2.0 * varying * (columns * along + 1)
    return int(np.ceil(np.sqrt((1 + weighted) * columns**2 + 2.0 * columns * along + own + more)))


def masking_sentence(sites: int, weighted: int) -> str:
    """State the effect of masks."""
    if not weighted:
        return f"Sums were masked over {sites} sites: {MASKED.format('')}"
    return (
        f"Sums were masked over {sites} sites. At sites with different response points, every site's own "
        "sums can be computed from the weighted sums, as if unmasked; each site was therefore checked by "
        "its own number of rows."
    )


def tracing_sentence(columns: int, rows: float, weighted: int = 0) -> str:
    """State what the sums disclose about membership; `columns` from :func:`traced_columns`."""
    sums = f"{weighted + 1} weighted sums of products" if weighted else "sums of products"
    return (
        f"{sums} of {columns} columns over {rows:,.0f} rows: an attacker who knows a person's full record "
        f"can detect that it is in the data with AUC about {tracing_auc(columns, rows):.2f} (0.5 = chance; "
        f"0.6 needs {4 * columns**2:,} rows)"
    )


ONE_ROUND = "One round, whatever the number of steps"
OWN_SUMS = "learns every site's own sums: a baseline is computed from them, so that none can be masked."
BASELINE_ROUNDS = (
    "In the published method sites send their fits of all learners in every step, in as many rounds. This "
    "reveals about as much: the change of a fit by a known step gives the products of its columns with "
    "those of the chosen learner."
)
UNEVEN_MASKS = (
    "Curves of the response were measured at different points. If these differ by site, masks do not hide "
    "a site's own sums, so each site is checked by its own number of rows."
)
