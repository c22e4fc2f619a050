"""Clusters between sites: posteriors chosen by the analyst, and rows recovered from estimates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for

import fedstat as fs
from fedstat.errors import DescriptionError, FedstatError, MessageError
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.checks import FACT_CHECKS
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.models.m2sem.em import MixtureState

N, VICTIM = 120, 100
ALLOWING = fs.Policy.strict(per_entity="any")
"""The strict policy with row-level values allowed, which every clustering needs."""
SECRET = b"of the site's owner, of 32 bytes."
QUICK = {"n_init": 1, "starts": "sum", "cov_type": None}


def make_frames(seed=0, apart=2.5):
    """Clients with two columns each."""
    rng = np.random.default_rng(seed)
    k = rng.integers(2, size=N)
    frames = {}
    for site in "ABC":
        X = apart * k[:, None] + rng.standard_normal((N, 1)) + 0.6 * rng.standard_normal((N, 2))
        frame = pd.DataFrame(X, columns=[f"{site.lower()}{p}" for p in range(2)])
        frames[site] = frame.assign(id=range(N))
    return frames


def partition_of(policy):
    return fs.ClientPartition.from_frames(make_frames(), on="id", policy=policy)


def reported(victim=(1.0, 0.0)):
    """Certain posteriors of two halves, but for one entity."""
    r = np.repeat(np.eye(2), N // 2, axis=0)
    r[VICTIM] = r[VICTIM] if victim is None else victim
    return r


def released(model, *several, rounds=3, steps=100, last=None):
    """Release the estimates under each of several posteriors, in one fit; send `last` before a release."""

    def protocol():
        exchange, out = model._exchange(0, 999), []
        yield from exchange.begin([1])
        for r in several:
            one = MixtureState(2, 1, r)
            for _ in range(rounds):
                one.r = r
                yield from exchange.improve([one], steps)
            if last is not None:
                one.r = last
                yield from exchange.improve([one], 0)
            out.append((yield from exchange.release(one, np.arange(2))))
        return out

    protocol = masked_protocol(protocol(), model._subjects.sites, model._session)
    return [
        {reply.site: reply.arrays for reply in replies}
        for replies in model.engine.run(protocol, model._new_ledger())
    ]


def read_off(first, second, weight):
    """Solve for the victim's values, which entered the mean of a cluster of N / 2 entities with a weight."""
    n = N // 2
    return ((n + weight) * second["profiles"][0] - n * first["profiles"][0]) / weight


def values_of(partition, site):
    return partition.sites[site]._data.frame[[f"{site.lower()}{p}" for p in range(2)]].to_numpy()


@pytest.fixture
def unguarded(monkeypatch):
    """No weights are remembered."""
    monkeypatch.setitem(FACT_CHECKS, facts.WeightedEstimates, lambda *_: None)


@pytest.mark.parametrize("policy", ["open", ALLOWING])
def test_what_posteriors_that_differ_in_one_entity_read(policy, unguarded):
    """In two sessions, its values along the factor; its likeliest cluster stays the same."""
    partition = partition_of(policy)
    (first,), (second,) = (
        released(fs.M2SEM(partition, 2, 1), reported(victim)) for victim in (None, (0.49, 0.51))
    )
    values = values_of(partition, "A").mean(axis=1)
    assert abs(read_off(first["A"], second["A"], 0.49).mean() - values[VICTIM]) < 0.25 * values.std()


def test_and_in_one_session(unguarded):
    model = fs.M2SEM(partition_of("open"), 2, 1)
    (first,), (second,) = released(model, reported(None)), released(model, reported((0.49, 0.51)))
    values = values_of(model.partition, "A").mean(axis=1)
    assert abs(read_off(first["A"], second["A"], 0.49).mean() - values[VICTIM]) < 0.25 * values.std()


@pytest.mark.parametrize("victim", [(1.0, 0.0), (0.49, 0.51)])
@pytest.mark.parametrize("policy", ["open", ALLOWING])
def test_estimates_of_a_second_mixture_do_not_leave_in_a_fit(policy, victim):
    with pytest.raises(DescriptionError, match=r"those of another were released|order"):
        released(fs.M2SEM(partition_of(policy), 2, 1), reported(None), reported(victim))


@pytest.mark.parametrize("victim", [(1.0, 0.0), (0.49, 0.51)])
@pytest.mark.parametrize("policy", ["open", ALLOWING])
def test_nor_in_a_second_fit_of_a_session(policy, victim):
    model = fs.M2SEM(partition_of(policy), 2, 1)
    released(model, reported(None))
    with refused_for("differencing"):
        released(model, reported(victim))


def second(policy, r, **options):
    """Estimates in a session of their own, after those of two halves."""
    partition = partition_of(policy)
    released(fs.M2SEM(partition, 2, 1), reported(None))
    return released(fs.M2SEM(partition, 2, 1), r, **options)


@pytest.mark.parametrize("victim", [(1.0, 0.0), (0.49, 0.51), (1e-6, 1.0 - 1e-6)])
def test_nor_in_another_session(victim):
    with refused_for("differencing"):
        second(ALLOWING, reported(victim))


