"""Kernels of generalized linear models: families, sums over rows, fits of one site.

Read ``distributions`` (families and links), then ``sums`` (rows and their sums at coefficients).
``local_fit`` fits the rows of one site, ``effects`` sums what marginal effects and robust errors need,
``negative_binomial`` and ``quadrature`` are for likelihoods without a canonical link, and ``fedavg`` takes
gradient steps.
"""
