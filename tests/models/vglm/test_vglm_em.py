"""Selection with missing blocks: the limit of penalized EM, from one exchange of sums."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pattern_moments import complete, moments_of_arrays
from scipy.linalg import block_diag
from vglm_study import COLUMNS, make_model, make_partition, make_table, pooled_columns

import fedstat as fs
from fedstat.errors import (
    AssumptionWarning,
    EstimationError,
    MessageError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import pack_request
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.penalized.coordinate_descent import gram_path
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vertical.joint_normal.model import JointNormalModel
from fedstat.models.vglm import em_fit
from fedstat.models.vglm.em_fit import WorkingModel, blocks_path, refit_blocks
from fedstat.models.vglm.path_setup import PathSetup

TABLE = make_table(n=400, seed=5)
BLOCK = {name: [c for c in own if c != "y"] for name, own in COLUMNS.items()}
SIZES = (3, 5, 4)


def with_missing_blocks(table=TABLE, seed=1):
    """Blocks that are missing at random: more often where the response is large."""
    table, rng = table.copy(), np.random.default_rng(seed)
    z = ((table["y"] - table["y"].mean()) / table["y"].std()).to_numpy()
    for slope, (_, own) in zip((0.0, 1.0, -0.8), BLOCK.items(), strict=True):
        lacks = rng.random(len(table)) < 0.7 / (1.0 + np.exp(-slope * z))
        if slope:
            table.loc[lacks, own] = np.nan
    return table


MISSING = with_missing_blocks()


def model_of(table=MISSING, **options):
    return make_model(table, missing="em", **({"between": "independent"} | options))


def setup_of(penalty, lambdas, p=12, algorithm="lla"):
    return PathSetup(Penalty(penalty), CoefficientGroups.single(p), 0.0, lambdas, 20, 1e-2, algorithm, 1e-7)


class RowsEM:
    """Penalized EM over rows: what is missing from the joint normal law, then least squares."""

    def __init__(self, table, names, sizes):
        seen = table[[own[0] for own in BLOCK.values()]].notna().to_numpy()
        X = pooled_columns(table, names)
        X[~np.repeat(seen, sizes, axis=1)] = np.nan
        y = table["y"].to_numpy()
        self.shift, self.scale = np.nanmean(X, axis=0), np.nanstd(X, axis=0)
        self.mean, self.sd = y.mean(), y.std()
        self.X, self.y, self.sizes = (X - self.shift) / self.scale, (y - self.mean) / self.sd, sizes
        self.start()

    def start(self):
        p = self.X.shape[1]
        self.a, self.beta, self.s2, self.mu = 0.0, np.zeros(p), 1.0, np.nanmean(self.X, axis=0)
        edges = np.cumsum([0, *self.sizes])
        rows = [self.X[~np.isnan(self.X[:, i]), i:j] for i, j in itertools.pairwise(edges)]
        self.Sigma = block_diag(*[Z.T @ Z / len(Z) for Z in rows])

    def expected(self):
        """Expected sum of (1, x, y)(1, x, y)'."""
        beta, Sigma = self.beta, self.Sigma
        total = np.zeros((len(beta) + 2,) * 2)
        C = np.block([[Sigma, (Sigma @ beta)[:, None]], [beta @ Sigma, self.s2 + beta @ Sigma @ beta]])
        m = np.append(self.mu, self.a + self.mu @ beta)
        rows = np.column_stack([self.X, self.y])
        for lacks in np.unique(np.isnan(rows), axis=0):
            same = rows[(np.isnan(rows) == lacks).all(axis=1)]
            has, not_ = np.flatnonzero(~lacks), np.flatnonzero(lacks)
            B = np.linalg.solve(C[np.ix_(has, has)], C[np.ix_(has, not_)]).T
            same[:, not_] = m[not_] + (same[:, has] - m[has]) @ B.T
            full = np.column_stack([np.ones(len(same)), same])
            total += full.T @ full
            left = C[np.ix_(not_, not_)] - B @ C[np.ix_(has, not_)]
            total[np.ix_(1 + not_, 1 + not_)] += len(same) * left
        return total

    def step(self, penalty, lam):
        """One iteration; returns the largest move."""
        S, n = self.expected(), len(self.y)
        mean = S[0, 1:] / n
        C = S[1:, 1:] / n - np.outer(mean, mean)
        G, c = C[:-1, :-1], C[:-1, -1]
        groups = CoefficientGroups.single(len(c))
        fit = gram_path(G, c, penalty, groups, lambdas=np.array([lam]), algorithm="descent", tol=1e-13)
        beta, before = fit.coefficients[0], np.append(self.beta, self.s2)
        mask = block_diag(*[np.ones((p, p)) for p in self.sizes])
        self.beta, self.a = beta, mean[-1] - beta @ mean[:-1]
        self.s2 = C[-1, -1] - 2.0 * c @ beta + beta @ G @ beta
        self.mu, self.Sigma = mean[:-1], G * mask
        return np.abs(np.append(self.beta, self.s2) - before).max()

    def run(self, penalty, lam, steps, still):
        """Go on until nothing moves by more than `still`."""
        for _ in range(steps):
            if self.step(penalty, lam) < still:
                return
        raise AssertionError("EM did not end")

    @property
    def coefficients(self):
        return self.beta * self.sd / self.scale

    def log_likelihood(self):
        """Log-likelihood of the observed values, minus the largest that the blocks alone can have."""
        total, edges = 0.0, np.cumsum([0, *self.sizes])
        for x, y in zip(self.X, self.y, strict=True):
            has = ~np.isnan(x)
            v = self.s2 + self.beta[~has] @ self.Sigma[np.ix_(~has, ~has)] @ self.beta[~has]
            r = y - self.a - x[has] @ self.beta[has] - self.mu[~has] @ self.beta[~has]
            total -= 0.5 * (np.log(2.0 * np.pi * v) + r * r / v)
        for i, j in itertools.pairwise(edges):
            Z = self.X[~np.isnan(self.X[:, i]), i:j]
            S, U = np.cov(Z.T, bias=True), Z - self.mu[i:j]
            at = self.Sigma[i:j, i:j]
            total -= 0.5 * len(Z) * (np.linalg.slogdet(at)[1] - np.linalg.slogdet(S)[1])
            total -= 0.5 * (np.sum(U.T * np.linalg.solve(at, U.T)) - len(Z) * (j - i))
        return total - len(self.y) * np.log(self.sd)


