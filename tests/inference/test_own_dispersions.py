"""Equal coefficients where residual variances differ: Welch's test, generalized least squares, size."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from statsmodels.stats.oneway import anova_oneway
from unequal_dispersions import both_tests, size

from fedstat.inference.homogeneity_tests import SiteWelchTerms, welch_test

RNG = np.random.default_rng(3)
SITES = [(RNG.normal(size=(n, 2)), sd * RNG.normal(size=n)) for n, sd in ((30, 1.6), (45, 1.0), (80, 0.7))]


def designs():
    return [np.column_stack([np.ones(len(z)), Z]) for Z, z in SITES]


def part(X, y, beta):
    """Least squares of one site at coefficients that are not its own."""
    rest = len(y) - X.shape[1]
    own = np.linalg.lstsq(X, y)[0]
    phi = ((y - X @ own) ** 2).sum() / rest
    return SiteWelchTerms(X.T @ X @ (own - beta) / phi, X.T @ X / phi, rest)


def test_one_mean_by_site_is_welchs_test():
    groups = [y for _, y in SITES]
    theirs = anova_oneway(groups, use_var="unequal", welch_correction=True)
    ours = welch_test([part(np.ones((len(y), 1)), y, np.zeros(1)) for y in groups])
    assert_allclose([ours.statistic, ours.pvalue], [theirs.statistic, theirs.pvalue], rtol=1e-10)
    assert_allclose([ours.df, ours.df_denom], theirs.df, rtol=1e-10)


def test_the_statistic_is_that_of_generalized_least_squares_at_any_point():
    """Residual sum of squares of the weighted stacked table over that of weighted own fits."""
    X, root = designs(), []
    for x, (_, y) in zip(X, SITES, strict=True):
        own = np.linalg.lstsq(x, y)[0]
        root.append(np.sqrt(((y - x @ own) ** 2).sum() / (len(y) - 3)))
    stacked = np.vstack([x / r for x, r in zip(X, root, strict=True)])
    values = np.concatenate([y / r for (_, y), r in zip(SITES, root, strict=True)])
    rss = np.linalg.lstsq(stacked, values)[1].item() - sum(len(y) - 3 for _, y in SITES)
    found = [
        welch_test([part(x, y, beta) for x, (_, y) in zip(X, SITES, strict=True)])
        for beta in (np.zeros(3), np.array([0.3, -0.2, 0.1]))
    ]
    assert found[0].df == 6
    assert_allclose(found[0], found[1], rtol=1e-9)
    # F is the statistic over what it is on average, a little above its degrees of freedom.
    assert 1.0 < rss / (6 * found[0].statistic) < 1.1


def test_size_where_variances_differ():
    """At 400 runs .05 has standard error .011; one dispersion for all rejects .45."""
    own, one = size((40, 100, 400), runs=400)
    assert own < 0.085
    assert one > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(60, 60, 60), (40, 100, 400), (400, 100, 40)])
def test_size_in_many_runs(rows):
    assert 0.04 < size(rows)[0] < 0.065


def test_power_is_kept_where_variances_are_equal():
    """Both tests reject the same where there is one dispersion, nearly."""
    rng = np.random.default_rng(1)
    pairs = np.array([both_tests(rng, (100, 100, 100), (1.0, 1.0, 1.0)) for _ in range(200)])
    assert np.corrcoef(pairs.T)[0, 1] > 0.98


def test_one_site_has_nothing_to_compare():
    X, (_, y) = designs()[0], SITES[0]
    found = welch_test([part(X, y, np.zeros(3))])
    assert (found.df, found.own_dispersions) == (0, False)
    assert np.isnan(found.pvalue)
