"""What a file of VFEM results for other families than the normal holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstat.federation.account.ledger import Ledger
from fedstat.inference.estimate import Estimate
from fedstat.kernels.glm.family import FamilySpec
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
from fedstat.models.vfem.iteration.glm_protocol import GLMFit, GLMOptions
from fedstat.models.vfem.statements.glm_outcome import GLMOutcome
from fedstat.models.vfem.statements.outcome import Counts
from fedstat.typing import Array

if TYPE_CHECKING:
    from fedstat.models.vfem.glm_results import VFEMGLMResults

FORMAT = "fedstat vfem glm results 1"
OF_FIT = ("beta0", "log_likelihood", "null", "converged", "reason")


def save_result(path: Path, result: VFEMGLMResults) -> None:
    """Write results to a file."""
    fit, covariance = result.fit_, result.covariance
    arrays: dict[str, Array] = {"params": result.estimate.params}
    for k, name in enumerate(fit.beta):
        arrays[f"beta {k}"], arrays[f"mu {k}"] = fit.beta[name], fit.mu[name]
    if result.estimate.cov is not None and covariance is not None:
        arrays["cov"], arrays["psi"] = result.estimate.cov, covariance.psi
    content = {
        "estimate": estimate_content(result.estimate),
        "family": fit.family.to_json(),
        "fit": {name: getattr(fit, name) for name in OF_FIT},
        "t": list(fit.t.items()),
        "trace": [asdict(row) for row in fit.trace],
        "covariance": None if covariance is None else without(asdict(covariance), "psi"),
        "options": asdict(result.options),
        "outcome": [result.method, result.outcome.cov_type, result.outcome.masked],
        "counts": asdict(result.counts),
        "notes": result.notes,
        "holder": result.holder,
        "specs": dict(result.specs),
        "ledger": ledger_content(result._ledger),
    }
    write(path, FORMAT, content, arrays)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file of results holds, as numbers and texts."""

    estimate: Estimate
    ledger: Ledger | None
    outcome: GLMOutcome
    counts: Counts
    notes: list[str]
    holder: str
    specs: Mapping[str, str]


def read_saved(header: Mapping[str, str], arrays: Mapping[str, Array]) -> Saved:
    """Read what :func:`save_result` wrote."""
    content: dict[str, Any] = json.loads(header["content"])
    cov = covariance = None
    if content["covariance"] is not None:
        cov, covariance = arrays["cov"], Covariance(arrays["psi"], **content["covariance"])
    t = dict(content["t"])
    fit = GLMFit(
        family=FamilySpec.from_json(content["family"]),
        beta={name: arrays[f"beta {k}"] for k, name in enumerate(t)},
        mu={name: arrays[f"mu {k}"] for k, name in enumerate(t)},
        t=t,
        trace=tuple(TraceRow(**row) for row in content["trace"]),
        **content["fit"],
    )
    method, cov_type, masked = content["outcome"]
    options = GLMOptions(**content["options"])
    return Saved(
        read_estimate(content["estimate"], arrays["params"], cov),
        read_ledger(content["ledger"]),
        GLMOutcome(method, cov_type, masked, options, fit, covariance, {}),
        Counts(**content["counts"]),
        content["notes"],
        content["holder"],
        content["specs"],
    )
