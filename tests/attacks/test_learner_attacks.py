"""One person's curve from the sums of learners: of rare levels, of stretches of a curve, of few rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, PolicyError
from fedstat.kernels.curves import spline_basis
from fedstat.models.boost.row_source import RowSource

pytestmark = pytest.mark.filterwarnings("ignore")
T = np.linspace(0, 1, 20)
TIME = "bbs(t, knots=2, df=3)"
BASIS = spline_basis(T, 0, 1, 2)
OPEN = fs.Policy(max_parameters=10.0, min_count=1, min_level_count=1, max_share=1.0)


def people(n=600):
    """Curves of which one person alone has the first stretch, and a ward that one person is in."""
    random = np.random.default_rng(7)
    x, y = random.normal(size=(n, 20)), random.normal(size=(n, 20))
    x[1:, :6] = 0.0
    wide = {f"x_{j}": x[:, j] for j in range(20)} | {f"y_{j}": y[:, j] for j in range(20)}
    ward = np.where(np.arange(n) == 0, "isolation", np.array(["north", "south"])[np.arange(n) % 2])
    return pd.DataFrame(wide).assign(
        ward=ward,
        flag=(np.arange(n) == 0).astype(float),
        age=random.uniform(20, 80, n),
        site=np.array(list("ABC"))[np.arange(n) * 3 // n],
    )


FRAME = people()
VICTIM = FRAME.filter(regex="^y_").to_numpy()[0]
CURVE = FRAME.filter(regex="^x_").to_numpy()[0]


def reported(text, policy=OPEN, frame=FRAME, **settings):
    """Record of a fit, whose sums the coordinator has seen."""
    curve = {"kind": "curve", "domain": [0, 1]}
    known = {
        "x": curve,
        "y": curve,
        "age": {"kind": "number", "range": [20, 80]},
        "flag": {"kind": "number", "range": [0, 1]},
        "ward": {"kind": "category", "levels": ["isolation", "north", "south"]},
    }
    curves = {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in ("x", "y")}
    published = dict.fromkeys("ABC", known) if policy == "strict" else None
    partition = fs.ClientPartition.from_frame(
        frame, by="site", curves=curves, policy=policy, published=published
    )
    return (
        fs.FedFunctionBoost.from_formula(text, partition, time=TIME).fit(steps=1, **settings)._record.boosting
    )


def test_a_level_of_a_random_effect_that_one_person_has_is_refused_whatever_the_policy():
    with pytest.raises(DesignError, match="fewer than 5 rows over all sites"):
        reported("y(t) ~ brandom(ward)")
    with refused_for("minimum rows per level"):
        reported("y(t) ~ brandom(ward)", "strict")


def test_few_rows_of_a_level_at_a_site_are_summed_by_random_effects_and_refused_by_a_strict_one():
    frame = FRAME.assign(
        ward=np.where(np.isin(np.arange(600), [0, 250, 300, 450, 500, 550]), "isolation", "north")
    )
    boosting = reported("y(t) ~ brandom(ward)", frame=frame, folds="site")
    own = boosting.moments.over(np.array([True, False, False]))
    (rare,) = np.flatnonzero(np.abs(np.diag(own.S)[1:] - 1.0) < 1e-6)
    np.testing.assert_allclose(own.T[1 + rare], VICTIM @ BASIS, atol=1e-6)
    with refused_for("minimum rows per level"):
        reported("y(t) ~ brandom(ward)", "strict", frame, folds="site")


def test_an_effect_multiplied_by_a_mark_of_one_person_is_that_person():
    text = "y(t) ~ bsignal(x, knots=0, by=flag)"
    own = reported(text).moments.total.T[1:]
    mine = CURVE @ spline_basis(T, 0, 1, 0) * T[1]
    np.testing.assert_allclose(own, np.outer(mine, VICTIM @ BASIS), atol=1e-6)
    with pytest.raises(PolicyError):
        reported(text, "strict")
    with pytest.raises(EstimationError, match="do not vary but as the intercept"):
        reported("y(t) ~ bols(age, by=flag)")


def test_a_stretch_of_a_curve_that_one_person_has_reveals_the_response_there():
    boosting = reported("y(t) ~ bconcurrent(x, knots=12, degree=1)")
    mine = (CURVE * VICTIM) @ spline_basis(T, 0, 1, 12, 1)
    stolen = boosting.varying.over(np.ones(1, bool)).score
    np.testing.assert_allclose(stolen[:4], mine[:4], atol=1e-6)  # who knows the curve x divides by it
    for learner in ("bconcurrent(x, knots=12, degree=1)", "bhist(x, knots=3, degree=1)"):
        with pytest.raises(PolicyError):
            reported(f"y(t) ~ {learner}", "strict")


def test_products_with_the_past_of_a_curve_want_rows_for_all_their_coefficients():
    text = "y(t) ~ bhist(x, knots=3, degree=1)"  # 25 coefficients
    even = FRAME.assign(**{f"x_{j}": np.random.default_rng(j).normal(size=600) for j in range(20)})
    strict = reported(text, "strict", even)
    assert strict.varying.gram.shape == (1, 25, 25)
    with pytest.raises(DesignError, match="27 columns"):
        reported(text, "strict", even[::8], masked=False)
    with pytest.raises(PolicyError):  # sums of ten folds, each over sixty rows
        RowSource._check_size, kept = lambda *_: None, RowSource._check_size
        try:
            reported(text, "strict", even, folds=10, masked=False)
        finally:
            RowSource._check_size = kept
