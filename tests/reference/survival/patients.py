"""The table behind the numbers of R's survival: ``python tests/reference/survival/patients.py FILE``."""

import sys

import numpy as np

import fedstat as fs


def patients():
    """Simulated follow-up with late entry, weights, strata and families within hospitals."""
    table = fs.datasets.make_survival(seed=3)
    place = np.arange(len(table))
    return table.assign(
        entry=np.maximum(table["months"] - 1 - place % 20, 0.0),
        weight=1.0 + place % 3,
        ward=np.where(place % 7 < 3, "east", "west"),
        family=table["hospital"] + "-" + (place // 3).astype(str),
        quarters=np.ceil(table["months"] / 3.0),
        shift=(place % 5) / 10.0,
        cause=np.where(table["died"] == 0, "none", np.where(place % 3 == 0, "relapse", "death")),
    )


if __name__ == "__main__":
    patients().to_csv(sys.argv[1], index=False)
