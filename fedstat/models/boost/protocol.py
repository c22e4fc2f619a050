"""One round: rows are opened, and what learners and response add up to is summed over all sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedstat import records
from fedstat.federation.design.by_rows import open_asks
from fedstat.federation.message import Reply
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.boost.learning.columns import CurvesAsked
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.learning.responses import EVEN, UNEVEN
from fedstat.models.boost.learning.uneven import UnevenMoments
from fedstat.models.boost.learning.varying import MEANS, VARYING, VaryingMoments
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Array, Floats


def take_moments(session: RowsSession, asked: CurvesAsked, by_site: bool = False) -> Rounds[CurveMoments]:
    """Open the rows, and ask every site for its sums; `by_site` makes each of them a fold of its own."""
    answers = yield from _answers(session, asked, "sum_curves")
    return CurveMoments.of(_together(answers, EVEN, by_site))


def take_uneven_moments(
    session: RowsSession, asked: CurvesAsked, basis: Floats, by_site: bool = False
) -> Rounds[UnevenMoments]:
    """Take the sums of a response whose curves have points of their own; `basis` (G, L) where it is shown."""
    answers = yield from _answers(session, asked, "sum_uneven_curves")
    return _uneven(_together(answers, UNEVEN, by_site), asked, basis)


def take_varying_moments(
    session: RowsSession, asked: CurvesAsked, basis: Floats, t: Floats, *, uneven: bool, by_site: bool = False
) -> Rounds[tuple[CurveMoments | UnevenMoments, VaryingMoments]]:
    """Take the sums of either kind, and those of columns that vary along the response, shown at points t."""
    answers = yield from _answers(session, asked, "sum_uneven_curves_along" if uneven else "sum_curves_along")
    along = VaryingMoments.of(_together(answers, VARYING if uneven else (*VARYING, MEANS), by_site), t)
    sums = _together(answers, UNEVEN if uneven else EVEN, by_site)
    return (_uneven(sums, asked, basis) if uneven else CurveMoments.of(sums)), along


def take_own_moments(session: RowsSession, asked: CurvesAsked) -> Rounds[tuple[CurveMoments, ...]]:
    """Take the sums of every site, in the clear: what local fits and their averages are made of."""
    answers = yield from _answers(session, asked, "sum_curves")
    return tuple(CurveMoments.of({name: one.arrays[name] for name in EVEN}) for one in answers)


def _uneven(sums: Mapping[str, Array], asked: CurvesAsked, basis: Floats) -> UnevenMoments:
    told = None if asked.offset is None else np.array(asked.offset[1])
    return UnevenMoments.of(sums, basis, 0 if asked.time is None else asked.time.degree, told)


def _together(answers: Sequence[Reply], names: Sequence[str], by_site: bool) -> dict[str, Array]:
    """Add up over all sites, or take each site's as a fold."""
    if by_site:
        return {name: np.concatenate([one.arrays[name] for one in answers]) for name in names}
    return {name: np.asarray(add(answers, name)) for name in names}


def _answers(session: RowsSession, asked: CurvesAsked, step: str) -> Rounds[Sequence[Reply]]:
    opening = open_asks(session.agreement, session.session)
    replies = yield opening + session.ask_all(step, {}, records.to_json(asked))
    return replies[len(opening) :]
