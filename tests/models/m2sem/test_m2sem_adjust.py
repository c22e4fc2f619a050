"""Known covariates: columns are regressed on them within clusters, at the client that holds both."""

import numpy as np
import pandas as pd
import pytest
from cluster_cases import QUICK, agreement, partition_of, rises
from scipy.special import expit
from scipy.stats import norm
from sklearn.decomposition import FactorAnalysis
from test_m2sem_information import ascended, coordinates, hessian, joint_information, posterior

import fedstat as fs
from fedstat.errors import ConvergenceWarning, DataWarning, FormulaError, ModelError, NotAvailableError
from fedstat.models.m2sem.information import local_information
from fedstat.models.m2sem.modality.categorical import CategoricalModality
from fedstat.models.m2sem.modality.gaussian import GaussianModality
from fedstat.models.m2sem.model import M2SEM

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


CUT = [-np.inf, -1.5, 0.0, 1.5, np.inf]


def confounded(n=300, seed=3):
    """Two clusters at three clients, each of which has age, which moves all columns more than clusters do."""
    rng = np.random.default_rng(seed)
    k = rng.integers(2, size=n)
    age = rng.uniform(20.0, 80.0, n).round()
    frames = {}
    for number, site in enumerate("ABC"):
        eta = 2.6 * (k - 0.5) + rng.standard_normal(n)
        X = (
            eta[:, None] * np.array([0.9, 1.0, 0.8])
            + 0.12 * (age - 50)[:, None]
            + rng.standard_normal((n, 3))
        )
        frame = pd.DataFrame(X, columns=[f"{site.lower()}{p}" for p in range(3)])
        if site == "C":
            frame = frame.apply(lambda x: pd.cut(x + rng.logistic(size=n), CUT, labels=list("wxyz")))
        frames[site] = frame.assign(**{f"age{number}": age}).assign(id=range(n))
    return frames, k, age


ADJUST = {"A": "~ age0", "B": "~ age1", "C": "~ age2"}


@pytest.fixture(scope="module")
def fitted():
    frames, k, age = confounded()
    partition = partition_of(frames)
    return partition, k, age, M2SEM(partition, 2, 1, adjust=ADJUST).fit(**QUICK)


def test_clusters_follow_age_unless_columns_are_adjusted_for_it(fitted):
    partition, k, age, result = fitted
    columns = [name for held in partition.columns.values() for name in held if not name.startswith("age")]
    plain = M2SEM(partition, 2, 1, columns=columns).fit(cov_type=None, **QUICK)
    assert agreement(plain.labels, age > np.median(age)) > 0.75 and agreement(plain.labels, k) < 0.7
    assert agreement(result.labels, k) > 0.88 and agreement(result.labels, age > np.median(age)) < 0.6
    assert rises(result) > -1e-7


def test_effects_of_covariates_have_errors(fitted):
    *_, result = fitted
    effects = result.covariate_effects()
    assert effects.index.names == ["site", "modality", "column", "level", "covariate"]
    assert len(effects) == 9 and set(effects.index.get_level_values("covariate")) == {"age0", "age1", "age2"}
    numbers = effects.drop("C")
    assert (np.abs(numbers["estimate"] - 0.12) < 4.0 * numbers["std_error"]).all()
    assert numbers["std_error"].between(0.002, 0.008).all() and (effects["p_value"] < 1e-6).all()
    text = " ".join(str(result.summary(notes="all")).split())
    assert (
        "Columns of 'A' for age0, of 'B' for age1, of 'C' for age2 are adjusted:" in text
        and "covariate_effects()" in text
    )


def test_profiles_are_at_the_means_of_covariates(fitted):
    partition, _, age, result = fitted
    profiles, r = result.profiles(), result.posterior.to_numpy()
    frame = partition.sites["A"]._data.frame
    for name in ("a0", "a1", "a2"):
        x, effect = frame[name].to_numpy(), result.covariate_effects().loc[("A", "A", name)].iloc[0, 0]
        left = x - effect * (age - age.mean())
        np.testing.assert_allclose(
            profiles.loc["A", "A", name].iloc[0], r.T @ left / r.sum(axis=0), atol=0.12
        )


