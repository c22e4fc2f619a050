"""One step on the score: sensitivities against adversarial neighbors, arithmetic, estimates."""

from itertools import product

import numpy as np
import pytest
import statsmodels.api as sm
from copula_design import BOUNDS, POINTS, RESPONSES, draw_columns, draw_response, released
from scipy.special import expit
from test_private_glm import HELD, TOGETHER, model

import fedstat as fs
from fedstat.errors import ConvergenceWarning, MessageError, ModelError
from fedstat.federation.disclosure import privacy_budget
from fedstat.models.copula_glm import protocol
from fedstat.models.copula_glm.estimation import estimate
from fedstat.models.copula_glm.request import ScoreNoise, ScoreTerms
from fedstat.models.copula_glm.score import (
    SCORE_PLACES,
    ScoreSensitivity,
    SharedMean,
    plan_score,
    share_cubic,
    share_line,
    take_step,
)
from fedstat.privacy.zcdp import epsilon_of_zcdp

SITES, RADII = ("A", "B", "Y"), {"A": 5.76, "B": 1.44}
HALVES = {"A": 2.1, "B": 0.9, "Y": 0.0}


def cubic(offset=-0.7, bits=9):
    w = np.clip(np.random.default_rng(1).normal(0, 0.9, 5_000), -3.0, 3.0)
    return share_cubic(bits, HALVES, lambda t: expit(offset + t), w)


def line(bits=9):
    return share_line(bits, HALVES, 0.5, -0.3, 3.0)


MEANS = {"cubic": cubic, "rare events": lambda: cubic(-5.0), "line": line}


def reached(mean, holder, moving, rng, tries=500):
    """Largest change of the sums, squared and in real numbers, that was found by replacing parts of a record.

    In the integers that sites use: scores at the end of their length, parts at the ends of their range or
    anywhere, responses likewise.
    """
    best = 0.0
    for t in range(tries):
        fixed = record(mean, rng, t)
        other = record(mean, rng, t + 1)
        # The worst pairs turn a row around, or keep it, while residuals change their sign.
        if t % 2:
            other = {**other, "v": {k: fixed["v"][k] * rng.choice([-1, 1]) for k in RADII}}
        new = {
            "v": {k: other["v"][k] if k in moving else fixed["v"][k] for k in RADII},
            "z": {k: other["z"][k] if k in moving else fixed["z"][k] for k in SITES},
            "y": other["y"] if holder in moving else fixed["y"],
        }
        change = sums(mean, fixed) - sums(mean, new)
        best = max(best, float(change @ change))
    return best / 4.0 ** (mean.places + SCORE_PLACES)


def record(mean, rng, t):
    ends = t % 3 > 0
    v = {}
    for k, squared in RADII.items():
        u = rng.standard_normal(4 if k == "A" else 1)
        v[k] = np.trunc(u / np.linalg.norm(u) * np.sqrt(squared) * 2.0**SCORE_PLACES)
    z = {
        k: (rng.choice([-1.0, 1.0]) if ends else rng.uniform(-1, 1)) * h / 2.0**mean.bits
        for k, h in mean.halves.items()
    }
    return {"v": v, "z": z, "y": (mean.low, mean.high)[rng.integers(2)]}


def sums(mean, one):
    parts = [mean.encode(np.array([z])) for z in one["z"].values()]
    w = int(sum(complete[0] for complete, _ in parts))
    # Whole numbers of Python: what 64 bits hold in sites
    r = one["y"] - mean.constant - sum(int(at[0]) for _, at in parts) - mean.square * w**2 - mean.cube * w**3
    if mean.degree == 1:
        r = one["y"] - mean.constant - sum(int(at[0]) for _, at in parts)
    return np.concatenate([[2.0**SCORE_PLACES], *one["v"].values()]) * float(r)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("holder", ["Y", "A"])
