"""Names of spline columns, such as ``bs(x, df=4)[0]``, counted from zero as in patsy."""

from __future__ import annotations

import re
from collections.abc import Sequence


def _balanced(depth: int) -> str:
    inside = "[^()]*"
    for _ in range(depth):
        inside = rf"(?:[^()]|\({inside}\))*"
    return inside


SPLINE = re.compile(rf"(\b(?:bs|cr|cc)\({_balanced(4)}\))\[(\d+)\]")


def count_from_zero(names: Sequence[str]) -> tuple[str, ...]:
    """Count the columns of each spline of a fit from zero, and write ``(0,)`` where patsy writes ``(0, )``.

    Examples
    --------
    >>> count_from_zero(["x", "bs(z, df=4)[1]:c[a]", "bs(z, df=4)[2]:c[a]"])
    ('x', 'bs(z, df=4)[0]:c[a]', 'bs(z, df=4)[1]:c[a]')
    """
    first: dict[str, int] = {}
    for text, place in (found for name in names for found in SPLINE.findall(name)):
        first[text] = min(first.get(text, 1), int(place))

    def counted(found: re.Match[str]) -> str:
        return f"{found[1].replace(', )', ',)')}[{int(found[2]) - first[found[1]]}]"

    return tuple(SPLINE.sub(counted, name) for name in names)
