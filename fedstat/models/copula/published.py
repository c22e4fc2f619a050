"""Simulation of the published synthesis by randomized comparisons: VCDS, EVCDS and IEVCDS.

Columns of all sites are in one process and the noise comes from numpy's generator: nothing is private here.
The simulation shows the results of the mechanism and the budget that a whole record really spends.
Comparisons of the values of two entities are flipped with probability 1 / (1 + e^a), a = epsilon / 2; their
debiased sums are perturbed ranks. Margins are noisy counts of levels or Bernstein polynomials of a noisy
distribution function, of columns scaled to [0, 1] by their own smallest and largest value, with epsilon / 2
each.

* VCDS draws rows of the normal copula: for blocks that are missing completely at random.
* EVCDS draws latent normals of every entity with the correlation of the copula and the order of its perturbed
  ranks. The first column is sorted. Every other one is drawn from its normal distribution given the columns
  before, truncated to the latent normals of the entities next in rank (2.8); an entity without a value is not
  truncated. The margin at the k-th smallest value is Phi of the k-th smallest latent normal of the observed
  entities (2.5), (2.6), which corrects for blocks that are missing at random. The table has latent normals
  drawn again, through the inverse margins.
* IEVCDS fills missing values by the inverse margins of the latent normals, compares the completed columns of
  all entities again, and repeats EVCDS with the correlation of these.

Where the publication leaves a step open, a choice was made that serves the purpose of the step. Ties are
decided by a fair coin. Draws of a column begin with sorted draws from the normal distribution given the
columns before, and :data:`SWEEPS` sweeps of truncated draws follow; a start without the columns before
corrects no bias. Latent normals have the order of the observed entities only, also after completion. A table
has one row per entity. Left out are Kendall's correlation, for which Spearman's is used, the smoothing spline
before the polynomial, and budgets that differ by site.

References
----------
Tang, H., Feng, L., Li, Y. and Wang, F. (2025). Data privatization in vertical federated learning with
client-wise missing problem. arXiv 2511.20876.
Alda, F. and Rubinstein, B. (2017). The Bernstein mechanism: function release under differential privacy.
AAAI. arXiv 1606.06926.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype
from scipy.optimize import isotonic_regression
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom, rankdata

from fedstat.errors import ModelError, Remedy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import Report
from fedstat.inference.tables import Sheet
from fedstat.kernels.copula import nearest_correlation, project_simplex
from fedstat.privacy.gaussian_dp import record_epsilon
from fedstat.typing import Floats

Method: TypeAlias = Literal["vcds", "evcds", "ievcds"]
METHODS: tuple[Method, ...] = ("vcds", "evcds", "ievcds")
ROUNDS = 10
"""Rounds of IEVCDS."""
Quantiles: TypeAlias = Callable[[Floats], Floats]
LEVELS = 12
"""Largest number of distinct values of a column for which counts are used instead of a polynomial."""
DEGREE, ITERATED = 16, 2
"""Degree of the Bernstein polynomial."""
GRID = 801
SWEEPS = 5
"""Sweeps of truncated draws of a column, each over every second entity and then over the others."""
NOTES = Catalogue(
    critical={
        "not_private": "{cost}",
    },
)


@dataclass(frozen=True, slots=True)
class PublishedSynthesis(Report):
    """A table of the published mechanism, and its cost: a simulation; nothing is private.

    Attributes
    ----------
    table : DataFrame
        One row per entity and all columns. For EVCDS and IEVCDS rows have the order of the entities: row i
        comes from the perturbed ranks of entity i.
    correlation : DataFrame
        Correlation of the normal scores.
    method : str
    epsilon : float
        The published epsilon: for one comparison and one margin together.
    delta : float
    record_epsilon : Series
        By site: epsilon of one of its records at this delta, for all comparisons with it and the margins of
        its columns. The smallest and largest values that scale the columns are released without noise, and
        have no epsilon.

    Examples
    --------
    >>> import warnings
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", fs.errors.DisclosureWarning)
    ...     published = fs.CopulaSynthesizer(partition, 1.0, mechanism="published").fit("vcds", seed=1)
    >>> published.table.shape, "record" in published.summary().as_text()
    ((300, 8), True)
    """

    table: pd.DataFrame
    correlation: pd.DataFrame
    method: str
    epsilon: float
    delta: float
    record_epsilon: pd.Series[float]

    def tidy(self) -> pd.DataFrame:
        """Epsilon of one record by site: ``site``, ``epsilon``."""
        return self.record_epsilon.rename("epsilon").rename_axis("site").reset_index()

    def _glance(self) -> dict[str, float | str]:
        return {
            "method": self.method,
            "nobs": len(self.table),
            "n_sites": len(self.record_epsilon),
            "epsilon": self.epsilon,
            "delta": self.delta,
        }

    def _sheets(self) -> Iterator[Sheet]:
        rows = tuple((str(site), f"{epsilon:,.4g}") for site, epsilon in self.record_epsilon.items())
        title = f"{self.method.upper()}: a published synthesis, simulated"
        yield Sheet(("site", "epsilon of a record"), rows, "lr", (24, 20), title, gap=2)

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("not_private", cost=self._cost)

    @property
    def _cost(self) -> str:
        worst = str(self.record_epsilon.idxmax())
        order = "" if self.method == "vcds" else " Rows keep the order of the real entities."
        return (
            f"{self.method.upper()}, a simulation: nothing is private here. The published budget of "
            f"{self.epsilon:g} counts one comparison of two records. A whole record at '{worst}' spends "
            f"epsilon {self.record_epsilon[worst]:,.0f} (delta {self.delta:g}), and smallest and largest "
            f"values are released without noise.{order}"
        )


def table_of(partition: ClientPartition, columns: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Join the columns of all sites, (n, d); values are missing if a site lacks an entity."""
    frames = partition.frames
    if len(frames) < len(partition.sites):
        raise ModelError(
            "mechanism='published' is a simulation: it needs the rows of all sites in one process, but "
            "these sites run in processes of their own"
        )
    parts = []
    for site, names in columns.items():
        part = frames[site][list(names)].set_axis(partition.entities[partition.rows[site]])
        words = [name for name in names if not (is_numeric_dtype(part[name]) or is_bool_dtype(part[name]))]
        if words:
            raise ModelError(
                f"column '{words[0]}' at '{site}' is of type {part[words[0]].dtype}: "
                "mechanism='published' compares numbers. Code its levels",
                remedy=Remedy(
                    "CopulaSynthesizer(..., columns={names}).fit(...)", ", or leave it out by {arguments}"
                ).filled(names=[one for own in columns.values() for one in own if one not in words]),
            )
        parts.append(part.astype(np.float64))
    return pd.concat(parts, axis=1).reindex(partition.entities)


