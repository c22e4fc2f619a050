"""Dry runs of a VFEM fit: how long it takes, who learns what, what is refused."""

from itertools import chain

import pytest
from oracle import packed, simulate

import fedstat as fs

BLOCKS = fs.datasets.make_blocks(400, p=(3, 2, 2), missing=(0.1, 0.3, 0.5), seed=1).frames
JOINED = {"A": BLOCKS["Response"].merge(BLOCKS["A"], how="left"), "B": BLOCKS["B"], "C": BLOCKS["C"]}
ITERATIVE = {"exchange": "iterative"}


def model_of(frames=None, policies=None, coordinator=None, formula="y ~ ."):
    partition = fs.ClientPartition.from_frames(
        JOINED if frames is None else frames, on="id", policies=policies
    )
    return fs.VFEMRegression.from_formula(formula, partition, coordinator=coordinator, between="independent")


def test_rounds_and_bytes_of_the_default_fit_are_those_of_its_ledger():
    model = model_of()
    explanation = model.explain()
    ledger = model.fit().ledger
    earlier = model._agreement
    assert sum(expected for _, (_, expected, _) in explanation.rounds) == ledger.rounds - earlier.rounds
    assert all(low == high for _, (low, _, high) in explanation.rounds)
    totals = explanation.totals()
    assert totals["sends"].sum() == totals["receives"].sum() == ledger.bytes - earlier.bytes
    table = explanation.tidy()
    assert "per entity" not in set(table["kind"]) and explanation.passes


def test_a_holder_of_the_response_alone_and_two_sites():
    for frames, coordinator in ((BLOCKS, None), ({"A": JOINED["A"], "B": JOINED["B"]}, None)):
        model = model_of(frames, coordinator=coordinator)
        ledger, earlier = model.fit().ledger, model._agreement
        assert model.explain().table["bytes"].sum() == ledger.bytes - earlier.bytes


def test_first_coefficients_from_another_fit_double_the_iterations():
    model = model_of()
    plain, twice = model.explain(**packed(**ITERATIVE)), model.explain(**packed(**ITERATIVE, init="cc"))
    once, (least, dry_run, most) = (dict(e.rounds)["step"] for e in (plain, twice))
    # One iteration, those of the dry run, and the limit of the fit.
    assert once == (1, 12, 5_000) and (least, most) == (2, 10_000) and 12 < dry_run <= 24
    result = model.fit(**packed(**ITERATIVE, init="cc"))
    reported = set(twice.table[["sender", "step", "array", "masked"]].itertuples(index=False, name=None))
    passed = result.ledger.releases()
    passed = passed[~passed["step"].isin(["open_response", "open_block"])]
    assert reported == set(passed[["sender", "step", "array", "masked"]].itertuples(index=False, name=None))


def test_the_number_of_iterations_is_at_most_the_one_that_is_given():
    rounds = dict(model_of().explain(**packed(**ITERATIVE, maxiter=30)).rounds)
    assert rounds["step"] == (1, 12, 30) and rounds["finish, start"] == (1, 1, 1)


LEARNED = {
    "the coordinator is told of sums by site": ({}, "receives from B and C, of 195 entities or more"),
    "dealers are named": ({}, "C deals the random numbers for the products of A and B"),
    "per entity, in clear": (
        ITERATIVE | {"masked": False},
        "(per entity): linear predictor x'beta of the site's block. Every number is an equation",
    ),
    "per entity, in sums": (ITERATIVE, "Masks hide a site's part of one round"),
    "single contributors": (ITERATIVE, "own linear predictor for"),
    "sketches": (
        ITERATIVE | {"cross_products": "sketch"},
        "sits at A, which has the seed of the sketch",
    ),
    "raw columns": (ITERATIVE | {"cross_products": "exact"}, "It then has these columns"),
    "raw columns are passed on": (ITERATIVE | {"cross_products": "exact"}, "another site's columns"),
}


@pytest.mark.parametrize("case", LEARNED)
def test_who_could_learn_what(case):
    arguments, words = LEARNED[case]
    reported = model_of().explain(**packed(**arguments)).learned
    assert words in " ".join(f"{who} {sentence}" for who, sentence in reported)


def test_single_contributors_are_counted():
    """Entities of which the coordinator, at A, and one other site alone have records."""
    model = model_of()
    ids = {name: set(JOINED[name].dropna()["id"]) for name in ("B", "C")}
    lonely = {"B": len(ids["B"] - ids["C"]), "C": len(ids["C"] - ids["B"])}
    reported = " ".join(sentence for _, sentence in model.explain(**packed(**ITERATIVE)).learned)
    for name, count in lonely.items():
        assert f"learn {name}'s own linear predictor for {count:,} of its {len(ids[name]):,}" in reported


REFUSALS = {
    "per entity": ({"refused_kinds": frozenset({"per entity"})}, ITERATIVE | {"masked": False}),
    "per entity, in sums": ({"refused_kinds": frozenset({"per entity"})}, ITERATIVE),
    "masked only": ({"masked_only": True}, ITERATIVE | {"masked": False}),
    "families": ({"families": frozenset({"design", "vfem"})}, {}),
    "patterns": ({"min_count": 90}, {}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_reported_as_the_site_will_say_it(case):
    policy, arguments = REFUSALS[case]
    model = model_of(policies={"B": fs.Policy(**policy)})
    reported = model.explain(**packed(**arguments))
    with pytest.raises(fs.errors.PolicyError, match=r"^B: its policy") as refusal:
        model.fit(**packed(**arguments))
    assert list(reported.refused) == ["B"] and str(refusal.value) in chain(*reported.refused["B"].values())
    assert "REFUSED" in str(reported) and "REFUSED" in reported._repr_html_()


def test_what_passes_under_masks_is_reported_to_pass():
    strict = fs.Policy(refused_kinds=frozenset({"raw columns"}), masked_only=True)
    model = model_of(policies={"B": strict, "C": strict})
    for arguments in ({}, ITERATIVE | {"cov_type": "expected"}):
        assert model.explain(**arguments).passes
        assert model.fit(**arguments).converged


def test_a_family_that_cannot_reveal_says_so(monkeypatch):
    monkeypatch.setattr(fs.VFEMRegression, "_plan", None)
    with pytest.raises(fs.errors.NotAvailableError, match=r"no dry run for VFEMRegression; the ledger"):
        model_of().explain()


def test_a_fit_within_one_site_sends_nothing():
    study = simulate(n=200, holder="Bank")
    explanation = study.model(coordinator="Bank").explain(method="single")
    assert "would send nothing from one site to another" in str(explanation)
    assert explanation._repr_html_() and explanation.tidy().empty and explanation.totals().empty
