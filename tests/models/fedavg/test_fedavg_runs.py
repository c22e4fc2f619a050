"""Seeds, sampling of sites, what leaves them, and what is refused."""

import numpy as np
import pytest
import statsmodels.api as sm
from descent import FRAME, SITES, F, fit, model, partition, run

import fedstat as fs
from fedstat.errors import (
    ConvergenceWarning,
    DesignError,
    EstimationError,
    MessageError,
    ModelError,
    PolicyError,
)
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.message import Request, pack_request
from fedstat.kernels.glm.distributions import DistributionSpec

load_families()

KINDS = (fs.FedAvg, fs.FedAvgM, fs.QFedAvg, fs.FedProx)
SHORT = {"rounds": 6, "fraction": 0.5, "batch_size": 8}


def same(a, b):
    return a.params.to_numpy().tobytes() == b.params.to_numpy().tobytes()


# ---------------------------------------------------------------- seeds and sampling


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_repeats_number_for_number(kind):
    first, again, other = (fit(kind, **SHORT | {"seed": seed}) for seed in (3, 3, 4))
    assert same(first, again)
    assert first.trace.equals(again.trace)
    assert not same(first, other)


def test_a_model_can_be_fitted_again():
    one = model(fs.FedAvg)
    assert same(run(one, **SHORT), run(one, **SHORT))


def test_a_drawn_seed_is_kept():
    first = fit(fs.FedAvg, **SHORT | {"seed": None})
    assert same(first, fit(fs.FedAvg, **SHORT | {"seed": first.seed}))
    assert first.seed != fit(fs.FedAvg, **SHORT | {"seed": None}).seed


@pytest.mark.parametrize(("fraction", "drawn"), [(1.0, 4), (0.5, 2), (0.7, 3), (0.01, 1)])
def test_a_share_of_the_sites_is_asked_in_each_round(fraction, drawn):
    result = fit(fs.FedAvg, rounds=12, fraction=fraction, masked=False)
    assert result.trace["sites"].tolist() == [drawn] * 12 + [4]
    frame = result.ledger.to_frame()
    left = frame[(frame["step"] == "run_epochs") & (frame["array"] == "loss")]
    request = left.groupby("round")["sender"].apply(frozenset)
    assert [len(sites) for sites in request] == [drawn] * 12
    assert set().union(*request) == set(SITES)
    assert (len(set(request)) > 1) == (drawn < 4)


def test_the_average_is_over_the_sites_that_were_drawn():
    result = fit(fs.FedAvg, rounds=1, fraction=0.01, batch_size=None, local_epochs=1, learning_rate=0.1)
    frame = result.ledger.to_frame()
    (site,) = frame[(frame["step"] == "run_epochs") & (frame["sender"] != "coordinator")]["sender"].unique()
    rows = FRAME[FRAME["site"] == site]
    X = np.column_stack([np.ones(len(rows)), rows["x"], rows["z"], rows["g"] == "b"])
    score = sm.GLM(rows["binary"], X, F.Binomial()).score(np.zeros(4))
    np.testing.assert_allclose(result.params, 0.1 * score / len(rows), atol=1e-12)


# ---------------------------------------------------------------- what leaves


@pytest.mark.parametrize("kind", KINDS)
def test_only_aggregates_leave_the_sites(kind):
    result = fit(kind, rounds=4)
    frame = result.ledger.to_frame()
    left = frame[frame["sender"] != "coordinator"]
    own = left[left["step"].isin(FAMILIES["fedavg"])]
    shapes = {array: set(rows["shape"]) for array, rows in own[own["kind"] == "aggregate"].groupby("array")}
    expected = {
        "rows": {()},
        "beta": {(4,)},
        "weight": {()},
        "loss": {(2,)},
        "score": {(4,)},
        "information": {(4, 4)},
        "totals": {(3,)},
        "llf": {()},
    } | ({"slope": {(4,)}, "curvature": {(4, 4)}} if kind is fs.QFedAvg else {})
    assert shapes == expected
    assert set(own[own["kind"] != "aggregate"]["array"]) == {"inside", "spread", "defined"}
    assert own["masked"].all()
    assert set(left["kind"]) == {"aggregate", "schema", "control"}
    assert (own[own["kind"] == "aggregate"]["entities"] >= 20).all()
    assert (left[left["step"] == "run_epochs"].groupby("sender")["round"].nunique() == 4).all()


