"""Learners, their columns and sums, and the path of boosting."""
