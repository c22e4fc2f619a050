"""Complementary suppression: no hidden count follows from the published margins, as a linear system."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DesignError, PolicyError

LEVELS, ARMS, SITES = ["I", "II", "III", "IV"], ["a", "b"], ["X", "Y"]


def rare_table(seed):
    """Make people of whom a few are in rare cells of an arm, a stage and a site."""
    rng = np.random.default_rng(seed)
    cells = [(site, arm, stage) for site in SITES for arm in ARMS for stage in LEVELS]
    counts = np.where(
        rng.random(len(cells)) < 0.2, rng.integers(1, 3, len(cells)), rng.integers(8, 20, len(cells))
    )
    rows = [cell for cell, count in zip(cells, counts, strict=True) for _ in range(count)]
    return pd.DataFrame(rows, columns=["site", "arm", "stage"]), dict(
        zip(cells, counts.tolist(), strict=True)
    )


def determined(cells, equations):
    """Return the cells that equations (sets of cells whose sum is known) determine."""
    A = np.array([[cell in members for cell in cells] for members in equations], dtype=float)
    rank = np.linalg.matrix_rank(A)
    null = np.linalg.svd(A)[2][rank:]
    return {
        cell for cell, size in zip(cells, np.abs(null).max(axis=0, initial=0.0), strict=True) if size < 1e-9
    }


def published(found, sites):
    """Return what a table publishes: shown counts, their totals, and the rows of each arm, over the sites."""
    shown = [(arm, stage) for arm in ARMS for stage in LEVELS if found[arm, stage]]
    equations = [{(site, *cell) for site in sites} for cell in shown]
    equations += [{(site, arm, stage) for site in sites for stage in LEVELS} for arm in ARMS]
    equations += [
        {(site, arm, stage) for site in sites for arm in ARMS}
        for stage in LEVELS
        if all(found[arm, stage] for arm in ARMS)
    ]
    return equations


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("what", ["crosstab", "table_one"])
def test_hidden_counts_do_not_follow(what, seed):
    people, counts = rare_table(seed)
    few = {cell for cell, count in counts.items() if 0 < count < 3}
    partition = fs.ClientPartition.from_frame(people, by="site")
    try:
        if what == "crosstab":
            frame = fs.crosstab(partition, "arm", "stage", masked=False)
            found = {(arm, stage): frame.notna().loc[arm, stage] for arm in ARMS for stage in LEVELS}
        else:
            (one,) = fs.table_one(partition, "stage", by="arm", masked=False).variables
            found = {
                (arm, stage): np.isfinite(one.counts[i, j])
                for i, arm in enumerate(ARMS)
                for j, stage in enumerate(LEVELS)
            }
    except (PolicyError, DesignError):
        return  # refused as a whole
    hidden = {cell for cell, shown in found.items() if not shown}
    assert {cell[1:] for cell in few} <= hidden
    # The coordinator sees each site's part of unmasked counts: the shown cells, and the rows of each arm.
    cells = list(counts)
    equations = [one for site in SITES for one in published(found, [site])] + published(found, SITES)
    assert not few & determined(cells, equations)
    # What is hidden of an arm at a site is known together, and is no few rows.
    for site in SITES:
        for arm in ARMS:
            rest = sum(counts[site, arm, stage] for stage in LEVELS if (arm, stage) in hidden)
            assert rest == 0 or rest >= 3


def test_the_solver_finds_a_count_that_follows():
    _, counts = rare_table(0)
    found = {(arm, stage): (arm, stage) != ("a", "II") for arm in ARMS for stage in LEVELS}
    assert ("X", "a", "II") in determined(list(counts), published(found, ["X"]))


def test_most_tables_are_not_refused():
    shown = 0
    for seed in range(8):
        people, _ = rare_table(seed)
        try:
            shown += (
                fs.crosstab(fs.ClientPartition.from_frame(people, by="site"), "arm", "stage")
                .notna()
                .any(axis=None)
            )
        except (PolicyError, DesignError):
            continue
    assert shown >= 4
