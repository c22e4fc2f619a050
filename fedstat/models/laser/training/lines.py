"""A line that tells how far the training has come."""

from __future__ import annotations

import sys
import time


class EpochLines:
    """Write one line per epoch to the standard error: losses, seconds, and the time that is left."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.begun = epochs, time.monotonic()

    def __call__(self, epoch: int, loss: float, ahead: float) -> None:
        """Write the line of an epoch, counted from zero."""
        seconds = time.monotonic() - self.begun
        left = seconds / (epoch + 1) * (self.epochs - epoch - 1)
        print(
            f"epoch {epoch + 1:>3} of {self.epochs}  loss {loss:.4f}  held back {ahead:.4f}  "
            f"{seconds:.1f} s  about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def no_lines(epoch: int, loss: float, ahead: float) -> None:
    """Write nothing."""
