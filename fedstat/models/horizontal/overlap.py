"""Overlap of arms: rows on which a weighted mean rests, and the note where these are few.

Balance, effects and survival have the same rule. With weights w of the rows of an arm,
``(sum w)^2 / sum w^2`` rows have the precision of the weighted mean, and ``(sum w^2)^2 / sum w^4`` rows carry
its variance. The second number decides: an interval rests on an estimate of this variance, and is too short
if few rows carry it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError, Remedy
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.tables import WIDTH, Sheet, number
from fedstat.typing import Floats

LEAST_CARRYING, LEAST_SHARE = 50.0, 0.5
"""Rows that carry the variance of a weighted mean, and their share of an arm, below which intervals fail.

Weights that are nearly equal do not make the interval of a small arm worse.
"""
BOUNDED = Remedy("from_formula(..., estimand='ATO').fit(...)", ". Use {arguments}, whose weights are bounded")
NOTES = Catalogue(
    critical={
        "poor_overlap": "POOR OVERLAP: few rows of '{arm}' are like those of other arms. About "
        "{carrying:.0f} of its {rows:,} rows carry the variance of its weighted mean. Below "
        f"{LEAST_CARRYING:.0f}, intervals are too short{{remedy}}.",
    }
)


def spread_of(W: Floats) -> Floats:
    """Return rows with weight, and sums of weights, of squares and of fourth powers, (k, 4), of (m, k)."""
    return np.stack([(W > 0.0).sum(axis=0), *((W**power).sum(axis=0) for power in (1, 2, 4))], axis=1)


def weight_frame(arm: str, levels: Sequence[LevelValue], rows: Floats, sums: Floats) -> pd.DataFrame:
    """Return rows, sums of weights and effective rows of the arms, from sums (J, 2) of weights and squares.

    Raises
    ------
    NotAvailableError
        There are no sums of weights.
    """
    if not sums.size:
        raise NotAvailableError("weights: standardization over all rows uses none")
    columns = {
        "rows": rows.astype(np.int64),
        "weight": sums[:, 0],
        "effective_rows": sums[:, 0] ** 2 / sums[:, 1],
    }
    return pd.DataFrame(columns, index=pd.Index(levels, name=arm))


def arm_sheet(frame: pd.DataFrame, heads: Sequence[str], last: str = "") -> Sheet:
    """Make the table of a summary by arm; the last column has a format of its own, or that of numbers."""
    rows = [
        (
            str(level),
            *(f"{one:,}" if isinstance(one, int) else number(one) for one in values[:-1]),
            format(values[-1], last) if last else number(values[-1]),
        )
        for level, *values in frame.reset_index().astype(object).to_numpy().tolist()
    ]
    widths = (12, 16, 16)
    return Sheet((str(frame.index.name), *heads), tuple(rows), "lrrr", (WIDTH - sum(widths) - 3, *widths))


def is_bounded(estimand: str, target: str) -> bool:
    """Return whether weights are bounded, or the population is one that no other estimand has."""
    return estimand in ("ATO", "matching") or bool(target)


def overlap_notes(levels: Sequence[LevelValue], rows: Floats, sums: Floats, bounded: bool) -> Iterator[Note]:
    """Warn of arms whose weighted means rest on few of their rows.

    Parameters
    ----------
    levels : sequence
        The J arms.
    rows : (J,) array
    sums : (J, 3) array
        Of weights, their squares and fourth powers; without rows nothing is examined.
    bounded : bool
        Whether no estimand has smaller weights, or a population of its own.
    """
    if sums.size == 0 or sums.shape[1] < 3:  # no weights, or results of an earlier version
        return
    carrying = sums[:, 1] ** 2 / sums[:, 2]
    for level, n, few in zip(levels, rows.tolist(), carrying.tolist(), strict=False):
        if few < min(LEAST_CARRYING, LEAST_SHARE * n):
            remedy = None if bounded else BOUNDED
            yield NOTES.note("poor_overlap", remedy=remedy, arm=str(level), rows=int(n), carrying=few)
