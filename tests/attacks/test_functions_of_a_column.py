"""A site of few rows: its values from sums of functions of one column.

Own fits of pairs of x, x^2, x^3, sqrt(x) and log(x) reveal sixteen different exact sums over the rows of a
site, and ten whole numbers follow from these. The same sums follow from a masked sum less the same sum
without the site.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import FedstatError
from fedstat.federation.disclosure.column_sums import released_sums

pytestmark = pytest.mark.filterwarnings("ignore")

FEW = 10
FUNCTIONS = {
    "x": lambda x: x,
    "I(x**2)": lambda x: x**2,
    "I(x**3)": lambda x: x**3,
    "sqrt(x)": np.sqrt,
    "log(x)": np.log,
}
EXPONENTS = {"x": (1, 0), "I(x**2)": (2, 0), "I(x**3)": (3, 0), "sqrt(x)": (0.5, 0), "log(x)": (0, 1)}
PUBLISHED = {
    "x": {"kind": "number", "range": [18.0, 100.0], "knots": [40.0, 60.0]},
    "y": {"kind": "number", "range": [0.0, 200.0]},
    "z": {"kind": "number", "range": [0.0, 1.0], "levels": [0, 1]},
    "v": {"kind": "number", "range": [-9.0, 9.0]},
}
FAMILIES = {"y": sm.families.Gaussian(), "z": sm.families.Binomial()}


def table(few, others=3, seed=0):
    rng = np.random.default_rng(seed)
    site = np.repeat([f"S{k}" for k in range(others + 1)], [few, *[200] * others])
    n = len(site)
    x = rng.integers(20, 90, n) * 1.0
    y, z = np.round(rng.normal(100, 15, n), 1), rng.integers(0, 2, n)
    return pd.DataFrame({"site": site, "x": x, "y": y, "z": z, "v": np.round(rng.normal(size=n), 2)})


def partition(frame, policy):
    sites = frame["site"].unique()
    return fs.ClientPartition.from_frame(
        frame, by="site", policy=policy, published=dict.fromkeys(sites, PUBLISHED)
    )


def fit(where, right, response="y"):
    """A fit, None where it is refused."""
    try:
        return fs.FederatedGLM.from_formula(f"{response} ~ {right}", where, family=FAMILIES[response]).fit()
    except FedstatError:
        return None


def cross_products(covariance, n):
    """X'X of columns, the first of ones, from a covariance that is its inverse times a factor."""
    size = np.sqrt(np.diag(covariance))
    inverse = np.linalg.inv(covariance / np.outer(size, size)) / np.outer(size, size)
    return inverse * n / inverse[0, 0]


def own_sums(where, policy_n):
    """Sums of products of functions of x at S0 that own fits reveal, by their exponents."""
    found = {}
    for pair in itertools.combinations(FUNCTIONS, 2):
        result = fit(where, " + ".join(pair))
        if result is None:
            continue
        compared = result.heterogeneity
        own = compared.covariances[list(compared.sites.index).index("S0")]
        if np.isfinite(own).all():
            found |= named(cross_products(own, policy_n), pair)
    return found


def named(products, pair):
    powers = [(0, 0), *(EXPONENTS[one] for one in pair)]
    return {
        tuple(np.add(powers[i], powers[j])): products[i, j] for i in range(3) for j in range(max(i, 1), 3)
    }


def truth(x, key):
    return float((x ** key[0] * np.log(x) ** key[1]).sum())


def test_own_fits_reveal_sixteen_sums_of_a_site_without_a_minimum_and_none_with_it():
    frame = table(FEW)
    x = frame["x"].to_numpy()[:FEW]
    found = own_sums(partition(frame, fs.Policy(max_parameters=0.9)), FEW)
    assert len(found) >= 14
    for key, value in found.items():
        np.testing.assert_allclose(value, truth(x, key), rtol=1e-4)
    assert own_sums(partition(frame, "strict"), FEW) == {}


