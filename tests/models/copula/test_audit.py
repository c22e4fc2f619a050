"""Audits: on the real mechanism they never exceed the claim, and each of its known faults is seen."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from noisy_counts import BinsRequest, counting  # noqa: F401
from pictures import JOURNAL, faults, page

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import ModelError
from fedstat.federation.audit.budget_charges import Charges
from fedstat.federation.audit.ledger_file import begin_ledger, open_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure import privacy_budget
from fedstat.federation.disclosure.privacy_budget import NoiseMechanism
from fedstat.federation.disclosure.site import Site
from fedstat.federation.disclosure.state import SiteTrust
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula import audit, request
from fedstat.models.copula.audited_releases import LeastPrivatePair
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.protocol import plan_columns
from fedstat.models.copula.request import GramPlan
from fedstat.privacy.gaussian_dp import mu_interval
from fedstat.privacy.zcdp import rho_of_budget, round_to_grid

mpl.use("Agg")
LEVELS = dict.fromkeys("abcd", range(5))
RANGES = dict.fromkeys("abcd", (0, 1))
EPSILON = 4.0
FEW = 30
"""Releases of the real mechanism; the least that users may ask for are 100."""
SOME, ANY = 10, 4
"""Releases that show that noise is missing, and that show what is wrong with every release."""


@pytest.fixture
def few_releases(monkeypatch):
    monkeypatch.setattr(audit, "FEWEST_RELEASES", ANY)


def model(bounds=LEVELS, epsilon=EPSILON, columns=None, **options):
    columns = columns or {"A": ["a", "b"], "B": ["c", "d"]}
    frame = pd.DataFrame(dict.fromkeys("abcd", np.arange(100) % 2))
    partition = fs.ClientPartition.from_frame(frame, columns=columns)
    held = [name for names in columns.values() for name in names]
    return fs.CopulaSynthesizer(partition, epsilon, {name: bounds[name] for name in held}, **options)


def regression(epsilon=EPSILON):
    """A binary response with two columns at its site, one of them categorical, and two columns elsewhere."""
    frame = pd.DataFrame({name: np.arange(100) % 2 for name in "yabcd"})
    partition = fs.ClientPartition.from_frame(frame, columns={"A": ["y", "a", "b"], "B": ["c", "d"]})
    bounds = {"y": [0, 1], "a": range(5), "b": ["lo", "mid", "hi"], "c": range(5), "d": (0, 1)}
    return fs.PrivateCopulaGLM.from_formula(
        "y ~ a + b + c + d", partition, family=sm.families.Binomial(), epsilon=epsilon, bounds=bounds
    )


def planned(widths, bound, epsilon=1.0, n=2000):
    names = [f"x{j}" for j in range(sum(widths))]
    bounds, start, described = fs.Bounds(dict.fromkeys(names, bound)), 0, {}
    for site, width in zip("ABCDE", widths, strict=False):
        described[site] = bounds.of(names[start : start + width])
        start += width
    rho = rho_of_budget(epsilon, 1e-6)
    return GramPlan.of_all(plan_columns(described, dict.fromkeys(described, n), Fraction(rho)))


# ---- the pair of records -------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [range(5), (0, 1)])
@pytest.mark.parametrize("widths", [(2, 2), (4, 2, 2), (6,)])
def test_the_pair_attains_the_sensitivity_of_margins_and_products_together(widths, bound):
    pair = LeastPrivatePair.of(planned(widths, bound), "", 2000)
    assert 0.9999 < pair.attained / pair.claimed <= 1.0


def test_no_pair_is_distinguished_better_than_is_claimed():
    random = np.random.default_rng(0)
    for widths, bound in (((3, 1), range(4)), ((2, 5, 1), [False, True]), ((2, 2), (0, 1))):
        sums = planned(widths, bound)
        for view in ("", *sums.columns):
            pair, most = LeastPrivatePair.of(sums, view, 2000), 0.0
            assert pair.attained <= pair.claimed
            places = sums.noise.places()
            for _ in range(60):
                codes = random.integers(pair.bins[0].count, size=(4, sum(widths)))
                if view:  # all others know what they have themselves
                    mine = np.isin(np.arange(codes.shape[1]), np.r_[places[view]])
                    codes[1] = np.where(mine, codes[1], codes[0])
                most = max(most, LeastPrivatePair(sums, view, 2000, codes[:2], codes[2:]).attained)
            assert most <= pair.claimed
            assert most <= 1.05 * pair.attained


def test_an_interval_of_guesses_is_clopper_and_pearsons():
    # A mechanism that says everything: 0.5 (alpha / 2)^(1 / n); one that says nothing: from 0.
    low, high = mu_interval(1000, 1000, 1e-4)
    assert low == pytest.approx(4.664, abs=1e-3) and high == np.inf
    assert mu_interval(500, 1000, 1e-4)[0] == 0.0
    random = np.random.default_rng(1)
    for mu, accuracy in ((0.5, 0.5987063), (1.0, 0.6914625)):  # Phi(mu / 2)
        low, high = mu_interval(int(random.binomial(4000, accuracy)), 4000, 1e-4)
        assert low < mu < high


# ---- the real mechanism --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audited():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "FEWEST_RELEASES", FEW)
        return fs.audit(model(), releases=FEW, seed=1)


def test_the_real_mechanism_passes(few_releases, audited):
    for result in (audited, fs.audit(model(), "A", FEW, seed=2), fs.audit(model(RANGES), releases=FEW)):
        assert result.passed and not result.faults and result.verdict == "holds"
        assert result.mu_low <= result.mu and result.pair_mu <= result.mu
        assert result.mu_high >= result.pair_mu
        assert result.epsilon_low <= result.epsilon <= EPSILON


def em():
    return model(missing="em")


MADE = {"regression": regression, "em": em}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("made", "view"),
    [
        ("regression", "B"),
        pytest.param("regression", "coordinator", marks=slow),
        pytest.param("em", "A", marks=slow),
        pytest.param("regression", "A", marks=slow),
        pytest.param("em", "coordinator", marks=slow),
        pytest.param("em", "B", marks=slow),
    ],
)
def test_other_releases_pass_too(few_releases, made, view):
    result = fs.audit(MADE[made](), view, FEW, seed=6)
    assert result.passed and result.mu_low <= result.mu
    assert 0.5 * result.mu < result.pair_mu <= result.mu <= np.sqrt(2.0 * float(rho_of_budget(EPSILON, 1e-6)))
    assert result.mu_high >= result.pair_mu


@pytest.mark.parametrize(
    ("made", "array", "view", "words"),
    [
        ("regression", "share", "A", "noise on products of A and B is smaller"),
        ("em", "share", "coordinator", "noise on products of A and B is smaller"),
        pytest.param("regression", "grams", "coordinator", "noise on products of A is smaller", marks=slow),
        pytest.param(
            "regression", "share", "coordinator", "noise on products of A and B is smaller", marks=slow
        ),
        pytest.param("em", "share", "A", "noise on products of A and B is smaller", marks=slow),
        pytest.param("em", "grams", "coordinator", "noise on products of A is smaller", marks=slow),
    ],
)
def test_other_releases_without_noise_fail(few_releases, monkeypatch, made, array, view, words):
    monkeypatch.setattr(NoiseMechanism, "add", without_noise((array,), "A"))
    half = (array, view) == ("share", "coordinator")  # the share of the other site still has noise
    result = fs.audit(MADE[made](), view, FEW if half else SOME, seed=7)
    assert not result.passed and re.search(words, result.verdict), result.verdict


@pytest.mark.slow
@pytest.mark.parametrize(("view", "claimed"), [("coordinator", 0.7096), ("A", 0.7888)])
def test_many_releases_show_most_of_what_is_claimed(view, claimed):
    result = fs.audit(model(), view, 4000, seed=3)
    assert result.mu == pytest.approx(claimed, abs=1e-4)
    assert result.passed and 0.5 * result.pair_mu < result.mu_low <= result.mu


def test_what_is_printed_and_drawn(audited):
    text = str(audited.summary())
    for words in (
        "Claimed",
        "Measured",
        "Verdict: holds",
        "the coordinator",
        "none of your rows was used",
    ):
        assert words in text
    assert re.search(rf"Releases: +{FEW}\b", text)
    assert not any(faults(audited.plot(page(width, 4.6)).figure) for width in JOURNAL)
    ax = audited.plot()
    assert [line.get_label().split(":")[0] for line in ax.lines] == ["claimed", f"{FEW} releases", "guessing"]
    roc = audited.roc()
    assert roc.iloc[0].tolist() == [0.0, 0.0] and roc.iloc[-1].tolist() == [1.0, 1.0]
    assert (np.diff(roc, axis=0) >= 0).all()


def test_tables_are_a_demonstration_and_said_to_be_none(few_releases):
    result = fs.audit(model(columns={"A": ["a"], "B": ["b"]}), "table", FEW, seed=4)
    assert "no evidence" in str(result.summary())
    assert result.mu_low <= result.mu


def test_an_audit_asks_and_charges_nothing(few_releases):
    budget = fs.Policy(privacy=fs.Budget(EPSILON, 1e-6))
    frame = pd.DataFrame({name: np.arange(100) % 2 for name in "ab"})
    partition = fs.ClientPartition.from_frame(frame, columns={"A": ["a"], "B": ["b"]}, policy=budget)
    fs.audit(fs.CopulaSynthesizer(partition, 1.0, {"a": [0, 1], "b": [0, 1]}), releases=ANY)
    assert all(not site.site_ledger.chains for site in partition.sites.values())
    assert all(not site.site_ledger.charges.made for site in partition.sites.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"view": "C"}, "view"),
        ({"releases": 99}, "releases"),
        ({"alpha": 0.0}, "alpha"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    with pytest.raises(ModelError, match=words):
        fs.audit(model(), **options)


def test_only_a_synthesis_can_be_audited():
    with pytest.raises(ModelError, match="CopulaSynthesizer"):
        fs.audit("model")
    with pytest.raises(ModelError, match="no other sites"):
        fs.audit(model(columns={"A": list("abcd")}), "A")


# ---- sites with different rows -------------------------------------------------------------------


def over_rows(kind="synthesis", colluding=1, epsilon=EPSILON):
    """A model of three sites with different rows, which share the noise or add all of it."""
    policy = fs.Policy(privacy=fs.Budget(EPSILON, 1e-6, colluding))
    frame = pd.DataFrame({name: np.arange(90) % 2 for name in "yab"}).assign(site=list("ABC") * 30)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    bounds = {"y": [0, 1], "a": range(5), "b": (0, 1)}
    if kind == "synthesis":
        return fs.CopulaSynthesizer(partition, epsilon, bounds | {"b": ["lo", "mid", "hi"]})
    return fs.PrivateCopulaGLM.from_formula(
        "y ~ a + b", partition, family=sm.families.Binomial(), epsilon=epsilon, bounds=bounds
    )


@pytest.mark.parametrize(("kind", "colluding"), [("synthesis", 1), ("synthesis", None), ("regression", 1)])
def test_releases_over_rows_pass(few_releases, kind, colluding):
    audited = over_rows(kind, colluding)
    result = fs.audit(audited, releases=FEW, seed=8)
    assert result.passed and result.mu_low <= result.mu and result.verdict == "holds"
    assert 0.5 * result.mu < result.pair_mu <= result.mu <= np.sqrt(2.0 * float(rho_of_budget(EPSILON, 1e-6)))
    assert result.parts == ("margins", "products") and result.log_ratios.shape == (FEW, 2)
    observer = "the coordinator and 1 of 3 sites together" if colluding else "all others together"
    assert result.view == observer and "One row has values" in " ".join(str(result.summary()).split())
    assert all(not site.site_ledger.charges.made for site in audited.partition.sites.values())
    with pytest.raises(ModelError, match="view"):
        fs.audit(audited, "A")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synthesis", "regression"])
def test_many_releases_over_rows_show_most_of_what_is_claimed(kind):
    result = fs.audit(over_rows(kind), releases=1500, seed=3)
    assert result.passed and 0.4 * result.pair_mu < result.mu_low <= result.mu <= 1.02 * result.mu_high + 0.1


# ---- faults --------------------------------------------------------------------------------------

ADD, TAKE = NoiseMechanism.add, Charges.take


def without_noise(names, site=None):
    """Charge as usual, and leave some arrays unchanged."""

    def add(self, requested, step, owed, arrays):
        out, costs = ADD(self, requested, step, owed, arrays)
        bare = site in (None, self.site)
        return {k: arrays[k] if bare and k in names else v for k, v in out.items()}, costs

    return add


def noise_on_one_share(monkeypatch):
    monkeypatch.setattr(NoiseMechanism, "add", without_noise(("share",), "A"))


def a_quarter_of_the_noise(monkeypatch):
    drawn = privacy_budget.discrete_gaussian
    monkeypatch.setattr(
        privacy_budget, "discrete_gaussian", lambda variance, *more: drawn(variance / 16, *more)
    )


def empirical_margins(monkeypatch):
    monkeypatch.setattr(NoiseMechanism, "add", without_noise(("levels", "trees")))


def rounding_to_nearest(monkeypatch):
    def nearest(scores, squared_radius, places, **_):
        lengths = np.maximum(np.linalg.norm(scores, axis=1), 1e-100)[:, None]
        cut = scores * np.minimum(1.0, np.sqrt(float(squared_radius)) / lengths)
        return np.rint(np.ldexp(cut, places)).astype(np.int64)

    monkeypatch.setattr(request, "clip_rows", nearest)


def cut_after_noise(monkeypatch):
    """Rows are as long as they come when they are multiplied and noise is added."""
    monkeypatch.setattr(
        request, "clip_rows", lambda X, radius, places, **_: np.trunc(np.ldexp(X, places)).astype(np.int64)
    )


def bounds_of_the_data(monkeypatch):
    def code(self, values):
        x = values.to_numpy(dtype=float)
        return np.minimum((x - x.min()) / np.ptp(x) * self.count, self.count - 1).astype(np.int64)

    monkeypatch.setattr(Bins, "code", code)


def charges_forgotten(monkeypatch):
    monkeypatch.setattr(Charges, "take", lambda self, charge: None)


def seeded_noise(monkeypatch):
    def normal(variance, size, source):
        draws = np.random.default_rng(0).normal(0.0, float(variance) ** 0.5, size)
        return np.rint(draws).astype(np.int64)

    monkeypatch.setattr(privacy_budget, "discrete_gaussian", normal)


@pytest.mark.parametrize(
    ("fault", "releases", "words"),
    [
        (a_quarter_of_the_noise, FEW, "products of all sites is smaller"),
        (
            lambda patch: patch.setattr(NoiseMechanism, "add", without_noise(("products",), "A")),
            SOME,
            "products",
        ),
        (cut_after_noise, ANY, "% longer than"),
        (charges_forgotten, ANY, "the charge was too small at A, B, C"),
        (seeded_noise, ANY, "noise of another"),
    ],
)
def test_a_fault_is_seen_over_rows(few_releases, monkeypatch, fault, releases, words):
    fault(monkeypatch)
    result = fs.audit(over_rows(), releases=releases, seed=5)
    assert not result.passed and re.search(words, result.verdict), result.verdict


@pytest.mark.parametrize(
    ("fault", "view", "bounds", "releases", "words"),
    [
        (noise_on_one_share, "A", LEVELS, SOME, "products of A and B is smaller"),
        (noise_on_one_share, "coordinator", LEVELS, FEW, "products of A and B is smaller"),
        (a_quarter_of_the_noise, "coordinator", LEVELS, FEW, "levels of A is smaller"),
        (empirical_margins, "coordinator", LEVELS, SOME, "levels of A is smaller"),
        (bounds_of_the_data, "coordinator", RANGES, FEW, "better than claimed"),
        (rounding_to_nearest, "coordinator", LEVELS, ANY, "% longer than"),
        (cut_after_noise, "coordinator", LEVELS, ANY, "5. % longer than"),
        (charges_forgotten, "coordinator", LEVELS, ANY, "the charge was too small at A, B"),
        (seeded_noise, "coordinator", LEVELS, ANY, "noise of another"),
    ],
)
def test_a_fault_is_seen(few_releases, monkeypatch, fault, view, bounds, releases, words):
    fault(monkeypatch)
    result = fs.audit(model(bounds), view, releases, seed=5)
    assert not result.passed and re.search(words, result.verdict), result.intervals
    assert "FAILS" in str(result.summary())


def test_noise_comes_from_nothing_but_keys():
    """numpy's generators are seeded, and predicted from what they have given: none is near the noise."""
    package = Path(fs.__file__).parent
    for path in (
        package / "privacy" / "discrete_gaussian.py",
        package / "federation" / "disclosure" / "privacy_budget.py",
        package / "federation" / "crypto" / "keys.py",
    ):
        assert not re.search(r"np\.random|numpy\.random|^import random|default_rng", path.read_text(), re.M)


