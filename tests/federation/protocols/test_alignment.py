"""Private alignment: the links of an alignment in clear, and nothing of a key outside its site."""

import itertools
import time

import numpy as np
import pandas as pd
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstat.errors import DesignError, MessageError, PartitionError, PolicyError, SecurityError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.site import Policy, Site
from fedstat.federation.message import Reply, Request, pack_request, unpack_reply
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols import linkage
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.linkage import FAMILY, align_entities
from fedstat.federation.tables.keys import KeyTable, as_points, as_tokens, raise_points

PRIME = 2**255 - 19


# ---- the map: a ladder in plain numbers as the oracle ----------------------------------------------------


def ladder(scalar, u):
    """x(scalar * P) for x(P) = u, RFC 7748, section 5."""
    x1, x2, z2, x3, z3 = u, 1, 0, u, 1
    for bit in reversed(range(255)):
        if scalar >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        e = a * a - b * b
        x3, z3 = pow(d * a + c * b, 2, PRIME), x1 * pow(d * a - c * b, 2, PRIME) % PRIME
        x2, z2 = a * a * b * b % PRIME, e * (a * a + 121665 * e) % PRIME
        if scalar >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return x2 * pow(z2, PRIME - 2, PRIME) % PRIME


def clamped(private):
    data = bytearray(private.private_bytes_raw())
    data[0] &= 248
    data[31] = data[31] & 127 | 64
    return int.from_bytes(data, "little")


