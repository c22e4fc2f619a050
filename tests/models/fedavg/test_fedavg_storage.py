"""Results of the family in a file: all statements come back, of every algorithm, masked or in clear."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from descent import FRAME, WHOLE, F, fit, partition

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.message import pack, unpack

L = sm.families.links
FITS = {
    "FedAvg": (fs.FedAvg, "binary ~ x + z + C(g)", {}, {}),
    "near": (fs.FedAvg, "binary ~ scale(x) + z", {}, {"learning_rate": 1.0, "standardize": True} | WHOLE),
    "in clear": (fs.FedAvg, "binary ~ x + z", {}, {"masked": False}),
    "momentum": (fs.FedAvgM, "gauss ~ x + z", {"family": F.Gaussian()}, {"momentum": 0.5}),
    "fair": (fs.QFedAvg, "binary ~ x + z", {}, {"q": 1.0}),
    "proximal": (
        fs.FedProx,
        "binary ~ x",
        {"freq_weights": "w"},
        {"mu": 0.25, "gamma": 0.5, "fraction": 0.5},
    ),
    "exposure": (
        fs.FedAvg,
        "count ~ z",
        {"family": F.Poisson(), "exposure": "days"},
        {"learning_rate": 1e-3},
    ),
    "probit": (fs.FedAvg, "cbind(events, n - events) ~ x", {"family": F.Binomial(L.Probit())}, {}),
    "no likelihood": (fs.FedAvg, "gauss ~ x", {"family": F.Tweedie(L.Identity(), 0.0)}, {}),
}


@pytest.fixture(scope="module")
def results():
    return {
        case: fit(kind, formula=formula, known=known, **{"rounds": 6} | options)
        for case, (kind, formula, known, options) in FITS.items()
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.fed"


def round_trip(result, path):
    result.save(path)
    return fs.load(path)


@pytest.mark.parametrize("case", FITS)
def test_every_kind_of_fit_can_be_saved(results, case, path):
    result, loaded = results[case], round_trip(results[case], path)
    assert type(loaded) is type(result) and not hasattr(loaded.model, "partition")
    assert repr(loaded) == repr(result)
    assert loaded.summary(0.1).as_text() == result.summary(0.1).as_text()
    for what in ("params", "coef_sites", "distance"):
        pd.testing.assert_series_equal(getattr(loaded, what), getattr(result, what), check_exact=True)
    for frames in ((loaded.trace, result.trace), (loaded.tidy(), result.tidy())):
        pd.testing.assert_frame_equal(*frames, check_exact=True)
    pd.testing.assert_frame_equal(loaded.ledger.to_frame(), result.ledger.to_frame(), check_exact=True)
    for what in ("deviance", "pearson_chi2", "scale", "nobs", "df_resid", "df_model", "converged", "seed"):
        assert getattr(loaded, what) == getattr(result, what)
    for what in ("model_name", "method_name", "distribution"):
        assert getattr(loaded, what) == getattr(result, what)
    assert getattr(loaded, "llf", None) == getattr(result, "llf", None)
    pd.testing.assert_series_equal(loaded.predict(FRAME), result.predict(FRAME), check_exact=True)


def test_the_loss_of_each_site_comes_back_where_it_is_known(results, path):
    ours, theirs = round_trip(results["in clear"], path).site_loss, results["in clear"].site_loss
    pd.testing.assert_series_equal(ours, theirs, check_exact=True)
    with pytest.raises(NotAvailableError, match="sums were masked"):
        _ = round_trip(results["FedAvg"], path).site_loss


def test_what_was_loaded_can_be_evaluated_on_a_partition(results, path):
    result, loaded = results["FedAvg"], round_trip(results["FedAvg"], path)
    with pytest.raises(NotAvailableError, match=r"evaluate.*read from a file.*give one"):
        loaded.evaluate()
    assert loaded.evaluate(partition()).auc == result.evaluate().auc


def test_parts_that_are_not_of_one_fit_are_refused(results, path):
    results["in clear"].save(path)
    header, arrays = unpack(path.read_bytes())
    content = json.loads(header["content"])
    for short in ({"trace": []}, {"masked": True}, {"rule": {"speed": 1.0}}):
        refused(path, header, content | {"fit": content["fit"] | short}, arrays)
    for name, array in arrays.items():
        refused(path, header, content, arrays | {name: np.atleast_1d(array)[:-1]})
        refused(path, header, content, {other: kept for other, kept in arrays.items() if other != name})


def refused(path, header, content, arrays):
    path.write_bytes(pack(header | {"content": json.dumps(content)}, arrays))
    with pytest.raises(ModelError, match="the file is incomplete"):
        fs.load(path)
