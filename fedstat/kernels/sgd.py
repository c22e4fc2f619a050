"""Stochastic gradient descent on one site's mean loss, as FedAvg and FedProx ask for it.

The objective of site k is ``F_k(beta) = sum_i w_i d_i(beta) / (2 sum_i w_i)`` with d_i the unit deviance of
row i: cross-entropy for a response of 0 and 1, half the squared error for the Gaussian family, and up to a
term without beta the mean negative log-likelihood for a dispersion of one. It is never negative. Its gradient
is the mean over rows of
``w_i (mu_i - y_i) / (V(mu_i) g'(mu_i)) x_i``, with the weights scaled to mean one, V the variance function
and g the link (McCullagh and Nelder 1989, 2.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.special import xlogy
from statsmodels.genmod.families import Binomial, links

from fedstat.errors import EstimationError
from fedstat.kernels.glm.rows import in_domain
from fedstat.kernels.glm.specification import DistributionSpec, Family
from fedstat.kernels.rows import column_sums, row_dots
from fedstat.typing import Bools, Floats, Ints

REMEDY = "use a smaller learning_rate, or standardise the covariates (standardize=True)"


def local_sgd(
    X: Floats,
    y: Floats,
    beta: Floats,
    family: Family,
    *,
    epochs: int,
    batch_size: int | None,
    learning_rate: float,
    rng: np.random.Generator,
    offset: Floats | None = None,
    weights: Floats | None = None,
) -> Floats:
    """Run mini-batch stochastic gradient descent from beta (p,): ClientUpdate of McMahan et al. 2017.

    X (n, p) is C-contiguous, its intercept a column of ones; y, offset and weights are (n,), the last
    counting a row so many times, or binomial trials where y is a proportion. `epochs` E are passes over the
    rows, before each of which `rng` shuffles them; `batch_size` B rows make a step, fewer at the end of an
    epoch. With None all rows make one gradient step an epoch, without a draw. `learning_rate` is the length
    of a step per unit of gradient. An EstimationError where the steps leave the finite numbers or the
    family's domain.
    """
    rows = _Rows.of(X, y, family, offset, weights)
    descent = _Descent(rows, batch_size, learning_rate, rng, beta, mu=0.0)
    for _ in range(epochs):
        descent.run_epoch()
    return descent.check()


def local_proximal(
    X: Floats,
    y: Floats,
    beta: Floats,
    family: Family,
    *,
    mu: float,
    gamma: float,
    epochs: int,
    batch_size: int | None,
    learning_rate: float,
    rng: np.random.Generator,
    offset: Floats | None = None,
    weights: Floats | None = None,
) -> tuple[Floats, float]:
    """Minimise ``h(w) = F_k(w) + mu/2 ||w - beta||^2`` inexactly from beta (Li et al. 2020, Algorithm 2).

    After each epoch of :func:`local_sgd`, with the gradient of the penalty added to each step, the site stops
    if ``||grad h(w)|| <= gamma ||grad F_k(beta)||`` (Definition 2); gamma = 0 uses all epochs, and with mu =
    0 as well the result is that of :func:`local_sgd`. Returns w (p,), and ``||grad h(w)|| / ||grad
    F_k(beta)||`` over all rows of the site.
    """
    rows = _Rows.of(X, y, family, offset, weights)
    descent = _Descent(rows, batch_size, learning_rate, rng, beta, mu)
    start = float(np.linalg.norm(rows.gradient(beta)))
    for _ in range(epochs):
        descent.run_epoch()
        if gamma > 0.0 and descent.gradient_norm() <= gamma * start:
            break
    w = descent.check()
    end = descent.gradient_norm()
    return w, end / start if start > 0.0 else np.inf if end > 0.0 else 0.0


def mean_loss(
    X: Floats,
    y: Floats,
    beta: Floats,
    family: Family,
    *,
    offset: Floats | None = None,
    weights: Floats | None = None,
) -> float:
    """Return F_k(beta), half the mean deviance of one site's rows; arguments as in :func:`local_sgd`.

    An EstimationError where it is not finite: the family does not allow a mean.
    """
    rows = _Rows.of(X, y, family, offset, weights)
    with np.errstate(all="ignore"):
        loss = rows.half_deviance(beta) / len(y)
    if not (np.isfinite(loss) and rows.allow(beta).all()):
        raise EstimationError(
            f"the mean loss of {DistributionSpec.of(family)} over {len(y)} rows is not defined at these "
            f"coefficients; {REMEDY}, or take a family and link that allow every linear predictor"
        )
    return loss


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of one site: X (n, p); y, offset and weight (n,), the weights with mean one."""

    X: Floats
    y: Floats
    offset: Floats
    weight: Floats
    family: Family

    @classmethod
    def of(cls, X: Floats, y: Floats, family: Family, offset: Floats | None, weights: Floats | None) -> _Rows:
        return cls(
            X,
            y,
            np.zeros(len(y)) if offset is None else offset,
            # Mean one: a learning rate means the same whatever the unit of the weights.
            np.ones(len(y)) if weights is None else weights / weights.mean(),
            family,
        )

    @property
    def is_logit(self) -> bool:
        return type(self.family) is Binomial and type(self.family.link) is links.Logit

    def take(self, at: Ints) -> _Rows:
        return _Rows(self.X[at], self.y[at], self.offset[at], self.weight[at], self.family)

    def linear_predictor(self, beta: Floats) -> Floats:
        return row_dots(self.X, beta) + self.offset

    def means(self, beta: Floats) -> Floats:
        mu: Floats = self.family.link.inverse(self.linear_predictor(beta))
        return mu

    def half_deviance(self, beta: Floats) -> float:
        """Half the deviance, summed over rows; of a logistic model from the logits, which cannot overflow."""
        y = self.y
        if not self.is_logit:
            return float(self.family.deviance(y, self.means(beta), freq_weights=self.weight)) / 2.0
        eta = self.linear_predictor(beta)
        saturated = xlogy(y, y) + xlogy(1.0 - y, 1.0 - y)
        return float(np.sum(self.weight * (np.logaddexp(0.0, eta) - y * eta + saturated)))

    def gradient(self, beta: Floats) -> Floats:
        with np.errstate(all="ignore"):
            mu = self.means(beta)
            slope = self.weight * (mu - self.y) / (self.family.variance(mu) * self.family.link.deriv(mu))
        return column_sums(self.X, slope) / len(self.y)

    def allow(self, beta: Floats) -> Bools:
        """Tell which rows' mean the family allows."""
        with np.errstate(all="ignore"):
            eta = self.linear_predictor(beta)
            return in_domain(eta, self.family.link.inverse(eta), DistributionSpec.of(self.family))


