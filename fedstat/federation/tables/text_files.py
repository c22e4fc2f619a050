"""Text files of records: how they are written, how that is recognized in their first lines, and their reader.

Hospitals export text in many forms: with semicolons, tabs, decimal commas, points between thousands, lines of
titles, and in other encodings. The owner describes the file under ``[data]`` in ``site.toml``. Nothing is
guessed while records are read: a file that does not fit its description is refused, and the refusal names
the entries that would read it. Only commands of the owner write these entries.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

BLANKS = " \t\u00a0\u2007\u202f"
"""Characters around names and values that are dropped; line breaks there are refused, as inside."""
NA_VALUES = ("", "NA", "NaN")
HEAD_CHARACTERS = 2**18
"""Characters at the beginning of a file by which its form is recognized."""
CHUNK_BYTES = 2**20
SEPARATORS: Mapping[str, str] = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
COLUMN_ENTRIES = ("separator", "skip_lines")
"""Entries without which the columns of a file are not found."""
PANDAS_OPTIONS = {"separator": "sep", "skip_lines": "skiprows", "encoding": "encoding"}
MARKS = {".": "points", ",": "commas", "'": "apostrophes", " ": "blanks"}
"""Marks in numbers, by their names."""
SPELLINGS = {" ": " \u00a0\u202f", "'": "'\u2019"}
"""Characters that count as the same mark between thousands."""
NUMBER_FORMS = (
    (".", ""), (",", ""), (",", "."), (".", ","), (",", " "), (".", " "), (".", "'"), (",", "'"),
)  # fmt: skip
"""Decimal mark and mark between thousands, the usual ones first."""
UNDEFINED_IN_CP1252 = {0x81, 0x8D, 0x8F, 0x90, 0x9D}
DATE = re.compile(r"(\d{1,4})([./-])(\d{1,2})\2(\d{1,4})(?:[ T]\d{1,2}:\d{2}(?::\d{2})?)?")
MARKED = re.compile(r"\d[.,' \u00a0\u202f\u2019]\d")
TIMES = ("", " %H:%M", " %H:%M:%S")
PARTS = {"yyyy": "%Y", "mm": "%m", "dd": "%d"}
FOREIGN = {
    separator: re.compile("|".join(r"(?<!\d),|,(?!\d)" if s == "," else re.escape(s)
                                   for s in SEPARATORS if s != separator))
    for separator in SEPARATORS
}  # fmt: skip
"""Other separators in a cell; a comma between digits may be a decimal comma."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How a text file is written; an empty entry means the usual form.

    `separator` is the one between columns: a tab for ``.tsv`` and ``.txt``, else a comma. `decimal` is the
    decimal mark (a point), and `thousands` the mark between thousands (none). `encoding` is UTF-8.
    `skip_lines` is the number of lines above the names of the columns (none). `date_format`, such as
    "dd.mm.yyyy", is the form of dates (ISO 8601).
    """

    na_values: Sequence[str] = NA_VALUES
    separator: str = ""
    decimal: str = ""
    thousands: str = ""
    encoding: str = ""
    skip_lines: int | None = None
    date_format: str = ""

    @property
    def given(self) -> list[str]:
        """Names of the entries that are not the usual ones."""
        return [part.name for part in fields(self) if getattr(self, part.name) != part.default]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the entries."""
        if len(self.separator) > 1 or self.separator.isalnum():
            yield r'separator is one character, such as ";" or "\t" for a tab.'
        if self.decimal not in ("", ".", ","):
            yield 'decimal is "." or ",".'
        if self.thousands not in ("", *MARKS) or self.thousands == (self.decimal or ".") != "":
            yield f"thousands is one of {', '.join(map(repr, MARKS))}, and not the decimal mark."
        if self.encoding and not _is_encoding(self.encoding):
            yield 'encoding is unknown; expected for instance "latin-1", "cp1252" or "utf-16".'
        if self.skip_lines is not None and self.skip_lines < 0:
            yield "skip_lines is the number of lines above the names of the columns."
        if self.date_format and sorted(re.split("[^a-z]", self.date_format)) != sorted(PARTS):
            yield 'date_format is for instance "dd.mm.yyyy", "mm/dd/yyyy" or "yyyy/mm/dd".'

    def settings(self, file: Path) -> dict[str, Any]:
        """Return what pandas needs to know to read the file."""
        return {
            "sep": self.separator or usual_separator(file),
            "decimal": self.decimal or ".",
            # pandas' own list of missing cells also holds "None" and "null", which are levels in many surveys
            "na_values": list(self.na_values),
            "keep_default_na": False,
            # a number that was written in full is read to the last bit, as from other sources
            "float_precision": "round_trip",
            # complete columns determine their types
            "low_memory": False,
        }


