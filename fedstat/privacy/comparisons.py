"""What randomised answers to yes-or-no questions about one record cost together, exactly.

A published mechanism for ranks flips every comparison of two records with probability 1 / (1 + e^a) and
calls that a budget of a. A record takes part in n - 1 comparisons of every column, and with each of them in
a sum that shows it: its own budget is that of all of them.

References
----------
Kairouz, P., Oh, S. and Viswanath, P. (2017). The composition theorem for differential privacy. IEEE
Transactions on Information Theory 63, 4037-4049. arXiv 1311.0776.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import binom

from fedstat.errors import ModelError

FAR = 12.0
"""Standard deviations, beyond which a number of answers has a probability below any delta."""


def record_epsilon(answers: int, answer_epsilon: float, delta: float = 1e-6) -> float:
    """Return the smallest epsilon, at a delta, of so many randomised answers about one record.

    Each has `answer_epsilon`, a. In the worst case replacing the record changes every answer; then delta is
    sum_k Bin(answers, q)(k) max(0, 1 - exp(eps - (2k - answers) a)), q = 1 / (1 + e^-a): Kairouz, Oh and
    Viswanath (2017), theorem 3.3, of pure answers. A ModelError where an argument is out of its range.
    """
    if not (answers >= 1 and answer_epsilon > 0.0 and 0.0 < delta < 1.0):
        raise ModelError(
            f"expected at least one answer, epsilon above 0 and delta between 0 and 1; received {answers!r}, "
            f"{answer_epsilon!r} and {delta!r}"
        )
    q = float(expit(answer_epsilon))
    middle, far = answers * q, FAR * np.sqrt(answers * q * (1.0 - q)) + 20.0
    k = np.arange(max(0, int(middle - far)), min(answers, int(middle + far)) + 1)
    share, loss = binom.pmf(k, answers, q), (2.0 * k - answers) * answer_epsilon

    def excess(epsilon: float) -> float:
        return float(share @ np.maximum(0.0, -np.expm1(np.minimum(epsilon - loss, 0.0)))) - delta

    if excess(0.0) <= 0.0:
        return 0.0
    return float(brentq(excess, 0.0, answers * answer_epsilon))
