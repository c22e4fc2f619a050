"""Releases of a GLORE fit: aggregates, and the number of rows behind each."""

import numpy as np
import pytest
from pooled import partition, table

import fedstat as fs

FRAME = table()
ROWS = FRAME["site"].value_counts()


@pytest.fixture(scope="module")
def result():
    return fs.GLORE.from_formula("binary ~ x + z + C(g)", partition(FRAME)).fit()


def released(result):
    frame = result.ledger.to_frame()
    return frame[frame["sender"] != "coordinator"]


def test_only_aggregates_leave_a_site(result):
    assert set(released(result)["kind"]) == {"aggregate", "control", "schema"}
    assert set(result.ledger.to_frame()["kind"]) <= {"aggregate", "control", "schema"}


def test_every_aggregate_names_the_rows_behind_it(result):
    aggregates = released(result).query("kind == 'aggregate'")
    assert (aggregates["entities"] == aggregates["sender"].map(ROWS)).all()


def test_no_array_grows_with_the_rows(result):
    largest = max(int(np.prod(shape)) for shape in result.ledger.to_frame()["shape"])
    p = len(result.params)
    assert largest <= max(p * p, 3 * p)


def test_the_sites_keep_the_same_ledger(result):
    for name, site in result.model.partition.sites.items():
        own = [entry for entry in site.ledger.entries if entry.kind == "aggregate"]
        theirs = released(result).query("sender == @name and kind == 'aggregate'")
        assert [entry.array for entry in own] == theirs["array"].tolist()
        assert {entry.entities for entry in own} == {ROWS[name]}


def test_the_summary_says_what_left(result):
    text = str(result.summary())
    assert "aggregate" in text
    assert "per entity" not in text
