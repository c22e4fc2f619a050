"""The state of an iteration at the coordinator, its options and messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights
from fedstat.federation.disclosure.row_checks import count_dominant_rows
from fedstat.federation.message import ArrayDeclaration, Request, aggregate
from fedstat.federation.protocols.engine import Fit, FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.row_products import column_sums
from fedstat.models.checks import check_choice, check_positive, check_whole
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.joint_normal.fit import Between, JointNormalFit
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.newton import TraceRow
from fedstat.models.vfem.iteration.site_state import NORMAL
from fedstat.progress_line import ProgressLine
from fedstat.typing import Array, Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Requests to the steps of VFEM, and declarations and safe sums of their releases.

# ----------------------------------------------------------------------------------------------------
# The name of this family, and how one of its steps is asked for.

FAMILY = "vfem"
BLOCK, SQUARES = "block", "squares"
"""Columns that a site opens for sums with what stays at the response holder."""
CROSS_STEPS = (
    "glm_information information joint_information "
    "glm_response_scores glm_scale_information glm_scores glm_scores_openly scores"
)
"""Steps that leave columns behind which are multiplied with those of others, in one of four ways."""
AFTER_INFORMATION = (
    "deal_product glm_curvature glm_curvature_openly glm_information glm_scale_curvature "
    "glm_scale_information multiply_columns release_columns share_product sketch"
)
"""Steps that stand before products of scores: the information with its products of columns."""


def vfem_request(site: str, step: str, session: str, text: str = "", **arrays: object) -> Request:
    """Address one step of this family."""
    return Request(site, FAMILY, step, {k: np.asarray(v) for k, v in arrays.items()}, session, text)


# ----------------------------------------------------------------------------------------------------
# Declarations of sums that leave a site, with what counts the entities behind them.


def declare_sums(what: str, ndim: int = 1) -> ArrayDeclaration:
    """Declare sums over entities."""
    return aggregate(what, ndim, behind=(EntityCount,))


def declare_weighted_sums(what: str, ndim: int = 1) -> ArrayDeclaration:
    """Declare sums over entities with weights that came in, which could single out a row."""
    return aggregate(what, ndim, behind=(EntityCount, ExternalWeights))


# ----------------------------------------------------------------------------------------------------
# Weighted sums of rows by group, without those that would disclose a few.


def safe_weights(weights: Floats, groups: Bools, least: int) -> list[Floats]:
    """Weights w of all rows, and of the rows of each group: 1 + K of (n,).

    A sum to which fewer than `least` rows contribute nearly all, or all but so few, would disclose them: the
    few count as zero, their expectation.
    """
    out = [weights]
    for group in groups.T:
        # The sum over the others is the difference to the total, and is as good as released.
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
# Options, state, progress and estimates of the iterations of VFEM.

# ----------------------------------------------------------------------------------------------------
# Options of the iterative exchange.

SMALLEST_MEMORY = 2
"""A mixed and a plain step may be rejected in turn, and the point before them is still wanted."""


CrossSource: TypeAlias = Literal["secure", "sketch", "exact"]
SketchKind: TypeAlias = Literal["structured", "gaussian"]
InitialValues: TypeAlias = "Literal['zero', 'cc', 'impute'] | Sequence[float] | Mapping[str, float] | Floats"


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """Options of :meth:`fedstat.VFEMRegression.fit` with ``exchange="iterative"``.

    Parameters
    ----------
    masked : bool
        Whether sites hide their linear predictors, likelihoods and scores by pairwise masks, so that
        the coordinator and the response holder learn sums over sites, which hides a site's
        part of one round and not of many. Linear predictors then go out for all entities, zero where an
        site has no record; where only one site in addition to the receiver has a record, the
        sum is its own part (the summary counts them). With two sites each knows the other's part.
        ``False`` sends every site's own.
    cross_products : {"secure", "sketch", "exact"}
        Where products of two sites' columns come from. Secure multiplication, exact, reveals the
        products only; it needs a third site, or a coordinator apart, to deal random numbers. Random
        projections are drawn by the sites from a seed that they share. Or a plain exchange of
        columns, which discloses them.
    sketch : {"structured", "gaussian"}
        Kind of projection.
    sketch_size : int
        Its rows; the relative error of a product is about sqrt(2 / rows).
    step : {"gradient", "local-newton"}
        M-step for the coefficients: TWFL (8), or Newton's with the site's own covariance.
    acceleration : {"anderson", None}
        Mix the last `memory` steps (Anderson 1965), falling back to plain steps where the likelihood would
        fall.
    memory : int
        Steps that are mixed, two or more.
    learning_rate : float, optional
        Of step="gradient"; by default 2 / (largest + smallest eigenvalue of the local covariances).
    init : {"zero", "cc", "impute"} or array or mapping
        First coefficients: zero, those of another method, or given (in the order of the model's
        ``param_names`` without the intercept, or by name).
    tol_score : float
        Stop when the score, in the complete-data information and per root of entities, is below,
    tol_change : float
        and no parameter, of standardized columns, moved by more.

    Raises
    ------
    ModelError
        An option is out of its range.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> model = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition, between="independent")
    >>> plain = fs.Iteration(acceleration=None, tol_score=1e-4, tol_change=1e-3)
    >>> model.fit(exchange="iterative", iteration=plain).converged
    True
    """

    masked: bool = True
    cross_products: CrossSource = "secure"
    sketch: SketchKind = "structured"
    sketch_size: int = 20_000
    step: Literal["gradient", "local-newton"] = "local-newton"
    acceleration: Literal["anderson"] | None = "anderson"
    memory: int = 8
    learning_rate: float | None = None
    init: InitialValues = "zero"
    tol_score: float = 1e-8
    tol_change: float = 1e-6

    def __post_init__(self) -> None:
        check_choice("masked", self.masked, (True, False))
        check_choice("cross_products", self.cross_products, get_args(CrossSource))
        check_choice("sketch", self.sketch, get_args(SketchKind))
        check_whole("sketch_size", self.sketch_size, 1)
        check_choice("step", self.step, ("gradient", "local-newton"))
        check_choice("acceleration", self.acceleration, ("anderson", None))
        check_whole("memory", self.memory, 1)
        check_positive("tol_score", self.tol_score)
        check_positive("tol_change", self.tol_change)
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
            self.tol_score,
            self.tol_change,
            self.masked,
        )


@dataclass(frozen=True, slots=True)
class IterationOptions:
    """Options of the maximization; see :class:`Iteration`.

    `step`, `acceleration` and `learning_rate` belong to a normal response.
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
        """Refuse a limit without meaning."""
        check_whole("maxiter", self.maxiter, 1)


