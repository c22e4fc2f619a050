"""Selection of columns from the moments of a VFEM fit, by the paths of VerticalGLM, without a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import Estimate
from fedstat.kernels.penalized.penalties import Penalty
from fedstat.models.checks import check_integer
from fedstat.models.vertical.exchange.patterns import PatternExchange, SmallPatterns
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.base_model import make_layout
from fedstat.models.vfem.covariance.cross_products import product_session
from fedstat.models.vfem.outcome import VFEMOutcome, as_between
from fedstat.models.vglm.model import TOLERANCES, warn_unless_converged
from fedstat.models.vglm.options import ChoiceOptions, ExchangeOptions, FitPlan, read_lambdas
from fedstat.models.vglm.path_setup import PathSetup, Select, make_groups
from fedstat.models.vglm.protocol import select_blocks
from fedstat.models.vglm.results import VerticalGLMResults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions:
    """Options of :meth:`fedstat.results.VFEMResults.select`."""

    penalty: str
    criterion: Select
    a: float | None
    l1_ratio: float
    adaptive: float
    group_terms: bool
    unpenalized: Sequence[str]
    lam: float | None
    lambdas: Sequence[float] | Floats | None
    n_lambdas: int
    ratio: float
    draws: int
    seed: int | None

    def setup(self, groups: Any) -> PathSetup:
        """Return what is penalized, and how."""
        check_integer("n_lambdas", self.n_lambdas, 2)
        return PathSetup(
            penalty=Penalty(self.penalty, self.a, self.l1_ratio),
            groups=groups,
            adaptive=self.adaptive,
            lambdas=read_lambdas(self.lam, self.lambdas),
            size=self.n_lambdas,
            ratio=self.ratio,
            algorithm="lla",
            tol=TOLERANCES[0],
        )


def select_columns(
    model: VerticalModel,
    outcome: VFEMOutcome,
    exchange: PatternExchange,
    every: Estimate,
    ledger: Ledger,
    options: SelectionOptions,
    *,
    sources: Iterable[object],
) -> VerticalGLMResults:
    """Fit a path of penalized models from the moments of a fit with estimates of `every` column."""
    if model._roles.keys() - {"offset"}:
        raise NotAvailableError("select: weights are not supported; fit without them")
    if options.criterion not in ("bic", "ebic", "aic"):
        raise ModelError(f"criterion: expected 'bic', 'ebic' or 'aic', received {options.criterion!r}")
    layout = make_layout(model.design, outcome.method, partly=outcome.method == "vfem")
    setup = options.setup(make_groups(layout, options.group_terms, options.unpenalized))
    if options.draws and not setup.penalty.selecting:
        raise ModelError("draws: penalty='ridge' selects no columns; leave draws out")
    plan = FitPlan(
        layout=layout,
        distribution=outcome.fit.distribution,
        product_session=product_session(layout, model._session, model._agreement.at),
        small=SmallPatterns(model.partition.min_count, None),
        setup=setup,
        choice=ChoiceOptions(options.criterion, "conditional", 2, options.draws, 1),
        passing=ExchangeOptions("products", "quadratic", use_masks=False, tol=setup.tol, maxiter=1),
        random=np.random.default_rng(options.seed),
        between=as_between(outcome),
    )
    found = select_blocks(plan, exchange, outcome.choice)
    result = VerticalGLMResults._of(
        model, found, ledger, None if every.cov is None else every, sources=sources
    )
    warn_unless_converged(found)
    return result
