"""The state of an iteration at a site: its block, and the response's distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, xlogy

from fedstat.errors import EstimationError, MessageError, ModelError
from fedstat.federation.design.vertical_design import block_of, response_of
from fedstat.federation.disclosure.facts import ExternalWeights
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_allocation, check_lengths, control, presence
from fedstat.federation.protocols.product_steps import check_positions
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, DistributionSpec
from fedstat.kernels.glm.negative_binomial import marginal_counts
from fedstat.kernels.glm.quadrature import BY_M, BY_MM, LOG_P, marginal_likelihood
from fedstat.kernels.row_products import column_sums, gram
from fedstat.models.vertical.exchange.standardized_columns import (
    StandardizedBlock,
    check_alike,
    standardize_block,
)
from fedstat.models.vertical.exchange.steps import INCLUDED
from fedstat.models.vertical.moments import COLLINEAR
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Distributions of the response in VFEM other than the normal distribution.

NORMAL = DistributionSpec("Gaussian", "Identity")
ALPHAS = (np.log(1e-4), np.log(1e4))
"""Range of log alpha in the search; below it, counts vary no more than Poisson counts."""


def kernel_of(spec: DistributionSpec) -> int:
    """Return the compiled likelihood of a distribution and link; ModelError if there is none."""
    found = DISTRIBUTIONS[spec.name].integrals.get(spec.link)
    if found is None:
        listed = [f"{name} ({link})" for name, entry in DISTRIBUTIONS.items() for link in entry.integrals]
        raise ModelError(f"family: expected Gaussian (Identity), {', '.join(listed)}; received {spec}")
    return found


def observed_likelihood(spec: DistributionSpec, y: Floats, m: Floats, v: Floats) -> Floats:
    """Log-likelihood of each entity and its derivatives: the rows of the compiled likelihood."""
    if spec.alpha is not None:
        return marginal_counts(y, m, v, spec.alpha)
    return marginal_likelihood(kernel_of(spec), y, m, v)


def marginal_moments(spec: DistributionSpec, m: Floats, v: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of counts whose linear predictor has mean m and variance v, (n,) each."""
    mean = np.exp(m + 0.5 * v)
    squares = np.exp(v) * mean**2  # E mu^2
    return mean, mean + (1.0 + (spec.alpha or 0.0)) * squares - mean**2


def null_log_likelihood(spec: DistributionSpec, y: Floats, estimates_alpha: bool = False) -> float:
    """Return the maximal log-likelihood of the model with an intercept only, also over alpha if wanted."""
    if spec.alpha is not None:
        level, zero = np.full(len(y), np.log(y.mean())), np.zeros(len(y))

        def loss(log_alpha: float) -> float:
            return -float(marginal_counts(y, level, zero, float(np.exp(log_alpha)))[LOG_P].sum())

        if estimates_alpha:
            return -float(minimize_scalar(loss, bounds=ALPHAS, method="bounded").fun)
        return -loss(np.log(spec.alpha))
    n, mean = len(y), y.mean()
    if spec.name == "Binomial":
        return float(n * (xlogy(mean, mean) + xlogy(1.0 - mean, 1.0 - mean)))
    return float(np.sum(xlogy(y, mean) - mean - gammaln(y + 1.0)))


def null_with_offset(
    spec: DistributionSpec, y: Floats, offset: Floats, estimates_alpha: bool
) -> tuple[float, float]:
    """Mean at an offset of zero, and log-likelihood, of intercept and offset alone, over alpha if wanted."""
    zero = np.zeros(len(y))

    def ascend(at: DistributionSpec) -> tuple[float, float]:
        a = float(at.make().link(np.array([y.mean()]))[0]) - float(np.mean(offset))
        for _ in range(100):
            terms = observed_likelihood(at, y, a + offset, zero)
            step = float(terms[BY_M].sum() / -terms[BY_MM].sum())
            a += float(np.clip(step, -1.0, 1.0))
            if abs(step) < 1e-12:
                break
        return a, float(observed_likelihood(at, y, a + offset, zero)[LOG_P].sum())

    if estimates_alpha:
        found = minimize_scalar(
            lambda log_alpha: -ascend(replace(spec, alpha=float(np.exp(log_alpha))))[1],
            bounds=ALPHAS,
            method="bounded",
        )
        spec = replace(spec, alpha=float(np.exp(found.x)))
    a, log_likelihood = ascend(spec)
    return float(spec.make().link.inverse(np.array([a]))[0]), log_likelihood


# ----------------------------------------------------------------------------------------------------
# The state of a fit at a site: its standardized block, or the response.

# ----------------------------------------------------------------------------------------------------
# One site's block during a fit: its standardized rows, and the sums that stay fixed.
#
# Notation of Tang, Wang, Feng and Li (TWFL): a site k holds x_i^k in R^{p_k} for n_k of n entities, beta_k,
# mu_k and Sigma_k. Columns are standardized at their site once; the maximum likelihood estimate is
# equivariant.

