"""Statistics on data that may not be pooled."""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from fedstat import datasets, errors, results
from fedstat.federation.audit.verification import verify_receipt
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.tables import curve_objects as curves
from fedstat.federation.tables.curve_columns import LongCurve
from fedstat.federation.tables.curves import Curve
from fedstat.inference.compare import compare
from fedstat.inference.pooling import combine, pool
from fedstat.models import INSTALLED
from fedstat.models.threats import threats
from fedstat.progress_line import progress

if TYPE_CHECKING:  # for editors and type checkers, which do not read INSTALLED; a new family works without
    from fedstat.models.boost.model import FedFunctionBoost as FedFunctionBoost
    from fedstat.models.copula.audit import audit as audit
    from fedstat.models.copula.model import Bounds as Bounds
    from fedstat.models.copula.model import CopulaSynthesizer as CopulaSynthesizer
    from fedstat.models.copula.model import asinh as asinh
    from fedstat.models.copula.model import log as log
    from fedstat.models.copula.model import rehearse as rehearse
    from fedstat.models.copula_glm.model import PrivateCopulaGLM as PrivateCopulaGLM
    from fedstat.models.fedavg.model import FedAvg as FedAvg
    from fedstat.models.fedavg.model import FedAvgM as FedAvgM
    from fedstat.models.fedavg.model import FedProx as FedProx
    from fedstat.models.fedavg.model import QFedAvg as QFedAvg
    from fedstat.models.glm.model import GLORE as GLORE
    from fedstat.models.glm.model import FederatedGLM as FederatedGLM
    from fedstat.models.glm.model import FederatedOLS as FederatedOLS
    from fedstat.models.laser.model import LASER as LASER
    from fedstat.models.m2sem.model import M2SEM as M2SEM
    from fedstat.models.saved import load as load
    from fedstat.models.vfem.iteration.state import Iteration as Iteration
    from fedstat.models.vfem.model import VFEMGLM as VFEMGLM
    from fedstat.models.vfem.model import VFEMRegression as VFEMRegression
    from fedstat.models.vglm.model import VerticalGLM as VerticalGLM

__version__ = _version("fedstat")

__all__ = [
    "Budget",
    "ClientPartition",
    "Curve",
    "LongCurve",
    "Policy",
    "__version__",
    "audit",
    "combine",
    "compare",
    "curves",
    "datasets",
    "errors",
    "load",
    "pool",
    "progress",
    "rehearse",
    "results",
    "threats",
    "verify_receipt",
]
__all__ += [name for names in INSTALLED.values() for name in names]


def _lazy() -> dict[str, str]:
    """Modules of models, which import the compiler: each is imported when it is first used."""
    models = {name: f"fedstat.models.{family}.model" for family, names in INSTALLED.items() for name in names}
    functions = {
        "audit": "copula.audit",
        "load": "saved",
        "rehearse": "copula.model",
    }
    return {name: f"fedstat.models.{module}" for name, module in functions.items()} | models


def __getattr__(name: str) -> Any:
    modules = _lazy()
    if name not in modules:
        raise AttributeError(
            f"module 'fedstat' has no attribute '{name}'; it has {', '.join(sorted(__all__))}"
        )
    value = globals()[name] = getattr(import_module(modules[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
