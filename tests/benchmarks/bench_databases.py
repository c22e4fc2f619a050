"""CPU seconds of a site with records in a PostgreSQL server, and of one with a Parquet file.

    python tests/benchmarks/bench_databases.py             5 million rows, and writes results/databases.md
    python tests/benchmarks/bench_databases.py 1000000     this number of rows, and prints the figures

Needs a PostgreSQL server that is installed; it is started by the script.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

from clock import Clock, in_a_process, peak

sys.path.append(str(Path(__file__).parents[1] / "federation" / "tables"))

ROWS, COLUMNS, CHUNK = 5_000_000, 8, 250_000
RESULTS = Path(__file__).parent / "results" / "databases.md"


def draw(n, seed):
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, COLUMNS))
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(COLUMNS)])
    frame["y"] = (rng.uniform(size=n) < 1 / (1 + np.exp(0.3 - X.sum(axis=1) / 4))).astype(float)
    frame.insert(0, "patient", np.arange(seed * CHUNK, seed * CHUNK + n))
    return frame


def write(rows, folder, address):
    """The same rows in a Parquet file and in a table of the server."""
    import psycopg
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    with psycopg.connect(address, autocommit=True) as connection:
        names = ", ".join(["patient bigint PRIMARY KEY", *(f"x{j} double precision" for j in range(COLUMNS))])
        connection.execute(f"CREATE TABLE ward ({names}, y double precision)")
        for part in range(rows // CHUNK):
            frame = draw(CHUNK, part)
            table = pa.Table.from_pandas(frame, preserve_index=False)
            writer = writer or pq.ParquetWriter(folder / "ward.parquet", table.schema)
            writer.write_table(table)
            text = frame.to_csv(index=False, header=False, float_format="%.17g")
            with connection.cursor() as cursor, cursor.copy("COPY ward FROM STDIN (FORMAT csv)") as copy:
                copy.write(text)
        connection.execute("ANALYZE ward")
    writer.close()


def fit(kind, folder, address, memory):
    """Open the records, agree on columns, fit: the whole of a site's work, in one process."""
    import fedstat as fs
    from fedstat.federation.tables.sources import Source, open_source

    where = {"kind": "parquet", "path": str(Path(folder) / "ward.parquet")}
    if kind == "sql":
        os.environ["WARD_DATABASE"] = address
        where = {"kind": "sql", "query": "SELECT * FROM ward", "env": "WARD_DATABASE"}
        where["memory"] = int(memory)
    clock = Clock()
    source = Source.from_mapping("A", where | {"key": "patient"})
    table = clock.time("open", open_source, source, Path(folder))
    partition = fs.ClientPartition.from_frames({"A": table}, layout="horizontal")
    model = clock.time("agreement", fs.GLORE.from_formula, "y ~ .", partition)
    result = clock.time("fit", model.fit)
    stages = {name: rows[0] for name, rows in clock.stages.items()}
    return {"stages": stages, "peak": peak(), "params": result.params.tolist(), "bse": result.bse.tolist()}


def compare(rows):
    from database_servers import postgresql_server

    with tempfile.TemporaryDirectory() as place, postgresql_server() as address:
        folder = Path(place)
        write(rows, folder, address)
        sources = {
            "Parquet": ("parquet", 0),
            "PostgreSQL, rows in memory": ("sql", 4_000),
            "PostgreSQL, rows in the sealed file": ("sql", 0),
        }
        found = {
            name: in_a_process(__file__, kind, folder, address, memory)
            for name, (kind, memory) in sources.items()
        }
    first = found["Parquet"]
    assert all((one["params"], one["bse"]) == (first["params"], first["bse"]) for one in found.values())
    return found


def table(rows, found):
    def cpu(one, *stages):
        return sum(one["stages"][stage]["cpu"] for stage in stages or one["stages"])

    lines = [
        f"## {rows:,} rows, {COLUMNS} numbers and a response, logistic fit (GLORE)",
        "",
        "CPU seconds of the site's process: reading, agreement on columns, fit. Estimates and standard "
        "errors are the same to the bit.",
        "",
        "| source | open | agreement | fit | in all | over Parquet | wall | peak MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found.items():
        cells = [cpu(one, "open"), cpu(one, "agreement"), cpu(one, "fit"), cpu(one)]
        wall = sum(stage["wall"] for stage in one["stages"].values())
        shown = [f"{x:.1f}" for x in cells] + [f"{cpu(one) / cpu(found['Parquet']):.2f}", f"{wall:.1f}"]
        lines.append(f"| {name} | {' | '.join(shown)} | {one['peak']:.0f} |")
    return lines


def main():
    if sys.argv[1:2] == ["task"]:
        kind, folder, address, memory = sys.argv[2:]
        print(json.dumps(fit(kind, folder, address, memory)))
        return
    rows = int(sys.argv[1]) if sys.argv[1:] else ROWS
    lines = table(rows, compare(rows))
    print("\n".join(lines))
    if rows == ROWS:
        head = [
            "# Records in a database",
            "",
            f"Written {date.today()}, Python {platform.python_version()}.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
