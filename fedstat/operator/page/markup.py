"""HTML from functions: what is not HTML already is escaped where it is put in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

VOID = frozenset({"meta", "link", "input"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def shown(text: str) -> Markup:
    """Escape a text; what no printer shows, or turns the direction of writing, is a question mark."""
    if isinstance(text, Markup):
        return text
    return Markup(escape("".join(one if one.isprintable() or one == "\n" else "?" for one in text)))


def joined(*parts: str) -> Markup:
    """Put parts one after the other."""
    return Markup("".join(map(shown, parts)))


def tag(kind: str, /, *content: str, **attributes: str) -> Markup:
    """Make an element; an attribute's name may end in an underscore, and has them in place of hyphens."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(shown_attribute(value))}"'
        for key, value in attributes.items()
    )
    end = "" if kind in VOID else f"{joined(*content)}</{kind}>"
    return Markup(f"<{kind}{told}>{end}")


def shown_attribute(value: str) -> str:
    """Keep what is printable of an attribute's value."""
    return "".join(one if one.isprintable() else "?" for one in value)


def link(address: str, *content: str, **attributes: str) -> Markup:
    """Refer to another page of this site."""
    return tag("a", *content, href=address, **attributes)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = (), kind: str = ""
) -> Markup:
    """Set rows in columns; numbers stand in those that are set to the `right`."""

    def cells(name: str, row: Sequence[str]) -> Markup:
        return joined(
            *(
                tag(name, cell, **({"class_": "number"} if place in right else {}))
                for place, cell in enumerate(row)
            )
        )

    top = tag("thead", tag("tr", cells("th", head)))
    body = tag("tbody", *(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", top, body, class_=kind or "lines"), class_="wide")


def pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    """Set names beside what is told of them."""
    return tag("dl", *(joined(tag("dt", name), tag("dd", value)) for name, value in rows))


def listed(lines: Iterable[str]) -> Markup:
    """Set lines below each other."""
    return tag("ul", *(tag("li", line) for line in lines))


def bar(part: float, whole: float, words: str) -> Markup:
    """Show how much of a whole is used up, and say it."""
    level = "full" if part >= whole else "high" if part >= 0.8 * whole else "low"
    meter = tag("progress", words, class_=level, max=f"{whole:.6g}", value=f"{min(part, whole):.6g}")
    return joined(meter, tag("span", words, class_="said"))
