"""The model: arguments of the analyst, and the fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, ModelError, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.checks import check_choice, check_integer, check_masked, check_positive, checks_arguments
from fedstat.models.cox.protocol import CoxFit, CoxNewton
from fedstat.models.cox.results import CoxResults
from fedstat.models.cox.steps import FAMILY, CoxRequest
from fedstat.models.explain import DryRunPlan
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.session import RULES_ON_ROWS
from fedstat.models.run import Call, FitAttempt, run_fit


class CoxPlan(DryRunPlan):
    """Facts about a Cox regression before it is fitted."""

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of Newton's method."""
        return [IterationLoop(("sum_scores",), int(self.given["maxiter"]))]

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what a site's own fit discloses."""
        if any(entry.step == "fit_alone" for entry in expected.dry_run.entries):
            yield (
                "Coordinator",
                "learns every site's own fit, with the standard deviations of its columns. local=False "
                "leaves this out, together with the comparison of the sites.",
            )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown."""
        yield RULES_ON_ROWS


class FederatedCox(HorizontalModel):
    """Cox's proportional hazards model over sites that hold different rows; each site has its own baseline.

    The partial likelihood is the sum of the sites' own, so that the estimate is that of
    ``coxph(... + strata(site))`` on the pooled table, from sums over rows. Make one with
    :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula with ``Surv(...)`` on its left side.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`.

    References
    ----------
    Therneau and Grambsch, "Modeling Survival Data: Extending the Cox Model", Springer (2000).

    Lin and Wei, "The robust inference for the Cox proportional hazards model", JASA 84 (1989).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> model = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(arm)", partition)
    >>> model.fit().params.round(2).to_dict()
    {'age': 0.04, 'C(arm)[T.surgery]': -0.51}
    """

    model_name: ClassVar[str] = "Federated Cox model"
    _default_family: ClassVar[Any] = sm_families.Binomial
    _times = True
    _goes_on = True
    _plan = CoxPlan

    @inherits_signature(HorizontalModel.__init__)
    def __init__(self, formula: Formula, partition: ClientPartition, **settings: Any) -> None:
        given = [role for role in ("family", "exposure", "var_weights") if settings.get(role) is not None]
        if given:
            raise ModelError(f"{given[0]}: a Cox model has none; it takes offset and freq_weights")
        if not formula.intercept:
            raise FormulaError(
                "formula: a Cox model has no intercept, and levels are compared with a reference; leave 0 or "
                "- 1 out"
            )
        if not any(one.terms for one in formula.sites):
            raise FormulaError(
                "formula: a Cox model needs a covariate, as in 'Surv(months, died) ~ age'; without one use "
                "KaplanMeier"
            )
        super().__init__(formula, partition, **settings)

    @checks_arguments
    def fit(
        self,
        *,
        cov_type: Literal["nonrobust", "robust", "cluster"] | None = None,
        ties: Literal["efron", "breslow"] = "efron",
        maxiter: int = 50,
        tol: float = 1e-8,
        local: bool = True,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> CoxResults:
        """Maximize the partial likelihood of all sites' rows.

        Parameters
        ----------
        cov_type : {"nonrobust", "robust", "cluster"}, optional
            "nonrobust" is the inverse information; "robust" the sandwich of the rows' scores; "cluster" that
            of the clusters of ``cluster(id)`` in the formula, within sites, and the default where the formula
            names them.
        ties : {"efron", "breslow"}
            How events at the same time count; Efron's is the more accurate.
        maxiter : int
            Most evaluations of the likelihood that increase it.
        tol : float
            Length of the last step, in standard errors.
        local : bool
            Whether every site also fits its own rows and releases that fit, for the comparison of sites.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        CoxResults

        Raises
        ------
        EstimationError
            There are no events, columns are collinear, or the maximum is at infinity (the error names the
            columns).
        ModelError
            ``cov_type="cluster"`` without ``cluster(...)`` in the formula.
        PolicyError
            A site refuses.

        Warns
        -----
        ConvergenceWarning
            The iteration did not converge.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> model = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition)
        >>> model.fit(ties="breslow", cov_type="robust").hazard_ratios().round(2)
             hazard_ratio  conf_low  conf_high
        age          1.04      1.03       1.05
        """
        call = Call.of(self.fit, locals())
        clusters = self.formula.clusters
        if cov_type is None:
            cov_type = "cluster" if clusters else "nonrobust"
        check_choice("cov_type", cov_type, ("nonrobust", "robust", "cluster"))
        check_choice("ties", ties, ("efron", "breslow"))
        check_integer("maxiter", maxiter, 1)
        check_positive("tol", tol)
        if cov_type == "cluster" and not clusters:
            raise ModelError(
                "cov_type: 'cluster' needs the clusters in the formula, as in 'Surv(months, died) ~ age + "
                "cluster(family)'"
            )
        return run_fit(self, call, FederatedCox._estimate, cov_type, ties, maxiter, tol, local, masked)

    def _estimate(
        self,
        attempt: FitAttempt,
        cov_type: str,
        ties: str,
        maxiter: int,
        tol: float,
        local: bool,
        masked: object,
    ) -> CoxResults:
        session = self._open_session(FAMILY, check_masked(masked, len(self.sites), self._masks_wanted))
        request = CoxRequest(
            ties, self.formula.strata, self.formula.clusters if cov_type == "cluster" else ()
        )
        newton = CoxNewton(session, request, maxiter, tol)
        fit: CoxFit = attempt.run(newton.run(cov_type, local), session.masked_sites)
        if not fit.converged:
            warn(f"{self.model_name} did not converge after {maxiter} evaluations", ConvergenceWarning)
        return CoxResults._of(self, fit, cov_type, attempt.ledger)
