"""A line that tells how far the training has come."""

from __future__ import annotations

from fedstat.progress_line import ProgressLine


class EpochLines(ProgressLine):
    """Tells of every epoch, with losses, and of the time that is left."""

    def __init__(self, epochs: int) -> None:
        super().__init__("epoch", epochs)

    def __call__(self, epoch: int, loss: float, ahead: float) -> None:
        """Tell of an epoch, counted from zero."""
        self.step(epoch + 1, f"loss {loss:.4f}  held back {ahead:.4f}")
