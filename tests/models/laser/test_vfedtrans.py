"""Clients that learn a joint representation, each from its own columns, before they predict by themselves."""

import numpy as np
import pytest
from laser_cases import SITES, customers, model

import fedstat as fs
from fedstat.errors import EstimationError, ModelError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.protocols.engine import LocalEngine

QUICK = {"method": "vfedtrans", "epochs": 2, "batch_size": 256, "learning_rate": 0.02}
TABLES = customers(400, missing=0.2)
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


@pytest.fixture(scope="module")
def part():
    return fs.ClientPartition.from_frames(TABLES, on="id", policy=Policy(order="declared"))


@pytest.fixture(scope="module")
def fitted(part):
    """A fit, and all that passed for it."""
    passed, plain = [], LocalEngine._round

    def kept(self, requests, ledger):
        replies = plain(self, requests, ledger)
        passed.extend(zip(requests, replies, strict=True))
        return replies

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalEngine, "_round", kept)
        return model(part).fit(**QUICK), passed


def blocks():
    tables = {k: TABLES[k].set_index("id").drop(columns="y", errors="ignore") for k in SITES}
    return {k: (b - b.mean()) / b.std(ddof=0) for k, b in tables.items()}


def test_vectors_are_those_of_the_pooled_columns(fitted):
    targets = {a.site: a.arrays for a, _ in fitted[1] if a.step == "distil"}
    Z = blocks()
    entities = Z["bank"].index[targets["bank"]["rows"]]
    pooled = np.hstack([Z[k].loc[entities] for k in SITES])
    U, s, _ = np.linalg.svd(pooled, full_matrices=False)
    found = targets["shop"]["target"]
    assert found.shape == (len(entities), 4) and len(entities) > 100
    signs = np.sign((found * U[:, :4]).sum(axis=0))
    np.testing.assert_allclose(found, U[:, :4] * signs * np.sqrt(len(entities)), atol=1e-6)
    assert s[3] - s[4] > 1e-3  # else the fourth vector is not one


def test_nothing_of_entities_held_back_is_in_the_vectors(fitted, part):
    passed = fitted[1]
    rows = next(a.arrays["rows"] for a, _ in passed if (a.site, a.step) == ("bank", "distil"))
    judged = np.concatenate([a.arrays["rows"] for a, _ in passed if a.step in ("judge", "calibrate")])
    assert len(judged) and not np.isin(rows, judged).any()


def test_outputs_of_sites_leave_as_a_sum(fitted):
    projected = [(a, r.arrays["projection"]) for a, r in fitted[1] if a.step == "project_columns"]
    Z, targets = blocks(), [a.arrays for a, _ in fitted[1] if a.step == "distil"]
    assert len(projected) == 3 and all(a.masked is not None for a, _ in projected)
    request, left = projected[0]
    own = Z[request.site].to_numpy()[request.arrays["rows"]] @ request.arrays["weights"]
    assert left.dtype != np.float64 and not np.allclose(own, targets[0]["target"], atol=0.1)


def test_one_site_predicts_by_itself(fitted):
    result, other = fitted[0], customers(100, seed=7)["shop"]
    P = result.predict_proba(fs.ClientPartition.from_frames({"shop": other}, on="id"))
    record, x = result._record.fitted, other.set_index("id").to_numpy()
    Z = (x - record.trained.shift["shop"]) / record.trained.scale["shop"]

    def network(theta, Z, width):
        p = Z.shape[1]
        W, b, V, c = np.split(theta, np.cumsum([6 * p, 6, 6 * width]))
        return np.maximum(Z @ W.reshape(6, p).T + b, 0.0) @ V.reshape(width, 6).T + c

    joint = network(record.trained.distilled["shop"][0], Z, 4)
    outputs = network(record.trained.networks["shop"][0], np.hstack([Z, joint]), 4)
    F = outputs @ record.trained.heads[1][:8].reshape(2, 4).T + record.trained.heads[1][8:]
    np.testing.assert_allclose(P, np.exp(F) / np.exp(F).sum(axis=1, keepdims=True), atol=1e-12)


def test_files_hold_what_was_learned(fitted, tmp_path):
    other = fs.ClientPartition.from_frames(customers(50, seed=2), on="id")
    fitted[0].save(tmp_path / "networks.fed")
    again = fs.load(tmp_path / "networks.fed")
    np.testing.assert_array_equal(again.predict_proba(other), fitted[0].predict_proba(other))


def test_what_it_discloses_is_said_before_and_after(fitted, part):
    expected = model(part).explain(**QUICK)
    rounds = sum(low for _, (low, _, _) in expected.rounds)
    assert rounds + 1 == fitted[0].ledger.rounds
    assert "leading singular vectors of every entity" in " ".join(str(expected).split())
    assert "singular vectors" in " ".join(str(fitted[0].summary(notes="all")).split())


def test_what_it_cannot_do_is_said(part):
    alone = fs.ClientPartition.from_frames({"bank": TABLES["bank"]}, on="id")
    with pytest.raises(ModelError, match="two sites or more"):
        model(alone).fit(**QUICK)
    apart = {k: t[t["id"] % 2 == (k == "shop")] if k != "bank" else t for k, t in TABLES.items()}
    with pytest.raises(EstimationError, match="entities that all sites have; there are 0"):
        model(fs.ClientPartition.from_frames(apart, on="id")).fit(**QUICK)
    with pytest.raises(ModelError, match="another method than 'vfedtrans'"):
        model(part, representations={"shop": object()}).fit(**QUICK)
