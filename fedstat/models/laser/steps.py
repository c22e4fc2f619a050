"""Steps of a split network: scores at the site with the response, and the networks of a site."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.codec import from_json
from fedstat.errors import MessageError
from fedstat.federation import message
from fedstat.federation.design.vertical_design import block_of, response_of
from fedstat.federation.disclosure.facts import EntityCount, ModelEvaluation
from fedstat.federation.disclosure.family import include, step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control, per_entity, presence, schema
from fedstat.federation.protocols.product_steps import check_positions
from fedstat.kernels.split_networks import count_parameters
from fedstat.models.laser import torch_modules
from fedstat.models.laser.networks import ADAM, Networks, diverged, evaluate
from fedstat.models.laser.request import FAMILY, NetworksRequest, OutcomeReply
from fedstat.models.laser.response_steps import (
    BATCH,
    TRAINING,
    average,
    read_batch,
    task_predictions,
)
from fedstat.models.laser.scoring import count_scores, log_odds
from fedstat.models.vertical.exchange.standardized_columns import staged_block
from fedstat.models.vertical.exchange.steps import ExchangeRules, exchange_steps
from fedstat.models.vertical.prediction.evaluation import average_in_groups
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of the site that holds the response: evaluation of predictions.


COUNTS = {
    name: aggregate(what, 2, behind=(EntityCount, ModelEvaluation))
    for name, what in {
        "bins": "entities by class and bin of the probability of their own class",
        "expected": "sums of these probabilities by class and bin",
        "confusion": "entities by class and most probable class",
        "losses": "sums of losses",
    }.items()
}


@step(
    FAMILY,
    "release_heads look calibrate",
    takes={
        **BATCH,
        "group": control("predictions that are averaged", dtype="int64"),
        "vote": control("whether they vote", 0),
    },
    releases=COUNTS,
)
def calibrate(data: SiteData, state: State, group: Ints, vote: Array, **arrays: Array) -> dict[str, Array]:
    """Evaluate trained heads on entities that were not used for training, by group (T,) of tasks.

    Predictions of the tasks of a group, which belong to one set of sites, are averaged; or each has a `vote`.
    """
    batch, outcome, heads = read_batch(data, state, arrays)
    check_lengths(data.name, group=(group, len(batch.head)))
    if not 0 <= group.min() <= group.max() < len(group):
        raise MessageError(f"{data.name}: array 'group' names something that does not exist")
    y, C = outcome.y[batch.rows], max(len(outcome.classes), 1)
    parts = []
    for g in range(int(group.max()) + 1):
        tasks = np.flatnonzero(group == g)
        found = [task_predictions(batch, outcome, heads.networks, t) for t in tasks.tolist()]
        P = average(found, bool(vote))
        served = np.where(batch.weights[batch.code][:, tasks].any(axis=1), 0, -1)
        parts.append(count_scores(P, y, len(outcome.classes), served, 1, data.min_count))
    return _reported(state, [np.concatenate(part) for part in zip(*parts, strict=True)], C)


@step(
    FAMILY,
    takes={
        "predicted": per_entity("predictions", 2, dtype="float64", weighs="predictions"),
        "use": presence("which entities are compared", dtype="bool"),
        "code": presence("sites that have each entity, by number", dtype="int64"),
        "units": control("units of the response, and number of sets", dtype="float64"),
    },
    releases=COUNTS,
    requests=schema("classes of the response"),
)
def score(
    data: SiteData, state: State, text: str, predicted: Floats, use: Bools, code: Ints, units: Floats
) -> dict[str, Array]:
    """Evaluate predictions (n, classes) against the opened response of the rows in `use`, by group.

    `text` has the classes of the fit; rows of another class, or without a response, do not count. A normal
    response is converted to the `units` of the fit: mean and standard deviation; `units[2]` is the number of
    groups. Predictions are averaged as described in :func:`averaged`.
    """
    known = from_json(OutcomeReply, text, f"{data.name}: the classes of the fit").classes
    opened, C = response_of(state), max(len(known), 1)
    check_lengths(data.name, use=(use, len(opened)))
    y = opened[use]
    check_lengths(data.name, predicted=(predicted, len(y)), code=(code, len(y)))
    if (
        predicted.shape[1] != C
        or len(units) != 3
        or not 1 <= units[2] <= max(len(y), 1)
        or not units[1] > 0.0
    ):
        raise MessageError(f"{data.name}: predictions of {predicted.shape[1]} classes, expected {C}")
    has, by = np.isfinite(y), None
    if known:
        if not ((predicted >= 0.0) & (predicted <= 1.0)).all():
            raise MessageError(f"{data.name}: expected probabilities")
        at = np.searchsorted(known, y).clip(0, C - 1)
        there, by = has & (np.array(known)[at] == y), log_odds(predicted)
        y = at.astype(np.float64)
    else:
        there = has
        y = np.where(there, (y - units[0]) / units[1], 0.0)
    # Cells use all entities with a response, because the class of an entity must not define a cell.
    predicted = average_in_groups(data, predicted, np.where(has, code, -1), by)
    code = np.where(there, code, -1)
    state.report(EntityCount(int(there.sum())))
    counts = count_scores(predicted, y, len(known), code, int(units[2]), data.min_count)
    return _reported(state, counts if known else in_one_bin(counts), C)


def in_one_bin(counts: Sequence[Floats]) -> list[Floats]:
    """Put all entities of a group into its last bin: an evaluation by squared errors needs no residuals."""
    bins, expected, *others = counts
    last = np.arange(bins.shape[2]) == bins.shape[2] - 1
    return [np.where(last, part.sum(axis=2, keepdims=True), 0.0) for part in (bins, expected)] + others


def _reported(state: State, counts: Sequence[Floats], classes: int) -> dict[str, Array]:
    """Name the arrays of counts, and report them to the disclosure check."""
    bins, expected, confusion, losses = counts
    state.report(ModelEvaluation(np.concatenate([part.ravel() for part in counts])))
    return {
        "bins": bins.reshape(len(bins) * classes, -1),
        "expected": expected.reshape(len(bins) * classes, -1),
        "confusion": confusion.reshape(len(bins) * classes, -1),
        "losses": losses,
    }


# ----------------------------------------------------------------------------------------------------
# Steps of a site of a split network: forward passes, and learning from returned gradients.
#
# A request for a batch carries the gradients of the batch before, which update the site's networks, and the
# reply has their outputs for the new one. With masks, every site replies for every entity of a batch, with
# zeros where it has no part.


NOT_STARTED = "this fit was not started here; ask 'start_networks' first"
ITEM, DISTILLED = "laser networks", "laser distilled"


@dataclass(slots=True)
class SiteTraining:
    """A site's networks in training.

    X (p, n) are its standardized columns; `activations` those of the latest batch, by network. `seen` are the
    parameters at the latest validation, `best` those of the best one.
    """

    networks: Networks
    X: Floats
    activations: list[Floats] = field(default_factory=list)
    seen: Floats | None = None
    best: Floats | None = None

    def take(self, name: str, gradient: Floats | None) -> None:
        """Learn from the gradients (b, m d) of the latest batch, whose activations are used once."""
        if gradient is None:
            return
        m, d = len(self.networks.theta), int(self.networks.widths[-1])
        rows = self.activations[0].shape[1] if self.activations else 0
        if not rows or gradient.shape != (rows, m * d):
            raise MessageError(f"{name}: gradients {gradient.shape} for a batch of {rows} rows")
        columns = np.ascontiguousarray(gradient.T)
        for i, A in enumerate(self.activations):
            D = columns[i * d : (i + 1) * d]
            # A network without a part in the loss has no gradient, and does not change.
            if D.any():
                self.networks.learn(i, self.networks.back(i, A, D))
        self.activations = []


@dataclass(frozen=True, slots=True, eq=False)
class DistilledNetwork:
    """A network of some widths, theta (1, q), whose outputs are additional inputs of the site's networks."""

    widths: Sequence[int]
    theta: Floats


