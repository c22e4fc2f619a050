"""Setup of a path and its fits: penalty, groups, adaptive weights, lambdas, criteria."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import DataWarning, EstimationError, ModelError, Remedy, warn
from fedstat.federation.design.vertical_design import Design
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.row_checks import entities_per_equation
from fedstat.inference.likelihood import aic, bic, ebic, profile_deviance
from fedstat.kernels.penalized.path import Algorithm, LinearSteps, PenalizedPath, lambda_grid, lambda_max
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vertical.layout import Layout, complete_at, lay_out, list_terms
from fedstat.models.vglm.distributions import minus_twice
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The setup of a path: entities, folds, penalty, groups, adaptive weights, lambdas.

# ----------------------------------------------------------------------------------------------------
# Entities of a fit: those that all sites with columns have, or all; their folds and halves.


def make_layout(design: Design, policies: Iterable[Policy], *, incomplete: bool = False) -> Layout:
    """Lay out a fit of complete cases, or with `incomplete` of all entities.

    The `policies` of the sites decide how many entities sums of products need. Raises EstimationError if too
    few are complete.
    """
    use = complete_at(design.blocks, design.n) | incomplete
    each = max(entities_per_equation(policy) for policy in policies)
    layout = replace(lay_out(design, design.blocks, use), each=each)
    if layout.most_grams < 1 and not incomplete:
        least = int(np.ceil(each * (layout.p + 1)))
        raise EstimationError(
            f"{layout.n:,} of {design.n:,} entities are complete at {', '.join(layout.sites)}, but sums "
            f"of products of {layout.p} columns and the response are released only over {least:,} or more: "
            f"leave out columns, or a site that lacks many entities{describe_lacking(layout)}. Owners can "
            "allow more columns than entities by max_parameters = 1 or more in policy.toml"
        )
    return layout


EVERY_ENTITY = Remedy(
    "from_formula(..., missing='em').fit()",
    "from_formula(..., missing='em') uses all entities, with the normal family",
)


def warn_of_incomplete(layout: Layout) -> None:
    """Warn of entities that are left out because a site lacks them."""
    if layout.left_out:
        warn(describe_incomplete(layout), DataWarning, remedy=EVERY_ENTITY)


def describe_incomplete(layout: Layout) -> str:
    """State which entities are left out, without a full stop."""
    listed = ", ".join(f"{count:,} at {site}" for site, count in layout.absent.items())
    return (
        f"{layout.left_out:,} of {layout.n_design:,} entities with a response "
        f"({100.0 * layout.left_out / layout.n_design:.1f} %) lack a site's columns ({listed}) and were left "
        "out: valid, with larger standard errors, if missingness depends on the columns alone, but biased if "
        f"it depends on the response given the columns{describe_lacking(layout)}"
    )


def describe_lacking(layout: Layout) -> str:
    """State which columns entities with only some of a site's columns lack, as the end of a sentence."""
    if not layout.lacking:
        return ""
    return f". Entities with only some of a site's columns lack values of {list_terms(layout.lacking)}"


def assign_folds(n: int, folds: int, least: int, random: np.random.Generator) -> Ints:
    """Assign entities to folds of nearly equal size at random, (n,), if each has `least` or more."""
    if n // folds < least:
        most = n // least
        other = f"use at most {most} folds, or {{arguments}}" if most > 1 else "use {arguments}"
        raise EstimationError(
            f"{folds} folds of {n:,} entities have {n // folds:,} each, but sums of products are released "
            f"only over {least:,} or more",
            remedy=Remedy("fit(..., select='bic')", other),
        )
    return np.asarray(random.permutation(np.arange(n) % folds), dtype=np.int64)


def halve_entities(layout: Layout, random: np.random.Generator) -> tuple[Layout, Layout]:
    """Divide the entities of a fit into random halves."""
    first = assign_folds(layout.n, 2, 1, random) == 0
    return layout.narrowed(first), layout.narrowed(~first)


# ----------------------------------------------------------------------------------------------------
# Setup of a path: penalty, groups, adaptive weights, lambdas.

SMALLEST_COEFFICIENT = 1e-8
"""Bound for standardized columns: an adaptive weight is at most the power of its inverse."""


