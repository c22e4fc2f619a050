"""Seconds, memory, rounds and bytes of VFEM and of two imputation methods.

Every figure comes from a process of its own, so that imports, compilation and memory are not those of another
one. Data are drawn beforehand and read from files. Wall time is what a user waits; CPU time is
reported as well, because other programs on the same computer lengthen only the wall time.

    python tests/benchmarks/bench_vfem.py              all, and writes results/vfem.md
    python tests/benchmarks/bench_vfem.py fit growth   some, and prints them
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from clock import Clock

SME = 166_207
GROWTH = (20_000, SME, 1_600_000)
COLUMNS = (20, 40, 60, 90, 120, 200)
REPEATS = 3
FITS = {
    "moments": ("free", {}),
    "iterative, masked": ("independent", {"exchange": "iterative"}),
    "iterative, in clear": (
        "independent",
        {"exchange": "iterative", "cov_type": "expected"},
    ),
}
FROM_MOMENTS = {"free": 1.5, "independent": 1.0}
"""Seconds from moments to estimates and observed standard errors that either law may take."""
IMPUTER_ROUNDS = 2
MICE_CYCLES = 3
AMELIA_IMPUTATIONS = 1
MICE_USUAL_CYCLES = 10 + 20 * 4
GROWTH_COLUMNS = [
    "n",
    "partition s",
    "design s",
    "from moments s",
    "moments s",
    "iterative s",
    "MB sent",
    "peak MB",
    "CPU us / entity",
    "bytes / entity",
]
RESULTS = Path(__file__).parent / "results" / "vfem.md"
NHANES = {
    "Interview": ["Age", "Gender", "Race1", "Education", "Poverty", "Diabetes"],
    "Body": ["Height", "BMI"],
    "Blood pressure": ["BPSysAve", "Pulse"],
    "Blood laboratory": ["DirectChol", "TotChol"],
    "Urine": ["UrineVol1", "UrineFlow1"],
    "Questionnaire": ["HealthGen", "DaysPhysHlthBad", "DaysMentHlthBad"],
}
NHANES_FORMULAS = ("BPSysAve ~ .", "Poverty ~ . - Education")


# ---- in a process of its own ---------------------------------------------------------------------


def write(folder, n, seed=1):
    """Draw the enterprise study and write one file per institution."""
    import fedstat as fs

    folder = Path(folder)
    data = fs.datasets.make_sme(n, seed=seed)
    for site, frame in data.frames.items():
        frame.to_parquet(folder / f"{site}.parquet", index=False)
    data.truth.to_parquet(folder / "truth.parquet")
    (folder / "study.json").write_text(
        json.dumps({"clients": list(data.frames), "key": data.key, "response": data.response})
    )
    return {}


def read(folder):
    import pandas as pd

    study = json.loads((Path(folder) / "study.json").read_text())
    frames = {site: pd.read_parquet(Path(folder) / f"{site}.parquet") for site in study["clients"]}
    return frames, study


def read_truth(folder):
    import pandas as pd

    return pd.read_parquet(Path(folder) / "truth.parquet")["coef"]


def rmse(params, truth):
    """Root mean squared error of the coefficients, the intercept left out."""
    return float(((params[truth.index] - truth) ** 2).mean() ** 0.5)


def imports():
    """Import time of the package beyond that of pandas and statsmodels."""
    clock = Clock()
    clock.time("pandas, statsmodels.api", lambda: (__import__("pandas"), __import__("statsmodels.api")))
    clock.time("fedstat", lambda: __import__("fedstat"))
    return {"stages": clock.stages}


def fit(folder, repeats=REPEATS):
    """Partition, design and fits; the first fit of each kind loads compiled code and is not counted."""
    import warnings

    import fedstat as fs
    from fedstat.models.vfem.covariance.from_moments import MomentsOptions, estimate_from_moments

    clock, out = Clock(), {}
    frames, study = clock.time("read", read, folder)
    for _ in range(repeats):
        partition = clock.time("partition", fs.ClientPartition.from_frames, frames, on=study["key"])
        clock.time("design", fs.VFEMRegression.from_formula, f"{study['response']} ~ .", partition)
    for name, (joint, arguments) in FITS.items():
        model = fs.VFEMRegression.from_formula(f"{study['response']} ~ .", partition, between=joint)
        if name == "iterative, in clear":
            arguments = arguments | {"iteration": fs.Iteration(masked=False)}
        warnings.simplefilter("ignore", fs.errors.DisclosureWarning)
        clock.time(f"first {name}", model.fit, **arguments)
        for _ in range(repeats):
            result = clock.time(name, model.fit, **arguments)
        out[name] = {
            "rounds": result.ledger.rounds,
            "bytes": result.ledger.bytes,
            "iterations": len(result.trace),
            "converged": bool(result.converged),
            "rmse": rmse(result.params, read_truth(folder)),
            "se": float((result.bse.drop("Intercept") ** 2).mean() ** 0.5),
        }
        if name == "moments":
            for request in (MomentsOptions("observed", each, 5000) for each in FROM_MOMENTS):
                for _ in range(repeats + 1):
                    stage = f"from moments, {request.between}"
                    clock.time(stage, estimate_from_moments, result.exchange.moments, request)
    return out | {"stages": clock.stages}


def cold(folder):
    """First call in a new process; the caller measures the time of the complete process."""
    import fedstat as fs

    frames, study = read(folder)
    partition = fs.ClientPartition.from_frames(frames, on=study["key"])
    return {
        "converged": bool(
            fs.VFEMRegression.from_formula(f"{study['response']} ~ .", partition).fit().converged
        )
    }


def pooled(folder):
    """All columns in one table, which no site could have; the response comes last."""
    frames, study = read(folder)
    table = frames.pop("Platform")
    for frame in frames.values():
        table = table.merge(frame, on=study["key"], how="left")
    return table[[*read_truth(folder).index, study["response"]]]


def imputer(folder, rounds=IMPUTER_ROUNDS):
    """scikit-learn's IterativeImputer with its default estimator, then ordinary least squares."""
    import pandas as pd
    import statsmodels.api as sm
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    clock, table = Clock(), pooled(folder)

    def run():
        full = IterativeImputer(max_iter=rounds, random_state=0).fit_transform(table.to_numpy())
        return sm.OLS(full[:, -1], sm.add_constant(full[:, :-1])).fit().params[1:]

    params = clock.time("imputer", run)
    truth = read_truth(folder)
    return {"rmse": rmse(pd.Series(params, index=truth.index), truth), "stages": clock.stages}