# Columns with heavy tails: the standard deviation is that of a few rows, and nearly all values are the same
# number in its units. They enter as asinh((x - location) / scale), with location and scale by maximum
# likelihood of the t distribution with three degrees of freedom, by EM (Lange, Little and Taylor 1989,
# section 3): no row has much influence on these, and neither is the value of a row, as a median is.
#
# References
# ----------
# Lange, K. L., Little, R. J. A. and Taylor, J. M. G. (1989). Robust statistical modeling using the t
# distribution. Journal of the American Statistical Association 84, 881-896.

TAIL_FREEDOM, TAIL_STEPS = 3.0, 200
HEAVY = 2.0
"""Standard deviations in robust units from which a column has heavy tails; 1.1 if it is normal."""


def robust_units(X: Floats) -> Floats:
    """Locations and scales of columns with heavy tails, zeros for others: (n, p) -> (2, p)."""
    out = np.zeros((2, X.shape[1]))
    for j, x in enumerate(X.T):
        location, sd = float(np.median(x)), float(x.std())
        scale = float(np.abs(x - location).mean())
        for _ in range(TAIL_STEPS):
            if not scale > np.finfo(float).eps * sd:
                break
            weight = (TAIL_FREEDOM + 1.0) / (TAIL_FREEDOM + ((x - location) / scale) ** 2)
            before, location = scale, float(weight @ x / weight.sum())
            scale = float(np.sqrt(weight @ (x - location) ** 2 / len(x)))
            if abs(scale - before) <= 1e-8 * before:
                break
        # Nearly all values are one number if no scale is left: standard units, as for an indicator.
        if scale > 1e-6 * sd and sd > HEAVY * scale:
            out[:, j] = location, scale
    return out


