"""Results in a file: arrays and JSON, nothing that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat.errors import MessageError, ModelError
from fedstat.federation.ledger import Entry, Ledger
from fedstat.federation.message import pack, unpack
from fedstat.inference.estimate import Estimate
from fedstat.inference.summary import ClientBlock
from fedstat.models.vfem.covariance_protocol import Covariance
from fedstat.models.vfem.protocol import Fit, Options, TraceRow
from fedstat.typing import Array

if TYPE_CHECKING:
    from fedstat.models.vfem.results import VFEMResults

FORMAT = "fedstat VFEM results 1"


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
        "specs": dict(specs),
        "ledger": None if not isinstance(ledger, Ledger) else asdict(ledger),
    }
    path.write_bytes(pack({"format": FORMAT, "content": json.dumps(content)}, arrays))


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def read_result(path: Path) -> VFEMResults:
    """Read what :func:`save_result` wrote.

    Raises
    ------
    ModelError
        The file is not one of these.
    """
    from fedstat.models.vfem.results import Counts, Outcome, VFEMResults

    try:
        header, arrays = unpack(path.read_bytes())
    except MessageError as error:
        raise ModelError(f"{path.name}: not a result that fedstat saved") from error
    if header.get("format") != FORMAT:
        raise ModelError(f"{path.name}: expected '{FORMAT}', received {header.get('format')!r}")
    content = json.loads(header["content"])
    names = {name: tuple(columns) for name, columns in content["names"]}
    fit = _fit(content, arrays, tuple(names))
    covariance = None
    if content["covariance"] is not None:
        covariance = Covariance(arrays["psi"], **content["covariance"])
    options = Options(**content["options"])
    outcome = Outcome(
        content["method"], content["estimate"]["cov_type"], options, fit, covariance, {}, content["init"]
    )
    return VFEMResults(
        _estimate(content["estimate"], arrays),
        _ledger(content["ledger"]),
        outcome,
        Counts(**content["counts"]),
        names,
        content["notes"],
        specs=content["specs"],
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
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
    values["blocks"] = tuple(ClientBlock(**block) for block in saved["blocks"])
    return Estimate(params=arrays["params"], cov=arrays.get("cov"), **values)


def _ledger(saved: dict[str, Any] | None) -> Ledger | None:
    if saved is None:
        return None
    entries = [Entry(**(row | {"shape": tuple(row["shape"])})) for row in saved["entries"]]
    return Ledger(saved["at"], entries, saved["rounds"])
