"""Sites in processes of their own, as strict as they start: described, served, asked."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import numpy as np
import pytest
from operating import make_federation, run, served_sites

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.tables.published import as_published, write_published
from fedstat.operator.command_line import main


def frames_of(data):
    return {name: part.drop(columns=data.site) for name, part in data.train.groupby(data.site)}


@contextlib.contextmanager
def serving(home, frames):
    """Describe and serve strict sites until they are no longer needed; the federation's folder."""
    study = make_federation(home, frames, policy=Policy.strict())
    for name in frames:
        assert main(["site", "describe", str(home / name)]) == 0
    with served_sites(home, frames):
        yield study


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    home = tmp_path_factory.mktemp("strict")
    data = fs.datasets.make_logistic_sites(seed=1)
    with serving(home, frames_of(data)) as study:
        yield home, study, data, frames_of(data)


@pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
def test_strict_sites_fit_as_the_pooled_table(strict):
    _, study, data, frames = strict
    formula = "y ~ " + " + ".join(data.truth.index)
    there = fs.GLORE.from_formula(formula, fs.ClientPartition.connect(study)).fit()
    here = fs.GLORE.from_formula(formula, fs.ClientPartition.from_frames(frames, layout="horizontal")).fit()
    np.testing.assert_allclose(there.params, here.params, rtol=1e-8)
    np.testing.assert_allclose(there.bse, here.bse, rtol=1e-8)


def test_what_is_refused_at_a_distance_says_one_word_or_follows_from_the_question(strict):
    home, study, data, _ = strict
    partition = fs.ClientPartition.connect(study)
    first, second = data.truth.index[:2]
    with pytest.raises(DescriptionError, match='formulas = "any"'):
        fs.GLORE.from_formula(f"y ~ log({first} + 3)", partition)
    fs.GLORE.from_formula(f"y ~ {first}", partition).fit().evaluate()
    with pytest.raises(DescriptionError, match="evaluation once"):
        fs.GLORE.from_formula(f"y ~ {second}", partition).fit().evaluate()
    site = next(iter(partition.sites))
    done = run("site", "answer-again", home / site)
    assert done.returncode == 1 and "another process serves the site" in done.stderr


def test_a_description_that_lacks_something_is_to_be_completed(strict):
    """Last of the served study: it changes what a site publishes."""
    home, study, data, _ = strict
    partition = fs.ClientPartition.connect(study)
    first, second, third = data.truth.index[:3]
    site = next(iter(partition.sites))
    path = home / site / "columns.toml"
    known = as_published(path, "columns.toml")
    del known[first]
    path.write_text(write_published(known | {second: replace(known[second], range=None, knots=())}))
    remedies = {
        f"y ~ {first}": f"column '{first}' is not published. Ask the owner to publish it in columns.toml, as "
        f"section [\"{first}\"] ('fedstat site describe FOLDER' proposes one)",
        f"y ~ log({first} + 3)": f"column '{first}' is not published. Ask the owner to publish it",
        f"y ~ {first}:{third}": f"column '{first}' is not published. Ask the owner to publish it",
        f"{first} ~ {third}": f"column '{first}' is not published. Ask the owner to publish it",
        f"y ~ exp({second})": f"column '{second}' is published without range. Ask the owner to publish its "
        f'range in columns.toml, by  range = [low, high]  in section ["{second}"]',
    }
    for formula, remedy in remedies.items():
        with pytest.raises(DescriptionError, match=f"{site}: .*{re.escape(remedy)}") as caught:
            fs.FederatedOLS.from_formula(formula, partition).fit()
        assert "policy.toml" not in str(caught.value) and "any" not in str(caught.value)


def test_reasons_stay_in_the_owners_log(tmp_path):
    frames = frames_of(fs.datasets.make_logistic_sites(seed=2))
    site = next(iter(frames))
    frames[site] = frames[site].assign(y=0.0)
    frames[site].iloc[0, frames[site].columns.get_loc("y")] = 1.0
    with serving(tmp_path, frames) as study:
        partition = fs.ClientPartition.connect(study)
        for _ in range(2):
            with pytest.raises(PolicyError) as caught:
                fs.GLORE.from_formula("y ~ X1", partition).fit()
            assert caught.value.rule == "rows"
            assert re.match(
                rf"{site}: refused for a reason that depends on rows; the owner's log", str(caught.value)
            )
    log = (tmp_path / site / "refusals.log").read_text()
    assert log.count("minimum events") == 2 and (tmp_path / site / "refusals.log").stat().st_mode & 0o77 == 0
    assert main(["site", "answer-again", str(tmp_path / site)]) == 0
