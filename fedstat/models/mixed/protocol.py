"""Maximization of marginal likelihoods that are sums over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import numpy as np
from scipy.linalg import block_diag

from fedstat.codec import to_json
from fedstat.errors import EstimationError, Remedy
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.derivatives import Direction
from fedstat.federation.design.formula.syntax_tree import TREATMENT, Category, Column, Relation
from fedstat.federation.design.formula.terms import RandomTerm, parse_term
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.design.horizontal_steps import standardization, translation
from fedstat.federation.design.site_rows import INTERCEPT
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import ConvergenceTest, rounding_error
from fedstat.inference.recession import RecessionTest, name_columns, receding, separation_text
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.mixed_effects import jet_inverse, jet_length, jet_product, product_rule
from fedstat.models.horizontal.clusters import (
    POWERS,
    Clustering,
    LabelComparison,
    SharedLabels,
    require_inside,
)
from fedstat.models.horizontal.estimability import require_independent
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.models.horizontal.variable_changes import level_counts
from fedstat.models.margins import ChangesRequest, MeanJet, change_at
from fedstat.models.mixed.steps import (
    MixedRequest,
    averaged_means,
    effect_units,
    first_parameters,
    has_dispersion,
    joint_factor,
    lower_pairs,
    pack,
    unpack_covariances,
    unpack_factors,
)
from fedstat.spline_names import factors_of
from fedstat.typing import Array, Floats, Matrix, Vector

SINGULAR = 1e-4
"""Smallest standard deviation of a direction of random effects, relative to the residual one, above zero."""
CORRECTION = "CR2"
"""Correction of robust errors for the leverage of groups."""
MOST_HALVINGS, SADDLE, SMALLEST = 30, 0.1, 1e-6
LOWEST, HIGHEST_SHARE = 0.01, 0.99
"""Limits of the mean at which the iteration starts; the upper one is for shares."""
LEAST_ALPHA = 1e-6
COLLINEAR = 1e-11
"""Eigenvalue of the products of the columns of effects, relative to the largest, of collinear columns."""
CONCENTRATED = (
    "no step increases the likelihood with weight on more than a few rows of every site, as where columns "
    "separate the outcomes. Leave out such columns, or merge rare levels"
)


@dataclass(frozen=True, slots=True, eq=False)
class ValueAndDerivatives:
    """A matrix with its derivatives in K parameters; see :mod:`fedstat.kernels.mixed_effects`."""

    values: Floats

    @property
    def K(self) -> int:  # noqa: N802
        """Number of parameters."""
        return int((np.sqrt(8.0 * len(self.values) + 1.0) - 3.0) / 2.0 + 0.5)

    def __matmul__(self, other: ValueAndDerivatives) -> ValueAndDerivatives:
        every = frozenset(range(self.K))
        out = np.zeros((len(self.values), self.values.shape[1], other.values.shape[2]))
        left, right = np.ascontiguousarray(self.values), np.ascontiguousarray(other.values)
        jet_product(left, right, product_rule(self.K, every, every), out)
        return ValueAndDerivatives(out)

    def inverse(self) -> tuple[ValueAndDerivatives, Floats]:
        """Return the inverse, and the jet of the log-determinant."""
        every = frozenset(range(self.K))
        out, logdet = np.zeros_like(self.values), np.zeros(len(self.values))
        jet_inverse(np.ascontiguousarray(self.values), product_rule(self.K, every, every), out, logdet)
        return ValueAndDerivatives(out), logdet

    def scalar(self) -> tuple[float, Floats, Floats]:
        """Return value, gradient (K,) and Hessian (K, K) of a jet of numbers."""
        flat, K = self.values.reshape(-1), self.K
        hessian = np.zeros((K, K))
        rows, columns = np.triu_indices(K)
        hessian[rows, columns] = hessian[columns, rows] = flat[1 + K :]
        return float(flat[0]), flat[1 : 1 + K], hessian


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """The random effects: their terms, design columns, and the units in which these are fitted.

    The sites take columns less `shift`, over `scale`: deviations from the mean, if some columns add up to
    one, `constant`, such as an intercept. Effects of these columns are `basis` (q, q) times others that are
    uncorrelated over the rows and of unit length. Parameters are the entries of lower triangular factors L of
    the covariances ``T = L L'`` of the latter; they may be zero, where the logarithm of a Cholesky factor
    would be infinite. So a slope of a calendar year or of an income is fitted as one of any other column.
    """

    terms: tuple[RandomTerm, ...]
    columns: Annotated[tuple[tuple[str, ...], ...], "R"]
    sizes: Annotated[tuple[int, ...], "R"]
    mean: Annotated[tuple[Floats, ...], "R"]
    shift: Annotated[tuple[Floats, ...], "R"]
    scale: Annotated[tuple[Floats, ...], "R"]
    constant: Annotated[tuple[Floats, ...], "R"]
    basis: Annotated[tuple[Floats, ...], "R"]

    @classmethod
    def of(cls, terms: Sequence[RandomTerm], design: RowsDesign, spec: BlockSpec) -> Effects:
        """Choose units by the moments of the columns."""
        parts = []
        for term, names in zip(terms, design.effects, strict=True):
            places = [design.names.index(name) for name in names]
            constant = constant_columns(term, names, spec)
            mean, spread = design.mean[places], design.spread[places]
            shift = mean * (1.0 - constant) if constant.any() else np.zeros(len(mean))
            length = np.sqrt((mean - shift) ** 2 + spread**2)
            parts.append((mean, shift, np.where(length > 0.0, length, 1.0), constant, np.eye(len(mean))))
        sizes = tuple(map(len, design.effects))
        return cls(tuple(terms), design.effects, sizes, *zip(*parts, strict=True))

    def uncorrelated(self, moments: Floats) -> Effects:
        """Return the effects with a basis of uncorrelated columns, by the packed moments of the sites' ones.

        The basis is triangular: with M = U U' it is the inverse of U', for the upper triangular U.
        """
        basis: list[Floats] = []
        for term, M in zip(self.terms, unpack_covariances(moments, self.sizes), strict=True):
            values, vectors = np.linalg.eigh(M)
            if values[0] < COLLINEAR * values[-1]:
                involved = np.abs(vectors[:, 0]) > 0.1
                names = [name for name, one in zip(self.columns[len(basis)], involved, strict=True) if one]
                raise EstimationError(
                    f"{term.text}: the columns {', '.join(map(repr, names))} of its effects are collinear. "
                    "Leave out one of them"
                )
            U = np.linalg.cholesky(M[::-1, ::-1])[::-1, ::-1]
            basis.append(np.linalg.inv(U.T))
        return replace(self, basis=tuple(basis))

    def apart(self, term: int, effect: int) -> Effects:
        """Return the effects in a basis whose first one is an effect of a term in the units of the data."""
        row = self.in_units[term][effect] @ self.basis[term]
        turn = np.linalg.qr(np.column_stack([row, np.eye(len(row))]))[0]
        turn[:, 0] *= np.sign(turn[:, 0] @ row)
        return replace(self, basis=tuple(B @ turn if t == term else B for t, B in enumerate(self.basis)))

    def of_basis(self, theta: Floats, other: Effects) -> Floats:
        """Return the parameters, in this basis, of the covariances with parameters in another one."""
        pairs = zip(self.basis, other.basis, other.factors(theta), strict=True)
        roots = [np.linalg.solve(own, there @ L) for own, there, L in pairs]
        # A lower triangular factor with the same covariance.
        found = [np.linalg.qr(root.T)[1].T for root in roots]
        return pack([L * np.where(np.diag(L) < 0.0, -1.0, 1.0) for L in found])

    @property
    def K(self) -> int:  # noqa: N802
        """Number of parameters."""
        return first_parameters(self.sizes)[-1]

    @property
    def in_units(self) -> list[Floats]:
        """Matrices that take effects of the sites' columns to those of columns in the units of the data."""
        return list(map(effect_units, self.shift, self.scale, self.constant))

    def start(self) -> Floats:
        """Return parameters of independent effects with the residual variance."""
        return np.array([float(a == b) for q in self.sizes for a, b in lower_pairs(q)])

    def moves(self) -> Floats:
        """Return the matrix from packed covariances in the basis to those of the sites' columns, (K, K)."""
        blocks = []
        for B, q in zip(self.basis, self.sizes, strict=True):
            pairs = lower_pairs(q)
            block = np.zeros((len(pairs), len(pairs)))
            for k, (a, b) in enumerate(pairs):
                E = np.zeros((q, q))
                E[a, b] = E[b, a] = 1.0
                block[:, k] = pack([B @ E @ B.T])
            blocks.append(block)
        return np.asarray(block_diag(*blocks))

    def factors(self, theta: Floats) -> list[Floats]:
        """Return the lower triangular factors, with nonnegative diagonals."""
        return [L * np.where(np.diag(L) < 0.0, -1.0, 1.0) for L in unpack_factors(theta, self.sizes)]

    def covariance(self, theta: Floats) -> Floats:
        """Return the entries of the covariances of effects of the sites' columns."""
        roots = [B @ L for B, L in zip(self.basis, self.factors(theta), strict=True)]
        return pack([root @ root.T for root in roots])

    def factors_in_units(self, theta: Floats) -> list[Floats]:
        """Return factors of the covariances in the units of the data; they are not triangular."""
        parts = zip(self.in_units, self.basis, self.factors(theta), strict=True)
        return [S @ B @ L for S, B, L in parts]

    def covariance_in_units(self, theta: Floats) -> Floats:
        """Return the entries of the covariances in the units of the data."""
        return pack([root @ root.T for root in self.factors_in_units(theta)])

    def chain(self, theta: Floats) -> tuple[Floats, Floats]:
        """Return derivatives of the scaled covariances in the parameters: (K, K) and (K, K, K)."""
        K, begin = self.K, first_parameters(self.sizes)
        first, second = np.zeros((K, K)), np.zeros((K, K, K))
        for term, (L, q) in enumerate(zip(self.factors(theta), self.sizes, strict=True)):
            pairs = lower_pairs(q)
            for k, (a, b) in enumerate(pairs, begin[term]):
                E = np.zeros((q, q))
                E[a, b] = 1.0
                first[begin[term] : begin[term + 1], k] = pack([E @ L.T + L @ E.T])
                for m, (c, d) in enumerate(pairs, begin[term]):
                    G = np.zeros((q, q))
                    G[c, d] = 1.0
                    second[begin[term] : begin[term + 1], k, m] = pack([E @ G.T + G @ E.T])
        return first, second

    def singular(self, theta: Floats) -> list[int]:
        """Return the terms whose covariance is singular."""
        lowest = [np.linalg.svd(L, compute_uv=False)[-1] for L in self.factors(theta)]
        return [term for term, least in enumerate(lowest) if least < SINGULAR]


