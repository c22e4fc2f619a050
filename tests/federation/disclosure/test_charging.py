"""Answers with noise: charged before they leave, remembered, and refused beyond the budget."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from noisy_counts import BinsRequest, cell_counts, counting, request_margins  # noqa: F401
from scipy.stats import chisquare

import fedstat as fs
from fedstat.codec import from_plain, to_plain
from fedstat.errors import (
    DescriptionError,
    DisclosureError,
    EngineError,
    MessageError,
    PolicyError,
    ReceiptError,
)
from fedstat.federation.audit.budget_charges import BudgetSpent
from fedstat.federation.audit.event_log import read_site_entry
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.audit.ledger_file import begin_ledger, open_ledger
from fedstat.federation.audit.receipt import SiteStatement
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, round_up
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.disclosure.state import SiteTrust
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.tables.aligned_table import AlignedTable, content_fingerprint
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.tables.table import FrameTable
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget, round_to_grid

N = 400
RNG = np.random.default_rng(5)
FRAME = pd.DataFrame(
    {
        "x": RNG.normal(size=N),
        "g": RNG.choice(["a", "b", "c"], N),
        "k": RNG.integers(0, 3, N),
    }
)
PUBLISHED = {
    "x": PublishedColumn("number", (-9.0, 9.0)),
    "g": PublishedColumn("category", levels=("a", "b", "c")),
    "k": PublishedColumn("number", (0.0, 2.0), (0, 1, 2)),
}
EDGES = (-1.0, 0.0, 1.0)
BUDGET = Budget(1.0, 1e-6)
WHOLE = rho_of_budget(1.0, 1e-6)
HALF = str(round_to_grid(WHOLE / 2))


def site_of(frame=FRAME, trust=None, site_ledger=None, published=PUBLISHED, **policy):
    rules = Policy.strict(**{"privacy": BUDGET, **policy})
    return Site("Bank", frame, rules, trust=trust, site_ledger=site_ledger, published=published)


def question(text, session="s", masked=None):
    content = text if isinstance(text, str) else json.dumps(text)
    return pack_request(Request("Bank", "margins", "count_bins", {}, session, content, masked))


def bins(column="x", rho=HALF, edges=EDGES):
    return {"column": column, "rho": rho, "edges": list(edges)}


def counts(site, text, session="s", client=""):
    return unpack_reply(site.answer(question(text, session), client)).arrays["counts"]


def exact(edges=EDGES):
    return np.bincount(np.searchsorted(edges, FRAME["x"]), minlength=len(edges) + 1)


def test_counts_leave_with_noise_and_are_charged():
    site = site_of()
    noisy = counts(site, bins())
    assert noisy.dtype == np.int64 and noisy.shape == (4,)
    # The deviation of each is rho^-1/2.
    assert 0 < np.abs(noisy - exact()).max() < 6.0 / np.sqrt(float(Fraction(HALF)))
    assert site.site_ledger.charges.spent == Fraction(HALF)
    (charge,) = site.site_ledger.charges.made
    assert "margins count_bins counts" in charge.what and '"x"' in charge.what
    spent = site.privacy
    assert spent.releases == 1 and spent.epsilon_spent < 1.0
    assert spent.epsilon_spent == epsilon_of_zcdp(Fraction(HALF), 1e-6)


def test_the_noise_is_the_discrete_gaussian_of_what_was_charged():
    """Over many sites with keys of their own; and another scale would be seen."""
    rho, found = Fraction(1, 8), []
    for _ in range(300):
        noisy = counts(site_of(privacy=Budget(5.0, 1e-6)), bins(rho=str(rho)))
        found += (noisy - exact()).tolist()
    x = np.arange(-8, 9)
    for variance, fits in ((8.0, True), (4.0, False)):
        weights = np.exp(-(np.arange(-80, 81) ** 2) / (2.0 * variance))
        inner = np.exp(-(x**2) / (2.0 * variance)) / weights.sum()
        expected = np.append(inner, 1.0 - inner.sum()) * len(found)
        seen = np.array([found.count(value) for value in x])
        seen = np.append(seen, len(found) - seen.sum())
        # Their keys are drawn: one run in 100,000 would fail.
        assert (chisquare(seen, expected).pvalue > 1e-5) == fits


def test_the_same_question_again_costs_nothing_and_has_the_same_noise():
    site = site_of()
    first = counts(site, bins())
    for spelling in (
        {"edges": [-1, -0.0, 1], "rho": HALF, "column": "x"},
        '{"column":"x",   "edges":[-1e0, 0, 10e-1], "rho":"' + HALF + '"}',
        bins(rho=f"0{2 * Fraction(HALF).numerator}/{2 * Fraction(HALF).denominator}"),
    ):
        for session in ("s", "another", ""):
            np.testing.assert_array_equal(counts(site, spelling, session, client="somebody else"), first)
    assert len(site.site_ledger.charges.made) == 1
    links = [link for chain in site.site_ledger.chains for link in chain.entries if link.array == "counts"]
    assert [Fraction(link.charged) for link in links] == [Fraction(HALF)] + [Fraction(0)] * 9


def test_another_question_has_noise_of_its_own():
    site = site_of(privacy=Budget(20.0, 1e-6))
    one = counts(site, bins(rho="1/100"))
    other = counts(site, bins(rho="1/101"))
    finer = counts(site, bins(rho="1/100", edges=(-1.0, 0.0, 0.5, 1.0)))
    assert (one - exact() != other - exact()).any() and (finer[:2] - one[:2]).any()
    assert site.site_ledger.charges.spent == sum(
        round_to_grid(Fraction(rho), up=True) for rho in ("1/100", "1/101", "1/100")
    )


def test_levels_are_counted_as_they_are_published():
    site = site_of(privacy=Budget(50.0, 1e-6))
    for name in ("g", "k"):
        noisy = counts(site, bins(name, "1", ()))
        true = FRAME[name].value_counts().sort_index().to_numpy()
        assert np.abs(noisy - true).max() < 8


def test_what_would_exceed_the_budget_is_refused_with_what_is_left():
    site = site_of()
    kept = counts(site, bins())
    counts(site, bins("g", str(round_to_grid(WHOLE / 4)), ()))
    with pytest.raises(DescriptionError) as caught:
        counts(site, bins("k", HALF, ()))
    text = str(caught.value)
    assert "its policy (privacy budget) has rho 0.00609 left of 0.0244 (epsilon 1 at delta 1e-06)" in text
    assert "costs 0.0122" in text and "epsilon = 1.13  in section [privacy] of policy.toml" in text
    # The line that is named would do.
    assert (
        rho_of_budget(1.13, 1e-6)
        > site.site_ledger.charges.spent + Fraction(HALF)
        > rho_of_budget(1.11, 1e-6)
    )
    np.testing.assert_array_equal(counts(site, bins()), kept)
    assert site.site_ledger.refusals[""] == 0


def test_a_refusal_for_the_budget_does_not_depend_on_rows():
    reported = []
    for frame in (FRAME, FRAME.assign(x=np.nan, g="z", k=7)):
        site = site_of(frame)
        counts(site, bins())
        with pytest.raises(DescriptionError) as caught:
            counts(site, bins("g", str(WHOLE.limit_denominator(10**12)), ()))
        reported.append(str(caught.value))
    assert reported[0] == reported[1]


def test_noise_beyond_all_use_is_refused_before_it_is_charged():
    site = site_of()
    with pytest.raises(DescriptionError, match="variance"):
        counts(site, bins(rho=f"1/{10**39}"))
    assert not site.site_ledger.charges.made and not site.refusals.reasons


def test_without_a_budget_nothing_is_charged_and_nothing_leaves():
    for policy in (Policy.open(), Policy.strict()):
        site = Site("Bank", FRAME, policy, published=PUBLISHED)
        with pytest.raises(DescriptionError, match=r"\[privacy\]  epsilon = 1.0  delta = 1e-06"):
            counts(site, bins())
    with pytest.raises(DescriptionError, match=r"delta = 1e-06  in section \[privacy\]"):
        counts(site_of(privacy=Budget(1.0, 0.0)), bins())


@pytest.mark.parametrize(
    "text",
    [
        bins(rho="0"),
        bins(rho="1/0"),
        bins(rho="-1/4"),
        bins(rho="1e9"),
        bins(rho="inf"),
        bins(edges=(1.0, 1.0)),
        bins(edges=(0.0, -0.0)),
        bins(edges=range(5000)),
        bins() | {"sensitivity": 0.001},
        bins() | {"variance": "1/100"},
        "[]",
    ],
)
def test_a_question_that_is_none_costs_nothing(text):
    """No figure that comes with a question is a sensitivity: the site knows its own."""
    site = site_of()
    with pytest.raises(DescriptionError, match="question about a margin"):
        counts(site, text)
    assert not site.site_ledger.charges.made and not site.refusals.reasons


@pytest.mark.parametrize("text", [bins("nothing"), bins("g"), bins("x", edges=())])
def test_a_question_is_refused_by_what_is_published(text):
    with pytest.raises(DescriptionError, match="publishe"):
        counts(site_of(), text)


ODD = [None, np.nan, np.inf, -np.inf, "text", True, 3 + 4j, pd.Timestamp("2020-01-01"), ["list"], 10**400, {}]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:20])
def test_no_value_is_a_refusal(odd):
    """The site answers for every value in a row: a refusal would be a release without noise."""
    frame = FRAME.astype(object)
    for name in frame:
        frame[name] = pd.Series([odd, *frame[name].iloc[1:]], dtype=object)
    site = site_of(frame, privacy=Budget(9.0, 1e-6))
    for text in (bins(rho="1/9"), bins("g", "1/9", ()), bins("k", "1/9", ())):
        assert counts(site, text).sum() > 0
    assert not site.refusals.reasons


def test_a_changed_table_is_another_one():
    """The order of its rows is none of it; one changed value is, and its noise is new."""
    trust = SiteTrust(_identity=Identity.generate())
    one = counts(site_of(trust=trust), bins())
    np.testing.assert_array_equal(counts(site_of(FRAME.iloc[::-1], trust=trust), bins()), one)
    moved = FRAME.copy()
    moved.loc[0, "k"] += 1  # another column than the requested one
    other = counts(site_of(moved, trust=trust), bins())
    assert (one != other).any()


def test_records_that_change_hands_are_another_table():
    """Linked records: the same rows under the same keys in any order, and no others."""
    frame, key = FRAME.assign(id=np.arange(N)), b"a key"
    swapped = frame.assign(id=[1, 0, *range(2, N)])
    one, same, other = (
        content_fingerprint(AlignedTable("Bank", rows, ["id"]), key)
        for rows in (frame, frame.iloc[::-1], swapped)
    )
    assert one == same != other
    assert content_fingerprint(FrameTable(FRAME), key) == content_fingerprint(
        FrameTable(FRAME.iloc[::-1]), key
    )
    assert content_fingerprint(FrameTable(FRAME.rename(columns={"k": "l"})), key) != content_fingerprint(
        FrameTable(FRAME), key
    )
    assert content_fingerprint(FrameTable(FRAME), b"another key") != content_fingerprint(
        FrameTable(FRAME), key
    )


def test_a_table_that_changes_while_it_is_served_is_charged_again():
    """The same memory with other values: an answer with the same noise would be their difference."""
    frame = FRAME.copy()
    site = site_of(frame)
    one = counts(site, bins())
    frame.loc[:, "x"] = -5.0
    other = counts(site, bins())
    assert len(site.site_ledger.charges.made) == 2
    assert not np.array_equal(other - one, [N, 0, 0, 0] - exact())


class Full:
    """A disk on which no charge can be written."""

    def __getattr__(self, name):
        return lambda *_: None

    def append(self, lines):
        if any("charged" in line for line in lines):
            raise EngineError("the ledger cannot be written")


def test_what_cannot_be_written_down_does_not_leave():
    site = site_of()
    site.site_ledger.store = Full()
    with pytest.raises(PolicyError):
        counts(site, bins())
    assert not site.site_ledger.charges.made and not site.ledger.entries


def test_charges_outlive_the_process(tmp_path):
    identity = Identity.generate()
    begin_ledger(tmp_path, identity)

    def start():
        return site_of(
            trust=SiteTrust(_identity=identity),
            site_ledger=open_ledger(tmp_path, "Bank", identity, patience=0.1),
        )

    site = start()
    first = counts(site, bins())
    np.testing.assert_array_equal(counts(site, bins(), ""), first)
    site.site_ledger.store.close()
    site = start()
    assert site.site_ledger.charges.spent == Fraction(HALF) and site.privacy.releases == 1
    np.testing.assert_array_equal(counts(site, bins(), "new"), first)
    np.testing.assert_array_equal(counts(site, bins(), ""), first)
    counts(site, bins("g", HALF, ()), "new")
    with pytest.raises(DescriptionError, match="privacy budget"):
        counts(site, bins("k", "1/1000", ()), "new")
    site.site_ledger.store.close()
    # An owner who raises the budget keeps what was spent.
    site_ledger = open_ledger(tmp_path, "Bank", identity, patience=0.1)
    site = site_of(trust=SiteTrust(_identity=identity), site_ledger=site_ledger, privacy=Budget(2.0, 1e-6))
    counts(site, bins("k", "1/1000", ()), "newer")
    assert site.site_ledger.charges.spent == 2 * Fraction(HALF) + round_to_grid(Fraction(1, 1000), up=True)


def by_rows(n_sites=3, **rules):
    frames = {name: FRAME.iloc[i::n_sites] for i, name in enumerate("ABC"[:n_sites])}
    return fs.ClientPartition.from_frames(
        frames,
        layout="horizontal",
        policy=Policy.strict(privacy=BUDGET, **rules),
        published=dict.fromkeys(frames, PUBLISHED),
    )


def test_margins_of_a_partition_and_its_description():
    partition = by_rows()
    request = [(name, BinsRequest("x", HALF, EDGES)) for name in partition.sites]
    found = partition.engine.run(request_margins(request, "s"), Ledger())
    assert [site for site, _, _ in found] == ["A", "B", "C"]
    total = sum(part for _, _, part in found)
    assert 0 < np.abs(total - exact()).max() < 10.0 / np.sqrt(float(Fraction(HALF)))
    text = str(partition.describe())
    assert (
        "Privacy budget of A: epsilon 0.691 of 1 at delta 1e-06 is charged, by 1 release (rho 0.0122" in text
    )


def test_parts_of_a_masked_sum_have_noise_each():
    """The coordinator has the sum alone; all others together have one part, with the noise of its site."""
    partition = by_rows()
    ledger, request = Ledger(), [(name, BinsRequest("x", HALF, EDGES)) for name in partition.sites]
    found = partition.engine.run(
        masked_protocol(request_margins(request, "s"), tuple(partition.sites), "s"), ledger
    )
    total = found[0][2]
    assert not found[1][2].any() and not found[2][2].any()
    clear = partition.engine.run(request_margins(request, "t"), Ledger())
    # The same noise in clear, so that it is known here: the sum is that of the noisy parts.
    np.testing.assert_array_equal(total, sum(part for _, _, part in clear))
    for place, name in enumerate(partition.sites):
        rest = sum(part for site, _, part in clear if site != name)
        left = total - rest
        x = FRAME["x"].iloc[place::3]
        assert (left != np.bincount(np.searchsorted(EDGES, x), minlength=4)).any()
    assert all(site.site_ledger.charges.spent == Fraction(HALF) for site in partition.sites.values())
    kinds = {entry.kind: entry.masked for entry in ledger.entries if entry.array == "counts"}
    assert kinds == {"noisy aggregate": True}


def test_the_charge_is_signed_in_the_statement():
    site = site_of()
    counts(site, bins())
    counts(site, bins(), "later")
    request = Request("Bank", "receipt", "state_ledger", {}, "s", json.dumps("0" * 64))
    statement = SiteStatement.from_dict(
        json.loads(unpack_reply(site.answer(pack_request(request))).text), "a statement"
    )
    assert statement.privacy == site.privacy and statement.signed()["privacy"]["rho"] == HALF
    assert [link.charged for link in statement.entries if link.array == "counts"] == [HALF]


@pytest.mark.parametrize(
    "wrong",
    [{"rho": "9" * 5000}, {"total": "1e9"}, {"rho": "-1"}, {"rho": "1/0"}, {"delta": 5.0}, {"epsilon": -1.0}],
)
def test_a_statement_on_a_budget_is_read_as_if_a_stranger_had_written_it(wrong):
    """The reported budget of a site can be used in calculations by others."""
    reported = to_plain(site_of().privacy) | wrong
    with pytest.raises(ReceiptError, match="budget"):
        from_plain(BudgetSpent, reported, "a statement")


@pytest.mark.parametrize("charged", ["", "1e999999999", "-1", "1/0", "x"])
def test_a_charge_in_a_chain_is_a_fraction(charged):
    site = site_of()
    counts(site, bins())
    (link,) = (one for chain in site.site_ledger.chains for one in chain.entries if one.charged)
    row = json.loads(json.dumps(link.signed))
    assert read_site_entry(row) == link and link.named["charged"] == HALF
    with pytest.raises(ValueError, match="charge"):
        read_site_entry([*row[:-1], charged])


def toy(monkeypatch, run, **declared):
    line = {"noisy": True, "dtype": "int64", "behind": (EntityCount, NoiseRequired)} | declared
    step = Step(run, gives={"total": ArrayDeclaration("noisy aggregate", "a sum", **line)})
    monkeypatch.setitem(FAMILIES, "toy", {"total": step})
    return pack_request(Request("Bank", "toy", "total", {}, "s"))


def test_a_step_that_does_not_reveal_its_sensitivity_releases_nothing(monkeypatch):
    def forgot(data, state):
        state.report(EntityCount(N))
        return {"total": np.ones(1, dtype=np.int64)}

    def of_another(data, state):
        state.report(EntityCount(N), NoiseRequired("other", "", 1, Fraction(10**6)))
        return {"total": np.ones(1, dtype=np.int64)}

    def without(data, state):
        state.report(EntityCount(N), NoiseRequired("total", "", 0, Fraction(1)))
        return {"total": np.ones(1, dtype=np.int64)}

    for run in (forgot, of_another, without):
        with pytest.raises(PolicyError, match="owner's log has the reason"):
            site_of().answer(toy(monkeypatch, run))


@pytest.mark.parametrize(
    ("variance", "fits"), [(0, False), (Fraction(1, 10**9), True), (2**100, True), (2**100 + 1, False)]
)
def test_noise_has_a_variance_above_zero_and_at_most_the_largest(monkeypatch, variance, fits):
    def noisy(data, state):
        state.report(EntityCount(N), NoiseRequired("total", "", Fraction(1, 10**12), Fraction(variance)))
        return {"total": np.ones(1, dtype=np.int64)}

    site, packed = site_of(), toy(monkeypatch, noisy)
    if fits:
        site.answer(packed)
    else:
        with pytest.raises(DescriptionError, match="variance"):
            site.answer(packed)
    assert len(site.site_ledger.charges.made) == fits


@pytest.mark.parametrize(("length", "quoted"), [(0, 17), (100, 117), (183, 200), (184, 200), (900, 200)])
def test_a_charge_quotes_the_beginning_of_a_request(monkeypatch, length, quoted):
    def noisy(data, state):
        state.report(EntityCount(N), NoiseRequired("total", "q" * length, 1, Fraction(10**6)))
        return {"total": np.ones(1, dtype=np.int64)}

    site = site_of()
    site.answer(toy(monkeypatch, noisy))
    (charge,) = site.site_ledger.charges.made
    assert charge.what.startswith("toy total total: ") and len(charge.what) == quoted


@pytest.mark.parametrize(
    ("value", "up"),
    [(1.0, 1.0), (1.001, 1.01), (0.12345, 0.124), (1234.5, 1240.0), (9.999, 10.0), (3e-7, 3e-7), (0.5, 0.5)],
)
def test_an_epsilon_is_proposed_with_three_digits_rounded_up(value, up):
    assert round_up(value) == pytest.approx(up, rel=1e-12)


def test_a_table_in_memory_is_digested_once(monkeypatch):
    read = []

    def counted(table, key):
        read.append(table)
        return content_fingerprint(table, key)

    monkeypatch.setattr("fedstat.federation.disclosure.privacy_budget.content_fingerprint", counted)
    site = site_of(privacy=Budget(9.0, 1e-6))
    for rho in ("1/100", "1/101"):
        counts(site, bins(rho=rho))
    assert len(read) == 1
    site.change_records(FrameTable(FRAME.iloc[1:]), lambda *_: "")
    counts(site, bins(rho="1/100"), "another")
    assert len(read) == 2


def test_an_answer_is_charged_as_a_whole_or_not_at_all(monkeypatch):
    """Each of two arrays is within the budget, and both are not: nothing is lost, and no row is read."""
    read = []

    def two(data, state, first):
        state.report(EntityCount(N), NoiseRequired("one", "", 1, Fraction(1, 2) / share))
        state.report(NoiseRequired("two", "", 1, Fraction(1, 2) / (share if first[0] else share / 2)))
        read.append(first)
        return {name: np.ones(3, dtype=np.int64) for name in ("one", "two")}

    share = round_to_grid(WHOLE * 2 / 3)
    line = ArrayDeclaration(
        "noisy aggregate", "sums", noisy=True, dtype="int64", behind=(EntityCount, NoiseRequired)
    )
    step = Step(two, {"first": ArrayDeclaration("control", "which")}, {"one": line, "two": line})
    monkeypatch.setitem(FAMILIES, "toy", {"two": step})
    site = site_of()
    packed = [pack_request(Request("Bank", "toy", "two", {"first": np.array([i])}, "s")) for i in (1, 0)]
    with pytest.raises(DescriptionError, match=r"rho 0\.0244 left"):
        site.answer(packed[0])
    assert not read and not site.site_ledger.charges.made
    site.answer(packed[1])
    assert len(read) == 1 and len(site.site_ledger.charges.made) == 2


@pytest.mark.parametrize(
    "declared", [{"noisy": False}, {"dtype": ""}, {"behind": (EntityCount,)}, {"dtype": "float64"}]
)
def test_a_declaration_that_lacks_what_noise_needs_does_not_install(monkeypatch, declared):
    with pytest.raises(DisclosureError, match="NoiseRequired"):
        toy(monkeypatch, lambda data, state: {}, **declared)


@pytest.mark.parametrize("kind", ["aggregate", "per entity", "control", "schema", "raw columns"])
def test_no_value_leaves_unpaid(monkeypatch, kind):
    line = ArrayDeclaration(kind, "values", behind=(EntityCount,), unpaid="the author says so")
    with pytest.raises(DisclosureError, match="presence and sealed"):
        monkeypatch.setitem(FAMILIES, "toy", {"values": Step(lambda data, state: {}, gives={"x": line})})


def test_what_rows_hold_is_not_revealed_by_an_error(monkeypatch):
    def fails(data, state):
        raise MessageError("the value of row 7 is 3.14")

    site = site_of(reasons="sent")
    with pytest.raises(PolicyError) as caught:
        site.answer(toy(monkeypatch, fails))
    assert "3.14" not in str(caught.value) and "3.14" in site.refusals.reasons[0]


def test_two_questions_of_one_canonical_form_do_not_share_noise(monkeypatch):
    """A step that forgets a part of its question: its answers differ, and so does their noise."""

    def careless(data, state, column):
        total = cell_counts(np.zeros(int(column[0]), dtype=np.int64), 1)
        state.report(EntityCount(N), NoiseRequired("total", "the same", total.squared, Fraction(10**4)))
        return {"total": total.values}

    line = ArrayDeclaration(
        "noisy aggregate", "a sum", noisy=True, dtype="int64", behind=(EntityCount, NoiseRequired)
    )
    step = Step(careless, {"column": ArrayDeclaration("control", "which")}, {"total": line})
    monkeypatch.setitem(FAMILIES, "toy", {"total": step})
    site, differences = site_of(privacy=Budget(9.0, 1e-6)), []
    for n in range(2, 40):
        request = Request("Bank", "toy", "total", {"column": np.array([n])}, "s")
        differences.append(int(unpack_reply(site.answer(pack_request(request))).arrays["total"][0]) - n)
    assert len(set(differences)) > 20 and len(site.site_ledger.charges.made) == 38