def synthesize(
    table: pd.DataFrame,
    sites: Mapping[str, Sequence[str]],
    entities: Mapping[str, int],
    epsilon: float,
    delta: float,
    method: Method,
    rounds: int,
    rng: np.random.Generator,
) -> PublishedSynthesis:
    """Simulate the mechanism on a table (n, d) of columns of `sites`, with their numbers of `entities`."""
    X, half = table.to_numpy(), 0.5 * epsilon
    repeats = rounds if method == "ievcds" else 1
    ranks = uniform_ranks(X, half, rng)
    R = correlation_of(ranks)
    if method == "vcds":
        scores = rng.standard_normal(X.shape) @ np.linalg.cholesky(R).T
        orders: list[Floats | None] = [None] * X.shape[1]
    else:
        latents = draw_in_order(ranks, R, rng)
        for _ in range(repeats - 1):
            ranks = uniform_ranks(complete(X, latents), half, rng)
            R, ranks = correlation_of(ranks), np.where(np.isnan(X), np.nan, ranks)
            latents = draw_in_order(ranks, R, rng)
        orders = [ndtr(np.sort(z[~np.isnan(x)])) for x, z in zip(X.T, latents.T, strict=True)]
        scores = draw_in_order(ranks, R, rng)
    made = {
        name: margin(X[:, j][~np.isnan(X[:, j])], half, rng, orders[j])(ndtr(scores[:, j]))
        for j, name in enumerate(table.columns)
    }
    spent = {}
    for site, names in sites.items():
        answers = repeats * (entities[site] - 1) * len(names)
        spent[site] = record_epsilon(answers, half, delta) + len(names) * half
    return PublishedSynthesis(
        pd.DataFrame(made, index=table.index),
        pd.DataFrame(R, table.columns, table.columns),
        method,
        epsilon,
        delta,
        pd.Series(spent, name="record epsilon"),
    )


def perturbed_ranks(x: Floats, answer_epsilon: float, rng: np.random.Generator) -> Floats:
    """Debiased sums (n,) of the flipped comparisons of each value with all others, from 0 to n - 1.

    The sums of two entities are drawn separately, though they share one flip.
    """
    kept, n = float(expit(answer_epsilon)), len(x)
    below = rankdata(x, "min").astype(int) - 1
    tied = rankdata(x, "max").astype(int) - 1 - below
    said = rng.binomial(below, kept) + rng.binomial(tied, 0.5)
    said += rng.binomial(n - 1 - below - tied, 1.0 - kept)
    return np.asarray((said - (n - 1) * (1.0 - kept)) / (2.0 * kept - 1.0))


def uniform_ranks(X: Floats, answer_epsilon: float, rng: np.random.Generator) -> Floats:
    """Perturbed ranks (n, d) of every column among the observed values, on a scale of 0 to 1."""
    U = np.full(X.shape, np.nan)
    for j, seen in enumerate(~np.isnan(X).T):
        U[seen, j] = (perturbed_ranks(X[seen, j], answer_epsilon, rng) + 0.5) / seen.sum()
    return U


