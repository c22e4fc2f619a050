"""What a file of VFEM results holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat.federation.account.ledger import Ledger
from fedstat.inference.estimate import Estimate
from fedstat.models.saved import (
    estimate_content,
    ledger_content,
    read_estimate,
    read_ledger,
    without,
    write,
)
from fedstat.models.vertical.fit import TraceRow
from fedstat.models.vfem.covariance.protocol import Covariance
from fedstat.models.vfem.iteration.protocol import Fit, Options
from fedstat.models.vfem.prediction import Response
from fedstat.typing import Array

if TYPE_CHECKING:
    from fedstat.models.vfem.results import VFEMResults

FORMAT = "fedstat vfem results 1"


def save_result(path: Path, result: VFEMResults, specs: Mapping[str, str]) -> None:
    """Write results to a file."""
    fit, covariance = result.fit_, result.covariance
    arrays: dict[str, Array] = {
        "params": result.estimate.params,
        "response_moments": np.asarray(fit.response_moments),
    }
    for k, name in enumerate(result.names):
        arrays[f"beta {k}"], arrays[f"mu {k}"] = fit.beta[name], fit.mu[name]
    if result.estimate.cov is not None and covariance is not None:
        arrays["cov"], arrays["psi"] = result.estimate.cov, covariance.psi
    content = {
        "estimate": estimate_content(result.estimate),
        "fit": {"a": fit.a, "s2": fit.s2, "t": [fit.t[name] for name in result.names]}
        | {"log_likelihood": fit.log_likelihood, "converged": fit.converged, "reason": fit.reason},
        "trace": [asdict(row) for row in fit.trace],
        "covariance": None if covariance is None else without(asdict(covariance), "psi"),
        "options": asdict(result.options),
        "names": list(result.names.items()),
        "counts": asdict(result.counts),
        "method": result.method,
        "init": result.init,
        "notes": result._notes,
        "response": asdict(result.response),
        "specs": dict(specs),
        "ledger": ledger_content(result._ledger),
    }
    write(path, FORMAT, content, arrays)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file of results holds, as numbers and texts."""

    estimate: Estimate
    fit: Fit
    covariance: Covariance | None
    options: Options
    method: str
    init: str
    counts: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]]
    notes: list[str]
    response: Response
    specs: Mapping[str, str]
    ledger: Ledger | None


def read_saved(header: Mapping[str, str], arrays: Mapping[str, Array]) -> Saved:
    """Read what :func:`save_result` wrote."""
    content = json.loads(header["content"])
    names = {name: tuple(columns) for name, columns in content["names"]}
    cov = covariance = None
    if content["covariance"] is not None:
        cov, covariance = arrays["cov"], Covariance(arrays["psi"], **content["covariance"])
    return Saved(
        read_estimate(content["estimate"], arrays["params"], cov),
        _fit(content, arrays, tuple(names)),
        covariance,
        Options(**content["options"]),
        content["method"],
        content["init"],
        content["counts"],
        names,
        content["notes"],
        Response(**(content["response"] | {"columns": tuple(content["response"]["columns"])})),
        content["specs"],
        read_ledger(content["ledger"]),
    )


def _fit(content: dict[str, Any], arrays: Mapping[str, Array], clients: tuple[str, ...]) -> Fit:
    saved = content["fit"]
    return Fit(
        saved["a"],
        saved["s2"],
        {name: arrays[f"beta {k}"] for k, name in enumerate(clients)},
        {name: arrays[f"mu {k}"] for k, name in enumerate(clients)},
        dict(zip(clients, saved["t"], strict=True)),
        arrays["response_moments"],
        saved["log_likelihood"],
        tuple(TraceRow(**row) for row in content["trace"]),
        saved["converged"],
        saved["reason"],
    )
