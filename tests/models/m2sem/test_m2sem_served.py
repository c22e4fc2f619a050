"""Clusters over sites in processes of their own: the posteriors of one process, to the bit."""

from __future__ import annotations

import numpy as np
from cluster_cases import QUICK, make_frames
from operating import make_federation, served_sites
from test_connect_vertical import numbers_at

import fedstat as fs
from fedstat.operator.command_line import main


def test_served_sites_give_the_clusters_of_one_process(tmp_path):
    frames, _ = make_frames(n=80, P=3)
    frames = {name: frame.assign(id=[f"P{i:03d}" for i in frame["id"]]) for name, frame in frames.items()}
    # Values per entity are what the family rests on; columns are not published here.
    policy = fs.Policy.strict(per_entity="any", alignment="allow", formulas="any")
    study = make_federation(tmp_path, frames, ["id"], policy)
    with served_sites(tmp_path, frames):
        assert main(["federation", "align", str(study)]) == 0
        there = fs.ClientPartition.connect(study)
        theirs = fs.M2SEM(there, 2, 1).fit(cov_type=None, **QUICK)
        predicted = theirs.predict(there)
        tables = {
            name: frame.drop(columns="id").assign(number=numbers_at(tmp_path / name))
            for name, frame in frames.items()
        }
    here = fs.ClientPartition.from_frames(tables, on="number", policy=policy)
    ours = fs.M2SEM(here, 2, 1).fit(cov_type=None, **QUICK)
    np.testing.assert_array_equal(theirs.posterior.to_numpy(), ours.posterior.to_numpy())
    np.testing.assert_array_equal(theirs.members().to_numpy(), ours.members().to_numpy())
    assert not theirs.members().isna().to_numpy().any()
    assert theirs.llf == ours.llf and theirs.ledger.rounds == ours.ledger.rounds
    np.testing.assert_array_equal(predicted.to_numpy(), ours.predict(here).to_numpy())
