"""The CPU time of small fits, in which bookkeeping must not prevail; see README.md here."""

import bench_glm
import pytest

pytestmark = pytest.mark.benchmark

LIMITS = {"default": 0.15, "strict": 0.17}
"""CPU seconds of formula, fit and summary on a core that is not shared, with a third of them to spare."""


@pytest.mark.parametrize("rules", LIMITS)
def test_cpu_seconds_of_a_small_fit(rules):
    assert bench_glm.small_fits(rules) < LIMITS[rules]
