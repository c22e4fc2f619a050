"""Arrays that a site released in one session, from the site's own ledger chain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

from fedstat.federation.audit.event_log import REFUSAL, SessionChain, SiteEntry
from fedstat.federation.disclosure.column_sums import ColumnExposure
from fedstat.federation.disclosure.site import RECEIPT_FAMILY

HEAD = ("step", "array", "kind", "masked", "messages", "largest", "bytes", "entities", "rho charged")
RIGHT = range(4, len(HEAD))
STATED = "state_ledger"
AGREED = {"schema", "control"}


def released_rows(chain: SessionChain) -> list[tuple[str, ...]]:
    """Return one row for every array of every step, under :data:`HEAD`; no charges if there are none."""
    by_array: dict[tuple[str, str, str, bool], list[SiteEntry]] = {}
    for entry in (entry for entry in chain.entries if entry.left):
        by_array.setdefault((entry.step, entry.array, entry.kind, entry.masked), []).append(entry)
    shown = len(HEAD) if any(entry.charged for entry in chain.entries) else len(HEAD) - 1
    return [_row(key, found)[:shown] for key, found in by_array.items()]


def _row(key: tuple[str, str, str, bool], found: list[SiteEntry]) -> tuple[str, ...]:
    step, array, kind, masked = key
    charged = [Fraction(entry.charged) for entry in found if entry.charged]
    largest = max((entry.shape for entry in found), key=lambda shape: (len(shape), shape))
    return (
        step,
        array,
        kind,
        "yes" if masked else "",
        f"{len(found):,}",
        " x ".join(map(str, largest)) or "1",
        f"{sum(entry.bytes for entry in found):,}",
        f"{max(entry.entities for entry in found):,}",
        f"{float(sum(charged)):.3g}" if charged else "",
    )


def refusals_of(chain: SessionChain) -> list[SiteEntry]:
    """Return the entries of refused requests."""
    return [entry for entry in chain.entries if entry.kind == REFUSAL]


def released_kind_counts(chain: SessionChain) -> Counter[str]:
    """Count the released messages by the kind of their values, without statements for receipts."""
    entries = (entry for entry in chain.entries if entry.left and entry.family != RECEIPT_FAMILY)
    return Counter(f"{entry.kind}, masked" if entry.masked else entry.kind for entry in entries)


def only_connection_steps(chain: SessionChain) -> bool:
    """Return whether the session only connected: names and kinds of columns, digests, statements."""
    return released_kind_counts(chain).keys() <= AGREED and not refusals_of(chain)


FAMILY_WORDS: Mapping[str, str] = {
    "aft": "survival regression",
    "align": "linkage of records",
    "approval": "plan",
    "boost": "boosting of curves",
    "boost_private": "boosting with a privacy budget",
    "boost_vertical": "boosting of curves",
    "column tables": "tables over columns of several sites",
    "copula": "synthetic data",
    "copula_glm": "regression with a privacy budget",
    "cox": "survival regression",
    "descriptive": "tables and survival curves",
    "design": "columns of a formula",
    "evaluation": "evaluation of a model",
    "fedavg": "federated averaging",
    "glm": "regression",
    "laser": "neural network",
    "m2sem": "clusters and factors",
    "schema": "description of the columns",
    "secure": "exchange of keys",
    "treatment": "effect of a treatment",
    "vfem": "regression over columns of several sites",
    "vglm": "regression over columns of several sites",
}
"""Families in words; a family without an entry is shown by its name."""


def families_of(chain: SessionChain) -> tuple[str, ...]:
    """Return what was requested, in words, in the order of the first request."""
    request = (entry.family for entry in chain.entries if entry.family != RECEIPT_FAMILY)
    return tuple(dict.fromkeys(FAMILY_WORDS.get(family, family) for family in request))


def statements_of(chain: SessionChain) -> list[SiteEntry]:
    """Return the entries of the statements that the site signed for receipts."""
    return [
        entry
        for entry in chain.entries
        if entry.left and (entry.family, entry.step) == (RECEIPT_FAMILY, STATED)
    ]


def released_bytes(chain: SessionChain) -> int:
    """Return the number of bytes released."""
    return sum(entry.bytes for entry in chain.entries if entry.left)


# ----------------------------------------------------------------------------------------------------
# Exposure of columns, on the page and on the command line.

EXPOSURE_HEAD = ("column", "largest share", "rows", "functions")
EXPOSURE_NOTES = (
    "The share is the largest part of one row in any combination of the released sums of a column. At a "
    "share of 0.02, one row makes up at most 2 % of such a sum. At 1, some combination equals the value of "
    "one row.",
    "It includes functions of single columns over all rows with a value. It does not include products of "
    "different columns, the weights of models, or rows that single analyses excluded.",
    "This is a diagnostic and refuses no request. The rules of policy.toml do.",
)


def exposure_rows(found: Sequence[ColumnExposure]) -> list[tuple[str, ...]]:
    """Write exposures as rows of text."""
    return [
        (
            one.column,
            "-" if math.isnan(one.share) else f"{one.share:.3f}",
            f"{one.rows:,}",
            f"{one.functions}" + (f" (and {one.omitted} not computed)" if one.omitted else ""),
        )
        for one in found
    ]
