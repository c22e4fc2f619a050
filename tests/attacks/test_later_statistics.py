"""Values of one person from pooled imputations, bootstraps, third moments, weights and curves.

Each attack reads public results only, and reads the value where nothing is protected. Sums of functions of
one column at a small site are in ``test_functions_of_a_column``, boosting of curves on numbers of two sites
in ``test_cells_between_sites``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused_for
from released import miss, own_sums, total_sums

import fedstat as fs
from fedstat.errors import NotAvailableError, PolicyError
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.kernels.curves import integration_weights, spline_basis

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, VICTIM, SITES = 120, 17, ("S0", "S1", "S2")
NUMBER = {"kind": "number", "range": [-200.0, 20000.0]}
FLAG = {"kind": "number", "range": [0, 1], "levels": [0, 1]}
PUBLISHED = dict.fromkeys(("first", "second", "income", "x", "w", "y", "v"), NUMBER) | dict.fromkeys(
    ("ill", "a"), FLAG
)


def table() -> pd.DataFrame:
    """The victim has another second imputation, a far larger x and w, and alone has a at its site."""
    rng = np.random.default_rng(9)
    n = ROWS * len(SITES)
    frame = pd.DataFrame(
        {
            "site": np.repeat(SITES, ROWS),
            "first": rng.normal(100, 15, n).round(1),
            "income": rng.uniform(1.0, 8.0, n).round(3),
            "x": rng.uniform(1.0, 3.0, n).round(2),
            "w": 1.0,
            "y": rng.normal(100, 15, n).round(1),
            "v": rng.normal(size=n).round(2),
            "ill": (rng.random(n) < 0.45).astype(float),
            "a": (rng.random(n) < 0.3).astype(float),
        }
    )
    frame.loc[frame.site == "S0", "a"] = 0.0
    frame["second"] = frame["first"]
    frame.loc[VICTIM, ["second", "x", "w", "a"]] = frame["first"][VICTIM] + 20.0, 900.0, 20000.0, 1.0
    return frame


FRAME = table()
PERSON = FRAME.loc[VICTIM]


OFF = fs.Policy(max_parameters=10.0, min_count=1, min_level_count=1, max_share=1.0)
"""Without the minimum rows behind a column, which ``Policy.open()`` has as well."""


def partition(policy, frame=FRAME) -> fs.ClientPartition:
    return fs.ClientPartition.from_frame(
        frame, by="site", policy=policy, published=dict.fromkeys(SITES, PUBLISHED)
    )


# -- two imputations -----------------------------------------------------------------------------------


def test_pooled_imputations_do_not_differ_by_one_person():
    """Successful if the regressor of the one person with another imputation is read to 1 % of its spread."""

    def attack(policy):
        at = partition(policy)
        fits = [
            fs.FederatedOLS.from_formula(f"{name} ~ income + v", at).fit() for name in ("first", "second")
        ]
        # Two analyses differ by twice their distance from the mean; they have one X'X.
        moved = 2.0 * (fits[1].params - fs.pool(fits).params)
        intercept, income, _ = total_sums(fits[0])[0] @ moved
        return income / intercept

    assert miss(attack(fs.Policy.open()), PERSON.income, FRAME.income) < 0.01
    with refused_for("rows behind a product"):
        attack(fs.Policy.strict())
    assert np.isfinite(attack(fs.Policy.strict(products="any")))


# -- wild bootstrap ------------------------------------------------------------------------------------


def parts_of_sites(found) -> np.ndarray:
    """Each site's part of the tested score, divided by the length of all, from the statistics of all signs.

    t = T / sqrt(f (Q - T^2 / K)) with T the sum of signs times parts, Q the sum of squared parts, and f a
    factor of the numbers of rows, sites and coefficients.
    """
    K = found.draws.shape[1]
    n = ROWS * K
    t2 = K / (K - 1.0) * (n - 1.0) / (n - 2.0) * found.boot_statistics**2
    total = np.sign(found.boot_statistics) * np.sqrt(t2 / (1.0 + t2 / K))
    return found.draws.T @ total / len(total)


def case_or_not(policy, frame, masked) -> float:
    """Outcome of the only person with a at a site: the sign of its residual from a mean of one half."""
    model = fs.GLORE.from_formula("ill ~ a", partition(policy, frame))
    found = model.fit(masked=masked).wild_cluster_bootstrap("Intercept + a = 0")
    return float(parts_of_sites(found)[0] > 0.0)


@pytest.mark.parametrize("ill", [0.0, 1.0])
def test_signs_of_a_bootstrap_do_not_single_out_a_site(ill):
    """The attack succeeds if it finds the outcome, whether this is 0 or 1."""
    frame = FRAME.assign(ill=FRAME.ill.where(FRAME.index != VICTIM, ill))
    assert case_or_not(OFF, frame, masked=False) == ill
    for masked in (True, False):
        with pytest.raises(PolicyError):
            case_or_not(fs.Policy.strict(), frame, masked)
    # Where the rules on rows of a column are off, masks are enough.
    masks = fs.Policy.strict(min_level_count=1, products="any", max_share=1.0)
    with pytest.raises(NotAvailableError, match="masked"):
        case_or_not(masks, frame, True)
    with refused_for("masked only"):
        case_or_not(masks, frame, False)


def releases(at) -> list[int]:
    return [site.site_ledger.n_records for site in at.sites.values()]


def test_a_bootstrap_of_a_linear_model_sends_no_request(monkeypatch):
    """Successful if a call leads to a request: more hypotheses would then be more equations for the rows."""
    at = partition(fs.Policy.strict())
    result = fs.FederatedOLS.from_formula("y ~ income + v", at).fit()
    before, sent = (len(result.ledger.entries), releases(at)), []
    send = LocalEngine._send
    monkeypatch.setattr(LocalEngine, "_send", lambda *one: sent.append(one) or send(*one))
    for hypothesis, seed in product(("income = 0", "v = 0", "income = v", "Intercept + 2 * v = 3"), (1, 2)):
        result.wild_cluster_bootstrap(hypothesis, weights="webb", reps=50, seed=seed)
    assert not sent and (len(result.ledger.entries), releases(at)) == before
    loose = fs.GLORE.from_formula("ill ~ income", partition(fs.Policy.open())).fit(masked=False)
    loose.wild_cluster_bootstrap("income = 0")
    assert sent


def test_a_bootstrap_does_not_show_a_site_without_an_own_fit():
    """Successful if statistics are computed that change with the responses of the small site."""
    few = FRAME[~FRAME.index.isin(range(40, ROWS))]
    other = few.assign(y=few.y + 3.0 * few.v * (few.site == "S0"))

    def statistics(policy, frame):
        result = fs.FederatedOLS.from_formula("y ~ v", partition(policy, frame)).fit()
        return result.wild_cluster_bootstrap("v = 0").boot_statistics

    shown, changed = (statistics(fs.Policy.open(), frame) for frame in (few, other))
    assert np.abs(shown - changed).max() > 0.01
    with pytest.raises(NotAvailableError, match="'S0' has none"):
        statistics(fs.Policy.strict(), few)


# -- third moments and weights -------------------------------------------------------------------------


def third_by_second(at) -> float:
    """Sum of cubes by the sum of squares: of a value that is far above all others, nearly that value."""
    gram = own_sums(fs.FederatedOLS.from_formula("y ~ x + I(x**2)", at).fit())["S0"][0]
    return float(gram.iloc[1, 2] / gram.iloc[1, 1])


def in_two_fits(at) -> float:
    """Root of the sum of fourth powers by the sum of squares, from a fit of x^2 and a fit of x."""
    first, second = (
        own_sums(fs.FederatedOLS.from_formula(f"y ~ {text}", at).fit())["S0"][0] for text in ("x", "I(x**2)")
    )
    return float(np.sqrt(second.iloc[1, 1] / first.iloc[1, 1]))


def weighted_mean(at) -> float:
    """Mean of a column with weights that one person nearly has alone: its value of that column."""
    model = fs.FederatedGLM.from_formula("y ~ income", at, family=sm.families.Gaussian(), var_weights="w")
    gram = own_sums(model.fit())["S0"][0]
    return float(gram.iloc[0, 1] / gram.iloc[0, 0])


MOMENTS: dict[str, tuple[Callable[[fs.ClientPartition], float], str]] = {
    "third moment": (third_by_second, "x"),
    "second moments of two fits": (in_two_fits, "x"),
    "weighted mean": (weighted_mean, "income"),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_of_a_column_with_one_outlier_are_not_its_value(name):
    """Successful if a value is read to 5 % of the spread of the column."""
    attack, column = MOMENTS[name]
    truth = PERSON[column]
    assert miss(attack(partition(OFF)), truth, FRAME[column]) < 0.05
    with pytest.raises(PolicyError):
        attack(partition(fs.Policy.strict()))


def skewed(policy) -> float:
    """The only value above the mean, from the mean of z |z|: half of 1 plus this is its z^2 / n."""
    rng = np.random.default_rng(2)
    n = 400
    frames = {
        "Court": {"x": np.where(np.arange(n) == VICTIM, 900.0, rng.uniform(1.0, 3.0, n).round(2))},
        "Bank": {"y": rng.normal(size=n)},
        "Third": {"t": rng.normal(size=n)},
    }
    tables = {site: pd.DataFrame({"k": range(n), **held}) for site, held in frames.items()}
    at = fs.ClientPartition.from_frames(tables, on="k", policy=policy)
    result = fs.VFEMRegression.from_formula("y ~ x + t", at).fit(correction="skewness", cov_type="none")
    found = result.exchange.moments
    j = found.names.index("x")
    return float(found.center[j] + found.scale[j] * np.sqrt(n * (1.0 + found.shape[j]) / 2.0))


def test_the_skewness_of_a_column_is_not_its_outlier():
    """Successful if the value is read to 1 % of it."""
    assert skewed(fs.Policy.open()) == pytest.approx(900.0, rel=0.01)
    with refused_for("largest share", site="Court"):
        skewed(fs.Policy.strict())


# -- curves and a column of another site ---------------------------------------------------------------

PEOPLE, POINTS, EARLY, KNOTS = 400, 12, 4, 6


def product_with_a_curve(common, policy) -> tuple[np.ndarray, np.ndarray]:
    """The value read from a curve at the bank, and the truth; `common` people with a share its start."""
    rng = np.random.default_rng(8)
    k, order = np.arange(PEOPLE), rng.permutation(PEOPLE)
    x, a = rng.normal(size=(PEOPLE, POINTS)), np.zeros(PEOPLE)
    a[order[:24]] = 1.0
    x[np.setdiff1d(k, order[24 - common : 60]), :EARLY] = 0.0
    tables = {
        "Clinic": pd.DataFrame({"k": k, "y": rng.normal(size=PEOPLE)}),
        "Court": pd.DataFrame({"k": k, "a": a}),
        "Bank": pd.DataFrame(x).rename(columns=lambda j: f"x_{j}").assign(k=k),
        "Third": pd.DataFrame({"k": k, "t": rng.normal(size=PEOPLE)}),
    }
    curves = {"x": fs.Curve("x_*", domain=(0, 1))}
    at = fs.ClientPartition.from_frames(tables, on="k", policy=policy, curves=curves)
    model = fs.FedFunctionBoost.from_formula(f"y ~ a + bsignal(x, knots={KNOTS}, degree=1) + t", at)
    S = model.fit(steps=1)._record.boosting.moments.total.S
    s = np.linspace(0.0, 1.0, POINTS)
    of_person = (x[order[23]] * integration_weights(s)) @ spline_basis(s, 0.0, 1.0, KNOTS, 1)
    return S[2, 3:5], of_person[:2]  # two functions end before the start of the curve does


def test_a_curve_of_one_person_is_not_read_by_a_column_of_another_site():
    """Successful if the curve's first two coefficients are read."""
    read, truth = product_with_a_curve(1, fs.Policy.open())
    np.testing.assert_allclose(read, truth, atol=1e-6)
    with refused_for("rows behind a product"):
        product_with_a_curve(1, fs.Policy.strict())
    read, truth = product_with_a_curve(6, fs.Policy.strict())
    assert np.abs(read - truth).max() > np.abs(truth).max() / 2.0
