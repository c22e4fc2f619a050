"""The state of transforms from sums over sites is that of the stacked table."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from formulaic import model_matrix

from fedstat.errors import DesignError, FedstatError, FormulaError, MessageError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.coding import plain_state
from fedstat.federation.design.formula.parse import parse_pooled_formula
from fedstat.federation.design.horizontal_design import agree_rows, rows_request
from fedstat.federation.design.site_rows import RowsRequest, design_matrix, find_complete_rows
from fedstat.federation.design.transform_states import Recurrence, agree_states
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine

rng = np.random.default_rng(0)
N = 240
FRAME = pd.DataFrame(
    {
        "y": rng.normal(size=N),
        "x": rng.normal(size=N),
        "days": rng.integers(20, 400, N).astype(float),
        "year": 2000.0 + rng.integers(0, 23, N),
        "small": 1e-9 * rng.normal(size=N),
        "binary": rng.integers(0, 2, N).astype(float),
    }
)
EDGES = {"Kiel": (0, 40), "Bonn": (40, 120), "Ulm": (120, N)}


def sites(frame=FRAME, policy=None):
    return {
        name: Site(name, frame.iloc[a:b].reset_index(drop=True), policy) for name, (a, b) in EDGES.items()
    }


def question(right, frame=FRAME):
    formula = parse_pooled_formula(f"y ~ {right}", list(frame.columns))
    (terms,) = formula.sites
    return RowsRequest(formula.response, formula.response_columns, terms.terms, terms.columns)


def agree(right, frame=FRAME, held=None, added=False):
    held = held or sites(frame)
    found = LocalEngine(held).run(agree_rows(question(right, frame), tuple(held), "s"), Ledger())
    if not added:
        return found
    protocol = agree_states(found.question, tuple(held), rows_request("s"), added=True)
    state = plain_state(LocalEngine(held).run(protocol, Ledger()))
    return replace(found, spec=replace(found.spec, state=state))


TRANSFORMS = (
    "center(x)",
    "scale(days)",
    "scale(year)",
    "scale(small)",
    "scale(days, center=False)",
    "scale(days, scale=False)",
    "scale(x, ddof=0)",
    "scale(log(days))",
    "log(2 + scale(days))",
    "center(x * center(year))",
    "poly(x, 3)",
    "poly(year, 4)",
    "poly(small, 3)",
    "poly(days, 2, raw=True)",
    "scale(x):poly(days, 2)",
    "bs(x, knots=(-0.5, 0.5), lower_bound=-9, upper_bound=9)",
    "bs(x, degree=2, knots=(-1, 0, 1), lower_bound=-9, upper_bound=9)",
)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("right", TRANSFORMS)
def test_rows_are_coded_as_in_the_stacked_table(right, added):
    """From sums and means by site, and from nothing but what adds up over the sites."""
    held = sites()
    agreement = agree(right, held=held, added=added)
    coded = []
    for site in held.values():
        for rows in find_complete_rows(site._data, agreement.question):
            coded_rows = design_matrix(rows.frame, agreement.question, agreement.spec, "")
            coded.append(coded_rows.X)
    expected = np.asarray(model_matrix(right, FRAME))
    size = np.abs(expected).max(axis=0)
    np.testing.assert_allclose(np.concatenate(coded) / size, expected / size, atol=1e-11)


def test_missing_values_and_the_order_of_sites_do_not_matter():
    frame = FRAME.copy()
    frame.loc[frame.index[::7], "x"] = np.nan
    held = sites(frame)
    one = agree("scale(x) + poly(days, 2)", frame, held)
    two = agree("scale(x) + poly(days, 2)", frame, dict(reversed(sites(frame).items())))
    complete = frame.dropna()
    assert one.spec.state["scale(x)"]["center"] == pytest.approx(complete["x"].mean(), rel=1e-13)
    assert one.spec.state["scale(x)"]["scale"] == pytest.approx(complete["x"].std(), rel=1e-13)
    for text, state in one.spec.state.items():
        for key, value in state.items():
            assert value == pytest.approx(two.spec.state[text][key], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("right", "kind", "expected"),
    [
        ("bs(x, df=2)", FormulaError, r"needs more degrees of freedom"),
        ("bs(scale(x), df=4)", FormulaError, r"inside is scale\(\), with sums over all rows"),
        ("cr(x, lower_bound=0, upper_bound=1, constraints='center')", FormulaError, r"needs df=... alone"),
        ("cc(x, df=4, constraints='center')", FormulaError, r"needs the ends of the cycle"),
        ("bs(binary, df=6)", DesignError, r"two of its knots are at the same value, which many rows have"),
        ("bs(x, knots=(0,), lower_bound=-1)", FormulaError, r"needs df=... alone, or knots=..., lower"),
        ("bs(x, df=5, knots=(0,), lower_bound=-9, upper_bound=9)", FormulaError, "needs df=... alone"),
        ("bs(x, knots=(0, 12), lower_bound=-9, upper_bound=9)", FormulaError, "knots that ascend between"),
        ("bs(x, knots=(0,), lower_bound=9, upper_bound=-9)", FormulaError, "knots that ascend between"),
        ("poly(binary, 2)", DesignError, r"too few distinct values over all sites .* degree 2. Lower the"),
        ("poly(binary, 5)", DesignError, r"too few distinct values"),
        (
            "log(scale(x))",
            DesignError,
            r"'log\(scale\(x\)\)' at site 'Kiel': log\(\) gives values",
        ),
        (
            "scale(x, ddof=240)",
            DesignError,
            r"constant over the complete rows of all sites, or ddof leaves no",
        ),
    ],
)
def test_transforms_that_cannot_be_are_named(right, kind, expected):
    held = sites()
    with pytest.raises(kind, match=expected):
        agreement = agree(right, held=held)
        for site in held.values():
            for rows in find_complete_rows(site._data, agreement.question):
                design_matrix(rows.frame, agreement.question, agreement.spec, site.name)


@pytest.mark.parametrize("added", [False, True])
def test_a_constant_column_has_no_scale(added):
    frame = FRAME.assign(x=np.where(np.arange(N) < 9, 2.0, 1.0))
    frame.loc[frame.index[:9], "days"] = np.nan
    with pytest.raises(DesignError, match=r"'scale\(x\)': the column is constant over the complete rows"):
        agree("scale(x) + days", frame, added=added)
    if not added:
        return
    frame = FRAME.assign(x=0.1)  # its mean is rounded
    with pytest.raises(DesignError, match=r"'scale\(x\)': the column is constant over the complete rows"):
        agree("scale(x) + days", frame, added=added)


# -- what a site sums for a stranger -------------------------------------------------------------------


def request(site, right, targets, state=None):
    content = {"question": question(right).to_json(), "state": state or {}, "targets": targets}
    before = len(site.ledger.entries)
    try:
        reply = unpack_reply(
            site.answer(pack_request(rows_request("s")(site.name, "transform_sums", content)))
        )
    except FedstatError:
        assert len(site.ledger.entries) == before
        raise
    return reply.arrays["sums"]


def test_sums_are_those_of_numpy():
    site = sites()["Bonn"]
    x = FRAME["x"].to_numpy()[40:120]
    sums = request(site, "center(x) + poly(days, 2)", {"center(x)": None})
    np.testing.assert_allclose(sums, [[80, x.mean(), ((x - x.mean()) ** 2).sum()]], rtol=1e-12)
    at = {"degree": 2, "alpha": [100.0], "norms": [80.0]}
    days = FRAME["days"].to_numpy()[40:120]
    P = days - 100.0
    np.testing.assert_allclose(
        request(site, "poly(days, 2)", {"poly(days, 2)": at}), [[0, P @ P, days @ P**2]], rtol=1e-12
    )


@pytest.mark.parametrize(
    "targets",
    [
        {"center(days)": None},
        {"x": None},
        {"center(x)": {"degree": 2, "alpha": [], "norms": []}},
        {"poly(x, 2)": None},
        {"poly(x, 2)": 3},
        {"poly(x, 2)": {"degree": 99, "alpha": [], "norms": []}},
        {"poly(x, 2)": {"degree": 2, "alpha": [0.0] * 9, "norms": [1.0] * 9}},
        {"poly(x, 2)": {"degree": 2, "alpha": [0.0], "norms": []}},
        {"poly(x, 2)": {"degree": 2, "alpha": ["0"], "norms": [1.0]}},
        {"poly(x, 2)": {"degree": 2, "alpha": [1e300], "norms": [1e-300]}},
        {"poly(x, 2)": {"degree": 2, "alpha": [0.0, 0.0], "norms": [0.0, 1.0]}},
        {"poly(x, 2)": {"degree": 2, "alpha": [], "norms": [], "more": 1}},
        [],
        None,
        "center(x)",
    ],
)
def test_forged_targets_are_refused(targets):
    with np.errstate(all="ignore"), pytest.raises(FedstatError):
        request(sites()["Bonn"], "center(x) + poly(x, 2)", targets)


def test_a_forged_state_is_refused():
    for state in (
        {"center(x)": {"center": float("inf")}},
        {"center(x)": {"center": "0"}},
        {"center(x)": 3},
        {"center(x)": {"middle": 0.0}},
        [],
    ):
        with pytest.raises(FedstatError):
            request(sites()["Bonn"], "scale(3 / center(x))", {"scale(3 / center(x))": None}, state)


def test_a_mean_that_few_rows_make_up_is_refused():
    """The answer would reveal whether a row has a given value."""
    frame = FRAME.assign(x=np.where(np.arange(N) == 50, 7.5, FRAME["x"]))
    spike = "center(exp(-(x - 7.4) ** 2 * 9))"
    held = sites(frame)
    with pytest.raises(PolicyError, match=r"Kiel: its policy \(minimum rows per level\).*of 'center"):
        agree(spike, frame, held)
    assert not [e for site in held.values() for e in site.ledger.entries if e.step == "transform_sums"]


def test_means_of_rows_that_differ_by_one_are_refused():
    """Also without the questions that come before."""
    frame = FRAME.assign(w=FRAME["days"].where(np.arange(N) != 60))
    site = sites(frame)["Bonn"]
    request(site, "center(x)", {"center(x)": None})
    both = RowsRequest("y", ("y",), ("center(x)", "w"), ("x", "w"))
    content = {"question": both.to_json(), "state": {}, "targets": {"center(x)": None}}
    before = len(site.ledger.entries)
    with pytest.raises(PolicyError, match="differencing"):
        site.answer(pack_request(rows_request("t")("Bonn", "transform_sums", content)))
    assert len(site.ledger.entries) == before
    request(site, "center(x)", {"center(x)": None})


def test_few_rows_are_not_summed():
    with pytest.raises(PolicyError, match=re.escape("requires at least 100 complete rows; there are 80")):
        request(sites(policy=Policy(min_count=100))["Bonn"], "center(x)", {"center(x)": None})


def test_the_recurrence_is_that_of_orthogonal_polynomials():
    x = np.random.default_rng(4).normal(3.0, 2.0, 50)
    recurrence = Recurrence(4)
    polynomials = []
    done = False
    while not done:
        P = recurrence.last(x)
        polynomials.append(P)
        done = recurrence.add(float(P @ P), float(x @ P**2))
    gram = np.array(polynomials) @ np.array(polynomials).T
    size = np.sqrt(np.diag(gram))
    np.testing.assert_allclose(gram / np.outer(size, size), np.eye(5), atol=1e-10)


def test_a_text_that_is_no_question_is_named():
    site = sites()["Bonn"]
    for text in ("", "{", "[]", "null", '{"question": 3}', json.dumps({"question": "{}"})):
        with pytest.raises(MessageError):
            site.answer(pack_request(rows_request("s")("Bonn", "transform_sums", text)))
