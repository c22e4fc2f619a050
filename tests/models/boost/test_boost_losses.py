"""Losses that are no squares, against boosting row by row as mboost defines it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from curve_cases import LOOSE, by_site, simulated
from scipy.special import expit

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, ModelError, NotAvailableError
from fedstat.kernels.curves import difference_penalty, integration_weights, spline_basis
from fedstat.models.boost.learning.columns import CurveSumsRequest
from fedstat.models.boost.learning.learners import Learner
from fedstat.models.boost.steps import deal

KINDS = {
    "binomial": {"family": sm.families.Binomial()},
    "poisson": {"family": sm.families.Poisson()},
    "huber": {"loss": "huber", "delta": 0.4},
    "quantile": {"loss": "quantile", "q": 0.3},
}
LONELY = fs.Policy(max_parameters=10.0, min_count=1)
"""A policy that allows single rows to change sides, as quantiles of few rows require."""
T, S = np.linspace(0, 1, 12), np.linspace(0, 1, 30)


def table(n=240):
    """Numbers and curves of every kind that a loss is of."""
    frame = simulated(n)
    random = np.random.default_rng(2)
    curves = frame.filter(regex="^y_").to_numpy()
    high = curves > np.median(curves)
    counts = random.poisson(np.exp(0.4 * curves - 0.5))
    more = {f"binomial_{j}": high[:, j].astype(float) for j in range(12)}
    more |= {f"poisson_{j}": counts[:, j].astype(float) for j in range(12)}
    more |= {f"{name}_{j}": curves[:, j] for name in ("huber", "quantile") for j in range(12)}
    mean = frame["mean"]
    numbers = {"binomial": (mean > mean.median()).astype(float), "huber": mean, "quantile": mean}
    numbers["poisson"] = random.poisson(np.exp(0.5 * mean - 0.5)).astype(float)
    return frame.join(pd.DataFrame({**more, **{f"one_{name}": values for name, values in numbers.items()}}))


FRAME = table()


def model(kind, functional=False, frame=FRAME, policy=LOOSE, penalty="fdboost", text=None, **options):
    response = f"{kind}(t)" if functional else f"one_{kind}"
    text = text or "bsignal(x1, knots=5, df=4) + bsignal(x2, knots=5, df=4)"
    partition = by_site(frame, "x1", "x2", *([kind] if functional else []), policy=policy, **options)
    along = "bbs(t, knots=4, df=3)"
    return fs.FedFunctionBoost.from_formula(
        f"{response} ~ {text}", partition, time=along, penalty=penalty, **KINDS[kind]
    )


def mboost_slope(kind, y, f):
    """Negative gradient as in mboost's families; its Binomial has y of -1 and 1, f half the log odds."""
    if kind == "binomial":
        both = 2.0 * y - 1.0
        return 2.0 * both / (np.log(2.0) * (1.0 + np.exp(2.0 * both * f)))
    if kind == "poisson":
        return y - np.exp(f)
    if kind == "huber":
        return np.where(np.abs(y - f) < 0.4, y - f, 0.4 * np.sign(y - f))
    return np.where(y - f > 0.0, 0.3, -0.7)


