"""Common random projections of columns, streamed over blocks of rows.

Two sites that hold different columns of the same entities apply the SAME random matrix S to their own
columns. Then (S X)'(S Y) estimates X'Y with a relative error of about sqrt(2 / rows of S) in an entry, and E
S'S = I. S is never stored as a whole.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.typing import Floats, Ints

BLOCK = 4096
"""Number of entities that are mixed with one another before hashing; a power of two."""

GAUSSIAN_BLOCK = 256
GAUSSIAN_DRAWN = 2**23


@njit(cache=True, nogil=True)
def hadamard(A: Floats) -> None:
    """Walsh-Hadamard transform along the rows of A, in place: (b, p), b a power of two; unscaled."""
    b, p = A.shape
    half = 1
    while half < b:
        for start in range(0, b, 2 * half):
            for i in range(start, start + half):
                for j in range(p):
                    s = A[i, j]
                    t = A[i + half, j]
                    A[i, j] = s + t
                    A[i + half, j] = s - t
        half *= 2


@njit(cache=True, nogil=True)
def scatter_signed(A: Floats, bucket: Ints, sign: Floats, out: Floats) -> None:
    """Add ``sign[i] * A[i]`` to ``out[bucket[i]]``: (b, p), (b,), (b,), (m, p)."""
    for i in range(A.shape[0]):
        for j in range(A.shape[1]):
            out[bucket[i], j] += sign[i] * A[i, j]


def shared_stream(*keys: int) -> np.random.Generator:
    """Random numbers that every site draws alike from the same keys."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(keys)))


def single_sketches(n: int, size: int) -> tuple[int, int]:
    """Rows of a single sketch of n entities, and how many make up at least `size` rows."""
    single = min(size, max(n // 2, 1))
    return single, -(-size // single)


def structured_sketch(X: Floats, rows: Ints, n: int, size: int, seed: int) -> Floats:
    """Sketch by signs, a Hadamard mixing of each block of entities (Ailon and Chazelle 2009), and hashing.

    The hashing is that of Charikar, Chen and Farach-Colton (2004). X (n_k, p) are one site's columns, `rows`
    (n_k,) their ascending positions among the n entities, others counting as zero rows; the sites share the
    seed. A single sketch has at most n/2 rows, so that each mixes several entities. If more are requested,
    independent sketches are stacked: (m, p), where m is `size` rounded up to a multiple of the rows of a
    single one.
    """
    single, repeats = single_sketches(n, size)
    out = np.zeros((repeats, single, X.shape[1]))
    for repeat in range(repeats):
        add_structured(X, rows, n, (seed, repeat), out[repeat])
    out /= np.sqrt(repeats)
    return out.reshape(repeats * single, -1)


def add_structured(X: Floats, rows: Ints, n: int, seed: tuple[int, ...], out: Floats) -> None:
    """Add one structured sketch of X to `out`, (size, p)."""
    size, p = out.shape
    width = min(BLOCK, 1 << max(n - 1, 1).bit_length())
    edges = np.searchsorted(rows, np.arange(0, n + width, width))
    mixed = np.empty((width, p))
    for block in range((n + width - 1) // width):
        generator = shared_stream(*seed, block)
        signs = 2.0 * generator.integers(0, 2, size=(2, width)) - 1.0
        bucket = generator.integers(0, size, size=width)
        here = slice(edges[block], edges[block + 1])
        at = rows[here] - block * width
        # Signs and buckets are drawn for all entities, also those that this site lacks: sites draw alike.
        mixed[:] = 0.0
        mixed[at] = X[here] * signs[0, at, None]
        hadamard(mixed)
        scatter_signed(mixed, bucket, signs[1] / np.sqrt(width), out)


def gaussian_sketch(X: Floats, rows: Ints, n: int, size: int, seed: int) -> Floats:
    """Sketch by independent normal numbers with variance 1/size; see :func:`structured_sketch`.

    The distribution of the result depends on X only through X'X (Blocki, Blum, Datta and Sheffet 2012).
    """
    out = np.zeros((size, X.shape[1]))
    edges = np.searchsorted(rows, np.arange(0, n + GAUSSIAN_BLOCK, GAUSSIAN_BLOCK))
    for block in range((n + GAUSSIAN_BLOCK - 1) // GAUSSIAN_BLOCK):
        generator = shared_stream(seed, block)
        here = slice(edges[block], edges[block + 1])
        at = rows[here] - block * GAUSSIAN_BLOCK
        # A long sketch is drawn in parts: the stream is the same.
        step = max(GAUSSIAN_DRAWN // max(size, 1), 1)
        for start in range(0, GAUSSIAN_BLOCK, step):
            S = generator.standard_normal((min(step, GAUSSIAN_BLOCK - start), size))
            part = (at >= start) & (at < start + step)
            out += S[at[part] - start].T @ X[here][part]
    out /= np.sqrt(size)
    return out


SKETCHES = {"structured": structured_sketch, "gaussian": gaussian_sketch}
