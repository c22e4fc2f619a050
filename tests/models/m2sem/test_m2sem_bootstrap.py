"""Parametric bootstrap of clusters: from released parameters, near the standard errors of the information."""

import numpy as np
import pytest

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.models.m2sem.bootstrap import as_drawn, drawable
from fedstat.models.m2sem.model import M2SEM


@pytest.fixture(scope="module")
def fitted():
    kinds = ["continuous", "continuous", "ordinal"]
    data = fs.datasets.make_clusters(250, kinds, p=3, separation=2.6, seed=4)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    with pytest.warns(fs.errors.DisclosureWarning):
        return M2SEM(partition, 2, 1).fit(select=None, n_init=1, starts="sum")


def test_errors_are_near_those_of_the_information_and_nobody_is_asked(fitted):
    rounds = fitted.ledger.rounds
    found = fitted.bootstrap(20, seed=1)
    assert fitted.ledger.rounds == rounds and (found.samples, found.failed) == (20, 0)
    tidy, reported = found.tidy(), fitted.tidy()
    keys = ["site", "column", "level", "cluster", "estimate"]
    assert tidy[keys].equals(reported[keys])
    ratio = tidy["std_error"] / reported["std_error"]
    assert 0.85 < ratio.median() < 1.2 and ratio.between(0.5, 2.0).all()
    assert found.sizes["std_error"].iloc[0] == pytest.approx(fitted.sizes["std_error"].iloc[0], rel=0.35)
    assert "without any site" in " ".join(str(found).split())
    assert fitted.bootstrap(2, seed=1).tidy().equals(fitted.bootstrap(2, seed=1).tidy())


def test_samples_are_drawn_from_the_released_parameters(fitted):
    record = fitted._record
    labels = np.repeat([0, 1], 40_000)
    for held in record.sites.values():
        one = drawable(record, held, np.arange(2))
        profile = one.fitted[0].profile()
        values = one.fitted[0].draw(labels, np.random.default_rng(0))
        for k in (0, 1):
            part = values[labels == k]
            if profile.ndim == 2:
                np.testing.assert_allclose(part.mean(axis=0), profile[k], atol=0.05)
            else:
                shares = (part[:, :, None] == np.arange(profile.shape[2])).mean(axis=0)
                np.testing.assert_allclose(shares, profile[k], atol=0.012)


def test_clusters_are_named_as_they_were_drawn():
    labels = np.array([0, 0, 1, 1, 2, 2])
    r = np.eye(3)[[2, 2, 0, 0, 1, 1]]
    assert as_drawn(r, labels).tolist() == [2, 0, 1]


def test_arguments(fitted):
    with pytest.raises(ModelError, match="samples"):
        fitted.bootstrap(1)
    with pytest.raises(ModelError, match="alpha"):
        fitted.bootstrap(2, alpha=1)
