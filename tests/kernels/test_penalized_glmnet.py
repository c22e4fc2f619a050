"""Penalized GLMs against numbers of glmnet 4.1-6 (R 4.2.2).

`data` was written for R by ``tofile``, the columns as ``np.ascontiguousarray(X.T)``; the coefficients, the
intercept first, were made by

    read <- function(name, n) readBin(name, "double", n = n)
    X <- matrix(read("X", 360), 60, 6)
    lambdas <- list(binomial = c(0.2, 0.05, 0.01), gaussian = c(2, 0.5, 0.1))
    for (family in names(lambdas)) for (alpha in c(1, 0.5)) {
      path <- glmnet(X, read(family, 60), family = family, alpha = alpha, lambda = lambdas[[family]],
                     standardize = FALSE, thresh = 1e-20)
      print(t(as.matrix(coef(path))), digits = 12)
    }
"""

import numpy as np
import pytest
from pooled_path import glm_path

from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.coordinate_descent import gram_path
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

LAMBDAS = {"binomial": np.array([0.2, 0.05, 0.01]), "gaussian": np.array([2.0, 0.5, 0.1])}
FAMILIES = {
    "binomial": DistributionSpec("Binomial", "Logit"),
    "gaussian": DistributionSpec("Gaussian", "Identity"),
}
PENALTIES = {1.0: Penalty("lasso"), 0.5: Penalty("elastic_net", l1_ratio=0.5)}

GLMNET = {
    ("binomial", 1.0): [
        [-0.137465242181, 0.152879394029, 0.0, 0.0, 0.0, 0.0, 0.0],
        [-0.400224046998, 0.938596323716, 0.0, 0.0975005104529, 0.0, 0.427524193452, 0.0],
        [
            -0.480942099617,
            1.42362631741,
            -0.144857997767,
            0.169717506256,
            -0.0720898006367,
            0.649930680063,
            -0.0788909192783,
        ],
    ],
    ("binomial", 0.5): [
        [-0.239699630346, 0.406643044351, 0.0, 0.0296015811724, 0.0, 0.17134986015, 0.0],
        [-0.419417925203, 0.966729491819, 0.0, 0.130612802718, 0.0, 0.472394859137, 0.0],
        [
            -0.381397243134,
            1.40801951386,
            -0.233631389534,
            0.178231987957,
            -0.0779942667879,
            0.654314762706,
            -0.119154675738,
        ],
    ],
    ("gaussian", 1.0): [
        [-1.92405592356, 1.58762319385, 0.0, 0.454612040334, 0.0287169928428, 0.0, 0.0],
        [-2.13336340828, 2.87164779759, 0.0, 0.869313944541, 0.126670931032, 0.794859184173, 0.0],
        [-1.2982697982, 3.10110428448, -0.881828357886, 0.988688290959, 0.195330942948, 1.02521955003, 0.0],
    ],
    ("gaussian", 0.5): [
        [-1.4760539955, 1.77178285533, 0.0, 0.709609775739, 0.39027224062, 0.493913262832, 0.0],
        [-1.52790597385, 2.7520834706, -0.376369819198, 0.937506518268, 0.298058634667, 0.939671502496, 0.0],
        [-1.10395111452, 3.06210645059, -1.02255431432, 1.00291745095, 0.235882697009, 1.0535887618, 0.0],
    ],
}


def data():
    """Columns (60, 6) of unequal means and variances, and the responses of both families (60,)."""
    draw = np.random.default_rng(2010)
    X = draw.normal(size=(60, 6)) * [1.0, 0.5, 2.0, 1.0, 1.5, 1.0] + [0.0, 1.0, 0.0, -2.0, 0.0, 0.5]
    X[:, 3] += X[:, 0]
    eta = X @ [1.0, -0.8, 0.3, 0.0, 0.4, 0.0]
    gaussian = 3.0 * (eta + draw.normal(size=60))
    binomial = (draw.random(60) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    return X, {"gaussian": gaussian, "binomial": binomial}


def unit_of(family, y):
    """The unit in which glmnet penalizes: a response that is normal it divides by its standard deviation.

    Of the lasso the minimum is the same in every unit of the response if lambda is in that unit as well. The
    ridge part has none: glmnet's elastic net is that of the divided response.
    """
    return y.std() if family == "gaussian" else 1.0


@pytest.mark.parametrize(("family", "alpha"), list(GLMNET))
def test_from_rows_the_path_is_that_of_glmnet(family, alpha):
    X, responses = data()
    y = responses[family]
    unit = unit_of(family, y)
    rows, groups = (
        Rows(np.column_stack([np.ones(60), X]), y / unit),
        CoefficientGroups.single(7, np.r_[0.0, np.ones(6)]),
    )
    lambdas = LAMBDAS[family] / unit
    path = glm_path(rows, FAMILIES[family], PENALTIES[alpha], groups, lambdas=lambdas, tol=1e-12)
    assert path.converged.all()
    np.testing.assert_allclose(unit * path.coefficients, GLMNET[family, alpha], rtol=0, atol=1e-9)


@pytest.mark.parametrize("alpha", list(PENALTIES))
def test_from_sums_the_path_is_that_of_glmnet(alpha):
    X, responses = data()
    y = responses["gaussian"]
    X, y, unit = X - X.mean(axis=0), y - y.mean(), unit_of("gaussian", y)
    G, c = X.T @ X / 60, X.T @ y / (60 * unit)
    groups, lambdas = CoefficientGroups.single(6), LAMBDAS["gaussian"] / unit
    path = gram_path(G, c, PENALTIES[alpha], groups, lambdas=lambdas, tol=1e-13)
    theirs = np.array(GLMNET["gaussian", alpha])[:, 1:]
    np.testing.assert_allclose(unit * path.coefficients, theirs, rtol=0, atol=1e-9)


def test_a_lasso_needs_no_unit():
    X, responses = data()
    y = responses["gaussian"]
    X, y = X - X.mean(axis=0), y - y.mean()
    G, c, lambdas = X.T @ X / 60, X.T @ y / 60, LAMBDAS["gaussian"]
    path = gram_path(G, c, PENALTIES[1.0], CoefficientGroups.single(6), lambdas=lambdas, tol=1e-13)
    theirs = np.array(GLMNET["gaussian", 1.0])[:, 1:]
    np.testing.assert_allclose(path.coefficients, theirs, rtol=0, atol=1e-9)
