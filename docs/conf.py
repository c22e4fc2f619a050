"""Settings of the documentation; ``docs/building`` makes what is not written by hand."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fedstat

sys.modules["fedstat.curves"] = (
    fedstat.curves
)  # so that its functions have pages under the name they are called by

project = "fedstat"
author = "the authors of fedstat"
copyright = f"2026, {author}; BSD 3-Clause License"  # noqa: A001
version = release = version_of("fedstat")
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "building.front",
    "building.gallery",
    "building.mathml",
    "building.offline",
    "building.references",
    "building.vignettes",
]
templates_path = ["_templates"]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [("py:class", r"fedstat\..*Record")]  # what results are stored as

myst_enable_extensions = ["dollarmath", "substitution"]
myst_substitutions = {"version": version}
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"

autosummary_generate = True
autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # numpydoc sections say them, with shapes and units
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_title = "fedstat"
html_static_path = ["_static"]
html_css_files = ["fedstat.css"]
html_js_files = ["copy.js", "tables.js"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_sidebars = {
    page: [] for page in ("architecture", "arguments", "changes", "contracts", "disclosure", "evidence")
}
toc_object_entries_show_parents = "hide"
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
