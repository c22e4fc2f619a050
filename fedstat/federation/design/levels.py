"""Agreement on kinds and levels of columns that several sites hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstat.errors import DesignError, Remedy
from fedstat.federation.design.checks import check_counts
from fedstat.federation.design.formula.syntax_tree import Category
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.tables.columns import ColumnKind, LevelValue, at_column, list_levels
from fedstat.federation.tables.published import Published


@dataclass(frozen=True, slots=True)
class LevelCounts:
    """Levels of one column, rows of each, and the order that a categorical column declares, or None."""

    declared: tuple[LevelValue, ...] | None
    levels: tuple[LevelValue, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SiteColumns:
    """The reply of one site: rows, rows that are used, kinds of columns, and levels of coded ones.

    `left_out`: complete rows are not used, so that they do not differ by few from those of earlier analyses.
    """

    n_rows: int
    n: int
    kinds: Mapping[str, ColumnKind]
    levels: Mapping[str, LevelCounts]
    left_out: bool = False


def declared_levels(terms: Iterable[Term], published: Published) -> dict[str, tuple[LevelValue, ...]]:
    """Return the allowed levels of columns in order: by the formula or the public description.

    Raises a DesignError for a column with two lists in the formula.
    """
    declared = {name: column.levels for name, column in published.items() if column.levels}
    written: dict[str, tuple[LevelValue, ...]] = {}
    for tree in (factor.tree for term in terms for factor in term):
        if not isinstance(tree, Category) or not tree.levels:
            continue
        if written.setdefault(tree.column, tree.levels) != tree.levels:
            raise DesignError(f"column {tree.column!r}: the formula declares its levels in two ways")
    return declared | written


def check_declared(
    site: str, name: str, found: Iterable[LevelValue], declared: Sequence[LevelValue]
) -> tuple[LevelValue, ...]:
    """Give declared levels as the column writes them; a DesignError, which quotes none, of others in it."""
    there = list(found)
    if not set(there) <= set(declared):
        raise DesignError(
            f"{at_column(site, name)} has rows with a level that neither the formula nor the public "
            "description of its columns declares. Correct these rows at their source, or declare the level"
        )
    return as_written(declared, there)


def as_written(levels: Iterable[Any], found: Iterable[LevelValue]) -> tuple[LevelValue, ...]:
    """Write levels as floats where some that were found are: 1.0 and 1 are one level."""
    floats = any(isinstance(level, float) for level in found)
    return tuple(float(level) if floats else level for level in levels)


def spelled_alike(levels: Sequence[LevelValue]) -> list[tuple[str, ...]]:
    """List levels of text that differ by blanks or case alone, each time together."""
    written: dict[str, list[str]] = {}
    for level in levels:
        if isinstance(level, str):
            written.setdefault("".join(level.split()).casefold(), []).append(level)
    return [tuple(alike) for alike in written.values() if len(alike) > 1]


def spelling_doubts(sites: Mapping[str, SiteColumns], site_column: str) -> Iterator[str]:
    """One sentence per coded column whose levels may be written in two ways, with those of one site alone.

    Levels that differ by blanks or case alone, and sites that share no level with sites that share some.
    """
    for name in dict.fromkeys(name for columns in sites.values() for name in columns.levels):
        held = {site: set(columns.levels[name].levels) for site, columns in sites.items()}
        alike = spelled_alike(sorted(set().union(*held.values()), key=str))
        others = {site: set().union(*(held[s] for s in sites if s != site)) for site in sites}
        strangers = {site for site in sites if held[site] and not held[site] & others[site]}
        meet = any(held[site] & others[site] for site in sites)
        if name == site_column or not (alike or (strangers and meet)):
            continue
        doubted = {level for levels in alike for level in levels}
        lone = {
            site: sorted(own if site in strangers else own & doubted, key=str)
            for site, own in ((site, held[site] - others[site]) for site in sites)
        }
        found = "; ".join(f"{list_levels(own)} at {site!r}" for site, own in lone.items() if own)
        reported = f" Found at one site only: {found}." if found and len(sites) > 1 else ""
        shown = "; ".join(", ".join(map(repr, levels)) for levels in alike)
        what = (
            f"has the levels {shown}, which differ by blanks or case alone"
            if alike
            else f"has no level at {', '.join(map(repr, sorted(strangers)))} that is at another site"
        )
        yield (
            f"column {name!r} {what}.{reported} If one is written in two ways, correct it at its source; "
            f"declared levels, as in C({name}, levels=[...]) or in columns.toml, let no other in"
        )


def check_units(published: Mapping[str, Published], names: Iterable[str]) -> None:
    """Require columns in the same published unit at all sites that publish one; else a DesignError."""
    for name in names:
        reported = {site: columns[name].unit for site, columns in published.items() if name in columns}
        units = {site: unit for site, unit in reported.items() if unit}
        first = next(iter(units), "")
        for site, unit in units.items():
            if unit != units[first]:
                raise DesignError(
                    f"column {name!r} is published in {units[first]!r} at site {first!r} and in {unit!r} at "
                    f"site {site!r}. Convert it at one of them."
                )


def agree_kinds(sites: Mapping[str, SiteColumns]) -> dict[str, ColumnKind]:
    """Kind of every column; a DesignError where it is one at one site and another at another."""
    agreed: dict[str, ColumnKind] = {}
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


LEVEL_SETTING = " The limit is min_count of the partition (in federation.toml, or from_frame(min_count=))."


def agree_levels(
    sites: Mapping[str, SiteColumns], *, site_column: str, min_count: int, remedy: str = ""
) -> dict[str, tuple[LevelValue, ...]]:
    """Return the levels of every coded column over all sites, in order.

    Columns that declare the same levels everywhere keep their order, without the levels that no row has;
    otherwise levels are sorted, as in one stacked table. Raises a DesignError for levels that are numbers at
    one site and text at another, for one level only, and for levels with fewer than `min_count` rows in
    total, whose text ends with a further `remedy`.
    """
    names = dict.fromkeys(name for columns in sites.values() for name in columns.levels)
    return {
        name: tuple(sites) if name == site_column else _agree(name, sites, min_count, LEVEL_SETTING + remedy)
        for name in names
    }


MOST_CATEGORIES = 30


def agreed_categories(
    sites: Mapping[str, SiteColumns],
    name: str,
    levels: tuple[LevelValue, ...],
    *,
    listed: Sequence[LevelValue],
    ordered: bool,
) -> tuple[LevelValue, ...]:
    """Check the categories of a response: those listed, few enough, and in an order where they need one."""
    if empty := [level for level in listed if level not in levels]:
        raise DesignError(
            f"no complete row of any site has {list_levels(empty)} of response {name!r}. Leave it out of the "
            "levels."
        )
    if len(levels) > MOST_CATEGORIES:
        raise DesignError(
            f"response {name!r} has {len(levels):,} categories, and a model can have {MOST_CATEGORIES}: it "
            "looks like a measurement. Use a model of numbers, or group it first."
        )
    declared = [columns.levels[name].declared for columns in sites.values()]
    agreed = declared[0] is not None and all(order == declared[0] for order in declared)
    if ordered and not agreed and any(isinstance(level, str) for level in levels):
        raise DesignError(
            f"response {name!r} holds text, whose order is not known",
            remedy=Remedy(
                "from_formula(..., levels={levels}).fit(...)",
                "Give the levels from the lowest to the highest, as in {arguments}, or let all sites declare "
                "the same order",
            ).filled(levels=list(levels)),
        )
    return levels


def _agree(
    name: str, sites: Mapping[str, SiteColumns], min_count: int, remedy: str
) -> tuple[LevelValue, ...]:
    reported = {site: columns.levels[name] for site, columns in sites.items()}
    counts: dict[LevelValue, int] = {}
    for row in reported.values():
        for level, count in zip(row.levels, row.counts, strict=True):
            counts[level] = counts.get(level, 0) + count
    declared = [row.declared for row in reported.values()]
    # The order of one site alone would make the reference level depend on who is asked first.
    if declared[0] is not None and all(order == declared[0] for order in declared):
        levels = list(as_written((level for level in declared[0] if level in counts), counts))
    else:
        levels = _sorted(name, counts, reported)
    if len(levels) < 2:
        raise DesignError(
            f"column {name!r} has the same level at every site. Leave it out; a response or a treatment "
            "needs two levels."
        )
    counted = {level: counts[level] for level in levels}
    check_counts(at_column("", name), counted, min_count, "rows", " over all sites", remedy)
    return tuple(levels)


def _sorted(
    name: str, counts: Mapping[LevelValue, int], reported: Mapping[str, LevelCounts]
) -> list[LevelValue]:
    text = {site: any(isinstance(level, str) for level in row.levels) for site, row in reported.items()}
    if len(set(text.values())) > 1:
        a = next(site for site, flag in text.items() if flag)
        b = next(site for site, flag in text.items() if not flag)
        raise DesignError(
            f"column {name!r} has levels of text at site {a!r} and of numbers at site {b!r}. Convert it at "
            "one of them."
        )
    # A site whose column has a missing value holds 1.0 where others hold 1: one level, written one way.
    ascending: list[Any] = sorted(counts)
    return list(as_written(ascending, counts))
