"""Moments by missing pattern from pooled data, and the same moments of fewer or other entities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstat.models.vertical.moments import PatternMoments, number_patterns


def moments_of_arrays(X, y, sizes, *, sites=None, names=None, partial=False):
    """Sum over pooled data; a client lacks an entity where any of its columns is nan, unless `partial`."""
    K, P = len(sizes), X.shape[1]
    edges = np.cumsum([0, *sizes])
    has = np.column_stack([~np.isnan(X[:, edges[k] : edges[k + 1]]).any(axis=1) for k in range(K)])
    seen = ~np.isnan(X) if partial else np.repeat(has, sizes, axis=1)
    known = np.where(seen, X, np.nan)
    columns = np.column_stack([known, y])
    center, scale = np.nanmean(columns, axis=0), np.nanstd(columns, axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    rows = np.column_stack([np.ones(len(y)), np.nan_to_num((columns - center) / scale)])
    first, code, _ = number_patterns(seen)
    members = [rows[code == g] for g in range(len(first))]
    return PatternMoments(
        sites=tuple(sites or [f"client {k + 1}" for k in range(K)]),
        sizes=tuple(int(p) for p in sizes),
        names=tuple(names or [f"x{j + 1}" for j in range(P)]),
        seen=seen[first],
        n=np.array([float(len(Z)) for Z in members]),
        grams=np.array([Z.T @ Z for Z in members]),
        center=center,
        scale=scale,
    )


def merged(moments, plan):
    """Carry out a plan of merges: what sites that sum over the coarser patterns release."""
    n = np.zeros(len(plan.patterns))
    grams = np.zeros((len(plan.patterns), *moments.grams.shape[1:]))
    kept = plan.patterns[:, moments.unit]
    for g, to in enumerate(plan.target):
        if to >= 0:
            keep = np.concatenate([[True], kept[to], [True]])
            n[to] += moments.n[g]
            grams[to] += moments.grams[g] * np.outer(keep, keep)
    return replace(moments, seen=kept, n=n, grams=grams)


def complete(moments):
    """Keep the entities that every client has: the fit is least squares on them, method="cc"."""
    return _as_one(moments, np.asarray(moments.seen.all(axis=1)))


def filled(moments):
    """Replace a missing block by the mean of the entities that have it, method="impute"."""
    return _as_one(moments.standardized(), np.ones(len(moments.n), dtype=bool))


def _as_one(moments, use):
    every = np.ones((1, len(moments.names)), dtype=bool)
    n, grams = moments.n[use].sum(keepdims=True), moments.grams[use].sum(axis=0, keepdims=True)
    return replace(moments, seen=every, n=n, grams=grams)