# ---- what it has to equal ------------------------------------------------------------------------


def lacking_at_the_holder():
    """Entities whose response is there, and the other columns of its holder are not."""
    table = TABLE.copy()
    table.loc[[*range(40, 90), *range(200, 260)], BLOCK["Bank"]] = np.nan
    table.loc[np.arange(400) % 3 == 0, BLOCK["Clinic"]] = np.nan
    return table


@pytest.mark.parametrize("table", [MISSING, lacking_at_the_holder()], ids=["others", "holder"])
def test_without_a_penalty_it_is_vfem(table):
    model = model_of(table)
    ours, vfem = (
        model.fit(lam=0.0),
        fs.VFEMRegression.from_formula("y ~ .", model.partition, between="independent").fit(),
    )
    np.testing.assert_allclose(ours.params, vfem.params, rtol=1e-9)
    np.testing.assert_allclose(ours.cov_params(), vfem.cov_params(), rtol=1e-7, atol=1e-12)
    for name in ("llf", "rsquared", "bic", "aic", "scale", "nobs"):
        assert getattr(ours, name) == pytest.approx(getattr(vfem, name), rel=1e-8), name
    path = ours.path_params.iloc[0]  # the solver of the path, before the refit
    np.testing.assert_allclose((path - vfem.params) / vfem.bse, 0.0, atol=1e-6)
    assert ours.converged


