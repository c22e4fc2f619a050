"""The model: arguments of the analyst, and the fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, Remedy, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import IterationLoop
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.lifetimes import LIFETIMES
from fedstat.models.aft.protocol import AFTNewton
from fedstat.models.aft.results import AFTResults
from fedstat.models.aft.steps import FAMILY, AFTRequest
from fedstat.models.checks import (
    check_choice,
    check_integer,
    check_masked,
    check_positive,
    checks_arguments,
    takes_parsed,
)
from fedstat.models.horizontal.clusters import clusters_of_formula
from fedstat.models.horizontal.model import HorizontalModel, OwnFitsPlan
from fedstat.models.run import Call, FitAttempt, run_fit


class AFTPlan(OwnFitsPlan):
    """Facts about a model of times before it is fitted."""

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of Newton's method; the model without covariates takes a part of them."""
        return [IterationLoop(("sum_scores",), 2 * int(self.given["maxiter"]))]


class FederatedAFT(HorizontalModel):
    """Accelerated failure time model over sites that hold different rows.

    ``log T = x'b + sigma W``: a unit of a column multiplies all times by exp(b). W has the distribution that
    is named: the smallest extreme value ("weibull", and "exponential" with sigma one), normal ("lognormal"),
    or logistic ("loglogistic"). Score and information are sums over rows, so that the estimate is that of
    R's ``survreg`` on the pooled table. All sites have one intercept and one sigma; the column of the sites
    in the formula, as ``C(hospital)``, gives each an intercept. Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula with ``Surv(...)`` on its left side.
    partition : ClientPartition
        In the horizontal layout.
    distribution : {"weibull", "exponential", "lognormal", "loglogistic"}
    **settings
        Those of :meth:`from_formula`. ``freq_weights`` are numbers of rows, ``var_weights`` the case weights
        of R's ``survreg(weights=)``; an offset is added to x'b.

    Attributes
    ----------
    dist : str
        The `distribution`, by the name that R's argument has.

    References
    ----------
    Kalbfleisch and Prentice, "The Statistical Analysis of Failure Time Data", Wiley (2002), chapter 3.

    Burridge, "A note on maximum likelihood estimation for regression models using grouped data", Journal of
    the Royal Statistical Society B 43 (1981).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> model = fs.FederatedAFT.from_formula("Surv(months, died) ~ age + C(arm)", partition)
    >>> model.fit().ratios().round(2)["time_ratio"].to_dict()
    {'age': 0.97, 'C(arm)[T.surgery]': 1.54}
    """

    model_name: ClassVar[str] = "Federated AFT model"
    method_name: ClassVar[str] = "Newton's method"
    _default_family: ClassVar[Any] = sm_families.Binomial
    _times = True
    _goes_on = True
    _plan = AFTPlan

    @takes_parsed
    @inherits_signature(HorizontalModel.__init__, without=("family", "exposure"))
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        distribution: Literal["weibull", "exponential", "lognormal", "loglogistic"] = "weibull",
        **settings: Any,
    ) -> None:
        check_choice("distribution", distribution, tuple(LIFETIMES))
        if not formula.intercept:
            raise FormulaError(
                "formula: the constant of the times is always part of this model; leave 0 or - 1 out"
            )
        if formula.strata:
            (first, *_) = formula.strata
            raise FormulaError(
                f"formula: strata({first}) is for FederatedCox; all rows of this model have one sigma",
                remedy=Remedy(
                    "from_formula(formula.replace('strata(', 'C('), ...).fit()",
                    "Give levels different constants with C({column})",
                ).filled(column=first),
            )
        self.dist = distribution
        super().__init__(formula, partition, **settings)

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    @inherits_params(HorizontalModel.from_formula)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``Surv(time, event) ~ terms``, or ``Surv(start, stop, event) ~ terms`` for rows that enter late;
            terms are those of other models over rows, and ``cluster(id)``.
        partition : ClientPartition
            In the horizontal layout.
        distribution : {"weibull", "exponential", "lognormal", "loglogistic"}
            Distribution of the times. Compare them by ``aic``.
        offset, freq_weights, var_weights, complete, labels, missing, subset
            As in :meth:`HorizontalModel.from_formula`.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, or an unknown column.
        DesignError
            The columns that it names cannot enter a model; see the message.
        PolicyError
            A site's owner does not allow it.

        Warns
        -----
        DataWarning
            Rows were left out.
        SpellingWarning
            Levels of a column differ by blanks or case alone.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> formula = "Surv(months, died) ~ age"
        >>> fs.FederatedAFT.from_formula(formula, partition, distribution="lognormal").dist
        'lognormal'
        """
        return super().from_formula(formula, partition, **settings)

    @checks_arguments
    def fit(
        self,
        *,
        cov_type: Literal["nonrobust", "robust", "cluster"] | None = None,
        cov_kwds: dict[str, str] | None = None,
        maxiter: int = 50,
        tol: float = 1e-8,
        local: bool = True,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> AFTResults:
        """Maximize the likelihood of all sites' rows.

        Parameters
        ----------
        cov_type : {"nonrobust", "robust", "cluster"}, optional
            "nonrobust" is the inverse information; "robust" the sandwich of the rows' scores, as
            ``survreg(robust=TRUE)``; "cluster" that of the clusters of ``cluster(id)`` in the formula, within
            sites, and the default where the formula names them. Scores are corrected for the leverage of
            clusters, and tests are Student's t on the effective number of clusters less one.
        cov_kwds : dict, optional
            ``{"correction": "CR0"}`` is the sandwich of clusters without a correction, with normal tests, as
            in R.
        maxiter : int
            Most steps of Newton's method, of the model without covariates and of the whole one.
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
        AFTResults

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
        >>> fit = fs.FederatedAFT.from_formula("Surv(months, died) ~ age", partition).fit(cov_type="robust")
        >>> fit.cov_type, fit.converged
        ('robust', True)
        """
        call = Call.of(self.fit, locals())
        kind, choice = clusters_of_formula(self.formula.clusters, cov_type, cov_kwds)
        check_integer("maxiter", maxiter, 1)
        check_positive("tol", tol)

        def estimate(model: FederatedAFT, attempt: FitAttempt) -> AFTResults:
            session = model._open_session(FAMILY, check_masked(masked, len(model.sites), model._masks_wanted))
            request = AFTRequest(model.dist, () if choice is None else model.formula.clusters)
            newton = AFTNewton(session, request, maxiter, tol)
            fit = attempt.run(newton.run(kind, local, choice), session.masked_sites)
            if not fit.converged:
                warn(f"{model.model_name} did not converge after {maxiter} steps", ConvergenceWarning)
            return AFTResults._of(model, fit, kind, attempt.ledger)

        return run_fit(self, call, estimate)
