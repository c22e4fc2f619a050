"""Results of a Kaplan-Meier fit: curves, quantiles, means and tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.summary import WIDTH, Note, header_sheet, released_kinds
from fedstat.inference.survival_curves import (
    CONFIDENCE,
    LogRankSums,
    SurvivalCounts,
    log_rank,
    product_limit,
    restricted_mean,
    survival_quantiles,
)
from fedstat.inference.tables import Sheet, human_range, number
from fedstat.models.checks import check_choice, check_level, check_positive
from fedstat.models.descriptive.plots import plot_survival
from fedstat.models.descriptive.protocol import SurvivalTable
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.results import MASKED
from fedstat.models.results import Results
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "fedstat kaplan meier results 1"
ConfType = Literal["log-log", "log", "plain"]
MOST_TIMES = 8
"""Times of a group in the summary; tidy() has all."""
SITE_WIDTHS = (30, 12, 14, WIDTH - 30 - 12 - 14 - 6)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KaplanMeierRecord:
    """What a file of results holds: counts (G, J) on times (J,), and the test stratified by site.

    `blocks` is the largest number of rows over which a site averages times.
    """

    response: str
    labels: Annotated[tuple[str, ...], "G"]
    times: Annotated[Floats, "J"]
    events: Annotated[Floats, "G J"]
    censored: Annotated[Floats, "G J"]
    beyond: Annotated[Floats, "G"]
    blocks: int
    observed: Annotated[Floats, "G"]
    expected: Annotated[Floats, "G"]
    covariance: Annotated[Floats, "G G"]
    masked: bool
    sites: Annotated[tuple[str, ...], "K"]
    rows: Annotated[tuple[int, ...], "K"]
    left_out: int


class KaplanMeierResults(Results[KaplanMeierRecord], saved_as=FORMAT, record=KaplanMeierRecord):
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
    (0.24, True)
    >>> curves.median()["median"].tolist(), curves.ledger.rounds
    ([28.0, 44.0], 5)
    >>> curves.times.shape, curves.tidy()["group"].unique().tolist()
    ((60,), ['arm=drugs', 'arm=surgery'])
    """

    model_name = "Kaplan-Meier"

    @classmethod
    def _of(cls, model: HorizontalModel, table: SurvivalTable, masked: bool, ledger: Ledger) -> Self:
        """Make results of a fit."""
        agreement = model.agreement
        names = agreement.question.columns
        levels = [agreement.spec.levels[name] for name in names]
        labels = tuple(
            ", ".join(f"{name}={level}" for name, level in zip(names, one, strict=True)) or "all rows"
            for one in product(*levels)
        )
        cells = table.counts.cells
        record = KaplanMeierRecord(
            response=model.formula.response,
            labels=labels,
            times=table.counts.edges,
            events=cells[:, :-1, 1],
            censored=cells[:, :-1, 0],
            beyond=cells[:, -1].sum(axis=1),
            blocks=max(site.policy.min_level_count for site in model.partition.sites.values()),
            observed=table.by_site.observed,
            expected=table.by_site.expected,
            covariance=table.by_site.covariance,
            masked=masked,
            sites=tuple(row.site for row in agreement.sites),
            rows=tuple(row.n for row in agreement.sites),
            left_out=sum(row.n_rows - row.n for row in agreement.sites),
        )
        return cls(record, ledger, model)

    # -- figures ---------------------------------------------------------------------------------

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
        """Rows."""
        return sum(self._record.rows)

    @property
    def events(self) -> int:
        """Events, also after the last time, as all sites' log-rank sums have them."""
        return round(float(self._record.observed.sum()))

    @property
    def _counts(self) -> SurvivalCounts:
        record = self._record
        return SurvivalCounts(record.times, record.events, record.censored, record.beyond)

    def _curves(self, conf_level: float, conf_type: ConfType) -> dict[str, pd.DataFrame]:
        check_level("conf_level", conf_level)
        check_choice("conf_type", conf_type, CONFIDENCE)
        frames = product_limit(self._counts, conf_level, conf_type)
        return dict(zip(self.labels, frames, strict=True))

    def tidy(self, conf_level: float = 0.95, conf_type: ConfType = "log-log") -> pd.DataFrame:
        """Return the curves, one row for each group and time.

        Parameters
        ----------
        conf_level : float
        conf_type : {"log-log", "log", "plain"}
            Scale on which the intervals are symmetric; R's default is "log".

        Returns
        -------
        DataFrame
            ``group``, ``time``, ``n_risk``, ``n_event``, ``n_censor``, ``survival``, ``std_error``,
            ``conf_low``, ``conf_high``.
        """
        curves = self._curves(conf_level, conf_type)
        return pd.concat([frame.assign(group=label) for label, frame in curves.items()], ignore_index=True)[
            ["group", *next(iter(curves.values())).columns]
        ]

    def survival_at(
        self, times: Sequence[float], conf_level: float = 0.95, conf_type: ConfType = "log-log"
    ) -> pd.DataFrame:
        """Return survival probabilities at times, with intervals.

        A curve is known at the ends of its intervals. Between two ends the value is that of the end before,
        which is too high.

        Parameters
        ----------
        times : sequence of float
        conf_level : float
        conf_type : {"log-log", "log", "plain"}

        Returns
        -------
        DataFrame
            ``group``, ``time``, ``survival``, ``conf_low``, ``conf_high``; NaN after the last end.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ 1", partition).fit([12, 24, 36])
        >>> curves.survival_at([12, 24]).round(2)
              group  time  survival  conf_low  conf_high
        0  all rows    12      0.80      0.77       0.83
        1  all rows    24      0.63      0.60       0.66
        """
        rows = []
        for label, frame in self._curves(conf_level, conf_type).items():
            for time in times:
                before = frame[frame["time"] <= time]
                values = (1.0, 1.0, 1.0)
                if len(before):
                    last = before.iloc[-1]
                    values = (last["survival"], last["conf_low"], last["conf_high"])
                if time > self.times[-1]:
                    values = (np.nan,) * 3
                rows.append((label, time, *values))
        return pd.DataFrame(rows, columns=["group", "time", "survival", "conf_low", "conf_high"])

    def quantile(
        self, q: float = 0.5, conf_level: float = 0.95, conf_type: ConfType = "log-log"
    ) -> pd.DataFrame:
        """Return the time by which a share `q` had the event, by group, with intervals.

        The interval has the limits of the curve's band (Brookmeyer and Crowley 1982). Times are ends of
        intervals; NaN where the curve does not fall so far.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(1, until=60)
        >>> curves.quantile(0.25)["estimate"].tolist()
        [13.5, 18.0]
        """
        if not 0.0 < q < 1.0:
            raise ModelError(f"q: expected a share between 0 and 1, received {q}")
        curves = self._curves(conf_level, conf_type)
        rows = {label: survival_quantiles(frame, 1.0 - q) for label, frame in curves.items()}
        columns = ["estimate", "conf_low", "conf_high"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns)

    def median(self, conf_level: float = 0.95, conf_type: ConfType = "log-log") -> pd.DataFrame:
        """Return the median survival time by group, with intervals; see :meth:`quantile`."""
        return self.quantile(0.5, conf_level, conf_type).rename(columns={"estimate": "median"})

    def restricted_mean(self, until: float | None = None, conf_level: float = 0.95) -> pd.DataFrame:
        """Return the mean survival time up to a time, with normal intervals, by group.

        Parameters
        ----------
        until : float, optional
            By default the end of the last interval; at most that.
        conf_level : float

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
        [23.4, 26.9]
        """
        end = float(self.times[-1]) if until is None else float(until)
        check_positive("until", end)
        if end > self.times[-1]:
            raise ModelError(f"until: the curves end at {self.times[-1]:g}, received {end:g}")
        z = float(stats.norm.isf((1.0 - conf_level) / 2.0))
        rows = {}
        for label, frame in self._curves(conf_level, "log-log").items():
            mean, error = restricted_mean(frame, end)
            rows[label] = (mean, error, mean - z * error, mean + z * error)
        columns = ["estimate", "std_error", "conf_low", "conf_high"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns)

    def log_rank_test(self, rho: float = 0.0, *, by_site: bool = False) -> pd.Series:
        """Compare the groups: log-rank test, or Harrington and Fleming's G-rho.

        Parameters
        ----------
        rho : float
            Power of the survival probability with which times are weighted: 0 is the log-rank test, 1 is
            Peto and Peto's.
        by_site : bool
            Whether sites are strata. This test is exact on the sites' own times and does not need the grid;
            `rho` is 0.

        Returns
        -------
        Series
            ``statistic``, ``df``, ``p_value``.

        Raises
        ------
        ModelError
            There is one group, or both arguments are given.

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
        if by_site and rho:
            raise ModelError("rho: the test with sites as strata is the log-rank test, with rho 0")
        record = self._record
        sums = LogRankSums(record.observed, record.expected, record.covariance)
        if not by_site:
            sums = log_rank(record.events, self._counts.at_risk, rho)
        statistic, df, p = sums.test()
        return pd.Series({"statistic": statistic, "df": float(df), "p_value": p})

    def plot(
        self,
        ax: Axes | None = None,
        *,
        conf_level: float = 0.95,
        conf_type: ConfType = "log-log",
        events: bool = False,
    ) -> Axes:
        """Draw the curves with their bands, and the numbers of rows at risk below.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        conf_level : float
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
        test = self.log_rank_test(by_site=True)["p_value"] if len(self.labels) > 1 else None
        unit = self._record.response.partition("(")[2].partition(",")[0]
        curves = self._curves(conf_level, conf_type)
        at_risk = self._counts.at_risk
        return plot_survival(
            curves, self.times, at_risk, unit, test, ax=ax, conf_level=conf_level, events=events
        )

    # -- summary ---------------------------------------------------------------------------------

    def _glance(self) -> Mapping[str, float]:
        test = (
            self.log_rank_test(by_site=True)
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
        record = self._record
        left = [
            ("Dep. Variable", record.response),
            ("Model", self.model_name),
            ("No. Observations", f"{self.nobs:,}"),
            ("Events", f"{self.events:,}"),
            ("Groups", str(len(self.labels))),
            ("Intervals", f"{len(self.times)}, up to {self.times[-1]:g}"),
        ]
        if len(self.labels) > 1:
            left += [("Log-Rank Test", self._test(False)), ("  by Site", self._test(True))]
        right = [("Sites", str(len(record.sites))), ("Rows by site", human_range(record.rows))]
        if self._ledger is not None:
            right.append(("Counts", "masked" if record.masked else "unmasked"))
        right += self._ledger_lines()
        yield header_sheet("Kaplan-Meier results", left, right)
        yield self._group_sheet()
        yield self._curve_sheet()
        kinds = None if self._ledger is None else self._ledger.kinds_by_site()
        rows = tuple(
            (site, f"{n:,}", "", released_kinds(site, kinds))
            for site, n in zip(record.sites, record.rows, strict=True)
        )
        yield Sheet(("site", "rows", "", "released"), rows, "lrrl", SITE_WIDTHS, gap=2, wrap=True)

    def _test(self, by_site: bool) -> str:
        found = self.log_rank_test(by_site=by_site)
        p = "< 0.001" if found["p_value"] < 0.001 else f"= {found['p_value']:.3f}"
        return f"{found['statistic']:.2f} on {found['df']:.0f} df, p {p}"

    def _group_sheet(self) -> Sheet:
        medians, means = self.median(), self.restricted_mean()
        record, rows = self._record, []
        events = record.observed
        sizes = record.events.sum(axis=1) + record.censored.sum(axis=1) + record.beyond
        for place, label in enumerate(self.labels):
            median, low, high = medians.to_numpy()[place].tolist()
            mean, error = means.to_numpy()[place, :2].tolist()
            rows.append(
                (
                    label,
                    f"{sizes[place]:,.0f}",
                    f"{events[place]:,.0f}",
                    number(median),
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
        every = -(-len(self.times) // MOST_TIMES)
        shown = self.times[every - 1 :: every]
        for label, frame in self._curves(0.95, "log-log").items():
            places, first = np.searchsorted(shown, frame["time"]), True
            for place in range(len(shown)):
                part = frame[places == place]
                if not len(part):
                    continue
                # Events and censored rows since the line above; all else at its last time.
                row, counts = part.iloc[-1], part[["n_event", "n_censor"]].sum().tolist()
                cells = (
                    f"{row['time']:g}",
                    f"{part['n_risk'].iloc[0]:,.0f}",
                    *(f"{one:,.0f}" for one in counts),
                )
                shares = (f"{row[name]:.3f}" for name in ("survival", "conf_low", "conf_high"))
                rows.append((label if first else "", *cells, *shares))
                first = False
        headers = ("group", "time", "at risk", "events", "censored", "survival", "[0.025", "0.975]")
        widths = (WIDTH - 4 * 10 - 3 * 11 - 7, 10, 10, 10, 10, 11, 11, 11)
        return Sheet(headers, tuple(rows), "l" + "r" * 7, widths)

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        record = self._record
        if record.blocks > 1:
            yield Note(
                "averaged_times",
                f"So that no count is about few rows, each site averaged the times of every {record.blocks} "
                "or more successive rows of a group, with and without the event. The curves are close to "
                "those of the pooled rows, and not equal; the test by site uses the times as they are.",
            )
        yield Note(
            "censoring",
            "Censoring is assumed to be independent of the time of the event within each group. Censored "
            "rows are at risk until the end of their interval.",
        )
        if record.left_out:
            text = f"Rows left out because they lack the time, the event or the group: {record.left_out:,}."
            yield Note("left_out", text)
        if record.masked:
            yield Note("masking", f"Counts were masked over {len(record.sites)} sites: {MASKED.format('')}")
        elif len(record.sites) > 1:
            yield Note("masking", "Counts were not masked: the coordinator saw each site's part.")

    def __repr__(self) -> str:
        groups, K = len(self.labels), len(self._record.sites)
        return (
            f"<Kaplan-Meier results: {self._record.response}, {groups} group{'s' * (groups != 1)}, "
            f"{self.nobs:,} rows at {K} site{'s' * (K != 1)}; see .summary()>"
        )
