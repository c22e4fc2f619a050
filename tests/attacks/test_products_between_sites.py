"""Products of columns of two sites that rest on one person: counts of a cell, and a value of that person.

Column a of the court times column b:income of the bank is the income of the only person with a = b = 1.
"""

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for

import fedstat as fs
from fedstat.errors import ConsentError, PolicyError

N, OF_A, OF_B = 600, 30, 25
STRICT = fs.Policy.strict()


def study(common, policy=STRICT, seed=3):
    """Four sites; a column of each of two sites is one for the same `common` persons; and their incomes."""
    rng = np.random.default_rng(seed)
    order, a, b = rng.permutation(N), np.zeros(N), np.zeros(N)
    a[order[:OF_A]] = 1.0
    b[order[OF_A - common : OF_A - common + OF_B]] = 1.0
    income = np.round(rng.lognormal(10, 0.6, N), 2)
    frames = {
        "Clinic": {"y": rng.normal(size=N), "count": rng.poisson(2.0, N)},
        "Court": {"a": a, "c": rng.normal(size=N), "a12": 1.0 + a, "level": np.where(a == 1.0, "in", "out")},
        "Bank": {"b": b, "income": income, "b12": 1.0 + b, "of": np.where(b == 1.0, "no", "yes")},
        "Third": {"t": rng.normal(size=N)},
    }
    tables = {site: pd.DataFrame({"k": range(N), **columns}) for site, columns in frames.items()}
    given = {"policies": policy} if isinstance(policy, dict) else {"policy": policy}
    partition = fs.ClientPartition.from_frames(tables, on="k", **given)
    return partition, income[(a * b) == 1.0]


def released_product(partition, formula, a, b):
    """The sum of products of two columns in the units of the data, from what a fit releases."""
    moments = fs.VFEMRegression.from_formula(formula, partition).fit(cov_type="none").exchange.moments
    i, j = (list(moments.names).index(name) for name in (a, b))
    gram = moments.grams.sum(axis=0)
    left, right = ((moments.center[k], moments.scale[k]) for k in (i, j))
    by = np.array([gram[0, 0], gram[0, 1 + j], gram[0, 1 + i], gram[1 + i, 1 + j]])
    return float(np.outer(left, right).reshape(-1) @ by)


def test_what_is_read_where_rows_are_not_counted():
    """The attack itself: count and value, to the width of the dither."""
    partition, (income,) = study(1, fs.Policy.strict(products="any"))
    assert released_product(partition, "y ~ a + b + t", "a", "b") == pytest.approx(1.0, abs=0.2)
    read = released_product(partition, "y ~ a + b:income + t", "a", "b:income")
    assert read == pytest.approx(income, rel=0.1)


@pytest.mark.parametrize("formula", ["y ~ a + b + t", "y ~ a + b:income + t"])
@pytest.mark.parametrize("common", [0, 1, 2, 3])
def test_rows_behind_a_product_at_the_boundary(common, formula):
    partition, _ = study(common)
    model = fs.VFEMRegression.from_formula(formula, partition)
    if 0 < common < 3:
        with refused_for("rows behind a product"):
            model.fit(cov_type="none")
    else:
        assert np.isfinite(model.fit(cov_type="none").params).all()


VARIANTS = (
    "y ~ a12 + b12 + t",
    "y ~ center(a) + center(b):income + income + t",
    "y ~ a12 + b12:income + income + t",
    "y ~ C(level, Sum) + C(of, Sum):income + t",
    "y ~ C(level, Helmert) + of:log(income) + t",
    "y ~ a:c + b:income + t",
    "y ~ scale(a):c + scale(b):income + c + income + t",
    "y ~ level + of + t",  # "no" is the reference level of one factor, and not of the other
)


@pytest.mark.parametrize("formula", VARIANTS)
@pytest.mark.parametrize("common", [1, 2, 3])
def test_columns_that_are_coded_otherwise(common, formula):
    """No coding makes a product of the same columns pass: a sum of it less released sums is the value."""
    partition, _ = study(common)
    model = fs.VFEMRegression.from_formula(formula, partition)
    if common < 3:
        with refused_for("rows behind a product"):
            model.fit(cov_type="none")
    else:
        assert np.isfinite(model.fit(cov_type="none").params).all()


FITS = {
    "independent": lambda p: fs.VFEMRegression.from_formula("y ~ a + b + t", p, between="independent").fit(),
    "free": lambda p: fs.VFEMRegression.from_formula("y ~ a + b + t", p, between="free").fit(),
    "lasso": lambda p: fs.VerticalGLM.from_formula("y ~ a + b + t", p, penalty="lasso").fit(select="bic"),
    "mixed models": lambda p: fs.VerticalGLM.from_formula("y ~ a + b:income + t", p, missing="em").fit(),
    "boosting": lambda p: fs.FedFunctionBoost.from_formula("y ~ bols(a) + bols(b) + bols(t)", p).fit(),
}


@pytest.mark.parametrize("family", FITS)
@pytest.mark.parametrize("common", [1, 3])
def test_other_families_that_multiply_columns(common, family):
    partition, _ = study(common)
    if common < 3:
        with refused_for("rows behind a product"):
            FITS[family](partition)
    else:
        FITS[family](partition)


