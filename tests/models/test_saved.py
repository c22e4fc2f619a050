"""Results of every family in a file: they come back whole, nothing in it runs, other files are refused."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.federation.message import pack, unpack

FORMS = {"GLORE": "glm", "FedAvg": "fedavg", "VFEMRegression": "vfem", "VerticalGLM": "vglm"}


def fitted(family):
    rng = np.random.default_rng(4)
    table = pd.DataFrame({"x": rng.normal(size=300), "z": rng.normal(size=300)})
    table["y"] = (table["x"] + rng.logistic(size=300) > 0).astype(float)
    if family in ("GLORE", "FedAvg"):
        partition = fs.ClientPartition.from_frame(table.assign(site=["A", "B", "C"] * 100), by="site")
        options = {"rounds": 2, "seed": 1} if family == "FedAvg" else {}
    else:
        table["k"] = range(300)
        partition = fs.ClientPartition.from_frames(
            {"A": table[["k", "y", "x"]], "B": table[["k", "z"]]}, on="k"
        )
        options = {"cov_type": "none"} if family == "VFEMRegression" else {"lam": 0.1}
    return getattr(fs, family).from_formula("y ~ x + z", partition).fit(**options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each family."""
    folder = tmp_path_factory.mktemp("saved")
    for family in FORMS:
        fitted(family).save(folder / family)
    return folder


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FORMS)
def test_what_was_loaded_can_be_saved_again(files, family, tmp_path):
    again = tmp_path / "again"
    fs.load(files / family).save(again)
    (header, arrays), (other, others) = (unpack(path.read_bytes()) for path in (files / family, again))
    assert header["format"] == other["format"] and f" {FORMS[family]} results " in header["format"]
    for part in ("content", "ledger"):
        assert json.loads(other[part]) == json.loads(header[part])
    assert {k: v.tobytes() for k, v in others.items()} == {k: v.tobytes() for k, v in arrays.items()}


def test_a_ledger_of_an_earlier_version_is_read(files, tmp_path):
    header, arrays = unpack((files / "GLORE").read_bytes())
    ledger = json.loads(header["ledger"])
    waited = ledger.pop("waited")
    (tmp_path / "earlier").write_bytes(pack({**header, "ledger": json.dumps(ledger)}, arrays))
    found, now = fs.load(tmp_path / "earlier").ledger, fs.load(files / "GLORE").ledger
    assert found == now and now.waited == waited > found.waited == 0.0


@pytest.mark.parametrize("family", FORMS)
def test_nothing_in_the_file_runs(files, family):
    """A JSON header and flat arrays; no trace of a pickle."""
    data = (files / family).read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert isinstance(json.loads(data[8 : 8 + length]), dict)
    for sign in (b"\x80\x04\x95", b"\x80\x05\x95", b"cnumpy", b"numpy.core", b"numpy._core", b"copyreg"):
        assert sign not in data


@pytest.mark.parametrize("family", FORMS)
def test_a_truncated_file_is_refused(files, family, tmp_path):
    data, path = (files / family).read_bytes(), tmp_path / "cut"
    for length in np.linspace(0, len(data) - 1, 40).astype(int):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match="not a file of results that fedstat saved"):
            fs.load(path)


def test_garbage_is_refused(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "garbage"
    for size in (0, 1, 7, 8, 9, 100, 5_000):
        path.write_bytes(rng.bytes(size))
        with pytest.raises(ModelError, match="not a file of results that fedstat saved"):
            fs.load(path)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", "null", "3", '"text"', "[" * 100_000])
@pytest.mark.parametrize("family", FORMS)
def test_a_header_without_results_is_refused(files, family, content, tmp_path):
    header, _ = unpack((files / family).read_bytes())
    path = tmp_path / "result.fed"
    text = {} if content is None else {"content": content}
    path.write_bytes(pack({"format": header["format"]} | text, {"params": np.ones(2)}))
    with pytest.raises(ModelError, match=r"result\.fed: the file is incomplete"):
        fs.load(path)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({}, "expected one of the formats .*glm results 8.*received None"),
        ({"format": "fedstat vfem results 99"}, "received 'fedstat vfem results 99'"),
        ({"format": "fedstat glm results 6"}, "received 'fedstat glm results 6'"),
    ],
)
def test_other_formats_are_refused(header, complaint, tmp_path):
    path = tmp_path / "result.fed"
    path.write_bytes(pack(header, {"x": np.ones(2)}))
    with pytest.raises(ModelError, match=rf"result.fed: .*{complaint}"):
        fs.load(path)
