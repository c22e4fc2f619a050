"""Which releases are sums whose terms the release history compares, and why the others are not.

A sum over rows is a weight for each row times a quantity. A step that reports one of `TERM_FACTS` hands over
the columns, groups or weights of its sums, and they are compared with those of all earlier releases.
`WITHOUT_TERMS` names the steps that report none, and `FURTHER_WEIGHTS` those that sum their columns under
further weights too. Both give the reason. A step of a new family without term facts and without a reason
fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, RepeatedRelease

TERM_FACTS = (facts.SummedProducts, facts.ScoreAndInformation, facts.RowGroups, facts.LevelsRequested)
NOISE_FACTS = (NoiseRequired, RepeatedRelease)

ONE_OWNER = (
    "sums between sites with different columns: no site has the columns of the other, so rows behind "
    "products are counted securely, and group sizes, columns and equations about a column are limited"
)
PER_ENTITY = "the protocol releases numbers for each entity; the policy limits these (per_entity)"
WITHOUT_TERMS: Mapping[tuple[str, str], str] = {
    (
        "design",
        "release_spec",
    ): ("how columns are coded; repeats the levels and sums that the coding was made of"),
    ("design", "transform_sums"): (
        "sums of one column over the complete rows, whose sets are compared; the column enters the history "
        "when the rows are opened"
    ),
    ("boost", "sum_uneven_curves"): "one bit: whether points that few curves lack are interpolated",
    ("boost", "sum_uneven_curves_along"): "one bit: whether points that few curves lack are interpolated",
    ("boost_vertical", "*"): ONE_OWNER,
    ("vfem", "*"): ONE_OWNER,
    ("vglm", "*"): ONE_OWNER,
    ("laser", "*"): PER_ENTITY,
    ("m2sem", "*"): PER_ENTITY,
}
"""Reason by family and step; ``*`` for all steps of a family."""

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


def reason_of(family: str, step: str) -> str:
    """Return why the sums of a step have no terms; empty if there is no reason."""
    return WITHOUT_TERMS.get((family, step), "") or WITHOUT_TERMS.get((family, "*"), "")
