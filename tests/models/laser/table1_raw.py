"""The published training of split networks on raw columns: one missing pattern a batch, no disclosure checks.

What the authors' code does (github.com/Valdeira/LASER-VFL, read and not copied): classes are drawn equally
often; 188 patterns are drawn once, and a batch has the pattern of its first row; each site has one head,
which learns from one set of every size; Adam with L2, for 50 to 125 epochs by method. Its environment is
PyTorch 1.13, whose ``zero_grad`` leaves zeros: networks and heads that a batch of LASER does not use continue
with the state of Adam, and shrink (`coast`).
"""

from __future__ import annotations

from itertools import combinations
from math import prod

import numpy as np
from numba import njit

from fedstat.kernels.split_networks import adam_step, draw_parameters, forward, gradient
from fedstat.models.laser.networks import softmax
from fedstat.models.laser.training import assemble, members_of

K, COLUMNS, BATCH, RATE = 4, 20, 128, 1e-4
WIDTHS, HEAD = np.array([COLUMNS // K, 10, 10, 10]), np.array([10, 2])
SETS = [sum(1 << k for k in s) for j in range(1, K + 1) for s in combinations(range(K), j)]
SCHEDULES = {
    "local": (75, 1e-4),
    "standard": (75, 1e-4),
    "combinatorial": (75, 1e-4),
    "ensemble": (50, 1e-3),
    "laser": (100, 1e-3),
}
"""Epochs and L2 penalty."""


def schedule(method, missing):
    """Epochs, penalty, and the share of the rate at which cosine annealing ends."""
    epochs, decay = SCHEDULES[method]
    return (125, decay, 0.2) if method == "laser" and missing == 0.5 else (epochs, decay, 1.0)


def binomial(n, k):
    return prod(range(n - k + 1, n + 1)) // prod(range(1, k + 1))


CHOOSE = np.array([[float(binomial(n, k)) if k <= n else 0.0 for k in range(K)] for n in range(K)])


@njit(cache=True, nogil=True)
def choose_tasks(weights, clients, head, sizes, seen, sampled, rng):
    """Weights of the tasks of one batch: all within `seen`, or one of each head and size."""
    weights[:] = 0.0
    chosen, count = np.full((K, K + 1), -1), np.zeros((K, K + 1), np.int64)
    n = 0
    for k in range(K):
        n += seen >> k & 1
    for t in range(len(clients)):
        if clients[t] & seen != clients[t]:
            continue
        if not sampled:
            weights[t] = 1.0
            continue
        count[head[t], sizes[t]] += 1
        if rng.random() * count[head[t], sizes[t]] < 1.0:
            chosen[head[t], sizes[t]] = t
    if sampled:
        for k in range(K):
            for j in range(1, K + 1):
                if chosen[k, j] >= 0:
                    weights[chosen[k, j]] = CHOOSE[n - 1, j - 1] / j


@njit(cache=True, nogil=True)
def train(X, y, of_class, patterns, tasks, sampled, coast, epochs, decay, floor, theta, phi, rng):
    """Train networks theta (I, q) and heads phi (H, r) in place, on rows X (n, 20)."""
    owner, members, sites, head, sizes = tasks
    nets, d = len(theta), WIDTHS[-1]
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    first_h, second_h = np.zeros_like(phi), np.zeros_like(phi)
    steps, steps_h = np.zeros(nets, np.int64), np.zeros(len(phi), np.int64)
    weights, rows = np.zeros(len(head)), np.zeros(BATCH, np.int64)
    A = np.zeros((nets, WIDTHS.sum(), BATCH))
    nothing, nothing_h = np.zeros(theta.shape[1]), np.zeros(phi.shape[1])
    for epoch in range(epochs):
        rate = RATE * (floor + (1.0 - floor) * 0.5 * (1.0 + np.cos(np.pi * epoch / epochs)))
        for _ in range(len(patterns)):
            for i in range(BATCH):
                c = int(rng.random() < 0.5)
                rows[i] = of_class[c][int(rng.random() * len(of_class[c]))]
            seen = patterns[rows[0] // BATCH]
            if seen == 0:
                continue
            choose_tasks(weights, sites, head, sizes, seen, sampled, rng)
            live, back = np.zeros(nets, np.bool_), np.zeros((nets, d, BATCH))
            of_heads, live_h = np.zeros_like(phi), np.zeros(len(phi), np.bool_)
            for t in range(len(head)):
                if weights[t] > 0.0:
                    live |= members[t]
                    live_h[head[t]] = True
            for m in range(nets):
                if live[m]:
                    own = np.empty((WIDTHS[0], BATCH))
                    for i in range(BATCH):
                        for c in range(WIDTHS[0]):
                            own[c, i] = X[rows[i], owner[m] * WIDTHS[0] + c]
                    A[m] = forward(theta[m], WIDTHS, own)
            for t in range(len(head)):
                if weights[t] == 0.0:
                    continue
                mean = np.zeros((d, BATCH))
                for m in range(nets):
                    if members[t, m]:
                        mean += A[m, -d:]
                mean /= sizes[t]
                of_head = forward(phi[head[t]], HEAD, mean)
                D = np.empty((2, BATCH))
                for i in range(BATCH):
                    p = 1.0 / (1.0 + np.exp(of_head[d, i] - of_head[d + 1, i]))
                    D[1, i] = (p - y[rows[i]]) * weights[t] / BATCH
                    D[0, i] = -D[1, i]
                g, of_mean = gradient(phi[head[t]], HEAD, of_head, D)
                of_heads[head[t]] += g
                for m in range(nets):
                    if members[t, m]:
                        back[m] += of_mean / sizes[t]
            for m in range(nets):
                if live[m]:
                    steps[m] += 1
                    g = gradient(theta[m], WIDTHS, A[m], back[m])[0]
                    adam_step(theta[m], g, first[m], second[m], steps[m], rate, decay)
                elif coast and steps[m]:
                    steps[m] += 1
                    adam_step(theta[m], nothing, first[m], second[m], steps[m], rate, decay)
            for h in range(len(phi)):
                if live_h[h]:
                    steps_h[h] += 1
                    adam_step(phi[h], of_heads[h], first_h[h], second_h[h], steps_h[h], rate, decay)
                elif coast and steps_h[h]:
                    steps_h[h] += 1
                    adam_step(phi[h], nothing_h, first_h[h], second_h[h], steps_h[h], rate, decay)


def fit(method, X, y, missing, seed, plan=None, coast=True):
    """Networks (I, q) and heads (H, r) of a method, with its assembly; `plan` is another schedule."""
    rng = np.random.default_rng(seed)
    assembly = assemble(method, K, "client")
    theta = np.array([draw_parameters(WIDTHS, rng) for _ in assembly.networks])
    phi = np.array([draw_parameters(HEAD, rng) for _ in range(assembly.heads)])
    patterns = (rng.random((-(-len(y) // BATCH), K)) >= missing) @ (1 << np.arange(K))
    of_class = tuple(np.flatnonzero(y == c) for c in (0, 1))
    sites = np.array([task.sites for task in assembly.tasks])
    sizes = np.array([task.sites.bit_count() for task in assembly.tasks])
    tasks = (np.array(assembly.networks), assembly.members, sites, assembly.head_of, sizes)
    epochs, decay, floor = plan or schedule(method, missing)
    laser = method == "laser"
    train(
        X, y.astype(float), of_class, patterns, tasks, laser, laser and coast,
        epochs, decay, floor, theta, phi, rng,
    )  # fmt: skip
    return assembly, theta, phi


def decide(assembly, theta, phi, X):
    """Most probable class by task, (T, n)."""
    p = WIDTHS[0]
    parts = [np.ascontiguousarray(X[:, k * p : (k + 1) * p].T) for k in assembly.networks]
    R = np.array([forward(t, WIDTHS, part)[-WIDTHS[-1] :] for t, part in zip(theta, parts, strict=True)])
    out = []
    for task in assembly.tasks:
        mean = np.ascontiguousarray(R[list(task.members)].mean(axis=0))
        out.append(softmax(forward(phi[task.head], HEAD, mean)[-2:])[1] > 0.5)
    return np.array(out)


def weight_of(sites, missing):
    """Probability of a pattern."""
    return prod((1.0 - missing) if sites >> k & 1 else missing for k in range(K))


def confusion(found, y):
    """True and false positives, false negatives, per entity; `found` may be probabilities of a decision."""
    return np.array([np.mean(found * y), np.mean(found * (1 - y)), np.mean((1 - found) * y)])


def f1(counts):
    return 200.0 * counts[0] / (2.0 * counts[0] + counts[1] + counts[2])


def score(method, assembly, decided, y, missing, rng):
    """F1 x 100 as published: one pattern for each of 47 batches of the test set, in its order.

    Of heads, clients by themselves, or networks for every set the mean of their F1, where they were asked
    for; of a vote and of the standard network, which guesses where a client is missing, the F1 of all.
    """
    batches = -(-len(y) // BATCH)
    code = np.repeat((rng.random((batches, K)) >= missing) @ (1 << np.arange(K)), BATCH)[: len(y)]
    by_head = {}
    for s in np.unique(code[code > 0]).tolist():
        rows = code == s
        for head, found in predictions(method, assembly, decided, s, rng):
            counts = rows.sum() * confusion(found[rows], y[rows])
            by_head[head] = by_head.get(head, 0.0) + counts
    found = np.array([f1(counts) for counts in by_head.values()])
    return np.mean(found[found > 0.0] if method in ("local", "standard", "combinatorial") else found)


def predictions(method, assembly, decided, sites, rng):
    """Heads that predict for a set of clients, each with its decisions (n,)."""
    own, guess = members_of(sites), rng.random(decided.shape[1]) < 0.5
    if method == "standard":
        return [(0, decided[0] if len(own) == K else guess)]
    if method == "ensemble":
        votes = decided[own].mean(axis=0)
        return [(0, np.where(votes == 0.5, guess, votes > 0.5))]
    tasks = own if method == "local" else assembly.of_set(sites)
    return [(assembly.tasks[t].head, decided[t]) for t in tasks]
