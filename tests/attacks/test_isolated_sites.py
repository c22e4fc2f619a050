"""A coordinator that tells all sites but one a scale at which their parts of a sum vanish."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import SecurityError
from fedstat.federation.crypto.masks import unmask_sum
from fedstat.federation.door import site as door
from fedstat.federation.message import pack_ask, unpack_reply
from fedstat.federation.rounds.engine import LocalEngine

RNG = np.random.default_rng(3)
N = 600
TABLE = pd.DataFrame(
    {
        "site": np.repeat(["S0", "S1", "S2"], N // 3),
        "age": RNG.normal(50.0, 10.0, N),
        "z": RNG.normal(size=N),
        "y": (RNG.random(N) < 0.4).astype(float),
    }
)
TARGET = "S0"


class Isolating(LocalEngine):
    """Tells every site but the target something else than the fit, and keeps the parts of a sum."""

    def __init__(self, sites, step, array, change, released):
        super().__init__(sites)
        self.sites, self.parts, self.truth = sites, [], None
        self.step, self.array, self.change, self.released = step, array, change, released

    def _carry(self, ask, ledger):
        if ask.step == self.step and ask.site != TARGET:
            ask = replace(ask, arrays=ask.arrays | {self.array: self.change(ask.arrays[self.array])})
        wanted = ask.step in ("sum_scores", "run_epochs") and len(self.parts) < 3
        if wanted and ask.site == TARGET:
            request = pack_ask(replace(ask, masked=None))
            self.truth = unpack_reply(self.sites[TARGET].answer(request)).arrays[self.released]
        reply = super()._carry(ask, ledger)
        if wanted:
            self.parts.append(reply.arrays[self.released])
        return reply

    def isolated(self):
        """Error of the target's part, relative to its length."""
        found = unmask_sum(self.released, self.parts)
        return np.linalg.norm((found - self.truth)[1:]) / np.linalg.norm(self.truth[1:])


def attack(kind, step, array, change, released, **options):
    model = kind.from_formula("y ~ age + z", fs.ClientPartition.from_frame(TABLE, by="site"))
    model.engine = Isolating(model.partition.sites, step, array, change, released)
    with suppress(fs.errors.EstimationError):  # what comes after is of no interest
        model.fit(masked=True, **options)
    return model.engine.isolated()


def huge(array):
    return np.full_like(array, 1e150)


CASES = {
    "scale": (fs.GLORE, "sum_scores", "scale", huge, "score"),
    "scale at the start": (fs.FedAvg, "start", "scale", huge, "beta"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning", "ignore::RuntimeWarning")
def test_a_site_is_not_isolated_by_what_the_others_are_told(name, monkeypatch):
    with pytest.raises(SecurityError, match="its masks did not cancel"):
        attack(*CASES[name])
    if name == "scale":  # without the binding its part is read from the masked sum
        monkeypatch.setattr(door, "bind_common", lambda *told: "")
        assert attack(*CASES[name]) < 1e-6
