"""Dither: columns are moved a little before they are summed, so that a sum carries few bits about them.

Each value of a design column moves by up to half a hundredth of the column's standard deviation, so a sum of
products by .3 % of its sampling error, and carries log2(1 / .0029) = 8.4 bits about the column, whatever it
is multiplied with. Moves are drawn by the site's secret from the column: asked again, in whatever
guise, session or groups, the same value moves the same way, and asking often averages nothing out. All sums
are of the columns as moved, so that standard errors contain the dither: it adds a thousandth of a percent of
a column's variance.
"""

from __future__ import annotations

import hmac

import numpy as np

from fedstat.federation.door.state import SiteData
from fedstat.typing import Floats

WIDTH = 0.01
"""Of a value's move, in standard deviations of its column."""
DIGITS = 6
"""To which standardised columns are compared: center(x), x and C(x) of two levels move alike."""


def dithered(data: SiteData, X: Floats) -> Floats:
    """Return columns (n, p) as they enter sums: dithered where the owner wants it, nan where missing."""
    if data.policy.rounding == "none" or not len(X):
        return X
    secret, out = data.trust.identity.secret("dither"), np.array(X, dtype=np.float64)
    for j, whole in enumerate(X.T):
        here = ~np.isnan(whole)
        column = whole[here]
        sd = float(column.std()) if len(column) else 0.0
        if not sd > 0.0:
            continue
        z = np.round((column - column.mean()) / sd, DIGITS) + 0.0
        sign = 1.0 if z[np.flatnonzero(z)[0]] > 0.0 else -1.0
        drawn = hmac.digest(secret, (sign * z + 0.0).tobytes(), "sha256")
        rng = np.random.default_rng(int.from_bytes(drawn, "big"))
        out[here, j] += sign * sd * rng.uniform(-WIDTH / 2.0, WIDTH / 2.0, size=len(z))
    return out