BLOCK_STATE_ITEM = "vfem"
"""The single item of a fit that a site keeps, so that a refusal restores all of it."""
MOST_STEPS_KEPT = 100
MIN_OWN_VARIANCE = 1e-4
"""Entry of a vector of length one above which its column counts as part of a collinearity."""


@dataclass(frozen=True, slots=True)
class BlockParameters:
    """One site's parameters: beta (p,), mu (p,), Sigma (p, p), of standardized columns."""

    beta: Floats
    mu: Floats
    Sigma: Floats


@dataclass(frozen=True, slots=True)
class EvaluatedPoint:
    """A point at which the likelihood was evaluated, its M-step, and the direction of beta."""

    at: BlockParameters
    image: BlockParameters
    direction: Floats
    move: Floats


@dataclass(slots=True)
class BlockState:
    """One site's block during a fit.

    Its standardized columns X (n_k, p) of the entities it has, at positions `rows` among the n of the fit,
    ascending; `shift` and `scale` (p,) are their means and standard deviations in the units of the data.
    `padded`: row-level values are sent for all n entities, zero where the site lacks them. `table_rows`
    (n_k,) are the rows of the site's table, -1 for those imputed with their mean. If entities take part with
    some of the columns, the others are zero, and `alike` (n_k,) numbers the rows' sets of columns.
    """

    X: Floats
    rows: Ints
    n: int
    shift: Floats
    scale: Floats
    s1: Floats
    S2: Floats
    log_det: float
    memory: int
    padded: bool = False
    omega: float = 1.0
    eta: float = 0.0
    current: BlockParameters | None = None
    z: Floats = field(default_factory=lambda: np.empty(0))
    points: list[BlockParameters] = field(default_factory=list)
    evaluated: list[EvaluatedPoint | None] = field(default_factory=list)
    base: EvaluatedPoint | None = None
    previous: tuple[list[BlockParameters], list[EvaluatedPoint | None]] = field(
        default_factory=lambda: ([], [])
    )
    root: Floats | None = None
    s2_reference: float = 1.0
    staged: dict[str, Array] = field(default_factory=dict)
    table_rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    alike: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def block(self) -> BlockState:
        """Itself: other algorithms keep a block within their own item."""
        return self

    @property
    def held(self) -> Bools:
        """Which rows are its own; imputed rows hide nothing."""
        return np.asarray(self.table_rows >= 0)

    @property
    def n_seen(self) -> int:
        """Number of entities whose block counts as observed."""
        return len(self.X)

    @property
    def estimate(self) -> BlockParameters:
        """The point that was evaluated last."""
        assert self.current is not None
        return self.current

    def first_point(self, beta: Floats | None = None) -> BlockParameters:
        """Coefficients of standardized columns, zero by default, with the block's own moments."""
        mean = self.s1 / self.n_seen
        first = np.zeros_like(mean) if beta is None else beta
        return BlockParameters(first, mean, self.S2 / self.n_seen - np.outer(mean, mean))

    def require_alike(self, name: str, code: Ints) -> None:
        """Require that rows of a group, (n_k,), have the same columns.

        A sum of a column that only few rows of a group have would be over these few.
        """
        if len(self.alike):
            check_alike(name, code, self.alike)

    def weights(self, values: Floats, what: str) -> ExternalWeights:
        """Report weights of its own rows, (rows,), to the checks; weights of imputed rows hide nothing."""
        return ExternalWeights(values[self.held], what)

    def pad(self, values: Floats) -> Floats:
        """Return values of the site's entities, (n_k,), as they are sent: (n_k,), or padded (n,)."""
        if not self.padded:
            return values
        out = np.zeros(self.n)
        out[self.rows] = values
        return out


def block_state_of(state: State) -> BlockState:
    """Return this fit's site, or report that the fit was not started here."""
    return state.use(BLOCK_STATE_ITEM, BlockState, "this fit was not started here; ask 'start' first").block


BLOCK_OPENING: Mapping[str, ArrayDeclaration] = {
    "keep": INCLUDED,
    "rows": presence("positions of its entities among those of the fit", dtype="int64"),
    "n": control("number of entities", 0),
    "filled": control("whether missing blocks count as their mean", 0),
}
PARTS = {"seen": presence("which columns count as observed in each row", 2, optional=True)}
"""Further array if entities take part with some of a site's columns."""


