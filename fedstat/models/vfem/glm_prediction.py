"""Predicted means of VFEM for other families than the normal, for any pattern of missing blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_columns import design_ask
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.kernels.glm.quadrature import marginal_mean
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.covariance.protocol import Places
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.models.vfem.iteration.glm_distribution import kernel_of
from fedstat.models.vfem.prediction import present_clients
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class GLMPredictor:
    """What prediction needs of a fit.

    Parameters
    ----------
    fit : VFEMFit
    clients : tuple of str
    joint : (2 + 2p + K, 2 + 2p + K) array or None
        Covariance of (a, 0, beta_1, mu_1, ..., t_1, ..., t_K).
    specs : mapping of str to str
        How each client's columns are coded.
    holder : str
        The institution of the response.
    """

    fit: VFEMFit
    clients: tuple[str, ...]
    joint: Floats | None
    specs: Mapping[str, str]
    holder: str


class GLMPredictionResults:
    """Predicted means with intervals.

    Attributes
    ----------
    predicted_mean : Series, (n,)
        E[y | the blocks that the entity has]: the mean over what it lacks, not the mean at the mean.
    linear : DataFrame, (n, 2)
        ``mean`` and ``variance`` of the linear predictor given those blocks; the variance is that of what
        is missing, zero for an entity with every block.
    blocks : Series of int, (n,)
        Clients of the fit that have the entity.
    ledger : Ledger
        What passed for this prediction.
    """

    def __init__(
        self,
        fit: VFEMFit,
        linear: pd.DataFrame,
        gradients: Gradients | None,
        blocks: pd.Series,
        ledger: Ledger,
    ) -> None:
        self.linear, self.blocks, self.ledger = linear, blocks, ledger
        self._link = fit.distribution.make().link
        m, v = (np.ascontiguousarray(linear[name]) for name in ("mean", "variance"))
        mean, by_m, by_v = marginal_mean(kernel_of(fit.distribution), m, v)
        self.predicted_mean = pd.Series(mean, index=linear.index, name="predicted_mean")
        self._se = None
        if gradients is not None:
            total = by_m[:, None] * gradients.mean + by_v[:, None] * gradients.variance
            self._se = pd.Series(np.sqrt(np.einsum("ij,ij->i", total, total)), index=linear.index)

    @property
    def se_mean(self) -> pd.Series:
        """Standard error of the predicted mean, from all estimated parameters."""
        if self._se is None:
            raise NotAvailableError("no standard error of the mean: the fit has no covariance")
        return self._se.rename("se_mean")

    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Interval of the mean, symmetric on the scale of the link; columns 0 and 1.

        For an entity with every block it is that of statsmodels.
        """
        if not 0.0 < alpha < 1.0:
            raise ModelError(f"conf_int: expected alpha between 0 and 1, received {alpha}")
        mean = self.predicted_mean.to_numpy()
        centre = self._link(mean)
        half = stats.norm.ppf(1.0 - alpha / 2.0) * self.se_mean.to_numpy() * self._link.deriv(mean)
        limits = {0: self._link.inverse(centre - half), 1: self._link.inverse(centre + half)}
        return pd.DataFrame(limits, index=self.predicted_mean.index)

    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row per entity, with statsmodels' column names."""
        limits = self.conf_int(alpha)
        return pd.DataFrame(
            {
                "mean": self.predicted_mean,
                "mean_se": self.se_mean,
                "mean_ci_lower": limits[0],
                "mean_ci_upper": limits[1],
            }
        )


@dataclass(frozen=True, slots=True)
class Gradients:
    """Derivatives of mean and variance of each linear predictor times a factor of the covariance, (n, r)."""

    mean: Floats
    variance: Floats


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear predictors: mean and variance (n,), number of blocks (n,), and derivatives."""

    mean: Floats
    variance: Floats
    blocks: Ints
    gradients: Gradients | None


def predict_means(
    predictor: GLMPredictor, partition: ClientPartition, *, mean_only: bool
) -> GLMPredictionResults:
    """Predict for every entity of a partition.

    Raises
    ------
    ModelError
        The partition is horizontal, or shares no client with the fit.
    DesignError
        A client's columns cannot be coded as in the fit.
    """
    present = present_clients(predictor.clients, partition)
    ledger = Ledger(at=partition.coordinator_at(predictor.holder))
    protocol = linear_predictors(predictor, partition, present, mean_only or predictor.joint is None)
    found = partition.engine.run(protocol, ledger)
    linear = pd.DataFrame({"mean": found.mean, "variance": found.variance}, index=partition.entities)
    blocks = pd.Series(found.blocks, index=partition.entities)
    return GLMPredictionResults(predictor.fit, linear, found.gradients, blocks, ledger)


def linear_predictors(
    predictor: GLMPredictor, partition: ClientPartition, present: tuple[str, ...], mean_only: bool
) -> Rounds[Linear]:
    """Ask the clients for their parts of the linear predictors and, unless `mean_only`, for derivatives."""
    fit, session, n = predictor.fit, partition.new_session(), partition.n_entities
    replies = yield [
        design_ask(k, "open_new_block", session, {"spec": predictor.specs[k], "partial": partition.partial})
        for k in present
    ]
    rows = {k: partition.rows[k][r.arrays["seen"]] for k, r in zip(present, replies, strict=True)}
    replies = yield [ask(k, "predict_block", session, beta=fit.beta[k], mu=fit.mu[k]) for k in present]
    mean, missing = np.full(n, fit.a), np.ones((n, len(predictor.clients)), dtype=bool)
    number = {k: j for j, k in enumerate(predictor.clients)}
    for k, reply in zip(present, replies, strict=True):
        mean[rows[k]] += reply.arrays["linear_predictor"]
        missing[rows[k], number[k]] = False
    variance = missing @ np.array([fit.t[k] for k in predictor.clients])
    gradients = None
    if not mean_only:
        gradients = yield from derivatives(predictor, present, rows, missing, session)
    return Linear(mean, variance, (~missing).sum(axis=1), gradients)


def derivatives(
    predictor: GLMPredictor,
    present: tuple[str, ...],
    rows: Mapping[str, Ints],
    missing: Bools,
    session: str,
) -> Rounds[Gradients]:
    """Project the derivatives of every linear predictor by the parameters on the covariance of these."""
    fit, joint = predictor.fit, predictor.joint
    assert joint is not None
    values, vectors = np.linalg.eigh(joint)
    factor = vectors * np.sqrt(values.clip(min=0.0))
    places = Places(tuple(len(fit.beta[k]) for k in predictor.clients))
    number = {k: j for j, k in enumerate(predictor.clients)}
    replies = yield [
        ask(k, "project_block", session, mu=fit.mu[k], factor=factor[places.beta(number[k])]) for k in present
    ]
    total = np.tile(factor[0], (len(missing), 1))
    for k, reply in zip(present, replies, strict=True):
        total[rows[k]] += reply.arrays["projection"] - fit.beta[k] @ factor[places.mu(number[k])]
    return Gradients(total, missing @ factor[places.total :])
