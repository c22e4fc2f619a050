"""Columns of which one row is nearly all: their products with others' columns are that row's values.

The coordinator knows no row. It asks for a column h at one institution; of its standardised values one is
n / sqrt(n - 1) further out than all the others, which are about the same. So the sum of products of h and of
another institution's standardised column is n / sqrt(n - 1) times the value of that column in that row.
"""

import warnings
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.rounds.products import Run

N = 400
MODELS = {"VFEM": fs.VFEMRegression, "VerticalGLM": fs.VerticalGLM}
GUISES = ["scale(x)"]
for _ in range(24):
    GUISES.append(f"center({GUISES[-1]})")
POWERS = ":".join(GUISES)
"""The 25th power of a standardised column, of which no factor holds arithmetic."""


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def study():
    """Three institutions; the registry's x is an ordinary column, largest in row 17."""
    rng = np.random.default_rng(3)
    k = np.arange(N)
    x = np.append(rng.normal(50, 9, N - 1).round(1), 90.0)[np.r_[:17, -1, 17 : N - 1]]
    more = {f"x{j}": rng.normal(50, 9, N).round(1) for j in range(8)}
    return {
        "Bank": pd.DataFrame({"k": k, "y": rng.normal(size=N), "w": rng.normal(size=N)}),
        "Registry": pd.DataFrame({"k": k, "x": x, "sex": k % 2, **more}),
        "Court": pd.DataFrame({"k": k, "z": rng.normal(100, 15, N).round(1)}),
    }


@contextmanager
def products():
    """All products of two institutions' columns that the coordinator puts together, (p, q) by pair."""
    found, combine = {}, Run.combine

    def listen(run, *both):
        one = combine(run, *both)
        found[one.a.site, one.b.site] = one.products.sum(axis=0)
        return one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "combine", listen)
        yield found


def error(model, term, policy, row=17):
    """Error of the attack on the court's z in that row, in standard deviations of z."""
    frames = study()
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    with products() as found:
        MODELS[model].from_formula(f"y ~ {term} + z + w", partition).fit()
    z = frames["Court"].z
    return abs(found["Registry", "Court"][0, 0] / (N / np.sqrt(N - 1)) - (z[row] - z.mean()) / z.std(ddof=0))


@pytest.mark.parametrize("model", MODELS)
def test_powers_of_a_column_in_many_guises_are_not_asked_for(model):
    for policy in (Policy.open(), Policy.strict(formulas="any")):
        assert error(model, POWERS, policy) < 0.05
    with pytest.raises(DescriptionError, match="a term holds a column once, and 'x' stands in several"):
        error(model, POWERS, Policy.strict())


def test_products_of_many_numbers_are_not_asked_for():
    columns = ":".join(f"x{j}" for j in range(4))
    with pytest.raises(DescriptionError, match="multiplies 3 numbers at most"):
        error("VFEM", columns, Policy.strict())
    error("VFEM", "x0:x1:x2:C(sex)", Policy.strict())
