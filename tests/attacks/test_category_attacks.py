"""Values and categories of single persons from regressions of categories.

At the first point of Newton's method all rows have the same probabilities. The score of a category and a
column is then the sum of the column over the rows of the category, less a known multiple of its sum over
all rows.
Each attack reads it where nothing is protected; under the strict policy one of its fits is refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.inference.evaluation import merge_small_bins
from fedstat.kernels.categories import log_terms
from fedstat.models.categories.evaluation import evaluate_categories
from fedstat.models.categories.steps import FAMILY, joint_bins

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, VICTIM, SITES = 200, 17, ("S0", "S1", "S2")
LEVELS = ["poor", "fair", "good"]
NUMBER = {"kind": "number"}
PUBLISHED = {
    "income": NUMBER | {"range": [0.5, 9.0]},
    "flag": NUMBER | {"range": [0, 1], "levels": [0, 1]},
    "x": NUMBER | {"range": [-9.0, 9.0]},
    "grade": {"kind": "category", "levels": LEVELS},
    "rare": {"kind": "category", "levels": ["none", *LEVELS]},
    "merged": {"kind": "category", "levels": ["low", "good"]},
    "nearly": {"kind": "category", "levels": ["low", "good"]},
}


def table() -> pd.DataFrame:
    """The victim alone has the flag and is poor; `nearly` merges two grades, except for the victim."""
    rng = np.random.default_rng(7)
    n = ROWS * len(SITES)
    grade = np.array(LEVELS)[rng.integers(0, 3, n)]
    flag = (rng.random(n) < 0.25) * 1.0
    flag[:ROWS][grade[:ROWS] == "poor"] = 0.0
    grade[VICTIM], flag[VICTIM] = "poor", 1.0
    merged = np.where(grade == "good", "good", "low")
    nearly = merged.copy()
    nearly[VICTIM] = "good"
    rare = grade.astype(object)
    for start in range(0, n, ROWS):
        rare[start + np.flatnonzero(grade[start : start + ROWS] == "poor")[:2]] = "none"
    return pd.DataFrame(
        {
            "site": np.repeat(SITES, ROWS),
            "grade": grade,
            "merged": merged,
            "nearly": nearly,
            "rare": rare,
            "flag": flag,
            "x": rng.normal(size=n).round(2),
            "income": rng.uniform(1.0, 8.0, n).round(3),
        }
    )


FRAME, STRICT = table(), fs.Policy.strict(reasons="sent")


def partition(policy, frame=FRAME) -> fs.ClientPartition:
    return fs.ClientPartition.from_frame(
        frame, by="site", policy=policy, published=dict.fromkeys(SITES, PUBLISHED)
    )


def sums_of_categories(formula, at, kind="Multinomial"):
    """Sums of every column over the rows of each category but the first, at site S0: from its first score."""
    model = getattr(fs, f"Federated{kind}").from_formula(formula, at)
    fit = model.fit(maxiter=1, masked=False)
    found, p = fit._record.fit, len(fit._record.fit.design.names)
    share = found.counts[0] / found.counts[0].sum()
    design = found.design
    score = found.total.by_site[0][0].reshape(-1, p)
    own = columns_of(model)
    # In units of the data: the score of a column less its shift times that of the constant.
    shift, scale = design.mean.copy(), design.spread.copy()
    shift[0], scale[0] = 0.0, 1.0
    raw = score * scale + np.outer(score[:, 0], shift)
    return pd.DataFrame(
        raw + np.outer(share[1:], own), columns=list(design.names), index=found.categories[1:]
    )


def columns_of(model):
    """Sums of the columns at site S0, which it releases unmasked before the fit."""
    session = model._open_session(FAMILY, False)
    replies = LocalEngine(model.partition.sites).run(_opening(session), Ledger())
    return replies[len(SITES)].arrays["moments"][1]


def _opening(session):
    return (yield session.opening())


def test_a_cell_of_one_person_is_not_read():
    formula = "grade ~ flag + flag:income"
    levels = "C(grade, levels=['good', 'fair', 'poor']) ~ flag + flag:income"
    found = sums_of_categories(levels, partition(None))
    assert found.loc["poor", "flag"] == pytest.approx(1.0)
    assert found.loc["poor", "flag:income"] == pytest.approx(FRAME["income"][VICTIM], abs=1e-9)
    for kind in (fs.FederatedMultinomial, fs.FederatedOrdinal):
        with pytest.raises(PolicyError, match="rows behind a product"):
            kind.from_formula(formula, partition(STRICT)).fit()


def test_merged_and_separate_categories_differ_by_no_single_row():
    at = partition(None)
    separate = sums_of_categories("C(grade, levels=['good', 'fair', 'poor']) ~ x + income", at)
    nearly = sums_of_categories("C(nearly, levels=['good', 'low']) ~ x + income", at)
    left = separate.sum() - nearly.loc["low"]
    assert left["income"] == pytest.approx(FRAME["income"][VICTIM], abs=1e-8)
    assert left["x"] == pytest.approx(FRAME["x"][VICTIM], abs=1e-8)
    strict = partition(STRICT)
    assert fs.FederatedOrdinal.from_formula("grade ~ x + income", strict).fit().converged
    # A true merger adds nothing; one that leaves a row out differs by this row.
    assert fs.FederatedMultinomial.from_formula("merged ~ x + income", strict).fit().converged
    with pytest.raises(PolicyError, match="single out fewer"):
        fs.FederatedMultinomial.from_formula("nearly ~ x + income", strict).fit()


def test_a_rare_category_is_no_difference_of_two_others():
    with pytest.raises(PolicyError, match="minimum rows per level"):
        fs.FederatedMultinomial.from_formula("rare ~ x", partition(STRICT))
    frame = FRAME.assign(merged=np.where(FRAME["rare"] == "none", "good", FRAME["merged"]))
    strict = partition(STRICT, frame)
    assert fs.FederatedMultinomial.from_formula("merged ~ x", strict).fit().converged
    with pytest.raises(PolicyError, match="single out fewer"):
        fs.FederatedOrdinal.from_formula("grade ~ x", strict).fit()


def test_thresholds_of_two_sets_of_rows_do_not_reveal_a_category():
    frame = FRAME.assign(hidden=FRAME["x"].where(FRAME.index != VICTIM))
    published = PUBLISHED | {"hidden": PUBLISHED["x"]}

    def fits(policy):
        at = fs.ClientPartition.from_frame(
            frame, by="site", policy=policy, published=dict.fromkeys(SITES, published)
        )
        return [
            fs.FederatedOrdinal.from_formula(f"grade ~ {name}", at, levels=LEVELS).fit()
            for name in ("x", "hidden")
        ]

    counts = [fit._record.fit.counts[0] for fit in fits(fs.Policy(remember="nothing"))]
    assert LEVELS[int(np.argmax(counts[0] - counts[1]))] == FRAME["grade"][VICTIM]
    for policy in (None, replace(STRICT, small_differences="refuse")):
        with pytest.raises(PolicyError, match="differencing"):
            fits(policy)
    # Both fits are without the row that lacks a value.
    first, second = (fit._record.fit.counts[0] for fit in fits(STRICT))
    assert (first == second).all()


def information_of_thresholds(at, formula, thresholds):
    """Observed information of site S0 at thresholds without effects, in the units of the data."""
    model = fs.FederatedOrdinal.from_formula(formula, at, levels=LEVELS, distr="probit")
    session, ledger = model._open_session(FAMILY, False), Ledger()
    LocalEngine(at.sites).run(_started(session, "probit"), ledger)
    p, found = len(model.agreement.spec.columns) + 1, []
    for theta in thresholds:
        beta = np.concatenate([theta, np.zeros(p - 1)])
        arrays = {"shift": np.zeros(p), "scale": np.ones(p), "beta": beta}
        request = Request("S0", FAMILY, "sum_scores", arrays, session.session)
        reply = unpack_reply(at.sites["S0"].answer(pack_request(request)))
        found.append(reply.arrays["information"][2:, 2:])
    return np.array(found)


def test_information_at_several_thresholds_is_of_no_single_row():
    # Of the poor all but the victim have the flag: their income without those with the flag is the victim's.
    frame = FRAME.assign(flag=np.where(FRAME["grade"] == "poor", 1.0, FRAME["flag"]))
    frame.loc[VICTIM, "flag"] = 0.0
    thresholds = [np.array([-1.0, 1.0]), np.array([0.0, 1.0]), np.array([-1.0, 0.5])]
    found = information_of_thresholds(partition(None, frame), "grade ~ flag + income", thresholds)
    three = np.arange(3)
    weights = [
        -log_terms(np.tile(theta, (3, 1)), three, "probit")[2].sum(axis=(1, 2)) for theta in thresholds
    ]
    by_grade = np.tensordot(np.linalg.inv(np.array(weights)), found, axes=1)
    poor = frame["income"][:ROWS][frame["grade"][:ROWS] == "poor"]
    with_flag = by_grade[0][0, 1]
    assert poor.sum() - with_flag == pytest.approx(FRAME["income"][VICTIM], abs=1e-6)
    with pytest.raises(PolicyError, match=r"'income \(of poor\)', and not 'flag \(of poor\)'"):
        fs.FederatedOrdinal.from_formula("grade ~ flag + income", partition(STRICT, frame)).fit()


@pytest.mark.parametrize("kind", ["Multinomial", "Ordinal"])
def test_parameters_that_single_out_rows_are_answered_with_nothing(kind):
    at = partition(None)
    model = getattr(fs, f"Federated{kind}").from_formula("grade ~ income", at, levels=LEVELS)
    model.fit()
    site, top = at.sites["S0"], FRAME["income"][:ROWS].max()
    session = model._open_session(FAMILY, False)
    LocalEngine(at.sites).run(_started(session, "baseline" if kind == "Multinomial" else "logit"), Ledger())
    steep = 400.0 if kind == "Multinomial" else -400.0
    # All probability moves to one category at the largest income: weight is on the rows next to it.
    beta = np.array([-steep * (top - 0.01), steep, -60.0, 0.0])
    if kind == "Ordinal":
        beta = np.array([steep * -(top - 0.01), steep * -(top - 0.01) + 1.0, -steep])
    arrays = {"shift": np.zeros(2), "scale": np.ones(2), "beta": beta}
    request = Request("S0", FAMILY, "sum_scores", arrays, session.session)
    reply = unpack_reply(site.answer(pack_request(request)))
    assert not reply.arrays["spread"]
    assert not reply.arrays["score"].any() and not reply.arrays["information"].any()


def _started(session, link):
    yield session.opening()
    yield session.request_all("start", {}, f'{{"link": "{link}", "clusters": []}}')


def counts_around_the_victim(policy):
    """Rows by category in a bin of the first probability that has the victim, less one of the last without.

    At chosen parameters the rows (0, 0) and the victim (0, 1) have the same probability of the first
    category, and the rows (1, 1) and the victim the same probability of the last one.
    """
    rng = np.random.default_rng(3)
    here = np.repeat([[0.0, 0.0], [1.0, 1.0], [2.0, -1.0], [-1.0, 2.0]], [60, 60, 40, 40], axis=0)
    here[VICTIM] = 0.0, 1.0
    x, w = np.tile(here, (len(SITES), 1)).T
    frame = pd.DataFrame({"x": x, "w": w, "site": np.repeat(SITES, len(here))})
    frame["grade"] = np.array(LEVELS)[rng.integers(0, 3, len(frame))]
    published = {"x": PUBLISHED["x"], "w": PUBLISHED["x"], "grade": PUBLISHED["grade"]}
    at = fs.ClientPartition.from_frame(
        frame, by="site", policy=policy, published=dict.fromkeys(SITES, published)
    )
    fit = fs.FederatedMultinomial.from_formula("grade ~ x + w", at, levels=LEVELS).fit()
    shares = {(0, 0): (0.5, 0.4, 0.1), (0, 1): (0.5, 0.1, 0.4), (1, 1): (0.1, 0.5, 0.4)}
    points = np.array([[1.0, *point] for point in shares])
    odds = np.log([[share[1] / share[0], share[2] / share[0]] for share in shares.values()])
    wanted = np.linalg.solve(points, odds).T.ravel()
    gamma = np.linalg.solve(fit._record.fit.back, wanted)
    chosen = replace(fit._record.fit, gamma=gamma)
    evaluated, _ = evaluate_categories(chosen, fit.basis.agreement, at, False)
    bins = evaluated.pairs[0]
    with_victim = bins[0][:, bins[0].sum(axis=0) == 60][:, -1:]
    without = bins[2][:, bins[2].sum(axis=0) == 59]
    return frame["grade"][VICTIM], with_victim, without


def test_bins_of_two_categories_differ_by_no_single_row():
    """Hand and Till's areas need counts of all categories in bins of each probability: several divisions."""
    grade, with_victim, without = counts_around_the_victim(fs.Policy())
    assert (with_victim - without).ravel().tolist() == [float(grade == level) for level in LEVELS]
    _, with_victim, without = counts_around_the_victim(fs.Policy(evaluation="once"))
    assert with_victim.size == 0 or without.size == 0


@pytest.mark.parametrize("least", [1, 3, 5])
def test_no_combination_of_divisions_is_of_few_rows(least):
    rng = np.random.default_rng(least)
    order = rng.normal(size=300)
    values = [order, -order + 0.1 * rng.normal(size=300), np.abs(order)]
    places = [np.digitize(one, np.linspace(-2.0, 2.0, 15)) for one in values]
    known = apart = ReleasedSums.none(300)
    for place, found in zip(places, joint_bins(places, [16] * 3, least), strict=True):
        known = known.with_groups(np.unique(found, return_inverse=True)[1])
        own = merge_small_bins(np.bincount(place, minlength=16), least)[place]
        apart = apart.with_groups(np.unique(own, return_inverse=True)[1])
        counts = np.bincount(found)
        assert counts[counts > 0].min() >= least and len(np.unique(found)) > 2
    assert not known.isolates(least) and (least == 1 or apart.isolates(least))
