"""Partition: the data of one analysis, distributed over sites."""
