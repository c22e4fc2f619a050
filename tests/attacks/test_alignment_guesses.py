"""An institution that enters keys that it has made up, to learn which of them another institution has."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import ConsentError, PartitionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.partition.connect import align_connected_sites
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.linkage import align_entities
from fedstat.federation.tables.keys import KeyTable
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite, SiteServer
from fedstat.federation.transport.site_folder import apply_trust, open_site, read_description
from fedstat.operator.command_line import main

SPACE, N = 400, 50
"""Keys that can be thought of, and those that the victim has."""


def sites(policy, consents=("Third", "Evil"), guesses=SPACE):
    """A victim with a policy, a third site, and one that enters its guesses."""
    rng = np.random.default_rng(0)
    keys = {"Victim": rng.choice(SPACE, N, False), "Third": rng.choice(SPACE, 30, False)}
    keys["Evil"] = np.arange(guesses)
    policies = {"Victim": policy, "Third": Policy(), "Evil": Policy()}
    made = {
        name: Site(name, KeyTable(name, pd.DataFrame({"id": ids}), ["id"]), policies[name])
        for name, ids in keys.items()
    }
    for site in made.values():
        site.trust.pinned.update({name: other.fingerprint for name, other in made.items()})
    made["Victim"].trust.consents.update(dict.fromkeys(consents, "today"))
    return made, np.sort(keys["Victim"])


def found(made, session="0123456789abcdef"):
    """Keys of the victim that the coordinator and the site of guesses find together."""
    numbers = LocalEngine(made).run(align_entities(list(made), session), Ledger())
    return np.sort(np.flatnonzero(np.isin(made["Evil"]._data.table.places, numbers.rows["Victim"])))


def test_without_a_rule_all_are_found():
    made, victims = sites(Policy.open())
    np.testing.assert_array_equal(found(made), victims)


@pytest.mark.parametrize("consents", [(), ("Third",)], ids=["none", "the other site alone"])
def test_a_strict_site_aligns_with_nobody_without_its_owners_consent(consents):
    made, _ = sites(Policy.strict(), consents)
    with pytest.raises(ConsentError, match=r"Victim: its policy \(alignment\).*fedstat site consent .*Evil'"):
        found(made)
    assert not made["Victim"].site_ledger.refusals  # it depends on no row, and is no bit about one


def test_a_list_of_guesses_is_not_raised():
    made, _ = sites(Policy.strict())
    with pytest.raises(
        ConsentError, match=r"Victim: its policy \(maximum keys\) .* 100 keys, and this one has 400"
    ):
        found(made)


def test_a_consent_serves_once():
    """Guesses in parts, each no longer than is allowed."""
    made, victims = sites(Policy.strict(), guesses=2 * N)
    assert set(found(made)) == {key for key in victims if key < 2 * N}
    with pytest.raises(ConsentError, match="there is none for Third, Evil"):
        found(made, "another session 1")
    made["Victim"].trust.consents["Evil"] = "tomorrow"
    with pytest.raises(ConsentError, match="there is none for Third"):
        found(made, "another session 2")


@pytest.mark.parametrize(
    ("rules", "passes"),
    [({"max_keys": SPACE}, True), ({"max_keys": SPACE - 1}, False), ({"alignment": "allow"}, True)],
    ids=["enough", "one too few", "allowed without consent"],
)
def test_what_the_owner_writes_is_what_holds(rules, passes):
    made, victims = sites(Policy.strict(**rules))
    if passes:
        np.testing.assert_array_equal(found(made), victims)
    else:
        with pytest.raises(ConsentError, match="maximum keys"):
            found(made)


def test_a_strict_partition_of_one_process_needs_no_other_consent():
    frames = {c: pd.DataFrame({"id": np.arange(i, 60 + i), c: np.arange(60.0)}) for i, c in enumerate("ab")}
    partition = fs.ClientPartition.from_frames(frames, on="id", align="private", policy="strict")
    assert len(partition.entities) == 61


@pytest.fixture
def served(tmp_path):
    """Two folders as the commands make them, and an engine to their sites."""
    study, servers = tmp_path / "study", {}
    assert main(["federation", "new", str(study), "--layout", "vertical"]) == 0
    for name in ("Bank", "Tax"):
        frame = pd.DataFrame({"id": np.arange(N), name: np.arange(float(N))})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        data = ["--data", str(tmp_path / f"{name}.csv"), "--key", "id"]
        assert main(["site", "init", str(tmp_path / name), "--name", name, *data]) == 0
    for name, other in (("Bank", "Tax"), ("Tax", "Bank")):
        assert main(["federation", "join", str(study), str(tmp_path / name)]) == 0
        assert main(["site", "pin", str(tmp_path / name), str(tmp_path / other)]) == 0
        servers[name] = SiteServer(open_site(tmp_path / name))

    class Here:
        def send(self, site, request):
            apply_trust(servers[site].site, read_description(tmp_path / site))
            return servers[site].answer(request)

    engine = RemoteEngine({name: RemoteSite(name, Here()) for name in servers})
    yield tmp_path, lambda: align_connected_sites(engine, tuple(servers), study)
    for server in servers.values():
        server.site.site_ledger.store.close()


def test_owners_consent_by_the_command_while_their_sites_are_served(served, capsys):
    home, align = served
    with pytest.raises(ConsentError, match="site consent FOLDER Tax"):
        align()
    assert main(["site", "consent", str(home / "Bank"), "Tax"]) == 0
    with pytest.raises(ConsentError, match=r"Tax: .* none for Bank"):
        align()
    # the consent of the one was spent on the attempt
    for name, other in (("Bank", "Tax"), ("Tax", "Bank")):
        assert main(["site", "consent", str(home / name), other]) == 0
    assert align().n_entities == N
    with pytest.raises(ConsentError):
        align()
    assert main(["site", "consent", str(home / "Bank"), "Nobody"]) == 1
    assert "no key of Nobody is pinned" in capsys.readouterr().err


def test_a_malformed_consent_is_named(served):
    home, _ = served
    text = (home / "Bank" / "site.toml").read_text()
    (home / "Bank" / "site.toml").write_text(text.replace("[consent]", "[consent]\nTax = 7"))
    with pytest.raises(PartitionError, match=r"\[consent\]: expected a time in quotes for Tax"):
        read_description(home / "Bank")
