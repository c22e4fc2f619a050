"""A lower bound of epsilon from one release: which of many planted rows are in it?

Each of m rows is in the table with probability one half. An attacker guesses the clearest r of them, from one
release of all. Under epsilon and delta, v right guesses or more have at most the probability of
:func:`p_value` (Steinke, Nasr and Jagielski 2023, theorem 5.2), so that an epsilon with a smaller one than
0.05 is refuted.

The bound is loose for Gaussian noise: it uses the odds of single guesses, and the odds that a delta of 1e-6
allows are rare. So noise of half the deviation is found where very many rows have sums of their own, as in a
table of counts, and in a regression step noise of a quarter.

References
----------
Steinke, T., Nasr, M. and Jagielski, M. (2023). Privacy auditing with one (1) training run. NeurIPS. arXiv
2305.08846.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedstat as fs
from fedstat.codec import to_json
from fedstat.federation.disclosure import privacy_budget
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.inference.noisy_tables import UNIT
from fedstat.models.descriptive.noisy_steps import CodedColumn, NoisyTableRequest, TablePart
from fedstat.models.glm.noisy_fit import noisy_question
from fedstat.models.glm.noisy_newton import NoisyIteration, unpack_information
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget

DELTA, LEVEL, EPSILON = 1e-6, 0.05, 2.0
POLICY = fs.Policy(privacy=fs.Budget(50.0, DELTA))


def p_value(m, r, v, epsilon, delta):
    """Largest probability of v right guesses or more of r, of m rows, under epsilon and delta."""
    right = 1.0 / (1.0 + math.exp(-epsilon))
    before = np.cumsum(stats.binom.pmf(np.arange(v - 1, -1, -1), r, right))
    more = (before / np.arange(1, v + 1)).max(initial=0.0)
    return min(stats.binom.sf(v - 1, r, right) + 2 * m * delta * more, 1.0)


def least_epsilon(m, r, v):
    """Largest epsilon that v right guesses refute, to three digits."""
    low, high = 0.0, 40.0
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if p_value(m, r, v, middle, DELTA) < LEVEL else (low, middle)
    return low


def guess(scores, there, share):
    """Guess the clearest rows by scores that are about 0 without a row and 1 with it: a lower bound."""
    r = round(share * len(scores))
    chosen = np.argsort(-np.abs(scores - 0.5), kind="stable")[:r]
    return least_epsilon(len(scores), r, int(((scores > 0.5) == there)[chosen].sum()))


def answer(frame, family, step, request):
    """Return the noisy sums of a new site, and the epsilon that it has charged."""
    site = Site("A", frame, POLICY)
    message = pack_request(Request("A", family, step, {}, "s", to_json(request)))
    arrays = unpack_reply(site.answer(message)).arrays
    return arrays, float(epsilon_of_zcdp(site.site_ledger.charges.spent, DELTA))


def counts_in_one_run(seed, side=500):
    """Each row has a cell of a crosstab alone: the bound, and what is printed."""
    there = np.random.default_rng(seed).random(side * side) < 0.5
    x, y = np.divmod(np.flatnonzero(there), side)
    edges = tuple((np.arange(side - 1) + 0.5).tolist())
    part = TablePart("cells", (CodedColumn("x", edges=edges), CodedColumn("y", edges=edges)))
    request = NoisyTableRequest((part,), (), str(rho_of_budget(EPSILON, DELTA)))
    frame = pd.DataFrame({"x": x * 1.0, "y": y * 1.0})
    arrays, charged = answer(frame, "descriptive", "sum_noisy_table", request)
    return guess(arrays["sums"].ravel() / UNIT, there, 0.01), charged


def step_in_one_run(seed, p=80):
    """Each row has two of p columns, whose product is in one entry of the information: as for counts.

    Half of the square of what a row adds to the information is in this entry, and a tenth of the charge is
    for the score.
    """
    names = [f"x{j}" for j in range(p)]
    first, second = np.triu_indices(p, 1)
    rng = np.random.default_rng(seed)
    there = rng.random(len(first)) < 0.5
    # A public model gives the request; the attacker chooses coordinates and coefficients.
    public = pd.DataFrame(rng.normal(size=(300, p)), columns=names).assign(y=[0.0, 1.0] * 150, site="A")
    partition = fs.ClientPartition.from_frame(public, by="site", policy=POLICY)
    model = fs.GLORE.from_formula("y ~ " + " + ".join(names), partition)
    bounds = dict.fromkeys(names, (-9.0, 9.0)) | {"y": [0, 1]}
    question = noisy_question(model, 49.0, DELTA, bounds)
    iteration = NoisyIteration.begin("Binomial", question.plan_at(10**6), np.eye(p + 1), (0.0, 1.0))
    iteration.step, iteration.scale = 3, 0.25
    rho = rho_of_budget(EPSILON, DELTA)
    request = question.request(iteration, (rho / 10, 9 * rho / 10), Fraction(0), None)
    transform = np.eye(p + 1)
    transform[0, 0] = 0.0  # without an intercept
    request = replace(request, transform=tuple(map(tuple, transform.tolist())), squared_radius=2.0)
    variances = [
        math.ceil(Fraction(s) / (2 * part))
        for s, part in zip(request.squared, (rho / 10, 9 * rho / 10), strict=True)
    ]
    request = replace(request, variances=tuple(variances))
    rows = np.zeros((int(there.sum()), p))
    place = np.arange(len(rows))
    rows[place, first[there]] = rows[place, second[there]] = 1.0
    arrays, charged = answer(
        pd.DataFrame(rows, columns=names).assign(y=rng.integers(0, 2, len(rows)) * 1.0),
        "glm",
        "sum_noisy_scores",
        request,
    )
    information = unpack_information(arrays["information"] * 2.0**-request.places, p + 1)[1:, 1:]
    return guess(information[first, second] / 0.25, there, 0.03), charged


def test_a_p_value_is_that_of_guesses_with_the_odds_of_epsilon():
    """With delta 0 it is binomial, and a delta adds at most 2 m delta over one right guess."""
    right = math.exp(1.0) / (1.0 + math.exp(1.0))
    assert p_value(100, 40, 33, 1.0, 0.0) == pytest.approx(stats.binom.sf(32, 40, right))
    exact = sum(stats.binom.pmf(k, 40, right) for k in range(33, 41))
    assert exact < p_value(100, 40, 33, 1.0, 1e-5) < exact + 2 * 100 * 1e-5
    # 40 right guesses of 40 refute what makes them improbable: right^40 = 0.05.
    found = math.exp(least_epsilon(40, 40, 40))
    assert found / (1.0 + found) == pytest.approx(0.05 ** (1 / 40), abs=2e-3)


def noise_of(monkeypatch, scale):
    drawn = privacy_budget.discrete_gaussian
    monkeypatch.setattr(
        privacy_budget,
        "discrete_gaussian",
        lambda variance, *more: drawn(variance * Fraction(scale) ** 2, *more),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "broken"), [(counts_in_one_run, 0.5), (step_in_one_run, 0.25)], ids=["counts", "step"]
)
def test_one_run_refutes_no_epsilon_that_is_printed_but_that_of_broken_noise(run, broken, monkeypatch):
    bound, printed = run(1)
    print(f"epsilon {printed:.2f} is charged, at least {bound:.2f} is shown")
    assert 0.05 * printed < bound < printed <= EPSILON
    noise_of(monkeypatch, broken)
    bound, printed = run(1)
    print(f"epsilon {printed:.2f} is charged for {broken} of the noise, at least {bound:.2f} is shown")
    assert bound > printed
