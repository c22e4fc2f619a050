"""Constructor, layout and fit by iteration that the models of a normal response and of another share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from fedstat.errors import ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.checks import check_choice, check_whole
from fedstat.models.vertical.division import divide_as_before, keep_division
from fedstat.models.vertical.exchange.patterns import PatternExchange, SmallPatterns
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.arguments import check_roles
from fedstat.models.vfem.block_results import BlockResults
from fedstat.models.vfem.blocks.layout import make_layout
from fedstat.models.vfem.blocks.request import FAMILY
from fedstat.models.vfem.covariance.from_moments import CovType
from fedstat.models.vfem.covariance.protocol import CovarianceOptions
from fedstat.models.vfem.iteration.options import IterationOptions
from fedstat.models.vfem.iteration.progress import Progress
from fedstat.models.vfem.moments.cross_products import CrossOptions
from fedstat.models.vfem.protocol import Iterated
from fedstat.models.vfem.statements.outcome import HeldInSession, VFEMOutcome, warn_of_merges
from fedstat.typing import Floats

Results = TypeVar("Results", bound=BlockResults[Any])
Method: TypeAlias = Literal["vfem", "cc", "impute", "single"]
CrossSource: TypeAlias = Literal["secure", "sketch", "exact"]
SketchKind: TypeAlias = Literal["structured", "gaussian"]
Init: TypeAlias = "Literal['zero', 'cc', 'impute'] | Sequence[float] | Mapping[str, float] | Floats"


@dataclass(frozen=True, slots=True)
class IterativeFit:
    """What is asked of a fit by iteration; see :meth:`fedstat.VFEMRegression.fit`.

    Where columns depend between institutions `small` says which missing patterns are too small.
    """

    method: Method
    options: IterationOptions
    covariance: CovarianceOptions
    init: Init = "zero"
    estimates_alpha: bool = False
    small: SmallPatterns | None = None


class VFEMModel(VerticalModel):
    """What models of a normal response and of another share."""

    family: ClassVar[str] = FAMILY

    def __init__(
        self,
        formula: Formula,
        partition: Any,
        *,
        offset: str | None = None,
        freq_weights: str | None = None,
        var_weights: str | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"offset": offset, "freq_weights": freq_weights, "var_weights": var_weights}
        self._roles = {role: name for role, name in given.items() if name is not None}
        check_roles(self._roles, formula, partition)
        if not formula.intercept:
            raise ModelError(
                f"'{formula.text}' leaves out the intercept; VFEM centres every block at its mean and "
                "has one: drop '- 1' or '0 +'"
            )
        super().__init__(formula, partition, **kwargs)

    def _layout(self, method: Method, *, partly: bool = False) -> Layout:
        check_choice("method", method, get_args(Method))
        layout = make_layout(self.design, method, partly=partly)
        return replace(layout, frequencies="freq_weights" in self._roles)

    def _beside(self) -> dict[str, str]:
        names = {"offset": "offset", "freq_weights": "weights", "var_weights": "weights"}
        return {names[role]: column for role, column in self._roles.items()}

    def _names(self) -> dict[str, tuple[str, ...]]:
        return {block.client: block.names for block in self.design.blocks}

    def _covariance_options(
        self, cov_type: CovType, cross_products: CrossSource, sketch: SketchKind, sketch_size: int
    ) -> CovarianceOptions:
        check_choice("cross_products", cross_products, get_args(CrossSource))
        check_choice("sketch", sketch, get_args(SketchKind))
        check_whole("sketch_size", sketch_size, 1)
        # Neither needs products of two institutions: no round asks for them, and nobody need deal.
        how = "none" if cov_type in ("expected", "none") else cross_products
        at, min_count = self._agreement.at, self.partition.min_count
        return CovarianceOptions(
            cov_type, self._names(), CrossOptions(how, sketch, sketch_size, at, min_count)
        )

    def _begin(self, method: Method, *, partly: bool = False) -> tuple[Layout, Ledger]:
        """Lay out a fit, with an account of its own that goes on from that of the agreement.

        Entities take part `partly` where a fit conditions on what it sees of an institution's columns.
        """
        complete = method in ("cc", "single")
        conditioned = self._conditions and self.partition.partial == "condition"
        if conditioned and not partly and method in ("vfem", "impute"):
            self._warn_of_partial_blocks("this fit")
        layout = self._layout(method, partly=partly)
        layout = divide_as_before(layout, self.partition, complete=complete, partly=partly)
        return self._with_dealer(layout), copy.deepcopy(self._agreement)

    def _keep_division(self, layout: Layout, exchange: PatternExchange) -> None:
        """Let later fits set aside what this one did, and say if that is much."""
        keep_division(layout, self.partition, exchange.plan, exchange.released, exchange.columns)
        warn_of_merges(exchange, layout.n)

    def _fit_by_iteration(self, wanted: IterativeFit, results: type[Results]) -> Results:
        layout, ledger = self._begin(wanted.method)
        reporter = Progress(wanted.options)
        protocol = self._iterate(wanted, layout, reporter)
        try:
            found = self.engine.run(self._receipted(protocol, ledger), ledger)
        finally:
            reporter.close()
        outcome = VFEMOutcome(
            method=wanted.method,
            cov_type=wanted.covariance.cov_type,
            init=wanted.init if isinstance(wanted.init, str) else "given",
            options=wanted.options,
            fit=found.fit,
            covariance=found.covariance,
        )
        if found.exchange is not None:
            self._keep_division(layout, found.exchange)
        held = HeldInSession(found.fitted, found.exchange, found.linear)
        return results._of(self, layout, outcome, held, ledger)

    def _iterate(self, wanted: IterativeFit, layout: Layout, report: Progress | None) -> Rounds[Iterated]:
        """Fit by iteration, with the covariance of the estimates."""
        raise NotImplementedError
