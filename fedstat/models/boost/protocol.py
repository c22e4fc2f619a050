"""One round: rows are opened, and what learners and response add up to is summed over all sites."""

from __future__ import annotations

import numpy as np

from fedstat import records
from fedstat.federation.design.by_rows import open_asks
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.boost.learning.columns import CurvesAsked
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.horizontal.session import RowsSession, add

NAMES = ("gram", "score", "spread", "totals")


def take_moments(session: RowsSession, asked: CurvesAsked) -> Rounds[CurveMoments]:
    """Open the rows, and ask every site for its sums."""
    opening = open_asks(session.agreement, session.session)
    replies = yield opening + session.ask_all("sum_curves", {}, records.to_json(asked))
    answers = replies[len(opening) :]
    return CurveMoments.of({name: np.asarray(add(answers, name)) for name in NAMES})
