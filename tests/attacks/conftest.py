"""Fixtures of several attacks: the messages of an analysis, and a site that is served in a folder."""

from __future__ import annotations

import pytest
from test_exchange_folder import Service

from fedstat.federation.protocols.engine import LocalEngine


@pytest.fixture
def messages(monkeypatch):
    """Every request and reply that a coordinator carries, one after the other."""
    kept, send = [], LocalEngine._send

    def keep(engine, request, ledger):
        reply = send(engine, request, ledger)
        kept.append((request, reply))
        return reply

    monkeypatch.setattr(LocalEngine, "_send", keep)
    return kept


@pytest.fixture
def service(tmp_path):
    """A site that is served in an exchange folder, and has ended when the test has."""
    running = Service(tmp_path / "exchange")
    (running.exchange / "North" / "asks").mkdir(parents=True)
    yield running
    running.ended.set()
    if running.thread.ident is not None:
        running.thread.join(60)
    assert not running.thread.is_alive()
