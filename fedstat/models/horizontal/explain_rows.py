"""What sites with different rows would answer when a model opens its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pandas as pd

from fedstat.federation.design.block import code_rows
from fedstat.federation.design.by_columns import FAMILY
from fedstat.federation.design.by_rows import RowsAgreement
from fedstat.federation.door.guards import check_rows
from fedstat.federation.forecast.rehearsal import Answers, StandIn
from fedstat.federation.message import Ask, Reply


class RowsStandIns:
    """Sites that hold rows of the same columns, by what was agreed on.

    Parameters
    ----------
    agreement : RowsAgreement
    """

    def __init__(self, agreement: RowsAgreement) -> None:
        self.agreement = agreement
        self.n = {row.site: row.n for row in agreement.sites}
        self.names, self.term_names = coded_names(agreement)

    @property
    def p(self) -> int:
        """Design columns, the intercept among them."""
        return len(self.names) + int(self.agreement.question.intercept)

    def answers(self) -> Answers:
        """How they answer the design's steps."""
        return {(FAMILY, "open_rows"): self._open_rows, (FAMILY, "sum_columns"): self._sum_columns}

    def _open_rows(self, site: StandIn, ask: Ask) -> Reply:
        n = self.n[site.name]
        site.hold("minimum count, maximum parameters", check_rows, site.data, n, self.p)
        site.columns = len(self.names)
        text = json.dumps({"names": self.names, "term_names": self.term_names})
        return site.reply(text=text, entities=n)

    def _sum_columns(self, site: StandIn, ask: Ask) -> Reply:
        """Columns of mean 0 and variance 1."""
        n = float(self.n[site.name])
        moments = np.tile([[n], [0.0], [n], [0.0]], self.p)
        return site.reply({"moments": moments}, entities=int(n))


def coded_names(agreement: RowsAgreement) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the design columns without the intercept, and the term of each: no row is needed for that."""
    spec, terms = agreement.spec, agreement.question.read_terms()
    if not terms:
        return (), ()
    empty = {name: pd.Series([], dtype=float) for name in spec.columns}
    empty |= {name: pd.Series(pd.Categorical([], levels)) for name, levels in spec.levels.items()}
    coded = code_rows(empty, terms, spec, 0, "")
    return coded.names, coded.term_names


def rows_notes() -> Iterator[str]:
    """Say what cannot be told without rows."""
    yield (
        "Some rules need the rows, and only the site can apply them: minimum events, minimum rows per level, "
        "answers that differ in a few rows, and rows that a coefficient or a weight would single out."
    )
