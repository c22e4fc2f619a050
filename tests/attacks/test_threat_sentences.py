"""Sentences about what a party learns, where no attack of another file shows that they are true.

Each test reads what the sentence says from the messages or files that the party has, or shows that the
party can do what the sentence says. ``docs/disclosure.md`` names the tests.
"""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pandas as pd
import pytest
from people import people
from refusals import refused_for
from scipy.optimize import brentq
from scipy.spatial import cKDTree
from scipy.stats import norm
from test_exchange_folder import wait_until
from test_products_between_sites import released_product, study

import fedstat as fs
from fedstat.errors import EngineError
from fedstat.federation.message import Request, pack_request
from fedstat.federation.protocols import product_steps
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.transport.remote import request_number
from fedstat.federation.transport.site_folder import load_identity, open_site
from fedstat.operator.command_line import main

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")

N = 600


def by_rows(table):
    return fs.ClientPartition.from_frame(table, by="site", policy="strict")


def by_columns(**held):
    """Sites of a strict partition, each with one column or more of the same entities."""
    rng = np.random.default_rng(4)
    columns = {"Clinic": {"y": rng.normal(size=N)}, "Third": {"t": rng.normal(size=N)}, **held}
    frames = {site: pd.DataFrame({"k": range(N), **own}) for site, own in columns.items()}
    return frames, fs.ClientPartition.from_frames(frames, on="k", policy="strict")


# ----------------------------------------------------------------------------------------------------
# Analyst.


def cells(rare=8, ones=7):
    """Three sites with `rare` rows of a level each; `ones` of them have the outcome 1."""
    table, place = people(N), np.arange(N) % 200
    table["level"] = np.where(place < rare, "rare", "common")
    table.loc[place < rare, "y"] = (place[place < rare] < ones).astype(float)
    return table


def gram(formula, table):
    """X'X and X'y of all rows, from the estimates of least squares."""
    fit = fs.FederatedOLS.from_formula(formula, by_rows(table)).fit()
    found = np.linalg.inv(fit.cov_params().to_numpy() / fit.scale)
    return found, found @ fit.params.to_numpy()


def test_rows_and_rows_of_each_level_are_counted():
    table = cells(ones=4)
    (rows, rare), _ = gram("z ~ level", table)[0]
    assert (rows, rare) == pytest.approx((N, (table.level == "rare").sum()))


def test_small_counts_follow_by_subtraction_but_no_values():
    """At each site one row of the rare level has the outcome 0, and one row has neither a nor b."""
    table, place = cells(), np.arange(N) % 200
    counted, with_outcome = gram("y ~ level", table)
    assert counted[1, 1] - with_outcome[1] == pytest.approx(3.0)
    with refused_for("rows behind a product"):
        gram("y ~ level:income + level", table)
    table["a"], table["b"] = (place < 120) * 1.0, ((place >= 110) & (place < 199)) * 1.0
    counted, _ = gram("z ~ a + b", table)
    assert counted[0, 0] - counted[1, 1] - counted[2, 2] + counted[1, 2] == pytest.approx(3.0)
    with refused_for("rows behind a product"):
        gram("z ~ income + a + b + a:income + b:income", table)


