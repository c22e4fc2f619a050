"""Releases and refusals of a site in a fit with a binary response."""

import numpy as np
import pytest
import statsmodels.api as sm
from glm_oracle import glm_study

import fedstat as fs
from fedstat.errors import EstimationError, MessageError, ModelError, PolicyError
from fedstat.federation.crypto.masks import unmask_sums
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.running_sums import RunningSums

GLM_STEPS = [
    "glm_start_response",
    "glm_evaluate",
    "glm_residuals",
    "glm_curvature",
    "glm_start",
    "glm_score",
    "glm_move",
    "glm_estimates",
    "deal_sums",
    "open_columns",
    "take_columns",
]
BINOMIAL = sm.families.Binomial()
HIDDEN = {"linear_predictor", "log_likelihood", "sy", "yhy"}


def make(study, **options):
    coordinator = options.pop("coordinator", None)
    return fs.VFEMGLM.from_formula(
        "y ~ .", study.partition(**options), family=BINOMIAL, between="independent", coordinator=coordinator
    )


@pytest.fixture(scope="module")
def study():
    return glm_study(holder="Registry")


def sent(result):
    """Releases of the sites in the fit: rows of the ledger."""
    frame = result.ledger.to_frame()
    return frame[(frame["sender"] != "coordinator") & frame["step"].isin(GLM_STEPS)]


def test_every_part_of_a_sum_is_masked_and_nothing_else(study):
    rows = sent(make(study).fit())
    assert set(rows.loc[rows["masked"], "array"]) == HIDDEN
    clear = rows[~rows["masked"]]
    assert set(clear["kind"]) <= {"control", "aggregate", "sealed"}
    assert set(clear.loc[clear["step"] == "glm_move", "array"]) == {"inside", "center", "spread", "change"}
    assert set(rows.loc[rows["array"] == "linear_predictor", "shape"]) == {(250,)}


def test_sites_are_sent_no_number_of_an_entity_unmasked(study):
    frame = make(study).fit().ledger.to_frame()
    reported = frame[(frame["sender"] == "coordinator") & (frame["step"] == "glm_score")]
    assert set(reported["array"]) == {"shown", "h", "missing"}
    assert set(reported["kind"]) == {"sealed", "aggregate"}
    at_end = frame[(frame["sender"] == "coordinator") & (frame["step"] == "glm_information")]
    assert set(at_end.loc[at_end["kind"] == "per entity", "array"]) == {"h"}


@pytest.mark.parametrize("missing", ["some", "none"])
def test_sums_under_seal_give_what_residuals_unmasked_give(missing, monkeypatch):
    """Without a dealer, residuals and curvatures are sent; that path is the oracle of the other one."""
    study = glm_study(holder="Registry")
    if missing == "none":
        study = type(study)(study.table.dropna(), study.columns, study.holder)
    sealed = make(study).fit(tol=1e-10)

    def nobody(self, sites):
        raise ModelError("no site can deal")

    monkeypatch.setattr(RunningSums, "dealers", nobody)
    openly = make(study).fit(tol=1e-10)
    assert {"z", "cross"} <= set(openly.ledger.to_frame()["array"])
    assert (abs(sealed.params - openly.params) < 1e-7 * openly.bse).all()
    np.testing.assert_allclose(sealed.bse, openly.bse, rtol=1e-7)
    assert "learns the response of each of its entities" in " ".join(openly.notes)


def test_a_coordinator_apart_finds_the_same(study):
    here, apart = make(study).fit(), make(study, coordinator="apart").fit()
    np.testing.assert_allclose(apart.params, here.params, rtol=1e-9)
    np.testing.assert_allclose(apart.bse, here.bse, rtol=1e-7)
    assert set(sent(apart)["sender"]) == {"Registry", *study.columns}


def test_a_masked_part_is_noise_and_the_sum_is_the_linear_predictor(study):
    model, heard = make(study), {}
    for name, site in model.partition.sites.items():

        def listen(request, name=name, answer=site.answer):
            reply = answer(request)
            arrays = unpack_reply(reply).arrays
            if "linear_predictor" in arrays:
                heard[name] = arrays["linear_predictor"]
            return reply

        model.engine._answer_functions[name] = listen
    result = model.fit(cov_type="none")
    total = unmask_sums({"linear_predictor": list(heard.values())})["linear_predictor"]
    X = study.table[study.covariates].fillna(0.0)
    slopes = result.params[study.covariates]
    seen = [model.partition.sites[k].states[model._session].look_at("vfem") for k in study.columns]
    centered = X @ slopes
    for kept, (client, names) in zip(seen, study.columns.items(), strict=True):
        centered[study.table[names[0]].notna()] -= kept.block.shift @ result._fit.beta[client]
    np.testing.assert_allclose(total, centered.loc[model.partition.entities], atol=1e-7)
    for part in heard.values():
        assert abs(np.corrcoef(part.reshape(-1)[:250].astype(float), total)[0, 1]) < 0.3


def test_owners_who_insist_on_masks(study):
    policy = Policy(masked_only=True)
    make(study, policy=policy).fit(cov_type="none")
    with pytest.raises(PolicyError, match="masked"):
        make(study, policy=policy).fit(cov_type="none", masked=False)
    with pytest.raises(PolicyError, match="raw columns"):
        refusing = Policy(refused_kinds=frozenset({"raw columns"}))
        make(study, policy=refusing).fit(cross_products="exact")


@pytest.fixture(scope="module")
def model(study):
    model = make(study)
    model.fit(cov_type="none", masked=False)
    return model


def client(model, name="Court"):
    return model.partition.sites[name].states[model._session].look_at("vfem")


