"""A smaller model from the sums that were exchanged is a fresh fit of its formula, at no further message."""

import numpy as np
import pandas as pd
import pytest
from oracle import ITERATIVE, Study, packed, simulate

import fedstat as fs
from fedstat.errors import DataWarning, FormulaError, ModelError, NotAvailableError

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


def with_factor(n=900):
    """Three clients; the Court knows a region, the Bank a number that the formulas transform."""
    study = simulate(seed=5, n=n, holder="Registry")
    rng = np.random.default_rng(3)
    region = pd.Series(rng.choice(["east", "north", "west"], n))
    table = study.table.assign(region=region.where(study.table["court0"].notna()))
    table["y"] += region.map({"east": 0.0, "north": 0.5, "west": -0.5})
    return Study(table, study.columns | {"Court": [*study.columns["Court"], "region"]}, study.holder)


@pytest.fixture(scope="module")
def study():
    return with_factor()


@pytest.fixture(scope="module")
def partition(study):
    return study.partition()


FULL = "y ~ scale(bank0) + bs(bank1, df=4, extrapolation='clip') + court0 * region + court1 + tax0 + tax1"


@pytest.fixture(scope="module")
def full(partition):
    return fs.VFEMRegression.from_formula(FULL, partition, between="independent").fit()


def fresh(partition, formula, **options):
    return fs.VFEMRegression.from_formula(formula, partition, between="independent").fit(**options)


