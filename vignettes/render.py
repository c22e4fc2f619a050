"""Execute vignettes and keep them as notebooks, of which the documentation makes its pages.

``python vignettes/render.py [name ...]`` executes the named ones, or all, into the folder that
``FEDSTAT_NOTEBOOKS`` names, ``vignettes/_build`` unless it is set. With ``FEDSTAT_VIGNETTE_FAST=1`` in the
environment the long one runs in a reduced form.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
NEEDS = {
    "effects-of-a-treatment": ("causaldata", "causaldata"),
    "three-institutions-over-flare": ("nvflare", "fedstat[flare]"),
}
"""Module that a vignette runs on, and what installs it; without the module it is skipped."""


def names() -> list[str]:
    """Names of the vignettes."""
    return sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")


def kept() -> Path:
    """Folder of the executed notebooks."""
    return Path(os.environ.get("FEDSTAT_NOTEBOOKS", FOLDER / "_build"))


def lacks(name: str) -> str:
    """What has to be installed for a vignette to run, or nothing."""
    module, extra = NEEDS.get(name, ("sys", ""))
    return extra if importlib.util.find_spec(module) is None else ""


def is_hidden(cell: NotebookNode) -> bool:
    """Whether a cell checks what the text claims; readers do not see it."""
    return "remove-cell" in cell.metadata.get("tags", ())


def without_hidden(notebook: NotebookNode) -> NotebookNode:
    """Drop the hidden cells."""
    notebook.cells = [cell for cell in notebook.cells if not is_hidden(cell)]
    return notebook


def read(name: str, *, hidden: bool = False) -> NotebookNode:
    """Read the source of a vignette: Markdown in which blocks of Python are cells.

    Only the tests read hidden cells. What they claim of random noise holds for the seed of the tests.
    """
    notebook = jupytext.read(FOLDER / f"{name}.md", fmt="md")
    return notebook if hidden else without_hidden(notebook)


def execute(notebook: NotebookNode, *, seconds_per_cell: int = 1200) -> NotebookNode:
    """Run all cells, in the folder of the vignettes; the first error is raised."""
    # A page holds what a computation found, and not how far it had come.
    os.environ.setdefault("FEDSTAT_PROGRESS", "0")
    client = NotebookClient(
        notebook,
        timeout=seconds_per_cell,
        kernel_name="python3",
        extra_arguments=["--InlineBackend.figure_formats=retina", "--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(FOLDER)}},
    )
    return client.execute()


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Cells that are run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def keep(name: str, notebook: NotebookNode) -> Path:
    """Write an executed notebook."""
    path = kept() / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def executed(name: str) -> NotebookNode | None:
    """The text as it is now with the outputs that were kept, if its code is what was run."""
    path = kept() / f"{name}.ipynb"
    if not path.exists():
        return None
    notebook, run = read(name), nbformat.read(path, as_version=4)
    now, then = code_cells(notebook), code_cells(run)
    if [cell.source for cell in now] != [cell.source for cell in then]:
        return None
    for cell, before in zip(now, then, strict=True):
        cell.outputs = before.outputs
    notebook.metadata["language_info"] = run.metadata["language_info"]
    return notebook


def main(wanted: Sequence[str]) -> None:
    """Execute the wanted vignettes, or all."""
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        sys.exit(f"no vignette {', '.join(unknown)}; there are {', '.join(names())}")
    for name in wanted or names():
        if missing := lacks(name):
            print(f"{name} is skipped: it needs {missing}")
            continue
        began = time.perf_counter()
        path = keep(name, execute(read(name)))
        print(f"{path}  {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
