"""Split neural networks over any subset of sites (LASER), and the methods compared with it."""

from fedstat.models.laser import joint_representation, response_steps, steps

__all__ = ["joint_representation", "response_steps", "steps"]
