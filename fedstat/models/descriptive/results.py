"""Results of survival curves: Kaplan-Meier and competing events, quantiles, means and tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import FedstatWarning, ModelError, warn
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.noisy_tables import (
    RunningCounts,
    log_survival_noise,
    noise_at_ends,
    price,
    propagate_noise,
)
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH, fold_sites, header_sheet, site_rows_sheet
from fedstat.inference.survival_curves import (
    CONFIDENCE,
    TIME_TOLERANCE,
    WIDE_STEP,
    KnownCurve,
    LogRankSums,
    SurvivalCounts,
    cumulative_incidence,
    gray_test,
    log_rank,
    product_limit,
    restricted_mean,
    survival_quantiles,
)
from fedstat.inference.tables import Sheet, human_range, number
from fedstat.models.checks import check_choice, check_positive
from fedstat.models.descriptive.plots import plot_survival
from fedstat.models.descriptive.protocol import SurvivalTable
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import MASKED, SUBSET
from fedstat.models.results import Results
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "fedstat kaplan meier results 4"
COMPETING_FORMAT = "fedstat cumulative incidence results 3"
ConfType = Literal["log-log", "log", "plain"]
MOST_TIMES = 8
"""Times of a group in the summary; tidy() has all."""
MOST_SPREAD = 2001
"""Times over which events within intervals are spread, where times are not on the grid."""
DECISION = 0.05
"""Level at which the log-rank tests with and without sites are compared."""
ORIGINS = {
    "given": "as until=",
    "published": "the end of the ranges that the sites publish",
    "counted": "the rounded end of the times over all sites",
}
"""How the last time of a proposed grid was found."""
SITE_WIDTHS = (WIDTH - 14, 12)
NOTES = Catalogue(
    critical={
        "wide_intervals": "ONE INTERVAL HAS A LARGE PART OF A CURVE: between {before:g} and {after:g} it "
        "changes by {change:.2f}. Within the interval survival and quantiles are unknown, and mean survival "
        "times and the test without sites may be wrong. {hint}",
        "tests_differ": "THE TWO LOG-RANK TESTS DIFFER: p {by_site} with sites as strata, p {pooled} "
        "without. Hazards differ between sites, and the sites have other shares of the groups, or the "
        "intervals are wide. Read the test by site: only it compares rows of the same site.",
    },
    info={
        "proposed_grid": "Times were counted at multiples of {width:g} up to {end:g}, {origin}; "
        "fit(grid=..., until=...) chooses others.",
        "merged_intervals": "The curve is known at {times} times; {requested} were requested. Intervals "
        "were merged until {where} each group has no row or at least {least} rows with each outcome in each "
        "interval, also between these times and those of earlier curves.",
        "noise": "Counts have noise with epsilon {epsilon:.3g} at delta {delta:g} for one row added or "
        "removed, and errors of the curves include it.{early}",
        "at_risk": "Rows at risk at a time are those whose time is not earlier. At {few} of {times} times "
        "few rows have exactly this time and are not counted: there, rows at risk are those whose time is "
        "later.",
        "late_entry": "Rows enter late. They are at risk from the beginning of the interval in which they "
        "enter; where few are at risk, the curve is uncertain for all later times.",
        "censoring": "Censoring is assumed to be independent of the time of the event within each group. "
        "Within an interval, events and censored rows are taken to be in random order.",
        "left_out": "Rows left out because they lack the time, the event or the group: {rows:,}.",
        "subset": SUBSET,
    },
    protocol={
        "masking": f"Counts were masked over {{sites}} sites: {MASKED.format('')}",
        "masking/none": "Counts were not masked: the coordinator saw each site's part.",
    },
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KaplanMeierRecord:
    """What a file of results holds: counts (G, J) on times (J,), and the test stratified by site.

    `entered` are rows by the interval in which they enter, `at_ends` those of the leaving rows whose time is
    exactly the end of an interval, and `events_at_ends` those of them with an event, counted where `apart` is
    true. `requested` (R,) are the ends of the grid, and `times` those that are left; `proposed` is how its
    last time was found, empty for a grid of the analyst. A count of `least` rows or more, or of none, was
    required in each interval: over all sites with `over_sites`, and otherwise at every site. `rows` (K,) of
    the `tables` (K,) of the sites are used. With noise, `noise` is its variance on the running sums of
    counts, which were charged `epsilon` at `delta`.
    """

    response: str
    labels: Annotated[tuple[str, ...], "G"]
    times: Annotated[Floats, "J"]
    events: Annotated[Floats, "G J"]
    censored: Annotated[Floats, "G J"]
    beyond: Annotated[Floats, "G"]
    entered: Annotated[Floats, "G J"]
    at_ends: Annotated[Floats, "G J"]
    events_at_ends: Annotated[Floats, "G J"]
    apart: Annotated[tuple[bool, ...], "J"]
    requested: Annotated[Floats, "R"]
    least: int
    over_sites: bool
    observed: Annotated[Floats, "G"]
    expected: Annotated[Floats, "G"]
    covariance: Annotated[Floats, "G G"]
    masked: bool
    sites: Annotated[tuple[str, ...], "K"]
    rows: Annotated[tuple[int, ...], "K"]
    left_out: int
    subset: str = ""
    noise: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.0
    proposed: str = ""
    tables: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CumulativeIncidenceRecord(KaplanMeierRecord):
    """Counts with competing events: `events` of any cause, `by_cause` (G, J, C) by cause."""

    causes: Annotated[tuple[str, ...], "C"]
    by_cause: Annotated[Floats, "G J C"]


CurveRecord = TypeVar("CurveRecord", bound=KaplanMeierRecord)


class CurveResults(Results[CurveRecord]):
    """Counts on a grid of times by group, and what is common to all that follows from them."""

    @staticmethod
    def _parts(model: HorizontalModel, table: SurvivalTable, masked: bool, proposed: str) -> dict[str, Any]:
        """Return the parts of a record."""
        agreement = model.agreement
        names = agreement.question.columns
        levels = [agreement.spec.levels[name] for name in names]
        labels = tuple(
            ", ".join(f"{name}={level}" for name, level in zip(names, one, strict=True)) or "all rows"
            for one in product(*levels)
        )
        counts, entered = table.survival_counts, table.entered
        if entered is None:
            entered = np.zeros_like(counts.events)
            entered[:, 0] = table.rows.sum(axis=1)
        return {
            "response": model.formula.response,
            "labels": labels,
            "times": counts.times,
            "events": counts.events,
            "censored": counts.censored,
            "beyond": counts.beyond,
            "entered": entered,
            "at_ends": table.at_ends,
            "events_at_ends": table.events_at_ends,
            "apart": tuple(table.intervals.apart.tolist()),
            "requested": table.intervals.requested,
            "proposed": proposed,
            "least": table.intervals.least,
            "over_sites": table.intervals.over_sites,
            "observed": table.by_site.observed,
            "expected": table.by_site.expected,
            "covariance": table.by_site.covariance,
            "masked": masked,
            "sites": tuple(row.site for row in agreement.sites),
            "rows": tuple(row.n for row in agreement.sites),
            "tables": tuple(row.n_rows for row in agreement.sites),
            "left_out": sum(row.n_rows - row.n for row in agreement.sites),
            "subset": agreement.question.subset_text,
        }

    @property
    def labels(self) -> tuple[str, ...]:
        """Groups, in the order of their levels."""
        return self._record.labels

    @property
    def times(self) -> Floats:
        """Ends of the intervals."""
        return self._record.times

    @property
    def nobs(self) -> int:
        """Rows; with noise, their noisy number."""
        return round(float(self._group_rows.sum())) if self._record.noise else sum(self._record.rows)

    @property
    def events(self) -> int:
        """Events, also after the last time, as all sites' log-rank sums have them."""
        return round(float(self._record.observed.sum()))

    @property
    def _counts(self) -> SurvivalCounts:
        record = self._record
        return SurvivalCounts(
            record.times,
            record.events,
            record.censored,
            record.beyond,
            record.entered,
            record.at_ends,
            record.events_at_ends,
        )

    @property
    def _on_grid(self) -> bool:
        """Whether most times are ends of the grid, as far as rows with these times were counted apart."""
        record = self._record
        step = np.diff(np.searchsorted(record.requested, np.append(0.0, record.times), side="right")) == 1
        counted = np.array(record.apart, dtype=bool)
        counted = counted & step if (counted & step).any() else counted
        leaving = (record.events + record.censored)[:, counted].sum()
        return bool(record.at_ends[:, counted].sum() > (leaving / 2.0 if step[counted].all() else 0.0))

    @property
    def _spread(self) -> Floats:
        """Times over which the events of an interval are spread: those of the grid if times are on it."""
        record = self._record
        if self._on_grid:
            return record.requested
        return np.union1d(np.linspace(0.0, record.times[-1], MOST_SPREAD), record.times)

    @property
    def _late(self) -> bool:
        return bool(self._record.entered[:, 1:].any())

    @property
    def _unit(self) -> str:
        return self._record.response.partition("(")[2].partition(",")[2 * self._late].split(",")[0].strip()

    def _shown_times(self, most: int) -> Floats:
        """Return some of the ends for the summary, the last one among them."""
        count = min(most, len(self.times))
        return np.asarray(self.times[np.linspace(0, len(self.times), count + 1).astype(int)[1:] - 1])

    @property
    def _merged(self) -> bool:
        return not self._record.noise and not np.array_equal(self.times, self._record.requested)

    @property
    def _noise(self) -> Floats:
        """Covariance (J + 1, J + 1) of the noise on running counts up to each time, and on all rows."""
        record = self._record
        J = 2 * len(record.requested) + 1
        running = RunningCounts.of_sums(np.zeros(J), record.noise)
        return noise_at_ends(running.covariance, len(record.times))

    @property
    def _log_noise(self) -> Floats | None:
        """Covariance of the noise on the logarithm of each curve, (G, J, J); None without noise."""
        return log_survival_noise(self._counts, self._noise) if self._record.noise else None

    @property
    def _price(self) -> float:
        """Median ratio of standard errors with and without noise."""
        sampling, noise = self._counts.log_variance.cumsum(axis=1), self._log_noise
        return 1.0 if noise is None else price(sampling, np.diagonal(noise, axis1=1, axis2=2))

    @property
    def _risk_table(self) -> Floats:
        """Rows at risk at time 0, and at the end of each interval: (G, 1 + J)."""
        counts = self._counts
        return np.hstack([counts.at_start[:, :1], counts.at_risk_at_ends])

    def _known(self, frame: pd.DataFrame, name: str, start: float) -> KnownCurve:
        """Return a curve of :meth:`tidy` with its limits at all ends."""
        places = np.searchsorted(frame["time"], self.times, side="right")
        values = frame[[name, "conf_low", "conf_high"]].to_numpy()
        return KnownCurve(self.times, np.vstack([np.full(3, start), values])[places], start)

    def _warn_between(self, times: Floats, points: Floats) -> None:
        """Warn about points between two ends of intervals at which the curve is not known."""
        if len(points):
            where = KnownCurve(times, np.zeros((len(times), 3)), 0.0).between(points)
            warn(
                "the value of the curve is NaN where it is not known, and its limits are those of the two "
                f"ends: {where}. They are in .times",
                FedstatWarning,
            )

    @property
    def _falls(self) -> Floats:
        """Change of each group's curve over each interval, (G, J); of competing events, the sum of all."""
        counts = self._counts
        n = counts.at_risk
        share = np.divide(counts.events, n, out=np.zeros_like(n), where=n > 0.0)
        survival = np.cumprod(1.0 - share, axis=1)
        return np.asarray(np.hstack([np.ones((len(n), 1)), survival[:, :-1]]) - survival)

    @property
    def _group_rows(self) -> Floats:
        record = self._record
        return np.asarray(record.events.sum(axis=1) + record.censored.sum(axis=1) + record.beyond)

    def _header(self, tests: Sequence[tuple[str, str]]) -> Sheet:
        record = self._record
        left = [
            ("Dep. Variable", record.response),
            ("Model", self.model_name),
            ("No. Observations", f"{self.nobs:,}"),
            ("Events", f"{self.events:,}"),
            ("Groups", str(len(self.labels))),
            *([("Subset", record.subset)] if record.subset else []),
            ("Intervals", f"{len(self.times)}, up to {self.times[-1]:g}"),
            *tests,
        ]
        right = [("Sites", str(len(record.sites))), ("Rows by site", human_range(record.rows))]
        if record.noise:
            right += [("Epsilon", f"{record.epsilon:.3g}"), ("Delta", f"{record.delta:g}")]
            right.append(("Errors by noise", f"x {self._price:.2f}"))
        if self._ledger is not None:
            right.append(("Counts", "masked" if record.masked else "unmasked"))
        return header_sheet(f"{self.model_name} results", [*left, *right])

    def _site_sheet(self) -> Sheet:
        record = self._record
        if not record.tables:  # counts with noise: rows in use are no site's own
            rows = [(site, f"{n:,}") for site, n in zip(record.sites, record.rows, strict=True)]
            return Sheet(("site", "rows"), fold_sites(rows), "lr", SITE_WIDTHS, gap=2)
        by_site = zip(record.sites, record.rows, record.tables, strict=True)
        used = [(site, n, 1.0 - n / whole) for site, n, whole in by_site]
        return site_rows_sheet(used, subset=bool(record.subset))

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        record = self._record
        if record.noise:
            end, asked = record.times[-1], record.requested[-1]
            early = f" They end at {end:g} of {asked:g}: noise hides the rows at risk later." * bool(
                end < asked
            )
            yield NOTES.note("noise", epsilon=record.epsilon, delta=record.delta, early=early)
        falls = self._falls
        place = int(falls.max(axis=0).argmax())
        if falls.max() > WIDE_STEP:
            before = self.times[place - 1] if place else 0.0
            hint = "Use a narrower grid."
            if self._merged:
                hint = "Use fewer groups or more sites, or have the owners lower min_level_count."
                if not record.over_sites:
                    hint = f"Mask the counts over three sites or more, always the same ones. {hint}"
            yield NOTES.note(
                "wide_intervals", before=before, after=self.times[place], change=falls.max(), hint=hint
            )
        if record.proposed:
            end = float(record.requested[-1])
            yield NOTES.note(
                "proposed_grid", width=float(record.requested[0]), end=end, origin=ORIGINS[record.proposed]
            )
        if self._merged:
            whole = "over all sites" if record.over_sites else "at every site"
            yield NOTES.note(
                "merged_intervals",
                times=len(record.times),
                requested=len(record.requested),
                where=whole,
                least=record.least,
            )
        if not all(record.apart):
            yield NOTES.note("at_risk", few=len(record.times) - sum(record.apart), times=len(record.times))
        if self._late:
            yield NOTES.note("late_entry")
        yield NOTES.note("censoring")
        if record.subset:
            rows = self.nobs + record.left_out
            yield NOTES.note("subset", used=self.nobs, rows=rows, subset=record.subset)
        elif record.left_out:
            yield NOTES.note("left_out", rows=record.left_out)
        if record.masked:
            yield NOTES.note("masking", sites=len(record.sites))
        elif len(record.sites) > 1:
            yield NOTES.note("masking/none")

    def __repr__(self) -> str:
        groups, K = len(self.labels), len(self._record.sites)
        return (
            f"<{self.model_name} results: {self._record.response}, {groups} group{'s' * (groups != 1)}, "
            f"{self.nobs:,} rows at {K} site{'s' * (K != 1)}; see .summary()>"
        )


