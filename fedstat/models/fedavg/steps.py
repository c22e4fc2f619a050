"""What a site computes for the FedAvg family: epochs of gradient descent over its own rows.

Coefficients belong to the columns in which the algorithm runs: those of the data, or those standardised
over all sites. Gradient descent gives another answer in other columns, so that a site puts its rows into
them once, when a fit starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design_rows import OpenRows, rows_of
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.site import SiteData, State
from fedstat.kernels.glm import Rows, evaluate, log_likelihood
from fedstat.kernels.glm_family import FamilySpec
from fedstat.kernels.glm_local import join
from fedstat.kernels.sgd import local_proximal, local_sgd, mean_loss
from fedstat.models.kernel_rows import glm_rows, require_response
from fedstat.typing import Array, Floats, Ints

FAMILY = "fedavg"


@dataclass(frozen=True, slots=True, eq=False)
class SiteRows:
    """The rows of one site in the columns of the algorithm."""

    rows: Rows
    family: FamilySpec

    @property
    def p(self) -> int:
        """Columns."""
        return int(self.rows.X.shape[1])


def gather(opened: OpenRows, shift: Floats, scale: Floats) -> Rows:
    """Put all rows into columns of given shift and scale; a batch may hold any of them.

    A streamed table's design is held in memory as well.
    """
    ratio, rest = opened.scale / scale, (opened.shift - shift) / scale
    parts = [glm_rows(rows, X * ratio + rest) for rows, X in opened.chunks()]
    return parts[0] if len(parts) == 1 else join(parts)


def start(
    data: SiteData, state: State, text: str, shift: Floats, scale: Floats
) -> tuple[dict[str, Array], str]:
    """Check the response, and put the rows into the columns of the algorithm.

    Parameters
    ----------
    text : str
        The family.
    shift, scale : (p,) arrays
        What the columns of the data are to be reduced by, and divided by: 0 and 1 for the data's own.

    Returns
    -------
    dict
        ``rows``: how many, each counted by its frequency weight and its binomial trials.
    """
    opened = rows_of(data, state)
    check_lengths(data.name, shift=(shift, len(opened.shift)), scale=(scale, len(opened.shift)))
    if not (scale > 0.0).all():
        raise MessageError(f"{data.name}: array 'scale' must be positive")
    site = SiteRows(gather(opened, shift, scale), FamilySpec.from_json(text))
    response = opened.question.response
    require_response(data.name, site.rows, site.family, response)
    weight = float(len(site.rows) if site.rows.weight is None else site.rows.weight.sum())
    state.keep("fedavg", site, state.entities)
    return {"rows": np.array(weight)}, ""


def site_rows(data: SiteData, state: State, beta: Floats) -> SiteRows:
    """Return the rows of this fit, for as many coefficients."""
    if "fedavg" not in state:
        raise MessageError(f"{data.name}: this fit was not started here; ask 'start' first")
    site: SiteRows = state.use("fedavg")
    check_lengths(data.name, beta=(beta, site.p))
    return site


def run_epochs(
    data: SiteData,
    state: State,
    beta: Floats,
    epochs: Ints,
    batch_size: Ints,
    learning_rate: Floats,
    seed: Ints,
    number: Ints,
    proximal: Floats | None = None,
) -> dict[str, Array]:
    """Descend from beta for some epochs (ClientUpdate of McMahan et al. 2017, Algorithm 1).

    Parameters
    ----------
    beta : (p,) array
        Coefficients.
    epochs : int
        Passes over the rows, E.
    batch_size : int
        Rows per step, B; 0 for all of them.
    learning_rate : float
        eta.
    seed, number : int
        Of the run, and of the round from 0; with the site's name they determine the order of the rows.
    proximal : (2,) array, optional
        mu and gamma of FedProx (Li et al. 2020, Algorithm 2).

    Returns
    -------
    dict
        ``beta`` (p,) after the epochs; ``loss``: mean loss F_k before them; ``inexactness`` that FedProx
        reached.

    Raises
    ------
    EstimationError
        The descent left the finite numbers or the family's domain.
    """
    site = site_rows(data, state, beta)
    if proximal is not None:
        check_lengths(data.name, proximal=(proximal, 2))
    rng = np.random.default_rng((int(seed), int(number), *data.name.encode()))
    how = {
        "epochs": int(epochs),
        "batch_size": int(batch_size) or None,
        "learning_rate": float(learning_rate),
        "rng": rng,
    }
    try:
        return descend(site, beta, how, proximal)
    except EstimationError as error:
        raise EstimationError(f"site {data.name!r}, round {int(number) + 1}: {error}") from error


def descend(site: SiteRows, beta: Floats, how: dict[str, Any], proximal: Floats | None) -> dict[str, Array]:
    """Return the loss at beta, and the coefficients after a descent as :func:`local_sgd` describes it."""
    rows, family = site.rows, site.family.make()
    known: dict[str, Any] = {"offset": rows.offset, "weights": rows.weight}
    loss = np.array(mean_loss(rows.X, rows.y, beta, family, **known))
    if proximal is None:
        return {"beta": local_sgd(rows.X, rows.y, beta, family, **how, **known), "loss": loss}
    mu, gamma = proximal.tolist()
    after, reached = local_proximal(rows.X, rows.y, beta, family, mu=mu, gamma=gamma, **how, **known)
    # infinite where the site's gradient is zero to begin with
    inexactness = np.array(min(reached, float(np.finfo(float).max)))
    return {"beta": after, "loss": loss, "inexactness": inexactness}


def sum_scores(data: SiteData, state: State, beta: Floats) -> dict[str, Array]:
    """Sum score and information over the rows, to tell how far the maximum of the likelihood is.

    Returns
    -------
    dict
        ``inside``: whether all means lie inside the family's domain; ``score`` (p,) and ``information``
        (p, p) for dispersion one; ``totals``: sum of the frequency weights, deviance, Pearson's statistic.
    """
    site = site_rows(data, state, beta)
    sums = evaluate([site.rows], beta, site.family)
    finite = bool(np.isfinite(sums.deviance))
    totals = np.array([sums.weight, sums.deviance, sums.pearson]) if finite else np.zeros(3)
    return {
        "inside": np.array(finite),
        "score": sums.score,
        "information": sums.information,
        "totals": totals,
    }


def sum_likelihood(data: SiteData, state: State, beta: Floats, dispersion: Floats) -> dict[str, Array]:
    """Sum the log-likelihood over the rows.

    Parameters
    ----------
    beta : (p,) array
    dispersion : float

    Returns
    -------
    dict
        ``llf``: zero where the family does not define one, and ``defined``.
    """
    site = site_rows(data, state, beta)
    llf = log_likelihood([site.rows], beta, site.family, float(dispersion))
    finite = bool(np.isfinite(llf))
    return {"defined": np.array(finite), "llf": np.array(llf if finite else 0.0)}


BETA = Declared("aggregate", "coefficients")
STEPS: Mapping[str, Step] = {
    "start": Step(
        start,
        {
            "shift": Declared("aggregate", "means of the columns over all sites, or zeros"),
            "scale": Declared("aggregate", "standard deviations of the columns over all sites, or ones"),
        },
        {"rows": Declared("aggregate", "number of rows, weights counted", 0)},
        Declared("control", "family and link"),
    ),
    "run_epochs": Step(
        run_epochs,
        {
            "beta": BETA,
            "epochs": Declared("control", "passes over the rows", 0, dtype="int64"),
            "batch_size": Declared("control", "rows per gradient step", 0, dtype="int64"),
            "learning_rate": Declared("control", "length of a gradient step", 0),
            "seed": Declared("control", "seed of the run", 0, dtype="int64"),
            "number": Declared("control", "number of the round", 0, dtype="int64"),
            "proximal": Declared("control", "mu and gamma of FedProx", optional=True),
        },
        {
            "beta": Declared("aggregate", "coefficients after the site's epochs"),
            "loss": Declared("aggregate", "mean loss of the site's rows before them", 0),
            "inexactness": Declared("aggregate", "gradient that is left, over that before", 0, optional=True),
        },
    ),
    "sum_scores": Step(
        sum_scores,
        {"beta": BETA},
        {
            "inside": Declared("control", "whether all means lie inside the family's domain", 0),
            "score": Declared("aggregate", "score"),
            "information": Declared("aggregate", "expected information", 2),
            "totals": Declared("aggregate", "sums of weights, deviance, Pearson residuals"),
        },
    ),
    "sum_likelihood": Step(
        sum_likelihood,
        {"beta": BETA, "dispersion": Declared("aggregate", "dispersion", 0)},
        {
            "defined": Declared("control", "whether the sum is finite", 0),
            "llf": Declared("aggregate", "log-likelihood", 0, maskable=True),
        },
    ),
}
