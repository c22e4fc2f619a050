"""Tests of assumptions that run with a fit: one rule for all families."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from assumption_alarms import ALLOW, WRONG, model_of, one_baseline
from numpy.testing import assert_allclose

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError, Remedy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.transport.journal import Journal
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite, SiteServer
from fedstat.inference.assumptions import (
    ALARM,
    DOUBT,
    SINGULAR,
    Assumption,
    Outcome,
    reason_of,
    score_outcome,
)
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable

pytestmark = pytest.mark.filterwarnings("ignore")
SURVIVAL = fs.datasets.make_survival()
HOSPITALS = fs.datasets.make_hospitals()
COMMON = {"baseline": "common", "grid": 3, "until": 60}
MODELS = {
    "cox": ("FederatedCox", "Surv(months, died) ~ age + C(stage)", SURVIVAL, {}),
    "cox breslow": ("FederatedCox", "Surv(months, died) ~ age + strata(arm)", SURVIVAL, {"ties": "breslow"}),
    "common": ("FederatedCox", "Surv(months, died) ~ age + C(stage)", SURVIVAL, COMMON),
    "common robust": (
        "FederatedCox",
        "Surv(months, died) ~ age + strata(arm)",
        SURVIVAL,
        COMMON | {"cov_type": "robust"},
    ),
    "ordinal": ("FederatedOrdinal", "num ~ age + sex", HOSPITALS, {}),
    "probit": ("FederatedOrdinal", "num ~ age + sex", HOSPITALS, {"cov_type": "robust"}),
}
STEPS = {"sum_time_scores": "cox", "check_intervals": "cox", "sum_separate_scores": "categories"}


def example(name, **settings):
    kind, formula, table, arguments = MODELS[name]
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy=ALLOW)
    more = {"distr": "probit"} if name == "probit" else {}
    return getattr(fs, kind).from_formula(formula, partition, **more, **settings), arguments


def test_after(fit):
    return getattr(fit, "test_proportional_hazards", getattr(fit, "test_proportional_odds", None))()


test_after.__test__ = False


def values_of(fit, kind):
    return fit.diagnostics().set_index("kind").loc[kind, "values"]


@pytest.mark.parametrize(
    ("name", "masked"),
    [*((name, True) for name in MODELS), *((name, False) for name in ("cox", "common", "ordinal"))],
)
def test_the_test_with_the_fit_is_that_after_it(name, masked):
    model, arguments = example(name)
    fit = model.fit(masked=masked, **arguments)
    kind = "proportional_odds" if "num" in fit.estimate.response else "proportional_hazards"
    after = test_after(fit)
    found = values_of(fit, kind)
    assert_allclose(found["statistic"], after.glance()["statistic"][0], rtol=1e-8)
    assert_allclose(found["p_value"], after.glance()["p_value"][0], rtol=1e-7)
    assert found["df"] == after.glance()["df"][0]
    terms = after.tidy().iloc[:-1]
    if len(terms) > 1:
        assert found["where"].endswith(terms.loc[terms["p_value"].idxmin(), "term"])
    assert (
        fit.ledger.rounds - model.fit(masked=masked, check_assumptions=False, **arguments).ledger.rounds == 1
    )


def pooled_score_test(table, grid, until):
    """Score test of the sites in a Cox model with one baseline, on times that are rounded up to a grid."""
    stop = np.minimum(np.ceil(table["t"] / grid) * grid, until).to_numpy()
    event = (table["e"] == 1).to_numpy() & (table["t"] <= until).to_numpy()
    risks = RiskTable.of(np.zeros(len(table)), stop, event)
    site = pd.get_dummies(table["site"], drop_first=True).to_numpy(float)
    X = np.column_stack([table[["x", "z"]].to_numpy(), site])
    beta = np.zeros(X.shape[1])
    for _ in range(20):
        at = PartialLikelihood.at(risks, X, X @ beta, "efron")
        beta[:2] += np.linalg.solve(at.information()[:2, :2], at.score()[:2])
    U, V = at.score(), at.information()
    return float(U @ np.linalg.solve(V, U)), site.shape[1]


@pytest.mark.parametrize(
    ("spread", "between", "follow_up"),
    [(0.0, 0.0, None), (0.0, 1.0, None), (0.4, 0.0, None), (0.4, 0.0, (4, 6, 10, 15, 20, 30))],
)
def test_the_test_of_one_baseline_is_near_the_score_test_of_the_sites(spread, between, follow_up):
    rng = np.random.default_rng(4)
    table = one_baseline(rng, spread, n=1200, between=between, follow_up=follow_up)
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    fit = fs.FederatedCox.from_formula("Surv(t, e) ~ x + z", partition)
    found = values_of(fit.fit(baseline="common", grid=1, until=30), "one_baseline")
    exact, df = pooled_score_test(table, 1, 30)
    # Two degrees of freedom at most are lost to x and z, and the statistic with them.
    assert df - 2.0 < found["df"] <= df + 1e-9
    assert_allclose(found["statistic"] / found["df"], exact / df, rtol=0.15)


def test_a_column_of_sites_leaves_no_test():
    rng = np.random.default_rng(1)
    table = one_baseline(rng, sites=2)
    table = table.assign(x=(table["site"] == "S00") * 1.0)
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    fit = fs.FederatedCox.from_formula("Surv(t, e) ~ x + z", partition).fit(
        baseline="common", grid=2, until=30
    )
    text = fit.diagnostics().set_index("kind").loc["one_baseline"]
    assert text["severity"] == "info" and "explain all differences between the sites" in text["note"]


@pytest.mark.parametrize(
    ("design", "alarm"),
    [
        ("hazards that cross, 600 patients", "NON-PROPORTIONAL HAZARDS"),
        ("log hazards of sites with sd 0.7", "THE SITES DIFFER IN THEIR BASELINE HAZARDS"),
        ("effects 1.2, 0.5, -0.2, 300 rows", "NON-PROPORTIONAL ODDS"),
    ],
)
def test_a_wrong_assumption_stands_above_the_summary(design, alarm, tmp_path):
    draw, note, arguments = WRONG[design]
    fit = model_of(draw(np.random.default_rng(7)), note).fit(**arguments)
    assert alarm in fit.summary().as_text().partition("Federated")[0]
    assert fit.diagnostics().set_index("kind").loc[note, "severity"] == "critical"
    fit.save(tmp_path / "fit.fed")
    assert fs.load(tmp_path / "fit.fed").summary().as_text() == fit.summary().as_text()


def test_remedies_of_alarms_run():
    rng = np.random.default_rng(7)
    cross = fs.ClientPartition.from_frame(
        WRONG["hazards that cross, 600 patients"][0](rng), by="site", policy=ALLOW
    )
    fit = fs.FederatedCox.from_formula("Surv(t, e) ~ z + strata(x)", cross).fit()
    assert fit.diagnostics().set_index("kind").loc["proportional_hazards", "severity"] != "critical"
    differ = fs.ClientPartition.from_frame(one_baseline(rng, 0.7), by="site", policy=ALLOW)
    fit = fs.FederatedCox.from_formula("Surv(t, e) ~ x + z", differ).fit(baseline="site")
    assert (fit.conf_int().loc["x"] - 0.5).prod() < 0.0
    grades = fs.ClientPartition.from_frame(
        WRONG["effects 1.2, 0.5, -0.2, 300 rows"][0](rng), by="site", policy=ALLOW
    )
    assert fs.FederatedMultinomial.from_formula("y ~ x + z", grades).fit().converged


@pytest.fixture
def refusing(monkeypatch):
    """Sites of which one refuses the sums of the tests."""
    for step, family in STEPS.items():
        real = FAMILIES[family][step]

        def run(data, state, *given, real=real, **arrays):
            if data.name.startswith(("Kiel", "Hungary")):
                raise DescriptionError.of_rule("minimum count", data.name, "refuses")
            return real.run(data, state, *given, **arrays)

        monkeypatch.setitem(FAMILIES[family], step, replace(real, run=run))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", ["cox", "common robust", "ordinal"])
def test_a_fit_stands_where_a_site_refuses_the_tests(name, masked, refusing):
    model, arguments = example(name)
    fit = model.fit(masked=masked, **arguments)
    plain = model.fit(masked=masked, check_assumptions=False, **arguments)
    assert_allclose(fit.params, plain.params, rtol=0.0)
    notes = fit.diagnostics().set_index("kind")
    for kind in {"proportional_hazards", "proportional_odds", "one_baseline"} & set(notes.index):
        assert "was not made: the policy of '" in notes.loc[kind, "note"]
        assert notes.loc[kind, "severity"] == "info" and "(minimum count)" in notes.loc[kind, "note"]
    # Ledgers of sites and coordinator agree on the refusal as well.
    assert fit.receipt().sites()["refusals"].sum() == 1
    with pytest.raises(PolicyError):
        test_after(fit)
    assert "check_assumptions=False" in plain.summary().as_text()


class Servers:
    """A transport to the servers of a partition's sites."""

    bundles = True

    def __init__(self, partition):
        self.servers = {name: SiteServer(site) for name, site in partition.sites.items()}
        self.requests = 0

    def send(self, site, request):
        self.requests += 1
        return self.servers[site].answer(request)