def test_each_site_keeps_the_same_ledger():
    one = partition()
    result = run(fs.FedAvg.from_formula("binary ~ x", one), rounds=2)
    frame = result.ledger.to_frame()
    for name, site in one.sites.items():
        columns = ["step", "array", "kind", "shape", "bytes", "entities"]
        theirs = site.ledger.to_frame()[columns].reset_index(drop=True)
        assert theirs.equals(frame[frame["sender"] == name][columns].reset_index(drop=True))


def test_an_owner_may_refuse_the_family():
    sites = fs.ClientPartition.from_frame(
        FRAME, by="site", policies={"S1": Policy(families=frozenset({"design", "glm"}))}
    )
    with pytest.raises(PolicyError, match=r"S1: its policy.*not 'fedavg'"):
        fs.FedAvg.from_formula("binary ~ x", sites).fit(masked=False)


# ---------------------------------------------------------------- what is refused


OUT_OF_RANGE = [
    (fs.FedAvg, {"rounds": 0}, "rounds: expected a whole number, 1 or more, received 0"),
    (fs.FedAvg, {"rounds": 2.5}, "rounds: expected a whole number"),
    (fs.FedAvg, {"fraction": 0.0}, r"fraction: expected a number in \(0, 1\], received 0.0"),
    (fs.FedAvg, {"fraction": 1.5}, "fraction"),
    (fs.FedAvg, {"local_epochs": 0}, "local_epochs: expected a whole number, 1 or more"),
    (fs.FedAvg, {"batch_size": 0}, "batch_size: expected a whole number, 1 or more"),
    (fs.FedAvg, {"learning_rate": -0.1}, r"learning_rate: expected a number in \(0, inf\), received -0.1"),
    (fs.FedAvg, {"learning_rate": np.inf}, "learning_rate"),
    (fs.FedAvg, {"learning_rate": np.nan}, "learning_rate"),
    (fs.FedAvg, {"learning_rate": "0.1"}, "learning_rate"),
    (fs.FedAvg, {"seed": -1}, "seed: expected a whole number, 0 or more"),
    (fs.FedAvg, {"seed": 2**63}, "seed: expected a whole number below"),
    (fs.FedAvg, {"standardize": "yes"}, "standardize: expected True or False"),
    (fs.FedAvg, {"init": [np.nan, 0, 0, 0]}, "init: expected an array of finite coefficients"),
    (fs.FedAvg, {"init": np.zeros((2, 2))}, "init: expected an array of finite coefficients"),
    (fs.FedAvgM, {"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), received 1.0"),
    (fs.QFedAvg, {"q": -1}, r"q: expected a number in \[0, inf\)"),
    (fs.QFedAvg, {"lipschitz": 0}, r"lipschitz: expected a number in \(0, inf\)"),
    (fs.FedProx, {"mu": -0.1}, r"mu: expected a number in \[0, inf\)"),
    (fs.FedProx, {"gamma": 1.0}, r"gamma: expected a number in \[0, 1\)"),
]


@pytest.fixture(scope="module")
def sites():
    return partition()


@pytest.mark.parametrize(("kind", "options", "complaint"), OUT_OF_RANGE)
def test_an_option_out_of_range_is_named_before_any_message(sites, kind, options, complaint):
    one = kind.from_formula("binary ~ x + z + C(g)", sites)
    before = {name: len(site.ledger.entries) for name, site in sites.sites.items()}
    with pytest.raises(ModelError, match=complaint):
        one.fit(**options)
    assert {name: len(site.ledger.entries) for name, site in sites.sites.items()} == before


def test_variance_weights_are_refused_before_any_message():
    fresh = partition()
    with pytest.raises(ModelError, match="var_weights: FedProx has no dispersion"):
        fs.FedProx.from_formula("gauss ~ x", fresh, var_weights="w")
    assert not any(site.ledger.entries for site in fresh.sites.values())


def test_the_start_must_have_a_number_for_each_column():
    with pytest.raises(ModelError, match=r"init: expected 4 coefficients \(Intercept, x, z, .*shape \(2,\)"):
        fit(fs.FedAvg, init=[0.0, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_too_long_steps_name_site_and_remedy(kind):
    """Rows of S2 have a covariate on a large scale: the descent leaves the numbers there."""
    frame = FRAME.assign(x=np.where(FRAME["site"] == "S2", 40.0, 1.0) * FRAME["x"])
    complaint = r"site 'S2', round 1: .*learning_rate = 0\.2; use a smaller learning_rate, or standardize"
    with pytest.raises(EstimationError, match=complaint):
        fit(kind, formula="count ~ x", frame=frame, known={"family": F.Poisson()}, learning_rate=0.2)


@pytest.mark.filterwarnings("ignore::statsmodels.tools.sm_exceptions.DomainWarning")
def test_a_mean_outside_the_domain_names_the_site():
    family = F.Poisson(sm.families.links.Identity())
    first = [1.0, 0.0]
    with pytest.raises(EstimationError, match=r"site 'S\d', round 1: .*does not allow"):
        fit(fs.FedAvg, formula="count ~ x", known={"family": family}, init=first, learning_rate=2.0)


def test_a_logistic_descent_that_bounces_is_reported():
    frame = FRAME.assign(x=100.0 + 30.0 * FRAME["x"])
    one = model(fs.FedAvg, frame=frame)
    with pytest.warns(ConvergenceWarning, match=r"the loss has risen: use a smaller learning_rate or stand"):
        result = one.fit(seed=1, rounds=5)
    assert not result.converged
    assert abs(result.distance).max() > 10
    assert "NOT CONVERGED" in str(result.summary())


def test_a_response_outside_the_family_is_named():
    with pytest.raises(DesignError, match=r"site 'S0': \d+ rows with a response outside 0 to 1.*'count'"):
        fit(fs.FedAvg, formula="count ~ x")


# ---------------------------------------------------------------- disclosure checks


START = {"shift": np.zeros(2), "scale": np.ones(2), "init": np.zeros(2)}
ASK = {
    "beta": np.zeros(2),
    "epochs": np.array(1),
    "batch_size": np.array(8),
    "learning_rate": np.array(0.1),
    "seed": np.array(1),
    "number": np.array(0),
}
TEXT = {"run_epochs": '["S1"]', "start": DistributionSpec("Binomial", "Logit").to_json()}


@pytest.fixture(scope="module")
def started():
    one = partition()
    model = fs.FedAvg.from_formula("binary ~ x", one)
    run(model, rounds=1)
    return one.sites["S1"], model._session


@pytest.mark.parametrize(
    ("step", "changes", "complaint"),
    [
        ("run_epochs", {"beta": np.zeros(3)}, "array 'beta' has 3 rows, expected 2"),
        ("run_epochs", {"beta": np.full(2, np.nan)}, "not finite"),
        ("run_epochs", {"epochs": np.array(1.0)}, "'epochs' is of type float64, expected int64"),
        ("run_epochs", {"seed": np.array(-1)}, "failed"),
        ("run_epochs", {"proximal": np.zeros(2)}, "array 'proximal' has 2 rows, expected 3"),
        ("run_epochs", {"fair": np.ones(2)}, "array 'fair' has 2 rows, expected 3"),
        ("run_epochs", {"drawn": np.array(True)}, r"unknown \['drawn'\]"),
        ("run_epochs", {"rows": np.zeros(3)}, r"unknown \['rows'\]"),
        ("start", START | {"shift": np.zeros(3)}, "array 'shift' has 3 rows, expected 2"),
        ("start", START | {"scale": np.array([1.0, 0.0])}, "'scale' must be positive"),
    ],
)
def test_a_malformed_question_is_refused(started, step, changes, complaint):
    site, session = started
    arrays = (ASK if step == "run_epochs" else {}) | changes
    before = len(site.ledger.entries)
    with pytest.raises(MessageError, match=complaint):
        site.answer(pack_request(Request("S1", "fedavg", step, arrays, session, TEXT.get(step, ""))))
    assert len(site.ledger.entries) == before


@pytest.mark.parametrize("step", sorted(FAMILIES["fedavg"]))
def test_a_question_out_of_turn_is_refused(started, step):
    takes = FAMILIES["fedavg"][step].takes
    arrays = {name: np.ones((2,) * d.ndim, dtype=d.dtype or float) for name, d in takes.items()}
    request = Request("S1", "fedavg", step, arrays, "another session", TEXT.get(step, ""))
    with pytest.raises(MessageError, match=r"was not started here|no rows are open"):
        started[0].answer(pack_request(request))
