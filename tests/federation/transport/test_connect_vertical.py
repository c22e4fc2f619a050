"""Sites in processes of their own that hold different columns: aligned once, the same numbers after it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from operating import main, make_federation, serve, served_sites, wait

import fedstat as fs
from fedstat.errors import EngineError, NotAvailableError, PartitionError, SecurityError
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.partition.connect import align_connected_sites
from fedstat.federation.protocols.linkage import load_alignment
from fedstat.federation.protocols.schema import table_schema
from fedstat.federation.tables import aligned_table as alignment_table_module
from fedstat.federation.tables.aligned_table import ALIGNMENT, new_session
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite, SiteServer
from fedstat.federation.transport.site_folder import open_records, open_site, read_description
from fedstat.operator.federation_commands import alignment_table

KEY = ["id", "visit"]
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")


def make_frames(n=260, seed=5):
    """A bank with both responses, and two clients that lack some of its entities; rows in any order."""
    rng = np.random.default_rng(seed)
    keys = pd.DataFrame({"id": [f"P{i:04d}" for i in range(n)], "visit": 1})
    x = rng.normal(size=(n, 5))
    eta = 0.3 + x @ [0.8, -0.5, 0.6, 0.4, 0.0]
    bank = keys.assign(y=eta + rng.normal(size=n), won=rng.random(n) < 1 / (1 + np.exp(-eta)), b1=x[:, 0])
    tax = keys.assign(t1=x[:, 1], t2=x[:, 2]).sample(frac=0.8, random_state=1)
    shop = keys.assign(s1=x[:, 3], kind=rng.choice(["a", "b", "c"], n)).sample(frac=0.7, random_state=2)
    shop.loc[shop.index[:7], ["s1", "kind"]] = np.nan  # keys without a record
    return {"Bank": bank.sample(frac=1, random_state=3), "Tax": tax, "Shop": shop}


def numbers_at(folder):
    """Number of every row of a site's own file, as the site keeps it."""
    table = open_records(folder, read_description(folder))
    order, _ = table._fingerprint(np.load(folder / ALIGNMENT)["salt"].tobytes())
    by_row = np.empty(len(order), dtype=np.int64)
    by_row[order] = np.load(folder / ALIGNMENT)["numbers"]
    return by_row


def numbered(home, frames, **given):
    """The tables in one process, in the order of the entities that the alignment gave them."""
    tables = {
        name: frame.drop(columns=KEY).assign(number=numbers_at(home / name)) for name, frame in frames.items()
    }
    return fs.ClientPartition.from_frames(tables, on="number", **given)


@pytest.fixture(scope="module")
def frames():
    return make_frames()


@pytest.fixture(scope="module")
def federation(frames, tmp_path_factory):
    """Three sites in processes of their own, aligned."""
    home = tmp_path_factory.mktemp("vertical")
    study = make_federation(home, frames, KEY)
    with served_sites(home, frames) as running:
        assert main(["federation", "align", str(study)]) == 0
        yield {"home": home, "study": study, "running": running}


@pytest.fixture(scope="module")
def there(federation):
    return fs.ClientPartition.connect(federation["study"])


@pytest.fixture(scope="module")
def here(federation, frames, there):
    """The same in one process; its sessions have names of the same length, so that bytes can be compared."""
    return replace(numbered(federation["home"], frames), _aligned_as=there._aligned_as)


FITS = {
    "moments": (lambda p: fs.VFEMRegression.from_formula("y ~ . - won", p, coordinator="apart"), {}),
    "iterative": (
        lambda p: fs.VFEMRegression.from_formula(
            "y ~ b1 + t1 + s1", p, coordinator="apart", between="independent"
        ),
        {"exchange": "iterative", "iteration": fs.Iteration(tol=1e-5)},
    ),
    "binomial": (
        lambda p: fs.VFEMGLM.from_formula(
            "won ~ b1 + t1 + s1", p, family=sm.families.Binomial(), coordinator="apart"
        ),
        {},
    ),
    "selection": (lambda p: fs.VerticalGLM.from_formula("y ~ b1 + t1 + t2", p, coordinator="apart"), {}),
}


@pytest.mark.parametrize("name", FITS)
def test_the_same_fit_to_the_bit(there, here, name):
    make, arguments = FITS[name]
    ours, theirs = (make(p).fit(**arguments) for p in (here, there))
    pd.testing.assert_series_equal(theirs.params, ours.params, check_exact=True)
    pd.testing.assert_series_equal(theirs.bse, ours.bse, check_exact=True)
    assert (theirs.ledger.rounds, theirs.ledger.bytes) == (ours.ledger.rounds, ours.ledger.bytes)
    assert fs.verify_receipt(theirs.receipt(), there.fingerprints).ok


