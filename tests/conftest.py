import gc
import os
import subprocess
import sys
from pathlib import Path

# On a busy machine, threads that wait for each other over small matrices take many times as long as one. The
# variable is for processes that a test starts and for libraries that are loaded later; a plugin of pytest may
# have loaded numpy already.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A test that fails shows where.
os.environ.setdefault("FEDSTAT_TRACEBACK", "full")

import matplotlib
import pytest
from seeded_secrets import SECRETS, draw_from_seeds
from threadpoolctl import threadpool_limits

from fedstat.kernels.compiled import compiled_families
from fedstat.models import INSTALLED

threadpool_limits(int(os.environ["OPENBLAS_NUM_THREADS"]), "blas")

# Tests start about 200 processes: without compiled modules each takes five CPU seconds to load its modules,
# with them one.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

EVERY_DAY = "not slow and not benchmark and not vignette and not example and not attack"
"""Default selection of tests, as in pyproject.toml."""

COMPLETE = pytest.StashKey[bool]()
"""Whether the whole suite runs, in one process per processor."""

matplotlib.use("Agg")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite in one process per processor, where pytest-xdist is there; ``-n 0`` runs it in one.

    A file or a folder runs in one process, which begins sooner, as does what is selected with ``-m``:
    simulations have processes of their own, and benchmarks measure seconds.
    """
    complete = config.args == config.getini("testpaths") and config.option.markexpr == EVERY_DAY
    alone = config.option.usepdb or config.option.collectonly or hasattr(config, "workerinput")
    if (
        complete
        and not alone
        and config.pluginmanager.has_plugin("xdist")
        and config.option.numprocesses is None
    ):
        config.option.numprocesses, config.option.dist = "logical", "worksteal"
        config.stash[COMPLETE] = True


def pytest_sessionstart(session):
    """Compile kernels that are not yet compiled before the processes of a complete run begin.

    Processes that need the same kernel at the same time would compile it once each. Kernels that were just
    compiled also differ in their last bits from those that other processes read from numba's cache, and tests
    compare the bits of sites in both.
    """
    if session.config.stash.get(COMPLETE, False):
        count, compiled = session.config.option.numprocesses, compiled_families()
        families = [family for family in INSTALLED if family not in compiled]
        command, place = [sys.executable, "-m", "fedstat.warm_up"], session.config.rootpath
        started = [
            subprocess.Popen([*command, *families[first::count]], cwd=place, stdout=subprocess.DEVNULL)
            for first in range(min(count, len(families)))
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            pytest.exit("compiling failed: python -m fedstat.warm_up")


def pytest_collection_finish():
    """Exclude imported and collected objects from garbage collection, which takes a tenth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Exclude what is kept for tests of later files, such as shared fits: a collection took three seconds."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect(1)
        gc.freeze()


@pytest.fixture(scope="session")
def shared_data():
    """Folder of the real data sets, which are not part of the package."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDSTAT_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("real data are absent: set FEDSTAT_TEST_DATA to their folder")
    return folder


@pytest.fixture(scope="session", autouse=True)
def same_secrets():
    """Draw the secrets of each test from a seed of its own."""
    with pytest.MonkeyPatch.context() as patch:
        draw_from_seeds(patch.setattr)
        yield


@pytest.fixture(scope="session", autouse=True)
def unsynchronized_files():
    """Leave files to the operating system: to wait for the disk protects them from a loss of power only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """Begin the secrets of a fixture, which may serve several tests."""
    SECRETS.seed(f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Begin the secrets of a test."""
    SECRETS.seed(item.nodeid)
