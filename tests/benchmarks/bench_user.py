"""Seconds, memory and bytes of what users wait for, next to the same job by a peer.

Ours is the whole way: partition, model, fit with its errors, printed summary. A peer has all data in one
place. Every run is a process of its own with one thread, after a small run that loads compiled code; runs of
fedstat and of its peers take turns. Data are drawn beforehand and opened before the clock starts.

    python tests/benchmarks/bench_user.py                   all but jobs of minutes: treatment,
                                                            treatment-large and many-sites; writes
                                                            results/user.md
    python tests/benchmarks/bench_user.py glore hospitals   some rows, and writes them into results/user.csv
    python tests/benchmarks/bench_user.py --turns=3         medians of three runs instead of five
    python tests/benchmarks/bench_user.py --check           two minutes: fails where the CPU seconds, divided
                                                            by a peer's, exceed 1.5 times the stored ratio
    python tests/benchmarks/bench_user.py --check --store   stores these ratios

Peers may live in another environment, FEDSTAT_PEERS=/its/bin/python (``pip install glum stepmix lifelines
pandas pyarrow``). glmnet needs R. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from clock import in_a_process

RESULTS = Path(__file__).parent / "results"
TABLE, PAGE, RATIOS = RESULTS / "user.csv", RESULTS / "user.md", RESULTS / "user_ratios.csv"
TASKS = Path(__file__).with_name("user_tasks.py")
TURNS, CHECK_TURNS, LIMIT = 5, 3, 1.5
THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
NEEDS = {
    "import_lifelines": "lifelines",
    "lifelines_cox": "lifelines",
    "glum": "glum",
    "stepmix": "stepmix",
    "sklearn_lasso": "sklearn",
}
"""Libraries of peers that the package's own tests do not need."""
IN_R = {
    "glmnet": "glmnet",
    "coxph": "survival",
    "coxph_common": "survival",
    "survfit": "survival",
    "lmer": "lme4",
    "glmer": "lme4",
}
"""Peers that are functions of R, and their libraries."""
FIGURES = ("cpu", "wall", "peak", "bytes", "rounds")
COLUMNS = ("row", "who", *FIGURES, "turns", "date")


@dataclass(frozen=True, slots=True)
class Row:
    """One job: functions of user_tasks.py for ours, peers and data, their sizes, repeats in a process."""

    title: str
    ours: str
    peers: tuple[str, ...] = ()
    data: str = "no_data"
    sizes: tuple[object, ...] = ()
    repeats: int = 1
    goal: str = ""
    by_name_only: bool = False
    """Measured only where the command line names it."""


