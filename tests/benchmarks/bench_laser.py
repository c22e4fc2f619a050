"""Split networks: a training step and PyTorch's, and default fits with checks and ledger.

python tests/benchmarks/bench_laser.py              all; writes results/laser.md where PyTorch is installed
python tests/benchmarks/bench_laser.py step fit     some, and prints them
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import warnings
from itertools import combinations, pairwise
from pathlib import Path

from clock import Clock, in_a_process

RESULTS = Path(__file__).parent / "results" / "laser.md"
ENTITIES, CLIENTS, COLUMNS, HIDDEN, WIDTH = 24_000, 4, 5, (10, 10), 10
RATE, DECAY = 5e-3, 1e-4
SETS = [one for size in range(1, CLIENTS + 1) for one in combinations(range(CLIENTS), size)]
STEPS, REPEATS = {128: 100, 1024: 30}, 7
GOALS = {"step": {128: 25, 1024: 8}, "cpu": 4.0, "rounds": {"clear": 300, "masked": 1200}}
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
PEERS = ("PyTorch, set by set", "PyTorch, sets at once")


# ---- a step of training: four networks of 5-10-10-10, one head, all fifteen sets, Adam ------------


def ours(b):
    """Our step; returns its loss, to be called again and again."""
    import numpy as np

    from fedstat.kernels.split_networks import heads_loss
    from fedstat.models.laser.networks import Networks, Optimizer

    rng, adam = np.random.default_rng(0), Optimizer(RATE, DECAY)
    nets = [Networks.draw((COLUMNS, *HIDDEN, WIDTH), 1, adam, (0, k)) for k in range(CLIENTS)]
    heads = Networks.draw((WIDTH, 2), 1, adam, (0, CLIENTS))
    X, y = rng.normal(size=(CLIENTS, COLUMNS, b)), rng.integers(2, size=b) * 1.0
    members = np.array([[k in one for k in range(CLIENTS)] for one in SETS])
    head, code, weights = np.zeros(len(SETS), dtype=int), np.zeros(b, dtype=int), np.ones((1, len(SETS)))
    rest = (members, members.sum(axis=1), head, weights, code, np.full(b, 1.0 / b), y, np.empty((0, 0)))

    R = np.empty((CLIENTS, WIDTH, b))

    def step():
        A = [net.activate(0, x) for net, x in zip(nets, X, strict=True)]
        np.stack([a[-WIDTH:] for a in A], out=R)
        loss, of_heads, back = heads_loss(heads.theta, heads.widths, R, *rest)
        heads.learn(0, of_heads[0])
        for net, a, d in zip(nets, A, back, strict=True):
            net.learn(0, net.back(0, a, d))
        return loss

    return step


def torchs(b, at_once):
    """The same step of PyTorch's modules, in single precision: its sets one by one, or as one product."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    widths = (COLUMNS, *HIDDEN, WIDTH)

    def network():
        layers = [torch.nn.Linear(*pair) for pair in pairwise(widths)]
        return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])

    nets, head = torch.nn.ModuleList([network() for _ in range(CLIENTS)]), torch.nn.Linear(WIDTH, 2)
    adam = torch.optim.Adam([*nets.parameters(), *head.parameters()], lr=RATE, weight_decay=DECAY)
    X, y = torch.randn(CLIENTS, b, COLUMNS), torch.randint(2, (b,))
    means = torch.tensor([[(k in one) / len(one) for k in range(CLIENTS)] for one in SETS])
    loss_of = torch.nn.functional.cross_entropy

    def step():
        adam.zero_grad()
        R = [net(x) for net, x in zip(nets, X, strict=True)]
        if at_once:
            F = head(torch.einsum("sk,kbd->sbd", means, torch.stack(R)))
            loss = len(SETS) * loss_of(F.reshape(-1, 2), y.repeat(len(SETS)))
        else:
            loss = sum(loss_of(head(torch.stack([R[k] for k in one]).mean(0)), y) for one in SETS)
        loss.backward()
        adam.step()
        return float(loss.detach())

    return step


