"""What a file of boosting results holds, and what providers of moments keep of their sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd

from fedstat.federation.tables.curve_columns import with_curves
from fedstat.federation.tables.curves import Curve
from fedstat.inference.notes import Note
from fedstat.inference.summary import CoefficientBlock
from fedstat.models.boost.learning.baselines import SiteBoosting
from fedstat.models.boost.learning.boosting import Boosting, ScoredBoosting
from fedstat.models.boost.learning.knots import DoubledKnots
from fedstat.models.boost.learning.learners import INTERCEPT, BoostFormula
from fedstat.models.boost.private.protocol import NoisyBoosting
from fedstat.models.boost.private.public_curves import PublicPart
from fedstat.models.horizontal.results import RowsBasis
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class BlocksBasis(RowsBasis):
    """Of sites with different columns: their blocks, and notes on the exchange."""

    blocks: tuple[CoefficientBlock, ...]
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PublicBasis:
    """Of a release with noise: what is public of each learner but the intercept, and last of the response."""

    model_name: str
    parts: tuple[PublicPart, ...]
    epsilon: float
    delta: float
    blocks: tuple[CoefficientBlock, ...]
    notes: tuple[Note, ...]

    @staticmethod
    def response_at(response: PublicPart, t: Floats) -> tuple[Floats, Floats]:
        """Return the public mean at points t, (G,), and one unit of each of the response's scores, (L, G).

        Of a number the middle of its range, and what one score is of it.
        """
        if response.curve is not None:
            mean, functions = response.curve.on(t)
            return mean, np.array(response.curve.deviations)[:, None] * functions
        assert response.bins is not None
        low, high = response.bins.range
        return np.array([(low + high) / 2.0]), np.array([[(high - low) / np.sqrt(12.0)]])

    def points(self, p: int) -> tuple[str, list[Any], Floats]:
        """Name of a learner's argument, its points, and what its columns are per unit there: (m, k)."""
        if p == 0:
            return "column", [INTERCEPT], np.ones((1, 1))
        part = self.parts[p - 1]
        if part.curve is not None:
            functions = np.array(part.curve.functions).T
            return "s", list(part.curve.grid), functions / np.array(part.curve.deviations)
        assert part.bins is not None
        if part.bins.levels:
            share = 1.0 / part.bins.count
            unit = np.eye(part.width) / np.sqrt(share * (1.0 - share))
            return "column", [f"{part.name}[{level}]" for level in part.bins.levels[1:]], unit
        low, high = part.bins.range
        return "column", [part.name], np.array([[np.sqrt(12.0) / (high - low)]])

    def new_columns(self, frame: pd.DataFrame, curves: Mapping[str, Curve]) -> tuple[Bools, Floats]:
        """Which rows lack nothing, and the scores of those after a column of ones."""
        parts = self.parts[:-1]
        held = {part.name: curves[part.name] for part in parts if part.curve is not None}
        frame = with_curves("the new rows", frame, held)
        complete = ~np.any([part.missing(frame[part.name]) for part in parts], axis=0)
        scores = [part.scores(frame[part.name])[complete] for part in parts]
        return complete, np.hstack([np.ones((int(complete.sum()), 1)), *scores])


@dataclass(frozen=True, slots=True, eq=False)
class BoostRecord:
    """What a file of results holds: the sums over all sites, from which the rest follows.

    `basis` is what the provider of moments keeps; `curves` is how a table holds the curves, `grids` are their
    points, `t` those of the response. Rows with the same value of `together` are in one fold; `person` is a
    column of the tables whose name is that of a person's number.
    `doubled` has the sums for twice as many knots, where these are checked.
    """

    basis: BlocksBasis | PublicBasis | RowsBasis
    formula: BoostFormula
    boosting: ScoredBoosting | SiteBoosting | NoisyBoosting | Boosting
    t: Annotated[Floats, "g"]
    curves: Mapping[str, Curve]
    grids: Mapping[str, Floats]
    steps: int
    select: str | None
    masked: bool
    together: str = ""
    person: str = ""
    doubled: DoubledKnots | None = None


def repeated_rows(record: BoostRecord) -> str:
    """Warn that folds separate rows of a person, if a column looks like a person's number; or ""."""
    name = record.person
    if not name or record.together:
        return ""
    return (
        f"Folds separate rows, and column '{name}' looks like a person's number. If persons have several "
        "rows, too many steps are chosen. Keep the rows of a person in one fold by "
        f"from_formula(..., labels=['{name}']) and fit(folds='{name}')."
    )