CASES = {
    "lasso": {"penalty": "lasso"},
    "elastic net": {"penalty": "elastic_net", "l1_ratio": 0.4},
    "scad": {"penalty": "scad"},
    "terms": {"penalty": "mcp", "group_terms": True},
    "adaptive": {"penalty": "lasso", "adaptive": 1.0},
    "unpenalized": {"penalty": "lasso", "unpenalized": ["x8", "f"]},
}


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [*((case, "lla") for case in CASES), *((case, "descent") for case in ("lasso", "scad", "terms"))],
)
def test_with_all_blocks_it_is_the_ordinary_path(case, algorithm):
    arguments = {"n_lambdas": 6, "algorithm": algorithm, "select": "ebic"}
    ours = model_of(TABLE, **CASES[case]).fit(**arguments)
    ordinary = make_model(TABLE, **CASES[case]).fit(**arguments)
    np.testing.assert_allclose(ours.path.index, ordinary.path.index, rtol=1e-7)
    columns = pooled_columns(TABLE, ours.params.index[1:]).std(axis=0) / TABLE["y"].std()
    difference = ours.path_params.to_numpy() - ordinary.path_params.to_numpy()
    np.testing.assert_allclose(difference[:, 1:] * columns, 0.0, atol=1e-6)
    for name in ("loss", "df", "bic", "ebic", "aic"):
        np.testing.assert_allclose(ours.path[name], ordinary.path[name], rtol=1e-7)
    assert (ours.lam, ours.llnull) == pytest.approx((ordinary.lam, ordinary.llnull))
    assert ours.rsquared == pytest.approx(ordinary.rsquared, rel=1e-6)
    n, k = 400, len(ours.refit.params)
    np.testing.assert_allclose(ours.refit.params, ordinary.refit.params, rtol=1e-6)
    np.testing.assert_allclose(ours.refit.bse * np.sqrt(n / (n - k)), ordinary.refit.bse, rtol=1e-6)


@pytest.mark.parametrize("place", [4, 9])
@pytest.mark.parametrize("penalty", ["lasso", "scad"])
def test_it_is_the_limit_of_penalized_em_over_rows(penalty, place):
    result = model_of(penalty=penalty).fit(n_lambdas=14, ratio=1e-2, algorithm="descent")
    lam, row = result.path.index[place], result.path_params.iloc[place]
    rows = RowsEM(MISSING, list(row.index[1:]), SIZES)
    if penalty == "scad":  # many stationary points: from ours it must not move
        rows.beta = row.iloc[1:].to_numpy() * rows.scale / rows.sd
    rows.run(Penalty(penalty), lam / rows.sd, 400, 1e-11)
    assert 0 < np.count_nonzero(rows.beta) < 12
    np.testing.assert_allclose(row.iloc[1:] * rows.scale / rows.sd, rows.beta, atol=1e-6)
    n, loss = len(MISSING), result.path["loss"].iloc[place]
    assert -n / 2.0 * (np.log(4.0 * np.pi * loss) + 1.0) == pytest.approx(rows.log_likelihood(), rel=1e-8)


@pytest.mark.parametrize(("penalty", "wrong"), [("lasso", 1.0), ("mcp", 1.0), ("lasso", 0.3)])
def test_no_step_lowers_the_objective(penalty, wrong, monkeypatch):
    """Not even steps that are three times too long; with the right Hessian there are few."""
    points, original = [], JointNormalModel.differentiate
    reduce = em_fit.BlockSolver._reduce

    def shorter(solver, point, at):
        reduced = reduce(solver, point, at)
        return replace(reduced, G=wrong * reduced.G)

    def recorded(model, point, **options):
        at = original(model, point, **options)
        if not options.get("expected"):
            points.append((point.log_s2, at.log_likelihood, point.beta))
        return at

    monkeypatch.setattr(JointNormalModel, "differentiate", recorded)
    monkeypatch.setattr(em_fit.BlockSolver, "_reduce", shorter)
    moments = moments_of(MISSING)
    n, rises = moments.nobs, 0
    for lam in (0.02, 0.1):
        points.clear()
        blocks_path(
            WorkingModel.of(moments, "independent"),
            setup_of(penalty, np.array([lam * moments.scale[-1]]), 12, "descent"),
        )
        terms, before = Penalty(penalty).at(lam, CoefficientGroups.single(12)), None
        for log_s2, llf, beta in points[[np.any(b) for _, _, b in points].index(True) :]:
            value = llf - n * terms.value(beta) / np.exp(log_s2)
            if before is not None and before[0] == log_s2:
                assert value >= before[1] - 1e-9 * abs(value)
                rises += value > before[1] + 1e-6
            before = (log_s2, value)
        assert wrong < 1.0 or len(points) < 28
    assert rises >= 4


