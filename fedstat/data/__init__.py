"""Small example data sets, made by fedstat.datasets; a source tree has their files at its top, in data/."""
