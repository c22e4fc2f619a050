"""Dry runs of a VFEM fit of a binary response: how long it takes, who learns what, what is refused."""

from itertools import chain

import pytest
import statsmodels.api as sm
from glm_oracle import glm_study

import fedstat as fs
from fedstat.errors import ModelError, PolicyError

STUDY = glm_study()


def model_of(**options):
    partition = STUDY.partition(**options)
    return fs.VFEMGLM.from_formula("y ~ .", partition, family=sm.families.Binomial(), between="independent")


def two_institutions(coordinator):
    frames = {site: STUDY.frames()[site] for site in ("Bank", "Tax")}
    partition = fs.ClientPartition.from_frames(frames, on="id", shared_seed=7)
    return fs.VFEMGLM.from_formula(
        "y ~ .", partition, family=sm.families.Binomial(), between="independent", coordinator=coordinator
    )


def test_nobody_to_deal_is_reported_as_the_fit_will_say_it():
    model = two_institutions("Bank")
    with pytest.raises(ModelError) as reported:
        model.explain()
    with pytest.raises(ModelError) as said:
        model.fit()
    assert str(reported.value) == str(said.value)


def test_the_number_of_iterations_is_a_range_within_the_limit():
    plain, limited = (dict(model_of().explain(**a).rounds) for a in ({}, {"maxiter": 10}))
    assert plain["glm_score"] == (1, 10, 200) and plain["glm_information"] == (1, 1, 1)
    assert limited["glm_score"] == (1, 10, 10)


LEARNED = {
    "in clear": ({"masked": False}, "(per entity): linear predictor x'beta of the site's block."),
    "in sums": ({}, "About as many rounds as there are columns reveal the rows of all sites"),
    "single contributors": ({}, "own linear predictor for"),
    "dealers": ({}, "deals the random numbers for the products of"),
    "raw columns": ({"cross_products": "exact"}, "It then has these columns"),
}


@pytest.mark.parametrize("case", LEARNED)
def test_who_could_learn_what(case):
    arguments, words = LEARNED[case]
    reported = model_of().explain(**arguments).learned
    assert words in " ".join(f"{who} {sentence}" for who, sentence in reported)


REFUSALS = {
    "per entity": ({"refused_kinds": frozenset({"per entity"})}, {"masked": False}),
    "per entity, in sums": ({"refused_kinds": frozenset({"per entity"})}, {}),
    "masked only": ({"masked_only": True}, {"masked": False}),
    "families": ({"families": frozenset({"design", "secure"})}, {}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_reported_as_the_site_will_say_it(case):
    policy, arguments = REFUSALS[case]
    model = model_of(policies={"Court": fs.Policy(**policy)})
    reported = model.explain(**arguments)
    with pytest.raises(PolicyError, match=r"^Court: its policy") as refusal:
        model.fit(**arguments)
    assert list(reported.refused) == ["Court"] and str(refusal.value) in chain(
        *reported.refused["Court"].values()
    )


def test_what_passes_under_masks_is_reported_to_pass():
    strict = fs.Policy(refused_kinds=frozenset({"raw columns"}), masked_only=True)
    model = model_of(policies={"Court": strict, "Tax": strict})
    assert model.explain().passes and model.fit().converged


def test_numbers_for_each_entity_are_held_against_what_owners_let_leave():
    model = model_of(policies={"Court": fs.Policy(per_entity=20)})
    (reported,) = [note for note in model.explain(cov_type="none").notes if "per_entity" in note]
    # One iteration in the dry run, and as many as the fit is allowed.
    assert reported.startswith("Court releases 20 numbers") and "1 to 200" in reported
    fitted = model.fit(cov_type="none")
    assert model.partition.sites["Court"].site_ledger.vectors <= 20 and fitted.converged
