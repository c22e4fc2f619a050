"""A coordinator uses an approval for something else than its owner has read; a study uses another's data.

Sites answer signed requests, as when they are served. Each attack is tried after an approval by all owners.
"""

import shutil
import warnings
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from noisy_counts import BinsRequest, counting, request_margins  # noqa: F401
from operating import add_second_tables, main, make_federation
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import ConsentError, FedstatError, SecurityError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.envelopes import Envelope, sign_envelope
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.message import Purpose, Request, pack_request
from fedstat.federation.transport.signed import SignedSite, sign_request
from fedstat.federation.transport.site_folder import load_identity
from fedstat.privacy.zcdp import round_to_grid

STATED = {"person": "Ada Berg", "study": "relapse", "purpose": "Does age predict relapse?"}
NAMES = ("A", "B", "C")


def frame(seed, n=120):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"age": rng.normal(50.0, 9.0, n), "y": (rng.random(n) < 0.4).astype(float)})


class Served(Federation):
    """Three sites that answer the coordinators of two studies."""

    def connect(self, folder="study", **stated):
        path = self.home / folder / "federation.toml"
        path.write_text(path.read_text().replace('transport = "folder"', 'transport = "these"'))
        self.coordinator = load_identity(self.home / folder)
        return fs.ClientPartition.connect(path, transport=self, **(STATED | stated))

    def fit(self, formula="y ~ age", folder="study", **stated):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fs.GLORE.from_formula(formula, self.connect(folder, **stated)).fit(local=False)

    def waiting(self):
        return {name: list(site.site.pending) for name, site in self.sites.items()}

    def approved(self, **given):
        """Propose an analysis and have it approved at all sites; the digests by site."""
        with pytest.raises(ConsentError, match="pending"):
            self.fit(**given)
        found = {name: digests[-1] for name, digests in self.waiting().items()}
        for name, digest in found.items():
            assert main(["site", "approve", str(self.home / name), digest]) == 0
        return found

    def reopen(self):
        for name, site in self.sites.items():
            site.site.site_ledger.store.close()
            self.sites[name] = SignedSite(self.home / name, name, self.log.append)


def opened(home, policy):
    make_federation(home, {name: frame(seed) for seed, name in enumerate(NAMES)}, policy=policy)
    return Served(home)


@pytest.fixture
def served(tmp_path, capsys):
    found = opened(tmp_path, Policy.strict(approval="owner", formulas="any"))
    yield found
    for site in found.sites.values():
        site.site.site_ledger.store.close()


def second_study(served, name="trial"):
    assert main(["federation", "new", str(served.home / name), "--name", name]) == 0
    for site in NAMES:
        assert main(["federation", "join", str(served.home / name), str(served.home / site)]) == 0
        given = ["--name", name, "--exchange", str(served.home / name / "exchange")]
        assert main(["site", "study", str(served.home / site), str(served.home / name), *given]) == 0


def new_coordinator(served):
    """The owners replace the coordinator; the study keeps its name and its sites."""
    old = load_identity(served.home / "study").public.fingerprint
    served.home.joinpath("study").rename(served.home / "old")
    exchange = str(served.home / "old" / "exchange")
    assert main(["federation", "new", str(served.home / "study"), "--exchange", exchange]) == 0
    for site in NAMES:
        assert main(["federation", "join", str(served.home / "study"), str(served.home / site)]) == 0
        card = ["site", "pin", str(served.home / site), str(served.home / "study"), "--replace", old]
        assert main(card) == 0


def replace_site(served):
    """Another site is called C, and the owners pin its key: one of three in every sum."""
    old = load_identity(served.home / "C").public.fingerprint
    served.sites["C"].site.site_ledger.store.close()
    served.home.joinpath("C").rename(served.home / "gone")
    data = ["--data", str(served.home / "C.csv"), "--exchange", str(served.home / "study" / "exchange")]
    assert main(["site", "init", str(served.home / "C"), "--name", "C", *data]) == 0
    shutil.copy(served.home / "gone" / "policy.toml", served.home / "C" / "policy.toml")
    assert main(["site", "pin", str(served.home / "C"), str(served.home / "study")]) == 0
    assert (
        main(["federation", "join", str(served.home / "study"), str(served.home / "C"), "--replace", old])
        == 0
    )
    for site in NAMES:
        assert main(["site", "pin", str(served.home / "C"), str(served.home / site)]) == 0
        if site != "C":
            card = ["site", "pin", str(served.home / site), str(served.home / "C"), "--replace", old]
            assert main(card) == 0
    served.sites["C"] = SignedSite(served.home / "C", "C", served.log.append)


