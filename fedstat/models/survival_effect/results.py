"""Results of an effect of a treatment on times: hazard ratios, curves, restricted means, and their errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH, header_sheet
from fedstat.inference.survival_curves import share_interval
from fedstat.inference.tables import Sheet, human_range, number, yes_or_no
from fedstat.models.checks import check_choice
from fedstat.models.descriptive.plots import plot_survival
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import MASKED, SUBSET, TWICE_TOO_SMALL
from fedstat.models.horizontal.overlap import arm_sheet, is_bounded, overlap_notes, weight_frame
from fedstat.models.results import Results
from fedstat.models.survival_effect.estimates import WeightedCells
from fedstat.models.survival_effect.protocol import SurvivalEffectFit
from fedstat.models.treatment.results import NOTES as TREATMENT_NOTES
from fedstat.models.treatment.results import e_value, limit_near_one, population_of
from fedstat.plotting import COLORS
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "fedstat survival_effect results 1"
COMMON = "common"
NOTES = Catalogue(
    critical={
        "not_converged": "NOT CONVERGED: do not interpret these numbers",
    },
    info={
        "assumptions": "Causal if no unmeasured column affects both treatment and times, the propensity "
        "model is right, and censoring is independent of the times within arms.",
        "errors": "Standard errors account for the estimated weights. The robust variance alone takes "
        "weights as known: its error of the logarithm of the first hazard ratio is {known}, instead of "
        "{stacked}.",
        "baseline": "The hazard ratio supposes proportional hazards of the arms, and a baseline hazard for "
        "each site{strata}.",
        "baseline/common": "The hazard ratio supposes proportional hazards of the arms, and one baseline "
        "hazard for all sites, with times at the ends of intervals.",
        "competing": "The hazard ratio is that of any of the events {causes}.",
        "merged_intervals": "The curves are known at {times} times; {requested} were requested. Intervals "
        "were merged until {where} each arm has no row or at least {least} rows with each outcome in each.",
        "left_out": "Rows left out because they lack a column: {rows:,}.",
        "subset": SUBSET,
    },
    protocol={
        "masking": f"Sums were masked over {{sites}} sites: {MASKED.format('')}",
        "masking/none": "Sums were not masked: the coordinator saw each site's part.",
    },
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SurvivalEffectRecord:
    """What a file of results holds."""

    response: str
    fit: SurvivalEffectFit
    sites: tuple[str, ...]
    rows: tuple[int, ...]
    left_out: int
    subset: str = ""
    weights: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Quantity:
    """One estimate: a value of an arm, or of the difference of two; `slopes` (K,) are its derivatives."""

    quantity: str
    arm: str
    cause: str
    time: float
    value: float
    slopes: Floats

    def less(self, other: Quantity) -> Quantity:
        """Return the difference from the same value of another arm."""
        arm = f"{self.arm} - {other.arm}"
        value, slopes = self.value - other.value, self.slopes - other.slopes
        return Quantity(self.quantity, arm, self.cause, self.time, value, slopes)


SURVIVAL, INCIDENCE, MEAN, LOST, LOG_RATIO = (
    "survival",
    "incidence",
    "restricted mean",
    "time lost",
    "log hazard ratio",
)
SHARES = (SURVIVAL, INCIDENCE)


class SurvivalEffectResults(Results[SurvivalEffectRecord], saved_as=FORMAT, record=SurvivalEffectRecord):
    """Results of :meth:`fedstat.SurvivalEffect.fit`.

    Attributes
    ----------
    model_name : str
        Name of the model in titles and tables.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> given = {"treatment": "arm ~ age + C(stage)"}
    >>> model = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", partition, **given)
    >>> fit = model.fit(grid=1, until=48)
    >>> fit
    <Effect of a treatment on times results: arm, 800 rows at 4 sites; see .summary()>
    >>> fit.nobs, fit.events, fit.levels, fit.causes, fit.times[-1] <= 48, fit.converged
    (800, 413, ('drugs', 'surgery'), (), np.True_, True)
    >>> fit.weights["effective_rows"].round().to_dict()
    {'drugs': 430.0, 'surgery': 366.0}
    >>> fit.propensity.round(2)["estimate"].tolist()
    [-0.44, 0.0, 0.29, 0.03]
    >>> fit.restricted_means().round(1)["estimate"].to_dict()
    {'drugs': 24.1, 'surgery': 28.0, 'surgery - drugs': 3.9}
    >>> fit.curves().columns.tolist()
    ['arm', 'time', 'n_risk', 'n_event', 'weight_risk', 'weight_event', 'survival']
    """

    model_name = "Effect of a treatment on times"

    @classmethod
    def _of(cls, model: HorizontalModel, fit: SurvivalEffectFit, ledger: Ledger) -> Self:
        """Make results of a fit."""
        agreement = model.agreement
        record = SurvivalEffectRecord(
            response=model.formula.response,
            fit=fit,
            sites=tuple(row.site for row in agreement.sites),
            rows=tuple(row.n for row in agreement.sites),
            left_out=sum(row.n_rows - row.n for row in agreement.sites),
            subset=agreement.question.subset_text,
            weights=agreement.question.weights.get("var_weights", ""),
        )
        return cls(record, ledger, model)

    # -- figures -------------------------------------------------------------------------------------

    @property
    def _fit(self) -> SurvivalEffectFit:
        return self._record.fit

    @property
    def nobs(self) -> int:
        """Rows."""
        return sum(self._record.rows)

    @property
    def levels(self) -> tuple[Any, ...]:
        """Arms, the control first."""
        return self._fit.levels

    @property
    def causes(self) -> tuple[str, ...]:
        """Competing events, if there are any."""
        return self._fit.causes

    @property
    def events(self) -> int:
        """Rows with an event of any kind; those after the last interval are not counted.

        Without a grid, it is the sum of their sampling weights.
        """
        if self._fit.cells is None:
            return round(float(self._fit.arms[:, 1].sum()))
        return round(float(self._fit.cells.counts[:, :, 1:].sum()))

    @property
    def converged(self) -> bool:
        """Whether the propensity model converged."""
        return self._fit.converged

    @property
    def times(self) -> Floats:
        """Ends of the intervals of the curves."""
        return self._cells("times").ends

    @property
    def propensity(self) -> pd.DataFrame:
        """Coefficients of the propensity model: ``estimate`` and ``std_error``."""
        fit = self._fit
        errors = np.sqrt(np.diag(fit.theta_cov))
        return pd.DataFrame({"estimate": fit.theta, "std_error": errors}, index=list(fit.names))

    @property
    def weights(self) -> pd.DataFrame:
        """Rows of each arm, sum of their weights, and effective number of rows, ``(sum w)^2 / sum w^2``."""
        fit = self._fit
        return weight_frame(fit.arm, fit.levels, fit.arms[:, 0], fit.spread)

    def _cells(self, call: str) -> WeightedCells:
        cells: WeightedCells | None = self._fit.cells
        if cells is None:
            raise NotAvailableError(
                f"{call}: the fit has no curves",
                remedy=Remedy("fit(..., grid=1, until=60)", "they need a grid, as in {arguments}"),
            )
        return cells

    @cached_property
    def _quantities(self) -> list[Quantity]:
        fit = self._fit
        A, K = len(fit.levels), len(fit.estimates)
        found: list[Quantity] = []
        if fit.cells is not None:
            M, C = len(fit.places), max(len(fit.causes), 1)
            at = np.arange(A * C * (M + 1)).reshape(A, C, M + 1)
            times = [*fit.cells.ends[list(fit.places)].tolist(), fit.until]
            for m, time in enumerate(times):
                whole, part = (SURVIVAL, INCIDENCE) if m < M else (MEAN, LOST)
                arms = [
                    self._of_place(level, at[a, :, m], time, whole, part)
                    for a, level in enumerate(fit.levels)
                ]
                for same in zip(*arms, strict=True):
                    found += [*same, *(one.less(same[0]) for one in same[1:])]
        for a, level in enumerate(fit.levels[1:]):
            slopes = np.eye(K)[K - A + 1 + a]
            value = float(slopes @ fit.estimates)
            found.append(Quantity(LOG_RATIO, f"{level} - {fit.levels[0]}", "", np.nan, value, slopes))
        return found

    def _of_place(self, level: Any, at: Any, time: float, whole: str, part: str) -> list[Quantity]:
        """Return survival and incidences, or their areas, of an arm at one time."""
        fit = self._fit
        slopes = np.eye(len(fit.estimates))[at]
        most = 1.0 if whole == SURVIVAL else time
        values = slopes @ fit.estimates
        out = [Quantity(whole, str(level), "", time, most - float(values.sum()), -slopes.sum(axis=0))]
        causes = zip(fit.causes, values.tolist(), slopes, strict=False)
        return out + [
            Quantity(part, str(level), str(cause), time, value, one) for cause, value, one in causes
        ]

    @property
    def _tests(self) -> Any:
        """Distribution of tests: normal, or Student's t with one degree of freedom less than clusters."""
        clustering = self._fit.clustering
        return stats.norm if clustering is None else stats.t(float(clustering.df[0]))

    @staticmethod
    def _error(one: Quantity, cov: Floats) -> float:
        return float(np.sqrt(np.maximum(one.slopes @ cov @ one.slopes, 0.0)))

    @takes_alpha
    def tidy(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return all estimates, one row for each.

        Parameters
        ----------
        alpha : float
            One minus the level of the intervals.

        Returns
        -------
        DataFrame
            ``quantity`` ("survival", "incidence" and "time lost" of competing events, "restricted mean", "log
            hazard ratio"); ``arm``, or two of which the row is the difference; ``cause``; ``time``;
            ``estimate``; ``std_error``; ``known_weights``, the error that takes weights as known;
            ``conf_low``, ``conf_high``, for shares on the log-log scale; ``p_value`` of differences.
        """
        rows, tests = [], self._tests
        z = float(tests.isf(alpha / 2.0))
        level = float(2.0 * stats.norm.sf(z))
        for one in self._quantities:
            error, known = (self._error(one, V) for V in (self._fit.cov, self._fit.known))
            low, high, p = one.value - z * error, one.value + z * error, np.nan
            if " - " in one.arm:
                p = float(2.0 * tests.sf(abs(one.value) / error)) if error > 0.0 else np.nan
            elif one.quantity in SHARES and 0.0 < one.value < 1.0:
                relative = np.array([error / one.value])
                low, high = (
                    float(end[0]) for end in share_interval(np.array([one.value]), relative, level, "log-log")
                )
            rows.append((one.quantity, one.arm, one.cause, one.time, one.value, error, known, low, high, p))
        columns = ["quantity", "arm", "cause", "time", "estimate", "std_error", "known_weights"]
        return pd.DataFrame(rows, columns=[*columns, "conf_low", "conf_high", "p_value"])

    @takes_alpha
    def hazard_ratios(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return the hazard ratios of the arms, compared with the first one, with E-values.

        Parameters
        ----------
        alpha : float

        Returns
        -------
        DataFrame
            By arm: ``hazard_ratio``, ``conf_low``, ``conf_high``, ``p_value``, and ``e_value`` and
            ``e_value_limit``, those of the estimate and of the limit nearer to one. An unmeasured column
            explains the ratio away only if its risk ratios with treatment and event are both at least as
            large. They suppose that the event is common (VanderWeele and Ding 2017, table 2); with events
            in less than 15 % of the rows a risk ratio is about the hazard ratio.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> given = {"treatment": "arm ~ age + C(stage)"}
        >>> model = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", partition, **given)
        >>> model.fit().hazard_ratios().round(2)
                 hazard_ratio  conf_low  conf_high  p_value  e_value  e_value_limit
        arm
        surgery          0.59      0.49       0.71      0.0     2.22           1.84
        """
        found = self.tidy(alpha)
        frame = found[found["quantity"] == LOG_RATIO]
        ratio, low, high = np.exp(frame[["estimate", "conf_low", "conf_high"]].to_numpy(dtype=np.float64)).T
        columns = {
            "hazard_ratio": ratio,
            "conf_low": low,
            "conf_high": high,
            "p_value": frame["p_value"].to_numpy(),
            "e_value": e_value(risk_ratio(ratio)),
            "e_value_limit": e_value(risk_ratio(limit_near_one(ratio, low, high))),
        }
        return pd.DataFrame(columns, index=pd.Index(self.levels[1:], name=self._fit.arm))

    @takes_alpha
    def restricted_means(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return mean times up to the last end by arm, and their differences, with normal intervals.

        Parameters
        ----------
        alpha : float

        Returns
        -------
        DataFrame
            By arm and difference: ``estimate``, ``std_error``, ``conf_low``, ``conf_high``, ``p_value``.

        Raises
        ------
        NotAvailableError
            The fit has no curves.
        """
        self._cells("restricted_means")
        found = self.tidy(alpha)
        frame = found[found["quantity"] == MEAN].set_index("arm")
        return frame[["estimate", "std_error", "conf_low", "conf_high", "p_value"]]

    def curves(self) -> pd.DataFrame:
        """Return the weighted curves at the ends of all intervals.

        Returns
        -------
        DataFrame
            ``arm``, ``time``; ``n_risk``, the rows whose time is not before the interval; ``n_event``, rows
            with an event in it; ``weight_risk`` and ``weight_event``, the sums of their weights;
            ``survival``; and the incidence of each competing event. Standard errors are in :meth:`tidy`.

        Raises
        ------
        NotAvailableError
            The fit has no curves.
        """
        cells, frames = self._cells("curves"), []
        counts, weights = (cells.by_interval(one) for one in (cells.counts, cells.weights))
        rows = counts.sum(axis=2)[:, ::-1].cumsum(axis=1)[:, ::-1][:, :-1]
        for a, level in enumerate(self.levels):
            parts = {
                "arm": str(level),
                "time": cells.ends,
                "n_risk": rows[a].astype(np.int64),
                "n_event": counts[a, :-1, 1:].sum(axis=1).astype(np.int64),
                "weight_risk": cells.at_risk[a],
                "weight_event": weights[a, :-1, 1:].sum(axis=1),
                "survival": cells.survival[a],
            }
            frames.append(pd.DataFrame(parts | dict(zip(self.causes, cells.incidence[a], strict=False))))
        return pd.concat(frames, ignore_index=True)

    @takes_alpha
    def plot_curves(self, ax: Axes | None = None, *, cause: str | None = None, alpha: float = 0.05) -> Axes:
        """Draw the weighted curves of the arms, with intervals at the times that have errors.

        Numbers below are rows, without weights.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        cause : str, optional
            Competing event whose incidence is drawn; by default survival.
        alpha : float

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        NotAvailableError
            The fit has no curves.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> given = {"treatment": "arm ~ age + C(stage)"}
        >>> model = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", partition, **given)
        >>> model.fit(grid=1, until=48).plot_curves().get_ylabel()
        'survival'
        """
        cells, found = self._cells("plot_curves"), self.tidy(alpha)
        if cause is not None:
            check_choice("cause", cause, self.causes)
        curves, table = {}, self.curves()
        for level in map(str, self.levels):
            part = table[table["arm"] == level]
            share = part["survival"] if cause is None else 1.0 - part[cause]
            curves[f"{self._fit.arm}={level}"] = pd.DataFrame(
                {"time": part["time"], "survival": share, "conf_low": np.nan, "conf_high": np.nan}
            ).reset_index(drop=True)
        later = cells.by_interval(cells.counts).sum(axis=2)[:, ::-1].cumsum(axis=1)[:, ::-1]
        words = (
            ("Weighted survival", "survival", "")
            if cause is None
            else (f"Incidence of {cause}", "cumulative incidence", "")
        )
        unit = self._record.response.partition("(")[2].partition(",")[0].strip()
        ax = plot_survival(
            curves,
            cells.ends,
            later,
            unit,
            None,
            ax=ax,
            alpha=alpha,
            events=cause is not None,
            words=words,
            merged=self._merged,
        )
        kind = found[
            (found["quantity"] == (SURVIVAL if cause is None else INCIDENCE))
            & (found["cause"] == (cause or ""))
        ]
        for place, level in enumerate(map(str, self.levels)):
            at = kind[kind["arm"] == level]
            ends = np.abs(at[["conf_low", "conf_high"]].to_numpy().T - at["estimate"].to_numpy())
            ax.errorbar(
                at["time"],
                at["estimate"],
                yerr=ends,
                fmt="o",
                color=COLORS[place % len(COLORS)],
                markersize=3,
                linewidth=1,
            )
        return ax

    @property
    def _merged(self) -> bool:
        return not np.array_equal(self.times, self._fit.requested)

    # -- summary -------------------------------------------------------------------------------------

    @property
    def _first_ratio(self) -> pd.Series:
        found = self.tidy()
        return found[found["quantity"] == LOG_RATIO].iloc[0]

    def _glance(self) -> Mapping[str, float]:
        first = self._first_ratio
        return {
            "nobs": self.nobs,
            "n_sites": len(self._record.sites),
            "events": self.events,
            "log_hazard_ratio": float(first["estimate"]),
            "std_error": float(first["std_error"]),
            "p_value": float(first["p_value"]),
        }

    def _sheets(self) -> Iterator[Sheet]:
        record, fit = self._record, self._fit
        left = [
            ("Dep. Variable", record.response),
            ("Treatment", fit.arm),
            ("Estimand", f"{fit.estimand} ({population_of(fit.estimand, fit.target, fit.levels)})"),
            ("Baseline", "of each site" if fit.request.own else "common"),
            ("Ties", fit.request.ties),
        ]
        right = [
            ("No. Observations", f"{self.nobs:,}"),
            ("Events", f"{self.events:,}"),
            ("Sites", str(len(record.sites))),
            ("Rows by site", human_range(record.rows)),
            ("Converged", yes_or_no(self.converged)),
        ]
        if record.weights:
            left.append(("Sampling Weights", record.weights))
        if fit.clustering is not None:
            right.append(("Covariance Type", f"cluster {fit.clustering}"))
        yield header_sheet(f"{self.model_name} by inverse probability weighting", [*left, *right])
        yield self._arm_sheet()
        yield self._ratio_sheet()
        if fit.cells is not None:
            yield self._curve_sheet()

    def _arm_sheet(self) -> Sheet:
        return arm_sheet(self.weights, ("rows", "sum of weights", "effective rows"), ",.0f")

    def _ratio_sheet(self) -> Sheet:
        found, ratios = self.tidy(), self.hazard_ratios()
        errors = found.loc[found["quantity"] == LOG_RATIO, "std_error"].tolist()
        rows = tuple(
            (str(level), number(ratio), number(error), number(low), number(high), f"{p:.3f}")
            for level, error, (ratio, low, high, p, *_) in zip(
                self.levels[1:], errors, ratios.to_numpy().tolist(), strict=True
            )
        )
        p = "P>|z|" if self._fit.clustering is None else "P>|t|"
        head = (f"hazard ratio to {self.levels[0]}", "ratio", "err of log", "[0.025", "0.975]", p)
        widths = (11, 12, 11, 11, 9)
        return Sheet(head, rows, "lrrrrr", (WIDTH - sum(widths) - 5, *widths))

    def _curve_sheet(self) -> Sheet:
        found = self.tidy()
        found = found[found["quantity"] != LOG_RATIO]
        numbers = (
            found[["estimate", "std_error", "conf_low", "conf_high"]].to_numpy(dtype=np.float64).tolist()
        )
        labels = zip(found["quantity"], found["cause"], found["time"], found["arm"], strict=True)
        rows: list[tuple[str, ...]] = []
        before = ""
        for (quantity, cause, time, arm), values in zip(labels, numbers, strict=True):
            what = f"{quantity}{f' of {cause}' if cause else ''}, {time:g}"
            rows.append(("" if what == before else what, str(arm), *map(number, values)))
            before = what
        widths = (24, 10, 10, 10, 10)
        head = ("up to", "arm", "estimate", "std err", "[0.025", "0.975]")
        return Sheet(head, tuple(rows), "llrrrr", (WIDTH - sum(widths) - 5, *widths))

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        record, fit = self._record, self._fit
        if not fit.converged:
            yield NOTES.note("not_converged")
        bounded = is_bounded(fit.estimand, fit.target)
        yield from overlap_notes(fit.levels, fit.arms[:, 0], fit.spread, bounded)
        if fit.clustering is not None:
            yield from fit.clustering.notes([f"{level}" for level in fit.levels[1:2]], [fit.arm], None)
            for shared in fit.shared:
                yield from shared.note(len(record.sites), "clusters", TWICE_TOO_SMALL)
        yield NOTES.note("assumptions")
        if fit.target:
            yield TREATMENT_NOTES.note("transport", what="times", target=fit.target)
        first = self._first_ratio
        yield NOTES.note("errors", known=number(first["known_weights"]), stacked=number(first["std_error"]))
        strata = ", ".join(fit.request.strata)
        yield (
            NOTES.note("baseline", strata=f" and level of {strata}" if strata else "")
            if fit.request.own
            else NOTES.note("baseline/common")
        )
        if fit.causes:
            yield NOTES.note("competing", causes=", ".join(map(str, fit.causes)))
        if fit.cells is not None and self._merged:
            where = "over all sites" if fit.over_sites else "at every site"
            yield NOTES.note(
                "merged_intervals",
                times=len(fit.cells.ends),
                requested=len(fit.requested),
                where=where,
                least=fit.least,
            )
        if record.subset:
            yield NOTES.note("subset", used=self.nobs, rows=self.nobs + record.left_out, subset=record.subset)
        elif record.left_out:
            yield NOTES.note("left_out", rows=record.left_out)
        if fit.masked:
            yield NOTES.note("masking", sites=len(record.sites))
        elif len(record.sites) > 1:
            yield NOTES.note("masking/none")

    def __repr__(self) -> str:
        K = len(self._record.sites)
        return (
            f"<{self.model_name} results: {self._fit.arm}, {self.nobs:,} rows at {K} site{'s' * (K != 1)}; "
            "see .summary()>"
        )


def risk_ratio(hazard_ratio: Floats) -> Floats:
    """Approximate risk ratios (n,) of a common event by hazard ratios (VanderWeele 2017, Epidemiology 28)."""
    return np.asarray((1.0 - 0.5 ** np.sqrt(hazard_ratio)) / (1.0 - 0.5 ** np.sqrt(1.0 / hazard_ratio)))
