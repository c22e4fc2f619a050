"""A hostile coordinator sends requests to real families: named errors, no crash, no partial change.

Requests of real fits are recorded and sent again in changed forms. A refusal must leave no trace: the site
answers the next honest request as a site that has not received the others, to the bit.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import FedstatError, MessageError, SecurityError
from fedstat.federation.audit.event_log import extended_digest, genesis_digest
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.message import Reply, Request, pack_reply, pack_request, unpack_reply, unpack_request
from fedstat.federation.protocols.engine import LocalEngine

SEED = 11
IN_CLEAR = {"exchange": "iterative", "iteration": fs.Iteration(masked=False), "cov_type": "none"}
FITS = {
    "glm": ("rows", fs.GLORE, {"masked": False, "cov_type": "HC0"}),
    "glm masked": ("rows", fs.GLORE, {"masked": True}),
    "fedavg": ("rows", fs.FedAvg, {"rounds": 2, "seed": 1, "masked": False}),
    "vfem": ("columns", fs.VFEMRegression, IN_CLEAR),
    "vfem masked": ("columns", fs.VFEMRegression, {"exchange": "iterative", "maxiter": 12}),
    "vfem moments": ("columns", fs.VFEMRegression, {"exchange": "moments"}),
}
REPEATABLE = ("glm", "fedavg", "vfem")
"""No keys in them: the same questions to a new site give the same bytes."""

pytestmark = pytest.mark.filterwarnings("ignore")


def make_partition(layout):
    generator = np.random.default_rng(2)
    n = 90
    table = pd.DataFrame(generator.normal(size=(n, 4)), columns=["a", "b", "c", "d"])
    table["y"] = (table.sum(axis=1) + generator.logistic(size=n) > 0).astype(float)
    if layout == "rows":
        table["site"] = np.repeat(["S1", "S2", "S3"], n // 3)
        return fs.ClientPartition.from_frame(table[["a", "b", "y", "site"]], by="site", shared_seed=SEED)
    columns = {"S1": ["y", "a"], "S2": ["b", "c"], "S3": ["d"]}
    table.loc[:19, "d"] = np.nan
    return fs.ClientPartition.from_frame(table, columns=columns, shared_seed=SEED)


def fit(name, engine=None):
    """Fit with an engine of one's own from the first question on; the model, and its result."""
    layout, kind, options = FITS[name]
    partition = make_partition(layout)
    if engine is not None:
        partition = replace(partition, _engine=engine(partition.sites))
    formula = "y ~ a + b" if layout == "rows" else "y ~ ."
    with np.errstate(all="ignore"):
        # The iterative exchange has no other law.
        joint = {"between": "independent"} if options.get("exchange") == "iterative" else {}
        model = kind.from_formula(formula, partition, **joint)
        return model, model.fit(**options)


class Recording(LocalEngine):
    """Keeps what was asked of one site, and what it answered, in bytes."""

    def __init__(self, sites, site="S2"):
        super().__init__(sites)
        self.requests, self.replies, door = [], [], self._answer_functions[site]

        def listen(request):
            self.requests.append(request)
            self.replies.append(door(request))
            return self.replies[-1]

        self._answer_functions[site] = listen


def record(name):
    model, _ = fit(name, Recording)
    return model.engine.requests, model.engine.replies


@pytest.fixture(scope="module")
def recorded():
    """Questions and answers of a fit, by name, each recorded when it is first needed."""
    return Recordings()


class Recordings(dict):
    def __missing__(self, name):
        self[name] = record(name)
        return self[name]


def same_answer(ours, theirs):
    """To the bit; the order of the fields in a header is that of a hash table, and says nothing."""
    ours, theirs = unpack_reply(ours), unpack_reply(theirs)
    contents = [
        {k: (a.dtype.str, a.shape, a.tobytes()) for k, a in one.arrays.items()} for one in (ours, theirs)
    ]
    return contents[0] == contents[1] and replace(ours, arrays={}) == replace(theirs, arrays={})


class Replayed:
    """A site that has been asked the first questions of a recorded fit."""

    def __init__(self, name, requests, replies):
        self.name, self.requests, self.replies, self.requested = name, requests, replies, 0
        self.reset()

    def reset(self):
        """A new site, asked the same questions again."""
        self.site = make_partition(FITS[self.name][0]).sites["S2"]
        for request in self.requests[: self.requested]:
            self.site.answer(request)

    def attempt(self, request):
        """Outcome of a request; the site is created again after an answer."""
        try:
            with np.errstate(all="ignore"):
                self.site.answer(request)
        except FedstatError:
            return "named"
        self.reset()
        return "answered"

    def honest(self):
        """Ask the next honest question, and hold the answer against that of a site left in peace."""
        answer = self.site.answer(self.requests[self.requested])
        if unpack_request(self.requests[self.requested]).family != "receipt":  # signed, with times
            assert same_answer(answer, self.replies[self.requested])
        self.requested += 1


