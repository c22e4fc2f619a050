"""Training of a split network: batches, routing of predictions, and checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from fedstat.codec import from_json, from_plain, to_json, to_plain
from fedstat.errors import MessageError, ModelError
from fedstat.federation.message import Reply, Request, pack, unpack
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.split_networks import (
    MAX_LISTED,
    draw_subset_per_row,
    draw_subset_per_size,
    subsets_within,
)
from fedstat.models.laser.joint_representation import DistillationRequest, decompose
from fedstat.models.laser.request import NetworksRequest, OutcomeReply, OutcomeRequest
from fedstat.models.laser.scoring import ScoreCounts, read_scores
from fedstat.models.laser.steps import input_units
from fedstat.models.laser.training import (
    NetworkAssembly,
    TrainingFit,
    TrainingOptions,
    moved,
    table_of_weights,
)
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# A training that was interrupted, in a file: it continues exactly where it stopped.

FORMAT = "fedstat laser training 1"


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """A training after an epoch.

    `history`, `best` and `keep` are those of the training; `random` is the state of the random numbers, in
    JSON, `networks` and `heads` are the output of :meth:`Networks.state`, and `settings` is a digest of
    everything that affects the training.
    """

    history: Floats
    best: int
    keep: bool
    random: str
    networks: Mapping[str, Floats]
    heads: Floats
    settings: str


def settings_digest(*settings: Any) -> str:
    """Digest of everything that affects a training."""
    plain = [one.tolist() if isinstance(one, np.ndarray) else str(one) for one in settings]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def write_training(path: Path, state: TrainingState) -> None:
    """Write the state; the former file is replaced once the new file is complete."""
    arrays: dict[str, Any] = {}
    content = json.dumps(to_plain(state, arrays))
    complete = path.with_name(path.name + ".new")
    complete.write_bytes(pack({"format": FORMAT, "content": content}, arrays))
    complete.replace(path)


def read_training(path: Path, settings: str) -> TrainingState | None:
    """Read the state of a training with these settings; None without a file.

    Raises
    ------
    ModelError
        The file is not one of a training, or is one with other settings.
    """
    if not path.exists():
        return None
    try:
        header, arrays = unpack(path.read_bytes())
        if header.get("format") != FORMAT:
            raise MessageError("another format")
        content = json.loads(header["content"])
        state: TrainingState = from_plain(TrainingState, content, "its content", ModelError, arrays=arrays)
    except (MessageError, LookupError, ValueError) as error:
        raise ModelError(f"checkpoint: {path.name} is not a file of a training; name another") from error
    if state.settings != settings:
        raise ModelError(
            f"checkpoint: {path.name} belongs to a training with other data or arguments; name another "
            "file, or delete it to start again"
        )
    return state


# ----------------------------------------------------------------------------------------------------
# Which networks serve which predictions of a batch, and how outputs are combined for the holder.


@dataclass(slots=True, eq=False)
class PredictionRouting:
    """Which networks serve which predictions of a batch; see the holder's step for the arrays.

    `sets` (b,) are the sites that are requested for each entity if outputs are masked; None: all that have
    it. `group` numbers the sets `judged` for the predictions, if it matters. `rows` are positions in the
    batch of the entities of each site's reply.
    """

    assembly: NetworkAssembly
    code: Ints
    weights: Floats
    members: Bools
    sizes: Ints
    head: Ints
    sets: Ints | None = None
    group: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    judged: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rows: dict[str, Ints] = field(default_factory=dict)

    @classmethod
    def clear(
        cls, seen: Sequence[int], code: Ints, drawn: Sequence[Mapping[int, float]], assembly: NetworkAssembly
    ) -> PredictionRouting:
        """Serve all sets of each pattern from the same outputs."""
        weights, members = table_of_weights(assembly, seen, drawn), assembly.members
        used = weights[np.unique(code)].any(axis=0)
        members = members[used]
        sizes = members.sum(axis=1).astype(np.int64)
        return cls(assembly, code, weights[:, used], members, sizes, assembly.head_of[used])

    @classmethod
    def judging(cls, seen: Sequence[int], code: Ints, assembly: NetworkAssembly) -> PredictionRouting:
        """Let every set within a pattern predict for its entities; `group` has the set of each prediction."""
        within = {s for one in seen for s in subsets_within(one)} if len(seen) else set()
        judged = [s for s in sorted(within) if assembly.predicting(s)]
        pairs = [(g, t) for g, s in enumerate(judged) for t in assembly.predicting(s)]
        tasks, group = [t for _, t in pairs], np.array([g for g, _ in pairs], dtype=np.int64)
        members = assembly.members[tasks]
        weights = np.array([[float(judged[g] & one == judged[g]) for g, _ in pairs] for one in seen])
        sizes = members.sum(axis=1).astype(np.int64)
        sets = np.array(judged, dtype=np.int64)
        return cls(assembly, code, weights, members, sizes, assembly.head_of[tasks], group=group, judged=sets)

    @classmethod
    def masked(cls, sets: Ints, weights: Floats, assembly: NetworkAssembly) -> PredictionRouting:
        """Serve one set per entity, with its weight, from a sum; `group` has the set of each prediction."""
        (of_sets, at_set), (of_weights, at_weight) = (
            np.unique(one, return_inverse=True) for one in (sets, weights)
        )
        kinds, chosen = np.unique(at_set * len(of_weights) + at_weight, return_inverse=True)
        of_set, of_weight = np.divmod(kinds, len(of_weights))
        pairs = list(zip(of_sets[of_set].tolist(), of_weights[of_weight].tolist(), strict=True))
        judged = sorted({s for s, _ in pairs if assembly.of_set(s)})
        tasks = [(g, s, t) for g, (s, _) in enumerate(pairs) for t in assembly.of_set(s)]
        table = np.zeros((len(pairs), len(tasks)))
        for place, (g, s, _) in enumerate(tasks):
            table[g, place] = pairs[g][1] / len(assembly.of_set(s))
        return cls(
            assembly,
            chosen.astype(np.int64),
            table,
            np.ones((len(tasks), 1), dtype=np.bool_),
            np.array([s.bit_count() for _, s, _ in tasks], dtype=np.int64),
            assembly.head_of[[t for _, _, t in tasks]],
            sets,
            np.array([judged.index(s) for _, s, _ in tasks], dtype=np.int64),
            np.array(judged, dtype=np.int64),
        )

    def part(self, site: int, kept: Ints, entities: Ints) -> Bools:
        """Return the entities for which a site receives a request, (b,)."""
        if self.sets is not None:
            return np.asarray(self.sets >> site & 1, dtype=np.bool_)
        return np.isin(entities, kept)

    def collect(self, replies: Sequence[Reply], batch: int, width: int) -> Floats:
        """Combine the replies of the sites."""
        if self.sets is not None:
            return np.asarray(np.sum([reply.arrays["outputs"] for reply in replies], axis=0))[None]
        out = np.zeros((len(self.assembly.networks), batch, width))
        for k, reply in enumerate(replies):
            for place, i in enumerate(self.assembly.at(k)):
                part = slice(place * width, (place + 1) * width)
                out[i, self.rows[reply.site]] = reply.arrays["outputs"][:, part]
        return out


# ----------------------------------------------------------------------------------------------------
# Training of a split network: for each batch one round to the sites and one to the holder.

OF_HEADS = 2**32
"""Number of the random parameters of heads, distinct from those of sites."""
DISTIL_EPOCHS, DISTIL_BATCH = 50, 128
"""Limit for what a site learns alone, which takes no rounds."""


@dataclass(slots=True, eq=False)
class Trainer:
    """State of one training.

    `sets` (G,) are the sites of each missing pattern, as bits; `pending` are gradients by site that have not
    been sent yet. Random draws do not depend on the order of the sites: `rank` (K,) has the position of each
    by its name, `named` the site at each position, and `turns` the patterns in this order. `distilled` are
    networks that learned `joint` columns.
    """

    layout: Layout
    assembly: NetworkAssembly
    laser: bool
    training: TrainingOptions
    outcome: OutcomeRequest
    product_session: SecureProductSession
    rng: np.random.Generator
    progress: Callable[[int, float, float], None]
    checkpoint: Path | None = None
    sets: list[int] = field(init=False)
    rank: list[int] = field(init=False)
    named: list[int] = field(init=False)
    turns: list[int] = field(init=False)
    distilled: dict[str, Floats] = field(default_factory=dict)
    joint: int = 0
    pending: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sets = [sum(1 << k for k in np.flatnonzero(~row).tolist()) for row in self.layout.missing]
        self.named = np.argsort(self.layout.sites).tolist()
        self.rank = np.argsort(self.named).tolist()
        self.turns = sorted(range(len(self.sets)), key=lambda g: moved(self.sets[g], self.rank))

    # ---- start and end -------------------------------------------------------------------------

    def run(self) -> FitProtocol[TrainingFit]:
        """Train from start to end."""
        before = None if self.checkpoint is None else read_training(self.checkpoint, self.settings)
        units, reported, moments = yield from self._begin(before)
        history: list[tuple[float, float]] = []
        best, keep = 0, False
        if before is not None:
            self.rng.bit_generator.state = json.loads(before.random)
            history = [(loss, ahead) for loss, ahead in before.history.tolist()]
            best, keep = before.best, before.keep
        for epoch in range(len(history), self.training.epochs):
            loss = yield from self._epoch(keep)
            ahead = yield from self._held_back()
            history.append((loss, ahead))
            keep = bool(np.isfinite(ahead) and ahead <= min(row[1] for row in history))
            best = epoch if keep or not np.isfinite(ahead) else best
            self.progress(epoch, loss, ahead)
            if self.checkpoint is not None:
                yield from self._save(self.checkpoint, np.array(history), best, keep)
        # If the last validation is the best one, the present networks.
        earlier = best < self.training.epochs - 1
        requests = [
            self._request(k, "release_networks", best=earlier, **self._gradient(k)) for k in self.layout.sites
        ]
        *networks, heads = yield [*requests, self._request(self.layout.active, "release_heads", best=earlier)]
        scores = yield from self._calibrate()
        names = self.layout.sites
        return TrainingFit(
            {k: r.arrays["parameters"] for k, r in zip(names, networks, strict=True)},
            heads.arrays["parameters"],
            {k: unit[0] for k, unit in zip(names, units, strict=True)},
            {k: unit[1] for k, unit in zip(names, units, strict=True)},
            {k: unit[2] > 0.0 for k, unit in zip(names, units, strict=True)},
            reported,
            moments[0],
            moments[1],
            np.array(history),
            best,
            scores,
            self.distilled,
            self.joint,
        )

    def _save(self, path: Path, history: Floats, best: int, keep: bool) -> FitProtocol[None]:
        """Write the state from which the training would continue."""
        sites = self.layout.sites
        *networks, heads = yield [
            *[self._request(k, "release_training", **self._gradient(k)) for k in sites],
            self._request(self.layout.active, "release_training_of_heads"),
        ]
        states = {k: reply.arrays["training"] for k, reply in zip(sites, networks, strict=True)}
        random = json.dumps(self.rng.bit_generator.state)
        held = TrainingState(history, best, keep, random, states, heads.arrays["training"], self.settings)
        write_training(path, held)

    @property
    def settings(self) -> str:
        """Digest of everything that affects the training: entities, sites, columns, and all arguments."""
        t, layout = self.training, self.layout
        # Another model has other names for the same modules.
        t = replace(t, modules=dict.fromkeys(t.modules, ""))
        shapes = (t, self.outcome, layout.names, self.assembly)
        return settings_digest(t.entities, t.validation, layout.code, *shapes)

    def _begin(
        self, before: TrainingState | None
    ) -> FitProtocol[tuple[list[Floats], OutcomeReply, list[float]]]:
        layout, t = self.layout, self.training
        replies = yield [
            *[self._request(k, "stage_block", keep=layout.keep[k]) for k in layout.sites],
            self._request(layout.active, "stage_outcome", to_json(self.outcome), keep=layout.response_keep),
        ]
        reported = from_json(OutcomeReply, replies[-1].text, f"{layout.active}: its reply about the response")
        if t.transfer:
            yield from self._transfer()
        requests = []
        for number, k in enumerate(layout.sites):
            request = self._networks(k, len(self.assembly.at(number)), t.width)
            again: dict[str, Any] = {} if before is None else {"training": before.networks[k]}
            requests.append(self._request(k, "start_networks", to_json(request), **again))
        heads = NetworksRequest(self.assembly.heads, t.head_hidden, t.width, t.optimizer, t.seed, OF_HEADS)
        again = {} if before is None else {"training": before.heads}
        started = yield [*requests, self._request(layout.active, "start_heads", to_json(heads), **again)]
        units = [
            input_units(reply.arrays["units"], first.arrays.get("tails"), t.raw)
            for reply, first in zip(replies[:-1], started[:-1], strict=True)
        ]
        return units, reported, replies[-1].arrays["moments"].tolist()

    def _networks(self, site: str, count: int, width: int) -> NetworksRequest:
        t = self.training
        # By its name: the order in which a partition lists its sites does not matter.
        number = crc32(site.encode())
        return NetworksRequest(
            count, t.hidden, width, t.optimizer, t.seed, number, t.raw, t.compress, t.modules.get(site, "")
        )

    def _transfer(self) -> FitProtocol[None]:
        """Let every site learn, from its own columns, the joint representation of entities that all have."""
        layout, t = self.layout, self.training
        found = yield from decompose(layout, t.entities, t.width, self.product_session)
        self.joint = found.vectors.shape[1]
        requests = []
        for k in layout.sites:
            rows = np.searchsorted(layout.kept[k], found.entities)
            request = DistillationRequest(self._networks(k, 1, self.joint), DISTIL_EPOCHS, DISTIL_BATCH)
            requests.append(self._request(k, "distil", to_json(request), rows=rows, target=found.vectors))
        replies = yield requests
        self.distilled = {
            k: reply.arrays["parameters"] for k, reply in zip(layout.sites, replies, strict=True)
        }

    # ---- batches -------------------------------------------------------------------------------

    def _epoch(self, keep: bool) -> FitProtocol[float]:
        """Iterate once over the entities; return the mean loss."""
        total, rows = 0.0, 0
        for batch in self._batches():
            loss = yield from self._batch(batch, keep)
            total, rows, keep = total + loss * len(batch), rows + len(batch), False
        return total / max(rows, 1)

    def _batches(self) -> Iterator[Ints]:
        order = self.rng.permutation(self.training.entities)
        parts = -(-len(order) // self.training.batch_size)
        return iter(np.array_split(order, parts))

    def _batch(self, entities: Ints, keep: bool) -> FitProtocol[float]:
        """Learn from one batch; return its loss."""
        serving = self._serve(entities)
        outputs = yield from self._outputs("train", entities, serving, keep=keep)
        (reply,) = yield [self._holder("learn", entities, outputs, serving, keep=keep)]
        self._hand_over(reply, serving)
        return float(reply.arrays.get("loss", np.array(np.nan)))

    def _held_back(self) -> FitProtocol[float]:
        """Loss of the validation entities, each with all sites that have it; nan without any."""
        entities = self.training.validation
        if not len(entities):
            return float("nan")
        serving = self._serve_all(entities, [{s: 1.0} for s in self.sets] if self.laser else self._all_sets())
        outputs = yield from self._outputs("look", entities, serving)
        (reply,) = yield [self._holder("judge", entities, outputs, serving)]
        return float(reply.arrays["loss"])

    def _calibrate(self) -> FitProtocol[ScoreCounts | None]:
        """Evaluate the predictions of each set of sites for entities that were not used for training."""
        entities, t = self.training.calibration, self.training
        if not len(entities):
            return None
        code = self.layout.code[entities]
        if t.masked:
            # One set per entity here as well: differences of several sums for one entity reveal their parts.
            sets = self._spread(code)
            serving = PredictionRouting.masked(sets, np.sign(sets).astype(np.float64), self.assembly)
        else:
            serving = PredictionRouting.judging(self.sets, code, self.assembly)
        outputs = yield from self._outputs("look", entities, serving)
        more = {"group": serving.group, "vote": t.vote}
        (reply,) = yield [self._holder("calibrate", entities, outputs, serving, **more)]
        return read_scores(reply, serving.judged)

    def _spread(self, code: Ints) -> Ints:
        """Give each entity one of the sets that predict for its pattern, in about equal numbers.

        0 for none.
        """
        out = np.zeros_like(code)
        for g in self.turns:
            sets = [s for s in subsets_within(self.sets[g]) if self.assembly.of_set(s)]
            sets.sort(key=lambda s: moved(s, self.rank))
            at = self.rng.permutation(np.flatnonzero(code == g))
            if sets:
                out[at] = np.array(sets)[np.arange(len(at)) % len(sets)]
        return out

    def _serve(self, entities: Ints) -> PredictionRouting:
        """Select the sets for which each entity of a batch is used in training."""
        if self.training.masked and self.laser:
            # One set per entity, since a masked sum is over one: it represents all sets of its pattern.
            ranked = np.array([moved(s, self.rank) for s in self.sets])[self.layout.code[entities]]
            drawn, weights = draw_subset_per_row(ranked, self.rng.integers)
            own, place = np.unique(drawn, return_inverse=True)
            sets = np.array([moved(s, self.named) for s in own.tolist()])[place]
            return PredictionRouting.masked(sets, weights, self.assembly)
        return self._serve_all(entities, self._all_sets())

    def _serve_all(self, entities: Ints, drawn: Sequence[Mapping[int, float]]) -> PredictionRouting:
        """Predict each entity over the sets of its pattern; masked outputs have one set in each."""
        code = self.layout.code[entities]
        if self.training.masked:
            sets, weights = (
                np.array(one)[code] for one in zip(*[next(iter(d.items())) for d in drawn], strict=True)
            )
            return PredictionRouting.masked(sets, weights, self.assembly)
        return PredictionRouting.clear(self.sets, code, drawn, self.assembly)

    def _all_sets(self) -> list[dict[int, float]]:
        drawn = {g: self._sets(self.sets[g]) for g in self.turns}
        return [drawn[g] for g in range(len(self.sets))]

    def _draw(self, n: int) -> int:
        return int(self.rng.integers(n))

    def _sets(self, seen: int) -> dict[int, float]:
        """Select sets of one pattern with their weights: all, or one of each size if there are many."""
        if self.laser and seen.bit_count() > MAX_LISTED:
            drawn = draw_subset_per_size(moved(seen, self.rank), self._draw)
            return {moved(s, self.named): weight for s, weight in drawn.items()}
        if not self.laser and len(self.assembly.tasks) == 1:
            return {seen: 1.0}
        return dict.fromkeys(subsets_within(seen), 1.0)

    # ---- requests ------------------------------------------------------------------------------

    def _request(self, site: str, step: str, text: str = "", **arrays: Any) -> Request:
        return self.product_session.request(site, step, text, **arrays)

    def _gradient(self, site: str) -> dict[str, Any]:
        pending = self.pending.pop(site, None)
        return {} if pending is None else {"gradient": pending}

    def _outputs(
        self, step: str, entities: Ints, serving: PredictionRouting, **more: Any
    ) -> FitProtocol[Floats]:
        """Obtain the outputs of all networks for a batch, (I, b, d), or their masked sum, (1, b, d)."""
        layout, masked, requests = self.layout, self.training.masked, []
        for k, site in enumerate(layout.sites):
            serving.rows[site] = at = np.flatnonzero(serving.part(k, layout.kept[site], entities))
            rows = np.searchsorted(layout.kept[site], entities[at]).astype(np.int64)
            placed: dict[str, Any] = {"at": at, "batch": len(entities) * masked}
            requests.append(self._request(site, step, rows=rows, **placed, **more, **self._gradient(site)))
        replies = yield requests
        return serving.collect(replies, len(entities), self.training.width)

    def _holder(
        self, step: str, entities: Ints, outputs: Floats, serving: PredictionRouting, **more: Any
    ) -> Request:
        arrays: dict[str, Any] = {
            "outputs": outputs,
            "rows": entities,
            "code": serving.code,
            "weights": serving.weights,
            "members": serving.members,
            "sizes": serving.sizes,
            "head": serving.head,
        }
        return self._request(self.layout.active, step, **arrays, **more)

    def _hand_over(self, reply: Reply, serving: PredictionRouting) -> None:
        """Keep the gradients for the next requests to the sites."""
        gradient = reply.arrays["gradient"]
        for k, site in enumerate(self.layout.sites):
            at = serving.rows[site]
            if len(at):
                own = [0] if self.training.masked else self.assembly.at(k)
                self.pending[site] = np.hstack([gradient[i][at] for i in own])
