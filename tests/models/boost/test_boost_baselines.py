"""The publication's baselines, against local least squares on rows that are averaged step by step."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import LOOSE, by_site, simulated

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.kernels.curves import integration_weights, spline_basis

FRAME = simulated(240)
TEXT = "y(t) ~ bsignal(x1, knots=2, df=6) + bsignal(x2, knots=2, df=6)"
FREE = "bbs(t, knots=1, df=5)"
"""As many degrees of freedom as columns: no learner is shrunken."""


def fitted(text=TEXT, frame=FRAME, time=FREE, options=None, penalty="separable", **settings):
    partition = by_site(frame, "x1", "x2", "y", policy=LOOSE, **(options or {}))
    model = fs.FedFunctionBoost.from_formula(text, partition, time=time, penalty=penalty)
    return model.fit(**{"steps": 25, **settings})


def average_rows(how, steps, nu=0.1):
    """Chapter 3's loop on rows: local least squares in every step, averaged; learners and loss by step."""
    b = spline_basis(np.linspace(0, 1, 12), 0, 1, 1)
    s = np.linspace(0, 1, 30)
    basis = spline_basis(s, 0, 1, 2) * integration_weights(s)[:, None]
    Z = [np.ones((240, 1)), *(FRAME.filter(regex=f"^{x}_").to_numpy() @ basis for x in ("x1", "x2"))]
    Y = FRAME.filter(regex="^y_").to_numpy()
    left, site = Y - Y.mean(axis=0), FRAME["site"].to_numpy()
    chosen, loss = [], []
    for _ in range(steps):
        tried = []
        for z in Z:
            fits, weights = [], []
            for k in range(3):
                rows = z[site == k]
                fit = np.linalg.lstsq(rows, left[site == k] @ np.linalg.pinv(b).T, rcond=None)[0]
                error = ((left[site == k] - rows @ fit @ b.T) ** 2).sum() / (80 * 12 - z.shape[1] * 5)
                fits.append(fit)
                weights.append(rows.T @ rows / error if how == "lsa" else 80 * np.eye(z.shape[1]))
            total = sum(w @ fit for w, fit in zip(weights, fits, strict=True))
            moved = z @ np.linalg.solve(sum(weights), total) @ b.T
            tried.append((((left - moved) ** 2).sum(), moved))
        best = int(np.argmin([one for one, _ in tried]))
        left = left - nu * tried[best][1]
        chosen.append(best)
        loss.append((left**2).sum())
    return chosen, loss


@pytest.mark.parametrize("how", ["lsa", "average"])
def test_one_round_gives_the_loop_of_local_least_squares(how):
    chosen, loss = average_rows(how, 25)
    result = fitted(aggregation=how)
    labels = list(result.learners.index)
    assert [labels.index(name) for name in result.path["learner"]] == chosen
    np.testing.assert_allclose(
        (1 - result.path["rsquared"]) * result._boosting.total_squares, loss, rtol=1e-8
    )


@pytest.mark.parametrize("text", [TEXT, "y(t) ~ x1 + x2 + bols(g) + age"])
def test_an_average_of_equal_sites_is_the_pooled_path(text):
    third = FRAME[:80]
    frame = pd.concat([third.assign(site=k) for k in range(3)], ignore_index=True)
    pooled = fitted(text, third.assign(site=0), time="bbs(t, knots=4, df=4)")
    for how in ("lsa", "average"):
        one = fitted(text, frame, time="bbs(t, knots=4, df=4)", aggregation=how)
        assert list(one.path["learner"]) == list(pooled.path["learner"])
        np.testing.assert_allclose(one.coef, pooled.coef, atol=1e-6 * np.abs(pooled.coef).max())