def test_the_same_imputations_to_the_bit(there, here):
    ours, theirs = (fs.impute(p, "y ~ . - won", m=3, seed=1, coordinator="apart") for p in (here, there))
    pd.testing.assert_frame_equal(theirs.sums(2), ours.sums(2), check_exact=True)
    assert (theirs.ledger.rounds, theirs.ledger.bytes) == (ours.ledger.rounds, ours.ledger.bytes)
    assert "per entity" not in set(theirs.ledger.releases()["kind"])


@pytest.mark.parametrize("name", FITS)
def test_the_same_dry_run(there, here, name):
    make, arguments = FITS[name]
    ours, theirs = (make(p).explain(**arguments) for p in (here, there))
    pd.testing.assert_frame_equal(theirs.table, ours.table)


def test_predictions_of_the_entities_that_are_connected_to(there, here):
    ours, theirs = (FITS["moments"][0](p).fit() for p in (here, there))
    found, expected = theirs.get_prediction(there), ours.get_prediction(here)
    for one in ("predicted_mean", "se_mean"):
        np.testing.assert_array_equal(getattr(found, one), getattr(expected, one))
    assert found.ledger.at is None  # the coordinator is apart, and what the bank shows it leaves the bank
    assert {entry.sender for entry in found.ledger.entries} >= {"Bank", "Tax", "Shop"}


def test_what_is_known_without_rows(there, here):
    assert there.layout == "vertical" and there.key == tuple(KEY) and there.columns == here.columns
    assert there.empty_rows == here.empty_rows and there.n_entities == here.n_entities
    reported, known = there.describe(), here.describe()
    pd.testing.assert_frame_equal(reported.patterns, known.patterns)
    assert reported.sites["entities"].tolist() == known.sites["entities"].tolist()
    assert "unknown" in str(reported) and "connected" in repr(there)
    there.plot_missing()
    with pytest.raises(NotAvailableError, match="in one place"):
        there.correlation()


def test_no_fit_goes_on_without_a_site_whose_columns_nobody_else_has(federation):
    with pytest.raises(PartitionError, match="vertical layout no fit can continue without a site"):
        fs.ClientPartition.connect(federation["study"], quorum=2)
    with pytest.raises(PartitionError, match="quorum: expected a whole number"):
        fs.ClientPartition.connect(federation["study"], quorum=4)


def test_the_coordinator_is_apart_unless_the_file_says_where(federation, there):
    assert fs.VFEMRegression.from_formula("y ~ b1 + t1 + s1", there).coordinator == "apart"
    path = federation["study"] / "federation.toml"
    text = path.read_text()
    try:
        path.write_text(text.replace("[sites]", 'coordinator = "Bank"\n[sites]'))
        partition = fs.ClientPartition.connect(path)
    finally:
        path.write_text(text)
    assert fs.VFEMRegression.from_formula("y ~ b1 + t1 + s1", partition).coordinator == "Bank"


def test_a_site_that_starts_again_takes_its_alignment_up(federation, here, capsys):
    folder = federation["home"] / "Tax"
    federation["running"]["Tax"].send_signal(signal.SIGTERM)
    assert federation["running"]["Tax"].wait(600) == 0
    federation["running"]["Tax"] = serve(folder)
    wait(folder, federation["running"]["Tax"])
    capsys.readouterr()
    assert main(["federation", "test", str(federation["study"])]) == 0
    reported = capsys.readouterr().out
    assert "aligned" in reported and reported.count("id, visit") == reported.count("  yes\n") == 3, reported
    model = FITS["selection"][0](fs.ClientPartition.connect(federation["study"]))
    np.testing.assert_array_equal(model.fit().params, FITS["selection"][0](here).fit().params)


# ---- what goes wrong, with the sites of the folders in this process --------------------------------------


class Here:
    """Carries to the sites of folders that are open in this process."""

    def __init__(self, home, names):
        self.home, self.sites = home, {}
        for name in names:
            self.start(name)

    def start(self, name):
        """Start a site, again where it runs."""
        if name in self.sites:
            self.sites[name].site.site_ledger.store.close()
        self.sites[name] = SiteServer(open_site(self.home / name))

    def send(self, site, request):
        return self.sites[site].answer(request)


@pytest.fixture
def study(frames, tmp_path):
    folder = make_federation(tmp_path, frames, KEY)
    transport = Here(tmp_path, frames)
    yield Study(tmp_path, folder, transport)
    for server in transport.sites.values():
        server.site.site_ledger.store.close()


