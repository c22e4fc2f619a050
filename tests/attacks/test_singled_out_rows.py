"""Every step of every family receives requests for few rows: one-hot weights, masks, groups of few entities.

Real fits set the sessions up. Wherever they ask a site with an array that weighs or selects rows, it is asked
once more with one that singles out a row or three. The site refuses, or what it releases does not depend on
these rows alone: it is computed again with these rows changed, and again with all other rows changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import ConvergenceWarning, FedstatError, MessageError
from fedstat.federation.disclosure.site import FAMILIES, Site, load_families
from fedstat.federation.message import check_arrays

N = 120
FEWEST = 20
"""Arrays at least so long are taken for one number per entity; no design here has as many columns."""

SAID = ("per entity", "raw columns", "presence", "schema", "sealed")
"""Kinds that are no aggregates, and are declared as what they are."""

NO_FEW_ROWS = {
    ("stage_block", "weights"),
    ("judge_predictions", "predicted"),
    ("weigh_response", "sets"),
}
"""Arrays that cannot be concentrated on few rows.

Weights are positive, predictions are probabilities, and a set needs entities for its weights.
"""

BY_PATTERN = {("begin", "members"), ("draw_folds", "use")}
"""Arrays that select sites by pattern, and no entities."""

RNG = np.random.default_rng(4)
A1, B1, B2, C1 = RNG.normal(size=(4, N))
Y = 0.5 * A1 + 0.4 * B1 - 0.3 * C1 + RNG.normal(size=N)
K = RNG.negative_binomial(1, 0.3, size=N) * 1.0
IDS = np.arange(N)
TABLES = {
    "A": pd.DataFrame({"id": IDS, "y": Y, "z": (Y > 0) * 1.0, "k": K, "a1": A1, "w": 1.0 + IDS % 3}),
    "B": pd.DataFrame({"id": IDS, "b1": B1, "b2": B2}).iloc[: N - 30],
    "C": pd.DataFrame({"id": IDS, "c1": C1}).iloc[25:],
}
COLUMNS = "a1 + b1 + b2 + c1"
BINOMIAL = sm.families.Binomial()
FAMILY_OF = {"z": BINOMIAL, "k": sm.families.NegativeBinomial(alpha=1.0)}


def partition(complete=False):
    all_complete = IDS[25 : N - 30]
    tables = {k: t[t["id"].isin(all_complete)] if complete else t for k, t in TABLES.items()}
    return fs.ClientPartition.from_frames(tables, on="id")


def vfem(response="y", between="independent", **options):
    how = {"family": FAMILY_OF[response]} if response in FAMILY_OF else {}
    kind = fs.VFEMGLM if how else fs.VFEMRegression
    model = kind.from_formula(f"{response} ~ {COLUMNS}", partition(), **how, between=between)
    return model.fit(**options)


def vglm(response="y", complete=True, missing=None, roles=None, **options):
    how = {"family": BINOMIAL} if response == "z" else {}
    how |= ({} if missing is None else {"missing": missing}) | (roles or {})
    model = fs.VerticalGLM.from_formula(f"{response} ~ {COLUMNS}", partition(complete), **how)
    return model.fit(**options)


def nobody_deals(response="z", **options):
    """Fit a response of two institutions, where residuals and curvatures are sent."""
    frames = {name: TABLES[name] for name in "AB"}
    both = fs.ClientPartition.from_frames(frames, on="id", shared_seed=1)
    how = {"family": FAMILY_OF[response], "coordinator": "A", "between": "independent"}
    model = fs.VFEMGLM.from_formula(f"{response} ~ a1 + b1 + b2", both, **how)
    model.fit(cross_products="sketch", sketch_size=60, **options)


def single_cells():
    """Fit where entities have some of an institution's columns."""
    tables = TABLES | {"B": TABLES["B"].assign(b2=B2[: N - 30]).mask(IDS[: N - 30, None] % 2 == [2, 2, 0])}
    split = fs.ClientPartition.from_frames(tables, on="id")
    fs.VFEMRegression.from_formula(f"y ~ {COLUMNS}", split).fit()


def weighted():
    """Fit with weights of the response holder, over groups that are large enough for these."""
    n, rng = 2_000, np.random.default_rng(8)
    x, ids = rng.normal(size=(n, 3)), np.arange(n)
    y = x.sum(axis=1) + rng.normal(size=n)
    frames = {"H": pd.DataFrame({"id": ids, "y": y})}
    for j, site in enumerate("ABC"):
        frames[site] = pd.DataFrame({"id": ids, site.lower(): x[:, j]})[rng.random(n) < 0.85]
    model = fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(frames, on="id"))
    model.fit(method="weighted")


def networks(keep=True, **options):
    """Train, keep the training after every epoch, and evaluate."""
    model = fs.LASER.from_formula(f"z ~ {COLUMNS}", partition(), hidden=(4,), width=3)
    with TemporaryDirectory() as folder:
        kept = {"checkpoint": Path(folder) / "training"} if keep else {}
        fitted = model.fit(epochs=2, batch_size=200, calibration=0.3, **kept, **options)
    fitted.evaluate(partition())


