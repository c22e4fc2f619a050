"""Results in a file: arrays and JSON, nothing that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat.federation.ledger import Entry, Ledger
from fedstat.federation.message import pack
from fedstat.inference.estimate import Estimate
from fedstat.inference.summary import ClientBlock
from fedstat.models.vfem.covariance_protocol import Covariance
from fedstat.models.vfem.prediction import Response
from fedstat.models.vfem.protocol import Fit, Options, TraceRow
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
    ledger = result._ledger
    content = {
        "estimate": _without(asdict(result.estimate), "params", "cov"),
        "fit": {"a": fit.a, "s2": fit.s2, "t": [fit.t[name] for name in result.names]}
        | {"log_likelihood": fit.log_likelihood, "converged": fit.converged, "reason": fit.reason},
        "trace": [asdict(row) for row in fit.trace],
        "covariance": None if covariance is None else _without(asdict(covariance), "psi"),
        "options": asdict(result.options),
        "names": list(result.names.items()),
        "counts": asdict(result.counts),
        "method": result.method,
        "init": result.init,
        "notes": result._notes,
        "response": asdict(result.response),
        "specs": dict(specs),
        "ledger": None if not isinstance(ledger, Ledger) else asdict(ledger),
    }
    path.write_bytes(pack({"format": FORMAT, "content": json.dumps(content)}, arrays))


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


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
    covariance = None
    if content["covariance"] is not None:
        covariance = Covariance(arrays["psi"], **content["covariance"])
    return Saved(
        _estimate(content["estimate"], arrays),
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
        _ledger(content["ledger"]),
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


def _estimate(saved: dict[str, Any], arrays: Mapping[str, Array]) -> Estimate:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
    values["blocks"] = tuple(ClientBlock(**block) for block in saved["blocks"])
    values |= {"params": arrays["params"], "cov": arrays.get("cov")}
    return Estimate(**values)


def _ledger(saved: dict[str, Any] | None) -> Ledger | None:
    if saved is None:
        return None
    entries = [Entry(**(row | {"shape": tuple(row["shape"])})) for row in saved["entries"]]
    return Ledger(saved["at"], entries, saved["rounds"])