@pytest.mark.parametrize("strict_site", ["Court", "Bank"])
def test_the_larger_minimum_of_two_sites_counts(strict_site):
    loose, strict = fs.Policy.strict(min_level_count=2), fs.Policy.strict(min_level_count=6)
    policies = {**dict.fromkeys(("Clinic", "Court", "Bank", "Third"), loose), strict_site: strict}
    for common in (4, 6):
        partition, _ = study(common, policies)
        model = fs.VFEMRegression.from_formula("y ~ a + b + t", partition)
        if common < 6:
            with refused_for("rows behind a product"):
                model.fit(cov_type="none")
        else:
            assert np.isfinite(model.fit(cov_type="none").params).all()


def test_a_refusal_names_the_term_to_the_owner_and_counts():
    partition, _ = study(1, fs.Policy.strict(reasons="sent", max_refusals=3))
    model = fs.VFEMRegression.from_formula("y ~ a + b + t", partition)
    with pytest.raises(PolicyError, match=r"min_level_count.*'Bank'; 'a' has fewer.*Merge levels"):
        model.fit(cov_type="none")
    assert max(partition.sites["Court"].site_ledger.refusals.values()) == 1


def test_what_the_coordinator_carries():
    """Counts and their comparison travel sealed; the ledger shows both steps."""
    partition, _ = study(3)
    fit = fs.VFEMRegression.from_formula("y ~ a + b + t", partition).fit(cov_type="none")
    counting = [one for one in fit.ledger.entries if one.step in ("open_comparison", "share_comparison")]
    assert {one.step for one in counting} == {"open_comparison", "share_comparison"}
    assert {one.kind for one in counting} == {"sealed", "control"}


@pytest.mark.parametrize("without", [1, 3])
def test_two_fits_whose_columns_differ_in_few_rows(without):
    """The sum of a times income, less that of a without one person: each fit passes by itself."""
    rng = np.random.default_rng(5)
    a = (rng.permutation(N) < OF_A).astype(float)
    less = a.copy()
    less[np.flatnonzero(a)[:without]] = 0.0
    court = {"a": a, "less": less, "c": rng.normal(size=N)}
    others = {"Clinic": {"y": rng.normal(size=N)}, "Bank": {"income": rng.lognormal(10, 0.6, N)}}
    tables = {
        site: pd.DataFrame({"k": range(N), **held}) for site, held in {**others, "Court": court}.items()
    }
    partition = fs.ClientPartition.from_frames(tables, on="k", policy=STRICT)
    fs.VFEMRegression.from_formula("y ~ a + income", partition).fit(cov_type="none")
    model = fs.VFEMRegression.from_formula("y ~ less + income", partition)
    if without < 3:
        with refused_for("rows behind a product", site="Court"):
            model.fit(cov_type="none")
    else:
        assert np.isfinite(model.fit(cov_type="none").params).all()


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
@pytest.mark.parametrize(("each", "passes"), [(2, False), (3, True)])
def test_rows_are_counted_in_every_pattern_that_is_released(each, passes):
    """Twice as many rows; the record of the third site is missing for one half of them."""
    rng = np.random.default_rng(7)
    a, b, half = np.zeros(N), np.zeros(N), N // 2
    for start in (0, half):
        a[start : start + 40] = b[start + 40 - each : start + 80] = 1.0
    columns = {
        "Clinic": {"y": rng.normal(size=N)},
        "Court": {"a": a},
        "Bank": {"b": b},
        "Third": {"t": rng.normal(size=N)},
    }
    tables = {site: pd.DataFrame({"k": range(N), **held}) for site, held in columns.items()}
    tables["Third"] = tables["Third"][:half]
    partition = fs.ClientPartition.from_frames(tables, on="k", policy=fs.Policy.strict(discrete="any"))
    model = fs.VFEMRegression.from_formula("y ~ a + b + t", partition)
    if passes:
        fit = model.fit(cov_type="none")
        assert len(fit.exchange.moments.n) == 2
    else:
        with refused_for("rows behind a product"):
            model.fit(cov_type="none")


def test_an_approved_plan_has_the_count():
    partition, _ = study(3, fs.Policy.strict(approval="owner"))
    model = fs.VFEMRegression.from_formula("y ~ a + b + t", partition)
    with pytest.raises(ConsentError):
        model.fit(cov_type="none")
    for site in partition.sites.values():
        for digest in list(site.pending):
            site.approve(digest)
    assert np.isfinite(model.fit(cov_type="none").params).all()


def test_the_count_takes_two_rounds_as_the_dry_run_says():
    planned, taken = [], []
    for policy in (STRICT, fs.Policy.strict(products="any")):
        model = fs.VFEMRegression.from_formula("y ~ a + b + t", study(3, policy)[0])
        planned.append([steps for steps, _ in model.explain(cov_type="none").rounds])
        taken.append(len({one.round for one in model.fit(cov_type="none").ledger.entries}))
    assert set(planned[0]) - set(planned[1]) == {"open_comparison", "share_comparison"}
    assert taken[0] - taken[1] == len(planned[0]) - len(planned[1]) == 2
