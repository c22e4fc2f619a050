"""A coordinator that says a site is lost: what it has of that site by subtraction, and a rule against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, EngineError, PartitionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.horizontal_design import moment_requests, open_requests
from fedstat.federation.disclosure.differencing import MaskedSites, isolates_sites
from fedstat.federation.disclosure.request_checks import check_mask
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.masked_sums import masked_protocol

NAMES = ("A", "B", "C", "D", "E")


def patients():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(size=200), "h": np.repeat(NAMES, 40)})
    return frame.assign(y=(rng.random(200) < 0.4).astype(int))


def hospitals(**rules):
    return fs.ClientPartition.from_frame(patients(), by="h", policy=fs.Policy.strict(**rules))


def moments(model, sites):
    """The sums with which any fit begins, over some sites."""
    rows = replace(model.agreement, sites=tuple(row for row in model.agreement.sites if row.site in sites))
    session = "-".join(("s", *sites))

    def protocol():
        replies = yield open_requests(rows, session) + moment_requests(rows, session)
        return np.sum([reply.arrays["moments"] for reply in replies[len(sites) :]], axis=0)

    return LocalEngine(model.partition.sites).run(masked_protocol(protocol(), sites, session), Ledger())


def test_a_site_that_is_said_to_be_lost_is_reported_by_subtraction():
    """Only the coordinator knows whether E answered, or answered late."""
    model = fs.GLORE.from_formula("y ~ x", hospitals())
    of_all, of_rest = moments(model, NAMES), moments(model, NAMES[:4])
    x = patients().query("h == 'E'")["x"]
    np.testing.assert_allclose((of_all - of_rest)[:2, -1], [len(x), x.sum()], rtol=1e-12)


def test_with_the_rule_the_others_do_not_answer_for_the_second_sum():
    model = fs.GLORE.from_formula("y ~ x", hospitals(apart=2))
    moments(model, NAMES)
    with pytest.raises(DescriptionError, match=r"\(apart\) refuses a masked sum over 4.*apart = 1"):
        moments(model, NAMES[:4])
    # and not in another session either; without two the sums may differ
    again = fs.GLORE.from_formula("y ~ x", model.partition)
    with pytest.raises(DescriptionError, match="apart"):
        moments(again, ("A", "B", "C", "E"))
    moments(again, ("A", "B", "C"))


def test_one_site_with_the_rule_is_enough():
    policies = {"B": fs.Policy.strict(apart=2)}
    partition = fs.ClientPartition.from_frame(patients(), by="h", policy="strict", policies=policies)
    model = fs.GLORE.from_formula("y ~ x", partition)
    moments(model, NAMES)
    with pytest.raises(DescriptionError, match=r"B: its policy .apart."):
        moments(model, NAMES[:4])
    moments(model, ("A", "C", "D"))  # without it the others do as they please


def test_a_fit_does_not_go_on_where_an_owner_has_the_rule():
    complete = hospitals(apart=2)

    class Dying:
        policy = complete.sites["E"].policy
        requested = 0

        def answer(self, request):
            self.requested += 1
            if self.requested > 7:
                raise EngineError("'E' did not answer within 1 s")
            return complete.sites["E"].answer(request)

    partition = replace(complete, _engine=LocalEngine({**complete.sites, "E": Dying()}), quorum=3)
    with pytest.warns(fs.errors.DataWarning), pytest.raises(DescriptionError, match="apart"):
        fs.GLORE.from_formula("y ~ x", partition).fit()


def test_what_sums_can_be_combined_to_counts_and_not_pairs_alone():
    b, c, d = ("b1", "b2", "b3"), ("c1", "c2", "c3"), ("d1", "d2", "d3")
    lists = [("A", *b, *c), ("A", *b, *d), ("A", *c, *d), ("A", *b, *c, *d)]
    assert not any(isolates_sites([one, two], 3) for one in lists for two in lists)
    assert isolates_sites(lists, 3)  # the first three less twice the last: A
    assert not isolates_sites(lists[:3], 3)
    assert isolates_sites([("A", "B")], 3) and not isolates_sites([("A", "B")], 2)


def test_lists_are_remembered_beyond_the_process():
    model = fs.GLORE.from_formula("y ~ x", hospitals(apart=2))
    moments(model, NAMES)
    for site in model.partition.sites.values():
        assert site.site_ledger.records(MaskedSites) == {MaskedSites(tuple(NAMES))}


@pytest.mark.parametrize("quorum, least", [(5, 5), (0.9, 5), (1.0, 5), (4, 4), (0.61, 4)])
def test_a_sum_over_fewer_than_the_quorum_is_refused(quorum, least):
    model = fs.GLORE.from_formula("y ~ x", hospitals(quorum=quorum))
    moments(model, NAMES[:least])
    with pytest.raises(DescriptionError, match=rf"\(quorum\) requires at least {least} sites"):
        moments(model, NAMES[: least - 1])


def test_a_share_of_sites_is_what_its_owner_wrote():
    policy = fs.Policy.strict(quorum=0.55)
    check_mask("A", policy, 55, 100)
    with pytest.raises(DescriptionError, match="at least 55 sites of the 100"):
        check_mask("A", policy, 54, 100)


@pytest.mark.parametrize("rule", [{"quorum": -1}, {"quorum": 1.5}, {"quorum": True}, {"apart": 0}])
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(PartitionError, match=next(iter(rule))):
        fs.Policy(**rule)
