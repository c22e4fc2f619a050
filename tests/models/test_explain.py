"""Dry runs of every family, compared with the requests of the fit.

A dry run executes a fit's own steps on invented designs, so that it always matches the family. Errors are
possible in the design, or if a number matters that should not. For every family and exchange, the dry run
announces every release of the fit, with sender, receiver, step, array, kind, masks, entities and shape. It
announces nothing else, except rounds whose number depends on the data. All sites also require the order of
steps that families declare.
"""

import re
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import statsmodels.genmod.families as families

import fedstat as fs
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure import checks
from fedstat.federation.disclosure.approval import plain_lines
from fedstat.federation.disclosure.request_checks import check_order
from fedstat.models.explain import plans_of

KEY = ["sender", "receiver", "step", "array", "kind", "what", "masked", "entities", "shape"]
SOMETIMES = {"shorten"}
"""Steps of an iteration that not every course of it takes."""

RNG = np.random.default_rng(11)


# ---- different columns -----------------------------------------------------------------------------


def blocks(missing):
    """Three sites; the first one has the response in four kinds."""
    frames = dict(fs.datasets.make_blocks(420, p=(3, 2, 2), missing=missing, seed=1).frames)
    held = frames.pop("Response").merge(frames.pop("A"), how="left")
    rank = (held["y"] - held["y"].mean()) / held["y"].std()
    held["sick"] = (rank + RNG.logistic(size=len(held)) > 0.0).astype(float)
    held["count"] = RNG.poisson(np.exp(0.3 * rank)).astype(float)
    held["cost"] = np.exp(0.5 * rank) * RNG.gamma(3.0, 1.0 / 3.0, len(held))
    return {"A": held, **frames}


PARTLY, WHOLE = blocks((0.1, 0.3, 0.5)), blocks((0.0, 0.0, 0.0))
FIVE = {
    "Response": WHOLE["A"][["id", "y", "sick", "count", "cost"]],
    "A": WHOLE["A"][["id", "A1", "A2"]],
    "D": WHOLE["A"][["id", "A3"]],
    "B": WHOLE["B"],
    "C": WHOLE["C"],
}
FAMILY = {
    "y": None,
    "sick": families.Binomial(),
    "count": families.Poisson(),
    "cost": families.Gamma(),
}


def right_side(frames):
    return " + ".join(name for frame in frames.values() for name in frame if name not in ("id", *FAMILY))


def vertical(kind, frames, response="y", names="ABC", link=None, **options):
    frames = {name: frames[name] for name in names}
    partition = fs.ClientPartition.from_frames(frames, on="id")
    formula = f"{response} ~ {right_side(frames)}"
    family = FAMILY[response] if link is None else families.Binomial(link())
    return kind.from_formula(formula, partition, family=family, **options)


def vfem_class(response):
    return fs.VFEMRegression if response == "y" else fs.VFEMGLM


def vfem(response="y", names="ABC", between="independent", **options):
    return vertical(vfem_class(response), PARTLY, response, names, between=between, **options)


def vglm(response="y", names="ABC", **options):
    return vertical(fs.VerticalGLM, WHOLE, response, names, **options)


def holder_alone(response="y", between="free"):
    """An institution that has the response and nothing else."""
    frames = {"Response": PARTLY["A"][["id", *FAMILY]], "A": PARTLY["A"].drop(columns=list(FAMILY))}
    frames |= {name: PARTLY[name] for name in "BC"}
    return vertical(vfem_class(response), frames, response, tuple(frames), between=between)


def stepwise(cov_type="observed", maxiter=None, **options):
    """A fit by iteration, which ends early: what is released does not depend on where it ends."""
    more = {} if maxiter is None else {"maxiter": maxiter}
    return {
        "exchange": "iterative",
        "iteration": fs.Iteration(tol=1e-3, **options),
        "cov_type": cov_type,
    } | more


