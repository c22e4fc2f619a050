"""Levels and units that formula or owners declare; spellings, and sites that are far from all others."""

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import (
    DescriptionError,
    DesignError,
    FormulaError,
    PolicyError,
    SpellingWarning,
    UnitsWarning,
)
from fedstat.federation.design.block import build_block
from fedstat.federation.design.formula.expression import parse_expression
from fedstat.federation.design.formula.parse import SiteTerms
from fedstat.federation.tables.published import PublishedColumn, read_published, write_published
from fedstat.models.horizontal.model import far_sites

N = 90


def tables(sites="ABC", seed=0):
    rng = np.random.default_rng(seed)
    out = {}
    for site in sites:
        frame = pd.DataFrame({"x": rng.normal(5.0, 2.0, N), "k": np.resize(["no", "a bit", "much"], N)})
        frame["code"] = np.resize([1, 2, 3], N)
        frame["y"] = frame["x"] + 0.5 * (frame["k"] == "much") + rng.normal(size=N)
        out[site] = frame
    return out


def partition(frames, **options):
    return fs.ClientPartition.from_frames(frames, layout="horizontal", **options)


def fit(frames, formula, **options):
    return fs.FederatedGLM.from_formula(formula, partition(frames, **options)).fit()


DECLARED = "y ~ x + C(k, levels=['no', 'a bit', 'much'])"


def test_declared_levels_keep_their_order():
    result = fit(tables(), DECLARED)
    assert [name.rpartition("[")[2] for name in result.params.index] == [
        "Intercept",
        "x",
        "T.a bit]",
        "T.much]",
    ]
    pooled = pd.concat(tables().values())
    X = sm.add_constant(
        np.column_stack([pooled["x"], pooled["k"] == "a bit", pooled["k"] == "much"]).astype(float)
    )
    np.testing.assert_allclose(result.params, sm.OLS(pooled["y"], X).fit().params, rtol=1e-9)
    assert "T.no" in fit(tables(), "y ~ x + C(k)").params.index[-1]  # sorted, where none are declared


def test_another_level_is_refused_and_not_quoted():
    frames = tables()
    frames["B"].loc[:9, "k"] = "HIV"
    with pytest.raises(
        DesignError, match="column 'k' at site 'B' has rows with a level that neither"
    ) as caught:
        fit(frames, DECLARED)
    assert "HIV" not in str(caught.value)
    assert len(fit(frames, "y ~ x + k").params) == 5


def test_published_levels_are_declared():
    published = {site: {"k": PublishedColumn("category", levels=("no", "much", "a bit"))} for site in "ABC"}
    assert fit(tables(), "y ~ k", published=published).params.index[1:].tolist() == [
        "k[T.much]",
        "k[T.a bit]",
    ]
    codes = {site: {"code": PublishedColumn("number", levels=(1, 2))} for site in "ABC"}
    with pytest.raises(DesignError, match="column 'code' at site 'A' has rows with a level"):
        fit(tables(), "y ~ C(code)", published=codes)


def test_codes_are_one_level_however_they_are_written():
    frames = tables()
    frames["B"]["code"] = frames["B"]["code"].astype(float)
    codes = {site: {"code": PublishedColumn("number", levels=(1, 2, 3))} for site in "ABC"}
    names = [
        fit(frames, f"y ~ C(code{more})", **known).params.index[-1].rpartition("[")[2]
        for more, known in (("", {}), ("", {"published": codes}), (", levels=[1, 2, 3]", {}))
    ]
    assert len(set(names)) == 1


def test_a_strict_site_takes_all_of_its_published_levels():
    frames = tables()
    assert fit(frames, DECLARED, policy="strict").nobs == 3 * N
    with pytest.raises(DescriptionError, match="its levels lack one of the published levels"):
        fit(frames, "y ~ C(k, levels=['no', 'much'])", policy="strict")
    frames["B"].loc[0, "k"] = "HIV"  # what is proposed to an owner leaves rare ones out
    with pytest.raises(PolicyError, match="B: refused") as caught:
        fit(frames, "y ~ k", policy="strict")
    assert "HIV" not in str(caught.value)


@pytest.mark.parametrize("formula", ["C(k, levels={}) ~ x", "x ~ C(k, levels={})"])
def test_a_site_may_lack_levels_of_others(formula):
    """The same estimates as under a policy that compares no levels."""
    frames = {site: frame.assign(x=np.arange(N) % 7) for site, frame in tables().items()}
    frames["B"] = frames["B"].replace({"k": {"much": "no"}})
    model = fs.FederatedMultinomial if formula.startswith("C") else fs.FederatedOLS
    formula = formula.format(["no", "a bit", "much"])
    found = [
        model.from_formula(
            formula, fs.ClientPartition.from_frames(frames, layout="horizontal", policy=policy)
        ).fit()
        for policy in ("strict", "open")
    ]
    np.testing.assert_allclose(found[0].params, found[1].params, rtol=1e-9)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("formula", ["C(k, levels={}) ~ x", "x ~ C(k, levels={})"])
