"""The figures that VFEM must reach on two cores; see README.md here."""

import bench_vfem
import pytest

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return bench_vfem.Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def fit(bench):
    return bench.fit()


def test_seconds_of_a_fit(fit):
    stages = fit["stages"]
    assert all(fit[name]["converged"] for name in bench_vfem.FITS)
    for joint, limit in bench_vfem.FROM_MOMENTS.items():
        assert bench_vfem.median(stages[f"from moments, {joint}"]) < limit
    assert sum(bench_vfem.median(stages[name]) for name in ("partition", "design", "moments")) < 4.0


def test_rounds(fit):
    assert fit["moments"]["rounds"] <= 10
    assert fit["iterative, masked"]["rounds"] <= 80


def test_bytes_are_two_numbers_per_record_and_iteration(fit, bench):
    frames, _ = bench_vfem.read(bench.data(bench_vfem.SME))
    records = sum(map(len, frames.values())) - len(frames["Platform"])
    clear = fit["iterative, in clear"]
    assert clear["bytes"] == pytest.approx(16 * records * clear["iterations"], rel=0.05)


def test_memory(fit):
    assert bench_vfem.highest(fit["stages"]) < 1500


def test_estimates_are_as_far_from_the_truth_as_their_standard_errors_say(fit):
    assert 0.7 < fit["moments"]["rmse"] / fit["moments"]["se"] < 1.4


def test_a_new_process_is_ready_in_time(bench):
    seconds = bench.start()
    assert seconds["empty"] < 15.0
    assert seconds["import"] < 0.5


def test_growth_is_linear(bench):
    answers = bench.growth()
    middle, large = bench_vfem.GROWTH[1:]
    per_entity = {
        n: bench_vfem.median(answer["stages"]["moments"], "cpu") / n for n, answer in answers.items()
    }
    assert per_entity[large] < 1.5 * per_entity[middle]


def test_imputation_is_neither_faster_nor_closer(bench):
    answer = bench.peers()
    vfem = answer["vfem"]
    for peer in ("imputer", "mice"):
        other = answer[peer]
        assert bench_vfem.median(vfem["stages"]["moments"]) < bench_vfem.median(other["stages"][peer])
        assert vfem["rmse"] < other["rmse"]
