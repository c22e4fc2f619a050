"""Columns that owners publish: in one process, and for an analyst who connects."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, PartitionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.site import Site
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.schema import request_schemas
from fedstat.federation.tables.published import PublishedColumn, write_published

GIVEN = {
    "income": PublishedColumn("number", (0.0, 1e6)),
    "grown": PublishedColumn("number", (1.0, 1e6)),
    "region": PublishedColumn("category", levels=("north", "south")),
}


def frames():
    rng = np.random.default_rng(3)
    tables = {}
    for site in "ABC":
        income = rng.uniform(10.0, 1000.0, 90)
        region = rng.choice(["north", "south"], 90)
        sick = rng.integers(0, 2, 90)
        tables[site] = pd.DataFrame({"income": income, "grown": income + 1, "region": region, "sick": sick})
    return tables


def partition(**given):
    return fs.ClientPartition.from_frames(frames(), layout="horizontal", policy="strict", **given)


def test_a_rehearsal_takes_descriptions_and_judges_by_them(tmp_path):
    path = tmp_path / "columns.toml"
    everything = GIVEN | {"sick": PublishedColumn("number", (0.0, 1.0), (0, 1))}
    path.write_text(write_published(everything))
    plain = {
        name: {"kind": one.kind, "range": list(one.range)} for name, one in everything.items() if one.range
    }
    published = {"A": path, "B": everything, "C": plain | {"region": everything["region"]}}
    rehearsed = partition(published=published)
    assert fs.GLORE.from_formula("sick ~ log(grown)", rehearsed).fit().converged
    with pytest.raises(DescriptionError, match="its published range is not above 0"):
        fs.GLORE.from_formula("sick ~ log(income)", rehearsed).fit()
    reported = rehearsed.published()
    assert reported.loc[("A", "income"), ["kind", "low", "high"]].tolist() == ["number", 0.0, 1e6]
    assert reported.loc[("C", "region"), "levels"] == ("north", "south")


def test_without_descriptions_they_are_proposed_where_the_policy_needs_them():
    assert set(partition().published().loc["A"].index) >= {"income", "grown", "region", "sick"}
    opened = fs.ClientPartition.from_frames(frames(), layout="horizontal")
    assert set(opened.published().index.get_level_values("column")) == {"site"}


@pytest.mark.parametrize(
    ("published", "match"),
    [
        ({"D": GIVEN}, "'D', which is no site"),
        ({"A": "nowhere.toml"}, "cannot be read"),
        ({"A": {"income": {"kind": "number", "range": [0.0, 20.0]}}}, "values outside its published range"),
        ({"A": {"income": {"kind": "figure"}}}, "published"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(published, match):
    with pytest.raises(PartitionError, match=match):
        partition(published=published)


def test_the_description_travels_with_the_schema():
    site = Site("A", frames()["A"], fs.Policy.strict(), site_column="site", published=GIVEN)
    schema = LocalEngine({"A": site}).run(request_schemas(("A",), "s"), Ledger())["A"]
    assert schema.published == GIVEN
