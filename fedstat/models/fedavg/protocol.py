"""Federated averaging: aggregation rules, rounds, and the distance from the maximum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from fedstat import codec
from fedstat.errors import EstimationError, ModelError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.design.horizontal_steps import standardization, translation
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.fedavg import SLOWER, momentum_step, sample_sites
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.progress_line import counted
from fedstat.typing import Array, Floats, Matrix, Vector

# ----------------------------------------------------------------------------------------------------
# Rules of the FedAvg family: how the coordinator combines the sums of a round, by algorithm.


@dataclass(frozen=True, slots=True, eq=False)
class FinalSums:
    """Sums over all sites at the final coefficients, for dispersion one.

    `totals` are the sum of the frequency weights, deviance and Pearson's statistic; `rows` are counted by
    their weights. `slope` and `curvature` are those of q-FedAvg's criterion, each up to one factor; `losses`
    are half the mean deviance of each site, None if sums were masked.
    """

    score: Vector
    information: Matrix
    totals: Annotated[Floats, "3"]
    rows: float
    slope: Vector | None = None
    curvature: Matrix | None = None
    losses: Annotated[Floats, "K"] | None = None

    @property
    def minimized(self) -> tuple[Vector, Matrix]:
        """Descent direction and curvature of what the rule minimizes: (p,), (p, p)."""
        if self.slope is None or self.curvature is None:
            return self.score, self.information
        return self.slope, self.curvature

    @property
    def loss(self) -> float:
        """Half the mean deviance over all rows."""
        return float(self.totals[1] / (2.0 * self.rows))


@dataclass(frozen=True, slots=True)
class AveragingRule:
    """The coordinator's update from the sums of a round; by default the average weighted by rows.

    Parameters
    ----------
    momentum : tuple of two floats, optional
        Share of the move before, and dampening of the update, of FedAvgM (Hsu et al. 2019, section 4.3).
    proximal : tuple of two floats, optional
        mu and gamma of FedProx, by which the sites descend (Li et al. 2020, Algorithm 2).
    each_once : bool
        Whether sites have equal weights in the average of FedProx, as printed; it minimizes the sum of F_k.
    fair : tuple of two floats, optional
        q and L of q-FedAvg (Li et al. 2020, Algorithm 2), which minimizes the sum over sites of
        F_k^(q+1) / (q+1).
    """

    momentum: tuple[float, float] | None = None
    proximal: tuple[float, float] | None = None
    each_once: bool = False
    fair: tuple[float, float] | None = None

    @property
    def own_criterion(self) -> bool:
        """Whether the rule minimizes something else than the loss over all rows."""
        return self.fair is not None or self.each_once

    @property
    def options(self) -> Mapping[str, float]:
        """Options of the rule, by name."""
        values = (
            *(self.momentum or (None, None)),
            *(self.proximal or (None, None)),
            *(self.fair or (None, None)),
        )
        names = ("momentum", "dampening", "mu", "gamma", "q", "lipschitz")
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return {name: value for name, value in given.items() if name != "dampening" or value}

    def combine(self, beta: Floats, velocity: Floats, moved: Floats, weight: float) -> tuple[Floats, Floats]:
        """Return the coefficients of the next round and the move, from the sums that ``run_epochs`` released.

        `velocity` is the move before.
        """
        if self.fair is not None:
            return beta - moved / weight, velocity
        if self.momentum is None:
            return moved / weight, velocity
        return momentum_step(beta, moved / weight, velocity, *self.momentum)


# ----------------------------------------------------------------------------------------------------
# Rounds of federated averaging, and how far from the maximum of the likelihood they end.

TINY = float(np.finfo(float).tiny)
TINY_SHARE = 1e-9
"""Share of the rows by which a masked sum may be off."""


@dataclass(frozen=True, slots=True)
class AveragingOptions:
    """What the algorithms of the family have in common; see :meth:`fedstat.FedAvg.fit`."""

    rounds: int
    fraction: float
    local_epochs: int
    batch_size: int | None
    learning_rate: float
    seed: int
    standardize: bool


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """Mean loss at the coefficients of one round, and the number of sites that it is from."""

    round: int
    loss: float
    sites: int


@dataclass(frozen=True, slots=True, eq=False)
class FedAvgFit:
    """What the rounds hand over; `params` (p,) are in the units of the data.

    `distance` (p,) is that from the maximum of the likelihood, `to_go` (p,) that from the minimum of the
    rule's criterion, both in standard errors of the maximum; infinite if they are unknown. `llf` is NaN if
    the distribution does not define one. `masked`: the coordinator saw no site's part of the sums.
    """

    params: Vector
    design: RowsDesign
    distribution: DistributionSpec
    distance: Vector
    to_go: Vector
    sums: FinalSums
    dispersion: float
    llf: float
    trace: tuple[RoundTrace, ...]
    options: AveragingOptions
    rule: AveragingRule
    masked: bool

    @property
    def totals(self) -> tuple[float, float, float]:
        """Sum of the frequency weights, deviance, Pearson's statistic."""
        weight, deviance, pearson = self.sums.totals.tolist()
        return weight, deviance, pearson


