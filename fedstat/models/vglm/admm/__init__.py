"""The sharing form of ADMM: coefficients stay with the institutions until a fit has converged."""
