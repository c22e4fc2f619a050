"""Columns of which one row is nearly all: their products with others' columns are that row's values.

The coordinator knows no row. It asks for a column h at one institution; of its standardized values one is
n / sqrt(n - 1) further out than all the others, which are about the same. So the sum of products of h and of
another institution's standardized column is n / sqrt(n - 1) times the value of that column in that row.
"""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused_for
from wiretap import tapped

import fedstat as fs
from fedstat.errors import DescriptionError
from fedstat.federation.disclosure import leverage
from fedstat.federation.disclosure.leverage import largest_shares, max_row_share
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import pack_request
from fedstat.federation.protocols.secure_products import ProductRun

pytestmark = pytest.mark.filterwarnings("ignore")

N = 400
SHARED = Policy.strict(products="any")
"""Without the count of rows of a product, which would refuse before the rules that are tested here."""
MODELS = {"VFEM": fs.VFEMRegression, "VerticalGLM": fs.VerticalGLM}
GUISES = ["scale(x)"]
for _ in range(24):
    GUISES.append(f"center({GUISES[-1]})")
POWERS = ":".join(GUISES)
"""The 25th power of a standardized column, where floating-point arithmetic loses single rows."""


def study():
    """Three institutions; the registry's x is an ordinary column, largest in row 17."""
    rng = np.random.default_rng(3)
    k = np.arange(N)
    x = np.append(rng.normal(50, 9, N - 1).round(1), 90.0)[np.r_[:17, -1, 17 : N - 1]]
    more = {"heavy": rng.normal(size=N) + 1e3 * (k == 17), "flag": (k == 17) * 1.0}
    more |= {f"x{j}": rng.normal(50, 9, N).round(1) for j in range(8)}
    return {
        "Bank": pd.DataFrame({"k": k, "y": rng.normal(size=N), "w": rng.normal(size=N), "v": x}),
        "Registry": pd.DataFrame({"k": k, "x": x, "sex": k % 2, **more}),
        "Court": pd.DataFrame({"k": k, "z": rng.normal(100, 15, N).round(1)}),
    }


@contextmanager
def products():
    """All products of two institutions' columns that the coordinator puts together, (p, q) by pair."""
    found, combine = {}, ProductRun.combine

    def listen(run, *both):
        one = combine(run, *both)
        found[one.a.site, one.b.site] = one.products.sum(axis=0)
        return one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProductRun, "combine", listen)
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
def test_powers_of_a_column_in_many_guises_are_not_requested(model):
    for policy in (Policy.open(), replace(SHARED, formulas="any", max_share=1.0)):
        assert error(model, POWERS, policy) < 0.05
    with pytest.raises(DescriptionError, match="a term can have a column once, and 'x' is in several"):
        error(model, POWERS, Policy.strict())


def test_products_of_many_numbers_are_not_requested():
    columns = ":".join(f"x{j}" for j in range(4))
    with pytest.raises(DescriptionError, match="multiplies at most 3 numbers"):
        error("VFEM", columns, Policy.strict())
    error("VFEM", "x0:x1:x2:C(sex)", Policy.strict())