def boost_rows(kind, functional, frame, offset, steps, nu=0.1):
    """Boosting row by row: chosen learners and the predictor at all points."""
    pattern = f"^{kind}_" if functional else f"^one_{kind}$"
    Y = frame.filter(regex=pattern).to_numpy()
    X = [frame.filter(regex=f"^{name}_").to_numpy() for name in ("x1", "x2")]
    Z = [np.ones((len(Y), 1)), *((x * integration_weights(S)) @ spline_basis(S, 0, 1, 5) for x in X)]
    b, K2 = (spline_basis(T, 0, 1, 4), difference_penalty(8, 2)) if functional else (np.ones((1, 1)), 0.0)
    k2, designs, hats = b.shape[1], [], []
    for p, z in enumerate(Z):
        D, k = np.kron(b, z), z.shape[1]  # rows (t slow), columns (basis of t slow)
        K = np.kron(K2, np.eye(k)) + (0 if p == 0 else np.kron(np.eye(k2), difference_penalty(k, 1)))
        goal = min((3.0 if functional else 1.0) * (1.0 if p == 0 else 4.0), k * k2)
        low, high, gram = -40.0, 40.0, D.T @ D
        for _ in range(200):
            middle = (low + high) / 2
            H = np.linalg.solve(gram + np.exp(middle) * K, gram)
            low, high = (middle, high) if 2 * np.trace(H) - np.trace(H @ H) > goal else (low, middle)
        designs.append(D)
        hats.append(np.linalg.solve(gram + np.exp(middle) * K, D.T))
    y, f, chosen = Y.ravel(order="F"), np.repeat(offset, len(Y)), []
    for _ in range(steps):
        u = mboost_slope(kind, y, f)
        fits = [D @ (H @ u) for D, H in zip(designs, hats, strict=True)]
        best = int(np.argmin([((u - fit) ** 2).sum() for fit in fits]))
        f = f + nu * fits[best]
        chosen.append(best)
    return chosen, f.reshape(Y.shape, order="F")


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_at_every_step_is_boosting_row_by_row(kind, functional):
    result = model(kind, functional, policy=LONELY).fit(steps=15, every=1)
    half = 2.0 if kind == "binomial" else 1.0
    chosen, f = boost_rows(kind, functional, FRAME, result.offset / half, 15)
    labels = list(result.learners.index)
    assert [labels.index(name) for name in result.path["learner"]] == chosen
    found = np.asarray(result.predict(FRAME, "linear")).reshape(f.shape)
    np.testing.assert_allclose(found, half * f, atol=1e-6)


@pytest.mark.parametrize("kind", ["binomial", "poisson", "huber"])
def test_fewer_exchanges_come_close_to_that_path(kind):
    fits = {every: model(kind).fit(steps=60, every=every) for every in (1, 5, 20)}
    f = {every: one.predict(FRAME, "linear") - one.offset[0] for every, one in fits.items()}
    far = [np.linalg.norm(f[every] - f[1]) / np.linalg.norm(f[1]) for every in (5, 20)]
    assert far[0] < far[1] < 0.2 and far[0] < 0.05, far
    rounds = {every: one.ledger.rounds for every, one in fits.items()}
    assert rounds[1] - rounds[20] == 60 - 3 and rounds[5] - rounds[20] == 12 - 3
    losses = [fits[every].path["loss"].iloc[-1] for every in (1, 5, 20)]
    assert np.ptp(losses) < 0.01 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_along_the_path_is_that_of_the_rows_at_exchanges(kind):
    result = model(kind, policy=LONELY).fit(steps=25)
    y = FRAME[f"one_{kind}"].to_numpy()
    for m in (10, 20, 25):
        f = result.steps(m).predict(FRAME, "linear").to_numpy()
        known = {
            "binomial": lambda f=f: -np.log(np.where(y == 1.0, expit(f), expit(-f))).mean(),
            "poisson": lambda f=f: (np.exp(f) - y * f).mean(),
            "huber": lambda f=f: np.where(
                np.abs(y - f) < 0.4, (y - f) ** 2 / 2, 0.4 * (np.abs(y - f) - 0.2)
            ).mean(),
            "quantile": lambda f=f: np.maximum(0.3 * (y - f), -0.7 * (y - f)).mean(),
        }[kind]()
        assert result.path["loss"][m] == pytest.approx(known, rel=1e-9)
        assert result.steps(m).score(FRAME)["loss"] == pytest.approx(known, rel=1e-9)
    assert result.path["loss"].is_monotonic_decreasing or kind == "quantile"
    assert result.learners["explained"].sum() == pytest.approx(1.0)


def test_rows_that_change_sides_alone_are_held_back():
    result = model("quantile").fit(steps=60)
    held = result._record.boosting.held
    assert 0 < held <= 60 and f"{held} exchanges" in str(result.summary())
    exact = model("quantile", policy=LONELY).fit(steps=60)
    ends = [one.score(FRAME)["loss"] for one in (result, exact, exact.steps(1))]
    assert ends[2] - ends[0] > 0.8 * (ends[2] - ends[1]) > 0.0  # on eighty rows a site


