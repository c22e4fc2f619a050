"""Tables that a simulation hands over, with the truth beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.datasets.population import Population
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True)
class SimulatedData:
    """Tables of several institutions, drawn from a known linear model.

    Attributes
    ----------
    frames : dict of str to DataFrame
        One table per institution, with the key and only the entities that the institution has a record of.
        The holder of the response comes first.
    key : str
        Name of the column that identifies an entity.
    response : str
        Name of the response, known for every entity.
    truth : DataFrame
        True coefficients: index ``variable``, columns ``client`` and ``coef``.
    intercept : float
        True intercept beta0, at x = 0.
    sigma2 : float
        Variance of the errors.
    covariance : DataFrame
        Covariance of the covariates in the population, p x p.
    complete : DataFrame
        Key, response and all p covariates of all n entities, before records were withheld.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_sme(500)
    >>> data.response, data.key, len(data.frames), len(data.complete)
    ('NPGR', 'enterprise_id', 6, 500)
    """

    frames: dict[str, pd.DataFrame]
    key: str
    response: str
    truth: pd.DataFrame
    intercept: float
    sigma2: float
    covariance: pd.DataFrame
    complete: pd.DataFrame


def numbered_entities(
    X: Floats, variables: pd.Index[str], y: Floats, key: str, response: str
) -> pd.DataFrame:
    """Table of all entities: their numbers from 1 as the key, the response y (n,), and X (n, p)."""
    complete = pd.DataFrame(X, columns=list(variables))
    complete.insert(0, response, y)
    complete.insert(0, key, np.arange(1, y.size + 1))
    return complete


def assemble(
    population: Population, X: Floats, y: Floats, seen: Bools, key: str, response: str, holder: str
) -> SimulatedData:
    """Lay out what was drawn, X (n, p), y (n,) and seen (n, K), as tables of institutions."""
    variables = pd.Index(population.variables, name="variable")
    names = np.asarray(population.variables, dtype=object)
    complete = numbered_entities(X, variables, y, key, response)
    frames = {holder: complete[[key, response]].copy()}
    for k, client in enumerate(population.clients):
        block = complete.loc[seen[:, k], [key, *names[population.owner == k]]].reset_index(drop=True)
        frames[client] = frames[client].merge(block, on=key) if client == holder else block
    return SimulatedData(
        frames=frames,
        key=key,
        response=response,
        truth=pd.DataFrame(
            {"client": np.asarray(population.clients)[population.owner], "coef": population.beta},
            index=variables,
        ),
        intercept=population.intercept,
        sigma2=population.sigma2(),
        covariance=pd.DataFrame(population.covariance(), index=variables, columns=list(variables)),
        complete=complete,
    )
