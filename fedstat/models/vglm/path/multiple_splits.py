"""Many splits of the entities for the normal family, from the sums of their folds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from fedstat.inference.selection.multiple_splits import aggregate_splits
from fedstat.models.vertical.exchange.protocol import Grams
from fedstat.models.vglm.path.criteria import Select, choose, score_path
from fedstat.models.vglm.path.normal import normal_path, normal_refit
from fedstat.models.vglm.path.setup import Setup
from fedstat.typing import Floats


def split_pvalues(
    grams: Grams, setup: Setup, select: Select, splits: int, names: Sequence[str], random: np.random.Generator
) -> Floats:
    """Return p-values of all columns over many splits, which control any false rejection: (p,).

    In each split a random half of the folds selects, and least squares on the others tests what was selected,
    adjusted for their number by Bonferroni. From sums of products by fold (F, p + 2, p + 2): nothing further
    is released.
    """
    products, units, F = grams.products, grams.units, len(grams.products)
    # A column that a split leaves out has a p-value of one there (Meinshausen, Meier and Buehlmann 2009).
    p_values = np.ones((splits, len(names)))
    for one in p_values:
        order = random.permutation(F)
        S = products[order[: F // 2]].sum(axis=0)
        path = normal_path(S, units, setup)
        chosen = choose(score_path(path, int(S[0, 0])), select)
        support = path.selected[chosen]
        if support.any():
            refit = normal_refit(products[order[F // 2 :]].sum(axis=0), units, support, names)
            z = refit.params[1:] / np.sqrt(np.diag(refit.cov)[1:])
            one[support] = np.minimum(2.0 * stats.norm.sf(np.abs(z)) * support.sum(), 1.0)
    return aggregate_splits(p_values)
