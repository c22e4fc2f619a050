"""Shared by families whose sites hold different rows: model, rows, predictions, evaluation."""

from fedstat.models.horizontal import evaluation

__all__ = ["evaluation"]
