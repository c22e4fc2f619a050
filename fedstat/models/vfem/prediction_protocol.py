"""The protocol of predictions from a VFEM fit: linear predictors of new entities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.vertical_design import design_request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.conformal import residual_limits, threshold_bins
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.quadrature import marginal_mean
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.models.vertical.moments import number_patterns
from fedstat.models.vertical.prediction.predictor import VerticalPredictor, covariance_factor
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    OpenedBlocks,
    PredictedBlocks,
    ResponseSource,
    new_ledger,
    open_blocks,
    predict_blocks,
    present_sites,
)
from fedstat.models.vfem.covariance.information import ParameterLayout
from fedstat.models.vfem.iteration.site_state import NORMAL, kernel_of
from fedstat.models.vfem.iteration.state import FAMILY, NormalModel, VFEMFit, vfem_request
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Prediction if columns are correlated between sites: coefficients for every set of observed columns.
#
# Let M be the columns that an entity lacks and S those that it has. The mean of M given S is linear, with
# slopes C = Sigma_MS Sigma_SS^-1. The mean of the response is a + b'(x_S - mu_S) with b = beta_S + C'beta_M.
# Its variance is v = s2 + beta_M'Q_MM^-1 beta_M, where Q is the concentration of the columns. The derivatives
# are: b changes by E'dbeta with beta, E = (I; C), and by -E'dQ h with Q, h = Q_MM^-1 beta_M; v changes by 2
# h'dbeta - h'dQ h. If the response is not normal, this holds for its linear predictor, and s2 is not part of
# v.
# response is not normal all this is said of its linear predictor, and s2 is no part of v.


@dataclass(frozen=True, slots=True, eq=False)
class ObservedModel:
    """Distribution of the response given the observed columns.

    `slopes` (P,) are zero at columns that are not observed; `variance` is that of the response. `factor` (1 +
    P, r) is a root of the covariance of mean and slopes, for columns minus their means; it is also zero at
    columns that are not observed. If the response is not normal, a last row, (2 + P, r), is that of the
    variance.
    """

    slopes: Floats
    variance: float
    factor: Floats | None


def observed_model(
    joint: NormalModel, s2: float, seen: Bools, psi: Floats | None, *, of_variance: bool = False
) -> ObservedModel:
    """Compute the distribution given the columns in `seen` (P,); `psi` has the covariance of all."""
    P = len(seen)
    Q = np.linalg.inv(joint.cov[:-1, :-1])
    beta = Q @ joint.cov[:-1, -1]
    lacks = ~seen
    E, h = np.eye(P) * seen, np.zeros(P)
    if lacks.any():
        E[np.ix_(lacks, seen)] = -np.linalg.solve(Q[np.ix_(lacks, lacks)], Q[np.ix_(lacks, seen)])
        h[lacks] = np.linalg.solve(Q[np.ix_(lacks, lacks)], beta[lacks])
    slopes, variance = E.T @ beta, s2 + float(beta @ h)
    if psi is None:
        return ObservedModel(slopes, variance, None)
    i, j = np.nonzero(np.triu(joint.edges))
    by_Q = -(E.T[:, i] * h[j] + np.where(i == j, 0.0, E.T[:, j] * h[i]))
    J = np.zeros((1 + P + int(of_variance), 2 + 2 * P + len(i)))
    J[0, 0] = 1.0
    J[0, 2 + P : 2 + 2 * P] = -slopes
    J[1 : 1 + P, 2 : 2 + P], J[1 : 1 + P, 2 + 2 * P :] = E.T, by_Q
    if of_variance:
        J[-1, 2 : 2 + P], J[-1, 2 + 2 * P :] = 2.0 * h, -np.where(i == j, 1.0, 2.0) * h[i] * h[j]
    values, vectors = np.linalg.eigh(J @ psi @ J.T)
    factor = np.asarray(vectors * np.sqrt(values.clip(min=0.0)))
    factor[1 : 1 + P][lacks] = 0.0  # exactly, because a site is never queried for a missing column
    return ObservedModel(slopes, variance, factor)


@dataclass(frozen=True, slots=True, eq=False)
class PatternPrediction:
    """Mean and variance of the response by entity (n,), and their derivatives times a factor (n, r).

    The derivatives of the variance are zero if the response is normal.
    """

    mean: Floats
    variance: Floats
    gradients: tuple[Floats, Floats] | None


def predict_by_pattern(
    fit: VFEMFit, sites: tuple[str, ...], psi: Floats | None, opened: OpenedBlocks
) -> FitProtocol[PatternPrediction]:
    """Request from every site one linear predictor of each entity, from the columns that the entity has."""
    joint = fit.joint
    assert joint is not None
    places = prediction_block_slices(fit, sites)
    seen = observed_columns(opened, sites, places)
    first, code, _ = number_patterns(seen)
    complete = None if psi is None else column_order(psi, fit, sites)
    normal, P = fit.distribution == NORMAL, len(joint.mean) - 1
    laws = [observed_model(joint, fit.s2, row, complete, of_variance=not normal) for row in seen[first]]
    mean = np.full(len(seen), joint.mean[-1])
    slopes = np.array([one.slopes for one in laws])
    replies = yield [
        vfem_request(
            k,
            "predict_by_pattern",
            opened.session,
            slopes=slopes[:, places[k]],
            code=code[rows],
        )
        for k, rows in opened.rows.items()
    ]
    for (k, rows), reply in zip(opened.rows.items(), replies, strict=True):
        mean[rows] += reply.arrays["linear_predictor"] - (slopes[:, places[k]] @ fit.mu[k])[code[rows]]
    variance = np.array([one.variance for one in laws])[code]
    if psi is None:
        return PatternPrediction(mean, variance, None)
    factors = np.array([one.factor for one in laws])
    gradient = factors[code, 0]
    replies = yield [
        vfem_request(
            k,
            "project_by_pattern",
            opened.session,
            mu=fit.mu[k],
            factors=factors[:, 1 : 1 + P][:, places[k]],
            code=code[rows],
        )
        for k, rows in opened.rows.items()
    ]
    for rows, reply in zip(opened.rows.values(), replies, strict=True):
        gradient[rows] += reply.arrays["projection"]
    return PatternPrediction(mean, variance, (gradient, 0.0 * gradient if normal else factors[code, -1]))


def prediction_block_slices(fit: VFEMFit, sites: tuple[str, ...]) -> Mapping[str, slice]:
    """Return the positions of each site's columns in the joint normal model."""
    ends = np.cumsum([len(fit.beta[k]) for k in sites]).tolist()
    return {k: slice(end - len(fit.beta[k]), end) for k, end in zip(sites, ends, strict=True)}


