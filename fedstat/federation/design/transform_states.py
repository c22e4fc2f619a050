"""States of the transforms of a formula, computed from sums over sites.

``center`` and ``scale`` need a mean and a variance, ``poly`` the two coefficients of its recurrence for each
degree: all are sums over rows, so that every site codes its rows as the pooled table would be coded. Of few
rows many powers give the values: a site wants far more rows than powers. Under masks no site's own sums are
seen; sites' means and squared deviations do not add up, so that those of all are found one after the other.
The knots of a spline are in the formula, or are found before
(:mod:`fedstat.federation.design.spline_knots`). A cubic spline whose
columns have mean zero (``constraints="center"``) needs their sums at these knots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any

import numpy as np
import pandas as pd

from fedstat import codec
from fedstat.errors import DesignError, FormulaError, MessageError, Remedy
from fedstat.federation.design.coding import (
    STATE_KEYS,
    Figures,
    TransformStates,
    evaluate,
    plain_state,
    restore_state,
    written_state,
)
from fedstat.federation.design.formula.syntax_tree import (
    SPLINES,
    Column,
    Transform,
    inner_knots,
    is_written,
    iter_columns,
    iter_transforms,
    with_places,
)
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.design.site_rows import RowsRequest, find_complete_rows, rows_behind, subset_counts
from fedstat.federation.design.spline_knots import splines_without_knots, with_knots
from fedstat.federation.disclosure.facts import ColumnVariation, RowCount
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import as_numbers
from fedstat.typing import Array, Bools, Floats

ROUNDING = 1e-20
"""Variance that rounding explains, relative to the square of a column's size."""
ASSUMED = 1e3
"""Each sum of one site for a transform, before the real ones are requested."""


@dataclass(slots=True)
class Recurrence:
    """Polynomials orthogonal over all rows: P_k+1 = (x - alpha_k) P_k - norm_k / norm_k-1 P_k-1."""

    degree: int
    alpha: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @property
    def unit(self) -> int:
        """Exponent of two by which sums of P_k^2 are divided: masks hold numbers up to a size."""
        k = len(self.alpha)
        return k * round(log2(self.norms[1] / self.norms[0])) if k > 1 else 0

    def last(self, x: Floats) -> Floats:
        """Values of the highest polynomial that is determined so far: (m,) -> (m,)."""
        before, now = np.zeros_like(x), np.ones_like(x)
        for k, alpha in enumerate(self.alpha):
            beta = self.norms[k] / self.norms[k - 1] if k else 0.0
            before, now = now, (x - alpha) * now - beta * before
        return now

    def check(self) -> None:
        """Require what belongs to the first polynomials; a MessageError where it is no such recurrence."""
        complete = len(self.alpha) == len(self.norms) <= self.degree
        if not complete or not all(x > 0.0 for x in self.norms):
            raise MessageError("the recurrence of a polynomial is not whole")

    def is_spent(self, squares: float) -> bool:
        """Tell whether the sum of squares of the highest polynomial is no more than rounding."""
        if not self.norms:
            return not squares > 0.0
        size = self.norms[1] / self.norms[0] if len(self.norms) > 1 else self.alpha[0] ** 2
        return not squares > ROUNDING * size * self.norms[-1]

    def add(self, squares: float, moment: float) -> bool:
        """Add the sums of P_k^2 and x P_k^2; return True if all coefficients are determined."""
        self.norms.append(squares)
        if len(self.alpha) < self.degree:
            self.alpha.append(moment / squares)
            return False
        return True


@dataclass(frozen=True, slots=True)
class TransformRequest:
    """A request for transforms: all are in `question`, and the state of some is known already.

    `targets` are those that are due, with the recurrence of a polynomial as far as it is known; center() and
    scale() have one of degree one where sums are masked.
    """

    question: str
    state: Mapping[str, Mapping[str, Figures]]
    targets: Mapping[str, Recurrence | None]


def stateful(terms: Sequence[Term]) -> list[Transform]:
    """List the transforms that need the data of all sites, inner ones first."""
    found = [t for term in terms for factor in term for t in iter_transforms(factor.tree)]
    needed = [t for t in reversed(found) if t.function in STATE_KEYS and not dict(t.options).get("raw")]
    return list({t.text: t for t in needed}.values())


def needs_sums(question: RowsRequest) -> bool:
    """Tell whether some transform has a state that follows from sums over rows."""
    return any(not is_written(t) for t in stateful(question.read_every_term()))


