"""What rounds by missing pattern give away where columns depend between institutions (a binary response).

The coordinator makes the coefficients of every pattern, so that it knows those of the linear predictors that
it is sent; and sums of columns with residuals leave by pattern, at predictors that it hands to the holder.
"""

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from recovery import relative_error
from test_values_per_entity import WIDTHS, policy_of, study
from wiretap import tapped

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.kernels.glm.quadrature import BY_M, BY_MM, BY_V, LOGIT, marginal_likelihood
from fedstat.models.vfem.joint_protocol import JointIteration

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = tuple(WIDTHS)


def model_of(frames, policy="open", **options):
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    return fs.VFEMGLM.from_formula("y ~ .", partition, family=sm.families.Binomial(), **options)


def rows_and_guess(wire, frames, sites):
    """Standardized columns of entities that exactly these clients have, and what the coordinator solves."""
    has = np.column_stack([np.isin(np.arange(600), frames[c].k) for c in NAMES])
    here = np.flatnonzero((has == np.isin(NAMES, sites)).all(axis=1))
    H = np.array(wire.handed_to("Holder", "glm_evaluate", "predictor"))
    H = (H - H[:, ~has.any(axis=1)][:, :1])[:, here]
    D, X = [], []
    for c in sites:
        pattern = wire.handed_to(c, "joint_predict", "code")[0][frames[c].k.isin(here).argmax()]
        D.append(np.array(wire.handed_to(c, "joint_predict", "slopes"))[:, pattern])
        columns = frames[c].set_index("k")
        X.append(((columns - columns.mean()) / columns.std(ddof=0)).loc[here])
    D = np.hstack(D)
    return np.hstack(X), np.linalg.lstsq(D, H, rcond=1e-13)[0].T, np.linalg.matrix_rank(D, 1e-13)


def test_rows_follow_from_predictors_of_as_many_rounds_as_columns():
    frames = study(missing=0.4)
    model = model_of(frames)
    with tapped(model) as wire:
        result = model.fit(cov_type="none")
    X, guess, rank = rows_and_guess(wire, frames, ("A", "C"))
    assert rank == 5 and relative_error(guess, X) < 1e-3
    notes = " ".join(result.notes)
    assert "solve for its row" in notes and "numbers for every entity" in notes


def test_fewer_rounds_than_columns_leave_a_row_open(tmp_path):
    """If a policy allows fewer numbers, the part that is orthogonal to the released numbers stays unknown."""
    frames = study(missing=0.4)
    model = model_of(frames, policy_of(tmp_path, "per_entity = 4"))
    with tapped(model) as wire, pytest.raises(PolicyError, match="numbers for each entity"):
        model.fit(cov_type="none")
    X, guess, rank = rows_and_guess(wire, frames, ("A", "C"))
    assert rank <= 4 and relative_error(guess, X) > 0.3


def with_one_entity_moved(monkeypatch, entity, heard):
    """Have the holder evaluate once more, with another predictor at one entity, and ask for the sums."""
    sums, request = JointIteration._sums, JointIteration.request

    def twice(self, at):
        first = yield from sums(self, at)
        if heard:
            return first

        def telling(self, site, step, text="", **arrays):
            if step == "glm_evaluate":
                predictor = arrays["predictor"].copy()
                predictor[entity] += 2.0
                arrays["predictor"] = predictor
            return request(self, site, step, text, **arrays)

        monkeypatch.setattr(JointIteration, "request", telling)
        other = yield from self._at(at.joint, at.own[:0], 0.0, -np.inf)
        monkeypatch.setattr(JointIteration, "request", request)
        second = yield from sums(self, replace(at, sums=other.sums, boxes=other.boxes))
        heard.append((first, second))
        yield from self._at(at.joint, at.own[:0], 0.0, -np.inf)
        return first

    monkeypatch.setattr(JointIteration, "_sums", twice)


def test_two_sums_at_predictors_that_differ_at_one_entity_are_its_row(monkeypatch):
    frames, heard = study(), []
    entity = 17
    with_one_entity_moved(monkeypatch, entity, heard)
    model = model_of(frames)
    model.fit(cov_type="none")
    difference = (heard[0][1].with_columns - heard[0][0].with_columns).sum(axis=0)
    X = np.column_stack([frames[c].drop(columns="k") for c in NAMES])
    Z = (X - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_allclose(difference[1:] / difference[0], Z[entity], atol=1e-4)


def responses_of_pattern(wire, pattern, code):
    """Solve for the responses of a pattern: all released numbers of it are linear in each of them."""
    here = np.flatnonzero(code == pattern)
    requests = [(a, r) for a, r in wire.passed if (a.site, a.step) == ("Holder", "glm_evaluate")]
    rows, reported = [], []
    for request, reply in requests:
        if "sums" not in reply.arrays:
            continue
        given = request.arrays
        m = np.ascontiguousarray(given["predictor"][here] + given["center"][pattern])
        v = np.full(len(here), given["spread"][pattern])
        by_response = []
        for y in (0.0, 1.0):
            t = marginal_likelihood(LOGIT, np.full(len(here), y), m, v)
            by_response.append(np.array([t[BY_M], t[BY_V], -t[BY_MM], t[BY_V] ** 2]))
        zero, one = by_response
        rows.append(one - zero)
        reported.append(reply.arrays["sums"][pattern] - zero.sum(axis=1))
    A, b = np.vstack(rows), np.concatenate(reported)
    use = np.linalg.norm(A, axis=1) > 1e-12
    A, b = A[use] / np.linalg.norm(A[use], axis=1)[:, None], b[use] / np.linalg.norm(A[use], axis=1)
    return here, np.linalg.lstsq(A, b, rcond=1e-12)[0] > 0.5


@pytest.mark.parametrize("between", ["free", "independent"])
def test_a_coordinator_apart_solves_for_responses_of_small_patterns(between):
    """Either way: four sums a round with independent blocks, nine in fewer rounds where columns depend."""
    frames = study(missing=0.4, n=200)
    model = model_of(frames, coordinator="apart", between=between)
    with tapped(model) as wire:
        result = model.fit(cov_type="none", **({"max_moved": 1.0} if between == "free" else {}))
    code, keep = (wire.handed_to("Holder", "glm_start_response", name)[0] for name in ("code", "keep"))
    y, solved = frames["Holder"].y.to_numpy()[keep] > 0.5, 0
    for pattern in range(code.max() + 1):
        here, guess = responses_of_pattern(wire, pattern, code)
        solved += len(here) * np.array_equal(guess, y[here])
    assert solved > 80
    note = next(note for note in result.notes if "treat them as revealed" in note)
    assert int(note.split(" entities are in patterns")[0].split()[-1]) >= solved


@pytest.mark.parametrize("masked", [True, False])
def test_a_strict_site_answers_none_of_it(masked):
    model = model_of(study(missing=0.3), "strict")
    with tapped(model) as wire, pytest.raises(PolicyError, match="per_entity = 40"):
        model.fit(masked=masked)
    assert not any(a.size >= 600 and a.dtype != np.uint8 for _, r in wire.passed for a in r.arrays.values())
    assert not any(
        request.step in ("joint_score", "joint_weights", "joint_information") for request, _ in wire.passed
    )


def test_with_a_line_of_policy_the_fit_goes_through(tmp_path):
    model = model_of(study(), policy_of(tmp_path, "per_entity = 40"))
    assert model.fit(cov_type="none").nobs == 600
