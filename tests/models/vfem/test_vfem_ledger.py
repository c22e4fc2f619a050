"""Exactly what leaves a site in a fit, and of what kind."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from oracle import ITERATIVE, packed, simulate

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

COORDINATOR = "coordinator"
SKETCHED = ITERATIVE | {"cross_products": "sketch", "sketch_size": 300}
ITERATION = {"change", "inside", "log_likelihood", "products", "recentering", "score2"}
POINTS = {"centers", "spreads"}


def triples(**steps):
    """{step: {kind: arrays}} written out as (step, array, kind)."""
    return {
        (step, array, kind)
        for step, kinds in steps.items()
        for kind, arrays in kinds.items()
        for array in arrays
    }


DESIGN = triples(open_block={"presence": {"seen"}, "schema": {"text"}})
ASCENT = triples(
    start={"per entity": {"linear_predictor"}, "control": POINTS, "aggregate": {"eigenvalues"}},
    step={"per entity": {"linear_predictor"}, "control": POINTS | ITERATION},
    estimates={"aggregate": {"beta", "mu", "t"}},
)
INFORMATION = triples(information={"aggregate": {"J", "N", "beta", "by_v", "by_z", "gram", "j", "own", "w"}})
SKETCH = triples(sketch={"sketch": {"sketch"}, "aggregate": {"error"}})
COLUMNS = triples(release_columns={"raw columns": {"columns"}})
PRODUCTS = triples(multiply_columns={"aggregate": {"products"}})
SCORES = triples(scores={"aggregate": {"gram", "with_response"}})
SEM = triples(
    sem_constants={"aggregate": {"S2", "Sigma", "beta", "mu", "s1", "scale"}},
    sem_predictor={"per entity": {"linear_predictor"}},
    sem_sums={"aggregate": {"Sigma", "gradient", "mu", "u_z"}},
)
RESPONSE = triples(
    open_response={"presence": {"has"}},
    start_response={"aggregate": {"moments"}},
    residuals={"per entity": {"z"}, "aggregate": {"z1", "z2"}},
)

ASKED_DESIGN = triples(open_block={"presence": {"use"}, "schema": {"text"}})
ASKED_ASCENT = triples(
    start={"presence": {"keep", "rows"}, "control": {"filled", "memory", "n", "padded"}},
    step={"per entity": {"z"}, "aggregate": {"missing", "s2"}, "control": {"forget", "omega", "weights"}},
)
ASKED_INFORMATION = triples(
    information={"control": {"inverse_v"}, "presence": {"others"}, "aggregate": {"sums"}}
)
ASKED_SKETCH = triples(sketch={"control": {"kind", "size", "stage"}})
ASKED_COLUMNS = triples(
    release_columns={"control": {"stage"}},
    multiply_columns={"control": {"stage"}, "raw columns": {"columns"}, "presence": {"rows"}},
)
ASKED_SEM = triples(
    sem_constants={"presence": {"others"}},
    sem_predictor={"aggregate": {"beta", "mu"}},
    sem_sums={"aggregate": {"Sigma", "beta", "missing", "mu", "s2"}, "per entity": {"z"}},
)
ASKED_RESPONSE = triples(
    open_response={"schema": {"text"}},
    start_response={"presence": {"code", "keep"}},
    residuals={"per entity": {"eta"}, "aggregate": {"a", "s2"}, "control": {"t_missing"}},
)

FIRST, MIDDLE, LAST = "Bank", "Court", "Tax"


def left(result):
    """Releases of each site: {sender: {(step, array, kind)}}."""
    out = {}
    for entry in result.ledger.entries:
        out.setdefault(entry.sender, set()).add((entry.step, entry.array, entry.kind))
    return out


@pytest.fixture(scope="module")
def study():
    """The response alone at one site; every number of entities is another."""
    study = simulate(seed=19, n=211, holder="Registry")
    counts = study.table[["y", "bank0", "court0", "tax0"]].notna().sum()
    assert counts.is_unique
    return study


def site_ledger(study, model=None, **options):
    return study.model(**(model or {})).fit(**packed(**(SKETCHED | options)))


def test_sketched_standard_errors(study):
    every = DESIGN | ASCENT | INFORMATION | SKETCH
    request = ASKED_DESIGN | ASKED_ASCENT | ASKED_INFORMATION | ASKED_SKETCH
    assert left(site_ledger(study)) == dict.fromkeys(study.columns, every) | {COORDINATOR: request}


def test_exact_standard_errors_disclose_columns(study):
    fit = DESIGN | ASCENT | INFORMATION
    assert left(site_ledger(study, cross_products="exact")) == {
        FIRST: fit | COLUMNS,
        MIDDLE: fit | COLUMNS | PRODUCTS,
        LAST: fit | PRODUCTS,
        COORDINATOR: ASKED_DESIGN | ASKED_ASCENT | ASKED_INFORMATION | ASKED_COLUMNS,
    }


def test_expected_standard_errors_need_sums_alone(study):
    assert left(site_ledger(study, cov_type="expected")) == dict.fromkeys(
        study.columns, DESIGN | ASCENT | INFORMATION
    ) | {COORDINATOR: ASKED_DESIGN | ASKED_ASCENT | ASKED_INFORMATION}


def test_no_standard_errors_need_the_iterations_alone(study):
    assert left(site_ledger(study, cov_type="none")) == dict.fromkeys(study.columns, DESIGN | ASCENT) | {
        COORDINATOR: ASKED_DESIGN | ASKED_ASCENT
    }


def test_robust_standard_errors(study):
    every = DESIGN | ASCENT | INFORMATION | SKETCH | SCORES
    request = ASKED_DESIGN | ASKED_ASCENT | ASKED_INFORMATION | ASKED_SKETCH
    assert left(site_ledger(study, cov_type="robust")) == dict.fromkeys(study.columns, every) | {
        COORDINATOR: request
    }


def test_supplemented_em(study):
    every = DESIGN | ASCENT | SKETCH | SEM
    request = ASKED_DESIGN | ASKED_ASCENT | ASKED_SKETCH | ASKED_SEM
    assert left(site_ledger(study, cov_type="sem")) == dict.fromkeys(study.columns, every) | {
        COORDINATOR: request
    }


def test_gradient_steps_send_a_rate_and_nothing_else(study):
    result = site_ledger(study, cov_type="none", step="gradient")
    rate = triples(set_rate={"control": {"eta"}})
    assert left(result)[COORDINATOR] == ASKED_DESIGN | ASKED_ASCENT | rate
    assert left(result)[FIRST] == DESIGN | ASCENT


def test_given_coefficients_are_sent(study):
    result = site_ledger(study, cov_type="none", init=[0.0] * 7)
    assert left(result)[COORDINATOR] == ASKED_DESIGN | ASKED_ASCENT | {("start", "beta", "control")}


def test_a_coordinator_apart_sees_residuals_and_is_not_shown_fitted_values(study):
    here, apart = (
        site_ledger(study, cov_type="none"),
        site_ledger(study, {"coordinator": "apart"}, cov_type="none"),
    )
    assert left(apart) == dict.fromkeys(study.columns, DESIGN | ASCENT) | {
        "Registry": RESPONSE,
        COORDINATOR: ASKED_DESIGN | ASKED_ASCENT | ASKED_RESPONSE,
    }
    assert here.ledger.at == "Registry" and apart.ledger.at is None
    assert apart.ledger.bytes > here.ledger.bytes
    assert apart.ledger.rounds > here.ledger.rounds


def test_a_coordinator_at_a_site_without_the_response(study):
    result = site_ledger(study, {"coordinator": "Court"}, cov_type="none")
    assert left(result) == {
        FIRST: DESIGN | ASCENT,
        LAST: DESIGN | ASCENT,
        "Registry": RESPONSE,
        COORDINATOR: ASKED_DESIGN | ASKED_ASCENT | ASKED_RESPONSE,
    }
    assert "Court" in set(result.ledger.releases()["sender"])


def test_a_response_holder_with_columns_releases_none_of_them_to_itself():
    study = simulate(seed=19, n=211, holder="Bank")
    result = site_ledger(study, cov_type="none")
    assert set(left(result)) == {"Court", "Tax", COORDINATOR}
    assert result.ledger.kinds_by_site()["Bank"] == (
        "control",
        "schema",
        "presence",
        "aggregate",
        "per entity",
    )


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"cov_type": "none"}, ("control", "schema", "presence", "aggregate", "per entity")),
        ({}, ("control", "schema", "presence", "aggregate", "sketch", "per entity")),
        (
            {"cross_products": "exact"},
            ("control", "schema", "presence", "aggregate", "per entity", "raw columns"),
        ),
    ],
)
def test_kinds_are_reported_from_harmless_to_disclosing(study, options, kinds):
    result = site_ledger(study, **options)
    assert result.ledger.kinds_by_site()[FIRST] == kinds
    assert kinds[-1] in result.summary().as_text()


@pytest.mark.parametrize(
    "options",
    [{}, {"cross_products": "exact"}, {"cov_type": "robust"}, {"cov_type": "sem"}, {"method": "impute"}],
    ids=str,
)
def test_an_array_as_long_as_the_entities_is_never_called_a_sum(study, options):
    """By shape: whatever has a dimension of a client's entities is declared as such."""
    result = site_ledger(study, {"coordinator": "apart"}, sketch_size=777, **options)
    counts = {len(study.table), *study.table[["bank0", "court0", "tax0"]].notna().sum()}
    long = {"presence", "per entity", "raw columns"}
    for entry in result.ledger.entries:
        if counts & set(entry.shape):
            harmless = entry.sender == COORDINATOR and entry.array in ("inverse_v", "use")
            assert entry.kind in long or harmless, entry
        if entry.kind == "per entity":
            assert len(entry.shape) == 1 and counts & set(entry.shape), entry
        if entry.kind == "sketch":
            assert entry.shape[0] >= 777


