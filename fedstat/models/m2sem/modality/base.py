"""A block of columns at one site, measured on factors that depend on the cluster.

Given its cluster k, a row has factors eta ~ N(mu_k, I) of Q dimensions. The posteriors of the clusters come
from outside; the rest of an EM step is local.

Latent class analysis is the case without variance of the factors: eta = mu_k, at fixed corners of a simplex
in Q = K - 1 dimensions. Columns are then independent given the cluster, and loadings give each column its own
location in every cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from scipy.linalg import helmert

from fedstat.errors import ModelError
from fedstat.kernels.latent_factors import Nodes, normal_nodes
from fedstat.kernels.penalized.group_prox import shrink_means
from fedstat.typing import Array, Bools, Floats, Ints

BEGINNING = 25
"""EM steps of the local factor analysis that gives the starting values."""


def corners(clusters: int) -> Floats:
    """Return the corners of a regular simplex around zero, (K, max(K - 1, 1)), with second moments I."""
    if clusters == 1:
        return np.zeros((1, 1))
    return np.asarray(helmert(clusters).T * clusters**0.5)


class Modality(ABC):
    """Columns of one kind, their factors, and the factor means of the clusters.

    `names` (P,) are those of the columns, `means` (K, Q) the factors' means by cluster; `support` (P,) are
    the columns whose loadings may differ from zero, and a `silent` modality has means of zero:
    :meth:`improve` keeps both. Z (n, q) are known covariates after a column of ones. `classes` states that
    factors have no variance, and fixed means: without factors, this is latent class analysis.
    """

    kind: ClassVar[str]
    leaps: ClassVar[bool] = False
    """Whether EM steps are many and cheap, so that extrapolation is worthwhile."""

    names: tuple[str, ...]
    n: int
    P: int
    Q: int
    means: Floats
    support: Bools
    silent: bool
    Z: Floats

    def __init__(self, names: Sequence[str], n: int, factors: int, covariates: Floats | None) -> None:
        if factors > len(names):
            raise ModelError(
                f"expected at least as many columns as factors; received {len(names)} {self.kind} column(s) "
                f"({', '.join(names)}) and {factors} factors: take fewer factors, or join modalities"
            )
        self.names = tuple(names)
        self.n, self.P, self.Q = n, len(names), max(factors, 1)
        self.classes = factors == 0
        self.means = np.zeros((1, self.Q))
        self.support = np.ones(len(names), dtype=np.bool_)
        self.silent = False
        self.Z = np.ones((n, 1)) if covariates is None else np.column_stack([np.ones(n), covariates])

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return len(self.means)

    @property
    def units(self) -> Floats:
        """Means and deviations by which columns were standardized locally; none for categories."""
        return np.empty(0)

    @property
    def at_floor(self) -> tuple[str, ...]:
        """Columns whose errors have the smallest variance that is allowed."""
        return ()

    # ---- specific to a kind of columns --------------------------------------------------------------

    @property
    @abstractmethod
    def loadings(self) -> Floats:
        """Loadings (R, Q); a nominal column has a row for each level except the first."""

    @property
    @abstractmethod
    def row_columns(self) -> Ints:
        """The column, from 0 to P - 1, of each row of the loadings: (R,)."""

    @abstractmethod
    def log_densities(self) -> Floats:
        """Return log f(x_i | k), (n, K), at the present parameters, and keep what :meth:`improve` needs."""

    def expected(self, r: Floats) -> float:
        """Return the sum of r log f(x_i | k)."""
        return float((r * self.log_densities()).sum())

    @abstractmethod
    def factors_by_cluster(self) -> Floats:
        """Return E[eta | x_i, k], (n, K, Q)."""

    @abstractmethod
    def begin(self, clusters: int) -> None:
        """Start from a factor analysis of one cluster, with this many means of zero."""

    @abstractmethod
    def _reset(self) -> None:
        """Start from the same distribution in every cluster, with loadings of zero on Q factors."""

    @abstractmethod
    def _standardized(self) -> Floats:
        """Return standardized columns or indicators of levels, zero where missing, less covariates."""

    @abstractmethod
    def state(self) -> Floats:
        """Return all parameters as one array, of a length that K, Q and the columns fix."""

    @abstractmethod
    def restore(self, state: Floats) -> None:
        """Set parameters as :meth:`state` returned them, for any number of clusters."""

    @abstractmethod
    def profile(self) -> Floats:
        """Return the columns' means by cluster, (K, P), or the probabilities of their levels, (K, P, C).

        At covariates of zero; in units of the columns.
        """

    @abstractmethod
    def improve(
        self, r: Floats, row_penalties: Floats | float = 0.0, means_penalty: float = 0.0, steps: int = 1
    ) -> None:
        """Take this many local EM steps for posteriors r (n, K), whose rows may have any weight.

        The sum of r log f(x_i | k) minus :meth:`penalty` does not decrease.
        """

    @property
    @abstractmethod
    def free(self) -> Bools:
        """Return which parameters of :meth:`state` were estimated, (p,), not fixed at zero or a floor."""

    @abstractmethod
    def scores_by_cluster(self, r: Floats) -> tuple[Floats, Floats]:
        """Return a_ik = E[complete score | x_i, k], (n, K, p), and the modality's own information (p, p).

        In the parameters of :meth:`state`. The information for posteriors r (n, K) is that of complete rows
        minus the covariance of scores given a row and its cluster. For one mixture, the observed information
        of parameters of modalities m and l is then I(m = l) own - sum_ik r_ik (a_mik - a_mi)(a_lik - a_li)',
        with a_mi = sum_k r_ik a_mik (Louis 1982).
        """

    @abstractmethod
    def profile_slopes(self) -> Floats:
        """Return derivatives of the flat profile in the parameters of :meth:`state`, (K P [C], p)."""

    @abstractmethod
    def draw(self, labels: Ints, rng: np.random.Generator, covariates: Floats | None = None) -> Array:
        """Draw columns (n, P) of rows in clusters (n,), in original units, at covariates (n, q), or zero."""

    @abstractmethod
    def _effects(self) -> tuple[Ints, Floats]:
        """Return :meth:`effect_places`, with rows as those of the loadings."""

    def draw_factors(self, labels: Ints, rng: np.random.Generator) -> Floats:
        """Draw factors (n, Q) of rows in clusters (n,)."""
        if self.classes:
            return self.means[labels]
        return np.asarray(self.means[labels] + rng.standard_normal((len(labels), self.Q)))

    @abstractmethod
    def _shift(self, c: Floats) -> None:
        """Change the means of all clusters by -c, (Q,), and the intercepts so that no density changes."""

    @abstractmethod
    def _information(self) -> Floats:
        """Return a row's information on the factors, (Q, Q): the curvature of its log density in them."""

    @abstractmethod
    def _free_intercepts(self) -> int:
        """Count intercepts, slopes of covariates, thresholds and variances."""

    # ---- common to all kinds ------------------------------------------------------------------------

    def locate(self, clusters: int) -> None:
        """Set the fixed means of this many latent classes, on which no column depends yet."""
        self.Q, self.means = max(clusters - 1, 1), corners(clusters)
        self._reset()

    def _nodes(self, T: int) -> Nodes:
        """Return T nodes of each factor's deviation from its mean; one at zero if it has no variance."""
        return Nodes(np.zeros((1, self.Q)), np.zeros(1)) if self.classes else normal_nodes(T, self.Q)

    def effect_places(self) -> tuple[Ints, Floats]:
        """Return indices in :meth:`state` of slopes of covariates, (R, q), and factors to their units, (R,).

        Column by column; a nominal column has a row for each occurring level except the first.
        """
        places, units = self._effects()
        order = np.argsort(self.row_columns, kind="stable")
        return places[order], units[order]

    def effects(self) -> Floats:
        """Return effects of covariates on columns in their units, or on logits of higher levels: (R, q)."""
        places, units = self.effect_places()
        return np.asarray(self.state()[places] * units[:, None])

    def _improve_means(self, N: Floats, m: Floats, penalty: float) -> None:
        """Set the means for clusters of weights N (K,) and mean factors m (K, Q), shrunk to zero."""
        if self.classes:
            return
        self.means = np.zeros_like(m) if self.silent else shrink_means(N, m, float(penalty))
        self._recenter()

    def _recenter(self) -> None:
        """Select the means with the least norm among all that give the same densities."""
        c = self.means.sum(axis=0) / len(self.means)
        self.means = self.means - c
        self._shift(c)

    def begin_means(self, r: Floats) -> None:
        """Set the clusters' means to the mean factor scores under posteriors r (n, K)."""
        if self.classes:
            self.locate(r.shape[1])
            self.improve(r)
            return
        scores = self.factor_scores(np.full((self.n, self.clusters), 1.0 / self.clusters))
        self.means = r.T @ scores / np.maximum(r.sum(axis=0), 1e-300)[:, None]
        if self.silent:
            self.means = np.zeros_like(self.means)

    def factor_scores(self, r: Floats) -> Floats:
        """Return E[eta | x_i] under posteriors r (n, K): (n, Q)."""
        return np.asarray(np.einsum("nk,nkq->nq", r, self.factors_by_cluster()))

    def starting_scores(self) -> Floats:
        """Return numbers whose k-means is a start: factor scores of one cluster, or standardized columns."""
        if self.classes:
            return self._standardized()
        self.log_densities()
        return self.factor_scores(np.ones((self.n, 1)))

    def row_norms(self) -> Floats:
        """Return the norm of every column's loadings, (P,)."""
        squares = np.einsum("rq,rq->r", self.loadings, self.loadings)
        return np.sqrt(np.bincount(self.row_columns, weights=squares, minlength=self.P))

    def penalty(self, row_penalties: Floats | float, means_penalty: float) -> float:
        """Return sum_p lam_p |l_p| + lam |U|."""
        if not means_penalty and not np.any(row_penalties):
            return 0.0
        return float(np.sum(row_penalties * self.row_norms()) + means_penalty * np.linalg.norm(self.means))

    def separation(self, w: Floats) -> float:
        """Return the squared distance of clusters with shares w (K,) in the observed columns: D_m^2.

        Sum_k w_k c_k' J (J + I)^-1 c_k with centered means c and the information J of a row. It does not
        depend on the scale of the factors, so a modality with loadings near zero separates nothing. For
        latent classes it is sum_k w_k c_k' J c_k: factors have no variance.
        """
        J = self._information()
        c = self.means - w @ self.means
        shrunk = J if self.classes else J @ np.linalg.inv(J + np.eye(self.Q))
        return float(w @ np.einsum("kq,qt,kt->k", c, shrunk, c))

    def free_parameters(self) -> int:
        """Count the free parameters: loadings up to rotation, and means of clusters that are not fixed."""
        loaded = self.row_norms() > 0.0
        rows = int(loaded[self.row_columns].sum())
        if self.classes:
            return self._free_intercepts() + rows * self.Q
        q = min(rows, self.Q)
        means = q * (self.clusters - 1) if np.any(self.means) else 0
        return self._free_intercepts() + rows * self.Q - q * (q - 1) // 2 + means
