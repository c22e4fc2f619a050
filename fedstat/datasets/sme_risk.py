"""The enterprise risk study, simulated: columns of mixed kinds, records that small enterprises lack.

Source: Tang, Feng, Li and Wang, "Data privatization in vertical federated learning with client-wise missing
problem", arXiv 2511.20876 (TFLW), section 6, whose data are not public.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import expit, ndtri
from scipy.stats import poisson

from fedstat.datasets.population import (
    NORMAL_GRID,
    Population,
    alternating_loadings,
    factor_correlation,
    require,
)
from fedstat.datasets.presence import SLOPES, Mechanism, PresenceLaw
from fedstat.datasets.selection import SimulatedSelection
from fedstat.datasets.simulated import numbered_entities
from fedstat.typing import Array, Floats

SME_RISK_ENTERPRISES = 71_827
SME_RISK_COMPLETE = 184
SME_RISK_MISSING = {
    "Platform": 0.0,
    "Credit Agency": 0.7234,
    "Judicial Organ": 0.8353,
    "Law-enforcement Agency": 0.8733,
    "Market Supervision": 0.2711,
}
SME_RISK_COLUMNS = {
    "Platform": ("PL", 7),
    "Credit Agency": ("CA", 12),
    "Judicial Organ": ("JO", 8),
    "Law-enforcement Agency": ("LE", 8),
    "Market Supervision": ("MS", 19),
}
LEADER = "Market Supervision"
"""It has most enterprises, and its first column says with the response who has records elsewhere."""
RISKY = 0.12
"""Share of risky enterprises, if the log odds were normal; .11 as they are."""
EFFECT = 0.25
"""Of a standard deviation of an active column on the log odds."""
WITHIN, BETWEEN = 0.28, 0.1
"""Mean absolute correlation of the scores behind the columns, within and between institutions."""
CUTS: Floats = ndtri(np.array([0.2, 0.45, 0.7, 0.9]))
COUNTS: Floats = ndtri(poisson.cdf(np.arange(16), 2.0))
MARGINS: dict[str, Callable[[Floats], Floats]] = {
    "continuous": lambda z: z,
    "skewed": lambda z: np.exp(0.75 * z),
    "binary": lambda z: (z > ndtri(0.7)).astype(float),
    "count": lambda z: np.searchsorted(COUNTS, z).astype(float),
    "ordinal": lambda z: np.searchsorted(CUTS, z).astype(float),
    "zero-inflated": lambda z: np.maximum(np.exp(z) - math.exp(ndtri(0.6)), 0.0),
}
"""Columns as increasing functions of a standard normal score, which institutions' columns take in turn."""


def make_sme_risk(
    n: int = SME_RISK_ENTERPRISES,
    seed: int | np.random.Generator = 0,
    *,
    missing: Mechanism = "mar",
) -> SimulatedSelection:
    """Simulate the enterprise risk study of TFLW, section 6: 71,827 enterprises, five institutions.

    Behind the 54 covariates are normal scores with mean absolute correlations of .28 within and .1 between
    institutions; the columns are continuous, skewed, binary, counts, ordinal (0 to 4) and zero-inflated in
    turn. The response ``RISK`` is 1 for about 11 % of the enterprises, with log odds that are linear in the
    columns: the first half of every institution's columns have effects of -.25 and .25 of a standard
    deviation in turn, the others none.

    The shares without a record are the published ones, 0, 72.34, 83.53, 87.33 and 27.11 %, as exact counts,
    and exactly n * 184 / 71,827 (rounded) enterprises are complete. What the publication leaves open is of
    this generator's making: names of institutions and columns, the columns of each institution (of which 19
    at the institution that lacks 27.11 % are published), their laws, correlations and effects. No figure of
    the publication is claimed for these data.

    Parameters
    ----------
    n : int
        Number of enterprises, at least 1,000.
    seed : int or numpy.random.Generator
        Source of randomness. The truth does not depend on it.
    missing : {"mar", "mcar"}
        "mar": a record at "Market Supervision" is more likely for risky enterprises, one at the other
        institutions for risky enterprises and, where "Market Supervision" has the enterprise, a high ``MS1``;
        "Platform" has all. "mcar": records are lacking at random.

    Returns
    -------
    SimulatedSelection
        With the key ``enterprise_id`` and the response ``RISK``; ``coef`` is per unit of a column.

    Raises
    ------
    ModelError
        If an argument is out of its range.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_sme_risk(2_000)
    >>> {client: len(frame) for client, frame in data.frames.items()}["Credit Agency"]
    553
    """
    require(n >= 1_000, f"make_sme_risk: expected n of at least 1,000 enterprises, received {n}.")
    require(
        missing in SLOPES, f"make_sme_risk: expected missing to be 'mcar' or 'mar', received {missing!r}."
    )
    rng = np.random.default_rng(seed)
    population, kinds = _population(), _kinds()
    scores = population.draw_covariates(n, rng)
    X = np.column_stack([MARGINS[kind](z) for kind, z in zip(kinds, scores.T, strict=True)])
    columns = [MARGINS[kind](NORMAL_GRID) for kind in kinds]
    coef = population.beta / np.array([column.std() for column in columns])
    intercept = _intercept(population.explained()) - float(coef @ [column.mean() for column in columns])
    y = (rng.uniform(size=n) < expit(intercept + X @ coef)).astype(np.float64)
    lead = scores[:, population.variables.index(SME_RISK_COLUMNS[LEADER][0] + "1")]
    seen = _draw_presence(n, y, lead, SLOPES[missing], rng)
    return _lay_out(population, kinds, X, y, coef, intercept, seen)


