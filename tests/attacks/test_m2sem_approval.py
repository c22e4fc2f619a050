"""Owners who consent to every analysis see those of clusters: fits, searches, and what results ask for."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import ConsentError
from fedstat.federation.disclosure.approval import describe_plan

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
OWNER = fs.Policy.strict(per_entity="any", approval="owner")
QUICK = {"n_init": 1, "starts": "sum"}
N = 120


def partition_of(policy=OWNER, sites="ABC", n=N):
    rng = np.random.default_rng(0)
    k = rng.integers(2, size=n)
    frames = {}
    for site in sites:
        X = 2.5 * k[:, None] + rng.standard_normal((n, 1)) + 0.7 * rng.standard_normal((n, 3))
        frame = pd.DataFrame(X, columns=[f"{site.lower()}{p}" for p in range(3)])
        frames[site] = frame.assign(id=range(n))
    ward = np.where(rng.random(n) < 0.5, "north", "south")
    frames["A"] = frames["A"].assign(age=rng.normal(50.0, 9.0, n), ward=ward)
    return fs.ClientPartition.from_frames(frames, on="id", policy=policy)


COLUMNS = [f"{site}{p}" for site in "abc" for p in range(3)]


def approved(request, partition, wanted):
    """Ask what waits, read it at one site, consent at all, and ask again."""
    with pytest.raises(ConsentError, match="pending"):
        request()
    (plan,) = partition.sites["A"].pending.values()
    text = " ".join(describe_plan(plan))
    assert all(word in text for word in wanted), text
    for site in partition.sites.values():
        for digest in list(site.pending):
            site.approve(digest)
    found = request()
    with pytest.raises(ConsentError, match="pending"):
        request()  # a consent serves once
    for site in partition.sites.values():
        for digest in list(site.pending):
            site.deny(digest)
    return found


def test_a_fit_is_consented_to_and_gives_the_same_numbers():
    partition = partition_of()
    model = fs.M2SEM(partition, 2, 1, columns=COLUMNS, adjust={"A": "~ age"})
    wanted = [
        "M2SEM.fit(",
        "of 'A' for age are adjusted",
        "effects of covariates",
        "a0, a1, a2, age",
        "factor models",
    ]
    found = approved(lambda: model.fit(select="bic", **QUICK), partition, wanted)
    plain = fs.M2SEM(
        partition_of(replace(OWNER, approval="auto")), 2, 1, columns=COLUMNS, adjust={"A": "~ age"}
    )
    assert found.llf == plain.fit(select="bic", **QUICK).llf


def test_a_search_has_a_plan_of_its_own():
    partition = partition_of()

    def search():
        return fs.M2SEM.search(partition, (1, 2), (1,), columns=COLUMNS, n_init=1)

    assert approved(search, partition, ["M2SEM.search(sizes=[(1, 1), (2, 1)]", "per entity"]).best == (2, 1)


def test_what_results_ask_for_has_plans_of_its_own():
    partition = partition_of(replace(OWNER, order="any"))
    model = fs.M2SEM(partition, 2, 1, columns=COLUMNS, adjust={"A": "~ age"})
    result = approved(lambda: model.fit(select=None, cov_type=None, **QUICK), partition, ["M2SEM.fit("])
    scores = approved(lambda: result.factor_scores("A"), partition, ["factor_scores('A')", "120 numbers"])
    assert len(scores) == N and not any(partition.sites[name].pending for name in "BC")
    found = approved(
        lambda: result.outside("ward"), partition, ["outside('ward')", "Columns of A that it uses: ward, a0"]
    )
    assert found.levels == ("north", "south")
    predicted = approved(
        lambda: result.predict(partition), partition, ["predict(120 entities)", "only in a masked sum"]
    )
    np.testing.assert_allclose(predicted, result.posterior, atol=2e-3)
