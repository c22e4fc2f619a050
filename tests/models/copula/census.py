"""A table of the shape of a census of incomes: fourteen columns of all kinds at four sites."""

import numpy as np
import pandas as pd
from scipy.special import expit

import fedstat as fs

HELD = {
    "Labor": ["age", "class", "weight", "hours"],
    "School": ["years", "degree", "job"],
    "Register": ["marital", "kin", "sex", "country"],
    "Tax": ["gain", "loss", "rich"],
}
COUNTRIES = [f"country {k}" for k in range(8)]
LEVELS = {
    "class": ["private", "self", "state", "local"],
    "degree": ["none", "school", "college", "doctor"],
    "job": ["clerk", "craft", "sales", "service", "army"],
    "marital": ["married", "divorced", "never", "widowed"],
    "kin": ["husband", "wife", "child", "none"],
    "sex": ["f", "m"],
    "country": COUNTRIES,
}
BOUNDS = fs.Bounds(
    {
        "age": range(17, 91),
        "weight": fs.log(10_000, 1_500_000),
        "hours": range(1, 100),
        "years": range(1, 17),
        "gain": fs.asinh(0, 99_999),
        "loss": (0, 5_000),
        "rich": [False, True],
        **LEVELS,
    }
)


def choose(names, utilities, rng):
    """Draw a level of each row with the largest of utilities (n, k) and Gumbel noise."""
    return np.array(names, dtype=object)[(utilities + rng.gumbel(size=utilities.shape)).argmax(axis=1)]


def census(n, seed=0):
    rng = np.random.default_rng(seed)
    one, sex = np.ones(n), np.where(rng.random(n) < 0.67, "m", "f")
    age = np.clip(17 + rng.gamma(2.2, 10, n), 17, 90).astype(int)
    old, man = (age - 38) / 14, (sex == "m").astype(float)
    wed = np.column_stack([0.3 + 0.5 * old + 0.7 * man, 0.5 * old - 0.5, -1.2 * old, old - 3.0])
    marital = choose(LEVELS["marital"], wed, rng)
    child = np.where(rng.random(n) < 0.45, "child", "none")
    kin = np.where(marital == "married", np.where(sex == "m", "husband", "wife"), child)
    kin = np.where((marital != "never") & (kin == "child"), "none", kin)
    years = np.clip(np.round(10 + 2.5 * rng.standard_normal(n)), 1, 16).astype(int)
    degree = np.array(LEVELS["degree"], dtype=object)[np.searchsorted([8, 12, 15], years)]
    job = np.column_stack([0.3 - man, man, 0.1 * one, -0.2 * (years - 10), -4.0 * one])
    job = choose(LEVELS["job"], job, rng)
    kind = np.column_stack([2.0 * one, 0.4 * old, -0.5 + 0.1 * (years - 10), -0.3 * one])
    wealth = -3.0 + 0.4 * (years - 10) + 1.9 * (marital == "married") + 0.3 * old
    rich = rng.random(n) < expit(wealth)
    hours = np.clip(40 + 12 * rng.standard_normal(n), 1, 99)
    gain, loss = np.round(rng.lognormal(8.8, 0.7, n)).clip(0, 99_999), np.round(rng.normal(1_887, 300, n))
    table = {
        "age": age,
        "class": choose(LEVELS["class"], kind, rng),
        "weight": np.round(rng.lognormal(12.1, 0.5, n)).clip(12_000, 1.4e6),
        "hours": np.where(rng.random(n) < 0.47, 40, hours).astype(int),
        "years": years,
        "degree": degree,
        "job": job,
        "marital": marital,
        "kin": kin,
        "sex": sex,
        "country": choose(COUNTRIES, np.outer(one, [4.0, *np.linspace(1, -1, 7)]), rng),
        "gain": np.where(rng.random(n) < 0.04 + 0.16 * rich, gain, 0),
        "loss": np.where(rng.random(n) < 0.03 + 0.06 * rich, loss, 0).clip(0),
        "rich": rich,
    }
    frame = pd.DataFrame(table)
    frame.loc[rng.random(n) < 0.056, ["class", "job"]] = None
    return frame
