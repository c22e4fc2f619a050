"""An owner changes the rules while the site answers: they hold from the next question on."""

import os
import re

import pandas as pd
import pytest
from operating import make_federation, serve, until_true, wait

import fedstat as fs
from fedstat.errors import EngineError, PolicyError, SessionError
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.rules import rules_of, stricter_rules
from fedstat.federation.transport.live_config import ActiveRules
from fedstat.federation.transport.signed import SignedSite, open_reply, sign_request
from fedstat.federation.transport.site_folder import load_identity
from fedstat.operator.command_line import main

LINE = "min_count = 5"


def frame(n: int = 40) -> pd.DataFrame:
    x = pd.Series(range(n), dtype=float)
    return pd.DataFrame({"x": x % 7, "z": (x * 3) % 11, "y": (x % 2).astype(int)})


def put(path, text):
    """Write a file with the times of the one before: a clock may be set back, and a file put back."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def home(tmp_path, capsys):
    make_federation(tmp_path, {name: frame() for name in "ABC"})
    capsys.readouterr()
    return tmp_path


class Federation:
    """The served sites, over either transport, in this process; the analyst's own end of them."""

    def __init__(self, home):
        self.home, self.log = home, []
        self.sites = {name: SignedSite(home / name, name, self.log.append) for name in "ABC"}
        self.coordinator = load_identity(home / "study")

    def send(self, name, request):
        number, question = sign_request(self.coordinator, name, request)
        answer = self.sites[name].answer(question)
        return open_reply(answer, self.sites[name].site.fingerprint, name, number, "an answer")

    def connect(self, journal=None):
        path = self.home / "study" / "federation.toml"
        path.write_text(path.read_text().replace('transport = "folder"', 'transport = "these"'))
        return fs.ClientPartition.connect(path, transport=self, journal=journal)


@pytest.fixture
def federation(home):
    opened = Federation(home)
    yield opened
    for site in opened.sites.values():
        site.site.site_ledger.store.close()


def test_a_stricter_rule_counts_at_the_next_question_and_ends_open_sessions(federation, tmp_path):
    path = federation.home / "B" / "policy.toml"
    text = path.read_text()
    model = fs.GLORE.from_formula("y ~ x", federation.connect(tmp_path / "journal"))
    put(path, text.replace(LINE, "min_count = 41"))
    with pytest.raises(SessionError, match=r"B: its owner has made its rules stricter .*set aside"):
        model.fit()
    with pytest.raises(PolicyError, match="minimum count"):
        fs.GLORE.from_formula("y ~ x", federation.connect()).fit()
    assert any("stricter in min_count" in line for line in federation.log)
    put(path, text)
    again = fs.GLORE.from_formula("y ~ x", federation.connect()).fit()
    assert again.converged


def test_a_looser_rule_lets_open_sessions_go_on(federation):
    path = federation.home / "B" / "policy.toml"
    model = fs.GLORE.from_formula("y ~ x", federation.connect())
    put(path, path.read_text().replace(LINE, "min_count = 4"))
    assert model.fit().converged
    assert federation.sites["B"].site.policy.min_count == 4


def test_ledger_memory_and_charges_are_not_begun_again(federation):
    site, path = federation.sites["B"].site, federation.home / "B" / "policy.toml"
    fs.GLORE.from_formula("y ~ x", federation.connect()).fit()
    site_ledger, memory, released = site.site_ledger, site._data.memory, site._data.memory.released
    sessions = len(site_ledger.chains)
    put(path, path.read_text().replace(LINE, "min_count = 6") + "\n[privacy]\nepsilon = 1.0\ndelta = 1e-6\n")
    federation.sites["B"].reload_if_changed()
    assert released is not None and site._data.memory is memory and memory.released is released
    assert site.site_ledger is site_ledger and len(site_ledger.chains) == sessions
    assert site.privacy.total == str(Budget(1.0, 1e-6).rho)
    assert site._noise.policy is site.policy


@pytest.mark.parametrize("wrong", ["min_count = ", "min_cuont = 5", None])
def test_a_policy_that_cannot_be_read_answers_nothing_until_it_can(federation, wrong):
    path = federation.home / "B" / "policy.toml"
    text = path.read_text()
    model = fs.GLORE.from_formula("y ~ x", federation.connect())
    if wrong is None:
        path.unlink()
    else:
        path.write_text(wrong)
    with pytest.raises(EngineError, match=r"policy.toml"):
        model.fit()
    with pytest.raises(EngineError, match=r"policy.toml"):
        federation.connect()
    assert len([line for line in federation.log if "answers no requests" in line]) == 1
    assert "policy.toml" in ActiveRules.load(federation.home / "B").problem
    path.write_text(text)
    path.chmod(0o600)
    assert fs.GLORE.from_formula("y ~ x", federation.connect()).fit().converged
    assert ActiveRules.load(federation.home / "B").problem == ""