def observed_columns(opened: OpenedBlocks, sites: tuple[str, ...], places: Mapping[str, slice]) -> Bools:
    """Return which columns each entity has, (n, P)."""
    sizes = [places[k].stop - places[k].start for k in sites]
    seen = ~np.repeat(opened.missing, sizes, axis=1)
    for site, has in opened.has.items():
        seen[opened.rows[site], places[site]] = has
    return seen


def column_order(psi: Floats, fit: VFEMFit, sites: tuple[str, ...]) -> Floats:
    """Reorder the covariance of (a, s2, beta_1, mu_1, beta_2, ..., Q) to (a, s2, beta, mu, Q)."""
    places = ParameterLayout(tuple(len(fit.beta[k]) for k in sites))
    every = np.arange(len(psi))
    if len(psi) == places.total:
        raise NotAvailableError(
            "get_prediction: standard errors for entities that lack columns need the covariance of all "
            "covariances, which a fit with this many columns, with correction='skewness' or with "
            "method='weighted', does not store",
            remedy=Remedy("predict(partition)", "{call} does not need it"),
        )
    beta = [every[places.beta(k)] for k in range(len(sites))]
    mu = [every[places.mu(k)] for k in range(len(sites))]
    order: Ints = np.concatenate([[0, 1], *beta, *mu, every[places.total :]])
    return psi[np.ix_(order, order)]


# ----------------------------------------------------------------------------------------------------
# Linear predictors of new entities, for any distribution of the response: the requests and their order.


