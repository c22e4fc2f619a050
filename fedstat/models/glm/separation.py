"""Detection of collinear columns and separated outcomes from sums over sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr, solve_triangular

from fedstat.errors import EstimationError
from fedstat.models.glm.fit import Coordinates
from fedstat.typing import Array, Bools, Floats

RANK_TOLERANCE = 1e-12
"""Relative eigenvalue of the information with unit diagonal below which columns are collinear."""

SHARE = 1e-4
PATIENCE = 8
"""Number of evaluations after which steps that do not shrink indicate a maximum at infinity."""

SHORT, NOISE = 0.1, 1e-7
"""Largest and smallest length, in standard errors, of a step that does not shrink and gains little."""

GROWTH = 1.5
"""Least factor by which a step towards infinity increases the variance of such a coefficient."""

PART = 0.1


def check_rank(information: Floats, coordinates: Coordinates) -> None:
    """Require linearly independent columns; the error names those that are collinear over all sites."""
    names = coordinates.design.names
    size = np.sqrt(np.diag(information))
    if (size == 0.0).any():
        raise EstimationError(f"design column {names[int(np.argmin(size))]!r} carries no information")
    scaled = information / np.outer(size, size)
    values, vectors = np.linalg.eigh(scaled)
    if values[0] > RANK_TOLERANCE * values[-1]:
        return
    # A root of the information has the dependencies of the design, but none of its rows.
    root = (np.sqrt(np.maximum(values, 0.0)) * vectors).T
    # Pivoting puts dependent columns last.
    R, pivot = qr(root, mode="r", pivoting=True)
    rank = int((np.abs(np.diag(R)) > np.sqrt(RANK_TOLERANCE)).sum())
    rank = min(max(rank, 1), len(names) - 1)
    weights = solve_triangular(R[:rank, :rank], R[:rank, rank:])
    groups = []
    for column, weight in zip(pivot[rank:], weights.T, strict=True):
        combination = np.zeros(len(names))
        # From columns of unit information back to standardized ones.
        combination[pivot[:rank]] = weight * size[column] / size[pivot[:rank]]
        involved = np.abs(combination) * size > SHARE * size[column]
        combination[column] = -1.0
        if coordinates.design.intercept:
            involved[0] = _has_constant(combination, coordinates)
        involved[column] = True
        *others, last = (repr(names[i]) for i in np.flatnonzero(involved))
        groups.append(f"{last} follows from {', '.join(others)}" if others else f"{last} is zero")
    raise EstimationError(
        f"design columns are collinear over all sites, to six digits or more: {'; '.join(groups)}. Leave "
        "out one of each group."
    )


def _has_constant(combination: Floats, coordinates: Coordinates) -> bool:
    """Return whether a zero combination of standardized columns has a constant in the data's units."""
    own = coordinates.back @ combination
    return bool(abs(own[0]) > SHARE * np.abs(own[1:] * coordinates.shift[1:]).max(initial=0.0))


def diverges(moves: Sequence[float], lengths: Sequence[float]) -> bool:
    """Return whether steps continue without gain: the maximum is at infinity.

    With separated outcomes each step adds about one to a logit, and its length in standard errors shrinks by
    a constant factor; otherwise Newton's steps shrink ever faster once they are short. `moves` are the
    largest changes of a standardized coefficient, `lengths` those of the step in standard errors, both by
    evaluation.
    """
    if len(moves) < PATIENCE or not NOISE < lengths[-1] < SHORT:
        return False
    first, second, third = moves[-3:]
    return second > 0.5 * first and third > 0.5 * second and lengths[-1] < lengths[0]


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
