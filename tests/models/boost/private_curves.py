"""Entities of known mean curves and components, and what is public of them."""

from __future__ import annotations

import numpy as np
from curve_cases import curve_table, declared

import fedstat as fs

S, T = np.linspace(0, 1, 30), np.linspace(0, 1, 12)
PHI = np.array([np.ones(30), np.sqrt(2) * np.cos(np.pi * S)])
PSI = np.array([np.ones(12), np.sqrt(2) * np.cos(np.pi * T)])
HELD = {"Laboratory": ["x1", "g"], "Imaging": ["x2", "x3", "age"], "Clinic": ["y", "number"]}
TEXT = "y(t) ~ x1 + x2 + x3 + age + g"
PUBLIC = {
    **dict.fromkeys(("x1", "x2", "x3"), fs.PublicCurve(S, np.full(30, 5.0), PHI, [1.0, 0.6])),
    "y": fs.PublicCurve(T, np.full(12, 3.0), PSI, [1.4, 0.6]),
    "age": (20, 80),
    "g": list("abc"),
    "number": (-4, 10),
}


def people(n, seed, effect=1.0):
    """Curves with two scores each; two of the scores, an age and a level have an effect."""
    random = np.random.default_rng(seed)
    scores = [random.normal(size=(n, 2)) * [1.0, 0.6] for _ in range(3)]
    age, g = random.uniform(20, 80, n), random.integers(0, 3, n)
    first = scores[0][:, 0] + 0.8 * (age - 50.0) / 17.0
    c = effect * np.column_stack([first, 0.5 * scores[1][:, 0] - 0.5 * (g == 1)])
    c = c + random.normal(size=(n, 2)) * [0.5, 0.3]
    x = {f"x{k}": 5.0 + a @ PHI for k, a in enumerate(scores, 1)}
    frame = curve_table(**x, y=3.0 + c @ PSI)
    return frame.assign(age=age, g=np.array(list("abc"))[g], number=3.0 + c[:, 0])


def budgeted(frame, budget=1e4, held=HELD, **options):
    policy = fs.Policy(privacy=fs.Budget(epsilon=budget, delta=1e-6))
    names = ("x1", "x2", "x3", "y")
    return fs.ClientPartition.from_frame(
        frame, columns=held, curves=declared(*names), policy=policy, **options
    )


def private(frame, epsilon=3.0, text=TEXT, public=None, partition=None, **settings):
    partition = budgeted(frame) if partition is None else partition
    return fs.FedFunctionBoost.from_formula(
        text, partition, epsilon=epsilon, public=PUBLIC if public is None else public, **settings
    )
