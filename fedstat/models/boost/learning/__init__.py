"""Base learners, their sums, and the paths of boosting."""
