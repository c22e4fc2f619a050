"""Attacks on Cox regressions with a common baseline: groups between risk sets, grids, and repeated sums."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import FedstatError, MessageError, PolicyError
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.models.cox.interval_steps import IntervalRequest

RNG = np.random.default_rng(5)
N = 600
TABLE = pd.DataFrame({"x": RNG.normal(size=N), "z": RNG.integers(0, 2, N), "row": np.arange(N)})
TABLE["months"] = np.ceil(RNG.exponential(20.0, N)) + RNG.uniform(0.0, 0.9, N).round(3)
TABLE["died"] = RNG.integers(0, 2, N)
TABLE["site"] = np.where(TABLE["row"] % 3 == 0, "A", np.where(TABLE["row"] % 3 == 1, "B", "C"))
GRID = {"baseline": "common", "grid": 10, "until": 40, "ties": "breslow"}


def model_of(table=TABLE, policy=None, formula="Surv(months, died) ~ x", **settings):
    partition = fs.ClientPartition.from_frame(table.drop(columns="row"), by="site", policy=policy)
    return fs.FederatedCox.from_formula(formula, partition, **settings)


def send(model, step, arrays, request=None):
    """Send a request that the coordinator makes up to site A, and return the arrays of the reply."""
    text = "" if request is None else to_json(request)
    site = model.partition.sites["A"]
    return unpack_reply(
        site.answer(pack_request(Request("A", "cox", step, arrays, model._session, text)))
    ).arrays


def intervals(edges):
    return {"scale": np.ones(1), "shift": np.zeros(1), "edges": np.asarray(edges, dtype=float)}


def test_no_difference_of_risk_sets_is_about_few_rows():
    for ties in ("breslow", "efron"):
        fit = model_of().fit(**GRID | {"ties": ties})
        # 4 sums of weights and 2 of weighted columns: two rows for each equation about a column.
        least = 2 * (4 + 2 * 1)
        for _, part in TABLE.groupby("site"):
            kept = part["months"] <= fit.grid[-1]
            place = np.searchsorted(fit.grid, np.minimum(part["months"], fit.grid[-1]))
            events = (part["died"] == 1) & kept
            groups = [place] if ties == "breslow" else [place[events], place[~events]]
            sizes = np.concatenate([np.bincount(group) for group in groups])
            assert sizes[sizes > 0].min() >= least
            for outcome in (events, ~events):
                counts = np.bincount(place[outcome])
                assert counts[counts > 0].min() >= 3


def test_a_single_event_in_an_interval_is_refused():
    model = model_of()
    model.fit(**GRID)
    own = TABLE[TABLE["site"] == "A"].sort_values("months")
    died = own.index[(own["died"] == 1) & (own["months"] > 15.0)][0]
    before = own["months"][own["months"] < own.loc[died, "months"]].max()
    edges = intervals([before, own.loc[died, "months"], 40.0])
    assert send(model, "flag_intervals", edges, IntervalRequest())["small"].tolist() == [False, True, False]
    with pytest.raises(PolicyError, match="interval of time"):
        send(model, "start_intervals", edges, IntervalRequest())


@pytest.mark.parametrize("remember", ["rows", "all"])
def test_two_grids_that_differ_by_few_rows_are_refused(remember):
    policy = fs.Policy(remember=remember)
    model = model_of(policy=policy)
    model.fit(**GRID | {"grid": [10, 20, 40], "until": None})
    times = TABLE.loc[TABLE["site"] == "A", "months"]
    # One row of site A is between the two ends.
    end = times[times > 20.0].nsmallest(2).mean()
    with pytest.raises(PolicyError, match="differencing"):
        model.fit(**GRID | {"grid": [10, end, 40], "until": None})
    assert model.fit(**GRID | {"grid": [10, 20, 40], "until": None}).converged
    forgets = model_of(policy=fs.Policy(remember="nothing"))
    for middle in (20, end):
        assert forgets.fit(**GRID | {"grid": [10, middle, 40], "until": None}).converged


def test_rows_that_differ_by_one_person_are_refused():
    table = TABLE.assign(w=np.where(TABLE["row"] == 3, np.nan, 1.0))
    partition = fs.ClientPartition.from_frame(table.drop(columns="row"), by="site")
    fs.FederatedCox.from_formula("Surv(months, died) ~ x", partition).fit(**GRID)
    with pytest.raises(PolicyError, match="differencing"):
        fs.FederatedCox.from_formula("Surv(months, died) ~ x", partition, complete=["w"]).fit(**GRID)


def test_a_rare_level_in_an_interval_is_merged_or_refused():
    late = TABLE["months"] > 30.0
    alone = TABLE.index[late & (TABLE["months"] < 40.0) & (TABLE["site"] == "A")][:1]
    rare = TABLE.assign(z=np.where(late, 0, TABLE["z"]))
    rare.loc[alone, "z"] = 1
    model = model_of(rare, formula="Surv(months, died) ~ x + z")
    assert 30.0 not in model.fit(**GRID).grid
    point = {"scale": np.ones(2), "shift": np.zeros(2), "edges": np.array([10.0, 20.0, 30.0, 40.0])}
    send(model, "flag_intervals", point, IntervalRequest(points=1, full=1))
    with pytest.raises(PolicyError, match=r"minimum rows per level"):
        send(model, "start_intervals", point, IntervalRequest(points=1, full=1))


def test_sums_by_interval_leave_half_of_a_column_undetermined():
    """An attacker who knows all else has one equation for every two values of x in an interval."""
    fit = model_of().fit(**GRID)
    points = [fit.params.to_numpy() * factor for factor in (0.9, 0.99, 0.999, 1.0)]
    part = TABLE[(TABLE["site"] == "A") & (TABLE["months"] <= fit.grid[0])]
    x = part["x"].to_numpy()

    def released(x):
        weights = [np.exp(x * beta) for beta in points]
        return np.array([w.sum() for w in weights] + [w @ x for w in (weights[0], weights[-1])])

    jacobian = np.array([(released(x + h) - released(x - h)) / 2e-6 for h in 1e-6 * np.eye(len(x))]).T
    assert np.linalg.matrix_rank(jacobian) <= 6 <= len(x) / 2
    # With one coefficient vector more than announced there would be another equation.
    model = model_of()
    model.fit(**GRID)
    for gap in (5.0, 6.0, 7.0, 8.0):
        try:
            send(model, "sum_intervals", {"beta": np.array([gap]), "full": np.array(False)})
        except MessageError as error:
            assert "were announced" in str(error)
            break
    else:
        raise AssertionError("every request was answered")


def test_hazards_of_one_interval_single_out_no_few_rows():
    """A coordinator that deviates requests products with a hazard in one interval, and in the next."""
    model = model_of()
    fit = model.fit(**GRID)
    J, beta = len(fit.grid), np.array([0.1])
    found = []
    for one in range(J - 1, J - 3, -1):
        hazard = np.zeros(J)
        hazard[one] = 0.01
        arrays = {"beta": beta, "at_risk": hazard, "tied": np.zeros(J), "g": np.ones(J)}
        found.append(send(model, "sum_products", arrays)["products"])
    own = TABLE[TABLE["site"] == "A"]
    # The difference is a sum over the rows that leave in an interval, and these are enough.
    assert ((own["months"] > fit.grid[-3]) & (own["months"] <= fit.grid[-2])).sum() >= 12
    assert found[1][0, 0] > found[0][0, 0]


def checks(fit, hazard, g=None, inverse=0.0, center=0.0):
    """Return a request for the tests of intervals, at hazards of the coordinator's choice."""
    J = len(fit.grid)
    arrays = {"beta": np.array([0.1]), "at_risk": hazard, "tied": np.zeros(J), "center": np.full(1, center)}
    return arrays | {"g": np.ones(J) if g is None else g, "inverse": np.full((1, 1), inverse)}


