"""Sums that sites refuse after earlier ones: their difference is a sum over few entities."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from vglm_study import make_model, make_table

from fedstat.errors import PolicyError
from fedstat.federation.message import Request, pack_request

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

N, ALL = 300, np.zeros(300, dtype=np.int64)


@pytest.fixture
def asked():
    """A model after a fit, and how to ask one of its sites."""
    model = make_model(make_table(N))
    model.fit()

    def put(step, site="Registry", text="", **arrays):
        arrays = {name: np.asarray(a) for name, a in arrays.items()}
        return model.partition.sites[site].answer(
            pack_request(Request(site, "vglm", step, arrays, model._session, text))
        )

    return model, put


def test_sums_that_differ_by_one_entity_are_refused(asked):
    _, put = asked
    put("sum_products", code=ALL, groups=1)
    less = ALL.copy()
    less[17] = -1
    with pytest.raises(PolicyError, match=r"Registry: .* differ in fewer than 5"):
        put("sum_products", code=less, groups=1)
    halves = np.arange(N) % 2
    put("sum_products", code=halves, groups=2)
    exchanged = halves.copy()
    exchanged[[4, 5]] = exchanged[[5, 4]]
    with pytest.raises(PolicyError, match="differ in fewer"):
        put("sum_products", code=exchanged, groups=2)
    put("sum_products", code=halves, groups=2)
    put("sum_products", code=np.arange(N) // (N // 2), groups=2)


def test_a_block_that_is_staged_without_one_entity_is_refused(asked):
    model, put = asked
    keep = np.ones(N, dtype=bool)
    put("stage_block", keep=keep)
    text = model.distribution.to_json()
    put("stage_response", site="Bank", text=text, keep=keep)
    keep[17] = False
    with pytest.raises(PolicyError, match=r"Registry: .* differ in fewer"):
        put("stage_block", keep=keep)
    with pytest.raises(PolicyError, match=r"Bank: .* differ in fewer"):
        put("stage_response", site="Bank", text=text, keep=keep)
    # Another half is another matter; rows count by their place in the block, whatever was staged.
    half = np.arange(N) < N // 2
    put("stage_block", keep=half)
    less = np.zeros(N // 2, dtype=np.int64)
    less[3] = -1
    with pytest.raises(PolicyError, match="differ in fewer"):
        put("sum_products", code=less, groups=1)


@pytest.mark.parametrize("family", [None, sm.families.Poisson()])
def test_a_model_is_fitted_again_with_other_folds_and_halves(family):
    model = make_model(make_table(N, response="normal" if family is None else "count"), family=family)
    model.fit(n_lambdas=3)
    for seed in (1, 2):
        model.fit(select="cv", folds=3, seed=seed, n_lambdas=3)
        model.fit(inference="split", seed=seed, n_lambdas=3)
    assert model.fit(n_lambdas=3).converged


def test_means_with_missing_blocks_are_over_the_entities_of_released_patterns():
    """Sums over all entities would differ from the sums by pattern by two; the sites refuse them."""
    table = make_table(N)
    table.loc[:99, ["x5", "x6", "x7", "x8"]] = np.nan
    table.loc[[1, 150], ["x0", "x1", "x2"]] = np.nan
    result = make_model(table, missing="em").fit()
    assert result.converged and result.nobs == N - 2
