"""What cannot be told of a fit over sites with different rows before it runs."""

from __future__ import annotations

from collections.abc import Iterator


def rows_notes() -> Iterator[str]:
    """Say what cannot be told without rows."""
    yield (
        "Some rules need the rows, and only the site can apply them: minimum events, minimum rows per level, "
        "answers that differ in a few rows, and rows that a coefficient or a weight would single out."
    )
