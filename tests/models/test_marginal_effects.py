"""Effects of variables, of every family: numerical derivatives of the average pooled prediction."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import patsy
import pytest
import statsmodels.api as sm
from scipy.special import expit, softmax

import fedstat as fs
from fedstat.models.results import CoefficientResults

pytestmark = pytest.mark.filterwarnings("ignore")
N, GROUPS, H = 900, 60, 1e-4
BINOMIAL, POISSON = sm.families.Binomial(), sm.families.Poisson()
RIGHT = "x + I(x ** 2) + x:z + z * g + np.log(v) + bs(w, knots=(3, 6), lower_bound=0, upper_bound=10)"
EFFECTS = ["x", "z", "g[T.b]", "g[T.c]", "v", "w"]


def table():
    random = np.random.default_rng(8)
    frame = pd.DataFrame({"s": np.repeat(list("ABC"), N // 3), "x": random.normal(size=N)})
    frame["c"] = np.arange(N) % N // (N // GROUPS // 3)  # of one site each
    frame["z"], frame["v"] = random.normal(2, 1, N), random.uniform(0.5, 6, N)
    frame["w"], frame["g"] = random.integers(0, 11, N).astype(float), random.choice(list("abc"), N)
    own = random.normal(size=(frame["c"].max() + 1, 2))[frame["c"]]
    eta = frame["x"] - 0.4 * frame["x"] ** 2 + 0.3 * frame["z"] * (frame["g"] == "b") + np.log(frame["v"])
    eta += np.sin(frame["w"] / 2) - 0.8 + own[:, 0] + own[:, 1] * frame["z"] * 0.8
    frame["e"] = (random.random(N) < expit(eta)).astype(float)
    frame["n"], frame["y"] = random.poisson(np.exp(eta / 4)), eta + random.normal(size=N)
    frame["k"] = np.digitize(eta + random.logistic(size=N), [-0.5, 1.0])
    frame["m"] = random.choice(list("pqr"), N)
    return frame


FRAME = table()
ROWS = fs.ClientPartition.from_frame(FRAME, by="s")
INFO = patsy.dmatrix(RIGHT, FRAME).design_info


def design(frame, names):
    """Return the columns of a table by patsy, in the order of their names."""
    X = patsy.build_design_matrices([INFO], frame, return_type="dataframe")[0]
    return X[list(names)].to_numpy()


def simple(mean):
    """Return estimates, covariance, and the means at parameters, for one linear predictor."""
    return lambda fit: (
        fit.params.to_numpy(), fit.cov_params().to_numpy(), lambda X, b: mean(X @ b)[:, None]
    )  # fmt: skip


def ordinal(fit):
    def means(X, b):
        below = expit(b[-2:] - (X[:, 1:] @ b[:-2])[:, None])  # thresholds are the last
        return np.diff(np.column_stack([np.zeros(len(X)), below, np.ones(len(X))]))

    return fit.params.to_numpy(), fit.cov_params().to_numpy(), means


def multinomial(fit):
    def means(X, b):
        return softmax(np.column_stack([np.zeros(len(X)), X @ b.reshape(2, -1).T]), axis=1)

    return fit.params.to_numpy(), fit.cov_params().to_numpy(), means


def averaged(fit):
    """Return the same with random effects of a constant and of z, whose factors are parameters."""
    record, p, place = fit._record.fit, len(fit.params), list(fit.params.index).index("z")
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)

    def means(X, b):
        L = record.effects.factors_in_units(b[p:])[0]
        sd = np.linalg.norm(np.column_stack([np.ones(len(X)), X[:, place]]) @ L, axis=1)
        return (expit((X @ b[:p])[:, None] + sd[:, None] * nodes) @ weights / weights.sum())[:, None]

    return np.append(record.params, record.theta), record.joint, means


def model(name, response, more="", **options):
    return getattr(fs, name).from_formula(f"{response} ~ {RIGHT}{more}", ROWS, **options)


OVER_ROWS = {
    "GLMResults": (lambda: model("FederatedGLM", "e", family=BINOMIAL).fit(), simple(expit)),
    "GLMResults, Poisson": (lambda: model("FederatedGLM", "n", family=POISSON).fit(), simple(np.exp)),
    "OLSResults": (lambda: model("FederatedOLS", "y").fit(), simple(np.asarray)),
    "GEEResults": (
        lambda: model("FederatedGEE", "e", groups="c", family=BINOMIAL).fit(cov_type="robust"), simple(expit),
    ),
    "OrdinalResults": (lambda: model("FederatedOrdinal", "k").fit(), ordinal),
    "MultinomialResults": (lambda: model("FederatedMultinomial", "C(m)").fit(), multinomial),
    "MixedResults": (
        lambda: model("FederatedMixed", "e", " + (1 + z | c)", family=BINOMIAL).fit(), averaged,
    ),
    "MixedResults, linear": (lambda: model("FederatedMixed", "y", " + (1 | c)").fit(), simple(np.asarray)),
}  # fmt: skip
HELD = {"A": ["e", "y"], "B": ["x", "z", "g"], "C": ["v", "w"]}
COLUMNS = fs.ClientPartition.from_frame(FRAME.drop(columns="s"), columns=HELD)


def over_columns(name, response, fit, **options):
    return getattr(fs, name).from_formula(f"{response} ~ {RIGHT}", COLUMNS, **options).fit(**fit)


OVER_COLUMNS = {
    "VFEMResults": (lambda: over_columns("VFEMRegression", "y", {}), simple(np.asarray)),
    "VFEMGLMResults": (lambda: over_columns("VFEMGLM", "e", {}, family=BINOMIAL), simple(expit)),
    "VerticalGLMResults": (
        lambda: over_columns("VerticalGLM", "e", {"lam": 0.0}, family=BINOMIAL), simple(expit),
    ),
}  # fmt: skip


@cache
def fitted(case):
    """A fit that several tests read."""
    return (OVER_ROWS | OVER_COLUMNS)[case][0]()


def test_every_class_with_marginal_effects_is_compared():
    kinds = (getattr(fs.results, name) for name in fs.results.__all__)
    have = {
        kind.__name__
        for kind in kinds
        if issubclass(kind, CoefficientResults) and kind.get_margeff is not CoefficientResults.get_margeff
    }
    assert {name.split(",")[0] for name in OVER_ROWS | OVER_COLUMNS} == have


def ends(name, frame):
    """Return the table at both ends of a change, and its size."""
    if name.startswith("g["):
        return frame.assign(g="a"), frame.assign(g=name[-2]), 1.0
    step = H / 100 if name == "w" else H
    low, high = (frame[name] + h for h in (-step, step))
    if name == "w":  # at the ends of a spline on one side
        low, high = low.clip(0, 10), high.clip(0, 10)
    return frame.assign(**{name: low}), frame.assign(**{name: high}), (high - low).to_numpy()[:, None]


def slopes(effect, at, cov):
    """Return derivatives (J, P) by the parameters, in steps of their errors."""
    steps = 1e-4 * np.sqrt(np.diag(cov))
    return np.array([(effect(at + h) - effect(at - h)) / (2 * h.sum()) for h in np.diag(steps)]).T


@pytest.mark.parametrize("case", OVER_ROWS | OVER_COLUMNS)
def test_effects_and_errors_are_derivatives_of_the_pooled_prediction(case):
    _, oracle = (OVER_ROWS | OVER_COLUMNS)[case]
    # The derivatives of v and w are no combinations of columns, and stay at their site.
    names, fit = EFFECTS[:4] if case in OVER_COLUMNS else EFFECTS, fitted(case)
    at, cov, means = oracle(fit)
    found = fit.get_margeff()
    rows = case in OVER_ROWS and hasattr(fit, "_record")
    columns = fit._record.fit.design.names if rows else fit.params.index
    size = max(len(found.margeff) // len(names), 1)
    assert [name.split(": ")[-1] for name in found.margeff.index] == names * size
    for j, name in enumerate(names):
        low, high, step = ends(name, FRAME)
        X, Y = design(low, columns), design(high, columns)

        def effect(b, X=X, Y=Y, step=step):
            return ((means(Y, b) - means(X, b)) / step).mean(axis=0)

        J = slopes(effect, at, cov[: len(at), : len(at)])
        errors = np.sqrt(np.einsum("jp,pq,jq->j", J, cov[: len(at), : len(at)], J))
        np.testing.assert_allclose(found.margeff.iloc[j :: len(names)], effect(at), rtol=3e-5, atol=1e-6)
        np.testing.assert_allclose(found.margeff_se.iloc[j :: len(names)], errors, rtol=1e-3)


@pytest.mark.parametrize("case", OVER_COLUMNS)
def test_what_stays_at_a_site_has_a_note(case):
    text = " ".join(str(fitted(case).get_margeff()).split())
    assert "v, w: not shown, since its derivative is no combination of the columns" in text


# -- predictions, comparisons and slopes ---

GRID = pd.DataFrame({"x": [0.3, -1.0], "z": [1.5, 2.5], "g": ["b", "c"], "v": [2.0, 0.7], "w": [4.5, 9.0]})


def at_rows(frame, columns, means):
    X = design(frame, columns)
    return lambda b: means(X, b)


def statements(columns, means, sites):
    """Return calls of results, and what they return as functions of the parameters: (rows, J)."""
    at = {name: at_rows(FRAME.assign(g=name), columns, means) for name in "abc"}
    plus = at_rows(FRAME.assign(x=FRAME["x"] + 0.5), columns, means)
    now, grid = at_rows(FRAME, columns, means), at_rows(GRID, columns, means)
    high, low = (at_rows(GRID.assign(z=GRID["z"] + h), columns, means) for h in (H, -H))
    inside = {name: (FRAME["g"] == name).to_numpy() for name in "abc"}

    def by(values):
        return np.array([values[inside[name]].mean(axis=0) for name in "abc"])

    def odds(p):
        return p / (1 - p)

    yield "at sites", lambda fit: fit.predictions(), lambda b: now(b).mean(axis=0, keepdims=True)
    yield (
        "levels",
        lambda fit: fit.predictions({"g": ["b", "c"]}),
        lambda b: np.array([at[g](b).mean(axis=0) for g in "bc"]),
    )
    yield (
        "ratio",
        lambda fit: fit.comparisons({"g": ["a", "b"]}, comparison="ratio"),
        lambda b: (at["b"](b).mean(axis=0) / at["a"](b).mean(axis=0))[None],
    )
    yield "grid", lambda fit: fit.predictions(at=GRID), grid
    yield "slopes", lambda fit: fit.slopes("z", at=GRID), lambda b: (high(b) - low(b)) / (2 * H)
    first = {name: at_rows(GRID.iloc[:1].assign(g=name), columns, means) for name in "abc"}
    yield (
        "pairs",
        lambda fit: fit.comparisons({"g": "sequential"}, at=GRID.iloc[:1], comparison="lift"),
        lambda b: np.concatenate([first[one](b) / first[other](b) - 1 for other, one in ("ab", "bc")]),
    )
    if not sites:
        return
    up, down = (at_rows(FRAME.assign(x=FRAME["x"] + h), columns, means) for h in (H, -H))

    def along_x(b):
        return (up(b) - down(b)) / (2 * H)

    yield "by", lambda fit: fit.predictions(by="g"), lambda b: by(now(b))
    yield "slopes by", lambda fit: fit.slopes("x", by="g"), lambda b: by(along_x(b))
    yield (
        "step",
        lambda fit: fit.comparisons({"x": 0.5}, by="g"),
        lambda b: by(plus(b) - now(b)),
    )
    one, three = (at_rows(FRAME.assign(z=z), columns, means) for z in (1.0, 3.0))
    yield (
        "values",
        lambda fit: fit.comparisons({"z": (1, 3)}),
        lambda b: (three(b) - one(b)).mean(axis=0, keepdims=True),
    )
    yield (
        "odds",
        lambda fit: fit.comparisons({"x": 0.5}, comparison="lnor"),
        lambda b: np.log(odds(plus(b).mean(axis=0)) / odds(now(b).mean(axis=0)))[None],
    )


@pytest.mark.parametrize("case", OVER_ROWS | OVER_COLUMNS)
def test_statements_and_errors_are_those_of_the_pooled_prediction(case):
    _, oracle = (OVER_ROWS | OVER_COLUMNS)[case]
    fit = fitted(case)
    params, cov, means = oracle(fit)
    rows = case in OVER_ROWS
    columns = fit._record.fit.design.names if rows else fit.params.index
    cov = cov[: len(params), : len(params)]
    for name, call, effect in statements(columns, means, rows):
        if name in ("odds", "pairs", "ratio") and (
            "y" in fit.estimate.response or "n" in fit.estimate.response
        ):
            continue  # no probabilities
        found, expected = call(fit), effect(params)
        np.testing.assert_allclose(found.estimate, expected.ravel(), rtol=1e-5, atol=1e-7, err_msg=name)
        J = slopes(lambda b, effect=effect: effect(b).ravel(), params, cov)
        errors = np.sqrt(np.einsum("jp,pq,jq->j", J, cov, J))
        np.testing.assert_allclose(found.std_error, errors, rtol=1e-3, err_msg=name)
