"""The data dictionary of a study: signed by the coordinator, accepted by sites."""

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, printed
from test_owner_commands import patients
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import DataWarning
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.tables.dictionary import DictionaryColumn

TOML = """
[age]
label = "Age at admission"
kind = "number"
range = [18, 120]
unit = "years"

[sex]
kind = "category"
levels = ["male", "female"]
codes = { 1 = "male", 2 = "female" }

[admitted]
kind = "number"
range = [0, 4000]
since = "2020-01-01"

[y]
kind = "number"
range = [0, 1]
levels = [0, 1]
"""


@pytest.fixture
def home(tmp_path, capsys):
    make_federation(
        tmp_path, {name: patients(seed) for seed, name in enumerate("ABC")}, policy=Policy.strict()
    )
    (tmp_path / "study" / "dictionary.toml").write_text(TOML)
    capsys.readouterr()
    return tmp_path


def accept_everywhere(home, capsys):
    printed(capsys, "federation", "dictionary", home / "study")
    for name in "ABC":
        printed(capsys, "site", "dictionary", home / name, "--accept")
        printed(capsys, "site", "describe", home / name)


def test_sites_read_and_describe_their_data_by_the_dictionary(home, capsys):
    text = printed(capsys, "federation", "dictionary", home / "study")
    assert "Data dictionary 1 of study" in text and "1 is male, 2 is female" in text
    assert "Age at admission" in text and "days since 2020-01-01" in text
    accept_everywhere(home, capsys)
    columns = [(home / name / "columns.toml").read_text() for name in "ABC"]
    assert columns[0] == columns[1] == columns[2] and "range = [18.0, 120.0]" in columns[0]
    assert "No problems found" in printed(capsys, "site", "check", home / "A")
    federation = Federation(home)
    result = fs.GLORE.from_formula("y ~ age + C(sex) + admitted", federation.connect()).fit()
    for site in federation.sites.values():
        site.site.site_ledger.store.close()
    frames = {}
    for name in "ABC":
        raw = pd.read_csv(home / f"{name}.csv", parse_dates=["admitted"])
        sex = pd.Categorical(raw["sex"].map({1: "male", 2: "female"}), ["male", "female"])
        days = (raw["admitted"] - pd.Timestamp("2020-01-01")).dt.days
        frames[name] = raw[["age", "y"]].assign(sex=sex, admitted=days)
    pooled = fs.GLORE.from_formula(
        "y ~ age + C(sex) + admitted", fs.ClientPartition.from_frames(frames, layout="horizontal")
    ).fit()
    np.testing.assert_allclose(np.sort(np.abs(result.params)), np.sort(np.abs(pooled.params)), rtol=1e-8)


def test_a_description_that_departs_from_the_dictionary_is_reported_to_owners_and_once_to_analysts(
    home, capsys
):
    accept_everywhere(home, capsys)
    path = home / "B" / "columns.toml"
    path.write_text(path.read_text().replace('unit = "years"', 'unit = "months"').replace("120.0", "130.0"))
    path = home / "C" / "columns.toml"
    path.write_text(path.read_text().split('["admitted"]')[0] + '["y"]\nkind = "number"\nlevels = [0, 1]\n')
    for name, text in {
        "B": "B: column 'age' of dictionary 1 of the study is published with another unit and range",
        "C": "C: column 'admitted' of dictionary 1 of the study is not published",
    }.items():
        for command in ("describe", "check"):
            shown = printed(capsys, "site", command, home / name, code=1)
            assert text in shown.replace("\n    ", " ") and "'fedstat site describe FOLDER', which" in shown
    federation = Federation(home)
    with pytest.warns(DataWarning) as caught:
        federation.connect()
    (text,) = (str(one.message) for one in caught)
    assert (
        "B: 'age' (another unit and range)" in text
        and "'admitted' (not published)" in text
        and "A:" not in text
    )
    for site in federation.sites.values():
        site.site.site_ledger.store.close()


def test_a_description_from_before_the_dictionary_is_compared_with_it(home, capsys):
    """The owner has described the columns by the data, and accepts a dictionary then."""
    printed(capsys, "site", "describe", home / "A")
    columns = home / "A" / "columns.toml"
    printed(capsys, "federation", "dictionary", home / "study")
    printed(capsys, "site", "dictionary", home / "A", "--accept")
    shown = printed(capsys, "site", "describe", home / "A", code=1).replace("\n    ", " ")
    assert "'age' of dictionary 1 of the study is published with another unit and range" in shown
    columns.unlink()
    printed(capsys, "site", "describe", home / "A")
    assert "No problems found" in printed(capsys, "site", "check", home / "A")


GROUPS = """
[patient]
label = "Patient, with several visits"
kind = "group"

[x]
kind = "number"
range = [-9, 9]

[y]
kind = "number"
range = [-9, 9]
"""


