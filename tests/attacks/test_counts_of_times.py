"""Attacks on counts of survival curves: other grids, other groups, other sites, and requests that are made
up."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.models.descriptive.protocol import MOST_TRIES
from fedstat.models.descriptive.steps import CountedTimes, count_times, counted_over_sites

FORMULA = "Surv(months, died) ~ arm"
CAUSES = "Surv(months, C(cause, levels=['none', 'first', 'second'])) ~ arm"
LEAST = 3


def people(seed=3, size=90, sites=4):
    rng = np.random.default_rng(seed)
    n = sites * size
    time, censored = 20.0 * rng.weibull(1.3, n), rng.uniform(5.0, 45.0, n)
    table = pd.DataFrame(
        {
            "hospital": [f"H{k % sites}" for k in range(n)],
            "months": np.minimum(time, censored).round(3) + 0.001,
            "died": (time <= censored).astype(int),
            "arm": np.where(np.arange(n) // sites % 2, "a", "b"),
            "sex": np.where(np.arange(n) // (2 * sites) % 2, "f", "m"),
        }
    )
    cause = np.where(rng.uniform(size=n) < 0.6, "first", "second")
    return table.assign(cause=np.where(table["died"] == 1, cause, "none"))


PEOPLE = people()


def split(policy=None, table=PEOPLE):
    return fs.ClientPartition.from_frame(table, by="hospital", policy=policy)


def curve(partition, formula=FORMULA, grid=1.0, until=36.0, **more):
    model = fs.CumulativeIncidence if "cause" in formula else fs.KaplanMeier
    return model.from_formula(formula, partition).fit(grid, until=until, **more)


def smallest_difference(fits, groups, outcome="died", table=PEOPLE):
    """Return the smallest count above zero between two ends of any of the fits."""
    ends = np.unique(np.concatenate([[0.0], *(fit.times for fit in fits), [np.inf]]))
    place = np.searchsorted(ends, table["months"])
    counts = np.array(
        [
            np.bincount(place[rows], minlength=len(ends))
            for rows in table.groupby([*groups, outcome]).indices.values()
        ]
    )
    return counts[counts > 0].min()


@pytest.mark.parametrize(
    ("policy", "formula", "outcome"),
    [
        (None, FORMULA, "died"),
        ("strict", FORMULA, "died"),
        ("strict", CAUSES, "cause"),
        (fs.Policy(remember="all"), CAUSES, "cause"),
    ],
    ids=["usual", "strict", "strict, causes", "all, causes"],
)
def test_no_difference_of_two_grids_is_about_few_rows(policy, formula, outcome):
    partition = split(policy)
    fits = [curve(partition, formula)]
    for grid, until in ((0.7, 36.0), (1.0, 30.5), ([6.2, 12.3, 18.1, 24.7], None)):
        try:
            fits.append(curve(partition, formula, grid, until))
        except PolicyError as error:
            # The number of sums of one column is limited over all analyses.
            assert policy == "strict" and "0.5" in str(error)
    assert len(fits) > 1
    assert smallest_difference(fits, ["arm"], outcome) >= LEAST
    for fit in fits:
        assert len(fit.times) >= 3
    # A grid that was released before is released again, and without memory so is every grid.
    again = curve(partition, formula)
    assert again.tidy().equals(fits[0].tidy())
    assert smallest_difference(forgotten(formula), ["arm"], outcome) < LEAST


@functools.cache
def forgotten(formula):
    """Three grids of sites that remember nothing."""
    forgets = split(fs.Policy(remember="nothing"))
    return [curve(forgets, formula, grid) for grid in (1.0, 0.7, 0.9)]


@pytest.mark.parametrize("order", list(itertools.permutations(["~ 1", "~ arm", "~ sex"]))[:3])
def test_no_difference_of_two_divisions_is_about_few_rows(order):
    """Rows of all groups follow from each division, so their ends are compared for all rows."""
    partition = split()
    fits = [curve(partition, f"Surv(months, died) {groups}") for groups in order]
    assert smallest_difference(fits, []) >= LEAST
    for groups, fit in zip(order, fits, strict=True):
        names = [] if groups == "~ 1" else [groups.removeprefix("~ ")]
        assert smallest_difference([fit], names) >= LEAST


def test_under_the_strictest_memory_times_are_counted_by_one_division():
    partition = split("strict")
    curve(partition)
    with pytest.raises(PolicyError, match="on other intervals or in other groups"):
        curve(partition, "Surv(months, died) ~ sex")
    assert len(curve(partition).times) > 3


@pytest.mark.parametrize("policy", [None, fs.Policy(remember="all")])
def test_counts_without_masks_have_the_minimum_at_every_site(policy):
    table = people(size=400)
    partition = split(policy, table)
    fits = [curve(partition, masked=masked) for masked in (False, True, False)]
    assert [fit._record.over_sites for fit in fits] == [False, True, False]
    for fit in (fits[0], fits[2]):
        assert len(fit.times) > 3
        for _, own in table.groupby("hospital"):
            assert smallest_difference([fit], ["arm"], table=own.reset_index(drop=True)) >= LEAST
    assert smallest_difference(fits, ["arm"], table=table) >= LEAST


def test_other_models_are_fitted_after_curves():
    """Counts at a site have as many rows as a level: they do not prevent models over the same rows."""
    partition = split()
    for masked in (False, True):
        curve(partition, masked=masked)
    assert fs.FederatedCox.from_formula("Surv(months, died) ~ sex", partition).fit().converged
    assert fs.GLORE.from_formula("died ~ sex", partition).fit().converged


@pytest.mark.filterwarnings("ignore:left out rows")
def test_curves_over_rows_that_differ_by_few_are_refused():
    """The difference of counts on the same intervals would be about the rows in which both differ."""
    table = PEOPLE.assign(lab=np.where(np.arange(len(PEOPLE)) % 9 == 0, np.nan, 1.0))
    partition = split(table=table)
    first = curve(partition)
    with pytest.raises(PolicyError, match="the argument complete of one takes the columns of the other"):
        fs.KaplanMeier.from_formula(FORMULA, partition, complete=["lab"]).fit(1.0, until=36.0)
    assert np.array_equal(curve(partition).times, first.times)


def test_a_site_is_no_difference_of_sums_over_other_sites():
    """The part of a site is the difference of sums with and without it, and would have single rows."""
    site = split().sites["H0"]
    state = SimpleNamespace(masked_among=("H0", "H1", "H2", "H3"))
    assert counted_over_sites(site._data, state)
    assert counted_over_sites(site._data, SimpleNamespace(masked_among=("H3", "H2", "H1", "H0")))
    for among in ((), ("H0", "H1"), ("H0", "H1", "H2"), ("H0", "H1", "H2", "H4")):
        assert not counted_over_sites(site._data, SimpleNamespace(masked_among=among))
    fresh = split(fs.Policy(remember="nothing")).sites["H0"]._data
    assert not counted_over_sites(fresh, SimpleNamespace(masked_among=("H0", "H1")))
    assert counted_over_sites(fresh, SimpleNamespace(masked_among=("H0", "H1", "H2")))


def test_sites_with_a_comma_in_their_name_are_not_other_sites():
    """Sites "A, B" and "C" are not "A" and "B, C", although the lists of their names read alike."""
    data = split().sites["H0"]._data
    assert counted_over_sites(data, SimpleNamespace(masked_among=("A, B", "C", "D")))
    assert not counted_over_sites(data, SimpleNamespace(masked_among=("A", "B, C", "D")))
    assert counted_over_sites(data, SimpleNamespace(masked_among=("D", "A, B", "C")))


@pytest.mark.parametrize("policy", [None, "strict"])
def test_ends_that_were_not_examined_with_earlier_ones_are_refused(policy):
    partition = split(policy)
    fit = curve(partition)
    own = PEOPLE[(PEOPLE["hospital"] == "H0") & (PEOPLE["arm"] == "a") & (PEOPLE["died"] == 1)]
    lone = np.sort(own["months"])[:1]
    data = partition.sites["H0"]._data
    (counted,) = data.site_ledger.records(CountedTimes)
    opened = SimpleNamespace(
        time_columns=("months",),
        digests=(counted.rows, counted.division),
        groups=2,
        used=None,
        time_counts=lambda edges: np.zeros((2, len(edges) + 1, 2)),
    )
    state = SimpleNamespace(masked_among=(), report=lambda *facts: None, use=lambda *_: opened)
    for edges, earlier in ((lone, []), (fit.times[:-1], lone), (lone, counted.ends[:-1])):
        with pytest.raises(PolicyError, match="were not examined together"):
            count_times(data, state, np.asarray(edges), np.asarray(earlier, dtype=float), lone)


def test_ends_are_examined_within_intervals_that_are_released():
    """Few ends are examined, and what a refused one reveals is about a wide interval."""
    partition = split()
    fit = curve(partition, grid=0.1, until=36.0)
    asked = fit.ledger.to_frame().query("step == 'flag_times' and array == 'edges'")
    # Up to five ends in each of the intervals of a round, of 360 that a search on the whole grid would
    # examine.
    rounds = len(asked) / len(partition.sites)
    assert 3 < rounds <= MOST_TRIES * np.ceil(np.log2(361)) + 3
    assert asked["shape"].map(lambda shape: shape[0]).max() <= 2 * len(fit.times) + 2 * MOST_TRIES


def test_all_other_sites_together_learn_the_part_of_a_site():
    """The counts of the other sites, subtracted from the sums, leave counts of single rows."""
    fit = curve(split())
    ends = np.append(fit.times, np.inf)
    place = np.searchsorted(ends, PEOPLE["months"])
    events = np.zeros((2, len(ends)))
    others = PEOPLE["hospital"] != "H0"
    for g, arm in enumerate("ab"):
        chosen = others & (PEOPLE["arm"] == arm) & (PEOPLE["died"] == 1)
        events[g] = np.bincount(place[chosen], minlength=len(ends))
    left = fit._record.events - events[:, :-1]
    assert left.min() >= 0.0 and 0.0 < left[left > 0.0].min() < LEAST
    assert fit._record.events[fit._record.events > 0].min() >= LEAST
    learned = fs.threats("strict").tidy()["learns"]
    assert learned.str.contains("all other sites collude with the coordinator: in which interval").any()
