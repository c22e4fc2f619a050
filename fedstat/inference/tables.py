"""A table of text cells and its renderings as text, HTML, LaTeX and CSV."""

from __future__ import annotations

import csv
import html
import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from statsmodels.iolib.summary import Summary
from statsmodels.iolib.table import SimpleTable

from fedstat.plotting import shorten

WIDTH, NARROWEST = 98, 60
"""Characters of a line of printed tables: without a terminal, and in the narrowest one."""
PAIRED, LEAST_TEXT = 80, 10
"""Least width in which pairs of labels and values are next to each other, and that of a column of text."""
ALIGN = {"l": "left", "r": "right"}
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "[": "{[}",
        "]": "{]}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        **{mark: "\\" + mark for mark in "&%$#_"},
    }
)
"""Brackets are braced because a row of a tabular that begins with one is read as an argument of the rule."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of text cells before it is rendered.

    `aligns` has ``l`` or ``r`` for each column, `widths` the characters of each column in the text rendering.
    Longer cells lose their middle, only there, or continue in the next line with `wrap`. `gap` is the number
    of blanks between two columns.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    aligns: str
    widths: tuple[int, ...]
    title: str = ""
    gap: int = 1
    wrap: bool = False

    @property
    def width(self) -> int:
        """Characters of a line of the text rendering."""
        return sum(self.widths) + self.gap * (len(self.widths) - 1)


class Exported:
    """Whatever prints as tables, as Markdown, LaTeX and a Word document."""

    __slots__ = ()

    def _printed(self) -> SheetSummary:
        """Return the printed tables."""
        raise NotImplementedError

    def to_markdown(self) -> str:
        """Return what is printed as tables of GitHub's Markdown, notes as a numbered list.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.to_markdown().count("| :-- |") > 0
        True
        """
        return self._printed().as_markdown()

    def to_latex(self) -> str:
        """Return what is printed as tables for LaTeX (needs the booktabs package).

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.to_latex().count("tabular") > 1
        True
        """
        return self._printed().as_latex()

    def to_docx(self, path: str | Path) -> None:
        """Write what is printed to a Word document: tables with a heading, and numbered notes.

        Parameters
        ----------
        path : str or Path

        Raises
        ------
        ImportError
            python-docx is not installed: ``pip install fedstat[docx]``.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.to_docx("heart.docx")
        """
        write_docx(self._printed(), path)


class SheetSummary(Exported, Summary):  # type: ignore[misc]
    """Sheets under headlines, with numbered notes, in every form that a notebook or a paper needs.

    The `headlines` are above the `sheets`; the `notes` are below, and last the lines `more`, such as one that
    refers to other notes.

    It is a statsmodels ``Summary``: ``str()``, ``as_text``, ``as_html``, ``as_latex`` (needs the
    booktabs package), ``as_csv`` and the notebook representations work, and ``tables`` holds the
    text tables.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> summary = fs.GLORE.from_formula("num > 0 ~ age", partition).fit().summary()
    >>> texts = summary.as_text(), summary.as_html(), summary.as_latex(), summary.as_csv()
    >>> summary.as_markdown().count("| :-- |") > 0
    True
    >>> all("age" in text for text in texts)
    True
    """

    def __init__(
        self,
        sheets: Sequence[Sheet],
        notes: Sequence[str] = (),
        headlines: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.sheets = tuple(sheets)
        self.notes = tuple(notes)
        self.headlines, self.more = tuple(headlines), tuple(more)
        self.tables = [_text_table(sheet) for sheet in self.sheets]
        self._note_width = max(sheet.width for sheet in self.sheets)

    def __repr__(self) -> str:
        return self.as_text()

    def _printed(self) -> SheetSummary:
        return self

    def as_text(self, width: int | None = None) -> str:
        """Return text of lines with at most `width` characters, where the tables can be as narrow.

        By default the width is that of the terminal, from 60 to 98, and without a terminal 98.
        """
        most = terminal_width() if width is None else width
        sheets = [fitted(sheet, most) for sheet in self.sheets]
        width, note_width = sheets[0].width, min(most, self._note_width)
        parts = [line for headline in self.headlines for line in textwrap.wrap(headline, width)]
        # Every table begins with a rule, which ends the one before it.
        parts += [line for sheet in sheets for line in _text_lines(sheet)]
        parts += ["=" * sheets[-1].width]
        notes = [note_text(i, note, note_width) for i, note in enumerate(self.notes, 1)]
        parts += ["Notes:", *notes] if notes else []
        parts += [line for text in self.more for line in textwrap.wrap(text, width)]
        return "\n".join(parts)

    def as_html(self) -> str:
        """Return one ``table`` element per sheet, the notes as an ordered list."""
        parts = [f"<p><strong>{html.escape(headline)}</strong></p>" for headline in self.headlines]
        parts += [_html(sheet) for sheet in self.sheets]
        if self.notes:
            items = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
            parts.append(f"<p>Notes:</p><ol>{items}</ol>")
        parts += [f"<p>{html.escape(line)}</p>" for line in self.more]
        return "<div>" + "\n".join(parts) + "</div>"

    def as_latex(self) -> str:
        """Return one ``tabular`` per sheet, with booktabs rules."""
        parts = [rf"\textbf{{{latex(headline)}}}" for headline in self.headlines]
        parts += [_latex(sheet) for sheet in self.sheets]
        parts += [rf"\noindent{{\footnotesize [{i}] {latex(n)}}}\par" for i, n in enumerate(self.notes, 1)]
        parts += [rf"\noindent{{\footnotesize {latex(line)}}}\par" for line in self.more]
        return "\n\n".join(parts)

    def as_markdown(self) -> str:
        """Return one table of GitHub's Markdown per sheet, the notes as a numbered list."""
        parts = [f"**{headline}**" for headline in self.headlines]
        parts += [_markdown(sheet) for sheet in self.sheets]
        parts += ["\n".join(f"{i}. {note}" for i, note in enumerate(self.notes, 1))] if self.notes else []
        parts += self.more
        return "\n\n".join(parts)

    def as_csv(self) -> str:
        """Comma-separated sheets, one below the other; cells are quoted where they need it."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerows([headline] for headline in self.headlines)
        for sheet in self.sheets:
            writer.writerows([[sheet.title]] if sheet.title else [])
            writer.writerows([sheet.headers, *sheet.rows] if any(sheet.headers) else sheet.rows)
        writer.writerows([[f"[{i}] {note}"] for i, note in enumerate(self.notes, 1)])
        writer.writerows([line] for line in self.more)
        return buffer.getvalue()


def frame_summary(frame: pd.DataFrame, title: str = "") -> SheetSummary:
    """Return a frame as a printed table, with its index as the first columns."""
    body = frame.reset_index(allow_duplicates=True)
    names = [str(name) for name in frame.index.names if name is not None]
    first = frame.index.nlevels
    headers = (*(names or [""] * first), *map(str, frame.columns))
    rows = tuple(tuple(map(_cell, row)) for row in body.astype(object).itertuples(index=False, name=None))
    widths = tuple(max(map(len, column)) for column in zip(headers, *rows, strict=True))
    aligns = "l" * first + "r" * (len(headers) - first)
    return SheetSummary([Sheet(headers, rows, aligns, widths, title, gap=2)])


def _cell(value: object) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value)):
        return ""
    return number(value) if isinstance(value, float) else str(value)


def write_docx(summary: SheetSummary, path: str | Path) -> None:
    """Write tables to a Word document; an ImportError names the extra if python-docx is not installed."""
    try:
        import docx  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Word documents need python-docx: pip install fedstat[docx]") from error
    document = docx.Document()
    for headline in summary.headlines:
        document.add_paragraph().add_run(headline).bold = True
    for sheet in summary.sheets:
        if sheet.title:
            document.add_paragraph().add_run(sheet.title).bold = True
        head = [sheet.headers] if any(sheet.headers) else []
        table = document.add_table(rows=0, cols=len(sheet.aligns), style="Table Grid")
        for place, cells in enumerate([*head, *sheet.rows]):
            for text, align, cell in zip(cells, sheet.aligns, table.add_row().cells, strict=True):
                paragraph = cell.paragraphs[0]
                paragraph.alignment = {"l": 0, "c": 1, "r": 2}[align]
                paragraph.add_run(text).bold = place < len(head)
        document.add_paragraph()
    for note in summary.notes:
        document.add_paragraph(note, style="List Number")
    for line in summary.more:
        document.add_paragraph(line)
    document.save(str(path))


def note_text(place: int, note: str, width: int) -> str:
    """Return a note as a paragraph ``[1] ...``, wrapped to a width with a hanging indent."""
    label = f"[{place}] "
    return textwrap.fill(note, width, initial_indent=label, subsequent_indent=" " * len(label))


def show_probability(p: float) -> str:
    """Write a p-value after the letter p."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def number(value: float, digits: int = 4, error: float = 0.0) -> str:
    """Return a number in at most ``digits + 6`` characters.

    Fixed point if that shows the number, scientific notation for the very small and very large. A number that
    is small compared with its standard `error` is zero in fixed point, and stays there.
    """
    size = abs(value)
    if not np.isfinite(value):
        return str(float(value))
    if size >= 1e7 or 0.0 < max(size, error if np.isfinite(error) else 0.0) < 10.0 ** (1 - digits):
        return f"{value:.{digits - 1}e}"
    return f"{value:.1f}" if size >= 1e4 else f"{value:.{digits}f}"


