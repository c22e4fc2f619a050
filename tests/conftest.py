import os
import secrets
from pathlib import Path
from random import Random

# On a busy machine, threads that wait for each other over small matrices take many times as long as one. The
# variable is for processes that a test starts and for libraries that are loaded later; a plugin of pytest may
# have loaded numpy already.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import matplotlib
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
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
    complete = config.args == config.getini("testpaths") and config.option.markexpr == EVERY_DAY
    alone = config.option.usepdb or config.option.collectonly or hasattr(config, "workerinput")
    if (
        complete
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


DRAWN = Random()
"""What keys, seeds and nonces of a test come from."""
os.register_at_fork(after_in_child=DRAWN.seed)  # sites in forked processes draw different keys


@pytest.fixture(scope="session", autouse=True)
def same_secrets():
    """Draw the secrets of each test from a seed of its own.

    The noise of private releases, randomized labels, masks and shared seeds all follow from keys. What a test
    finds of them once, it finds always: in any order, in any process, and next to any other test. Processes
    that a test starts draw from the operating system.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", DRAWN.randbytes)
        patch.setattr(secrets, "token_hex", lambda count: DRAWN.randbytes(count).hex())
        patch.setattr(secrets, "randbits", DRAWN.getrandbits)
        for kind in (Ed25519PrivateKey, X25519PrivateKey):
            patch.setattr(kind, "generate", lambda kind=kind: kind.from_private_bytes(DRAWN.randbytes(32)))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """Begin the secrets of a fixture, which may serve several tests."""
    DRAWN.seed(f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Begin the secrets of a test."""
    DRAWN.seed(item.nodeid)
