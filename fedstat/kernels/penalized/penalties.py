"""Penalties that select coefficients or groups of them: lasso, elastic net, SCAD and MCP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numba import njit

from fedstat.errors import ModelError
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Groups of coefficients that are penalized together.
#
# A group of one is a coefficient by itself. The weight of a group multiplies its penalty, its multiplier
# the lambda; see the module ``penalties``.


@njit(cache=True, nogil=True)
def group_norms(starts: Ints, b: Floats) -> Floats:
    """Return the Euclidean norm of each group: (m + 1,), (p,) -> (m,)."""
    norms = np.zeros(len(starts) - 1)
    for g in range(len(norms)):
        if starts[g + 1] - starts[g] == 1:
            norms[g] = abs(b[starts[g]])
        else:
            for j in range(starts[g], starts[g + 1]):
                norms[g] += b[j] * b[j]
            norms[g] = np.sqrt(norms[g])
    return norms


@dataclass(frozen=True, slots=True, eq=False)
class CoefficientGroups:
    """Which coefficients are penalized together; a coefficient alone is a group of one.

    Group g of m is the coefficients from ``starts[g]`` up to ``starts[g + 1]``, (m + 1,). Its weight w_g,
    (m,), multiplies the penalty, 0 leaving it out; its multiplier m_g, (m,), is positive and multiplies
    lambda.
    """

    starts: Ints
    weights: Floats
    multipliers: Floats

    @classmethod
    def single(cls, p: int, weights: Floats | None = None) -> CoefficientGroups:
        """Penalize each of p coefficients by itself; weights as for :meth:`of`."""
        return cls.of(np.arange(p), weights)

    @classmethod
    def of(cls, labels: Array, weights: Floats | None = None) -> CoefficientGroups:
        """Penalize neighbors with the same label (p,) together, lambda times the root of their number.

        Weights (m,) are one where None. A ModelError where a label comes back after another, or weights do
        not fit.
        """
        labels = np.asarray(labels)
        starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1], [True]]))
        m = len(starts) - 1
        if len(np.unique(labels)) != m:
            raise ModelError("expected the coefficients of a group side by side; sort the columns by group")
        weights = np.ones(m) if weights is None else np.array(weights, dtype=np.float64)
        wrong = int((~(np.isfinite(weights) & (weights >= 0.0))).sum())
        if weights.shape != (m,) or wrong:
            raise ModelError(
                f"expected {m} finite weights of zero or more, one for each group; received an array of "
                f"shape {weights.shape}, {wrong} of them negative or not finite"
            )
        return cls(starts.astype(np.int64), weights, np.sqrt(np.diff(starts)))

    @property
    def p(self) -> int:
        """Number of coefficients."""
        return int(self.starts[-1])

    @property
    def sizes(self) -> Ints:
        """Number of coefficients of each group: (m,)."""
        return np.diff(self.starts)

    @property
    def penalized(self) -> Bools:
        """Tell which groups have a penalty: (m,)."""
        return self.weights > 0.0

    def norms(self, b: Floats) -> Floats:
        """Return the Euclidean norm of each group: (p,) -> (m,)."""
        norms: Floats = group_norms(self.starts, b)
        return norms

    def inner_products(self, b: Floats, other: Floats) -> Floats:
        """Return the inner product of each group of b with that of another: (p,), (p,) -> (m,)."""
        return np.add.reduceat(b * other, self.starts[:-1])

    def columns(self, which: Bools) -> Ints:
        """Return the positions of the coefficients of some groups: (m,) -> (q,), ascending."""
        return np.flatnonzero(np.repeat(which, self.sizes))

    def take(self, which: Bools) -> CoefficientGroups:
        """Return some of the groups as if there were no others: (m,)."""
        starts = np.concatenate([[0], np.cumsum(self.sizes[which])]).astype(np.int64)
        return CoefficientGroups(starts, self.weights[which], self.multipliers[which])


def orthonormalizer(G: Floats, groups: CoefficientGroups) -> tuple[Floats, CoefficientGroups]:
    """Return coordinates in which the columns of each group are orthonormal, and the groups there.

    The penalty of a group is then that of its part of the linear predictor, whatever coding made its columns
    (Breheny and Huang 2015), and a step of descent has a closed form. T (p, p) is block diagonal: the columns
    are ``X T``, Gram ``X'X/N`` and gradient become ``T'GT`` and ``T'c``, coefficients of X are ``T theta``.
    The multiplier of a group becomes the root of its rank; columns that are left over become zero, as do
    their coefficients. Groups of one column, and those without a penalty, stay as they are.
    """
    T, multipliers = np.eye(groups.p), groups.multipliers.copy()
    for g in np.flatnonzero((groups.sizes > 1) & groups.penalized):
        block = slice(groups.starts[g], groups.starts[g + 1])
        values, vectors = np.linalg.eigh(G[block, block])
        kept = values > 1e-10 * max(values[-1], 0.0)
        T[block, block] = np.where(kept, vectors / np.sqrt(np.where(kept, values, 1.0)), 0.0)
        multipliers[g] = np.sqrt(max(kept.sum(), 1))
    return T, replace(groups, multipliers=multipliers)


# ----------------------------------------------------------------------------------------------------
# Penalties that select: lasso, elastic net, SCAD and MCP, of coefficients and of groups of them.
#
# Group g of the coefficients adds ``w_g P(||b_g||)``, where the level of P is ``lambda m_g``. The weight
# w_g multiplies the penalty: 0 leaves a group unpenalized. The multiplier m_g multiplies lambda, as the
# root of the group's size does in Breheny and Huang (2015); of a single coefficient it is one. With the
# share r of the selecting part,
#
#     P(t) = Q(t; r lambda m) + (1 - r) lambda m t^2 / 2,
#
# where Q(t; l) is ``l t`` (lasso), SCAD (Fan and Li 2001) or MCP (Zhang 2010).
#
# References
# ----------
# Fan, J. and Li, R. (2001). Variable selection via nonconcave penalized likelihood and its oracle properties.
# Journal of the American Statistical Association 96, 1348-1360.
# Zhang, C.-H. (2010). Nearly unbiased variable selection under minimax concave penalty. Annals of Statistics
# 38, 894-942.
# Zou, H. and Li, R. (2008). One-step sparse estimates in nonconcave penalized likelihood models. Annals of
# Statistics 36, 1509-1533.
# Breheny, P. and Huang, J. (2011). Coordinate descent algorithms for nonconvex penalized regression, with
# applications to biological feature selection. Annals of Applied Statistics 5, 232-253.
# Breheny, P. and Huang, J. (2015). Group descent algorithms for nonconvex penalized linear and logistic
# regression models with grouped predictors. Statistics and Computing 25, 173-187.

# To add a penalty: write its class below, with the members of `Lasso`, and add it to Form, FORMS and
# PENALTIES. A missing member is a TypeError at import. Compiled code selects a form by its number (its index
# in FORMS) through the functions that `_by_kind` writes; a number without a form raises. The compiled
# methods are inlined before types are inferred: compiled one by one they would take 15 % longer.


class Lasso:
    """``Q(t; l) = l t``, which has no shape a."""

    shape = 0.0
    """The shape a if none is given; 0: the penalty has none."""
    above = 0.0
    """The bound that a must exceed."""
    convex = True
    """Whether every stationary point is a minimum."""

    @staticmethod
    @njit(nogil=True, inline="always")
    def value(a: float, level: float, t: float) -> float:
        """Return Q(t; level) for t >= 0."""
        return level * t

    @staticmethod
    @njit(nogil=True, inline="always")
    def slope(a: float, level: float, t: float) -> float:
        """Return the derivative of Q(t; level) for t >= 0; at zero that from the right."""
        return level

    @staticmethod
    @njit(nogil=True, inline="always")
    def threshold(a: float, level: float, w: float, v: float, u: float) -> float:
        """Return the t >= 0 that minimizes ``v t^2 / 2 - u t + w Q(t; level)``, for u >= 0 and v > 0."""
        return max(u - w * level, 0.0) / v

    @staticmethod
    def bend(a: float, level: Floats, t: Floats) -> Floats:
        """Return the second derivative of Q(t; level), zero at its bends: (m,), (m,) -> (m,)."""
        return np.zeros(len(t))

    @staticmethod
    def level_of_slope(a: float, slope: Floats, t: Floats) -> Floats:
        """Return the smallest level at which Q has at least this slope at t: (m,), (m,) -> (m,)."""
        return slope


class Scad:
    """Fan and Li (2001), equation 2.7; the threshold for v = w = 1 is Breheny and Huang's (2011, section 2).

    If the weight is so large that the objective of a threshold is not convex, the better of its two minima is
    used.
    """

    shape = 3.7
    above = 2.0
    convex = False

    @staticmethod
    @njit(nogil=True, inline="always")
    def value(a: float, level: float, t: float) -> float:
        """See :meth:`Lasso.value`."""
        if t <= level:
            return level * t
        if t <= a * level:
            return (2.0 * a * level * t - t * t - level * level) / (2.0 * (a - 1.0))
        return level * level * (a + 1.0) / 2.0

    @staticmethod
    @njit(nogil=True, inline="always")
    def slope(a: float, level: float, t: float) -> float:
        """See :meth:`Lasso.slope`."""
        return level if t <= level else max(a * level - t, 0.0) / (a - 1.0)

    @staticmethod
    @njit(nogil=True, inline="always")
    def threshold(a: float, level: float, w: float, v: float, u: float) -> float:
        """See :meth:`Lasso.threshold`."""
        soft = max(u - w * level, 0.0) / v
        if w == 0.0:
            return soft
        if v <= w / (a - 1.0):
            near = min(soft, level)
            far_value = w * level * level * (a + 1.0) / 2.0 - u * u / (2.0 * v)
            return (
                u / v if u > v * a * level and far_value < (v * near / 2.0 - u + w * level) * near else near
            )
        if u <= (v + w) * level:
            return soft
        if u <= v * a * level:
            return (u - w * a * level / (a - 1.0)) / (v - w / (a - 1.0))
        return u / v

    @staticmethod
    def bend(a: float, level: Floats, t: Floats) -> Floats:
        """See :meth:`Lasso.bend`."""
        return np.where((t > level) & (t < a * level), -1.0 / (a - 1.0), 0.0)

    @staticmethod
    def level_of_slope(a: float, slope: Floats, t: Floats) -> Floats:
        """See :meth:`Lasso.level_of_slope`."""
        return np.where(t <= slope, slope, ((a - 1.0) * slope + t) / a)


class Mcp:
    """Zhang (2010); thresholds as those of :class:`Scad`."""

    shape = 3.0  # Breheny and Huang (2011)
    above = 1.0
    convex = False

    @staticmethod
    @njit(nogil=True, inline="always")
    def value(a: float, level: float, t: float) -> float:
        """See :meth:`Lasso.value`."""
        return level * t - t * t / (2.0 * a) if t <= a * level else a * level * level / 2.0

    @staticmethod
    @njit(nogil=True, inline="always")
    def slope(a: float, level: float, t: float) -> float:
        """See :meth:`Lasso.slope`."""
        return max(level - t / a, 0.0)

    @staticmethod
    @njit(nogil=True, inline="always")
    def threshold(a: float, level: float, w: float, v: float, u: float) -> float:
        """See :meth:`Lasso.threshold`."""
        soft = max(u - w * level, 0.0) / v
        if w == 0.0:
            return soft
        if v <= w / a:
            return u / v if u * u > w * a * level * level * v else 0.0
        return u / v if u > v * a * level else soft * v / (v - w / a)

    @staticmethod
    def bend(a: float, level: Floats, t: Floats) -> Floats:
        """See :meth:`Lasso.bend`."""
        return np.where(t < a * level, -1.0 / a, 0.0)

    @staticmethod
    def level_of_slope(a: float, slope: Floats, t: Floats) -> Floats:
        """See :meth:`Lasso.level_of_slope`."""
        return slope + t / a


MEMBERS = ("shape", "above", "convex", "value", "slope", "threshold", "bend", "level_of_slope")
Form: TypeAlias = type[Lasso] | type[Scad] | type[Mcp]


def check_form(form: type) -> None:
    """Raise a TypeError unless a penalty defines all members itself; none is inherited by accident."""
    missing = [name for name in MEMBERS if name not in vars(form)]
    if missing:
        raise TypeError(f"penalty {form.__name__}: define {', '.join(missing)}")


FORMS: tuple[Form, ...] = (Lasso, Scad, Mcp)
for _form in FORMS:
    check_form(_form)
PENALTIES: dict[str, Form] = {
    "lasso": Lasso,
    "elastic_net": Lasso,
    "ridge": Lasso,
    "scad": Scad,
    "mcp": Mcp,
}
TermArrays: TypeAlias = tuple[int, float, Floats, Floats, Floats, Ints]
"""Kind and shape a, then level, ridge and weight (m,) of each group, and where groups start (m + 1,)."""


def _by_kind(forms: Sequence[Form], method: str, arguments: str) -> Callable[..., float]:
    """Compile ``method(kind, *arguments)``, which calls this method of the form with that number.

    The branches are written out, so that the compiler can inline them.
    """
    branches = [f"    if kind == {kind}: return form{kind}({arguments})" for kind in range(len(forms))]
    lines = [
        f"def {method}(kind, {arguments}):",
        *branches,
        "    raise ValueError('no penalty has this number')",
    ]
    names = {f"form{kind}": getattr(form, method) for kind, form in enumerate(forms)}
    exec("\n".join(lines), names)
    compiled: Callable[..., float] = njit(nogil=True)(names[method])
    return compiled


value_of = _by_kind(FORMS, "value", "a, level, t")
slope_of = _by_kind(FORMS, "slope", "a, level, t")
threshold_of = _by_kind(FORMS, "threshold", "a, level, w, v, u")


@njit(cache=True, nogil=True)
def _violations(terms: TermArrays, b: Floats, gradient: Floats) -> Floats:
    kind, a, level, ridge, w, starts = terms
    size = group_norms(starts, b)
    out = group_norms(starts, gradient)
    for g in range(len(out)):
        slope = w[g] * slope_of(kind, a, level[g], size[g])
        if size[g] == 0.0:
            # The subdifferential at zero is a ball of radius `slope`: what the gradient exceeds it by.
            out[g] = max(out[g] - slope, 0.0)
            continue
        square = 0.0
        for j in range(starts[g], starts[g + 1]):
            pull = gradient[j] + (slope / size[g] + ridge[g]) * b[j]
            square += pull * pull
        out[g] = np.sqrt(square)
    return out


@njit(cache=True, nogil=True)
def _total(terms: TermArrays, size: Floats) -> float:
    kind, a, level, ridge, w, _ = terms
    total = 0.0
    for g in range(len(size)):
        total += w[g] * value_of(kind, a, level[g], size[g]) + ridge[g] * size[g] * size[g] / 2.0
    return total


@njit(cache=True, nogil=True)
def _slopes(terms: TermArrays, size: Floats) -> Floats:
    kind, a, level, _, _, _ = terms
    slopes = np.empty(len(size))
    for g in range(len(size)):
        slopes[g] = slope_of(kind, a, level[g], size[g])
    return slopes


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The penalty of each group at one lambda: ``w_g Q(t; level_g) + ridge_g t^2 / 2``.

    `kind` is the number of its form in FORMS and `a` its shape; level, ridge and weights are (m,), none
    negative.
    """

    kind: int
    a: float
    level: Floats
    ridge: Floats
    weights: Floats
    groups: CoefficientGroups

    @property
    def arrays(self) -> TermArrays:
        """The same for compiled loops, for which plain tuples are faster than objects."""
        return self.kind, self.a, self.level, self.ridge, self.weights, self.groups.starts

    @property
    def cut(self) -> Floats:
        """Largest norm of the gradient at which a group may be zero: (m,)."""
        return self.weights * self.level

    def value(self, b: Floats) -> float:
        """Return the penalty of all groups: (p,)."""
        return float(_total(self.arrays, self.groups.norms(b)))

    def violations(self, b: Floats, gradient: Floats) -> Floats:
        """Return how far each group is from a stationary point (m,), from b and the loss's gradient, (p,).

        It is the norm of the shortest element of the subdifferential of loss and penalty: zero in all groups
        is what Karush, Kuhn and Tucker require.
        """
        out: Floats = _violations(self.arrays, b, gradient)
        return out

    def violation(self, b: Floats, gradient: Floats) -> float:
        """Return the largest of :meth:`violations`: zero certifies a stationary point."""
        return float(self.violations(b, gradient).max(initial=0.0))

    def derivatives(self, b: Floats) -> tuple[Floats, Floats]:
        """Return gradient (p,) and Hessian (p, p) of the penalty where no group of b is zero."""
        size, sizes, starts = self.groups.norms(b), self.groups.sizes, self.groups.starts
        slope, bend = _slopes(self.arrays, size), FORMS[self.kind].bend(self.a, self.level, size)
        # Of P(||b_g||): P'' along b_g, and P' / ||b_g|| across it, which a single coefficient lacks.
        along, across = self.weights * bend + self.ridge, self.weights * slope / size + self.ridge
        gradient = np.repeat(across, sizes) * b
        hessian = np.diag(np.repeat(np.where(sizes == 1, along, across), sizes))
        for g in np.flatnonzero(sizes > 1):
            unit = b[starts[g] : starts[g + 1]] / size[g]
            block = slice(starts[g], starts[g + 1])
            hessian[block, block] += (along[g] - across[g]) * np.outer(unit, unit)
        return gradient, hessian

    def linearized(self, b: Floats) -> Terms:
        """Return the lasso that touches the penalty at b and is above it elsewhere (Zou and Li 2008)."""
        if FORMS[self.kind] is Lasso:
            return self
        return replace(self, kind=FORMS.index(Lasso), level=_slopes(self.arrays, self.groups.norms(b)))

    def take(self, which: Bools) -> Terms:
        """Return the terms of some groups: (m,)."""
        parts = (self.level[which], self.ridge[which], self.weights[which], self.groups.take(which))
        return Terms(self.kind, self.a, *parts)


