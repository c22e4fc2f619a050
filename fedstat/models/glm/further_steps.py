"""Steps of a site at a fit's solution: sums for marginal effects, and of scores weighted by leverage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.glm.effects import EffectSums, effect_sums, leveraged_meat, leverages, row_effects
from fedstat.kernels.glm.rows import Rows, linear_predictor
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.glm.steps import BETA, COLUMNS, SiteModel, model_of, sums_at
from fedstat.models.horizontal.rows import INSIDE, means_are_flat, summed, weighted_by
from fedstat.typing import Array, Floats

EXCESS = 1e-8
"""How much larger than one rounding may make the share of a site's own information in that of all."""


@dataclass(frozen=True, slots=True)
class EffectVectors:
    """Mean and its derivatives by row, as vectors that columns are summed with."""

    log: bool
    constant: float

    def __call__(self, rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
        """Return those at points (p, R) side by side, times the rows' counts: (m, 3 R)."""
        found = [row_effects(rows, one, distribution, self.log, self.constant) for one in beta.T]
        vectors = np.column_stack(found)
        return vectors if rows.freq is None else vectors * rows.freq[:, None]


@dataclass(frozen=True, slots=True)
class LeverageVectors:
    """What a leverage multiplies a row's score by, squared; `inverse` are the bytes of (p, p)."""

    inverse: bytes
    power: int

    def __call__(self, rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
        """Return those at points (p, R): (m, R)."""
        p = len(beta)
        inverse = np.frombuffer(self.inverse).reshape(p, p)
        h = [leverages(rows, one, distribution, inverse) for one in beta.T]
        return np.column_stack([np.maximum(1.0 - one, EXCESS) ** -self.power for one in h])


def sum_effects(
    data: SiteData,
    state: State,
    points: Floats,
    constants: Floats,
    log: Array,
    products: Array,
    shift: Floats,
    scale: Floats,
) -> dict[str, Array]:
    """Sum means and their derivatives by the linear predictor over the rows, at each of some points.

    `points` (m, p) are coefficients of the columns standardised by `shift` and `scale` (p,), `constants` (m,)
    what is added to the linear predictor; `log`: of the logarithm of the mean; `products`: of products of
    columns. Released are ``level`` (m,), ``first`` (m, p + 1) and ``second`` (q, p + 1), of the first point
    only: see :class:`~fedstat.kernels.glm.effects.EffectSums`. A row of frequency weight f counts as f, one
    of several trials once. ``inside``: whether all means lie inside the family's domain.
    """
    model = model_of(state)
    T = model.translation(data.name, None, shift, scale)
    if points.ndim != 2 or not len(points) or points.shape[1] != model.p:
        raise MessageError(f"{data.name}: array 'points' must have a column for each of {model.p}")
    check_lengths(data.name, constants=(constants, len(points)))
    found = [
        _effects_at(state, model, T @ point, float(constant), bool(log), bool(products))
        for point, constant in zip(points, constants, strict=True)
    ]
    inside = all(sums.inside for sums in found)
    Z = np.eye(model.p + 1)
    Z[1:, 1:] = T
    left = Z if products else np.eye(1)
    level = np.array([sums.level for sums in found])
    first = np.array([Z.T @ sums.first for sums in found])
    second = left.T @ found[0].second @ Z
    return {
        "inside": np.array(inside),
        "level": level if inside else np.zeros_like(level),
        "first": first if inside else np.zeros_like(first),
        "second": second if inside else np.zeros_like(second),
    }


def _effects_at(
    state: State, model: SiteModel, beta: Floats, constant: float, log: bool, products: bool
) -> EffectSums:
    """Sum at coefficients of the site's own columns, which the door judges first."""
    view = EffectVectors(log, constant)
    flat = None
    if model.distribution.name == "Binomial":

        def flat() -> bool:
            moved = [_moved(rows, constant) for rows in model.chunks()]
            return means_are_flat(moved, beta, model.distribution, float(total.first[0]))

    q = model.p + 1 if products else 1
    total = EffectSums(0.0, np.zeros(model.p + 1), np.zeros((q, model.p + 1)))
    for rows in (piece for chunk in model.chunks() for piece in chunk.pieces()):
        eta = linear_predictor(rows, beta) + constant
        count = np.ones(len(rows)) if rows.freq is None else rows.freq
        new = effect_sums(rows.X, eta, count, model.distribution, log, products)
        total = EffectSums(
            total.level + new.level,
            total.first + new.first,
            total.second + new.second,
            total.inside and new.inside,
        )
    state.tell(*weighted_by(model.opened, model.chunks, model.n, beta, model.distribution, view, flat))
    return total


def _moved(rows: Rows, constant: float) -> Rows:
    """Add a constant to the known part of the linear predictor."""
    known = np.zeros(len(rows)) if rows.offset is None else rows.offset
    return replace(rows, offset=known + constant)


def sum_leveraged(
    data: SiteData, state: State, beta: Floats, shift: Floats, scale: Floats, inverse: Floats, power: Array
) -> dict[str, Array]:
    """Sum outer products of the rows' scores, each over a power of one less its leverage.

    `beta`, `shift`, `scale` (p,) are as for ``sum_scores``, `inverse` (p, p) the inverse information of all
    sites' rows at them: one of which this site's rows are no part is an error, since leverages by it could be
    made to single out a row. Released is ``meat`` (p, p); ``inside`` is whether all leverages are below one,
    else the sum is zero.
    """
    model = model_of(state)
    T = model.translation(data.name, beta, shift, scale)
    own, p = T @ beta, model.p
    if inverse.shape != (p, p) or int(power) not in (1, 2):
        raise MessageError(f"{data.name}: expected 'inverse' of shape ({p}, {p}) and 'power' 1 or 2")
    information = sums_at(state, model, own).information
    translated = T @ (inverse + inverse.T) @ T.T / 2.0
    values, vectors = np.linalg.eigh(information)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    share = np.linalg.eigvalsh(root.T @ translated @ root)
    if not (np.isfinite(share).all() and share[0] >= -EXCESS and share[-1] <= 1.0 + EXCESS):
        raise MessageError(
            f"{data.name}: array 'inverse' is not that of an information of which this site's is a part"
        )
    view = LeverageVectors(np.ascontiguousarray(translated).tobytes(), int(power))
    state.tell(*weighted_by(model.opened, model.chunks, model.n, own, model.distribution, view))
    meat = leveraged_meat(model.chunks(), own, model.distribution, translated, int(power))
    inside = meat is not None
    return {"inside": np.array(inside), "meat": np.zeros((p, p)) if meat is None else T.T @ meat @ T}


STEPS: Mapping[str, Step] = {
    "sum_effects": Step(
        sum_effects,
        {
            "points": Declared("aggregate", "coefficients of the standardised columns", 2, common=True),
            "constants": Declared("aggregate", "what is added to the linear predictor", common=True),
            "log": Declared("control", "whether of the logarithm of the mean", 0, common=True),
            "products": Declared("control", "whether of products of columns", 0, common=True),
            **COLUMNS,
        },
        {
            "inside": INSIDE,
            "level": summed("sums of the mean"),
            "first": summed("sums of its first derivative times columns", 2),
            "second": summed("sums of its second derivative times columns", 2),
        },
    ),
    "sum_leveraged": Step(
        sum_leveraged,
        {
            "beta": Declared("aggregate", BETA, common=True),
            **COLUMNS,
            "inverse": Declared("aggregate", "inverse information of all sites' rows", 2, common=True),
            "power": Declared("control", "power of one less a leverage", 0, common=True),
        },
        {
            "inside": Declared("control", "whether all leverages are below one", 0, maskable=True),
            "meat": summed("sum of outer products of rows' scores by leverage", 2),
        },
    ),
}
ORDER: Mapping[str, str] = {"sum_effects": "start", "sum_leveraged": "judge"}
