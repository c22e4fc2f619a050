"""Clusters of the published experiments, Ding (2024, Table 2), and of a noisier design with a known oracle.

Every run is a complete fit with its starts, penalties and refits. It is compared with k-means on the columns
that truly separate the clusters (unknown in practice) and, if installed, with StepMix on all columns (``pip
install stepmix``; ``FEDSTAT_STEPMIX`` may be the Python of another environment). Runs that the table already
has are not repeated. Arguments are the experiments, the number of data sets and the first seed::

    python tests/models/m2sem/experiments_simulation.py [noisy] [1] ... [5] [--runs 20] [--first 0]

It then prints the means next to the published figures; ``--runs 0`` prints them alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "m2sem_experiments.csv"
FIGURES = ["accuracy", "modality_sens", "modality_spec", "feature_sens", "feature_spec"]
PUBLISHED = {
    "1": [97.2, 98.8, 97.5, 98.6, 77.0],
    "2": [100.0, 100.0, 90.0, 99.1, 79.2],
    "3": [98.2, 100.0, 83.8, 98.9, 81.6],
    "4": [97.3, 98.8, 91.0, 98.6, 78.1],
    "5": [97.3, 97.5, 83.5, 98.2, 75.3],
}
"""Per cent, of 20 replicates each."""


def accuracy(found, truth):
    """Share of entities in the cluster that is theirs, clusters being called as fits best."""
    table = pd.crosstab(np.asarray(found), np.asarray(truth)).to_numpy()
    rows, columns = linear_sum_assignment(-table)
    return table[rows, columns].sum() / table.sum()


def numbers(data):
    """All columns as numbers, (n, p), ordinal ones by the number of their level."""
    tables = [frame.set_index(data.key) for frame in data.frames.values()]
    table = pd.concat(tables, axis=1)
    return table.apply(lambda x: x.cat.codes.astype(float) if x.dtype == "category" else x)


def oracle(data):
    """Accuracy of k-means on the standardized columns that truly separate the clusters."""
    from sklearn.cluster import KMeans

    x = numbers(data)[data.columns.index[data.columns["informative"]]]
    found = KMeans(3, n_init=20, random_state=0).fit_predict((x - x.mean()) / x.std())
    return accuracy(found, data.labels)


def stepmix(data):
    """Accuracy of StepMix's ten starts on all columns, and CPU seconds; nan where it is not installed."""
    python = os.environ.get("FEDSTAT_STEPMIX", sys.executable)
    if python == sys.executable and importlib.util.find_spec("stepmix") is None:
        return np.nan, np.nan
    x = numbers(data)
    x = x[sorted(x, key=lambda name: data.columns.loc[name, "kind"])]
    continuous = int((data.columns["kind"] == "continuous").sum())
    x.iloc[:, :continuous] -= x.iloc[:, :continuous].mean()
    x.iloc[:, :continuous] /= x.iloc[:, :continuous].std()
    with tempfile.TemporaryDirectory() as folder:
        columns, found = Path(folder) / "columns.npy", Path(folder) / "found.npy"
        np.save(columns, x.to_numpy())
        command = [python, __file__, "peer", columns, str(continuous), found]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        *labels, cpu = np.load(found)
    return accuracy(np.array(labels), data.labels), cpu


def peer(columns, continuous, out):
    """Fit StepMix; write its labels, and its CPU seconds last."""
    from stepmix import StepMix

    warnings.simplefilter("ignore")
    x, q = np.load(columns), int(continuous)
    blocks = {
        "continuous": {"model": "gaussian_diag", "n_columns": q},
        "ordinal": {"model": "categorical", "n_columns": x.shape[1] - q},
    }
    start = time.process_time()
    model = StepMix(3, measurement=blocks, n_init=10, random_state=0, verbose=0, progress_bar=0, max_iter=300)
    found = model.fit(x).predict(x)
    np.save(out, np.append(found, time.process_time() - start))


def run(experiment, seed):
    """One data set: a row of the table."""
    import fedstat as fs

    warnings.simplefilter("ignore", fs.errors.FedstatWarning)
    which = experiment if experiment == "noisy" else int(experiment)
    data = fs.datasets.make_cluster_experiment(which, seed=seed)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    start = time.process_time()
    # Masks change no digit of the selection and cost seconds, so do standard errors, which are not looked at.
    result = fs.M2SEM(partition, 3, 2).fit(masked=False, cov_type=None, seed=seed)
    cpu = time.process_time() - start
    reported = data.modalities["informative"].to_numpy()
    on = result.modalities["selected"].groupby(level="site", sort=False).any().reindex(data.modalities.index)
    features = result.features.droplevel(["site", "modality"]).reindex(data.columns.index)
    loads, loaded = features["loading"].to_numpy() > 0.0, data.columns["loaded"].to_numpy()
    informative, (rival, rival_cpu) = data.columns["informative"].to_numpy(), stepmix(data)
    return {
        "experiment": experiment,
        "seed": seed,
        "accuracy": accuracy(result.labels, data.labels),
        "oracle": oracle(data),
        "stepmix": rival,
        "modality_sens": on[reported].mean(),
        "modality_spec": 1.0 - on[~reported].mean(),
        "feature_sens": loads[informative].mean(),
        "feature_sens_all": loads[loaded].mean(),
        "feature_spec": 1.0 - loads[~loaded].mean(),
        "rounds": result.ledger.rounds,
        "cpu": cpu,
        "stepmix_cpu": rival_cpu,
    }


def table():
    """Print means by experiment, per cent, and the published figures under them."""
    runs = pd.read_csv(TABLE, dtype={"experiment": str})
    by = runs.groupby("experiment", sort=True)
    means = by[[*FIGURES, "oracle", "stepmix"]].mean() * 100
    means["runs"] = by.size()
    means[["rounds", "cpu", "stepmix_cpu"]] = by[["rounds", "cpu", "stepmix_cpu"]].mean()
    published = pd.DataFrame(PUBLISHED, index=FIGURES).T
    both = pd.concat({"here": means, "published": published.loc[published.index.intersection(means.index)]})
    print(both.sort_index(level=1, sort_remaining=False).round(1).to_string(na_rep=""))


def main(arguments):
    if arguments[:1] == ["peer"]:
        return peer(*arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", help="noisy, 1, ..., 5; default: all")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    request = parser.parse_args(arguments)
    done = pd.read_csv(TABLE, dtype={"experiment": str}) if TABLE.exists() else None
    known = ["noisy", *PUBLISHED]
    if unknown := set(request.experiments) - set(known):
        parser.error(
            f"experiments: expected some of {', '.join(known)}, received {', '.join(sorted(unknown))}"
        )
    for experiment in request.experiments or known:
        for seed in range(request.first, request.first + request.runs):
            if done is not None and ((done["experiment"] == experiment) & (done["seed"] == seed)).any():
                continue
            row = pd.DataFrame([run(experiment, seed)])
            new = not TABLE.exists()
            row.to_csv(TABLE, mode="a", header=new, index=False, float_format="%.5g", lineterminator="\n")
            print(row.round(3).to_dict("records")[0], flush=True)
    return table()


if __name__ == "__main__":
    main(sys.argv[1:])