def stage_block_state(
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints,
    n: int,
    filled: bool,
    memory: int,
    seen: Bools | None = None,
) -> BlockState:
    """Standardize the rows of a fit, `keep` (n_seen,) of the opened block, at positions `rows` (n_k,) of n.

    `filled`: missing entities are mean-imputed (the "impute" baseline), and the site counts as having all of
    them. `seen` (n_k, p) states which columns count as observed in these rows; the default is all.
    """
    check_lengths(data.name, rows=(rows, int(np.count_nonzero(keep))))
    check_positions(data.name, rows, n)
    check_allocation(data.name, n, n)
    if not 0 <= memory <= MOST_STEPS_KEPT:
        raise MessageError(f"{data.name}: expected at most {MOST_STEPS_KEPT} remembered steps")
    staged = standardize_block(data, state, keep, rows if filled else None, n, seen)
    check_collinear(data.name, block_of(state).spec.names, staged.X, len(rows))
    site = summarize(staged, np.arange(n) if filled else rows, n, memory)
    # With imputation, the block has as many rows as the fit, but only the site's own rows count.
    state.keep(BLOCK_STATE_ITEM, site, len(rows))
    return site


def summarize(staged: StandardizedBlock, rows: Ints, n: int, memory: int) -> BlockState:
    """Compute the sums that stay fixed during a fit."""
    X = staged.X
    ones = np.ones(len(X))
    s1, S2 = column_sums(X, ones), gram(X, ones)
    S = S2 / len(X) - np.outer(s1, s1) / len(X) ** 2
    log_det = float(np.linalg.slogdet(S)[1])
    return BlockState(
        X=X,
        rows=rows,
        n=n,
        shift=staged.shift,
        scale=staged.scale,
        s1=s1,
        S2=S2,
        log_det=log_det,
        memory=memory,
        table_rows=staged.table_rows,
        alike=staged.alike,
    )


def check_collinear(name: str, columns: tuple[str, ...], X: Floats, n_own: int) -> None:
    """Refuse a block whose covariance is singular on its rows, by an EstimationError that names columns."""
    eigenvalues, vectors = np.linalg.eigh(gram(X, np.ones(len(X))) / n_own)
    if eigenvalues[0] < COLLINEAR * eigenvalues[-1]:
        names = [c for c, v in zip(columns, vectors[:, 0], strict=True) if abs(v) > MIN_OWN_VARIANCE]
        raise EstimationError(
            f"{name}: collinear among the {n_own} entities of this fit: {', '.join(names)}; drop one of them"
        )


# ----------------------------------------------------------------------------------------------------
# The response during a fit, at the site that holds it.


@dataclass(slots=True)
class NormalResponse:
    """The response holder during a fit: y (n,), missing pattern of each entity, and its latest E-step.

    The E-step has the centered intercept a, the sum of linear predictors eta (n,), the variance v (G,) by
    pattern and the standardized residuals z (n,).
    """

    y: Floats
    code: Ints
    a: float = 0.0
    eta: Floats = field(default_factory=lambda: np.empty(0))
    v: Floats = field(default_factory=lambda: np.empty(0))
    z: Floats = field(default_factory=lambda: np.empty(0))


@dataclass(slots=True)
class GLMResponse:
    """The holder of a response that is not normal: y (n,), missing pattern of each entity, latest evaluation.

    `spec` is its distribution, `offset` (n,) known, `rows` (n,) those of the site's table. m and v (n,) are
    mean and variance of the linear predictors, `terms` (6, n) or (10, n) the likelihood and its derivatives
    (:mod:`fedstat.kernels.glm.quadrature` and :mod:`fedstat.kernels.glm.negative_binomial`).
    """

    y: Floats
    code: Ints
    spec: DistributionSpec
    rows: Ints
    m: Floats = field(default_factory=lambda: np.empty(0))
    v: Floats = field(default_factory=lambda: np.empty(0))
    terms: Floats = field(default_factory=lambda: np.empty((6, 0)))
    estimates_alpha: bool = False
    offset: Floats | float = 0.0

    def by_pattern(self, values: Floats, patterns: int) -> Floats:
        """Sum rows of row-level numbers by missing pattern: (q, n) -> (G, q)."""
        return np.array([np.bincount(self.code, weights=row, minlength=patterns) for row in values]).T


def normal_response_of(state: State) -> NormalResponse:
    """Return this fit's response, or report that the fit was not started here."""
    return state.use(
        "vfem active", NormalResponse, "this fit was not started here; ask 'start_response' first"
    )


RESPONSE_OPENING: Mapping[str, ArrayDeclaration] = {
    "keep": INCLUDED,
    "code": presence("missing pattern of each entity", dtype="int64"),
}
"""Start of a fit at the response holder."""


def choose_response(data: SiteData, state: State, keep: Bools, code: Ints) -> Floats:
    """Response of the rows in `keep`, in the order of the entities; `code` (n,) are their patterns."""
    response = response_of(state)
    check_lengths(data.name, keep=(keep, len(response)), code=(code, int(np.count_nonzero(keep))))
    if len(code) and code.min() < 0:
        raise MessageError(f"{data.name}: array 'code' has negative numbers")
    return np.ascontiguousarray(response[keep])
