"""Values of single persons from sums of products of two columns, each of which many rows have.

Person 17 of site S0 is the only one there with a = 1 and b = 1. The sum of the products of a, b and another
column is that person's value. Each attack reads its income from public results where nothing is
protected; under the strict policy one of its fits is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from released import miss, own_sums, scaled_inverse, total_sums

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.typing import Array

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, VICTIM, SITES = 120, 17, ("S0", "S1", "S2")
GAUSSIAN = {"family": sm.families.Gaussian()}
NUMBER = {"kind": "number"}
LEVELS = {"kind": "category", "levels": ["no", "yes"]}
PUBLISHED = {
    "income": NUMBER | {"range": [0.5, 9.0]},
    "y": NUMBER | {"range": [0.0, 200.0]},
    "ill": NUMBER | {"range": [0, 1], "levels": [0, 1]},
    "visits": NUMBER | {"range": [0, 50]},
    "x": NUMBER | {"range": [-9.0, 9.0]},
    "u": LEVELS,
    "v": LEVELS,
} | {name: NUMBER | {"range": [0.0, 2.0]} for name in ("a", "b", "c", "e", "g", "a2", "b2")}


def table() -> pd.DataFrame:
    """Indicators a and b, also as ones and twos and as words; c, which most with a have, and the victim."""
    rng = np.random.default_rng(3)
    n = ROWS * len(SITES)
    a, b = np.zeros(n), np.zeros(n)
    for start in range(0, n, ROWS):
        rows = start + rng.permutation([k for k in range(ROWS) if start + k != VICTIM])
        a[rows[:14]] = 1.0
        b[rows[14:30]] = 1.0
        if start:  # elsewhere many have both
            b[rows[:8]] = 1.0
    a[VICTIM] = b[VICTIM] = 1.0
    c = np.maximum(rng.random(n) < 0.3, a * (np.arange(n) % 3 > 0))
    c[VICTIM] = 1.0
    words = np.array(["no", "yes"])
    return pd.DataFrame(
        {
            "site": np.repeat(SITES, ROWS),
            "a": a,
            "b": b,
            "c": c,
            # g: not a. e: b, without the rows of other sites that also have a.
            "g": 1.0 - a,
            "e": np.where(np.arange(n) < ROWS, b, b * (1.0 - a)),
            "a2": a + 1.0,
            "b2": b + 1.0,
            "u": words[a.astype(int)],
            "v": words[b.astype(int)],
            "x": rng.normal(size=n).round(2),
            "y": rng.normal(100, 15, n).round(1),
            "income": rng.uniform(1.0, 8.0, n).round(3),
            "ill": (rng.random(n) < 0.45).astype(float),
            "visits": rng.poisson(2.0, n).astype(float),
        }
    )


FRAME = table()
TRUTH = FRAME.income[VICTIM]


def partition(policy: str) -> fs.ClientPartition:
    return fs.ClientPartition.from_frame(
        FRAME, by="site", policy=policy, published=dict.fromkeys(SITES, PUBLISHED)
    )


def least_squares(formula: str, at: fs.ClientPartition, **options) -> tuple[pd.DataFrame, pd.Series]:
    """X'X and X'y of site S0, from its own fit."""
    return own_sums(fs.FederatedOLS.from_formula(formula, at).fit(**options))["S0"]


def entry(formula: str, row: int, column: int) -> Callable[[fs.ClientPartition], float]:
    return lambda at: least_squares(formula, at)[0].iloc[row, column]


def residual(cov_type: str, power: int) -> Callable[[fs.ClientPartition], float]:
    """The response up to the sign of its residual: the robust covariance has squared residuals as weights."""

    def attack(at: fs.ClientPartition) -> float:
        fit, robust = (
            fs.FederatedOLS.from_formula("income ~ a + e", at).fit(local=False, **options)
            for options in ({}, {"cov_type": cov_type})
        )
        gram = total_sums(fit)[0].to_numpy()
        meat = gram @ robust.cov_params().to_numpy() @ gram
        leverage = np.ones(3) @ np.linalg.inv(gram) @ np.ones(3)
        factor = len(FRAME) / (len(FRAME) - 3) if cov_type == "HC1" else 1.0
        size = np.sqrt(meat[1, 2] / factor) * (1.0 - leverage) ** (power / 2.0)
        mean = fit.params.sum()
        return min((mean - size, mean + size), key=lambda value: abs(value - TRUTH))

    return attack


def by_working_weights(formula: str, family) -> Callable[[fs.ClientPartition], float]:
    """The information of a site's own fit: the person's value times a known function of it."""

    def attack(at: fs.ClientPartition) -> float:
        result = fs.FederatedGLM.from_formula(formula, at, family=family).fit()
        k = [*result.heterogeneity.estimates.index].index("S0")
        cell = scaled_inverse(np.asarray(result.heterogeneity.covariances[k]))[1, 2]
        own = result.heterogeneity.estimates.loc["S0"]
        z = np.arange(1_000_000, 8_000_000) / 1e6
        mean = family.link.inverse(own["Intercept"] + own["a:income"] * z + own["b"])
        weight = mean * (1.0 - mean) if isinstance(family, sm.families.Binomial) else mean
        fits = weight * z - cell
        roots = z[:-1][np.diff(np.sign(fits)) != 0]
        return min(roots, key=lambda value: abs(value - TRUTH))

    return attack


def boosted(at: fs.ClientPartition) -> float:
    """Products of learners' columns over all sites, from which a boosting fit starts."""
    fit = fs.FedFunctionBoost.from_formula("y ~ a:income + e", at).fit(steps=1)
    # Each learner has a column of ones before its own.
    return float(fit._record.boosting.moments.total.S[2, 4])


