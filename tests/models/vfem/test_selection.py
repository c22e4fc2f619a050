"""Selection from the moments of a VFEM fit: equal to VerticalGLM(missing="em"), without a message."""

import numpy as np
import pandas as pd
import pytest
from pattern_moments import moments_of_arrays

import fedstat as fs
from fedstat.errors import DataWarning, ModelError, NotAvailableError
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vglm.em_fit import WorkingModel, blocks_path, halve_moments
from fedstat.models.vglm.path_setup import PathSetup

NAMES = ["a1", "a2", "b1", "b2", "c1", "c2"]


def rows(n=900, seed=1, rho=0.3):
    rng = np.random.default_rng(seed)
    X = np.sqrt(1 - rho) * rng.normal(size=(n, 6)) + np.sqrt(rho) * rng.normal(size=(n, 1))
    y = 1.0 + X @ [0.8, 0.0, 0.6, 0.0, 0.12, 0.0] + rng.normal(size=n)
    X[rng.random(n) < 0.4, 2:4] = np.nan
    X[rng.random(n) < 0.3, 4:6] = np.nan
    return X, y


def partition_of(X, y):
    table = pd.DataFrame(X, columns=NAMES).assign(id=range(len(y)), y=y)
    frames = {"H": table[["id", "y"]]}
    frames |= {k: table[["id", f"{k.lower()}1", f"{k.lower()}2"]].dropna() for k in "ABC"}
    return fs.ClientPartition.from_frames(frames, on="id")


@pytest.fixture(scope="module")
def partition():
    return partition_of(*rows())


@pytest.fixture(scope="module")
def fits(partition):
    return {
        b: fs.VFEMRegression.from_formula("y ~ .", partition, between=b).fit()
        for b in ("free", "independent")
    }


CASES = [
    ("free", "scad", "bic", {}),
    ("free", "lasso", "aic", {}),
    ("free", "mcp", "ebic", {"unpenalized": ["a2"]}),
    ("free", "ridge", "bic", {}),
    ("independent", "lasso", "bic", {"adaptive": 1.0}),
    ("independent", "elastic_net", "bic", {"l1_ratio": 0.5}),
]


@pytest.mark.parametrize(("between", "penalty", "criterion", "options"), CASES)
def test_equal_to_the_vertical_model_on_the_same_data(partition, fits, between, penalty, criterion, options):
    found = fits[between].select(penalty, criterion, n_lambdas=6, **options)
    model = fs.VerticalGLM.from_formula(
        "y ~ .", partition, penalty=penalty, missing="em", between=between, **options
    )
    other = model.fit(select=criterion, n_lambdas=6)
    np.testing.assert_allclose(found.path_params, other.path_params, atol=1e-8)
    pd.testing.assert_series_equal(found.params, other.params)
    assert found.lam == pytest.approx(other.lam) and found.bic == pytest.approx(other.bic)
    pd.testing.assert_series_equal(found.predict(partition), other.predict(partition))
    if penalty != "ridge":
        pd.testing.assert_series_equal(found.refit.bse, other.refit.bse)
        report = found.selection_report().set_index("term")
        assert (report["debiased"] == fits[between].params[1:]).all()
        assert (report["debiased_std_err"] == fits[between].bse[1:]).all()
        assert report.loc["a1", "selected"] and report.loc["b1", "selected"]


def test_nothing_is_requested_and_intervals_do_not_ignore_the_selection(fits):
    fit = fits["free"]
    before = len(fit.ledger.entries)
    found = fit.select("lasso", n_lambdas=12)
    assert found.ledger is fit.ledger and len(fit.ledger.entries) == before
    text = str(found.summary())
    assert "NAIVE" not in text.upper() and "all columns, for any selection" in text
    shown = {row[0].strip("\u00a0") for row in found.summary().sheets[1].rows}
    assert set(NAMES) <= shown


@pytest.mark.slow
def test_frequencies_agree_with_halves_of_the_rows():
    X, y = rows(seed=2)
    fit = fs.VFEMRegression.from_formula("y ~ .", partition_of(X, y)).fit()
    lam = [0.15, 0.06]
    found = fit.select("lasso", lambdas=lam, draws=12)
    report = found.selection_report().set_index("term")
    rng, counts = np.random.default_rng(1), []
    for _ in range(12):
        order = rng.permutation(len(y))
        for half in (order[:450], order[450:]):
            moments = moments_of_arrays(X[half], y[half], [2, 2, 2])
            path = blocks_path(WorkingModel.of(moments, "free"), _setup(lam)).path
            counts.append(path.selected)
    expected = np.mean(counts, axis=0)
    assert np.abs(found.selection.frequencies - expected).max() < 0.4
    assert np.abs(found.selection.frequencies - expected).mean() < 0.1
    assert report.loc["a1", "frequency"] == 1.0
    assert found.stable(0.9)[0]["term"].tolist()[:1] == ["a1"] and found.plot_stability().has_data()
    again = fit.select("lasso", lambdas=lam, draws=12)
    assert (again.selection.frequencies == found.selection.frequencies).all()


