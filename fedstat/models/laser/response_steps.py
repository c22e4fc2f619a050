"""Steps of the response holder: heads, losses, and gradients for the sites."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import DesignError, MessageError, Remedy
from fedstat.federation import message
from fedstat.federation.audit.event_log import AnswerRecord
from fedstat.federation.crypto.keys import keystream
from fedstat.federation.design.vertical_design import response_of
from fedstat.federation.disclosure.facts import EntityCount, LevelRowCounts, RowGroups, SummedColumns
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.kernels.split_networks import count_parameters, heads_loss
from fedstat.models.laser.networks import ADAM, Networks, diverged, flip_matrix, of_scores
from fedstat.models.laser.request import FAMILY, NetworksRequest, OutcomeReply, OutcomeRequest
from fedstat.typing import Array, Bools, Floats, Ints

ITEM = "laser heads"
MOST_CLASSES = 1000


@dataclass(slots=True)
class OutcomeState:
    """The response during a fit: (n,), numbers of `classes`, or standardized if there are none.

    `flip` has the probabilities with which its labels were randomized, `weights` (classes,) those in the
    loss.
    """

    y: Floats
    classes: tuple[float, ...]
    mean: float
    sd: float
    flip: Floats | None = None
    weights: Floats | None = None


@dataclass(slots=True)
class Heads:
    """Heads in training; `seen` and `best` as those of a site's networks."""

    networks: Networks
    seen: Floats | None = None
    best: Floats | None = None


def outcome_of(state: State) -> OutcomeState:
    """Return this fit's response, or report that it is not here."""
    absent = "this fit has no response here; ask 'stage_outcome' first"
    return state.use("laser outcome", OutcomeState, absent)


def heads_of(state: State) -> Heads:
    """Return this fit's heads, or report that the fit was not started here."""
    return state.use(ITEM, Heads, "this fit was not started here; ask 'start_heads' first")


# The full response is reported as weights: the derivatives of each entity are a function of it.
BATCH: Mapping[str, message.ArrayDeclaration] = {
    "outputs": message.per_entity("outputs of the sites' networks", 3, dtype="float64", weighs=""),
    "rows": message.presence("which entities are in the batch", dtype="int64"),
    "code": message.presence("sites that have each entity, by number of the pattern", dtype="int64"),
    "weights": message.control("weight of every prediction by pattern", 2, dtype="float64"),
    "members": message.control("networks behind each prediction", 2, dtype="bool"),
    "sizes": message.control("number of networks behind each prediction", dtype="int64"),
    "head": message.control("head of each prediction", dtype="int64"),
}
TRAINING = message.aggregate(
    "state of the training: parameters and moments of Adam", 2, dtype="float64", behind=(EntityCount,)
)
MEAN_LOSS = message.aggregate("mean loss of a batch", 0, behind=(EntityCount,))


@step(
    FAMILY,
    takes={"keep": message.presence("which of the entities take part", dtype="bool")},
    releases={
        "moments": message.aggregate(
            "mean and standard deviation of the response", behind=(EntityCount, RowGroups)
        )
    },
    request=OutcomeRequest,
    requests=message.control("kind of the response"),
    replies=message.schema("classes of the response and their counts", behind=(EntityCount,)),
)
def stage_outcome(
    data: SiteData, state: State, request: OutcomeRequest, keep: Bools
) -> tuple[dict[str, Array], str]:
    """Select the entities of a fit, and report the response's classes, or its mean and deviation (2,)."""
    opened = response_of(state)
    message.check_lengths(data.name, keep=(keep, len(opened)))
    y = np.ascontiguousarray(opened[keep], dtype=np.float64)
    state.report(EntityCount(len(y)), RowGroups("", np.where(keep, 0, -1), np.arange(len(keep))))
    if request.kind == "normal":
        state.report(SummedColumns(y[:, None]))
        mean, sd = float(y.mean()), float(y.std())
        if not sd > 0.0:
            raise DesignError(
                f"{data.name}: response '{request.response}' is constant among the {len(y):,} entities of "
                "this fit; choose entities with other values"
            )
        state.keep("laser outcome", OutcomeState((y - mean) / sd, (), mean, sd), len(y))
        return {"moments": np.array([mean, sd])}, to_json(OutcomeReply((), ()))
    classes, code, counts = np.unique(y, return_inverse=True, return_counts=True)
    if len(classes) < 2 or len(classes) > (2 if request.kind == "binary" else MOST_CLASSES):
        one = "networks learn nothing from one class; choose entities with others"
        more, most = "a binary one has two", f"classes are 2 to {MOST_CLASSES}"
        other = "multiclass" if 2 < len(classes) <= MOST_CLASSES else "normal"
        remedy = Remedy("from_formula(..., outcome={other!r}).fit(...)", "use {arguments}").filled(
            other=other
        )
        raise DesignError(
            f"{data.name}: response '{request.response}' has {len(classes):,} "
            f"{'value' if len(classes) == 1 else 'values'} among the {len(y):,} entities of this fit; "
            + (one if len(classes) < 2 else more if request.kind == "binary" else most),
            remedy=remedy if len(classes) > 2 else None,
        )
    labels, flip, total = code.astype(np.float64), None, 0.0
    if request.label_epsilon:
        flip = flip_matrix(len(classes), request.label_epsilon)
        draws, total = label_draws(data, opened, request.label_epsilon)
        labels = randomized(labels, flip, draws[keep])
        counts = np.bincount(labels.astype(np.int64), minlength=len(classes))
    state.report(LevelRowCounts(request.response, counts.tolist()))
    weights = len(labels) / (len(classes) * np.maximum(counts, 1)) if request.balanced else None
    staged = OutcomeState(labels, tuple(classes.tolist()), 0.0, 1.0, flip, weights)
    state.keep("laser outcome", staged, len(y))
    reported = OutcomeReply(staged.classes, tuple(counts.tolist()), total)
    return {"moments": np.array([0.0, 1.0])}, to_json(reported)


