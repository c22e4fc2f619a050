"""The outcome of a selecting fit, the part that a file stores, and the estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import pandas as pd

from fedstat.inference.estimate import INTERCEPT, Estimate
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vertical.exchange.patterns import noise_added
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vertical.layout import Layout, site_blocks
from fedstat.models.vglm.distributions import log_likelihood
from fedstat.models.vglm.em_fit import MissingBlocksFit
from fedstat.models.vglm.newton_fit import SelectedPath
from fedstat.models.vglm.options import FitPlan
from fedstat.models.vglm.path_setup import TIE_TOLERANCE, PathCriteria
from fedstat.typing import Bools, Floats, Ints, Vector

OnPath: TypeAlias = Annotated[Floats, "L"]
BIASED = (
    "the {penalty} shrinks its estimates by a bias that no covariance describes; .refit has unpenalized "
    "estimates on the selected columns, with standard errors that are conditional on the selection"
)
SHRUNKEN = (
    "ridge shrinks its estimates by a bias that no covariance describes; fit(lam=0) has unpenalized "
    "estimates with standard errors, and penalty='lasso' debiased ones"
)
APART = (
    "these estimates come from the half of the entities that selected the columns; .refit has those of the "
    "other half, with standard errors that do not depend on the selection"
)
NO_RSQUARED = "only the normal family has R-squared, without sample splitting"
SPENT = "it would need more weighted sums of products than the number of entities allows; use fewer columns"


@dataclass(frozen=True, slots=True, eq=False)
class SelectionOutcome:
    """Result of a fit: the numbers, and the method.

    The layout of the plan includes all entities of the fit, also those that only estimate; columns were
    selected among `n`, or as many as their weights represent. `null` is the log-likelihood of the intercept
    alone, `folds` the number of parts of the entities whose sums were released separately, `observed` the
    results of a fit with missing blocks.
    """

    plan: FitPlan
    fitted: SelectedPath
    criteria: PathCriteria
    null: float
    units: ColumnScales
    n: float
    folds: int = 1
    observed: MissingBlocksFit | None = None

    @property
    def layout(self) -> Layout:
        """Layout of sites, columns and entities."""
        return self.plan.layout

    @property
    def distribution(self) -> DistributionSpec:
        """Distribution of the response, and link."""
        return self.plan.distribution

    @property
    def left_out(self) -> int:
        """Number of entities in small missing patterns that would lack every block."""
        return 0 if self.observed is None else self.observed.exchange.plan.left_out


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A path and the chosen fit, as numbers and texts that a file can hold.

    The arrays of the path are those of :class:`~fedstat.models.vglm.path_setup.CoefficientPath`; the criteria
    ``df``, ``aic``, ``bic``, ``ebic``, and if available ``cv`` and ``cv_se``. `frequencies` are the shares of
    random halves in which a column is selected, `numbers` the mean number of columns that are selected in a
    half at this lambda or a larger one. `null` is the log-likelihood of the intercept alone, `split_p` are
    p-values over many splits.
    """

    lambdas: OnPath
    intercepts: OnPath
    coefficients: Annotated[Floats, "L p"]
    loss: OnPath
    kkt: OnPath
    converged: Annotated[Bools, "L"]
    criteria: Mapping[str, OnPath]
    chosen: int
    frequencies: Annotated[Floats, "L p"] | None
    numbers: OnPath | None
    select: str
    penalty: str
    family: str
    null: float
    inference: str = "conditional"
    split_p: Vector | None = None

    @classmethod
    def of(cls, outcome: SelectionOutcome) -> Selection:
        """Record the result of a fit."""
        path, criteria, halves = outcome.fitted.path, outcome.criteria, outcome.fitted.halves
        named = {name: getattr(criteria, name) for name in ("df", "aic", "bic", "ebic", "cv", "cv_se")}
        return cls(
            lambdas=path.lambdas,
            intercepts=path.intercepts,
            coefficients=path.coefficients,
            loss=path.loss,
            kkt=path.kkt,
            converged=path.converged,
            criteria={name: values for name, values in named.items() if values is not None},
            chosen=outcome.fitted.chosen,
            frequencies=None if halves is None else halves[0],
            numbers=None if halves is None else halves[1],
            select=outcome.plan.choice.select,
            penalty=outcome.plan.setup.penalty.name,
            family=outcome.distribution.name,
            null=outcome.null,
            inference=outcome.plan.choice.inference,
            split_p=outcome.fitted.split_p,
        )

    @property
    def lam(self) -> float:
        """The lambda that was chosen."""
        return float(self.lambdas[self.chosen])

    @property
    def solved(self) -> Bools:
        """Which fits are certified solutions; a quadratic model proposed the others."""
        return np.asarray(np.isfinite(self.kkt))

    @property
    def table(self) -> pd.DataFrame:
        """One row per lambda."""
        numbers = {"loss": self.loss, **self.criteria, "kkt": self.kkt}
        table = pd.DataFrame(numbers, index=pd.Index(self.lambdas, name="lambda"))
        status = np.where(self.solved, "solved", "proposed")
        # A concave penalty does not shrink large coefficients: several lambdas can have one fit.
        other = np.any(np.diff(self.coefficients != 0.0, axis=0), axis=1)
        moves = other | (np.abs(np.diff(self.loss)) > TIE_TOLERANCE)
        fit = 1 + np.concatenate([[0], np.cumsum(moves)])
        return table.assign(converged=self.converged & self.solved, status=status, fit=fit)

    @property
    def entry(self) -> Floats:
        """Largest lambda whose solved fit selects each column; nan if there is none: (p,)."""
        selected = self.coefficients[self.solved] != 0.0
        first = self.lambdas[self.solved][np.argmax(selected, axis=0)]
        return np.asarray(np.where(selected.any(axis=0), first, np.nan))


