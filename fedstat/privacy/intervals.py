"""How well two data sets are told apart at least, from the guesses of a test over many releases.

References
----------
Dong, J., Roth, A. and Su, W. (2022). Gaussian differential privacy. Journal of the Royal Statistical Society
B 84, 3-37. arXiv 1905.02383.
Nasr, M. et al. (2023). Tight auditing of differentially private machine learning. USENIX Security.
"""

from __future__ import annotations

from scipy.special import ndtri
from scipy.stats import beta

from fedstat.errors import ModelError


def mu_interval(hits: int, trials: int, alpha: float) -> tuple[float, float]:
    """Bound the mu that a test has shown, which guessed right so many times of fair coins.

    A mechanism that is mu-GDP lets no test be right with a probability above Phi(mu / 2). By Clopper and
    Pearson, each end wrong with a probability of alpha / 2 at most; an end below zero is 0. The lower one
    bounds mu from below for any test, the upper one only what this test shows. A ModelError where an argument
    is out of its range.
    """
    if not (0 <= hits <= trials and trials > 0 and 0.0 < alpha < 1.0):
        raise ModelError(f"expected hits of trials and alpha in (0, 1), received {hits}, {trials}, {alpha!r}")
    low = float(beta.ppf(alpha / 2.0, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1.0 - alpha / 2.0, hits + 1, trials - hits)) if hits < trials else 1.0
    return max(0.0, 2.0 * float(ndtri(low))), max(0.0, 2.0 * float(ndtri(high)))