def moments_of(table):
    names = [*BLOCK["Bank"], "x3", "x4", "f[T.b]", "f[T.c]", "f[T.d]", *BLOCK["Registry"]]
    X = pooled_columns(table, names)
    X[table["f"].isna().to_numpy(), 3:8] = np.nan
    return moments_of_arrays(X, table["y"].to_numpy(), SIZES, names=names)


def test_scad_leaves_large_coefficients_where_the_likelihood_has_them():
    result = model_of(penalty="scad").fit(lam=0.45)
    report = result.selection_report()
    report = report[report["selected"]]
    sd = pooled_columns(TABLE, report["term"]).std(axis=0)
    assert 3 <= len(report) < 12
    assert (report["coef"].abs() * sd > 3.7 * 0.45).all()
    np.testing.assert_allclose(report["coef"], report["refit"], rtol=1e-6)


def test_the_refit_is_vfem_of_the_selected_columns():
    result = model_of(penalty="lasso").fit(select="bic")
    names = result.refit.params.index[1:]
    assert 0 < len(names) < 12
    joint = WorkingModel.of(moments_of(MISSING), "independent")
    found, explained = refit_blocks(joint, np.isin(joint.model.moments.names, names))
    assert result.refit.params.to_numpy() == pytest.approx(found.params, rel=1e-6)
    plain = [name for name in names if "[" not in name]
    formula = "y ~ " + " + ".join(plain)
    smaller = fs.VFEMRegression.from_formula(formula, model_of().partition, between="independent").fit()
    chosen, _ = refit_blocks(joint, np.isin(joint.model.moments.names, plain))
    np.testing.assert_allclose(chosen.params, smaller.params, rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.diag(chosen.cov)), smaller.bse, rtol=1e-6)
    assert chosen.llf == pytest.approx(smaller.llf, rel=1e-9)
    assert result.refit.rsquared == pytest.approx(explained, rel=1e-8)


def test_nothing_is_selected_and_the_mean_is_left():
    result = model_of().fit(lam=1e3)
    assert not result.params.iloc[1:].any()
    assert result.params.iloc[0] == pytest.approx(MISSING["y"].mean())
    assert result.refit.bse.iloc[0] == pytest.approx(MISSING["y"].std(ddof=0) / 20.0)
    ols = sm.OLS(MISSING["y"], np.ones(400)).fit()
    assert result.refit.llf == pytest.approx(ols.llf) == result.llnull


# ---- what passes, and what is said ---------------------------------------------------------------


@pytest.mark.parametrize("coordinator", ["apart", "Clinic"])
def test_no_value_per_entity_leaves_and_the_summary_says_what_is_missing(coordinator):
    result = model_of(coordinator=coordinator).fit()
    assert "per entity" not in set(result.ledger.to_frame()["kind"])
    text = " ".join(str(result.summary()).split())
    lacks = [int(MISSING[own[0]].isna().sum()) for own in BLOCK.values()]
    complete = int(MISSING.notna().all(axis=1).sum())
    assert f"columns: {lacks[1]} at Clinic, {lacks[2]} at Registry; {complete} have all" in text
    assert "limit of penalized EM" in text and "conditional on selection" in text
    assert "were left out" not in text
    assert result.nobs == 400


def test_complete_cases_are_left_out_loudly_and_the_note_names_the_other_way():
    with pytest.warns(fs.errors.DataWarning, match=r"missing='em'"):
        make_model(MISSING)


