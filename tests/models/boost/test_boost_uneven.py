"""Responses that were measured at different points, against boosting of all points row by row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import LOOSE, by_site, declared, simulated
from scipy.optimize import brentq

import fedstat as fs
from fedstat.kernels.curves import difference_penalty, integration_weights, overlapping_pairs, spline_basis
from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.learners import Learner
from fedstat.models.boost.learning.moments import CurveMoments, IrregularMoments, IrregularResponse
from fedstat.models.boost.learning.prepared_learners import BoostDesign

TIME = Learner("bbs", "t", knots=4, differences=2, df=3.0, high=1.0)
LEARNERS = (Learner("1"), Learner("bsignal", "x", knots=2), Learner("bols", "z"))
STARTS = (0, 1, 7, 9)


T = np.linspace(0, 1, 12)
TEXT = "y(t) ~ bsignal(x1, knots=5, df=4) + bsignal(x2, knots=5, df=4) + bols(age, df=1)"


def lacking(n=150, share=0.1):
    """Curves of three sites of which a tenth of all points of the response is missing."""
    frame = simulated(n)
    names = [f"y_{j}" for j in range(12)]
    lost = np.random.default_rng(8).uniform(size=(n, 12)) < share
    Y = np.where(lost, np.nan, frame[names].to_numpy())
    return frame.assign(**{name: Y[:, j] for j, name in enumerate(names)})


def fitted(partition, text=TEXT, penalty="fdboost", time="bbs(t, knots=4, df=3)", **settings):
    model = fs.FedFunctionBoost.from_formula(text, partition, time=time, penalty=penalty)
    return model.fit(**{"steps": 60, **settings})


def df_at(gram, penalty):
    H = np.linalg.solve(gram + penalty, gram)
    return np.trace(2 * H - H @ H)


def boost_points(frame, steps, offset, nu=0.1):
    """Boosting of y over all its points, one row each, with FDboost's penalty: selections, loss, fits."""
    s, Y = np.linspace(0, 1, 30), frame.filter(regex="^y_").to_numpy()
    seen = ~np.isnan(Y)
    row, at = np.nonzero(seen)
    X = [frame.filter(regex=f"^{name}_").to_numpy() for name in ("x1", "x2")]
    age = np.column_stack([np.ones(len(Y)), frame["age"]])
    center = np.linalg.qr(age.sum(axis=0)[:, None], mode="complete")[0][:, 1:]
    Z = [np.ones((len(Y), 1)), *((x * integration_weights(s)) @ spline_basis(s, 0, 1, 5) for x in X)]
    K1 = [np.zeros((1, 1)), difference_penalty(9, 1), difference_penalty(9, 1), center.T @ center]
    b, K2, designs, hats = spline_basis(T, 0, 1, 4), difference_penalty(8, 2), [], []
    for z, K, df in zip([*Z, age @ center], K1, (3.0, 12.0, 12.0, 3.0), strict=True):
        D = np.einsum("nj,nk->njk", b[at], z[row]).reshape(len(row), -1)
        gram, k = D.T @ D, z.shape[1]
        complete = np.kron(K2, np.eye(k)) + np.kron(np.eye(8), K)
        lam = brentq(lambda x, G=gram, K=complete, df=df: df_at(G, np.exp(x) * K) - df, -30, 30, xtol=1e-12)
        designs.append(D)
        hats.append(np.linalg.solve(gram + np.exp(lam) * complete, D.T))
    left, chosen = Y[seen] - offset[at], []
    for _ in range(steps):
        fits = [D @ (H @ left) for D, H in zip(designs, hats, strict=True)]
        best = int(np.argmin([((left - fit) ** 2).sum() for fit in fits]))
        left = left - nu * fits[best]
        chosen.append(best)
    return chosen, left, seen


@pytest.mark.parametrize("given", [True, False])
def test_missing_points_weigh_nothing_as_in_boosting_of_all_points(given):
    frame = lacking()
    partition = by_site(frame, "x1", "x2", "y", policy=LOOSE)
    offset = np.nanmean(frame.filter(regex="^y_").to_numpy(), axis=0)
    result = fitted(partition, **({"offset": offset} if given else {}))
    chosen, left, seen = boost_points(frame, 60, result.offset)
    assert given == np.allclose(result.offset, offset, atol=1e-12)
    labels = list(result.learners.index)
    assert [labels.index(name) for name in result.path["learner"]] == chosen
    Y = frame.filter(regex="^y_").to_numpy()
    np.testing.assert_allclose((Y - result.predict(frame).to_numpy())[seen], left, atol=1e-6)
    assert result.score(frame)["rsquared"] == pytest.approx(result.rsquared, rel=1e-7 if not given else 1e-3)