def test_no_neighbor_moves_the_sums_by_more_than_is_charged(name, holder):
    mean, rng = MEANS[name](), np.random.default_rng(4)
    found = ScoreSensitivity.of(mean, RADII, holder)
    complete = reached(mean, holder, SITES, rng)
    assert 0.9 * found.complete < complete <= found.complete
    for site in SITES:
        part = reached(mean, holder, {site}, rng)
        assert part <= found.parts[site]
        if site == holder:
            assert part > 0.9 * found.parts[site]


def test_a_part_that_moves_the_mean_little_needs_less_noise():
    wide, narrow = cubic(), share_cubic(9, {**HALVES, "A": 0.2}, lambda t: expit(t - 0.7), np.zeros(100))
    parts = [ScoreSensitivity.of(mean, RADII, "Y").parts["A"] for mean in (wide, narrow)]
    assert parts[1] < parts[0]


@pytest.mark.parametrize("name", MEANS)
def test_the_polynomial_of_parts_in_integers_is_that_of_the_sum(name):
    mean, rng = MEANS[name](), np.random.default_rng(2)
    parts = {k: mean.part(k, rng.normal(0, 1, 2_000)) for k in SITES}
    complete, fine = zip(*(mean.encode(part) for part in parts.values()), strict=True)
    w = sum(complete)
    shared = mean.constant + sum(fine) + mean.square * w**2 + mean.cube * w**3
    if mean.degree == 1:
        shared = mean.constant + sum(fine)
    exact = mean.at(sum(parts.values()))
    assert np.ldexp(shared.astype(float), -mean.places) == pytest.approx(exact, abs=3e-3)
    low, high = mean.range
    assert low <= exact.min() and exact.max() <= high
    h = 1e-5
    assert mean.slope(np.array([0.1])) == pytest.approx(
        (mean.at(0.1 + h) - mean.at(0.1 - h)) / (2 * h), rel=1e-6
    )


def test_a_cubic_is_near_the_logistic_mean_where_predictors_lie():
    w = np.random.default_rng(1).normal(0, 0.9, 5_000)
    left = expit(-0.7 + w) - cubic().at(cubic().unit * w)
    assert np.sqrt(np.mean(left**2)) < 0.02


@pytest.mark.parametrize(
    ("held", "family"),
    [(HELD, "Binomial"), (HELD, "Gaussian"), (TOGETHER, "Gaussian"), ({"All": ["y", *BOUNDS]}, "Binomial")],
    ids=["apart, binary", "apart", "together", "one, binary"],
)
def test_sums_are_those_of_the_rows_to_the_last_bit(monkeypatch, family, held):
    """Shares, products and powers modulo 2^64 against the same integers in one place."""
    monkeypatch.setattr(privacy_budget, "discrete_gaussian", lambda v, size, source: np.zeros(size, np.int64))
    seen = {}

    def keep(fit, request, found, n, deviation):
        seen.update(fit=fit, requested=request, sums=found)
        return take_step(fit, request, found, n, deviation)

    monkeypatch.setattr(protocol, "take_step", keep)
    rng = np.random.default_rng(2)
    frame = draw_columns(600, rng)
    frame["y"] = draw_response(family, frame, rng)
    bounds = {**BOUNDS, "y": RESPONSES[family]}
    made, _ = model(
        held, 50.0, frame=frame, family=getattr(sm.families, family)(), bounds=bounds, budget=90.0
    )
    result = made.fit(polish=1, draws=10)
    fit, request = seen["fit"], seen["requested"]
    mean, design, b = request.mean, fit.distribution.design, fit.root.params
    codes = np.column_stack([bins.code(frame[bins.name]) for bins in design.bins])
    scores = np.trunc(design.score(codes, design.tables(fit.distribution.margins)) * 2.0**16) / 2.0**16
    V = np.column_stack([np.ones(600), np.trunc(scores * 2.0**SCORE_PLACES) / 2.0**SCORE_PLACES])
    values = frame[[column.name for column in design.columns]].to_numpy()
    parts = [
        mean.encode(mean.part(site, values[:, block] @ b[1:][block] - request.middles[site]))
        for site, block in zip(design.sites, design.blocks, strict=True)
    ]
    w = sum(complete for complete, _ in parts)
    curved = mean.square * w**2 + mean.cube * w**3 if mean.degree == 3 else 0
    shared = np.ldexp(np.float64(mean.constant + sum(fine for _, fine in parts) + curved), -mean.places)
    response = fit.release.response
    y = frame["y"].to_numpy()
    if family == "Gaussian":
        y = response.table[response.bins.code(frame["y"])]
    assert seen["sums"] == pytest.approx(V.T @ (y - shared), abs=0.1 if family == "Gaussian" else 1e-6)
    assert result.method_name == "moments, one step"


