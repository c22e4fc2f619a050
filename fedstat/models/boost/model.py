"""Functional boosting: one model over providers of moments."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

from fedstat.docstrings import inherits_signature
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.approval import PlannedStep
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Engine, Fit, FitProtocol
from fedstat.models.boost.column_source import ColumnSource
from fedstat.models.boost.learning.boosting import Aggregation
from fedstat.models.boost.private.public_curves import PublicCurve
from fedstat.models.boost.private_source import PrivateSource
from fedstat.models.boost.results import BoostResults, LocalBoosts
from fedstat.models.boost.row_source import RowSource
from fedstat.models.boost.source import BoostOptions, Folds, MomentSource, Select
from fedstat.models.checks import check_layout, checks_arguments, takes_parsed
from fedstat.models.explain import DryRunPlan, Explainable
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.typing import Floats

__all__ = ["FedFunctionBoost", "PublicCurve"]


class BoostPlan(DryRunPlan):
    """All shapes are known in advance; the source of moments describes the disclosure."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        options = {name: value for name, value in given.items() if name != "progress"}
        self._source, self._options = model.source, BoostOptions(**options)

    def arguments(self) -> Mapping[str, Any]:
        """Run the dry run without progress lines."""
        return {"progress": False}

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State the success of a membership inference attack."""
        yield from self._source.expected(self._options)[0]

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State the cost of steps, and which rows are left out."""
        yield from self._source.expected(self._options)[1]