def over_a_restart(folder, monkeypatch=None):
    """Budget that a site has spent before and after it is started again from its ledger."""
    identity, spent = Identity.generate(), []
    folder.mkdir()
    begin_ledger(folder, identity)
    question = to_json(BinsRequest("x", "1/1000", (0.0,)))
    for _ in range(2):
        site_ledger = open_ledger(folder, "Bank", identity, patience=0.1)
        policy, trust = fs.Policy(privacy=fs.Budget(1.0, 1e-6)), SiteTrust(_identity=identity)
        published = {"x": PublishedColumn("number", (-9.0, 9.0))}
        frame = pd.DataFrame({"x": np.arange(50.0) / 10.0})
        site = Site("Bank", frame, policy, trust=trust, site_ledger=site_ledger, published=published)
        if not spent:
            unpack_reply(
                site.answer(pack_request(Request("Bank", "margins", "count_bins", {}, "s", question)))
            )
        spent.append(site.site_ledger.charges.spent)
        site.site_ledger.store.close()
        if monkeypatch is not None:
            charges_forgotten(monkeypatch)
    return spent


def test_a_charge_that_a_restart_forgets_is_seen(tmp_path, monkeypatch):
    before, after = over_a_restart(tmp_path / "real")
    assert before == after == round_to_grid(Fraction("1/1000"), up=True)
    before, after = over_a_restart(tmp_path / "fault", monkeypatch)
    assert before > 0 and after == 0
