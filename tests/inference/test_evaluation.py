"""Discrimination and calibration from counts, against the same from rows; pseudo R-squared."""

import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose, assert_array_equal
from pictures import WIDTHS, faults, page
from scipy import special, stats

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.discrimination import discrimination, roc_points
from fedstat.inference.evaluation import ALL, Evaluation, merge_small_bins
from fedstat.inference.likelihood import cox_snell, mcfadden
from fedstat.inference.plots import STRIP, join_bins

SITES = ("Basel", "Bern", "Zürich")
B = 40
EDGES = np.linspace(0.0, 1.0, B + 1)


def rows(seed=5):
    """Predictions and events of each site; Bern has more events than predicted."""
    rng = np.random.default_rng(seed)
    for site, n, shift in zip(SITES, (500, 900, 60), (0.0, 0.6, -0.4), strict=True):
        eta = rng.normal(-1.0, 1.2, n)
        event = (rng.random(n) < 1 / (1 + np.exp(-eta - shift))).astype(float)
        yield pd.DataFrame({"site": site, "p": 1 / (1 + np.exp(-eta)), "event": event})


def counted(frames, least=0, **changes):
    """Releases of the sites about their rows."""
    n, events, expected = np.zeros((3, len(SITES), B))
    for k, frame in enumerate(frames):
        bins = np.searchsorted(EDGES, frame["p"], side="right") - 1
        counts = np.bincount(bins, minlength=B)
        at = merge_small_bins(counts, least)[bins]
        n[k], events[k] = np.bincount(at, minlength=B), np.bincount(at, frame["event"], B)
        expected[k] = np.bincount(at, frame["p"], B)
    sums = {"n": n, "observed": events, "expected": expected}
    return Evaluation(**({"edges": EDGES, "sites": SITES, "least": least} | sums | changes))


@pytest.fixture(scope="module")
def frames():
    return list(rows())


@pytest.fixture(scope="module")
def evaluation(frames):
    return counted(frames)


def area(score, event):
    """Share of pairs of an event and a non-event in which the event has the larger score."""
    x, y = score[event == 1], score[event == 0]
    return stats.mannwhitneyu(x, y).statistic / (len(x) * len(y))


# -- discrimination ----------------------------------------------------------------------------------


def test_auc_is_that_of_the_binned_predictions(frames, evaluation):
    found = evaluation.auc_by_site
    for site, frame in zip(SITES, frames, strict=True):
        assert_allclose(found[site], area(np.floor(frame["p"] * B), frame["event"]), rtol=1e-12)
    all_ = pd.concat(frames)
    assert_allclose(evaluation.auc, area(np.floor(all_["p"] * B), all_["event"]), rtol=1e-12)


@pytest.mark.parametrize(("least", "width"), [(0, 0.03), (5, 0.05), (30, 0.2)])
def test_bounds_hold_the_auc_of_the_rows(frames, least, width):
    table = counted(frames, least).to_frame()
    exact = [area(frame["p"], frame["event"]) for frame in [*frames, pd.concat(frames)]]
    assert (table["auc_at_least"] <= exact).all()
    assert (exact <= table["auc_at_most"]).all()
    assert (table["auc_at_least"] <= table["auc"]).all()
    assert (table["auc"] <= table["auc_at_most"]).all()
    assert (table["auc_at_most"] - table["auc_at_least"]).iloc[-1] < width


def test_bounds_are_reached_by_rows_in_their_bins(frames, evaluation):
    all_ = pd.concat(frames)
    bins = np.floor(all_["p"] * B)
    table = evaluation.to_frame().loc[ALL]
    assert_allclose(table["auc_at_most"], area(bins + 0.5 * all_["event"], all_["event"]), rtol=1e-12)
    assert_allclose(table["auc_at_least"], area(bins - 0.5 * all_["event"], all_["event"]), rtol=1e-12)


def test_bounds_allow_for_rows_that_moved():
    """A row counted one bin away may have stood on the other side of another site's rows."""
    n, events = np.array([[5.0, 0, 5], [0, 6, 0]]), np.array([[0.0, 0, 5], [0, 6, 0]])
    found = discrimination(events, n - events, least=5)
    assert found.auc == 1.0
    assert_allclose([found.at_least, found.at_most], [5 * 5 / (11 * 5), 1.0])
    assert discrimination(events, n - events).at_least == 1.0


@pytest.mark.parametrize(
    ("events", "others"),
    [
        ([[0, 0, 0, 2], [0, 0, 2, 0]], [[0, 0, 0, 0], [0, 2, 0, 0]]),
        ([[0, 0, 0, 0], [0, 0, 2, 0]], [[2, 0, 0, 0], [0, 2, 0, 0]]),
    ],
    ids=["events moved up", "others moved down"],
)
def test_rows_may_come_from_any_empty_bin_beside_theirs(events, others):
    """The second site has rows on either side: its own have not moved; the first site's may have anywhere."""
    found = discrimination(np.array(events, dtype=float), np.array(others, dtype=float), least=2)
    assert (found.at_least, found.auc, found.at_most) == (0.5, 1.0, 1.0)


