"""What coordinator and institutions see of a private step on the score, and one that departs from it.

The coordinator carries sealed columns and receives shares, each with noise; an institution opens columns of
others minus a random table. A request that differs from the agreement is refused, or its cost is charged.
"""

import json

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.codec import from_json, to_json
from fedstat.errors import DescriptionError, PolicyError, SecurityError
from fedstat.federation.disclosure import privacy_budget
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.product_steps import OpenProduct
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.copula_glm import steps
from fedstat.models.copula_glm.request import ScoreNoise

N = 600
HELD = {"Registry": ["y"], "A": ["a", "b"], "B": ["c"]}
BOUNDS = {"y": [0, 1], "a": (-4, 4), "b": (-4, 4), "c": (-4, 4)}
RNG = np.random.default_rng(5)
FRAME = pd.DataFrame(RNG.normal(size=(N, 3)), columns=list("abc"))
# Columns of A and of B have an effect, so that a range of 1 for B is never the true one.
FRAME["y"] = (RNG.uniform(size=N) < 1 / (1 + np.exp(FRAME["c"] - FRAME["a"]))).astype(int)


def model(epsilon=6.0, budget=50.0, policy=None):
    policy = policy or fs.Policy(privacy=fs.Budget(budget, 1e-6))
    partition = fs.ClientPartition.from_frame(FRAME, columns=HELD, policy=policy)
    return fs.PrivateCopulaGLM.from_formula(
        "y ~ .", partition, family=sm.families.Binomial(), epsilon=epsilon, bounds=BOUNDS
    )


def shares_of(messages):
    return np.array([r.arrays["share"] for request, r in messages if request.step == "release_score"])


def test_the_coordinator_sees_random_words_and_one_noisy_sum(messages, monkeypatch):
    drawn, draw = [], privacy_budget.discrete_gaussian

    def record(variance, size, source):
        found = draw(variance, size, source)
        drawn.append((variance, found))
        return found

    monkeypatch.setattr(privacy_budget, "discrete_gaussian", record)
    model().fit(polish=1, draws=10)
    shares = shares_of(messages)
    noise = np.array([found for _, found in drawn[-3:]])
    deviations = [float(variance) ** 0.5 for variance, _ in drawn[-3:]]
    # Each share, and what two of the three are together, is as large as 64 bits go: noise does not hide it
    # and need not.
    for words in (*shares, shares[0] + shares[1], shares[1] + shares[2]):
        assert np.abs(words.astype(float)).max() > 1e3 * max(deviations)
    # The sum is one, and has the noise of all three: no share goes without its own.
    total = shares.sum(axis=0)
    assert np.abs(total.astype(float)).max() < 2.0**60
    assert all((found != 0).all() for found in noise)
    exact = (total - noise.sum(axis=0)).astype(float)
    assert np.abs(exact - total).min() > 0
    # All else that left in the step is sealed, or says that it was taken.
    begun = next(i for i, (request, _) in enumerate(messages) if request.step == "begin_score")
    later = {name for _, reply in messages[begun:] for name in reply.arrays}
    assert later == {"taken", "for_a", "for_b", "opened", "share"}


def test_a_site_opens_what_reveals_it_nothing(monkeypatch):
    """Columns of others less a random table: uniform words, of no correlation with the columns."""
    opened, read = [], OpenProduct.read

    def watch(self, message):
        shown = read(self, message)
        if not self.part.columns.startswith("score"):
            opened.append((self.part, shown.columns.copy()))
        return shown

    monkeypatch.setattr(OpenProduct, "read", watch)
    made = model()
    made.fit(polish=1, draws=10)
    powers = [(part, words) for part, words in opened if part.columns.startswith("power")]
    assert len(powers) == 6
    for part, words in powers:
        uniform = words[:, 0] / 2.0**63
        assert abs(uniform.mean()) < 5.0 / np.sqrt(3 * N)
        assert abs((uniform**2).mean() - 1 / 3) < 5.0 * 0.3 / np.sqrt(N)
        if part.peer == "A":
            assert abs(np.corrcoef(uniform, FRAME["a"])[0, 1]) < 4.5 / np.sqrt(N)


def test_the_shares_that_stay_are_uniform_too(monkeypatch):
    kept, take = [], steps.take_share

    def watch(state, product, opened):
        kept.append(take(state, product, opened))
        return kept[-1]

    monkeypatch.setattr(steps, "take_share", watch)
    model().fit(polish=1, draws=10)
    of_rows = [share for share in kept if len(share) == N]
    assert len(of_rows) == 12
    for share in of_rows:
        words = share[:, 0, 0] / 2.0**63
        assert abs((words**2).mean() - 1 / 3) < 4 * 0.3 / np.sqrt(N)
        assert abs(np.corrcoef(words, FRAME["a"])[0, 1]) < 4.5 / np.sqrt(N)