class FedFunctionBoost(Explainable):
    """Regression of curves, or of a number, on curves and other columns, by component-wise L2 boosting.

    Every step fits all base learners to the residuals and moves by a share of the best fit. The sites sum, in
    one round, products of the learners' columns and of the response. Steps, their number by cross-validation,
    and all statistics follow from these sums, and the path is that of the pooled table.

    If sites hold different columns of the same entities, every learner belongs to one site, and sums of
    products of two sites' columns come from secure multiplication, once. With `epsilon` these sums have
    noise. Every curve then counts as its public mean plus scores on a few public functions, and every column
    by its public range or levels. Each site cuts its part of a row to a public length and adds noise before
    it releases anything. Boosting of noisy sums costs nothing more for any number of steps: a second
    :meth:`fit` of the same model sends no request. A step is not taken if it gains less than 1.5 times the
    expected gain from noise. If nothing has an effect, 19 of 20 releases take no step.

    Make one with :meth:`from_formula`.

    Attributes
    ----------
    source : MomentSource
        The source of moments, by layout and privacy. Its public attributes are those of the model too:
        `boost`, `curves`, `time`, `loss` and `penalty`; `agreement` and `sites` in the horizontal layout;
        `design`, `layout` and `widths` in the vertical layout; `epsilon`, `delta`, `bounds` and `parts` under
        privacy.
    learners : tuple of Learner
        Base learners, the intercept first.
    model_name : str
        Title of the summary.

    References
    ----------
    Brockhaus, Ruegamer, Greven, "Boosting functional regression models with FDboost", Journal of Statistical
    Software 94 (2020).

    Ding, Y. (2024). Statistical machine learning and data fusion methodologies: applications in
    healthcare. Doctoral dissertation, Binghamton University, chapters 3 and 4.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> type(model.engine).__name__, len(model.learners), model.model_name
    ('LocalEngine', 3, 'Federated functional boosting')
    >>> model.fit(steps=20)
    <BoostResults: num, 20 steps, 920 entities; see .summary()>
    """

    model_name: ClassVar[str] = "Federated functional boosting"
    _plan = BoostPlan

    @partial(takes_parsed, parsed=MomentSource)
    def __init__(self, source: MomentSource) -> None:
        self.source = source
        self.distribution = source.distribution

    @classmethod
    @checks_arguments
    @inherits_signature(RowSource.__init__, ColumnSource.__init__, PrivateSource.__init__)
    def from_formula(
        cls, formula: str, partition: ClientPartition, *, epsilon: float | None = None, **settings: Any
    ) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``"cca(t) ~ bsignal(rcst) + bols(C(case)) + bbs(age)"``: with ``(t)`` the response is a curve,
            otherwise a number. Learners are ``bsignal(curve, knots=10, differences=1, df=4)``, the integral
            of a curve times a smooth function; ``bfpc(curve, pve=0.99)``, the same in principal components
            with this share of the curve's variance; ``bconcurrent(curve)``, the curve at the same point times
            a smooth function; ``bhist(curve)``, its integral up to that point; ``bols(term)``, a linear
            effect, also of levels; ``bbs(column, knots=20, lower_bound=..., upper_bound=...)``, a smooth
            effect, with bounds unless the sites publish a range; and ``brandom(column)``, an effect of every
            level with shrinkage. ``by=column`` multiplies the effect of `bsignal`, `bols` or `bbs` by a
            column of numbers or of two levels. A bare name is ``bsignal`` for a curve and ``bols`` for
            another column. An intercept is included. Effects are smooth along a response curve, except those
            in ``const(...)``.
        partition : ClientPartition
            With ``curves={...}``. In the vertical layout every learner belongs to one site, and none varies
            along the response (``bconcurrent``, ``bhist``).
        time : str
            Basis along the response, ``"bbs(t, knots=10, df=4)"``.
        penalty : {"separable", "fdboost"}
            Both directions of a surface are smoothed one after the other, which is faster, or by the one
            parameter of FDboost, which reproduces its numbers.
        family : statsmodels family, optional
            ``Binomial()`` or ``Poisson()`` with their canonical links; squared loss by default. Learners are
            fitted to slopes of the loss without weights, as in mboost.
        loss : {"huber", "quantile"}, optional
            Instead of a family: squares up to residuals of `delta`, in units of the response, and linear
            beyond; or the loss of a quantile `q`, by default the median. The slopes of the latter are
            discontinuous, so that a step reveals the few rows whose residual changes sign. Sites with a
            strict policy refuse it; other sites repeat their last reply if fewer rows than their minimum have
            changed.
        missing : {"drop", "raise"}
            Rows that lack a value of the model, and rows with an unknown stretch of a curve longer than a
            tenth of its domain, are left out and counted, or raise an error.
        labels : sequence of str, optional
            Horizontal: columns that ``fit(folds=...)`` may use, such as a person's number.
        check_knots : bool
            Sum products for twice as many knots in `time`, ``bsignal`` and ``bbs``. The path is the same, and
            :meth:`BoostResults.refit` tests whether the given knots are too few. About twice as many columns
            are summed, which needs more rows and discloses more.
        coordinator : str, optional
            Vertical: the site of the coordinator, or ``"apart"``.
        epsilon : float, optional
            Vertical: boost under differential privacy of the whole record of one entity, replaced by any
            other. Learners are ``bsignal(curve)`` and ``bols(column)``.
        public : mapping of str to PublicCurve, range or levels, optional
            With `epsilon`: public description of every curve and column of the formula, including the
            response; ranges and levels as for :class:`fedstat.Bounds`, by default the owners' published ones.
        delta : float, optional
            With `epsilon`: delta of differential privacy, at most 1e-6. Otherwise the delta of
            ``loss="huber"``.

        Raises
        ------
        FormulaError
            An expression is not part of the formula language, or a name does not exist.
        ModelError
            A setting belongs to another layout, or a column has no public description.
        PolicyError
            A site's owner does not allow it.

        Examples
        --------
        >>> import numpy as np, pandas as pd, fedstat as fs
        >>> random = np.random.default_rng(1)
        >>> x = random.normal(size=(90, 4)) @ np.sin(np.outer(np.arange(1, 5), np.linspace(0, 3, 20)))
        >>> y = pd.DataFrame(x[:, ::2] + random.normal(size=(90, 10))).add_prefix("y_")
        >>> table = pd.DataFrame(x).add_prefix("x_").join(y).assign(site=[*"ABC"] * 30)
        >>> curves = {"x": fs.Curve("x_*", domain=(0, 1)), "y": fs.Curve("y_*", domain=(0, 1))}
        >>> partition = fs.ClientPartition.from_frame(table, by="site", curves=curves)
        >>> fs.FedFunctionBoost.from_formula("y(t) ~ bsignal(x)", partition).fit(steps=50).surface("x").shape
        (200, 3)
        """
        made: type[MomentSource] = RowSource
        if epsilon is not None:
            settings = {"epsilon": epsilon, **settings}
        if epsilon is not None or getattr(partition, "layout", "") == "vertical":
            made = ColumnSource if epsilon is None else PrivateSource
            check_layout(cls.__name__, partition, "vertical")
        else:
            check_layout(cls.__name__, partition, "horizontal")
        made.refuse_others(settings, made.settings)
        return cls(made.of_formula(formula, partition, **settings))

    @checks_arguments
    def fit(
        self,
        *,
        steps: int | None = None,
        learning_rate: float | None = None,
        select: Select = None,
        folds: Folds = None,
        offset: Literal["mean", "smooth"] | float | Sequence[float] | Floats = "mean",
        every: int | None = None,
        aggregation: Aggregation = "exact",
        masked: bool | None = None,
        seed: int | None = 0,
        progress: bool | None = None,
    ) -> BoostResults | LocalBoosts:
        """Compute the path of boosting.

        Parameters
        ----------
        steps : int, optional
            Number of steps, or the largest number that `select` considers: 100 by default, 80 for a private
            fit.
        learning_rate : float, optional
            Share of a fit by which a step moves, in (0, 1]: 0.1 by default, 0.2 for a private fit.
        select : {"cv", "aicc"}, optional
            Choose the number of steps with the smallest loss over left-out folds, or with the smallest
            corrected Akaike criterion, as in mboost. The latter treats the points of a curve as independent,
            and takes too many steps if errors are correlated along it. By default all steps are taken. All
            methods use sums that are released in the same round.
        folds : int, "site", column or (column, int), optional
            Number of folds, drawn at random within every site; by default ten with ``select="cv"``, and one
            otherwise, which means no folds. Folds also make :meth:`BoostResults.stability` available. With
            "site" each site is a fold, so that the loss is that at a site which took no part; masks are then
            impossible, since each site's sums are used. With a column of the model's `labels`, such as
            "subject", rows with the same value are in one fold; ten folds, or as many as in
            ``("subject", 5)``. Use it if several rows belong to one person: with folds of rows, a person is
            on both sides, and too many steps are chosen. In the vertical layout it may be any column of a
            site, which then reveals the fold of each entity.
        offset : {"mean", "smooth"}, float or sequence of float
            Curve from which boosting starts: the mean of the response at each point, this mean smoothed along
            the basis `time`, or a given number or curve (G,). For a family it is on the scale of the link; a
            quantile starts from that of a normal distribution.
        every : int, optional
            For a loss other than squares: steps between two exchanges of scores with the sites, 10 by
            default. Between exchanges, scores follow the quadratic bound of the loss; 1 gives mboost's path.
            A quantile has no such bound and needs 1.
        aggregation : {"exact", "lsa", "average", "local"}
            By default the path of the pooled table. The other values are the publication's methods, for
            comparison, without inference. Every site fits the learners to its own rows in every step, and the
            fits are averaged by least squares with their information as weights, or by rows; or every site
            fits by itself. They use every site's own sums, which are released unmasked.
        masked : bool, optional
            Whether sites hide their parts by pairwise masks; by default with at least three sites, unless the
            folds are the sites.
        seed : int or None
            Seed of the folds; None draws one.
        progress : bool, optional
            Report the progress of the fit (:func:`fedstat.progress`).

        The horizontal layout accepts all of these arguments. In the vertical layout they are `steps`,
        `learning_rate`, `select`, `folds` and `seed`; under privacy `steps` and `learning_rate`.

        Returns
        -------
        Local fits return LocalBoosts, with results by site.

        Raises
        ------
        ModelError
            An argument is invalid here, or no third party can deal random numbers for two sites.
        DesignError
            There are too few rows for the columns; the error names a sufficient number of knots.
        EstimationError
            Two sites share too few entities.
        PolicyError, DescriptionError
            A site refuses, or its budget does not allow the release.
        """
        call = Call.of(self.fit, locals())
        options = BoostOptions(steps, learning_rate, select, folds, offset, every, aggregation, masked, seed)
        return run_fit(self, call, FedFunctionBoost._boosted, options)

    def _boosted(self, attempt: FitAttempt, options: BoostOptions) -> BoostResults | LocalBoosts:
        return self.source.boosted(attempt, options)

    # -- what the provider knows -----------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Public attributes of the source of moments."""
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def engine(self) -> Engine:
        """Engine that transfers requests to the sites."""
        return self.source.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        # A dry run gives its own engine to a copy of the model; the original keeps its source.
        self.source = copy.copy(self.source)
        self.source.engine = engine

    @property
    def _session(self) -> str:  # type: ignore[override]
        return self.source._session

    @property
    def _agreement(self) -> Ledger:  # type: ignore[override]
        return self.source._agreement

    @property
    def _description(self) -> str:
        return self.source._description

    def _new_ledger(self) -> Ledger:
        return self.source._new_ledger()

    def _after_transforms(self, protocol: FitProtocol[Fit], ledger: Ledger) -> FitProtocol[Fit]:
        return self.source._after_transforms(protocol, ledger)

    def _columns_read(self, site: str) -> Sequence[str]:
        return self.source._columns_read(site)

    def _reported_afterwards(self, site: str) -> Iterator[PlannedStep]:
        return self.source._reported_afterwards(site)

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        return self.source._invent_sites(plan, policies)

    def __repr__(self) -> str:
        return repr(self.source).replace(type(self.source).__name__, type(self).__name__, 1)