@step(
    FAMILY,
    "stage_outcome stage_block start_networks distil deal_product",
    takes={"training": replace(TRAINING, optional=True, behind=())},
    request=NetworksRequest,
    requests=message.control("layers, training and seed"),
)
def start_heads(
    data: SiteData, state: State, request: NetworksRequest, training: Floats | None = None
) -> dict[str, Array]:
    """Draw the parameters of the heads, or continue a `training`; nothing is released."""
    outcome = outcome_of(state)
    widths = (request.width, *request.hidden, max(len(outcome.classes), 1))
    message.check_allocation(data.name, ADAM * request.count * count_parameters(widths), len(outcome.y))
    heads = Heads(Networks.draw(widths, request.count, request.optimizer, (request.seed, request.number)))
    if training is not None:
        heads.best, heads.seen = heads.networks.restore(training), heads.networks.theta.copy()
    state.keep(ITEM, heads, len(outcome.y))
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Outputs of networks (I, b, d) for rows of the response (b,), and the tasks that they serve.

    `code` (b,) is the pattern of each row, `weights` (G, T) those of tasks by pattern. The input of head
    `head` (T,) in task t is the sum of the networks in `members` (T, I), divided by `sizes`.
    """

    outputs: Floats
    rows: Ints
    code: Ints
    weights: Floats
    members: Bools
    sizes: Ints
    head: Ints

    def check(self, name: str, outcome: OutcomeState, heads: Networks) -> None:
        """Require parts that match: compiled loops do not check their bounds."""
        networks, b, d = self.outputs.shape
        tasks = len(self.head)
        fits = self.members.shape == (tasks, networks) and d == heads.widths[0] and b > 0 and tasks > 0
        fits = fits and self.weights.ndim == 2 and self.weights.shape[1] == tasks and len(self.weights) > 0
        if not fits or (self.weights < 0.0).any() or not (self.sizes > 0).all():
            raise MessageError(f"{name}: outputs of networks and tasks that do not fit together")
        message.check_lengths(name, rows=(self.rows, b), code=(self.code, b), sizes=(self.sizes, tasks))
        for what, at, most in (
            ("rows", self.rows, len(outcome.y)),
            ("code", self.code, len(self.weights)),
            ("head", self.head, len(heads.theta)),
        ):
            if not 0 <= at.min() <= at.max() < most:
                raise MessageError(f"{name}: array '{what}' names something that does not exist")


def task_predictions(batch: Batch, outcome: OutcomeState, heads: Networks, task: int) -> Floats:
    """Probabilities (b, classes), or means (b, 1), of one task of a batch."""
    mean = batch.outputs[batch.members[task]].sum(axis=0).T / batch.sizes[task]
    F = heads.output(heads.activate(int(batch.head[task]), np.ascontiguousarray(mean)))
    return of_scores(F, len(outcome.classes))


def average(predictions: Sequence[Floats], vote: bool) -> Floats:
    """Average predictions (n, classes), or count the votes for the most probable classes."""
    if vote and predictions[0].shape[1] > 1:
        classes = np.eye(predictions[0].shape[1])
        return np.asarray(np.mean([classes[P.argmax(axis=1)] for P in predictions], axis=0))
    return np.asarray(np.mean(predictions, axis=0))


def run_heads(batch: Batch, outcome: OutcomeState, heads: Networks) -> tuple[float, Floats, Floats]:
    """Return the mean loss of a batch, its derivatives by outputs (I, b, d), and by parameters of heads."""
    y = outcome.y[batch.rows]
    own = np.full(len(y), 1.0 / len(y))
    if outcome.weights is not None:
        own *= outcome.weights[y.astype(np.int64)]
    flip = np.empty((0, 0)) if outcome.flip is None else outcome.flip
    sets = batch.members, batch.sizes, batch.head, batch.weights, batch.code
    R = batch.outputs.transpose(0, 2, 1)
    total, of_heads, back = heads_loss(heads.theta, heads.widths, R, *sets, own, y, flip)
    return total, back.transpose(0, 2, 1), of_heads


def read_batch(
    data: SiteData, state: State, arrays: Mapping[str, Array]
) -> tuple[Batch, OutcomeState, Heads]:
    """Read the arrays of a batch, and check them against the response and the heads of this fit."""
    outcome, heads, batch = outcome_of(state), heads_of(state), Batch(**arrays)
    batch.check(data.name, outcome, heads.networks)
    return batch, outcome, heads


@step(
    FAMILY,
    "release_training_of_heads release_training start_heads start_networks train learn judge look",
    takes={**BATCH, "keep": message.control("whether the latest look was the best", 0)},
    releases={
        "gradient": message.per_entity("derivatives of the loss by the networks' outputs", 3),
        "loss": replace(MEAN_LOSS, optional=True),
    },
)
def learn(data: SiteData, state: State, keep: Array, **arrays: Array) -> dict[str, Array]:
    """Learn from a batch; release its mean loss, and derivatives by the outputs of networks (I, b, d)."""
    batch, outcome, heads = read_batch(data, state, arrays)
    if bool(keep):
        heads.best = heads.seen
    loss, gradient, of_heads = run_heads(batch, outcome, heads.networks)
    for number in np.flatnonzero(of_heads.any(axis=1)).tolist():
        heads.networks.learn(number, of_heads[number])
    if not np.isfinite(loss):
        raise diverged(data.name, "losses", heads.networks)
    reported = {"gradient": np.ascontiguousarray(gradient)}
    if len(batch.rows) < data.min_count:  # the loss of so few entities nearly reveals that of each
        return reported
    state.report(EntityCount(len(batch.rows)))
    return {**reported, "loss": np.array(loss)}


@step(FAMILY, "learn judge look train", takes=BATCH, releases={"loss": MEAN_LOSS})
def judge(data: SiteData, state: State, **arrays: Array) -> dict[str, Array]:
    """Mean loss of validation entities, which are not used for training."""
    batch, outcome, heads = read_batch(data, state, arrays)
    heads.seen = heads.networks.theta.copy()
    state.report(EntityCount(len(batch.rows)))
    return {"loss": np.array(run_heads(batch, outcome, heads.networks)[0])}


@step(FAMILY, "learn judge release_training look train", releases={"training": TRAINING})
def release_training_of_heads(data: SiteData, state: State) -> dict[str, Array]:
    """Release the state from which the training continues."""
    heads = heads_of(state)
    state.report(EntityCount(len(outcome_of(state).y)))
    return {"training": heads.networks.state(heads.best)}


@step(
    FAMILY,
    "release_training release_training_of_heads learn judge release_networks look train",
    takes={"best": message.control("whether the heads of the best look are taken", 0)},
    releases={"parameters": message.aggregate("parameters of the heads", 2, behind=(EntityCount,))},
)
def release_heads(data: SiteData, state: State, best: Array) -> dict[str, Array]:
    """Release the parameters (H, q) of the heads, the present ones or the `best` in validation."""
    heads = heads_of(state)
    theta = heads.best if bool(best) else heads.networks.theta
    if theta is None:
        raise MessageError(f"{data.name}: no heads of a validation were kept")
    heads.networks.theta = theta
    state.report(EntityCount(len(outcome_of(state).y)))
    return {"parameters": theta}


@dataclass(frozen=True, slots=True)
class RandomizedLabels(AnswerRecord):
    """Labels that were released by a randomized response: its epsilon, and the digest of its key."""

    epsilon: float
    digest: str


def label_draws(data: SiteData, response: Floats, epsilon: float) -> tuple[Floats, float]:
    """Uniform draws (rows,) of a randomized response, and the total epsilon of all of these so far.

    The same response at the same epsilon has the same draws, so that fits of it can be repeated. Any other
    has its own draws and its own cost.
    """
    digest = hashlib.sha256(np.ascontiguousarray(response).tobytes()).hexdigest()
    key = hmac.digest(data.trust.identity.secret("labels"), f"{epsilon!r} {digest}".encode(), "sha256")
    data.site_ledger.remember(RandomizedLabels(epsilon, hashlib.sha256(key).hexdigest()))
    total = math.fsum(one.epsilon for one in data.site_ledger.records(RandomizedLabels))
    words = keystream(key, bytes(12), len(response))
    return np.asarray((words.view(np.uint64) >> np.uint64(11)) * 2.0**-53), total


def randomized(labels: Floats, flip: Floats, draws: Floats) -> Floats:
    """Labels after randomized response, from uniform draws (n,)."""
    cumulated = flip[labels.astype(np.int64)].cumsum(axis=1)
    return np.asarray((draws[:, None] > cumulated[:, :-1]).sum(axis=1), dtype=np.float64)