def step(b):
    """Median CPU milliseconds of a step, by method; they take turns: a busy machine is so for all."""
    b = int(b)
    steps = {"ours": ours(b)}
    if importlib.util.find_spec("torch"):
        steps |= {name: torchs(b, name == PEERS[1]) for name in PEERS}
    taken = {name: [] for name in steps}
    for call in steps.values():
        call()
    for _ in range(REPEATS):
        for name, call in steps.items():
            begun = time.process_time()
            for _ in range(STEPS[b]):
                call()
            taken[name].append(1e3 * (time.process_time() - begun) / STEPS[b])
    return {name: sorted(all_)[REPEATS // 2] for name, all_ in taken.items()}


# ---- fits ----------------------------------------------------------------------------------------


def study():
    """24,000 entities; five columns at each of four institutions, the first of which has the response."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    X = rng.normal(size=(ENTITIES, CLIENTS * COLUMNS))
    eta = X @ rng.normal(0.0, 0.3, size=X.shape[1]) + np.abs(X[:, 3]) - np.abs(X[:, 11])
    frames = {}
    for k in range(CLIENTS):
        own = range(COLUMNS * k, COLUMNS * (k + 1))
        frames[f"client {k + 1}"] = pd.DataFrame({f"x{j}": X[:, j] for j in own}).assign(
            id=np.arange(ENTITIES)
        )
    frames["client 1"]["y"] = (rng.random(ENTITIES) < 1.0 / (1.0 + np.exp(-eta))) * 1.0
    return frames


def fit(exchange):
    masked = exchange == "masked"
    """CPU seconds of a default fit, after a short one that compiles; rounds and bytes of all that passed."""
    import fedstat as fs

    warnings.simplefilter("ignore", fs.errors.FedstatWarning)
    part, clock = fs.ClientPartition.from_frames(study(), on="id"), Clock()
    fs.LASER.from_formula("y ~ .", part).fit(masked=masked, epochs=1)
    for _ in range(3):
        fitted = clock.time("fit", lambda: fs.LASER.from_formula("y ~ .", part).fit(masked=masked))
    rows = clock.stages["fit"]
    frame = fitted.calibration.to_frame()
    return {
        "CPU s": sorted(row["cpu"] for row in rows)[1],
        "rounds": fitted.ledger.rounds,
        "MB a client": fitted.ledger.bytes / 1e6 / CLIENTS,
        "peak MB": rows[-1]["peak"],
        "AUC": float(frame["auc"].iloc[-1]),
    }


# ---- the page ------------------------------------------------------------------------------------


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def run_step():
    rows = []
    for b, goal in GOALS["step"].items():
        found = in_a_process(__file__, "step", b)
        times = [f"{found[name]:.2f}" if name in found else "" for name in ("ours", *PEERS)]
        ratios = [f"{found[name] / found['ours']:.1f}" if name in found else "" for name in PEERS]
        rows.append((f"{b:,}", *times, *ratios, goal))
    heads = ["rows", "ours", *PEERS, "ratio, set by set", "ratio, at once", "goal, set by set"]
    return [
        "## CPU milliseconds of a training step, one thread",
        "Four networks of 5-10-10-10, one head, losses over all fifteen sets, gradients, Adam. PyTorch in "
        "single precision, ours in double; medians of steps that take turns in one process.",
        table(heads, rows),
    ]


def run_fit():
    rows = []
    for exchange, most in GOALS["rounds"].items():
        f = in_a_process(__file__, "fit", exchange)
        rows.append(
            (
                exchange,
                f"{f['CPU s']:.2f}",
                f["rounds"],
                most,
                f"{f['MB a client']:.1f}",
                f"{f['peak MB']:.0f}",
                f"{f['AUC']:.3f}",
            )
        )
    return [
        f"## Default fits, {ENTITIES:,} x {CLIENTS * COLUMNS} over {CLIENTS} clients",
        f"All of a fit in one process, after one that compiles: masks, checks, signed ledgers. Goal: below "
        f"{GOALS['cpu']:g} CPU seconds. AUC with all sites, for entities outside training.",
        table(["exchange", "CPU s", "rounds", "goal", "MB a client", "peak MB", "AUC"], rows),
    ]


def main():
    os.environ |= THREADS
    if sys.argv[1:2] == ["task"]:
        print(json.dumps({"step": step, "fit": fit}[sys.argv[2]](*sys.argv[3:])))
        return
    parts = {"step": run_step, "fit": run_fit}
    request = sys.argv[1:]
    page = "\n\n".join(
        ["# Split networks", "`python tests/benchmarks/bench_laser.py`"]
        + [line for part in request or parts for line in parts[part]()]
    )
    print(page)
    if not request and importlib.util.find_spec("torch"):
        RESULTS.write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