class _Descent:
    """Steps ``w <- w - eta (grad F_B(w) + mu (w - anchor))`` from w = anchor, over mini-batches B."""

    def __init__(
        self,
        rows: _Rows,
        batch_size: int | None,
        learning_rate: float,
        rng: np.random.Generator,
        anchor: Floats,
        mu: float,
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.rng = rng
        self.anchor = anchor.copy()
        self.mu = mu
        self.w = anchor.copy()
        self.epoch = 0

    def run_epoch(self) -> None:
        """Pass over all rows once."""
        self.epoch += 1
        n = len(self.rows.y)
        order = np.arange(n) if self.batch_size is None else self.rng.permutation(n)
        batch_size = n if self.batch_size is None else self.batch_size
        # Of batches of a few rows, calls from Python cost more than the arithmetic.
        if self.rows.is_logit:
            rows = (self.rows.X, self.rows.y, self.rows.offset, self.rows.weight)
            _logit_epoch(rows, order, batch_size, self.learning_rate, self.mu, self.anchor, self.w)
        else:
            for start in range(0, n, batch_size):
                self._step(self.rows.take(order[start : start + batch_size]))
        if not np.isfinite(self.w).all():
            self._give_up("infinite coefficients")

    def _step(self, batch: _Rows) -> None:
        with np.errstate(all="ignore"):
            pull = self.mu * (self.w - self.anchor)
            self.w -= self.learning_rate * (batch.gradient(self.w) + pull)

    def gradient_norm(self) -> float:
        """Return ||grad h(w)|| over all rows."""
        return float(np.linalg.norm(self.rows.gradient(self.w) + self.mu * (self.w - self.anchor)))

    def check(self) -> Floats:
        """Return w, or raise an EstimationError where the family does not allow its means."""
        outside = int((~self.rows.allow(self.w)).sum())
        if outside:
            self._give_up(
                f"means that {DistributionSpec.of(self.rows.family)} does not allow in {outside} rows"
            )
        return self.w

    def _give_up(self, what: str) -> None:
        raise EstimationError(
            f"local gradient descent reached {what} in epoch {self.epoch}, with learning_rate = "
            f"{self.learning_rate:g}; {REMEDY}"
        )


@njit(cache=True, nogil=True)
def _logit_epoch(
    rows: tuple[Floats, Floats, Floats, Floats],
    order: Ints,
    batch_size: int,
    learning_rate: float,
    mu: float,
    anchor: Floats,
    w: Floats,
) -> None:
    """Pass over rows (X, y, offset, weight) of a logistic model in the given order, (n,); changes w, (p,)."""
    X, y, offset, weight = rows
    n, p = X.shape
    gradient = np.empty(p)
    for start in range(0, n, batch_size):
        stop = min(start + batch_size, n)
        gradient[:] = 0.0
        for i in order[start:stop]:
            eta = offset[i]
            for j in range(p):
                eta += X[i, j] * w[j]
            slope = weight[i] * (1.0 / (1.0 + np.exp(-eta)) - y[i])
            for j in range(p):
                gradient[j] += slope * X[i, j]
        for j in range(p):
            w[j] -= learning_rate * (gradient[j] / (stop - start) + mu * (w[j] - anchor[j]))