def by_weights(**roles) -> Callable[[fs.ClientPartition], float]:
    """Weights are a column as well: X'WX has the sum of incomes over the cell."""

    def attack(at: fs.ClientPartition) -> float:
        made = fs.FederatedGLM.from_formula("x ~ a + b", at, **GAUSSIAN, **roles)
        result = made.fit()
        k = [*result.heterogeneity.estimates.index].index("S0")
        gram = scaled_inverse(np.asarray(result.heterogeneity.covariances[k]))
        total = FRAME.query("site == 'S0'").income.sum()
        return gram[1, 2] * total / gram[0, 0]

    return attack


def shifted(at: fs.ClientPartition) -> float:
    """Columns of ones and twos: all sums but that over the cell are in the same two fits."""
    product, plain = least_squares("y ~ a2:income + b2", at)[0], least_squares("y ~ income + a2 + b2", at)[0]
    sums = plain.loc["income"]
    cell = product.iloc[1, 2] if product.index[1] != "b2" else product.iloc[2, 1]
    # sum (1 + a)(1 + b) z = sum z + sum a z + sum b z + sum a b z
    return cell + sums["Intercept"] - sums["a2"] - sums["b2"]


def complement(at: fs.ClientPartition) -> float:
    """The victim alone has b without not-a: the sum over b less that over b and not a."""
    every = least_squares("y ~ income + b", at)[0].loc["income", "b"]
    return every - least_squares("y ~ g:income + b", at)[0].iloc[2, 1]


def coded(formula: str) -> Callable[[fs.ClientPartition], float]:
    """Columns that are zero nowhere: with sums over all rows, a and b, their product has the cell's sum."""

    def attack(at: fs.ClientPartition) -> float:
        gram = least_squares(formula, at)[0]
        plain = least_squares("y ~ income + a + b", at)[0].loc["income"]
        product = next(name for name in gram.index if "(" in name and "income" in name)
        other = next(name for name in gram.index if "(" in name and "income" not in name)
        (p, q), (r, s) = (code(formula, name) for name in ("a", "b"))
        # A coded column is p + q a, by public means and deviations; the same of b.
        cell = gram.loc[product, other] - p * r * plain["Intercept"] - q * r * plain["a"] - p * s * plain["b"]
        return cell / (q * s)

    return attack


def code(formula: str, name: str) -> tuple[float, float]:
    if "Sum" in formula:
        return 1.0, -2.0
    spread = FRAME[name].std() if "scale" in formula else 1.0
    return -FRAME[name].mean() / spread, 1.0 / spread


