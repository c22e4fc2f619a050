"""Sequences of analyses under a policy, judged by the oracle: what was answered may single out no row."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

import fedstat as fs
from attacker.grammar import Analysis, draw_analysis, products
from attacker.oracle import TooFewDrawsError, singled_out
from attacker.tables import Structure
from fedstat.errors import EstimationError, FedstatError
from fedstat.federation.disclosure.analysis_sets import leave_out_rows, leaves_out
from fedstat.federation.disclosure.state import SiteData
from fedstat.typing import Array, Bools

DRAWS, MOST_ANALYSES, FEWEST_ROWS, MOST_ROWS = 12, 4, 70, 130


@dataclass(frozen=True)
class LeftOut:
    """Leaves rows out of a request as a site does."""

    data: SiteData

    def __call__(self, complete: Bools, names: tuple[str, ...]) -> Bools:
        """Return the rows that are used, of the complete ones."""
        return leave_out_rows(self.data, complete, names)

    def __deepcopy__(self, memo: object) -> LeftOut:
        """Return itself: pandas copies the attributes of a table with each of its columns."""
        return self


@dataclass
class Finding:
    """A sequence that singles out rows of a site."""

    seed: int
    site: str
    answered: list[str]
    rows: list[tuple[int, ...]]

    def __str__(self) -> str:
        return f"seed {self.seed}, site {self.site}, rows {self.rows}: " + "; ".join(self.answered)


@dataclass
class Campaign:
    """What was tried and found."""

    sequences: int = 0
    answered: int = 0
    refused: int = 0
    sums: int = 0
    undecided: int = 0
    by_kind: dict[str, list[int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {a}/{a + r}" for kind, (a, r) in sorted(self.by_kind.items()))
        return (
            f"{self.sequences} sequences, {self.answered} analyses answered and {self.refused} refused, "
            f"{self.sums:,} sums examined, {self.undecided} undecided, {len(self.findings)} findings, "
            f"{self.seconds:.0f} CPU s; answered: {kinds}"
        )


def attack(seed: int, campaign: Campaign, policy: fs.Policy | str = "strict") -> list[Finding]:
    """Draw tables and a sequence of analyses from the seed, run it, and judge what each site answered."""
    rng = np.random.default_rng(seed)
    sites = ["A", "B", "C"][: int(rng.choice([1, 2, 3, 3]))]
    structures = {site: Structure.draw(rng, int(rng.integers(FEWEST_ROWS, MOST_ROWS))) for site in sites}
    tables = {site: structure.fill(rng) for site, structure in structures.items()}
    pooled = pd.concat([table.assign(site=site) for site, table in tables.items()], ignore_index=True)
    partition = fs.ClientPartition.from_frame(pooled, by="site", policy=policy)
    answered: list[Analysis] = []
    for _ in range(int(rng.integers(1, MOST_ANALYSES + 1))):
        analysis = draw_analysis(rng)
        count = campaign.by_kind.setdefault(analysis.text.split()[0], [0, 0])
        if released(analysis, partition):
            answered.append(analysis)
            count[0] += 1
            campaign.answered += 1
        else:
            count[1] += 1
            campaign.refused += 1
    campaign.sequences += 1
    if not answered:
        return []
    found = []
    for site, structure in structures.items():
        # What is left out of a request follows from the classes of rows after all requests, too.
        data = partition.sites[site].data
        left_out = {"leave out": LeftOut(data)} if leaves_out(data) else {}
        tables[site].attrs |= left_out
        draws = [terms_of(answered, tables[site])]
        for _ in range(DRAWS - 1):
            drawn = structure.fill(rng)
            drawn.attrs |= left_out
            draws.append(terms_of(answered, drawn))
        campaign.sums += draws[0].shape[1]
        try:
            rows = singled_out(draws, 3)
        except TooFewDrawsError:
            campaign.undecided += 1
            continue
        rows = [S for S in rows if not any(is_count(one, tables[site], S) for one in answered)]
        if rows:
            found.append(Finding(seed, site, [analysis.text for analysis in answered], rows))
    campaign.findings += found
    return found


def is_count(analysis: Analysis, table: pd.DataFrame, rows: tuple[int, ...]) -> bool:
    """Return whether a combination of counts of two levels of one model belongs to these rows.

    The policy tolerates it, and the threat statements name it: small counts follow by subtraction.
    """
    X = analysis.levels(table)
    if not X.shape[1]:
        return False
    counts = products(np.column_stack([np.ones(len(X)), X]))
    return (rows in singled_out([counts, counts], 3)) if counts.shape[1] else False


def terms_of(analyses: list[Analysis], table: pd.DataFrame) -> Array:
    """Return the terms of all sums of a sequence, (n, d)."""
    return np.hstack([analysis.terms(table) for analysis in analyses])


def released(analysis: Analysis, partition: fs.ClientPartition) -> bool:
    """Run an analysis; whether sums were released, which they were when an estimate does not exist, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            analysis.run(partition)
        except EstimationError:
            return True
        except FedstatError:
            return False
    return True


def run_campaign(seeds: range, policy: fs.Policy | str = "strict", seconds: float = np.inf) -> Campaign:
    """Attack with each seed in turn, until the seconds of the processor are spent."""
    campaign, began = Campaign(), time.process_time()
    for seed in seeds:
        attack(seed, campaign, policy)
        campaign.seconds = time.process_time() - began
        if campaign.seconds > seconds:
            break
    return campaign
