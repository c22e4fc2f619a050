"""What institutions would answer in secure products of their columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from fedstat.federation.crypto.boxes import OVERHEAD
from fedstat.federation.crypto.keystream import WORD_BYTES
from fedstat.federation.crypto.product import SEED_BYTES
from fedstat.federation.forecast.rehearsal import Answers, StandIn
from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.product_steps import Part, read_part
from fedstat.typing import Array, Ints

Hold: TypeAlias = Callable[[StandIn, Part, Ints], None]


class ProductStandIns:
    """Institutions that multiply their columns.

    Parameters
    ----------
    own : callable
        ``own(site, part)``: entities that the columns of a side have at their institution.
    hold : callable
        ``hold(site, part, group)``: applies the rule on entities behind a product.
    scaled : callable
        ``scaled(columns)``: whether columns of this name are released with their units.
    """

    def __init__(
        self, own: Callable[[StandIn, Part], int], hold: Hold, scaled: Callable[[str], bool]
    ) -> None:
        self._own, self._hold, self._scaled = own, hold, scaled
        self.dealers: dict[tuple[str, str], str] = {}

    def answers(self, family: str) -> Answers:
        """How they answer the product's steps of a family."""
        return {
            (family, "deal_product"): self._deal,
            (family, "open_product"): self._open,
            (family, "share_product"): self._share,
        }

    def _deal(self, site: StandIn, ask: Ask) -> Reply:
        seed, triple = OVERHEAD + SEED_BYTES, WORD_BYTES * int(np.prod(read_part(ask.text).product.shape))
        return site.reply({"for_a": sealed(seed), "for_b": sealed(seed + triple)})

    def _open(self, site: StandIn, ask: Ask) -> Reply:
        part = read_part(ask.text)
        self.dealers[part.product.client_a, part.product.client_b] = part.dealer
        site.memory[f"product {part.number}"] = part
        rows, columns = part.product.shape_a if part.first else part.product.shape_b
        opened = sealed(OVERHEAD + WORD_BYTES * rows * columns)
        return site.reply({"opened": opened}, entities=self._own(site, part))

    def _share(self, site: StandIn, ask: Ask) -> Reply:
        part, group = site.memory[f"product {json.loads(ask.text)}"], ask.arrays["group"]
        self._hold(site, part, group)
        arrays: dict[str, Array] = {"share": np.zeros(part.product.shape, dtype=np.int64)}
        if self._scaled(part.columns):
            arrays["units"] = np.ones(part.product.columns_a if part.first else part.product.columns_b)
        return site.reply(arrays, entities=len(group))


def sealed(n_bytes: int) -> Array:
    """So many bytes that nobody can read."""
    return np.zeros(n_bytes, dtype=np.uint8)
