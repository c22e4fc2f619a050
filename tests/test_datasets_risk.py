"""The simulated study of enterprise risk: published layout, and the truth found again on the draws."""

from functools import reduce

import numpy as np
import pytest
import statsmodels.api as sm

from fedstat import datasets
from fedstat.errors import ModelError

RECORDS = {
    "Platform": (8, 71_827),
    "Credit Agency": (12, 19_867),
    "Judicial Organ": (8, 11_830),
    "Law-enforcement Agency": (8, 9_100),
    "Market Supervision": (19, 52_355),
}


@pytest.fixture(scope="module")
def drawn():
    return datasets.make_sme_risk()


def columns(data):
    return data.complete[list(data.truth.index)]


def test_layout_and_records_are_the_published_ones(drawn):
    layout = {site: (frame.shape[1] - 1, len(frame)) for site, frame in drawn.frames.items()}
    assert layout == RECORDS and sum(size for size, _ in RECORDS.values()) == 55
    keys = (set(frame[drawn.key]) for frame in drawn.frames.values())
    assert len(reduce(set.intersection, keys)) == 184


def test_kinds_of_columns(drawn):
    X, kinds = columns(drawn), drawn.truth["type"]
    assert set(np.unique(X.loc[:, kinds == "binary"])) == {0.0, 1.0}
    assert set(np.unique(X.loc[:, kinds == "ordinal"])) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert (X.loc[:, kinds == "zero-inflated"] == 0.0).mean(axis=None) == pytest.approx(0.6, abs=0.01)
    counts = X.loc[:, kinds == "count"]
    assert counts.mean(axis=None) == pytest.approx(2.0, abs=0.02)
    assert counts.to_numpy().var() == pytest.approx(2.0, abs=0.06)
    assert X.loc[:, kinds == "skewed"].skew().min() > 2.0


def test_the_truth_is_found_on_all_columns(drawn):
    fit = sm.Logit(drawn.complete["RISK"], sm.add_constant(columns(drawn))).fit(disp=0)
    z = (fit.params - np.append(drawn.intercept, drawn.truth["coef"])) / fit.bse
    assert abs(z).max() < 4.0 and (z**2).mean() < 1.7
    assert drawn.complete["RISK"].mean() == pytest.approx(0.11, abs=0.01)


@pytest.mark.parametrize(("missing", "related"), [("mar", True), ("mcar", False)])
def test_records_depend_on_what_is_seen(missing, related):
    data = datasets.make_sme_risk(30_000, seed=4, missing=missing)
    seen = data.complete[data.key].isin(data.frames["Credit Agency"][data.key])
    odds = sm.Logit(seen.astype(float), sm.add_constant(data.complete[["RISK", "MS1"]])).fit(disp=0)
    assert (odds.tvalues[["RISK", "MS1"]] > 10.0).all() == related
    assert related or (odds.tvalues[["RISK", "MS1"]].abs() < 4.0).all()


def test_arguments_out_of_range():
    with pytest.raises(ModelError, match="at least 1,000"):
        datasets.make_sme_risk(999)
    with pytest.raises(ModelError, match="received 'none'"):
        datasets.make_sme_risk(missing="none")
