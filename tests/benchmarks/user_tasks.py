"""What users wait for, as tasks: each function prepares one and returns the part that is timed.

`bench_user.py` runs them, each in a process of its own. Peers may live in an environment without fedstat,
so libraries are imported inside the functions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from bench_glm import draw as draw_rows
from bench_vfem import read as read_sme
from bench_vfem import write as write_sme

ROOT = Path(__file__).parents[2]
SITES, LAMBDAS, RATIO = 10, 50, 1e-2


# ---- data, drawn into files beforehand -------------------------------------------------------------


def no_data(folder, *sizes):
    pass


def enterprises(folder, n):
    write_sme(folder, int(n))


def rows_of_sites(folder, n, columns):
    frame = draw_rows(int(n), int(columns))
    frame["site"] = [str(i % SITES) for i in range(int(n))]
    frame.to_parquet(folder / "rows.parquet", index=False)


def treated_rows(folder, n, columns):
    """Rows of ten sites with two arms and an outcome that depend on all columns."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    n, columns = int(n), int(columns)
    X = rng.normal(size=(n, columns))
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(columns)])
    frame["t"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-X @ rng.normal(0.0, 0.15, columns)))).astype(int)
    frame["y"] = 0.5 * frame["t"] + X @ rng.normal(0.0, 0.3, columns) + rng.normal(size=n)
    frame["site"] = [str(i % 10) for i in range(n)]
    frame.to_parquet(folder / "treated.parquet", index=False)


def times_of_sites(folder, n, columns):
    """Exponential times on a grid of 1/200 with a third of the rows censored, at four sites."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    n, columns = int(n), int(columns)
    X = rng.normal(size=(n, columns))
    time = rng.exponential(size=n) / np.exp(X @ rng.normal(0.0, 0.2, columns))
    end = 2.0 * rng.exponential(size=n)
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(columns)])
    frame["time"] = np.ceil(np.minimum(time, end) * 200.0) / 200.0
    frame["event"], frame["arm"] = (time <= end).astype(int), rng.choice(["a", "b"], n)
    frame["site"] = rng.integers(0, 4, n).astype(str)
    frame.to_csv(folder / "times.csv", index=False)


def grades_of_sites(folder, n, columns):
    """Four grades by a logistic latent variable, at four sites."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    n, columns = int(n), int(columns)
    X = rng.normal(size=(n, columns))
    latent = X @ rng.normal(0.0, 0.3, columns) + rng.logistic(size=n)
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(columns)])
    frame["y"], frame["site"] = np.digitize(latent, [-1.0, 0.5, 2.0]), rng.integers(0, 4, n).astype(str)
    frame.to_parquet(folder / "grades.parquet")


