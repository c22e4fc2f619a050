"""Wrong input of a user: each error says what to do, and comes before anything is charged."""

import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import DescriptionError, EstimationError, FormulaError, ModelError, PartitionError
from fedstat.models.copula.margins import Bins

COLUMNS = {"A": ["y", "a", "b"], "B": ["c"], "C": ["d"]}
BOUNDS = {"y": [0, 1], "a": (-4, 4), "b": ["no", "yes"], "c": range(4), "d": fs.log(0.01, 100)}
NAMES = [name for names in COLUMNS.values() for name in names]


def rows(n=600):
    Z = np.random.default_rng(0).standard_normal((n, 4))
    b = np.where(Z[:, 1] > 0.8, "yes", "no")
    levels = np.searchsorted([-0.8, 0.0, 1.2], Z[:, 2])
    return pd.DataFrame({"y": np.arange(n) % 2, "a": Z[:, 0], "b": b, "c": levels, "d": np.exp(Z[:, 3])})


def partition(frame=None, columns=COLUMNS, budget=8.0):
    policy = None if budget is None else fs.Policy(privacy=fs.Budget(budget, 1e-6))
    return fs.ClientPartition.from_frame(rows() if frame is None else frame, columns=columns, policy=policy)


def synthesizer(sites=None, epsilon=2.0, bounds=BOUNDS, **options):
    return fs.CopulaSynthesizer(sites or partition(), epsilon, bounds, **options)


def regression(formula, sites=None, **options):
    family = sm.families.Binomial()
    return fs.PrivateCopulaGLM.from_formula(
        formula, sites or partition(), family=family, epsilon=2.0, bounds=BOUNDS, **options
    )


def charged(sites):
    return [float(site.site_ledger.charges.spent) for site in sites.sites.values()]


def test_columns_without_bounds_are_listed_to_be_filled_in():
    with pytest.raises(ModelError) as refused:
        synthesizer(bounds={"y": [0, 1], "a": (-4, 4)})
    text = str(refused.value)
    assert "3 of 5 columns have none, and none are taken from the data" in text
    skeleton = text[text.index("fs.Bounds(") :].replace("low, high", "0, 1")
    assert set(eval(skeleton, {"fs": fs})) == {"b", "c", "d"}


def test_an_unknown_level_names_the_column_and_never_the_level():
    frame = rows(3_000)
    frame.loc[::3, "b"] = "SECRET"
    with pytest.raises(
        EstimationError, match="column 'b' at 'A' has levels that its bounds do not"
    ) as refused:
        synthesizer(partition(frame), 4.0).fit()
    assert "SECRET" not in str(refused.value) and "charge for the margins remains" in str(refused.value)


def test_missing_values_are_missing_and_infinite_ones_are_at_the_end():
    values = pd.Series([np.nan, -np.inf, -9.0, 0.0, 9.0, np.inf, None])
    assert Bins("a", (), (-4.0, 4.0), depth=5).code(values).tolist() == [-1, 0, 0, 16, 31, 31, -1]
    with pytest.raises(PartitionError, match="infinite values"):
        partition(rows().assign(a=np.inf))


@pytest.mark.parametrize("bound", [(4, 4), (4, -4), (0, float("nan")), (float("-inf"), 0)])
def test_a_range_ascends(bound):
    with pytest.raises(ModelError, match=r"column 'a': expected an ascending range \(low, high\)"):
        fs.Bounds({"a": bound})


@pytest.mark.parametrize("epsilon", [0, -1.0, float("nan"), float("inf"), "1", None, True])
def test_epsilon_is_positive(epsilon):
    with pytest.raises(ModelError, match="epsilon: expected a positive number, received"):
        synthesizer(epsilon=epsilon)


@pytest.mark.parametrize("delta", [0.0, 2e-5, 1, -1e-9, "x", float("nan")])
def test_delta_is_small(delta):
    with pytest.raises(ModelError, match=r"delta: expected a number( above 0 and at most 1e-05|, received)"):
        synthesizer(delta=delta)


def test_a_spent_budget_says_what_is_left_and_loses_nothing(tmp_path):
    sites = partition(budget=2.0)
    fit = synthesizer(sites).fit()
    spent = charged(sites)
    with pytest.raises(DescriptionError, match=r"rho .* left of 0.0882 \(epsilon 2 at delta 1e-06\)"):
        synthesizer(sites, 1.0).fit()
    assert charged(sites) == spent
    fit.save(tmp_path / "fit")
    assert fs.load(tmp_path / "fit").sample(9, seed=1).equals(fit.sample(9, seed=1))
    assert "eps total" in str(fit.summary())


def test_a_budget_that_is_too_small_or_none_is_reported_before_any_request():
    for budget, words in ((1.0, "this one costs 2"), (None, "is none")):
        sites = partition(budget=budget)
        for model in (synthesizer(sites), regression("y ~ a + c", sites)):
            with pytest.raises(DescriptionError, match=rf"{words}[\s\S]*no request was sent"):
                model.fit()
        assert not any(charged(sites))


@pytest.mark.parametrize("make", [synthesizer, lambda *a, **k: regression("y ~ a + d", *a, **k)])
def test_nobody_can_deal_where_the_coordinator_sits_at_one_of_two(make):
    sites = partition(columns={"A": ["y", "a", "b"], "B": ["c", "d"]})
    with pytest.raises(ModelError, match=r"no third site to deal .* say coordinator='apart'"):
        make(sites, coordinator="A").fit()
    assert not any(charged(sites))


@pytest.mark.parametrize("term", ["scale(a)", "center(a)", "bs(a)", "poly(a, 2)", "np.exp(np.sqrt(a))"])
def test_terms_that_would_take_moments_of_rows_are_refused(term):
    with pytest.raises(
        ModelError, match=f"the term '{re.escape(term)}' has no score that a budgeted release"
    ):
        regression(f"y ~ {term}")


@pytest.mark.parametrize(("formula", "words"), [
    ("y ~ a:d", "product across sites"),
    ("y ~ a * c", "product across sites"),
    ("y ~ log(a)", "no value at the lower end of the bounds of 'a'"),
    ("y ~ a + zz", "no column 'zz'"),
    ("y ~ a - 1", "omits the intercept"),
])  # fmt: skip
def test_formulas(formula, words):
    with pytest.raises((ModelError, FormulaError), match=words):
        regression(formula)


def test_noise_that_hides_everything_is_reported_with_what_would_do():
    model = synthesizer(epsilon=0.2)
    words = (
        "few will be distinguishable from 0. About .* entities would suffice at epsilon 0.2, or an epsilon"
    )
    assert pd.Series(" ".join(str(model.explain()).split())).str.contains(words).all()


def test_noise_without_end_is_no_error():
    """A margin that noise has left with one value has correlations of any size."""
    found = synthesizer(epsilon=0.05).fit()
    text = " ".join(str(found.summary()).split())
    assert "Noise exceeds all information" in text or "few will be distinguishable from 0" in text
