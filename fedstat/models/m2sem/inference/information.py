"""Observed information of a mixture over sites: own blocks from home, cross-blocks by secure products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation, Side
from fedstat.kernels.ring import fractional_bits
from fedstat.typing import Floats, Ints

SCORES = "scores"


@dataclass(frozen=True, slots=True, eq=False)
class ClientInformation:
    """What a site released of its d coordinates, the first `crossing` of which it multiplied with others'.

    `own` (d, d), `with_shares` (K, d), `jacobian` (s, d) of its statements, with effects of covariates at the
    end, `communalities` of its columns.
    """

    own: Floats
    with_shares: Floats
    jacobian: Floats
    communalities: Floats
    crossing: int


@dataclass(frozen=True, slots=True, eq=False)
class ObservedInformation:
    """Inverse (p, p) of the information of K - 1 shares and all institutions' coordinates, in their order.

    `jacobians` (s, d) are those of each institution's statements, `communalities` (sum of P,) of its columns.
    `problem` says why there is no inverse.
    """

    cov: Floats
    clusters: int
    jacobians: Mapping[str, Floats]
    communalities: Mapping[str, Floats]
    problem: str = ""

    @classmethod
    def none(cls, clusters: int, problem: str) -> ObservedInformation:
        """Return what stands where nothing is known, and why."""
        return cls(np.zeros((0, 0)), clusters, {}, {}, problem)

    @property
    def available(self) -> bool:
        """Whether there are standard errors."""
        return not self.problem

    def of_client(self, client: str) -> Floats:
        """Covariance (s, s) of an institution's statements."""
        at = self.clusters - 1
        for name, jacobian in self.jacobians.items():
            d = jacobian.shape[1]
            if name == client:
                return np.asarray(jacobian @ self.cov[at : at + d, at : at + d] @ jacobian.T)
            at += d
        raise KeyError(client)

    def of_effects(self, client: str, rows: int) -> Floats:
        """Covariance (t, t) of an institution's effects of covariates, its last so many statements."""
        first = len(self.jacobians[client]) - rows
        return self.of_client(client)[first:, first:]

    def of_shares(self) -> Floats:
        """Covariance (K, K) of the shares of the clusters."""
        free = self.clusters - 1
        J = np.vstack([np.eye(free), -np.ones((1, free))])
        return np.asarray(J @ self.cov[:free, :free] @ J.T)


def ask_information(
    asking: Conversation,
    slot: int,
    r: Floats,
    w: Floats,
    place: Mapping[str, Ints],
) -> Rounds[ObservedInformation]:
    """Ask all institutions, who have entities at `place`, and multiply the scores of every two.

    Posteriors r (N, K) and shares w (K,) are those at the present parameters.
    """
    clients = tuple(place)
    K = len(w)
    replies = yield [asking.ask(client, "open_scores", slot=np.array(slot)) for client in clients]
    parts = {
        reply.site: ClientInformation(
            reply.arrays["own"],
            reply.arrays["with_shares"],
            reply.arrays["jacobian"],
            reply.arrays["communalities"],
            int(reply.arrays["crossing"]),
        )
        for reply in replies
    }
    sides = sides_of(parts, place, len(r), K)
    pairs = [(a, b) for a, b in combinations(sides, 2) if len(np.intersect1d(place[a.site], place[b.site]))]
    if problem := too_few(parts, place, pairs):
        return ObservedInformation.none(K, problem)
    made = yield from asking.multiply(pairs, clients, 1, len(r) * K, fractional_bits(len(r) * K), "scores ")
    crossed = {(one.a.site, one.b.site): one.products[0] for one in made}
    return invert(assemble(r, w, parts, crossed), K, parts)


def too_few(
    parts: Mapping[str, ClientInformation], place: Mapping[str, Ints], pairs: Sequence[tuple[Side, Side]]
) -> str:
    """Say who has too few entities for so many scores; empty where nobody has."""
    for client, part in parts.items():
        if len(place[client]) < 2 * part.crossing:
            return _few(f"'{client}' has", len(place[client]), part.crossing)
    for a, b in pairs:
        common = len(np.intersect1d(place[a.site], place[b.site]))
        if common < 2 * (a.width + b.width):
            return _few(f"'{a.site}' and '{b.site}' share", common, a.width + b.width)
    return ""


def _few(who: str, entities: int, columns: int) -> str:
    return (
        f"{who} {entities:,} entities, and sums of products of {columns} scores need {2 * columns:,}: with "
        "fewer they would tell of single entities. Select columns, take fewer factors, or use bootstrap()"
    )


def sides_of(parts: Mapping[str, ClientInformation], place: Mapping[str, Ints], n: int, K: int) -> list[Side]:
    """Name the columns that institutions multiply: of every entity one row for each cluster."""
    sides, start = [], 0
    for client, part in parts.items():
        q = part.crossing
        if not q:
            continue
        rows = np.concatenate([k * n + place[client] for k in range(K)])
        sides.append(Side(client, SCORES, slice(start, start + q), rows, np.zeros(len(rows), dtype=np.int64)))
        start += q
    return sides


def assemble(
    r: Floats,
    w: Floats,
    parts: Mapping[str, ClientInformation],
    crossed: Mapping[tuple[str, str], Floats],
) -> Floats:
    """Put the information of shares w_1 ... w_(K-1) and of all coordinates together."""
    K = len(w)
    sizes = [K - 1, *(len(part.own) for part in parts.values())]
    ends = np.cumsum(sizes)
    first = dict(zip(parts, ends[:-1].tolist(), strict=True))
    info = np.zeros((int(ends[-1]), int(ends[-1])))
    # Scores of w_k are 1 / w_k in cluster k and -1 / w_K in the last.
    a = np.vstack([np.diag(1.0 / w[:-1]), np.full((1, K - 1), -1.0 / w[-1])])
    mean = r @ a
    info[: K - 1, : K - 1] = mean.T @ mean
    for client, part in parts.items():
        at = slice(first[client], first[client] + len(part.own))
        info[at, at] = part.own
        info[: K - 1, at] = -a.T @ part.with_shares
        info[at, : K - 1] = info[: K - 1, at].T
    for (one, other), product in crossed.items():
        at = slice(first[one], first[one] + product.shape[0])
        to = slice(first[other], first[other] + product.shape[1])
        info[at, to], info[to, at] = -product, -product.T
    return info


def invert(info: Floats, clusters: int, parts: Mapping[str, ClientInformation]) -> ObservedInformation:
    """Invert the information, or say why it has no inverse."""
    jacobians = {client: part.jacobian for client, part in parts.items()}
    shared = {client: part.communalities for client, part in parts.items()}
    diagonal = np.diag(info)
    scale = np.where(diagonal > 0.0, diagonal, 1.0) ** -0.5
    values, vectors = np.linalg.eigh(info * np.outer(scale, scale))
    if not (diagonal > 0.0).all() or values[0] <= len(info) * np.finfo(np.float64).eps * values[-1]:
        return ObservedInformation(
            np.zeros((0, 0)),
            clusters,
            jacobians,
            shared,
            "the observed information is not positive definite: the fit has not reached a maximum, or a "
            "cluster or an error's variance is at its bound",
        )
    half = scale[:, None] * vectors / np.sqrt(values)
    return ObservedInformation(half @ half.T, clusters, jacobians, shared)