STEPWISE = stepwise()
NORMAL_FITS = {
    "moments": {},
    "impute": {"method": "impute"},
    "complete": {"method": "cc"},
    "iterative": STEPWISE,
    "clear": stepwise(masked=False),
    "gradient": stepwise(maxiter=60, step="gradient", acceleration=None),
    "expected": stepwise("expected"),
    "few points": stepwise("none", memory=3),
    "robust": stepwise("robust"),
    "sem": stepwise("sem"),
    "sketch": stepwise(cross_products="sketch", sketch_size=300),
    "gaussian sketch": stepwise("sem", cross_products="sketch", sketch="gaussian", sketch_size=300),
    "exact": stepwise("robust", cross_products="exact"),
    "first coefficients of another": stepwise(init="cc"),
}
OTHER_FITS = {
    "masked": {},
    "clear": {"masked": False},
    "none": {"cov_type": "none"},
    "impute": {"method": "impute"},
    "sketch": {"cross_products": "sketch", "sketch_size": 300},
    "exact": {"cross_products": "exact"},
    "cut off": {"maxiter": 4, "cov_type": "none"},
}
FREE_FITS = {n: OTHER_FITS[n] for n in ("masked", "clear", "none")}
PENALIZED = {
    "bic": {},
    "one lambda": {"lam": 0.0},
    "folds": {"select": "cv", "folds": 4, "seed": 1, "n_lambdas": 8},
    "draws": {"draws": 3, "folds": 6, "seed": 1, "n_lambdas": 8},
    "debiased": {"inference": "debiased", "n_lambdas": 8},
    "split": {"inference": "split", "seed": 2},
    "admm": {"exchange": "admm", "n_lambdas": 3, "tol": 1e-3},
}
OF_OTHERS = {
    "bic": {},
    "exact": {"path": "exact", "n_lambdas": 4},
    "clear": {"masked": False},
    "folds": {"select": "cv", "folds": 3, "seed": 1, "n_lambdas": 5},
    "debiased": {"inference": "debiased", "lam": 0.05},
    "split": {"inference": "split", "lam": 0.05, "seed": 1},
    "admm": {"exchange": "admm", "lam": 0.1, "tol": 1e-3},
}
CASES = {
    **{f"VFEM {n}": (vfem, a) for n, a in NORMAL_FITS.items()},
    **{
        f"VFEM apart {n}": (lambda: vfem(coordinator="apart"), NORMAL_FITS[n])
        for n in ("moments", "iterative")
    },
    "VFEM free": (lambda: vfem(between="free"), {}),
    "VFEM at B": (lambda: vfem(coordinator="B"), STEPWISE),
    "VFEM of two": (lambda: vfem(names="AB"), {}),
    "VFEM of a holder alone": (holder_alone, {}),
    **{f"VFEM binary {n}": (lambda: vfem("sick"), a) for n, a in OTHER_FITS.items()},
    "VFEM binary of few points": (lambda: vfem("sick"), {"memory": 3, "cov_type": "none"}),
    "VFEM binary of two": (lambda: vfem("sick", "AB", coordinator="apart"), {}),
    "VFEM binary of a holder alone": (lambda: holder_alone("sick", "independent"), {"masked": False}),
    **{
        f"VFEM binary free {n}": (lambda: vfem("sick", between="free"), a | {"max_moved": 1.0})
        for n, a in FREE_FITS.items()
    },
    "VFEM counts free": (lambda: vfem("count", between="free", coordinator="apart"), {"max_moved": 1.0}),
    "VFEM probit": (lambda: vfem("sick", link=families.links.Probit), {}),
    "VFEM counts": (lambda: vfem("count", coordinator="apart"), {}),
    **{f"VGLM {n}": (lambda: vglm(penalty="lasso"), a) for n, a in PENALIZED.items()},
    "VGLM missing": (lambda: vertical(fs.VerticalGLM, PARTLY, missing="em"), {"n_lambdas": 4}),
    "VGLM of two": (lambda: vglm(names="AB"), {}),
    **{f"VGLM binary {n}": (lambda: vglm("sick", penalty="lasso"), a) for n, a in OF_OTHERS.items()},
    "VGLM counts": (lambda: vglm("count", coordinator="apart", group_terms=True), {"lam": 0.05}),
    "VGLM adaptive": (lambda: vglm("sick", penalty="lasso", adaptive=1.0, unpenalized=["B1"]), {"lam": 0.02}),
    "VGLM of five": (lambda: vertical(fs.VerticalGLM, FIVE, "sick", tuple(FIVE)), {}),
    "VGLM unpenalized": (lambda: vglm("sick"), {"lam": 0.0}),
    "VGLM draws": (lambda: vglm("sick"), {"draws": 2, "folds": 6, "seed": 1, "lam": 0.05}),
    "VGLM admm weighted": (
        lambda: vglm("sick", penalty="lasso", adaptive=1.0, unpenalized=["B1"]),
        {"exchange": "admm", "n_lambdas": 2, "ratio": 0.3, "tol": 1e-3},
    ),
    "VGLM gamma by fold": (
        lambda: vglm("cost"),
        {"select": "cv", "folds": 3, "seed": 1, "n_lambdas": 4},
    ),
    "VGLM gamma": (lambda: vglm("cost"), {"n_lambdas": 4}),
}


# ---- different rows --------------------------------------------------------------------------------


