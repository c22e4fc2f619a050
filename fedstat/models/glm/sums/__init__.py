"""What sums over sites come to: records of a fit, its problems, and what follows from sums alone."""