def mice(folder, cycles=MICE_CYCLES):
    """statsmodels' MICE, its imputations one cycle apart."""
    import pandas as pd
    import statsmodels.api as sm
    from statsmodels.imputation.mice import MICE, MICEData

    clock, table = Clock(), pooled(folder)
    names = [f"x{j}" for j in range(table.shape[1] - 1)]
    table.columns = [*names, "y"]

    def run():
        data = MICEData(table)
        return MICE(f"y ~ {' + '.join(names)}", sm.OLS, data, n_skip=0).fit(n_burnin=0, n_imputations=cycles)

    result = clock.time("mice", run)
    truth = read_truth(folder)
    return {"rmse": rmse(pd.Series(result.params[1:], index=truth.index), truth), "stages": clock.stages}


AMELIA = """
library(Amelia)
table <- read.csv(commandArgs(TRUE)[1])
began <- proc.time()
out <- amelia(table, m = IMPUTATIONS, p2s = 0)
if (out$code != 1) stop(out$message)
fits <- sapply(out$imputations, function(d) coef(lm(y ~ ., d))[-1])
taken <- proc.time() - began
cat(taken[["elapsed"]], sum(taken[c("user.self", "sys.self")]), rowMeans(fits), sep = "\\n")
"""


LAVAAN = """
suppressMessages(library(lavaan))
table <- read.csv(commandArgs(TRUE)[1])
began <- proc.time()
formula <- paste("y ~", paste(setdiff(names(table), "y"), collapse = " + "))
fit <- suppressWarnings(sem(formula, table, missing = "ml", fixed.x = FALSE, meanstructure = TRUE,
                            information = "observed", test = "none", baseline = FALSE))
if (!lavInspect(fit, "converged")) stop("lavaan did not converge")
found <- parameterEstimates(fit)
taken <- proc.time() - began
params <- found$est[found$lhs == "y" & found$op == "~"]
cat(taken[["elapsed"]], sum(taken[c("user.self", "sys.self")]), params, sep = "\n")
"""


