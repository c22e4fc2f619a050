"""A request that a policy allows never ends later ones: only what a request adds is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for
from served import ServedSites

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.disclosure.column_sums import SumsOfColumn
from fedstat.federation.disclosure.release_history import ReleasedSums

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ("A", "B", "C")


def table(rare, n=180):
    """Return a table with a level of a few rows at site B."""
    random = np.random.default_rng(1)
    frame = pd.DataFrame({"site": np.repeat(SITES, n // 3), "age": random.integers(20, 90, n)})
    frame["y"] = random.normal(size=n).round(3)
    frame["time"], frame["event"] = random.exponential(5, n).round(2) + 0.01, np.resize([1, 1, 0], n)
    frame["sex"] = random.choice(["f", "m"], n)
    ward = np.resize(["general", "surgical", "general", "surgical", "intensive"], n).astype(object)
    at_b = np.flatnonzero(frame["site"] == "B")
    ward[at_b] = np.resize(["general", "surgical"], len(at_b))
    ward[at_b[np.linspace(1, len(at_b) - 1, rare).astype(int)]] = "intensive"
    return frame.assign(ward=ward)


def partition(rare, **rules):
    policies = {name: fs.Policy.strict(**rules) for name in SITES}
    return fs.ClientPartition.from_frame(table(rare), by="site", policies=policies)


def least_squares(p):
    return fs.FederatedOLS.from_formula("y ~ age", p).fit().params


TABLES = {
    "table_one": lambda p: fs.table_one(p, ["ward"]),
    "table_one by": lambda p: fs.table_one(p, ["age"], by="ward"),
    "crosstab": lambda p: fs.crosstab(p, "ward", "site"),
    "quantiles": lambda p: fs.quantiles(p, "age", by="ward", bounds={"age": (20, 90)}),
    "histogram": lambda p: fs.histogram(p, "age", by="ward", bins=range(20, 91, 10)),
    "cox with strata": lambda p: fs.FederatedCox.from_formula(
        "Surv(time, event) ~ age + strata(ward)", p
    ).fit(),
    "kaplan_meier": lambda p: fs.KaplanMeier.from_formula("Surv(time, event) ~ ward", p).fit(range(1, 10, 2)),
}


@pytest.mark.parametrize("rare", [3, 4])
@pytest.mark.parametrize("name", TABLES)
def test_a_rare_level_in_a_table_does_not_end_later_analyses(name, rare):
    p = partition(rare)
    first = least_squares(p)
    try:
        TABLES[name](p)
    except PolicyError:
        # Moments need more rows, and of the outcomes of a level there are fewer.
        assert name in ("table_one by", "cox with strata", "kaplan_meier")
    pd.testing.assert_series_equal(least_squares(p), first)
    fs.FederatedOLS.from_formula("age ~ y", p).fit()
    fs.table_one(p, ["sex"])


def test_below_the_minimum_the_table_is_refused_and_nothing_is_remembered():
    p = partition(2)
    with pytest.raises(PolicyError):
        TABLES["table_one"](p)
    least_squares(p)
    with pytest.raises(PolicyError):
        TABLES["table_one"](p)


def test_what_a_request_adds_to_the_level_is_still_refused():
    """Rows without the level differ by its few rows: that is new, and singles them out by another way."""
    p = partition(4)
    TABLES["table_one"](p)
    frame = table(4)
    frame.loc[frame.index[frame["site"] == "B"][:2], "y"] = np.nan
    for policy in (fs.Policy.strict(), fs.Policy.strict(small_differences="refuse")):
        other = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
        first = fs.FederatedOLS.from_formula("age ~ 1", other).fit()
        if policy.small_differences == "leave out":
            assert fs.FederatedOLS.from_formula("y ~ age", other).fit().nobs == first.nobs == len(frame) - 2
            continue
        with refused_for("differencing", site="B"):
            least_squares(other)


def test_served_sites_answer_after_a_table_and_a_restart(tmp_path):
    frames = {name: part[["age", "y", "ward"]] for name, part in table(3).groupby("site")}
    published = {
        "age": {"kind": "number", "range": [20, 90]},
        "y": {"kind": "number", "range": [-5, 5]},
        "ward": {"kind": "category", "levels": ["general", "intensive", "surgical"]},
    }
    sites = ServedSites(tmp_path, frames, published)
    first = least_squares(sites.connect())
    for _ in range(2):
        fs.table_one(sites.connect(), ["ward"])
        pd.testing.assert_series_equal(least_squares(sites.connect()), first)
        sites.restart()


def test_sums_of_functions_count_only_if_they_were_sent():
    """A fit that is refused after its columns were counted has used up nothing."""
    p = partition(3, max_column_sums=0.1)
    with pytest.raises(PolicyError):
        fs.FederatedOLS.from_formula("y ~ ward:sex:age + C(age)", p).fit()
    for site in p.sites.values():
        assert not site.site_ledger.records(SumsOfColumn)


def history(*codes):
    found = ReleasedSums.none(12)
    for code in codes:
        found = found.with_groups(np.asarray(code))
    return found


@pytest.mark.parametrize(
    ("new", "isolated"),
    [
        ([0] * 12, 0),  # all rows
        ([0] * 3 + [-1] * 9, 0),  # the known group again
        ([-1] * 3 + [0] * 9, 0),  # and all but it
        ([-1] * 7 + [0] * 5, 4),  # less these and the known group, four rows remain
        ([-1] * 10 + [0] * 2, 2),
        ([0] * 2 + [-1] * 10, 1),  # two of the three, and the one that remains
    ],
)
def test_only_what_is_added_isolates(new, isolated):
    known = history([0] * 3 + [1] * 9)  # a group of three, allowed by a smaller minimum
    after = known.with_groups(np.asarray(new))
    assert after.isolates(5)
    assert [n for n in range(1, 5) if after.isolates(n + 1, known)] == [*range(isolated or 5, 5)]
