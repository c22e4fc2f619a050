"""Base model when sites hold different rows: formula, weights, levels, lost and outlying sites."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_signature
from fedstat.errors import (
    DataWarning,
    DesignError,
    EngineError,
    FormulaError,
    ModelError,
    PinError,
    Remedy,
    SessionError,
    UnitsWarning,
    warn,
)
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.formula.expression import name_expression, parse_subset
from fedstat.federation.design.formula.parse import Formula, parse_pooled_formula
from fedstat.federation.design.horizontal_design import (
    RowsSchema,
    agree_coding,
    agree_rows,
    agree_transforms,
)
from fedstat.federation.design.levels import check_units
from fedstat.federation.design.site_rows import EffectTerms, RowsRequest
from fedstat.federation.design.spline_knots import splines_without_knots, with_published_knots
from fedstat.federation.design.transform_states import needs_sums
from fedstat.federation.design.vertical_design import MissingRule
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.dry_run.synthetic import SyntheticRows
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Engine, Fit, FitProtocol
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.checks import check_layout, checks_arguments, takes_parsed
from fedstat.models.explain import DryRunPlan, Explainable, owners_consulted
from fedstat.models.horizontal.session import RULES_ON_ROWS, RowsSession
from fedstat.models.horizontal.treatment_weights import (
    FittedPropensity,
    propensities_of,
    require_same_rows,
)
from fedstat.models.run import PostFitAnalysis, rest_after, run_analysis
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Sites with a column far from all others, by its mean or spread, for instance with other units.

DEVIATIONS, FOLD = 5.0, 20.0
"""Between means, in the larger of two standard deviations, and between these: what is far."""
APART = 2.0
"""How much farther a site is from the others than these are from one another."""
SHARE = 1e-6
"""Relative difference of a variance from m (1 - m), below which a column is taken for zeros and ones."""


def far_sites(own: Floats) -> list[tuple[int, int, str]]:
    """Find sites and columns, (k, j), and what is far there, from means and deviations by site, (K, 2, p).

    Columns of zeros and ones are shares, whose deviations depend on their mean: they are left out. So are
    sites without moments of a column, or with a constant column.
    """
    found = []
    for j in range(own.shape[2]):
        mean, spread = own[:, 0, j], own[:, 1, j]
        reported = np.flatnonzero((spread > 0.0) & np.isfinite(mean))
        m, s = mean[reported], spread[reported]
        if len(reported) < 2 or np.allclose(s**2, m * (1.0 - m), rtol=SHARE, atol=0.0):
            continue
        units = DEVIATIONS * np.maximum(s[:, None], s)
        folds = np.full_like(units, np.log(FOLD))
        found += [(int(reported[k]), j, "mean") for k in _far(m, units)]
        found += [(int(reported[k]), j, "spread") for k in _far(np.log(s), folds)]
    return found


def _far(values: Floats, least: Floats) -> list[int]:
    """Places of values (K,) that are `least` (K, K) from every other one, which are nearer to one another."""
    found = []
    for k in range(len(values)):
        others = np.arange(len(values)) != k
        distance = np.abs(values[k] - values[others])
        if (distance >= least[k, others]).all() and distance.min() > APART * np.ptp(values[others]):
            found.append(k)
    return found


def warn_of_far_sites(agreement: RowsSchema, names: Sequence[str], own: Floats | None) -> None:
    """Warn about untransformed numeric columns; `own` is None if no site's moments are known."""
    if own is None:
        return
    plain = [j for j, name in enumerate(names) if agreement.spec.kinds.get(name) == "number"]
    for k, place, what in far_sites(own[:, :, plain]):
        site, name = agreement.sites[k].site, names[plain[place]]
        warn(
            f"column {name!r}: its {what} at site {site!r} is far from those at all other sites. Is it "
            "measured in the same unit? Sites may publish in which (unit = ... in columns.toml)",
            UnitsWarning,
        )


# ----------------------------------------------------------------------------------------------------
# Models over sites with different rows: formula, family, weights, agreed levels, and a fit's ledger.