def test_patterns_with_few_entities_count_as_missing():
    table = TABLE.copy()
    table.loc[:99, BLOCK["Clinic"]] = np.nan
    table.loc[90:109, BLOCK["Registry"]] = np.nan  # 10 lack both, 10 the Registry alone
    result = model_of(table).fit(max_moved=0.1)
    text = " ".join(str(result.summary()).split())
    assert "20 entities count as missing" in text or "10 entities count as missing" in text
    frame = result.ledger.to_frame()
    assert (frame[frame["kind"] == "aggregate"]["entities"] >= 26).all()
    with pytest.raises(EstimationError, match="max_moved"):
        model_of(table).fit(max_moved=0.0)
    with pytest.raises(ModelError, match="max_moved: expected a share"):
        model_of(table).fit(max_moved=2.0)


def test_entities_without_a_response_are_left_out():
    table = MISSING.copy()
    table.loc[:19, "y"] = np.nan
    result = model_of(table).fit(lam=0.5)
    other = model_of(MISSING.iloc[20:].reset_index(drop=True)).fit(lam=0.5)
    assert result.nobs == 380
    np.testing.assert_allclose(result.params, other.params, rtol=1e-8)


def test_what_it_does_not_do_is_refused_by_name():
    model = model_of()
    for arguments in ({"select": "cv"}, {"draws": 5, "folds": 8}, {"exchange": "admm"}):
        with pytest.raises(ModelError, match=r"missing='em' requires .*select='cv' or '1se' and draws"):
            model.fit(**arguments)
    with pytest.raises(ModelError, match=r"missing='em' requires the normal family"):
        model_of(make_table(response="binary"), family=sm.families.Binomial())
    with pytest.raises(ModelError, match='expected "drop" or "raise"'):
        make_model(MISSING, missing="impute")
    with pytest.raises(ModelError, match='expected "drop" or "raise"'):
        fs.VFEMRegression.from_formula("y ~ .", model.partition, missing="em")
    with pytest.raises(NotAvailableError, match="no selection frequencies"):
        model.fit(lam=0.5).stable()


@pytest.mark.parametrize("step", ["sum_products", "sum_with_response", "sum_response"])
def test_a_site_refuses_small_patterns_and_wrong_codes(step):
    rules = dict.fromkeys(COLUMNS, Policy(min_count=30))
    model = model_of(TABLE, partition={"policies": rules})
    layout, site = model.layout, "Bank"
    model.fit(lam=1.0)
    door = model.partition.sites[site]
    first = np.arange(400) < 400 - 29

    def reported(code, **more):
        arrays = {"code": np.asarray(code, dtype=np.int64), "groups": np.array(2), **more}
        door.answer(
            pack_request(SecureProductSession("vglm", model._session, None).request(site, step, **arrays))
        )

    rows = {"rows": layout.rows[site]} if step == "sum_with_response" else {}
    with pytest.raises(PolicyError, match="minimum count"):
        reported(np.where(first, 0, 1), **rows)
    with pytest.raises(PolicyError, match="minimum count"):
        reported(np.where(first, -1, 0), **rows)
    reported(np.where(np.arange(400) < 200, -1, 1), **rows)
    for code in (np.full(400, -1), np.full(400, 2), np.where(first, 0, -2)):
        with pytest.raises(MessageError, match="patterns or folds from 0 to 1"):
            reported(code, **rows)
    if rows:
        for wrong in (layout.rows[site] + 1, layout.rows[site][::-1].copy()):
            with pytest.raises(MessageError, match="'rows' must ascend"):
                reported(np.zeros(400), rows=wrong)


def test_results_survive_a_file(tmp_path):
    result = model_of().fit(n_lambdas=6)
    result.save(tmp_path / "fit")
    loaded = fs.load(tmp_path / "fit")
    assert str(loaded.summary()) == str(result.summary())
    assert loaded.rsquared == result.rsquared
    np.testing.assert_array_equal(loaded.predict(result.model.partition), result.predict())