ROWS = {
    "import": Row("`import`", "import_fedstat", ("import_statsmodels", "import_lifelines"), goal="0.3 s"),
    "readme1": Row("README's first example, whole process", "readme", sizes=(1,), goal="2 s"),
    "readme2": Row("README's second example, whole process", "readme", sizes=(2,), goal="2 s"),
    "hospitals": Row(
        "GLORE, four sites of 230 rows, warm",
        "hospitals",
        ("statsmodels_hospitals",),
        sizes=("default",),
        repeats=10,
        goal="0.06 s",
    ),
    "strict": Row(
        "GLORE, four sites of 230 rows, warm, strict policy",
        "hospitals",
        ("statsmodels_hospitals",),
        sizes=("strict",),
        repeats=10,
        goal="0.06 s",
    ),
    "columns": Row(
        "VFEM, 59 ratios of drawn balance sheets with missing cells, 5,910 enterprises",
        "vfem_many_columns",
        ("numpy_em",),
        "balance_sheets",
        (5_910,),
        goal="2 s",
    ),
    "vfem": Row("VFEM, 166,207 x 35", "vfem", ("numpy_em",), "enterprises", (166_207,), goal="1.5 s"),
    "vfem-large": Row(
        "VFEM, 1.6 million x 35", "vfem", (), "enterprises", (1_600_000,), goal="10 s, 3,000 MB"
    ),
    "glore": Row(
        "GLORE, a million rows x 30, ten sites",
        "glore",
        ("glum",),
        "rows_of_sites",
        (1_000_000, 30),
        goal="2 s",
    ),
    "selection": Row(
        "VerticalGLM, logistic lasso of 50 lambdas, 5,000 x 200",
        "vertical_glm",
        ("glmnet",),
        "columns_of_sites",
        (5_000, 200, "binomial"),
        goal="0.5 s",
    ),
    "selection-large": Row(
        "VerticalGLM, logistic lasso of 50 lambdas, 70,000 x 55",
        "vertical_glm",
        ("glmnet",),
        "columns_of_sites",
        (70_000, 55, "binomial"),
        goal="2.5 s, 200 MB sent",
    ),
    "cox": Row(
        "FederatedCox, 100,000 x 20, four sites",
        "cox",
        ("coxph", "lifelines_cox"),
        "times_of_sites",
        (100_000, 20),
    ),
    "cox_common": Row(
        "FederatedCox with a common baseline, 100,000 x 20, 40 intervals",
        "cox_common",
        ("coxph_common",),
        "times_of_sites",
        (100_000, 20),
    ),
    "treatment": Row(
        "TreatmentEffect, augmented weighting, 200,000 rows x 20, ten sites",
        "treatment_effect",
        ("statsmodels_treatment",),
        "treated_rows",
        (200_000, 20),
        goal="1.5 times statsmodels",
        by_name_only=True,
    ),
    "treatment-large": Row(
        "TreatmentEffect, augmented weighting, a million rows x 20, ten sites",
        "treatment_effect",
        (),
        "treated_rows",
        (1_000_000, 20),
        by_name_only=True,
    ),
    "ordinal": Row(
        "FederatedOrdinal, 100,000 x 10, four grades, four sites",
        "ordinal",
        ("ordered_model",),
        "grades_of_sites",
        (100_000, 10),
    ),
    "multinomial": Row(
        "FederatedMultinomial, 100,000 x 10, four categories, four sites",
        "multinomial",
        ("mnlogit",),
        "grades_of_sites",
        (100_000, 10),
    ),
    "gee": Row(
        "FederatedGEE, binomial, exchangeable, 20,000 people x 5 visits, five sites",
        "gee",
        ("statsmodels_gee",),
        "visits_of_sites",
        (20_000,),
    ),
    "mixed": Row(
        "FederatedMixed, linear, 30 sites x 2,000 patients x 5 visits",
        "mixed_linear",
        ("lmer",),
        "visits_of_patients",
        (30, 2_000),
        goal="5 s",
    ),
    "mixed_logistic": Row(
        "FederatedMixed, logistic, 9 nodes, 30 sites x 2,000 patients x 5 visits",
        "mixed_logistic",
        ("glmer",),
        "visits_of_patients",
        (30, 2_000),
        goal="30 s",
    ),
    "curves": Row(
        "KaplanMeier, a million rows, 80 intervals",
        "kaplan_meier",
        ("survfit",),
        "times_of_sites",
        (1_000_000, 1),
        goal="1 s",
    ),
    "clusters": Row("M2SEM, 400 x 160, K = 3, Q = 2", "m2sem", ("stepmix",), "clusters", goal="6 s"),
    "sites": Row(
        "GLORE, 200 sites of 200 rows", "many_sites", ("statsmodels_sites",), sizes=(200,), goal="4 s"
    ),
    "many-sites": Row(
        "GLORE, 1,000 sites of 200 rows",
        "many_sites",
        ("statsmodels_sites",),
        sizes=(1_000,),
        goal="20 s",
        by_name_only=True,
    ),
    "stream": Row(
        "GLORE, ten million rows x 10, streamed from Parquet",
        "glore_streamed",
        ("glum",),
        "stream",
        (10_000_000, 10),
        goal="15 s, 1,000 MB",
    ),
}

CHECKS = {
    "import": Row("import of a family", "import_family", ("import_statsmodels",)),
    "hospitals": Row("small fits", "hospitals", ("statsmodels_hospitals",), "no_data", ("default",), 15),
    "vfem": Row("VFEM, 20,000 x 35", "vfem", ("numpy_em",), "enterprises", (20_000,)),
    "glore": Row("GLORE, 100,000 x 30", "glore", ("statsmodels_rows",), "rows_of_sites", (100_000, 30)),
    "selection": Row(
        "normal lasso, 5,000 x 200",
        "vertical_glm",
        ("sklearn_lasso",),
        "columns_of_sites",
        (5_000, 200, "gaussian"),
    ),
    "sites": Row("20 sites of 200 rows", "many_sites", ("statsmodels_sites",), "no_data", (20,), 3),
}


def python_of(task: str) -> str:
    """The Python that has the libraries of a peer; the first of this one and FEDSTAT_PEERS."""
    library = NEEDS.get(task)
    if library is None:
        return sys.executable
    for python in (sys.executable, os.environ.get("FEDSTAT_PEERS", "")):
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({library!r}) is None)"
        if python and not subprocess.run([python, "-c", code], capture_output=True).returncode:
            return python
    return ""


def is_installed(task: str) -> bool:
    if library := IN_R.get(task):
        R = shutil.which("Rscript")
        return (
            bool(R) and not subprocess.run([R, "-e", f"library({library})"], capture_output=True).returncode
        )
    return bool(python_of(task))


