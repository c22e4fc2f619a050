"""What a fit of a vertical generalised linear model hands over, and the estimates that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np

from fedstat.inference.estimate import INTERCEPT, Estimate
from fedstat.inference.summary import ClientBlock
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.exchange.protocol import Units
from fedstat.models.vertical.layout import Layout
from fedstat.models.vglm.em.blocks import Observed
from fedstat.models.vglm.newton.fit import SelectedPath
from fedstat.models.vglm.path.criteria import Criteria
from fedstat.models.vglm.path.setup import Setup
from fedstat.models.vglm.response.distributions import log_likelihood
from fedstat.typing import Bools, Floats, Vector

OnPath: TypeAlias = Annotated[Floats, "L"]
Inference: TypeAlias = Literal["conditional", "debiased", "split"]
BIASED = (
    "the {penalty} shrinks its estimates by a bias that no covariance describes; .refit has the estimates on "
    "the selected columns without it, with standard errors that are conditional on the selection"
)
APART = (
    "these estimates come from the half of the entities that selected the columns; .refit has those of the "
    "other half, with standard errors that do not depend on the selection"
)
NO_RSQUARED = "only the normal family has one, without sample splitting"
SPENT = (
    "the weighted sums of products for it would be more than the number of entities allows; use fewer columns"
)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a fit hands over: the numbers, and how they were made.

    Parameters
    ----------
    layout : Layout
        Of all entities of the fit, those that only estimate included.
    family : DistributionSpec
    fitted : SelectedPath
    criteria : Criteria
    select : str
    setup : Setup
    null : float
        Log-likelihood of the intercept alone.
    units : Units
    folds : int
        Parts of the entities of which sums were released separately.
    hidden : bool
        Whether linear predictors were masked.
    exchange : {"products", "admm"}
    observed : Observed or None
        Of a fit with missing blocks.
    inference : {"conditional", "debiased", "split"}
    n : int
        Entities among which columns were selected; 0: all of the fit.
    """

    layout: Layout
    family: DistributionSpec
    fitted: SelectedPath
    criteria: Criteria
    select: str
    setup: Setup
    null: float
    units: Units
    folds: int = 1
    hidden: bool = False
    exchange: str = "products"
    observed: Observed | None = None
    inference: Inference = "conditional"
    n: int = 0

    @property
    def left_out(self) -> int:
        """Entities whose missing pattern is too small to be released, and that would lack every block."""
        return 0 if self.observed is None else self.observed.exchange.plan.left_out


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A path and the fit that was chosen, as numbers and texts that a file can hold.

    Parameters
    ----------
    lambdas, intercepts, coefficients, loss, kkt : arrays
        See :class:`~fedstat.models.vglm.path.fits.Path`.
    converged : (L,) array of bool
    criteria : mapping of str to (L,) array
        ``df``, ``aic``, ``bic``, ``ebic``, and where there are such ``cv`` and ``cv_se``.
    chosen : int
    frequencies : (L, p) array or None
        Share of random halves in which a column is selected.
    numbers : (L,) array or None
        Mean number of columns that are selected in a half at this lambda or a larger one.
    select, penalty, family : str
    null : float
        Log-likelihood of the intercept alone.
    inference : {"conditional", "debiased", "split"}
    split_p : (p,) array or None
        P-values over many splits.
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
    def of(cls, outcome: Outcome) -> Selection:
        """Take what a fit handed over."""
        path, criteria, halves = outcome.fitted.path, outcome.criteria, outcome.fitted.halves
        named = {name: getattr(criteria, name) for name in ("df", "aic", "bic", "ebic", "cv", "cv_se")}
        return cls(
            path.lambdas,
            path.intercepts,
            path.coefficients,
            path.loss,
            path.kkt,
            path.converged,
            {name: values for name, values in named.items() if values is not None},
            outcome.fitted.chosen,
            None if halves is None else halves[0],
            None if halves is None else halves[1],
            outcome.select,
            outcome.setup.penalty.name,
            outcome.family.name,
            outcome.null,
            outcome.inference,
            outcome.fitted.split_p,
        )

    @property
    def lam(self) -> float:
        """The lambda that was chosen."""
        return float(self.lambdas[self.chosen])

    @property
    def entry(self) -> Floats:
        """Largest lambda at which each column is selected; nan for never: (p,)."""
        selected = self.coefficients != 0.0
        first = self.lambdas[np.argmax(selected, axis=0)]
        return np.asarray(np.where(selected.any(axis=0), first, np.nan))


