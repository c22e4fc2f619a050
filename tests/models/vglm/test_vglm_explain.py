"""What a vertical GLM is said to ask for, held against what it asked for.

Fits of the normal family take the same course whatever the data are. Others do not: their rehearsal is handed
the numbers of a fit in the shapes of the stand-ins, so that it has to go the way of that fit, entry by entry.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import statsmodels.api as sm
from test_vglm_em import MISSING
from vglm_study import COLUMNS, make_model, make_table

import fedstat as fs
from fedstat.federation.door.policy import Policy
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.message import Reply
from fedstat.models.vglm.explain import VGLMPlan

FAMILY = {"normal": None, "binary": sm.families.Binomial(), "count": sm.families.Poisson()}
TABLES = {kind: make_table(n=420, seed=4, response=kind) for kind in FAMILY}
FAMILY["gamma"] = sm.families.Gamma()
TABLES["gamma"] = TABLES["count"].assign(y=TABLES["count"]["y"] + 0.5)
INSTITUTIONS = {
    2: {"Bank": COLUMNS["Bank"], "Clinic": [*COLUMNS["Clinic"], *COLUMNS["Registry"]]},
    3: COLUMNS,
    5: {"A": ["y"], "B": ["x0", "x1"], "C": ["x2", "f"], "D": ["x3", "x4", "x5"], "E": ["x6", "x7", "x8"]},
}


def model_of(kind="normal", K=3, table=None, **options):
    return make_model(
        TABLES[kind] if table is None else table, INSTITUTIONS[K], family=FAMILY[kind], **options
    )


@pytest.fixture
def replayed(monkeypatch, foretold):
    """Fit, and rehearse with the fit's own numbers in the shapes of the stand-ins."""

    def compare(model, arguments):
        answers = defaultdict(list)

        def recorded(name, step):
            def run(data, state, *rest, **arrays):
                out = step.run(data, state, *rest, **arrays)
                answers[data.name, name].append(out if isinstance(out, tuple) else (out, ""))
                return out

            return replace(step, run=run)

        steps = {name: recorded(name, step) for name, step in FAMILIES["vglm"].items()}
        monkeypatch.setitem(FAMILIES, "vglm", steps)
        result = model.fit(**arguments)

        def said(key, stand_in):
            def answer(site, ask):
                reply = stand_in(site, ask)
                arrays, text = answers[site.name, key[1]].pop(0)
                shapes = {name: np.shape(a) for name, a in reply.arrays.items()}
                assert shapes == {name: np.shape(a) for name, a in arrays.items()}, key
                return Reply(reply.site, {k: np.asarray(a) for k, a in arrays.items()}, text, reply.entities)

            return answer

        class Replay(VGLMPlan):
            def answers(self, length):
                return {
                    k: said(k, one) if k[0] == "vglm" else one for k, one in super().answers(length).items()
                }

        foretold(model, result, Replay(model, model.fit, arguments), 0, arguments)
        assert not any(answers.values())
        return result

    return compare


# ---- entry by entry --------------------------------------------------------------------------------

NORMAL = {
    "bic": {},
    "one lambda": {"lam": 0.0},
    "folds": {"select": "cv", "folds": 4, "random_state": 1},
    "draws": {"draws": 3, "folds": 6, "random_state": 1},
    "debiased": {"inference": "debiased"},
    "split": {"inference": "split", "random_state": 2},
}


@pytest.mark.parametrize("coordinator", [None, "apart"])
@pytest.mark.parametrize("K", [2, 3, 5])
@pytest.mark.parametrize("name", NORMAL)
def test_fits_of_the_normal_family_ask_for_what_was_foretold(foretold, name, K, coordinator):
    model, arguments = model_of(K=K, coordinator=coordinator), NORMAL[name]
    foretold(model, model.fit(**arguments), VGLMPlan(model, model.fit, arguments), 0, arguments)


