"""One of six sites is lost at each question in turn: the fit ends, is that of the others, and says which."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DataWarning, EngineError, SessionError
from fedstat.federation.protocols.engine import LocalEngine

LOST = "s3"
NAMES = tuple(f"s{k}" for k in range(6))


def patients(n_sites=6, rows=40):
    rng = np.random.default_rng(1)
    n = n_sites * rows
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(size=n)})
    frame["y"] = (rng.random(n) < 1 / (1 + np.exp(-frame["x"]))).astype(int)
    frame["time"], frame["arm"] = 1.0 + np.arange(n) % 7, np.arange(n) % 2
    return frame.assign(h=np.repeat([f"s{k}" for k in range(n_sites)], rows))


class Dying:
    """A door that answers no requests from its question number `turn` on, or to that one only."""

    def __init__(self, site, turn, error=EngineError, back=False):
        self.site, self.policy, self.turn, self.requested = site, site.policy, turn, 0
        self.error, self.back = error, back

    def answer(self, request):
        self.requested += 1
        if self.requested == self.turn or (self.requested > self.turn and not self.back):
            raise self.error(f"'{self.site.name}' did not answer within 1 s")
        return self.site.answer(request)


@cache
def six_sites():
    return fs.ClientPartition.from_frame(patients(), by="h", policy="strict")


def connected(turn, quorum=5, complete=None, **how):
    """Six sites, one of which is lost at request `turn`; they keep the same state of rows in each run."""
    complete = complete or six_sites()
    answers = {
        name: Dying(site, turn, **how) if name == LOST else site for name, site in complete.sites.items()
    }
    return replace(complete, _engine=LocalEngine(answers), quorum=quorum), answers[LOST]


def logistic(partition):
    return fs.GLORE.from_formula("y ~ scale(x)", partition).fit()


def averaged(partition):
    return fs.FedAvg.from_formula("y ~ x + z", partition).fit(rounds=2, seed=1, batch_size=None, masked=True)


FITS = {"GLORE": logistic, "FedAvg": averaged}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
@pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
def test_at_every_question_the_fit_is_that_of_the_others(fit):
    frame = patients()
    rest = fs.ClientPartition.from_frame(frame[frame.h != LOST], by="h", policy="strict")
    expected = fit(rest)
    undisturbed, door = connected(10**9)
    complete, request = fit(undisturbed), door.requested
    assert request > 10 and not complete.absent
    for turn in range(1, request + 1):
        partition, _ = connected(turn)
        with pytest.warns(DataWarning, match=rf"'{LOST}' was lost in round \d+.*5 of 6 sites\)"):
            result = fit(partition)
        np.testing.assert_array_equal(result.params, expected.params)
        assert result.nobs == expected.nobs == len(frame) - 40
        (lost,) = result.absent
        assert (lost.site, lost.back) == (LOST, False) and 1 <= lost.round <= complete.ledger.rounds + 1
        assert f"'{LOST}' was lost in round {lost.round}, and its rows are not in the fit" in str(
            result.summary()
        )
        assert result.receipt().absent == (lost,) and LOST not in result.receipt().statements
        keys = {name: key for name, key in partition.fingerprints.items() if name != LOST}
        assert fs.verify_receipt(result.receipt(), keys).ok
        before = result.ledger.to_frame().query("round <= @lost.round")
        assert result.ledger.rounds == lost.round + expected.ledger.rounds
        assert (LOST in set(before["sender"])) == (turn > 1)


def balanced(partition):
    return fs.TreatmentEffect.from_formula("time ~ 1", partition, treatment="arm ~ x").balance()


def timed(partition):
    model = fs.SurvivalEffect.from_formula("Surv(time, y) ~ 1", partition, treatment="arm ~ x")
    return model.fit()


def curve(partition):
    return fs.KaplanMeier.from_formula("Surv(time, y) ~ 1", partition).fit(grid=[4, 7])


@pytest.mark.parametrize("fit", [balanced, timed, curve])
def test_results_without_coefficients_name_the_lost_site(fit):
    partition, _ = connected(5, complete=fs.ClientPartition.from_frame(patients(), by="h"))
    with pytest.warns(DataWarning, match=f"'{LOST}' was lost"):
        result = fit(partition)
    assert f"'{LOST}' was lost in round" in str(result.summary(notes="all"))


def test_a_receipt_that_hides_who_was_lost_does_not_verify():
    partition, _ = connected(12)
    with pytest.warns(DataWarning):
        receipt = logistic(partition).receipt()
    keys = {name: key for name, key in partition.fingerprints.items() if name != LOST}
    for absent in ((), (replace(receipt.absent[0], round=1),)):
        found = fs.verify_receipt(replace(receipt, absent=absent), keys, strict=False)
        assert any("signed another ledger" in problem for problem in found.problems)


def test_what_was_lost_is_kept_in_a_file(tmp_path):
    partition, _ = connected(9)
    with pytest.warns(DataWarning):
        result = logistic(partition)
    result.save(tmp_path / "fit.fed")
    assert fs.load(tmp_path / "fit.fed").absent == result.absent


def test_a_site_that_was_started_again_takes_part():
    expected = logistic(connected(10**9)[0])
    partition, _ = connected(11, error=SessionError, back=True)
    with pytest.warns(DataWarning, match="was restarted in round"):
        result = logistic(partition)
    np.testing.assert_array_equal(result.params, expected.params)
    assert result.absent[0].back and LOST in result.receipt().statements


def test_later_fits_of_the_model_go_on_among_the_rest():
    partition, door = connected(11)
    model = fs.GLORE.from_formula("y ~ x", partition)
    with pytest.warns(DataWarning):
        first = model.fit()
    request = door.requested
    np.testing.assert_array_equal(model.fit().params, first.params)
    assert model.explain().passes  # a dry run sends nothing, also if later fits continue with fewer sites
    assert door.requested == request and first.evaluate().n.shape[0] == 5


def test_two_sites_lost_one_after_the_other():
    partition, _ = connected(8, quorum=4)
    other = Dying(partition.sites["s5"], 14)
    partition.engine._answer_functions["s5"] = other.answer
    with pytest.warns(DataWarning):
        result = logistic(partition)
    assert [one.site for one in result.absent] == [LOST, "s5"] and len(result.estimate.blocks) == 4
    assert result.absent[0].round < result.absent[1].round


@pytest.mark.parametrize("turn", [1, 6, 12])
def test_without_a_quorum_or_below_it_the_fit_ends(turn):
    with pytest.raises(EngineError, match="did not answer"):
        logistic(connected(turn, quorum=0)[0])
    with pytest.raises(EngineError, match="Fewer are left than the quorum of 6 sites"):
        logistic(connected(turn, quorum=6)[0])
