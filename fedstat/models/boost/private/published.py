"""Simulation of the published algorithm with noise in every step, and its privacy cost.

Columns of all sites are in one process and the noise comes from numpy's generator: nothing is private here.
In every step the holder of the response sends its residuals to the others, as coefficients of a basis,
divided by their largest absolute value, plus normal noise of standard deviation 2 sqrt(Q) sigma with ``sigma
= sqrt(2 log(1.25 / delta)) / epsilon`` (4.8). The others fit their learners to these values (4.9); the one
with the least residual sum of squares (4.5), an integral over the curve, is added with a step of nu times
the divisor (4.11), which in the simulations of section 4.4 never exceeds the step before.
The publication's epsilon counts one step, and uses 2 sqrt(Q) as the sensitivity of a message, although its
divisor is a value of one person.

References
----------
Ding, Y. (2024). Statistical machine learning and data fusion methodologies: applications in
healthcare. Doctoral dissertation, Binghamton University, chapter 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import ModelError
from fedstat.privacy.gaussian_dp import GaussianAccountant, epsilon_of
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class PublishedBoosting:
    """A fit by the published mechanism, what its messages reveal about every row, and its cost.

    Attributes
    ----------
    coef : mapping of str to (k, Q) array
        Coefficients of every learner.
    selected : tuple of str
        Learner of every step.
    seen : (n, Q) array
        What the messages of all steps reveal about the response: their average, each scaled back to its unit,
        plus the model's fit.
    epsilon, delta : float
        The published values, of one step.
    n : int
    """

    coef: Mapping[str, Floats]
    selected: tuple[str, ...]
    seen: Floats
    epsilon: float
    delta: float
    n: int

    @property
    def _sigma(self) -> float:
        return _sigma(self.epsilon, self.delta)

    @property
    def true_epsilon(self) -> float:
        """Epsilon of all steps together at delta 1e-6, with the publication's sensitivity."""
        site_ledger = GaussianAccountant()
        site_ledger.add(1.0, self._sigma, len(self.selected))
        return site_ledger.epsilon()

    @property
    def worst_epsilon(self) -> float:
        """The same with the true sensitivity: one person's value divides the rows of all others."""
        steps, Q = len(self.selected), self.seen.shape[1]
        largest = np.sqrt((self.n - 1) * Q) / (2.0 * np.sqrt(Q) * self._sigma)
        return epsilon_of(float(largest * np.sqrt(steps)), 1e-6)

    def predict(self, X: Mapping[str, Floats]) -> Floats:
        """Predict the response's coefficients from columns of every learner: (m, Q)."""
        return np.asarray(sum(X[name] @ coef for name, coef in self.coef.items()))

    def summary(self) -> str:
        """State the cost of the fit in words."""
        return (
            f"Chapter 4, a simulation: nothing is private here. The published epsilon of {self.epsilon:g} "
            f"(delta {self.delta:g}) counts one of {len(self.selected)} steps. All of them have epsilon "
            f"{self.true_epsilon:,.0f} at delta 1e-6 if no person changes the divisor, and "
            f"{self.worst_epsilon:,.0f} for a person who does; columns of x have no noise at all."
        )


def published_boosting(
    X: Mapping[str, Floats],
    Y: Floats,
    *,
    epsilon: float = 10.0,
    delta: float = 0.05,
    steps: int = 100,
    nu: float = 0.1,
    gram: Floats | None = None,
    bounded: bool = True,
    seed: int | np.random.Generator = 0,
) -> PublishedBoosting:
    """Simulate the published boosting on local columns.

    Parameters
    ----------
    X : mapping of str to (n, k) array
        Columns of every learner, centered.
    Y : (n, Q) array
        Coefficients of the response in its basis, centered.
    epsilon, delta : float
        The published values, of one step.
    steps : int
    nu : float
        Step length, as a share of the divisor.
    gram : (Q, Q) array, optional
        J, the integrals of products of the response's basis functions; by default the identity, for an
        orthonormal basis.
    bounded : bool
        Let no step exceed the one before, as in section 4.4; otherwise (4.11).
    seed : int or Generator

    Raises
    ------
    ModelError
        Epsilon or delta is not above 0, or delta not below 1.
    """
    if not (epsilon > 0.0 and 0.0 < delta < 1.0):
        raise ModelError(f"expected epsilon above 0 and delta in (0, 1), received {epsilon!r}, {delta!r}")
    random, (n, Q) = np.random.default_rng(seed), Y.shape
    inverses = {name: np.linalg.inv(Z.T @ Z) for name, Z in X.items()}
    coef = {name: np.zeros((Z.shape[1], Q)) for name, Z in X.items()}
    J, step = np.eye(Q) if gram is None else gram, np.inf
    F, seen, weights, selected = np.zeros_like(Y), np.zeros_like(Y), 0.0, []
    for _ in range(steps):
        left = Y - F
        largest = float(np.abs(left).max())
        message = left / largest + random.normal(size=Y.shape) * 2.0 * np.sqrt(Q) * _sigma(epsilon, delta)
        # Noise of a message is in units of its divisor.
        seen, weights = seen + (largest * message + F) / largest**2, weights + largest**-2
        scores = {name: Z.T @ message for name, Z in X.items()}
        fits = {name: inverses[name] @ score for name, score in scores.items()}
        # The residual sum of squares (4.5) is that of the message less this.
        best = max(fits, key=lambda name: float((scores[name] * (fits[name] @ J)).sum()))
        step = min(nu * largest, step) if bounded else nu * largest
        coef[best] += step * fits[best]
        F = F + step * (X[best] @ fits[best])
        selected.append(best)
    return PublishedBoosting(coef, tuple(selected), seen / weights, epsilon, delta, n)


def _sigma(epsilon: float, delta: float) -> float:
    return float(np.sqrt(2.0 * np.log(1.25 / delta)) / epsilon)
