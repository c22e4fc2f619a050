"""Regression where blocks of whole sites are missing (VFEM)."""

from fedstat.models.vfem import joint_steps, prediction_steps, steps
from fedstat.models.vfem.iteration import steps as iteration_steps

__all__ = ["iteration_steps", "joint_steps", "prediction_steps", "steps"]
