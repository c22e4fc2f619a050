"""Rows of one person from sums over clusters of rows, such as the visits of patients.

The coordinator chooses the working correlation rho. The exchangeable one gives a cluster of n rows the weight
rho / (1 + (n - 1) rho), so that sums at several rho are linear equations in the sums over clusters of each
size: a patient who alone has seven visits is a class of one.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DescriptionError, MessageError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.models.gee.protocol import GEEScoring

pytestmark = pytest.mark.filterwarnings("ignore")
ONE, VISITS, OTHERS = 17, 7, 4
RHOS = (0.0, 0.2, 0.5)


def table(patients=60, one=VISITS):
    """Patients of three sites with four visits each, and one with more."""
    rng = np.random.default_rng(2)
    sizes = np.where(np.arange(patients) == ONE, one, OTHERS)
    patient = np.repeat(np.arange(patients), sizes)
    n = len(patient)
    frame = pd.DataFrame(
        {
            "patient": patient,
            "visit": np.concatenate([np.arange(size) for size in sizes]),
            "site": np.array(["S0", "S1", "S2"])[patient % 3],
            "age": rng.integers(20, 90, n).astype(float),
            "y": rng.normal(100, 15, n).round(1),
        }
    )
    return frame.assign(
        backwards=-frame["visit"], swapped=np.where(frame["visit"] < 2, 1 - frame["visit"], frame["visit"])
    )


def model_of(frame, policy, **settings):
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    settings = {"groups": "patient", "cov_struct": "exchangeable"} | settings
    return fs.FederatedGEE.from_formula("y ~ age", partition, **settings)


def run(model, protocol):
    """Run a protocol of one's own with a model's session."""
    session = model._open_session("gee", False)
    return model.engine.run(protocol(GEEScoring(session, model._request, model.distribution)), Ledger())


def sums_at_correlations(model, site):
    """Information of a site in the units of the data, at several correlations: (rhos, p, p)."""

    def protocol(scoring):
        yield from scoring.open(local=False)
        back = np.linalg.inv(scoring.coordinates.back)
        found = []
        for rho in RHOS:
            replies = yield scoring.session.request_all("sum_scores", scoring.point(np.zeros(2), rho))
            found.append(back.T @ replies[site].arrays["information"] @ back)
        return np.array(found)

    return run(model, protocol)


def test_a_patient_with_a_number_of_visits_of_its_own_is_not_read():
    frame, site = table(), ONE % 3
    found = (
        sums_at_correlations(model_of(frame, fs.Policy(min_level_count=0)), site)
        * (1.0 - np.array(RHOS))[:, None, None]
    )
    # Unknown are the sum over rows, and those over clusters of four and of seven rows.
    weights = np.array([[1.0, *(-rho / (1.0 + (n - 1.0) * rho) for n in (OTHERS, VISITS))] for rho in RHOS])
    _, _, alone = np.linalg.solve(weights, found.reshape(len(RHOS), -1)).reshape(-1, 2, 2)
    # A cluster of one class: the outer product of its sums of columns.
    assert_allclose(alone[0, 1] / VISITS, frame.loc[frame["patient"] == ONE, "age"].sum(), rtol=1e-6)
    with pytest.raises(PolicyError, match="with the same number of rows"):
        model_of(frame, fs.Policy()).fit()
    with pytest.raises(PolicyError, match="a reason that depends on rows"):
        model_of(frame, "strict").fit()
    # Without a working correlation the classes are not separated; neither are they by AR(1).
    for structure, time in (("independence", None), ("ar1", "visit")):
        at = model_of(frame, "strict", cov_struct=structure, time=time)
        assert at.fit(local=False).clusters == 60


@pytest.mark.parametrize(("clusters", "passes"), [(2, False), (4, False), (5, True)])
def test_a_site_with_few_patients_refuses(clusters, passes):
    frame = table(one=OTHERS)
    kept = (frame["site"] != "S1") | (frame["patient"] // 3 < clusters)
    policy = fs.Policy(max_parameters=0.5)
    model = model_of(frame[kept], policy, cov_struct="independence")
    assert policy.min_count == fs.Policy.strict().min_count == 5
    if passes:
        assert model.fit(local=False).clusters == 40 + clusters
    else:
        with pytest.raises(PolicyError, match=r"S1: .* at least 5 clusters by 'patient'"):
            model.fit(local=False)
        with pytest.raises(PolicyError, match="a reason that depends on rows"):
            model_of(frame[kept], "strict", cov_struct="independence").fit(local=False)
    # As a plain regression the same rows are many.
    assert kept[frame["site"] == "S1"].sum() == OTHERS * clusters


def test_the_only_patient_of_a_level_is_not_read_although_it_has_many_rows():
    """With an indicator of one patient, the estimating function is the sum of this patient's residuals."""
    frame = table(one=12).assign(rare=lambda t: (t["patient"] == ONE) * 1.0)
    partition = fs.ClientPartition.from_frame(frame, by="site")
    assert fs.FederatedOLS.from_formula("y ~ age + rare", partition).fit(local=False).converged
    model = fs.FederatedGEE.from_formula("y ~ age + rare", partition, groups="patient")
    with pytest.raises(PolicyError, match="on either side of design column 'rare'"):
        model.fit()