def assumed_states(question: RowsRequest) -> TransformStates:
    """States with the shape of the real ones, for the parts of a design that are known before any sums."""
    open_ones = splines_without_knots(question)
    assumed = {t.text: with_places(t, range(2 + (inner_knots(t) or 0))) for t in open_ones}
    question = with_knots(question, assumed)
    protocol = agree_states(question, ("",), lambda site, step, content: Request(site, "", step))
    transforms = stateful(question.read_every_term())
    replies = [Reply("", {"sums": assumed_sums(transforms)})]
    try:
        next(protocol)
        while True:
            protocol.send(replies)
    except StopIteration as settled:
        asked = {new: old for old, new in assumed.items()}
        return {asked.get(text, text): state for text, state in settled.value.items()}


def agree_states(
    question: RowsRequest, sites: Sequence[str], request: Any, *, added: bool = False
) -> FitProtocol[TransformStates]:
    """Agree on the state of every transform: by its text, as formulaic keeps it.

    `ask(site, step, content)` addresses a step. With `added` only sums over the sites are used. Raises a
    FormulaError for a spline without its knots and bounds.
    """
    terms = question.read_every_term()
    pending = stateful(terms)
    written = {t.text: _written(t) for t in pending if t.function in SPLINES}
    state: TransformStates = {t.text: written[t.text] for t in pending if is_written(t)}
    raw = [t for term in terms for f in term for t in iter_transforms(f.tree) if dict(t.options).get("raw")]
    state |= {t.text: {} for t in raw}
    pending = [t for t in pending if t.text not in state]
    recurrent = [t for t in pending if t.function not in SPLINES and (added or t.function == "poly")]
    growing = {t.text: Recurrence(_degree(t)) for t in recurrent}
    while pending:
        # The state of scale(log(x)) inside another transform is needed before the other's values exist.
        ready = [t for t in pending if _inner(t) <= state.keys()]
        targets = {t.text: growing.get(t.text) for t in ready}
        content = codec.to_plain(TransformRequest(question.to_json(), plain_state(state), targets))
        requests: list[Request] = [request(site, "transform_sums", content) for site in sites]
        replies = yield requests
        for j, transform in enumerate(ready):
            sums = np.array([reply.arrays["sums"][j] for reply in replies])
            done = _settle(transform, sums, growing.get(transform.text))
            # A polynomial comes back once for each degree: its next recurrence needs sums of the last.
            if done is not None:
                state[transform.text] = done
        pending = [t for t in pending if t.text not in state]
    return state


def assumed_sums(transforms: Sequence[Transform]) -> Floats:
    """Give sums of the shape of the real ones."""
    return np.full((len(transforms), _width(transforms)), ASSUMED)


def targeted(request: TransformRequest) -> list[Transform]:
    """List the transforms that are due, in the order of their sums."""
    transforms = {t.text: t for t in stateful(RowsRequest.from_json(request.question).read_every_term())}
    return [transforms[text] for text in request.targets]


def count_power_sums(request: TransformRequest) -> int:
    """Count the sums that a polynomial or a spline gives, from which few rows would follow."""
    # Every column of a design reveals mean and variance.
    degrees = [r.degree for r in request.targets.values() if r is not None and r.degree > 1]
    # The columns of a spline add up to one in every row, so that one of their sums is no news.
    splines = [_width([t]) - 1 for t in targeted(request) if t.function in SPLINES]
    return max([0, *splines, *(2 * degree + 1 for degree in degrees)])


def _width(transforms: Sequence[Transform]) -> int:
    """Count the sums of the transform that has most: of a spline the rows, and one of every column."""
    splines = (len(_written(t)["means"]) for t in transforms if t.function in SPLINES and not is_written(t))
    return max(3, 1 + max(splines, default=0))


