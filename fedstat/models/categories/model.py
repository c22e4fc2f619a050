"""The models: arguments of the analyst, and the fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, ModelError, warn
from fedstat.federation.design.formula.expression import parse_expression
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.formula.syntax_tree import Category, Column
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import IterationLoop
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.tables.columns import LevelValue
from fedstat.kernels.categories import BASELINE, LINKS
from fedstat.models.categories.protocol import CategoryNewton
from fedstat.models.categories.results import CategoryResults, MultinomialResults, OrdinalResults
from fedstat.models.categories.steps import FAMILY, CategoryRequest
from fedstat.models.checks import (
    check_choice,
    check_integer,
    check_masked,
    check_positive,
    checks_arguments,
    takes_parsed,
)
from fedstat.models.horizontal.clusters import ClusterChoice
from fedstat.models.horizontal.model import HorizontalModel, OwnFitsPlan
from fedstat.models.run import Call, FitAttempt, run_fit

FAMILIES: Mapping[str, Callable[[], Any]] = {
    BASELINE: sm_families.Binomial,
    "logit": sm_families.Binomial,
    "probit": lambda: sm_families.Binomial(link=sm_families.links.Probit()),
    "cloglog": lambda: sm_families.Binomial(link=sm_families.links.CLogLog()),
}
COV_TYPES = ("nonrobust", "robust", "HC0", "HC1", "cluster")


class CategoryPlan(OwnFitsPlan):
    """Facts about a regression of categories before it is fitted."""

    checks = ("sum_separate_scores",)

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        # With offsets the model without covariates is fitted as well.
        self.fits = 2 if model.question.offsets else 1

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of Newton's method."""
        return [IterationLoop(("sum_scores",), self.fits * int(self.given["maxiter"]))]


Fitted = TypeVar("Fitted", bound=CategoryResults)


