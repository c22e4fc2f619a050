"""Records of answers that versions before format 3 of a site's ledger wrote as texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Plain: TypeAlias = dict[str, Any]


def read_earlier_records(text: str) -> Iterator[tuple[str, Plain]]:
    """Yield the class and the plain values of each record in the text of a line ``spent``."""
    for beginning, (kind, read) in READERS.items():
        if text.startswith(beginning):
            for record in read(text.removeprefix(beginning)):
                yield kind, record


def _approval(text: str) -> list[Plain]:
    plan, when = text.split(", ")
    return [{"plan": plan, "when": int(when)}]


def _comparison(text: str) -> list[Plain]:
    column, end = json.JSONDecoder().raw_decode(text)
    against, *above = json.loads(text[end:])
    return [{"column": column, "against": against, "above": above[0] if above else None}]


def _consent(text: str) -> list[Plain]:
    site, _, time = text.rpartition(", ")
    return [{"site": site, "time": time}]


def _descent(text: str) -> list[Plain]:
    model, *place, digest = text.split(" ")
    return [{"model": model, "place": " ".join(place), "digest": digest}]


def _labels(text: str) -> list[Plain]:
    epsilon, digest = text.split(" ")
    return [{"epsilon": float(epsilon), "digest": digest}]


def _multiplied(text: str) -> list[Plain]:
    return [{"group": group, "marks": marks} for group, marks in json.loads(text).items()]


def _neighbors(text: str) -> list[Plain]:
    *columns, order = json.loads(text)
    return [{"columns": columns, "order": order}]


def _sums(text: str) -> list[Plain]:
    column, *names = text.split("\n")
    return [{"column": column, "names": names}]


READERS: Mapping[str, tuple[str, Callable[[str], list[Plain]]]] = {
    "alignment with ": ("UsedConsent", _consent),
    "comparisons of ": ("ComparedColumn", _comparison),
    "descent of ": ("DescentStep", _descent),
    "ends of curves ": ("CountedTimes", lambda text: [json.loads(text)]),
    "evaluation ": ("AnsweredEvaluation", lambda text: [{"digest": text}]),
    "label epsilon ": ("RandomizedLabels", _labels),
    "masked sums over ": ("MaskedSites", lambda text: [{"sites": json.loads(text)}]),
    "multiplied ": ("MultipliedColumns", _multiplied),
    "own fit without an estimate ": ("FailedOwnFit", lambda text: [{"model": text}]),
    "plan ": ("UsedApproval", _approval),
    "products of neighbors within clusters of ": ("NeighborsInClusters", _neighbors),
    "scores by clusters of ": ("ScoresByCluster", lambda text: [{"columns": json.loads(text)}]),
    "sums of one column ": ("SumsOfColumn", _sums),
    "sums over groups masked among ": ("MaskedGroups", lambda text: [{"sites": json.loads(text)}]),
}
"""Beginnings of the texts, with the class of the record and how it is read."""
