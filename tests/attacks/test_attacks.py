"""Rows are recovered from the unmasked iterative exchange, and not from the default one.

Three institutions: "Bank" holds the response, "Registry" three columns of everybody (one of them binary),
"Court" two columns of some. Attacks are those of the literature on vertical federated learning; see
:mod:`recovery`. Where the attacker is handed rows that it knows from elsewhere, these are 8 of 240.
"""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import pandas as pd
import pytest
from recovery import (
    align_columns,
    binary_columns,
    gram_by_nystrom,
    relative_error,
    rows_by_procrustes,
    rows_by_regression,
    rows_of_a_client_with_gaps,
    span,
)
from wiretap import Wire, tapped

import fedstat as fs
from fedstat.errors import ConvergenceWarning
from fedstat.federation.crypto import secure_product as secure
from fedstat.kernels.sketch import SKETCHES
from fedstat.models.vfem.covariance.cross_products import SKETCH_KINDS, STAGES, seed_of_stage

N = 240
KNOWN = np.arange(8)
FAILED = 0.5
COLUMNS = {"Bank": ["y"], "Registry": ["a", "b", "holder"], "Court": ["c", "d"]}


@cache
def table() -> pd.DataFrame:
    rng = np.random.default_rng(7)
    a, c = rng.gamma(2.0, size=N), rng.gamma(3.0, size=N)
    frame = pd.DataFrame(
        {
            "a": a,
            "b": 0.5 * a + rng.normal(size=N),
            "holder": (rng.random(N) < 0.4).astype(float),
            "c": c,
            "d": 0.4 * c + rng.normal(size=N),
        }
    )
    frame["y"] = 0.5 * frame.a - 0.6 * frame.b + frame.holder + 0.4 * frame.c + 0.5 * frame.d
    frame["y"] += rng.normal(scale=1.5, size=N)
    return frame


def make_model(gaps: bool, coordinator: str | None = None) -> fs.VFEMRegression:
    frames = {site: table()[names].assign(key=np.arange(N)) for site, names in COLUMNS.items()}
    if gaps:
        frames["Court"] = frames["Court"][np.random.default_rng(3).random(N) < 0.7]
    partition = fs.ClientPartition.from_frames(frames, on="key")
    return fs.VFEMRegression.from_formula("y ~ .", partition, coordinator=coordinator, between="independent")


def truth(model: fs.VFEMRegression, site: str) -> np.ndarray:
    """Standardized columns of a client."""
    X = model.partition.sites[site]._data.frame.loc[:, COLUMNS[site]].dropna().to_numpy(float)
    return (X - X.mean(axis=0)) / X.std(axis=0)


@cache
def iterated(gaps: bool, masked: bool = False) -> tuple[fs.VFEMRegression, Wire]:
    """The published exchange: gradient steps, 40 rounds."""
    model = make_model(gaps)
    with tapped(model) as wire, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(
            exchange="iterative",
            iteration=fs.Iteration(masked=masked, step="gradient", acceleration=None),
            maxiter=40,
            cov_type="none",
        )
    return model, wire


@cache
def by_default(coordinator: str | None = None) -> tuple[fs.VFEMRegression, Wire]:
    model = make_model(gaps=True, coordinator=coordinator)
    with tapped(model) as wire:
        model.fit(exchange="moments")
    return model, wire


def history(wire: Wire, site: str) -> tuple[np.ndarray, np.ndarray]:
    """Linear predictors (n, T + 1) that a client sent and residuals (n, T) that it was handed."""
    h = wire.sent_by(site, "start", "linear_predictor") + wire.sent_by(site, "step", "linear_predictor")
    s2, z = wire.handed_to(site, "step", "s2"), wire.handed_to(site, "step", "z")
    return np.array(h).T, np.array([v * e for v, e in zip(s2, z, strict=True)]).T


class TestUnmaskedIterativeExchange:
    """What the attacks can do."""

    @pytest.mark.parametrize("client", ["Registry", "Court"])
    def test_all_rows_of_a_complete_site_from_a_few_known_ones(self, client):
        model, wire = iterated(gaps=False)
        X, (h, e) = truth(model, client), history(wire, client)
        G = gram_by_nystrom(np.diff(h, axis=1), e) * N / float(wire.handed_to(client, "set_rate", "eta")[0])
        assert relative_error(G, X @ X.T) < 1e-5
        assert relative_error(rows_by_procrustes(G, KNOWN, X[KNOWN]), X) < 1e-5

    def test_raw_rows_of_a_site_with_gaps_without_any_known_one(self):
        model, wire = iterated(gaps=True)
        X, (h, e) = truth(model, "Court"), history(wire, "Court")
        s2, sums, (eta,) = (
            np.array(wire.handed_to("Court", step, name))
            for step, name in (("step", "s2"), ("step", "missing"), ("set_rate", "eta"))
        )
        guess = rows_of_a_client_with_gaps(h, e, s2, sums, N, float(eta))
        assert relative_error(align_columns(guess, X), X) < 1e-5

    def test_binary_columns_without_any_known_row(self):
        _, wire = iterated(gaps=True)
        h, _ = history(wire, "Registry")
        found = binary_columns(span(h, 3))
        holder = table()["holder"].to_numpy()
        assert len(found) == 2  # the column and its complement
        assert min(np.abs(column - holder).sum() for column in found) == 0

    def test_sketches_are_inverted_by_who_knows_their_seed(self):
        model = make_model(gaps=False)
        with tapped(model) as wire:
            sketched = fs.Iteration(masked=False, cross_products="sketch", sketch_size=2 * N)
            model.fit(exchange="iterative", iteration=sketched)
        bank = model.partition.sites["Bank"]._data  # the coordinator sits there, and shares the seed
        stage = STAGES.index("information")
        seed = seed_of_stage(bank.shared_seed, stage)
        S = SKETCHES[SKETCH_KINDS[0]](np.eye(N), np.arange(N), N, 2 * N, seed)
        (projected,) = wire.sent_by("Registry", "sketch", "sketch")
        columns = np.linalg.lstsq(S, projected, rcond=None)[0]
        X = truth(model, "Registry")
        assert relative_error(rows_by_regression(columns, KNOWN, X[KNOWN]), X) < 1e-6

    def test_a_site_recovers_the_rows_of_the_only_other_one(self):
        model, wire = iterated(gaps=False)
        X = truth(model, "Court")
        own, e = history(wire, "Registry")
        # Changes of the other site's linear predictor, up to a constant that centering removes.
        others = -np.diff(e, axis=1) - np.diff(own, axis=1)[:, : e.shape[1] - 1]
        others -= others.mean(axis=0)
        eta = float(wire.handed_to("Registry", "set_rate", "eta")[0])
        G = gram_by_nystrom(others, e[:, :-1]) * N / eta
        assert relative_error(rows_by_procrustes(G, KNOWN, X[KNOWN]), X) < 1e-3


