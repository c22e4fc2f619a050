"""Sums of products of columns of several institutions: one exchange, by missing pattern or by fold."""