class OwnFitsPlan(DryRunPlan):
    """Facts about a fit of Newton's method, for which the sites also fit their own rows."""

    own_fit: ClassVar[str] = "the means and deviations of its columns"
    """What a site releases with its own fit."""

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of Newton's method."""
        return [IterationLoop(("sum_scores",), int(self.given["maxiter"]))]

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what a site's own fit discloses."""
        if any(entry.step == "fit_alone" for entry in expected.dry_run.entries):
            yield (
                "Coordinator",
                f"learns every site's own fit, with {self.own_fit}. local=False leaves this out, together "
                "with the comparison of the sites.",
            )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown."""
        yield RULES_ON_ROWS


def pooled_columns(partition: ClientPartition) -> tuple[list[str], tuple[str, ...]]:
    """Return the columns of all sites, and others that a formula may name, which ``.`` leaves out."""
    held = dict.fromkeys(name for names in partition.columns.values() for name in names)
    # Columns of some sites parse as well, so that the error can name the sites that lack them.
    partly = [name for name in held if name not in partition.pooled_columns]
    return list(partition.pooled_columns), (partition.site_column, *partly)


COLUMN_KEYS = ("groups", "clusters", "strata")
"""Keys of `cov_kwds` whose values are columns of the sites."""


class HorizontalModel(Explainable):
    """A model over sites that hold different rows of the same columns.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        As in :meth:`from_formula`.

    Attributes
    ----------
    formula, partition
        As given.
    engine : Engine
        Engine that sends the requests; that of the partition.
    distribution : DistributionSpec
        Family and link, by name.
    family : statsmodels family
    sites : tuple of str
        Sites, in the order of the partition.
    weights : dict of str to str
        Columns of weights and of the exposure, by their argument.
    question : RowsRequest
        Columns and terms that are requested from every site.
    agreement : RowsSchema
        Levels, transforms and numbers of rows that the sites agreed on.
    model_name, method_name : str
        Titles of the summary.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FederatedGLM.from_formula("num ~ age", partition)
    >>> model.sites, str(model.distribution), model.weights
    (('Cleveland', 'Hungary', 'Long Beach', 'Switzerland'), 'Gaussian(link=Identity)', {})
    >>> [(row.site, row.n) for row in model.agreement.sites][0], model.question.response
    (('Cleveland', 303), 'num')
    """

    model_name: ClassVar[str] = "Federated model"
    method_name: ClassVar[str] = ""
    _default_family: ClassVar[Any] = sm_families.Gaussian
    _goes_on: ClassVar[bool] = False
    """Return whether a fit is repeated among the remaining sites if sites are lost."""
    _times: ClassVar[bool] = False
    """Whether the response is ``Surv(...)``, which other models do not take."""
    _baselines: ClassVar[bool] = False
    """Whether each site has a baseline hazard, unless a fit has a common one."""
    _causes: ClassVar[bool] = False
    """Whether its event is a category of competing events."""
    _groups: tuple[str, ...] = ()
    """Columns of groups of two rows or more."""
    _label_roles: Mapping[Any, str] = MappingProxyType({})
    """Arguments that name columns which the rows must have; other such columns are `labels`."""
    _categories: ClassVar[bool] = False
    """Whether the response is ``C(...)``, which other models do not take."""
    _ordered: ClassVar[bool] = False
    """Whether these categories need an order."""
    _columns_from: ClassVar[str] = "formula"
    """The argument that names the columns of the model, in errors."""
    _given: Mapping[str, Any] = MappingProxyType({})
    """Settings of from_formula, with which fits of subgroups are made."""
    _pinned: bool = True
    """Whether owners may have pinned the keys of all sites."""
    _random: ClassVar[bool] = False
    """Whether the formula may have random effects, ``(1 | group)``."""
    _weighed_by: tuple[FittedPropensity, ...] = ()
    """Propensity models by which rows are weighted."""
    _absorbs: ClassVar[bool] = False
    """Whether the formula may have absorbed effects, ``y ~ x | ward``."""

    @takes_parsed
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        family: Any = None,
        offset: str | None = None,
        exposure: str | None = None,
        freq_weights: str | None = None,
        var_weights: str | None = None,
        labels: Sequence[str] = (),
        complete: Sequence[str] = (),
        missing: MissingRule = "drop",
        subset: str | None = None,
    ) -> None:
        if missing not in ("raise", "drop"):
            raise ModelError(f'missing: expected "drop" or "raise", received {missing!r}')
        self._check_times(formula)
        self.formula, self.partition = formula, partition
        self.distribution = DistributionSpec.of(self._default_family() if family is None else family)
        self.family = self.distribution.make()
        weights = {"freq_weights": freq_weights, "var_weights": var_weights, "exposure": exposure}
        self.weights = {role: name for role, name in weights.items() if name is not None}
        if self._times and {"freq_weights", "var_weights"} <= self.weights.keys():
            raise ModelError("var_weights: give weights once, as freq_weights or as var_weights")
        self._roles: dict[str, Any] = self.weights | ({} if offset is None else {"offset": offset})
        self._check_exposure()
        self._check_absorbed()
        # Sites whose formulas are "simple" compute splines with published knots alone.
        simple = [site.published for site in partition.sites.values() if site.policy.formulas == "simple"]
        self.question = with_published_knots(self._question(offset, labels, complete), simple)
        if subset is not None:
            self.question = replace(self.question, subset=self._subset(subset, missing))
        if partition._imputed is not None:
            self.question = replace(self.question, imputed=partition._imputed)
        if self._weighed_by:
            propensities = tuple(one.weights for one in self._weighed_by)
            self.question = replace(self.question, propensities=propensities)
        self.question.check()
        self._check_causes()
        check_units({name: site.published for name, site in partition.sites.items()}, self.question.needed)
        self._settle(partition, Ledger())
        require_same_rows(self._weighed_by, self.agreement)
        self._report_missing(missing)

    def _weigh(self, weights: object, formula: Formula, **settings: Any) -> None:
        """Weight the rows by propensity models; see :func:`propensities_of`."""
        if weights is None:
            return
        if given := [name for name in ("freq_weights", "var_weights") if settings.get(name) is not None]:
            raise ModelError(f"{given[0]}: rows have the weights of the treatment; leave it out")
        if formula.absorbed:
            raise ModelError("weights: those of a treatment are not available where effects are absorbed")
        self._weighed_by = propensities_of(weights, type(self))

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``response ~ terms``; ``.`` is every other column. The column that names the sites is allowed, as
            ``C(hospital)``. Allowed are ``+ - : * / ^``, ``C()``, also with ``levels=["one", "two"]``, by
            which a row with another level is an error, ``log``, ``exp``, ``sqrt``, ``scale``, ``center``,
            ``bs``, ``ns``, ``cr`` and ``cc`` (with ``df``, or with knots and bounds), ``poly``,
            ``C(x, Sum)``, ``Helmert``, ``Diff`` or ``Poly``, ``I(x > 3)``, ``Q()`` and ``offset()``; on the
            left a comparison such as ``num > 0``, or ``cbind(successes, failures)``. For survival it is
            ``Surv(time, event)`` or ``Surv(start, stop, event)``, and the right side may have ``strata(x)``
            and ``cluster(id)``. For categories it is their column, or ``C(y, levels=["low", "high"])``. For
            mixed models the right side has random effects, ``(1 + x | group)``, and for least squares
            effects after a bar are absorbed, ``y ~ x | ward``; see :class:`FederatedOLS`.
        partition : ClientPartition
            In the horizontal layout: ``ClientPartition.from_frame(table, by="hospital")``.
        family : statsmodels family or str, optional
            Such as ``sm.families.Poisson()``, with its link; or a name, ``"poisson"``, with the usual one.
        offset, exposure : str, optional
            Columns; the logarithm of the exposure is an offset.
        freq_weights, var_weights : str, optional
            Columns, with statsmodels' meaning: a row of frequency weight two counts as two rows; variances
            are the dispersion over the variance weight. Policies count rows: for a table of counts give
            ``counts`` to :meth:`ClientPartition.from_frame` instead.
        complete : sequence of str, optional
            Columns that the rows must have as well, so that models with and without them are fitted to the
            same rows.
        labels : sequence of str, optional
            Columns of clusters and strata that ``fit`` shall be able to use.
        missing : {"drop", "raise"}
            Rows that lack a value which the model reads are left out and counted, or an error.
        subset : str, optional
            Use only rows for which comparisons hold, as in ``"age >= 65 & sex == 'f'"``: each compares a
            column with a number or a level. Sites without such a row are left out. Rows outside the subset
            are counted together with incomplete ones.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, or an unknown column.
        DesignError
            The columns that it names cannot enter a model, for instance where sites publish them in
            different units; see the message.
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
        >>> import fedstat as fs, statsmodels.api as sm
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> poisson = sm.families.Poisson()
        >>> fs.FederatedGLM.from_formula("num ~ age + C(hospital)", partition, family=poisson).fit()
        <Federated GLM results: num, 5 coefficients, 920 rows at 4 sites; see .summary()>
        """
        check_layout(cls.__name__, partition, "horizontal")
        parsed = parse_pooled_formula(
            formula, *pooled_columns(partition), random=cls._random, absorbs=cls._absorbs
        )
        model = cls(parsed, partition, **settings)
        model._given = settings
        return model

    def _with_columns_of(self, arguments: Mapping[str, Any]) -> Self:
        """Return the model with the columns of `cov_kwds` among its labels; sites agree on their rows again.

        A name that is no column of the sites is left to the checks of the fit.
        """
        kwds = arguments.get("cov_kwds")
        named = [kwds[key] for key in COLUMN_KEYS if key in kwds] if isinstance(kwds, dict) else []
        known = (*self.question.labels, self.partition.site_column)
        columns = self.partition.pooled_columns
        new = [name for name in named if isinstance(name, str) and name in columns and name not in known]
        if not new:
            return self
        model = copy.copy(self)
        model.question = replace(self.question, labels=(*self.question.labels, *dict.fromkeys(new)))
        model.question.check()
        model._settle(self.partition, Ledger())
        model._report_missing("drop")
        return model

    def _with_covariance(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the results of a fit with another covariance; by default of the same fit once more."""
        return self.fit(**arguments)

    def _settle(self, partition: ClientPartition, before: Ledger) -> None:
        """Agree on levels, transforms and rows with sites, once: every fit of this model codes alike.

        `before` has what was asked of sites of which some are lost.
        """
        while True:
            self.partition, self.sites = partition, tuple(partition.sites)
            self.engine: Engine = partition.engine
            self._session = secrets.token_hex(8)
            ledger = Ledger()
            self._assumed = bool(owners_consulted(partition)) and needs_sums(self.question)
            try:
                self.agreement: RowsSchema = self.engine.run(self._agree(), ledger)
            except DesignError as error:
                rest = [site for site in partition.sites if site != error.empty_site]
                if not self.question.subset or not rest or len(rest) == len(partition.sites):
                    raise
                subset = self.question.subset_text
                warn(f"site {error.empty_site!r} is left out: it has no row of {subset!r}", DataWarning)
                before, partition = before._goes_on_in(ledger), partition._among(rest)
            except PinError:
                if not self._mask_counts or self._masks_wanted:
                    raise
                # Sites without keys: fits have masked=False as well.
                self._pinned, before = False, before._goes_on_in(ledger)
            except (EngineError, SessionError) as error:
                before = before._goes_on_in(ledger)
                partition = self._rest_after(error, before)
            else:
                self._agreement = before._goes_on_in(ledger)
                return

    def _rest_after(self, error: EngineError | SessionError, ledger: Ledger) -> ClientPartition:
        """Return the partition among which a run starts again, or raise the error."""
        if not self._goes_on:
            raise error
        return rest_after(self.partition, error, ledger)

    def _without_lost(self, error: EngineError | SessionError, ledger: Ledger) -> Self:
        """Return the same model among the remaining sites, or raise the error."""
        rest = copy.copy(self)
        rest._settle(self._rest_after(error, ledger), ledger)
        return rest

    @property
    def _description(self) -> str:
        where = f", rows with {text}" if (text := self.question.subset_text) else ""
        return self.formula.text + where

    @property
    def _masks_wanted(self) -> bool:
        """Whether an owner lets sums leave masked only, and there is another site."""
        return len(self.sites) > 1 and any(
            self.partition.sites[name].policy.masked_only for name in self.sites
        )

    @property
    def _mask_counts(self) -> bool:
        """Whether to mask counts for knots, as sums of a fit are by default: only their sums are used."""
        return self._pinned and hides(len(self.sites)) and bool(splines_without_knots(self.question))

    def _drop_columns(self, columns: Sequence[str]) -> bool:
        """Leave columns of interactions out of the design; False if they are left out already."""
        dropped = tuple(dict.fromkeys((*self.agreement.spec.dropped, *columns)))
        if len(dropped) == len(self.agreement.spec.dropped):
            return False
        self.agreement = replace(self.agreement, spec=replace(self.agreement.spec, dropped=dropped))
        return True

    def _open_session(self, family: str, masked: bool) -> RowsSession:
        """Address a fit by the steps of a family."""
        return RowsSession(family, self.sites, self._session, lambda: self.agreement, masked)

    def _run_after_fit(
        self, call: str, protocol: Callable[[Self], FitProtocol[Fit]], ledger: Ledger | None = None
    ) -> Fit:
        """Run a protocol that is not part of a fit; what it releases is entered into a ledger.

        Owners with a consent requirement consent to it separately.
        """
        ledger = self._new_ledger() if ledger is None else ledger

        def requester(model: Self) -> FitProtocol[Fit]:
            return model._after_transforms(protocol(model), ledger)

        invent = self._synthetic_rows().sites
        words = (call, self._description, str(self.distribution))
        columns = dict.fromkeys(self.sites, self.question.needed)
        analysis = PostFitAnalysis(self.partition, *words, invent, columns)
        return run_analysis(analysis, lambda: requester(self), ledger, lambda: requester(copy.copy(self)))

    def _new_ledger(self) -> Ledger:
        """Start a ledger with what the agreement released."""
        return copy.deepcopy(self._agreement)

    def _agree(self) -> FitProtocol[RowsSchema]:
        """Agree on levels, and on transforms unless an owner has to consent to sums for them first."""
        agree = (
            agree_coding
            if self._assumed
            else partial(agree_rows, masked=self._masks_wanted, mask_counts=self._mask_counts)
        )
        return (
            yield from agree(
                self.question,
                self.sites,
                self._session,
                site_column=self.partition.site_column,
                min_count=self.partition.min_count,
                ordered=self._ordered,
            )
        )

    def _after_transforms(self, protocol: FitProtocol[Fit], ledger: Ledger) -> FitProtocol[Fit]:
        """Agree on transforms, where that is still to be done, before a protocol goes on."""
        if self._assumed:
            self.agreement = yield from agree_transforms(
                self.agreement, self._session, masked=self._masks_wanted, mask_counts=self._mask_counts
            )
            self._assumed, self._agreement = False, copy.deepcopy(ledger)
        return (yield from protocol)

    def _columns_read(self, site: str) -> Sequence[str]:
        return self.question.needed

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        return self._synthetic_rows(nested=plan.nested, binary=plan.binary).sites(policies)

    def _synthetic_rows(self, nested: tuple[str, ...] = (), **more: Any) -> SyntheticRows:
        column = self.partition.site_column
        groups = tuple(name for name in self._groups if name != column)
        given: dict[str, Any] = {"nested": (*nested, column), "groups": groups, "site_column": column}
        return SyntheticRows(self.agreement, self.distribution, **given, **more)

    def _check_times(self, formula: Formula) -> None:
        if self._times and not formula.has_times:
            raise FormulaError(
                f"formula: {type(self).__name__} needs times and events on the left side, as in "
                f"'Surv(months, died) ~ ...', received {formula.response!r}"
            )
        if not self._times and (formula.has_times or formula.strata or formula.clusters):
            what = "Surv(...)" if formula.has_times else "strata(...)" if formula.strata else "cluster(...)"
            raise FormulaError(
                f"formula: {what} is for FederatedCox, FederatedAFT, KaplanMeier and CumulativeIncidence; "
                f"{type(self).__name__} has none"
            )
        if formula.has_categories and not self._categories:
            raise FormulaError(
                "formula: a response C(...) is for FederatedOrdinal and FederatedMultinomial; for one level "
                f"against the others write {formula.response_columns[0]} == 'level'"
            )

    def _check_causes(self) -> None:
        survival = self.question.survival
        if survival is None or bool(survival.causes) == self._causes:
            return
        if self._causes:
            raise FormulaError(
                f'formula: {type(self).__name__} needs competing events, as in "Surv(months, C(cause, '
                f"levels=['none', 'relapse', 'death'])) ~ ...\", received {self.formula.response!r}"
            )
        raise FormulaError(
            f"formula: competing events are for CumulativeIncidence; {type(self).__name__} needs one event, "
            "as in \"Surv(months, cause == 'death') ~ ...\""
        )

    def _check_exposure(self) -> None:
        if "exposure" in self.weights and self.distribution.link != "Log":
            raise ModelError(
                f"exposure: it needs a log link, and the family is {self.distribution}",
                remedy=Remedy(
                    "from_formula(..., exposure=None, offset={column!r}).fit()", "use offset"
                ).filled(column=self.weights["exposure"]),
            )

    def _check_absorbed(self) -> None:
        """Require least squares where effects are absorbed."""
        if not self.formula.absorbed:
            return
        if not self.distribution.least_squares:
            raise ModelError(
                "formula: effects after the bar are absorbed for the Gaussian family with the identity link, "
                f"received {self.distribution}; means of its levels do not remove them. Write few levels as "
                "C(ward), and many as (1 | ward) for FederatedMixed"
            )
        self._groups = tuple(name for names in self.formula.absorbed for name in names)

    def _question(self, offset: str | None, labels: Sequence[str], complete: Sequence[str]) -> RowsRequest:
        formula = self.formula
        for what, listed in (("labels", labels), ("complete", complete)):
            if isinstance(listed, str):
                raise ModelError(
                    f"{what}: expected a list of columns, received a text",
                    remedy=Remedy(
                        "from_formula(..., {what}=[{listed!r}]).fit()", "write [{listed!r}]"
                    ).filled(what=what, listed=listed),
                )
        self._label_roles = {**dict.fromkeys(complete, "complete"), **self._label_roles}
        absorbed = [name for names in formula.absorbed for name in names]
        labels = tuple(dict.fromkeys((*labels, *formula.strata, *formula.clusters, *absorbed, *complete)))
        (terms,) = formula.sites
        effects = [name for one in formula.random for name in one.effect_columns]
        columns_read = tuple(dict.fromkeys((*terms.columns, *effects)))
        for name in (*formula.response_columns, *columns_read, *formula.offset_columns):
            self._check_held(self._columns_from, name)
        named = [(self._label_roles.get(name, "labels"), name) for name in labels]
        for role, name in [*self._roles.items(), *named]:
            self._check_held(role, name)
            if name in formula.response_columns and role not in ("labels", "complete"):
                raise ModelError(f"{role}: column {name!r} is the response")
        offsets, columns = formula.offsets, formula.offset_columns
        if offset is not None:
            offsets, columns = (*offsets, name_expression(offset).text), (*columns, offset)
        return RowsRequest(
            formula.response,
            formula.response_columns,
            terms.terms,
            columns_read,
            offsets=offsets,
            offset_columns=tuple(dict.fromkeys(columns)),
            intercept=formula.intercept and not formula.absorbed,
            weights=dict(self.weights),
            labels=tuple(labels),
            effects=tuple(EffectTerms(one.intercept, one.terms) for one in formula.random),
            absorbed=formula.absorbed,
        )

    def _subset(self, subset: object, missing: MissingRule) -> tuple[str, ...]:
        """Read the comparisons of a subset; sites count rows outside of it as incomplete ones."""
        if not isinstance(subset, str):
            raise ModelError(
                "subset: expected a text, such as \"age >= 65 & sex == 'f'\", received "
                f"{type(subset).__name__}"
            )
        if missing == "raise":
            raise ModelError(
                "missing: with a subset, sites count rows outside of it together with incomplete ones",
                remedy=Remedy(
                    "from_formula(..., subset={subset!r}, missing='drop').fit()", "pass {arguments}"
                ).filled(subset=subset),
            )
        found = parse_subset(subset)
        for name in (name for one in found for name in one.columns):
            self._check_held("subset", name)
        return tuple(one.text for one in found)

    def _check_held(self, role: str, name: object) -> None:
        """Require a column that all sites have; the error names those that lack it."""
        if not isinstance(name, str):
            raise ModelError(
                f"{role}: expected the name of a column, received {type(name).__name__}; the values must "
                "be a column of the sites' own tables"
            )
        if name in (*self.partition.pooled_columns, self.partition.site_column):
            return
        lacking = [site for site, held in self.partition.columns.items() if name not in held]
        if len(lacking) == len(self.partition.columns):
            declared = " If it counts entities (counts), every entity is a row: leave it out."
            close = get_close_matches(name, self.partition.pooled_columns, n=1, cutoff=0.6)
            more = f" Did you mean {close[0]!r}?" if close else declared if role == "freq_weights" else ""
            raise ModelError(f"{role}: there is no column {name!r} at any site.{more}")
        error = FormulaError if role == self._columns_from else ModelError
        raise error(
            f"{role}: column {name!r} is not at {', '.join(map(repr, lacking))}. Add it there, leave these "
            "sites out, or do without the column"
        )

    def _report_missing(self, missing: MissingRule) -> None:
        if self.question.subset:
            return  # the summary counts rows that are used
        short = [
            f"{row.n_rows - row.n:,} at '{row.site}'" for row in self.agreement.sites if row.n < row.n_rows
        ]
        if not short:
            return
        what = f"rows that lack one of the model's columns: {', '.join(short)}"
        if sites := ", ".join(map(repr, self.agreement.leaving_out)):
            what = (
                f"rows: {', '.join(short)}. They lack one of the model's columns or, at {sites}, would "
                "differ in few from those of other analyses; see small_differences of the policy"
            )
        if missing == "raise":
            raise DesignError(
                what,
                remedy=Remedy(
                    'from_formula(..., missing="drop").fit()',
                    "pass {arguments} to leave them out (they will be counted)",
                ),
            )
        warn(f"left out {what}", DataWarning)