def constant_columns(term: RandomTerm, names: Sequence[str], spec: BlockSpec) -> Floats:
    """Return ones at the columns that add up to one: the intercept, or all levels of a factor, (q,)."""
    if term.intercept:
        return np.array([float(name == INTERCEPT) for name in names])
    for (factor,) in (parsed for parsed in map(parse_term, term.terms) if len(parsed) == 1):
        tree = factor.tree
        coded = isinstance(tree, Column) and tree.name in spec.levels
        if coded or (isinstance(tree, Category) and tree.coding == TREATMENT) or isinstance(tree, Relation):
            own = [factors_of(name) == (name,) and name.startswith(f"{factor.label}[") for name in names]
            return np.array(own, dtype=np.float64)
    return np.zeros(len(names))


@dataclass(frozen=True, slots=True, eq=False)
class NormalSums:
    """Sums over sites at a covariance T of the random effects, with derivatives in its entries.

    `logdet` (J,) is log det V, `products` (J, p + 1, p + 1) is (X, r)'V^-1 (X, r), for a residual variance of
    one, standardized columns X, and the response less fitted values r. `units` (p, p) takes coefficients of
    standardized columns to those of columns in the units of the data. Products of columns that are not
    centered would lose digits: of a response with mean 1e8, all of them.
    """

    logdet: Annotated[Floats, "J"]
    products: Annotated[Floats, "J w w"]
    n: float
    reml: bool
    units: Matrix

    @property
    def df(self) -> float:
        """Rows, less coefficients for REML."""
        return float(self.n - (self.products.shape[1] - 1.0) * self.reml)

    def parts(self) -> tuple[ValueAndDerivatives, Floats, ValueAndDerivatives, ValueAndDerivatives]:
        """Return (X'V^-1 X)^-1, log det X'V^-1 X, the coefficients, and the weighted residual squares.

        The log-determinant is that of columns in the units of the data.
        """
        p = self.products.shape[1] - 1
        inverse, logdet = ValueAndDerivatives(self.products[:, :p, :p]).inverse()
        logdet[0] -= 2.0 * np.linalg.slogdet(self.units)[1]
        right = ValueAndDerivatives(self.products[:, :p, p:])
        beta = inverse @ right
        fitted = ValueAndDerivatives(self.products[:, p:, :p]) @ beta
        return inverse, logdet, beta, ValueAndDerivatives(self.products[:, p:, p:] - fitted.values)

    def deviance(self) -> tuple[float, Floats, Floats]:
        """Return -2 log L, maximized over coefficients and residual variance, with derivatives in T.

        Bates et al. (2015), J. Stat. Softw. 67, equations 34 and 41.
        """
        _, logdet, _, squares = self.parts()
        value, gradient, hessian = squares.scalar()
        base, base_gradient, base_hessian = ValueAndDerivatives(self.logdet + self.reml * logdet).scalar()
        slope = gradient / value
        return (
            base + self.df * (1.0 + np.log(2.0 * np.pi * value / self.df)),
            base_gradient + self.df * slope,
            base_hessian + self.df * (hessian / value - np.outer(slope, slope)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MarginalSums:
    """-2 log L over all sites with its gradient, and its Hessian where it was requested."""

    deviance: float
    gradient: Vector
    hessian: Matrix | None


@dataclass(frozen=True, slots=True, eq=False)
class GroupScoreSums:
    """Sums over the outermost groups at the estimate, of standardized columns.

    `tests` (3, p) are described at :func:`fedstat.models.mixed.steps.group_tests`; `meat` (p, p) are products
    of corrected scores, unless a coefficient rests on one group (`inside`), `concentration` (p,) the squares
    of groups' shares; `inverse` (p, p) is the inverse of the information of the coefficients, and `bread`
    allows for variances that were estimated with them. `dispersion` (2,) is the excess of squared residuals
    of counts and its variance, which is zero for other responses; `influences` (2, m) are described at
    :func:`fedstat.models.mixed.steps.variance_influences`, and zero without them.
    """

    tests: Annotated[Floats, "3 p"]
    inside: bool
    meat: Matrix
    concentration: Vector
    inverse: Matrix
    bread: Matrix
    dispersion: Annotated[Floats, "2"]
    influences: Annotated[Floats, "2 m"]


@dataclass(frozen=True, slots=True, eq=False)
class MixedFit:
    """The maximum, in the units of the data, and the sums at it.

    `theta` are the entries of the factors, see :class:`Effects`; `covariance` the entries of the covariances
    of the random effects in the units of the data. `null` are sums without random effects over rows of total
    `weight`, and `mean` is that of the response. `cov` is the
    covariance of the coefficients; for responses that are not normal `joint` is that of coefficients and
    `theta`, unless variances are at the end of their range. `dispersion` is the negative binomial's alpha or
    the gamma's scale with its standard error, if the response has one; `cov` and `joint` account for its
    estimation. `working` are the sums of a linear model with the weights of the fit, from which degrees of
    freedom follow.
    """

    params: Vector
    cov: Matrix
    scale: float
    deviance: float
    theta: Annotated[Floats, "t"]
    covariance: Annotated[Floats, "t"]
    joint: Annotated[Floats, "h h"] | None
    sums: NormalSums | None
    null: NormalSums
    weight: float
    mean: float
    effects: Effects
    groups: Annotated[Floats, "R"]
    design: RowsDesign
    distribution: DistributionSpec
    nodes: int
    trace: Annotated[Floats, "E 2"]
    converged: bool
    masked: bool
    dispersion: Annotated[Floats, "2"] | None = None
    working: NormalSums | None = None
    by_group: GroupScoreSums | None = None
    shared: tuple[SharedLabels, ...] = ()

    @property
    def log_dispersion(self) -> Floats:
        """Logarithm of the dispersion, which is the last parameter of the likelihood; empty without one."""
        return np.log(self.dispersion[:1]) if self.dispersion is not None else np.zeros(0)

    @property
    def reml(self) -> bool:
        """Whether the likelihood is the restricted one."""
        return self.sums is not None and self.sums.reml

    @property
    def robust(self) -> Floats:
        """Covariance of the coefficients from products of groups' scores, (p, p)."""
        assert self.by_group is not None
        require_inside(self.by_group.inside, "cov_type='model'")
        half = self.null.units @ self.by_group.bread
        return np.asarray(half @ self.by_group.meat @ half.T)

    @property
    def clustering(self) -> Clustering:
        """The outermost groups, as clusters behind robust errors."""
        assert self.by_group is not None
        outermost = int(np.argmin(self.groups))
        with np.errstate(divide="ignore"):
            effective = 1.0 / self.by_group.concentration
        name, count = self.effects.terms[outermost].group, round(float(self.groups[outermost]))
        return Clustering(name, count, effective, CORRECTION)

    @property
    def jackknife(self) -> tuple[Floats, Floats] | None:
        """Errors of log standard deviations from influences of groups (m,), and degrees of freedom (m,).

        The variance of a sum of squares follows from the kurtosis k of the influences: a chi-squared
        distribution with 2 G / (k - 1) degrees of freedom has the same. None without influences.
        """
        if self.by_group is None or not self.by_group.influences.all():
            return None
        squares, powers = self.by_group.influences
        G = float(self.groups.min())
        excess = np.maximum(G * powers / squares**2 - 1.0, 1e-300)
        return np.sqrt(squares), np.clip(2.0 * G / excess, 1.0, max(G - 1.0, 1.0))

    def matrices(self) -> list[Floats]:
        """Return the covariance matrices of the random effects of each term."""
        return unpack_covariances(self.covariance, self.effects.sizes)

    def slopes_at(self, row: Floats) -> tuple[float, Floats, Floats]:
        """Return the derivative of the mean at a row (p,), and its own ones in coefficients and factors.

        Columns of the random effects are at their means.
        """
        (_, first, second, third, _), by_factor = self._means_at(row[None, :])
        return float(first[0]), second[0] * row, third[0] * by_factor

    def change_at(self, one: Direction, row: Floats) -> tuple[float, Floats]:
        """Return the effect of a variable at a row (p,), and its slopes in coefficients and factors."""
        place, B = np.eye(len(row) + 1), self.params[None, :]

        def jet(X: Floats) -> MeanJet:
            mean, first, second, _, _ = self._means_at(X)[0]
            return mean[:, None], first[:, None, None], second[:, None, None, None]

        effect, slopes = change_at(one, row, place, B, jet)
        means, by_factor = self._means_at(row[None, :] if one.ends is None else np.array(one.rows(row)))
        if one.ends is None:
            own = means[3][0] * (one.derivative(row) @ self.params)
        else:
            own = means[2][1] - means[2][0]
        return float(effect[0]), np.append(slopes[0, 0], own * by_factor)

    def _means_at(self, X: Floats) -> tuple[Floats, Floats]:
        """Return averaged means at rows (m, p) with derivatives, (5, m), and half those of the variance.

        Columns of the random effects are at their means, and the last are derivatives in the factors.
        """
        effects = self.effects
        L, places = joint_factor(self.theta, effects.sizes)
        parts = zip(effects.mean, effects.shift, effects.scale, effects.basis, strict=True)
        z = np.concatenate([((mean - shift) / scale) @ B for mean, shift, scale, B in parts])
        deviation, product = np.linalg.norm(z @ L), np.outer(z, z @ L)
        means = averaged_means(self.distribution, X @ self.params, np.full(len(X), deviation))
        return means, np.array([product[place] for place in places])


@dataclass(eq=False)
class MixedNewton:
    """Newton's method, with halved steps and positive curvature, in the factors of the covariances."""

    session: RowsSession
    terms: tuple[RandomTerm, ...]
    distribution: DistributionSpec
    nodes: int = 1
    maxiter: int = 100
    tol: float = 1e-7
    trace: list[tuple[float, float]] = field(default_factory=list)

    def open(self) -> FitProtocol[None]:
        """Open the rows, and group them."""
        session = self.session
        compared = LabelComparison(session, tuple(dict.fromkeys(term.columns for term in self.terms)))
        self.shared, replies = compared.split((yield session.opening() + compared.requests()))
        design = session.opened(replies)
        self.design, self.effects = design.fixed, Effects.of(self.terms, design, session.agreement.spec)
        self.shift, self.scale = standardization(self.design.mean, self.design.spread, self.design.intercept)
        request = MixedRequest(
            self.distribution, self.nodes, tuple(term.columns for term in self.terms), self.effects.columns
        )
        arrays: dict[str, Array] = {
            "shift": self.shift,
            "scale": self.scale,
            "effect_shift": np.concatenate(self.effects.shift),
            "effect_scale": np.concatenate(self.effects.scale),
            "effect_constant": np.concatenate(self.effects.constant),
        }
        replies = yield session.request_all("start", arrays, to_json(request))
        self.groups = add(replies, "groups")
        self.weight, total = add(replies, "response").tolist()
        self.mean = total / self.weight
        self.center: Floats = np.zeros(len(self.design.names))
        if self.design.intercept:
            self.center[0] = self.mean
        n = float(self.design.n.sum())
        binary = self.distribution.name == "Binomial" and self.weight == n
        for term, count, q in zip(self.terms, self.groups.tolist(), self.effects.sizes, strict=True):
            if count >= n and (self.spreads or binary):
                raise EstimationError(
                    f"{term.text}: one row in each group: its variance cannot be estimated. Use groups with "
                    "several rows, or leave the term out"
                )
            if count <= q:
                raise EstimationError(
                    f"{term.text}: there are {count:g} groups for {q} random effects, which need more "
                    "groups. Use fixed effects, or leave the term out"
                )

    def reopen(self, fit: MixedFit) -> FitProtocol[None]:
        """Open the rows of a fit again, with its units."""
        yield from self.open()
        self.effects = fit.effects

    # -- normal responses ------------------------------------------------------------------------

    def evaluate(self, theta: Floats, reml: bool) -> FitProtocol[NormalSums]:
        """Request the sums at parameters; derivatives are in the covariances of uncorrelated effects."""
        arrays: dict[str, Array] = {"covariance": self.effects.covariance(theta), "center": self.center}
        replies = yield self.session.request_all("sum_products", arrays)
        width, K = len(self.design.names) + 1, self.effects.K
        products = add(replies, "products").reshape(jet_length(K), width, width)
        moves, n = self.effects.moves(), float(self.design.n.sum())
        logdet = moved_jet(add(replies, "logdet"), moves)
        return NormalSums(logdet, moved_jet(products, moves), n, reml, self.translation)

    def without_effects(self, reml: bool) -> FitProtocol[NormalSums]:
        """Request the sums without random effects, and take the units of effects and response from them.

        Derivatives of the log-determinant are then the products of the effects' columns.
        """
        zero = np.zeros(self.effects.K)
        null = yield from self.evaluate(zero, reml)
        require_independent(null.products[0, :-1, :-1], self.design.names, terms=self.design.term_names)
        both = [1.0 + (a != b) for q in self.effects.sizes for a, b in lower_pairs(q)]
        moments = null.logdet[1 : 1 + self.effects.K] / both / self.weight
        self.effects = self.effects.uncorrelated(moments)
        # Around the least-squares fit, so that no digits are lost where fitted values are large.
        self.center = self.center + null.parts()[2].values[0, :, 0]
        return null

    @property
    def spreads(self) -> bool:
        """Whether rows of a group have a variance that is estimated."""
        return self.distribution.least_squares or has_dispersion(self.distribution)

    @property
    def translation(self) -> Floats:
        """Matrix from coefficients of standardized columns to those in the units of the data."""
        return translation(np.zeros_like(self.shift), np.ones_like(self.scale), self.shift, self.scale)

    def in_theta(self, theta: Floats, found: tuple[float, Floats, Floats]) -> tuple[float, Floats, Floats]:
        """Take derivatives in the covariances to those in the parameters."""
        value, gradient, hessian = found
        first, second = self.effects.chain(theta)
        return value, gradient @ first, first.T @ hessian @ first + np.tensordot(gradient, second, 1)

    def maximize(self, theta: Floats, reml: bool) -> FitProtocol[tuple[Floats, NormalSums, bool]]:
        """Minimize -2 log L from parameters; return those of the minimum, sums, and convergence."""
        sums = yield from self.evaluate(theta, reml)
        value, gradient, hessian = self.in_theta(theta, sums.deviance())
        test = ConvergenceTest(float(self.design.n.sum()), self.tol)
        while True:
            step, size = newton_step(gradient, hessian, 0.75 * (1.0 + float(np.linalg.norm(theta))))
            self.trace.append((value, size))
            converged = test.reached(-value / 2.0, size)
            if converged or len(self.trace) >= self.maxiter:
                return theta, sums, converged
            for halving in range(MOST_HALVINGS):
                trial = pack(self.effects.factors(theta + step * 0.5**halving))
                tried = yield from self.evaluate(trial, reml)
                found = self.in_theta(trial, tried.deviance())
                if descends(found[0], value, float(gradient @ step) * 0.5**halving):
                    break
            else:
                return theta, sums, size**2 <= rounding_error(value, test.n)
            theta, sums, (value, gradient, hessian) = trial, tried, found

    def normal(self, reml: bool) -> FitProtocol[MixedFit]:
        """Fit a linear mixed model."""
        yield from self.open()
        null = yield from self.without_effects(reml)
        theta, sums, converged = yield from self.maximize(self.effects.start(), reml)
        theta = without_rounding(theta)
        inverse, _, beta, squares = sums.parts()
        scale = float(squares.values[0, 0, 0]) / sums.df
        estimate, self.center = self.center + beta.values[0, :, 0], self.center + beta.values[0, :, 0]
        by_group = yield from self.compare_normal_groups(theta, scale, sums)
        return MixedFit(
            params=sums.units @ estimate,
            cov=scale * sums.units @ inverse.values[0] @ sums.units.T,
            scale=scale,
            deviance=sums.deviance()[0],
            theta=theta,
            covariance=scale * self.effects.covariance_in_units(theta),
            joint=None,
            sums=sums,
            null=null,
            weight=self.weight,
            mean=self.mean,
            effects=self.effects,
            groups=self.groups,
            design=self.design,
            distribution=self.distribution,
            nodes=self.nodes,
            trace=np.array(self.trace),
            converged=converged,
            masked=self.session.masked,
            by_group=by_group,
            shared=self.shared,
        )

    # -- other responses -------------------------------------------------------------------------

    def point(self, at: Floats) -> dict[str, Array]:
        """Return the parameters as arrays of a request.

        They are standardized coefficients, factors, and the logarithm of a dispersion that is estimated.
        """
        p, end = len(self.design.names), len(self.design.names) + self.effects.K
        dispersion = np.exp(at[end]) if len(at) > end else 1.0
        return {
            "beta": at[:p],
            "factor": at[p:end],
            "basis": np.concatenate([B.ravel() for B in self.effects.basis]),
            "dispersion": np.array(dispersion),
        }

    def score(self, at: Floats, curvature: bool) -> FitProtocol[MarginalSums | None]:
        """Request -2 log L with its derivatives in standardized coefficients and factors; None if refused."""
        arrays = self.point(at) | {"curvature": np.array(curvature)}
        replies = yield self.session.request_all("sum_scores", arrays)
        if int(add(replies, "spread")) < len(replies):
            return None
        hessian = 2.0 * add(replies, "information") if curvature else None
        return MarginalSums(-2.0 * float(add(replies, "llf")), -2.0 * add(replies, "score"), hessian)

    def minimize(self, at: Floats) -> FitProtocol[tuple[Floats, MarginalSums, Floats, bool]]:
        """Minimize -2 log L; the Hessian is renewed where steps with the last one do not shrink fast."""
        found = yield from self.score(at, True)
        if found is None or found.hessian is None:
            raise EstimationError(CONCENTRATED)
        hessian, fresh = found.hessian, True
        n, p = float(self.design.n.sum()), len(self.design.names)
        test, before = ConvergenceTest(n, self.tol), hessian
        recession = RecessionTest(n, hessian[:p, :p] / 2.0)
        while True:
            step, size = newton_step(found.gradient, hessian, 0.75 * (1.0 + float(np.linalg.norm(at))))
            slow = bool(self.trace) and size > 0.1 * self.trace[-1][1]
            if (slow or size <= self.tol) and not fresh:
                again = yield from self.score(at, True)
                assert again is not None and again.hessian is not None
                before, hessian, fresh = hessian, again.hessian, True
                continue
            if self.distribution.name == "NegativeBinomial" and at[-1] < np.log(LEAST_ALPHA):
                raise EstimationError(
                    "alpha goes to zero: within groups the counts vary no more than Poisson counts",
                    remedy=Remedy(
                        "from_formula(..., family=sm.families.Poisson()).fit()", "use family Poisson"
                    ),
                )
            self.trace.append((found.deviance, size))
            converged = test.reached(-found.deviance / 2.0, size, at_rest=fresh)
            away = recession.far(hessian[:p, :p] / 2.0, at[:p], step[:p], size, ended=converged)
            if away is not None:
                far = np.concatenate([at[:p] + away, at[p:]])
                beyond = yield from self.score(far, True)
                if (
                    beyond is not None
                    and beyond.hessian is not None
                    and recession.rises(-beyond.deviance / 2.0, -found.deviance / 2.0)
                ):
                    if recession.certain(beyond.hessian[:p, :p]):
                        raise self.separated(step[:p], before[:p, :p], hessian[:p, :p])
                    before, at, found, hessian, fresh = hessian, far, beyond, beyond.hessian, True
                    continue
            if converged or len(self.trace) >= self.maxiter:
                return at, found, hessian, converged
            for halving in range(MOST_HALVINGS):
                trial = at + step * 0.5**halving
                tried = yield from self.score(trial, False)
                gain = float(found.gradient @ step) * 0.5**halving
                if tried is not None and descends(tried.deviance, found.deviance, gain):
                    break
            else:
                raise EstimationError(CONCENTRATED)
            at, found, fresh = trial, tried, False

    def separated(self, step: Floats, before: Floats, now: Floats) -> EstimationError:
        """Make the error for a likelihood without a maximum, with the columns that separate the responses."""
        design, slopes = self.design, np.ones(len(step), dtype=bool)
        slopes[0] = not design.intercept
        culprits, complete, reference = receding(step, before, now, self.translation, slopes)
        listed = name_columns(culprits, reference and design.intercept, design.names, design.term_names)
        kind = "complete" if complete else "quasi-complete"
        return EstimationError(separation_text(kind, listed, len(self.trace)))

    def other(self) -> FitProtocol[MixedFit]:
        """Fit a generalized linear mixed model."""
        yield from self.open()
        p, K = len(self.design.names), self.effects.K
        null = yield from self.without_effects(False)
        dispersed = has_dispersion(self.distribution)
        alpha = self.distribution.alpha or 1.0
        start = np.concatenate([np.zeros(p), self.effects.start(), [np.log(alpha)] if dispersed else []])
        if self.design.intercept:
            highest = HIGHEST_SHARE if self.distribution.name == "Binomial" else np.inf
            start[0] = float(self.distribution.make().link(min(max(self.mean, LOWEST), highest)))
        at, found, hessian, converged = yield from self.minimize(start)
        theta = without_rounding(pack(self.effects.factors(at[p : p + K])))
        working = yield from self.evaluate(theta * np.sqrt(self.working_weight(at)), True)
        flat = bool(self.effects.singular(theta)) or np.linalg.eigvalsh(hessian)[0] <= 0.0
        # At the end of their range variances are taken as known.
        kept = [*range(p), *range(p + K, len(at))] if flat else [*range(len(at))]
        back = np.eye(len(kept))
        back[:p, :p] = self.translation
        inverse = np.asarray(2.0 * np.linalg.inv(hessian[np.ix_(kept, kept)]), dtype=np.float64)
        joint = back @ inverse @ back.T
        arrays = self.point(at) | {"center": self.center}
        own = np.asarray(np.linalg.inv(hessian[:p, :p] / 2.0), dtype=np.float64)
        by_group = yield from self.compare_groups(arrays, own, inverse[:p, :p])
        distribution, dispersion = self.distribution, None
        if dispersed:
            dispersion = np.exp(at[-1]) * np.array([1.0, np.sqrt(joint[-1, -1])])
            if distribution.alpha is not None:
                distribution = replace(distribution, alpha=float(dispersion[0]))
        return MixedFit(
            params=back[:p, :p] @ at[:p],
            cov=joint[:p, :p],
            scale=1.0 if dispersion is None or distribution.alpha is not None else float(dispersion[0]),
            deviance=found.deviance,
            theta=theta,
            covariance=self.effects.covariance_in_units(theta),
            joint=None if flat else joint,
            sums=None,
            null=null,
            weight=self.weight,
            mean=self.mean,
            effects=self.effects,
            groups=self.groups,
            design=self.design,
            distribution=distribution,
            nodes=self.nodes,
            trace=np.array(self.trace),
            converged=converged,
            masked=self.session.masked,
            dispersion=dispersion,
            working=working,
            by_group=by_group,
            shared=self.shared,
        )

    def compare_normal_groups(
        self, theta: Floats, scale: float, sums: NormalSums
    ) -> FitProtocol[GroupScoreSums]:
        """Request sums over the outermost groups of a linear model, with influences on its variances."""
        K, inverse = len(theta), sums.parts()[0].values[0]
        arrays = self.point(np.concatenate([np.zeros(len(inverse)), theta]))
        arrays |= {"center": self.center, "dispersion": np.array(scale), "restricted": np.array(sums.reml)}
        # Zeros are sent as well, so that what is sent does not depend on the estimate.
        arrays["variances"] = np.zeros((K + 1, K + 1))
        if not self.effects.singular(theta):
            _, slope, hessian = ValueAndDerivatives(sums.logdet).scalar()
            information = np.zeros((K + 1, K + 1))
            information[:K, :K], information[K, K] = -hessian / 2.0, sums.n / 2.0
            information[:K, K] = information[K, :K] = slope / 2.0
            moves = block_diag(self.effects.moves(), np.eye(1))
            variances = moves @ np.linalg.inv(information) @ moves.T
            arrays["variances"] = (variances + variances.T) / 2.0
        return (yield from self.compare_groups(arrays, inverse, inverse))

    def compare_groups(
        self, arrays: Mapping[str, Array], inverse: Floats, bread: Floats
    ) -> FitProtocol[GroupScoreSums]:
        """Request sums over the outermost groups at a point."""
        leverages = {"inverse": (inverse + inverse.T) / 2.0, "power": np.array(POWERS[CORRECTION])}
        point = {"restricted": np.array(False), **arrays, **leverages}
        replies = yield self.session.request_all("sum_groups", point)
        names = "tests", "meat", "concentration", "dispersion", "influences"
        found = {name: add(replies, name) for name in names}
        inside = int(add(replies, "inside")) == len(replies)
        return GroupScoreSums(inside=inside, inverse=leverages["inverse"], bread=bread, **found)

    def working_weight(self, at: Floats) -> float:
        """Return the weight of a row in the information at the mean of the response."""
        mean = float(self.mean)
        if self.distribution.name == "Binomial":
            return mean * (1.0 - mean)
        dispersion = float(np.exp(at[-1])) if has_dispersion(self.distribution) else 0.0
        if self.distribution.name == "Gamma":
            return 1.0 / dispersion
        return mean / (1.0 + dispersion * mean)


def descends(new: float, old: float, slope: float) -> bool:
    """Return whether a step gains a part of what its slope promises (Armijo), up to rounding.

    Without that, a step over a variance of zero may end at the same variance.
    """
    return new <= old + 1e-4 * slope + 1e-11 * (1.0 + abs(old))


def without_rounding(theta: Floats) -> Floats:
    """Return factors with zeros where the iteration stopped just next to zero."""
    return np.where(np.abs(theta) < SMALLEST, 0.0, theta)


def newton_step(gradient: Floats, hessian: Floats, longest: float) -> tuple[Floats, float]:
    """Return a step downhill, at most so long, and its length in standard errors.

    Negative curvature counts as positive. At a variance of zero the slope in its square root is zero; where
    the curvature is negative there, it is a saddle, which the step leaves.
    """
    if not len(gradient):
        return gradient, 0.0
    values, vectors = np.linalg.eigh(hessian)
    least = 1e-8 * max(float(np.abs(values).max()), 1e-8)
    slope = vectors.T @ gradient
    step = -slope / np.maximum(np.abs(values), least)
    saddle = (values < -least) & (np.abs(step) < SADDLE)
    step[saddle] = np.copysign(SADDLE, step[saddle])
    size = float(np.sqrt(np.abs(values * step) @ np.abs(step))) if saddle.any() else 0.0
    size = max(size, float(np.sqrt(abs(float(slope @ step)))))
    length = float(np.linalg.norm(step))
    return np.asarray(vectors @ step * min(1.0, longest / max(length, 1e-300))), size


def moved_jet(jet: Floats, moves: Floats) -> Floats:
    """Take a jet (J, ...) in parameters ``t = moves s`` to one in s."""
    K = len(moves)
    rows, columns = np.triu_indices(K)
    hessian = np.zeros((K, K, *jet.shape[1:]))
    hessian[rows, columns] = hessian[columns, rows] = jet[1 + K :]
    hessian = np.tensordot(moves, np.tensordot(moves, hessian, (0, 1)), (0, 1))
    return np.concatenate([jet[:1], np.tensordot(moves.T, jet[1 : 1 + K], 1), hessian[rows, columns]])


class MixedEffectSums(NamedTuple):
    """The average derivative of the mean, with its own ones in coefficients and factors, and sums of changes.

    Changes have `effects` (V,), `slopes` (V, p + K) and the `counts` (V,) of the rows of a level.
    """

    slope: float
    by_params: Floats
    by_theta: Floats
    effects: Floats
    slopes: Floats
    counts: Floats


def sum_slopes(
    session: RowsSession, fit: MixedFit, single: bool, requested: ChangesRequest
) -> FitProtocol[MixedEffectSums]:
    """Request the average derivative, if `single` effects of columns need it, and sums of changes."""
    newton = MixedNewton(session, fit.effects.terms, fit.distribution, fit.nodes)
    yield from newton.reopen(fit)
    start = np.linalg.solve(newton.translation, fit.params)
    arrays = newton.point(np.concatenate([start, fit.theta, fit.log_dispersion]))
    n, p, K = float(fit.design.n.sum()), len(fit.params), fit.effects.K
    slope, by_params, by_theta = 1.0, np.zeros(p), np.zeros(K)
    if single:
        replies = yield session.request_all("sum_effects", arrays)
        slope, by_theta = float(add(replies, "first")) / n, add(replies, "third") / n
        by_params = np.asarray(np.linalg.solve(newton.translation.T, add(replies, "second")) / n)
    effects, slopes, counts = np.zeros(0), np.zeros((0, p + K)), np.zeros(0)
    if requested.changes:
        replies = yield session.request_all("sum_changes", arrays, to_json(requested))
        in_units = np.linalg.solve(newton.translation.T, add(replies, "slopes").T).T
        slopes = np.column_stack([in_units, add(replies, "factors")])
        effects, counts = add(replies, "effects"), level_counts(replies, requested)
    return MixedEffectSums(slope, by_params, by_theta, effects, slopes, counts)


def predict_sites(session: RowsSession, fit: MixedFit) -> FitProtocol[Floats]:
    """Request the predicted random effects of every site, with errors, (sites, 2, q)."""
    newton = MixedNewton(session, fit.effects.terms, fit.distribution, fit.nodes)
    yield from newton.reopen(fit)
    start = np.asarray(np.linalg.solve(newton.translation, fit.params), dtype=np.float64)
    if fit.sums is not None:
        newton.center, start = start, np.zeros_like(start)
    arrays = newton.point(np.concatenate([start, fit.theta, fit.log_dispersion]))
    replies = yield session.request_all("predict_site", arrays | {"center": newton.center})
    found = np.array([reply.arrays["effects"] for reply in replies])
    return np.asarray(found * [[1.0], [np.sqrt(fit.scale) if fit.sums is not None else 1.0]])
