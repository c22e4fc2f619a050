"""A site trusts signatures, not the transport."""

from __future__ import annotations

import os

import pandas as pd
import pytest

from fedstat.errors import MessageError, PartitionError, SecurityError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.audit.ledger_file import begin_ledger
from fedstat.federation.crypto.envelopes import Envelope, open_envelope, sign_envelope
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.message import unpack_reply
from fedstat.federation.transport.signed import SignedSite

COORDINATORS = Identity.generate()


@pytest.fixture
def folder(tmp_path):
    identity = Identity.generate()
    identity.save(tmp_path / "identity.json")
    begin_ledger(tmp_path, identity)
    pd.DataFrame({"x": [1.0, 2.0]}).to_csv(tmp_path / "table.csv", index=False)
    lines = [
        'name = "north"',
        f'coordinator = "{COORDINATORS.public.fingerprint}"',
        'site_column = "site"',
        "[data]",
        'kind = "csv"',
        'path = "table.csv"',
    ]
    (tmp_path / "site.toml").write_text("\n".join(lines))
    (tmp_path / "site.toml").chmod(0o600)
    return tmp_path


def question(identity=COORDINATORS, sender=COORDINATOR, receiver="north"):
    return sign_envelope(identity, Envelope(sender, receiver, "1", b"no message"))


def test_the_coordinator_is_answered_under_the_sites_signature(folder):
    answer = SignedSite(folder, "north").answer(question())
    own = Identity.load(folder / "identity.json").public.fingerprint
    envelope = open_envelope(answer, own, "the answer")
    assert (envelope.sender, envelope.receiver, envelope.number) == ("north", COORDINATOR, "1")
    with pytest.raises(MessageError):
        unpack_reply(envelope.payload)


@pytest.mark.parametrize(
    "forged",
    [{"identity": Identity.generate()}, {"sender": "south"}, {"receiver": "south"}],
    ids=["another key", "another sender", "another receiver"],
)
def test_a_question_that_is_not_the_coordinators_is_refused(folder, forged):
    with pytest.raises(SecurityError):
        SignedSite(folder, "north").answer(question(**forged))


def test_a_site_that_pins_no_coordinator_is_not_opened(folder):
    path = folder / "site.toml"
    path.write_text(path.read_text().replace(COORDINATORS.public.fingerprint, ""))
    with pytest.raises(PartitionError, match="pins no coordinator"):
        SignedSite(folder, "north")


def test_what_the_owner_revokes_is_heeded_before_the_next_question(folder):
    path, site = folder / "site.toml", SignedSite(folder, "north")
    site.answer(question())
    text = path.read_text() + f'\n[pinned]\neast = "{COORDINATORS.public.fingerprint}"\n'
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    site.answer(question())
    assert set(site.site.trust.pinned) == {"east"}
    path.write_text(text.replace("coordinator = ", "coordinator = '' # "))
    os.utime(path, ns=(2, 2))
    with pytest.raises(SecurityError):
        site.answer(question())


def test_the_transports_name_must_be_the_sites(folder):
    with pytest.raises(PartitionError, match="belongs to 'north', but FLARE's name is 'south'"):
        SignedSite(folder, "south")
