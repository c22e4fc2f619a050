"""No rows stay in memory after a partition, its model and its result are deleted."""

import gc
import os
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedstat as fs


def vertical():
    data = fs.datasets.make_sme(2000, seed=1)
    partition = fs.ClientPartition.from_frames(dict(data.frames), on=data.key)
    return partition, fs.VFEMRegression.from_formula(f"{data.response} ~ .", partition)


def horizontal(n=2000):
    rows = pd.DataFrame(np.random.default_rng(1).normal(size=(n, 4)), columns=list("yabc"))
    partition = fs.ClientPartition.from_frame(rows.assign(site=["A", "B"] * (n // 2)), by="site")
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


@pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not list the pages in use")
def test_six_fits_keep_less_than_one_table():
    """Memory that Python has allocated, and resident memory of the process, after the first fits."""
    n, table = 100_000, 3.2e6

    def fit():
        partition, model = horizontal(n)
        str(model.fit().summary())
        del partition, model
        gc.collect()

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    fit()
    tracemalloc.start()
    try:
        fit()
        allocated, before = tracemalloc.get_traced_memory()[0], resident()
        for _ in range(6):
            fit()
        allocated, kept = tracemalloc.get_traced_memory()[0] - allocated, resident() - before
    finally:
        tracemalloc.stop()
    assert allocated < 0.5 * table
    # The allocator returns pages late: six kept tables would be more.
    assert kept < 5.0 * table
