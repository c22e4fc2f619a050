"""Base learners, their sums, and the paths of boosting.

``learners`` reads a formula, ``columns`` and ``varying`` give the design columns, ``moments`` their sums by
fold. ``prepared_learners`` fixes centering and smoothing, and ``boosting`` follows a path of ``losses``.
``selection`` chooses where it stops, ``knots`` tests the bases, and ``baselines`` are published alternatives.
"""