def test_tests_of_intervals_reveal_sums_of_a_site_and_no_row():
    """Chosen hazards, inverses and centers, in one session or several: events, and sums over rows at risk."""
    model = model_of()
    fit = model.fit(**GRID, check_assumptions=False)
    hazard = np.zeros(len(fit.grid))
    hazard[-1] = 0.01
    requests = ((1.0, 0.0, 0.0), (2.0, 0.0, 0.0), (1.0, 1.0, 0.0), (1.0, 1.0, 1.0))
    (first, _), (second, _), (_, at_zero), (_, at_one) = (
        send(model, "check_intervals", checks(fit, scale * hazard, None, inverse, center))["baseline"]
        for scale, inverse, center in requests
    )
    site = TABLE[TABLE["site"] == "A"]
    events = float(((site["died"] == 1) & (site["months"] <= fit.grid[-1])).sum())
    # (O - E)^2 / E at E and at 2 E: both are sums over the rows of the site.
    E = brentq(lambda E: (events - E) ** 2 / E - first, 1e-6, events)
    assert second == pytest.approx((events - 2.0 * E) ** 2 / (2.0 * E), rel=1e-9)
    behind = site[site["months"] > fit.grid[-2]]
    weight = 0.01 * np.exp(0.1 * behind["x"])
    assert len(behind) >= 12 and weight.sum() == pytest.approx(E, rel=0.05)
    # 1 - (m - E c)^2 / E: m is the sum of the column over the rows at risk, weighted by expected events.
    m = (at_one - at_zero + E) / 2.0
    assert m**2 == pytest.approx(E * (1.0 - at_zero), rel=1e-6)


def test_tests_of_intervals_single_out_no_few_rows_and_are_masked():
    model = model_of()
    fit = model.fit(**GRID, check_assumptions=False)
    hazard = np.full(len(fit.grid), 0.01)
    for changed in ({"beta": np.array([40.0])}, {"at_risk": -hazard}, {"tied": 2.0 * hazard}):
        with pytest.raises(FedstatError):
            send(model, "check_intervals", checks(fit, hazard) | changed)
    strict = model_of(policy="strict")
    fit = strict.fit(**GRID, check_assumptions=False)
    with pytest.raises(PolicyError, match="mask"):
        send(strict, "check_intervals", checks(fit, np.full(len(fit.grid), 0.01)))
