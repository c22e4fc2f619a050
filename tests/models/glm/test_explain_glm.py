"""Dry runs of a federated GLM: who learns what, what would be refused, and errors."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pandas as pd
import pytest
import statsmodels.genmod.families as sm_families

import fedstat as fs


def rows(n=360):
    rng = np.random.default_rng(7)
    frame = pd.DataFrame({"x": rng.normal(size=n), "w": rng.uniform(1.0, 3.0, n)})
    frame["twice"] = rng.integers(1, 3, n)
    frame["g"] = rng.choice(["a", "b", "c"], n)
    frame["site"] = rng.choice(["Bonn", "Kiel", "Ulm", "Jena"], n)
    frame["ward"] = frame["site"] + rng.integers(1, 9, n).astype(str)
    mean = np.exp(0.3 + 0.4 * frame["x"] + 0.3 * (frame["g"] == "b"))
    frame["y"] = mean + rng.normal(size=n)
    frame["sick"] = (rng.uniform(size=n) < 1.0 / (1.0 + 1.0 / mean)).astype(int)
    frame["count"] = rng.negative_binomial(2.0, 2.0 / (2.0 + mean))
    frame["positive"] = mean * rng.gamma(3.0, 1.0 / 3.0, n)
    return frame


FRAME = rows()
BINOMIAL, POISSON = {"family": sm_families.Binomial()}, {"family": sm_families.Poisson()}
GAMMA = {"family": sm_families.Gamma(sm_families.links.Log())}
NEGATIVE = {"family": sm_families.NegativeBinomial(alpha=1.0)}


def model_of(formula, frame=FRAME, sites=None, policies=None, **kwds):
    if sites is not None:
        frame = frame[frame["site"].isin(sites)]
    partition = fs.ClientPartition.from_frame(frame, by="site", policies=policies)
    return fs.FederatedGLM.from_formula(formula, partition, **kwds)


def test_two_sites_are_warned_that_masks_hide_nothing():
    model = model_of("sick ~ x", sites=["Bonn", "Kiel"], **BINOMIAL)
    reported = " ".join(sentence for _, sentence in model.explain(masked=True).learned)
    assert "Masks hide nothing from the other site here" in reported
    assert "Masks hide nothing" not in str(model.explain())
    four = " ".join(sentence for _, sentence in model_of("sick ~ x", **BINOMIAL).explain().learned)
    assert "c of the 4 sites together learn the sum over the other 4 - c" in " ".join(four.split())


REFUSALS = {
    "masked only": (
        {"masked_only": True},
        {"masked": False},
        r"Kiel: its policy \(masked only\) releases .*'moments' of step 'sum_columns' .*Fit with masked=True",
    ),
    "maximum columns": (
        {"max_columns": 2},
        {},
        r"Kiel: its policy \(maximum columns\) allows 2 of its design columns .*opens 3. Use fewer",
    ),
    "maximum parameters": (
        {"max_parameters": 0.001},
        {},
        r"Kiel: its policy \(maximum parameters per row\) .*Use fewer terms",
    ),
    "refused kinds": (
        {"refused_kinds": frozenset({"aggregate"})},
        {"masked": True},
        r"Kiel: its policy \(refused kinds\) does not release 'aggregate': array 'beta' of step 'fit_al",
    ),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_a_refusal_is_reported_as_the_site_will_say_it(rule):
    policy, arguments, words = REFUSALS[rule]
    model = model_of("sick ~ x + C(g)", policies={"Kiel": fs.Policy(**policy)}, **BINOMIAL)
    explanation = model.explain(**arguments)
    assert list(explanation.refused) == ["Kiel"] and not explanation.passes
    if rule == "maximum columns":  # once, however many steps follow
        assert len(explanation.refused["Kiel"][rule]) == 1
    with pytest.raises(fs.errors.PolicyError, match=words) as refusal:
        model.fit(**arguments)
    assert str(refusal.value) in chain(*explanation.refused["Kiel"].values())
    assert str(explanation).startswith("REFUSED by the policy of Kiel.")
    table = explanation.tidy()
    assert set(table.loc[~table["passes"], "sender"]) == {"Kiel"}


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        ({"masked_only": True}, {"local": False}),
        ({"max_columns": 3}, {}),
        ({"refused_kinds": frozenset({"aggregate"})}, {"local": False}),
        ({"refused_kinds": frozenset({"raw columns", "per entity", "sketch"})}, {}),
    ],
)
def test_what_is_reported_to_pass_passes(policy, arguments):
    model = model_of("sick ~ x + C(g)", policies={"Kiel": fs.Policy(**policy)}, **BINOMIAL)
    assert model.explain(**arguments).passes
    assert model.fit(**arguments).converged


def test_nothing_is_requested_and_no_row_is_read(monkeypatch):
    model = model_of("sick ~ x", **BINOMIAL)
    sites = model.partition.sites.values()
    before = [len(site.ledger.entries) for site in sites]
    for site in sites:
        monkeypatch.setattr(site, "answer", lambda *_: pytest.fail("a site was asked"))
        monkeypatch.setattr(site, "_data", replace(site._data, table=None))
    explanation = model.explain()
    assert [len(site.ledger.entries) for site in sites] == before
    assert len(model._agreement.entries) and explanation.tidy()["bytes"].sum() > 0
    assert type(model.engine).__name__ == "LocalEngine"


def test_an_argument_that_fit_does_not_have():
    with pytest.raises(TypeError, match="maxiterations"):
        model_of("sick ~ x", **BINOMIAL).explain(maxiterations=3)
    with pytest.raises(fs.errors.ModelError, match="maxiter: expected a whole number"):
        model_of("sick ~ x", **BINOMIAL).explain(maxiter=0)