# ----------------------------------------------------------------------------------------------------
# Estimates of all sites where the maximization ended, whatever the distribution of the response.


@dataclass(frozen=True, slots=True)
class NormalModel:
    """Mean (P + 1,) and covariance (P + 1, P + 1) of the columns, site by site, and the response.

    `edges` (P, P) are the entries of the columns' concentration that were not fixed at zero, `between` tells
    whether those of two sites were.
    """

    mean: Floats
    cov: Floats
    edges: Bools
    between: Between = "free"


@dataclass(frozen=True, slots=True)
class VFEMFit:
    """Maximum likelihood estimates, in the units of the data.

    a is the mean of the linear predictor, beta0 + sum_k mu_k'beta_k; s2 the residual variance, 1 where the
    response is not normal; beta, mu (p_k,) and t = beta_k'Sigma_k beta_k go by site.
    `response_moments` (2,) are mean and variance of a normal response, `null` the log-likelihood of the
    intercept alone for another one. `reason` says why the iteration ended. `law` is that of columns and
    response where blocks are not independent between sites, or entities have parts of them.
    `estimates_alpha`: that of a negative binomial distribution. `dispersion` of counts are Pearson's
    statistic per entity, and its standard error.
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
    law: NormalModel | None = None
    estimates_alpha: bool = False
    dispersion: tuple[float, float] | None = None

    @property
    def beta0(self) -> float:
        """Intercept at the origin."""
        return self.a - sum(float(self.mu[k] @ self.beta[k]) for k in self.beta)

    def same_family(self, other: VFEMFit) -> bool:
        """Whether two fits have one distribution of the response, but for an alpha that both estimated."""
        if not (self.estimates_alpha and other.estimates_alpha):
            return self.estimates_alpha == other.estimates_alpha and self.distribution == other.distribution
        return replace(self.distribution, alpha=other.distribution.alpha) == other.distribution


def fit_by_site(found: MomentsFit | JointNormalFit, between: Between = "free") -> VFEMFit:
    """Return estimates from moments as the iterative exchange does; `between` is of a law of all columns."""
    moments, law = found.moments, None
    if isinstance(found, JointNormalFit):
        law = NormalModel(np.append(found.mu, found.a), found.cov, found.moves.edges, between)
    places = {c: moments.places(k) for k, c in enumerate(moments.clients)}
    return VFEMFit(
        a=found.a,
        s2=found.s2,
        beta={c: found.beta[here] for c, here in places.items()},
        mu={c: found.mu[here] for c, here in places.items()},
        t={c: float(t) for c, t in zip(moments.clients, found.t, strict=True)},
        log_likelihood=found.log_likelihood,
        trace=found.trace,
        converged=found.converged,
        reason=found.reason,
        response_moments=moments.response_moments,
        law=law,
    )


# ----------------------------------------------------------------------------------------------------
# A line that tells how far an iteration has come.

WINDOW = 10


class Progress(ProgressLine):
    """Write one line per iteration: log-likelihood, relative score, and the time that is left.

    The time left is read off the rate at which the score fell over the last iterations.
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
# The state of an iteration at the coordinator, whatever the distribution of the response.


