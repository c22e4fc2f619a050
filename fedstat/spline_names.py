"""Names of coefficients: one form for each product, and spline columns, ``bs(x, df=4)[0]``, short for print.

Spline columns are counted from zero as in patsy.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from itertools import permutations


def _balanced(depth: int) -> str:
    inside = "[^()]*"
    for _ in range(depth):
        inside = rf"(?:[^()]|\({inside}\))*"
    return inside


SPLINE = re.compile(rf"(\b(?:bs|cr|cc)\({_balanced(4)}\))\[(\d+)\]")


MOST_PERMUTED = 4
"""Factors of a product of which a text is searched for in every order."""
_QUOTED_OR_SIGN = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|[()\[\]:]")
_QUOTED_OR_COMMA = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|[(),]")
_WORDS = re.compile(r"\"[^\"]*\"|'[^']*'|\w+|[^\w\s]")


def factors_of(name: str) -> tuple[str, ...]:
    """Return the factors of a product, ``a[T.x:y]:b`` -> ``("a[T.x:y]", "b")``.

    Colons inside brackets, parentheses and quotes separate nothing.
    """
    depth, parts, start = 0, [], 0
    for found in _QUOTED_OR_SIGN.finditer(name):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(found[0], 0)
        if found[0] == ":" and depth == 0:
            parts.append(name[start : found.start()])
            start = found.end()
    # A level may have a bracket of its own: then nothing is known about the factors.
    return (*parts, name[start:]) if depth == 0 else (name,)


def canonical_name(name: str) -> str:
    """Return the form that all spellings of a coefficient or term share: ``b:a`` is ``a:b``.

    Every comparison of names of two fits, or of a name that a caller writes, uses it.

    Examples
    --------
    >>> canonical_name("x:sex[T.m]"), canonical_name("I(v**2)"), canonical_name("sex[T.not known]")
    ('sex [ T . m ]:x', 'I ( v * * 2 )', 'sex [ T . not known ]')
    """
    return ":".join(sorted(" ".join(_WORDS.findall(one)) for one in factors_of(name)))


def find_name(name: str, names: Sequence[str]) -> str:
    """Return which of names a text means: the same one, or one that is spelled differently; or the text.

    Examples
    --------
    >>> find_name("x:sex[T.m]", ["x", "sex[T.m]:x"])
    'sex[T.m]:x'
    """
    if name in names:
        return name
    form = canonical_name(name)
    return next((one for one in names if canonical_name(one) == form), name)


def spellings(name: str) -> tuple[str, ...]:
    """Return regular expressions of a name: with any blanks, and with its factors in every order.

    Examples
    --------
    >>> [bool(re.fullmatch(one, "x : I(v**2)")) for one in spellings("I(v ** 2):x")]
    [False, True]
    """
    factors = factors_of(name)
    orders = permutations(factors) if len(factors) <= MOST_PERMUTED else [factors]
    return tuple(r"\s*:\s*".join(map(_with_blanks, order)) for order in orders)


def _with_blanks(text: str) -> str:
    """Return a regular expression of a text, with any blanks between its words and signs."""
    out, end = "", 0
    for found in _WORDS.finditer(text):
        between = r"\s+" if end and text[end - 1].isalnum() and found[0][0].isalnum() else r"\s*"
        out += (between if out else "") + re.escape(found[0])
        end = found.end()
    return out


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
    short = {text: without_options(text) for text in texts}
    shared = {one for one, count in Counter(short.values()).items() if count > 1}
    kept = {text: text if one in shared else one for text, one in short.items()}
    return tuple(SPLINE.sub(lambda found: f"{kept[found[1]]}[{found[2]}]", name) for name in names)


def without_options(text: str) -> str:
    """Leave out the options of a call.

    Examples
    --------
    >>> without_options("cr(`a, b`, df=4)")
    'cr(`a, b`)'
    """
    depth = 0
    for found in _QUOTED_OR_COMMA.finditer(text):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[0] == "," and depth == 1:
            return f"{text[: found.start()]})"
    return text


def close_names(name: str, names: Sequence[str]) -> list[str]:
    """Return the names of coefficients that are probably meant: those of the same level, or similar ones.

    A level without its coding, ``sex[m]``, and one without the category of its equation are found exactly.
    """
    bare = [one.replace("[T.", "[") for one in names]
    wanted = name.replace("[T.", "[")
    same = [
        one for one, plain in zip(names, bare, strict=True) if wanted in (plain, plain.partition(": ")[2])
    ]
    return same or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