def test_a_refusal_of_a_served_site_ends_the_test_and_not_the_fit(tmp_path):
    # The logarithm of one time outweighs all others, which the strict policy refuses to sum.
    early = SURVIVAL.index[(SURVIVAL["hospital"] == "Kiel") & (SURVIVAL["died"] == 1)][0]
    table = SURVIVAL.assign(months=SURVIVAL["months"].where(SURVIVAL.index != early, 1e-300))
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy=fs.Policy.strict())
    plain = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit(check_assumptions=False)
    transport, journal = Servers(partition), tmp_path / "journal"
    for _ in range(2):  # the second time from the journal
        engine = RemoteEngine(
            {name: RemoteSite(name, transport) for name in partition.sites}, Journal(journal)
        )
        remote = replace(partition, _engine=engine)
        fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", remote).fit()
        np.testing.assert_array_equal(fit.params, plain.params)
        assert "was not made: the policy of 'Kiel'" in " ".join(fit.summary().as_text().split())
        assert fit.receipt().sites()["refusals"].sum() == 1
        requests, transport.requests = transport.requests, 0
    assert requests == 0


def test_a_dry_run_lists_the_tests_and_who_refuses_them():
    model, arguments = example("common")
    table = model.explain(**arguments).tidy()
    found = table.query("step == 'check_intervals' and sender == 'Kiel'")
    assert set(found["array"]) == {"score", "cross", "square", "baseline"} and found["masked"].all()
    without = model.explain(check_assumptions=False, **arguments).tidy()
    assert "check_intervals" not in set(without["step"])