def two_digits(value: float) -> str:
    """Return a log-likelihood or a criterion, with two decimals."""
    return number(value, 2)


def yes_or_no(converged: bool) -> str:
    """Return whether a fit converged, in a word that is seen if it did not."""
    return "yes" if converged else "NO"


def exponentials(values: Any) -> Any:
    """Return exponentials in the type of `values`; those beyond the largest number are infinite."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(values)


def human_bytes(count: int) -> str:
    """Bytes in decimal units.

    Examples
    --------
    >>> human_bytes(1_234_567)
    '1.2 MB'
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000.0
    return f"{size:.1f} TB"


def human_range(counts: Iterable[int]) -> str:
    """Smallest and largest count, or one number where they are the same.

    Examples
    --------
    >>> human_range([1_200, 900]), human_range([5, 5])
    ('900 to 1,200', '5')
    """
    counts = list(counts)
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def latex(text: str) -> str:
    """Escape what LaTeX would read as a command."""
    return text.translate(LATEX)


def terminal_width() -> int:
    """Characters of a line of the terminal, within limits; the upper one if output is no terminal."""
    if not sys.stdout.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDTH)


def fitted(sheet: Sheet, most: int) -> Sheet:
    """Return a table whose text is not wider than `most`, if its columns can be as narrow.

    Columns lose blanks first, then columns of text their middle. Pairs of labels and values are below one
    another where two do not fit.
    """
    if sheet.width <= most:
        return sheet
    pairs = sheet.aligns == "lrlr" and not any(sheet.headers)
    if pairs and most < PAIRED:
        rows = [row[:2] for row in sheet.rows] + [row[2:] for row in sheet.rows if row[2]]
        sheet = replace(
            sheet, headers=("", ""), rows=tuple(rows), aligns="lr", widths=(sheet.widths[0], most)
        )
    cells = [row for row in (sheet.headers, *sheet.rows) if any(row[1:])]
    longest = [max(map(len, column), default=0) for column in zip(*cells, strict=True)]
    widths = [min(*pair) for pair in zip(sheet.widths, longest, strict=True)]
    of_text = [j for j, align in enumerate(sheet.aligns) if align == "l" or (pairs and j)]
    room = most - sheet.gap * (len(widths) - 1)
    while sum(widths) > room and (wide := [j for j in of_text if widths[j] > LEAST_TEXT]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    while sheet.wrap and sum(widths) > room:  # longer cells continue in the next line
        widths[widths.index(max(widths))] -= 1
    widths[1 if pairs else 0] += max(room - sum(widths), 0)
    return replace(sheet, widths=tuple(widths))


def _text_lines(sheet: Sheet) -> list[str]:
    """Title, rules, headers and rows; a row of one long cell, such as a heading, takes the whole width."""

    def line(cells: Iterable[str]) -> str:
        columns = zip(cells, sheet.widths, sheet.aligns, strict=True)
        padded = (_pad(shorten(cell, width), width, align) for cell, width, align in columns)
        return (" " * sheet.gap).join(padded)

    lines = [*(_title(sheet).split("\n") if sheet.title else []), "=" * sheet.width]
    if any(sheet.headers):
        lines += [line(sheet.headers), "-" * sheet.width]
    for row in sheet.rows:
        if any(row[1:]):
            lines += map(line, _lines(row, sheet))
        else:
            lines.append(shorten(row[0], sheet.width).ljust(sheet.width))
    return lines


def _text_table(sheet: Sheet) -> SimpleTable:
    columns = list(zip(sheet.headers, sheet.widths, sheet.aligns, strict=True))
    heads = [_pad(shorten(head, width), width, align) for head, width, align in columns]
    return SimpleTable(
        [line for row in sheet.rows for line in _lines(row, sheet)],
        headers=heads if any(sheet.headers) else None,
        title=_title(sheet),
        txt_fmt={
            "data_fmts": [partial(shorten, width=width) for width in sheet.widths],
            "data_aligns": sheet.aligns,
            "colwidths": list(sheet.widths),
            "colsep": " " * sheet.gap,
            "table_dec_below": "=",
        },
    )


def _title(sheet: Sheet) -> str:
    """Return a centered title, in lines of the table's width."""
    return "\n".join(line.center(sheet.width) for line in textwrap.wrap(sheet.title, sheet.width))


def _lines(row: Sequence[str], sheet: Sheet) -> list[tuple[str, ...]]:
    if not sheet.wrap:
        return [tuple(row)]
    # Cells of one row wrap separately; the shorter ones are filled with blanks.
    cells = (textwrap.wrap(cell, width) for cell, width in zip(row, sheet.widths, strict=True))
    return list(zip_longest(*cells, fillvalue=""))


def _pad(text: str, width: int, align: str) -> str:
    return text.ljust(width) if align == "l" else text.rjust(width)


def _indented(cell: str) -> str:
    """Return the HTML of a cell with the spaces before its text, which indent a level below its column."""
    text = cell.lstrip(" ")
    return "&#160;" * (len(cell) - len(text)) + html.escape(text)


def _html(sheet: Sheet) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        inner = (
            f'<{tag} style="text-align: {ALIGN[align]}">{_indented(cell)}</{tag}>'
            for cell, align in zip(cells, sheet.aligns, strict=True)
        )
        return "<tr>" + "".join(inner) + "</tr>"

    caption = f"<caption>{html.escape(sheet.title)}</caption>" if sheet.title else ""
    body = "\n".join(line(row, "td") for row in sheet.rows)
    head = f"<thead>{line(sheet.headers, 'th')}</thead>" if any(sheet.headers) else ""
    return f'<table class="simpletable">{caption}{head}<tbody>\n{body}\n</tbody></table>'


def _markdown(sheet: Sheet) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    rule = line({"l": ":--", "r": "--:"}.get(align, ":-:") for align in sheet.aligns)
    title = [f"{sheet.title}\n"] if sheet.title else []
    return "\n".join([*title, line(sheet.headers), rule, *map(line, sheet.rows)])


def _latex(sheet: Sheet) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(latex(cell) for cell in cells) + r" \\"

    return "\n".join(
        [
            r"\begin{center}",
            *([rf"{latex(sheet.title)}\par\smallskip"] if sheet.title else []),
            rf"\begin{{tabular}}{{{sheet.aligns}}}",
            r"\toprule",
            *([line(sheet.headers), r"\midrule"] if any(sheet.headers) else []),
            *(line(row) for row in sheet.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{center}",
        ]
    )