FORMULAS = [
    "y ~ scale(bank0) + court0 * region + court1 + tax1",
    "y ~ scale(bank0) + court0 + region + tax0 + tax1",
    "y ~ bs(bank1, df=4, extrapolation='clip') + court1 + tax0",
    "y ~ tax1 + court0 + region",  # the Bank drops out
    "y ~ tax0 + tax1",
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_it_is_the_fresh_fit_of_its_formula(full, partition, formula):
    assert full.exchange.plan.changes == 0
    smaller, again = full.refit(formula), fresh(partition, formula)
    assert list(smaller.params.index) == list(again.params.index)
    np.testing.assert_allclose(smaller.params, again.params, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(smaller.bse, again.bse, rtol=1e-7)
    assert smaller.llf == pytest.approx(again.llf, rel=1e-12)
    assert smaller.rsquared == pytest.approx(again.rsquared, rel=1e-9)
    assert smaller.nobs == again.nobs and smaller.df_model == again.df_model
    assert smaller.nobs_by_site.equals(again.nobs_by_site)


def test_the_order_of_terms_and_factors_does_not_matter(full):
    one, other = (
        full.refit("y ~ tax0 + court0 * region"),
        full.refit("y ~ region:court0 + region + court0 + tax0"),
    )
    pd.testing.assert_series_equal(one.params, other.params, check_exact=True)


@pytest.mark.parametrize("cov_type", ["expected", "sem", "none"])
def test_every_covariance_can_be_requested(full, partition, cov_type):
    smaller = full.refit(FORMULAS[0], cov_type=cov_type)
    again = fresh(partition, FORMULAS[0], cov_type=cov_type)
    assert smaller.cov_type == again.cov_type == cov_type
    if cov_type != "none":
        np.testing.assert_allclose(smaller.bse, again.bse, rtol=1e-6)
    with pytest.raises(NotAvailableError, match="random group"):
        full.refit(FORMULAS[0], cov_type="robust")


@pytest.mark.parametrize("method", ["cc", "impute"])
def test_the_other_methods_keep_their_entities(study, method):
    """Complete are those that every client of the larger fit has."""
    result = study.model("y ~ bank0 + bank1 + court0 + court1 + tax0").fit(method=method)
    smaller = result.refit("y ~ bank0 + court0")
    table = study.table[["y", "bank0", "bank1", "court0", "court1", "court2", "tax0", "tax1"]]
    table = table.dropna() if method == "cc" else table.fillna(table.mean())
    X = np.column_stack([np.ones(len(table)), table[["bank0", "court0"]]])
    np.testing.assert_allclose(smaller.params, np.linalg.lstsq(X, table["y"], rcond=None)[0], rtol=1e-8)
    assert smaller.nobs == len(table) == result.nobs


def test_nothing_is_requested(full):
    before = {name: site.ledger.rounds for name, site in full.model.partition.sites.items()}
    smaller = full.refit(FORMULAS[1])
    assert {name: site.ledger.rounds for name, site in full.model.partition.sites.items()} == before
    assert smaller.ledger is full.ledger
    assert "no further exchange took place" in " ".join(str(smaller.summary(notes="all")).split())


def test_a_dot_is_what_the_fit_reads(partition):
    wide = fresh(partition, "y ~ bank0 + court0 + tax0 + tax1", cov_type="none")
    assert list(wide.refit("y ~ . - tax0").params.index) == ["Intercept", "bank0", "court0", "tax1"]


def test_a_smaller_model_of_a_smaller_model(full, partition):
    twice = full.refit(FORMULAS[1]).refit("y ~ court0 + tax1")
    again = fresh(partition, "y ~ court0 + tax1")
    np.testing.assert_allclose(twice.params, again.params, rtol=1e-8)
    assert twice.llf == pytest.approx(again.llf, rel=1e-12)
    with pytest.raises(ModelError, match="no term 'tax0' in this fit; it has court0, tax1"):
        twice.refit("y ~ tax0")


def test_likelihood_ratios_are_those_of_fresh_fits(full, partition):
    smaller = full.refit(FORMULAS[1])
    test = full.compare_lr_test(smaller)
    assert test.df_diff == 7
    other = full.compare_lr_test(fresh(partition, FORMULAS[1]))
    assert test.statistic == pytest.approx(other.statistic, rel=1e-8)
    gone = full.compare_lr_test(full.refit("y ~ tax0 + tax1"))
    assert gone.statistic == pytest.approx(
        full.compare_lr_test(fresh(partition, "y ~ tax0 + tax1")).statistic, rel=1e-8
    )


def newcomers():
    study = with_factor(n=120)
    frames = study.frames()
    return fs.ClientPartition.from_frames({k: frames[k] for k in study.columns}, on="id", new_data=True)


@pytest.mark.parametrize("formula", [FORMULAS[0], FORMULAS[2], FORMULAS[3]])
def test_predictions_are_those_of_a_fresh_fit(full, partition, formula, tmp_path):
    """The coding of the columns that are left, with the state of their transforms."""
    smaller, new = full.refit(formula), newcomers()
    expected = fresh(partition, formula).get_prediction(new).summary_frame()
    pd.testing.assert_frame_equal(smaller.get_prediction(new).summary_frame(), expected, rtol=1e-7)
    smaller.save(tmp_path / "smaller.fed")
    loaded = fs.load(tmp_path / "smaller.fed")
    pd.testing.assert_frame_equal(loaded.get_prediction(new).summary_frame(), expected, rtol=1e-7)
    with pytest.raises(NotAvailableError, match="moments of a fit in this session"):
        loaded.refit("y ~ tax0")


@pytest.mark.parametrize(
    ("formula", "complaint"),
    [
        ("log(y) ~ tax0", r"expected the response 'y' and an intercept, received 'log\(y\) ~ tax0'"),
        ("y ~ tax0 - 1", "and an intercept"),
        ("y ~ tax0 + log(tax1)", r"no term 'log\(tax1\)' in this fit; it has scale\(bank0\), bs"),
        ("y ~ tax0 + court2", "no term 'court2' in this fit"),
        ("y ~ court0 + court0:region", "the coding of 'court0:region' depends on region"),
    ],
)
def test_what_is_not_within_the_fit_is_named(full, formula, complaint):
    with pytest.raises(ModelError, match=complaint):
        full.refit(formula)


def test_an_unknown_column_is_named(full):
    with pytest.raises(FormulaError, match="no column 'tax9'"):
        full.refit("y ~ tax9")


def test_the_iterative_exchange_leaves_no_sums(partition):
    result = fresh(partition, "y ~ tax0 + court0", **packed(cov_type="none", **ITERATIVE))
    with pytest.raises(NotAvailableError, match="exchange='moments'"):
        result.refit("y ~ tax0")


def test_entities_of_merged_patterns_stay_where_they_were():
    """A fresh fit of fewer columns releases a pattern that was too small: not the same records."""
    study = simulate(seed=8, n=600, holder="Registry", missing="none")
    place = study.table.columns.get_indexer
    study.table.iloc[:200, place(study.columns["Tax"])] = np.nan
    study.table.iloc[200:209, place(study.columns["Court"])] = np.nan
    partition = study.partition()
    full = fresh(partition, "y ~ .")
    again = fresh(partition, "y ~ . - court0 - tax0")
    assert (full.exchange.plan.moved, again.exchange.plan.moved) == (9, 0)
    with pytest.raises(ModelError, match=r"counts as having other entities.*too small to be released.*refit"):
        full.compare_lr_test(again)
    smaller = full.refit("y ~ . - court0 - tax0")
    assert smaller.exchange.plan.moved == 9
    assert full.compare_lr_test(smaller).df_diff == 2
    assert full.compare_lr_test(smaller).statistic > 0.0


def test_entities_that_lack_one_column_stay_missing():
    study = simulate(seed=8, n=300, holder="Registry", missing="none")
    study.table.loc[study.table.index[::6], "court1"] = np.nan
    partition = study.partition(partial="drop")
    with pytest.warns(DataWarning, match="50 at 'Court'"):
        full = fresh(partition, "y ~ .")
    smaller = full.refit("y ~ . - court1")
    assert smaller.nobs_by_site["Court"] == 250
    assert full.compare_lr_test(smaller).df_diff == 1
    assert fresh(partition, "y ~ . - court1").nobs_by_site["Court"] == 300