def test_neither_number_nor_order_of_sites_matters():
    fits = []
    for site in (np.zeros(240, int), np.arange(240) % 2, -np.arange(240) % 12):
        fits.append(model("binomial", True, FRAME.assign(site=site), penalty="separable").fit(steps=30))
    one, *others = fits
    for other in others:
        assert list(one.path["learner"]) == list(other.path["learner"])
        np.testing.assert_allclose(one.coef, other.coef, atol=1e-6 * np.abs(one.coef).max())


def test_sites_as_folds_are_judged_by_the_fit_of_the_others():
    result = model("binomial").fit(steps=20, select="cv", folds="site")
    for f in range(3):
        rest, own = FRAME[FRAME["site"] != f], FRAME[FRAME["site"] == f]
        alone = model("binomial", frame=rest).fit(steps=20)
        assert result._cv[f, 19] == pytest.approx(alone.score(own)["loss"], rel=1e-6)


def test_a_fold_is_judged_by_the_fit_of_the_other_rows_and_masks_change_nothing():
    result = model("huber").fit(steps=20, select="cv", folds=2, seed=5)
    assert result._record.masked
    request = CurveSumsRequest((Learner("1"),), None, 2, 5)
    fold = np.empty(240, dtype=int)
    for k in range(3):
        fold[np.arange(240) % 3 == k] = deal(80, request, f"site {k}")
    for f in range(2):
        alone = model("huber", frame=FRAME[fold != f]).fit(steps=20, masked=False)
        assert result._cv[f, 19] == pytest.approx(alone.score(FRAME[fold == f])["loss"], rel=1e-6)
    assert list(result.cv.index) == [10, 20] and result.mstop in (10, 20)


def test_where_boosting_starts():
    starts = {kind: model(kind).fit(steps=1).offset[0] for kind in KINDS}
    y = {kind: FRAME[f"one_{kind}"] for kind in KINDS}
    assert starts["binomial"] == pytest.approx(np.log(y["binomial"].mean() / (1 - y["binomial"].mean())))
    assert starts["poisson"] == pytest.approx(np.log(y["poisson"].mean()))
    assert starts["huber"] == pytest.approx(y["huber"].mean())
    normal = y["quantile"].mean() - 0.524401 * y["quantile"].std(ddof=0)
    assert starts["quantile"] == pytest.approx(normal, rel=1e-4)
    assert model("poisson").fit(steps=1, offset=-1.0).offset[0] == -1.0
    never = FRAME.assign(binomial_3=0.0)
    assert np.ptp(model("binomial", True, never).fit(steps=1).offset) == 0.0


def test_predictions_are_means_and_a_file_keeps_all(tmp_path):
    result = model("binomial", True).fit(steps=20, select="cv", folds=3, seed=1)
    np.testing.assert_allclose(result.predict(FRAME), expit(result.predict(FRAME, "linear")))
    text = str(result.summary())
    assert "Binomial, logit" in text and "Loss explained" in text and "R-squared" not in text
    result.save(tmp_path / "boost.fed")
    again = fs.load(tmp_path / "boost.fed")
    assert str(again.summary()) == text
    pd.testing.assert_frame_equal(again.cv, result.cv)
    assert result.plot("path").get_ylabel() == "loss" and result.plot("cv").has_data()
    for statement in ("refit", "split", "entry_test"):
        with pytest.raises(NotAvailableError, match="for squared loss"):
            getattr(result, statement)()
    for request in (lambda: result.aicc, lambda: result.rsquared, lambda: result.stability(1)):
        with pytest.raises(NotAvailableError):
            request()
    with pytest.raises(NotAvailableError, match="up to step 20"):
        result.steps(30)


