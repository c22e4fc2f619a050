"""Louis' information of a mixture of one modality, against numerical second derivatives of its likelihood."""

import numpy as np
import pytest
from modality_cases import MIXED, ascend, categorical, central_hessian, gaussian
from scipy.special import logsumexp, softmax

LOG_W = np.log([0.4, 0.6])
CASES = {
    "continuous": lambda: gaussian(0, n=60, P=3, K=2, Q=1),
    "continuous, two factors, cells missing, covariate": lambda: gaussian(
        1, n=60, P=4, K=2, Q=2, missing=0.2, covariates=1, noise=2.0
    ),
    "ordinal and binary": lambda: categorical(0, n=60, K=2, Q=1, kinds=("ordinal", "binary")),
    "all kinds, cells missing": lambda: categorical(1, n=60, K=2, Q=2, kinds=MIXED[:3], missing=0.2),
    "classes, continuous, cells missing": lambda: gaussian(3, n=60, P=3, K=2, Q=0, missing=0.2),
    "classes, all kinds, cells missing, covariate": lambda: categorical(
        4, n=60, K=2, Q=0, kinds=MIXED[:3], missing=0.1, covariates=1
    ),
    "all kinds, covariate": lambda: categorical(2, n=60, K=2, Q=1, kinds=MIXED[:3], covariates=1),
}


def likelihood(m):
    return logsumexp(m.log_densities() + LOG_W, axis=1).sum()


@pytest.mark.parametrize("case", CASES)
def test_information_is_the_numerical_hessian(case):
    m, r = CASES[case]()
    ascend(m, r, steps=3)
    at = m.state()
    # A point where nothing is special: not the maximum, means not centered.
    at = at * (1.0 + 0.05 * np.random.default_rng(0).standard_normal(len(at)))
    m.restore(at)
    posterior = softmax(m.log_densities() + LOG_W, axis=1)
    a, own = m.scores_by_cluster(posterior)
    mean = np.einsum("ik,ikp->ip", posterior, a)
    apart = a - mean[:, None]
    information = own - np.einsum("ik,ikp,ikq->pq", posterior, apart, apart)

    def value(state):
        m.restore(state)
        return likelihood(m)

    numerical = -central_hessian(value, at, 1e-3)
    free = np.ix_(m.free, m.free)  # means of latent classes are fixed
    assert np.abs(information - numerical)[free].max() < 1e-6 * np.abs(numerical).max()
    h = 1e-6 * np.eye(len(at))
    slopes = [(value(at + e) - value(at - e)) / 2e-6 for e in h]
    assert np.allclose(mean.sum(axis=0)[m.free], np.array(slopes)[m.free], rtol=1e-5, atol=1e-4)
    m.restore(at)


@pytest.mark.parametrize("case", CASES)
def test_slopes_of_profiles_are_central_differences(case):
    m, r = CASES[case]()
    ascend(m, r, steps=3)
    at, found = m.state(), m.profile_slopes()
    for j in range(len(at)):
        h = 1e-5 * (np.arange(len(at)) == j)
        pair = []
        for sign in (1, -1):
            m.restore(at + sign * h)
            pair.append(m.profile().ravel())
        seen = ~np.isnan(pair[0])
        assert np.allclose((pair[0] - pair[1])[seen] / 2e-5, found[seen, j], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", [gaussian, categorical])
def test_parameters_that_were_not_estimated_are_reported(make):
    m, r = make(1)
    m.support[1], m.silent = False, True
    m.improve(r)
    state = m.state()
    assert len(m.free) == len(state) and not state[~m.free].any()
    assert (~m.free).sum() == m.means.size + m.Q * (m.row_columns == 1).sum()
