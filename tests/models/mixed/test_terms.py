"""Random effects in every spelling, with their own coding, in nested groups, and of columns far from zero."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import EstimationError, FormulaError

FOLDER = Path(__file__).parents[2] / "reference" / "mixed"
TABLE = pd.read_csv(FOLDER / "terms.csv")
R = json.loads((FOLDER / "terms.json").read_text())
SINGLE = fs.Policy(min_count=2, min_events=0, min_level_count=1)
FAMILIES = {"poisson": sm.families.Poisson(), "binomial": sm.families.Binomial()}
pytestmark = [
    pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning"),
    pytest.mark.filterwarnings("error::fedstat.errors.ConvergenceWarning"),
]


def fitted(formula, table=TABLE, **settings):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=SINGLE)
    return fs.FederatedMixed.from_formula(formula, partition, **settings).fit()


def assert_same(fit, expected, coef=1e-6, se=1e-6, variances=1e-5):
    assert fit.converged
    assert fit.llf > expected["llf"] - 1e-6
    assert_allclose(fit.llf, expected["llf"], rtol=1e-6)
    assert_allclose(np.sort(fit.params), np.sort(np.ravel(expected["coef"])), rtol=coef, atol=coef)
    assert_allclose(np.sort(fit.bse), np.sort(np.ravel(expected["se"])), rtol=se)
    found = fit.variances["variance"]
    assert_allclose(np.sort(found), np.sort(np.ravel(expected["variances"])), rtol=variances, atol=variances)


@pytest.mark.parametrize("case", range(len(R["linear"])), ids=lambda k: R["linear"][k]["formula"])
def test_terms_of_linear_models_are_those_of_lme4(case):
    expected = R["linear"][case]
    assert_same(fitted(expected["formula"].replace("^2", " ** 2")), expected)


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, k) for kind in FAMILIES for k in range(len(R[kind]))], ids=str
)
def test_terms_of_generalized_models_are_those_of_lme4(kind, case):
    """lme4 minimizes without derivatives, and takes differences for the errors."""
    expected = R[kind][case]
    fit = fitted(expected["formula"].replace("since", "I(year - 2014)"), family=FAMILIES[kind])
    assert_same(fit, expected, coef=1e-3, se=2e-2, variances=2e-3)


@pytest.fixture(scope="module")
def ordered():
    return fitted("y ~ f * x + (1 + x + f:x | g)")


@pytest.mark.parametrize("effects", ["f : x + x + 1", "x + f:x"])
def test_the_order_of_factors_and_terms_does_not_matter(effects, ordered):
    expected, fit = ordered, fitted(f"y ~ x * f + ({effects} | g)")
    assert_allclose(fit.llf, expected.llf, rtol=1e-10)
    assert_allclose(np.sort(fit.variances["std_dev"]), np.sort(expected.variances["std_dev"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("formula", "add", "reml"),
    [
        ("y ~ x + (1 + x | g)", 1e8, True),
        ("y ~ x + (1 + x | g)", 1e4, False),
        ("y ~ 0 + f + (1 | g)", 1e8, False),
        ("y ~ 0 + f + (1 | g)", 1e4, True),
        ("y ~ x + (1 | ward/place)", 1e8, True),
    ],
)
def test_a_constant_in_the_response_moves_the_intercept_alone(formula, add, reml):
    base, fit = fitted(formula, reml=reml), fitted(formula, TABLE.assign(y=TABLE["y"] + add), reml=reml)
    assert fit.converged and not fit.singular
    digits = max(1e-8, 1e-14 * add)
    assert_allclose(fit.llf, base.llf, rtol=digits)
    assert_allclose(fit.bse, base.bse, rtol=10 * digits)
    assert_allclose(fit.df, base.df, rtol=1e3 * digits)
    assert_allclose(fit.variances["variance"], base.variances["variance"], rtol=1e3 * digits)
    moved = fit.params - base.params
    means = [name for name in moved.index if name == "Intercept" or formula.startswith("y ~ 0")]
    assert_allclose(moved[means], add, rtol=1e-12, atol=1e-7)
    assert_allclose(moved.drop(means), 0.0, atol=max(1e-7, 1e-14 * add))
    assert_allclose(fit.r_squared(), base.r_squared(), rtol=1e4 * digits)
    if reml:
        kr, known = fit.coefficient_tests("kenward-roger"), base.coefficient_tests("kenward-roger")
        assert_allclose(kr[["std_error", "df"]], known[["std_error", "df"]], rtol=1e4 * digits)


UNITS = [
    ("{y} ~ x + (1 + {x} | g)", "year", 2014.0, 1.0),
    ("{y} ~ x + {x} + (1 + {x} | g)", "year", 2014.0, 1.0),
    ("{y} ~ x + {x} + (0 + f + {x} | g)", "year", 2014.0, 1.0),
    ("{y} ~ {x} + (1 + {x} | g)", "euros", 0.0, 1e5),
    ("{y} ~ {x} + (1 + {x} || g)", "euros", 0.0, 1e5),
    ("{y} ~ {x} + (0 + {x} | g)", "moles", 0.0, 1e-5),
    ("{y} ~ {x} + (1 + {x} | g)", "seconds", 1e8, 1.0),
]


CASES = [("normal", k) for k in range(7)] + [("poisson", 2), ("poisson", 3), ("binomial", 0), ("binomial", 6)]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_units_and_origins_of_the_columns_of_effects_do_not_matter(family, case):
    """The fit is that of the centered and scaled column, in the units of the data."""
    formula, name, origin, unit = UNITS[case]
    response = {"normal": "y", "poisson": "count", "binomial": "event"}[family]
    plain = TABLE["year"] - 2014 if name == "year" else TABLE["x"]
    table = TABLE.assign(plain=plain, **{name: origin + unit * plain})
    settings = {} if family == "normal" else {"family": FAMILIES[family]}
    base = fitted(formula.format(y=response, x="plain"), table, **settings)
    fit = fitted(formula.format(y=response, x=name), table, **settings)
    assert fit.converged
    if family == "normal":  # the determinant of the columns is in a restricted likelihood
        moved = np.log(unit) if "{x} +" in formula.split("(")[0] else 0.0
        assert_allclose(fit.llf, base.llf - moved, rtol=1e-8)
    else:
        assert_allclose(fit.llf, base.llf, rtol=1e-9)
    both = {"plain": name}
    slopes = [one for one in base.params.index if one != "Intercept"]
    scales = np.array([unit if one == "plain" else 1.0 for one in slopes])
    assert_allclose(
        fit.params[[both.get(one, one) for one in slopes]] * scales, base.params[slopes], rtol=2e-4
    )
    assert_allclose(fit.bse[[both.get(one, one) for one in slopes]] * scales, base.bse[slopes], rtol=1e-5)
    sd = fit.variances["std_dev"].xs(name, level="effect").iloc[0]
    assert_allclose(sd * unit, base.variances["std_dev"].xs("plain", level="effect").iloc[0], rtol=1e-4)
    assert_allclose(fit.icc, base.icc, rtol=1e-4)
    effects = fit.group_effects(table)
    assert_allclose(
        fit.predict(table, effects=effects),
        base.predict(table, effects=base.group_effects(table)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_profile_intervals_do_not_depend_on_the_origin_of_a_column():
    table = TABLE.assign(since=TABLE["year"] - 2014)
    base, fit = (fitted(f"y ~ x + (1 + {name} | g)", table) for name in ("since", "year"))
    for method in ("profile", "jackknife"):
        found = [one.conf_int_variances(method=method).drop(columns="method") for one in (base, fit)]
        slopes = [one.drop(index="Intercept", level="effect") for one in found]
        assert_allclose(slopes[1], slopes[0], rtol=2e-4)
    assert_allclose(fit.test_variances().iloc[1], base.test_variances().iloc[1], rtol=1e-4)


def test_nested_groups_are_those_of_unique_labels():
    table = TABLE.assign(cell=TABLE["ward"].astype(str) + " " + TABLE["place"].astype(str))
    base, fit = fitted("y ~ x + (1 | ward) + (1 | cell)", table), fitted("y ~ x + (1 | ward/place)", table)
    assert fit.variances.index.get_level_values("group").tolist() == ["ward", "ward:place", "Residual"]
    assert_allclose(fit.llf, base.llf, rtol=1e-12)
    found, known = fit.group_effects(table), base.group_effects(table)
    assert_allclose(found["estimate"], known["estimate"], rtol=1e-6, atol=1e-8)
    assert found["label"].iloc[-1] == "10:6"
    assert_allclose(fit.predict(table, effects=found), base.predict(table, effects=known), rtol=1e-6)
    assert "ward:place (60)" in str(fit.summary())
    site = fitted("y ~ x + (1 | site/g)", table).variances.index.get_level_values("group")
    assert site.tolist() == ["site", "site:g", "Residual"]


def test_effects_without_a_fixed_term_are_predicted(tmp_path):
    fit = fitted("y ~ x + (0 + f | g)")
    fit.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed")
    effects = again.group_effects(TABLE)
    assert effects["effect"].unique().tolist() == ["f[a]", "f[b]", "f[c]"]
    assert_allclose(
        again.predict(TABLE, effects=effects), fit.predict(TABLE, effects=fit.group_effects(TABLE))
    )
    # The fixed part needs no column of the effects.
    assert again.predict(TABLE[["x"]]).notna().all()
    residual = TABLE["y"] - again.predict(TABLE, effects=effects)
    assert residual.std() < (TABLE["y"] - again.predict(TABLE)).std()


@pytest.mark.parametrize(
    ("formula", "error", "match"),
    [
        (
            "y ~ x + (1 + x + I(2 * x) | g)",
            EstimationError,
            r"'x', 'I\(2 \* x\)' of its effects are collinear",
        ),
        ("y ~ x + (1 | g + ward)", FormulaError, r"groups are a column.*\(1 \| a/b\)"),
        ("y ~ x + (1 + nothing | g)", FormulaError, "no column 'nothing'"),
        ("y ~ x + (1 | g:nothing)", FormulaError, "no column 'nothing'"),
        ("y ~ x + (x:f | g) + (0 + f:x | g)", FormulaError, "same random effect twice"),
        ("y ~ x + (1 | f:g) + (1 | g:f)", FormulaError, "same random effect twice"),
    ],
)
def test_random_effects_that_are_none_are_refused(formula, error, match):
    with pytest.raises(error, match=match):
        fitted(formula)
