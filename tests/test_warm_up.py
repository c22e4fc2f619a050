"""The kernels of all families are compiled before they are needed."""

from fedstat import warm_up
from fedstat.kernels import copula, partial_likelihood, row_products
from fedstat.models import INSTALLED


def test_every_family_has_a_small_fit():
    without_own_kernels = {"horizontal", "impute", "aft", "treatment"}
    assert set(INSTALLED) - without_own_kernels == set(warm_up.FITS)


def test_only_the_served_families_are_compiled():
    assert list(warm_up.warm_up(["glm", "design", "descriptive"])) == ["glm", "descriptive"]


def test_loops_of_large_fits_are_compiled_by_small_ones():
    copula.FEW, before = 7, copula.FEW
    try:
        with warm_up._loops_of_any_size():
            assert copula.FEW == partial_likelihood.FEW == row_products.FEW == 0
        assert copula.FEW == 7
    finally:
        copula.FEW = before
