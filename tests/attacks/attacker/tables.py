"""Random tables with planted cells: levels of few rows, columns that differ from others in few rows.

The *structure* of a table is its columns of few values, and where cells are missing; the columns of many
values are drawn again and again for the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedstat.typing import Array

DENSE = ("y", "z", "u", "w")
"""Columns of many values; c equals z but for few rows, m lacks few cells, amount is mostly zero."""


@dataclass(frozen=True, eq=False)
class Structure:
    """Columns of few values, and the rows in which the other columns are missing, equal or zero."""

    few: pd.DataFrame
    lacking: Array
    apart: Array
    positive: Array
    incomplete: bool = False
    """Whether there is a column v, which many rows lack."""

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int) -> Structure:
        """Draw a structure of `n` rows; each kind of planted cell is there in about half of the tables."""
        a = (rng.random(n) < rng.uniform(0.15, 0.5)) * 1.0
        inside = np.flatnonzero(a)
        b = (rng.random(n) < 0.5) * 1.0
        if rng.random() < 0.6:
            b = a.copy()
            b[few_of(rng, inside)] = 0.0
        x = rng.integers(0, 3, n) * 1.0
        if rng.random() < 0.6:
            x[inside] = 1.0
            x[few_of(rng, inside)] = 2.0
        g = np.array(["p", "q", "r"])[rng.integers(0, 3, n)]
        match int(rng.integers(4)):
            case 0:
                g[g == "r"] = "q"
                g[few_of(rng, np.arange(n), 4)] = "r"
            case 1:  # a level that is the cell of a, and one row more
                g = np.where(a > 0.0, "r", g)
                g[(g == "r") & (a == 0.0)] = "q"
                g[rng.choice(np.flatnonzero(a == 0.0))] = "r"
        s = rng.integers(0, 9, n) * 1.0
        if rng.random() < 0.4:
            s[rng.integers(n)] = 10.0
        e = (rng.random(n) < rng.uniform(0.2, 0.6)) * 1.0
        h = g if rng.random() < 0.3 else np.array(["k", "l"])[rng.integers(0, 2, n)]
        if rng.random() < 0.4:
            h = np.where(g == "p", "k", "l")
            h[few_of(rng, np.arange(n))] = "k"
        few = {"a": a, "b": b, "x": x, "g": g, "h": h, "s": s, "e": e, "t": rng.integers(1, 13, n) * 1.0}
        few |= _roles(np.random.default_rng([n, int(few["t"].sum()), int(s.sum())]), few["t"], e)
        positive = rng.random(n) < 0.3
        if rng.random() < 0.4:
            positive = np.zeros(n, dtype=bool)
            positive[few_of(rng, np.arange(n), 8)] = True
        lacking, apart = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        lacking[few_of(rng, np.arange(n), 4)] = True
        apart[few_of(rng, np.arange(n))] = True
        return cls(pd.DataFrame(few), lacking, apart, positive)

    def with_wards(self, rng: np.random.Generator, first: bool) -> Structure:
        """Return the structure of one of several sites; only the first has level p of g.

        One of the rows with p has level k of h.
        """
        n = len(self.few)
        g = rng.choice(["p", "q", "r"] if first else ["q", "r"], n)
        h = np.where((rng.random(n) < 0.5) & (g != "p"), "k", "l")
        h[np.flatnonzero(g == "p")[:1]] = "k"
        return replace(self, few=self.few.assign(g=g, h=h))

    def fill(self, rng: np.random.Generator) -> pd.DataFrame:
        """Draw the columns of many values: a table of the structure."""
        n = len(self.few)
        table = self.few.assign(**{name: rng.normal(10.0, 2.0, n).round(6) for name in DENSE})
        own = rng.normal(10.0, 2.0, n).round(6)
        table["c"] = np.where(self.apart, own, table["z"])
        table["m"] = np.where(self.lacking, np.nan, rng.normal(10.0, 2.0, n).round(6))
        table["amount"] = np.where(self.positive, rng.uniform(50.0, 900.0, n).round(4), 0.0)
        if self.incomplete:
            table["v"] = np.roll(table["w"], 7)
            table.loc[self.few["person"] % 3 == 0, "v"] = np.nan
        return table


def _roles(rng: np.random.Generator, t: Array, e: Array) -> dict[str, Array]:
    """Return clusters of uneven sizes, causes, times of entry and counts, drawn apart from the rest."""
    n = len(t)
    person = np.repeat(np.arange(n), rng.integers(1, 5, n))[:n]
    if rng.random() < 0.4:
        person[person == person[-1]] = person[0]
    return {
        "person": person,
        "cause": e * rng.integers(1, 3, n),
        "entry": np.where(rng.random(n) < 0.3, np.minimum(t - 1.0, 2.0), 0.0),
        "k": rng.integers(1, 5, n) * 1.0,
    }


def few_of(rng: np.random.Generator, rows: Array, most: int = 3) -> Array:
    """Choose 1 to `most` of the rows."""
    return rng.choice(rows, min(int(rng.integers(1, most + 1)), len(rows)), replace=False)
