"""Constructor, layout and options that the models of a normal response and of another share."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias, get_args

from fedstat.errors import ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.checks import check_choice, check_whole
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.blocks.layout import make_layout
from fedstat.models.vfem.blocks.request import FAMILY
from fedstat.models.vfem.covariance.from_moments import CovType
from fedstat.models.vfem.covariance.protocol import CovarianceOptions
from fedstat.models.vfem.iteration.progress import Progress
from fedstat.models.vfem.moments.cross_products import CrossOptions
from fedstat.models.vfem.protocol import Iterated

Method: TypeAlias = Literal["vfem", "cc", "impute", "single"]
CrossSource: TypeAlias = Literal["secure", "sketch", "exact"]
SketchKind: TypeAlias = Literal["structured", "gaussian"]


class VFEMModel(VerticalModel):
    """What models of a normal response and of another share."""

    family: ClassVar[str] = FAMILY

    def __init__(self, formula: Formula, partition: Any, **kwargs: Any) -> None:
        if not formula.intercept:
            raise ModelError(
                f"'{formula.text}' leaves out the intercept; VFEM centres every block at its mean and "
                "has one: drop '- 1' or '0 +'"
            )
        super().__init__(formula, partition, **kwargs)

    def _layout(self, method: Method) -> Layout:
        check_choice("method", method, get_args(Method))
        return make_layout(self.design, method)

    def _names(self) -> dict[str, tuple[str, ...]]:
        return {block.client: block.names for block in self.design.blocks}

    def _covariance_options(
        self, cov_type: CovType, cross_products: CrossSource, sketch: SketchKind, sketch_size: int
    ) -> CovarianceOptions:
        check_choice("cross_products", cross_products, get_args(CrossSource))
        check_choice("sketch", sketch, get_args(SketchKind))
        check_whole("sketch_size", sketch_size, 1)
        how = "none" if cov_type in ("expected", "none") else cross_products
        at, min_count = self._agreement.at, self.partition.min_count
        return CovarianceOptions(
            cov_type, self._names(), CrossOptions(how, sketch, sketch_size, at, min_count)
        )

    def _run(self, protocol: Rounds[Iterated], ledger: Ledger, reporter: Progress | None) -> Iterated:
        found = self.engine.run(self.receipted(protocol, ledger), ledger)
        if reporter is not None:
            reporter.close()
        return found