def test_points_with_the_same_counts_are_one():
    thresholds = np.linspace(0.0, 1.0, 6)
    events, others = np.array([0.0, 1.0, 0.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0, 0.0, 0.0])
    points = roc_points(events, others, thresholds)
    expected = [[1.0, 0.0, 0.0], [0.8, 0.0, 0.5], [0.2, 0.0, 1.0], [0.0, 1.0, 1.0]]
    assert_allclose(points, expected)


def exact_interval(score, event):
    """DeLong, DeLong and Clarke-Pearson (1988) from rows, as R's pROC::ci.auc prints it."""
    x, y = score[event == 1], score[event == 0]
    both, own_x, own_y = stats.rankdata(np.r_[x, y]), stats.rankdata(x), stats.rankdata(y)
    of_events, of_others = (both[: len(x)] - own_x) / len(y), 1.0 - (both[len(x) :] - own_y) / len(x)
    squares, sizes = np.array([of_events.var(ddof=1), of_others.var(ddof=1)]), np.array([len(x), len(y)])
    error, A = np.sqrt((squares / sizes).sum()), of_events.mean()
    df = error**4 / ((squares / sizes) ** 2 / (sizes - 1)).sum()
    half = stats.t.ppf(0.975, df) * error / (A * (1.0 - A))
    return special.expit(special.logit(A) + np.array([-half, half]))


@pytest.mark.parametrize("least", [0, 5])
def test_the_interval_is_that_of_the_rows(frames, least):
    table = counted(frames, least).to_frame()
    for who, frame in zip([*SITES, ALL], [*frames, pd.concat(frames)], strict=True):
        exact = exact_interval(frame["p"].to_numpy(), frame["event"].to_numpy())
        found = table.loc[who, ["auc_low", "auc_high"]].to_numpy(dtype=float)
        width = exact[1] - exact[0]
        assert_allclose(found, exact, atol=0.05 * width)  # a twentieth: what bins can shift


def test_an_interval_stays_between_zero_and_one():
    found = discrimination(np.array([[0.0, 3.0]]), np.array([[20.0, 1.0]]))
    assert found.auc + 2.0 * found.std_error > 1.0 > found.conf_int()[1] > found.auc
    assert discrimination(np.array([[0.0, 3.0]]), np.array([[20.0, 0.0]])).conf_int() == (1.0, 1.0)


def test_intervals_miss_on_both_sides():
    """15 events among 300 rows: an interval symmetric about the AUC covers .915, and is too high in .07."""
    rng, auc = np.random.default_rng(0), stats.norm.cdf(1.0 / np.sqrt(2.0))
    limits = []
    for _ in range(1000):
        x, y = rng.normal(1.0, 1.0, 15), rng.normal(0.0, 1.0, 285)
        events, others = (np.histogram(v, np.linspace(-5, 8, 400))[0] for v in (x, y))
        limits.append(discrimination(events[None] * 1.0, others[None] * 1.0).conf_int())
    low, high = np.transpose(limits)
    assert np.mean(auc < low) < 0.055 and np.mean(auc > high) < 0.045
    assert np.mean((low < auc) & (auc < high)) > 0.93


def test_standard_error_is_the_published_one():
    """Hanley and McNeil (1982), table II: ratings of 109 computed tomographic images."""
    normal, abnormal = np.array([[33.0, 6, 6, 11, 2]]), np.array([[3.0, 2, 2, 11, 33]])
    found = discrimination(abnormal, normal)
    assert_allclose([found.auc, found.std_error], [0.893, 0.032], atol=5e-4)


def test_standard_error_counts_triples():
    rng = np.random.default_rng(0)
    x, y = rng.integers(2, 6, 9), rng.integers(0, 5, 7)

    def above(a, b, c):
        """Probability that a and b, ties broken at random, are both above c."""
        if c in (a, b):
            return (a >= c) * (b >= c) * (1 / 3 if a == b else 1 / 2)
        return float(a > c and b > c)

    A = np.mean([(a > c) + 0.5 * (a == c) for a in x for c in y])
    Q1 = np.mean([above(a, b, c) for a in x for b in x for c in y])
    Q2 = np.mean([above(-a, -b, -c) for a in y for b in y for c in x])
    variance = (A * (1 - A) + 8 * (Q1 - A**2) + 6 * (Q2 - A**2)) / 63
    found = discrimination(np.bincount(x, minlength=6)[None] * 1.0, np.bincount(y, minlength=6)[None] * 1.0)
    assert_allclose([found.auc, found.std_error], [A, np.sqrt(variance)])


