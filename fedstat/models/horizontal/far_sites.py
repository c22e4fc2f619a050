"""Sites at which a column lies far from all others: by its mean or spread, as where units differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.errors import UnitsWarning, warn
from fedstat.federation.design.by_rows import RowsAgreement
from fedstat.typing import Floats

DEVIATIONS, FOLD = 5.0, 20.0
"""Between means, in the larger of two standard deviations, and between these: what is far."""
APART = 2.0
"""How much farther a site is from the others than these are from one another."""
SHARE = 1e-6
"""Relative difference of a variance from m (1 - m), below which a column is taken for zeros and ones."""


def far_sites(own: Floats) -> list[tuple[int, int, str]]:
    """Find sites and columns, (k, j), and what is far there, from means and deviations by site, (K, 2, p).

    Columns of zeros and ones are shares, whose deviations say how rare one is: they are left out, as are
    sites that tell nothing of a column, or where it does not vary.
    """
    found = []
    for j in range(own.shape[2]):
        mean, spread = own[:, 0, j], own[:, 1, j]
        told = np.flatnonzero((spread > 0.0) & np.isfinite(mean))
        m, s = mean[told], spread[told]
        if len(told) < 2 or np.allclose(s**2, m * (1.0 - m), rtol=SHARE, atol=0.0):
            continue
        units = DEVIATIONS * np.maximum(s[:, None], s)
        folds = np.full_like(units, np.log(FOLD))
        found += [(int(told[k]), j, "mean") for k in _far(m, units)]
        found += [(int(told[k]), j, "spread") for k in _far(np.log(s), folds)]
    return found


def _far(values: Floats, least: Floats) -> list[int]:
    """Places of values (K,) that are `least` (K, K) from every other one, which are nearer to one another."""
    found = []
    for k in range(len(values)):
        others = np.arange(len(values)) != k
        distance = np.abs(values[k] - values[others])
        if (distance >= least[k, others]).all() and distance.min() > APART * np.ptp(values[others]):
            found.append(k)
    return found


def warn_of_far_sites(agreement: RowsAgreement, names: Sequence[str], own: Floats | None) -> None:
    """Warn of columns that are numbers as they stand; `own` is None where no site's moments are known."""
    if own is None:
        return
    plain = [j for j, name in enumerate(names) if agreement.spec.kinds.get(name) == "number"]
    for k, place, what in far_sites(own[:, :, plain]):
        site, name = agreement.sites[k].site, names[plain[place]]
        warn(
            f"column {name!r}: its {what} at site {site!r} is far from those at all other sites. Is it "
            "measured in the same unit? Sites may publish in which (unit = ... in columns.toml)",
            UnitsWarning,
        )
