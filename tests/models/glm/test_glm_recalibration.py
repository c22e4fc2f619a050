"""Calibration slope and intercept, Brier score, ROC and confusion table, against the stacked rows."""

import numpy as np
import pytest
import statsmodels.api as sm
from pooled import partition, table
from sklearn.metrics import brier_score_loss, confusion_matrix, roc_curve

import fedstat as fs
from fedstat.errors import MessageError, ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.message import Request

F = sm.families
FRAME, OTHER = table(seed=5), table(seed=9)
CASES = {
    "logit": ("binary ~ x + C(g)", F.Binomial(), {}),
    "offset": ("binary ~ x", F.Binomial(), {"offset": "z"}),
    "no intercept": ("binary ~ x + z - 1", F.Binomial(), {}),
    "probit": ("binary ~ x + z", F.Binomial(F.links.Probit()), {}),
    "weights": ("binary ~ x + z", F.Binomial(), {"freq_weights": "w"}),
    "poisson": ("count ~ x", F.Poisson(), {"exposure": "days"}),
    "gaussian": ("gauss ~ x + z", F.Gaussian(), {}),
    "gamma": ("gamma ~ x + z", F.Gamma(F.links.Log()), {}),
}


def fitted(case):
    formula, family, roles = CASES[case]
    return fs.FederatedGLM.from_formula(formula, partition(FRAME), family=family, **roles).fit()


def pooled(result, case, frame):
    """Regressions on the linear predictor by statsmodels: with a slope, and with it held at one."""
    formula, family, roles = CASES[case]
    eta = result.predict(frame, which="linear").to_numpy()
    y = frame[formula.split(" ~ ")[0]].to_numpy()
    freq = frame[roles["freq_weights"]].to_numpy() if "freq_weights" in roles else None
    slope = sm.GLM(y, sm.add_constant(eta), family=family, freq_weights=freq).fit(tol=1e-14)
    large = sm.GLM(y, np.ones(len(y)), family=family, offset=eta, freq_weights=freq).fit(tol=1e-14)
    return slope, large


@pytest.mark.parametrize("case", CASES)
def test_slope_and_intercepts_are_those_of_the_stacked_rows(case):
    result = fitted(case)
    found = result.evaluate(partition(OTHER), recalibrate=True).recalibration
    slope, large = pooled(result, case, OTHER)
    np.testing.assert_allclose(found.params, slope.params, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found.cov, slope.cov_params(), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found.large, [large.params[0], large.bse[0]], rtol=1e-8, atol=1e-10)
    frame = found.to_frame()
    assert (frame["low"] < frame["coef"]).all() and frame.loc["slope", "expected"] == 1.0


def test_the_likelihood_ratio_is_against_predictions_as_they_are():
    result = fitted("logit")
    found = result.evaluate(partition(OTHER)).recalibration
    eta, y = result.predict(OTHER, which="linear").to_numpy(), OTHER["binary"].to_numpy()
    as_they_are = sm.families.Binomial().loglike(y, 1 / (1 + np.exp(-eta)))
    slope, _ = pooled(result, "logit", OTHER)
    assert found.statistic == pytest.approx(2 * (slope.llf - as_they_are), rel=1e-8)
    assert 0.0 < found.pvalue < 1.0


def test_on_the_rows_of_a_fit_the_slope_is_one():
    found = fitted("logit").evaluate().recalibration
    np.testing.assert_allclose([found.intercept, found.slope, found.in_the_large], [0, 1, 0], atol=1e-8)


def test_brier_score_is_that_of_the_rows_by_site_and_of_all():
    result = fitted("logit")
    evaluation = result.evaluate(partition(OTHER))
    p = result.predict(OTHER)
    assert evaluation.brier == pytest.approx(brier_score_loss(OTHER["binary"], p), rel=1e-10)
    by_site = ((OTHER["binary"] - p) ** 2).groupby(OTHER["site"]).mean()
    np.testing.assert_allclose(evaluation.to_frame()["brier"].drop("all sites"), by_site, rtol=1e-10)


def test_brier_score_of_counts_is_that_of_their_trials():
    frame = FRAME.assign(misses=FRAME["n"] - FRAME["events"])
    model = fs.FederatedGLM.from_formula("cbind(events, misses) ~ x", partition(frame), family=F.Binomial())
    result = model.fit()
    evaluation = result.evaluate()
    p, k, n = result.predict(FRAME), FRAME["events"], FRAME["n"]
    assert evaluation.brier == pytest.approx((k * (1 - p) ** 2 + (n - k) * p**2).sum() / n.sum(), rel=1e-10)
    assert evaluation.recalibration.slope == pytest.approx(1.0, abs=1e-8)


