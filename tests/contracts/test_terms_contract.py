"""Every released sum has terms that the release history compares, or a stated reason why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contracts.terms import FURTHER_WEIGHTS, stated

from fedstat.errors import DisclosureError
from fedstat.federation.disclosure.facts import EntityCount, SummedProducts
from fedstat.federation.disclosure.family import (
    WITHOUT_TERMS,
    include,
    state_without_terms,
    step,
    sums_without_terms,
)
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.message import Step, aggregate

load_families()
SUM = aggregate("sums of columns")


def entered() -> Iterator[tuple[str, str, Step]]:
    for family, steps in FAMILIES.items():
        for name, one in steps.items():
            if getattr(one.run, "__module__", "").startswith(("fedstat.", "functools")):
                yield family, name, one  # and no family of another test


def test_a_sum_has_terms_or_a_reason_and_no_reason_is_needless():
    lacking = {
        (family, name): [one.given[array] for array in sums_without_terms(one)]
        for family, name, one in entered()
    }
    for (family, name), arrays in lacking.items():
        assert family in WITHOUT_TERMS or all(one.without_terms for one in arrays), (family, name)
    for family, name in stated():
        with_sums = {of for (of, step), arrays in lacking.items() if arrays and step in (name, step)}
        assert family in with_sums if name == "*" else lacking[family, name], (family, name)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", {})


def test_a_family_without_terms_does_not_install(toy):
    with pytest.raises(DisclosureError, match="family 'toy', step 'add': array 'sum' is a sum without terms"):
        step("toy", releases={"sum": SUM}, rows_behind=(EntityCount,), name="add")(dict)
    with pytest.raises(DisclosureError, match="family 'toy', step 'fit': array 'text' is a sum without"):
        step("toy", replies=SUM, rows_behind=(EntityCount,), name="fit")(dict)
    of_another = next(one for _, name, one in entered() if name == "sum_uneven_curves")
    lacking = {"x": aggregate("sums", behind=(EntityCount,))}
    with pytest.raises(DisclosureError, match="or a reason in without_terms"):
        include("toy", {"shared": of_another, "own": Step(dict, {}, lacking)})
    assert not FAMILIES["toy"]


def test_terms_or_a_reason_install(toy, monkeypatch):
    step("toy", releases={"sum": SUM}, rows_behind=(EntityCount, SummedProducts), name="add")(dict)
    said = aggregate("one bit", behind=(EntityCount,), without_terms="one bit")
    step("toy", releases={"bit": said}, name="tell")(dict)
    monkeypatch.setitem(WITHOUT_TERMS, "toy", "")
    assert state_without_terms("toy", "sums of one owner") == "toy"
    step("toy", releases={"sum": SUM}, rows_behind=(EntityCount,), name="multiply")(dict)
    assert [*FAMILIES["toy"]] == ["add", "tell", "multiply"]
    assert stated()["toy", "*"] == "sums of one owner" and stated()["toy", "tell"] == "one bit"


@pytest.mark.parametrize(("family", "name"), FURTHER_WEIGHTS)
def test_a_step_with_further_weights_exists_and_has_terms(family, name):
    assert not sums_without_terms(FAMILIES[family][name])