def _setup(lambdas):
    groups = CoefficientGroups.single(6, np.ones(6))
    return PathSetup(Penalty("lasso"), groups, 0.0, np.array(lambdas), 2, 1e-3, "lla", 1e-7)


def test_halves_add_up_and_vary_as_random_halves_do():
    X, y = rows(n=400, seed=3)
    moments = moments_of_arrays(X, y, [2, 2, 2])
    rng, means = np.random.default_rng(1), []
    for _ in range(300):
        first, second = halve_moments(moments, rng)
        np.testing.assert_allclose(first.grams + second.grams, moments.grams, atol=1e-8)
        assert np.abs(first.n - second.n).max() <= 1.0
        for half in (first, second):
            assert np.linalg.eigvalsh(half.grams).min() > -1e-8
        means.append(first.grams[0, 0, 1] / first.n[0])
    n, total = moments.n[0], moments.grams[0]
    variance = (total[1, 1] - total[0, 1] ** 2 / n) / (n - 1)
    # Without replacement: the variance of the mean of n / 2 of n rows.
    assert np.var(means) == pytest.approx(variance / (n / 2) * 0.5, rel=0.3)
    assert np.mean(means) == pytest.approx(total[0, 1] / n, abs=4 * np.std(means) / np.sqrt(300))


@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_halves_of_small_patterns(n):
    """Six columns and the response: eight rows have no orthonormal columns, nine have."""
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(40 + n, 6)), rng.normal(size=40 + n)
    X[n:, 4:] = np.nan
    moments = moments_of_arrays(X, y, [2, 2, 2])
    first, second = halve_moments(moments, rng)
    np.testing.assert_allclose(first.grams + second.grams, moments.grams, atol=1e-9)
    small = int(np.argmin(moments.n))
    if n == 8:
        np.testing.assert_allclose(first.grams[small], moments.grams[small] / 2)
    if n == 9:
        assert np.abs(first.grams[small] / first.n[small] - moments.grams[small] / 9).max() > 1e-3


def test_complete_cases_parts_of_blocks_and_plots(partition, tmp_path):
    found = fs.VFEMRegression.from_formula("y ~ .", partition).fit(method="cc").select("lasso", n_lambdas=10)
    with pytest.warns(DataWarning, match="lack a site"):
        plain = fs.VerticalGLM.from_formula("y ~ .", partition, penalty="lasso", missing="drop")
    other = plain.fit(n_lambdas=10)
    # Complete cases have no missing blocks: both are the lasso of least squares.
    np.testing.assert_allclose(found.path_params, other.path_params, atol=1e-5)
    assert all(ax.has_data() for ax in (found.plot_path(), found.plot_criterion()))
    found.save(tmp_path / "found.fed")
    again = fs.load(tmp_path / "found.fed")
    pd.testing.assert_frame_equal(again.selection_report(), found.selection_report())
    assert "all columns, for any selection" in str(again.summary())
    X, y = rows(seed=4)
    X[:200, 3] = np.nan
    table = pd.DataFrame(X, columns=NAMES).assign(id=range(len(y)), y=y)
    frames = {
        "H": table[["id", "y", "a1", "a2"]],
        "B": table[["id", "b1", "b2"]],
        "C": table[["id", "c1", "c2"]],
    }
    parts = fs.ClientPartition.from_frames(frames, on="id")
    for between in ("free", "independent"):
        fit = fs.VFEMRegression.from_formula("y ~ .", parts, between=between).fit()
        report = fit.select(n_lambdas=10).selection_report().set_index("term")
        assert report.loc["a1", "selected"] and abs(report.loc["a2", "coef"]) < 0.2


def test_errors(fits, tmp_path):
    fit = fits["free"]
    with pytest.raises(ModelError, match="criterion: expected 'bic'"):
        fit.select(criterion="cv")
    with pytest.raises(ModelError, match="ridge' selects no columns"):
        fit.select("ridge", draws=2)
    with pytest.raises(ModelError, match="no column or term 'zz'"):
        fit.select(unpenalized=["zz"])
    fit.save(tmp_path / "fit.fed")
    with pytest.raises(NotAvailableError, match="moments of a fit in this session"):
        fs.load(tmp_path / "fit.fed").select()
