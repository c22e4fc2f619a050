"""Plans that wait in the folders of served sites: proposed, listed, approved, denied, put in the account."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation, run, served_sites

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import ConsentError, EngineError
from fedstat.federation.audit.event_log import PlanDecision
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.partition.federation_file import coordinator_identity, open_transport, read_federation
from fedstat.federation.transport.signed import SignedSite, open_reply, sign_request
from fedstat.federation.transport.site_folder import (
    DECISION,
    PENDING,
    SignedDecision,
    load_identity,
    open_site,
)

POLICY = Policy(approval="owner")
NAMES = ("East", "West")


def frames(n=120):
    rng = np.random.default_rng(3)
    return {
        name: pd.DataFrame({"age": rng.normal(50.0, 9.0, n), "y": (rng.random(n) < 0.4).astype(float)})
        for name in NAMES
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("approval")
    make_federation(home, frames(), policy=POLICY)
    with served_sites(home, NAMES):
        yield home


def fit(home, formula="y ~ age", **given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        partition = fs.ClientPartition.connect(home / "study", **given)
        return fs.GLORE.from_formula(formula, partition).fit(local=False)


def digests(home, name):
    return sorted(path.stem for path in (home / name / PENDING).glob("*.json"))


def test_an_analysis_waits_is_approved_and_runs_once(home, tmp_path, capsys):
    journal = tmp_path / "journal"
    with pytest.raises(ConsentError) as caught:
        fit(home, journal=journal)
    waiting = {name: digests(home, name)[0] for name in NAMES}
    assert all(f"{name}: its policy (approval)" in str(caught.value) for name in NAMES)
    assert all(digest in str(caught.value) for digest in waiting.values())
    path = home / "East" / PENDING / f"{waiting['East']}.json"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700

    capsys.readouterr()
    assert main(["site", "pending", str(home / "East")]) == 0
    shown = capsys.readouterr().out
    assert f"Plan {waiting['East']}" in shown and "response y; terms age" in shown

    assert main(["site", "approve", str(home / "East"), waiting["East"][:12]]) == 0
    with pytest.raises(ConsentError) as caught:
        fit(home, journal=journal)
    assert "East" not in str(caught.value) and waiting["West"] in str(caught.value)

    # The same analysis, with the journal in which it waited: what was kept then is not handed out again.
    assert main(["site", "approve", str(home / "West"), waiting["West"]]) == 0
    found = fit(home, journal=journal).params
    paths = {name: home / f"{name}.csv" for name in NAMES}
    here = fs.ClientPartition.from_files(paths, layout="horizontal")
    np.testing.assert_allclose(found, fs.GLORE.from_formula("y ~ age", here).fit(local=False).params)

    for name in NAMES:
        site_ledger = read_ledger(home / name, name, load_identity(home / name).public)
        decision = site_ledger.decisions[waiting[name]]
        assert decision.verdict == "approved" and site_ledger.is_used(decision)
        assert not digests(home, name)
    capsys.readouterr()
    assert main(["site", "ledger", str(home / "East")]) == 0
    assert f"approved by {decision.who} on" in capsys.readouterr().out

    with pytest.raises(ConsentError, match=waiting["East"]):
        fit(home)


def test_a_denied_analysis_and_a_decision_that_the_owner_did_not_make(home):
    with pytest.raises(ConsentError):
        fit(home, "y ~ 1")
    known = set(digests(home, "East"))
    with pytest.raises(ConsentError):
        fit(home, "age ~ y")
    (digest,) = set(digests(home, "East")) - known
    decision = PlanDecision(digest, "approved", "owner", time.time_ns())
    forged = to_json(SignedDecision.of(decision, Identity.generate()))
    path = home / "East" / PENDING / f"{digest}{DECISION}"
    path.write_text(forged)
    path.chmod(0o600)
    with pytest.raises(ConsentError, match=f"pending.*{digest}"):
        fit(home, "age ~ y")
    path.unlink()
    assert main(["site", "deny", str(home / "East"), digest]) == 0
    with pytest.raises(ConsentError, match=r"East.*denied"):
        fit(home, "age ~ y")


def test_what_is_there_and_is_no_plan_is_passed_over(home, tmp_path):
    folder = tmp_path / "North"
    data = tmp_path / "North.csv"
    frames()["East"].to_csv(data, index=False)
    assert main(["site", "init", str(folder), "--name", "North", "--data", str(data)]) == 0
    (folder / PENDING).mkdir(mode=0o700)
    for name, content in {"ab.json": "[" * 4000, "cd.json": "{}", "ef.decision": json.dumps([1])}.items():
        (folder / PENDING / name).write_text(content)
        (folder / PENDING / name).chmod(0o600)
    site = open_site(folder)
    assert not site.pending and not site.site_ledger.decisions
    site.site_ledger.store.close()
    answer = run("site", "approve", folder, "ab")
    assert answer.returncode == 1 and "not the plan that was proposed" in answer.stderr
    assert replace(POLICY, approval="auto") == Policy()


class Tiring:
    """A transport that gives up after `n` requests."""

    def __init__(self, transport, questions):
        self.transport, self.left = transport, questions

    def send(self, site, request):
        if not self.left:
            raise EngineError("the line is cut")
        self.left -= 1
        return self.transport.send(site, request)


def test_an_interrupted_analysis_goes_on_under_the_same_consent(home, tmp_path):
    journal, formula = tmp_path / "journal", "y ~ age - 1"
    known = {name: set(digests(home, name)) for name in NAMES}
    with pytest.raises(ConsentError):
        fit(home, formula, journal=journal)
    for name in NAMES:
        (digest,) = set(digests(home, name)) - known[name]
        assert main(["site", "approve", str(home / name), digest]) == 0
    transport = Tiring(open_transport(read_federation(home / "study")), 16)
    with pytest.raises(EngineError, match="line is cut"):
        fit(home, formula, journal=journal, transport=transport)
    assert fit(home, formula, journal=journal).converged
    with pytest.raises(ConsentError, match="pending"):
        fit(home, formula)


class InJob:
    """Carries to sites as a job of NVIDIA FLARE holds them, opened through the link in a kit."""

    def __init__(self, study, folders):
        self.identity = coordinator_identity(study)
        self.sites = {name: SignedSite(folder, name) for name, folder in folders.items()}
        self.fingerprints = read_federation(study).sites

    def send(self, site, request):
        number, question = sign_request(self.identity, site, request)
        return open_reply(self.sites[site].answer(question), self.fingerprints[site], site, number, site)


def test_plans_wait_in_a_job_of_flare_as_well(tmp_path, capsys):
    study, links = make_federation(tmp_path, frames(), policy=POLICY), {}
    for name in NAMES:
        links[name] = tmp_path / "kits" / name
        links[name].parent.mkdir(exist_ok=True)
        links[name].symlink_to(tmp_path / name, target_is_directory=True)
    transport = InJob(study, links)
    with pytest.raises(ConsentError, match=r"East.*pending"):
        fit(tmp_path, "y ~ scale(age)", transport=transport)
    for name in NAMES:
        capsys.readouterr()
        assert main(["site", "pending", str(tmp_path / name)]) == 0
        shown = capsys.readouterr().out
        assert "sums for the transforms" in shown
        assert main(["site", "approve", str(tmp_path / name), *digests(tmp_path, name)]) == 0
    assert fit(tmp_path, "y ~ scale(age)", transport=transport).converged
    with pytest.raises(ConsentError, match=r"East.*pending"):
        fit(tmp_path, "y ~ scale(age)", transport=transport)
    for site in transport.sites.values():
        site.site.site_ledger.store.close()
