"""Statistics on data that may not be pooled."""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from fedstat.models import INSTALLED

if TYPE_CHECKING:  # for editors and type checkers, which do not read INSTALLED; a new family works without
    from fedstat import datasets as datasets
    from fedstat import errors as errors
    from fedstat import results as results
    from fedstat.federation.audit.verification import verify_receipt as verify_receipt
    from fedstat.federation.disclosure.policy import Budget as Budget
    from fedstat.federation.disclosure.policy import Policy as Policy
    from fedstat.federation.partition.partition import ClientPartition as ClientPartition
    from fedstat.federation.tables import curve_objects as curves  # noqa: F401
    from fedstat.federation.tables.curve_columns import LongCurve as LongCurve
    from fedstat.federation.tables.curves import Curve as Curve
    from fedstat.inference.compare import compare as compare
    from fedstat.inference.meta import meta as meta
    from fedstat.inference.pooling import combine as combine
    from fedstat.inference.pooling import pool as pool
    from fedstat.models.aft.model import FederatedAFT as FederatedAFT
    from fedstat.models.boost.model import FedFunctionBoost as FedFunctionBoost
    from fedstat.models.categories.model import FederatedMultinomial as FederatedMultinomial
    from fedstat.models.categories.model import FederatedOrdinal as FederatedOrdinal
    from fedstat.models.copula.audit import audit as audit
    from fedstat.models.copula.model import Bounds as Bounds
    from fedstat.models.copula.model import CopulaSynthesizer as CopulaSynthesizer
    from fedstat.models.copula.model import asinh as asinh
    from fedstat.models.copula.model import levels as levels
    from fedstat.models.copula.model import log as log
    from fedstat.models.copula.model import rehearse as rehearse
    from fedstat.models.copula_glm.model import PrivateCopulaGLM as PrivateCopulaGLM
    from fedstat.models.cox.model import FederatedCox as FederatedCox
    from fedstat.models.descriptive.model import CumulativeIncidence as CumulativeIncidence
    from fedstat.models.descriptive.model import KaplanMeier as KaplanMeier
    from fedstat.models.descriptive.tables import corr as corr
    from fedstat.models.descriptive.tables import crosstab as crosstab
    from fedstat.models.descriptive.tables import explain_table as explain_table
    from fedstat.models.descriptive.tables import histogram as histogram
    from fedstat.models.descriptive.tables import quantiles as quantiles
    from fedstat.models.descriptive.tables import table_one as table_one
    from fedstat.models.fedavg.model import FedAvg as FedAvg
    from fedstat.models.fedavg.model import FedAvgM as FedAvgM
    from fedstat.models.fedavg.model import FedProx as FedProx
    from fedstat.models.fedavg.model import QFedAvg as QFedAvg
    from fedstat.models.gee.model import FederatedGEE as FederatedGEE
    from fedstat.models.glm.model import GLORE as GLORE
    from fedstat.models.glm.model import FederatedGLM as FederatedGLM
    from fedstat.models.glm.model import FederatedOLS as FederatedOLS
    from fedstat.models.impute.model import explain_impute as explain_impute
    from fedstat.models.impute.model import impute as impute
    from fedstat.models.laser.model import LASER as LASER
    from fedstat.models.m2sem.model import M2SEM as M2SEM
    from fedstat.models.mixed.model import FederatedMixed as FederatedMixed
    from fedstat.models.saved import load as load
    from fedstat.models.survival_effect.model import SurvivalEffect as SurvivalEffect
    from fedstat.models.threats import threats as threats
    from fedstat.models.treatment.model import TreatmentEffect as TreatmentEffect
    from fedstat.models.vfem.iteration.state import Iteration as Iteration
    from fedstat.models.vfem.model import VFEMGLM as VFEMGLM
    from fedstat.models.vfem.model import VFEMRegression as VFEMRegression
    from fedstat.models.vglm.model import VerticalGLM as VerticalGLM
    from fedstat.progress_line import progress as progress

    __version__: str

# Everything is imported when it is first used: sites and the command line need no model.
_MODULES = {
    "curves": "fedstat.federation.tables.curve_objects",
    "datasets": "fedstat.datasets",
    "errors": "fedstat.errors",
    "results": "fedstat.results",
}
_OBJECTS = {
    "Budget": "federation.disclosure.policy",
    "ClientPartition": "federation.partition.partition",
    "Curve": "federation.tables.curves",
    "LongCurve": "federation.tables.curve_columns",
    "Policy": "federation.disclosure.policy",
    "audit": "models.copula.audit",
    "combine": "inference.pooling",
    "compare": "inference.compare",
    "load": "models.saved",
    "meta": "inference.meta",
    "pool": "inference.pooling",
    "progress": "progress_line",
    "rehearse": "models.copula.model",
    "threats": "models.threats",
    "verify_receipt": "federation.audit.verification",
}

__all__ = sorted(
    {"__version__", *_MODULES, *_OBJECTS, *(name for names in INSTALLED.values() for name in names)}
)


def _module_of(name: str) -> str | None:
    families = (f"models.{family}.model" for family, names in INSTALLED.items() if name in names)
    return _OBJECTS.get(name) or next(families, None)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = metadata.version("fedstat")
    elif name in _MODULES:
        value = import_module(_MODULES[name])
    elif module := _module_of(name):
        value = getattr(import_module(f"fedstat.{module}"), name)
    else:
        raise AttributeError(f"module 'fedstat' has no attribute '{name}'; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