def test_arrays_of_a_site_name_the_entities_behind_them(study):
    result = site_ledger(study)
    counts = {site: int(study.table[names[0]].notna().sum()) for site, names in study.columns.items()}
    frame = result.ledger.to_frame()
    sent = frame[(frame["sender"] != COORDINATOR) & (frame["array"] != "text")]
    for site, n in counts.items():
        assert set(sent.loc[sent["sender"] == site, "entities"]) == {n}
    assert set(frame.loc[frame["sender"] == COORDINATOR, "entities"]) == {0}


def test_the_ledger_of_the_sites_is_that_of_the_coordinator(study):
    """Every site enters what passes its own door; the two books agree."""
    model = study.model(coordinator="apart")
    result = model.fit(**packed(**SKETCHED))
    for client, site in model.partition.sites.items():
        keys = [
            Counter((e.step, e.array, e.kind, e.shape, e.bytes, e.entities) for e in entries)
            for entries in (
                site.ledger.entries,
                [e for e in result.ledger.entries if e.sender == client],
            )
        ]
        assert keys[0] == keys[1]


def test_an_iteration_is_one_round_of_two_numbers_per_entity(study):
    result = site_ledger(study, cov_type="none")
    frame = result.ledger.to_frame()
    steps = frame[frame["step"] == "step"]
    n = sum(int(study.table[names[0]].notna().sum()) for names in study.columns.values())
    per_round = steps.groupby("round")
    assert len(per_round) == len(result.trace)
    for _, rows in per_round:
        per_entity = rows[rows["kind"] == "per entity"]
        assert per_entity["bytes"].sum() == 2 * 8 * n
        assert rows["bytes"].sum() - 2 * 8 * n < 3 * 8 * (9**3 + 9**2 + 9 + 20)
    assert result.ledger.rounds <= len(result.trace) * 2 + 3