@dataclass(frozen=True, slots=True)
class Penalty:
    """A penalty by name, one of PENALTIES; a ModelError where the combination means nothing.

    `a` determines where the penalty levels off: if None, 3.7 for SCAD and 3 for MCP (ncvreg's gamma).
    `l1_ratio` in (0, 1] is the share of the selecting part; the rest is ridge. It is below one for the
    elastic net. The penalty "ridge" has no selecting part.
    """

    name: str
    a: float | None = None
    l1_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in PENALTIES:
            raise ModelError(f"no penalty {self.name!r}; expected one of {', '.join(PENALTIES)}")
        if not 0.0 < self.l1_ratio <= 1.0:
            raise ModelError(f"penalty {self.name}: expected l1_ratio in (0, 1], received {self.l1_ratio!r}")
        if self.convex and (self.l1_ratio < 1.0) != (self.name == "elastic_net"):
            raise ModelError(
                f"penalty {self.name} with l1_ratio = {self.l1_ratio!r}: expected l1_ratio below one for "
                "elastic_net, and l1_ratio = 1 for lasso and ridge"
            )
        if self.a is None:
            return
        if not self.form.shape:
            raise ModelError(f"penalty {self.name} has no shape a; leave it out")
        if not self.form.above < self.a < np.inf:
            raise ModelError(f"penalty {self.name}: expected a > {self.form.above:g}, received {self.a!r}")

    @property
    def form(self) -> Form:
        """The class with the methods of this penalty."""
        return PENALTIES[self.name]

    @property
    def shape(self) -> float:
        """The a in use; 0 where there is none."""
        return self.form.shape if self.a is None else self.a

    @property
    def convex(self) -> bool:
        """Whether every stationary point is a minimum."""
        return self.form.convex

    @property
    def selecting(self) -> float:
        """Share of the part that sets coefficients to zero: `l1_ratio`, or zero for ridge."""
        return 0.0 if self.name == "ridge" else self.l1_ratio

    def at(self, lam: float, groups: CoefficientGroups) -> Terms:
        """Return the penalty of each group at one lambda."""
        scaled = lam * groups.multipliers
        ridge = (1.0 - self.selecting) * groups.weights * scaled
        return Terms(
            FORMS.index(self.form), self.shape, self.selecting * scaled, ridge, groups.weights, groups
        )

    def level_of_slope(self, t: Floats, slope: Floats) -> Floats:
        """Return the smallest level at which Q has at least this slope at t: (m,), (m,) -> (m,)."""
        return self.form.level_of_slope(self.shape, slope, t)
