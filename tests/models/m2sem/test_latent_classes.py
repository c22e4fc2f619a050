"""Latent classes, which are clusters without factors, against the closed-form EM of the pooled rows."""

import numpy as np
import pandas as pd
import pytest
from cluster_cases import partition_of
from modality_cases import ascend, begun, central_hessian, continuous, levels
from scipy.special import expit, logit, logsumexp

import fedstat as fs
from fedstat.models.m2sem.bootstrap import bootstrap_ratios
from fedstat.models.m2sem.information import local_information
from fedstat.models.m2sem.modality.base import corners
from fedstat.models.m2sem.modality.categorical import CategoricalModality
from fedstat.models.m2sem.modality.gaussian import GaussianModality
from fedstat.models.m2sem.tables import has_diverged

K = 3


def shares_of(codes, r, C):
    """Shares of levels 0 to C - 1 under weights r (n, K), of codes (n, P), -1 where missing: (K, P, C)."""
    cells = (codes[:, :, None] == np.arange(C)).astype(float)
    counts = np.einsum("nk,npc->kpc", r, cells)
    return counts / counts.sum(axis=2, keepdims=True)


def log_densities(codes, shares):
    with np.errstate(divide="ignore"):
        logs = np.log(shares)
    return np.array([sum(np.where(x >= 0, one[p, x], 0.0) for p, x in enumerate(codes.T)) for one in logs]).T


def pooled_em(codes, C, r, steps=2000):
    """Log-likelihood, shares of classes and of levels, by the EM of poLCA."""
    value = -np.inf
    for _ in range(steps):
        w, shares = r.mean(axis=0), shares_of(codes, r, C)
        f = log_densities(codes, shares) + np.log(w)
        r, before, value = np.exp(f - logsumexp(f, axis=1)[:, None]), value, logsumexp(f, axis=1).sum()
        if value - before < 1e-9:
            break
    return value, w, shares


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_continuous_columns_have_their_mean_in_every_class_and_one_variance(missing):
    x, r, _ = continuous(0, n=150, P=4, K=K, missing=missing)
    m = begun(GaussianModality(x, list("abcd"), 0), r)
    seen, weights = ~np.isnan(x), r[:, :, None] * ~np.isnan(x)[:, None]
    full = np.where(seen, x, 0.0)
    means = (weights * full[:, None]).sum(axis=0) / weights.sum(axis=0)
    left = np.where(seen[:, None], x[:, None] - means, 0.0)
    variance = (r[:, :, None] * left**2).sum(axis=(0, 1)) / weights.sum(axis=(0, 1))
    expected = np.where(seen[:, None], -0.5 * (np.log(2 * np.pi * variance) + left**2 / variance), 0.0)
    np.testing.assert_allclose(m.profile(), means, rtol=1e-10)
    np.testing.assert_allclose(m.log_densities(), expected.sum(axis=2), rtol=1e-10)
    assert m.free_parameters() == 4 * (K + 1)


def test_nominal_and_binary_columns_have_free_probabilities():
    kinds = ("nominal", "binary", "nominal")
    codes, r, C = levels(1, n=300, missing=0.1, kinds=kinds)
    m = begun(CategoricalModality(codes, list("abc"), 0, kinds, C), r)
    assert np.diff(ascend(m, r)).min() > -1e-8
    shares = shares_of(codes, r, 3)
    np.testing.assert_allclose(np.nan_to_num(m.profile()), shares, atol=1e-7)
    np.testing.assert_allclose(m.log_densities(), log_densities(codes, shares), atol=1e-6)
    assert m.free_parameters() == K * (2 + 1 + 2)


def test_ordinal_columns_have_thresholds_with_a_shift_in_every_class():
    codes, r, C = levels(2, n=300, kinds=("ordinal", "ordinal"))
    m = begun(CategoricalModality(codes, list("ab"), 0, ("ordinal", "ordinal"), C), r)
    ascend(m, r)
    below = logit(m.profile().cumsum(axis=2)[:, :, :-1])
    np.testing.assert_allclose(
        below - below[:1, :, :1], (below - below[:1])[:, :, :1] + below[:1] - below[:1, :, :1]
    )
    scores, _ = m.scores_by_cluster(r)
    assert np.abs(np.einsum("nk,nkp->p", r, scores)[m.free]).max() < 1e-4  # a maximum
    assert m.free_parameters() == 2 * (3 + K - 1)


