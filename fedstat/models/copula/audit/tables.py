"""Who was in, guessed from a synthetic table alone: a demonstration."""

from __future__ import annotations

import math

import numpy as np

from fedstat.models.copula.audit.pair import WorstPair
from fedstat.models.copula.audit.releases import Seen
from fedstat.models.copula.inversion import invert_products


def agreement(pair: WorstPair, seen: Seen, random: np.random.Generator) -> float:
    """Draw a table of a release, and compare how it agrees with the two records, in standard errors.

    The mean number of columns in which a synthetic row has the bin of the first record, less that of the
    second.
    """
    noise = pair.sums.noise
    margins = [margin for client in noise.columns for margin in seen.margins[client]]
    radii = [float(noise.radius(client)) for client in noise.columns]
    blocks = list(noise.places().values())
    found = invert_products(seen.sums.products[0] / pair.n, margins, blocks, radii, standardise=False)
    Z = random.standard_normal((pair.n, len(margins))) @ np.linalg.cholesky(found.correlation).T
    codes = np.column_stack(
        [
            np.searchsorted(margin.thresholds[1:-1], z, side="right")
            for margin, z in zip(margins, Z.T, strict=True)
        ]
    )
    first, second = ((codes == record).sum(axis=1) for record in pair.records)
    return float((first - second).mean()) * math.sqrt(pair.n)
