"""The classes that fits and their methods return, for annotations and ``isinstance``.

``from fedstat.results import GLMResults`` costs what the family costs; to import this module costs nothing.
Nobody makes results but a fit, or :func:`fedstat.load`.

Examples
--------
>>> import fedstat as fs
>>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
>>> fit = fs.FederatedGLM.from_formula("num ~ age", partition).fit()
>>> isinstance(fit, fs.results.GLMResults), isinstance(fit, fs.results.FederatedResults)
(True, True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstat.federation.audit.event_log import AbsentSite as AbsentSite
    from fedstat.federation.audit.ledger import Ledger as Ledger
    from fedstat.federation.audit.receipt import Receipt as Receipt
    from fedstat.federation.audit.verification import Verification as Verification
    from fedstat.federation.partition.dependence import BlockCorrelation as BlockCorrelation
    from fedstat.federation.partition.describe import PartitionDescription as PartitionDescription
    from fedstat.inference.compare import Comparison as Comparison
    from fedstat.inference.discrimination import Discrimination as Discrimination
    from fedstat.inference.evaluation import Accuracy as Accuracy
    from fedstat.inference.evaluation import Evaluation as Evaluation
    from fedstat.inference.explanation import Explanation as Explanation
    from fedstat.inference.heterogeneity import Heterogeneity as Heterogeneity
    from fedstat.inference.likelihood import FTest as FTest
    from fedstat.inference.likelihood import LRTest as LRTest
    from fedstat.inference.meta_analysis import FactorCombination as FactorCombination
    from fedstat.inference.mixtures import OutsideResults as OutsideResults
    from fedstat.inference.pooling import CombinedResults as CombinedResults
    from fedstat.inference.pooling import PooledResults as PooledResults
    from fedstat.inference.recalibration import Recalibration as Recalibration
    from fedstat.inference.results import FederatedResults as FederatedResults
    from fedstat.inference.tables import SheetSummary as SheetSummary
    from fedstat.models.boost.private.results import PrivateBoostResults as PrivateBoostResults
    from fedstat.models.boost.report.refit import BoostPrediction as BoostPrediction
    from fedstat.models.boost.report.refit import SurfaceFit as SurfaceFit
    from fedstat.models.boost.results import BoostResults as BoostResults
    from fedstat.models.boost.results import LocalBoosts as LocalBoosts
    from fedstat.models.boost.vertical_results import VerticalBoostResults as VerticalBoostResults
    from fedstat.models.copula.audit import AuditResults as AuditResults
    from fedstat.models.copula.published import PublishedSynthesis as PublishedSynthesis
    from fedstat.models.copula.results import CopulaResults as CopulaResults
    from fedstat.models.copula_glm.results import PrivateGLMResults as PrivateGLMResults
    from fedstat.models.fedavg.results import FedAvgResults as FedAvgResults
    from fedstat.models.glm.post_fit import ScoreTest as ScoreTest
    from fedstat.models.glm.results import GLMResults as GLMResults
    from fedstat.models.glm.results import OLSResults as OLSResults
    from fedstat.models.glm.wild_bootstrap import WildBootstrap as WildBootstrap
    from fedstat.models.horizontal.prediction import GLMPrediction as GLMPrediction
    from fedstat.models.laser.evaluation import SetEvaluation as SetEvaluation
    from fedstat.models.laser.results import LASERResults as LASERResults
    from fedstat.models.m2sem.bootstrap import BootstrapResults as BootstrapResults
    from fedstat.models.m2sem.results import M2SEMResults as M2SEMResults
    from fedstat.models.m2sem.search import ClusterSearch as ClusterSearch
    from fedstat.models.margins import MarginalEffects as MarginalEffects
    from fedstat.models.threats import ThreatTable as ThreatTable
    from fedstat.models.vertical.joint_normal.assumption_tests import LittleTest as LittleTest
    from fedstat.models.vfem.prediction_results import GLMPredictionResults as GLMPredictionResults
    from fedstat.models.vfem.prediction_results import PredictionResults as PredictionResults
    from fedstat.models.vfem.results import VFEMGLMResults as VFEMGLMResults
    from fedstat.models.vfem.results import VFEMResults as VFEMResults
    from fedstat.models.vglm.results import DebiasedResults as DebiasedResults
    from fedstat.models.vglm.results import RefitResults as RefitResults
    from fedstat.models.vglm.results import VerticalGLMResults as VerticalGLMResults

_WHERE = {
    "AbsentSite": "federation.audit.event_log",
    "Accuracy": "inference.evaluation",
    "AuditResults": "models.copula.audit",
    "BlockCorrelation": "federation.partition.dependence",
    "BoostPrediction": "models.boost.report.refit",
    "BoostResults": "models.boost.results",
    "BootstrapResults": "models.m2sem.bootstrap",
    "ClusterSearch": "models.m2sem.search",
    "CombinedResults": "inference.pooling",
    "Comparison": "inference.compare",
    "CopulaResults": "models.copula.results",
    "DebiasedResults": "models.vglm.results",
    "Discrimination": "inference.discrimination",
    "Evaluation": "inference.evaluation",
    "Explanation": "inference.explanation",
    "FTest": "inference.likelihood",
    "FactorCombination": "inference.meta_analysis",
    "FedAvgResults": "models.fedavg.results",
    "FederatedResults": "inference.results",
    "GLMPrediction": "models.horizontal.prediction",
    "GLMPredictionResults": "models.vfem.prediction_results",
    "GLMResults": "models.glm.results",
    "Heterogeneity": "inference.heterogeneity",
    "LASERResults": "models.laser.results",
    "LRTest": "inference.likelihood",
    "Ledger": "federation.audit.ledger",
    "LittleTest": "models.vertical.joint_normal.assumption_tests",
    "LocalBoosts": "models.boost.results",
    "M2SEMResults": "models.m2sem.results",
    "MarginalEffects": "models.margins",
    "OLSResults": "models.glm.results",
    "OutsideResults": "inference.mixtures",
    "PartitionDescription": "federation.partition.describe",
    "PooledResults": "inference.pooling",
    "PredictionResults": "models.vfem.prediction_results",
    "PrivateBoostResults": "models.boost.private.results",
    "PrivateGLMResults": "models.copula_glm.results",
    "PublishedSynthesis": "models.copula.published",
    "Recalibration": "inference.recalibration",
    "Receipt": "federation.audit.receipt",
    "RefitResults": "models.vglm.results",
    "ScoreTest": "models.glm.post_fit",
    "SetEvaluation": "models.laser.evaluation",
    "SheetSummary": "inference.tables",
    "SurfaceFit": "models.boost.report.refit",
    "ThreatTable": "models.threats",
    "VFEMGLMResults": "models.vfem.results",
    "VFEMResults": "models.vfem.results",
    "Verification": "federation.audit.verification",
    "VerticalBoostResults": "models.boost.vertical_results",
    "VerticalGLMResults": "models.vglm.results",
    "WildBootstrap": "models.glm.wild_bootstrap",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(
            f"module 'fedstat.results' has no attribute '{name}'; it has {', '.join(__all__)}"
        )
    value = globals()[name] = getattr(import_module(f"fedstat.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