def transform_sums(data: SiteData, state: State, request: TransformRequest) -> dict[str, Array]:
    """Sum the quantities that the next transforms need over this site's complete rows.

    Releases `sums` (T, 3): for center and scale rows, mean and squared deviations; for a polynomial 0, sum of
    P_k^2 and, except for the last, of x P_k^2. For splines they have as many columns as needed, with rows and
    the sum of every column.
    """
    question, growing = RowsRequest.from_json(request.question), request.targets
    state.report(*question.requested())
    transforms = {t.text: t for t in stateful(question.read_every_term())}
    _check_request(request, transforms, data.name)
    known: TransformStates = restore_state(request.state)
    total = np.zeros((len(growing), _width(targeted(request))))
    few, extremes = data.policy.min_level_count - 1, dict[tuple[str, int], ColumnExtremes]()
    used, outside = [], 0
    for rows in find_complete_rows(data, question):
        used.append(rows.complete)
        outside += rows.outside
        if not len(rows.frame):
            continue
        for j, (key, recurrence) in enumerate(growing.items()):
            columns = _operand(transforms[key], rows.frame, known, data.name)
            if transforms[key].function in SPLINES:
                total[j, : 1 + columns.shape[1]] += len(columns), *columns.sum(axis=0)
            else:
                total[j, :3] = _add(total[j, :3], columns[:, 0], recurrence)
            for place, x in enumerate(columns.T):
                extremes.setdefault((key, place), ColumnExtremes(few)).add(x)
    behind: Bools = np.concatenate(used)
    state.report(RowCount(int(behind.sum()), count_power_sums(request)))
    state.report(*subset_counts(question, int(behind.sum()), outside))
    state.report(*(column.variation(f"'{key}'") for (key, _), column in extremes.items()))
    state.report(rows_behind(data, question, behind))
    state.count_entities(int(behind.sum()))
    return {"sums": total}


def _operand(transform: Transform, frame: pd.DataFrame, state: TransformStates, site: str) -> Floats:
    """Values that a transform is applied to, (m, 1); of a spline its columns before they are constrained."""
    names = dict.fromkeys(iter_columns(transform))
    numbers = {name: as_numbers(frame[name], site, name) for name in names}
    where = f"{transform.text!r} at site {site!r}"
    x = np.asarray(evaluate(transform.operand, numbers, state, where), dtype=np.float64)
    if transform.function not in SPLINES:
        return x[:, None]
    free = dict(_written(transform), means=[])
    plain = replace(transform, options=(), operand=Column("x"), text="")
    return np.column_stack(list(evaluate(plain, {"x": x}, {"": free}, where).values()))


def _check_request(request: TransformRequest, transforms: Mapping[str, Transform], site: str) -> None:
    """Require that states and targets are those of the formula's own transforms."""
    for text, state in request.state.items():
        if text in transforms and not set(state) <= STATE_KEYS[transforms[text].function]:
            raise MessageError(f"{site}: the question does not hold the state of its transforms")
    for text, recurrence in request.targets.items():
        if text not in transforms or (transforms[text].function == "poly" and recurrence is None):
            raise MessageError(f"{site}: the question names transforms that its formula does not have")
        spline = transforms[text].function in SPLINES
        if recurrence is not None and (spline or recurrence.degree != _degree(transforms[text])):
            raise MessageError(f"{site}: the question does not hold the recurrence of a polynomial")
    if not {text for key in request.targets for text in _inner(transforms[key])} <= request.state.keys():
        raise MessageError(f"{site}: the question lacks the state of a transform inside another")


@dataclass(slots=True)
class ColumnExtremes:
    """Moments of a column, and its few smallest and largest values, chunk by chunk."""

    few: int
    moments: Floats = field(default_factory=lambda: np.zeros(3))
    kept: Floats = field(default_factory=lambda: np.zeros(0))

    def add(self, x: Floats) -> None:
        """Add a chunk: (m,)."""
        mean = x.mean()
        part = np.array([len(x), mean, ((x - mean) ** 2).sum()])
        self.moments = combine_moments(np.array([self.moments, part]))
        # Only the values that may be the few most extreme of all: a streamed column is not held in memory.
        kept = np.concatenate([self.kept, x])
        if 0 < 2 * self.few < len(kept):
            kept = np.partition(kept, [self.few - 1, len(kept) - self.few])
            kept = np.concatenate([kept[: self.few], kept[-self.few :]])
        self.kept = kept if self.few > 0 else self.kept

    def variation(self, what: str) -> ColumnVariation:
        """Tell what makes up the variation of the column, in words `what`."""
        n, mean, squares = self.moments
        flat = np.isfinite(squares) and squares <= (1e-12 * mean) ** 2 * n  # but for rounding
        return ColumnVariation(self.kept - mean, n, 0.0 if flat else squares, what)


