"""Every way up the likelihood ends at the same point."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import ITERATIVE, packed, simulate

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

TIGHT = ITERATIVE | {"tol": 1e-11, "cov_type": "none", "maxiter": 20_000}
WAYS = {
    "plain local Newton": {"acceleration": None},
    "accelerated gradient": {"step": "gradient"},
    "plain gradient": {"step": "gradient", "acceleration": None},
    "gradient with a rate of its own": {"step": "gradient", "learning_rate": 0.3},
    "a long step that must be shortened": {"step": "gradient", "learning_rate": 8.0},
    "short memory": {"memory": 2},
    "from complete entities": {"init": "cc"},
    "from mean imputation": {"init": "impute"},
    "from far away": {"init": np.array([5.0, 5.0, -5.0, 5.0, -5.0, 1.0, -30.0])},
}


@pytest.fixture(scope="module")
def study():
    return simulate(seed=1, n=400, holder="Registry")


@pytest.fixture(scope="module")
def model(study):
    return study.model()


@pytest.fixture(scope="module")
def reference(model):
    result = model.fit(**packed(**TIGHT))
    assert result.converged
    return result


@pytest.fixture(scope="module")
def standard_errors(model):
    return model.fit(**packed(cov_type="observed", cross_products="exact", **ITERATIVE)).bse


@pytest.fixture(scope="module")
def plain(model):
    return model.fit(**packed(**(TIGHT | WAYS["plain local Newton"])))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_ends_at_the_same_point(way, model, reference, standard_errors, plain):
    result = plain if way == "plain local Newton" else model.fit(**packed(**(TIGHT | WAYS[way])))
    assert result.converged
    assert np.abs((result.params - reference.params) / standard_errors).max() < 1e-6
    assert result.scale == pytest.approx(reference.scale, rel=1e-6)
    assert result.llf == pytest.approx(reference.llf, rel=1e-12)
    assert result.trace["score"].iloc[-1] <= TIGHT["tol"]


def test_a_mapping_starts_there_by_name(model, reference):
    start = reference.params.drop("Intercept")[::-1].to_dict()
    result = model.fit(**packed(init=start, tol=1e-6, cov_type="none", **ITERATIVE))
    assert np.abs(result.params / reference.params - 1.0).max() < 1e-4
    cold = model.fit(**packed(tol=1e-6, cov_type="none", **ITERATIVE))
    first = [r.trace["log_likelihood"].iloc[0] for r in (result, cold)]
    assert first[0] > first[1]


def test_the_first_point_is_the_one_that_was_given(model, study):
    """The trace begins at the given coefficients, with every block at its own moments."""
    beta = [0.5, -0.3, 0.4, 0.0, -0.6, 0.05, 3.0]
    first = (
        model.fit(**packed(init=beta, tol=1e-6, cov_type="none", **ITERATIVE)).trace["log_likelihood"].iloc[0]
    )
    pooled = study.pooled()
    y, rows = pooled.y, pooled.seen_rows()
    mus, Sigmas = [X.mean(axis=0) for X in rows], [np.cov(X.T, bias=True) for X in rows]
    betas = np.split(np.array(beta), np.cumsum(pooled.sizes)[:-1])
    beta0 = y.mean() - sum(m @ b for m, b in zip(mus, betas, strict=True))
    theta = pooled.pack(beta0, y.var(), betas, mus, Sigmas)
    assert first == pytest.approx(pooled.loglike(theta) - pooled.saturated(), rel=1e-9)


def test_plain_steps_never_fall(model):
    for step in ("local-newton", "gradient"):
        trace = model.fit(
            **packed(step=step, acceleration=None, tol=1e-6, cov_type="none", **ITERATIVE)
        ).trace
        assert set(trace["move"]) == {"start", "plain"}
        assert trace["log_likelihood"].diff().min() > -1e-8


def test_acceleration_saves_rounds(reference, plain):
    assert len(reference.trace) < len(plain.trace) / 2
    assert "mixed" in set(reference.trace["move"])


def test_the_score_of_the_trace_is_the_norm_of_the_likelihood_s_score(model, study):
    """Per root of entities, in the complete-data information; at the first point, where it is large."""
    result = model.fit(**packed(maxiter=1, tol=np.inf, cov_type="none", **ITERATIVE))
    assert len(result.trace) == 1
    pooled = study.pooled()
    theta = study.theta(model, result)
    _, s2, betas, mus, Sigmas = pooled.unpack(theta)
    n, total = len(pooled.y), 0.0
    assert all((b == 0.0).all() for b in betas)
    score = pooled.unpack(pooled.score(theta))
    beta0_score, s2_score, beta_scores, mu_scores, Sigma_scores = score
    centered = [g - beta0_score * m for g, m in zip(beta_scores, mus, strict=True)]
    total += s2 * beta0_score**2 / n + s2_score**2 * 2 * s2**2 / n
    for g, h, G, S in zip(centered, mu_scores, Sigma_scores, Sigmas, strict=True):
        free = (G + np.diag(np.diag(G))) / 2.0
        total += s2 * g @ np.linalg.solve(S, g) / n + h @ S @ h / n + 2.0 * np.trace(free @ S @ free @ S) / n
    assert result.trace["score"].iloc[0] == pytest.approx(np.sqrt(total / n), rel=1e-8)
