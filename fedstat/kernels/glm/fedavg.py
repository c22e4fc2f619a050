"""The FedAvg family: stochastic gradient descent at a site, and the updates of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit
from scipy.special import xlogy
from statsmodels.genmod.families import Binomial, links

from fedstat.errors import EstimationError, Remedy
from fedstat.kernels.glm.distributions import LOG, LOGIT, DistributionSpec, Family
from fedstat.kernels.glm.sums import Rows, in_domain
from fedstat.kernels.row_products import column_sums, row_dots
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Updates of the FedAvg family: a site's part of a round, and the coordinator's step from their sums.


def momentum_step(
    beta: Floats, averaged: Floats, velocity: Floats, momentum: float, dampening: float = 0.0
) -> tuple[Floats, Floats]:
    """Move by the averaged update and a share of the move before (FedAvgM; Hsu et al. 2019, section 4.3).

    ``v <- momentum v + (1 - dampening) (beta - averaged)``, ``beta <- beta - v``; returns both, (p,) each.
    `averaged` is the mean of what the sites reached from beta, weighted by rows, v zero before the first
    round, momentum in [0, 1) (FedAvg has 0), the dampening 0 in Hsu et al.
    """
    velocity = momentum * velocity + (1.0 - dampening) * (beta - averaged)
    return beta - velocity, velocity


def fair_update(
    beta: Floats, reached: Floats, loss: float, q: float, L: float, reference: float = 1.0
) -> tuple[Floats, float]:
    """One site's part (Delta (p,), h) of a step with more weight on sites with a high loss (q-FedAvg).

    Li et al. 2020, "Fair resource allocation in federated learning", Algorithm 2: ``Dw_k = L (beta -
    beta_k)``, ``Delta_k = F_k^q Dw_k``, ``h_k = q F_k^(q-1) ||Dw_k||^2 + L F_k^q``; the coordinator moves to
    ``beta - sum_k Delta_k / sum_k h_k``. Both are divided by the q-th power of `reference`, a positive loss
    that all sites receive, which changes nothing but keeps them finite.

    `loss` is F_k at beta, q at least 0 (the average over sites, each counted once), L one over the learning
    rate of the sites. An EstimationError where the loss is not positive, so that its powers have no meaning.
    """
    move: Floats = L * (beta - reached)
    # The average over sites does not use a power of the loss, which may then be zero.
    if q == 0.0:
        return move, L
    if not loss > 0.0:
        raise EstimationError(
            "q-FedAvg weighs sites by powers of their mean loss, which is not positive; set q = 0"
        )
    share = (loss / reference) ** q
    return share * move, share * (q * float(move @ move) / loss + L)


def sampled_site_count(n_sites: int, fraction: float) -> int:
    """Return the number of clients of a round, max(round(C K), 1)."""
    return max(round(fraction * n_sites), 1)


def sample_sites(n_sites: int, fraction: float, rng: np.random.Generator) -> Ints:
    """Draw ``m = max(round(C K), 1)`` of K sites, equally likely, ascending (McMahan et al. 2017)."""
    m = sampled_site_count(n_sites, fraction)
    drawn: Ints = np.sort(rng.choice(n_sites, size=m, replace=False)).astype(np.int64)
    return drawn


# ----------------------------------------------------------------------------------------------------
# Stochastic gradient descent on one site's mean loss, for FedAvg and FedProx.
#
# The objective of site k is ``F_k(beta) = sum_i w_i d_i(beta) / (2 sum_i w_i)`` with d_i the unit deviance
# of row i: cross-entropy for a response of 0 and 1, half the squared error for the Gaussian family, and up
# to a term without beta the mean negative log-likelihood for a dispersion of one. It is never negative. Its
# gradient is the mean over rows of ``w_i (mu_i - y_i) / (V(mu_i) g'(mu_i)) x_i``, with the weights scaled
# to mean one, V the variance function and g the link (McCullagh and Nelder 1989, 2.5).

SLOWER = Remedy(
    "fit(..., standardize=True)", "use a smaller learning_rate, or standardize the covariates ({arguments})"
)


@dataclass(frozen=True, slots=True)
class DescentOptions:
    """Passes E over the rows, rows B of a step, and its length per unit of gradient.

    With batch_size None all rows make one gradient step an epoch, without a draw. FedProx minimizes ``h(w) =
    F_k(w) + mu/2 ||w - beta||^2``, inexactly where gamma > 0 (Li et al. 2020, Algorithm 2, Definition 2).
    """

    epochs: int
    batch_size: int | None
    learning_rate: float
    mu: float = 0.0
    gamma: float = 0.0


def local_descent(
    rows: Rows,
    beta: Floats,
    family: Family,
    options: DescentOptions,
    rng: np.random.Generator,
    path: list[Floats] | None = None,
) -> Floats:
    """Run mini-batch stochastic gradient descent from beta (p,): ClientUpdate of McMahan et al. 2017.

    Before each epoch `rng` shuffles the rows; the last batch of an epoch may be smaller. With gamma > 0 it
    ends after the first epoch with ``||grad h(w)|| <= gamma ||grad F_k(beta)||``. An EstimationError where
    the steps leave the finite numbers or the family's domain. The coefficients at the beginning of each epoch
    are added to `path`.
    """
    own = _Rows.of(rows, family)
    descent = _Descent(own, options, rng, beta)
    enough = options.gamma * float(np.linalg.norm(own.gradient(beta))) if options.gamma > 0.0 else 0.0
    for _ in range(options.epochs):
        if path is not None:
            path.append(descent.w.copy())
        descent.run_epoch()
        if options.gamma > 0.0 and descent.gradient_norm() <= enough:
            break
    return descent.check()


@dataclass(frozen=True, slots=True)
class EpochVectors:
    """The vectors over rows that columns are multiplied with in epochs of one step over all rows.

    The move over epochs from w_1 on is ``-eta sum_e c_e grad F(w_e)`` with ``c_e = (1 - eta mu)^(E - e)``, so
    only one combination of the epochs is released. Rows have the size of the slope without the response:
    of a canonical link the mean, otherwise mean and response each times a factor of their own.
    """

    decay: float
    last_is_of_response: ClassVar[bool] = True
    """Columns alone are multiplied with these vectors, and with a second one times the response."""

    def __call__(self, rows: Rows, points: Floats, distribution: DistributionSpec) -> Floats:
        """Return the vectors (m, k R) at R paths, (E p, R), each E coefficients one after the other."""
        family, p = distribution.make(), rows.X.shape[1]
        own, canonical = _Rows.of(rows, family), distribution.loop in (LOGIT, LOG)
        out = []
        for path in points.T:
            total: Floats = np.zeros((len(rows), 1 if canonical else 2))
            for beta in path.reshape(-1, p):
                with np.errstate(all="ignore"):
                    mu = own.means(beta)
                    factor = own.weight
                    if not canonical:
                        factor = factor / (family.variance(mu) * family.link.deriv(mu))
                total *= self.decay
                total += np.column_stack([factor * mu] if canonical else [factor * mu, factor])
            out.append(total)
        return np.column_stack(out)


def mean_loss(rows: Rows, beta: Floats, family: Family) -> float:
    """Return F_k(beta), half the mean deviance of one site's rows.

    An EstimationError where it is not finite: the family does not allow a mean.
    """
    own = _Rows.of(rows, family)
    with np.errstate(all="ignore"):
        loss = own.half_deviance(beta) / len(rows)
    if not (np.isfinite(loss) and own.allow(beta).all()):
        raise EstimationError(
            f"the mean loss of {DistributionSpec.of(family)} over {len(rows)} rows is not defined at these "
            f"coefficients; {SLOWER.sentence()}, or take a family and link that allow every linear predictor"
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
    def of(cls, rows: Rows, family: Family) -> _Rows:
        n, weight = len(rows), rows.weight
        offset = np.zeros(n) if rows.offset is None else rows.offset
        # Mean one, so that a learning rate does not depend on the unit of the weights.
        weight = np.ones(n) if weight is None else weight / weight.mean()
        return cls(rows.X, rows.y, offset, weight, family)

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
        """Return for which rows the family allows the mean."""
        with np.errstate(all="ignore"):
            eta = self.linear_predictor(beta)
            return in_domain(eta, self.family.link.inverse(eta), DistributionSpec.of(self.family))


class _Descent:
    """Steps ``w <- w - eta (grad F_B(w) + mu (w - anchor))`` from w = anchor, over mini-batches B."""

    def __init__(
        self, rows: _Rows, options: DescentOptions, rng: np.random.Generator, anchor: Floats
    ) -> None:
        self.rows, self.options, self.rng = rows, options, rng
        self.anchor = anchor.copy()
        self.w = anchor.copy()
        self.epoch = 0

    def run_epoch(self) -> None:
        """Pass over all rows once."""
        self.epoch += 1
        n = len(self.rows.y)
        how = self.options
        order = np.arange(n) if how.batch_size is None else self.rng.permutation(n)
        batch_size = n if how.batch_size is None else how.batch_size
        # For batches of a few rows, calls from Python cost more than the arithmetic.
        if self.rows.is_logit:
            rows = (self.rows.X, self.rows.y, self.rows.offset, self.rows.weight)
            _logit_epoch(rows, order, batch_size, how.learning_rate, how.mu, self.anchor, self.w)
        else:
            for start in range(0, n, batch_size):
                self._step(self.rows.take(order[start : start + batch_size]))
        if not np.isfinite(self.w).all():
            self._give_up("infinite coefficients")

    def _step(self, batch: _Rows) -> None:
        with np.errstate(all="ignore"):
            pull = self.options.mu * (self.w - self.anchor)
            self.w -= self.options.learning_rate * (batch.gradient(self.w) + pull)

    def gradient_norm(self) -> float:
        """Return ||grad h(w)|| over all rows."""
        return float(np.linalg.norm(self.rows.gradient(self.w) + self.options.mu * (self.w - self.anchor)))

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
            f"{self.options.learning_rate:g}",
            remedy=SLOWER,
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
