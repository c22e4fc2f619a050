"""A likelihood over the rows of a site: what a family writes, and what it gets for it.

A family whose likelihood is a sum over rows, or over risk sets of rows, is a class of the kind
:class:`Objective`. :func:`fedstat.models.rows.steps.enter_steps` makes the steps of a site from it, and
:class:`fedstat.models.rows.newton.LikelihoodNewton` maximizes it over all sites.

The parameters of an objective are those of the site's own columns, which the site standardized by its own
means and deviations. :meth:`Objective.place` takes the parameters of a request to them.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, translation
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.facts import RowTerms
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, aggregate, check_lengths, control
from fedstat.kernels.categories import moved
from fedstat.kernels.clusters import Margins, cluster_products
from fedstat.models.horizontal.rows import NO_MEANS
from fedstat.models.rows.newton import maximize_own
from fedstat.typing import Array, Bools, Floats, Ints

Declarations: TypeAlias = Mapping[str, ArrayDeclaration]
Facts: TypeAlias = tuple[facts.ScoreAndInformation | facts.WorkingWeights, ...]
ZERO = 1e-9
"""Standard deviations from zero within which a value counts as zero."""


def own_part(
    what: str, ndim: int = 1, behind: tuple[type, ...] = OPEN_ROWS, *, optional: bool = False
) -> ArrayDeclaration:
    """Declare an array of a site's own fit."""
    return aggregate(f"site's own fit: {what}", ndim, behind=(*behind, facts.OwnFit), optional=optional)


@dataclass(frozen=True, slots=True, eq=False)
class SiteSums:
    """Log-likelihood, score (q,) and information (q, q) of the rows of a site, by its own parameters.

    `spread` (k, 2) has sum and sum of squares of each vector of weights, where the sums are known without a
    look at the rows; `flat` returns whether means are at the ends of their range.
    """

    loglik: float
    score: Floats
    information: Floats
    spread: Floats | None = None
    flat: Callable[[], bool] | None = None

    @property
    def finite(self) -> bool:
        """Whether the likelihood is defined at these parameters."""
        return bool(np.isfinite(self.loglik) and np.isfinite(self.information).all())


class Place(NamedTuple):
    """Parameters of a site (q,), and the matrix (q, q) that takes those of the request to them."""

    own: Floats
    to_own: Floats


