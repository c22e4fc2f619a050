"""HTML from functions, with all text escaped, and the frame of every page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape
from importlib.metadata import version

from fedstat.errors import FedstatError

# ----------------------------------------------------------------------------------------------------
# HTML from functions: what is not HTML already is escaped where it is put in.

VOID = frozenset({"meta", "link", "input"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape_text(text: str) -> Markup:
    """Escape a text; what no printer shows, or turns the direction of writing, is a question mark."""
    if isinstance(text, Markup):
        return text
    return Markup(escape("".join(one if one.isprintable() or one == "\n" else "?" for one in text)))


def join_markup(*parts: str) -> Markup:
    """Put parts one after the other."""
    return Markup("".join(map(escape_text, parts)))


def html_element(kind: str, /, *content: str, **attributes: str) -> Markup:
    """Make an element; an attribute's name may end in an underscore, and has them in place of hyphens."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(escape_attribute(value))}"'
        for key, value in attributes.items()
    )
    end = "" if kind in VOID else f"{join_markup(*content)}</{kind}>"
    return Markup(f"<{kind}{told}>{end}")


def escape_attribute(value: str) -> str:
    """Keep what is printable of an attribute's value."""
    return "".join(one if one.isprintable() else "?" for one in value)


def link(address: str, *content: str, **attributes: str) -> Markup:
    """Refer to another page of this site."""
    return html_element("a", *content, href=address, **attributes)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = (), kind: str = ""
) -> Markup:
    """Set rows in columns; numbers stand in those that are set to the `right`."""

    def cells(name: str, row: Sequence[str]) -> Markup:
        return join_markup(
            *(
                html_element(name, cell, **({"class_": "number"} if place in right else {}))
                for place, cell in enumerate(row)
            )
        )

    top = html_element("thead", html_element("tr", cells("th", head)))
    body = html_element("tbody", *(html_element("tr", cells("td", row)) for row in rows))
    return html_element("div", html_element("table", top, body, class_=kind or "lines"), class_="wide")


def definition_list(rows: Iterable[tuple[str, str]]) -> Markup:
    """Set names beside what is told of them."""
    return html_element(
        "dl", *(join_markup(html_element("dt", name), html_element("dd", value)) for name, value in rows)
    )


def item_list(lines: Iterable[str]) -> Markup:
    """Set lines below each other."""
    return html_element("ul", *(html_element("li", line) for line in lines))


def usage_bar(part: float, whole: float, words: str) -> Markup:
    """Show how much of a whole is used up, and say it."""
    level = "full" if part >= whole else "high" if part >= 0.8 * whole else "low"
    meter = html_element("progress", words, class_=level, max=f"{whole:.6g}", value=f"{min(part, whole):.6g}")
    return join_markup(meter, html_element("span", words, class_="said"))


# ----------------------------------------------------------------------------------------------------
# The frame of every page: head, links to the others, sections.

PAGES = (
    ("", "Overview"),
    ("plans", "Plans"),
    ("ledger", "Ledger"),
    ("refusals", "Refusals"),
    ("policy", "Policy"),
    ("check", "Check"),
)


def full_page(name: str, root: str, here: str, title: str, *content: str) -> str:
    """Set content into a page of the site with this name, whose pages stand below `root`."""
    links = [
        link(f"{root}{path}", word, **({"aria_current": "page"} if path == here else {}))
        for path, word in PAGES
    ]
    head = html_element(
        "head",
        html_element("meta", charset="utf-8"),
        html_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        html_element("title", f"{title} - {name}"),
        html_element("link", rel="stylesheet", href=f"{root}style.css"),
    )
    body = html_element(
        "body",
        html_element("header", html_element("p", name, class_="site"), html_element("nav", *links)),
        html_element("main", html_element("h1", title), *content),
        html_element(
            "footer", f"fedstat {version('fedstat')}. This page is for the owner, on this machine alone."
        ),
    )
    return "<!DOCTYPE html>\n" + html_element("html", head, body, lang="en")


def section(title: str, build: Callable[[], Iterable[str]]) -> Markup:
    """Set parts under a heading; what cannot be read is said in their place."""
    try:
        content = tuple(build())
    except (FedstatError, OSError, ImportError) as error:
        content = (html_element("p", str(error), class_="problem"),)
    return html_element("section", *([html_element("h2", title)] if title else []), *content)


def paragraph(text: str) -> Markup:
    """Say something in a paragraph."""
    return html_element("p", text, class_="note")
