"""The printed summary of a fit: estimate, federation, and coefficients by site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

import numpy as np
import pandas as pd

from fedstat.inference.tables import Sheet, SheetSummary, number
from fedstat.typing import Floats

WIDTH = 98
NUMBERS = {"coef": 10, "std err": 10, "z": 9, "P>|z|": 6, "low": 10, "high": 10}
"""Text width of each number column of the coefficient table."""
PART = 9
"""Text width of a column with parts of the standard error."""
STATEMENTS = ("estimate", "std_error", "statistic", "p_value", "conf_low", "conf_high")
HEADER_WIDTHS = (17, 28, 17, 30)
INDENT = "\u00a0\u00a0"
"""Blanks that HTML keeps."""

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class CoefficientBlock:
    """Contribution of a site to the fit.

    `columns` of the design that it holds, `entities` of the fit that it has, and the share `missing` of the
    fit's entities that it does not have, in [0, 1].
    """

    site: str
    columns: int
    entities: int
    missing: float


@dataclass(frozen=True, slots=True)
class Note:
    """A note below a summary: its kind, by which code refers to it, and its text.

    The fields of the `text` are filled with the `values` when the note is printed.
    """

    kind: str
    text: str
    severity: Literal["info", "warning"] = "info"
    values: Mapping[str, str | int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text.format(**self.values) if self.values else self.text


def build_summary(
    *,
    title: str,
    left: Pairs,
    right: Pairs,
    coefficients: pd.DataFrame,
    inference: bool,
    alpha: float,
    blocks: Sequence[CoefficientBlock],
    kinds: Mapping[str, Sequence[str]] | None,
    notes: Sequence[str],
    alarm: str,
    student: bool = False,
    parts: Mapping[str, Floats] | None = None,
) -> SheetSummary:
    """Lay out a summary: estimate `left`, federation `right`, coefficients, sites, notes.

    `coefficients` are as `CoefficientResults.tidy`; without `inference` the columns after ``estimate`` are
    not printed, and `student` states that tests use Student's t. `kinds` are the kinds of values that each
    site released, None if no ledger was kept. Without `blocks` there is no table of sites. `alarm` is printed
    as first line and first note. `parts` of standard errors are columns next to these, by their headings.
    """
    sheets = [
        header_sheet(title, left, right),
        coefficient_sheet(coefficients, parts or {}, inference, alpha, "t" if student else "z"),
    ]
    if blocks:
        sheets.append(coefficient_block_sheet(blocks, kinds))
    return SheetSummary(sheets, (alarm, *notes) if alarm else notes, f"*** {alarm} ***" if alarm else "")


def header_sheet(title: str, left: Pairs, right: Pairs) -> Sheet:
    """Estimate on the left, federation on the right."""
    pairs = zip_longest(left, right, fillvalue=("", ""))
    rows = tuple((_label(a), b, _label(c), d) for (a, b), (c, d) in pairs)
    return Sheet(("Estimate", "", "Federation", ""), rows, "lrlr", HEADER_WIDTHS, title, gap=2, wrap=True)


def coefficient_sheet(
    coefficients: pd.DataFrame, parts: Mapping[str, Floats], inference: bool, alpha: float, z: str
) -> Sheet:
    """List coefficients below the name of their site."""
    given = coefficients["client"].tolist()
    # Stable: within a site the order of the design is kept, and those without a site come first.
    places = {site: place for place, site in enumerate(dict.fromkeys(["", *given]))}
    order = sorted(range(len(given)), key=lambda row: places[given[row]])
    table = np.column_stack([coefficients[list(STATEMENTS)].to_numpy(), *parts.values()])[order].tolist()
    low, high = f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]"
    labels = ("coef", "std err", *parts, z, f"P>|{z}|", low, high)
    count = len(labels) if inference else 1
    all_widths = tuple(NUMBERS.values())
    widths = (*all_widths[:2], *[PART] * len(parts), *all_widths[2:])[:count]
    rows: list[tuple[str, ...]] = []
    names = coefficients["name"].tolist()
    sites, names = [given[row] for row in order], [names[row] for row in order]
    stubs = zip(blank_repeats(sites), sites, names, table, strict=True)
    for heading, site, name, values in stubs:
        if heading:
            rows.append((heading, *[""] * count))
        rows.append(((INDENT if site else "") + str(name), *_numbers(values)[:count]))
    stub = WIDTH - sum(widths) - count
    return Sheet(("", *labels[:count]), tuple(rows), "l" + "r" * count, (stub, *widths))


def released_kinds(site: str, kinds: Mapping[str, Sequence[str]] | None) -> str:
    """Kinds of values that a site released, in words; `kinds` is None if no ledger was kept."""
    return "not recorded" if kinds is None else ", ".join(kinds.get(site, ())) or "nothing"


def coefficient_block_sheet(
    blocks: Sequence[CoefficientBlock], kinds: Mapping[str, Sequence[str]] | None
) -> Sheet:
    """One site per row: columns, entities, missing share, kinds of values that it released."""
    widths = (24, 8, 12, 10, WIDTH - 24 - 8 - 12 - 10 - 8)
    rows = tuple(
        (
            block.site,
            f"{block.columns:,}",
            f"{block.entities:,}",
            f"{100 * block.missing:.2f} %",
            released_kinds(block.site, kinds),
        )
        for block in blocks
    )
    headers = ("site", "columns", "entities", "missing", "releases")
    return Sheet(headers, rows, "lrrrl", widths, gap=2, wrap=True)


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