def p_text(p: float) -> str:
    """Write a p-value with its sign of comparison."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def p_words(test: pd.Series) -> str:
    """Write a test in words."""
    return f"{test['statistic']:.2f} on {test['df']:.0f} df, p {p_text(test['p_value'])}"


def _scores(rho: float, gamma: float, counts: SurvivalCounts) -> Floats:
    """Return observed less expected events of each group, (G,)."""
    sums = log_rank(counts.events, counts.at_risk, rho, gamma)
    return np.asarray(sums.observed - sums.expected)


class KaplanMeierResults(CurveResults[KaplanMeierRecord], saved_as=FORMAT, record=KaplanMeierRecord):
    """Results of :meth:`fedstat.KaplanMeier.fit`: survival curves by group.

    Attributes
    ----------
    model_name : str
        Name of the model in titles and tables.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(grid=1, until=60)
    >>> curves
    <Kaplan-Meier results: Surv(months, died), 2 groups, 800 rows at 4 sites; see .summary()>
    >>> curves.labels, curves.nobs, curves.events
    (('arm=drugs', 'arm=surgery'), 800, 413)
    >>> round(float(curves.tidy()["survival"].min()), 2), "median" in curves.summary().as_text()
    (0.22, True)
    >>> curves.quantile(0.25)["estimate"].tolist(), curves.ledger.rounds > 5
    ([15.0, 18.0], True)
    >>> curves.times.shape, curves.tidy()["group"].unique().tolist()
    ((21,), ['arm=drugs', 'arm=surgery'])
    """

    model_name = "Kaplan-Meier"

    @classmethod
    def _of(
        cls, model: HorizontalModel, table: SurvivalTable, masked: bool, ledger: Ledger, proposed: str = ""
    ) -> Self:
        """Make results of a fit."""
        return cls(KaplanMeierRecord(**cls._parts(model, table, masked, proposed)), ledger, model)

    @classmethod
    def _of_noise(cls, model: HorizontalModel, parts: Mapping[str, Any], ledger: Ledger) -> Self:
        """Make results of counts with noise."""
        return cls(KaplanMeierRecord(**parts), ledger, model)

    # -- figures ---------------------------------------------------------------------------------

    def _curves(self, alpha: float, conf_type: ConfType) -> dict[str, pd.DataFrame]:
        check_choice("conf_type", conf_type, CONFIDENCE)
        noise = self._log_noise
        added = None if noise is None else np.diagonal(noise, axis1=1, axis2=2)
        frames = product_limit(self._counts, alpha, conf_type, added)
        return dict(zip(self.labels, frames, strict=True))

    @takes_alpha
    def tidy(self, alpha: float = 0.05, conf_type: ConfType = "log-log") -> pd.DataFrame:
        """Return the curves, one row for each group and time.

        Parameters
        ----------
        alpha : float
        conf_type : {"log-log", "log", "plain"}
            Scale on which the intervals are symmetric; R's default is "log".

        Returns
        -------
        DataFrame
            ``group``; ``time``, the end of an interval; ``n_risk``, the rows at risk at this time (if counts
            of few rows are not released, those whose time is later); ``n_start``, the rows at risk at the
            beginning of the interval, by which its events are divided; ``n_event`` and ``n_censor`` in the
            interval; ``survival``, ``std_error``, ``conf_low``, ``conf_high``. Until the first event the
            lower limit is that of Clopper and Pearson.
        """
        curves = self._curves(alpha, conf_type)
        return pd.concat([frame.assign(group=label) for label, frame in curves.items()], ignore_index=True)[
            ["group", *next(iter(curves.values())).columns]
        ]

    @takes_alpha
    def survival_at(
        self, times: float | Sequence[float], alpha: float = 0.05, conf_type: ConfType = "log-log"
    ) -> pd.DataFrame:
        """Return survival probabilities at times, with intervals.

        A curve is known at the ends of its intervals, :attr:`times`, and between two ends where nobody had
        the event. Between other ends the probability is NaN; its limits are the lower one at the end after it
        and the upper one at the end before it, so that they hold there as well.

        Parameters
        ----------
        times : float or sequence of float
        alpha : float
        conf_type : {"log-log", "log", "plain"}

        Returns
        -------
        DataFrame
            ``group``, ``time``, ``survival``, ``conf_low``, ``conf_high``; all NaN after the last end.

        Warns
        -----
        FedstatWarning
            A time is between two ends; the warning names them.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ 1", partition).fit([12, 24, 36])
        >>> curves.survival_at([12, 24]).round(2)
              group  time  survival  conf_low  conf_high
        0  all rows    12      0.80      0.77       0.83
        1  all rows    24      0.61      0.57       0.64
        """
        times = list(np.atleast_1d(times))
        rows, points = [], np.asarray(times, dtype=np.float64)
        between = np.zeros(len(points), dtype=bool)
        for label, frame in self._curves(alpha, conf_type).items():
            found = self._known(frame, "survival", 1.0).at(points)
            between |= np.isnan(found[:, 0]) & ~np.isnan(found[:, 2])
            rows += [(label, time, *values) for time, values in zip(times, found.tolist(), strict=True)]
        self._warn_between(self.times, points[between])
        return pd.DataFrame(rows, columns=["group", "time", "survival", "conf_low", "conf_high"])

    @takes_alpha
    def quantile(self, q: float = 0.5, alpha: float = 0.05, conf_type: ConfType = "log-log") -> pd.DataFrame:
        """Return the time by which a share `q` had the event, by group, with intervals.

        The interval has the limits of the curve's band (Brookmeyer and Crowley 1982), each of them the outer
        end of an interval. The estimate is the end of an interval; NaN where the curve does not
        fall so far.

        Returns
        -------
        DataFrame
            ``estimate``, ``conf_low``, ``conf_high``, and the interval in which the curve falls to the level:
            later than ``after``, and at the latest ``until``. Where the curve falls by more than 0.1 over
            this interval, the estimate is NaN: it is somewhere in the interval.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=60)
        >>> curves.quantile(0.25)["estimate"].tolist()
        [15.0, 18.0]
        >>> coarse = fs.KaplanMeier.from_formula("Surv(months, died) ~ 1", partition).fit(24, until=48)
        >>> coarse.quantile(0.25)[["estimate", "after", "until"]].iloc[0].tolist()
        [nan, 0.0, 24.0]
        """
        if not 0.0 < q < 1.0:
            raise ModelError(f"q: expected a share between 0 and 1, received {q}")
        curves = self._curves(alpha, conf_type)
        rows = {
            label: survival_quantiles(self._known(frame, "survival", 1.0), 1.0 - q, self._on_grid)
            for label, frame in curves.items()
        }
        columns = ["estimate", "conf_low", "conf_high", "after", "until"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns)

    @takes_alpha
    def median(self, alpha: float = 0.05, conf_type: ConfType = "log-log") -> pd.DataFrame:
        """Return the median survival time by group, with intervals; see :meth:`quantile`.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=60)
        >>> curves.median().columns.tolist()
        ['median', 'conf_low', 'conf_high', 'after', 'until']
        """
        return self.quantile(0.5, alpha, conf_type).rename(columns={"estimate": "median"})

    @takes_alpha
    def restricted_mean(self, until: float | None = None, alpha: float = 0.05) -> pd.DataFrame:
        """Return the mean survival time up to a time, with normal intervals, by group.

        It is R's of times that are rounded up to the requested grid. Where intervals were merged, their
        events are spread evenly over the requested times in them.

        Parameters
        ----------
        until : float, optional
            By default the end of the last interval; at most that.
        alpha : float

        Returns
        -------
        DataFrame
            ``estimate``, ``std_error``, ``conf_low``, ``conf_high``.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=60)
        >>> curves.restricted_mean(34).round(1)["estimate"].tolist()
        [23.4, 26.8]
        """
        end = float(self.times[-1]) if until is None else float(until)
        check_positive("until", end)
        if end > self.times[-1]:
            raise ModelError(f"until: the curves end at {self.times[-1]:g}, received {end:g}")
        z = float(stats.norm.isf(alpha / 2.0))
        rows, noise = {}, self._log_noise
        # Noise on the curve at two times is not independent: it is added to the error of the mean.
        steps = np.clip(np.append(self.times[1:], np.inf), None, end) - np.minimum(self.times, end)
        frames = product_limit(self._counts, alpha, "log-log")
        for g, (label, frame) in enumerate(zip(self.labels, frames, strict=True)):
            mean, error = restricted_mean(self.times, frame, end, self._spread)
            if noise is not None:
                areas = steps * self._known(frame, "survival", 1.0).values[:, 0]
                error = float(np.sqrt(error**2 + areas @ noise[g] @ areas))
            rows[label] = (mean, error, mean - z * error, mean + z * error)
        columns = ["estimate", "std_error", "conf_low", "conf_high"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns)

    def log_rank_test(self, rho: float = 0.0, gamma: float = 0.0, *, by_site: bool = False) -> pd.Series:
        """Compare the groups: log-rank test, or a weighted one of Fleming and Harrington.

        Parameters
        ----------
        rho, gamma : float
            Powers of the survival probability S and of 1 - S with which times are weighted: (0, 0) is the
            log-rank test, (1, 0) Peto and Peto's, (0, 1) gives weight to late differences.
        by_site : bool
            Whether sites are strata. This test is exact on the sites' own times and does not need the grid;
            `rho` and `gamma` are 0.

        Returns
        -------
        Series
            ``statistic``, ``df``, ``p_value``. With epsilon, the variance includes the noise.

        Raises
        ------
        ModelError
            There is one group, a power is negative, or powers or an epsilon come with sites as strata.

        References
        ----------
        Fleming and Harrington, "Counting processes and survival analysis" (1991), section 7.2.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=60)
        >>> curves.log_rank_test(by_site=True).round(2).to_dict()
        {'statistic': 25.59, 'df': 1.0, 'p_value': 0.0}
        """
        if len(self.labels) < 2:
            raise ModelError("log_rank_test: it compares groups, and there is one")
        if by_site and (rho or gamma):
            raise ModelError("rho: the test with sites as strata is the log-rank test, with rho and gamma 0")
        if min(rho, gamma) < 0.0:
            raise ModelError(f"rho, gamma: expected no negative power, received {rho:g} and {gamma:g}")
        record = self._record
        if by_site and record.noise:
            raise ModelError(
                "by_site: curves with epsilon have no counts by site; leave it out to compare all rows"
            )
        sums = LogRankSums(record.observed, record.expected, record.covariance)
        if not by_site:
            sums = log_rank(record.events, self._counts.at_risk, rho, gamma)
        if record.noise:
            added = propagate_noise(partial(_scores, rho, gamma), self._counts, self._noise)
            sums = replace(sums, covariance=sums.covariance + added)
        statistic, df, p = sums.test()
        return pd.Series({"statistic": statistic, "df": float(df), "p_value": p})

    @takes_alpha
    def plot(
        self,
        ax: Axes | None = None,
        *,
        alpha: float = 0.05,
        conf_type: ConfType = "log-log",
        events: bool = False,
    ) -> Axes:
        """Draw the curves with their bands, and the numbers of rows at risk below.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        alpha : float
        conf_type : {"log-log", "log", "plain"}
        events : bool
            Draw shares that had the event instead of shares that survive.

        Returns
        -------
        matplotlib Axes

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=60)
        >>> curves.plot().get_ylabel()
        'survival'
        """
        several, noisy = len(self.labels) > 1, bool(self._record.noise)
        test = self.log_rank_test(by_site=not noisy)["p_value"] if several else None
        curves = self._curves(alpha, conf_type)
        return plot_survival(
            curves,
            self.times,
            self._risk_table,
            self._unit,
            test,
            ax=ax,
            alpha=alpha,
            events=events,
            test="log-rank test" if noisy else "log-rank test stratified by site",
            merged=self._merged,
        )

    # -- summary ---------------------------------------------------------------------------------

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        if len(self.labels) < 2 or len(self._record.sites) < 2 or self._record.noise:
            return
        by_site, pooled = (self.log_rank_test(by_site=one)["p_value"] for one in (True, False))
        if (by_site < DECISION) != (pooled < DECISION) and max(by_site, pooled) > 2.0 * min(by_site, pooled):
            yield NOTES.note("tests_differ", by_site=p_text(by_site), pooled=p_text(pooled))

    def _glance(self) -> Mapping[str, float]:
        test = (
            self.log_rank_test(by_site=not self._record.noise)
            if len(self.labels) > 1
            else {"statistic": np.nan, "p_value": np.nan}
        )
        return {
            "nobs": self.nobs,
            "n_sites": len(self._record.sites),
            "events": self.events,
            "groups": len(self.labels),
            "statistic": float(test["statistic"]),
            "p_value": float(test["p_value"]),
        }

    def _sheets(self) -> Iterator[Sheet]:
        several = len(self.labels) > 1
        tests = [("Log-rank by site", True), ("Log-rank pooled", False)] if several else []
        tests = tests[1:] if self._record.noise else tests
        yield self._header([(name, p_words(self.log_rank_test(by_site=by_site))) for name, by_site in tests])
        yield self._group_sheet()
        yield self._curve_sheet()
        yield self._site_sheet()

    def _group_sheet(self) -> Sheet:
        medians, means = self.median(), self.restricted_mean()
        record, rows = self._record, []
        events = record.observed
        sizes = self._group_rows
        for place, label in enumerate(self.labels):
            median, low, high, after, upto = medians.to_numpy()[place].tolist()
            mean, error = means.to_numpy()[place, :2].tolist()
            rows.append(
                (
                    label,
                    f"{sizes[place]:,.0f}",
                    f"{events[place]:,.0f}",
                    f"{after:g} to {upto:g}" if np.isnan(median) and np.isfinite(after) else number(median),
                    number(low),
                    number(high),
                    number(mean),
                    number(error),
                )
            )
        headers = (
            "group",
            "rows",
            "events",
            "median",
            "[0.025",
            "0.975]",
            f"mean to {self.times[-1]:g}",
            "std err",
        )
        widths = (WIDTH - 2 * 8 - 3 * 10 - 14 - 10 - 7, 8, 8, 10, 10, 10, 14, 10)
        return Sheet(headers, tuple(rows), "l" + "r" * 7, widths)

    def _curve_sheet(self) -> Sheet:
        rows: list[tuple[str, ...]] = []
        shown = self._shown_times(MOST_TIMES)
        for label, frame in self._curves(0.05, "log-log").items():
            places, first = np.searchsorted(shown, frame["time"]), True
            for place in range(len(shown)):
                part = frame[places == place]
                if not len(part):
                    continue
                # Events and censored rows since the line above; all else at its last time.
                row, counts = part.iloc[-1], part[["n_event", "n_censor"]].sum().tolist()
                cells = (
                    f"{row['time']:g}",
                    f"{row['n_risk']:,.0f}",
                    *(f"{one:,.0f}" for one in counts),
                )
                shares = (f"{row[name]:.3f}" for name in ("survival", "conf_low", "conf_high"))
                rows.append((label if first else "", *cells, *shares))
                first = False
        headers = ("group", "time", "at risk", "events", "censored", "survival", "[0.025", "0.975]")
        widths = (WIDTH - 4 * 10 - 3 * 11 - 7, 10, 10, 10, 10, 11, 11, 11)
        return Sheet(headers, tuple(rows), "l" + "r" * 7, widths)


class CumulativeIncidenceResults(
    CurveResults[CumulativeIncidenceRecord], saved_as=COMPETING_FORMAT, record=CumulativeIncidenceRecord
):
    """Results of :meth:`fedstat.CumulativeIncidence.fit`: shares with each event, by group.

    Attributes
    ----------
    model_name : str
        Name of the model in titles and tables.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_survival()
    >>> table["cause"] = table["died"].map({0: "none", 1: "death"}).mask(table.index % 4 == 1, "relapse")
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> formula = "Surv(months, C(cause, levels=['none', 'relapse', 'death'])) ~ arm"
    >>> fit = fs.CumulativeIncidence.from_formula(formula, partition).fit(grid=1, until=60)
    >>> print(repr(fit)[:31], repr(fit)[-33:])
    <Cumulative incidence results:   rows at 4 sites; see .summary()>
    >>> fit.causes, fit.labels, fit.nobs, fit.events
    (('relapse', 'death'), ('arm=drugs', 'arm=surgery'), 800, 503)
    >>> fit.incidence_at([12, 24])["incidence"].round(2).tolist()
    [0.05, 0.16, 0.18, 0.33, 0.04, 0.11, 0.12, 0.24]
    >>> fit.times.tolist()[-1] <= 60, "Gray" in fit.summary().as_text()
    (True, True)
    >>> fit.gray_test("relapse")["df"], fit.plot("death").get_ylabel()
    (np.float64(1.0), 'cumulative incidence')
    """

    model_name = "Cumulative incidence"

    @classmethod
    def _of(
        cls, model: HorizontalModel, table: SurvivalTable, masked: bool, ledger: Ledger, proposed: str = ""
    ) -> Self:
        """Make results of a fit."""
        survival = model.question.survival
        assert survival is not None
        cells = table.counts.cells[:, :-1, 1:]
        parts = cls._parts(model, table, masked, proposed)
        return cls(CumulativeIncidenceRecord(**parts, causes=survival.causes, by_cause=cells), ledger, model)

    @property
    def causes(self) -> tuple[str, ...]:
        """Competing events."""
        return self._record.causes

    @takes_alpha
    def tidy(self, alpha: float = 0.05, conf_type: ConfType = "log-log") -> pd.DataFrame:
        """Return the shares with each event, one row for each group, event and time.

        Parameters
        ----------
        alpha : float
        conf_type : {"log-log", "log", "plain"}
            Scale on which the intervals are symmetric.

        Returns
        -------
        DataFrame
            ``group``, ``cause``, ``time``, ``n_risk``, ``n_start``, ``n_event``, ``incidence``,
            ``std_error``, ``conf_low``, ``conf_high``; numbers of rows as in :meth:`KaplanMeierResults.tidy`.
        """
        check_choice("conf_type", conf_type, CONFIDENCE)
        found = cumulative_incidence(self._counts, self._record.by_cause, alpha, conf_type)
        frames = [
            frame.assign(group=label, cause=cause)
            for label, several in zip(self.labels, found, strict=True)
            for cause, frame in zip(self.causes, several, strict=True)
        ]
        out = pd.concat(frames, ignore_index=True)
        return out[["group", "cause", *out.columns[:-2]]]

    @takes_alpha
    def incidence_at(
        self, times: float | Sequence[float], alpha: float = 0.05, conf_type: ConfType = "log-log"
    ) -> pd.DataFrame:
        """Return shares with each event by given times, with intervals; NaN after the last end.

        A share is known at the ends of intervals, and between two ends where it is the same. Between other
        ends it is NaN, and its limits are the outer ones of the two ends.

        Parameters
        ----------
        times : float or sequence of float
        alpha : float
        conf_type : {"log-log", "log", "plain"}

        Returns
        -------
        DataFrame
            ``group``, ``cause``, ``time``, ``incidence``, ``std_error``, ``conf_low``, ``conf_high``.

        Warns
        -----
        FedstatWarning
            A time is between two ends; the warning names them.
        """
        times = list(np.atleast_1d(times))
        tidy, rows, points = self.tidy(alpha, conf_type), [], np.asarray(times, dtype=np.float64)
        between = np.zeros(len(points), dtype=bool)
        for (label, cause), frame in tidy.groupby(["group", "cause"], sort=False):
            found = self._known(frame, "incidence", 0.0).at(points)
            places = np.searchsorted(frame["time"], points * (1.0 + TIME_TOLERANCE), side="right")
            errors = np.append(0.0, frame["std_error"])[places]
            errors = np.where(np.isnan(found[:, 0]), np.nan, errors)
            between |= np.isnan(found[:, 0]) & ~np.isnan(found[:, 2])
            rows += [
                (label, cause, time, values[0], error, *values[1:])
                for time, values, error in zip(times, found.tolist(), errors.tolist(), strict=True)
            ]
        self._warn_between(self.times, points[between])
        columns = ["incidence", "std_error", "conf_low", "conf_high"]
        return pd.DataFrame(rows, columns=["group", "cause", "time", *columns])

    def gray_test(self, cause: str | None = None, rho: float = 0.0) -> pd.Series:
        """Compare the cumulative incidence of an event between the groups (Gray 1988).

        Parameters
        ----------
        cause : str, optional
            By default the first.
        rho : float
            Power of 1 - F with which times are weighted, F the cumulative incidence of all groups.

        Returns
        -------
        Series
            ``statistic``, ``df``, ``p_value``.

        Raises
        ------
        ModelError
            There is one group, or no such event.

        References
        ----------
        Gray, "A class of K-sample tests for comparing the cumulative incidence of a competing risk", Annals
        of Statistics 16 (1988).
        """
        if len(self.labels) < 2:
            raise ModelError("gray_test: it compares groups, and there is one")
        events = self._record.by_cause[:, :, self._place(cause)]
        others = self._record.events - events
        statistic, df, p = gray_test(events, others, self._counts.at_risk, rho)
        return pd.Series({"statistic": statistic, "df": float(df), "p_value": p})

    def _place(self, cause: str | None) -> int:
        if cause is None:
            return 0
        check_choice("cause", cause, self.causes)
        return self.causes.index(cause)

    @takes_alpha
    def plot(
        self,
        cause: str | None = None,
        ax: Axes | None = None,
        *,
        alpha: float = 0.05,
        conf_type: ConfType = "log-log",
    ) -> Axes:
        """Draw the share with an event by group, with bands, and the numbers of rows at risk below.

        Parameters
        ----------
        cause : str, optional
            By default the first.
        ax : matplotlib Axes, optional
        alpha : float
        conf_type : {"log-log", "log", "plain"}

        Returns
        -------
        matplotlib Axes
        """
        name = self.causes[self._place(cause)]
        tidy = self.tidy(alpha, conf_type)
        curves = {}
        for label, frame in tidy[tidy["cause"] == name].groupby("group", sort=False):
            parts = {"survival": "incidence", "conf_low": "conf_low", "conf_high": "conf_high"}
            curves[str(label)] = frame.assign(**{to: 1.0 - frame[of] for to, of in parts.items()})
        test = self.gray_test(name)["p_value"] if len(self.labels) > 1 else None
        return plot_survival(
            curves,
            self.times,
            self._risk_table,
            self._unit,
            test,
            ax=ax,
            alpha=alpha,
            events=True,
            words=(f"Cumulative incidence: {name}", "cumulative incidence", "Gray's test"),
            merged=self._merged,
        )

    def _glance(self) -> Mapping[str, float]:
        events = {f"events_{k + 1}": float(n) for k, n in enumerate(self._record.by_cause.sum(axis=(0, 1)))}
        sizes = {"nobs": self.nobs, "n_sites": len(self._record.sites), "groups": len(self.labels)}
        return {**sizes, "events": self.events, **events}

    def _sheets(self) -> Iterator[Sheet]:
        several = len(self.labels) > 1
        tests = [(f"Gray: {cause}", p_words(self.gray_test(cause))) for cause in self.causes if several]
        yield self._header(tests)
        shown = self._shown_times(5)
        at = self.incidence_at(shown.tolist())
        rows, before = [], ""
        for label, cause, time, *figures in at.itertuples(index=False, name=None):
            group = f"{label}, {cause}"
            rows.append((group if group != before else "", f"{time:g}", *(f"{one:.3f}" for one in figures)))
            before = group
        headers = ("group, event", "time", "incidence", "std err", "[0.025", "0.975]")
        widths = (WIDTH - 5 * 12 - 5, 12, 12, 12, 12, 12)
        yield Sheet(headers, tuple(rows), "l" + "r" * 5, widths)
        yield self._site_sheet()