@dataclass(frozen=True, slots=True, eq=False)
class RowsWithWeights(facts.RowBlock):
    """A part of the rows, for the check of what sums at several points single out."""

    weights: Callable[[Any], Floats]
    X: Floats
    rows: slice
    further: Floats | None = None
    """Columns other than those of the design on which the weights depend, (n, l)."""
    single: int = 0
    """The first of the weights, which columns alone are multiplied with, and no products of them."""

    @property
    def columns(self) -> Floats:
        """Columns of the design, and a constant."""
        return self.X[self.rows]

    @property
    def levels(self) -> Floats:
        """Further columns on which the weights depend."""
        return self.X[self.rows, :0] if self.further is None else self.further[self.rows]

    def terms(self, point: Any) -> list[facts.RowTerms]:
        """Terms of the sums at a point."""
        X, weights = self.columns, self.vectors((point,))
        one, other = weights[:, : self.single], weights[:, self.single :]
        return [facts.alone(X, one), facts.RowTerms(X, other, X)]

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Weights of the rows at points, (m, k)."""
        return np.column_stack([self.weights(point) for point in points])[self.rows]

    def every(self, first: int, step: int) -> RowsWithWeights:
        """Return every n-th row, from the first on."""
        return replace(self, rows=slice(first, None, step))


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """Columns of clusters, if there are any."""

    clusters: tuple[str, ...] = ()


class FitRows(ABC):
    """The rows of one fit at a site, which it can also fit alone.

    Attributes
    ----------
    family : str
        Name of the family, and of the rows in the state of a session.
    request_type : type
        What the coordinator sends with the step ``start``; `requests` declares it.
    starts, own_fit : mapping of str to ArrayDeclaration
        What ``start`` and ``fit_alone`` release.
    """

    family: ClassVar[str]
    request_type: ClassVar[Any]
    requests: ClassVar[ArrayDeclaration]
    starts: ClassVar[Declarations]
    own_fit: ClassVar[Declarations]
    opened: OpenRows

    @classmethod
    @abstractmethod
    def begin(cls, data: SiteData, state: State, request: Any) -> tuple[Self, dict[str, Array]]:
        """Check and sort the rows of a fit, and return what ``start`` releases."""

    @property
    def variant(self) -> object:
        """What distinguishes the model from others of the same family and question, as a plain value."""
        return ""

    @property
    @abstractmethod
    def own_numbers(self) -> int:
        """Distinct numbers in the fit of the site's rows alone."""

    @property
    def own_weighted(self) -> facts.ScoreAndInformation | None:
        """Sums of the own fit with weights that depend on coefficients; None if it has none."""
        return None

    @property
    @abstractmethod
    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the arrays of the site's own fit."""

    @abstractmethod
    def fit_own(self) -> tuple[dict[str, Array], str]:
        """Fit the site's rows alone: its arrays, and what prevented a fit or ''."""

    @abstractmethod
    def terms(self, own: Floats) -> Mapping[str, Sequence[RowTerms]]:
        """Return the terms of the sums at the site's own parameters, by the names of the sums."""

    @property
    def data(self) -> SiteData:
        """The site's data."""
        return self.opened.data

    @property
    def key(self) -> str:
        """Digest of the model and of the rows that it is fitted on."""
        text = json.dumps([self.opened.question.to_json(), self.family, self.variant])
        return hashlib.sha256(text.encode() + self.opened.used.tobytes()).hexdigest()[:16]

    @property
    def column_sums(self) -> facts.ColumnSums:
        """Functions of columns whose products the fit of these rows would reveal."""
        return self.opened.question.column_sums(self.opened.used, True, self.key)

    def codes(self, names: Sequence[str]) -> Ints:
        """Return the number of each row's combination of values of columns, (n,)."""
        if not names:
            raise MessageError(f"{self.data.name}: the model named no columns of groups")
        frame = pd.concat([rows.frame[list(names)] for rows, _ in self.opened.chunks()])
        return np.asarray(frame.groupby(list(names), sort=True).ngroup(), dtype=np.int64)

    def shared_columns(self, code: Ints) -> Ints:
        """Count the clusters of two rows or more in which both of two columns are nonzero, (p, p)."""
        several, scale = np.bincount(code) >= 2, self.opened.scale
        there, at = np.zeros((len(several), len(scale)), dtype=np.bool_), 0
        for _, X in self.opened.chunks():
            nonzero = np.abs(self.opened.in_units(X)) > ZERO * scale
            here, at = code[at : at + len(X)], at + len(X)
            for k in range(len(scale)):
                there[here[nonzero[:, k]], k] = True
        within = there[several].astype(np.float64)
        return np.asarray(within.T @ within, dtype=np.int64)


