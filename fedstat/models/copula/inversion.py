"""From a noisy Gram matrix of cut scores to the correlation matrix of the copula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.kernels.copula import code_latents, nearest_correlation, score_codes
from fedstat.kernels.hermite import latent_correlations
from fedstat.models.copula.margins import Margin, tables_of
from fedstat.typing import Floats

FEWEST_DRAWS, MOST_DRAWS, NUMBERS = 2**14, 2**17, 2**20
"""Rows of the simulation by which the cut of long rows is undone: so many numbers, within bounds."""
ROUNDS = 25
SETTLED = 2e-4
"""Change of a correlation at which these rounds end."""
SEED = 1


@dataclass(frozen=True, slots=True, eq=False)
class Inversion:
    """Correlation matrix (p, p), nearest to the one that each pair gives by itself, and how far they are.

    `moved` (p,) is the root mean square by which the correlations of each column were moved to be of one
    matrix.
    """

    correlation: Floats
    moved: Floats


def invert_products(
    products: Floats,
    margins: Sequence[Margin],
    blocks: Sequence[slice],
    squared_radii: Sequence[float],
    *,
    standardise: bool = False,
) -> Inversion:
    """Find the copula whose expected products of cut scores are the given ones.

    Parameters
    ----------
    products : (p, p) symmetric
        Mean products of scores; its diagonal is not read.
    margins : sequence of Margin, (p,)
    blocks, squared_radii
        Columns of each institution, and the squared length to which its part of a row is cut.
    standardise : bool
        Take the correlations of the scores, and let the margins say how large their variances are: for
        covariances with means and variances of their own.

    Notes
    -----
    Pair by pair through Mehler's formula, as if no row had been cut; then what the cut does to rows drawn
    from the copula found is taken off the products, and they are inverted anew.
    """
    p = len(margins)
    upper = np.triu_indices(p, 1)
    coefficients = np.array([margin.coefficients for margin in margins])
    thresholds, scores, bins = tables_of(margins)
    n = int(np.clip(NUMBERS // p, FEWEST_DRAWS, MOST_DRAWS))
    draws = np.random.default_rng(SEED).standard_normal((n, p))

    def solve(expected: Floats) -> Floats:
        found = np.eye(p)
        r = latent_correlations(expected[upper], coefficients[upper[0]], coefficients[upper[1]])
        found[upper], found.T[upper] = r, r
        return found

    deviations = np.sqrt([margin.variance for margin in margins])

    def in_units(found: Floats) -> Floats:
        own = np.sqrt(np.maximum(np.diag(found), 1e-12))
        scaled: Floats = found * np.outer(deviations / own, deviations / own)
        return scaled if standardise else found

    products = in_units(products)
    pairs = solve(products)
    correlation = nearest_correlation(pairs)
    for _ in range(ROUNDS):
        codes = code_latents(draws @ np.linalg.cholesky(correlation).T, thresholds, bins)
        full = score_codes(codes, scores)
        cut = np.hstack(
            [_cut(full[:, block], radius) for block, radius in zip(blocks, squared_radii, strict=True)]
        )
        pairs = solve(products - in_units(cut.T @ cut / n) + in_units(full.T @ full / n))
        earlier, correlation = correlation, nearest_correlation(pairs)
        if np.abs(correlation - earlier).max() < SETTLED:
            break
    moved = np.sqrt(((pairs - correlation) ** 2).sum(axis=0) / max(p - 1, 1))
    return Inversion(correlation, moved)


def _cut(rows: Floats, squared_radius: float) -> Floats:
    squares = np.einsum("ij,ij->i", rows, rows)
    factors: Floats = np.sqrt(np.minimum(1.0, squared_radius / np.maximum(squares, 1e-300)))
    return rows * factors[:, None]
