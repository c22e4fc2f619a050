"""More columns than entities, which owners may allow: the lasso is that of glmnet."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError, PolicyError

WIDE = json.loads((Path(__file__).parents[2] / "reference" / "penalized" / "wide.json").read_text())
FAMILIES = {"gaussian": None, "binomial": sm.families.Binomial(), "poisson": sm.families.Poisson()}
ALLOWING = {"min_count": 1, "max_parameters": 50.0}


def table(n=40, p=60):
    """The same numbers as in wide.R."""
    i, j = np.mgrid[:n, :p]
    X = np.round(3.0 * np.sin(1.0 + 37.0 * i + 101.0 * j + 0.7 * i * j), 3)
    y = 2.0 * X[:, 0] - 1.5 * X[:, 31] + X[:, 2] + np.round(2.0 * np.cos(5.0 + 17.0 * np.arange(n) ** 2), 3)
    responses = {"gaussian": y, "binomial": (y > 0).astype(int), "poisson": np.floor(np.exp(0.2 * y))}
    return pd.DataFrame(X, columns=[f"x{k}" for k in range(p)]).assign(**responses, id=range(n))


def model(response, **options):
    d = table()
    names = [name for name in d if name.startswith("x")]
    frames = {"A": d[["id", response, *names[:30]]], "B": d[["id", *names[30:]]]}
    policy = fs.Policy(**{**ALLOWING, **options})
    partition = fs.ClientPartition.from_frames(frames, on="id", min_count=1, policy=policy)
    family = {} if FAMILIES[response] is None else {"family": FAMILIES[response]}
    return fs.VerticalGLM.from_formula(f"{response} ~ .", partition, penalty="lasso", **family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_path_is_that_of_glmnet(family):
    expected = WIDE[family]
    found = model(family).fit(
        lambdas=expected["lambdas"], select="1se", folds=2, path="exact", inference="conditional", tol=1e-11
    )
    np.testing.assert_allclose(found.path_params, expected["params"], atol=2e-6)


def test_by_default_folds_choose_and_all_columns_have_intervals():
    """Information criteria would choose fits without residuals."""
    found = model("gaussian").fit()
    assert found.selection.select == "cv" and 3 <= (found.params != 0.0).sum() < 30
    errors = found.debiased.bse
    assert np.isfinite(errors).all() and (errors > 0.0).all()
    assert found.debiased.conf_int().loc["x0"].between(0.5, 4.0).all()
    assert 0.3 < found.debiased.scale < 8.0


@pytest.mark.parametrize(("allowed", "passes"), [(0.2, False), (1.0, False), (1.6, True)])
def test_the_owners_decide(allowed, passes):
    """Sums of products of 60 columns need 61 / max_parameters entities once it is 1 or more; there are 40."""
    if passes:
        assert model("gaussian", max_parameters=allowed).fit(select="bic").nobs == 40
        return
    with pytest.raises((EstimationError, PolicyError), match="max_parameters = 1 or more"):
        model("gaussian", max_parameters=allowed)


def test_penalized_estimates_stand_where_the_selected_columns_separate_the_response():
    """As glmnet's; there is no unpenalized estimate, and therefore no standard error."""
    found = model("binomial").fit(lambdas=[0.1], select="bic", inference="conditional", path="exact")
    banner = " ".join(str(found.summary()).split()).partition("=====")[0]
    assert banner.startswith("*** NO STANDARD ERRORS: the") and "Naive intervals" not in banner
    assert (found.params != 0.0).sum() > 2 and found.converged
    with pytest.raises(NotAvailableError, match="no fit on the selected columns: NO STANDARD ERRORS"):
        found.refit  # noqa: B018


def test_one_lambda_leaves_nothing_to_select():
    with pytest.raises(ModelError, match="one lambda leaves nothing to choose"):
        model("gaussian").fit(lam=1.0, select="bic")
