"""Weights and offset of VFEM: statsmodels' WLS and GLM; with missing blocks, repeated entities."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from joint_oracle import PooledJoint

import fedstat as fs
from fedstat.errors import FormulaError, ModelError, NotAvailableError, PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")
N = 400
NAMES = ["a1", "b1", "b2", "c1"]
FORMULA = "y ~ a1 + b1 + b2 + c1"


def draw(seed=0, missing=False):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=N)
    frame = pd.DataFrame({"id": np.arange(N), "log_t": rng.uniform(-1.0, 1.5, N)})
    for name in NAMES:
        frame[name] = 0.5 * common + rng.normal(size=N)
    eta = 0.3 + 0.4 * frame["a1"] - 0.3 * frame["b1"] + 0.2 * frame["c1"]
    frame["y"] = eta + frame["log_t"] + rng.normal(size=N)
    frame["n"] = rng.poisson(np.exp(eta + frame["log_t"]))
    frame["d"] = (rng.random(N) < 1.0 / (1.0 + np.exp(-eta - frame["log_t"]))) * 1.0
    frame["w"] = rng.integers(1, 5, N) * 1.0
    frame["v"] = rng.uniform(0.2, 6.0, N)
    if missing:
        frame.loc[rng.permutation(N)[:120], ["b1", "b2"]] = np.nan
        frame.loc[rng.permutation(N)[:100], ["c1"]] = np.nan
    return frame


def partition(frame, **options):
    held = {"A": ["y", "n", "d", "w", "v", "log_t", "a1"], "B": ["b1", "b2"], "C": ["c1"]}
    frames = {
        site: frame[["id", *names]].dropna(subset=[c for c in names if c in NAMES])
        for site, names in held.items()
    }
    return fs.ClientPartition.from_frames(frames, on="id", **options)


def model(frame, formula=FORMULA, options=None, **roles):
    kind = fs.VFEMGLM if "family" in roles else fs.VFEMRegression
    return kind.from_formula(formula, partition(frame, **(options or {})), **roles)


def close(ours, theirs, errors=1e-7):
    np.testing.assert_allclose(ours.params, theirs.params[ours.params.index], atol=errors * theirs.bse.max())


# -- complete data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["vfem", "cc"])
@pytest.mark.parametrize("between", ["free", "independent"])
def test_weights_of_variances_are_weighted_least_squares(between, method):
    frame = draw()
    ours = model(frame, var_weights="v", between=between).fit(method=method)
    theirs = smf.wls(FORMULA, frame, weights=frame["v"]).fit()
    close(ours, theirs)
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-6)
    assert ours.scale == pytest.approx(theirs.scale, rel=1e-7)
    assert ours.llf == pytest.approx(theirs.llf, rel=1e-7)
    assert ours.rsquared == pytest.approx(theirs.rsquared, rel=1e-7)
    assert ours.nobs == N


def test_weights_of_frequency_are_those_of_statsmodels():
    frame = draw()
    ours = model(frame, freq_weights="w").fit()
    theirs = smf.glm(FORMULA, frame, freq_weights=frame["w"]).fit()
    close(ours, theirs)
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-6)
    assert ours.nobs == frame["w"].sum()
    repeated = frame.loc[frame.index.repeat(frame["w"].astype(int))]
    assert ours.llf == pytest.approx(smf.ols(FORMULA, repeated).fit().llf, rel=1e-7)


@pytest.mark.parametrize("between", ["free", "independent"])
def test_an_offset_is_subtracted_from_a_normal_response(between):
    frame = draw()
    ours = model(frame, offset="log_t", between=between).fit()
    theirs = smf.glm(FORMULA, frame, offset=frame["log_t"]).fit()
    close(ours, theirs)
    assert ours.llf == pytest.approx(
        smf.ols(FORMULA, frame.assign(y=frame.y - frame.log_t)).fit().llf, rel=1e-7
    )


FAMILIES = {"n": sm.families.Poisson(), "d": sm.families.Binomial()}


@pytest.mark.parametrize("between", ["free", "independent"])
@pytest.mark.parametrize("response", FAMILIES)
def test_an_offset_of_other_families_is_that_of_statsmodels(response, between):
    frame, formula = draw(), f"{response} ~ a1 + b1 + b2 + c1"
    family = FAMILIES[response]
    ours = model(frame, formula, offset="log_t", between=between, family=family).fit()
    theirs = smf.glm(formula, frame, offset=frame["log_t"], family=family).fit(tol=1e-14)
    close(ours, theirs, 1e-6)
    np.testing.assert_allclose(ours.bse, theirs.bse[ours.bse.index], rtol=1e-5)
    assert ours.llf == pytest.approx(theirs.llf, rel=1e-8)
    assert ours.llnull == pytest.approx(theirs.llnull, rel=1e-8)


def test_a_negative_binomial_response_has_an_offset_with_its_alpha():
    frame, formula = draw(), "n ~ a1 + b1 + b2 + c1"
    options = {"offset": "log_t", "between": "independent"}
    known = model(frame, formula, family=sm.families.NegativeBinomial(alpha=0.4), **options).fit()
    theirs = smf.glm(
        formula, frame, offset=frame["log_t"], family=sm.families.NegativeBinomial(alpha=0.4)
    ).fit(tol=1e-14)
    close(known, theirs, 1e-6)
    assert known.llnull == pytest.approx(theirs.llnull, rel=1e-8)


# -- missing blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["free", "independent"])
@pytest.mark.parametrize("cov_type", ["observed", "sem"])
def test_frequencies_are_repeated_entities(between, cov_type):
    frame = draw(missing=True)
    repeated = frame.loc[frame.index.repeat(frame["w"].astype(int))].reset_index(drop=True)
    repeated["id"] = np.arange(len(repeated))
    ours = model(frame, freq_weights="w", between=between).fit(cov_type=cov_type)
    theirs = model(repeated, between=between).fit(cov_type=cov_type)
    np.testing.assert_allclose(ours.params, theirs.params, atol=1e-7)
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-5)
    assert ours.llf == pytest.approx(theirs.llf, rel=1e-8)
    assert (ours.nobs, ours.df_resid) == (theirs.nobs, theirs.df_resid)
    smaller, larger = (fit.refit("y ~ a1 + b1") for fit in (ours, theirs))
    np.testing.assert_allclose(smaller.params, larger.params, atol=1e-7)
    assert ours.compare_lr_test(smaller).statistic == pytest.approx(
        theirs.compare_lr_test(larger).statistic, rel=1e-5
    )


def test_an_offset_next_to_missing_blocks_is_that_of_the_difference():
    frame = draw(missing=True)
    ours = model(frame, offset="log_t").fit()
    theirs = model(frame.assign(y=frame["y"] - frame["log_t"])).fit()
    np.testing.assert_allclose(ours.params, theirs.params, atol=1e-8)
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-7)


class WithOffset(PooledJoint):
    """The joint likelihood of all data, where the linear predictor has an offset."""

    def __init__(self, y, X, link, offset):
        super().__init__(y, X, link)
        self.offset = np.asarray(offset)

    def linear(self, theta):
        m, v = super().linear(theta)
        return m + self.offset, v


@pytest.mark.parametrize("response", FAMILIES)
def test_the_score_of_the_joint_likelihood_with_an_offset_is_zero(response):
    frame, formula = draw(2, missing=True), f"{response} ~ a1 + b1 + b2 + c1"
    result = model(frame, formula, offset="log_t", family=FAMILIES[response]).fit()
    assert not result._held.exchange.plan.changes
    link = {"n": "Log", "d": "Logit"}[response]
    oracle = WithOffset(frame[response], frame[NAMES], link, frame["log_t"])
    fit = result._fit
    beta, mu = (np.concatenate([by[k] for k in result.names]) for by in (fit.beta, fit.mu))
    at = oracle.pack(fit.beta0, beta, mu, fit.joint.cov[:-1, :-1])
    score, information = oracle.score(at), oracle.information(at)
    assert score @ np.linalg.solve(information, score) < 1e-10 * N
    np.testing.assert_allclose(result.bse, oracle.bse(information), rtol=1e-3)


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ({"freq_weights": "w", "var_weights": "v"}, "give only one of them"),
        ({"freq_weights": "b1"}, "must be at the site of the response 'y', 'A': add it"),
        ({"offset": "zz"}, "is at no site"),
        ({"offset": "y"}, "is the response"),
        ({"weights": "w"}, 'freq_weights="column"'),
        (
            {"freq_weights": "w", "formula": "d ~ a1 + b1", "family": sm.families.Binomial()},
            "only a normal response",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(roles, told):
    with pytest.raises(ModelError, match=told):
        model(draw(), **roles)


def test_weights_of_variances_need_whole_entities():
    frame = draw(missing=True)
    weighted = model(frame, var_weights="v")
    with pytest.raises(ModelError, match="method='cc', or freq_weights"):
        weighted.fit()
    complete = frame.dropna()
    close(weighted.fit(method="cc"), smf.wls(FORMULA, complete, weights=complete["v"]).fit())


@pytest.mark.parametrize("roles", [{"offset": "log_t"}, {"freq_weights": "w"}])
def test_the_iterative_exchange_has_none_of_a_normal_response(roles):
    with pytest.raises(ModelError, match="leave exchange='moments'"):
        model(draw(), between="independent", **roles).fit(exchange="iterative")


def test_dot_leaves_weights_and_offset_out_and_predictions_are_at_no_offset():
    frame = draw()
    ours = model(frame, "y ~ . - n - d - v", offset="log_t", freq_weights="w").fit()
    assert list(ours.params.index) == ["Intercept", *NAMES]
    expected = ours.params["Intercept"] + frame[NAMES] @ ours.params[NAMES]
    np.testing.assert_allclose(ours.predict(partition(frame)).to_numpy(), expected, rtol=1e-8)
    text = " ".join(str(ours.summary()).split())
    assert "'log_t' enters the linear predictor" in text and "received the weights" in text
    with pytest.raises(NotAvailableError, match="offset of zero"):
        ours.prediction_rsquared(partition(frame))
    with pytest.raises(NotAvailableError, match=r"evaluate: .* offset of zero"):
        ours.evaluate()


def test_effects_at_means_know_of_an_offset_from_a_file_too(tmp_path):
    options = {"offset": "log_t", "between": "independent", "family": sm.families.Poisson()}
    model(draw(), "n ~ a1 + b1", **options).fit().save(tmp_path / "fit")
    with pytest.raises(NotAvailableError, match="value of the offset"):
        fs.load(tmp_path / "fit").get_margeff("mean")


def test_weights_are_values_per_entity_and_stay_where_these_do():
    with pytest.raises(PolicyError, match="per entity"):
        model(draw(), freq_weights="w", options={"policy": "strict"}).fit()


def test_entities_without_a_weight_take_no_part():
    frame = draw()
    frame.loc[:9, "w"], frame.loc[10:19, "log_t"] = 0.0, np.nan
    ours = model(frame, freq_weights="w", offset="log_t", missing="drop").fit()
    used = frame.iloc[20:]
    theirs = smf.glm(FORMULA, used, freq_weights=used["w"], offset=used["log_t"]).fit()
    close(ours, theirs)
    with pytest.raises(FormulaError, match="no column"):
        model(frame, "y ~ a1 + zz", freq_weights="w")
