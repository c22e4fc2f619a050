"""Marginal effects of variables that change several columns: derivatives of the pooled prediction."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from scipy.optimize import approx_fprime

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.design.derivatives import direction_of

pytestmark = pytest.mark.filterwarnings("ignore")
F, N, H = sm.families, 450, 1e-4
BINOMIAL, PROBIT, POISSON = F.Binomial(), F.Binomial(F.links.Probit()), F.Poisson()


def table():
    random = np.random.default_rng(5)
    frame = pd.DataFrame({"s": np.resize(list("ABC"), N), "x": random.normal(50, 12, N)})
    frame["z"], frame["g"] = random.uniform(1, 9, N), random.choice(list("abc"), N)
    frame["c"], frame["w"] = np.arange(N) % 60, random.integers(1, 4, N)
    eta = -6 + 0.25 * frame["x"] - 0.0022 * frame["x"] ** 2 + 0.2 * frame["z"] * (frame["g"] == "b")
    frame["e"] = (random.random(N) < 1 / (1 + np.exp(-eta))).astype(float)
    frame["n"], frame["y"] = random.poisson(np.exp(eta / 4)), eta + random.normal(size=N)
    return frame


FRAME = table()
POOLED = fs.ClientPartition.from_frame(FRAME, by="s")


def column(name, frame):
    """Return a column of the pooled design by its name."""
    if name == "Intercept":
        return np.ones(len(frame))
    if ":" in name:
        return np.prod([column(part, frame) for part in name.split(":")], axis=0)
    if name.startswith("I(x ** "):
        return frame["x"].to_numpy() ** int(name[7:-1])
    if "[T." in name:
        return (frame["g"] == name[-2]).to_numpy().astype(float)
    return frame[name].to_numpy(dtype=float)


def mean_change(fit, change, family, weights=None):
    """Return the average change of the prediction as a function of the coefficients."""
    low, high, step = change
    X, Y = (np.column_stack([column(name, one) for name in fit.params.index]) for one in (low, high))
    inverse = family.link.inverse
    return lambda beta: float(np.average(inverse(Y @ beta) - inverse(X @ beta), weights=weights) / step)


def derivative(name):
    return FRAME.assign(**{name: FRAME[name] - H}), FRAME.assign(**{name: FRAME[name] + H}), 2 * H


def check(found, name, fit, change, family, weights=None, rel=1e-5):
    """Compare an effect and its error with numerical derivatives of the pooled prediction."""
    effect, beta, cov = mean_change(fit, change, family, weights), fit.params.to_numpy(), fit.cov_params()
    cov = cov.to_numpy()
    scale = np.sqrt(np.diag(cov))
    slope = approx_fprime(np.zeros(len(beta)), lambda t: effect(beta + scale * t), 1e-5) / scale
    assert found.margeff[name] == pytest.approx(effect(beta), rel=rel, abs=1e-8)
    assert found.margeff_se[name] == pytest.approx(np.sqrt(slope @ cov @ slope), rel=1e-3)


FORMULAS = {
    "square": "x + I(x ** 2) + z",
    "interaction": "x * z",
    "levels": "x + I(x ** 2) + z * g",
    "polynomial": "x + I(x ** 2) + I(x ** 3) + z",
    "several": "x * z + I(x ** 2) + C(g)",
}


@pytest.mark.parametrize("right", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize(
    ("response", "family"), [("e", BINOMIAL), ("e", PROBIT), ("n", POISSON), ("y", F.Gaussian())],
    ids=["logit", "probit", "poisson", "gaussian"],
)  # fmt: skip
def test_effects_and_errors_are_derivatives_of_the_pooled_prediction(right, response, family):
    ours = fs.FederatedGLM.from_formula(f"{response} ~ {right}", POOLED, family=family).fit(
        use_t=False, local=False
    )
    theirs = smf.glm(f"{response} ~ {right}", FRAME, family=family).fit()
    found = ours.get_margeff()
    assert not [name for name in found.margeff.index if ":" in name or "**" in name]
    for name in ("x", "z"):
        check(found, name, theirs, derivative(name), family)
    if family.link.__class__.__name__ == "Identity" and "g" in right:
        name = next(one for one in found.margeff.index if one.endswith("[T.b]"))
        change = FRAME.assign(g="a"), FRAME.assign(g="b"), 1.0
        check(found, name, theirs, change, family)
    assert "Through all terms: " in " ".join(str(found).split())
    single, other = ours.get_margeff(columns=True), theirs.get_margeff()
    by_name = pd.Series(other.margeff_se, index=theirs.params.index[1:])
    np.testing.assert_allclose(single.margeff_se, by_name[single.margeff_se.index], rtol=1e-5)


def test_weights_at_the_mean_and_elasticities():
    text = "e ~ x + I(x ** 2) + z"
    ours = fs.FederatedGLM.from_formula(text, POOLED, family=BINOMIAL, freq_weights="w").fit(local=False)
    theirs = smf.glm(text, FRAME, family=BINOMIAL, freq_weights=FRAME["w"]).fit()
    check(ours.get_margeff(), "x", theirs, derivative("x"), BINOMIAL, weights=FRAME["w"])
    linear = fs.FederatedGLM.from_formula("y ~ x * z", POOLED, family=F.Gaussian(), freq_weights="w").fit(
        local=False
    )
    pooled = smf.glm("y ~ x * z", FRAME, family=F.Gaussian(), freq_weights=FRAME["w"]).fit()
    found = linear.get_margeff().margeff["x"]
    assert found == pytest.approx(
        mean_change(pooled, derivative("x"), F.Gaussian(), FRAME["w"])(pooled.params.to_numpy())
    )
    # At the means of the columns, of the square as well; and by the logarithm of x.
    plain = fs.FederatedGLM.from_formula(text, POOLED, family=BINOMIAL).fit(local=False)
    pooled = smf.glm(text, FRAME, family=BINOMIAL).fit()
    b, mean = pooled.params, [1.0, FRAME["x"].mean(), (FRAME["x"] ** 2).mean(), FRAME["z"].mean()]
    p = 1 / (1 + np.exp(-float(b.to_numpy() @ mean)))
    slope = b["x"] + 2 * b["I(x ** 2)"] * mean[1]
    assert plain.get_margeff(at="mean").margeff["x"] == pytest.approx(p * (1 - p) * slope, rel=1e-6)
    d = pooled.fittedvalues * (1 - pooled.fittedvalues) * (b["x"] + 2 * b["I(x ** 2)"] * FRAME["x"])
    by_log = plain.get_margeff(method="dyex").margeff
    assert by_log["x"] == pytest.approx((d * FRAME["x"]).mean(), rel=1e-5)
    # A logarithm changes one for one with the logarithm of its variable.
    logs = fs.FederatedGLM.from_formula("e ~ np.log(z) + x", POOLED, family=BINOMIAL).fit(local=False)
    pooled = smf.glm("e ~ np.log(z) + x", FRAME, family=BINOMIAL).fit()
    slope = (pooled.fittedvalues * (1 - pooled.fittedvalues)).mean() * pooled.params["np.log(z)"]
    assert logs.get_margeff(method="dyex").margeff["z"] == pytest.approx(slope, rel=1e-6)


def test_what_has_no_effect_has_a_note_and_no_row():
    fit = fs.FederatedGLM.from_formula("e ~ np.log(z) + x + I(x > 50) + z", POOLED, family=BINOMIAL).fit(
        local=False
    )
    found = fit.get_margeff()
    assert list(found.margeff.index) == ["z"] and "x: not shown, since a comparison" in " ".join(
        str(found).split()
    )
    assert list(fit.get_margeff(columns=True).margeff.index) == list(fit.params.index[1:])
    alone = fs.FederatedGLM.from_formula("e ~ np.log(z)", POOLED, family=BINOMIAL).fit(local=False)
    assert list(alone.get_margeff().margeff.index) == ["z"]
    with pytest.raises(NotAvailableError, match=r"at='overall'.* columns=True"):
        alone.get_margeff(at="mean")
    compared = fs.FederatedGLM.from_formula("e ~ I(x > 50) + z", POOLED, family=BINOMIAL).fit(local=False)
    pooled = smf.glm("e ~ I(x > 50) + z", FRAME, family=BINOMIAL).fit()
    p = [pooled.predict(FRAME.assign(x=x)).mean() for x in (0, 100)]
    both = fs.FederatedGLM.from_formula("e ~ c + np.sqrt(c + 1)", POOLED, family=BINOMIAL).fit(local=False)
    assert list(both.get_margeff(at="overall", method="dyex").margeff.index) == ["c"]
    assert compared.get_margeff().margeff["I(x > 50)[T.True]"] == pytest.approx(p[1] - p[0], rel=1e-6)


def test_numbers_of_zero_and_one_change_as_categories_do():
    frame = FRAME.assign(t=(FRAME["g"] == "b").astype(int))
    partition = fs.ClientPartition.from_frame(frame, by="s")
    fit = fs.FederatedGLM.from_formula("e ~ t * z + x", partition, family=BINOMIAL).fit(local=False)
    pooled = smf.glm("e ~ t * z + x", frame, family=BINOMIAL).fit()
    p = [pooled.predict(frame.assign(t=t)).mean() for t in (0, 1)]
    assert fit.get_margeff(dummy=True).margeff["t"] == pytest.approx(p[1] - p[0], rel=1e-6)
    assert fit.get_margeff().margeff["t"] != pytest.approx(p[1] - p[0], rel=1e-3)
    at = {"z": frame["z"].mean(), "x": frame["x"].mean()}
    b, z = pooled.params, frame["z"].mean()
    low = b["Intercept"] + b["z"] * z + b["x"] * at["x"]
    expit = BINOMIAL.link.inverse
    expected = expit(low + b["t"] + b["t:z"] * z) - expit(low)
    assert fit.get_margeff(at="mean", dummy=True).margeff["t"] == pytest.approx(expected, rel=1e-6)
    levels = fs.FederatedGLM.from_formula("e ~ C(t) * z + x", partition, family=BINOMIAL).fit(local=False)
    assert levels.get_margeff().margeff["C(t)[T.1]"] == pytest.approx(p[1] - p[0], rel=1e-6)


def test_values_are_not_fixed_where_columns_change_together():
    fit = fs.FederatedGLM.from_formula("e ~ x + I(x ** 2) + z", POOLED, family=BINOMIAL).fit(local=False)
    with pytest.raises(ModelError, match="several columns"):
        fit.get_margeff(atexog={"x": 50})
    assert fit.get_margeff(atexog={"z": 5}).margeff["x"] != fit.get_margeff().margeff["x"]
    fit.get_margeff(atexog={"x": 50}, columns=True)


def test_linear_mixed_models_and_gee_combine_columns():
    square = "x + I(x ** 2) + z * g"
    mixed = fs.FederatedMixed.from_formula(f"y ~ {square} + (1 | c)", POOLED).fit()
    b = mixed.params
    found = mixed.get_margeff()
    assert found.margeff["x"] == pytest.approx(b["x"] + 2 * b["I(x ** 2)"] * FRAME["x"].mean(), rel=1e-6)
    V = mixed.cov_params().loc[["x", "I(x ** 2)"], ["x", "I(x ** 2)"]].to_numpy()
    a = np.array([1.0, 2 * FRAME["x"].mean()])
    assert found.margeff_se["x"] == pytest.approx(np.sqrt(a @ V @ a), rel=1e-6)
    share = (FRAME["g"] == "b").mean() * b["z:g[T.b]"] + (FRAME["g"] == "c").mean() * b["z:g[T.c]"]
    assert found.margeff["z"] == pytest.approx(b["z"] + share, rel=1e-6)
    text = "e ~ x + I(x ** 2) + z"
    gee = fs.FederatedGEE.from_formula(text, POOLED, groups="c", family=BINOMIAL).fit(cov_type="robust")
    theirs = smf.gee(text, "c", FRAME, family=BINOMIAL, cov_struct=sm.cov_struct.Independence()).fit()
    check(gee.get_margeff(), "x", theirs, derivative("x"), BINOMIAL)


@pytest.mark.parametrize("policy", ["open", "strict"])
def test_effects_of_variables_release_their_sums_alone(policy):
    p = fs.ClientPartition.from_frame(FRAME, by="s", policy=policy)
    fit = fs.GLORE.from_formula("e ~ x + I(x ** 2) + z * g", p).fit()
    found = fit.get_margeff()
    by_step = {(one.step, one.array) for one in p.sites["A"].ledger.entries}
    assert {array for step, array in by_step if step == "sum_changes"} == {"inside", "effects", "slopes"}
    assert not [step for step, _ in by_step if step == "sum_effects"]  # no variable is one column
    assert list(found.margeff.index) == ["x", "z", "g[T.b]", "g[T.c]"]


def test_a_direction_is_found_only_where_changes_are_linear_in_the_rows():
    random = np.random.default_rng(0)
    x, z = random.uniform(1, 3, 200), random.normal(size=200)
    X = np.column_stack([np.ones(200), x, x**2, z, x * z])
    zero = np.zeros(200)
    D = np.column_stack([zero, zero + 1, 2 * x, zero, z])
    found = direction_of("x", X, D)
    np.testing.assert_allclose(np.column_stack([np.ones(200), X]) @ found.A, D, atol=1e-9)
    assert direction_of("z", X, np.column_stack([zero, zero, zero, zero + 1, zero])).plain == 3
    assert direction_of("x", X[:, [0, 3]], np.column_stack([zero, 1 / x])).A is None