def test_events_of_one_patient_are_not_read():
    frame = table(one=OTHERS)
    frame["ill"] = ((frame["patient"] == ONE) | (frame["site"] != "S2")) & (frame["visit"] < 3) * 1
    frame["ill"] = frame["ill"].astype(int)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=fs.Policy(min_events=3))
    model = fs.FederatedGEE.from_formula(
        "ill ~ age", partition, groups="patient", family=sm.families.Binomial()
    )
    with pytest.raises(PolicyError, match=r"S2: .*minimum events"):
        model.fit()


def test_two_orders_of_the_visits_are_not_compared():
    """Neighbors in one order less those in another are products of single pairs of rows."""
    partition = fs.ClientPartition.from_frame(table(one=OTHERS), by="site", policy="strict")

    def fit(time, groups="patient"):
        settings = {"groups": groups, "cov_struct": "ar1", "time": time}
        return fs.FederatedGEE.from_formula("y ~ age", partition, **settings).fit(local=False)

    fit("visit")
    fit("visit")
    with pytest.raises(DescriptionError, match="neighbors in another order"):
        fit("swapped")


def test_clusters_of_another_column_are_refused():
    frame = table(one=OTHERS).assign(family=lambda t: t["patient"] // 6)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy="strict")
    fs.FederatedGEE.from_formula("y ~ age", partition, groups="patient").fit(local=False)
    with pytest.raises(DescriptionError, match="other clusters"):
        fs.FederatedGEE.from_formula("y ~ age", partition, groups="family").fit(local=False)
    # A clustered covariance of a GLM has the same products.
    glm = fs.FederatedOLS.from_formula("y ~ age", partition, labels=["family"])
    with pytest.raises(DescriptionError, match="other clusters"):
        glm.fit(cov_type="cluster", cov_kwds={"groups": "family"}, local=False)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"power": np.array(3.0)}, "'power' as one of"),
        ({"inverse": np.eye(2) * 1e6}, "not that of an information"),
        ({"inverse": np.eye(3)}, "shape"),
        ({"rho": np.array(1.5)}, "not defined"),
    ],
)
def test_false_requests_for_products_are_refused(wrong, match):
    def protocol(scoring):
        yield from scoring.open(local=False)
        total = yield from scoring.evaluate(np.zeros(2), 0.0)
        arrays = scoring.point(np.zeros(2), 0.0)
        arrays |= {"inverse": np.linalg.inv(total.information), "power": np.array(1.0)}
        yield scoring.session.request_all("finish", arrays | wrong)

    with pytest.raises(MessageError, match=match):
        run(model_of(table(one=OTHERS), "open"), protocol)


def test_products_are_released_once_in_a_session():
    def protocol(scoring):
        yield from scoring.open(local=False)
        total = yield from scoring.evaluate(np.zeros(2), 0.0)
        for _ in range(2):
            yield from scoring.finish(np.zeros(2), 0.0, total, "robust")
            yield from scoring.evaluate(np.ones(2), 0.0)

    with pytest.raises(PolicyError, match="must follow"):
        run(model_of(table(one=OTHERS), fs.Policy(order="declared")), protocol)


def test_an_invalid_correlation_reveals_nothing():
    def protocol(scoring):
        yield from scoring.open(local=False)
        return (yield scoring.session.request_all("sum_scores", scoring.point(np.zeros(2), 1.0)))

    for reply in run(model_of(table(one=OTHERS), "open"), protocol):
        assert not reply.arrays["inside"]
        assert all(not array.any() for name, array in reply.arrays.items() if name != "spread")