def test_predictions_scores_and_files_take_covariates(fitted, tmp_path):
    partition, k, _, result = fitted
    result.save(tmp_path / "clusters")
    again = fs.load(tmp_path / "clusters")
    np.testing.assert_allclose(again.predict(partition), result.posterior, atol=2e-3)
    pd.testing.assert_frame_equal(again.covariate_effects(), result.covariate_effects())
    assert str(again.summary()) == str(result.summary())
    scores = result.factor_scores("A").iloc[:, 0]
    assert abs(np.corrcoef(scores, k)[0, 1]) > 0.6
    frames, *_ = confounded()
    some = {c: frames[c].head(40) for c in "AB"}
    some["A"] = some["A"].assign(age0=some["A"]["age0"].where(some["A"].index > 9))
    new = partition_of(some, new_data=True)
    found = result.predict(new)
    assert len(found) == 40 and found.notna().all(axis=None)
    with pytest.raises(ModelError, match="lacks column 'age1' of the fit"):
        result.predict(partition_of({"B": frames["B"].drop(columns="age1")}))


def test_search_half_samples_and_bootstrap_take_covariates(fitted):
    partition, *_, result = fitted
    grid = M2SEM.search(partition, n_clusters=(1, 2), n_factors=(1,), n_init=1, adjust=ADJUST)
    assert grid.best == (2, 1)
    # For each column an intercept or thresholds, a slope, a loading, and a variance.
    assert grid.table["parameters"].iloc[0] == 2 * 3 * 4 + 3 * (3 + 1 + 1)
    halves = M2SEM(partition, 2, 1, adjust=ADJUST).fit(
        n_init=1, starts="sum", half_samples=3, cov_type=None, maxiter=60
    )
    assert halves.modalities["frequency"].between(0.0, 1.0).all()
    drawn = result.bootstrap(8, seed=1)
    ratio = drawn.tidy()["std_error"] / result.tidy()["std_error"]
    assert 0.6 < ratio.median() < 1.6 and "do not depend" in " ".join(str(drawn).split())


# ---- oracles ----------------------------------------------------------------------------------


def test_of_one_cluster_it_is_regression_and_factor_analysis():
    """Covariates that all columns share: least squares by column, and factors of what is left."""
    rng = np.random.default_rng(5)
    n, eta = 250, rng.standard_normal((250, 1))
    frame = pd.DataFrame({"age": rng.normal(50, 9, n), "sex": np.where(rng.random(n) < 0.4, "m", "f")})
    X = 0.2 * frame[["age"]].to_numpy() * [1, 0, -1, 2, 1] + eta * [1, 0.7, 0.9, 0.5, 0.8]
    X = X + (frame[["sex"]] == "m").to_numpy() * 1.5 + rng.standard_normal((n, 5))
    frame = frame.assign(**{f"x{p}": X[:, p] for p in range(5)}, id=range(n))
    found = M2SEM(partition_of({"A": frame}), 1, 1, adjust="~ age + C(sex)").fit(
        **QUICK, cov_type=None, local_steps=100
    )
    Z = np.column_stack([np.ones(n), frame["age"], frame["sex"] == "m"]).astype(float)
    B = np.linalg.lstsq(Z, X)[0]
    effects = found.covariate_effects()["estimate"].to_numpy().reshape(5, 2)
    np.testing.assert_allclose(effects, B[1:].T, atol=1e-3)
    left = X - Z @ B
    expected = FactorAnalysis(1, tol=1e-12, max_iter=20_000, svd_method="lapack").fit(left).score(left) * n
    assert found.llf == pytest.approx(expected, abs=2e-3)
    assert list(found.covariate_effects().index.get_level_values("covariate")[:2]) == ["age", "C(sex)[T.m]"]
    # At its end the modality by itself is there to many digits.
    m = GaussianModality(X, list("abcde"), 1, (Z[:, 1:] - Z[:, 1:].mean(axis=0)) / Z[:, 1:].std(axis=0))
    m.begin(1)
    m.improve(np.ones((n, 1)), steps=3000)
    np.testing.assert_allclose(m.effects() / Z[:, 1:].std(axis=0), B[1:].T, atol=1e-9)
    assert m.log_densities().sum() == pytest.approx(expected, abs=1e-6)


