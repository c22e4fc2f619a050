"""Records of a CSV file with a key are corrected, added and removed while their site answers."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, printed
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import DataWarning, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.transport.live_config import ActiveRules
from fedstat.federation.transport.signed import SignedSite
from fedstat.operator.command_line import main

N = 120
POLICY = Policy.strict(formulas="any", reasons="sent", small_differences="refuse")


def frame(n=N, seed=0):
    rng = np.random.default_rng(seed)
    x, group = rng.normal(size=n), rng.choice(["a", "b", "c"], size=n)
    y = (rng.random(n) < 1 / (1 + np.exp(-x))).astype(int)
    return pd.DataFrame(
        {"patient_id": [f"P{k:04d}" for k in range(n)], "x": x.round(6), "group": group, "y": y}
    )


def served(tmp_path, key, policy=POLICY):
    make_federation(tmp_path, {name: frame(seed=seed) for seed, name in enumerate("ABC")}, policy=policy)
    for name in "ABC":
        toml = tmp_path / name / "site.toml"
        text = toml.read_text()
        if key:
            text = text.replace('# key = "patient_id"', 'key = "patient_id"', 1)
            assert 'key = "patient_id"' in text
        toml.write_text(text)
    return Federation(tmp_path)


class Records:
    """The file of site B, as its hospital writes it."""

    def __init__(self, federation):
        self.federation, self.path = federation, federation.home / "B.csv"

    def write(self, change):
        change(pd.read_csv(self.path, float_precision="round_trip")).to_csv(self.path, index=False)

    def correct(self, rows, column="x"):
        """Change one cell of each of some rows."""

        def change(found):
            found.loc[list(rows), column] = found.loc[list(rows), column] + 0.5
            return found

        self.write(change)

    def reload(self):
        assert main(["site", "reload", str(self.federation.home / "B")]) == 0
        self.federation.sites["B"].reload_if_changed()
        return self.federation.log[-1]

    def restart(self):
        self.federation.sites["B"].site.site_ledger.store.close()
        self.federation.sites["B"] = SignedSite(self.federation.home / "B", "B", self.federation.log.append)


@pytest.fixture
def federation(tmp_path, capsys):
    opened = served(tmp_path, key=True)
    yield opened
    for site in opened.sites.values():
        site.site.site_ledger.store.close()


def fitted(federation, formula="y ~ x"):
    return fs.GLORE.from_formula(formula, federation.connect()).fit()


CHANGES = {
    "corrected": lambda found: found.assign(x=np.where(found.index < 30, found["x"] + 0.5, found["x"])),
    # Enough rows of each group and outcome: a count of fewer than three would follow by subtraction.
    "added": lambda found: pd.concat([found, frame(N + 40).iloc[N:]]),
    "removed": lambda found: found.iloc[40:],
}


@pytest.mark.parametrize(
    ("change", "restart", "formula"),
    [
        ("corrected", False, "y ~ x + C(group)"),
        ("corrected", True, "y ~ x"),
        ("added", False, "y ~ x"),
        ("removed", True, "y ~ x + C(group)"),
    ],
)
def test_corrected_added_and_removed_records_are_used(federation, change, restart, formula):
    fitted(federation, formula)
    records = Records(federation)
    records.write(CHANGES[change])
    if restart:
        records.restart()
    else:
        assert "they have changed (" in records.reload()
    with pytest.warns(DataWarning, match=r"B: its records have changed since 2\d{3}-"):
        result = fitted(federation, formula)
    home = {name: pd.read_csv(federation.home / f"{name}.csv").drop(columns="patient_id") for name in "ABC"}
    pooled = fs.GLORE.from_formula(formula, fs.ClientPartition.from_frames(home, layout="horizontal")).fit()
    np.testing.assert_allclose(result.params, pooled.params, rtol=1e-9)


def test_the_owner_learns_what_has_changed(federation):
    records = Records(federation)
    fitted(federation)
    records.write(lambda found: CHANGES["added"](CHANGES["removed"](found)))
    records.correct([0, 1])
    assert "they have changed (2 corrected, 40 added, 40 removed)" in records.reload()
    records.write(lambda found: found.iloc[:-40])
    text = records.reload()
    assert "they have changed (40 removed)" in text


def test_few_corrections_are_left_out_where_the_policy_says_so(tmp_path, capsys):
    """The strict policy answers, on other rows, until enough have changed."""
    federation = served(tmp_path, key=True, policy=replace(POLICY, small_differences="leave out"))
    records = Records(federation)
    first = fitted(federation)
    records.correct([3])
    assert "leaves them and others out until at least 5 have changed" in records.reload()
    with pytest.warns(DataWarning):
        few = fitted(federation)
    assert 5 <= first.nobs - few.nobs <= 30
    records.restart()
    with pytest.warns(DataWarning):
        again = fitted(federation)
    assert again.nobs == few.nobs
    np.testing.assert_allclose(again.params, few.params, rtol=1e-12)
    for site in federation.sites.values():
        site.site.site_ledger.store.close()


def test_few_corrections_are_said_to_wait_for_more(federation):
    records = Records(federation)
    fitted(federation)
    records.correct([3])
    text = records.reload()
    assert "they have changed (1 corrected)" in text
    assert "refuses sums over all records until at least 5 have changed" in text
    assert ActiveRules.load(federation.home / "B").reloaded == text
    with pytest.warns(DataWarning), pytest.raises(PolicyError, match="differencing"):
        fitted(federation)
    records.correct([4, 5, 6])
    records.reload()
    with pytest.warns(DataWarning), pytest.raises(PolicyError, match="differencing"):
        fitted(federation)
    records.correct([7])
    assert "refuses" not in records.reload()
    # five persons, but only two of them have the outcome
    with pytest.warns(DataWarning), pytest.raises(PolicyError, match="rows behind a product"):
        fitted(federation)
    records.correct(range(8, 30))
    records.reload()
    with pytest.warns(DataWarning):
        assert fitted(federation).converged


def test_check_says_what_a_start_would_while_the_service_keeps_the_earlier_records(tmp_path, capsys):
    federation = served(tmp_path, key=False)
    fitted(federation)
    records = Records(federation)
    before = records.path.read_bytes()
    records.correct([3])
    assert "could not read its rows again" in records.reload()
    text = printed(capsys, "site", "check", tmp_path / "B", code=1)
    assert "the running service could not read its rows again" in text and "Without a key" in text
    records.path.write_bytes(before)
    records.reload()
    assert "The site is running" in printed(capsys, "site", "check", tmp_path / "B")
    for site in federation.sites.values():
        site.site.site_ledger.store.close()


def test_records_that_are_put_back_give_the_earlier_results(federation):
    records = Records(federation)
    first = fitted(federation)
    before = records.path.read_bytes()
    records.correct([3])
    records.reload()
    records.path.write_bytes(before)
    records.restart()
    with pytest.warns(DataWarning):
        np.testing.assert_array_equal(fitted(federation).params, first.params)


def test_without_a_key_the_refusal_names_the_remedy_and_the_remedy_works(tmp_path, capsys):
    federation = served(tmp_path, key=False)
    records = Records(federation)
    first = fitted(federation)
    before = records.path.read_bytes()
    records.correct(range(8))
    text = records.reload()
    assert "Gone or changed since then: 8." in text and 'key = "COLUMN"' in text
    after = records.path.read_bytes()
    records.path.write_bytes(before)
    toml = tmp_path / "B" / "site.toml"
    toml.write_text(toml.read_text().replace('# key = "patient_id"', 'key = "patient_id"', 1))
    records.restart()
    np.testing.assert_array_equal(fitted(federation).params, first.params)
    records.path.write_bytes(after)
    records.restart()
    with pytest.warns(DataWarning):
        assert (fitted(federation).params != first.params).any()
    for site in federation.sites.values():
        site.site.site_ledger.store.close()
