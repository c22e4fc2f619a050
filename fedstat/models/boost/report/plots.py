"""Plots of boosting results (optional extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.models.boost.report.prediction import BoostPredictionRecord, compared
from fedstat.models.checks import check_choice
from fedstat.plotting import (
    COLORS,
    NARROW,
    OPEN,
    ROWS_ONLY,
    axes_for,
    axes_width_inches,
    few_ticks,
    label_rows,
    label_x,
    label_y,
    legend_below,
    mark_x,
    name_width,
    pyplot,
    set_headline,
    shorten,
    title_figure,
)
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# Pictures of boosting. matplotlib is the optional extra ``plot``.


def draw_surface(
    frame: pd.DataFrame, label: str, response: str, ax: Axes | None, title: str | None = None
) -> Axes:
    """Draw a heat map of an effect on two arguments, or lines of one on one.

    With intervals: shaded those of each point, dotted the band of the whole; of a heat map a line is around
    where the band is apart from zero.
    """
    of, rest = frame.columns[0], [name for name in ("s", "x", "t") if name in frame.columns]
    ax = axes_for(ax, 6.0, 4.5, hidden=OPEN if len(rest) < 2 else ())
    title, said = f"{label} on {response}" if title is None else title, ""
    if len(rest) == 2:
        table = frame.pivot_table("estimate", rest[0], rest[1])
        size = float(np.nanmax(np.abs(table.to_numpy()))) or 1.0
        x, y = table.columns.to_numpy(dtype=float), table.index.to_numpy(dtype=float)
        mesh = ax.pcolormesh(x, y, table.to_numpy(), cmap="RdBu_r", vmin=-size, vmax=size, shading="nearest")
        where: dict[str, Any] = {"location": "bottom"} if axes_width_inches(ax) < NARROW else {}
        ax.figure.colorbar(mesh, ax=ax, label="effect", **where)
        if "band_lower" in frame:
            apart = (frame["band_lower"] > 0.0) | (frame["band_upper"] < 0.0)
            outside = (
                frame.assign(apart=apart.astype(float)).pivot_table("apart", rest[0], rest[1]).to_numpy()
            )
            if 0.0 < outside.mean() < 1.0:
                said = "lines: around where the simultaneous band is apart from 0"
                ax.contour(x, y, outside, levels=[0.5], colors="black", linewidths=0.8)
        ax.set_xlabel(rest[1])
        ax.set_ylabel(axis_name(rest[0], label), parse_math=False)
        # Few ticks, the same however high the axes come to be.
        ax.locator_params(axis="y", nbins=4)
        set_headline(ax, title, said)
        return ax
    ax.axhline(0.0, color="0.6", linewidth=1.0, linestyle="--", zorder=0)
    groups = [("", frame)] if of in rest else list(frame.groupby(of, sort=False))
    most = name_width(ax, 0.5, 28)
    for i, (name, rows) in enumerate(groups):
        colour, name = COLORS[i % len(COLORS)], shorten(str(name), most)
        if not rest:
            ax.plot([i], rows["estimate"], "o", color=colour, label=name)
            continue
        x = rows[rest[0]].to_numpy(dtype=float)
        ax.plot(x, rows["estimate"], color=colour, label=name)
        if "lower" in rows:
            said = "shaded: intervals of each point; dotted: the simultaneous band"
            ax.fill_between(x, rows["lower"], rows["upper"], color=colour, alpha=0.2, linewidth=0.0)
            for side in ("band_lower", "band_upper"):
                ax.plot(x, rows[side], color=colour, linewidth=0.8, linestyle=":")
    ax.set_xlabel(axis_name(rest[0], label) if rest else "", parse_math=False)
    ax.set_ylabel("effect")
    if not rest:
        ax.set_xticks([])
    if of not in rest:
        legend_below(ax)
    set_headline(ax, title, said)
    return ax


def axis_name(argument: str, label: str) -> str:
    """Name of an effect's argument: the column of a smooth effect, else s or t."""
    return label.partition("(")[2].removesuffix(")") or label if argument == "x" else argument


