"""Malformed requests to the sites of a federated GLM: named errors, an unchanged ledger and site."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from pooled import partition, table

import fedstat as fs
from fedstat.errors import FedstatError, MessageError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.message import Request, pack_request, unpack_request
from fedstat.federation.protocols.engine import LocalEngine

load_families()

SITE = "S2"
STEPS = sorted(FAMILIES["glm"])
FRAME = table()
BY_REGION = {"cov_type": "cluster", "cov_kwds": {"groups": "region", "correction": "CR1"}}
"""Regions span sites, and have few rows at some."""


def arrays_of(step):
    """Arrays of the declared number of dimensions, of length two."""
    takes = FAMILIES["glm"][step].takes
    return {name: np.ones((2,) * d.ndim, dtype=d.dtype or float) for name, d in takes.items()}


def text_of(step):
    return "{}" if FAMILIES["glm"][step].text_in is not None else ""


def model_of(family=None, **known):
    family = sm.families.Binomial() if family is None else family
    return fs.FederatedGLM.from_formula(
        "binary ~ x + z", partition(FRAME, **known), family=family, labels=["ward", "region"]
    )


@pytest.fixture(scope="module")
def model():
    made = model_of()
    made.fit(**BY_REGION, masked=False)
    return made


def site_of(model):
    return model.partition.sites[SITE]


def refuse(site, request, complaint=None, kind=MessageError):
    before = len(site.ledger.entries)
    with pytest.raises(kind, match=complaint) as caught:
        site.answer(pack_request(request))
    assert len(site.ledger.entries) == before
    return str(caught.value)


@pytest.mark.parametrize("step", STEPS)
def test_every_step_holds_its_arrays_against_the_declaration(model, step):
    site, arrays = site_of(model), arrays_of(step)

    def request(changed):
        return Request(SITE, "glm", step, changed, model._session, text_of(step))

    refuse(site, request(arrays | {"more": np.ones(1)}), r"unknown \['more'\]")
    for name, declared in FAMILIES["glm"][step].takes.items():
        where = rf"S2, step '{step}': .*'{name}'"
        refuse(site, request(arrays | {name: np.ones((2,) * (declared.ndim + 1))}), where)
        refuse(site, request(arrays | {name: np.full((2,) * declared.ndim, np.nan)}), where)
        refuse(site, request(arrays | {name: np.full((2,) * declared.ndim, -np.inf)}), where)
        if not declared.optional:
            refuse(site, request({k: v for k, v in arrays.items() if k != name}), where)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["float64", "int64", "bool"])
def test_a_step_out_of_turn_is_reported(model, step, kind):
    """In a session that nothing was opened in, and in one where rows are open but no fit was started."""
    arrays = {name: array.astype(kind) for name, array in arrays_of(step).items()}
    site = site_of(model)
    refuse(site, Request(SITE, "glm", step, arrays, f"never opened {kind}", text_of(step)), kind=FedstatError)
    with_rows = model_of()
    if step != "start":
        site = site_of(with_rows)
        refuse(site, Request(SITE, "glm", step, arrays, with_rows._session, text_of(step)), kind=FedstatError)


def test_what_a_step_out_of_turn_lacks_is_named(model):
    site, point = site_of(model), {name: np.ones(3) for name in ("beta", "shift", "scale")}
    scores = point | {"observed": np.array(False)}
    refuse(
        site,
        Request(SITE, "glm", "sum_scores", scores, "new"),
        "S2: no rows are open in this session .*make the",
    )
    opened = model_of()
    LocalEngine(opened.partition.sites).run(first_round(opened), opened._new_ledger())
    site = site_of(opened)
    session = opened._session
    refuse(
        site,
        Request(SITE, "glm", "sum_scores", scores, session),
        "S2: this fit was not started here; request 'start'",
    )
    opened.fit()
    empty = np.zeros(0, dtype=np.int64)
    groups = point | {"shared": empty, "spanning": empty}
    refuse(
        site,
        Request(SITE, "glm", "sum_clusters", groups, session),
        "clusters were not listed; request 'list_clusters'",
    )


def first_round(model):
    from fedstat.federation.design.horizontal_design import open_requests

    yield open_requests(model.agreement, model._session)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_takes_no_text_refuses_one(model, step):
    if FAMILIES["glm"][step].text_in is None:
        request = Request(SITE, "glm", step, arrays_of(step), model._session, "{}")
        refuse(site_of(model), request, "received a text")


TEXTS = ["", "{", "[]", "null", "3", '"x"', "{}", '{"clusters": 3}', "[" * 4000 + "]" * 4000, "x" * 10**6]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [s for s in STEPS if FAMILIES["glm"][s].text_in is not None])
def test_a_text_that_is_not_what_it_should_be_is_named(model, step, text):
    site = site_of(model)
    states = copy.deepcopy(site.states)
    message = refuse(
        site,
        Request(SITE, "glm", step, arrays_of(step) and one_of(step), model._session, text),
        kind=FedstatError,
    )
    assert len(message) < 1000
    site.states = states


def one_of(step):
    takes = FAMILIES["glm"][step].takes
    return {name: np.ones((1,) * d.ndim, dtype=d.dtype or float).astype(bool) for name, d in takes.items()}


@pytest.mark.parametrize(
    "family",
    [
        {"name": "Cauchy", "link": "Log"},
        {"name": "Binomial", "link": "__import__"},
        {"name": "Binomial", "link": "Logit", "alpha": "1"},
        {"name": "NegativeBinomial", "link": "Log", "alpha": -1.0},
        {"name": "NegativeBinomial", "link": "Log", "alpha": float("nan")},
        {"name": "Tweedie", "link": "Log", "var_power": "1; import os"},
        {"name": ["Binomial"], "link": "Logit"},
        {"name": "Binomial"},
        {"name": "Binomial", "link": "Logit", "more": 1},
    ],
)
def test_a_forged_family_is_refused(model, family):
    request = Request(SITE, "glm", "start", {"local": np.array(False)}, model._session, json.dumps(family))
    refuse(site_of(model), request, kind=FedstatError)


@pytest.mark.parametrize(
    ("clusters", "strata"),
    [
        ("x", None),
        ("binary", None),
        ("site", None),
        ("ward", "z"),
        (None, "ward"),
        (["ward"], None),
        ({"ward": 1}, None),
        ("ward", ["region"]),
        ("no such", None),
        (3, None),
    ],
)
def test_labels_that_the_model_did_not_open_are_refused(model, clusters, strata):
    text = json.dumps({"clusters": clusters, "strata": strata})
    refuse(site_of(model), Request(SITE, "glm", "list_clusters", {}, model._session, text), "S2")


def test_the_steps_of_one_family_are_not_those_of_another(model):
    refuse(site_of(model), Request(SITE, "glm", "open_rows"), "family 'glm' has no step 'open_rows'")
    refuse(site_of(model), Request(SITE, "glm", "model_of"), "has no step 'model_of'")
    refuse(site_of(model), Request("S1", "glm", "start"), "addressed to 'S1'")


def longer_and_shorter(array):
    if array.ndim:
        yield "empty", array[:0]
        yield "shorter", array[:-1]
        yield "longer", np.concatenate([array, array[-1:]])
        yield "ten times longer", np.concatenate([array] * 10)


def of_other_values(array):
    for kind in ("float64", "int64", "bool"):
        if array.dtype != kind:
            yield kind, array.astype(kind)
    if array.dtype != bool:
        yield "negative", -np.abs(array) - 1
        yield "huge", np.full_like(array, 10**12)
        yield "largest", np.full_like(array, np.iinfo(np.int64).max if array.dtype == np.int64 else 1.7e308)
        yield "tiny", np.full_like(array, 0 if array.dtype == np.int64 else 5e-324)
        yield "zero", np.zeros_like(array)


class Mutating:
    """A site that receives every request in changed forms before the original one."""

    def __init__(self, site, mutations, outcomes):
        self.site, self.mutations, self.outcomes, self.seen = site, mutations, outcomes, set()

    def answer(self, request):
        requested = unpack_request(request)
        if requested.family == "glm" and requested.step not in self.seen:
            self.seen.add(requested.step)
            for name, array in requested.arrays.items():
                for what, other in self.mutations(np.asarray(array)):
                    self.attempt(replace(requested, arrays=requested.arrays | {name: other}), name, what)
        return self.site.answer(request)

    def attempt(self, request, name, what):
        site = self.site
        states, events = copy.copy(site.states), len(site.site_ledger.events)
        entries = len(site.ledger.entries)
        site.states = {key: copy.copy(state) for key, state in states.items()}
        for key, state in states.items():
            site.states[key]._items, site.states[key]._counts = dict(state._items), dict(state._counts)
        try:
            with np.errstate(all="ignore"):
                site.answer(pack_request(request))
            outcome = "answered"
        except FedstatError:
            outcome = "named" if len(site.ledger.entries) == entries else "entered"
        except Exception as error:
            outcome = type(error).__name__
        site.states = states
        del site.site_ledger.events[events:]
        self.outcomes.append((request.step, name, what, outcome))


def mutated(mutations, family):
    """Outcomes of every array of every question of a fit, changed; the fit is what it was."""
    model = model_of(family)
    clear = {"masked": False}  # a mask serves once, and a changed question would use it up
    expected = model.fit(cov_type="HC0", **clear)
    outcomes = []
    sites = model.partition.sites
    model.engine = LocalEngine({name: Mutating(site, mutations, outcomes) for name, site in sites.items()})
    found = model.fit(cov_type="HC0", **clear)
    assert found.params.to_numpy().tobytes() == expected.params.to_numpy().tobytes()
    model.fit(**BY_REGION, **clear)
    model.fit(cov_type="survey", cov_kwds={"clusters": "ward", "strata": None}, **clear)
    return outcomes


FAMILY = [sm.families.Binomial(), sm.families.Binomial(sm.families.links.CLogLog())]


@pytest.mark.parametrize("family", FAMILY)
def test_arrays_of_the_wrong_length_are_named(family):
    outcomes = mutated(longer_and_shorter, family)
    hashes = [o for o in outcomes if o[1] in ("shared", "spanning")]
    wrong = [o for o in outcomes if o[3] != "named" and o not in hashes]
    assert not wrong
    assert {o[3] for o in hashes} <= {"named", "answered"} and len(outcomes) > 50


@pytest.mark.parametrize("family", FAMILY)
def test_arrays_of_other_types_and_values_are_answered_or_named(family):
    """Never an error without a name."""
    outcomes = mutated(of_other_values, family)
    assert not [o for o in outcomes if o[3] not in ("named", "answered")]
    typed = [o for o in outcomes if o[1] in ("shared", "spanning") and o[2] in ("float64", "bool")]
    assert typed and all(o[3] == "named" for o in typed)
    scale = [o for o in outcomes if o[1] == "scale" and o[2] in ("negative", "zero", "bool")]
    assert all(o[3] == "named" for o in scale if o[2] != "bool")
    assert len(outcomes) > 100


def test_a_refused_fit_leaves_no_trace_and_the_next_is_answered():
    model = model_of(policies={SITE: Policy(max_parameters=0.013)})
    before = len(site_of(model).ledger.entries)
    with pytest.raises(PolicyError, match=r"S2: its policy \(maximum parameters per row\)"):
        model.fit(masked=False)
    assert len(site_of(model).ledger.entries) == before
    smaller = fs.FederatedGLM.from_formula("binary ~ x", model.partition, family=sm.families.Binomial())
    assert smaller.fit().converged


def test_what_left_is_in_both_ledgers():
    model = model_of()
    result = model.fit(cov_type="HC0")
    ours = result.ledger.to_frame().query(f"sender == '{SITE}'")
    theirs = site_of(model).ledger.to_frame()
    for name in ("step", "array", "kind", "shape", "bytes", "entities"):
        assert ours[name].tolist() == theirs[name].tolist()
    assert (theirs.loc[theirs["kind"] == "aggregate", "entities"] == (FRAME["site"] == SITE).sum()).all()
