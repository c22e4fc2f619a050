"""Compile the kernels before they are needed: one small fit of each family, of simulated data.

Numba compiles a function at its first call and keeps the machine code in a cache. A small fit with the usual
options compiles what a fit of any size needs: here it takes the loops of large fits. ``python -m
fedstat.warm_up`` compiles all families, and ``python -m fedstat.warm_up glm cox`` some of them.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from statsmodels.genmod import families

from fedstat import datasets, kernels
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.compiled import note_compiled
from fedstat.models import INSTALLED

ROWS = 600
BOUNDS = {"age": (20, 90), "sex": [0, 1]}
LOGISTIC = "num > 0 ~ age + sex"
SURVIVAL = "Surv(months, died) ~ age + C(arm)"


def _rows() -> ClientPartition:
    table = datasets.make_hospitals().dropna(subset=["num", "age", "sex", "cp"])
    place = table.groupby("hospital").cumcount()
    full = place < table.groupby("hospital")["age"].transform("size") // 4 * 4  # wards of equal size
    wards = table["hospital"] + (place // 4).astype(str)
    return ClientPartition.from_frame(table.assign(ward=wards)[full], by="hospital")


def _survival() -> ClientPartition:
    return ClientPartition.from_frame(datasets.make_survival(), by="hospital")


def _repeated() -> ClientPartition:
    table = datasets.make_repeated(4)
    return ClientPartition.from_frame(
        table.assign(high=table["score"] > table["score"].median()), by="hospital"
    )


def _blocks(missing: float) -> ClientPartition:
    data = datasets.make_blocks(ROWS, (2, 2), missing=(missing, missing), seed=1)
    holder = next(name for name, frame in data.frames.items() if "y" in frame)
    own = data.frames[holder]
    frames = {**data.frames, holder: own.assign(event=(own["y"] > own["y"].median()) * 1.0)}
    return ClientPartition.from_frames(frames, on=data.key)


def _clusters() -> ClientPartition:
    data = datasets.make_clusters(ROWS, ["continuous", "ordinal"], p=3, seed=1)
    return ClientPartition.from_frames(data.frames, on=data.key)


def _columns() -> ClientPartition:
    table = datasets.make_hospitals()[["age", "sex"]].dropna()
    policy = Policy(privacy=Budget(epsilon=200.0, delta=1e-6))
    return ClientPartition.from_frame(table, columns={"A": ["age"], "B": ["sex"]}, policy=policy)


def _public(name: str) -> Any:
    """Return a public object of the families."""
    family = next(family for family, names in INSTALLED.items() if name in names)
    return getattr(import_module(f"fedstat.models.{family}.model"), name)


def _fit(name: str, formula: str, partition: ClientPartition, /, **options: Any) -> None:
    """Fit a model; options with the prefix ``fit_`` go to its fit."""
    arguments = {
        key.removeprefix("fit_"): options.pop(key) for key in list(options) if key.startswith("fit_")
    }
    _public(name).from_formula(formula, partition, **options).fit(**arguments)


def _warm_fedavg() -> None:
    for family in (families.Binomial(), families.Gaussian()):
        _fit("FedAvg", "num > 0 ~ scale(age) + sex", _rows(), family=family, fit_rounds=2)


def _warm_boost() -> None:
    _fit("FedFunctionBoost", "num ~ age + sex", _rows(), fit_steps=5)


def _warm_glm() -> None:
    _fit("GLORE", LOGISTIC, _rows())
    _fit("FederatedOLS", "num ~ age + sex", _rows())
    _fit("FederatedGLM", "num ~ age + sex", _rows(), family=families.Poisson())


def _warm_gee() -> None:
    for structure in ("independence", "exchangeable"):
        _fit(
            "FederatedGEE", LOGISTIC, _rows(), groups="ward", family=families.Binomial(), cov_struct=structure
        )


def _warm_cox() -> None:
    _fit("FederatedCox", SURVIVAL, _survival())


def _warm_survival_effect() -> None:
    _fit("SurvivalEffect", "Surv(months, died) ~ 1", _survival(), treatment="arm ~ age")


def _warm_descriptive() -> None:
    _public("KaplanMeier").from_formula("Surv(months, died) ~ arm", _survival()).fit(grid=1, until=60)


def _warm_categories() -> None:
    _fit("FederatedOrdinal", "num ~ age + sex", _rows())
    _fit("FederatedMultinomial", "C(cp) ~ age", _rows())


def _warm_mixed() -> None:
    _fit("FederatedMixed", "score ~ month + (1 + month | patient)", _repeated())
    _fit("FederatedMixed", "high ~ month + (1 | patient)", _repeated(), family=families.Binomial())


def _warm_vfem() -> None:
    _fit("VFEMRegression", "y ~ . - event", _blocks(0.15))
    _fit("VFEMGLM", "event ~ . - y", _blocks(0.15), family=families.Binomial())


def _warm_vglm() -> None:
    _fit("VerticalGLM", "y ~ . - event", _blocks(0.0), fit_n_lambdas=4)
    _fit("VerticalGLM", "event ~ . - y", _blocks(0.0), family=families.Binomial(), fit_n_lambdas=4)


def _warm_laser() -> None:
    _fit("LASER", "event ~ . - y", _blocks(0.15), fit_epochs=1)


def _warm_copula() -> None:
    _public("CopulaSynthesizer")(_columns(), 50.0, BOUNDS).fit().sample(20)


def _warm_copula_glm() -> None:
    _fit("PrivateCopulaGLM", "age ~ sex", _columns(), epsilon=50.0, bounds=BOUNDS, fit_draws=10)


def _warm_m2sem() -> None:
    for factors in (0, 1):
        _fit(
            "M2SEM",
            "~ c1_1 + c1_2 + c2_1 + c2_2",
            _clusters(),
            n_clusters=2,
            n_factors=factors,
            nominal=["c2_2"],
            fit_n_init=1,
            fit_select=None,
        )


FITS: dict[str, Callable[[], None]] = {
    "glm": _warm_glm,
    "fedavg": _warm_fedavg,
    "boost": _warm_boost,
    "gee": _warm_gee,
    "cox": _warm_cox,
    "survival_effect": _warm_survival_effect,
    "descriptive": _warm_descriptive,
    "categories": _warm_categories,
    "mixed": _warm_mixed,
    "vfem": _warm_vfem,
    "vglm": _warm_vglm,
    "laser": _warm_laser,
    "copula": _warm_copula,
    "copula_glm": _warm_copula_glm,
    "m2sem": _warm_m2sem,
}
"""Small fits by family; a family that is not listed compiles with its first fit."""


@contextmanager
def _loops_of_any_size() -> Iterator[None]:
    """Take compiled loops for few rows as well, which need none elsewhere."""
    modules = [import_module(one.name) for one in walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    few = {module: module.FEW for module in modules if hasattr(module, "FEW")}
    try:
        for module in few:
            module.FEW = 0  # type: ignore[attr-defined]
        yield
    finally:
        for module, rows in few.items():
            module.FEW = rows  # type: ignore[attr-defined]


def warm_up(served: Iterable[str] | None = None) -> dict[str, float]:
    """Compile the kernels of some families, or of all, and return the CPU seconds of each."""
    seconds, wanted = {}, set(INSTALLED if served is None else served)
    note_compiled(wanted - set(FITS))  # nothing to compile
    for family in [family for family in FITS if family in wanted]:
        since = time.process_time()
        with warnings.catch_warnings(), _loops_of_any_size():
            warnings.simplefilter("ignore")  # the data are small, and these fits are not read
            FITS[family]()
        seconds[family] = time.process_time() - since
        note_compiled([family])
    return seconds


if __name__ == "__main__":
    for name, spent in warm_up(sys.argv[1:] or None).items():
        print(f"{name:12} {spent:6.1f} s", flush=True)