@dataclass(frozen=True, slots=True)
class VFEMPredictor(VerticalPredictor):
    """The parts of a fit that prediction needs.

    `psi` is the covariance of (a, s2, beta_1, mu_1, ...), (2 + 2p, 2 + 2p); if the response is not normal,
    t_1, ..., t_K follow. `specs` state how each site's columns are coded.
    """

    steps: ClassVar[str] = FAMILY
    fit: VFEMFit
    sites: tuple[str, ...]
    psi: Floats | None
    specs: Mapping[str, str]
    response: ResponseSource

    @property
    def blocks(self) -> FittedBlocks:
        """Return coefficients by site, for blocks centered at their means."""
        beta, mu = self.fit.beta, self.fit.mu
        means = {k: float(mu[k] @ beta[k]) for k in self.sites}
        return FittedBlocks(self.sites, self.specs, beta, self.fit.a, means)

    @property
    def distribution(self) -> DistributionSpec:
        """Return the distribution of the response, with its link."""
        return self.fit.distribution

    @property
    def response_at(self) -> tuple[str, str]:
        """Return the text of the response, and the site that holds it."""
        return self.response.text, self.response.site

    def requested(self, partition: ClientPartition) -> tuple[str, ...]:
        """Return the sites of the fit that the partition has; a ModelError if it has none."""
        present = present_sites(self.sites, partition)
        if not present:
            raise ModelError(
                f"predict: expected at least one of the sites {', '.join(self.sites)}; the "
                f"partition has {', '.join(partition.sites)}"
            )
        return present

    def predicted_means(self, partition: ClientPartition) -> Callable[[], FitProtocol[tuple[Floats, str]]]:
        """Return the protocol of predicted means (n,), and the session that computed them."""
        requester = _prediction_protocol(self, partition, mean_only=True)
        return partial(_means, requester, self.distribution)

    @property
    def places(self) -> ParameterLayout:
        """Return the positions of each site's beta and mu in psi."""
        return ParameterLayout(tuple(len(self.fit.beta[k]) for k in self.sites))


@dataclass(frozen=True, slots=True)
class PredictorGradients:
    """Derivatives of mean and variance of each linear predictor times a factor of the covariance, (n, r).

    The derivatives of the variance are zero if the covariance does not contain t_1, ..., t_K.
    """

    mean: Floats
    variance: Floats


@dataclass(frozen=True, slots=True)
class LinearPredictors:
    """Linear predictors given what an entity has, by entity (n,), and the ledger of their releases.

    The variance is that of the missing blocks, zero for an entity with every block; `blocks` counts the sites
    of the fit that have the entity.
    """

    mean: pd.Series
    variance: pd.Series
    blocks: pd.Series
    gradients: PredictorGradients | None
    ledger: Ledger


def predict_linear(
    predictor: VFEMPredictor, partition: ClientPartition, *, mean_only: bool
) -> LinearPredictors:
    """Request from the sites the linear predictors of every entity of a partition.

    Raises ModelError if the partition is horizontal, or shares no site with the fit.
    """
    requester = _prediction_protocol(predictor, partition, mean_only=mean_only or predictor.psi is None)
    call = "predict()" if mean_only else "get_prediction()"
    (found, opened), ledger = predictor.run(call, partition, requester)
    index, missing = partition.entities, opened.missing
    return LinearPredictors(
        mean=pd.Series(found.mean, index=index),
        variance=pd.Series(found.variance, index=index),
        blocks=pd.Series((~missing).sum(axis=1), index=index),
        gradients=found.gradients,
        ledger=ledger,
    )


def _means(
    requester: Callable[[], FitProtocol[tuple[PredictedDistribution, OpenedBlocks]]],
    distribution: DistributionSpec,
) -> FitProtocol[tuple[Floats, str]]:
    found, opened = yield from requester()
    if distribution == NORMAL:
        return found.mean, opened.session
    return marginal_mean(kernel_of(distribution), found.mean, found.variance)[0], opened.session


def _prediction_protocol(
    predictor: VFEMPredictor, partition: ClientPartition, *, mean_only: bool
) -> Callable[[], FitProtocol[tuple[PredictedDistribution, OpenedBlocks]]]:
    how = _by_block if predictor.fit.joint is None else _by_pattern
    return partial(how, predictor, partition, predictor.requested(partition), mean_only)


@dataclass(frozen=True, slots=True)
class PredictedDistribution:
    """Mean and variance of the linear predictor given observed blocks, (n,), and their derivatives."""

    mean: Floats
    variance: Floats
    gradients: PredictorGradients | None


