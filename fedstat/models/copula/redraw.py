"""A release drawn anew: what the mechanism would have given on other rows of the same law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
import pandas as pd

from fedstat.kernels.copula import code_latents
from fedstat.models.copula.asked import PLACES
from fedstat.models.copula.inversion import Inversion, invert_products
from fedstat.models.copula.margins import Margin, tables_of
from fedstat.models.copula.protocol import CopulaFit
from fedstat.typing import Floats, Ints


def draw_latents(correlation: Floats, n: int, rng: np.random.Generator) -> Floats:
    """Draw latent normals of n rows, (n, p)."""
    Z: Floats = rng.standard_normal((n, len(correlation))) @ np.linalg.cholesky(correlation).T
    return Z


def draw_rows(
    margins: Sequence[Margin], correlation: Floats, n: int, rng: np.random.Generator
) -> pd.DataFrame:
    """Draw n rows of a copula."""
    Z = draw_latents(correlation, n, rng)
    return pd.DataFrame(
        {
            margin.bins.name: margin.quantile(np.ascontiguousarray(z))
            for margin, z in zip(margins, Z.T, strict=True)
        }
    )


def redraw(fit: CopulaFit, rng: np.random.Generator) -> tuple[list[Margin], Inversion]:
    """Draw as many rows as there were from a released copula, and release margins and copula of these.

    Where institutions lack entities, margins and products rest on as many rows as they did. The noise is
    normal, of the same variances: nothing here is of an entity.
    """
    Z = draw_latents(fit.inversion.correlation, fit.n, rng)
    thresholds, _, bins = tables_of(fit.margins)
    codes = code_latents(Z, thresholds, bins)
    places = fit.plan.places()
    margins = [
        margin for client, place in places.items() for margin in _margins(fit, client, codes[:, place], rng)
    ]
    products = _products(fit, margins, codes)
    noise = np.triu(fit.noise * rng.standard_normal(products.shape), 1)
    radii = [float(fit.plan.radius(client)) for client in places]
    return margins, invert_products(products + noise + noise.T, margins, list(places.values()), radii)


def _margins(fit: CopulaFit, client: str, codes: Ints, rng: np.random.Generator) -> list[Margin]:
    asked, n = fit.plan.margins_asked(client), fit.entities[client]
    out = []
    for one, column in zip(asked.bins, codes.T, strict=True):
        variance = asked.of_levels if one.levels else asked.of_trees
        counts = one.tally(column[:n]) + math.sqrt(variance) * rng.standard_normal(one.released)
        out.append(Margin.of_counts(one, counts, n))
    return out


def _products(fit: CopulaFit, margins: list[Margin], codes: Ints) -> Floats:
    """Mean products of cut scores, (p, p), of each pair of institutions over as many rows as it has."""
    places = fit.plan.places()
    scores = {
        client: np.ldexp(
            fit.plan.gram_asked(client, 1).score(margins[place], codes[:, place]).astype(np.float64), -PLACES
        )
        for client, place in places.items()
    }
    out = np.zeros_like(fit.products)
    for a, b in combinations_with_replacement(places, 2):
        n = int(fit.pairs[places[a].start, places[b].start])
        out[places[a], places[b]] = scores[a][:n].T @ scores[b][:n] / n
        out[places[b], places[a]] = out[places[a], places[b]].T
    return out