def test_no_auc_without_both_outcomes(evaluation):
    events = np.vstack([evaluation.observed[:2], np.zeros(B)])
    other = Evaluation(
        edges=EDGES, sites=SITES, n=evaluation.n, observed=events, expected=evaluation.expected
    )
    assert np.isnan(other.auc_by_site["Zürich"])
    assert 0.5 < other.auc < 1.0
    assert "-" in other.summary().as_text()


# -- merging bins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([40, 3, 0, 9, 2, 0], [0, 0, 2, 3, 3, 5]),
        ([50, 3, 0, 0, 0, 40], [0, 0, 2, 3, 4, 5]),
        ([2, 2, 2], [1, 1, 1]),
        ([7, 0, 5], [0, 1, 2]),
        ([9, 4, 6], [0, 2, 2]),
        ([0, 0], [0, 1]),
    ],
)
def test_small_bins_join_their_nearest_neighbor(counts, expected):
    assert_array_equal(merge_small_bins(np.array(counts), 5), expected)


def test_no_released_bin_is_small_and_no_row_is_lost():
    rng = np.random.default_rng(1)
    for _ in range(200):
        counts = rng.poisson(rng.gamma(0.5, 12.0, 30))
        least = int(rng.integers(2, 12))
        if 0 < counts.sum() < least:
            continue
        groups = merge_small_bins(counts, least)
        released = np.bincount(groups, counts, len(counts))
        assert not ((released > 0) & (released < least)).any()
        assert released.sum() == counts.sum()
        assert (np.diff(groups[counts > 0]) >= 0).all()
        assert_array_equal(groups[released > 0], np.flatnonzero(released))


def test_too_few_rows_are_not_released():
    with pytest.raises(EstimationError, match="expected at least 5 rows to count in bins, received 4"):
        merge_small_bins(np.array([0, 3, 1]), 5)


# -- calibration -------------------------------------------------------------------------------------


def test_calibration_is_that_of_the_rows_in_each_bin(frames, evaluation):
    all_ = pd.concat([*frames, pd.concat(frames).assign(site=ALL)])
    all_["bin"] = np.floor(all_["p"] * B).astype(int)
    means = all_.groupby(["site", "bin"]).agg(
        n=("p", "size"),
        events=("event", "sum"),
        mean_predicted=("p", "mean"),
        observed=("event", "mean"),
    )
    table = evaluation.calibration()
    expected = means.reindex(table.index)
    assert len(table) == len(means)
    assert_allclose(table[["n", "events", "mean_predicted", "observed"]], expected, rtol=1e-10)
    predicted = table["mean_predicted"]
    assert predicted.between(table["low"], table["high"]).all()


@pytest.mark.parametrize("least", [0, 30])
def test_ratio_is_that_of_the_rows_however_bins_are_merged(frames, least):
    table = counted(frames, least).to_frame()
    for who, frame in zip([*SITES, ALL], [*frames, pd.concat(frames)], strict=True):
        assert_allclose(table.loc[who, "ratio"], frame["event"].sum() / frame["p"].sum(), rtol=1e-12)
        assert table.loc[who, "n"] == len(frame)


def test_other_responses_have_no_auc(evaluation):
    other = Evaluation(
        edges=EDGES,
        sites=SITES,
        n=evaluation.n,
        observed=3.0 * evaluation.n,
        expected=2.0 * evaluation.n,
        binary=False,
    )
    assert list(other.to_frame()) == ["n", "observed", "expected", "ratio"]
    assert (other.to_frame()["ratio"] == 1.5).all()
    assert (other.calibration()["total"] == 3.0 * other.calibration()["n"]).all()
    assert "AUC" not in other.summary().as_text()
    for statement in ("auc", "auc_by_site"):
        with pytest.raises(NotAvailableError, match="not binary"):
            getattr(other, statement)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": np.ones((3, 2))}, r"expected \(3, 40\) \(sites, bins\), received n of shape \(3, 2\)"),
        ({"edges": EDGES[::-1]}, "ascending"),
        ({"n": np.eye(3, B) - 1e-3}, "not so at Basel, Bern, Zürich"),
        ({"n": np.eye(3, B)}, "rows in each bin; not so at Basel, Bern, Zürich"),
    ],
)
def test_what_does_not_fit_is_refused(frames, changes, message):
    with pytest.raises(ModelError, match=message):
        counted(frames, **changes)


