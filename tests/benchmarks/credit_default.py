"""Default of 30,000 credit card clients, among four institutions: what is selected, and what the others say.

    python tests/benchmarks/credit_default.py

reads the table of Yeh and Lien (2009), "default of credit card clients", where it is at hand (the folder
``credit_default`` of the test data) and writes ``results/vglm_credit_*``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs

HERE = Path(__file__).parent
DATA = Path(os.environ.get("FEDSTAT_TEST_DATA", HERE.parents[2] / "shared" / "data")) / "credit_default"
SCHOOL = {1: "graduate", 2: "university", 3: "high school"}
MONTHS = (1, 2, 3, 4, 5, 6)
CLIENTS = {
    "Bank": ["default", "limit", "sex", "education", "marriage", "age"],
    "Credit bureau": [f"status{m}" for m in MONTHS],
    "Billing": [f"bill{m}" for m in MONTHS],
    "Payments": [f"paid{m}" for m in MONTHS],
}


def read():
    """One row per card holder; months count back from the last, money is in thousands."""
    raw = pd.read_csv(DATA / "UCI_Credit_Card.csv").rename(columns={"PAY_0": "PAY_1"})
    table = pd.DataFrame(
        {
            "default": raw["default.payment.next.month"].astype(float),
            "limit": raw["LIMIT_BAL"] / 1000.0,
            "sex": np.where(raw["SEX"] == 2, "female", "male"),
            "education": raw["EDUCATION"].map(SCHOOL).fillna("other"),
            "marriage": raw["MARRIAGE"].map({1: "married", 2: "single"}).fillna("other"),
            "age": raw["AGE"].astype(float),
        }
    )
    for m in MONTHS:
        table[f"status{m}"] = raw[f"PAY_{m}"].astype(float)
        table[f"bill{m}"] = raw[f"BILL_AMT{m}"] / 1000.0
        table[f"paid{m}"] = raw[f"PAY_AMT{m}"] / 1000.0
    return table


def model(table, penalty="scad"):
    partition = fs.ClientPartition.from_frame(table, columns=CLIENTS)
    family = sm.families.Binomial()
    return fs.VerticalGLM.from_formula("default ~ .", partition, family=family, penalty=penalty)


def main():
    if not DATA.exists():
        sys.exit(f"no data at {DATA}")
    table = read()
    result = model(table).fit(select="bic")
    plain = model(table, "lasso").fit(lam=0.0)
    report = result.selection_report().set_index("name").dropna(axis=1, how="all")
    report = report.join(pd.DataFrame({"unpenalized": plain.params, "unpenalized se": plain.bse}))
    report.to_csv(HERE / "results" / "vglm_credit_report.csv", float_format="%.6g", lineterminator="\n")
    path = result.path.join(result.path_params.add_prefix("b: "))
    path.to_csv(HERE / "results" / "vglm_credit_path.csv", float_format="%.6g", lineterminator="\n")
    (HERE / "results" / "vglm_credit_summary.txt").write_text(str(result.summary()) + "\n", encoding="utf-8")
    print(result.summary(), report, result.ledger.rounds, sep="\n")


if __name__ == "__main__":
    main()