@dataclass(frozen=True, slots=True, eq=False)
class PathSetup:
    """What is penalized, and the method.

    The groups are those of the columns, without the intercept. `adaptive` is the power of the first estimates
    by which penalties are divided, 0 for none. `lambdas` descend; None: a grid of `size` and `ratio`. `tol`
    is the largest violation of the stationarity conditions, as a share of the lasso's lambda_max. `steps` of
    "lla" are local linear approximations from the unpenalized fit; None: all from the lasso.
    """

    penalty: Penalty
    groups: CoefficientGroups
    adaptive: float
    lambdas: Floats | None
    size: int
    ratio: float
    algorithm: Algorithm
    tol: float
    steps: int | None = None

    @property
    def from_unpenalized(self) -> bool:
        """Whether the unpenalized fit must be known."""
        return self.adaptive > 0.0 or self.steps is not None

    @property
    def unpenalized(self) -> bool:
        """Whether the only fit is the one without a penalty."""
        return self.lambdas is not None and len(self.lambdas) == 1 and self.lambdas[0] == 0.0

    def adapted(self, b: Floats) -> PathSetup:
        """Divide the penalties by a power of first estimates: (p,), in the coordinates of the groups."""
        if not self.adaptive:
            return self
        return replace(self, groups=adapted(self.groups, b, self.adaptive))

    def linear_steps(self, b: Floats) -> LinearSteps | None:
        """Return the local linear approximations from the unpenalized fit b (p,), if they are used."""
        return None if self.steps is None else LinearSteps(b, self.steps)

    def grid(self, gradient: Floats, steps: LinearSteps | None = None, H: Floats | None = None) -> Floats:
        """Return the lambdas: those given, or a grid from the gradient (p,) where penalized ones are zero.

        That of ridge follows from the Hessian H (p, p) there, because no lambda makes its coefficients zero.
        """
        if self.lambdas is not None:
            return self.lambdas
        if not self.penalty.selecting:
            assert H is not None
            return ridge_grid(H, self.groups, self.ratio, self.size)
        largest = lambda_max(gradient, self.penalty, self.groups, steps)
        return lambda_grid(largest, ratio=self.ratio, size=self.size)


NEGLIGIBLE = 100.0
"""Largest lambda of ridge over the largest eigenvalue of the information: 1 % of a coefficient is left."""


def ridge_grid(H: Floats, groups: CoefficientGroups, ratio: float, size: int) -> Floats:
    """Return lambdas of ridge, (size,), down to `ratio` times the mean curvature of the loss.

    The largest one leaves almost nothing of any coefficient.

    Raises ModelError if no column is penalized.
    """
    at = groups.columns(groups.penalized)
    if not len(at):
        raise ModelError(
            "penalty 'ridge': no column is penalized",
            remedy=Remedy("fit(lam=0)", "leave columns out of unpenalized, or {call}"),
        )
    H = H[np.ix_(at, at)]
    largest = NEGLIGIBLE * float(np.linalg.eigvalsh(H)[-1])
    return lambda_grid(largest, ratio=ratio * float(np.diag(H).mean()) / largest, size=size)


def adapted(groups: CoefficientGroups, b: Floats, power: float) -> CoefficientGroups:
    """Divide the weights of groups by a power of the root mean square of first estimates b (p,)."""
    # A group's norm increases with its size, as its multiplier does; the root mean square does not.
    sizes = np.maximum(groups.norms(b) / groups.multipliers, SMALLEST_COEFFICIENT)
    return replace(groups, weights=groups.weights * sizes**-power)


def make_groups(layout: Layout, by_term: bool, unpenalized: Sequence[str]) -> CoefficientGroups:
    """Group the columns of each term, or none, and free columns or terms that must be in the model."""
    unknown = [name for name in unpenalized if name not in (*layout.names, *layout.terms)]
    if unknown:
        raise ModelError(
            f"unpenalized: no column or term {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(dict.fromkeys((*layout.terms, *layout.names)))}"
        )
    free = np.isin(layout.names, unpenalized) | np.isin(layout.terms, unpenalized)
    kinds = list(zip(layout.owners, layout.terms, free.tolist(), strict=True))
    places = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    labels = np.array([places[kind] for kind in kinds]) if by_term else np.arange(layout.p)
    groups = CoefficientGroups.of(labels)
    return replace(groups, weights=np.where(free[groups.starts[:-1]], 0.0, 1.0))


# ----------------------------------------------------------------------------------------------------
# Fits along a path, information criteria, and the choice of one fit.

# ----------------------------------------------------------------------------------------------------
# Fits along a path, and maximum likelihood on the columns that one of them selects.


