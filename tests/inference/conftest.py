"""One fit by statsmodels, and the same numbers handed to fedstat."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf

from fedstat.inference.estimate import Estimate
from fedstat.inference.summary import CoefficientBlock
from fedstat.models.results import CoefficientResults, EstimateRecord

FULL = "y ~ x1 + np.log(x2) + C(race) + x1:sex + sex"
RESTRICTED = "y ~ x1 + np.log(x2) + sex"
CLIENTS = {"x1": "Credit Agency", "np.log(x2)": "Credit Agency", "C(race)": "Judicial_Organ"}


@dataclass
class FakeLedger:
    rounds: int = 65
    bytes: int = 1_234_567

    def kinds_by_site(self) -> dict[str, tuple[str, ...]]:
        return {"Credit Agency": ("schema", "aggregate"), "Judicial_Organ": ("schema", "per entity")}

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"round": [1]})


def pooled(formula: str = FULL):
    """statsmodels OLS with normal inference and the covariance of maximum likelihood."""
    rng = np.random.default_rng(7)
    n = 400
    data = pd.DataFrame(
        {
            "x1": rng.normal(size=n),
            "x2": rng.lognormal(size=n),
            "race": rng.choice(["Black", "Other White", "x-1"], n),
            "sex": rng.choice(["female", "male"], n),
        }
    )
    data["y"] = 0.3 * data["x1"] + np.log(data["x2"]) + (data["sex"] == "male") + rng.normal(size=n)
    return smf.ols(formula, data).fit(use_t=False)


def estimate_of(fit, **changes) -> Estimate:
    terms = tuple(re.sub(r"\[T\.[^]]*\]", "", name) for name in fit.params.index)
    numbers = {
        "params": fit.params.to_numpy(),
        "cov": fit.cov_params().to_numpy(),
        "names": tuple(fit.params.index),
        "sites": tuple(CLIENTS.get(term, "" if term == "Intercept" else "Register") for term in terms),
        "terms": terms,
        "response": "y",
        "nobs": int(fit.nobs),
        "df_model": fit.df_model,
        "converged": True,
        "llf": fit.llf,
        "rsquared": fit.rsquared,
        "cov_type": "observed",
        "blocks": (
            CoefficientBlock("Credit Agency", 2, 300, 0.25),
            CoefficientBlock("Judicial_Organ", 2, 400, 0.0),
        ),
    }
    return Estimate(**(numbers | changes))


@pytest.fixture(scope="module")
def reference():
    return pooled()


@pytest.fixture(scope="module")
def result(reference) -> CoefficientResults:
    return CoefficientResults(EstimateRecord(estimate=estimate_of(reference)), FakeLedger())


@pytest.fixture(scope="module")
def make(reference):
    """Results with some of the estimate's fields changed."""
    return lambda **changes: CoefficientResults(
        EstimateRecord(estimate=estimate_of(reference, **changes)), FakeLedger()
    )


@pytest.fixture(scope="module")
def restricted_reference():
    return pooled(RESTRICTED)


@pytest.fixture(scope="module")
def restricted(restricted_reference) -> CoefficientResults:
    return CoefficientResults(EstimateRecord(estimate=estimate_of(restricted_reference)))