def _by_block(
    predictor: VFEMPredictor, partition: ClientPartition, present: tuple[str, ...], mean_only: bool
) -> FitProtocol[tuple[PredictedDistribution, OpenedBlocks]]:
    found = yield from predict_blocks(predictor.blocks, present, partition, FAMILY)
    variance = found.missing @ np.array([predictor.fit.t[k] for k in predictor.sites])
    gradients = None if mean_only else (yield from _derivatives(predictor, found))
    return PredictedDistribution(found.linear, variance, gradients), found.opened


def _by_pattern(
    predictor: VFEMPredictor, partition: ClientPartition, present: tuple[str, ...], mean_only: bool
) -> FitProtocol[tuple[PredictedDistribution, OpenedBlocks]]:
    opened = yield from open_blocks(predictor.blocks, present, partition, FAMILY, partly=True)
    psi = None if mean_only else predictor.psi
    found = yield from predict_by_pattern(predictor.fit, predictor.sites, psi, opened)
    gradients = None if found.gradients is None else PredictorGradients(*found.gradients)
    # Rounding must not make a variance of zero negative.
    variance = np.maximum(found.variance - predictor.fit.s2, 0.0)
    return PredictedDistribution(found.mean, variance, gradients), opened


def _derivatives(predictor: VFEMPredictor, found: PredictedBlocks) -> FitProtocol[PredictorGradients]:
    """Project the derivatives of every linear predictor by the parameters on the parameters' covariance."""
    fit, places, number = predictor.fit, predictor.places, predictor.sites.index
    assert predictor.psi is not None
    factor = covariance_factor(predictor.psi)
    replies = yield [
        vfem_request(
            k, "project_block", found.opened.session, mu=fit.mu[k], factor=factor[places.beta(number(k))]
        )
        for k in found.opened.rows
    ]
    # a + sum (x - mu)'beta over the observed blocks changes by 1 with a, x - mu with beta, -beta with mu.
    by_mean = np.tile(factor[0], (len(found.linear), 1))
    for (k, rows), reply in zip(found.opened.rows.items(), replies, strict=True):
        by_mean[rows] += reply.arrays["projection"] - fit.beta[k] @ factor[places.mu(number(k))]
    of_t = factor[places.total :]
    by_variance = found.missing @ of_t if len(of_t) else np.zeros_like(by_mean)
    return PredictorGradients(by_mean, by_variance)


def prediction_rsquared(predictor: VFEMPredictor, partition: ClientPartition) -> float:
    """R-squared of the predictions for the entities of a partition that every site has.

    Raises ModelError if the partition lacks a site or the response, or has fewer than two complete entities.
    """
    holder = predictor.response.site
    _check_sites("R-squared of predictions", (*predictor.sites, holder), partition)
    rows, response = partition.rows[holder], predictor.response
    question = {"response": response.text, "columns": response.columns}

    def requester() -> FitProtocol[Floats]:
        # Only entities with every block; no missing block has to be predicted.
        found = yield from predict_blocks(predictor.blocks, predictor.sites, partition, FAMILY)
        session = found.opened.session
        use = ~found.missing[rows].any(axis=1)
        yield [design_request(holder, "open_response", session, question)]
        predicted = found.linear[rows[use]]
        (reply,) = yield [vfem_request(holder, "prediction_errors", session, use=use, predicted=predicted)]
        return reply.arrays["sums"]

    analysis = _with_response(predictor, "prediction_rsquared()", partition)
    n, sse, sst = run_analysis(analysis, requester, new_ledger(partition, holder))
    if n < 2 or sst <= 0.0:
        raise ModelError(
            f"R-squared of predictions: {n:.0f} entities of the partition have the response and every block"
        )
    return float(1.0 - sse / sst)


def _check_sites(call: str, sites: tuple[str, ...], partition: ClientPartition) -> None:
    if lacking := [k for k in sites if k not in partition.sites]:
        raise ModelError(f"{call}: the partition lacks site {', '.join(lacking)}")


def _with_response(predictor: VFEMPredictor, call: str, partition: ClientPartition) -> PostFitAnalysis:
    """Describe a comparison of predictions with the response to owners."""
    analysis, response = predictor.analysis(call, partition), predictor.response
    columns = (*analysis.columns.get(response.site, ()), *response.columns)
    return replace(analysis, columns={**analysis.columns, response.site: columns})


