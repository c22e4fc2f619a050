"""Private boosting: formula, public descriptions and epsilon in, results out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from fedstat.errors import FormulaError, ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.syntax_tree import TREATMENT, Category, Column
from fedstat.federation.design.formula.terms import parse_terms, term_columns
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Engine
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.boost.learning.learners import BoostFormula, Learner, parse_boost_formula
from fedstat.models.boost.private.explain import PrivateBoostPlan
from fedstat.models.boost.private.protocol import ReleasedCurves, release_curves, sort_sums
from fedstat.models.boost.private.public_curves import DEPTH, PublicCurve, PublicPart
from fedstat.models.boost.private.results import PrivateBoostResults
from fedstat.models.boost.private.steps import DRY_RUN_STEPS, FAMILY, CurvesPlan
from fedstat.models.boost.vertical.steps import curves_by_owner, find_owners
from fedstat.models.checks import check_layout, check_positive, check_whole, checks_arguments
from fedstat.models.copula.bounds import Bounds, IntoBound
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.private_release import LARGEST_DELTA, PrivateRelease
from fedstat.models.explain import ForecastPlan
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.typing import Floats

IntoPublic: TypeAlias = PublicCurve | IntoBound


class PrivateFunctionBoost(PrivateRelease):
    """Boosting with curves under differential privacy, over institutions that hold different columns.

    What :class:`fedstat.FedFunctionBoost` makes of a formula where `epsilon` is given. Every curve counts as
    its public mean plus scores on a few public functions, every column by its public range or levels; each
    institution cuts its part of a row to a public length. All products of scores are released once, with
    noise that each institution adds to its own part before it leaves; of institutions' products with each
    other only shares leave. Boosting of these sums, any number of steps, costs nothing more: a second
    :meth:`fit` of the same model asks for nothing. A step that gains less than 1.5 times what noise alone
    would is not taken; none is in 19 of 20 releases in which nothing has an effect.

    Parameters
    ----------
    boost : BoostFormula
        Of ``bsignal(curve)`` and ``bols(column)``.
    partition : ClientPartition
        In the vertical layout, at sites whose owners allow a budget (``Policy(privacy=Budget(...))``).
    epsilon : float
        Of differential privacy, for the whole record of one entity, replaced by any other.
    public : mapping of str to PublicCurve, range or levels
        What is public of every curve and column of the formula, the response among them: ranges and levels
        as for :class:`fedstat.Bounds`, by default what the owners have published.
    delta : float
        At most 1e-6.
    coordinator : str, optional
        The institution at which the coordinator sits, or ``"apart"``, the default.

    Raises
    ------
    ModelError
        Something of the formula has no public description, or an argument has no meaning here.
    FormulaError
        A learner is none of these two.
    """

    _plan: ClassVar[type[ForecastPlan] | None] = PrivateBoostPlan
    _instead = DRY_RUN_STEPS

    def __init__(
        self,
        boost: BoostFormula,
        partition: ClientPartition,
        epsilon: float,
        public: Mapping[str, IntoPublic] | None = None,
        *,
        delta: float = LARGEST_DELTA,
        coordinator: str | None = None,
    ) -> None:
        check_layout(type(self).__name__, partition, "vertical")
        self.boost = boost
        self.curves = curves_by_owner(partition)
        held = {client: tuple(own) for client, own in partition.curves.items()}
        self.apart = find_owners(boost, partition.columns, held)
        self.formula = self.apart.formula
        names = [_column_of(one) for one in boost.learners[1:]]
        (response,) = self.formula.response_columns or ("",)
        if not boost.functional and boost.response != response:
            raise FormulaError(
                f"formula: a private fit is of a column as it stands, and not of {boost.response}"
            )
        of_curves, others = _split(public, [*names, response], set(self.curves))
        owners = [*self.apart.owners[1:], self.apart.holder]
        plain: dict[str, list[str]] = {client: [] for client in self.apart.clients}
        for name, owner in zip([*names, response], owners, strict=True):
            if name not in self.curves and name not in plain[owner]:
                plain[owner].append(name)
        super().__init__(partition, epsilon, delta, plain, others, coordinator)
        bins = {
            name: Bins.of(name, column, DEPTH) for own in self.bounds.values() for name, column in own.items()
        }
        self.parts = tuple(
            PublicPart(name, of_curves.get(name), bins.get(name)) for name in [*names, response]
        )
        _check_response(self.parts[-1])
        self._released: tuple[ReleasedCurves, Ledger, Engine] | None = None

    @classmethod
    def of_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula; see :meth:`fedstat.FedFunctionBoost.from_formula`."""
        check_layout(cls.__name__, partition, "vertical")
        return cls(parse_boost_formula(formula, list(curves_by_owner(partition))), partition, **settings)

    @property
    def _description(self) -> str:
        """What is asked for, in words."""
        return f"{self.formula.text} at epsilon {self.epsilon:g}"

    @property
    def _points(self) -> Floats:
        """Points of the response, (G,); one for a number."""
        return self.curves[self.boost.response].grid if self.boost.functional else np.zeros(1)

    @cached_property
    def _planned(self) -> CurvesPlan:
        """The plan of the noise, which public descriptions settle."""
        owners = [*self.apart.owners[1:], self.apart.holder]
        parts = {
            client: tuple(part for part, k in zip(self.parts, owners, strict=True) if k == client)
            for client in self.apart.clients
        }
        return CurvesPlan(
            rho=self._rho,
            columns=dict.fromkeys(parts, ()),
            parts=parts,
            holder=self.apart.holder,
            response=self.parts[-1].width,
        )

    @checks_arguments
    def fit(self, *, steps: int = 80, nu: float = 0.2) -> PrivateBoostResults:
        """Ask the institutions once, under their budgets, and boost.

        Parameters
        ----------
        steps : int
            Most steps.
        nu : float
            Share of a fit by which a step moves, in (0, 1].

        Returns
        -------
        PrivateBoostResults

        Raises
        ------
        DescriptionError
            A budget does not allow it, or is spent; says what is left, and the line of the policy.
        EstimationError
            Two institutions share too few entities.
        ModelError
            The coordinator sits at one of two institutions, and nobody else can deal random numbers.
        """
        call = Call.of(self.fit, locals())
        check_whole("steps", steps, 1)
        check_positive("nu", nu)
        if nu > 1.0:
            raise ModelError(f"nu: expected a share of at most 1, received {nu!r}")
        return run_fit(self, call, PrivateFunctionBoost._estimate, int(steps), float(nu))

    def _estimate(self, attempt: FitAttempt, steps: int, nu: float) -> PrivateBoostResults:
        # A dry run has an engine of its own and must send the requests.
        if self._released is None or self._released[2] is not self.engine:
            self._released = (self._release(attempt), attempt.ledger, self.engine)
        released, ledger, _ = self._released
        sums = sort_sums(released, self.apart.owners, [1, *(part.width for part in self.parts[:-1])])
        return PrivateBoostResults._of(self, released, sums, steps, nu, ledger)

    def _release(self, attempt: FitAttempt) -> ReleasedCurves:
        self._check_budgets()
        asking = SecureProductSession(FAMILY, self._session, attempt.ledger.at)
        protocol = release_curves(
            asking, self._planned, self._rows, tuple(self.partition.sites), self.partition.n_entities
        )
        return attempt.run(protocol)

    def _columns_read(self, site: str) -> Sequence[str]:
        return [part.name for part in self._planned.parts.get(site, ())]


