"""Values of one person from products of two columns that this person shares alone, and from two designs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused_for

import fedstat as fs
from fedstat.errors import PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")
N = 900
SITES = ("S0", "S1", "S2")
RULE = "rows behind a product"


def table(shared=1):
    """People of three sites; only `shared` people of the first site have both a and b."""
    random = np.random.default_rng(5)
    k = np.arange(N)
    a, b = (k % 9 == 0) * 1.0, (k % 9 == 1) * 1.0
    b[np.flatnonzero(a)[:shared]] = 1.0
    frame = pd.DataFrame({"site": np.repeat(SITES, N // 3), "a": a, "b": b})
    frame["age"] = random.integers(20, 90, N) * 1.0
    frame["income"] = np.round(random.lognormal(10.0, 0.6, N), 2)
    frame["w"] = random.integers(1, 6, N) * 1.0
    frame["y"] = (random.random(N) < 0.4) * 1.0
    # Codings of the same levels without zeros.
    frame["a12"], frame["b12"] = 1.0 + a, 1.0 + b
    frame["g"], frame["h"] = np.where(a, "yes", "no"), np.where(b, "yes", "no")
    # Groups that differ for one person of the first site.
    frame["nearly"] = a
    frame.loc[np.flatnonzero(a)[0], "nearly"] = 0.0
    frame["dose"] = np.where(a, np.round(random.uniform(1, 9, N), 2), 0.0)
    frame["income2"] = frame["income"]
    frame.loc[7, "income2"] = 1234.5
    frame["visits"] = random.poisson(3.0, N) * 1.0
    return frame


FRAME = table()
VICTIM = FRAME[(FRAME["a"] == 1.0) & (FRAME["b"] == 1.0)].iloc[0]
POLICIES = {
    "open": fs.Policy.open(),
    "without": fs.Policy.strict(products="any"),
    "strict": fs.Policy.strict(),
}


def rows(policy="strict", frame=FRAME):
    return fs.ClientPartition.from_frame(frame, by="site", policy=POLICIES.get(policy, policy))


def products(partition, formula, **settings):
    """Sums of products of the design's columns over all sites, from the public result."""
    result = fs.FederatedOLS.from_formula(formula, partition).fit(**settings)
    gram = result.scale * np.linalg.inv(np.asarray(result.cov_params()))
    return pd.DataFrame(gram, index=result.params.index, columns=result.params.index), result


@pytest.mark.parametrize("policy", ["open", "without"])
def test_the_product_of_two_columns_was_the_value_of_their_only_person(policy):
    gram, _ = products(rows(policy), "y ~ a:income + b")
    assert gram.loc["a:income", "b"] == pytest.approx(VICTIM["income"], rel=1e-6)


@pytest.mark.parametrize(
    "formula",
    [
        "income ~ a + b",
        "y ~ a:income + b",
        "y ~ a:income + b:age",
        "income ~ a:b",
        "income ~ a:b:age",
        "age ~ a + b + a:b",
        "y ~ a12:income + b12",
        "y ~ center(a):income + center(b)",
        "y ~ scale(a):income + scale(b)",
        "y ~ C(g):income + h",
        "y ~ C(g, Sum):income + C(h, Sum)",
        "y ~ C(a):income + C(b)",
        "y ~ dose + b",
        "b ~ dose",
        "b ~ a + income",
        "y ~ poly(a, 1):income + b",
    ],
)
def test_no_fit_sums_over_the_only_person_of_a_cell(formula):
    with pytest.raises(PolicyError):
        fs.FederatedOLS.from_formula(formula, rows()).fit()


