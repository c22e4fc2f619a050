r"""Whether a likelihood has a maximum: coefficients that go to infinity, in any family.

A concave log-likelihood has no maximum if and only if there is a direction along which it never falls
(Albert and Anderson 1984, Biometrika 71; Geyer 2009, Electron. J. Statist. 3). It is the direction in which
columns separate the responses. Sites release sums only, so no linear program can search for it in the rows.
Newton's steps find it: along it, the log-likelihood gains less with each step, but steps do not shrink.

A suspected direction is examined far away. It is the direction v in which the information has decreased most
since the start of the iteration, with a length of one standard error. If there is a maximum nearby, the
log-likelihood at its end is lower by about one half. If v separates, it is not lower at all. These values are
so different that neither rounding nor the processor decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import eigh

from fedstat.errors import EstimationError
from fedstat.inference.convergence import rounding_error
from fedstat.typing import Array, Bools, Floats

PATIENCE = 8
"""Number of evaluations after which steps that do not shrink are suspected."""
SHORT, NOISE = 0.2, 1e-7
"""Largest and smallest length, in standard errors, of a step that does not shrink and gains little."""
LARGE_STEP = 0.05
"""Change of a standardized coefficient that is too large for a step at a maximum."""
STILL = 1e-3
"""Change of a standardized coefficient below which a step goes nowhere: rounding at a maximum, not a way."""
CERTAIN = 0.01
r"""Length of a step in standard errors below which an examined direction is not examined again.

A log-likelihood that falls by :math:`\epsilon` for each unit of the linear predictor is recognized if
:math:`\epsilon > 2 \lambda^3`.
"""
COLLAPSED = 1e-4
"""Share of the first information along a direction that makes it suspect where an iteration ends."""
RIDGE, FARTHEST = 1e-10, 1e8
FAR_STEPS, DOUBLED = 50.0, 2.0
"""Limits of the examined way, in steps, and in distances of the last point: sums further away overflow."""
VANISHED = 1e-7
"""Smallest eigenvalue of the information with unit diagonal, of columns that are not collinear.

At a fit whose coefficients went towards infinity, the rows that a column separates have lost their weight,
and the column is constant over the others.
"""
GROWTH = 1.5
"""Least factor by which a step towards infinity increases the variance of such a coefficient."""
PART = 0.1
"""Share of the largest change above which a coefficient belongs to a direction."""


def continues(moves: Sequence[float], lengths: Sequence[float]) -> bool:
    """Return whether steps continue without gain, so that the maximum may be at infinity.

    With separated outcomes each step adds about one to a logit, and its length in standard errors shrinks by
    a constant factor; otherwise Newton's steps shrink ever faster once they are short. `moves` are the
    largest changes of a standardized coefficient, `lengths` those of the step in standard errors, both by
    evaluation.
    """
    if len(moves) < PATIENCE or not NOISE < lengths[-1] < SHORT:
        return False
    first, second, third = moves[-3:]
    shrinks = second <= 0.5 * first or third <= 0.5 * second or third < STILL
    return not shrinks and lengths[-1] < lengths[0]


def flattest(first: Floats, now: Floats, along: Floats) -> tuple[Floats, float]:
    """Return the part of a direction (p,) in which the information (p, p) decreased most, and what is left.

    The part has a length of one standard error. The other parts of the direction are left out, because over
    a distance that is long for them the likelihood would fall.
    """
    size = np.sqrt(np.maximum(np.abs(np.diag(first)), np.finfo(float).tiny))
    metric = first / np.outer(size, size) + RIDGE * np.eye(len(size))
    curvatures, axes = np.linalg.eigh(metric)
    if curvatures[0] <= 0.0:  # an observed information far from the maximum
        metric = axes * np.maximum(np.abs(curvatures), RIDGE) @ axes.T
    own = now / np.outer(size, size)
    values, vectors = eigh((own + own.T) / 2.0, (metric + metric.T) / 2.0)
    left = np.maximum(values, FARTHEST**-2)
    flat = left <= left[0] ** 0.5
    parts = (vectors.T @ metric @ (along * size))[flat]
    length = float(np.sqrt(parts**2 @ left[flat]))
    if not length > 0.0:
        return np.zeros_like(along), 1.0
    return np.asarray(vectors[:, flat] @ parts / length / size), float(left[0])


@dataclass(slots=True, eq=False)
class RecessionTest:
    """Examine the directions of an iteration over `n` rows for one along which the likelihood never falls.

    `first` (p, p) is the information at the start; `risen` states whether the last examined direction did not
    fall.

    Examples
    --------
    Steps of length one towards infinity: the eighth is suspected, and the log-likelihood far away decides.

    >>> import numpy as np
    >>> from fedstat.inference.recession import RecessionTest
    >>> test = RecessionTest(n=100, first=np.eye(1))
    >>> for k in range(8):
    ...     left = np.exp(-float(k))
    ...     far = test.far(left * np.eye(1), np.array([k]), np.ones(1), decrement=left**0.5)
    >>> far.round(1)
    array([33.1])
    >>> test.rises(-20.0, -20.1), test.rises(-20.6, -20.1)
    (True, False)
    """

    n: float
    first: Floats
    moves: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    risen: bool = False

    def far(
        self, now: Floats, point: Floats, step: Floats, decrement: float, *, ended: bool = False
    ) -> Floats | None:
        """Take a point (p,), and return the displacement (p,) to examine; None if nothing is suspected.

        `now` (p, p) is the information, and `decrement` the length of Newton's `step` (p,) in standard
        errors. If the iteration has `ended`, a direction that has lost its information is suspected as well.
        """
        self.moves.append(float(np.abs(step).max(initial=0.0)))
        self.lengths.append(decrement)
        suspected = ended or self.risen or continues(self.moves, self.lengths)
        if not (suspected and np.isfinite(now).all()):
            return None
        # At the end, a step may consist of rounding; the point itself has gone the way.
        along, most = (point, DOUBLED) if ended else (step, FAR_STEPS)
        direction, share = flattest(self.first, now, along)
        if not direction.any() or (ended and share >= COLLAPSED):
            return None
        return direction * min(1.0, most * float(np.abs(along).max() / np.abs(direction).max()))

    def rises(self, far: float, here: float) -> bool:
        """Return whether the log-likelihood at the far point is not below that at the present one."""
        self.risen = bool(far >= here - rounding_error(here, self.n))
        return self.risen

    def certain(self, far: Floats) -> bool:
        """Whether a direction along which nothing falls is one to infinity; `far` is the information there.

        Steps are so short that a maximum would be near, or no information is left to continue with.
        """
        if self.lengths[-1] < CERTAIN:
            return True
        size = np.sqrt(np.maximum(np.diag(far), np.finfo(float).tiny))
        scaled = far / np.outer(size, size)
        return not np.isfinite(scaled).all() or bool(np.linalg.eigvalsh(scaled)[0] < VANISHED**2)


def receding(
    step: Floats, before: Floats, now: Floats, back: Floats, slopes: Bools, *, complete: bool = False
) -> tuple[Bools, bool, bool]:
    """Return which parameters (p,) go to infinity, whether all do, and whether constants take part.

    `before` and `now` (p, p) are the information at the last two points, and `back` takes parameters of
    standardized columns to the units of the data. `slopes` are those other than intercepts and thresholds.
    `complete` means that the outcomes of all rows are known to be separated.
    """
    grown = _variances(now, back) > GROWTH * _variances(before, back)
    # If every coefficient grows, the direction of the step decides.
    complete = complete or bool(grown[slopes].all())
    share = np.abs(step) > PART * np.abs(step[slopes]).max(initial=0.0)
    culprits = slopes & (share if complete or not (grown & slopes).any() else grown)
    if not culprits.any():
        culprits = np.abs(step) > PART * np.abs(step).max(initial=0.0)
    return np.asarray(culprits), complete, bool(grown[~slopes].any()) and not complete


def _variances(information: Floats, back: Floats) -> Floats:
    """Variances of the coefficients in the data's units, (p,)."""
    size = np.sqrt(np.maximum(np.diag(information), np.finfo(float).tiny))
    # Near separation the information is singular to rounding: no inverse, but a pseudo-inverse.
    covariance = np.linalg.pinv(information / np.outer(size, size), hermitian=True) / np.outer(size, size)
    return np.asarray(np.einsum("ij,jk,ik->i", back, covariance, back))