@dataclass
class Study:
    """Folders, and what carries questions to their sites."""

    home: Path
    folder: Path
    transport: Here

    def connect(self, **given):
        return fs.ClientPartition.connect(self.folder, transport=self.transport, **given)

    def align(self, names=("Bank", "Tax", "Shop")):
        engine = RemoteEngine({name: RemoteSite(name, self.transport) for name in names})
        return align_connected_sites(engine, names, self.folder)

    def standing(self):
        request = {name: server.site._data for name, server in self.transport.sites.items()}
        return alignment_table(
            self.folder, {name: table_schema(name, d.table, d.policy) for name, d in request.items()}
        )


def fitted(partition):
    return FITS["selection"][0](partition).fit().params.to_numpy()


def test_nothing_is_requested_before_the_entities_are_aligned(study):
    with pytest.raises(PartitionError, match=r"have not been aligned yet; run 'fedstat federation align"):
        study.connect()
    assert "not yet" in study.standing()
    session = new_session("0123456789abcdef")
    request = Request("Bank", "design", "open_response", {}, session, '{"response": "y", "columns": ["y"]}')
    with pytest.raises(PartitionError, match=r"Bank: its entities have not been aligned .* yet"):
        unpack_reply(study.transport.send("Bank", pack_request(request)))


def test_what_the_folders_keep(study, frames):
    alignment = study.align()
    for folder in (study.folder, study.home / "Tax"):
        assert (folder / ALIGNMENT).stat().st_mode & 0o777 == 0o600
    kept = load_alignment(study.folder)
    assert kept.name == alignment.name and kept.n_entities == 260
    assert [len(kept.listed[name]) for name in frames] == [260, 208, 182]
    assert [len(kept.rows(name)) for name in frames] == [260, 208, 175]
    keys = {name: frame.set_index(KEY).index for name, frame in frames.items()}
    for one, other in (("Bank", "Tax"), ("Tax", "Shop")):
        linked = [pd.Series(numbers_at(study.home / name), keys[name]) for name in (one, other)]
        first, second = linked[0].align(linked[1], join="inner")
        assert first.equals(second) and len(first) == len(keys[one].intersection(keys[other]))
    assert study.standing().count("yes") == 3


def test_a_model_of_an_earlier_alignment_is_refused(study):
    study.align()
    partition = study.connect()
    model = FITS["selection"][0](partition)
    before = fitted(partition)
    study.align()
    for late in (model.fit, lambda: FITS["selection"][0](partition)):
        with pytest.raises(PartitionError, match=r"have been aligned again since this session began"):
            late()
    np.testing.assert_allclose(fitted(study.connect()), before, rtol=1e-10)


def test_other_rows_in_another_order_stay_aligned_and_other_keys_do_not(study, frames):
    study.align()
    before = fitted(study.connect())
    path = study.home / "Tax.csv"
    frames["Tax"].sample(frac=1, random_state=8).to_csv(path, index=False)
    study.transport.start("Tax")
    np.testing.assert_array_equal(fitted(study.connect()), before)
    assert_changed(study, frames["Tax"].iloc[:-9])
    emptied = frames["Tax"].copy()
    emptied.iloc[0, 2:] = np.nan  # the same keys, and one of them without a record
    assert_changed(study, emptied)
    study.align()
    assert fitted(study.connect()).shape == before.shape


def assert_changed(study, frame):
    frame.to_csv(study.home / "Tax.csv", index=False)
    study.transport.start("Tax")
    with pytest.raises(PartitionError, match=r"Tax: its keys, or which of them .*federation align") as raised:
        study.connect()
    assert "Bank" not in str(raised.value)
    assert "its keys have changed" in study.standing()
    assert main(["site", "check", str(study.home / "Tax")]) == 1


def test_without_a_site_its_own_entities_are_gone(study, frames):
    study.align()
    partition = study.connect(without=["Bank"])
    listed = {key for name in ("Tax", "Shop") for key in frames[name]["id"]}
    assert partition.n_entities == len(listed) and tuple(partition.sites) == ("Tax", "Shop")
    tables = {
        name: frames[name].drop(columns=KEY).assign(number=numbers_at(study.home / name))
        for name in ("Tax", "Shop")
    }
    known = fs.ClientPartition.from_frames(tables, on="number")
    for name in partition.sites:
        np.testing.assert_array_equal(partition.rows[name], known.rows[name])


def test_a_site_that_joins_later_or_holds_another_alignment_is_named(study):
    study.align(("Bank", "Tax"))
    with pytest.raises(PartitionError, match=r"Shop: it has joined since the entities were aligned"):
        study.connect()
    assert study.connect(without=["Shop"]).n_entities == 260
    study.align()
    earlier = (study.home / "Tax" / ALIGNMENT).read_bytes()
    study.align()
    (study.home / "Tax" / ALIGNMENT).write_bytes(earlier)
    study.transport.start("Tax")
    with pytest.raises(PartitionError, match=r"Tax: it holds another alignment than the coordinator"):
        study.connect()
    (study.home / "Tax" / ALIGNMENT).unlink()
    study.transport.start("Tax")
    with pytest.raises(PartitionError, match=r"Tax: it holds no alignment any more"):
        study.connect()


