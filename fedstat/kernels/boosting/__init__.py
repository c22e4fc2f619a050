"""Boosting with curves: bases along a curve, and paths of steps from sums of products."""
