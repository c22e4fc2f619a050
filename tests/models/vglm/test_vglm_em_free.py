"""Selection with missing blocks, where columns depend between sites: between="free"."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from test_vglm_em import MISSING, SIZES, RowsEM, model_of, moments_of

import fedstat as fs
from fedstat.errors import AssumptionWarning, ModelError
from fedstat.kernels.penalized.penalties import Penalty
from fedstat.models.vertical.joint_normal.fit import maximize_joint_normal, without_effects
from fedstat.models.vertical.joint_normal.likelihood import FreeParameters
from fedstat.models.vglm.em_fit import WorkingModel, refit_blocks


def free(**options):
    return model_of(between="free", **options)


class RowsFreeEM(RowsEM):
    """The same with one covariance of all columns."""

    def __init__(self, table, names):
        super().__init__(table, names, SIZES)
        self.sizes = (sum(SIZES),)


@pytest.mark.parametrize("penalty", ["lasso", "scad"])
def test_it_is_the_limit_of_penalized_em_over_rows(penalty):
    result = free(penalty=penalty).fit(n_lambdas=8, ratio=3e-2, algorithm="descent")
    lam, row = result.path.index[5], result.path_params.iloc[5]
    rows = RowsFreeEM(MISSING, list(row.index[1:]))
    rows.beta = row.iloc[1:].to_numpy() * rows.scale / rows.sd  # from ours it must not move
    rows.run(Penalty(penalty), lam / rows.sd, 600, 1e-10)
    assert 0 < np.count_nonzero(rows.beta) < 12
    np.testing.assert_allclose(row.iloc[1:] * rows.scale / rows.sd, rows.beta, atol=1e-6)
    assert result.path["converged"].all()


def test_without_a_penalty_it_is_vfem_of_the_same_law():
    model = free()
    ours, vfem = model.fit(lam=0.0), fs.VFEMRegression.from_formula("y ~ .", model.partition).fit()
    np.testing.assert_allclose(ours.params, vfem.params, rtol=1e-7)
    np.testing.assert_allclose(ours.bse, vfem.bse, rtol=1e-6)
    for name in ("llf", "rsquared", "bic", "scale"):
        assert getattr(ours, name) == pytest.approx(getattr(vfem, name), rel=1e-7), name
    path = ours.path_params.iloc[0]  # the solver of the path, before the refit
    np.testing.assert_allclose((path - vfem.params) / vfem.bse, 0.0, atol=1e-5)
    assert ours.independence_lr_test() == pytest.approx(vfem.independence_lr_test(), rel=1e-6)


def test_the_refit_keeps_all_columns_in_their_law():
    joint = WorkingModel.of(moments_of(MISSING), "free")
    support = np.arange(12) % 3 == 0
    refit, _ = refit_blocks(joint, support)
    assert refit.llf == pytest.approx(without_effects(joint.complete, support).log_likelihood, rel=1e-10)
    # A profile of the likelihood: it falls by half a unit at one standard error, but for the third order.
    x = joint.complete.moments
    j, column = 2, int(np.flatnonzero(support)[1])
    step = 0.05 * np.sqrt(refit.cov[j, j])
    falls = []
    for move in (-step, step):
        at = (refit.params[j] + move) * x.scale[column] / x.scale[-1]
        falls.append(refit.llf - profile(joint, support, column, at))
    assert np.mean(falls) == pytest.approx(0.5 * 0.05**2, rel=1e-3)


def profile(joint, support, column, value):
    """Largest log-likelihood where a coefficient of standardized columns has this value."""
    others = support.copy()
    others[column] = False
    start = without_effects(joint.complete, support).point
    beta = start.beta.copy()
    beta[column] = value
    found = maximize_joint_normal(
        replace(joint.model, moves=FreeParameters(joint.model.moves.edges, others)),
        replace(start, beta=beta),
        1e-9,
        200,
    )
    return found.log_likelihood


def draw(n=1_200, seed=2):
    """Two sites whose first columns have the correlation .6; half of the second lacks by lot."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 6))
    X[:, 3] = 0.6 * X[:, 0] + 0.8 * X[:, 3]
    y = 1.0 + X @ [1.0, 0.0, 0.5, 1.0, 0.0, 0.0] + rng.normal(size=n)
    table = pd.DataFrame(X, columns=["a1", "a2", "a3", "b1", "b2", "b3"]).assign(y=y, id=range(n))
    has = rng.random(n) < 0.5
    frames = {
        "A": table[["id", "y", "a1", "a2", "a3"]],
        "B": table.loc[has, ["id", "b1", "b2", "b3"]],
        "C": table[["id"]].assign(c1=rng.normal(size=n)),
    }
    return fs.ClientPartition.from_frames(frames, on="id")


@pytest.mark.slow
def test_blocks_that_correlate_bias_the_independent_model_alone():
    how = {"missing": "em", "penalty": "scad"}
    with pytest.warns(AssumptionWarning, match="between='free'"):
        apart = fs.VerticalGLM.from_formula("y ~ .", draw(), between="independent", **how).fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AssumptionWarning)
        result = fs.VerticalGLM.from_formula("y ~ .", draw(), **how).fit()
    assert set(result.refit.params.index) == {"Intercept", "a1", "a3", "b1"}
    assert abs(result.refit.params["a1"] - 1.0) < 3.0 * result.refit.bse["a1"]
    assert abs(apart.refit.params["a1"] - 1.0) > 3.0 * apart.refit.bse["a1"]
    notes = " ".join(result.notes)
    assert "covariance is free between sites" in notes and "Most correlated blocks" not in notes


def test_arguments_have_a_meaning_together():
    with pytest.raises(ModelError, match="between: expected"):
        fs.VerticalGLM.from_formula("y ~ .", draw(), missing="em", between="none")