@dataclass(slots=True)
class IterationState:
    """Where an iteration stands: evaluations so far, and whether it has ended.

    `report` is told every evaluation. An algorithm says how it starts, how it goes on, and how it collects
    the estimates.
    """

    layout: Layout
    options: IterationOptions
    session: str
    report: Callable[[TraceRow], None] | None = None
    trace: list[TraceRow] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    converged: bool = False
    reason: str = "the largest number of iterations was reached"

    def start(self) -> FitProtocol[None]:
        """Open the fit at every site, with its first point."""
        raise NotImplementedError

    def climb(self) -> FitProtocol[None]:
        """Go on to a stationary point of the observed-data likelihood."""
        raise NotImplementedError

    def estimate(self) -> FitProtocol[VFEMFit]:
        """Collect the estimates where the iteration ended."""
        raise NotImplementedError

    def maximise(self) -> FitProtocol[VFEMFit]:
        """Maximize the observed-data likelihood."""
        return self.hide(self._whole())

    def _whole(self) -> FitProtocol[VFEMFit]:
        yield from self.start()
        yield from self.climb()
        return (yield from self.estimate())

    @property
    def masked(self) -> bool:
        """Whether sites hide their parts of sums; a single site's part is the sum."""
        return self.options.masked and len(self.layout.clients) > 1

    def hide(self, protocol: FitProtocol[Fit]) -> FitProtocol[Fit]:
        """Run rounds in which all sites are asked alike, under masks where they are wanted."""
        return masked_protocol(protocol, self.layout.clients, self.session) if self.masked else protocol

    def ask(self, site: str, step: str, text: str = "", **arrays: object) -> Request:
        """Address one step of this fit."""
        return vfem_request(site, step, self.session, text, **arrays)

    def opening(self, client: str) -> dict[str, Any]:
        """Tell a site which rows of its block take part, and where they stand."""
        lay = self.layout
        return {"keep": lay.keep[client], "rows": lay.kept[client], "n": lay.n, "filled": lay.filled}

    def ask_estimates(self, step: str) -> FitProtocol[dict[str, Mapping[str, Array]]]:
        """Ask every site for its estimates."""
        replies = yield [self.ask(k, step) for k in self.layout.clients]
        return {k: reply.arrays for k, reply in zip(self.layout.clients, replies, strict=True)}

    def make_fit(self, by_client: Mapping[str, Mapping[str, Array]], **own: Any) -> VFEMFit:
        """Put the sites' estimates together with those that belong to no site."""
        return VFEMFit(
            beta={k: a["beta"] for k, a in by_client.items()},
            mu={k: a["mu"] for k, a in by_client.items()},
            t={k: float(a["t"]) for k, a in by_client.items()},
            trace=tuple(self.trace),
            converged=self.converged,
            reason=self.reason,
            **own,
        )

    def enter(self, log_likelihood: float, score: float, change: float, move: str) -> None:
        """Enter an evaluation, and tell whether the iteration has converged."""
        seconds = time.perf_counter() - self.began
        row = TraceRow(len(self.trace) + 1, log_likelihood, score, change, move, seconds)
        self.trace.append(row)
        if self.report is not None:
            self.report(row)
        self.converged = row.score <= self.options.tol_score and row.change <= self.options.tol_change
        if self.converged:
            self.reason = "score and change are below their tolerances"
