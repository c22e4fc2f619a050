"""Rendering of the owner's page: jinja2 templates, in which every value is escaped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from fedstat.errors import FedstatError

if TYPE_CHECKING:
    from jinja2 import Environment

T = TypeVar("T")
PAGES = (
    ("", "Overview"),
    ("plans", "Plans"),
    ("ledger", "Ledger"),
    ("columns", "Columns"),
    ("exposure", "Exposure"),
    ("refusals", "Refusals"),
    ("policy", "Policy"),
    ("check", "Check"),
)


class SectionData(NamedTuple, Generic[T]):
    """The data of one section of a page, or its problem."""

    value: T | None
    problem: str = ""


def section_data(read: Callable[[], T]) -> SectionData[T]:
    """Read the data of a section; a problem with one section does not affect the rest of the page."""
    try:
        return SectionData(read())
    except (FedstatError, OSError, ImportError) as error:
        return SectionData(None, str(error))


def printable(value: object) -> object:
    """Replace control characters, and those that change the direction of writing, by question marks."""
    if hasattr(value, "__html__"):  # the output of a macro, which has been escaped
        return value
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in str(value))


@cache
def environment() -> Environment:
    """Return the templates, with autoescape on.

    Raises
    ------
    ImportError
        jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("The owner's page needs jinja2. Install it: pip install 'fedstat[site]'") from error
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        finalize=printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **data: Any) -> str:
    """Render a template with data."""
    return (
        environment().get_template(template).render({"pages": PAGES, "version": version("fedstat"), **data})
    )
