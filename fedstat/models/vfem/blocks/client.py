"""One institution's block during a fit: its standardised rows, and the sums that stay fixed.

Notation of Tang, Wang, Feng and Li (TWFL): a client k holds x_i^k in R^{p_k} for n_k of n entities,
beta_k, mu_k and Sigma_k. Columns are standardised at their institution once; the maximum likelihood estimate
moves along with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design.by_columns import block_of
from fedstat.federation.door.facts import GivenWeights, GroupSums
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import check_lengths
from fedstat.kernels.rows import column_sums, gram
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Theta:
    """One client's parameters: beta (p,), mu (p,), Sigma (p, p), of standardised columns."""

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

    Parameters
    ----------
    X : (n_k, p) array
        Standardised columns of the entities it has.
    rows : (n_k,) array of int
        Positions of those entities among the n of the fit, ascending.
    n : int
        Entities of the fit.
    shift, scale : (p,) arrays
        Mean and standard deviation of the columns, in the units of the data.
    padded : bool
        Whether values per entity go out for all n entities, zero where the client lacks them.
    held : (rows,) array of bool
        Which rows are its own; others are filled in with their mean, and hide nothing.
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
    held: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    @property
    def n_seen(self) -> int:
        """Entities whose block counts as seen."""
        return len(self.X)

    def weights(self, values: Floats, what: str) -> GivenWeights:
        """Tell of weights of its own rows, (rows,): those of rows that are filled in hide nothing."""
        return GivenWeights(values[self.held], what)

    def groups(self, code: Ints, columns: int, weights: Floats | None = None) -> GroupSums:
        """Tell of products of so many columns by group, (rows,): rows that are filled in do not count."""
        return GroupSums(np.where(self.held, code, -1), columns, weights=weights)

    def pad(self, values: Floats) -> Floats:
        """Values of the client's entities, (n_k,), as they go out: (n_k,), or padded (n,)."""
        if not self.padded:
            return values
        out = np.zeros(self.n)
        out[self.rows] = values
        return out


def client_of(data: SiteData, state: State) -> Client:
    """Return this fit's client, or say that the fit was not started here."""
    if "vfem" not in state:
        raise EstimationError(f"{data.name}: this fit was not started here; ask 'start' first")
    client: Client = state.use("vfem")
    return client


def stage_client(
    data: SiteData, state: State, keep: Bools, rows: Ints, n: int, filled: bool, memory: int
) -> Client:
    """Standardise the block's rows of a fit, and keep them; arguments as for :func:`start`."""
    block = block_of(data, state)
    check_lengths(data.name, keep=(keep, len(block.X)), rows=(rows, int(np.count_nonzero(keep))))
    if len(rows) and (rows[0] < 0 or rows[-1] >= n or (np.diff(rows) <= 0).any()):
        raise MessageError(f"{data.name}: array 'rows' must ascend from 0 to below {n}")
    X = np.ascontiguousarray(block.X[keep])
    n_own = len(X)
    if n_own < 2:
        raise EstimationError(
            f"{data.name}: {n_own} of the entities of this fit have its block; two are the least"
        )
    shift, scale = X.mean(axis=0), X.std(axis=0)
    X -= shift
    check_spread(data.name, block.spec.names, X, shift, scale)
    X /= scale
    held = np.ones(n_own, dtype=np.bool_)
    if filled:
        held = np.isin(np.arange(n), rows)
        X, rows = fill_with_mean(X, rows, n)
    client = summarise(X, rows, n, shift, scale, memory)
    client.held = held
    state.keep("vfem", client, n_own)
    return client


def fill_with_mean(X: Floats, rows: Ints, n: int) -> tuple[Floats, Ints]:
    """Give every entity that the client lacks the mean, which is zero after standardising."""
    filled = np.zeros((n, X.shape[1]))
    filled[rows] = X
    return filled, np.arange(n)


def summarise(X: Floats, rows: Ints, n: int, shift: Floats, scale: Floats, memory: int) -> Client:
    """Compute the sums that stay fixed during a fit."""
    ones = np.ones(len(X))
    s1, S2 = column_sums(X, ones), gram(X, ones)
    S = S2 / len(X) - np.outer(s1, s1) / len(X) ** 2
    return Client(X, rows, n, shift, scale, s1, S2, float(np.linalg.slogdet(S)[1]), memory)


def check_spread(name: str, columns: tuple[str, ...], centred: Floats, shift: Floats, scale: Floats) -> None:
    """Refuse a block whose covariance is singular on the entities of this fit.

    Raises
    ------
    EstimationError
        Names the columns.
    """
    flat = scale <= 1e-12 * np.maximum(1.0, np.abs(shift))
    if flat.any():
        names = [c for c, bad in zip(columns, flat, strict=True) if bad]
        raise EstimationError(
            f"{name}: constant among the {len(centred)} entities of this fit: {', '.join(names)}; drop them"
        )
    correlation = gram(centred / scale, np.ones(len(centred))) / len(centred)
    eigenvalues, vectors = np.linalg.eigh(correlation)
    if eigenvalues[0] < 1e-10 * eigenvalues[-1]:
        names = [c for c, v in zip(columns, vectors[:, 0], strict=True) if abs(v) > 1e-4]
        raise EstimationError(
            f"{name}: collinear among the {len(centred)} entities of this fit: {', '.join(names)}; "
            "drop one of them"
        )
