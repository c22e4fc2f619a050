"""Attacks of a coordinator that departs on releases with noise: each once got more than was charged for."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from noisy_counts import BinsRequest, counting  # noqa: F401

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import DescriptionError, FedstatError, PolicyError, SecurityError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto import secure_product as secure
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.disclosure.privacy_budget import NoiseMechanism
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.product_steps import ProductPart, as_bytes, deal_shares
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.request import (
    PLACES,
    FirstRequest,
    MarginsRequest,
    PatternRequest,
    PatternSumsRequest,
)
from fedstat.models.copula_glm.request import MomentsRequest

N = 60
FREE = 2**90
"""A variance at which an answer costs next to nothing, and says next to nothing."""
FAIR = 2**65
"""One at which products of scores cost about one."""
FRAME = pd.DataFrame({"a": np.arange(N) % 2, "b": np.arange(N) % 3, "c": np.arange(N) % 2})
HELD = {"A": ["a"], "B": ["b"], "C": ["c"]}
ALL, NONE = np.ones(N, dtype=np.bool_), np.zeros(N, dtype=np.int64)


class Departing:
    """A coordinator that asks whatever it likes of three institutions, each with a column and a budget."""

    def __init__(self, frame=FRAME, budget=50.0, **rules):
        policy = fs.Policy(privacy=fs.Budget(budget, 1e-6), **rules)
        self.partition = fs.ClientPartition.from_frame(frame, columns=HELD, policy=policy)
        self.sites = dict(self.partition.sites)
        LocalEngine(self.sites).run(agree_keys(tuple(self.sites), "s"), Ledger())

    def request(self, site, step, text="", family="copula", **arrays):
        question = Request(site, family, step, arrays, "s", text)
        return unpack_reply(self.sites[site].answer(pack_request(question))).arrays

    def margins(self, site, bins, keep=ALL, family="copula", variance=FREE):
        self.request(site, "find_complete", to_json([one.name for one in bins]), family)
        request = to_json(FirstRequest(MarginsRequest(tuple(bins), variance, variance)))
        return self.request(site, "release_margins", request, family, keep=keep)

    def gram(self, site, request, levels, family="copula", group=NONE):
        even = np.concatenate([np.full(k, 1.0 / k) for k in levels])
        return self.request(site, "release_gram", to_json(request), family, probabilities=even, group=group)

    def open(
        self, number, pair, columns=("scaled scores", "scores"), widths=(1, 1), family="copula", bits=PLACES
    ):
        """Open a product of two institutions, for which the coordinator deals: what each is to be shown."""
        product = secure.MatrixProduct(*pair, N, 1, 1, 1)
        digest = product.digest("", number, bits, NONE)
        seeds = secure.new_seed(), secure.new_seed()
        Z_b = deal_shares(product, *(secure.bind_seed(seed, digest) for seed in seeds), NONE)
        opened = []
        for k, dealt in enumerate((seeds[0], seeds[1] + Z_b)):
            part = ProductPart(number, product, bits, columns[k], k == 0, pair[1 - k], "")
            found = self.request(
                pair[k], "open_product", to_json(part), family,
                rows=np.arange(N), group=NONE, dealt=as_bytes(dealt),
            )  # fmt: skip
            opened.append(found["opened"])
        return opened

    def share(self, number, pair, opened, family="copula"):
        text = json.dumps(number)
        both = [
            self.request(site, "share_product", text, family, opened=one)["share"]
            for site, one in zip(pair, opened[::-1], strict=True)
        ]
        return sum(part.view(np.uint64) for part in both).view(np.int64)


def bins(name, levels):
    return Bins(name, tuple(range(levels)))


def sums(peers, scale=1, variance=FAIR):
    return PatternSumsRequest(
        dict.fromkeys(peers, 1), 1, variance, (PatternRequest(tuple(peers), scale),), False
    )


def test_a_product_of_two_sites_who_were_reported_different_scales():
    """A multiplies by 64, as it knows; B is charged for one, and moved by 64 times what it pays for."""
    to = Departing()
    for site, scale in (("A", 64), ("B", 1)):
        to.margins(site, [bins(site.lower(), 3)])
        to.gram(site, sums("AB".replace(site, ""), scale, FAIR * scale**2), [3])
    number = sums("B").agreed
    with pytest.raises(FedstatError, match=r"planned|other keys|foreign"):
        to.share(f"{number}0", "AB", to.open(f"{number}0", "AB"))


def test_a_product_of_two_sites_who_were_reported_different_scores():
    """B's row, as the response of a model, may be longer than A was charged for in a synthesis."""
    to = Departing()
    to.margins("A", [bins("a", 2)])
    to.gram("A", sums("B"), [2])
    to.margins("B", [bins("b", 2)], family="copula_glm")
    request = MomentsRequest({"A": 1}, 1, FAIR, "B", "B", "Binomial", ())
    to.gram("B", request, [2], "copula_glm")
    for number in (request.agreed, sums("B").agreed):
        with pytest.raises(FedstatError, match=r"planned|other keys|foreign"):
            to.share(number, "AB", to.open(number, "AB"))