def test_a_local_fit_is_that_of_a_site_alone():
    fits = fitted(aggregation="local", time="bbs(t, knots=4, df=4)", select="cv", folds=4, seed=2)
    assert list(fits) == ["site 0", "site 1", "site 2"]
    own = FRAME[FRAME["site"] == 1]
    alone = fitted(frame=own, time="bbs(t, knots=4, df=4)", select="cv", folds=4, seed=2)
    assert fits["site 1"].mstop == alone.mstop and fits["site 1"].nobs == 80
    np.testing.assert_allclose(fits["site 1"].coef, alone.coef, atol=1e-9)
    assert fits.score(FRAME).loc["site 1", "rsquared"] == alone.score(FRAME)["rsquared"]
    table = fits.tidy().set_index("site")
    assert table.loc["site 2", "nobs"] == 80 and 1 <= table.loc["site 2", "selected"] <= 3
    assert "site 1" in str(fits["site 1"].summary()) and "site 2" not in str(fits["site 1"].summary())


def test_left_out_folds_are_judged_by_the_averages_of_the_others():
    result = fitted(aggregation="lsa", folds=2, seed=3, select="cv")
    boosting = result._record.boosting
    rest = np.array([False, True])
    path = boosting.over(rest, 25, ~rest)[1]
    B, moments = path.coef, boosting.moments
    test = moments.over(~rest).about(moments.over(rest).mean, boosting.basis)
    G = boosting.gram
    loss = test.yy - 2 * (test.T * B).sum() + ((test.S @ B @ G) * B).sum()
    assert path.risk_test[-1] == pytest.approx(loss, rel=1e-9)
    assert result._cv[0, -1] * test.n * 12 == pytest.approx(loss, rel=1e-9)


def test_a_baseline_says_what_it_is_and_has_no_inference():
    result = fitted(aggregation="average", folds=4)
    text = " ".join(str(result.summary()).split())
    assert "averaged by rows" in text and "is a baseline without inference" in text and "unmasked" in text
    for request in (
        result.refit,
        result.split,
        result.entry_test,
        lambda: result.stability(1),
        result.cov_params,
    ):
        with pytest.raises(NotAvailableError, match="baseline without inference"):
            request()


def test_a_baseline_is_made_of_sums_unmasked_and_the_dry_run_says_so():
    partition = by_site(FRAME, "x1", "x2", "y", policy=LOOSE)
    model = fs.FedFunctionBoost.from_formula(TEXT, partition, time=FREE)
    reported = model.explain(steps=5, aggregation="lsa")
    assert not reported.table.query("step == 'sum_curves'")["masked"].any()
    assert "every site's own sums" in str(reported) and "membership inference at site 2" in str(reported)
    assert "every site's own sums" not in str(model.explain(steps=5))
    left = model.fit(steps=5, aggregation="lsa").ledger.to_frame().query("kind == 'aggregate'")
    assert not left["masked"].any()
    with pytest.raises(ModelError, match="masks would hide"):
        model.fit(aggregation="lsa", masked=True)
    with pytest.raises(ModelError, match="aggregation"):
        model.fit(aggregation="median")
    with pytest.raises(ModelError, match="penalty='separable'"):
        fitted(penalty="fdboost", aggregation="average")
    assert len(fitted(penalty="fdboost", aggregation="local")) == 3


def test_a_site_with_fewer_rows_than_columns_has_no_local_fit():
    frame = FRAME.assign(site=np.where(np.arange(240) < 5, 1, 0))
    with pytest.raises(EstimationError, match=r"site 1: 5 rows for bsignal\(x1\), 6 columns"):
        fitted(frame=frame, aggregation="average")
    shrunken = "y(t) ~ bsignal(x1, knots=2, df=3)"
    assert fitted(shrunken, frame, aggregation="lsa").rsquared > 0


def test_a_baseline_is_read_from_a_file_as_it_was(tmp_path):
    result = fitted(aggregation="lsa")
    result.save(tmp_path / "lsa.fed")
    again = fs.load(tmp_path / "lsa.fed")
    assert (again.coef == result.coef).all() and str(again.summary()) == str(result.summary())
    assert (again.steps(7).coef == result.steps(7).coef).all()
