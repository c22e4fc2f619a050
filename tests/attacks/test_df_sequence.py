"""Knots of splines with df= give means of blocks of rows, whatever the sequence of degrees of freedom."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat import codec
from fedstat.errors import FedstatError
from fedstat.federation.design.formula.parse import parse_pooled_formula
from fedstat.federation.design.horizontal_design import rows_request
from fedstat.federation.design.site_rows import RowsRequest, block_means
from fedstat.federation.design.spline_knots import EVERYWHERE, KnotsRequest
from fedstat.federation.disclosure.column_sums import released_sums
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import pack_request, unpack_reply

rng = np.random.default_rng(3)
N = 400
TABLE = pd.DataFrame({"x": np.exp(rng.normal(size=N)), "z": rng.normal(size=N), "y": rng.normal(size=N)})
TABLE.loc[0, "x"] = 111.1
LEAST = Policy().min_level_count


def question(right, *more):
    formula = parse_pooled_formula(f"y ~ {right}", list(TABLE.columns))
    (terms,) = formula.sites
    return RowsRequest(formula.response, formula.response_columns, terms.terms, terms.columns, labels=more)


def count(site, right, edges, *more):
    targets = {question(right).terms[0]: tuple(edges)}
    content = codec.to_plain(KnotsRequest(question(right, *more).to_json(), targets, 1))
    request = rows_request("s")(site.name, "count_intervals", content)
    return unpack_reply(site.answer(pack_request(request))).arrays["counts"]


def survey(site, right, *more):
    request = rows_request("s")(site.name, "survey_rows", question(right, *more).to_json())
    unpack_reply(site.answer(pack_request(request)))


def test_intervals_of_any_width_find_means_of_blocks_and_no_value():
    """The attacker divides each interval with rows until it is as narrow as numbers allow."""
    site = Site("A", TABLE)
    survey(site, "bs(x, df=4)")
    found, waiting = [], [(-1.0, 200.0)]
    while waiting:
        edges = np.unique(np.concatenate([np.linspace(a, b, 40) for a, b in waiting]))
        counts = count(site, "bs(x, df=4)", edges)
        cells = [(a, b, n) for a, b, n in zip(edges[:-1], edges[1:], counts[1:-1], strict=True) if n]
        assert min(n for _, _, n in cells) >= LEAST
        found = cells
        waiting = [(a, b) for a, b, _ in cells if b - a > 1e-6]
        if len(waiting) * 40 > 30_000:
            break
    middles = np.array([(a + b) / 2.0 for a, b, _ in found])
    blocks = np.unique(block_means(np.zeros(N, dtype=np.int64), TABLE["x"].to_numpy(), LEAST))
    assert np.abs(middles[:, None] - blocks).min(axis=1).max() < 0.2
    assert abs(middles.max() - 111.1) > 30.0


def test_a_sequence_of_degrees_of_freedom_releases_no_more_than_one():
    partition = fs.ClientPartition.from_frame(TABLE.assign(site=np.repeat(["A", "B"], N // 2)), by="site")
    ledgers = {name: site._data.site_ledger for name, site in partition.sites.items()}

    def blocks():
        return {
            name: {key for key in released_sums(ledger, ["z"])["z"] if "block" in key}
            for name, ledger in ledgers.items()
        }

    before = None
    for df in (3, 4, 5, 6, 8, 10):
        fs.FederatedOLS.from_formula(f"y ~ ns(z, df={df})", partition)
        assert before is None or blocks() == before
        before = blocks()
    assert all(len(own) <= N // 2 // LEAST for own in before.values())


def test_counts_over_rows_that_differ_in_one_are_refused():
    table = TABLE.assign(w=TABLE["z"].where(np.arange(N) != 7))
    site = Site("A", table)
    survey(site, "bs(x, df=4)")
    count(site, "bs(x, df=4)", EVERYWHERE)
    with pytest.raises(FedstatError):
        count(site, "bs(x, df=4)", EVERYWHERE, "w")


@pytest.mark.parametrize("edges", [(2.0, 1.0), (1.0, 1.0), tuple(np.arange(40_000.0))])
def test_forged_intervals_are_refused(edges):
    site = Site("A", TABLE)
    survey(site, "bs(x, df=4)")
    with pytest.raises(FedstatError):
        count(site, "bs(x, df=4)", edges)
    with pytest.raises(FedstatError):
        count(site, "x", ())  # no spline
