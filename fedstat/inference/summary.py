"""Base of all results: notes by severity, tables, and the printed summary with its coefficients by site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.inference.notes import SEVERITIES, Note, above_table
from fedstat.inference.tables import WIDTH as WIDTH
from fedstat.inference.tables import Exported, Sheet, SheetSummary, note_text, number
from fedstat.spline_names import short_names
from fedstat.typing import Floats

NUMBERS = {"coef": 10, "std err": 10, "z": 9, "P>|z|": 6, "low": 10, "high": 10}
"""Text width of each number column of the coefficient table."""
PART = 9
"""Text width of a column with parts of the standard error."""
MOST_LINES = 60
"""Lines of a printed summary beyond which notes that only describe are left out."""
FEWEST_FOLDED = 4
"""Fewest sites that are shown in one row if they are alike."""
STATEMENTS = ("estimate", "std_error", "statistic", "p_value", "conf_low", "conf_high")
HEADER_WIDTHS = (17, 28, 17, 30)
DASH = "-"
"""Text of a number that a fit does not have."""
INDENT = "\u00a0\u00a0"
"""Blanks that HTML keeps."""

Shown: TypeAlias = Literal["brief", "all"]
"""Which notes are below the tables of a summary."""
Pairs = Sequence[tuple[str, str]]
Lines: TypeAlias = tuple[tuple[str, str, str | Callable[[Any], str | list[str]]], ...]
"""Lines of a summary: label, attribute, and its format or the function that writes it, or several lines.

Without the name of an attribute, the function takes the result.
"""
Columns: TypeAlias = tuple[tuple[str, str], ...]
"""Columns of :meth:`Report.glance`: name and attribute; a later one of the same name replaces it."""


@dataclass(frozen=True, slots=True)
class CoefficientBlock:
    """Contribution of a site to the fit.

    `columns` of the design that it holds, `entities` of the fit that it has, and the share `missing` of the
    values of its columns over all entities of the fit, in [0, 1]; nan if it is not released.
    """

    site: str
    columns: int
    entities: int
    missing: float

    @property
    def missing_share(self) -> str:
        """The share, as text."""
        return "unknown" if math.isnan(self.missing) else f"{100 * self.missing:.2f} %"


class Report(Exported):
    """Base of all results: notes, their table, one row of figures, and the printed summary.

    A subclass declares the columns of :meth:`glance` in `_GLANCE`, with the attribute of each, implements
    `tidy` and `_sheets`, and adds to `_summary_notes`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> between = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().heterogeneity
    >>> "Four hospitals" in between.summary(title="Four hospitals").as_text()
    True
    >>> between.diagnostics().columns.tolist(), between.diagnostics()["note"].tolist() == between.notes
    (['kind', 'severity', 'note', 'values'], True)
    >>> "| age |" in between.to_markdown(), "age &" in between.to_latex()
    (True, True)
    >>> between.to_docx("sites.docx")
    >>> between.tidy()["term"].tolist(), between.glance()["df"].tolist()
    (['Intercept', 'age', 'sex'], [9])
    """

    __slots__ = ()
    _GLANCE: ClassVar[Columns] = ()
    _sources: tuple[Report, ...] = ()
    """Results of which this one was made; see :class:`DerivedReport`."""

    def summary(self, *, title: str | None = None, notes: Shown = "brief") -> SheetSummary:
        """Lay out the results; ``print`` them, or take ``as_html()``, ``as_latex()``, ``as_csv()``.

        Parameters
        ----------
        title : str, optional
            Replaces the title of the first table.
        notes : {"brief", "all"}
            Which notes are below the tables: warnings, and those that describe as long as a summary has no
            more than sixty lines; or all, those on the protocol as well.

        Returns
        -------
        SheetSummary
            A banner of what forbids an interpretation, tables, and notes, the most severe first.
        """
        return self._lay_out(self._sheets(), title, notes)

    @property
    def notes(self) -> list[str]:
        """All notes, the most severe first."""
        return [str(note) for note in self._ordered_notes()]

    def diagnostics(self) -> pd.DataFrame:
        """Return all notes as a table, the most severe first.

        Returns
        -------
        DataFrame
            One row per note: its ``kind``, ``severity`` ("critical", "warning", "info" or "protocol"), text,
            ``note``, and the ``values`` in it by name.
        """
        rows = [(note.kind, note.severity, str(note), dict(note.values)) for note in self._ordered_notes()]
        return pd.DataFrame(rows, columns=["kind", "severity", "note", "values"])

    def tidy(self) -> pd.DataFrame:
        """Return the estimates as a table, with broom's names of columns."""
        raise NotImplementedError

    def glance(self) -> pd.DataFrame:
        """Return the figures of the whole result as one row; ``concat`` combines the rows of several.

        Returns
        -------
        DataFrame
        """
        return pd.DataFrame([self._glance()])

    def _repr_html_(self) -> str:
        return self.summary().as_html()

    def _printed(self) -> SheetSummary:
        return self.summary()

    # -- hooks of a subclass -----------------------------------------------------------------------

    def _sheets(self) -> Iterable[Sheet]:
        """Tables of the summary."""
        raise NotImplementedError

    def _glance(self) -> Mapping[str, Any]:
        """Columns of :meth:`glance`; nan where the result does not have one."""
        return {name: available(self, attribute) for name, attribute in self._GLANCE}

    def _summary_notes(self) -> Iterator[Note]:
        """Yield the notes; those of one severity are printed in this order."""
        return iter(())

    def _ordered_notes(self) -> list[Note]:
        inherited = (note for source in self._sources for note in critical_notes(source))
        # Several sources may have the same note, and some results repeat a note of their source.
        notes = {(note.kind, str(note)): note for note in (*inherited, *self._summary_notes())}
        return sorted(notes.values(), key=lambda note: SEVERITIES.index(note.severity))

    def _left_sites(self) -> str:
        """Say in a line what left the sites; empty where nothing is known of it."""
        return ""

    def _lay_out(self, sheets: Iterable[Sheet], title: str | None, shown: Shown = "brief") -> SheetSummary:
        if shown not in get_args(Shown):
            raise ModelError(f"notes: expected one of {', '.join(map(repr, get_args(Shown)))}, got {shown!r}")
        first, *others = sheets
        tables = [first if title is None else replace(first, title=title), *others]
        notes = self._ordered_notes()
        banners = [f"*** {note} ***" for note in above_table(notes)]
        below = [note for note in notes[len(banners) :] if shown == "all" or note.severity != "protocol"]
        last, texts = list(filter(None, [self._left_sites()])), [str(note) for note in below]
        made = SheetSummary(tables, texts, banners, last)
        described = sum(note.severity == "info" for note in below)
        excess = 0 if shown == "all" else made.as_text(WIDTH).count("\n") + 1 - MOST_LINES
        if excess <= 0 or not described:
            return made
        # The line that refers to the notes left out takes the place of one line of theirs.
        hidden, excess = 0, excess + 1
        while excess > 0 and hidden < described:
            hidden += 1
            place = len(texts) - hidden
            excess -= note_text(place + 1, texts[place], made._note_width).count("\n") + 1
        more = f"{hidden} more note{'s' * (hidden > 1)}: see summary(notes='all')."
        return SheetSummary(tables, texts[: len(texts) - hidden], banners, [*last, more])


