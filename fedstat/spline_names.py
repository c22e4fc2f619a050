"""Names of spline columns, such as ``bs(x, df=4)[0]``: counted from zero as in patsy, and short for print."""

from __future__ import annotations

import re
from collections import Counter
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


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Leave out the options of splines, as tables and plots do.

    Splines that differ in their options alone keep them.

    Examples
    --------
    >>> short_names(["x", "bs(log(z), df=4)[0]:c[a]", "cr(x, df=3)[0]", "cr(x, df=4)[0]"])
    ('x', 'bs(log(z))[0]:c[a]', 'cr(x, df=3)[0]', 'cr(x, df=4)[0]')
    """
    texts = dict.fromkeys(found[1] for name in names for found in SPLINE.finditer(name))
    short = {text: _without_options(text) for text in texts}
    shared = {one for one, count in Counter(short.values()).items() if count > 1}
    kept = {text: text if one in shared else one for text, one in short.items()}
    return tuple(SPLINE.sub(lambda found: f"{kept[found[1]]}[{found[2]}]", name) for name in names)


def _without_options(text: str) -> str:
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 1:
            return f"{text[:i]})"
    return text
