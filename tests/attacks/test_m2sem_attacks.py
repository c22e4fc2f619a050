"""Clusters over institutions: what who asks, and who is asked, can make of posteriors and sums."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.codec import from_json, to_json
from fedstat.errors import DescriptionError, FedstatError, PolicyError, SecurityError
from fedstat.federation.message import pack_request, unpack_reply
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.models.m2sem.em import MixtureState
from fedstat.models.m2sem.request import RoundRequest

N = 120
QUICK = {"n_init": 1, "starts": "sum", "select": None}


def make_frames(sites="ABC", seed=0):
    """Two clusters; the last client's columns have nothing to do with them."""
    rng = np.random.default_rng(seed)
    k = rng.integers(2, size=N)
    frames = {}
    for site in sites:
        mean = 0.0 if site == sites[-1] else 3.0 * k[:, None]
        X = mean + rng.standard_normal((N, 1)) + 0.5 * rng.standard_normal((N, 3))
        frame = pd.DataFrame(X, columns=[f"{site.lower()}{p}" for p in range(3)])
        frames[site] = frame.assign(id=range(N))
    return frames, k


def model_of(sites="ABC", **options):
    frames, k = make_frames(sites)
    return fs.M2SEM(fs.ClientPartition.from_frames(frames, on="id", **options), 2, 1), k


def requested(model, dry_run, steps=3, change=lambda requests: requests):
    """Begin a fit and send one round chosen by the analyst; return the replies in order of arrival."""
    exchange = model._exchange(0, 99)

    def protocol():
        yield from exchange.begin([1])
        dry_run.w, dry_run.slot = dry_run.r.mean(axis=0), 0
        return (yield change(exchange._requests([dry_run], steps, [], False)))

    return protocol()


def run(model, protocol, masks=True):
    if masks:
        protocol = masked_protocol(protocol, model._subjects.sites, model._session)
    return model.engine.run(protocol, model._new_ledger())


