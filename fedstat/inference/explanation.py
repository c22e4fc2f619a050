"""What a fit would ask for and what would leave, printed before anything does."""

from __future__ import annotations

import html
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedstat.inference.tables import Sheet, SheetSummary, human_bytes

MOST_REFUSED = 4
COORDINATOR = "coordinator"
REFUSED, PASSES = "This fit would be REFUSED", "Every policy lets this fit pass, as far as it can be told"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Explanation:
    """What a fit would ask for, what would leave each institution, and who could learn what from it.

    Print it, let a notebook show it, or take :meth:`tidy`.

    Parameters
    ----------
    call : str
        The fit, as it would be called.
    at : str
        Who puts the questions: ``"coordinator"``, or the institution at which it sits.
    table : DataFrame
        See :meth:`tidy`.
    rounds : sequence of (str, tuple of int)
        Steps of a kind of round trip, and how many there would be at the fewest, the expected and the most
        iterations.
    refused : mapping of str to sequence of str
        What the policies would say against it, by institution; empty where all let it pass.
    learned : sequence of (str, str)
        Who, and what he could learn.
    notes : sequence of str
    """

    call: str
    at: str
    table: pd.DataFrame
    rounds: Sequence[tuple[str, tuple[int, ...]]]
    refused: Mapping[str, Sequence[str]]
    learned: Sequence[tuple[str, str]]
    notes: Sequence[str] = ()

    @property
    def passes(self) -> bool:
        """Whether every institution's policy lets the fit pass, as far as it can be told without data."""
        return not self.refused

    def tidy(self) -> pd.DataFrame:
        """List every array that would leave an institution.

        Returns
        -------
        DataFrame
            One row per sender, receiver, step and array: kind, meaning, masked or not, largest shape,
            entities behind a message, messages and bytes at the expected number of iterations and at the
            fewest and most (``_low``, ``_high``), the rules of the sender's policy that it meets, whether it
            passes, and what the policy says if not. Sizes that are ``guessed`` are not known in advance.
        """
        return self.table.copy()

    def totals(self) -> pd.DataFrame:
        """Sum up bytes by institution.

        Returns
        -------
        DataFrame
            ``sends`` and ``receives``, each expected, lowest and highest, in bytes.
        """
        columns = [f"bytes{end}" for end in ("", "_low", "_high")]
        parts = {}
        for word, role in zip(WORDS, ("sender", "receiver"), strict=True):
            parts[word] = self.table.groupby(role, sort=False)[columns].sum()
        joined = pd.concat(parts, axis=1).fillna(0).astype("int64")
        names = [f"{word}{column.removeprefix('bytes')}" for word in parts for column in columns]
        return joined.set_axis(names, axis=1)

    def __repr__(self) -> str:
        return self._summary().as_text()

    def _repr_html_(self) -> str:
        colour = "#1b5e20" if self.passes else "#b00020"
        loud = f'<p style="color: {colour}"><strong>{html.escape(self._verdict)}.</strong></p>'
        return f"<div>{loud}{self._summary().as_html()}</div>"

    @property
    def _verdict(self) -> str:
        if self.passes:
            return PASSES
        return f"{REFUSED} by the policy of {', '.join(self.refused)}"

    def _summary(self) -> SheetSummary:
        headline = f"{self._verdict}. What {self.call} would ask for; nothing has been asked."
        sheets = [*self._refusals(), self._rounds(), self._totals(), *self._senders(), self._learned()]
        return SheetSummary(sheets, self.notes, headline)

    def _refusals(self) -> Iterator[Sheet]:
        rows = []
        for site, messages in self.refused.items():
            rows += [(site, message) for message in messages[:MOST_REFUSED]]
            if len(messages) > MOST_REFUSED:
                rows.append((site, f"and {len(messages) - MOST_REFUSED} arrays more; see tidy()"))
        if rows:
            yield Sheet(("Institution", "Refusal"), tuple(rows), "ll", (20, 89), REFUSED.upper(), wrap=True)

    def _rounds(self) -> Sheet:
        rows = [(steps, spread(counts)) for steps, counts in self.rounds]
        total = [sum(counts) for counts in zip(*(counts for _, counts in self.rounds), strict=True)]
        rows.append(("in all", spread(tuple(total))))
        return Sheet(
            ("Steps asked in a round trip", "Rounds"), tuple(rows), "lr", (88, 21), "Rounds", wrap=True
        )

    def _totals(self) -> Sheet:
        rows = []
        for name, row in self.totals().iterrows():
            cells = (
                bytes_spread(*(int(row[f"{word}{end}"]) for end in ("_low", "", "_high"))) for word in WORDS
            )
            rows.append((str(name), *cells))
        return Sheet(("Institution", "Sends", "Receives"), tuple(rows), "lrr", (44, 32, 32), "Bytes")

    def _senders(self) -> Iterator[Sheet]:
        for sender, part in self.table.groupby("sender", sort=False):
            if not part["policed"].all():
                yield self._instructions(str(sender), part[~part["policed"]])
            if part["policed"].any():
                headers = ("Step", "Array", "Kind", "Shape", "Entities", "Times", "Bytes", "Policy")
                rows = tuple(map(_cells, part[part["policed"]].to_dict("records")))
                title = f"{sender} would send to the coordinator"
                yield Sheet(headers, rows, "lllrrrrl", (18, 16, 15, 13, 8, 6, 8, 19), title, wrap=True)

    def _instructions(self, sender: str, part: pd.DataFrame) -> Sheet:
        """List what the coordinator sends, to all receivers together."""
        rows = []
        for (step, array), group in part.groupby(["step", "array"], sort=False):
            receivers = group["receiver"].unique()
            one = group.iloc[0]
            to = str(receivers[0]) if len(receivers) == 1 else f"{len(receivers)} institutions"
            shape = str(max(group["shape"]))
            sizes = (shape, f"{group['messages'].sum():,}", human_bytes(int(group["bytes"].sum())))
            rows.append((str(step), str(array), str(one["kind"]), to, *sizes))
        headers = ("Step", "Array", "Kind", "To", "Shape", "Times", "Bytes")
        title = f"The coordinator would send{'' if sender == COORDINATOR else f', from {sender}'}"
        return Sheet(headers, tuple(rows), "llllrrr", (20, 18, 15, 24, 13, 6, 8), title, wrap=True)

    def _learned(self) -> Sheet:
        return Sheet(
            ("Who", "What it could learn"),
            tuple(self.learned),
            "ll",
            (20, 89),
            "Who could learn what, if all keep to the protocol and keep what they see",
            wrap=True,
        )


WORDS = ("sends", "receives")


def _cells(row: Mapping[Hashable, Any]) -> tuple[str, ...]:
    """One array in text."""
    entities = row["entities"]
    rules = str(row["rules"]) or ("passes" if row["policed"] else "")
    return (
        str(row["step"]),
        str(row["array"]),
        f"{row['kind']}, masked" if row["masked"] else str(row["kind"]),
        f"{row['shape']}{' ?' if row['guessed'] else ''}",
        f"{entities:,}" if entities else "",
        f"{row['messages']:,}",
        human_bytes(row["bytes"]),
        rules if row["passes"] else "REFUSED",
    )


def spread(counts: Sequence[int]) -> str:
    """Write an expected number with its range.

    Examples
    --------
    >>> spread((20, 60, 200))
    'about 60 (20 to 200)'
    """
    low, expected, high = counts
    return f"{expected:,}" if low == high else f"about {expected:,} ({low:,} to {high:,})"


def bytes_spread(low: int, expected: int, high: int) -> str:
    """Write an expected number of bytes with its range."""
    if low == high:
        return human_bytes(expected)
    return f"about {human_bytes(expected)} ({human_bytes(low)} to {human_bytes(high)})"
