"""Empty cells of interactions: the column is left out as R does, in every family over rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.federation.design.horizontal_design import is_interaction

F = sm.families


def cells(empty: tuple[str, str]) -> pd.DataFrame:
    """Forty rows of each combination of a and b but one."""
    rng = np.random.default_rng(4)
    kept = [(a, b) for a in "pqr" for b in "uv" if (a, b) != empty]
    frame = pd.DataFrame([cell for cell in kept for _ in range(40)], columns=["a", "b"])
    n = len(frame)
    frame["site"] = np.resize(list("ABCD"), n)
    frame["x"] = rng.normal(size=n)
    frame["e"] = rng.integers(0, 2, n)
    frame["y"] = rng.normal(size=n) + (frame["a"] == "q")
    frame["count"] = rng.poisson(2, n)
    frame["grade"] = rng.integers(0, 3, n)
    frame["kind"] = rng.choice(["l", "m", "n"], n)
    frame["time"] = rng.exponential(10.0, n) + 1.0
    frame["group"] = np.arange(n) // 5
    frame["cell"] = frame["a"] + frame["b"]
    return frame


def over_rows(model, left: str, more: str = "", **options):
    def fit(frame: pd.DataFrame, right: str, **policy):
        partition = fs.ClientPartition.from_frame(frame, by="site", **policy)
        return model.from_formula(f"{left} ~ {right} + x{more}", partition, **options).fit()

    return fit


FAMILIES = {
    "OLS": over_rows(fs.FederatedOLS, "y"),
    "GLORE": over_rows(fs.GLORE, "e"),
    "Poisson": over_rows(fs.FederatedGLM, "count", family=F.Poisson()),
    "GEE": over_rows(fs.FederatedGEE, "e", groups="group", family=F.Binomial()),
    "mixed": over_rows(fs.FederatedMixed, "y", " + (1 | group)"),
    "mixed logit": over_rows(fs.FederatedMixed, "e", " + (1 | group)", family=F.Binomial()),
    "ordinal": over_rows(fs.FederatedOrdinal, "grade"),
    "multinomial": over_rows(fs.FederatedMultinomial, "kind"),
    "AFT": over_rows(fs.FederatedAFT, "Surv(time, e)", distribution="loglogistic"),
    "Cox": over_rows(fs.FederatedCox, "Surv(time, e)"),
}


EMPTY = {"r u": ("r", "u"), "r v": ("r", "v"), "p u": ("p", "u")}
CASES = [(name, "r v") for name in FAMILIES]
CASES += [(name, one) for name in ("OLS", "Cox") for one in ("r u", "p u")]


@pytest.mark.parametrize(("name", "empty"), CASES)
def test_an_empty_cell_gives_the_likelihood_of_the_others(name, empty):
    frame = cells(EMPTY[empty])
    ours, pooled = FAMILIES[name](frame, "a * b"), FAMILIES[name](frame, "cell")
    assert len(ours.params) == len(pooled.params)
    if name == "mixed":  # the restricted likelihood depends on the coding, by a constant
        assert ours.scale == pytest.approx(pooled.scale, rel=1e-6)
    elif hasattr(ours, "llf"):
        assert ours.llf == pytest.approx(pooled.llf, rel=1e-9)
    assert ours.params["x" if name != "multinomial" else "m: x"] == pytest.approx(
        pooled.params["x" if name != "multinomial" else "m: x"], rel=1e-6
    )
    assert "a[T.r]:b[T.v]" in " ".join(str(ours.summary()).split())
    assert not any("a[T.r]:b[T.v]" in text for text in ours.params.index)


def test_coefficients_and_degrees_of_freedom_are_those_of_r():
    # R: glm(e ~ a * b + x, binomial) has NA for ar:bv; the same model without this column.
    frame = cells(("r", "v"))
    ours = FAMILIES["GLORE"](frame, "a * b")
    frame["own"] = ((frame["a"] == "q") & (frame["b"] == "v")).astype(float)
    pooled = smf.logit("e ~ a + b + own + x", frame).fit(disp=0, tol=1e-14)
    names = ["Intercept", "a[T.q]", "a[T.r]", "b[T.v]", "a[T.q]:b[T.v]", "x"]
    theirs = ["Intercept", "a[T.q]", "a[T.r]", "b[T.v]", "own", "x"]
    np.testing.assert_allclose(ours.params[names], pooled.params[theirs], rtol=1e-6)
    np.testing.assert_allclose(ours.bse[names], pooled.bse[theirs], rtol=1e-6)
    assert ours.df_resid == pooled.df_resid
    # R leaves the missing coefficient out of a prediction for the empty cell.
    row = pd.DataFrame({"a": ["r"], "b": ["v"], "x": [0.0]})
    eta = pooled.params[["Intercept", "a[T.r]", "b[T.v]"]].sum()
    np.testing.assert_allclose(ours.predict(row), 1.0 / (1.0 + np.exp(-eta)), rtol=1e-6)


def test_cells_that_are_empty_at_different_sites_are_no_alias():
    rng = np.random.default_rng(5)
    frame = cells(("", ""))
    frame["y"] = rng.normal(size=len(frame))
    frame = frame[~((frame["site"] == "A") & (frame["cell"] == "rv"))]
    frame = frame[~((frame["site"] == "B") & (frame["cell"] == "qv"))]
    ours = FAMILIES["OLS"](frame, "a * b")
    pooled = smf.ols("y ~ a * b + x", frame).fit()
    np.testing.assert_allclose(ours.params[pooled.params.index], pooled.params, rtol=1e-8)


def test_three_factors_and_numbers_that_are_constant_within_a_level():
    rng = np.random.default_rng(6)
    frame = cells(("r", "v")).assign(c=np.resize(["g", "g", "h"], 200))
    ours = FAMILIES["OLS"](frame, "a * b * c")
    pooled = smf.ols("y ~ a * b * c + x", frame).fit()
    assert ours.llf == pytest.approx(pooled.llf, rel=1e-10)
    assert ours.df_resid == pooled.df_resid
    frame["z"] = np.where(frame["a"] == "r", 3.0, rng.normal(size=len(frame)))
    ours = FAMILIES["OLS"](frame, "a * z")
    pooled = smf.ols("y ~ a * z + x", frame).fit()
    assert ours.llf == pytest.approx(pooled.llf, rel=1e-10)
    assert ours.df_resid == pooled.df_resid


def test_the_strict_policy_saved_fits_and_ledgers(tmp_path):
    frame = cells(("r", "v"))
    frame = pd.concat([frame.assign(x=frame["x"] + k) for k in range(3)], ignore_index=True)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=fs.Policy.strict())
    ours = fs.GLORE.from_formula("e ~ a * b + x", partition).fit()
    plain = fs.GLORE.from_formula("e ~ cell + x", fs.ClientPartition.from_frame(frame, by="site")).fit()
    assert ours.llf == pytest.approx(plain.llf, rel=1e-9)
    ours.save(tmp_path / "fit.json")
    again = fs.load(tmp_path / "fit.json")
    assert "a[T.r]:b[T.v]" in " ".join(str(again.summary()).split())
    np.testing.assert_array_equal(again.predict(frame.head()), ours.predict(frame.head()))


def test_measured_columns_that_follow_from_others_remain_an_error():
    frame = cells(("r", "v"))
    frame["twice"] = 2.0 * frame["x"]
    with pytest.raises(EstimationError, match="'x' follows from 'twice'"):
        FAMILIES["OLS"](frame, "a * b + twice")


def test_only_terms_of_several_factors_are_interactions():
    texts = {"a:b": True, "a": False, "Q('a:b')": False, "bs(x, df=4):g": True, "I(x ** 2)": False}
    assert {text: is_interaction(text) for text in texts} == texts