def test_distance_is_that_of_the_columns_and_no_class_is_special():
    x, r, _ = continuous(3, n=200, P=3, K=K)
    m = begun(GaussianModality(x, list("abc"), 0), r)
    w, means = r.mean(axis=0), m.profile()
    variance = m.psi * x.std(axis=0) ** 2
    expected = w @ ((means - w @ means) ** 2 / variance).sum(axis=1)
    np.testing.assert_allclose(m.separation(w), expected)
    other = begun(GaussianModality(x, list("abc"), 0), r[:, [2, 0, 1]])
    np.testing.assert_allclose(other.row_norms(), m.row_norms())
    np.testing.assert_allclose(corners(4).T @ corners(4), 4 * np.eye(3), atol=1e-12)
    assert len(local_information([m], r).own) == m.free_parameters()  # no direction without a density


def test_drawn_columns_have_the_means_and_the_variance_of_their_class():
    x, r, _ = continuous(3, n=200, P=3, K=K)
    m = begun(GaussianModality(x, list("abc"), 0), r)
    drawn = m.draw(np.full(20_000, 1), np.random.default_rng(0))
    sd = np.sqrt(m.psi) * x.std(axis=0)
    np.testing.assert_allclose((drawn.mean(axis=0) - m.profile()[1]) / sd, 0.0, atol=0.03)
    np.testing.assert_allclose(drawn.std(axis=0) / sd, 1.0, atol=0.03)


@pytest.fixture(scope="module")
def of_levels():
    """Two classes by three binary columns at each of three sites, with records and cells missing."""
    rng = np.random.default_rng(4)
    n, P = 400, 9
    k = rng.random(n) < 0.4
    codes = (rng.random((n, P)) < np.where(k[:, None], 0.75, 0.25)).astype(int)
    frame = pd.DataFrame(codes, columns=[f"x{p}" for p in range(P)]).astype(float)
    frame = frame.mask(rng.random((n, P)) < 0.05)
    frames = {}
    for s in range(3):
        part = frame.iloc[:, 3 * s : 3 * s + 3]
        frames["ABC"[s]] = part.assign(id=range(n))[rng.random(n) < 0.9]
    together = frame.copy()
    for s, one in enumerate(frames.values()):
        together.iloc[:, 3 * s : 3 * s + 3] = one.drop(columns="id").reindex(range(n)).to_numpy()
    some = together.notna().any(axis=1)
    frames = {site: one[one["id"].isin(np.flatnonzero(some))] for site, one in frames.items()}
    return partition_of(frames), together[some].fillna(-1).to_numpy(int)


@pytest.fixture(scope="module")
def fitted(of_levels):
    return fs.M2SEM(of_levels[0], 2, 0).fit(select=None, n_init=2)


def test_a_fit_over_sites_is_the_best_maximum_of_the_pooled_rows(of_levels, fitted):
    _, codes = of_levels
    rng = np.random.default_rng(0)
    best, w, shares = max(
        (pooled_em(codes, 2, rng.dirichlet([1, 1], len(codes))) for _ in range(10)), key=lambda one: one[0]
    )
    order = np.argsort(-w)
    assert fitted.llf == pytest.approx(best, abs=0.02)
    np.testing.assert_allclose(fitted.sizes["share"], w[order], atol=0.01)
    found = fitted.profiles().to_numpy().T.reshape(2, 9, 2)
    np.testing.assert_allclose(found, shares[order], atol=0.01)
    parameters = 1 + 2 * 9
    assert fitted.bic == pytest.approx(-2 * fitted.llf + parameters * np.log(len(codes)), abs=1e-6)


def test_standard_errors_are_those_of_the_pooled_likelihood(of_levels, fitted):
    """From numerical second derivatives in logits, at the estimates."""
    _, codes = of_levels
    w, shares = fitted.sizes["share"].to_numpy(), fitted.profiles().to_numpy().T.reshape(2, 9, 2)

    def value(at):
        high = expit(at[1:]).reshape(2, 9)
        log_w = np.log([expit(at[0]), expit(-at[0])])
        return logsumexp(log_densities(codes, np.stack([1 - high, high], axis=2)) + log_w, axis=1).sum()

    at = logit(np.append(w[0], shares[:, :, 1].ravel()))
    errors = np.sqrt(np.diag(np.linalg.inv(-central_hessian(value, at, 1e-3)))) * expit(at) * expit(-at)
    found = fitted.tidy().query("level.str.startswith('1')")["std_error"].to_numpy()
    np.testing.assert_allclose(found, errors[1:], rtol=0.02)
    assert fitted.sizes["std_error"].iloc[0] == pytest.approx(errors[0], rel=0.02)
    assert (fitted.tests()["df"] == 1).all()


