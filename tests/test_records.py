"""Records come back from plain values as they were; nothing else is read, and no error holds a value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pytest

from fedstat.codec import Minimum, from_json, from_plain, to_json, to_plain
from fedstat.errors import DesignError, MessageError, ModelError
from fedstat.typing import Array, Bools, Floats


class Row(NamedTuple):
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Site:
    name: str
    n: Annotated[int, Minimum(1)]
    share: float | None = None
    kind: Literal["open", "closed"] = "open"
    seen: int = field(default=0, init=False)

    def check(self) -> None:
        if self.name == "nowhere":
            raise DesignError("no such site")


@dataclass(frozen=True, slots=True)
class Study:
    sites: tuple[Site, ...]
    pair: tuple[str, float]
    rows: list[Row]
    counts: Mapping[int, int]
    level: str | int | float | bool
    state: Any
    key: bytes = b""
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    sites: Annotated[tuple[Site, ...], "K"]
    beta: Annotated[Floats, "p"]
    by_site: Annotated[Floats, "K p"] | None
    used: Bools
    anything: Array
    by_name: Mapping[str, Floats]


STUDY = Study(
    (Site("A «ü»", 3), Site("B", 4, 0.1 + 0.2, "closed")),
    ("x", -0.0),
    [Row("a", ()), Row("b", (2, 3))],
    {2: 5, 11: 7},
    True,
    {"mean": [1.5, {"deeper": None}]},
    b"\x00\xff",
    ("u", "v"),
)


def fit(**changes):
    parts = {
        "sites": STUDY.sites,
        "beta": np.array([np.nan, -0.0, np.inf]),
        "by_site": np.arange(6.0).reshape(2, 3),
        "used": np.array([True, False]),
        "anything": np.arange(4),
        "by_name": {"a.b": np.ones(1), "größe → 1": np.ones((2, 0))},
    }
    return Fit(**(parts | changes))


def test_a_record_comes_back():
    assert from_json(Study, to_json(STUDY), "it") == STUDY
    assert str(from_json(Study, to_json(STUDY), "it").pair[1]) == "-0.0"


def test_plain_values_are_those_of_json():
    plain = to_plain(STUDY)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["rows"] == [["a", []], ["b", [2, 3]]] and plain["counts"] == {"2": 5, "11": 7}


def test_numpy_numbers_become_plain():
    plain = to_plain(Site("A", np.int64(3), np.float64(0.1)))
    assert [type(plain["n"]), type(plain["share"])] == [int, float]


@pytest.mark.parametrize("changes", [{}, {"by_site": None}], ids=str)
def test_arrays_come_back_to_the_bit(changes):
    arrays, before = {}, fit(**changes)
    plain = json.loads(json.dumps(to_plain(before, arrays)))
    after = from_plain(Fit, plain, "it", arrays=arrays)
    for name in ("beta", "used", "anything"):
        assert getattr(after, name).tobytes() == getattr(before, name).tobytes()
    assert after.by_name.keys() == before.by_name.keys()
    assert (after.by_site is None) == (before.by_site is None)
    assert "beta" in arrays and "by_name.a.b" in arrays


def test_names_that_make_the_same_place_stay_apart():
    arrays = {}
    names = {"x" * 70 + end: np.full(1, i) for i, end in enumerate("ab")}
    plain = to_plain(fit(by_name={name: array.astype(float) for name, array in names.items()}), arrays)
    after = from_plain(Fit, plain, "it", arrays=arrays)
    assert [array[0] for array in after.by_name.values()] == [0.0, 1.0]


@pytest.mark.parametrize("name", ["beta", "by_site", "used"])
def test_arrays_that_do_not_belong_are_refused(name):
    arrays = {}
    plain = to_plain(fit(), arrays)
    with pytest.raises(MessageError, match=f"'{name}': its array is absent"):
        from_plain(Fit, plain, "it", arrays={k: v for k, v in arrays.items() if k != name})
    with pytest.raises(MessageError, match="unknown arrays: 'rows'"):
        from_plain(Fit, plain, "it", arrays=arrays | {"rows": np.ones(2)})
    with pytest.raises(MessageError, match=f"'{name}': expected an array of"):
        from_plain(Fit, plain, "it", arrays=arrays | {name: np.zeros(arrays[name].shape, np.int64)})


@pytest.mark.parametrize(
    "change", [{"beta": np.ones(2)}, {"by_site": np.ones((3, 3))}, {"beta": np.ones((1, 3))}]
)
def test_shapes_that_do_not_belong_together_are_refused(change):
    arrays = {}
    plain = to_plain(fit(**change), arrays)
    with pytest.raises(MessageError, match="expected the shape"):
        from_plain(Fit, plain, "it", arrays=arrays)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sites": 3}, "'sites': expected a list, received a whole number"),
        ({"sites": [{"name": "A"}]}, r"'sites\[0\]': lacks n, share, kind"),
        ({"sites": [to_plain(STUDY.sites[0]) | {"n": 0}]}, r"'sites\[0\].n': expected at least 1"),
        (
            {"sites": [to_plain(STUDY.sites[0]) | {"n": True}]},
            "n': expected a whole number, received true or",
        ),
        ({"sites": [to_plain(STUDY.sites[0]) | {"kind": "secret"}]}, "expected one of 'open', 'closed'"),
        ({"sites": [to_plain(STUDY.sites[0]) | {"seen": 1}]}, "unknown entry 'seen'"),
        ({"pair": ["x"]}, "'pair': expected 2 entries, received 1"),
        ({"pair": ["x", float("nan")]}, "expected a number, received another one"),
        ({"pair": ["x", 10**400]}, "expected a number, received a whole number"),
        ({"rows": [["a"]]}, r"'rows\[0\]': expected 2 entries"),
        ({"counts": {"-1": 2}}, "'counts': expected keys that are whole numbers"),
        ({"level": None}, "'level': expected a text, received nothing"),
        ({"key": "secret"}, "'key': expected hexadecimal digits, received a text"),
        ({"state": {"mean": float("inf")}}, "'state': expected a number"),
        ({"secret": 1}, "unknown entry 'secret'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, told):
    with pytest.raises(ModelError, match=f"North: its answer: .*{told}") as refused:
        from_plain(Study, to_plain(STUDY) | change, "North: its answer", ModelError)
    assert "secret" not in str(refused.value) or "secret" in change


def test_fields_with_a_default_may_be_left_out_where_that_is_said():
    assert from_plain(Site, {"name": "A", "n": 2}, "it", defaults=True) == Site("A", 2)
    with pytest.raises(MessageError, match="it: lacks share, kind; known are name, n, share, kind"):
        from_plain(Site, {"name": "A", "n": 2}, "it")


def test_a_record_checks_itself():
    with pytest.raises(DesignError, match="no such site"):
        from_plain(Site, {"name": "nowhere", "n": 2}, "it", defaults=True)


def test_texts_without_end_are_refused():
    for text in ("[" * 100_000, "{", "", b"\xff", '{"a": 1}'):
        with pytest.raises(MessageError, match="it: "):
            from_json(Study, text, "it")
    deep = {}
    for _ in range(500):
        deep = {"deeper": deep}
    with pytest.raises(MessageError, match="'state': more than 20 levels deep"):
        from_plain(Study, to_plain(STUDY) | {"state": deep}, "it")


@dataclass(frozen=True, slots=True)
class More:
    x: float
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Fewer:
    x: float


@dataclass(frozen=True, slots=True)
class Either:
    one: More | Fewer
    two: Fewer | None = None


@pytest.mark.parametrize("one", [More(1.0), Fewer(1.0)])
def test_of_several_records_the_one_without_missing_fields_is_read(one):
    """Both may be read where fields with a default may be missing."""
    plain = to_plain(Either(one), {})
    del plain["two"]
    assert from_plain(Either, plain, "it", ModelError, defaults=True) == Either(one)