def hospitals(n=480):
    frame = pd.DataFrame({"x": RNG.normal(size=n), "w": RNG.uniform(1.0, 3.0, n)})
    frame["twice"] = RNG.integers(1, 3, n)
    frame["g"] = RNG.choice(["a", "b", "c"], n)
    frame["stage"] = RNG.integers(1, 4, n)
    frame["site"] = RNG.choice(["Bonn", "Kiel", "Ulm", "Jena"], n)
    frame["ward"] = frame["site"] + RNG.integers(1, 9, n).astype(str)
    mean = np.exp(0.3 + 0.4 * frame["x"] + 0.3 * (frame["g"] == "b"))
    frame["y"] = mean + RNG.normal(size=n)
    frame["sick"] = (RNG.uniform(size=n) < 1.0 / (1.0 + 1.0 / mean)).astype(int)
    frame["well"] = 1 - frame["sick"]
    frame["count"] = RNG.negative_binomial(2.0, 2.0 / (2.0 + mean))
    frame["cost"] = mean * RNG.gamma(3.0, 1.0 / 3.0, n)
    return frame


ROWS = hospitals()


def horizontal(formula, family=None, kind=fs.FederatedGLM, sites=None, **options):
    frame = ROWS if sites is None else ROWS[ROWS["site"].isin(sites)]
    partition = fs.ClientPartition.from_frame(frame, by="site")
    return kind.from_formula(formula, partition, family=family, **options)


BINOMIAL, POISSON = families.Binomial(), families.Poisson()
GROUPED = {"cov_type": "cluster", "cov_kwds": {"groups": "ward"}}
SURVEY = {"cov_type": "survey", "cov_kwds": {"clusters": "ward", "strata": "site"}}
CASES |= {
    "GLM least squares": (lambda: horizontal("y ~ x + C(g)"), {}),
    "GLM without own fits": (lambda: horizontal("y ~ x + C(g)"), {"local": False}),
    "GLM numbers as levels": (lambda: horizontal("sick ~ x * C(stage)", BINOMIAL), {}),
    "GLM by site": (lambda: horizontal("sick ~ x + C(site)", BINOMIAL), {"local": False}),
    "GLM in clear": (lambda: horizontal("sick ~ x", BINOMIAL), {"masked": False}),
    "GLM two sites": (lambda: horizontal("sick ~ x", BINOMIAL, sites=["Bonn", "Ulm"]), {"masked": True}),
    "GLM counts of two": (lambda: horizontal("cbind(sick, well) ~ x", BINOMIAL), {}),
    "GLM comparison": (
        lambda: horizontal("y > 1 ~ log(w) + bs(x, knots=(0.0,), lower_bound=-9, upper_bound=9)", BINOMIAL),
        {},
    ),
    "GLM probit": (lambda: horizontal("sick ~ x", families.Binomial(families.links.Probit())), {}),
    "GLM robust": (lambda: horizontal("sick ~ x", BINOMIAL), {"cov_type": "HC1"}),
    "GLM sites": (
        lambda: horizontal("sick ~ x", BINOMIAL),
        {"cov_type": "cluster", "cov_kwds": {"groups": "site"}},
    ),
    "GLM no intercept": (lambda: horizontal("count ~ x + w - 1", POISSON), {}),
    "GLM exposure": (lambda: horizontal("count ~ x", POISSON, exposure="w"), {}),
    "GLM weights": (lambda: horizontal("count ~ x", POISSON, freq_weights="twice"), {"scale": "X2"}),
    "GLM transforms": (lambda: horizontal("count ~ scale(x) + poly(w, 2)", POISSON), {}),
    "GLM gamma": (lambda: horizontal("cost ~ x", families.Gamma(families.links.Log())), {}),
    "GLM one step": (lambda: horizontal("sick ~ x", BINOMIAL), {"rounds": 1}),
    "GLM alone": (lambda: horizontal("count ~ 1", POISSON), {}),
    "GLM alpha": (
        lambda: horizontal("count ~ x", families.NegativeBinomial(alpha=1.0)),
        {"dispersion": "ml"},
    ),
    "GLM clusters": (lambda: horizontal("sick ~ x", BINOMIAL, labels=["ward"]), GROUPED),
    "GLM survey": (lambda: horizontal("sick ~ x", BINOMIAL, labels=["ward", "site"]), SURVEY),
    "FedAvg": (lambda: horizontal("sick ~ x + w", kind=fs.FedAvg), {"rounds": 4}),
    "FedAvg a share": (
        lambda: horizontal("sick ~ x", kind=fs.FedAvg),
        {"rounds": 6, "fraction": 0.5, "seed": 5},
    ),
    "FedAvg in units": (
        lambda: horizontal("sick ~ x", kind=fs.FedAvg),
        {"rounds": 2, "standardize": True, "init": [0.1, 0.2]},
    ),
    "FedAvg in clear": (lambda: horizontal("sick ~ x", kind=fs.FedAvg), {"rounds": 3, "masked": False}),
    "FedAvgM": (lambda: horizontal("sick ~ x", kind=fs.FedAvgM), {"rounds": 3}),
    "QFedAvg": (lambda: horizontal("sick ~ x", kind=fs.QFedAvg), {"rounds": 3, "masked": False}),
    "FedProx": (lambda: horizontal("sick ~ x", kind=fs.FedProx), {"rounds": 3}),
}