def test_nor_with_other_posteriors_after_the_last_steps():
    """Estimates use the posteriors of the steps, and not the posteriors that were sent last."""
    with refused_for("differencing"):
        second(ALLOWING, reported((0.49, 0.51)), last=reported(None))


def test_nor_with_clusters_in_another_order():
    with refused_for("differencing"):
        second(ALLOWING, reported((0.49, 0.51))[:, ::-1])


def test_nor_as_a_sum_of_several():
    """No two differ in one entity, and three do."""
    rng, partition = np.random.default_rng(1), partition_of(ALLOWING)
    first, other = rng.uniform(0.2, 0.8, size=(2, N))
    third = (first + other) / 2.0
    third[VICTIM] += 0.1
    for one in (first, other):
        released(fs.M2SEM(partition, 2, 1), np.column_stack([one, 1.0 - one]), rounds=1, steps=1)
    with refused_for("differencing"):
        released(fs.M2SEM(partition, 2, 1), np.column_stack([third, 1.0 - third]), rounds=1, steps=1)


def test_a_cluster_that_differs_from_another_by_one_entity_is_none():
    """Each has enough entities; the difference of their profiles is that of one."""
    r = np.full((N, 2), 0.5)
    r[VICTIM] = 0.9, 0.1
    for policy in ("open", ALLOWING):
        with refused_for("differencing"):
            released(fs.M2SEM(partition_of(policy), 2, 1), r, rounds=1, steps=1)


def test_honest_fits_go_on():
    """Other seeds, numbers of clusters, and a fit without selection after one with it."""
    partition = partition_of(ALLOWING)
    for K, select, seed in ((2, "bic", 0), (2, None, 0), (2, "bic", 1), (3, None, 0), (2, None, 2)):
        assert np.isfinite(fs.M2SEM(partition, K, 1).fit(select=select, seed=seed, **QUICK).llf)
    same = fs.M2SEM(partition, 2, 1)
    first, second = (same.fit(select=None, **QUICK).llf for _ in range(2))
    assert first == second


def test_clusters_that_are_far_apart_are_fitted_once():
    """Posteriors of a second fit differ in the one entity that is between: its error says what to do."""
    frames = make_frames(apart=9.0)
    for frame in frames.values():
        frame.iloc[VICTIM, :2] = frame.iloc[:, :2].mean()
    partition = fs.ClientPartition.from_frames(frames, on="id", policy=ALLOWING)
    fs.M2SEM(partition, 2, 1).fit(select=None, **QUICK)
    with pytest.raises(FedstatError, match="result of the earlier fit"):
        for seed in range(1, 4):
            fs.M2SEM(partition, 2, 1).fit(select="bic", seed=seed, **QUICK)


# ---- what is not held against anything, and is said ----------------------------------------------


def run(model, protocol, masks=True):
    protocol = masked_protocol(protocol, model._subjects.sites, model._session) if masks else protocol
    return model.engine.run(protocol, model._new_ledger())


def sums_under(model, *several):
    """Masked sums under each of some posteriors, side by side in one round: differences, and the mixtures."""

    def protocol():
        exchange, some = model._exchange(0, 999), [MixtureState(2, 1, r) for r in several]
        yield from exchange.begin([1])
        yield from exchange.improve(some, 20)
        return np.column_stack([np.log(one.r[:, 0] / one.r[:, 1]) for one in some]), some

    return run(model, protocol())


def test_masked_sums_under_many_posteriors_span_all_columns():
    """If the analyst knows as many rows as there are columns, these rows determine all others."""
    rng, model = np.random.default_rng(3), fs.M2SEM(partition_of(ALLOWING), 2, 1)
    a = rng.uniform(0.1, 0.9, size=(12, N))
    D, _ = sums_under(model, *(np.column_stack([one, 1.0 - one]) for one in a))
    X = np.hstack([values_of(model.partition, site) for site in "ABC"])
    known, other = np.arange(30), np.arange(30, N)
    design = np.column_stack([np.ones(N), D])
    found = design[other] @ np.linalg.lstsq(design[known], X[known], rcond=None)[0]
    assert np.abs(found - X[other]).max() < 1e-3 * X.std()
    assert "every row, up to one unknown combination" in " ".join(str(model.explain(**QUICK)).split())


def test_totals_reveal_what_an_entity_adds():
    model = fs.M2SEM(partition_of(ALLOWING), 2, 1)
    _, (first, second) = sums_under(model, reported(None), reported((0.49, 0.51)))
    assert abs(first.loglik - second.loglik) > 1e-6
    assert "reveal its contribution" in " ".join(str(model.explain(**QUICK)).split())


def test_earlier_steps_leave_their_traces():
    """The last step uses posteriors that already have estimates; those sent before the step are reported."""
    partition = partition_of(ALLOWING)

    def after(victim):
        def protocol():
            exchange, one = model._exchange(0, 99), MixtureState(2, 1, reported(victim))
            yield from exchange.begin([1])
            for r in (reported(victim), reported(None)):
                one.r = r
                yield from exchange.improve([one], 1)
            return (yield from exchange.release(one, np.arange(2)))

        model = fs.M2SEM(partition, 2, 1)
        return run(model, protocol())[0].arrays["parameters"]

    assert np.abs(after(None) - after((0.49, 0.51))).max() > 1e-9
    text = " ".join(str(fs.M2SEM(partition, 2, 1).explain(**QUICK)).split())
    assert "Releases of earlier steps are not" in text


