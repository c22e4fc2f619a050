"""Steps of a site for vertical boosting, and their requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from fedstat import codec
from fedstat.codec import Minimum
from fedstat.errors import FormulaError, MessageError
from fedstat.federation.design.block import CodedBlock
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.expression import name_expression
from fedstat.federation.design.formula.facts import column_facts, response_facts, term_facts
from fedstat.federation.design.formula.parse import Formula, SiteTerms, formula_of_terms
from fedstat.federation.design.formula.terms import parse_term, term_columns
from fedstat.federation.design.vertical_design import block_of, columns_cardinality, response_of
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import ONE_OWNER, include, state_without_terms, step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_lengths
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.product_steps import COMPARISON_ORDER, PRODUCT_STEPS
from fedstat.federation.tables.cardinality import ColumnCardinality
from fedstat.federation.tables.curves import CurveArray, curves_of
from fedstat.models.boost.learning.columns import learner_columns, smooth_request, time_basis
from fedstat.models.boost.learning.learners import INTERCEPT, BoostFormula, Learner
from fedstat.models.vertical.exchange.standardized_columns import dithered, require_groups, staged_block
from fedstat.models.vertical.exchange.steps import CODE, GROUPS, ExchangeRules, exchange_steps, sum_products
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The site of each learner, and the columns that each site must make.


@dataclass(frozen=True, slots=True)
class CurvesRequest:
    """Curves of the right side, or of the response, which must have no long gap."""

    curves: tuple[str, ...]
    response: str = ""


@dataclass(frozen=True, slots=True)
class LearnerColumnsRequest:
    """Columns that a site makes: of its learners, without their constants, and of the response.

    `response` is a curve, or with `number` the open response; it is empty at sites without it. `columns` is
    the number at all sites, against which rows are checked.
    """

    learners: tuple[Learner, ...]
    response: str
    number: bool
    time: Learner | None
    columns: Annotated[int, Minimum(1)]

    def check(self) -> None:
        """Require learners other than the intercept, which belongs to no site."""
        if any(one.kind == INTERCEPT for one in self.learners):
            raise MessageError("the request for columns has an intercept")

    @property
    def curves(self) -> tuple[str, ...]:
        """Curves that are read."""
        of_learners = [one.of for one in self.learners if one.of_curve]
        own = [] if self.number or not self.response else [self.response]
        return tuple(dict.fromkeys((*of_learners, *own)))


@dataclass(frozen=True, slots=True)
class VerticalLearners:
    """A formula over sites with different columns, and the site of each learner.

    `owners` (P,) are the sites of the learners, that of the response for the intercept; `formula` has for
    each site the columns and curves that it reads.
    """

    boost: BoostFormula
    formula: Formula
    owners: tuple[str, ...]

    @property
    def holder(self) -> str:
        """Site of the response."""
        return str(self.formula.response_site)

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites that take part, in the order of the partition."""
        return tuple(terms.site for terms in self.formula.sites)

    def curves(self, site: str) -> tuple[str, ...]:
        """Curves of the right side at a site."""
        pairs = zip(self.boost.learners, self.owners, strict=True)
        return tuple(one.of for one, owner in pairs if owner == site and one.of_curve)

    def terms(self, site: str) -> SiteTerms:
        """Terms of a site, and the columns that they read, without curves."""
        (own,) = (terms for terms in self.formula.sites if terms.site == site)
        written = {name_expression(name).text for name in self.curves(site)}
        terms = tuple(text for text in own.terms if text not in written)
        names = dict.fromkeys(name for text in terms for name in term_columns(parse_term(text)))
        return SiteTerms(site, terms, tuple(names))

    def made(
        self, site: str, learners: Sequence[Learner], time: Learner | None, columns: int
    ) -> LearnerColumnsRequest:
        """Return the request for a site's columns; `learners` are all, with the ends of their bases."""
        pairs = zip(learners, self.owners, strict=True)
        own = tuple(one for one, k in pairs if k == site and one.kind != INTERCEPT)
        holds = site == self.holder
        response = self.boost.response if holds else ""
        return LearnerColumnsRequest(
            own, response, holds and not self.boost.functional, time if holds else None, columns
        )


def curves_by_owner(partition: ClientPartition) -> dict[str, CurveArray]:
    """Curves of sites that hold different columns."""
    return {name: one for own in partition.curves.values() for name, one in own.items()}


