"""The iteration with masks ends where it ends without them, and no party sees one site's part."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import Study, packed, simulate

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.crypto.masks import unmask_sums
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import unpack_reply
from fedstat.models.vfem.base_model import make_layout
from fedstat.models.vfem.diagnostics import count_exposed
from fedstat.models.vfem.iteration import steps

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

ITERATIVE = {"exchange": "iterative"}
PLAIN = {"exchange": "iterative", "masked": False}
HIDDEN = {"linear_predictor", "log_likelihood", "score2", "products", "recentering"}


def close(one, other):
    np.testing.assert_allclose(one.params, other.params, rtol=1e-9)
    assert one.llf == pytest.approx(other.llf, rel=1e-9)
    assert len(one.trace) == len(other.trace)
    if one.covariance is not None:
        np.testing.assert_allclose(one.bse, other.bse, rtol=1e-9)


def notes(result):
    return " ".join(result.notes)


@pytest.fixture(scope="module")
def study():
    return simulate(seed=4, n=400, holder="Registry")


@pytest.mark.parametrize(
    ("holder", "coordinator"),
    [("Bank", None), ("Bank", "Court"), ("Registry", None), ("Registry", "apart")],
)
def test_the_result_is_that_without_masks(holder, coordinator):
    model = simulate(seed=4, n=400, holder=holder).model(coordinator=coordinator)
    close(
        model.fit(**packed(**ITERATIVE, cov_type="expected")),
        model.fit(**packed(**PLAIN, cov_type="expected")),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"method": "cc"},
        {"method": "impute"},
        {"init": "cc"},
        {"init": "impute", "method": "cc"},
        {"step": "gradient", "acceleration": None, "maxiter": 40},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
def test_so_are_baselines_first_points_and_steps(study, options):
    model, options = study.model(), {"cov_type": "none"} | options
    close(model.fit(**packed(**ITERATIVE, **options)), model.fit(**packed(**PLAIN, **options)))


def test_scores_that_nearly_vanish_are_not_lost_in_fixed_point(study):
    """At a relative score of 1e-12 its square is 4e-22, below the last bit of two words."""
    model, tight = study.model(), {"tol": 1e-12, "cov_type": "none"}
    masked, plain = model.fit(**packed(**ITERATIVE, **tight)), model.fit(**packed(**PLAIN, **tight))
    close(masked, plain)
    np.testing.assert_allclose(masked.trace["score"], plain.trace["score"], rtol=1e-2)
    assert masked.converged


def test_supplemented_em_is_masked_too(study):
    model = study.model()
    masked = model.fit(**packed(**ITERATIVE, cov_type="sem"))
    plain = model.fit(**packed(**PLAIN, cov_type="sem", cross_products="exact"))
    np.testing.assert_allclose(masked.bse, plain.bse, rtol=1e-7)
    frame = masked.ledger.to_frame()
    assert frame.loc[
        (frame["step"] == "sem_predictor") & (frame["array"] == "linear_predictor"), "masked"
    ].all()


def test_every_part_of_a_sum_is_entered_as_masked(study):
    frame = study.model(coordinator="apart").fit(**packed(**ITERATIVE)).ledger.to_frame()
    sent = frame[(frame["sender"] != "coordinator") & frame["array"].isin(HIDDEN)]
    assert set(sent["array"]) == HIDDEN
    assert sent["masked"].all()
    assert not frame.loc[~frame.index.isin(sent.index), "masked"].any()
    predictors = sent[sent["array"] == "linear_predictor"]
    assert set(predictors["shape"]) == {(400,)}
    assert set(predictors["bytes"]) == {16 * 400}


def test_without_masks_nothing_is_entered_as_masked(study):
    frame = study.model().fit(**packed(**PLAIN, cov_type="none")).ledger.to_frame()
    assert not frame["masked"].any()
    counts = study.table[["bank0", "court0", "tax0"]].notna().sum()
    shapes = frame.loc[frame["array"] == "linear_predictor", "shape"]
    assert set(shapes) == {(n,) for n in counts}


def test_a_part_looks_random_and_the_sum_is_the_linear_predictor(study):
    model, parts = study.model(), {}
    for name, door in list(model.engine._answer_functions.items()):

        def listen(request, name=name, door=door):
            reply = door(request)
            arrays = unpack_reply(reply).arrays
            if "log_likelihood" in arrays:
                parts[name] = arrays["linear_predictor"]
            return reply

        model.engine._answer_functions[name] = listen
    result = model.fit(**packed(**ITERATIVE, cov_type="none"))
    words = np.concatenate([part.ravel().view(np.uint8) for part in parts.values()])
    counts = np.bincount(words, minlength=256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 400
    total = unmask_sums({"sum": list(parts.values())})["sum"]
    expected = np.zeros(400)
    for names in study.columns.values():
        block, has = study.table[names], study.table[names[0]].notna()
        expected[has] += (block[has] - block[has].mean()) @ result.params[names]
    np.testing.assert_allclose(total, expected, atol=1e-6)


def fit_with(policies, study, **options):
    partition = study.partition(policies=policies)
    return fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(
        cov_type="none", **options
    )


def test_an_owner_who_wants_masks_gets_them(study):
    policies = dict.fromkeys(study.columns, Policy(masked_only=True))
    assert fit_with(policies, study, **packed(**ITERATIVE)).converged
    with pytest.raises(PolicyError, match=r"masked only.*masked=True"):
        fit_with(policies, study, **packed(**PLAIN))


def test_an_owner_who_refuses_values_per_entity_refuses_their_sums_too(study):
    policies = dict.fromkeys(study.columns, Policy(refused_kinds=frozenset({"per entity"})))
    for options in (ITERATIVE, PLAIN):
        with pytest.raises(PolicyError, match=r"refused kinds.*'linear_predictor' of step 'start'"):
            fit_with(policies, study, **packed(**options))


def two_clients():
    study = simulate(seed=4, n=300, holder="Registry")
    columns = {site: study.columns[site] for site in ("Bank", "Tax")}
    return Study(study.table[["y", *columns["Bank"], *columns["Tax"]]], columns, "Registry")


def test_two_sites_are_warned_that_masks_do_not_hide_them_from_each_other():
    study = two_clients()
    result = fit_with(None, study, **packed(**ITERATIVE))
    assert "hides neither from the other" in notes(result)
    policies = dict.fromkeys(study.columns, Policy(two_sites="refuse"))
    with pytest.raises(PolicyError, match="two sites"):
        fit_with(policies, study, **packed(**ITERATIVE))


def test_one_site_has_nothing_to_add_up():
    study = simulate(seed=4, n=300, holder="Registry")
    alone = Study(study.table[["y", *study.columns["Tax"]]], {"Tax": study.columns["Tax"]}, "Registry")
    result = fit_with(None, alone, **packed(**ITERATIVE))
    assert result.converged
    assert not result.ledger.to_frame()["masked"].any()
    assert "nothing is added up" in notes(result)


def expose(seen, receivers):
    """Sites that are alone at an entity, except for a receiver: counted entity by entity."""
    alone = dict.fromkeys(seen, 0)
    for i in range(len(next(iter(seen.values())))):
        here = {site for site, has in seen.items() if has[i]}
        for site in here:
            alone[site] += any(here - {r} == {site} for r in receivers)
    return alone


@pytest.mark.parametrize("holder", ["Bank", "Registry"])
@pytest.mark.parametrize("coordinator", [None, "apart", "Court"])
@pytest.mark.parametrize("method", ["vfem", "impute", "cc"])
def test_entities_at_which_the_sum_is_ones_own_part_are_counted(holder, coordinator, method):
    study = simulate(seed=4, n=300, holder=holder)
    model = study.model(coordinator=coordinator)
    layout = make_layout(model.design, method)
    at = model._new_ledger().at
    seen = {site: study.table[names[0]].notna().to_numpy() for site, names in study.columns.items()}
    if method == "cc":
        complete = np.logical_and.reduce(list(seen.values()))
        seen = {site: has[complete] for site, has in seen.items()}
    expected = expose(seen, {holder, at})
    assert count_exposed(layout, at) == expected
    if method == "vfem":
        text = notes(model.fit(**packed(**ITERATIVE, cov_type="none")))
        assert all(f"{n} of {seen[site].sum()} at {site}" in text for site, n in expected.items() if n)
        assert ("response of every entity" in text) == (at != holder)


def test_a_site_that_finds_a_point_inadmissible_is_not_left_behind(monkeypatch, study):
    """The other sites' messages for that point have no sum, and all continue from the same points."""
    model = study.model()
    expected = model.fit(**packed(**ITERATIVE, cov_type="none")).params
    calls, factorize = [], steps.cho_factor

    def fail_at_times(Sigma, lower):
        calls.append(len(Sigma))
        if len(calls) in (3 * 5 + 2, 3 * 9 + 3):
            raise np.linalg.LinAlgError
        return factorize(Sigma, lower=lower)

    monkeypatch.setattr(steps, "cho_factor", fail_at_times)
    result = model.fit(**packed(**ITERATIVE, cov_type="none"))
    assert len(calls) > 3 * 10
    assert result.converged
    np.testing.assert_allclose(result.params, expected, rtol=1e-6)
