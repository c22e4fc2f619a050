"""Standard errors of mixtures: information over clients is the Hessian of the joint likelihood."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.special import logsumexp

import fedstat as fs
from fedstat.errors import NotAvailableError
from fedstat.models.m2sem import protocol
from fedstat.models.m2sem.information import (
    SiteInformation,
    _places,
    _unidentified,
    _without,
    assemble,
    free_and_flat,
    invert,
    local_information,
    request_information,
)
from fedstat.models.m2sem.modality.categorical import CategoricalModality
from fedstat.models.m2sem.modality.gaussian import GaussianModality
from fedstat.models.m2sem.model import M2SEM
from fedstat.models.m2sem.summary import notes
from fedstat.models.m2sem.tables import DIVERGED, statements_of, wald_tests


def modalities_of(data, Q=1, nodes=7):
    """One modality for each client, fitted from the true clusters, with posteriors and shares."""
    mods = []
    for frame, kind in zip(data.frames.values(), data.modalities["kind"], strict=True):
        names = list(frame)[1:]
        if kind == "continuous":
            mods.append(GaussianModality(frame[names].to_numpy(), names, Q))
        else:
            codes = np.column_stack([frame[name].cat.codes for name in names]).astype(np.int64)
            P = len(names)
            mods.append(CategoricalModality(codes, names, Q, ["ordinal"] * P, [4] * P, nodes=nodes))
    K = len(data.shares)
    r = np.eye(K)[data.labels] * 0.8 + 0.2 / K
    for m in mods:
        m.begin(K)
        m.begin_means(r)
    return mods, *ascended(mods, r, 20)


def posterior(mods, w):
    a = np.log(w) + sum(m.log_densities() for m in mods)
    total = logsumexp(a, axis=1)
    return np.exp(a - total[:, None]), total.sum()


def ascended(mods, r, rounds):
    w = r.mean(axis=0)
    for _ in range(rounds):
        r = posterior(mods, w)[0]
        w = r.mean(axis=0)
        for m in mods:
            m.improve(r)
    return posterior(mods, w)[0], w


def client_information(parts, r):
    out = {}
    for site, mods in parts.items():
        one = local_information(mods, r)
        q = one.columns.shape[2]
        reported = SiteInformation(one.own, one.with_shares, one.jacobian, one.communalities, q)
        out[site] = reported, one.columns
    return out


def joint_information(parts, r, w):
    made = client_information(parts, r)
    names = list(made)
    crossed = {
        (a, b): np.einsum("ikp,ikq->pq", made[a][1], made[b][1])
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    reported = {site: one for site, (one, _) in made.items()}
    return assemble(r, w, reported, crossed), reported


def hessian(value, p, h=2e-3):
    """Second derivatives at zero by central differences of two widths (Richardson)."""
    H, E = np.empty((p, p)), np.eye(p)

    def second(i, j, h):
        a, b = h * E[i], h * E[j]
        return (value(a + b) - value(a - b) - value(b - a) + value(-a - b)) / (4 * h * h)

    for i in range(p):
        for j in range(i, p):
            H[i, j] = H[j, i] = (4 * second(i, j, h) - second(i, j, 2 * h)) / 3
    return H


def test_three_sites_with_continuous_and_ordinal_columns_have_the_joint_hessian():
    kinds = ["continuous", "ordinal", "continuous"]
    data = fs.datasets.make_clusters(150, kinds, p=3, separation=2.0, seed=3)
    mods, r, w = modalities_of(data)
    info, reported = joint_information({str(i): [m] for i, m in enumerate(mods)}, r, w)
    # The same coordinates: where a client's jacobian of all its parameters is the identity.
    bases = [coordinates(m, r) for m in mods]
    starts = [m.state() for m in mods]

    def loglik(u):
        shares = np.append(w[:-1] + u[: len(w) - 1], 0.0)
        shares[-1] = 1.0 - shares.sum()
        at = len(w) - 1
        for m, Z, start in zip(mods, bases, starts, strict=True):
            m.restore(start + Z @ u[at : at + Z.shape[1]])
            at += Z.shape[1]
        return posterior(mods, shares)[1]

    H = hessian(loglik, len(info))
    assert np.abs(info + H).max() < 1e-6 * np.abs(H).max()
    assert [part.crossing for part in reported.values()] == [10, 13, 10]


def coordinates(m, r):
    """Coordinates (p, d) in which every direction changes the densities: all scores cross here."""
    free, flat = free_and_flat(m)
    flat = np.hstack([flat, _unidentified(m.scores_by_cluster(r)[0], r, free)])
    base = _without(flat[free])
    Z = np.zeros((len(free), base.shape[1]))
    Z[free] = base
    return Z


def errors_of(parts, r, w):
    """Variances of all statements."""
    info, reported = joint_information(parts, r, w)
    found = invert(info, len(w), reported)
    assert found.available
    return np.concatenate([np.diag(found.of_site(site)) for site in parts])


def test_how_factors_are_turned_and_which_site_holds_what_does_not_matter():
    """For continuous columns only; the nodes of others do not rotate with the factors."""
    data = fs.datasets.make_cluster_experiment(1, 300, noise=1.0, seed=1)
    sites = ["Client 1", "Client 2", "Client 3"]
    frames = {site: data.frames[site].iloc[:, :6] for site in sites}
    mods, r, w = modalities_of(replace(data, frames=frames, modalities=data.modalities.loc[sites]), Q=2)
    expected = errors_of({str(i): [m] for i, m in enumerate(mods)}, r, w)
    joined = errors_of({"0": mods[:2], "2": mods[2:]}, r, w)
    np.testing.assert_allclose(joined, expected, rtol=1e-6, atol=1e-12)
    turn = np.array([[np.cos(0.7), -np.sin(0.7)], [np.sin(0.7), np.cos(0.7)]])
    for m in mods:
        state = m.state()
        for places in _places(m, state):
            state[places] = state[places] @ turn
        m.restore(state)
    turned = errors_of({str(i): [m] for i, m in enumerate(mods)}, r, w)
    np.testing.assert_allclose(turned, expected, rtol=1e-6, atol=1e-12)


@pytest.fixture(scope="module")
def fitted():
    data = fs.datasets.make_clusters(200, separation=2.4, missing=0.1, seed=2)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    behind = []

    def recorded(requester, slot, r, w, place):
        behind.append((r, w))
        return request_information(requester, slot, r, w, place)

    with pytest.MonkeyPatch.context() as patch, pytest.warns(fs.errors.DisclosureWarning):
        patch.setattr(protocol, "request_information", recorded)
        result = M2SEM(partition, 2, 1).fit(select=None, n_init=1)
    return data, partition, result, *behind


def test_over_sites_and_secure_products_it_is_the_same(fitted):
    """At the released parameters and the posteriors behind them, from the pooled rows."""
    data, partition, result, behind = fitted
    r, w = behind
    n, K = r.shape
    parts, columns = {}, {}
    for site, held in result._record.sites.items():
        frame = data.frames[site].set_index("id")
        m = GaussianModality(frame.to_numpy(), list(frame), 1)
        m.restore(held.parameters)
        at = partition.rows[site]
        one = local_information([m], np.ascontiguousarray(r[at]))
        columns[site] = np.zeros((n, K, one.columns.shape[2]))
        columns[site][at] = one.columns
        parts[site] = SiteInformation(
            one.own, one.with_shares, one.jacobian, one.communalities, one.columns.shape[2]
        )
    names = list(parts)
    crossed = {
        (a, b): np.einsum("ikp,ikq->pq", columns[a], columns[b])
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    pooled = invert(assemble(r, w, parts, crossed), K, parts)
    observed = result._record.observed
    for site in names:
        np.testing.assert_allclose(observed.of_site(site), pooled.of_site(site), rtol=1e-6, atol=1e-9)


def test_tables_with_errors(fitted):
    data, _, result, _ = fitted
    tidy, contrasts, tests = result.tidy(), result.contrasts(), result.tests()
    assert list(tidy.columns[-4:]) == ["estimate", "std_error", "conf_low", "conf_high"]
    assert len(tidy) == 24 and len(contrasts) == 12 and len(tests) == 12
    two = contrasts["statistic"].to_numpy() ** 2
    np.testing.assert_allclose(tests["statistic"], two, rtol=1e-6)
    wide = tidy.pivot_table("estimate", ["site", "column"], "cluster", sort=False)
    np.testing.assert_allclose(contrasts["estimate"], wide[1] - wide[2])
    truth = data.profiles.droplevel("category")
    largest = data.labels.value_counts().index[0]
    true = (truth[largest] - truth[1 - largest]).to_numpy()
    assert np.abs((contrasts["estimate"].to_numpy() - true) / contrasts["std_error"].to_numpy()).max() < 4.0
    assert result.communalities()["estimate"].between(0.1, 0.8).all()
    assert result.sizes["std_error"].between(0.02, 0.08).all()
    text = str(result.summary(notes="all"))
    assert "mean or share (std err)" in text and "Louis 1982" in text
    with pytest.raises(fs.errors.ModelError, match="alpha between 0 and 1"):
        result.tidy(alpha=0)


def test_results_come_back_from_a_file_with_their_errors(fitted, tmp_path):
    _, _, result, _ = fitted
    result.save(tmp_path / "clusters")
    again = fs.load(tmp_path / "clusters")
    assert again.contrasts().equals(result.contrasts())


def test_without_errors_it_is_said_why():
    data = fs.datasets.make_clusters(60, p=6, separation=3.0, seed=2)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    with pytest.warns(fs.errors.DisclosureWarning):
        few = M2SEM(partition, 2, 1).fit(select=None, n_init=1)
    with pytest.raises(NotAvailableError, match=r"sums of products of \d+ scores need"):
        few.contrasts()
    assert "No standard errors" in str(few.summary())
    assert list(few.tidy().columns[-2:]) == ["cluster", "estimate"]
    with pytest.warns(fs.errors.DisclosureWarning):
        none = M2SEM(partition, 2, 1).fit(select=None, n_init=1, cov_type=None)
    with pytest.raises(NotAvailableError, match="cov_type='observed'"):
        none.tests()
    assert not any("open_scores" in step for step in none.ledger.to_frame()["step"])


def test_explain_says_what_products_reveal():
    data = fs.datasets.make_clusters(100, seed=2)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    model = M2SEM(partition, 2, 1)
    for cov_type in ("observed", None):
        learned = model.explain(select=None, cov_type=cov_type).learned
        assert any("products of their scores" in what for _, what in learned) == bool(cov_type)


def test_of_two_columns_on_a_factor_profiles_have_errors_and_communalities_none():
    """Loading and error variance trade: only the covariance of the columns is known."""
    data = fs.datasets.make_clusters(300, p=4, separation=2.4, seed=5)
    frames = {site: frame.iloc[:, : 5 - at] for at, (site, frame) in enumerate(data.frames.items())}
    frames["Client 3"] = frames["Client 3"].iloc[:, :2]
    partition = fs.ClientPartition.from_frames(frames, on=data.key)
    with pytest.warns(fs.errors.DisclosureWarning):
        result = M2SEM(partition, 2, 1).fit(select=None, n_init=1)
    known = result.communalities()["estimate"].groupby("site").count()
    assert known["Client 1"] == 4 and known["Client 3"] == 0
    errors = result.tidy().groupby("site")["std_error"]
    assert (errors.min() > 0.03).all() and (errors.max() < 0.3).all()


def test_profiles_that_no_row_reveals_have_no_errors():
    """A cluster without any row: nothing says where it is, and its profile is no pseudo-inverse's."""
    data = fs.datasets.make_clusters(150, p=3, separation=2.0, seed=3)
    (m, *_), r, w = modalities_of(data)
    m.means = np.vstack([m.means, [[1.0]]])
    few = np.column_stack([0.9 * r, np.full(len(r), 0.1)])
    nobody = np.column_stack([r, np.zeros(len(r))])
    assert np.linalg.eigvalsh(local_information([m], few).own)[-1] > 0.0
    local = local_information([m], nobody)
    assert np.linalg.eigvalsh(local.own)[-1] < 0.0
    reported = SiteInformation(local.own, local.with_shares, local.jacobian, local.communalities, 0)
    shares = np.append(w * 0.999, 0.001)
    found = invert(assemble(nobody, shares, {"A": reported}, {}), 3, {"A": reported})
    assert not found.available and "not positive definite" in found.problem