def graded(codes, z, alpha, b, load):
    """Log-likelihood of rows, integrated over one factor by the trapezoidal rule.

    Its error vanishes to rounding for an analytic integrand that is 0 at both ends.
    """
    eta = np.linspace(-9.0, 9.0, 1801)
    edges = np.pad(alpha, ((0, 0), (1, 1)), constant_values=(-np.inf, np.inf))
    at, place = np.outer(eta, load) + b * z[:, None, None], np.arange(len(load))
    above, below = (edges[place, codes + step][:, None] for step in (1, 0))
    values = np.prod(expit(above - at) - expit(below - at), axis=2) * norm.pdf(eta)
    return np.log(values.sum(axis=1) * (eta[1] - eta[0])).sum()


def test_of_one_ordinal_site_it_is_the_graded_response_model_with_covariates():
    rng = np.random.default_rng(8)
    n, P = 90, 4
    z, eta = rng.integers(0, 5, n).astype(float), rng.standard_normal(n)
    y = (
        np.outer(eta, [1.2, 0.9, 1.4, 0.7])
        + np.outer(z - 2, [0.6, 0.0, -0.5, 0.8])
        + rng.logistic(size=(n, P))
    )
    codes = np.digitize(y, [-1.0, 1.0])
    frame = pd.DataFrame(
        {f"q{p}": pd.Categorical.from_codes(codes[:, p], list("abc"), ordered=True) for p in range(P)}
    )
    model = M2SEM(partition_of({"A": frame.assign(z=z, id=range(n))}), 1, 1, adjust="~ z")
    found = model.fit(**QUICK, cov_type=None, local_steps=100)
    held = found._record.sites["A"]
    mean, sd = held.spread[:, 0]
    theta = held.parameters[:-1].reshape(P, 4)
    alpha, b, load = theta[:, :2], theta[:, 2], theta[:, 3]
    standard = (z - mean) / sd
    np.testing.assert_allclose(found.covariate_effects()["estimate"], b / sd, rtol=1e-12)
    at_fit = graded(codes, standard, alpha, b, load)
    assert found.llf == pytest.approx(at_fit, abs=2e-3)
    for p, name in [(0, "b"), (1, "load")]:
        for step in (-0.1, 0.1):
            moved = {"b": b.copy(), "load": load.copy()}
            moved[name][p] += step
            assert graded(codes, standard, alpha, moved["b"], moved["load"]) < at_fit


def test_information_with_covariates_is_the_hessian_of_the_joint_likelihood():
    rng = np.random.default_rng(4)
    n, k = 160, rng.integers(2, size=160)
    z = np.column_stack([rng.integers(-1, 3, n), rng.integers(0, 2, n)]).astype(float)
    eta = 2.2 * (k - 0.5) + rng.standard_normal((2, n))
    X = eta[0][:, None] + z @ rng.standard_normal((2, 3)) + rng.standard_normal((n, 3))
    y = eta[1][:, None] + z @ [[0.8, -0.5, 0.3], [0.2, 0.9, -0.4]] + rng.logistic(size=(n, 3))
    codes, kinds = np.digitize(y, [-0.8, 0.8]), ["ordinal", "nominal", "ordinal"]
    mods = [
        GaussianModality(X, list("abc"), 1, z),
        CategoricalModality(codes, list("uvw"), 1, kinds, [3] * 3, 7, z),
    ]
    r = np.eye(2)[k] * 0.8 + 0.1
    for m in mods:
        m.begin(2)
        m.begin_means(r)
    r, w = ascended(mods, r, 20)
    info, reported = joint_information({"A": [mods[0]], "B": [mods[1]]}, r, w)
    bases, starts = [coordinates(m, r) for m in mods], [m.state() for m in mods]

    def put(u):
        at = 1
        for m, Z, start in zip(mods, bases, starts, strict=True):
            m.restore(start + Z @ u[at : at + Z.shape[1]])
            at += Z.shape[1]

    def loglik(u):
        put(u)
        return posterior(mods, np.array([w[0] + u[0], w[1] - u[0]]))[1]

    H = hessian(loglik, len(info))
    assert np.abs(info + H).max() < 1e-6 * np.abs(H).max()
    # Jacobians of effects: of columns in their units, and of logits of levels.
    at, h = 1, 1e-6
    for m, Z, part in zip(mods, bases, reported.values(), strict=True):
        local = local_information([m], r, np.array([2.0, 0.5]))
        for j in range(Z.shape[1]):
            sides = []
            for step in (h, -h):
                put(step * np.eye(len(info))[at + j])
                sides.append(m.effects() / [2.0, 0.5])
            put(np.zeros(len(info)))
            np.testing.assert_allclose(
                local.effects[:, j], (sides[0] - sides[1]).ravel() / (2 * h), atol=1e-6
            )
        at += Z.shape[1]
        assert part.crossing == Z.shape[1] and len(local.effects) == m.effects().size


