"""Entities with some of a site's columns: the fit conditions on what they have."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from joint_oracle import PooledJoint, correlated
from oracle import ITERATIVE, Study, packed
from test_free_glm import all_parameters
from test_free_model import draw, moments_of

import fedstat as fs
from fedstat.errors import DataWarning, DesignError, EstimationError, MessageError
from fedstat.models.vertical.joint_normal.fit import fit_joint_model
from fedstat.models.vertical.pattern_merging import ColumnUnits, PatternRule, plan_merges
from fedstat.models.vfem.joint_protocol import JointIteration

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.AssumptionWarning")


def partition_of(study, partial="condition", **options):
    return fs.ClientPartition.from_frames(study.frames(), on="id", partial=partial, **options)


def model(study, between="free", partial="condition", **options):
    return fs.VFEMRegression.from_formula("y ~ .", partition_of(study, partial, **options), between=between)


@pytest.fixture(scope="module")
def study():
    """Records are missing at random, and single cells also."""
    return draw(1, n=2_000, missing="mar", cells=0.05)


@pytest.fixture(scope="module")
def result(study):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        return model(study).fit()


def test_the_summary_names_missing_values_by_column(study, result):
    listed = result.diagnostics().set_index("kind").loc["missing_columns", "values"]["listed"]
    blocks = {block.site: block for block in result.estimate.blocks}
    parts = {part.split(" at ")[1].rstrip(")"): part.split(" (")[0] for part in listed.split("; ")}
    assert set(parts) == {"Bank", "Court"}  # Tax has one column
    for site, columns in study.columns.items():
        everything = study.table[list(columns)].isna()
        assert blocks[site].missing == pytest.approx(everything.to_numpy().mean(), abs=1e-12)
        own = everything[~everything.all(axis=1)]
        for share, name in (part.split(" % of ") for part in parts.get(site, "").split(", ") if part):
            assert float(share) == pytest.approx(100 * own[name].mean(), abs=0.051)


def as_used(study, result):
    """The pooled table without the values that count as missing since small patterns are merged."""
    table, design, exchange = study.table.copy(), result.model.design, result._held.exchange
    for block in design.blocks:
        rows = design.entities[block.rows]
        gone = np.repeat(~exchange.released[block.site][:, None], len(block.names), axis=1)
        gone |= ~exchange.columns.get(block.site, ~gone)
        for name, lost in zip(block.names, gone.T, strict=True):
            table.loc[table.index[rows[lost]], name] = np.nan
    return Study(table, study.columns, study.holder)


@pytest.mark.parametrize("between", ["free", "independent"])
def test_the_fit_is_maximum_likelihood_of_every_value_that_is_used(study, between):
    """Oracle: joint model of all columns from the pooled table, which test_free_model compares with rows."""
    with pytest.warns(DataWarning, match="count as missing in"):
        result = model(study, between).fit()
    used = as_used(study, result)
    pooled = fit_joint_model(moments_of(used), between)
    np.testing.assert_allclose(result.params, pooled.params, rtol=1e-6)
    assert result.llf == pytest.approx(pooled.log_likelihood, rel=1e-8)
    assert result.between == between
    known = study.table[study.covariates].notna().sum().sum()
    gone = known - used.table[study.covariates].notna().sum().sum()
    assert gone == sum(result.exchange.lost.values())
    assert 0 < gone < 0.02 * known


def test_predictions_condition_on_what_an_entity_has(study, result):
    """Mean and variance of the response given the values of each row, by the law that was fitted."""
    joint, X = result._fit.joint, study.table[study.covariates].to_numpy()
    expected, variance = np.empty(len(X)), np.empty(len(X))
    for i, row in enumerate(X):
        has = np.flatnonzero(~np.isnan(row))
        slopes = np.linalg.solve(joint.cov[np.ix_(has, has)], joint.cov[has, -1])
        expected[i] = joint.mean[-1] + slopes @ (row[has] - joint.mean[has])
        variance[i] = joint.cov[-1, -1] - slopes @ joint.cov[has, -1]
    prediction = result.get_prediction()
    np.testing.assert_allclose(prediction.predicted_mean, expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(prediction.var_resid, variance, rtol=1e-6)
    assert (prediction.se_mean > 0.0).all()
    # One entity with only one of the Bank's columns.
    single = study.table.iloc[[0]].assign(bank0=1.0, bank1=np.nan)
    single[["court0", "court1", "tax0"]] = np.nan
    frames = {"Bank": single[["bank0", "bank1"]].rename_axis("id").reset_index()}
    new = fs.ClientPartition.from_frames(frames, on="id", partial="condition", new_data=True)
    slope = joint.cov[0, -1] / joint.cov[0, 0]
    np.testing.assert_allclose(result.predict(new), joint.mean[-1] + slope * (1.0 - joint.mean[0]))


def test_statements_are_those_of_the_same_moments(study, result):
    moments = result.exchange.moments
    smaller = result.refit("y ~ . - court1 - bank1")
    fresh = fit_joint_model(moments.submodel(["bank0", "court0", "tax0"]), "free")
    np.testing.assert_allclose(smaller.params, fresh.params, rtol=1e-7)
    test = result.compare_lr_test(result.refit("y ~ . - tax0"))
    assert result.leave_one_out().loc["tax0", "statistic"] == pytest.approx(test.statistic, rel=1e-6)
    assert result.mcar_test().df == moments.seen.sum() + len(moments.n) - 6
    assert result.independence_lr_test().pvalue < 1e-10
    notes = " ".join(result.notes)
    assert "The fit conditions on the columns that they have" in notes and "values of 'court" in notes


def test_a_file_keeps_what_predictions_need(study, result, tmp_path):
    with pytest.warns(DataWarning):
        other = model(study, "independent").fit()
    for fit in (result, other):
        fit.save(tmp_path / fit.between)
        again, partition = fs.load(tmp_path / fit.between), fit.model.partition
        frame = again.get_prediction(partition).summary_frame()
        pd.testing.assert_frame_equal(frame, fit.get_prediction().summary_frame(), check_names=False)
        assert again.between == fit.between


def test_a_column_that_nobody_in_use_has_is_named():
    study = draw(3, n=200)
    frames = study.frames()
    frames["Bank"].loc[frames["Bank"]["id"] < 100, "y"] = np.nan
    frames["Tax"]["rare"] = np.where(frames["Tax"]["id"] < 100, frames["Tax"]["tax0"] ** 2, np.nan)
    partition = fs.ClientPartition.from_frames(frames, on="id")
    with pytest.raises(DesignError, match="column 'rare' at site 'Tax' has no value among"):
        fs.VFEMRegression.from_formula("y ~ .", partition, missing="drop")


def test_standard_errors_agree(study):
    with pytest.warns(DataWarning):
        result, sem = (model(study).fit(cov_type=kind) for kind in ("observed", "sem"))
    np.testing.assert_allclose(sem.bse, result.bse, rtol=1e-5)


def test_where_nothing_is_partial_the_fit_is_that_of_blocks():
    study = draw(3, missing="mar")
    for between in ("free", "independent"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DataWarning)
            one, other = (model(study, between, partial).fit() for partial in ("condition", "drop"))
        np.testing.assert_array_equal(one.params, other.params)
        np.testing.assert_array_equal(one.bse, other.bse)
        assert one.llf == other.llf


def test_columns_of_a_term_are_missing_together_and_transforms_rest_on_what_is_there():
    study = draw(4, n=1_500, cells=0.06)
    frames = study.frames()
    rng = np.random.default_rng(0)
    frames["Bank"]["kind"] = np.where(rng.random(1_500) < 0.05, None, rng.choice(["a", "b", "c"], 1_500))
    partition = fs.ClientPartition.from_frames(frames, on="id", partial="condition")
    formula = "y ~ scale(bank0) + bs(bank1, df=4) + kind + court0 + court1 + tax0"
    with pytest.warns(DataWarning):
        fitted = fs.VFEMRegression.from_formula(formula, partition)
        result = fitted.fit(max_moved=1.0)
    block = fitted.design.blocks[0]
    bank = frames["Bank"]
    for name, has in zip(block.names, block.has.T, strict=True):
        column = next(c for c in ("bank0", "bank1", "kind") if c in name)
        np.testing.assert_array_equal(has, bank[column].notna().to_numpy()[block.rows])
    joint = result._fit.joint
    assert joint.mean[0] == pytest.approx(0.0, abs=0.05)  # scaled over the entities that have it
    assert result.converged and np.isfinite(result.bse).all()
    assert len(result.predict(partition)) == 1_500


def test_fits_that_cannot_condition_say_what_they_set_aside():
    study = draw(5, n=900, cells=0.05)
    with pytest.warns(
        DataWarning, match=r"lack values of 'bank0' 40, .*observed values: 'bank0' \d+, 'bank1' \d+, 'court0'"
    ):
        iterative = model(study, "independent").fit(**packed(**ITERATIVE))
    with pytest.warns(DataWarning, match="count as missing there: 83 at 'Bank'"):
        dropped = model(study, "independent", "drop").fit(**packed(**ITERATIVE))
    np.testing.assert_allclose(iterative.params, dropped.params, rtol=1e-6)
    study.table["y"] = (study.table["y"] > study.table["y"].median()).astype(float)
    binomial = sm.families.Binomial()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        complete = fs.VerticalGLM.from_formula("y ~ .", partition_of(study), family=binomial)
    assert any("does not condition on a part of a block" in str(one.message) for one in caught)
    bank = study.frames()["Bank"].filter(like="bank").isna()
    lacking = bank[~bank.all(axis=1)].sum()
    lost = (
        f"only some of a site's columns lack values of 'bank0' {lacking['bank0']}, 'bank1' {lacking['bank1']}"
    )
    assert any(lost in str(one.message) for one in caught)
    notes = complete.fit(lam=0.05).diagnostics().set_index("kind")["note"]
    assert lost in notes["left_out"]
    few = draw(5, n=120, cells=0.2)
    bank = few.frames()["Bank"].filter(like="bank").isna()
    lost = rf"many entities\. Entities .* of 'bank0' {bank[~bank.all(axis=1)].sum()['bank0']}, "
    with pytest.warns(DataWarning), pytest.raises(EstimationError, match=lost):
        fs.VerticalGLM.from_formula("y ~ .", partition_of(few))
    apart = fs.VFEMGLM.from_formula("y ~ .", partition_of(study), family=binomial, between="independent")
    with pytest.warns(DataWarning, match="does not condition on a part of a block"):
        apart.fit(cov_type="none")


# ---- a response that is not normal ---------------------------------------------------------------


def other_response(link):
    """Binary responses or counts; records are missing at random, and single cells also."""
    study = correlated(3, 700, sizes=(2, 1, 2), shares=(0.0, 0.4, 0.5), count=link == "Log")
    rng = np.random.default_rng(5)
    for name in study.covariates:
        study.table.loc[rng.random(700) < 0.06, name] = np.nan
    family = {"Logit": sm.families.Binomial(), "Log": sm.families.Poisson()}[link]
    return study, fs.VFEMGLM.from_formula("y ~ .", partition_of(study), family=family)


@pytest.mark.parametrize("link", ["Logit", "Log"])
def test_another_response_has_the_maximum_of_the_pooled_likelihood(link):
    """Oracle: entity by entity, with the covariance of all columns and a quadrature rule in numpy."""
    study, model = other_response(link)
    with pytest.warns(DataWarning, match="count as missing in"):
        result = model.fit()
    used = as_used(study, result).table
    if result._held.exchange.plan.left_out:
        used = used[used[study.covariates].notna().any(axis=1)]
    oracle = PooledJoint(used["y"], used[oracle_names(study, result)], link, nodes=80)
    theta = all_parameters(result, oracle)
    information = oracle.information(theta)
    assert result.converged and result._held.exchange.columns
    assert np.abs(oracle.score(theta) / np.sqrt(np.diag(information))).max() < 1e-6
    np.testing.assert_allclose(result.bse, oracle.bse(information), rtol=1e-5)
    assert "The fit conditions on the columns that they have" in " ".join(result.notes)
    everything = PooledJoint(study.table["y"], study.table[oracle_names(study, result)], link)
    order = result.model.partition.entities
    np.testing.assert_allclose(
        result.get_prediction().predicted_mean.loc[order], everything.mean(theta)[order], rtol=1e-6
    )


def oracle_names(study, result):
    return [name for site in result.names for name in study.columns[site]]


@pytest.mark.parametrize("step", ["joint_predict", "joint_score", "joint_information"])
def test_a_site_refuses_patterns_whose_rows_have_different_columns(step, monkeypatch):
    """One row with other columns in a pattern: a sum of a column would be over this row."""
    _, model = other_response("Logit")
    request = JointIteration.request

    def mixed(self, site, name, text="", **arrays):
        if name == step and site == "A":
            has, code = self.layout.has["A"], np.array(arrays["code"])
            other = np.flatnonzero((has != has[0]).any(axis=1))[0]
            code[other] = code[0]
            arrays["code"] = code
        return request(self, site, name, text, **arrays)

    monkeypatch.setattr(JointIteration, "request", mixed)
    with pytest.raises(MessageError, match="have different columns"):
        model.fit()


# ---- small patterns ------------------------------------------------------------------------------


def test_single_values_are_left_out_and_not_blocks():
    """Five columns: seven entities without the first one join those without the first two."""
    seen = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]], dtype=bool)
    rule = PatternRule(5, (3, 2), units=ColumnUnits((0, 0, 0, 1, 1), (1, 1, 1, 1, 1)))
    plan = plan_merges(seen, np.array([200.0, 7.0, 60.0, 90.0]), rule)
    np.testing.assert_array_equal(plan.patterns[plan.target[1]], seen[2])
    assert (plan.moved, plan.trimmed, plan.left_out) == (0, 7, 0)


@pytest.mark.parametrize("seed", range(10))
def test_every_plan_of_single_values_leaves_no_small_pattern(seed):
    rng = np.random.default_rng(seed)
    owner = np.sort(rng.integers(0, 3, size=8))
    owner = np.unique(owner, return_inverse=True)[1]
    seen, n = np.unique(rng.random((3_000, 8)) < 0.9, axis=0, return_counts=True)
    rule = PatternRule(
        5, tuple(np.bincount(owner).tolist()), units=ColumnUnits(tuple(owner.tolist()), (1,) * 8)
    )
    plan = plan_merges(seen, n.astype(float), rule, largest_share=1.0)
    to, released = plan.shows(plan.target), np.zeros(len(plan.patterns))
    np.add.at(released, plan.target[plan.target >= 0], n[plan.target >= 0])
    assert (released >= [rule.least(tuple(p)) for p in plan.patterns.tolist()]).all()
    assert (seen >= to).all()
    complete = np.column_stack([seen[:, owner == k].all(axis=1) for k in range(owner.max() + 1)])
    assert n @ to.sum(axis=1) > n @ (complete[:, owner]).sum(axis=1)  # more than what whole blocks would keep
    lost = (seen != to).any(axis=1) & (plan.target >= 0)
    assert n[lost].sum() == plan.moved + plan.trimmed