def test_neither_number_nor_order_of_sites_matters_to_uneven_responses(tmp_path):
    frame, fits = lacking(300), []
    for site in (np.zeros(300, int), np.arange(300) % 4, -np.arange(300) % 4):
        partition = by_site(frame.assign(site=site), "x1", "x2", "y", policy=LOOSE)
        fits.append(fitted(partition, penalty="separable", folds=3, select="aicc", seed=1))
    one, *others = fits
    for other in others:
        np.testing.assert_allclose(one.coef, other.coef, atol=1e-6 * np.abs(one.coef).max())
        np.testing.assert_allclose(one.aicc, other.aicc, rtol=1e-6)
    one.save(tmp_path / "uneven.fed")
    again = fs.load(tmp_path / "uneven.fed")
    pd.testing.assert_frame_equal(again.predict(frame), one.predict(frame))
    assert str(again.summary()) == str(one.summary()) and "Response points" in str(one.summary())
    for what in (one.refit, one.split, one.entry_test):
        with pytest.raises(fs.errors.NotAvailableError, match="max_gap=0"):
            what()


def test_four_sites_with_points_of_their_own_find_what_one_grid_does():
    random, equal = np.random.default_rng(4), np.linspace(0, 1, 101)
    grids = [equal, equal[::2], equal[::4], np.sort(random.uniform(size=40))]
    scores = random.normal(size=(400, 8))
    own, same = {}, {}
    for k, grid in enumerate(grids):
        z, weights = (
            scores[100 * k : 100 * (k + 1)],
            np.outer(np.sin(np.pi * np.linspace(0, 1, 8)), np.ones(1)),
        )
        for tables, t in ((own, grid), (same, equal)):
            x = z @ spline_basis(t, 0, 1, 4).T
            y = z @ (weights * np.cos(np.pi * t)) + np.random.default_rng(k).normal(size=x.shape) * 0.3
            wide = [pd.DataFrame(v, columns=[f"{n}_{p:.9f}" for p in t]) for n, v in (("x", x), ("y", y))]
            tables[f"site {k}"] = pd.concat(wide, axis=1)
    fits = [
        fitted(
            fs.ClientPartition.from_frames(tables, layout="horizontal", curves=declared("x", "y")),
            "y(t) ~ x",
            "separable",
            steps=100,
        )
        for tables in (own, same)
    ]
    assert len(fits[0].offset) > 101 == len(fits[1].offset)
    mixed, one = (fit.score(same["site 1"])["rsquared"] for fit in fits)
    assert one > 0.5
    assert mixed == pytest.approx(one, abs=0.01)


def rows(n, seed=1):
    random = np.random.default_rng(seed)
    return np.column_stack([np.ones(n), random.normal(size=(n, 6)), np.ones(n), random.normal(size=n)])


