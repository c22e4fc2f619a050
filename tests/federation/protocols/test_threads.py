"""Sites in one process that answer in threads: the same numbers to the bit, and the same ledger."""

import threading

import numpy as np
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.protocols import engine

HOSPITALS = fs.datasets.make_hospitals()


@pytest.fixture
def threads(monkeypatch):
    """Have sites of any number of rows answer in threads, and see which did."""
    monkeypatch.setattr(engine, "MANY_ROWS", 0)
    monkeypatch.setattr(engine, "processors", lambda: 3)
    seen = set()
    ask = engine.LocalEngine._ask

    def asked(self, request):
        seen.add(threading.current_thread().name)
        return ask(self, request)

    monkeypatch.setattr(engine.LocalEngine, "_ask", asked)
    return seen


def rows():
    partition = fs.ClientPartition.from_frame(HOSPITALS, by="hospital")
    return fs.GLORE.from_formula("num > 0 ~ age + C(cp)", partition).fit()


def columns():
    data = fs.datasets.make_blocks(300, (2, 2), missing=(0.2, 0.2), seed=1)
    return fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(data.frames, on="id")).fit()


def times():
    partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    return fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(arm)", partition).fit()


@pytest.mark.parametrize("fit", [rows, columns, times])
def test_a_fit_in_threads_is_that_of_one_thread(monkeypatch, threads, fit):
    found = fit()
    assert len(threads - {"MainThread"}) > 1
    monkeypatch.setattr(engine, "MANY_ROWS", 10**9)
    one = fit()
    np.testing.assert_array_equal(found.params, one.params)
    np.testing.assert_array_equal(found.bse, one.bse)
    passed = [result.ledger.to_frame()[["sender", "step", "array"]] for result in (found, one)]
    assert passed[0].equals(passed[1])


def test_many_sites_of_few_rows_answer_in_one_thread(monkeypatch, threads):
    """A thousand sites of 200 rows took a third more time in threads."""
    monkeypatch.setattr(engine, "MANY_ROWS", len(HOSPITALS) // 3)
    rows()
    assert threads == {"MainThread"}


def test_the_first_refusal_is_raised_and_all_are_in_the_ledger(threads):
    strict = fs.Policy(families=frozenset({"schema", "secure"}))
    policies = {"Cleveland": strict, "Hungary": strict}
    hospitals = HOSPITALS["hospital"].unique()
    policies |= {name: fs.Policy() for name in hospitals if name not in policies}
    partition = fs.ClientPartition.from_frame(HOSPITALS, by="hospital", policies=policies)
    with pytest.raises(PolicyError, match="Cleveland"):
        fs.GLORE.from_formula("num > 0 ~ age", partition)
    refused = [
        name
        for name, site in partition.sites.items()
        if "refusal" in {event.kind for _, event in site.site_ledger.events}
    ]
    assert refused == ["Cleveland", "Hungary"]
