"""Steps of a site at the solution: sums for marginal effects and leverage-corrected variances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.site_rows import CompleteRows
from fedstat.federation.disclosure.facts import SummedProducts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, control
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.effects import (
    ChangeSums,
    EffectSums,
    all_inside,
    change_sums,
    changes_between,
    effect_sums,
    firth_residuals,
    leverages,
    mean_derivatives,
    outer_products,
)
from fedstat.kernels.glm.sums import Rows, linear_predictor, row_weights
from fedstat.models.glm.steps import BETA, COLUMNS, FAMILY, SiteModel, model_of, sums_at
from fedstat.models.horizontal.clusters import EXCESS, own_inverse
from fedstat.models.horizontal.rows import (
    INSIDE,
    RowsAtPoints,
    RowVectors,
    glm_rows,
    means_are_flat,
    summed,
    weighted_by,
)
from fedstat.models.horizontal.variable_changes import sum_changes_of
from fedstat.models.margins import ChangesRequest, MeanJet, mean_jet
from fedstat.typing import Array, Floats


@dataclass(frozen=True, slots=True)
class EffectVectors:
    """Derivatives of the mean by row, as vectors that columns are summed with."""

    log: bool
    constant: float

    def __call__(self, rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
        """Return both at points (p, R) side by side, times the rows' counts: (m, 2 R)."""
        etas = (linear_predictor(rows, one) + self.constant for one in beta.T)
        with np.errstate(all="ignore"):
            return by_rows(rows, [mean_derivatives(eta, distribution, self.log)[1:] for eta in etas])


