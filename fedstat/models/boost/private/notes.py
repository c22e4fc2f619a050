"""Sentences below the summary of a private release of curves."""

from __future__ import annotations

from collections.abc import Iterator

from fedstat.models.boost.private.explain import noise_statement, tracing_statement
from fedstat.models.boost.private.protocol import ReleasedCurves
from fedstat.models.copula.explain import cost_statements


def release_notes(released: ReleasedCurves, delta: float) -> Iterator[str]:
    """Say what a release cost, how large its noise is, and what an attack could find."""
    yield from cost_statements(released.plan, delta)
    yield noise_statement(released.plan, released.n)
    yield f"Tracing: {tracing_statement(released.plan, released.n)}."
    lost = {c: count - released.n for c, count in released.entities.items() if count > released.n}
    if lost:
        yield (
            "Entities that are not complete at every institution are left out: "
            f"{', '.join(f'{count:,} at {client}' for client, count in lost.items())}."
        )
