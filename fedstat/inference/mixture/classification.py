"""How well a mixture tells its clusters apart: entropy, classification, and a criterion that counts both."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedstat.inference.selection.criteria import bic
from fedstat.typing import Floats

OVERLAP = 0.8
"""Relative entropy below which standard errors from the information may be too small."""
TINY = 1e-300


def posterior_entropy(r: Floats) -> float:
    """Entropy of posteriors (n, K), added up over entities: ``-sum r log r``."""
    return float(-(r * np.log(np.maximum(r, TINY))).sum())


def relative_entropy(r: Floats) -> float:
    """One where posteriors (n, K) are certain, zero where they tell nothing; one of a single cluster."""
    n, K = r.shape
    return 1.0 - posterior_entropy(r) / (n * float(np.log(K))) if K > 1 else 1.0


def icl(minus_twice_llf: float, df: float, nobs: float, r: Floats) -> float:
    """Return the integrated criterion, BIC and twice the entropy of the posteriors (n, K).

    Biernacki, C., Celeux, G. and Govaert, G. (2000). Assessing a mixture model for clustering with the
    integrated completed likelihood. IEEE Transactions on Pattern Analysis and Machine Intelligence 22.
    """
    return float(bic(minus_twice_llf, df, nobs)) + 2.0 * posterior_entropy(r)


def hard(r: Floats) -> Floats:
    """Posteriors (n, K) that are certain of the most likely cluster."""
    return np.asarray(np.eye(r.shape[1])[np.argmax(r, axis=1)])


def classification_table(r: Floats) -> pd.DataFrame:
    """Mean posterior of every cluster (columns) by the most likely cluster (rows), and how many these are.

    Rows of a cluster that is the most likely one of nobody are nan.
    """
    K = r.shape[1]
    modal = hard(r)
    counts = modal.sum(axis=0)
    with np.errstate(invalid="ignore"):
        means = modal.T @ r / counts[:, None]
    clusters = pd.RangeIndex(1, K + 1)
    table = pd.DataFrame(means, index=clusters.rename("most likely"), columns=clusters.rename("cluster"))
    return table.assign(entities=counts.astype(np.int64))


def classification_errors(r: Floats) -> Floats:
    """Probabilities (K, K) that an entity of a cluster (rows) has each one as its most likely (columns)."""
    return np.asarray(r.T @ hard(r) / r.sum(axis=0)[:, None])