def test_bytes_are_those_of_the_numbers(study):
    ledger = site_ledger(study, cross_products="exact").ledger
    for entry in ledger.entries:
        if entry.array != "text":
            width = 1 if entry.array in ("use", "seen", "keep", "others", "filled", "forget", "padded") else 8
            assert entry.bytes == width * int(np.prod(entry.shape)), entry
    assert ledger.bytes == sum(entry.bytes for entry in ledger.entries)


def test_every_fit_starts_its_own_ledger(study):
    model = study.model()
    first = model.fit(**packed(**SKETCHED))
    before = len(first.ledger.entries)
    second = model.fit(**packed(**SKETCHED))
    assert len(first.ledger.entries) == before == len(second.ledger.entries)
    assert {e.step for e in second.ledger.entries} >= {"open_block", "start"}


def test_releases_put_the_coordinator_at_its_site(study):
    table = site_ledger(study).ledger.releases()
    assert COORDINATOR not in set(table["sender"]) | set(table["receiver"])
    row = table[
        (table["sender"] == FIRST) & (table["step"] == "step") & (table["array"] == "linear_predictor")
    ]
    assert row["receiver"].item() == "Registry"
    assert row["shape"].item() == (int(study.table["bank0"].notna().sum()),)
    apart = site_ledger(study, {"coordinator": "apart"}).ledger.releases()
    assert COORDINATOR in set(apart["sender"])