def test_predictions_take_the_mean_of_a_block_that_is_missing():
    model = model_of()
    result, vfem = (
        model.fit(lam=0.0),
        fs.VFEMRegression.from_formula("y ~ .", model.partition, between="independent").fit(),
    )
    np.testing.assert_allclose(result.predict(), vfem.predict(model.partition), rtol=1e-7)
    chosen = model.fit(lam=0.5)
    assert chosen.predict().notna().all()
    complete = MISSING.notna().all(axis=1).to_numpy()
    X = np.column_stack([np.ones(400), pooled_columns(MISSING, chosen.params.index[1:])])
    np.testing.assert_allclose(chosen.predict()[complete], (X @ chosen.params)[complete])
    nothing = model.fit(lam=1e3)
    np.testing.assert_allclose(nothing.predict(), MISSING["y"].mean())


# ---- what it is good for -------------------------------------------------------------------------


@pytest.mark.slow
def test_selection_errs_less_than_on_complete_cases():
    """Twenty-four samples; blocks are missing where the response is large."""
    errors, wrong = {"em": [], "complete": []}, {"em": [], "complete": []}
    setup = setup_of("scad", None, p=12, algorithm="descent")
    beta = np.array([1.0, -0.7, 0.0, 0.8, 0.0, 0.0, 0.5, 0.0, -0.6, 0.0, 0.0, 0.0])
    for seed in range(24):
        rng = np.random.default_rng([seed, 77])
        X = rng.normal(size=(400, 12))
        for k in range(0, 12, 4):
            X[:, k : k + 4] += 0.7 * rng.normal(size=(400, 1))
        y = 2.0 + X @ beta + 1.5 * rng.normal(size=400)
        for k, slope in ((4, 0.5), (8, 0.5)):
            X[rng.random(400) < 1.0 / (1.0 + np.exp(0.5 - slope * y)), k : k + 4] = np.nan
        moments = moments_of_arrays(X, y, (4, 4, 4))
        for name, use in (("em", moments), ("complete", complete(moments))):
            path = blocks_path(WorkingModel.of(use, "independent"), setup).path
            df = np.count_nonzero(path.coefficients, axis=1)
            b = path.coefficients[np.argmin(use.nobs * np.log(path.loss) + df * np.log(use.nobs))]
            errors[name].append(np.sqrt(np.mean((b - beta) ** 2)))
            wrong[name].append(((b != 0.0) != (beta != 0.0)).sum())
    gain = np.array(errors["complete"]) - np.array(errors["em"])
    assert gain.mean() > 4.0 * gain.std(ddof=1) / np.sqrt(24)
    assert np.mean(wrong["em"]) < 0.75 * np.mean(wrong["complete"])


def test_what_is_assumed_of_blocks_is_tested_as_in_vfem(tmp_path):
    """Whatever was selected: the tests are of all columns, and ask for nothing further."""
    with pytest.warns(AssumptionWarning, match="assumes independent blocks: the blocks of"):
        result = model_of().fit(n_lambdas=6)
    text = " ".join(str(result.summary()).split())
    assert "Most correlated blocks" in text and "between='free') allows correlated blocks" in text
    linear = fs.VFEMRegression.from_formula("y ~ .", make_partition(MISSING), between="independent")
    with pytest.warns(AssumptionWarning, match="correlated"):
        vfem, rounds = linear.fit(cov_type="none"), result.ledger.rounds
    for structure in ("model", "unrestricted"):
        # Products of two sites are exact to the fixed point in which they are shared.
        np.testing.assert_allclose(result.mcar_test(structure), vfem.mcar_test(structure), rtol=1e-6)
    pd.testing.assert_frame_equal(result.independence_tests(), vfem.independence_tests(), rtol=1e-6)
    np.testing.assert_allclose(result.independence_lr_test(), vfem.independence_lr_test(), rtol=1e-5)
    assert result.mcar_test("unrestricted").pvalue < 0.01 and result.ledger.rounds == rounds
    result.save(tmp_path / "fit")
    for other in (fs.load(tmp_path / "fit"), make_model(TABLE).fit(lam=0.5)):
        with pytest.raises(NotAvailableError, match="missing='em'"):
            other.mcar_test()