def test_progress_is_a_line_an_exchange(capsys):
    fit = model("binomial").fit(steps=25, progress=True)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 4 and lines[-1].split()[:4] == ["step", "25", "of", "25"]
    assert float(lines[-1].split()[-1]) == pytest.approx(fit.path["loss"].iloc[-1], abs=1e-6)


def test_the_dry_run_counts_rounds_and_what_all_scores_reveal():
    reported = str(model("binomial").explain(steps=50))
    fit = model("binomial").fit(steps=50)
    assert "6 exchanges of scores" in reported and "One round" not in reported
    assert "products of 25 columns over 240 rows" in reported and "of 25 columns" in str(fit.summary())
    curves = model("poisson", True).explain(steps=20)
    assert "3 exchanges of scores" in str(curves)
    left = fit.ledger.to_frame().query("array == 'score' and sender == 'site 0'")
    assert left["shape"].tolist() == [(1, 19, 1)] * 6


def test_steps_of_large_counts_are_infinite_and_what_helps_is_named():
    frame = FRAME.assign(one_poisson=np.random.default_rng(1).poisson(4000, 240).astype(float))
    with pytest.raises(
        EstimationError, match=r"Poisson, log: steps are infinite.* learning rate of at most 0\.0003"
    ):
        model("poisson", frame=frame).fit(steps=100, learning_rate=1.0, offset=1.0, every=1)
    with pytest.raises(EstimationError, match=r"at most 0\.1"):
        model("poisson").fit(steps=10, offset=800.0)


def test_a_start_far_from_all_responses_is_named():
    with pytest.raises(EstimationError, match="a larger delta"):
        model("huber").fit(steps=10, offset=1e6)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [("binomial", 2.0, "other than 0 and 1"), ("poisson", 0.5, "not a whole number from zero")],
)
def test_responses_that_a_loss_cannot_have_are_named(kind, value, words):
    with pytest.raises(DesignError, match=words):
        model(kind, frame=FRAME.assign(**{f"one_{kind}": value + FRAME[f"one_{kind}"]})).fit(steps=5)
    with pytest.raises(DesignError, match=words):
        model(kind, True, frame=FRAME.assign(**{f"{kind}_4": value})).fit(steps=5)


@pytest.mark.parametrize(
    ("options", "fit", "words"),
    [
        ({"loss": "median"}, {}, "loss: expected one of 'huber', 'quantile'"),
        ({"loss": "huber"}, {}, "delta: loss='huber' needs"),
        ({"loss": "huber", "delta": -1}, {}, "delta: expected a number above 0"),
        ({"loss": "quantile", "q": 1.0}, {}, "q: expected a number above 0 and below 1"),
        ({"loss": "quantile", "delta": 1.0}, {}, "delta: it belongs to loss='huber'"),
        ({"q": 0.3}, {}, "q: it belongs to loss='quantile'"),
        ({"loss": "quantile", "family": sm.families.Poisson()}, {}, "without a family"),
        ({"family": sm.families.Gamma()}, {}, "boosting has Gaussian"),
        ({"family": sm.families.Binomial(sm.families.links.Probit())}, {}, "Probit"),
        ({"loss": "quantile"}, {"every": 5}, "expected 1"),
        ({}, {"every": 5}, "with squared loss all steps follow"),
        ({"loss": "quantile"}, {"select": "aicc"}, "AICc needs squared loss"),
        ({"loss": "quantile"}, {"aggregation": "lsa"}, "needs squared loss"),
    ],
)
def test_arguments_without_a_meaning_are_named(options, fit, words):
    with pytest.raises(ModelError, match=words):
        partition = by_site(FRAME, "x1", "x2", policy=LOOSE)
        made = fs.FedFunctionBoost.from_formula("mean ~ x1", partition, **options)
        made.fit(steps=5, **fit)


def test_too_many_exchanges_for_the_rows_are_refused_and_what_passes_is_named():
    with pytest.raises(DesignError, match=r"slopes of the loss at all exchanges.*every="):
        model("binomial", policy="open").fit(steps=100, every=1)
    assert model("binomial", policy="open").fit(steps=100).mstop == 100
