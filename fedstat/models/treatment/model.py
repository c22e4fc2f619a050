"""The model: arguments of the analyst, and the fit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, ModelError, Remedy, warn
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.expression import parse_expression, quoted_name
from fedstat.federation.design.formula.parse import Formula, formula_of_terms, parse_pooled_formula
from fedstat.federation.design.formula.syntax_tree import Category, Column
from fedstat.federation.design.formula.terms import Term, parse_term, split_sides, term_text
from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import IterationLoop
from fedstat.federation.dry_run.synthetic import SyntheticRows
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.treatment import BALANCE, ESTIMANDS, LINKS, METHODS, PROPENSITY_LINKS
from fedstat.models.checks import (
    check_choice,
    check_integer,
    check_layout,
    check_masked,
    check_positive,
    checks_arguments,
    takes_parsed,
)
from fedstat.models.horizontal.model import HorizontalModel, OwnFitsPlan, pooled_columns
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.treatment.balance import BalanceResults
from fedstat.models.treatment.protocol import TreatmentNewton
from fedstat.models.treatment.results import TreatmentResults
from fedstat.models.treatment.steps import BY_SITE, FAMILY, OF_TARGET, TreatmentRequest

PROPENSITIES = ("common", "intercepts", "sites")
WITHOUT = ("freq_weights", "var_weights")
"""Settings of other models over rows, in place of which there is `weights`."""


class TreatmentPlan(OwnFitsPlan):
    """Facts about the effect of a treatment before it is estimated."""

    own_fit: ClassVar[str] = "potential means and their covariance"

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of both models, and those of linear equations."""
        return [IterationLoop(("sum_scores",), 2 * int(self.given["maxiter"]) + 8)]


