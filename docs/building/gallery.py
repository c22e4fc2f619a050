"""A list of pages as cards, each with a title, a sentence and a thumbnail of its first picture or text."""

import base64
import io
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from nbformat import NotebookNode
from PIL import Image
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree

WIDTH = 480
"""Pixels of a thumbnail, twice of those that a card shows."""
LINES = 14
"""Lines of text in the thumbnail of a page without pictures."""


def write_thumbnail(notebook: NotebookNode, stem: Path) -> None:
    """Write the first picture of a notebook, made smaller, or else the first text that it prints."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [(cell, output) for cell in cells for output in cell.outputs]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for cell, output in outputs:
        if "alt" in cell.metadata and (drawn := output.get("data", {}).get("image/png")):
            picture = Image.open(io.BytesIO(base64.b64decode(drawn))).convert("RGB")
            picture.thumbnail((WIDTH, WIDTH))
            picture.save(stem.with_suffix(".png"), optimize=True)
            stem.with_suffix(".txt").write_text(cell.metadata.alt, encoding="utf-8")
            return
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for _, output in outputs]
    long = [text for text in texts if text.count("\n") >= LINES // 2]
    stem.with_suffix(".txt").write_text(
        "\n".join((long or texts or [""])[0].splitlines()[:LINES]), encoding="utf-8"
    )


def thumbnail(folder: Path, name: str) -> nodes.Node | None:
    """Return the picture or the text of a page, if it has one."""
    file = folder / f"{name}.txt"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if not text:
        return None
    if file.with_suffix(".png").exists():
        return nodes.image(uri=f"/vignettes/thumbnails/{name}.png", alt=text)
    return nodes.literal_block(text, text, language="none", classes=["thumbnail"])


class Gallery(TocTree):
    """A hidden table of contents whose lines are ``page: what it shows``, and a card for each page."""

    def run(self) -> list[nodes.Node]:
        """Return the table of contents and the cards."""
        pages = [re.fullmatch(r"(\S+?)(?:\.ipynb)?: (.*)", line) for line in self.content if line.strip()]
        if not all(pages):
            raise self.error("each line of a gallery is 'page: what it shows'")
        about = {match[1]: match[2] for match in pages if match}
        self.content = StringList(list(about), source=self.content.source(0))
        self.options["hidden"] = None
        folder = Path(self.env.srcdir) / "vignettes" / "thumbnails"
        cards = nodes.container(classes=["gallery"])
        for page, line in about.items():
            title = addnodes.pending_xref(
                "", nodes.inline(), refdomain="std", reftype="doc", reftarget=f"/{page}", refexplicit=False
            )
            title["refdoc"] = self.env.docname
            card = nodes.container(classes=["card"])
            if (shown := thumbnail(folder, Path(page).name)) is not None:
                card += shown
            card += nodes.paragraph("", "", nodes.strong("", "", title))
            card += nodes.paragraph(line, line)
            cards += card
        return [*super().run(), cards]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("gallery", Gallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
