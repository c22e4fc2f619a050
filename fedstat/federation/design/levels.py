"""Kinds and levels of columns that several sites hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedstat.errors import DesignError
from fedstat.federation.design.checks import check_counts
from fedstat.federation.tables.columns import Kind, LevelValue, at_column


@dataclass(frozen=True, slots=True)
class LevelCounts:
    """Levels of one column, rows of each, and the order that a categorical column declares, or None."""

    declared: tuple[LevelValue, ...] | None
    levels: tuple[LevelValue, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SiteColumns:
    """What one site tells: rows, rows that lack nothing, kinds of columns, and levels of coded ones."""

    n_rows: int
    n: int
    kinds: Mapping[str, Kind]
    levels: Mapping[str, LevelCounts]


def agree_kinds(sites: Mapping[str, SiteColumns]) -> dict[str, Kind]:
    """Kind of every column; a DesignError where it is one at one site and another at another."""
    agreed: dict[str, Kind] = {}
    first: dict[str, str] = {}
    for site, columns in sites.items():
        for name, kind in columns.kinds.items():
            if agreed.setdefault(name, kind) != kind:
                described = {"number": "numbers", "category": "categories"}
                raise DesignError(
                    f"column {name!r} holds {described[agreed[name]]} at site {first[name]!r} and "
                    f"{described[kind]} at site {site!r}. Convert it at one of them."
                )
            first.setdefault(name, site)
    return agreed


def agree_levels(
    sites: Mapping[str, SiteColumns], *, site_column: str, min_count: int
) -> dict[str, tuple[LevelValue, ...]]:
    """Levels of every coded column over all sites, in their order.

    Categorical columns that declare the same order everywhere keep it, without the levels that no row has;
    otherwise levels are sorted, as in one stacked table. A DesignError tells of levels that are numbers at
    one site and text at another, of one level only, and of levels with fewer than `min_count` rows in all.
    """
    names = dict.fromkeys(name for columns in sites.values() for name in columns.levels)
    return {name: tuple(sites) if name == site_column else _agree(name, sites, min_count) for name in names}


def _agree(name: str, sites: Mapping[str, SiteColumns], min_count: int) -> tuple[LevelValue, ...]:
    told = {site: columns.levels[name] for site, columns in sites.items()}
    counts: dict[LevelValue, int] = {}
    for row in told.values():
        for level, count in zip(row.levels, row.counts, strict=True):
            counts[level] = counts.get(level, 0) + count
    declared = [row.declared for row in told.values()]
    # The order of one site alone would make the reference level depend on who is asked first.
    if declared[0] is not None and all(order == declared[0] for order in declared):
        levels = [level for level in declared[0] if level in counts]
    else:
        levels = _sorted(name, counts, told)
    if len(levels) < 2:
        raise DesignError(f"column {name!r} has the same level at every site. Leave it out.")
    check_counts(
        at_column("", name), {level: counts[level] for level in levels}, min_count, "rows", " over all sites"
    )
    return tuple(levels)


def _sorted(name: str, counts: Mapping[LevelValue, int], told: Mapping[str, LevelCounts]) -> list[LevelValue]:
    text = {site: any(isinstance(level, str) for level in row.levels) for site, row in told.items()}
    if len(set(text.values())) > 1:
        a = next(site for site, flag in text.items() if flag)
        b = next(site for site, flag in text.items() if not flag)
        raise DesignError(
            f"column {name!r} has levels of text at site {a!r} and of numbers at site {b!r}. Convert it at "
            "one of them."
        )
    levels: list[Any] = sorted(counts)
    # A site whose column has a missing value holds 1.0 where others hold 1: one level, written one way.
    return [float(level) for level in levels] if any(isinstance(x, float) for x in levels) else levels