@pytest.mark.parametrize(
    ("p", "severity"),
    [(0.0, "critical"), (0.00999, "critical"), (0.01, "warning"), (0.0499, "warning"), (0.05, "info")],
)
def test_severity_at_its_limits(p, severity):
    assumption = Assumption("kind", "test", "WRONG", "It is assumed", "It fails.", Remedy("fit()", "Then."))
    note = assumption.note(Outcome(1.0, 1.0, p, "a {b}"))
    assert (ALARM, DOUBT) == (0.01, 0.05)
    assert note.severity == severity
    assert ("a {b}" in str(note)) == (severity != "info")
    assert str(note).startswith("WRONG") == (severity == "critical")


def test_score_tests_of_a_singular_covariance_are_not_made():
    assert score_outcome(np.zeros(2), np.ones((2, 2))) == SINGULAR
    assert score_outcome(np.zeros(1), np.zeros((1, 1))) == SINGULAR
    assert score_outcome(np.zeros(0), np.zeros((0, 0))) == SINGULAR
    assert score_outcome(np.array([np.nan]), np.ones((1, 1))) == SINGULAR
    found = score_outcome(np.array([3.0, 1.0]), np.diag([1.0, 4.0]), ["a", "b"])
    assert isinstance(found, Outcome)
    assert (found.statistic, found.df, found.where) == (9.25, 2.0, "a")
    assert reason_of(PolicyError("no")) == "the policy of a site refuses it"
