"""Number of steps, folds of sites, and where boosting starts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import LOOSE, by_site, simulated

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.kernels.curves import difference_penalty, smooth_curve, spline_basis

FRAME = simulated(240)
TEXT = "y(t) ~ bsignal(x1, knots=3) + bols(g)"


def fitted(text=TEXT, frame=FRAME, steps=40, penalty="separable", policy=LOOSE, **settings):
    partition = by_site(frame, "x1", "x2", "y", policy=policy)
    model = fs.FedFunctionBoost.from_formula(text, partition, time="bbs(t, knots=3, df=3)", penalty=penalty)
    return model.fit(steps=steps, **settings)


@pytest.mark.parametrize("penalty", ["separable", "fdboost"])
@pytest.mark.parametrize("text", [TEXT, "mean ~ bsignal(x1, knots=3) + bols(g)"])
def test_degrees_of_freedom_are_the_trace_of_the_operator_that_takes_responses_to_fits(text, penalty):
    """Found column by column: the fit of a response that is one at a row and point, along the same path."""
    result = fitted(text, FRAME[:60], 15, penalty, select="aicc")
    boosting = result._record.boosting
    ready, path = boosting.over(np.ones(1, bool), 15)
    sums, gram, nu = boosting.moments.total, boosting.gram, boosting.nu
    k2, L = len(gram), ready.L
    S = L.T @ sums.S @ L
    A = np.kron(ready.V.T @ gram @ ready.V, S)
    M, found = np.zeros_like(A), []
    for p in path.selected:
        rows = np.arange(ready.starts[p], ready.starts[p + 1])
        at = (np.arange(k2)[:, None] * len(S) + rows).ravel()
        E = np.eye(len(A))[at]
        if ready.full:
            _, U, first, h = ready.fit
            k = len(at)
            turn = U[first[p] : first[p] + k * k].reshape(k, k)
            place = int((np.diff(ready.starts)[:p] * k2).sum())
            H = turn.T @ np.diag(h[place : place + k]) @ turn
        else:
            H = np.diag(ready.fit[0][rows].T.ravel())
        M += nu * E.T @ H @ (E - A[at] @ M)
        found.append(np.trace(A @ M))
    np.testing.assert_allclose(result.aicc["df"], found, rtol=1e-9)
    # The same operator takes the score to the coefficients of the path.
    score = ready.L.T @ sums.about(result.offset, boosting.basis).T @ ready.V
    coef = (M @ score.ravel(order="F")).reshape(len(S), k2, order="F")
    np.testing.assert_allclose(L @ coef @ ready.V.T, path.coef, atol=1e-9 * np.abs(path.coef).max())


def test_without_smoothing_the_trace_goes_to_the_number_of_columns():
    result = fitted("mean ~ bols(age, df=1) + bols(g, df=2)", steps=2000, select="aicc", offset=0.0)
    assert result.aicc["df"].iloc[-1] == pytest.approx(4.0, abs=1e-6)
    n, risk = 240, 1.0 - result.path["rsquared"].iloc[-1]
    last = result.aicc.iloc[result.mstop - 1]
    risk *= result._boosting.total_squares
    known = np.log(risk / n) + (1 + last["df"] / n) / (1 - (last["df"] + 2) / n)
    assert last["aicc"] == pytest.approx(known)


def test_the_criterion_stops_where_there_is_noise_alone():
    noise = FRAME.assign(mean=np.random.default_rng(3).normal(size=len(FRAME)))
    result = fitted("mean ~ x1 + x2 + bols(g)", noise, 200, select="aicc")
    assert result.mstop == result.aicc["aicc"].to_numpy().argmin() + 1 < 60
    assert "AICc" in str(result.summary())
    assert "independent" in str(fitted(select="aicc").summary())


def test_sites_are_folds_each_judged_by_the_fit_of_the_others():
    result = fitted(select="cv", folds="site")
    assert not result._record.masked and result._record.boosting.moments.folds == 3
    for f in range(3):
        rest = FRAME[FRAME["site"] != f]
        alone = fitted(frame=rest)
        left = FRAME[FRAME["site"] == f].filter(regex="^y_").to_numpy() - alone.predict(
            FRAME[FRAME["site"] == f]
        )
        assert result._cv[f, -1] == pytest.approx(float((left.to_numpy() ** 2).mean()), rel=1e-9)


def test_sites_are_no_folds_where_their_sums_are_hidden():
    with pytest.raises(ModelError, match="masked=True requests masks"):
        fitted(select="cv", folds="site", masked=True)
    with pytest.raises(ModelError, match="an owner's policy requires"):
        fitted(select="cv", folds="site", policy=fs.Policy(masked_only=True))
    with pytest.raises(ModelError, match="two sites"):
        fitted(frame=FRAME.assign(site=0), select="cv", folds="site")
    with pytest.raises(ModelError, match="folds: expected"):
        fitted(folds="sites")


def test_boosting_starts_from_the_mean_this_smoothed_or_a_curve_that_is_given():
    mean = FRAME.filter(regex="^y_").to_numpy().mean(axis=0)
    basis = spline_basis(np.linspace(0, 1, 12), 0, 1, 3)
    smooth = smooth_curve(mean, basis, difference_penalty(7, 2))
    cases = {"mean": mean, "smooth": smooth, 1.5: np.full(12, 1.5), tuple(mean): mean}
    fits = {how: fitted(offset=how, steps=60) for how in cases}
    for how, expected in cases.items():
        np.testing.assert_allclose(fits[how].offset, expected, rtol=1e-9)
    np.testing.assert_allclose(fits["mean"].coef, fits[tuple(mean)].coef, atol=1e-9)
    assert fits[1.5].learners["explained"].sum() == pytest.approx(1.0)
    # From a far start the intercept is taken first, and the fits come together.
    assert fits[1.5].path["learner"].iloc[0] == "1"
    pd.testing.assert_frame_equal(
        fitted(offset=1.5, steps=2000).predict(FRAME), fitted(steps=2000).predict(FRAME), atol=0.05
    )
    for wrong in ("median", (1.0, 2.0), np.nan):
        with pytest.raises(ModelError, match="offset: expected"):
            fitted(offset=wrong)
    with pytest.raises(ModelError, match="response is a number"):
        fitted("mean ~ x1", offset="smooth")


def test_a_smoothed_curve_is_between_its_values_and_a_line():
    x = np.linspace(0, 1, 40)
    noisy = np.sin(2 * np.pi * x) + np.random.default_rng(1).normal(size=40) * 0.3
    found = smooth_curve(noisy, spline_basis(x, 0, 1, 12), difference_penalty(16, 2))
    truth = np.sin(2 * np.pi * x)
    assert ((found - truth) ** 2).mean() < 0.5 * ((noisy - truth) ** 2).mean()


def test_a_smallest_loss_at_the_last_step_is_the_first_note_of_the_summary():
    short, long = (fitted(steps=m, select="cv", folds=4) for m in (5, 400))
    assert short.mstop == 5
    assert "[1] The last of 5 steps has the smallest criterion" in str(short.summary())
    assert long.mstop < 400 and "smallest criterion" not in str(long.summary())


def test_score_has_the_root_of_the_mean_squared_error():
    result = fitted()
    left = FRAME.filter(regex="^y_").to_numpy() - result.predict(FRAME).to_numpy()
    assert result.score(FRAME)["rmse"] == pytest.approx(np.sqrt((left**2).mean()), rel=1e-12)


def test_stability_without_the_number_of_learners_says_what_it_needs():
    result = fitted(folds=4)
    with pytest.raises(ModelError, match=r"between 1 and 2.* stability\(..., q=1\)"):
        result.stability()
