"""No rows stay in memory after a partition, its model and its result are deleted."""

import gc
import weakref

import numpy as np
import pandas as pd
import pytest

import fedstat as fs


def vertical():
    data = fs.datasets.make_sme(2000, seed=1)
    partition = fs.ClientPartition.from_frames(dict(data.frames), on=data.key)
    return partition, fs.VFEMRegression.from_formula(f"{data.response} ~ .", partition)


def horizontal():
    rows = pd.DataFrame(np.random.default_rng(1).normal(size=(2000, 4)), columns=list("yabc"))
    partition = fs.ClientPartition.from_frame(rows.assign(site=["A", "B"] * 1000), by="site")
    return partition, fs.FederatedOLS.from_formula("y ~ a + b + c", partition)


@pytest.fixture
def no_collector():
    """Without the collector of cycles only what no cycle holds is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
@pytest.mark.parametrize("make", [vertical, horizontal])
def test_sites_and_tables_are_freed_with_the_partition(make, no_collector):
    partition, model = make()
    result = model.fit()
    result.summary()
    held = [weakref.ref(one) for site in partition.sites.values() for one in (site, site.data.table)]
    assert all(one() is not None for one in held)
    del partition, model, result
    assert not any(one() is not None for one in held)
