"""What sites report to each other of products of columns of few values, against their rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import MessageError
from fedstat.federation.disclosure.level_products import LONGEST, LevelSpace, OwnLevels, reported_rows

LEAST = 3


def levels(X: np.ndarray, persons: np.ndarray | None = None) -> OwnLevels:
    return OwnLevels.of([(j + 1, x) for j, x in enumerate(X.T.astype(float))], len(X), persons)


def products(X: np.ndarray) -> np.ndarray:
    X = np.column_stack([np.ones(len(X)), X])
    i, j = np.triu_indices(X.shape[1])
    return X[:, i] * X[:, j]


def outside(P: np.ndarray) -> np.ndarray:
    """Basis of all combinations of products that are zero in some rows."""
    if not len(P):
        return np.eye(P.shape[1])
    _, s, V = np.linalg.svd(P)
    return V[np.concatenate([s > 1e-9 * s[0], np.zeros(len(V) - len(s), dtype=bool)]).argmin() :].T


def singles_out(own: np.ndarray, others: list[np.ndarray]) -> bool:
    """Whether a combination is zero in all rows of others, but one site, and in all but few rows here."""
    for left_out in range(len(others)):
        free = outside(np.concatenate([one for k, one in enumerate(others) if k != left_out]))
        W = own @ free
        for few in (k for size in range(1, LEAST) for k in combinations(range(len(W)), size)):
            rest = np.delete(W, few, axis=0)
            inside = outside(rest) if len(rest) else np.eye(W.shape[1])
            if inside.size and np.abs(W[list(few)] @ inside).max(initial=0.0) > 1e-7:
                return True
    return False


def test_sites_judge_as_an_oracle_that_has_all_rows():
    rng, seen = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(120):
        p, K = int(rng.integers(2, 4)), int(rng.integers(3, 5))
        tables = []
        for _ in range(K):
            X = (rng.random((int(rng.integers(6, 14)), p)) < rng.uniform(0.15, 0.6)) * 1.0
            X[:, 0] *= rng.integers(1, 4, len(X)) if rng.random() < 0.3 else 1.0
            tables.append(X)
        # A further column has few values at other sites, and many at this one.
        further = [rng.integers(0, 9, len(X)) for X in tables]
        wide = [np.column_stack([X, x]) for X, x in zip(tables, further, strict=True)]
        wide[0][:, -1] = rng.normal(size=len(tables[0]))
        sent = [levels(X).space(reported_rows(LEAST), "q").to_bytes() for X in wide[1:]]
        spaces = [LevelSpace.from_bytes(one, "C") for one in sent]
        own = levels(wide[0]).examined()
        assert own.places == tuple(range(p + 1))
        found = own.are_covered(spaces, LEAST)
        expected = not singles_out(products(tables[0]), [products(X) for X in tables[1:]])
        assert found == expected
        seen[found] += 1
    assert min(seen.values()) > 10


@pytest.mark.parametrize("least", [2, 3, 4])
def test_a_combination_within_a_space_is_nonzero_for_as_many_persons(least):
    rng = np.random.default_rng(least)
    for _ in range(20):
        X, persons = (rng.random((60, 4)) < 0.25) * 1.0, rng.integers(0, 40, 60)
        space = levels(X, persons).space(least, "q")
        P = products(X)
        for chosen in rng.choice(60, (40, 45)):  # combinations that are zero in many rows
            for c in outside(P[chosen]).T[:3]:
                within = np.abs(space.of_products(range(5)) @ c).max(initial=0.0) > 1e-5
                if within:
                    assert len(np.unique(persons[np.abs(P @ c) > 1e-9])) >= least
        assert len(space.basis) >= 3  # and the space is not empty


def test_a_site_learns_which_levels_occur_together_and_not_how_often():
    once = np.repeat(np.array([[0, 0], [1, 0], [0, 1], [1, 1]]), [9, 9, 9, 1], axis=0)
    often = np.repeat(np.array([[0, 0], [1, 0], [0, 1], [1, 1]]), [2, 3, 11, 20], axis=0)
    never = np.repeat(np.array([[0, 0], [1, 0], [0, 1]]), [9, 9, 9], axis=0)
    sent = [levels(X).space(1, "q").to_bytes() for X in (once, often, never)]
    assert sent[0] == sent[1] != sent[2]
    assert {len(one) for one in sent} == {512}


def test_the_number_of_persons_that_two_sites_report_is_enough_for_any_minimum():
    for least in range(2, 12):
        assert 2 * reported_rows(least) + 1 >= least > 2 * (reported_rows(least) - 1) + 1 - (least == 2)


def test_other_columns_of_few_values_are_no_help():
    X = np.repeat(np.array([[0, 0], [1, 0], [0, 1], [1, 1]]), [9, 9, 9, 1], axis=0)
    others = [levels(X).space(1, "q"), levels(X[:, :1]).space(1, "q")]
    assert not levels(X).are_covered(others, LEAST)
    assert levels(X).are_covered([others[0], others[0]], LEAST)
    assert not levels(X).are_covered([replace(others[0], least=0), others[0]], LEAST)


@pytest.mark.parametrize("cut", [0, 3, 20, 60])
def test_a_message_that_is_no_space_is_refused(cut):
    X = np.repeat(np.array([[0, 0], [1, 0], [0, 1], [1, 1]]), [9, 9, 9, 1], axis=0)
    space = levels(X).space(1, "q")
    with pytest.raises(MessageError, match="the message of B: "):
        LevelSpace.from_bytes(space.to_bytes()[:cut], "the message of B")
    for wrong in (replace(space, pairs=space.pairs + 9), replace(space, basis=space.basis * np.nan)):
        with pytest.raises(MessageError, match="the message of B: "):
            LevelSpace.from_bytes(wrong.to_bytes(), "the message of B")
    assert LONGEST >= 2**20


def fit(n_sites: int, **rules: object) -> fs.results.Results:
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({"a": rng.integers(0, 2, 900), "z": rng.normal(size=900)})
    frame["y"], frame["site"] = rng.integers(0, 2, 900), np.arange(900) % n_sites
    frame["site"] = "S" + frame.site.astype(str)
    policy = fs.Policy.strict(**rules)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    return fs.GLORE.from_formula("y ~ a + z", partition).fit()


@pytest.mark.parametrize(("n_sites", "rules", "reported_by"), [
    (3, {}, 3), (2, {"two_sites": "warn"}, 0), (3, {"products": "any"}, 0), (16, {}, 16),
    (3, {"refused_kinds": frozenset({"raw columns", "sketch", "sealed"})}, 0),
])  # fmt: skip
def test_sites_report_where_masks_hide_and_owners_examine(n_sites, rules, reported_by):
    releases = fit(n_sites, **rules).ledger.releases()
    boxes = releases[(releases.array == "boxes") & (releases.sender != "coordinator")]
    assert boxes.sender.nunique() == reported_by
