"""Small example data sets, made by fedstat.datasets."""