def test_groups_with_other_labels_at_each_site_are_described_without_their_labels(tmp_path, capsys):
    frames = {}
    for seed, name in enumerate("ABC"):
        rng = np.random.default_rng(seed)
        patient = np.repeat(np.arange(40), 5)
        x, effect = rng.normal(size=200), rng.normal(size=40)[patient]
        labels = [f"{name}-{p}" for p in patient]
        frames[name] = pd.DataFrame({"patient": labels, "x": x, "y": x + effect + rng.normal(size=200)})
    make_federation(tmp_path, frames, policy=Policy.strict())
    (tmp_path / "study" / "dictionary.toml").write_text(GROUPS)
    accept_everywhere(tmp_path, capsys)
    columns = (tmp_path / "A" / "columns.toml").read_text()
    assert '["patient"]\nkind = "group"\n' in columns and "A-1" not in columns
    assert "No problems found" in printed(capsys, "site", "check", tmp_path / "A")
    federation = Federation(tmp_path)
    served = federation.connect()
    local = fs.ClientPartition.from_frames(frames, layout="horizontal")
    fits = [fs.FederatedMixed.from_formula("y ~ x + (1 | patient)", one).fit() for one in (served, local)]
    np.testing.assert_allclose(fits[0].params, fits[1].params, rtol=1e-8)
    for formula in ("y ~ x + patient", "y ~ x + C(patient)", "y ~ x:patient"):
        with pytest.raises(
            fs.errors.FedstatError, match=r"labels of groups, which a model uses in \(1 \| pat"
        ):
            fs.FederatedOLS.from_formula(formula, served).fit()
    for site in federation.sites.values():
        site.site.site_ledger.store.close()


def test_data_that_depart_from_the_dictionary_are_named_to_the_owner(home, capsys):
    frame = patients().assign(age=lambda held: held["age"].replace(held["age"].max(), 150))
    frame["sex"] = frame["sex"].replace(2, 9)
    frame.to_csv(home / "A.csv", index=False)
    printed(capsys, "federation", "dictionary", home / "study")
    printed(capsys, "site", "dictionary", home / "A", "--accept")
    text = printed(capsys, "site", "describe", home / "A", code=1)
    assert "column 'age' has values outside its published range" in text
    assert "column 'sex' has 1 level(s) that its description does not list" in text


def test_a_new_version_has_the_next_number_and_an_old_one_is_refused(home, capsys):
    accept_everywhere(home, capsys)
    old = (home / "study" / "dictionary.json").read_bytes()
    assert "Data dictionary 1 of" in printed(capsys, "federation", "dictionary", home / "study")
    (home / "study" / "dictionary.toml").write_text(TOML.replace("120", "110"))
    assert "Data dictionary 2 of" in printed(capsys, "federation", "dictionary", home / "study")
    text = printed(capsys, "site", "dictionary", home / "A", "--accept")
    assert "another than dictionary 1" in text and "has accepted dictionary 2" in text
    (home / "study" / "exchange" / "dictionary.json").write_bytes(old)
    assert "dictionary 1 is older than dictionary 2" in printed(
        capsys, "site", "dictionary", home / "A", code=1
    )


def test_a_dictionary_of_another_coordinator_is_refused(home, capsys):
    printed(capsys, "federation", "dictionary", home / "study")
    path = home / "study" / "exchange" / "dictionary.json"
    path.write_text(path.read_text().replace("years", "month"))
    assert "altered since it was signed" in printed(
        capsys, "site", "dictionary", home / "A", "--accept", code=1
    )
    printed(capsys, "federation", "new", home / "other", "--name", "study")
    (home / "other" / "dictionary.toml").write_text(TOML)
    printed(capsys, "federation", "dictionary", home / "other")
    text = printed(
        capsys, "site", "dictionary", home / "A", home / "other" / "dictionary.json", "--accept", code=1
    )
    assert "not signed by the coordinator that this site trusts" in text
    assert not (home / "A" / "dictionary.json").exists()


def test_a_template_is_made_first(home, capsys):
    (home / "study" / "dictionary.toml").unlink()
    assert "is a template" in printed(capsys, "federation", "dictionary", home / "study", code=1)
    assert "describes no column yet" in printed(capsys, "federation", "dictionary", home / "study", code=1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"codes": {"1": "man"}}, "codes name a level"),
        ({"labels": {"man": "a man"}}, "labels describe a level"),
        ({"since": "2020-01-01"}, "dates with since"),
    ],
)
def test_a_column_that_contradicts_itself_is_refused(change, text):
    with pytest.raises(fs.errors.PartitionError, match=text):
        DictionaryColumn("category", levels=("male", "female"), **change).check()