@dataclass(frozen=True, slots=True, eq=False)
class CoefficientPath:
    """Fits along L values of lambda: intercepts (L,) and coefficients (L, p) in the units of the data.

    `standardized` (L, p) are coefficients of standardized columns, `loss` half the mean deviance; `kkt` the
    largest violation of the stationarity conditions, as a share of `scale`, the lasso's lambda_max; nan if a
    quadratic model of the loss proposed the fit. `df` are degrees of freedom without the intercept; None:
    the number of nonzero coefficients.
    """

    lambdas: Floats
    intercepts: Floats
    coefficients: Floats
    standardized: Floats
    loss: Floats
    kkt: Floats
    converged: Bools
    scale: float
    groups: CoefficientGroups
    df: Floats | None = None

    @property
    def selected(self) -> Bools:
        """Which coefficients are not zero: (L, p)."""
        return np.asarray(self.coefficients != 0.0)

    @property
    def solved(self) -> Bools:
        """Which fits are certified solutions, and not proposals: (L,)."""
        return np.asarray(np.isfinite(self.kkt))

    @classmethod
    def of(
        cls,
        found: PenalizedPath,
        b: Floats,
        a: Floats,
        units: ColumnScales,
        groups: CoefficientGroups,
        df: Floats | None = None,
    ) -> CoefficientPath:
        """Convert coefficients b (L, p) and intercepts a (L,) of standardized columns to the data's units."""
        beta = b / units.scale
        return cls(
            lambdas=found.lambdas,
            intercepts=a - beta @ units.shift,
            coefficients=beta,
            standardized=b,
            loss=found.loss,
            kkt=found.kkt,
            converged=found.converged,
            scale=found.scale,
            groups=groups,
            df=df,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """Maximum likelihood on the selected columns, the support (p,).

    `params` (1 + k,) are intercept and coefficients of the support in the units of the data, `cov` is the
    inverse observed information, `scale` the dispersion, `loss` half the mean deviance.
    """

    support: Bools
    params: Floats
    cov: Floats
    llf: float
    scale: float
    loss: float


def to_units(support: Bools, units: ColumnScales) -> Floats:
    """Matrix that converts (intercept, b) of the support's standardized columns to the units of the data."""
    scale, shift = units.scale[support], units.shift[support]
    J = np.diag(np.concatenate([[1.0], 1.0 / scale]))
    J[0, 1:] = -shift / scale
    return J


# ----------------------------------------------------------------------------------------------------
# Information criteria of the fits of a path, and the choice of one.

Criterion: TypeAlias = Literal["bic", "ebic", "aic"]
Select: TypeAlias = Literal["bic", "ebic", "aic", "cv", "1se"]
TIE_TOLERANCE = 1e-9
"""Difference that counts as a tie, in deviance per entity or as a share; above tolerance and rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class PathCriteria:
    """Criteria for each fit of a path over `n` entities, (L,) each: smaller is better.

    `df` are degrees of freedom, including the intercept. `cv` is the cross-validated mean
    deviance (of the normal family the mean squared error), with its standard error over folds.
    """

    n: float
    df: Floats
    aic: Floats
    bic: Floats
    ebic: Floats
    cv: Floats | None = None
    cv_se: Floats | None = None


def score_path(path: CoefficientPath, n: float, distribution: str = "Gaussian") -> PathCriteria:
    """Compute the information criteria of a path over n entities.

    A dispersion is estimated at every fit, by maximum likelihood.
    """
    chosen = np.count_nonzero(path.coefficients, axis=1).astype(float)
    doubled = (
        profile_deviance(2.0 * n * path.loss, n)
        if distribution == "Gaussian"
        else minus_twice(distribution, path.loss, n)
    )
    df = (chosen if path.df is None else path.df) + 1.0
    free = int(path.groups.sizes[~path.groups.penalized].sum())
    # Columns that must be in the model are not candidates of a search (Chen and Chen 2008).
    extended = ebic(
        doubled,
        df,
        n,
        chosen=np.maximum(chosen - free, 0.0),
        candidates=path.coefficients.shape[1] - free,
    )
    return PathCriteria(n, df, *(np.asarray(v) for v in (aic(doubled, df), bic(doubled, df, n), extended)))


@dataclass(frozen=True, slots=True)
class Chooser:
    """Choice of a fit of a path over n entities by an information criterion."""

    n: float
    distribution: str
    criterion: Criterion

    def values(self, path: CoefficientPath) -> Floats:
        """Return the criterion of every fit: (L,)."""
        values: Floats = getattr(score_path(path, self.n, self.distribution), self.criterion)
        return values

    def __call__(self, path: CoefficientPath) -> int:
        """Return the index of the best fit; for ties the one with the largest lambda."""
        return first_smallest(self.values(path), self.n)


def choose_fit(criteria: PathCriteria, select: Select) -> int:
    """Return the index of the best fit; for ties the one with the largest lambda, which selects least.

    If a concave penalty is flat, many lambdas have the same fit, and rounding would choose among them.
    """
    if select in ("cv", "1se"):
        assert criteria.cv is not None and criteria.cv_se is not None
        return choose_by_folds(criteria.cv, criteria.cv_se, select == "1se")
    return first_smallest(np.asarray(getattr(criteria, select)), criteria.n)


def choose_by_folds(cv: Floats, cv_se: Floats, one_se: bool) -> int:
    """Return the index of the smallest error, or with `one_se` the first within its standard error.

    Breiman, L., Friedman, J., Olshen, R. and Stone, C. (1984). Classification and Regression Trees, 3.4.3.
    """
    best = first_smallest(cv)
    return int(np.argmax(cv <= cv[best] + cv_se[best])) if one_se else best


def first_smallest(values: Floats, unit: float | None = None) -> int:
    """Return the index of the smallest value; for ties up to rounding, (L,), the first.

    Ties differ by less than TIE units; if None, the unit is the smallest value itself.
    """
    best = float(values.min())
    return int(np.argmax(values <= best + TIE_TOLERANCE * (abs(best) if unit is None else unit)))
