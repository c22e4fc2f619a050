"""Parametric bootstrap of a mixture: drawn from released parameters, and so without any institution.

A sample needs one cluster for each entity at all institutions, which is no datum: labels are drawn by the
shares, and columns of every institution from what it has released. Of entities it is used which institutions
have them; cells that are missing at an institution that has the entity are drawn as if they were there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import logsumexp

from fedstat.errors import EstimationError, ModelError
from fedstat.models.m2sem.course.mixture import CHANGE, GAIN, soft
from fedstat.models.m2sem.modality.base import Modality
from fedstat.progress_line import open_line
from fedstat.typing import Array, Floats, Ints

LOCAL_STEPS, ROUNDS = 6, 60
COMBINATIONS = 60
"""Of covariates that are drawn."""
MOST_FAILED = 0.2
"""Share of the samples that may have no fit."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawable:
    """Modalities of a site as fitted, how to make one of drawn columns and covariates, and positions (n,).

    Its columns are adjusted for so many `covariates`.
    """

    fitted: Sequence[Modality]
    make: Sequence[Callable[[Array, Floats | None], Modality]]
    place: Ints
    covariates: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Refits of B samples: shares (B, K), profiles (B, K, sum of P C) by site; samples that had no fit."""

    shares: Floats
    profiles: Mapping[str, Floats]
    failed: int


def draw_refits(
    clients: Mapping[str, Drawable], shares: Floats, n: int, samples: int, rng: np.random.Generator
) -> Draws:
    """Draw samples of n entities, fit each from its own clusters, and name these as they were drawn.

    An EstimationError where too many samples have no fit.
    """
    found: list[tuple[Floats, dict[str, Floats]]] = []
    failed = 0
    with open_line("sample", samples) as line:
        while len(found) < samples:
            labels = rng.choice(len(shares), size=n, p=shares)
            try:
                found.append(refit(clients, labels, len(shares), rng))
                line.step()
            except ModelError:
                # A column that does not vary in a sample, or a level that nobody has.
                failed += 1
                if failed > MOST_FAILED * samples:
                    raise EstimationError(
                        f"bootstrap: {failed} of {failed + len(found)} samples have no fit, since a column "
                        "does not vary in them; leave out columns of which nearly all entities have the same "
                        "value"
                    ) from None
    return Draws(
        np.array([w for w, _ in found]),
        {client: np.array([p[client] for _, p in found]) for client in clients},
        failed,
    )


def refit(
    clients: Mapping[str, Drawable], labels: Ints, K: int, rng: np.random.Generator
) -> tuple[Floats, dict[str, Floats]]:
    """Draw columns of entities with labels (n,), and fit: shares (K,) and profiles by institution."""
    drawn = {client: redraw(one, labels[one.place], rng) for client, one in clients.items()}
    place = {client: one.place for client, one in clients.items()}
    r = ascend(drawn, place, soft(labels, K))
    order = as_drawn(r, labels)
    profiles = {
        client: np.hstack([np.nan_to_num(m.profile()).reshape(K, -1) for m in some])[order]
        for client, some in drawn.items()
    }
    return r.mean(axis=0)[order], profiles


def ascend(drawn: Mapping[str, Sequence[Modality]], place: Mapping[str, Ints], r: Floats) -> Floats:
    """Fit by EM from posteriors r (n, K), here, and return those at the end."""
    w, last = r.mean(axis=0), -np.inf
    for client, some in drawn.items():
        for m in some:
            m.begin_means(r[place[client]])
            m.log_densities()
    for _ in range(ROUNDS):
        f = np.tile(np.log(w), (len(r), 1))
        for client, some in drawn.items():
            for m in some:
                f[place[client]] += m.log_densities()
        total = logsumexp(f, axis=1)
        new = np.exp(f - total[:, None])
        gain, change = float(total.sum()) - last, float(np.abs(new - r).max())
        r, last = new, float(total.sum())
        if gain < GAIN and change < CHANGE:
            break
        w = np.maximum(r.mean(axis=0), 1e-12)
        for client, some in drawn.items():
            at = np.ascontiguousarray(r[place[client]])
            for m in some:
                for _ in range(LOCAL_STEPS):
                    m.improve(at)
    return r


def as_drawn(r: Floats, labels: Ints) -> Ints:
    """Order (K,) in which clusters of posteriors r (n, K) agree best with labels (n,)."""
    K = r.shape[1]
    together = np.array([r[labels == k].sum(axis=0) for k in range(K)])
    return np.asarray(linear_sum_assignment(-together)[1])


def redraw(one: Drawable, labels: Ints, rng: np.random.Generator) -> list[Modality]:
    """Draw the columns of an institution's modalities, on which their support may be fitted again."""
    out, z = [], None
    if one.covariates:
        # Few different ones: rows of categorical columns are counted for each.
        pool = rng.standard_normal((COMBINATIONS, one.covariates))
        z = pool[rng.integers(COMBINATIONS, size=len(labels))]
        z = (z - z.mean(axis=0)) / z.std(axis=0)
    for fitted, make in zip(one.fitted, one.make, strict=True):
        m = make(fitted.draw(labels, rng, z), z)
        m.support = fitted.row_norms() > 0.0
        m.silent = not fitted.means.any()
        m.begin(fitted.clusters)
        out.append(m)
    return out