def _estimate(response: str, outcome: SelectionOutcome, columns: Ints, **found: Any) -> Estimate:
    """Estimate on some of the columns, with the names and sites that all estimates of a fit share."""
    layout = outcome.layout
    return Estimate(
        names=(INTERCEPT, *[layout.names[j] for j in columns]),
        sites=("", *[layout.owners[j] for j in columns]),
        terms=(INTERCEPT, *[layout.terms[j] for j in columns]),
        response=response,
        privacy=noise_added(layout),
        blocks=site_blocks(layout),
        **found,
    )


def make_refit(response: str, outcome: SelectionOutcome) -> Estimate | None:
    """Return the estimate on the selected columns; None if it could not be released."""
    refit, split = outcome.fitted.refit, outcome.plan.choice.split
    if refit is None:
        return None
    columns = np.flatnonzero(refit.support)
    return _estimate(
        response,
        outcome,
        columns,
        params=refit.params,
        cov=refit.cov,
        nobs=round(outcome.layout.nobs - outcome.n if split else outcome.n),
        df_model=float(len(columns)),
        converged=True,
        llf=refit.llf,
        rsquared=_rsquared(outcome, refit.loss, refit=True),
        scale=refit.scale,
        cov_type=information(outcome.distribution),
        reasons={"rsquared": NO_RSQUARED},
    )


def information(distribution: DistributionSpec) -> str:
    """Name the information of standard errors; for a canonical link, the expected one is the observed one."""
    return "observed" if distribution.canonical else "expected"


def make_debiased(response: str, outcome: SelectionOutcome) -> Estimate | None:
    """Return debiased estimates of all columns; None if they were not requested."""
    found, layout = outcome.fitted.debiased, outcome.layout
    if found is None:
        return None
    reason = "debiased estimates maximize no likelihood; that of the selected columns is .refit.llf"
    return _estimate(
        response,
        outcome,
        np.arange(layout.p),
        params=found.params,
        cov=found.cov,
        nobs=round(outcome.n),
        df_model=float(layout.p),
        converged=True,
        scale=found.scale,
        cov_type="debiased",
        reasons={"llf": reason, "rsquared": "debiased estimates minimize no sum of squares"},
    )


def make_estimate(response: str, outcome: SelectionOutcome, refit: Estimate | None) -> Estimate:
    """Return the penalized estimate at the chosen lambda, with its covariance."""
    layout, setup, split = outcome.layout, outcome.plan.setup, outcome.plan.choice.split
    path, at = outcome.fitted.path, outcome.fitted.chosen
    params = np.concatenate([[path.intercepts[at]], path.coefficients[at]])
    if setup.unpenalized and refit is not None:
        params = refit.params
    convex = setup.penalty.convex and path.lambdas[at] > 0.0
    reason = BIASED.format(penalty=setup.penalty.name.replace("_", " ")) if convex else SPENT
    if convex and not setup.penalty.selecting:
        reason = SHRUNKEN
    kind, loss = information(outcome.distribution), float(path.loss[at])
    n = outcome.n
    scale = None if refit is None else refit.scale
    df = float(outcome.criteria.df[at]) - 1.0
    if refit is None and outcome.distribution.name == "Gaussian":
        own_scale = 2.0 * loss * n / (n - 1.0 - df) * layout.variance_of_one
    else:
        own_scale = 1.0 if refit is None else refit.scale
    return _estimate(
        response,
        outcome,
        np.arange(layout.p),
        params=params,
        # The bias of a lasso does not vanish, and the covariance of the other half belongs to other
        # estimates.
        cov=None if convex or split else _selected_cov(outcome, refit),
        nobs=round(n),
        df_model=df,
        converged=bool(path.converged[at]) and (refit is None or refit.converged),
        convergence=f"violation of stationarity {path.kkt[at]:.1e} of lambda_max",
        llf=log_likelihood(outcome.distribution.name, loss, n, outcome.units.constant, scale),
        rsquared=_rsquared(outcome, loss),
        scale=own_scale,
        cov_type=kind if setup.unpenalized else f"{kind}, conditional on selection",
        reasons={"cov_params": APART if split else reason, "rsquared": NO_RSQUARED},
        llf_is_maximum=setup.unpenalized,
    )


def _selected_cov(outcome: SelectionOutcome, refit: Estimate | None) -> Floats | None:
    """Covariance of SCAD and MCP: that of the selected columns (Fan and Li 2001, theorem 2)."""
    fitted, p = outcome.fitted, outcome.layout.p
    if refit is None or refit.cov is None or fitted.refit is None:
        return None
    known = np.flatnonzero(np.append(True, fitted.refit.support))
    cov = np.full((p + 1, p + 1), np.nan)
    cov[np.ix_(known, known)] = refit.cov
    return cov


def mean_predictors(estimate: Estimate, outcome: SelectionOutcome) -> dict[str, float]:
    """Mean linear predictor of each site's block, for a fit with missing blocks."""
    if outcome.observed is None:
        return {}
    parts = outcome.layout.split(estimate.params[1:] * outcome.observed.means)
    return {site: float(part.sum()) for site, part in parts.items()}


def column_means(outcome: SelectionOutcome) -> dict[str, Floats]:
    """Means of each site's columns, for a fit with missing blocks."""
    return {} if outcome.observed is None else dict(outcome.layout.split(outcome.observed.means))


def _rsquared(outcome: SelectionOutcome, loss: float, *, refit: bool = False) -> float | None:
    if outcome.observed is not None:
        return outcome.observed.refit_rsquared if refit else outcome.observed.rsquared
    if outcome.distribution.name != "Gaussian" or outcome.plan.choice.split:
        return None
    return 1.0 - 2.0 * loss / outcome.units.sd**2
