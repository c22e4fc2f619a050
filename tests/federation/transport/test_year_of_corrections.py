"""A year in fast motion: records are corrected 50 times while 20 studies make 200 analyses at one site."""

import time

import numpy as np
import pandas as pd
import pytest
from operating import make_federation
from test_records_change import POLICY, Records
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import PolicyError

N, CORRECTED = 2_000, 60
CORRECTIONS, STUDIES, ANALYSES, RESTART = 50, 20, 200, 10
FORMULAS = ("y ~ x", "y ~ z", "y ~ x + z", "z ~ x")


def frame(seed):
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(2, N)).round(4)
    return pd.DataFrame(
        {"patient_id": np.arange(N), "x": x, "z": z, "y": (x + z + rng.normal(size=N)).round(4)}
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*records have changed since:fedstat.errors.DataWarning")
def test_history_and_disk_stay_within_bounds(tmp_path, capsys):
    make_federation(tmp_path, {name: frame(seed) for seed, name in enumerate("ABC")}, policy=POLICY)
    for name in "ABC":
        toml = tmp_path / name / "site.toml"
        toml.write_text(toml.read_text().replace('# key = "patient_id"', 'key = "patient_id"', 1))
    federation, rng = Federation(tmp_path), np.random.default_rng(9)
    records, answered, refused, began = Records(federation), 0, 0, time.process_time()
    for k in range(ANALYSES):
        if k and k % (ANALYSES // CORRECTIONS) == 0:
            rows = rng.choice(N, CORRECTED, replace=False)
            records.write(
                lambda found, rows=rows: found.assign(
                    x=np.where(found.index.isin(rows), found["x"] + 0.1, found["x"])
                )
            )
            records.reload()
        if k and k % RESTART == 0:
            records.restart()
        # a study asks for the same model all year
        formula = FORMULAS[k % STUDIES % len(FORMULAS)]
        try:
            result = fs.FederatedOLS.from_formula(formula, federation.connect()).fit(masked=True)
            answered += 1
            assert result.nobs == 3 * N
        except PolicyError:
            refused += 1
        if (k + 1) % 20 == 0:
            print(f"{k + 1} analyses, {time.process_time() - began:.0f} s of the processor", flush=True)
    folder, history = tmp_path / "B", federation.sites["B"].site.data.memory
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    rows = len(history.released.cells)
    print(
        {
            "answered": answered,
            "refused": refused,
            "rows": rows,
            "columns": history.released.columns.shape[1],
            **sizes,
        }
    )
    assert answered == ANALYSES
    # each correction adds the earlier versions, and at most the columns of a fit
    assert rows <= N + (CORRECTIONS - 1) * CORRECTED
    assert history.released.columns.shape[1] <= 5 * CORRECTIONS
    assert sizes["answered.npz"] <= 4 * rows * 5 * CORRECTIONS + 40 * rows
    assert sizes["ledger.jsonl"] <= 30_000 * ANALYSES
    for site in federation.sites.values():
        site.site.site_ledger.store.close()
