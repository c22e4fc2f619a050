"""Detection of collinear columns and separated outcomes from sums over sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.inference.recession import name_columns, receding, separation_text
from fedstat.models.glm.fit import Coordinates
from fedstat.models.horizontal.estimability import SHARE, require_independent
from fedstat.typing import Bools, Floats


def check_rank(information: Floats, coordinates: Coordinates) -> None:
    """Require linearly independent columns; the error names those that are collinear over all sites."""
    design = coordinates.design
    constant = partial(_has_constant, coordinates=coordinates) if design.intercept else None
    require_independent(information, design.names, constant, terms=design.term_names)


def _has_constant(combination: Floats, coordinates: Coordinates) -> bool:
    """Return whether a zero combination of standardized columns has a constant in the data's units."""
    own = coordinates.back @ combination
    return bool(abs(own[0]) > SHARE * np.abs(own[1:] * coordinates.shift[1:]).max(initial=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Separation:
    """Coefficients that go to infinity, at Newton's step of standardized coefficients (p,).

    `before` and `now` are the information at the last two points. `complete` means that the outcomes of all
    rows are known to be separated; otherwise the variances decide.
    """

    step: Floats
    before: Floats
    now: Floats
    evaluations: int
    complete: bool = False
    remedy: Remedy | None = None

    def error(self, sites: Sequence[str], coordinates: Coordinates) -> EstimationError:
        """Describe the columns that separate the outcomes, and the sites where they vary."""
        design = coordinates.design
        slopes = np.ones(len(self.step), dtype=bool)
        slopes[0] = not design.intercept
        culprits, complete, reference = receding(
            self.step, self.before, self.now, coordinates.back, slopes, complete=self.complete
        )
        listed = name_columns(culprits, reference and design.intercept, design.names, design.term_names)
        known = coordinates.own is not None
        where = [site for k, site in enumerate(sites) if known and _shows(culprits, k, coordinates)]
        at = f" (at {', '.join(where)})" if where else ""
        kind = "complete" if complete else "quasi-complete"
        text = separation_text(kind, listed + at, self.evaluations)
        return EstimationError(text, remedy=self.remedy)


def _shows(culprits: Bools, k: int, coordinates: Coordinates) -> bool:
    """Return whether one of the columns occurs at a site: it varies, or is a constant other than zero."""
    assert coordinates.own is not None
    own = coordinates.varies(k) | (coordinates.own[k, 0] != 0.0)
    return bool(own[culprits].any())