def name_columns(culprits: Bools, reference: bool, names: Sequence[str], terms: Sequence[str]) -> str:
    """Return names of columns.

    If all columns of a factor and the intercept diverge (`reference`), it is the reference level.
    """
    listed, by_term = [], np.array(terms, dtype=object)
    each: Array = by_term[culprits]
    for term in dict.fromkeys(each):
        own = np.flatnonzero(by_term == term).tolist()
        if reference and len(own) > 1 and culprits[own].all():
            listed.append(f"the reference level of {term!r}")
        else:
            listed += [repr(names[j]) for j in own if culprits[j]]
    return ", ".join(listed)


def separation_text(kind: str, listed: str, evaluations: int) -> str:
    """Describe columns that separate the outcomes of all rows (`kind` is complete), or of some."""
    rows = "all" if kind == "complete" else "some"
    return (
        f"{kind} separation: the responses of {rows} rows follow exactly from {listed}. The "
        f"estimate would be infinite; after {evaluations} evaluations the coefficients still grow. "
        "Leave out the term, or merge its level with another"
    )


def unbounded_text(columns: Sequence[str]) -> str:
    """Describe columns of several sites that separate the responses of entities."""
    listed = ", ".join(map(repr, columns))
    return (
        f"the likelihood increases as the coefficients of {listed} grow without bound: columns separate the "
        "response, or too few entities have a block to determine its effects. Leave out columns or sites, or "
        "tabulate each column against the response"
    )


def require_bounded(information: Floats, names: Sequence[str]) -> None:
    """Require information on all coefficients (p,) at the end of an iteration; the first is an intercept.

    Raises EstimationError, which names the columns of directions without information.
    """
    size = np.sqrt(np.maximum(np.diag(information), np.finfo(float).tiny))
    scaled = information / np.outer(size, size)
    if not np.isfinite(scaled).all():
        return
    values, vectors = np.linalg.eigh((scaled + scaled.T) / 2.0)
    lost = np.abs(vectors[:, values < VANISHED])
    if lost.shape[1]:
        members = (lost[1:] > PART * lost.max()).any(axis=1)
        raise EstimationError(unbounded_text([name for name, m in zip(names[1:], members, strict=True) if m]))
