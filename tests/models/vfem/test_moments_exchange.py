"""One exchange of moments ends where the iterative exchange ends, and no value per entity leaves."""

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from oracle import ITERATIVE, Study, packed, simulate

import fedstat as fs
from fedstat.errors import (
    ConvergenceWarning,
    DataWarning,
    EstimationError,
    ModelError,
    NotAvailableError,
    PolicyError,
    SecurityError,
)
from fedstat.federation.disclosure import row_checks
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import pack, pack_request, unpack, unpack_reply
from fedstat.models.vertical import pattern_merging as pattern_merge

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


def model(n=600, seed=0, holder="Bank", coordinator=None, **policy):
    data = simulate(n=n, seed=seed, holder=holder)
    rules = Policy(**({"min_count": 1} | policy))
    partition = data.partition(min_count=rules.min_count, policies=dict.fromkeys(data.frames(), rules))
    return fs.VFEMRegression.from_formula("y ~ .", partition, coordinator=coordinator, between="independent")


class FoundError(Exception):
    """The ask that a test looks for."""


def find_ask(fitted, step):
    """The first ask of a step, as a coordinator without scruples would send it."""

    class Engine(type(fitted.engine)):
        def _send(self, request, ledger):
            if request.step == step:
                raise FoundError(request)
            return super()._send(request, ledger)

    fitted.engine = Engine(fitted.partition.sites)
    with pytest.raises(FoundError) as found:
        fitted.fit()
    return found.value.args[0]


def close(one, other):
    np.testing.assert_allclose((one.params - other.params) / other.bse, 0.0, atol=1e-6)
    np.testing.assert_allclose(one.bse, other.bse, rtol=1e-6)
    assert one.llf == pytest.approx(other.llf, rel=1e-8)
    assert one.rsquared == pytest.approx(other.rsquared, rel=1e-7)


@pytest.mark.parametrize(
    ("holder", "coordinator", "cov_types"),
    [
        ("Bank", None, ("observed", "expected")),
        ("Bank", "apart", ("observed",)),
        ("Registry", None, ("observed",)),
        ("Registry", "apart", ("observed", "sem")),
    ],
)
def test_estimates_are_those_of_the_iterative_exchange(holder, coordinator, cov_types):
    fitted = model(holder=holder, coordinator=coordinator)
    tight = ITERATIVE | {"cross_products": "exact", "tol": 1e-11}
    for cov_type in cov_types:
        close(
            fitted.fit(exchange="moments", cov_type=cov_type),
            fitted.fit(**packed(cov_type=cov_type, **tight)),
        )


@pytest.mark.parametrize("method", ["cc", "impute"])
def test_the_baselines_come_from_moments_too(method):
    fitted = model()
    tight = ITERATIVE | {"cross_products": "exact", "tol": 1e-11}
    close(fitted.fit(exchange="moments", method=method), fitted.fit(**packed(method=method, **tight)))


@pytest.mark.parametrize("coordinator", [None, "apart"])
def test_no_value_per_entity_leaves(coordinator):
    result = model(coordinator=coordinator).fit(exchange="moments")
    kinds = set(result.ledger.to_frame()["kind"])
    assert kinds == {"control", "schema", "presence", "sealed", "masked share", "aggregate"}
    assert "secure multiplication" in str(result.summary(notes="all"))


def test_the_owners_refusal_of_values_per_entity_does_not_hinder():
    fitted = model(refused_kinds=frozenset({"per entity", "sketch", "raw columns"}))
    assert fitted.fit(exchange="moments").converged
    with pytest.raises(PolicyError):
        fitted.fit(**packed(**ITERATIVE))


def test_rounds_do_not_depend_on_the_iteration():
    assert model().fit(exchange="moments").ledger.rounds <= 9


def test_patterns_with_few_entities_are_not_released():
    result = model(n=2_000, min_count=20).fit(exchange="moments")
    frame = result.ledger.to_frame()
    assert (frame[frame["kind"].isin(["aggregate", "masked share"])]["entities"] >= 20).all()


def test_moments_are_the_default():
    assert model().fit().exchange is not None