def on_curve(u):
    return pow(u**3 + 486662 * u**2 + u, (PRIME - 1) // 2, PRIME) == 1


def hashed(n=40, site="A"):
    return KeyTable(site, pd.DataFrame({"id": range(n)}), ["id"]).points(b"salt")


def test_raising_is_scalar_multiplication_on_the_curve_and_on_its_twist():
    scalar, points = X25519PrivateKey.generate(), hashed()
    sides = set()
    for before, after in zip(points, raise_points("A", points, scalar), strict=True):
        u, raised = (int.from_bytes(point.tobytes(), "little") for point in (before, after))
        assert raised == ladder(clamped(scalar), u % 2**255 % PRIME)
        assert on_curve(raised) == on_curve(u % 2**255 % PRIME)
        sides.add(on_curve(raised))
    assert sides == {True, False}


def test_raising_commutes_and_keeps_different_points_different():
    a, b, points = X25519PrivateKey.generate(), X25519PrivateKey.generate(), hashed(300)
    both = raise_points("A", raise_points("A", points, a), b)
    np.testing.assert_array_equal(both, raise_points("A", raise_points("A", points, b), a))
    assert len(np.unique(as_tokens(both))) == 300


@pytest.mark.parametrize("u", [0, 1, PRIME - 1, PRIME])
def test_points_of_small_order_are_refused(u):
    with pytest.raises(SecurityError, match="A: a point of small order"):
        raise_points("A", as_points(u.to_bytes(32, "little")), X25519PrivateKey.generate())


# ---- the same links as in clear --------------------------------------------------------------------------


def tables(seed, make_key, n=60, sites="ABC"):
    """Shuffled tables over partly common keys; every cell is of one client and entity only."""
    rng = np.random.default_rng(seed)
    frames = {}
    for site in sites:
        entities = rng.permutation(n)[: rng.integers(n // 2, n)]
        value = rng.normal(size=len(entities))
        frames[site] = make_key(pd.DataFrame({"e": entities}), site).assign(**{f"x{site}": value})
    frames[sites[0]].loc[:4, f"x{sites[0]}"] = np.nan  # records that hold a key and nothing else
    return frames


def complete(frame, site):
    """Whole numbers of another width at every client, and numpy's own as objects."""
    ids = frame["e"] - 7
    if site == "C":
        return pd.DataFrame({"id": pd.Series(list(ids.to_numpy()), dtype=object)})
    return pd.DataFrame({"id": ids.astype({"A": "int64", "B": "int16"}.get(site, "Int32"))})


def text(frame, site):
    names = frame["e"].map("Jürgen {}".format)
    return pd.DataFrame({"id": names.astype("category") if site == "B" else names})


def two_columns(frame, site):
    return pd.DataFrame({"firm": frame["e"] // 7, "year": (frame["e"] % 7).map("Y{}".format)})


def ambiguous(frame, site):
    """Pairs of text that would be alike if they were put together without their lengths."""
    return pd.DataFrame(
        {"a": frame["e"].map(lambda e: "x" * (e + 1)), "b": frame["e"].map(lambda e: "x" * (61 - e))}
    )


def decimal(frame, site):
    """Zero is minus zero at A."""
    return pd.DataFrame({"id": -(3.0 - frame["e"]) * 0.25 if site == "A" else (frame["e"] - 3) * 0.25})


def dates(frame, site):
    days = pd.Timestamp("1960-01-01") + pd.to_timedelta(frame["e"] * 300, unit="D")
    return pd.DataFrame({"id": days.astype("datetime64[s]" if site == "A" else "datetime64[ns]")})


def links(partition):
    """Which records are of one entity, whatever the entities are called."""
    found = {}
    for site, frame in partition.frames.items():
        for entity, row in zip(partition.rows[site], frame.to_numpy(), strict=True):
            found.setdefault(int(entity), set()).add((site, *row))
    return set(map(frozenset, found.values()))


@pytest.mark.parametrize("clients", ["AB", "ABC", "ABCDE"])
@pytest.mark.parametrize("make_key", [complete, text, two_columns, ambiguous, decimal, dates])
def test_records_are_linked_as_unmasked(make_key, clients):
    frames = tables(3, make_key, sites=clients)
    key = [name for name in frames["A"].columns if name != "xA"]
    clear, private = (ClientPartition.from_frames(frames, on=key, align=how) for how in ("clear", "private"))
    assert links(private) == links(clear) and len(links(clear)) > 50
    assert private.n_entities == clear.n_entities and private.empty_rows == clear.empty_rows
    assert private.entities.equals(pd.RangeIndex(clear.n_entities))
    for site in clients:
        assert np.all(np.diff(private.rows[site]) > 0) and private.columns[site] == clear.columns[site]
    assert (private.describe().patterns.to_numpy() == clear.describe().patterns.to_numpy()).all()


def test_clear_is_the_default_and_private_is_for_the_vertical_layout():
    frames = tables(0, complete)
    pd.testing.assert_index_equal(
        ClientPartition.from_frames(frames, on="id").entities,
        ClientPartition.from_frames(frames, on="id", align="clear").entities,
    )
    with pytest.raises(PartitionError, match="align must be one of 'clear', 'private', received 'secret'"):
        ClientPartition.from_frames(frames, on="id", align="secret")
    with pytest.raises(PartitionError, match="align='private' is for the vertical layout"):
        ClientPartition.from_frames(frames, layout="horizontal", align="private")
    with pytest.raises(PartitionError, match="A: there is no other site"):
        ClientPartition.from_frames({"A": frames["A"]}, on="id", align="private")


def test_no_common_entity_and_all_common():
    a = pd.DataFrame({"id": [3, 1, 2], "x": [1.0, 2.0, 3.0]})
    for keys, n in (([7, 8, 9], 6), ([1, 2, 3], 3)):
        frames = {"A": a, "B": pd.DataFrame({"id": keys, "y": [4.0, 5.0, 6.0]})}
        assert ClientPartition.from_frames(frames, on="id", align="private").n_entities == n


# ---- the way of the messages -----------------------------------------------------------------------------


def open_sites(ids, policies=None):
    keys = {c: KeyTable(c, pd.DataFrame({"id": values}), ["id"]) for c, values in ids.items()}
    sites = {c: Site(c, table, (policies or {}).get(c)) for c, table in keys.items()}
    fingerprints = {c: site.trust.identity.public.fingerprint for c, site in sites.items()}
    for site in sites.values():
        site.trust.pinned.update(fingerprints)
    return keys, sites


class Spy(LocalEngine):
    """Return the messages that the coordinator sees."""

    def __init__(self, sites):
        super().__init__(sites)
        self.seen = []

    def _send(self, request, ledger):
        reply = super()._send(request, ledger)
        self.seen.append((request, reply))
        return reply


IDS = {"A": [5, 1, 9, 12], "B": [9, 2, 5], "C": [30, 9, 1, 5, 31]}


SALT = bytes(range(100, 132))


@pytest.fixture
def drawn(monkeypatch):
    """The secret scalars, in the order in which the sites draw them; the salt is :data:`SALT`."""
    scalars = []

    class Recorded(X25519PrivateKey):
        @classmethod
        def generate(cls):
            scalars.append(X25519PrivateKey.generate())
            return scalars[-1]

    monkeypatch.setattr(linkage, "X25519PrivateKey", Recorded)
    monkeypatch.setattr(linkage.secrets, "token_bytes", lambda size: SALT[:size])
    return scalars


def test_tokens_are_hashes_raised_by_all_scalars_and_by_no_fewer(drawn):
    keys, sites = open_sites(IDS)
    spy = Spy(sites)
    spy.run(align_entities(tuple(sites), "s"), Ledger())
    tokens = [reply.arrays["tokens"] for request, reply in spy.seen if request.step == "show_tokens"]
    points = np.concatenate([keys[c].points(SALT) for c in ("B", "C", "A")])
    assert {len(drawn), len(IDS)} == {3}
    for size in range(4):
        for subset in itertools.combinations(drawn, size):
            raised = points
            for scalar in subset:
                raised = raise_points("", raised, scalar)
            common = set(as_tokens(raised).tolist()) & set(as_tokens(np.concatenate(tokens)).tolist())
            assert len(common) == (7 if size == 3 else 0)
    other = Spy(open_sites(IDS)[1])
    other.run(align_entities(tuple(sites), "s"), Ledger())
    again = [reply.arrays["tokens"] for request, reply in other.seen if request.step == "show_tokens"]
    assert not set(as_tokens(np.concatenate(tokens)).tolist()) & set(
        as_tokens(np.concatenate(again)).tolist()
    )


def test_the_coordinator_is_shown_no_point_and_no_salt_before_the_end(drawn):
    keys, sites = open_sites(IDS)
    spy = Spy(sites)
    spy.run(align_entities(tuple(sites), "s"), Ledger())
    carried = (
        b"".join(
            array.tobytes()
            for request, reply in spy.seen
            for array in (*request.arrays.values(), *(a for n, a in reply.arrays.items() if n != "tokens"))
        )
        + "".join(request.text + reply.text for request, reply in spy.seen).encode()
    )
    assert SALT not in carried and SALT.hex().encode() not in carried
    for size in range(4):
        for subset in itertools.combinations(drawn, size):
            for table in keys.values():
                points = table.points(SALT)
                for scalar in subset:
                    points = raise_points("", points, scalar)
                assert not any(point.tobytes() in carried for point in points)


def test_a_list_is_sorted_before_it_leaves_its_site(drawn, monkeypatch):
    """The next site would otherwise see the order of the rows."""
    opened = []
    real = linkage.as_points
    monkeypatch.setattr(linkage, "as_points", lambda data: opened.append(real(data)) or opened[-1])
    _, sites = open_sites({"A": list(range(50)), "B": list(range(20, 90))})
    LocalEngine(sites).run(align_entities(("A", "B"), "s"), Ledger())
    assert sorted(map(len, opened)) == [50, 70]
    for points in opened:
        names = as_tokens(points).tolist()
        assert names == sorted(names)


def test_what_left_a_site_is_entered_and_of_the_declared_kinds():
    _, sites = open_sites(IDS)
    ledger = Ledger()
    found = LocalEngine(sites).run(align_entities(tuple(sites), "s"), ledger)
    frame = ledger.to_frame()
    left = frame[frame["sender"] != "coordinator"]
    assert set(left["kind"]) == {"control", "schema", "sealed", "presence"}
    tokens = left[left["step"] == "show_tokens"]
    assert sorted(tokens["shape"].astype(str)) == sorted(str((len(ids), 32)) for ids in IDS.values())
    assert set(left[left["kind"] == "presence"]["step"]) == {"show_tokens"}
    assert found.n_entities == 7 and {c: len(rows) for c, rows in found.rows.items()} == {
        "A": 4,
        "B": 3,
        "C": 5,
    }


def test_every_site_has_its_own_numbers_and_the_coordinator_the_pattern():
    keys, sites = open_sites(IDS)
    found = LocalEngine(sites).run(align_entities(tuple(sites), "s"), Ledger())
    number = {}
    for site, ids in IDS.items():
        assert sorted(keys[site].places) == found.rows[site].tolist()
        for entity, place in zip(ids, keys[site].places.tolist(), strict=True):
            assert number.setdefault(entity, place) == place
    assert sorted(number.values()) == list(range(7))


def test_a_policy_can_refuse():
    frames = tables(0, complete)
    with pytest.raises(PolicyError, match=r"B: .*'presence'"):
        ClientPartition.from_frames(
            frames, on="id", align="private", policies={"B": Policy(refused_kinds=frozenset({"presence"}))}
        )


# ---- hostile messages ------------------------------------------------------------------------------------


class Hand:
    """Sites that have agreed on keys, asked one by one."""

    def __init__(self, ids=IDS):
        self.keys, self.sites = open_sites(ids)
        self.ring = '["' + '", "'.join(ids) + '"]'
        LocalEngine(self.sites).run(agree_keys(tuple(ids), "s"), Ledger())
        boxes = self("A", "draw_salt")["boxes"]
        self.lists = {"A": self("A", "enter_keys")["points"]}
        for site, box in zip(list(ids)[1:], boxes, strict=True):
            self.lists[site] = self(site, "enter_keys", salt=box)["points"]

    def __call__(self, site, step, text=None, **arrays):
        text = "" if step == "take_places" else self.ring if text is None else text
        request = Request(site, FAMILY, step, arrays, "s", text)
        return unpack_reply(self.sites[site].answer(pack_request(request))).arrays


@pytest.fixture
def hand():
    return Hand()


def test_a_list_is_raised_in_its_turn_only(hand):
    with pytest.raises(MessageError, match="B: a list is not for the coordinator before every site"):
        hand("B", "show_tokens", points=hand.lists["A"])
    passed = {site: hand(site, "pass_list", points=hand.lists[before])["points"] for site, before in
              (("B", "A"), ("C", "B"), ("A", "C"))}  # fmt: skip
    with pytest.raises(MessageError, match="C: the last list is for the coordinator"):
        hand("C", "pass_list", points=passed["B"])
    assert hand("C", "show_tokens", points=passed["B"])["tokens"].shape == (4, 32)
    for step in ("show_tokens", "pass_list"):
        with pytest.raises(MessageError, match="C: it has not entered its keys, or has raised every list"):
            hand("C", step, points=passed["B"])


def test_a_list_cannot_be_altered_diverted_or_sent_twice(hand):
    altered = hand.lists["A"].copy()
    altered[-1] ^= 1
    wrong = {
        "altered": altered,
        "foreign": hand.lists["C"],
        "not a sealed message": np.zeros(64, np.uint8),
    }
    for message, points in wrong.items():
        with pytest.raises(SecurityError, match=f"B.*{message}"):
            hand("B", "pass_list", points=points)
    hand("B", "pass_list", points=hand.lists["A"])
    with pytest.raises(MessageError, match="B: the last list"):
        hand("B", "pass_list", points=hand.lists["A"])
    with pytest.raises(SecurityError, match=r"B.*replayed"):
        hand("B", "show_tokens", points=hand.lists["A"])


def test_a_site_enters_its_keys_once(hand):
    with pytest.raises(MessageError, match="A: its keys were entered already"):
        hand("A", "enter_keys")
    with pytest.raises(MessageError, match="A: it draws the salt, and was sent one"):
        hand("A", "enter_keys", salt=hand.lists["A"])


@pytest.mark.parametrize("ring", ['["A", "B"]', '["A", "B", "D"]', '["A", "B", "C", "C"]', "{}", "3"])
def test_the_ring_is_made_of_the_pinned_sites(hand, ring):
    with pytest.raises(MessageError, match="B: the ring is not made of the sites"):
        hand("B", "pass_list", ring, points=hand.lists["A"])


@pytest.mark.parametrize("places", [[0, 1, 2], [0, 1, 2, 2], [-1, 0, 1, 2], [0, 1, 2, 3, 4]])
def test_numbers_must_fit_the_entities(hand, places):
    with pytest.raises(MessageError, match=r"A: (array 'places' has|expected a different number)"):
        hand("A", "take_places", places=np.array(places))
    with pytest.raises(PartitionError, match="A: its keys have not been aligned"):
        _ = hand.keys["A"].places


def test_a_table_that_is_no_list_of_keys_is_not_aligned():
    """The coordinator cannot ask for tokens of a column of its choice."""
    site = Site("A", pd.DataFrame({"diagnosis": ["a", "b"]}))
    with pytest.raises(MessageError, match="A: its owner offers no keys"):
        site.answer(pack_request(Request("A", FAMILY, "describe_keys", {}, "s", "{}")))
    table = KeyTable("A", pd.DataFrame({"id": [1, 2]}), ["id"])
    assert table.columns == () and [len(chunk) for chunk in table.chunks([])] == [2]
    with pytest.raises(DesignError, match=r"A: .*shows no column"):
        next(table.chunks(["id"]))


@pytest.mark.parametrize("fault", ["short", "equal", "salt"])
def test_the_coordinator_checks_what_comes_back(fault):
    _, sites = open_sites(IDS)

    class Faulty(LocalEngine):
        def _send(self, request, ledger):
            reply = super()._send(request, ledger)
            arrays = dict(reply.arrays)
            if fault == "salt" and request.step == "draw_salt":
                arrays["boxes"] = arrays["boxes"][:1]
            if request.step == "show_tokens" and request.site == "A":
                tokens = arrays["tokens"]
                arrays["tokens"] = tokens[:-1] if fault == "short" else tokens[[0, *range(len(tokens) - 1)]]
            return Reply(reply.site, arrays, reply.text, reply.entities)

    message = {
        "short": "B: 2 tokens came for its 3",
        "equal": "B: some of its tokens",
        "salt": "A: expected a salt",
    }
    with pytest.raises(MessageError, match=message[fault]):
        Faulty(sites).run(align_entities(tuple(sites), "s"), Ledger())


# ---- keys ------------------------------------------------------------------------------------------------

ODD_KEYS = {
    "duplicated": (["Ann", "Bob", "Ann"], "1 of 3 rows repeat a key"),
    "missing": (["Ann", None, "Bob"], "1 rows have no key"),
    "mixed": (["Ann", 1, "1"], "mixes several types"),
    "mixed numbers": ([1, 1.5, "1.0"], "mixes several types"),
    "empty": (["Ann", "", "Bob"], "1 keys are empty"),
    "white space": (["Ann ", "\tBob", "C d"], "2 keys are empty, or begin or end with white space"),
    "unicode": (["Ju\u0308rgen", "Jürgen", "Bob"], "1 keys are not in Unicode's form NFC"),
}


@pytest.mark.parametrize("fault", ODD_KEYS)
def test_odd_keys_are_refused_and_not_shown(fault):
    values, message = ODD_KEYS[fault]
    with pytest.raises(
        PartitionError, match=f"'?Ward'?, key column 'id': .*{message}|Ward.*{message}"
    ) as caught:
        KeyTable("Ward", pd.DataFrame({"id": values}), ["id"])
    assert not any(name in str(caught.value) for name in ("Ann", "Bob", "rgen"))
    with pytest.raises(PartitionError, match="no key column 'id'"):
        KeyTable("Ward", pd.DataFrame({"name": values}), ["id"])


KINDS = {
    "whole numbers": [1, 2],
    "text": ["1", "2"],
    "decimal numbers": [1.0, 2.0],
    "true/false": [True, False],
}


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(KINDS, 2)))
def test_keys_of_two_types_are_refused(a, b):
    """1, "1", 1.0 and True are different keys; at two sites they are an error, not an empty intersection."""
    _, sites = open_sites({"A": KINDS[a], "B": KINDS[b]})
    with pytest.raises(PartitionError, match=rf"'B'.*of site 'A': expected 'id' \({a}\), found 'id' \({b}\)"):
        LocalEngine(sites).run(align_entities(("A", "B"), "s"), Ledger())
    points = [KeyTable("A", pd.DataFrame({"id": KINDS[kind]}), ["id"]).points(b"s") for kind in (a, b)]
    assert not set(as_tokens(points[0]).tolist()) & set(as_tokens(points[1]).tolist())


def test_the_type_is_a_part_of_a_key():
    """Dates are counted in nanoseconds: the numbers are the same, and the keys are not."""
    numbers, days = pd.Series([1, 2]), pd.to_datetime([1, 2], unit="ns")
    a, b = (KeyTable("A", pd.DataFrame({"id": values}), ["id"]).points(b"s") for values in (numbers, days))
    assert not set(as_tokens(a).tolist()) & set(as_tokens(b).tolist())


def test_hashes_are_salted():
    table = KeyTable("A", pd.DataFrame({"id": [1, 2]}), ["id"])
    assert not set(as_tokens(table.points(b"s")).tolist()) & set(as_tokens(table.points(b"t")).tolist())


def test_a_site_without_records_takes_part():
    keys, sites = open_sites({"A": [4, 2], "B": []})
    assert LocalEngine(sites).run(align_entities(("A", "B"), "s"), Ledger()).n_entities == 2
    assert len(keys["B"].places) == 0 and sorted(keys["A"].places) == [0, 1]


@pytest.mark.benchmark
@pytest.mark.benchmark
def test_a_pair_of_a_hundred_thousands_takes_less_than_a_minute():
    n = 166_207
    keys = np.random.default_rng(0).permutation(2 * n)
    frames = {
        "A": pd.DataFrame({"id": keys[:n], "x": np.arange(n)}),
        "B": pd.DataFrame({"id": keys[n // 2 : n // 2 + n], "y": np.arange(n)}),
    }
    start = time.perf_counter()
    partition = ClientPartition.from_frames(frames, on="id", align="private")
    seconds = time.perf_counter() - start
    print(f"{n} keys at each of two sites, both in this process: {seconds:.1f} s")
    assert partition.n_entities == n + n // 2 and seconds < 60