def correlation_of(U: Floats) -> Floats:
    """Correlation (d, d) of normal scores from perturbed ranks, over entities with both columns observed.

    This is Spearman's correlation with the variance that ranks without noise have: noise on the ranks of two
    columns is independent, and only increases their variances.
    """
    seen = ~np.isnan(U)
    centered = np.where(seen, U - 0.5, 0.0)
    together = np.maximum(seen.T.astype(float) @ seen, 1.0)
    spearman = np.clip(12.0 * (centered.T @ centered) / together, -1.0, 1.0)
    np.fill_diagonal(spearman, 1.0)
    return nearest_correlation(2.0 * np.sin(np.pi / 6.0 * spearman))


def draw_in_order(ranks: Floats, R: Floats, rng: np.random.Generator) -> Floats:
    """Draw latent normals (n, d) with correlation R (d, d) and the order of ranks (n, d), nan for none."""
    out = np.empty(ranks.shape)
    for j, rank in enumerate(ranks.T):
        slope = np.linalg.solve(R[:j, :j], R[:j, j])
        middle, spread = out[:, :j] @ slope, math.sqrt(max(1.0 - float(R[:j, j] @ slope), 1e-12))
        z = middle + spread * rng.standard_normal(len(rank))
        seen = np.flatnonzero(~np.isnan(rank))
        order = seen[np.argsort(rank[seen], kind="stable")]
        z[order] = np.sort(z[order])
        for start in [0, 1] * (SWEEPS if j else 0):
            # Neighbors of every second entity do not move.
            here, held = order[start::2], z[order]
            low = np.concatenate([[-np.inf], held[:-1]])[start::2]
            high = np.concatenate([held[1:], [np.inf]])[start::2]
            ends = (low - middle[here]) / spread, (high - middle[here]) / spread
            z[here] = middle[here] + spread * draw_truncated(*ends, rng)
        out[:, j] = z
    return out


def draw_truncated(low: Floats, high: Floats, rng: np.random.Generator) -> Floats:
    """Draw standard normals between two ends, (n,)."""
    # Probabilities of a lower tail have all digits.
    flip = low > 0.0
    a, b = np.where(flip, -high, low), np.where(flip, -low, high)
    below, above = ndtr(a), ndtr(b)
    z = np.clip(ndtri(below + (above - below) * rng.random(len(low))), a, b)
    return np.where(flip, -z, z)


def complete(X: Floats, latents: Floats) -> Floats:
    """Fill missing values (n, d) by the inverse margins at latent normals of all entities, (n, d)."""
    filled = X.copy()
    for j, gone in enumerate(np.isnan(X).T):
        if gone.any():
            F, u = ndtr(np.sort(latents[~gone, j])), ndtr(latents[gone, j])
            known = np.sort(X[~gone, j])
            at = np.minimum(np.searchsorted(F, u), len(known) - 1)
            few = len(np.unique(known)) <= LEVELS
            filled[gone, j] = known[at] if few else np.interp(u, F, known)
    return filled


def margin(
    x: Floats, epsilon: float, rng: np.random.Generator, distribution: Floats | None = None
) -> Quantiles:
    """Quantile function of one column, with Laplace noise: levels by counts, others by a polynomial.

    `distribution` (n,) is the distribution function at the sorted values, by default that of the values.
    """
    levels, counts = np.unique(x, return_counts=True)
    F = np.arange(1.0, len(x) + 1.0) / len(x) if distribution is None else distribution
    if len(levels) <= LEVELS:
        # Half of the way to the first value of the next level, or all of the rest.
        ends = np.cumsum(counts)
        inner = 0.5 * (F[ends[:-1] - 1] + F[ends[:-1]]) if distribution is not None else F[ends[:-1] - 1]
        counts = np.diff(np.concatenate([[0.0], inner, [1.0]])) * len(x)
        noisy = counts + rng.laplace(scale=2.0 / epsilon, size=len(levels))
        below = np.cumsum(project_simplex(noisy, float(len(x)))) / len(x)
        return lambda u: levels[np.minimum(np.searchsorted(below, u), len(levels) - 1)]
    low, high = float(levels[0]), float(levels[-1])
    at = np.linspace(0.0, 1.0, DEGREE + 1)
    place = np.searchsorted(np.sort((x - low) / (high - low)), at, side="right")
    share = np.concatenate([[0.0], F])[place]
    share += rng.laplace(scale=(DEGREE + 1) / (len(x) * epsilon), size=DEGREE + 1)
    basis = binom.pmf(np.arange(DEGREE + 1), DEGREE, at[:, None])
    iterated, power = np.zeros_like(basis), np.eye(DEGREE + 1)
    for _ in range(ITERATED):
        iterated, power = iterated + power, power @ (np.eye(DEGREE + 1) - basis)
    fine = np.linspace(0.0, 1.0, GRID)
    F = binom.pmf(np.arange(DEGREE + 1), DEGREE, fine[:, None]) @ (iterated @ share)
    increasing = np.clip(isotonic_regression(F).x, 0.0, 1.0) + 1e-9 * np.arange(GRID)
    return lambda u: low + (high - low) * np.interp(u, increasing, fine)
