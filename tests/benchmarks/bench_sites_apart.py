"""Many institutions over a folder, each served by a process of its own: seconds and bytes of a masked fit.

A first fit, and others by processes that are warm. CPU seconds of all processes are counted as well, since a
machine may be busy; the sites are started by forking a process that has imported the package.

    python tests/benchmarks/bench_sites_apart.py        fifty sites
    python tests/benchmarks/bench_sites_apart.py 20     another number of sites
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1] / "federation" / "transport"))

from forked import Forked
from operating import wait

import fedstat as fs
from fedstat.federation.partition.federation_file import read_federation
from fedstat.federation.transport.site_folder import read_description
from fedstat.operator.command_line import main

ROWS = 60
SITES = 50


def patients(K: int) -> pd.DataFrame:
    """Sixty rows at each of K sites."""
    rng = np.random.default_rng(0)
    n = ROWS * K
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(size=n), "g": rng.choice(list("abc"), n)})
    frame["y"] = (rng.random(n) < 1 / (1 + np.exp(-frame["x"]))).astype(int)
    return frame.assign(site=[f"site{number:04d}" for number in np.arange(n) % K])


def fit(partition: fs.ClientPartition):
    return fs.GLORE.from_formula("y ~ x + z + C(g)", partition).fit(masked=True)


def spent(pids: tuple[int, ...] = ()) -> float:
    """CPU seconds of this process and of others that run."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return own.ru_utime + own.ru_stime + ticks / 100


def timed(what: str, K: int, partition: fs.ClientPartition, pids: tuple[int, ...] = ()):
    wall, cpu, own = time.perf_counter(), spent(pids), spent()
    result = fit(partition)
    wall, cpu, own = time.perf_counter() - wall, spent(pids) - cpu, spent() - own
    a_site = sum(entry.bytes for entry in result.ledger.log.passed) / K
    print(f"| {what} | {K} | {wall:.2f} | {cpu:.2f} | {own:.2f} | {a_site / 1000:.1f} |", flush=True)
    return result


def make_sites(home: Path, K: int) -> tuple[Path, list[str]]:
    """Folders as the command makes them; what it pins one by one is written at once."""
    study, names = home / "study", []
    with redirect_stdout(StringIO()):
        assert main(["federation", "new", str(study), "--name", "study"]) == 0
        for name, frame in patients(K).groupby("site"):
            data = home / f"{name}.csv"
            frame.drop(columns="site").to_csv(data, index=False)
            given = ["--name", name, "--data", str(data), "--exchange", str(study / "exchange")]
            assert main(["site", "init", str(home / name), *given]) == 0
            (home / name / "policy.toml").write_text(fs.Policy.open().to_toml())
            assert main(["site", "pin", str(home / name), str(study)]) == 0
            assert main(["federation", "join", str(study), str(home / name)]) == 0
            names.append(name)
    keys = read_federation(study).sites
    for name in names:
        path = home / name / "site.toml"
        text, known = path.read_text(), read_description(home / name).pinned
        pins = "".join(f'{other} = "{key}"\n' for other, key in keys.items() if other not in known)
        path.write_text(text.replace("[pinned]\n", f"[pinned]\n{pins}"))
    return study, names


def apart(K: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        study, names = make_sites(home, K)
        running = {
            name: Forked(main, ("site", "serve", str(home / name)), log=home / name / "log.txt")
            for name in names
        }
        try:
            for name, process in running.items():
                wait(home / name, process, seconds=600)
            partition, pids = fs.ClientPartition.connect(study), tuple(one.pid for one in running.values())
            timed("first", K, partition, pids)
            timed("warm", K, partition, pids)
            again = timed("warm", K, partition, pids)
            here = fit(fs.ClientPartition.from_frame(patients(K), by="site"))
            np.testing.assert_allclose(again.params, here.params, rtol=1e-12)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def run(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    head = ("fit", "sites", "seconds", "CPU seconds", "of these the coordinator's process", "kB a site")
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    apart(int(arguments[0]) if arguments else SITES)


if __name__ == "__main__":
    run(sys.argv[1:])