@pytest.mark.parametrize("penalty", ["separable", "fdboost"])
def test_sums_of_an_even_response_give_the_same_path(penalty):
    n, t = 60, np.linspace(0, 1, 15)
    Z, b, fold = rows(n), spline_basis(t, 0, 1, 4), np.arange(n) % 3
    Y = Z[:, 1:3] @ np.array([np.sin(3 * t), t]) + np.random.default_rng(2).normal(size=(n, 15)) * 0.3 + t**2
    C = Y @ b
    parts = [
        (Z.T @ Z, Z.T @ C, C.T @ C, Y.sum(axis=0), (Y**2).sum())
        for Z, Y, C in ((Z[fold == f], Y[fold == f], C[fold == f]) for f in range(3))
    ]
    plain = CurveMoments(*(np.array([part[i] for part in parts]) for i in range(5)))
    response = IrregularResponse(
        Y.ravel(), np.tile(b, (n, 1)), np.full(n, 15), overlapping_pairs(8, 3), np.ones(n)
    )
    uneven = IrregularMoments.of(response.products(Z, fold, 3), b, 3, None)
    design = BoostDesign(LEARNERS, STARTS, TIME, penalty)
    offset = b @ np.linalg.lstsq(b, Y.mean(axis=0), rcond=None)[0]
    one, other = (Boosting(moments, design, b, 0.1, given=offset) for moments in (plain, uneven))
    (ready, path), (ready_uneven, path_uneven) = (x.over(np.ones(3, bool), 50) for x in (one, other))
    np.testing.assert_allclose(ready.df, ready_uneven.df, rtol=1e-6)
    assert path.selected.tolist() == path_uneven.selected.tolist()
    np.testing.assert_allclose(path_uneven.risk, path.risk, rtol=1e-8)
    np.testing.assert_allclose(path_uneven.coef, path.coef, atol=1e-6 * np.abs(path.coef).max())
    np.testing.assert_allclose(other.cross_validate(20), one.cross_validate(20), rtol=1e-7)
    np.testing.assert_allclose(uneven.total.mean, offset, rtol=1e-9)


def even_and_uneven(n, curves, points, seed=1, **declared):
    """A fit of smooth curves of three sites, and the same if some of the curves lack points."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=n)
    Y = np.outer(z, np.linspace(0, 1, 20)) + 0.1 * rng.normal(size=(n, 20))
    lost = Y.copy()
    for row in range(curves):
        lost[row, rng.choice(20, points, replace=False)] = np.nan
    out = []
    for values in (Y, lost):
        frame = pd.DataFrame(values, columns=[f"y_{j:02d}" for j in range(20)])
        frame = frame.assign(z=z, site=np.array(list("ABC"))[np.arange(n) % 3])
        curve = fs.Curve("y_*", domain=(0, 1), **declared)
        partition = fs.ClientPartition.from_frame(frame, by="site", curves={"y": curve})
        out.append(
            fs.FedFunctionBoost.from_formula("y(t) ~ bols(z)", partition, time="bbs(t, knots=5, df=4)")
        )
    return out


@pytest.mark.parametrize("curves", [1, 12, 60])
def test_points_that_few_curves_lack_are_interpolated(curves):
    """One missing point does not refuse the fit; the estimates differ by less than the noise of a point."""
    even, uneven = even_and_uneven(90, curves, 1)
    with pytest.warns(fs.errors.DataWarning, match="lack points, which are interpolated"):
        found = uneven.fit(steps=50)
    assert found.nobs == 90 and np.abs(found.coef - even.fit(steps=50).coef).max() < 0.02


def test_long_gaps_of_few_curves_are_refused_with_a_remedy_that_works():
    uneven = even_and_uneven(90, 3, 9)[1]
    with pytest.raises(fs.errors.PolicyError, match="a max_gap leave out longer gaps"):
        uneven.fit(steps=5)
    with pytest.warns(fs.errors.DataWarning, match="left out rows"):
        assert even_and_uneven(90, 3, 9, max_gap=0.1)[1].fit(steps=5).nobs == 87


def test_short_gaps_are_filled_and_long_ones_are_not():
    values = np.array(
        [[0.0, np.nan, 2.0, 3.0, 4.0], [np.nan, 1.0, 2.0, 3.0, 5.0], [0.0, np.nan, np.nan, 3.0, 4.0]]
    )
    frame = pd.DataFrame(values, columns=[f"y_{j}" for j in range(5)]).assign(site="A")

    def filled(**declared):
        curve = {"y": fs.Curve("y_*", grid=np.linspace(0, 1, 5), domain=(0, 1), **declared)}
        partition = fs.ClientPartition.from_frame(frame, by="site", curves=curve)
        return partition.curves["A"]["y"].filled().values

    np.testing.assert_array_equal(filled(max_gap=0.25)[0], [0.0, 1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(filled(max_gap=0.25)[1], [1.0, 1.0, 2.0, 3.0, 5.0])
    np.testing.assert_array_equal(np.isnan(filled(max_gap=0.25)).sum(axis=1), [0, 0, 2])
    np.testing.assert_array_equal(filled(max_gap=0.5)[2], [0.0, 1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(np.isnan(filled(max_gap=0.0)).sum(axis=1), [1, 1, 2])