ATTACKS: dict[str, Callable[[fs.ClientPartition], Array | float]] = {
    "least squares": entry("y ~ a:income + b", 2, 1),
    "with other terms": entry("y ~ b + x + a:income", 1, 3),
    "words": entry("y ~ v + u:income", 1, 3),
    "a root": lambda at: least_squares("y ~ a:sqrt(income) + b", at)[0].iloc[1, 2] ** 2,
    "weights": by_weights(var_weights="income"),
    "a product of three": entry("y ~ a:c:income + b", 2, 1),
    "HC0": residual("HC0", 0),
    "HC1": residual("HC1", 0),
    "HC2": residual("HC2", 1),
    "HC3": residual("HC3", 2),
    "GLORE": by_working_weights("ill ~ a:income + b", sm.families.Binomial()),
    "Poisson": by_working_weights("visits ~ a:income + b", sm.families.Poisson()),
    "boosting": boosted,
    "the rest of a column": complement,
    "ones and twos": shifted,
}
ATTACKS |= {
    "contrasts": coded("y ~ income + C(u, Sum):income + C(v, Sum)"),
    "centered": coded("y ~ center(a):income + center(b)"),
    "scaled": coded("y ~ scale(a):income + scale(b)"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_cell_of_one_person_is_not_read(name):
    assert miss(ATTACKS[name](partition("open")), TRUTH, FRAME.income) < 1e-6
    with pytest.raises(PolicyError):
        ATTACKS[name](partition("strict"))


@pytest.mark.parametrize("formulas", [("y ~ I(income*x)", "y ~ x + near"), ("y ~ I(income*x) + x + near",)])
def test_a_product_is_compared_with_those_of_columns_that_come_later(formulas):
    """Sums of income * x and of near * x, in this order, differ by the one row in which near is apart."""
    frame = FRAME.assign(near=FRAME.income.where(FRAME.index != VICTIM, 2.0))

    def attack(policy):
        at = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
        fits = [fs.FederatedOLS.from_formula(one, at).fit(local=False) for one in formulas]
        first, last = (total_sums(fit)[0] for fit in (fits[0], fits[-1]))
        apart = first.loc["I(income * x)", "Intercept"] - last.loc["near", "x"]
        return 2.0 + apart / frame.x[VICTIM]

    assert miss(attack("open"), TRUTH, FRAME.income) < 1e-6
    with pytest.raises(PolicyError):
        attack("strict")


def test_products_of_columns_that_come_later_are_released_where_three_rows_are_apart():
    frame = FRAME.assign(near=FRAME.income.where(FRAME.index % ROWS > 2, 2.0))
    at = fs.ClientPartition.from_frame(frame, by="site", policy="strict")
    for formula in ("y ~ I(income*x)", "y ~ x + near", "y ~ I(income*x) + x", "y ~ income + x"):
        assert fs.FederatedOLS.from_formula(formula, at).fit(local=False).params.notna().all()


ZEROS = np.where(np.arange(len(FRAME)) % 7 < 2, 0.0, FRAME.income.to_numpy()[::-1] ** 2)
"""An amount that many people have not."""


@pytest.mark.parametrize(
    "formulas", [("total", "x + income"), ("x", "income", "total"), ("income + x", "total")]
)
@pytest.mark.parametrize("part", ["x", "zeros"])
def test_a_total_is_compared_with_its_parts(part, formulas):
    """Sums of a total and of its parts differ by the one row in which it is another number."""
    frame = FRAME.assign(zeros=ZEROS)
    frame["total"] = (frame.income + frame[part]).where(FRAME.index != VICTIM, 2.0)

    def attack(policy):
        at = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
        sums = {}
        for terms in formulas:
            fit = fs.FederatedOLS.from_formula(f"y ~ {terms.replace('x', part)}", at).fit(local=False)
            sums |= total_sums(fit)[0]["Intercept"].to_dict()
        return 2.0 + sums["income"] + sums[part] - sums["total"] - frame[part][VICTIM]

    assert miss(attack("open"), TRUTH, FRAME.income) < 1e-6
    with pytest.raises(PolicyError):
        attack("strict")


@pytest.mark.parametrize("apart", [0, 3])
def test_totals_of_all_rows_or_of_all_but_three_are_released(apart):
    frame = FRAME.assign(zeros=ZEROS)
    frame["total"] = (frame.income + frame.zeros).where(FRAME.index % ROWS >= apart, 2.0)
    at = fs.ClientPartition.from_frame(frame, by="site", policy="strict")
    for terms in ("income + zeros", "total", "total + x", "income + zeros"):
        assert fs.FederatedOLS.from_formula(f"y ~ {terms}", at).fit(local=False).params.notna().all()


def test_products_with_a_total_are_compared_with_products_of_its_parts():
    """The total of all rows is known; of a part, another column differs in one row."""
    more = pd.Series(FRAME.income.to_numpy()[::-1] ** 2)
    near = more.where(FRAME.index != VICTIM, 2.0)
    frame = FRAME.assign(total=FRAME.income + more, more=more, near=near)

    def attack(policy):
        at = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
        sums = {}
        for terms in ("total + income", "more", "income:near"):
            fit = fs.FederatedOLS.from_formula(f"y ~ {terms}", at).fit(local=False)
            gram = total_sums(fit)[0]
            sums |= gram["income" if "income" in gram else "Intercept"].to_dict()
        return sums["total"] - sums["income"] - sums["income:near"]

    assert attack("open") == pytest.approx(TRUTH * (more - near)[VICTIM], rel=1e-6)
    with pytest.raises(PolicyError):
        attack("strict")


def test_products_that_many_rows_share_are_released():
    gram, _ = least_squares("y ~ c:income + x", partition("strict"))
    assert np.isfinite(gram).all(axis=None)