def test_a_robust_covariance_needs_the_iterative_exchange():
    fitted = model()
    before = fitted.partition.sites["Tax"].ledger.rounds
    with pytest.raises(NotAvailableError, match=r"random group.*exchange='iterative'"):
        fitted.fit(cov_type="robust")
    assert fitted.partition.sites["Tax"].ledger.rounds == before


@pytest.mark.parametrize(
    "options",
    [
        {"masked": False},
        {"cross_products": "exact"},
        {"sketch": "gaussian"},
        {"sketch_size": 100},
        {"step": "gradient"},
        {"acceleration": None},
        {"memory": 3},
        {"learning_rate": 0.1},
        {"init": "cc"},
        {"init": [0.0] * 7},
        {"tol": 1e-6},
    ],
    ids=str,
)
def test_options_of_the_iteration_are_refused_with_moments(options):
    (name,) = options
    with pytest.raises(
        ModelError, match=r"iteration: has no effect with exchange='moments'.*exchange='iterative'"
    ):
        model().fit(iteration=fs.Iteration(**options))
    with pytest.raises(ModelError, match=rf"{name}: .*exchange='iterative', iteration=fs.Iteration\({name}="):
        model().fit(**options)


def test_options_of_the_iteration_have_a_class_of_their_own():
    with pytest.raises(ModelError, match=r"iteration: expected fs.Iteration\(...\), received dict"):
        model().fit(exchange="iterative", iteration={"masked": False})


def test_the_largest_number_of_iterations_is_kept():
    with pytest.warns(ConvergenceWarning, match="2 iterations"):
        assert len(model().fit(maxiter=2).trace) == 2


def test_fitted_values_are_not_requested_and_say_how_to_get_them():
    result = model().fit()
    for what in ("fittedvalues", "resid"):
        with pytest.raises(NotAvailableError, match=r"predict\(partition\) requests"):
            getattr(result, what)
    with pytest.raises(NotAvailableError, match=r"predict\(partition\)"):
        result.predict()
    prediction = result.get_prediction()
    assert len(prediction.summary_frame()) == 600
    np.testing.assert_allclose(result.predict(result.model.partition), prediction.predicted_mean)


# ---- two sites, and one ------------------------------------------------------------------


def two_institutions(formula="y ~ .", **options):
    frames = simulate(n=300, holder="Bank").frames()
    partition = fs.ClientPartition.from_frames({k: frames[k] for k in ("Bank", "Court")}, on="id")
    return fs.VFEMRegression.from_formula(formula, partition, between="independent", **options)


def test_two_sites_have_the_coordinator_apart_unless_the_user_says_where():
    result = two_institutions().fit()
    assert result.ledger.at is None
    assert set(result.dealers["dealer"]) == {"coordinator"}
    assert "The coordinator is at neither" in str(result.summary(notes="all")).replace("\n    ", " ")
    close(result, two_institutions().fit(**packed(**ITERATIVE, cross_products="exact", tol=1e-11)))
    assert model().fit().ledger.at == "Bank"
    with pytest.raises(ModelError, match="coordinator='apart'"):
        two_institutions(coordinator="Bank").fit()


def test_those_that_take_part_are_counted_not_those_of_the_partition():
    partition = simulate(n=300, holder="Bank").partition()
    fitted = fs.VFEMRegression.from_formula("y ~ bank0 + court1", partition, between="independent")
    assert fitted.coordinator == "apart" and fitted.fit().converged
    assert fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").coordinator == "Bank"


def test_one_site_is_ordinary_least_squares():
    study = simulate(n=300, holder="Bank", missing="none")
    alone = Study(study.table, {"Bank": study.columns["Bank"]}, "Bank").model()
    result = alone.fit()
    ols = sm.OLS(study.table["y"], sm.add_constant(study.table[study.columns["Bank"]])).fit()
    np.testing.assert_allclose(result.params, ols.params, rtol=1e-9)
    np.testing.assert_allclose(result.bse, ols.bse, rtol=1e-8)
    assert result.llf == pytest.approx(ols.llf, rel=1e-12)
    assert result.ledger.at == "Bank" and not (result.ledger.to_frame()["kind"] == "aggregate").any()


