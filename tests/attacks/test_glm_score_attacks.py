"""Scores of models over rows at coefficients chosen by the analyst: rows between two cuts, rows of a cell."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused_for
from scipy import optimize, stats

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure import leverage
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows, mean_vectors, times_means
from fedstat.models.glm import overdispersion
from fedstat.models.glm.protocol import Newton
from fedstat.models.horizontal.rows import answered_at
from fedstat.models.horizontal.session import add
from fedstat.models.run import FitAttempt

pytestmark = pytest.mark.filterwarnings("ignore")
N = 600
PUBLISHED = {
    "a": {"kind": "number", "range": [0, 1]},
    "b": {"kind": "number", "range": [0, 1]},
    "z": {"kind": "number", "range": [20, 80]},
    "y": {"kind": "number", "range": [0, 1]},
}


def table():
    """Return a table where one person of all sites, at site A, has both a and b."""
    random = np.random.default_rng(7)
    a = (random.random(N) < 0.3).astype(float)
    b = (random.random(N) < 0.3) * (1.0 - a)
    b[np.flatnonzero(a)[0]] = 1.0
    z = random.uniform(20, 80, N)
    y = (random.random(N) < 1.0 / (1.0 + np.exp((50.0 - z) / 10.0))).astype(float)
    site = np.array(["A", "B", "C"])
    start = int(np.flatnonzero(a * b)[0])
    return pd.DataFrame({"a": a, "b": b, "z": z, "y": y, "site": site[(np.arange(N) - start) % 3]})


FRAME = table()
PERSON = FRAME[FRAME["a"] * FRAME["b"] == 1.0].iloc[0]
# Without the rule on products, which refuses the cell of one row before any coefficients come.
POLICIES = {"open": fs.Policy.open(), "strict": fs.Policy.strict(products="any")}


def request(policy, betas, family="glm"):
    """Sums over sites that a deviating coordinator receives at coefficients (R, 4) of its own, one by one."""
    strict = policy if isinstance(policy, fs.Policy) else POLICIES[policy]
    masked = strict.masked_only
    published = dict.fromkeys("ABC", PUBLISHED) if masked else None
    partition = fs.ClientPartition.from_frame(FRAME, by="site", policy=strict, published=published)
    kind = {"glm": fs.FederatedGLM, "fedavg": fs.FedAvg}[family]
    model = kind.from_formula("y ~ a + b + z", partition, family=sm.families.Binomial())
    session = model._open_session(family, masked=masked)
    units = {"shift": np.zeros(4), "scale": np.ones(4)}
    first, each = (
        (units | {"init": np.zeros(4)}, {})
        if family == "fedavg"
        else ({}, units | {"observed": np.array(False)})
    )

    def protocol():
        yield session.opening() + session.request_all("start", first, model.distribution.to_json())
        reported = []
        for beta in betas:
            replies = yield session.request_all("sum_scores", each | {"beta": np.asarray(beta, dtype=float)})
            reported.append({name: add(replies, name) for name in replies[0].arrays})
        return reported

    return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)


def cuts():
    """Coefficients far below zero up to a value of z, and far above from there on, on either side of one."""
    z = np.sort(FRAME["z"].to_numpy())
    at = N // 2
    return z[at], [(-1e6 * cut, 0.0, 0.0, 1e6) for cut in (z[at - 1 : at + 2][:-1] + z[at : at + 2]) / 2.0]


def between_cuts(policy, sessions):
    """Value of z, and what the difference of two scores says of it."""
    z, betas = cuts()
    reported = request(policy, betas) if sessions == 1 else [request(policy, [beta])[0] for beta in betas]
    change = reported[1]["score"] - reported[0]["score"]
    return z, change[3] / change[0] if change[0] else 0.0


@pytest.mark.parametrize("sessions", [1, 2])
def test_the_row_between_two_cuts_is_reported_by_no_site(sessions):
    loose = fs.Policy(min_count=1, min_level_count=1)  # of owners with no least number of rows
    z, reported = between_cuts(loose, sessions)
    assert reported == pytest.approx(z, rel=1e-6)
    for policy in ("open", "strict"):
        assert between_cuts(policy, sessions)[1] == 0.0


def test_a_rare_outcome_is_no_cut():
    (reported,) = request("strict", [(-13.0, 0.0, 0.0, 0.01)])
    assert reported["spread"] == 3 and reported["score"].any()


CELLS = np.array([(0, 0), (1, 0), (0, 1), (1, 1)], dtype=float)
SHAPES = [(0, 1, -1), (0.5, 1, 1), (-0.5, -1, 1), (0.3, 2, -0.5), (-1, 0.5, 1.5), (0.2, -1.5, -0.7)]


def told_of_cell(policy, scale=1.0, slope=0.0, family="glm", sessions=1):
    """Number of rows, z and y of those with both a and b, from sums at coefficients of nearly zero for z."""
    betas = scale * np.array(SHAPES)
    points = [(a - 50.0 * slope, b, c, slope) for a, b, c in betas]
    reported = (
        request(policy, points, family)
        if sessions == 1
        else [request(policy, [p], family)[0] for p in points]
    )
    eta = betas[:, :1] + betas[:, 1:] @ CELLS.T
    mu = 1.0 / (1.0 + np.exp(-eta))
    V = mu * (1.0 - mu)
    rows = np.vstack([np.column_stack([np.ones(len(mu)), -mu]), np.column_stack([np.zeros(len(mu)), V])])
    sums = [
        [one["score"][j] for one in reported] + [one["information"][0, j] for one in reported] for j in (0, 3)
    ]
    (_, *n), (_, *z) = (np.linalg.lstsq(rows, np.array(one), rcond=None)[0] for one in sums)
    # Pearson's statistic of outcomes of zero and one is linear in them.
    pearson = np.array([one["totals"][2] for one in reported]) - (mu**2 / V) @ n
    y = np.linalg.lstsq((1.0 - 2.0 * mu) / V, pearson, rcond=None)[0]
    return n[3], z[3], y[3]


WHO = (1.0, PERSON["z"], PERSON["y"])
SHARED = fs.Policy.strict(max_share=1.0, products="any")


@pytest.mark.parametrize("family", ["glm", "fedavg"])
def test_the_only_row_of_a_cell_is_not_revealed_by_one_session(family):
    # The order of FedAvg's steps has one score only, after epochs, and of a model one path is remembered.
    loose = {"order": "any", "products": "any", "remember": "rows"}
    strict, shared = (fs.Policy.strict(max_share=share, **loose) for share in (0.2, 1.0))
    for policy in ("open", shared):  # whose owner allows any share; of masked sites, from sums over three
        assert told_of_cell(policy, family=family) == pytest.approx(WHO, abs=1e-6)
    with refused_for("largest share"):
        told_of_cell(strict, family=family)


@pytest.mark.parametrize(("scale", "slope"), [(1e-2, 0.0), (1e-4, 0.0), (1.0, 1e-5), (1.0, 1e-4)])
def test_nor_by_coefficients_that_are_close_to_each_other_or_not_quite_zero(scale, slope):
    assert told_of_cell(SHARED, scale, slope)[:2] == pytest.approx(WHO[:2], abs=0.5)
    with refused_for("largest share"):
        told_of_cell("strict", scale, slope)


def test_what_several_sessions_reveal_is_not_added_up():
    """A state named in the threat table: the checks compare only the answers of one session."""
    assert told_of_cell("strict", slope=3e-4, sessions=6)[:2] == pytest.approx(WHO[:2], abs=1.0)


# -- many rows: the check first looks at samples ---------------------------------------------------------


def many(n=20_000):
    """A design of many rows, with a cell of one that no sample has."""
    random = np.random.default_rng(3)
    X = np.column_stack([np.ones(n), random.random((n, 2)) < 0.3, random.normal(size=n)]).astype(float)
    X[:, 2] *= 1.0 - X[:, 1]
    X[n - 1, 1:3] = 1.0
    return Rows(X, np.zeros(n))


def judged(betas, distribution, rows, monkeypatch):
    """Whether all of a session's points pass, and how many of them took a look at all rows."""
    looks = []
    look = leverage._isolates_few_rows
    monkeypatch.setattr(leverage, "_isolates_few_rows", lambda *request: looks.append(1) or look(*request))
    opened = SimpleNamespace(question=SimpleNamespace(intercept=True, weighted=False), places=None)
    site, state = SiteData("A", None, None, fs.Policy.strict()), State("A")
    try:
        for beta in betas:
            fact = answered_at(opened, lambda: [rows], len(rows), np.array(beta, dtype=float), distribution)[
                -1
            ]
            leverage.check_fitted_means(site, state, fact)
    except PolicyError:
        return False, len(looks)
    return True, len(looks)


