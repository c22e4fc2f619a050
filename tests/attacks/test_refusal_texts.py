"""Refusals by different rules about rows are the same bytes: what refused follows from none of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.disclosure.refusals import refusal_text
from fedstat.federation.message import pack_refusal

pytestmark = pytest.mark.filterwarnings("ignore")

N = 90
PUBLISHED = {
    "g": {"kind": "category", "levels": ["a", "b", "c"]},
    "h": {"kind": "category", "levels": ["a", "b", "c"]},
    "x": {"kind": "number", "range": [0.0, 1e9]},
    "y": {"kind": "number", "range": [0.0, 1.0], "levels": [0, 1]},
}


def table():
    rng = np.random.default_rng(2)
    return pd.DataFrame(
        {
            "site": np.repeat(["A", "B", "C"], N),
            "g": np.resize(list("abc"), 3 * N),
            "h": np.resize(list("aabbcc"), 3 * N),
            "x": rng.uniform(1, 9, 3 * N).round(1),
            "y": rng.integers(0, 2, 3 * N),
        }
    )


def rare_level(frame):
    frame.loc[0, "g"], frame.loc[1:, "g"] = "c", np.resize(list("ab"), 3 * N - 1)


def rare_outcome(frame):
    frame.loc[: N - 1, "y"] = 0
    frame.loc[0, "y"] = 1


def few_rows(frame):
    frame.loc[3 : N - 1, "x"] = np.nan


def one_large(frame):
    frame.loc[0, "x"] = 1e8


def constant_column(frame):
    frame.loc[: N - 1, "h"] = "a"
    frame.loc[: N - 1, "g"] = "a"
    frame.loc[0, "g"] = "b"


REASONS = {
    "a rare level": (rare_level, "minimum rows per level"),
    "a rare outcome": (rare_outcome, "minimum events"),
    "few rows": (few_rows, "minimum count"),
    "a large value": (one_large, "minimum rows per level"),
    "a level of one row": (constant_column, "minimum rows per level"),
}


def refused(change):
    """Refusal of site A, as a packed message, and what is in its ledger and its log."""
    frame = table()
    change(frame)
    names = frame["site"].unique()
    partition = fs.ClientPartition.from_frame(
        frame, by="site", policy="strict", published=dict.fromkeys(names, PUBLISHED)
    )
    with pytest.raises(PolicyError) as caught:
        fs.GLORE.from_formula("y ~ x + C(g) + C(h)", partition).fit()
    site = partition.sites["A"]
    (entry,) = [entry for entry in site.site_ledger.present.entries if entry.kind == "refusal"]
    return caught.value, pack_refusal("A", caught.value), entry.rule, site.refusals.reasons[-1]


@pytest.fixture(scope="module")
def replies():
    return {name: refused(change) for name, (change, _) in REASONS.items()}


@pytest.mark.parametrize("name", REASONS)
def test_the_owner_reads_the_rule_and_the_analyst_one_word(replies, name):
    error, _, entered, reason = replies[name]
    assert (error.rule, error.site, error.array) == ("rows", "A", "")
    assert entered == "PolicyError (rows)"
    assert f"({REASONS[name][1]})" in reason


def test_refusals_by_different_rules_are_the_same_bytes(replies):
    assert len({packed for _, packed, _, _ in replies.values()}) == 1
    assert len({reason for _, _, _, reason in replies.values()}) == len(replies)


def test_a_refusal_names_terms_keys_and_remedies_of_the_request(replies):
    (text,) = {str(error) for error, *_ in replies.values()}
    assert (
        "Terms C(g), C(h), y (min_level_count, products): merge levels that are rare, alone or together"
        in text
    )
    assert "(min_count, remember)" in text and "the 2 likeliest follow" in text
    assert "max_share" not in text and "min_events" not in text


def test_a_rule_that_the_owner_switched_off_is_not_named():
    requested = RowsRequest("y", ("y",), ("C(g)", "x"), ("g", "x")).requested()
    keys = ("min_level_count", "products", "min_count", "remember")
    without = fs.Policy(min_level_count=0, products="any", min_count=0, remember="nothing", max_share=0.2)
    strict, open_ = (refusal_text("A", one, requested, {}) for one in (fs.Policy.strict(), fs.Policy.open()))
    off = {"min_level_count": 0, "min_events": 0, "min_count": 0, "remember": "nothing"}
    none = refusal_text("A", fs.Policy(**off), requested, {})
    assert all(key in strict for key in keys) and "C(g)" in strict
    assert "Columns x, y (max_share)" in refusal_text("A", without, requested, {})
    assert "products" not in open_ and "max_share" not in open_ and "min_level_count" in open_
    assert none == "A: refused for a reason that depends on rows; the owner's log has the reason"


def test_an_own_fit_that_fails_counts_as_one_refusal_for_each_model():
    frame = table()
    first = frame["site"] == "A"
    frame.loc[first, "y"] = (frame.loc[first, "x"] > 5.0) * 1
    names = frame["site"].unique()
    partition = fs.ClientPartition.from_frame(
        frame, by="site", policy="strict", published=dict.fromkeys(names, PUBLISHED)
    )
    site = partition.sites["A"]
    for right, counted in (("x", 1), ("x", 1), ("x + I(x**2)", 2)):
        fit = fs.GLORE.from_formula(f"y ~ {right}", partition).fit()
        assert fit.heterogeneity.sites.loc["A", "problem"] == "not shown"
        assert site.site_ledger.refusals[""] == counted
    assert "separated" in site.refusals.reasons[0] and "separated" not in str(fit.summary())


def test_a_column_that_is_not_published_is_to_be_published():
    frame = table().assign(secret=1.0)
    partition = fs.ClientPartition.from_frame(
        frame, by="site", policy="strict", published=dict.fromkeys("ABC", PUBLISHED)
    )
    with pytest.raises(fs.errors.DescriptionError, match=r"publish it in columns\.toml") as caught:
        fs.GLORE.from_formula("y ~ secret", partition).fit()
    assert "formulas" not in str(caught.value).replace("simple formulas", "")


def test_times_are_no_level_and_have_a_remedy():
    """Fewer times help where levels need not be merged; regressions on times name theirs as well."""
    partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital", policy="strict")
    model = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", partition, treatment="arm ~ age + stage")
    with pytest.raises(PolicyError, match=r"Terms stage, C\(arm\) \(min_level") as caught:
        model.fit(grid=6, until=36)
    expected = "Times Surv(months, died) (min_level_count): in curves, use fewer times (a wider grid=)"
    assert expected in str(caught.value)
    model.fit(grid=12, until=36)
