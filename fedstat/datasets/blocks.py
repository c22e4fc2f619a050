"""A small general simulator of blocks of covariates with missing records."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from fedstat.datasets import simulation


def make_blocks(
    n: int = 1_000,
    p: Sequence[int] = (3, 2, 2),
    missing: Sequence[float] = (0.2, 0.4, 0.5),
    *,
    seed: int | np.random.Generator = 0,
    mechanism: simulation.Mechanism = "mcar",
    rho: float = 0.3,
    between: float = 0.0,
    r2: float = 0.5,
    mean: float = 0.0,
    intercept: float = 1.0,
    response_with_block: bool = False,
) -> simulation.SimulatedData:
    """Simulate a linear regression whose covariates are spread over sites "A", "B", "C", ...

    The covariates ``A1``, ``A2``, ``B1``, ... are normal with variance 1. The response ``y`` is known for
    every entity.

    Parameters
    ----------
    n : int
        Number of entities.
    p : sequence of int
        Number of covariates of each site, at most 26 sites.
    missing : sequence of float
        Share of the entities without a record, per site, in [0, 1); counts are exact.
    seed : int or numpy.random.Generator
        Source of randomness. The truth does not depend on it.
    mechanism : {"mcar", "mar"}
        "mcar": records are lacking at random. "mar": a record at "A" is more likely with a high response,
        one at any other site with a high response and, where "A" has the entity, a high ``A1``.
    rho : float
        Mean absolute correlation within a site.
    between : float
        Mean absolute correlation between covariates of different sites.
    r2 : float
        R-squared of a fully observed entity, in (0, 1).
    mean : float
        Mean of every covariate.
    intercept : float
        True intercept, at x = 0.
    response_with_block : bool
        Whether "A" holds the response and its covariates; else a site "Response" holds it alone.

    Returns
    -------
    SimulatedData
        With the key ``id``.

    Raises
    ------
    ModelError
        If an argument is out of its range, or if "A" holds the response and lacks records.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(200, seed=1)
    >>> list(data.frames), data.key, data.truth.shape
    (['Response', 'A', 'B', 'C'], 'id', (7, 2))
    """
    _check_blocks(n, p, missing, mechanism, r2, response_with_block)
    rng = np.random.default_rng(seed)
    population = _block_population(p, rho, between, r2, mean, intercept)
    X = population.draw_covariates(n, rng)
    y = population.draw_response(X, rng)
    counts = tuple(round(n * (1 - share)) for share in missing)
    simulation.require_argument(
        min(counts) > 0, f"make_blocks: a site would have no record among {n} entities."
    )
    presence = simulation.MissingnessModel(counts, leader=0, slope=simulation.SLOPES[mechanism])
    seen = presence.draw(population.standardize(y), X[:, 0] - mean, rng)
    return simulation.assemble(population, X, y, seen, "id", "y", "A" if response_with_block else "Response")


def _block_population(
    p: Sequence[int], rho: float, between: float, r2: float, mean: float, intercept: float
) -> simulation.Population:
    sites = tuple(string.ascii_uppercase[: len(p)])
    owner = np.repeat(np.arange(len(p)), p)
    loadings = np.concatenate([simulation.alternating_loadings(size, rho) for size in p])
    return simulation.Population(
        sites=sites,
        variables=tuple(f"{c}{j}" for c, size in zip(sites, p, strict=True) for j in range(1, size + 1)),
        owner=owner,
        loadings=loadings,
        factor_correlation=simulation.factor_correlation(owner, loadings, between),
        # signs and sizes that repeat, so that the truth depends on nothing but p
        beta=np.resize([1.0, -0.5, 0.8, -0.3, 0.6], owner.size),
        r2=r2,
        mean=mean,
        intercept=intercept,
    )


def _check_blocks(
    n: int, p: Sequence[int], missing: Sequence[float], mechanism: str, r2: float, response_with_block: bool
) -> None:
    checks = {
        f"n of at least 2 entities, received {n}": n >= 2,
        f"1 to 26 sites with at least one covariate each, received p = {tuple(p)}": (
            1 <= len(p) <= 26 and min(p) >= 1
        ),
        f"one share in [0, 1) each, received missing = {tuple(missing)} for {len(p)} sites": (
            len(missing) == len(p) and all(0 <= share < 1 for share in missing)
        ),
        f"mechanism to be 'mcar' or 'mar', received {mechanism!r}": mechanism in simulation.SLOPES,
        f"r2 in (0, 1), received {r2}": 0 < r2 < 1,
    }
    for expected, holds in checks.items():
        simulation.require_argument(holds, f"make_blocks: expected {expected}.")
    simulation.require_argument(
        not (response_with_block and missing[0]),
        "make_blocks: site 'A' holds the response, which every entity has; set missing[0] = 0.",
    )