def released(served):
    return {name: site.site.site_ledger.entities for name, site in served.sites.items() if name != "C"}


def test_the_approved_analysis_is_answered_once(served):
    served.approved()
    assert served.fit().converged
    with pytest.raises(ConsentError, match="pending"):
        served.fit()


OTHERS = (
    {"person": "Eve"},
    {"person": ""},
    {"study": "marketing"},
    {"study": ""},
    {"purpose": "Who relapses?"},
    {"purpose": ""},
    {"formula": "age ~ y"},
)


def test_an_approval_is_of_one_person_study_purpose_and_formula(served):
    served.approved()
    before = released(served)
    for other in OTHERS:
        with pytest.raises(ConsentError, match="pending"):
            served.fit(**other)
        assert released(served) == before, other
    assert served.fit().converged  # what was approved is not used up


def test_an_approval_is_of_one_study(served):
    second_study(served)
    served.approved()
    before = released(served)
    # under its own name, and under that of the study whose analysis was approved
    with pytest.raises(ConsentError, match="pending"):
        served.fit(folder="trial", study="trial")
    with pytest.raises(ConsentError, match="has no study"):
        served.fit(folder="trial")
    assert released(served) == before


def test_an_approval_is_of_one_coordinator(served):
    served.approved()
    new_coordinator(served)
    before = released(served)
    with pytest.raises(ConsentError, match="pending"):
        served.fit()
    assert released(served) == before


def test_an_approval_is_of_one_list_of_sites(served):
    served.approved()
    replace_site(served)
    before = released(served)
    with pytest.raises(ConsentError) as caught:
        served.fit()
    assert all(f"{name}: its policy (approval)" in str(caught.value) for name in NAMES)
    assert released(served) == before


def test_an_approval_at_another_site_is_none(served):
    """A decision that the owner of A has signed is put into the folder of B."""
    with pytest.raises(ConsentError):
        served.fit()
    waiting = served.waiting()
    assert main(["site", "approve", str(served.home / "A"), waiting["A"][0]]) == 0
    for name, place in (("B", waiting["B"][0]), ("C", waiting["A"][0])):
        for path in (served.home / "A" / "pending").iterdir():
            target = served.home / name / "pending" / path.name.replace(waiting["A"][0], place)
            shutil.copy(path, target)
            target.chmod(0o600)
    with pytest.raises(ConsentError) as caught:
        served.fit()
    assert "A: its policy" not in str(caught.value)
    assert all(f"{name}: its policy (approval)" in str(caught.value) for name in "BC")


def test_a_used_approval_that_is_put_back_is_none(served):
    with pytest.raises(ConsentError):
        served.fit()
    waiting = served.waiting()
    for name, (digest,) in waiting.items():
        assert main(["site", "approve", str(served.home / name), digest]) == 0
    kept = {name: served.home / f"kept-{name}" for name in NAMES}
    for name, place in kept.items():
        shutil.copytree(served.home / name / "pending", place)
    served.fit()
    for name, place in kept.items():
        shutil.copytree(place, served.home / name / "pending", dirs_exist_ok=True)
    for reopened in (False, True):
        if reopened:
            served.reopen()
        with pytest.raises(ConsentError, match="pending"):
            served.fit()


def test_the_date_is_the_one_that_was_signed(served):
    """A date that is changed on its way breaks the signature; a later proposal does not change the record."""
    found = served.approved()
    site = served.sites["A"].site
    dated = site.site_ledger.proposals[found["A"]]
    assert dated.written
    request = Request("A", "schema", "describe_table", {}, "5" * 16, "{}", turn=1, purpose=Purpose(**STATED))
    number, question = sign_request(served.coordinator, "A", pack_request(request))
    for old, new in ((dated.written[:4].encode(), b"2031"), (b"Ada Berg", b"Eve Berg")):
        assert old in question
        with pytest.raises(SecurityError):
            served.sites["A"].answer(question.replace(old, new), "a request", number)
    assert served.fit().converged
    assert site.site_ledger.proposals[found["A"]] == dated
    with pytest.raises(ConsentError, match="pending"):
        served.fit()
    assert site.site_ledger.proposals[found["A"]].proposed > dated.proposed
    assert site.site_ledger.decisions[found["A"]].when > dated.proposed


