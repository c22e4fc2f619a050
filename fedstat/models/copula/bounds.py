"""Public bounds and levels of the columns to be synthesized."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, PartitionError, Remedy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.tables.columns import LevelValue
from fedstat.federation.tables.published import Published, PublishedColumn, Scale, as_published

IntoBound: TypeAlias = PublishedColumn | tuple[float, float] | tuple[date, date] | Sequence[LevelValue]
MOST_LEVELS = 500
"""Largest number of levels of a column; a column with more is a range."""
MOST_CODES = 64
"""Largest number of successive whole numbers that are levels; more are a range, whose noise adds up less."""
MOST_WHOLE = 2**30
SHOWN = 40
"""Number of columns in the template that an error shows."""


class Bounds(Mapping[str, PublishedColumn]):
    """Public description of every column: a range of numbers, or all possible levels.

    Parameters
    ----------
    columns : mapping of str to range or levels
        ``(low, high)`` is a range, also of two dates; :func:`asinh` and :func:`log` are ranges on another
        scale. ``range(18, 91)`` has whole numbers. A list has levels, up to 500: numbers are in order, texts
        are not; :func:`levels` says otherwise. Numbers outside a range count at its end, and zero is a value
        of its own; a level that is not listed is an error.

    Raises
    ------
    ModelError
        A range does not ascend, a level occurs twice, or there are more than 500; the error names the column.

    Examples
    --------
    >>> import fedstat as fs
    >>> bounds = fs.Bounds({"limit": (0, 1000), "status": range(-2, 9), "sex": ["male", "female"]})
    >>> bounds["limit"].range, len(bounds["status"].levels), list(bounds.of(["sex"]))
    ((0.0, 1000.0), 11, ['sex'])
    >>> from datetime import date
    >>> more = {"age": range(18, 91), "day": (date(2020, 1, 1), date(2020, 12, 31)), "town": list("abc")}
    >>> [(one.form, one.nominal) for one in fs.Bounds(more).values()]
    [('whole', False), ('date', False), ('real', True)]
    """

    def __init__(self, columns: Mapping[str, IntoBound]) -> None:
        self._columns = {name: _read(name, bound) for name, bound in columns.items()}

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a file in the form of a site's ``columns.toml``.

        Parameters
        ----------
        path : path
            Sections by column: ``kind = "number"`` with ``range = [low, high]`` or ``levels = [...]``, and
            optionally ``scale = "log"`` or ``"asinh"``; ``kind = "category"`` with ``levels``.

        Raises
        ------
        PartitionError
            The file cannot be read, or has invalid entries.
        ModelError
            See the class.

        Examples
        --------
        >>> import pathlib
        >>> import fedstat as fs
        >>> text = 'income = {kind = "number", range = [0.0, 1000.0]}'
        >>> size = pathlib.Path("columns.toml").write_text(text)
        >>> fs.Bounds.from_toml("columns.toml")["income"].range
        (0.0, 1000.0)
        """
        return cls(dict(as_published(path, "bounds")))

    @classmethod
    def from_sites(cls, partition: ClientPartition) -> Self:
        """Use the owners' published descriptions of their columns.

        Parameters
        ----------
        partition : ClientPartition

        Raises
        ------
        ModelError
            See the class.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(200, p=[1, 1], missing=[0.1, 0.1], seed=1)
        >>> published = {"A": {"A1": {"kind": "number", "range": [-5.0, 5.0]}}}
        >>> partition = fs.ClientPartition.from_frames(data.frames, on="id", published=published)
        >>> fs.Bounds.from_sites(partition)["A1"].range
        (-5.0, 5.0)
        """
        published = (item for site in partition.sites.values() for item in site.published.items())
        # A curve has no bounds: private boosting takes its public description as an argument.
        return cls({name: one for name, one in published if one.kind != "curve"})

    def __getitem__(self, name: str) -> PublishedColumn:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Bounds({len(self)} columns)"

    def of(self, names: Sequence[str]) -> Published:
        """Return the bounds of some columns.

        Parameters
        ----------
        names : sequence of str

        Returns
        -------
        mapping of str to PublishedColumn

        Raises
        ------
        ModelError
            Some columns have none; the error lists them, with a template to fill in.
        """
        absent = [name for name in names if name not in self._columns or not _bounded(self._columns[name])]
        if absent:
            ranges = "".join(f"    {json.dumps(name)}: (low, high),\n" for name in absent[:SHOWN])
            more = f"    # and {len(absent) - SHOWN} more\n" if len(absent) > SHOWN else ""
            raise ModelError(
                f"bounds: {len(absent)} of {len(names)} columns have none, and none are taken from the data",
                remedy=Remedy(
                    "Bounds({{\n{ranges}}})",
                    "Write the public range (low, high) or list of levels of each:\nfs.{call}",
                ).filled(ranges=ranges + more),
            )
        return {name: self._columns[name] for name in names}


def bounds_of(bounds: Bounds | Mapping[str, IntoBound] | None, sites: Any, names: Sequence[str]) -> Published:
    """Return the bounds of some columns: those of the user, or else those that the owners of `sites` publish.

    A ModelError lists columns that have none.
    """
    given = bounds if isinstance(bounds, Bounds) else Bounds(bounds or {})
    known = {**published_together(sites), **given}
    return Bounds({name: known[name] for name in names if name in known}).of(names)


