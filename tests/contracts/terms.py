"""Which releases are sums whose terms the release history compares, and why the others are not.

A step that reports terms hands over the columns, groups or weights of its sums, and they are compared with
those of all earlier releases. A family with other sums states the reason where it declares them, and is not
entered without one. `FURTHER_WEIGHTS` has reasons of steps that sum their columns under further weights too.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.disclosure.family import WITHOUT_TERMS
from fedstat.federation.disclosure.site import FAMILIES, load_families

MEANS = (
    "weights are means of many values at the coefficients, with which no combination can be known; those of "
    "a session are compared with each other"
)
FURTHER_WEIGHTS: Mapping[tuple[str, str], str] = {
    ("cox", "sum_intervals"): f"columns over the rows at risk in an interval: {MEANS}",
    ("cox", "sum_products"): f"products over the rows at risk in an interval: {MEANS}",
    ("gee", "sum_scores"): (
        "products of different rows of a cluster: their clusters are counted, and are the same in all "
        "sessions"
    ),
    ("mixed", "sum_products"): f"products of sums over groups: {MEANS}; groups of rare sizes are examined",
    ("mixed", "sum_effects"): f"products of sums over groups: {MEANS}; groups of rare sizes are examined",
    ("glm", "sum_changes"): f"columns where a variable is changed in all rows: {MEANS}",
    ("mixed", "sum_changes"): f"columns where a variable is changed in all rows: {MEANS}",
}


def stated() -> dict[tuple[str, str], str]:
    """Return the stated reasons by family and step; ``*`` for all steps of a family."""
    load_families()
    found = {(family, "*"): reason for family, reason in WITHOUT_TERMS.items()}
    for family, steps in FAMILIES.items():
        for name, step in steps.items():
            for one in step.given.values():
                if one.without_terms:
                    found[family, name] = one.without_terms
    return found