# ---- one that asks otherwise -----------------------------------------------------------------------


def request_again(made, request):
    return unpack_reply(made.partition.sites[request.site].answer(pack_request(request)))


def last(messages, step, site):
    return next(request for request, _ in reversed(messages) if (request.step, request.site) == (step, site))


def test_the_same_sums_have_the_same_noise_and_cost_nothing(messages):
    made = model(policy=fs.Policy(privacy=fs.Budget(50.0, 1e-6), order="any"))
    made.fit(polish=1, draws=10)
    before = [site.site_ledger.charges.spent for site in made.partition.sites.values()]
    again = [request_again(made, last(messages, "release_score", site)) for site in HELD]
    assert np.array_equal([reply.arrays["share"] for reply in again], shares_of(messages))
    assert [site.site_ledger.charges.spent for site in made.partition.sites.values()] == before


def test_a_step_again_is_charged_again_and_has_no_shares_of_the_one_before(messages):
    made = model(policy=fs.Policy(privacy=fs.Budget(50.0, 1e-6), order="any"))
    made.fit(polish=1, draws=10)
    request_again(made, last(messages, "begin_score", "A"))
    with pytest.raises(DescriptionError, match="come first"):
        request_again(made, last(messages, "release_score", "A"))


def test_no_product_is_made_twice_under_one_noise(messages):
    """With another share of B's under the same noise, two answers of A would differ by A's own numbers."""
    made = model(policy=fs.Policy(privacy=fs.Budget(50.0, 1e-6), order="any"))
    made.fit(polish=1, draws=10)
    for step in ("take_product", "open_product"):
        request = last(messages, step, "A")
        with pytest.raises((PolicyError, SecurityError)):
            request_again(made, request)


def test_little_noise_is_requested_at_the_price_of_a_budget(monkeypatch):
    monkeypatch.setattr(ScoreNoise, "variances", property(lambda self: dict.fromkeys(self.terms.sites, 4)))
    made = model()
    with pytest.raises(DescriptionError, match="privacy budget"):
        made.fit(polish=1, draws=10)


@pytest.mark.parametrize("what", ["halves", "radius"])
def test_who_is_reported_otherwise_shares_nothing(monkeypatch, what):
    """Told of a narrow range of B's part, or of few columns, A would be charged too little."""

    def lie(self, site, step, text="", **arrays):
        if step == "begin_score" and site == "A":
            reported = json.loads(text)
            if what == "halves":
                reported["terms"]["mean"]["halves"]["B"] = 1
            else:
                reported["terms"]["widths"][2] = 2
            text = json.dumps(reported)
        given = {name: np.asarray(array) for name, array in arrays.items()}
        return Request(site, self.family, step, given, self.session, text)

    monkeypatch.setattr(SecureProductSession, "request", lie)
    made = model()
    with pytest.raises((PolicyError, SecurityError)):
        made.fit(polish=1, draws=10)


def test_steps_come_in_the_order_of_a_fit_under_a_strict_policy(messages):
    made = model(policy=fs.Policy.strict(privacy=fs.Budget(50.0, 1e-6)))
    made.fit(polish=1, draws=10)
    with pytest.raises(DescriptionError, match="order"):
        request_again(made, last(messages, "begin_score", "A"))


def test_residuals_are_in_their_range_whatever_coefficients_are_reported(messages):
    """Coefficients and middles of the coordinator's making cannot make an entity weigh more."""
    made = model(policy=fs.Policy(privacy=fs.Budget(50.0, 1e-6), order="any"))
    made.fit(polish=1, draws=10)
    requested = from_json(steps.ScoreStepRequest, last(messages, "begin_score", "A").text, "")
    mean = requested.terms.mean
    for middle, slopes in [(0.0, (1e12, -1e12)), (1e300, (1e300, 1e300))]:
        wrong = steps.ScoreStepRequest(
            requested.terms, "A", requested.columns, slopes, middle, requested.variance
        )
        request = last(messages, "begin_score", "A")
        request_again(made, Request("A", request.family, "begin_score", {}, request.session, to_json(wrong)))
        kept = made.partition.sites["A"].states[request.session].look_at(steps.KEPT_ROWS)
        assert np.abs(kept.part).max() <= mean.halves["A"]
        lengths = (kept.scores.astype(float) ** 2).sum(axis=1)
        assert lengths.max() <= requested.terms.radii["A"] * 4.0**10