@pytest.mark.parametrize(("shared", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_cell_of_no_person_or_of_enough_is_summed(shared, refused):
    partition = rows(frame=table(shared))
    if refused:
        with refused_for(RULE):
            fs.FederatedOLS.from_formula("y ~ a:income + b", partition).fit()
    else:
        assert fs.FederatedOLS.from_formula("y ~ a:income + b", partition).fit().converged


MODELS = {
    "logistic": lambda p: fs.GLORE.from_formula("y ~ a + b + age", p).fit(),
    "Poisson": lambda p: fs.FederatedGLM.from_formula(
        "visits ~ a + b", p, family=sm.families.Poisson()
    ).fit(),
    "averaging": lambda p: fs.FedAvg.from_formula("y ~ a + b", p, family=sm.families.Binomial()).fit(
        rounds=3, batch_size=None, standardize=True
    ),
    "boosting": lambda p: fs.FedFunctionBoost.from_formula("income ~ a + b", p).fit(steps=3),
    "frequency weights": lambda p: fs.FederatedGLM.from_formula(
        "age ~ a + b", p, family=sm.families.Gaussian(), freq_weights="w"
    ).fit(),
    "weights of the victim": lambda p: fs.FederatedGLM.from_formula(
        "age ~ a + b", p, family=sm.families.Gaussian(), var_weights="income"
    ).fit(),
    "offset": lambda p: fs.FederatedGLM.from_formula(
        "age ~ a + b + offset(income)", p, family=sm.families.Gaussian()
    ).fit(),
    "weights as an indicator": lambda p: fs.FederatedGLM.from_formula(
        "age ~ a", p, family=sm.families.Gaussian(), var_weights="b12"
    ).fit(),
    "offset as an indicator": lambda p: fs.FederatedGLM.from_formula(
        "age ~ a + offset(b)", p, family=sm.families.Gaussian()
    ).fit(),
}


@pytest.mark.parametrize("model", MODELS)
def test_nor_does_any_other_model(model):
    with pytest.raises(PolicyError):
        MODELS[model](rows())


@pytest.mark.parametrize("cov_type", ["HC0", "HC1", "HC2", "HC3"])
def test_no_robust_covariance_holds_the_residual_of_one_person(cov_type):
    """If everybody with b has a except one person, columns are released and squared residuals are not."""
    frame = table(shared=0).assign(b=lambda f: np.where(f["a"] == 1.0, 1.0, f["b"]))
    frame.loc[np.flatnonzero(frame["a"])[0], "b"] = 0.0
    partition = rows(fs.Policy.strict(reasons="sent"), frame)
    with pytest.raises(PolicyError, match=RULE):
        fs.FederatedOLS.from_formula("income ~ a + b", partition).fit(cov_type=cov_type)


# ---- two designs ---------------------------------------------------------------------------------------

PAIRS = [
    ("income ~ a", "income ~ nearly"),
    ("income ~ a", "income ~ a:nearly"),
    ("income ~ nearly", "age ~ a:income"),
    ("age ~ a:income", "age ~ nearly:income"),
    ("income ~ a", "income ~ C(nearly)"),
    ("income ~ a12", "income ~ nearly"),
    ("income ~ center(a)", "income ~ scale(nearly)"),
    ("age ~ income", "age ~ income2"),
    ("income ~ age", "income2 ~ age"),
    ("y ~ dose", "y ~ nearly:dose"),
    ("a ~ income", "nearly ~ income"),
    ("income ~ g", "income ~ nearly"),
]


def fitted(partition, formula, kind=fs.FederatedOLS):
    return kind.from_formula(formula, partition).fit()


@pytest.mark.parametrize("pair", PAIRS)
def test_columns_of_two_fits_differ_for_no_single_person(pair):
    for first, second in (pair, pair[::-1]):
        partition = rows()
        fitted(partition, first)
        with refused_for(RULE, "differencing"):
            fitted(partition, second)
    gap = rows("without")
    for formula in pair:
        fitted(gap, formula)


def test_two_fits_read_the_income_of_one_person_without_the_rule():
    sums = []
    for name in ("a", "nearly"):
        gram, result = products(rows("without"), f"income ~ {name}")
        sums.append((gram.to_numpy() @ result.params.to_numpy())[1])
    person = FRAME[(FRAME["a"] == 1.0) & (FRAME["nearly"] == 0.0)].iloc[0]
    assert sums[0] - sums[1] == pytest.approx(person["income"], rel=1e-4)


FAMILIES = {
    "least squares": lambda p, text: fs.FederatedOLS.from_formula(text, p).fit(),
    "logistic": lambda p, text: fs.GLORE.from_formula(text, p).fit(),
    "averaging": lambda p, text: fs.FedAvg.from_formula(text, p, family=sm.families.Binomial()).fit(
        rounds=3, batch_size=None, standardize=True
    ),
    "boosting": lambda p, text: fs.FedFunctionBoost.from_formula(text, p).fit(steps=2),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("logistic", "least squares"),
        ("least squares", "logistic"),
        ("averaging", "logistic"),
        ("boosting", "averaging"),
        ("least squares", "boosting"),
    ],
)
def test_families_share_one_history(first, second):
    partition = rows()
    FAMILIES[first](partition, "y ~ a + age")
    with refused_for(RULE):
        FAMILIES[second](partition, "y ~ nearly + age")


def test_by_inclusion_and_exclusion_no_person_is_singled_out():
    """Sums of income over a, a and b, a and c, a and all: no two of the groups differ by one person."""
    k = np.arange(N)
    a = (k % 3 == 0) * 1.0
    members = np.flatnonzero(a[: N // 3])
    b, c = np.zeros(N), np.zeros(N)
    b[members[1:60]], c[members[40:]] = 1.0, 1.0
    rest = k >= N // 3
    b[rest], c[rest] = (k[rest] % 2 == 0) * 1.0, (k[rest] % 2 == 1) * 1.0
    frame = FRAME.assign(a=a, b=b, c=c)
    assert ((a * (1 - b) * (1 - c))[: N // 3]).sum() == 1.0
    partition = rows(frame=frame)
    for formula in ("income ~ a", "income ~ a:b", "income ~ a:c"):
        fitted(partition, formula)
    with refused_for(RULE):
        fitted(partition, "income ~ a:b:c")


def test_a_complement_of_one_person_has_no_value():
    """Sums of z, az, bz and abz, the last as a product of a:z with b, give z of the one without a and b."""
    k = np.arange(N)
    a, b = (k % 2 == 0) * 1.0, (k % 2 == 1) * 1.0
    a[k % 10 == 0] = b[k % 10 == 0] = 1.0
    a[0] = b[0] = 0.0
    with refused_for(RULE):
        fitted(rows(frame=FRAME.assign(a=a, b=b)), "y ~ income + a + b + a:income + b:income")
    with refused_for(RULE):
        partition = rows(frame=FRAME.assign(a=a, b=b))
        for formula in ("y ~ a:income + b", "y ~ b:income", "y ~ income"):
            fitted(partition, formula)


def test_ordinary_models_one_after_another_pass():
    partition = rows()
    for formula in (
        "y ~ a + age",
        "y ~ b + age",
        "income ~ a + age",
        "income ~ a + scale(age)",
        "y ~ income + age + w",
        "y ~ log(income) + age",
        "age ~ C(g)",
        "visits ~ a:age + age",
    ):
        assert fitted(partition, formula).converged
