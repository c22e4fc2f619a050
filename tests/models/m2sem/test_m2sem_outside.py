"""Variables outside a mixture, at one client: sums by most likely cluster, and what an owner refuses."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import DescriptionError, FedstatError, ModelError
from fedstat.federation.message import Request
from fedstat.models.m2sem.model import M2SEM
from fedstat.models.m2sem.request import FAMILY


@pytest.fixture(scope="module")
def fitted():
    data = fs.datasets.make_clusters(300, separation=2.4, seed=4)
    rng = np.random.default_rng(0)
    n, k = 300, data.labels.to_numpy()
    outside = pd.DataFrame(
        {
            "id": data.labels.index,
            "age": 50.0 + 10.0 * k + 5.0 * rng.standard_normal(n),
            "ward": np.where(rng.random(n) < 0.3 + 0.4 * k, "north", "south"),
            "visits": rng.poisson(1 + k),
            "rare": np.where(np.arange(n) < 2, "seldom", "often"),
        }
    )
    outside.loc[:29, "age"] = np.nan
    columns = list(data.columns.index)
    frames = {**data.frames, "Registry": outside}
    partition = fs.ClientPartition.from_frames(
        frames, on="id", policy=fs.Policy(min_level_count=3, remember="all")
    )
    with pytest.warns(fs.errors.DisclosureWarning):
        result = M2SEM(partition, 2, 1, columns=columns).fit(select=None, n_init=1)
    return data, outside, partition, result


def test_means_of_a_variable_of_another_site(fitted):
    data, outside, _, result = fitted
    found = result.outside("age")
    assert (found.site, found.nobs) == ("Registry", 270)
    larger = int(data.labels.value_counts().index[0])
    true = [50.0 + 10.0 * larger, 50.0 + 10.0 * (1 - larger)]
    assert np.abs(found.estimates["estimate"] - true).max() < 3 * found.estimates["std_error"].max()
    # The formulas of the third step, row by row.
    r, there = result.posterior.to_numpy(), outside["age"].notna().to_numpy()
    modal = np.eye(2)[r.argmax(axis=1)]
    w = (modal @ np.linalg.inv(r.T @ modal / r.sum(axis=0)[:, None]))[there]
    y = outside["age"].to_numpy()[there]
    np.testing.assert_allclose(found.estimates["estimate"], w.T @ y / w.sum(axis=0))
    assert (w < 0).any()


def test_shares_counts_and_what_leaves(fitted):
    *_, result = fitted
    found = result.outside("ward")
    assert found.levels == ("north", "south") and found.pvalue < 1e-3
    assert result.outside("visits").levels == () and result.outside("visits").pvalue < 1e-2
    frame = result.ledger.to_frame()
    sent = frame[frame["step"] == "sum_outside"]
    assert set(sent[sent["sender"] == "Registry"]["kind"]) == {"aggregate", "schema"}
    assert "Registry" in str(found) and "Bolck" in str(found)


def test_small_cells_and_columns_that_are_not_there(fitted):
    *_, result = fitted
    with pytest.raises(FedstatError):
        result.outside("rare")
    with pytest.raises(ModelError, match="which no site has"):
        result.outside("height")
    with pytest.raises(ModelError, match=r"'c1_1' was clustered"):
        result.outside("c1_1")
    with pytest.raises(ModelError, match="received 'age', which no site has"):
        result.outside("age", site="Client 1")


def test_a_cluster_of_few_is_not_summed(fitted):
    """The analyst chooses the clusters: small ones, and those that differ by few entities, are refused."""
    _, _, partition, result = fitted
    model = result._live.model
    site = partition.sites["Registry"]
    text = to_json({"variable": "age", "clusters": 2})

    def request(cluster):
        question = Request("Registry", FAMILY, "sum_outside", {"cluster": cluster}, model._session, text)
        return model.engine.run(_once(question), model._new_ledger())

    alone = np.where(np.arange(300) == 100, 1, 0)
    with pytest.raises(FedstatError):
        request(alone)
    half = np.where(np.arange(300) < 150, 1, 0)
    request(half)
    moved = half.copy()
    moved[200] = 1
    with pytest.raises(FedstatError):
        request(moved)
    assert site.policy.remember == "all"
    with pytest.raises(DescriptionError, match="has no column"):
        absent = to_json({"variable": "salary", "clusters": 2})
        question = Request("Registry", FAMILY, "sum_outside", {"cluster": half}, model._session, absent)
        model.engine.run(_once(question), model._new_ledger())


def _once(question):
    (reply,) = yield [question]
    return reply
