"""The free law is the full information maximum likelihood of R's lavaan, with its standard errors.

``lavaan_fiml.json`` was printed by ``lavaan_fiml.R``, which says how.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from lavaan_table import study
from moments_cases import moments_of

from fedstat.models.vertical.joint_normal.fit import fit_joint_normal
from fedstat.models.vfem.covariance.from_moments import MomentsOptions, estimate_from_moments
from fedstat.models.vfem.iteration.state import fit_by_site
from fedstat.models.vfem.outcome import reported_covariance

LAVAAN = json.loads((Path(__file__).parent / "lavaan_fiml.json").read_text())


def test_estimates_and_standard_errors_are_those_of_lavaan():
    moments = moments_of(study())
    estimate = estimate_from_moments(moments, MomentsOptions("observed", "free", 200))
    fit, covariance = estimate.found, estimate.covariance
    assert LAVAAN["names"] == ["Intercept", *moments.names]
    np.testing.assert_allclose(fit.params, LAVAAN["estimates"], rtol=1e-4)
    errors = np.sqrt(np.diag(reported_covariance(covariance, fit_by_site(fit))))
    np.testing.assert_allclose(errors, LAVAAN["errors"], rtol=1e-4)
    assert fit.s2 == pytest.approx(LAVAAN["variance"], rel=1e-4)


def test_the_likelihood_is_that_of_lavaan():
    table, moments = study().table, moments_of(study())
    fit = fit_joint_normal(moments, np.ones((8, 8), dtype=bool))
    seen = table[[*moments.names, "y"]].notna().sum().to_numpy()
    joint = fit.joint - seen @ np.log(fit.moments.scale)
    assert joint == pytest.approx(LAVAAN["log_likelihood"], abs=1e-5)
