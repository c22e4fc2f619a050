"""Firth's penalized likelihood against numerical maximization on the pooled rows, and what it discloses."""

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import optimize

import fedstat as fs
from fedstat.errors import EstimationError, FedstatError, ModelError, NotAvailableError
from fedstat.models.horizontal.session import add
from fedstat.models.run import FitAttempt

OPEN = fs.Policy(min_count=1, min_level_count=1, max_parameters=1.0, max_share=1.0, min_events=1)


def rows(n=300, seed=0, separated=True):
    """Rows of three sites; every row with `rare` has the event if they are separated."""
    rng = np.random.default_rng(seed)
    x, rare = rng.normal(size=n), (np.arange(n) % 15 == 0).astype(float)
    y = rng.uniform(size=n) < 1.0 / (1.0 + np.exp(1.0 - 0.8 * x))
    if separated:
        y = y | (rare > 0.0)
    return pd.DataFrame({"y": y.astype(int), "x": x, "rare": rare, "site": rng.choice(list("ABC"), n)})


def maximized(frame, weights=None, offset=0.0):
    """Coefficients and standard errors by a general optimizer."""
    X = np.column_stack([np.ones(len(frame)), frame[["x", "rare"]]])
    y, f = frame["y"].to_numpy(), np.ones(len(frame)) if weights is None else weights

    def information(b):
        mu = 1.0 / (1.0 + np.exp(-X @ b - offset))
        return X.T @ ((f * mu * (1.0 - mu))[:, None] * X)

    def loss(b):
        eta = X @ b + offset
        return -(f * (y * eta - np.logaddexp(0.0, eta))).sum() - 0.5 * np.linalg.slogdet(information(b))[1]

    b = optimize.minimize(
        loss, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 5000}
    ).x
    return b, np.sqrt(np.diag(np.linalg.inv(information(b))))


def model_of(frame, policy=OPEN, **settings):
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
    return fs.GLORE.from_formula("y ~ x + rare", partition, **settings)


def fit(frame, policy=OPEN, **settings):
    return model_of(frame, policy, **settings).fit(method="firth")


@pytest.mark.parametrize("separated", [True, False])
def test_estimates_maximize_the_penalized_likelihood(separated):
    frame = rows(separated=separated)
    found, (b, errors) = fit(frame), maximized(frame)
    assert found.converged
    assert_allclose(found.params, b, atol=1e-5)
    assert_allclose(found.bse, errors, rtol=1e-5)


ENDOMETRIAL = {
    "NV": (
        "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 "
        "1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 0 0 1 1 0 1 0 "
    ),
    "PI": (
        "13 16 8 34 20 5 17 10 26 17 8 7 20 10 18 16 18 8 29 12 20 38 22 7 25 15 7 28 11 19 10 10 18 14 21 "
        "11 17 25 16 19 15 33 24 48 12 19 2 22 40 5 0 21 15 29 15 12 3 20 23 12 22 42 15 13 14 19 12 13 10 "
        "12 49 6 5 17 11 21 5 19 33 "
    ),
    "EH": (
        "1.64 2.26 3.14 2.68 1.28 2.31 1.8 1.68 1.56 2.31 2.01 1.89 3.15 1.23 1.27 1.76 2 2.64 0.88 1.27 "
        "1.37 0.97 1.14 0.88 0.91 0.58 0.97 1.5 1.33 2.37 1.82 3.13 1.31 1.92 1.64 2.01 1.88 1.93 2.11 1.29 "
        "1.72 0.75 1.92 1.84 1.11 1.61 1.18 1.44 1.18 0.93 1.17 1.19 1.06 2.02 2.29 2.33 2.9 1.7 1.41 2.25 "
        "1.54 1.97 1.75 2.16 2.57 1.37 3.61 2.04 2.17 1.69 0.27 1.84 1.3 0.96 1.01 0.98 0.35 1.02 0.85 "
    ),
    "HG": (
        "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 "
        "1 1 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 "
    ),
}
"""Tumors of 79 patients (Heinze and Schemper 2002, table I); neovascularization separates the grade."""


def test_it_equals_brglm2():
    """brglm2 0.9: ``glm(HG ~ NV + PI + EH, binomial, endometrial, method="brglmFit", type="AS_mean")``."""
    table = {name: np.array(text.split(), dtype=float) for name, text in ENDOMETRIAL.items()}
    frame = pd.DataFrame(table).assign(site=np.resize(["A", "B"], 79))
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=OPEN)
    found = fs.GLORE.from_formula("HG ~ NV + PI + EH", partition).fit(method="firth", maxiter=200)
    assert_allclose(found.params, [3.77455940, 2.92927326, -0.03475175, -2.60416382], rtol=1e-6)
    assert_allclose(found.bse, [1.48869160, 1.55076369, 0.03957815, 0.77601762], rtol=1e-6)


