"""Networks over sites in processes of their own: those of one process to the bit, over kills as well."""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from laser_cases import SITES, customers, model
from operating import main, make_federation, serve, served_sites, wait
from test_connect_vertical import numbers_at

import fedstat as fs
from fedstat.errors import EngineError, ModelError
from fedstat.federation.transport.remote import RemoteSite

QUICK = {"epochs": 4, "batch_size": 128, "learning_rate": 0.02, "calibration": 0.4}
MASKED = (False, True)


def tables():
    """Customers of three sites, in another order at each."""
    return {k: frame.sample(frac=1, random_state=i) for i, (k, frame) in enumerate(customers(500).items())}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    home, frames = tmp_path_factory.mktemp("customers"), tables()
    study = make_federation(home, frames, ["id"])
    with served_sites(home, frames) as running:
        assert main(["federation", "align", str(study)]) == 0
        yield {"home": home, "study": study, "running": running}


def in_one_process(home, without=()):
    """The tables of the sites here, in the order of the entities that the alignment gave them."""
    frames = {
        k: frame.drop(columns="id").assign(number=numbers_at(home / k))
        for k, frame in tables().items()
        if k not in without
    }
    return fs.ClientPartition.from_frames(frames, on="number")


@pytest.fixture(scope="module")
def there(federation):
    return fs.ClientPartition.connect(federation["study"])


@pytest.fixture(scope="module")
def here(federation, there):
    # Its sessions have names of the same length, so that bytes can be compared.
    return replace(in_one_process(federation["home"]), _aligned_as=there._aligned_as)


def fitted(partition, **options):
    return model(partition, coordinator="apart").fit(**{**QUICK, **options})


@pytest.fixture(scope="module")
def both(there, here):
    """The same fit served and in one process, with masks and without."""
    return {how: tuple(fitted(p, masked=how) for p in (there, here)) for how in MASKED}


def assert_same_networks(one, other):
    first, second = one._record.fitted.trained, other._record.fitted.trained
    for k in SITES:
        np.testing.assert_array_equal(first.networks[k], second.networks[k])
    np.testing.assert_array_equal(first.heads, second.heads)
    np.testing.assert_array_equal(one.history, other.history)


@pytest.mark.parametrize("how", MASKED)
def test_the_same_fit_to_the_bit_as_in_one_process(both, there, how):
    theirs, ours = both[how]
    assert_same_networks(theirs, ours)
    pd.testing.assert_frame_equal(theirs.sites(), ours.sites(), check_exact=True)
    pd.testing.assert_frame_equal(
        theirs.calibration.to_frame(), ours.calibration.to_frame(), check_exact=True
    )
    assert (theirs.ledger.rounds, theirs.ledger.bytes) == (ours.ledger.rounds, ours.ledger.bytes)
    assert fs.verify_receipt(theirs.ledger.receipt, there.fingerprints).ok


@pytest.mark.parametrize("how", MASKED)
def test_the_same_predictions_to_the_bit(both, there, here, how):
    theirs, ours = both[how]
    for call in ("predict", "predict_proba", "predict_set"):
        found, expected = getattr(theirs, call)(there), getattr(ours, call)(here)
        np.testing.assert_array_equal(found, expected)
        assert not pd.isna(found).any(axis=None)
    found, expected = (fit.evaluate(p).to_frame() for fit, p in ((theirs, there), (ours, here)))
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_a_site_that_has_left_is_one_that_never_had_an_entity(both, federation, here):
    """Two sites are left, and then one: the coordinator requests no sum of theirs under masks."""
    theirs, ours = both[True]
    for gone in (["telecom"], ["shop", "telecom"]):
        left = fs.ClientPartition.connect(federation["study"], without=gone)
        found = theirs.predict_proba(left)
        known = in_one_process(federation["home"], gone)
        np.testing.assert_array_equal(found, ours.predict_proba(known))
        complete, absent = ours.predict_proba(here), np.ones(here.n_entities, dtype=bool)
        for k in gone:
            absent[here.rows[k]] = False
        np.testing.assert_allclose(found[absent], complete[absent], atol=1e-12)
        assert (abs(found - complete)[~absent] > 1e-6).any(axis=None)
        pd.testing.assert_frame_equal(
            theirs.evaluate(left).to_frame(), ours.evaluate(known).to_frame(), check_exact=True
        )
    with pytest.raises(ModelError, match="lacks site 'bank', which has the response"):
        theirs.evaluate(fs.ClientPartition.connect(federation["study"], without=["bank"]))


def test_the_order_of_sites_does_not_matter(both, federation):
    path = federation["study"] / "federation.toml"
    text = path.read_text()
    head, sites = text.split("[sites]\n")
    sites, mark, tail = sites.partition("\n[revoked]")
    lines = [line for line in sites.split("\n") if "=" in line and not line.startswith("#")]
    try:
        path.write_text(head + "[sites]\n" + "\n".join(reversed(lines)) + "\n" + mark + tail)
        turned = fs.ClientPartition.connect(path)
    finally:
        path.write_text(text)
    assert tuple(turned.sites) == SITES[::-1]
    for how in MASKED:
        one, other = (fit._record.fitted.trained for fit in (both[how][0], fitted(turned, masked=how)))
        for k in SITES:
            np.testing.assert_allclose(one.networks[k], other.networks[k], atol=1e-12)


@pytest.mark.parametrize(
    ("site", "turn", "options"),
    [
        ("shop", 12, {"masked": False}),
        ("bank", 30, {"masked": True, "label_epsilon": 2.0}),
    ],
)
def test_a_site_is_killed_in_a_fit_that_goes_on(federation, tmp_path, site, turn, options):
    """Started again, it is handed what its networks were after the latest epoch."""
    study, running = federation["study"], federation["running"]
    checkpoint = tmp_path / "training.fed"
    complete = fitted(fs.ClientPartition.connect(study), **options)
    partition = fs.ClientPartition.connect(study)
    fitting = model(partition, coordinator="apart")
    transport, requested = partition.engine._sites[site].transport, itertools.count(1)
    hasty = copy(transport)
    hasty.timeout = 2.0

    class Watched:
        def send(self, name, request):
            if name != site:
                return transport.send(name, request)
            number = next(requested)
            if number == turn:
                running[site].kill()
            return (transport if number < turn else hasty).send(name, request)

    for name in SITES:
        partition.engine._sites[name] = RemoteSite(name, Watched())
    with pytest.raises(EngineError, match=f"'{site}' did not answer"):
        fitting.fit(**QUICK, **options, checkpoint=checkpoint)
    assert checkpoint.exists()
    running[site].wait()
    running[site] = serve(federation["home"] / site)
    wait(federation["home"] / site, running[site])
    resumed = fitted(fs.ClientPartition.connect(study), **options, checkpoint=checkpoint)
    assert_same_networks(resumed, complete)
    assert resumed.ledger.rounds < complete.ledger.rounds
    assert str(resumed.sites()) == str(complete.sites())
