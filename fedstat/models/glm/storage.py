"""What results keep of the model that was fitted, and what a file of them holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.block import BlockSpec
from fedstat.federation.design.by_rows import RowsAgreement, RowsDesign, SiteRows
from fedstat.federation.design.site_rows import RowsQuestion
from fedstat.inference.estimate import Estimate
from fedstat.kernels.glm.family import FamilySpec
from fedstat.models.glm.coordinates import Coordinates
from fedstat.models.glm.fit import GLMFit, LocalFit, Total, TraceRow
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.saved import estimate_content, ledger_content, read_estimate, read_ledger, write
from fedstat.typing import Array

if TYPE_CHECKING:
    from fedstat.models.glm.results import GLMResults

FORMAT = "fedstat glm results 2"

SHAPES = {
    **dict.fromkeys(("params", "gamma", "score", "shift", "scale", "design mean", "design spread"), "p"),
    **dict.fromkeys(("cov", "information", "observed", "meat", "between", "back"), "pp"),
    **dict.fromkeys(("null", "fit"), "3"),
    **dict.fromkeys(("site scores", "local beta", "local score"), "Kp"),
    **dict.fromkeys(("site informations", "local cov", "local information"), "Kpp"),
    **{"design n": "K", "columns by site": "K2p", "apart": "2"},
}
"""Arrays of the file: p coefficients, K sites."""

BY_SITE = ("site scores", "site informations", "local score", "local information")
"""Arrays that there are where sums were not masked."""

OPTIONAL = ("observed", "meat", "between", "null", "apart", "columns by site", *BY_SITE)


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """What results keep of the model: no rows, and enough to code new ones.

    Parameters
    ----------
    model_name : str
    agreement : RowsAgreement
        Question, levels and states of transforms, rows by site.
    site_column : str
        The column that names the sites.
    clusters, strata : str or None
        Columns that the covariance uses.
    """

    model_name: str
    agreement: RowsAgreement
    site_column: str
    clusters: str | None = None
    strata: str | None = None

    def to_content(self) -> dict[str, Any]:
        """Take apart for JSON."""
        agreed = self.agreement
        return {
            "model_name": self.model_name,
            "question": agreed.question.to_json(),
            "spec": agreed.spec.to_json(),
            "sites": [asdict(row) for row in agreed.sites],
            "site_column": self.site_column,
            "clusters": self.clusters,
            "strata": self.strata,
        }

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> Basis:
        """Rebuild what :meth:`to_content` took apart; question and coding are checked."""
        question, spec = RowsQuestion.from_json(content["question"]), BlockSpec.from_json(content["spec"])
        if (question.terms, question.columns) != (spec.terms, spec.columns):
            raise ValueError("terms")
        agreement = RowsAgreement(question, spec, tuple(SiteRows(**row) for row in content["sites"]))
        names = (content["model_name"], content["site_column"])
        return cls(names[0], agreement, names[1], content["clusters"], content["strata"])


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file of results holds, as numbers and texts."""

    estimate: Estimate
    fit: GLMFit
    basis: Basis
    overdispersion: Overdispersion | None
    auc: float | None
    ledger: Ledger | None


def save_result(path: str | Path, result: GLMResults) -> None:
    """Write results to a file."""
    fit, over = result.fit_, result.overdispersion
    arrays = _arrays(result)
    content = {
        "estimate": estimate_content(result.estimate),
        "basis": result.basis.to_content(),
        "family": fit.family.to_json(),
        "totals": [fit.total.weight, fit.total.deviance, fit.total.pearson],
        "dispersion": fit.dispersion,
        "null": fit.null,
        "trace": [asdict(row) for row in fit.trace],
        "stop": {"converged": fit.converged, "reason": fit.reason, "rounds": fit.rounds},
        "n": fit.n,
        "local": [{"n": own.n, "problem": own.problem, "fitted": own.beta is not None} for own in fit.local],
        "alpha": None if over is None else [over.alpha, over.std_error],
        "auc": result._auc,
        "ledger": ledger_content(result._ledger),
        "arrays": sorted(arrays),
    }
    write(path, FORMAT, content, arrays)


