"""How well predictions agree with the response of a partition: counted at the institution that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedstat.errors import DataWarning, ModelError, warn
from fedstat.federation.design.by_columns import design_ask
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.laser.report.prediction import FittedNetworks, hidden, open_networks, predicted
from fedstat.models.laser.training.asked import FAMILY
from fedstat.models.laser.training.scoring import ScoreCounts, read_scores
from fedstat.models.vertical.prediction.coding import ResponseSource
from fedstat.models.vertical.prediction.protocol import OpenedBlocks, new_ledger
from fedstat.records import to_json
from fedstat.typing import Bools


def count_predictions(
    fitted: FittedNetworks,
    response: ResponseSource,
    partition: ClientPartition,
    call: str = "evaluate()",
    permuted: Sequence[tuple[str, int] | None] = (None,),
) -> list[ScoreCounts]:
    """Count how well predictions agree with the response of a partition, by set of institutions.

    Once for each institution whose columns are `permuted`, by a number, and once for None, as they are.
    """
    holder = response.client
    if holder not in partition.sites:
        raise ModelError(f"{call}: the partition lacks institution '{holder}', which has the response")

    def asking() -> Rounds[list[ScoreCounts]]:
        opened = yield from open_networks(fitted, partition)
        question = {"response": response.text, "columns": response.columns}
        (reply,) = yield [design_ask(holder, "open_response", opened.session, question)]
        return (yield from hidden(fitted, opened, counting(opened, reply.arrays["has"])))

    def counting(opened: OpenedBlocks, has: Bools) -> Rounds[list[ScoreCounts]]:
        counts = []
        for one in permuted:
            found = yield from predicted(fitted, opened, partition, permuted=one)
            rows = partition.rows[holder]
            use = found.sets[rows] > 0
            sets, code = np.unique(found.sets[rows[use]], return_inverse=True)
            units = np.array([fitted.trained.mean, fitted.trained.sd, len(sets)])
            arrays = {"predicted": found.predicted[rows[use]], "use": use, "code": code, "units": units}
            to = Conversation(FAMILY, opened.session, None)
            (reply,) = yield [to.ask(holder, "score", to_json(fitted.trained.outcome), **arrays)]
            counts.append(read_scores(reply, sets))
            if len(counts) == 1:
                asked = np.bincount(code[has[use]], minlength=len(sets))
                # Sets with too few entities have no counts.
                other = int((asked - counts[0].n)[counts[0].n > 0].sum())
                if other:
                    warn(
                        f"{call}: {other:,} entities do not count: their '{response.text}' at '{holder}' is "
                        "of a class that the fit did not have; leave them out, or fit with some of them",
                        DataWarning,
                    )
        return counts

    analysis = fitted.analysis(call, partition)
    columns = {**analysis.columns, holder: (*analysis.columns.get(holder, ()), *response.columns)}
    analysis = replace(analysis, columns=columns)
    return analysis.run(asking(), asking, new_ledger(partition, holder))
