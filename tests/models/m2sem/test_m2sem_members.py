"""Means of clusters' members next to the model's, counts of starts, and skewed columns."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from cluster_cases import QUICK, make_frames, partition_of

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.models.m2sem.model import M2SEM
from fedstat.models.m2sem.results import M2SEMResults


def kinds_of(fit):
    return [note.kind for note in fit._summary_notes()]


@pytest.fixture(scope="module")
def mixed():
    frames, _ = make_frames(n=240, apart=4.0, seed=3)
    rng = np.random.default_rng(1)
    for name, frame in frames.items():
        frame["kind"] = pd.Categorical(rng.choice(["low", "high"], len(frame)))
        frame["rare"] = pd.Categorical(np.where(np.arange(len(frame)) < 3, "seldom", "often"))
        frames[name] = frame.rename(columns={"kind": f"kind{name}", "rare": f"rare{name}"})
    frames["A"].loc[5:40, "a1"] = np.nan
    partition = partition_of(frames, policy=fs.Policy(min_level_count=4, discrete="any"))
    columns = [c for f in frames.values() for c in f.columns if c != "id" and not c.startswith("rare")]
    return frames, M2SEM(partition, 2, 1, columns=columns).fit(**QUICK)


def test_members_are_those_of_the_pooled_table(mixed):
    frames, fit = mixed
    members, labels = fit.members(), fit.labels
    assert members.index.equals(fit.profiles().index) and not members.isna().to_numpy().any()
    for name, frame in frames.items():
        table = frame.set_index("id").loc[labels.index]
        table[f"kind{name}"] = (table[f"kind{name}"] == "high").astype(float)
        pooled = table.drop(columns=f"rare{name}").groupby(labels).mean().T
        for column, means in pooled.iterrows():
            own = members.xs((name, column), level=("site", "column"))
            row = own.xs("high", level="level") if column.startswith("kind") else own
            np.testing.assert_allclose(row.to_numpy()[0], means.to_numpy())


def test_fit_index_is_the_distance_from_the_model(mixed):
    frames, fit = mixed
    numbers = [key for key in fit.profiles().index if not key[3]]
    spread = [frames[site][column].std(ddof=0) for site, _, column, _ in numbers]
    away = (fit.members() - fit.profiles()).loc[numbers].to_numpy() / np.array(spread)[:, None]
    shares = fit.sizes["share"].to_numpy()
    assert fit.mean_residual == pytest.approx(np.sqrt(np.mean(away**2 @ shares)))
    text = str(fit.summary())
    assert "Mean residual" in text and "chi2 (df)" in text and "members" in text


def test_a_column_with_a_small_cell_is_left_out_as_a_whole():
    frames, _ = make_frames(n=200, apart=4.0, seed=3)
    frames["A"]["rare"] = pd.Categorical(np.where(np.arange(200) % 12 == 0, "seldom", "often"))
    # A level has 17 rows, but fewer than 12 of them in one cluster.
    partition = partition_of(frames, policy=fs.Policy(min_level_count=12, discrete="any"))
    fit = M2SEM(partition, 2, 1).fit(cov_type=None, **QUICK)
    hidden = fit.members().isna().all(axis=1)
    assert hidden[hidden].index.get_level_values("column").unique().tolist() == ["rare"]
    assert not fit.members()[~hidden].isna().to_numpy().any()


def test_one_outlier_is_not_shown_by_the_mean_of_its_cluster():
    frames, _ = make_frames(n=200, apart=4.0, seed=3)
    frames["A"].loc[7, "a0"] = 1e6
    partition = partition_of(frames, policy=fs.Policy(max_share=0.9))
    fit = M2SEM(partition, 2, 1).fit(cov_type=None, **QUICK)
    hidden = fit.members().isna().all(axis=1)
    assert hidden[hidden].index.get_level_values("column").tolist() == ["a0"]


def test_a_poor_model_of_the_means_is_reported(mixed):
    _, fit = mixed
    assert "mean_residual" not in kinds_of(fit)
    record = fit._record
    held = record.sites["B"]
    shifted = held.members.copy()
    shifted[1, 0] = held.profiles[1, 0] + 0.5 * held.units[4]  # half a deviation of the first column
    wrong = replace(record, sites={**record.sites, "B": replace(held, members=shifted)})
    (note,) = [note for note in M2SEMResults(wrong)._summary_notes() if note.kind == "mean_residual"]
    assert "means of cluster 2: for 'b0' at 'B'" in str(note) and "(0.50 standard deviations)" in str(note)


def test_starts_are_counted():
    frames, _ = make_frames(n=200, apart=5.0, seed=2)
    fit = M2SEM(partition_of(frames), 2, 1).fit(select=None, cov_type=None, n_init=2)
    reached, tried = fit._record.starts
    assert tried == 5 and 1 <= reached <= 5  # two by k-means, one of each site
    assert f"{reached} of 5" in str(fit.summary())


def test_search_warns_where_skewness_makes_clusters():
    columns = {name: [f"{name}{p}" for p in range(3)] for name in "ABC"}
    names, chosen = [c for own in columns.values() for c in own], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        logs = np.repeat(rng.standard_normal((400, 3)), 3, axis=1) + 0.5 * rng.standard_normal((400, 9))
        table = pd.DataFrame(np.exp(logs), columns=names)
        searched = [
            M2SEM.search(fs.ClientPartition.from_frame(one, columns=columns), [1, 2], [1], n_init=1)
            for one in (table, np.log(table))
        ]
        chosen.append([found.best[0] for found in searched])
        assert searched[1].skewed == () and len(searched[0].skewed) == 9
        for found in searched:
            warned = [note for note in found._summary_notes() if note.kind == "skewed"]
            assert len(warned) == (found.skewed != () and found.best[0] > 1)
    # BIC counts clusters in skewed columns, where there are none, and not in their logarithms.
    assert np.max(chosen, axis=0).tolist() == [2, 1]


def test_clusters_of_normal_columns_are_not_called_skewed():
    frames, _ = make_frames(n=400, apart=3.0, seed=5)
    assert M2SEM.search(partition_of(frames), [1, 2], [1], n_init=1).skewed == ()


def test_number_of_clusters_against_one_fewer():
    frames, _ = make_frames(n=120, apart=4.0, seed=2)
    partition = partition_of(frames)
    one, two, three = (M2SEM(partition, K, 1).fit(cov_type=None, maxiter=500, **QUICK) for K in (1, 2, 3))
    rounds = one.ledger.rounds
    found = two.test_against(one, samples=9, n_init=1)
    assert found.pvalue == 0.1 and found.statistic == pytest.approx(2 * (two.llf - one.llf))
    assert three.test_against(two, samples=9, n_init=1).pvalue > 0.1
    assert one.ledger.rounds == rounds
    with pytest.raises(ModelError, match="expected a fit of 2 clusters, received one of 1"):
        three.test_against(one)


@pytest.mark.slow
def test_the_test_of_the_number_keeps_its_level_without_clusters():
    """P-values of tables of one cluster are spread over (0, 1)."""
    p = []
    for seed in range(14):
        frames, _ = make_frames(n=120, K=1, seed=seed)
        partition = partition_of(frames)
        one, two = (M2SEM(partition, K, 1).fit(cov_type=None, **QUICK) for K in (1, 2))
        p.append(two.test_against(one, samples=9).pvalue)
    assert 0.35 < np.mean(p) < 0.75 and np.mean(np.array(p) <= 0.1) < 0.3, p
