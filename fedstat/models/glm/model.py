"""Federated generalized linear models: arguments, dry run, and fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_signature
from fedstat.errors import ConvergenceWarning, ModelError, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.dry_run.synthetic_rows import SYNTHETIC_GROUPS
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.checks import (
    check_choice,
    check_masked,
    check_positive,
    check_whole,
    checks_arguments,
    kind_of,
)
from fedstat.models.explain import ForecastPlan
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.overdispersion import Overdispersion, estimate_alpha, with_alpha
from fedstat.models.glm.protocol import Newton, NewtonOptions, SumsRequest
from fedstat.models.glm.results import GLMResults, OLSResults
from fedstat.models.glm.steps import FAMILY
from fedstat.models.glm.variance import (
    CovarianceChoice,
    Variance,
    cluster_sums,
    clustered,
    leveraged_sums,
    linearised,
    model_based,
    sandwich,
    sites_as_clusters,
)
from fedstat.models.horizontal.model import HorizontalModel, warn_of_far_sites
from fedstat.models.horizontal.session import UNTOLD
from fedstat.models.run import Call, FitAttempt, run_fit

# ----------------------------------------------------------------------------------------------------
# Dry run of a federated GLM: its loops, and what its releases disclose.


class GLMPlan(ForecastPlan):
    """What is known of a federated GLM before it is fitted."""

    guessed: ClassVar[frozenset[str]] = frozenset({"list_clusters", "sum_clusters"})

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        strata = (given["cov_kwds"] or {}).get("strata")
        self.nested = () if strata is None else (strata,)

    def loops(self, course: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of Newton's method, also of that with alpha among its coefficients."""
        fits, limit = sum("start" in steps for steps in course.rounds), int(self.given["maxiter"])
        # Without the sites' own fits there is one more, at a point that needs no coefficients.
        newton = IterationLoop(("sum_scores",), fits * (limit + (not self.given["local"])), fits)
        if self.given["rounds"] is not None:
            return []
        return [newton, *([IterationLoop(("sum_nb2",), limit)] if self.given["alpha"] is not None else [])]

    def learned(self, forecast: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Say what a site's own fit tells."""
        if any(entry.step == "fit_alone" for entry in forecast.course.entries):
            yield (
                "Coordinator",
                "learns every site's own fit, with the means and deviations of its columns. local=False "
                "leaves it out, and with it the comparison of the sites.",
            )

        if any(entry.step == "sum_leveraged" for entry in forecast.course.entries):
            yield (
                "Sites",
                "learn the inverse information of all sites' rows together; what is left of it without their "
                "own is the sum over the others.",
            )

    def notes(self, forecast: ExpectedReleases) -> Iterator[str]:
        """Say what is not known."""
        if self.given["rounds"] is not None:
            yield f"rounds={self.given['rounds']} fixes the number of evaluations."
        if self.given["cov_type"] in ("cluster", "survey"):
            yield (
                "How many clusters there are is not known in advance: sizes marked '?' are those of "
                f"{SYNTHETIC_GROUPS} clusters a site."
            )
        if self.given["local"]:
            yield "A site whose own fit fails says why in a text, which takes some bytes more."
        yield UNTOLD


# ----------------------------------------------------------------------------------------------------
# Federated generalized linear models: their arguments, checked, and their fits.

CovType: TypeAlias = Literal["nonrobust", "HC0", "HC1", "HC2", "HC3", "cluster", "survey"]
COV_TYPES = get_args(CovType)
POWERS = {"HC2": 1, "HC3": 2}
"""Of one less a row's leverage, by which its squared residual is divided."""


class FederatedGLM(HorizontalModel):
    """Generalized linear model over sites that hold different rows: the fit of the pooled table.

    Per round every site returns the score and the information of its rows; their sums are those of the pooled
    table, and so are the estimates, standard errors and tests (Wu et al. 2012, for any family and link).
    Every fit compares the sites as well; see :attr:`GLMResults.heterogeneity`.

    Make one with :meth:`from_formula`.

    References
    ----------
    Wu, Jiang, Kim, Ohno-Machado, "Grid Binary LOgistic REgression (GLORE)", JAMIA 19 (2012).

    Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS (2017).

    Examples
    --------
    >>> import fedstat as fs, statsmodels.api as sm
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FederatedGLM.from_formula("num ~ age + sex", partition, family=sm.families.Poisson())
    >>> model.fit().params.round(2).to_dict()
    {'Intercept': -2.91, 'age': 0.04, 'sex': 1.04}
    """

    model_name: ClassVar[str] = "Federated GLM"
    _goes_on = True
    _plan = GLMPlan
    _results: ClassVar[type[GLMResults]] = GLMResults

    @checks_arguments
    def fit(
        self,
        *,
        cov_type: CovType = "nonrobust",
        cov_kwds: dict[str, str] | None = None,
        scale: float | Literal["X2", "dev"] | None = None,
        alpha: Literal["ml"] | None = None,
        use_t: bool | None = None,
        rounds: int | None = None,
        maxiter: int = 50,
        tol: float = 1e-8,
        local: bool = True,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> GLMResults:
        """Maximise the likelihood of all sites' rows.

        Parameters
        ----------
        cov_type : {"nonrobust", "HC0", "HC1", "HC2", "HC3", "cluster", "survey"}
            Inverse information; sandwich; the same times n / (n - p), which statsmodels' GLM leaves out; with
            squared residuals over 1 - h, or over its square, h the leverage (MacKinnon and White 1985), by
            one more round, in which sites are told the inverse information of all and keep leverages;
            clustered, with statsmodels' correction; or linearised for a stratified, clustered sample.
        cov_kwds : dict, optional
            "cluster": ``{"groups": column}``, where the column that names the sites makes them the clusters.
            "survey": ``{"clusters": column, "strata": column}``, strata may be left out. Columns other
            than that of the sites must be among the model's `labels`.
        scale : float, "X2" or "dev", optional
            Dispersion: a value, Pearson's statistic or the deviance over the residual degrees of freedom.
            By default 1 for Binomial, Poisson and NegativeBinomial, and "X2" otherwise.
        alpha : "ml", optional
            Estimate the alpha of the family NegativeBinomial with log link by maximum likelihood, from the
            one given; standard errors of cov_type "nonrobust" account for it.
        use_t : bool, optional
            Tests and intervals of Student's t, on the number of clusters less one, on that of a survey's
            clusters less its strata, or else on `df_resid`. By default for "cluster" and "survey", and where
            the dispersion is estimated, as in R and in statsmodels' OLS. False gives normal ones, the default
            of statsmodels' GLM: with eight clusters they cover .86.
        rounds : int, optional
            Take so many Newton steps from the mean of the sites' own fits and stop there: an estimate that is
            as efficient in large samples, for sites where every round is a decision.
        maxiter : int
            Most evaluations.
        tol : float
            Stop when Newton's step is below, in standard errors.
        local : bool
            Whether every site also fits its own rows and releases that fit, with the means and deviations of
            its columns: the start of the iteration, and the comparison of the sites.
        masked : bool, optional
            Whether sites hide their parts of all sums by pairwise masks (Bonawitz et al. 2017), which cancel
            in the total: the coordinator learns what all sites add up to, and no part. The fit is the same.
            By default where there are three sites or more; of two each can tell the other's part, and they
            mask where an owner lets no sum leave otherwise. It costs one round; what compares single sites'
            parts (the fit without each site) needs False. Own fits are in clear all the same, and unless
            an owner lets no sum leave otherwise the sums that transforms such as ``center()`` need.
        progress : bool, optional
            Tell how far the computation has come (:func:`fedstat.progress`).

        Returns
        -------
        GLMResults

        Raises
        ------
        ModelError
            An argument has no meaning here.
        EstimationError
            Columns are collinear or the outcomes separated, and which; or no step is possible.
        PolicyError
            A site refuses.

        Warns
        -----
        ConvergenceWarning
            The iteration stopped before its tolerance.
        UnitsWarning
            Mean or spread of a column at one site is far from those at all others, as sites tell them with
            their own fits (`local`); without these, masked sums hide them.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> model = fs.FederatedGLM.from_formula("num ~ age + sex", partition)
        >>> model.fit(cov_type="cluster", cov_kwds={"groups": "hospital"}).df_inference
        3.0
        """
        call = Call.of(self.fit, locals())
        check_choice("cov_type", cov_type, COV_TYPES)
        check_positive("tol", tol)
        check_whole("maxiter", maxiter, 1)
        if rounds is not None:
            check_whole("rounds", rounds, 1)
            if not local:
                raise ModelError("rounds: it starts from the sites' own fits, which local=False leaves out")
        if not isinstance(scale, str):
            scale = None if scale is None else float(scale)
        elif scale not in ("X2", "dev"):
            raise ModelError(f"scale: expected a number, 'X2' or 'dev', received {scale!r}")
        self._check_alpha(alpha, cov_type)
        choice = self._choose_covariance(cov_type, {} if cov_kwds is None else cov_kwds)

        def estimate(model: FederatedGLM, attempt: FitAttempt) -> GLMResults:
            hidden = check_masked(masked, len(model.sites), model._masks_wanted)
            session = model._open_session(FAMILY, hidden)
            newton = Newton(session, model.distribution, NewtonOptions(maxiter, tol, rounds), scale)
            if alpha is None:
                protocol = model._maximise(newton, choice, local)
            else:
                protocol = model._maximise_with_alpha(newton, local)
            fit, variance, over = attempt.run(protocol, session.masked_sites)
            result = model._results._of(
                model, fit, variance, choice, newton.estimates_dispersion, use_t, attempt.ledger, over
            )
            warn_of_far_sites(model.agreement, fit.coordinates.design.names, fit.coordinates.own)
            if not fit.converged:
                warn(f"the fit did not converge: {fit.reason}", ConvergenceWarning)
            return result

        return run_fit(self, call, estimate)

    def _choose_covariance(self, cov_type: str, kwds: object) -> CovarianceChoice:
        """Check the columns of clusters and strata."""
        if not isinstance(kwds, dict):
            raise ModelError(
                f"cov_kwds: expected {{'groups': 'column'}} or the like, received {kind_of(kwds)}"
            )
        allowed = {"cluster": {"groups"}, "survey": {"clusters", "strata"}}.get(cov_type, set())
        if not set(kwds) <= allowed:
            raise ModelError(
                f"cov_kwds: cov_type={cov_type!r} takes {sorted(allowed) or 'none'}, received {sorted(kwds)}"
            )
        clusters = kwds.get("groups", kwds.get("clusters"))
        if cov_type in ("cluster", "survey") and clusters is None:
            key = "groups" if cov_type == "cluster" else "clusters"
            raise ModelError(
                f"cov_kwds: cov_type={cov_type!r} needs the column of the clusters in two places: "
                f"from_formula(..., labels=['ward']) and fit(cov_type={cov_type!r}, "
                f"cov_kwds={{{key!r}: 'ward'}}), "
                "with your column's name for 'ward'"
                + ("; the column that names the institutions needs no label" * (cov_type == "cluster"))
            )
        known = (
            None,
            *self.question.labels,
            *([self.partition.site_column] if cov_type == "cluster" else []),
        )
        for role, name in kwds.items():
            if not isinstance(name, str | None):
                raise ModelError(
                    f"cov_kwds: expected the name of a column as {role!r}, received {kind_of(name)}; the "
                    "values must be a column of the sites' own tables, named here and in "
                    "from_formula(..., labels=[...])"
                )
            if name not in known:
                raise ModelError(
                    f"cov_kwds: column {name!r} is not among the model's labels; name it in both places: "
                    f"from_formula(..., labels=[{name!r}]) and fit(cov_type={cov_type!r}, "
                    f"cov_kwds={{{role!r}: {name!r}}})"
                )
        return CovarianceChoice(cov_type, clusters, kwds.get("strata"))

    def _check_alpha(self, alpha: str | None, cov_type: str) -> None:
        if alpha is None:
            return
        spec = self.distribution
        if alpha != "ml" or (spec.name, spec.link) != ("NegativeBinomial", "Log"):
            raise ModelError(
                f"alpha: expected 'ml' with the family NegativeBinomial and the log link, received {alpha!r} "
                f"with {spec}; a known alpha belongs to the family"
            )
        if cov_type != "nonrobust":
            raise ModelError(f"alpha: 'ml' goes with cov_type='nonrobust', received {cov_type!r}")

    def _maximise(
        self, newton: Newton, choice: CovarianceChoice, local: bool
    ) -> FitProtocol[tuple[GLMFit, Variance, Overdispersion | None]]:
        # Sites as clusters need the products of their scores only, which masks can hide.
        by_site = choice.cov_type == "cluster" and choice.clusters == self.partition.site_column
        wanted = SumsRequest(meat=choice.cov_type in ("HC0", "HC1"), between=by_site)
        fit = yield from newton.run(wanted, local=local)
        return fit, (yield from self._covariance(newton, fit, choice)), None

    def _maximise_with_alpha(
        self, newton: Newton, local: bool
    ) -> FitProtocol[tuple[GLMFit, Variance, Overdispersion | None]]:
        over = yield from estimate_alpha(newton)
        # The second fit is at a known alpha, and as any other; its covariance is not, see `over.cov`.
        fit = yield from with_alpha(newton, over.alpha).run(local=local)
        return fit, Variance(over.cov), over

    def _covariance(self, newton: Newton, fit: GLMFit, choice: CovarianceChoice) -> FitProtocol[Variance]:
        if fit.meat is not None:
            # statsmodels' GLM leaves the factor of HC1 out; its OLS has it. Weights count as rows.
            n = fit.total.weight
            factor = n / (n - len(fit.gamma)) if choice.cov_type == "HC1" else 1.0
            return Variance(factor * sandwich(fit, fit.meat))
        if choice.cov_type in POWERS:
            meat = yield from leveraged_sums(newton.session, fit, POWERS[choice.cov_type])
            return Variance(sandwich(fit, meat))
        if choice.clusters is None:
            return Variance(model_based(fit))
        if fit.between is not None:
            sums = sites_as_clusters(fit, len(self.sites))
        else:
            sums = yield from cluster_sums(newton.session, fit, choice.clusters, choice.strata)
        cov = clustered(fit, sums) if choice.cov_type == "cluster" else linearised(fit, sums)
        return Variance(cov, (sums.clusters, sums.strata))


class GLORE(FederatedGLM):
    """Logistic regression over sites that hold different rows; see :class:`FederatedGLM`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().params.round(2).to_dict()
    {'Intercept': -4.24, 'age': 0.06, 'sex': 1.48}
    """

    model_name: ClassVar[str] = "GLORE"
    _default_family: ClassVar[Any] = sm_families.Binomial


class FederatedOLS(FederatedGLM):
    """Least squares over sites that hold different rows, with the statements of statsmodels' OLS.

    The fit of :class:`FederatedGLM` with the Gaussian family, and R-squared, F tests, tests and intervals of
    Student's t, and intervals of new responses. With ``var_weights`` it is statsmodels' WLS with these
    weights; a row of ``freq_weights`` two stands for two rows.

    Make one with :meth:`from_formula`; ``family``, ``offset`` and ``exposure`` have no meaning here.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`.

    Examples
    --------
    >>> import fedstat as fs
    >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> result = fs.FederatedOLS.from_formula("num ~ age + sex", hospitals).fit()
    >>> bool(0.0 < result.rsquared_adj < result.rsquared < 1.0), bool(result.f_pvalue < 0.001)
    (True, True)
    """

    model_name: ClassVar[str] = "Federated OLS"
    _results: ClassVar[type[GLMResults]] = OLSResults

    @inherits_signature(HorizontalModel.__init__)
    def __init__(self, formula: Formula, partition: ClientPartition, **settings: Any) -> None:
        family = settings.get("family")
        if family is not None and not DistributionSpec.of(family).least_squares:
            raise ModelError(
                f"family: FederatedOLS is for a normal response, received {DistributionSpec.of(family)}; use "
                "FederatedGLM"
            )
        given = [role for role in ("offset", "exposure") if settings.get(role) is not None]
        if given or formula.offsets:
            raise ModelError(
                f"{given[0] if given else 'offset()'}: R-squared has no meaning beside one; subtract it from "
                "the response, or use FederatedGLM"
            )
        super().__init__(formula, partition, **settings)

    @inherits_signature(FederatedGLM.fit)
    def fit(self, **settings: Any) -> OLSResults:
        """Minimise the sum of squares over all sites' rows; see :meth:`FederatedGLM.fit`.

        Tests are of Student's t on `df_resid`, or on the number of clusters less one, also where errors are
        robust: statsmodels takes normal ones there unless it is told ``use_t=True``.

        Parameters
        ----------
        **settings
            Those of :meth:`FederatedGLM.fit`.

        Returns
        -------
        OLSResults
            With ``rsquared``, ``rsquared_adj``, ``fvalue``, ``f_pvalue``, ``ssr``, ``ess``, ``mse_resid``.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> model = fs.FederatedOLS.from_formula("num ~ age + sex", hospitals)
        >>> result = model.fit(cov_type="HC3")
        >>> result.use_t, int(result.df_resid), result.wald_test("age = 0, sex = 0").distribution
        (True, 917, 'F')
        """
        return cast(OLSResults, super().fit(**settings))
