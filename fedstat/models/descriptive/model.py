"""Survival curves over sites with different rows: arguments of the analyst, and the fit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Self

import numpy as np
import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_signature
from fedstat.errors import DescriptionError, EstimationError, FormulaError, ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.formula.syntax_tree import (
    Category,
    Column,
    Level,
    Number,
    Relation,
    Survival,
)
from fedstat.federation.design.horizontal_design import RowsSchema, SiteRowCounts
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.design.spline_knots import MOST_ROUNDS
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.explanation import Explanation
from fedstat.inference.noisy_tables import (
    RunningCounts,
    last_known,
    noise_at_ends,
    noisy_survival_counts,
)
from fedstat.models.checks import check_masked, checks_arguments, takes_parsed
from fedstat.models.copula.private_release import USUAL_DELTA
from fedstat.models.descriptive.noisy_model import NoiseSetting, NoisyTable
from fedstat.models.descriptive.noisy_steps import CodedColumn, TablePart
from fedstat.models.descriptive.protocol import (
    MERGED,
    SurvivalTable,
    find_last_time,
    interval_search,
    request_of,
    survival_table,
    with_ends_apart,
)
from fedstat.models.descriptive.results import CumulativeIncidenceResults, KaplanMeierResults
from fedstat.models.descriptive.steps import FAMILY
from fedstat.models.descriptive.synthetic import with_synthetic_cells
from fedstat.models.descriptive.tables import corr as corr
from fedstat.models.descriptive.tables import crosstab as crosstab
from fedstat.models.descriptive.tables import explain_table as explain_table
from fedstat.models.descriptive.tables import histogram as histogram
from fedstat.models.descriptive.tables import quantiles as quantiles
from fedstat.models.descriptive.tables import table_one as table_one
from fedstat.models.explain import DryRunPlan, call_of, settled
from fedstat.models.horizontal.blocks import MOST_POINTS, TimeGrid, grid_points
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.typing import Floats


class CurvePlan(DryRunPlan):
    """Facts about survival curves before they are fitted."""

    guessed: ClassVar[frozenset[str]] = frozenset({"flag_times", "count_times"})

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the search for intervals."""
        grid = TimeGrid.of(self.given["grid"], self.given["until"])
        points = MOST_POINTS if grid.points is None else len(grid.points)
        found = IterationLoop(("count_intervals",), MOST_ROUNDS)
        searched = any("count_intervals" in steps for steps in dry_run.rounds)
        return [interval_search(points), *([found] if searched else [])]

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown."""
        yield from super().notes(expected)
        yield MERGED.format("a group")


class CurveModel(HorizontalModel):
    """Counts of events by group on a grid of times."""

    _default_family: ClassVar[Any] = sm_families.Binomial
    _times = True
    _goes_on = True
    _plan = CurvePlan
    _hints: ClassVar = dict.fromkeys(
        ("family", "exposure", "offset", "freq_weights", "var_weights"),
        "a survival curve has groups only, as in 'Surv(months, died) ~ arm'",
    )

    @takes_parsed
    @inherits_signature(HorizontalModel.__init__, without=tuple(_hints))
    def __init__(self, formula: Formula, partition: ClientPartition, **settings: Any) -> None:
        if formula.offsets or formula.strata or formula.clusters:
            raise ModelError(f"offset(), strata() and cluster(): {self._hints['offset']}")
        super().__init__(formula, partition, **settings)

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make curves from a formula.

        Parameters
        ----------
        formula : str
            ``Surv(time, event) ~ groups``, or with ``Surv(start, stop, event)``; groups are columns, or 1.
        partition : ClientPartition
            In the horizontal layout.
        labels, complete, missing, subset
            As for :meth:`FederatedGLM.from_formula`.
        """
        return super().from_formula(formula, partition, **settings)

    def _question(self, offset: str | None, labels: Sequence[str], complete: Sequence[str]) -> RowsRequest:
        question = super()._question(offset, labels, complete)
        columns = []
        for term in question.read_terms():
            match [factor.tree for factor in term]:
                case [Column(name=name)] | [Category(column=name, coding="Treatment")]:
                    columns.append(name)
                case _:
                    raise FormulaError(
                        "formula: groups are columns, as in 'Surv(months, died) ~ arm + sex', received "
                        f"{':'.join(factor.text for factor in term)!r}. Every combination of their levels is "
                        "a group; group numbers before"
                    )
        # As categories, so that the sites agree on their levels.
        terms = tuple(f"C({quoted_name(name)})" for name in columns)
        self.groups = tuple(columns)
        return replace(question, terms=terms, columns=self.groups)

    def _count(self, attempt: FitAttempt, grid: TimeGrid, masked: object) -> tuple[SurvivalTable, bool, str]:
        """Count on the grid; return also whether sums are masked, and how a last time was found."""
        session = self._open_session(FAMILY, check_masked(masked, len(self.sites), self._masks_wanted))

        def protocol() -> FitProtocol[tuple[SurvivalTable, str]]:
            points, origin = grid.points, ""
            if points is None:
                until, origin = grid.until, "given" if grid.until else "published"
                if until is None:
                    until = self._published_end
                if until is None:
                    until, origin = (yield from find_last_time(session)), "counted"
                points = grid.ending(until)
            table = yield from survival_table(session, request_of(session, self.groups), points)
            return table, origin

        table, origin = attempt.run(protocol(), session.masked_sites)
        return table, session.masked, origin

    def _public_points(self, grid: object, until: float | None) -> Floats:
        """Return a grid without a request: a last time that is not given is a published one."""
        chosen = TimeGrid.of(grid, until)
        end = chosen.until or self._published_end
        return grid_points(grid, until) if chosen.points is not None or end is None else chosen.ending(end)

    @property
    def _published_end(self) -> float | None:
        """Largest time in the ranges that the sites publish of the time; None if one has none."""
        assert self.question.survival is not None
        time = self.question.survival.times[-1]
        name = time.name if isinstance(time, Column) else ""
        columns = [self.partition.sites[site].published.get(name) for site in self.sites]
        ends = [column.range[1] for column in columns if column is not None and column.range is not None]
        return max(ends) if len(ends) == len(columns) and max(ends) > 0.0 else None

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        sites = super()._invent_sites(plan, policies)
        return with_synthetic_cells(sites, self.agreement, self.groups)


