"""Effects of a treatment over sites in processes of their own: to the bit as here."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from operating import make_federation, served_sites

import fedstat as fs
from fedstat.federation.protocols import engine

TABLE = fs.datasets.make_survival().assign(ward=lambda table: table.index // 4)
NAMES = {"Bonn": "bonn", "Kiel": "kiel", "Trier": "trier", "Ulm": "ulm"}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same tables at served sites with the strict policy, and in this process."""
    home = tmp_path_factory.mktemp("hospitals")
    frames = {
        name: TABLE[TABLE["hospital"] == hospital].drop(columns="hospital").reset_index(drop=True)
        for hospital, name in NAMES.items()
    }
    make_federation(home, frames)
    with served_sites(home, frames):
        there = fs.ClientPartition.connect(home / "study")
        frames = {name: pd.read_csv(home / f"{name}.csv") for name in there.sites}
        yield there, fs.ClientPartition.from_frames(frames, layout="horizontal")


def test_effects_and_balance_are_those_of_one_process_to_the_bit(both):
    models = [
        fs.TreatmentEffect.from_formula("died ~ age", one, treatment="arm ~ age", family="binomial")
        for one in both
    ]
    assert models[0].explain().passes
    balances = [model.balance() for model in models]
    pd.testing.assert_frame_equal(*(one.tidy() for one in balances), check_exact=True)
    pd.testing.assert_frame_equal(*(one.overlap for one in balances), check_exact=True)
    theirs, ours = (model.fit() for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    np.testing.assert_array_equal(theirs.site_estimates, ours.site_estimates)
    assert fs.verify_receipt(theirs.receipt(), both[0].fingerprints).ok


@pytest.mark.parametrize(
    ("name", "formula", "more"),
    [
        ("GLORE", "died ~ arm", {}),
        ("FederatedGEE", "died ~ arm", {"groups": "ward"}),
        ("FederatedCox", "Surv(months, died) ~ arm", {}),
    ],
)
def test_models_of_weighted_rows_are_those_of_one_process_to_the_bit(both, name, formula, more):
    models = []
    for one in both:
        treatment = fs.TreatmentEffect.from_formula("died ~ 1", one, treatment="arm ~ age")
        weights = treatment.balance(overlap=False)
        models.append(getattr(fs, name).from_formula(formula, one, weights=weights, **more))
    assert models[0].explain().passes
    theirs, ours = (model.fit() for model in models)
    np.testing.assert_array_equal(theirs.params, ours.params)
    np.testing.assert_array_equal(theirs.cov_params(), ours.cov_params())
    assert fs.verify_receipt(theirs.receipt(), both[0].fingerprints).ok


MANY = pd.concat([TABLE] * 3, ignore_index=True).assign(site=lambda table: table.index % 25)


@pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")
@pytest.mark.parametrize("sites", [1, 3, 25])
def test_sites_in_threads_give_the_numbers_of_one_thread_to_the_bit(monkeypatch, sites):
    """All classes of results: effects, of one site's rows, balance, times, and weighted models."""
    table = MANY.assign(site=(MANY["site"] % sites).astype(str)).sample(frac=1.0, random_state=1)
    monkeypatch.setattr(engine, "processors", lambda: 3)

    def numbers(least):
        monkeypatch.setattr(engine, "MANY_ROWS", least)
        at = fs.ClientPartition.from_frame(table, by="site")
        given = {"treatment": "arm ~ age + C(stage)"}
        model = fs.TreatmentEffect.from_formula("died ~ age", at, family="binomial", **given)
        balance, weighted = model.balance(), model.fit("ipw_ra", local=False)
        found = [balance.tidy(), balance.overlap, weighted.tidy(), weighted.equations]
        times = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", at, **given)
        found.append(times.fit(grid=3, until=48).tidy())
        found.append(
            fs.FederatedCox.from_formula("Surv(months, died) ~ arm", at, weights=balance).fit().tidy()
        )
        if sites > 1:
            there = fs.TreatmentEffect.from_formula("died ~ age", at, target="1", **given)
            found.append(there.fit("aipw", cov_type="cluster", cov_kwds={"groups": "ward"}).tidy())
        return found

    for one, other in zip(numbers(0), numbers(10**9), strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