def input_units(units: Floats, tails: Floats | None, raw: bool) -> Floats:
    """Shift, scale and whether a column is compressed, (3, p), from standard units and robust ones."""
    shift, scale = (np.zeros_like(units[0]), np.ones_like(units[1])) if raw else units
    robust = np.zeros_like(units) if tails is None else tails
    heavy = robust[1] > 0.0
    return np.array([np.where(heavy, robust[0], shift), np.where(heavy, robust[1], scale), heavy])


def input_columns(state: State, request: NetworksRequest) -> tuple[Floats, Floats | None]:
    """Columns (n, p) as input of networks, and the robust units of those with heavy tails, if requested."""
    staged = staged_block(state)
    X = staged.X * staged.scale + staged.shift if request.raw or request.compress else staged.X
    out = X if request.raw else staged.X
    if not request.compress:
        return out, None
    tails = robust_units(X)
    heavy = tails[1] > 0.0
    if heavy.any():
        out = out.copy()
        out[:, heavy] = np.arcsinh((X[:, heavy] - tails[0, heavy]) / tails[1, heavy])
    return out, tails


def with_distilled(X: Floats, widths: Sequence[int], theta: Floats) -> Floats:
    """Append the outputs of a network to its columns."""
    return np.hstack([X, evaluate(theta, widths, X)[:, 0]])


def _site(state: State) -> SiteTraining:
    return state.use(ITEM, SiteTraining, NOT_STARTED)


ROWS = message.presence("which of the site's entities are in the batch", dtype="int64")
AT = message.presence("their positions in a masked batch", dtype="int64")
BATCH_ROWS = message.control("rows of a masked batch", 0)
GRADIENT = message.per_entity(
    "derivatives of the loss by the networks' outputs", 2, optional=True, dtype="float64", weighs="gradients"
)
OUTPUTS = message.per_entity("outputs of the site's networks", 2, maskable=True)
BEST = message.control("whether the networks of the best look are taken", 0)


@step(
    FAMILY,
    "stage_block stage_outcome start_heads distil",
    takes={"training": replace(TRAINING, optional=True, behind=())},
    releases={
        "tails": message.aggregate(
            "robust locations and scales of columns with heavy tails", 2, optional=True, behind=(EntityCount,)
        )
    },
    request=NetworksRequest,
    requests=message.control("layers, training and seed"),
)
def start_networks(
    data: SiteData, state: State, request: NetworksRequest, training: Floats | None = None
) -> dict[str, Array]:
    """Draw the parameters of the site's networks, or continue a `training`.

    Released with `compress`: ``tails`` (2, p), zeros for columns without heavy tails.
    """
    X, tails = input_columns(state, request)
    if DISTILLED in state:
        learned = state.use(DISTILLED, DistilledNetwork, NOT_STARTED)
        X = with_distilled(X, learned.widths, learned.theta)
    widths = (X.shape[1], *request.hidden, request.width)
    message.check_allocation(data.name, ADAM * request.count * count_parameters(widths), X.size)
    if request.module:
        networks: Networks = torch_modules.ModuleNetworks.of(
            request.module, X.shape[1], request.width, request.optimizer
        )
    else:
        networks = Networks.draw(widths, request.count, request.optimizer, (request.seed, request.number))
    site = SiteTraining(networks, np.ascontiguousarray(X.T))
    if training is not None:
        site.best, site.seen = networks.restore(training), networks.theta.copy()
    state.keep(ITEM, site, X.shape[0])
    if tails is None:
        return {}
    state.report(EntityCount(len(X)))
    return {"tails": tails}


