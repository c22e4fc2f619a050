"""Predictions, comparisons, adjusted means and contrasts: stored numbers of marginaleffects and emmeans.

tests/reference/effects has their scripts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs

FOLDER = Path(__file__).parents[1] / "reference" / "effects"
ROWS = fs.ClientPartition.from_frame(pd.read_csv(FOLDER / "rows.csv"), by="s")
LINEAR, LOGIT = "y ~ x + g + h", "e ~ x + g * h"


def fitted(formula, family=None):
    if family is None:
        return fs.FederatedOLS.from_formula(formula, ROWS).fit()
    return fs.FederatedGLM.from_formula(formula, ROWS, family=family).fit()


@pytest.fixture(scope="module")
def logit():
    return fitted("e ~ x * h + I(x ** 2) + g", sm.families.Binomial())


@pytest.fixture(scope="module")
def poisson():
    return fitted("k ~ x * g + h", sm.families.Poisson())


CALLS = {
    "predictions": lambda fit: fit.predictions(),
    "predictions_by": lambda fit: fit.predictions(by="g"),
    "counterfactual": lambda fit: fit.predictions("g"),
    "comparisons": lambda fit: fit.comparisons(["g", "h"]),
    "values": lambda fit: fit.comparisons({"x": (0, 2)}, by="g"),
    "lnratio": lambda fit: fit.comparisons("g", comparison="lnratio"),
    "slopes": lambda fit: fit.slopes("x"),
    "slopes_by": lambda fit: fit.slopes("x", by="h"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("model", ["logit", "poisson"])
def test_averages_over_sites_are_those_of_marginaleffects(model, name, request):
    theirs, ours = (
        pd.read_csv(FOLDER / f"{model}_{name}.csv"),
        CALLS[name](request.getfixturevalue(model)).tidy(),
    )
    if "term" in theirs:
        theirs = theirs.sort_values("term", kind="stable")
        ours = ours.sort_values("term", kind="stable")
        assert ours["term"].tolist() == theirs["term"].tolist()
    # Its derivatives are numerical, and its intervals are of Student's t where the fit's tests are normal.
    for column in ("estimate", "std_error"):
        np.testing.assert_allclose(ours[column], theirs[column], rtol=1e-3, atol=1e-6)


CONTRASTS = {
    "linear_holm": (LINEAR, {}),
    "linear_tukey": (LINEAR, {"adjust": "tukey"}),
    "linear_tests": (LINEAR, {"adjust": "tukey"}),
    "logit_pairs": (LOGIT, {"adjust": "tukey"}),
    "logit_tests": (LOGIT, {"adjust": "holm"}),
    "logit_by": (LOGIT, {"adjust": "bonferroni", "by": "h"}),
}
COLUMNS = {
    "SE": "std_error",
    "estimate": "estimate",
    "p.value": "p_value",
    "t.ratio": "statistic",
    "z.ratio": "statistic",
    "lower.CL": "conf_low",
    "upper.CL": "conf_high",
    "asymp.LCL": "conf_low",
    "asymp.UCL": "conf_high",
    "emmean": "estimate",
    "prob": "estimate",
}


def compare(ours, name, rtol=2e-5):
    theirs = pd.read_csv(FOLDER / f"{name}.csv", skipinitialspace=True)
    shared = [column for column in theirs if column in COLUMNS]
    assert len(shared) >= 3
    for column in shared:
        np.testing.assert_allclose(ours[COLUMNS[column]], theirs[column].astype(float), rtol=rtol, atol=1e-9)
    return theirs


@pytest.mark.parametrize("name", CONTRASTS)
def test_contrasts_are_those_of_emmeans(name):
    formula, options = CONTRASTS[name]
    fit = fitted(formula, None if formula == LINEAR else sm.families.Binomial())
    ours = fit.contrasts("g", **options).tidy()
    theirs = compare(ours, name)
    assert ours["contrast"].tolist() == theirs["contrast"].tolist()


def test_means_are_those_of_emmeans_on_the_scale_of_the_response():
    ours = fitted(LINEAR).means("g").tidy()
    compare(ours, "linear_means")
    logit = fitted(LOGIT, sm.families.Binomial())
    compare(logit.means("g").tidy(), "logit_means")
    # A difference of means on the scale of the response is that of the shown means.
    shown = logit.means("g").tidy().set_index("g")["estimate"]
    found = logit.contrasts("g", which="mean", adjust="none", method="reference").tidy()
    np.testing.assert_allclose(found["estimate"], [shown["b"] - shown["a"], shown["c"] - shown["a"]])
    ratios = logit.contrasts("g", method="revpairwise", exponentiate=True, adjust="none").tidy()
    logs = logit.contrasts("g", method="revpairwise", adjust="none").tidy()
    columns = ["estimate", "conf_low", "conf_high"]
    np.testing.assert_allclose(ratios[columns], np.exp(logs[columns]))