def chains_are_whole(site):
    """Every chain of a site gives the head that it claims."""
    keys = site.trust.identity.public
    for session, chain in site._data.site_ledger._chains.items():
        digest = genesis_digest(site.name, keys, session, chain.ordinal, chain.previous)
        for link in chain.entries:
            digest = extended_digest(digest, link)
        if digest.hex() != chain.head:
            return False
    return True


def mutated(data, generator):
    out = bytearray(data)
    out[int(generator.integers(len(out)))] ^= int(generator.integers(1, 256))
    return bytes(out)


@pytest.mark.parametrize("name", REPEATABLE)
def test_recorded_questions_give_the_same_bytes_at_a_new_site(recorded, name):
    replayed = Replayed(name, *recorded[name])
    for _ in replayed.requests:
        replayed.honest()
    assert len(replayed.requests) > 5 and chains_are_whole(replayed.site)


def besiege(recorded, name, attempts):
    """Single bytes of every question changed, `attempts` times in all; outcomes."""
    replayed, generator = Replayed(name, *recorded[name]), np.random.default_rng(5)
    outcomes = {"named": 0, "answered": 0}
    each = -(-attempts // len(replayed.requests))
    for request in replayed.requests:
        for _ in range(each):
            outcomes[replayed.attempt(mutated(request, generator))] += 1
        replayed.honest()
        assert chains_are_whole(replayed.site)
    assert sum(outcomes.values()) >= attempts and outcomes["named"] > attempts / 4
    return replayed


@pytest.mark.parametrize("name", REPEATABLE)
def test_changed_bytes_are_named_or_answered_and_leave_no_trace(recorded, name):
    besiege(recorded, name, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATABLE)
def test_ten_thousand_changed_bytes_of_each_family(recorded, name):
    besiege(recorded, name, 10_000)


class Besieged(LocalEngine):
    """Before every question, sends changed forms of it: cut, and with changed bytes in names and texts.

    Where a changed form is answered all the same (a letter of a hexadecimal number in upper case), that is
    the answer.
    """

    attempts = 6

    def __init__(self, sites):
        super().__init__(sites)
        self.generator, self.named, self.answered = np.random.default_rng(8), 0, 0
        self._answer_functions = {name: self._besiege(door) for name, door in self._answer_functions.items()}

    def _besiege(self, door):
        def answer(request):
            header = 8 + int.from_bytes(request[:8], "little")
            forms = [request[: int(self.generator.integers(len(request)))] for _ in range(self.attempts)]
            for _ in range(self.attempts):
                forms.append(mutated(request[:header], self.generator) + request[header:])
            for form in forms:
                try:
                    reply = door(form)
                except FedstatError:
                    self.named += 1
                    continue
                ours, theirs = unpack_request(request), unpack_request(form)
                if (ours.session, ours.step, ours.masked) == (theirs.session, theirs.step, theirs.masked):
                    self.answered += 1
                    if ours.text.lower() == theirs.text.lower():
                        return reply
            return door(request)

        return answer


@pytest.mark.parametrize("name", FITS)
def test_a_besieged_fit_ends_where_it_would_have_ended(name):
    _, expected = fit(name)
    try:
        model, found = fit(name, Besieged)
    except SecurityError as error:
        # A refused question may have used up a key or a mask: it is not used again, and the fit ends.
        assert name not in REPEATABLE and ("handed out before" in str(error) or "before" in str(error))
        return
    assert found.params.to_numpy().tobytes() == expected.params.to_numpy().tobytes()
    assert model.engine.named > 100
    assert all(chains_are_whole(site) for site in model.partition.sites.values())


@pytest.mark.parametrize("name", FITS)
def test_every_truncation_of_every_question_is_named(recorded, name):
    requests, _ = recorded[name]
    site = make_partition(FITS[name][0]).sites["S2"]
    shortest = {unpack_request(request).step: request for request in sorted(requests, key=len, reverse=True)}
    for request in shortest.values():
        for length in range(len(request)):
            with pytest.raises(MessageError, match="bytes that are not"):
                site.answer(request[:length])
    assert chains_are_whole(site) and site.ledger.entries == []


@pytest.mark.parametrize("name", REPEATABLE)
def test_random_byte_strings_in_the_middle_of_a_fit(recorded, name):
    replayed, generator = Replayed(name, *recorded[name]), np.random.default_rng(9)
    for _ in range(len(replayed.requests) // 2):
        replayed.honest()
    for _ in range(3_000):
        with pytest.raises(MessageError):
            replayed.site.answer(generator.bytes(int(generator.integers(0, 400))))
    replayed.honest()
    assert chains_are_whole(replayed.site)


def hostile_values(array):
    """Arrays that replace an original one."""
    floats, largest, least = array.astype(np.float64), np.iinfo(np.int64).max, np.iinfo(np.int64).min
    yield from (np.full_like(floats, v) for v in (np.nan, np.inf, 1e308, -1e308, 5e-324, 0.0, -1.0))
    yield from (np.full(array.shape, v, dtype=np.int64) for v in (largest, least, -1, 0, 10**6))
    yield from (array[..., None], array.reshape(-1)[:0], np.zeros(array.shape, dtype=bool))
    yield np.concatenate([array.reshape(-1)] * 2)
    yield np.zeros((0,) * array.ndim)
    yield np.full(array.shape, 255, dtype=np.uint8)


@pytest.mark.parametrize("name", REPEATABLE)
def test_hostile_values_and_shapes_are_named_or_answered(recorded, name):
    replayed, seen, count = Replayed(name, *recorded[name]), set(), 0
    for request in replayed.requests:
        requested = unpack_request(request)
        if requested.step not in seen:
            for array, value in requested.arrays.items():
                for other in hostile_values(value):
                    replayed.attempt(
                        pack_request(replace(requested, arrays=requested.arrays | {array: other}))
                    )
                    count += 1
                fewer = {k: v for k, v in requested.arrays.items() if k != array}
                replayed.attempt(pack_request(replace(requested, arrays=fewer)))
            for text in ("", "null", "[]", "{}", "1e999", '"' + "x" * 10_000 + '"', "[" * 5_000, "nonsense"):
                replayed.attempt(pack_request(replace(requested, text=text)))
        seen.add(requested.step)
        replayed.honest()
    assert count > 50 and chains_are_whole(replayed.site)


@pytest.mark.parametrize("name", REPEATABLE)
def test_the_same_question_again(recorded, name):
    """Answered alike, but for the step of VFEM's iteration, which goes on from where it is."""
    replayed, differ = Replayed(name, *recorded[name]), set()
    for request in replayed.requests:
        replayed.honest()
        step = unpack_request(request).step
        try:
            if not same_answer(replayed.site.answer(request), replayed.replies[replayed.requested - 1]):
                differ.add(step)
        except FedstatError:
            continue
        replayed.reset()
    assert differ - {"state_ledger"} <= {"step", "start"}


def test_a_masked_answer_is_given_once():
    model, _ = fit("glm masked", Recording)
    site, requests = model.partition.sites["S2"], model.engine.requests
    masked = [request for request in requests if unpack_request(request).masked is not None]
    assert len(masked) > 3
    for request in masked:
        with pytest.raises(SecurityError, match="was masked before"):
            site.answer(request)
    assert chains_are_whole(site)


def test_an_unknown_step_or_family_of_a_running_fit_is_named(recorded):
    replayed = Replayed("glm", *recorded["glm"])
    replayed.honest()
    request = unpack_request(replayed.requests[1])
    for other, words in (
        (replace(request, step="no such step"), "has no step 'no such step'"),
        (replace(request, family="no such family"), "unknown family 'no such family'"),
        (replace(request, site="S1"), "addressed to 'S1'"),
        (replace(request, step="x" * 100_000), "has no step 'xxx"),
        (replace(request, masked=0), "the sites have not agreed on"),
    ):
        with pytest.raises(MessageError, match=f"S2.*{words}"):
            replayed.site.answer(pack_request(other))
    replayed.honest()
    assert max(len(link.step) for link in replayed.site._data.site_ledger.present.entries) <= 80


def test_a_reply_in_the_place_of_an_ask_or_of_another_sites_reply_is_named():
    partition = make_partition("rows")
    with pytest.raises(MessageError, match="not a request"):
        partition.sites["S1"].answer(pack_reply(Reply("S1", {"x": np.ones(1)})))
    engine = LocalEngine(partition.sites)
    engine._answer_functions["S1"] = lambda request: engine._answer_functions["S2"](
        pack_request(replace(unpack_request(request), site="S2"))
    )

    def protocol():
        yield [Request("S1", "secure", "introduce", {}, "s", "{}")]

    with pytest.raises(MessageError, match="'S2' answered instead of 'S1'"):
        engine.run(protocol(), Ledger())
