"""Wild bootstrap with sites as clusters, from scores and information of the sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import numpy as np

from fedstat.errors import EstimationError
from fedstat.inference.tables import number
from fedstat.typing import Floats

POINTS = {
    "rademacher": np.array([-1.0, 1.0]),
    "webb": np.sqrt([0.5, 1.0, 1.5])[[2, 1, 0, 0, 1, 2]] * np.array([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]),
}
"""Values of equal probability: six of Webb (2023), so that few clusters have more than 2^G draws."""

TIE = 1e-9
"""Relative difference within which two statistics are equal but for rounding."""

DOUBLINGS, HALVINGS = 30, 60


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WildBootstrap:
    """Wild cluster bootstrap of a hypothesis, with sites as clusters.

    Attributes
    ----------
    hypothesis : str
    method : str
        In words.
    weights : str
        Distribution of the draws.
    statistic : float
        Statistic of the data: t for one restriction, Wald's statistic over the number of several.
    pvalue : float
        Share of the draws whose statistic is as large or larger, in absolute value.
    conf_int : (float, float) or None
        Values of the tested combination that are not rejected at 5 %, with the same draws; infinite where
        none is rejected. None where each value would need a fit of its own, or several restrictions are
        tested.
    boot_statistics : (reps,) array
    draws : (reps, sites) array
        Multipliers of each site's residuals, or scores.
    enumerated : bool
        Whether the draws are all possible ones, since these are no more than requested.

    Examples
    --------
    >>> import fedstat as fs
    >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedOLS.from_formula("num ~ age + sex", hospitals).fit()
    >>> found = fit.wild_cluster_bootstrap("sex = 0", weights="webb", seed=1)
    >>> found.boot_statistics.shape, bool(found.conf_int[0] < fit.params["sex"] < found.conf_int[1])
    ((999,), True)
    """

    hypothesis: str
    method: str
    weights: str
    statistic: float
    pvalue: float
    conf_int: tuple[float, float] | None
    boot_statistics: Annotated[Floats, "reps"]
    draws: Annotated[Floats, "reps K"]
    enumerated: bool

    def __repr__(self) -> str:
        reps, K = self.draws.shape
        drawn = f"all {reps:,} draws" if self.enumerated else f"{reps:,} draws"
        lines = [
            f"{self.hypothesis}: {self.method}, {K} sites as clusters, {drawn} ({self.weights})",
            f"statistic {number(self.statistic)}, p = {self.pvalue:.4g}",
        ]
        if self.conf_int is not None:
            lines.append(f"95 % interval {number(self.conf_int[0])} to {number(self.conf_int[1])}")
        if self.enumerated:
            lines.append(
                f"No p-value can be below {2.0 / reps if self.weights == 'rademacher' else 1.0 / reps:.3g}."
            )
        return "\n".join(lines)


def draw_weights(kind: str, K: int, reps: int, seed: int | np.random.Generator | None) -> tuple[Floats, bool]:
    """Weights (reps, K) by draw and site; all that there are, and True, where they are at most `reps`."""
    points = POINTS[kind]
    if K * np.log(len(points)) <= np.log(reps) + 1e-12:
        return np.array(list(product(points, repeat=K))), True
    return np.random.default_rng(seed).choice(points, size=(reps, K)), False


@dataclass(frozen=True, slots=True, eq=False)
class SiteParts:
    """Scores (K, p) and informations (K, p, p) of the sites at coefficients beta (p,), and a hypothesis.

    The hypothesis is ``R beta = q``, R (m, p), q (m,); `factor` that of the clustered covariance.
    """

    beta: Floats
    score: Floats
    information: Floats
    R: Floats
    q: Floats
    factor: float

    @property
    def bread(self) -> Floats:
        """Inverse of the information of all sites."""
        return np.asarray(np.linalg.inv(self.information.sum(axis=0)))

    def restricted(self, q: Floats) -> tuple[Floats, Floats]:
        """Coefficients of linear models under ``R beta = q``, and the sites' scores at these."""
        A = self.bread
        move = A @ self.R.T @ np.linalg.solve(self.R @ A @ self.R.T, self.R @ self.beta - q)
        return self.beta - move, self.score + self.information @ move

    def refitted(self, q: Floats, draws: Floats) -> Floats:
        """Statistics of linear models refitted to responses drawn under the hypothesis, (B,).

        Restricted residuals of every site are multiplied by its weight (Cameron, Gelbach and Miller 2008,
        WCR); sums over sites are all that the refit needs (Roodman et al. 2019, section 5).
        """
        A, (_, score) = self.bread, self.restricted(q)
        moved = draws @ (score @ A)
        parts = draws[:, :, None] * (score @ A @ self.R.T)
        parts = parts - np.einsum("mp,kpq,bq->bkm", self.R @ A, self.information, moved, optimize=True)
        return studentized(moved @ self.R.T, parts, self.factor)

    def rescored(self, draws: Floats) -> Floats:
        """Statistics of the sites' scores, multiplied by weights, (B,): Kline and Santos (2012).

        `score` are those at the restricted fit; ``R A sum_k w_k s_k`` is set against the sites' parts of it
        about their mean.
        """
        parts = draws[:, :, None] * (self.score @ self.bread @ self.R.T)
        total = parts.sum(axis=1)
        return studentized(total, parts - total[:, None, :] / draws.shape[1], self.factor)


def studentized(total: Floats, parts: Floats, factor: float) -> Floats:
    """T of one total (B, 1), Wald's statistic over m of several (B, m), by the sites' parts (B, K, m)."""
    V = factor * np.einsum("bkm,bkn->bmn", parts, parts)
    m = total.shape[1]
    with np.errstate(all="ignore"):
        if m == 1:
            return np.asarray(np.nan_to_num(total[:, 0] / np.sqrt(V[:, 0, 0]), nan=0.0))
        solved = np.linalg.solve(V, total[:, :, None])[:, :, 0]
        return np.asarray((total * solved).sum(axis=1) / m)


def with_own(own: float, drawn: Floats, draws: Floats) -> Floats:
    """Put the data's own statistic where all sites have one weight: there it is, but for its sign."""
    return np.where(np.ptp(draws, axis=1) == 0.0, np.copysign(own, drawn), drawn)


def share_beyond(statistic: float, drawn: Floats) -> float:
    """Share of draws as large as a statistic, ties included."""
    return float(np.mean(np.abs(drawn) >= abs(statistic) * (1.0 - TIE)))


def require_clusters(K: int, m: int) -> None:
    """Require more sites than restrictions; an EstimationError names the numbers."""
    if m >= K:
        raise EstimationError(
            f"wild_cluster_bootstrap: {K} sites are too few clusters for {m} restriction(s); there must be "
            "more sites than restrictions"
        )


def invert(pvalue: Callable[[float], float], estimate: float, se: float, level: float) -> tuple[float, float]:
    """Find the ends of the values about an estimate whose p-value is at least `level`."""

    def end(sign: float) -> float:
        inside, step = estimate, se
        for _ in range(DOUBLINGS):
            outside = inside + sign * step
            if pvalue(outside) < level:
                break
            inside, step = outside, 2.0 * step
        else:
            return sign * np.inf
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2.0
            inside, outside = (middle, outside) if pvalue(middle) >= level else (inside, middle)
        return float(inside)

    return end(-1.0), end(1.0)
