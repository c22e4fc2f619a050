"""What a file of results of a vertical generalised linear model holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedstat.federation.account.ledger import Ledger
from fedstat.inference.estimate import Estimate
from fedstat.kernels.glm.family import FamilySpec
from fedstat.models.saved import estimate_content, ledger_content, read_estimate, read_ledger, write
from fedstat.models.vglm.report.outcome import Selection
from fedstat.models.vglm.report.prediction import Predictor
from fedstat.typing import Array

FORMAT = "fedstat vertical glm results 1"


@dataclass(frozen=True, slots=True)
class SavedSelection:
    """What a file of results holds, as numbers and texts."""

    estimate: Estimate
    refit: Estimate | None
    debiased: Estimate | None
    selection: Selection
    predictor: Predictor
    notes: list[str]
    ledger: Ledger | None


def save_result(path: Path, result: SavedSelection) -> None:
    """Write results to a file."""
    arrays: dict[str, Array] = {}
    estimates = {"estimate": result.estimate, "refit": result.refit, "debiased": result.debiased}
    for name, estimate in estimates.items():
        if estimate is not None:
            arrays[f"{name} params"] = estimate.params
            if estimate.cov is not None:
                arrays[f"{name} cov"] = estimate.cov
    numbers: dict[str, Any] = {}
    for part in fields(result.selection):
        value = getattr(result.selection, part.name)
        if isinstance(value, np.ndarray):
            arrays[f"selection {part.name}"] = value
        elif part.name == "criteria":
            arrays |= {f"criterion {name}": np.asarray(array) for name, array in value.items()}
        else:
            numbers[part.name] = value
    predictor = result.predictor
    content = {
        "estimates": {
            name: None if estimate is None else estimate_content(estimate)
            for name, estimate in estimates.items()
        },
        "selection": numbers,
        "criteria": list(result.selection.criteria),
        "clients": list(predictor.clients),
        "family": predictor.family.to_json(),
        "specs": dict(predictor.specs),
        "holder": predictor.holder,
        "means": dict(predictor.means),
        "notes": result.notes,
        "ledger": ledger_content(result.ledger),
    }
    write(path, FORMAT, content, arrays)


def read_saved(header: Mapping[str, str], arrays: Mapping[str, Array]) -> SavedSelection:
    """Read what :func:`save_result` wrote."""
    content = json.loads(header["content"])
    found = {
        name: None
        if part is None
        else read_estimate(part, arrays[f"{name} params"], arrays.get(f"{name} cov"))
        for name, part in content["estimates"].items()
    }
    estimate = found["estimate"]
    if estimate is None:
        raise ValueError("no estimate")
    named = {name.split(" ", 1)[1]: a for name, a in arrays.items() if name.startswith("selection ")}
    criteria = {name: arrays[f"criterion {name}"] for name in content["criteria"]}
    family = FamilySpec.from_json(content["family"])
    clients = tuple(content["clients"])
    return SavedSelection(
        estimate,
        found["refit"],
        found.get("debiased"),
        Selection(**(content["selection"] | named | {"criteria": criteria})),
        Predictor(estimate, clients, family, content["specs"], content["holder"], content["means"]),
        content["notes"],
        read_ledger(content["ledger"]),
    )