def critical_notes(result: object) -> list[Note]:
    """Return the notes that are printed above the summary of a result; none for other packages' results."""
    return above_table(result._ordered_notes()) if isinstance(result, Report) else []


class DerivedReport(Report):
    """Base of results that are made of other results, such as effects of a fit.

    Critical notes on the `sources` are printed above the summary as well. Constructors take `sources` without
    a default, so that no member can leave them out. Sources of other packages have no notes.
    """

    def __init__(self, sources: Iterable[object]) -> None:
        # Frozen dataclasses call this as well.
        object.__setattr__(self, "_sources", tuple(one for one in sources if isinstance(one, Report)))


def available(result: Any, attribute: str, otherwise: Any = np.nan) -> Any:
    """Return an attribute of a result, whose name may have dots, or `otherwise` if the fit has none."""
    try:
        return attrgetter(attribute)(result)
    except NotAvailableError:
        return otherwise


def lines_of(result: Any, lines: Lines) -> list[tuple[str, str]]:
    """Write lines of a summary: a dash where the fit does not have a number, no line for None and no text."""
    written = []
    for label, attribute, how in lines:
        value = available(result, attribute, DASH) if attribute else result
        if value is DASH or value is None:
            text: str | list[str] = value or ""
        else:
            text = how(value) if callable(how) else format(value, how)
        written += [(label, one) for one in ([text] if isinstance(text, str) else text) if one]
    return written


def header_sheet(title: str, lines: Pairs) -> Sheet:
    """Labels and values of a fit in two columns."""
    half = (len(lines) + 1) // 2
    pairs = zip_longest(lines[:half], lines[half:], fillvalue=("", ""))
    rows = tuple((_label(a), b, _label(c), d) for (a, b), (c, d) in pairs)
    return Sheet(("",) * 4, rows, "lrlr", HEADER_WIDTHS, title, gap=2, wrap=True)


