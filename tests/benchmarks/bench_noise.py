"""Errors of logistic coefficients under a budget for rows, next to other methods on the same rows.

    python tests/benchmarks/bench_noise.py [RUNS]        writes results/noisy_peers.csv
    FEDSTAT_DIFFPRIVLIB=/one/bin/python python tests/benchmarks/bench_noise.py

Six correlated normal columns at three sites, delta 1e-6. diffprivlib may live in another environment
(``pip install diffprivlib "scikit-learn<1.6"``), and is left out where there is none; its guarantee has
delta 0, for pooled rows. Errors are root mean squares over runs and coefficients; those of maximum likelihood
are without noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "glm"))
from noisy_rows import bounds_of, data_of, draw, model_of

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "noisy_peers.csv"
CASES = [(n, epsilon) for n in (5_000, 20_000) for epsilon in (1.0, 3.0)]
NORM = 4.0
"""Length to which diffprivlib cuts a row; that of six normal columns is 2.4 in the mean."""


def own_fits(table: pd.DataFrame, epsilon: float) -> dict[str, np.ndarray]:
    """Coefficients of the package's regressions and of maximum likelihood."""
    bounds = bounds_of("Binomial", "normal")
    model = model_of(table, "Binomial")
    X, y = data_of(table)
    private = fs.PrivateCopulaGLM.from_formula(
        model.formula.text, model.partition, family="binomial", epsilon=epsilon, bounds=bounds
    )
    return {
        "maximum likelihood": sm.Logit(y, X).fit(disp=0).params,
        "FederatedGLM": model.fit(epsilon=epsilon, bounds=bounds).params.to_numpy(),
        "PrivateCopulaGLM": private.fit().params.to_numpy(),
    }


def peer_fits(tables: list[pd.DataFrame], epsilon: float) -> dict[str, list[list[float]]]:
    """Coefficients of diffprivlib, if there is an environment with it."""
    python = os.environ.get("FEDSTAT_DIFFPRIVLIB")
    if not python:
        return {}
    data = [data_of(table) for table in tables]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.npz"
        np.savez(path, X=np.array([X[:, 1:] for X, _ in data]), y=np.array([y for _, y in data]))
        command = [python, str(HERE / "diffprivlib_peer.py"), str(path), str(epsilon), str(NORM)]
        done = subprocess.run(command, capture_output=True, check=True, text=True, env={})
    return {f"diffprivlib, {name}": found for name, found in json.loads(done.stdout).items()}


def main(runs: int) -> pd.DataFrame:
    """Compare all methods in all cases."""
    rows = []
    for n, epsilon in CASES:
        tables, fits = [], dict[str, list]()
        for run in range(runs):
            table, beta = draw("Binomial", "normal", n, np.random.default_rng([5, run]))
            tables.append(table)
            for name, params in own_fits(table, epsilon).items():
                fits.setdefault(name, []).append(params)
        for name, found in (fits | peer_fits(tables, epsilon)).items():
            errors = np.array(found) - beta
            rows.append(
                (n, epsilon, name, runs, np.sqrt((errors**2).mean()), np.abs(errors.mean(axis=0)).max())
            )
    return pd.DataFrame(rows, columns=["rows", "epsilon", "method", "runs", "error", "largest bias"])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    table = main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    table.round(4).to_csv(RESULTS, index=False)
    print(table.pivot_table(index=["rows", "epsilon"], columns="method", values="error").round(3).to_string())