def published_together(sites: Any) -> dict[str, PublishedColumn]:
    """Join what owners publish of the same columns: ranges that contain all, and all levels."""
    out: dict[str, PublishedColumn] = {}
    for name, column in (item for site in sites for item in site.published.items()):
        if column.kind in ("curve", "group"):
            continue
        known = out.get(name, column)
        levels = (*known.levels, *(one for one in column.levels if one not in known.levels))
        a, b = known.range, column.range
        both = (min(a[0], b[0]), max(a[1], b[1])) if a and b else None
        out[name] = replace(known, levels=levels if known.levels and column.levels else (), range=both)
    return out


def asinh(low: float, high: float, scale: float = 1.0) -> PublishedColumn:
    """Bound a number with bins equally wide in asinh(x / scale), for amounts of either sign.

    Parameters
    ----------
    low, high : float
        Range of the number itself.
    scale : float
        The scale is about linear up to this value on either side of zero, and logarithmic beyond.

    Returns
    -------
    PublishedColumn
        For :class:`Bounds`.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.asinh(-200, 5000, scale=5).scale
    'asinh'
    """
    return _range("asinh", low, high, scale)


def log(low: float, high: float) -> PublishedColumn:
    """Bound a positive number with bins equally wide in its logarithm.

    Parameters
    ----------
    low, high : float
        Range of the number itself, above zero.

    Returns
    -------
    PublishedColumn
        For :class:`Bounds`.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.log(1, 1000).scale
    'log'
    """
    return _range("log", low, high)


def levels(values: Sequence[LevelValue], *, ordered: bool) -> PublishedColumn:
    """List the levels of a column, and say whether they have an order.

    The order of levels is that of the list. In a synthetic table, ordered levels are intervals of one latent
    normal variable: their association with other columns is monotone. Levels without an order have one effect
    each. In a list alone, numbers are ordered, and texts are not.

    Parameters
    ----------
    values : sequence of str, int, float or bool
        Two to 500 levels.
    ordered : bool

    Returns
    -------
    PublishedColumn
        For :class:`Bounds`.

    Raises
    ------
    ModelError
        A level occurs twice, or the values are not a list of levels.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.levels(["low", "middle", "high"], ordered=True).nominal
    False
    >>> fs.levels([11, 12, 13], ordered=False).nominal
    True
    """
    found = _of_levels(values)
    return replace(found, ordered=bool(ordered))


def _range(scale: Scale, low: float, high: float, around: float = 1.0) -> PublishedColumn:
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ModelError(f"expected an ascending range (low, high), received ({low!r}, {high!r})")
    column = PublishedColumn("number", (float(low), float(high)), scale=scale, around=float(around))
    try:
        column.check()
    except PartitionError as error:
        raise ModelError(str(error)) from error
    return column


def _bounded(column: PublishedColumn) -> bool:
    return column.range is not None or bool(column.levels)


def _read(name: str, bound: Any) -> PublishedColumn:
    """Read one bound in the user's notation."""
    try:
        column = bound if isinstance(bound, PublishedColumn) else _of_values(bound)
        column.check()
    except (PartitionError, ModelError) as error:
        raise ModelError(f"bounds of column '{name}': {error}") from error
    if len(column.levels) > MOST_LEVELS:
        if column.range is None:
            raise ModelError(
                f"bounds of column '{name}': {len(column.levels)} levels; at most {MOST_LEVELS} are "
                "possible. Merge some, or give a range (low, high)"
            )
    elif len(column.levels) == 1:
        raise ModelError(f"bounds of column '{name}': a column with one level is constant; leave it out")
    return column


def _of_values(bound: Any) -> PublishedColumn:
    if isinstance(bound, tuple) and len(bound) == 2 and all(_is_number(one) for one in bound):
        return _range("linear", *bound)
    if isinstance(bound, tuple) and len(bound) == 2 and all(isinstance(one, _DATES) for one in bound):
        return replace(_range("linear", *map(_day, bound)), form="date")
    if isinstance(bound, range) and len(bound) > MOST_CODES and abs(bound.step) == 1:
        whole = _range("linear", min(bound), max(bound))
        if len(bound) > MOST_WHOLE:
            raise ModelError("a range of that many whole numbers; use (low, high)")
        return replace(whole, form="whole")
    return _of_levels(bound)


def _of_levels(values: Any) -> PublishedColumn:
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise ModelError(
            "expected a range (low, high) of numbers or dates, range(first, last + 1), a list of levels, "
            "asinh(low, high), log(low, high) or levels([...], ordered=)"
        )
    found = tuple(one.item() if isinstance(one, np.generic) else one for one in values)
    if not found or not all(isinstance(one, str | bool | int | float) for one in found):
        raise ModelError(
            "expected levels as a list of texts, numbers or truth values. The range of dates is a pair of "
            "them, (first, last)"
        )
    coded = all(_is_number(one) for one in found)
    if coded and all(float(one).is_integer() for one in found):
        # 1.0 and 1 are one level, so that the same request in other words is the same, and free.
        found = tuple(int(one) for one in found)
    column = PublishedColumn("number" if coded else "category", levels=found)
    try:
        column.check()
    except PartitionError as error:
        raise ModelError(str(error)) from error
    return column


_DATES = (date, pd.Timestamp, np.datetime64)


def _day(value: Any) -> float:
    """Return a date as days since 1970-01-01."""
    return float(np.datetime64(pd.Timestamp(value).date(), "D").astype(np.int64))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
