"""Counts of the numbers that a site released, compared with the number of values they depend on.

Every released number that is a function of a site's data is an equation on that data. With as many equations
as unknown values they may be solved for (so it is with linear predictors of a dozen rounds). With fewer,
columns of few values may be determined all the same: a number that leaves exactly has 53 bits, a value of
zero or one has one. Counting is a necessary check and no proof of privacy: a single equation can
disclose a value (a maximum, a sum over one row, a total that differs by one person from another), columns of
zeros and ones have fewer unknowns than cells, and the receiver may know much beforehand. It errs on the other
side as well: equations may depend on each other, and bring unknowns of their own (the coefficients).

What counts:

* arrays of sums, sketches, values per entity and raw columns, and the scalars of an iteration that leave a
  site; not who is present, names, levels and counts, nor texts, nor sums with noise: these are no equations,
  and a privacy budget pays for them;
* a symmetric matrix by its distinct numbers, and the same array released again not at all;
* a sum over K sites that masks hide is an equation on the data of the K together, not on that of one;
* a share of a secure product: with the other share, an equation on the data of two sites; sealed boxes none.

Unknowns are the entities times the columns of the table that were in play.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd

from fedstat.typing import Array

MASKED_SHARE = "masked share"
DATA_KINDS = frozenset({MASKED_SHARE, "aggregate", "sketch", "per entity", "raw columns"})
SYMMETRY_TOLERANCE = 1e-10
VERDICT_FEW_BITS, VERDICT_ENOUGH_BITS, VERDICT_SOLVABLE = (
    "less than a bit a value",
    "bits enough for columns of few values",
    "as many equations as unknowns: rows could be computed",
)
BITS_PER_NUMBER = 53
"""Bits of a number that is released exactly; a value of zero or one has one bit."""
NO_EQUATIONS = "no equations"


def counts_as_equation(kind: str, outward: bool) -> bool:
    """Whether numbers of a kind are equations; scalars of an iteration are where they leave a site."""
    return kind in DATA_KINDS or (outward and kind == "control")


def numbers_per_entity(shape: Sequence[int]) -> int:
    """Numbers for each entity in an array of them: entities are its first axis, of three the second.

    The first axis of three has parts, such as the networks of a batch.

    Examples
    --------
    >>> numbers_per_entity((100,)), numbers_per_entity((100, 10)), numbers_per_entity((3, 100, 10))
    (1, 10, 30)
    """
    if not shape or 0 in shape:
        return int(not shape)
    return math.prod(shape) // (shape[1] if len(shape) == 3 else shape[0])


def distinct_numbers(array: Array) -> int:
    """Count the numbers of an array, of symmetric matrices those on and above the diagonal."""
    if array.ndim < 2 or array.shape[-1] != array.shape[-2] or array.dtype == np.bool_:
        return int(array.size)
    p = array.shape[-1]
    # Symmetric up to rounding, by which the two halves of a product may differ.
    apart = np.abs(array - array.swapaxes(-1, -2)).max(initial=0.0)
    if apart > SYMMETRY_TOLERANCE * np.abs(array).max(initial=0.0):
        return int(array.size)
    return int(array.size // (p * p)) * p * (p + 1) // 2 if p else 0


@dataclass(frozen=True, slots=True)
class SiteReleaseCounts:
    """One site's own counts of its released numbers.

    `released` are the distinct numbers that left in the session, by how many sites they are sums over,
    `received` those about other sites that came in; `earlier` and `earlier_received` the same in all other
    sessions. `columns` of the site's table were in play in any session, `entities` the most behind an answer.
    """

    site: str
    released: Mapping[int, int]
    received: int
    earlier: Mapping[int, int]
    earlier_received: int
    columns: int
    entities: int

    @property
    def unknowns(self) -> int:
        """Values of the site that the numbers are functions of: at least one column."""
        return self.entities * max(self.columns, 1)


@dataclass(frozen=True, slots=True)
class Exposure:
    """One line of the comparison: numbers about some sites in the hands of one party."""

    about: str
    receiver: str
    run: int
    earlier: int
    unknowns: int

    @property
    def equations(self) -> int:
        """Count of this session and all others."""
        return self.run + self.earlier

    @property
    def ratio(self) -> float:
        """Equations per unknown."""
        if not self.equations:
            return 0.0
        return self.equations / self.unknowns if self.unknowns else math.inf

    @property
    def bits(self) -> float:
        """Bits that left per unknown value."""
        return BITS_PER_NUMBER * self.ratio

    @property
    def verdict(self) -> str:
        """The ratio in words."""
        if not self.equations:
            return NO_EQUATIONS
        return (
            VERDICT_SOLVABLE
            if self.ratio >= 1.0
            else VERDICT_ENOUGH_BITS
            if self.bits >= 1.0
            else VERDICT_FEW_BITS
        )


def compare_site_counts(sites: Sequence[SiteReleaseCounts], at: str | None) -> list[Exposure]:
    """Compare equations with unknowns, by owner of the data and receiver.

    First each site's own numbers at the coordinator, which sits at the site `at` (nothing is released to
    itself); then those of all sites together, sums included; then what each site received about the others.
    """
    reader = "coordinator" if at is None else f"{at} (coordinator)"
    others = [one for one in sites if one.site != at]
    lines = [
        Exposure(one.site, reader, one.released.get(1, 0), one.earlier.get(1, 0), one.unknowns)
        for one in others
    ]
    if any(set(counts) - {1} for one in sites for counts in (one.released, one.earlier)):
        lines.append(
            Exposure(
                "all together, with sums over several",
                reader,
                _count_equations(others, [one.released for one in sites]),
                _count_equations(others, [one.earlier for one in sites], earlier=True),
                sum(one.unknowns for one in others),
            )
        )
    unknowns = sum(one.unknowns for one in sites)
    for one in others if len(sites) > 1 else ():  # with one site there are no others
        known = unknowns - one.unknowns
        lines.append(Exposure("the others", one.site, one.received, one.earlier_received, known))
    return lines


def _count_equations(
    others: Sequence[SiteReleaseCounts], counts: Sequence[Mapping[int, int]], earlier: bool = False
) -> int:
    """Return numbers that are sums, each once, and the numbers of single sites."""
    # Every one of the sites of a sum has it in its own count: a part of one each.
    single = sum((one.earlier if earlier else one.released).get(1, 0) for one in others)
    sums = sum((Fraction(n, among) for row in counts for among, n in row.items() if among > 1), Fraction(0))
    return single + math.ceil(sums)


def exposure_table(lines: Sequence[Exposure]) -> pd.DataFrame:
    """One row per line, the columns named for print."""
    return pd.DataFrame(
        {
            "about": [line.about for line in lines],
            "in the hands of": [line.receiver for line in lines],
            "this session": [line.run for line in lines],
            "other sessions": [line.earlier for line in lines],
            "equations": [line.equations for line in lines],
            "unknowns": [line.unknowns for line in lines],
            "ratio": [round(line.ratio, 3) for line in lines],
            "bits a value": [round(line.bits, 1) for line in lines],
            "verdict": [line.verdict for line in lines],
        }
    )


def exposure_warning(lines: Sequence[Exposure]) -> str:
    """One sentence where a party received as many equations as unknowns in this session; else empty."""
    # Other sessions are in the table: a warning that counts them would blame a fit for those before it.
    flagged = [line for line in lines if line.run and line.run >= line.unknowns]
    if not flagged:
        return ""
    worst = [
        f"{line.run:,} about {line.unknowns:,} values of {line.about} to {line.receiver}"
        for line in flagged[:3]
    ]
    more = f", and {len(flagged) - 3} more" if len(flagged) > 3 else ""
    return (
        "Sites released as many equations as unknowns, so that rows could be computed: "
        f"{'; '.join(worst)}{more}; see receipt().released"
    )
