"""Detection of collinear columns and separated outcomes from sums over sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedstat.errors import EstimationError
from fedstat.models.glm.fit import Coordinates
from fedstat.models.horizontal.estimability import SHARE, require_independent
from fedstat.typing import Array, Bools, Floats

GROWTH = 1.5
"""Least factor by which a step towards infinity increases the variance of such a coefficient."""

PART = 0.1


def check_rank(information: Floats, coordinates: Coordinates) -> None:
    """Require linearly independent columns; the error names those that are collinear over all sites."""
    design = coordinates.design
    constant = partial(_has_constant, coordinates=coordinates) if design.intercept else None
    require_independent(information, design.names, constant)


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
    remedy: str = ""

    def error(self, sites: Sequence[str], coordinates: Coordinates) -> EstimationError:
        """Describe the columns that separate the outcomes, and the sites where they vary."""
        design = coordinates.design
        grown = _variances(self.now, coordinates) > GROWTH * _variances(self.before, coordinates)
        columns = np.ones(len(grown), dtype=bool)
        columns[0] = not design.intercept
        # If every coefficient grows, the direction of the step decides.
        complete = self.complete or bool(grown[columns].all())
        share = np.abs(self.step) > PART * np.abs(self.step[columns]).max(initial=0.0)
        culprits = columns & (share if complete or not (grown & columns).any() else grown)
        listed = _name(culprits, bool(grown[0]) and design.intercept and not complete, coordinates)
        known = coordinates.own is not None
        where = [site for k, site in enumerate(sites) if known and _shows(culprits, k, coordinates)]
        at = f" (at {', '.join(where)})" if where else ""
        kind, rows = ("complete", "all") if complete else ("quasi-complete", "some")
        return EstimationError(
            f"{kind} separation: the responses of {rows} rows follow exactly from {listed}{at}. The "
            f"estimate would be infinite; after {self.evaluations} evaluations the coefficients still grow. "
            f"Leave out the term, or merge its level with another{self.remedy}."
        )


def _variances(information: Floats, coordinates: Coordinates) -> Floats:
    """Variances of the coefficients in the data's units, (p,)."""
    size = np.sqrt(np.maximum(np.diag(information), np.finfo(float).tiny))
    # Near separation the information is singular to rounding: no inverse, but a pseudo-inverse.
    covariance = np.linalg.pinv(information / np.outer(size, size), hermitian=True) / np.outer(size, size)
    back = coordinates.back
    return np.asarray(np.einsum("ij,jk,ik->i", back, covariance, back))


def _name(culprits: Bools, reference: bool, coordinates: Coordinates) -> str:
    """Return names of columns.

    If all columns of a factor and the intercept diverge, it is the reference level.
    """
    design, listed = coordinates.design, []
    terms: Array = np.array(design.term_names, dtype=object)
    for term in dict.fromkeys(terms[culprits]):
        own = np.flatnonzero(terms == term)
        if reference and len(own) > 1 and culprits[own].all():
            listed.append(f"the reference level of {term!r}")
        else:
            listed += [repr(design.names[j]) for j in own if culprits[j]]
    return ", ".join(listed)


def _shows(culprits: Bools, k: int, coordinates: Coordinates) -> bool:
    """Return whether one of the columns occurs at a site: it varies, or is a constant other than zero."""
    assert coordinates.own is not None
    own = coordinates.varies(k) | (coordinates.own[k, 0] != 0.0)
    return bool(own[culprits].any())