def take_turns(
    row: Row, turns: int, of: Callable[..., float] = statistics.median
) -> dict[str, dict[str, float | None]]:
    """Medians, or what `of` computes, of the figures of ours and of each peer that is installed."""
    runs: dict[str, list[dict[str, float | None]]] = {row.ours: []}
    runs |= {peer: [] for peer in row.peers if is_installed(peer)}
    for peer in set(row.peers) - set(runs):
        print(f"{row.title}: {peer} is left out, because it is not installed", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        in_a_process(TASKS, "prepare", row.data, folder, *(row.sizes if row.data != "no_data" else ()))
        for _ in range(turns):
            for task, found in runs.items():
                python = python_of(task)
                arguments = (task, folder, row.repeats, *row.sizes)
                found.append(in_a_process(TASKS, "measure", *arguments, python=python))
    return {
        task: {key: None if found[0][key] is None else of(run[key] for run in found) for key in FIGURES}
        for task, found in runs.items()
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run_rows(names: Sequence[str], turns: int) -> None:
    """Measure rows, one by one, and put their figures into the table and the page."""
    for name in names:
        found = take_turns(ROWS[name], turns)
        held = [line for line in read_csv(TABLE) if line["row"] != name]
        for task, run in found.items():
            line = {key: "" if value is None else f"{value:.6g}" for key, value in run.items()}
            held.append({"row": name, "who": task, **line, "turns": str(turns), "date": str(date.today())})
        held.sort(key=lambda line: list(ROWS).index(line["row"]))
        write_csv(TABLE, COLUMNS, held)
        PAGE.write_text(page(held), encoding="utf-8")
        print("\n".join(lines_of(name, held)), flush=True)


def lines_of(name: str, held: Sequence[dict[str, str]]) -> list[str]:
    """Rows of the page: ours first, then each peer, with the ratio of ours to its CPU seconds."""
    row = ROWS[name]
    found = {line["who"]: line for line in held if line["row"] == name}
    ours = found[row.ours]
    out = []
    for who, line in found.items():
        mine = who == row.ours
        sent = f"{float(line['bytes']) / 1e6:.3g}" if line["bytes"] else ""
        ratio = "" if mine else f"{float(ours['cpu']) / max(float(line['cpu']), 1e-9):.2f}"
        job, by, goal = (row.title, "fedstat", row.goal) if mine else ("", who.replace("_", " "), "")
        rounds = f"{float(line['rounds']):.0f}" if line["rounds"] else ""
        seconds = f"{float(line['cpu']):.3g} | {float(line['wall']):.3g}"
        figures = f"{seconds} | {float(line['peak']):,.0f} | {sent} | {rounds}"
        out.append(f"| {job} | {by} | {figures} | {ratio} | {goal} |")
    return out


def page(held: Sequence[dict[str, str]]) -> str:
    measured = {line["row"] for line in held}
    days = sorted({line["date"] for line in held})
    turns = dict.fromkeys(line["turns"] for line in sorted(held, key=lambda line: int(line["turns"])))
    parts = [
        "# What users wait for",
        "",
        f"`python tests/benchmarks/bench_user.py`, {' to '.join(dict.fromkeys((days[0], days[-1])))}, "
        f"{platform.machine()}, one thread, medians of {' or '.join(turns)} runs. fedstat: partition, model, "
        "fit with errors and printed summary. Peers have all data in one place. The EM in numpy and StepMix "
        "give no standard errors; glum and glmnet print no summary. Memory is the peak of the process, with "
        "its libraries and tables. The last column but one divides the CPU seconds of fedstat by those of "
        "the peer. Where wall time is much longer than CPU time, other programs were running: CPU times "
        "compare. statsmodels' TreatmentEffect ran once; with a million rows it did not end in 15 minutes.",
        "",
        "| job | by | CPU s | wall s | peak MB | MB sent | rounds | fedstat / peer | goal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ROWS:
        if name in measured:
            parts += lines_of(name, held)
    if missing := [row.title for name, row in ROWS.items() if name not in measured]:
        parts += ["", "Not measured yet: " + "; ".join(missing) + "."]
    return "\n".join(parts) + "\n"


def check(names: Sequence[str], store: bool) -> int:
    """Compare ratios of CPU seconds to a peer with the stored ones; the number of rows that are too slow."""
    stored = {line["row"]: float(line["ratio"]) for line in read_csv(RATIOS)}
    slow = 0
    for name in names or CHECKS:
        row = CHECKS[name]
        found = take_turns(row, CHECK_TURNS, min)
        peer = next((task for task in found if task != row.ours), None)
        if peer is None:
            continue
        ours, theirs = found[row.ours]["cpu"], found[peer]["cpu"]
        assert ours is not None and theirs is not None
        ratio, limit = ours / theirs, LIMIT * stored.get(name, float("inf"))
        verdict = "too slow" if ratio > limit and not store else "ok"
        slow += verdict != "ok"
        print(f"{name}: {ours:.3f} s, {peer} {theirs:.3f} s, ratio {ratio:.2f}, limit {limit:.2f}: {verdict}")
        stored |= {name: ratio} if store else {}
    if store:
        write_csv(RATIOS, ("row", "ratio"), [{"row": k, "ratio": f"{v:.3g}"} for k, v in stored.items()])
    return slow


if __name__ == "__main__":
    os.environ |= THREADS
    known = CHECKS if "--check" in sys.argv else ROWS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help=", ".join(known))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--store", action="store_true", help="with --check")
    wanted = parser.parse_args()
    if strangers := set(wanted.rows) - set(known):
        parser.error(f"unknown rows {', '.join(sorted(strangers))}; expected {', '.join(known)}")
    if wanted.check:
        sys.exit(check(wanted.rows, wanted.store))
    run_rows(wanted.rows or [name for name, row in ROWS.items() if not row.by_name_only], wanted.turns)