@pytest.mark.parametrize("family", [sm.families.Binomial(), sm.families.Poisson()])
def test_samples_settle_honest_points_and_hide_no_row(family, monkeypatch):
    distribution, rows = DistributionSpec.of(family), many()
    honest = [(0.1, 0.5, -0.4, 0.3), (0.15, 0.6, -0.5, 0.35), (0.151, 0.603, -0.502, 0.351)]
    assert judged(honest, distribution, rows, monkeypatch) == (True, 0)
    cells = [(*shape, 0.0) for shape in SHAPES]
    passed, looks = judged(cells, distribution, rows, monkeypatch)
    assert not passed and looks
    # A cell of many is no row's own.
    rows.X[: len(rows) // 50, 1:3] = 1.0
    assert judged(cells, distribution, rows, monkeypatch)[0]


@pytest.mark.parametrize("name", ["Binomial", "Poisson", "Gamma"])
def test_vectors_are_those_of_their_definition(name):
    random = np.random.default_rng(1)
    link = {"link": sm.families.links.Log()} if name == "Gamma" else {}
    distribution = DistributionSpec.of(getattr(sm.families, name)(**link))
    X, beta = random.normal(size=(30, 3)), random.normal(size=(3, 2))
    for rows in (Rows(X, np.ones(30)), Rows(X, np.ones(30), random.normal(size=30), random.random(30) + 1.0)):
        found = mean_vectors(rows, beta, distribution)
        right = []
        for one in beta.T:
            eta = X @ one + (0.0 if rows.offset is None else rows.offset)
            mu = distribution.make().link.inverse(eta)
            w = 1.0 / (distribution.make().link.deriv(mu) ** 2 * distribution.make().variance(mu))
            right += [mu] if name == "Poisson" else [mu, w]
        weight = np.ones(30) if rows.weight is None else rows.weight
        right = np.array(right).T * weight[:, None]
        np.testing.assert_allclose(found, right, rtol=1e-10)
        wide = random.normal(size=(3 + right.shape[1], 2))
        times = times_means(rows, beta, distribution, wide)
        np.testing.assert_allclose(times, np.column_stack([X, right]) @ wide, rtol=1e-9, atol=1e-12)


# ---- log-likelihoods of counts at chosen dispersions --------------------------------------------------

STRICT = fs.Policy.strict(approval="auto", formulas="any")


def counts_model(policy):
    """A negative binomial model of counts up to 9, and one row of 14."""
    random = np.random.default_rng(3)
    counts = random.negative_binomial(2, 0.5, 360).clip(0, 9)
    counts[3] = 14
    frame = pd.DataFrame({"x": random.normal(size=360), "z": counts, "site": np.arange(360) % 3})
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    family = sm.families.NegativeBinomial(alpha=1.0)
    return counts, fs.FederatedGLM.from_formula("z ~ x", partition, family=family)


@pytest.mark.parametrize(
    ("policy", "refused"), [(STRICT, True), (fs.Policy(), False)], ids=["strict", "default"]
)
def test_log_likelihoods_at_several_dispersions_count_the_rows_of_each_value(policy, refused):
    """At coefficients of zero a log-likelihood is a sum of functions of the counts alone."""
    counts, model = counts_model(policy)
    session = model._open_session("glm", True)
    newton = Newton(session, model.distribution, scaletype=1.0)
    alphas, values = np.geomspace(0.02, 60.0, 24), []

    def protocol():
        yield from newton.open(local=True)
        yield from newton.maximize()
        for alpha in alphas:
            llf, _, _ = yield from overdispersion._sums(newton, np.array([0.0, 0.0, np.log(alpha)]))
            values.append(llf)

    if refused:
        with pytest.raises(PolicyError):
            model.engine.run(session.hide(protocol()), Ledger())
        # With the derivatives in alpha, 7 evaluations would determine 16 counts; whether the fourth adds any
        # to the three is a matter of rounding.
        assert len(values) <= 4
        return
    # The default policy does not examine the rows behind chosen coefficients.
    model.engine.run(session.hide(protocol()), Ledger())
    functions = stats.nbinom.logpmf(np.arange(16), 1.0 / alphas[:, None], 1.0 / (1.0 + alphas[:, None]))
    found = optimize.nnls(functions, np.array(values), maxiter=100_000)[0]
    assert found.round().tolist() == np.bincount(counts, minlength=16).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_an_honest_fit_with_its_dispersion_is_answered(seed):
    """The counts have no value that is far from all others."""
    random = np.random.default_rng(seed)
    x = random.normal(size=600)
    counts = random.poisson(np.exp(0.5 + 0.4 * x) * random.gamma(1.5, 1.0 / 1.5, 600))
    frame = pd.DataFrame({"x": x, "z": counts, "site": np.arange(600) % 3})
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=STRICT)
    family = sm.families.NegativeBinomial(alpha=1.0)
    fit = fs.FederatedGLM.from_formula("z ~ x", partition, family=family).fit(dispersion="ml", local=False)
    assert fit.converged
