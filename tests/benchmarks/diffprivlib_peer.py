"""Logistic regressions of diffprivlib: ``python diffprivlib_peer.py TABLES.npz EPSILON NORM``.

Prints coefficients of every table as JSON, the intercept first.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
from diffprivlib.models import LogisticRegression


def main(path: str, epsilon: float, norm: float) -> None:
    """Fit every table with two strengths of the penalty."""
    warnings.simplefilter("ignore")
    held = np.load(path)
    fits: dict[str, list[list[float]]] = {"C = 1 (default)": [], "C = 100": []}
    for run, (X, y) in enumerate(zip(held["X"], held["y"], strict=True)):
        for C, found in zip((1.0, 100.0), fits.values(), strict=True):
            model = LogisticRegression(epsilon=epsilon, data_norm=norm, C=C, max_iter=500, random_state=run)
            model.fit(X, y)
            found.append([float(model.intercept_[0]), *map(float, model.coef_[0])])
    print(json.dumps(fits))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
