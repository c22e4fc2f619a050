"""The published simulation of variable selection among the columns of five sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import expit

from fedstat.datasets.simulation import numbered_entities, require_argument
from fedstat.typing import Array, Floats

CLIENTS, COLUMNS, ACTIVE = 5, 20, 12
"""Sites; columns of each; of these, those with an effect."""
EFFECT = 1.0 / 3.0
TYPES = ("continuous", "class", "count", "binary")
CLASS_SLOPES = (0.0, 0.5, 1.0)
WEIGHTS, MEANS = (0.4, 0.3, 0.3), (0.0, -1.0, 1.0)


@dataclass(frozen=True, slots=True)
class SimulatedSelection:
    """Tables of several sites, drawn from a known regression in which many coefficients are zero.

    Attributes
    ----------
    frames : dict of str to DataFrame
        One table per site, with the key; the first one also holds the response.
    key : str
        Name of the column that identifies an entity.
    response : str
        Name of the response.
    truth : DataFrame
        Index ``variable``; columns ``site``, ``type`` and ``coef``, the true coefficient.
    intercept : float
        True intercept.
    complete : DataFrame
        Key, response and all columns.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(100, seed=1)
    >>> data.response, int((data.truth.iloc[:, -1] != 0).sum())
    ('y', 60)
    """

    frames: dict[str, pd.DataFrame]
    key: str
    response: str
    truth: pd.DataFrame
    intercept: float
    complete: pd.DataFrame


def make_selection(
    n: int = 1_000,
    family: Literal["normal", "binomial"] = "normal",
    *,
    standardize: bool = False,
    seed: int | np.random.Generator = 0,
) -> SimulatedSelection:
    """Simulate the selection study of Tang et al., section 5.1: five sites with 20 columns each.

    Every entity has a latent vector u (100,) from the mixture .4 N(0, S1) + .3 N(-1, S2) + .3 N(1, S3). S1
    has correlations of .3 within and .1 between sites, S2 of ``.5 ** |i - j|``, S3 of .5 and .25 at
    lags 1 and 2. A quarter of the columns each are u itself, a class c = 0, 1, 2 with probability
    proportional to ``exp(w_c u)``, w = (0, .5, 1), a Poisson count with mean ``max(2 + .3 u, 0)``, and 0 or
    1 with probability ``expit(.5 u)``; which column is of which type is random. The first 12 coefficients
    of every site are -1/3 and 1/3 in turn, the other 8 and the intercept are zero. The response is
    x'beta + N(0, 1), or 0 and 1 with probability ``expit(x'beta)``.

    The publication leaves open the shares of the types, the number of classes and their slopes, how a class
    enters the model (here as the number of the class, one column with one coefficient), and the scale of the
    columns. As drawn, the columns of 0 and 1 are least informative, and the maximum likelihood estimate on
    the right
    columns has a larger error than was published for the binomial family.

    Parameters
    ----------
    n : int
        Number of entities, at least 2; 1,000, 3,000 and 5,000 in the publication.
    family : {"normal", "binomial"}
        Of the response.
    standardize : bool
        Whether columns are brought to mean 0 and variance 1 before the response is drawn, so that effects
        are per standard deviation.
    seed : int or numpy.random.Generator
        Source of randomness. The coefficients do not depend on it.

    Returns
    -------
    SimulatedSelection
        With the key ``id`` and the response ``y``.

    Raises
    ------
    ModelError
        If an argument is out of its range.

    References
    ----------
    Tang, Feng, Li and Wang, "Data privatization in vertical federated learning with client-wise missing
    problem", arXiv 2511.20876.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(100, seed=1)
    >>> [frame.shape for frame in data.frames.values()]
    [(100, 22), (100, 21), (100, 21), (100, 21), (100, 21)]
    """
    require_argument(n >= 2, f"make_selection: expected n of at least 2 entities, received {n}.")
    require_argument(
        family in ("normal", "binomial"),
        f"make_selection: expected family to be 'normal' or 'binomial', received {family!r}.",
    )
    rng = np.random.default_rng(seed)
    p = CLIENTS * COLUMNS
    types = rng.permutation(np.repeat(TYPES, p // len(TYPES)))
    X = _draw_columns(_draw_latent(n, rng), types, rng)
    if standardize:
        X = (X - X.mean(axis=0)) / X.std(axis=0)
    effects = np.where(np.arange(COLUMNS) < ACTIVE, EFFECT * (-1.0) ** np.arange(1, COLUMNS + 1), 0.0)
    beta = np.tile(effects, CLIENTS)
    eta = X @ beta
    normal = family == "normal"
    y = eta + rng.standard_normal(n) if normal else (rng.uniform(size=n) < expit(eta)).astype(np.float64)
    return _lay_out(X, y, beta, types)


def load_selection_published() -> pd.DataFrame:
    """Read the figures that Tang et al. published for their method on the original data.

    Returns
    -------
    DataFrame
        Index ``family`` and ``n``; columns ``rmse``, ``gmean`` and ``fdr``, means of 100 data sets. The root
        mean squared error is that of all coefficients, the G-mean that of sensitivity and specificity.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.datasets.load_selection_published().columns.tolist()
    ['rmse', 'gmean', 'fdr']
    """
    index = pd.MultiIndex.from_product([["normal", "binomial"], [1_000, 3_000, 5_000]], names=["family", "n"])
    return pd.DataFrame(
        {
            "rmse": [0.0714, 0.0374, 0.0246, 0.116, 0.051, 0.039],
            "gmean": [0.874, 0.942, 0.962, 0.759, 0.925, 0.952],
            "fdr": [0.035, 0.009, 0.001, 0.033, 0.007, 0.005],
        },
        index=index,
    )


def _latent_correlations() -> list[Floats]:
    """Correlations of the three parts of the mixture: (p, p) each."""
    p = CLIENTS * COLUMNS
    site = np.repeat(np.arange(CLIENTS), COLUMNS)
    lag = np.abs(np.subtract.outer(np.arange(p), np.arange(p)))
    blocks = np.where(np.equal.outer(site, site), 0.3, 0.1)
    np.fill_diagonal(blocks, 1.0)
    return [blocks, 0.5**lag, np.where(lag <= 2, 0.5**lag, 0.0)]


def _draw_latent(n: int, rng: np.random.Generator) -> Floats:
    """Draw n latent vectors from the mixture: (n, p)."""
    part = rng.choice(len(WEIGHTS), size=n, p=WEIGHTS)
    U = rng.standard_normal((n, CLIENTS * COLUMNS))
    for k, (mean, S) in enumerate(zip(MEANS, _latent_correlations(), strict=True)):
        U[part == k] = mean + U[part == k] @ np.linalg.cholesky(S).T
    return U


def _draw_columns(U: Floats, types: Array, rng: np.random.Generator) -> Floats:
    """Turn latent columns (n, p) into those of the types (p,)."""
    odds = np.exp(U[..., None] * np.array(CLASS_SLOPES))
    # a uniform draw exceeds the cumulated shares of all classes before its own
    below = np.cumsum(odds, axis=-1) / odds.sum(axis=-1, keepdims=True)
    uniform = rng.uniform(size=U.shape)
    drawn = {
        "continuous": U,
        "class": (uniform[..., None] > below[..., :-1]).sum(axis=-1),
        "count": rng.poisson(np.maximum(2.0 + 0.3 * U, 0.0)),
        "binary": rng.uniform(size=U.shape) < expit(0.5 * U),
    }
    X = np.empty(U.shape)
    for name, columns in drawn.items():
        X[:, types == name] = columns[:, types == name]
    return X


def _lay_out(X: Floats, y: Floats, beta: Floats, types: Array) -> SimulatedSelection:
    """Cut the columns into tables of sites."""
    names = pd.Index([f"X{j}" for j in range(1, len(beta) + 1)], name="variable")
    sites = np.repeat([f"Client {k}" for k in range(1, CLIENTS + 1)], COLUMNS)
    complete = numbered_entities(X, names, y, "id", "y")
    frames = {
        site: complete[["id", *(["y"] if site == sites[0] else []), *names[sites == site]]].copy()
        for site in dict.fromkeys(sites.tolist())
    }
    truth = pd.DataFrame({"client": sites, "type": types, "coef": beta}, index=names)
    return SimulatedSelection(frames, "id", "y", truth, 0.0, complete)
