"""One row per fit, and predictions for the analyst's own rows, against statsmodels' numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled import fit_pooled, partition, table

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError

FRAME = table()
F = sm.families


def logistic():
    return fs.GLORE.from_formula("binary ~ x + z + C(g)", partition(FRAME)).fit()


def test_glance_has_brooms_names_and_statsmodels_numbers():
    theirs = fit_pooled("binary ~ x + z + C(g)", FRAME, F.Binomial())
    row = logistic().glance()
    assert len(row) == 1
    expected = {
        "nobs": 600,
        "n_sites": 4,
        "df_model": theirs.df_model,
        "df_resid": theirs.df_resid,
        "logLik": theirs.llf,
        "AIC": theirs.aic,
        "BIC": theirs.bic_llf,
        "deviance": theirs.deviance,
        "null_deviance": theirs.null_deviance,
        "df_null": 599,
        "dispersion": 1.0,
    }
    np.testing.assert_allclose(row.loc[0, list(expected)].astype(float), list(expected.values()), rtol=1e-8)
    assert np.isnan(row.loc[0, "r_squared"])


def test_glance_of_sites_with_different_columns():
    partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    result = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
    row = result.glance().loc[0]
    assert (row["nobs"], row["AIC"], row["r_squared"]) == (result.nobs, result.aic, result.rsquared)
    assert row["n_sites"] == 3 and np.isnan(row["deviance"])


@pytest.mark.parametrize("which", ["mean", "linear"])
def test_augment_adds_the_predictions_of_statsmodels(which):
    theirs = fit_pooled("binary ~ x + z", FRAME, F.Binomial())
    ours = fs.GLORE.from_formula("binary ~ x + z", partition(FRAME)).fit()
    new = FRAME[["x", "z", "binary"]].head(20).set_index(pd.Index(range(100, 120)))
    new.iloc[3, 0] = np.nan
    found = ours.augment(new, which=which, alpha=0.1)
    assert list(found) == ["x", "z", "binary", "fitted", "se_fit", "conf_low", "conf_high"]
    assert found.index.equals(new.index) and found.iloc[3, 3:].isna().all()
    exog = sm.add_constant(new[["x", "z"]].drop(index=103)).to_numpy()
    expected = theirs.get_prediction(exog, which="mean" if which == "mean" else "linear")
    complete = found.drop(index=103)
    np.testing.assert_allclose(complete["fitted"], expected.predicted, rtol=1e-8)
    np.testing.assert_allclose(complete["se_fit"], expected.se, rtol=1e-8)
    limits = theirs.get_prediction(exog, which="linear").conf_int(alpha=0.1)
    limits = limits if which == "linear" else F.links.Logit().inverse(limits)
    np.testing.assert_allclose(complete[["conf_low", "conf_high"]], limits, rtol=1e-8)


def test_augment_says_that_rows_and_residuals_stay_at_the_sites():
    with pytest.raises(NotAvailableError, match="stay at the sites"):
        logistic().augment()
    with pytest.raises(ModelError, match="fitted"):
        logistic().augment(FRAME.assign(fitted=0.0))
