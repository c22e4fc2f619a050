"""Bias of penalized quasi-likelihood: ``python tests/models/mixed/quasi_likelihood.py [REPEATS [FILE]]``.

Distributed PQL (Luo et al. 2022, JAMIA 29) gives the estimate of PQL on the pooled table, here that of R's
``MASS::glmmPQL``. Its paper has no simulation of bias. The design here has small groups, for which the bias
is known (Breslow and Lin 1995, Biometrika 82), and groups of the size of hospitals, where it vanishes.
"""

import io
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs

ALLOW = fs.Policy(min_events=0, min_level_count=1, min_count=1)
TRUE = {"constant": -1.0, "slope": 1.0}
CELLS = ((200, 2, 1.0), (200, 5, 1.0), (200, 5, 2.0), (30, 50, 1.0))
"""Groups, rows of each, and standard deviation of their effects."""
PQL = """
suppressMessages({library(MASS); library(nlme)})
table <- read.csv(file("stdin"))
for (run in split(table, table$run)) {
  m <- try(glmmPQL(y ~ x, ~ 1 | group, binomial, run, verbose = FALSE), silent = TRUE)
  found <- if (inherits(m, "try-error")) rep(NA, 3) else c(fixef(m), as.numeric(VarCorr(m)[1, 2]))
  cat(found, "\\n")
}
"""


def draw(rng, groups, size, deviation, run):
    group, x = np.repeat(np.arange(groups), size), rng.normal(size=groups * size)
    eta = TRUE["constant"] + TRUE["slope"] * x + deviation * rng.normal(size=groups)[group]
    y = (rng.random(len(x)) < 1.0 / (1.0 + np.exp(-eta))).astype(int)
    return pd.DataFrame({"run": run, "site": np.where(group % 2, "A", "B"), "group": group, "x": x, "y": y})


def likelihood(table, nodes):
    partition = fs.ClientPartition.from_frame(table, by="site", policy=ALLOW)
    settings = {"family": sm.families.Binomial(), "nagq": nodes}
    fit = fs.FederatedMixed.from_formula("y ~ x + (1 | group)", partition, **settings).fit(masked=False)
    return [*fit.params, fit.variances["std_dev"].iloc[0]]


def main(repeats=200, file="/dev/stdout"):
    """Write mean estimates of slope and deviation, with simulation errors."""
    warnings.simplefilter("ignore")
    with open(file, "w", buffering=1) as out:
        print("| groups x rows, deviation | method | slope (1) | deviation |", file=out)
        print("|---|---|---|---|", file=out)
        for groups, size, deviation in CELLS:
            rng = np.random.default_rng([groups, size, int(deviation)])
            tables = [draw(rng, groups, size, deviation, run) for run in range(repeats)]
            command = ["Rscript", "-e", PQL]
            text = pd.concat(tables).to_csv(index=False)
            lines = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
            found = {"PQL": np.genfromtxt(io.StringIO(lines))}
            for name, nodes in (("Laplace", 1), ("15 nodes", 15)):
                found[name] = np.array([likelihood(table, nodes) for table in tables])
            for name, values in found.items():
                kept = values[np.isfinite(values).all(axis=1), 1:]
                error = kept.std(axis=0, ddof=1) / np.sqrt(len(kept))
                cells = " | ".join(
                    f"{m:.3f} ({e:.3f})" for m, e in zip(kept.mean(axis=0), error, strict=True)
                )
                lost = f", {repeats - len(kept)} failed" if len(kept) < repeats else ""
                print(f"| {groups} x {size}, {deviation:g} | {name}{lost} | {cells} |", file=out)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
