"""One fit of the normal family with missing blocks, from its arguments to its outcome."""

from __future__ import annotations

import numpy as np

from fedstat.models.vertical.likelihood import Standard
from fedstat.models.vglm.em import Observed, blocks_path, exchange_blocks, refit_blocks
from fedstat.models.vglm.fit import Plan, Run
from fedstat.models.vglm.outcome import Outcome
from fedstat.models.vglm.path import choose, score_path
from fedstat.models.vglm.protocol import Fitted


def fit_blocks(plan: Plan, max_moved: float, run: Run) -> Outcome:
    """Fit the normal family from sums by missing pattern, that are exchanged once."""
    layout, setup = plan.layout, plan.setup
    blocks = run(exchange_blocks(layout, plan.family, plan.session, plan.at, plan.min_count, max_moved))
    standard = Standard(blocks.moments)
    found, n = blocks_path(standard, setup), int(standard.moments.nobs)
    criteria = score_path(found.path, n)
    chosen = choose(criteria, plan.select)
    support = np.ones(layout.p, dtype=bool) if setup.unpenalised else found.path.selected[chosen]
    refit, explained = refit_blocks(standard, support)
    null = n / -2.0 * (np.log(2.0 * np.pi * found.units.sd**2) + 1.0)
    fitted = Fitted(found.path, chosen, refit, 0, 0, blocks.dealers)
    rsquared = explained if setup.unpenalised else float(found.rsquared[chosen])
    observed = Observed(blocks, rsquared, explained, found.means[chosen])
    return Outcome(
        fitted, criteria, plan.select, setup, float(null), found.units, 1, False, observed=observed
    )
