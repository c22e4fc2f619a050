"""What one institution answers for boosting where others hold other columns.

Its learners' columns, and the response in its basis, become one block, which is summed and multiplied as the
blocks of other families are (:mod:`fedstat.models.vertical.exchange.steps`). Besides, released by fold by the
holder of the response: `totals`, sums of the response at each of its points, and of its square, (F, G + 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedstat import records
from fedstat.errors import MessageError
from fedstat.federation.design.block import CodedBlock
from fedstat.federation.design.by_columns import block_of, response_of
from fedstat.federation.design.detail import columns_detail
from fedstat.federation.design.formula.asked import columns_asked, response_asked, terms_asked
from fedstat.federation.design.formula.terms import parse_terms
from fedstat.federation.design.spec import BlockSpec
from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.facts import (
    DesignDirections,
    Entities,
    FactorAsked,
    GroupSums,
    RowCount,
    SummedColumns,
)
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.tables.bits import ColumnsDetail
from fedstat.federation.tables.curves.array import curves_of
from fedstat.models.boost.learning.columns import learner_columns, smooth_asked, time_basis
from fedstat.models.boost.vertical.question import ColumnsMade, CurvesOpened
from fedstat.models.vertical.exchange.dither import dithered
from fedstat.models.vertical.exchange.staged import require_groups, staged_block
from fedstat.models.vertical.exchange.steps import CODE, GROUPS, ExchangeRules, exchange_steps, sum_products
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "boost_vertical"
RULES = ExchangeRules(remembers=True, flat=True)
POINTS, WIDTH = "response at its points", "columns of all institutions"


def open_curves(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Say which rows have the curves that are asked for, without a long gap: ``seen`` (n_rows,).

    A response is to be measured at all of its points.
    """
    asked = records.from_json(CurvesOpened, text, f"{data.name}: the question about curves")
    names = (*asked.curves, *([asked.response] if asked.response else []))
    state.tell(columns_asked(names))
    absent = [name for name in names if name not in data.table.columns]
    if absent or not names:
        raise MessageError(f"{data.name}: has no curve {', '.join(map(repr, absent)) or 'that is asked for'}")
    state.play(names)
    seen = np.ones(data.table.n_rows, dtype=np.bool_)
    for name in asked.curves:
        seen &= ~curves_of(data.frame[name]).gappy()
    if asked.response:
        seen &= ~np.isnan(curves_of(data.frame[asked.response]).values).any(axis=1)
    return {"seen": seen}, ""


def make_columns(data: SiteData, state: State, text: str, use: Bools) -> tuple[dict[str, Array], str]:
    """Make the columns of the learners, and of the response in its basis, of the rows in `use`, (n_rows,).

    Columns without a value, and constants, stay: they are zero once they are standardised.
    """
    asked = records.from_json(ColumnsMade, text, f"{data.name}: the columns asked for")
    check_lengths(data.name, use=(use, data.table.n_rows))
    state.tell(smooth_asked(asked.learners), columns_asked(asked.curves))
    state.play(asked.curves)
    spec, coded = BlockSpec(data.name), np.empty((int(use.sum()), 0))
    if any(one.terms for one in asked.learners):
        block = block_of(state)
        if (use & ~block.seen).any():
            raise MessageError(f"{data.name}: array 'use' names rows that lack columns of the formula")
        spec, coded = block.spec, block.X[use[block.seen]]
    frame = data.frame[use]
    made = [learner_columns(one, frame, coded, spec.term_names) for one in asked.learners]
    if asked.response:
        Y = response_of(state)[use][:, None] if asked.number else curves_of(frame[asked.response]).values
        if not np.isfinite(Y).all():
            raise MessageError(f"{data.name}: array 'use' names rows without a response")
        grid = np.zeros(1) if asked.number else curves_of(frame[asked.response]).grid
        made.append(Y @ time_basis(asked.time, grid))
        state.keep(POINTS, Y, len(Y))
    for label, Z in zip([*(one.label for one in asked.learners), asked.response], made, strict=False):
        _tell_directions(state, label, Z)
    X = np.ascontiguousarray(np.column_stack(made))
    state.keep(WIDTH, asked.columns)
    state.keep("block", CodedBlock(spec, use, X, 0), len(X), columns=X.shape[1])
    state.keep("block detail", _detail(data, asked, spec, [part.shape[1] for part in made]))
    return {}, ""


