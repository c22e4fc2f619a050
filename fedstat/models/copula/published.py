"""Simulation of the published synthesis by randomized comparisons: VCDS, EVCDS and IEVCDS.

Columns of all sites are in one process and the noise comes from numpy's generator: nothing is private here.
The simulation shows the results of the mechanism and the budget that a whole record really spends.
Comparisons of the values of two entities are flipped with probability 1 / (1 + e^a), a = epsilon / 2; their
debiased sums are perturbed ranks. Margins are noisy counts of levels or Bernstein polynomials of a noisy
distribution function, of columns scaled to [0, 1] by their own smallest and largest value, with epsilon / 2
each.

* VCDS draws rows of the normal copula: for blocks that are missing completely at random.
* EVCDS keeps every entity's perturbed ranks as the scores of its row, and draws missing scores given them.
* IEVCDS repeats EVCDS on the tables that it completed, with new comparisons of all entities in every round.

Where the publication leaves a step open, a choice was made that serves the purpose of the step: ties are
decided by a fair coin, and a completed value comes from the current margin of its column.

References
----------
Tang, H., Feng, L., Li, Y. and Wang, F. (2025). Data privatization in vertical federated learning with
client-wise missing problem. arXiv 2511.20876.
Alda, F. and Rubinstein, B. (2017). The Bernstein mechanism: function release under differential privacy.
AAAI. arXiv 1606.06926.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype
from scipy.optimize import isotonic_regression
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom, rankdata

from fedstat.errors import ModelError
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.summary import Note, Report
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
        yield Note("not_private", self._cost, "critical")

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
                "mechanism='published' compares numbers. Code its levels, or leave it out by columns="
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
    if method == "vcds":
        R = correlation_of(uniform_ranks(X, half, rng))
        scores = draw_missing(np.full(X.shape, np.nan), R, rng)
    else:
        scores, R, X = complete(X, half, repeats, rng)
    made = {
        name: margin(X[:, j][~np.isnan(X[:, j])], half, rng)(ndtr(scores[:, j]))
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


def complete(
    X: Floats, answer_epsilon: float, rounds: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Scores (n, d) of all entities, their correlation, and values with missing ones drawn.

    The first round compares observed values, every later one the tables that the previous one completed.
    """
    missing, filled = np.isnan(X), X
    for _ in range(rounds):
        U = uniform_ranks(filled, answer_epsilon, rng)
        R = correlation_of(U)
        # Ranked again, so that scores have a uniform distribution with any noise.
        ranks = np.where(np.isnan(U), np.nan, rankdata(U, axis=0, nan_policy="omit"))
        scores = ndtri((ranks - 0.5) / (~np.isnan(U)).sum(axis=0))
        scores = draw_missing(np.where(missing, np.nan, scores), R, rng)
        filled = X.copy()
        for j in np.flatnonzero(missing.any(axis=0)):
            here = missing[:, j]
            filled[here, j] = np.quantile(X[~here, j], ndtr(scores[here, j]), method="inverted_cdf")
    return scores, R, filled


def draw_missing(scores: Floats, R: Floats, rng: np.random.Generator) -> Floats:
    """Draw missing normal scores of rows (n, d) given the observed ones."""
    missing, out = np.isnan(scores), scores.copy()
    patterns, code = np.unique(missing, axis=0, return_inverse=True)
    for g, gone in enumerate(patterns):
        if not gone.any():
            continue
        rows, held = np.flatnonzero(code.ravel() == g), ~gone
        slope = np.linalg.solve(R[np.ix_(held, held)], R[np.ix_(held, gone)])
        left = R[np.ix_(gone, gone)] - R[np.ix_(gone, held)] @ slope
        noise = rng.standard_normal((len(rows), int(gone.sum()))) @ np.linalg.cholesky(left).T
        out[np.ix_(rows, gone)] = scores[np.ix_(rows, held)] @ slope + noise
    return out


def margin(x: Floats, epsilon: float, rng: np.random.Generator) -> Quantiles:
    """Quantile function of one column, with Laplace noise: levels by counts, others by a polynomial."""
    levels, counts = np.unique(x, return_counts=True)
    if len(levels) <= LEVELS:
        noisy = counts + rng.laplace(scale=2.0 / epsilon, size=len(levels))
        below = np.cumsum(project_simplex(noisy, float(len(x)))) / len(x)
        return lambda u: levels[np.minimum(np.searchsorted(below, u), len(levels) - 1)]
    low, high = float(levels[0]), float(levels[-1])
    at = np.linspace(0.0, 1.0, DEGREE + 1)
    share = np.searchsorted(np.sort((x - low) / (high - low)), at, side="right") / len(x)
    share += rng.laplace(scale=(DEGREE + 1) / (len(x) * epsilon), size=DEGREE + 1)
    basis = binom.pmf(np.arange(DEGREE + 1), DEGREE, at[:, None])
    iterated, power = np.zeros_like(basis), np.eye(DEGREE + 1)
    for _ in range(ITERATED):
        iterated, power = iterated + power, power @ (np.eye(DEGREE + 1) - basis)
    fine = np.linspace(0.0, 1.0, GRID)
    F = binom.pmf(np.arange(DEGREE + 1), DEGREE, fine[:, None]) @ (iterated @ share)
    increasing = np.clip(isotonic_regression(F).x, 0.0, 1.0) + 1e-9 * np.arange(GRID)
    return lambda u: low + (high - low) * np.interp(u, increasing, fine)