@pytest.mark.parametrize("coordinator", [None, "apart"])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_fits_with_missing_blocks_ask_for_what_was_foretold(foretold, K, coordinator):
    table = MISSING if K == 3 else MISSING.copy()
    if K != 3:
        table.loc[:, table.columns != "y"] = TABLES["normal"].loc[:399, table.columns[table.columns != "y"]]
        table.loc[:99, [c for c in list(INSTITUTIONS[K].values())[-1] if c != "y"]] = np.nan
        table.loc[60:200, [c for c in list(INSTITUTIONS[K].values())[K // 2 - 1] if c != "y"]] = np.nan
    model = model_of(K=K, table=table, missing="em", coordinator=coordinator)
    foretold(model, model.fit(), VGLMPlan(model, model.fit, {}), 0, {})


OTHER = {
    "quadratic": ("binary", {}, {}),
    "exact": ("binary", {"path": "exact", "n_lambdas": 4}, {"penalty": "lasso"}),
    "counts": ("count", {"lam": 0.05}, {"group_terms": True}),
    "in clear": ("count", {"masked": False}, {}),
    "unpenalised": ("binary", {"lam": 0.0}, {}),
    "adaptive": ("binary", {"lam": 0.02}, {"adaptive": 1.0, "penalty": "lasso", "unpenalised": ["x8"]}),
    "folds": ("binary", {"select": "cv", "folds": 3, "random_state": 1}, {}),
    "draws": ("binary", {"draws": 2, "folds": 6, "random_state": 1, "lam": 0.05}, {}),
    "debiased": ("binary", {"inference": "debiased", "lam": 0.05}, {}),
    "split": ("binary", {"inference": "split", "lam": 0.05, "random_state": 1}, {}),
    "gamma": ("gamma", {"n_lambdas": 10}, {}),
    "gamma by fold": ("gamma", {"select": "cv", "folds": 3, "random_state": 1, "n_lambdas": 10}, {}),
    "admm": ("normal", {"exchange": "admm", "n_lambdas": 3, "eps": 1e-3}, {"penalty": "lasso"}),
    "admm, weighted": (
        "binary",
        {"exchange": "admm", "n_lambdas": 2, "ratio": 0.3, "eps": 1e-3},
        {"penalty": "lasso", "adaptive": 1.0, "unpenalised": ["x8"]},
    ),
    "admm, counts": ("count", {"exchange": "admm", "lam": 0.1, "eps": 1e-3}, {}),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_fits_ask_for_what_was_foretold(replayed, name):
    kind, arguments, options = OTHER[name]
    replayed(model_of(kind, **options), arguments)


@pytest.mark.parametrize("K", [2, 5])
@pytest.mark.parametrize("name", ["quadratic", "admm"])
def test_other_fits_of_two_and_five_institutions(replayed, name, K):
    kind, arguments, options = OTHER[name]
    replayed(model_of(kind, K=K, **options), arguments)


# ---- how long it takes ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quadratic", "exact", "unpenalised", "folds", "admm"])
def test_the_rounds_of_a_fit_are_within_the_range(name):
    kind, arguments, options = OTHER[name]
    model = model_of(kind, **options)
    low, usual, most = np.sum([counts for _, counts in model.explain(**arguments).rounds], axis=0)
    rounds = model.fit(**arguments).ledger.rounds - model._agreement.rounds
    assert low <= rounds <= most
    assert usual / 3.0 <= rounds <= 3.0 * usual


def test_rounds_and_bytes_of_the_default_fit_are_those_of_its_ledger():
    model = model_of()
    explanation, ledger, earlier = model.explain(), model.fit().ledger, model._agreement
    assert all(low == usual == most for _, (low, usual, most) in explanation.rounds)
    assert sum(usual for _, (_, usual, _) in explanation.rounds) == ledger.rounds - earlier.rounds
    totals = explanation.totals()
    assert totals["sends"].sum() == totals["receives"].sum() == ledger.bytes - earlier.bytes
    assert "per entity" not in set(explanation.tidy()["kind"]) and explanation.passes


# ---- who could learn what ---------------------------------------------------------------------------

LEARNED = {
    "sums": (
        "normal",
        {},
        "means, variances and all correlations of the 12 columns and the response.",
    ),
    "sums by fold": ("normal", {"select": "cv"}, "in each of 5 random parts of the entities"),
    "dealers": ("normal", {}, "Registry deals the random numbers for the products of Bank and Clinic"),
    "predictors": ("binary", {}, "determine the rows of ALL institutions, masked or not"),
    "predictors at known coefficients": ("binary", {}, "coefficients are known, as they are here."),
    "predictors of admm": ("normal", {"exchange": "admm", "lam": 0.5}, "at the end of each lambda only."),
    "responses": ("binary", {}, "learn the response of every entity from its residuals and weights"),
    "masks": ("binary", {}, "It learns the sums over 3 institutions, and no institution's part"),
}


@pytest.mark.parametrize("case", LEARNED)
def test_who_could_learn_what(case):
    kind, arguments, words = LEARNED[case]
    told = model_of(kind).explain(**arguments).learned
    assert words in " ".join(f"{who} {sentence}" for who, sentence in told)


def test_of_missing_blocks_patterns_are_told():
    told = model_of(table=MISSING, missing="em").explain().learned
    assert "the response, by missing pattern" in " ".join(sentence for _, sentence in told)


REFUSALS = {
    "per entity": ("binary", {"refused_kinds": frozenset({"per entity"})}, {"masked": False}, {}),
    "masked only": ("binary", {"masked_only": True}, {"masked": False}, {}),
    "families": ("normal", {"families": frozenset({"design", "vfem"})}, {}, {}),
    "folds": ("normal", {"min_count": 90}, {"select": "cv"}, {}),
    "patterns": ("normal", {"min_count": 150}, {}, {"missing": "em", "table": MISSING}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_told_as_the_site_will_say_it(case):
    kind, policy, arguments, options = REFUSALS[case]
    model = model_of(kind, partition={"policies": {"Registry": Policy(**policy)}, "min_count": 5}, **options)
    told = model.explain(**arguments)
    with pytest.raises(fs.errors.PolicyError, match=r"^Registry: its policy") as refusal:
        model.fit(**arguments)
    assert list(told.refused) == ["Registry"]
    assert str(refusal.value) in chain(*told.refused["Registry"].values())
    assert "REFUSED" in str(told)


def test_a_wrong_argument_is_refused_as_by_the_fit():
    with pytest.raises(fs.errors.ModelError, match="missing='em' has"):
        model_of(table=MISSING, missing="em").explain(select="cv")
    with pytest.raises(TypeError):
        model_of().explain(method="cc")
