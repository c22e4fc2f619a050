"""Malformed requests to the sites of a VFEM fit: named errors, an unchanged ledger, an unchanged site."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import ITERATIVE, packed, simulate

import fedstat as fs
from fedstat.errors import FedstatError, MessageError, PolicyError
from fedstat.federation.design.vertical_design import design_request
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.message import Request, pack_request, unpack_reply

load_families()

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

STEPS = [(family, step) for family in ("vfem", "design") for step in sorted(FAMILIES[family])]


def arrays_of(family, step):
    """Arrays of the declared number of dimensions, of length two."""
    takes = FAMILIES[family][step].takes
    return {name: np.ones((2,) * d.ndim, dtype=d.dtype or float) for name, d in takes.items()}


@pytest.fixture(scope="module")
def site():
    partition = simulate(n=200, holder="Bank").partition()
    fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(
        **packed(cov_type="none", **ITERATIVE)
    )
    return partition.sites["Bank"]


def refuse(site, request, complaint):
    before = len(site.ledger.entries)
    with pytest.raises(MessageError, match=complaint):
        site.answer(pack_request(request))
    assert len(site.ledger.entries) == before


@pytest.mark.parametrize(("family", "step"), STEPS)
def test_every_step_holds_its_arrays_against_the_declaration(site, family, step):
    arrays = arrays_of(family, step)
    refuse(site, Request("Bank", family, step, arrays | {"more": np.ones(1)}), r"unknown \['more'\]")
    for name, declared in FAMILIES[family][step].takes.items():
        where = rf"Bank, step '{step}': .*'{name}'"
        refuse(
            site, Request("Bank", family, step, arrays | {name: np.ones((2,) * (declared.ndim + 1))}), where
        )
        refuse(
            site, Request("Bank", family, step, arrays | {name: np.full((2,) * declared.ndim, np.nan)}), where
        )
        if not declared.optional:
            refuse(site, Request("Bank", family, step, {k: v for k, v in arrays.items() if k != name}), where)


@pytest.mark.parametrize(("family", "step"), STEPS)
def test_a_step_that_takes_no_text_refuses_one(site, family, step):
    if FAMILIES[family][step].text_in is None:
        refuse(site, Request("Bank", family, step, arrays_of(family, step), text="{}"), "received a text")


def test_steps_of_one_family_are_not_those_of_another(site):
    refuse(site, Request("Bank", "design", "step"), "family 'design' has no step 'step'")
    refuse(site, Request("Bank", "vfem", "open_block"), "family 'vfem' has no step 'open_block'")
    refuse(site, Request("Bank", "vfem", "client_of"), "has no step 'client_of'")


@pytest.mark.parametrize(("family", "step"), STEPS)
@pytest.mark.parametrize("kind", ["float64", "int64", "bool"])
def test_a_step_out_of_turn_is_reported(site, family, step, kind):
    """In a session that nothing was opened or started in."""
    arrays = {name: array.astype(kind) for name, array in arrays_of(family, step).items()}
    before = len(site.ledger.entries)
    try:
        site.answer(pack_request(Request("Bank", family, step, arrays, session=f"never opened {kind}")))
    except FedstatError:
        assert len(site.ledger.entries) == before
    else:
        assert not {d.kind for d in FAMILIES[family][step].gives.values()} - {"presence", "schema"}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("open_response", ""),
        ("open_response", "{"),
        ("open_response", "[]"),
        ("open_response", '{"response": "__import__(\'os\')", "columns": []}'),
        ("open_response", '{"response": "x.y", "columns": ["y"]}'),
        ("open_block", "null"),
        ("open_block", '{"terms": ["exp.__class__"], "columns": [], "partial": "drop"}'),
        ("open_new_block", '{"spec": "{}", "partial": "drop"}'),
        ("open_new_block", "{}"),
        ("open_new_block", "3"),
    ],
)
def test_a_text_that_is_not_what_it_should_be_is_named(site, step, text):
    arrays = {"use": np.ones(200, dtype=bool)} if step == "open_block" else {}
    before = len(site.ledger.entries)
    with pytest.raises(FedstatError):
        site.answer(pack_request(Request("Bank", "design", step, arrays, "text", text)))
    assert len(site.ledger.entries) == before


MUTATE = """
import copy, json, sys
sys.path.insert(0, {folder!r})
from dataclasses import replace
import numpy as np
from oracle import packed, simulate
from fedstat.errors import FedstatError
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.product_steps import OpenProduct
from fedstat.federation.message import pack_request
from fedstat.federation.disclosure.site import FAMILIES, load_families