def test_where_sums_are_judged_by_bits_a_fit_goes_on_without_errors_and_says_what_to_do():
    kinds = ["continuous", "ordinal", "continuous"]
    data = fs.datasets.make_clusters(150, kinds, p=3, separation=2.4, seed=3)
    policy = fs.Policy(discrete="bits")
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key, policy=policy)
    found = M2SEM(partition, 2, 1).fit(select=None, n_init=1, starts="sum")
    assert "open_scores" not in set(found.ledger.to_frame()["step"])
    text = " ".join(str(found.summary()).split())
    assert "No standard errors: Client 2: its policy" in text and 'discrete = "any"' in text
    with pytest.raises(NotAvailableError, match='discrete = "any"'):
        found.contrasts()


@pytest.fixture(scope="module")
def by_kind():
    """Three clusters, and an ordinal and a nominal column that they do not change."""
    rng = np.random.default_rng(3)
    n = 600
    k = rng.integers(3, size=n)
    eta = rng.standard_normal((n, 2)) + 2.2 * np.eye(3)[k, :2]
    numbers = eta[:, [0]] * [1.0, 0.8, 0.9] + rng.standard_normal((n, 3))
    A = pd.DataFrame(numbers, columns=["a0", "a1", "a2"]).assign(id=range(n))
    latent = eta[:, [1]] * [1.4, 1.2, 1.0, 0.0] + rng.logistic(size=(n, 4))
    B = pd.DataFrame(
        {f"b{j}": pd.Categorical(np.digitize(latent[:, j], [-1, 1, 3]), ordered=True) for j in range(4)}
    )
    B["town"] = rng.choice(["u", "v", "w"], n)
    partition = fs.ClientPartition.from_frames({"A": A, "B": B.assign(id=range(n))}, on="id")
    with pytest.warns(fs.errors.DisclosureWarning):
        return M2SEM(partition, 3, 1).fit(select=None, n_init=1, starts="sum", maxiter=400)


