"""The model: arguments of the analyst, and the fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from statsmodels.genmod.cov_struct import Autoregressive, Exchangeable, Independence

from fedstat.docstrings import inherits_signature
from fedstat.errors import ConvergenceWarning, ModelError, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.clusters import STRUCTURES
from fedstat.models import checks
from fedstat.models.gee.protocol import CORRECTIONS, GEEScoring
from fedstat.models.gee.results import GEEResults
from fedstat.models.gee.steps import FAMILY, GEERequest
from fedstat.models.horizontal.model import HorizontalModel, OwnFitsPlan
from fedstat.models.rows.estimated_weights import STACKED
from fedstat.models.run import Call, FitAttempt, run_fit


class GEEPlan(OwnFitsPlan):
    """Facts about estimating equations before they are solved."""

    own_fit = "its number of clusters and the means and standard deviations of its columns"

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of the equations."""
        return [IterationLoop(("sum_scores",), int(self.given["maxiter"]) + 1)]

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown."""
        yield from super().notes(expected)
        yield "The rules on numbers of clusters need the rows as well."


STATSMODELS: Mapping[type, Any] = {
    Independence: "independence",
    Exchangeable: "exchangeable",
    Autoregressive: "ar1",
}
"""Working correlations of statsmodels, by their class."""


class FederatedGEE(HorizontalModel):
    """Generalized estimating equations for clusters of rows inside sites, such as visits of persons.

    Estimating functions and their derivative are sums over clusters, and so are the moments of the working
    correlation: the estimate is that of the pooled table, if no cluster has rows at two sites. Make one with
    :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`.

    Attributes
    ----------
    groups, cov_struct, time
        As given.

    References
    ----------
    Liang and Zeger, "Longitudinal data analysis using generalized linear models", Biometrika 73 (1986).

    Examples
    --------
    >>> import fedstat as fs, statsmodels.api as sm
    >>> table = fs.datasets.make_hospitals().assign(ward=lambda t: t.index // 4)
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FederatedGEE.from_formula(
    ...     "num > 0 ~ age + sex", partition, groups="ward", family=sm.families.Binomial()
    ... )
    >>> model.fit().params.round(2).to_dict()
    {'Intercept': -4.24, 'age': 0.06, 'sex': 1.48}
    """

    model_name: ClassVar[str] = "Federated GEE"
    _weights_mean: ClassVar[str] = "for a cluster that counts more or less than others"
    method_name: ClassVar[str] = "Fisher scoring on site sums"
    _goes_on = True
    _plan = GEEPlan

    @checks.takes_parsed
    @inherits_signature(HorizontalModel.__init__, without=["freq_weights", "var_weights"])
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        groups: str | None = None,
        cov_struct: Literal["independence", "exchangeable", "ar1"]
        | Independence
        | Exchangeable
        | Autoregressive = "independence",
        time: str | None = None,
        weights: Any = None,
        **settings: Any,
    ) -> None:
        given = [role for role in ("freq_weights", "var_weights") if settings.get(role) is not None]
        if given:
            raise ModelError(f"{given[0]}: estimating equations have one kind of weights; use weights")
        if not isinstance(groups, str):
            raise ModelError("groups: expected the column that names the clusters, such as groups='patient'")
        cov_struct = STATSMODELS.get(type(cov_struct), cov_struct)
        checks.check_choice("cov_struct", cov_struct, STRUCTURES)
        if cov_struct == "ar1" and time is None:
            raise ModelError("time: cov_struct='ar1' needs the column that orders the rows of a cluster")
        if formula.response.startswith("cbind"):
            raise ModelError("formula: FederatedGEE needs one row for each outcome, not counts by cbind(...)")
        self.groups, self.cov_struct, self.time = groups, cov_struct, time
        column = weights if isinstance(weights, str) else None
        self._weigh(weights if column is None else None, formula)
        self._groups, self._label_roles = (groups,), {time: "time", groups: "groups"}
        labels = [groups, *([time] if time is not None else []), *settings.pop("labels", ())]
        super().__init__(formula, partition, labels=labels, var_weights=column, **settings)

    @classmethod
    @checks.checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            As for :meth:`FederatedGLM.from_formula`.
        partition : ClientPartition
            In the horizontal layout.
        groups : str
            Column that names the clusters. Rows of the same name at two sites are two clusters;
            the summary counts such names at its top.
        cov_struct : {"independence", "exchangeable", "ar1"}
            Working correlation within clusters, or that of statsmodels, such as
            ``sm.cov_struct.Exchangeable()``. With "ar1" successive rows, in the order of `time`, are taken
            as equally spaced.
        time : str, optional
            Column by which "ar1" orders the rows of a cluster. Other structures have no order; rows without a
            time are left out all the same, so that fits with and without an order are of the same rows.
        weights : str, or balance or result of a TreatmentEffect, or list of these, optional
            Column of weights, such as the inverse probability of selection; or the inverse probability
            weights of a propensity model that was fitted on the same rows, as for
            :meth:`FederatedGLM.from_formula`. Weights must be equal within clusters unless the working
            correlation is "independence".
        family, offset, exposure, labels, complete, missing, subset
            As for :meth:`FederatedGLM.from_formula`.

        Raises
        ------
        FormulaError, DesignError, PolicyError
            As for :meth:`FederatedGLM.from_formula`.
        ModelError
            An argument is missing, or has no meaning here.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals()
        >>> table = table.assign(ward=table.index // 4, visit=table.index % 4)
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fs.FederatedGEE.from_formula(
        ...     "num ~ age", partition, groups="ward", time="visit", cov_struct="ar1"
        ... ).cov_struct
        'ar1'
        """
        return super().from_formula(formula, partition, **settings)

    @property
    def _settings(self) -> dict[str, Any]:
        """Arguments that make the same model of another formula."""
        roles = {"weights" if name == "var_weights" else name: column for name, column in self._roles.items()}
        own = {"groups": self.groups, "cov_struct": self.cov_struct, "time": self.time}
        return {"family": self.family, **own, **roles}

    @property
    def _request(self) -> GEERequest:
        order = self.time if self.cov_struct == "ar1" else None
        return GEERequest(self.distribution.to_json(), self.groups, order or "", self.cov_struct)

    @checks.checks_arguments
    def fit(
        self,
        *,
        cov_type: Literal["kauermann_carroll", "bias_reduced", "robust", "naive", "stacked"] | None = None,
        use_t: bool | None = None,
        scale: float | None = None,
        maxiter: int = 60,
        tol: float = 1e-8,
        local: bool = True,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> GEEResults:
        """Solve the estimating equations of all sites' clusters.

        Parameters
        ----------
        cov_type : {"kauermann_carroll", "bias_reduced", "robust", "naive", "stacked"}, optional
            "kauermann_carroll", the default, corrects residuals for the leverage of clusters as Kauermann and
            Carroll (2001), "bias_reduced" by more, as Mancl and DeRouen (2001). "robust" is the sandwich of
            Liang and Zeger, the default of statsmodels, whose intervals are too short with fewer than about
            100 clusters of unequal size. "naive" supposes that the working correlation is the true one.
            "stacked" is the default with `weights` of a treatment: the sandwich that accounts for their
            estimation, while the others take them as known.
        use_t : bool, optional
            Whether tests and intervals are of Student's t, by default with a corrected covariance. With
            "kauermann_carroll" each coefficient's degrees of freedom are the effective number of its clusters
            less one, otherwise the clusters beyond the coefficients.
        scale : float, optional
            Dispersion; by default estimated, except for binary outcomes and counts, where it is one.
        maxiter : int
            Most evaluations of the equations.
        tol : float
            Length of the last step, in standard errors, and last change of the correlation.
        local : bool
            Whether every site also solves the equations of its own clusters and releases that fit, for the
            comparison of sites.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        GEEResults

        Raises
        ------
        EstimationError
            Columns are collinear, outcomes are separated, or a coefficient rests on one cluster.
        DesignError
            Two rows of a cluster have the same time, or different weights.
        PolicyError
            A site refuses, for instance because too few clusters have the same number of rows.

        Warns
        -----
        ConvergenceWarning
            The iteration did not converge.

        References
        ----------
        Mancl and DeRouen, "A covariance estimator for GEE with improved small-sample properties", Biometrics
        57 (2001).

        Kauermann and Carroll, "A note on the efficiency of sandwich covariance matrix estimation", JASA 96
        (2001).

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals().assign(ward=lambda t: t.index // 4)
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> model = fs.FederatedGEE.from_formula("num ~ age", partition, groups="ward")
        >>> fit = model.fit()
        >>> fit.clusters, fit.df.round().to_dict()
        (232, {'Intercept': 161.0, 'age': 166.0})
        """
        call = Call.of(self.fit, locals())
        checks.check_choice("cov_type", cov_type, (*CORRECTIONS, None))
        weighs = bool(self.question.propensities)
        settled: str = cov_type or (STACKED if weighs else "kauermann_carroll")
        if settled == STACKED and not weighs:
            raise ModelError("cov_type: 'stacked' is for weights of a treatment, and the model has none")
        checks.check_choice("use_t", use_t, (True, False, None))
        checks.check_integer("maxiter", maxiter, 1)
        checks.check_positive("tol", tol)
        if scale is not None:
            checks.check_positive("scale", scale)
        if cov_type == "naive" and (weighs or "var_weights" in self.weights):
            raise ModelError("cov_type: 'naive' has no meaning with weights; use 'robust'")
        student = CORRECTIONS[settled] != "CR0" if use_t is None else bool(use_t)
        alone = local and not weighs

        def estimate(model: FederatedGEE, attempt: FitAttempt) -> GEEResults:
            session = model._open_session(
                FAMILY, checks.check_masked(masked, len(model.sites), model._masks_wanted)
            )
            scoring = GEEScoring(session, model._request, model.distribution, maxiter, tol)
            fit = attempt.run(scoring.run(settled, scale, alone), session.masked_sites)
            if not fit.converged:
                warn(f"{model.model_name} did not converge after {maxiter} evaluations", ConvergenceWarning)
            return GEEResults._of(model, fit, student, attempt.ledger)

        return run_fit(self, call, estimate)
