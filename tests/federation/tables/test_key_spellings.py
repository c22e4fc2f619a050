"""Keys that sites write differently: types, spellings and names of the key."""

import decimal
import unicodedata
import uuid
import warnings

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PartitionError, SpellingWarning

N = 50
DAYS = pd.date_range("2001-01-01", periods=N)


def partition(left, right, on="id", names=("id", "id")):
    y = pd.DataFrame({names[0]: left, "y": np.arange(N, dtype=float)})
    x = pd.DataFrame({names[1]: right, "x": np.arange(N) % 7.0})
    return fs.ClientPartition.from_frames({"A": y, "B": x}, on=on)


def matches(found):
    return int(found.presence().all(axis=1).sum())


CASES = {
    "dates against times": (
        [day.date() for day in DAYS],
        list(DAYS),
        "with pd.to_datetime",
        lambda left, right: (pd.to_datetime(pd.Series(left)), right),
    ),
    "a time zone at one": (
        DAYS.tz_localize("UTC"),
        DAYS,
        r'tz_convert\("UTC"\)',
        lambda left, right: (pd.Series(left).dt.tz_convert("UTC").dt.tz_localize(None), right),
    ),
    "uuid": (
        [uuid.UUID(int=k) for k in range(N)],
        [uuid.UUID(int=k) for k in range(N)],
        r"values of type UUID.*astype\(str\)",
        lambda left, right: (pd.Series(left).astype(str), pd.Series(right).astype(str)),
    ),
    "decimal": (
        [decimal.Decimal(k) for k in range(N)],
        [decimal.Decimal(k) for k in range(N)],
        r"values of type Decimal.*astype\(str\)",
        lambda left, right: (pd.Series(left).astype(str), pd.Series(right).astype(str)),
    ),
    "bytes": (
        [b"k%d" % k for k in range(N)],
        [b"k%d" % k for k in range(N)],
        r"values of type bytes.*decode",
        lambda left, right: (pd.Series(left).str.decode("utf-8"), pd.Series(right).str.decode("utf-8")),
    ),
    "leading zeros against numbers": (
        [f"{k:05d}" for k in range(N)],
        list(range(N)),
        "pd.to_numeric, as it has leading zeros",
        lambda left, right: (pd.to_numeric(pd.Series(left)), right),
    ),
    "text against numbers": (
        [str(k) for k in range(N)],
        list(range(N)),
        "astype",
        lambda left, right: (pd.Series(left).astype("int64"), right),
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("swapped", [False, True])
def test_types_of_keys_have_a_remedy_that_works(case, swapped):
    left, right, remedy, cast = CASES[case]
    pair = (right, left) if swapped else (left, right)
    with pytest.raises(PartitionError, match=remedy):
        partition(*pair)
    assert matches(partition(*cast(left, right))) == N


@pytest.mark.parametrize(
    ("what", "spell"),
    [
        ("blanks", lambda k: f"ä{k} "),
        ("case", lambda k: f"Ä{k}"),
        ("accents in another encoding", lambda k: unicodedata.normalize("NFD", f"ä{k}")),
    ],
)
def test_spellings_are_counted(what, spell):
    right = [spell(k) if k % 10 == 0 else f"ä{k}" for k in range(N)]
    with pytest.warns(SpellingWarning, match=rf"site 'B'.*5 of 50 keys match no other site.*{what}") as told:
        partition([f"ä{k}" for k in range(N)], right)
    assert not any(key in str(one.message) for one in told for key in ("ä10", "ä0"))


def test_zeros_and_no_match_at_all():
    with pytest.warns(SpellingWarning, match="50 of 50 keys match no other site.*leading zeros"):
        partition([f"{k:05d}" for k in range(1, N + 1)], [str(k) for k in range(1, N + 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition([f"a{k}" for k in range(N)], [f"a{k}" for k in range(N)])
        partition([f"a{k}" for k in range(N)], [f"b{k}" if k else "a0" for k in range(N)])


def test_a_name_of_the_key_at_each_site():
    keys = [f"a{k}" for k in range(N)]
    found = partition(keys, keys, on={"A": "pid", "B": "id"}, names=("pid", "id"))
    assert matches(found) == N and found.key == ("pid",)
    for on, match in (
        ({"A": "pid"}, "one name of a column for every site"),
        ({"A": "pid", "B": "none"}, "site 'B' has no key column 'none'"),
        ({"A": "pid", "B": "id", "C": "id"}, "one name of a column for every site"),
    ):
        with pytest.raises(PartitionError, match=match):
            partition(keys, keys, on=on, names=("pid", "id"))
    with pytest.raises(PartitionError, match="site 'B': column 'x' has the name of the key at another site"):
        partition(keys, keys, on={"A": "x", "B": "id"}, names=("x", "id"))
