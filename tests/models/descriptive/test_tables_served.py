"""Tables of columns of several served sites, and tables that an owner approves."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation, served_sites

import fedstat as fs
from fedstat.errors import ConsentError
from fedstat.federation.tables.aligned_table import ALIGNMENT
from fedstat.federation.transport.site_folder import PENDING, open_records, read_description

N = 240
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")


def people():
    """Return the columns of a clinic and a trial, whose rows are in any order, and lack some people."""
    rng = np.random.default_rng(4)
    keys = pd.DataFrame({"id": [f"P{k:03d}" for k in range(N)]})
    clinic = keys.assign(age=rng.normal(60.0, 9.0, N), sex=rng.choice(["f", "m"], N))
    trial = keys.assign(arm=rng.choice(["a", "b"], N), bmi=27.0 + 0.1 * (clinic["age"] - 60.0))
    trial["bmi"] += rng.normal(0.0, 2.0, N)
    survey = keys.assign(smoker=rng.choice(["no", "yes"], N))
    return {
        "Clinic": clinic.sample(frac=1.0, random_state=1),
        "Trial": trial.sample(frac=0.9, random_state=2),
        "Survey": survey.sample(frac=0.8, random_state=3),
    }


def numbers_at(folder):
    """Number of every row of a site's own file, as its alignment has it."""
    table = open_records(folder, read_description(folder))
    order, _ = table._fingerprint(np.load(folder / ALIGNMENT)["salt"].tobytes())
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.load(folder / ALIGNMENT)["numbers"]
    return numbers


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Sites in processes of their own, and the same tables in one process, in the order of the alignment."""
    home, frames = tmp_path_factory.mktemp("vertical tables"), people()
    study = make_federation(home, frames, ["id"])
    with served_sites(home, frames):
        assert main(["federation", "align", str(study)]) == 0
        tables = {
            name: frame.drop(columns="id").assign(number=numbers_at(home / name))
            for name, frame in frames.items()
        }
        yield fs.ClientPartition.connect(study), fs.ClientPartition.from_frames(tables, on="number")


def test_counts_of_two_sites_are_those_of_one_process(both):
    theirs, ours = (fs.crosstab(one, "sex", "arm") for one in both)
    pd.testing.assert_frame_equal(theirs, ours, check_exact=True)
    assert theirs.attrs["missing"] == ours.attrs["missing"] == 24
    frames = people()
    joined = frames["Clinic"].merge(frames["Trial"], on="id")
    assert theirs.to_numpy().tolist() == pd.crosstab(joined["sex"], joined["arm"]).to_numpy().tolist()
    assert theirs.attrs["ledger"].rounds == ours.attrs["ledger"].rounds


def test_table_one_is_that_of_one_process(both):
    given = {"by": "arm", "smd": True, "pvalues": True}
    theirs, ours = (fs.table_one(one, "age + sex + bmi + C(smoker)", **given) for one in both)
    pd.testing.assert_frame_equal(theirs.tidy(), ours.tidy(), rtol=1e-9, atol=0.0)
    pd.testing.assert_frame_equal(theirs.to_frame(), ours.to_frame(), check_exact=True)


def test_correlations_are_those_of_one_process(both):
    theirs, ours = (fs.corr(one, "age + bmi") for one in both)
    pd.testing.assert_frame_equal(theirs, ours, rtol=1e-9)
    assert theirs.attrs["nobs"]["age"]["bmi"] == ours.attrs["nobs"]["age"]["bmi"] == 216


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """Sites whose owners approve every analysis."""
    home, table = tmp_path_factory.mktemp("approved tables"), fs.datasets.make_survival()
    frames = {name: table[table["hospital"] == name].drop(columns="hospital") for name in ("Bonn", "Kiel")}
    make_federation(home, frames, policy=fs.Policy(approval="owner"))
    with served_sites(home, frames):
        yield home, fs.ClientPartition.from_frames(frames, layout="horizontal")


ANALYSES = {
    "table one": (
        lambda one: fs.table_one(one, "age", by="arm").tidy(),
        ["age", "arm"],
    ),
    "Kaplan-Meier": (
        lambda one: fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", one).fit(6, until=36).tidy(),
        ["months", "died", "arm"],
    ),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_an_owner_reads_the_plan_of_a_table_and_approves_it(waiting, name, capsys):
    home, here = waiting
    analyze, columns = ANALYSES[name]

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return analyze(fs.ClientPartition.connect(home / "study"))

    with pytest.raises(ConsentError, match=r"approval"):
        run()
    for site in ("Bonn", "Kiel"):
        (digest,) = (path.stem for path in (home / site / PENDING).glob("*.json"))
        capsys.readouterr()
        assert main(["site", "pending", str(home / site)]) == 0
        shown = capsys.readouterr().out
        assert f"Plan {digest}" in shown and all(column in shown for column in columns)
        assert main(["site", "approve", str(home / site), digest]) == 0
    pd.testing.assert_frame_equal(run(), analyze(here), check_exact=True)