def test_files_that_others_may_read_or_that_are_cut_are_refused(study):
    study.align()
    path = study.home / "Tax" / ALIGNMENT
    path.chmod(0o644)
    with pytest.raises(SecurityError, match=rf"others can read or write .*chmod 600 .*{ALIGNMENT}"):
        study.transport.start("Tax")
    path.write_bytes(path.read_bytes()[:-40])
    path.chmod(0o600)
    with pytest.raises(PartitionError, match=r"is no alignment of this site, and has to be removed"):
        study.transport.start("Tax")
    own = study.folder / ALIGNMENT
    own.write_bytes(b"PK")
    with pytest.raises(PartitionError, match=r"is no alignment of a federation; remove it, and run"):
        study.connect(without=["Tax"])


def test_a_folder_that_cannot_be_written_keeps_the_alignment_before(study, monkeypatch):
    study.align()
    before = [(folder / ALIGNMENT).read_bytes() for folder in (study.folder, study.home / "Bank")]

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(alignment_table_module, "write_atomic", full)
    with pytest.raises(EngineError, match=r"Bank: the alignment cannot be written .*No space left"):
        study.align()
    assert before == [(folder / ALIGNMENT).read_bytes() for folder in (study.folder, study.home / "Bank")]
    monkeypatch.undo()
    assert study.connect().n_entities == 260


def test_tables_that_cannot_be_linked_are_listed(study, frames):
    frames["Shop"].rename(columns={"s1": "t1"}).to_csv(study.home / "Shop.csv", index=False)
    study.transport.start("Shop")
    path = study.home / "Tax" / "site.toml"
    path.write_text(path.read_text().replace('key = ["id", "visit"]', ""))
    study.transport.start("Tax")
    with pytest.raises(PartitionError, match=r"Tax: it names no key") as raised:
        study.connect()
    assert "column 't1' is at 2 sites" in str(raised.value)
    with pytest.raises(fs.errors.MessageError, match=r"Tax: its owner offers no keys to align by"):
        study.align()


def test_a_journal_goes_on_under_the_alignment_that_it_began_with(study, tmp_path):
    study.align()
    before = fitted(study.connect(journal=tmp_path / "journal"))
    again = study.connect(journal=tmp_path / "journal")
    np.testing.assert_array_equal(fitted(again), before)
    assert again.engine._journal.taken_up > 10
    study.align()
    with pytest.raises(PartitionError, match=r"another alignment than .*journal of an earlier alignment"):
        study.connect(journal=tmp_path / "journal")


def test_sketches_need_a_secret_that_the_owners_share(study, frames):
    def sketched(partition):
        model = fs.VFEMRegression.from_formula(
            "y ~ t1 + s1", partition, coordinator="apart", between="independent"
        )
        options = fs.Iteration(cross_products="sketch", sketch_size=50, tol=1e-5)
        return model.fit(exchange="iterative", iteration=options)

    study.align()
    with pytest.raises(PartitionError, match=r"has no secret in common .* 'fedstat site seed"):
        sketched(study.connect())
    first, *others = frames
    assert main(["site", "seed", str(study.home / first)]) == 0
    seed = str(read_description(study.home / first).seed)
    for name in others:
        path = study.home / name / "site.toml"
        path.write_text(path.read_text().replace('seed = ""', f'seed = "{seed}"'))
    for name in frames:
        study.transport.start(name)
    here = numbered(study.home, frames, shared_seed=int(seed, 16))
    np.testing.assert_array_equal(sketched(study.connect()).cov_params(), sketched(here).cov_params())


def test_the_layouts_are_not_mixed(study):
    path = study.folder / "federation.toml"
    path.write_text(path.read_text().replace('layout = "vertical"', 'layout = "horizontal"'))
    with pytest.raises(PartitionError, match=r"Bank: it links its records by a key, as in the vertical"):
        study.connect()
    assert main(["federation", "align", str(study.folder)]) == 1


def test_the_command_shows_key_and_alignment(study, capsys):
    study.align()
    capsys.readouterr()
    name = load_alignment(study.folder).name
    main(["site", "check", str(study.home / "Shop")])
    reported = capsys.readouterr().out
    assert (
        "id, visit" in reported and f"as {name}" in reported and "182" in reported and "175 rows" in reported
    )
