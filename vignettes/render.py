"""Execute vignettes and write them as HTML.

``python vignettes/render.py [name ...]`` renders the named ones, or all, to ``vignettes/_build``. With
``FEDSTAT_VIGNETTE_FAST=1`` in the environment the long one runs in a reduced form.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
NEEDS = {"three-institutions-over-flare": ("nvflare", "fedstat[flare]")}
"""Module that a vignette runs on, and what installs it; without the module it is skipped."""

STYLE = """<style>
  body.jp-Notebook { max-width: 68rem; margin: 0 auto; padding: 1rem; }
  .jp-RenderedHTMLCommon p, .jp-RenderedHTMLCommon li { max-width: 46rem; }
  .jp-OutputArea-output pre { font-size: 12px; line-height: 1.25; word-break: normal; }
</style>
"""


def names() -> list[str]:
    """Names of the vignettes."""
    return sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")


def read(name: str) -> NotebookNode:
    """Read the source of a vignette: Markdown in which blocks of Python are cells."""
    return jupytext.read(FOLDER / f"{name}.md", fmt="md")


def execute(notebook: NotebookNode, *, seconds_per_cell: int = 1200) -> NotebookNode:
    """Run all cells, in the folder of the vignettes; the first error is raised."""
    client = NotebookClient(
        notebook,
        timeout=seconds_per_cell,
        kernel_name="python3",
        extra_arguments=["--InlineBackend.figure_formats=retina", "--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(FOLDER)}},
    )
    return client.execute()


def to_html(name: str, notebook: NotebookNode) -> str:
    """One HTML page, figures included."""
    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    return page.replace("</head>", STYLE + "</head>", 1)


def render(name: str, folder: Path) -> Path:
    """Execute one vignette and write its page."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.html"
    path.write_text(to_html(name, execute(read(name))), encoding="utf-8")
    return path


def main(wanted: Sequence[str]) -> None:
    """Render the wanted vignettes, or all."""
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        sys.exit(f"no vignette {', '.join(unknown)}; there are {', '.join(names())}")
    for name in wanted or names():
        module, extra = NEEDS.get(name, ("sys", ""))
        if importlib.util.find_spec(module) is None:
            print(f"{name} is skipped: it needs {extra}")
            continue
        began = time.perf_counter()
        path = render(name, FOLDER / "_build")
        print(f"{path}  {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
