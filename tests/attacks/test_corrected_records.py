"""Attack: fits before and after a correction, whose difference is what few records held and hold."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.disclosure.differencing import (
    check_level_difference,
    check_products,
    check_row_difference,
)
from fedstat.federation.disclosure.facts import LevelsRequested, RowsUsed, SummedProducts
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.table import FrameTable

SECRET = b"s" * 32
N = 200
RNG = np.random.default_rng(8)
FRAME = pd.DataFrame(
    {"id": np.arange(N), "x": RNG.normal(size=N), "g": np.where(np.arange(N) < 20, "rare", "common")}
)


def table_of(frame):
    table = FrameTable(frame.drop(columns="id"))
    table.key_columns = frame[["id"]]
    return table


def site_of(frame):
    return SiteData("Kiel", table_of(frame), None, fs.Policy.strict(), ReleaseHistory())


def later(data, frame):
    """The site with records that were read again."""
    return data.with_records(table_of(frame), lambda *_: "")


def corrected(rows, frame=FRAME, **values):
    changed = frame.copy()
    for name, value in (values or {"x": changed["x"].to_numpy()[list(rows)] + 1.0}).items():
        changed.loc[list(rows), name] = value
    return changed


def sums(data):
    """A fit: rows, levels, and products of the columns."""
    frame = data.frame
    used = np.ones(len(frame), dtype=bool)
    check_row_difference(data, None, RowsUsed(used))
    check_level_difference(data, None, LevelsRequested(used, {"g": ["common", "rare"]}))
    X = np.column_stack([frame["x"], frame["g"] == "rare"]).astype(float)
    check_products(
        data, None, SummedProducts(lambda: iter([X]), ("x", "g[rare]"), rows=np.arange(len(frame)))
    )


@pytest.mark.parametrize("few", [1, 2, 4])
def test_the_difference_of_two_fits_around_few_corrections_is_refused(few):
    data = site_of(FRAME)
    sums(data)
    data = later(data, corrected(range(100, 100 + few)))
    with pytest.raises(PolicyError):
        sums(data)


def test_both_versions_of_a_record_are_one_person():
    """Four persons are eight rows of the history, more than the minimum of five."""
    data = site_of(FRAME)
    sums(data)
    data = later(data, corrected(range(100, 104)))
    with pytest.raises(PolicyError, match="differencing"):
        check_row_difference(data, None, RowsUsed(np.ones(N, dtype=bool)))
    data = later(data, corrected(range(100, 105)))
    check_row_difference(data, None, RowsUsed(np.ones(N, dtype=bool)))


def test_many_corrections_of_which_few_are_in_a_level_are_refused():
    """Two of 30 corrected persons are in the rare level: the sums of this level would reveal the two."""
    data = site_of(FRAME)
    sums(data)
    data = later(data, corrected(range(18, 48)))
    with pytest.raises(PolicyError, match=r"'g\[rare\]'"):
        sums(data)
    data = later(data, corrected([*range(10, 20), *range(100, 120)]))
    sums(data)


def test_a_person_who_changes_the_level_is_not_revealed():
    data = site_of(FRAME)
    sums(data)
    data = later(data, corrected([0], g="common"))
    with pytest.raises(PolicyError):
        sums(data)


def test_corrections_in_several_steps_do_not_add_up_to_one_person():
    """Each state differs from the next by thirty persons, the first from the last by one."""
    data = site_of(FRAME)
    sums(data)
    data = later(data, corrected(range(100, 130)))
    sums(data)
    data = later(data, corrected([150]))
    with pytest.raises(PolicyError):
        sums(data)


def test_products_of_two_corrected_persons_are_found_although_they_are_four_rows():
    """Without the count of persons, two rows before and two after were enough rows."""
    data = site_of(FRAME)
    X = FRAME["x"].to_numpy()[:, None].copy()
    fact = SummedProducts(lambda: iter([X]), ("x",), rows=np.arange(N))
    check_row_difference(data, None, RowsUsed(np.ones(N, dtype=bool)))
    check_products(data, None, fact)
    data = later(data, corrected([100, 101]))
    X[[100, 101]] += 1.0
    with pytest.raises(PolicyError, match="rows behind a product"):
        check_products(data, None, fact)


@pytest.mark.parametrize("rows", [range(0), range(1), range(100, 140)])
def test_a_removed_record_keeps_its_level(rows):
    data = site_of(FRAME)
    sums(data)
    fewer = FRAME.drop(index=[*rows])
    data = later(data, fewer)
    if len(rows) in (0, 40):
        sums(data)
    else:
        with pytest.raises(PolicyError):
            sums(data)
    assert data.memory.released.spaces.n_rows == N
