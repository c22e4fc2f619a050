"""Correlated blocks of adults of NHANES 2009-2012: VFEM both ways, and methods that need pooled data.

Log HDL cholesterol on age and sex, of the interview, height and weight, of the examination, and testosterone,
which a laboratory took in the second of two survey periods only: most of its block is missing by design.

    python tests/benchmarks/nhanes_blocks.py        writes results/vfem_nhanes_blocks.csv
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from statsmodels.imputation.mice import MICE, MICEData

import fedstat as fs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results" / "vfem_nhanes_blocks.csv"
DATA = Path(os.environ.get("FEDSTAT_TEST_DATA", ROOT.parent / "shared" / "data"))
BLOCKS = {
    "Blood laboratory": ["hdl"],
    "Interview": ["age", "male"],
    "Examination": ["height", "weight"],
    "Hormone laboratory": ["testosterone"],
}
IMPUTATIONS = 20


def adults():
    """HDL and testosterone on a logarithmic scale, age in decades, height in dm, weight in units of 10 kg."""
    path = DATA / "nhanes" / "NHANESraw.csv.gz"
    raw = pd.read_csv(path, na_values=["", "NA"], keep_default_na=False, low_memory=False)
    raw = raw[raw["Age"] >= 20]
    columns = {
        "id": raw["ID"],
        "hdl": np.log(raw["DirectChol"]),
        "age": raw["Age"] / 10.0,
        "male": (raw["Gender"] == "male").astype(float),
        "height": raw["Height"] / 10.0,
        "weight": raw["Weight"] / 10.0,
        "testosterone": np.log(raw["Testosterone"]),
    }
    table = pd.DataFrame(columns)
    return table[table["hdl"].notna()]


def by_mice(table):
    """Chained equations with predictive means, joined by Rubin's rules."""
    np.random.seed(1)  # noqa: NPY002 (MICEData draws from this generator)
    names = [name for own in BLOCKS.values() for name in own if name != "hdl"]
    data = MICEData(table[["hdl", *names]].reset_index(drop=True))
    fit = MICE(f"hdl ~ {' + '.join(names)}", sm.OLS, data, n_skip=1).fit(5, IMPUTATIONS)
    return pd.Series(fit.params, ["Intercept", *names]), pd.Series(fit.bse, ["Intercept", *names]), len(table)


def main():
    table = adults()
    frames = {site: table[["id", *own]] for site, own in BLOCKS.items()}
    partition = fs.ClientPartition.from_frames(frames, on="id", shared_seed=1)
    warnings.simplefilter("ignore", fs.errors.FedstatWarning)
    fits = {}
    for between in ("free", "independent"):
        model = fs.VFEMRegression.from_formula("hdl ~ .", partition, between=between)
        fits[between] = model.fit()
    print(fits["independent"].independence_tests().round(3).to_string())
    print(fits["free"].independence_lr_test())
    fits |= {"complete cases": model.fit(method="cc"), "mean imputation": model.fit(method="impute")}
    found = {method: (fit.params, fit.bse, fit.nobs) for method, fit in fits.items()}
    found["MICE"] = by_mice(table)
    rows = [
        {"method": method, "coefficient": name, "estimate": params[name], "se": errors[name], "n": n}
        for method, (params, errors, n) in found.items()
        for name in params.index
    ]
    out = pd.DataFrame(rows)
    out.round(5).to_csv(RESULTS, index=False, lineterminator="\n")
    print(out.set_index(["coefficient", "method"])[["estimate", "se"]].round(4).to_string())


if __name__ == "__main__":
    main()
