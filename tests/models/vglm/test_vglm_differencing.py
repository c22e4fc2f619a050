"""Sums that sites refuse after earlier ones: their difference is a sum over few entities."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from vglm_study import make_model, make_table

from fedstat.errors import PolicyError
from fedstat.federation.disclosure.differencing import count_differing_entities
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
    with pytest.raises(PolicyError, match=r"Registry: .* earlier ones of this session differ by 1"):
        put("sum_products", code=less, groups=1)
    halves = np.arange(N) % 2
    put("sum_products", code=halves, groups=2)
    exchanged = halves.copy()
    exchanged[[4, 5]] = exchanged[[5, 4]]
    with pytest.raises(PolicyError, match="differ by 2"):
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
    with pytest.raises(PolicyError, match=r"Registry: .* differ by 1"):
        put("stage_block", keep=keep)
    with pytest.raises(PolicyError, match=r"Bank: .* differ by 1"):
        put("stage_response", site="Bank", text=text, keep=keep)
    # Another half is another matter; rows count by their place in the block, whatever was staged.
    half = np.arange(N) < N // 2
    put("stage_block", keep=half)
    less = np.zeros(N // 2, dtype=np.int64)
    less[3] = -1
    with pytest.raises(PolicyError, match="differ by 1"):
        put("sum_products", code=less, groups=1)


def test_the_fewest_entities_between_two_divisions():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.integers(-1, 3, 12), rng.integers(-1, 2, 12)
        a[:4], b[:3] = [-1, 0, 1, 2], [-1, 0, 1]
        sets = [
            [set(np.flatnonzero(c == g)) for g in range(c.max() + 1)] + [set(np.flatnonzero(c >= 0))]
            for c in (a, b)
        ]
        sizes = [len(one ^ other) for one in sets[0] for other in sets[1]]
        assert count_differing_entities(a, b) == min([size for size in sizes if size] or [len(a) + 1])


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