@step(
    FAMILY,
    "start_networks start_heads train look learn judge release_training release_training_of_heads",
    takes={
        "rows": ROWS,
        "at": AT,
        "batch": BATCH_ROWS,
        "keep": message.control("whether the latest look was the best", 0),
        "gradient": GRADIENT,
    },
    releases={"outputs": OUTPUTS},
)
def train(
    data: SiteData,
    state: State,
    rows: Ints,
    at: Ints,
    batch: Array,
    keep: Array,
    gradient: Floats | None = None,
) -> dict[str, Array]:
    """Learn from the batch before, and release the outputs for the next: ``outputs`` (b, m d).

    `rows` (b_k,) of the block are in the batch; with masks they are `at` these positions of its `batch` rows,
    which is otherwise 0. `keep` states that the latest validation is the best so far.
    """
    site = _site(state)
    site.take(data.name, gradient)
    if bool(keep):
        site.best = site.seen
    site.activations, outputs = _run(data, site, rows)
    return {"outputs": _pad(data, outputs, at, int(batch))}


@step(
    FAMILY,
    "train learn judge look release_networks release_heads",
    takes={"rows": ROWS, "at": AT, "batch": BATCH_ROWS, "gradient": GRADIENT},
    releases={"outputs": OUTPUTS},
)
def look(
    data: SiteData, state: State, rows: Ints, at: Ints, batch: Array, gradient: Floats | None = None
) -> dict[str, Array]:
    """Release the outputs for entities that are not used for training; see :func:`train`."""
    site = _site(state)
    site.take(data.name, gradient)
    site.seen = site.networks.theta.copy()
    return {"outputs": _pad(data, _run(data, site, rows)[1], at, int(batch))}


def _run(data: SiteData, site: SiteTraining, rows: Ints) -> tuple[list[Floats], Floats]:
    """Activations by network on some rows of the block, and the outputs side by side."""
    networks, n = site.networks, site.X.shape[1]
    m, d = len(networks.theta), int(networks.widths[-1])
    message.check_allocation(data.name, len(rows) * m * int(networks.widths.sum()), site.X.size)
    if len(rows) == 0:
        return [], np.zeros((0, m * d))
    if not 0 <= rows.min() <= rows.max() < n:
        raise MessageError(f"{data.name}: expected rows of its block, 0 to {n - 1}")
    X = np.ascontiguousarray(site.X[:, rows])
    activations = [networks.activate(i, X) for i in range(m)]
    outputs = np.hstack([networks.output(A).T for A in activations])
    if not np.isfinite(outputs).all():
        raise diverged(data.name, "outputs of the networks", networks)
    return activations, outputs


def _pad(data: SiteData, outputs: Floats, at: Ints, batch: int) -> Floats:
    """Place outputs at their positions in a batch; unchanged if it has none."""
    if batch == 0:
        return outputs
    message.check_allocation(data.name, batch * outputs.shape[1], data.table.n_rows * outputs.shape[1])
    message.check_lengths(data.name, at=(at, len(outputs)))
    if len(at):
        check_positions(data.name, at, batch)
    padded = np.zeros((batch, outputs.shape[1]))
    padded[at] = outputs
    return padded


@step(FAMILY, "train look learn judge", takes={"gradient": GRADIENT}, releases={"training": TRAINING})
def release_training(data: SiteData, state: State, gradient: Floats | None = None) -> dict[str, Array]:
    """Release the state from which the training continues, after the batch before."""
    site = _site(state)
    site.take(data.name, gradient)
    state.report(EntityCount(site.X.shape[1]))
    return {"training": site.networks.state(site.best)}