def _arrays(result: GLMResults) -> dict[str, Array]:
    fit, total, coordinates = result.fit_, result.fit_.total, result.fit_.coordinates
    design, p = coordinates.design, len(result.fit_.gamma)
    none = {"beta": np.full(p, np.nan), "cov": np.full((p, p), np.nan)}
    arrays = {
        "params": result.estimate.params,
        "cov": result._cov(),
        "gamma": fit.gamma,
        "score": total.score,
        "information": total.information,
        "observed": total.observed,
        "null": total.null,
        "apart": fit.apart,
        "columns by site": coordinates.own,
        "shift": coordinates.shift,
        "scale": coordinates.scale,
        "back": coordinates.back,
        "design n": design.n,
        "design mean": design.mean,
        "design spread": design.spread,
        "fit": fit.fit,
        "meat": fit.meat,
        "between": fit.between,
        "local beta": np.array([none["beta"] if own.beta is None else own.beta for own in fit.local]),
        "local cov": np.array([none["cov"] if own.cov is None else own.cov for own in fit.local]),
    }
    if total.by_site is not None:
        parts = [
            np.array([score for score, _ in total.by_site]),
            np.array([information for _, information in total.by_site]),
            np.array([own.score for own in fit.local]),
            np.array([own.information for own in fit.local]),
        ]
        arrays |= dict(zip(BY_SITE, parts, strict=True))
    return {name: array for name, array in arrays.items() if array is not None}


def read_saved(header: Mapping[str, str], arrays: Mapping[str, Array]) -> Saved:
    """Read what :func:`save_result` wrote.

    Raises
    ------
    LookupError, TypeError, ValueError, FedstatError
        Parts are missing, or do not belong together.
    """
    content = json.loads(header["content"])
    basis = Basis.of_content(content["basis"])
    estimate = read_estimate(content["estimate"], arrays["params"], arrays["cov"])
    _check_arrays(content, arrays, len(estimate.names), len(basis.agreement.sites))
    over = None
    if content["alpha"] is not None:
        alpha, std_error = map(float, content["alpha"])
        over = Overdispersion(alpha, std_error, arrays["cov"])
    auc = None if content["auc"] is None else float(content["auc"])
    fit = _fit(content, arrays, estimate, basis)
    return Saved(estimate, fit, basis, over, auc, read_ledger(content["ledger"]))


def _check_arrays(content: Mapping[str, Any], arrays: Mapping[str, Array], p: int, K: int) -> None:
    needed = set(SHAPES).difference(OPTIONAL) | set(content["arrays"])
    if set(arrays) != needed:
        raise ValueError(f"arrays: {sorted(needed ^ set(arrays))}")
    if len(set(BY_SITE) & set(arrays)) not in (0, len(BY_SITE)):
        raise ValueError("parts by site")
    sizes = {"p": p, "K": K, "2": 2, "3": 3}
    for name, array in arrays.items():
        if array.shape != tuple(sizes[letter] for letter in SHAPES[name]):
            raise ValueError(f"shape of {name}: {array.shape}")
    if len(content["local"]) != K or not content["trace"]:
        raise ValueError("sites and trace")


def _fit(content: dict[str, Any], arrays: Mapping[str, Array], estimate: Estimate, basis: Basis) -> GLMFit:
    weight, deviance, pearson = map(float, content["totals"])
    by_site = None
    if "site scores" in arrays:
        by_site = list(zip(arrays["site scores"], arrays["site informations"], strict=True))
    total = Total(
        arrays["score"],
        arrays["information"],
        arrays.get("observed"),
        weight,
        deviance,
        pearson,
        arrays.get("null"),
        by_site,
    )
    rounds = content["stop"]["rounds"]
    return GLMFit(
        gamma=arrays["gamma"],
        total=total,
        coordinates=_coordinates(arrays, estimate, basis),
        dispersion=float(content["dispersion"]),
        null=float(content["null"]),
        fit=arrays["fit"],
        meat=arrays.get("meat"),
        between=arrays.get("between"),
        apart=arrays.get("apart"),
        trace=tuple(TraceRow(**row) for row in content["trace"]),
        converged=bool(content["stop"]["converged"]),
        reason=str(content["stop"]["reason"]),
        local=tuple(_local(content, arrays, k, row.site) for k, row in enumerate(basis.agreement.sites)),
        n=int(content["n"]),
        rounds=None if rounds is None else int(rounds),
        family=FamilySpec.from_json(content["family"]),
    )


def _coordinates(arrays: Mapping[str, Array], estimate: Estimate, basis: Basis) -> Coordinates:
    parts = (arrays[f"design {name}"] for name in ("n", "mean", "spread"))
    design = RowsDesign(estimate.names, estimate.terms, basis.agreement.question.intercept, *parts)
    return Coordinates(
        design, arrays["shift"], arrays["scale"], arrays["back"], arrays.get("columns by site")
    )


def _local(content: dict[str, Any], arrays: Mapping[str, Array], k: int, site: str) -> LocalFit:
    own = content["local"][k]
    return LocalFit(
        site,
        int(own["n"]),
        arrays["local beta"][k] if own["fitted"] else None,
        arrays["local cov"][k] if own["fitted"] else None,
        str(own["problem"]),
        arrays["local score"][k] if "local score" in arrays else None,
        arrays["local information"][k] if "local information" in arrays else None,
    )