@dataclass(frozen=True, slots=True)
class ChangeVectors:
    """What changes by row between two constants in the linear predictor."""

    log: bool
    low: float
    high: float

    def __call__(self, rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
        """Return the changes at points (p, R) side by side, times the rows' counts: (m, 3 R)."""
        etas = (linear_predictor(rows, one) for one in beta.T)
        with np.errstate(all="ignore"):
            return by_rows(
                rows,
                [changes_between(eta + self.low, eta + self.high, distribution, self.log) for eta in etas],
            )


def by_rows(rows: Rows, found: Sequence[tuple[Floats, ...]]) -> Floats:
    """Join vectors, times the rows' counts; a value that is not finite becomes zero, and reveals nothing."""
    vectors = np.nan_to_num(
        np.column_stack([one for several in found for one in several]), posinf=0, neginf=0
    )
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


@dataclass(frozen=True, slots=True)
class FirthVectors:
    """Leverages times one half less the mean, by row; `inverse` are the bytes of (p, p)."""

    inverse: bytes

    def __call__(self, rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
        """Return those at points (p, R), times the rows' counts: (m, R)."""
        p = len(beta)
        inverse = np.frombuffer(self.inverse).reshape(p, p)
        return by_rows(rows, [(firth_residuals(rows, one, distribution, inverse),) for one in beta.T])


@step(
    FAMILY,
    "start",
    takes={
        "beta": aggregate(BETA, common=True),
        "constant": aggregate("what is added to the linear predictor", 0, common=True),
        "changed": aggregate(f"{BETA}, one held", 2, optional=True, common=True),
        "ends": aggregate("what is added to them before and after", 2, optional=True, common=True),
        "log": control("whether of the logarithm of the mean", 0, common=True),
        "products": control("whether of products of columns", 0, common=True),
        **COLUMNS,
    },
    releases={
        "inside": INSIDE,
        "first": summed("sums of the mean's derivative times columns"),
        "second": summed("sums of its second derivative times columns", 2),
        "changes": summed("sums of its changes", optional=True),
        "slopes": summed("sums of its derivative's changes times columns", 2, optional=True),
        "high": summed("sums of its derivative after a change", optional=True),
    },
)
def sum_effects(
    data: SiteData,
    state: State,
    beta: Floats,
    constant: Array,
    log: Array,
    products: Array,
    shift: Floats,
    scale: Floats,
    changed: Floats | None = None,
    ends: Floats | None = None,
) -> dict[str, Array]:
    """Sum derivatives of the mean by the linear predictor over the rows, and changes of the mean.

    `beta` (p,) are coefficients of the columns standardized by `shift` and `scale` (p,); `constant` is added
    to the linear predictor; `log` requests sums of the logarithm of the mean, `products` those of products of
    columns. `changed` (c, p) are coefficients between whose `ends` (c, 2), constants, the mean changes. It
    releases ``first`` (q,) and ``second`` (q, p + 1), see :class:`~fedstat.kernels.glm.effects.EffectSums`,
    and ``changes`` (c,), ``slopes`` (c, p + 1), ``high`` (c,), see
    :class:`~fedstat.kernels.glm.effects.ChangeSums`. A row of frequency weight f counts as f, one of several
    trials once. ``inside`` is whether all means are inside the family's domain; otherwise all are zero.
    """
    model = model_of(state)
    own, T = model.place(shift, scale, beta)
    Z = np.eye(model.p + 1)
    Z[1:, 1:] = T
    left = Z if products else np.eye(1)
    base = _effects_at(state, model, own, float(constant), bool(log), bool(products))
    arrays = {"first": left.T @ base.first, "second": left.T @ base.second @ Z}
    inside = base.inside
    if changed is not None and ends is not None:
        if changed.ndim != 2 or changed.shape[1] != model.p or ends.shape != (len(changed), 2):
            raise MessageError(f"{data.name}: expected 'changed' (c, {model.p}) and 'ends' (c, 2)")
        found = [
            _changes_at(state, model, T @ one, float(low), float(high), bool(log))
            for one, (low, high) in zip(changed, ends, strict=True)
        ]
        inside = inside and all(sums.inside for sums in found)
        arrays["changes"] = np.array([sums.level for sums in found])
        arrays["slopes"] = np.array([Z.T @ sums.slope for sums in found])
        arrays["high"] = np.array([sums.high for sums in found])
    return _if_inside(inside, arrays)


def _if_inside(inside: bool, arrays: Mapping[str, Floats]) -> dict[str, Array]:
    """Say whether all means are inside the family's domain; sums are zero otherwise."""
    found = {name: array if inside else np.zeros_like(array) for name, array in arrays.items()}
    return found | {"inside": np.array(inside)}


@step(
    FAMILY,
    "start sum_effects",
    takes={
        "beta": aggregate(BETA, common=True),
        "constant": aggregate("what is added to the linear predictor", 0, common=True),
        "log": control("whether of the logarithm of the mean", 0, common=True),
        **COLUMNS,
    },
    releases={
        "inside": INSIDE,
        "effects": summed("sums of the mean's changes by each variable", 2),
        "slopes": summed("their derivatives by the coefficients", 4),
        "counts": summed("weights of the rows of a level", optional=True),
    },
    request=ChangesRequest,
    requests=control("variables that change", common=True),
)
def sum_changes(
    data: SiteData,
    state: State,
    request: ChangesRequest,
    beta: Floats,
    constant: Array,
    log: Array,
    shift: Floats,
    scale: Floats,
) -> dict[str, Array]:
    """Sum the changes of the mean by variables of the design, through all terms, over the rows.

    Coefficients and constant are as for ``sum_effects``. It releases ``effects`` (V, 1) and ``slopes`` (V, 1,
    1, p + 1) and ``counts`` (V,), see :class:`~fedstat.models.horizontal.variable_changes.ChangedSums`.
    """
    model = model_of(state)
    own, T = model.place(shift, scale, beta)
    means = LinkedMeans(model, own, float(constant), bool(log))
    flat = (
        partial(_is_cut, model, means.beta, means.constant) if model.distribution.name == "Binomial" else None
    )
    sums = sum_changes_of(state, model.opened, request, means.beta[None, :], means, flat)
    Z = np.eye(model.p + 1)
    Z[1:, 1:] = T
    found = {"effects": sums.effects, "slopes": sums.slopes @ Z}
    found |= sums.level_counts
    return _if_inside(means.inside and sums.finite, found)


@dataclass(slots=True, eq=False)
class LinkedMeans:
    """Means of rows, or their logarithms, at coefficients (p,) and a constant; `inside` if all exist."""

    model: SiteModel
    beta: Floats
    constant: float
    log: bool
    inside: bool = True
    groups: bool = False

    @property
    def point(self) -> tuple[Any, ...]:
        """What identifies the means."""
        own = np.append(self.beta, [self.constant, float(self.log)])
        return self.model.distribution, own.tobytes()

    def jet(self, rows: CompleteRows, X: Floats) -> MeanJet:
        """Return means with two derivatives."""
        eta, family = linear_predictor(glm_rows(rows, X), self.beta) + self.constant, self.model.distribution
        self.inside = self.inside and all_inside(eta, family)
        return mean_jet(eta, family, self.log)

    def count(self, rows: CompleteRows) -> Floats:
        """Return frequency weights."""
        return rows.weights.get("freq_weights", np.ones(len(rows.y)))

    def block(self, rows: CompleteRows, X: Floats) -> RowsAtPoints:
        """Return the rows as other sums have them."""
        return RowsAtPoints(glm_rows(rows, X), self.model.opened.question.intercept)


def _effects_at(
    state: State, model: SiteModel, beta: Floats, constant: float, log: bool, products: bool
) -> EffectSums:
    """Sum at coefficients of the site's own columns; the disclosure checks judge the sums before release."""
    q = model.p + 1 if products else 1
    total = EffectSums(np.zeros(q), np.zeros((q, model.p + 1)))
    for rows in model.pieces():
        eta = linear_predictor(rows, beta) + constant
        new = effect_sums(rows.X, eta, _counts(rows), model.distribution, log, products)
        total = EffectSums(total.first + new.first, total.second + new.second, total.inside and new.inside)
    _declare_vectors(state, model, beta, EffectVectors(log, constant), (constant,))
    return total


def _changes_at(
    state: State, model: SiteModel, beta: Floats, low: float, high: float, log: bool
) -> ChangeSums:
    """Sum changes at coefficients of the site's own columns, likewise."""
    total = ChangeSums(0.0, np.zeros(model.p + 1), 0.0)
    for rows in model.pieces():
        eta = linear_predictor(rows, beta)
        new = change_sums(rows.X, eta + low, eta + high, _counts(rows), model.distribution, log)
        total = ChangeSums(
            total.level + new.level,
            total.slope + new.slope,
            total.high + new.high,
            total.inside and new.inside,
        )
    _declare_vectors(state, model, beta, ChangeVectors(log, low, high), (low, high))
    return total


def _declare_vectors(
    state: State, model: SiteModel, beta: Floats, view: RowVectors, constants: Sequence[float]
) -> None:
    """Declare the vectors by which columns are summed; probabilities of zero or one make a cut of them."""
    flat = None
    if model.distribution.name == "Binomial":

        def flat() -> bool:
            return any(_is_cut(model, beta, constant) for constant in constants)

    def blocks() -> Iterator[Floats]:
        return (view(rows, beta[:, None], model.distribution) for rows in model.chunks())

    state.report(*weighted_by(model.opened, model.chunks, model.n, beta, model.distribution, view, flat))
    # Effects at many values of a column count the rows at every value of the others: each session adds
    # columns to the history of those that were released.
    names = ["effects"] * next(blocks()).shape[1]
    rows = np.flatnonzero(model.opened.used)
    state.report(SummedProducts(blocks, names, rows, multiplied=False))


def _is_cut(model: SiteModel, beta: Floats, constant: float) -> bool:
    moved = [
        replace(rows, offset=constant + (np.zeros(len(rows)) if rows.offset is None else rows.offset))
        for rows in model.chunks()
    ]
    weighs = sum(float(row_weights(rows, beta, model.distribution)[0].sum()) for rows in moved)
    return means_are_flat(moved, beta, model.distribution, weighs)


def _counts(rows: Rows) -> Floats:
    return np.ones(len(rows)) if rows.freq is None else rows.freq


@step(
    FAMILY,
    "judge",
    takes={
        "beta": aggregate(BETA, common=True),
        **COLUMNS,
        "inverse": aggregate("inverse information of all sites' rows", 2, common=True),
        "power": control("power of one less a leverage", 0, common=True),
    },
    releases={
        "inside": control("whether all leverages are below one", 0, maskable=True),
        "meat": summed("sum of outer products of rows' scores by leverage", 2),
    },
)
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
    if int(power) not in (1, 2):
        raise MessageError(f"{data.name}: expected 'power' 1 or 2")
    own, T = model.place(shift, scale, beta)
    translated = own_inverse(data.name, sums_at(state, model, own).information, T, inverse)
    view = LeverageVectors(np.ascontiguousarray(translated).tobytes(), int(power))
    state.report(*weighted_by(model.opened, model.chunks, model.n, own, model.distribution, view))
    state.report(*model.products_at(own))
    meat = outer_products(model.chunks(), own, model.distribution, translated, int(power))
    if meat is None:
        return {"inside": np.array(False), "meat": np.zeros_like(T)}
    return {"inside": np.array(True), "meat": T.T @ meat @ T}


@step(
    FAMILY,
    "sum_scores",
    takes={
        "beta": aggregate(BETA, common=True),
        **COLUMNS,
        "inverse": aggregate("inverse information of all sites' rows", 2, common=True),
    },
    releases={"penalty": summed("sums of columns times leverages and means")},
)
def sum_firth(
    data: SiteData, state: State, beta: Floats, shift: Floats, scale: Floats, inverse: Floats
) -> dict[str, Array]:
    """Sum the derivative of Firth's penalty, half the logarithm of the information's determinant.

    `beta`, `shift`, `scale` (p,) and `inverse` (p, p) are as for ``sum_leveraged``, with the same check.
    Released is ``penalty`` (p,), the sum over rows of the columns times the leverage times one half less the
    mean (Heinze and Schemper 2002, equation 3).
    """
    model = model_of(state)
    if (model.distribution.name, model.distribution.link) != ("Binomial", "Logit"):
        raise MessageError(f"{data.name}: Firth's penalty is for the logit, not for {model.distribution}")
    own, T = model.place(shift, scale, beta)
    view = FirthVectors(own_inverse(data.name, sums_at(state, model, own).information, T, inverse).tobytes())
    state.report(*weighted_by(model.opened, model.chunks, model.n, own, model.distribution, view))
    total = np.zeros(model.p)
    for rows in model.pieces():
        total += view(rows, own[:, None], model.distribution)[:, 0] @ rows.X
    return {"penalty": T.T @ total}
