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
# Forecast of a private boosting: what it costs, how large noise is, what an attack could find.


def tracing_statement(plan: CurvesPlan, n: float) -> str:
    """Say what bounds an attack that asks whether a record is there, and what it would find without noise."""
    columns = sum(map(plan.width, plan.parts)) + 1
    exact = float(ndtr(columns / (2.0 * math.sqrt(n))))
    bound = largest_auc(float(plan.coordinator_cost()))
    return (
        f"who knows all values of a person and asks whether these are among the {n:,.0f} entities has an AUC "
        f"of at most {bound:.2f}, whatever they know besides, by the budget (.5 is chance); without noise it "
        f"would be about {exact:.2f} for the usual person, and more for others"
    )


def noise_statement(plan: CurvesPlan, n: int) -> str:
    """Say how large noise is beside what is to be told."""
    correlation = math.sqrt(2.0) * plan.deviation / n
    return (
        f"Noise on a mean product of two standardised columns at two institutions has a deviation of "
        f"{correlation:.2g}, with the response {correlation / plan.weight:.2g}; sampling has "
        f"{1.0 / math.sqrt(max(n, 1)):.2g}."
    )


def budget_notes(plan: CurvesPlan, n: int, epsilon: float, delta: float) -> Iterator[str]:
    """Say how large noise is over so many entities, what would do, and what one release serves for."""
    yield noise_statement(plan, n)
    correlation = math.sqrt(2.0) * plan.deviation / n
    if correlation > RIDGE:
        factor = correlation / RIDGE
        more = epsilon_of_zcdp(plan.rho * round(1000 * factor**2) / 1000, delta)
        yield (
            f"That is more than {RIDGE}: little will be told. About {math.ceil(n * factor):,} entities would "
            f"do at epsilon {epsilon:g}, or an epsilon of about {more:.2g} at {n:,}; fewer functions of each "
            "curve need less."
        )
    yield (
        "One release, whatever the number of steps: steps, their length and refits of the same model ask for "
        "nothing more."
    )


# ----------------------------------------------------------------------------------------------------
# Sentences below the summary of a private release of curves.


def release_notes(released: ReleasedCurves, delta: float) -> Iterator[Note]:
    """Say what a release cost, how large its noise is, and what an attack could find."""
    for text in cost_statements(released.plan, delta):
        yield Note("cost", text)
    yield Note("noise", noise_statement(released.plan, released.n))
    yield Note("tracing", f"Tracing: {tracing_statement(released.plan, released.n)}.")
    lost = {c: count - released.n for c, count in released.entities.items() if count > released.n}
    if lost:
        yield Note(
            "left_out",
            "Entities that are not complete at every institution are left out: "
            f"{', '.join(f'{count:,} at {client}' for client, count in lost.items())}.",
        )