def amelia(folder, imputations=AMELIA_IMPUTATIONS):
    """R's Amelia: EM on bootstrapped rows of the pooled table, an imputation each, then least squares."""
    return in_r(folder, AMELIA.replace("IMPUTATIONS", str(imputations)))


def lavaan(folder):
    """R's lavaan: full information maximum likelihood of the same law on the pooled table."""
    return in_r(folder, LAVAAN)


def in_r(folder, script):
    """Run a script of R on the pooled table, which prints wall and CPU seconds and the coefficients."""
    import numpy as np
    import pandas as pd

    table, truth = pooled(folder), read_truth(folder)
    table.columns = [*[f"x{j}" for j in range(table.shape[1] - 1)], "y"]
    place = Path(folder) / "pooled.csv"
    table.to_csv(place, index=False)
    run = subprocess.run(["Rscript", "-e", script, str(place)], capture_output=True, text=True, check=True)
    wall, cpu, *params = np.array(run.stdout.split(), dtype=float)
    stage = {"wall": wall, "cpu": cpu, "peak": float("nan")}
    return {"rmse": rmse(pd.Series(params, index=truth.index), truth), "stages": {"r": [stage]}}


def has_r(package):
    """Whether a package of R is there."""
    call = ["Rscript", "-e", f"library({package})"]
    return bool(shutil.which("Rscript")) and not subprocess.run(call, capture_output=True).returncode


def install_amelia():
    """Whether R's Amelia is there; it is installed where the system's packages can be."""
    if not has_r("Amelia") and shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "install", "-y", "-qq", "r-cran-amelia"], capture_output=True)
    return has_r("Amelia")


def nhanes(path, repeats=REPEATS):
    """Two fits to adults of NHANES: a response from the examination and one from the interview."""
    import warnings

    import pandas as pd

    import fedstat as fs

    clock, out = Clock(), {}
    table = pd.read_csv(path, na_values=["", "NA"], keep_default_na=False, low_memory=False)
    adults = table[table["Age"] >= 20]
    frames = {site: adults[["ID", *columns]] for site, columns in NHANES.items()}
    warnings.simplefilter("ignore", fs.errors.DataWarning)

    def complete(formula):
        partition = fs.ClientPartition.from_frames(frames, on="ID")
        return fs.VFEMRegression.from_formula(formula, partition, missing="drop").fit()

    for formula in NHANES_FORMULAS:
        clock.time(f"first {formula}", complete, formula)
        for _ in range(repeats):
            result = clock.time(formula, complete, formula)
        out[formula] = {
            "rounds": result.ledger.rounds,
            "nobs": result.nobs,
            "converged": bool(result.converged),
        }
    return out | {"stages": clock.stages}


def columns(p, n=20_000, blocks=4, share=0.75):
    """Fit p columns of sites that lack a quarter of the entities, after a small fit that compiles."""
    import numpy as np
    import pandas as pd

    import fedstat as fs

    def model(p, n):
        rng = np.random.default_rng(0)
        X = rng.multivariate_normal(np.zeros(p), 0.3 + 0.7 * np.eye(p), n)
        y = X @ rng.normal(size=p) * 0.2 + rng.normal(size=n)
        frames = {"response": pd.DataFrame({"id": np.arange(n), "y": y})}
        for k, own in enumerate(np.array_split(np.arange(p), blocks)):
            rows = rng.random(n) < share
            names = [f"x{j}" for j in own]
            frames[f"site {k}"] = pd.DataFrame(X[np.ix_(rows, own)], columns=names).assign(
                id=np.flatnonzero(rows)
            )
        partition = fs.ClientPartition.from_frames(frames, on="id")
        return fs.VFEMRegression.from_formula("y ~ .", partition)

    model(8, 500).fit()
    clock, full = Clock(), model(p, n)
    clock.time("fit", full.fit)
    return {"stages": clock.stages}


