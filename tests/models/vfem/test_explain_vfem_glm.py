"""What a VFEM fit of a binary or count response is said to ask for, held against what it asked for."""

from itertools import chain

import pytest
import statsmodels.api as sm
from glm_oracle import glm_study

import fedstat as fs
from fedstat.errors import ConvergenceWarning, MessageError, ModelError, PolicyError
from fedstat.federation.message import Reply
from fedstat.models.vfem.glm_explain import VFEMGLMPlan

FAMILIES = {
    "Binomial": sm.families.Binomial(),
    "Probit": sm.families.Binomial(sm.families.links.Probit()),
    "Poisson": sm.families.Poisson(),
}
STUDIES = {name: glm_study(family=type(family).__name__) for name, family in FAMILIES.items()}
REGISTRY = glm_study(holder="Registry")


def model_of(name="Binomial", study=None, coordinator=None, **options):
    partition = (study or STUDIES[name]).partition(**options)
    return fs.VFEMRegression.from_formula("y ~ .", partition, family=FAMILIES[name], coordinator=coordinator)


def is_foretold(foretold, model, arguments):
    """Hold the forecast of as many iterations as there were against the ledger."""
    result = model.fit(**arguments)
    plan, length = VFEMGLMPlan(model, model.fit, arguments), len(result.fit_.trace)
    foretold(model, result, plan, length, arguments)
    return result


USUAL = {
    "masked": {},
    "clear": {"masked": False},
    "none": {"cov_type": "none"},
    "none in clear": {"cov_type": "none", "masked": False},
}
OTHERS = {
    "memory": {"memory": 3, "cov_type": "none"},
    "impute": {"method": "impute"},
    "complete": {"method": "cc"},
    "single": {"method": "single"},
    "sketch": {"cross_products": "sketch", "sketch_size": 300},
    "gaussian": {"cross_products": "sketch", "sketch": "gaussian", "sketch_size": 300},
    "exact": {"cross_products": "exact"},
}


@pytest.mark.parametrize("coordinator", [None, "apart", "Court"])
@pytest.mark.parametrize("fit", USUAL)
@pytest.mark.parametrize("family", ["Binomial", "Poisson"])
def test_a_fit_asks_for_what_was_foretold(foretold, family, fit, coordinator):
    model = model_of(family, coordinator=coordinator)
    assert is_foretold(foretold, model, USUAL[fit]).converged


@pytest.mark.parametrize("coordinator", [None, "apart"])
@pytest.mark.parametrize("fit", OTHERS)
def test_other_methods_and_cross_products(foretold, fit, coordinator):
    is_foretold(foretold, model_of(coordinator=coordinator), OTHERS[fit])


def two_institutions(coordinator):
    frames = {client: STUDIES["Binomial"].frames()[client] for client in ("Bank", "Tax")}
    partition = fs.ClientPartition.from_frames(frames, on="id", shared_seed=7)
    return fs.VFEMRegression.from_formula(
        "y ~ .", partition, family=FAMILIES["Binomial"], coordinator=coordinator
    )


@pytest.mark.parametrize(
    ("coordinator", "fit"),
    [*(("apart", fit) for fit in USUAL), ("Bank", "none"), ("Bank", "none in clear")],
)
def test_two_institutions(foretold, coordinator, fit):
    is_foretold(foretold, two_institutions(coordinator), USUAL[fit])


def test_nobody_to_deal_is_told_as_the_fit_will_say_it():
    model = two_institutions("Bank")
    with pytest.raises(ModelError) as told:
        model.explain()
    with pytest.raises(ModelError) as said:
        model.fit()
    assert str(told.value) == str(said.value)


@pytest.mark.parametrize("fit", USUAL)
def test_a_holder_of_the_response_alone(foretold, fit):
    is_foretold(foretold, model_of(study=REGISTRY), USUAL[fit])


def test_the_probit_link(foretold):
    is_foretold(foretold, model_of("Probit"), {})


def test_a_fit_that_the_limit_ends_evaluates_once_more(foretold):
    with pytest.warns(ConvergenceWarning):
        result = is_foretold(foretold, model_of(), {"maxiter": 4, "cov_type": "none"})
    assert not result.converged and len(result.fit_.trace) == 4


def test_the_number_of_iterations_is_a_range_within_the_limit():
    plain, limited = (dict(model_of().explain(**a).rounds) for a in ({}, {"maxiter": 10}))
    assert plain["glm_score"] == (8, 12, 30) and plain["glm_information"] == (1, 1, 1)
    assert limited["glm_score"] == (8, 10, 10)


LEARNED = {
    "in clear": ({"masked": False}, "(per entity): linear predictor x'beta of the client's block."),
    "under masks": ({}, "It learns the sums over 3 institutions, and no institution's part"),
    "single contributors": ({}, "own linear predictor at"),
    "dealers": ({}, "deals the random numbers for the products of"),
    "raw columns": ({"cross_products": "exact"}, "It then has these columns"),
}


@pytest.mark.parametrize("case", LEARNED)
def test_who_could_learn_what(case):
    arguments, words = LEARNED[case]
    told = model_of().explain(**arguments).learned
    assert words in " ".join(f"{who} {sentence}" for who, sentence in told)


REFUSALS = {
    "per entity": ({"refused_kinds": frozenset({"per entity"})}, {"masked": False}),
    "masked only": ({"masked_only": True}, {"masked": False}),
    "families": ({"families": frozenset({"design", "secure"})}, {}),
    "budget": ({"privacy": fs.federation.door.policy.Budget(1.0, 0.0)}, {}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_told_as_the_site_will_say_it(case):
    policy, arguments = REFUSALS[case]
    model = model_of(policies={"Court": fs.Policy(**policy)})
    told = model.explain(**arguments)
    with pytest.raises(PolicyError, match=r"^Court: its policy") as refusal:
        model.fit(**arguments)
    assert list(told.refused) == ["Court"] and str(refusal.value) in chain(*told.refused["Court"].values())


def test_what_passes_under_masks_is_told_to_pass():
    strict = fs.Policy(refused_kinds=frozenset({"per entity", "raw columns"}), masked_only=True)
    model = model_of(policies={"Court": strict, "Tax": strict})
    assert model.explain().passes and model.fit().converged


def test_an_array_that_a_stand_in_leaves_out_is_an_error(monkeypatch):
    answers = VFEMGLMPlan.answers

    def without_spread(self, length):
        found = answers(self, length)
        whole = found["vfem", "glm_estimates"]

        def part(site, ask):
            reply = whole(site, ask)
            return Reply(reply.site, {"beta": reply.arrays["beta"]}, reply.text, reply.entities)

        return {**found, ("vfem", "glm_estimates"): part}

    monkeypatch.setattr(VFEMGLMPlan, "answers", without_spread)
    with pytest.raises(MessageError, match=r"the stand-in of Bank, step 'glm_estimates': .*missing \['mu'"):
        model_of().explain()
