"""Clusters over sites: the same for every order of sites, and the objective never decreases."""

import numpy as np
import pandas as pd
import pytest
from cluster_cases import QUICK, agreement, make_frames, partition_of, rises
from pictures import JOURNAL, faults, page

import fedstat as fs


@pytest.fixture(scope="module")
def frames():
    return make_frames()


@pytest.fixture(scope="module")
def result(frames):
    return fs.M2SEM(partition_of(frames[0]), 2, 1).fit(**QUICK)


def test_clusters_are_found(frames, result):
    assert agreement(result.labels, frames[1]) > 0.85
    assert result.converged and result.sizes["share"].is_monotonic_decreasing
    np.testing.assert_allclose(result.posterior.sum(axis=1), 1.0)


@pytest.mark.parametrize("missing", [0.0, 0.25])
def test_the_penalized_likelihood_never_falls(missing):
    frames, _ = make_frames(missing=missing, seed=3)
    frames["D"] = pd.DataFrame({"id": range(150), "d0": np.random.default_rng(1).normal(size=150)})
    frames["D"]["d1"] = frames["D"]["d0"] + np.random.default_rng(2).normal(size=150)
    found = fs.M2SEM(partition_of(frames), 2, 1).fit(select="bic", n_init=2)
    assert rises(found) > -1e-8
    assert found.path["bic"].min() >= found.bic - 1e-6
    best = found.path.loc[found.path["bic"].idxmin()]
    assert best["columns"] == (found.features["loading"] > 0.0).sum()
    assert best["modalities"] == found.modalities["selected"].sum() == 3
    assert not found.modalities.loc["D", "selected"].any()


def test_order_of_sites_and_masks_are_irrelevant(frames, result):
    turned = dict(reversed(frames[0].items()))
    other = fs.M2SEM(partition_of(turned), 2, 1).fit(**QUICK)
    clear = fs.M2SEM(partition_of(turned), 2, 1).fit(masked=False, **QUICK)
    assert other.llf == result.llf and other.posterior.equals(result.posterior)
    np.testing.assert_allclose(clear.posterior, result.posterior, atol=1e-12)
    assert result._record.masked and not clear._record.masked


def test_only_differences_of_log_densities_leave_for_an_entity(result):
    """(n, K - 1) for each client and round of the one mixture, three of which k-means began; r comes back."""
    left = result.ledger.releases()
    each = left[left["kind"] == "per entity"]
    assert set(each["step"]) == {"improve"}
    up = each[each["receiver"] == "coordinator"]
    assert set(up["array"]) == {"differences"} and up["masked"].all()
    assert {tuple(shape) for shape in up["shape"]} == {(150, 1)}
    assert set(each[each["sender"] == "coordinator"]["array"]) == {"r"}


def test_pictures_show_how_far_clusters_are_apart_in_units_of_the_column():
    data = fs.datasets.make_clusters(
        400, ["continuous", "ordinal"], shares=[0.5, 0.5], p=4, separation=4.0, seed=1
    )
    found = fs.M2SEM(partition_of(data.frames), 2, 1).fit(**QUICK, cov_type=None)
    places = found.plot_heat().images[0].get_array()
    assert not any(faults(found.plot_heat(page(width, 3.5)).figure) for width in JOURNAL)
    assert not faults(found.plot_profiles())
    for row, (site, column) in enumerate([("Client 1", "c1_1"), ("Client 2", "c2_1")]):
        x = data.frames[site].set_index("id")[column]
        x = x.cat.codes if column == "c2_1" else x
        apart = x.groupby(found.labels).mean()
        np.testing.assert_allclose(places[4 * row], (apart - x.mean()) / x.std(), atol=0.08)


def test_results_come_back_from_a_file(result, tmp_path):
    result.save(tmp_path / "fit")
    again = fs.load(tmp_path / "fit")
    assert str(again.summary()) == str(result.summary())
    pd.testing.assert_frame_equal(again.profiles(), result.profiles())
    with pytest.raises(fs.errors.NotAvailableError, match="predict"):
        again.posterior  # noqa: B018