def halves():
    r = np.full((N, 2), 0.2)
    r[: N // 2, 0], r[N // 2 :, 1] = 0.8, 0.8
    return r


# ---- posteriors chosen by the analyst --------------------------------------------------------------


def single_out(weight):
    r = np.column_stack([np.full(N, weight), np.full(N, 1.0 - weight)])
    r[7] = 1.0, 0.0
    return r


@pytest.mark.parametrize("policy", ["open", "allowing"])
@pytest.mark.parametrize("weight", [0.0, 3e-4, 0.01])
def test_a_cluster_of_one_entity_is_refused(policy, weight):
    """Its means would be that entity's, whether others have no weight or hardly any."""
    rules = fs.Policy.strict(per_entity="any") if policy == "allowing" else "open"
    model, _ = model_of(policy=rules)
    with pytest.raises(PolicyError):
        run(model, requested(model, MixtureState(2, 1, single_out(weight))))


def test_what_a_cluster_of_one_entity_would_reveal():
    """Where the owner wants no count, its profile is where the entity is, along the factor."""
    model, _ = model_of(policy=fs.Policy(min_count=0))
    exchange, dry_run = model._exchange(0, 99), MixtureState(2, 1, single_out(0.0))

    def protocol():
        yield from exchange.begin([1])
        yield from exchange.improve([dry_run], 50)
        return (yield from exchange.release(dry_run, np.arange(2)))

    replies = run(model, protocol())
    (own,) = (reply.arrays["profiles"][0] for reply in replies if reply.site == "A")
    means = model.partition.sites["A"]._data.frame[["a0", "a1", "a2"]].to_numpy().mean(axis=1)
    assert abs(own.mean() - means[7]) < 0.1 * means.std()


def test_posteriors_that_only_one_site_is_reported_are_refused():
    """With flat ones at the others their parts were zero, and the sum that one's part."""
    model, _ = model_of()
    flat = np.full((N, 2), 0.5)

    def only_a(requests):
        return [
            request if request.site == "A" else replace(request, arrays={**request.arrays, "r": flat})
            for request in requests
        ]

    with pytest.raises(DescriptionError, match="all sites receive"):
        run(model, requested(model, MixtureState(2, 1, halves()), change=only_a))


def test_penalties_that_only_others_are_reported_leave_masks_in():
    """A penalty that removes the others' means: digests fit, and masks do not cancel."""
    model, _ = model_of()

    def others_silent(requests):
        def silent(request):
            reported = from_json(RoundRequest, request.text, "test")
            slots = tuple(replace(one, lam2=1e9) for one in reported.slots)
            return replace(request, text=to_json(replace(reported, slots=slots)))

        return [request if request.site == "A" else silent(request) for request in requests]

    with pytest.raises(SecurityError, match="did not cancel"):
        run(model, requested(model, MixtureState(2, 1, halves()), change=others_silent))


def test_a_round_that_others_were_reported_otherwise_is_not_gone_on_from():
    """If the coordinator ignores that masks did not cancel, the sites still remember what they received."""
    model, _ = model_of()
    exchange, dry_run = model._exchange(0, 99), MixtureState(2, 1, halves())

    def protocol():
        yield from exchange.begin([1])
        dry_run.w, dry_run.slot = dry_run.r.mean(axis=0), 0
        requests = exchange._requests([dry_run], 3, [], False)
        reported = json.loads(requests[1].text)
        reported["slots"][0]["lam2"] = 1e9
        yield [requests[0], *(replace(request, text=json.dumps(reported)) for request in requests[1:])]
        dry_run.source = 0
        yield exchange._requests([dry_run], 3, [], False)

    with pytest.raises(DescriptionError, match="earlier ones"):
        run(model, protocol(), masks=False)


# ---- information in sums ---------------------------------------------------------------------------


def own_part(model, site):
    """The part of one client, as that client computes it."""
    replies = run(model, requested(model, MixtureState(2, 1, halves())), masks=False)
    return next(reply.arrays["differences"] for reply in replies if reply.site == site)


def test_a_part_unmasked_is_the_factor_score_of_each_entity():
    """It is linear in them: from one number an entity, the direction of the columns that it measures."""
    model, _ = model_of()
    D = own_part(model, "A")[:, 0]
    X = model.partition.sites["A"]._data.frame[["a0", "a1", "a2"]].to_numpy()
    design = np.column_stack([np.ones(N), X])
    left = D - design @ np.linalg.lstsq(design, D, rcond=None)[0]
    assert np.abs(left).max() < 1e-8 * np.abs(D).max()


def test_under_masks_the_coordinator_has_the_sum_of_three_and_no_part():
    model, _ = model_of()
    parts = {site: own_part(model, site) for site in "ABC"}
    seen = []

    def tapped():
        protocol = masked_protocol(requested(model, MixtureState(2, 1, halves())), "ABC", model._session)
        requests = next(protocol)
        while True:
            replies = [
                unpack_reply(model.partition.sites[request.site].answer(pack_request(request)))
                for request in requests
            ]
            seen.extend(reply.arrays["differences"] for reply in replies if "differences" in reply.arrays)
            try:
                requests = protocol.send(replies)
            except StopIteration as stop:
                return stop.value

    replies = tapped()
    total = sum(reply.arrays["differences"] for reply in replies)
    np.testing.assert_allclose(total, sum(parts.values()), atol=1e-12)
    assert len(seen) == 3 and all(words.dtype == np.int64 for words in seen)
    for words, part in zip(seen, parts.values(), strict=True):
        assert abs(np.corrcoef(words[1].ravel().astype(float), part.ravel())[0, 1]) < 0.3


def test_with_two_sites_each_part_follows_from_the_other():
    model, _ = model_of("AB")
    parts = {site: own_part(model, site) for site in "AB"}
    with pytest.warns(fs.errors.DisclosureWarning, match="hides neither"):
        model.fit(masked=True, **QUICK)
    replies = run(model, requested(model, MixtureState(2, 1, halves())))
    total = sum(reply.arrays["differences"] for reply in replies)
    np.testing.assert_allclose(total - parts["B"], parts["A"], atol=1e-12)
    assert "masks do not help" in str(model.explain(**QUICK))


def test_a_site_learns_the_clusters_that_others_make():
    """The last one's columns say nothing of them, and its posteriors say nearly all."""
    model, k = model_of()
    reported = []

    class Tap:
        def __init__(self, engine):
            self.engine = engine

        def run(self, protocol, ledger):
            return self.engine.run(self.watch(protocol), ledger)

        def watch(self, protocol):
            requests = next(protocol)
            while True:
                reported.extend(a.arrays["r"] for a in requests if a.site == "C" and "r" in a.arrays)
                try:
                    requests = protocol.send((yield requests))
                except StopIteration as stop:
                    return stop.value

    model.engine = Tap(model.engine)
    model.fit(**QUICK)
    right = float(np.mean(reported[-1].argmax(axis=1) == k))
    assert max(right, 1.0 - right) > 0.95
    assert "something about the other sites' columns" in " ".join(str(model.explain(**QUICK)).split())


# ---- owners -------------------------------------------------------------------------------------


def test_a_strict_owner_refuses_by_name_and_allows_by_one_line():
    model, _ = model_of(policy="strict")
    with pytest.raises(FedstatError, match=r"per entity.*per_entity = "):
        model.fit(**QUICK)
    allowed, k = model_of(policy=fs.Policy.strict(per_entity="any"))
    labels = allowed.fit(**QUICK).labels.to_numpy() - 1
    assert max(np.mean(labels == k), np.mean(labels != k)) > 0.95


@pytest.mark.parametrize("alone", [1, 20])
def test_posteriors_cannot_single_out_an_entity_by_its_most_likely_cluster(alone):
    """Weights of a cluster are spread over all entities, but it is the most likely one of a few only."""
    model, _ = model_of(policy=fs.Policy(min_count=5))
    second = np.random.default_rng(0).uniform(0.3, 0.49, N)
    second[:alone] += 0.3
    posteriors = np.column_stack([1.0 - second, second])
    exchange, mixture = model._exchange(0, 99), MixtureState(2, 1, posteriors)

    def protocol():
        yield from exchange.begin([1])
        yield from exchange.improve([mixture], 1)
        return (yield from exchange.release(mixture, np.array([0, 1])))

    for reply in run(model, protocol()):
        frame = make_frames()[0][reply.site].drop(columns="id").to_numpy()
        own = frame[:alone].mean(axis=0)
        assert reply.arrays["shown"].all() == (alone == 20)
        # The means of 20 entities are released, and nothing about one of them.
        assert np.allclose(reply.arrays["members"][1], own) == (alone == 20)
        assert alone == 20 or not reply.arrays["members"].any()
