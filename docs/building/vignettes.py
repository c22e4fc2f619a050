"""Turn executed vignettes into notebooks of the site, and README's table of models into a part of two pages.

The notebook of a vignette that was executed before, by its test or by ``vignettes/render.py``, is used again.
Other vignettes are executed now. With ``-D vignettes_execute=0`` they are not, and a warning names each one.
"""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([\w./-]+\.(?:md|png))((?:#[\w-]+)?)\)")
"""A link to another file of the source tree, and the heading that it leads to."""

sys.path.insert(0, str(ROOT / "vignettes"))

import render  # noqa: E402

from building.gallery import write_thumbnail  # noqa: E402

logger = logging.getLogger(__name__)


def notebook_of(name: str, execute: bool) -> NotebookNode:
    """Find or make the executed notebook; return the source alone if it cannot be executed."""
    if (notebook := render.executed(name)) is not None:
        return notebook
    notebook = render.read(name)
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    if missing := render.lacks(name):
        note = f"*This page shows no output, because* `{missing}` *was not installed when it was made.*"
        notebook.cells.insert(1, nbformat.v4.new_markdown_cell(note))
        return notebook
    if not execute:
        logger.warning("vignette %s has not been executed", name)
        return notebook
    logger.info("executing vignette %s", name)
    began = time.perf_counter()
    notebook = render.execute(notebook)
    render.keep(name, notebook)
    logger.info("vignette %s took %.0f s", name, time.perf_counter() - began)
    return notebook


def show_pictures(cell: NotebookNode) -> None:
    """Give the pictures of a cell their alternative text and their original size."""
    shown = {"alt": cell.metadata.alt} if "alt" in cell.metadata else {}
    for output in cell.outputs:
        if width := output.get("metadata", {}).get("image/png", {}).get("width"):
            shown["width"] = f"{width}px"
    if shown:
        cell.metadata["mystnb"] = {"image": shown}


def page_of(file: Path) -> Path:
    """Find the page that is made from a file of the source tree; other files are their own pages."""
    if file.parent == ROOT / "vignettes":
        return DOCS / "vignettes" / f"{file.stem}.ipynb"
    return DOCS / "changes.md" if file == ROOT / "CHANGELOG.md" else file


def to_page(text: str, source: Path, page: Path) -> str:
    """Change links of a source file, which work in the source tree, into links from a page to other pages."""

    def lead(link: re.Match[str]) -> str:
        target = page_of((source.parent / link[1]).resolve())
        return f"]({Path(os.path.relpath(target, page.parent)).as_posix()}{link[2]})"

    return LINK.sub(lead, text)


def link_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links of a page to the sources of vignettes lead to their pages."""
    page = Path(app.env.doc2path(docname))
    source[0] = to_page(source[0], page, page)


def write_if_changed(path: Path, text: str) -> None:
    """Write a file only if its text changes, so that Sphinx does not make its page again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def section(text: str, title: str) -> str:
    """Return the text under a heading of README."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0].strip() + "\n"


def prepare(app: Sphinx) -> None:
    """Write the notebooks and the table to the folder of the pages."""
    folder = Path(app.srcdir) / "vignettes"
    for name in render.names():
        notebook = notebook_of(name, app.config.vignettes_execute)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                show_pictures(cell)
            else:
                cell.source = to_page(cell.source, render.FOLDER / f"{name}.md", folder / f"{name}.ipynb")
        write_thumbnail(notebook, folder / "thumbnails" / name)
        write_if_changed(folder / f"{name}.ipynb", nbformat.writes(notebook))
    readme = ROOT / "README.md"
    table = section(readme.read_text(encoding="utf-8"), "Which model for which data")
    # Pages in the folder of the documentation include the table, and links start at the page.
    write_if_changed(folder / "which-model.txt", to_page(table, readme, DOCS / "index.md"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the pages of vignettes before Sphinx looks for pages."""
    app.add_config_value("vignettes_execute", True, "env", [bool])
    app.connect("builder-inited", prepare, priority=100)
    app.connect("source-read", link_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
