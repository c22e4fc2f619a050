"""Weighted sums of one set of rows, where curves of the response were measured at different points."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

import fedstat as fs
from fedstat.errors import DesignError, PolicyError
from fedstat.kernels.curves import curve_weights, integration_weights, overlapping_pairs, spline_basis
from fedstat.models.boost.explain import traced_columns, tracing_auc

pytestmark = pytest.mark.filterwarnings("ignore")
S = np.linspace(0, 1, 30)
THETA = integration_weights(S)[:, None] * spline_basis(S, 0, 1, 0)
BARE = fs.Policy(min_count=1, min_level_count=1)
"""No rule on groups of few rows."""


def population(n, random, points=25):
    """Curves x on one grid, and y of each person at times that an acquaintance knows."""
    x = random.normal(size=(n, 30))
    times = np.sort(random.uniform(size=(n, points)), axis=1)
    y = x[:, :1] * times + random.normal(size=(n, points))
    frame = pd.DataFrame(x).add_prefix("x_").assign(y=list(y), y_t=list(times))
    return frame.assign(site=np.array(list("ABC"))[np.arange(n) % 3]), times


CURVES = {"x": fs.Curve("x_*", domain=(0, 1)), "y": fs.Curve("y", at="y_t", domain=(0, 1))}


def summed(frame, knots=10, curves=CURVES, **options):
    """Sums of a fit, over one site unless the frame has more."""
    masked = options.pop("masked", None)
    partition = fs.ClientPartition.from_frame(frame, by="site", curves=curves, **options)
    text, time = "y(t) ~ bsignal(x, knots=0)", f"bbs(t, knots={knots}, df=4)"
    result = fs.FedFunctionBoost.from_formula(text, partition, time=time).fit(steps=1, masked=masked)
    return result._record.boosting.moments.total


def products(frame):
    """Products of a person's columns, (n, 5, 5)."""
    z = np.column_stack([np.ones(len(frame)), frame.filter(regex="^x_").to_numpy() @ THETA])
    return z[:, :, None] * z[:, None, :]


def test_who_knows_when_people_were_measured_solves_for_their_curves():
    frame, times = population(40, np.random.default_rng(1))
    total = summed(frame.assign(site="A"), policy=BARE)
    basis = spline_basis(times.ravel(), 0, 1, 10)
    weights = curve_weights(basis, np.full(40, 25), overlapping_pairs(14, 3))
    found = np.linalg.lstsq(weights.T, total.grams.reshape(50, 25), rcond=None)[0]  # 40 people, 47 weights
    np.testing.assert_allclose(found, products(frame).reshape(40, 25), atol=1e-5)
    with pytest.raises(PolicyError, match=r"'points of the response, which Curve\(..., max_gap=0"):
        summed(frame.assign(site="A"))
    known = {name: {"kind": "curve", "domain": [0, 1]} for name in ("x", "y")}
    strict = {"policy": "strict", "published": dict.fromkeys("ABC", known)}
    many = population(144, np.random.default_rng(2))[0]
    with pytest.raises(DesignError, match=r"need 51 weighted sums .* Curve\(..., max_gap=0\)"):
        summed(many, **strict)


def test_the_site_counts_weighted_sums_by_itself(monkeypatch):
    monkeypatch.setattr("fedstat.models.boost.row_source.check_size", lambda *_, **__: None)
    known = {name: {"kind": "curve", "domain": [0, 1]} for name in ("x", "y")}
    many = population(450, np.random.default_rng(2))[0]
    with pytest.raises(PolicyError, match="maximum parameters per row"):
        summed(many, policy=fs.Policy.strict(reasons="sent"), published=dict.fromkeys("ABC", known))
    owner = fs.Policy.strict(max_share=1.0)
    assert summed(many, policy=owner, published=dict.fromkeys("ABC", known)).n == 450


def wide(frame, lost):
    """Responses on one grid, without the second half of it for some people."""
    t = np.linspace(0, 1, 20)
    Y = np.array([np.interp(t, at, y) for at, y in zip(frame["y_t"], frame["y"], strict=True)])
    Y[lost, 10:] = np.nan
    return frame.drop(columns=["y", "y_t"]).join(pd.DataFrame(Y).add_prefix("y_")), t