def test_a_sum_of_roots_reveals_the_whole_numbers_of_a_level_of_few_rows():
    """Five rows of a site have a; the sums of x and of its root leave one set of ages."""
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"site": np.arange(N) * 3 // N, "x": rng.integers(20, 91, N) * 1.0})
    rare = rng.choice(N // 3, 5, replace=False)
    table["a"], table["y"] = np.isin(np.arange(N), [*rare, *range(N - 40, N)]) * 1.0, rng.normal(size=N)
    own = fs.FederatedOLS.from_formula("y ~ a + a:sqrt(x)", by_rows(table)).fit().heterogeneity
    released = np.linalg.inv(own.covariances[list(own.estimates.index).index("0")])
    released = released * (N // 3) / released[0, 0]
    ages = np.arange(20.0, 91.0)

    def sums(several):
        return np.stack([several.sum(axis=-1), np.sqrt(several).sum(axis=-1)], -1)

    two = np.array(list(combinations_with_replacement(ages, 2)))
    three = np.array(list(combinations_with_replacement(ages, 3)))
    near, far = cKDTree(sums(two)), released[[2, 1], [2, 2]] - sums(three)
    found = near.query_ball_point(far, 1e-9, p=np.inf)
    sets = {tuple(sorted([*three[i], *two[j]])) for i, some in enumerate(found) for j in some}
    assert sets == {tuple(np.sort(table["x"][rare]))}
    with refused_for("maximum sums of one column"):
        fs.FederatedOLS.from_formula("y ~ a + a:x + a:sqrt(x)", by_rows(table)).fit()


def test_an_evaluation_releases_bins_and_sums(messages):
    result = fs.GLORE.from_formula("y ~ age", by_rows(people(N))).fit()
    messages.clear()
    result.evaluate()
    released = {}
    for request, reply in messages:
        if request.family == "evaluation":
            released.setdefault(request.step, set()).update(reply.arrays)
    regression = {"score", "information", "totals", "squares", "inside", "spread"}
    assert released == {"bin_counts": {"bins", "least"}, "recalibrate": regression}


def test_between_sites_one_row_may_be_nearly_all_of_a_product():
    """Thirty rows have a; 29 of them have an income of nearly zero. One site would refuse this product."""
    rng = np.random.default_rng(2)
    income = rng.uniform(50.0, 100.0, N)
    income[:30] = rng.uniform(0.0, 0.01, 30)
    income[7] = 90.0
    court, bank = {"a": (np.arange(N) < 30) * 1.0}, {"income": income}
    frames, partition = by_columns(Court=court, Bank=bank)
    assert released_product(partition, "y ~ a + income + t", "a", "income") == pytest.approx(90.0, abs=3.0)
    joined = frames["Clinic"].assign(**court, **bank)
    with refused_for("rows behind a product"):
        fs.FederatedOLS.from_formula(
            "y ~ a + income", by_rows(pd.concat([joined.assign(site=site) for site in "ABC"]))
        ).fit()


def test_between_sites_four_products_reveal_one_row():
    """The columns of each site differ in six rows; only one row is in both differences."""
    rng = np.random.default_rng(5)
    a, z = (np.arange(N) < 40) * 1.0, rng.normal(5.0, 1.0, N)
    less, other = a.copy(), z.copy()
    less[:6], other[5:11] = 0.0, other[5:11] + 1.5
    _, partition = by_columns(Court={"a": a, "less": less}, Bank={"z": z, "other": other})
    read = {
        (one, two): released_product(partition, f"y ~ {one} + {two} + t", one, two)
        for one in ("a", "less")
        for two in ("z", "other")
    }
    found = read["a", "other"] - read["a", "z"] - read["less", "other"] + read["less", "z"]
    assert found == pytest.approx(1.5, abs=0.3)


# ----------------------------------------------------------------------------------------------------
# Coordinator, and another site.


def missing_records():
    """A court without the last hundred entities, and a bank without the first hundred and fifty."""
    rng = np.random.default_rng(6)
    columns = {"Clinic": "y", "Court": "a", "Bank": "b", "Third": "t"}
    frames = {site: pd.DataFrame({"k": range(N), name: rng.normal(size=N)}) for site, name in columns.items()}
    frames["Court"], frames["Bank"] = frames["Court"][:500], frames["Bank"][150:]
    return frames, fs.ClientPartition.from_frames(frames, on="k", policy="strict")


def test_the_coordinator_knows_which_site_has_which_entity(messages):
    frames, partition = missing_records()
    fs.VFEMRegression.from_formula("y ~ a + b + t", partition)
    held = {request.site: reply.arrays["seen"] for request, reply in messages if "seen" in reply.arrays}
    assert set(held) == {"Court", "Bank", "Third"}
    for site, seen in held.items():
        assert len(seen) == len(frames[site])
        assert np.array_equal(np.flatnonzero(partition.presence()[site]), frames[site]["k"])


def test_a_site_receives_coefficients_means_and_standard_deviations(messages):
    table = people(N)
    result = fs.GLORE.from_formula("y ~ age + bmi", by_rows(table)).fit()
    received = {}
    for request, _ in messages:
        received |= {name: value for name, value in request.arrays.items() if value.dtype == np.float64}
    assert set(received) == {"beta", "shift", "scale", "dispersion", "null"}
    columns = table[["age", "bmi"]]
    assert received["shift"][1:] == pytest.approx(columns.mean().to_numpy())
    assert received["scale"][1:] == pytest.approx(columns.std(ddof=0).to_numpy())
    slopes = received["beta"][1:] / received["scale"][1:]
    assert slopes == pytest.approx(result.params.to_numpy()[1:], rel=1e-4)
    assert received["null"] == pytest.approx(np.log(table.y.mean() / (1.0 - table.y.mean())), rel=1e-3)


def test_a_site_receives_who_has_its_own_entities_and_as_a_dealer_patterns_of_others(messages):
    frames, partition = missing_records()
    fs.VFEMRegression.from_formula("y ~ a + b + t", partition).fit(cov_type="none")
    own, others = len(frames["Court"]), set()
    for request, _ in messages:
        if request.site != "Court":
            continue
        plain = {name: array for name, array in request.arrays.items() if array.dtype != np.uint8}
        if request.step == "deal_product":
            others.update(*(array.tolist() for array in plain.values()))
        else:
            assert all(array.size <= own for array in plain.values()), request.step
            assert plain.get("rows", np.zeros(1)).max() < own
    assert len(others) > 1 and others <= {0, 1, 2}  # patterns, and no keys


def test_an_ally_has_an_equation_for_each_of_its_columns():
    """The bank's columns and the products of them with a column of the court, from one fit each."""
    rng = np.random.default_rng(9)
    x, own = rng.normal(size=N), {f"b{j}": rng.normal(size=N) for j in range(3)}
    _, partition = by_columns(Court={"x": x}, Bank=own)
    for name, column in own.items():
        read = released_product(partition, "y ~ x + b0 + b1 + b2 + t", "x", name)
        assert read == pytest.approx(x @ column, abs=0.5)


# ----------------------------------------------------------------------------------------------------
# Coordinator that deviates, and an intruder.


def test_a_scale_that_is_twice_what_it_should_be(monkeypatch):
    """All sites receive the same scale, so that none of them can know; all slopes are doubled."""
    right = fs.GLORE.from_formula("y ~ age + bmi", by_rows(people(N))).fit().params
    send = LocalEngine._send

    def doubled(engine, request, ledger):
        if "scale" in request.arrays:
            scale = request.arrays["scale"] * np.array([1.0, 2.0, 2.0])
            request = replace(request, arrays=request.arrays | {"scale": scale})
        return send(engine, request, ledger)

    monkeypatch.setattr(LocalEngine, "_send", doubled)
    wrong = fs.GLORE.from_formula("y ~ age + bmi", by_rows(people(N))).fit().params
    assert wrong.to_numpy()[1:] == pytest.approx(2.0 * right.to_numpy()[1:], rel=1e-3)


def test_a_dealer_makes_the_count_of_rows_meaningless(monkeypatch):
    """Another number instead of the agreed one: two sites multiply columns that share one row."""
    partition, _ = study(1)
    model = fs.VFEMRegression.from_formula("y ~ a + b + t", partition)
    deal = product_steps.deal_comparison
    monkeypatch.setattr(product_steps, "deal_comparison", lambda *reported: deal(*reported) + 1)
    assert np.isfinite(model.fit(cov_type="none").params).all()


def describe_table(turn=1):
    return pack_request(Request("North", "schema", "describe_table", {}, "s", "{}", None, turn))


def test_the_exchange_folder_shows_messages_that_are_not_sealed(service):
    service.thread.start()
    service.transport().send("North", describe_table())
    replies = [path for path in service.exchange.rglob("*.reply*") if path.is_file()]
    requests = [path for path in service.exchange.rglob("*.ask*") if path.is_file()]
    assert replies and requests
    assert all(path.stat().st_size > 0 and path.stat().st_mtime > 0 for path in replies + requests)
    assert all("North" in path.parts for path in replies + requests)
    assert any(b"describe_table" in path.read_bytes() for path in requests)
    assert any(b"columns" in path.read_bytes() for path in replies)


def test_a_request_that_was_altered_is_not_answered(service):
    request = describe_table()
    with pytest.raises(EngineError, match="did not answer"):
        service.transport(timeout=0.1).send("North", request)
    path = service.exchange / "North" / "asks" / f"{request_number(request)}.ask"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    service.thread.start()
    wait_until(lambda: service.reported)
    assert not list(service.exchange.rglob("*.reply")) and not service.site.site_ledger.chains


def test_an_analysis_stops_where_files_are_removed(service):
    """The site answers a later request, and never the one whose file is gone."""
    first, later = describe_table(), describe_table(2)
    with pytest.raises(EngineError, match="did not answer"):
        service.transport(timeout=0.1).send("North", first)
    for path in (service.exchange / "North").rglob("*.ask"):
        path.unlink()
    service.thread.start()
    service.transport().send("North", later)
    number = request_number(first)
    assert not [path for path in service.exchange.rglob("*") if path.name.startswith(number)]


def test_the_files_of_a_site_are_its_keys_and_its_data(tmp_path):
    """A copy of the folder opens elsewhere, without a password, and signs as the site."""
    pd.DataFrame({"x": np.arange(20.0)}).to_csv(tmp_path / "records.csv", index=False)
    folder, copy = tmp_path / "north", tmp_path / "copy"
    data = ["--data", str(tmp_path / "records.csv")]
    assert main(["site", "init", str(folder), "--name", "North", *data]) == 0
    shutil.copytree(folder, copy)
    assert load_identity(copy).public == load_identity(folder).public
    site = open_site(copy)
    assert site.fingerprint == load_identity(folder).public.fingerprint
    site.site_ledger.store.close()
    described = tomllib.loads((copy / "site.toml").read_text())
    assert pd.read_csv(described["data"]["path"]).x.tolist() == list(range(20))


def test_an_outlier_is_estimated_by_an_assumption_on_all_others():
    """Half of the squared deviations are of one row; the others are normal, and the attack assumes it.

    The mean, the standard deviation and the mean of z |z| determine the outlier, and mean and standard
    deviation of the others. With another assumption the same equations miss it by standard deviations.
    """
    n, errors = 400, {}
    for name, draw in {"normal": "normal", "exponential": "exponential"}.items():
        rng = np.random.default_rng(3)
        x = getattr(rng, draw)(size=n)
        x[7] = np.sqrt(n)
        frames = {"Clinic": "y", "Court": "x", "Bank": "t"}
        values = {"y": rng.normal(size=n), "x": x, "t": rng.normal(size=n)}
        tables = {site: pd.DataFrame({"k": range(n), c: values[c]}) for site, c in frames.items()}
        at = fs.ClientPartition.from_frames(tables, on="k", policy="strict")
        released = fs.VFEMRegression.from_formula("y ~ x + t", at).fit(cov_type="none").exchange.moments
        j = released.names.index("x")
        mean, sd, shape = released.center[j], released.scale[j], released.shape[j]

        def miss(value, mean=mean, sd=sd, shape=shape):
            m = (n * mean - value) / (n - 1)
            s = np.sqrt((n * (mean**2 + sd**2) - value**2) / (n - 1) - m**2)
            a, b = (m - mean) / sd, s / sd
            others = (a**2 + b**2) * (2 * norm.cdf(a / b) - 1) + 2 * a * b * norm.pdf(a / b)
            return ((n - 1) * others + ((value - mean) / sd) ** 2) / n - shape

        found = brentq(miss, mean + 3 * sd, mean + 0.999 * sd * np.sqrt(n - 1))
        errors[name] = abs(found - x[7]) / sd
    assert errors["normal"] < 0.1 and errors["exponential"] > 0.5