class Objective(FitRows):
    """A log-likelihood over the rows of one fit at a site.

    A family gives the arrays of a point, its sums by a kernel, and the terms of which these are made: the
    checks of a release follow from the terms, and a test compares them with the sums of the kernel.

    Attributes
    ----------
    clusters : tuple of str
        Columns of clusters that the request names.
    point : mapping of str to ArrayDeclaration
        Arrays that name parameters.
    what : mapping of str to str
        What the sums are, for the ledger: ``score``, ``information`` and ``loglik``.
    meat : ArrayDeclaration
        Which products of scores are requested: of rows, of clusters, and of the site where it has a third
        value.
    extra : mapping of str to ArrayDeclaration
        What :meth:`at_estimate` releases.
    unbounded : str
        The problem of the site's own fit where the likelihood has no maximum.
    """

    point: ClassVar[Declarations]
    what: ClassVar[Mapping[str, str]]
    request_type: ClassVar[Any] = ClusterRequest
    requests: ClassVar[ArrayDeclaration] = control("columns of clusters", common=True)
    meat: ClassVar[ArrayDeclaration]
    meats: ClassVar[int] = 2
    extra: ClassVar[Declarations] = {}
    unbounded: ClassVar[str]
    request: Any
    n: int
    """Rows behind the sums."""

    @property
    def clusters(self) -> tuple[str, ...]:
        """Columns of clusters."""
        found: tuple[str, ...] = self.request.clusters
        return found

    @abstractmethod
    def place(self, **point: Floats) -> Place:
        """Check the arrays of a point, and return the site's own parameters there."""

    def units(self, **point: Floats) -> Floats:
        """Return the matrix that takes parameters to those in the units of the data, (q, q)."""
        return np.eye(len(point["beta"]))

    @abstractmethod
    def sums(self, own: Floats) -> SiteSums:
        """Sum over the rows at the site's own parameters (q,)."""

    @abstractmethod
    def row_scores(self, own: Floats) -> Floats:
        """Return the score of each row, weights included, (n, q)."""

    @abstractmethod
    def residuals(self, own: Floats) -> Floats:
        """Return the weights of the rows in the score, (n, k), by which products of scores are judged."""

    def vectors(self, own: Floats) -> Floats:
        """Return the weights by which columns are multiplied in all sums at a point, (n, k)."""
        found = self.terms(own)
        return np.column_stack([one.weights for terms in found.values() for one in terms])

    def weights(self, own: Floats) -> Floats:
        """Return the absolute weights of rows that the disclosure checks judge, (k, n)."""
        return np.abs(self.vectors(own).T)

    def blocks(self) -> Iterator[facts.RowBlock]:
        """Yield the rows with the weights by which columns are multiplied, at points of :meth:`facts_at`."""
        X = np.concatenate([X for _, X in self.opened.chunks()])
        if not self.opened.question.intercept:
            X = np.column_stack([np.ones(len(X)), X])
        yield RowsWithWeights(lambda key: self.vectors(np.frombuffer(key)), X, slice(None))

    @property
    def constant_weights(self) -> bool:
        """Whether the weights of rows depend on no parameters."""
        return False

    @property
    def first(self) -> Floats:
        """Parameters (q,) at which the fit of the site's rows starts: without effects."""
        return np.zeros(len(self.known))

    @property
    def known(self) -> Bools:
        """Which parameters (q,) are of columns that vary here."""
        return self.opened.varies

    @property
    def own_columns(self) -> dict[str, Array]:
        """How the site standardized its columns, which it releases with its own fit."""
        return {"columns": self.opened.own}

    @property
    def own_weighted(self) -> facts.ScoreAndInformation | None:
        """Score and information, unless their weights do not depend on coefficients."""
        if self.constant_weights:
            return None
        key = self.key_of(self.first)
        return facts.ScoreAndInformation(self.opened, self.n, key, self.blocks, among=self.opened.places)

    @property
    def own_numbers(self) -> int:
        """Parameters and information, and means and deviations of all columns but the constant."""
        q = len(self.known)
        return q * (q + 3) // 2 + 2 * (len(self.opened.scale) - 1)

    @property
    def row_weight(self) -> Floats | None:
        """Weights of the rows (n,) if these are numbers of rows."""
        if not self.opened.question.counts_rows:
            return None
        return np.concatenate([rows.weight for rows, _ in self.opened.chunks()])

    @abstractmethod
    def cluster_information(self, own: Floats, code: Ints, part: slice) -> Floats:
        """Return the information of each of a range of clusters, (g, q, q); rows of code -1 are in none."""

    def cluster_scores(self, own: Floats, code: Ints, count: int) -> Floats:
        """Return the score of each cluster, (count, q)."""
        return np.array([np.bincount(code, column, count) for column in self.row_scores(own).T]).T

    def margins(self, own: Floats, code: Ints, to_own: Floats) -> Margins | None:
        """Return the leverages of clusters in parameters beyond these, if there are any."""
        return None

    def lacks(self) -> str:
        """Return why the site's rows alone have no fit, or ''."""
        return ""

    def at_estimate(self, own: Floats, code: Ints | None) -> dict[str, Array]:
        """Return what a summary needs in addition; `code` (n,) numbers clusters, if there are any."""
        return {}

    def key_of(self, own: Floats) -> Any:
        """Return what distinguishes a point, from which :meth:`blocks` makes weights."""
        return own.tobytes()

    def facts_at(self, own: Floats, sums: SiteSums, instead: Mapping[str, Array] | None = None) -> Facts:
        """Declare the weights that rows have in sums at a point; `instead` is released if few rows weigh."""
        return (
            NO_MEANS,  # if weights allow another release only
            facts.WorkingWeights(lambda: self.weights(own), sums.spread, instead, sums.flat),
            facts.ScoreAndInformation(
                self.opened, self.n, self.key_of(own), self.blocks, among=self.opened.places
            ),
        )

    def products_at(self, own: Floats) -> Iterator[facts.SummedProducts]:
        """Declare the products of the rows' scores."""
        for column in self.residuals(own).T:
            yield self.opened.products_with(column**2)

    def fit_own(self) -> tuple[dict[str, Array], str]:
        """Maximize the likelihood of the site's rows: parameters, information, columns, and a problem or ''.

        They are zero for parameters of columns that are constant here, and if there is no fit.
        """
        known = self.known
        beta, information = np.zeros(len(known)), np.zeros((len(known), len(known)))
        problem = self.lacks()
        if not problem:
            own, part, problem = self.maximized(np.where(known, self.first, 0.0), known)
        if not problem:
            beta, information[np.ix_(known, known)] = own, part
        return {"beta": beta, "information": information, **self.own_columns}, problem

    def maximized(self, start: Floats, free: Bools) -> tuple[Floats, Floats, str]:
        """Maximize the likelihood of the site's rows in the `free` parameters, from a start (q,).

        Returns all parameters, the information of those that are free, and a problem or ''.
        """
        inside = np.ix_(free, free)

        def whole(values: Floats) -> Floats:
            found = start.copy()
            found[free] = values
            return found

        def at(values: Floats) -> tuple[float, Floats, Floats]:
            now = self.sums(whole(values))
            return now.loglik, now.score[free], now.information[inside]

        found, information, problem = maximize_own(at, start[free], self.unbounded)
        return whole(found), information, problem

    @property
    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the arrays of the site's own fit."""
        q = len(self.known)
        return {"beta": (q,), "information": (q, q)} | {
            name: one.shape for name, one in self.own_columns.items()
        }


