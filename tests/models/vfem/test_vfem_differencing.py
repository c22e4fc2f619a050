"""What the doors refuse to sum a second time: sums by pattern whose difference is one over few entities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import simulate

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.message import pack_ask

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")


@pytest.fixture
def asked():
    """Find a question that a fit put, and put it again in other words."""
    fitted = fs.VFEMRegression.from_formula("y ~ .", simulate(n=600, seed=0).partition(min_count=5))
    asks = []

    class Engine(type(fitted.engine)):
        def _carry(self, ask, ledger):
            asks.append(ask)
            return super()._carry(ask, ledger)

    fitted.engine = Engine(fitted.partition.sites)
    fitted.fit(exchange="moments")

    def find(step, **given):
        return next(a for a in asks if a.step == step and all(a.arrays[k] == v for k, v in given.items()))

    def put(ask, **arrays):
        words = dict(ask.arrays) | {name: np.asarray(a) for name, a in arrays.items()}
        return fitted.partition.sites[ask.site].answer(pack_ask(replace(ask, arrays=words, turn=None)))

    return find, put


def test_a_response_without_one_entity_is_refused(asked):
    find, put = asked
    ask = find("start_response")
    put(ask)
    keep, code = ask.arrays["keep"].copy(), ask.arrays["code"]
    keep[np.flatnonzero(keep)[17]] = False
    with pytest.raises(PolicyError, match=r"earlier ones of this session differ by 1\."):
        put(ask, keep=keep, code=np.delete(code, 17))


@pytest.mark.parametrize("response", [False, True])
def test_patterns_that_exchange_a_few_entities_are_refused(asked, response):
    find, put = asked
    ask = find("pattern_sums", response=response)
    put(ask)
    code = ask.arrays["code"].copy()
    one, other = (np.flatnonzero(code == g)[:2] for g in np.unique(code[code >= 0])[:2])
    code[one], code[other] = code[other], code[one]
    with pytest.raises(PolicyError, match="earlier ones of this session differ by 4"):
        put(ask, code=code)


def test_means_without_one_entity_are_refused(asked):
    """Sums are over the same patterns both times, means over all that take part."""
    find, put = asked
    block, sums = find("stage_block"), find("pattern_sums", response=False)
    assert block.site == sums.site
    code, keep = sums.arrays["code"].copy(), block.arrays["keep"].copy()
    out = np.flatnonzero(code == code.max())[:6]
    code[out] = -1
    put(block)
    put(sums, code=code)
    keep[np.flatnonzero(keep)[out[0]]] = False
    put(block, keep=keep, rows=np.delete(block.arrays["rows"], out[0]))
    with pytest.raises(PolicyError, match=r"earlier ones of this session differ by 1\."):
        put(sums, code=np.delete(code, out[0]))


def test_other_fits_of_a_session_pass():
    fitted = fs.VFEMRegression.from_formula("y ~ .", simulate(n=600, seed=0).partition(min_count=5))
    for method in ("vfem", "cc", "impute"):
        assert fitted.fit(exchange="moments", method=method).converged
    assert fitted.fit(exchange="iterative").converged
