"""The kernels of all families are compiled before they are needed."""

from fedstat import warm_up
from fedstat.models import INSTALLED


def test_every_family_has_a_small_fit():
    without_own_kernels = {"horizontal", "impute"}
    assert set(INSTALLED) - without_own_kernels == set(warm_up.FITS)


def test_only_the_served_families_are_compiled():
    assert list(warm_up.warm_up(["glm", "design", "descriptive"])) == ["glm", "descriptive"]
