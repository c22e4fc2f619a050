"""AUC of the averaging family, from counts at the sites, next to GLORE's."""

import warnings

import pytest

import fedstat as fs


def test_all_methods_are_compared_with_their_auc():
    data = fs.datasets.make_logistic_sites("homogeneous", seed=4)
    train = fs.ClientPartition.from_frame(data.train, by=data.site)
    test = fs.ClientPartition.from_frame(data.test, by=data.site)
    fits = {"GLORE": fs.GLORE.from_formula("y ~ .", train).fit()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits["FedAvg"] = fs.FedAvg.from_formula("y ~ .", train).fit(rounds=20, seed=1)
    with pytest.raises(AttributeError, match="call evaluate"):
        _ = fits["FedAvg"].auc
    for fit in fits.values():
        fit.evaluate(test)
    assert fits["FedAvg"].auc == pytest.approx(fits["GLORE"].auc, abs=0.01)
    assert "AUC" in str(fs.compare(fits))