STANDARDIZED: Declarations = {
    "shift": aggregate("means of the columns over all sites", common=True),
    "scale": aggregate("standard deviations of the columns over all sites", common=True),
    "beta": aggregate("parameters of the standardized columns", common=True),
}
"""Arrays that name parameters of columns standardized over all sites."""


@dataclass(frozen=True, slots=True, eq=False)
class PredictorObjective(Objective):
    """A log-likelihood of rows that depends on the parameters by linear predictors, ``eta_j = x' M_j theta``.

    A family gives the log-likelihood of each row with two derivatives in its predictors. Where it has a fused
    kernel for the sums, :meth:`sums` calls it.
    """

    point: ClassVar[Declarations] = STANDARDIZED
    own_fit: ClassVar[Declarations] = {
        "beta": own_part("parameters"),
        "information": own_part("information", 2),
        "columns": own_part("means and standard deviations of the columns", 2),
    }
    what: ClassVar[Mapping[str, str]] = {
        "score": "score",
        "information": "observed information",
        "loglik": "log-likelihood",
    }
    meat: ClassVar[ArrayDeclaration] = control("whether to sum products of scores, and whether by cluster")
    unbounded: ClassVar[str] = "no maximum"

    opened: OpenRows
    request: Any
    n: int

    @property
    @abstractmethod
    def matrices(self) -> Floats:
        """Matrices (J, p, q) from parameters to the coefficients of each predictor."""

    @abstractmethod
    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns (m, p), log-likelihoods (m,), and derivatives (m, J), (m, J, J), part by part."""

    def coefficients(self, own: Floats) -> Floats:
        """Return the coefficients of each predictor, (J, p)."""
        return np.asarray(self.matrices @ own)

    def place(self, shift: Floats, scale: Floats, beta: Floats) -> Place:  # type: ignore[override]
        """Return parameters of the site's own columns."""
        T, M = standard_place(self.opened, shift, scale), self.matrices
        check_lengths(self.data.name, beta=(beta, M.shape[2]))
        to_own = moved(M.reshape(-1, M.shape[2]), T)
        return Place(to_own @ beta, to_own)

    def units(self, shift: Floats, scale: Floats, beta: Floats) -> Floats:  # type: ignore[override]
        """Return the matrix from parameters to those in the units of the data."""
        M = self.matrices
        T = translation(np.zeros_like(shift), np.ones_like(scale), shift, scale)
        return moved(M.reshape(-1, M.shape[2]), T)

    def columns_of(self, X: Floats) -> Sequence[Floats]:
        """Return the columns (m, q) of the parameters in each predictor, from those of rows (m, p)."""
        return [X @ M for M in self.matrices]

    def sums(self, own: Floats) -> SiteSums:
        """Add up the terms."""
        found = self.terms(own)
        loglik = sum(float(part.sum()) for _, part, _, _ in self.rows_at(own))
        score = np.sum([one.sums()[0, :, 0] for one in found["score"]], axis=0)
        return SiteSums(loglik, score, np.sum([one.sums()[0] for one in found["information"]], axis=0))

    def terms(self, own: Floats) -> Mapping[str, Sequence[RowTerms]]:
        """Return the terms of the sums: derivatives by the predictors, times products of their columns."""
        score, information = [], []
        for X, _, g, H in self.rows_at(own):
            Z, one = self.columns_of(X), np.ones((len(X), 1))
            score += [RowTerms(Z[j], g[:, j : j + 1], one) for j in range(len(Z))]
            pairs = product(range(len(Z)), repeat=2)
            information += [RowTerms(Z[j], -H[:, j, k, None], Z[k]) for j, k in pairs]
        return {"score": score, "information": information}

    def vectors(self, own: Floats) -> Floats:
        """Return the derivatives of all rows by their predictors, (n, k)."""
        j, k = np.triu_indices(len(self.matrices))
        return np.concatenate([np.column_stack([g, -H[:, j, k]]) for _, _, g, H in self.rows_at(own)])

    def row_scores(self, own: Floats) -> Floats:
        """Return the scores of the rows."""
        return np.concatenate([self._scores(X, g) for X, _, g, _ in self.rows_at(own)])

    def _scores(self, X: Floats, g: Floats) -> Floats:
        return np.asarray(sum(g[:, j, None] * Z for j, Z in enumerate(self.columns_of(X))))

    def cluster_scores(self, own: Floats, code: Ints, count: int) -> Floats:
        """Return the score of each cluster, (count, q), without those of all rows at once."""
        found, at = np.zeros((count, self.matrices.shape[2])), 0
        for X, _, g, _ in self.rows_at(own):
            np.add.at(found, code[at : at + len(X)], self._scores(X, g))
            at += len(X)
        return found

    def residuals(self, own: Floats) -> Floats:
        """Return derivatives of the rows' log-likelihoods by their predictors, (n, J)."""
        return np.concatenate([g for _, _, g, _ in self.rows_at(own)])

    def cluster_information(self, own: Floats, code: Ints, part: slice) -> Floats:
        """Return the observed information of each of a range of clusters, (g, q, q)."""
        M, at = self.matrices, 0
        found = np.zeros((part.stop - part.start, M.shape[2], M.shape[2]))
        for X, _, _, H in self.rows_at(own):
            here = code[at : at + len(X)] - part.start
            inside, at = (here >= 0) & (here < len(found)), at + len(X)
            for j, k in zip(*np.nonzero(H.any(axis=0)), strict=True):
                products = cluster_products(X[inside], -H[inside, j, k], here[inside], len(found))
                found += M[j].T @ products @ M[k]
        return found

    @property
    def known(self) -> Bools:
        """Parameters of columns that vary here: those of a site without the other columns."""
        return np.asarray((self.matrices[:, ~self.opened.varies] == 0.0).all(axis=(0, 1)))


OBJECTIVES: dict[str, type[FitRows]] = {}
"""What is fitted over rows, by the name of its family."""


def standard_place(opened: OpenRows, shift: Floats, scale: Floats) -> Floats:
    """Return the matrix from coefficients of standardized columns to those of the site's own, (p, p)."""
    p, name = len(opened.scale), opened.data.name
    check_lengths(name, shift=(shift, p), scale=(scale, p))
    if not (scale > 0.0).all():
        raise MessageError(f"{name}: array 'scale' must be positive")
    return translation(opened.shift, opened.scale, shift, scale)