# ---- what is said -------------------------------------------------------------------------------


def held(n=60, seed=0):
    rng = np.random.default_rng(seed)
    a = pd.DataFrame(rng.standard_normal((n, 3)), columns=["a0", "a1", "a2"]).assign(age=rng.normal(size=n))
    b = pd.DataFrame(rng.standard_normal((n, 3)), columns=["b0", "b1", "b2"])
    return {"A": a.assign(sex=np.arange(n) % 2, id=range(n)), "B": b.assign(id=range(n))}


def test_of_one_formula_each_site_has_its_own_terms():
    with pytest.warns(DataWarning, match=r"columns of 'B' are not adjusted"):
        model = M2SEM(partition_of(held()), 2, 1, adjust="~ age + C(sex)")
    assert model._chosen.columns == {"A": ("a0", "a1", "a2"), "B": ("b0", "b1", "b2")}
    assert "those of 'B' are not" in model._description
    assert [list(one.names) for one in model._agreed.covariates.values()] == [["age", "C(sex)[T.1]"]]
    both = M2SEM(partition_of(held()), 2, 1, adjust="~ age + b2", nominal=["sex"])
    assert {c: terms.terms for c, terms in both._chosen.adjust.items()} == {"A": ("age",), "B": ("b2",)}
    explained = " ".join(str(model.explain(**QUICK)).split())
    assert "effects on every column" in explained and "those of 'B' are not" in explained


def test_a_missing_covariate_is_a_missing_record():
    frames = held()
    frames["A"].loc[:6, "age"] = np.nan
    with pytest.warns(DataWarning, match="lack a covariate count as missing there: 7 at 'A'"):
        model = M2SEM(partition_of(frames), 2, 1, adjust={"A": "~ age"}, continuous=["sex"])
    assert len(model._subjects.place["A"]) == 53 and len(model._subjects.place["B"]) == 60
    alone = partition_of({"A": frames["A"]})
    with pytest.warns(DataWarning), pytest.raises(fs.errors.EstimationError, match=r"7 of 60.*lack a cov"):
        M2SEM(alone, 2, 1, adjust="~ age", continuous=["sex"])


@pytest.mark.parametrize(
    "adjust, kind, words",
    [
        ({"B": "~ age"}, ModelError, "'B' lacks 'age'.*add it to the table of 'B'.*'age_B'"),
        ("~ agee", FormulaError, "no column 'agee'. Did you mean 'age'"),
        (
            "~ age:b0",
            FormulaError,
            "needs column 'age' at site 'A' and column 'b0' at site 'B'",
        ),
        ({"C": "~ age"}, ModelError, "expected sites A, B, received 'C'"),
        ("age", FormulaError, "one '~'"),
        ("y ~ age", FormulaError, "left side"),
        ("~ 0 + age", FormulaError, "their own intercepts"),
        ("~ __import__('os')", FormulaError, "adjust"),
        (["age"], ModelError, "a formula such as '~ age'"),
    ],
)
def test_what_cannot_be_adjusted_for(adjust, kind, words):
    with pytest.raises(kind, match=words):
        M2SEM(partition_of(held()), 2, 1, adjust=adjust)


def test_what_is_adjusted_for_is_not_clustered():
    with pytest.raises(ModelError, match=r"'age' are also in adjust=.* Remove them from one argument"):
        M2SEM(partition_of(held()), 2, 1, columns=["a0", "a1", "age"], adjust={"A": "~ age"})
    frames = held() | {"Registry": held()["A"][["id", "age"]].rename(columns={"age": "years"})}
    with pytest.raises(ModelError, match="no column of 'Registry' is clustered"):
        M2SEM(partition_of(frames), 2, 1, adjust="~ years", nominal=["sex"])
    with pytest.warns(ConvergenceWarning):
        found = M2SEM(partition_of(held()), 2, 1).fit(cov_type=None, maxiter=9, **QUICK)
    with pytest.raises(NotAvailableError, match="no columns are adjusted"):
        found.covariate_effects()
