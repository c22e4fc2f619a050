"""Write the folders of a site and its coordinator as an earlier version leaves them, for test_upgrade.py.

Run it with the sources of that version: ``PYTHONPATH=SOURCES:SOURCES/tests python make_state.py FOLDER``. The
archives next to this file are its output for two commits, with relative paths and without exchange and
sessions.
"""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from noisy_counts import FAMILY, STEPS, BinsRequest, request_margins

import fedstat as fs
from fedstat.errors import FedstatError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.operator.command_line import main
from fedstat.privacy.zcdp import rho_of_budget, round_to_grid

N = 120


def do(*words):
    assert main([str(word) for word in words]) == 0, words


def make_folders():
    """Make a horizontal federation of one site whose records have a key."""
    rng = np.random.default_rng(48)
    frame = {
        "patient_id": [f"N{i:04d}" for i in range(N)],
        "age": rng.integers(20, 90, N),
        "sex": rng.choice(["female", "male"], N),
        "ill": rng.integers(0, 2, N),
        "x": rng.normal(size=N).round(3),
    }
    pd.DataFrame(frame).to_csv("north.csv", index=False)
    do("federation", "new", "study", "--name", "study")
    records = ("--data", "north.csv", "--exchange", "study/exchange")
    do("site", "init", "North", "--name", "North", *records)
    described = Path("North/site.toml")
    described.write_text(described.read_text().replace('path = "', 'key = "patient_id"\npath = "', 1))
    do("federation", "join", "study", "North/card.toml")
    do("site", "pin", "North", "study")
    do("site", "describe", "North")


@contextmanager
def served(**rules):
    """Serve the site under a policy."""
    Path("North/policy.toml").write_text(Policy.strict(masked_only=False, **rules).to_toml())
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command) as process:
        try:
            status = Path("North/status.json")
            while not status.exists() or json.loads(status.read_text())["process"] != process.pid:
                assert process.poll() is None
                time.sleep(0.1)
            yield fs.ClientPartition.connect("study")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def refused(formula, partition):
    try:
        fs.FederatedOLS.from_formula(formula, partition).fit(masked=False)
    except FedstatError:
        return
    raise AssertionError(formula)


def make_state():
    """Make a fit, two refusals, an approved plan, a waiting plan, and a charge to a privacy budget."""
    with served() as partition:
        fs.FederatedOLS.from_formula("x ~ age", partition).fit(masked=False)
        refused("x ~ I(age == 33)", partition)
        refused("x ~ C(age)", partition)
    with served(approval="owner") as partition:
        refused("x ~ sex", partition)
        refused("x ~ age + sex", partition)
        waiting = sorted(Path("North/pending").glob("*.json"), key=lambda path: path.stat().st_mtime)
        do("site", "approve", "North", waiting[0].stem)
        approved = fs.ClientPartition.connect("study")
        fs.FederatedOLS.from_formula("x ~ sex", approved).fit(masked=False)
    with served(privacy=Budget(1.0, 1e-6)) as partition:
        rho = str(round_to_grid(rho_of_budget(1.0, 1e-6) / 3))
        request = request_margins([("North", BinsRequest("x", rho, (-1.0, 0.0, 1.0)))], os.urandom(8).hex())
        list(partition._engine.run(request, Ledger()))


def serve():
    """Serve the site, which answers the family of tests as well."""
    load_families()
    FAMILIES[FAMILY] = STEPS
    raise SystemExit(main(["site", "serve", "North", "--poll", "0.01"]))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    warnings.simplefilter("ignore")
    home = Path(sys.argv[1])
    home.mkdir(parents=True)
    os.chdir(home)
    make_folders()
    make_state()