load_families()

def longer_and_shorter(array):
    if array.ndim:
        yield "empty", array[:0]
        yield "shorter", array[:-1]
        yield "longer", np.concatenate([array, array[-1:]])
        yield "ten times longer", np.concatenate([array] * 10)
    if array.ndim == 2:
        yield "narrower", array[:, :-1]
        yield "wider", np.concatenate([array, array[:, -1:]], axis=1)

def of_other_values(array):
    for kind in ("float64", "int64", "bool"):
        if array.dtype != kind:
            yield kind, array.astype(kind)
    if array.dtype.kind in "fi":
        yield "negative", -np.abs(array) - 1
        yield "huge", np.full_like(array, 10**12)
        yield "zero", np.zeros_like(array)

def kept(states):
    # Keys cannot be copied; what they were used for can.
    out = {{}}
    for session, state in states.items():
        out[session] = state.copy()
        out[session]._items = {{name: twin(item) for name, item in state._items.items()}}
    return out

def twin(item):
    try:
        return copy.deepcopy(item)
    except TypeError:
        pass
    if isinstance(item, OpenProduct):
        return replace(item, channel=twin(item.channel))
    other = copy.copy(item)
    for name, value in vars(item).items():
        if isinstance(value, set | dict | list):
            setattr(other, name, copy.copy(value))
    return other

class Engine(LocalEngine):
    seen, outcomes = set(), []

    def _send(self, ask, ledger):
        if (ask.site, ask.step) not in self.seen:
            self.seen.add((ask.site, ask.step))
            for name, array in ask.arrays.items():
                array = np.asarray(array)
                for what, other in (*longer_and_shorter(array), *of_other_values(array)):
                    self.attempt(replace(ask, arrays=ask.arrays | {{name: other}}), name, what)
        return super()._send(ask, ledger)

    def attempt(self, ask, name, what):
        site = sites[ask.site]
        states, events = kept(site.states), len(site.site_ledger.events)
        entries = len(site.ledger.entries)
        print(json.dumps([ask.step, name, what, "died"]), file=sys.stderr, flush=True)
        try:
            site.answer(pack_request(ask))
            outcome = "answered"
        except FedstatError:
            outcome = "named" if len(site.ledger.entries) == entries else "entered"
        except Exception as error:
            outcome = type(error).__name__
        site.states = states
        del site.site_ledger.events[events:]
        self.outcomes.append([ask.step, name, what, outcome])

np.seterr(all="ignore")
model = simulate(n=120, holder="Bank").model()
sites = model.partition.sites
iterative = {{"exchange": "iterative", "masked": False}}
sketch = {{"cross_products": "sketch", "sketch_size": 50}}
first = model.fit(**packed(cov_type="none", **iterative)).params
model.engine = Engine(sites)
model.fit(max_moved=1.0)
exact, robust, sem = {{"cross_products": "exact"}}, {{"cov_type": "robust"}}, {{"cov_type": "sem"}}
for options in (exact, sketch | robust, sketch | sem):
    result = model.fit(**packed(**iterative, **options))
