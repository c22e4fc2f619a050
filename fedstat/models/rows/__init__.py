"""One likelihood over rows: what a site sums for it, the steps that release the sums, and its maximum.

Read ``objective`` (what a family writes: derivatives of each row), then ``steps`` (what sites answer for it),
``newton`` (how a coordinator finds the maximum, and a site its own), and ``predictors`` (what the fit of a
likelihood with linear predictors holds). In ``estimated_weights`` are the sums by which models of rows that a
propensity model weights account for it.
"""
