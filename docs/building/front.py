"""Draw the picture of the first page from its example when the site is made."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import statsmodels.api as sm
from matplotlib.figure import Figure
from sphinx.application import Sphinx

import fedstat as fs


def draw(file: Path) -> None:
    """Draw the effect of value on investment by company; the data are those that Grunfeld recorded."""
    books = sm.datasets.grunfeld.load_pandas().data
    partition = fs.ClientPartition.from_frame(books, by="firm")
    result = fs.FederatedOLS.from_formula("invest ~ value + capital", partition).fit()
    with mpl.rc_context({"svg.hashsalt": "fedstat", "font.size": 9}):
        figure = Figure(figsize=(7.4, 4.2), layout="constrained")
        result.plot_forest("value", ax=figure.subplots())
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None})


def prepare(app: Sphinx) -> None:
    """Draw the picture if it does not exist."""
    file = Path(app.srcdir) / "vignettes" / "front.svg"
    if not file.exists():
        draw(file)


def setup(app: Sphinx) -> dict[str, Any]:
    """Draw the picture before Sphinx looks for pages."""
    app.connect("builder-inited", prepare, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