def usual_separator(file: Path) -> str:
    """Return the separator that the ending of a name suggests."""
    return "\t" if file.name.lower().endswith((".tsv", ".tsv.gz", ".txt", ".txt.gz")) else ","


def _is_encoding(name: str) -> bool:
    try:
        return codecs.lookup(name)._is_text_encoding
    except LookupError:
        return False


def _open_bytes(file: Path) -> IO[bytes]:
    return gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb")  # type: ignore[return-value]


@contextmanager
def _open_text(file: Path, form: TextFormat, errors: str = "strict") -> Iterator[IO[str]]:
    """Open a file after the lines that are skipped, without a mark of the byte order."""
    encoding = form.encoding if form.encoding.lower() not in ("", "utf-8", "utf8") else "utf-8-sig"
    with _open_bytes(file) as stream, io.TextIOWrapper(stream, encoding, errors, newline="") as text:
        for _ in range(form.skip_lines or 0):
            text.readline()
        yield text


# ----------------------------------------------------------------------------------------------------
# The reader.


class UnreadableTextError(ValueError):
    """A text file that does not fit its description; `found` has the entries that are lacking.

    The message describes the problem, and quotes no cell.
    """

    def __init__(self, problem: str, found: Proposal | None = None) -> None:
        super().__init__(problem)
        self.found = Proposal() if found is None else found


def read_text(file: Path, form: TextFormat, dtype: Any) -> pd.DataFrame:
    """Read a text file; ValueError or OSError if that is not possible.

    Blanks around names and texts are no part of them. A column without a name and without a value, which a
    separator at the end of each line makes, is left out.
    """
    try:
        _require(propose_columns(file, form))
        names = column_names(file, form)
        with _open_text(file, form) as text:
            settings = form.settings(file)
            frame: pd.DataFrame = pd.read_csv(
                text, header=0, names=names, index_col=False, dtype=dtype, **settings
            )
    except UnicodeError:
        _require(propose_format(file, form).only(("encoding", *COLUMN_ENTRIES)))
        raise
    except pd.errors.ParserError as error:
        raise UnreadableTextError(_long_line(file, form, len(names))) from error
    nameless = [name for i, name in enumerate(names) if name == _nameless(i) and frame[name].isna().all()]
    declared = dtype if isinstance(dtype, Mapping) else dict.fromkeys(names if dtype is not None else ())
    kept = [name for name in names if name not in nameless]
    tidy = {name: _tidy(frame.pop(name), form, name in declared) for name in kept}
    return pd.DataFrame(tidy, copy=False)


def _require(found: Proposal) -> None:
    if found.entries:
        raise UnreadableTextError(f"it has {' and '.join(found.words.values())}", found)


def column_names(file: Path, form: TextFormat) -> list[str]:
    """Return the names of the columns; UnreadableTextError if two are the same, or some are absent."""
    with _open_rows(file, form) as rows:
        names, first = next(rows, (0, []))[1], next(rows, (0, []))[1]
    if not names:
        raise UnreadableTextError("it has no line with the names of columns")
    if any(cell.strip(BLANKS) for cell in first[len(names) :]):
        raise UnreadableTextError(f"there are {len(names)} names of columns, and {len(first)} cells in a row")
    names += [""] * (len(first) - len(names))
    names = [name.strip(BLANKS) or _nameless(i) for i, name in enumerate(names)]
    for name, count in Counter(names).items():
        if count > 1:
            raise UnreadableTextError(f"{count} columns are called {name!r}; rename all but one")
    return names


