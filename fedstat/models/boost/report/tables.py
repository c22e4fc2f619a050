"""Learners in the printed summary."""

from __future__ import annotations

import pandas as pd

from fedstat.inference.tables import Sheet
from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.scored import ScoredBoosting

WIDTH = 98
NUMBERS = {"df": 8, "first step": 12, "steps": 10, "explained": 11}


def learner_sheet(learners: pd.DataFrame) -> Sheet:
    """List learners: degrees of freedom, first step, and their shares of steps and of what is explained."""
    widths = tuple(NUMBERS.values())
    rows = tuple(
        (
            str(label),
            f"{row['df']:.1f}",
            f"{int(row['first_step']):,}" if row["first_step"] else "never",
            f"{100.0 * row['steps']:.1f} %",
            f"{100.0 * row['explained']:.1f} %",
        )
        for label, row in learners.iterrows()
    )
    stub = WIDTH - sum(widths) - len(widths)
    return Sheet(("learner", *NUMBERS), rows, "l" + "r" * len(widths), (stub, *widths))


def loss_rows(boosting: Boosting, risk: float) -> list[tuple[str, str]]:
    """Say of a loss that is no square what it is, how much is explained, and how often scores were told."""
    if not isinstance(boosting, ScoredBoosting):
        return []
    return [
        ("Loss", boosting.loss.title),
        ("Loss explained", f"{100.0 * (1.0 - risk / boosting.start_risk()):.1f} %"),
        ("Scores", f"{len(boosting.risks):,}, every {boosting.every:,} steps"),
        *([("Held back", f"{boosting.held:,} exchanges")] if boosting.held else []),
    ]