def test_an_envelope_for_another_site_or_study_is_refused(served):
    second_study(served)
    served.reopen()
    served.coordinator = load_identity(served.home / "study")
    request = Request("A", "schema", "describe_table", {}, "5" * 16, "{}", turn=1, purpose=Purpose(**STATED))
    number, question = sign_request(served.coordinator, "A", pack_request(request))
    for name in "BC":
        with pytest.raises(SecurityError):
            served.sites[name].answer(question, "a request", number)
    stranger = load_identity(served.home / "B")
    forged = sign_envelope(stranger, Envelope("coordinator", "A", number, pack_request(request)))
    with pytest.raises(SecurityError):
        served.sites["A"].answer(forged, "a request", number)


# ---- tables and budgets of another study ---------------------------------------------------------------

COST = "1/200"
EDGES = (40.0, 50.0, 60.0)


@pytest.fixture
def budgeted(tmp_path, capsys):
    """Two studies of one table, and a third one of a second table; each table has a budget."""
    policy = Policy.strict(privacy=Budget(1.0, 1e-6))
    found = opened(tmp_path, policy)
    second_study(found)
    tables = {name: frame(seed + 10).rename(columns={"age": "lactate"}) for seed, name in enumerate(NAMES)}
    add_second_tables(tmp_path, tables, policy)
    for name in NAMES:
        place = tmp_path / name / "tables" / "icu"
        for folder in (tmp_path / name, place):
            assert main(["site", "describe", str(folder)]) == 0
    found.reopen()
    second = {name: SignedSite(tmp_path / name / "tables" / "icu") for name in NAMES}
    yield found, second
    for site in (*found.sites.values(), *second.values()):
        site.site.site_ledger.store.close()


def counts(served, study, name, column="age"):
    stated = {"study": name} if name else {}
    partition = served.connect(study, **stated)
    protocol = request_margins(
        [(site, BinsRequest(column, COST, EDGES)) for site in NAMES], "7" * 15 + study[0]
    )
    return {site: part for site, _, part in partition.engine.run(protocol, Ledger())}


def spent(sites):
    return {name: site.site.site_ledger.charges.spent for name, site in sites.items()}


def once():
    """The charge of one request at every site, rounded up as charges are."""
    return dict.fromkeys(NAMES, round_to_grid(Fraction(COST), up=True))


def test_two_studies_cannot_average_the_noise_of_one_table(budgeted):
    served, tables = budgeted
    first = counts(served, "study", "")
    before = spent(served.sites)
    assert before == once()
    second = counts(served, "trial", "trial")
    for name in NAMES:
        np.testing.assert_array_equal(first[name], second[name])
    assert spent(served.sites) == before
    assert not any(spent(tables).values())


def test_a_study_reaches_no_other_table_and_no_other_budget(budgeted):
    served, tables = budgeted
    before = spent(served.sites)
    # the coordinator of one study, at the table of the other: its signature is not known there
    for study, name in (("study", ""), ("trial", "trial")):
        request = Request(
            "A", "schema", "describe_table", {}, "5" * 16, "{}", turn=1, purpose=Purpose("", name)
        )
        number, question = sign_request(load_identity(served.home / study), "A", pack_request(request))
        with pytest.raises(SecurityError):
            tables["A"].answer(question, "a request", number)
    # and the other way round
    request = Request("A", "schema", "describe_table", {}, "5" * 16, "{}", turn=1, purpose=Purpose("", "icu"))
    number, question = sign_request(load_identity(served.home / "icu"), "A", pack_request(request))
    with pytest.raises(SecurityError):
        served.sites["A"].answer(question, "a request", number)
    # a column of the other table is none of this one
    with pytest.raises(FedstatError, match="publishes no column 'lactate'"):
        counts(served, "study", "", "lactate")
    inner, served.sites = served.sites, tables
    counts(served, "icu", "", "lactate")
    served.sites = inner
    assert spent(served.sites) == before and spent(tables) == once()


def test_a_session_of_one_study_is_not_continued_by_another(budgeted):
    served, _ = budgeted
    counts(served, "study", "")
    session = "7" * 15 + "s"
    request = Request("A", "margins", "count_bins", {}, session, "{}", turn=2, purpose=Purpose("", "trial"))
    number, question = sign_request(load_identity(served.home / "trial"), "A", pack_request(request))
    assert b"began this session" in served.sites["A"].answer(question, "a request", number)