def _population() -> Population:
    """Law of the scores, and effects per standard deviation."""
    sizes = [size for _, size in SME_RISK_COLUMNS.values()]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    loadings = np.concatenate([alternating_loadings(size, WITHIN) for size in sizes])
    beta = [EFFECT * (-1.0) ** (j + 1) if j < size // 2 else 0.0 for size in sizes for j in range(size)]
    return Population(
        clients=tuple(SME_RISK_COLUMNS),
        variables=tuple(f"{name}{j + 1}" for name, size in SME_RISK_COLUMNS.values() for j in range(size)),
        owner=owner,
        loadings=loadings,
        factor_correlation=factor_correlation(owner, loadings, BETWEEN),
        beta=np.array(beta),
        r2=0.5,
    )


def _kinds() -> list[str]:
    """Kinds of the columns, beginning anew at every institution."""
    return [str(kind) for _, size in SME_RISK_COLUMNS.values() for kind in np.resize(list(MARGINS), size)]


def _intercept(variance: float) -> float:
    """Intercept at which the share of risks is `RISKY`, were the log odds normal."""
    draws = math.sqrt(variance) * NORMAL_GRID
    return float(brentq(lambda at: expit(at + draws).mean() - RISKY, -20.0, 20.0))


def _draw_presence(n: int, y: Floats, lead: Floats, slope: float, rng: np.random.Generator) -> Array:
    """Draw who has a record of whom, (n, 5): the first institution of everybody."""
    others = {client: share for client, share in SME_RISK_MISSING.items() if share > 0.0}
    law = PresenceLaw(
        tuple(round(n * (1 - share)) for share in others.values()), list(others).index(LEADER), slope
    )
    complete = round(n * SME_RISK_COMPLETE / SME_RISK_ENTERPRISES)
    risk = (y - RISKY) / math.sqrt(RISKY * (1 - RISKY))
    seen = law.draw_with_complete(complete, risk, lead, rng)
    return np.column_stack([np.ones(n, dtype=np.bool_), seen])


def _lay_out(
    population: Population,
    kinds: list[str],
    X: Floats,
    y: Floats,
    coef: Floats,
    intercept: float,
    seen: Array,
) -> SimulatedSelection:
    """Cut what was drawn into tables of institutions."""
    names = pd.Index(population.variables, name="variable")
    complete = numbered_entities(X, names, y, "enterprise_id", "RISK")
    frames = {
        client: complete.loc[
            seen[:, k],
            ["enterprise_id", *(["RISK"] if k == 0 else []), *names[population.owner == k]],
        ].reset_index(drop=True)
        for k, client in enumerate(population.clients)
    }
    truth = pd.DataFrame(
        {"client": np.asarray(population.clients)[population.owner], "type": kinds, "coef": coef}, index=names
    )
    return SimulatedSelection(frames, "enterprise_id", "RISK", truth, intercept, complete)
