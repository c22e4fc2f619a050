"""No file and no message of a stranger ends, holds or fills a process; ledgers stay whole."""

import os
import tracemalloc

import pandas as pd
import pytest
from fuzzing import FITS, HALF, MEMORY, SLOW, bomb, claim, consented, halved, make_targets, partition, run

from fedstat.errors import MessageError, PartitionError
from fedstat.federation.audit.ledger_file import read_ledger
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import Request, pack_request
from fedstat.federation.protocols.linkage import load_alignment
from fedstat.federation.transport.site_folder import load_identity

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    home = tmp_path_factory.mktemp("fuzzed")
    made = make_targets(home)
    run(made, 4 * len(made), seed=0)  # what is compiled or imported once is at rest
    yield made, home
    made["exchange folder"].close()


def links(home):
    """Number of entries in the ledger of the served site, after reading it again and verifying it."""
    site_ledger = read_ledger(home / "served", "North", load_identity(home / "served").public)
    return sum(len(chain.entries) for chain in site_ledger.chains)


def check(targets, inputs, seed):
    made, home = targets
    before = links(home)
    tally = run(made, inputs, seed)
    print(tally)
    assert not tally.crashes, "\n".join(tally.crashes[:20])
    assert tally.inputs >= inputs and tally.slowest[0] < SLOW, str(tally)
    assert tally.memory < MEMORY, str(tally)
    assert links(home) - before > inputs / len(made) / 4


@pytest.mark.parametrize("make", [bomb, claim], ids=["packed", "claimed"])
def test_a_small_file_does_not_fill_the_memory(tmp_path, make):
    content = make()
    assert len(content) < 2**20
    (tmp_path / "alignment.npz").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(PartitionError, match="no alignment"):
        load_alignment(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 32 * 2**20


@pytest.mark.parametrize("name", ["site", "family", "step", "session", "text"])
def test_half_a_character_is_no_text(name):
    request = dict.fromkeys(["site", "family", "step", "session", "text"], "A") | {name: HALF}
    site = Site("A", pd.DataFrame({"x": [1.0, 2.0]}))
    with pytest.raises(MessageError, match="not a fedstat message"):
        site.answer(halved(pack_request(Request(**request))))


def test_the_fits_in_whose_midst_questions_are_asked_are_fits():
    for number in range(len(FITS)):
        made = partition(number >= 5, approval="owner")
        consented(made, number)
        assert all(site.ledger.entries and not site.pending for site in made.sites.values())


def test_malformed_files_and_messages(targets):
    check(targets, 400, seed=1)


@pytest.mark.slow
def test_a_hundred_thousand_malformed_files_and_messages(targets):
    check(targets, 100_000, seed=int(os.environ.get("FEDSTAT_FUZZ_SEED", "2")))
