"""A coordinator that has sums taken of rows of one institution with numbers of other entities at another."""

import contextlib

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import EstimationError, SecurityError
from fedstat.federation.crypto.secure_product import RowFingerprints
from fedstat.federation.protocols import running_sums
from fedstat.federation.protocols.running_sums import ColumnOpening
from fedstat.models.vfem.iteration import glm_protocol, glm_steps
from fedstat.models.vfem.iteration import glm_steps as glm_response_steps
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration

N = 200
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 2))
Y = (RNG.random(N) < 1.0 / (1.0 + np.exp(-X[:, 0]))).astype(float)
KEYS = np.arange(N)
FRAMES = {
    "Registry": pd.DataFrame({"k": KEYS, "y": Y, "r": RNG.normal(size=N)}),
    "Court": pd.DataFrame({"k": KEYS, "c0": X[:, 0], "c1": X[:, 1]}).iloc[1:],  # lacks the first entity
    "Tax": pd.DataFrame({"k": KEYS, "t": RNG.normal(size=N)}),
}
COMPLETE = KEYS[1:]


def first_sums(monkeypatch):
    """Sums that Court learns of its ones and columns, (3,), with derivatives at coefficients of zero."""
    heard = []

    def hear(*reported):
        heard.append(running_sums.open_sums(*reported))
        raise EstimationError("heard")

    monkeypatch.setattr(glm_steps, "open_sums", hear)
    partition = fs.ClientPartition.from_frames(FRAMES, on="k")
    model = fs.VFEMGLM.from_formula("y ~ .", partition, family=sm.families.Binomial())
    with contextlib.suppress(EstimationError):
        model.fit(method="cc")
    return heard[0]


def sums_of(rows, numbers, mean):
    """The same sums of Court's columns, at some entities, with numbers of others."""
    columns = (X - X[COMPLETE].mean(axis=0)) / X[COMPLETE].std(axis=0)
    return np.column_stack([np.ones(len(rows)), columns[rows]]).T @ (Y[numbers] - mean)


def tell_other_positions(monkeypatch):
    """Tell the response holder other positions than Court."""

    def shifted(site, columns, width, only, rows, rounds):
        return ColumnOpening(site, columns, width, only[:-1], rows[1:], rounds)

    monkeypatch.setattr(glm_protocol, "ColumnOpening", shifted)
    return sums_of(COMPLETE[:-1], COMPLETE[1:], Y[COMPLETE].mean())


def choose_other_entities(monkeypatch):
    """Have the response holder choose as many other entities than Court's, in their places."""
    request = QuasiNewtonIteration.request

    def telling(self, site, step, text="", **arrays):
        if step == "glm_start_response":
            arrays["keep"] = np.roll(arrays["keep"], -1)
        return request(self, site, step, text, **arrays)

    monkeypatch.setattr(QuasiNewtonIteration, "request", telling)
    return sums_of(COMPLETE, COMPLETE - 1, Y[COMPLETE - 1].mean())


def begin_anew(monkeypatch):
    """Have it choose these once the columns were taken."""
    opened = QuasiNewtonIteration._open

    def then_others(self):
        yield from opened(self)
        lay, text = self.layout, self.distribution.to_json()
        other = {"keep": np.roll(lay.response_keep, -1), "code": lay.code}
        yield [self.request(lay.active, "glm_start_response", text, **other)]

    monkeypatch.setattr(QuasiNewtonIteration, "_open", then_others)
    return sums_of(COMPLETE, COMPLETE - 1, Y[COMPLETE].mean())


def compare_nothing(monkeypatch):
    """Reset both sites to the state in which they accepted the request."""
    monkeypatch.setattr(RowFingerprints, "of_same_entities", lambda *reported: True)
    monkeypatch.setattr(
        glm_response_steps, "taken_of", lambda state, columns, site, _: state.look_at(taken(columns, site))
    )


def taken(columns, site):
    return f"taken {running_sums.name_of(columns, site)}"


def test_sums_of_a_fit_are_those_of_its_rows(monkeypatch):
    expected = sums_of(COMPLETE, COMPLETE, Y[COMPLETE].mean())
    np.testing.assert_allclose(first_sums(monkeypatch), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("attack", "refusal"),
    [
        (tell_other_positions, "Registry: the rows of this product are not of the same entities"),
        (choose_other_entities, "Registry: the rows of this product are not of the same entities"),
        (begin_anew, "Registry: the entities of this fit are others than when 'Court' opened its columns"),
    ],
)
def test_numbers_meet_no_rows_of_other_entities(attack, refusal, monkeypatch):
    expected = attack(monkeypatch)
    with pytest.raises(SecurityError, match=refusal):
        first_sums(monkeypatch)
    compare_nothing(monkeypatch)
    np.testing.assert_allclose(first_sums(monkeypatch), expected, atol=1e-6)