def clusters(**options):
    """Find clusters, and a variable outside them."""
    model = fs.M2SEM(partition(), 2, 1, columns=["a1", "b1", "b2", "c1"])
    with pytest.warns(ConvergenceWarning):  # twelve rounds have all kinds of requests
        fitted = model.fit(select=None, n_init=1, maxiter=12, **options)
    fitted.outside("y")


def new_entities():
    """Predict, and compare the predictions with responses."""
    vfem(exchange="iterative", cov_type="none").prediction_rsquared(partition())


def repeated_entities():
    """Fit a model with frequency weights."""
    fs.VFEMRegression.from_formula(f"y ~ {COLUMNS}", partition(), freq_weights="w").fit()


FITS = {
    "moments": lambda: vfem(),
    "iterative": lambda: vfem(exchange="iterative"),
    "exact": lambda: vfem(exchange="iterative", iteration=fs.Iteration(cross_products="exact")),
    "sketch": lambda: vfem(
        exchange="iterative", iteration=fs.Iteration(cross_products="sketch", sketch_size=60)
    ),
    "sem": lambda: vfem(exchange="iterative", cov_type="sem"),
    "binomial": lambda: vfem("z"),
    "binomial free": lambda: vfem("z", "free"),
    "nobody deals": nobody_deals,
    "robust": lambda: vfem("z", cov_type="robust"),
    "robust, nobody deals": lambda: nobody_deals(cov_type="robust"),
    "counts": lambda: vfem("k", dispersion="ml"),
    "counts, nobody deals": lambda: nobody_deals("k", dispersion="ml"),
    "weights": weighted,
    "single cells": single_cells,
    "predictions": new_entities,
    "intervals": lambda: vfem().predict_set(partition(), partition()),
    "evaluations": lambda: vfem("z").evaluate(partition()),
    "evaluations of numbers": lambda: vfem().evaluate(partition()),
    "evaluations of counts": lambda: vfem("k").evaluate(partition()),
    "evaluations of a selection": lambda: vglm("z", lam=0.05).evaluate(partition(True)),
    "frequency weights": repeated_entities,
    "means filled in": lambda: vfem(method="impute"),
    "networks": lambda: networks(masked=False, validation=0.3),
    "networks masked": lambda: networks(masked=True),
    "networks, joint": lambda: networks(method="vfedtrans"),
    "networks, none held back": lambda: networks(validation=0.0),
    "networks, not kept": lambda: networks(keep=False, validation=0.0),
    "clusters": lambda: clusters(starts="all"),
    "clusters masked": lambda: clusters(starts="sum", masked=True),
    "correlations": lambda: fs.corr(partition(), "a1 + b1 + c1"),
    "vglm": lambda: vglm(lam=0.05),
    "vglm em": lambda: vglm(complete=False, missing="em", lam=0.05),
    "vglm binomial": lambda: vglm("z", lam=0.05),
    "vglm folds": lambda: vglm("z", select="cv", n_lambdas=3, folds=3),
    "vglm frequency weights": lambda: vglm(roles={"freq_weights": "w"}, lam=0.05),
    "vglm offset": lambda: vglm("z", roles={"offset": "w"}, lam=0.05),
    "vglm weights": lambda: vglm("z", roles={"freq_weights": "w"}, lam=0.05),
    "vglm admm": lambda: vglm("z", exchange="admm", lam=0.05),
}


# -- the request that replaces an honest one ------------------------------------------------------------


def by_row(array):
    """Whether an array has one number, or one row of numbers, for every entity."""
    return array.ndim in (1, 2) and len(array) >= FEWEST and array.dtype != np.uint8


def by_column(array):
    """Whether an array of few rows has one column for every entity."""
    kinds = (np.float64, np.bool_)
    return array.ndim == 2 and len(array) < FEWEST <= array.shape[1] and array.dtype in kinds


def group_of_each(array):
    """Whether whole numbers are groups, not positions."""
    return array.dtype == np.int64 and array.ndim == 1 and array.min() >= -1 and (np.diff(array) <= 0).any()


def single_out(arrays, name, picked):
    """Concentrate a weight, selection or group on few rows; None if the array is none of these."""
    array = arrays[name]
    if by_column(array) or (array.ndim == 3 and array.shape[1] >= FEWEST):  # of three the first has parts
        few = np.zeros_like(array)
        few[:, picked] = 1.0
        return {**arrays, name: few}
    if not by_row(array) or (array.dtype == np.int64 and not group_of_each(array)):
        return None
    few = np.zeros_like(array)
    if array.dtype == np.bool_ and array.ndim == 1:
        chosen = np.flatnonzero(array)[picked]
        few[chosen] = True
        # A mask that selects fewer rows needs fewer values.
        kept = np.isin(np.flatnonzero(array), chosen)
        others = {k: a[kept] if a.shape[:1] == kept.shape and k != name else a for k, a in arrays.items()}
        return {**others, name: few}
    few[picked] = 1
    alone = array.dtype == np.int64 and array.max() == 0
    return {**arrays, name: few - 1 if alone else few}


