"""Irrelevant changes: order of sites and rows, units, threads, engines, repetition."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from oracle import ITERATIVE, Study, packed, simulate

import fedstat as fs
from fedstat.federation.message import pack_request, unpack_reply
from fedstat.models.vfem.base_model import make_layout
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.models.vfem.iteration.state import IterationOptions

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-12}
SMALL = ITERATIVE | {"cross_products": "sketch", "sketch_size": 1_000}


@pytest.fixture(scope="module")
def study():
    return simulate(seed=9, n=400, holder="Bank")


@pytest.fixture(scope="module")
def reference(study):
    return study.model().fit(**packed(cross_products="exact", **TIGHT))


def fit_frames(frames, **options):
    partition = fs.ClientPartition.from_frames(frames, on="id", shared_seed=7)
    return fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(
        **packed(**(TIGHT | SMALL | options))
    )


def same_bits(one, other):
    for what in ("params", "bse"):
        a, b = getattr(one, what), getattr(other, what)
        assert list(a.index) == list(b.index)
        assert a.to_numpy().tobytes() == b.to_numpy().tobytes(), what
    assert (one.llf, one.scale) == (other.llf, other.scale)
    return True


def test_order_of_sites_does_not_matter(study, reference):
    order = ("Court", "Tax", "Bank")
    frames = study.frames()
    result = fit_frames({site: frames[site] for site in order}, cross_products="exact")
    assert list(result.params.index) != list(reference.params.index)
    names = reference.params.index
    np.testing.assert_allclose(result.params[names], reference.params, rtol=1e-10)
    np.testing.assert_allclose(result.bse[names], reference.bse, rtol=1e-10)
    assert result.llf == pytest.approx(reference.llf, rel=1e-12)


def test_order_of_rows_does_not_matter(study):
    frames = study.frames()
    shuffled = {k: f.sample(frac=1.0, random_state=i) for i, (k, f) in enumerate(frames.items())}
    assert same_bits(fit_frames(frames), fit_frames(shuffled))


def test_units_do_not_matter(study, reference):
    """Shifted and rescaled columns give the coefficients in the new units, in as many iterations."""
    scale = pd.Series({"court1": 1e6, "tax0": 1e-4, "bank1": -3.0})
    table = study.table.copy()
    table[scale.index] = table[scale.index] * scale + 50.0
    result = Study(table, study.columns, study.holder).model().fit(**packed(cross_products="exact", **TIGHT))
    back = scale.reindex(reference.params.index, fill_value=1.0).drop("Intercept")
    np.testing.assert_allclose(result.params[1:] * back, reference.params[1:], rtol=1e-7)
    np.testing.assert_allclose(result.bse[1:] * back.abs(), reference.bse[1:], rtol=1e-7)
    assert result.llf == pytest.approx(reference.llf, rel=1e-10)
    assert abs(len(result.trace) - len(reference.trace)) <= 3


def test_units_of_the_response_do_not_matter(study, reference):
    table = study.table.assign(y=1e5 * study.table["y"] - 7.0)
    result = Study(table, study.columns, study.holder).model().fit(**packed(cross_products="exact", **TIGHT))
    np.testing.assert_allclose(result.params[1:] / 1e5, reference.params[1:], rtol=1e-8)
    np.testing.assert_allclose(result.bse / 1e5, reference.bse, rtol=1e-8)
    assert result.rsquared == pytest.approx(reference.rsquared, rel=1e-9)


def test_a_second_fit_is_the_first_to_the_bit(study):
    model = study.model()
    first = model.fit(**packed(cov_type="robust", **SMALL))
    assert same_bits(first, model.fit(**packed(cov_type="robust", **SMALL)))
    model.fit(**packed(method="cc", init="impute", memory=3, **SMALL))
    assert same_bits(first, model.fit(**packed(cov_type="robust", **SMALL)))
    assert same_bits(first, study.model().fit(**packed(cov_type="robust", **SMALL)))


def test_two_models_on_one_partition_do_not_disturb_each_other(study):
    partition = study.partition()
    wide = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent")
    narrow = fs.VFEMRegression.from_formula("y ~ bank0 + court2", partition, between="independent")
    first = wide.fit(**packed(**SMALL))
    narrow.fit(**packed(**SMALL))
    assert same_bits(first, wide.fit(**packed(**SMALL)))


def test_the_shared_seed_matters_to_sketches_alone(study):
    one, other = (
        fs.VFEMRegression.from_formula("y ~ .", study.partition(shared_seed=seed), between="independent").fit(
            **packed(**SMALL)
        )
        for seed in (1, 2)
    )
    assert one.params.to_numpy().tobytes() == other.params.to_numpy().tobytes()
    assert (one.bse != other.bse).any()


def test_where_the_coordinator_sits_does_not_matter(study):
    there = study.model().fit(**packed(**SMALL))
    assert same_bits(there, study.model(coordinator="apart").fit(**packed(**SMALL)))
    assert same_bits(there, study.model(coordinator="Tax").fit(**packed(**SMALL)))


def by_hand(sites, protocol, order=1):
    """Answer a protocol's rounds without an engine; order=-1 asks the last site first."""
    replies, rounds = None, 0
    while True:
        try:
            requests = protocol.send(replies)
        except StopIteration as stop:
            return stop.value, rounds
        rounds += 1
        answers = {}
        for i, request in list(enumerate(requests))[::order]:
            answers[i] = unpack_reply(sites[request.site].answer(pack_request(request)))
        replies = [answers[i] for i in range(len(requests))]