def test_what_there_is_not_without_factors(fitted):
    with pytest.raises(fs.errors.NotAvailableError, match="without factors"):
        fitted.factor_scores("A")
    with pytest.raises(fs.errors.NotAvailableError, match="without factors"):
        fitted.communalities()
    text = " ".join(str(fitted.summary(notes="all")).split())
    assert "latent classes" in text and "independent within clusters" in text and "factor scores" not in text


def test_predictions_tests_and_files(of_levels, fitted, tmp_path):
    np.testing.assert_allclose(fitted.predict(of_levels[0]), fitted.posterior, atol=5e-3)
    one = fs.M2SEM(of_levels[0], 1, 0).fit(select=None, n_init=1)
    assert one.bic == pytest.approx(-2 * one.llf + 9 * np.log(len(fitted.labels)), abs=1e-6)
    assert fitted.test_against(one, samples=2, n_init=1).pvalue == pytest.approx(1 / 3)
    subjects = one._alive("").model._subjects
    assert bootstrap_ratios(one._record, subjects, 2, 2, np.random.default_rng(0)).min() > 1.0
    drawn = fitted.bootstrap(10).tidy()["std_error"]
    assert (drawn / fitted.tidy()["std_error"]).median() == pytest.approx(1.0, abs=0.4)
    fitted.save(tmp_path / "fit")
    assert str(fs.load(tmp_path / "fit").summary()) == str(fitted.summary())


def test_the_sizes_without_factors_are_searched_and_columns_are_selected():
    """Columns that are independent within three groups need no factor; two columns separate nothing."""
    rng = np.random.default_rng(6)
    n = 300
    k = rng.integers(3, size=n)
    body = 2.0 * np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0]])[k] + rng.standard_normal((n, 3))
    town = pd.DataFrame(
        {
            f"t{p}": np.array(list("uvw"))[np.where(rng.random(n) < 0.6, k, rng.integers(3, size=n))]
            for p in range(3)
        }
    )
    frames = {
        "A": pd.DataFrame(body, columns=list("abc")).assign(noise=rng.standard_normal(n), id=range(n)),
        "B": town.assign(coin=rng.choice(["h", "t"], n), id=range(n)),
    }
    partition = partition_of(frames)
    with pytest.warns(fs.errors.DisclosureWarning):
        found = fs.M2SEM.search(partition, n_clusters=[2, 3], n_factors=[0, 1], n_init=2)
    assert found.best == (3, 0)
    assert found.table["parameters"].loc[3, 0] == 2 + 4 * (3 + 1) + 3 * (3 * 2) + 3
    with pytest.warns(fs.errors.DisclosureWarning):
        fit = fs.M2SEM(partition, 3, 0).fit(n_init=2, starts="sum", half_samples=4)
    selected = fit.features["selected"].droplevel(["site", "modality"])
    assert selected.to_dict() == {name: name not in ("noise", "coin") for name in selected.index}
    assert fit.features["frequency"].between(0, 1).all()
    # log n for each of the two numbers by which three classes differ
    assert np.isclose(fit.path["lam1"], 2 * np.log(n)).any() and not fit.path["lam2"].any()
    df = fit.tests()["df"].droplevel(["site", "modality"])
    assert df["a"] == 2 and df["t0"] == 4


@pytest.mark.parametrize(
    "kind, expected, diverges",
    [
        ("binary", [[0.4, 9.6], [5, 5]], True),
        ("binary", [[0.6, 9.4], [5, 5]], False),
        ("nominal", [[5, 0.4, 5], [5, 5, 5]], True),
        ("nominal", [[5, 0, 5], [5, 0, 5]], False),  # a level that nobody has
        ("ordinal", [[5, 0.4, 5], [5, 5, 5]], False),
        ("ordinal", [[10, 0.4, 0.1], [5, 5, 5]], True),
        ("ordinal", [[0.1, 0.1, 10], [5, 5, 5]], True),
        ("continuous", [[0.0], [0.0]], False),
    ],
)
def test_shares_of_zero_or_one_have_no_errors(kind, expected, diverges):
    assert has_diverged(kind, 0.0, np.array(expected, dtype=float)) == diverges
