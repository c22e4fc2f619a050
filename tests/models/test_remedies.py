"""Texts that a statistician meets first: each names a remedy, and the remedy runs, in every family."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import polars
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DesignError, EstimationError, FormulaError, ModelError, PartitionError, PolicyError

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
BINOMIAL, POISSON = sm.families.Binomial(), sm.families.Poisson()
OPEN = fs.Policy(min_count=1, min_level_count=1, min_events=1, max_parameters=1e9)


def table():
    rng, n = np.random.default_rng(2), 360
    t = pd.DataFrame({"site": np.resize(list("abc"), n), "x": rng.normal(50, 10, n), "z": rng.normal(size=n)})
    t["k"], t["person"] = rng.integers(0, 4, n), t["site"] + (np.arange(n) // 6).astype(str)
    t["n"], t["others"] = t["k"] + rng.integers(1, 4, n), rng.integers(1, 4, n)
    t["y"], t["e"], t["time"] = t["z"] + rng.normal(size=n), rng.integers(0, 2, n), rng.integers(1, 9, n)
    t["code"], t["three"], t["year"] = t["e"] + 1, rng.integers(0, 3, n), rng.integers(2005, 2020, n)
    t["comma"] = [f"{value:.3f}".replace(".", ",") for value in t["z"]]
    t["m"], t["arm"] = rng.choice(list("uvw"), n), rng.choice(list("ABCDE"), n)
    return t


ROWS = table()
SITES = fs.ClientPartition.from_frame(ROWS, by="site", policy=OPEN)


def fit(family, formula, /, *, arguments=None, partition=SITES, **settings):
    if family == "FederatedGEE":
        settings["groups"] = "person"
    if family == "FederatedMixed":
        formula = f"{formula} + (1 | person)"
    given = dict(arguments or {}) | ({"rounds": 2} if family == "FedAvg" else {})
    return getattr(fs, family).from_formula(formula, partition, **settings).fit(**given)


BINARY = ["GLORE", "FederatedGLM", "FederatedGEE", "FederatedMixed", "FedAvg"]


@pytest.mark.parametrize("family", BINARY)
def test_two_counts_and_codes_that_are_no_zeros_and_ones(family):
    settings = {} if family == "GLORE" else {"family": BINOMIAL}
    for written in ("k + others ~ z", "n + I(k - n) + others ~ z"):
        with pytest.raises(DesignError, match=r"write cbind\(events, others\)"):
            fit(family, written, **settings)
    for response in ("code", "three"):
        match = rf"as in {response} == 2 or {response} > 1; .* FederatedOrdinal or FederatedMultinomial"
        with pytest.raises(DesignError, match=match):
            fit(family, f"{response} ~ z", **settings)
    fit(family, "code == 2 ~ z", **settings)
    if family != "FederatedGEE":
        fit(family, "cbind(k, others) ~ z", **settings)


def test_the_counts_of_both_outcomes_are_those_of_statsmodels():
    pooled = smf.glm("k + others ~ z", ROWS, family=sm.families.Binomial()).fit()
    here = fit("FederatedGLM", "cbind(k, others) ~ z", family=BINOMIAL)
    assert_allclose(here.params, pooled.params, rtol=1e-7)


def test_arithmetic_may_have_i():
    a, b = fit("FederatedOLS", "y + I(z - x) ~ e"), fit("FederatedOLS", "y + z - x ~ e")
    assert_allclose(a.params, b.params, rtol=1e-12)


@pytest.mark.parametrize("basis", ["cr", "bs"])
def test_knots_in_brackets_are_knots(basis):
    center = ", constraints='center'" if basis == "cr" else ""
    more = f"lower_bound=0, upper_bound=100{center}"
    a, b = (fit("FederatedOLS", f"y ~ {basis}(x, knots={k}, {more})") for k in ("[40, 50]", "(40, 50)"))
    assert a.params.equals(b.params)
    with pytest.raises(FormulaError, match=r"ns\(x, df=4\), .*, also with knots=\(40, 60\)"):
        fit("FederatedOLS", "y ~ spline(x)")


RESPONSES = {
    "FederatedOLS": "y",
    "GLORE": "e",
    "FederatedGEE": "y",
    "FederatedMixed": "y",
    "FederatedCox": "Surv(time, e)",
    "FederatedOrdinal": "three",
    "FederatedMultinomial": "three",
}


@pytest.mark.parametrize("family", RESPONSES)
def test_powers_of_a_year_are_centered(family):
    left = RESPONSES[family]
    with pytest.raises(EstimationError, match=r"center the column: I\(\(year - 2000\) \*\* 2\)"):
        fit(family, f"{left} ~ year + I(year**2) + I(year**3)")
    assert fit(family, f"{left} ~ year + I((year - 2012)**2) + I((year - 2012)**3)").params.notna().all()


@pytest.mark.parametrize("family", ["FederatedOLS", "FederatedGLM"])
def test_a_response_without_digits(family):
    far = fs.ClientPartition.from_frame(ROWS.assign(y=ROWS["y"] + 1e12), by="site", policy=OPEN)
    with pytest.raises(EstimationError, match=r"'y' has a mean so large .* 'y - 2000 ~ x'"):
        fit(family, "y ~ z", partition=far)
    near = fit(family, "y - 1000000000000 ~ z", partition=far)
    assert_allclose(near.params, fit(family, "y ~ z").params, atol=1e-4)  # 1e12 keeps four decimals


@pytest.mark.parametrize("family", ["FederatedOLS", "FederatedCox", "FederatedOrdinal", "FederatedMixed"])
@pytest.mark.parametrize("policy", ["open", "default"])
def test_text_that_reads_as_numbers(family, policy):
    partition = fs.ClientPartition.from_frame(ROWS, by="site", policy=OPEN if policy == "open" else None)
    with pytest.raises((PolicyError, DesignError), match="text that reads as numbers: convert it"):
        fit(family, f"{RESPONSES[family]} ~ comma", partition=partition)
    converted = ROWS.assign(comma=pd.to_numeric(ROWS["comma"].str.replace(",", ".")))
    partition = fs.ClientPartition.from_frame(converted, by="site", policy=OPEN)
    assert fit(family, f"{RESPONSES[family]} ~ comma", partition=partition).params.notna().all()


def test_text_of_numbers_in_tables_and_between_columns():
    with pytest.raises(PolicyError, match="text that reads as numbers"):
        fs.table_one(fs.ClientPartition.from_frame(ROWS, by="site"), ["comma"])
    columns = fs.ClientPartition.from_frame(ROWS, columns={"A": ["y"], "B": ["comma"]})
    with pytest.raises((PolicyError, DesignError), match="text that reads as numbers"):
        fs.VFEMRegression.from_formula("y ~ comma", columns).fit()
    # Few codes are levels, and words are no numbers.
    with pytest.raises((PolicyError, DesignError), match="looks like an identifier"):
        words = ROWS.assign(comma=[f"id {i}" for i in range(len(ROWS))])
        fit("FederatedOLS", "y ~ comma", partition=fs.ClientPartition.from_frame(words, by="site"))


@pytest.mark.parametrize("role", ["exposure", "offset"])
def test_new_rows_without_the_exposure(role):
    if role == "exposure":
        found, what = fit("FederatedGLM", "k ~ z", family=POISSON, exposure="n"), "1 predicts a rate"
    else:
        found, what = fit("FederatedGLM", "k ~ z + offset(log(n))", family=POISSON), "read by the offset"
    new = ROWS[["z"]].head(2)
    for call in (found.predict, found.get_prediction, found.augment):
        with pytest.raises(DesignError, match=rf"new rows lack the column 'n' \(.*{what}"):
            call(new)
    with pytest.raises(DesignError, match=r"lack the column 'z' \(a covariate of the model\), 'n'"):
        found.predict(ROWS[["x"]])
    rate = np.exp(found.params["Intercept"] + found.params["z"] * new["z"])
    assert_allclose(found.predict(new.assign(n=1)), rate)


NEW = {"z": [0.5, -1.0], "person": ["a0", "b1"]}
HELD = {"dict": NEW, "polars": polars.DataFrame(NEW), "arrow": polars.DataFrame(NEW).to_arrow()}


@pytest.mark.parametrize("family", [*RESPONSES, "FedAvg"])
def test_new_rows_of_other_packages(family):
    settings = {"family": BINOMIAL} if family == "FedAvg" else {}
    found = fit(family, f"{RESPONSES.get(family, 'e')} ~ z", **settings)
    right = np.asarray(found.predict(pd.DataFrame(NEW)))
    calls = [found.predict, *([found.augment] if hasattr(found, "augment") else [])]
    for held in HELD.values():
        assert_allclose(found.predict(held), right)
        assert all(len(call(held)) == 2 for call in calls)
    assert_allclose(found.predict({"z": 0.5, "person": "a0"}), right[:1])
    with pytest.raises(ModelError, match=r"received pandas Series \(\.to_frame\(\) .* \.to_frame\(\)\.T"):
        found.predict(pd.Series({"z": 0.5}))
    assert_allclose(
        found.predict(pd.Series({"z": 0.5, "person": "a0"}).to_frame().T.infer_objects()), right[:1]
    )
    with pytest.raises(ModelError, match="columns of the new rows have different lengths"):
        found.predict({"z": [1.0, 2.0], "x": [1.0]})


def test_baseline_hazards_and_profiles_of_dicts():
    found = fit("FederatedCox", "Surv(time, e) ~ z")
    hazard = found.baseline_hazard([2, 4])
    pd.testing.assert_frame_equal(hazard.survival({"z": [0.0]}), hazard.survival(pd.DataFrame({"z": [0.0]})))
    assert len(found.compare_profiles({"z": [1.0, 2.0]}, {"z": 0.0})) == 2


def test_the_site_in_the_index():
    indexed = fs.ClientPartition.from_frame(ROWS.set_index("site"), by="site", policy=OPEN)
    assert fit("FederatedOLS", "y ~ z", partition=indexed).params.equals(fit("FederatedOLS", "y ~ z").params)


def test_the_names_that_are_meant():
    found = fit("FederatedMultinomial", "m ~ arm")
    both, one = "'v: arm[T.B]' or 'w: arm[T.B]'", "'v: arm[T.B]'"
    for written, meant in {
        "arm[B] = arm[C]": both,
        "v: arm[B] = v: arm[C]": one,
        "arm[T.B] = 0": both,
    }.items():
        with pytest.raises(ModelError, match=re.escape(f"did you mean {meant}?")):
            found.wald_test(written)
    assert 0.0 < found.wald_test("v: arm[T.B] = v: arm[T.C]").pvalue < 1.0
    with pytest.raises(ModelError, match=r"did you mean 'arm\[T.B\]'\?"):
        fit("FederatedOLS", "y ~ arm").t_test("arm[B] = 0")


def test_matched_sets():
    rng = np.random.default_rng(3)
    sets = pd.DataFrame({"site": np.repeat(list("abc"), 60), "set": np.repeat(np.arange(60), 3).astype(str)})
    sets = sets.assign(case=np.tile([1, 0, 0], 60), x=rng.normal(size=180), one=1)
    partition = fs.ClientPartition.from_frame(sets, by="site", policy=OPEN)
    with pytest.raises(DesignError, match=r"Surv\(2 - case, case\) ~ x \+ strata\(set\)"):
        fit("FederatedCox", "Surv(one, case) ~ x + strata(set)", partition=partition)
    here = fit("FederatedCox", "Surv(2 - case, case) ~ x + strata(set)", partition=partition)
    clogit = sm.ConditionalLogit(sets["case"], sets[["x"]], groups=sets["set"]).fit(disp=0)
    assert_allclose(here.params, clogit.params, rtol=1e-3)  # its optimizer stops early
    assert_allclose(here.bse, clogit.bse, rtol=1e-5)


def test_columns_that_the_sites_own_baselines_absorb():
    for term in ("C(site)", "level"):
        partition = fs.ClientPartition.from_frame(
            ROWS.assign(level=ROWS["site"].map({"a": 1.0, "b": 2.0, "c": 5.0})), by="site", policy=OPEN
        )
        with pytest.raises(EstimationError, match="baselines absorb"):
            fit("FederatedCox", f"Surv(time, e) ~ z + {term}", partition=partition)
        common = {"baseline": "common", "grid": 1, "until": 9}
        assert fit("FederatedCox", f"Surv(time, e) ~ z + {term}", partition=partition, arguments=common)


@pytest.mark.parametrize("model", ["KaplanMeier", "CumulativeIncidence"])
def test_grids(model):
    event = "e" if model == "KaplanMeier" else "C(m, levels=['u', 'v', 'w'])"
    made = getattr(fs, model).from_formula(f"Surv(time, {event}) ~ 1", SITES)
    assert len(made.fit().times) > 1  # a grid is proposed
    with pytest.raises(ModelError, match=r"at most 1,000 points, received 1,100. Use grid=2"):
        made.fit(grid=1, until=1100)
    assert len(made.fit(grid=1, until=8).times) > 1


@pytest.mark.parametrize("family", ["KaplanMeier", "FederatedCox"])
def test_time_and_event_that_are_exchanged(family):
    with pytest.raises(DesignError, match="are time and event exchanged"):
        grid = {"grid": 1, "until": 9} if family == "KaplanMeier" else {}
        fit(family, "Surv(e, time) ~ 1" if grid else "Surv(e, time) ~ z", arguments=grid)


@pytest.mark.parametrize("family", ["linear", "binary"])
def test_one_row_in_each_group(family):
    alone = fs.ClientPartition.from_frame(
        ROWS.assign(row=np.arange(len(ROWS)).astype(str)), by="site", policy=OPEN
    )
    settings = {} if family == "linear" else {"family": BINOMIAL}
    with pytest.raises(EstimationError, match="one row in each group: its variance cannot be estimated"):
        response = "y" if family == "linear" else "e"
        fs.FederatedMixed.from_formula(f"{response} ~ z + (1 | row)", alone, **settings).fit()


def test_exposure_of_mixed_models():
    a = fit("FederatedMixed", "k ~ z", family=POISSON, exposure="n")
    b = fit("FederatedMixed", "k ~ z + offset(log(n))", family=POISSON)
    assert_allclose(a.params, b.params, rtol=1e-6)


def test_clusters_are_named_once():
    a = fit("FederatedOLS", "y ~ z", arguments={"cov_type": "cluster", "cov_kwds": {"groups": "person"}})
    b = fs.FederatedOLS.from_formula("y ~ z", SITES, labels=["person"])
    assert a.bse.equals(b.fit(cov_type="cluster", cov_kwds={"groups": "person"}).bse)


def test_names_with_blanks():
    with pytest.raises(FormulaError, match=r"'at' after another name .* in backticks"):
        fs.FederatedOLS.from_formula("y ~ age at entry", SITES)


def test_what_is_no_mapping_no_list_and_no_column():
    with pytest.raises(PartitionError, match="expected a mapping of the sites' names to their tables"):
        fs.ClientPartition.from_frames([ROWS], layout="horizontal")
    with pytest.raises(ModelError, match="pool: expected a list of results"):
        fs.pool(fit("FederatedOLS", "y ~ z"))
    with pytest.raises(ModelError, match="groups: expected a text, such as the name of a column"):
        fs.FederatedGEE.from_formula("y ~ z", SITES, groups=ROWS["person"])
    with pytest.raises(ModelError, match="there is no column 'zz' at any site"):
        fs.quantiles(SITES, "zz")
    for call in (lambda: fs.table_one(SITES, ["z"], by="armm"), lambda: fs.crosstab(SITES, "armm", "m")):
        with pytest.raises(
            ModelError, match=r"columns: there is no column 'armm' at any site\. Did you mean 'arm'"
        ):
            call()
    with pytest.raises(FormulaError, match=r"'brr' is not a curve .*fs\.Curve\('brr_\*'\)"):
        fs.FedFunctionBoost.from_formula("y ~ bsignal(brr)", SITES)
    with pytest.raises(ModelError, match=r"'lam' is an argument of VerticalGLM.fit"):
        columns = fs.ClientPartition.from_frame(ROWS, columns={"A": ["y"], "B": ["z"]})
        fs.VerticalGLM.from_formula("y ~ z", columns, alpha=1.0)
