"""Bytes and back, and what is not a message."""

import json

import numpy as np
import pytest
import safetensors.numpy

from fedstat.errors import MessageError
from fedstat.federation.message import (
    ArrayDeclaration,
    Reply,
    Request,
    check_arrays,
    pack,
    pack_reply,
    pack_request,
    unpack,
    unpack_reply,
    unpack_request,
)

ARRAYS = {
    "matrix": np.arange(6.0).reshape(2, 3),
    "slice": np.arange(12.0).reshape(3, 4)[:, ::2],
    "scalar": np.array(3.5),
    "whole": np.array([1, -2, 2**62]),
    "flag": np.array([True, False]),
    "empty": np.empty((0, 3)),
    "tiny": np.array([5e-324, -0.0, 1.7e308]),
}


def test_arrays_come_back_as_they_were():
    header, arrays = unpack(pack({"a": "b", "ü": '{"x": "→"}'}, ARRAYS))
    assert header == {"a": "b", "ü": '{"x": "→"}'}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert arrays[name].tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("names", [(), ("whole", "flag"), tuple(ARRAYS), tuple(reversed(ARRAYS))])
def test_the_bytes_are_those_of_safetensors(names):
    arrays = {f'{name}"\\\n\x01\x7fü→': ARRAYS[name] for name in names} | {"box": np.zeros(3, dtype=np.uint8)}
    header = {"text": '{"x": "→\u2028\t"}', "a": ""}
    metadata = {"fedstat": json.dumps(header, ensure_ascii=False, sort_keys=True)}
    complete = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    assert pack(header, arrays) == safetensors.numpy.save(complete, metadata=metadata)


def test_ask_and_reply_come_back_as_they_were():
    request = Request("Bank", "vfem", "step", {"z": np.ones(3)}, "abc", '{"a": 1}')
    back = unpack_request(pack_request(request))
    assert (back.site, back.family, back.step, back.session, back.text) == (
        "Bank",
        "vfem",
        "step",
        "abc",
        '{"a": 1}',
    )
    reply = unpack_reply(pack_reply(Reply("Bank", {"z": np.ones(3)}, "text", 17)))
    assert (reply.site, reply.text, reply.entities) == ("Bank", "text", 17)


@pytest.mark.parametrize(
    "array", [np.ones(2, dtype=np.float32), np.array(["a"]), np.array([None]), np.ones(2, dtype=complex)]
)
def test_other_types_do_not_travel(array):
    with pytest.raises(MessageError, match="'x' is of type"):
        pack({}, {"x": array})


def test_an_ask_is_not_a_reply():
    with pytest.raises(MessageError, match="not a request"):
        unpack_request(pack_reply(Reply("Bank", {})))
    with pytest.raises(MessageError, match="not a reply"):
        unpack_reply(pack_request(Request("Bank", "vfem", "step")))


def test_every_truncation_is_refused():
    complete = pack_request(Request("Bank", "vfem", "step", ARRAYS))
    for length in range(len(complete)):
        with pytest.raises(MessageError, match="bytes that are not a fedstat message"):
            unpack_request(complete[:length])


def test_random_bytes_are_refused():
    generator = np.random.default_rng(0)
    for _ in range(2_000):
        data = generator.bytes(int(generator.integers(0, 200)))
        with pytest.raises(MessageError):
            unpack_request(data)


def test_flipped_bytes_never_raise_anything_else():
    complete = bytearray(pack_request(Request("Bank", "vfem", "step", {"z": np.ones(3)})))
    generator = np.random.default_rng(1)
    for _ in range(2_000):
        data = bytearray(complete)
        data[int(generator.integers(len(data)))] = int(generator.integers(256))
        try:
            read = unpack_request(bytes(data))
        except MessageError:
            continue
        # A message that can be read is a request that another sender could have written.
        assert unpack_request(pack_request(read)).step == read.step


DECLARED = {
    "z": ArrayDeclaration("per entity", "residual"),
    "b": ArrayDeclaration("control", "b", 2, optional=True),
}


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({}, r"missing \['z'\]"),
        ({"z": np.ones(2), "q": np.ones(2)}, r"unknown \['q'\]"),
        ({"z": np.ones((2, 2))}, "'z' has 2 dimensions, expected 1"),
        ({"z": np.array([1.0, np.nan])}, "'z' holds values that are not finite"),
        ({"z": np.array([np.inf])}, "not finite"),
        ({"z": np.ones(1), "b": np.ones(1)}, "'b' has 1 dimensions, expected 2"),
    ],
)
def test_arrays_are_held_against_their_declaration(arrays, complaint):
    with pytest.raises(MessageError, match=complaint):
        check_arrays("Bank, step 'x'", DECLARED, arrays)


def test_optional_arrays_may_be_left_out():
    check_arrays("Bank", DECLARED, {"z": np.ones(2)})
    check_arrays("Bank", DECLARED, {"z": np.ones(2), "b": np.ones((1, 1))})
    with pytest.raises(MessageError, match="missing"):
        check_arrays("Bank", DECLARED, {"b": np.ones((1, 1))})