assert result.params.to_numpy().tobytes() == first.to_numpy().tobytes()
print(json.dumps(Engine.outcomes))
"""

ANY_LENGTH = {
    ("information", "others"),  # a site does not receive the number of sites
    ("sem_constants", "others"),
    ("response_products", "missing"),
    ("multiply_columns", "columns"),  # nor how many columns another one has
}


LENGTHS = {"empty", "shorter", "longer", "ten times longer", "narrower", "wider"}


@pytest.fixture(scope="module")
def mutated():
    """Every array of every question of a fit, changed, in a process of its own: it may die of it."""
    script = MUTATE.format(folder=str(Path(__file__).parent))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if run.returncode:
        return [json.loads(line) for line in run.stderr.splitlines() if line.startswith("[")][-1:]
    return json.loads(run.stdout.splitlines()[-1])


def test_arrays_of_the_wrong_length_are_named(mutated):
    """Kernels do not check their bounds: the site must."""
    outcomes = [o for o in mutated if o[2] in LENGTHS]
    wrong = [o for o in outcomes if o[3] != "named" and (o[1:3] != ["t_missing", "longer"])]
    wrong = [o for o in wrong if not ((o[0], o[1]) in ANY_LENGTH and o[3] == "answered")]
    assert not wrong
    assert len(outcomes) > 100


def test_arrays_of_other_types_and_values_are_answered_or_named(mutated):
    """Never an error without a name; and what selects or places rows is of its own type."""
    outcomes = [o for o in mutated if o[2] not in LENGTHS]
    unnamed = [o for o in outcomes if o[3] not in ("named", "answered")]
    assert not unnamed
    rows = [o for o in outcomes if o[1] in ("keep", "rows", "code", "use", "others")]
    assert [o for o in rows if o[2] in ("float64", "int64", "bool") and o[3] == "answered"] == []
    assert len(outcomes) > 100


def opened(n=20):
    """A site that asks for ten entities behind a sum, with its response open."""
    partition = simulate(n=n, holder="Registry", missing="none").partition(
        policies={"Registry": Policy(min_count=10)}
    )
    site = partition.sites["Registry"]
    question = design_request("Registry", "open_response", "s", {"response": "y", "columns": ["y"]})
    has = unpack_reply(site.answer(pack_request(question))).arrays["has"]
    return site, has


def start_response(site, keep):
    code = np.zeros(int(np.sum(keep != 0)) if keep.dtype == bool else len(keep), dtype=np.int64)
    request = Request("Registry", "vfem", "start_response", {"keep": keep, "code": code}, "s")
    return unpack_reply(site.answer(pack_request(request))).arrays["moments"]


def answer(site, step, **arrays):
    return site.answer(pack_request(Request(site.name, "vfem", step, arrays, "s")))


def test_few_entities_are_not_summed():
    site, has = opened()
    keep = np.zeros(len(has), dtype=bool)
    keep[:9] = True
    with pytest.raises(PolicyError, match="minimum count"):
        start_response(site, keep)
    keep[9] = True
    assert start_response(site, keep).shape == (2,)


def test_the_same_entity_cannot_be_counted_twice():
    """Positions instead of truth values would give the mean of two entities as that of ten."""
    site, _ = opened()
    with pytest.raises(FedstatError):
        start_response(site, np.array([0] * 5 + [1] * 5))


def test_a_smaller_fit_after_a_larger_one_is_counted_again():
    site, has = opened()
    start_response(site, has)
    few = np.zeros(len(has), dtype=bool)
    few[:2] = True
    with pytest.raises(PolicyError, match="minimum count"):
        start_response(site, few)


def test_a_refused_block_is_not_answered_for_by_a_larger_response():
    """The entities behind an answer are those of what it was computed from, not of all that is open."""
    partition = simulate(n=40, holder="Bank", missing="none").partition(
        policies={"Bank": Policy(min_count=10)}
    )
    site = partition.sites["Bank"]
    columns = partition.columns["Bank"]
    terms = [name for name in columns if name != "y"]
    content = {"terms": terms, "columns": terms, "partial": "drop", "min_count": 1, "intercept": True}
    use = np.ones(40, dtype=bool)
    site.answer(pack_request(design_request("Bank", "open_block", "s", content, use=use)))
    question = design_request("Bank", "open_response", "s", {"response": "y", "columns": ["y"]})
    has = unpack_reply(site.answer(pack_request(question))).arrays["has"]
    answer(site, "start_response", keep=has, code=np.zeros(40, dtype=np.int64))
    keep = np.zeros(40, dtype=bool)
    keep[:9] = True
    few = {"keep": keep, "rows": np.arange(9), "n": np.array(40), "filled": np.array(False)}
    with pytest.raises(PolicyError, match="there are 9"):
        answer(site, "start", **few, memory=np.array(2), padded=np.array(False))
    answer(site, "start_response", keep=has, code=np.zeros(40, dtype=np.int64))
    values = {"z": np.zeros(9), "missing": np.zeros(3), "s2": np.array(1.0), "omega": np.array(1.0)}
    with pytest.raises(MessageError, match="was not started here"):  # the refusal left no trace
        answer(site, "step", weights=np.ones(1), forget=np.array(False), **values)
        answer(site, "estimates")
