"""Sums for marginal effects at coefficients chosen by the analyst count the rows on one side of a cut."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import MessageError, PolicyError
from fedstat.models.horizontal.session import add
from fedstat.models.horizontal.variable_changes import Change, ChangesRequest
from fedstat.models.run import FitAttempt

N = 600
PUBLISHED = {
    "z": {"kind": "number", "range": [20, 80]},
    "x": {"kind": "number", "range": [-10, 10]},
    "y": {"kind": "number", "range": [0, 1]},
    "g": {"kind": "category", "levels": ["a", "b"]},
}


def table():
    random = np.random.default_rng(3)
    z, x = random.uniform(20, 80, N), random.normal(size=N)
    y = (random.random(N) < 1.0 / (1.0 + np.exp((50.0 - z) / 10.0))).astype(float)
    levels = random.choice(["a", "b"], N)
    return pd.DataFrame({"z": z, "x": x, "y": y, "g": levels, "site": np.tile(["A", "B", "C"], N // 3)})


FRAME = table()
LOOSE = fs.Policy(min_count=1, max_share=1.0)
"""A policy that allows sums over single rows; the usual open policy already refuses them."""


def fitted(policy, formula):
    """Return a model over three sites, and a session of it."""
    strict = fs.Policy.strict() if policy == "strict" else LOOSE
    published = dict.fromkeys("ABC", PUBLISHED) if strict.masked_only else None
    partition = fs.ClientPartition.from_frame(FRAME, by="site", policy=strict, published=published)
    model = fs.FederatedGLM.from_formula(formula, partition, family=sm.families.Binomial())
    return model, model._open_session("glm", masked=strict.masked_only)


def reported(policy, points, log=False, together=True):
    """Sums of the mean at points, in one request for all points or in one request for each."""
    model, session = fitted(policy, "y ~ z + x")
    fixed = {"shift": np.zeros(3), "scale": np.ones(3), "log": np.array(log), "products": np.array(False)}
    fixed |= {"beta": np.zeros(3), "constant": np.array(0.0)}
    ends = [[0.0, 1e9] if log else [-1e9, 0.0]] * len(points)

    def protocol():
        found = []
        for some in [points] if together else [points[k : k + 1] for k in range(len(points))]:
            yield session.opening() + session.request_all("start", {}, model.distribution.to_json())
            request = {"changed": np.array(some), "ends": np.array(ends[: len(some)])}
            replies = yield session.request_all("sum_effects", fixed | request)
            found += add(replies, "changes").tolist()
        return np.array(found)

    return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)


def cuts(steep):
    """Coefficients under which means go from zero to one below, and above, one row's value of z."""
    z = np.sort(FRAME["z"].to_numpy())
    around = (z[N // 2 - 1 : N // 2 + 1] + z[N // 2 : N // 2 + 2]) / 2.0
    return [(-steep * cut, steep, 0.0) for cut in around]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("steep", [1e6, 50.0])
def test_rows_between_two_cuts_are_not_counted(together, steep):
    below, above = reported("loose", cuts(1e6))
    assert round(below - above) == 1  # the row between the two
    with pytest.raises(PolicyError):
        reported("strict", cuts(steep), together=together)


def test_logarithms_of_means_sum_values_beyond_a_cut():
    """The logarithm of a steep mean is the predictor on one side: its sum is that of few rows' values."""
    z = np.sort(FRAME["z"].to_numpy())
    cut = (z[0] + z[1]) / 2.0
    point = [(-1e3 * cut, 1e3, 0.0)]
    (level,) = reported("loose", point, log=True)
    np.testing.assert_allclose(cut - level / 1e3, z[0], atol=1e-3)
    with pytest.raises(PolicyError):
        reported("strict", point, log=True)


def changed(policy, points, *changes, formula="y ~ z + g"):
    """Sums of the effects of changes of variables at points, in one session for each."""
    model, session = fitted(policy, formula)
    p = len(points[0])
    fixed = {"shift": np.zeros(p), "scale": np.ones(p)}
    fixed |= {"log": np.array(False), "constant": np.array(0.0)}
    text = to_json(ChangesRequest(changes))

    def protocol():
        found = []
        for point in points:
            yield session.opening() + session.request_all("start", {}, model.distribution.to_json())
            replies = yield session.request_all("sum_changes", fixed | {"beta": np.array(point)}, text)
            found += add(replies, "effects").tolist()
        return np.array(found)[:, 0]

    return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)


@pytest.mark.parametrize("steep", [1e6, 50.0])
def test_changes_of_a_level_count_no_rows_between_two_cuts(steep):
    """At one level all means are zero, and at the other one they are one beyond a cut."""
    points = [(low - 200 * steep, z, 200 * steep) for low, z, _ in cuts(steep)]
    change = Change("g", "a", "b")
    below, above = changed("loose", [(low - 2e8, z, 2e8) for low, z, _ in cuts(1e6)], change)
    assert round(below - above) == 1  # the row between the two
    with pytest.raises(PolicyError):
        changed("strict", points, change)


def test_derivatives_that_few_rows_have_are_not_summed():
    """The derivative of a steep function is that of the row with the largest value."""
    text = "y ~ z + I(1 / (z - 20))"
    point = [(0.0, 0.0, 1.0)]
    assert np.isfinite(changed("loose", point, Change("z"), formula=text)).all()
    with pytest.raises(PolicyError):
        changed("strict", point, Change("z"), formula=text)


def test_variables_change_between_values_that_they_can_have():
    for change in (
        Change("z", "a", 31.0),
        Change("z", 30.0),
        Change("g"),
        Change("g", "a", "c"),
        Change("g", "a", "b", added=True),
        Change("x"),
        Change("", by="z", level=30.0),
        Change("", by="g"),
        Change("", by="g", level="c"),
        Change("", by="x", level=1.0),
    ):
        with pytest.raises(MessageError, match=r"column 'z|column 'g|column 'x"):
            changed("loose", [(0.0, 0.0, 0.0)], change)


@pytest.mark.parametrize("steep", [1e6, 50.0])
@pytest.mark.parametrize("more", [{}, {"by": "g", "level": "a"}])
def test_means_count_no_rows_between_two_cuts(steep, more):
    """Means that are zero or one count the rows beyond a cut, or those of a level."""
    below, above = changed("loose", cuts(1e6), Change(""), formula="y ~ z + x")
    assert round(below - above) == 1  # the row between the two
    points = [(low, z, 0.0) for low, z, _ in cuts(steep)]
    with pytest.raises(PolicyError):
        changed("strict", points, Change("", **more))


def test_a_value_that_is_added_moves_no_row_to_the_end_of_a_function():
    """After a step of a number, a steep function of it is that of one row."""
    text, z = "y ~ z + I(1 / (z - 19))", np.sort(FRAME["z"].to_numpy())
    step = Change("z", 0.0, float(19.0 + 1e-9 - z[N // 2]), added=True)
    point = [(0.0, 0.0, 1.0)]
    assert np.isfinite(changed("loose", point, step, formula=text)).all()
    with pytest.raises(PolicyError):
        changed("strict", point, step, formula=text)


@pytest.mark.parametrize("rows", [0, 1, 4, 5])
def test_means_by_level_need_enough_rows_of_it_at_each_site(rows):
    """The boundary is the owner's minimum: none or as many rows as it says pass, one less is refused."""
    frame = FRAME.assign(g="a")
    for site, n in {"A": rows, "B": 60, "C": 60}.items():
        frame.loc[frame.index[frame["site"] == site][:n], "g"] = "b"
    policy = fs.Policy(min_count=5, min_level_count=5)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    text = to_json(ChangesRequest((Change("", by="g", level="b"),)))

    def run():
        model = fs.FederatedGLM.from_formula("y ~ z + g", partition, family=sm.families.Binomial())
        session, fixed = model._open_session("glm", masked=True), {"shift": np.zeros(3), "scale": np.ones(3)}
        fixed |= {"log": np.array(False), "constant": np.array(0.0), "beta": np.array([0.0, 0.01, 0.1])}

        def protocol():
            yield session.opening() + session.request_all("start", {}, model.distribution.to_json())
            replies = yield session.request_all("sum_changes", fixed, text)
            return float(add(replies, "effects")[0, 0]), float(add(replies, "counts")[0])

        return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)

    if 0 < rows < 5:
        with pytest.raises(PolicyError, match="every level"):
            run()
    else:
        inside = frame[frame["g"] == "b"]
        mean = 1.0 / (1.0 + np.exp(-0.01 * inside["z"] - 0.1))
        np.testing.assert_allclose(run(), (mean.sum(), len(inside)), rtol=1e-6)
