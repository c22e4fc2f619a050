"""Cross-products of the covariance by secure multiplication: those of an exchange of columns, unseen."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import Study, packed, simulate

import fedstat as fs
from fedstat.errors import MessageError, ModelError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

ITERATIVE = {"exchange": "iterative"}


def notes(result):
    return " ".join(result.notes)


@pytest.fixture(scope="module")
def study():
    return simulate(seed=4, n=400, holder="Registry")


@pytest.mark.parametrize(
    ("cov_type", "holder", "coordinator"),
    [
        ("observed", "Bank", None),
        ("robust", "Registry", "apart"),
        ("sem", "Bank", None),
    ],
)
def test_the_covariance_is_that_of_exchanged_columns(cov_type, holder, coordinator):
    model = simulate(seed=4, n=400, holder=holder).model(coordinator=coordinator)
    secure = model.fit(**packed(**ITERATIVE, cov_type=cov_type)).covariance
    exact = model.fit(**packed(**ITERATIVE, cov_type=cov_type, cross_products="exact")).covariance
    assert (secure.how, exact.how, secure.left_out) == ("secure", "exact", 0)
    root = np.sqrt(np.diag(exact.psi))
    np.testing.assert_allclose(secure.psi / np.outer(root, root), exact.psi / np.outer(root, root), atol=1e-7)
    np.testing.assert_allclose(np.diag(secure.psi), np.diag(exact.psi), rtol=1e-7)


@pytest.mark.parametrize("cov_type", ["robust", "sem"])
def test_no_column_leaves_and_shares_alone_are_random(study, cov_type):
    result = study.model(coordinator="apart").fit(**packed(**ITERATIVE, cov_type=cov_type))
    frame = result.ledger.to_frame()
    assert not set(frame["kind"]) & {"raw columns", "sketch"}
    opened = frame[frame["array"] == "opened"]
    assert set(opened["kind"]) == {"sealed"}
    assert set(frame.loc[frame["array"] == "share", "kind"]) == {"masked share"}
    assert (frame.loc[frame["array"] == "share", "entities"] > 50).all()


def test_owners_who_refuse_sketches_and_columns_do_not_hinder(study):
    policy = Policy(refused_kinds=frozenset({"raw columns", "sketch"}))
    partition = study.partition(policies=dict.fromkeys(study.columns, policy))
    model = fs.VFEMRegression.from_formula("y ~ .", partition, between="independent")
    assert model.fit(**packed(**ITERATIVE)).converged
    for how in ("sketch", "exact"):
        with pytest.raises(PolicyError, match="refused kinds"):
            model.fit(**packed(**ITERATIVE, cross_products=how))


def thin(study, shared):
    """Leave Court and Tax so few entities that both have."""
    table = study.table.copy()
    both = table.index[table["court0"].notna() & table["tax0"].notna()]
    table.loc[both[shared:], study.columns["Tax"]] = np.nan
    return Study(table, study.columns, study.holder)


@pytest.mark.parametrize(("shared", "left_out"), [(0, 0), (9, 1), (10, 0)])
def test_a_product_over_few_entities_is_not_requested(study, shared, left_out):
    """Court and Tax have 3 and 2 columns: 2 (3 + 2) entities are the least."""
    few = thin(study, shared)
    model = few.model()
    result = model.fit(**packed(**ITERATIVE))
    exact = model.fit(**packed(**ITERATIVE, cross_products="exact"))
    assert result.covariance.left_out == left_out
    assert ("too few common" in notes(result)) == bool(left_out)
    if not left_out:
        np.testing.assert_allclose(result.bse, exact.bse, rtol=1e-7)
    else:
        assert 0.0 < np.abs(result.bse / exact.bse - 1.0).max() < 0.05
    descriptions = result.ledger.to_frame()
    assert (descriptions["array"] == "share").sum() == (6 if shared == 10 else 4)


def two_clients(holder):
    study = simulate(seed=4, n=300, holder=holder)
    columns = {site: study.columns[site] for site in ("Bank", "Tax")}
    return Study(study.table[["y", *columns["Bank"], *columns["Tax"]]], columns, holder)


def test_two_sites_need_somebody_to_deal():
    model = two_clients("Bank").model(coordinator="Bank")
    rounds = {name: len(site.ledger.entries) for name, site in model.partition.sites.items()}
    with pytest.raises(ModelError, match=r"no third site.*coordinator='apart'.*cross_products='sketch'"):
        model.fit(**packed(**ITERATIVE))
    assert rounds == {name: len(site.ledger.entries) for name, site in model.partition.sites.items()}
    assert model.fit(**packed(**ITERATIVE, cov_type="expected")).converged
    assert model.fit(**packed(**ITERATIVE, cross_products="sketch")).converged
    apart = two_clients("Bank").model(coordinator="apart").fit(**packed(**ITERATIVE))
    assert "(the coordinator) must not collude" in notes(apart)


def test_a_response_holder_without_columns_deals_for_two_sites():
    model = two_clients("Registry").model()
    result = model.fit(**packed(**ITERATIVE, cov_type="robust"))
    exact = model.fit(**packed(**ITERATIVE, cov_type="robust", cross_products="exact"))
    np.testing.assert_allclose(result.bse, exact.bse, rtol=1e-7)
    assert "(Registry) must not collude" in notes(result)


def altered(model, site, step, change):
    """Change header and arrays of the question that a site is asked."""
    door = model.engine._answer_functions[site]

    def requested(request):
        header, arrays = unpack(request)
        return door(pack(*change(header, arrays)) if header["step"] == step else request)

    model.engine._answer_functions[site] = requested
    return model


def test_an_entity_cannot_take_part_twice(study):
    def repeat(header, arrays):
        rows = arrays["rows"].copy()
        rows[0] = rows[1]
        return header, arrays | {"rows": rows}

    with pytest.raises(MessageError, match="'rows' must ascend"):
        altered(study.model(), "Court", "open_product", repeat).fit(**packed(**ITERATIVE))


def test_a_site_does_not_multiply_few_rows_whatever_the_request(study):
    policies = {"Tax": Policy(min_count=250)}
    model = fs.VFEMRegression.from_formula("y ~ .", study.partition(policies=policies), between="independent")
    with pytest.raises(PolicyError, match=r"Tax: .*minimum count"):
        model.fit(**packed(**ITERATIVE))


def test_columns_that_are_not_meant_for_products_are_refused(study):
    def rename(header, arrays):
        return header | {"text": header["text"].replace('"information"', '"inverse_v"')}, arrays

    with pytest.raises(MessageError, match="no columns 'inverse_v'"):
        altered(study.model(), "Court", "open_product", rename).fit(**packed(**ITERATIVE))