def held(item, length, found):
    """Arrays with one row for each of n entities, in the state of a site."""
    if isinstance(item, np.ndarray):
        if item.dtype == np.float64 and item.ndim and len(item) == length and item.flags.writeable:
            found[id(item)] = item
    elif isinstance(item, dict):
        for part in item.values():
            held(part, length, found)
    elif isinstance(item, list | tuple):
        for part in item:
            held(part, length, found)
    elif is_dataclass(item) and not isinstance(item, type):
        for part in fields(item):
            held(getattr(item, part.name), length, found)
    return found


class Changed:
    """Some rows of all that a site keeps are others for a while."""

    def __init__(self, state, length, rows):
        self.arrays = list(held(state._items, length, {}).values())
        self.rows = rows

    def __enter__(self):
        rng = np.random.default_rng(1)
        self.before = [(array, array.copy()) for array in self.arrays]
        for array in self.arrays:
            array[self.rows] *= 1.0 + rng.uniform(0.1, 0.3, size=array[self.rows].shape)

    def __exit__(self, *_):
        for array, old in self.before:
            array[...] = old


class Prober:
    """Asks a site again for few rows, right after a fit has asked it."""

    def __init__(self, answer):
        self.answer = answer
        self.fit = ""
        self.requested, self.leaks = Counter(), []
        self.malformed = set()
        self.answers = {}

    def __call__(self, site, context):
        request, before = context.request, context.state.copy()
        answer = self.answer(site, context)
        remembered = site._data.memory.released
        for name in request.arrays:
            place = (self.fit, request.family, request.step, name)
            if not self.requested[place]:
                for picked in ([7], [3, 7, 11]):
                    self._probe(site, context, before, name, picked)
        site._data.memory.released = remembered
        return answer

    def _probe(self, site, context, before, name, picked):
        request, step = context.request, context.step
        arrays = single_out(dict(request.arrays), name, picked)
        if arrays is None:
            return
        where, place = f"{site.name}, step '{request.step}'", (self.fit, request.family, request.step, name)
        check_arrays(where, step.takes, arrays)
        shape = arrays[name].shape
        length = shape[-1] if by_column(arrays[name]) else shape[len(shape) == 3]
        rows = (
            np.flatnonzero(arrays[name])
            if arrays[name].dtype == np.bool_ and arrays[name].ndim == 1
            else picked
        )
        rest = np.setdiff1d(np.arange(length), rows)

        def release(changed):
            state = before.copy()
            site._data.memory.released = None
            with Changed(state, length, changed):
                unmasked = replace(request, arrays=arrays, masked=None)
                probe = replace(context, request=unmasked, state=state, masker=None)
                self.answer(site, probe)
                return probe.reply.arrays

        try:
            reported, own, other = (release(changed) for changed in ([], rows, rest))
        except MessageError:
            self.malformed.add((request.step, name))
            return  # malformed for this step: it is not counted
        except FedstatError as error:
            self.requested[place] += 1
            self.answers.setdefault((*place, len(picked)), type(error).__name__)
            return
        self.requested[place] += 1
        self.answers.setdefault((*place, len(picked)), "released")
        if any(
            step.gives[array].kind == "per entity" and differ(reported[array], own[array])
            for array in reported
        ):
            return  # the declaration of the answer says that it has a value for each entity
        for array in reported:
            own_only = differ(reported[array], own[array]) and not differ(reported[array], other[array])
            if step.gives[array].kind not in SAID and own_only:
                self.leaks.append(
                    f"{request.family} {request.step}({name}): '{array}' is that of {len(picked)} rows"
                )


def differ(one, other):
    return one.shape != other.shape or not np.allclose(one, other, rtol=1e-9, atol=1e-300)


def takes_rows(name, declared):
    """Whether an array of a request weighs or selects entities, according to its declaration."""
    selects = declared.dtype == "bool" and declared.ndim > 0 and declared.kind == "presence"
    return declared.kind in ("per entity", "raw columns") or selects or bool(declared.weighs)


def paid(step):
    """Whether all releases of a step have noise that is charged, for every set of rows."""
    return all(declared.noisy for declared in step.gives.values())


@pytest.fixture(scope="module")
def prober():
    load_families()
    answer = Site._prepare
    made = Prober(answer)
    Site._prepare = lambda site, context: made(site, context)
    try:
        for made.fit, fit in FITS.items():
            fit()
    finally:
        Site._prepare = answer
    return made


def test_no_release_is_that_of_few_rows(prober):
    assert not prober.leaks, "\n".join(sorted(set(prober.leaks)))


def test_every_step_that_takes_rows_was_asked(prober):
    """A step that no fit above asks is asked by a fit that has to be added."""
    # Families that share a step have it under one name.
    request = {(name, array) for _, _, name, array in prober.requested}
    assert prober.malformed >= NO_FEW_ROWS
    request |= NO_FEW_ROWS | BY_PATTERN
    assert [
        (family, name, array)
        for family, steps in FAMILIES.items()
        for name, step in steps.items()
        for array, declared in step.takes.items()
        if takes_rows(array, declared) and (name, array) not in request and not paid(step)
    ] == []
