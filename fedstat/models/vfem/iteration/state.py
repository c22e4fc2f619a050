"""The state of an iteration at the coordinator, its options and messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights
from fedstat.federation.disclosure.family import ONE_OWNER, state_without_terms
from fedstat.federation.disclosure.row_checks import count_dominant_rows
from fedstat.federation.message import ArrayDeclaration, Request, aggregate
from fedstat.federation.protocols.engine import Fit, FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.row_products import column_sums
from fedstat.models.checks import check_choice, check_integer, check_positive, masks_rows
from fedstat.models.vertical.joint_normal.edges import Between
from fedstat.models.vertical.joint_normal.fit import JointNormalFit
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.newton import TraceRow
from fedstat.models.vfem.iteration.site_state import NORMAL
from fedstat.progress_line import ProgressLine
from fedstat.typing import Array, Bools, Floats

# ----------------------------------------------------------------------------------------------------
# The name of this family, and requests to its steps.

FAMILY = state_without_terms("vfem", ONE_OWNER)
BLOCK, SQUARES = "block", "squares"
"""Columns that a site opens for sums with values that stay at the response holder."""
CROSS_STEPS = (
    "glm_information information joint_information "
    "glm_response_scores glm_scale_information glm_scores glm_scores_openly scores"
)
"""Steps that stage columns for products with those of other sites, by one of four methods."""
AFTER_INFORMATION = (
    "deal_product glm_curvature glm_curvature_openly glm_information glm_scale_curvature "
    "glm_scale_information multiply_columns release_columns share_product sketch"
)
"""Steps that precede products of scores: the information with its products of columns."""


def vfem_request(site: str, step: str, session: str, text: str = "", **arrays: object) -> Request:
    """Address one step of this family."""
    return Request(site, FAMILY, step, {k: np.asarray(v) for k, v in arrays.items()}, session, text)


# ----------------------------------------------------------------------------------------------------
# Declarations of sums that leave a site, with what counts the entities behind them.


def declare_sums(what: str, ndim: int = 1) -> ArrayDeclaration:
    """Declare sums over entities."""
    return aggregate(what, ndim, behind=(EntityCount,))


def declare_weighted_sums(what: str, ndim: int = 1) -> ArrayDeclaration:
    """Declare sums over entities with received weights, which could single out a row."""
    return aggregate(what, ndim, behind=(EntityCount, ExternalWeights))


# ----------------------------------------------------------------------------------------------------
# Weighted sums of rows by group, without those that would reveal a few rows.


def safe_weights(weights: Floats, groups: Bools, least: int) -> list[Floats]:
    """Weights w of all rows, and of the rows of each group: 1 + K of (n,).

    If fewer than `least` rows, or all rows but fewer than `least`, contribute nearly all of a sum, the sum
    would reveal them. These few rows count as zero, their expected value.
    """
    out = [weights]
    for group in groups.T:
        # The sum over the others is the difference from the total, and counts as released.
        few, nearly_all = (count_dominant_rows(weights[part]) < least for part in (group, ~group))
        if few or nearly_all:
            out.append(weights if nearly_all and group.any() else np.zeros_like(weights))
        else:
            out.append(weights * group)
    return out


def safe_weighted_sums(U: Floats, weights: Floats, groups: Bools, least: int) -> Floats:
    """Return sums of w u over all rows, and over the rows of each group: (1 + K, p); see above."""
    return np.array([column_sums(U, w) for w in safe_weights(weights, groups, least)])


# ----------------------------------------------------------------------------------------------------
# Options of the iterative exchange.

CHANGE_PER_SCORE = 100.0
"""Largest change of a parameter at convergence, relative to the largest score."""
SMALLEST_MEMORY = 2
"""A mixed and a plain step may be rejected in turn, and the point before them is still needed."""


CrossSource: TypeAlias = Literal["secure", "sketch", "exact"]
SketchKind: TypeAlias = Literal["structured", "gaussian"]
InitialValues: TypeAlias = "Literal['zero', 'cc', 'impute'] | Sequence[float] | Mapping[str, float] | Floats"


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """Options of :meth:`fedstat.VFEMRegression.fit` with ``exchange="iterative"``.

    Parameters
    ----------
    masked : bool, optional
        Whether sites hide their linear predictors, likelihoods and scores by pairwise masks, so that the
        coordinator and the response holder learn only sums over sites. This hides a site's part of one round,
        but not of many. Linear predictors are then sent for all entities, zero where a site has no record. If
        only one site in addition to the receiver has a record, the sum is its own part (the summary counts
        these). With two sites, each knows the other's part. Masks are the default with two sites as well,
        because they hide row-level values from the coordinator. ``False`` sends the values of every site
        unmasked.
    cross_products : {"secure", "sketch", "exact"}
        Source of the products of two sites' columns. Secure multiplication is exact and reveals only the
        products; it needs a third site, or a coordinator apart, to deal random numbers. The sites draw random
        projections from a seed that they share. An exact exchange reveals the columns.
    sketch : {"structured", "gaussian"}
        Kind of projection.
    sketch_size : int
        Rows of the sketch; the relative error of a product is about sqrt(2 / rows).
    step : {"gradient", "local-newton"}
        M-step for the coefficients: TWFL (8), or Newton's with the site's own covariance.
    acceleration : {"anderson", None}
        Mix the last `memory` steps (Anderson 1965), and use plain steps if the likelihood would decrease.
    memory : int
        Number of steps that are mixed, two or more.
    learning_rate : float, optional
        For step="gradient"; the default is 2 / (largest + smallest eigenvalue of the local covariances).
    init : {"zero", "cc", "impute"} or array or mapping
        Starting coefficients: zero, those of another method, or given (in the order of the model's
        ``param_names`` without the intercept, or by name).
    tol : float
        Stop when the score, scaled by the complete-data information and the root of the number of entities,
        is smaller, and no parameter (of standardized columns) moved by more than 100 times this.

    Raises
    ------
    ModelError
        An option is out of its range.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> model = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition, between="independent")
    >>> plain = fs.Iteration(acceleration=None, tol=1e-5)
    >>> model.fit(exchange="iterative", iteration=plain).converged
    True
    """

    masked: bool | None = None
    cross_products: CrossSource = "secure"
    sketch: SketchKind = "structured"
    sketch_size: int = 20_000
    step: Literal["gradient", "local-newton"] = "local-newton"
    acceleration: Literal["anderson"] | None = "anderson"
    memory: int = 8
    learning_rate: float | None = None
    init: InitialValues = "zero"
    tol: float = 1e-8

    def __post_init__(self) -> None:
        masks_rows(self.masked)
        check_choice("cross_products", self.cross_products, get_args(CrossSource))
        check_choice("sketch", self.sketch, get_args(SketchKind))
        check_integer("sketch_size", self.sketch_size, 1)
        check_choice("step", self.step, ("gradient", "local-newton"))
        check_choice("acceleration", self.acceleration, ("anderson", None))
        check_integer("memory", self.memory, 1)
        check_positive("tol", self.tol)
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate)

    def _options(self, maxiter: int) -> IterationOptions:
        """Return the options of the maximization."""
        return IterationOptions(
            self.step,
            self.acceleration,
            self.memory,
            self.learning_rate,
            maxiter,
            self.tol,
            CHANGE_PER_SCORE * self.tol,
            masks_rows(self.masked),
        )


@dataclass(frozen=True, slots=True)
class IterationOptions:
    """Options of the maximization; see :class:`Iteration`.

    `step`, `acceleration` and `learning_rate` apply to a normal response.
    """

    step: Literal["gradient", "local-newton"] = "local-newton"
    acceleration: Literal["anderson"] | None = "anderson"
    memory: int = 8
    learning_rate: float | None = None
    maxiter: int = 5000
    tol_score: float = 1e-8
    tol_change: float = 1e-6
    masked: bool = False

    def __post_init__(self) -> None:
        """Refuse a limit without a meaning."""
        check_integer("maxiter", self.maxiter, 1)


# ----------------------------------------------------------------------------------------------------
# Estimates of all sites at the end of the maximization, for any distribution of the response.


@dataclass(frozen=True, slots=True)
class NormalModel:
    """Mean (P + 1,) and covariance (P + 1, P + 1) of the columns, site by site, and the response.

    `edges` (P, P) are the entries of the columns' concentration that were not fixed at zero. `between` states
    whether those of two sites were free.
    """

    mean: Floats
    cov: Floats
    edges: Bools
    between: Between = "free"


RAISE_LIMITS = "raise maxiter or loosen the tolerances"


@dataclass(frozen=True, slots=True)
class VFEMFit:
    """Maximum likelihood estimates, in the units of the data.

    a is the mean of the linear predictor, beta0 + sum_k mu_k'beta_k; s2 the residual variance, 1 if the
    response is not normal; beta, mu (p_k,) and t = beta_k'Sigma_k beta_k are by site. `response_moments` (2,)
    are mean and variance of a normal response, `null` the log-likelihood of the intercept alone for another
    one. `reason` states why the iteration ended, `remedy` what to do if it did not converge. `joint` is the
    joint normal model of columns and response if blocks are not independent between sites, or if entities
    have parts of them. `estimates_alpha`: alpha of a negative binomial distribution was estimated.
    `dispersion` of counts has Pearson's statistic per entity, and its standard error.
    """

    a: float
    s2: float
    beta: Mapping[str, Floats]
    mu: Mapping[str, Floats]
    t: Mapping[str, float]
    log_likelihood: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str
    distribution: DistributionSpec = NORMAL
    response_moments: Floats | None = None
    null: float | None = None
    joint: NormalModel | None = None
    estimates_alpha: bool = False
    dispersion: tuple[float, float] | None = None
    remedy: str = RAISE_LIMITS

    @property
    def beta0(self) -> float:
        """Intercept at the origin."""
        return self.a - sum(float(self.mu[k] @ self.beta[k]) for k in self.beta)

    def same_family(self, other: VFEMFit) -> bool:
        """Whether two fits have one distribution of the response, except for an alpha that both estimated."""
        if not (self.estimates_alpha and other.estimates_alpha):
            return self.estimates_alpha == other.estimates_alpha and self.distribution == other.distribution
        return replace(self.distribution, alpha=other.distribution.alpha) == other.distribution


def fit_by_site(found: JointNormalFit, between: Between = "free") -> VFEMFit:
    """Return estimates from moments as the iterative exchange does; `between` describes the joint model."""
    moments, joint = found.moments, None
    if not found.model.profiled:
        joint = NormalModel(np.append(found.mu, found.a), found.cov, found.moves.edges, between)
    places = {c: moments.places(k) for k, c in enumerate(moments.sites)}
    return VFEMFit(
        a=found.a,
        s2=found.s2,
        beta={c: found.beta[here] for c, here in places.items()},
        mu={c: found.mu[here] for c, here in places.items()},
        t={c: float(t) for c, t in zip(moments.sites, found.t, strict=True)},
        log_likelihood=found.log_likelihood,
        trace=found.trace,
        converged=found.converged,
        reason=found.reason,
        response_moments=moments.response_moments,
        joint=joint,
    )


# ----------------------------------------------------------------------------------------------------
# A line that reports the progress of an iteration.

WINDOW = 10


class Progress(ProgressLine):
    """Write one line per iteration: log-likelihood, relative score, and the remaining time.

    The remaining time is computed from the rate at which the score decreased over the last iterations.
    """

    def __init__(self, options: IterationOptions) -> None:
        super().__init__("iteration")
        self._target = options.tol_score
        self._rows: list[TraceRow] = []

    def __call__(self, row: TraceRow) -> None:
        """Write the line of one evaluation."""
        self._rows.append(row)
        note = f"log-likelihood {row.log_likelihood:.6f}  relative score {row.score:.1e}"
        self.step(row.iteration, note, self.seconds_left())

    def seconds_left(self) -> float | None:
        """Seconds until the score reaches its tolerance at the present rate; None while unknown."""
        rows = self._rows[-WINDOW:]
        if len(rows) < 3:
            return None
        fall = np.log(rows[0].score / rows[-1].score)
        if fall <= 0.0 or rows[-1].score <= self._target:
            return None if fall <= 0.0 else 0.0
        return float(np.log(rows[-1].score / self._target) * (rows[-1].seconds - rows[0].seconds) / fall)


# ----------------------------------------------------------------------------------------------------
# The state of an iteration at the coordinator, for any distribution of the response.


@dataclass(slots=True)
class IterationState:
    """State of an iteration: evaluations so far, and whether it has ended.

    `report` is called with every evaluation. An algorithm defines how it starts, how it continues, and how it
    collects the estimates.
    """

    layout: Layout
    options: IterationOptions
    session: str
    report: Callable[[TraceRow], None] | None = None
    trace: list[TraceRow] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    converged: bool = False
    reason: str = "the largest number of iterations was reached"
    remedy: str = RAISE_LIMITS

    def start(self) -> FitProtocol[None]:
        """Open the fit at every site, with its first point."""
        raise NotImplementedError

    def ascend(self) -> FitProtocol[None]:
        """Continue to a stationary point of the observed-data likelihood."""
        raise NotImplementedError

    def estimate(self) -> FitProtocol[VFEMFit]:
        """Collect the estimates at the end of the iteration."""
        raise NotImplementedError

    def maximize(self) -> FitProtocol[VFEMFit]:
        """Maximize the observed-data likelihood."""
        return self.hide(self._complete())

    def _complete(self) -> FitProtocol[VFEMFit]:
        yield from self.start()
        yield from self.ascend()
        return (yield from self.estimate())

    @property
    def masked(self) -> bool:
        """Whether sites hide their parts of sums; a single site's part is the sum."""
        return self.options.masked and len(self.layout.sites) > 1

    def hide(self, protocol: FitProtocol[Fit]) -> FitProtocol[Fit]:
        """Run rounds in which all sites receive the same request, masked if requested."""
        return masked_protocol(protocol, self.layout.sites, self.session) if self.masked else protocol

    def request(self, site: str, step: str, text: str = "", **arrays: object) -> Request:
        """Address one step of this fit."""
        return vfem_request(site, step, self.session, text, **arrays)

    def opening(self, site: str) -> dict[str, Any]:
        """Send a site which rows of its block take part, and their positions."""
        lay = self.layout
        parts = {"seen": lay.has[site]} if site in lay.has else {}
        return {"keep": lay.keep[site], "rows": lay.kept[site], "n": lay.n, "filled": lay.filled, **parts}

    def request_estimates(self, step: str) -> FitProtocol[dict[str, Mapping[str, Array]]]:
        """Request the estimates from every site."""
        replies = yield [self.request(k, step) for k in self.layout.sites]
        return {k: reply.arrays for k, reply in zip(self.layout.sites, replies, strict=True)}

    def make_fit(self, by_site: Mapping[str, Mapping[str, Array]], **own: Any) -> VFEMFit:
        """Combine the sites' estimates with those that belong to no site."""
        return VFEMFit(
            beta={k: a["beta"] for k, a in by_site.items()},
            mu={k: a["mu"] for k, a in by_site.items()},
            t={k: float(a["t"]) for k, a in by_site.items()},
            trace=tuple(self.trace),
            converged=self.converged,
            reason=self.reason,
            remedy=self.remedy,
            **own,
        )

    def enter(self, log_likelihood: float, score: float, change: float, move: str) -> None:
        """Record an evaluation, and return whether the iteration has converged."""
        seconds = time.perf_counter() - self.began
        row = TraceRow(len(self.trace) + 1, log_likelihood, score, change, move, seconds)
        self.trace.append(row)
        if self.report is not None:
            self.report(row)
        self.converged = row.score <= self.options.tol_score and row.change <= self.options.tol_change
        if self.converged:
            self.reason = "score and change are below their tolerances"
