"""Codings of categories: a matrix with one row for each level, its columns named as patsy does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from fedstat.typing import Floats

TREATMENT = "Treatment"
WRITTEN: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Treatment": (TREATMENT, "reference"),
        "contr.treatment": (TREATMENT, "base"),
        "Sum": ("Sum", "omit"),
        "contr.sum": ("Sum", ""),
        "Helmert": ("Helmert", ""),
        "contr.helmert": ("Helmert", ""),
        "Diff": ("Diff", ""),
        "contr.diff": ("Diff", ""),
        "Poly": ("Poly", ""),
        "contr.poly": ("Poly", ""),
    }
)
"""What may stand in the second place of C(): the coding, and its one argument, a level."""
_POLYNOMIALS = (".Constant", ".Linear", ".Quadratic", ".Cubic")


def contrast_matrix(
    coding: str, levels: Sequence[object], omitted: object, *, whole: bool
) -> tuple[Floats, list[str]]:
    """Rows by level, columns (l, l - 1), and what follows the factor's name in theirs.

    `whole`: (l, l), with the constant, where no intercept takes it. `omitted` is that of Sum, by default the
    last level. All codings span what dummies do.
    """
    n = len(levels)
    match coding:
        case "Sum":
            out = n - 1 if omitted is None else list(levels).index(omitted)
            kept = [place for place in range(n) if place != out]
            columns = np.eye(n)[:, kept]
            columns[out] = -1.0
            names, first = [f"[S.{levels[place]}]" for place in kept], "[mean]"
        case "Helmert":
            columns = np.where(np.arange(n)[:, None] <= np.arange(n - 1), -1.0, 0.0)
            columns[np.arange(1, n), np.arange(n - 1)] = np.arange(1, n)
            names, first = [f"[H.{level}]" for level in levels[1:]], "[H.intercept]"
        case "Diff":
            steps = np.arange(1, n)
            columns = steps / n - (np.arange(n)[:, None] < steps)
            # patsy calls each difference by its first level, and with the constant counts one further.
            names, first = [f"[D.{level}]" for level in levels[: n - 1]], f"[D.{levels[0]}]"
            if whole:
                names = [f"[D.{level}]" for level in levels[1:]]
        case _:
            powers = (np.arange(n) - (n - 1) / 2)[:, None] ** np.arange(n)
            q, r = np.linalg.qr(powers)
            columns = (q * np.sign(np.diag(r)))[:, 1:]
            titles = [*_POLYNOMIALS[:n], *(f"^{degree}" for degree in range(len(_POLYNOMIALS), n))]
            first, *names = titles
    if whole:
        return np.column_stack([np.ones(n), columns]), [first, *names]
    return columns, names