@step(
    FAMILY,
    "release_training release_training_of_heads release_heads look train learn judge",
    takes={"best": BEST, "gradient": GRADIENT},
    releases={"parameters": message.aggregate("parameters of the networks", 2, behind=(EntityCount,))},
)
def release_networks(
    data: SiteData, state: State, best: Array, gradient: Floats | None = None
) -> dict[str, Array]:
    """Release the parameters (m, q) of the site's networks, the present ones or the `best` in validation."""
    site = _site(state)
    site.take(data.name, gradient)
    theta = site.best if bool(best) else site.networks.theta
    if theta is None:
        raise MessageError(f"{data.name}: no networks of a validation were kept")
    site.networks.theta = theta
    state.report(EntityCount(site.X.shape[1]))
    return {"parameters": theta}


@step(
    FAMILY,
    takes={
        "parameters": message.aggregate("parameters of the networks", 2, dtype="float64"),
        "hidden": message.control("units of the hidden layers", dtype="int64"),
        "width": message.control("outputs of a network", 0),
        "shift": message.aggregate("means of the columns in the fit", dtype="float64"),
        "scale": message.aggregate("standard deviations of the columns in the fit", dtype="float64"),
        "compressed": message.control("whether a column enters as asinh of its units", dtype="bool"),
        "rows": message.presence("positions of the site's entities", dtype="int64"),
        "n": message.control("number of entities", 0),
        "distilled": message.aggregate(
            "parameters of a network for additional inputs", 2, optional=True, dtype="float64"
        ),
        "joint": message.control("outputs of that network", 0, optional=True),
        "permuted": message.control("number of a permutation of the rows", 0, optional=True),
    },
    releases={"outputs": OUTPUTS},
    requests=message.control("name of a module that replaces the networks"),
)
def represent(
    data: SiteData,
    state: State,
    text: str,
    parameters: Floats,
    hidden: Ints,
    width: Array,
    shift: Floats,
    scale: Floats,
    compressed: Bools,
    rows: Ints,
    n: Array,
    distilled: Floats | None = None,
    joint: Array | None = None,
    permuted: Array | None = None,
) -> dict[str, Array]:
    """Run trained networks, (m, q), on the opened rows: (n, m d), zeros where the site has none.

    `shift` and `scale` (p,) are those of the columns in the fit, of which the `compressed` (p,) enter as
    asinh; `rows` are the positions of the entities among `n`; `text` is the name of a module that replaces
    the networks, or empty. `distilled` (1, q) has the network whose `joint` outputs are appended to the
    columns. `permuted` is the number of a permutation of the rows.
    """
    X = block_of(state).X
    p = X.shape[1]
    message.check_lengths(
        data.name, shift=(shift, p), scale=(scale, p), compressed=(compressed, p), rows=(rows, len(X))
    )
    if not (scale > 0.0).all() or (len(rows) and not 0 <= rows.min() <= rows.max() < int(n)):
        raise MessageError(f"{data.name}: expected positive scales, and positions of its entities")
    if permuted is not None:
        X = X[secret_order(data, len(X), int(permuted))]
    Z, module = np.ascontiguousarray((X - shift) / scale), json.loads(text)
    Z[:, compressed] = np.arcsinh(Z[:, compressed])
    if distilled is not None:
        Z = with_distilled(Z, (X.shape[1], *hidden.tolist(), 0 if joint is None else int(joint)), distilled)
    if module:
        outputs = torch_modules.evaluate_module(str(module), parameters, int(width), Z)
    else:
        outputs = evaluate(parameters, (Z.shape[1], *hidden.tolist(), int(width)), Z)
    message.check_allocation(data.name, int(n) * outputs.shape[1] * outputs.shape[2], X.size)
    out = np.zeros((int(n), outputs.shape[1] * outputs.shape[2]))
    out[rows] = outputs.reshape(len(X), -1)
    return {"outputs": out}


def secret_order(data: SiteData, n: int, number: int) -> Ints:
    """Draw a permutation of n rows, the same for a number as long as the site has its keys.

    Only the site knows it. A party that knows which rows were permuted would learn differences of single
    outputs.
    """
    key = data.trust.identity.secret(f"permutation {number} of {n}")
    return np.random.default_rng(np.frombuffer(key, dtype=np.uint32)).permutation(n)


RULES = ExchangeRules(remembers=False)
EXCHANGE = exchange_steps(RULES)
include(FAMILY, {"stage_block": EXCHANGE["stage_block"]})
