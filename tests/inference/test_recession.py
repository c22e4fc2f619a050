"""Steps at a maximum that consist of rounding are no way to infinity."""

import numpy as np
import pytest

from fedstat.inference.recession import STILL, continues

LENGTHS = [1e-6, 1e-6, 4e-7, 5e-7, 3e-7, 3e-7, 3e-7, 3e-7]


@pytest.mark.parametrize(
    ("move", "goes_on"), [(1e-7, False), (0.99 * STILL, False), (STILL, True), (1.0, True)]
)
def test_steps_that_go_nowhere_are_not_suspected(move, goes_on):
    """Found on a path of a model without separation, whose last steps were all of about 1e-7."""
    moves = move * np.array([6.0, 10.0, 3.0, 4.0, 1.0, 1.4, 1.1, 1.0])
    assert continues(moves.tolist(), LENGTHS) == goes_on
    assert not continues(moves[:7].tolist(), LENGTHS[:7])