def coefficient_sheet(
    coefficients: pd.DataFrame,
    parts: Mapping[str, Floats],
    inference: bool,
    alpha: float,
    z: str,
    further: Mapping[str, Floats] | None = None,
    about: Mapping[str, str] | None = None,
) -> Sheet:
    """List coefficients below the name of their site, with `further` columns, blank where nan, at the end.

    `about` has what is said of a site next to its name.
    """
    given = coefficients["site"].tolist()
    # Stable: within a site the order of the design is kept, and those without a site come first.
    places = {site: place for place, site in enumerate(dict.fromkeys(["", *given]))}
    order = sorted(range(len(given)), key=lambda row: places[given[row]])
    table = np.column_stack([coefficients[list(STATEMENTS)].to_numpy(), *parts.values()])[order].tolist()
    low, high = f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]"
    labels = ("coef", "std err", *parts, z, f"P>|{z}|", low, high)
    count = len(labels) if inference else 1
    all_widths = tuple(NUMBERS.values())
    widths = (*all_widths[:2], *[PART] * len(parts), *all_widths[2:])[:count]
    further = further or {}
    last = np.column_stack([np.empty((len(given), 0)), *further.values()])[order].tolist()
    rows: list[tuple[str, ...]] = []
    names = list(short_names(coefficients["term"].tolist()))
    sites, names = [given[row] for row in order], [names[row] for row in order]
    stubs = zip(blank_repeats(sites), sites, names, table, last, strict=True)
    for heading, site, name, values, ends in stubs:
        if heading:
            said = (about or {}).get(heading, "")
            rows.append((f"{heading}{said and f' ({said})'}", *[""] * (count + len(further))))
        size = max(map(abs, ends), default=0.0)
        texts = ("" if np.isnan(value) else number(value, 3, error=size) for value in ends)
        rows.append(((INDENT if site else "") + str(name), *_numbers(values)[:count], *texts))
    labels, widths = (*labels[:count], *further), (*widths, *[PART] * len(further))
    count += len(further)
    stub = WIDTH - sum(widths) - count
    return Sheet(("", *labels), tuple(rows), "l" + "r" * count, (stub, *widths))


def coefficient_block_sheet(blocks: Sequence[CoefficientBlock]) -> Sheet:
    """One site per row: columns, entities, missing share."""
    widths = (WIDTH - 8 - 12 - 10 - 6, 8, 12, 10)
    rows = [
        (block.site, f"{block.columns:,}", f"{block.entities:,}", block.missing_share) for block in blocks
    ]
    return Sheet(("site", "columns", "entities", "missing"), fold_sites(rows), "lrrr", widths, gap=2)


def site_rows_sheet(
    rows: Sequence[tuple[str, int, float]], own: Sequence[str] = (), *, subset: bool = False
) -> Sheet:
    """One site per row: its rows, and the share of its table that is not used; one row for all if alike.

    `own` says of each site whether it has a fit of its own.
    """
    lines: list[tuple[str, ...]] = [(site, f"{n:,}", f"{100 * share:.2f} %") for site, n, share in rows]
    if own:
        lines = [(*line, fit) for line, fit in zip(lines, own, strict=True)]
    # Sites count rows outside of a subset together with incomplete ones.
    headers = ("site", "rows", "not used" if subset else "left out", "own fit")[: len(lines[0])]
    widths = (9, 9, 12)[: len(headers) - 1]
    stub = WIDTH - sum(widths) - 2 * len(widths)
    return Sheet(headers, fold_sites(lines), "l" + "r" * len(widths), (stub, *widths), gap=2)


def fold_sites(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return one row for all sites if there are several and they are alike, otherwise the rows."""
    if len(rows) < FEWEST_FOLDED or any(row[1:] != rows[0][1:] for row in rows):
        return tuple(rows)
    return ((f"each of {len(rows)} sites", *rows[0][1:]),)


def blank_repeats(labels: Sequence[str] | pd.Series) -> list[str]:
    """Labels, with repetitions of the one above left blank."""
    values = list(labels)
    return [now if i == 0 or now != values[i - 1] else "" for i, now in enumerate(values)]


def _label(text: str) -> str:
    return f"{text}:" if text else ""


def _numbers(row: Sequence[float]) -> tuple[str, ...]:
    estimate, error, statistic, p, low, high, *parts = row
    # A huge z would break the column.
    z = number(statistic, 3) if abs(statistic) >= 1e4 else f"{statistic:.3f}"
    errors = (number(error), *map(number, parts))
    return (number(estimate, error=error), *errors, z, f"{p:.3f}", number(low), number(high))
