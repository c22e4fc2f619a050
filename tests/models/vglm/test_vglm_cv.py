"""Cross-validation and stability selection beyond the normal family, compared with refits of pooled rows."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from pooled_path import glm_path
from vglm_study import make_model, make_table, pooled_columns

from fedstat.errors import EstimationError
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vglm import newton_fit as protocol
from fedstat.models.vglm import path_following

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

N = 800
FAMILIES = {"binary": sm.families.Binomial(), "count": sm.families.Poisson()}
TABLES = {response: make_table(N, 1, response) for response in FAMILIES}


def rows_of(response, names):
    table = TABLES[response]
    X = pooled_columns(table, names)
    Z = np.column_stack([np.ones(N), (X - X.mean(axis=0)) / X.std(axis=0)])
    return Z, table["y"].to_numpy()


def fit_rows(response, Z, y, penalty, lambdas):
    groups = CoefficientGroups.single(Z.shape[1], np.concatenate([[0.0], np.ones(Z.shape[1] - 1)]))
    spec = DistributionSpec.of(FAMILIES[response])
    return glm_path(
        Rows(np.ascontiguousarray(Z), y), spec, Penalty(penalty), groups, lambdas=lambdas, algorithm="lla"
    ).coefficients


def refit_deviances(response, result, penalty, code, folds):
    """Mean deviance of every fold under refits to the others, for every lambda: (F, L)."""
    Z, y = rows_of(response, result.params.index[1:])
    family, lambdas, out = FAMILIES[response], result.path.index.to_numpy(), []
    for fold in range(folds):
        here = code == fold
        b = fit_rows(response, Z[~here], y[~here], penalty, lambdas)
        means = [family.link.inverse(Z[here] @ one) for one in b]
        out.append([family.deviance(y[here], mean) / here.sum() for mean in means])
    return np.array(out)


@pytest.mark.parametrize(("response", "penalty"), [("binary", "scad"), ("count", "lasso")])
def test_the_choice_is_about_that_of_refits_to_the_rows(response, penalty):
    model = make_model(TABLES[response], family=FAMILIES[response], penalty=penalty)
    result = model.fit(select="cv", folds=5, n_lambdas=20, ratio=1e-2, seed=3)
    code = np.random.default_rng(3).permutation(np.arange(N) % 5)
    refits = refit_deviances(response, result, penalty, code, 5)
    exact, se = refits.mean(axis=0), refits.std(axis=0, ddof=1) / np.sqrt(5)
    chosen = result.path.index.get_loc(result.lam)
    assert result.path["cv"].to_numpy()[chosen] == pytest.approx(exact[chosen], rel=2e-3)
    assert result.path["cv_se"].to_numpy()[chosen] == pytest.approx(se[chosen], rel=0.1)
    # No lambda is better by more than the error of cross-validation itself.
    assert exact[chosen] - exact.min() <= 0.05 * se[exact.argmin()]
    # Two steps farther, where SCAD takes a column in or not, a fold may already decide otherwise.
    near = np.abs(np.arange(20) - chosen) <= (3 if penalty == "lasso" else 1)
    np.testing.assert_allclose(result.path["cv"][near], exact[near], rtol=0.01)
    assert result.lam == result.path["cv"].idxmin()
    assert result.path["kkt"].iloc[chosen] <= 1e-7


def test_the_models_are_value_gradient_and_hessian_of_every_fold(monkeypatch):
    models, original = [], path_following.model_folds

    def watched(*args):
        models.append((yield from original(*args)))
        return models[-1]

    monkeypatch.setattr(path_following, "model_folds", watched)
    for response, family in FAMILIES.items():
        model = make_model(TABLES[response], family=family)
        result = model.fit(select="cv", folds=4, n_lambdas=6, seed=7)
        code = np.random.default_rng(7).permutation(np.arange(N) % 4)
        Z, y = rows_of(response, result.params.index[1:])
        found = models[-1]
        mean = family.link.inverse(Z @ found.point.b)
        for fold in range(4):
            here = code == fold
            deviance = family.deviance(y[here], mean[here]) / 2.0
            assert found.losses[fold] == pytest.approx(deviance / N, rel=1e-7)
            np.testing.assert_allclose(found.scores[fold], Z[here].T @ (y - mean)[here] / N, atol=1e-7)
            H = Z[here].T @ (Z[here] * family.variance(mean)[here, None]) / N
            np.testing.assert_allclose(found.hessians[fold], H, atol=1e-6)
    assert found.shares == pytest.approx(0.25)


def test_an_exact_path_is_chosen_from_by_folds_as_well():
    model = make_model(TABLES["binary"], family=FAMILIES["binary"], penalty="lasso")
    options = {"folds": 5, "n_lambdas": 8, "seed": 3, "path": "exact"}
    result, plain = model.fit(select="cv", **options), model.fit(select="aic", **options)
    chosen = result.path.index.get_loc(result.lam)
    others = np.arange(8) != chosen
    np.testing.assert_allclose(result.path_params[others], plain.path_params[others], atol=2e-3)
    np.testing.assert_allclose(result.path_params.iloc[chosen], result.params)
    alone = model.fit(lam=result.lam)
    np.testing.assert_allclose(result.params, alone.params, atol=1e-5)


@pytest.mark.parametrize("response", FAMILIES)
def test_frequencies_are_about_those_of_refits_to_halves(response):
    model = make_model(TABLES[response], family=FAMILIES[response], penalty="lasso")
    result = model.fit(folds=8, draws=12, n_lambdas=12, ratio=0.05, seed=5)
    random = np.random.default_rng(5)
    code = random.permutation(np.arange(N) % 8)
    Z, y = rows_of(response, result.params.index[1:])
    lambdas, counts = result.path.index.to_numpy(), []
    for _ in range(12):
        order = random.permutation(8)
        for half in (order[:4], order[4:]):
            here = np.isin(code, half)
            counts.append(fit_rows(response, Z[here], y[here], "lasso", lambdas)[:, 1:] != 0.0)
    difference = np.abs(result.selection.frequencies - np.mean(counts, axis=0))
    near = np.abs(np.arange(12) - lambdas.tolist().index(result.lam)) <= 2
    assert difference[near].mean() < 0.03
    assert difference.mean() < 0.06
    assert len(result.stable(0.9)[0]) >= 3
    assert "quadratic models of the deviance" in " ".join(str(result.summary()).split())


def test_weighted_grams_of_folds_count_as_those_of_all_entities():
    model = make_model(TABLES["binary"], family=FAMILIES["binary"])
    result = model.fit(select="cv", folds=4, n_lambdas=10, seed=1)
    frame = result.ledger.to_frame()
    weighed = frame[(frame["step"] == "weigh") & (frame["array"] == "gram")]
    assert weighed.groupby("sender").size().max() <= model.layout.most_grams
    assert f"{weighed.groupby('sender').size().max()} weighted Gram matrices" in " ".join(
        str(result.summary(notes="all")).split()
    )
    # Those of a fold rest on its entities alone, and the account says so.
    assert weighed["entities"].value_counts()[N // 4] >= 4 * 3
    few = make_model(make_table(120, 1, "binary"), family=FAMILIES["binary"])
    assert few.layout.most_grams == 120 // (MIN_ENTITIES_PER_EQUATION * 13)
    with pytest.raises(EstimationError, match="use fewer columns or folds"):
        few.fit(select="cv", folds=3)
    with pytest.raises(EstimationError, match="use at most 4 folds"):
        few.fit(select="cv", folds=5)


def test_no_linear_predictor_is_added_where_the_choice_stays(monkeypatch):
    model = make_model(TABLES["count"], family=FAMILIES["count"], penalty="lasso")
    points = []
    original = protocol.use_folds

    def watched(dry_run, *args, **options):
        before = dry_run.oracle.points
        fit = yield from original(dry_run, *args, **options)
        points.append((dry_run.oracle.points - before, fit))
        return fit

    monkeypatch.setattr(protocol, "use_folds", watched)
    model.fit(draws=4, folds=6, n_lambdas=10, seed=1)
    assert points[0][0] == 0


@pytest.mark.parametrize("response", ["normal", "binary"])
def test_the_one_standard_error_rule_takes_the_largest_lambda_within_one_error(response):
    model = make_model(make_table(600, 3, response), family=FAMILIES.get(response), penalty="lasso")
    result = model.fit(select="1se", seed=1)
    path = result.path
    best = path["cv"].idxmin()
    within = path.index[path["cv"] <= path.loc[best, "cv"] + path.loc[best, "cv_se"]]
    assert result.lam == within.max() > best
    assert path.loc[result.lam, "status"] == "solved" and "Chosen by: 1se" in " ".join(
        str(result.summary()).split()
    )
