"""Sentences that say what is true of the data at hand: levels of one site, keys that do not meet, biases."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import DataWarning, DesignError, SpellingWarning


def sites(levels, policy="open", n=60):
    rng = np.random.default_rng(5)
    frames = {}
    for name, own in levels.items():
        frame = pd.DataFrame({"x": rng.normal(size=n), "sex": np.resize(list(own), n)})
        frames[name] = frame.assign(y=frame["x"] + rng.normal(size=n))
    return fs.ClientPartition.from_frames(frames, layout="horizontal", policy=policy)


def reported(partition, formula="y ~ x + sex"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs.FederatedGLM.from_formula(formula, partition)
    return [str(one.message) for one in caught if one.category is SpellingWarning]


@pytest.mark.parametrize("policy", ["open", "strict"])
def test_levels_of_one_site_alone_are_named_with_the_site(policy):
    (message,) = reported(sites({"A": "MF", "B": "MF", "C": "mf"}, policy))
    assert message.startswith(
        "column 'sex' has the levels 'F', 'f'; 'M', 'm', which differ by blanks or case"
    )
    assert "Found at one site only: levels 'f', 'm' at 'C'." in message
    assert "C(sex, levels=[...])" in message


def test_so_are_those_of_another_coding():
    (message,) = reported(sites({"A": "MF", "B": "MF", "C": "12"}))
    assert message.startswith("column 'sex' has no level at 'C' that is at another site.")
    assert "levels '1', '2' at 'C'." in message and "'M'" not in message


@pytest.mark.parametrize(
    "levels",
    [
        {"A": "MF", "B": "MF", "C": "MF"},
        {"A": "MFX", "B": "MF", "C": "MF"},  # a level that one site alone has may well be one
        {"A": "ab", "B": "cd", "C": "ef"},  # and wards are of one site each
    ],
)
def test_levels_that_may_be_as_they_are_raise_no_doubt(levels):
    assert not reported(sites(levels))


def test_keys_that_do_not_meet_are_reported_before_what_lacks_a_response():
    rng = np.random.default_rng(1)
    a = pd.DataFrame({"k": [f"P{i:03d}" for i in range(90)], "y": rng.normal(size=90)})
    b = pd.DataFrame({"k": [f"p-{i:03d}" for i in range(90)], "x": rng.normal(size=90)})
    with pytest.raises(DesignError, match="no entity in common; check that both write the key alike"):
        fs.VFEMRegression.from_formula("y ~ x", fs.ClientPartition.from_frames({"A": a, "B": b}, on="k"))
    some = b.assign(k=a["k"].where(a.index < 60, b["k"]))
    with pytest.raises(DesignError, match=r'missing for 30 of 120 .*missing="drop"'):
        fs.VFEMRegression.from_formula("y ~ x", fs.ClientPartition.from_frames({"A": a, "B": some}, on="k"))


def lacking(by, n=4_000):
    """Two sites; the second lacks entities by the value of a column, or of the response."""
    rng = np.random.default_rng(8)
    table = pd.DataFrame({"k": range(n), "x": rng.normal(size=n), "z": rng.normal(size=n)})
    table["y"] = table["x"] + table["z"] + rng.normal(size=n)
    there = table[by] < 0.5
    return table[there], fs.ClientPartition.from_frames(
        {"A": table[["k", "y", "x"]], "B": table.loc[there, ["k", "z"]]}, on="k"
    )


def test_what_complete_cases_are_said_to_be_is_what_they_are():
    """They are unbiased where a column decides who lacks a block, which is not completely at random."""
    errors = {}
    for by in ("x", "y"):
        complete, partition = lacking(by)
        with pytest.warns(DataWarning) as caught:
            result = fs.VerticalGLM.from_formula("y ~ x + z", partition).fit(lam=0.0)
        (message,) = [str(one.message) for one in caught if "left out" in str(one.message)]
        assert f"({100 * (1 - len(complete) / 4000):.1f} %)" in message
        assert "valid, with larger standard errors, if missingness depends on the columns alone" in message
        assert "biased if it depends on the response given the columns" in message
        np.testing.assert_allclose(result.params, smf.ols("y ~ x + z", complete).fit().params, rtol=1e-5)
        errors[by] = ((result.params[["x", "z"]] - 1.0).abs() / result.bse[["x", "z"]]).max()
    assert errors["x"] < 3.0 < 6.0 < errors["y"]


def noted(shift, sizes, seed=3):
    rng = np.random.default_rng(seed)
    frames = []
    for k in range(sizes):
        frame = pd.DataFrame(rng.normal(size=(100, 4)), columns=list("abcd"))
        frame["y"] = frame["a"] * (1.0 + shift * (k % 2)) + rng.normal(size=100)
        frames.append(frame.assign(site=f"S{k:02d}"))
    held = fs.ClientPartition.from_frame(pd.concat(frames), by="site")
    result = fs.FederatedGLM.from_formula("y ~ a + b + c + d", held).fit()
    return result, " ".join(result.summary().as_text().split())


@pytest.mark.filterwarnings("ignore")
def test_a_small_difference_of_sites_is_called_small():
    """Significant by many degrees of freedom, and hardly more than chance."""
    for seed in range(200):
        result, text = noted(0.12, 12, seed)
        joint = result.heterogeneity.joint
        if 0.02 < joint.pvalue < 0.05 and not result.heterogeneity.flagged:
            break
    excess = 1.0 - joint.df_denom / (joint.df_denom - 2.0) / joint.statistic
    assert joint.excess == pytest.approx(excess) and excess < 0.4
    assert f"{100 * excess:.0f} % of the variation between sites exceeds sampling error (I2)" in text
    assert "No single coefficient is shown to differ" in text and "describe no site" not in text


@pytest.mark.filterwarnings("ignore")
def test_a_large_one_has_its_size():
    result, text = noted(1.0, 6)
    row = result.heterogeneity.to_frame().loc["a"]
    assert f"I2 is large for a ({100 * row['I2']:.0f} %: standard deviation 0.5" in text
    assert "an average over sites, and need not be that of any" in text
    assert np.sqrt(row["tau2"]) == pytest.approx(0.55, abs=0.1)  # of 1 and 2, three times each


def with_single_missing_cells():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(600, 4)), columns=list("abcd")).assign(id=range(600))
    mean = table["a"] + 0.5 * table["b"] + 0.5 * table["d"]
    table["y"] = (rng.random(600) < 1.0 / (1.0 + np.exp(-mean))).astype(float)
    table["count"] = rng.poisson(np.exp(0.3 * mean))
    table.loc[rng.random(600) < 0.3, "b"] = np.nan
    table.loc[rng.random(600) < 0.1, "d"] = np.nan
    frames = {"A": table[["id", "y", "count", "a"]], "B": table[["id", "b", "c"]]}
    frames["C"] = table[["id", "d"]].assign(e=rng.normal(size=600))
    return fs.ClientPartition.from_frames(frames, on="id"), table[["b", "d"]].isna().sum()


def network(formula, partition, family, **options):
    model = fs.LASER.from_formula(formula, partition, hidden=[2], width=1)
    return model.fit(epochs=2, seed=0)


def regression(model):
    return lambda formula, partition, family, **options: model.from_formula(
        formula, partition, family=family, **options
    ).fit()


@pytest.mark.parametrize(
    ("fitted", "response", "family", "options", "conditions"),
    [
        (regression(fs.VFEMGLM), "y", sm.families.Binomial(), {}, True),
        (regression(fs.VFEMGLM), "count", sm.families.Poisson(), {}, True),
        (regression(fs.VFEMGLM), "count", sm.families.Poisson(), {"between": "independent"}, False),
        (regression(fs.VerticalGLM), "count", sm.families.Poisson(), {}, False),
        (network, "y", sm.families.Binomial(), {}, False),
    ],
    ids=["binary", "count", "count-independent", "selection", "networks"],
)
def test_columns_that_cost_entities_are_named_with_counts_at_the_top(
    fitted, response, family, options, conditions
):
    partition, missing = with_single_missing_cells()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fitted(f"{response} ~ a + b + c + d + e", partition, family, **options)
    (note,) = [n for n in result.diagnostics().itertuples() if "only some of a site's columns" in n.note]
    if conditions:
        assert "conditions on the columns that they have" in note.note
        shares = result.diagnostics().query("kind == 'missing_columns'")["note"].item()
        assert f"{100 * missing['b'] / 600:.1f} % of b" in shares
        return
    named = f"lack values of 'b' {missing['b']}, 'd' {missing['d']}"
    assert named in note.note and note.severity == "warning"
    assert any(named in str(one.message) for one in caught)
    above = result.diagnostics()["severity"].tolist()[: note.Index]
    assert set(above) <= {"critical", "warning"}