class TreatmentEffect(HorizontalModel):
    """Effect of a treatment over sites that hold different rows: weighting, standardization, or both.

    A model of the treatment gives each row the probability of its arm (propensity score), and models of the
    outcome its mean in each arm. Both, and the potential means, are one chain of estimating equations, whose
    sums over rows are sums over sites. The estimates are those of the pooled table, and so are the standard
    errors, which account for the estimated models. Make one with :meth:`from_formula`.

    The effect is causal if, given the columns of the formula, the arm does not depend on the potential
    outcomes (no unmeasured confounding), every row could have been in every arm, and no row's outcome depends
    on the arm of others.

    Parameters
    ----------
    formula : Formula
        A parsed formula of the outcome.
    partition : ClientPartition
        In the horizontal layout.
    treatment : str
        Formula of the treatment.
    **settings
        Those of :meth:`from_formula`.

    Attributes
    ----------
    arm : str
        Column of the treatment.
    estimand, trim, target, link
        As given.

    References
    ----------
    Lunceford and Davidian, "Stratification and weighting via the propensity score in estimation of causal
    treatment effects", Statistics in Medicine 23 (2004).

    Li, Morgan and Zaslavsky, "Balancing covariates via propensity score weighting", Journal of the American
    Statistical Association 113 (2018).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> model = fs.TreatmentEffect.from_formula("died ~ age", partition, treatment="arm ~ age + C(stage)")
    >>> model.fit().params.round(3).to_dict()
    {'surgery - drugs': -0.165, 'mean drugs': 0.592}
    """

    model_name: ClassVar[str] = "Effect of a treatment"
    _weights_mean: ClassVar[str] = "for a row that was sampled with another probability"
    method_name: ClassVar[str] = "Estimating equations"
    _goes_on = True
    _plan = TreatmentPlan

    @takes_parsed
    @inherits_signature(HorizontalModel.__init__, without=WITHOUT)
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        treatment: str,
        family: Any = None,
        estimand: Literal["ATE", "ATT", "ATC", "ATO", "matching"] = "ATE",
        propensity: Literal["common", "intercepts", "sites"] = "common",
        link: Literal["logit", "probit"] = "logit",
        trim: float | None = None,
        target: str | None = None,
        weights: str | None = None,
        **settings: Any,
    ) -> None:
        check_choice("estimand", estimand, ESTIMANDS)
        check_choice("propensity", propensity, PROPENSITIES)
        check_choice("link", link, PROPENSITY_LINKS)
        if trim is not None and not (isinstance(trim, int | float) and 0.0 < trim < 0.5):
            raise ModelError(f"trim: expected a probability between 0 and 0.5, received {trim!r}")
        self.arm, self.estimand, self.trim = treatment_column(treatment), estimand, trim
        self.target, self.link = target or "", link
        if target is not None:
            check_choice("target", target, tuple(partition.sites))
            if estimand != "ATE" or trim is not None:
                raise ModelError(
                    "target: the rows of a site are a population by themselves; leave estimand and trim out"
                )
        columns, extra = pooled_columns(partition)
        if self.arm in formula.sites[0].columns:
            raise FormulaError(
                f"formula: {self.arm!r} is the treatment, and each arm has an outcome model of its own; "
                "leave it out on the right side"
            )
        left = [name for name in formula.response_columns if name in columns]
        of_arm = parse_pooled_formula(treatment, columns, (*extra, *left))
        if later := [name for name in left if name in of_arm.sites[0].columns]:
            raise FormulaError(f"treatment: {later[0]!r} is the outcome; leave it out on the right side")
        if formula.has_times and not self._times:
            raise FormulaError(
                f"formula: {formula.response!r} is for SurvivalEffect; potential means are of one outcome",
                remedy=Remedy("SurvivalEffect.from_formula('... ~ 1', ...).fit()", "Use {call}"),
            )
        for one in (formula, of_arm):
            of_times = (one.strata or one.has_times) and not (self._times and one is formula)
            offsets = one.offsets and (self._times or one is of_arm)
            if not one.intercept or offsets or one.clusters or of_times:
                raise FormulaError(
                    "formula: models of outcome and treatment have a constant, and no strata or times; the "
                    "outcome alone has an offset, and clusters are those of a fit (cov_type='cluster'); "
                    f"received {one.text!r}"
                )
        outcome, model = ([parse_term(text) for text in one.sites[0].terms] for one in (formula, of_arm))
        own = model
        if propensity != "common":
            model = with_sites(model, partition.site_column, propensity == "sites")
        text = of_arm.response if of_arm.has_categories else f"C({quoted_name(self.arm)})"
        whole = formula_of_terms(
            f"{formula.text}, {of_arm.text}",
            formula.response,
            distinct := list(dict.fromkeys([*outcome, *model, parse_term(text)])),
            {"": partition.pooled_columns},
            pooled=True,
            extra=(partition.site_column,),
        )
        require_margins(outcome, model, distinct)
        self._terms = tuple(tuple(map(term_text, terms)) for terms in (outcome, model, own))
        whole = replace(whole, offsets=formula.offsets, offset_columns=formula.offset_columns)
        super().__init__(
            whole,
            partition,
            family=sm_families.Gaussian() if family is None else family,
            var_weights=weights,
            **settings,
        )
        if link == "probit" and len(self.agreement.spec.levels[self.arm]) > 2:
            raise ModelError(
                f"link: a probit propensity model is of two arms, and {self.arm!r} has more",
                remedy=Remedy("from_formula(..., link='logit').fit()", "use {arguments}"),
            )
        if self.distribution.link not in LINKS or not self.distribution.canonical:
            raise ModelError(
                f"family: {self.distribution} is not available here",
                remedy=Remedy(
                    "from_formula(..., family='poisson').fit()",
                    "use 'gaussian', 'binomial' or 'poisson' with the usual link; standard errors do not "
                    "rest on the distribution",
                ),
            )

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    @inherits_params(HorizontalModel.from_formula)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula of the outcome and one of the treatment.

        Parameters
        ----------
        formula : str
            ``outcome ~ terms``, of the models of the outcome in each arm, without the treatment. Only
            ``method="ipw"`` does without their terms: ``"y ~ 1"``.
        partition : ClientPartition
            In the horizontal layout.
        treatment : str
            ``arm ~ terms``: the column of the treatment, of two levels or more, and the terms of the
            propensity model. The first level is the control; ``C(arm, levels=["usual", "new"]) ~ terms``
            chooses it.
        family : statsmodels family or str, optional
            Of the outcome: ``"gaussian"`` (default), ``"binomial"`` or ``"poisson"``, with the usual link.
        estimand : {"ATE", "ATT", "ATC", "ATO", "matching"}
            Population of the effect: all rows; those of the treated (the second arm) or of the controls; the
            rows of overlap, whose weights ``e (1 - e)`` are bounded and balance the columns exactly; or
            matched pairs, with ``min(e, 1 - e)``. A site refuses the last one if e is above one half in a
            few of its rows only, since the weights of the others are those of another estimand.
        propensity : {"common", "intercepts", "sites"}
            Coefficients of the propensity model: the same at all sites, an intercept for each site in
            addition, or a model of each site's own.
        trim : float, optional
            Leave rows out whose probability of an arm is below this bound, such as 0.1 (Crump et al. 2009).
        link : {"logit", "probit"}
            Of the propensity model; "probit" is of two arms.
        target : str, optional
            A site, whose rows are the population of the effect. Rows of all sites have the weight of their
            probability to be there, by a logistic model with the terms of the treatment (transport weights),
            so that an outcome may depend on the site by these columns only.
        weights : str, optional
            Column of sampling weights, by which all equations are multiplied, as Stata's ``pweights``.
        offset, exposure, complete, labels, missing, subset
            As in :meth:`HorizontalModel.from_formula`.

        Raises
        ------
        FormulaError
            A formula holds something that is not allowed, or an unknown column.
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
        >>> given = {"treatment": "arm ~ age + C(stage)", "estimand": "ATO"}
        >>> model = fs.TreatmentEffect.from_formula("died ~ 1", partition, **given)
        >>> model.arm, model.estimand
        ('arm', 'ATO')
        """
        if isinstance(partition, ClientPartition) and partition.layout == "vertical":
            raise of_different_columns(formula, settings.get("treatment"), partition)
        check_layout(cls.__name__, partition, "horizontal")
        columns, extra = pooled_columns(partition)
        # `.` is every column but outcome and treatment.
        arm = treatment_column(settings.get("treatment"))
        parsed = parse_pooled_formula(formula, columns, (*extra, arm) if arm in columns else extra)
        model = cls(parsed, partition, **settings)
        model._given = settings
        return model

    def _synthetic_rows(self, nested: tuple[str, ...] = (), **more: Any) -> SyntheticRows:
        levels = {self.arm: self.agreement.spec.levels[self.arm]}
        return super()._synthetic_rows(nested, leveled=levels, **more)

    def _request(self, method: str, clusters: tuple[str, ...] = ()) -> TreatmentRequest:
        """Make the request of an estimator; terms are named by their place."""
        listed = self.formula.sites[0].terms
        outcome, model, membership = (tuple(map(listed.index, texts)) for texts in self._terms)
        return TreatmentRequest(
            self.arm,
            outcome,
            model,
            self.distribution.to_json(),
            method,
            self.estimand,
            float(self.trim or 0.0),
            self.target,
            membership if self.target else (),
            self.link,
            clusters,
        )

    @checks_arguments
    def balance(
        self,
        *,
        overlap: bool = True,
        maxiter: int = 50,
        tol: float = 1e-8,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> BalanceResults:
        """Compare the arms before any outcome is read: columns without and with weights, and overlap.

        The propensity model is fitted, and each site sums the columns of its formula by arm. No sum depends
        on the outcome; rows that lack it are left out, as in :meth:`fit`.

        Parameters
        ----------
        overlap : bool
            Whether to count rows by arm and interval of the propensity score. Under a strict policy a site
            makes one such count, which is an evaluation of a model.
        maxiter : int
            Most steps of Newton's method.
        tol : float
            Length of the last step, in standard errors.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default as in :meth:`fit`.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        BalanceResults
            ``tidy()`` has standardized differences and ratios of variances, ``arms`` effective sample sizes,
            ``overlap`` the counts; ``plot_balance()`` and ``plot_overlap()`` draw them.

        Raises
        ------
        EstimationError
            Columns are collinear, or arms are separated (the error names the columns).
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> model = fs.TreatmentEffect.from_formula("died ~ 1", partition, treatment="arm ~ age + C(stage)")
        >>> model.balance().arms["rows"].to_dict()
        {'drugs': 432, 'surgery': 368}
        """
        call = Call.of(self.balance, locals())
        check_choice("overlap", overlap, (True, False))
        check_integer("maxiter", maxiter, 1)
        check_positive("tol", tol)

        def estimate(model: TreatmentEffect, attempt: FitAttempt) -> BalanceResults:
            session = model._open_session(FAMILY, check_masked(masked, len(model.sites), model._masks_wanted))
            newton = TreatmentNewton(session, model._request(BALANCE), maxiter, tol)
            fit = attempt.run(newton.balance(overlap), session.masked_sites)
            return BalanceResults._of(model, fit, attempt.ledger)

        return run_fit(self._without_outcome(), call, estimate)

    def _without_outcome(self) -> Self:
        """Return the model without its outcome, on the same rows; sites agree on them again."""
        if not self.question.response:
            return self
        model = copy.copy(self)
        labels = (*self.question.labels, *self.question.response_columns)
        model.question = replace(
            self.question, response="", response_columns=(), labels=tuple(dict.fromkeys(labels))
        )
        model.question.check()
        model._settle(self.partition, Ledger())
        return model

    @checks_arguments
    def fit(
        self,
        method: Literal["ipw", "aipw", "standardization", "ipw_ra"] = "aipw",
        *,
        cov_type: Literal["stacked", "cluster"] = "stacked",
        cov_kwds: dict[str, str] | None = None,
        maxiter: int = 50,
        tol: float = 1e-8,
        local: bool = True,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> TreatmentResults:
        """Estimate the potential means of all arms, and their differences.

        Parameters
        ----------
        method : {"aipw", "ipw", "standardization", "ipw_ra"}
            "ipw" weights the outcomes of each arm by the propensity model; "standardization" (g-formula)
            averages the predictions of the outcome models; "aipw" augments weighting by the outcome models,
            and "ipw_ra" weights these models. The last two need only one of the two models to be right.
        cov_type : {"stacked", "cluster"}
            Covariance of the stacked equations of rows; or of clusters within sites, or sites, times
            ``G / (G - 1)``, with Student's t.
        cov_kwds : dict, optional
            ``{"groups": column}`` with ``cov_type="cluster"``.
        maxiter : int
            Most steps of Newton's method, of each model.
        tol : float
            Length of the last step, in standard errors.
        local : bool
            Whether every site also estimates the effect from its own rows and releases it, for the comparison
            of sites.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        TreatmentResults

        Raises
        ------
        EstimationError
            Columns are collinear, arms or outcomes are separated (the error names the columns), or a few rows
            have nearly all weight.
        ModelError
            ``cov_type="cluster"`` without a column of clusters.
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
        >>> model = fs.TreatmentEffect.from_formula("died ~ age", partition, treatment="arm ~ age")
        >>> model.fit("ipw").converged
        True
        """
        call = Call.of(self.fit, locals())
        check_choice("method", method, METHODS)
        check_integer("maxiter", maxiter, 1)
        check_positive("tol", tol)
        if self.target and method in OF_TARGET and masked is not False and len(self.sites) > 1:
            raise ModelError(
                f"target: method={method!r} averages over the rows of {self.target!r} alone, which no mask "
                "hides",
                remedy=Remedy("fit(method='aipw')", "Use {arguments}, or masked=False"),
            )
        named = self._with_columns_of({"cov_kwds": cov_kwds})
        clusters = clusters_of_fit(named, cov_type, cov_kwds)

        def estimate(model: TreatmentEffect, attempt: FitAttempt) -> TreatmentResults:
            session = model._open_session(FAMILY, check_masked(masked, len(model.sites), model._masks_wanted))
            newton = TreatmentNewton(session, model._request(method, clusters), maxiter, tol)
            fit = attempt.run(newton.run(local), session.masked_sites)
            if not fit.converged:
                warn(f"{model.model_name} did not converge after {maxiter} steps", ConvergenceWarning)
            return TreatmentResults._of(model, fit, attempt.ledger)

        return run_fit(named, call, estimate)


def clusters_of_fit(model: HorizontalModel, cov_type: str, kwds: object) -> tuple[str, ...]:
    """Return the columns of clusters that a fit names, checked."""
    check_choice("cov_type", cov_type, ("stacked", "cluster"))
    if cov_type == "stacked":
        if kwds:
            raise ModelError("cov_kwds: they are for cov_type='cluster'")
        return ()
    groups = kwds.get("groups") if isinstance(kwds, dict) and set(kwds) == {"groups"} else None
    if not isinstance(groups, str):
        raise ModelError(
            "cov_kwds: cov_type='cluster' needs the column of the clusters, and takes no correction",
            remedy=Remedy("fit(cov_type='cluster', cov_kwds={{'groups': 'ward'}})", "as in {arguments}"),
        )
    if groups not in (*model.question.labels, model.partition.site_column):
        raise ModelError(f"cov_kwds: groups={groups!r} is no column of every site's table")
    return BY_SITE if groups == model.partition.site_column else (groups,)


def of_different_columns(formula: str, treatment: object, partition: ClientPartition) -> ModelError:
    """Make the error for sites that hold different columns, with the linear model that has the effect."""
    arm, held = treatment_column(treatment), [name for names in partition.columns.values() for name in names]
    both = [parse_pooled_formula(text, held, ()) for text in (formula, str(treatment))]
    text = (
        "treatment: each row of the equations needs treatment, outcome and columns, and here sites hold "
        "different columns of the same rows"
    )
    if both[0].has_times:
        return ModelError(f"{text}; no effect on times is available for them")
    columns = list(dict.fromkeys([arm, *(name for one in both for name in one.sites[0].columns)]))
    response = both[0].response
    remedy = Remedy(
        "impute(partition, {joint!r}).regress({response!r}, {columns!r})",
        "If the outcome is linear in them, the coefficient of {arm!r} in their joint model is the effect, as "
        "by standardization: {call}",
    ).filled(joint=f"{response} ~ {' + '.join(columns)}", response=response, columns=columns, arm=arm)
    return ModelError(text, remedy=remedy)


def treatment_column(treatment: object) -> str:
    """Return the column on the left side of a formula of the treatment; FormulaError if it is no column."""
    if not isinstance(treatment, str):
        raise ModelError("treatment: expected a formula of the treatment, such as 'arm ~ age + sex'")
    left = parse_expression(split_sides(treatment)[0], response=True)
    match left.tree:
        case Column(name=name) | Category(column=name):
            return name
    raise FormulaError(
        f"treatment: expected a column on the left side, as in 'arm ~ age', received {left.text!r}"
    )


def with_sites(terms: Sequence[Term], site_column: str, products: bool) -> list[Term]:
    """Add an intercept for each site to terms, and with `products` own coefficients."""
    site = f"C({quoted_name(site_column)})"
    added = [parse_term(site), *(parse_term(f"{site}:{term_text(term)}") for term in terms if products)]
    return [*terms, *added]


def require_margins(outcome: Sequence[Term], model: Sequence[Term], both: Sequence[Term]) -> None:
    """Require the parts of every product, as far as the other formula has them.

    Both models have their columns in one design, where a product is coded by the terms that it is next to.
    """
    known = {frozenset(factor.text for factor in term) for term in both}
    for terms in (outcome, model):
        own = {frozenset(factor.text for factor in term) for term in terms}
        for term in terms:
            texts = frozenset(factor.text for factor in term)
            for factor in texts if len(texts) > 1 else ():
                if (part := texts - {factor}) in known - own:
                    raise FormulaError(
                        f"formula: {term_text(term)!r} stands without {':'.join(sorted(part))!r}, which the "
                        f"other formula has. Write {' * '.join(sorted(texts))} in both"
                    )
