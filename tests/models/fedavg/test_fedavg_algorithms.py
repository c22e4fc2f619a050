"""The algorithms of the family against gradient descent on all rows and their printed updates."""

import numpy as np
import pandas as pd
import pytest
from descent import FRAME, SITES, WHOLE, F, Pooled, fit, model, table
from scipy.optimize import minimize

import fedstat as fs
from fedstat.federation.tables.table import ParquetTable

L = F.links
COUNTS = np.column_stack([FRAME["events"], FRAME["n"] - FRAME["events"]])
CASES = {
    "logit": ("binary", F.Binomial(), {}, {}),
    "probit": ("binary", F.Binomial(L.Probit()), {}, {}),
    "frequency weights": ("binary", F.Binomial(), {"freq_weights": "w"}, {"weights": FRAME["w"]}),
    "trials": ("cbind(events, n - events)", F.Binomial(), {}, {}),
    "weighted trials": (
        "cbind(events, n - events)",
        F.Binomial(),
        {"freq_weights": "w"},
        {"weights": FRAME["w"]},
    ),
    "exposure": ("count", F.Poisson(), {"exposure": "days"}, {"offset": np.log(FRAME["days"])}),
    "offset": ("count", F.Poisson(), {"offset": "z"}, {"offset": FRAME["z"]}),
    "gaussian": ("gauss", F.Gaussian(), {}, {}),
    "gamma": ("gamma", F.Gamma(L.Log()), {}, {}),
}
RATES = {"exposure": 1e-3}


def close(ours, theirs, tolerance=1e-12):
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_one_whole_epoch_a_round_is_gradient_descent_on_all_rows(case):
    response, family, known, theirs = CASES[case]
    endog = COUNTS if response.startswith("cbind") else response
    pooled = Pooled(endog, "x + z + C(g)", family, **theirs)
    rate = RATES.get(case, 0.1)
    ours = fit(
        fs.FedAvg,
        formula=f"{response} ~ x + z + C(g)",
        known=known | {"family": family},
        rounds=25,
        learning_rate=rate,
        **WHOLE,
    )
    expected = pooled.descend(25, rate)
    close(ours.params, expected)
    assert abs(expected).max() > 0.1


@pytest.mark.parametrize("right", ["x + z + C(g)", "0 + x + z", "1"])
def test_descent_in_standardized_columns_returns_to_the_units_of_the_data(right):
    frame = FRAME.assign(x=100.0 + 30.0 * FRAME["x"])
    pooled = Pooled("binary", right, F.Binomial(), frame)
    mean, spread = pooled.X.mean(axis=0), pooled.X.std(axis=0)
    if right.startswith("0"):
        mean, spread = np.zeros(2), np.sqrt((pooled.X**2).mean(axis=0))
    else:
        mean[0], spread[0] = 0.0, 1.0
    pooled.all.exog[:] = (pooled.X - mean) / spread
    gamma = pooled.descend(30, 0.5)
    expected = gamma / spread
    if not right.startswith("0"):
        expected[0] -= gamma[1:] @ (mean[1:] / spread[1:])
    ours = fit(
        fs.FedAvg,
        formula=f"binary ~ {right}",
        frame=frame,
        rounds=30,
        learning_rate=0.5,
        standardize=True,
        **WHOLE,
    )
    close(ours.params, expected)


def test_mini_batches_are_drawn_by_seed_round_and_site():
    """FedAvg as printed by McMahan et al., with the documented generators."""
    pooled = Pooled("binary", "x + z + C(g)", F.Binomial())
    y = FRAME["binary"].to_numpy()
    beta = np.zeros(4)
    for number in range(3):
        reached = {}
        for site in SITES:
            rng = np.random.default_rng((11, number, *site.encode()))
            at, w = np.flatnonzero(pooled.site == site), beta.copy()
            for _ in range(2):
                order = at[rng.permutation(len(at))]
                for batch in np.split(order, range(16, len(at), 16)):
                    mu = 1 / (1 + np.exp(-pooled.X[batch] @ w))
                    w = w - 0.1 * pooled.X[batch].T @ (mu - y[batch]) / len(batch)
            reached[site] = w
        beta = sum(pooled.rows[s] * reached[s] for s in SITES) / len(FRAME)
    ours = fit(fs.FedAvg, rounds=3, local_epochs=2, batch_size=16, learning_rate=0.1, seed=11)
    close(ours.params, beta)


