"""How CPU seconds, memory, rounds and bytes grow with rows, columns, sites and patterns of missing blocks.

python tests/benchmarks/bench_growth.py                  all, and writes results/growth.md and growth.svg
python tests/benchmarks/bench_growth.py GLORE VFEM       some families, printed only
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from datetime import date
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from clock import in_a_process, peak

import fedstat as fs

RESULTS = Path(__file__).parent / "results"
FIGURES = ("cpu", "MB", "rounds", "sent")
LAST = {"cpu": 3, "MB": 2, "rounds": 3, "sent": 3}
"""Sizes behind a slope. The fit that compiles, of the smallest size, hides the memory of the next one."""
HEADS = ("CPU s", "MB more", "rounds", "MB sent")


def rows_at_sites(n, p=10, sites=10):
    """Columns, a binary response, a number, times with events, and groups of five rows; one row a person."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, p))
    eta = 0.3 * X[:, :3].sum(axis=1)
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(p)])
    frame["y"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-eta))).astype(int)
    frame["person"] = np.arange(n) // 5
    frame["number"] = eta + rng.normal(size=n) + rng.normal(size=n // 5 + 1)[frame["person"]]
    frame["time"] = np.ceil(rng.exponential(size=n) / np.exp(eta) * 50.0)
    frame["died"], frame["arm"] = (rng.random(n) < 0.7).astype(int), np.where(X[:, 0] > 0.0, "a", "b")
    frame["site"] = [f"s{k:04d}" for k in frame["person"] * sites // (frame["person"].max() + 1)]
    return frame


def of_rows(make, n, p=10, sites=10):
    names = [f"x{j}" for j in range(p)]
    frame = rows_at_sites(n, p, sites)
    return lambda: make(fs.ClientPartition.from_frame(frame, by="site"), " + ".join(names))


def of_blocks(make, n, p=20, patterns=2, missing=0.25, parts=5):
    """Sites with p columns in all, ten for many patterns; each lacks some people: 2 to 2^10 sets of sites."""
    rng = np.random.default_rng(0)
    parts = 10 if patterns > 16 else parts
    X = rng.multivariate_normal(np.zeros(p), 0.3 + 0.7 * np.eye(p), n)
    y = 0.2 * X.sum(axis=1) + rng.normal(size=n)
    lacking = [few for k in range(parts + 1) for few in combinations(range(parts), k)][:patterns]
    lacks = np.where(rng.random(n) < missing * 2, rng.integers(0, patterns, n), 0)
    frames = {"response": pd.DataFrame({"id": np.arange(n), "y": y, "high": (y > 0.0).astype(int)})}
    for k, own in enumerate(np.array_split(np.arange(p), parts)):
        here = ~np.isin(lacks, [i for i, few in enumerate(lacking) if k in few])
        block = pd.DataFrame(X[np.ix_(here, own)], columns=[f"x{j}" for j in own])
        frames[f"site {k}"] = block.assign(id=np.flatnonzero(here))
    names = " + ".join(f"x{j}" for j in range(p))
    return lambda: make(fs.ClientPartition.from_frames(frames, on="id"), names)


def glore(partition, names):
    return fs.GLORE.from_formula(f"y ~ {names}", partition).fit()


def cox(partition, names):
    return fs.FederatedCox.from_formula(f"Surv(time, died) ~ {names}", partition).fit()


def kaplan_meier(partition, names):
    model = fs.KaplanMeier.from_formula("Surv(time, died) ~ arm", partition)
    return model.fit(grid=5, until=100)


def mixed(partition, names):
    return fs.FederatedMixed.from_formula(f"number ~ {names} + (1 | person)", partition).fit()


def vfem(partition, names):
    return fs.VFEMRegression.from_formula(f"y ~ {names}", partition).fit()


def lasso(partition, names):
    options = {"family": sm.families.Binomial(), "penalty": "lasso"}
    return fs.VerticalGLM.from_formula(f"high ~ {names}", partition, **options).fit(n_lambdas=50)


MANY_ROWS, MANY_SITES = [100_000, 1_000_000, 10_000_000], [3, 10, 30, 100, 300, 1_000]
MANY_COLUMNS = [10, 25, 50, 100, 200]
CASES = {
    "GLORE": {
        "rows": [lambda n=n: of_rows(glore, n) for n in MANY_ROWS],
        "columns": [lambda p=p: of_rows(glore, 100_000, p) for p in MANY_COLUMNS],
        "sites": [lambda k=k: of_rows(glore, 200 * k, 2, k) for k in MANY_SITES],
    },
    "FederatedCox": {
        "rows": [lambda n=n: of_rows(cox, n) for n in MANY_ROWS],
        "columns": [lambda p=p: of_rows(cox, 100_000, p) for p in MANY_COLUMNS],
        "sites": [lambda k=k: of_rows(cox, 200 * k, 2, k) for k in MANY_SITES],
    },
    "KaplanMeier": {
        "rows": [lambda n=n: of_rows(kaplan_meier, n) for n in MANY_ROWS],
        "sites": [lambda k=k: of_rows(kaplan_meier, 200 * k, 2, k) for k in MANY_SITES],
    },
    "FederatedMixed": {
        "rows": [lambda n=n: of_rows(mixed, n) for n in MANY_ROWS],
        "columns": [lambda p=p: of_rows(mixed, 100_000, p) for p in MANY_COLUMNS],
        "sites": [lambda k=k: of_rows(mixed, 200 * k, 2, k) for k in MANY_SITES],
    },
    "VFEM": {
        "rows": [lambda n=n: of_blocks(vfem, n, 10, parts=3) for n in MANY_ROWS],
        "columns": [lambda p=p: of_blocks(vfem, 20_000, p) for p in MANY_COLUMNS],
        "patterns": [lambda m=m: of_blocks(vfem, 100_000, 20, m) for m in (2, 10, 30, 100, 300, 1_000)],
    },
    "VerticalGLM, logistic lasso": {
        "rows": [lambda n=n: of_blocks(lasso, n, 10, 1, parts=3) for n in MANY_ROWS],
        "columns": [lambda p=p: of_blocks(lasso, 10_000, p, 1) for p in MANY_COLUMNS],
    },
}
"""Fits by family and by what grows; in each, other sizes stay. The first of a list is fitted twice."""


def task(family: str, grows: str, place: str) -> None:
    warnings.simplefilter("ignore")
    cases = CASES[family][grows]
    cases[0]()()  # loads and compiles
    fit = cases[int(place)]()
    before, cpu = peak(), time.process_time()
    result = fit()
    str(result.summary())
    spent = time.process_time() - cpu
    found = {"cpu": spent, "MB": peak() - before, "rounds": result.ledger.rounds}
    print(json.dumps(found | {"sent": result.ledger.bytes / 1e6}))


def slope(sizes, values, last=3):
    """Exponent of growth over the largest sizes; NaN where figures are too small to have one."""
    x, y = np.log(sizes[-last:]), np.maximum(np.array(values[-last:], dtype=float), 1e-3)
    return float(np.polyfit(x, np.log(y), 1)[0]) if y[-1] >= 0.02 else float("nan")


def measure(families):
    rows = []
    for family in families:
        for grows, cases in CASES[family].items():
            sizes = [one.__defaults__[0] for one in cases]
            found = []
            for place, size in enumerate(sizes):
                found.append(in_a_process(__file__, family, grows, place))
                figures = [f"{found[-1][name]:,.3g}" for name in FIGURES]
                print(f"| {family} | {grows} | {size:,} | {' | '.join(figures)} |", flush=True)
            rows.append((family, grows, sizes, {name: [one[name] for one in found] for name in FIGURES}))
    return rows


def page(rows):
    lines = [
        "# Growth",
        "",
        f"`python tests/benchmarks/bench_growth.py`, {date.today()}, one thread, code compiled: partition, "
        "fit and printed summary. Memory is what the process took in addition, where a smaller fit has not "
        "taken it before. Slopes are exponents over the largest three sizes, of memory two: 1 is linear. "
        "Other sizes: ten sites, ten columns and 100,000 rows, or 200 rows of two columns at each "
        "site; VFEM 20 columns of five sites, where half of the people lack some, and for rows of VFEM and "
        "the lasso 10 columns of three sites.",
        "",
        f"| family | grows | {' | '.join(HEADS)} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for family, grows, sizes, figures in rows:
        cells = []
        for name in FIGURES:
            values = ", ".join(
                f"{size:,}: {value:,.3g}" for size, value in zip(sizes, figures[name], strict=True)
            )
            cells.append(f"{values}; slope {slope(sizes, figures[name], LAST[name]):.2f}")
        lines.append(f"| {family} | {grows} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![Growth on log axes](growth.svg)", ""])


def draw(rows, path):
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    kinds = list(dict.fromkeys(grows for _, grows, _, _ in rows))
    figure, axes = plt.subplots(
        2, len(kinds), figsize=(3.2 * len(kinds), 5.6), squeeze=False, sharex="col", sharey="row"
    )
    for family, grows, sizes, figures in rows:
        for row, (name, first) in enumerate((("cpu", 0), ("MB", 1))):
            axis, color = axes[row, kinds.index(grows)], f"C{list(CASES).index(family)}"
            axis.loglog(
                sizes[first:],
                [value or np.nan for value in figures[name][first:]],
                "o-",
                label=family,
                ms=3,
                color=color,
            )
    for k, grows in enumerate(kinds):
        axes[1, k].set_xlabel(grows)
    for axis in axes.flat:
        axis.minorticks_off()
    axes[0, 0].set_ylabel("CPU seconds")
    axes[1, 0].set_ylabel("MB more")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path)


def main(names):
    rows = measure(names or CASES)
    for family, grows, sizes, figures in rows:
        print(family, grows, {name: round(slope(sizes, figures[name], LAST[name]), 2) for name in FIGURES})
    if not names:
        (RESULTS / "growth.md").write_text(page(rows))
        draw(rows, RESULTS / "growth.svg")


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        task(*sys.argv[2:])
    else:
        main(sys.argv[1:])