class TestMaskedIterativeExchange:
    """Masks take away each client's own predictor, not the joint space of all columns."""

    def test_no_site_of_its_own(self):
        model, wire = iterated(gaps=False, masked=True)
        for site in ("Registry", "Court"):
            X = truth(model, site)
            seen = wire.per_entity(N, site)
            assert relative_error(rows_by_regression(seen, KNOWN, X[KNOWN]), X) > FAILED


def best_from_moments(model: fs.VFEMRegression, site: str, by: str) -> np.ndarray:
    """Best linear prediction of a client's rows from another institution's, by the pooled moments."""
    X, Z = truth(model, site), table()[COLUMNS[by]].to_numpy(float)
    rows = np.isin(np.arange(N), entities(model, site))
    Z = np.column_stack([np.ones(rows.sum()), Z[rows]])
    return Z @ np.linalg.lstsq(Z, X, rcond=None)[0]


def entities(model: fs.VFEMRegression, site: str) -> np.ndarray:
    return model.partition.rows[site]


class TestDefaultExchange:
    """Nothing that a party sees gives it rows of another one."""

    @pytest.mark.parametrize("coordinator", [None, "apart"])
    def test_nothing_per_entity_is_sent(self, coordinator):
        model, wire = by_default(coordinator)
        kinds = set(model.fit().ledger.releases()["kind"])
        assert not kinds & {"per entity", "raw columns", "sketch"}
        for site in ("Registry", "Court"):
            assert not wire.sent_by(site, "step", "linear_predictor")

    @pytest.mark.parametrize("coordinator", [None, "apart"])
    @pytest.mark.parametrize("client", ["Registry", "Court"])
    def test_the_coordinator(self, client, coordinator):
        model, wire = by_default(coordinator)
        X = truth(model, client)
        check_all(model, wire.per_entity(len(X)), X)
        assert relative_error(best_from_moments(model, client, "Bank"), X) > FAILED

    @pytest.mark.parametrize(
        ("attacker", "client"), [("Registry", "Court"), ("Court", "Registry"), ("Bank", "Court")]
    )
    def test_each_site(self, attacker, client):
        model, wire = by_default()
        X = truth(model, client)
        check_all(model, wire.opened_by(attacker, len(X)), X)
        assert relative_error(best_from_moments(model, client, attacker), X) > FAILED

    def test_without_the_random_tables_the_same_attack_has_all_rows(self, monkeypatch):
        """Check that the assertions above can fail: without the triples the attack succeeds."""
        original = secure.Stream.__getitem__
        monkeypatch.setattr(secure.Stream, "__getitem__", lambda stream, rows: 0 * original(stream, rows))
        model = make_model(gaps=True)
        with tapped(model) as wire:
            model.fit(exchange="moments")
        X = truth(model, "Court")
        assert (
            relative_error(rows_by_regression(wire.opened_by("Registry", len(X)), KNOWN, X[KNOWN]), X) < 1e-6
        )

    def test_a_dealer_that_works_together_with_a_site_has_the_other_ones_columns(self):
        """The limit that the summary states: who must not collude with whom."""
        rng = np.random.default_rng(0)
        X = rng.normal(size=(50, 2))
        task = secure.MatrixProduct("A", "B", 50, 2, 3, 1)
        seed = secure.new_seed()
        opened = secure.open_a(task, seed, secure.encode_columns(X, 20, "A"))
        mask = -secure.open_a(task, seed, np.zeros((50, 2), dtype=np.int64))
        np.testing.assert_allclose((opened + mask) * 2.0**-20, X, atol=1e-5)


def check_all(model: fs.VFEMRegression, seen: np.ndarray, X: np.ndarray) -> None:
    """Every attack on everything that was seen, with the known rows in hand."""
    assert relative_error(rows_by_regression(seen, KNOWN, X[KNOWN]), X) > FAILED
    if seen.shape[1] > 2:
        with np.errstate(all="ignore"):
            G = gram_by_nystrom(np.diff(seen, axis=1), seen[:, :-1])
        if np.isfinite(G).all():
            assert relative_error(rows_by_procrustes(G, KNOWN, X[KNOWN]), X) > FAILED
        rank = min(seen.shape[1], 5)
        for column in binary_columns(span(seen, rank)):
            assert (
                min(np.abs(column - table()["holder"]).sum(), np.abs(1 - column - table()["holder"]).sum())
                > 0
            )
