"""The printed dry run of a fit: the requests to the sites and the values that they would release."""

from __future__ import annotations

import html
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedstat.inference.tables import Sheet, SheetSummary, human_bytes

COORDINATOR = "coordinator"
PASSES = "Every policy allows this fit, as far as this is known without data"
EACH = ", each"
MOST_NAMED = 4
WORDS = ("sends", "receives")
ENDS = ("_low", "", "_high")
"""Endings of columns: with one iteration, as in the dry run, and at the limit."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Explanation:
    """The requests of a fit, the releases of each site, and what each party could learn.

    Print it, let a notebook show it, or take :meth:`tidy`.

    Parameters
    ----------
    call : str
        The fit, as it would be called.
    table : DataFrame
        See :meth:`tidy`.
    rounds : sequence of (str, tuple of int)
        Steps of a kind of round trip, and their expected number: with one iteration, as in the dry run, and
        at the limit of the fit.
    refused : mapping of str to mapping of str to sequence of str
        Reasons of the policies against it, by site and rule; empty if all allow it.
    learned : sequence of (str, str)
        The party, and what it could learn.
    notes : sequence of str

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> told = fs.GLORE.from_formula("num > 0 ~ age", partition).explain()
    >>> told.call, told.passes, len(told.rounds), told.refused
    ('GLORE.fit()', True, 4, {})
    >>> len(told.tidy()) == len(told.table), told.totals().index.tolist()
    (True, ['coordinator', 'Cleveland', 'Hungary', 'Long Beach', 'Switzerland'])
    """

    call: str
    table: pd.DataFrame
    rounds: Sequence[tuple[str, tuple[int, ...]]]
    refused: Mapping[str, Mapping[str, Sequence[str]]]
    learned: Sequence[tuple[str, str]]
    notes: Sequence[str] = ()

    @property
    def passes(self) -> bool:
        """Whether every site's policy allows the fit, as far as this is known without data."""
        return not self.refused

    def tidy(self) -> pd.DataFrame:
        """List every array that a site would release.

        Returns
        -------
        DataFrame
            One row per sender, receiver, step and array: kind, meaning, masked or not, largest shape,
            entities in a message, messages and bytes as in the dry run, with one iteration and at the limit
            of the fit (``_low``, ``_high``), the rules of the sender's policy that apply, whether it passes,
            and otherwise the rule and the text of the refusal. Sizes that are ``guessed`` are not known in
            advance; only ``policed`` arrays are checked by a policy.
        """
        return self.table.copy()

    def totals(self) -> pd.DataFrame:
        """Sum up bytes by site.

        Returns
        -------
        DataFrame
            ``sends`` and ``receives`` in bytes: as in the dry run, with one iteration (``_low``) and at the
            limit of the fit (``_high``).
        """
        columns = [f"bytes{end}" for end in ENDS]
        parts = {
            word: self.table.groupby(role, sort=False)[columns].sum()
            for word, role in zip(WORDS, ("sender", "receiver"), strict=True)
        }
        joined = pd.concat(parts, axis=1).fillna(0).astype("int64")
        return joined.set_axis([f"{word}{end}" for word in parts for end in ENDS], axis=1)

    def __repr__(self) -> str:
        return self._summary(f"{self._verdict}. ").as_text()

    def _repr_html_(self) -> str:
        color = "#1b5e20" if self.passes else "#b00020"
        loud = f'<p style="color: {color}"><strong>{html.escape(self._verdict)}.</strong></p>'
        return f"<div>{loud}{self._summary().as_html()}</div>"

    @property
    def _verdict(self) -> str:
        return PASSES if self.passes else f"REFUSED by the policy of {self._named(self.refused)}"

    def _named(self, names: Iterable[str], each: str = "") -> str:
        """Names of sites, or their number if many send the same."""
        names = list(names)
        every = set(self.table["sender"]) - {COORDINATOR}
        if len(names) > MOST_NAMED and every.issubset(names):
            return f"all {len(names)} sites{each}"
        return f"{', '.join(names)}{each if len(names) > 1 else ''}"

    def _summary(self, verdict: str = "") -> SheetSummary:
        if self.table.empty:
            headline = f"{self.call} would send nothing from one site to another."
            return SheetSummary([self._learned()], self.notes, [headline])
        headline = f"{verdict}What {self.call} would request; nothing has been requested."
        sheets = [*self._refusals(), self._rounds(), self._totals(), *self._senders(), self._learned()]
        return SheetSummary(sheets, self.notes, [headline])

    def _refusals(self) -> Iterator[Sheet]:
        rows: list[tuple[str, ...]] = []
        for site, by_rule in self.refused.items():
            for rule, messages in by_rule.items():
                more = f" (and {len(messages) - 1} arrays more)" if len(messages) > 1 else ""
                rows.append((site, rule, messages[0].removeprefix(f"{site}: ") + more))
        rows = self._together(rows)
        if rows:
            headers = ("Site", "Rule", "What its policy says")
            yield Sheet(headers, tuple(rows), "lll", (18, 18, 72), "THIS FIT WOULD BE REFUSED", wrap=True)

    def _together(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Merge rows that differ only in the site, the first cell, into one line."""
        return [(self._named(names, EACH), *rest) for rest, names in merge_rows(rows).items()]

    def _rounds(self) -> Sheet:
        rows = [(steps, expected_count(counts)) for steps, counts in self.rounds]
        # The totals add the smallest and the largest number of each kind: bounds, not quantiles.
        total = [sum(counts) for counts in zip(*(counts for _, counts in self.rounds), strict=True)]
        rows.append(("in all", expected_count(total)))
        headers = ("Steps requested in a round trip", "Rounds")
        return Sheet(headers, tuple(rows), "lr", (82, 27), "Rounds", wrap=True)

    def _totals(self) -> Sheet:
        rows = []
        for name, row in self.totals().iterrows():
            sizes = ([int(row[f"{word}{end}"]) for end in ENDS] for word in WORDS)
            rows.append((str(name), *(expected_bytes(*counts) for counts in sizes)))
        headers = ("Site", "Sends", "Receives")
        return Sheet(headers, tuple(self._together(rows)), "lrr", (34, 37, 37), "Bytes", wrap=True)

    def _senders(self) -> Iterator[Sheet]:
        reported = self.table[~self.table["policed"]]
        if len(reported):
            yield instructions(reported)
        headers = ("Step", "Array", "Kind", "Shape", "Entities", "Times", "Bytes", "Policy")
        for senders, rows in merge_sites(self.table[self.table["policed"]]):
            title = f"{', '.join(senders)} would send to the coordinator{EACH if len(senders) > 1 else ''}"
            # The only place that names all of them, for any number of sites.
            if len(senders) > MOST_NAMED:
                title = f"{len(senders)} sites would send to the coordinator{EACH}: {', '.join(senders)}"
            yield Sheet(
                headers, merge_arrays(rows), "lllrrrrl", (15, 15, 17, 10, 11, 5, 8, 22), title, wrap=True
            )

    def _learned(self) -> Sheet:
        return Sheet(
            ("Who", "What could be learned"),
            tuple(self.learned) or (("No party", "learns anything about the data of another."),),
            "ll",
            (20, 89),
            "Who could learn what, if sites follow the protocol and keep what they receive",
            wrap=True,
        )


def merge_rows(rows: Sequence[tuple[str, ...]], at: int = 0) -> dict[tuple[str, ...], list[str]]:
    """Merge rows that differ in a single cell: return the other cells, and the values of that cell."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        found.setdefault((*row[:at], *row[at + 1 :]), []).append(row[at])
    return found


def merge_arrays(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Merge arrays of a step, the second cell, into one line if only their names differ."""
    return tuple(
        (step, f"{', '.join(names)}{EACH if len(names) > 1 else ''}", *rest)
        for (step, *rest), names in merge_rows(rows, 1).items()
    )


def instructions(reported: pd.DataFrame) -> Sheet:
    """List what the coordinator sends, to all receivers together."""
    rows = []
    for (step, array), group in reported.groupby(["step", "array"], sort=False):
        receivers = group["receiver"].unique()
        to = str(receivers[0]) if len(receivers) == 1 else f"{len(receivers)} sites"
        sizes = (f"{group['messages'].sum():,}", human_bytes(int(group["bytes"].sum())))
        rows.append((str(step), str(array), str(group["kind"].iloc[0]), to, str(max(group["shape"])), *sizes))
    (sender,) = reported["sender"].unique()
    headers = ("Step", "Array", "Kind", "To", "Shape", "Times", "Bytes")
    title = f"The coordinator would send{'' if sender == COORDINATOR else f', from {sender}'}"
    return Sheet(headers, merge_arrays(rows), "llllrrr", (20, 18, 15, 24, 13, 6, 8), title, wrap=True)


def merge_sites(table: pd.DataFrame) -> Iterator[tuple[list[str], tuple[tuple[str, ...], ...]]]:
    """Combine sites that would send the same except for the number of entities."""
    # Keyed by what they would send: thirty hospitals that send the same make one table.
    found: dict[tuple[tuple[str, ...], ...], dict[str, list[int]]] = {}
    for sender, part in table.groupby("sender", sort=False):
        rows = tuple(_cells(row) for row in part.to_dict("records"))
        found.setdefault(rows, {})[str(sender)] = part["entities"].tolist()
    for rows, entities in found.items():
        behind = [count_range(min(counts), max(counts)) for counts in zip(*entities.values(), strict=True)]
        yield (
            list(entities),
            tuple((*row[:4], count, *row[4:]) for row, count in zip(rows, behind, strict=True)),
        )


def _cells(row: Mapping[Hashable, Any]) -> tuple[str, ...]:
    """One array in text, without its number of entities."""
    return (
        str(row["step"]),
        str(row["array"]),
        f"{row['kind']}, masked" if row["masked"] else str(row["kind"]),
        f"{row['shape']}{' ?' if row['guessed'] else ''}",
        f"{row['messages']:,}",
        human_bytes(row["bytes"]),
        f"passes {row['rules']}".rstrip() if row["passes"] else f"REFUSED: {row['refused_by']}",
    )


def count_range(low: int, high: int) -> str:
    """Write a range of counts; nothing for zero."""
    if low == high:
        return f"{low:,}" if low else ""
    return f"{low:,}-{high:,}"


def expected_count(counts: Sequence[int]) -> str:
    """Write an expected number with its range.

    Examples
    --------
    >>> spread((20, 60, 200))
    'about 60 (20 to 200)'
    """
    low, expected, high = counts
    return f"{expected:,}" if low == high else f"about {expected:,} ({low:,} to {high:,})"


def expected_bytes(low: int, expected: int, high: int) -> str:
    """Write an expected number of bytes with its range."""
    if low == high:
        return human_bytes(expected)
    return f"about {human_bytes(expected)} ({human_bytes(low)} to {human_bytes(high)})"