def test_rules_that_somebody_else_may_have_written_are_not_taken_over(federation):
    path = federation.home / "B" / "policy.toml"
    path.chmod(0o666)
    path.write_text(path.read_text().replace(LINE, "min_count = 1"))
    with pytest.raises(EngineError, match="chmod 600"):
        federation.connect()
    assert federation.sites["B"].site.policy.min_count == 5


def test_rules_that_others_may_write_from_now_on_are_not_answered_by(federation):
    path = federation.home / "B" / "policy.toml"
    federation.connect()
    path.chmod(0o666)
    with pytest.raises(EngineError, match="chmod 600"):
        federation.connect()
    path.chmod(0o600)
    federation.connect()


@pytest.mark.parametrize(
    "entry, value", [("seed", "0123456789abcdef" * 2), ("name", "Z"), ("site_column", "other")]
)
def test_a_site_that_is_to_be_another_one_answers_nothing_until_it_is_started_again(federation, entry, value):
    """The owner is not shown a policy that the site does not apply."""
    path = federation.home / "B" / "site.toml"
    text = path.read_text()
    changed = re.sub(rf'(?m)^{entry} = ".*"$', f'{entry} = "{value}"', text)
    assert changed != text
    path.write_text(changed)
    with pytest.raises(EngineError, match=rf"site.toml' has another {entry}: restart the service"):
        federation.connect()
    path.write_text(text)
    assert fs.GLORE.from_formula("y ~ x", federation.connect()).fit().converged


def test_columns_are_read_again_and_what_is_no_longer_published_cannot_be_requested(federation):
    B = federation.home / "B"
    assert main(["site", "describe", str(B)]) == 0
    assert set(federation.connect().sites["B"].published) >= {"x", "z"}
    text = (B / "columns.toml").read_text()
    rest = text[: text.index('["z"]')]
    put(B / "columns.toml", rest)
    assert "z" not in federation.connect().sites["B"].published
    (B / "columns.toml").write_text(rest + '\n["absent"]\nkind = "number"\nrange = [0.0, 1.0]\n')
    with pytest.raises(EngineError, match="absent"):
        federation.connect()


def test_every_rule_is_known_to_be_looser_or_stricter():
    strict, loose = Policy.strict(), Policy.open()
    for rule in rules_of(Policy).values():
        assert rule.within(rule.default, rule.default) and rule.within(rule.strict, rule.strict)
    assert not stricter_rules(strict, strict) and set(stricter_rules(loose, strict)) >= {"dealer", "formulas"}
    # A strict site leaves rows out where an open one refuses.
    assert stricter_rules(strict, loose) == ("small_differences",)
    narrow = Policy(families=frozenset({"glore"}), max_columns=3, privacy=Budget(1.0, 1e-6), approval="owner")
    assert set(stricter_rules(loose, narrow)) == {"families", "max_columns", "privacy", "approval"}
    assert stricter_rules(narrow, loose) == ("privacy",)  # what noise covered may not leave without it
    wider = Policy(families=frozenset({"glore", "vfem"}), max_columns=4, privacy=Budget(2.0, 1e-6))
    assert not stricter_rules(narrow, wider)


def test_check_and_status_compare_with_what_the_service_uses(home, capsys):
    """The service that runs over a folder takes up a change while it is idle, and says where it cannot."""
    A = home / "A"

    def shown(*words):
        main(["site", *words, str(A)])
        return capsys.readouterr().out

    process = serve(A)
    try:
        wait(A, process)
        assert "those of policy.toml and columns.toml" in shown("status")
        path = A / "policy.toml"
        text = path.read_text()
        path.write_text("nonsense")
        until_true(lambda: ActiveRules.load(A).problem)
        assert "answers no requests" in shown("status") and "nonsense" not in (A / "log.txt").read_text()
        path.write_text(text.replace(LINE, "min_count = 7"))
        until_true(lambda: not ActiveRules.load(A).problem)
        assert "answers no requests" not in shown("status")
        assert "now uses policy.toml" in (A / "log.txt").read_text()
        os.kill(process.pid, 19)  # while it stands still it cannot read anything
        path.write_text(text.replace(LINE, "min_count = 8"))
        for reported in (shown("status"), shown("check")):
            assert "uses an earlier policy.toml" in reported
        os.kill(process.pid, 18)
        until_true(lambda: "uses an earlier" not in shown("check"))
    finally:
        process.kill()
        process.wait()
