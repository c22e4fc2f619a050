import os
from collections import defaultdict
from itertools import count
from pathlib import Path
from random import Random

# On a busy machine, threads that wait for each other over small matrices take many times as long as one. The
# variable is for processes that a test starts and for libraries that are loaded later; a plugin of pytest may
# have loaded numpy already.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import matplotlib
import pytest
from threadpoolctl import threadpool_limits

threadpool_limits(int(os.environ["OPENBLAS_NUM_THREADS"]), "blas")

EVERY_DAY = "not slow and not benchmark and not vignette"
"""What pytest runs when it is not told otherwise, in pyproject.toml."""

matplotlib.use("Agg")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite in one process per processor, where pytest-xdist is there; ``-n 0`` runs it in one.

    A file or a folder runs in one process, which begins sooner, as does what is selected with ``-m``:
    simulations have processes of their own, and benchmarks measure seconds.
    """
    whole = config.args == config.getini("testpaths") and config.option.markexpr == EVERY_DAY
    alone = config.option.usepdb or config.option.collectonly or hasattr(config, "workerinput")
    if (
        whole
        and not alone
        and config.pluginmanager.has_plugin("xdist")
        and config.option.numprocesses is None
    ):
        config.option.numprocesses, config.option.dist = "auto", "worksteal"


@pytest.fixture(scope="session")
def shared_data():
    """Folder of the real data sets, which are not part of the package."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDSTAT_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip("real data are absent: set FEDSTAT_TEST_DATA to their folder")
    return folder


@pytest.fixture(scope="module")
def same_noise():
    """Give the noise of private releases seeds, so that what is found of it once is found of it always.

    Keys are new in every run; they get seeds in the order in which they first serve.
    """
    from fedstat.federation.disclosure import privacy_budget

    seeds = defaultdict(count().__next__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(privacy_budget, "random_bytes", lambda key: Random(seeds[key]).randbytes)
        yield