@dataclass(slots=True, eq=False)
class FedAvgProtocol:
    """One fit of the FedAvg family, from coefficients `init` (p,) in the units of the data, or from zeros."""

    session: RowsSession
    distribution: DistributionSpec
    options: AveragingOptions
    rule: AveragingRule
    init: Floats | None = None
    design: RowsDesign = field(init=False)
    own: Floats | None = field(init=False)
    back: Floats = field(init=False)
    rows: Floats = field(init=False)
    velocity: Floats = field(init=False)
    trace: list[RoundTrace] = field(default_factory=list)

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites."""
        return self.session.sites

    def run(self) -> FitProtocol[FedAvgFit]:
        """Open, average, judge."""
        beta = yield from self.open()
        for number in counted(range(self.options.rounds), "averaging round"):
            beta = yield from self.advance(beta, number)
        return (yield from self.judge(beta))

    def open(self) -> FitProtocol[Floats]:
        """Open the rows, settle the columns of the algorithm, and return the first coefficients."""
        replies = yield self.session.opening()
        self.design = design = self.session.opened(replies)
        self.own = self.session.own_moments(replies)
        shift, scale, self.back = columns_of(design, self.options)
        beta = self._first()
        self.velocity = np.zeros_like(beta)
        # Descent is not invariant: its path depends on the columns, so that sites must agree on them first.
        arrays, text = {"shift": shift, "scale": scale, "init": beta}, self.distribution.to_json()
        replies = yield self.session.request_all("start", arrays, text)
        self.rows = np.array([float(reply.arrays["rows"]) for reply in replies])
        return beta

    def _first(self) -> Floats:
        names = self.design.names
        if self.init is None:
            return np.zeros(len(names))
        if self.init.shape != (len(names),):
            raise ModelError(
                f"init: expected {len(names)} coefficients ({', '.join(names)}), received an array of shape "
                f"{self.init.shape}"
            )
        return np.asarray(np.linalg.solve(self.back, self.init))

    def drawn(self, number: int) -> list[str]:
        """Sites of a round; the same ones in whatever order the partition lists them."""
        names = sorted(self.sites)  # the draw must not depend on the order of the partition
        rng = np.random.default_rng((self.options.seed, number))
        chosen = {names[i] for i in sample_sites(len(names), self.options.fraction, rng)}
        return [site for site in self.sites if site in chosen]

    def advance(self, beta: Floats, number: int) -> FitProtocol[Floats]:
        """Let the sites of a round descend from beta, and combine what they return."""
        options = self.options
        arrays: dict[str, Array] = {
            "beta": beta,
            "epochs": np.array(options.local_epochs),
            "batch_size": np.array(options.batch_size or 0),
            "learning_rate": np.array(options.learning_rate),
            "seed": np.array(options.seed),
            "number": np.array(number),
        } | self._rule_arrays()
        if self.rule.proximal is not None:
            arrays["proximal"] = np.array([*self.rule.proximal, self.rule.each_once])
        drawn = self.drawn(number)
        request = self.sites if self.session.masked else drawn  # masks cancel over all sites only
        replies = yield [
            self.session.request(site, "run_epochs", arrays, codec.to_json(drawn)) for site in request
        ]
        loss, rows = add(replies, "loss").tolist()
        # Of masked numbers only the total over all sites is known.
        known = [n for site, n in zip(self.sites, self.rows.tolist(), strict=True) if site in drawn]
        expected = sum(known) if not self.session.masked or len(drawn) == len(self.sites) else 1.0
        if rows < (1.0 - TINY_SHARE) * expected:
            raise EstimationError(
                f"round {number + 1}: at the coefficients of an epoch, a few rows of a site have nearly all "
                "weight, and the site sends no sums: the descent runs away",
                remedy=SLOWER,
            )
        self.trace.append(RoundTrace(number, loss / rows, len(drawn)))
        moved, weight = add(replies, "beta"), float(add(replies, "weight"))
        beta, self.velocity = self.rule.combine(beta, self.velocity, moved, weight)
        return beta

    def _rule_arrays(self) -> dict[str, Array]:
        """Constants of q-FedAvg, and the last mean loss, if it is positive, as the unit of its powers."""
        if self.rule.fair is None:
            return {}
        last = self.trace[-1].loss if self.trace else 1.0
        return {"fair": np.array([*self.rule.fair, last if last > 0.0 else 1.0])}

    def judge(self, beta: Floats) -> FitProtocol[FedAvgFit]:
        """Ask all sites for score, information and likelihood at the final coefficients."""
        arrays = {"beta": beta} | self._rule_arrays()
        if self.rule.each_once:
            arrays["fair"] = np.array([0.0, 1.0, 1.0])  # of F_k with q = 0
        replies = yield self.session.request_all("sum_scores", arrays)
        self._check_inside(replies)
        sums = self._sums(replies)
        weight, deviance, pearson = sums.totals.tolist()
        dispersion = pearson / max(weight - len(beta), 1.0) if self.distribution.estimates_scale else 1.0
        # As in statsmodels, the Gaussian likelihood is that at its own maximum over the dispersion.
        arrays = {
            "beta": beta,
            "dispersion": np.array(deviance / weight if self.distribution.least_squares else dispersion),
        }
        # A round of its own: the dispersion follows from the sums of the round before.
        replies = yield self.session.request_all("sum_likelihood", arrays)
        defined = int(add(replies, "defined")) == len(replies)
        self.trace.append(RoundTrace(self.options.rounds, sums.loss, len(self.sites)))
        return FedAvgFit(
            params=self.back @ beta,
            design=self.design,
            distribution=self.distribution,
            distance=in_standard_errors((sums.score, sums.information), sums, dispersion, self.back),
            to_go=in_standard_errors(sums.minimized, sums, dispersion, self.back),
            sums=sums,
            dispersion=dispersion,
            llf=float(add(replies, "llf")) if defined else np.nan,
            trace=tuple(self.trace),
            options=self.options,
            rule=self.rule,
            masked=self.session.masked,
        )

    def _check_inside(self, replies: Sequence[Reply]) -> None:
        if int(add(replies, "inside")) == len(replies):
            return
        outside = [repr(reply.site) for reply in replies if not reply.arrays["inside"]]
        where = "of some sites" if self.session.masked else f"of site {', '.join(outside)}"
        raise EstimationError(
            f"after the last round, family {self.distribution} does not allow some of the means {where}",
            remedy=SLOWER,
        )

    def _sums(self, replies: Sequence[Reply]) -> FinalSums:
        """Add up; the score is not used if few rows have weight in that of a site."""
        # If one site is silent, the sum of the others would give a wrong distance; zeros make it infinite.
        reported = float(int(add(replies, "spread")) == len(replies))
        own = ("slope", "curvature") if self.rule.own_criterion else ()
        fair = {name: reported * add(replies, name) for name in own}
        losses = None
        if not self.session.masked:
            losses = np.array([reply.arrays["totals"][1] for reply in replies]) / (2.0 * self.rows)
        score, information = (reported * add(replies, name) for name in ("score", "information"))
        return FinalSums(
            score, information, add(replies, "totals"), float(self.rows.sum()), losses=losses, **fair
        )


def columns_of(design: RowsDesign, options: AveragingOptions) -> tuple[Floats, Floats, Floats]:
    """Return shift and scale of the algorithm's columns, and the way back to the data's units."""
    zeros, ones = np.zeros(len(design.names)), np.ones(len(design.names))
    shift, scale = zeros, ones
    if options.standardize:
        shift, scale = standardization(design.mean, design.spread, design.intercept)
    return shift, scale, translation(zeros, ones, shift, scale)


def unbounded(fit: FedAvgFit) -> list[str]:
    """Name the columns whose coefficients may go to infinity: they still grow, with little information left.

    With separated outcomes each Newton step adds about one to a logit, however far the descent has come, and
    the rows with an effect of the column lose their weight: in standard errors the step is small.
    """
    _, scale, back = columns_of(fit.design, fit.options)
    steps = solve(fit.sums.information, fit.sums.score[:, None])
    inverse = solve(fit.sums.information, np.eye(len(fit.params)))
    if fit.distribution.least_squares or steps is None or inverse is None:
        return []
    # Of standardized columns; a constant has no spread.
    spread = fit.design.spread / scale
    weight = float((np.diag(fit.sums.information) / np.maximum(spread**2 + (spread == 0.0), TINY)).max())
    step, variance = steps[:, 0] * spread, np.diag(inverse) * spread**2
    grows = (np.abs(step) > STILL) & (step * np.linalg.solve(back, fit.params) > 0.0)
    places = np.flatnonzero(grows & (variance * weight > INFLATED))
    return [fit.design.names[place] for place in places]


STILL, INFLATED = 0.05, 10.0
"""Step of a standardized coefficient that is too large for a maximum, and the factor by which its variance is
larger than that of a column whose rows have kept their weight."""


def in_standard_errors(
    slope: tuple[Floats, Floats], sums: FinalSums, dispersion: float, back: Floats
) -> Floats:
    """Newton's step towards a minimum, in standard errors of the maximum-likelihood estimate, (p,).

    `slope` is the descent direction (p,) and the curvature (p, p), `back` (p, p) takes coefficients to the
    units of the data. Signs are those of the way that is left; infinite where a matrix is singular.
    """
    score, curvature = slope
    steps = solve(curvature, score[:, None])
    inverse = solve(sums.information, np.eye(len(score)))
    if steps is None or inverse is None:
        return np.full(len(score), np.inf)
    # Of the maximum-likelihood estimate, in the data's units, diagonal only.
    variances = np.einsum("ij,jk,ik->i", back, inverse, back) * max(dispersion, TINY)
    return np.asarray(back @ steps[:, 0] / np.sqrt(np.maximum(variances, TINY)))


def solve(matrix: Floats, right: Floats) -> Floats | None:
    """Solve for a positive definite matrix of any scaling; None where it is not."""
    size = np.sqrt(np.diag(matrix))
    if not (size > 0.0).all():
        return None
    scaled = matrix / np.outer(size, size)
    try:
        np.linalg.cholesky(scaled)
    except np.linalg.LinAlgError:
        return None
    return np.asarray(np.linalg.solve(scaled, right / size[:, None]) / size[:, None])
