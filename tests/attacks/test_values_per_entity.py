"""Row-level values in vertical fits of binary and count responses reveal rows and responses.

Every attack succeeds without protection; under the strict policy no row-level value is released.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from recovery import relative_error
from wiretap import tapped

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.audit.ledger_file import begin_ledger, open_ledger
from fedstat.federation.disclosure.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore")

BINARY, COUNT = sm.families.Binomial(), sm.families.Poisson()
WIDTHS = {"A": 3, "B": 3, "C": 2}
LINE = "per_entity = 40"


def study(missing=0.0, n=600, count=False):
    """A holder of the response, and institutions that lack entities; their last columns are binary."""
    rng = np.random.default_rng(5)
    eta, frames = np.full(n, -0.3), {}
    for site, p in WIDTHS.items():
        X = np.round(50 + 10 * rng.normal(size=(n, p)) @ np.linalg.cholesky(0.3 + 0.7 * np.eye(p)).T, 1)
        X[:, -1] = rng.random(n) < 0.4
        eta = eta + ((X - X.mean(0)) / X.std(0)) @ rng.choice([-1.0, 0.7, 1.2], size=p) * 0.4
        here = rng.random(n) >= missing
        frames[site] = pd.DataFrame(X, columns=[f"{site}{i}" for i in range(p)]).assign(k=np.arange(n))[here]
    y = rng.poisson(np.exp(0.3 * eta)) if count else rng.random(n) < 1 / (1 + np.exp(-eta))
    return {"Holder": pd.DataFrame({"k": np.arange(n), "y": y.astype(float)}), **frames}


def model_of(kind, frames, policy, family=BINARY):
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    published = {"between": "independent"} if kind == "VFEMGLM" else {}
    return getattr(fs, kind).from_formula("y ~ .", partition, family=family, **published)


def listened(kind, frames, family=BINARY, **fit):
    model = model_of(kind, frames, "open", family)
    with tapped(model) as wire:
        result = model.fit(**fit)
    return wire, result


# ---- rows --------------------------------------------------------------------------------------------


def predictors_of_vfem(wire, frames):
    """Masked sums (n, T) of all rounds, less the intercept, and who has which entity."""
    own = np.column_stack([np.isin(np.arange(600), frames[c].k) for c in WIDTHS])
    E = np.array(wire.handed_to("Holder", "glm_evaluate", "predictor")).T
    H = E - E[~own.any(axis=1)][:1]
    return H[:, np.ptp(H, axis=0) > 0], own


def unmasked(H, own):
    """Predictors of every client, where two or more have an entity, from those where one alone does."""
    V = [
        np.linalg.svd(H[own[:, j] & (own.sum(axis=1) == 1)], full_matrices=False)[2][:p]
        for j, p in enumerate(WIDTHS.values())
    ]
    parts = {}
    for pattern in np.unique(own, axis=0):
        here, there = (own == pattern).all(axis=1), np.flatnonzero(pattern)
        if len(there) > 1:
            u = np.linalg.lstsq(np.vstack([V[j] for j in there]).T, H[here].T, rcond=1e-13)[0].T
            for j in there:
                parts.setdefault(j, []).append((np.flatnonzero(here), u[:, : len(V[j])] @ V[j]))
                u = u[:, len(V[j]) :]
    return parts


def test_masks_of_iterations_are_undone():
    frames = study(missing=0.4)
    wire, result = listened("VFEMGLM", frames, cov_type="none")
    H, own = predictors_of_vfem(wire, frames)
    for j, found in unmasked(H, own).items():
        frame = frames["ABC"[j]].set_index("k")
        for rows, part in found:
            X = np.column_stack([np.ones(len(rows)), frame.loc[rows]])
            rest = part[:, -1] - X @ np.linalg.lstsq(X, part[:, -1], rcond=None)[0]
            assert np.linalg.norm(rest) < 1e-5 * np.linalg.norm(part[:, -1])
    notes = " ".join(result.notes)
    assert "enough for the rows of ALL sites, masked or not" in notes and "under pairwise" not in notes


def rows_of_vglm(wire, frames):
    """Standardized columns from linear predictors at known coefficients, and the truth."""
    X = np.column_stack([frames[c].drop(columns="k") for c in WIDTHS])
    B = np.hstack([wire.handed_to(c, "linear_predictor", "beta") for c in WIDTHS])
    H = np.array(wire.handed_to("Holder", "respond", "eta"))
    Z = (X - X.mean(axis=0)) / X.std(axis=0)
    return np.linalg.lstsq(B, H - H.mean(axis=1, keepdims=True), rcond=1e-13)[0].T, Z


def test_rows_follow_from_linear_predictors_at_known_coefficients():
    frames = study()
    wire, result = listened("VerticalGLM", frames, path="exact")
    guess, Z = rows_of_vglm(wire, frames)
    assert relative_error(guess, Z) < 1e-4
    assert "enough for the rows of ALL sites, masked or not" in " ".join(result.notes)


# ---- responses ---------------------------------------------------------------------------------------


def correlations(wire, site, step, name, y):
    """Number of messages with row-level values to a site, for the response; constants do not count."""
    reported = [z for z in wire.handed_to(site, step, name) if z.shape == y.shape]
    return np.array([abs(np.corrcoef(z, y)[0, 1]) if np.ptp(z) > 1e-9 else 0.0 for z in reported])


@pytest.mark.parametrize(
    ("family", "fit"),
    [(COUNT, {}), (BINARY, {"select": "cv", "folds": 3, "seed": 1})],
    ids=["count-bic", "binary-folds"],
)
def test_residuals_of_a_selecting_fit_stay_with_the_holder(family, fit):
    frames = study(count=family is COUNT)
    wire, result = listened("VerticalGLM", frames, family, **fit)
    y = frames["Holder"].y.to_numpy()
    best = np.corrcoef(result.predict().to_numpy(), y)[0, 1]
    for site in WIDTHS:
        found = correlations(wire, site, "sum_scores", "residual", y)
        assert found[0] == 0.0  # before, 1.0: the first message was the response less its mean
        assert found.max() < best + 0.1  # what the fit predicts, and no more
    said = [r for a, r in wire.passed if a.site == "Holder"]
    released = [v for r in said for v in r.arrays.values() if v.size >= 600 and v.dtype != np.uint8]
    assert not released
    notes = " ".join(result.notes)
    assert "residuals stayed with the response holder" in notes


def messages_of(wire, site, y):
    """Numbers per entity that an institution was handed, or has opened: (rows, columns)."""
    seen = wire.opened_by(site, len(y))
    return seen[:, np.ptp(seen, axis=0) > 1e-9]


@pytest.mark.parametrize("family", [BINARY, COUNT], ids=["binary", "count"])
def test_no_message_of_iterations_reveals_a_site_the_response(family):
    frames = study(missing=0.3, count=family is COUNT)
    wire, result = listened("VFEMGLM", frames, family, cov_type="none")
    y = frames["Holder"].set_index("k").y
    fitted = result.predict()
    for site in WIDTHS:
        at = np.sort(frames[site].k)
        own = y.reindex(at).to_numpy()
        seen = messages_of(wire, site, own)
        assert seen.shape[1] >= len(result._fit.trace)  # residuals less random numbers
        # Before, 1.0: the first message was the response less its mean.
        best = max(abs(np.corrcoef(column, own)[0, 1]) for column in seen.T)
        assert best < 0.25 < abs(np.corrcoef(fitted.reindex(at), own)[0, 1]) + 0.25
        assert not wire.handed_to(site, "glm_score", "z")
    released = {(a.step, name) for a, r in wire.passed for name, v in r.arrays.items() if v.shape == (600,)}
    # Sent to the coordinator, which runs on the same machine, and to no other site.
    assert {step for step, _ in released if step != "glm_move"} == {"glm_fitted"}
    notes = " ".join(result.notes)
    assert "Residuals stayed with the response holder" in notes and "bits) of" in notes


def test_curvatures_of_entities_that_a_site_alone_has_stay_with_the_holder():
    """At the estimate the site knows the linear predictor of such an entity; -L_mm gives the response."""
    frames = study(missing=0.5)
    wire, result = listened("VFEMGLM", frames)
    has = np.column_stack([np.isin(np.arange(600), frames[c].k) for c in WIDTHS])
    for j, site in enumerate(WIDTHS):
        (h,) = wire.handed_to(site, "glm_information", "h")
        alone = has[has[:, j]].sum(axis=1) == 1
        assert alone.sum() > 50 and not h[alone].any()  # before: h and the mixed derivative of every entity
        assert not wire.handed_to(site, "glm_information", "cross")
    assert "cov_type='none' sends no curvature" in " ".join(result.notes)


@pytest.mark.parametrize("fit", [{"exchange": "admm", "lam": 0.05}], ids=["admm"])
def test_where_residuals_are_sent_the_summary_says_so(fit):
    wire, result = listened("VerticalGLM", study(), **fit)
    y = study()["Holder"].y.to_numpy()
    assert correlations(wire, "A", "admm_move", "move", y).max() > 0.9
    assert "residuals and weights, which reveal the response" in " ".join(result.notes)


# ---- the policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", ["VFEMGLM", "VerticalGLM"])
def test_the_strict_policy_refuses_with_the_reason_and_the_line_that_would_allow_it(kind, masked):
    model = model_of(kind, study(missing=0.0), "strict")
    with (
        tapped(model) as wire,
        pytest.raises(PolicyError, match="determine the rows of all sites") as reported,
    ):
        model.fit(masked=masked)
    assert LINE in str(reported.value) and "policy.toml" in str(reported.value)
    assert not any(a.size >= 600 and a.dtype != np.uint8 for _, r in wire.passed for a in r.arrays.values())
    assert not any(site.site_ledger.refusals.total() for site in model.partition.sites.values())


@pytest.mark.parametrize("kind", ["VFEMGLM", "VerticalGLM"])
def test_with_that_line_the_fit_goes_through(kind, tmp_path):
    (tmp_path / "policy.toml").write_text(LINE + "\n")
    policy = Policy.from_toml(tmp_path / "policy.toml", Policy.strict())
    few = {"lam": 0.05} if kind == "VerticalGLM" else {"cov_type": "none"}
    assert model_of(kind, study(), policy).fit(**few).nobs == 600


def policy_of(tmp_path, line):
    (tmp_path / "policy.toml").write_text(line + "\n")
    return Policy.from_toml(tmp_path / "policy.toml", Policy.strict())


@pytest.mark.parametrize("kind", ["VFEMGLM", "VerticalGLM"])
def test_numbers_for_each_entity_are_capped_over_sessions(kind, tmp_path):
    """With fewer columns no row is determined: the rest of the row is orthogonal to the released numbers."""
    columns = sum(WIDTHS.values())
    model = model_of(kind, study(), policy_of(tmp_path, f"per_entity = {columns - 1}"))
    few = {"path": "exact"} if kind == "VerticalGLM" else {"cov_type": "none"}
    with (
        tapped(model) as wire,
        pytest.raises(PolicyError, match="numbers for each entity over") as reported,
    ):
        model.fit(**few)
    assert "per_entity = " in str(reported.value) and "371 bits" in str(reported.value)
    site = model.partition.sites["A"]
    assert site.site_ledger.vectors == columns - 1 and not site.site_ledger.refusals.total()
    name, step = ("predictor", "glm_evaluate") if kind == "VFEMGLM" else ("eta", None)
    reported_of = [
        a.arrays[name]
        for a, _ in wire.passed
        if a.site == "Holder" and name in a.arrays and step in (None, a.step)
    ]
    H = np.array(reported_of).T
    X = np.column_stack([study()[c].drop(columns="k") for c in WIDTHS])
    Z = (X - X.mean(axis=0)) / X.std(axis=0)
    best = H @ np.linalg.lstsq(H, Z, rcond=1e-10)[0]  # whatever the coefficients are
    error = np.linalg.norm(best - Z, axis=0) / np.linalg.norm(Z, axis=0)
    assert np.median(error) > 0.4
    # Another session of the same partition, and another family, count on.
    other = "VerticalGLM" if kind == "VFEMGLM" else "VFEMGLM"
    again = getattr(fs, other).from_formula("y ~ .", model.partition, family=BINARY)
    with pytest.raises(PolicyError, match="has released"):
        again.fit()
    assert site.site_ledger.vectors == columns - 1


def test_the_summary_counts_what_left_in_all_analyses():
    partition = fs.ClientPartition.from_frames(study(), on="k")
    notes = []
    for _ in range(2):
        model = fs.VFEMGLM.from_formula("y ~ .", partition, family=BINARY, between="independent")
        notes.append(" ".join(model.fit(cov_type="none").notes))
    assert "in other analyses" not in notes[0] and "in other analyses" in notes[1]


def test_a_restart_does_not_forget_what_left(tmp_path):
    partition = fs.ClientPartition.from_frames(study(), on="k")
    site = partition.sites["A"]
    identity = site.trust.identity
    begin_ledger(tmp_path, identity)
    site_ledger = open_ledger(tmp_path, "A", identity)
    site._data = replace(site._data, site_ledger=site_ledger)
    site.refusals.site_ledger = site_ledger
    model = fs.VFEMGLM.from_formula("y ~ .", partition, family=BINARY, between="independent")
    model.fit(cov_type="none", masked=False)
    site_ledger.store.close()
    assert site_ledger.vectors > 5
    assert open_ledger(tmp_path, "A", identity).vectors == site_ledger.vectors


@pytest.mark.parametrize("columns", [False, True], ids=["holder alone", "holder with columns"])
@pytest.mark.parametrize(
    "fit",
    [
        {"n_lambdas": 8},
        {"select": "cv", "folds": 3, "seed": 1, "n_lambdas": 5},
        {"exchange": "admm", "lam": 0.05},
    ],
    ids=["path", "folds", "admm"],
)
def test_the_declared_order_is_that_of_every_fit(columns, fit):
    frames = study()
    if columns:
        frames["A"] = frames["A"].merge(frames.pop("Holder"), on="k")
    assert model_of("VerticalGLM", frames, Policy(order="declared")).fit(**fit).nobs == 600


@pytest.mark.parametrize("policy", ["open", "strict"])
def test_every_site_can_compute_the_offset(policy):
    frames = study(count=True)
    offset = np.round(np.random.default_rng(2).uniform(-1.0, 1.0, 600), 2)
    frames["Holder"] = frames["Holder"].assign(t=offset)
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    model = fs.VerticalGLM.from_formula("y ~ .", partition, family=COUNT, offset="t")
    with tapped(model) as wire:
        if policy == "strict":
            with pytest.raises(PolicyError, match=r"per entity|for each entity|rows of all sites"):
                model.fit(lam=0.05)
        else:
            assert model.fit(lam=0.05).nobs == 600
    assert bool(wire.sent_by("Holder", "open_offset", "offset")) == (policy == "open")
    if policy == "open":
        # Residuals at the intercept alone are the mean less the fitted mean, whose logarithm has the offset.
        fitted = frames["Holder"]["y"].mean() - wire.handed_to("C", "sum_scores", "residual")[0]
        found = np.log(fitted)
        np.testing.assert_allclose(found - found.mean(), offset - offset.mean(), atol=1e-8)