def _long_line(file: Path, form: TextFormat, width: int) -> str:
    """Return which line has more cells than there are columns."""
    with _open_rows(file, form) as rows:
        for line, row in rows:
            if len(row) > width:
                return f"line {line:,} has {len(row)} cells, and there are {width} columns"
    return "quotation marks are not closed"


@contextmanager
def _open_rows(file: Path, form: TextFormat) -> Iterator[Iterator[tuple[int, list[str]]]]:
    """Open a file as its rows that have cells, each with the number of its last line."""
    with _open_text(file, form) as text:
        reader, skipped = csv.reader(text, delimiter=form.settings(file)["sep"]), form.skip_lines or 0
        try:
            yield ((skipped + reader.line_num, row) for row in reader if len(row) > 1 or "".join(row).strip())
        except csv.Error as error:
            raise UnreadableTextError("quotation marks are not closed") from error


def _nameless(place: int) -> str:
    return f"Unnamed: {place}"


def _tidy(column: pd.Series[Any], form: TextFormat, is_text: bool) -> pd.Series[Any]:
    """Remove blanks around texts, and read numbers with marks between thousands, and dates."""
    if pd.api.types.is_numeric_dtype(column):  # true/false included
        return column
    is_plain = not form.thousands and not form.date_format
    # without a copy of a long column of texts, as most columns are
    if is_plain and not any(isinstance(cell, str) and cell != cell.strip(BLANKS) for cell in column):
        return column
    codes, found = pd.factorize(column)
    if not all(isinstance(one, str) for one in found):
        return column
    texts = [one.strip(BLANKS) for one in found]
    present = pd.Series({i: text for i, text in enumerate(texts) if text not in form.na_values}, dtype=object)
    made = None
    if not is_text and not present.empty:
        if form.thousands or len(present) < len(texts):
            made = parse_numbers(present, form.decimal or ".", form.thousands)
        if made is None and form.date_format:
            made = parse_dates(present, form.date_format)
    if made is None:
        if texts == list(found) and len(present) == len(texts):
            return column
        made = present.astype(column.dtype)
    return made.reindex(codes).set_axis(column.index)


def parse_numbers(texts: pd.Series[Any], decimal: str, thousands: str) -> pd.Series[Any] | None:
    """Read texts as numbers in this form; None if one of them is no such number."""
    if not all(map(_number_pattern(decimal, thousands).fullmatch, texts)):
        return None
    marks: dict[int, str | None] = {ord(mark): None for mark in _spellings(thousands)} | {ord(decimal): "."}
    plain = texts.str.translate(marks)
    numbers = plain.map(float)
    is_whole = plain.str.lstrip("+-").str.isdecimal().all() and numbers.abs().max() < 2**53
    return numbers.astype(np.int64) if is_whole else numbers


def _spellings(thousands: str) -> str:
    return SPELLINGS.get(thousands, thousands)


def _number_pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    groups = rf"[1-9]\d{{0,2}}(?:[{re.escape(_spellings(thousands))}]\d{{3}})+|" if thousands else ""
    mark = re.escape(decimal)
    return re.compile(rf"[+-]?(?:(?:{groups}\d+)(?:{mark}\d*)?|{mark}\d+)(?:[eE][+-]?\d+)?")


def parse_dates(texts: pd.Series[Any], date_format: str) -> pd.Series[Any] | None:
    """Read texts as dates in this form, also before a time of day; None if one of them is no such date."""
    if not DATE.fullmatch(texts.iloc[0]):
        return None
    for part, code in PARTS.items():
        date_format = date_format.replace(part, code)
    for time in TIMES:
        dates = pd.to_datetime(texts, format=date_format + time, errors="coerce")
        if dates.notna().all():
            return dates
    return None


# ----------------------------------------------------------------------------------------------------
# What the first lines of a file suggest.


@dataclass(frozen=True, slots=True)
class Proposal:
    """Entries that the description of a file lacks, and remarks on what its owner has to decide.

    `words` describes each of the `entries`.
    """

    entries: dict[str, str | int] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(self, entry: str, value: str | int, words: str) -> None:
        """Propose an entry."""
        self.entries[entry], self.words[entry] = value, words

    @property
    def text(self) -> str:
        """The entries in one line of TOML."""
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.entries.items())

    def only(self, names: Sequence[str]) -> Proposal:
        """Return the proposal of some entries."""
        entries = {name: value for name, value in self.entries.items() if name in names}
        return Proposal(entries, {name: self.words[name] for name in entries})