class KaplanMeier(CurveModel):
    """Survival curves and their comparison over sites that hold different rows.

    The sites count events and censored rows by group on intervals of time. At their ends the
    curve is the product-limit estimate of the pooled rows if each interval has rows with the event only, or
    one time. Otherwise events and censored rows within an interval are in random order, as in a life table.
    With ``Surv(start, stop, event)`` starts are rounded down. Make one with :meth:`from_formula`; the right
    side has columns of groups, or 1.

    No count is about few rows: each group has, in each interval and for each outcome, no row or as many rows
    as a policy requires for a level, 3 by default. Intervals of the requested grid are merged for it, and the
    curve is known at the ends that remain. If at least three sites mask the counts, and always the same ones,
    this minimum holds for the sum over the sites, and otherwise at every site, where few intervals remain.

    Parameters
    ----------
    formula : Formula
        A parsed formula with ``Surv(time, event)`` or ``Surv(start, stop, event)`` on its left side.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`.

    References
    ----------
    Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 53 (1958).

    Breslow and Crowley, "A large sample study of the life table and product limit estimates under random
    censorship", Annals of Statistics 2 (1974).

    Harrington and Fleming, "A class of rank test procedures for censored survival data", Biometrika 69
    (1982).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit()
    >>> curves.restricted_mean(34).round(1)["estimate"].to_dict()
    {'arm=drugs': 23.4, 'arm=surgery': 26.8}
    """

    model_name: ClassVar[str] = "Kaplan-Meier"

    @checks_arguments
    def fit(
        self,
        grid: float | Sequence[float] | Floats | None = None,
        *,
        until: float | None = None,
        masked: bool | None = None,
        epsilon: float | None = None,
        delta: float = USUAL_DELTA,
        bounds: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> KaplanMeierResults:
        """Count events and rows at risk on a grid of times.

        Parameters
        ----------
        grid : float or sequence of float
            Width of the intervals, or their ends, ascending. It is public. A fine grid is no disadvantage,
            since intervals with few rows are merged. By default 1, or a round number for studies of less than
            20 or more than 1,000 units.
        until : float, optional
            Last time; rows that are followed longer are at risk until then. By default the end of the ranges
            of the time that the sites publish, or else its rounded largest value, as that of a spline with
            ``df``: from masked counts of averages over blocks of rows.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the counts; by default with at least three sites,
            and with two where an owner requires it.
        epsilon : float, optional
            Release counts with noise, at this epsilon of differential privacy for one row added or removed,
            charged to the budgets of the sites in one charge. No interval is merged, and errors include the
            noise. :meth:`explain` states the price before the charge.
        delta : float
            At most 1e-5; for `epsilon`.
        bounds : mapping of str to sequence, optional
            Public levels of the groups for `epsilon`, where the sites publish none.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        KaplanMeierResults

        Raises
        ------
        ModelError
            The grid does not ascend, is not positive, or has too many points.
        EstimationError
            There are no events.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ 1", partition).fit([12, 24, 36, 48])
        >>> curves.tidy()[["time", "n_risk", "n_event", "survival"]].round(3)
           time  n_risk  n_event  survival
        0  12.0   651.0    158.0     0.802
        1  24.0   384.0    136.0     0.609
        2  36.0   185.0     84.0     0.440
        3  48.0    84.0     25.0     0.355
        """
        call, chosen = Call.of(self.fit, locals()), TimeGrid.of(grid, until)
        if epsilon is not None:
            points = self._public_points(grid, until)
            return self._read_noise(points, self._with_noise(points, epsilon, delta, bounds, masked))
        for name, site in self.partition.sites.items():
            if site.policy.privacy is not None:
                raise DescriptionError.of_rule(
                    "privacy budget",
                    name,
                    "releases counts only with noise, which a fit with epsilon= has",
                )
        return run_fit(self, call, KaplanMeier._estimate, chosen, masked)

    def explain(self, **arguments: Any) -> Explanation:
        """Report the requests of :meth:`fit`, its releases and with epsilon its price; no request is sent.

        Parameters
        ----------
        **arguments
            As for :meth:`fit`.

        Returns
        -------
        Explanation

        Examples
        --------
        >>> import fedstat as fs
        >>> owners = fs.Policy(privacy=fs.Budget(epsilon=2.0, delta=1e-6))
        >>> table = fs.datasets.make_survival()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital", policy=owners)
        >>> formula = "Surv(months, died) ~ 1"
        >>> fs.KaplanMeier.from_formula(formula, partition).explain(grid=3, until=60, epsilon=1.0).passes
        True
        """
        given = settled(self.fit, arguments)
        if given["epsilon"] is None:
            return super().explain(**arguments)
        noise = (given[name] for name in ("epsilon", "delta", "bounds", "masked"))
        table = self._with_noise(self._public_points(given["grid"], given["until"]), *noise)
        return replace(table.explain(), call=call_of(self, arguments))

    def _settle(self, partition: ClientPartition, before: Ledger) -> None:
        """Agree on levels and rows; sites with a budget report none, and levels are public."""
        if all(site.policy.privacy is None for site in partition.sites.values()):
            super()._settle(partition, before)
            return
        self.partition, self.sites, self.engine = partition, tuple(partition.sites), partition.engine
        self._session, self._assumed, self._agreement = secrets.token_hex(8), False, before
        question = self.question
        counts = tuple(SiteRowCounts(name, len(n), len(n)) for name, n in partition.rows.items())
        spec = BlockSpec(terms=question.terms, columns=question.columns, intercept=question.intercept)
        self.agreement = RowsSchema(question, spec, counts)

    def _with_noise(self, grid: Floats, epsilon: Any, delta: Any, bounds: Any, masked: Any) -> NoisyTable:
        """Return the table of running counts by group and event."""
        question = self.question
        setting = NoiseSetting.of(
            epsilon, delta, bounds, question.labels, question.subset_text or None, masked
        )
        match question.survival:
            case Survival(times=(Column(name=time),), event=Column(name=event)):
                event_column = CodedColumn(event, levels=(0, 1))
            case Survival(
                times=(Column(name=time),),
                event=Relation(symbol="==", left=Column(name=event), right=Level() | Number() as of),
            ):
                levels = setting.levels(self.partition, event).levels
                event_column = CodedColumn(event, (*(one for one in levels if one != of.value), of.value))
            case _:
                raise FormulaError(
                    "formula: with epsilon, the left side is 'Surv(time, event)' of two columns, or "
                    f"\"Surv(time, event == 'level')\"; received {question.response!r}"
                )
        groups = tuple(setting.levels(self.partition, name) for name in self.groups)
        if event_column.cells != 2:
            raise ModelError(f"bounds: the event {event!r} needs two levels with epsilon")
        ends = with_ends_apart(grid, np.ones(len(grid), dtype=np.bool_))
        part = TablePart("running", (CodedColumn(time, edges=tuple(ends.tolist())),), (*groups, event_column))
        return NoisyTable(self.partition, [part], setting, self.formula.text)

    def _read_noise(self, grid: Floats, table: NoisyTable) -> KaplanMeierResults:
        """Release the counts, and cut the curves where noise hides the rows at risk."""
        release = table.fit()
        running, groups = release.sums[0].running(0), table.requests[0].parts[0].groups[:-1]
        lines = running.upto.reshape(-1, 2, 2 * len(grid) + 1)
        censored, events = (RunningCounts(lines[:, k], running.covariance) for k in (0, 1))
        counts = noisy_survival_counts(events, censored, grid)
        J = int(last_known(counts, noise_at_ends(running.covariance, len(grid))).min())
        if not J:
            raise EstimationError(
                "noise hides the rows at risk of a group from the first time on. Use fewer groups or a "
                "larger epsilon; the charge for this release remains"
            )
        d, c = counts.events, counts.censored
        beyond = counts.beyond + (d + c)[:, J:].sum(axis=1)
        total, rows = d.sum(axis=1) + c.sum(axis=1) + counts.beyond, self.partition.rows
        names = [one.name for one in groups]
        labels = (
            ", ".join(f"{name}={level}" for name, level in zip(names, one, strict=True)) or "all rows"
            for one in product(*(one.levels for one in groups))
        )
        parts = {
            "response": self.formula.response,
            "labels": tuple(labels),
            "times": grid[:J],
            "events": d[:, :J],
            "censored": c[:, :J],
            "beyond": beyond,
            "entered": np.column_stack([total, np.zeros((len(d), J - 1))]),
            "at_ends": np.asarray(counts.at_ends)[:, :J],
            "events_at_ends": np.asarray(counts.events_at_ends)[:, :J],
            "apart": (True,) * J,
            "requested": grid,
            "least": 0,
            "over_sites": True,
            "observed": events.ascending[:, -1],
            "expected": np.full(len(d), np.nan),
            "covariance": np.full((len(d), len(d)), np.nan),
            "masked": bool(table.rows.masked_at),
            "sites": tuple(rows),
            "rows": tuple(len(one) for one in rows.values()),
            "left_out": max(sum(map(len, rows.values())) - round(float(total.sum())), 0),
            "noise": release.sums[0].deviation ** 2,
            "epsilon": release.epsilon,
            "delta": release.delta,
        }
        return KaplanMeierResults._of_noise(self, parts, release.ledger)

    def _estimate(self, attempt: FitAttempt, grid: TimeGrid, masked: object) -> KaplanMeierResults:
        table, hidden, proposed = self._count(attempt, grid, masked)
        return KaplanMeierResults._of(self, table, hidden, attempt.ledger, proposed)


class CumulativeIncidence(CurveModel):
    """Shares of rows with each of several competing events, over sites that hold different rows.

    The event is a category with declared levels; the first level is censoring. Counts, merged
    intervals and late entry are those of :class:`KaplanMeier`. Make one with :meth:`from_formula`; the
    right side has columns of groups, or 1.

    Parameters
    ----------
    formula : Formula
        A parsed formula with ``Surv(time, C(cause, levels=[...]))`` on its left side.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`.

    References
    ----------
    Aalen and Johansen, "An empirical transition matrix for non-homogeneous Markov chains based on censored
    observations", Scandinavian Journal of Statistics 5 (1978).

    Marubini and Valsecchi, "Analysing survival data from clinical trials and observational studies" (1995).

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_survival()
    >>> table["cause"] = table["died"].map({0: "none", 1: "death"}).mask(table.index % 4 == 1, "relapse")
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> formula = "Surv(months, C(cause, levels=['none', 'relapse', 'death'])) ~ arm"
    >>> fit = fs.CumulativeIncidence.from_formula(formula, partition).fit(grid=1, until=60)
    >>> fit.gray_test("death").round(3).to_dict()
    {'statistic': 7.181, 'df': 1.0, 'p_value': 0.007}
    """

    model_name: ClassVar[str] = "Cumulative incidence"
    _causes = True

    @checks_arguments
    def fit(
        self,
        grid: float | Sequence[float] | Floats | None = None,
        *,
        until: float | None = None,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> CumulativeIncidenceResults:
        """Count each event and rows at risk on a grid of times.

        Parameters
        ----------
        grid : float or sequence of float
            Width of the intervals, or their ends, ascending. It is public. A fine grid is no disadvantage,
            since intervals with few rows are merged. By default 1, or a round number for studies of less than
            20 or more than 1,000 units.
        until : float, optional
            Last time. By default as in :meth:`KaplanMeier.fit`.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the counts; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        CumulativeIncidenceResults

        Raises
        ------
        ModelError
            The grid does not ascend, is not positive, or has too many points.
        EstimationError
            There are no events.
        PolicyError
            A site refuses.
        """
        return run_fit(
            self, Call.of(self.fit, locals()), CumulativeIncidence._estimate, TimeGrid.of(grid, until), masked
        )

    def _estimate(self, attempt: FitAttempt, grid: TimeGrid, masked: object) -> CumulativeIncidenceResults:
        table, hidden, proposed = self._count(attempt, grid, masked)
        return CumulativeIncidenceResults._of(self, table, hidden, attempt.ledger, proposed)