def test_frequency_weights_and_offsets_count():
    frame = rows().assign(w=np.resize([1.0, 2.0], 300), o=np.resize([0.5, -0.5, 0.0], 300))
    b, errors = maximized(frame, frame["w"].to_numpy(), frame["o"].to_numpy())
    found = fit(frame, freq_weights="w", offset="o")
    # A frequency weight is a number of rows, each with its own leverage.
    repeated = frame.loc[frame.index.repeat(frame["w"].astype(int))].reset_index(drop=True)
    assert_allclose(found.params, b, atol=1e-5)
    assert_allclose(found.params, fit(repeated, offset="o").params, atol=1e-7)
    assert_allclose(found.bse, errors, rtol=1e-5)


def test_separation_names_the_remedy():
    with pytest.raises(EstimationError, match=r"separation.*fit\(method='firth'\)"):
        model_of(rows()).fit()


def test_strict_sites_answer_with_masked_sums():
    frame = rows(900, seed=3, separated=False)
    strict = fit(frame, fs.Policy.strict())
    assert_allclose(strict.params, fit(frame).params, atol=1e-8)
    kinds = strict.ledger.to_frame()
    penalty = kinds[kinds["array"] == "penalty"]
    assert len(penalty) and penalty["masked"].all()


def test_there_is_no_likelihood_and_the_summary_says_so():
    found = fit(rows())
    text = " ".join(str(found.summary()).split())
    assert "Firth's penalized likelihood" in text and "report their sign" in text
    with pytest.raises(NotAvailableError, match="does not maximize the likelihood"):
        getattr(found, "aic")  # noqa: B009
    with pytest.raises(NotAvailableError, match="compare_lr_test: needs fit"):
        found.compare_lr_test(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cov_type": "HC1"}, "cov_type='nonrobust'"),
        ({"rounds": 1}, "neither rounds"),
        ({"method": "x"}, "method"),
    ],
)
def test_what_it_does_not_combine_with(options, message):
    partition = fs.ClientPartition.from_frame(rows(), by="site")
    with pytest.raises(ModelError, match=message):
        fs.GLORE.from_formula("y ~ x", partition).fit(**{"method": "firth"} | options)
    with pytest.raises(ModelError, match="for the logit, received Gaussian"):
        fs.FederatedOLS.from_formula("y ~ x", partition).fit(method="firth")


def test_explain_states_what_sites_learn():
    model = fs.GLORE.from_formula("y ~ x", fs.ClientPartition.from_frame(rows(), by="site"))
    assert "inverse information of all sites" in str(model.explain(method="firth"))


def test_results_are_saved(tmp_path):
    found = fit(rows())
    found.save(tmp_path / "fit")
    again = fs.load(tmp_path / "fit")
    assert again.basis.method == "firth" and again.params.equals(found.params)


def penalty_at(model, beta, inverse):
    """Sum of the sites' answers at an inverse information that the analyst chose."""
    session = model._open_session("glm", True)
    units = {"shift": np.zeros(3), "scale": np.ones(3)}

    def protocol():
        yield session.opening() + session.request_all("start", {}, model.distribution.to_json())
        yield session.request_all("sum_scores", units | {"beta": beta, "observed": np.array(False)})
        replies = yield session.request_all("sum_firth", units | {"beta": beta, "inverse": inverse})
        return add(replies, "penalty")

    return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)


def test_an_inverse_that_singles_a_row_out_is_refused():
    """Its leverage would be next to one, and the sum would be that row's columns alone."""
    frame = rows(900, seed=3, separated=False)
    frame.loc[7, "x"] = 40.0
    X = np.column_stack([np.ones(900), frame[["x", "rare"]]])
    beta = np.array([0.1, 0.0, -0.3])
    mu = 1.0 / (1.0 + np.exp(-X @ beta))
    information = X.T @ ((mu * (1.0 - mu))[:, None] * X)
    open_model, strict = model_of(frame), model_of(frame, fs.Policy.strict())
    inverse = np.linalg.inv(information)
    h = (mu * (1.0 - mu)) * ((X @ inverse) * X).sum(axis=1)
    assert_allclose(penalty_at(open_model, beta, inverse), X.T @ (h * (0.5 - mu)), rtol=1e-6, atol=1e-9)
    far = np.array([0.0, 1.0, 0.0])
    one = np.outer(far, far) / information[1, 1]
    with pytest.raises(FedstatError):
        penalty_at(strict, beta, one)
    with pytest.raises(FedstatError, match="a reason that depends on rows"):
        penalty_at(strict, beta, 2.0 * inverse)