def mixed(n=200, seed=5):
    """Two clusters at three clients: floats, ordered answers, a code, two values; with missing cells."""
    rng = np.random.default_rng(seed)
    k = rng.integers(2, size=n)
    eta = 2.5 * k - 1.25 + rng.standard_normal((3, n))
    cut = [
        pd.cut(eta[0] + rng.logistic(size=n), [-99, -1, 0.5, 99], labels=["no", "some", "yes"])
        for _ in range(4)
    ]
    survey = pd.DataFrame({f"q{p}": one for p, one in enumerate(cut)})
    survey["code"] = np.array(["x", "y", "z"])[rng.integers(3, size=n)]
    survey["two"] = eta[0] + rng.logistic(size=n) > 0
    body = pd.DataFrame({f"b{p}": eta[1] + rng.standard_normal(n) for p in range(4)})
    body.loc[rng.random(n) < 0.2, "b1"] = np.nan
    blood = pd.DataFrame({f"l{p}": eta[2] + rng.standard_normal(n) for p in range(3)})
    survey.loc[rng.random(n) < 0.1, "q1"] = None
    frames = {"Survey": survey, "Body": body, "Blood": blood}
    for frame in frames.values():
        frame["id"] = [f"P{i:03d}" for i in range(n)]
    frames["Blood"] = blood[rng.random(n) < 0.8]
    return frames, k


@pytest.fixture(scope="module")
def of_mixed():
    frames, k = mixed()
    partition = partition_of(frames)
    return partition, k, fs.M2SEM(partition, 2, 1).fit(n_init=2, starts="sum")


def test_columns_of_all_kinds(of_mixed):
    _, k, result = of_mixed
    assert agreement(result.labels, k) > 0.9 and rises(result) > -1e-7
    kinds = result.features.reset_index().set_index("column")["kind"]
    assert kinds[["q0", "code", "two", "b0"]].tolist() == ["ordinal", "nominal", "binary", "continuous"]
    shares = result.profiles().loc["Survey"].groupby(level="column").sum()
    np.testing.assert_allclose(shares, 1.0)
    assert "20%" in str(result.summary(notes="all")) or "have no record" in str(result.summary(notes="all"))


def test_predictions_for_the_same_entities_are_the_posteriors(of_mixed):
    partition, _, result = of_mixed
    # These are of the parameters that came of posteriors of the last round but one.
    np.testing.assert_allclose(result.predict(partition), result.posterior, atol=2e-3)


def test_predictions_by_some_modalities(of_mixed):
    _, k, result = of_mixed
    frames, _ = mixed()
    some = result.predict(partition_of({"Survey": frames["Survey"].iloc[:50], "Body": frames["Body"]}))
    assert len(some) == 200 and agreement(some.to_numpy().argmax(axis=1) + 1, k) > 0.85
    wrong = frames["Survey"].replace({"code": {"z": "w"}})
    with pytest.raises(fs.errors.DesignError, match="not known when the model was fitted"):
        result.predict(partition_of({"Survey": wrong, "Body": frames["Body"]}))
    with pytest.raises(fs.errors.ModelError, match="lacks column 'b3'"):
        result.predict(partition_of({"Body": frames["Body"].drop(columns="b3")}))


def test_factor_scores_of_a_site(of_mixed):
    partition, k, result = of_mixed
    scores = result.factor_scores("Blood")
    assert len(scores) == len(partition.rows["Blood"]) and list(scores.columns) == [("Blood", 1)]
    assert abs(np.corrcoef(scores.iloc[:, 0], k[partition.rows["Blood"]])[0, 1]) > 0.6


# ---- what is refused ------------------------------------------------------------------------------


