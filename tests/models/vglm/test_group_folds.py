"""Folds of entities that keep the groups of a site's column together, for selection and for boosting."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.models.vertical.group_folds import GroupFolds
from fedstat.models.vglm import options

pytestmark = pytest.mark.filterwarnings("ignore")
PERSONS, TIMES = 60, 8
RANDOM = np.random.default_rng(4)
PERSON = np.repeat(np.arange(PERSONS), TIMES)
N = len(PERSON)
X = RANDOM.normal(size=(PERSONS, 8))[PERSON] + 0.05 * RANDOM.normal(size=(N, 8))
"""Columns of a person, without an effect: they identify the person, and so predict the person's level."""
VISITS = pd.DataFrame(
    {"visit": np.arange(N), "y": RANDOM.normal(size=PERSONS)[PERSON] + 0.3 * RANDOM.normal(size=N)}
)
TABLES = {
    "clinic": VISITS,
    "lab": pd.DataFrame(X[:, :4]).add_prefix("a").assign(visit=np.arange(N)),
    "ward": pd.DataFrame(X[:, 4:])
    .add_prefix("b")
    .assign(visit=np.arange(N), person=[f"p{k}" for k in PERSON]),
}
TEXT = "y ~ " + " + ".join([f"a{j}" for j in range(4)] + [f"b{j}" for j in range(4)])


def partition(tables=TABLES, **settings):
    return fs.ClientPartition.from_frames(tables, on="visit", **settings)


def model(tables=TABLES, **settings):
    return fs.VerticalGLM.from_formula(TEXT, partition(tables, **settings), penalty="lasso")


def drawn(made, folds=5, column="person", seed=0):
    groups = GroupFolds.of(column, made.partition, made._session, seed)
    return made.engine.run(groups.draw(made.layout, folds, 2), Ledger())


def test_entities_of_a_group_are_in_one_fold_and_folds_have_equal_numbers_of_groups():
    code = drawn(model())
    assert set(code) == set(range(5))
    assert (pd.Series(code).groupby(PERSON).agg("nunique") == 1).all()
    assert_allclose(np.bincount(code), PERSONS // 5 * TIMES)
    assert (code != drawn(model(), seed=1)).any()


def test_entities_without_a_record_or_a_value_are_groups_of_their_own():
    lacking = TABLES | {"ward": TABLES["ward"].assign(person=TABLES["ward"]["person"].where(PERSON > 0))}
    code = drawn(model(lacking))
    assert (pd.Series(code[PERSON > 0]).groupby(PERSON[PERSON > 0]).agg("nunique") == 1).all()
    assert len(set(code[PERSON == 0])) > 1
    diary = pd.DataFrame({"visit": np.arange(40, N), "person": PERSON[40:] * 1.0})
    aside = TABLES | {"ward": TABLES["ward"].drop(columns="person"), "diary": diary}
    code = drawn(model(aside))
    assert len(code) == N and (pd.Series(code[40:]).groupby(PERSON[40:]).agg("nunique") == 1).all()


def test_cross_validation_is_that_of_these_folds(monkeypatch):
    made = model()
    found = made.fit(select="cv", folds=("person", 4), n_lambdas=10, inference="conditional")
    code = drawn(made, 4)
    monkeypatch.setattr(options, "assign_folds", lambda n, folds, least, random: code)
    expected = model().fit(select="cv", folds=4, n_lambdas=10, inference="conditional")
    assert_allclose(found.path["cv"], expected.path["cv"], rtol=1e-9)
    assert found.ledger.to_frame().query("array == 'fold'")["sender"].tolist() == ["ward"]


def test_folds_of_rows_promise_too_small_an_error():
    rows = model().fit(select="cv", n_lambdas=15, inference="conditional")
    persons = model().fit(select="cv", folds="person", n_lambdas=15, inference="conditional")
    # No column has an effect: the error on other persons is that of the mean.
    assert rows.path["cv"].min() < 0.9 * persons.path["cv"].min()
    assert persons.path["cv"].min() > 0.9 * VISITS["y"].var()


def test_another_family_has_folds_of_persons_too():
    binary = TABLES | {"clinic": VISITS.assign(y=(VISITS["y"] > 0) * 1)}
    made = fs.VerticalGLM.from_formula(
        TEXT, partition(binary), penalty="lasso", family=sm.families.Binomial()
    )
    fit = made.fit(select="cv", folds=("person", 3), n_lambdas=8)
    assert fit.ledger.to_frame().query("array == 'fold'")["sender"].tolist() == ["ward"]
    with pytest.raises(ModelError, match="no groups stay together"):
        made.fit(folds="person", inference="split")


def boosting(tables=TABLES, **settings):
    return fs.FedFunctionBoost.from_formula(TEXT, partition(tables, **settings))


def test_boosting_over_columns_has_folds_of_persons():
    rows = boosting().fit(steps=60, select="cv", folds=5)
    persons = boosting().fit(steps=60, select="cv", folds=("person", 5))
    assert rows.cv["loss"].min() < 0.9 * persons.cv["loss"].min()
    np.testing.assert_array_equal(persons._record.boosting.moments.S[:, 0, 0], N // 5)
    kinds = [set(one.refit().diagnostics()["kind"]) for one in (persons, rows)]
    assert ["dependent_rows" in kind for kind in kinds] == [True, False]
    with pytest.raises(fs.errors.DesignError, match="48 rows a fold"):
        boosting().fit(steps=5, folds="person")


@pytest.mark.parametrize("make", [model, boosting])
def test_the_dry_run_lists_the_folds_and_wrong_columns_are_refused(make):
    planned = make().explain(select="cv", folds=("person", 5))
    assert planned.passes
    assert planned.tidy().query("array == 'fold'")["sender"].tolist() == ["ward"]
    with pytest.raises(ModelError, match="which no site has"):
        make().fit(select="cv", folds=("family", 5))
    with pytest.raises(ModelError, match="folds"):
        make().fit(select="cv", folds=("person", 2.5))


@pytest.mark.parametrize(("folds", "passes"), [(12, True), (13, False)])
def test_a_fold_of_few_persons_is_refused(folds, passes):
    """The numbers of the folds reveal which persons are together, and their sums are those of few persons."""
    made = model()
    if passes:
        assert drawn(made, folds).max() == folds - 1
    else:
        with pytest.raises(PolicyError, match="at least 5 clusters by 'person'"):
            drawn(made, folds)


def test_a_column_of_few_values_is_not_read_from_the_folds():
    two = TABLES | {"ward": TABLES["ward"].assign(person=PERSON % 2)}
    with pytest.raises(PolicyError, match="clusters by 'person'"):
        model(two).fit(select="cv", folds=("person", 2))


def test_folds_smaller_than_a_sum_may_be():
    made = model()
    groups = GroupFolds.of("person", made.partition, made._session, 0)
    with pytest.raises(EstimationError, match="the smallest of 5 folds by 'person' has 96 entities"):
        made.engine.run(groups.draw(made.layout, 5, 97), Ledger())


def test_a_choice_at_the_border_of_the_path_is_named():
    fits = [model().fit(select=select, lambdas=[0.3, 0.1, 0.05, 0.02]) for select in ("cv", "aic")]
    fits.append(model().fit(select="bic", n_lambdas=15))
    at_border = ["smallest_lambda" in set(one.diagnostics()["kind"]) for one in fits]
    assert at_border == [True, True, False]
    assert "smallest_lambda" not in set(model().fit(lam=0.1).diagnostics()["kind"])
