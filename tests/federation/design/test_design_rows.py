"""Information that sites with different rows share: levels, kinds, moments; and requests that they refuse."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from formulaic import model_matrix

from fedstat.errors import DesignError, FedstatError, MessageError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.parse import parse_pooled_formula
from fedstat.federation.design.horizontal_design import (
    agree_rows,
    assemble_design,
    moment_requests,
    open_requests,
    rows_request,
)
from fedstat.federation.design.horizontal_steps import INTERCEPT, MOST_LEVELS, standardization, translation
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.tables.table import ParquetTable

rng = np.random.default_rng(0)
N = 240
FRAME = pd.DataFrame(
    {
        "y": rng.normal(size=N),
        "x": rng.normal(3.0, 2.0, N),
        "g": rng.choice(list("abc"), N),
        "k": rng.choice([1, 2, 3], N),
        "flag": rng.uniform(size=N) < 0.4,
        "w": rng.uniform(0.5, 2.0, N),
    }
)
EDGES = {"Kiel": (0, 40), "Bonn": (40, 120), "Ulm": (120, N)}


def cut(frame=FRAME):
    return {name: frame.iloc[a:b].reset_index(drop=True) for name, (a, b) in EDGES.items()}


def sites(frame=FRAME, policy=None, tables=None):
    return {
        name: Site(name, table, policy, site_column="site") for name, table in (tables or cut(frame)).items()
    }


def question(formula, frame=FRAME, **roles):
    parsed = parse_pooled_formula(formula, list(frame.columns), ("site",))
    (terms,) = parsed.sites
    request = RowsRequest(parsed.response, parsed.response_columns, terms.terms, terms.columns)
    return replace(request, intercept=parsed.intercept, **roles)


def agree(formula, held, frame=FRAME, **roles):
    protocol = agree_rows(question(formula, frame, **roles), tuple(held), "s", site_column="site")
    return LocalEngine(held).run(protocol, Ledger())


def design(formula, held, **roles):
    agreement = agree(formula, held, **roles)

    def protocol():
        opened = yield open_requests(agreement, "s")
        return assemble_design(agreement, opened, (yield moment_requests(agreement, "s")))

    return LocalEngine(held).run(protocol(), Ledger())


@pytest.mark.parametrize(
    "right", ["x", "x + g", "C(k) * x", "flag + log(w)", "g:k", "0 + g + x", "x + C(site)"]
)
def test_names_and_moments_are_those_of_the_stacked_design(right):
    stacked = FRAME.assign(site=np.repeat(list(EDGES), [40, 80, 120]))
    stacked["site"] = pd.Categorical(stacked["site"], list(EDGES))
    found = design(f"y ~ {right}", sites())
    expected = model_matrix(right, stacked.astype({"flag": object}))
    assert found.names == tuple(expected.columns) and found.n.tolist() == [40, 80, 120]
    assert found.intercept == (found.names[0] == INTERCEPT)
    X = expected.to_numpy(dtype=float)
    np.testing.assert_allclose([found.mean, found.spread], [X.mean(axis=0), X.std(axis=0)], atol=1e-12)


def test_translation_keeps_the_linear_predictor():
    X = np.column_stack([np.ones(9), rng.normal(5.0, 2.0, (9, 2))])
    own = standardization(X.mean(axis=0), X.std(axis=0), True)
    other = np.array([0.0, 4.0, 7.0]), np.array([1.0, 3.0, 0.5])
    gamma = rng.normal(size=3)
    Z_own, Z_other = ((X - shift) / scale for shift, scale in (own, other))
    np.testing.assert_allclose(Z_own @ (translation(*own, *other) @ gamma), Z_other @ gamma)


def test_a_streamed_table_agrees_to_the_same(tmp_path):
    frame = FRAME.copy()
    frame.loc[frame.index[:16], "g"] = None
    frame.loc[frame.index[100:110], "x"] = np.nan
    streamed = {}
    for name, table in cut(frame).items():
        table.to_parquet(tmp_path / f"{name}.parquet")
        streamed[name] = ParquetTable(tmp_path / f"{name}.parquet", rows_per_chunk=16)
    formula = "y ~ scale(x) + g + x:flag"
    one, two = design(formula, sites(frame)), design(formula, sites(tables=streamed))
    assert one.names == two.names and one.n.tolist() == two.n.tolist() == [24, 70, 120]
    np.testing.assert_allclose(one.mean, two.mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(one.spread, two.spread, rtol=1e-12, atol=1e-12)


def test_a_file_is_read_four_times_until_its_moments_are_known(tmp_path, monkeypatch):
    """It is surveyed and coded once, and its leverages need two passes: a file may not fit into memory."""
    read = ParquetTable.chunks
    passes = []
    monkeypatch.setattr(ParquetTable, "chunks", lambda *arguments: passes.append(1) or read(*arguments))
    FRAME[["y", "x", "w"]].to_parquet(tmp_path / "rows.parquet")
    table = ParquetTable(tmp_path / "rows.parquet", rows_per_chunk=60)
    assert design("y ~ x + w", sites(tables={"Kiel": table})).n.tolist() == [N]
    assert len(passes) == 4


def test_rows_that_lack_something_are_counted():
    frame = FRAME.copy()
    frame.loc[frame.index[[0, 50]], "x"] = np.nan
    frame.loc[frame.index[[0, 1]], "w"] = np.nan
    frame.loc[frame.index[2:5], "k"] = 0
    agreement = agree("y ~ x", sites(frame), weights={"var_weights": "w", "freq_weights": "k"})
    assert [(row.site, row.n_rows, row.n) for row in agreement.sites] == [
        ("Kiel", 37, 35),
        ("Bonn", 80, 79),
        ("Ulm", 120, 120),
    ]


def test_more_levels_than_a_factor_has_are_refused():
    frame = pd.DataFrame({"y": np.arange(9000.0), "g": np.arange(9000) // 5})
    with pytest.raises(DesignError, match=f"column 'g' at site 'Bonn' has more than {MOST_LEVELS:,} levels"):
        agree_of = question("y ~ C(g)", frame)
        site = Site("Bonn", frame)
        site.answer(pack_request(rows_request("s")("Bonn", "survey_rows", agree_of.to_json())))


# -- one site, and a stranger's questions --------------------------------------------------------------


def requested(site, step, content, session="s"):
    before, kept = len(site.ledger.entries), site._data.memory.released
    try:
        return unpack_reply(site.answer(pack_request(rows_request(session)(site.name, step, content))))
    except FedstatError as error:
        assert len(site.ledger.entries) == before and site._data.memory.released is kept
        assert not isinstance(error, MessageError) or site.name in str(error) or "question" in str(error)
        raise


def spec_of(formula="y ~ x + g", frame=FRAME):
    return agree(formula, sites(frame), frame).spec


def opening(formula="y ~ x + g", frame=FRAME, **changes):
    spec = replace(spec_of(formula, frame), **changes)
    return {"question": question(formula, frame).to_json(), "spec": spec.to_json()}


def test_rows_that_differ_by_one_are_refused_at_every_step():
    """A new column with one missing value, and levels, means or moments of the rows that have it."""
    frame = FRAME.assign(v=FRAME["w"].where(np.arange(N) != 50))
    first, second = question("y ~ x + g", frame), question("y ~ x + g + v", frame)
    centered = question("y ~ center(x) + v", frame).to_json()
    for step, content in (
        ("survey_rows", second.to_json()),
        ("open_rows", opening("y ~ x + g + v", frame)),
        ("transform_sums", {"question": centered, "state": {}, "targets": {"center(x)": None}}),
    ):
        site = sites(frame)["Bonn"]
        requested(site, "survey_rows", first.to_json())
        with pytest.raises(
            PolicyError, match=r"Bonn: its policy \(differencing\).*Fit both models on the same"
        ):
            requested(site, step, content, "other")
        requested(site, "survey_rows", first.to_json(), "other")
        requested(site, "open_rows", opening("y ~ x + g", frame))


def test_five_rows_less_are_allowed():
    frame = FRAME.assign(v=FRAME["w"].where(~np.isin(np.arange(N), range(50, 55))))
    site = sites(frame)["Bonn"]
    requested(site, "survey_rows", question("y ~ x", frame).to_json())
    assert json.loads(requested(site, "survey_rows", question("y ~ x + v", frame).to_json()).text)["n"] == 75


@pytest.mark.parametrize("role", ["freq_weights", "var_weights"])
def test_a_weight_of_zero_is_a_row_less(role):
    frame = FRAME.assign(w=np.where(np.arange(N) == 50, 0.0, 1.0))
    site = sites(frame)["Bonn"]
    requested(site, "survey_rows", question("y ~ x", frame).to_json())
    with pytest.raises(PolicyError, match="differencing"):
        requested(site, "survey_rows", question("y ~ x", frame, weights={role: "w"}).to_json())


def test_binomial_trials_of_zero_are_a_row_less():
    frame = FRAME.assign(hits=1.0, misses=np.where(np.arange(N) == 50, -1.0, 1.0))
    site = sites(frame)["Bonn"]
    requested(site, "survey_rows", question("cbind(hits, 0 * misses + 1) ~ x", frame).to_json())
    with pytest.raises(PolicyError, match="differencing"):
        requested(site, "survey_rows", question("cbind(misses + hits, 0 * misses) ~ x", frame).to_json())


def test_few_rows_reveal_nothing():
    frame = FRAME.assign(v=FRAME["w"].where(np.arange(N) > 115))
    site = sites(frame)["Bonn"]
    with pytest.raises(PolicyError, match=r"requires at least 5 complete rows; there are 4"):
        requested(site, "survey_rows", question("y ~ v", frame).to_json())


def test_a_level_that_a_forged_coding_lacks_is_named_only_where_enough_rows_have_it():
    frame = FRAME.assign(g=np.where(np.isin(np.arange(N), [50, 51]), "HIV", FRAME["g"]))
    site = sites(frame)["Bonn"]
    with pytest.raises(PolicyError) as caught:
        requested(site, "open_rows", opening(levels={"g": ("a", "b", "c")}))
    assert "column 'g' has levels that the fit does not know in 2 rows" in str(caught.value)
    assert "HIV" not in str(caught.value)
    with pytest.raises(DesignError, match="level 'c', not known when the model was fitted"):
        requested(sites()["Bonn"], "open_rows", opening(levels={"g": ("a", "b")}))


def test_a_design_of_more_columns_than_rows_is_refused_before_it_is_coded():
    frame = FRAME.assign(a=np.arange(N) // 5, b=(np.arange(N) * 7) % 50)
    levels = {"a": tuple(range(1000)), "b": tuple(range(1000))}
    site = sites(frame)["Bonn"]
    content = opening(
        "y ~ C(a):C(b)", frame.assign(a=1 + np.arange(N) % 2, b=1 + np.arange(N) % 3), levels=levels
    )
    with pytest.raises(PolicyError, match="the model has 998,002 for 80 rows"):
        requested(site, "open_rows", content)
    many = replace(question("y ~ x", frame), terms=tuple(f"x ** {j / 1000}" for j in range(1, 400)))
    with pytest.raises(FedstatError):
        requested(site, "open_rows", {**opening("y ~ x"), "question": many.to_json()})


def test_values_whose_squares_are_no_numbers_are_named():
    frame = FRAME.assign(x=FRAME["x"] * 1e200)
    site = sites(frame)["Bonn"]
    with (
        np.errstate(all="ignore"),
        pytest.raises(DesignError, match="column 'x' at site 'Bonn': the squares"),
    ):
        requested(site, "open_rows", opening("y ~ x", frame))


FORGED = {
    "no text": "",
    "no JSON": "{",
    "a list": "[]",
    "null": "null",
    "a number": "3",
    "deep": "[" * 5000 + "]" * 5000,
    "no question": json.dumps({"spec": "{}"}),
    "question of lists": json.dumps({"question": [], "spec": []}),
}
BROKEN = {
    "unknown key": {"more": 1},
    "terms as text": {"terms": "x"},
    "terms of numbers": {"terms": [1, 2]},
    "no such column": {"terms": ["q"], "columns": ["q"]},
    "undeclared column": {"terms": ["x", "w"]},
    "response that runs": {"response": "__import__('os')"},
    "term that runs": {"terms": ["exp.__class__"], "columns": ["x"]},
    "two terms in one": {"terms": ["x + w"], "columns": ["x", "w"]},
    "offset that runs": {"offsets": ["().__class__"], "offset_columns": ["x"]},
    "offset of others": {"offsets": ["w"], "offset_columns": ["x"]},
    "intercept of text": {"intercept": "yes"},
    "weights as list": {"weights": ["w"]},
    "unknown role": {"weights": {"prior": "w"}},
    "weight that is no column": {"weights": {"freq_weights": "q"}},
    "weight of numbers": {"weights": {"freq_weights": 3}},
    "weight of text": {"weights": {"freq_weights": "g"}},
    "label that is no column": {"labels": ["q"]},
    "labels as numbers": {"labels": [1]},
    "centered response": {"response": "center(y)"},
    "no response": {"response": ""},
    "other response columns": {"response_columns": ["x"]},
    "long": {"terms": ["x"] * 30_000},
    "a long term": {"terms": ["x" + " + x" * 30_000]},
    "many columns": {"columns": [f"c{j}" for j in range(20_000)]},
}


@pytest.mark.parametrize("step", ["survey_rows", "open_rows", "transform_sums"])
@pytest.mark.parametrize("case", FORGED)
def test_a_text_that_is_no_question_is_refused(step, case):
    with pytest.raises(MessageError):
        requested(sites()["Bonn"], step, FORGED[case])


@pytest.mark.parametrize("step", ["survey_rows", "open_rows", "transform_sums"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_forged_question_is_refused(step, case):
    forged = json.dumps(json.loads(question("y ~ x").to_json()) | BROKEN[case])
    content = {"question": forged, "spec": spec_of("y ~ x").to_json(), "state": {}, "targets": {}}
    with pytest.raises(FedstatError) as caught:
        requested(sites()["Bonn"], step, forged if step == "survey_rows" else content)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "changes",
    [
        {"kinds": {"x": "category", "g": "category"}},
        {"kinds": {"x": "number", "g": "number"}},
        {"kinds": {"x": "number"}},
        {"kinds": {}},
        {"levels": {}},
        {"levels": {"g": ()}},
        {"levels": {"g": ("a", "a", "b", "c")}},
        {"levels": {"g": (1, 2, 3)}},
        {"levels": {"g": ("a", "b", "c"), "x": (1,)}},
        {"terms": ("x",), "columns": ("x",)},
        {"terms": ("x", "k"), "columns": ("x", "k")},
        {"intercept": False},
        {"state": {"center(x)": {"center": 0.0}}},
        {"names": ("x",)},
        {"means": {"x": 3.0}},
    ],
)
def test_a_forged_coding_is_refused_or_codes_the_question(changes):
    """The reply has the columns of the request, and counts of complete rows."""
    site = sites()["Bonn"]
    content = {"question": question("y ~ x + g").to_json()}
    held = json.loads(spec_of().to_json())
    for name, value in changes.items():
        held[name] = value
    try:
        reply = requested(site, "open_rows", content | {"spec": json.dumps(held)})
    except FedstatError:
        return
    assert json.loads(reply.text)["names"][0] == "x"
    assert reply.entities == 80 and not reply.arrays


def test_a_column_that_the_coding_calls_a_category_is_no_number():
    frame = FRAME.assign(k=FRAME["k"].astype(float))
    spec = replace(spec_of("y ~ k", frame), kinds={"k": "category"}, levels={"k": (1.0, 2.0, 3.0)})
    assert isinstance(spec, BlockSpec)
    reply = requested(
        sites(frame)["Bonn"],
        "open_rows",
        {"question": question("y ~ k", frame).to_json(), "spec": spec.to_json()},
    )
    assert json.loads(reply.text)["names"] == ["k[T.2.0]", "k[T.3.0]"]


def test_a_refused_model_leaves_the_site_as_it_was():
    site = sites(policy=Policy(min_level_count=30))["Bonn"]
    content = opening("y ~ x + g")
    with pytest.raises(PolicyError, match="minimum rows per level"):
        requested(site, "open_rows", content)
    requested(site, "open_rows", opening("y ~ x"))


@pytest.mark.parametrize("center", [1000.0, 1.0 / 3.0, 77.7, 1e6 / 7.0, -0.1])
def test_what_varies_between_sites_only_is_seen_down_to_its_seventh_digit(center):
    """Moments are sums, so that a spread between sites is what two large ones leave."""
    steps = np.repeat([0.0, 1.0, 2.0], [40, 80, 120])
    seen = FRAME.assign(w=center * (1.0 + 1e-5 * steps))
    found = design("y ~ x + w", sites(seen))
    assert found.spread[2] == pytest.approx(seen["w"].std(ddof=0), rel=1e-4)
    with pytest.raises(DesignError, match="'w' is constant over the complete rows of all sites"):
        design("y ~ x + w", sites(FRAME.assign(w=center * (1.0 + 1e-9 * steps))))
