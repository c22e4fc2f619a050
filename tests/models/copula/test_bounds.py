"""The public description of columns: what is read, and what is refused with a way out."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.federation.tables.published import as_published, write_published
from fedstat.models.copula.bounds import Bounds, asinh, log
from fedstat.models.copula.margins import Bins, Margin, tree_depth

GIVEN = {
    "limit": (0, 1000),
    "bill": asinh(-200, 5000, scale=5),
    "price": log(1, 1e6),
    "status": range(-2, 9),
    "sex": ["male", "female"],
    "smoker": [False, True],
}


def test_a_file_says_the_same(tmp_path):
    bounds = Bounds(GIVEN)
    (tmp_path / "bounds.toml").write_text(write_published(bounds.of(list(bounds))))
    assert dict(Bounds.from_toml(tmp_path / "bounds.toml")) == dict(bounds)


def test_what_sites_have_published_serves():
    frame = pd.DataFrame({"x": [0.5, 1.5], "y": ["a", "b"]})
    published = {
        "A": {"x": {"kind": "number", "range": [0, 2]}},
        "B": {"y": {"kind": "category", "levels": ["a", "b"]}},
    }
    partition = fs.ClientPartition.from_frame(frame, columns={"A": ["x"], "B": ["y"]}, published=published)
    bounds = Bounds.from_sites(partition)
    assert bounds["x"].range == (0.0, 2.0)
    assert bounds["y"].levels == ("a", "b")


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ((3, 1), "ascending"),
        ((1, 1), "ascending"),
        ((0, np.inf), "ascending"),
        ([1, 1], "twice"),
        ([1], "constant"),
        ("abc", "list of levels"),
        (range(0, 1002, 2), "500"),
    ],
)
def test_a_bound_that_is_none_names_the_column(bound, words):
    with pytest.raises(ModelError, match=f"column 'x'.*{words}"):
        Bounds({"x": bound})


def test_a_logarithm_needs_a_range_above_zero():
    with pytest.raises(ModelError, match="above zero"):
        log(0, 5)


def test_columns_without_bounds_are_listed_with_a_skeleton():
    with pytest.raises(ModelError, match=r"2 of 3 columns") as caught:
        Bounds({"a": (0, 1)}).of(["a", "b", "c"])
    assert 'fs.Bounds({\n    "b": (low, high),\n    "c": (low, high),\n})' in str(caught.value)


def test_a_scale_of_a_description_is_checked():
    with pytest.raises(fs.errors.PartitionError, match="logarithmic"):
        as_published({"x": {"kind": "number", "range": [-1, 5], "scale": "log"}}, "here")


def bins(name, depth=5):
    return Bins.of(name, Bounds(GIVEN)[name], depth)


def test_values_become_bins():
    codes = bins("limit").code(pd.Series([-np.inf, 0.0, 31.3, 999.9, 5000.0, np.inf, np.nan]))
    assert codes.tolist() == [0, 0, 1, 31, 31, 31, -1]
    assert bins("sex").code(pd.Series(["female", None, "male"])).tolist() == [1, -1, 0]
    assert bins("status").code(pd.Series([-2.0, 8.0, np.nan])).tolist() == [0, 10, -1]
    for name in ("bill", "price"):
        edges = bins(name).edges
        middle = pd.Series((edges[1:] + edges[:-1]) / 2)
        assert bins(name).code(middle).tolist() == list(range(32))


def test_values_that_are_no_level_or_number_are_in_no_bin():
    assert bins("sex").code(pd.Series(["male", "other", 3, [1]])).tolist() == [0, -1, -1, -1]
    assert bins("limit").code(pd.Series(["a", 40, None], dtype=object)).tolist() == [-1, 1, -1]


def test_one_record_moves_counts_by_their_sensitivity_and_no_more():
    rng = np.random.default_rng(2)
    for name in ("limit", "status"):
        column = bins(name)
        codes = rng.integers(column.count, size=50)
        most = 0
        for other in range(column.count):
            moved = codes.copy()
            moved[0] = other
            most = max(most, int(((column.tally(moved) - column.tally(codes)) ** 2).sum()))
        assert most == column.squared_sensitivity


def test_depth_is_the_public_rule():
    assert tree_depth(10, 1e-4) == 5
    assert tree_depth(70_000, 1.33e-4) == 10


def test_without_noise_a_margin_is_the_histogram():
    rng = np.random.default_rng(3)
    column = bins("limit", 6)
    x = pd.Series(rng.uniform(0, 1000, 5000))
    codes = column.code(x)
    margin = Margin.of_counts(column, column.tally(codes).astype(float), 5000)
    known = np.bincount(codes, minlength=64) / 5000
    middle = slice(8, 56)  # outside, tails are made to fall
    assert margin.probabilities[middle] == pytest.approx(known[middle], abs=1e-12)
    assert margin.probabilities @ margin.scores == pytest.approx(0.0, abs=1e-12)
    drawn = margin.quantile(rng.standard_normal(20_000))
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(x, [0.1, 0.5, 0.9]), rel=0.05)


def test_levels_come_back_as_what_they_were():
    rng = np.random.default_rng(4)
    for name in ("status", "sex", "smoker"):
        column = bins(name)
        margin = Margin(column, np.full(column.count, 1 / column.count))
        assert set(margin.quantile(rng.standard_normal(500)).tolist()) == set(column.levels)