def test_points_of_the_roc_are_those_of_the_rows():
    result = fitted("logit")
    curve = result.evaluate(partition(OTHER)).roc().loc["all sites"]
    p, y = result.predict(OTHER).to_numpy(), OTHER["binary"].to_numpy()
    for threshold, fpr, tpr in curve[["threshold", "fpr", "tpr"]].to_numpy():
        exact = (p[y == 0] > threshold).mean(), (p[y == 1] > threshold).mean()
        # counted in bins of a twentieth of log odds; small bins are merged with a neighbor
        assert (fpr, tpr) == pytest.approx(exact, abs=0.02)
    assert curve[["fpr", "tpr"]].iloc[0].tolist() == [0, 0] and curve[["fpr", "tpr"]].iloc[-1].tolist() == [
        1,
        1,
    ]
    assert (curve.diff().iloc[1:][["fpr", "tpr"]] >= 0).all(axis=None)
    fpr, tpr, _ = roc_curve(y, p)
    found = np.trapezoid(curve["tpr"], curve["fpr"])
    evaluation = result.evaluate(partition(OTHER))
    assert found == pytest.approx(evaluation.auc, rel=1e-12)
    assert found == pytest.approx(np.trapezoid(tpr, fpr), abs=0.005)


def test_a_confusion_table_is_that_of_the_rows_where_bins_are_not_merged():
    result = fitted("logit")
    policy = fs.Policy(min_count=1)
    frame = table(seed=9, n=4000)
    found = result.evaluate(partition(frame, policy=policy)).confusion(0.5).loc["all sites"]
    assert found["threshold"] == 0.5
    tn, fp, fn, tp = confusion_matrix(frame["binary"], result.predict(frame) > 0.5).ravel()
    assert found[["tp", "fp", "fn", "tn"]].tolist() == [tp, fp, fn, tn]
    assert found["sensitivity"] == tp / (tp + fn) and found["ppv"] == tp / (tp + fp)
    assert found["accuracy"] == (tp + tn) / 4000


def test_without_further_rounds_there_are_counts_alone():
    result = fitted("logit")
    evaluation = result.evaluate(recalibrate=False)
    assert result.evaluation_ledger.rounds == 1 and evaluation.recalibration is None
    assert len(evaluation.roc()) and "brier" not in evaluation.to_frame()
    with pytest.raises(NotAvailableError, match="recalibrate=False"):
        _ = evaluation.brier
    with pytest.raises(ModelError, match=r"between 0 and 1, received 1\.5"):
        evaluation.confusion(1.5)


def test_the_summary_reveals_slope_and_brier_score():
    evaluation = fitted("logit").evaluate(partition(OTHER))
    text = " ".join(evaluation.summary().as_text().split())
    found = evaluation.recalibration
    assert f"slope {found.slope:.4f}" in text and f"in the large {found.in_the_large:.4f}" in text
    assert f"Brier score, all sites: {evaluation.brier:.4f}" in text
    assert max(map(len, evaluation.summary().as_text().splitlines())) <= 98


def test_separated_predictions_have_no_slope_and_are_evaluated_all_the_same():
    frame = OTHER.assign(x=np.where(OTHER["binary"] == 1, 3.0, -3.0) + 0.1 * OTHER["z"])
    result = fitted("no intercept")
    evaluation = result.evaluate(partition(frame.assign(z=0.5 * frame["z"])))
    assert evaluation.auc > 0.95 and evaluation.roc().size
    assert evaluation.recalibration is None


def test_sums_are_asked_of_the_model_that_was_evaluated():
    sites = partition(FRAME)
    with pytest.raises(MessageError, match="bin_counts"):
        request = Request("S1", "evaluation", "recalibrate", {"gamma": np.array([0.0, 1.0])}, "some session")
        sites.engine.run((lambda: (yield [request]))(), Ledger())


def test_strict_sites_hide_their_parts_and_the_slope_is_the_same():
    result = fitted("logit")
    strict = fs.Policy.strict(max_share=1.0, formulas="any")
    ours, open_ = result.evaluate(partition(OTHER, policy=strict)), result.evaluate(partition(OTHER))
    np.testing.assert_allclose(ours.recalibration.params, open_.recalibration.params, rtol=1e-8)
    assert ours.brier == pytest.approx(open_.brier, rel=1e-8)
    assert ours.to_frame()["brier"].isna().sum() == 4
    two = OTHER[OTHER["site"].isin(["S2", "S3"])]
    alone = result.evaluate(partition(two, policy=strict))
    assert alone.recalibration is None and 0.5 < alone.auc < 1.0
