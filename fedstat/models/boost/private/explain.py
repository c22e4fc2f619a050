"""Dry run and notes of private boosting: cost, noise, and attack success."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scipy.special import ndtr

from fedstat.inference.summary import Note
from fedstat.models.boost.private.protocol import RIDGE, ReleasedCurves
from fedstat.models.boost.private.steps import CurvesPlan
from fedstat.models.copula.explain import cost_statements
from fedstat.privacy.gaussian_dp import largest_auc
from fedstat.privacy.zcdp import epsilon_of_zcdp

# ----------------------------------------------------------------------------------------------------
# Expectations of a private boosting: its cost, size of the noise, and success of an attack.


def tracing_statement(plan: CurvesPlan, n: float) -> str:
    """State the bound of a membership inference attack, and its success without noise."""
    columns = sum(map(plan.width, plan.parts)) + 1
    exact = float(ndtr(columns / (2.0 * math.sqrt(n))))
    bound = largest_auc(float(plan.coordinator_cost()))
    return (
        f"an attacker who knows a person's full record can detect that it is among the {n:,.0f} entities "
        f"with AUC at most {bound:.2f}, by the budget and with any further knowledge (0.5 = chance). "
        f"Without noise the AUC would be about {exact:.2f} for a typical person, and more for others"
    )


def noise_statement(plan: CurvesPlan, n: int) -> str:
    """State the size of the noise relative to sampling."""
    correlation = math.sqrt(2.0) * plan.deviation / n
    return (
        f"Noise on a mean product of two standardized columns at two sites has standard deviation "
        f"{correlation:.2g}, with the response {correlation / plan.weight:.2g}; sampling has "
        f"{1.0 / math.sqrt(max(n, 1)):.2g}."
    )


def budget_notes(plan: CurvesPlan, n: int, epsilon: float, delta: float) -> Iterator[str]:
    """State the size of the noise for this number of entities, remedies, and what one release covers."""
    yield noise_statement(plan, n)
    correlation = math.sqrt(2.0) * plan.deviation / n
    if correlation > RIDGE:
        factor = correlation / RIDGE
        more = epsilon_of_zcdp(plan.rho * round(1000 * factor**2) / 1000, delta)
        yield (
            f"That is more than {RIDGE}: results will be poor. About {math.ceil(n * factor):,} entities "
            f"would suffice at epsilon {epsilon:g}, or an epsilon of about {more:.2g} at {n:,}; fewer "
            "functions of each curve need less."
        )
    yield (
        "One release, whatever the number of steps: steps, their length and refits of the same model send "
        "no further request."
    )


# ----------------------------------------------------------------------------------------------------
# Sentences below the summary of a private release of curves.


def release_notes(released: ReleasedCurves, delta: float) -> Iterator[Note]:
    """State the cost of a release, the size of its noise, and the success of an attack."""
    for text in cost_statements(released.plan, delta):
        yield Note("cost", text)
    yield Note("noise", noise_statement(released.plan, released.n))
    yield Note("tracing", f"Membership inference: {tracing_statement(released.plan, released.n)}.")
    lost = {c: count - released.n for c, count in released.entities.items() if count > released.n}
    if lost:
        yield Note(
            "left_out",
            "Entities that are not complete at every site are left out: "
            f"{', '.join(f'{count:,} at {site}' for site, count in lost.items())}.",
        )