def visits_of_sites(folder, people):
    """Five binary responses of each person, at five sites."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    people = int(people)
    person = np.repeat(np.arange(people), 5)
    frame = pd.DataFrame(
        {"person": person, "visit": np.tile(np.arange(5.0), people), "arm": person % 2 * 1.0}
    )
    frame["x"], frame["z"] = rng.normal(size=len(person)), rng.normal(size=people)[person]
    eta = 0.3 * frame["x"] + 0.2 * frame["arm"] - 0.1 * frame["visit"] + 0.2 * frame["z"]
    latent = eta + rng.normal(size=people)[person]
    frame["y"] = (rng.random(len(person)) < 1.0 / (1.0 + np.exp(-latent))) * 1
    frame["site"] = (person % 5).astype(str)
    frame.to_parquet(folder / "visits.parquet", index=False)


def visits_of_patients(folder, sites, patients):
    """A number and a binary response at five visits of each patient; patients are within sites."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    people = int(sites) * int(patients)
    patient = np.repeat(np.arange(people), 5)
    frame = pd.DataFrame({"patient": patient, "t": np.tile(np.arange(5.0), people), "arm": patient % 2 * 1.0})
    frame["x"], frame["site"] = rng.normal(size=len(patient)), (patient // int(patients)).astype(str)
    eta = 0.2 * frame["t"] + 0.3 * frame["x"] + 0.2 * frame["arm"] + rng.normal(size=people)[patient]
    of_site = 0.3 * rng.normal(size=int(sites))[patient // int(patients)]
    frame["y"] = 1.0 + eta + of_site + rng.normal(size=len(patient))
    frame["b"] = (rng.random(len(patient)) < 1.0 / (1.0 + np.exp(0.5 - eta))) * 1
    frame.to_csv(folder / "patients.csv", index=False)


def stream(folder, n, columns):
    """Rows of one site, drawn in parts, because the whole table needs not fit into memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = min(int(n), 1_000_000)
    writer = None
    for seed in range(int(n) // part):
        table = pa.Table.from_pandas(draw_rows(part, int(columns), seed=seed), preserve_index=False)
        writer = writer or pq.ParquetWriter(folder / "rows.parquet", table.schema)
        writer.write_table(table)
    writer.close()


def columns_of_sites(folder, n, columns, family):
    """Equally correlated standardized columns of five sites, 20 of them with an effect, and a response."""
    import numpy as np
    import pandas as pd

    n, p = int(n), int(columns)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, p)) + 0.5 * rng.normal(size=(n, 1))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    eta = X[:, :20] @ (0.3 * (-1.0) ** np.arange(20))
    binary = (rng.random(n) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    y = binary if family == "binomial" else eta + rng.normal(size=n)
    largest = np.abs(X.T @ (y - y.mean())).max() / n
    lambdas = largest * RATIO ** (np.arange(LAMBDAS) / (LAMBDAS - 1))
    for name, values in {"X": X.T, "y": y, "lambdas": lambdas}.items():
        np.ascontiguousarray(values).tofile(folder / name)
    for k, block in enumerate(np.array_split(np.arange(p), 5)):
        frame = pd.DataFrame(X[:, block], columns=[f"x{j}" for j in block])
        frame.insert(0, "id", np.arange(n))
        (frame.assign(y=y) if k == 0 else frame).to_parquet(folder / f"site{k}.parquet", index=False)


def balance_sheets(folder, n):
    """59 ratios of drawn balance sheets at three sites: skewed, nearly collinear, with missing cells."""
    import numpy as np
    import pandas as pd

    n, p = int(n), 59
    rng = np.random.default_rng(0)
    size, noise = rng.normal(size=(n, 1)), rng.normal(size=(n, 14))
    amounts = np.exp(size + 0.6 * noise + 0.3 * rng.standard_t(4, size=(n, 14)))
    pairs = [(i, j) for i in range(14) for j in range(14) if i != j]
    rng.shuffle(pairs)
    X = np.empty((n, p))
    for column, (i, j) in enumerate(pairs[:p]):
        other = amounts[:, rng.integers(14)]
        ratio = (amounts[:, i] - (rng.random() < 0.5) * 0.8 * other) / (amounts[:, j] + 0.3 * other)
        if column % 9 == 5:
            ratio = 0.95 * X[:, column - 1] + 0.05 * ratio
        X[:, column] = np.clip(ratio, *np.quantile(ratio, [0.01, 0.99]))
    y = X[:, :10] @ rng.normal(size=10) * 0.1 + 0.3 * rng.standard_t(5, size=n)
    for _ in range(12):
        block = rng.choice(p, rng.integers(1, 6), replace=False)
        X[np.ix_(rng.random(n) < rng.choice([0.002, 0.005, 0.01, 0.02]), block)] = np.nan
    X[rng.random(n) < 0.43, 36] = np.nan
    np.save(folder / "joined.npy", np.column_stack([X, y]))
    for k, block in enumerate(np.array_split(np.arange(p), 3)):
        frame = pd.DataFrame(X[:, block], columns=[f"x{j}" for j in block])
        frame.insert(0, "id", np.arange(n))
        (frame.assign(y=y) if k == 0 else frame).to_parquet(folder / f"site{k}.parquet", index=False)


def site_frames(folder):
    import pandas as pd

    return {path.stem: pd.read_parquet(path) for path in sorted(folder.glob("site*.parquet"))}


# ---- fedstat: partition, model, fit with errors, summary -------------------------------------------


def complete(partition, family, formula, options=None, **arguments):
    """Model, fit and printed summary; the result."""
    result = family.from_formula(formula, partition, **(options or {})).fit(**arguments)
    str(result.summary())
    return result


def import_fedstat(folder):
    return lambda: __import__("fedstat") and None


def import_family(folder):
    return lambda: __import__("fedstat").GLORE and None


def readme(folder, number):
    """One example of README.md in a process of its own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return lambda: run_child(sys.executable, "-c", blocks[int(number) - 1])


def run_child(*command):
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


def hospitals(folder, rules):
    import fedstat as fs

    frame = fs.datasets.make_hospitals()
    policies = {name: fs.Policy.strict() for name in frame["hospital"].unique()} if rules == "strict" else {}

    def run():
        partition = fs.ClientPartition.from_frame(frame, by="hospital", policies=policies)
        return complete(partition, fs.GLORE, "num > 0 ~ age + sex + C(cp) + trestbps")

    run()
    return run


def vfem(folder, n):
    import fedstat as fs

    write = tempfile.mkdtemp(dir=folder)
    write_sme(write, 2_000)
    frames, study = read_sme(folder)
    formula = f"{study['response']} ~ ."

    def run(frames=frames):
        return complete(fs.ClientPartition.from_frames(frames, on=study["key"]), fs.VFEMRegression, formula)

    run(read_sme(write)[0])
    return run


def vfem_many_columns(folder, n):
    import fedstat as fs

    frames = site_frames(folder)

    def run(take=int(n), formula="y ~ ."):
        few = {name: frame.head(take) for name, frame in frames.items()}
        return complete(fs.ClientPartition.from_frames(few, on="id"), fs.VFEMRegression, formula)

    run(1_000, "y ~ x0 + x1 + x20 + x40")
    return run


def glore(folder, n, columns):
    import pandas as pd

    import fedstat as fs

    frame = pd.read_parquet(folder / "rows.parquet")

    def run(rows=frame):
        return complete(fs.ClientPartition.from_frame(rows, by="site"), fs.GLORE, "y ~ .")

    run(frame.head(20_000))
    return run


def treatment_effect(folder, n, columns):
    import pandas as pd

    import fedstat as fs

    frame = pd.read_parquet(folder / "treated.parquet")
    terms = " + ".join(f"x{j}" for j in range(int(columns)))

    def run(rows=frame):
        partition = fs.ClientPartition.from_frame(rows, by="site")
        return complete(partition, fs.TreatmentEffect, f"y ~ {terms}", {"treatment": f"t ~ {terms}"})

    run(frame.head(20_000))
    return run


def statsmodels_treatment(folder, n, columns):
    import pandas as pd
    import statsmodels.api as sm
    from statsmodels.treatment.treatment_effects import TreatmentEffect

    frame = pd.read_parquet(folder / "treated.parquet")
    X = sm.add_constant(frame[[f"x{j}" for j in range(int(columns))]])

    def run():
        chosen = sm.Logit(frame["t"], X).fit(disp=False)
        effect = TreatmentEffect(sm.OLS(frame["y"], X), frame["t"], results_select=chosen).aipw(disp=False)
        str(effect.summary_frame())

    return run


def cox(folder, n, columns):
    import pandas as pd

    import fedstat as fs

    frame = pd.read_csv(folder / "times.csv", dtype={"site": str})
    formula = "Surv(time, event) ~ " + " + ".join(f"x{j}" for j in range(int(columns)))

    def run(rows=frame):
        return complete(fs.ClientPartition.from_frame(rows, by="site"), fs.FederatedCox, formula)

    run(frame.head(4_000))
    return run


def mixed_linear(folder, sites, patients):
    return mixed(folder, "y ~ t + x + arm + (1 | patient) + (1 | site)")


def mixed_logistic(folder, sites, patients):
    import statsmodels.api as sm

    return mixed(folder, "b ~ t + x + arm + (1 | patient)", family=sm.families.Binomial(), nagq=9)


def mixed(folder, formula, **settings):
    import pandas as pd

    import fedstat as fs

    frame = pd.read_csv(folder / "patients.csv", dtype={"site": str})

    def run(rows=frame):
        partition = fs.ClientPartition.from_frame(rows, by="site")
        result = fs.FederatedMixed.from_formula(formula, partition, **settings).fit()
        str(result.summary())
        return result

    run(frame[frame["patient"] % 40 < 2])
    return run


VISITS = "y ~ x + z + arm + visit"


def gee(folder, people):
    import pandas as pd
    import statsmodels.api as sm

    import fedstat as fs

    frame = pd.read_parquet(folder / "visits.parquet")
    settings = {"groups": "person", "family": sm.families.Binomial(), "cov_struct": "exchangeable"}

    def run(rows=frame):
        partition = fs.ClientPartition.from_frame(rows, by="site")
        return complete(partition, fs.FederatedGEE, VISITS, settings)

    run(frame.head(4_000))
    return run


def statsmodels_gee(folder, people):
    import pandas as pd
    import statsmodels.api as sm
    import statsmodels.formula.api as smf
    from statsmodels.genmod.cov_struct import Exchangeable

    frame = pd.read_parquet(folder / "visits.parquet")

    def run():
        model = smf.gee(VISITS, "person", frame, family=sm.families.Binomial(), cov_struct=Exchangeable())
        str(model.fit(ctol=1e-8).summary())

    return run


def cox_common(folder, n, columns):
    """The same with one baseline hazard, on 40 intervals."""
    import pandas as pd

    import fedstat as fs

    frame = pd.read_csv(folder / "times.csv", dtype={"site": str})
    formula = "Surv(time, event) ~ " + " + ".join(f"x{j}" for j in range(int(columns)))

    def run(rows=frame):
        model = fs.FederatedCox.from_formula(formula, fs.ClientPartition.from_frame(rows, by="site"))
        result = model.fit(baseline="common", grid=0.1, until=4)
        str(result.summary())
        return result

    run(frame.head(4_000))
    return run


def ordinal(folder, n, columns):
    return categories(folder, "FederatedOrdinal", columns)


def multinomial(folder, n, columns):
    return categories(folder, "FederatedMultinomial", columns)


def categories(folder, family, columns):
    import pandas as pd

    import fedstat as fs

    frame, formula = pd.read_parquet(folder / "grades.parquet"), f"y ~ {slopes(columns)}"

    def run(rows=frame):
        return complete(fs.ClientPartition.from_frame(rows, by="site"), getattr(fs, family), formula)

    run(frame.head(4_000))
    return run


def kaplan_meier(folder, n, columns):
    import pandas as pd

    import fedstat as fs

    frame = pd.read_csv(folder / "times.csv", dtype={"site": str}, usecols=["time", "event", "arm", "site"])

    def run(rows=frame):
        partition = fs.ClientPartition.from_frame(rows, by="site")
        model = fs.KaplanMeier.from_formula("Surv(time, event) ~ arm", partition)
        fit = model.fit(grid=0.05, until=4)
        str(fit.summary())
        return fit

    run(frame.head(4_000))
    return run


def glore_streamed(folder, n, columns):
    import fedstat as fs

    path = folder / "rows.parquet"
    draw_rows(20_000, int(columns)).to_parquet(folder / "few.parquet", index=False)

    def run(file=path):
        partition = fs.ClientPartition.from_files({"A": file}, layout="horizontal")
        return complete(partition, fs.GLORE, "y ~ .")

    run(folder / "few.parquet")
    return run


def vertical_glm(folder, n, columns, family):
    import numpy as np
    import statsmodels.api as sm

    import fedstat as fs

    frames, lambdas = site_frames(folder), np.fromfile(folder / "lambdas")
    families = {"gaussian": sm.families.Gaussian, "binomial": sm.families.Binomial}

    def run(take=int(n), lambdas=lambdas):
        few = {name: frame.head(take) for name, frame in frames.items()}
        partition = fs.ClientPartition.from_frames(few, on="id")
        options = {"family": families[family](), "penalty": "lasso"}
        return complete(partition, fs.VerticalGLM, "y ~ .", options, lambdas=lambdas)

    run(2_000, lambdas[:3])
    return run


def m2sem(folder):
    import fedstat as fs

    def run(n=400):
        data = fs.datasets.make_cluster_experiment("noisy", n, seed=0)
        result = fs.M2SEM(fs.ClientPartition.from_frames(data.frames, on=data.key), 3, 2).fit()
        str(result.summary())
        return result

    run(120)
    return run


def many_sites(folder, n_sites):
    import numpy as np

    import fedstat as fs

    frame = draw_rows(200 * int(n_sites), 2)
    frame["site"] = np.repeat([f"h{k:03d}" for k in range(int(n_sites))], 200)

    def run(rows=frame):
        partition = fs.ClientPartition.from_frame(rows, by="site")
        return complete(partition, fs.GLORE, "y ~ x0 + x1")

    run(frame.head(800))
    return run


# ---- peers, which have all data in one place -------------------------------------------------------


def import_statsmodels(folder):
    return lambda: __import__("statsmodels.api") and None


def import_lifelines(folder):
    return lambda: __import__("lifelines") and None


def statsmodels_hospitals(folder, rules):
    import statsmodels.formula.api as smf

    import fedstat as fs

    frame = fs.datasets.make_hospitals().assign(ill=lambda table: (table["num"] > 0).astype(int))

    def run():
        str(smf.logit("ill ~ age + sex + C(cp) + trestbps", frame).fit(disp=0).summary())

    run()
    return run


def statsmodels_sites(folder, n_sites):
    import statsmodels.formula.api as smf

    frame = draw_rows(200 * int(n_sites), 2)
    return lambda: str(smf.logit("y ~ x0 + x1", frame).fit(disp=0).summary()) and None


def numpy_em(folder, n):
    """EM of the joint normal moments by pattern sums, to a relative change of 1e-10; no standard errors."""
    import numpy as np

    if (folder / "joined.npy").exists():
        joined = np.load(folder / "joined.npy")
    else:
        frames, study = read_sme(folder)
        tables = [frame.set_index(study["key"]) for frame in frames.values()]
        joined = tables[0].join(tables[1:], how="outer").to_numpy(dtype=float)
    joined = joined[~np.isnan(joined).all(axis=1)]
    return lambda: maximize_by_em(joined)


def maximize_by_em(X, tolerance=1e-10, maxiter=5_000):
    import numpy as np

    X = (X - np.nanmean(X, axis=0)) / np.nanstd(X, axis=0)
    n, p = X.shape
    seen = ~np.isnan(X)
    patterns, which = np.unique(seen, axis=0, return_inverse=True)
    sums = []
    for k, pattern in enumerate(patterns):
        rows = X[which.ravel() == k][:, pattern]
        sums.append(
            (np.flatnonzero(pattern), np.flatnonzero(~pattern), len(rows), rows.sum(0), rows.T @ rows)
        )
    mean, cov, before = np.zeros(p), np.eye(p), -np.inf
    for _ in range(maxiter):
        first, second, likelihood = np.zeros(p), np.zeros((p, p)), 0.0
        for o, m, count, total, products in sums:
            inverse = np.linalg.inv(cov[np.ix_(o, o)])
            centered = products - np.outer(total, mean[o]) - np.outer(mean[o], total)
            centered += count * np.outer(mean[o], mean[o])
            determinant = np.linalg.slogdet(inverse)[1]
            likelihood += 0.5 * (count * determinant - (inverse * centered).sum())
            B = cov[np.ix_(m, o)] @ inverse
            A = np.zeros((p, len(o)))
            A[o], A[m] = np.eye(len(o)), B
            shift = total - count * mean[o]
            first += A @ shift
            second += A @ centered @ A.T
            second[np.ix_(m, m)] += count * (cov[np.ix_(m, m)] - B @ cov[np.ix_(o, m)])
        step = first / n
        mean, cov = mean + step, second / n - np.outer(step, step)
        if abs(likelihood - before) <= tolerance * abs(likelihood):
            break
        before = likelihood


def glum(folder, n, columns):
    """From the file if it is one site's, else from the table; with standard errors."""
    import numpy as np
    import pandas as pd
    from glum import GeneralizedLinearRegressor

    path = folder / "rows.parquet"
    names = [f"x{j}" for j in range(int(columns))]
    held = None if int(n) > 1_000_000 else pd.read_parquet(path)

    def run():
        frame = pd.read_parquet(path) if held is None else held
        X, y = np.ascontiguousarray(frame[names].to_numpy()), frame["y"].to_numpy()
        model = GeneralizedLinearRegressor(family="binomial", alpha=0, gradient_tol=1e-8).fit(X, y)
        model.covariance_matrix(X, y, robust=False, expected_information=True)

    return run


def statsmodels_rows(folder, n, columns):
    import pandas as pd
    import statsmodels.api as sm

    frame = pd.read_parquet(folder / "rows.parquet")
    names = [f"x{j}" for j in range(int(columns))]

    def run():
        model = sm.GLM(frame["y"], sm.add_constant(frame[names]), family=sm.families.Binomial())
        str(model.fit().summary())

    return run


def glmnet(folder, n, columns, family):
    """The same lambdas; R times the fits, without its start and the reading of data."""
    algorithm = {"gaussian": "covariance", "binomial": "Newton"}[family]
    script = Path(__file__).with_name("glmnet_peer.R")

    def run():
        command = ["Rscript", script, folder, n, columns, family, algorithm, 1, "1e-7"]
        done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
        cpu, wall = map(float, done.stdout.splitlines()[-1].split()[1:])
        return {"cpu": cpu, "wall": wall}

    return run


def ordered_model(folder, n, columns):
    """statsmodels' OrderedModel of the same rows, by BFGS, which is its faster method."""
    import pandas as pd
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    frame = pd.read_parquet(folder / "grades.parquet")
    y = frame["y"].astype(pd.CategoricalDtype(ordered=True))
    X = frame[[f"x{j}" for j in range(int(columns))]]
    return lambda: str(OrderedModel(y, X, distr="logit").fit(method="bfgs", disp=0).summary()) and None


def mnlogit(folder, n, columns):
    """statsmodels' MNLogit of the same rows, by Newton's method."""
    import pandas as pd
    import statsmodels.api as sm

    frame = pd.read_parquet(folder / "grades.parquet")
    X = sm.add_constant(frame[[f"x{j}" for j in range(int(columns))]])
    return lambda: str(sm.MNLogit(frame["y"], X).fit(disp=0).summary()) and None


def coxph(folder, n, columns):
    """R's coxph of the same rows, stratified by site, without the reading of data."""
    return survival_peer(folder, f"coxph(Surv(time, event) ~ {slopes(columns)} + strata(site), d)")


def lifelines_cox(folder, n, columns):
    """The same rows by lifelines, with errors and without a summary."""
    import pandas as pd
    from lifelines import CoxPHFitter

    frame = pd.read_csv(folder / "times.csv", dtype={"site": str})
    columns = [f"x{j}" for j in range(int(columns))]
    kept = frame[["time", "event", "site", *columns]]
    return lambda: CoxPHFitter().fit(kept, "time", "event", strata=["site"]) and None


def coxph_common(folder, n, columns):
    """R's coxph of times that are rounded up to 40 intervals."""
    rounded = "d$time <- pmin(ceiling(d$time * 10) / 10, 4); d$event <- d$event * (d$time <= 4)"
    return survival_peer(folder, f"coxph(Surv(time, event) ~ {slopes(columns)}, d)", rounded)


def survfit(folder, n, columns):
    """R's survfit of the same rows, without the reading of data."""
    return survival_peer(folder, "summary(survfit(Surv(time, event) ~ arm, d), times = seq(0.05, 4, 0.05))")


def slopes(columns):
    return " + ".join(f"x{j}" for j in range(int(columns)))


def lmer(folder, sites, patients):
    """R's lmer of the same rows, without the reading of data."""
    call = "lme4::lmer(y ~ t + x + arm + (1 | patient) + (1 | site), d)"
    return r_peer(folder / "patients.csv", "lme4", call)


def glmer(folder, sites, patients):
    """R's glmer of the same rows with 9 nodes."""
    call = "lme4::glmer(b ~ t + x + arm + (1 | patient), d, family = binomial, nAGQ = 9)"
    return r_peer(folder / "patients.csv", "lme4", call)


def survival_peer(folder, call, before=""):
    return r_peer(folder / "times.csv", "survival", call, before)


def r_peer(file, library, call, before=""):
    code = f"library({library}); d <- read.csv({str(file)!r}); {before}\n"
    code += f"t <- system.time({call}); "
    code += "cat(t[['user.self']] + t[['sys.self']], t[['elapsed']])"

    def run():
        done = subprocess.run(["Rscript", "-e", code], check=True, capture_output=True, text=True)
        cpu, wall = map(float, done.stdout.splitlines()[-1].split())
        return {"cpu": cpu, "wall": wall}

    return run


def sklearn_lasso(folder, n, columns, family):
    """The same lambdas by coordinate descent on the rows."""
    import numpy as np
    from sklearn.linear_model import lasso_path

    X = np.fromfile(folder / "X").reshape(int(columns), int(n)).T
    y, lambdas = np.fromfile(folder / "y"), np.fromfile(folder / "lambdas")
    return lambda: lasso_path(X, y - y.mean(), alphas=lambdas, tol=1e-7) and None


def cluster_columns():
    """Columns of the clusters' table as numbers, continuous ones first, and how many are continuous."""
    import fedstat as fs

    sys.path.insert(0, str(ROOT / "tests" / "models" / "m2sem"))
    from experiments_simulation import numbers

    data = fs.datasets.make_cluster_experiment("noisy", seed=0)
    x = numbers(data)
    x = x[sorted(x, key=lambda name: data.columns.loc[name, "kind"])]
    return x.to_numpy(dtype=float, copy=True), int((data.columns["kind"] == "continuous").sum())


def clusters(folder):
    import numpy as np

    X, continuous = cluster_columns()
    X[:, :continuous] -= X[:, :continuous].mean(axis=0)
    X[:, :continuous] /= X[:, :continuous].std(axis=0)
    np.save(folder / "columns.npy", X)
    (folder / "continuous").write_text(str(continuous))


def stepmix(folder):
    """Ten starts on all columns; no standard errors."""
    import numpy as np
    from stepmix import StepMix

    X, q = np.load(folder / "columns.npy"), int((folder / "continuous").read_text())
    blocks = {
        "continuous": {"model": "gaussian_diag", "n_columns": q},
        "ordinal": {"model": "categorical", "n_columns": X.shape[1] - q},
    }
    options = {"n_init": 10, "random_state": 0, "verbose": 0, "progress_bar": 0, "max_iter": 300}
    return lambda: StepMix(3, measurement=blocks, **options).fit(X) and None


# ---- the process of one task -------------------------------------------------------------------------


def measure(name, folder, repeats, *sizes):
    """Medians of wall and CPU seconds, children included, with peak memory, bytes sent and rounds."""
    import resource
    import statistics
    import time

    from clock import peak

    warnings.simplefilter("ignore")
    run = globals()[name](Path(folder), *sizes)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    times, sent = [], {}
    for _ in range(int(repeats)):
        wall, cpu = time.perf_counter(), time.process_time()
        found = run()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        before, children = children, resource.getrusage(resource.RUSAGE_CHILDREN)
        spent["cpu"] += children.ru_utime + children.ru_stime - before.ru_utime - before.ru_stime
        times.append(found if isinstance(found, dict) else spent)
        ledger = getattr(found, "ledger", None)
        sent = {"bytes": getattr(ledger, "bytes", None), "rounds": getattr(ledger, "rounds", None)}
        del found
    memory = max(peak(), children.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3))
    middle = {key: statistics.median(row[key] for row in times) for key in ("wall", "cpu")}
    return middle | {"peak": memory} | sent


def prepare(name, folder, *sizes):
    globals()[name](Path(folder), *sizes)
    return {}


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    print(json.dumps({"measure": measure, "prepare": prepare}[sys.argv[2]](*sys.argv[3:])))