def draw_path(path: pd.DataFrame, ax: Axes | None) -> Axes:
    """R-squared or loss along the path, with a mark of the learner's colour at every step."""
    what = path.columns[1]
    name = "loss" if what == "loss" else "R-squared"
    ax = axes_for(ax, 6.5, 4.0, "Steps of boosting")
    ax.plot(path.index, path[what], color="0.7", linewidth=1.0, zorder=0)
    most = name_width(ax, 0.5, 28)
    for i, (label, rows) in enumerate(path.groupby("learner", sort=False)):
        colour = COLORS[i % len(COLORS)]
        ax.plot(rows.index, rows[what], ".", color=colour, markersize=4.0, label=shorten(str(label), most))
    ax.set(xlabel="step", ylabel=name)
    legend_below(ax)
    return ax


def draw_cv(cv: pd.DataFrame, mstop: int, ax: Axes | None) -> Axes:
    """Loss of the folds that are left out, with its standard error, and the step that is taken."""
    ax = axes_for(ax, 6.5, 4.0, "Cross-validation")
    ax.plot(cv.index, cv["loss"], color=COLORS[0])
    ax.fill_between(cv.index, cv["loss"] - cv["se"], cv["loss"] + cv["se"], alpha=0.2, linewidth=0.0)
    mark_x(ax, mstop, f"taken: {mstop}")
    ax.set_xlabel("step")
    label_y(ax, "loss of left-out folds")
    return ax


def draw_importance(learners: pd.DataFrame, ax: Axes | None) -> Axes:
    """Share of each learner in what is explained, the largest on top."""
    learners = learners.sort_values("explained", ascending=False)
    ax = axes_for(ax, 6.0, 0.9 + 0.3 * len(learners), "Importance", ROWS_ONLY)
    at = np.arange(len(learners), dtype=float)
    ax.barh(at, 100.0 * learners["explained"], color=COLORS[0])
    most = name_width(ax, 0.42, 36)
    label_rows(ax, at, [shorten("intercept" if name == "1" else str(name), most) for name in learners.index])
    label_x(ax, "share in what is explained, %")
    return ax


