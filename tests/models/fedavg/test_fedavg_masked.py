"""Masked updates: the run is that in clear, and no site's update is seen."""

import numpy as np
import pytest
from descent import FRAME, SITES, F, fit, model, run

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, pack_request, unpack_reply, unpack_request
from fedstat.federation.protocols.engine import LocalEngine

KINDS = (fs.FedAvg, fs.FedAvgM, fs.QFedAvg, fs.FedProx)
BATCHES = {"rounds": 8, "local_epochs": 2, "batch_size": 8, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), (KINDS[0], {"fraction": 0.75}), (KINDS[-1], {"standardize": True})],
)
def test_the_run_is_that_unmasked(kind, options):
    hidden, clear = (fit(kind, masked=masked, **BATCHES, **options) for masked in (True, False))
    assert hidden._fit.masked and not clear._fit.masked
    np.testing.assert_allclose(hidden.params, clear.params, rtol=0, atol=1e-13)
    np.testing.assert_allclose(hidden.distance, clear.distance, rtol=1e-9)
    np.testing.assert_allclose(hidden._fit.to_go, clear._fit.to_go, rtol=1e-9)
    np.testing.assert_allclose(hidden.trace, clear.trace, rtol=1e-12)
    for statement in ("llf", "deviance", "pearson_chi2", "df_resid"):
        np.testing.assert_allclose(getattr(hidden, statement), getattr(clear, statement), rtol=1e-12)


def test_the_family_of_counts_is_served_as_well():
    known = {"known": {"family": F.Poisson(), "exposure": "days"}, "formula": "count ~ z + C(g)"}
    hidden, clear = (
        fit(fs.QFedAvg, masked=masked, rounds=20, learning_rate=1e-3, q=3.0, **known)
        for masked in (True, False)
    )
    np.testing.assert_allclose(hidden.params, clear.params, rtol=1e-11)


class Spied:
    """A site whose replies are kept, as the coordinator receives them."""

    def __init__(self, site, seen):
        self.site, self.seen = site, seen

    def answer(self, request):
        reply = self.site.answer(request)
        self.seen.append((unpack_request(request), unpack_reply(reply)))
        return reply


def spy_on(model):
    """Replies of all sites from now on."""
    seen = []
    model.engine = LocalEngine({name: Spied(site, seen) for name, site in model.partition.sites.items()})
    return seen


@pytest.mark.parametrize("fraction", [1.0, 0.75])
@pytest.mark.parametrize("kind", KINDS)
def test_no_update_of_a_site_reaches_the_coordinator(kind, fraction):
    """Messages do not even show which sites were silent in a round: every number looks random."""
    one = model(kind)
    seen = spy_on(one)
    run(one, rounds=4, fraction=fraction)
    replies = [(request, reply) for request, reply in seen if reply.arrays]
    assert sum(request.step == "run_epochs" for request, _ in replies) == 4 * len(SITES)
    for request, reply in replies:
        assert request.masked is not None
        for array in reply.arrays.values():
            assert array.dtype == np.int64 and np.abs(array.ravel()).max() > 2**40


@pytest.mark.parametrize(("fraction", "hidden"), [(1.0, True), (0.75, True), (0.5, False), (0.01, False)])
def test_masks_are_used_where_three_sites_are_drawn(fraction, hidden):
    result = fit(fs.FedAvg, rounds=2, fraction=fraction)
    assert result._fit.masked == hidden
    assert result.trace["sites"].tolist()[:2] == [round(4 * fraction) or 1] * 2
    text = " ".join(str(result.summary(notes="all")).split())
    assert ("Updates and sums were masked over 4 sites" in text) == hidden
    if not hidden:
        with pytest.raises(ModelError, match=r"masked: fraction=.* draws . of 4 sites in a round"):
            fit(fs.FedAvg, rounds=2, fraction=fraction, masked=True)


def test_owners_who_let_nothing_but_masked_sums_leave_are_served():
    policies = dict.fromkeys(SITES, Policy(masked_only=True, refused_kinds=frozenset({"aggregate"})))
    sites = fs.ClientPartition.from_frame(FRAME, by="site", policies=policies)
    one = fs.FedAvg.from_formula("binary ~ x", sites)
    assert run(one, rounds=2)._fit.masked
    with pytest.raises(PolicyError):
        run(one, rounds=2, masked=False)


def test_the_loss_of_a_site_is_not_known():
    with pytest.raises(NotAvailableError, match=r"no loss by site: .*fit\(masked=False\)"):
        _ = fit(fs.FedAvg, rounds=1).site_loss


def test_a_loss_of_zero_has_no_powers():
    frame = FRAME.assign(none=np.where(FRAME["site"] == "S1", 0.0, FRAME["gauss"]))
    known = {"formula": "none ~ 1", "frame": frame, "known": {"family": F.Gaussian()}, "rounds": 1}
    with pytest.raises(EstimationError, match=r"site 'S1', round 1: .*not positive; set q = 0"):
        fit(fs.QFedAvg, q=1.0, **known)


def test_coefficients_that_leave_one_row_are_answered_by_nothing():
    one = model(fs.FedAvg, "binary ~ x")
    run(one, rounds=1, masked=False)
    second, first = np.sort(FRAME.loc[FRAME["site"] == "S1", "x"].to_numpy())[-2:]
    slope = 200.0 / (first - second)
    beta = np.array([-slope * first, slope])  # the linear predictor is 0 at one row, -200 or less at others
    request = Request("S1", "fedavg", "sum_scores", {"beta": beta}, one._session)
    found = unpack_reply(one.partition.sites["S1"].answer(pack_request(request))).arrays
    assert not found["spread"] and not found["score"].any() and not found["information"].any()


@pytest.mark.parametrize("masked", [True, False])
def test_where_a_site_gives_no_score_the_distance_is_not_known(masked):
    second, first = np.sort(FRAME.loc[FRAME["site"] == "S1", "x"].to_numpy())[-2:]
    slope = 200.0 / (first - second)
    at = {"init": [-slope * first, slope], "rounds": 1, "learning_rate": 1e-12, "masked": masked}
    result = fit(fs.FedAvg, formula="binary ~ x", **at)
    assert np.isinf(result.distance).all() and not result.converged
    assert np.isfinite(result.deviance)


@pytest.mark.parametrize("fraction", [1.0, 0.75])
def test_the_summary_says_what_rounds_of_different_sites_reveal(fraction):
    text = " ".join(str(fit(fs.FedAvg, rounds=2, fraction=fraction).summary(notes="all")).split())
    assert ("Rounds drew different sites" in text) == (fraction < 1.0)