TASKS = {f.__name__: f for f in (write, imports, fit, cold, imputer, mice, amelia, lavaan, nhanes, columns)}


# ---- the caller ----------------------------------------------------------------------------------


def run(task, *arguments, cache=None, **environment):
    """Run a task in a new process; adds the seconds of the whole process and the load before it."""
    environment = os.environ | environment | ({} if cache is None else {"NUMBA_CACHE_DIR": str(cache)})
    load, began = os.getloadavg()[0], time.perf_counter()
    process = subprocess.run(
        [sys.executable, __file__, "--task", task, json.dumps(arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"{task}{arguments}:\n{process.stderr}")
    answer = json.loads(process.stdout.splitlines()[-1])
    return answer | {"process": time.perf_counter() - began, "load": load}


def median(rows, what="wall"):
    return statistics.median(row[what] for row in rows)


def highest(stages):
    """Peak memory of a process, MB."""
    return max(rows[-1]["peak"] for rows in stages.values())


class Report:
    """Markdown tables of the figures."""

    def __init__(self):
        self.lines = []

    def heading(self, text, *paragraphs):
        self.lines += ["", f"## {text}", "", *[line for p in paragraphs for line in (p, "")]]

    def table(self, columns, rows):
        cells = [columns, ["---"] * len(columns), *rows]
        self.lines += ["| " + " | ".join(map(str, row)) + " |" for row in cells]

    def __str__(self):
        return "\n".join(self.lines).strip() + "\n"


def seconds(rows):
    return [f"{median(rows):.2f}", f"{median(rows, 'cpu'):.2f}"]


def verdict(value, target, unit=""):
    return f"{'met' if value <= target else 'missed'} ({target:g}{unit})"


class Bench:
    """The parts of the benchmark, over one folder of data."""

    def __init__(self, folder):
        self.folder, self.report, self.cache = Path(folder), Report(), Path(folder) / "compiled"

    def data(self, n):
        place = self.folder / str(n)
        if not place.exists():
            place.mkdir()
            run("write", str(place), n, cache=self.cache)
        return str(place)

    def fit(self):
        answer = run("fit", self.data(SME), cache=self.cache)
        stages = answer["stages"]
        complete = sum(median(stages[stage]) for stage in ("partition", "design", "moments"))
        self.report.heading(
            f"n = {SME:,}, 35 covariates, published missing rates",
            f"Medians of {REPEATS} in one process; load before it {answer['load']:.1f}. From moments: "
            "estimates and observed standard errors where the moments have been exchanged, with covariances "
            "between institutions that are free or zero.",
        )
        rows = []
        targets = {f"from moments, {joint}": limit for joint, limit in FROM_MOMENTS.items()}
        for stage in ("partition", "design", *targets, *FITS):
            target = verdict(median(stages[stage]), targets[stage], " s") if stage in targets else ""
            rows.append([stage, *seconds(stages[stage]), f"{stages[stage][-1]['peak']:.0f}", target])
        rows.append(
            ["in all: partition, design, moments", f"{complete:.2f}", "", "", verdict(complete, 4.0, " s")]
        )
        self.report.table(["stage", "wall s", "CPU s", "peak MB so far", "target"], rows)
        self.report.lines += [""]
        self.report.table(
            ["fit", "iterations", "rounds", "MB between institutions"],
            [
                [name, of["iterations"], of["rounds"], f"{of['bytes'] / 1e6:.1f}"]
                for name, of in ((name, answer[name]) for name in FITS)
            ],
        )
        return answer

    def start(self):
        folder, warm, empty = self.data(SME), [], []
        for repeat in range(REPEATS):
            empty.append(run("cold", folder, cache=self.folder / f"empty {repeat}"))
        run("cold", folder, cache=self.cache)
        for _ in range(REPEATS):
            warm.append(run("cold", folder, cache=self.cache))
        imported = [run("imports", cache=self.cache) for _ in range(2 * REPEATS + 1)]
        extra = [answer["stages"]["fedstat"][0] for answer in imported]
        self.report.heading(
            "A new process",
            "The whole process: start, imports, files read, partition, design, one fit with observed "
            f"standard errors, exit. Medians of {REPEATS}, imports of {len(extra)}; "
            f"load before them {empty[0]['load']:.1f}.",
        )
        rows = [
            [what, f"{median(answers, 'process'):.2f}", verdict(median(answers, "process"), 15, " s")]
            for what, answers in (("nothing compiled before", empty), ("compiled before", warm))
        ]
        rows.append(
            [
                "`import fedstat` after pandas and statsmodels.api",
                f"{median(extra):.2f} (CPU {median(extra, 'cpu'):.2f})",
                verdict(median(extra), 0.5, " s"),
            ]
        )
        self.report.table(["process", "wall s", "target"], rows)
        return {"empty": median(empty, "process"), "warm": median(warm, "process"), "import": median(extra)}

    def columns(self):
        self.report.heading(
            "Growth with columns",
            "20,000 entities, four sites that each lack a quarter of them, covariances free between sites.",
        )
        rows = []
        for p in COLUMNS:
            (row,) = run("columns", p, cache=self.cache)["stages"]["fit"]
            rows.append([p, f"{row['cpu']:.1f}", f"{row['peak']:.0f}"])
        self.report.table(["columns", "CPU s", "peak MB"], rows)

    def growth(self):
        answers = {n: run("fit", self.data(n), cache=self.cache) for n in GROWTH}
        self.report.heading(
            "Growth with n",
            f"Medians of {REPEATS}, of the moments exchange and of the iterative one in clear. The last "
            "columns divide by n: equal figures mean linear growth. The memory includes the tables.",
        )
        rows = []
        for n, answer in answers.items():
            stages = answer["stages"]
            names = ("partition", "design", "from moments, free", "moments", "iterative, in clear")
            rows.append(
                [
                    f"{n:,}",
                    *[f"{median(stages[name]):.2f}" for name in names],
                    f"{answer['moments']['bytes'] / 1e6:.0f}",
                    f"{highest(stages):.0f}",
                    f"{median(stages['moments'], 'cpu') / n * 1e6:.2f}",
                    f"{answer['moments']['bytes'] / n:.0f}",
                ]
            )
        self.report.table(GROWTH_COLUMNS, rows)
        return answers

    def joint(self):
        """The free model from moments, and lavaan and Amelia on the pooled table if installed."""
        folder = self.data(SME)
        vfem = run("fit", folder, 1, cache=self.cache)
        self.report.heading(
            f"From sums to estimates and standard errors, n = {SME:,}",
            f"One normal law of 35 columns and the response; load before it {vfem['load']:.1f}: CPU seconds "
            "compare. lavaan and Amelia have all columns in one place. lavaan, medians of "
            f"{REPEATS}, frees every covariance, also of institutions that share hardly any entity; Amelia's "
            "standard errors need several imputations.",
        )
        rows = []
        for joint, limit in FROM_MOMENTS.items():
            stage = vfem["stages"][f"from moments, {joint}"]
            rows.append([f"VFEM, {joint}, observed", *seconds(stage), verdict(median(stage), limit, " s")])
        if has_r("lavaan"):
            answers = [run("lavaan", folder) for _ in range(REPEATS)]
            errors = ", ".join(f"{answer['rmse']:.4f}" for answer in (vfem["moments"], answers[0]))
            rows.append(["lavaan (R), observed", *seconds([a["stages"]["r"][0] for a in answers]), ""])
            self.report.lines += [f"Error of the coefficients, VFEM and lavaan: {errors}.", ""]
        if install_amelia():
            own = run("amelia", folder)["stages"]["r"]
            rows.append([f"Amelia (R), imputations: {AMELIA_IMPUTATIONS}", *seconds(own), ""])
        self.report.table(["method", "wall s", "CPU s", "target"], rows)
        return vfem

    def peers(self):
        folder = self.data(SME)
        vfem = run("fit", folder, cache=self.cache)
        imputed, chained = run("imputer", folder), run("mice", folder)
        cycle = chained["stages"]["mice"][0]["wall"] / MICE_CYCLES
        self.report.heading(
            "Beside imputation on pooled data",
            "The same data; both peers see all columns in one place, which VFEM does not. Error: root mean "
            "squared error of the 35 coefficients against the truth; the standard error that VFEM reports "
            f"(root mean square) is {vfem['moments']['se']:.4f}.",
            f"IterativeImputer ran {IMPUTER_ROUNDS} of its 10 default rounds; standard errors of the least "
            f"squares after it are not valid. MICE ran {MICE_CYCLES} cycles, each an imputation. The last "
            f"line was not run: it is the time of a cycle times {MICE_USUAL_CYCLES}, 10 to burn in and 20 "
            "imputations with the default 3 cycles between them.",
        )
        peers = {"IterativeImputer + OLS": (imputed, "imputer"), "MICE": (chained, "mice")}
        if install_amelia():
            peers[f"Amelia (R), imputations: {AMELIA_IMPUTATIONS}"] = (run("amelia", folder), "r")
        own = vfem["stages"]["moments"]
        rows = [["VFEM", *seconds(own), f"{own[-1]['peak']:.0f}", f"{vfem['moments']['rmse']:.4f}"]]
        for name, (answer, stage) in peers.items():
            stages = answer["stages"]
            rows.append([name, *seconds(stages[stage]), f"{highest(stages):.0f}", f"{answer['rmse']:.4f}"])
        rows.append(["MICE, extrapolated", f"{cycle * MICE_USUAL_CYCLES:,.0f}", "", "", ""])
        self.report.table(["method", "wall s", "CPU s", "peak MB", "error"], rows)
        return {"vfem": vfem, "imputer": imputed, "mice": chained}

    def nhanes(self):
        default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
        path = Path(os.environ.get("FEDSTAT_TEST_DATA", default)) / "nhanes" / "NHANESraw.csv.gz"
        if not path.exists():
            return None
        answer = run("nhanes", str(path), cache=self.cache)
        self.report.heading(
            "NHANES 2009-2012, adults, six institutions",
            f"Partition, design and fit with observed standard errors; medians of {REPEATS}; the table is "
            "in memory.",
        )
        rows = [
            [f"`{f}`", f"{answer[f]['nobs']:,}", *seconds(answer["stages"][f]), answer[f]["rounds"]]
            for f in NHANES_FORMULAS
        ]
        self.report.table(["formula", "entities", "wall s", "CPU s", "rounds"], rows)
        return answer


PARTS = ("fit", "start", "growth", "columns", "law", "peers", "nhanes")


def main(parts):
    with tempfile.TemporaryDirectory() as folder:
        workspace = Bench(folder)
        for part in parts or PARTS:
            began = time.perf_counter()
            getattr(workspace, part)()
            print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(workspace.report)
    if not parts:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(preface() + str(workspace.report))


def preface():
    import numpy as np
    import statsmodels

    import fedstat as fs

    return (
        "# VFEM: time, memory, rounds and bytes\n\n"
        f"`python tests/benchmarks/bench_vfem.py`, {date.today()}: fedstat {fs.__version__}, Python "
        f"{platform.python_version()}, numpy {np.__version__}, statsmodels {statsmodels.__version__}, "
        f"{os.cpu_count()} cores.\n\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        print(json.dumps(TASKS[sys.argv[2]](*json.loads(sys.argv[3]))))
    else:
        main(sys.argv[1:])