@pytest.mark.parametrize("standardize", [False, True])
def test_gradient_descent_ends_at_the_estimate_of_glore(standardize):
    options = {"rounds": 250, "learning_rate": 4.0 if standardize else 1.5, "standardize": standardize}
    formula = "binary ~ x + C(g)"
    ours = fit(fs.FedAvg, formula=formula, **options, **WHOLE)
    exact = model(fs.GLORE, formula).fit()
    close(ours.params, exact.params, 1e-6)
    assert ours.converged
    assert abs(ours.distance).max() < 1e-5
    np.testing.assert_allclose([ours.llf, ours.deviance], [exact.llf, exact.deviance], rtol=1e-10)


BATCHES = {"rounds": 8, "local_epochs": 3, "batch_size": 8, "learning_rate": 0.2}


@pytest.mark.parametrize("family", [F.Binomial(), F.Poisson()])
def test_fedprox_without_its_term_is_fedavg_to_the_bit(family):
    known = {"known": {"family": family}}
    prox = fit(fs.FedProx, mu=0.0, gamma=0.0, **BATCHES, **known)
    avg = fit(fs.FedAvg, **BATCHES, **known)
    assert prox.params.to_numpy().tobytes() == avg.params.to_numpy().tobytes()


def test_fedavgm_without_momentum_is_fedavg():
    close(fit(fs.FedAvgM, momentum=0.0, **BATCHES).params, fit(fs.FedAvg, **BATCHES).params, 1e-14)


def test_q_fedavg_without_fairness_averages_sites_alike():
    pooled = Pooled("binary", "x + z + C(g)", F.Binomial())
    beta = np.zeros(4)
    for _ in range(20):
        beta = beta - 0.3 * np.mean([pooled.gradient(beta, site) for site in SITES], axis=0)
    ours = fit(fs.QFedAvg, q=0.0, rounds=20, learning_rate=0.3, **WHOLE)
    close(ours.params, beta, 1e-13)
    assert abs(ours.params - fit(fs.FedAvg, rounds=20, learning_rate=0.3, **WHOLE).params).max() > 1e-3


def test_q_fedavg_at_sites_of_one_size_without_fairness_is_fedavg():
    frame = FRAME.groupby("site").head(30)
    rows = {"frame": frame, **BATCHES}
    close(fit(fs.QFedAvg, q=0.0, **rows).params, fit(fs.FedAvg, **rows).params, 1e-14)


@pytest.mark.parametrize("lipschitz", [None, 20.0])
def test_q_fedavg_is_the_printed_algorithm(lipschitz):
    """Li et al. 2020, Algorithm 2, with one whole epoch a round."""
    pooled = Pooled("binary", "x + z + C(g)", F.Binomial())
    q, rate, beta = 2.0, 0.3, np.zeros(4)
    constant = 1 / rate if lipschitz is None else lipschitz
    for _ in range(10):
        delta, h = np.zeros(4), 0.0
        for site in SITES:
            loss, dw = pooled.loss(beta, site), constant * rate * pooled.gradient(beta, site)
            delta = delta + loss**q * dw
            h += q * loss ** (q - 1) * dw @ dw + constant * loss**q
        beta = beta - delta / h
    ours = fit(fs.QFedAvg, q=q, lipschitz=lipschitz, rounds=10, learning_rate=rate, masked=False, **WHOLE)
    close(ours.params, beta, 1e-13)
    np.testing.assert_allclose(
        ours.site_loss, [pooled.loss(beta, site) for site in ours.site_loss.index], rtol=1e-10
    )


@pytest.mark.parametrize("dampening", [0.0, 0.7, 0.3])
def test_fedavgm_is_heavy_ball_descent(dampening):
    """The text of Li et al. (2024), section A.3, and with dampening 0.7 their Algorithm 3."""
    pooled = Pooled("binary", "x + z + C(g)", F.Binomial())
    beta, velocity = np.zeros(4), np.zeros(4)
    for _ in range(15):
        update = -0.1 * pooled.all.score(beta, scale=1.0) / len(FRAME)
        velocity = 0.7 * velocity + (1.0 - dampening) * update
        beta = beta - velocity
    options = {"momentum": 0.7, "dampening": dampening, "rounds": 15, "learning_rate": 0.1, **WHOLE}
    close(fit(fs.FedAvgM, **options).params, beta)


