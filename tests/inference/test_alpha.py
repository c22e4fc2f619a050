"""An alpha that looks like the level of an interval is announced, wherever one is taken."""

import warnings

import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import FedstatWarning, ModelError
from fedstat.inference.estimate import check_alpha


def test_limits_of_alpha():
    for alpha in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ModelError, match="between 0 and 1"):
            check_alpha(alpha)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_alpha(0.5)
    with pytest.warns(FedstatWarning, match=r"intervals of level 5%.*alpha=0\.05"):
        check_alpha(0.95)


def test_results_warn_of_a_level():
    partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    for call in (fit.conf_int, fit.get_margeff().conf_int):
        with pytest.warns(FedstatWarning, match=r"alpha=0\.1"):
            call(0.9)


def test_glore_is_logistic_regression():
    partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    with pytest.raises(ModelError, match="GLORE is logistic regression, received Poisson"):
        fs.GLORE.from_formula("num ~ age", partition, family=sm.families.Poisson())
    assert fs.GLORE.from_formula("num > 0 ~ age", partition, family=sm.families.Binomial()).fit().converged
