"""From released moments to coefficients, their errors and a selection: no site is asked."""