def test_summary_holds_every_site_and_says_how(frames):
    text = counted(frames, 5).summary().as_text()
    assert max(map(len, text.splitlines())) <= 98
    assert all(site in text for site in (*SITES, ALL))
    assert "Bins of fewer than 5 rows" in text
    assert re.search(r"AUC +std err +0.025 +0.975", text) and "over all sites is between" in text
    assert "fewer than" not in counted(frames).summary().as_text()


def test_joined_bins_keep_their_sums_and_are_of_about_equal_size(evaluation):
    n, events, expected = (v.sum(axis=0) for v in (evaluation.n, evaluation.observed, evaluation.expected))
    joined = join_bins(n, events, expected, 8)
    assert_allclose([v.sum() for v in joined], [n.sum(), events.sum(), expected.sum()])
    assert len(joined[0]) <= 8
    assert joined[0].max() < n.sum() / 8 + n.max()
    halves = join_bins(np.array([1.0, 2, 3, 2]), np.zeros(4), np.zeros(4), 2)[0]
    assert_allclose(halves, [3.0, 5.0])


def test_calibration_plot_shows_each_site_and_all(evaluation):
    plt = pytest.importorskip("matplotlib.pyplot")
    _, ax = plt.subplots()
    assert evaluation.plot_calibration(ax, groups=5) is ax
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*SITES, ALL]
    points = ax.collections[1].get_offsets()
    sums = [v.sum(axis=0) for v in (evaluation.n, evaluation.observed, evaluation.expected)]
    n, events, expected = join_bins(*sums, 5)
    assert_allclose(points, np.column_stack([expected / n, events / n]))
    p, z = events / n, stats.norm.ppf(0.975)
    center, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    drawn = [path.vertices[:, 1] for path in ax.collections[0].get_paths()]
    assert_allclose(drawn, ((center + half * [[-1], [1]]) / (1 + z**2 / n)).T)
    (strip,) = ax.child_axes
    heights = [bar.get_height() for bar in strip.patches]
    assert len(heights) == 2 * STRIP and strip.get_xlim() == ax.get_xlim()
    assert_allclose([sum(heights[:STRIP]), sum(heights[STRIP:])], [sums[0].sum(), sums[1].sum()])
    assert all(a >= b for a, b in zip(heights[:STRIP], heights[STRIP:], strict=True))
    assert strip.get_title(loc="right") == f"{sums[0].sum():,.0f} rows, {sums[1].sum():,.0f} events"
    plt.close("all")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_roc_is_drawn_with_its_areas(evaluation, width):
    ax = evaluation.plot_roc(page(width, 4.8))
    curves = evaluation.roc()
    lines = {line.get_label(): line for line in ax.lines[1:]}
    for who, found in evaluation.discrimination.items():
        line = lines[f"{who} (AUC {found.auc:.3f})"]
        assert_allclose(np.column_stack(line.get_data()), curves.loc[who, ["fpr", "tpr"]])
        assert_allclose(np.trapezoid(line.get_ydata(), line.get_xdata()), found.auc)
    assert len(lines) == len(SITES) + 1 and not faults(ax.figure)
    assert not faults(evaluation.plot_calibration(page(width, 5.0)).figure)


# -- pseudo R-squared --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [sm.families.Binomial(), sm.families.Poisson(), sm.families.Gaussian()],
    ids=lambda family: type(family).__name__,
)
def test_pseudo_rsquared_equals_statsmodels(family):
    rng = np.random.default_rng(2)
    X = sm.add_constant(rng.normal(size=(200, 2)))
    fit = sm.GLM((rng.normal(size=200) + X[:, 1] > 0) * 1.0, X, family=family).fit()
    assert_allclose(cox_snell(fit.llf, fit.llnull, fit.nobs), fit.pseudo_rsquared("cs"), rtol=1e-10)
    assert_allclose(mcfadden(fit.llf, fit.llnull), fit.pseudo_rsquared("mcf"), rtol=1e-10)


def test_cox_snell_of_a_linear_model_is_its_rsquared():
    rng = np.random.default_rng(2)
    X = sm.add_constant(rng.normal(size=(200, 2)))
    fit = sm.OLS(X.sum(axis=1) + rng.normal(size=200), X).fit()
    llnull = sm.OLS(fit.model.endog, X[:, :1]).fit().llf
    assert_allclose(cox_snell(fit.llf, llnull, fit.nobs), fit.rsquared, rtol=1e-10)


def test_rows_of_the_fit_are_named_as_such():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=400), "site": np.tile(["A", "B"], 200)})
    table["y"] = (rng.normal(size=400) < table["x"]).astype(int)
    old, new = (fs.ClientPartition.from_frame(part, by="site") for part in (table[:200], table[200:]))
    result = fs.GLORE.from_formula("y ~ x", old).fit()
    assert "slope is about 1 by construction" in result.evaluate().notes[0]
    assert not result.evaluate(new).own_rows
