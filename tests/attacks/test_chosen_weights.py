"""Weights that an analyst chooses: a column of large numbers is no number of people."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import DesignError, MessageError, PolicyError
from fedstat.federation.design.site_rows import RowsRequest

N = 90
RNG = np.random.default_rng(4)
PEOPLE = pd.DataFrame(
    {
        "site": np.repeat(list("ABC"), N // 3),
        "g": np.resize(["a", "b"], N),
        "x": RNG.integers(0, 5, N),
        "y": RNG.integers(0, 2, N),
        "k": RNG.integers(1, 4, N),
        "t": RNG.integers(1, 9, N),
        "income": RNG.integers(20_000, 90_000, N),
    }
)
RARE = PEOPLE.assign(g=PEOPLE["g"].where(PEOPLE.index % 30 > 0, "rare"))
"""Each site has one person of level "rare"."""
ONE_CASE = PEOPLE.assign(y=np.where(PEOPLE.index % 30 == 4, 1, 0))
FEW = PEOPLE[PEOPLE.index % 30 < 4]
POLICIES = {"default": fs.Policy(), "strict": fs.Policy.strict(formulas="any")}
FAMILIES = {
    "FederatedOLS": ("x ~ g", {}),
    "FederatedGLM": ("x ~ g", {"family": sm.families.Poisson()}),
    "GLORE": ("y ~ g", {}),
    "FederatedOrdinal": ("k ~ g", {}),
    "FederatedMultinomial": ("k ~ g", {}),
    "FederatedCox": ("Surv(t, y) ~ g", {}),
    "FedAvg": ("y ~ g", {"family": sm.families.Binomial()}),
}
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")


def fit(family, frame, policy, weights, formula="", **counts):
    partition = fs.ClientPartition.from_frame(
        frame, by="site", policy=POLICIES[policy], min_count=1, **counts
    )
    written, settings = FAMILIES[family]
    more = {"rounds": 2, "batch_size": None} if family == "FedAvg" else {}
    model = getattr(fs, family).from_formula(formula or written, partition, **weights, **settings)
    return model.fit(**more)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_income_as_a_number_of_people_opens_nothing(family, policy):
    for frame in (RARE, FEW):
        texts = []
        for weights in ({}, {"freq_weights": "income"}):
            with pytest.raises(PolicyError) as caught:
                fit(family, frame, policy, weights)
            texts.append(str(caught.value))
        # The same rule refuses, with the same counts of rows.
        assert policy == "strict" or texts[1].startswith(texts[0])


@pytest.mark.parametrize("weights", [{}, {"freq_weights": "income"}], ids=["none", "income"])
@pytest.mark.parametrize("family", ["GLORE", "FedAvg"])
def test_nor_one_case(family, weights):
    with pytest.raises(PolicyError, match="minimum events"):
        fit(family, ONE_CASE, "default", weights, "y ~ x")


def test_nor_trials_of_one_row():
    with pytest.raises(PolicyError, match="minimum count"):
        partition = fs.ClientPartition.from_frame(FEW, by="site", policy=POLICIES["default"])
        binomial = sm.families.Binomial()
        fs.FederatedGLM.from_formula("cbind(income, t) ~ x", partition, family=binomial).fit()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_of_one_person_is_one_person_in_a_table_of_counts(policy):
    # Nearly all rows represent hundreds; the level "rare" is one person at each site.
    table = RARE.assign(n=np.where(RARE["g"] == "rare", 1, 300)).drop(columns="income")
    with pytest.raises(PolicyError):
        fit("GLORE", table, policy, {}, counts="n")
    several = table.assign(n=np.where(table["g"] == "rare", 5, 300))
    assert fit("GLORE", several, policy, {}, counts="n").nobs == several["n"].sum()


def test_no_request_declares_counts():
    request = RowsRequest("y", ("y",), ("x",), ("x",), weights={"freq_weights": "income"})
    with pytest.raises(MessageError):
        RowsRequest.from_json(request.to_json()[:-1] + ', "counts": "income"}')
    with pytest.raises((MessageError, DesignError)):
        RowsRequest("y", ("y",), ("x",), ("x",), weights={"counts": "income"}).check()
