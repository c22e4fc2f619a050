"""What is released, as the estimator takes it; and the same of simulated rows, for errors by simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula_glm.moments.columns import ScoredDesign
from fedstat.models.copula_glm.moments.response import WEIGHTS, ScoredResponse
from fedstat.typing import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class ReleaseNoise:
    """Standard deviations of the noise: of the counts of each column and of the response, of mean products.

    `counts` (d,), `response` of the counts of the response, `products` (p + 1, p + 1) of means over n rows,
    the response last.
    """

    counts: Floats
    response: float
    products: Floats

    def scaled(self, share: float) -> ReleaseNoise:
        """Return the noise of another number of rows that is as large beside their sampling error.

        `share` is that number over n. Of counts it has to be `share` ** .5 as large, of means the inverse.
        """
        root = float(np.sqrt(share))
        return ReleaseNoise(self.counts * root, self.response * root, self.products / root)


@dataclass(frozen=True, slots=True, eq=False)
class MomentRelease:
    """Margins of the columns (d,), the response with its margin, mean products of scores (p + 1, p + 1).

    The response is last, its score divided by its weight.
    """

    margins: tuple[Margin, ...]
    response: ScoredResponse
    products: Floats


def release_rows(
    design: ScoredDesign,
    family: str,
    response: Bins,
    codes: Ints,
    y: Ints,
    noise: ReleaseNoise | None = None,
    rng: np.random.Generator | None = None,
) -> MomentRelease:
    """Release rows of codes (n, d) and the bins y (n,) of their responses, with simulated noise or none."""
    n = len(codes)

    def margin(bins: Bins, code: Ints, sd: float) -> Margin:
        counts = bins.tally(code).astype(np.float64)
        return Margin.of_counts(
            bins, counts if rng is None else counts + sd * rng.standard_normal(len(counts)), n
        )

    sds = np.zeros(len(design.bins)) if noise is None else noise.counts
    margins = tuple(margin(b, code, sd) for b, code, sd in zip(design.bins, codes.T, sds, strict=True))
    scored = ScoredResponse(family, margin(response, y, 0.0 if noise is None else noise.response))
    V = np.column_stack([design.score(codes, design.tables(margins)), WEIGHTS[family] * scored.table[y]])
    G = V.T @ V / n
    if noise is not None and rng is not None:
        G = np.triu(G, 1) + np.triu(rng.standard_normal(G.shape) * noise.products, 1)
        G = G + G.T
    return MomentRelease(margins, scored, unweighted(G, family))


def unweighted(G: Floats, family: str) -> Floats:
    """Divide the products with the response, which is last, by its weight."""
    weight = np.ones(len(G))
    weight[-1] = WEIGHTS[family]
    return G / np.outer(weight, weight)