def _add(total: Floats, x: Floats, recurrence: Recurrence | None) -> Floats:
    if recurrence is not None:
        squares = np.ldexp(recurrence.last(x) ** 2, -recurrence.unit)
        moment = x @ squares if len(recurrence.alpha) < recurrence.degree else 0.0
        return np.asarray(total + np.array([0.0, squares.sum(), moment]))
    mean = x.mean()
    return combine_moments(np.array([total, [len(x), mean, ((x - mean) ** 2).sum()]]))


def combine_moments(parts: Floats) -> Floats:
    """Rows, mean and squared deviations of all, from those of each part: (K, 3) -> (3,).

    Chan, Golub and LeVeque (1983), without the cancellation of a sum of squares.
    """
    n = parts[:, 0].sum()
    mean = parts[:, 0] @ parts[:, 1] / n if n else 0.0
    spread = parts[:, 2].sum() + parts[:, 0] @ (parts[:, 1] - mean) ** 2
    return np.array([n, mean, spread], dtype=np.float64)


def _settle(transform: Transform, sums: Floats, recurrence: Recurrence | None) -> dict[Any, Any] | None:
    """Return the state of a transform from its sums; None while a polynomial needs more.

    Raises a DesignError for too few distinct values.
    """
    if transform.function in SPLINES:
        reported = _written(transform)
        rows, *totals = sums.sum(axis=0)[: 1 + len(reported["means"])].tolist()
        return reported | {"means": [total / rows for total in totals]}
    if recurrence is None:
        return _standard(transform, *combine_moments(sums[:, :3]).tolist())
    _, squares, moment = np.ldexp(sums[:, :3].sum(axis=0), recurrence.unit).tolist()
    if transform.function == "poly":
        return _grow(transform, squares, moment, recurrence)
    if not recurrence.norms:
        recurrence.add(squares, moment)
        return None
    spread = 0.0 if recurrence.is_spent(squares) else squares
    return _standard(transform, recurrence.norms[0], recurrence.alpha[0], spread)


def _standard(transform: Transform, n: float, mean: float, spread: float) -> dict[Any, Any]:
    """State of center() or scale() from rows, mean and squared deviations."""
    # center() is scale() without its second half; both keep their state in the form of formulaic's scale.
    options = {"center": True, "scale": transform.function == "scale", "ddof": 1.0} | dict(transform.options)
    # Without centering, scale() divides by the root of the mean square about zero.
    squares = spread if options["center"] else spread + n * mean**2
    rest = n - float(str(options["ddof"]))
    if options["scale"] and not (squares > 0.0 and rest > 0.0):
        raise DesignError(
            f"{transform.text!r}: the column is constant over the complete rows of all sites, or ddof leaves "
            "no rows. Leave the term out."
        )
    return {
        "ddof": options["ddof"],
        "center": mean if options["center"] else None,
        "scale": float(np.sqrt(squares / rest)) if options["scale"] else None,
    }


def _grow(
    transform: Transform, squares: float, moment: float, recurrence: Recurrence
) -> dict[Any, Any] | None:
    """Add a degree to a polynomial."""
    if recurrence.is_spent(squares):
        raise DesignError(
            f"{transform.text!r}: the column has too few distinct values over all sites for a polynomial "
            f"of degree {recurrence.degree}. Lower the degree."
        )
    if not recurrence.add(squares, moment):
        return None
    return {"alpha": dict(enumerate(recurrence.alpha)), "norms2": dict(enumerate(recurrence.norms))}


def _degree(transform: Transform) -> int:
    """Degree of the recurrence that a transform needs; center() and scale() have no such option."""
    return int(dict(transform.options).get("degree", 1))  # type: ignore[arg-type]


def _inner(transform: Transform) -> set[str]:
    """Texts of the stateful transforms inside one."""
    inside = iter_transforms(transform.operand)
    return {t.text for t in inside if t.function in STATE_KEYS and not dict(t.options).get("raw")}


def _written(transform: Transform) -> dict[Any, Any]:
    state = written_state(transform)
    if state is None:
        raise FormulaError(
            f"formula: {transform.text!r} needs knots=..., lower_bound=... and upper_bound=..., and no df, "
            "where sites hold different rows: quantiles and extremes of all rows are values of single rows",
            remedy=Remedy(
                "quantiles(partition, {column!r}, bounds={{{column!r}: (low, high)}})",
                "fs.{call} releases rounded quantiles as knots; the bounds are public knowledge",
            ).filled(column=next(iter_columns(transform))),
        )
    return state