def find_owners(
    boost: BoostFormula, columns: Mapping[str, Sequence[str]], curves: Mapping[str, Sequence[str]]
) -> VerticalLearners:
    """Find the sites of a formula's columns; FormulaError if a learner needs columns of two sites.

    `columns` and `curves` are those of each site, by name.
    """
    along = [one.label for one in boost.learners if one.varying]
    if along:
        raise FormulaError(
            f"formula: {along[0]} needs products of its columns with the response at each of its points. If "
            "sites hold different columns, the learners are bsignal(), bfpc(), bols(), bbs(), brandom()"
        )
    held = {site: (*names, *curves[site]) for site, names in columns.items()}
    wanted = [name_expression(name).text for name in boost.curves]
    left = name_expression(boost.response).text if boost.functional else boost.response
    # A curve counts as a column of its site here, so that its site is found in the same way.
    terms = [parse_term(text) for text in (*boost.terms, *wanted)]
    parsed = formula_of_terms(boost.text, left, terms, held, pooled=False)
    owner = {term: terms.site for terms in parsed.sites for term in terms.terms}
    owners = []
    for one in boost.learners:
        read = [*([name_expression(one.of).text] if one.of_curve else []), *one.terms]
        holders = list(dict.fromkeys(owner[term] for term in read)) or [str(parsed.response_site)]
        if len(holders) > 1:
            raise FormulaError(
                f"formula: {one.label} needs columns of {' and '.join(map(repr, holders))}; a learner must "
                "belong to one site"
            )
        owners += holders
    at = {terms.site: terms for terms in parsed.sites}
    sites = (at.get(k, SiteTerms(k, (), ())) for k in columns if k in at or k == parsed.response_site)
    response = f"{boost.response}(t)" if boost.functional else parsed.response
    return VerticalLearners(boost, replace(parsed, response=response, sites=tuple(sites)), tuple(owners))


# ----------------------------------------------------------------------------------------------------
# A site's replies for boosting if other sites hold other columns.
#
# Its learners' columns, and the response in its basis, become one block, which is summed and multiplied like
# the blocks of other families (:mod:`fedstat.models.vertical.exchange.steps`). In addition, the holder of the
# response releases by fold: `totals`, sums of the response at each of its points, and of its square, (F, G +
# 1).

FAMILY = state_without_terms("boost_vertical", ONE_OWNER)
POINTS, WIDTH = "response at its points", "columns of all sites"
LEARNER_COLUMNS = "learners of columns"


def learners_of_columns(state: State) -> Sequence[str]:
    """Learner of each column of the block, and the response."""
    labels: Sequence[str] = block_of(state).spec.term_names  # in a dry run
    return state.look_at(LEARNER_COLUMNS) if LEARNER_COLUMNS in state else labels


RULES = ExchangeRules(remembers=True, flat=True, terms=learners_of_columns)


