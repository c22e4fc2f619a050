"""Common parts of all results: one frozen record, notes with kinds, copies, files and pickles."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import NotAvailableError
from fedstat.inference.summary import Note
from fedstat.models import INSTALLED
from fedstat.models.results import CoefficientResults, Results
from fedstat.models.saved import READERS

pytestmark = pytest.mark.filterwarnings("ignore")


def columns_apart():
    rng = np.random.default_rng(2)
    table = pd.DataFrame(rng.normal(size=(200, 3)), columns=["x", "z", "o"]).rename_axis("k").reset_index()
    table["y"] = table["x"] + table["z"] + table["o"] + rng.normal(size=200)
    frames = {"A": table[["k", "y", "x", "o"]], "B": table[["k", "z"]].iloc[20:]}
    return fs.ClientPartition.from_frames(frames, on="k")


@pytest.fixture(scope="module")
def with_offset():
    return fs.VFEMRegression.from_formula("y ~ x + z", columns_apart(), offset="o").fit(cov_type="none")


def saved_classes():
    for family in filter(INSTALLED.get, INSTALLED):
        import_module(f"fedstat.models.{family}.model")
    return {form: read.__self__ for form, read in READERS.items()}


def test_every_saved_class_has_the_base_and_a_frozen_record():
    for form, kind in saved_classes().items():
        assert issubclass(kind, Results) and kind._saved_as == form
        assert kind._record_type.__dataclass_params__.frozen
        assert "ledger" not in {field.name for field in dataclasses.fields(kind._record_type)}


def test_notes_are_printed_and_their_kinds_are_a_table(with_offset):
    table = with_offset.diagnostics()
    assert table["note"].tolist() == with_offset.notes
    assert {"setting", "no_covariance", "offset", "assumptions", "sums"} <= set(table["kind"])
    assert set(table["severity"]) <= {"info", "warning", "protocol"}
    assert table.set_index("kind").loc["offset", "values"] == {"name": "o"}


def test_the_text_of_a_note_is_made_of_its_values():
    note = Note("left_out", "{n:,} rows at {site}", values={"n": 1_200, "site": "{n}"})
    assert str(note) == "1,200 rows at {n}"
    assert str(Note("plain", "a set {1, 2}")) == "a set {1, 2}"


def test_a_warning_is_marked():
    rng = np.random.default_rng(6)
    table = pd.DataFrame({"x": rng.normal(size=600), "site": ["A", "B", "C"] * 200})
    table["y"] = rng.poisson(5.0 * rng.gamma(1.0, size=600))
    rows = fs.ClientPartition.from_frame(table, by="site")
    model = fs.FederatedGLM.from_formula("y ~ x", rows, family=sm.families.Poisson())
    severity = model.fit().diagnostics().set_index("kind")["severity"]
    assert severity["overdispersion"] == "warning" and severity["masking"] == "protocol"


def test_an_offset_is_a_field_and_no_sentence(with_offset):
    """Without its notes, and with another note that starts the same, a fit still knows of its offset."""
    silent = copy.copy(with_offset)
    silent._record = dataclasses.replace(with_offset._record, notes=())
    with pytest.raises(NotAvailableError, match="at an offset of zero"):
        silent.evaluate()
    plain = fs.VFEMRegression.from_formula("y ~ x + z", columns_apart()).fit(cov_type="none")
    offset = [note for note in with_offset._record.notes if note.kind == "offset"]
    plain._record = dataclasses.replace(plain._record, notes=tuple(offset))
    assert plain.evaluate().accuracy is not None


def test_a_refit_can_be_saved(tmp_path):
    data = fs.datasets.make_selection(300, seed=1)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    refit = fs.VerticalGLM.from_formula("y ~ X1 + X2 + X21 + X22 + X41", partition).fit(n_lambdas=4).refit
    refit.save(tmp_path / "refit.fed")
    loaded = fs.load(tmp_path / "refit.fed")
    assert type(loaded) is type(refit) and loaded.parent is None
    assert loaded.summary().as_text() == refit.summary().as_text()


def test_copies_and_pickles(with_offset):
    for other in (copy.copy(with_offset), copy.deepcopy(with_offset)):
        assert other._model is with_offset._model
        assert other.summary().as_text() == with_offset.summary().as_text()
    read = pickle.loads(pickle.dumps(with_offset))
    assert read._model is None and read.summary().as_text() == with_offset.summary().as_text()


def test_results_without_a_ledger_say_so(with_offset):
    alone = CoefficientResults(with_offset._record)
    with pytest.raises(NotAvailableError, match="no ledger"):
        _ = alone.ledger
    with pytest.raises(NotAvailableError, match="no receipt"):
        alone.receipt()
