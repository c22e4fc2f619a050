"""A coordinator sends all sites but one a scale that makes their parts of a sum vanish."""

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, SecurityError
from fedstat.federation.crypto.masks import unmask_sums
from fedstat.federation.disclosure import checks
from fedstat.federation.disclosure import site as door
from fedstat.federation.disclosure.facts import SampledSites
from fedstat.federation.message import pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning", "ignore::RuntimeWarning")

RNG = np.random.default_rng(3)
N = 600
TABLE = pd.DataFrame(
    {
        "site": np.repeat(["S0", "S1", "S2", "S3"], N // 4),
        "age": RNG.normal(50.0, 10.0, N),
        "z": RNG.normal(size=N),
        "y": (RNG.random(N) < 0.4).astype(float),
    }
)
SITES = ("S0", "S1", "S2", "S3")
TARGET = "S0"


class Isolating(LocalEngine):
    """Tells every site but the target something else than the fit, and keeps the parts of a sum."""

    def __init__(self, sites, step, change, released):
        super().__init__(sites)
        self.sites, self.parts, self.truth = sites, [], None
        self.step, self.change, self.released = step, change, released

    def _send(self, requested, ledger):
        if requested.step == self.step and requested.site != TARGET:
            requested = self.change(requested)
        wanted = requested.step in ("sum_scores", "run_epochs") and len(self.parts) < len(self.sites)
        if wanted and requested.site == TARGET:
            request = pack_request(replace(requested, masked=None))
            self.truth = unpack_reply(self.sites[TARGET].answer(request)).arrays[self.released]
        reply = super()._send(requested, ledger)
        if wanted:
            self.parts.append(reply.arrays[self.released])
        return reply

    def isolated(self):
        """Error of the target's part, relative to its length."""
        found = unmask_sums({self.released: self.parts})[self.released]
        return np.linalg.norm((found - self.truth)[1:]) / np.linalg.norm(self.truth[1:])


def attack(kind, step, change, released):
    model = kind.from_formula("y ~ age + z", fs.ClientPartition.from_frame(TABLE, by="site"))
    model.engine = Isolating(model.partition.sites, step, change, released)
    options = {"rounds": 1} if kind is fs.FedAvg else {}
    with suppress(fs.errors.EstimationError):  # what comes after is of no interest
        model.fit(masked=True, **options)
    return model.engine.isolated()


def huge(request):
    return replace(request, arrays=request.arrays | {"scale": np.full_like(request.arrays["scale"], 1e150)})


def others(request):
    """Three sites are drawn, without the site that answers."""
    return replace(request, text=json.dumps([site for site in SITES if site != request.site]))


def nobody(request):
    return replace(request, text=json.dumps([TARGET]))


def still(request):
    """No step is taken: the parts of the other sites are their rows times the numbers that they received."""
    return replace(
        request,
        arrays=request.arrays | {"learning_rate": np.array(0.0), "beta": 0.0 * request.arrays["beta"]},
    )


CASES = {
    "scale": (fs.GLORE, "sum_scores", huge, "score"),
    "scale at the start": (fs.FedAvg, "start", huge, "beta"),
    "sites drawn": (fs.FedAvg, "run_epochs", others, "beta"),
    "length of a step": (fs.FedAvg, "run_epochs", still, "beta"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_site_is_not_isolated_by_what_the_others_are_reported(name, monkeypatch):
    with pytest.raises(SecurityError, match="its masks did not cancel"):
        attack(*CASES[name])
    if name != "scale at the start":  # without the binding its part is read from the masked sum
        monkeypatch.setattr(door, "bind_common", lambda *reported: "")
        assert attack(*CASES[name]) < 1e-6


def test_a_part_is_not_hidden_by_fewer_than_three_sites(monkeypatch):
    case = (fs.FedAvg, "run_epochs", nobody, "beta")
    with pytest.raises(DescriptionError, match=r"S1: of 4 sites in a masked sum, only 1 would add"):
        attack(*case)
    monkeypatch.setattr(door, "bind_common", lambda *reported: "")
    monkeypatch.setitem(checks.FACT_CHECKS, SampledSites, lambda *reported: None)
    assert attack(*case) < 1e-6