@step(
    FAMILY,
    releases={"seen": ArrayDeclaration("presence", "which rows have the curves", dtype="bool")},
    requests=ArrayDeclaration("schema", "curves of the formula"),
)
def open_curves(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Return which rows have the requested curves, without a long gap: ``seen`` (n_rows,).

    A response must be measured at all of its points, except in short gaps, which are interpolated.
    """
    request = codec.from_json(CurvesRequest, text, f"{data.name}: the request for curves")
    names = (*request.curves, *([request.response] if request.response else []))
    state.report(column_facts(names))
    absent = [name for name in names if name not in data.table.columns]
    if absent or not names:
        raise MessageError(f"{data.name}: has no curve {', '.join(map(repr, absent)) or 'of the request'}")
    state.use_columns(names)
    seen = np.ones(data.table.n_rows, dtype=np.bool_)
    for name in request.curves:
        seen &= ~curves_of(data.frame[name]).gappy()
    if request.response:
        seen &= ~np.isnan(curves_of(data.frame[request.response]).filled().values).any(axis=1)
    return {"seen": seen}, ""


@step(
    FAMILY,
    takes={
        "use": ArrayDeclaration(
            "presence", "rows that have all that the formula reads here, and a response", dtype="bool"
        )
    },
    requests=ArrayDeclaration("control", "learners, with the ends of their bases; the basis of the response"),
)
def make_columns(data: SiteData, state: State, text: str, use: Bools) -> tuple[dict[str, Array], str]:
    """Make the columns of the learners, and of the response in its basis, for the rows in `use`, (n_rows,).

    Columns without a value, and constants, stay: they are zero after standardization.
    """
    request = codec.from_json(LearnerColumnsRequest, text, f"{data.name}: the requested columns")
    check_lengths(data.name, use=(use, data.table.n_rows))
    state.report(smooth_request(request.learners), column_facts(request.curves))
    state.use_columns(request.curves)
    spec, coded = BlockSpec(data.name), np.empty((int(use.sum()), 0))
    if any(one.terms for one in request.learners):
        block = block_of(state)
        if (use & ~block.seen).any():
            raise MessageError(f"{data.name}: array 'use' names rows that lack columns of the formula")
        spec, coded = block.spec, block.X[use[block.seen]]
    frame = data.frame[use]
    made = [learner_columns(one, frame, coded, spec.term_names) for one in request.learners]
    if request.response:
        curves = None if request.number else curves_of(frame[request.response]).filled()
        Y = response_of(state)[use][:, None] if curves is None else curves.values
        if not np.isfinite(Y).all():
            raise MessageError(f"{data.name}: array 'use' names rows without a response")
        made.append(Y @ time_basis(request.time, np.zeros(1) if curves is None else curves.grid))
        state.keep(POINTS, Y, len(Y))
    for label, Z in zip([*(one.label for one in request.learners), request.response], made, strict=False):
        _declare_directions(state, label, Z)
    X = np.ascontiguousarray(np.column_stack(made))
    labels = [*(one.label for one in request.learners), "response"]
    of_columns = [[label] * part.shape[1] for label, part in zip(labels, made, strict=False)]
    state.keep(LEARNER_COLUMNS, tuple(label for part in of_columns for label in part))
    state.keep(WIDTH, request.columns)
    state.keep("block", CodedBlock(spec, use, X, 0), len(X), columns=X.shape[1])
    state.keep("block detail", _detail(data, request, spec, [part.shape[1] for part in made]))
    return {}, ""


def _declare_directions(state: State, label: str, Z: Floats) -> None:
    """Declare the columns of one learner, (n, k), each with mean square one, and the rows they single out."""
    size = np.sqrt((Z * Z).mean(axis=0)) if len(Z) else np.ones(Z.shape[1])
    parts = [Z / np.where(size > 0.0, size, 1.0)]
    names = [f"{label}[{j}]" for j in range(Z.shape[1])]
    state.report(facts.DesignDirections(parts.__iter__, len(Z), names))


def _detail(
    data: SiteData, request: LearnerColumnsRequest, spec: BlockSpec, widths: list[int]
) -> ColumnCardinality | None:
    """Declare which columns come from columns of few values, if the site's owner requires it."""
    if data.policy.discrete == "any":
        return None
    factors: list[Sequence[facts.FormulaFactor]] = []
    for one, width in zip(request.learners, widths, strict=False):
        read = [factor for term in one.terms for factor in term_facts([parse_term(term)]).factors]
        factors += [read] * width
    if request.response:
        factors += [response_facts(request.response).factors if request.number else []] * widths[-1]
    return columns_cardinality(data, factors)


def sum_products_by_fold(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum columns and their products by fold, if there are enough rows for the columns of all sites."""
    counts = np.bincount(code[code >= 0], minlength=1)
    width = max(state.look_at(WIDTH), staged_block(state).X.shape[1])
    state.report(facts.RowCount(int(counts[counts > 0].min(initial=len(code))), width))
    return sum_products(RULES, data, state, code, groups)


@step(
    FAMILY,
    "sum_products",
    takes={"code": CODE, "groups": GROUPS},
    releases={
        "totals": ArrayDeclaration(
            "aggregate",
            "sums of the response at its points, and of its square, by fold",
            2,
            behind=(facts.EntityCount, facts.GroupSums, facts.SummedColumns),
        )
    },
)
def sum_points(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum the response at each of its points, and its square, by fold: ``totals`` (F, G + 1)."""
    staged, F = staged_block(state), int(groups)
    Y = dithered(data, state.use(POINTS, np.ndarray))[staged.keep]
    check_lengths(data.name, code=(code, len(Y)))
    require_groups(data.name, code, F, Y.shape[1] + 1)
    state.report(facts.GroupSums(code), facts.SummedColumns(Y, code))
    members = [Y[code == f] for f in range(F)]
    return {"totals": np.array([np.append(rows.sum(axis=0), (rows * rows).sum()) for rows in members])}


EXCHANGED = exchange_steps(RULES)
_SUMS = EXCHANGED["sum_products"]
include(
    FAMILY,
    {
        "sum_products": replace(
            _SUMS,
            run=sum_products_by_fold,
            gives={
                name: replace(one, behind=(*one.behind, facts.RowCount)) for name, one in _SUMS.gives.items()
            },
        ),
        **{name: EXCHANGED[name] for name in ("stage_block", *PRODUCT_STEPS)},
    },
    {
        "sum_products": "stage_block",
        "open_product": "deal_product open_product sum_products sum_points",
        **COMPARISON_ORDER,
    },
)