def make_refit(response: str, outcome: Outcome) -> Estimate | None:
    """Estimate on the selected columns; None where it could not be released."""
    refit, layout = outcome.fitted.refit, outcome.layout
    if refit is None:
        return None
    at = np.flatnonzero(refit.support)
    return Estimate(
        params=refit.params,
        cov=refit.cov,
        names=(INTERCEPT, *[layout.names[j] for j in at]),
        clients=("", *[layout.owners[j] for j in at]),
        terms=(INTERCEPT, *[layout.terms[j] for j in at]),
        response=response,
        nobs=layout.n - outcome.left_out - (outcome.n if outcome.inference == "split" else 0),
        df_model=float(len(at)),
        converged=True,
        llf=refit.llf,
        rsquared=_rsquared(outcome, refit.loss, refit=True),
        scale=refit.scale,
        privacy="none (no noise is added)",
        cov_type=information(outcome.family),
        blocks=client_blocks(layout),
        reasons={"rsquared": NO_RSQUARED},
    )


def information(family: DistributionSpec) -> str:
    """Name the information of standard errors; of a canonical link, the expected one is the observed."""
    return "observed" if family.canonical else "expected"


def make_debiased(response: str, outcome: Outcome) -> Estimate | None:
    """Debiased estimates of all columns; None where they were not asked for."""
    found, layout = outcome.fitted.debiased, outcome.layout
    if found is None:
        return None
    reason = "debiased estimates maximise no likelihood; that of the selected columns is .refit.llf"
    return Estimate(
        params=found.params,
        cov=found.cov,
        names=(INTERCEPT, *layout.names),
        clients=("", *layout.owners),
        terms=(INTERCEPT, *layout.terms),
        response=response,
        nobs=layout.n,
        df_model=float(layout.p),
        converged=True,
        scale=found.scale,
        privacy="none (no noise is added)",
        cov_type="debiased",
        blocks=client_blocks(layout),
        reasons={"llf": reason, "rsquared": "debiased estimates minimise no sum of squares"},
    )


def make_estimate(response: str, outcome: Outcome, refit: Estimate | None) -> Estimate:
    """Penalised estimate of the chosen lambda, with the covariance that it has."""
    layout, path, at = outcome.layout, outcome.fitted.path, outcome.fitted.chosen
    params = np.concatenate([[path.intercepts[at]], path.coefficients[at]])
    free = outcome.setup.unpenalised
    if free and refit is not None:
        params = refit.params
    convex = outcome.setup.penalty.convex and path.lambdas[at] > 0.0
    cov, split = None, outcome.inference == "split"
    if refit is not None and refit.cov is not None and not convex and not split:
        known = np.concatenate([[True], outcome.fitted.refit.support]) if outcome.fitted.refit else None
        cov = np.full((layout.p + 1, layout.p + 1), np.nan)
        cov[np.ix_(known, known)] = refit.cov  # type: ignore[arg-type]
    reason = BIASED.format(penalty=outcome.setup.penalty.name.replace("_", " ")) if convex else SPENT
    reason, kind = APART if split else reason, information(outcome.family)
    loss, chosen = float(path.loss[at]), int(np.count_nonzero(path.coefficients[at]))
    n = outcome.n or layout.n - outcome.left_out
    scale = None if refit is None else refit.scale
    llf = log_likelihood(outcome.family.name, loss, n, outcome.units.constant, scale)
    return Estimate(
        params=params,
        cov=cov,
        names=(INTERCEPT, *layout.names),
        clients=("", *layout.owners),
        terms=(INTERCEPT, *layout.terms),
        response=response,
        nobs=n,
        df_model=float(chosen),
        converged=bool(path.converged[at]) and (refit is None or refit.converged),
        convergence=f"violation of stationarity {path.kkt[at]:.1e} of lambda_max",
        llf=llf,
        rsquared=_rsquared(outcome, loss),
        scale=1.0 if refit is None else refit.scale,
        privacy="none (no noise is added)",
        cov_type=kind if free else f"{kind}, conditional on selection",
        blocks=client_blocks(layout),
        reasons={"cov_params": reason, "rsquared": NO_RSQUARED},
        llf_is_maximum=free,
    )


def mean_predictors(estimate: Estimate, outcome: Outcome) -> dict[str, float]:
    """Mean linear predictor of each client's block, of a fit with missing blocks."""
    if outcome.observed is None:
        return {}
    parts = outcome.layout.split(estimate.params[1:] * outcome.observed.means)
    return {client: float(part.sum()) for client, part in parts.items()}


def _rsquared(outcome: Outcome, loss: float, *, refit: bool = False) -> float | None:
    if outcome.observed is not None:
        return outcome.observed.refit_rsquared if refit else outcome.observed.rsquared
    if outcome.family.name != "Gaussian" or outcome.inference == "split":
        return None
    return 1.0 - 2.0 * loss / outcome.units.sd**2


def client_blocks(layout: Layout) -> tuple[ClientBlock, ...]:
    """List what each client brought, the response holder first where it holds no columns."""
    rows = [] if layout.active in layout.clients else [ClientBlock(layout.active, 0, layout.n, 0.0)]
    pairs = zip(layout.clients, layout.sizes, strict=True)
    has = {client: len(layout.kept[client]) for client in layout.clients}
    return (*rows, *[ClientBlock(k, size, has[k], 1.0 - has[k] / layout.n) for k, size in pairs])