def test_every_site_adds_noise_that_pays_for_its_own_part(monkeypatch):
    drawn = []

    def draw(variance, size, source):
        drawn.append((int(variance), size))
        return np.zeros(size, np.int64)

    monkeypatch.setattr(privacy_budget, "discrete_gaussian", draw)
    plans = []
    plan = ScoreNoise.variances.func
    monkeypatch.setattr(ScoreNoise, "variances", property(lambda self: plans.append(self) or plan(self)))
    made, _ = model(n=400)
    made.fit(polish=1, draws=10)
    request = plan(plans[0])
    assert drawn[-4:] == [(request[site], 11) for site in ("Registry", "A", "B", "C")]
    for site in request:
        assert plans[0].terms.squared(site) <= 2 * plans[0].rho * request[site]
    complete = plans[0].terms.sensitivity.complete * 4 ** plans[0].terms.sum_places
    assert complete <= 2 * plans[0].rho * sum(request.values())


@pytest.mark.parametrize("family", ["Binomial", "Gaussian"])
def test_with_hardly_any_noise_it_is_the_vertical_model_without_a_penalty(family):
    rng = np.random.default_rng(6)
    frame = draw_columns(4_000, rng)
    frame["y"] = draw_response(family, frame, rng)
    distribution = getattr(sm.families, family)()
    exact = fs.VerticalGLM.from_formula(
        "y ~ .", fs.ClientPartition.from_frame(frame, columns=HELD), family=distribution
    ).fit(lam=0.0)
    bounds = {**BOUNDS, "y": RESPONSES[family]}
    made, _ = model(frame=frame, family=distribution, epsilon=3000.0, budget=4000.0, bounds=bounds)
    result = made.fit(polish=1, draws=10)
    # Remaining differences: scores in bins weigh rows differently, and the copula gives a remainder.
    away = ((result.params - exact.params) / exact.bse).to_numpy()
    assert np.sqrt(np.mean(away**2)) < 0.3 and np.abs(away).max() < 0.6
    assert (result.bse / exact.bse).to_numpy() == pytest.approx(1.02, abs=0.06)
    assert not result.use_t and result.df_inference is None
    text = str(result.summary())
    assert "moments, one step" in text and "closed form" in text and "P>|z|" in text


def test_the_covariance_is_that_of_steps_from_one_start():
    """Steps on many tables of one law, from what was released of another: their spread."""
    rng = np.random.default_rng(7)
    columns = draw_columns(10_000, rng)
    design, release = released("Binomial", columns, draw_response("Binomial", columns, rng))
    fit = estimate(design, release, POINTS)
    n, deviation, found = 1_500, 15.0, []
    request = plan_score(fit, "Y", n, 4.0)
    b = fit.root.params
    for _ in range(150):
        latents = fit.distribution.draw(n, rng)
        values = design.values(latents, fit.distribution.margins)
        y = rng.uniform(size=n) < expit(b[0] + values @ b[1:])
        V = np.column_stack(
            [np.ones(n), design.score(fit.distribution.code(latents), fit.distribution.tables)]
        )
        pairs = zip(design.sites, design.blocks, strict=True)
        w = sum(request.mean.part(c, values[:, at] @ b[1:][at] - request.middles[c]) for c, at in pairs)
        total = V.T @ (y - request.mean.at(w)) + deviation * rng.standard_normal(11)
        found.append(take_step(fit, request, total, n, deviation))
    spread = np.std([one.params for one in found], axis=0)
    share = spread / np.sqrt(np.diag(found[0].covariance))
    assert np.sqrt(np.mean(share**2)) == pytest.approx(1.0, abs=0.06)  # 1,650 numbers that correlate
    center = (np.mean([one.params for one in found], axis=0) - b) / spread * np.sqrt(150)
    assert np.abs(center).max() < 4.0
    assert found[0].noise[1, 1] > 0.1 * found[0].sampling[1, 1]


