"""Where a fit could go wrong: it shortens its steps, warns, or says what it needs."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from oracle import ITERATIVE, Study, packed, simulate

import fedstat as fs
from fedstat.errors import (
    ConvergenceWarning,
    EstimationError,
    ModelError,
    NotAvailableError,
    PolicyError,
)
from fedstat.federation.disclosure.policy import Policy
from fedstat.models.vfem.iteration import protocol, steps

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


def correlated(sites=4, noise=0.3, n=400):
    """Complete blocks that share one factor: a joint Newton step is needed, a local one overshoots."""
    rng = np.random.default_rng(0)
    factor = rng.normal(size=n)
    columns = {f"Bank {k}": [f"x{k}"] for k in range(sites)}
    table = pd.DataFrame({f"x{k}": factor + noise * rng.normal(size=n) for k in range(sites)})
    table["y"] = 0.5 * table.sum(axis=1) + rng.normal(size=n)
    return Study(table, columns, "Registry")


def explained(seed, n=400, noise=0.1):
    """Blocks that explain nearly all of the response, and are often missing."""
    study = simulate(seed=seed, n=n, holder="Registry", missing="none")
    X, beta = study.table[study.covariates], np.array([0.5, -0.3, 0.4, 0.0, -0.6, 0.05, 3.0])
    mean = 1.0 + X @ beta
    table = study.table.assign(y=mean + noise * (study.table["y"] - mean))
    rng = np.random.default_rng(seed)
    for site, share in zip(study.columns, (0.5, 0.7, 0.6), strict=True):
        table.loc[rng.random(n) < share, study.columns[site]] = np.nan
    return Study(table, study.columns, "Registry")


def agrees_with_least_squares(result, study):
    ols = sm.OLS(study.table["y"], sm.add_constant(study.table[study.covariates])).fit()
    np.testing.assert_allclose(result.params, ols.params, rtol=1e-5)


@pytest.mark.parametrize(
    ("clients", "options"),
    [
        (4, {}),
        (4, {"step": "gradient"}),
        (4, {"acceleration": None}),
        (10, {}),
        pytest.param(10, {"acceleration": None}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_strong_correlation_between_sites_shortens_the_steps(clients, options):
    study = correlated(clients)
    result = study.model().fit(**packed(cov_type="none", maxiter=2_000, **(ITERATIVE | options)))
    assert result.converged
    assert "shortened" in set(result.trace["move"])
    agrees_with_least_squares(result, study)


@pytest.mark.parametrize("clients", [4, 10])
def test_shortened_steps_stay_short(clients):
    """A step that was too long once is too long again: growing back would cost a rejection each time."""
    assert len(correlated(clients).model().fit(**packed(cov_type="none", **ITERATIVE)).trace) < 60


def test_without_shortening_the_steps_would_diverge(monkeypatch):
    def accept(ascent):
        ascent.accepted = len(ascent.gram) - 1
        ascent.weights = np.eye(len(ascent.gram))[-1]
        return "go"

    monkeypatch.setattr(protocol.EMIteration, "choose", accept)
    with pytest.warns(ConvergenceWarning):
        result = (
            correlated().model().fit(**packed(acceleration=None, cov_type="none", maxiter=30, **ITERATIVE))
        )
    assert result.trace["score"].iloc[-1] > 1.0


@pytest.mark.parametrize(("noise", "seed"), [(0.3, 1), (0.1, 1), (0.1, 3), (0.01, 3)])
def test_blocks_that_explain_nearly_everything_converge(noise, seed):
    """Mixtures with large weights of both signs must not cost the likelihood its last digits."""
    study = explained(seed, noise=noise)
    model = study.model()
    result = model.fit(**packed(cov_type="none", **ITERATIVE))
    assert result.converged
    pooled, theta = study.pooled(), study.theta(model, result)
    assert pooled.relative_score(theta, -pooled.hessian(theta)) < 1e-4


def test_any_memory_converges():
    model = simulate(seed=1, n=400, holder="Registry").model()
    usual = model.fit(**packed(cov_type="none", **ITERATIVE)).params
    for memory in (2, 20, 40):
        result = model.fit(**packed(memory=memory, cov_type="none", **ITERATIVE))
        assert result.converged, memory
        np.testing.assert_allclose(result.params, usual, rtol=1e-5)


def test_a_site_that_finds_a_point_inadmissible_is_not_left_behind(monkeypatch):
    """One client refuses a mixture that the others have evaluated; all go on from the same points."""
    model = simulate(seed=1, n=400, holder="Registry").model()
    expected = model.fit(**packed(cov_type="none", **ITERATIVE)).params
    calls, factorize = [], steps.cho_factor

    def fail_at_times(Sigma, lower):
        calls.append(len(Sigma))
        if len(calls) in (3 * 5 + 2, 3 * 9 + 3):  # the second of three clients, and later the third
            raise np.linalg.LinAlgError
        return factorize(Sigma, lower=lower)

    monkeypatch.setattr(steps, "cho_factor", fail_at_times)
    result = model.fit(**packed(cov_type="none", **ITERATIVE))
    assert len(calls) > 3 * 10
    assert result.converged
    np.testing.assert_allclose(result.params, expected, rtol=1e-6)


def test_a_likelihood_without_a_maximum_is_explained():
    """Fewer complete entities than coefficients, which reproduce their response without error."""
    study = explained(2, n=60, noise=0.01)
    with pytest.raises(EstimationError, match=r"variance goes to zero.*\d+ of the 60 entities are complete"):
        study.model().fit(**packed(cov_type="none", **ITERATIVE))


def test_stopping_early_warns_and_is_seen_everywhere():
    model = simulate(n=300).model()
    with pytest.warns(ConvergenceWarning, match=r"did not converge.*3 iterations.*raise maxiter"):
        result = model.fit(**packed(maxiter=3, **ITERATIVE))
    assert not result.converged
    assert len(result.trace) == 3
    first = next(line for line in result.summary().as_text().splitlines() if line.strip(" ="))
    assert "NOT CONVERGED" in first
    assert "NOT CONVERGED" in repr(result)
    assert "NOT CONVERGED" in result.summary().as_html()


def test_a_fit_that_converged_says_so_and_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = simulate(n=300).model().fit()
    assert result.converged
    assert "NOT CONVERGED" not in result.summary().as_text()


def test_progress_goes_to_standard_error(capsys):
    result = simulate(n=300).model().fit(**packed(progress=True, cov_type="none", **ITERATIVE))
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == len(result.trace)
    assert "log-likelihood" in err and "s left" in err


def test_too_few_complete_entities_are_counted():
    study = simulate(seed=0, n=300, holder="Registry")
    complete = study.table.dropna().index
    study.table.loc[complete[5:], "bank0"] = np.nan
    study.table.loc[complete[5:], "bank1"] = np.nan
    expected = r"method='cc': 5 entities are complete at Bank, Court, Tax, but 8 coefficients need more"
    model = study.model()
    with pytest.raises(EstimationError, match=expected):
        model.fit(**packed(method="cc", **ITERATIVE))
    with pytest.raises(EstimationError, match=expected):
        model.fit(**packed(init="cc", **ITERATIVE))
    assert model.fit(**packed(cov_type="none", **ITERATIVE)).converged


def test_a_column_that_is_constant_among_complete_entities_is_named():
    study = simulate(seed=0, n=300, holder="Registry")
    study.table["court3"] = (study.table["bank0"].isna() & study.table["court0"].notna()).astype(float)
    study.table.loc[study.table["court0"].isna(), "court3"] = np.nan
    columns = study.columns | {"Court": [*study.columns["Court"], "court3"]}
    model = Study(study.table, columns, study.holder).model()
    assert model.fit(**packed(cov_type="none", **ITERATIVE)).converged
    with pytest.raises(EstimationError, match=r"Court: constant among the \d+ entities of this fit: court3"):
        model.fit(**packed(method="cc", **ITERATIVE))


def test_single_needs_columns_at_the_response_holder():
    with pytest.raises(ModelError, match="columns of 'Registry' alone, but that site holds none"):
        simulate(n=300, holder="Registry").model().fit(**packed(method="single", **ITERATIVE))


@pytest.mark.parametrize("right", [". - 1", "0 + bank0"])
def test_a_formula_without_intercept_is_refused(right):
    with pytest.raises(ModelError, match="leaves out the intercept"):
        simulate(n=300).model(f"y ~ {right}")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"method": "em"}, r"method: expected one of 'vfem', 'weighted', 'cc', .*received 'em'"),
        ({"cov_type": "HC0"}, "cov_type: expected one of 'observed'.*received 'HC0'"),
        ({"cov_type": None}, "cov_type: .*received None"),
        ({"cross_products": "plain"}, "cross_products: expected one of 'secure', 'sketch', 'exact'"),
        ({"sketch": "count"}, "sketch: expected one of 'structured', 'gaussian'"),
        ({"step": "newton"}, "step: expected one of 'gradient', 'local-newton'"),
        ({"acceleration": "aitken"}, "acceleration: expected one of 'anderson', None"),
        ({"init": "ols"}, "init: expected one of 'zero', 'cc', 'impute'"),
        ({"init": [1.0, 2.0]}, r"init: expected 7 finite coefficients .*shape \(2,\)"),
        ({"init": [np.nan] * 7}, "init: expected 7 finite coefficients"),
        ({"init": {"bank0": 1.0}}, "init: no value for bank1, court0"),
        ({"maxiter": 0}, "maxiter: expected a whole number, 1 or more, received 0"),
        ({"memory": 1}, "memory: expected a whole number, 2 or more, received 1"),
        ({"sketch_size": 0}, "sketch_size: expected a whole number, 1 or more"),
        ({"tol": -1e-8}, "tol: expected a positive number"),
        ({"tol": float("nan")}, "tol: expected a positive number, received nan"),
    ],
)
def test_arguments_without_a_meaning_are_refused(options, complaint):
    model = simulate(n=300).model()
    with pytest.raises(ModelError, match=complaint):
        model.fit(**packed(**(ITERATIVE | options)))


@pytest.mark.parametrize(
    "options",
    [
        {"maxiter": 2.5},
        {"maxiter": "many"},
        {"memory": 1.5},
        {"sketch_size": 100.5},
        {"tol": "small"},
        {"learning_rate": -0.1, "step": "gradient"},
        {"learning_rate": float("nan"), "step": "gradient"},
        {"learning_rate": 0.0, "step": "gradient"},
    ],
)
def test_numbers_of_the_wrong_sort_are_refused(options):
    model = simulate(n=300).model()
    with pytest.raises(ModelError, match=f"{next(iter(options))}: expected"):
        model.fit(**packed(**(ITERATIVE | options)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"missing": "ignore"}, 'missing: expected "drop" or "raise"'),
        ({"coordinator": "Notary"}, "coordinator: expected 'apart' or one of Bank, Court, Tax"),
    ],
)
def test_arguments_of_the_model_are_refused(options, complaint):
    with pytest.raises(ModelError, match=complaint):
        simulate(n=300).model(**options)


def test_a_horizontal_partition_is_refused():
    table = simulate(n=300, missing="none").table.assign(hospital=["a", "b", "c"] * 100)
    partition = fs.ClientPartition.from_frame(table, by="hospital")
    with pytest.raises(ModelError, match="needs a vertical partition"):
        fs.VFEMRegression.from_formula("y ~ .", partition, between="independent")


def test_what_is_not_a_partition_is_refused():
    with pytest.raises(ModelError, match=r"expected a fedstat.ClientPartition, received pandas DataFrame"):
        fs.VFEMRegression.from_formula("y ~ .", simulate(n=300).table, between="independent")


def test_a_fit_without_covariance_says_why():
    result = simulate(n=300).model().fit(**packed(cov_type="none", **ITERATIVE))
    for statement in ("bse", "pvalues", "tvalues"):
        with pytest.raises(NotAvailableError, match="cov_type='none'"):
            getattr(result, statement)
    assert "cov_type='none'" in " ".join(result.summary().as_text().split())


def test_residuals_stay_with_the_response_holder():
    result = simulate(n=300).model(coordinator="apart").fit(**packed(cov_type="none", **ITERATIVE))
    for what in ("resid", "fittedvalues"):
        with pytest.raises(NotAvailableError, match="these row-level values stay with the response holder"):
            getattr(result, what)


def refusing(policies, **options):
    """A partition whose owners refuse, and what each site has released so far."""
    partition = simulate(n=300, holder="Registry").partition(policies=policies)
    return partition, lambda: {k: len(site.ledger.entries) for k, site in partition.sites.items()}


@pytest.mark.parametrize(
    ("policy", "options", "site", "rule", "array", "step"),
    [
        (
            {"refused_kinds": frozenset({"raw columns"})},
            {"cross_products": "exact"},
            "Bank",
            "refused kinds",
            "columns",
            "release_columns",
        ),
        (
            {"refused_kinds": frozenset({"sketch"})},
            {"cross_products": "sketch"},
            "Tax",
            "refused kinds",
            "sketch",
            "sketch",
        ),
        (
            {"refused_kinds": frozenset({"per entity"})},
            {},
            "Court",
            "refused kinds",
            "linear_predictor",
            "start",
        ),
        ({"min_count": 290}, {}, "Tax", "minimum count", "eigenvalues", "start"),
    ],
)
def test_a_refusal_names_site_rule_and_array_and_ends_all(policy, options, site, rule, array, step):
    partition, released = refusing({site: Policy(**policy)})
    model = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent")
    with pytest.raises(PolicyError, match=rf"{site}: .*{rule}.*'{array}' of step '{step}'"):
        model.fit(**packed(**(ITERATIVE | options)))
    site_ledger = partition.sites[site].ledger.entries
    assert all(entry.step != step for entry in site_ledger)
    assert not {entry.kind for entry in site_ledger} & policy.get("refused_kinds", frozenset())
    sites = tuple(partition.sites)
    after = sites[sites.index(site) + 1 :]
    assert all(entry.step != step for k in after for entry in partition.sites[k].ledger.entries)
    before = released()
    with pytest.raises(PolicyError):
        model.fit(**packed(**(ITERATIVE | options)))
    assert released()[site] >= before[site]


def test_a_refused_family_is_reported_before_a_row_is_read():
    partition, released = refusing({"Court": Policy(families=frozenset({"glm"}))})
    with pytest.raises(PolicyError, match=r"Court: its policy \(families\) allows \['glm'\], not 'design'"):
        fs.VFEMRegression.from_formula("y ~ .", partition, between="independent")
    assert released()["Court"] == 0
    partition, released = refusing({"Court": Policy(families=frozenset({"design"}))})
    model = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent")
    before = released()["Court"]
    with pytest.raises(PolicyError, match="not 'vfem'"):
        model.fit(**packed(**ITERATIVE))
    assert released()["Court"] == before


def test_a_refused_kind_that_is_not_requested_does_not_matter():
    policy = Policy(refused_kinds=frozenset({"raw columns", "sketch"}))
    partition, _ = refusing(dict.fromkeys(("Bank", "Court", "Tax"), policy))
    result = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(
        **packed(cov_type="expected", **ITERATIVE)
    )
    assert result.converged