# ----------------------------------------------------------------------------------------------------
# Intervals of split conformal prediction: quantiles of absolute residuals by set of sites.


@dataclass(frozen=True, slots=True, eq=False)
class ResidualGroups:
    """Counts (S G, B) of residuals by set of sites (S,), as bits, and G ranges of predictions.

    `edges` (S, G - 1) divide the predictions of each set.
    """

    sets: Ints
    edges: Floats
    counts: Floats

    @staticmethod
    def code(sets: Ints, edges: Floats, of: Ints, mean: Floats) -> Ints:
        """Return the number of the group of each entity, (n,); -1 for a set that is not among `sets`."""
        out = np.full(len(of), -1)
        for i, s in enumerate(sets.tolist()):
            here = of == s
            out[here] = i * (edges.shape[1] + 1) + np.searchsorted(edges[i], mean[here])
        return out


CALL = "predict_set()"


def count_by_group(predictor: VFEMPredictor, partition: ClientPartition, groups: int) -> ResidualGroups:
    """Have the holder of the response count residuals of a partition, by set of sites and range."""
    response, holder = predictor.response, predictor.response.site
    _check_sites("predict_set, calibration", (holder,), partition)
    rows = partition.rows[holder]
    means = _prediction_protocol(predictor, partition, mean_only=True)

    def requester() -> FitProtocol[ResidualGroups]:
        found, opened = yield from means()
        mean, of = found.mean[rows], _set_codes(opened)[rows]
        sets = np.unique(of)
        if len(sets) * groups > len(rows):
            raise ModelError(
                f"groups: {len(sets)} sets of sites with {groups} ranges each are more groups than the "
                f"{len(rows):,} calibration entities at '{holder}'; use fewer ranges, or more entities"
            )
        parts = np.arange(1, groups) / groups
        edges = np.array([np.quantile(mean[of == s], parts) for s in sets]).reshape(len(sets), -1)
        question = {"response": response.text, "columns": response.columns}
        yield [design_request(holder, "open_response", opened.session, question)]
        (reply,) = yield [
            vfem_request(
                holder,
                "residual_counts",
                opened.session,
                use=np.ones(len(rows), dtype=bool),
                predicted=mean,
                code=ResidualGroups.code(sets, edges, of, mean),
                groups=len(sets) * groups,
                unit=np.sqrt(predictor.fit.s2),
            )
        ]
        return ResidualGroups(sets, edges, reply.arrays["counts"])

    analysis = _with_response(predictor, CALL, partition)
    return run_analysis(analysis, requester, new_ledger(partition, holder))


def conformal_intervals(
    predictor: VFEMPredictor, partition: ClientPartition, known: ResidualGroups, alpha: float
) -> pd.DataFrame:
    """Predict means with the quantile of the absolute residuals of their group; infinite for small groups."""
    requester = _prediction_protocol(predictor, partition, mean_only=True)
    (found, opened), _ = predictor.run(CALL, partition, requester)
    of = _set_codes(opened)
    code = ResidualGroups.code(known.sets, known.edges, of, found.mean)
    # The last limit, for code -1, is that of sets without calibration.
    limits = np.append(residual_limits(threshold_bins(known.counts, alpha)), np.inf)
    half = np.sqrt(predictor.fit.s2) * limits[code]
    table = {"mean": found.mean, "low": found.mean - half, "high": found.mean + half}
    frame = pd.DataFrame(table, index=partition.entities)
    if wide := np.unique(of[np.isinf(half)]).tolist():
        names = [" + ".join(k for i, k in enumerate(predictor.sites) if s >> i & 1) or "none" for s in wide]
        frame.attrs["note"] = (
            f"too few entities calibrate {', '.join(names)}: nothing is excluded there. A group needs at "
            f"least {int(np.ceil(1.0 / alpha - 1.0 - 1e-9))} entities"
        )
    return frame


def _set_codes(opened: OpenedBlocks) -> Ints:
    """Sites that have each entity, as bits, (n,)."""
    return np.asarray((~opened.missing) @ (1 << np.arange(opened.missing.shape[1])), dtype=np.int64)
