"""Dry runs of a vertical GLM: how long it takes, who learns what, what is refused."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import statsmodels.api as sm
from test_vglm_em import MISSING
from vglm_study import COLUMNS, make_model, make_table

import fedstat as fs
from fedstat.federation.disclosure.policy import Policy

FAMILY = {"normal": None, "binary": sm.families.Binomial()}
TABLES = {kind: make_table(n=420, seed=4, response=kind) for kind in FAMILY}


def model_of(kind="normal", table=None, **options):
    return make_model(TABLES[kind] if table is None else table, COLUMNS, family=FAMILY[kind], **options)


# ---- how long it takes ------------------------------------------------------------------------------

OTHER = {
    "quadratic": ("binary", {}, {}),
    "exact": ("binary", {"path": "exact", "n_lambdas": 4}, {"penalty": "lasso"}),
    "unpenalized": ("binary", {"lam": 0.0}, {}),
    "folds": ("binary", {"select": "cv", "folds": 3, "seed": 1}, {}),
    "admm": ("normal", {"exchange": "admm", "n_lambdas": 3, "tol": 1e-3}, {"penalty": "lasso"}),
}


@pytest.mark.parametrize("name", ["quadratic", "exact", "unpenalized", "folds", "admm"])
def test_the_rounds_of_a_fit_are_within_the_range(name):
    kind, arguments, options = OTHER[name]
    model = model_of(kind, **options)
    low, _, most = np.sum([counts for _, counts in model.explain(**arguments).rounds], axis=0)
    rounds = model.fit(**arguments).ledger.rounds - model._agreement.rounds
    assert low <= rounds <= most


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
    "predictors": ("binary", {}, "determine the rows of ALL sites, masked or not"),
    "predictors in sums": ("binary", {}, "Masks hide a site's part of one round"),
    "predictors at known coefficients": ("binary", {}, "coefficients are known, as they are here."),
    "predictors of admm": ("normal", {"exchange": "admm", "lam": 0.5}, "at the end of each lambda only."),
    "means": ("binary", {}, "minus the mean response: for the response, the prediction of the fit"),
    "responses": ("binary", {"exchange": "admm", "lam": 0.5}, "learn the response of every entity from its"),
}


@pytest.mark.parametrize("case", LEARNED)
def test_who_could_learn_what(case):
    kind, arguments, words = LEARNED[case]
    reported = model_of(kind).explain(**arguments).learned
    assert words in " ".join(f"{who} {sentence}" for who, sentence in reported)


def test_of_missing_blocks_patterns_are_reported():
    reported = model_of(table=MISSING, missing="em").explain().learned
    assert "the response, by missing pattern" in " ".join(sentence for _, sentence in reported)


REFUSALS = {
    "per entity": ("binary", {"refused_kinds": frozenset({"per entity"})}, {"masked": False}, {}),
    "masked only": ("binary", {"masked_only": True}, {"masked": False}, {}),
    "families": ("normal", {"families": frozenset({"design", "vfem"})}, {}, {}),
    "folds": ("normal", {"min_count": 90}, {"select": "cv"}, {}),
    "patterns": ("normal", {"min_count": 150}, {}, {"missing": "em", "table": MISSING}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_reported_as_the_site_will_say_it(case):
    kind, policy, arguments, options = REFUSALS[case]
    model = model_of(kind, partition={"policies": {"Registry": Policy(**policy)}, "min_count": 5}, **options)
    reported = model.explain(**arguments)
    with pytest.raises(fs.errors.PolicyError, match=r"^Registry: its policy") as refusal:
        model.fit(**arguments)
    assert list(reported.refused) == ["Registry"]
    assert str(refusal.value) in chain(*reported.refused["Registry"].values())
    assert "REFUSED" in str(reported)


def test_a_wrong_argument_is_refused_as_by_the_fit():
    with pytest.raises(fs.errors.ModelError, match="missing='em' requires"):
        model_of(table=MISSING, missing="em").explain(select="cv")
    with pytest.raises(TypeError):
        model_of().explain(method="cc")