class BackwardsEngine:
    """Another engine: the last site answers first; replies go back in the order of the asks."""

    def __init__(self, sites):
        self.sites = sites

    def run(self, protocol, ledger):
        return by_hand(self.sites, protocol, -1)[0]


def test_engines_agree_to_the_bit(study):
    model = study.model()
    local = model.fit(**packed(cov_type="sem", **SMALL))
    model.engine = BackwardsEngine(model.partition.sites)
    assert same_bits(local, model.fit(**packed(cov_type="sem", **SMALL)))


def test_the_protocol_needs_no_engine(study):
    model = study.model()
    result = model.fit(**packed(cov_type="none", **ITERATIVE))
    layout = make_layout(model.design, "vfem")
    lines = []
    protocol = EMIteration(layout, IterationOptions(), model._session, lines.append).maximize()
    fit, rounds = by_hand(model.partition.sites, protocol)
    assert rounds >= 2 * len(lines)
    assert len(lines) == len(fit.trace) == len(result.trace)
    assert (fit.a, fit.s2, fit.log_likelihood) == (result._fit.a, result._fit.s2, result.llf)
    for site in study.columns:
        assert fit.beta[site].tobytes() == result._fit.beta[site].tobytes()
        assert fit.mu[site].tobytes() == result._fit.mu[site].tobytes()
    assert fit.converged


def test_asks_of_a_protocol_are_arrays_and_names(study):
    model = study.model()
    layout = make_layout(model.design, "vfem")
    requests = next(EMIteration(layout, IterationOptions(), model._session).maximize())
    assert [request.site for request in requests] == ["Bank", "Court", "Tax", "Bank"]
    assert {request.family for request in requests} == {"vfem"}
    assert all(isinstance(array, np.ndarray) for request in requests for array in request.arrays.values())


THREADS = """
import sys
sys.path.insert(0, {folder!r})
from oracle import packed, simulate
model = simulate(seed=10, n=5_000, holder="Registry").model()
options = packed(masked=False, cross_products="sketch", sketch_size=4_000)
result = model.fit(exchange="iterative", cov_type="robust", **options)
print(result.params.to_numpy().tobytes().hex(), *map(float.hex, result.bse))
"""


def with_threads(number):
    """Start a fit in a process of its own."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    script = THREADS.format(folder=str(Path(__file__).parent))
    environment = os.environ | dict.fromkeys(names, str(number))
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )


def printed(process):
    out, _ = process.communicate()
    assert process.returncode == 0
    params, *errors = out.split()
    return params, [float.fromhex(x) for x in errors]


def test_number_of_threads_does_not_matter():
    one, two = map(printed, [with_threads(1), with_threads(2)])
    assert len(one[1]) == 8
    assert one[0] == two[0]
    np.testing.assert_allclose(one[1], two[1], rtol=1e-12)
