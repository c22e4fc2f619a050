"""Rank correlations: codes of intervals that a coordinator chooses reveal no cell of few rows."""

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import FedstatError, MessageError, PolicyError
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.models.descriptive.tables import CorrelationModel

N = 120
EDGES = np.array([[0.5], [0.5]])
COUNTED = fs.Policy(products="counted", remember="all")


def partition_of(both, policy=COUNTED):
    """Columns x and y of one site, of which `both` rows have high values in both."""
    rng = np.random.default_rng(2)
    x, y = rng.uniform(0.0, 0.4, N), rng.uniform(0.0, 0.4, N)
    x[:30] += 0.6
    y[30 - both : 60 - both] += 0.6
    return fs.ClientPartition.from_frame(
        pd.DataFrame({"x": x, "y": y, "site": "A"}), by="site", policy=policy
    )


def session_of(partition):
    """Correlate as usual, and return the session that is open at the site."""
    caught, original = [], CorrelationModel._open_session
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CorrelationModel, "_open_session", lambda *given: caught.append(original(*given)) or caught[0]
        )
        fs.corr(partition, "x + y", method="spearman", bins=4, bounds={"x": (0, 1), "y": (0, 1)})
    return partition.sites["A"], caught[0].session


def send(site, session, ranks, edges=EDGES):
    """Ask as a coordinator that chooses ranks itself: rows with both codes follow from the products."""
    steps = {"count_columns": {"edges": edges}, "sum_ranks": {"edges": edges, "ranks": ranks}}
    for step, arrays in steps.items():
        reply = site.answer(pack_request(Request("A", "descriptive", step, arrays, session, "")))
    return unpack_reply(reply).arrays["products"]


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize(("both", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_rows_above_two_edges_are_none_or_enough(both, refused, shift):
    site, session = session_of(partition_of(both))
    ranks = np.array([[0.0, 1.0], [0.0, 1.0]]) - shift
    if refused:
        with pytest.raises(PolicyError, match="rows behind a product"):
            send(site, session, ranks)
    else:
        products = send(site, session, ranks)[0, 1]
        assert np.isclose(products + 60 * shift - N * shift**2, both)


@pytest.mark.parametrize(
    ("ranks", "edges"),
    [
        (np.array([[1.0, 0.0], [0.0, 1.0]]), EDGES),
        (np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]), EDGES),
        (np.zeros((2, 3)), np.array([[0.5, 0.4], [0.5, 0.6]])),
        (np.zeros((1, 2)), EDGES[:1]),
    ],
)
def test_ranks_that_are_none_are_refused(ranks, edges):
    with pytest.raises(MessageError, match=r"ascend|has 1 rows"):
        send(*session_of(partition_of(3)), ranks, edges)


def test_every_choice_of_ranks_counts_as_a_sum_of_the_column():
    """Many codes of the same intervals, from which all cells would follow, are too many sums."""
    opened = session_of(partition_of(3, fs.Policy(max_column_sums=0.5)))
    with pytest.raises(FedstatError, match="max_column_sums"):
        for k in range(60):
            send(*opened, np.array([[0.0, 1.0 + k], [0.0, 1.0 + k]]))
