"""Constructor, argument checks, layout and iterative fit that both VFEM models share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_args

import numpy as np

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import EstimationError, ModelError, Remedy
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.vertical_design import Design, MissingRule, design_request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.glm.distributions import DistributionSpec, Family
from fedstat.models.checks import check_choice, checks_arguments, takes_parsed
from fedstat.models.run import FitAttempt
from fedstat.models.vertical.exchange.patterns import (
    PatternExchange,
    SmallPatterns,
    remember_patterns,
    reuse_patterns,
)
from fedstat.models.vertical.joint_normal.edges import Between
from fedstat.models.vertical.layout import Layout, complete_at, lay_out
from fedstat.models.vertical.model import VerticalModel, read_roles
from fedstat.models.vfem.base_results import VFEMBaseResults
from fedstat.models.vfem.covariance.cross_products import CrossProductOptions
from fedstat.models.vfem.covariance.from_moments import CovType
from fedstat.models.vfem.covariance.protocol import CovarianceOptions
from fedstat.models.vfem.iteration.state import FAMILY, InitialValues, Iteration, IterationOptions, Progress
from fedstat.models.vfem.outcome import SessionArtifacts, VFEMOutcome, warn_of_merges, warn_unless_converged
from fedstat.models.vfem.protocol import IterativeResult
from fedstat.models.vfem.weighted import ALL_ENTITIES

# ----------------------------------------------------------------------------------------------------
# The entities and blocks that take part in a fit of VFEM, by method.


def make_layout(design: Design, method: str, *, partly: bool = False) -> Layout:
    """Lay out a fit by one of the methods "vfem", "cc", "impute" and "single".

    With `partly`, entities that have only some of a site's columns take part with these columns.

    Raises ModelError for "single" if the response holder has no columns, and EstimationError if complete
    entities are too few.
    """
    blocks = design.blocks
    if method == "single":
        blocks = tuple(b for b in blocks if b.site == design.active)
        if not blocks:
            raise ModelError(
                f"method='single' uses the columns of '{design.active}' alone, but that site holds none of "
                "the model's columns; use 'cc', 'impute' or 'vfem'"
            )
    complete = method in ("cc", "single")
    use = complete_at(blocks, design.n) if complete else np.ones(design.n, dtype=bool)
    layout = lay_out(design, blocks, use, filled=method == "impute", partly=partly)
    if layout.n <= layout.p + 1:
        have = "are complete at" if complete else "take part, with columns at"
        raise EstimationError(
            f"method='{method}': {layout.n} entities {have} {', '.join(layout.sites)}, but "
            f"{layout.p + 1} coefficients need more" + "; leave out columns or sites" * (not complete),
            remedy=ALL_ENTITIES if complete else None,
        )
    return layout


# ----------------------------------------------------------------------------------------------------
# Checks of the columns of weights and offset, with remedies.


def check_weights(roles: Mapping[str, str], exchange: str, correction: str | None) -> None:
    """Refuse weights and offset where a fit of a normal response does not support them."""
    if roles and exchange == "iterative":
        raise ModelError(
            f"{', '.join(roles)}: exchange='iterative' has none for a normal response",
            remedy=Remedy("fit(..., exchange='moments')", "leave {arguments}"),
        )
    if correction == "skewness" and roles.keys() - {"offset"}:
        raise ModelError(
            "correction='skewness' does not accept weights",
            remedy=Remedy("fit(..., correction='small-sample')", "use {arguments}, or none"),
        )


def check_variances(roles: Mapping[str, str], layout: Layout) -> None:
    """Refuse weights of variances where entities lack blocks."""
    if "var_weights" in roles and layout.missing.any():
        raise ModelError(
            "var_weights: if entities lack blocks, the likelihood is not a function of weighted sums",
            remedy=Remedy(
                "fit(..., method='cc')",
                "Use {arguments}, or freq_weights if a row represents several entities",
            ),
        )


# ----------------------------------------------------------------------------------------------------
# Constructor, layout and iterative fit that the models of a normal response and of other responses share.

Results = TypeVar("Results", bound=VFEMBaseResults[Any])
VFEMMethod: TypeAlias = Literal["vfem", "cc", "impute", "single"]
LinearMethod: TypeAlias = Literal["vfem", "weighted", "cc", "impute", "single"]


@dataclass(frozen=True, slots=True)
class IterativeOptions:
    """Options of an iterative fit; see :meth:`fedstat.VFEMRegression.fit`.

    If columns are correlated between sites, `small` states which missing patterns are too small.
    """

    method: VFEMMethod
    options: IterationOptions
    covariance: CovarianceOptions
    init: InitialValues = "zero"
    estimates_alpha: bool = False
    small: SmallPatterns | None = None


class VFEMModel(VerticalModel):
    """Base of the models of a normal response and of other responses."""

    family: ClassVar[str] = FAMILY

    @takes_parsed
    def __init__(
        self,
        formula: Formula,
        partition: Any,
        *,
        family: Family | None = None,
        between: Between | None = None,
        offset: str | None = None,
        freq_weights: str | None = None,
        var_weights: str | None = None,
        missing: MissingRule = "raise",
        coordinator: str | None = None,
    ) -> None:
        if family is not None:
            self.distribution = DistributionSpec.of(family)
        if between is not None:
            check_choice("between", between, get_args(Between))
        self.between: Between | None = between
        self._roles = read_roles(formula, partition, offset, freq_weights, var_weights)
        self._check_distribution()
        if not formula.intercept:
            raise ModelError(
                f"'{formula.text}' leaves out the intercept, but VFEM centers every block at its mean and "
                "needs one: drop '- 1' or '0 +'"
            )
        super().__init__(formula, partition, missing=missing, coordinator=coordinator)

    def _check_distribution(self) -> None:
        """Refuse families that the model does not support, and weights that the family does not."""
        raise NotImplementedError

    @classmethod
    @checks_arguments
    @inherits_params(VerticalModel.from_formula)
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **options: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula, partition
            As in :meth:`VerticalModel.from_formula`.
        family : statsmodels family
            Distribution of the response. VFEMRegression is for a normal one. VFEMGLM supports ``Binomial()``
            with the logit or probit link, ``Poisson()`` and ``NegativeBinomial(alpha=...)``.
        between : {"free", "independent"}, optional
            Covariance of the columns of two sites: estimated ("free"), or zero, as in the publication
            ("independent"). By default it is estimated if the data determine it. If two sites share fewer
            entities than they have columns, nothing in the data determines it. Blocks are then taken as
            independent, unless the other sites contradict this (likelihood ratio test at the level .05, or
            Wilks' test of one pair at .01, times the number of pairs). The first line of the summary names
            the sites and the p-value, and two columns have the values that the data leave open. Otherwise
            covariances are free, and the two sites count as independent given all other columns; intervals
            and p-values contain what the data leave open. What the sites release does not depend on this
            choice. ``exchange="iterative"`` requires "independent".
        missing, coordinator
            As in :meth:`VerticalModel.from_formula`.
        offset : str, optional
            Column at the response's site, added to the linear predictor with coefficient one. It is assumed
            to be independent of missing columns. Predictions are those at an offset of zero, as in
            statsmodels for new data. An entity without an offset counts as an entity without a response.
        freq_weights : str, optional
            Column at the response's site: the number of entities that a row represents. Every site that takes
            part receives the weights of its entities. A weight of zero counts as a missing response.
        var_weights : str, optional
            Column at the response's site: the variance of the response is the residual variance divided by
            the weight, as in weighted least squares. If entities lack blocks, this requires ``method="cc"``.

        Raises
        ------
        FormulaError, DesignError
            As :meth:`VerticalGLM.from_formula`.
        ModelError
            The family is not supported, or an argument has no meaning; weights with another family; or a
            column of weights or offset that is not at the response's site.

        Examples
        --------
        >>> import numpy as np
        >>> import fedstat as fs
        >>> frames = fs.datasets.load_sme()
        >>> holder = next(name for name, frame in frames.items() if "NPGR" in frame)
        >>> frames[holder]["cases"] = np.resize([1.0, 2.0], len(frames[holder]))
        >>> partition = fs.ClientPartition.from_frames(frames, on="enterprise_id")
        >>> model = fs.VFEMRegression.from_formula("NPGR ~ EMP + FOI", partition, freq_weights="cases")
        >>> bool(model.fit(cov_type="none").nobs == frames[holder]["cases"].sum())
        True
        """
        return super().from_formula(formula, partition, **options)

    def _layout(self, method: LinearMethod, *, partly: bool = False) -> Layout:
        check_choice("method", method, get_args(LinearMethod))
        layout = make_layout(self.design, method, partly=partly)
        return replace(layout, frequencies="freq_weights" in self._roles)

    def _open_weights(self) -> FitProtocol[None]:
        """Obtain the weights of the entities, in a fit, so that its plan has their release."""
        if "weights" in self._role_columns():
            (reply,) = yield [design_request(self.design.active, "open_weights", self._session)]
            weights = reply.arrays["weights"][self.design.response_keep]
            self.design = replace(self.design, weights=weights)

    def _names(self) -> dict[str, tuple[str, ...]]:
        return {block.site: block.names for block in self.design.blocks}

    def _covariance_options(self, cov_type: CovType, iteration: Iteration) -> CovarianceOptions:
        # Neither method needs products of two sites: no round requests them, and no dealer is needed.
        how = "none" if cov_type in ("expected", "none") else iteration.cross_products
        at, min_count = self._agreement.at, self.partition.min_count
        cross = CrossProductOptions(how, iteration.sketch, iteration.sketch_size, at, min_count)
        return CovarianceOptions(cov_type, self._names(), cross)

    def _begin(self, method: LinearMethod, *, partly: bool = False) -> Layout:
        """Lay out a fit.

        With `partly`, entities take part with the columns of a site that they have.
        """
        complete = method in ("cc", "single")
        conditioned = self._conditions and self.partition.partial == "condition"
        if conditioned and not partly and method in ("vfem", "impute"):
            self._warn_of_partial_blocks("This fit")
        layout = self._layout(method, partly=partly)
        layout = reuse_patterns(layout, self.partition, complete=complete, partly=partly)
        return self._with_dealer(layout)

    def _keep_division(self, layout: Layout, exchange: PatternExchange) -> None:
        """Save which entities this fit merged for later fits, and warn if they are many."""
        remember_patterns(layout, self.partition, exchange.plan, exchange.released, exchange.columns)
        warn_of_merges(exchange, layout.n)

    def _fit_by_iteration(
        self, attempt: FitAttempt, wanted: IterativeOptions, results: type[Results]
    ) -> Results:
        layout = self._begin(wanted.method, partly=wanted.small is not None)
        reporter = Progress(wanted.options)
        protocol = self._iterate(wanted, layout, reporter)
        try:
            found = attempt.run(protocol)
        finally:
            reporter.close()
        outcome = VFEMOutcome(
            method=wanted.method,
            cov_type=wanted.covariance.cov_type,
            init=wanted.init if isinstance(wanted.init, str) else "given",
            options=wanted.options,
            fit=found.fit,
            covariance=found.covariance,
            choice=found.choice,
        )
        if found.exchange is not None:
            self._keep_division(layout, found.exchange)
        held = SessionArtifacts(found.fitted, found.exchange, found.linear)
        result = results._of(self, layout, outcome, held, attempt.ledger)
        warn_unless_converged(result._fit)
        return result

    def _iterate(
        self, wanted: IterativeOptions, layout: Layout, report: Progress | None
    ) -> FitProtocol[IterativeResult]:
        """Fit by iteration, and compute the covariance of the estimates."""
        raise NotImplementedError
