"""Names of statsmodels' GLMResults: each exists, or its error says what to use instead."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.models.absent_names import ABSENT

HOSPITALS = fs.datasets.make_hospitals()
FORMULA = "num ~ age + sex + C(cp)"
NAMES = [name for name in dir(smf.glm(FORMULA, HOSPITALS).fit()) if not name.startswith("_")]


@pytest.fixture(scope="module")
def ols():
    partition = fs.ClientPartition.from_frame(HOSPITALS, by="hospital")
    return fs.FederatedOLS.from_formula(FORMULA, partition).fit()


@pytest.fixture(scope="module")
def fits(ols):
    data = fs.datasets.make_blocks(300, seed=1)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    vfem = fs.VFEMRegression.from_formula("y ~ .", partition).fit()
    rows = fs.ClientPartition.from_frame(HOSPITALS, by="hospital")
    return {
        "ols": ols,
        "glm": fs.GLORE.from_formula("num > 0 ~ age + sex", rows).fit(),
        "gee": fs.FederatedGEE.from_formula(
            "num > 0 ~ age", rows, groups="age", family=sm.families.Binomial()
        ).fit(),
        "vfem": vfem,
        "selection": vfem.select("lasso", n_lambdas=5),
    }


@pytest.mark.parametrize("kind", ["ols", "glm", "gee", "vfem", "selection"])
def test_every_name_of_statsmodels_exists_or_has_a_hint(fits, kind):
    fit = fits[kind]
    assert len(NAMES) > 50
    for name in NAMES:
        try:
            getattr(fit, name)
        except AttributeError as error:
            assert "object has no attribute" not in str(error), name
            assert isinstance(error, NotAvailableError) or ABSENT[name] in str(error)
    with pytest.raises(AttributeError, match="object has no attribute 'nonsense'"):
        fit.nonsense  # noqa: B018
    assert not hasattr(fit, "nonsense") and not hasattr(fit, "__array__")


def test_hints_do_not_hide_reasons_and_copies_work(fits):
    with pytest.raises(NotAvailableError, match="releases no row-level values"):
        fits["vfem"].fittedvalues  # noqa: B018
    for fit in fits.values():
        for again in (copy.copy(fit), copy.deepcopy(fit), pickle.loads(pickle.dumps(fit))):
            assert (again.params == fit.params).all()


def test_parts_of_intervals_and_covariances(ols):
    other = smf.ols(FORMULA, HOSPITALS).fit()
    np.testing.assert_allclose(
        ols.conf_int(cols=["age", "sex"]), other.conf_int().loc[["age", "sex"]], rtol=1e-8
    )
    at = list(ols.params.index).index("age")
    pd.testing.assert_frame_equal(ols.conf_int(cols=[at]), ols.conf_int().iloc[[at]])
    np.testing.assert_allclose(ols.cov_params(column="age"), ols.bse["age"] ** 2)
    R = np.zeros((2, len(ols.params)))
    R[0, at], R[1, at + 1] = 2.0, -1.0
    full = ols.cov_params().to_numpy()
    np.testing.assert_allclose(ols.cov_params(r_matrix=R), R @ full @ R.T)
    np.testing.assert_allclose(ols.cov_params("2 * age = 0, sex = age").iloc[0, 0], 4.0 * full[at, at])
    for cols in (["none"], [99], [-1]):
        with pytest.raises(ModelError, match="no coefficient"):
            ols.conf_int(cols=cols)
    with pytest.raises(ModelError, match="only one of r_matrix and column"):
        ols.cov_params(R, column=1)


def test_the_statistic_is_a_number_or_an_array(ols):
    number = ols.wald_test("age = 0, sex = 0", scalar=True)
    array = ols.wald_test("age = 0, sex = 0", scalar=False)
    other = smf.ols(FORMULA, HOSPITALS).fit().wald_test("age = 0, sex = 0", scalar=True)
    assert np.ndim(number.statistic) == 0 and array.statistic.shape == (1, 1)
    assert float(number.statistic) == pytest.approx(float(other.statistic))


@pytest.mark.parametrize("method", ["hs", "bonferroni"])
def test_pairs_of_levels_are_those_of_statsmodels(ols, method):
    mine = ols.t_test_pairwise("C(cp)", method=method)
    other = smf.ols(FORMULA, HOSPITALS).fit().t_test_pairwise("C(cp)", method=method).result_frame
    np.testing.assert_allclose(mine["coef"], other["coef"], rtol=1e-8)
    np.testing.assert_allclose(mine[f"pvalue-{method}"], other[f"pvalue-{method}"], rtol=1e-6, atol=1e-12)
    with pytest.raises(ModelError, match="expected a factor with treatment coding"):
        ols.t_test_pairwise("age")
    with pytest.raises(ModelError, match="factor_labels: expected 4"):
        ols.t_test_pairwise("C(cp)", factor_labels=["a"])