def draw_effects(effects: Mapping[str, pd.DataFrame], response: str) -> np.ndarray:
    """Draw effects side by side, two to a row."""
    plt = pyplot()
    rows = max(1, -(-len(effects) // 2))
    figure, axes = plt.subplots(rows, 2, figsize=(7.0, 3.2 * rows), layout="constrained", squeeze=False)
    for ax, (label, frame) in zip(axes.ravel(), effects.items(), strict=False):
        draw_surface(frame, label, response, ax, label)
    for ax in axes.ravel()[len(effects) :]:
        ax.set_axis_off()
    title_figure(figure, f"Effects on {response}")
    return np.asarray(axes)


def draw_curves(
    t: Floats, observed: Floats, fitted: Floats, names: Sequence[str], response: str, ax: Axes | None
) -> Axes:
    """Draw curves (m, G): what was observed as points, what is fitted as lines."""
    ax = axes_for(ax, 6.5, 4.0)
    most = name_width(ax, 0.5, 28)
    for i, name in enumerate(names):
        colour = COLORS[i % len(COLORS)]
        ax.plot(t, observed[i], "o", color=colour, markersize=2.5, alpha=0.6)
        ax.plot(t, fitted[i], color=colour, label=shorten(f"row {name}", most))
    ax.set_xlabel("t")
    label_y(ax, response)
    legend_below(ax)
    set_headline(ax, "Observed (points) and fitted (lines)")
    # The legend made the axes lower.
    label_y(ax, response)
    return ax


def draw_scatter(fitted: Floats, observed: Floats, response: str, ax: Axes | None) -> Axes:
    """Draw what was observed against what is fitted, beside the line on which both are the same."""
    ax = axes_for(ax, 4.5, 4.5, "Observed and fitted")
    ax.plot(fitted, observed, "o", color=COLORS[0], markersize=3.0, alpha=0.5, markeredgewidth=0.0)
    ends = np.nanmin(fitted), np.nanmax(fitted)
    ax.plot(ends, ends, color="0.4", linewidth=1.0, linestyle="--")
    label_x(ax, f"fitted {response}")
    label_y(ax, f"observed {response}")
    few_ticks(ax)
    return ax


# ----------------------------------------------------------------------------------------------------
# Pictures that results of boosting draw of themselves.

Picture: TypeAlias = Literal["surface", "effects", "path", "cv", "importance", "fitted"]
PICTURES = ("surface", "effects", "path", "cv", "importance", "fitted")


class BoostPictures:
    """Effects, the path, left-out folds, importance, and responses beside what is fitted.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> fit = model.fit(steps=20, select="cv", folds=5)
    >>> fit.coef.shape, fit.offset.shape, round(fit.rsquared, 1), len(fit.effects) == len(fit.importance)
    ((5, 1), (1,), 0.1, False)
    >>> len(fit.learners), len(fit.path) <= 20, len(fit.cv) > 0, len(fit.aicc) > 0
    (3, True, True, True)
    >>> fit.predict(table.head(2)).shape, sorted(fit.score(table)), fit.steps(5).mstop
    ((2,), ['mape', 'rsquared'], 5)
    >>> len(fit.surface(fit.importance.index[0])) > 0, bool(fit.plot("importance").has_data())
    (True, True)
    """

    _record: Any
    mstop: int
    estimate: Any

    @property
    def path(self) -> pd.DataFrame:
        """The learner of every step."""
        raise NotImplementedError

    @property
    def cv(self) -> pd.DataFrame:
        """Loss of left-out folds."""
        raise NotImplementedError

    @property
    def learners(self) -> pd.DataFrame:
        """Shares by learner."""
        raise NotImplementedError

    @property
    def offset(self) -> Floats:
        """Curve from which boosting starts."""
        raise NotImplementedError

    def surface(self, learner: str) -> pd.DataFrame:
        """Effect of a learner."""
        raise NotImplementedError

    def predict(self, new: pd.DataFrame) -> pd.DataFrame | pd.Series:
        """Predict the response of rows."""
        raise NotImplementedError

    @property
    def importance(self) -> pd.Series:
        """Share of each learner in what is explained, the largest first."""
        return self.learners["explained"].sort_values(ascending=False).rename("importance")

    @property
    def effects(self) -> Mapping[str, pd.DataFrame]:
        """Effects of all learners that were taken, by label, as :meth:`surface`; the largest first."""
        taken = self.learners["first_step"] > 0
        return {str(label): self.surface(str(label)) for label in self.importance.index if taken[label]}

    def plot(
        self,
        what: Picture = "surface",
        learner: str | None = None,
        ax: Axes | None = None,
        new: pd.DataFrame | None = None,
    ) -> Any:
        """Draw a picture.

        Parameters
        ----------
        what : {"surface", "effects", "path", "cv", "importance", "fitted"}
            The effect of a learner; those of all that were taken; R-squared or loss along the path; the loss
            of left-out folds; shares in what is explained; responses of `new` rows beside what is fitted.
        learner : str, optional
            For "surface"; by default the one that explains most.
        ax : matplotlib Axes, optional
            Not for "effects", which takes a figure.
        new : DataFrame
            For "fitted": rows that you hold, with responses; of curves the first six are drawn.

        Returns
        -------
        matplotlib Axes; for "effects" an array of them.
        """
        check_choice("what", what, PICTURES)
        if what == "path":
            return draw_path(self.path, ax)
        if what == "cv":
            return draw_cv(self.cv, self.mstop, ax)
        if what == "importance":
            return draw_importance(self.learners, ax)
        if what == "fitted":
            return self._draw_fitted(new, ax)
        response = self.estimate.response
        if what == "effects":
            if ax is not None:
                raise ModelError("ax: the effects of all learners take a figure of their own")
            return draw_effects(self.effects, response)
        best = str(self.importance.drop("1").index[0]) if learner is None else learner
        return draw_surface(self.surface(best), best, response, ax)

    def _draw_fitted(self, new: pd.DataFrame | None, ax: Axes | None) -> Axes:
        if new is None:
            raise ModelError(
                "new: responses beside what is fitted need rows that you hold: plot(..., new=rows)"
            )
        held: BoostPredictionRecord = self._record
        functional = held.formula.functional
        rows = new.iloc[:6] if functional else new
        y, found, _ = compared(held, self.offset, rows, self.predict(rows))
        if not functional:
            return draw_scatter(found.ravel(), y.ravel(), self.estimate.response, ax)
        if y.ndim == 1:
            raise ModelError("new: curves are drawn beside fits at the same points, and these have others")
        names = [str(name) for name in rows.index]
        return draw_curves(np.asarray(held.t), y, found, names, self.estimate.response, ax)