def plain(**columns):
    rng = np.random.default_rng(0)
    a = pd.DataFrame({f"a{p}": rng.standard_normal(60) for p in range(3)} | columns).assign(id=range(60))
    b = pd.DataFrame({f"b{p}": rng.standard_normal(60) for p in range(3)}).assign(id=range(60))
    return {"A": a, "B": b}


def test_whole_numbers_of_few_values_are_asked_about():
    frames = plain(children=np.arange(60) % 5, score=np.arange(60) % 7)
    with pytest.raises(
        fs.errors.DesignError, match=r"'children' \(5 values\), 'score' \(7 values\).*ordinal="
    ):
        fs.M2SEM(partition_of(frames))
    model = fs.M2SEM(partition_of(frames), 2, 1, ordinal=["score"], continuous=["children"])
    kinds = {c.name: c.kind for one in model._agreed.modalities["A"] for c in one.columns}
    assert kinds["children"] == "continuous" and kinds["score"] == "ordinal"


@pytest.mark.parametrize(
    "options, kind, words",
    [
        ({"n_clusters": 7}, "ModelError", "at most 6 for 60 entities"),
        ({"columns": ["a0", "nix"]}, "ModelError", "no site has a column 'nix'"),
        ({"modalities": {"both": ["a0", "b0"]}}, "ModelError", "cannot share factors"),
        ({"ordinal": "a0"}, "ModelError", "expected a list of names"),
        ({"n_clusters": 0}, "ModelError", "whole number"),
    ],
)
def test_arguments_without_a_meaning(options, kind, words):
    with pytest.raises(getattr(fs.errors, kind), match=words):
        fs.M2SEM(partition_of(plain()), **options)


def test_a_constant_column_and_an_entity_that_nobody_has():
    with pytest.raises(fs.errors.FedstatError, match=r"'a9'.*Leave it"):
        fs.M2SEM(partition_of(plain(a9=1.0), new_data=True))
    frames = {name: frame[frame["id"] != 3] for name, frame in plain().items()}
    frames["C"] = pd.DataFrame({"id": range(60), "c": np.arange(60.0)})
    with pytest.raises(fs.errors.EstimationError, match="1 of 60 entities have no value"):
        fs.M2SEM(partition_of(frames), columns=["a0", "a1", "b0", "b1"])


def three_groups(seed, n=50, step=2.0, rounded=1):
    """Four columns of three groups, two at each site; two groups are close together."""
    rng = np.random.default_rng(seed)
    means = np.array(
        [[0.0, 0.0, 0.0, 0.0], [step, -step / 3, 3 * step, step], [1.6 * step, 0.0, 4 * step, 2 * step]]
    )
    root = np.linalg.cholesky(0.15 * np.eye(4) + 0.1)
    X = np.repeat(means, n, axis=0) + rng.standard_normal((3 * n, 4)) @ root.T
    d = pd.DataFrame(X.round(rounded), columns=list("abcd")).assign(id=range(3 * n))
    return {"A": d[["id", "a", "b"]], "B": d[["id", "c", "d"]]}


@pytest.mark.parametrize("seed, n, step", [(0, 50, 1.0), (1, 50, 1.5), (2, 100, 2.0)])
def test_the_releases_of_one_fit_do_not_collide(seed, n, step):
    """A default fit of separated groups: the last posteriors differ from those before in few rows only."""
    found = fs.M2SEM(partition_of(three_groups(seed, n, step)), 3).fit(n_init=1, starts="sum")
    assert found.converged and found.tidy()["std_error"].notna().all()
    assert found.sizes["entities"].between(0.8 * n, 1.2 * n).all()


def test_a_site_with_one_column_has_one_factor():
    frames = make_frames()[0]
    frames["C"] = frames["C"].iloc[:, :2]
    found = fs.M2SEM(partition_of(frames), 2, 2).fit(select=None, n_init=1, starts="sum", cov_type=None)
    (own,) = found._record.sites["C"].modalities
    assert own.factors(2) == 1 and len(own.columns) == 1
    assert found.factor_scores("C").shape[1] == 1 and found.factor_scores("A").shape[1] == 2