def begun(model, **arrays):
    """Begin a fit with arrays chosen by the analyst."""

    def protocol():
        requests = next(model._exchange(0, 99).begin([1]))
        yield [replace(request, arrays={**request.arrays, **arrays}) for request in requests]

    return run(model, protocol(), masks=False)


def test_an_entity_is_not_left_out_by_its_place():
    """Neither alone nor with its presence pattern."""
    model = fs.M2SEM(partition_of("open"), 2, 1)
    with pytest.raises(FedstatError, match="place"):
        begun(model, place=np.delete(np.arange(N), VICTIM))
    pattern, members = np.zeros(N, dtype=np.int64), np.vstack([np.ones(3, bool), np.zeros(3, bool)])
    pattern[VICTIM] = 1
    with pytest.raises(DescriptionError, match="presence pattern"):
        begun(model, pattern=pattern, members=members)


def test_own_clusters_are_few():
    """With as many posteriors as entities, the estimates show which entities have similar factor scores."""
    model = fs.M2SEM(partition_of("open"), 2, 1)
    begun(model)
    with pytest.raises(MessageError, match="number of clusters"):
        own_clusters(model, clusters=np.array(N // 2), factors=np.array(1))


def own_clusters(model, **request):
    def protocol():
        (reply,) = yield [model._requester.request("A", "own_clusters", **request)]
        return reply.arrays["labels"]

    return run(model, protocol(), masks=False)


def test_own_clusters_are_the_same_however_often_they_are_asked():
    """With chosen seeds, the share of draws with two entities in one cluster shows how similar they are."""
    request, found = {"clusters": np.array(4), "factors": np.array(1)}, []
    for _ in range(2):
        model = fs.M2SEM(partition_of("open"), 2, 1)
        begun(model)
        found += [own_clusters(model, **request), own_clusters(model, **request)]
        with pytest.raises(MessageError, match="seed"):
            own_clusters(model, **request, seed=np.array(7))
    assert all(np.array_equal(one, found[0]) for one in found)


def test_latent_classes_have_no_scores_which_would_be_the_columns():
    model = fs.M2SEM(partition_of("open"), 2, 0)

    def protocol():
        exchange, one = model._exchange(0, 99), MixtureState(2, 0, reported(None))
        yield from exchange.begin([0])
        yield from exchange.improve([one], 1)
        return (yield [model._requester.request("A", "release_scores", slot=np.array(one.slot))])

    with pytest.raises(DescriptionError, match="no factor scores"):
        run(model, protocol(), masks=False)


@pytest.mark.parametrize("rare, refused", [(0, False), (2, True), (3, False)])
def test_shares_of_latent_classes_are_judged_as_the_sums_that_they_are(rare, refused):
    """Probability times size is the number of a class' entities with a level; the remedies give a fit."""
    frames = make_frames(apart=6.0)
    k = frames["A"]["a0"] > 3
    level = np.resize(["u", "v"], N).astype(object)
    level[np.flatnonzero(k)[:rare]], level[np.flatnonzero(~k)[:9]] = "w", "w"
    frames["A"]["town"] = level
    partition = fs.ClientPartition.from_frames(frames, on="id")
    quick = {**QUICK, "select": None}
    if refused:
        with refused_for("minimum rows per level", site="A"):
            fs.M2SEM(partition, 2, 0).fit(**quick)
        assert fs.M2SEM(partition, 2, 1).fit(**quick).n_clusters == 2
        partition = fs.ClientPartition.from_frames(frames, on="id", policy=fs.Policy(min_level_count=2))
    found = fs.M2SEM(partition, 2, 0).fit(**quick)
    entities, shares = found.sizes["entities"].to_numpy(), found.profiles().xs("w", level="level").to_numpy()
    assert min((entities * shares).ravel()) == pytest.approx(rare, abs=0.1)


def test_what_is_remembered_of_posteriors_outlives_a_process(tmp_path):
    """The site is stopped after estimates have left, and its records come in another order."""
    partition, again = partition_of(ALLOWING), partition_of(ALLOWING)
    released(fs.M2SEM(partition, 2, 1), reported(None))
    for name, site in partition.sites.items():
        np.savez(tmp_path / f"{name}.npz", **site._data.memory.to_arrays(site._data.table, SECRET))
        data = again.sites[name]._data
        with np.load(tmp_path / f"{name}.npz") as arrays:
            assert arrays["weight codes"].shape[1] > 0
            again.sites[name].remember(ReleaseHistory.from_arrays(dict(arrays), data.table, SECRET))
    with refused_for("differencing"):
        released(fs.M2SEM(again, 2, 1), reported((0.49, 0.51)))
    # A release that is repeated gives the same numbers.
    released(fs.M2SEM(again, 2, 1), reported(None))
