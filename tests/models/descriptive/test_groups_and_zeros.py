"""Tables with unknown groups or values, many equal values, small scales, and keywords as names."""

from __future__ import annotations

import keyword

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.tables.supports import supports_of_columns
from fedstat.models.descriptive.table_one import _form
from fedstat.models.descriptive.tables import QuantileGrid

pytestmark = pytest.mark.filterwarnings("ignore")
N = 400


def table():
    random = np.random.default_rng(1)
    frame = pd.DataFrame({"k": range(N), "s": np.resize(["A", "B"], N)})
    frame["debt"], frame["tiny"] = random.normal(124, 30, N), random.normal(0, 1e-6, N)
    frame["sex"], frame["sector"] = random.choice(["f", "m"], N), random.choice(["x", "y"], N)
    frame["cigs"] = np.where(random.random(N) < 0.56, 0.0, random.integers(1, 60, N))
    frame.loc[: N // 2 - 1, "sector"] = None
    frame.loc[np.r_[0:40, 300:340], "sex"] = None
    return frame


FRAME = table()
LOOSE = fs.Policy(min_count=1, min_level_count=1)


def by_rows(frame=FRAME, **rules):
    return fs.ClientPartition.from_frame(frame.drop(columns="k"), by="s", **rules)


def by_columns(frame=FRAME):
    parts = {"A": frame[["k", "debt", "sex"]], "B": frame[["k", "sector", "cigs"]]}
    return fs.ClientPartition.from_frames(parts, on="k")


@pytest.mark.parametrize("split", [by_rows, by_columns])
def test_rows_without_a_group_are_in_all_and_in_no_test(split):
    found = fs.table_one(split(), ["debt", "sex"], by="sector", pvalues=True)
    frame, known = found.to_frame(), FRAME.dropna(subset="sector")
    sizes = FRAME["sector"].value_counts()
    assert frame.loc[("n", "")].tolist()[1:4] == ["400", str(sizes["x"]), str(sizes["y"])]
    assert frame.loc[("sector unknown", ""), "all"] == "200"
    assert frame.loc[("debt", "mean (sd)"), ["missing", "all"]].tolist() == [
        "0",
        f"{FRAME['debt'].mean():.1f} ({FRAME['debt'].std():.1f})",
    ]
    women = (FRAME["sex"] == "f").sum()
    assert frame.loc[("sex", "f"), ["missing", "all"]].tolist() == [
        "80",
        f"{women} ({100 * women / 320:.1f})",
    ]
    x = known[known["sector"] == "x"]["debt"]
    assert frame.loc[("debt", "mean (sd)"), "x"] == f"{x.mean():.1f} ({x.std():.1f})"
    p = stats.ttest_ind(x, known[known["sector"] == "y"]["debt"], equal_var=False).pvalue
    assert frame.loc[("debt", "mean (sd)"), "P"] == f"{p:.3f}"
    assert "sector is unknown in 200 of 400 rows" in str(found)


def test_sizes_of_groups_where_every_variable_lacks_rows():
    frame = FRAME.assign(sector=np.resize(["x", "y", "y"], N))
    found = fs.table_one(by_rows(frame), ["sex"], by="sector").to_frame()
    assert found.loc[("n", "")].tolist() == ["", "400", "134", "266"]
    assert found.loc[("sex", "f"), "missing"] == "80"
    pooled = frame.groupby("sector")["sex"].value_counts()
    share = 100 * pooled["x", "f"] / pooled["x"].sum()
    assert found.loc[("sex", "f"), "x"] == f"{pooled['x', 'f']} ({share:.1f})"


def test_few_rows_without_a_group_or_a_variable_are_not_revealed():
    """Sums over all rows less those by group would be about two rows at a site: a note says what is shown."""
    frame = FRAME.assign(sector=np.resize(["x", "y", "y"], N))
    frame.loc[[0, 1, 2, 3], "sector"] = None
    refuses = fs.Policy.strict(masked_only=False, small_differences="refuse")
    p = by_rows(frame, policies=dict.fromkeys("AB", refuses))
    found = fs.table_one(p, ["debt"], by="sector")
    text = " ".join(str(found).split())
    assert '"all" is of the rows with sector for debt' in text
    known = frame.dropna(subset="sector")["debt"]
    assert found.to_frame().loc[("debt", "mean (sd)"), "all"] == f"{known.mean():.1f} ({known.std():.1f})"
    assert max(site.site_ledger.refusals.total() for site in p.sites.values()) <= 1
    # Owners of no minimum release the sums over all rows.
    loose = fs.table_one(by_rows(frame, policy=LOOSE), ["debt"], by="sector").to_frame()
    assert loose.loc[("sector unknown", ""), "all"] == "4"
    assert (
        loose.loc[("debt", "mean (sd)"), "all"] == f"{frame['debt'].mean():.1f} ({frame['debt'].std():.1f})"
    )


@pytest.mark.parametrize("by", [None, "sex"])
def test_quantiles_of_many_equal_values_are_these(by):
    frame = FRAME.assign(one=1.0, top=np.where(FRAME["cigs"] > 0, 60.0, FRAME["debt"] % 60))
    p = by_rows(frame.fillna({"sex": "f"}))
    for name, ends in (
        ("cigs", (0, 60)),
        ("one", (0, 1)),
        ("one", (0, 7)),
        ("one", (1, 2)),
        ("top", (0, 60)),
    ):
        found = fs.quantiles(p, name, by=by, bounds={name: ends})
        groups = [frame] if by is None else [part for _, part in frame.fillna({"sex": "f"}).groupby(by)]
        true = np.array([part[name].quantile([0.25, 0.5, 0.75]) for part in groups])
        equal = np.isin(true, [0.0, 1.0, 60.0])
        assert equal.any()
        np.testing.assert_array_equal(found.to_numpy()[equal], true[equal])
        assert np.abs(found.to_numpy() - true).max() <= 0.03 * (ends[1] - ends[0])


def test_a_median_at_the_end_of_the_range_is_printed():
    found = fs.table_one(by_rows(), ["cigs"], nonnormal=["cigs"], bounds={"cigs": (0, 60)}).to_frame()
    q = FRAME["cigs"].quantile([0.25, 0.5, 0.75]).tolist()
    assert found.loc[("cigs", "median [Q1, Q3]"), "all"].startswith("0 [0, ") and q[:2] == [0.0, 0.0]


@pytest.mark.parametrize("bins", [4, [0, 15, 30, 60]])
def test_a_histogram_has_the_lower_end_of_its_first_interval(bins):
    found = fs.histogram(by_rows(), "cigs", bins=bins, bounds={"cigs": (0, 60)})
    assert found.index[0].left == 0.0 and found.to_numpy().sum() == N
    assert found.iloc[0, 0] == pytest.approx((FRAME["cigs"] <= 15).sum(), abs=6)


@pytest.mark.parametrize("ends", [(0, 1), (0, 120), (-3, 4), (1e6, 1e6 + 1), (0, 1e-5), (17, 93)])
def test_steps_are_fine_round_and_have_the_ends_in_the_middle(ends):
    grid = QuantileGrid(*map(float, ends))
    width = ends[1] - ends[0]
    assert width / 2561 < grid.step <= width / 1024 * (1 + 1e-9)
    assert grid.edges[0] < ends[0] and grid.edges[-1] > ends[1] and len(grid.edges) <= 82
    assert (ends[0] - grid.edges[0]) / grid.step == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("spread", "text"), [(0.0, "5.0"), (4.0, "5.0"), (19.0, "5.0"), (0.3, "5.00"), (1e-6, "5.00e+00")]
)
def test_decimals(spread, text):
    assert f"{5:{_form(spread)}}" == text


