"""Statistics on data that may not be pooled."""

from importlib.metadata import version as _version

from fedstat import datasets, errors
from fedstat.federation.partition import ClientPartition
from fedstat.inference.compare import compare
from fedstat.models.saved import load
from fedstat.models.vfem.model import VFEMRegression

__version__ = _version("fedstat")

__all__ = ["ClientPartition", "VFEMRegression", "__version__", "compare", "datasets", "errors", "load"]