def test_a_site_that_is_reported_that_it_is_another():
    """As holder of the response, which A takes C to be, B's row would be longer than A was charged for."""
    to = Departing()
    to.margins("B", [bins("b", 2)], family="copula_glm")
    with pytest.raises(DescriptionError, match="B: the request is for products of 'C'"):
        to.gram("B", MomentsRequest({"A": 1}, 1, FAIR, "C", "C", "Binomial", ()), [2], "copula_glm")


def test_a_product_that_was_opened_under_an_earlier_release():
    """Opened with scores times 64 under much noise, shared under a release without scale and with little."""
    to = Departing()
    for site in "AB":
        to.margins(site, [bins(site.lower(), 3)])
        to.gram(site, sums("AB".replace(site, ""), 64, FREE), [3])
    agreed = sums("B", 64).agreed
    opened = to.open(agreed, "AB")
    for site in "AB":
        to.gram(site, sums("AB".replace(site, ""), 1, FAIR), [3])
    with pytest.raises(PolicyError, match="refused"):
        to.share(agreed, "AB", opened)
    assert [charge.what.split()[2] for charge in to.sites["B"].site_ledger.charges.made[-1:]] == ["grams:"]


@pytest.mark.parametrize("levels", [3, 5])
def test_a_refusal_that_rows_decide(levels):
    """A binary response with three levels: an error revealed, at no charge, whether a row has the third."""
    reported = []
    for last in (1, 2):
        to = Departing(FRAME.assign(b=[*[0, 1] * (N // 2 - 1), 0, last]), min_count=1)
        keep = np.arange(N) == N - 1
        to.margins("B", [bins("b", levels)], keep, "copula_glm")
        with pytest.raises(FedstatError) as refused:
            request = MomentsRequest({"A": 1}, 1, FREE, "B", "B", "Binomial", ())
            to.gram("B", request, [levels], "copula_glm", np.where(keep, 0, -1))
        reported.append((type(refused.value), str(refused.value), dict(to.sites["B"].site_ledger.refusals)))
    assert reported[0] == reported[1] and reported[0][0] is DescriptionError


@pytest.mark.parametrize("bits", [PLACES - 1, 31, 40, 60])
def test_more_places_than_squares_have_room_for(bits):
    """The squares of scores overflow in many places, depending on the rows; the error revealed in which."""
    to = Departing()
    to.margins("A", [bins("a", 2)])
    to.gram("A", sums("B", variance=FREE), [2])
    before = dict(to.sites["A"].site_ledger.refusals)
    with pytest.raises(DescriptionError, match="planned"):
        to.open(sums("B").agreed, "AB", bits=bits)
    assert before == to.sites["A"].site_ledger.refusals


def test_large_sums_of_squares_are_no_reason_to_refuse(monkeypatch):
    """With many entities even planned squares overflow or not, as rows are; products do not."""
    monkeypatch.setattr("fedstat.kernels.ring.LARGEST_SQUARES", 1.0)
    to = Departing()
    for site in "AB":
        to.margins(site, [bins(site.lower(), 3)])
        to.gram(site, sums("AB".replace(site, "")), [3])
    agreed = sums("B").agreed
    assert to.share(agreed, "AB", to.open(agreed, "AB")).shape == (1, 1, 1)


def test_marks_by_which_a_peer_knows_columns_again(monkeypatch):
    """Scores that differ in an empty bin have the same marks; here no marks are sent."""
    sealed, lengths, seal = [], [], SealedChannel.seal
    monkeypatch.setattr(SealedChannel, "seal", lambda self, m: (sealed.append(len(m)), seal(self, m))[1])
    for discrete in ("any", "bits"):
        to = Departing(discrete=discrete)
        for site in "AB":
            to.margins(site, [bins(site.lower(), 3)])
            to.gram(site, sums("AB".replace(site, "")), [3])
        sealed.clear()
        to.open(sums("B").agreed, "AB")
        lengths.append(list(sealed))
    assert lengths[0] == lengths[1]


def test_a_share_for_one_peer_leaves_once():
    to = Departing()
    for site in "AB":
        to.margins(site, [bins(site.lower(), 3)])
        to.gram(site, sums("AB".replace(site, "")), [3])
    agreed = sums("B").agreed
    opened = to.open(f"{agreed}0", "AB"), to.open(f"{agreed}1", "AB")
    to.share(f"{agreed}0", "AB", opened[0])
    with pytest.raises(DescriptionError, match="planned"):
        to.share(f"{agreed}1", "AB", opened[1])


def test_groups_by_the_billion():
    to = Departing()
    to.margins("B", [bins("b", 2)], family="copula_glm")
    with pytest.raises(DescriptionError, match="groups"):
        to.gram("B", MomentsRequest({"A": 1}, 10**9, FREE, "B", "B", "Binomial", ()), [2], "copula_glm")


ODD = [10**400, "ten", [1], {"a": 1}, 1j, np.void(b"abc"), b"3", np.timedelta64(1, "D")]


@pytest.mark.parametrize("value", ODD, ids=[type(value).__name__ + str(i) for i, value in enumerate(ODD)])
def test_no_value_is_an_error_or_moves_others(value):
    """One record, whatever it holds, moves counts by one in two cells: noise pays for no more."""
    found = []
    for one in (0, value):
        column = pd.Series([*FRAME["b"][:-1], one], dtype=object)
        sites = Departing(FRAME.assign(b=column), budget=1e6)
        trees = Bins("b", (), (0.0, 3.0), depth=5)
        for some in (bins("b", 3), trees):
            exact = some.tally(some.code(column))
            sites.margins("B", [some], column.notna().to_numpy(), variance=1)
            found.append(exact)
    for before, after in zip(found[:2], found[2:], strict=True):
        assert np.square(before - after).sum() <= 10 and np.abs(before - after).max() <= 1


@pytest.mark.parametrize("levels", [(0, 1, 2), ("0", "1", "2"), (False, True)])
def test_text_in_one_cell_of_a_file_makes_text_of_all(levels, tmp_path):
    """A cell that is no number turns a column of a file into text: the others count as they did."""
    counts = []
    for last in ("1", "not known"):
        path = tmp_path / "table.csv"
        cells = [str(x) for x in ([True, False] if levels[0] is False else [0, 1, 2]) * 20][:-1]
        path.write_text("\n".join(["b", *cells, last]))
        column = pd.read_csv(path)["b"]
        counts.append(Bins("b", levels).tally(Bins("b", levels).code(column)))
    moved = counts[0] - counts[1]
    assert np.abs(moved).sum() <= 1


def test_text_in_one_cell_moves_no_count_of_numbers():
    """The same for a single margin with bins chosen by the analyst, apart from a negligible noise."""
    answers = []
    for last in ("2", "many"):
        frame = pd.DataFrame({"x": [*map(str, [0.5, 1.5] * 30), last]})
        policy = fs.Policy(privacy=fs.Budget(1e9, 1e-6))
        request = to_json(BinsRequest("x", "50", (1.0,)))
        site = Site("A", frame[["x"]], policy, published={"x": PublishedColumn("number", (0.0, 9.0))})
        reply = unpack_reply(
            site.answer(pack_request(Request("A", "margins", "count_bins", {}, "s", request)))
        )
        answers.append(reply.arrays["counts"].tolist())
    assert answers == [[30, 31], [30, 30]]


def test_what_is_charged_is_of_the_scores_that_leave(monkeypatch):
    """Every share has noise, of the variance of the release under which it was opened."""
    reported = []
    add = NoiseMechanism.add

    def watch(self, request, step, owed, arrays):
        reported.extend(
            (self.site, request.step, name, one.variance) for name, one in owed.items() if name in arrays
        )
        return add(self, request, step, owed, arrays)

    monkeypatch.setattr(NoiseMechanism, "add", watch)
    to = Departing()
    for site in "AB":
        to.margins(site, [bins(site.lower(), 3)])
        to.gram(site, sums("AB".replace(site, ""), variance=2 * FAIR), [3])
    agreed = sums("B").agreed
    to.share(agreed, "AB", to.open(agreed, "AB"))
    shares = [one for one in reported if one[1] == "share_product"]
    assert shares == [(site, "share_product", "share", Fraction(2 * FAIR)) for site in "AB"]


def test_a_dealer_that_is_a_party_is_refused():
    to = Departing()
    to.margins("A", [bins("a", 2)])
    to.gram("A", sums("B"), [2])
    product = secure.MatrixProduct("A", "B", N, 1, 1, 1)
    part = ProductPart(sums("B").agreed, product, PLACES, "scaled scores", True, "B", "B")
    with pytest.raises(SecurityError, match="deal"):
        to.request("A", "open_product", to_json(part), rows=np.arange(N), group=NONE, dealt=as_bytes(b""))