def hostile(model, site, step, text="", **arrays):
    request = Request(site, "vfem", step, {k: np.asarray(a) for k, a in arrays.items()}, model._session, text)
    return model.partition.sites[site].answer(pack_request(request))


def test_lengths_are_checked_before_a_compiled_loop(model):
    n = client(model).block.n_seen
    with pytest.raises(MessageError, match=f"'z' has {n + 1} rows, expected {n}"):
        hostile(model, "Court", "glm_score", z=np.zeros(n + 1), h=1.0, missing=np.zeros(4))
    with pytest.raises(MessageError, match="'of_scores' has 1 rows"):
        kept = len(client(model).memory.steps)
        hostile(model, "Court", "glm_move", of_steps=np.zeros(kept), of_scores=np.zeros(1), length=1.0)
    with pytest.raises(MessageError, match="'cross' has 3 rows"):
        others, sums = np.ones((n, 3), dtype=bool), np.ones(4)
        hostile(model, "Court", "glm_information", h=np.ones(n), cross=np.ones(3), others=others, sums=sums)
    with pytest.raises(MessageError, match="'h' has negative values"):
        others, sums = np.ones((n, 3), dtype=bool), np.ones(4)
        hostile(model, "Court", "glm_information", h=-np.ones(n), cross=np.ones(n), others=others, sums=sums)


def test_the_response_holder_checks_patterns_and_families(model, study):
    n, keep = len(study.table), np.ones(len(study.table), dtype=bool)
    few = {"predictor": np.zeros(n), "center": np.zeros(1), "spread": np.zeros(1)}
    with pytest.raises(MessageError, match="variance for each missing pattern"):
        hostile(model, "Registry", "glm_evaluate", **few)
    with pytest.raises(MessageError, match="'predictor' has 1 rows"):
        hostile(model, "Registry", "glm_evaluate", **(few | {"predictor": np.zeros(1)}))
    with pytest.raises(MessageError, match="number of missing patterns"):
        hostile(model, "Registry", "glm_curvature_openly", patterns=1)
    with pytest.raises(MessageError, match="not JSON"):
        hostile(
            model, "Registry", "glm_start_response", "Binomial", keep=keep, code=np.zeros(n, dtype=np.int64)
        )
    with pytest.raises(MessageError, match="'code' has negative numbers"):
        family = model.distribution.to_json()
        hostile(model, "Registry", "glm_start_response", family, keep=keep, code=np.full(n, -1))


def test_steps_out_of_turn_are_reported(study):
    fresh = make(study)
    for site, step, arrays in (
        ("Court", "glm_score", {"z": np.zeros(1), "h": 0.0, "missing": np.zeros(4)}),
        ("Court", "glm_estimates", {}),
        ("Registry", "glm_fitted", {}),
    ):
        with pytest.raises(MessageError, match="was not started here"):
            hostile(fresh, site, step, **arrays)


def test_absurd_predictors_are_not_computed_with(model, study):
    n, patterns = len(study.table), 8
    zeros = {"predictor": np.zeros(n), "center": np.zeros(patterns), "spread": np.zeros(patterns)}
    for far in ({"predictor": np.full(n, 1e6)}, {"spread": np.full(patterns, 1e12)}):
        reply = unpack_reply(hostile(model, "Registry", "glm_evaluate", **(zeros | far)))
        assert list(reply.arrays) == ["inside"]
        assert not reply.arrays["inside"]
    assert unpack_reply(hostile(model, "Registry", "glm_evaluate", **zeros)).arrays["inside"]


def test_few_entities_behind_a_block_are_refused(study):
    table = study.table.copy()
    table.loc[table.index[60:], study.columns["Tax"]] = np.nan
    rare = type(study)(table, study.columns, study.holder)
    with pytest.raises(PolicyError, match="minimum count"):
        make(rare, policy=Policy(min_count=50)).fit()


def test_too_few_complete_entities_for_the_baseline(study):
    few = type(study)(study.table.iloc[:20], study.columns, study.holder)
    with pytest.raises(EstimationError, match="are complete"):
        make(few).fit(method="cc")


@pytest.mark.parametrize("filled", [False, True])
def test_rows_that_were_filled_in_count_as_no_entities(study, filled):
    model = make(study)
    site = model.partition.sites["Court"]
    keep = np.zeros(int(study.table["court0"].notna().sum()), dtype=bool)
    keep[:4] = True
    arrays = {"keep": keep, "rows": np.arange(4), "n": np.array(250)}
    arrays |= {"filled": np.array(filled), "memory": np.array(3)}
    site.answer(pack_request(Request("Court", "vfem", "glm_start", arrays, model._session)))
    with pytest.raises(PolicyError, match=r"minimum count.* there are 4"):
        site.answer(pack_request(Request("Court", "vfem", "glm_estimates", {}, model._session)))


def test_a_fit_goes_on_after_a_refusal_in_the_middle(study):
    """After a refusal a site has one state again: its staged columns are found."""
    model, expected, refused = make(study), make(study).fit(), []
    answer = model.partition.sites["Court"].answer

    def refuse_first(request):
        if b"glm_information" in request:
            with pytest.raises(MessageError, match="'z' has 1 rows"):
                hostile(model, "Court", "glm_score", z=np.zeros(1), h=0.0, missing=np.zeros(4))
            refused.append(request)
        return answer(request)

    model.engine._answer_functions["Court"] = refuse_first
    found = model.fit()
    assert len(refused) == 1
    np.testing.assert_allclose(found.cov_params(), expected.cov_params(), rtol=1e-9)
