"""Survival that a model of times predicts for rows, with intervals: tables and curves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import DerivedReport
from fedstat.inference.tables import WIDTH, Sheet, number
from fedstat.plotting import COLORS, axes_for, label_y, plain_legend, set_headline
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TIMES = 12
"""Times of a row that a summary lists."""
NOTES = Catalogue(info={"conditions": "{note}"})


def survival_table(
    rows: pd.Index, times: Floats, survival: Floats, conf_low: Floats, conf_high: Floats
) -> pd.DataFrame:
    """Return one row for each row and time, from arrays (m, J)."""
    columns = {"survival": survival, "conf_low": conf_low, "conf_high": conf_high}
    index = {"row": np.repeat(rows.to_numpy(), len(times)), "time": np.tile(times, len(rows))}
    return pd.DataFrame({**index, **{name: values.ravel() for name, values in columns.items()}})


class PredictedSurvival(DerivedReport):
    """Predicted survival of rows at times, with pointwise intervals.

    Parameters
    ----------
    table : DataFrame
        ``row``, ``time``, ``survival``, ``conf_low``, ``conf_high``.
    alpha : float
        One minus the level of the intervals.
    steps : bool
        Whether the curves are steps.
    note : str
        What the prediction supposes.
    sources : iterable

    Examples
    --------
    >>> import fedstat as fs, pandas as pd
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
    >>> ages = pd.DataFrame({"age": [50, 70]}, index=["age 50", "age 70"])
    >>> found = fit.survival_function(ages, [12, 24])
    >>> found.wide().round(2)
          age 50  age 70
    time
    12.0    0.88    0.75
    24.0    0.74    0.51
    >>> found.tidy().columns.tolist(), found.plot().get_ylabel()
    (['row', 'time', 'survival', 'conf_low', 'conf_high'], 'survival')
    """

    def __init__(
        self, table: pd.DataFrame, *, alpha: float, steps: bool, note: str, sources: Iterable[object]
    ) -> None:
        super().__init__(sources)
        self._table, self._alpha, self._steps, self._note = table, alpha, steps, note

    @property
    def _curves(self) -> list[pd.DataFrame]:
        """The table of each row, whose label may not be the only one of its kind."""
        J = self._table["time"].nunique()
        return [self._table.iloc[start : start + J] for start in range(0, len(self._table), J)]

    def tidy(self) -> pd.DataFrame:
        """One row for each row and time: ``row``, ``time``, ``survival``, ``conf_low``, ``conf_high``."""
        return self._table.copy()

    def wide(self) -> pd.DataFrame:
        """Return survival with a column for each row and an index of times, as lifelines has it."""
        curves = self._curves
        values = np.column_stack([one["survival"] for one in curves])
        index = pd.Index(curves[0]["time"], name="time")
        return pd.DataFrame(values, index=index, columns=[one["row"].iloc[0] for one in curves])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the curves with their intervals.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        ax = axes_for(ax, 6.5, 3.8)
        for place, part in enumerate(self._curves):
            label = part["row"].iloc[0]
            x, color = np.append(0.0, part["time"]), COLORS[place % len(COLORS)]
            curve, low, high = (np.append(1.0, part[name]) for name in ("survival", "conf_low", "conf_high"))
            style: Any = {"drawstyle": "steps-post"} if self._steps else {}
            ax.plot(x, curve, color=color, linewidth=1.6, label=str(label), **style)
            band: Any = {"step": "post"} if self._steps else {}
            ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0.0, **band)
        ax.set_ylim(0.0, 1.02)
        ax.set_xlim(0.0, float(self._table["time"].max()) * 1.02)
        label_y(ax, "survival")
        ax.set_xlabel("time")
        plain_legend(ax, loc="lower left")
        set_headline(ax, "Predicted survival", f"with {100 * (1 - self._alpha):g} % intervals")
        return ax

    def _glance(self) -> dict[str, float]:
        curves = self._curves
        return {"rows": len(curves), "times": len(curves[0]), "until": float(curves[0]["time"].iloc[-1])}

    def _sheets(self) -> Iterator[Sheet]:
        times = len(self._curves[0])
        every = -(-times // MOST_TIMES)
        shown = self._table[np.arange(len(self._table)) % times % every == (times - 1) % every]
        rows = tuple(
            (str(row), f"{time:.6g}", *map(number, values))
            for row, time, *values in shown.itertuples(index=False)
        )
        alpha = self._alpha
        headers = ("", "time", "survival", f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]")
        yield Sheet(headers, rows, "lrrrr", (WIDTH - 4 * 13, *[12] * 4), "Predicted survival")

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("conditions", note=self._note)

    def __repr__(self) -> str:
        rows, times, until = self._glance().values()
        return f"<Predicted survival of {rows} rows at {times} times up to {until:g}; see .summary()>"
