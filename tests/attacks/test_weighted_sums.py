"""What colluding parties solve for from a weighted fit of VFEM.

An attacker has all sums of a group of entities, and is given everything but the values that it solves for. It
succeeds in a group with fewer entities than equations. The fit requires twice as many entities as equations.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.federation.crypto.secure_product import MARK
from fedstat.federation.disclosure import row_checks
from fedstat.models.vfem import model as vfem_model
from fedstat.models.vfem import weighted, weighted_steps
from fedstat.models.vfem.weighted_steps import calibrated_weights, response_basis

SITES = "ABC"
SETS = [(k,) for k in SITES] + list(combinations(SITES, 2))
LEAST, SMALL = 102, 6
"""Fewest entities of a group: twice the 51 sums of a group that depend on the response; and too few."""


class Study:
    """A fit with groups of `size` entities: the columns, and the sums by group that were released."""

    def __init__(self, size, groups=6):
        n, rng = size * groups, np.random.default_rng(7)
        self.x = rng.normal(size=(n, 3)) + rng.normal(size=(n, 1))
        y = self.x @ [1.0, 0.5, -0.5] + rng.normal(size=n)
        self.has = rng.random((3, n)) < 0.85
        at = np.arange(n)
        frames = {"H": pd.DataFrame({"k": at, "y": y})}
        for j, site in enumerate(SITES):
            frames[site] = pd.DataFrame({"k": at, site.lower(): self.x[:, j]})[self.has[j]]
        partition = fs.ClientPartition.from_frames(frames, on="k")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vfem_model, "weighted_fit", self.keep)
            fs.VFEMRegression.from_formula("y ~ a + b + c", partition).fit(method="weighted")
        units = self.sums.units
        self.y, self.x = (y - units.mean) / units.sd, (self.x - units.shift) / units.scale
        self.x[~self.has.T] = 0.0
        code = np.random.default_rng(n).permutation(n) % len(self.sums.base)
        self.group = np.flatnonzero(code == 0)
        assert len(self.group) == size
        self.slopes = {sites: self.coefficients(sites) for sites in SETS}
        self.knots = np.quantile(self.y, weighted_steps.KNOTS)
        self.present = {sites: self.of_set(sites)[self.group] for sites in SETS}

    def keep(self, layout, sums):
        self.sums = sums
        return weighted.weighted_fit(layout, sums)

    def of_set(self, sites):
        return self.has[["ABC".index(k) for k in sites]].all(axis=0)

    def weights(self, sites):
        return calibrated_weights(response_basis(self.y[:, None]), self.of_set(sites))

    def coefficients(self, sites):
        """The weights of a set are this combination of the basis."""
        basis, has = response_basis(self.y[:, None]), self.of_set(sites)
        return np.linalg.lstsq(basis[has], self.weights(sites)[has], rcond=None)[0]

    def basis(self, y):
        """The basis at other responses, with the knots of this fit."""
        a, b, c = self.knots
        first, middle, last = (np.maximum(y - knot, 0.0) ** 3 for knot in (a, b, c))
        return np.column_stack([np.ones(len(y)), y, (first - last) / (c - a) - (middle - last) / (c - b)])


def without_the_check(patch):
    patch.setattr(weighted, "min_entities", lambda columns, min_count: 1)
    patch.setattr(row_checks, "check_groups", lambda data, state, fact: None)


@pytest.fixture(scope="module")
def allowed():
    """The smallest groups that the check allows."""
    return Study(LEAST)


@pytest.fixture(scope="module")
def unchecked():
    with pytest.MonkeyPatch.context() as patch:
        without_the_check(patch)
        patch.setattr(weighted, "MOST_GROUPS", 120)
        return Study(SMALL, 120)


def test_one_entity_less_is_refused():
    with pytest.raises(EstimationError, match=f"at least {LEAST} are needed"):
        Study(LEAST - 1)


# ---- a column of B, by the coordinator with the holder of the response, or with all others -----------------


def equations_in_b(study, allies):
    """The linear equations in column b of the entities of a group: a matrix, and the sums."""
    group, rows, sums = study.group, [], []
    for sites in SETS:
        if "B" in sites:
            A, w, at = study.sums.by_set[sites][0], study.weights(sites)[group], 1 + sites.index("B")
            known = [w, w * study.y[group]]
            found = [A[0, at], A[at, -1]]
            for place, other in enumerate(sites):
                if other in allies:
                    known.append(w * study.x[group, SITES.index(other)])
                    found.append(A[1 + place, at])
            rows += known
            sums += found
    held = study.has[1, group]
    return np.array(rows)[:, held], np.array(sums), study.x[group, 1][held]


@pytest.mark.parametrize("allies", ["", "AC"])
def test_a_column_of_another_site_is_not_solved_for(allowed, unchecked, allies):
    matrix, sums, truth = equations_in_b(allowed, allies)
    np.testing.assert_allclose(matrix @ truth, sums, atol=1e-3)
    assert 2 * len(sums) <= len(truth)
    # 1 where the sums determine the value of an entity.
    assert np.diag(np.linalg.pinv(matrix) @ matrix).max() < 0.9
    guess = np.linalg.lstsq(matrix, sums, rcond=None)[0]
    held = allowed.group[allowed.has[1, allowed.group]]
    known = [np.ones(len(held)), allowed.y[held], *(allowed.x[held, SITES.index(k)] for k in allies)]
    known = np.column_stack(known)
    predicted = known @ np.linalg.lstsq(known, truth, rcond=None)[0]
    assert np.square(guess - truth).sum() > 0.8 * np.square(predicted - truth).sum()

    matrix, sums, truth = equations_in_b(unchecked, allies)
    np.testing.assert_allclose(np.linalg.lstsq(matrix, sums, rcond=None)[0], truth, atol=0.01)


# ---- the response, by the coordinator with A, or with all others -------------------------------------------


def sums_of_response(study, y, allies):
    """The sums of the group that follow from a response; the attacker knows the formula of the weights."""
    group, out = study.group, [y.sum(), y @ y]
    basis = study.basis(y)
    for sites in SETS:
        w = np.where(study.present[sites], basis @ study.slopes[sites], 0.0)
        known = [np.ones(len(y)), *(study.x[group, SITES.index(k)] for k in sites if k in allies), y]
        Z = np.column_stack(known)
        out += list(((Z * w[:, None]).T @ Z)[np.triu_indices(Z.shape[1])])
    return np.array(out)


def released(study, allies):
    """The sums of `sums_of_response` as they were released."""
    base, out = study.sums.base[0], []
    out += [base[0, 1], base[1, 1]]
    for sites in SETS:
        at = [0, *(1 + place for place, k in enumerate(sites) if k in allies), len(sites) + 1]
        A = study.sums.by_set[sites][0][np.ix_(at, at)]
        out += list(A[np.triu_indices(len(at))])
    return np.array(out)


def solve(study, allies, start):
    known, limit = released(study, allies), 1e-12

    def excess(y):
        return sums_of_response(study, y, allies) - known

    return least_squares(excess, start, xtol=limit, ftol=limit, gtol=limit, max_nfev=40)


@pytest.mark.parametrize("allies", ["A", "ABC"])
def test_the_response_is_not_solved_for(allowed, unchecked, allies):
    """Other responses have the same sums; in a small group, only the true ones do."""
    starts = [np.random.default_rng(seed) for seed in range(6)]
    truth = allowed.y[allowed.group]
    assert 2 * len(released(allowed, allies)) <= len(truth)
    for random in starts[:2]:
        found = solve(allowed, allies, random.normal(size=len(truth)))
        assert found.cost < 1e-3 and np.abs(found.x - truth).max() > 1.0

    truth = unchecked.y[unchecked.group]
    solutions = [solve(unchecked, allies, random.normal(size=len(truth))) for random in starts]
    best = min(solutions, key=lambda one: one.cost)
    np.testing.assert_allclose(best.x, truth, atol=1e-3)


# ---- the weights, by two sites that receive a share each ---------------------------------------------------


def test_two_sites_that_collude_learn_weights_and_with_these_approximate_responses(monkeypatch):
    opened = []
    channel = weighted_steps.SealedChannel

    class Listening(channel):
        def open(self, box):
            content = super().open(box)
            opened.append(np.frombuffer(content[MARK:]))
            return content

    monkeypatch.setattr(weighted_steps, "SealedChannel", Listening)
    study = Study(LEAST)
    (unit, *of_a), (same, *of_b) = opened[:2]
    parts = np.zeros((2, len(study.y)))
    for part, has, values in zip(parts, study.has[:2], (of_a, of_b), strict=True):
        part[has] = values
    both = study.of_set("AB")
    weights = unit * parts.sum(axis=0)[both]
    assert unit == same
    np.testing.assert_allclose(weights, study.weights("AB")[both], atol=1e-9)
    basis = response_basis(weights[:, None])
    guess = basis @ np.linalg.lstsq(basis, study.y[both], rcond=None)[0]
    assert np.corrcoef(guess, study.y[both])[0, 1] > 0.95
    for part in parts:
        assert abs(np.corrcoef(part[both], study.y[both])[0, 1]) < 4.0 / np.sqrt(both.sum())
