"""Records of a database change while a site is served: when they are read again, and what then holds."""

import sqlite3

import numpy as np
import pandas as pd
import pytest
from operating import make_federation
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import PolicyError, ReceiptError, SessionError
from fedstat.federation.audit.receipt import Receipt
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.transport.live_config import ActiveRules
from fedstat.federation.transport.signed import SignedSite
from fedstat.operator.command_line import main
from fedstat.operator.site_status import describe_rules

N = 120
pytestmark = pytest.mark.filterwarnings("ignore:.*records have changed since:fedstat.errors.DataWarning")
DATA = """[data]
kind = "sql"
query = "SELECT patient, x, y FROM ward"
key = "patient"
env = "{name}_DATABASE"
"""


def frame(n=N, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    return pd.DataFrame(
        {"patient": range(n), "x": x, "y": (rng.random(n) < 1 / (1 + np.exp(-x))).astype(int)}
    )


class Ward:
    """The database of a site, as its own hospital writes it."""

    def __init__(self, path):
        self.path = path

    def write(self, statement, *values):
        with sqlite3.connect(self.path) as connection:
            connection.execute(statement, values)

    def add(self, n):
        new = frame(N + n, seed=0).iloc[N:]
        new["patient"] += 10_000
        with sqlite3.connect(self.path) as connection:
            new.to_sql("ward", connection, if_exists="append", index=False)


@pytest.fixture
def ward(tmp_path, monkeypatch, capsys):
    """Three sites, one of them with a database; the output of this site at its end."""
    frames = {name: frame(seed=seed) for seed, name in enumerate("ABC")}
    make_federation(tmp_path, frames, policy=Policy.open())
    path = tmp_path / "ward.db"
    with sqlite3.connect(path) as connection:
        frames["B"].to_sql("ward", connection, index=False)
    toml = tmp_path / "B" / "site.toml"
    before, rest = toml.read_text().split("[data]\n")
    after = rest[rest.index("# Types of the columns") :]
    toml.write_text(before + DATA.format(name="B") + after)
    monkeypatch.setenv("B_DATABASE", f"sqlite:///{path}")
    capsys.readouterr()
    return Ward(path)


@pytest.fixture
def federation(tmp_path, ward):
    opened = Federation(tmp_path)
    yield opened
    for site in opened.sites.values():
        site.site.site_ledger.store.close()


def fitted(federation):
    result = fs.GLORE.from_formula("y ~ x", federation.connect()).fit()
    return result, np.concatenate([result.params, result.bse])


def test_a_fit_in_another_session_is_over_the_records_of_before_until_the_owner_says(federation, ward):
    _, first = fitted(federation)
    ward.add(30)
    _, still = fitted(federation)
    np.testing.assert_array_equal(still, first)
    assert main(["site", "reload", str(federation.home / "B")]) == 0
    result, later = fitted(federation)
    assert (later != first).any() and result.nobs == 3 * N + 30
    assert "read its rows again, 150 rows: they have changed (30 added)" in federation.log[-1]


def test_a_session_that_is_open_goes_on_or_ends_but_mixes_no_two_states(federation, ward):
    model = fs.GLORE.from_formula("y ~ x", federation.connect())
    first = model.fit()
    # nothing has changed: what the owner says ends no session
    main(["site", "reload", str(federation.home / "B")])
    np.testing.assert_array_equal(model.fit().params, first.params)
    assert "they are the same as before" in federation.log[-1]
    ward.add(30)
    main(["site", "reload", str(federation.home / "B")])
    with pytest.raises(SessionError, match="B: its data were read again since this session began"):
        model.fit()


@pytest.mark.parametrize("change", [False, True])
def test_a_session_goes_on_after_a_restart_over_the_same_records_only(federation, ward, change):
    """Two patients change numbers: the same rows in another order, which no count and no sum would show."""
    model = fs.GLORE.from_formula("y ~ x", federation.connect())
    first = model.fit()
    federation.sites["B"].site.site_ledger.store.close()
    if change:
        for old, new in ((3, -1), (90, 3), (-1, 90)):
            ward.write("UPDATE ward SET patient = ? WHERE patient = ?", new, old)
    federation.sites["B"] = SignedSite(federation.home / "B", "B", federation.log.append)
    if change:
        with pytest.raises(SessionError, match="B: it was started again"):
            model.fit()
    else:
        np.testing.assert_array_equal(model.fit().params, first.params)


def test_one_record_more_is_not_revealed_by_two_fits(federation, ward):
    """An analyst who asks before and after: the difference would be the one record."""
    fitted(federation)
    ward.add(1)
    main(["site", "reload", str(federation.home / "B")])
    with pytest.raises(PolicyError, match="differencing"):
        fitted(federation)
    ward.write("DELETE FROM ward WHERE patient >= 10000")
    ward.add(12)
    main(["site", "reload", str(federation.home / "B")])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("DELETE FROM ward WHERE patient = 7", "removed"),
        ("UPDATE ward SET x = x + 1 WHERE patient = 7", "corrected"),
    ],
)
def test_one_record_that_is_gone_or_corrected_is_not_revealed_by_two_fits(federation, ward, change, what):
    """The key recognizes the record: the difference of two fits would be what it was and is."""
    fitted(federation)
    ward.write(change)
    main(["site", "reload", str(federation.home / "B")])
    with pytest.raises(PolicyError, match="differencing"):
        fitted(federation)
    for text in (federation.log[-1], ActiveRules.load(federation.home / "B").reloaded):
        assert f"they have changed (1 {what})" in text
        assert "refuses sums over all records until at least 5 have changed" in text


def test_records_are_read_before_the_next_question_where_rules_have_changed_as_well(federation, ward):
    B = federation.sites["B"]
    ward.add(30)
    policy = federation.home / "B" / "policy.toml"
    policy.write_text(policy.read_text() + "\n# longer by a line\n")
    main(["site", "reload", str(federation.home / "B")])
    B.reload_if_changed()
    assert B.site.data.table.n_rows == N + 30


def test_a_database_that_is_away_ends_nothing(federation, ward):
    _, first = fitted(federation)
    ward.path.rename(ward.path.with_suffix(".away"))
    main(["site", "reload", str(federation.home / "B")])
    _, still = fitted(federation)
    np.testing.assert_array_equal(still, first)
    assert "could not be opened" in federation.log[-1]


def test_ledger_receipt_and_status_say_when_records_were_read(federation, ward, capsys):
    result, _ = fitted(federation)
    receipt = result.receipt()
    read = receipt.sites()["data as of"]
    assert (read.str.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")).all()
    assert read["B"] == federation.sites["B"].site.site_ledger.as_of
    assert Receipt.from_json(receipt.to_json()).to_json() == receipt.to_json()
    # a time, and nothing else in its place
    with pytest.raises(ReceiptError, match="time"):
        Receipt.from_json(receipt.to_json().replace(read["B"], "2026-13: 7"))
    capsys.readouterr()
    assert describe_rules(federation.home / "B")["data as of"] == read["B"]
    main(["site", "ledger", str(federation.home / "B")])
    assert f"data as of {read['B']}" in capsys.readouterr().out
