"""Kernels of generalized linear models: families, sums over rows, fits of one site."""