def test_a_refusal_does_not_reveal_which_level_few_rows_have(formula, rows):
    """The level that few rows have, one that no row has, and the published ones alone."""
    texts = set()
    for more in ([], ["HIV"], ["none such"]):
        frames = {site: frame.assign(x=np.arange(N) % 7) for site, frame in tables().items()}
        frames["A"].loc[: rows - 1, "k"] = "HIV"
        partition = fs.ClientPartition.from_frames(frames, layout="horizontal", policy="strict")
        model = fs.FederatedMultinomial if formula.startswith("C") else fs.FederatedOLS
        with pytest.raises(PolicyError, match="refused for a reason that depends on rows") as caught:
            model.from_formula(formula.format(["no", "a bit", "much", *more]), partition).fit()
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_levels_are_declared_of_columns_at_one_site_as_well():
    frame = tables()["A"]
    terms = SiteTerms("A", ("C(k, levels=['no', 'a bit', 'much'])",), ("k",))
    assert build_block(frame, terms).spec.levels["k"] == ("no", "a bit", "much")
    frame.loc[:9, "k"] = "HIV"
    with pytest.raises(DesignError, match="neither the formula nor the public"):
        build_block(frame, terms)
    only = {"k": PublishedColumn("category", levels=("no", "a bit"))}
    with pytest.raises(DesignError, match="neither the formula nor the public"):
        build_block(frame, SiteTerms("A", ("k",), ("k",)), published=only)


@pytest.mark.parametrize(
    "text",
    [
        "C(k, levels=['no'])",
        "C(k, levels=['no', 'no'])",
        "C(k, levels=x)",
        "C(k, levels=[open('f'), 'b'])",
        "C(k, Treatment('else'), levels=['no', 'much'])",
        "C(k, levels=['no', 'much'], order=1)",
        "C(k, 'no')",
        "C(levels=['no', 'much'])",
    ],
)
def test_other_ways_to_declare_are_refused(text):
    with pytest.raises(FormulaError):
        parse_expression(text)


def test_a_declared_factor_reads_back_as_the_same():
    one = parse_expression("C(Q('odd k'), Treatment('much'), levels=('no', 'much'))")
    assert parse_expression(one.text) == one and one.tree.levels == ("no", "much")
    with pytest.raises(DesignError, match="declares its levels in two ways"):
        fit(tables(), "y ~ C(k, levels=['no', 'a bit', 'much']) + x:C(k, levels=['much', 'a bit', 'no'])")


@pytest.mark.parametrize("other", ["Much", " much", "MUCH ", "a  bit", "abit"])
def test_levels_that_differ_by_blanks_or_case_are_named(other):
    frames = tables()
    usual = "a bit" if "bit" in other else "much"
    frames["B"]["k"] = frames["B"]["k"].replace(usual, other)
    with pytest.warns(SpellingWarning, match=f"column 'k' has the levels .*{other!r}.* blanks or case alone"):
        fs.FederatedGLM.from_formula("y ~ k", partition(frames))
    with pytest.raises(DesignError, match="at site 'B' has rows with a level"):
        fit(frames, DECLARED)


def test_units_that_are_published_must_agree():
    published = {site: {"x": PublishedColumn("number", unit="g/l")} for site in "AB"}
    published["C"] = {"x": PublishedColumn("number", unit="mg/dl")}
    sites = partition(tables(), published=published)
    assert sites.published().loc[("C", "x"), "unit"] == "mg/dl"
    with pytest.raises(
        DesignError, match="column 'x' is published in 'g/l' at site 'A' and in 'mg/dl' at site 'C'"
    ):
        fs.FederatedGLM.from_formula("y ~ x", sites)
    fs.FederatedGLM.from_formula("y ~ k", sites)
    assert read_published(write_published(published["C"]), "here") == published["C"]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("change", "what"), [(lambda x: 1000.0 * x, "spread"), (lambda x: x + 40.0, "mean")])
def test_a_site_far_from_all_others_is_named(change, what, masked):
    frames = tables("ABCD")
    frames["C"]["x"] = change(frames["C"]["x"])
    model = fs.FederatedGLM.from_formula("y ~ x + k", partition(frames))
    with pytest.warns(
        UnitsWarning, match=f"column 'x': its {what} at site 'C' is far from those at all other"
    ):
        model.fit(masked=masked)


def test_averaging_names_it_where_sums_are_unmasked():
    frames = tables("ABCD")
    frames["C"]["x"] += 40.0
    model = fs.FedAvg.from_formula("y ~ x + k", partition(frames), family=sm.families.Gaussian())
    options = {"rounds": 1, "learning_rate": 1e-4}
    for masked, there in ((True, False), (False, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(masked=masked, **options)
        assert any(one.category is UnitsWarning for one in caught) == there


def test_sites_that_all_differ_and_shares_are_not_named():
    frames = tables("ABCD")
    for place, frame in enumerate(frames.values()):
        frame["x"] = frame["x"] + 40.0 * place  # years of four registers, one after the other
        frame["seen"] = (np.arange(N) < (3 if place == 2 else 60)).astype(float)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(frames, "y ~ x + seen + k")
    own = np.array([[[0.0], [1.0]], [[0.1], [1.1]], [[np.nan], [np.nan]], [[6.0], [1.0]]])
    assert far_sites(own) == [(3, 0, "mean")]
    assert far_sites(own[:1]) == []
