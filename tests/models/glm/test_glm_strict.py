"""Models over rows under the strict policy: the policy that a site starts with allows models."""

from __future__ import annotations

import numpy as np
import pytest
from pooled import partition
from test_glm_pooled import CASES, FRAME, federated

import fedstat as fs
from fedstat.federation.disclosure.policy import Policy

LINES = {
    "poisson offset term": {"formulas": "any"},  # log(days / 100): a number is written in it
    # No knots are published; and of the outer columns of a spline one of few rows is nearly all.
    "spline": {"formulas": "any", "max_share": 1.0},
    "gaussian inverse": {"max_share": 1.0},  # on the way some rows have most of the weight
    "gamma inverse": {"max_share": 1.0},
    "comparison": {"formulas": "any"},  # 0 is no published level of the count
}
# Rules see the weights and columns of a link, a role or a term: each of these is in one other case.
ALIKE = {
    *("counts probit", "counts cloglog", "loglog", "probit freq", "counts freq", "poisson freq"),
    *("poisson freq exposure", "gaussian freq", "gaussian var", "gamma freq", "inverse gaussian var"),
    *("tweedie freq", "tweedie eql", "negative binomial offset", "negative binomial identity"),
    *("gamma identity", "inverse gaussian log", "site intercepts", "no intercept", "reference", "text"),
    *("log", "interaction of numbers", "uncentered scale", "raw polynomial", "nested transform"),
}


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
@pytest.mark.filterwarnings("ignore::statsmodels.tools.sm_exceptions.DomainWarning")
@pytest.mark.parametrize("case", [case for case in CASES if case not in ALIKE])
def test_a_pooled_model_is_fitted_with_one_line_of_policy_at_most_or_two_for_a_spline(case):
    response, distribution, right, roles = CASES[case]
    names = {"freq": "freq_weights", "var": "var_weights"}
    known = {names.get(role, role): name for role, name in roles.items()}
    strict = Policy.strict(**LINES.get(case, {}))
    model = fs.FederatedGLM.from_formula(
        f"{response} ~ {right}",
        partition(FRAME, policy=strict),
        family=distribution,
        labels=["ward", "region"],
        **known,
    )
    result, loose = model.fit(), federated(case, local=False)
    np.testing.assert_allclose(result.params, loose.params, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(result.bse, loose.bse, rtol=1e-6)
