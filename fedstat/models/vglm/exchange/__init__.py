"""Sums of products of the columns of several institutions, by fold or with weights."""
