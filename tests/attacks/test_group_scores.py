"""Comparisons of groups over several sessions, and labels that sites compare.

Sites compare the outermost groups of a mixed model at one point of a session, but a coordinator may begin
many sessions. An inverse that is a share of the right one moves the leverages of all groups.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import FedstatError, MessageError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.horizontal_steps import LabelRequest, hash_labels
from fedstat.federation.message import Request
from fedstat.models.horizontal.clusters import FAMILY
from fedstat.models.mixed.protocol import MixedNewton

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")


def visits(sites=3, patients=40, far=6.0):
    """Patients with five visits; one of the first site has a column far from that of all others."""
    rng = np.random.default_rng(1)
    n = sites * patients
    g = np.repeat(np.arange(n), 5)
    x = rng.normal(size=n)[g] + 0.3 * rng.normal(size=len(g))
    x[g == 7] += far
    y = 1.0 + 0.5 * x + rng.normal(size=n)[g] + rng.normal(size=len(g))
    site = np.array([f"S{k // patients}" for k in g])
    return pd.DataFrame({"site": site, "patient": g + 1000, "x": x, "y": y, "z": rng.normal(size=len(g))})


def model_of(table, policy="strict", formula="y ~ x + (1 | patient)"):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    return fs.FederatedMixed.from_formula(formula, partition)


def compare(model, shares, masked=True, **changed):
    """Request comparisons in sessions of their own, at shares of the right inverse; return sums by share."""
    fit, found = model.fit()._record.fit, []
    for share in shares:
        session = replace(model._open_session("mixed", masked), session=f"chosen {share} {sorted(changed)}")
        newton = MixedNewton(session, model.formula.random, model.distribution)

        def protocol(newton=newton, share=share):
            yield from newton.reopen(fit)
            newton.center = np.linalg.solve(newton.translation, fit.params)
            inverse = share * fit.by_group.inverse
            arrays = newton.point(np.concatenate([np.zeros(len(fit.params)), fit.theta]))
            arrays |= {"center": newton.center, "dispersion": np.array(fit.scale)} | changed
            return (yield from newton.compare_groups(arrays, inverse, inverse))

        found.append(model.engine.run(session.hide(protocol()), Ledger()))
    return fit, found


def rest_and_pole(q, shares, values):
    """Fit a polynomial and one group's part u^2 / (1 - share q); return the misfit and u^2."""
    B = np.column_stack([*(shares**k for k in range(4)), 1.0 / (1.0 - shares * q)])
    solved = np.linalg.lstsq(B, values, rcond=None)[0]
    return float(np.linalg.norm(B @ solved - values)), solved[-1]


def test_chosen_inverses_reveal_the_squared_score_of_a_patient_far_from_all_others():
    """Corrected products u^2 / (1 - share q) differ between groups by their leverage q alone."""
    table, shares = visits(), np.linspace(0.05, 1.6, 9)
    fit, found = compare(model_of(table), shares)
    values = np.array([one.meat[1, 1] for one in found])
    grid = np.linspace(0.1, 0.5, 400)
    q = grid[np.argmin([rest_and_pole(q, shares, values)[0] for q in grid])]
    # What the coordinator does not have: the rows of the patient.
    own = table[table["patient"] == 1007]
    X = np.column_stack([np.ones(5), (own["x"] - fit.design.mean[1]) / fit.design.spread[1]])
    V = np.eye(5) + fit.covariance[0] / fit.scale
    residual = own["y"] - np.column_stack([np.ones(5), own["x"]]) @ fit.params
    score, information = X.T @ np.linalg.solve(V, residual), X.T @ np.linalg.solve(V, X)
    assert q == pytest.approx(np.linalg.eigvals(fit.by_group.inverse @ information).max(), rel=0.01)
    assert rest_and_pole(q, shares, values)[1] == pytest.approx(score[1] ** 2, rel=0.02)


def test_nearer_poles_and_inverses_of_no_information_are_refused():
    with pytest.raises(PolicyError):
        compare(model_of(visits()), [2.5])
    with pytest.raises(MessageError, match="not that of an information of which this site's is a part"):
        compare(model_of(visits(), replace(fs.Policy(), masked_only=False)), [6.0], masked=False)
    for changed in ({"variances": np.eye(3)}, {"variances": -np.eye(2)}, {"variances": 9.0 * np.eye(2)}):
        with pytest.raises(FedstatError):
            compare(model_of(visits()), [1.0], **changed)


@pytest.mark.parametrize("left_out", [1, 4])
def test_comparisons_without_few_visits_or_with_fewer_terms_are_no_difference(left_out):
    """A second session lacks some rows of a patient, or a term: rows are refused, terms single out no one."""
    table = visits()
    own = (table["patient"] == 1007) & (table.groupby("patient").cumcount() < left_out)
    table["kept"] = np.where(own, np.nan, 1.0)
    policy = fs.Policy.strict(small_differences="refuse")
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    make = fs.FederatedMixed.from_formula
    make("y ~ x + z + (1 | patient)", partition).fit()
    assert make("y ~ x + (1 | patient)", partition).fit().converged
    with pytest.raises(PolicyError):
        make("y ~ x + (1 | patient)", partition, complete=["kept"]).fit()


# -- labels --------------------------------------------------------------------------------------------


def counts_of(model, buckets=2**13):
    """Request the labels by bucket, as the coordinator does; return their sums over all sites."""
    session = model._open_session("mixed", True)
    text = to_json(LabelRequest(("patient",), buckets))

    def protocol():
        yield session.opening()
        replies = yield [
            Request(site, FAMILY, "count_labels", {}, session.session, text) for site in session.sites
        ]
        return [reply.arrays["labels"] for reply in replies]

    return np.sum(model.engine.run(session.hide(protocol()), Ledger()), axis=0)


def test_a_site_that_colludes_with_the_coordinator_learns_whether_a_label_is_at_another_site():
    """It has the key of the hashes; without it labels that exist are like labels that do not."""
    table = visits()
    model = model_of(table)
    counts = counts_of(model)
    data = model.partition.sites["S0"]._data

    def occurs(labels, key, less):
        place = hash_labels([("patient", int(label)) for label in labels], key) % len(counts)
        return (counts - less)[place] > 0.0

    everyone = [np.unique(table.loc[table["site"] == site, "patient"]) for site in ("S0", "S1", "S2")]
    own = np.bincount(
        hash_labels([("patient", int(label)) for label in everyone[0]], data.common_seed) % len(counts),
        minlength=len(counts),
    )
    others, nobody = np.concatenate(everyone[1:]), np.arange(5000, 5400)
    assert occurs(others, data.common_seed, own).all()
    assert occurs(nobody, data.common_seed, own).mean() < 0.05
    # Which of the two other sites has it is not known: the sum is masked. The coordinator has no key.
    wrong = [occurs(labels, 12345, 0.0).mean() for labels in (others, nobody)]
    assert max(wrong) < 0.08 and counts.sum() == 120.0


def test_labels_of_columns_that_no_model_opened_are_not_counted():
    with pytest.raises(FedstatError):
        model = model_of(visits(), fs.Policy(), "y ~ x + (1 | patient)")
        session = model._open_session("mixed", False)
        text = to_json(LabelRequest(("z",), 64))

        def protocol():
            yield session.opening()
            yield [Request(site, FAMILY, "count_labels", {}, session.session, text) for site in session.sites]

        model.engine.run(protocol(), Ledger())
