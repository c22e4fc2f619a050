"""Kernels of penalized estimation: penalties, groups, coordinate descent, solution paths.

Read ``penalties`` (values, slopes and thresholds), then ``path`` (the solutions from the largest lambda on).
``coordinate_descent`` solves one problem with a Gram matrix, ``group_prox`` the step of one group, and
``nodewise`` regresses every column on all others.
"""
