"""Who sees the sums behind boosting: was a known person among the rows, and what is one person's curve?"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

import fedstat as fs
from fedstat.errors import DescriptionError
from fedstat.models.boost.explain import tracing_auc

pytestmark = pytest.mark.filterwarnings("ignore")
KNOTS = 6


def population(n, random):
    """Normal curves, a number of columns that a basis of as many functions holds, and ages."""
    curves = {name: random.normal(size=(n, 40)) for name in ("x1", "x2", "y")}
    wide = [pd.DataFrame(values).rename(columns=lambda j, c=c: f"{c}_{j}") for c, values in curves.items()]
    frame = pd.concat(wide, axis=1)
    return frame.assign(age=random.uniform(20, 80, n).round(2), site=np.array(list("ABC"))[np.arange(n) % 3])


def partition(frame, **options):
    curves = {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in ("x1", "x2", "y")}
    return fs.ClientPartition.from_frame(frame, by="site", curves=curves, **options)


def columns(frame, result):
    """Columns of the learners and of the response, computed by an attacker who knows a person's curves."""
    boosting = result._record.boosting
    from fedstat.kernels.curves import integration_weights, spline_basis

    s = np.linspace(0, 1, 40)
    basis = spline_basis(s, 0, 1, KNOTS)
    parts = [frame.filter(regex=f"^{c}_").to_numpy() for c in ("x1", "x2", "y")]
    Z = [(x * integration_weights(s)) @ basis for x in parts[:2]]
    return np.column_stack([np.ones(len(frame)), *Z, parts[2] @ boosting.basis])


@pytest.mark.parametrize("n", [300, 1200])
def test_exact_sums_reveal_who_was_among_the_rows_as_well_as_the_dry_run_says(n):
    random = np.random.default_rng(n)
    inside, outside, reference = (population(m, random) for m in (n, 1500, 20000))
    model = fs.FedFunctionBoost.from_formula(
        f"y(t) ~ bsignal(x1, knots={KNOTS}) + bsignal(x2, knots={KNOTS})",
        partition(inside),
        time=f"bbs(t, knots={KNOTS}, df=4)",
    )
    result = model.fit(steps=1)
    total = result._record.boosting.moments.total
    gram = np.block([[total.S, total.T], [total.T.T, total.Q]])
    U = {name: columns(frame, result) for name, frame in (("in", inside), ("out", outside))}
    np.testing.assert_allclose(gram, U["in"].T @ U["in"], rtol=1e-6, atol=1e-6 * np.abs(gram).max())
    R = columns(reference, result)
    sigma = R.T @ R / len(R)
    W = np.linalg.inv(sigma)
    M = W @ (gram / n - sigma) @ W
    score = {name: np.einsum("ij,jk,ik->i", u, M, u) for name, u in U.items()}
    ranks, k = rankdata(np.concatenate([score["in"], score["out"]]))[:n], len(outside)
    auc = (ranks.sum() - n * (n + 1) / 2) / (n * k)
    reported = tracing_auc(model.source._n_columns, n)
    assert reported - 0.08 < auc < reported + 0.03
    assert f"AUC about {reported:.2f}" in str(result.summary())


def known(frame):
    curve = {"kind": "curve", "domain": [0, 1]}
    one = {"x1": curve, "x2": curve, "y": curve, "age": {"kind": "number", "range": [20, 80]}}
    return dict.fromkeys("ABC", one)


def cut(frame, at, policy):
    """Sums of the response in its basis over those of more than an age, from a spline with ends around it."""
    ends = f"lower_bound={at - 1e-4!r}, upper_bound={at + 1e-4!r}"
    text = f"y(t) ~ bbs(age, knots=0, degree=1, differences=1, {ends})"
    sites = partition(frame, policy=policy, published=known(frame) if policy == "strict" else None)
    result = fs.FedFunctionBoost.from_formula(text, sites, time="bbs(t, knots=4, df=3)").fit(steps=1)
    return result._record.boosting


def test_ends_of_a_spline_next_to_one_person_reveal_the_curve_of_that_person():
    frame = population(600, np.random.default_rng(2)).drop_duplicates("age")
    ages = np.sort(frame["age"].to_numpy())
    victim = ages[len(ages) // 2]
    beside = (victim - 0.005, victim + 0.005)  # ages have two digits
    before, after = (cut(frame, float(at), "open") for at in beside)
    stolen = (before.moments.total.T - after.moments.total.T)[2]
    mine = frame.loc[frame["age"] == victim].filter(regex="^y_").to_numpy()[0]
    np.testing.assert_allclose(stolen, mine @ before.basis, atol=1e-6)
    with pytest.raises(DescriptionError, match="published range"):
        cut(frame, float(beside[0]), "strict")
