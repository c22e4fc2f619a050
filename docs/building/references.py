"""Link names in docstrings to pages by their last parts; a name without a page must at least exist."""

import pydoc

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """Find ``GLMResults.heterogeneity`` where it is documented, in any module.

    A name without a page is printed as code if the object exists; otherwise Sphinx warns.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    objects = env.domains.python_domain.objects
    known = sorted((name for name in objects if name.endswith(f".{target}")), key=len)
    if known:
        found = objects[known[0]]
        return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content)
    module, cls = node.get("py:module"), node.get("py:class")
    documented = pydoc.locate(f"{module}.{cls}") if cls else None
    scopes = ["", f"{module}.", f"{module}.{cls}.", f"{getattr(documented, '__module__', module)}."]
    return content if any(pydoc.locate(scope + target) is not None for scope in scopes) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Resolve references before Sphinx warns."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