def test_all_columns_of_unclear_kind_are_named_at_once():
    rng = np.random.default_rng(1)
    counts = pd.DataFrame(
        {"id": range(60), "n": rng.poisson(0.4, 60), "m": np.arange(60) % 4, "b0": rng.normal(size=60)}
    )
    counts.loc[0, "n"] = 9
    frames = {"A": plain()["A"], "B": counts}
    with pytest.raises(
        fs.errors.DesignError, match=r"'n' \(rare values, so only continuous\), 'm' \(4 values\)"
    ):
        fs.M2SEM(partition_of(frames), 2)
    model = fs.M2SEM(partition_of(frames), 2, continuous=["n"], ordinal=["m"])
    assert [one.name for one in model._agreed.modalities["B"]] == ["B (continuous)", "B (categorical)"]


def test_a_fit_without_any_refit_remains_at_the_sites():
    """Penalties empty a cluster at once, so the fit itself is released; sites must still have it."""
    rng = np.random.default_rng(1)
    d = pd.DataFrame({"id": range(300), "a": rng.normal(size=300), "b": rng.normal(size=300)})
    d["n"] = rng.poisson(0.4, 300)
    d.loc[0, "n"] = 9
    frames = {"A": d[["id", "a", "b"]], "B": d[["id", "n"]]}
    assert np.isfinite(fs.M2SEM(partition_of(frames), 2, 1, continuous=["n"]).fit().llf)


def test_named_groups_share_factors_by_kind():
    frames = plain(q=pd.Categorical(np.array(["u", "v"])[np.arange(60) % 2]))
    model = fs.M2SEM(partition_of(frames), 2, 1, modalities={"first": ["a0", "q"]})
    assert [one.name for one in model._agreed.modalities["A"]] == [
        "first (continuous)",
        "first (categorical)",
        "A",
    ]


def test_a_fit_that_is_broken_off_says_so_loudly(frames):
    with pytest.warns(fs.errors.ConvergenceWarning, match="M2SEM did not converge"):
        cut = fs.M2SEM(partition_of(frames[0]), 2, 1).fit(maxiter=9, **QUICK)
    assert not cut.converged and str(cut.summary()).startswith("*** NOT CONVERGED")


def test_a_search_prints_and_plots_and_finds_the_number(frames):
    grid = fs.M2SEM.search(partition_of(frames[0]), n_clusters=range(1, 4), n_factors=(1,), n_init=1)
    assert grid.best == (2, 1) and len(grid.table) == 3
    assert "smallest BIC" in str(grid) and len(grid.plot().lines) == 1
    assert not any(faults(grid.plot(page(width, 2.6)).figure) for width in JOURNAL)
    # For one cluster it is the sum of the sites' own factor analyses.
    assert grid.table["parameters"].iloc[0] == 3 * (4 + 4 + 4)


def test_half_samples_select_again(frames):
    found = fs.M2SEM(partition_of(frames[0]), 2, 1).fit(n_init=1, starts="sum", half_samples=6)
    often = found.modalities["frequency"]
    assert often.between(0.0, 1.0).all() and often.iloc[0] > 0.8 and "selected in" in str(found.summary())
    assert len(found.features["frequency"]) == 12


@pytest.mark.slow
def test_columns_that_blurred_clusters_hide_are_found():
    """Weights of penalties from a fit of all columns lose half of the columns that separate clusters here."""
    data = fs.datasets.make_cluster_experiment("noisy", seed=3)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    found = fs.M2SEM(partition, 3, 2).fit(masked=False, cov_type=None, seed=3)
    assert found.bic < found.path["bic"][:7].min() - 40.0 and rises(found) > -1e-7
    loading = found.features["loading"].droplevel(["site", "modality"]).reindex(data.columns.index)
    assert (loading[data.columns["informative"]] > 0.0).mean() >= 0.7
