"""Check that pages load nothing from other hosts, and that each picture has an alternative text."""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

PARTS = re.compile(r"<(script|img|iframe|source|link|video|audio|object|embed)\b([^>]*)>")
ELSEWHERE = re.compile(r"""\b(?:src|href|data)=["']?(?:https?:)?//""")
FETCHED = re.compile(r"""(?:@import\s+|url\()["']?(?:https?:)?//""")
DESCRIBED = re.compile(r"""\balt=["'][^"']""")


def faults(page: Path) -> list[str]:
    """Return parts of a page that are loaded from another host, and pictures without alternative text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".css":
        return ["a style from another host"] if FETCHED.search(text) else []
    found = []
    for tag, attributes in PARTS.findall(text):
        if ELSEWHERE.search(attributes):
            found.append(f"<{tag}> from another host")
        if tag == "img" and not DESCRIBED.search(attributes):
            found.append("a picture without alternative text")
    return found


def check(app: Sphinx, exception: Exception | None) -> None:
    """Check all pages and styles that were written."""
    if exception is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    pages = [*out.rglob("*.html"), *out.rglob("*.css")]
    found = [f"{page.relative_to(out)}: {fault}" for page in sorted(pages) for fault in faults(page)]
    if found:
        raise ExtensionError("\n".join(found))


def setup(app: Sphinx) -> dict[str, bool]:
    """Check when all pages are written."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
