"""Simulation of the published synthesis by randomized comparisons: VCDS, EVCDS and IEVCDS.

Columns of all institutions are in one place and the noise is that of numpy's generator: nothing is private
here. It shows what the mechanism gives, and the budget of a whole record that it really spends. Comparisons
of the values of two entities are flipped with probability 1 / (1 + e^a), a = epsilon / 2, and their debiased
sums are perturbed ranks; margins are noisy counts of levels or Bernstein polynomials of a noisy distribution
function, of columns brought to [0, 1] by their own smallest and largest value, with epsilon / 2 each.

* VCDS draws rows of the normal copula: for blocks that are missing completely at random.
* EVCDS keeps every entity's perturbed ranks as the scores of its row, and draws what is missing given them.
* IEVCDS repeats EVCDS on the tables that it completed, with new comparisons of all entities in every round.

Where the publication leaves a step open it is read so that the step serves its purpose: ties answer by a
fair coin, a completed value comes from the margin of the completed column as it is.

References
----------
Tang, H., Feng, L., Li, Y. and Wang, F. (2025). Data privatization in vertical federated learning with
client-wise missing problem. arXiv 2511.20876.
Alda, F. and Rubinstein, B. (2017). The Bernstein mechanism: function release under differential privacy.
AAAI. arXiv 1606.06926.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from fedstat.kernels.copula import nearest_correlation, project_simplex
from fedstat.privacy.gaussian_dp import record_epsilon
from fedstat.typing import Floats

Method: TypeAlias = Literal["vcds", "evcds", "ievcds"]
METHODS: tuple[Method, ...] = ("vcds", "evcds", "ievcds")
ROUNDS = 10
"""Of IEVCDS."""
Quantiles: TypeAlias = Callable[[Floats], Floats]
LEVELS = 12
"""Distinct values up to which a column has counts, and no polynomial."""
DEGREE, ITERATED = 16, 2
"""Of the Bernstein polynomial."""
GRID = 801


@dataclass(frozen=True, slots=True)
class PublishedSynthesis:
    """A table that the published mechanism makes, and what it costs: a simulation; nothing is private.

    Attributes
    ----------
    table : DataFrame
        One row per entity and all columns. Of EVCDS and IEVCDS its rows have the order of the entities: row
        i is made of the perturbed ranks of entity i.
    correlation : DataFrame
        Of the normal scores.
    method : str
    epsilon : float
        As published: of one comparison and one margin together.
    delta : float
    record_epsilon : Series
        By institution, of one record of it at this delta: of all comparisons that it takes part in, and of
        the margins of its columns. The smallest and largest values that columns are scaled with are released
        without noise, and have no epsilon.

    Examples
    --------
    >>> import warnings
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", fs.errors.DisclosureWarning)
    ...     published = fs.CopulaSynthesizer(partition, 1.0, mechanism="published").fit("vcds", seed=1)
    >>> published.table.shape, "record" in published.summary()
    ((300, 8), True)
    """

    table: pd.DataFrame
    correlation: pd.DataFrame
    method: str
    epsilon: float
    delta: float
    record_epsilon: pd.Series[float]

    def summary(self) -> str:
        """State what the table costs, in words."""
        worst = str(self.record_epsilon.idxmax())
        order = "" if self.method == "vcds" else " Rows keep the order of real persons."
        return (
            f"{self.method.upper()}, a simulation: nothing is private here. The published budget of "
            f"{self.epsilon:g} counts one comparison of two records. A whole record at '{worst}' spends "
            f"epsilon {self.record_epsilon[worst]:,.0f} (delta {self.delta:g}), and smallest and largest "
            f"values leave as they are.{order}"
        )


def table_of(partition: ClientPartition, columns: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Put the columns of all sites beside each other, (n, d), missing where a site lacks an entity."""
    frames = partition.frames
    if len(frames) < len(partition.clients):
        raise ModelError(
            "mechanism='published' is a simulation: it needs the rows of all institutions in one place, and "
            "these are in processes of their own"
        )
    parts = []
    for client, names in columns.items():
        part = frames[client][list(names)].set_axis(partition.entities[partition.rows[client]])
        words = [name for name in names if not (is_numeric_dtype(part[name]) or is_bool_dtype(part[name]))]
        if words:
            raise ModelError(
                f"column '{words[0]}' at '{client}' is of type {part[words[0]].dtype}: mechanism='published' "
                "compares numbers. Code its levels, or leave it out by columns="
            )
        parts.append(part.astype(np.float64))
    return pd.concat(parts, axis=1).reindex(partition.entities)


