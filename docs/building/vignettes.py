"""Turn executed vignettes into notebooks of the site, and README's table of models into a part of two pages.

The notebook of a vignette that was executed before, by its test or by ``vignettes/render.py``, is used again.
Other vignettes are executed now. With ``-D vignettes_execute=0`` they are not, and a warning names each one.
"""

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
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
    notebook = render.execute(notebook)
    render.keep(name, notebook)
    return notebook


def show_pictures(cell: NotebookNode) -> None:
    """Give the pictures of a cell their alternative text and their original size."""
    shown = {"alt": cell.metadata.alt} if "alt" in cell.metadata else {}
    for output in cell.outputs:
        if width := output.get("metadata", {}).get("image/png", {}).get("width"):
            shown["width"] = f"{width}px"
    if shown:
        cell.metadata["mystnb"] = {"image": shown}


def to_page(text: str) -> str:
    """Change links between source files into links between pages."""
    text = text.replace("](../docs/", "](../")
    return re.sub(r"\]\(((?:vignettes/)?[\w-]+)\.md(#[\w-]+)?\)", r"](\1.ipynb\2)", text)


def link_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links of a page to the sources of vignettes, which work in the source tree, lead to their pages."""
    source[0] = re.sub(r"\]\(\.\./vignettes/([\w-]+)\.md(#[\w-]+)?\)", r"](vignettes/\1.ipynb\2)", source[0])


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
                cell.source = to_page(cell.source)
        write_thumbnail(notebook, folder / "thumbnails" / name)
        write_if_changed(folder / f"{name}.ipynb", nbformat.writes(notebook))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    write_if_changed(folder / "which-model.txt", to_page(section(readme, "Which model for which data")))


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the pages of vignettes before Sphinx looks for pages."""
    app.add_config_value("vignettes_execute", True, "env", [bool])
    app.connect("builder-inited", prepare, priority=100)
    app.connect("source-read", link_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
