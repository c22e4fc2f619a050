"""A coordinator, or a dealer, that departs from the protocol of secure products.

Two sites receive different groups, or a dealer's seed serves twice: either reveals what a table of masked
numbers hides, if a site accepts the request.
"""

import json
import secrets

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for

import fedstat as fs
from fedstat.errors import DescriptionError, SecurityError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto import secure_product as secure
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.crypto.secure_product import RowFingerprints, opened_bytes
from fedstat.federation.disclosure import checks
from fedstat.federation.disclosure.facts import ProductDealer
from fedstat.federation.disclosure.site import load_families
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols import secure_products
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.product_steps import deal_shares
from fedstat.kernels.ring import fractional_bits

load_families()
N, G = 400, 20
STRICT = fs.Policy.strict(order="any")  # the requests of these tests are not part of a fit
BITS = fractional_bits(N)
RNG = np.random.default_rng(2)
COLUMNS = {"P": ["p"], "A": ["A0", "A1"], "B": ["B0", "B1"]}
FRAMES = {"P": pd.DataFrame({"k": range(N), "y": RNG.normal(size=N), "p": RNG.normal(size=N)})} | {
    c: pd.DataFrame(
        {
            "k": range(N),
            f"{c}0": np.round(RNG.lognormal(3, 1, N), 2),
            f"{c}1": (RNG.random(N) < 0.3).astype(float),
        }
    )
    for c in "AB"
}
EVERY = np.arange(N)
GROUP = np.repeat(np.arange(G), N // G)
TRUTH = FRAMES["A"][COLUMNS["A"]].to_numpy()
TRUTH = (TRUTH - TRUTH.mean(0)) / TRUTH.std(0)


def as_array(data):
    return np.frombuffer(data, dtype=np.uint8)


class Coordinator:
    """Asks sites of one session whatever it wants."""

    def __init__(self, sites, policy="open"):
        frames = {c: FRAMES[c] for c in sites}
        self.partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
        self.session = secrets.token_hex(8)
        use = np.ones(N, dtype=bool)
        for c in sites:
            text = {"terms": COLUMNS[c], "columns": COLUMNS[c], "partial": "drop"}
            self.request(
                c, "open_block", json.dumps(text | {"min_count": 5, "intercept": True}), "design", use=use
            )
            self.request(c, "stage_block", keep=use, rows=np.arange(N), n=np.array(N))
        LocalEngine(self.partition.sites).run(agree_keys(sites, self.session), Ledger())

    def request(self, site, step, text="", family="vfem", **arrays):
        request = pack_request(Request(site, family, step, arrays, self.session, text))
        return unpack_reply(self.partition.sites[site].answer(request)).arrays

    def describe(self, a, b, dealer="", number="1", groups=1, first=True, n=N):
        product = {"site_a": a, "site_b": b, "rows": n, "groups": groups}
        product |= {"columns_a": len(COLUMNS[a]), "columns_b": len(COLUMNS[b])}
        part = {"number": number, "product": product, "bits": BITS, "columns": "block", "first": first}
        return json.dumps(part | {"peer": b if first else a, "dealer": dealer}), secure.MatrixProduct(
            **product
        )

    def multiply(self, number, group_a, group_b, rows=(EVERY, EVERY), both=None):
        """A product of A and B that the coordinator deals for, with the random tables that it drew."""
        told_a, product = self.describe("A", "B", "", number, G, n=len(group_a))
        told_b, _ = self.describe("A", "B", "", number, G, first=False, n=len(group_a))
        drawn = secure.new_seed(), secure.new_seed()
        seed_a, seed_b = (
            secure.bind_seed(seed, product.digest("", number, BITS, group))
            for seed, group in zip(drawn, (group_a, group_b), strict=True)
        )
        Z_b = deal_shares(product, seed_a, seed_b, group_a)
        more = {} if both is None else {"both": both}
        dealt = as_array(drawn[0]), as_array(drawn[1] + Z_b)
        a = self.request("A", "open_product", told_a, rows=rows[0], group=group_a, dealt=dealt[0], **more)[
            "opened"
        ]
        b = self.request("B", "open_product", told_b, rows=rows[1], group=group_b, dealt=dealt[1], **more)[
            "opened"
        ]
        share_a = self.request("A", "share_product", json.dumps(number), opened=b)["share"]
        share_b = self.request("B", "share_product", json.dumps(number), opened=a)["share"]
        return share_a + share_b, secure.stream_u(product, seed_a)[:N], secure._stream_v(product, seed_b)[:N]


def rows_from_groups_that_differ():
    """Rows of A from two products; in the second, B receives chosen rows in the preceding group.

    The remaining part of group g is -(x_i - u_i) v_i' modulo 2^64, and an odd v has an inverse.
    """
    requester = Coordinator(["A", "B"])
    moved, targets = GROUP.copy(), np.arange(0, N, N // G)[1::2]
    moved[targets] -= 1
    honest, _, _ = requester.multiply("1", GROUP, GROUP)
    got, U, V = requester.multiply("2", GROUP, moved)
    found = {}
    for i in targets:
        rest, v = (got - honest)[GROUP[i]], [int(w) for w in V[i]]
        j = next((j for j in range(2) if v[j] % 2), None)
        if j is not None:
            x = [(-int(rest[a, j]) * pow(v[j] % 2**64, -1, 2**64) + int(U[i, a])) % 2**64 for a in range(2)]
            found[i] = np.ldexp(np.array([w - 2**64 if w >= 2**63 else w for w in x], float), -BITS)
    return found


def test_groups_that_two_sites_are_not_shown_alike(monkeypatch):
    with pytest.raises(SecurityError, match="A: 'B' received another product"):
        rows_from_groups_that_differ()
    # Without the comparison rows follow.
    monkeypatch.setattr(secure.MatrixProduct, "digest", lambda *reported: bytes(32))
    found = rows_from_groups_that_differ()
    assert found
    assert all(np.abs(x - TRUTH[i]).max() < 1e-4 for i, x in found.items())


def shift_of_entities():
    """Difference between the released product of A and B and that of A's entities with B's next ones."""
    rows, group = np.arange(N), GROUP[1:]
    got, _, _ = Coordinator(["A", "B"]).multiply("1", group, group, (rows[:-1], rows[1:]))
    other = FRAMES["B"][COLUMNS["B"]].to_numpy()
    other = (other - other.mean(0)) / other.std(0)
    mixed = [TRUTH[:-1][group == g].T @ other[1:][group == g] for g in range(G)]
    return np.abs(np.ldexp(got.astype(float), -2 * BITS) - mixed).max()


def test_rows_of_different_entities_are_not_multiplied(monkeypatch):
    with pytest.raises(SecurityError, match="A: the rows of this product are not of the same entities"):
        shift_of_entities()
    # Without the comparison a product mixes the rows that the coordinator chooses.
    monkeypatch.setattr(RowFingerprints, "of_same_entities", lambda *reported: True)
    assert shift_of_entities() < 1e-4


def row_from_products_that_differ(policy):
    """The product of one row of A with one of B, from two products: in one it is in another group."""
    requester, moved = Coordinator(["A", "B"], policy), GROUP.copy()
    moved[N // G] -= 1
    first, again = (requester.multiply(str(k), group, group)[0] for k, group in enumerate((GROUP, moved)))
    return np.ldexp((again - first)[0].astype(float), -2 * BITS)


def test_groups_of_two_products_do_not_differ_by_a_row():
    other = FRAMES["B"][COLUMNS["B"]].to_numpy()
    other = (other - other.mean(0)) / other.std(0)
    found = row_from_products_that_differ("open")
    np.testing.assert_allclose(found, np.outer(TRUTH[N // G], other[N // G]), atol=1e-6)
    with refused_for("differencing", site="A"):
        row_from_products_that_differ(
            fs.Policy.strict(order="any", dealer="any", discrete="any", max_share=1.0, products="any")
        )


def filled_in_for(hidden):
    """A product where A receives that B lacks some entities, and B that A lacks some."""
    requester = Coordinator(["A", "B"])
    return requester.multiply("1", GROUP, GROUP, both=~np.isin(EVERY, hidden))[0]


def test_no_entity_that_both_have_is_called_filled_in(monkeypatch):
    """The sites do not compare the owner of an entity that is filled in."""
    with pytest.raises(SecurityError, match="not of the same entities"):
        filled_in_for([3])
    monkeypatch.setattr(RowFingerprints, "of_same_entities", lambda *reported: True)
    assert filled_in_for([3]).shape == (G, 2, 2)


def test_a_dealers_seed_serves_once():
    requester, rows, seed = Coordinator(["A", "B"]), np.arange(N), as_array(secure.new_seed())
    for number in ("1", "2"):
        text, _ = requester.describe("A", "B", number=number, groups=G)
        given = {"rows": rows, "group": GROUP, "dealt": seed}
        if number == "1":
            requester.request("A", "open_product", text, **given)
            continue
        with pytest.raises(SecurityError, match="a dealer's seed came a second time"):
            requester.request("A", "open_product", text, **given)


def test_the_same_seed_in_another_session_gives_another_random_table():
    product, seed = secure.MatrixProduct("A", "B", N, 2, 2, G), secure.new_seed()
    reported = [
        ("s", "1", BITS, GROUP),
        ("t", "1", BITS, GROUP),
        ("s", "2", BITS, GROUP),
        ("s", "1", BITS, GROUP % 7),
    ]
    tables = [secure.stream_u(product, secure.bind_seed(seed, product.digest(*one)))[:N] for one in reported]
    assert not any((one == tables[0]).any() for one in tables[1:])


# ---- what is dealt ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [1, 2**20, 2**45, 2**59, 2**62])
def test_a_wrong_triple_is_found(error, monkeypatch):
    """A shift of every element stays within the range of products, and moves the estimate."""
    deal = secure.deal_triple
    monkeypatch.setattr(secure, "deal_triple", lambda *reported: deal(*reported) + np.int64(error))
    model = fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(FRAMES, on="k"))
    with pytest.raises(SecurityError, match=r"the shares of|its checksum says"):
        model.fit()


def test_without_a_checksum_a_wrong_triple_moves_the_estimate(monkeypatch):
    model = fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(FRAMES, on="k"))
    right, deal = model.fit(), secure.deal_triple
    monkeypatch.setattr(secure_products, "check_product", lambda *reported: None)
    monkeypatch.setattr(secure, "deal_triple", lambda *reported: deal(*reported) + np.int64(40 * 4**BITS))
    assert ((model.fit().params - right.params) / right.bse).abs().max() > 1


# ---- who deals -------------------------------------------------------------------------------------


def columns_from_a_dealer(dealer, policy="open", first="A"):
    """A's columns, if the coordinator runs P and chooses the dealer for A and P; A receives `first`."""
    requester, seed = Coordinator(["A", "B", "P"], policy), secure.new_seed()
    keys = requester.partition.sites["P"].states[requester.session].look_at("keys")
    text, product = requester.describe("A", "P", dealer)
    text = text.replace('"site_a": "A"', f'"site_a": "{first}"')
    group, rows = np.zeros(N, dtype=np.int64), np.arange(N)
    dealt = SealedChannel(keys, "A", "deal 1").seal(seed) if dealer else seed
    box = requester.request("A", "open_product", text, rows=rows, group=group, dealt=as_array(dealt))[
        "opened"
    ]
    E = np.frombuffer(
        SealedChannel(keys, "A", "open 1").open(box.tobytes())[32 + opened_bytes(N) :], np.int64
    ).reshape(N, 2)
    seed = secure.bind_seed(seed, product.digest(requester.session if dealer else "", "1", BITS, group))
    return np.ldexp((E + secure.stream_u(product, seed)[:N]).astype(float), -BITS)


def test_the_coordinator_deals_where_the_owner_allows_it_alone():
    """It sits at the other institution here, and has the columns of the first one."""
    assert np.abs(columns_from_a_dealer("") - TRUTH).max() < 1e-4
    with pytest.raises(DescriptionError, match=r'A: its policy \(dealer\) .* dealer = "any"'):
        columns_from_a_dealer("", STRICT)


def test_neither_site_of_a_product_deals(monkeypatch):
    for policy in ("open", STRICT):
        for dealer in ("P", "A"):
            with pytest.raises(SecurityError, match=f"A: '{dealer}' would deal"):
                columns_from_a_dealer(dealer, policy)
    with pytest.raises(fs.errors.MessageError, match="'X' and 'P' is not one with 'P'"):
        columns_from_a_dealer("P", first="X")
    monkeypatch.setitem(checks.FACT_CHECKS, ProductDealer, lambda *reported: None)
    assert np.abs(columns_from_a_dealer("P") - TRUTH).max() < 1e-4


@pytest.mark.parametrize("kind", [fs.VFEMRegression, fs.VerticalGLM])
def test_a_third_site_deals_by_default(kind):
    for coordinator in (None, "apart"):
        partition = fs.ClientPartition.from_frames(FRAMES, on="k", policy="strict")
        result = kind.from_formula("y ~ .", partition, coordinator=coordinator).fit()
        assert np.isfinite(result.params).all()
    two = fs.ClientPartition.from_frames({c: FRAMES[c] for c in "PA"}, on="k", policy="strict")
    with pytest.raises(DescriptionError, match='dealer = "any"'):
        kind.from_formula("y ~ .", two).fit()
    rule = fs.Policy.strict(dealer="any")
    two = fs.ClientPartition.from_frames({c: FRAMES[c] for c in "PA"}, on="k", policy=rule)
    assert np.isfinite(kind.from_formula("y ~ .", two).fit().params).all()


def test_the_packaged_example_fits_under_the_strict_policy():
    partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id", policy="strict")
    result = fs.VFEMRegression.from_formula("NPGR ~ .", partition).fit()
    assert "coordinator" not in set(result.dealers["dealer"])
