"""The frame of every page: head, links to the others, sections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version

from fedstat.errors import FedstatError
from fedstat.operator.page.markup import Markup, link, tag

PAGES = (
    ("", "Overview"),
    ("plans", "Plans"),
    ("ledger", "Ledger"),
    ("refusals", "Refusals"),
    ("policy", "Policy"),
    ("check", "Check"),
)


def whole(name: str, root: str, here: str, title: str, *content: str) -> str:
    """Set content into a page of the site with this name, whose pages stand below `root`."""
    links = [
        link(f"{root}{path}", word, **({"aria_current": "page"} if path == here else {}))
        for path, word in PAGES
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} - {name}"),
        tag("link", rel="stylesheet", href=f"{root}style.css"),
    )
    body = tag(
        "body",
        tag("header", tag("p", name, class_="site"), tag("nav", *links)),
        tag("main", tag("h1", title), *content),
        tag("footer", f"fedstat {version('fedstat')}. This page is for the owner, on this machine alone."),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en")


def section(title: str, build: Callable[[], Iterable[str]]) -> Markup:
    """Set parts under a heading; what cannot be read is said in their place."""
    try:
        content = tuple(build())
    except (FedstatError, OSError, ImportError) as error:
        content = (tag("p", str(error), class_="problem"),)
    return tag("section", *([tag("h2", title)] if title else []), *content)


def note(text: str) -> Markup:
    """Say something in a paragraph."""
    return tag("p", text, class_="note")
