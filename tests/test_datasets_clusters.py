"""Simulated clusters: their description, checked on large draws, and the true values."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

import fedstat as fs
from fedstat import datasets
from fedstat.datasets.clusters import LEVELS
from fedstat.errors import ModelError


def values(data) -> pd.DataFrame:
    """All columns of entities that every client has; of an ordinal one the number of its level."""
    columns = pd.concat([frame.set_index(data.key) for frame in data.frames.values()], axis=1)
    return columns.apply(lambda x: x if x.dtype == float else x.cat.codes)


def agreement(found, truth) -> float:
    """Share of entities in their cluster, under the best naming of the clusters."""
    table = pd.crosstab(found, np.asarray(truth)).to_numpy()
    return table[linear_sum_assignment(-table)].sum() / len(found)


def drawn_profiles(data) -> pd.DataFrame:
    """Means and shares of categories by cluster, of the entities drawn."""
    X, labels = values(data), data.labels.to_numpy()
    rows = {}
    for variable, category in data.profiles.index:
        x = X[variable] if category == "" else X[variable] == LEVELS.index(category)
        rows[variable, category] = x.groupby(labels).mean()
    return pd.DataFrame(rows).T.rename_axis(data.profiles.index.names)


def test_an_experiment_has_the_sites_columns_and_clusters_of_the_publication():
    data = datasets.make_cluster_experiment(4, 500, seed=1)
    assert (
        data.modalities["kind"].tolist()
        == ["continuous"] * 4 + ["ordinal"] * 4 + ["continuous", "ordinal"] * 4
    )
    assert np.flatnonzero(data.modalities["informative"]).tolist() == [0, 1, 4, 5]
    assert (data.columns.groupby("client")["loaded"].sum() == 5).all()
    assert data.columns["informative"].sum() == 20 and len(data.columns) == 320
    assert [list(frame) for frame in data.frames.values()][1][:3] == ["id", "c2_1", "c2_2"]
    assert data.frames["Client 5"]["c5_1"].cat.ordered
    shares = datasets.make_cluster_experiment(1, 20_000, seed=2).labels.value_counts(normalize=True)
    np.testing.assert_allclose(shares.sort_index(), [0.3, 0.4, 0.3], atol=0.01)


@pytest.mark.parametrize("experiment", [1, "noisy"])
def test_profiles_of_an_experiment_are_those_of_what_is_drawn(experiment):
    data = datasets.make_cluster_experiment(experiment, 40_000, seed=3, noise=1.0)
    error = (drawn_profiles(data) - data.profiles).abs()
    assert error.to_numpy().max() < 0.06  # means have standard errors up to .02
    assert error.xs("mild", level="category").to_numpy().max() < 0.02
    reported = data.profiles.loc[data.columns.index[~data.columns["informative"]]]
    assert (np.ptp(reported.to_numpy(), axis=1) < 1e-12).all()


def test_how_hard_the_noisy_experiment_is():
    """k-means reaches .87 on the true columns where the design was made, .72 on all of them."""
    found = []
    for seed in range(6):
        data = datasets.make_cluster_experiment("noisy", seed=seed)
        X = values(data)
        Z = (X - X.mean()) / X.std()
        true = Z.loc[:, data.columns["informative"].to_numpy()]
        kmeans = KMeans(3, n_init=5, random_state=0)
        found.append([agreement(kmeans.fit_predict(z), data.labels) for z in (true, Z)])
    assert 0.84 < np.mean(found, axis=0)[0] < 0.91
    assert 0.6 < np.mean(found, axis=0)[1] < 0.8


def test_clusters_lie_apart_as_said_and_profiles_are_true():
    data = datasets.make_clusters(40_000, ["continuous", "ordinal"], separation=1.4, seed=4)
    np.testing.assert_allclose(drawn_profiles(data), data.profiles, atol=0.04)
    difference = data.profiles.loc["c1_4", 1] - data.profiles.loc["c1_4", 0]
    assert difference.item() == pytest.approx(1.2 * 1.4)
    X = values(data)[["c1_1", "c1_4"]]
    within = X - X.groupby(data.labels).transform("mean")
    np.testing.assert_allclose(within.cov(), [[1.36, 0.72], [0.72, 2.44]], atol=0.05)
    assert data.labels.mean() == pytest.approx(0.6, abs=0.01)


def test_entities_that_sites_lack():
    kinds = ["continuous", "ordinal"]
    data = datasets.make_clusters(3_000, kinds, missing=0.3, seed=5, informative=[True, False])
    reported = [len(frame) / 3_000 for frame in data.frames.values()]
    np.testing.assert_allclose(reported, 0.7 + 0.09 / 2, atol=0.03)
    assert set().union(*(frame["id"] for frame in data.frames.values())) == set(data.labels.index)
    assert data.modalities["informative"].tolist() == [True, False]
    assert not data.columns.loc["c2_1", "informative"] and data.columns.loc["c2_1", "loaded"]
    complete = datasets.make_clusters(3_000, kinds, seed=5)
    assert all(len(frame) == 3_000 for frame in complete.frames.values())


def test_a_partition_takes_them():
    data = datasets.make_clusters(60, ["continuous", "ordinal"], shares=(0.2, 0.3, 0.5), missing=0.2, seed=6)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    assert list(partition.columns["Client 2"]) == ["c2_1", "c2_2", "c2_3", "c2_4"]
    again = datasets.make_clusters(60, ["continuous", "ordinal"], shares=(0.2, 0.3, 0.5), missing=0.2, seed=6)
    pd.testing.assert_frame_equal(again.frames["Client 1"], data.frames["Client 1"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: datasets.make_cluster_experiment(6), "one of .1, 2, 3, 4, 5, 'noisy'.*received 6"),
        (lambda: datasets.make_cluster_experiment(noise=0), "positive noise"),
        (lambda: datasets.make_clusters(1), "n of at least 2"),
        (lambda: datasets.make_clusters(kinds=["nominal"]), "'continuous' or 'ordinal'"),
        (lambda: datasets.make_clusters(shares=(0.5, 0.6)), "add up to 1"),
        (lambda: datasets.make_clusters(informative=[True]), "informative per site, received 1"),
        (lambda: datasets.make_clusters(missing=1.0), "missing entities"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ModelError, match=message):
        make()
