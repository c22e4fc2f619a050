"""Results of the family in a file: all statements come back, of every algorithm, masked or in clear."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from descent import WHOLE, F, fit, partition

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