def propose_format(file: Path, form: TextFormat) -> Proposal:
    """Compare the first lines of a file with its description; OSError if it cannot be read.

    Only entries that the description lacks are proposed. The encoding is that of the complete file.
    """
    found = propose_encoding(file) if not form.encoding else Proposal()
    encoding = str(found.entries.get("encoding", form.encoding))
    _propose_from_head(file, replace(form, encoding=encoding), found)
    return found


def propose_encoding(file: Path) -> Proposal:
    """Return the encoding of a file that is not in UTF-8."""
    found, encoding = Proposal(), find_encoding(file)
    if encoding is None:
        found.remarks.append('its encoding is not recognized; name it, for instance  encoding = "cp850"')
    elif encoding != "utf-8":
        found.add("encoding", encoding, f"the encoding {encoding}")
    return found


def propose_columns(file: Path, form: TextFormat) -> Proposal:
    """Return the entries without which the columns of a file are not found, by its first lines.

    UnicodeError if these are not in the encoding of the description.
    """
    found = Proposal()
    _propose_from_head(file, form, found, errors="strict")
    return found.only(COLUMN_ENTRIES)


def find_encoding(file: Path) -> str | None:
    """Return the encoding of a file; None if it is not recognized."""
    with _open_bytes(file) as stream:
        start = stream.read(4096)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        if start.count(0) > len(start) // 4:
            return "utf-16-le" if start[1::2].count(0) > start[::2].count(0) else "utf-16-be"
        stream.seek(0)
        try:
            for _ in codecs.iterdecode(iter(lambda: stream.read(CHUNK_BYTES), b""), "utf-8"):
                pass
            return "utf-8"
        except UnicodeDecodeError:
            stream.seek(0)
        used = np.zeros(256, dtype=np.int64)
        for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""):
            used += np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=256)
    special = set(np.flatnonzero(used[0x80:0xA0]) + 0x80)
    if special & UNDEFINED_IN_CP1252:
        return None
    return "cp1252" if special else "latin-1"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows of the first lines under one separator: the names of the columns, and the records."""

    separator: str
    score: float
    skipped: int
    names: Sequence[str]
    records: Sequence[Sequence[str]]


def _layout(text: str, separator: str) -> _Layout | None:
    """Divide the first lines into cells; None if there are no columns or no records."""
    lines = io.StringIO(text, newline="").readlines()
    rows: list[tuple[int, list[str]]] = []
    reader, start = csv.reader(lines, delimiter=separator), 0
    try:
        for row in reader:
            rows.append((start, [cell.strip(BLANKS) for cell in row]))
            start = reader.line_num
    except csv.Error:
        return None
    # spreadsheets fill lines of titles, and lines without content, up to the width of the table
    rows = [(line, cells) for line, cells in rows if any(cells)]
    if len(rows) < 2:
        return None
    widths = Counter(len(cells) for _, cells in rows)
    width = max(widths, key=lambda w: (widths[w], w))
    named = [sum(map(bool, cells)) >= max(2, width / 2) for _, cells in rows]
    if width < 2 or True not in named:
        return None
    first = named.index(True)
    names = rows[first][1]
    if first and any(map(_number_pattern(".", ",").fullmatch, names)):
        first, names = 0, rows[0][1]  # a record: the line above it may be names that are too few
    records = [cells for _, cells in rows[first + 1 :]]
    cells = [cell for row in records for cell in row]
    foreign = sum(bool(FOREIGN[separator].search(cell)) for cell in cells) / max(len(cells), 1)
    share = sum(len(row) == width for row in records) / max(len(records), 1)
    return _Layout(separator, round(share - foreign, 2), rows[first][0], names, records)


def _propose_from_head(file: Path, form: TextFormat, found: Proposal, errors: str = "replace") -> None:
    with _open_text(file, form, errors) as stream:
        text = stream.read(HEAD_CHARACTERS)
    if len(text) == HEAD_CHARACTERS:
        text = text[: text.rfind("\n") + 1]
    usual = usual_separator(file)
    # what the owner wrote is only doubted where it gives a single name
    layouts = [one for mark in form.separator if (one := _layout(text, mark)) and len(one.names) > 1]
    if not layouts:
        choices = sorted(SEPARATORS, key=lambda one: one != usual)
        layouts = [one for mark in choices if (one := _layout(text, mark)) is not None]
    if not layouts:
        return
    best = max(layouts, key=lambda one: (one.score, -one.skipped, len(one.names)))
    if best.score <= 0.5:
        return
    if best.separator != (form.separator or usual):
        words = f"{SEPARATORS.get(best.separator, repr(best.separator))} between columns"
        found.add("separator", best.separator, words)
    if best.skipped and form.skip_lines is None:
        words = "1 line" if best.skipped == 1 else f"{best.skipped} lines"
        found.add("skip_lines", best.skipped, f"{words} above the names of the columns")
    columns = {
        name: [cell for cell in cells if cell not in form.na_values]
        for name, cells in zip(best.names, zip_longest(*best.records, fillvalue=""), strict=False)
    }
    texts = {
        name: pd.Series(cells, dtype=object).drop_duplicates() for name, cells in columns.items() if cells
    }
    _propose_numbers(texts, form, found)
    if not form.date_format:
        _propose_dates(texts, found)


def _propose_numbers(columns: Mapping[str, pd.Series[Any]], form: TextFormat, found: Proposal) -> None:
    """Propose the marks of numbers under which most columns are numbers."""
    marked = {name: texts for name, texts in columns.items() if texts.str.contains(MARKED).any()}
    read = {
        (decimal, thousands): {
            name: numbers
            for name, texts in marked.items()
            if (numbers := parse_numbers(texts, decimal, thousands)) is not None
        }
        for decimal, thousands in NUMBER_FORMS
        if form.decimal in ("", decimal) and form.thousands in ("", thousands)
    }
    most = max(map(len, read.values()), default=0)
    if not most:
        return
    best, *others = (one for one, columns in read.items() if len(columns) == most)
    # "1,234" is a number in two forms, which differ by a factor of 1,000
    doubtful = [
        name
        for name, numbers in read[best].items()
        if not all(name in read[one] and numbers.equals(read[one][name]) for one in others)
    ]
    if doubtful:
        mark = best[0]
        found.remarks.append(
            f"three digits follow every {MARKS[mark][:-1]} in {', '.join(map(repr, doubtful))}: write "
            f'decimal = "{mark}" if they are decimals, or thousands = "{mark}" if they are thousands'
        )
        return
    decimal, thousands = best
    if decimal != (form.decimal or "."):
        found.add("decimal", decimal, f"decimal {MARKS[decimal]}")
    if thousands != form.thousands:
        found.add("thousands", thousands, f"{MARKS[thousands]} between thousands")


def _propose_dates(columns: Mapping[str, pd.Series[Any]], found: Proposal) -> None:
    """Propose the form of dates that are not in ISO 8601."""
    formats: dict[str, str] = {}
    for name, texts in columns.items():
        parts = [DATE.fullmatch(text) for text in texts]
        mark = parts[0][2] if parts[0] else ""
        if not all(parts) or parse_dates(texts, "yyyy-mm-dd") is not None:
            continue
        orders = ["yyyy mm dd", "dd mm yyyy", "mm dd yyyy"][: 2 if mark == "." else 3]
        possible = [o for order in orders if parse_dates(texts, o := order.replace(" ", mark)) is not None]
        if len(possible) == 1:
            formats[name] = possible[0]
        elif possible:
            either = " or ".join(f'date_format = "{one}"' for one in possible)
            found.remarks.append(f"the dates in {name!r} have no day above 12: write {either}")
        else:
            found.remarks.append(f"the dates in {name!r} are not recognized; export years with four digits")
    for one, _ in Counter(formats.values()).most_common(1):
        found.add("date_format", one, f"dates as {one}")
        if others := [name for name, other in formats.items() if other != one]:
            found.remarks.append(f"the dates in {', '.join(map(repr, others))} are written in another form")