KEYWORDS = [name for name in keyword.kwlist if name.islower()]


@pytest.mark.parametrize("name", [*KEYWORDS[:6], "lambda", "a b", "Q"])
def test_every_function_takes_keywords_as_names(name):
    frame = FRAME[["s", "debt", "cigs"]].assign(
        g=FRAME["sex"].fillna("f"), time=FRAME["debt"].abs() + 1, event=1
    )
    groups, numbers = (
        by_rows(frame.rename(columns={"g": name}).assign(k=0)),
        by_rows(frame.rename(columns={"debt": name}).assign(k=0)),
    )
    bounds = {name: (0, 300), "debt": (0, 300)}
    fs.crosstab(by_rows(frame.assign(h=np.resize(["u", "v"], N), k=0).rename(columns={"g": name})), name, "h")
    fs.table_one(groups, ["debt"], by=name)
    fs.table_one(groups, [name, "debt"])
    fs.quantiles(groups, "debt", by=name, bounds=bounds)
    fs.quantiles(numbers, name, bounds=bounds)
    fs.histogram(groups, "debt", by=name, bounds=bounds)
    fs.corr(numbers, [name, "cigs"])
    text = f"`{name}`"
    fs.KaplanMeier.from_formula(f"Surv(time, event) ~ {text}", groups).fit([100, 120, 140])
    fs.FederatedOLS.from_formula(f"{text} ~ cigs", numbers).fit()
    if name == "lambda":
        fs.FederatedMultinomial.from_formula(f"{name} ~ cigs", by_rows(three_levels(frame, name))).fit()
        cox = f"Surv(time, event) ~ cigs + strata({text})"
        fs.FederatedCox.from_formula(cox, groups).fit()


def three_levels(frame, name):
    return frame.assign(g=np.resize(["a", "b", "c"], N), k=0).rename(columns={"g": name})


@pytest.mark.parametrize("rare", ["o1", "o3", "o5"])
@pytest.mark.parametrize("other", ["low", "high"])
def test_a_refusal_between_sites_names_the_rare_level(rare, other):
    random = np.random.default_rng(4)
    job, level = random.choice(["o1", "o2", "o3", "o4", "o5"], N), random.choice(["low", "high"], N)
    level[job == rare] = "low" if other == "high" else "high"
    level[np.flatnonzero(job == rare)[0]] = other
    frame = pd.DataFrame({"k": range(N), "job": job, "level": level})
    p = fs.ClientPartition.from_frames({"A": frame[["k", "job"]], "B": frame[["k", "level"]]}, on="k")
    with pytest.raises(PolicyError, match=rf"'C\(job\)\[{rare}\]' has fewer"):
        fs.crosstab(p, "job", "level")


def test_supports_are_named_by_their_levels_whatever_row_comes_first():
    X = np.array([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = supports_of_columns(X, ["g[b]", "g[c]"], ["g", "g"])
    named = {
        name: found.columns[:, k].tolist() for k, name in enumerate(found.names) if found.columns[:, k].any()
    }
    assert named == {"g[c]": [1, 0, 0, 1], "g, reference level": [0, 1, 0, 0], "g[b]": [0, 0, 1, 0]}


@pytest.mark.parametrize("ends", [(65.0, 70.0), (40.0, 60.0), (90.0, 99.0)])
def test_a_quantile_outside_of_the_range_is_announced(ends):
    table = fs.datasets.make_survival()
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    with pytest.warns(fs.errors.DataWarning, match="outside of the range .* wider range in bounds"):
        found = fs.quantiles(partition, "age", bounds={"age": ends}).to_numpy()
    exact = table["age"].quantile([0.25, 0.5, 0.75]).clip(*ends)
    np.testing.assert_allclose(found[0], exact, atol=0.3)
