"""Tables of two sites' columns: no cell of few entities, whatever the policy and the coordinator."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import FedstatError, MessageError, PolicyError
from fedstat.models.descriptive import columns
from fedstat.models.descriptive.columns import ColumnPair

N = 400
RNG = np.random.default_rng(7)
CATEGORY = {"kind": "category", "levels": ["no", "yes"]}


def partition(policy, few=None):
    """`few` entities have both of a and b; c differs from b by one entity."""
    first, second = np.arange(N) % 2 == 0, np.arange(N) % 3 == 0
    if few is not None:
        second = np.where(first, False, second)
        second[::2][:few] = True
    name = {True: "yes", False: "no"}
    one = pd.DataFrame({"id": np.arange(N), "a": pd.Series(first).map(name), "x": RNG.normal(50.0, 9.0, N)})
    two = pd.DataFrame({"id": np.arange(N), "b": pd.Series(second).map(name)})
    two["c"] = two["b"].where(two.index != 5, "yes")
    third = pd.DataFrame({"id": np.arange(N), "z": RNG.normal(size=N)})
    published = {
        "one": {"a": CATEGORY, "x": {"kind": "number", "range": [0, 100]}},
        "two": {"b": CATEGORY, "c": CATEGORY},
        "three": {"z": {"kind": "number", "range": [-9, 9]}},
    }
    frames = {"one": one, "two": two, "three": third}
    return fs.ClientPartition.from_frames(
        frames, on="id", policy=policy, published=published if policy == "strict" else None
    )


@pytest.mark.parametrize("policy", [None, "strict"])
@pytest.mark.parametrize(("few", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_cell_of_few_entities_between_sites(policy, few, refused):
    split = partition(policy, few)
    if refused:
        with pytest.raises(PolicyError, match=r"rows behind a product|depends on rows"):
            fs.crosstab(split, "a", "b")
    else:
        assert fs.crosstab(split, "a", "b").loc["yes", "yes"] == few


def test_means_by_a_group_of_few_entities_are_refused():
    one = pd.DataFrame({"id": np.arange(N), "x": np.where(np.arange(N) % 2, 0.0, RNG.normal(50, 9, N))})
    two = pd.DataFrame(
        {"id": np.arange(N), "b": np.where((np.arange(N) % 2 == 1) | (np.arange(N) == 0), "u", "v")}
    )
    split = fs.ClientPartition.from_frames({"one": one, "two": two}, on="id")
    # Of group u, only one entity has a number that is not zero: its sum would be that number.
    with pytest.raises(PolicyError, match="rows behind a product"):
        fs.table_one(split, "x", by="b")


def test_a_coordinator_that_leaves_the_count_out_is_refused(monkeypatch):
    monkeypatch.setattr(
        columns, "SecureProductSession", lambda *given, least: columns_session(*given), raising=True
    )
    for policy in (None, "strict"):
        with pytest.raises(FedstatError) as error:
            ColumnPair(partition(policy, 1), ("C(a)", "C(b)")).fit()
        assert isinstance(error.value, MessageError | PolicyError)
        assert "counted" in str(error.value) or "requires a count" in str(error.value)


columns_session = columns.SecureProductSession


def test_groups_that_differ_by_one_person_are_refused():
    split = partition("strict")
    fs.table_one(split, "x", by="b")
    fs.table_one(split, "x", by="b")  # a repetition reveals nothing new
    with pytest.raises(PolicyError):
        fs.table_one(split, "x", by="c")
