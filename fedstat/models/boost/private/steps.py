"""What one institution answers for private boosting: who is complete, and its part of the noisy products.

The products, their noise and its price are those of private synthesis (:mod:`fedstat.models.copula.steps`);
the scores are of what is public of curves and columns, so that nothing is released before them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import DescriptionError
from fedstat.federation.door.facts import Entities
from fedstat.federation.door.owner.charging import NoiseOwed
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.models.boost.private.asked import CurvesSummed, radius_with, response_weight
from fedstat.models.boost.private.public import PublicPart
from fedstat.models.copula import steps as noisy_products
from fedstat.models.copula.asked import PLACES, squared_radius
from fedstat.models.copula.steps import (
    ask_columns,
    by_question,
    digest_of,
    fewest,
    noisy,
    read_question,
    sum_scores,
)
from fedstat.privacy.sensitivity import cut_rows
from fedstat.records import from_json, to_json
from fedstat.typing import Array, Floats, Ints

FAMILY = "boost_private"
COMPLETE = "rows that have all curves and columns"
ReadScores: TypeAlias = Callable[[SiteData, tuple[PublicPart, ...]], Floats]


def find_complete(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Tell which rows have all that is asked for, curves without a long gap: ``seen`` (n_rows,)."""
    parts = read_question(tuple[PublicPart, ...], text, f"{data.name}: the columns asked for")
    ask_columns(data, state, [part.name for part in parts])
    seen = np.ones(data.table.n_rows, dtype=np.bool_)
    for part, column in zip(parts, _columns(data, parts), strict=True):
        seen &= ~part.missing(column)
    state.keep(COMPLETE, (parts, seen))
    return {"seen": seen}, ""


def _columns(data: SiteData, parts: tuple[PublicPart, ...]) -> list[pd.Series]:
    return [data.frame[part.name] for part in parts]


def read_scores(data: SiteData, parts: tuple[PublicPart, ...]) -> Floats:
    """Scores of every row, (n_rows, q)."""
    return np.hstack([part.scores(column) for part, column in zip(parts, _columns(data, parts), strict=True)])


def cut_scores(asked: CurvesSummed, scores: Floats) -> Ints:
    """Cut a row's part of the right side, and its response, to their lengths, in units of 2^-PLACES."""
    x, y = np.split(scores, [asked.own], axis=1)
    cut = [cut_rows(x, squared_radius(asked.own), PLACES)] if asked.own else []
    if asked.holds:
        radius = radius_with(0, asked.others, asked.response)
        cut.append(cut_rows(response_weight(asked.others, asked.response) * y, radius, PLACES))
    return np.hstack(cut)


def release_gram(
    read: ReadScores, data: SiteData, state: State, text: str, group: Ints
) -> tuple[dict[str, Array], str]:
    """Sum products, squares and the scores themselves: ``grams`` (1, q (q - 1) / 2 + 2 q).

    `group` (n_rows,) is 0 of rows that take part, and -1 of others. The scores stay for the products with
    other institutions, whose noise is paid for here as well.
    """
    asked = read_question(CurvesSummed, text, f"{data.name}: the products asked for")
    with by_question():
        check_lengths(data.name, group=(group, data.table.n_rows))
        parts, seen = state.use(COMPLETE, tuple, "who is complete comes first; ask 'find_complete'")
    if (
        parts != asked.parts
        or asked.site != data.name
        or (group[~seen] >= 0).any()
        or group.max(initial=-1) > 0
    ):
        raise DescriptionError(
            f"{data.name}: expected products of the columns that were asked for, of whole rows"
        )
    canonical = f"{to_json(asked)} {digest_of(group)} {secrets.token_hex(16)}"
    owed = NoiseOwed("grams", canonical, asked.squared_here(), Fraction(asked.variance))
    state.tell(Entities(fewest(group)), owed)
    scores = cut_scores(asked, read(data, asked.parts))
    return {"grams": sum_scores(state, asked, scores, group, canonical)}, ""


def invented_complete(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Say that all rows are complete which are not there."""
    seen = np.ones(data.table.n_rows, dtype=np.bool_)
    state.keep(COMPLETE, (from_json(tuple[PublicPart, ...], text, data.name), seen))
    return {"seen": seen}, ""


def invented_scores(data: SiteData, parts: tuple[PublicPart, ...]) -> Floats:
    """Draw scores of rows that are not there."""
    q = sum(part.width for part in parts)
    return np.random.default_rng(0).normal(size=(data.table.n_rows, q))


def gram_step(read: ReadScores) -> Step:
    """Make the step that sums scores as read by a function."""
    return Step(
        partial(release_gram, read),
        {"group": noisy_products.GROUP},
        {"grams": noisy("sums of products of scores of the site's own columns, and of these, with noise", 2)},
        Declared("control", "what is public of the columns, variance of the noise"),
        after=frozenset({"find_complete"}),
    )


def complete_step(run: Callable[..., object]) -> Step:
    """Make the step that says who is complete."""
    return Step(
        run, {}, noisy_products.COMPLETE, Declared("control", "what is public of columns"), begins=True
    )


STEPS: Mapping[str, Step] = {
    "find_complete": complete_step(find_complete),
    "release_gram": gram_step(read_scores),
    **{
        name: replace(noisy_products.STEPS[name])
        for name in ("deal_product", "open_product", "share_product")
    },
}
INSTEAD = {
    (FAMILY, "find_complete"): complete_step(invented_complete),
    (FAMILY, "release_gram"): gram_step(invented_scores),
}
"""Steps that stand for those that read rows where there are none."""
