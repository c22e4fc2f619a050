"""Release history of a site whose keyed records are added, removed or aligned again."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.disclosure.differencing import check_row_groups
from fedstat.federation.disclosure.facts import RowGroups
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.aligned_table import AlignedTable

SECRET = b"s" * 32
RNG = np.random.default_rng(4)


HELD = RNG.normal(size=100)


def table_of(keys, alignment="0" * 16, numbers=None, corrected=(), more=()):
    frame = pd.DataFrame({"id": keys, "x": HELD[list(keys)]})
    frame["x"] += frame["id"].isin(corrected)
    for name in more:
        frame[name] = HELD[list(keys)]
    table = AlignedTable("Bank", frame, ["id"])
    table.keep(alignment, np.arange(len(keys)) if numbers is None else numbers)
    return table


def site_of(table, remembered=None):
    return SiteData("Bank", table, None, fs.Policy.strict(), remembered or ReleaseHistory())


def request(data, keys):
    """A sum over the records with these keys."""
    data.memory.follow(data.table, SECRET)
    table = data.table
    held = pd.DataFrame({"k": table.keys._values[0], "n": np.arange(table.n_rows)})
    if table._order is not None:
        held = held.iloc[table._order]
    rows = np.flatnonzero(held["k"].isin(list(keys)))
    check_row_groups(data, None, RowGroups("", np.zeros(len(rows), dtype=np.int64), rows))


def later(data, table):
    """The site after a restart, with another table."""
    kept = data.memory.to_arrays(data.table, SECRET)
    return site_of(table, ReleaseHistory.from_arrays(kept, table, SECRET))


def test_records_that_come_and_go():
    data = site_of(table_of(range(40)))
    request(data, range(40))
    data = later(data, table_of([*range(50)]))
    with pytest.raises(PolicyError, match="differencing"):
        request(data, range(42))
    request(data, range(50))
    # One that is gone: the sum over the others is the earlier one less its row.
    data = later(data, table_of([k for k in range(50) if k != 7]))
    assert len(data.memory.gone) == 1
    with pytest.raises(PolicyError, match="differencing"):
        request(data, range(50))
    # The record is recognized when it comes back, and none is missing.
    data = later(data, table_of(range(50)))
    assert len(data.memory.gone) == 0
    request(data, range(50))
    # Five that are gone: what the sums differ by is over five.
    data = later(data, table_of(range(45)))
    request(data, range(45))
    data = later(data, table_of(range(43)))
    with pytest.raises(PolicyError, match="differencing"):
        request(data, range(43))


@pytest.mark.parametrize("restart", [True, False])
def test_another_order_of_the_same_records(restart):
    """A new alignment changes the order of the records; groups still contain the same records."""
    numbers = RNG.permutation(40)
    data = site_of(table_of(range(40)))
    request(data, range(20))
    if restart:
        data = later(data, table_of(range(40), "1" * 16, numbers))
    else:
        data.table.keep("1" * 16, numbers)
    request(data, range(20))
    assert len(data.memory.released.spaces.patterns) == 1
    with pytest.raises(PolicyError, match="differencing"):
        request(data, range(22))
    request(data, range(30))


def test_a_group_that_keeps_to_old_records_passes_next_to_few_new_ones():
    data = site_of(table_of(range(40)))
    request(data, range(40))
    data = later(data, table_of(range(42)))
    request(data, range(40))
    with pytest.raises(PolicyError, match="differencing"):
        request(data, range(42))


def test_a_sum_from_before_and_one_from_after_a_record_was_corrected():
    """Attack: their difference is that of what one record held and holds."""
    data = site_of(table_of(range(40)))
    request(data, range(40))
    data = later(data, table_of(range(40), corrected=[7]))
    with pytest.raises(PolicyError, match="differencing"):
        request(data, range(40))
    request(data, [k for k in range(40) if k not in range(5, 10)])
    # Where it is as it was, the sums of then are those of now.
    data = later(data, table_of(range(40)))
    request(data, range(40))


def test_records_that_have_got_another_column_are_known_by_their_keys():
    data = site_of(table_of(range(40)))
    request(data, range(40))
    data = later(data, table_of(range(42), more=["z"]))
    request(data, range(40))
    with pytest.raises(PolicyError, match="differencing"):
        request(data, range(42))
