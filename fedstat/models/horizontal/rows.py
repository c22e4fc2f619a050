"""A site's rows in the form of the kernels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedstat.errors import DesignError
from fedstat.federation.design.site_rows import WholeRows
from fedstat.federation.door.guards import is_spread, surely_spread
from fedstat.federation.door.state import SiteData
from fedstat.kernels.glm.family import FamilySpec
from fedstat.kernels.glm.rows import Rows, check_response
from fedstat.kernels.glm.sums import Sums, row_weights
from fedstat.typing import Floats


def glm_rows(rows: WholeRows, X: Floats) -> Rows:
    """Put a chunk in the form of the kernels; two columns of counts become proportions and trials."""
    y, trials = rows.y, None
    if y.ndim == 2:
        trials = y.sum(axis=1)
        y = np.divide(y[:, 0], trials, out=np.zeros(len(y)), where=trials > 0.0)
    weights = rows.weights
    return Rows(X, y, rows.offset, weights.get("freq_weights"), weights.get("var_weights"), trials)


def require_response(site: str, rows: Rows, family: FamilySpec, response: str) -> None:
    """Require responses that the family can have.

    Raises
    ------
    DesignError
        Some are outside; the message counts them.
    """
    problem = check_response(rows, family)
    if problem:
        raise DesignError(
            f"site {site!r}: {problem} cannot be of family {family.name}: '{response}'. Correct them, or "
            "choose another family."
        )


def weights_spread(data: SiteData, chunks: Iterable[Rows], beta: Floats, family: FamilySpec) -> bool:
    """Whether at these coefficients more than a few rows have nearly all the weight in score and information.

    Coefficients can single rows out: where nearly all weight is on a few, the sums are those of a few rows,
    however many are added up.
    """
    sizes = np.concatenate([row_weights(rows, beta, family) for rows in chunks], axis=1)
    return all(is_spread(data, weights) for weights in sizes if np.isfinite(weights).all())


def sums_spread(data: SiteData, sums: Sums, chunks: Iterable[Rows], beta: Floats, family: FamilySpec) -> bool:
    """As :func:`weights_spread`, from sums at these coefficients, and the rows where these leave a doubt."""
    if not np.isfinite(sums.deviance) or all(surely_spread(data, *spread) for spread in sums.spread.tolist()):
        return True
    return weights_spread(data, chunks, beta, family)
