"""Cross-validation and selection frequencies of a path, from folds of the entities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedstat.models.vertical.exchange.protocol import Units
from fedstat.models.vglm.path.fits import Path
from fedstat.models.vglm.path.normal import normal_path, prediction_errors
from fedstat.models.vglm.path.setup import Setup
from fedstat.progress_line import counted
from fedstat.typing import Bools, Floats, Ints


def cross_validate(products: Floats, units: Units, setup: Setup, path: Path) -> tuple[Floats, Floats]:
    """Return mean squared errors of folds left out, and their standard errors: (L,) each.

    From sums of products by fold, (F, p + 2, p + 2).
    """
    total, setup = products.sum(axis=0), replace(setup, lambdas=path.lambdas)
    errors = np.array(
        [
            prediction_errors(normal_path(total - S, units, setup), S, units)
            for S in counted(list(products), "fold")
        ]
    )
    weight = products[:, 0, 0] / total[0, 0]
    return weighted_mean(errors, weight)


def weighted_mean(errors: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Mean over folds, (F, L) -> (L,), with its standard error; weights (F,) add up to one."""
    mean = weight @ errors
    return mean, np.sqrt(weight @ (errors - mean) ** 2 / (len(errors) - 1))


def stability(
    selected: Callable[[Ints], Bools], folds: int, draws: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Share of random halves of the folds in which each column is selected at each lambda: (L, p).

    With the mean number of columns that are selected at this lambda or a larger one, (L,). `selected` goes
    from the folds of a half to the coefficients that are not zero along the path, (L, p). Halves come in
    `draws` complementary pairs (Shah and Samworth 2013); a half is made of whole folds, so that nothing
    further is released.

    References: Meinshausen, N. and Buehlmann, P. (2010). Stability selection. Journal of the Royal
    Statistical Society B 72, 417-473. Shah, R. and Samworth, R. (2013). Variable selection with error
    control: another look at stability selection. Journal of the Royal Statistical Society B 75, 55-80.
    """
    counts, numbers = [], []
    for _ in counted(range(draws), "pair of halves"):
        order = random.permutation(folds)
        for half in (order[: folds // 2], order[folds // 2 :]):
            found = selected(half)
            counts.append(found)
            numbers.append(np.logical_or.accumulate(found, axis=0).sum(axis=1))
    return np.mean(counts, axis=0), np.mean(numbers, axis=0)


def normal_stability(
    products: Floats, units: Units, setup: Setup, path: Path, draws: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Share of random halves that select each column, from sums of products by fold (F, p + 2, p + 2)."""
    setup = replace(setup, lambdas=path.lambdas)

    def selected(half: Ints) -> Bools:
        return normal_path(products[half].sum(axis=0), units, setup).selected

    return stability(selected, len(products), draws, random)