def test_degrees_of_freedom_are_those_of_the_predictors(by_kind):
    """A column of levels depends on the cluster by one number for each factor, not by each of its levels."""
    tests = by_kind.tests().droplevel(["site", "modality"])
    assert (tests["df"] == 2).all() and list(tests.index) == [
        "a0",
        "a1",
        "a2",
        "b0",
        "b1",
        "b2",
        "b3",
        "town",
    ]
    assert (tests.loc[["a0", "b0", "b1"], "p_value"] < 1e-4).all() and (
        tests.loc[["b3", "town"], "p_value"] > 0.01
    ).all()


def test_the_test_of_an_ordinal_column_is_that_of_its_mean_level(by_kind):
    """From the released profiles and their covariance."""
    for one in statements_of(by_kind._record):
        if one.kind != "ordinal":
            continue
        K, C = one.estimates.shape
        mean = np.kron(np.eye(K), np.arange(C))
        R = np.hstack([np.eye(K - 1), -np.ones((K - 1, 1))]) @ mean
        d = R @ one.estimates.ravel()
        expected = d @ np.linalg.solve(R @ one.cov @ R.T, d)
        np.testing.assert_allclose(by_kind.tests().loc[one.key, "statistic"], expected, rtol=1e-8)


def test_errors_of_a_diverging_loading_are_withheld(by_kind):
    record = by_kind._record
    place = [column.name for one in record.sites["B"].modalities for column in one.columns].index("b1")
    for share, withheld in ((np.nextafter(DIVERGED, 0.0), False), (DIVERGED, True)):
        shared = record.observed.communalities["B"].copy()
        shared[place] = share
        observed = replace(record.observed, communalities={**record.observed.communalities, "B": shared})
        changed = replace(record, observed=observed)
        found = {one.key[2]: np.isnan(one.cov).all() for one in statements_of(changed)}
        assert found == {name: withheld and name == "b1" for name in found}
        assert wald_tests(changed).loc[("B", "B", "b1"), "statistic"].item() > 0.0 or withheld
        noted = [str(note) for note in notes(changed) if note.kind == "diverging_loading"]
        assert bool(noted) == withheld and all("'b1' at 'B'" in text for text in noted)
