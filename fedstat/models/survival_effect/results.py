"""Results of an effect of a treatment on times: hazard ratios, curves, restricted means, and their errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH, Lines, blank_repeats, header_sheet, lines_of
from fedstat.inference.survival_curves import share_interval
from fedstat.inference.tables import Sheet, human_range, number, yes_or_no
from fedstat.models.checks import check_choice
from fedstat.models.descriptive.plots import plot_survival
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import MASKED
from fedstat.models.horizontal.overlap import arm_sheet, is_bounded, weight_frame
from fedstat.models.horizontal.results import OverRows, RowsBasis, weight_line
from fedstat.models.survival_effect.estimates import WeightedCells
from fedstat.models.survival_effect.protocol import SurvivalEffectFit
from fedstat.models.treatment.results import NOTES as TREATMENT_NOTES
from fedstat.models.treatment.results import e_value, limit_near_one, notes_of_arms, population_of
from fedstat.plotting import COLORS
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "fedstat survival_effect results 2"
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
    },
    protocol={
        "masking": f"Sums were masked over {{sites}} sites: {MASKED.format('')}",
        "masking/none": "Sums were not masked: the coordinator saw each site's part.",
    },
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SurvivalEffectRecord:
    """What a file of results holds."""

    fit: SurvivalEffectFit
    basis: RowsBasis


SURVIVAL, INCIDENCE, MEAN, LOST, LOG_RATIO = (
    "survival",
    "incidence",
    "restricted mean",
    "time lost",
    "log hazard ratio",
)
SHARES = (SURVIVAL, INCIDENCE)


class SurvivalEffectResults(OverRows, saved_as=FORMAT, record=SurvivalEffectRecord):
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
    >>> fit.population, fit.basis.site_column, fit.absent  # no site was lost
    ('all rows', 'hospital', ())
    >>> fit.weights["effective_rows"].round().to_dict()
    {'drugs': 430.0, 'surgery': 366.0}
    >>> fit.propensity.round(2)["estimate"].tolist()
    [-0.44, 0.0, 0.29, 0.03]
    >>> fit.restricted_means().round(1)["estimate"].to_dict()
    {'drugs': 24.1, 'surgery': 28.0, 'surgery - drugs': 3.9}
    >>> fit.curves().columns.tolist()
    ['arm', 'time', 'n_risk', 'n_event', 'weight_risk', 'weight_event', 'survival']
    """

    @classmethod
    def _of(cls, model: HorizontalModel, fit: SurvivalEffectFit, ledger: Ledger) -> Self:
        """Make results of a fit."""
        return cls(SurvivalEffectRecord(fit=fit, basis=RowsBasis.of(model)), ledger, model)

    # -- figures -------------------------------------------------------------------------------------

    @property
    def _fit(self) -> SurvivalEffectFit:
        fit: SurvivalEffectFit = self._record.fit
        return fit

    @property
    def nobs(self) -> int:
        """Rows."""
        return sum(self._rows)

    @property
    def _rows(self) -> list[int]:
        """Rows of each site."""
        return [site.n for site in self.basis.agreement.sites]

    @property
    def levels(self) -> tuple[Any, ...]:
        """Arms, the control first."""
        return self._fit.levels

    @property
    def causes(self) -> tuple[str, ...]:
        """Competing events, if there are any."""
        survival = self.basis.agreement.question.survival
        return () if survival is None else survival.causes

    @property
    def events(self) -> int:
        """Rows with an event of any kind; those after the last interval are not counted.

        Without a grid, it is the sum of their sampling weights.
        """
        if self._fit.cells is None:
            return round(float(self._fit.arms[:, 1].sum()))
        return round(float(self._fit.cells.counts[:, :, 1:].sum()))

    @property
    def population(self) -> str:
        """Rows that the effect is over."""
        return population_of(self._fit.treatment.estimand, self._fit.treatment.target, self.levels)

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
        return weight_frame(fit.treatment.arm, fit.levels, fit.arms[:, 0], fit.spread)

    def _cells(self, call: str) -> WeightedCells:
        cells: WeightedCells | None = self._fit.cells
        if cells is None:
            raise NotAvailableError(
                f"{call}: the fit has no curves",
                remedy=Remedy("fit(..., grid=1, until=60)", "they need a grid, as in {arguments}"),
            )
        return cells

    @cached_property
    def _quantities(self) -> tuple[pd.DataFrame, Floats]:
        """What the rows of :meth:`tidy` are, with estimates, and their derivatives (n, K)."""
        fit, (first, *others) = self._fit, map(str, self.levels)
        pairs, unit = [f"{arm} - {first}" for arm in others], np.eye(len(fit.estimates))
        rows: list[tuple[Any, ...]] = []
        slopes: list[Floats] = []

        def add(quantity: str, time: float, arms: Floats, most: float = 0.0, cause: Any = "") -> None:
            """Add values of arms, `most` and more by derivatives (A, K), and differences from the first."""
            others_less_first, values = arms[1:] - arms[0], most + arms @ fit.estimates
            of_arms = zip([first, *others], values.tolist(), strict=True)
            of_pairs = zip(pairs, (others_less_first @ fit.estimates).tolist(), strict=True)
            rows.extend((quantity, arm, str(cause), time, value, False) for arm, value in of_arms)
            rows.extend((quantity, pair, str(cause), time, value, True) for pair, value in of_pairs)
            slopes.extend([*arms, *others_less_first])

        if fit.cells is not None:
            A, M, C = len(fit.levels), len(fit.places), max(len(self.causes), 1)
            by_arm = unit[: A * C * (M + 1)].reshape(A, C, M + 1, -1)
            for m, time in enumerate([*fit.cells.ends[list(fit.places)].tolist(), fit.until]):
                whole, part, most = (SURVIVAL, INCIDENCE, 1.0) if m < M else (MEAN, LOST, time)
                add(whole, time, -by_arm[:, :, m].sum(axis=1), most)
                for c, cause in enumerate(self.causes):
                    add(part, time, by_arm[:, c, m], cause=cause)
        log_ratios = unit[len(unit) - len(pairs) :]
        slopes.extend(log_ratios)
        for pair, value in zip(pairs, (log_ratios @ fit.estimates).tolist(), strict=True):
            rows.append((LOG_RATIO, pair, "", np.nan, value, True))
        columns = ["quantity", "arm", "cause", "time", "estimate", "differs"]
        return pd.DataFrame(rows, columns=columns), np.array(slopes)

    @property
    def _tests(self) -> Any:
        """Distribution of tests: normal, or Student's t with one degree of freedom less than clusters."""
        clustering = self._fit.clustering
        return stats.norm if clustering is None else stats.t(float(clustering.df[0]))

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
        (frame, slopes), tests = self._quantities, self._tests
        value, differs = frame["estimate"].to_numpy(), frame["differs"].to_numpy()
        error, known = (
            np.sqrt(np.maximum(((slopes @ V) * slopes).sum(axis=1), 0.0))
            for V in (self._fit.cov, self._fit.known)
        )
        z = float(tests.isf(alpha / 2.0))
        low, high = value - z * error, value + z * error
        share = ~differs & frame["quantity"].isin(SHARES).to_numpy() & (value > 0.0) & (value < 1.0)
        level, relative = float(2.0 * stats.norm.sf(z)), error[share] / value[share]
        low[share], high[share] = share_interval(value[share], relative, level, "log-log")
        tested = np.where(differs & (error > 0.0), error, np.nan)
        return frame.drop(columns="differs").assign(
            std_error=error,
            known_weights=known,
            conf_low=low,
            conf_high=high,
            p_value=2.0 * tests.sf(np.abs(value) / tested),
        )

    def _rows_of(self, quantity: str, alpha: float = 0.05, cause: str = "") -> pd.DataFrame:
        frame = self.tidy(alpha)
        return frame[(frame["quantity"] == quantity) & (frame["cause"] == cause)]

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
        frame = self._rows_of(LOG_RATIO, alpha)
        ratio, low, high = np.exp(frame[["estimate", "conf_low", "conf_high"]].to_numpy(dtype=np.float64)).T
        columns = {
            "hazard_ratio": ratio,
            "conf_low": low,
            "conf_high": high,
            "p_value": frame["p_value"].to_numpy(),
            "e_value": e_value(risk_ratio(ratio)),
            "e_value_limit": e_value(risk_ratio(limit_near_one(ratio, low, high))),
        }
        return pd.DataFrame(columns, index=pd.Index(self.levels[1:], name=self._fit.treatment.arm))

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
        frame = self._rows_of(MEAN, alpha).set_index("arm")
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
        cells, curves, table = self._cells("plot_curves"), {}, self.curves()
        quantity, words = SURVIVAL, ("Weighted survival", "survival", "")
        if cause is not None:
            check_choice("cause", cause, self.causes)
            quantity, words = INCIDENCE, (f"Incidence of {cause}", "cumulative incidence", "")
        for level in map(str, self.levels):
            part = table[table["arm"] == level]
            share = part["survival"] if cause is None else 1.0 - part[cause]
            columns = {"time": part["time"], "survival": share, "conf_low": np.nan, "conf_high": np.nan}
            curves[f"{self._fit.treatment.arm}={level}"] = pd.DataFrame(columns).reset_index(drop=True)
        later = cells.by_interval(cells.counts).sum(axis=2)[:, ::-1].cumsum(axis=1)[:, ::-1]
        unit = self.basis.agreement.question.response.partition("(")[2].partition(",")[0].strip()
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
        found = self._rows_of(quantity, alpha, cause or "")
        for place, level in enumerate(map(str, self.levels)):
            at = found[found["arm"] == level]
            ends = np.abs(at[["conf_low", "conf_high"]].to_numpy().T - at["estimate"].to_numpy())
            color = COLORS[place % len(COLORS)]
            ax.errorbar(
                at["time"], at["estimate"], yerr=ends, fmt="o", color=color, markersize=3, linewidth=1
            )
        return ax

    @property
    def _merged(self) -> bool:
        return not np.array_equal(self.times, self._fit.requested)

    # -- summary -------------------------------------------------------------------------------------

    _SUMMARY: ClassVar[Lines] = (
        ("Dep. Variable", "basis.agreement.question.response", ""),
        ("Treatment", "_fit.treatment.arm", ""),
        ("Estimand", "", lambda fit: f"{fit._fit.treatment.estimand} ({fit.population})"),
        ("Baseline", "_fit.request.own", lambda own: "of each site" if own else "common"),
        ("Ties", "_fit.request.ties", ""),
        weight_line("Sampling Weights", "var_weights"),
        ("No. Observations", "nobs", ",d"),
        ("Events", "events", ",d"),
        ("Sites", "_rows", lambda rows: str(len(rows))),
        ("Rows by site", "_rows", human_range),
        ("Converged", "converged", yes_or_no),
        ("Covariance Type", "_fit.clustering", "cluster {}".format),
    )

    @property
    def _first_ratio(self) -> pd.Series:
        return self._rows_of(LOG_RATIO).iloc[0]

    def _glance(self) -> Mapping[str, float]:
        counts = {"nobs": self.nobs, "n_sites": len(self._rows), "events": self.events}
        first = self._first_ratio
        found = {"log_hazard_ratio": first["estimate"], "std_error": first["std_error"]}
        return counts | {name: float(one) for name, one in (found | {"p_value": first["p_value"]}).items()}

    def _sheets(self) -> Iterator[Sheet]:
        lines = lines_of(self, self._SUMMARY)
        yield header_sheet(f"{self.model_name} by inverse probability weighting", lines)
        yield arm_sheet(self.weights, ("rows", "sum of weights", "effective rows"), ",.0f")
        yield self._ratio_sheet()
        if self._fit.cells is not None:
            yield self._curve_sheet()

    def _ratio_sheet(self) -> Sheet:
        frame = self.hazard_ratios()[["hazard_ratio", "conf_low", "conf_high", "p_value"]]
        errors = self._rows_of(LOG_RATIO)["std_error"]
        rows = tuple(
            (str(level), number(ratio), number(error), number(low), number(high), f"{p:.3f}")
            for (level, ratio, low, high, p), error in zip(frame.itertuples(), errors, strict=True)
        )
        p = "P>|z|" if self._fit.clustering is None else "P>|t|"
        head = (f"hazard ratio to {self.levels[0]}", "ratio", "err of log", "[0.025", "0.975]", p)
        widths = (11, 12, 11, 11, 9)
        return Sheet(head, rows, "lrrrrr", (WIDTH - sum(widths) - 5, *widths))

    def _curve_sheet(self) -> Sheet:
        found = self.tidy()
        found = found[found["quantity"] != LOG_RATIO]
        labels = zip(found["quantity"], found["cause"], found["time"], strict=True)
        stubs = [f"{quantity}{f' of {cause}' if cause else ''}, {time:g}" for quantity, cause, time in labels]
        figures = found[["estimate", "std_error", "conf_low", "conf_high"]].to_numpy(dtype=np.float64)
        lines = zip(blank_repeats(stubs), found["arm"], figures.tolist(), strict=True)
        rows = tuple((stub, arm, *map(number, values)) for stub, arm, values in lines)
        widths = (24, 10, 10, 10, 10)
        head = ("up to", "arm", "estimate", "std err", "[0.025", "0.975]")
        return Sheet(head, rows, "llrrrr", (WIDTH - sum(widths) - 5, *widths))

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        fit, n_sites = self._fit, len(self._rows)
        if not fit.converged:
            yield NOTES.note("not_converged")
        bounded = is_bounded(fit.treatment.estimand, fit.treatment.target)
        yield from notes_of_arms(fit, [str(fit.levels[1])], [fit.treatment.arm], n_sites, bounded)
        yield NOTES.note("assumptions")
        if fit.treatment.target:
            yield TREATMENT_NOTES.note("transport", what="times", target=fit.treatment.target)
        first = self._first_ratio
        yield NOTES.note("errors", known=number(first["known_weights"]), stacked=number(first["std_error"]))
        if fit.request.own:
            strata = ", ".join(fit.request.strata)
            yield NOTES.note("baseline", strata=f" and level of {strata}" if strata else "")
        else:
            yield NOTES.note("baseline/common")
        if self.causes:
            yield NOTES.note("competing", causes=", ".join(map(str, self.causes)))
        if fit.cells is not None and self._merged:
            where = "over all sites" if fit.over_sites else "at every site"
            yield NOTES.note(
                "merged_intervals",
                where=where,
                times=len(fit.cells.ends),
                requested=len(fit.requested),
                least=fit.least,
            )
        yield from self._left_out_note()
        if fit.masked:
            yield NOTES.note("masking", sites=n_sites)
        elif n_sites > 1:
            yield NOTES.note("masking/none")

    def __repr__(self) -> str:
        K, arm = len(self._rows), self._fit.treatment.arm
        at = f"{K} site{'s' * (K != 1)}"
        return f"<{self.model_name} results: {arm}, {self.nobs:,} rows at {at}; see .summary()>"


def risk_ratio(hazard_ratio: Floats) -> Floats:
    """Approximate risk ratios (n,) of a common event by hazard ratios (VanderWeele 2017, Epidemiology 28)."""
    return np.asarray((1.0 - 0.5 ** np.sqrt(hazard_ratio)) / (1.0 - 0.5 ** np.sqrt(1.0 / hazard_ratio)))