@pytest.mark.parametrize("lost", [[7], [7, 8, 9]])
def test_few_people_with_missing_points_are_what_two_weights_differ_by(lost):
    curves = {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in ("x", "y")}
    frame, _ = population(120, np.random.default_rng(3))
    gappy, t = wide(frame.assign(site="A"), lost)
    total = summed(gappy, knots=4, curves=curves, policy=BARE)
    pairs = overlapping_pairs(8, 3)
    full = curve_weights(spline_basis(t, 0, 1, 4), np.array([20]), pairs)[0]
    late = int(np.flatnonzero((pairs[0] == 7) & (pairs[1] == 7))[0])
    stolen = total.S - total.grams[late] / full[late]
    np.testing.assert_allclose(stolen, products(frame)[lost].sum(axis=0), atol=1e-6)
    with pytest.raises(PolicyError, match=r"there are [13]\. .*a max_gap leave out longer gaps"):
        summed(gappy, knots=4, curves=curves)
    complete = {**curves, "y": fs.Curve("y_*", domain=(0, 1), max_gap=0)}
    assert summed(gappy, knots=4, curves=complete).n == 120 - len(lost)


def test_masks_hide_no_site_where_grids_differ_and_every_site_is_held_to_its_own_rows():
    random, tables, grids = np.random.default_rng(4), {}, {"A": 60, "B": 40, "C": 31}
    for site, m in grids.items():
        y = pd.DataFrame(random.normal(size=(60, m))).add_prefix("y_")
        tables[site] = pd.DataFrame(random.normal(size=(60, 30))).add_prefix("x_").join(y)
    curves = {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in ("x", "y")}

    def fit(frames, knots=0):
        partition = fs.ClientPartition.from_frames(frames, layout="horizontal", curves=curves)
        return fs.FedFunctionBoost.from_formula(f"y(t) ~ bsignal(x, knots={knots})", partition).fit(steps=1)

    result = fit(tables)
    total = result._record.boosting.moments.total
    ones = [
        curve_weights(spline_basis(np.linspace(0, 1, m), 0, 1, 10), np.array([m]), total.pairs)[0]
        for m in grids.values()
    ]
    own = np.linalg.lstsq(np.array(ones).T, total.grams.reshape(len(total.grams), -1), rcond=None)[0]
    for found, frame in zip(own, tables.values(), strict=True):
        np.testing.assert_allclose(found.reshape(5, 5), products(frame).sum(axis=0), atol=1e-5)
    assert result._record.masked and "every site's own sums can be computed" in " ".join(
        str(result.summary(notes="all")).split()
    )
    with pytest.raises(DesignError, match="C: 12 rows"):
        fit({**tables, "C": tables["C"][:12]})


def test_weighted_sums_reveal_who_was_among_the_rows_as_well_as_the_dry_run_says():
    random, n = np.random.default_rng(5), 1200
    (inside, t_in), (outside, t_out) = population(n, random), population(1500, random)
    (reference, t_ref) = population(20000, random)
    total = summed(inside, knots=2, policy=fs.Policy(max_parameters=10.0))
    pairs = overlapping_pairs(6, 3)
    upper = np.triu_indices(5)

    def statistics(frame, times):
        weights = curve_weights(spline_basis(times.ravel(), 0, 1, 2), np.full(len(frame), 25), pairs)
        own = products(frame)[:, upper[0], upper[1]]
        return (np.column_stack([np.ones(len(frame)), weights])[:, :, None] * own[:, None]).reshape(
            len(frame), -1
        )

    R = statistics(reference, t_ref)
    mean = R.mean(axis=0)
    W = np.linalg.pinv(np.cov(R.T), rcond=1e-8)
    reported = np.concatenate([total.S[upper], total.grams[:, upper[0], upper[1]].ravel()])
    direction = W @ (reported / n - mean)
    found = [(statistics(*who) - mean) @ direction for who in ((inside, t_in), (outside, t_out))]
    ranks = rankdata(np.concatenate(found))[:n]
    auc = (ranks.sum() - n * (n + 1) / 2) / (n * len(outside))
    expected = tracing_auc(traced_columns(5, 6, len(pairs[0])), n)
    assert expected - 0.12 < auc < expected + 0.03
