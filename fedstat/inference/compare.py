"""Comparison of several fits side by side in one table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedstat.errors import DataWarning, ModelError, warn
from fedstat.inference.estimate import INTERCEPT
from fedstat.inference.plots import plot_models
from fedstat.inference.summary import blank_repeats, critical_notes
from fedstat.inference.tables import Sheet, SheetSummary, exponentials, human_bytes, number
from fedstat.spline_names import canonical_name, count_from_zero, short_names
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JUDGED = "Entities Judged"
BOTTOM = (
    "No. Observations",
    JUDGED,
    "R-squared",
    "Log-Likelihood",
    "AIC",
    "BIC",
    "AUC",
    "Accuracy",
    "F1",
    "Log-Loss",
    "RMSE",
    "Rounds",
    "Traffic",
)
WIDEST = 28
"""Characters of the widest column of the text rendering."""
_DOUBLE = re.compile(r"\"([^\"'\\]*)\"")


class Comparison(SheetSummary):
    """A table with one column per fit and one row per coefficient.

    Print it, let a notebook show it, or take `to_frame`, `as_html`, `as_latex`, `as_csv`.

    Parameters
    ----------
    coefficients : DataFrame
        Text cells, index (site, name), one column per fit; blank where a fit has no such coefficient.
    bottom : DataFrame
        Text cells, one row per figure of the whole fit.
    notes : tuple of str
    headlines : tuple of str
        What forbids an interpretation of one of the fits.
    estimates : DataFrame
        ``model``, ``term``, ``estimate``, ``conf_low`` and ``conf_high`` of each coefficient, for `plot`.
    exponentiate : bool
        Whether these are exponentials.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> table = fs.compare({"common": fs.GLORE.from_formula("num > 0 ~ age", partition).fit()})
    >>> table.to_frame().columns.tolist(), "age" in table.as_text(), table.plot().has_data()
    (['common'], True, True)
    """

    def __init__(
        self,
        coefficients: pd.DataFrame,
        bottom: pd.DataFrame,
        notes: tuple[str, ...],
        headlines: tuple[str, ...] = (),
        estimates: pd.DataFrame | None = None,
        exponentiate: bool = False,
    ) -> None:
        self.coefficients, self.bottom = coefficients, bottom
        self.estimates = pd.DataFrame() if estimates is None else estimates
        self.exponentiate = exponentiate
        # A heading may be that of an index, such as "site": columns are taken by position.
        heads = [*map(str, coefficients.index.names), *map(str, coefficients.columns)]
        tables = [
            part.reset_index(allow_duplicates=True).set_axis(range(len(heads)), axis=1)
            for part in (coefficients.apply(_align_stars), bottom)
        ]
        if coefficients.empty:
            # Fits that have only figures give one sheet, and no site next to a name.
            heads, body = ["", *heads[2:]], tables[1].drop(columns=0)
            widths = tuple(
                min(max(map(len, [*body[c], h])), WIDEST) for c, h in zip(body, heads, strict=True)
            )
            super().__init__([_sheet(body, heads, widths, 1)], notes, headlines)
            return
        tables[0][1] = list(short_names(tables[0][1].tolist()))
        # Coefficients and figures are two sheets of one width, so that their columns are aligned.
        longest = [max(map(len, [*tables[0][i], *tables[1][i], head])) for i, head in enumerate(heads)]
        widths = tuple(min(length, WIDEST) for length in longest)
        headers = (heads, [""] * len(heads))
        super().__init__(
            [_sheet(*one, widths) for one in zip(tables, headers, strict=True)], notes, headlines
        )

    def to_frame(self) -> pd.DataFrame:
        """All cells as printed, index (site, name); the figures of the whole fits have site ``""``."""
        return pd.concat([self.coefficients, self.bottom])

    def plot(self, ax: Axes | None = None, *, intercept: bool = False) -> Axes:
        """Draw the coefficients of all fits with 95 % intervals, one color for each fit.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        intercept : bool
            Whether to draw it; it is on another scale than the rest as a rule.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ModelError
            No fit has coefficients with intervals.
        """
        frame = self.estimates
        if len(frame) and not intercept:
            frame = frame[frame["term"] != INTERCEPT]
        if not len(frame):
            raise ModelError("plot: no fit has coefficients with intervals")
        return plot_models(frame, ax=ax, ratios=self.exponentiate)


@dataclass(frozen=True, slots=True)
class _Column:
    """One fit: its cells by coefficient name, their sites, its figures at the bottom, and missing figures.

    `judged` states which entities the figures of a fit without coefficients describe, `estimates` (p, 3) are
    coefficients and limits of their intervals.
    """

    cells: dict[str, str]
    sites: dict[str, str]
    bottom: tuple[str, ...]
    lacking: str
    converged: bool
    judged: str = ""
    estimates: Floats | None = None


def compare(
    results: Mapping[str, object],
    *,
    stars: Sequence[float] = (0.05,),
    digits: int = 4,
    exponentiate: bool = False,
    rename: Mapping[str, str] | None = None,
) -> Comparison:
    """Put fits side by side: coefficient, standard error in brackets, stars, grouped by site.

    Parameters
    ----------
    results : mapping of str to CoefficientResults
        Heading of each column to its fit. A statsmodels result is also accepted, as a pooled reference, and
        results without coefficients that have figures, such as those of networks or their evaluations.
    stars : sequence of float
        A star for each level that the p-value is below; empty for none.
    digits : int
        Decimals.
    exponentiate : bool
        Show exponentials, such as odds ratios, with 95 % intervals in brackets instead of standard errors.
    rename : mapping of str to str, optional
        Labels of coefficients, by name; the others keep their names.

    Returns
    -------
    Comparison

    Raises
    ------
    ModelError
        `results` is not a mapping, is empty, or contains something that is not a fit; `stars` is not a
        level; or `rename` names a coefficient that no fit has.

    Warns
    -----
    DataWarning
        Fits with a likelihood have different numbers of rows.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> small = fs.GLORE.from_formula("num > 0 ~ age", partition).fit()
    >>> large = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    >>> fs.compare({"age": small, "age and sex": large}).to_frame().shape
    (9, 2)
    """
    if not isinstance(results, Mapping):
        raise ModelError(
            "compare: expected a mapping of headings to fits, as in {'common': result}, received "
            f"{type(results).__name__}"
        )
    if not results:
        raise ModelError("compare: expected at least one result, received none")
    if not all(0.0 < level < 1.0 for level in stars):
        raise ModelError(f"compare: expected stars as levels between 0 and 1, received {tuple(stars)}")
    for heading, result in results.items():
        _check_fit(heading, result)
    columns = {heading: _column(result, stars, digits, exponentiate) for heading, result in results.items()}
    columns = dict(zip(columns, _named_alike(list(columns.values())), strict=True))
    columns = {heading: _renamed(column, columns, rename or {}) for heading, column in columns.items()}
    if different := _different_rows(columns):
        warn(f"compare: {different}", DataWarning)
    cells = {heading: column.cells for heading, column in columns.items()}
    index = _row_order(list(columns.values()))
    names = index.get_level_values("name")
    table = pd.DataFrame(
        {str(h): [cell.get(name, "") for name in names] for h, cell in cells.items()}, index=index
    )
    bottom_index = pd.MultiIndex.from_product([[""], BOTTOM], names=index.names)
    bottom = pd.DataFrame({str(h): column.bottom for h, column in columns.items()}, index=bottom_index)
    alarms = tuple(
        f"*** {heading}: {note} ***"
        for heading, result in results.items()
        for note in critical_notes(result)
        if note.kind != "not_converged"  # which has a note of its own, of fits of other packages as well
    )
    notes = _notes(columns, stars, exponentiate)
    shown = bottom[(bottom != "").any(axis=1)]
    return Comparison(table, shown, notes, alarms, _estimates_of(columns), exponentiate)


def _renamed(column: _Column, columns: Mapping[str, _Column], rename: Mapping[str, str]) -> _Column:
    known = dict.fromkeys(name for one in columns.values() for name in one.cells)
    if unknown := [name for name in rename if name not in known]:
        raise ModelError(f"rename: no fit has the coefficient {unknown[0]!r}; there are {', '.join(known)}")
    parts = (
        {rename.get(name, name): one for name, one in part.items()} for part in (column.cells, column.sites)
    )
    cells, sites = parts
    if len(cells) < len(column.cells):
        raise ModelError("rename: two coefficients of one fit would have the same label")
    return replace(column, cells=cells, sites=sites)


def _estimates_of(columns: Mapping[str, _Column]) -> pd.DataFrame:
    """Return coefficients with intervals by fit."""
    parts = [
        pd.DataFrame(column.estimates, columns=["estimate", "conf_low", "conf_high"]).assign(
            model=str(heading), term=list(column.cells)
        )
        for heading, column in columns.items()
        if column.estimates is not None and len(column.estimates) == len(column.cells)
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _different_rows(columns: Mapping[str, _Column]) -> str:
    """Return that likelihoods cannot be compared; empty if they can."""
    rows, criterion = BOTTOM.index("No. Observations"), BOTTOM.index("AIC")
    if len({one.bottom[rows] for one in columns.values() if one.bottom[criterion]}) < 2:
        return ""
    return (
        "The fits have different rows, so that log-likelihoods, AIC and BIC cannot be compared; "
        "complete=[...] fits all models to the rows that have all columns."
    )


def _check_fit(heading: object, result: object) -> None:
    if isinstance(getattr(result, "params", None), pd.Series) or hasattr(result, "figures"):
        return
    what = type(result).__name__ + ", which is not fitted" * hasattr(result, "fit")
    raise ModelError(
        f"compare: expected a fit with named params under {heading!r} (of fedstat, or of statsmodels by a "
        f"formula or DataFrame), received {what}"
    )


def _column(result: object, stars: Sequence[float], digits: int, exponentiate: bool) -> _Column:
    if hasattr(result, "figures"):
        return _Column({}, {}, _bottom(result), "", True, getattr(result, "judged", ""))
    params: pd.Series = result.params  # type: ignore[attr-defined]
    # patsy keeps the quotes in which a level was written.
    names = count_from_zero([_DOUBLE.sub(r"'\1'", str(name)) for name in params.index])
    bse, pvalues = getattr(result, "bse", None), getattr(result, "pvalues", None)
    values = params.to_numpy(dtype=np.float64)
    turn = exponentials if exponentiate else np.asarray
    limits = None
    if bse is not None:
        limits = turn(np.column_stack([values, np.asarray(result.conf_int())]))  # type: ignore[attr-defined]
    values = turn(values)
    # A number that is small compared with its standard error is printed in fixed point.
    known = [0.0] * len(values) if bse is None or exponentiate else bse
    cells = [number(value, digits, error) for value, error in zip(values, known, strict=True)]
    if bse is not None and pvalues is not None:
        errors: Iterable[str] = (f" ({number(se, digits)})" for se in bse)
        if exponentiate and limits is not None:
            errors = (f" ({number(low, digits)}, {number(high, digits)})" for _, low, high in limits)
        marks = ("*" * sum(p < level for level in stars) for p in pvalues)
        cells = ["".join(parts) for parts in zip(cells, errors, marks, strict=True)]
    sites = getattr(result, "coef_sites", [""] * len(names))
    return _Column(
        cells=dict(zip(names, cells, strict=True)),
        sites=dict(zip(names, sites, strict=True)),
        bottom=_bottom(result),
        lacking=_lacking(result) if bse is None else "",
        converged=getattr(result, "converged", True),
        estimates=limits,
    )


def _named_alike(columns: Sequence[_Column]) -> list[_Column]:
    """Give a coefficient the name that it has in the first fit: ``b:a`` is ``a:b``."""
    first: dict[str, str] = {}
    out = []
    for column in columns:
        own = {name: first.setdefault(canonical_name(name), name) for name in column.cells}
        parts = ({own[name]: one for name, one in part.items()} for part in (column.cells, column.sites))
        cells, sites = parts
        # Two coefficients of one fit keep their names.
        out.append(replace(column, cells=cells, sites=sites) if len(cells) == len(own) else column)
    return out


def _bottom(result: object) -> tuple[str, ...]:
    ledger = getattr(result, "ledger", None)
    # A missing value of a fit is an AttributeError, which leaves a blank.
    nobs, rsquared, llf, auc = (getattr(result, name, None) for name in ("nobs", "rsquared", "llf", "auc"))
    aic = getattr(result, "aic", None)
    # The BIC of statsmodels' GLM is of the deviance; the name of that of the likelihood is another.
    bic = getattr(result, "bic_llf" if hasattr(type(result), "bic_llf") else "bic", None)
    # Predictions without coefficients.
    figures = getattr(result, "figures", {})
    auc, rsquared = figures.get("auc", auc), figures.get("rsquared", rsquared)
    further = (figures.get(name) for name in ("accuracy", "f1", "log_loss", "rmse"))
    return (
        "" if nobs is None else f"{int(nobs):,}",
        f"{figures['n']:,.0f}" if "n" in figures else "",
        "" if rsquared is None else number(rsquared),
        *("" if figure is None else number(figure, 2) for figure in (llf, aic, bic)),
        "" if auc is None else number(auc),
        *("" if figure is None else number(figure) for figure in further),
        "" if ledger is None else f"{ledger.rounds:,}",
        "" if ledger is None else human_bytes(ledger.bytes),
    )


def _lacking(result: object) -> str:
    try:
        result.bse  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        return str(error)
    return ""


def _row_order(columns: Sequence[_Column]) -> pd.MultiIndex:
    """Sites, then coefficients, in the order of their first appearance; no site comes first.

    A coefficient that has a site in one fit and none in another is listed under the site.
    """
    owner: dict[str, str] = {}
    for column in columns:
        for name, site in column.sites.items():
            owner[name] = owner.get(name) or site
    order = {site: i for i, site in enumerate(dict.fromkeys(["", *owner.values()]))}
    rows = sorted(owner, key=lambda name: order[owner[name]])
    return pd.MultiIndex.from_tuples([(owner[name], name) for name in rows], names=["site", "name"])


def _notes(columns: Mapping[str, _Column], stars: Sequence[float], exponentiate: bool) -> tuple[str, ...]:
    levels = sorted(stars, reverse=True)
    marks = ", ".join(f"{'*' * (i + 1)} p < {level:g}" for i, level in enumerate(levels))
    notes = [f"{heading} has NOT CONVERGED." for heading, column in columns.items() if not column.converged]
    if any(column.cells for column in columns.values()):
        inside = "Exponentials of coefficients, 95 % intervals" if exponentiate else "Standard errors"
        notes.append(f"{inside} in brackets" + (f"; {marks}." if marks else "."))
    if different := _different_rows(columns):
        notes.append(different)
    notes += dict.fromkeys(column.judged for column in columns.values() if column.judged)
    lacking: dict[str, list[str]] = {}
    for heading, column in columns.items():
        lacking.setdefault(column.lacking, []).append(str(heading))
    notes += [f"{', '.join(headings)}: {reason}" for reason, headings in lacking.items() if reason]
    return tuple(notes)


def _align_stars(column: pd.Series) -> pd.Series:
    """Blanks for the stars that a cell does not have, so that right-aligned brackets stay aligned."""
    stars = column.str.count(r"\*")
    return pd.Series(
        [cell + " " * blanks for cell, blanks in zip(column, stars.max() - stars, strict=True)],
        index=column.index,
        dtype=object,
    )


def _sheet(frame: pd.DataFrame, headers: Sequence[str], widths: tuple[int, ...], names: int = 2) -> Sheet:
    columns = [list(frame[column]) for column in frame]
    rows = tuple(zip(blank_repeats(columns[0]), *columns[1:], strict=True))
    return Sheet(tuple(headers), rows, "l" * names + "r" * (len(widths) - names), widths, gap=2)