def _column_of(learner: Learner) -> str:
    """Column or curve that a learner of a private fit is of; a FormulaError where it is another one."""
    if learner.kind == "bsignal" and not learner.by and not learner.constant:
        return learner.of
    if learner.kind == "bols" and not learner.by and not learner.constant:
        (term,) = parse_terms(learner.of).terms
        tree = term[0].tree
        dummies = isinstance(tree, Category) and tree.coding == TREATMENT
        plain = len(term) == 1 and (isinstance(tree, Column) or dummies)
        if plain:
            return term_columns(term)[0]
    raise FormulaError(
        f"formula: {learner.label} is none of a private fit, which has bsignal(curve) and bols(column), each "
        "by what is public of it"
    )


def _split(
    public: Mapping[str, IntoPublic] | None, names: Sequence[str], curves: set[str]
) -> tuple[dict[str, PublicCurve], Bounds | dict[str, Any] | None]:
    """Tell public curves from ranges and levels; a ModelError lists curves without a description."""
    given = dict(public or {})
    of_curves = {name: one for name, one in given.items() if isinstance(one, PublicCurve)}
    absent = [name for name in names if name in curves and name not in of_curves]
    if absent:
        lines = "\n".join(
            f"    {name!r}: fs.PublicCurve(grid, mean, functions, deviations)," for name in absent
        )
        raise ModelError(
            "public: a private fit takes means, functions and deviations of curves from elsewhere, and none "
            f"from the data. Write what is public of each:\npublic={{\n{lines}\n}}"
        )
    others = {name: one for name, one in given.items() if name not in of_curves}
    strange = [name for name in of_curves if name not in curves]
    if strange:
        raise ModelError(f"public: there is no curve {', '.join(map(repr, strange))} at any institution")
    return of_curves, others or None


def _check_response(part: PublicPart) -> None:
    if part.bins is not None and (part.bins.levels or part.bins.scale != "linear"):
        raise ModelError(
            f"public: the response '{part.name}' is a curve, or a number with a range (low, high)"
        )