# ---- patterns that are too small ------------------------------------------------------------------


def small_pattern(n_small, holder="Registry"):
    """Complete entities, but some that lack the Court and few that lack the Tax office."""
    study = simulate(n=400, holder=holder, missing="none")
    study.table.iloc[:100, study.table.columns.get_indexer(study.columns["Court"])] = np.nan
    study.table.iloc[100 : 100 + n_small, study.table.columns.get_indexer(study.columns["Tax"])] = np.nan
    return study.partition()


def test_a_pattern_with_hardly_more_entities_than_columns_is_not_released():
    """Bank and Court have five columns: twelve entities are the least."""
    enough = fs.VFEMRegression.from_formula("y ~ .", small_pattern(12), between="independent").fit()
    few = fs.VFEMRegression.from_formula("y ~ .", small_pattern(11), between="independent").fit()
    assert (enough.exchange.plan.moved, few.exchange.plan.moved) == (0, 11)
    assert enough.exchange.smallest == 12
    assert few.exchange.plan.patterns.sum(axis=1).tolist() == [1, 2, 3]  # they stay with the Bank alone
    assert "11 entities count as missing" in " ".join(str(few.summary()).split())
    assert few.nobs == enough.nobs == 400


@pytest.mark.parametrize("holder", ["Bank", "Registry"])
def test_means_are_those_of_what_is_released(holder):
    """Together with the sums by pattern they would reveal the few entities that count as missing."""
    found = (
        fs.VFEMRegression.from_formula("y ~ .", small_pattern(11, holder), between="independent")
        .fit()
        .exchange
    )
    sums, seen = found.moments.grams[:, 0, 1:-1], found.moments.patterns[:, found.moments.owner]
    assert found.plan.moved == 11 and seen.any(axis=0).all()
    np.testing.assert_allclose(sums.sum(axis=0), 0.0, atol=1e-8)
    np.testing.assert_allclose(found.moments.grams[:, 0, -1].sum(), 0.0, atol=1e-8)


def test_a_site_gives_no_sums_without_a_few_of_those_that_take_part():
    fitted = fs.VFEMRegression.from_formula("y ~ .", small_pattern(30), between="independent")
    requested = find_ask(fitted, "sum_products")
    code = requested.arrays["code"].copy()
    code[:3] = -1
    request = pack_request(replace(requested, arrays=requested.arrays | {"code": code}))
    with pytest.raises(PolicyError, match="3 of the entities are in no pattern"):
        fitted.partition.sites[requested.site].answer(request)


def test_the_site_insists_though_the_coordinator_asks(monkeypatch):
    for step in ("sum_products", "sum_with_response", "share_product"):
        fitted = fs.VFEMRegression.from_formula(
            "y ~ .", small_pattern(5, holder="Bank"), between="independent"
        )
        with monkeypatch.context() as careless:
            for rule in (pattern_merge, row_checks):
                careless.setattr(rule, "MIN_ENTITIES_PER_EQUATION", 0)
            request = find_ask(fitted, step)
        with pytest.raises(PolicyError, match="1 Gram matrix of"):
            fitted.partition.sites[request.site].answer(pack_request(request))


def test_many_entities_in_small_patterns_are_reported_and_more_are_refused():
    def fitted(share, **arguments):
        study = simulate(n=200, holder="Registry", missing="none")
        for k, names in enumerate(study.columns.values()):
            study.table.iloc[k * share : (k + 1) * share, study.table.columns.get_indexer(names)] = np.nan
        return fs.VFEMRegression.from_formula(
            "y ~ .", study.partition(min_count=30), between="independent"
        ).fit(**arguments)

    with pytest.raises(EstimationError, match=r"too few entities to be released .*at most 5 % .*max_moved"):
        fitted(8)
    with pytest.warns(DataWarning, match=r"(\d+) of 200 entities"):
        fitted(8, max_moved=0.2)
    with pytest.raises(EstimationError, match="at most 20 %"):
        fitted(25, max_moved=0.2)
    with pytest.raises(ModelError, match="max_moved: expected a share"):
        fitted(8, max_moved=2.0)


