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
    from fedstat.federation.account.entry import AbsentSite as AbsentSite
    from fedstat.federation.account.ledger import Ledger as Ledger
    from fedstat.federation.account.receipt import Receipt as Receipt
    from fedstat.federation.account.verification import Verification as Verification
    from fedstat.federation.partition.dependence import BlockCorrelation as BlockCorrelation
    from fedstat.federation.partition.describe import PartitionDescription as PartitionDescription
    from fedstat.inference.compare import Comparison as Comparison
    from fedstat.inference.evaluation.accuracy import Accuracy as Accuracy
    from fedstat.inference.evaluation.discrimination import Discrimination as Discrimination
    from fedstat.inference.evaluation.evaluation import Evaluation as Evaluation
    from fedstat.inference.evaluation.recalibration import Recalibration as Recalibration
    from fedstat.inference.explanation import Explanation as Explanation
    from fedstat.inference.heterogeneity.heterogeneity import Heterogeneity as Heterogeneity
    from fedstat.inference.heterogeneity.whole_factors import FactorCombination as FactorCombination
    from fedstat.inference.likelihood import FTest as FTest
    from fedstat.inference.likelihood import LRTest as LRTest
    from fedstat.inference.mixture.bch import OutsideResults as OutsideResults
    from fedstat.inference.repeated.combine import CombinedResults as CombinedResults
    from fedstat.inference.repeated.pool import PooledResults as PooledResults
    from fedstat.inference.results import FederatedResults as FederatedResults
    from fedstat.inference.tables import SheetSummary as SheetSummary
    from fedstat.models.boost.inference.response import BoostPrediction as BoostPrediction
    from fedstat.models.boost.inference.surface_fit import SurfaceFit as SurfaceFit
    from fedstat.models.boost.local import LocalBoosts as LocalBoosts
    from fedstat.models.boost.private.results import PrivateBoostResults as PrivateBoostResults
    from fedstat.models.boost.results import BoostResults as BoostResults
    from fedstat.models.boost.vertical_results import VerticalBoostResults as VerticalBoostResults
    from fedstat.models.copula.audit.results import AuditResults as AuditResults
    from fedstat.models.copula.published import PublishedSynthesis as PublishedSynthesis
    from fedstat.models.copula.results import CopulaResults as CopulaResults
    from fedstat.models.copula_glm.results import PrivateGLMResults as PrivateGLMResults
    from fedstat.models.fedavg.results import FedAvgResults as FedAvgResults
    from fedstat.models.glm.linear import OLSResults as OLSResults
    from fedstat.models.glm.omitted_terms import ScoreTest as ScoreTest
    from fedstat.models.glm.results import GLMResults as GLMResults
    from fedstat.models.glm.sums.wild import WildBootstrap as WildBootstrap
    from fedstat.models.horizontal.prediction import GLMPrediction as GLMPrediction
    from fedstat.models.laser.report.evaluation import SetEvaluation as SetEvaluation
    from fedstat.models.laser.results import LASERResults as LASERResults
    from fedstat.models.m2sem.report.bootstrapped import BootstrapResults as BootstrapResults
    from fedstat.models.m2sem.results import M2SEMResults as M2SEMResults
    from fedstat.models.m2sem.search import ClusterSearch as ClusterSearch
    from fedstat.models.margins import MarginalEffects as MarginalEffects
    from fedstat.models.threats import ThreatTable as ThreatTable
    from fedstat.models.vertical.law.assumptions import LittleTest as LittleTest
    from fedstat.models.vfem.prediction.results import GLMPredictionResults as GLMPredictionResults
    from fedstat.models.vfem.prediction.results import PredictionResults as PredictionResults
    from fedstat.models.vfem.results import VFEMGLMResults as VFEMGLMResults
    from fedstat.models.vfem.results import VFEMResults as VFEMResults
    from fedstat.models.vglm.report.after_selection import DebiasedResults as DebiasedResults
    from fedstat.models.vglm.report.after_selection import RefitResults as RefitResults
    from fedstat.models.vglm.results import VerticalGLMResults as VerticalGLMResults

_WHERE = {
    "AbsentSite": "federation.account.entry",
    "Accuracy": "inference.evaluation.accuracy",
    "AuditResults": "models.copula.audit.results",
    "BlockCorrelation": "federation.partition.dependence",
    "BoostPrediction": "models.boost.inference.response",
    "BoostResults": "models.boost.results",
    "BootstrapResults": "models.m2sem.report.bootstrapped",
    "ClusterSearch": "models.m2sem.search",
    "CombinedResults": "inference.repeated.combine",
    "Comparison": "inference.compare",
    "CopulaResults": "models.copula.results",
    "DebiasedResults": "models.vglm.report.after_selection",
    "Discrimination": "inference.evaluation.discrimination",
    "Evaluation": "inference.evaluation.evaluation",
    "Explanation": "inference.explanation",
    "FTest": "inference.likelihood",
    "FactorCombination": "inference.heterogeneity.whole_factors",
    "FedAvgResults": "models.fedavg.results",
    "FederatedResults": "inference.results",
    "GLMPrediction": "models.horizontal.prediction",
    "GLMPredictionResults": "models.vfem.prediction.results",
    "GLMResults": "models.glm.results",
    "Heterogeneity": "inference.heterogeneity.heterogeneity",
    "LASERResults": "models.laser.results",
    "LRTest": "inference.likelihood",
    "Ledger": "federation.account.ledger",
    "LittleTest": "models.vertical.law.assumptions",
    "LocalBoosts": "models.boost.local",
    "M2SEMResults": "models.m2sem.results",
    "MarginalEffects": "models.margins",
    "OLSResults": "models.glm.linear",
    "OutsideResults": "inference.mixture.bch",
    "PartitionDescription": "federation.partition.describe",
    "PooledResults": "inference.repeated.pool",
    "PredictionResults": "models.vfem.prediction.results",
    "PrivateBoostResults": "models.boost.private.results",
    "PrivateGLMResults": "models.copula_glm.results",
    "PublishedSynthesis": "models.copula.published",
    "Recalibration": "inference.evaluation.recalibration",
    "Receipt": "federation.account.receipt",
    "RefitResults": "models.vglm.report.after_selection",
    "ScoreTest": "models.glm.omitted_terms",
    "SetEvaluation": "models.laser.report.evaluation",
    "SheetSummary": "inference.tables",
    "SurfaceFit": "models.boost.inference.surface_fit",
    "ThreatTable": "models.threats",
    "VFEMGLMResults": "models.vfem.results",
    "VFEMResults": "models.vfem.results",
    "Verification": "federation.account.verification",
    "VerticalBoostResults": "models.boost.vertical_results",
    "VerticalGLMResults": "models.vglm.results",
    "WildBootstrap": "models.glm.sums.wild",
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