# ---- the contract ----------------------------------------------------------------------------------


def passed(model, result):
    """Releases of a fit without those of making the model, in the form of :meth:`Ledger.releases`."""
    earlier = model._agreement
    ledger = Ledger(result.ledger.at)
    ledger.enter(result.ledger.entries[len(earlier.entries) :])
    return ledger.releases(), result.ledger.rounds - earlier.rounds


def keyed(table):
    return {tuple(row[:-1]): row[-1] for row in table[KEY].itertuples(index=False, name=None)}


@contextmanager
def ordered():
    """Sites answer steps in the order that families declare, whatever else they allow."""
    declared = fs.Policy(order="declared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "check_order", lambda site, _, *request: check_order(site, declared, *request))
        yield


NUMBER = re.compile(r"at most ([0-9,]+) (?:total|number|sum)")


def claimed(line):
    """Most numbers that a plain line announces."""
    if "not known in advance" in line:
        return np.inf
    return sum(int(found.replace(",", "")) for found in NUMBER.findall(line))


def check_plain_lines(model, plans, entries):
    """The three lines that an owner reads are true of what the fit has released."""
    for site, plan in plans.items():
        own, together, rows = plain_lines(plan, fs.Policy.strict())
        real, times = Counter(), Counter()
        most = {step.step: step.most for step in plan.steps}
        for e in entries:
            times[e.step, e.array] += e.sender == site
            # A site refuses a step that it was asked more often than planned: a fit would end half way.
            assert times[e.step, e.array] <= most.get(e.step, np.inf), (site, e.step, most[e.step])
            if e.sender == site and e.array != "text":
                real[e.kind, e.masked] += int(np.prod(e.shape))
        alone = sum(real[kind, False] for kind in ("aggregate", "noisy aggregate", "sketch"))
        hidden = sum(n for (kind, masked), n in real.items() if masked and kind != "per entity")
        single = sum(n for (kind, _), n in real.items() if kind in ("per entity", "raw columns"))
        assert not ("no total" in own and alone) and claimed(own) >= alone
        assert claimed(together) >= hidden + real["masked share", False]
        if hidden:
            assert f"sum over {len(model.partition.sites)} sites" in together or plan.among == 2
        # Numbers that go to a coordinator at the same site are in the plan, and not in the ledger of the fit.
        assert rows.startswith("Attention") if single else "No row" in rows or site == model.coordinator
        assert not single or claimed(rows) >= single
        assert ("It is revealed" in rows) >= any(kind == "presence" for kind, _ in real)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
def test_what_a_fit_releases_was_reported(name):
    make, arguments = CASES[name]
    model = make()
    explanation = model.explain(**arguments)
    table = explanation.tidy()
    plans = plans_of(model, list(model.partition.sites), arguments)
    with ordered():
        result = model.fit(**arguments)
    released, rounds = passed(model, result)
    check_plain_lines(model, plans, result.ledger.entries[len(model._agreement.entries) :])
    reported, real = keyed(table), keyed(released[~released["step"].isin(SOMETIMES)])
    assert set(reported) == set(real)
    open_ended = set(table.loc[table["messages_low"] < table["messages_high"], "step"])
    guessed = set(table.loc[table["guessed"], "step"])
    for key, shape in real.items():
        if key[2] in guessed:
            assert len(reported[key]) == len(shape), key
        elif key[2] in open_ended:  # early iterations mix fewer points
            assert all(most >= n for most, n in zip(reported[key], shape, strict=True)), key
        else:
            assert reported[key] == shape, key
    low, _, most = np.sum([counts for _, counts in explanation.rounds], axis=0)
    assert low <= rounds <= most
    if low == most and not guessed:
        assert explanation.totals()["sends"].sum() == released["bytes"].sum()


@pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
def test_what_is_asked_after_a_fit_is_in_order_as_well():
    with ordered():
        for made in (vfem(), vfem(coordinator="apart"), vglm(penalty="lasso"), vglm("sick", penalty="lasso")):
            fitted = made.fit()
            fitted.predict(made.partition)
            made.fit()
        vfem().fit().get_prediction()
        glm = horizontal("sick ~ x", BINOMIAL)
        fitted = glm.fit()
        fitted.evaluate()
        fitted.score_test("w")
        glm.fit(masked=False)