def synthesise(
    table: pd.DataFrame,
    clients: Mapping[str, Sequence[str]],
    entities: Mapping[str, int],
    epsilon: float,
    delta: float,
    method: Method,
    rounds: int,
    rng: np.random.Generator,
) -> PublishedSynthesis:
    """Simulate the mechanism on a table (n, d) of columns of `clients`, who have so many `entities`."""
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
    for client, names in clients.items():
        answers = repeats * (entities[client] - 1) * len(names)
        spent[client] = record_epsilon(answers, half, delta) + len(names) * half
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

    The sums of two entities are drawn apart, though they share one flip.
    """
    kept, n = float(expit(answer_epsilon)), len(x)
    below = rankdata(x, "min").astype(int) - 1
    tied = rankdata(x, "max").astype(int) - 1 - below
    said = rng.binomial(below, kept) + rng.binomial(tied, 0.5)
    said += rng.binomial(n - 1 - below - tied, 1.0 - kept)
    return np.asarray((said - (n - 1) * (1.0 - kept)) / (2.0 * kept - 1.0))


def uniform_ranks(X: Floats, answer_epsilon: float, rng: np.random.Generator) -> Floats:
    """Perturbed ranks (n, d) of every column among the values that are seen, on a scale of 0 to 1."""
    U = np.full(X.shape, np.nan)
    for j, seen in enumerate(~np.isnan(X).T):
        U[seen, j] = (perturbed_ranks(X[seen, j], answer_epsilon, rng) + 0.5) / seen.sum()
    return U


def correlation_of(U: Floats) -> Floats:
    """Correlation (d, d) of normal scores from perturbed ranks, over the entities that both columns see.

    By Spearman's correlation with the variance that ranks without noise have: noise on ranks of two columns
    is independent, and adds to their variances only.
    """
    seen = ~np.isnan(U)
    centred = np.where(seen, U - 0.5, 0.0)
    together = np.maximum(seen.T.astype(float) @ seen, 1.0)
    spearman = np.clip(12.0 * (centred.T @ centred) / together, -1.0, 1.0)
    np.fill_diagonal(spearman, 1.0)
    return nearest_correlation(2.0 * np.sin(np.pi / 6.0 * spearman))


def complete(
    X: Floats, answer_epsilon: float, rounds: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Scores (n, d) of all entities, their correlation, and values with what is missing drawn.

    The first round compares what is seen, every later one the tables that the former completed.
    """
    missing, filled = np.isnan(X), X
    for _ in range(rounds):
        U = uniform_ranks(filled, answer_epsilon, rng)
        R = correlation_of(U)
        # Ranked again, so that scores are those of a uniform distribution whatever the noise.
        ranks = np.where(np.isnan(U), np.nan, rankdata(U, axis=0, nan_policy="omit"))
        scores = ndtri((ranks - 0.5) / (~np.isnan(U)).sum(axis=0))
        scores = draw_missing(np.where(missing, np.nan, scores), R, rng)
        filled = X.copy()
        for j in np.flatnonzero(missing.any(axis=0)):
            here = missing[:, j]
            filled[here, j] = np.quantile(X[~here, j], ndtr(scores[here, j]), method="inverted_cdf")
    return scores, R, filled


def draw_missing(scores: Floats, R: Floats, rng: np.random.Generator) -> Floats:
    """Draw what is missing of rows of normal scores (n, d) given what is seen of them."""
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
