"""One round: rows are opened, and what learners and response add up to is summed over all sites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat import records
from fedstat.federation.design.by_rows import open_asks
from fedstat.federation.message import Reply
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.boost.learning.columns import CurvesAsked
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.horizontal.session import RowsSession, add

NAMES = ("gram", "score", "spread", "totals")


def take_moments(session: RowsSession, asked: CurvesAsked, by_site: bool = False) -> Rounds[CurveMoments]:
    """Open the rows, and ask every site for its sums; `by_site` makes each of them a fold of its own."""
    answers = yield from _answers(session, asked)
    if by_site:
        return CurveMoments.of({name: np.concatenate([a.arrays[name] for a in answers]) for name in NAMES})
    return CurveMoments.of({name: np.asarray(add(answers, name)) for name in NAMES})


def take_own_moments(session: RowsSession, asked: CurvesAsked) -> Rounds[tuple[CurveMoments, ...]]:
    """Take the sums of every site, in the clear: what local fits and their averages are made of."""
    answers = yield from _answers(session, asked)
    return tuple(CurveMoments.of({name: one.arrays[name] for name in NAMES}) for one in answers)


def _answers(session: RowsSession, asked: CurvesAsked) -> Rounds[Sequence[Reply]]:
    opening = open_asks(session.agreement, session.session)
    replies = yield opening + session.ask_all("sum_curves", {}, records.to_json(asked))
    return replies[len(opening) :]
