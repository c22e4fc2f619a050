"""One institution's block during a fit: its standardised rows, and the sums that stay fixed.

Notation of Tang, Wang, Feng and Li (TWFL): an institution k holds x_i^k in R^{p_k} for n_k of n entities,
beta_k, mu_k and Sigma_k. Columns are standardised at their institution once; the maximum likelihood estimate
moves along with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design.by_columns import block_of
from fedstat.federation.door.facts import GivenWeights
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, check_lengths, check_room
from fedstat.federation.rounds.product_steps import check_positions
from fedstat.kernels.rows import column_sums, gram
from fedstat.models.vertical.exchange.staged import StagedBlock, standardise_block
from fedstat.models.vertical.exchange.steps import KEEP
from fedstat.models.vertical.moments import COLLINEAR
from fedstat.typing import Array, Bools, Floats, Ints

ITEM = "vfem"
"""The one item of a fit that an institution keeps: what goes back after a refusal goes back as a whole."""
MOST_STEPS_KEPT = 100
OWN_PART = 1e-4
"""Entry of a vector of length one above which its column takes part in a collinearity."""


@dataclass(frozen=True, slots=True)
class Theta:
    """One institution's parameters: beta (p,), mu (p,), Sigma (p, p), of standardised columns."""

    beta: Floats
    mu: Floats
    Sigma: Floats


@dataclass(frozen=True, slots=True)
class EvaluatedPoint:
    """A point at which the likelihood was evaluated, its M-step, and the direction of beta."""

    at: Theta
    image: Theta
    direction: Floats
    move: Floats


@dataclass(slots=True)
class Client:
    """One institution's block during a fit.

    Its standardised columns X (n_k, p) of the entities it has, at positions `rows` among the n of the fit,
    ascending; `shift` and `scale` (p,) are their means and standard deviations in the units of the data.
    `padded`: values per entity go out for all n entities, zero where the institution lacks them. `table_rows`
    (n_k,) are the rows of the site's table, -1 for those that are filled in with their mean.
    """

    X: Floats
    rows: Ints
    n: int
    shift: Floats
    scale: Floats
    s1: Floats
    S2: Floats
    log_det: float
    memory: int
    padded: bool = False
    omega: float = 1.0
    eta: float = 0.0
    current: Theta | None = None
    z: Floats = field(default_factory=lambda: np.empty(0))
    points: list[Theta] = field(default_factory=list)
    evaluated: list[EvaluatedPoint | None] = field(default_factory=list)
    base: EvaluatedPoint | None = None
    previous: tuple[list[Theta], list[EvaluatedPoint | None]] = field(default_factory=lambda: ([], []))
    root: Floats | None = None
    s2_reference: float = 1.0
    staged: dict[str, Array] = field(default_factory=dict)
    table_rows: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def block(self) -> Client:
        """Itself: other algorithms keep a block within an item of their own."""
        return self

    @property
    def held(self) -> Bools:
        """Which rows are its own: others are filled in, and hide nothing."""
        return np.asarray(self.table_rows >= 0)

    @property
    def n_seen(self) -> int:
        """Entities whose block counts as seen."""
        return len(self.X)

    @property
    def estimate(self) -> Theta:
        """The point that was evaluated last."""
        assert self.current is not None
        return self.current

    def first_point(self, beta: Floats | None = None) -> Theta:
        """Coefficients of standardised columns, zero by default, beside the block's own moments."""
        mean = self.s1 / self.n_seen
        first = np.zeros_like(mean) if beta is None else beta
        return Theta(first, mean, self.S2 / self.n_seen - np.outer(mean, mean))

    def weights(self, values: Floats, what: str) -> GivenWeights:
        """Tell of weights of its own rows, (rows,): those of rows that are filled in hide nothing."""
        return GivenWeights(values[self.held], what)

    def pad(self, values: Floats) -> Floats:
        """Values of the institution's entities, (n_k,), as they go out: (n_k,), or padded (n,)."""
        if not self.padded:
            return values
        out = np.zeros(self.n)
        out[self.rows] = values
        return out


def client_of(state: State) -> Client:
    """Return this fit's institution, or say that the fit was not started here."""
    return state.use(ITEM, Client, "this fit was not started here; ask 'start' first").block


OPENING: Mapping[str, Declared] = {
    "keep": KEEP,
    "rows": Declared("presence", "positions of its entities among those of the fit", dtype="int64"),
    "n": Declared("control", "number of entities", 0),
    "filled": Declared("control", "whether missing blocks count as their mean", 0),
}
"""What an institution is told of a fit: which rows of its block take part, and where they stand."""


def stage_client(
    data: SiteData, state: State, keep: Bools, rows: Ints, n: int, filled: bool, memory: int
) -> Client:
    """Standardise the rows of a fit, `keep` (n_seen,) of the opened block, at positions `rows` (n_k,) of n.

    `filled`: the entities that the institution does not have are mean-imputed (the "impute" baseline), and it
    counts as having them all.
    """
    check_lengths(data.name, rows=(rows, int(np.count_nonzero(keep))))
    check_positions(data.name, rows, n)
    check_room(data.name, n, n)
    if not 0 <= memory <= MOST_STEPS_KEPT:
        raise MessageError(f"{data.name}: expected at most {MOST_STEPS_KEPT} steps to remember")
    staged = standardise_block(data, state, keep, rows if filled else None, n)
    check_collinear(data.name, block_of(state).spec.names, staged.X, len(rows))
    client = summarise(staged, np.arange(n) if filled else rows, n, memory)
    # Filled in, the block has as many rows as the fit; what it rests on are the institution's own.
    state.keep(ITEM, client, len(rows))
    return client


def summarise(staged: StagedBlock, rows: Ints, n: int, memory: int) -> Client:
    """Compute the sums that stay fixed during a fit."""
    X = staged.X
    ones = np.ones(len(X))
    s1, S2 = column_sums(X, ones), gram(X, ones)
    S = S2 / len(X) - np.outer(s1, s1) / len(X) ** 2
    log_det = float(np.linalg.slogdet(S)[1])
    return Client(
        X=X,
        rows=rows,
        n=n,
        shift=staged.shift,
        scale=staged.scale,
        s1=s1,
        S2=S2,
        log_det=log_det,
        memory=memory,
        table_rows=staged.table_rows,
    )


def check_collinear(name: str, columns: tuple[str, ...], X: Floats, n_own: int) -> None:
    """Refuse, by an EstimationError that names columns, a block whose covariance is singular on its rows."""
    eigenvalues, vectors = np.linalg.eigh(gram(X, np.ones(len(X))) / n_own)
    if eigenvalues[0] < COLLINEAR * eigenvalues[-1]:
        names = [c for c, v in zip(columns, vectors[:, 0], strict=True) if abs(v) > OWN_PART]
        raise EstimationError(
            f"{name}: collinear among the {n_own} entities of this fit: {', '.join(names)}; drop one of them"
        )
