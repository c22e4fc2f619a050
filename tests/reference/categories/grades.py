"""The table behind the numbers of R's ordinal: ``python tests/reference/categories/grades.py FILE``."""

import sys

import numpy as np
import pandas as pd

LEVELS = ["poor", "fair", "good", "excellent"]


def grades(n=700, seed=5):
    """Simulated grades of pupils at four schools, with weights, an offset, and classes within schools."""
    rng = np.random.default_rng(seed)
    school = rng.choice(["Aalen", "Bern", "Celle", "Dax"], n, p=[0.4, 0.3, 0.2, 0.1])
    table = pd.DataFrame(
        {
            "school": school,
            "hours": rng.gamma(4.0, 2.0, n).round(2),
            "tutor": rng.choice(["no", "yes"], n),
            "track": rng.choice(["a", "b", "c"], n),
            "weight": rng.integers(1, 4, n).astype(float),
            "shift": (rng.random(n) - 0.5).round(2),
        }
    )
    table["class"] = school + "-" + (np.arange(n) // 8).astype(str)
    latent = 0.15 * table["hours"] + 0.8 * (table["tutor"] == "yes") - 0.4 * (table["track"] == "c")
    latent += table["shift"] + rng.logistic(size=n)
    table["grade"] = np.array(LEVELS)[np.digitize(latent, [0.2, 1.5, 3.0])]
    return table


if __name__ == "__main__":
    grades().to_csv(sys.argv[1], index=False)