OPEN_BUT_STRICT = {
    "a function of a wide range": "exp(x)",
    "a column as it stands": "heavy",
    "an indicator of one": "flag",
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", OPEN_BUT_STRICT)
def test_no_sum_leaves_of_a_column_of_which_one_row_is_nearly_all(model, case):
    term = OPEN_BUT_STRICT[case]
    for policy in (Policy.open(), replace(SHARED, max_share=1.0)):
        assert error(model, term, policy) < 0.2
    with refused_for("largest share", site="Registry"):
        error(model, term, SHARED)


@pytest.mark.parametrize("model", MODELS)
def test_nor_of_such_a_response(model):
    frames = study()
    partition = fs.ClientPartition.from_frames(frames, on="k", policy="strict")
    with refused_for("largest share", site="Bank"):
        MODELS[model].from_formula("exp(v) ~ x + z + w", partition).fit()


def in_a_pattern(policy):
    """Error at the one entity of a released pattern that has an indicator which many others have."""
    frames = study()
    has = np.r_[np.arange(250), 300:N]  # of 300 to 399, who lack the court's record but for z2
    frames["Registry"] = frames["Registry"].assign(
        often=np.where(frames["Registry"].k < 250, frames["Registry"].k % 3 == 0, frames["Registry"].k == 321)
        * 1.0
    )
    frames["Other"] = frames["Court"].rename(columns={"z": "z2"}).iloc[has]
    frames["Court"] = frames["Court"].iloc[:300]
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    # Two institutions have one column: no law of all columns is determined by it.
    model = fs.VFEMRegression.from_formula("y ~ often + z + z2 + w", partition, between="independent")
    moments = model.fit().exchange.moments
    names = ["1", *moments.names, "y"]
    has_court, has_other = (moments.patterns[:, moments.sites.index(c)] for c in ("Court", "Other"))
    (g,) = np.flatnonzero(~has_court & has_other)
    G, at = moments.grams[g], [names.index("often"), names.index("z2")]
    b, z = at
    # The indicator less its least value, whose sum is known: it is zero but for one.
    low = -moments.center[b - 1] / moments.scale[b - 1]
    one = (G[b, z] - low * G[0, z]) * moments.scale[b - 1]
    z2 = frames["Other"].z2
    return abs(one - (z2[321] - moments.center[z - 1]) / moments.scale[z - 1])


def test_a_row_is_not_all_of_a_column_in_a_released_pattern():
    for policy in (Policy.open(), replace(SHARED, max_share=1.0)):
        assert in_a_pattern(policy) < 0.2
    with refused_for("largest share", site="Registry"):
        in_a_pattern(SHARED)


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_their_definition(seed):
    """Leverages are the diagonal of the hat matrix of columns and a constant."""
    rng = np.random.default_rng(seed)
    X = 100.0 + rng.standard_t(2, size=(40, 3)) @ rng.normal(size=(3, 3))
    W = np.column_stack([np.ones(40), X - 100.0])
    hat = W @ np.linalg.inv(W.T @ W) @ W.T
    D = X - X.mean(axis=0)
    share, leverage = largest_shares(np.column_stack([X, np.ones(40), X[:, 0]]))
    of_others = 40 / 39
    assert leverage == pytest.approx(of_others * (hat.diagonal().max() - 1 / 40), rel=1e-8)
    assert share == pytest.approx(of_others * (D**2 / (D**2).sum(axis=0)).max(), rel=1e-10)


def test_a_row_of_a_small_group_may_be_what_chance_makes_it():
    """One in ten thousand groups of normal rows has a larger share; one in two thousand by simulation."""
    rng = np.random.default_rng(2)
    for n, p in ((6, 1), (8, 3), (14, 2)):
        most = [largest_shares(rng.normal(size=(n, p)))[1] for _ in range(4000)]
        assert np.mean(np.array(most) > max_row_share(n, p)) <= 5e-4
        assert np.quantile(most, 0.99) < max_row_share(n, p) < 1.0
    assert max_row_share(30, 1) == max_row_share(500, 9) == 0.75


def test_a_group_that_was_refused_is_not_taken_for_one_that_was_judged():
    frames = study()
    partition = fs.ClientPartition.from_frames(frames, on="k", policy="strict")
    fit = fs.VFEMRegression.from_formula("y ~ x0 + z + w", partition)
    site = partition.sites["Registry"]
    judged = leverage.largest_shares
    with tapped(fit) as wire:
        fit.fit()
    requests = [
        request for request, _ in wire.passed if request.site == "Registry" and request.family == "vfem"
    ]
    at = next(j for j, request in enumerate(requests) if request.step == "sum_products")
    for request in requests[:at]:
        site.answer(pack_request(replace(request, turn=None)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leverage, "largest_shares", lambda X: (1.0, *judged(X)[1:]))
        for _ in range(2):
            with refused_for("largest share"):
                site.answer(pack_request(replace(requests[at], turn=None)))
    site.answer(pack_request(replace(requests[at], turn=None)))


def test_a_combination_of_columns_is_not_that_of_one_row():
    rng = np.random.default_rng(1)
    frames = study()
    r = frames["Registry"]
    frames["Registry"] = r.assign(x1=r.x0 + 0.05 * rng.normal(size=N) + 9.0 * (r.k == 17))
    fit = lambda policy: fs.VFEMRegression.from_formula(  # noqa: E731
        "y ~ x0 + x1 + z + w", fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    ).fit()
    fit("open")
    with refused_for("largest share"):
        fit("strict")


# -- institutions with rows of one table ---------------------------------------------------------------


def one_large_row(policy):
    """Response of the row with the largest x, from the coefficients of a column that the row nearly is."""
    rng = np.random.default_rng(4)
    x = np.append(rng.normal(5, 1, 3 * N - 1), 11.0)
    table = pd.DataFrame({"site": np.repeat(["S0", "S1", "S2"], N), "x": x, "y": rng.normal(size=3 * N)})
    partition = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    made = fs.FederatedGLM.from_formula("y ~ exp(x)", partition, family=sm.families.Gaussian())
    return made.fit().params @ [1.0, np.exp(11.0)], table["y"].iloc[-1]


def test_a_row_is_not_all_of_a_column_of_a_site():
    found, truth = one_large_row("open")
    assert abs(found - truth) < 0.3
    with refused_for("largest share", site="S2"):
        one_large_row("strict")
    found, truth = one_large_row(Policy.strict(max_share=1.0, formulas="any"))
    assert abs(found - truth) < 0.3
