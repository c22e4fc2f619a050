"""The fit of a generalized linear model on the rows of one site alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from scipy.linalg.lapack import dposv

from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows, Sums, evaluate
from fedstat.typing import Floats

Chunks: TypeAlias = Callable[[], Iterable[Rows]]

SUBSAMPLE = 20_000
"""Rows of the subsample from which a fit of at least twice as many rows starts."""

ROWS_PER_COLUMN = 50
SCORING = 5
"""Steps of Fisher scoring, followed by Newton steps if the link is not canonical."""

HALVINGS = 20

SMALLEST_EIGENVALUE = 1e-12
"""Smallest eigenvalue of the information with unit diagonal; below it the columns count as dependent."""

COLLAPSE = 1e-6
"""Share of the first information that is left along a step if the estimate diverges."""

SINGULAR, SEPARATED = "information is singular", "separated"
EDGE = "estimate on the edge of what the family and its link allow"


@dataclass(slots=True)
class LocalFit:
    """Maximum likelihood estimate from one site's rows.

    `beta` (p,); `information` (p, p) is the expected one for dispersion one; `pearson` the sum of squared
    Pearson residuals. `converged` states whether beta is the estimate, to far less than a standard error, and
    `problem` the reason if not, or ''. `iterations` are scoring steps on all rows, `passes` the number of
    passes over all rows; one more pass counts them.
    """

    beta: Floats
    information: Floats
    deviance: float
    pearson: float
    converged: bool
    problem: str
    iterations: int
    passes: int


def fit_local(
    chunks: Chunks, distribution: DistributionSpec, *, maxiter: int = 50, tol: float = 1e-10
) -> LocalFit:
    """Fit by Fisher scoring and Newton steps with halving; the result reports problems, none is raised.

    `chunks` returns the same rows each time; `tol` bounds the squared length of the last step in standard
    errors.
    """
    rows = survey_rows(chunks())
    # Steps on a subsample cost a fraction of one on all rows, and end near the estimate.
    few = _Scoring(lambda: [rows.sample], distribution, rows).run(None, maxiter, tol)
    if rows.step == 1:
        return few
    return _Scoring(chunks, distribution, rows).run(few.beta if few.converged else None, maxiter, tol)


@dataclass(frozen=True, slots=True)
class RowSurvey:
    """Results of one pass over the rows.

    `size` (p,) is the root mean square of each column, `mean` the mean response, `sample` a copy of every
    `step`-th row; step is 1 if there are too few rows for a subsample, which then has all rows.
    """

    n: int
    p: int
    size: Floats
    mean: float
    sample: Rows
    step: int


def survey_rows(chunks: Iterable[Rows]) -> RowSurvey:
    """Count the rows and take a subsample of them, in one pass."""
    n, step, squares, total = 0, 1, np.zeros(0), 0.0
    parts: list[Rows] = []
    for rows in chunks:
        p = rows.X.shape[1]
        most = 2 * max(SUBSAMPLE, ROWS_PER_COLUMN * p)
        # Twice the required rows: every second one is dropped, and from now on only every `step`-th is kept.
        while sum(map(len, parts)) + len(rows) // step > most:
            parts = [join_rows(parts).part(slice(None, None, 2))] if parts else []
            step *= 2
        parts.append(join_rows([rows.part(slice(-n % step, None, step))]))
        n += len(rows)
        total += float(np.sum(rows.y))
        squares = np.einsum("ij,ij->j", rows.X, rows.X) + (squares if len(squares) else np.zeros(p))
    return RowSurvey(n, len(squares), np.sqrt(squares / max(n, 1)), total / max(n, 1), join_rows(parts), step)


def join_rows(parts: list[Rows]) -> Rows:
    """Return a single copy of all rows."""
    if not parts:
        return Rows(np.zeros((0, 0)), np.zeros(0))
    X, y = (np.concatenate(columns) for columns in zip(*((rows.X, rows.y) for rows in parts), strict=True))
    optional = zip(*((rows.offset, rows.freq, rows.var, rows.trials) for rows in parts), strict=True)
    # Joined columns of a design in Fortran order are in this order again.
    X = np.ascontiguousarray(X)
    return Rows(X, y, *(None if columns[0] is None else np.concatenate(columns) for columns in optional))


class _Scoring:
    """One run of Fisher scoring."""

    def __init__(self, chunks: Chunks, distribution: DistributionSpec, rows: RowSurvey) -> None:
        self.chunks, self.distribution, self.rows = chunks, distribution, rows
        self.beta = np.zeros(rows.p)
        self.sums = Sums(rows.n, 0.0, self.beta, np.zeros((rows.p, rows.p)), np.inf, np.inf)
        self.first = self.sums.information
        self.passes = self.iterations = 0
        self.blocked = False

    def run(self, start: Floats | None, maxiter: int, tol: float) -> LocalFit:
        problem = self._begin(start)
        while not problem:
            step = self._step()
            # The information is not positive definite, or has vanished along the step: the likelihood
            # increases without a maximum.
            if step is None or self._runs_off(step):
                problem = SEPARATED
            elif self._is_last(step, tol):
                if self.blocked:
                    problem = EDGE
                else:
                    self.beta = self.beta + step
                break
            elif self.iterations == maxiter:
                problem = f"not converged in {maxiter} iterations"
            else:
                problem = self._move(step)
        fit = (self.beta, self.sums.information, self.sums.deviance, self.sums.pearson)
        return LocalFit(*fit, not problem, problem, self.iterations, self.passes)

    def _sum(self, beta: Floats | None) -> Sums:
        self.passes += 1
        # For a canonical link, scoring is Newton's method; for others it is safer far away, but slower near
        # the maximum.
        newton = self.iterations > SCORING and not self.distribution.canonical
        return evaluate(self.chunks(), beta, self.distribution, observed=newton, center=self.rows.mean)

    def _step(self) -> Floats | None:
        """Return Newton's step if scoring was slow and the log-likelihood is concave, otherwise scoring's."""
        newton = None
        if self.sums.observed is not None:
            newton = solve_positive(self.sums.observed, self.sums.score)
        return solve_positive(self.sums.information, self.sums.score) if newton is None else newton

    def _begin(self, start: Floats | None) -> str:
        """Find a first beta at which the family allows all means."""
        if self.rows.n < max(self.rows.p, 1):
            return "fewer rows than columns"
        if start is None:
            sums = self._sum(None)
            if is_singular(sums.information):
                return SINGULAR
            start, self.first = solve_positive(sums.information, sums.score), sums.information
        if start is not None:
            self.beta, self.sums = start, self._sum(start)
        if not np.isfinite(self.sums.deviance):
            self.beta = self._constant_predictor()
            self.sums = self._sum(self.beta)
        if not np.isfinite(self.sums.deviance):
            return "no coefficients found that the family and its link allow"
        if self.first.any():
            return ""
        self.first = self.sums.information
        return SINGULAR if is_singular(self.first) else ""

    def _constant_predictor(self) -> Floats:
        """Return the coefficients whose linear predictor is nearest to that of the mean response."""
        with np.errstate(all="ignore"):
            eta = float(self.distribution.make().link(np.array([self.rows.mean]))[0])
        rows = (replace(rows, y=np.full(len(rows), eta)) for rows in self.chunks())
        self.passes += 1
        # Least squares on a constant response: exact if the columns contain an intercept.
        sums = evaluate(rows, None, DistributionSpec("Gaussian", "Identity"))
        beta = solve_positive(sums.information, sums.score)
        return self.beta if beta is None else beta

    def _move(self, step: Floats) -> str:
        """Follow a step as long as the deviance does not increase; note whether the domain limited it."""
        highest = self.sums.deviance + 1e-12 * abs(self.sums.deviance)
        self.iterations += 1
        self.blocked = False
        for halving in range(HALVINGS):
            beta = self.beta + step * 0.5**halving
            sums = self._sum(beta)
            if sums.deviance <= highest:
                self.beta, self.sums = beta, sums
                return ""
            self.blocked |= not np.isfinite(sums.deviance)
        return EDGE if self.blocked else "no step decreases the deviance"

    def _is_last(self, step: Floats, tol: float) -> bool:
        rest = max(self.sums.weight - self.rows.p, 1.0)
        dispersion = self.sums.pearson / rest if self.distribution.estimates_scale else 1.0
        small = self._length(step) <= 1e-12 * self._length(self.beta)
        return bool(small or step @ self.sums.score <= tol * dispersion)

    def _runs_off(self, step: Floats) -> bool:
        left = step @ self.sums.information @ step
        collapsed = left <= COLLAPSE * (step @ self.first @ step)
        return bool(collapsed and self._length(step) > 1e-3 * self._length(self.beta))

    def _length(self, beta: Floats) -> float:
        """Return the largest part that a column has in the linear predictor."""
        return float(np.max(np.abs(beta) * self.rows.size, initial=0.0))


def is_singular(information: Floats) -> bool:
    """Return whether columns are linearly dependent: (p, p)."""
    root = np.sqrt(np.diag(information))
    if not (root > 0.0).all():
        return True
    return bool(np.linalg.eigvalsh(information / np.outer(root, root)).min(initial=1.0) < SMALLEST_EIGENVALUE)


def solve_positive(H: Floats, score: Floats) -> Floats | None:
    """Solve ``H step = score``: (p, p), (p,) -> (p,); None where H is not positive definite."""
    root = np.sqrt(np.maximum(np.diag(H), 0.0))
    if not (root > 0.0).all():
        return None
    if not len(root):
        return np.zeros(0)
    # The routine itself: the checks around it take ten times as long for a few columns.
    _, step, problem = dposv(H / np.outer(root, root), score / root)
    return step / root if problem == 0 else None