def test_what_is_charged_is_within_epsilon_and_as_planned():
    made, _ = model(epsilon=8.0, budget=8.0, n=1_000)
    made.fit(polish=1, draws=10)
    planned = made._with_steps(1)._planned
    assert planned.of_step == made._rho / 2
    for name, site in made.partition.sites.items():
        spent = site.site_ledger.charges.spent
        assert abs(spent - planned.site_cost(name)) < 1e-15
        assert epsilon_of_zcdp(spent, 1e-6) <= 8.0
    assert epsilon_of_zcdp(planned.coordinator_cost(), 1e-6) <= 8.0


def test_an_explanation_counts_the_step():
    made, _ = model(epsilon=5.0)
    explained = made.explain(polish=1)
    assert {"begin_score", "take_product", "release_score"} <= set(explained.table["step"])
    assert "release_score" not in set(made.explain().table["step"])
    ratio = [float(str(e).split("Noise adds about ")[1].split()[0]) for e in (made.explain(), explained)]
    assert ratio[1] > ratio[0]


def test_no_step_is_requested_where_there_is_nowhere_to_begin(monkeypatch):
    from fedstat.models.copula_glm import estimation

    made, _ = model(n=1_000)
    monkeypatch.setattr(estimation, "STEPS", 1)
    with pytest.warns(ConvergenceWarning):
        result = made.fit(polish=1, draws=10)
    text = " ".join(str(result.summary()).split())
    assert "NOT CONVERGED" in text and "P>|" not in text and "was not taken" in text
    assert "release_score" not in set(result.ledger.releases()["step"])


def test_selection_and_files_go_on_after_a_step(tmp_path):
    made, _ = model()
    result = made.fit(polish=1, draws=30, seed=2)
    found = result.select().set_index("term")
    assert found.loc[["a", "c", "f"], "selected"].all()
    result.save(tmp_path / "step.fed")
    again = fs.load(tmp_path / "step.fed")
    assert str(again.summary()) == str(result.summary()) and again.select().equals(result.select())


@pytest.mark.parametrize(
    "options, told", [({"polish": 2}, "polish"), ({"estimator": "likelihood"}, "estimator")]
)
def test_arguments_of_a_fit(options, told):
    made, _ = model(n=100)
    with pytest.raises(ModelError, match=told):
        made.fit(**options)


def test_counts_have_no_step():
    bounds = {**BOUNDS, "y": RESPONSES["Poisson"]}
    made, _ = model(n=100, family=sm.families.Poisson(), bounds=bounds)
    with pytest.raises(ModelError, match=r"Poisson .* Use polish=0"):
        made.fit(polish=1)
    assert not made.partition.sites["A"].site_ledger.charges.made


def test_a_strange_mean_is_refused():
    good = cubic()
    for name, value in [("cube", 2), ("unit", np.inf), ("constant", 2**60), ("halves", {"A": -1})]:
        fields = {one: getattr(good, one) for one in SharedMean.__dataclass_fields__}
        with pytest.raises(MessageError):
            SharedMean(**{**fields, name: value}).check()
    for sites, widths in product([("A", "B", "Y"), ("A", "A", "Y")], [(4, 1, 0), (4, 0, 0)]):
        if (sites, widths) != (("A", "B", "Y"), (4, 1, 0)):
            with pytest.raises(MessageError):
                ScoreTerms(sites, widths, "Y", good).check()
