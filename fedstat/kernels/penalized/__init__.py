"""Kernels of penalized estimation: penalties, groups, coordinate descent, solution paths."""