class CategoryModel(HorizontalModel, Generic[Fitted]):
    """A model of a response of categories; its classes differ in the link.

    Parameters
    ----------
    formula : Formula
        A parsed formula, with the column of the categories on its left side.
    partition : ClientPartition
        In the horizontal layout.
    levels : sequence, optional
        Categories of the response, in order.
    **settings
        Those of :meth:`from_formula`.

    Attributes
    ----------
    link : str
        "baseline", or the cumulative link.
    """

    link: str = BASELINE
    _categories = True
    _goes_on = True
    _plan = CategoryPlan
    _results: type[Fitted]

    @takes_parsed
    @inherits_signature(HorizontalModel.__init__, without=("family", "exposure", "var_weights"))
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        levels: Sequence[LevelValue] | None = None,
        **settings: Any,
    ) -> None:
        if not formula.intercept:
            raise FormulaError(
                "formula: thresholds, or intercepts of the categories, are always part of this model; "
                "leave 0 or - 1 out"
            )
        self._levels = levels
        # For owners who are asked, and in the dry run: the link by its name.
        super().__init__(formula, partition, family=FAMILIES[self.link](), **settings)

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``response ~ terms``, where the response is a column of text, categories or integers, or
            ``C(y, levels=["low", "high"])``; terms are those of other models over rows.
        partition : ClientPartition
            In the horizontal layout.
        levels : sequence, optional
            Categories of the response, in order, the reference first; a row with another one is an error.
            Numbers, and categories that all sites declare, have an order without it.
        offset : str, optional
            Column. With a cumulative link it is added to x'b, otherwise to the predictor of each category but
            the first.
        freq_weights : str, optional
            Column: a row of weight two counts as two rows.
        complete : sequence of str, optional
            Columns that the rows must have as well.
        labels : sequence of str, optional
            Columns of clusters that ``fit`` shall be able to use.
        missing : {"drop", "raise"}
            Rows that lack a value which the model reads are left out and counted, or an error.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, or an unknown column.
        DesignError
            A category has too few rows, or text has no order; see the message.
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
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> model = fs.FederatedMultinomial.from_formula("cp ~ age", partition, levels=[4, 1, 2, 3])
        >>> model.agreement.question.response
        'C(cp, levels=[4, 1, 2, 3])'
        """
        return super().from_formula(formula, partition, **settings)

    def _question(self, offset: str | None, labels: Sequence[str], complete: Sequence[str]) -> RowsRequest:
        question, levels = super()._question(offset, labels, complete), self._levels
        tree = parse_expression(question.response, response=True).tree
        if not isinstance(tree, Column | Category):
            raise FormulaError(
                f"formula: {type(self).__name__} needs a column of categories on the left side, as in "
                f"'grade ~ x' or 'C(grade, levels=[...]) ~ x', received {question.response!r}"
            )
        given = tree.levels if isinstance(tree, Category) else ()
        if levels is not None:
            plain = isinstance(levels, Sequence) and all(
                isinstance(one, bool | int | float | str) for one in levels
            )
            if isinstance(levels, str) or not plain or not 2 <= len(set(levels)) == len(levels):
                raise ModelError(
                    "levels: expected a list of two different categories or more, such as ['a', 'b']"
                )
            if given:
                raise ModelError("levels: the formula lists them already; give them once")
        return question.with_categories(levels or given)

    @checks_arguments
    def fit(
        self,
        *,
        cov_type: Literal["nonrobust", "robust", "HC0", "HC1", "cluster"] = "nonrobust",
        cov_kwds: dict[str, str] | None = None,
        maxiter: int = 50,
        tol: float = 1e-8,
        local: bool = True,
        check_assumptions: bool = True,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> Fitted:
        """Maximize the likelihood of all sites' rows.

        Parameters
        ----------
        cov_type : {"nonrobust", "robust", "HC0", "HC1", "cluster"}
            "nonrobust" is the inverse observed information; "HC0" the sandwich of the rows' scores; "HC1", or
            "robust", the same times n / (n - q); "cluster" that of clusters within sites.
        cov_kwds : dict, optional
            "cluster": ``{"groups": column}``; the column that names the sites makes them the clusters. Scores
            are corrected for the leverage of clusters, and tests are Student's t on the effective number of
            clusters less one. With ``"correction": "CR1"`` they have statsmodels' correction, and tests are
            normal.
        maxiter : int
            Most steps of Newton's method.
        tol : float
            Length of the last step, in standard errors.
        local : bool
            Whether every site also fits its own rows and releases that fit, for the comparison of sites.
        check_assumptions : bool
            Whether to test with the fit, in one more round, that coefficients are the same at all thresholds;
            categories without an order have no such assumption. The summary begins with a test that fails at
            the level 0.01. If a site refuses the sums, the fit stands, and a note says that there is no test.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        OrdinalResults or MultinomialResults

        Raises
        ------
        EstimationError
            A category has no rows, columns are collinear, or the categories are separated (the error names
            them).
        ModelError
            An argument is invalid here.
        PolicyError
            A site refuses. With ordered categories and counted products, such as under ``Policy.strict()``,
            two levels need enough rows together within each category: merge levels or categories, drop a
            term, or use :class:`FederatedMultinomial`, whose sums do not separate the categories.

        Warns
        -----
        ConvergenceWarning
            The iteration did not converge.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit(cov_type="robust")
        >>> fit.cov_type, fit.converged
        ('HC1', True)
        """
        call = Call.of(self.fit, locals())
        check_choice("cov_type", cov_type, COV_TYPES)
        check_integer("maxiter", maxiter, 1)
        check_positive("tol", tol)
        named = self._with_columns_of({"cov_kwds": cov_kwds})
        clusters = named._check_groups(cov_type, {} if cov_kwds is None else cov_kwds)
        by_site = clusters is not None and clusters.groups == self.partition.site_column
        kind = "HC1" if cov_type == "robust" else "sites" if by_site else cov_type
        columns = (clusters.groups,) if kind == "cluster" and clusters is not None else ()

        def estimate(model: CategoryModel[Fitted], attempt: FitAttempt) -> Fitted:
            session = model._open_session(FAMILY, check_masked(masked, len(model.sites), model._masks_wanted))
            newton = CategoryNewton(session, CategoryRequest(model.link, columns), maxiter, tol)
            protocol = newton.run(kind, local, clusters, check_assumptions)
            fit, outcomes = attempt.run(protocol, session.masked_sites)
            if not fit.converged:
                warn(f"{model.model_name} did not converge after {maxiter} steps", ConvergenceWarning)
            return model._results._of(model, fit, kind, outcomes, attempt.ledger)

        return run_fit(named, call, estimate)

    def _check_groups(self, cov_type: str, kwds: object) -> ClusterChoice | None:
        """Return the column of clusters and the correction, checked."""
        if cov_type != "cluster":
            if kwds:
                raise ModelError("cov_kwds: they are for cov_type='cluster'")
            return None
        groups = kwds.get("groups") if isinstance(kwds, dict) else None
        if not isinstance(groups, str) or not set(kwds) <= {"groups", "correction"}:  # type: ignore[call-overload]
            raise ModelError("cov_kwds: cov_type='cluster' needs {'groups': column}")
        correction = kwds.get("correction", "CR2")  # type: ignore[attr-defined]
        check_choice("cov_kwds: correction", correction, ("CR2", "CR1"))
        if groups not in (*self.question.labels, self.partition.site_column):
            raise ModelError(f"cov_kwds: groups={groups!r} is no column of every site's table")
        return ClusterChoice.of(groups, correction)


class FederatedOrdinal(CategoryModel[OrdinalResults]):
    """Regression of ordered categories over sites that hold different rows, with a cumulative link.

    ``P(y <= j) = F(threshold_j - x'b)``: with ``distr="logit"`` the proportional odds model (McCullagh 1980),
    and exp(b) the ratio of the odds of a higher category. Score and information are sums over rows, so that
    the estimate is that of the pooled table: statsmodels' ``OrderedModel``, R's ``ordinal::clm`` and
    ``MASS::polr``. Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula, with the column of the categories on its left side.
    partition : ClientPartition
        In the horizontal layout.
    distr : {"logit", "probit", "cloglog"}
        Distribution of the latent variable; statsmodels has "probit" by default.
    levels : sequence, optional
        Categories from the lowest to the highest. Otherwise their order is that of numbers, of levels in the
        formula, or the one that all sites declare.
    **settings
        Those of :meth:`from_formula`.

    Attributes
    ----------
    link : str
        The `distr`.

    References
    ----------
    McCullagh, "Regression models for ordinal data", Journal of the Royal Statistical Society B 42 (1980).

    Peterson and Harrell, "Partial proportional odds models for ordinal response variables", Applied
    Statistics 39 (1990).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedOrdinal.from_formula("num ~ age + sex", partition).fit()
    >>> fit.params.round(2).head(2).to_dict(), fit.thresholds["estimate"].round(2).to_dict()
    ({'age': 0.06, 'sex': 1.5}, {'0/1': 4.43, '1/2': 5.74, '2/3': 6.64, '3/4': 8.2})
    """

    model_name: ClassVar[str] = "Federated ordinal model"
    method_name: ClassVar[str] = "Newton's method"
    _ordered = True
    _results = OrdinalResults

    @takes_parsed
    @inherits_signature(CategoryModel.__init__)
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        distr: Literal["logit", "probit", "cloglog"] = "logit",
        **settings: Any,
    ) -> None:
        check_choice("distr", distr, tuple(LINKS))
        self.link = distr
        super().__init__(formula, partition, **settings)

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    @inherits_params(CategoryModel.from_formula)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula, partition, levels, offset, freq_weights, complete, labels, missing
            As in :meth:`CategoryModel.from_formula`.
        distr : {"logit", "probit", "cloglog"}
            Distribution of the latent variable: proportional odds, a normal variable, or proportional
            hazards.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, or an unknown column.
        DesignError
            A category has too few rows, or text has no order; see the message.
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
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fs.FederatedOrdinal.from_formula("num ~ age", partition, distr="probit").link
        'probit'
        """
        return super().from_formula(formula, partition, **settings)


class FederatedMultinomial(CategoryModel[MultinomialResults]):
    """Regression of categories without an order over sites that hold different rows: multinomial logit.

    ``log P(y = j) / P(y = first) = x'b_j``: exp(b_j) are ratios of the odds of a category against the first.
    Score and information are sums over rows, so that the estimate is that of statsmodels' ``MNLogit`` on the
    pooled table. Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula, with the column of the categories on its left side.
    partition : ClientPartition
        In the horizontal layout.
    levels : sequence, optional
        Categories, the reference first; by default in their declared order, or sorted.
    **settings
        Those of :meth:`from_formula`.

    Attributes
    ----------
    link : str
        "baseline": a logit against the first category.

    References
    ----------
    McFadden, "Conditional logit analysis of qualitative choice behavior", in Frontiers in Econometrics
    (1974).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedMultinomial.from_formula("C(cp) ~ age + sex", partition).fit()
    >>> fit.params_by_category.loc["age"].round(2).to_dict()
    {2: -0.06, 3: -0.02, 4: -0.0}
    """

    model_name: ClassVar[str] = "Federated multinomial model"
    method_name: ClassVar[str] = "Newton's method"
    _results = MultinomialResults