def test_sums_with_and_without_a_site_are_at_most_half_of_its_rows():
    """The part of a site in masked sums is the difference; five sums are not enough for ten values."""
    frame = table(FEW)
    x = frame["x"].to_numpy()[:FEW]
    for policy, most in ((fs.Policy.strict(max_column_sums="any"), 16), ("strict", FEW // 2)):
        with_it, without = partition(frame, policy), partition(frame[frame["site"] != "S0"], policy)
        found = {}
        for pair in itertools.combinations(FUNCTIONS, 2):
            both = [fit(where, " + ".join(pair)) for where in (with_it, without)]
            if None not in both:
                totals = [cross_products(one.cov_params().to_numpy(), one.nobs) for one in both]
                found |= named(totals[0] - totals[1], pair)
        assert found.keys() and (len(found) > 10 if most > 10 else len(found) <= most)
        for key, value in found.items():
            np.testing.assert_allclose(value, truth(x, key), rtol=1e-3)


SPLINE = "bs(x, knots=(40, 60), degree=3, lower_bound=18, upper_bound=100)"
SMALL = (FEW, 30, 59)
MODELS_OF_X = ("x", "poly(x, 3)", SPLINE, "x + v", "x*v")
PAIRS = [
    (few, right, "yz"[(i + j) % 2]) for i, few in enumerate(SMALL) for j, right in enumerate(MODELS_OF_X)
]
"""Each size with each model, and each response with each of both."""


@pytest.mark.parametrize(("few", "right", "response"), PAIRS)
def test_a_small_site_is_not_shown_whatever_the_model(few, right, response):
    result = fit(partition(table(few), "strict"), right, response)
    if result is None:
        return
    compared = result.heterogeneity
    assert compared.estimates.loc["S0"].isna().all() and np.isnan(compared.covariances[0]).all()
    assert compared.sites.loc["S0", "problem"].startswith("not shown")
    assert "S0" in str(compared.summary()) and result.nobs == few + 600


def test_own_fits_of_a_larger_site_end_at_half_of_its_rows():
    """A logistic regression has weights of its own: every model has other sums of x and x^2."""
    few = 70
    where = partition(table(few), "strict")
    links = (sm.families.links.Logit(), sm.families.links.Probit(), sm.families.links.CLogLog())
    terms = ("v", "I(v**2)", "I(v**3)", "log(x)", "sqrt(x)")
    shown = []
    for link, term in itertools.product(links, terms):
        model = fs.FederatedGLM.from_formula(f"z ~ x + {term}", where, family=sm.families.Binomial(link))
        shown.append(model.fit().heterogeneity.estimates.loc["S0"].notna().all())
    sums = released_sums(where.sites["S0"].site_ledger, ["x"])["x"]
    assert shown[0] and not shown[-1]
    assert few // 2 - 5 < len(sums) <= few // 2


def test_sums_count_over_partitions_of_the_same_site():
    """Another session of the same site goes on from what was released."""
    where = partition(table(FEW), "strict")
    assert fit(where, "x + log(x)") is not None
    assert fit(where, "x + sqrt(x)") is None
    assert fit(where, "x + log(x)") is not None


# ---- the same in a level of few rows ----------------------------------------------------------------


def with_level(few, inside=1.0):
    """A site in which few rows have another value of a column; the other sites have many of both."""
    rng = np.random.default_rng(few)
    level = np.full(600, 1.0 - inside)
    level[rng.choice(200, few, replace=False)] = inside
    level[200:] = np.arange(400) % 2
    frame = pd.DataFrame({"site": np.repeat(["S0", "S1", "S2"], 200), "z": level})
    frame["x"], frame["y"] = rng.integers(20, 90, 600) * 1.0, rng.integers(60, 200, 600) * 1.0
    return frame.assign(v=rng.normal(size=600).round(2))


def answered(where, *formulas, model=fs.FederatedOLS, **options):
    try:
        for formula in formulas:
            model.from_formula(formula, where, **options).fit()
    except FedstatError:
        reasons = where.sites["S0"].refusals.reasons
        assert "maximum sums of one column" in reasons[-1] and "'x'" in reasons[-1], reasons[-1]
        return False
    return True


CELLS = {
    "two functions": (("y ~ z + z:x + z:sqrt(x)",), 4),
    "two fits": (("y ~ z + z:x", "y ~ z + z:sqrt(x)"), 3),
    "the rows of the other level": (("y ~ x + sqrt(x)", "y ~ z + z:x + z:sqrt(x)"), 4),
    "a level": (("y ~ C(z) + C(z):x + C(z):log(x)",), 5),
}


@pytest.mark.parametrize("case", CELLS)
def test_sums_over_the_rows_of_a_level_are_at_most_half_of_these_rows(case):
    """The counts are those of x, sqrt(x) and their products over the level; x is the square of sqrt(x)."""
    formulas, sums = CELLS[case]
    inside = 0.0 if case == "the rows of the other level" else 1.0
    for few in (2 * sums - 1, 2 * sums):
        assert answered(partition(with_level(few, inside), "strict"), *formulas) is (few >= 2 * sums), few


@pytest.mark.parametrize("name", ["GLORE", "FederatedGEE", "FederatedMixed", "FederatedOrdinal"])
def test_all_families_count_sums_over_a_level(name):
    frame = with_level(7).assign(w=lambda t: (t["y"] > 130) * 1, person=np.arange(600) // 3)
    published = PUBLISHED | {"w": PUBLISHED["z"], "person": {"kind": "group"}}
    rule = {"published": dict.fromkeys(frame["site"].unique(), published)}
    where = fs.ClientPartition.from_frame(frame, by="site", policy="strict", **rule)
    options = {"groups": "person"} if name == "FederatedGEE" else {}
    right = "z + z:x + z:sqrt(x)" + (" + (1 | person)" if name == "FederatedMixed" else "")
    assert not answered(where, f"w ~ {right}", model=getattr(fs, name), **options)


def test_a_level_is_answered_again_and_adds_nothing():
    where = partition(with_level(10), "strict")
    assert answered(where, "y ~ z + z:x + z:sqrt(x)") and answered(where, "y ~ z + z:x + z:sqrt(x)")
    assert not answered(where, "y ~ z + z:x + z:log(x)")
    assert answered(where, "y ~ z + z:x", "y ~ x + v")
