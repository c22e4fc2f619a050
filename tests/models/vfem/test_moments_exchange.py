"""One exchange of moments ends where the iterative exchange ends, and no value per entity leaves."""

import numpy as np
import pytest
from oracle import simulate

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError, PolicyError, SecurityError
from fedstat.federation.message import pack, unpack, unpack_reply
from fedstat.federation.policy import Policy


def model(n=600, seed=0, holder="Bank", coordinator=None, **policy):
    data = simulate(n=n, seed=seed, holder=holder)
    rules = Policy(**({"min_count": 1} | policy))
    partition = data.partition(min_count=rules.min_count, policies=dict.fromkeys(data.frames(), rules))
    return fs.VFEMRegression.from_formula("y ~ .", partition, coordinator=coordinator)


def close(one, other):
    np.testing.assert_allclose((one.params - other.params) / other.bse, 0.0, atol=1e-6)
    np.testing.assert_allclose(one.bse, other.bse, rtol=1e-6)
    assert one.llf == pytest.approx(other.llf, rel=1e-8)
    assert one.rsquared == pytest.approx(other.rsquared, rel=1e-7)


@pytest.mark.parametrize("holder", ["Bank", "Registry"])
@pytest.mark.parametrize("coordinator", [None, "apart"])
def test_estimates_are_those_of_the_iterative_exchange(holder, coordinator):
    fitted = model(holder=holder, coordinator=coordinator)
    tight = {"cross_products": "exact", "tol_score": 1e-11, "tol_change": 1e-9}
    for cov_type in ("observed", "expected", "sem"):
        close(fitted.fit(exchange="moments", cov_type=cov_type), fitted.fit(cov_type=cov_type, **tight))


@pytest.mark.parametrize("method", ["cc", "impute"])
def test_the_baselines_come_from_moments_too(method):
    fitted = model()
    tight = {"cross_products": "exact", "tol_score": 1e-11, "tol_change": 1e-9}
    close(fitted.fit(exchange="moments", method=method), fitted.fit(method=method, **tight))


@pytest.mark.parametrize("coordinator", [None, "apart"])
def test_no_value_per_entity_leaves(coordinator):
    result = model(coordinator=coordinator).fit(exchange="moments")
    kinds = set(result.ledger.to_frame()["kind"])
    assert kinds == {"control", "schema", "presence", "sealed", "masked share", "aggregate"}
    assert "secure multiplication" in str(result.summary())


def test_the_owners_refusal_of_values_per_entity_does_not_hinder():
    fitted = model(refused_kinds=frozenset({"per entity", "sketch", "raw columns"}))
    assert fitted.fit(exchange="moments").converged
    with pytest.raises(PolicyError):
        fitted.fit()


def test_rounds_do_not_depend_on_the_iteration():
    assert model().fit(exchange="moments").ledger.rounds <= 9


def test_patterns_with_few_entities_are_not_released():
    result = model(n=2_000, min_count=20).fit(exchange="moments")
    frame = result.ledger.to_frame()
    assert (frame[frame["kind"].isin(["aggregate", "masked share"])]["entities"] >= 20).all()


def test_what_moments_do_not_hold_is_named():
    with pytest.raises(NotAvailableError, match="fourth moments"):
        model().fit(exchange="moments", cov_type="robust")
    with pytest.raises(ModelError, match="own start"):
        model().fit(exchange="moments", init="cc")


def test_two_institutions_need_a_coordinator_apart():
    frames = simulate(n=300, holder="Bank").frames()
    two = {name: frames[name] for name in list(frames)[:2]}
    partition = fs.ClientPartition.from_frames(two, on="id", min_count=1)
    formula = "y ~ ."
    with pytest.raises(ModelError, match="coordinator='apart'"):
        fs.VFEMRegression.from_formula(formula, partition).fit(exchange="moments")
    fitted = fs.VFEMRegression.from_formula(formula, partition, coordinator="apart")
    assert fitted.fit(exchange="moments").converged


def test_a_key_that_the_owner_did_not_pin_is_refused():
    fitted = model()
    first, *_, last = fitted.partition.clients
    pinned = fitted.partition.sites[last].trust.pinned
    pinned[first] = pinned[last]
    with pytest.raises(SecurityError):
        fitted.fit(exchange="moments")


def test_an_altered_box_is_refused():
    fitted = model()
    name = fitted.partition.clients[-1]
    door = fitted.engine._doors[name]

    def altered(request):
        header, arrays = unpack(request)
        if header["step"] == "share_product":
            arrays["opened"] = arrays["opened"].copy()
            arrays["opened"][-1] ^= 1
            request = pack(header, arrays)
        return door(request)

    fitted.engine._doors[name] = altered
    with pytest.raises(SecurityError, match="altered"):
        fitted.fit(exchange="moments")


def test_what_a_coordinator_carries_between_two_institutions_looks_random():
    fitted = model(n=2_000)
    seen = []
    for name, door in list(fitted.engine._doors.items()):

        def listen(request, door=door):
            reply = door(request)
            arrays = unpack_reply(reply).arrays
            if "opened" in arrays:
                seen.append(arrays["opened"][52:])
            return reply

        fitted.engine._doors[name] = listen
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
    clients = len(result.nobs_by_client)
    assert len(pairs) == clients * (clients - 1) // 2
    dropped = result.leave_one_out()
    assert len(dropped) == len(result.params) - 1
    assert result.ledger.rounds == rounds
    with pytest.raises(NotAvailableError, match="exchange='moments'"):
        fitted.fit(cov_type="none").mcar_test()


def test_leaving_a_column_out_is_the_fit_without_it():
    fitted = model(n=1_500)
    full = fitted.fit(exchange="moments")
    name = full.params.index[-1]
    smaller = fs.VFEMRegression.from_formula(f"y ~ . - {name}", fitted.partition).fit(exchange="moments")
    lr = full.leave_one_out()
    column = next(c for c in lr.columns if "stat" in c.lower())
    row = lr.loc[name] if name in lr.index else lr[lr.iloc[:, 0] == name].iloc[0]
    assert row[column] == pytest.approx(full.compare_lr_test(smaller).statistic, rel=1e-5)
