"""Results in a file: everything comes back, nothing in it runs, and other files are refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from oracle import ITERATIVE, Study, packed, simulate

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.message import pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


@pytest.fixture(scope="module")
def study():
    return simulate(seed=16, n=300, holder="Bank")


@pytest.fixture(scope="module")
def result(study):
    return study.model("y ~ bank0 + bs(bank1, df=4, extrapolation='clip') + . - bank1").fit()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.fed"


def round_trip(result, path):
    result.save(path)
    return fs.load(path)


def new_partition(holder=None):
    frames = simulate(seed=17, n=80, holder=holder or "Registry").frames()
    return fs.ClientPartition.from_frames(
        {k: f for k, f in frames.items() if k != "Registry"}, on="id", new_data=True
    )


def test_the_summary_comes_back(result, path):
    loaded = round_trip(result, str(path))
    assert loaded.summary().as_text() == result.summary().as_text()
    assert loaded.summary().as_latex() == result.summary().as_latex()
    assert repr(loaded) == repr(result)


def test_numbers_come_back_to_the_bit(result, path):
    loaded = round_trip(result, path)
    for what in ("params", "bse", "pvalues", "tvalues", "nobs_by_site"):
        pd.testing.assert_series_equal(getattr(loaded, what), getattr(result, what), check_exact=True)
    pd.testing.assert_frame_equal(loaded.cov_params(), result.cov_params(), check_exact=True)
    pd.testing.assert_frame_equal(loaded.conf_int(), result.conf_int(), check_exact=True)
    pd.testing.assert_frame_equal(loaded.tidy(), result.tidy(), check_exact=True)
    pd.testing.assert_frame_equal(loaded.trace, result.trace, check_exact=True)
    for what in ("llf", "aic", "bic", "rsquared", "rsquared_adj", "scale", "nobs", "df_resid", "converged"):
        assert getattr(loaded, what) == getattr(result, what)
    assert (loaded.method, loaded.init, loaded.cov_type) == (result.method, result.init, result.cov_type)
    assert loaded.options == result.options


def test_hypotheses_can_be_tested_after_loading(result, path):
    loaded = round_trip(result, path)
    hypothesis = "court0 = 2 * tax0"
    assert str(loaded.t_test(hypothesis)) == str(result.t_test(hypothesis))
    assert str(loaded.wald_test_terms()) == str(result.wald_test_terms())


def test_likelihoods_can_be_compared_after_loading(result, path):
    restricted = result.model.partition
    restricted = fs.VFEMRegression.from_formula("y ~ bank0 + bank1", restricted, between="independent").fit(
        cov_type="none"
    )
    wide = fs.VFEMRegression.from_formula("y ~ .", result.model.partition, between="independent").fit()
    assert round_trip(wide, path).compare_lr_test(restricted) == wide.compare_lr_test(restricted)


def test_predictions_come_back_to_the_bit(result, path):
    loaded, partition = round_trip(result, path), new_partition()
    pd.testing.assert_series_equal(loaded.predict(partition), result.predict(partition), check_exact=True)
    pd.testing.assert_frame_equal(
        loaded.get_prediction(partition).summary_frame(),
        result.get_prediction(partition).summary_frame(),
        check_exact=True,
    )
    other = simulate(seed=18, n=200, holder="Bank").partition()
    assert loaded.prediction_rsquared(other) == result.prediction_rsquared(other)


def test_the_ledger_comes_back(result, path):
    loaded = round_trip(result, path)
    pd.testing.assert_frame_equal(loaded.ledger.to_frame(), result.ledger.to_frame())
    pd.testing.assert_frame_equal(loaded.ledger.releases(), result.ledger.releases())
    assert (loaded.ledger.rounds, loaded.ledger.bytes, loaded.ledger.at) == (
        result.ledger.rounds,
        result.ledger.bytes,
        "Bank",
    )
    assert loaded.ledger.kinds_by_site() == result.ledger.kinds_by_site()


def test_a_fit_that_did_not_converge_stays_so(study, path):
    with pytest.warns(fs.errors.ConvergenceWarning):
        result = study.model().fit(maxiter=2)
    loaded = round_trip(result, path)
    assert not loaded.converged
    assert "NOT CONVERGED" in loaded.summary().as_text()


def test_the_first_line_of_the_trace_has_no_change_and_is_saved(study, path):
    """The change of the first point is infinite, which JSON does not know."""
    result = study.model().fit(**packed(maxiter=1, tol=np.inf, cov_type="none", **ITERATIVE))
    assert len(round_trip(result, path).trace) == 1


def test_unusual_names_come_back(path):
    table = simulate(n=200, missing="none").table[["y", "bank0", "tax0"]].copy()
    table.columns = ["y", 'odd "name"', "größe → 1"]
    study = Study(table, {"Grundbuch «ü»": ['odd "name"'], "b": ["größe → 1"]}, "Ämter")
    result = study.model().fit(cov_type="expected")
    loaded = round_trip(result, path)
    assert list(loaded.params.index) == list(result.params.index)
    assert loaded.summary().as_text() == result.summary().as_text()


def test_no_value_of_an_entity_is_in_the_file(result, path):
    loaded = round_trip(result, path)
    header, arrays = unpack(path.read_bytes())
    n = [result.nobs, *result.nobs_by_site]
    assert not [name for name, array in arrays.items() if set(array.shape) & set(n)]
    assert set(header) == {"format", "content", "ledger"}
    lists = []

    def walk(value):
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            lists.append(value)
            for item in value:
                walk(item)

    walk(json.loads(header["content"]))
    walk(json.loads(header["ledger"]))
    assert not [x for x in lists if len(x) in n and all(isinstance(item, float) for item in x)]
    with pytest.raises(NotAvailableError, match="read them before saving"):
        _ = loaded.resid
    with pytest.raises(NotAvailableError):
        loaded.predict()
    with pytest.raises(NotAvailableError, match="read from a file and has no partition"):
        loaded.get_prediction()


def test_a_file_that_lost_a_part_is_refused(result, path):
    result.save(path)
    header, arrays = unpack(path.read_bytes())
    content = json.loads(header["content"])
    for name in arrays:
        path.write_bytes(pack(header, {k: v for k, v in arrays.items() if k != name}))
        if name != "cov":
            with pytest.raises(ModelError, match="the file is incomplete"):
                fs.load(path)
    fields = type(result._saved_record()).__dataclass_fields__
    for name in content:
        if {fields[name].default, fields[name].default_factory} != {dataclasses.MISSING}:
            continue  # earlier versions lack these
        rest = {k: v for k, v in content.items() if k != name}
        path.write_bytes(pack(header | {"content": json.dumps(rest)}, arrays))
        with pytest.raises(ModelError, match="the file is incomplete"):
            fs.load(path)


def test_a_file_whose_numbers_do_not_belong_together_is_refused(result, path):
    result.save(path)
    header, arrays = unpack(path.read_bytes())
    path.write_bytes(pack(header, arrays | {"estimate.params": arrays["estimate.params"][:-1]}))
    with pytest.raises(ModelError, match=r"result\.fed"):
        fs.load(path)
