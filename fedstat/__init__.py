"""Statistics on data that may not be pooled."""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from fedstat import datasets, errors
from fedstat.federation.account.verification import verify_receipt
from fedstat.federation.door.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.compare import compare

if TYPE_CHECKING:
    from fedstat.models.fedavg.model import FedAvg, FedAvgM, FedProx, QFedAvg
    from fedstat.models.glm.model import GLORE, FederatedGLM
    from fedstat.models.saved import load
    from fedstat.models.vfem.model import VFEMRegression
    from fedstat.models.vglm.model import VerticalGLM

__version__ = _version("fedstat")

__all__ = [
    "GLORE",
    "ClientPartition",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FederatedGLM",
    "Policy",
    "QFedAvg",
    "VFEMRegression",
    "VerticalGLM",
    "__version__",
    "compare",
    "datasets",
    "errors",
    "load",
    "verify_receipt",
]

# Models bring the compiler along, a third of a second: they are imported when one is first named.
_MODULES = {
    **dict.fromkeys(("FedAvg", "FedAvgM", "FedProx", "QFedAvg"), ("fedstat.models.fedavg.model",)),
    "GLORE": ("fedstat.models.glm.model",),
    "FederatedGLM": ("fedstat.models.glm.model",),
    "VFEMRegression": ("fedstat.models.vfem.model",),
    "VerticalGLM": ("fedstat.models.vglm.model",),
    "load": (
        "fedstat.models.glm.model",
        "fedstat.models.vfem.model",
        "fedstat.models.vglm.model",
        "fedstat.models.saved",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fedstat' has no attribute '{name}'; it has {', '.join(__all__)}")
    *_, module = [import_module(path) for path in _MODULES[name]]
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