@pytest.mark.parametrize("gamma", [0.0, 0.6])
def test_fedprox_is_the_printed_algorithm(gamma):
    """Li et al. 2020, Algorithm 2, averaged by rows; a site stops once Definition 2 holds."""
    pooled = Pooled("binary", "x + z + C(g)", F.Binomial())
    beta, mu = np.zeros(4), 0.5
    for _ in range(5):
        total = np.zeros(4)
        for site in SITES:
            w, start = beta.copy(), np.linalg.norm(pooled.gradient(beta, site))
            for _ in range(6):
                w = w - 0.3 * (pooled.gradient(w, site) + mu * (w - beta))
                left = np.linalg.norm(pooled.gradient(w, site) + mu * (w - beta))
                if gamma and left <= gamma * start:
                    break
            total = total + pooled.rows[site] * w
        beta = total / len(FRAME)
    ours = fit(fs.FedProx, mu=mu, gamma=gamma, rounds=5, local_epochs=6, batch_size=None, learning_rate=0.3)
    close(ours.params, beta)


@pytest.mark.parametrize("masked", [False, True])
def test_fedprox_averages_each_site_once_as_printed(masked):
    """Li et al. 2020, Algorithm 2, line 6; with mu = 0 and small steps it minimizes the sum of F_k."""
    pooled = Pooled("binary", "x + z", F.Binomial())
    beta, mu = np.zeros(3), 0.5
    for _ in range(4):
        reached = []
        for site in SITES:
            w = beta.copy()
            for _ in range(3):
                w = w - 0.3 * (pooled.gradient(w, site) + mu * (w - beta))
            reached.append(w)
        beta = np.mean(reached, axis=0)
    options = {"average": "sites", "local_epochs": 3, "batch_size": None, "learning_rate": 0.3}
    ours = fit(fs.FedProx, formula="binary ~ x + z", mu=mu, rounds=4, masked=masked, **options)
    close(ours.params, beta)
    found = minimize(lambda b: sum(pooled.loss(b, site) for site in SITES), np.zeros(3), tol=1e-12).x
    still = {"rounds": 1, "batch_size": None, "learning_rate": 1e-9, "average": "sites", "init": found}
    ours = fit(fs.FedProx, formula="binary ~ x + z", **still)
    assert abs(ours._fit.to_go).max() < 1e-3 < abs(ours.distance).max()
    assert "each site once" in str(ours.summary()) and "equal weights" in str(ours.notes)


def test_q_fedavg_leads_to_the_minimum_of_its_own_criterion():
    frame = table(4_000)
    pooled = Pooled("binary", "x + z", F.Binomial(), frame)
    losses = lambda beta: np.array([pooled.loss(beta, site) for site in SITES])  # noqa: E731
    found = minimize(lambda beta: (losses(beta) ** 4).sum(), np.zeros(3), tol=1e-12).x
    still = {"formula": "binary ~ x + z", "frame": frame, "rounds": 1, "learning_rate": 1e-9}
    ours = fit(fs.QFedAvg, q=3.0, init=found, **still)
    assert ours.converged
    assert "of the minimum of its own criterion" in ours.estimate.convergence
    assert abs(ours._fit.to_go).max() < 1e-3
    assert abs(ours.distance).max() > 1.0
    near = fit(fs.QFedAvg, q=3.0, init=found + np.array([0.0, 0.002, 0.0]), **still)
    information = np.linalg.inv(near._fit.sums.information)
    np.testing.assert_allclose(near._fit.to_go[1], -0.002 / np.sqrt(information[1, 1]), rtol=0.01)
    away = fit(fs.QFedAvg, q=3.0, init=found + np.array([0.0, 0.3, 0.0]), **still)
    assert not away.converged


def test_the_start_is_given_in_the_units_of_the_data():
    init = pd.Series([0.1, -0.2, 0.3, 0.4])
    ours = fit(fs.FedAvg, init=init, rounds=1, learning_rate=1e-12, standardize=True)
    close(ours.params, init, 1e-10)
    assert fit(fs.FedAvg, rounds=1).trace["loss"][0] == pytest.approx(np.log(2.0))


def test_streamed_rows_give_the_same_fit(tmp_path):
    kept = FRAME[["site", "x", "z", "binary", "w"]]
    tables = {}
    for site, rows in kept.groupby("site"):
        rows.drop(columns="site").to_parquet(tmp_path / f"{site}.parquet")
        tables[site] = ParquetTable(tmp_path / f"{site}.parquet", rows_per_chunk=17)
    options = {"rounds": 30, "seed": 5, "learning_rate": 0.1}
    known = {"formula": "binary ~ x + z", "freq_weights": "w"}
    streamed = fs.ClientPartition.from_frames(tables, layout="horizontal")
    ours = fs.FedAvg.from_formula(partition=streamed, **known)
    close(ours.fit(**options).params, model(fs.FedAvg, frame=kept, **known).fit(**options).params)