def _tell_directions(state: State, label: str, Z: Floats) -> None:
    """Tell of the columns of one learner, (n, k), each at a mean square of one: whom they single out."""
    size = np.sqrt((Z * Z).mean(axis=0)) if len(Z) else np.ones(Z.shape[1])
    parts = [Z / np.where(size > 0.0, size, 1.0)]
    names = [f"{label}[{j}]" for j in range(Z.shape[1])]
    state.tell(DesignDirections(parts.__iter__, len(Z), names))


def _detail(data: SiteData, asked: ColumnsMade, spec: BlockSpec, widths: list[int]) -> ColumnsDetail | None:
    """Say which of the columns are made of columns of few values, where the site's owner asks for that."""
    if data.policy.discrete == "any":
        return None
    factors: list[Sequence[FactorAsked]] = []
    for one, width in zip(asked.learners, widths, strict=False):
        read = [factor for term in one.terms for factor in terms_asked(parse_terms(term).terms).factors]
        factors += [read] * width
    if asked.response:
        factors += [response_asked(asked.response).factors if asked.number else []] * widths[-1]
    return columns_detail(data, factors)


def sum_products_by_fold(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum columns and their products by fold, where there are rows for the columns of all institutions."""
    counts = np.bincount(code[code >= 0], minlength=1)
    width = max(state.look_at(WIDTH), staged_block(state).X.shape[1])
    state.tell(RowCount(int(counts[counts > 0].min(initial=len(code))), width))
    return sum_products(RULES, data, state, code, groups)


def sum_points(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum the response at each of its points, and its square, by fold: ``totals`` (F, G + 1)."""
    staged, F = staged_block(state), int(groups)
    Y = dithered(data, state.use(POINTS, np.ndarray))[staged.keep]
    check_lengths(data.name, code=(code, len(Y)))
    require_groups(data.name, code, F, Y.shape[1] + 1)
    state.tell(GroupSums(code), SummedColumns(Y, code))
    members = [Y[code == f] for f in range(F)]
    return {"totals": np.array([np.append(rows.sum(axis=0), (rows * rows).sum()) for rows in members])}


USE = Declared("presence", "rows that have all that the formula reads here, and a response", dtype="bool")
EXCHANGED = exchange_steps(RULES)
_SUMS = EXCHANGED["sum_products"]
STEPS: Mapping[str, Step] = in_order(
    {
        "open_curves": Step(
            open_curves,
            gives={"seen": Declared("presence", "which rows have the curves", dtype="bool")},
            text_in=Declared("schema", "curves of the formula"),
        ),
        "make_columns": Step(
            make_columns,
            {"use": USE},
            text_in=Declared("control", "learners, with the ends of their bases; the basis of the response"),
        ),
        "sum_products": replace(
            _SUMS,
            run=sum_products_by_fold,
            gives={name: replace(one, behind=(*one.behind, RowCount)) for name, one in _SUMS.gives.items()},
        ),
        "sum_points": Step(
            sum_points,
            {"code": CODE, "groups": GROUPS},
            {
                "totals": Declared(
                    "aggregate",
                    "sums of the response at its points, and of its square, by fold",
                    2,
                    behind=(Entities, GroupSums, SummedColumns),
                )
            },
        ),
        **{
            name: EXCHANGED[name] for name in ("stage_block", "deal_product", "open_product", "share_product")
        },
    },
    {
        "sum_products": "stage_block",
        "sum_points": "sum_products",
        "open_product": "deal_product open_product sum_products sum_points",
        "share_product": "open_product share_product",
    },
)
