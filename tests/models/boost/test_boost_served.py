"""Boosting over sites in processes of their own, whose owners declare the curves of their tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import declared, simulated
from operating import make_federation, served_sites

import fedstat as fs
from fedstat.errors import PartitionError

TEXT = (
    "y(t) ~ bsignal(x1, knots=2) + brandom(g) + bfpc(x2, knots=0) + bconcurrent(x1, knots=0)"
    " + bhist(x2, knots=0, degree=1)"
)


def declare(site, domains):
    """The text that an owner writes into site.toml."""
    lines = [
        f'[data.curves.{name}]\ncolumns = "{name}_*"\ndomain = {ends}\n' for name, ends in domains.items()
    ]
    path = site / "site.toml"
    path.write_text("\n".join([path.read_text(), *lines]))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("curves")
    frame = simulated(300).assign(person=np.arange(300) // 3 % 40)
    frames = {f"site{k}": frame[frame["site"] == k].drop(columns="site") for k in range(3)}
    make_federation(home, frames)
    for name in frames:
        declare(home / name, {curve: [0, 1] for curve in ("x1", "x2", "y")})
    with served_sites(home, frames):
        yield home


def test_the_same_fit_to_the_bit_as_in_one_process(home):
    there = fs.ClientPartition.connect(home / "study")
    frames = {name: pd.read_csv(home / f"{name}.csv", float_precision="round_trip") for name in there.sites}
    here = fs.ClientPartition.from_frames(frames, layout="horizontal", curves=declared("x1", "x2", "y"))
    assert there.columns == here.columns
    for name in ("x1", "x2", "y"):
        assert (there.curves["site1"][name].grid == here.curves["site1"][name].grid).all()
    models = [fs.FedFunctionBoost.from_formula(TEXT, one) for one in (there, here)]
    assert str(models[0].explain()).count("passes") > 4
    theirs, ours = (model.fit(steps=40, select="cv", folds=2, seed=1) for model in models)
    np.testing.assert_array_equal(theirs.coef, ours.coef)
    assert theirs.ledger.bytes == ours.ledger.bytes
    assert fs.verify_receipt(theirs.receipt(), there.fingerprints).ok
    models = [fs.FedFunctionBoost.from_formula("mean ~ age", one, labels=["person"]) for one in (there, here)]
    theirs, ours = (model.fit(steps=20, select="cv", folds=("person", 2)) for model in models)
    np.testing.assert_array_equal(theirs.cv, ours.cv)


def test_sites_that_declare_another_domain_are_not_connected(tmp_path):
    frame = simulated(120)
    frames = {f"site{k}": frame[frame["site"] == k].drop(columns="site") for k in range(2)}
    study = make_federation(tmp_path, frames)
    for k, name in enumerate(frames):
        declare(tmp_path / name, {"y": [0, 1 + k]})
    with (
        served_sites(tmp_path, frames),
        pytest.raises(PartitionError, match="curve 'y' has domain"),
    ):
        fs.ClientPartition.connect(study)