def test_the_summary_says_who_must_not_collude_and_what_was_released():
    result = model(n=2_000).fit()
    text = " ".join(str(result.summary(notes="all")).split())
    assert "semi-honest" in text and "must not collude with either of them" in text
    assert f"Every sum is over at least {result.exchange.smallest:,} entities" in text
    for site, count in result.exchange.numbers.items():
        assert f"{count:,} of {site}" in text
    assert len(result.dealers) == 3
    assert all(row.dealer not in (row.first, row.second) for row in result.dealers.itertuples())


def test_released_numbers_are_the_different_entries_of_the_gram_matrices():
    result = model(n=2_000).fit()
    moments = result.exchange.moments
    owner = np.array([*[moments.sites[k] for k in moments.owner], "Bank"])  # the Bank has the response
    for site, count in result.exchange.numbers.items():
        distinct = (owner[:-1] == site).sum()  # the shapes of its columns, and of the response
        distinct += 2 * (site == "Bank")
        for pattern in moments.patterns:
            here = np.append(pattern[moments.owner], True)
            mine = owner[here] == site
            rows, columns = np.triu_indices(here.sum())
            distinct += mine.sum() + (mine[rows] | mine[columns]).sum()
        assert count == distinct


def test_a_key_that_the_owner_did_not_pin_is_refused():
    fitted = model()
    first, *_, last = fitted.partition.sites
    pinned = fitted.partition.sites[last].trust.pinned
    pinned[first] = pinned[last]
    with pytest.raises(SecurityError):
        fitted.fit(exchange="moments")


def test_an_altered_box_is_refused():
    fitted = model()
    name = tuple(fitted.partition.sites)[-1]
    door = fitted.engine._answer_functions[name]

    def altered(request):
        header, arrays = unpack(request)
        if header["step"] == "share_product":
            arrays["opened"] = arrays["opened"].copy()
            arrays["opened"][-1] ^= 1
            request = pack(header, arrays)
        return door(request)

    fitted.engine._answer_functions[name] = altered
    with pytest.raises(SecurityError, match="altered"):
        fitted.fit(exchange="moments")


def test_what_a_coordinator_carries_between_two_sites_looks_random():
    fitted = model(n=2_000)
    seen = []
    for name, door in list(fitted.engine._answer_functions.items()):

        def listen(request, door=door):
            reply = door(request)
            arrays = unpack_reply(reply).arrays
            if "opened" in arrays:
                seen.append(arrays["opened"][52:])
            return reply

        fitted.engine._answer_functions[name] = listen
    fitted.fit(exchange="moments")
    counts = np.bincount(np.concatenate(seen), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 400


def test_statements_from_the_same_moments_need_no_further_message():
    fitted = model(n=1_500)
    result = fitted.fit(exchange="moments")
    rounds = result.ledger.rounds
    assert 0.0 <= result.mcar_test().pvalue <= 1.0
    pairs = result.independence_tests()
    sites = len(result.nobs_by_site)
    assert len(pairs) == sites * (sites - 1) // 2
    dropped = result.leave_one_out()
    assert len(dropped) == len(result.params) - 1
    assert result.ledger.rounds == rounds
    with pytest.raises(NotAvailableError, match="exchange='moments'"):
        fitted.fit(**packed(**ITERATIVE, cov_type="none")).mcar_test()


def test_leaving_a_column_out_is_the_fit_without_it():
    fitted = model(n=1_500)
    full = fitted.fit(exchange="moments")
    name = full.params.index[-1]
    smaller = fs.VFEMRegression.from_formula(f"y ~ . - {name}", fitted.partition, between="independent").fit(
        exchange="moments"
    )
    lr = full.leave_one_out()
    column = next(c for c in lr.columns if "stat" in c.lower())
    row = lr.loc[name] if name in lr.index else lr[lr.iloc[:, 0] == name].iloc[0]
    assert row[column] == pytest.approx(full.compare_lr_test(smaller).statistic, rel=1e-5)
